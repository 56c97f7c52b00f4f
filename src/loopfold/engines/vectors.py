"""Vectors of numbers in LLVM: loads, stores, loops, and functions accurate to two units in the last place."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from loopfold.stepgraph.loop import Value

# tanh(x) = x + x³ P(x²) for |x| < 0.625; the coefficients are those of the Cephes library, the highest power first
TANH_NEAR_ZERO_SINGLE = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
TANH_NEAR_ZERO_DOUBLE = (
    (-9.64399179425052238628e-1, -9.92877231001918586564e1, -1.61468768441708447952e3),
    (1.0, 1.12811678491632931402e2, 2.23548839060100448583e3, 4.84406305325125486048e3),
)


class Vectors:
    """A function `kernel` under construction, and the means to write it in whole vectors."""

    def __init__(self, dtype: str, lanes: int) -> None:
        self.single, self.lanes = dtype == "float", lanes
        self.module = ir.Module("loopfold")
        self.number = ir.FloatType() if self.single else ir.DoubleType()
        self.vector = ir.VectorType(self.number, lanes)
        self.i64, self.i32 = ir.IntType(64), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [self.i64] * 4 + [ir.PointerType()] * 2)
        self.function = ir.Function(self.module, kind, "kernel")
        self.b = ir.IRBuilder(self.function.append_basic_block("entry"))

    # ---- numbers, addresses, vectors

    def _padded(self, width: int) -> int:
        return -(-width // self.lanes) * self.lanes

    def _int(self, value: int) -> ir.Constant:
        return ir.Constant(self.i64, value)

    def _add(self, a: Any, c: Any) -> Any:
        if isinstance(a, ir.Constant) and isinstance(c, ir.Constant):
            return self._int(a.constant + c.constant)
        return self.b.add(a, c)

    def _mul(self, a: Any, c: Any) -> Any:
        c = self._int(c) if isinstance(c, int) else c
        if isinstance(a, ir.Constant) and isinstance(c, ir.Constant):
            return self._int(a.constant * c.constant)
        return self.b.mul(a, c)

    def _gep(self, pointer: Any, index: Any) -> Any:
        return self.b.gep(pointer, [index], source_etype=self.number)

    def _splat(self, value: Any) -> Any:
        if isinstance(value, float):
            return ir.Constant(self.vector, [value] * self.lanes)
        one = self.b.insert_element(ir.Constant(self.vector, ir.Undefined), value, ir.Constant(self.i32, 0))
        zeros = ir.Constant(ir.VectorType(self.i32, self.lanes), [0] * self.lanes)
        return self.b.shuffle_vector(one, ir.Constant(self.vector, ir.Undefined), zeros)

    def _first(self, count: int) -> ir.Constant:
        kind = ir.VectorType(ir.IntType(1), self.lanes)
        return ir.Constant(kind, [int(i < count) for i in range(self.lanes)])

    def _load(self, pointer: Any, mask: Any) -> Any:
        if mask is None:
            return self.b.load(pointer, align=self._align(), typ=self.vector)
        function = self._masked("load")
        return self.b.call(function, [pointer, ir.Constant(self.i32, self._align()), mask, self._splat(0.0)])

    def _save(self, value: Any, pointer: Any, mask: Any) -> None:
        if mask is None:
            self.b.store(value, pointer, align=self._align())
        else:
            self.b.call(self._masked("store"), [value, pointer, ir.Constant(self.i32, self._align()), mask])

    def _align(self) -> int:
        return 4 if self.single else 8

    # ---- declarations and loops

    def _suffix(self, vector: bool) -> str:
        return f"v{self.lanes}" * vector + ("f32" if self.single else "f64")

    def _declare(self, name: str, result: Any, arity: int) -> ir.Function:
        if name in self.module.globals:
            return self.module.globals[name]
        return ir.Function(self.module, ir.FunctionType(result, [result] * arity), name)

    def _masked(self, what: str) -> ir.Function:
        name = f"llvm.masked.{what}.{self._suffix(True)}.p0"
        if name in self.module.globals:
            return self.module.globals[name]
        mask = ir.VectorType(ir.IntType(1), self.lanes)
        pointer = ir.PointerType()
        if what == "load":
            kind = ir.FunctionType(self.vector, [pointer, self.i32, mask, self.vector])
        else:
            kind = ir.FunctionType(ir.VoidType(), [self.vector, pointer, self.i32, mask])
        return ir.Function(self.module, kind, name)

    @contextmanager
    def _range(self, start: Any, stop: Any, step: int) -> Iterator[Any]:
        """`for i in range(start, stop, step)`; at least one turn."""
        b = self.b
        before, body = b.block, self.function.append_basic_block()
        b.branch(body)
        b.position_at_end(body)
        i = b.phi(self.i64)
        i.add_incoming(start, before)
        yield i
        following = b.add(i, self._int(step))
        i.add_incoming(following, b.block)
        after = self.function.append_basic_block()
        b.cbranch(b.icmp_signed("<", following, stop), body, after)
        b.position_at_end(after)

    @contextmanager
    def _accumulate(self, count: int, start: list[list[list[Any]]]) -> Iterator[tuple[Any, list[list[list[Any]]]]]:
        """A loop of `count` turns that changes nested lists of vectors; afterwards they are in `_accumulated`."""
        b = self.b
        if count == 0:
            spare = self.function.append_basic_block()  # never reached: keeps the caller's code free of cases
            here = b.block
            b.position_at_end(spare)
            sums = [[list(row) for row in chain] for chain in start]
            yield self._int(0), sums
            b.unreachable()
            b.position_at_end(here)
            self._accumulated = [[list(row) for row in chain] for chain in start]
            return
        before, body = b.block, self.function.append_basic_block()
        b.branch(body)
        b.position_at_end(body)
        i = b.phi(self.i64)
        i.add_incoming(self._int(0), before)
        phis = [[[b.phi(self.vector) for _ in row] for row in chain] for chain in start]
        sums = [[list(row) for row in chain] for chain in phis]
        yield i, sums
        following = b.add(i, self._int(1))
        i.add_incoming(following, b.block)
        for chain, chain0, chain1 in zip(phis, start, sums, strict=True):
            for row, row0, row1 in zip(chain, chain0, chain1, strict=True):
                for phi, first, last in zip(row, row0, row1, strict=True):
                    phi.add_incoming(first, before)
                    phi.add_incoming(last, b.block)
        after = self.function.append_basic_block()
        b.cbranch(b.icmp_signed("<", following, self._int(count)), body, after)
        b.position_at_end(after)
        self._accumulated = sums

    @contextmanager
    def _features(self, width: int) -> Iterator[tuple[Any, Any]]:
        """One vector of features after another: (the first of them, the mask of those that exist or None for all)."""
        whole = width % self.lanes == 0
        if width <= self.lanes:
            yield self._int(0), None if whole else self._first(width)
            return
        with self._range(self._int(0), self._int(width), self.lanes) as j:
            yield j, None if whole else self._below(j, width)

    def _below(self, j: Any, width: int) -> Any:
        kind = ir.VectorType(self.i64, self.lanes)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), j, ir.Constant(self.i32, 0))
        zeros = ir.Constant(ir.VectorType(self.i32, self.lanes), [0] * self.lanes)
        at = self.b.add(
            self.b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros),
            ir.Constant(kind, list(range(self.lanes))),
        )
        return self.b.icmp_signed("<", at, ir.Constant(kind, [width] * self.lanes))

    # ---- operations

    def _operation(self, v: Value, args: list[Any]) -> Any:
        return LLVM[v.op](self, *args) if v.index is None else LLVM[v.op](self, *args, v.index)

    def _each_lane(self, name: str, p: Any, *numbers: float) -> Any:
        symbol = name + ("f" if self.single else "")
        function = self._declare(symbol, self.number, 1 + len(numbers))
        out = ir.Constant(self.vector, ir.Undefined)
        for i in range(self.lanes):
            lane = ir.Constant(self.i32, i)
            args = [self.b.extract_element(p, lane), *[ir.Constant(self.number, n) for n in numbers]]
            out = self.b.insert_element(out, self.b.call(function, args), lane)
        return out

    def _each_pair(self, name: str, p: Any, q: Any) -> Any:
        function = self._declare(name + ("f" if self.single else ""), self.number, 2)
        out = ir.Constant(self.vector, ir.Undefined)
        for i in range(self.lanes):
            lane = ir.Constant(self.i32, i)
            pair = [self.b.extract_element(p, lane), self.b.extract_element(q, lane)]
            out = self.b.insert_element(out, self.b.call(function, pair), lane)
        return out

    def _call(self, name: str, *args: Any) -> Any:
        """An intrinsic function of LLVM, on vectors or on single numbers."""
        vector = isinstance(args[0].type, ir.VectorType)
        kind = self.vector if vector else self.number
        return self.b.call(self._declare(f"llvm.{name}.{self._suffix(vector)}", kind, len(args)), args)

    def _sign(self, p: Any) -> Any:
        b, zero = self.b, self._splat(0.0)
        below = b.select(b.fcmp_ordered("<", p, zero), self._splat(-1.0), zero)
        return b.select(b.fcmp_ordered(">", p, zero), self._splat(1.0), below)

    def _polynomial(self, x: Any, coefficients: tuple[float, ...]) -> Any:
        """Horner's scheme, the highest power first."""
        value = self._splat(coefficients[0])
        for c in coefficients[1:]:
            value = self._call("fma", value, x, self._splat(c))
        return value

    def _exp(self, x: Any) -> Any:
        """2ⁿ eʳ with n = round(x / ln 2) and |r| ≤ ln 2 / 2; eʳ by its series, to half a unit in the last place."""
        b = self.b
        bits, mantissa, bias = (32, 23, 127) if self.single else (64, 52, 1023)
        low, high = (-104.0, 89.0) if self.single else (-746.0, 710.0)
        x = b.select(b.fcmp_ordered("<", x, self._splat(low)), self._splat(low), x)
        x = b.select(b.fcmp_ordered(">", x, self._splat(high)), self._splat(high), x)
        # adding 1.5 · 2^mantissa rounds to a whole number and leaves it in the lowest bits
        magic = 1.5 * 2.0**mantissa
        shifted = self._call("fma", x, self._splat(1 / math.log(2)), self._splat(magic))
        n = b.fsub(shifted, self._splat(magic))
        ln2_high = 0.693359375 if self.single else 6.93145751953125e-1  # few bits, so that n · ln2_high is exact
        ln2_low = -2.12194440054690583e-4 if self.single else 1.42860682030941723212e-6
        r = self._call("fma", n, self._splat(-ln2_high), x)
        r = self._call("fma", n, self._splat(-ln2_low), r)
        terms = 7 if self.single else 13
        p = self._polynomial(r, tuple(1 / math.factorial(k) for k in range(terms, -1, -1)))
        whole = ir.VectorType(ir.IntType(bits), self.lanes)

        def integers(value: int) -> ir.Constant:
            return ir.Constant(whole, [value] * self.lanes)

        magic_bits = ((bias + mantissa) << mantissa) | (1 << (mantissa - 1))
        exponent = b.sub(b.bitcast(shifted, whole), integers(magic_bits))
        half = b.ashr(exponent, integers(1))  # two factors, so that neither over- nor underflows by itself
        for part in (half, b.sub(exponent, half)):
            power = b.bitcast(b.shl(b.add(part, integers(bias)), integers(mantissa)), self.vector)
            p = b.fmul(p, power)
        return p

    def _rounded(self, p: Any, dropped: int) -> Any:
        """The nearest number that has so many bits fewer than a float32, ties to even; no-numbers as they are."""
        b = self.b
        singles, whole = ir.VectorType(ir.FloatType(), self.lanes), ir.VectorType(self.i32, self.lanes)

        def all_lanes(kind: Any, value: Any) -> ir.Constant:
            return ir.Constant(kind, [value] * self.lanes)

        def integers(value: int) -> ir.Constant:
            return all_lanes(whole, value)

        x = p if self.single else b.fptrunc(p, singles)
        bits = b.bitcast(x, whole)
        sign, size = b.and_(bits, integers(-(1 << 31))), b.and_(bits, integers((1 << 31) - 1))
        odd = b.and_(b.lshr(size, integers(dropped)), integers(1))
        up = b.add(size, b.add(odd, integers((1 << (dropped - 1)) - 1)))
        found = b.and_(up, integers(-(1 << dropped)))
        if dropped == 13:  # float16 ends at 65504; below 2^-14 its numbers are 2^-24 apart, as float32's from ½ to 1
            infinite, half = integers(0x7F800000), all_lanes(singles, 0.5)
            found = b.select(b.icmp_signed(">=", found, integers(0x47800000)), infinite, found)
            small = b.bitcast(b.fsub(b.fadd(b.bitcast(size, singles), half), half), whole)
            found = b.select(b.icmp_signed("<", size, integers(0x38800000)), small, found)
        found = b.bitcast(b.or_(found, sign), singles)
        found = b.select(b.fcmp_unordered("uno", x, x), x, found)
        return found if self.single else b.fpext(found, self.vector)

    def _sigmoid(self, x: Any) -> Any:
        b, one = self.b, self._splat(1.0)
        return b.fdiv(one, b.fadd(one, self._exp(b.fneg(x))))

    def _tanh(self, x: Any) -> Any:
        """1 - 2 / (e^{2|x|} + 1) with the sign of x; near zero, where that cancels, x + x³ P(x²)."""
        b, one = self.b, self._splat(1.0)
        size = self._call("fabs", x)
        bound = b.select(b.fcmp_ordered(">", size, self._splat(20.0)), self._splat(20.0), size)
        e = self._exp(b.fadd(bound, bound))
        large = b.fsub(one, b.fdiv(self._splat(2.0), b.fadd(e, one)))
        large = self._call("copysign", large, x)
        z = b.fmul(x, x)
        if self.single:
            p = self._polynomial(z, TANH_NEAR_ZERO_SINGLE)
        else:
            p = b.fdiv(self._polynomial(z, TANH_NEAR_ZERO_DOUBLE[0]), self._polynomial(z, TANH_NEAR_ZERO_DOUBLE[1]))
        small = self._call("fma", b.fmul(x, z), p, x)
        return b.select(b.fcmp_ordered(">=", size, self._splat(0.625)), large, small)


# ------------------------------------------------------------------ the operations of the loop language


LLVM: dict[str, Callable[..., Any]] = {
    "add": lambda w, p, q: w.b.fadd(p, q, flags=("contract",)),
    "sub": lambda w, p, q: w.b.fsub(p, q, flags=("contract",)),
    "mul": lambda w, p, q: w.b.fmul(p, q, flags=("contract",)),
    "div": lambda w, p, q: w.b.fdiv(p, q),
    "maximum": lambda w, p, q: w._call("maximum", p, q),
    "minimum": lambda w, p, q: w._call("minimum", p, q),
    "lt": lambda w, p, q: w.b.fcmp_ordered("<", p, q),
    "le": lambda w, p, q: w.b.fcmp_ordered("<=", p, q),
    "gt": lambda w, p, q: w.b.fcmp_ordered(">", p, q),
    "ge": lambda w, p, q: w.b.fcmp_ordered(">=", p, q),
    "eq": lambda w, p, q: w.b.fcmp_ordered("==", p, q),
    "ne": lambda w, p, q: w.b.fcmp_unordered("!=", p, q),
    "and": lambda w, p, q: w.b.and_(p, q),
    "or": lambda w, p, q: w.b.or_(p, q),
    "not": lambda w, p: w.b.not_(p),
    "where": lambda w, c, p, q: w.b.select(c, p, q),
    "neg": lambda w, p: w.b.fneg(p),
    "abs": lambda w, p: w._call("fabs", p),
    "sign": Vectors._sign,
    "relu": lambda w, p: w.b.select(w.b.fcmp_ordered("<", p, w._splat(0.0)), w._splat(0.0), p),
    "tanh": Vectors._tanh,
    "sigmoid": Vectors._sigmoid,
    "exp": Vectors._exp,
    "expm1": lambda w, p: w._each_lane("expm1", p),
    "log": lambda w, p: w._each_lane("log", p),
    "log1p": lambda w, p: w._each_lane("log1p", p),
    "sqrt": lambda w, p: w._call("sqrt", p),
    "rsqrt": lambda w, p: w.b.fdiv(w._splat(1.0), w._call("sqrt", p)),
    "reciprocal": lambda w, p: w.b.fdiv(w._splat(1.0), p),
    "pow": lambda w, p, exponent: w._each_lane("pow", p, exponent),
    "sin": lambda w, p: w._each_lane("sin", p),
    "cos": lambda w, p: w._each_lane("cos", p),
    **{name: (lambda w, p, name=name: w._each_lane(name, p)) for name in ("tan", "sinh", "cosh", "asinh", "erfc")},
    **{name: (lambda w, p, name=name: w._each_lane(name, p)) for name in ("asin", "acos", "acosh", "atanh")},
    **{name: (lambda w, p, name=name: w._each_lane(name, p)) for name in ("exp2", "log2", "log10")},
    **{name: (lambda w, p, name=name: w._call(name, p)) for name in ("floor", "ceil", "trunc")},
    "round": lambda w, p: w._call("rint", p),
    "fmod": lambda w, p, q: w._each_pair("fmod", p, q),
    "atan2": lambda w, p, q: w._each_pair("atan2", p, q),
    "power": lambda w, p, q: w._each_pair("pow", p, q),
    "atan": lambda w, p: w._each_lane("atan", p),
    "erf": lambda w, p: w._each_lane("erf", p),
    "expand": lambda w, p: p,
    "bfloat16": lambda w, p: w._rounded(p, 16),
    "float16": lambda w, p: w._rounded(p, 13),
    "detach": lambda w, p: p,
    "surrogate": lambda w, p, q, r: p,
    # reductions join two numbers, or two vectors of them, into one
    "sum": lambda w, p, q: w.b.fadd(p, q, flags=("contract",)),
    "prod": lambda w, p, q: w.b.fmul(p, q, flags=("contract",)),
    "amax": lambda w, p, q: w._call("maximum", p, q),
    "amin": lambda w, p, q: w._call("minimum", p, q),
}
