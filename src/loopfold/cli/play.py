"""The command that writes a page on which a network learns."""

from pathlib import Path
from typing import Annotated

import typer

from loopfold.cli.base import app, echo


@app.command(
    epilog="**Examples:** `loopfold play`, then open play.html in a browser, online or not; "
    "`loopfold play --cell my_cell.py:MyCell --out mine.html`."
)
def play(
    cell: Annotated[
        str | None, typer.Option(help="A cell of your own beside Elman, GRU and LSTM: path/to/file.py:Class.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("play.html"),
) -> None:
    """A page for teaching, without a run: a small network learns while you watch, and its gradients vanish or not."""
    from loopfold.play.page import write_play

    path = write_play(out, cell)
    echo(f"The page is in {path}. Open it in a browser and press Play.")
