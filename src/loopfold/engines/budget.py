"""How much memory a run takes, and where to keep states so that it takes no more than is allowed."""

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loopfold.engines.base import Recurrence
from loopfold.engines.draws import generators, same_generators
from loopfold.engines.programs import program_of
from loopfold.engines.sequential import Sequential
from loopfold.states import all_leaves, leaves
from loopfold.surroundings import unchanged

UNITS = {"": 1, "B": 1} | {f"{p}B": 1000**i for i, p in enumerate("kMGT", 1)}
UNITS |= {"KB": 1000} | {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}
NODE = 512  # bytes of a node in torch's graph with what it saves, about: Sequential makes some at every step
AHEAD = 5  # pieces are so many times √τ by default: with fewer of them, Python between them costs next to nothing


def size_in_bytes(size: int | str) -> int:
    """A size as a user writes it, in bytes.

    >>> size_in_bytes("64 MB"), size_in_bytes("1.5 KiB"), size_in_bytes(4096)
    (64000000, 1536, 4096)
    """
    found = None
    if isinstance(size, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)):
        number, unit = match.groups()
        found = int(float(number) * UNITS[unit]) if unit in UNITS else None
    elif isinstance(size, int) and not isinstance(size, bool):
        found = size
    if found is None or found < 1:
        raise ValueError(
            f'memory must be a number of bytes, or a size such as "64 MB" (kB, MB, GB; KiB, MiB, GiB); got {size!r}.'
        )
    return found


@dataclass(frozen=True)
class Costs:
    """What a run holds, in bytes."""

    fixed: int  # however long it is: the gradients of what every step reads, summed so far and of one piece
    state: int  # a checkpoint
    step: int  # a step of a piece on its way back

    @staticmethod
    def of(recurrence: Recurrence, compiled: bool) -> "Costs":
        """Those of a compiled run, or of `Sequential`."""
        f, like = recurrence.f, leaves(recurrence.state)[0]
        shared = [*(f.parameters() if isinstance(f, nn.Module) else ()), *all_leaves(recurrence.context)]
        fixed = sum(2 * t.nbytes for t in shared if t.requires_grad)
        state = sum(leaf.nbytes for leaf in leaves(recurrence.state))
        generator = generators(like)[0].nbytes  # kept with a state where steps draw
        if not compiled:
            step, draws = _measured(recurrence)
            return Costs(fixed, state + draws * generator, step)
        program = program_of(recurrence).program
        state += generator if program.loop.draws else 0
        emitted = program.loop.emitted
        back = sum(v.width for v in program.reverse((True,) * len(emitted)).stored())
        numbers = program.numbers + back + 2 * sum(v.width for v in emitted)  # and the gradients that come to those
        return Costs(fixed, state, numbers * len(like) * program.loop.dtype.itemsize)

    def held(self, spacings: tuple[int, ...], steps: int) -> int:
        """At most, at a time."""
        whole = (steps, *spacings)
        kept = sum(-(-min(a, steps) // b) + 1 for a, b in zip(whole, spacings, strict=False))
        return self.fixed + kept * self.state + min(spacings[-1], steps) * self.step

    def least(self, steps: int) -> int:
        """With one step a piece and two pieces a level."""
        return self.held(tuple(2**i for i in reversed(range(max(1, math.ceil(math.log2(steps)))))), steps)


def default_spacing(steps: int) -> tuple[int, ...]:
    return (min(steps, AHEAD * math.ceil(math.sqrt(steps))),)


def fitted_spacings(costs: Costs, budget: int, steps: int) -> tuple[int, ...] | None:
    """The spacings of as few levels as fit, in pieces as long as fit; each is a multiple of the next.

    With L levels of b pieces each, τ = k bᴸ: b states are kept at each level, and k steps at the last.
    """
    for levels in range(1, max(2, math.ceil(math.log2(steps)) + 1)):
        piece = steps
        while piece >= 1:
            branch = 1 if piece >= steps else max(2, math.ceil((steps / piece) ** (1 / levels) - 1e-9))
            spacings = tuple(piece * branch**i for i in reversed(range(levels)))
            over = costs.held(spacings, steps) - budget
            if over <= 0:
                return spacings
            piece = min(piece - max(1, over // max(1, costs.step)), piece - 1)
    return None


def readable(size: float) -> str:
    """
    >>> readable(1_234_567), readable(640)
    ('1.2 MB', '0.6 kB')
    """
    unit, name = next((u, n) for u, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if size >= u or n == "kB")
    return f"{size / unit:.1f} {name}"


def _measured(recurrence: Recurrence) -> tuple[int, bool]:
    """The bytes that `Sequential` holds for a step: what autograd saves, its nodes, results and their gradients.

    And whether a step draws random numbers.
    """
    f = recurrence.f
    given = [*recurrence.tensors, *((*f.parameters(), *f.buffers()) if isinstance(f, nn.Module) else ())]
    ours = {t.untyped_storage().data_ptr() for t in given}
    saved: dict[int, int] = {}
    nodes = 0

    def note(tensor: Tensor) -> Any:
        nonlocal nodes
        nodes += 1
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    steps = min(2, recurrence.steps)
    like = leaves(recurrence.state)[0]
    devices = [like.device] if like.is_cuda else []
    with torch.random.fork_rng(devices), unchanged(f), torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        before = generators(like)
        returned = Sequential().run(recurrence.part(0, steps, recurrence.state))
        draws = not same_generators(before, generators(like))
    results = sum(leaf.nbytes for leaf in leaves(returned))
    kept = sum(size for place, size in saved.items() if place not in ours)
    return (kept + 3 * results) // steps + NODE * (nodes // steps + 1), draws
