"""Chunks of time, side by side as sequences of one batch; and whether each begins where the one before it ends.

    one sequence, τ = 9, chunks of 3                 the same as a batch, whose rows are the chunks

    x(1) x(2) x(3) | x(4) x(5) x(6) | x(7) …         x(1) x(2) x(3)    from state(0)
                                                     x(4) x(5) x(6)    from a guess of state(3)
                   ↑ a seam: state(3)                x(7) x(8) x(9)    from a guess of state(6)

Of a batch of several sequences, row `k · batch + i` is chunk k of sequence i. A chunk that begins after its sequence's
end is dead: it starts from state(0), as a sequence that has ended does in `Sequential`, and nothing is read of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loopfold.engines.base import Engine, Recurrence
from loopfold.engines.sequential import where_alive
from loopfold.states import State, at_end, detached, leaves, map_state, parted, until_the_end

MOST = 8  # sweeps, or chunks over which a state may be remembered


@dataclass(eq=False)
class Seams:
    """What a run of `TimeParallel` found: in how many sweeps its chunks came to agree, and how well.

    A sweep is a run of all chunks; one of some chunks, or of some of their steps, counts for its share.
    `defect` is the largest distance between the end of a chunk and the start of the next, each number of the state
    as a share of the largest that it is in the two chunks that meet there; `backward_defect` the largest gradient at a
    seam that was not carried on, as a share of the largest one of the same number there. Both are None where they were
    not measured.
    """

    agreed: bool = False  # whether all chunks were run side by side, and agreed
    why: str = ""  # why they did not
    in_sequence_from: int | None = None  # the step, counted from 0, from which on it was run in sequence, if it was
    chunks: int = 1  # side by side
    chunk: int = 0  # steps of one
    forgets: int | None = None  # steps after which two states are one, as measured beforehand
    sweeps: float = 0.0
    defect: float | None = None
    backward_agreed: bool | None = None  # None: no gradient has come back yet
    backward_in_sequence_to: int | None = None  # the step up to which they did not, and came from a run in sequence
    backward_sweeps: float = 0.0
    backward_defect: float | None = None


def distance(a: State, b: State, scale: State | None = None) -> Tensor:
    """`[batch]`: how far two states are apart, measured by the largest number of each tensor of them, row by row.

    With a `scale`, each number is measured by its own: a small one beside a large one counts as much as that.

    >>> one, other = torch.tensor([[4.0, 1.0], [0.0, 0.0]]), torch.tensor([[4.0, 2.0], [0.0, 0.0]])
    >>> distance(one, other), distance(one, other, torch.tensor([[4.0, 2.0], [1.0, 1.0]]))
    (tensor([0.2500, 0.0000]), tensor([0.5000, 0.0000]))
    """
    found = []
    scales = [None] * len(leaves(a)) if scale is None else leaves(scale)
    for x, y, own in zip(leaves(a), leaves(b), scales, strict=True):
        x, y = (t.reshape(len(t), -1) for t in (x, y))
        share = torch.full((len(x),), torch.inf, device=x.device)  # of whole numbers, which are the same or are not
        if x.is_floating_point() and x.shape[1]:
            size = torch.maximum(x.abs(), y.abs())
            size = size.amax(1, keepdim=True) if own is None else torch.maximum(size, own.reshape(x.shape))
            shares = torch.where(size.isfinite(), (x - y).abs() / size, torch.inf)
            share = torch.where(x == y, 0, shares).amax(1)
        found.append(torch.where((x == y).all(1), 0, share))
    return torch.stack([share.to(found[0].dtype) for share in found]).amax(0)


def largest(leaf: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """The largest size of a number over some dimensions."""
    return torch.maximum(leaf.amax(dims), -leaf.amin(dims)) if leaf.is_floating_point() else leaf.amax(dims)


@dataclass(frozen=True, eq=False)
class Piece:
    """What the inner engine gave for some steps of chunks, and the state at the end of each."""

    given: Recurrence
    out: State  # as an engine returns it
    ends: State  # [rows, …]
    sizes: State  # [rows, …], the largest that each number of the state was at any of these steps


def slopes_between(old: State, starts: State, old_ends: State, ends: State, slopes: State, sizes: State) -> State:
    """How far the end of each chunk moves with its start, number by number: the secant through two sweeps.

    A number that is kept, added to or faded out by itself has a slope from 0 to 1, as the cells of an LSTM have; one
    that is mixed with others has none, and counts as forgotten. What has hardly moved keeps its slope.
    """

    def of(s0: Tensor, s1: Tensor, e0: Tensor, e1: Tensor, slope: Tensor, size: Tensor) -> Tensor:
        if not s0.is_floating_point():
            return slope
        moved = s1 - s0
        new = (e1 - e0) / torch.where(moved == 0, 1, moved)
        new = torch.where((new >= 0) & (new <= 1.1), new.clamp(max=1), 0)  # 1 is rounded to more, too
        return torch.where(moved.abs() > torch.finfo(s0.dtype).eps ** 0.5 * size, new, slope)

    return map_state(of, old, starts, old_ends, ends, slopes, sizes)


def carried_on(given: Tensor, slope: Tensor, batch: int) -> Tensor:
    """`y(k) = given(k) + slope(k) y(k-1)`, for chunks of `batch` rows: in log₂ of their number of operations.

    >>> carried_on(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([9.0, 2.0, 3.0, 4.0]), 1)
    tensor([ 1.,  2.,  6., 25.])
    """
    y, rows = given, batch
    while rows < len(y):
        y = torch.cat([y[:rows], y[rows:] + times(slope[rows:], y[:-rows])])
        slope = torch.cat([slope[:rows], slope[rows:] * slope[:-rows]])
        rows *= 2
    return y


def times(slope: Tensor, other: Tensor) -> Tensor:
    """What is left of something; nothing of what is forgotten, even if it is no number."""
    return torch.where(slope == 0, 0, slope * other)


class Chunks:
    """A recurrence cut into chunks of `size` steps; what is read is laid out once.

    The last `tail` steps of the chunks are a piece by themselves, of which the start of the next chunk is found, and
    through which alone a gradient comes that is forgotten on the way.
    """

    def __init__(self, recurrence: Recurrence, inner: Engine, size: int, tail: int) -> None:
        self.recurrence, self.inner, self.size = recurrence, inner, size
        start = leaves(recurrence.state)[0]
        self.batch, self.count = len(start), -(-recurrence.steps // size)
        self.rows = self.batch * self.count
        self.pieces = [(0, size)] if tail >= size else [(0, size - tail), (size - tail, tail)]
        lengths = recurrence.lengths
        whole = torch.full((self.batch,), recurrence.steps) if lengths is None else lengths
        begins = torch.arange(self.count, device=start.device)[:, None] * size
        self.lengths = (whole.to(start.device) - begins).flatten()  # [rows], of each chunk; less than 1: it is dead
        self.even = bool((self.lengths >= size).all())
        self.start = map_state(self.repeated, recurrence.state)  # state(0), for every chunk
        self.x = None if recurrence.x is None else map_state(self.fold, recurrence.x)
        self.index = None if recurrence.index is None else self.fold(recurrence.index)
        self.context = None if recurrence.context is None else map_state(self.repeated, recurrence.context)

    def first(self, count: int) -> "Chunks":
        """The first of the chunks alone."""
        start = self.recurrence.part(0, min(count * self.size, self.recurrence.steps), self.recurrence.state)
        return Chunks(start, self.inner, self.size, self.pieces[-1][1])

    # ---- the layout

    def repeated(self, leaf: Tensor) -> Tensor:
        """`[batch, …]` for every chunk: `[rows, …]`."""
        return leaf.expand(self.count, *leaf.shape).reshape(self.rows, *leaf.shape[1:])

    def fold(self, leaf: Tensor) -> Tensor:
        """`[τ, batch, …]` as chunks side by side, `[size, rows, …]`; what is missing at the end is the first row."""
        missing = self.count * self.size - len(leaf)
        if missing:
            leaf = torch.cat([leaf, leaf[:1].expand(missing, *leaf.shape[1:])])
        chunks = leaf.reshape(self.count, self.size, *leaf.shape[1:]).transpose(0, 1)
        return chunks.reshape(self.size, self.rows, *leaf.shape[2:])

    def unfold(self, parts: Sequence[Tensor | None]) -> Tensor:
        """The pieces of chunks `[steps, rows, …]` as `[τ, batch, …]`; zero for None, and after a sequence's end."""
        like = next(part for part in parts if part is not None)
        whole = like.new_empty(self.count, self.size, self.batch, *like.shape[2:])
        for part, (begin, steps) in zip(parts, self.pieces, strict=True):
            place = whole[:, begin : begin + steps]
            if part is None:
                place.zero_()
            else:
                place.copy_(part.reshape(steps, self.count, *whole.shape[2:]).transpose(0, 1))
        whole = whole.flatten(0, 1)[: self.recurrence.steps].data  # no view to autograd: it may be changed in place
        return until_the_end(whole, self.recurrence.lengths)

    # ---- runs

    def part(self, begin: int, steps: int, starts: State, rows: Tensor | None = None) -> Recurrence:
        """Some steps of all chunks, or of some of them, from a state for each; no gradient goes back from it."""

        def cut(leaf: Tensor) -> Tensor:
            leaf = leaf[begin : begin + steps]
            return leaf if rows is None else leaf[:, rows]

        def of(leaf: Tensor) -> Tensor:
            return leaf if rows is None else leaf[rows]

        lengths = None
        if not self.even:
            left = of(self.lengths) - begin
            lengths = None if bool((left >= steps).all()) else left.clamp(1, steps)
            starts = map_state(lambda s, s0: where_alive(left > 0, s, of(s0)), starts, self.start)
        return replace(
            self.recurrence,
            x=None if self.x is None else map_state(cut, self.x),
            steps=steps,
            state=starts,
            lengths=lengths,
            context=None if self.context is None else map_state(of, self.context),
            index=None if self.index is None else cut(self.index),
            memo=dict(self.recurrence.memo),
        )

    def to_end(self, begin: int, starts: State, rows: Tensor | None = None) -> Piece:
        """The chunks from step `begin` on, before which they are in `starts`; without a gradient."""
        with torch.no_grad():
            return self.ran(self.part(begin, self.size - begin, starts, rows))

    def ran(self, part: Recurrence) -> Piece:
        out = self.inner.run(part)
        states = parted(out, part.state)[1]
        sizes = map_state(lambda leaf: largest(leaf.detach(), 0), states)
        return Piece(part, out, map_state(lambda leaf: at_end(leaf, part.lengths), states), sizes)

    def run(self, starts: State, track: Sequence[bool] | None = None) -> list[Piece]:
        """All chunks from `starts`, piece by piece; with `track` each has a graph of its own for the way back.

        It says which of the tensors of the recurrence a gradient goes to; one goes to the starts of chunks anyway.
        """
        found: list[Piece] = []
        for begin, steps in self.pieces:
            part = self.part(begin, steps, detached(found[-1].ends if found else starts))
            if track is not None:
                wanted = [*(t.is_floating_point() for t in leaves(starts)), *track[len(leaves(starts)) :]]
                part = part.on(t.detach().requires_grad_(w) for t, w in zip(part.tensors, wanted, strict=True))
            found.append(self.ran(part))
        return found

    # ---- seams

    def after(self, ends: State) -> State:
        """The start of each chunk, where the one before it ends in `ends`; the first starts from state(0)."""
        return map_state(lambda s0, e: torch.cat([s0[: self.batch], e[: -self.batch]]), self.start, ends)

    def before(self, starts: Tensor) -> Tensor:
        """What comes to the end of each chunk, where this comes to the start of the next one; nothing to the last."""
        return torch.cat([starts[self.batch :], torch.zeros_like(starts[: self.batch])])

    def predicted(self, starts: State, ends: State, slopes: State) -> State:
        """The start of each chunk, where the end of a chunk moves `slopes` times as far as its start, number by number.

        start(k+1) = end(k) + slope(k) moved(k), where moved(k) = start(k) − the start of k before
        """

        def of(start: Tensor, slope: Tensor, after: Tensor) -> Tensor:
            if not start.is_floating_point():
                return after
            slope = torch.cat([torch.zeros_like(slope[: self.batch]), slope[: -self.batch]])
            moved = carried_on(after - start, slope, self.batch)
            return after + times(slope, torch.cat([torch.zeros_like(moved[: self.batch]), moved[: -self.batch]]))

        return map_state(of, starts, slopes, self.after(ends))

    def predicted_back(self, arriving: Tensor, slope: Tensor) -> Tensor:
        """The same for gradients: what arrives at the end of a chunk, with what of it goes on to those before it."""
        slope = self.before(slope)
        back = arriving.unflatten(0, (self.count, -1)).flip(0), slope.unflatten(0, (self.count, -1)).flip(0)
        on = carried_on(back[0].flatten(0, 1), back[1].flatten(0, 1), self.batch)
        return on.unflatten(0, (self.count, -1)).flip(0).flatten(0, 1)

    def agreeing(self, defects: Tensor, tolerance: float) -> int:
        """How many chunks, from the first on, start where the one before them ends."""
        return int((defects <= tolerance).view(self.count, self.batch).all(1).long().cumprod(0).sum())

    def defects(self, starts: State, following: State, *sizes: State) -> Tensor:
        """`[rows]`: how far each chunk starts from where it should, `following`; 0 for dead ones.

        Each number is measured by the largest that it was in the two chunks that meet, of which `sizes` are those of
        all chunks: by another's it could not be seen, by one long ago it could be anything, and by its own at this
        seam it may be nothing but rounding.
        """

        def nearby(*parts: Tensor) -> Tensor:
            own = torch.stack(parts).amax(0)
            return torch.maximum(own, torch.cat([own[: self.batch], own[: -self.batch]]))

        apart = distance(starts, following, map_state(nearby, *sizes))
        return torch.where(self.lengths > 0, apart, 0)
