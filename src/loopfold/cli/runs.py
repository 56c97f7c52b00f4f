"""The commands for runs as a whole: pack one, export it, list all."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loopfold.cli.base import RunArgument, TrustOption, app, echo, echo_json, printable, writable

if TYPE_CHECKING:
    from loopfold.training.listing import Listed


@app.command(
    epilog="**Example:** `loopfold pack runs/bard`, then send `runs/bard.loopfold` to a friend, who types "
    "`loopfold generate bard.loopfold`."
)
def pack(
    run: Annotated[Path, typer.Argument(help="A run folder.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="The file to write; RUN.loopfold by default.")] = None,
) -> None:
    """One small file with all that reading a run needs: every command takes it in place of the folder."""
    from loopfold.training.packed import pack_run

    path = pack_run(run, out)
    echo(f"The run is packed in {path} ({path.stat().st_size / 1e3:,.0f} kB). It does not hold the text.")


@app.command(
    epilog="**Example:** `loopfold export runs/bard --to bard.js`, or `--to bard.c`, or `--to bard.onnx`.",
)
def export(
    run: RunArgument,
    to: Annotated[
        Path,
        typer.Option(help="The file, whose end says the language: .c (with a .h), .js or .onnx.", show_default=False),
    ],
    weights_beside: Annotated[
        bool, typer.Option("--weights-beside", help="C: the weights in a .bin, not in the code.")
    ] = False,
    half: Annotated[bool, typer.Option("--half", help="JavaScript: the weights in 16 bits each.")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="JavaScript: with the reverse step.")] = False,
    one_step: Annotated[bool, typer.Option("--one-step", help="ONNX: one step, not a whole sequence.")] = False,
    lengths: Annotated[
        bool, typer.Option("--lengths", help="ONNX: with the length of each sequence as another input.")
    ] = False,
    trust: TrustOption = False,
) -> None:
    """A run as a program that needs no Python: C, which reads tokens and writes their texts; JavaScript; or ONNX."""
    from loopfold.errors import OptionError
    from loopfold.exporting.export import LANGUAGES, export
    from loopfold.training.run import open_run

    opened = open_run(run, trust=trust)
    vocabulary = None if LANGUAGES.get(to.suffix) == "ONNX" else opened.vocabulary
    try:
        files = export(
            opened.model,
            to,
            vocabulary=vocabulary,
            weights_beside=weights_beside,
            half=half,
            backward=backward,
            one_step=one_step,
            lengths=lengths,
        )
    except OptionError:
        raise
    except (TypeError, ValueError, ModuleNotFoundError) as error:  # of a model that cannot be exported
        raise OptionError(str(error)) from error
    for file in files:
        echo(f"{file} ({file.stat().st_size / 1e3:,.0f} kB)")


@app.command("list", epilog="**Example:** `loopfold list`, or `loopfold list runs/old --json`.")
def list_runs(
    folder: Annotated[Path, typer.Argument(help="Where to look, in folders below it too.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """All runs, folders and packed files, one in a line: what it is, how far it came, how good it is, and when."""
    from loopfold.errors import OptionError
    from loopfold.training.listing import list_below

    if folder.is_file():
        raise OptionError(f"{folder} is a file: name the folder that your runs are in.")
    if not folder.is_dir():
        raise OptionError(f"there is no folder {folder}: name the one that your runs are in, or train one first.")
    found = sorted(list_below(folder), key=lambda run: run.path)
    if as_json:
        echo_json([run.as_json() for run in found])
    elif not found:
        echo(f"loopfold: there are no runs in {folder}.", err=True)
    else:
        echo(writable(_table(found)))


def _table(runs: "list[Listed]") -> str:
    """Columns as wide as what is in them, so that every run has one line."""
    head = ("run", "model", "unit", "text", "steps", "", "valid perplexity", "saved")
    rows = [head, *map(_row, runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = ("steps", "valid perplexity")
    return "\n".join(
        "  ".join(
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(head, row, widths, strict=True)
        ).rstrip()
        for row in rows
    )


def _row(run: "Listed") -> tuple[str, ...]:
    steps = "" if run.step is None else f"{run.step:,}/{run.steps:,}"
    perplexity = "" if run.perplexity is None else f"{run.perplexity:,.3f}"
    facts = (run.model, run.unit, run.text, steps, run.state, perplexity, run.changed)
    return tuple(printable(fact or "") for fact in (run.path, *facts))
