"""The command that makes a run: train."""

import inspect
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import Field, fields, replace
from datetime import timedelta
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from loopfold.cli.base import TrustOption, app, cells, completing, devices, echo, flag, rank, several
from loopfold.cli.usage import needed
from loopfold.errors import OptionError
from loopfold.training.effects import check_effect
from loopfold.training.options import CHANGEABLE, KEPT, PANELS, Options
from loopfold.training.presets import PRESETS, preset

if TYPE_CHECKING:
    from loopfold.training.run import Run

OPTIONS = {option.name: option for option in fields(Options)}
TEXT = OPTIONS.pop("sources")
SEPARATED = {"split": "/", "hidden_size": "-"}  # several numbers in one word, and what stands between them
TYPED: dict[str, Any] = dict.fromkeys(SEPARATED, str) | {"valid": list[str], "test": list[str]}  # two are not one
UNITS = {"char": "characters", "chars": "characters", "character": "characters", "byte": "bytes", "word": "words"}
UNITS |= {"subword": "subwords", "bpe": "subwords"}
ALSO = {"unit": UNITS, "cell": {"rnn": "elman"}, "precision": {"bfloat16": "bf16", "fp32": "float32"}}  # other names


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a flag for each option of a run in place of its `**options`, panel by panel."""
    hints, signature = get_type_hints(Options), inspect.signature(command)
    text, *own = [parameter for name, parameter in signature.parameters.items() if name != "options"]
    panels = {
        panel: [_flag(OPTIONS[k], TYPED.get(k, hints[k]), panel) for k in names if k in OPTIONS]
        for panel, names in PANELS.items()
    }
    for parameter in own:
        info = copy(parameter.annotation.__metadata__[0])  # one that other commands have too stays as it is
        panel = info.rich_help_panel = info.rich_help_panel or "Run"
        kind: Any = get_args(parameter.annotation)[0]
        place = 0 if panel == "Model" else len(panels[panel])  # a preset before its parts
        panels[panel].insert(
            place, parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, info])
        )
    flags = [parameter for parameters in panels.values() for parameter in parameters]
    command.__signature__ = signature.replace(parameters=[text, *flags])  # type: ignore[attr-defined]
    return command


def _flag(option: Field[Any], kind: Any, panel: str) -> inspect.Parameter:
    """None by default, which leaves the option to the preset."""
    about = f"{option.metadata['help']} {_defaults(option.name)}"
    alias = option.metadata["alias"]
    names = [flag(option.name), flag(alias)] if alias else []
    complete = _completion(option)
    place = "PLACE" if kind == list[str] else None
    info = typer.Option(
        *names, help=about, show_default=False, rich_help_panel=panel, autocompletion=complete, metavar=place
    )
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )


def _completion(option: Field[Any]) -> Callable[[str], list[str]] | None:
    """What the shell offers for an option: names, where its value is one."""
    limits = option.metadata["limits"]
    known = {"cell": cells, "device": devices}
    return completing(*limits) if isinstance(limits, tuple) else known.get(option.name)


def _defaults(name: str) -> str:
    """What an option is in the first preset, and in those that differ from it; nothing where all leave it out."""
    presets: dict[str, list[str]] = {}
    for known in PRESETS:
        presets.setdefault(_spelt(name, getattr(preset(known), name)), []).append(known)
    first, *others = presets
    said = "; ".join([first, *(f"{', '.join(presets[value])}: {value}" for value in others)])
    return f"[default: {said}]" if said else ""


def _spelt(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return SEPARATED[name].join(map(str, value)) if isinstance(value, tuple) else "" if value is None else str(value)


# ------------------------------------------------------------------ train


@app.command(
    epilog="**Example:** `loopfold train shakespeare.txt --preset standard --out runs/bard`, then "
    "`loopfold generate runs/bard --prompt 'ROMEO:'`. Under `torchrun --nproc-per-node 2 -m loopfold train …` the "
    "streams are shared by two processes."
)
@with_flags
def train(
    text: Annotated[list[str] | None, typer.Argument(help=TEXT.metadata["help"], show_default=False)] = None,
    preset_name: Annotated[
        str | None,
        typer.Option(
            "--preset",
            autocompletion=completing(*PRESETS),
            help="A start for all that follows, which other flags change: quick (a minute or two), standard (ten "
            "minutes), words, or words-large (for a GPU). [default: quick]",
            rich_help_panel="Model",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run folder to make. [default: runs/TEXT-CELL-N]", show_default=False)
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Go on with a run that was stopped or killed, or has ended: then with more --epochs, or --patience. "
            "The learning rate is where it would be, had the run had as many from the start. --evaluate-every and "
            "--device may change too.",
        ),
    ] = None,
    moved: Annotated[
        list[str] | None,
        typer.Option(
            "--text", metavar="PLACE", help="With --resume: the new place of a text that moved; again for each file."
        ),
    ] = None,
    from_run: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="Fine-tune: start with the weights of another run, its vocabulary, its model and its other options.",
        ),
    ] = None,
    save_every: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds from one checkpoint to the next. [default: 30]")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be trained and how long it takes; write nothing.")
    ] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write events for TensorBoard too.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the path of the run folder alone.")] = False,
    trust: TrustOption = False,
    **options: Any,
) -> None:
    """Train a language model on text, into a run folder. Stop it when you like: --resume goes on, bit for bit."""
    changes = {name: _meant(name, value) for name, value in options.items() if value not in (None, [])}
    given = {"TEXT": text, "--out": out, "--preset": preset_name, "--from": from_run, "--dry-run": dry_run}
    _check_together(given, changes, resume, moved, from_run, trust)
    written = {"--save-every": save_every is not None, "--tensorboard": tensorboard}
    for name, value in written.items():
        if dry_run and value:
            raise OptionError(f"{name} has no effect with --dry-run, which writes nothing: leave it out.")
    if text:
        changes["sources"] = tuple(text)
    from loopfold.training import guards, loop, rehearsal, watching
    from loopfold.training.folder import RunFolder

    if quiet:
        warnings.simplefilter("ignore")
    watchers: list[watching.Watcher] = [] if quiet or rank() else [watching.Terminal()]
    if tensorboard and not rank():
        watchers.append(watching.TensorBoard())
    how: dict[str, Any] = {"watcher": watching.Several(watchers)}
    how |= {} if save_every is None else {"save_every": save_every}
    before: int | None = None
    try:
        if resume is not None:
            folder = RunFolder.find(resume)
            before = folder.step()
            check_effect(replace(folder.options, **changes), changes)
            run = loop.resume(resume, text=moved or (), trust=trust, **how, **changes)
        else:
            start = None if from_run is None else loop.open_run(from_run, trust=trust)
            chosen = _chosen(preset_name or "quick", changes, start)
            if dry_run:
                typer.echo(_foretold(rehearsal.rehearse(chosen, out, start=start)))
                return
            run = loop.train(chosen, out, start=start, **how)
    except guards.Stopped as stopped:
        if several():
            raise
        go_on = f"{stopped} Go on with: loopfold train --resume {quote(str(stopped.path))}"
        raise guards.Stopped(go_on, stopped.signal, stopped.path) from stopped
    if not rank():
        idle = before == RunFolder(run.path).step()
        if not quiet and (note := _without_mean(run)):
            echo(f"note: {note}", err=True)
        typer.echo(run.path if quiet else _finished(run) if idle else _done(run))


def _check_together(
    given: dict[str, Any],
    changes: dict[str, Any],
    resume: Path | None,
    moved: list[str] | None,
    from_run: Path | None,
    trust: bool,
) -> None:
    """Which flags go with which."""

    def typed(names: list[str]) -> list[str]:
        return [flag(name, changes[name] if isinstance(changes[name], bool) else None) for name in names]

    if resume is not None:
        unwanted = [name for name, value in given.items() if value]
        unwanted += typed([name for name in changes if name not in CHANGEABLE])
        if unwanted:
            raise OptionError(
                f"--resume goes on with the options that the run has; leave out {', '.join(unwanted)}."
                + (" If its text has moved, name the new place with --text." if given["TEXT"] else "")
            )
        return
    if moved:
        raise OptionError("--text goes with --resume: name the text itself, as in loopfold train text.txt.")
    if from_run is not None:
        unwanted = ["--preset"] if given["--preset"] else []
        unwanted += typed([name for name in changes if name in KEPT])
        if unwanted:
            raise OptionError(f"--from keeps the model and vocabulary of {from_run}; leave out {', '.join(unwanted)}.")
        if not given["TEXT"]:
            raise OptionError(f"--from needs a text to go on with, as in loopfold train text.txt --from {from_run}.")
    elif trust:
        raise OptionError(
            "--trust goes with --resume or --from: a cell of your own, given with --cell, is yours already."
        )


def _chosen(preset_name: str, changes: dict[str, Any], start: "Run | None") -> Options:
    """The options of a new run."""
    from loopfold.training.job import anew

    if start is None:
        chosen = preset(preset_name, **changes)
    else:  # whatever is said of a text was said of another one
        again = ("split", "valid", "test", "warmup", "patience", "evaluate_every")
        of_text: dict[str, Any] = {name: OPTIONS[name].default for name in again}
        chosen = replace(anew(start.options), **(of_text | changes))
    check_effect(chosen, changes)
    return chosen


def _meant(name: str, value: Any) -> Any:
    """The value of an option as it is spelt in Python."""
    if name == "split":
        return _shares(value)
    if name == "hidden_size":
        return _sizes(value)
    if isinstance(value, list):
        if len(value) > 1:
            raise OptionError(f"{flag(name)} takes one text; got {len(value)}: put them into a folder, and name that.")
        return value[0]
    limits = OPTIONS[name].metadata["limits"]
    if isinstance(limits, tuple) or (name == "cell" and ":" not in value and not value.endswith(".py")):
        value = value.lower()
    return ALSO.get(name, {}).get(value, value)


def _shares(split: str) -> tuple[float, ...]:
    try:
        train_, valid, test = map(float, split.replace(",", "/").split("/"))
    except ValueError:
        raise OptionError(
            f"--split needs shares of train/valid/test, such as 90/5/5 or 90/10/0; got {split!r}."
        ) from None
    return train_, valid, test


def _sizes(typed: str) -> int | tuple[int, ...]:
    with suppress(ValueError):
        return int(typed)
    try:
        return tuple(map(int, typed.split("-")))
    except ValueError:
        said = needed("--hidden-size", typed, "valid integer")
        sizes = re.findall(r"\d+", typed)
        if "Did you mean" not in said and "." not in typed and len(sizes) > 1:
            said += f" Sizes by layer are typed as {'-'.join(sizes)}."
        raise OptionError(said) from None


# ------------------------------------------------------------------ what is said


def _done(run: "Run") -> str:
    return f"The run is in {run.path}. Next: loopfold generate {quote(str(run.path))}, or compare, or report"


def _without_mean(run: "Run") -> str:
    """That there is no mean of weights, where one was asked for; nothing where there is one."""
    from loopfold.training.folder import RunFolder
    from loopfold.training.job import Progress

    options, progress = run.options, Progress.of(RunFolder(run.path))
    if options.average == "none" or progress.average_from not in (None, progress.step):
        return ""
    tail = f"the run ended before its tail, the last {100 * options.average_share:.3g} %"
    return f"no weights were averaged: {tail if options.average == 'tail' else 'no evaluation called for it'}"


def _finished(run: "Run") -> str:
    """That there was nothing to do, and what would be."""
    from loopfold.training.folder import RunFolder
    from loopfold.training.job import Progress
    from loopfold.training.watching import shown_epoch

    progress, patience = Progress.of(RunFolder(run.path)), run.options.patience
    epoch = progress.step * run.options.epochs / run.standing.steps
    more = f"--epochs {2 * run.options.epochs:g}"
    if patience is not None and progress.misses >= patience:
        more = f"--patience {progress.misses + patience}"
    return (
        f"{run.path} is finished: step {progress.step:,}, epoch {shown_epoch(epoch)}. To train longer: "
        f"loopfold train --resume {quote(str(run.path))} {more}"
    )


def _foretold(rehearsal: Any) -> str:
    plan = rehearsal.plan
    seconds = timedelta(seconds=max(1, round(rehearsal.seconds)))
    memory = "" if rehearsal.memory is None else f", {rehearsal.memory / 1e9:.1f} GB of memory"
    takes = f"about {seconds} at {rehearsal.tokens_per_second:,.0f} tokens/s, evaluations not counted{memory}"
    notes = (f"note: {note}" for note in plan.notes)
    return "\n".join([str(plan), *notes, takes, f"The run would be in {plan.path}. Nothing was written."])
