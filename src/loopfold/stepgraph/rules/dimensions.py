"""Operations along dimensions: sums, means, softmax, norms."""

import math
from typing import Any

import torch

from loopfold.stepgraph.graph import BATCH, Node, Refusal, sizes_of
from loopfold.stepgraph.loop import Value
from loopfold.stepgraph.moves import size_of
from loopfold.stepgraph.recipes import Recipe
from loopfold.stepgraph.rules.products import MOST_TERMS
from loopfold.stepgraph.rules.registry import rule


@rule("getitem")
def _getitem(hoist: Any, node: Node, parts: list[Any], i: int) -> Any:
    if i >= len(parts):
        raise Refusal(f"result {i} of aten.{node.args[0].op} has no kernel.")
    return parts[i]


def fold(hoist: Any, op: str, v: Value, shape: tuple[Any, ...], dim: Any) -> Value:
    """A reduction over dimensions of a value of such a shape."""
    dims, places = _dims(shape, dim), _places(shape)
    kept = [d for d in range(len(shape)) if d not in dims]
    last = places.permute(*kept, *dims).flatten()
    width = places.numel() // math.prod(places.shape[d] for d in dims)
    return v if width == v.width else hoist.builder.make(op, hoist.builder.take(v, tuple(last.tolist())), width=width)


def spread(hoist: Any, v: Value, shape: tuple[Any, ...], dim: Any) -> Value:
    """What a reduction gave, at every place that it was made from."""
    dims, places = _dims(shape, dim), _places(shape)
    sizes = [1 if d in dims else size for d, size in enumerate(places.shape)]
    return hoist.builder.take(v, tuple(torch.arange(v.width).view(sizes).expand(places.shape).flatten().tolist()))


def _dims(shape: tuple[Any, ...], dim: Any) -> list[int]:
    dims = dim if isinstance(dim, tuple) else (dim,)
    return sorted(d % len(shape) for d in dims)


def _places(shape: tuple[Any, ...]) -> torch.Tensor:
    """The numbers of a row, in their shape: for one sequence."""
    return torch.arange(size_of(shape)).view(sizes_of(shape))


def along(shape: tuple[Any, ...], dim: int) -> tuple[int, ...]:
    """For each number of a row of such a shape, where it stands along a dimension."""
    places = _places(shape)
    n = places.shape[dim]
    return tuple(
        torch.arange(n)
        .view([-1 if d == dim % len(shape) else 1 for d in range(len(shape))])
        .expand(places.shape)
        .flatten()
        .tolist()
    )


def _mean_of(hoist: Any, v: Value, shape: tuple[Any, ...], dim: Any) -> Value:
    total = fold(hoist, "sum", v, shape, dim)
    return hoist.builder.mul(total, total.width / v.width)


@rule("sum", "amax", "amin")
def _reduce(hoist: Any, node: Node, v: Value, dim: Any = None, keepdim: bool = False, **options: Any) -> Value:
    return fold(hoist, node.op, v, node.args[0].shape, dim)


@rule("mean")
def _mean(hoist: Any, node: Node, v: Value, dim: Any = None, keepdim: bool = False, **options: Any) -> Value:
    return _mean_of(hoist, v, node.args[0].shape, dim)


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


@rule("linalg_vector_norm")
def _norm(hoist: Any, node: Node, v: Value, ord: float = 2, dim: Any = None, *rest: Any, **options: Any) -> Value:
    if ord != 2:
        raise Refusal(f"aten.linalg_vector_norm of order {ord} has no kernel.")
    b = hoist.builder
    square = fold(hoist, "sum", b.mul(v, v), node.args[0].shape, dim)
    none = b.make("eq", square, b.number(0))
    return b.where(none, 0, b.make("sqrt", b.where(none, 1, square)))  # as torch has it, no gradient at zero


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


@rule("var", "std")
def _spread(
    hoist: Any, node: Node, v: Value, dim: Any = None, *rest: Any, correction: Any = 1, keepdim: bool = False
) -> Value:
    b, shape = hoist.builder, node.args[0].shape
    mean = _mean_of(hoist, v, shape, dim)
    count, correction = v.width // mean.width, 1 if correction is None else correction
    if rest or count <= correction:
        raise Refusal(f"aten.{node.op} of so few features has no kernel.")
    centred = b.sub(v, spread(hoist, mean, shape, dim))
    variance = b.mul(fold(hoist, "sum", b.mul(centred, centred), shape, dim), 1 / (count - correction))
    if node.op == "var":
        return variance
    none = b.make("eq", variance, b.number(0))
    return b.where(none, 0, b.make("sqrt", b.where(none, 1, variance)))  # as torch has it, no gradient at zero


@rule("cumsum")
def _cumsum(hoist: Any, node: Node, v: Value, dim: int, **options: Any) -> Value:
    """The sum of all places up to each."""
    places = _places(node.shape).movedim(dim, -1)
    n = places.shape[-1]
    if places.numel() * n > MOST_TERMS:
        raise Refusal(f"aten.cumsum over {n} features is too large for a kernel.")
    upto = torch.ones(n, n, dtype=torch.bool).tril()
    terms = torch.where(upto, places.unsqueeze(-2), -1)
    sums = hoist.builder.make("sum", hoist.builder.take(v, tuple(terms.flatten().tolist())), width=v.width)
    back = torch.arange(v.width).view(places.shape).movedim(-1, dim)
    return hoist.builder.take(sums, tuple(back.flatten().tolist()))


@rule("glu")
def _glu(hoist: Any, node: Node, v: Value, dim: int = -1) -> Value:
    places = _places(node.args[0].shape)
    a, gate = (hoist.builder.take(v, tuple(half.flatten().tolist())) for half in places.chunk(2, dim))
    return hoist.builder.mul(a, hoist.builder.make("sigmoid", gate))
