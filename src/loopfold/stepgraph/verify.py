"""Is a loop well formed? Checked for every program, after hoisting and after differentiation, before any code is made.

A fault here is one of ours, and would be a wrong value later. Widths, arity, truth values, and that whatever is read is
there: at its step, with its size.
"""

from collections.abc import Callable, Iterable, Sequence

from loopfold.stepgraph.differentiate import Reverse
from loopfold.stepgraph.graph import Unsound
from loopfold.stepgraph.hoist import Loop
from loopfold.stepgraph.loop import Value, ordered
from loopfold.stepgraph.ops import OPS, Again, Kind


def verify(loop: Loop) -> None:
    """Raise `Unsound` where a value of the loop cannot be what it says."""
    _values(loop, ordered(loop.emitted), dict(enumerate(loop.widths)), {})
    for v in loop.emitted:
        _need(not v.is_bool, v, "is a truth value, and the loop emits numbers")


def verify_reverse(loop: Loop, reverse: Reverse, incoming: Sequence[bool], kept: Iterable[Value]) -> None:
    """Raise `Unsound` where a value of the reverse step cannot be what it says, or is not there to be read."""
    given = {*loop.emitted, *kept}
    order = ordered(reverse.roots(), stop=given)
    arriving = {k: v.width for k, v in enumerate(loop.emitted) if incoming[k]}
    _values(loop, order, dict(enumerate(loop.widths)), arriving)
    forward = set(ordered(loop.emitted))
    for v in order:
        known = v.is_leaf or v in given or v not in forward
        _need(known or OPS[v.op].again is not Again.KEPT, v, "is computed again where it should have been kept")
    for v in reverse.roots():
        _need(not v.is_bool, v, "is a truth value, and gradients are numbers")
    for g, after in zip(reverse.carries, loop.next, strict=True):
        _need(g.width == after.width, g, f"is the gradient of a state of {after.width} features")
    for gradient, width in zip(reverse.inputs, loop.widths, strict=True):
        if gradient is not None:
            _need(gradient.width == width, gradient, f"is the gradient of an input of {width} features")


def _values(loop: Loop, order: list[Value], inputs: dict[int, int], incoming: dict[int, int]) -> None:
    """Each by itself, and all that use the same matrix, row or sequence with each other."""
    states = dict(zip(loop.carried, (v.width for v in loop.next), strict=True))
    carries = {k: v.width for k, v in enumerate(loop.next)} if incoming else {}
    sizes: dict[tuple[str, int], tuple[int, ...]] = {}

    def one_size(v: Value, what: str, i: int, size: tuple[int, ...]) -> None:
        _need(0 <= i < len(loop.constants), v, f"reads {what} {i} of {len(loop.constants)}")
        _need(sizes.setdefault((what, i), size) == size, v, f"reads {what} {i} as {size} and as {sizes[what, i]}")

    leaves: dict[str, dict[int, int]] = {"input": inputs, "state": states, "carry": carries, "incoming": incoming}
    for v in order:
        op = OPS.get(v.op)
        if op is None:
            raise Unsound(f"{v.op} is no operation of the loop language.")
        _need(len(v.args) == op.arity or (op.arity is None and len(v.args) > 0), v, f"needs {op.arity} arguments")
        for i, a in enumerate(v.args):
            _need(a.is_bool == (i < op.conditions), v, f"has a truth value, or none, as argument {i}")
        _WIDTHS[op.kind](v)
        if v.op in leaves:
            _need(leaves[v.op].get(v.index) == v.width, v, f"reads {v.op} {v.index}, of which there is none so wide")
        elif v.op == "constant":
            one_size(v, "row", v.index, (v.width,))
        elif v.op == "matmul":
            i, transposed = v.index
            size = v.args[0].width, v.width
            one_size(v, "matrix", i, size[::-1] if transposed else size)


def _pointwise(v: Value) -> None:
    widths = {a.width for a in v.args}
    fits = widths == {1} if v.op == "expand" else max(widths) == v.width and widths <= {1, v.width}
    _need(fits, v, f"has arguments of {', '.join(map(str, sorted(widths)))} features")


def _layout(v: Value) -> None:
    if v.op == "cat":
        _need(v.width == sum(a.width for a in v.args), v, "is not as wide as its parts together")
    else:
        _need(v.index >= 0 and v.index + v.width <= v.args[0].width, v, f"starts at {v.index} of {v.args[0].width}")


_WIDTHS: dict[Kind, Callable[[Value], None]] = {
    Kind.LEAF: lambda v: _need(v.width >= 1 and (v.op != "number" or v.width == 1), v, "has no such width"),
    Kind.POINTWISE: _pointwise,
    Kind.REDUCTION: lambda v: _need(v.width == 1, v, "is more than one number"),
    Kind.PRODUCT: lambda v: _need(v.width >= 1, v, "has no features"),
    Kind.LAYOUT: _layout,
}


def _need(fine: bool, v: Value, what: str) -> None:
    if not fine:
        raise Unsound(f"{v.op} of {v.width} features {what}.")
