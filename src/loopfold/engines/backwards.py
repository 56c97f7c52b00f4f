"""What engines share on the way back: gradients in parts, gradients that come many at a time, and first ones only."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def held(f: Any) -> list[tuple[Tensor, int]]:
    """The parameters and buffers of a step, and how often each has been changed in place."""
    tensors = [*f.parameters(), *f.buffers()] if isinstance(f, nn.Module) else []
    return [(t, 0 if t.is_inference() else t._version) for t in tensors]


_partial = threading.local()  # whether this thread computes a part of a gradient


class _OfWhole:
    """A hook of a tensor, which is for whole gradients: it is not called with parts of one."""

    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        self.hook = hook

    def __call__(self, gradient: Tensor) -> Any:
        return None if getattr(_partial, "open", False) else self.hook(gradient)


def partial_gradients(
    outputs: Sequence[Tensor], wanted: Sequence[Tensor], incoming: Sequence[Tensor], keep: bool = False
) -> Sequence[Tensor | None]:
    """Gradients that are to be added to others before anyone may see them; `keep`: the graph is needed again.

    Hooks stay where they are, and know by themselves in which thread not to act: in another one, a whole gradient may
    arrive at the same tensor at this time.
    """
    for hooks in (t._backward_hooks for t in wanted if t._backward_hooks):
        for key, hook in list(hooks.items()):
            if not isinstance(hook, _OfWhole) and key in hooks:
                hooks[key] = _OfWhole(hook)
    before, _partial.open = getattr(_partial, "open", False), True
    try:
        return torch.autograd.grad(outputs, wanted, incoming, retain_graph=keep or None, allow_unused=True)
    finally:
        _partial.open = before


def come_many(incoming: Sequence[Tensor | None]) -> bool:
    """Whether each stands for many gradients at once: under torch.vmap, or with is_grads_batched."""
    legacy = any(g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in incoming)
    return legacy or torch._C._are_functorch_transforms_active()


def each(back: Callable[..., list[Tensor | None]], incoming: Sequence[Tensor | None]) -> list[Tensor | None]:
    """`back`, for gradients that come many at a time: for one after the other."""
    if torch._C._are_functorch_transforms_active():
        results = iter(_OneByOne.apply(back, *incoming))
        return [next(results) if there else None for there in back.there]  # type: ignore[attr-defined]
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    many = [None if g is None else torch._remove_batch_dim(g, level, 1, 0) for g in incoming]
    count = next(len(g) for g in many if g is not None)
    torch._C._vmapmode_decrement_nesting()  # each is one gradient, and may be looked at
    try:
        rows = [back(*[None if g is None else g[i] for g in many]) for i in range(count)]
    finally:
        torch._C._vmapmode_increment_nesting()
    columns = [None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)]
    return [None if column is None else torch._add_batch_dim(column, 0, level) for column in columns]


class _OneByOne(torch.autograd.Function):
    @staticmethod
    def forward(back: Callable[..., list[Tensor | None]], *incoming: Tensor | None) -> tuple[Tensor, ...]:
        results = back(*incoming)
        back.there = [g is not None for g in results]  # type: ignore[attr-defined]
        return tuple(g for g in results if g is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], back: Any, *incoming: Tensor | None) -> tuple[Any, ...]:
        def one(i: int) -> list[Tensor | None]:
            pairs = zip(incoming, in_dims[1:], strict=True)
            return [g if g is None or dim is None else g.select(dim, i) for g, dim in pairs]

        rows = [_OneByOne.apply(back, *one(i)) for i in range(info.batch_size)]
        results = tuple(torch.stack(column) for column in zip(*rows, strict=True))
        return results, (0,) * len(results)


def once(name: str, results: list[Tensor | None], sources: list[Tensor]) -> list[Tensor | None]:
    """Gradients that depend on `sources`, and cannot be differentiated again: `name` is that of the engine."""
    return [None if r is None else _Once.apply(name, r, *sources) for r in results]


class _Once(torch.autograd.Function):
    """A gradient that cannot be differentiated again: trying to raises an error that says so."""

    @staticmethod
    def forward(ctx: Any, name: str, gradient: Tensor, *sources: Tensor) -> Tensor:
        ctx.engine_name = name
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(
            f"{ctx.engine_name} has first derivatives only. For second derivatives run the recurrence with "
            f"engine=lf.Sequential()."
        )
