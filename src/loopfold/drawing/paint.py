"""Paint nodes and edges as a figure."""

import re
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import numpy as np

from loopfold.drawing.figure import LIGHT, Drawing, new_figure, style
from loopfold.drawing.legend import SMALL, Key, legend
from loopfold.drawing.routing import Route, resampled
from loopfold.drawing.scene import (
    Link,
    Scene,
    Shape,
    head_size,
    parameter_colours,
    pen,
    text_size,
)

_GAP = 0.7  # between graphs side by side
LARGE = 12.0  # the size of letters in a circle
_WORDS = re.compile(r"\$\\mathrm\{([^{}]*\\_[^{}]*)\}(.*)\$")  # a name of several words, and what stands above it


def paint(scene: Scene) -> Drawing:
    """The scene as a figure of its own size, one unit an inch; what its signs mean stands below."""
    shapes, links = scene.shapes, scene.links
    colour_of = parameter_colours(links)
    routes = scene.routes()
    low, high = _extent(scene, routes)
    keys = legend(scene, float(low[0]), float(low[1]), float(high[0]))
    low[1] = min([low[1], *(key.y - 0.14 * key.scale for key in keys)])
    high[0] = max([high[0], *(key.right + 0.12 for key in keys)])
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
        for key in keys:
            _paint_key(axes, key)
    return Drawing(figure, scene.title, _numbered(scene))


def _numbered(scene: Scene) -> Scene:
    """The same, with numbers for keys, so that a drawing does not keep the network that it shows."""
    number = {key: i for i, key in enumerate(scene.shapes)}
    kinds = {kind: i for i, kind in enumerate(dict.fromkeys(link.kind for link in scene.links))}
    links = [
        replace(link, source=number[link.source], target=number[link.target], kind=kinds[link.kind])
        for link in scene.links
    ]
    return Scene(scene.title, {number[key]: shape for key, shape in scene.shapes.items()}, links, scene.said)


def _extent(scene: Scene, routes: list[Route]) -> tuple[Any, Any]:
    corners = [
        np.array([[s.x - s.half_width, s.y - s.half_height], [s.x + s.half_width, s.y + s.half_height]])
        for s in (shape.spot for shape in scene.shapes.values())
    ]
    corners += [way.points for way in routes]
    for way, link in zip(routes, scene.links, strict=True):
        if way.label:
            half = np.array(link.label_size())
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
    text, font = _fitted(shape.text, 1.66 * spot.half_width) if shape.kind == "circle" else (shape.text, 9.0)
    up = (0.08 if "_{" in text else 0.06) if shape.note and shape.kind == "circle" else 0.0
    if text:
        axes.text(
            spot.x,
            spot.y + up,
            text,
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


def _fitted(text: str, room: float) -> tuple[str, float]:
    """A name as large as its circle allows; one of several words has a line for each, if it would be small in one."""
    size = LARGE * min(1.0, room / (text_size(text, LARGE)[0] or room))
    name = _WORDS.fullmatch(text)
    if size > 0.6 * LARGE or name is None:
        return text, size
    *first, last = (rf"$\mathrm{{{word}\_}}$" for word in name[1].split(r"\_"))
    lines = [*first, last.replace(r"\_}$", f"}}{name[2]}$")]
    widest = max(text_size(line, LARGE)[0] for line in lines)
    return "\n".join(lines), LARGE * min(room / widest, 0.6, 1.8 / len(lines))


def _paint_link(axes: Any, link: Link, way: Route, colour_of: dict[tuple[str, ...], str]) -> None:
    from matplotlib.patches import Polygon

    colour = colour_of.get(link.parameters, LIGHT["ink"])
    width, dashes = pen(link)
    points = way.points
    head, tip = head_size(width), points[-1]
    before = resampled(points, 200)
    before = before[np.hypot(*(before - tip).T) >= head]  # where the head of the arrow begins
    direction = tip - (before[-1] if len(before) else points[0])
    direction = direction / (np.hypot(*direction) or 1.0)
    normal = np.array([-direction[1], direction[0]])
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
        text, font = link.label()
        axes.text(
            *way.label,
            text,
            ha="center",
            va="center",
            fontsize=font,
            color=shade,
            zorder=5,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": LIGHT["paper"], "linewidth": 0} if way.on else None,
        )


def _paint_key(axes: Any, key: Key) -> None:
    sign, half = key.sign, key.sign_width / 2
    small = {"va": "center_baseline", "fontsize": SMALL * key.scale, "color": LIGHT["muted"], "zorder": 4}
    if isinstance(sign, Shape):
        size = key.scale * sign.spot.half_width
        spot = replace(sign.spot, x=key.x + half, y=key.y, half_width=size, half_height=size)
        _paint_shape(axes, replace(sign, spot=spot))
    elif isinstance(sign, Link):
        _paint_link(axes, sign, Route(np.array([[key.x, key.y], [key.x + 2 * half, key.y]]), None), {})
    else:
        axes.text(key.x + half, key.y, sign, ha="center", **{**small, "color": LIGHT["ink"]})
    if key.text:
        axes.text(key.text_at, key.y, key.text, ha="left", **small)


# ------------------------------------------------------------------ several


def beside(*drawings: Drawing) -> Drawing:
    """Graphs side by side in one picture, as the book shows a circuit and what it unfolds to.

    >>> from loopfold import Elman, draw
    >>> beside(draw(Elman(3, 5)), draw(Elman(3, 5), steps=3))
    <Drawing: The circuit of Elman; The unfolded graph of Elman, 3 steps>
    """
    shapes: dict[Hashable, Shape] = {}
    links: list[Link] = []
    said: dict[tuple[str, str], None] = {}
    right = 0.0
    if not drawings:
        raise TypeError("beside takes drawings of graphs, as lf.draw makes them; got none.")
    for i, drawing in enumerate(drawings):
        scene = drawing.graph if isinstance(drawing, Drawing) else None
        if not isinstance(scene, Scene):
            raise TypeError(f"beside takes drawings of graphs, as lf.draw makes them; got {drawing!r}.")
        low, high = _extent(scene, scene.routes())
        right += -low[0] + (_GAP if i else 0.0)
        for key, shape in scene.shapes.items():
            shapes[i, key] = replace(shape, spot=replace(shape.spot, x=shape.spot.x + right))
        for link in scene.links:
            via = tuple((x + right, y) for x, y in link.via)
            links.append(replace(link, source=(i, link.source), target=(i, link.target), kind=(i, link.kind), via=via))
        right += high[0]
        said |= dict.fromkeys(scene.said)
    return paint(Scene("; ".join(drawing.title for drawing in drawings), shapes, links, tuple(said)))
