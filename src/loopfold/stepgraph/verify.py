"""Is a loop well formed? Checked for every program, after hoisting and after differentiation, before any code is made.

A fault here is one of ours, and would be a wrong value later. Widths, arity, truth values, and that whatever is read is
there: at its step, with its size.
"""

from collections.abc import Callable, Iterable, Sequence

from loopfold.stepgraph.differentiate import Reverse
from loopfold.stepgraph.graph import Unsound
from loopfold.stepgraph.loop import Value, ordered
from loopfold.stepgraph.ops import OPS, Again, Kind
from loopfold.stepgraph.split import Loop


def verify(loop: Loop) -> None:
    """Raise `Unsound` where a value of the loop cannot be what it says."""
    _Checked(loop, {}).values(ordered(loop.emitted))
    for v in loop.emitted:
        _need(not v.is_bool, v, "is a truth value, and the loop emits numbers")


def verify_reverse(loop: Loop, reverse: Reverse, incoming: Sequence[bool], kept: Iterable[Value]) -> None:
    """Raise `Unsound` where a value of the reverse step cannot be what it says, or is not there to be read."""
    given, forward = {*loop.emitted, *kept}, ordered(loop.emitted)
    checked = _Checked(loop, {k: v.width for k, v in enumerate(loop.emitted) if incoming[k]})
    checked.leaves["carry"] |= {k: g.width for k, (_, g) in enumerate(reverse.contexts, len(loop.next))}
    order = ordered(reverse.roots(), stop=given)
    checked.values(dict.fromkeys([*forward, *order]))  # one matrix has one size, there and back
    known = set(forward)
    for v in order:
        again = v in known and not v.is_leaf and v not in given
        _need(not again or OPS[v.op].again is not Again.KEPT, v, "is computed again where it should have been kept")
    for v in reverse.roots():
        _need(not v.is_bool, v, "is a truth value, and gradients are numbers")
    for k, (_, g) in enumerate(reverse.contexts, len(loop.next)):
        _need(any(v.op == "carry" and v.index == k for v in g.args), g, "does not add to what later steps gave")
    for g, after in zip(reverse.carries, loop.next, strict=True):
        _need(g.width == after.width, g, f"is the gradient of a state of {after.width} features")
    for gradient, width in zip(reverse.inputs, loop.widths, strict=True):
        if gradient is not None:
            _need(gradient.width == width, gradient, f"is the gradient of an input of {width} features")
    for product in reverse.products:
        left, right = product.left.width, product.right.width
        checked.constant(
            product.right, product.matrix, (left, right) if product.rows is None else (product.rows, right // left)
        )
    for i, gradient in reverse.rows:
        checked.constant(gradient, i, (gradient.width,))


class _Checked:
    """Values, each by itself, and all that read the same row, matrix or sequence with each other."""

    def __init__(self, loop: Loop, incoming: dict[int, int]) -> None:
        states = dict(zip(loop.carried, (v.width for v in loop.next), strict=True))
        carries = {k: v.width for k, v in enumerate(loop.next)} if incoming else {}
        inputs = dict(enumerate(loop.widths))
        self.leaves = {"input": inputs, "state": states, "carry": carries, "incoming": incoming}
        self.constants = len(loop.constants)
        self.sizes: dict[int, tuple[int, ...]] = {}

    def values(self, order: Iterable[Value]) -> None:
        for v in order:
            op = OPS.get(v.op)
            if op is None:
                raise Unsound(f"{v.op} is not an operation of the loop language.")
            _need(len(v.args) == op.arity or (op.arity is None and len(v.args) > 0), v, f"needs {op.arity} arguments")
            for i, a in enumerate(v.args):
                _need(a.is_bool == (i < op.conditions), v, f"has a truth value, or none, as argument {i}")
            _WIDTHS[op.kind](v)
            if v.op in self.leaves:
                there = self.leaves[v.op].get(v.index) == v.width
                _need(there, v, f"reads {v.op} {v.index}, of which there is none so wide")
            elif v.op == "constant":
                self.constant(v, v.index, (v.width,))
            elif v.op == "matmul":
                i, transposed = v.index
                size = v.args[0].width, v.width
                self.constant(v, i, size[::-1] if transposed else size)
            elif v.op == "row":
                i, k = v.index
                _need(v.width % v.args[0].width == 0, v, f"is not a row for each of {v.args[0].width} indices")
                self.constant(v, i, (k, v.width // v.args[0].width))

    def constant(self, v: Value, i: int, size: tuple[int, ...]) -> None:
        """A row [k] or a matrix [k, m] of what is computed once: always the same size."""
        _need(0 <= i < self.constants, v, f"reads constant {i} of {self.constants}")
        _need(self.sizes.setdefault(i, size) == size, v, f"reads constant {i} as {size} and as {self.sizes[i]}")


def _pointwise(v: Value) -> None:
    widths = {a.width for a in v.args}
    fits = widths == {1} if v.op == "expand" else max(widths) == v.width and widths <= {1, v.width}
    _need(fits, v, f"has arguments of {', '.join(map(str, sorted(widths)))} features")


def _layout(v: Value) -> None:
    if v.op == "cat":
        _need(v.width == sum(a.width for a in v.args), v, "is not as wide as its parts together")
    elif v.op == "take":
        inside = all(-1 <= p < v.args[0].width for p in v.index)
        _need(len(v.index) == v.width and inside, v, f"takes other places than those of {v.args[0].width} features")
    else:
        _need(v.index >= 0 and v.index + v.width <= v.args[0].width, v, f"starts at {v.index} of {v.args[0].width}")


_WIDTHS: dict[Kind, Callable[[Value], None]] = {
    Kind.LEAF: lambda v: _need(v.width >= 1 and (v.op != "number" or v.width == 1), v, "has no such width"),
    Kind.POINTWISE: _pointwise,
    Kind.REDUCTION: lambda v: _need(v.args[0].width % v.width == 0, v, "is not a number for each of equal parts"),
    Kind.PRODUCT: lambda v: _need(v.width >= 1, v, "has no features"),
    Kind.LAYOUT: _layout,
}


def _need(fine: bool, v: Value, what: str) -> None:
    if not fine:
        raise Unsound(f"{v.op} of {v.width} features {what}.")
