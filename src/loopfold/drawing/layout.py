"""Where the variables of one step stand: rows from the input up to the target, in inches."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import combinations, pairwise, product
from statistics import median
from typing import Any

from loopfold.drawing.circuit import Circuit, Edge, Level, Role, Variable
from loopfold.drawing.routing import WIDE
from loopfold.drawing.scene import label_size
from loopfold.errors import Argument, OptionError, Spelt
from loopfold.telling import tell
from loopfold.wiring import When

ROW = 0.95  # from one row of the book's variables to the next
APART = 0.86  # between the states of a layer, which form stairs so that edges from below reach each of them
MOST = 5000  # items of a block: minutes
TRIED = 6000  # items of the orders in which rows begin: many of a small step, few of a large one
_TOP = (Role.OUTPUT, Role.LOSS, Role.TARGET)

Place = tuple[float, float]
Size = Callable[[Variable], tuple[float, float]]  # half the width and height of a node


@dataclass(frozen=True)
class Block:
    """One step of one phase.

    `places`   of its variables
    `ways`     the points that an edge passes on its way up, where the straight way is not free
    `entries`  where what comes from another step enters, below all else: what leaves highest enters highest
    `ends`     how far to the right of the middle of its source an edge begins, and of its target ends, where there are
               several
    """

    places: dict[Variable, Place]
    ways: dict[Edge, list[Place]] = field(default_factory=dict)
    entries: dict[tuple[Variable, int], Place] = field(default_factory=dict)
    ends: dict[Edge, tuple[float, float]] = field(default_factory=dict)


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
    within = [edge for edge in circuit.edges if edge.lag == 0 and edge.target in members]
    widest = max((2 * label_size(e.parameters, e.note, e.product)[0] for e in within), default=0.0)
    both_ways = len({variable.backwards for variable in members}) > 1
    apart = min(max(APART, widest + (1.0 if both_ways else 0.6)), 1.5)  # room for the labels of edges between them
    row = 1
    for layer in sorted({variable.layer for variable in members if variable.role is Role.STATE}):
        states = _in_order(circuit, [v for v in members if v.role is Role.STATE and v.layer == layer])
        for i, state in enumerate(states):
            found[state] = ((i - (len(states) - 1) / 2) * apart, row * ROW)
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
    """Sugiyama's way: every node above all that it reads; an edge that passes rows has a place in each; rows are sorted
    until few edges cross; then what should be straight becomes one column, the most important first, and columns are
    moved until everything is near to what it is connected with."""

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
        self.carried = self._carried()

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
        """A state stands at the border, where its edge leaves for another step."""
        return {
            edge.source: 1 if edge.lag > 0 else -1
            for edge in self.circuit.edges
            if edge.lag != 0 and edge.source in self.inside
        }

    def _carried(self) -> set[Edge]:
        """The edges by which a state goes from one step to the next through sums and products alone."""
        found: set[Edge] = set()

        def follow(edge: Edge, state: Variable, way: list[Edge], tried: set[Edge]) -> bool:
            way = [*way, edge]
            if edge.target is state:
                found.update(way)
                return True
            if not edge.target.carries or edge in tried:
                return False
            tried.add(edge)
            onward = [e for e in self.chains if self._is_within(e) and e.source is edge.target]
            return any(follow(e, state, way, tried) for e in onward)

        for edge in self.chains:
            if edge.lag != 0 and edge.source in self.inside and not found & set(self.circuit.into(edge.source)):
                follow(edge, edge.source, [], set())
        return found

    def block(self) -> Block:
        """The best of a few beginnings: the one with the fewest crossings, then the shortest edges."""
        near: dict[_Item, list[_Item]] = {item: [] for row in self.rows for item in row}
        for a, b in self._pieces():
            near[a].append(b)
            near[b].append(a)
        if len(near) > MOST:  # the time grows with the square of it
            fewer = Spelt("level='book' draws fewer", ("leave out ", Argument("operations", True)))
            places = f"the operations of {self.circuit.name} take {len(near):,} places, and {MOST:,} can be laid out"
            raise OptionError(f"{places}: ", fewer, ", or draw a smaller network.")
        self.half = {i: i.half_width if isinstance(i, _Bend) else self.size(i)[0] for i in near}  # asked for very often
        for edge in self.chains:
            beside, _ = label_size(edge.parameters, edge.note, edge.product)
            if beside > WIDE and edge.target.role is Role.OPERATION:
                self.half[edge.target] = max(self.half[edge.target], 2 * beside)  # on one side of the edge or the other
        best: tuple[Any, ...] = (float("inf"),)
        for beginning in range(max(12, TRIED // len(near))):
            self._begin(near, random.Random(beginning))
            for sweep in range(20):
                self._sweep(self.rows if sweep % 2 == 0 else self.rows[::-1], near)
                if sweep % 5 == 4:
                    self._exchange(near)
                    found = self._crossings(), round(self._length(), 6)
                    if found < best[:2]:
                        best = *found, dict(self.x), [row.copy() for row in self.rows]
        *_, self.x, self.rows = best
        self._straighten()
        return self._placed()

    def _begin(self, near: dict[_Item, list[_Item]], chance: random.Random) -> None:
        """Rows in the order in which a walk along edges comes upon their items, so that few of them cross."""
        row_of = {item: row for row in self.rows for item in row}
        todo = list(row_of)
        chance.shuffle(todo)
        for row in self.rows:
            row.clear()
        seen: set[_Item] = set()
        while todo:
            item = todo.pop()
            if item not in seen:
                seen.add(item)
                row_of[item].append(item)
                todo += chance.sample(near[item], len(near[item]))
        self.x = {item: float(i) for row in self.rows for i, item in enumerate(row)}

    # ---- columns

    def _straighten(self) -> None:
        """Join items into columns, each straight up, and give every column its place."""
        column: dict[_Item, list[_Item]] = {item: [item] for row in self.rows for item in row}
        pieces = self._by_importance()
        for done, (a, b) in enumerate(pieces, start=1):
            tell("laying out", done, len(pieces), "pieces of edges")
            if column[a] is column[b]:
                continue
            one, two = column[a], column[b]
            joined = [*one, *two]
            column |= dict.fromkeys(joined, joined)
            if self._order(column) is None:  # it would have to stand on both sides of another
                column |= {**dict.fromkeys(one, one), **dict.fromkeys(two, two)}
        order = self._order(column)
        assert order is not None
        self._place_columns(order, column)

    def _by_importance(self) -> list[tuple[_Item, _Item]]:
        """The pieces of edges that should be straight: a state that is carried on, long edges, then any others."""
        ranked: list[tuple[bool, int, int, tuple[_Item, _Item]]] = []
        for edge, chain in self.chains.items():
            for a, b in pairwise(chain):
                bends = isinstance(a, _Bend) + isinstance(b, _Bend)
                ranked.append((edge not in self.carried, -bends, len(ranked), (a, b)))
        return [piece for *_, piece in sorted(ranked, key=lambda entry: entry[:3])]

    def _order(self, column: dict[_Item, list[_Item]]) -> list[list[_Item]] | None:
        """The columns from the left; None if some column would have to be left of itself."""
        known = {id(c): c for c in column.values()}
        left: dict[int, set[int]] = {key: set() for key in known}
        for row in self.rows:
            for a, b in pairwise(row):
                left[id(column[b])].add(id(column[a]))
        try:
            return [known[key] for key in TopologicalSorter(left).static_order()]
        except CycleError:
            return None

    def _place_columns(self, order: list[list[_Item]], column: dict[_Item, list[_Item]]) -> None:
        before: dict[_Item, _Item] = {b: a for row in self.rows for a, b in pairwise(row)}
        after: dict[_Item, _Item] = {a: b for row in self.rows for a, b in pairwise(row)}
        near: dict[int, list[tuple[_Item, _Item]]] = {id(c): [] for c in order}
        for a, b in self._pieces():
            if column[a] is not column[b]:
                near[id(column[a])].append((a, b))
                near[id(column[b])].append((b, a))

        def least(c: list[_Item]) -> float:
            return max((self.x[before[i]] + self._apart(before[i], i) for i in c if i in before), default=-1e9)

        def most(c: list[_Item]) -> float:
            return min((self.x[after[i]] - self._apart(i, after[i]) for i in c if i in after), default=1e9)

        for c in order:
            self.x |= dict.fromkeys(c, max(least(c), _mean([self.x[i] for i in c], 0.0)))
        for sweep in range(24):
            for c in order[::-1] if sweep % 2 == 0 else order:
                if others := [self.x[other] for _, other in near[id(c)]]:
                    self.x |= dict.fromkeys(c, max(least(c), min(most(c), median(others))))

    def _apart(self, a: _Item, b: _Item) -> float:
        return self.half[a] + self.half[b] + 0.26

    # ---- rows

    def _sweep(self, rows: list[list[_Item]], near: dict[_Item, list[_Item]]) -> None:
        for row in rows:
            wish = {item: _mean([self.x[n] for n in near[item]], self.x[item]) for item in row}
            row.sort(key=lambda item: (self.side.get(item, 0), wish[item]))  # noqa: B023
            self._spread(row, wish)

    def _exchange(self, near: dict[_Item, list[_Item]]) -> None:
        """Let neighbours change places while fewer edges cross for it."""
        row_of = {item: i for i, row in enumerate(self.rows) for item in row}
        better = True
        while better:
            better = False
            place = {item: i for row in self.rows for i, item in enumerate(row)}
            for row in self.rows:
                for i in range(len(row) - 1):
                    a, b = row[i], row[i + 1]
                    if self.side.get(a, 0) != self.side.get(b, 0):
                        continue
                    gain = 0
                    for m, n in product(near[a], near[b]):
                        if row_of[m] == row_of[n]:
                            gain += (place[m] > place[n]) - (place[m] < place[n])
                    if gain > 0:
                        row[i], row[i + 1] = b, a
                        place[a], place[b] = place[b], place[a]
                        better = True
        for row in self.rows:
            self._spread(row, {item: self.x[item] for item in row})

    def _pieces(self) -> list[tuple[_Item, _Item]]:
        """The edges, cut at every row."""
        return [piece for chain in self.chains.values() for piece in pairwise(chain)]

    def _crossings(self) -> int:
        """How many edges cross; a line that a state is carried along counts for more."""
        row_of = {item: i for i, row in enumerate(self.rows) for item in row}
        levels: list[list[tuple[float, float, int]]] = [[] for _ in self.rows]
        for edge, chain in self.chains.items():
            weight = 3 if edge in self.carried else 1
            for a, b in pairwise(chain):
                levels[row_of[a]].append((self.x[a], self.x[b], weight))
        return sum(
            u * v for level in levels for (a, b, u), (c, d, v) in combinations(level, 2) if (a - c) * (b - d) < 0
        )

    def _length(self) -> float:
        return sum(abs(self.x[a] - self.x[b]) for a, b in self._pieces())

    def _spread(self, row: list[_Item], wish: dict[_Item, float]) -> None:
        """Give a row its places: in order, not too close, and near where each wants to be."""
        place = -1e9
        for i, item in enumerate(row):
            room = 0.0 if i == 0 else self._apart(row[i - 1], item)
            place = max(wish[item], place + room)
            self.x[item] = place
        shift = _mean([wish[item] - self.x[item] for item in row], 0.0)
        for item in row:
            self.x[item] += shift

    def _placed(self) -> Block:
        heights = [max([self.size(v)[1] for v in row if isinstance(v, Variable)], default=0.1) for row in self.rows]
        fans = Counter(chain[0] for chain in self.chains.values())
        y = [heights[0]]
        for row, (below, above) in zip(self.rows, pairwise(heights), strict=False):
            room = 0.1 * max(0, *(fans[item] - 2 for item in row), 0)  # for edges that fan out
            y.append(y[-1] + below + above + 0.42 + room)
        places = {v: (self.x[v], y[self.rank[v]]) for v in self.members}
        order = sorted(self.entries, key=lambda key: -self.rank.get(key[0], 0))
        entries = {key: (self.x[self.entries[key]], -0.22 - 0.2 * i) for i, key in enumerate(order)}
        places |= _abreast(self.once, -0.85 - 0.2 * len(entries))
        ends = self._ends()
        ways: dict[Edge, list[Place]] = {}
        for edge, chain in self.chains.items():
            if not any(isinstance(item, _Bend) for item in chain):
                continue
            low = self.rank[edge.target] - len(chain) + 1
            begin, end = ends.get(edge, (0.0, 0.0))
            x = [self.x[chain[0]] + begin, *(self.x[item] for item in chain[1:-1]), self.x[chain[-1]] + end]
            # it goes aside between rows alone, where no node stands
            points = [(x[k], y[low + k] + side * heights[low + k]) for k in range(len(chain)) for side in (-1, 1)]
            last = (points[-2][0], points[-2][1] - 0.2)  # room for the head of its arrow
            ways[edge] = [*points[0 if isinstance(chain[0], _Bend) else 1 : -2], last]
        return Block(places, ways, entries, ends)

    def _ends(self) -> dict[Edge, tuple[float, float]]:
        begins, ends = dict[Edge, float](), dict[Edge, float]()
        for variable in self.members:
            if variable.role is Role.OPERATION:
                out = [e for e in self.chains if e.source is variable and self._is_within(e)]
                begins |= self._side_by_side(variable, {e: self.x[self.chains[e][1]] for e in out})
                into = [e for e in self.chains if e.target is variable]
                ends |= self._side_by_side(variable, {e: self.x[self.chains[e][-2]] for e in into})
        return {e: (begins.get(e, 0.0), ends.get(e, 0.0)) for e in begins | ends}

    def _side_by_side(self, variable: Variable, to: dict[Edge, float]) -> dict[Edge, float]:
        """Where edges meet an operation: in the order of where they lead, what is straight in the middle."""
        if len(to) < 2:
            return {}
        order = sorted(to, key=lambda edge: to[edge])
        middle = next((i for i, e in enumerate(order) if abs(to[e] - self.x[variable]) < 1e-6), (len(order) - 1) / 2)
        step = min(0.12, (self.size(variable)[0] - 0.05) / max(middle, len(order) - 1 - middle))
        return {edge: (i - middle) * step for i, edge in enumerate(order)}


def _mean(numbers: list[float], default: float) -> float:
    return sum(numbers) / len(numbers) if numbers else default
