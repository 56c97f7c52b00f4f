"""Large products of matrices on a CPU, by the faster of the two libraries that torch has for them.

torch.mm of float32 is MKL's, which treats AMD's processors as if they had vectors of 256 bits. From Zen 5 on they
multiply 512 bits at once, and oneDNN, torch's other library, is twice as fast there. Both round; neither is nearer.
"""

import functools
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopfold.surroundings import in_a_transform

LEAST = 1 << 24  # multiplications from which on it pays
NARROW = 64  # rows and columns, with fewer of which oneDNN is no faster


def mm(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`, with derivatives."""
    return _Product.apply(None, a, b) if _onednn_is_better(a, b) else torch.mm(a, b)


def addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """`beta * c + alpha * a @ b`, with derivatives."""
    plain = c.shape == b.shape[1:] and beta == alpha == 1 and _is_plain(c)
    if plain and _onednn_is_better(a, b):
        return _Product.apply(c, a, b)
    return torch.addmm(c, a, b, beta=beta, alpha=alpha)


def addmm_(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`total += a @ b`, in place, without derivatives."""
    if _onednn_is_better(a, b):
        return total.add_(_onednn(None, a, b))
    if total.dtype == a.dtype:
        return total.addmm_(a, b)
    if total.is_cuda:  # whose products of half precision are sums of float32: nothing is rounded in between
        return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    return total.add_(a @ b)


def addmm_into(memory: Tensor, c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`c + a @ b` for a row `c`, without derivatives; in `memory`, unless a library returns memory of its own."""
    return _onednn(c, a, b) if _is_plain(c) and _onednn_is_better(a, b) else addmm_(memory.copy_(c), a, b)


class _Product(torch.autograd.Function):
    """`c + a @ b`."""

    @staticmethod
    def forward(ctx: Any, c: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _onednn(c, a, b)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        c_wanted, a_wanted, b_wanted = ctx.needs_input_grad
        return g.sum(0) if c_wanted else None, mm(g, b.T) if a_wanted else None, mm(a.T, g) if b_wanted else None


def _onednn(c: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """`c + a @ b`. oneDNN takes `b` as it lies in memory, and copies `a` where that does not lie row by row.

    It makes code for each size and keeps it, up to half a megabyte. The number of rows may differ from batch to batch,
    so it is given 16 sizes from a power of two to the next: `a` gets more rows, or torch multiplies the last ones.
    """
    rows, k = a.shape
    if a.is_contiguous():
        rest = rows % grain(rows)
        if rest and k > b.shape[1]:  # where the result is smaller than `a`, that is copied, and `a` is not
            last = a[-rest:] @ b
            return torch.cat([_linear(a[:-rest], b, c), last if c is None else last + c])
        return _linear(F.pad(a, (0, 0, 0, -rows % grain(rows))) if rest else a, b, c)[:rows]
    if c is None and (b.T.is_contiguous() or a.numel() > b.numel()):
        return _onednn(None, b.T, a.T).T
    whole = k - k % grain(k)
    total = _linear(a[:, :whole], b[:whole], c)
    return total if whole == k else total.addmm_(a[:, whole:], b[whole:])


def _linear(a: Tensor, b: Tensor, c: Tensor | None) -> Tensor:
    if not any(near == 1 and far >= size for near, far, size in (_steps(b), _steps(b.T))):  # its rows overlap, say
        b = b.contiguous()
    c = c if c is None else c.contiguous()  # which it reads as if it were
    return torch.ops.mkldnn._linear_pointwise(a, b.T, c, "none", [], "")


def _steps(b: Tensor) -> tuple[int, int, int]:
    """How far apart in memory the numbers of a row are, and the rows; and how long a row is."""
    return b.stride(1), b.stride(0), b.shape[1]


def grain(size: int) -> int:
    """What sizes are whole multiples of: a power of two, 16 to 32 times smaller.

    >>> grain(31), grain(1023), grain(1024)
    (1, 32, 64)
    """
    return 1 << max(0, size.bit_length() - 5)


def _onednn_is_better(a: Tensor, b: Tensor) -> bool:
    if torch.compiler.is_compiling() or a.numel() * b.shape[-1] < LEAST or min(*a.shape, b.shape[-1]) < NARROW:
        return False
    plain = _is_plain(a) and _is_plain(b) and not in_a_transform()
    return plain and torch._C._get_mkldnn_enabled() and _on_this_machine()


def _is_plain(t: Tensor) -> bool:
    """Whether it is a tensor of numbers in memory, and stands for nothing else."""
    plain = type(t) in (Tensor, nn.Parameter) and t.dtype == torch.float32 and t.device.type == "cpu"
    return plain and t.layout == torch.strided and not torch._C._functorch.is_legacy_batchedtensor(t)


@functools.cache
def _on_this_machine() -> bool:
    try:
        from llvmlite import binding
    except ImportError:
        return False
    zen_5_on = re.fullmatch(r"znver([5-9]|\d\d)", binding.get_host_cpu_name())
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return bool(zen_5_on) and both and hasattr(torch.ops.mkldnn, "_linear_pointwise")
