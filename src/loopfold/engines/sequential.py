"""The definition: a plain loop and autograd. Every other engine is tested against this one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from loopfold.engines.base import Engine, Recurrence, first_step
from loopfold.transitions import State, leaves, map_state, rebuild


@dataclass(frozen=True)
class Sequential(Engine):
    """Call `f` τ times. Runs anything; O(τ) time and memory; gradients of any order."""

    def refusal(self, recurrence: Recurrence) -> None:
        return None

    def run(self, recurrence: Recurrence) -> State:
        state = recurrence.state
        outputs: list[list[Tensor]] = []
        for t in range(recurrence.steps):
            new = first_step(recurrence) if t == 0 else recurrence.take(state, t)
            output = new
            if recurrence.lengths is not None:
                alive = recurrence.alive(t)
                new = map_state(lambda n, s, alive=alive: torch.where(_like(alive, n), n, s), new, state)
                output = map_state(lambda n, alive=alive: torch.where(_like(alive, n), n, 0), new)
            state = new
            outputs.append(leaves(output))
        return rebuild(state, [torch.stack(leaf) for leaf in zip(*outputs, strict=True)])


def _like(alive: Tensor, leaf: Tensor) -> Tensor:
    return alive.view(-1, *[1] * (leaf.dim() - 1))
