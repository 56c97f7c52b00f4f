"""TimeParallel: chunks of time side by side, from guessed states, until each begins where the one before it ends."""

import math
import threading
import time
import warnings
import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from loopfold.engines.adjoint import Marks, WayBack, Work
from loopfold.engines.auto import Auto
from loopfold.engines.base import Engine, EngineWarning, Recurrence
from loopfold.engines.chunks import MOST, Chunks, Seams, distance, largest
from loopfold.engines.compiled import compiled_refusal, parameters_of
from loopfold.engines.programs import program_of
from loopfold.states import State, detached, leaves, map_state, name_of, parted, rebuild, whole_number

ROUNDINGS = 32  # two states that have met still differ by a few of them, since each step rounds again
PLACES = 4  # of a sequence, at which it is measured how fast a state is forgotten
FIRST = 64  # steps of that measurement, before it is known whether more are needed
SHORTEST = 32  # a tail
TIMED = 256  # steps of a run that tells how fast a longer one is
TAILS = 4  # a chunk is so many tails long, unless its size is given
TOO_FEW = "there are too few steps for two chunks."

_last = threading.local()


@dataclass(frozen=True)
class TimeParallel(Engine):
    """Time is cut into chunks, which `inner` runs side by side as a larger batch, each from a guess of its state.

    For one or a few long sequences, of a network that forgets: first it is measured at a few places after how many
    steps two different states have become one. The start of each chunk is then found by reading only so many steps
    before it, and all chunks are run. Where one does not start where the one before it has ended, it is run again from
    there, until none moves by more than `tolerance`. Gradients go back in the same way.

    The value is always right: a step that does not forget, or not soon enough, is run in sequence by `inner`, and an
    `EngineWarning` says so. `report` tells what the last run in this thread found. Agrees with `Sequential` as `inner`
    does, but for seams that differ by up to `tolerance`.

    `chunk`      steps of a chunk; by default four times as many as the measurement says that are remembered
    `tolerance`  how far a seam may move, each number of the state as a share of its own largest value; by default 32
                 roundings, which is 4e-6 in float32 and 7e-15 in float64

    >>> from loopfold import Elman, unfold
    >>> engine = TimeParallel(chunk=64)
    >>> unfold(Elman(3, 5), torch.ones(500, 1, 3), engine=engine).hidden.shape, engine.report.chunks
    (torch.Size([500, 1, 5]), 8)
    """

    inner: Engine = Auto()
    chunk: int | None = None
    tolerance: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Engine):
            raise TypeError(f"TimeParallel needs an engine to run its chunks, such as lf.Auto(); got {self.inner!r}.")
        if isinstance(self.inner, TimeParallel):
            raise ValueError("TimeParallel cannot run chunks of chunks; give it another engine, such as lf.Auto().")
        if self.chunk is not None:
            whole_number("TimeParallel", "chunk", self.chunk)
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise ValueError(f"TimeParallel needs a tolerance between 0 and 1; got {self.tolerance!r}.")

    @property
    def report(self) -> Seams | None:
        """What the last run of this engine in this thread found; gradients are added when they come back."""
        owner, seams = getattr(_last, "reports", {}).get(id(self), (None, None))
        return seams if owner is not None and owner() is self else None

    def refusal(self, recurrence: Recurrence) -> str | None:
        reason = self.inner.refusal(recurrence) or compiled_refusal(recurrence)  # which knows that rows do not mix
        if reason is not None:
            return reason
        if leaves(recurrence.state)[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured, in which no size may depend on a value."
        found = program_of(recurrence)
        if found.program.loop.draws:
            return "it draws random numbers, one step after the other, which chunks side by side would not."
        if found.apart or found.program.graph.roughest is not None:
            return "it computes in half precision, in which two states that should be one need not meet."
        return None

    def run(self, recurrence: Recurrence) -> State:
        seams = Seams(chunk=recurrence.steps)
        known = {key: found for key, found in getattr(_last, "reports", {}).items() if found[0]() is not None}
        _last.reports = known | {id(self): (weakref.ref(self), seams)}  # an engine need not be hashable
        out = None
        plan = self._plan(recurrence, seams)
        if plan is not None:
            out = self._side_by_side(recurrence, Chunks(_detached(recurrence), self.inner, *plan), seams)
        if out is not None:
            return out
        if seams.why != TOO_FEW:
            _tell(recurrence)
        seams.chunks, seams.chunk = 1, recurrence.steps
        return self.inner.run(recurrence)

    def code(self, recurrence: Recurrence) -> str:
        return self.inner.code(recurrence)

    def around(self, recurrence: Recurrence) -> tuple[list[str], Engine, Recurrence]:
        """How time would be cut, and what to expect of it, from runs of a few steps."""
        seams = Seams()
        plan = self._plan(recurrence, seams)
        if plan is None:
            return [f"  in sequence, since {seams.why}"], self.inner, recurrence
        whole = _detached(recurrence)
        (size, tail), chunks = plan, Chunks(whole, self.inner, *plan)
        part = chunks.part(0, min(size, TIMED), chunks.start)
        sweeps = 1 + tail / size if tail < size else 2 + -(-(seams.forgets or 0) // size)
        gain = _seconds(self.inner, whole.part(0, part.steps, whole.state)) * recurrence.steps
        gain /= _seconds(self.inner, part) * sweeps * size
        lines = [
            f"  two states were one after {seams.forgets} steps, at {PLACES} places that were tried",
            f"  {seams.chunks} chunks of {size} steps side by side; about {sweeps:.3g} sweeps each way",
            f"  forwards about {gain:.2g} times as fast as in sequence{', so it does not pay here' * (gain <= 1)}",
        ]
        return lines, self.inner, part

    def _tolerance(self, recurrence: Recurrence) -> float:
        dtypes = [leaf.dtype for leaf in leaves(recurrence.state) if leaf.is_floating_point()]
        return self.tolerance or ROUNDINGS * max(torch.finfo(dtype).eps for dtype in dtypes)

    def _plan(self, recurrence: Recurrence, seams: Seams) -> tuple[int, int] | None:
        """How many steps a chunk has, and its tail; None where there is nothing to gain."""
        longest = recurrence.steps if recurrence.lengths is None else int(recurrence.lengths.max())
        if longest < 2 * (self.chunk or TAILS * SHORTEST):
            seams.why = TOO_FEW
            return None
        most = longest // (2 * TAILS) if self.chunk is None else min(longest // 2, MOST * self.chunk)
        seams.forgets = _forgets(_detached(recurrence), self.inner, most, self._tolerance(recurrence))
        if seams.forgets is None:
            seams.why = f"two states would not be one after {most} steps."
            return None
        tail = max(SHORTEST, 1 << (3 * seams.forgets // 2).bit_length())
        size = self.chunk or min(TAILS * tail, longest // 2)
        seams.chunk, seams.chunks = size, -(-recurrence.steps // size)
        return size, min(tail, size)

    def _side_by_side(self, recurrence: Recurrence, chunks: Chunks, seams: Seams) -> State | None:
        """All states, or None where the chunks do not come to agree."""
        tolerance = self._tolerance(recurrence)
        parameters = _parameters(recurrence)
        tensors = [*recurrence.tensors, *parameters]
        record = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        tail = chunks.pieces[-1][1]
        starts = chunks.after(chunks.to_end(chunks.size - tail, chunks.start).ends)
        seams.sweeps += tail / chunks.size
        settled = tail < chunks.size  # else more than one sweep is to be expected, and none of them is kept
        for _ in range(MOST):
            if not settled and (starts := _settle(chunks, starts, tolerance, seams)) is None:
                return None
            with torch.set_grad_enabled(record):
                pieces = chunks.run(starts, [t.requires_grad for t in recurrence.tensors] if record else None)
            seams.sweeps += 1
            ends = detached(pieces[-1].ends)
            seams.defect = float(chunks.defects(starts, ends, *(piece.sizes for piece in pieces)).max())
            if seams.defect <= tolerance:
                break
            starts, settled = chunks.after(ends), False
        else:
            seams.why = f"after {MOST} runs the chunks still did not agree."
            return None
        # a step whose compiled runs were found wrong may depend on what nobody sees, the order of its calls included
        reason = compiled_refusal(replace(recurrence, memo={}))
        if reason is not None:
            seams.why = f"it is not known any more to be the same at every step: {reason}"
            return None
        seams.agreed = True
        whole = [chunks.unfold(parts) for parts in zip(*(leaves(detached(p.out)) for p in pieces), strict=True)]
        if record:
            work = Work(self.inner, recurrence, chunks, tolerance, seams, Marks(recurrence.f))
            whole = list(WayBack.apply(work, whole, pieces, *tensors))
        return rebuild(pieces[0].out, whole)


def _seconds(engine: Engine, recurrence: Recurrence) -> float:
    """How long a run takes, without gradients; the first may compile something."""
    device, times = leaves(recurrence.state)[0].device, []
    with torch.no_grad():
        for _ in range(4):
            begin = time.perf_counter()
            engine.run(replace(recurrence, memo=dict(recurrence.memo)))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - begin)
    return min(times[1:])


def _tell(recurrence: Recurrence) -> None:
    warnings.warn(
        f"{name_of(recurrence.f)} was run in sequence: it does not forget soon enough for lf.TimeParallel(), whose "
        f"report says more.",
        EngineWarning,
        stacklevel=3,
    )


def _detached(recurrence: Recurrence) -> Recurrence:
    return recurrence.on([t.detach() for t in recurrence.tensors])


def _parameters(recurrence: Recurrence) -> list[Tensor]:
    """The tensors of the module that the step reads and that a gradient goes to, each once."""
    read = parameters_of(recurrence, program_of(recurrence))
    return list({id(t): t for t in read if t.requires_grad}.values())


# ------------------------------------------------------------------ how fast a state is forgotten


def _forgets(recurrence: Recurrence, inner: Engine, most: int, tolerance: float) -> int | None:
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


def _settle(chunks: Chunks, starts: State, tolerance: float, seams: Seams) -> State | None:
    """Starts from which every chunk ends where the next one starts, or None where they do not come to that.

    A sweep runs the chunks whose start has moved. Each must bring the seams nearer to each other, by half at least.
    """
    ends, sizes = chunks.start, chunks.start
    rows: Tensor | None = None
    before = torch.inf
    for _ in range(MOST):
        given = starts if rows is None else map_state(lambda leaf, rows=rows: leaf[rows], starts)
        new = chunks.to_end(0, given, rows)
        ends, sizes = (
            n if rows is None else map_state(lambda o, n, rows=rows: o.index_copy(0, rows, n), o, n)
            for o, n in ((ends, new.ends), (sizes, new.sizes))
        )
        seams.sweeps += 1 if rows is None else len(rows) / chunks.rows
        defects = chunks.defects(starts, ends, sizes)
        seams.defect = float(defects.max())
        if seams.defect <= tolerance:
            return starts
        if not seams.defect < before / 2:
            seams.why = f"a sweep left its seams {seams.defect:.1e} apart, after {before:.1e} before it."
            return None
        before, rows = seams.defect, (defects > tolerance).nonzero()[:, 0]
        starts = map_state(lambda s, a, rows=rows: s.index_copy(0, rows, a[rows]), starts, chunks.after(ends))
    seams.why = f"after {MOST} sweeps the chunks did not agree."
    return None
