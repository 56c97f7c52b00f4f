"""torch's operations in the language of the loop: one short rule each."""

import math
from collections.abc import Callable
from typing import Any

import torch

from loopfold.stepgraph.aten import MOVING
from loopfold.stepgraph.graph import BATCH, Batch, Node, Refusal, sizes_of
from loopfold.stepgraph.loop import Value
from loopfold.stepgraph.moves import moved, size_of, sources_of
from loopfold.stepgraph.ops import OPS, Op
from loopfold.stepgraph.recipes import Matrix, Recipe

Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}  # name of the operation -> rule(hoist, node, *arguments)


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def enter(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return enter


def _plain(op: Op) -> Rule:
    """torch's operation is one of ours."""

    def rule(hoist: Any, node: Node, *args: Any) -> Value:
        rows = [hoist.condition(a) if i < op.conditions else hoist.row(a) for i, a in enumerate(args)]
        return hoist.builder.make(op.name, *rows)

    return rule


OWN = {name: op for op in OPS.values() for name in op.aten}  # torch's operations that are ours
for _name, _op in OWN.items():
    RULES[_name] = _plain(_op)  # those that take more than rows have rules of their own below


@_rule("clone", "alias", "_to_copy")
def _same(hoist: Any, node: Node, v: Any, **options: Any) -> Any:
    if node.dtype == node.args[0].dtype:
        return v
    return hoist.condition(v) if node.dtype == torch.bool else hoist.row(v)


@_rule("detach")
def _detach(hoist: Any, node: Node, v: Any) -> Any:
    return v if node.dtype == torch.bool else hoist.builder.make("detach", hoist.row(v))


@_rule(*MOVING)
def _move(hoist: Any, node: Node, *arguments: Any, **options: Any) -> Any:
    """Where each number comes from, torch itself says."""
    rows = [hoist.row(hoist.argument(source)) for source in sources_of(node)]
    whole = rows[0] if len(rows) == 1 else hoist.builder.cat(rows)
    results = [hoist.builder.take(whole, positions) for positions in moved(node)]
    return results if node.dtype is None else results[0]


@_rule("add")
def _add(hoist: Any, node: Node, a: Any, b: Any, alpha: float = 1) -> Value:
    return hoist.builder.add(hoist.row(a), hoist.builder.mul(alpha, hoist.row(b)))


@_rule("sub")
def _sub(hoist: Any, node: Node, a: Any, b: Any, alpha: float = 1) -> Value:
    return hoist.builder.sub(hoist.row(a), hoist.builder.mul(alpha, hoist.row(b)))


@_rule("rsub")
def _rsub(hoist: Any, node: Node, a: Any, b: Any, alpha: float = 1) -> Value:
    return _sub(hoist, node, b, a, alpha)


@_rule("mul")
def _mul(hoist: Any, node: Node, a: Any, b: Any) -> Value:
    return hoist.builder.mul(hoist.row(a), hoist.row(b))


@_rule("div")
def _div(hoist: Any, node: Node, a: Any, b: Any, rounding_mode: str | None = None) -> Value:
    if rounding_mode is not None:
        raise Refusal("aten.div with a rounding mode has no kernel.")
    return hoist.builder.div(hoist.row(a), hoist.row(b))


@_rule("pow")
def _pow(hoist: Any, node: Node, v: Any, exponent: Any) -> Value:
    if not isinstance(v, Value) or not isinstance(exponent, int | float):
        return hoist.builder.make("power", hoist.row(v), hoist.row(exponent))
    v = hoist.row(v)
    if exponent == 2:
        return hoist.builder.mul(v, v)
    named = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    if exponent in named:
        return hoist.builder.make(named[exponent], v)
    return hoist.builder.make("pow", v, index=float(exponent))


@_rule("lerp")
def _lerp(hoist: Any, node: Node, a: Any, b: Any, weight: Any) -> Value:
    a, b = hoist.row(a), hoist.row(b)
    return hoist.builder.add(a, hoist.builder.mul(hoist.row(weight), hoist.builder.sub(b, a)))


@_rule("addcmul")
def _addcmul(hoist: Any, node: Node, a: Any, b: Any, c: Any, value: float = 1) -> Value:
    product = hoist.builder.mul(hoist.row(b), hoist.row(c))
    return hoist.builder.add(hoist.row(a), hoist.builder.mul(value, product))


# ------------------------------------------------------------------ activations


@_rule("silu")
def _silu(hoist: Any, node: Node, v: Value) -> Value:
    return hoist.builder.mul(v, hoist.builder.make("sigmoid", v))


@_rule("gelu")
def _gelu(hoist: Any, node: Node, v: Value, approximate: str = "none") -> Value:
    b = hoist.builder
    if approximate == "tanh":
        inner = b.mul(math.sqrt(2 / math.pi), b.add(v, b.mul(0.044715, b.mul(v, b.mul(v, v)))))
        return b.mul(b.mul(0.5, v), b.add(1, b.make("tanh", inner)))
    return b.mul(b.mul(0.5, v), b.add(1, b.make("erf", b.mul(v, math.sqrt(0.5)))))


@_rule("clamp", "clamp_min", "clamp_max")
def _clamp(hoist: Any, node: Node, v: Value, *bounds: Any, **named: Any) -> Value:
    """As torch has it, the gradient passes at the bounds themselves."""
    b, v = hoist.builder, hoist.row(v)
    low, high = (None, *bounds) if node.op == "clamp_max" else (*bounds, None, None)[:2]
    low, high = named.get("min", low), named.get("max", high)
    if low is not None:
        v = b.where(b.make("lt", v, hoist.row(low)), hoist.row(low), v)
    if high is not None:
        v = b.where(b.make("gt", v, hoist.row(high)), hoist.row(high), v)
    return v


@_rule("hardtanh")
def _hardtanh(hoist: Any, node: Node, v: Value, low: float = -1.0, high: float = 1.0) -> Value:
    """As torch has it, the gradient is zero at the bounds themselves."""
    b = hoist.builder
    top = b.where(b.make("ge", v, b.number(high)), high, v)
    return b.where(b.make("le", v, b.number(low)), low, top)


@_rule("hardsigmoid")
def _hardsigmoid(hoist: Any, node: Node, v: Value) -> Value:
    if node.dtype == torch.float64:
        raise Refusal("aten.hardsigmoid has a kernel for float32; torch rounds its gradient to that in float64 too.")
    b = hoist.builder
    middle = b.add(b.mul(v, 1 / 6), 0.5)
    return b.where(b.make("le", v, b.number(-3)), 0, b.where(b.make("ge", v, b.number(3)), 1, middle))


@_rule("leaky_relu")
def _leaky_relu(hoist: Any, node: Node, v: Value, slope: float = 0.01) -> Value:
    b = hoist.builder
    return b.where(b.make("gt", v, b.number(0)), v, b.mul(v, slope))


@_rule("elu")
def _elu(hoist: Any, node: Node, v: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Value:
    b = hoist.builder
    above = b.make("gt", v, b.number(0))
    bounded = b.where(above, 0, b.mul(v, input_scale))  # exp must not overflow on the side that is not taken
    return b.where(above, b.mul(v, scale), b.mul(b.make("expm1", bounded), alpha * scale))


@_rule("softplus")
def _softplus(hoist: Any, node: Node, v: Value, beta: float = 1, threshold: float = 20) -> Value:
    b = hoist.builder
    scaled = b.mul(v, beta)
    bounded = b.where(b.make("gt", scaled, b.number(threshold)), threshold, scaled)  # exp must not overflow
    soft = b.mul(b.make("log1p", b.make("exp", bounded)), 1 / beta)
    return b.where(b.make("gt", scaled, b.number(threshold)), v, soft)


@_rule("mish")
def _mish(hoist: Any, node: Node, v: Value) -> Value:
    return hoist.builder.mul(v, hoist.builder.make("tanh", _softplus(hoist, node, v)))


# ------------------------------------------------------------------ products


MOST_TERMS = 1 << 18  # of all sums in a product of what changes with what changes
MOST_PRODUCTS = 16  # of rows of one sequence by a matrix, each compiled by itself


@_rule("mm", "bmm")
def _product(hoist: Any, node: Node, a: Any, b: Any) -> Value:
    return _multiply(hoist, node.args[0], node.args[1], a, b)


@_rule("addmm", "baddbmm")
def _plus_product(hoist: Any, node: Node, bias: Any, a: Any, b: Any, beta: float = 1, alpha: float = 1) -> Value:
    product = hoist.builder.mul(float(alpha), _multiply(hoist, node.args[1], node.args[2], a, b))
    bias = hoist.broadcast(node.args[0], bias, node.shape)
    return hoist.builder.add(hoist.builder.mul(beta, hoist.row(bias)), product)


@_rule("mv")
def _mv(hoist: Any, node: Node, a: Any, b: Any) -> Value:
    row = hoist.broadcast(node.args[1], b, node.args[0].shape)
    return hoist.builder.make("sum", hoist.builder.mul(a, hoist.row(row)), width=size_of(node.shape))


def _multiply(hoist: Any, a: Node, b: Node, left: Any, right: Any) -> Value:
    """Rows by matrices that are the same at every step; or both change, and every sequence multiplies its own."""
    if isinstance(left, Value) and isinstance(right, Value):
        return _each_with_its_own(hoist, a, b, left, right)
    fixed, v = (b, left) if isinstance(left, Value) else (a, right)
    moving = a if fixed is b else b
    *many, depth, columns = fixed.shape if fixed is b else (*fixed.shape[:-2], *fixed.shape[:-3:-1])
    times = next(size.times for size in moving.shape if isinstance(size, Batch))
    blocks = many[0] if many else 1
    if fixed is a and times > 1:  # columns of every sequence: made rows, and columns again
        v = _turned(hoist, v, (blocks, depth, times))
    if blocks * times > MOST_PRODUCTS and blocks * times * depth * columns <= MOST_TERMS:
        product = _sums_of_products(hoist, v, fixed, (blocks, times, columns, depth), fixed is a)
    else:
        parts: list[Value] = []
        for i in range(blocks):
            matrix = Matrix(fixed, (depth, columns), (i,) if many else (), fixed is a)
            starts = [(i * times + k) * depth for k in range(times)]
            parts += [hoist.matmul(hoist.builder.slice(v, start, depth), matrix) for start in starts]
        product = hoist.builder.cat(parts)
    return _turned(hoist, product, (blocks, times, columns)) if fixed is a and times > 1 else product


def _turned(hoist: Any, v: Value, sizes: tuple[int, int, int]) -> Value:
    """A row of such sizes with the last two exchanged."""
    return hoist.builder.take(v, tuple(torch.arange(v.width).view(sizes).mT.flatten().tolist()))


def _sums_of_products(hoist: Any, v: Value, fixed: Node, sizes: tuple[int, ...], transposed: bool) -> Value:
    """Many rows by one small matrix, where as many products would be long to compile."""
    blocks, times, columns, depth = sizes
    m, dtype = hoist.builder, hoist.dtype

    def repeated(matrix: torch.Tensor) -> torch.Tensor:
        matrix = matrix if transposed else matrix.mT  # [columns, depth]
        return matrix.reshape(blocks, 1, columns, depth).expand(sizes).reshape(-1).to(dtype).contiguous()

    width = math.prod(sizes)
    weights = hoist.constant(Recipe(repeated, (fixed,)), width, ("repeated", fixed, sizes, transposed))
    rows = torch.arange(v.width).view(blocks, times, 1, depth).expand(sizes)
    return m.make("sum", m.mul(m.take(v, tuple(rows.flatten().tolist())), weights), width=blocks * times * columns)


def _each_with_its_own(hoist: Any, a: Node, b: Node, left: Value, right: Value) -> Value:
    """[k, i, c] times [k, c, j]: all products, summed over c."""
    (k, i, c), j = sizes_of(a.shape), b.shape[2]
    if k * i * j * c > MOST_TERMS:
        raise Refusal(f"a product [{k}, {i}, {c}] @ [{k}, {c}, {j}] for every sequence is too large for a kernel.")
    m, terms = hoist.builder, (k, i, j, c)
    first = torch.arange(k * i * c).view(k, i, 1, c).expand(terms)
    second = torch.arange(k * c * j).view(k, 1, c, j).transpose(2, 3).expand(terms)
    product = m.mul(*(m.take(v, tuple(at.flatten().tolist())) for v, at in ((left, first), (right, second))))
    return product if c == 1 else m.make("sum", product, width=k * i * j)


# ------------------------------------------------------------------ along dimensions


@_rule("getitem")
def _getitem(hoist: Any, node: Node, parts: list[Any], i: int) -> Any:
    if i >= len(parts):
        raise Refusal(f"result {i} of aten.{node.args[0].op} has no kernel.")
    return parts[i]


def _fold(hoist: Any, op: str, v: Value, shape: tuple[Any, ...], dim: Any) -> Value:
    """A reduction over dimensions of a value of such a shape."""
    dims, places = _dims(shape, dim), _places(shape)
    kept = [d for d in range(len(shape)) if d not in dims]
    last = places.permute(*kept, *dims).flatten()
    width = places.numel() // math.prod(places.shape[d] for d in dims)
    return v if width == v.width else hoist.builder.make(op, hoist.builder.take(v, tuple(last.tolist())), width=width)


def _unfold(hoist: Any, v: Value, shape: tuple[Any, ...], dim: Any) -> Value:
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


def _mean_of(hoist: Any, v: Value, shape: tuple[Any, ...], dim: Any) -> Value:
    total = _fold(hoist, "sum", v, shape, dim)
    return hoist.builder.mul(total, total.width / v.width)


@_rule("sum", "amax", "amin")
def _reduce(hoist: Any, node: Node, v: Value, dim: Any = None, keepdim: bool = False, **options: Any) -> Value:
    return _fold(hoist, node.op, v, node.args[0].shape, dim)


@_rule("mean")
def _mean(hoist: Any, node: Node, v: Value, dim: Any = None, keepdim: bool = False, **options: Any) -> Value:
    return _mean_of(hoist, v, node.args[0].shape, dim)


@_rule("_softmax")
def _softmax(hoist: Any, node: Node, v: Value, dim: int, half_to_float: bool = False) -> Value:
    e = hoist.builder.make("exp", _centred(hoist, v, node.shape, dim))
    return hoist.builder.div(e, _unfold(hoist, _fold(hoist, "sum", e, node.shape, dim), node.shape, dim))


@_rule("_safe_softmax")
def _safe_softmax(hoist: Any, node: Node, v: Value, dim: int, dtype: Any = None) -> Value:
    """Where every place is -∞, as where a mask leaves none, all are 0."""
    b, shape = hoist.builder, node.shape
    greatest = b.make("detach", _fold(hoist, "amax", v, shape, dim))
    none = b.make("eq", greatest, b.number(-math.inf))
    e = b.make("exp", b.sub(v, _unfold(hoist, b.where(none, 0, greatest), shape, dim)))
    total = b.where(none, 1, _fold(hoist, "sum", e, shape, dim))
    return b.div(e, _unfold(hoist, total, shape, dim))


@_rule("_log_softmax")
def _log_softmax(hoist: Any, node: Node, v: Value, dim: int, half_to_float: bool = False) -> Value:
    b, centred = hoist.builder, _centred(hoist, v, node.shape, dim)
    log = b.make("log", _fold(hoist, "sum", b.make("exp", centred), node.shape, dim))
    return b.sub(centred, _unfold(hoist, log, node.shape, dim))


def _centred(hoist: Any, v: Value, shape: tuple[Any, ...], dim: Any) -> Value:
    """Less its greatest, so that exp does not overflow."""
    greatest = hoist.builder.make("detach", _fold(hoist, "amax", v, shape, dim))
    return hoist.builder.sub(v, _unfold(hoist, greatest, shape, dim))


@_rule("linalg_vector_norm")
def _norm(hoist: Any, node: Node, v: Value, ord: float = 2, dim: Any = None, *rest: Any, **options: Any) -> Value:
    if ord != 2:
        raise Refusal(f"aten.linalg_vector_norm of order {ord} has no kernel.")
    b = hoist.builder
    square = _fold(hoist, "sum", b.mul(v, v), node.args[0].shape, dim)
    none = b.make("eq", square, b.number(0))
    return b.where(none, 0, b.make("sqrt", b.where(none, 1, square)))  # as torch has it, no gradient at zero


@_rule("native_layer_norm")
def _layer_norm(hoist: Any, node: Node, v: Value, sizes: Any, weight: Any, bias: Any, eps: float) -> list[Value]:
    shape = node.args[0].shape
    affine = [None if a is None else hoist.row(hoist.broadcast(a, a, shape)) for a in (weight, bias)]
    return [_normed(hoist, v, shape, tuple(range(-len(sizes), 0)), affine, eps)]


@_rule("native_group_norm")
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
    centred = b.sub(v, _unfold(hoist, mean, shape, dims))
    variance = _mean_of(hoist, b.mul(centred, centred), shape, dims)
    y = b.mul(centred, _unfold(hoist, b.make("rsqrt", b.add(variance, eps)), shape, dims))
    y = y if weight is None else b.mul(y, weight)
    return y if bias is None else b.add(y, bias)


@_rule(
    "empty_like",
    "empty",
    "new_empty",
    "zeros_like",
    "zeros",
    "new_zeros",
    "ones_like",
    "ones",
    "new_ones",
    "full_like",
    "full",
    "new_full",
)
def _full(hoist: Any, node: Node, *arguments: Any, **options: Any) -> Value:
    if node.dtype is None or not node.dtype.is_floating_point:
        raise Refusal(f"a tensor of {node.dtype} has no kernel.")
    number = 1.0 if "ones" in node.op else 0.0
    if "full" in node.op:
        number = float(options.get("fill_value", arguments[-1]))
    return hoist.builder.expand(hoist.builder.number(number), size_of(node.shape))


# ------------------------------------------------------------------ others, number by number


@_rule("masked_fill")
def _masked_fill(hoist: Any, node: Node, v: Any, mask: Any, value: Any) -> Value:
    return hoist.builder.where(hoist.condition(mask), hoist.row(value), hoist.row(v))


@_rule("surrogate")
def _surrogate(hoist: Any, node: Node, *args: Any) -> Value:
    """With rows in place of plain numbers, which torch's operation would not take."""
    b, rows = hoist.builder, [hoist.row(a) for a in args]
    width = size_of(node.shape)
    return b.make("surrogate", *[b.make("expand", r, width=width) if r.op == "number" else r for r in rows])


@_rule("round")
def _round(hoist: Any, node: Node, v: Value, decimals: int = 0) -> Value:
    if decimals:
        raise Refusal("aten.round to decimals has no kernel.")
    return hoist.builder.make("round", v)


@_rule("remainder")
def _remainder(hoist: Any, node: Node, a: Any, c: Any) -> Value:
    """What is left has the sign of the divisor."""
    b, a, c = hoist.builder, hoist.row(a), hoist.row(c)
    rest, zero = b.make("fmod", a, c), b.number(0)
    other = b.make(
        "or", *[b.make("and", b.make("lt", p, zero), b.make("gt", q, zero)) for p, q in ((rest, c), (c, rest))]
    )
    return b.where(other, b.add(rest, c), rest)


@_rule("log_sigmoid_forward")
def _log_sigmoid(hoist: Any, node: Node, v: Value) -> list[Value]:
    b = hoist.builder
    below = b.make("lt", v, b.number(0))
    e = b.make("exp", b.where(below, v, b.make("neg", v)))  # of what is not above 0
    return [b.sub(b.where(below, v, 0), b.make("log1p", e))]


@_rule("logaddexp")
def _logaddexp(hoist: Any, node: Node, a: Any, c: Any) -> Value:
    b, a, c = hoist.builder, hoist.row(a), hoist.row(c)
    infinite = b.make("and", b.make("eq", a, c), b.make("eq", b.make("abs", a), b.number(math.inf)))
    d = b.where(infinite, 0, b.sub(a, c))
    below = b.make("lt", d, b.number(0))
    return b.add(b.where(below, c, a), b.make("log1p", b.make("exp", b.where(below, d, b.make("neg", d)))))


@_rule("celu")
def _celu(hoist: Any, node: Node, v: Value, alpha: float = 1) -> Value:
    if node.dtype == torch.float64:
        raise Refusal("aten.celu has a kernel for float32; torch rounds its gradient to that in float64 too.")
    return _elu(hoist, node, v, alpha, 1, 1 / alpha)


@_rule("frac")
def _frac(hoist: Any, node: Node, v: Value) -> Value:
    return hoist.builder.sub(v, hoist.builder.make("trunc", v))


@_rule("addcdiv")
def _addcdiv(hoist: Any, node: Node, a: Any, c: Any, d: Any, value: float = 1) -> Value:
    b = hoist.builder
    return b.add(hoist.row(a), b.mul(value, b.div(hoist.row(c), hoist.row(d))))


@_rule("logit")
def _logit(hoist: Any, node: Node, v: Value, eps: float | None = None) -> Value:
    b = hoist.builder
    if eps is not None:
        v = b.where(b.make("lt", v, b.number(eps)), eps, b.where(b.make("gt", v, b.number(1 - eps)), 1 - eps, v))
    return b.make("log", b.div(v, b.sub(1, v)))


@_rule("hypot")
def _hypot(hoist: Any, node: Node, a: Any, c: Any) -> Value:
    b, a, c = hoist.builder, hoist.row(a), hoist.row(c)
    return b.make("sqrt", b.add(b.mul(a, a), b.mul(c, c)))


@_rule("_prelu_kernel")
def _prelu(hoist: Any, node: Node, v: Value, slope: Any) -> Value:
    b = hoist.builder
    return b.where(b.make("gt", v, b.number(0)), v, b.mul(hoist.row(slope), v))


@_rule("hardswish")
def _hardswish(hoist: Any, node: Node, v: Value) -> Value:
    b = hoist.builder
    middle = b.mul(b.mul(v, b.add(v, 3)), 1 / 6)
    return b.where(b.make("le", v, b.number(-3)), 0, b.where(b.make("ge", v, b.number(3)), v, middle))


@_rule("threshold")
def _threshold(hoist: Any, node: Node, v: Value, bound: float, value: float) -> Value:
    return hoist.builder.where(hoist.builder.make("le", v, hoist.builder.number(bound)), value, v)


@_rule("hardshrink")
def _hardshrink(hoist: Any, node: Node, v: Value, bound: float = 0.5) -> Value:
    b = hoist.builder
    near = b.make("and", b.make("ge", v, b.number(-bound)), b.make("le", v, b.number(bound)))
    return b.where(near, 0, v)


@_rule("softshrink")
def _softshrink(hoist: Any, node: Node, v: Value, bound: float = 0.5) -> Value:
    b = hoist.builder
    low = b.where(b.make("lt", v, b.number(-bound)), b.add(v, bound), 0)
    return b.where(b.make("gt", v, b.number(bound)), b.sub(v, bound), low)


@_rule("heaviside")
def _heaviside(hoist: Any, node: Node, v: Any, at_zero: Any) -> Value:
    b, v = hoist.builder, hoist.row(v)
    step = b.where(b.make("gt", v, b.number(0)), 1, 0)
    return b.make("detach", b.where(b.make("eq", v, b.number(0)), hoist.row(at_zero), step))


@_rule("isnan")
def _isnan(hoist: Any, node: Node, v: Value) -> Value:
    return hoist.builder.make("ne", hoist.row(v), hoist.row(v))


@_rule("bitwise_xor", "logical_xor")
def _xor(hoist: Any, node: Node, a: Any, c: Any) -> Value:
    return hoist.builder.make("ne", *[hoist.row(hoist.condition(v)) for v in (a, c)])


@_rule("isinf")
def _isinf(hoist: Any, node: Node, v: Value) -> Value:
    return hoist.builder.make("eq", hoist.builder.make("abs", v), hoist.builder.number(math.inf))


@_rule("native_batch_norm", "_native_batch_norm_legit_no_training")
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


# ------------------------------------------------------------------ others, along dimensions


@_rule("logsumexp")
def _logsumexp(hoist: Any, node: Node, v: Value, dim: Any, keepdim: bool = False) -> Value:
    b, shape = hoist.builder, node.args[0].shape
    top = _fold(hoist, "amax", v, shape, dim)
    top = b.make("detach", b.where(b.make("eq", b.make("abs", top), b.number(math.inf)), 0, top))
    e = b.make("exp", b.sub(v, _unfold(hoist, top, shape, dim)))
    return b.add(b.make("log", _fold(hoist, "sum", e, shape, dim)), top)


@_rule("var", "std")
def _spread(
    hoist: Any, node: Node, v: Value, dim: Any = None, *rest: Any, correction: Any = 1, keepdim: bool = False
) -> Value:
    b, shape = hoist.builder, node.args[0].shape
    mean = _mean_of(hoist, v, shape, dim)
    count, correction = v.width // mean.width, 1 if correction is None else correction
    if rest or count <= correction:
        raise Refusal(f"aten.{node.op} of so few features has no kernel.")
    centred = b.sub(v, _unfold(hoist, mean, shape, dim))
    variance = b.mul(_fold(hoist, "sum", b.mul(centred, centred), shape, dim), 1 / (count - correction))
    if node.op == "var":
        return variance
    none = b.make("eq", variance, b.number(0))
    return b.where(none, 0, b.make("sqrt", b.where(none, 1, variance)))  # as torch has it, no gradient at zero


@_rule("cumsum")
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


@_rule("glu")
def _glu(hoist: Any, node: Node, v: Value, dim: int = -1) -> Value:
    places = _places(node.args[0].shape)
    a, gate = (hoist.builder.take(v, tuple(half.flatten().tolist())) for half in places.chunk(2, dim))
    return hoist.builder.mul(a, hoist.builder.make("sigmoid", gate))
