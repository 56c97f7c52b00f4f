"""The loop's own small language: rows of features, and the operations of `ops` on them.

What is left inside the loop after hoisting is written in it, and so is the reverse step. A value is one row per
sequence, `width` features long; a width of 1 broadcasts. Heads, a matrix or a memory of places are rows too, their
numbers in torch's order; which of them meets which is said by `take`. Engines need to know these operations and no
others.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from loopfold.stepgraph.graph import Refusal
from loopfold.stepgraph.moves import Positions
from loopfold.stepgraph.ops import OPS, Kind


@dataclass(frozen=True, eq=False)
class Value:
    """One operation on rows. Equal operations on equal values are the same object (see `Builder`)."""

    op: str
    args: tuple["Value", ...]
    width: int
    index: Any = None

    @property
    def kind(self) -> Kind:
        return OPS[self.op].kind

    @property
    def is_leaf(self) -> bool:
        return self.kind is Kind.LEAF

    @property
    def is_pointwise(self) -> bool:
        return self.kind is Kind.POINTWISE

    @property
    def is_bool(self) -> bool:
        return OPS[self.op].truth

    @property
    def reads_whole_rows(self) -> bool:
        """Products and reductions, which need every feature of a row before they give one."""
        return self.kind in (Kind.PRODUCT, Kind.REDUCTION)


class Builder:
    """Makes values; the same value asked for twice is made once."""

    def __init__(self) -> None:
        self._made: dict[Any, Value] = {}
        self._cut: dict[Any, Value] = {}  # what `slice` and `take` have made of a value

    def make(self, op: str, *args: Value, width: int | None = None, index: Any = None) -> Value:
        if width is None:
            width = max(a.width for a in args)
        if width < 1 and op != "slice":
            raise Refusal(f"aten.{op} of rows without features.")
        if OPS[op].kind is Kind.POINTWISE and any(a.width not in (1, width) for a in args):
            raise Refusal(f"{op} of rows of {', '.join(str(a.width) for a in args)} features.")
        if args and width == 1 and all(a.op == "number" for a in args) and _gives_a_number(op):
            numbers = [torch.tensor([a.index], dtype=torch.float64) for a in args]
            return self.number(float(OPS[op].apply(*numbers, index=index)))
        key = (op, tuple(map(id, args)), width, index.hex() if isinstance(index, float) else index)  # -0.0 is not 0.0
        if key not in self._made:
            self._made[key] = Value(op, args, width, index)
        return self._made[key]

    def number(self, value: float) -> Value:
        return self.make("number", width=1, index=float(value))

    def value(self, v: Value | float) -> Value:
        return v if isinstance(v, Value) else self.number(v)

    def add(self, a: Value | float, b: Value | float) -> Value:
        a, b = self.value(a), self.value(b)
        if _is_number(a, 0) and b.width >= a.width:
            return b
        if _is_number(b, 0) and a.width >= b.width:
            return a
        return self.make("add", a, b)

    def sub(self, a: Value | float, b: Value | float) -> Value:
        return self.make("sub", self.value(a), self.value(b))

    def mul(self, a: Value | float, b: Value | float) -> Value:
        a, b = self.value(a), self.value(b)
        if _is_number(a, 1):
            return b
        return a if _is_number(b, 1) else self.make("mul", a, b)

    def div(self, a: Value | float, b: Value | float) -> Value:
        return self.make("div", self.value(a), self.value(b))

    def where(self, c: Value, a: Value | float, b: Value | float) -> Value:
        return self.make("where", c, self.value(a), self.value(b))

    def expand(self, v: Value, width: int) -> Value:
        return v if v.width == width else self.make("expand", v, width=width)

    def total(self, values: Iterable[Value]) -> Value:
        first, *rest = values
        for v in rest:
            first = self.add(first, v)
        return first

    def computed(self, values: Iterable[Value]) -> list[Value]:
        """The same without what only their gradients read, and no kernel need compute."""
        values, new = list(values), dict[Value, Value]()
        for v in ordered(values):
            args = [new[a] for a in v.args]
            if v.op == "surrogate":
                new[v] = self.expand(args[0], v.width)
            else:
                new[v] = v if args == [*v.args] else self.make(v.op, *args, width=v.width, index=v.index)
        return [new[v] for v in values]

    def slice(self, v: Value, start: int, width: int) -> Value:
        """Part of a row. It moves through pointwise operations, so that only leaves and products are cut."""
        if width == v.width:
            return v
        if (v, start, width) not in self._cut:
            self._cut[v, start, width] = self._slice(v, start, width)
        return self._cut[v, start, width]

    def _slice(self, v: Value, start: int, width: int) -> Value:
        if v.op == "slice":
            return self.slice(v.args[0], v.index + start, width)
        if v.op == "take":
            return self.take(v.args[0], v.index[start : start + width])
        if v.is_pointwise:
            parts = [a if a.width == 1 else self.slice(a, start, width) for a in v.args]
            return self.make(v.op, *parts, width=width, index=v.index)
        if v.op == "cat":
            begin, pieces = 0, []
            for part in v.args:
                low, high = max(start, begin), min(start + width, begin + part.width)
                if low < high:
                    pieces.append(self.slice(part, low - begin, high - low))
                begin += part.width
            return self.cat(pieces)
        return self.make("slice", v, width=width, index=start)

    def take(self, v: Value, positions: Positions) -> Value:
        """The numbers of a row that stand at `positions`; -1 is zero. A few runs of neighbours are cut and joined.

        A new order of sums and products is that of what they are made from, so that these need not be stored for it.
        """
        if (v, positions) not in self._cut:
            self._cut[v, positions] = self._take(v, positions)
        return self._cut[v, positions]

    def _take(self, v: Value, positions: Positions) -> Value:
        width = len(positions)
        if not width:
            return self.make("slice", v, width=0, index=0)
        if v.op == "take":
            return self.take(v.args[0], tuple(v.index[p] if p >= 0 else -1 for p in positions))
        if v.op == "slice":
            return self.take(v.args[0], tuple(p + v.index if p >= 0 else -1 for p in positions))
        if v.width == 1 and -1 not in positions:
            return self.expand(v, width)
        if v.op == "expand" and -1 not in positions:
            return self.expand(v.args[0], width)
        starts = [j for j in range(width) if j == 0 or positions[j] != _following(positions[j - 1])]
        if len(starts) > MOST_RUNS:
            if v.op in _LINEAR and len(positions) == v.width and len({*positions, -1}) == v.width + 1:
                return self.make(v.op, *[a if a.width == 1 else self.take(a, positions) for a in v.args])
            return self.make("take", v, width=width, index=positions)
        runs = [(positions[j], stop - j) for j, stop in zip(starts, [*starts[1:], width], strict=True)]
        return self.cat([self.expand(self.number(0), n) if p < 0 else self.slice(v, p, n) for p, n in runs])

    def put(self, v: Value, positions: Positions, width: int) -> Value:
        """The reverse of `take`: a row of `width` features, where each number of v is added to where it stood."""
        found: list[list[int]] = [[] for _ in range(width)]
        for j, p in enumerate(positions):
            if p >= 0:
                found[p].append(j)
        most = max(map(len, found))
        if not most:
            return self.expand(self.number(0), width)
        taken = self.take(v, tuple(j for places in found for j in (*places, *[-1] * (most - len(places)))))
        return taken if most == 1 else self.make("sum", taken, width=width)

    def spread(self, v: Value, width: int) -> Value:
        """A row in which each number of v stands several times, side by side: the reverse of a sum of parts."""
        return self.take(v, tuple(j * v.width // width for j in range(width)))

    def cat(self, parts: Iterable[Value]) -> Value:
        """Rows side by side; neighbours cut from one row grow together again."""
        joined: list[Value] = []
        flat = [p for whole in parts for p in (whole.args if whole.op == "cat" else (whole,)) if p.width]
        if not flat:
            raise Refusal("aten.cat of rows without features.")
        for part in flat:
            last = joined[-1] if joined else None
            if (
                last is not None
                and last.op == part.op == "slice"
                and last.args == part.args
                and last.index + last.width == part.index
            ):
                joined[-1] = self.slice(last.args[0], last.index, last.width + part.width)
            else:
                joined.append(part)
        return joined[0] if len(joined) == 1 else self.make("cat", *joined, width=sum(p.width for p in joined))


_LINEAR = ("add", "sub", "mul", "neg")
MOST_RUNS = 4  # of neighbours, that are cut and joined one by one


def _gives_a_number(op: str) -> bool:
    return op != "expand" and OPS[op].kind is Kind.POINTWISE and not OPS[op].truth and not OPS[op].conditions


def _following(p: int) -> int:
    return p + 1 if p >= 0 else -1


def _is_number(v: Value, number: float) -> bool:
    return v.op == "number" and v.index == number


def ordered(roots: Iterable[Value], stop: Iterable[Value] = ()) -> list[Value]:
    """Every value that the roots need, arguments first; what stands in `stop` is taken as given."""
    given, seen, order = set(stop), set(), []

    def visit(v: Value) -> None:
        todo = [(v, False)]
        while todo:
            value, done = todo.pop()
            if done:
                order.append(value)
            elif value not in seen:
                seen.add(value)
                todo.append((value, True))
                if value not in given:
                    todo += [(a, False) for a in reversed(value.args)]

    for root in roots:
        visit(root)
    return order
