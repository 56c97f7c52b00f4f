"""What a native kernel computes when, and where it is kept: the plan of one step.

A step runs in stages. Each stage first makes its products and reductions, which read whole rows from memory, then its
pointwise operations, one pass over the features for each width. What is only summed up is never stored: a reduction
computes it as it goes, so the sum of the products of two rows is one pass over both.
"""

from dataclasses import dataclass, field
from typing import Any

from loopfold.engines.writing import Buffer, Role, Source
from loopfold.stepgraph.loop import Value, ordered
from loopfold.stepgraph.ops import Kind


@dataclass(frozen=True, eq=False)
class Place:
    """Where a row is kept: a buffer of rows `width` wide, from feature `start` on."""

    buffer: Buffer
    width: int
    start: int = 0


@dataclass(eq=False)
class Plan:
    """The order of work in one step."""

    source: Source
    lanes: int
    roots: list[tuple[Value, Place]] = field(default_factory=list)  # what is wanted, and where it goes
    given: dict[Value, Buffer] = field(default_factory=dict)
    places: dict[Value, Place] = field(default_factory=dict)
    stores: dict[tuple[int, int, int], list[tuple[Value, Place]]] = field(default_factory=dict)
    adds: dict[tuple[int, int, int], list[tuple[Value, int]]] = field(default_factory=dict)
    products: dict[int, list[Value]] = field(default_factory=dict)
    scratch: int = 0  # elements a row of the tile needs
    fused: set[Value] = field(default_factory=set)  # computed within the reduction that reads them, and nowhere else
    _stages: dict[Value, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        source = self.source
        self.given = {v: Buffer(Role.GIVEN, i) for v, i in source.given_at.items()}
        self.roots = [(v, Place(Buffer(Role.OUT, i), v.width)) for i, v in enumerate(source.out)]
        self.roots += [(v, Place(Buffer(Role.CARRY, i), v.width)) for i, v in self.carried]
        order = self.order()
        self._find_fused(order)
        for v in order:
            self._stages[v] = self._stage(v)
        for v, place in self.roots:
            if v not in self.places and not self.is_there(v):
                self.places[v] = place  # rows that are kept anyway need no second home
        for v, place in self.roots:
            self._store(v, place)
        for k, v in enumerate(source.sums):
            self.adds.setdefault(self.group(v), []).append((v, k))
        for v in order:
            if v.reads_whole_rows and v not in self.given:
                self.home(v)
                self.products.setdefault(self._stages[v], []).append(v)
                for row in self._rows(v):
                    self._at_hand(row)
        done: set[Any] = set()
        while True:  # a value may need a home in an earlier group, which then grows
            groups = {*self.stores, *self.adds}
            todo = [(g, v) for g in groups for v in self._values_in(g) if (g, v) not in done]
            for group, v in todo:
                done.add((group, v))
                self._reads(v, group)
            if not todo:
                break

    @property
    def carried(self) -> list[tuple[int, Value]]:
        """The rows that the next step reads from a buffer of their own; states it finds among what was stored."""
        return [(before.index, after) for before, after in self.source.moves if before.op == "carry"]

    def order(self) -> list[Value]:
        """All values of the step, arguments first."""
        return ordered([*[v for v, _ in self.roots], *self.source.sums], stop=self.given)

    def is_there(self, v: Value) -> bool:
        """Whether a value is in memory before the step begins."""
        return v.is_leaf or v in self.given

    def is_taken(self, v: Value) -> bool:
        """Whether a value is read from a row in memory, number by number from where they stand."""
        return v.op == "take" and v not in self.given

    def _find_fused(self, order: list[Value]) -> None:
        uses: dict[Value, list[Value]] = {v: [] for v in order}
        for v in order:
            for a in v.args if v not in self.given else ():
                uses[a].append(v)
        wanted = {*(v for v, _ in self.roots), *self.source.sums}
        for v in reversed(order):
            if v.is_pointwise and v not in self.given and v not in wanted and v.width > 1 and len(uses[v]) == 1:
                (user,) = uses[v]
                if user in self.fused or (user.kind is Kind.REDUCTION and user not in self.given):
                    self.fused.add(v)

    def reads(self, v: Value) -> list[Value]:
        """What a product or a reduction reads: its row, or what that is computed from as it goes."""
        found: dict[Value, None] = {}
        todo, seen = [v.args[0]], set()
        while todo:
            a = todo.pop()
            if a in seen:
                continue
            seen.add(a)
            if v.kind is Kind.REDUCTION and self.is_computed(a, a in self.fused):
                todo += a.args
            elif a.op != "number":
                found[a] = None
        return list(found)

    def _rows(self, v: Value) -> list[Value]:
        """The rows that must be in memory for a product or a reduction; a product reads its own as it stands."""
        taken = v.kind is Kind.REDUCTION
        return [read.args[0] if taken and self.is_taken(read) else read for read in self.reads(v)]

    def is_computed(self, v: Value, here: bool) -> bool:
        """Whether a pass computes a value itself; truth values are never in memory."""
        return v.is_pointwise and v not in self.given and (v.is_bool or here)

    def _values_in(self, group: tuple[int, int, int]) -> list[Value]:
        return [v for v, _ in (*self.stores.get(group, ()), *self.adds.get(group, ()))]

    # ---- when

    def _stage(self, v: Value) -> int:
        """The stage in which a value is computed; products and reductions come first in their stage."""
        if self.is_there(v):
            return 0
        if v.reads_whole_rows:
            return max((self._in_memory(row) for row in self._rows(v)), default=0)
        if v.op == "take":
            return self._in_memory(v.args[0])
        if v.op == "slice":
            return self._stages[v.args[0]] if v.args[0].op != "cat" else self._in_memory(v.args[0])
        if v.op == "cat":  # its parts, leaves too, are put side by side at the end of their stages
            return max(self._stages[a] for a in v.args) + 1
        return max((self._in_memory(a) if a.op == "cat" else self._stages[a] for a in v.args), default=0)

    def _in_memory(self, v: Value) -> int:
        """The first stage that can read whole rows of `v`."""
        if self.is_there(v):
            return 0
        if v.op == "slice":
            return self._in_memory(v.args[0])
        return self._stages[v] if v.op == "cat" else self._stages[v] + 1

    def group(self, v: Value) -> tuple[int, int, int]:
        """(stage, 0 for numbers and 1 for rows, width): numbers come first, since rows read them."""
        stage = self._stages[v]
        return stage, int(v.width > 1), v.width

    # ---- where

    def home(self, v: Value) -> Place:
        """Where rows of `v` are kept within a step."""
        if v not in self.places:
            padded = -(-v.width // self.lanes) * self.lanes
            self.places[v] = Place(Buffer(Role.SCRATCH, self.scratch), v.width)
            self.scratch += padded
            if not v.reads_whole_rows:
                self._store(v, self.places[v])
        return self.places[v]

    def _store(self, v: Value, place: Place) -> None:
        if v.op == "cat" and v not in self.given:
            start = place.start
            for part in v.args:
                self._store(part, Place(place.buffer, place.width, start))
                start += part.width
        elif not (v.reads_whole_rows and self.places.get(v) is place):
            self.stores.setdefault(self.group(v), []).append((v, place))

    def _at_hand(self, v: Value) -> None:
        """Make sure that rows of `v` can be read from memory."""
        if v.op == "slice" and v not in self.given:
            self._at_hand(v.args[0])
        elif not self.is_there(v):
            self.home(v)

    def _reads(self, v: Value, group: tuple[int, int, int]) -> None:
        """Give a home to everything that `group` needs for `v` and does not compute itself."""
        todo, seen = [v], set()
        while todo:
            v = todo.pop()
            if v in seen or self.is_there(v):
                continue
            seen.add(v)
            if self.is_computed(v, self.group(v) == group):
                todo += reversed(v.args)
            else:
                self._at_hand(v.args[0] if self.is_taken(v) else v)
