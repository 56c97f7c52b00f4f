"""The definition: a plain loop and autograd. Every other engine is tested against this one."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from loopfold.engines.base import Engine, Recurrence, first_step
from loopfold.states import State, leaves, map_state, parted, rebuild


@dataclass(frozen=True)
class Sequential(Engine):
    """Call `f` τ times. Runs anything; O(τ) time and memory; gradients of any order."""

    def refusal(self, recurrence: Recurrence) -> None:
        return None

    def run(self, recurrence: Recurrence) -> State:
        state = recurrence.state
        start = state if recurrence.again is None else recurrence.again
        rows: list[list[Tensor]] = []
        for t in range(recurrence.steps):
            new = first_step(recurrence) if t == 0 else recurrence.take(state, t)
            rows.append(leaves(new))
            _, state = parted(new, start)
            if recurrence.lengths is not None:
                # A sequence that has ended takes its first step again and again: had it gone on from its last state,
                # a step that overflows there would turn the gradient 0 that it gets into 0 · inf = NaN.
                rows[-1] = [where_alive(recurrence.alive(t), leaf, 0) for leaf in rows[-1]]
                state = map_state(partial(where_alive, recurrence.alive(t + 1)), state, start)
        return rebuild(new, [torch.stack(leaf) for leaf in zip(*rows, strict=True)])


def where_alive(alive: Tensor, leaf: Tensor, other: Tensor | int) -> Tensor:
    """`leaf [batch, …]` for the sequences that still run, `other` for those that have ended."""
    if leaf.dtype == torch.bool and not isinstance(other, Tensor):
        other = bool(other)  # a whole number would make whole numbers of it
    return torch.where(alive.view(-1, *[1] * (leaf.dim() - 1)), leaf, other)
