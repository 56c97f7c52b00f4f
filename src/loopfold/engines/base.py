"""What an engine is given, what it must return, and the law that it keeps."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from loopfold.states import (
    State,
    Step,
    all_leaves,
    at_end,
    describe,
    gives_output,
    leaves,
    map_state,
    name_of,
    parted,
    rebuild,
    take_step,
)


@dataclass(frozen=True, eq=False)
class Recurrence:
    """A step with all that it runs on, checked: `state(t) = f(state(t-1), x(t), context)` for t = 1…τ.

    `x` is `[τ, batch, …]`, a tuple of such, or None (then `f(state)`); `state` is state(0). With `lengths [batch]`,
    sequence `i` ends after `lengths[i]` steps, and after that `x` holds its first input, so that no padding is ever
    computed on. `context` is what every step reads, `[batch, …]`; `index [τ, batch, 1]` the number of each step from
    0, for a step that asks for it. None stands for what the step is not given.

    A sequence that has ended takes its first step `again` and again, from state(0): of a part, that is not `state`.
    """

    f: Step
    x: State | None
    steps: int
    state: State
    lengths: Tensor | None
    context: State | None = None
    index: Tensor | None = None
    memo: dict[str, Any] = field(default_factory=dict)  # what engines have found out about it already
    draws: Any = None  # the random numbers of its steps, where they are drawn already
    again: State | None = None

    def take(self, state: State, t: int) -> State:
        """One step of `f`, from `state` with x(t): what it returns, the state or (output, state)."""
        x = self.x
        if x is not None:
            x = x[t] if isinstance(x, Tensor) else map_state(lambda leaf: leaf[t], x)
        return take_step(self.f, state, x, self.context, None if self.index is None else self.index[t])

    def alive(self, t: int) -> Tensor:
        """`[batch]`: which sequences still run at step `t` (from 0)."""
        assert self.lengths is not None
        return self.lengths.to(leaves(self.state)[0].device) > t

    @property
    def tensors(self) -> list[Tensor]:
        """All that gradients may go back to: the leaves of state(0), of x and of the context, in this order."""
        return all_leaves(self.state, self.x, self.context)

    @property
    def sequences(self) -> list[Tensor]:
        """What a step reads a row of, `[τ, …]`: the leaves of x, and the index."""
        return all_leaves(self.x, self.index)

    def on(self, tensors: Iterable[Tensor]) -> "Recurrence":
        """The same on others, in the order of `tensors`."""
        flow = iter(tensors)
        parts = (self.state, self.x, self.context)
        state, x, context = [None if part is None else rebuild(part, flow) for part in parts]
        return replace(self, state=state, x=x, context=context)

    def part(self, start: int, steps: int, state: State) -> "Recurrence":
        """`steps` of its steps, from `start` on (counted from 0), where `state` is the state before them."""
        cut = slice(start, start + steps)
        return replace(
            self,
            x=None if self.x is None else map_state(lambda leaf: leaf[cut], self.x),
            steps=steps,
            state=state,
            lengths=None if self.lengths is None else (self.lengths - start).clamp(1, steps),
            index=None if self.index is None else self.index[cut],
            draws=None if self.draws is None else self.draws.between(start, start + steps),
        )


class EngineWarning(UserWarning):
    """An engine does not run a step as it was meant to, but another way: the values are right, the speed is not."""


class Engine(ABC):
    """Runs a recurrence. States and every gradient match `Sequential` within the engine's stated tolerance."""

    @abstractmethod
    def refusal(self, recurrence: Recurrence) -> str | None:
        """Why this engine cannot run the recurrence, in words, or None. Nothing falls back in silence."""

    @abstractmethod
    def run(self, recurrence: Recurrence) -> State:
        """What `f` returns at steps 1…τ: its structure, each leaf `[τ, batch, …]`, zero after a sequence's end."""

    def last(self, recurrence: Recurrence) -> State:
        """What `f` returns at each sequence's own last step, each leaf `[batch, …]`; an engine may need less for it."""
        return map_state(lambda leaf: at_end(leaf, recurrence.lengths), self.run(recurrence))

    def around(self, recurrence: Recurrence) -> "tuple[list[str], Engine, Recurrence] | None":
        """Of an engine around another: lines on what it does, the other, and what that is given. For `explain`."""
        return None

    def code(self, recurrence: Recurrence) -> str:
        """What was generated for the recurrence, for people to read; nothing, unless an engine says otherwise."""
        return ""


def first_step(recurrence: Recurrence) -> State:
    """What step 1 returns, with the checks that only a step can make: `f` runs, and gives a state like state(0)."""
    f, state = recurrence.f, recurrence.state
    versions = _versions(recurrence)
    try:
        new = recurrence.take(state, 0)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{name_of(f)} could not take its first step from state {describe(state)}{_reads(recurrence)}: {error}"
            f"{_how_it_is_called(error)}"
        ) from error
    if versions != _versions(recurrence):
        raise ValueError(
            f"{name_of(f)} changes the state that it was given in place, so earlier states would be lost. "
            f"Return a new tensor: h = h + x, not h += x."
            if versions[0] != _versions(recurrence)[0]
            else f"{name_of(f)} changes the context that it was given in place, so later steps would read another. "
            f"Make a new tensor: context * 2, not context.mul_(2)."
        )
    if not isinstance(new, Tensor | tuple):
        raise TypeError(
            f"{name_of(f)} returned a {type(new).__name__}; a step returns the next state, {describe(state)}."
        )
    try:
        got, expected = [leaf.shape for leaf in leaves(new)], [leaf.shape for leaf in leaves(state)]
    except TypeError:
        raise TypeError(
            f"{name_of(f)} returned {describe(new)}; a step returns tensors, the next state or (output, state)."
        ) from None
    if got != expected and not gives_output(new, state):
        turned = isinstance(new, tuple) and len(new) == 2 and gives_output(new[::-1], state)
        raise ValueError(
            f"{name_of(f)} was given state {describe(state)} and returned {describe(new)}; "
            f"a step must return a state of the structure and sizes that it was given, or (output, state)"
            f"{', the output first.' if turned else '.'}"
        )
    output, _ = parted(new, state)
    for leaf in all_leaves(output):
        if leaf.shape[:1] != expected[0][:1]:
            raise ValueError(
                f"{name_of(f)} gave an output of shape {tuple(leaf.shape)} beside the state; "
                f"the batch is {expected[0][0]}, so it must be ({expected[0][0]}, …)."
            )
    return new


def _how_it_is_called(error: Exception) -> str:
    """What to know of a step that was given too little, or too much."""
    if not (isinstance(error, TypeError) and "positional argument" in str(error)):
        return ""
    return ". A step is called as f(state, x, context, t=t): with a context if context= is given, with t if it has a t."


def _versions(recurrence: Recurrence) -> list[list[int]]:
    """How often each tensor of the state, and of the context, has been changed in place."""
    parts = [() if part is None else part for part in (recurrence.state, recurrence.context)]
    return [[leaf._version for leaf in leaves(part) if not leaf.is_inference()] for part in parts]


def _reads(recurrence: Recurrence) -> str:
    x = None if recurrence.x is None else describe(map_state(lambda leaf: leaf[0], recurrence.x))
    context = None if recurrence.context is None else describe(recurrence.context)
    parts = {"x(t)": x, "context": context, "t": recurrence.index if recurrence.index is None else "(batch, 1)"}
    return "".join(f" and {name} {shape}" for name, shape in parts.items() if shape is not None)
