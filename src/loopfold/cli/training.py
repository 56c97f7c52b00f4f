"""The command that makes a run: train."""

import inspect
import os
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from loopfold.cli.base import TrustOption, app, cells, completing, flag
from loopfold.errors import OptionError
from loopfold.training.options import PRESETS, Options, preset

OPTIONS = {option.name: option for option in fields(Options)}
TEXT = OPTIONS.pop("sources")


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a flag for each option of a run in place of its `**options`."""
    hints, signature = get_type_hints(Options), inspect.signature(command)
    own = [parameter for name, parameter in signature.parameters.items() if name != "options"]
    flags = [_flag(option, str if name == "split" else hints[name]) for name, option in OPTIONS.items()]
    command.__signature__ = signature.replace(parameters=[*own, *flags])  # type: ignore[attr-defined]
    return command


def _flag(option: Field[Any], kind: Any) -> inspect.Parameter:
    """None by default, which leaves the option to the preset."""
    about = f"{option.metadata['help']} {_defaults(option.name)}"
    info = typer.Option(
        help=about, show_default=False, rich_help_panel="Options of the run", autocompletion=_completion(option)
    )
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )


def _completion(option: Field[Any]) -> Callable[[str], list[str]] | None:
    """What the shell offers for an option: names, where its value is one."""
    limits = option.metadata["limits"]
    known = {"cell": cells, "device": completing("cpu", "cuda", "auto")}
    return completing(*limits) if isinstance(limits, tuple) else known.get(option.name)


def _defaults(name: str) -> str:
    """What an option is in the first preset, and in those that differ from it; nothing where all leave it out."""
    presets: dict[str, list[str]] = {}
    for known in PRESETS:
        presets.setdefault(_spelt(getattr(preset(known), name)), []).append(known)
    first, *others = presets
    said = "; ".join([first, *(f"{', '.join(presets[value])}: {value}" for value in others)])
    return f"[default: {said}]" if said else ""


def _spelt(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "/".join(map(str, value)) if isinstance(value, tuple) else "" if value is None else str(value)


@app.command(
    epilog="**Example:** `loopfold train shakespeare.txt --preset standard --out runs/bard`, then "
    "`loopfold generate runs/bard --prompt 'ROMEO:'`. Under `torchrun --nproc-per-node 2 -m loopfold train …` the "
    "streams are shared by two processes."
)
@with_flags
def train(
    text: Annotated[list[str] | None, typer.Argument(help=TEXT.metadata["help"])] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder to make; runs/NAME-N by default.")] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with a run that was stopped or killed.")
    ] = None,
    preset_name: Annotated[
        str | None,
        typer.Option(
            "--preset",
            autocompletion=completing(*PRESETS),
            help="quick (the default: a minute or two), standard (ten minutes) or words; other flags change it.",
        ),
    ] = None,
    save_every: Annotated[float, typer.Option(help="Seconds from one checkpoint to the next.")] = 30.0,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write events for TensorBoard too.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress display.")] = False,
    trust: TrustOption = False,
    **options: Any,
) -> None:
    """Train a language model on text, into a run folder. Stop it when you like: --resume goes on, bit for bit."""
    changes = {name: value for name, value in options.items() if value is not None}
    if resume is not None:
        given = {"TEXT": text, "--out": out, "--preset": preset_name}
        unwanted = [name for name, value in given.items() if value]
        unwanted += [flag(name, value if isinstance(value, bool) else None) for name, value in changes.items()]
        if unwanted:
            raise OptionError(f"--resume goes on with the options that the run has; leave out {', '.join(unwanted)}.")
    elif trust:
        raise OptionError("--trust goes with --resume: a cell of your own, given with --cell, is yours already.")
    if "split" in changes:
        changes["split"] = _shares(changes["split"])
    if text:
        changes["sources"] = tuple(text)
    from loopfold.training import loop, watching

    rank = int(os.environ.get("RANK", 0))
    watchers: list[watching.Watcher] = [] if quiet or rank else [watching.Terminal()]
    if tensorboard and not rank:
        watchers.append(watching.TensorBoard())
    watcher = watching.Several(watchers)
    if resume is not None:
        run = loop.resume(resume, watcher=watcher, save_every=save_every, trust=trust)
    else:
        run = loop.train(preset(preset_name or "quick", **changes), out, watcher=watcher, save_every=save_every)
    if not rank:
        following = "; ".join(f"loopfold {command} {run.path}" for command in ("compare", "generate", "report"))
        typer.echo(f"The run is in {run.path}. Next: {following}")


def _shares(split: str) -> tuple[float, ...]:
    try:
        train_, valid, test = map(float, split.replace(",", "/").split("/"))
    except ValueError:
        raise OptionError(
            f"--split needs shares of train/valid/test, such as 90/5/5 or 90/10/0; got {split!r}."
        ) from None
    return train_, valid, test
