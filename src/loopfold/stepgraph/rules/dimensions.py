"""Operations along dimensions: sums, means, softmax, norms."""

import math
from typing import Any

import torch

from loopfold.stepgraph.graph import BATCH, Node, Refusal, sizes_of
from loopfold.stepgraph.loop import Value
from loopfold.stepgraph.moves import flat, size_of
from loopfold.stepgraph.ops import raised
from loopfold.stepgraph.recipes import Recipe
from loopfold.stepgraph.rules.products import MOST_TERMS
from loopfold.stepgraph.rules.registry import rule
from loopfold.surroundings import INDICES


@rule("getitem")
def _getitem(hoist: Any, node: Node, parts: list[Any], i: int) -> Any:
    if i >= len(parts):
        raise Refusal(f"result {i} of aten.{node.args[0].op} has no kernel.")
    return parts[i]


def fold(hoist: Any, op: str, v: Value, shape: tuple[Any, ...], dim: Any) -> Value:
    """A reduction over dimensions of a value of such a shape."""
    dims, places = _dims(shape, dim), places_of(shape)
    kept = [d for d in range(len(shape)) if d not in dims]
    last = places.permute(*kept, *dims)
    width = places.numel() // math.prod(places.shape[d] for d in dims)
    return v if width == v.width else hoist.builder.make(op, hoist.builder.take(v, flat(last)), width=width)


def spread(hoist: Any, v: Value, shape: tuple[Any, ...], dim: Any) -> Value:
    """What a reduction gave, at every place that it was made from."""
    dims, places = _dims(shape, dim), places_of(shape)
    sizes = [1 if d in dims else size for d, size in enumerate(places.shape)]
    return hoist.builder.take(v, flat(torch.arange(v.width).view(sizes).expand(places.shape)))


def _dims(shape: tuple[Any, ...], dim: Any) -> list[int]:
    dims = dim if isinstance(dim, tuple) else (dim,)
    return sorted(d % len(shape) for d in dims)


def places_of(shape: tuple[Any, ...]) -> torch.Tensor:
    """The numbers of a row, in their shape: for one sequence."""
    if not size_of(shape):
        raise Refusal("it works along dimensions without a number.")
    return torch.arange(size_of(shape)).view(sizes_of(shape))


def along(shape: tuple[Any, ...], dim: int) -> tuple[int, ...]:
    """For each number of a row of such a shape, where it stands along a dimension."""
    places = places_of(shape)
    n = places.shape[dim]
    sizes = [-1 if d == dim % len(shape) else 1 for d in range(len(shape))]
    return flat(torch.arange(n).view(sizes).expand(places.shape))


def laid(hoist: Any, v: Value, sizes: Any, dim: int) -> Value:
    """A row whose last dimension is moved to `dim`."""
    return hoist.builder.take(v, flat(torch.arange(v.width).view(sizes).movedim(-1, dim)))


def _mean_of(hoist: Any, v: Value, shape: tuple[Any, ...], dim: Any) -> Value:
    total = fold(hoist, "sum", v, shape, dim)
    return hoist.builder.mul(total, total.width / v.width)


@rule("sum", "amax", "amin")
def _reduce(hoist: Any, node: Node, v: Value, dim: Any = None, keepdim: bool = False, **options: Any) -> Value:
    total = fold(hoist, node.op, hoist.row(v), node.args[0].shape, dim)
    if node.dtype not in INDICES:
        return total
    if node.args[0].dtype != torch.bool:
        raise Refusal(f"aten.{node.op} computes with whole numbers in the loop.")
    return counted(hoist, node, total, v.width // total.width + 1)


def exact_up_to(dtype: torch.dtype) -> int:
    """The largest whole number up to which a dtype has them all.

    >>> exact_up_to(torch.float32), exact_up_to(torch.bfloat16)
    (16777216, 256)
    """
    return int(2 / torch.finfo(dtype).eps)


def check_exact(hoist: Any, node: Node, n: int) -> None:
    if n > exact_up_to(hoist.dtype):
        raise Refusal(f"aten.{node.op} over {n} numbers: {hoist.dtype} has not every place exactly.")


def counted(hoist: Any, node: Node, v: Value, n: int) -> Value:
    """Whole numbers below n: no gradient goes through a choice."""
    check_exact(hoist, node, n)
    hoist.bounds[v] = (0, n - 1)
    return hoist.builder.make("detach", v)


@rule("nansum")
def _nansum(hoist: Any, node: Node, v: Value, dim: Any = None, keepdim: bool = False, **options: Any) -> Value:
    b = hoist.builder
    return fold(hoist, "sum", b.where(b.make("eq", v, v), v, 0), node.args[0].shape, dim)


@rule("any", "all")
def _truths(hoist: Any, node: Node, v: Value, dim: Any = None, keepdim: bool = False) -> Value:
    truth = hoist.row(hoist.condition(v))
    return hoist.condition(fold(hoist, "amax" if node.op == "any" else "amin", truth, node.args[0].shape, dim))


@rule("prod")
def _prod(hoist: Any, node: Node, v: Value, dim: Any, keepdim: bool = False, **options: Any) -> Value:
    return fold(hoist, "prod", hoist.row(v), node.args[0].shape, dim)


@rule("mean")
def _mean(hoist: Any, node: Node, v: Value, dim: Any = None, keepdim: bool = False, **options: Any) -> Value:
    return _mean_of(hoist, hoist.row(v), node.args[0].shape, dim)


@rule("_softmax")
def _softmax(hoist: Any, node: Node, v: Value, dim: int, half_to_float: bool = False) -> Value:
    e = hoist.builder.make("exp", _centred(hoist, v, node.shape, dim))
    return hoist.builder.div(e, spread(hoist, fold(hoist, "sum", e, node.shape, dim), node.shape, dim))


@rule("_safe_softmax")
def _safe_softmax(hoist: Any, node: Node, v: Value, dim: int, dtype: Any = None) -> Value:
    """Where every place is -∞, as where a mask leaves none, all are 0."""
    b, shape = hoist.builder, node.shape
    greatest = b.make("detach", fold(hoist, "amax", v, shape, dim))
    none = b.make("eq", greatest, b.number(-math.inf))
    e = b.make("exp", b.sub(v, spread(hoist, b.where(none, 0, greatest), shape, dim)))
    total = b.where(none, 1, fold(hoist, "sum", e, shape, dim))
    return b.div(e, spread(hoist, total, shape, dim))


@rule("_log_softmax")
def _log_softmax(hoist: Any, node: Node, v: Value, dim: int, half_to_float: bool = False) -> Value:
    b, centred = hoist.builder, _centred(hoist, v, node.shape, dim)
    log = b.make("log", fold(hoist, "sum", b.make("exp", centred), node.shape, dim))
    return b.sub(centred, spread(hoist, log, node.shape, dim))


def _centred(hoist: Any, v: Value, shape: tuple[Any, ...], dim: Any) -> Value:
    """Less its greatest, so that exp does not overflow."""
    greatest = hoist.builder.make("detach", fold(hoist, "amax", v, shape, dim))
    return hoist.builder.sub(v, spread(hoist, greatest, shape, dim))


@rule("linalg_vector_norm", "norm")
def _norm(hoist: Any, node: Node, v: Value, p: float | None = 2, dim: Any = None, *rest: Any, **options: Any) -> Value:
    b, shape, p = hoist.builder, node.args[0].shape, 2 if p is None else p
    size, zero = b.make("abs", v), b.make("eq", v, b.number(0))
    if abs(p) == math.inf or p == 1:
        return fold(hoist, "sum" if p == 1 else "amax" if p > 0 else "amin", size, shape, dim)
    if p == 0:
        return fold(hoist, "sum", b.where(zero, 0, 1), shape, dim)
    if p < 0:
        raise Refusal(f"aten.{node.op} of order {p} has no kernel.")
    if p == 2:
        power = b.mul(v, v)
    elif p > 1:
        power = b.make("pow", size, index=float(p))
    else:
        power = b.where(zero, 0, b.make("pow", b.where(zero, 1, size), index=float(p)))
    return _rooted(b, fold(hoist, "sum", power, shape, dim), p)


def _rooted(b: Any, total: Value, p: float) -> Value:
    """The p-th root; as torch has it, no gradient at zero."""
    none = b.make("eq", total, b.number(0))
    some = b.where(none, 1, total)
    return b.where(none, 0, raised(b, some, 1 / p))


@rule("native_layer_norm")
def _layer_norm(hoist: Any, node: Node, v: Value, sizes: Any, weight: Any, bias: Any, eps: float) -> list[Value]:
    shape = node.args[0].shape
    affine = [None if a is None else hoist.row(hoist.broadcast(a, a, shape)) for a in (weight, bias)]
    return [_normed(hoist, v, shape, tuple(range(-len(sizes), 0)), affine, eps)]


@rule("native_group_norm")
def _group_norm(hoist: Any, node: Node, v: Value, weight: Any, bias: Any, *rest: Any) -> list[Value]:
    _, _, places, groups, eps = rest
    times = node.args[0].shape[0].times

    def every_place(a: Node | None) -> Value | None:
        recipe = Recipe(lambda t: t.repeat_interleave(places).repeat(times), () if a is None else (a,))
        return None if a is None else hoist.constant(recipe, v.width, ("row", a, places, times))

    affine = [every_place(a) for a in (weight, bias)]
    return [_normed(hoist, v, (BATCH, times * groups, v.width // (times * groups)), (2,), affine, eps)]


def _normed(hoist: Any, v: Value, shape: Any, dims: tuple[int, ...], affine: list[Value | None], eps: float) -> Value:
    """(v - mean) / √(variance + ε) over dimensions of `shape`, then times a weight and plus a bias, where given."""
    b, (weight, bias) = hoist.builder, affine
    mean = _mean_of(hoist, v, shape, dims)
    if mean.width == v.width:
        raise Refusal("a norm over one feature has no kernel.")
    centred = b.sub(v, spread(hoist, mean, shape, dims))
    variance = _mean_of(hoist, b.mul(centred, centred), shape, dims)
    y = b.mul(centred, spread(hoist, b.make("rsqrt", b.add(variance, eps)), shape, dims))
    y = y if weight is None else b.mul(y, weight)
    return y if bias is None else b.add(y, bias)


@rule("native_batch_norm", "_native_batch_norm_legit_no_training")
def _batch_norm(
    hoist: Any, node: Node, v: Value, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any
) -> list[Value]:
    """With the means and variances that training left."""
    if len(node.args[0].shape) != 2 or mean is None:
        raise Refusal("batch norm has a kernel for rows [batch, n], outside training.")
    b = hoist.builder
    y = b.mul(b.sub(v, hoist.row(mean)), b.make("rsqrt", b.add(hoist.row(var), rest[-1])))
    y = y if weight is None else b.mul(y, hoist.row(weight))
    return [y if bias is None else b.add(y, hoist.row(bias))]


@rule("logsumexp")
def _logsumexp(hoist: Any, node: Node, v: Value, dim: Any, keepdim: bool = False) -> Value:
    b, shape = hoist.builder, node.args[0].shape
    top = fold(hoist, "amax", v, shape, dim)
    top = b.make("detach", b.where(b.make("eq", b.make("abs", top), b.number(math.inf)), 0, top))
    e = b.make("exp", b.sub(v, spread(hoist, top, shape, dim)))
    return b.add(b.make("log", fold(hoist, "sum", e, shape, dim)), top)


@rule("var", "std", "var_mean", "std_mean")
def _spread(
    hoist: Any, node: Node, v: Value, dim: Any = None, *rest: Any, correction: Any = 1, keepdim: bool = False
) -> Value | list[Value]:
    b, shape = hoist.builder, node.args[0].shape
    mean = _mean_of(hoist, v, shape, dim)
    count, correction = v.width // mean.width, 1 if correction is None else correction
    if rest or count <= correction:
        raise Refusal(f"aten.{node.op} of so few features has no kernel.")
    centred = b.sub(v, spread(hoist, b.make("detach", mean), shape, dim))  # whose sum is 0, and so is the gradient
    found = b.mul(fold(hoist, "sum", b.mul(centred, centred), shape, dim), 1 / (count - correction))
    found = found if node.op.startswith("var") else _rooted(b, found, 2)
    return [found, mean] if node.op.endswith("_mean") else found


MOST_FACTORS = 32  # of more, whose products are all computed one by one, torch's own loop is faster


@rule("cumsum", "cumprod")
def _cumulated(hoist: Any, node: Node, v: Value, dim: int, **options: Any) -> Value:
    """The sum, or the product, of all places up to each."""
    b, v, places = hoist.builder, hoist.row(v), places_of(node.shape).movedim(dim, -1)
    n = places.shape[-1]
    if places.numel() * n > MOST_TERMS or (node.op == "cumprod" and n > MOST_FACTORS):
        raise Refusal(f"aten.{node.op} over {n} features is too large for a kernel.")
    upto = torch.ones(n, n, dtype=torch.bool).tril()
    fold_by, beyond, row = ("sum", -1, v) if node.op == "cumsum" else ("prod", v.width, b.cat([v, b.number(1)]))
    terms = torch.where(upto, places.unsqueeze(-2), beyond)
    found = b.make(fold_by, b.take(row, flat(terms)), width=v.width)
    return laid(hoist, found, places.shape, dim)


@rule("glu")
def _glu(hoist: Any, node: Node, v: Value, dim: int = -1) -> Value:
    places = places_of(node.args[0].shape)
    a, gate = (hoist.builder.take(v, flat(half)) for half in places.chunk(2, dim))
    return hoist.builder.mul(a, hoist.builder.make("sigmoid", gate))
