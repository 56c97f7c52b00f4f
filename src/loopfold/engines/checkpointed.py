"""Checkpointed: few states are kept, and the steps between them are run again on the way back."""

from dataclasses import KW_ONLY, dataclass

from loopfold.engines.auto import Auto
from loopfold.engines.base import Engine, Recurrence
from loopfold.engines.budget import Costs, default_spacing, fitted_spacings, readable, size_in_bytes
from loopfold.engines.compiled import IN_A_TRANSFORM, captures, compiled_refusal
from loopfold.engines.pieces import run_in_pieces
from loopfold.engines.sequential import Sequential
from loopfold.states import State, leaves, name_of, whole_number
from loopfold.surroundings import in_a_transform


@dataclass(frozen=True)
class Checkpointed(Engine):
    """Runs a recurrence through another engine, in pieces; on the way back each piece is run again.

    `inner`   the engine that runs the pieces
    `every`   how many steps a piece has; 5 √τ by default
    `memory`  instead of it, what may be held at a time beside x, the results and the gradients of both: a number of
              bytes, or a size such as `"64 MB"`. Pieces are as long as that allows, and there are as many levels as it
              takes; `explain` shows them.

    Takes the time of `inner` and one more run forwards for each level. Agrees with `Sequential` as `inner` does. The
    step is taken again on the way back, and must give what it gave; where it does not, an error says so. First
    derivatives only.

    >>> import torch
    >>> from loopfold import Elman, unfold
    >>> unfold(Elman(3, 5), torch.ones(100, 2, 3), engine=Checkpointed(every=10)).hidden.shape
    torch.Size([100, 2, 5])
    """

    inner: Engine = Auto()
    _: KW_ONLY
    every: int | None = None
    memory: int | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Engine):
            raise TypeError(f"inner must be an engine such as lf.Auto(); got {self.inner!r}.")
        if isinstance(self.inner, Checkpointed):
            raise ValueError(
                "Checkpointed inside Checkpointed runs more often and keeps no less. For several levels, give one a "
                'budget: lf.Checkpointed(memory="64 MB").'
            )
        if self.every is not None and self.memory is not None:
            raise ValueError("Checkpointed takes every= or memory=, not both: one follows from the other.")
        if self.every is not None:
            whole_number("Checkpointed", "every", self.every)
        if self.memory is not None:
            size_in_bytes(self.memory)

    def refusal(self, recurrence: Recurrence) -> str | None:
        if in_a_transform():
            return IN_A_TRANSFORM
        if captures(leaves(recurrence.state)[0]):
            return "a CUDA graph is being made of the call."
        reason = self.inner.refusal(recurrence)
        if reason is not None:
            return f"{type(self.inner).__name__} cannot run its pieces: {reason}"
        spacings = self._spacings(recurrence)
        return spacings if isinstance(spacings, str) else None

    def run(self, recurrence: Recurrence) -> State:
        return self._run(recurrence, only_last=False)

    def last(self, recurrence: Recurrence) -> State:
        return self._run(recurrence, only_last=True)

    def around(self, recurrence: Recurrence) -> tuple[list[str], Engine, Recurrence]:
        spacings = self.spacings(recurrence)
        part, steps = _first(recurrence, spacings), recurrence.steps
        costs, pieces = self._costs(recurrence, part), -(-steps // spacings[-1])
        held = readable(costs.held(spacings, steps))
        levels = f"{len(spacings)} levels, of {', '.join(f'{k:,}' for k in spacings)} steps" if spacings[1:] else ""
        lines = [
            f"  {pieces:,} pieces of {part.steps:,} steps{levels and f'; {levels}'}",
            f"  held at a time, beside x, the results and their gradients: about {held}, "
            f"of {readable(costs.fixed + steps * costs.step)} in one piece",
        ]
        return lines, self.inner, part

    def code(self, recurrence: Recurrence) -> str:
        first = _first(recurrence, self.spacings(recurrence))
        return self._inside(first)[0].code(first)

    def spacings(self, recurrence: Recurrence) -> tuple[int, ...]:
        """How many steps lie between two states that are kept, at each level; each is a multiple of the next."""
        spacings = self._spacings(recurrence)
        if isinstance(spacings, str):
            raise ValueError(f"Checkpointed cannot run {name_of(recurrence.f)}: {spacings}")
        return spacings

    def _spacings(self, recurrence: Recurrence) -> tuple[int, ...] | str:
        """The spacings; or, in words, why none are few enough."""
        steps = recurrence.steps
        if self.memory is None:
            return default_spacing(steps) if self.every is None else (self.every,)
        budget, costs = size_in_bytes(self.memory), self._costs(recurrence, recurrence)
        spacings = fitted_spacings(costs, budget, steps)
        if spacings is not None and isinstance(self._inside(_first(recurrence, spacings))[0], Sequential):
            costs = Costs.of(recurrence, compiled=False)  # pieces too short to be compiled for
            spacings = fitted_spacings(costs, budget, steps)
        if spacings is None:
            least = readable(1.05 * costs.least(steps))
            return f"memory={self.memory!r} is too little: {steps:,} steps take at least {least}."
        return spacings

    def _costs(self, recurrence: Recurrence, part: Recurrence) -> Costs:
        compiled = not isinstance(self._inside(part)[0], Sequential) and compiled_refusal(part) is None
        return Costs.of(recurrence, compiled)

    def _inside(self, part: Recurrence) -> tuple[Engine, str]:
        """What runs the pieces: one engine for all of them, so that each is the same when it is run again."""
        return self.inner.choose(part) if isinstance(self.inner, Auto) else (self.inner, "")

    def _run(self, recurrence: Recurrence, only_last: bool) -> State:
        spacings = self.spacings(recurrence)
        first = _first(recurrence, spacings)
        engine, why = self._inside(first)
        results = run_in_pieces(engine, recurrence, spacings, only_last)
        if isinstance(self.inner, Auto):
            self.inner.tell(first, why)
        return results


def _first(recurrence: Recurrence, spacings: tuple[int, ...]) -> Recurrence:
    return recurrence.part(0, min(spacings[-1], recurrence.steps), recurrence.state)
