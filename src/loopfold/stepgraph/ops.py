"""The operations of the loop language, one entry each: all that is known of an operation stands here.

A value is one row per sequence, some features long. To add an operation, add an entry here and its line of LLVM in
`engines/vectors.py`; tests walk the table, and torch's operation of the same name is compiled from then on. What
`exporting/javascript.py` and `exporting/onnx.py` say otherwise has a line there.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from loopfold.stepgraph import surrogate as _surrogate  # noqa: F401  it makes the operation known to torch

Builder = Any  # of `loop`, which reads this table; and so
Value = Any
Gradient = Callable[..., tuple[Value | None, ...]]  # (builder, y, ∇y, *arguments) -> ∇ of each argument


class Kind(Enum):
    """What an operation reads, which decides when a kernel computes it."""

    LEAF = "given to the step"
    POINTWISE = "feature by feature; a width of 1 goes with any other"
    REDUCTION = "a whole row: so many equal parts of it side by side, each down to one number"
    PRODUCT = "a whole row, times a matrix; or which rows of a matrix"
    LAYOUT = "numbers put elsewhere; nothing is computed"


class Again(Enum):
    """What the reverse step does about a value of the forward step that it reads."""

    CHEAP = "computes it again, from arguments that are kept or cheap themselves"
    ONE_STEP = "computes it again where every argument is kept"
    KEPT = "has it kept at every step"


@dataclass(frozen=True, eq=False)
class Op:
    """One operation.

    `arity`       how many arguments it has; None: any number, at least one
    `python`      what it means, with torch: `{0}`, `{1}`, … are the arguments, `{index}` and `{width}` the value's own,
                  `{lead}` the sizes before the features. What begins with `torch.` is a function that takes `out=`
    `c`           the same in a language like C, for one feature of one row; by default `python` without `torch.`. Of a
                  reduction: how two numbers are joined
    `start`       of a reduction: what joined with any number gives that number
    `gradient`    None where there is none, or where it takes more than values (`differentiate` has those)
    `again`       cheap to compute again on the way back, or not
    `truth`       it gives truth values
    `conditions`  so many of its first arguments are truth values; the others are numbers
    `exact`       its gradient compares its argument with it, so neither is computed again
    `aten`        torch's names for it; by default its own
    """

    name: str
    kind: Kind
    arity: int | None
    python: str = ""
    c: str = ""
    gradient: Gradient | None = None
    again: Again = Again.KEPT
    truth: bool = False
    conditions: int = 0
    exact: bool = False
    start: float | None = None
    aten: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind is Kind.POINTWISE:
            object.__setattr__(self, "c", self.c or self.python.removeprefix("torch."))
            object.__setattr__(self, "aten", self.aten or (self.name,))

    def apply(self, *args: Any, width: int = 1, index: Any = None) -> torch.Tensor:
        """The operation on tensors, by torch: slow and obvious.

        >>> OPS["tanh"].apply(torch.zeros(2, 3))
        tensor([[0., 0., 0.],
                [0., 0., 0.]])
        """
        names = [f"a{i}" for i in range(len(args))]
        source = self.python.format(*names, index="index", width="width", lead="a0.shape[:-1]")
        known = dict(zip(names, args, strict=True), torch=torch, take=take, index=index, width=width)
        return eval(source, known)


def take(row: torch.Tensor, positions: tuple[int, ...]) -> torch.Tensor:
    """The numbers of a row that stand at `positions`; at -1 stands a zero."""
    return torch.nn.functional.pad(row, (0, 1))[..., list(positions)]


# ------------------------------------------------------------------ gradients of more than a line


def _given(b: Builder, y: Value, g: Value, w: Value) -> Value:
    return b.where(b.make("eq", g, b.number(0)), 0, b.mul(g, w)) if y.index else b.mul(g, w)


def _quotient(b: Builder, y: Value, g: Value, a: Value, c: Value) -> tuple[Value, Value]:
    return b.div(g, c), b.make("neg", b.mul(g, b.div(y, c)))


def _either(b: Builder, y: Value, g: Value, c: Value, p: Value, q: Value) -> tuple[None, Value, Value]:
    return None, b.where(c, g, 0), b.where(c, 0, g)


def _greater(b: Builder, y: Value, g: Value, a: Value, c: Value) -> tuple[Value, Value]:
    return _share(b, g, "lt", a, c), _share(b, g, "lt", c, a)


def _lesser(b: Builder, y: Value, g: Value, a: Value, c: Value) -> tuple[Value, Value]:
    return _share(b, g, "gt", a, c), _share(b, g, "gt", c, a)


def _share(b: Builder, g: Value, worse: str, a: Value, other: Value) -> Value:
    """All of g where `a` is the one chosen, ½ where both are, else 0; as torch has it, all beside what is no number."""
    return b.where(b.make(worse, a, other), 0, b.where(b.make("eq", a, other), b.mul(g, 0.5), g))


def _put(b: Builder, y: Value, g: Value, a: Value) -> tuple[Value]:
    return (b.put(g, y.index, a.width),)


def _chosen(b: Builder, y: Value, g: Value, a: Value) -> tuple[Value]:
    """Greatest or least: every place that attains it gets the same share."""
    hit = b.where(b.make("eq", a, b.spread(y, a.width)), 1, 0)
    return (b.mul(hit, b.spread(b.div(g, b.make("sum", hit, width=y.width)), a.width)),)


def _others(b: Builder, y: Value, g: Value, a: Value) -> tuple[Value]:
    """The product of the other numbers: y / a, and at the only zero, of all that are not."""
    zero = b.make("eq", a, b.number(0))
    zeros = b.make("sum", b.where(zero, 1, 0), width=y.width)
    rest = b.where(b.make("eq", zeros, b.number(1)), b.make("prod", b.where(zero, 1, a), width=y.width), 0)
    whole = b.where(b.make("eq", zeros, b.number(0)), y, 0)
    share = b.where(zero, b.spread(rest, a.width), b.div(b.spread(whole, a.width), a))
    return (b.mul(b.spread(g, a.width), share),)


def _nearest(digits: int, least: int, beyond: float) -> str:
    """In C: a number with so many binary digits after the first; `least`: its exponent, or more; `beyond`: infinity."""
    unit = f"((int)fmax(ilogb({{0}}), {least}) - {digits})"
    rounded = f"ldexp(rint(ldexp({{0}}, -{unit})), {unit})"
    return f"{{0}} == 0 || {{0}} - {{0}} != 0 ? {{0}} : fabs({{0}}) >= {beyond!r} ? {{0}} * HUGE_VAL : {rounded}"


def _above_zero(b: Builder, y: Value, g: Value, a: Value) -> Value:
    return b.where(b.make("le", y, b.number(0)), 0, g)


def _power(b: Builder, y: Value, g: Value, a: Value) -> Value:
    return b.mul(g, b.mul(y.index, raised(b, a, y.index - 1))) if y.index else b.number(0)


def raised(b: Builder, a: Value, exponent: float) -> Value:
    """`a ** exponent`, by what torch has for some exponents."""
    if exponent == 2:
        return b.mul(a, a)
    named = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    return b.make(named[exponent], a) if exponent in named else b.make("pow", a, index=float(exponent))


def _bell(b: Builder, y: Value, g: Value, a: Value) -> Value:
    return b.mul(b.mul(g, 2 / math.sqrt(math.pi)), b.make("exp", b.make("neg", b.mul(a, a))))


def _modulo(b: Builder, y: Value, g: Value, a: Value, c: Value) -> tuple[Value, Value]:
    return g, b.make("neg", b.mul(g, b.make("trunc", b.div(a, c))))


def _angle(b: Builder, y: Value, g: Value, a: Value, c: Value) -> tuple[Value, Value]:
    square = b.add(b.mul(a, a), b.mul(c, c))
    one = b.make("reciprocal", square)
    one = b.where(b.make("eq", square, b.number(0)), 0, one)  # as torch has it, none at the origin
    return b.mul(b.mul(g, c), one), b.make("neg", b.mul(b.mul(g, a), one))


def _any_power(b: Builder, y: Value, g: Value, a: Value, c: Value) -> tuple[Value, Value]:
    zero = b.number(0)
    base = b.mul(g, b.mul(c, b.make("power", a, b.sub(c, 1))))
    none = b.make("and", b.make("eq", a, zero), b.make("ge", c, zero))
    return b.where(b.make("eq", c, zero), 0, base), b.where(none, 0, b.mul(g, b.mul(y, b.make("log", a))))


# ------------------------------------------------------------------ the table


def _leaf(name: str) -> Op:
    return Op(name, Kind.LEAF, 0)


def _function(
    name: str, gradient: Callable[..., Any], again: Again, c: str = "", python: str = "", aten: tuple[str, ...] = ()
) -> Op:
    """Of one argument: `gradient(b, y, g, a)` is ∇a, where y = f(a) and g = ∇y."""
    python = python or f"torch.{name}({{0}})"
    return Op(name, Kind.POINTWISE, 1, python, c, lambda *args: (gradient(*args),), again, aten=aten)


def _several(name: str, arity: int, python: str, gradient: Gradient, again: Again, c: str = "", **rest: Any) -> Op:
    """Of several arguments: a gradient for each."""
    return Op(name, Kind.POINTWISE, arity, python, c, gradient, again, **rest)


def _comparison(name: str, sign: str) -> Op:
    return Op(name, Kind.POINTWISE, 2, f"{{0}} {sign} {{1}}", again=Again.CHEAP, truth=True)


def _logical(name: str, arity: int, python: str, c: str) -> Op:
    aten = (f"logical_{name}", f"bitwise_{name}")
    return Op(name, Kind.POINTWISE, arity, python, c, again=Again.CHEAP, truth=True, conditions=arity, aten=aten)


def _reduction(name: str, gradient: Gradient, join: str, start: float, exact: bool = False) -> Op:
    python = f"torch.{name}({{0}}.unflatten(-1, ({{width}}, -1)), -1)"
    return Op(name, Kind.REDUCTION, 1, python, join, gradient, exact=exact, start=start)


_CHEAP, _ONE_STEP, _KEPT = Again
_GREATER, _LESS = "{0} > {1} || {0} != {0} ? {0} : {1}", "{0} < {1} || {0} != {0} ? {0} : {1}"  # NaN wins
_TABLE = (
    # what a step is given
    _leaf("number"),  # the index itself
    _leaf("constant"),  # row `index` of what is computed once
    _leaf("input"),  # sequence `index`, computed before the loop
    _leaf("context"),  # row `index` of what is computed once for each sequence
    _leaf("state"),  # leaf `index` of the state before this step
    _leaf("carry"),  # ∇state(t), leaf `index`, from the steps after t
    _leaf("incoming"),  # ∇ of emitted value `index` at this step, from outside the loop
    # whole rows
    Op("matmul", Kind.PRODUCT, 1),  # index (i, transposed): with matrix i of what is computed once, or its transpose
    Op("row", Kind.PRODUCT, 1),  # index (i, k): of matrix i, which has k rows, the one that its argument says; or many
    Op("slice", Kind.LAYOUT, 1, "{0}.narrow(-1, {index}, {width})", again=_CHEAP),  # index: where it starts
    Op("cat", Kind.LAYOUT, None),  # its arguments side by side
    Op("take", Kind.LAYOUT, 1, "take({0}, {index})", gradient=_put, again=_CHEAP),  # index: `Positions`
    _reduction("sum", lambda b, y, g, a: (b.spread(g, a.width),), "{0} + {1}", 0.0),
    _reduction("prod", _others, "{0} * {1}", 1.0),
    _reduction("amax", _chosen, _GREATER, -math.inf, exact=True),
    _reduction("amin", _chosen, _LESS, math.inf, exact=True),
    # of two
    _several("add", 2, "{0} + {1}", lambda b, y, g, a, c: (g, g), _CHEAP),
    _several("sub", 2, "{0} - {1}", lambda b, y, g, a, c: (g, b.make("neg", g)), _CHEAP),
    _several("mul", 2, "{0} * {1}", lambda b, y, g, a, c: (b.mul(g, c), b.mul(g, a)), _CHEAP),
    _several("div", 2, "{0} / {1}", _quotient, _ONE_STEP),
    _several("maximum", 2, "torch.maximum({0}, {1})", _greater, _CHEAP, _GREATER),
    _several("minimum", 2, "torch.minimum({0}, {1})", _lesser, _CHEAP, _LESS),
    _several("fmod", 2, "torch.fmod({0}, {1})", _modulo, _KEPT),
    _several("atan2", 2, "torch.atan2({0}, {1})", _angle, _KEPT),
    _several("power", 2, "torch.pow({0}, {1})", _any_power, _KEPT, "pow({0}, {1})", aten=("pow",)),
    # truth values
    _comparison("lt", "<"),
    _comparison("le", "<="),
    _comparison("gt", ">"),
    _comparison("ge", ">="),
    _comparison("eq", "=="),
    _comparison("ne", "!="),
    _logical("and", 2, "{0} & {1}", "{0} && {1}"),
    _logical("or", 2, "{0} | {1}", "{0} || {1}"),
    _logical("not", 1, "~{0}", "!{0}"),
    _several("where", 3, "torch.where({0}, {1}, {2})", _either, _CHEAP, "{0} ? {1} : {2}", conditions=1),
    # of one
    _function("neg", lambda b, y, g, a: b.make("neg", g), _CHEAP, "-{0}"),
    _function("abs", lambda b, y, g, a: b.mul(g, b.make("sign", a)), _CHEAP, "fabs({0})"),
    _function("sign", lambda b, y, g, a: b.number(0), _CHEAP, "({0} > 0) - ({0} < 0)", aten=("sign", "sgn")),
    _function("relu", _above_zero, _CHEAP, "{0} <= 0 ? 0 : {0}", "{0}.relu()"),  # torch.relu takes no out=
    _function("tanh", lambda b, y, g, a: b.mul(g, b.sub(1, b.mul(y, y))), _ONE_STEP),
    _function("sigmoid", lambda b, y, g, a: b.mul(g, b.mul(y, b.sub(1, y))), _ONE_STEP, "1 / (1 + exp(-{0}))"),
    _function("exp", lambda b, y, g, a: b.mul(g, y), _ONE_STEP),
    _function("expm1", lambda b, y, g, a: b.mul(g, b.add(y, 1)), _KEPT),
    _function("log", lambda b, y, g, a: b.div(g, a), _KEPT),
    _function("log1p", lambda b, y, g, a: b.div(g, b.add(a, 1)), _KEPT),
    _function("sqrt", lambda b, y, g, a: b.div(b.mul(g, 0.5), y), _ONE_STEP),
    _function("rsqrt", lambda b, y, g, a: b.mul(b.mul(g, -0.5), b.mul(y, b.mul(y, y))), _ONE_STEP, "1 / sqrt({0})"),
    _function("reciprocal", lambda b, y, g, a: b.make("neg", b.mul(g, b.mul(y, y))), _ONE_STEP, "1 / {0}"),
    _function("pow", _power, _KEPT, "pow({0}, {index})", "{0} ** {index}"),  # index: the exponent
    _function("sin", lambda b, y, g, a: b.mul(g, b.make("cos", a)), _KEPT),
    _function("cos", lambda b, y, g, a: b.make("neg", b.mul(g, b.make("sin", a))), _KEPT),
    _function("tan", lambda b, y, g, a: b.mul(g, b.add(b.mul(y, y), 1)), _KEPT),
    _function("sinh", lambda b, y, g, a: b.mul(g, b.make("cosh", a)), _KEPT),
    _function("cosh", lambda b, y, g, a: b.mul(g, b.make("sinh", a)), _KEPT),
    _function("exp2", lambda b, y, g, a: b.mul(g, b.mul(y, math.log(2))), _KEPT),
    _function("log2", lambda b, y, g, a: b.div(g, b.mul(a, math.log(2))), _KEPT),
    _function("log10", lambda b, y, g, a: b.div(g, b.mul(a, math.log(10))), _KEPT),
    _function("floor", lambda b, y, g, a: b.number(0), _CHEAP),
    _function("ceil", lambda b, y, g, a: b.number(0), _CHEAP),
    _function("trunc", lambda b, y, g, a: b.number(0), _CHEAP),
    _function("round", lambda b, y, g, a: b.number(0), _CHEAP, "rint({0})"),  # halves to even
    _function("asin", lambda b, y, g, a: b.mul(g, b.make("rsqrt", b.sub(1, b.mul(a, a)))), _KEPT),
    _function("acos", lambda b, y, g, a: b.make("neg", b.mul(g, b.make("rsqrt", b.sub(1, b.mul(a, a))))), _KEPT),
    _function("atan", lambda b, y, g, a: b.div(g, b.add(b.mul(a, a), 1)), _KEPT),
    _function("asinh", lambda b, y, g, a: b.mul(g, b.make("rsqrt", b.add(b.mul(a, a), 1))), _KEPT),
    _function("acosh", lambda b, y, g, a: b.mul(g, b.make("rsqrt", b.sub(b.mul(a, a), 1))), _KEPT),
    _function("atanh", lambda b, y, g, a: b.div(g, b.sub(1, b.mul(a, a))), _KEPT),
    _function("erf", _bell, _KEPT),
    _function("erfc", lambda *args: args[0].make("neg", _bell(*args)), _KEPT),
    # the same numbers
    _function("expand", lambda b, y, g, a: g, _CHEAP, "{0}", "{0}.expand(*{lead}, {width})"),  # a width of 1 repeated
    # rounded to a narrower dtype, and so is the gradient, as by a cast there and back
    *(
        _function(
            dtype, lambda b, y, g, a: b.make(y.op, g), _CHEAP, c, f"{{0}}.{cast}().to({{0}}.dtype)", ("_to_copy",)
        )
        for dtype, cast, c in (
            ("bfloat16", "bfloat16", _nearest(7, -126, (2 - 2.0**-8) * 2.0**127)),
            ("float16", "half", _nearest(10, -14, 65520.0)),
        )
    ),
    _function("detach", lambda b, y, g, a: None, _CHEAP, "{0}", "{0}.detach()"),
    _several(  # the value of the first, and a gradient that is given; with an index, none where none comes back
        "surrogate",
        3,
        "(torch.ops.loopfold.surrogate({0}, {1}, {2}))",
        lambda b, y, g, a, c, w: (g, _given(b, y, g, w), None),
        _CHEAP,
        "{0}",
    ),
)
OPS: dict[str, Op] = {op.name: op for op in _TABLE}
ROUNDED = {torch.bfloat16: "bfloat16", torch.float16: "float16"}  # the operations that round, by dtype
