"""torch's operations in the language of the loop: one short rule each."""

import math
from collections.abc import Callable
from typing import Any

import torch

from loopfold.stepgraph.graph import Node, Refusal
from loopfold.stepgraph.loop import Value
from loopfold.stepgraph.ops import OPS, Op

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


@_rule("unsqueeze", "squeeze", "view", "_unsafe_view", "reshape", "expand")
def _reshape(hoist: Any, node: Node, v: Value, *sizes: Any, **options: Any) -> Value:
    """Rows stay rows: only [batch], [batch, 1] and [batch, n] turn into one another."""
    width = node.shape[1] if len(node.shape) == 2 else 1
    if len(node.shape) > 2 or (v.width != width and v.width != 1):
        raise Refusal(f"aten.{node.op} to shape {node.shape} has no kernel.")
    return hoist.builder.expand(v, width)


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
        raise Refusal("aten.pow has a kernel for a fixed exponent only.")
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
    b = hoist.builder
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


@_rule("mm")
def _mm(hoist: Any, node: Node, v: Any, matrix: Any) -> Value:
    if not isinstance(v, Value) or not isinstance(matrix, Node):
        raise Refusal("a kernel multiplies rows [batch, k] by a matrix that is the same at every step.")
    return hoist.matmul(v, matrix)


@_rule("addmm")
def _addmm(hoist: Any, node: Node, bias: Any, v: Any, matrix: Any, beta: float = 1, alpha: float = 1) -> Value:
    product = hoist.builder.mul(float(alpha), _mm(hoist, node, v, matrix))
    return hoist.builder.add(hoist.builder.mul(beta, hoist.row(bias)), product)


# ------------------------------------------------------------------ along the features


@_rule("split", "split_with_sizes")
def _split(hoist: Any, node: Node, v: Value, sizes: Any, dim: int = 0) -> list[Value]:
    if isinstance(sizes, int):
        sizes = [min(sizes, v.width - start) for start in range(0, v.width, sizes)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [hoist.builder.slice(v, start, size) for start, size in zip(starts, sizes, strict=True)]


@_rule("getitem")
def _getitem(hoist: Any, node: Node, parts: list[Any], i: int) -> Any:
    if i >= len(parts):
        raise Refusal(f"result {i} of aten.{node.args[0].op} has no kernel.")
    return parts[i]


@_rule("slice")
def _slice(hoist: Any, node: Node, v: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Value:
    if step != 1:
        raise Refusal("aten.slice with a step has no kernel.")
    start = 0 if start is None else start
    return hoist.builder.slice(v, max(0, start + v.width) if start < 0 else start, node.shape[1])


@_rule("cat")
def _cat(hoist: Any, node: Node, parts: tuple[Any, ...], dim: int = 0) -> Value:
    return hoist.builder.cat([hoist.row(p) for p in parts])


def _features(node: Node, dim: Any) -> None:
    dims = dim if isinstance(dim, tuple) else (dim,)
    if len(node.args[0].shape) != 2 or dims not in ((1,), (-1,)):
        raise Refusal(f"aten.{node.op} over {dim} has no kernel; over the features it has.")


@_rule("sum", "amax", "amin")
def _reduce(hoist: Any, node: Node, v: Value, dim: Any = None, keepdim: bool = False, **options: Any) -> Value:
    _features(node, dim)
    return hoist.builder.make(node.op, v, width=1)


@_rule("mean")
def _mean(hoist: Any, node: Node, v: Value, dim: Any = None, keepdim: bool = False, **options: Any) -> Value:
    _features(node, dim)
    return hoist.builder.mul(hoist.builder.make("sum", v, width=1), 1 / v.width)


@_rule("_softmax")
def _softmax(hoist: Any, node: Node, v: Value, dim: int, half_to_float: bool = False) -> Value:
    _features(node, dim)
    b = hoist.builder
    e = b.make("exp", b.sub(v, b.make("detach", b.make("amax", v, width=1))))
    return b.div(e, b.make("sum", e, width=1))


@_rule("_log_softmax")
def _log_softmax(hoist: Any, node: Node, v: Value, dim: int, half_to_float: bool = False) -> Value:
    _features(node, dim)
    b = hoist.builder
    centred = b.sub(v, b.make("detach", b.make("amax", v, width=1)))
    return b.sub(centred, b.make("log", b.make("sum", b.make("exp", centred), width=1)))


@_rule("linalg_vector_norm")
def _norm(hoist: Any, node: Node, v: Value, ord: float = 2, dim: Any = None, *rest: Any, **options: Any) -> Value:
    _features(node, dim)
    if ord != 2:
        raise Refusal(f"aten.linalg_vector_norm of order {ord} has no kernel.")
    b = hoist.builder
    square = b.make("sum", b.mul(v, v), width=1)
    none = b.make("eq", square, b.number(0))
    return b.where(none, 0, b.make("sqrt", b.where(none, 1, square)))  # as torch has it, no gradient at zero


@_rule("native_layer_norm")
def _layer_norm(hoist: Any, node: Node, v: Value, shape: Any, weight: Any, bias: Any, eps: float) -> list[Value]:
    if shape != (v.width,) or v.width == 1:
        raise Refusal(f"layer norm over {shape} has no kernel; over the features it has.")
    b = hoist.builder
    mean = b.mul(b.make("sum", v, width=1), 1 / v.width)
    centred = b.sub(v, mean)
    variance = b.mul(b.make("sum", b.mul(centred, centred), width=1), 1 / v.width)
    y = b.mul(centred, b.make("rsqrt", b.add(variance, eps)))
    if weight is not None:
        y = b.mul(y, hoist.row(weight))
    return [y if bias is None else b.add(y, hoist.row(bias))]


@_rule("zeros_like", "zeros", "new_zeros", "ones_like", "ones", "new_ones", "full_like", "full", "new_full")
def _full(hoist: Any, node: Node, *arguments: Any, **options: Any) -> Value:
    if node.dtype is None or not node.dtype.is_floating_point:
        raise Refusal(f"a tensor of {node.dtype} has no kernel.")
    number = 0.0 if "zeros" in node.op else 1.0
    if "full" in node.op:
        number = float(options.get("fill_value", arguments[-1]))
    return hoist.builder.expand(hoist.builder.number(number), node.shape[1] if len(node.shape) > 1 else 1)
