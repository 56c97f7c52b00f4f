"""How fast a recurrence forgets: after how many steps two different states have become one."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from loopfold.engines.base import Engine, Recurrence
from loopfold.engines.chunks import distance, largest
from loopfold.states import State, leaves, map_state, parted

PLACES = 4  # of a sequence, at which it is measured
FIRST = 64  # steps of that measurement, before it is known whether more are needed


def forgets(recurrence: Recurrence, inner: Engine, most: int, tolerance: float) -> int | None:
    """After how many steps two different states are one, at any of a few places of the longest sequences.

    None if not after `most` steps. One starts from state(0), the other from random numbers added to it, so that all
    directions have a share; each of the size that this number of the state has in a first run of a few steps.
    """
    chance = torch.Generator().manual_seed(0)
    longest: Any = slice(None)
    end = recurrence.steps
    if recurrence.lengths is not None:
        end = int(recurrence.lengths.max())
        longest = (recurrence.lengths == end).to(leaves(recurrence.state)[0].device)
    begins = [place * (end - most) // (PLACES - 1) for place in range(PLACES)]

    def run(state: State, copies: int, done: int, steps: int) -> State:
        """The states of some steps at all places, `copies` times side by side."""

        def there(leaf: Tensor) -> Tensor:
            return torch.cat([leaf[begin + done : begin + done + steps, longest] for begin in begins * copies], 1)

        def everywhere(leaf: Tensor) -> Tensor:
            return torch.cat([leaf[longest]] * copies * PLACES)

        part = replace(
            recurrence,
            x=None if recurrence.x is None else map_state(there, recurrence.x),
            index=None if recurrence.index is None else there(recurrence.index),
            steps=steps,
            state=state,
            context=None if recurrence.context is None else map_state(everywhere, recurrence.context),
            lengths=None,
            memo=dict(recurrence.memo),
        )
        with torch.no_grad():
            return parted(inner.run(part), state)[1]

    def size(leaf: Tensor) -> Tensor:
        """`[sequences, …]`: the largest that each number was, at any place and step."""
        return largest(leaf.unflatten(1, (PLACES, -1)), (0, 1))

    def apart(leaf: Tensor, own: Tensor) -> Tensor:
        noise = torch.randn((2 * PLACES, *leaf.shape), generator=chance, dtype=torch.float64)
        noise[:PLACES] = 0
        noise *= torch.maximum(own, largest(leaf[None], 0)).cpu().double().clamp(min=1)  # what is 0 is tried too
        return (leaf + noise.to(leaf)).flatten(0, 1)

    def for_all(own: Tensor) -> Tensor:
        return torch.where(own == 0, 1, own).expand(steps, PLACES, *own.shape).flatten(0, 2)

    done, steps = 0, min(FIRST, most)
    first = map_state(lambda leaf: leaf[longest], recurrence.state)
    sizes = map_state(size, run(map_state(lambda leaf: torch.cat([leaf] * PLACES), first), 1, done, steps))
    state = map_state(apart, first, sizes)
    begin = _apart(state)
    while True:
        states = run(state, 2, done, steps)
        one, other = (map_state(lambda leaf, i=i: leaf.chunk(2, 1)[i].flatten(0, 1), states) for i in range(2))
        sizes = map_state(lambda s, leaf: torch.maximum(s, size(leaf.chunk(2, 1)[0])), sizes, states)
        met = (distance(one, other, map_state(for_all, sizes)) <= tolerance).view(steps, -1).all(1)  # [steps]
        last = steps - int(met.flip(0).long().cumprod(0).sum())
        if last < steps:
            return done + last
        state, done = map_state(lambda leaf: leaf[-1], states), done + steps
        share = max(b / a for a, b in zip(begin, _apart(state), strict=True) if a) if any(begin) else 0.0
        # a state that fades at this rate takes more than twice as long: not worth another look
        if done >= most or not 0 < share < 1 or done * math.log(tolerance) / math.log(share) > 2 * most:
            return None
        steps = min(3 * done, most - done)


def _apart(pairs: State) -> list[float]:
    """How far the two halves of a batch are apart, for each tensor of a state."""
    halves = [leaf.double().chunk(2) for leaf in leaves(pairs)]
    return [float((a - b).abs().max()) for a, b in halves]
