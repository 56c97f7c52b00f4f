"""The commands that show a run: gradients, report."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loopfold.cli.base import (
    DeviceOption,
    PartOption,
    RunArgument,
    TextOption,
    TrustOption,
    app,
    completing,
    echo,
    echo_json,
    flag,
    spelt,
    writable,
)

if TYPE_CHECKING:
    from loopfold.drawing.figure import Drawing
    from loopfold.gradients import GradientFlow
    from loopfold.probing import Tracked
    from loopfold.spectrum import Eigenvalues
    from loopfold.training.options import Options
    from loopfold.training.run import Run

# ------------------------------------------------------------------ gradients

SHARES = 200_000_000  # numbers: the shares of each step hold as many as the parameters, times the steps
LONGEST = 1_000  # steps of a passage, for which a GRU of 320 units takes minutes
FORMATS = ("svg", "png", "pdf", "html")  # of these pictures, none of which is a graph
FILES = (".svg", ".png", ".pdf", ".html", ".htm", ".dot", ".jpg", ".jpeg", ".gif", ".webp")


@app.command(epilog="**Example:** `loopfold gradients runs/bard --on valid --steps 100 --out pictures`.")
def gradients(
    run: RunArgument,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder for the pictures; RUN/pictures by default, of a packed run RUN-pictures."),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, max=LONGEST, help="Steps of a passage; the time it takes grows with its square.")
    ] = 64,
    kind: Annotated[
        str,
        typer.Option(
            "--format", help="How the pictures are written: svg, png, pdf or html.", autocompletion=completing(*FORMATS)
        ),
    ] = FORMATS[0],
    on: PartOption = None,
    text: TextOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table to read.")] = False,
    trust: TrustOption = False,
) -> None:
    """Where gradients vanish or explode, what each step adds, the eigenvalues of W, and which unit tracks what."""
    from loopfold.errors import OptionError, choose
    from loopfold.gradients import gradient_flow, per_step_gradients
    from loopfold.language.base import count_parameters
    from loopfold.language.recurrent import RecurrentLM
    from loopfold.probing import beginning, hidden_states
    from loopfold.training.run import open_run

    choose("format", kind, FORMATS)
    found = open_run(run, trust=trust, text=text or ())
    model = found.model
    if not isinstance(model, RecurrentLM):
        raise OptionError(f"{run} is a {found.options.kind} without recurrence: no gradient goes back through time.")
    on = on or found.corpus().part
    x, y = found.passages(steps, on)
    network, x = model.network, model.encode(x)
    folder = _folder(out or found.stored.beside("pictures"))
    flow = gradient_flow(network, network.loss, x, y)
    fewer = max(1, min(len(x), SHARES // count_parameters(network)))
    shares = per_step_gradients(network, network.loss, x[:fewer], y[:fewer])
    spectrum, without = _spectrum(found)
    states = hidden_states(model, found.vocabulary, beginning(found.text(on)))
    drawings = {"gradient_flow": flow.draw(), "step_gradients": shares.draw(), "hidden_states": states.draw()}
    drawings |= {"eigenvalues": spectrum.draw()} if spectrum else {}
    paths = _save(drawings, folder, kind)
    verdict = spelt(flow.said) + _already(found.options)
    passages = f"{on} text, {x.shape[1]} passage{'s'[: x.shape[1] > 1]} of {len(x)} {found.vocabulary.unit}s"
    if as_json:
        data = {
            "on": on,
            "steps": len(x),
            "passages": x.shape[1],
            "verdict": verdict,
            "rate": flow.rate,
            "reach": flow.reach.tolist(),
            "spectral_radius": spectrum.radius if spectrum else {},
            "tracking": [vars(tracked) for tracked in states.tracking],
            "pictures": [str(path) for path in paths],
        }
        echo_json(data)
    else:
        echo(writable(_describe(passages, verdict, flow, _radii(spectrum, without), states.tracking, paths)))


def _already(options: "Options") -> str:
    """Which advice was taken, since what training made of it is not the start any more."""
    given = {"recurrent_init": options.recurrent_init, "forget_bias": options.forget_bias}
    flags = " ".join(flag(name, value) for name, value in given.items() if value is not None)
    return f" (It began with {flags}.)" if flags else ""


def _spectrum(run: "Run") -> "tuple[Eigenvalues | None, str]":
    """The eigenvalues; or none, and why: a cell of the user's own may have no such matrix."""
    from loopfold.spectrum import eigenvalues

    try:
        return eigenvalues(run.model), ""
    except ValueError as reason:
        return None, str(reason)


def _folder(out: Path) -> Path:
    """The folder of the pictures, made before the work that they take."""
    from loopfold.errors import OptionError
    from loopfold.training.folder import ELSEWHERE
    from loopfold.training.stored import RunError

    if out.suffix.lower() in FILES and not out.exists():
        chosen = f" --format {kind}" if (kind := out.suffix.lower().removeprefix(".")) in FORMATS[1:] else ""
        raise OptionError(
            f"--out is a folder here, for several pictures; got the file {out}. Type --out pictures{chosen}."
        )
    if out.is_file():
        raise OptionError(f"{out} is a file: name a folder, such as --out pictures.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{out} cannot be written: {error.strerror or error}. ", *ELSEWHERE) from error
    return out


def _save(drawings: "dict[str, Drawing]", folder: Path, kind: str) -> list[Path]:
    from loopfold.training.folder import ELSEWHERE
    from loopfold.training.stored import RunError

    try:
        return [drawing.save(folder / f"{name}.{kind}") for name, drawing in drawings.items()]
    except OSError as error:  # whose words name the file
        raise RunError(f"{error} ", *ELSEWHERE) from error


def _describe(
    passages: str,
    verdict: str,
    flow: "GradientFlow",
    radii: list[str],
    tracking: "list[Tracked]",
    paths: list[Path],
) -> str:
    last = len(flow.reach) - 1
    distances = sorted({d for d in (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if d < last} | {last})
    lines = [
        f"{'text':<24}{passages}",
        f"{'gradient':<24}{verdict}",
        "",
        f"{'distance d = t - k':<24}‖∂L(t)/∂h(k)‖, relative to d = 0",
        *(f"{d:<24}{float(flow.reach[d]):.3g}" for d in distances),
        "",
        *radii,
        f"{'feature of the text':<28}{'unit':>4}  correlation",
        *(f"{tracked.feature:<28}{tracked.unit:>4}  {tracked.correlation:+.2f}" for tracked in tracking),
        "",
        f"The pictures are in {paths[0].parent}: {', '.join(path.name for path in paths)}",
    ]
    return "\n".join(lines)


def _radii(spectrum: "Eigenvalues | None", without: str) -> list[str]:
    if spectrum is None:
        return [f"{'eigenvalues':<24}none: {without}", ""]
    rows = [f"{name:<24}{radius:.3f}" for name, radius in spectrum.radius.items()]
    return [f"{'matrix':<24}spectral radius", *rows, ""]


# ------------------------------------------------------------------ report


@app.command(
    epilog="**Example:** `loopfold report runs/bard --out bard.html`, then open it in a browser, online or not."
)
def report(
    run: RunArgument,
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write; RUN/report.html by default, of a packed run RUN-report.html."),
    ] = None,
    text: TextOption = None,
    passage: Annotated[
        str | None, typer.Option(help="Text to show the hidden states of; by default the held-out text's beginning.")
    ] = None,
    model_megabytes: Annotated[
        float, typer.Option(min=0, help="The most that the model itself may add to the page, in MB; 0 leaves it out.")
    ] = 8.0,
    device: DeviceOption = "cpu",
    trust: TrustOption = False,
) -> None:
    """One page on a run, for a browser: the model itself, to type to; curve, table, graphs, gradients, hidden states
    and samples. Works offline.
    """
    from loopfold.report.page import write_report
    from loopfold.training.run import open_run

    path = write_report(
        open_run(run, device, trust=trust, text=text or ()), out, passage, model_megabytes=model_megabytes
    )
    echo(f"The report is in {path}. Open it in a browser.")
