"""The commands that use a run: evaluate, compare, generate."""

import json
import math
import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loopfold.cli.base import (
    AsTrainedOption,
    DeviceOption,
    PartOption,
    RunArgument,
    TextOption,
    TrustOption,
    app,
    completing,
    echo,
    echo_json,
    printable,
    writable,
)
from loopfold.cli.ways import (
    CacheOption,
    DecayOption,
    DynamicOption,
    MixOption,
    OrderOption,
    RateOption,
    ShareOption,
    SharpnessOption,
    SizeOption,
    StepOption,
    WeightOption,
    check_values,
    choose_way,
    origin,
    settings_to_tune,
)

if TYPE_CHECKING:
    from torch import Tensor

    from loopfold.evaluation import Ledger
    from loopfold.text.vocabulary import Tokens
    from loopfold.training.run import Run
    from loopfold.training.table import Row

# ------------------------------------------------------------------ evaluate


@app.command(
    epilog="**Example:** `loopfold evaluate runs/bard --on valid`, or `loopfold evaluate runs/bard other.txt`."
)
def evaluate(
    run: RunArgument,
    other: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", help="Another text to score, whole; the run's own by default."),
    ] = None,
    on: PartOption = None,
    text: TextOption = None,
    per_token: Annotated[
        bool, typer.Option("--per-token", help="A line for each token: its number, the token, its loss in nats.")
    ] = False,
    cold: Annotated[
        bool, typer.Option("--cold", help="Begin with an empty state every --window tokens; it is carried by default.")
    ] = False,
    window: Annotated[
        int | None, typer.Option(min=1, help="Steps at a time; changes the value only with --cold. [default: 128]")
    ] = None,
    streams: Annotated[
        int | None, typer.Option(min=1, help="Parts read side by side; never changes the value. [default: 32]")
    ] = None,
    device: AsTrainedOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table to read.")] = False,
    trust: TrustOption = False,
    dynamic: DynamicOption = False,
    dynamic_rate: RateOption = None,
    dynamic_decay: DecayOption = None,
    dynamic_window: StepOption = None,
    cache: CacheOption = False,
    cache_size: SizeOption = None,
    cache_weight: WeightOption = None,
    cache_sharpness: SharpnessOption = None,
    mix_ngram: MixOption = False,
    ngram_order: OrderOption = None,
    ngram_weight: ShareOption = None,
) -> None:
    """Perplexity, with the totals that it comes from. Every token is scored once, from all before it."""
    from loopfold.errors import OptionError
    from loopfold.evaluation import Ledger, perplexity, token_losses
    from loopfold.text.corpus import read_text
    from loopfold.training.run import open_run

    typed = {"dynamic": dynamic, "dynamic_rate": dynamic_rate, "dynamic_decay": dynamic_decay}
    typed |= {"dynamic_window": dynamic_window, "cache": cache, "cache_size": cache_size, "cache_weight": cache_weight}
    typed |= {"cache_sharpness": cache_sharpness, "mix_ngram": mix_ngram}
    typed |= {"ngram_order": ngram_order, "ngram_weight": ngram_weight}
    missing = settings_to_tune(typed, cold)
    for name, value in {"--window": window, "--streams": streams}.items():
        if dynamic and value is not None:
            one = "reads the text as one stream, --dynamic-window tokens at a time"
            raise OptionError(f"{name} has no effect with --dynamic, which {one}: leave it out.")
    check_values(typed, other or [])
    if other and (on is not None or (text and not (dynamic or mix_ngram or missing))):
        raise OptionError("choose one: another text, or --on and --text for the run's own.")
    found = _finite(open_run(run, device, trust=trust, text=text or ()))
    on = None if other else on or found.corpus().part
    scored = read_text(other) if other else found.text(on)
    tokens = found.vocabulary.encode(scored)
    try:
        way, tuned_on = choose_way(found, scored, tokens, typed, missing)
        how: dict[str, Any] = {"carried": not cold, "way": way, "streams": streams or 32, "window": window or 128}
        if per_token:
            losses = token_losses(found.model, tokens, **how)
            ledger = Ledger.of(tokens, losses, carried=not cold, way=way)
        else:
            ledger = perplexity(found.model, tokens, **how)
    except FloatingPointError as error:
        raise OptionError(str(error)) from error
    if math.isnan(ledger.nll):
        raise _diverged(found, "outputs")
    settings = None if ledger.way == "plain" else origin(tuned_on)
    lost = _lost(ledger, found, tokens) if dynamic else ""
    notes = [note for note in (_note(found), lost) if note]
    if as_json:
        unfinished = found.standing.unfinished
        data = ledger.as_json() | ({} if unfinished is None else {"unfinished": unfinished})
        data |= {} if settings is None else {"tuned_on": tuned_on}
        data |= {"diverged": True} if lost else {}
        if per_token:
            pairs = enumerate(zip(map(found.vocabulary.token, tokens.ids.tolist()), losses.tolist(), strict=True))
            data["per_token"] = [{"index": i, "token": token, "nats": nats} for i, (token, nats) in pairs]
        echo_json(data)
    elif per_token:
        _print_losses(found, tokens, losses)
        for note in notes:
            echo(f"loopfold: {note}.", err=True)
        if settings is not None:
            echo(f"loopfold: scored by {ledger.way}, {settings}.", err=True)
    else:
        echo(writable(_describe(ledger, " ".join(other or []) or str(on), how["window"], settings, notes)))


def _print_losses(run: "Run", tokens: "Tokens", losses: "Tensor") -> None:
    """A line for each token, as they come: a text may be long. A token is a JSON string, so that it is one word."""
    for i, (number, nats) in enumerate(zip(tokens.ids.tolist(), losses.tolist(), strict=True)):
        sys.stdout.write(f"{i}\t{json.dumps(run.vocabulary.token(number))}\t{nats!r}\n")


def _lost(ledger: "Ledger", run: "Run", tokens: "Tokens") -> str:
    """That weights which followed the text came to know less than nothing of it; nothing where they did not."""
    from loopfold.evaluation import perplexity

    if ledger.nats_per_token <= math.log(run.vocabulary.size):  # a guess
        return ""
    plain = perplexity(run.model, tokens)
    if ledger.nats_per_token <= plain.nats_per_token:  # the text is what is strange
        return ""
    return (
        f"the weights diverged on their way through the text: without --dynamic the perplexity is "
        f"{plain.perplexity:,.4f}. Choose a smaller --dynamic-rate, or leave it out, and it is tuned"
    )


def _note(run: "Run") -> str:
    """That a run is unfinished; nothing where it is finished."""
    standing = run.standing
    return "" if standing.finished else f"{run.path} is unfinished: step {standing.step:,} of {standing.steps:,}"


def _finite(run: "Run") -> "Run":
    """A run whose weights are numbers, so that its figures are, too."""
    if not all(bool(parameter.isfinite().all()) for parameter in run.model.parameters()):
        raise _diverged(run, "weights")
    return run


def _diverged(run: "Run", what: str) -> Exception:
    from loopfold.training.stored import RunError

    return RunError(
        f"the {what} of {run.path} are not finite numbers: its training diverged. Train again with a lower "
        "--learning-rate."
    )


def _describe(ledger: "Ledger", text: str, window: int, settings: str | None, notes: list[str]) -> str:
    state = "carried through the whole text" if ledger.carried else f"started again every {window} tokens"
    lines = [
        ("text", text),
        ("tokens scored", f"{ledger.tokens:,} ({ledger.unit}s), {ledger.unknown or 0:,} of them unknown"),
        ("state", state),
        ("way", ledger.way),
        *([] if settings is None else [("settings", settings)]),
        ("negative log likelihood", f"{ledger.nll:,.1f} nats"),
        ("perplexity", f"{ledger.perplexity:,.4f}" if ledger.perplexity < math.inf else "too large to write"),
        ("nats per token", f"{ledger.nats_per_token:.4f}"),
        ("bits per token", f"{ledger.bits_per_token:.4f}"),
        ("bits per character", f"{ledger.bits_per_character:.4f}" if ledger.bits_per_character is not None else "—"),
        ("bits per byte", f"{ledger.bits_per_byte:.4f}" if ledger.bits_per_byte is not None else "—"),
    ]
    if ledger.unknown and ledger.unknown > 0.01 * ledger.tokens:
        share = f"{ledger.unknown / ledger.tokens:.0%} of this text is unknown to the model"
        lines.append(("note", f"{share} and scored as one kind, so the figures flatter it; bytes know everything"))
    lines += [("note", note) for note in notes]
    return "\n".join(f"{name:<24}{value}" for name, value in lines)


# ------------------------------------------------------------------ compare


@app.command(
    epilog="**Example:** `loopfold compare runs/bard runs/other`. Baselines are those of the first run's text."
)
def compare(
    runs: Annotated[list[Path], typer.Argument(help="One or more runs on the same text.", show_default=False)],
    on: Annotated[
        str | None,
        typer.Option(
            help="test or valid; by default test, or valid where that is missing.",
            autocompletion=completing("test", "valid"),
        ),
    ] = None,
    text: TextOption = None,
    neural: Annotated[bool, typer.Option(help="Train the window and the convolution too.")] = True,
    device: AsTrainedOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table to read.")] = False,
    trust: TrustOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress display; it is shown by default.")] = False,
) -> None:
    """A table of the run beside uniform, n-gram, window and convolution models, on the same text and ledger."""
    from loopfold import comparison
    from loopfold.errors import choose
    from loopfold.training.guards import Stopped
    from loopfold.training.run import open_run
    from loopfold.training.stored import RunError
    from loopfold.training.table import Comparison
    from loopfold.training.watching import Silent, Terminal

    if on is not None:
        choose("part", on, ("test", "valid"))
    opened = [open_run(path, device, trust=trust, text=text or ()) for path in runs]
    on = on or opened[0].corpus().part
    try:
        rows = comparison.compare(
            opened, on, neural=neural, watcher=lambda name: Silent() if quiet or as_json else Terminal(name)
        )
    except Stopped as stopped:
        again = (
            f"stopped before the table was done. Go on with: loopfold compare {' '.join(quote(str(p)) for p in runs)}"
        )
        raise Stopped(again, stopped.signal, stopped.path) from stopped
    table = Comparison(on, rows)
    unfinished = {str(run.path): run.standing.unfinished for run in opened if not run.standing.finished}
    if as_json:
        echo_json(table.as_json() | ({"unfinished": unfinished} if unfinished else {}))
    else:
        _print_table(opened, rows, on)
    try:
        table.write(opened[0].stored)
    except RunError as error:  # it has been shown, and that is what was asked for; advice to choose a place is left out
        echo(f"loopfold: the table is not kept for the report: {str(error.args[0]).partition('. ')[0]}.", err=True)


def _print_table(runs: "list[Run]", rows: "list[Row]", on: str) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    ledger = rows[0].ledger
    table = Table(
        title=escape(f"{printable(runs[0].config['corpus']['name'])}, {on} text: {ledger.tokens:,} {ledger.unit}s")
    )
    table.add_column("model", no_wrap=True)
    for name in ("parameters", "of a table |V|ⁿ", "trained, tokens/s", "perplexity", "bits/char"):
        table.add_column(writable(name), justify="right")
    units = {row.ledger.unit for row in rows}  # perplexities of different units cannot be compared, bits can
    bits = [row.ledger.bits_per_character for row in rows]
    best = min((b for b in bits if b is not None and math.isfinite(b)), default=None)
    for row, b in zip(rows, bits, strict=True):
        table.add_row(
            escape(writable(row.name)) + (f", {row.ledger.unit}s" if len(units) > 1 else ""),
            f"{row.parameters:,}",
            "" if row.table is None else f"{row.table:,}" if row.table < 10**8 else f"{row.table:.1e}",
            f"{row.tokens_per_second:,.0f}" if row.parameters else "",
            f"{row.ledger.perplexity:,.3f}",
            writable("—") if b is None else f"{b:.3f}",
            style="bold" if b is not None and b == best else None,
        )
    notes = [escape(note) for note in dict.fromkeys(map(_note, runs)) if note]
    if any(row.ledger.unknown for row in rows):
        notes.append(f"unknown {ledger.unit}s, which every model scores as one kind: {ledger.unknown:,}")
    table.caption = "\n".join(notes) or None
    Console(width=200).print(table)  # as wide as it is: no figure is cut off


# ------------------------------------------------------------------ generate


@app.command(
    epilog="**Examples:** `loopfold generate runs/bard --prompt 'ROMEO:' --temperature 0.8 --length 500`, "
    "`cat scene.txt | loopfold generate runs/bard --prompt - --stop 'JULIET:'`."
)
def generate(
    run: RunArgument,
    prompt: Annotated[
        str, typer.Option(help="What to go on from, nothing by default; - reads it from standard input.")
    ] = "",
    length: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 500,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End before this text, again for each; by default at --length."),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="Below 1: safer; above 1: wilder; 0: always the likeliest. [default: 1]"),
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Only the k likeliest tokens; all by default.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Only the likeliest that make up this probability; all by default.")
    ] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Always the likeliest token; by default one is drawn.")
    ] = False,
    beam: Annotated[
        int | None,
        typer.Option(min=1, max=10_000, help="Search for a likely text with so many beginnings; by default none."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, max=100_000, help="So many texts, side by side.")] = 1,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=(1 << 63) - 1, help="The same seed writes the same text. [default: 0]"),
    ] = None,
    device: DeviceOption = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not the text alone.")] = False,
    trust: TrustOption = False,
) -> None:
    """Let a trained model write. Text appears as it is written; every token costs the same, however long the text."""
    from loopfold.errors import OptionError
    from loopfold.generation import log_probabilities, write
    from loopfold.text.corpus import standard_input
    from loopfold.training.run import open_run

    if stop is not None and "" in stop:
        raise OptionError("--stop needs some text to end at; got an empty one.")
    found = _finite(open_run(run, device, trust=trust))
    model, vocabulary = found.model, found.vocabulary
    if prompt == "-":
        prompt = standard_input()
        if not prompt:
            raise OptionError("standard input is empty: leave out --prompt to begin with nothing.")
    before = [prompt]  # comes with the first piece, when nothing can be wrong with it any more

    def show(piece: str) -> None:
        echo("".join([*before, piece]), nl=False)
        before.clear()

    unknown = vocabulary.unknown_in(prompt) if vocabulary.reads_unknown else []
    try:
        pick = _pick(temperature, top_k, top_p, greedy, beam, seed, str(next(model.parameters()).device), samples)
        if unknown and not as_json:
            names = ", ".join(map(repr, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
            echo(f"loopfold: not in the vocabulary, so read as <unk>: {names}.", err=True)
        written = write(
            model,
            vocabulary,
            prompt,
            length,
            pick,
            None if samples > 1 or as_json else show,
            samples,
            stop or [],
            as_unknown=True,
        )
        if as_json:
            scores = log_probabilities(model, vocabulary, prompt, written)
    except OptionError:
        raise
    except (ValueError, FloatingPointError) as error:
        raise OptionError(str(error)) from error
    if as_json:
        how = {"length": length, "stop": stop or [], "temperature": 1.0 if temperature is None else temperature}
        how |= {"top_k": top_k, "top_p": top_p, "greedy": greedy, "beam": beam, "samples": samples}
        how |= {"seed": seed or 0, "device": device}
        texts = [
            {"text": one.text, "tokens": len(one.ids), "stopped": one.stopped, "log_probability": score}
            for one, score in zip(written, scores, strict=True)
        ]
        echo_json({"run": str(run), "prompt": prompt, "unknown": unknown, "samples": texts, "options": how})
    elif samples > 1:
        echo(f"\n{writable('─' * 40)}\n".join(prompt + one.text for one in written))
    else:
        echo()


def _pick(
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    greedy: bool,
    beam: int | None,
    seed: int | None,
    device: str,
    samples: int,
) -> Any:
    import torch

    from loopfold.errors import OptionError
    from loopfold.feeding import Greedy, Sample
    from loopfold.generation import Beam

    one_text = {"--greedy": greedy, "--temperature 0": temperature == 0, "--beam": beam is not None}
    found = [name for name, value in one_text.items() if value]
    narrowed = temperature not in (None, 0) or top_k is not None or top_p is not None
    if len(found) > 1 or (found and narrowed):
        either = "choose one: --greedy, --beam, or a draw with --temperature, --top-k and --top-p"
        raise OptionError(f"{either}; --temperature 0 is greedy.")
    if found and samples > 1:
        raise OptionError("--greedy and --beam find one text, the same each time: leave out --samples, or draw.")
    if found and seed is not None:
        raise OptionError(f"--seed has no effect with {found[0]}, which draws nothing: leave it out.")
    if beam is not None:
        return Beam(beam)
    if found:
        return Greedy()
    generator = torch.Generator(device).manual_seed(seed or 0)
    return Sample(generator, 1.0 if temperature is None else temperature, top_k, top_p)
