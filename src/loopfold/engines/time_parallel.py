"""TimeParallel: chunks of time side by side, from guessed states, until each begins where the one before it ends."""

import threading
import time
import warnings
import weakref
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from loopfold.engines.adjoint import Marks, WayBack, Work
from loopfold.engines.auto import Auto
from loopfold.engines.base import Engine, EngineWarning, Recurrence
from loopfold.engines.chunks import MOST, Chunks, Seams, slopes_between
from loopfold.engines.compiled import captures, compiled_refusal, parameters_of
from loopfold.engines.forgetting import PLACES, forgets
from loopfold.engines.programs import program_of
from loopfold.engines.sequential import where_alive
from loopfold.states import State, detached, leaves, map_state, name_of, parted, rebuild, until_the_end, whole_number

ROUNDINGS = 32  # two states that have met still differ by a few of them, since each step rounds again
SHORTEST = 32  # a tail
TIMED = 512  # steps of a run that tells how fast a longer one is
TAILS = 4  # a chunk is so many tails long, unless its size is given
MANY = 128  # chunks, of a network that remembers
FEWEST = 16  # of them, since such a network takes more sweeps
EXPECTED = 5  # of these sweeps, of LSTMs that were trained on text
TOO_FEW = "there are too few steps for two chunks."

_last = threading.local()


@dataclass(frozen=True)
class TimeParallel(Engine):
    """Time is cut into chunks, which `inner` runs side by side as a larger batch, each from a guess of its state.

    For one or a few long sequences, of a network that forgets: first it is measured at a few places after how many
    steps two different states have become one. The start of each chunk is then found by reading only so many steps
    before it, and all chunks are run. Where one does not start where the one before it has ended, it is run again from
    there, until none moves by more than `tolerance`. Gradients go back in the same way. Of a network that remembers,
    two sweeps tell how each number of the state is kept from one seam to the next, as the cells of an LSTM are; where
    that holds, a few more sweeps are enough.

    From the first chunk on that does not come to agree, `inner` runs the steps in sequence, and an `EngineWarning` says
    so. `report` tells what the last run in this thread found. Agrees with `Sequential` as `inner` does, but for seams
    that differ by up to `tolerance`.

    `chunk`      steps of a chunk; by default four times as many as are remembered, by the measurement
    `tolerance`  how far a seam may move, each number of the state as a share of the largest that it is in the two
                 chunks that meet there; by default 32 roundings, which is 4e-6 in float32 and 7e-15 in float64

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
        if captures(leaves(recurrence.state)[0]):
            return "a CUDA graph is being captured, in which no size may depend on a value."
        assert isinstance(recurrence.f, nn.Module)
        if any(t.is_complex() for t in (*recurrence.tensors, *recurrence.f.parameters())):
            return "it holds or reads complex numbers. Write real and imaginary parts, [batch, n, 2]."
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
        for plan in self._plans(recurrence, seams):
            seams.chunk, seams.chunks = plan.size, -(-recurrence.steps // plan.size)
            out = self._side_by_side(recurrence, plan, seams)
            if seams.agreed:
                seams.why = ""
                return out
        seams.in_sequence_from = 0 if out is None else len(leaves(out)[0])
        if seams.why != TOO_FEW:
            _tell(recurrence, seams.in_sequence_from)
        if out is not None:
            return _finished(self.inner, recurrence, out)
        seams.chunks, seams.chunk = 1, recurrence.steps
        return self.inner.run(recurrence)

    def code(self, recurrence: Recurrence) -> str:
        return self.inner.code(recurrence)

    def around(self, recurrence: Recurrence) -> tuple[list[str], Engine, Recurrence]:
        """How time would be cut, and what to expect of it, from runs of a few steps."""
        lines, _, part = self.expected(recurrence)
        return lines, self.inner, part

    def expected(self, recurrence: Recurrence) -> tuple[list[str], float, Recurrence]:
        """What to expect, in words; how many times as fast it should be, forwards; and a part that is run at a time."""
        seams = Seams()
        plans = self._plans(recurrence, seams)
        if not plans:
            return [f"  in sequence, since {seams.why}"], 1.0, recurrence
        whole, (size, tail, remembers) = _detached(recurrence), plans[0]
        chunks = Chunks(whole, self.inner, size, tail)
        part = chunks.part(0, min(size, TIMED), chunks.start)
        words = f"two states were one after {seams.forgets} steps, at {PLACES} places that were tried"
        sweeps = 1 + tail / size if tail < size else 2 + -(-(seams.forgets or 0) // size)
        if remembers:
            words, sweeps = "it remembers; worth a try is whether each number of its state is kept by itself", EXPECTED
        begin = time.perf_counter()
        self._plans(recurrence, seams)
        looked = time.perf_counter() - begin
        gain = _Line.of(self.inner, whole.part(0, part.steps, whole.state)).seconds(recurrence.steps, 1)
        gain /= _Line.of(self.inner, part).seconds(sweeps * size, 1 + sweeps) + looked
        lines = [
            f"  {words}",
            f"  {chunks.count} chunks of {size} steps side by side; about {sweeps:.3g} sweeps each way",
            f"  forwards about {gain:.2g} times as fast as in sequence{', so it does not pay here' * (gain <= 1)}",
        ]
        return lines, gain, part

    def _tolerance(self, recurrence: Recurrence) -> float:
        dtypes = [leaf.dtype for leaf in leaves(recurrence.state) if leaf.is_floating_point()]
        return self.tolerance or ROUNDINGS * max(torch.finfo(dtype).eps for dtype in dtypes)

    def _plans(self, recurrence: Recurrence, seams: Seams) -> list["_Plan"]:
        """How to cut time: what to try first, and what after it; nothing where there is nothing to gain.

        A network that remembers gets chunks too, where they are many: it may keep each number of its state by itself.
        So does one on a GPU that forgets late, where their sweeps one after the other are far fewer steps.
        """
        longest = recurrence.steps if recurrence.lengths is None else int(recurrence.lengths.max())
        if longest < 2 * (self.chunk or TAILS * SHORTEST):
            seams.why = TOO_FEW
            return []
        most = longest // (2 * TAILS) if self.chunk is None else min(longest // 2, MOST * self.chunk)
        seams.forgets = forgets(_detached(recurrence), self.inner, most, self._tolerance(recurrence))
        size = self.chunk or max(TAILS * SHORTEST, -(-longest // MANY))
        remembering = [_Plan(size, size, True)] if longest >= FEWEST * size else []
        if seams.forgets is None:
            seams.why = f"two states would not be one after {most} steps."
            return remembering
        tail = max(SHORTEST, 1 << (3 * seams.forgets // 2).bit_length())
        size = self.chunk or min(TAILS * tail, longest // 2)
        forgetting = _Plan(size, min(tail, size), False)
        late = waits_for_steps(leaves(recurrence.state)[0].device)
        return [*(plan for plan in remembering if late and size > 2 * EXPECTED * plan.size), forgetting]

    def _side_by_side(self, recurrence: Recurrence, plan: "_Plan", seams: Seams) -> State | None:
        """The states of all chunks that come to agree, from the first on; None where these are fewer than two."""
        size, tail, remembers = plan
        chunks, tolerance = Chunks(_detached(recurrence), self.inner, size, tail), self._tolerance(recurrence)
        parameters = _parameters(recurrence)
        record = torch.is_grad_enabled() and any(t.requires_grad for t in (*recurrence.tensors, *parameters))
        starts, slopes = chunks.start, None
        if remembers:
            slopes = map_state(torch.zeros_like, chunks.start)
        else:
            starts = chunks.after(chunks.to_end(size - tail, chunks.start).ends)
            seams.sweeps += tail / size
        settled = tail < size  # else more than one sweep is to be expected, and none of them is kept
        for _ in range(MOST):
            if not settled:
                starts, slopes, count = _settle(chunks, starts, slopes, tolerance, seams)
                if count < 2:
                    return None
                if count < chunks.count:
                    chunks, seams.chunks = chunks.first(count), count
                    starts = map_state(lambda leaf, rows=chunks.rows: leaf[:rows], starts)
                    if slopes is not None:
                        slopes = map_state(lambda leaf, rows=chunks.rows: leaf[:rows], slopes)
            with torch.set_grad_enabled(record):
                pieces = chunks.run(starts, [t.requires_grad for t in recurrence.tensors] if record else None)
            seams.sweeps += chunks.count / -(-recurrence.steps // size)
            ends = detached(pieces[-1].ends)
            defects = chunks.defects(starts, chunks.after(ends), *(piece.sizes for piece in pieces))
            seams.defect = float(defects.max())
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
        seams.agreed = chunks.recurrence.steps == recurrence.steps
        whole = [chunks.unfold(parts) for parts in zip(*(leaves(detached(p.out)) for p in pieces), strict=True)]
        if record:
            done = recurrence.part(0, chunks.recurrence.steps, recurrence.state)
            work = Work(self.inner, done, chunks, tolerance, seams, Marks(recurrence.f), slopes)
            whole = list(WayBack.apply(work, whole, pieces, *done.tensors, *parameters))
        return rebuild(pieces[0].out, whole)


def _finished(inner: Engine, recurrence: Recurrence, out: State) -> State:
    """All steps, where `out` has the first of them: the others in sequence."""
    done = len(leaves(out)[0])
    state = map_state(lambda leaf: leaf[-1], parted(out, recurrence.state)[1])
    if recurrence.lengths is not None:  # as in Sequential, a sequence that has ended starts again, out of sight
        running = recurrence.alive(done)
        state = map_state(lambda leaf, first: where_alive(running, leaf, first), state, recurrence.state)
    rest = inner.run(recurrence.part(done, recurrence.steps - done, state))
    return map_state(lambda a, b: until_the_end(torch.cat([a, b]), recurrence.lengths), out, rest)


def _settle(
    chunks: Chunks, starts: State, slopes: State | None, tolerance: float, seams: Seams
) -> tuple[State, State | None, int]:
    """Starts from which every chunk ends where the next one starts, and how many chunks, from the first on, do so.

    A sweep runs the chunks whose start has moved. Each must bring the seams nearer to each other, by half at least.
    With `slopes`, which are learnt from the second sweep on, it runs all of them, and a seam is as far apart as its
    start would still move, with all those before it; the first may be far from right, so they have more time.
    """
    ends, sizes = chunks.start, chunks.start
    rows: Tensor | None = None
    count, old, apart = 0, None, [torch.inf]
    patience, most = (1, MOST) if slopes is None else (3, max(MOST, min(2 * MOST, chunks.count // 4)))
    for _ in range(most):
        given = starts if rows is None else map_state(lambda leaf, rows=rows: leaf[rows], starts)
        new = chunks.to_end(0, given, rows)
        ends, sizes = (
            n if rows is None else map_state(lambda o, n, rows=rows: o.index_copy(0, rows, n), o, n)
            for o, n in ((ends, new.ends), (sizes, new.sizes))
        )
        seams.sweeps += 1 if rows is None else len(rows) / chunks.rows
        following = chunks.after(ends)
        defects = chunks.defects(starts, following, sizes)
        if slopes is not None:
            if old is not None:
                slopes = slopes_between(old[0], starts, old[1], ends, slopes, sizes)
            following, old = chunks.predicted(starts, ends, slopes), (starts, ends)
            defects = torch.maximum(defects, chunks.defects(starts, following, sizes))
        seams.defect, count = float(defects.max()), chunks.agreeing(defects, tolerance)
        if count == chunks.count:
            return starts, slopes, count
        apart.append(seams.defect)
        earlier = apart[-1 - patience] if slopes is None or len(apart) > patience + 2 else torch.inf
        if not apart[-1] < earlier / 2:
            seams.why = f"a sweep left its seams {apart[-1]:.1e} apart, after {apart[-2]:.1e} before it."
            return starts, slopes, count
        if slopes is None:
            rows = (defects > tolerance).nonzero()[:, 0]
            following = map_state(lambda s, f, rows=rows: s.index_copy(0, rows, f[rows]), starts, following)
        tried = starts
        starts = following
    seams.why = f"after {most} sweeps the chunks did not agree."
    return tried, slopes, count


class _Plan(NamedTuple):
    size: int  # steps of a chunk
    tail: int  # how many of them find the start of the next
    remembers: bool  # whether slopes are learnt


def waits_for_steps(device: torch.device) -> bool:
    """Whether time is what one step after the other takes, and not what there is to compute."""
    return device.type == "cuda"


class _Line(NamedTuple):
    """The seconds of a run, as what each call costs and what each step does."""

    call: float
    step: float

    @staticmethod
    def of(engine: Engine, recurrence: Recurrence) -> "_Line":
        short = max(1, recurrence.steps // 4)
        few = _seconds(engine, recurrence.part(0, short, recurrence.state))
        many = _seconds(engine, recurrence)
        step = max(0.0, many - few) / max(1, recurrence.steps - short) or many / recurrence.steps
        return _Line(max(0.0, many - recurrence.steps * step), step)

    def seconds(self, steps: float, calls: float) -> float:
        return calls * self.call + steps * self.step


def _seconds(engine: Engine, recurrence: Recurrence) -> float:
    """How long a run takes, without gradients; the first may compile something."""
    device, times = leaves(recurrence.state)[0].device, []
    with torch.no_grad():
        for _ in range(5):
            begin = time.perf_counter()
            engine.run(replace(recurrence, memo=dict(recurrence.memo)))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - begin)
    return min(times[1:])


def _tell(recurrence: Recurrence, step: int) -> None:
    warnings.warn(
        f"{name_of(recurrence.f)} was run in sequence{f' from step {step:,} on' if step else ''}: it does not forget "
        f"soon enough for lf.TimeParallel(), whose report says more.",
        EngineWarning,
        stacklevel=3,
    )


def _detached(recurrence: Recurrence) -> Recurrence:
    return recurrence.on([t.detach() for t in recurrence.tensors])


def _parameters(recurrence: Recurrence) -> list[Tensor]:
    """The tensors of the module that the step reads and that a gradient goes to, each once."""
    read = parameters_of(recurrence, program_of(recurrence))
    return list({id(t): t for t in read if t.requires_grad}.values())
