"""What torch's operations do with complex numbers, by real arithmetic."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._mode_utils import no_dispatch

from loopfold.stepgraph.aten import MOVING, op_name
from loopfold.stepgraph.complex_numbers import ComplexNumbers, Pair, is_complex
from loopfold.stepgraph.graph import Refusal
from loopfold.stepgraph.surrogate import SURROGATE

aten = torch.ops.aten

Rule = Callable[[ComplexNumbers, OpOverload, tuple[Any, ...], dict[str, Any]], Any]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Say what torch's operations of these names do with complex numbers: a Pair, several, or a tensor of real ones."""

    def known(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return known


# ------------------------------------------------------------------ from real ones, and to them


@rule("complex")
def _complex(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Pair:
    return Pair(*(c.take(aten.clone.default, part) for part in args))


@rule("polar")
def _polar(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Pair:
    """As torch has it, the gradient by a size is as if it were not below 0, and at 0 there is none."""
    size, angle = args
    same, sign = c.take(aten.detach.default, size), c.take(aten.sign.default, c.take(aten.detach.default, size))
    return c.turned(c.take(SURROGATE, same, size, sign), angle)


@rule("view_as_complex")
def _view_as_complex(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Pair:
    return Pair(*(c.take(aten.select.int, args[0], -1, i) for i in range(2)))


@rule("view_as_real")
def _view_as_real(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Tensor:
    pair = Pair(*c.tensors(args[0]))
    both = c.take(aten.stack.default, list(pair), -1)
    c.stacked[id(both)] = pair, both
    c.parts[id(both)] = both
    return both


@rule("select")
def _select(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Any:
    if id(args[0]) in c.stacked:  # z.real, z.imag
        part = c.take(aten.alias.default, c.stacked[id(args[0])][0][args[2] % 2])
        c.parts[id(part)] = part
        return part
    return _both(c, func, args, kwargs)


@rule("abs")
def _abs(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Tensor:
    return c.without(*c.size(args[0]))


@rule("angle")
def _angle(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Tensor:
    """0 and ±π at 0, by the signs of both zeros, and no gradient there."""
    (re, im), (_, zero) = c.tensors(args[0]), c.size(args[0])
    at_zero = c.take(aten.detach.default, c.take(aten.atan2.default, im, re))
    elsewhere = c.take(aten.atan2.default, im, c.take(aten.masked_fill.Scalar, re, zero, 1))
    return c.take(aten.where.self, zero, at_zero, elsewhere)


@rule("linalg_vector_norm")
def _norm(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Tensor:
    return c.take(func, c.without(*c.size(args[0])), *args[1:], **kwargs)


@rule("eq", "ne")
def _equal(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Tensor:
    def same(p: Tensor, q: Any) -> Tensor:
        return c.take(aten.eq.Tensor if isinstance(q, Tensor) else aten.eq.Scalar, p, 0 if q is None else q)

    both = c.take(aten.logical_and.default, *map(same, c.tensors(args[0]), c.pair(args[1])))
    return both if op_name(func) == "eq" else c.take(aten.logical_not.default, both)


@rule("_to_copy")
def _to_copy(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Any:
    pair, dtype = c.pair(args[0]), kwargs.get("dtype")
    if dtype is not None and not dtype.is_complex:
        return c.take(func, pair.re, **kwargs)
    real = kwargs if dtype is None else kwargs | {"dtype": dtype.to_real()}
    return Pair(*(None if part is None else c.take(func, part, **real) for part in pair))


@rule("scalar_tensor")
def _scalar(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Pair:
    return c.pair(args[0])


@rule("lift_fresh")
def _number(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Pair:
    if args[0].dim():
        return c.pair(args[0])
    with no_dispatch():
        return c.pair(args[0].item())


# ------------------------------------------------------------------ both parts alike


def _both(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Any:
    """What moves numbers, or adds them up, does so to both parts."""
    alone = sum(isinstance(a, Tensor) and a.is_complex() for a in args) == 1
    kwargs = {k: v.to_real() if isinstance(v, torch.dtype) else v for k, v in kwargs.items()}

    def parts(a: Any) -> Any:
        if isinstance(a, Tensor) and a.is_floating_point():  # a real one, put among complex ones
            return c.tensors(a)
        return (a, a) if not is_complex(a) else c.pair(a) if alone else c.tensors(a)

    found: list[Any] = [
        None if each[0] is None else c.take(func, *each, **kwargs) for each in zip(*map(parts, args), strict=True)
    ]
    re, im = found
    if isinstance(re, Tensor):
        return Pair(re, im)
    return [Pair(p, None if im is None else im[i]) for i, p in enumerate(re)]


_OWN = {"cat", "stack", "select", "constant_pad_nd"}  # rules of their own
_ALIKE = {*MOVING, "clone", "alias", "detach", "index", "index_select", "gather", "embedding"} - _OWN
RULES.update(dict.fromkeys((*_ALIKE, "neg", "sum", "mean", "cumsum"), _both))


@rule("cat", "stack")
def _beside(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Pair:
    parts = zip(*(c.tensors(a) for a in args[0]), strict=True)
    return Pair(*(c.take(func, list(part), *args[1:], **kwargs) for part in parts))


@rule("constant_pad_nd")
def _pad(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Pair:
    z, sizes, *value = args
    pairs = zip(c.tensors(z), c.pair(*value or [0]), strict=True)
    return Pair(*(c.take(func, part, sizes, 0 if number is None else number) for part, number in pairs))


@rule("where")
def _where(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Pair:
    condition, *either = args
    return Pair(*(c.take(func, condition, *parts) for parts in zip(*map(c.tensors, either), strict=True)))


@rule("masked_fill")
def _masked_fill(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Pair:
    z, mask, value = args
    if isinstance(value, Tensor):
        return _where(c, aten.where.self, (mask, value, z), {})
    pairs = zip(c.tensors(z), (value.real, value.imag), strict=True)
    return Pair(*(c.take(aten.masked_fill.Scalar, part, mask, number) for part, number in pairs))


def _new(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Any:
    """A tensor that is the same number everywhere."""
    op, dtype = op_name(func), kwargs.get("dtype")
    if dtype is not None and not dtype.is_complex:
        return c.take(func, c.tensors(args[0])[0], *args[1:], **kwargs)
    if "full" in op:
        return c.pair(args[2 if op == "new_full" else 1])
    return Pair(1.0 if "ones" in op else 0.0, None)


_KINDS = ("zeros", "ones", "full")
RULES.update(dict.fromkeys([name.format(kind) for kind in _KINDS for name in ("{}", "{}_like", "new_{}")], _new))


# ------------------------------------------------------------------ arithmetic


@rule("add", "sub", "rsub")
def _add(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Pair:
    a, b = map(c.pair, args[:2])
    alpha = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
    a, b = (b, a) if op_name(func) == "rsub" else (a, b)
    return c.sum(a, b, alpha if op_name(func) == "add" else -alpha)


@rule("mul")
def _mul(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Pair:
    return c.product(c.mul, *map(c.pair, args))


@rule("div")
def _div(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Pair:
    return c.quotient(*map(c.pair, args[:2]))


@rule("reciprocal")
def _reciprocal(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Pair:
    return c.quotient(Pair(1.0, None), c.pair(args[0]))


@rule("addcmul")
def _addcmul(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Pair:
    a, *factors = map(c.pair, args[:3])
    return c.sum(a, c.product(c.mul, *factors), kwargs.get("value", 1))


@rule("lerp")
def _lerp(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Pair:
    a, b, weight = map(c.pair, args)
    way = c.sum(b, a, -1)
    return c.sum(a, c.product(c.mul, weight, way))


@rule("pow")
def _pow(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Pair:
    z, exponent = args
    if not (isinstance(exponent, int | float) and abs(exponent) in range(1, 9) and isinstance(z, Tensor)):
        raise Refusal(
            "aten.pow of complex numbers has a kernel for exponents 1 to 8 and -1 to -8. "
            "Use torch.polar(r ** p, p * angle)."
        )
    power = first = c.pair(z)
    for _ in range(int(abs(exponent)) - 1):
        power = c.product(c.mul, power, first)
    return power if exponent > 0 else c.quotient(Pair(1.0, None), power)


@rule("_conj", "conj_physical", "_conj_physical")
def _conj(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Pair:
    z = c.pair(args[0])
    return Pair(z.re, c.neg(z.im))


@rule("exp")
def _exp(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Pair:
    re, im = c.tensors(args[0])
    return c.turned(c.take(aten.exp.default, re), im)


@rule("log")
def _log(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Pair:
    return Pair(c.take(aten.log.default, _abs(c, func, args, kwargs)), _angle(c, func, args, kwargs))


@rule("sgn")
def _sgn(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Pair:
    size, zero = c.size(args[0])
    return Pair(*(c.without(c.div(part, size), zero) for part in c.tensors(args[0])))


@rule("mm", "bmm", "mv", "dot")
def _matmul(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Pair:
    return c.product(_times(c, func), *map(c.pair, args))


@rule("vdot")
def _vdot(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Pair:
    a, b = map(c.pair, args)
    return c.product(_times(c, aten.dot.default), Pair(a.re, c.neg(a.im)), b)


@rule("addmm", "addmv", "baddbmm")
def _addmm(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Pair:
    times = {"addmm": aten.mm.default, "addmv": aten.mv.default, "baddbmm": aten.bmm.default}[op_name(func)]
    beta, alpha = c.pair(kwargs.get("beta", 1)), kwargs.get("alpha", 1)
    product = c.product(_times(c, times), *map(c.pair, args[1:3]))
    return c.sum(c.product(c.mul, c.pair(args[0]), beta), product, alpha)


@rule("_fft_c2c")
def _fft(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Pair:
    z, dims, scale, forwards = args
    return _fourier(c, z, dims, scale, z.shape[-1], -1 if forwards else 1)


@rule("_fft_r2c")
def _fft_of_real(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Pair:
    x, dims, scale, onesided = args
    return _fourier(c, x, dims, scale, x.shape[-1] // 2 + 1 if onesided else x.shape[-1], -1)


@rule("_fft_c2r")
def _fft_to_real(c: ComplexNumbers, func: OpOverload, args: Any, kwargs: Any) -> Tensor:
    """Of a half spectrum: the other half is its mirror image, which makes the sum real."""
    z, dims, scale, size = args
    twice = c.take(aten.arange.default, z.shape[-1], dtype=z.dtype.to_real(), device=z.device)
    ends = c.take(aten.eq.Scalar, c.take(aten.remainder.Scalar, twice, size / 2), 0)
    weights = c.take(aten.masked_fill.Scalar, c.take(aten.full_like.default, twice, 2.0), ends, 1.0)
    weighted = c.run(aten.mul.Tensor, (z, weights), {})
    return _fourier(c, weighted, dims, scale, size, 1, size).re


def _fourier(
    c: ComplexNumbers, z: Tensor, dims: list[int], scale: int, count: int, sign: int, period: int | None = None
) -> Pair:
    """Σ z(j) exp(± 2πi jk / n) for the first k, as a product with a matrix. `scale`: as it is, by √n, or by n."""
    if z.dim() > 2 or [d % z.dim() for d in dims] != [z.dim() - 1]:
        raise Refusal("a Fourier transform has a kernel for rows [batch, n], along n.")
    n = period or z.shape[-1]
    exact = {"dtype": torch.float64, "device": z.device}
    j, k = (c.take(aten.arange.default, size, **exact) for size in (z.shape[-1], count))
    turns = c.take(aten.mul.Tensor, c.take(aten.unsqueeze.default, j, 1), c.take(aten.unsqueeze.default, k, 0))
    angle = c.take(aten.mul.Tensor, c.take(aten.remainder.Scalar, turns, n), sign * 2 * math.pi / n)
    factor = (1.0, n**-0.5, 1 / n)[scale]
    both = [c.take(op, angle) for op in (aten.cos.default, aten.sin.default)]
    matrix = [c.take(aten._to_copy.default, c.mul(part, factor), dtype=z.dtype.to_real()) for part in both]
    if z.dim() == 2:
        return c.product(_times(c, aten.mm.default), c.pair(z), Pair(*matrix))
    turned = Pair(*(c.take(aten.t.default, part) for part in matrix))
    return c.product(_times(c, aten.mv.default), turned, c.pair(z))


def _times(c: ComplexNumbers, func: OpOverload) -> Callable[[Any, Any], Any]:
    return lambda a, b: None if a is None or b is None else c.take(func, a, b)
