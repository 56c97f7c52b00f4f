"""Choices: the place of the largest, and a row of a table by an index that the step computes.

Whole numbers are rows of the state's dtype, which has them exactly up to `exact_up_to`. No gradient goes through one.
An index must be seen to lie within its table, since a kernel cannot raise an error.
"""

import math
from typing import Any

import torch

from loopfold.stepgraph.aten import MOVING, no_kernel
from loopfold.stepgraph.graph import Node, Refusal, batch_at, sizes_of
from loopfold.stepgraph.loop import Value
from loopfold.stepgraph.moves import flat, size_of
from loopfold.stepgraph.recipes import Recipe
from loopfold.stepgraph.rules.dimensions import (
    along,
    check_exact,
    counted,
    exact_up_to,
    fold,
    laid,
    places_of,
    spread,
)
from loopfold.stepgraph.rules.products import MOST_TERMS
from loopfold.stepgraph.rules.registry import rule
from loopfold.surroundings import INDICES


@rule("argmax", "argmin")
def _place(hoist: Any, node: Node, v: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return _best(hoist, node, hoist.row(v), dim, "amax" if node.op == "argmax" else "amin")


@rule("max", "min")
def _largest(hoist: Any, node: Node, v: Value, dim: int, keepdim: bool = False) -> list[Value]:
    """As torch has it, the gradient goes to the place that is given beside."""
    v = hoist.row(v)
    found = _best(hoist, node, v, dim, f"a{node.op}")
    return [_gathered(hoist, node, v, dim, found, 1), found]


def _best(hoist: Any, node: Node, v: Value, dim: Any, fold_by: str) -> Value:
    """The first place that holds the largest number; as torch has it, NaN is larger, and smaller, than any."""
    b, shape = hoist.builder, node.args[0].shape
    row, places = _numbered(hoist, node, along(shape, dim))
    best = fold(hoist, fold_by, v, shape, dim)
    hit = b.make("or", b.make("eq", v, spread(hoist, best, shape, dim)), b.make("ne", v, v))
    n = row.width
    return counted(hoist, node, fold(hoist, "amin", b.where(hit, b.take(row, places), n - 1), shape, dim), n)


@rule("gather")
def _gather(hoist: Any, node: Node, v: Value, dim: int, at: Value, **options: Any) -> Value:
    m = _checked(hoist, node, dim, at)
    return _gathered(hoist, node, hoist.row(v), dim, at, m)


@rule("scatter")
def _scatter(hoist: Any, node: Node, v: Value, dim: int, at: Value, new: Any, *rest: Any, **options: Any) -> Value:
    """Another number at one place, or one number at many."""
    b, shape, m = hoist.builder, node.args[0].shape, _checked(hoist, node, dim, at)
    several = isinstance(node.args[3], Node) and (m != 1 or node.args[3].shape != node.args[2].shape)
    if rest or options or several:
        raise Refusal("aten.scatter has a kernel for one number at many places, or another at one.")
    if isinstance(node.args[3], Node):
        new = spread(hoist, hoist.row(new), shape, dim)
    places, which, number = (t.mT for t in _pairs(node, dim, m))
    hit = b.where(_equal(hoist, node, at, which, number), 1, 0)
    hit = hoist.condition(laid(hoist, b.make("amax", hit, width=places[..., 0].numel()), places.shape[:-1], dim))
    return b.where(hit, new, hoist.row(v))


@rule("sort")
def _sort(hoist: Any, node: Node, v: Value, *rest: Any, **options: Any) -> list[Value]:
    """Each number goes where as many stand before it as are smaller, or as large and earlier; NaN is the largest."""
    b, v, dim = hoist.builder, hoist.row(v), node.argument("dim")
    rows = places_of(node.args[0].shape).movedim(dim, -1)
    n = rows.shape[-1]
    _check_terms(node, rows.numel() * n)
    full, number = (*rows.shape, n), torch.arange(n)
    one, other = rows.unsqueeze(-1).expand(full), rows.unsqueeze(-2).expand(full)
    a, c = b.take(v, flat(one)), b.take(v, flat(other))

    def less(p: Value, q: Value) -> Value:
        no_number = b.make("and", b.make("ne", q, q), b.make("eq", p, p))
        return b.make("or", b.make("lt", p, q), no_number)

    first, later = (less(a, c), less(c, a)) if node.argument("descending") else (less(c, a), less(a, c))
    row, places = _numbered(hoist, node, flat(number.expand(full)))
    of_one = b.take(row, flat(number[:, None].expand(full)))
    earlier = b.make("lt", b.take(row, places), of_one)
    first = b.make("or", first, b.make("and", b.make("not", later), earlier))
    rank = b.make("sum", b.where(first, 1, 0), width=rows.numel())  # in the order of `rows`
    in_order = torch.arange(rows.numel()).view(rows.shape).unsqueeze(-2).expand(full)
    hit = b.make("eq", b.take(rank, flat(in_order)), of_one)
    sums = [b.make("sum", b.where(hit, b.take(*of), 0), width=rows.numel()) for of in ((v, flat(other)), (row, places))]
    numbers, order = [laid(hoist, found, rows.shape, dim) for found in (sums[0], counted(hoist, node, sums[1], n))]
    return [hoist.condition(numbers) if node.args[0].dtype == torch.bool else numbers, order]


@rule("bucketize", "searchsorted")
def _between(hoist: Any, node: Node, a: Any, c: Any, **options: Any) -> Value:
    """How many of the bounds, which are in order, are smaller; NaN is larger than any."""
    b, (v, bounds) = hoist.builder, (a, c) if node.op == "bucketize" else (c, a)
    given = node.argument("boundaries" if node.op == "bucketize" else "sorted_sequence")
    if hoist.depends[given] != "once" or len(given.shape) != 1 or options.get("sorter") is not None:
        raise Refusal(f"aten.{node.op} has a kernel for bounds [k] that are the same at every step.")
    v, bounds = hoist.row(v), hoist.row(bounds)
    k = given.shape[0]
    _check_terms(node, v.width * k)
    right = options.get("right") or options.get("side") == "right"
    each = b.take(bounds, tuple(range(k)) * v.width)
    beyond = b.make("not", b.make("gt" if right else "ge", each, b.spread(v, v.width * k)))
    return counted(hoist, node, b.make("sum", b.where(beyond, 1, 0), width=v.width), k + 1)


def _gathered(hoist: Any, node: Node, v: Value, dim: int, at: Value, m: int) -> Value:
    """The numbers that stand at m places along a dimension."""
    b, (places, which, number) = hoist.builder, _pairs(node, dim, m)
    terms = b.where(_equal(hoist, node, at, which, number), b.take(v, flat(places)), 0)
    return laid(hoist, b.make("sum", terms, width=at.width), places.shape[:-1], dim)


def _pairs(node: Node, dim: int, m: int) -> tuple[torch.Tensor, ...]:
    """`[…, m, n]`: every number of a row, where each of m indices stands, and the place that it would have to name."""
    rows = places_of(node.args[0].shape).movedim(dim, -1)
    *others, n = rows.shape
    _check_terms(node, rows.numel() * m)
    sizes = list(sizes_of(node.args[0].shape))
    sizes[dim] = m
    indices = torch.arange(math.prod(sizes)).view(sizes).movedim(dim, -1)
    full = (*others, m, n)
    return rows.unsqueeze(-2).expand(full), indices.unsqueeze(-1).expand(full), torch.arange(n).expand(full)


def _equal(hoist: Any, node: Node, at: Value, which: torch.Tensor, number: torch.Tensor) -> Value:
    row, places = _numbered(hoist, node, flat(number))
    return hoist.builder.make("eq", hoist.builder.take(at, flat(which)), hoist.builder.take(row, places))


def _numbered(hoist: Any, node: Node, places: tuple[int, ...]) -> tuple[Value, tuple[int, ...]]:
    """The numbers from 0 on, as a row of which `places` are taken."""
    n = max(places) + 1
    check_exact(hoist, node, n)
    return hoist.constant(Recipe(lambda: range(n), ()), n, ("places", n)), places


def _checked(hoist: Any, node: Node, dim: int, at: Any) -> int:
    """How many indices there are along a dimension, all seen to lie within it."""
    shape, index = node.args[0].shape, node.args[2].shape
    if not isinstance(at, Value) or index != (*shape[: dim % len(shape)], index[dim], *shape[dim % len(shape) + 1 :]):
        raise Refusal(f"aten.{node.op} has a kernel for indices of the shape of what they index but for one dimension.")
    if not _within(hoist, at, node.args[2], shape[dim]):
        raise Refusal(f"an index into {shape[dim]} numbers may be any. Bound it: index.clamp(0, {shape[dim] - 1}).")
    return index[dim]


def _check_terms(node: Node, terms: int) -> None:
    if terms > MOST_TERMS:
        raise Refusal(f"aten.{node.op} of so many numbers is too large for a kernel: it takes {terms} comparisons.")


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
    if not (_within(hoist, index, at, k) and k <= exact_up_to(hoist.dtype)):
        raise Refusal(
            f"an index into the {k} rows of {table.name} may be any number. Bound it: index.clamp(0, {k - 1})."
        )
    made = Recipe(lambda t: t.reshape(k, width).contiguous(), (table,))
    row = hoist.constant(made, k, ("table", table)).index
    return hoist.builder.make("row", index, width=size_of(node.shape), index=(row, k))


def _within(hoist: Any, index: Value, node: Node, k: int) -> bool:
    """Whether it is seen of all indices, by their value or by their node, that they are among the first k."""
    (low, high), (least, most) = bounds_of(hoist, index), _bounds_outside(node)
    return max(low, least) >= 0 and min(high, most) < k


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


def _bounds_outside(node: Node) -> tuple[float, float]:
    """The same of whole numbers that are computed outside of the loop, as their node says it."""
    if node.dtype not in INDICES:
        return -math.inf, math.inf
    source = node.args[0] if node.args else None
    chooses = source if node.op == "getitem" and node.args[1] == 1 else node
    if isinstance(chooses, Node) and chooses.op in ("argmax", "argmin", "sort", "max", "min"):
        dim, shape = chooses.argument("dim"), chooses.args[0].shape
        if dim is not None and isinstance(shape[dim], int):
            return 0, shape[dim] - 1
    if node.op == "remainder" and isinstance(node.args[1], int) and node.args[1] > 0:
        return 0, node.args[1] - 1
    if node.op in ("clamp", "clamp_min", "clamp_max"):
        (low, high), least, most = _bounds_outside(node.args[0]), node.argument("min"), node.argument("max")
        if not isinstance(least, Node) and not isinstance(most, Node):
            low, high = (low, high) if least is None else (max(low, least), max(high, least))
            return (low, high) if most is None else (min(low, most), min(high, most))
    if node.op in ("clone", "alias", "detach", "_to_copy") or (node.op in MOVING and node.op != "constant_pad_nd"):
        return _both([(0, 0), *map(_bounds_outside, node.inputs())])  # 0 is put where there is nothing to move
    return -math.inf, math.inf


def _both(ranges: list[tuple[float, float]]) -> tuple[float, float]:
    return min(low for low, _ in ranges), max(high for _, high in ranges)
