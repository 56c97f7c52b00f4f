"""Where the variables of one step stand: rows from the input up to the target, in inches."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from itertools import combinations

from loopfold.drawing.circuit import Circuit, Edge, Level, Role, Variable
from loopfold.wiring import When

ROW = 0.95  # from one row of the book's variables to the next
APART = 0.86  # between the states of a layer, which form stairs so that edges from below reach each of them
_TOP = (Role.OUTPUT, Role.LOSS, Role.TARGET)

Place = tuple[float, float]
Size = Callable[[Variable], tuple[float, float]]  # half the width and height of a node


@dataclass(frozen=True)
class Block:
    """One step of one phase.

    `places`   of its variables
    `ways`     the points that an edge passes on its way up, where the straight way is not free
    `entries`  where what comes from another step enters, below all else
    """

    places: dict[Variable, Place]
    ways: dict[Edge, list[Place]] = field(default_factory=dict)
    entries: dict[tuple[Variable, int], Place] = field(default_factory=dict)


def blocks(circuit: Circuit, size: Size) -> dict[int, Block]:
    """The block of every phase."""
    found = {}
    for phase in sorted({variable.phase for variable in circuit.variables}):
        members = [variable for variable in circuit.variables if variable.phase == phase]
        found[phase] = (
            _book(circuit, members) if circuit.level is Level.BOOK else _Layers(circuit, members, size).block()
        )
    return found


def _book(circuit: Circuit, members: list[Variable]) -> Block:
    """A row for every variable. Of several states of a layer, one that another reads stands below it, to its side."""
    inputs = [variable for variable in members if variable.role is Role.INPUT]
    found = _abreast([v for v in inputs if v.when is not When.ONCE], 0.0)
    found |= _abreast([v for v in inputs if v.when is When.ONCE], -ROW if found else 0.0)
    row = 1
    for layer in sorted({variable.layer for variable in members if variable.role is Role.STATE}):
        states = _in_order(circuit, [v for v in members if v.role is Role.STATE and v.layer == layer])
        for i, state in enumerate(states):
            found[state] = ((i - (len(states) - 1) / 2) * APART, row * ROW)
            row += 1
    middle = 0.0
    for variable in (v for role in _TOP for v in members if v.role is role):
        below = [found[edge.source][0] for edge in circuit.into(variable) if edge.lag == 0 and edge.source in found]
        middle = sum(below) / len(below) if below else middle
        found[variable] = (middle, row * ROW)
        row += 1
    return Block(found)


def _abreast(variables: list[Variable], y: float) -> dict[Variable, Place]:
    """Side by side, about the middle."""
    return {v: ((i - (len(variables) - 1) / 2) * APART, y) for i, v in enumerate(variables)}


def _in_order(circuit: Circuit, states: list[Variable]) -> list[Variable]:
    """States as they were made, but each after those that it reads within a step."""
    order: dict[Variable, None] = {}

    def visit(state: Variable) -> None:
        for edge in circuit.into(state):
            if edge.lag == 0 and edge.source in states and edge.source not in order:
                visit(edge.source)
        order[state] = None

    for state in states:
        visit(state)
    return list(order)


# ------------------------------------------------------------------ operations


@dataclass(frozen=True, eq=False)
class _Bend:
    """A place in a row that an edge passes through, or, in the lowest row, enters the block at."""

    half_width: float = 0.06


_Item = Variable | _Bend


class _Layers:
    """Sugiyama's way: every node above all that it reads; an edge that passes rows has a place in each; then rows are
    sorted and moved until everything is near to what it is connected with."""

    def __init__(self, circuit: Circuit, members: list[Variable], size: Size) -> None:
        self.circuit = circuit
        self.members = [v for v in members if v.when is not When.ONCE]
        self.once = [v for v in members if v.when is When.ONCE]
        self.size = size
        self.inside = set(self.members)
        self.rank = self._ranks()
        self.rows: list[list[_Item]] = [[] for _ in range(max(self.rank.values()) + 1)]
        for variable in self.members:
            self.rows[self.rank[variable]].append(variable)
        self.entries: dict[tuple[Variable, int], _Bend] = {}
        self.chains: dict[Edge, list[_Item]] = {e: self._chain(e) for e in circuit.edges if e.target in self.inside}
        self.x: dict[_Item, float] = {}
        self.side = self._sides()

    def _is_within(self, edge: Edge) -> bool:
        return edge.lag == 0 and edge.source in self.inside

    def _ranks(self) -> dict[Variable, int]:
        """The length of the longest way to each node; a target stands above the loss that reads it."""
        reads = {
            v: [e.source for e in self.circuit.into(v) if self._is_within(e) and e.source.role is not Role.TARGET]
            for v in self.members
        }
        rank: dict[Variable, int] = {}
        for variable in TopologicalSorter(reads).static_order():
            lowest = 0 if variable.role is Role.INPUT and not self.circuit.into(variable) else 1
            rank[variable] = max([rank[source] + 1 for source in reads[variable]], default=lowest)
        for edge in self.circuit.edges:
            if edge.source.role is Role.TARGET and self._is_within(edge):
                rank[edge.source] = rank[edge.target] + 1
        return rank

    def _chain(self, edge: Edge) -> list[_Item]:
        """An edge as nodes and bends, one in every row from its start to its end."""
        start: _Item
        if self._is_within(edge):
            start, low = edge.source, self.rank[edge.source]
        else:
            key = (edge.source, edge.lag)
            if key not in self.entries:
                self.entries[key] = _Bend(0.16)
                self.rows[0].append(self.entries[key])
            start, low = self.entries[key], 0
        high = self.rank[edge.target]
        bends: list[_Item] = [_Bend() for _ in range(low + 1, high)]
        for row, bend in zip(self.rows[low + 1 : high], bends, strict=True):
            row.append(bend)
        return [start, *bends, edge.target]

    def _sides(self) -> dict[_Item, int]:
        """What leads to other steps stands at the border: states where edges leave, entries where they come in."""
        side: dict[_Item, int] = {}
        for edge in self.circuit.edges:
            if edge.lag != 0 and edge.source in self.inside:
                side[edge.source] = 1 if edge.lag > 0 else -1
        for (_, lag), entry in self.entries.items():
            side[entry] = -1 if lag >= 0 else 1
        return side

    def block(self) -> Block:
        """The best of a few beginnings: the one with the fewest crossings, then the shortest edges."""
        near: dict[_Item, list[_Item]] = {item: [] for row in self.rows for item in row}
        for a, b in self._pieces():
            near[a].append(b)
            near[b].append(a)
        found = []
        for beginning in range(8):
            for row in self.rows:
                random.Random(beginning).shuffle(row)
            self.x = {item: float(i) for row in self.rows for i, item in enumerate(row)}
            for sweep in range(60):
                self._sweep(self.rows if sweep % 2 == 0 else self.rows[::-1], near, sort=sweep < 40)
            found.append((self._crossings(), self._length(), beginning, dict(self.x)))
        self.x = min(found, key=lambda result: result[:3])[3]
        return self._placed()

    def _sweep(self, rows: list[list[_Item]], near: dict[_Item, list[_Item]], sort: bool) -> None:
        for row in rows:
            wish = {item: _mean([self.x[n] for n in near[item]], self.x[item]) for item in row}
            if sort:
                row.sort(key=lambda item: (self.side.get(item, 0), wish[item]))  # noqa: B023
            self._spread(row, wish)

    def _pieces(self) -> list[tuple[_Item, _Item]]:
        """The edges, cut at every row."""
        return [piece for chain in self.chains.values() for piece in zip(chain, chain[1:], strict=False)]

    def _crossings(self) -> int:
        row_of = {item: i for i, row in enumerate(self.rows) for item in row}
        count = 0
        for (a, b), (c, d) in combinations(self._pieces(), 2):
            if row_of[a] == row_of[c] and row_of[b] == row_of[d]:
                count += (self.x[a] - self.x[c]) * (self.x[b] - self.x[d]) < 0
        return count

    def _length(self) -> float:
        return sum(abs(self.x[a] - self.x[b]) for a, b in self._pieces())

    def _half(self, item: _Item) -> float:
        return item.half_width if isinstance(item, _Bend) else self.size(item)[0]

    def _spread(self, row: list[_Item], wish: dict[_Item, float]) -> None:
        """Give a row its places: in order, not too close, and near where each wants to be."""
        place = -1e9
        for i, item in enumerate(row):
            room = 0.0 if i == 0 else self._half(row[i - 1]) + self._half(item) + 0.26
            place = max(wish[item], place + room)
            self.x[item] = place
        shift = _mean([wish[item] - self.x[item] for item in row], 0.0)
        for item in row:
            self.x[item] += shift

    def _placed(self) -> Block:
        heights = [max([self.size(v)[1] for v in row if isinstance(v, Variable)], default=0.1) for row in self.rows]
        y = [heights[0]]
        for below, above in zip(heights, heights[1:], strict=False):
            y.append(y[-1] + below + above + 0.42)
        places = {v: (self.x[v], y[self.rank[v]]) for v in self.members}
        entries = {key: (self.x[bend], -0.22 - 0.2 * i) for i, (key, bend) in enumerate(self.entries.items())}
        places |= _abreast(self.once, -0.85 - 0.2 * len(entries))
        ways: dict[Edge, list[Place]] = {}
        for edge, chain in self.chains.items():
            low = self.rank[edge.target] - len(chain) + 1
            points = [
                (self.x[bend], y[low + k] + up)
                for k, bend in enumerate(chain)
                if isinstance(bend, _Bend)
                for up in (-0.12, 0.12)
            ]
            if points:
                ways[edge] = points
        return Block(places, ways, entries)


def _mean(numbers: list[float], default: float) -> float:
    return sum(numbers) / len(numbers) if numbers else default
