"""The loop's own small language: rows of features, and the operations of `ops` on them.

What is left inside the loop after hoisting is written in it, and so is the reverse step. A value is one row per
sequence, `width` features long; a width of 1 broadcasts. Engines need to know these operations and no others.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from loopfold.stepgraph.graph import Refusal
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

    def make(self, op: str, *args: Value, width: int | None = None, index: Any = None) -> Value:
        if width is None:
            width = max(a.width for a in args)
        if width < 1 and op != "slice":
            raise Refusal(f"aten.{op} of rows without features.")
        if OPS[op].kind is Kind.POINTWISE and any(a.width not in (1, width) for a in args):
            raise Refusal(f"{op} of rows of {', '.join(str(a.width) for a in args)} features.")
        key = (op, tuple(map(id, args)), width, index)
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

    def slice(self, v: Value, start: int, width: int) -> Value:
        """Part of a row. It moves through pointwise operations, so that only leaves and products are cut."""
        if width == v.width:
            return v
        if v.op == "slice":
            return self.slice(v.args[0], v.index + start, width)
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
