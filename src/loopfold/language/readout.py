"""The losses of a readout over many classes, piece by piece: its outputs `[τ, batch, |V|]` never exist as a whole.

With thousands of words the outputs, their softmax and the gradient of both are by far the largest tensors of a language
model. But `L = -log softmax(o)_y` has the gradient `softmax(o) - onehot(y)`, which is known as soon as `o` is. So `o`
is computed for some rows at a time, and its gradient turned into those of `h`, `V` and `c` at once (Hsu et al., Liger
Kernel, 2024; Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024).
"""

import math
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loopfold.casts import casts, with_casts
from loopfold.language.base import losses
from loopfold.outputs import Classes
from loopfold.products import addmm_, addmm_into, grain
from loopfold.states import alive
from loopfold.surroundings import in_a_transform
from loopfold.wiring import check_targets

PIECE = {"cpu": 12 << 20, "cuda": 64 << 20}  # bytes of outputs at a time: what a cache holds; what keeps a GPU busy
ROWS = 384  # with fewer at a time, adding up ∂L/∂V, all of it for every piece, takes longer than the products
SMALL = 4 << 20  # bytes of outputs that are no burden


class _Kept(threading.local):
    """Memory that this thread uses again."""

    def __init__(self) -> None:
        self.buffers: dict[torch.dtype, Tensor] = {}


_kept = _Kept()


def readout_losses(h: Tensor, V: Tensor, c: Tensor, y: Tensor, lengths: Tensor | None = None) -> Tensor:
    """`losses(c + h @ V.T, y, lengths)` for `h [τ, batch, n]` and `y [τ, batch]`; large outputs piece by piece.

    >>> h, V, c, y = torch.randn(7, 3, 5), torch.randn(9, 5), torch.randn(9), torch.randint(9, (7, 3))
    >>> torch.allclose(readout_losses(h, V, c, y), losses(c + h @ V.T, y, None))
    True
    """
    size, device = y.numel() * len(V) * 4, h.device
    dtype = dict(casts(device)).get(device.type)
    if dtype is not None and torch.float64 not in (h.dtype, V.dtype):
        h, V = h.to(dtype), V.to(dtype)  # as autocast casts what a product reads
    usual = c.shape == V.shape[:1] and h.dtype == V.dtype != torch.float16  # which a sum over all tokens may exceed
    if size <= SMALL or device.type not in PIECE or in_a_transform() or not usual:
        return losses(c + h @ V.T, y, lengths)
    check_targets(y, *h.shape[:2])
    Classes(len(V)).check(y)
    counts = None if lengths is None else alive(y, lengths)
    wanted = tuple(torch.is_grad_enabled() and t.requires_grad for t in (h, V, c))
    pieces = -(-size // max(PIECE[device.type], ROWS * len(V) * 4))
    return _Losses.apply(h, V, c, y.long(), counts, pieces, wanted)


class _Losses(torch.autograd.Function):
    """`readout_losses`, in so many pieces; `counts` says which tokens do.

    The way back is given g = ∂L/∂nll, one number a token. On the way there it is taken for 1, and what was found is
    multiplied by g, if that is one and the same for all tokens, as that of a sum is. Otherwise all is computed again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        V: Tensor,
        c: Tensor,
        y: Tensor,
        counts: Tensor | None,
        pieces: int,
        wanted: tuple[bool, ...],
    ) -> Tensor:
        ctx.pieces, ctx.wanted = pieces, wanted
        ctx.save_for_backward(h, V, c, y, counts)
        nll, ctx.found = _in_pieces(h, V, c, y, counts, pieces, wanted)
        nll = nll if counts is None else nll.masked_fill_(~counts, 0)
        return nll.to(torch.promote_types(h.dtype, c.dtype))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        h, V, c, y, counts = ctx.saved_tensors
        again = torch._C._autograd._get_current_graph_task_keep_graph()
        if torch.is_grad_enabled() or _is_batched(g):  # this gradient may be differentiated in turn
            found = _differentiably(h, V, c, y, counts, ctx.wanted, g)
        elif _is_one_number(g):
            one, found = g.flatten()[0], ctx.found
            found = [t if t is None else t * one if again else t.mul_(one) for t in found]
            if counts is not None and found[0] is not None:
                found[0].masked_fill_(~counts[..., None], 0)  # which 0 times infinity is not
        else:
            _, found = _in_pieces(h, V, c, y, g if counts is None else g * counts, ctx.pieces, ctx.wanted)
        ctx.found = ctx.found if again else None
        gradients = (None if t is None else t.to(of.dtype) for t, of in zip(found, (h, V, c), strict=True))
        return *gradients, None, None, None, None


def _differentiably(
    h: Tensor, V: Tensor, c: Tensor, y: Tensor, counts: Tensor | None, wanted: tuple[bool, ...], g: Tensor
) -> list[Tensor | None]:
    """The gradients by plain operations."""
    with torch.enable_grad():
        h, V, c = (t.view_as(t) for t in (h, V, c))  # h may itself depend on V, which is not asked here
    sources, graph = [t for t, want in zip((h, V, c), wanted, strict=True) if want], torch.is_grad_enabled()
    with with_casts((), h.device), torch.enable_grad():
        nll = losses(c + h @ V.T, y, None)
        nll = nll if counts is None else torch.where(counts, nll, 0)
        flow = iter(torch.autograd.grad(nll, sources, g.to(nll.dtype), create_graph=graph))
    return [next(flow) if want else None for want in wanted]


def _is_batched(g: Tensor) -> bool:
    """Whether it stands for many gradients at once, as torch.autograd.grad(is_grads_batched=True) has them."""
    return torch._C._functorch.is_batchedtensor(g) or torch._C._functorch.is_legacy_batchedtensor(g)


def _is_one_number(g: Tensor) -> bool:
    """Whether it is the same for all tokens, as far as that can be told without waiting for a GPU."""
    return not any(g.stride()) or (g.device.type == "cpu" and bool((g == g.flatten()[0]).all()))


def _in_pieces(
    h: Tensor, V: Tensor, c: Tensor, y: Tensor, weights: Tensor | None, pieces: int, wanted: tuple[bool, ...]
) -> tuple[Tensor, list[Tensor | None]]:
    """nll, and the gradients of `(weights * nll).sum()` by h, V and c, as far as they are wanted.

    Softmax, losses and sums are of single precision at least, and so is what is returned; products are of h's dtype.
    """
    short = _short(V)
    if short:  # classes that never are
        V, c = F.pad(V, (0, 0, 0, short)), F.pad(c, (0, short), value=-math.inf)
        nll, (dh, dV, dc) = _in_pieces(h, V, c, y, weights, pieces, wanted)
        return nll, [dh, dV if dV is None else dV[:-short], dc if dc is None else dc[:-short]]
    exact = torch.promote_types(h.dtype, torch.float32)
    n, V_T = len(V), V.T
    nll, x, targets = torch.empty(y.shape, dtype=exact, device=h.device), h.flatten(0, -2), y.flatten()[:, None]
    scale = None if weights is None else weights.flatten()[:, None]
    dh, dV, dc = found = [
        torch.zeros_like(t, dtype=exact) if want else None for t, want in zip((x, V, c), wanted, strict=True)
    ]
    size = -(-len(x) // pieces)
    size += -size % grain(size)
    for first in range(0, len(x), size):
        rows = slice(first, first + size)
        x_rows, y_rows = x[rows], targets[rows]
        o = addmm_into(_buffer(len(x_rows), n, exact, h.device), c, x_rows, V_T)  # book (10.10)
        largest, true = o.amax(1, keepdim=True), o.gather(1, y_rows)
        p = torch.softmax(o, 1, out=o)
        log_sum = -p.amax(1, keepdim=True).log()  # where o is largest, p is 1 / Σ exp(o - largest)
        nll.view(-1)[rows] = (largest - true + log_sum)[:, 0]
        if not any(wanted):
            continue
        p.scatter_(1, y_rows, p.gather(1, y_rows) - 1)  # ∂nll/∂o = softmax(o) - onehot(y)
        if scale is not None:
            p *= scale[rows]
        do = p.to(h.dtype)
        if dh is not None:
            addmm_(dh[rows], do, V)
        if dV is not None:
            addmm_(dV, do.T, x_rows)
        if dc is not None:
            dc += p.sum(0)
    return nll, [None if t is None else t.view(of.shape) for t, of in zip(found, (h, V, c), strict=True)]


def _short(V: Tensor) -> int:
    """How many rows V lacks for a GPU to multiply it fast, which wants whole 16 bytes in each row of a result."""
    return -len(V) % 8 if V.is_cuda and V.dtype.itemsize == 2 else 0


def _buffer(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for numbers. On a CPU it is kept for the next time: new pages would take longer than the softmax."""
    if device.type != "cpu":
        return torch.empty(rows, columns, dtype=dtype, device=device)
    numbers = rows * columns
    if dtype not in _kept.buffers or len(_kept.buffers[dtype]) < numbers:
        with torch.inference_mode(False):
            _kept.buffers[dtype] = torch.empty(numbers, dtype=dtype, device=device)
    return _kept.buffers[dtype][:numbers].view(rows, columns)
