"""Paint nodes and edges: as a figure, and as a graph for Graphviz."""

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle
from typing import Any

import numpy as np

from loopfold.drawing.figure import CYCLE, LIGHT, Drawing, new_figure, style
from loopfold.drawing.notation import plain
from loopfold.drawing.routing import Line, Route, Spot, route

_GAP = 0.7  # between graphs side by side


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


@dataclass(frozen=True)
class Scene:
    """What a picture shows, each node at its place."""

    title: str
    shapes: dict[Hashable, Shape]
    links: list[Link]

    def lines(self) -> list[Line]:
        """The links, to be routed."""
        return [
            Line(ln.source, ln.target, _kind(ln), label_size(ln.parameters, ln.note), 0.42 * _head(_pen(ln)[0]), ln.via)
            for ln in self.links
        ]

    def routes(self) -> list[Route]:
        return route({key: shape.spot for key, shape in self.shapes.items()}, self.lines())

    def dot(self) -> str:
        """The same nodes and edges for Graphviz."""
        names = {key: f"n{i}" for i, key in enumerate(self.shapes)}

        def lines() -> Iterator[str]:
            yield f"digraph {_quoted(self.title)} {{"
            yield "  rankdir=BT; node [fontname=serif]; edge [fontname=serif];"
            for key, shape in self.shapes.items():
                look = {"circle": "shape=circle", "box": "shape=box, style=rounded", "dots": "shape=plaintext"}.get(
                    shape.kind, "shape=square, style=filled, fillcolor=black, width=0.15, height=0.15, fixedsize=true"
                )
                label = "⋯" if shape.kind == "dots" else " ".join(filter(None, [plain(shape.text), plain(shape.note)]))
                yield f"  {names[key]} [label={_quoted(label)}, {look}];"
            for link in self.links:
                text, _ = _label(link.parameters, link.note)
                label = f" [label={_quoted(plain(text))}]" if text else ""
                yield f"  {names[link.source]} -> {names[link.target]}{label};"
            yield "}"

        return "\n".join(lines()) + "\n"


@cache
def text_size(text: str, size: float) -> tuple[float, float]:
    """The width and height of a text, in inches."""
    with style():
        from matplotlib.textpath import TextPath

        box = TextPath((0, 0), text or " ", size=size).get_extents()
    return box.width / 72, box.height / 72


def paint(scene: Scene) -> Drawing:
    """The scene as a figure of its own size, one unit an inch."""
    shapes, links = scene.shapes, scene.links
    colour_of = _parameter_colours(links)
    routes = scene.routes()
    low, high = _extent(shapes, routes, links)
    width, height = (high - low).tolist()
    with style():
        figure = new_figure(width, height)
        figure.set_layout_engine(None)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(low[0], high[0])
        axes.set_ylim(low[1], high[1])
        axes.set_axis_off()
        for link, way in zip(links, routes, strict=True):
            _paint_link(axes, link, way, colour_of)
        for shape in shapes.values():
            _paint_shape(axes, shape)
    return Drawing(figure, scene.title, _numbered(scene))


def _numbered(scene: Scene) -> Scene:
    """The same, with numbers for keys, so that a drawing does not keep the network that it shows."""
    number = {key: i for i, key in enumerate(scene.shapes)}
    kinds = {kind: i for i, kind in enumerate(dict.fromkeys(link.kind for link in scene.links))}
    links = [
        replace(link, source=number[link.source], target=number[link.target], kind=kinds[link.kind])
        for link in scene.links
    ]
    return Scene(scene.title, {number[key]: shape for key, shape in scene.shapes.items()}, links)


def _kind(link: Link) -> Hashable:
    return link.kind, type(link.source), type(link.target)


def _parameter_colours(links: list[Link]) -> dict[tuple[str, ...], str]:
    """The same parameters have the same colour wherever they are used; U, W and V always have theirs."""
    fixed = dict(zip([("U",), ("W",), ("V",)], CYCLE, strict=False))
    others = [p for p in dict.fromkeys(link.parameters for link in links) if p and p not in fixed]
    free = [colour for p, colour in fixed.items() if all(link.parameters != p for link in links)]
    colours = cycle([*free, *CYCLE[len(fixed) :]])
    return fixed | dict(zip(others, colours, strict=False))


def _label(parameters: tuple[str, ...], note: str) -> tuple[str, float]:
    """What stands beside an edge, and the size of its letters."""
    return ("$" + r"\,".join(parameters) + "$", 10.5) if parameters else (note, 7)


def label_size(parameters: tuple[str, ...], note: str) -> tuple[float, float]:
    """Half the width and height of what stands beside an edge; zero for nothing."""
    text, font = _label(parameters, note)
    if not text:
        return 0.0, 0.0
    width, height = text_size(text, font)
    return width / 2 + 0.02, height / 2 + 0.02


def _extent(shapes: dict[Hashable, Shape], routes: list[Route], links: list[Link]) -> tuple[Any, Any]:
    corners = [
        np.array(
            [
                [s.spot.x - s.spot.half_width, s.spot.y - s.spot.half_height],
                [s.spot.x + s.spot.half_width, s.spot.y + s.spot.half_height],
            ]
        )
        for s in shapes.values()
    ]
    corners += [way.points for way in routes]
    for way, link in zip(routes, links, strict=True):
        if way.label:
            half = np.array(label_size(link.parameters, link.note))
            corners.append(np.array([np.array(way.label) - half, np.array(way.label) + half]))
    points = np.concatenate(corners)
    return points.min(0) - 0.12, points.max(0) + 0.12


def _paint_shape(axes: Any, shape: Shape) -> None:
    from matplotlib.patches import Circle, FancyBboxPatch, Rectangle

    spot = shape.spot
    line: dict[str, Any] = {"linewidth": 1.1, "edgecolor": LIGHT["ink"], "facecolor": shape.fill, "zorder": 3}
    if shape.kind == "circle":
        axes.add_patch(
            Circle((spot.x, spot.y), spot.half_width, linestyle=(0, (3, 2)) if shape.dashed else "-", **line)
        )
    elif shape.kind == "square":
        corner = (spot.x - spot.half_width, spot.y - spot.half_height)
        axes.add_patch(Rectangle(corner, 2 * spot.half_width, 2 * spot.half_height, **line))
    elif shape.kind == "box":
        corner = (spot.x - spot.half_width + 0.05, spot.y - spot.half_height + 0.05)
        size = 2 * spot.half_width - 0.1, 2 * spot.half_height - 0.1
        axes.add_patch(FancyBboxPatch(corner, *size, boxstyle="round,pad=0.05", **{**line, "linewidth": 0.8}))
    font = 9.0 if shape.kind == "box" else 12.0
    if shape.kind == "circle":
        width, _ = text_size(shape.text, font)
        font *= min(1.0, 1.72 * spot.half_width / width)
    up = 0.06 if shape.note and shape.kind == "circle" else 0.0
    if shape.text:
        axes.text(
            spot.x,
            spot.y + up,
            shape.text,
            ha="center",
            va="center_baseline" if shape.kind == "box" else "center",
            fontsize=font,
            color=LIGHT["ink"],
            zorder=4,
        )
    if shape.note and shape.kind == "circle":
        axes.text(
            spot.x, spot.y - 0.13, shape.note, ha="center", va="center", fontsize=6.5, color=LIGHT["ink"], zorder=4
        )


def _paint_link(axes: Any, link: Link, way: Route, colour_of: dict[tuple[str, ...], str]) -> None:
    from matplotlib.patches import Polygon

    colour = colour_of.get(link.parameters, LIGHT["ink"])
    width, dashes = _pen(link)
    points = way.points
    direction = points[-1] - points[max(len(points) - 4, 0)]
    direction = direction / (np.hypot(*direction) or 1.0)
    head = _head(width)
    normal = np.array([-direction[1], direction[0]])
    tip = points[-1]
    base = tip - head * direction
    inside = np.hypot(*(points - tip).T) > head * 0.8
    shaft = np.concatenate([points[inside], (tip - 0.6 * head * direction)[None]]) if inside.any() else points[:1]
    axes.plot(
        shaft[:, 0],
        shaft[:, 1],
        color=colour,
        linewidth=width,
        linestyle=dashes,
        zorder=1,
        solid_capstyle="butt",
        dash_capstyle="butt",
    )
    axes.add_patch(
        Polygon([tip, base + 0.42 * head * normal, base - 0.42 * head * normal], color=colour, linewidth=0, zorder=2)
    )
    if way.label:
        shade = colour if link.parameters else LIGHT["muted"]
        text, font = _label(link.parameters, link.note)
        axes.text(
            *way.label,
            text,
            ha="center",
            va="center",
            fontsize=font,
            color=shade,
            zorder=5,
        )


def _pen(link: Link) -> tuple[float, Any]:
    """How thick a line is, by the size of what it carries: five times thinner for a thousandth of the largest."""
    solid: Any = (0, (4, 2.2)) if link.dashed else "-"
    if link.size is None:
        return 1.2, solid
    if link.size < 1e-6:
        return 0.6, (0, (1, 2.5))
    return 0.7 + 3.3 * max(0.0, 1 + math.log10(link.size) / 3), solid


def _head(width: float) -> float:
    """The length of an arrow's head, in inches; it is 0.84 times as wide."""
    return 0.085 + 0.02 * width


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


# ------------------------------------------------------------------ several


def beside(*drawings: Drawing) -> Drawing:
    """Graphs side by side in one picture, as the book shows a circuit and what it unfolds to.

    >>> from loopfold import Elman, draw
    >>> beside(draw(Elman(3, 5)), draw(Elman(3, 5), steps=3))
    <Drawing: The circuit of Elman; The unfolded graph of Elman, 3 steps>
    """
    shapes: dict[Hashable, Shape] = {}
    links: list[Link] = []
    right = 0.0
    if not drawings:
        raise TypeError("beside takes drawings of graphs, as lf.draw makes them; got none.")
    for i, drawing in enumerate(drawings):
        scene = drawing.graph if isinstance(drawing, Drawing) else None
        if not isinstance(scene, Scene):
            raise TypeError(f"beside takes drawings of graphs, as lf.draw makes them; got {drawing!r}.")
        low, high = _extent(scene.shapes, scene.routes(), scene.links)
        right += -low[0] + (_GAP if i else 0.0)
        for key, shape in scene.shapes.items():
            shapes[i, key] = replace(shape, spot=replace(shape.spot, x=shape.spot.x + right))
        for link in scene.links:
            via = tuple((x + right, y) for x, y in link.via)
            links.append(replace(link, source=(i, link.source), target=(i, link.target), kind=(i, link.kind), via=via))
        right += high[0]
    return paint(Scene("; ".join(drawing.title for drawing in drawings), shapes, links))
