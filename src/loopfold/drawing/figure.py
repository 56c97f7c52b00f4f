"""A picture that shows itself in a notebook, follows light and dark, and saves itself in the format that you name."""

import hashlib
import html
import io
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from loopfold.drawing.glyphs import advance
from loopfold.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Every colour of a picture by its use, on light paper and on dark. A figure is painted with the light one; SVG and
# HTML have rules for a browser set to dark. Raster images, print and viewers that know no such rules are always light.
COLOURS = {
    "ink": ("#1f2328", "#e8eaed"),
    "paper": ("#fffffe", "#15181d"),
    "muted": ("#68707c", "#9aa4b2"),
    "grid": ("#d9dde3", "#343a44"),
    "grey": ("#808080", "#9aa4b2"),  # matplotlib's "0.5"
    "input": ("#d7e8fa", "#1d3b5c"),
    "state": ("#d9f2dc", "#1c4a2a"),
    "output": ("#fdeccb", "#57401a"),
    "loss": ("#fbdcd9", "#5e2724"),
    "target": ("#e9e5f5", "#39324f"),
    "operation": ("#f1f3f5", "#272c34"),
    "delay": ("#1e2227", "#000000"),  # a square that is black on any paper
    "blue": ("#0b63b0", "#6cb4f5"),
    "orange": ("#b8470b", "#f29a57"),
    "green": ("#14753f", "#62c98b"),
    "purple": ("#7a35b8", "#c395f0"),
    "red": ("#c02a2a", "#f4807b"),
    "teal": ("#0b7285", "#5cc8d7"),
    "olive": ("#6b6a00", "#cfcb55"),
    "pink": ("#b02a78", "#f28ac6"),
    "brown": ("#7a4a21", "#cf9a6b"),
}
LIGHT = {use: light for use, (light, _) in COLOURS.items()}
TURNS = ("blue", "orange", "green", "purple", "teal", "red", "olive", "pink", "brown")  # for lines and parameters
CYCLE = [LIGHT[use] for use in TURNS]
_FINE = 288  # dots an inch of the heat maps in a file: their cells have edges in what smooths images too
FORMATS = ("svg", "png", "html", "dot", "pdf")


def format_of(path: Path) -> str:
    """The format that a file's name ends in."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        got = f".{kind}" if kind else "a name without an ending"
        raise ValueError(f"a drawing is saved as {', '.join(f'.{k}' for k in FORMATS)}; got {got} ({path}).")
    return kind


class Graph(Protocol):
    """Nodes and edges."""

    def dot(self) -> str: ...


class Drawing:
    """A picture. A notebook shows it; `save("picture.svg")` writes it, as .svg, .png, .pdf, .html or (graphs) .dot.

    `figure` is the matplotlib figure, to be changed as one likes; `title` says in words what it shows; `graph` is what
    is drawn, where that is nodes and edges. A figure of your own, made inside `with lf.style():`, can be one too.
    """

    def __init__(self, figure: "Figure", title: str, graph: Graph | None = None) -> None:
        self.figure = figure
        self.title = title
        self.graph = graph

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the picture; what its name ends in says how. A file that is there already is replaced as a whole."""
        path = Path(path)
        data = self._encoded(format_of(path))
        try:
            write_whole(path, data)
        except OSError as error:
            raise OSError(f"{path} cannot be written: {error.strerror or error}.") from error
        return path

    def svg(self) -> str:
        """The picture as an `<svg>` element that follows light and dark, to stand in a page or in a file."""
        with style():
            buffer = io.StringIO()
            self.figure.savefig(buffer, format="svg", dpi=_FINE, metadata={"Date": None, "Creator": None})
        return _element(buffer.getvalue(), self.title)

    def html(self) -> str:
        """A page with the picture alone."""
        title = html.escape(self.title)
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<style>{theme_css(':root')}\n"
            "body { margin: 1rem; background: var(--lf-paper); text-align: center } svg { max-width: 100%; "
            f"height: auto }}</style></head>\n<body>{self.svg()}</body></html>\n"
        )

    def dot(self) -> str:
        """The nodes and edges of a graph, in the language of Graphviz."""
        if self.graph is None:
            raise ValueError(f"{self.title} is no graph, so there is no .dot of it; type .svg or .png.")
        return self.graph.dot()

    def _encoded(self, kind: str) -> bytes:
        if kind == "dot":
            return self.dot().encode()
        if kind == "svg":
            return ('<?xml version="1.0" encoding="utf-8"?>\n' + self.svg()).encode()
        if kind == "html":
            return self.html().encode()
        buffer = io.BytesIO()
        metadata = {"CreationDate": None} if kind == "pdf" else {"Software": None, "Title": self.title}
        with style():
            self.figure.savefig(buffer, format=kind, dpi=_FINE if kind == "pdf" else 200, metadata=metadata)
        return buffer.getvalue()

    def _repr_html_(self) -> str:
        return f'<div style="max-width: 100%; overflow-x: auto">{self.svg()}</div>'

    def _repr_png_(self) -> bytes:
        return self._encoded("png")

    def __repr__(self) -> str:
        return f"<Drawing: {self.title}>"


# ------------------------------------------------------------------ style


@contextmanager
def style() -> Iterator[None]:
    """The look of every picture, while one is made or written; what is painted in its colours follows light and dark.

    >>> from matplotlib.figure import Figure
    >>> with style():
    ...     figure = Figure()
    ...     _ = figure.add_subplot().plot([1, 4, 9])
    >>> Drawing(figure, "Three squares")
    <Drawing: Three squares>
    """
    import matplotlib.style
    from cycler import cycler  # matplotlib's own

    settings: dict[str, Any] = {
        "svg.hashsalt": "loopfold",  # the same picture is the same file
        "svg.fonttype": "none",  # text is text: it can be searched, read aloud and edited
        "pdf.fonttype": 42,  # TrueType, which journals ask for
        "mathtext.fontset": "dejavuserif",  # wide, so that in its place a reader's own font fits too
        "font.size": 10,
        "axes.edgecolor": LIGHT["muted"],
        "axes.labelcolor": LIGHT["ink"],
        "axes.titlecolor": LIGHT["ink"],
        "axes.titlesize": 11,
        "axes.facecolor": LIGHT["paper"],
        "axes.prop_cycle": cycler(color=CYCLE),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.facecolor": LIGHT["paper"],
        "savefig.facecolor": LIGHT["paper"],
        "legend.frameon": False,
        "legend.labelcolor": LIGHT["ink"],
        "grid.color": LIGHT["grid"],
        "text.color": LIGHT["ink"],
        "xtick.color": LIGHT["muted"],
        "ytick.color": LIGHT["muted"],
    }
    with matplotlib.style.context(settings, after_reset=True):  # not what the user has set for their own figures
        yield


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure, in inches, made inside `style`. Nothing global knows of it."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def theme_css(selector: str) -> str:
    """Rules that give every colour its value by the viewer's setting."""
    light = "; ".join(f"--lf-{use}: {value}" for use, (value, _) in COLOURS.items())
    dark = "; ".join(f"--lf-{use}: {value}" for use, (_, value) in COLOURS.items())
    return (
        f"{selector} {{ {light}; color-scheme: light dark }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ {selector} {{ {dark} }} }}"
    )


def _element(svg: str, title: str) -> str:
    """matplotlib's SVG as one element, with rules for the dark, names of its own, words for those who cannot see."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]).replace("\n", ""), svg)
    svg = re.sub(r"<text>\s*(<tspan .*?)\s*</text>", _runs, svg, flags=re.DOTALL)
    svg = re.sub(
        r"font-family: '(?:DejaVu Serif|STIX)[^';]*'(?=[;\"])", r"\g<0>, Georgia, 'Times New Roman', serif", svg
    )
    svg = re.sub(r"<text(?=[^<]*  )", '<text xml:space="preserve"', svg)
    # a marker is painted as each <use> of it says, which rules for the dark can change, and not as it says itself
    svg = re.sub(r'(<defs>\s*<path [^>]*?) style="stroke[^"]*"', r"\1", svg)
    mark = "lf" + hashlib.sha256((title + svg).encode()).hexdigest()[:8]
    svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{mark}-", svg)  # many pictures may share a page
    svg = svg.replace('<style type="text/css">*{', f'<style type="text/css">.{mark}{{')
    head, rest = svg.split(">", 1)
    name = html.escape(title, quote=True)
    head = head.replace("<svg", f'<svg class="loopfold {mark}" role="img" aria-label="{name}"', 1)
    return f"{head}><title>{name}</title><style>{_dark_css(mark, svg)}</style>{rest}"


def _runs(formula: re.Match[str]) -> str:
    """A formula, of which matplotlib places every letter by itself, as runs of letters that follow each other: a word
    stays one in any font, and what knows no places within a text shows it too."""
    placed = re.findall(r'<tspan x="([^"]*)" y="([^"]*)" style="([^"]*)">(.*?)</tspan>', formula[1])
    if len(placed) != formula[1].count("<tspan"):  # written in some other way
        return formula[0]
    runs: list[str] = []
    last: dict[tuple[str, str], tuple[int, float]] = {}  # at each height, in each style: the last run, and its end
    for x, y, style, letter in sorted(placed, key=lambda glyph: float(glyph[0])):
        css = dict(part.split(": ") for part in style.split("; "))
        size = float(css["font-size"].removesuffix("px"))
        run, end = last.get((y, style), (0, math.inf))
        if abs(float(x) - end) > 0.1 * size:
            run = len(runs)
            runs.append(f'<text x="{x}" y="{y}" style="{style}">')
        runs[run] += letter
        across = advance(html.unescape(letter), css["font-family"].strip("'"), "font-style" in css)
        last[y, style] = run, float(x) + size * across
    return "".join(f"{run}</text>\n" for run in runs)


def _dark_css(mark: str, svg: str) -> str:
    """Rules for the colours of a picture where a browser is set to dark; all else shows the light ones in the SVG."""
    rules = [
        f'.{mark} [style*="{paint}: {light}"] {{ {paint}: {dark} !important }}\n'
        for light, dark in COLOURS.values()
        for paint in ("fill", "stroke")
        if f"{paint}: {light}" in svg
    ]
    return f"@media screen and (prefers-color-scheme: dark) {{\n.{mark} {{ color-scheme: dark }}\n{''.join(rules)}}}"
