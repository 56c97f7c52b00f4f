"""Back-propagation through time: the book's equations by hand, and truncated to windows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized

from loopfold.outputs import Classes
from loopfold.patterns import SequenceToSequence
from loopfold.recurrent import Bidirectional, Recurrent
from loopfold.states import State, detached, name_of, whole_number
from loopfold.transitions import Elman

Loss = Callable[[Any, Tensor], Tensor]  # loss_fn(o, y) -> scalar


# ------------------------------------------------------------------ by hand


@dataclass(frozen=True)
class Forward:
    """The forward quantities of book (10.8) to (10.11): `a`, `h` are `[τ, batch, n]`, `o`, `y_hat` `[τ, batch, k]`."""

    a: Tensor
    h: Tensor
    o: Tensor
    y_hat: Tensor


@dataclass(frozen=True)
class BPTT:
    """The gradient ∇ of the loss for every letter of the equations, `loss = Σ_t L(t)`, and the forward pass."""

    loss: Tensor
    o: Tensor  # ∇o(t)  [τ, batch, k]
    h: Tensor  # ∇h(t)  [τ, batch, n]
    U: Tensor
    W: Tensor
    V: Tensor
    b: Tensor
    c: Tensor
    forward: Forward


@torch.no_grad()
def bptt(model: SequenceToSequence, x: Tensor, y: Tensor, state: Tensor | None = None) -> BPTT:
    """Back-propagation through time without automatic differentiation (M15), for `SequenceToSequence(Elman)` with tanh.

    `x [τ, batch, n_in]`, `y [τ, batch]` classes; h(0) is zero, or `state`.

    >>> model = SequenceToSequence(Elman(3, 5), outputs=4)
    >>> x, y = torch.randn(7, 2, 3), torch.zeros(7, 2, dtype=torch.long)
    >>> model.loss(model(x), y).backward()
    >>> torch.allclose(bptt(model, x, y).W, model.recurrent.cell.W.grad, atol=1e-4)
    True
    """
    cell = _tanh_elman(model)
    U, W, b, V, c = cell.U, cell.W, cell.b, model.V, model.c
    model.recurrent(x, state)  # for its checks of x and the state
    tau, batch = x.shape[0], x.shape[1]
    h0 = cell.initial_state(batch) if state is None else state

    a, h = x.new_empty(tau, batch, cell.hidden_size), x.new_empty(tau, batch, cell.hidden_size)
    for t in range(tau):
        a[t] = b + (h[t - 1] if t > 0 else h0) @ W.T + x[t] @ U.T  # (10.8)
        h[t] = torch.tanh(a[t])  # (10.9)
    o = c + h @ V.T  # (10.10)
    y_hat = o.softmax(-1)  # (10.11)
    loss = model.loss(o, y)

    one_y = model.outputs.encode(y).to(o.dtype)
    do = y_hat - one_y  # ∇o(t) = ŷ(t) - 1_y(t)
    dh = torch.empty_like(h)
    dh[-1] = do[-1] @ V  # ∇h(τ) = Vᵀ ∇o(τ)
    for t in range(tau - 2, -1, -1):  # ∇h(t) = Wᵀ diag(1 - h(t+1)²) ∇h(t+1) + Vᵀ ∇o(t)
        dh[t] = ((1 - h[t + 1] ** 2) * dh[t + 1]) @ W + do[t] @ V

    da = (1 - h**2) * dh  # diag(1 - h(t)²) ∇h(t)
    before = torch.cat([h0[None], h[:-1]])  # h(t-1)
    return BPTT(
        loss=loss,
        o=do,
        h=dh,
        U=_sum_of_outer_products(da, x),  # ∇U = Σ diag(1 - h(t)²) ∇h(t) x(t)ᵀ
        W=_sum_of_outer_products(da, before),  # ∇W = Σ diag(1 - h(t)²) ∇h(t) h(t-1)ᵀ
        V=_sum_of_outer_products(do, h),  # ∇V = Σ ∇o(t) h(t)ᵀ
        b=da.sum((0, 1)),  # ∇b = Σ diag(1 - h(t)²) ∇h(t)
        c=do.sum((0, 1)),  # ∇c = Σ ∇o(t)
        forward=Forward(a, h, o, y_hat),
    )


def _sum_of_outer_products(left: Tensor, right: Tensor) -> Tensor:
    return left.flatten(0, 1).T @ right.flatten(0, 1)


def _tanh_elman(model: SequenceToSequence) -> Elman:
    recurrent = model.recurrent if isinstance(model, SequenceToSequence) else None
    cell = recurrent.cell if isinstance(recurrent, Recurrent) else None
    by_the_book = isinstance(cell, Elman) and cell.activation is torch.tanh and not is_parametrized(cell)
    if not isinstance(cell, Elman) or not by_the_book or not isinstance(model.outputs, Classes):
        raise TypeError(
            "bptt works by the book's equations, which are those of SequenceToSequence(Elman(n_in, n), classes) with "
            f"tanh; got {name_of(model) if cell is None else f'{cell} with {model.outputs}'}. "
            f"For any other model use lf.per_step_gradients."
        )
    return cell


# ------------------------------------------------------------------ truncated


@dataclass(frozen=True)
class Truncated:
    """The loss over the whole sequence, and the state after it, with no gradient attached."""

    loss: Tensor
    last: State


def truncated_bptt(
    model: SequenceToSequence, loss_fn: Loss, x: Tensor, y: Tensor, window: int, state: State | None = None
) -> Truncated:
    """Back-propagate within windows of `window` steps: the state crosses from one to the next, the gradient does not.

    Adds to `.grad`, as `loss.backward()` does. It is a different gradient, hence a function and not an engine; with
    `window >= τ` it is the full one. Memory is O(window).

    >>> model = SequenceToSequence(Elman(3, 5), outputs=4)
    >>> done = truncated_bptt(model, model.loss, torch.randn(70, 2, 3), torch.zeros(70, 2, dtype=torch.long), window=20)
    >>> _ = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    >>> done.last.shape
    torch.Size([2, 5])
    """
    whole_number("truncated_bptt", "window", window)
    if not isinstance(model, SequenceToSequence):
        raise TypeError(f"truncated_bptt needs SequenceToSequence, with a loss at every step; got {name_of(model)}.")
    if any(isinstance(part, Bidirectional) for part in model.modules()):
        raise TypeError("truncated_bptt carries the state forwards; Bidirectional also reads from the end.")
    if x.shape[0] < 1 or y.shape[0] != x.shape[0]:
        raise ValueError(f"x has {x.shape[0]} steps and y has {y.shape[0]}; both need the same τ of at least 1.")
    total = x.new_zeros(())
    for t in range(0, x.shape[0], window):
        prediction = model.predict(x[t : t + window], state)
        loss = loss_fn(prediction.o, y[t : t + window])
        loss.backward()
        total = total + loss.detach()
        state = detached(prediction.run.last)
    return Truncated(total, state)
