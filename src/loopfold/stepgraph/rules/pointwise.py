"""Operations number by number."""

import math
from typing import Any

import torch

from loopfold.stepgraph.graph import Node, Refusal
from loopfold.stepgraph.loop import Value
from loopfold.stepgraph.moves import size_of
from loopfold.stepgraph.ops import raised
from loopfold.stepgraph.rules.choices import bounds_of
from loopfold.stepgraph.rules.registry import rule
from loopfold.surroundings import INDICES


@rule("add")
def _add(hoist: Any, node: Node, a: Any, b: Any, alpha: float = 1) -> Value:
    return hoist.builder.add(hoist.row(a), hoist.builder.mul(alpha, hoist.row(b)))


@rule("sub")
def _sub(hoist: Any, node: Node, a: Any, b: Any, alpha: float = 1) -> Value:
    return hoist.builder.sub(hoist.row(a), hoist.builder.mul(alpha, hoist.row(b)))


@rule("rsub")
def _rsub(hoist: Any, node: Node, a: Any, b: Any, alpha: float = 1) -> Value:
    return _sub(hoist, node, b, a, alpha)


@rule("mul")
def _mul(hoist: Any, node: Node, a: Any, b: Any) -> Value:
    return hoist.builder.mul(hoist.row(a), hoist.row(b))


@rule("div", "floor_divide")
def _div(hoist: Any, node: Node, a: Any, c: Any, rounding_mode: str | None = None) -> Value:
    b, a, c = hoist.builder, hoist.row(a), hoist.row(c)
    if rounding_mode is None and node.op == "div":
        return b.div(a, c)
    whole = b.make("trunc", b.div(a, c)) if rounding_mode == "trunc" else _floored(b, a, c)
    return _with_factors(b, whole, (a, b.number(0)), (c, b.number(0)))


def _floored(b: Any, a: Value, c: Value) -> Value:
    """As Python has it: less what is left over, a quotient cannot be rounded to the next whole number."""
    zero, quotient, rest = b.number(0), b.div(a, c), b.make("fmod", a, c)
    signs = b.make("lt", b.where(b.make("lt", c, zero), b.make("neg", rest), rest), zero)  # of another sign than c
    found = b.make("round", b.sub(b.div(b.sub(a, rest), c), b.where(signs, 1, 0)))
    found = b.where(b.make("eq", found, zero), b.mul(quotient, 0), found)  # -0.0 is not 0.0
    return b.where(b.make("eq", c, zero), quotient, found)


@rule("pow")
def _pow(hoist: Any, node: Node, v: Any, exponent: Any) -> Value:
    if not isinstance(v, Value) or not isinstance(exponent, int | float):
        return hoist.builder.make("power", hoist.row(v), hoist.row(exponent))
    return raised(hoist.builder, hoist.row(v), exponent)


@rule("lerp")
def _lerp(hoist: Any, node: Node, a: Any, b: Any, weight: Any) -> Value:
    """From the nearer end, as torch has it: where a is far larger than b, nothing of b is lost."""
    make, a, b, w = hoist.builder, hoist.row(a), hoist.row(b), hoist.row(weight)
    way = make.sub(b, a)
    from_a, from_b = make.add(a, make.mul(w, way)), make.sub(b, make.mul(way, make.sub(1, w)))
    if w.op == "number":
        return from_a if abs(w.index) < 0.5 else from_b
    return make.where(make.make("lt", make.make("abs", w), make.number(0.5)), from_a, from_b)


@rule("addcmul")
def _addcmul(hoist: Any, node: Node, a: Any, b: Any, c: Any, value: float = 1) -> Value:
    product = hoist.builder.mul(hoist.row(b), hoist.row(c))
    return hoist.builder.add(hoist.row(a), hoist.builder.mul(value, product))


@rule("silu")
def _silu(hoist: Any, node: Node, v: Value) -> Value:
    return hoist.builder.mul(v, hoist.builder.make("sigmoid", v))


@rule("gelu")
def _gelu(hoist: Any, node: Node, v: Value, approximate: str = "none") -> Value:
    b = hoist.builder
    if approximate == "tanh":
        inner = b.mul(math.sqrt(2 / math.pi), b.add(v, b.mul(0.044715, b.mul(v, b.mul(v, v)))))
        return b.mul(b.mul(0.5, v), b.add(1, b.make("tanh", inner)))
    return b.mul(b.mul(0.5, v), b.add(1, b.make("erf", b.mul(v, math.sqrt(0.5)))))


@rule("clamp", "clamp_min", "clamp_max")
def _clamp(hoist: Any, node: Node, v: Value, *bounds: Any, **named: Any) -> Value:
    """As torch has it, the gradient passes at the bounds themselves, and none where the result is no number."""
    b, v = hoist.builder, hoist.row(v)
    low, high = (None, *bounds) if node.op == "clamp_max" else (*bounds, None, None)[:2]
    low, high = (x if x is None else hoist.row(x) for x in (named.get("min", low), named.get("max", high)))
    if low is not None and high is not None and low.op != "number":  # of two that are equal, only the upper has one
        low = b.where(b.make("eq", low, high), b.make("detach", low), low)
    for bound, beyond in ((low, "lt"), (high, "gt")):
        if bound is not None:
            taken = b.make(beyond, v, bound)
            if bound.op != "number":  # a bound may be nan, and so is then what it bounds
                taken = b.make("or", taken, b.make("ne", bound, bound))
            v = b.where(taken, bound, v)
    found = b.where(b.make("eq", v, v), v, math.nan)
    hoist.bounds[found] = bounds_of(hoist, v)
    return found


@rule("hardtanh")
def _hardtanh(hoist: Any, node: Node, v: Value, low: float = -1.0, high: float = 1.0) -> Value:
    """As torch has it, the gradient is zero at the bounds themselves."""
    b = hoist.builder
    top = b.where(b.make("ge", v, b.number(high)), high, v)
    return b.where(b.make("le", v, b.number(low)), low, top)


@rule("hardsigmoid")
def _hardsigmoid(hoist: Any, node: Node, v: Value) -> Value:
    if node.dtype == torch.float64:
        raise Refusal("aten.hardsigmoid has a kernel for float32; torch rounds its gradient to that in float64 too.")
    b = hoist.builder
    middle = b.add(b.mul(v, 1 / 6), 0.5)
    return b.where(b.make("le", v, b.number(-3)), 0, b.where(b.make("ge", v, b.number(3)), 1, middle))


@rule("leaky_relu")
def _leaky_relu(hoist: Any, node: Node, v: Value, slope: float = 0.01) -> Value:
    b = hoist.builder
    return b.where(b.make("gt", v, b.number(0)), v, b.mul(v, slope))


@rule("elu")
def _elu(hoist: Any, node: Node, v: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Value:
    b = hoist.builder
    above = b.make("gt", v, b.number(0))
    bounded = b.where(above, 0, b.mul(v, input_scale))  # exp must not overflow on the side that is not taken
    return b.where(above, b.mul(v, scale), b.mul(b.make("expm1", bounded), alpha * scale))


@rule("softplus")
def _softplus(hoist: Any, node: Node, v: Value, beta: float = 1, threshold: float = 20) -> Value:
    b = hoist.builder
    scaled = b.mul(v, beta)
    bounded = b.where(b.make("gt", scaled, b.number(threshold)), threshold, scaled)  # exp must not overflow
    soft = b.mul(b.make("log1p", b.make("exp", bounded)), 1 / beta)
    return b.where(b.make("gt", scaled, b.number(threshold)), v, soft)


@rule("mish")
def _mish(hoist: Any, node: Node, v: Value) -> Value:
    return hoist.builder.mul(v, hoist.builder.make("tanh", _softplus(hoist, node, v)))


@rule("masked_fill")
def _masked_fill(hoist: Any, node: Node, v: Any, mask: Any, value: Any) -> Value:
    return hoist.builder.where(hoist.condition(mask), hoist.row(value), hoist.row(v))


@rule("surrogate")
def _surrogate(hoist: Any, node: Node, *args: Any) -> Value:
    """With rows in place of plain numbers, which torch's operation would not take."""
    b, rows = hoist.builder, [hoist.row(a) for a in args]
    width = size_of(node.shape)
    return b.make("surrogate", *[b.make("expand", r, width=width) if r.op == "number" else r for r in rows])


@rule("round")
def _round(hoist: Any, node: Node, v: Value, decimals: int = 0) -> Value:
    b, unit = hoist.builder, 10.0 ** abs(decimals)
    if decimals < 0:
        return b.mul(b.make("round", b.div(v, unit)), unit)
    return b.div(b.make("round", b.mul(v, unit)), unit) if decimals else b.make("round", v)


@rule("remainder")
def _remainder(hoist: Any, node: Node, a: Any, c: Any) -> Value:
    """What is left has the sign of the divisor."""
    b, a, c = hoist.builder, hoist.row(a), hoist.row(c)
    fixed, zero = b.make("detach", c), b.number(0)
    rest = b.make("fmod", a, fixed)
    other = b.make(
        "or", *[b.make("and", b.make("lt", p, zero), b.make("gt", q, zero)) for p, q in ((rest, c), (c, rest))]
    )
    found = b.where(other, b.add(rest, fixed), rest)
    if c.op != "number":
        return b.make("surrogate", found, c, b.make("neg", _floored(b, a, c)))
    if c.index > 0 and float(c.index).is_integer():
        hoist.bounds[found] = (0, c.index - 1 if node.dtype in INDICES else c.index)
    return found


@rule("log_sigmoid_forward")
def _log_sigmoid(hoist: Any, node: Node, v: Value) -> list[Value]:
    b = hoist.builder
    below = b.make("lt", v, b.number(0))
    e = b.make("exp", b.where(below, v, b.make("neg", v)))  # of what is not above 0
    return [b.sub(b.where(below, v, 0), b.make("log1p", e))]


@rule("logaddexp")
def _logaddexp(hoist: Any, node: Node, a: Any, c: Any) -> Value:
    b, a, c = hoist.builder, hoist.row(a), hoist.row(c)
    infinite = b.make("and", b.make("eq", a, c), b.make("eq", b.make("abs", a), b.number(math.inf)))
    d = b.where(infinite, 0, b.sub(a, c))
    below = b.make("lt", d, b.number(0))
    y = b.add(b.where(below, c, a), b.make("log1p", b.make("exp", b.where(below, d, b.make("neg", d)))))
    return _with_factors(b, y, (a, b.make("sigmoid", b.sub(a, c))), (c, b.make("sigmoid", b.sub(c, a))))


def _with_factors(b: Any, y: Value, *factors: tuple[Value, Value]) -> Value:
    """The value y, and the gradient that torch gives it at the edges too: to each a so many times what comes."""
    found = b.make("detach", y)
    for a, w in factors:
        if a.op != "number":
            to = b.make("sign", a) if w.op == "number" else a  # a factor of 0 is one for inf too, as a sign's gradient
            found = b.make("surrogate", found, to, b.expand(w, y.width))
    return found


@rule("celu")
def _celu(hoist: Any, node: Node, v: Value, alpha: float = 1) -> Value:
    if node.dtype == torch.float64:
        raise Refusal("aten.celu has a kernel for float32; torch rounds its gradient to that in float64 too.")
    return _elu(hoist, node, v, alpha, 1, 1 / alpha)


@rule("frac")
def _frac(hoist: Any, node: Node, v: Value) -> Value:
    return hoist.builder.sub(v, hoist.builder.make("trunc", v))


@rule("addcdiv")
def _addcdiv(hoist: Any, node: Node, a: Any, c: Any, d: Any, value: float = 1) -> Value:
    b = hoist.builder
    return b.add(hoist.row(a), b.mul(value, b.div(hoist.row(c), hoist.row(d))))


@rule("logit")
def _logit(hoist: Any, node: Node, v: Value, eps: float | None = None) -> Value:
    b = hoist.builder
    if eps is not None:
        v = b.where(b.make("lt", v, b.number(eps)), eps, b.where(b.make("gt", v, b.number(1 - eps)), 1 - eps, v))
    rest = b.sub(1, v)
    outside = b.make("lt", b.make("minimum", v, rest), b.number(0))
    slope = b.where(outside, math.nan, b.make("reciprocal", b.mul(v, rest)))
    return _with_factors(b, b.make("log", b.div(v, rest)), (v, slope))


@rule("hypot")
def _hypot(hoist: Any, node: Node, a: Any, c: Any) -> Value:
    """Of parts of the larger one, whose squares are of a size that numbers have; beside inf, whatever the other is."""
    b, a, c = hoist.builder, hoist.row(a), hoist.row(c)
    sizes = [b.make("abs", v) for v in (a, c)]
    infinite = b.make("or", *[b.make("eq", size, b.number(math.inf)) for size in sizes])
    largest = b.make("maximum", *sizes)
    largest = b.where(b.make("eq", largest, b.number(0)), 1, largest)
    one, other = (b.div(size, largest) for size in sizes)
    y = b.mul(largest, b.make("sqrt", b.add(b.mul(one, one), b.mul(other, other))))
    y = b.where(infinite, math.inf, y)
    return _with_factors(b, y, (a, b.div(a, y)), (c, b.div(c, y)))


@rule("_prelu_kernel")
def _prelu(hoist: Any, node: Node, v: Value, slope: Any) -> Value:
    b = hoist.builder
    return b.where(b.make("gt", v, b.number(0)), v, b.mul(hoist.row(slope), v))


@rule("hardswish")
def _hardswish(hoist: Any, node: Node, v: Value) -> Value:
    """As torch has it, v times a gate: below -3 that is 0, which times -inf is no number."""
    b = hoist.builder
    low, high = b.make("le", v, b.number(-3)), b.make("ge", v, b.number(3))
    within = b.where(b.make("or", low, high), 0, v)  # the 0 that comes back from the side not taken must not meet inf
    middle = b.mul(b.mul(within, b.add(within, 3)), 1 / 6)
    return b.where(low, b.mul(b.make("detach", v), 0), b.where(high, v, middle))


@rule("threshold")
def _threshold(hoist: Any, node: Node, v: Value, bound: float, value: float) -> Value:
    return hoist.builder.where(hoist.builder.make("le", v, hoist.builder.number(bound)), value, v)


@rule("hardshrink")
def _hardshrink(hoist: Any, node: Node, v: Value, bound: float = 0.5) -> Value:
    b = hoist.builder
    near = b.make("and", b.make("ge", v, b.number(-bound)), b.make("le", v, b.number(bound)))
    return b.where(near, 0, v)


@rule("softshrink")
def _softshrink(hoist: Any, node: Node, v: Value, bound: float = 0.5) -> Value:
    b = hoist.builder
    near = b.make("and", b.make("ge", v, b.number(-bound)), b.make("le", v, b.number(bound)))
    return b.where(near, 0, b.where(b.make("gt", v, b.number(0)), b.sub(v, bound), b.add(v, bound)))  # nan is nan


@rule("heaviside")
def _heaviside(hoist: Any, node: Node, v: Any, at_zero: Any) -> Value:
    b, v = hoist.builder, hoist.row(v)
    step = b.where(b.make("gt", v, b.number(0)), 1, 0)
    return b.make("detach", b.where(b.make("eq", v, b.number(0)), hoist.row(at_zero), step))


@rule("isnan")
def _isnan(hoist: Any, node: Node, v: Value) -> Value:
    return hoist.builder.make("ne", hoist.row(v), hoist.row(v))


@rule("bitwise_xor", "logical_xor")
def _xor(hoist: Any, node: Node, a: Any, c: Any) -> Value:
    return hoist.builder.make("ne", *[hoist.row(hoist.condition(v)) for v in (a, c)])


@rule("isinf")
def _isinf(hoist: Any, node: Node, v: Value) -> Value:
    return hoist.builder.make("eq", hoist.builder.make("abs", v), hoist.builder.number(math.inf))


@rule("isposinf", "isneginf")
def _isinf_of(hoist: Any, node: Node, v: Value) -> Value:
    return hoist.builder.make("eq", v, hoist.builder.number(math.inf if node.op == "isposinf" else -math.inf))


@rule("signbit")
def _signbit(hoist: Any, node: Node, v: Value) -> Value:
    return _is_negative(hoist.builder, v)


def _is_negative(b: Any, v: Value) -> Value:
    """Of -0.0 too."""
    zero = b.number(0)
    below_zero = b.make("and", b.make("eq", v, zero), b.make("lt", b.make("reciprocal", v), zero))
    return b.make("or", b.make("lt", v, zero), below_zero)


@rule("copysign")
def _copysign(hoist: Any, node: Node, a: Any, c: Any) -> Value:
    b, a, c = hoist.builder, hoist.row(a), hoist.row(c)
    size = b.make("abs", a)
    y = b.where(_is_negative(b, c), b.make("neg", size), size)
    return _with_factors(b, y, (a, b.where(b.make("eq", a, b.number(0)), 0, b.div(y, a))), (c, b.number(0)))


@rule("fmax", "fmin")
def _number_of_two(hoist: Any, node: Node, a: Any, c: Any) -> Value:
    """The larger, or the smaller, of what is a number."""
    b, a, c = hoist.builder, hoist.row(a), hoist.row(c)
    first = b.make("or", b.make("ge" if node.op == "fmax" else "le", a, c), b.make("ne", c, c))
    return b.where(first, a, c)


@rule("nan_to_num")
def _nan_to_num(
    hoist: Any, node: Node, v: Value, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Value:
    assert node.dtype is not None
    b, largest = hoist.builder, torch.finfo(node.dtype).max
    found = b.where(b.make("eq", v, v), v, 0 if nan is None else nan)
    for infinite, given, by_default in ((math.inf, posinf, largest), (-math.inf, neginf, -largest)):
        found = b.where(b.make("eq", v, b.number(infinite)), by_default if given is None else given, found)
    return found


@rule("xlogy", "special_xlog1py")
def _xlogy(hoist: Any, node: Node, a: Any, c: Any) -> Value:
    """0 where a is, even beside log 0."""
    b, a, c = hoist.builder, hoist.row(a), hoist.row(c)
    log, start = ("log", 0) if node.op == "xlogy" else ("log1p", -1)
    zero, of_c = b.make("eq", a, b.number(0)), b.make(log, c)
    y = b.where(b.make("and", zero, b.make("eq", c, c)), 0, b.mul(a, of_c))
    slope = b.where(b.make("and", zero, b.make("le", c, b.number(start))), 0, of_c)
    found = _with_factors(b, y, (c, b.div(a, b.sub(c, start) if start else c)))
    return found if a.op == "number" else b.make("surrogate", found, a, b.expand(slope, y.width), index=True)


@rule("special_entr")
def _entropy(hoist: Any, node: Node, v: Value) -> Value:
    b, log = hoist.builder, hoist.builder.make("log", v)
    y = b.where(b.make("eq", v, b.number(0)), 0, b.make("neg", b.mul(v, log)))
    y = b.where(b.make("lt", v, b.number(0)), -math.inf, y)
    return _with_factors(b, y, (v, b.make("neg", b.add(log, 1))))


@rule("sinc")
def _sinc(hoist: Any, node: Node, v: Value) -> Value:
    b, angle = hoist.builder, hoist.builder.mul(v, math.pi)
    sine, square, zero = b.make("sin", angle), b.mul(b.mul(v, v), math.pi), b.number(0)
    slope = b.div(b.sub(b.mul(angle, b.make("cos", angle)), sine), square)
    slope = b.where(b.make("eq", square, zero), 0, slope)
    return _with_factors(b, b.where(b.make("eq", v, zero), 1, b.div(sine, angle)), (v, slope))


@rule("deg2rad", "rad2deg")
def _degrees(hoist: Any, node: Node, v: Value) -> Value:
    return hoist.builder.mul(v, math.pi / 180 if node.op == "deg2rad" else 180 / math.pi)
