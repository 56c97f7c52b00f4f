"""Circuits and unfolded graphs as nodes with a place, and edges between them."""

import math
from collections.abc import Hashable
from dataclasses import dataclass

from loopfold.drawing.circuit import Circuit, Edge, Level, Role, Variable
from loopfold.drawing.figure import LIGHT
from loopfold.drawing.layout import Place, blocks
from loopfold.drawing.routing import Spot
from loopfold.drawing.scene import Does, Link, Scene, Shape, label_size, text_size
from loopfold.drawing.unfolded import Arrow, Gradients, Moment, Unfolded
from loopfold.wiring import When

RADIUS = 0.3
COLUMNS = 12  # where there are more steps, the first three and the last two are shown
_FIRST, _LAST = 3, 2
_LAST_STEP = r"^{(\tau)}"  # of what is there after the last step alone
_LANE = 0.15  # between two edges that run along the columns


def _size(variable: Variable) -> tuple[float, float]:
    if variable.role is not Role.OPERATION:
        return RADIUS, RADIUS
    return max(0.19, text_size(variable.label, 9)[0] / 2 + 0.1), 0.15


def _node(variable: Variable, place: Place, text: str, note: str = "", dashed: bool = False) -> Shape:
    if variable.role is Role.OPERATION:
        return Shape(Spot(*place, *_size(variable)), variable.label, LIGHT["operation"], "box", note)
    fill = LIGHT["paper"] if dashed else LIGHT[variable.role.value]
    return Shape(Spot(*place, *_size(variable), round=True), text, fill, "circle", note, dashed)


def _is_fed(edge: Edge) -> bool:
    return edge.lag != 0 and edge.source.role in (Role.OUTPUT, Role.TARGET)


# ------------------------------------------------------------------ columns


class _Columns:
    """Where the steps of each phase stand, in columns; `orders` are the steps shown, 0 among them for the dots."""

    def __init__(self, circuit: Circuit, taus: tuple[int, ...], gap: float, most: int = COLUMNS) -> None:
        self.circuit = circuit
        self.taus = taus
        self.orders = [_shown(tau, most) for tau in taus]
        across = [label_size(e.parameters, e.note, e.product)[0] for e in circuit.edges if e.lag != 0]
        self.room = max((2 * half + 0.45 for half in across), default=0.0)  # for a label between two columns
        gap = max(gap, self.room)
        self.blocks = blocks(circuit, _size)
        self.left: dict[int, float] = {}  # of a block, relative to its own zero
        self.right: dict[int, float] = {}
        self.start: dict[int, float] = {}
        self.step: dict[int, float] = {}
        x = 0.0
        for phase, block in self.blocks.items():
            inside = [v for v in block.places if v.when is not When.ONCE]
            xs = [block.places[v][0] + side * _size(v)[0] for v in inside for side in (-1, 1)]
            xs += [p[0] for way in block.ways.values() for p in way]
            self.left[phase], self.right[phase] = min(xs), max(xs)
            lanes = _LANE * max(0, len(block.entries) - 1)
            self.step[phase] = self.right[phase] - self.left[phase] + gap + lanes
            early = any(v.initial is not None and not v.backwards for v in inside)
            late = any(v.initial is not None and v.backwards for v in inside)
            self.start[phase] = x - self.left[phase] + early * (gap + 2 * RADIUS)
            x = self.start[phase] + self.right[phase] + self.step[phase] * (len(self.orders[phase]) - 1)
            x += late * (gap + 2 * RADIUS) + 2 * gap

    def column(self, phase: int, t: int) -> float:
        """The zero of a step's block; of step 0, that of the dots."""
        return self.start[phase] + self.step[phase] * self.orders[phase].index(t)

    def place(self, variable: Variable, t: int | None) -> Place:
        """`t` None: for all steps, below the middle of the columns. Outside 1 … τ: before the first, at the border."""
        x, y = self.blocks[variable.phase].places[variable]
        phase = variable.phase
        order = self.orders[phase]
        ends = self.column(phase, order[0]), self.column(phase, order[-1])
        if t is None:
            return (sum(ends) + self.left[phase] + self.right[phase]) / 2 + x, y
        if t == 0 or t == self.taus[phase] + 1:
            gap = self.step[phase] - (self.right[phase] - self.left[phase])
            return (
                ends[0] + self.left[phase] - gap - RADIUS if t == 0 else ends[1] + self.right[phase] + gap + RADIUS
            ), y
        return self.column(phase, t) + x, y

    def dots(self, variable: Variable) -> Place:
        x, y = self.blocks[variable.phase].places[variable]
        return self.column(variable.phase, 0) + x, y

    def way(self, edge: Edge, t: int | None, start: Place | None) -> tuple[Place, ...]:
        """The points that an edge into step `t` passes; from `start`, it first goes along the lane to the entry."""
        phase = edge.target.phase
        block = self.blocks[phase]
        if edge not in block.ways or t is None:
            return ()
        x = self.column(phase, t)
        up = [(x + a, b) for a, b in block.ways[edge]]
        key = (edge.source, edge.lag)
        if key not in block.entries or start is None:
            return tuple(up)
        enter = (x + block.entries[key][0], block.entries[key][1])
        if edge.source.when is When.ONCE:
            return (enter, *up)
        i = list(block.entries).index(key)
        lane = x + self.left[phase] - 0.32 - _LANE * i if edge.lag >= 0 else x + self.right[phase] + 0.32 + _LANE * i
        return ((lane, start[1]), (lane, enter[1]), enter, *up)

    def ends(self, edge: Edge) -> tuple[float, float]:
        """How far from the middles of its nodes an edge begins and ends."""
        return self.blocks[edge.target.phase].ends.get(edge, (0.0, 0.0))


# ------------------------------------------------------------------ the circuit


def circuit_scene(circuit: Circuit) -> Scene:
    """One column; whatever leads to another step goes through a black square, a delay of one step."""
    columns = _Columns(circuit, (1, 1), gap=1.1)
    shapes: dict[Hashable, Shape] = {
        v: _node(v, columns.place(v, _column_of(v)), f"${v.label}{_LAST_STEP if v.when is When.LAST else ''}$")
        for v in circuit.variables
    }
    links: list[Link] = []
    delays: dict[tuple[Variable, int], Spot] = {}
    loops = _loops(circuit, shapes)
    for edge in circuit.edges:
        key = (edge.source, edge.lag)
        if edge.lag != 0 and key not in delays:
            place, via = _delay(columns, shapes, loops, key)
            delays[key] = Spot(*place, 0.085, 0.085)
            shapes["delay", *key] = Shape(delays[key], "", LIGHT["delay"], "square")
            links.append(Link(edge.source, ("delay", *key), ("to the delay", edge), dashed=_is_fed(edge), via=via))
    for edge in circuit.edges:
        key = (edge.source, edge.lag)
        source = ("delay", *key) if key in delays else edge.source
        way = columns.way(edge, _column_of(edge.target), None)
        if key in delays and not way and edge.target is not edge.source and loops[key].around:
            x, target = delays[key].x, shapes[edge.target].spot
            on_lane = (d for d in delays.values() if abs(d.y - target.y) < 0.2 and x != d.x)
            if not any((d.x - x) * (d.x - target.x) < 0 for d in on_lane):  # else it would lead over a delay
                way = ((x, target.y),)
        links.append(_link(edge, source, edge.target, way, columns.ends(edge)))
    return Scene(f"The circuit of {circuit.name}", shapes, links, tuple(circuit.said.items()))


def _column_of(variable: Variable) -> int | None:
    return None if variable.when is When.ONCE else 1


@dataclass(frozen=True)
class _Loop:
    """The way of a variable through a delay, back to what reads it."""

    targets: tuple[Variable, ...]
    around: int  # how far out it goes around others, of another variable and on the same side; 0: it goes around none


def _loops(circuit: Circuit, shapes: dict[Hashable, Shape]) -> dict[tuple[Variable, int], _Loop]:
    """All loops; their order does not depend on the process."""
    targets: dict[tuple[Variable, int], list[Variable]] = {}
    for edge in circuit.edges:
        if edge.lag != 0:
            targets.setdefault((edge.source, edge.lag), []).append(edge.target)
    heights = {key: [shapes[v].spot.y for v in (key[0], *reads)] for key, reads in targets.items()}
    ends = {key: (min(ys), max(ys)) for key, ys in heights.items()}
    sides: dict[tuple[int, int], list[tuple[Variable, int]]] = {}
    for key in targets:
        sides.setdefault((key[1], key[0].phase), []).append(key)
    around: dict[tuple[Variable, int], int] = {}
    for keys in sides.values():
        wide = [k for k in keys if any(ends[k][0] < ends[o][0] and ends[o][1] < ends[k][1] for o in keys)]
        around |= {key: i for i, key in enumerate(sorted(wide, key=ends.__getitem__, reverse=True)[::-1], start=1)}
    return {key: _Loop(tuple(dict.fromkeys(reads)), around.get(key, 0)) for key, reads in targets.items()}


def _delay(
    columns: _Columns,
    shapes: dict[Hashable, Shape],
    loops: dict[tuple[Variable, int], _Loop],
    key: tuple[Variable, int],
) -> tuple[Place, tuple[Place, ...]]:
    """Where the delay of a variable stands, and how its edge gets there."""
    source, lag = key
    block = columns.blocks[source.phase]
    x = columns.column(source.phase, 1)
    if key in block.entries:
        entries = [entry for entry in block.entries if entry[1] != 0]
        i = entries[::-1].index(key)  # one loop around another, so that they do not cross
        enter = (x + block.entries[key][0], block.entries[entries[i]][1])
        side = columns.right[source.phase] + 0.25 if lag > 0 else columns.left[source.phase] - 0.25
        lane = x + side + math.copysign(_LANE * i, lag)
        return enter, ((lane, shapes[source].spot.y), (lane, enter[1]))
    height, targets = shapes[source].spot.y, loops[key].targets
    y = (height + sum(shapes[v].spot.y for v in targets) / len(targets)) / 2
    away = max(0.62, columns.room)
    beside = x + (columns.left[source.phase] - away if lag > 0 else columns.right[source.phase] + away)
    if around := loops[key].around:
        lane = beside - math.copysign(0.3 + 2 * _LANE * around, lag)
        return (lane, y), ((lane, height),)
    from_states = [e.source for e in columns.circuit.into(source) if e.lag == lag and e.source.role is Role.STATE]
    if targets == (source,) and any(shapes[v].spot.y > y for v in from_states):
        y -= 0.22  # what comes from above has its own place to arrive at
    others = [s.spot for s in shapes.values() if s.kind == "square" and abs(s.spot.x - beside) < 0.2]
    while any(abs(other.y - y) < 0.3 for other in others):
        y += 0.35
    return (beside, y), ()


# ------------------------------------------------------------------ the unfolded graph


def unfolded_scene(
    unfolded: Unfolded, gradients: Gradients | None, backwards: bool, columns_at_most: int = COLUMNS
) -> Scene:
    """A column for every step that is shown; the arrows turned round where it is gradients that flow."""
    circuit = unfolded.circuit
    columns = _Columns(circuit, unfolded.taus, 0.85 if circuit.level is Level.BOOK else 0.75, columns_at_most)
    shapes: dict[Hashable, Shape] = {
        moment: _moment(moment, columns, gradients) for moment in unfolded.moments if _is_shown(moment, columns)
    }
    links: dict[Hashable, Link] = {}
    largest = max(gradients.arrows.values(), default=0.0) if gradients else 0.0
    for arrow in unfolded.arrows:
        edge = arrow.edge
        if backwards and _carries_none(arrow, gradients):
            continue
        source, target = _end(arrow.source, edge, columns), _end(arrow.target, edge, columns)
        if not isinstance(source, Moment) and not isinstance(target, Moment):
            continue  # between two steps that are not shown
        if arrow.source.t is None and not isinstance(target, Moment):
            continue
        for end in (source, target):
            if end not in shapes:
                place = columns.dots(edge.source)
                shapes[end] = Shape(Spot(*place, 0.2, 0.12), r"$\cdots$", LIGHT["paper"], "dots")
        spot = shapes[source].spot
        via = columns.way(edge, arrow.target.t, (spot.x, spot.y)) if isinstance(target, Moment) else ()
        size = None if gradients is None else gradients.arrows[arrow] / (largest or 1.0)
        ends = (target, source) if backwards else (source, target)
        off = columns.ends(edge) if isinstance(target, Moment) else (0.0, 0.0)
        turn = -1 if backwards else 1
        links.setdefault((edge, ends), _link(edge, *ends, via[::turn], off[::turn], size))
    if backwards:  # what nothing comes back to is left out
        reached = {end for link in links.values() for end in (link.source, link.target)}
        shapes = {key: shape for key, shape in shapes.items() if key in reached}
    way = "The way back through" if backwards else "The unfolded graph of"
    said = tuple(circuit.said.items())
    return Scene(f"{way} {circuit.name}, {_counted(unfolded)}", shapes, list(links.values()), said)


def _counted(unfolded: Unfolded) -> str:
    taus = unfolded.taus[: 1 + max(variable.phase for variable in unfolded.circuit.variables)]
    return " and ".join(f"{tau} step{'s' if tau > 1 else ''}" for tau in dict.fromkeys(taus))


def how_many_shown(tau: int, most: int) -> int:
    """Of τ steps all, or some of the first and the last, where more than `most` would stand there."""
    return tau if tau <= max(most, _FIRST + 1 + _LAST) else _FIRST + _LAST  # dots for one step would save nothing


def _shown(tau: int, most: int) -> list[int]:
    if how_many_shown(tau, most) == tau:
        return list(range(1, tau + 1))
    return [*range(1, _FIRST + 1), 0, *range(tau - _LAST + 1, tau + 1)]


def _link(
    edge: Edge,
    source: Hashable,
    target: Hashable,
    via: tuple[Place, ...],
    ends: tuple[float, ...] = (0.0, 0.0),
    size: float | None = None,
) -> Link:
    off = (ends[0], ends[1])
    return Link(
        source, target, edge, edge.parameters, edge.note, _is_fed(edge), size, via, off, _does(edge), edge.product
    )


def _does(edge: Edge) -> Does:
    if edge.lag != 0:
        return Does.CARRY
    if edge.source.role is Role.INPUT:
        return Does.READ
    reads_state = edge.source.role is Role.STATE and edge.target.role is Role.OPERATION
    return Does.ANSWER if edge.target.role is Role.OUTPUT or reads_state else Does.OTHER


def _is_shown(moment: Moment, columns: _Columns) -> bool:
    return moment.t is None or moment.t in columns.orders[moment.variable.phase] or _is_before(moment, columns)


def _is_before(moment: Moment, columns: _Columns) -> bool:
    """Whether it is a state before the first step."""
    return moment.t is not None and not 1 <= moment.t <= columns.taus[moment.variable.phase]


def _end(moment: Moment, edge: Edge, columns: _Columns) -> Hashable:
    """A node, or the dots that stand for it."""
    return moment if _is_shown(moment, columns) else ("dots", edge.source)


def _carries_none(arrow: Arrow, gradients: Gradients | None) -> bool:
    """Whether nothing goes back through an arrow: targets are given, and a choice of one class has no gradient."""
    return not arrow.edge.flows if gradients is None else arrow not in gradients.arrows


def _moment(moment: Moment, columns: _Columns, gradients: Gradients | None) -> Shape:
    variable, t = moment.variable, moment.t
    text = f"${variable.label}$" if t is None else f"${variable.label}^{{({t})}}$"
    size = gradients.moments.get(moment) if gradients else None
    before = _is_before(moment, columns)
    return _node(variable, columns.place(variable, t), text, "" if size is None else _number(size), before)


def _number(size: float) -> str:
    """Two digits, or one and a power of ten.

    >>> _number(0.0314), _number(99.6), _number(9.6e-05)
    ('$0.031$', '$100$', '$1\\\\cdot 10^{-4}$')
    """
    if not math.isfinite(size):
        return str(size)
    if size == 0 or 1e-3 <= size < 9999.5:
        return f"${size:.2g}$" if size < 99.5 else f"${size:.0f}$"
    digit, exponent = f"{size:.0e}".split("e")
    return rf"${digit}\cdot 10^{{{int(exponent)}}}$"
