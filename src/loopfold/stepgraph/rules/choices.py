"""Choices: the place of the largest, and a row of a table by an index that the step computes.

Whole numbers are rows of the state's dtype, which has them exactly up to `exact_up_to`. No gradient goes through one.
An index must be seen to lie within its table, since a kernel cannot raise an error.
"""

import math
from typing import Any

import torch

from loopfold.stepgraph.aten import no_kernel
from loopfold.stepgraph.graph import Node, Refusal, batch_at
from loopfold.stepgraph.loop import Value
from loopfold.stepgraph.moves import size_of
from loopfold.stepgraph.recipes import Recipe
from loopfold.stepgraph.rules.dimensions import along, fold, spread
from loopfold.stepgraph.rules.registry import rule


def exact_up_to(dtype: torch.dtype) -> int:
    """The largest whole number up to which a dtype has them all.

    >>> exact_up_to(torch.float32), exact_up_to(torch.bfloat16)
    (16777216, 256)
    """
    return int(2 / torch.finfo(dtype).eps)


@rule("argmax", "argmin")
def _place(hoist: Any, node: Node, v: Value, dim: Any = None, keepdim: bool = False) -> Value:
    """The first place that holds the largest number; as torch has it, NaN is larger, and smaller, than any."""
    b, v, shape = hoist.builder, hoist.row(v), node.args[0].shape
    places = along(shape, dim)  # of each number of the row: its place along the dimension
    n = max(places) + 1
    if n > exact_up_to(hoist.dtype):
        raise Refusal(f"aten.{node.op} over {n} numbers: {hoist.dtype} has not every place exactly.")
    best = fold(hoist, "amax" if node.op == "argmax" else "amin", v, shape, dim)
    hit = b.make("or", b.make("eq", v, spread(hoist, best, shape, dim)), b.make("ne", v, v))
    row = hoist.constant(Recipe(lambda: range(n), ()), n, ("places", n))
    found = fold(hoist, "amin", b.where(hit, b.take(row, places), n - 1), shape, dim)
    found = b.make("detach", found)
    hoist.bounds[found] = (0, n - 1)
    return found


@rule("embedding", "index", "index_select")
def _row(hoist: Any, node: Node, *arguments: Any, **options: Any) -> Value:
    """A row of a table that is the same at every step, for each index."""
    table, at = node.args[0], node.args[-1]
    if node.op == "embedding":
        at = node.args[1]
        padding, *scaled = (*node.args[2:], *options.values()) or (-1,)
        if padding != -1 or any(scaled):
            raise Refusal("aten.embedding with padding_idx, scale_grad_by_freq or sparse has no kernel in the loop.")
    elif node.op == "index":
        at = at[0] if len(at) == 1 else None
    elif node.args[1] != 0:
        at = None
    if hoist.depends[table] != "once" or not isinstance(at, Node) or at.dtype == torch.bool or batch_at(at.shape) != 0:
        raise Refusal(no_kernel(node.op))
    k, width = table.shape[0], math.prod(table.shape[1:])
    if table.dtype != hoist.dtype:
        raise Refusal(f"{table.name} is {table.dtype} where the state is {hoist.dtype}.")
    index = hoist.row(hoist.argument(at))
    low, high = bounds_of(hoist, index)
    if not (low >= 0 and high < k <= exact_up_to(hoist.dtype)):
        raise Refusal(
            f"an index into the {k} rows of {table.name} may be any number. Bound it: index.clamp(0, {k - 1})."
        )
    made = Recipe(lambda t: t.reshape(k, width).contiguous(), (table,))
    row = hoist.constant(made, k, ("table", table)).index
    return hoist.builder.make("row", index, width=size_of(node.shape), index=(row, k))


def bounds_of(hoist: Any, v: Value) -> tuple[float, float]:
    """The least and the greatest number that a value can hold, as far as that is seen."""
    if v in hoist.bounds:
        return hoist.bounds[v]
    if v.op == "number":
        return v.index, v.index
    if v.op in ("detach", "expand", "trunc", "slice", "cat", "amin", "amax"):
        return _both([bounds_of(hoist, a) for a in v.args])
    if v.op == "take" and -1 not in v.index:
        return bounds_of(hoist, v.args[0])
    if v.op == "where":
        c, yes, no = v.args
        (low, high), limit = bounds_of(hoist, no), bounds_of(hoist, yes)
        if c.op in ("lt", "gt") and c.args == (no, yes):  # as `clamp` is written
            low, high = (max(low, limit[0]), high) if c.op == "lt" else (low, min(high, limit[1]))
        return _both([(low, high), limit])
    return -math.inf, math.inf


def _both(ranges: list[tuple[float, float]]) -> tuple[float, float]:
    return min(low for low, _ in ranges), max(high for _, high in ranges)
