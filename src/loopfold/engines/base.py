"""What an engine is given, what it must return, and the law that it keeps."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from loopfold.states import State, Step, describe, leaves, name_of


@dataclass(frozen=True, eq=False)
class Recurrence:
    """A step with all that it runs on, checked: `state(t) = f(state(t-1), x(t))` for t = 1…τ.

    `x` is `[τ, batch, …]` or None (then `f(state)`); `state` is state(0). With `lengths [batch]`, sequence `i`
    ends after `lengths[i]` steps, and after that `x` holds its first input, so that no padding is ever computed on.
    """

    f: Step
    x: Tensor | None
    steps: int
    state: State
    lengths: Tensor | None
    memo: dict[str, Any] = field(default_factory=dict)  # what engines have found out about it already

    def take(self, state: State, t: int) -> State:
        """One step of `f`, from `state` with x(t)."""
        return self.f(state) if self.x is None else self.f(state, self.x[t])

    def alive(self, t: int) -> Tensor:
        """`[batch]`: which sequences still run at step `t` (from 0)."""
        assert self.lengths is not None
        return self.lengths.to(leaves(self.state)[0].device) > t


class EngineWarning(UserWarning):
    """A step runs under `Sequential` that was meant to be compiled: the values are right, the speed is not."""


class Engine(ABC):
    """Runs a recurrence. States and every gradient match `Sequential` within the engine's stated tolerance."""

    @abstractmethod
    def refusal(self, recurrence: Recurrence) -> str | None:
        """Why this engine cannot run the recurrence, in words, or None. Nothing falls back in silence."""

    @abstractmethod
    def run(self, recurrence: Recurrence) -> State:
        """state(1…τ): the structure that `f` returns, each leaf `[τ, batch, …]`, zero after a sequence's end."""

    def code(self, recurrence: Recurrence) -> str:
        """What was generated for the recurrence, for people to read; nothing, unless an engine says otherwise."""
        return ""


def first_step(recurrence: Recurrence) -> State:
    """state(1), with the checks that only a step can make: that `f` runs, and gives back a state like state(0)."""
    f, state = recurrence.f, recurrence.state
    x = "" if recurrence.x is None else f" and x(t) {tuple(recurrence.x.shape[1:])}"
    versions = [leaf._version for leaf in leaves(state) if not leaf.is_inference()]
    try:
        new = recurrence.take(state, 0)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{name_of(f)} could not take its first step from state {describe(state)}{x}: {error}"
        ) from error
    if versions != [leaf._version for leaf in leaves(state) if not leaf.is_inference()]:
        raise ValueError(
            f"{name_of(f)} changes the state that it was given in place, so earlier states would be lost. "
            f"Return a new tensor: h = h + x, not h += x."
        )
    if not isinstance(new, Tensor | tuple):
        raise TypeError(
            f"{name_of(f)} returned a {type(new).__name__}; a step returns the next state, {describe(state)}."
        )
    got, expected = [leaf.shape for leaf in leaves(new)], [leaf.shape for leaf in leaves(state)]
    if got != expected:
        raise ValueError(
            f"{name_of(f)} was given state {describe(state)} and returned {describe(new)}; "
            f"a step must return a state of the structure and sizes that it was given."
        )
    return new
