"""The command that draws: a run, a cell by its name, or a cell of your own."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loopfold.cli.base import TextOption, TrustOption, app, cells, completing, echo

if TYPE_CHECKING:
    from torch import Tensor, nn

    from loopfold.feeding import Feeding

PATTERNS = (
    "sequence-to-sequence",
    "sequence-to-one",
    "output-recurrence",
    "vector-to-sequence",
    "encoder-decoder",
    "autoencoder",
)
FEEDINGS = ("teacher", "free", "scheduled")
_READS, _UNITS, _OUTPUTS = 3, 4, 3  # a picture is the same at any size


@app.command(
    epilog="**Examples:** `loopfold draw lstm --operations`, `loopfold draw my_cell.py:MyCell --steps 4`, "
    "`loopfold draw gru --pattern encoder-decoder --steps 4 --feeding free`, "
    "`loopfold draw runs/bard --steps 8 --gradients --out back.png`."
)
def draw(
    what: Annotated[
        str,
        typer.Argument(
            help="A run; a cell such as lstm or gru; or your own: path/to/file.py:Class.",
            show_default=False,
            autocompletion=cells,
        ),
    ],
    steps: Annotated[
        int | None, typer.Option(min=1, help="Unfold it for so many steps; the circuit by default.")
    ] = None,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="The way back too; of a run, with the sizes of its real gradients.")
    ] = False,
    operations: Annotated[
        bool, typer.Option("--operations", help="Every operation; the variables alone by default.")
    ] = False,
    pattern: Annotated[
        str | None,
        typer.Option(
            help="Put the cell into a network: sequence-to-sequence, sequence-to-one, output-recurrence, "
            "vector-to-sequence, encoder-decoder or autoencoder; by default the cell alone.",
            autocompletion=completing(*PATTERNS),
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, max=100, help="Layers of the cell on top of each other; one by default.")
    ] = None,
    bidirectional: Annotated[
        bool, typer.Option("--bidirectional", help="Each layer reads both ways; forwards by default.")
    ] = False,
    feeding: Annotated[
        str | None,
        typer.Option(
            help="What goes back in: teacher (the truth), free (the model's own), scheduled; by default what the "
            "pattern has.",
            autocompletion=completing(*FEEDINGS),
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A file that ends in .svg, .png, .pdf, .html or .dot; by default NAME-circuit.svg or so."),
    ] = None,
    columns: Annotated[
        int | None,
        typer.Option(min=6, help="Show up to so many steps, 12 by default; of more, the first three and the last two."),
    ] = None,
    text: TextOption = None,
    trust: TrustOption = False,
) -> None:
    """The circuit of a network, or its graph unfolded over time, as a picture."""
    from loopfold.drawing.circuit import Level
    from loopfold.drawing.draw import draw as draw_model
    from loopfold.drawing.figure import format_of
    from loopfold.drawing.picture import COLUMNS
    from loopfold.errors import OptionError
    from loopfold.files import check_place
    from loopfold.training.cells import maker_of, place_in_cell
    from loopfold.training.folder import ELSEWHERE
    from loopfold.training.stored import PACKED, RunError

    if out is not None:  # before the work, not after it
        check_place(out, "picture.svg")
        try:
            format_of(out)
        except ValueError as error:
            raise OptionError(str(error)) from error
    model: nn.Module | None = None
    y: Tensor | None = None
    if gradients and steps is None:
        raise OptionError(
            "a circuit has no time for gradients to go back through: add --steps 4, or as many as you like."
        )
    if columns is not None and steps is None:
        raise OptionError("--columns has no effect on a circuit, which has one: add --steps, or leave it out.")
    if text and not (gradients and _is_run(what)):
        raise OptionError("--text has no effect here: only --gradients of a run reads its text. Leave it out.")
    if trust and not _is_run(what):
        raise OptionError("--trust goes with a run: a cell of your own is yours already.")
    if _is_run(what):
        if pattern or layers or bidirectional:
            raise OptionError("a run has a network of its own: leave out --pattern, --layers and --bidirectional.")
        model, y = _of_run(Path(what), steps if gradients else None, trust, text or [])
    failed: ValueError | TypeError | None = None
    try:
        picture = draw_model(
            _network(what, pattern, layers or 1, bidirectional) if model is None else model,
            steps,
            gradients,
            level=Level.OPERATIONS if operations else Level.BOOK,
            feeding=None if feeding is None else _feeding(feeding),
            y=y,
            columns=columns or COLUMNS,
        )
        parts = [Path(what).resolve().name.rpartition(":")[2].removesuffix(PACKED), pattern, feeding]
        parts += ["circuit" if steps is None else f"{steps}-steps", *(["gradients"] if gradients else [])]
        parts += ["operations"] if operations else []
        path = picture.save(out or Path("-".join(filter(None, parts)) + ".svg"))
    except OptionError:
        raise
    except (ValueError, TypeError) as error:
        failed = error
    except OSError as error:
        raise RunError(f"{error} ", *ELSEWHERE) from error
    if failed is not None:  # no longer handled, or it would count as the cause of an error that is raised here
        if ":" in what and place_in_cell(failed):  # of some size that was tried; that it is made with tells more
            from loopfold.play.programs import check_step

            check_step(maker_of(what), f"the first step of {what} failed")
        raise OptionError(str(failed)) from failed
    echo(f"{picture.title}: {path}")


def _is_run(what: str) -> bool:
    """Whether this is meant to be a run, and not a cell."""
    from loopfold.training.stored import PACKED

    return Path(what).is_dir() or (("/" in what or what.endswith((".txt", PACKED))) and ":" not in what)


def _of_run(path: Path, steps: int | None, trust: bool, text: list[str]) -> "tuple[nn.Module, Tensor | None]":
    """The model of a run, and tokens for `steps` steps of its own held-out text."""
    import torch

    from loopfold.errors import OptionError
    from loopfold.training.run import open_run

    run = open_run(path, trust=trust, text=text)
    if steps is None or steps < 1:
        return run.model, None
    try:
        y = run.passages(steps)[1]
    except OptionError:  # no text, or too little; its advice is to choose another part, which is not possible here
        y = torch.empty(0)
    if len(y) < steps:
        short = f"the run's held-out text has only {len(y)} steps; got --steps {steps}."
        raise OptionError(f"{short} Type fewer, or leave out --gradients.")
    return run.model, y


def _network(cell: str, pattern: str | None, layers: int, bidirectional: bool) -> "nn.Module":
    from loopfold.errors import OptionError, choose
    from loopfold.outputs import Classes, Reals
    from loopfold.patterns import (
        Autoencoder,
        EncoderDecoder,
        OutputRecurrence,
        SequenceToOne,
        SequenceToSequence,
        VectorToSequence,
    )
    from loopfold.recurrent import Bidirectional, Recurrent, RecurrentLayer, Stacked
    from loopfold.training.cells import make_cell

    def layer(reads: int, both: bool = bidirectional) -> RecurrentLayer:
        parts: list[RecurrentLayer] = []
        for _ in range(layers):
            directions = [Recurrent(make_cell(cell, reads, _UNITS)) for _ in range(2 if both else 1)]
            parts.append(Bidirectional(*directions) if both else directions[0])
            reads = parts[-1].hidden_size
        return Stacked(parts) if layers > 1 else parts[0]

    def output_recurrence() -> "nn.Module":
        if cell != "elman" or layers > 1 or bidirectional:
            raise OptionError("output recurrence has a step of its own: type elman --pattern output-recurrence.")
        return OutputRecurrence(_READS, _UNITS, _OUTPUTS)

    def both_parts(reads: int) -> tuple[RecurrentLayer, RecurrentLayer]:
        """An encoder, and a decoder for its vector; what is written step by step cannot be read backwards."""
        encoder = layer(reads)
        return encoder, layer(encoder.hidden_size + _OUTPUTS, both=False)

    makers: list[Callable[[], Any]] = [
        lambda: SequenceToSequence(layer(_READS), Classes(_OUTPUTS)),
        lambda: SequenceToOne(layer(_READS), Classes(_OUTPUTS)),
        output_recurrence,
        lambda: VectorToSequence(layer(_READS + _OUTPUTS), Classes(_OUTPUTS)),
        lambda: EncoderDecoder(*both_parts(_READS), Classes(_OUTPUTS)),
        lambda: Autoencoder(*both_parts(_OUTPUTS), Reals(_OUTPUTS)),
    ]
    patterns = dict(zip(PATTERNS, makers, strict=True))
    return layer(_READS) if pattern is None else patterns[choose("pattern", pattern, PATTERNS)]()


def _feeding(name: str) -> "Feeding":
    from loopfold.errors import choose
    from loopfold.feeding import FreeRunning, ScheduledSampling, TeacherForcing

    kinds: list[Feeding] = [TeacherForcing(), FreeRunning(), ScheduledSampling(0.5)]
    return dict(zip(FEEDINGS, kinds, strict=True))[choose("feeding", name, FEEDINGS)]
