"""`loopfold play`: one HTML file in which a network learns while you watch. It needs no run and no network."""

from importlib.resources import files
from pathlib import Path
from string import Template

from loopfold.drawing.circuit import Level
from loopfold.drawing.draw import draw
from loopfold.drawing.figure import theme_css
from loopfold.errors import Argument, OptionError
from loopfold.play.programs import SIZES, Maker, check_step, script_of
from loopfold.report.markup import asset as asset_of_report
from loopfold.report.markup import data_block, escape, fingerprint, picture
from loopfold.report.page import write_page
from loopfold.training.cells import maker_of

CELLS = {"elman": "Elman", "gru": "GRU", "lstm": "LSTM"}


def write_play(out: str | Path = "play.html", cell: str | None = None) -> Path:
    """Write the page.

    `out`   the file; one that is there already is replaced as a whole
    `cell`  a cell of one's own beside Elman, GRU and LSTM, as `path/to/file.py:Class`; its file is run
    """
    return write_page(Path(out), lambda: play_page(cell), "play.html")


def play_page(cell: str | None = None) -> str:
    """The page as a whole."""
    names, makers = dict(CELLS), dict[str, Maker]()
    if cell is not None:
        if ":" not in cell:
            wanted = "it names a cell of your own, as path/to/file.py:Class; Elman, GRU and LSTM are there anyway"
            raise OptionError(Argument("cell"), f": {wanted}. Got {cell!r}.")
        names["own"], makers["own"] = cell.rpartition(":")[2], maker_of(cell)  # first, since it may be refused
        check_step(makers["own"], f"the first step of {cell} failed")
    makers |= {name: maker_of(name) for name in CELLS}
    text = " ".join(_asset("text.txt").split())
    letters = sorted({*text})
    shapes = {"echo": (1, 1), "adding": (2, 1), "parity": (1, 1), "text": (len(letters), len(letters))}
    programs = script_of(makers, dict.fromkeys(shapes.values()))
    script = "\n".join(['"use strict";', programs, *map(_asset, ("learning.js", "picture.js", "page.js"))])
    facts = {"cells": names, "sizes": SIZES, "shapes": shapes, "text": text, "letters": "".join(letters)}
    return Template(_asset("page.html")).substitute(
        fingerprint=fingerprint(script),
        style=f"{theme_css(':root')}\n{asset_of_report('page.css')}\n{_asset('page.css')}",
        cells="\n".join(_choice("cell", name, label, name == "elman") for name, label in names.items()),
        sizes="\n".join(_choice("size", str(size), str(size), size == 32) for size in SIZES),
        circuits="\n".join(
            f'<div data-cell="{name}" hidden>{picture(draw(maker(2, 4), level=Level.OPERATIONS))}</div>'
            for name, maker in makers.items()
        ),
        data=data_block("facts", facts),
        script=script,
    )


def _choice(group: str, value: str, label: str, chosen: bool) -> str:
    checked = " checked" if chosen else ""
    return f'<label><input type="radio" name="{group}" value="{value}"{checked}><span>{escape(label)}</span></label>'


def _asset(name: str) -> str:
    return (files("loopfold.play") / name).read_text(encoding="utf-8")
