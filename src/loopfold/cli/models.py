"""The commands that use a run: evaluate, compare, generate."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loopfold.cli.base import DeviceOption, PartOption, RunArgument, TrustOption, app, completing

if TYPE_CHECKING:
    from loopfold.evaluation import Ledger
    from loopfold.training.run import Run
    from loopfold.training.table import Row

# ------------------------------------------------------------------ evaluate and compare


@app.command(
    epilog="**Example:** `loopfold evaluate runs/bard --on valid`, or `loopfold evaluate runs/bard other.txt`."
)
def evaluate(
    run: RunArgument,
    text: Annotated[
        list[str] | None, typer.Argument(help="Another text to score, whole; the run's own by default.")
    ] = None,
    on: PartOption = None,
    cold: Annotated[
        bool, typer.Option("--cold", help="Begin with an empty state every --window tokens; it is carried by default.")
    ] = False,
    window: Annotated[int, typer.Option(min=1, help="Steps at a time; changes the value only with --cold.")] = 128,
    streams: Annotated[int, typer.Option(min=1, help="Parts read side by side; never changes the value.")] = 32,
    device: DeviceOption = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table to read.")] = False,
    trust: TrustOption = False,
) -> None:
    """Perplexity, with the totals that it comes from. Every token is scored once, from all before it."""
    from loopfold.errors import OptionError
    from loopfold.evaluation import perplexity
    from loopfold.text.corpus import read_text
    from loopfold.training.run import open_run

    found = open_run(run, device, trust=trust)
    if text and on is not None:
        raise OptionError("choose one: another text, or --on for a part of the run's own.")
    if text:
        tokens = found.vocabulary.encode(read_text(text))
    else:
        on = on or found.corpus().part
        tokens = found.tokens(on)
    ledger = perplexity(found.model, tokens, streams=streams, window=window, carried=not cold)
    typer.echo(
        json.dumps(ledger.as_json(), indent=1)
        if as_json
        else _describe(ledger, " ".join(text or []) or str(on), window)
    )


def _describe(ledger: "Ledger", text: str, window: int) -> str:
    state = "carried through the whole text" if ledger.carried else f"started again every {window} tokens"
    lines = [
        ("text", text),
        ("tokens scored", f"{ledger.tokens:,} ({ledger.unit}s), {ledger.unknown or 0:,} of them unknown"),
        ("state", state),
        ("negative log likelihood", f"{ledger.nll:,.1f} nats"),
        ("perplexity", f"{ledger.perplexity:,.4f}"),
        ("nats per token", f"{ledger.nats_per_token:.4f}"),
        ("bits per token", f"{ledger.bits_per_token:.4f}"),
        ("bits per character", f"{ledger.bits_per_character:.4f}" if ledger.bits_per_character is not None else "—"),
        ("bits per byte", f"{ledger.bits_per_byte:.4f}" if ledger.bits_per_byte is not None else "—"),
    ]
    if ledger.unknown and ledger.unknown > 0.01 * ledger.tokens:
        share = f"{ledger.unknown / ledger.tokens:.0%} of this text is unknown to the model"
        lines.append(("note", f"{share} and scored as one kind, so the figures flatter it; bytes know everything"))
    return "\n".join(f"{name:<24}{value}" for name, value in lines)


@app.command(
    epilog="**Example:** `loopfold compare runs/bard runs/other`. Baselines are those of the first run's text."
)
def compare(
    runs: Annotated[list[Path], typer.Argument(help="One or more run folders on the same text.", show_default=False)],
    on: Annotated[
        str | None,
        typer.Option(
            help="test or valid; by default test, or valid where that is missing.",
            autocompletion=completing("test", "valid"),
        ),
    ] = None,
    neural: Annotated[bool, typer.Option(help="Train the window and the convolution too.")] = True,
    device: DeviceOption = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table to read.")] = False,
    trust: TrustOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress display; it is shown by default.")] = False,
) -> None:
    """A table of the run beside uniform, n-gram, window and convolution models, on the same text and ledger."""
    from loopfold import comparison
    from loopfold.errors import choose
    from loopfold.training.folder import RunFolder
    from loopfold.training.run import open_run
    from loopfold.training.table import Comparison
    from loopfold.training.watching import Silent, Terminal

    if on is not None:
        choose("part", on, ("test", "valid"))
    opened = [open_run(path, device, trust=trust) for path in runs]
    on = on or opened[0].corpus().part
    rows = comparison.compare(
        opened, on, neural=neural, watcher=lambda name: Silent() if quiet or as_json else Terminal(name)
    )
    table = Comparison(on, rows)
    table.write(RunFolder(runs[0]))
    if as_json:
        typer.echo(json.dumps(table.as_json(), indent=1))
    else:
        _print_table(opened, rows, on)


def _print_table(runs: "list[Run]", rows: "list[Row]", on: str) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    ledger = rows[0].ledger
    table = Table(title=escape(f"{runs[0].config['corpus']['name']}, {on} text: {ledger.tokens:,} {ledger.unit}s"))
    table.add_column("model", no_wrap=True)
    for name in ("parameters", "of a table |V|ⁿ", "trained, tokens/s", "perplexity", "bits/char"):
        table.add_column(name, justify="right")
    units = {row.ledger.unit for row in rows}  # perplexities of different units cannot be compared, bits can
    best = min(row.ledger.bits_per_character or math.inf for row in rows)
    for row in rows:
        table.add_row(
            escape(row.name) + (f", {row.ledger.unit}s" if len(units) > 1 else ""),
            f"{row.parameters:,}",
            "" if row.table is None else f"{row.table:,}" if row.table < 10**8 else f"{row.table:.1e}",
            f"{row.tokens_per_second:,.0f}" if row.parameters else "",
            f"{row.ledger.perplexity:,.3f}",
            "—" if row.ledger.bits_per_character is None else f"{row.ledger.bits_per_character:.3f}",
            style="bold" if row.ledger.bits_per_character == best else None,
        )
    if any(row.ledger.unknown for row in rows):
        table.caption = f"unknown {ledger.unit}s, which every model scores as one kind: {ledger.unknown:,}"
    Console(width=200).print(table)  # as wide as it is: no figure is cut off


# ------------------------------------------------------------------ generate


@app.command(epilog="**Example:** `loopfold generate runs/bard --prompt 'ROMEO:' --temperature 0.8 --length 500`.")
def generate(
    run: RunArgument,
    prompt: Annotated[str, typer.Option(help="What to go on from; nothing by default.")] = "",
    length: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 500,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Below 1: safer; above 1: wilder; 0: always the likeliest.")
    ] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Only the k likeliest tokens; all by default.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Only the likeliest that make up this probability; all by default.")
    ] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Always the likeliest token; by default one is drawn.")
    ] = False,
    beam: Annotated[
        int | None, typer.Option(min=1, help="Search for a likely text with so many beginnings; by default none.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="So many texts, side by side.")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 63) - 1, help="The same seed writes the same text.")] = 0,
    device: DeviceOption = "cpu",
    trust: TrustOption = False,
) -> None:
    """Let a trained model write. Text appears as it is written; every token costs the same, however long the text."""
    from loopfold.errors import OptionError
    from loopfold.generation import generate as write
    from loopfold.training.run import open_run

    found = open_run(run, device, trust=trust)
    before = [prompt]  # comes with the first piece, when nothing can be wrong with it any more

    def show(piece: str) -> None:
        typer.echo("".join([*before, piece]), nl=False)
        before.clear()

    try:
        pick = _pick(temperature, top_k, top_p, greedy, beam, seed, str(next(found.model.parameters()).device))
        if samples == 1:
            write(found.model, found.vocabulary, prompt, length, pick, show)
        else:
            texts = write(found.model, found.vocabulary, prompt, length, pick, samples=samples)
            typer.echo(f"\n{'─' * 40}\n".join(prompt + text for text in texts), nl=False)
    except OptionError:
        raise
    except (ValueError, FloatingPointError) as error:
        raise OptionError(str(error)) from error
    typer.echo()


def _pick(
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    greedy: bool,
    beam: int | None,
    seed: int,
    device: str,
) -> Any:
    import torch

    from loopfold.errors import OptionError
    from loopfold.feeding import Greedy, Sample
    from loopfold.generation import Beam

    narrowed = temperature not in (0, 1) or top_k is not None or top_p is not None
    if sum([beam is not None, greedy or temperature == 0]) > 1 or (narrowed and (greedy or beam is not None)):
        raise OptionError("choose one: --greedy, --beam, or a draw with --temperature, --top-k and --top-p.")
    if beam is not None:
        return Beam(beam)
    if greedy or temperature == 0:
        return Greedy()
    generator = torch.Generator(device).manual_seed(seed)
    return Sample(generator, temperature, top_k, top_p)
