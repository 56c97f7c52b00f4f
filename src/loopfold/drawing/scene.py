"""What a picture of a graph shows: nodes at their places, and edges; also as a graph for Graphviz."""

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import cycle
from typing import Any

from loopfold.drawing.figure import CYCLE, LIGHT, style
from loopfold.drawing.notation import plain
from loopfold.drawing.routing import Line, Route, Spot, route

VANISHED = 1e-6  # of the largest gradient: what is less is dotted


class Does(Enum):
    """What the parameters of an edge do, which decides their colour; of the first of a kind, in every picture."""

    READ = "blue"  # the input
    CARRY = "orange"  # something from one step to another
    ANSWER = "green"  # outputs are read off
    OTHER = ""


@dataclass(frozen=True)
class Shape:
    """A node as it is painted."""

    spot: Spot
    text: str
    fill: str
    kind: str  # circle, box, square (a delay), dots
    note: str = ""  # the size of a gradient
    dashed: bool = False


@dataclass(frozen=True)
class Link:
    """An edge as it is painted."""

    source: Hashable
    target: Hashable
    kind: Hashable
    parameters: tuple[str, ...] = ()
    note: str = ""
    dashed: bool = False
    size: float | None = None  # of the gradient on it, relative to the largest
    via: tuple[tuple[float, float], ...] = ()  # points that it must pass
    ends: tuple[float, float] = (0.0, 0.0)  # how far right of the middle of its source and target it begins and ends
    does: Does = Does.OTHER
    product: bool = True  # of its parameters: whether each multiplies what the one before it has made

    def label(self) -> tuple[str, float]:
        return label_of(self.parameters, self.note, self.product)

    def label_size(self) -> tuple[float, float]:
        return label_size(self.parameters, self.note, self.product)


@dataclass(frozen=True)
class Scene:
    """What a picture shows, each node at its place; `said` is what symbols stand for, where that needs words."""

    title: str
    shapes: dict[Hashable, Shape]
    links: list[Link]
    said: tuple[tuple[str, str], ...] = ()

    def lines(self) -> list[Line]:
        """The links, to be routed."""
        return [
            Line(
                ln.source,
                ln.target,
                _kind(ln),
                ln.label_size(),
                0.42 * head_size(pen(ln)[0]),
                ln.via,
                ln.ends,
            )
            for ln in self.links
        ]

    def routes(self) -> list[Route]:
        return route({key: shape.spot for key, shape in self.shapes.items()}, self.lines())

    def dot(self) -> str:
        """The same nodes and edges for Graphviz, in the same rows and colours."""
        names = {key: f"n{i}" for i, key in enumerate(self.shapes)}
        rows: dict[float, list[str]] = {}
        for key, shape in self.shapes.items():
            if shape.kind != "square":
                rows.setdefault(round(shape.spot.y, 3), []).append(names[key])
        colours = parameter_colours(self.links)

        def lines() -> Iterator[str]:
            yield f"digraph {_quoted(self.title)} {{"
            yield "  rankdir=BT; node [fontname=serif]; edge [fontname=serif];"
            for key, shape in self.shapes.items():
                text = "⋯" if shape.kind == "dots" else " ".join(filter(None, [plain(shape.text), plain(shape.note)]))
                yield f"  {names[key]} [label={_quoted(text)}, {_dot_look(shape)}];"
            for row in rows.values():
                yield f"  {{ rank=same; {'; '.join(row)} }}"
            for link in self.links:
                width, _ = pen(link)
                colour = colours.get(link.parameters, LIGHT["ink"])
                look = [f'color="{colour}", penwidth={width:.2g}']
                if text := plain(link.label()[0]):
                    look.append(f'label={_quoted(text)}, fontcolor="{colour}"')
                if link.dashed:
                    look.append("style=dashed")
                if self.shapes[link.source].spot.y >= self.shapes[link.target].spot.y:
                    look.append("constraint=false")  # it leads to another step; rows are those of one
                yield f"  {names[link.source]} -> {names[link.target]} [{', '.join(look)}];"
            yield "}"

        return "\n".join(lines()) + "\n"


def _dot_look(shape: Shape) -> str:
    if shape.kind == "dots":
        return "shape=plaintext"
    if shape.kind == "square":
        return f'shape=square, style=filled, fillcolor="{shape.fill}", width=0.15, height=0.15, fixedsize=true'
    style = "filled,dashed" if shape.dashed else "filled,rounded" if shape.kind == "box" else "filled"
    return f'shape={shape.kind}, style="{style}", fillcolor="{shape.fill}", color="{LIGHT["ink"]}"'


@cache
def text_size(text: str, size: float) -> tuple[float, float]:
    """The width and height of a text, in inches."""
    if not text:
        return 0.0, 0.0
    with style():
        from matplotlib.textpath import TextPath

        box = TextPath((0, 0), text, size=size).get_extents()
    return box.width / 72, box.height / 72


def _kind(link: Link) -> Hashable:
    return link.kind, type(link.source), type(link.target)


def parameter_colours(links: list[Link]) -> dict[tuple[str, ...], str]:
    """The same parameters have the same colour wherever they are used, each their own while there are colours."""
    used = {link.parameters: None for link in links if link.parameters}
    colours: dict[tuple[str, ...], str] = {}
    for kind in (Does.READ, Does.CARRY, Does.ANSWER):
        of_it = [p for p in (ln.parameters for ln in links if ln.does is kind) if p and p not in colours]
        colours |= dict.fromkeys(of_it[:1], LIGHT[kind.value])
    kept = [LIGHT[kind.value] for kind in Does if kind.value]
    others = [p for p in used if p not in colours]
    return colours | dict(zip(others, cycle([c for c in CYCLE if c not in kept]), strict=False))


def label_of(parameters: tuple[str, ...], note: str, product: bool = True) -> tuple[str, float]:
    """What stands beside an edge, and the size of its letters."""
    if parameters:
        # U E x: what multiplies first stands last; what stands abreast, as W_i and W_f, is no product
        return "$" + (r"\,".join(reversed(parameters)) if product else r",\;".join(parameters)) + "$", 10.5
    return note, 9.5 if note.startswith("$") else 7.5  # a name of the step's own, or a word


def label_size(parameters: tuple[str, ...], note: str, product: bool = True) -> tuple[float, float]:
    """Half the width and height of what stands beside an edge; zero for nothing."""
    text, font = label_of(parameters, note, product)
    if not text:
        return 0.0, 0.0
    width, height = text_size(text, font)
    return width / 2 + 0.02, height / 2 + 0.02


def pen(link: Link) -> tuple[float, Any]:
    """How thick a line is, by the size of what it carries: five times thinner for a thousandth of the largest."""
    solid: Any = (0, (4, 2.2)) if link.dashed else "-"
    if link.size is None:
        return 1.2, solid
    if link.size < VANISHED:
        return 0.6, (0, (1, 2.5))
    return 0.7 + 3.3 * max(0.0, 1 + math.log10(link.size) / 3), solid


def head_size(width: float) -> float:
    """The length of an arrow's head, in inches; it is 0.84 times as wide."""
    return 0.085 + 0.02 * width


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
