"""Complex numbers in a step: each tensor of them stands for two of real ones, and what is written down is real.

    (a + bi) (c + di) = (ac - bd) + (ad + bc) i

So an engine needs no complex arithmetic. A state, an x or a parameter that is complex is two leaves of the graph.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from loopfold.stepgraph.aten import op_name
from loopfold.stepgraph.graph import Refusal

aten = torch.ops.aten


class Pair(NamedTuple):
    """A complex value. Its parts are tensors, or numbers; an imaginary part that is None is 0."""

    re: Any
    im: Any


_TAKEN = "it takes complex numbers for real ones, or real for complex. Use torch.view_as_real or view_as_complex."


class ComplexNumbers:
    """The complex tensors of a step, and the operations on them, by rules that torch's names have.

    `take` runs a real operation and writes it down.
    """

    def __init__(self, take: Callable[..., Any], rules: dict[str, Callable[..., Any]]) -> None:
        self.take, self.rules = take, rules
        self.known: dict[int, tuple[Pair, Tensor]] = {}  # the tensor is held, so that its id stays its own
        self.parts: dict[int, Tensor] = {}  # tensors that may share memory with complex ones
        self.stacked: dict[int, tuple[Pair, Tensor]] = {}  # what view_as_real gave, [..., 2]

    def leaf(self, tensor: Tensor) -> Pair:
        """Two real tensors, for which a complex one stands from now on."""
        real = tensor.dtype.to_real()
        return self._keep(Pair(torch.empty_like(tensor, dtype=real), torch.empty_like(tensor, dtype=real)), tensor)

    def concerns(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an operation reads or makes complex numbers, or reads the parts of some."""
        if op_name(func) in ("complex", "polar", "view_as_complex", "_fft_r2c"):
            return True
        if op_name(func) == "select" and id(args[0]) in self.stacked:
            return args[1] % args[0].dim() == args[0].dim() - 1
        return any(is_complex(a) for a in tree_leaves((args, kwargs)))

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operation gives: complex tensors that stand for what is written down, or real ones."""
        op = op_name(func)
        if func._schema.is_mutable:
            raise Refusal(f"it updates complex numbers in place (aten.{op}). Make a new tensor: z = z * w, not z *= w.")
        if func is aten.view.dtype:
            raise Refusal(_TAKEN)
        if op not in self.rules:
            raise Refusal(f"aten.{op} of complex numbers has no kernel.")
        found = self.rules[op](self, func, args, kwargs)
        if isinstance(found, Tensor):
            return found
        blank = (aten._conj_physical.default if op == "_conj" else func)(*args, **kwargs)
        if isinstance(found, Pair):
            return self._made(found, blank)
        return type(blank)(self._made(pair, part) for pair, part in zip(found, blank, strict=True))

    def _made(self, pair: Pair, blank: Tensor) -> Tensor:
        """A complex tensor that stands for a pair: both parts have its shape, and memory of their own."""
        if not blank.is_complex():
            raise Refusal(_TAKEN)
        real = blank.dtype.to_real()

        def part(value: Any) -> Tensor:
            if not isinstance(value, Tensor):
                return self.take(aten.full.default, blank.shape, value, dtype=real, device=blank.device)
            value = value if value.dtype == real else self.take(aten._to_copy.default, value, dtype=real)
            return value if value.shape == blank.shape else self.take(aten.expand.default, value, blank.shape)

        re = 0.0 if pair.re is None else pair.re
        self._keep(Pair(part(re), None if pair.im is None else part(pair.im)), blank)
        return blank

    def _keep(self, pair: Pair, tensor: Tensor) -> Pair:
        if tensor.dtype not in (torch.complex64, torch.complex128):
            raise Refusal(f"it computes with {tensor.dtype}; kernels are for complex64 and complex128.")
        self.known[id(tensor)] = (pair, tensor)
        self.parts |= {id(part): part for part in pair if part is not None}
        return pair

    def pair(self, value: Any) -> Pair:
        """A value as a pair, whatever it is."""
        if isinstance(value, Tensor) and value.is_complex():
            if id(value) not in self.known:
                raise Refusal(
                    "it reads a complex tensor that is neither its parameter nor its buffer. "
                    "Register it: self.register_buffer(name, tensor)."
                )
            return self.known[id(value)][0]
        return Pair(value.real, value.imag) if isinstance(value, complex) else Pair(value, None)

    def tensors(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Both parts of a complex tensor."""
        re, im = self.pair(value)
        return re, self.take(aten.zeros_like.default, re) if im is None else im

    # ---- real arithmetic, in which None is 0

    def add(self, a: Any, b: Any, alpha: Any = 1) -> Any:
        if b is None:
            return a
        if a is None:
            return b if alpha == 1 else self.mul(b, alpha)
        a, b = (b, a) if alpha == 1 and not isinstance(a, Tensor) else (a, b)
        if not isinstance(a, Tensor):
            return self.add(self.mul(b, alpha), a) if isinstance(b, Tensor) else a + alpha * b
        return self.take(aten.add.Tensor, a, b, **({} if alpha == 1 else {"alpha": alpha}))

    def neg(self, a: Any) -> Any:
        return None if a is None else self.take(aten.neg.default, a) if isinstance(a, Tensor) else -a

    def sub(self, a: Any, b: Any) -> Any:
        if a is None or b is None:
            return a if b is None else self.neg(b)
        if not isinstance(a, Tensor):
            return self.add(self.neg(b), a)
        return self.take(aten.sub.Tensor, a, b)

    def mul(self, a: Any, b: Any) -> Any:
        if a is None or b is None:
            return None
        a, b = (a, b) if isinstance(a, Tensor) else (b, a)
        return self.take(aten.mul.Tensor, a, b) if isinstance(a, Tensor) else a * b

    def div(self, a: Any, b: Any) -> Any:
        if a is None:
            return None
        if not isinstance(a, Tensor) and isinstance(b, Tensor):
            return self.mul(self.take(aten.reciprocal.default, b), a)
        return self.take(aten.div.Tensor, a, b) if isinstance(a, Tensor) else a / b

    # ---- complex arithmetic

    def product(self, times: Callable[[Any, Any], Any], a: Pair, b: Pair) -> Pair:
        """The product of two, where `times` is that of real ones and gives None where one of them is None."""
        re = self.sub(times(a.re, b.re), times(a.im, b.im))
        return Pair(re, self.add(times(a.re, b.im), times(a.im, b.re)))

    def sum(self, a: Pair, b: Pair, alpha: Any = 1) -> Pair:
        if isinstance(alpha, complex):
            b, alpha = self.product(self.mul, b, self.pair(alpha)), 1
        return Pair(self.add(a.re, b.re, alpha), self.add(a.im, b.im, alpha))

    def quotient(self, a: Pair, b: Pair) -> Pair:
        """a / b, with b divided by its larger part, so that no square overflows. That part needs no gradient."""
        if b.im is None:
            return Pair(self.div(a.re, b.re), self.div(a.im, b.re))
        if isinstance(b.im, Tensor):
            sizes = [self.take(aten.abs.default, self.take(aten.detach.default, part)) for part in b]
            larger = self.take(aten.maximum.default, *sizes)
        else:
            larger = max(abs(b.re), abs(b.im))
        re, im = self.div(b.re, larger), self.div(b.im, larger)
        size = self.add(self.mul(re, re), self.mul(im, im))
        top = self.product(self.mul, a, Pair(re, self.neg(im)))
        return Pair(*(self.div(self.div(part, size), larger) for part in top))

    def size(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """|z|, or 1 where z is 0; and where it is. At 0 the gradient of |z| is 0, and that of hypot is no number."""
        re, im = self.tensors(z)
        zero = self.take(aten.logical_and.default, *(self.take(aten.eq.Scalar, part, 0) for part in (re, im)))
        return self.take(aten.hypot.default, self.take(aten.masked_fill.Scalar, re, zero, 1), im), zero

    def turned(self, size: Tensor, angle: Tensor) -> Pair:
        return Pair(
            self.mul(size, self.take(aten.cos.default, angle)), self.mul(size, self.take(aten.sin.default, angle))
        )

    def without(self, part: Tensor, zero: Tensor) -> Tensor:
        """A part with 0, and no gradient, where z is 0."""
        return self.take(aten.masked_fill.Scalar, part, zero, 0)


def is_complex(a: Any) -> bool:
    if isinstance(a, Tensor):
        return a.is_complex()
    return isinstance(a, complex) or (isinstance(a, torch.dtype) and a.is_complex)
