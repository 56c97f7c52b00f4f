"""The way back through chunks of time: what comes to the start of a chunk goes on from the end of the one before it."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from loopfold.casts import with_casts
from loopfold.engines.backwards import come_many, each, held, once, partial_gradients
from loopfold.engines.base import Engine, EngineWarning, Recurrence
from loopfold.engines.chunks import MOST, Chunks, Piece, Seams, times
from loopfold.states import State, all_leaves, leaves, name_of
from loopfold.surroundings import fingerprint


@dataclass(frozen=True, eq=False)
class Work:
    """What the way back needs besides the graphs of the pieces."""

    inner: Engine
    recurrence: Recurrence
    chunks: Chunks
    tolerance: float
    seams: Seams
    marks: "Marks"  # of the step, as it was
    slopes: State | None = None  # of the chunks, where they remember


class Marks:
    """What a step reads by itself, as it is now."""

    def __init__(self, f: Any) -> None:
        assert isinstance(f, nn.Module)
        self.around, self.held = fingerprint(f), held(f)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Marks) or self.around != other.around:
            return False
        return all(a is b and v == w for (a, v), (b, w) in zip(self.held, other.held, strict=True))


class WayBack(torch.autograd.Function):
    """The states as they are; and back, the gradients of the chunks, until no more comes through a seam.

    Gradients are linear in what arrives. So the first pass carries what comes to all states, with nothing at the ends
    of chunks; each later one only what has come to the start of the chunk after; and all of them are summed up.
    """

    @staticmethod
    def forward(ctx: Any, work: Work, whole: list[Tensor], pieces: list[Piece], *tensors: Tensor) -> Any:
        ctx.work = work
        # what is saved keeps the graphs of the pieces alive, and lets go of them when autograd does
        inner = [t for piece in pieces for t in (*piece.given.tensors, *leaves(piece.out))]
        ctx.save_for_backward(*inner, *tensors)
        ctx.lengths = [piece.given.lengths for piece in pieces]
        ctx.set_materialize_grads(False)
        flows = [any(t.requires_grad for t in parts) for parts in zip(*(leaves(p.out) for p in pieces), strict=True)]
        ctx.mark_non_differentiable(*[leaf for leaf, flow in zip(whole, flows, strict=True) if not flow])
        return tuple(whole)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> Any:
        if all(g is None for g in incoming):
            return (None,) * len(ctx.needs_input_grad)
        work, count = ctx.work, len(ctx.work.recurrence.tensors)
        saved = list(ctx.saved_tensors)
        tensors = saved[-(len(ctx.needs_input_grad) - 3) :]
        each_piece = count + len(incoming)
        graphs = [
            _Graph(own[:count], own[count:], tensors[count:], lengths)
            for i, lengths in enumerate(ctx.lengths)
            for own in [saved[i * each_piece : (i + 1) * each_piece]]
        ]

        def back(*arriving: Tensor | None) -> list[Tensor | None]:
            return _backwards(work, graphs, tensors, arriving)

        with torch.no_grad():
            results = each(back, incoming) if come_many(incoming) else back(*incoming)
        if torch.is_grad_enabled():
            sources = [t for t in (*tensors, *incoming) if t is not None and t.requires_grad]
            results = once("TimeParallel", results, sources)
        return (None, None, None, *results)


@dataclass(frozen=True, eq=False)
class _Graph:
    """A piece for autograd: from its tensors, and those of the module, to what it gave."""

    tensors: list[Tensor]
    out: list[Tensor]
    parameters: list[Tensor]
    lengths: Tensor | None = None  # [rows]

    def back(self, incoming: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the tensors, then of the parameters."""
        pairs = [(t, g) for t, g in zip(self.out, incoming, strict=True) if g is not None and t.requires_grad]
        sources = (*self.tensors, *self.parameters)
        wanted = [t for t in sources if t.requires_grad]
        if not pairs:
            return [None] * len(sources)
        outputs, gradients = zip(*pairs, strict=True)
        found = iter(partial_gradients(outputs, wanted, gradients, keep=True))
        return [next(found) if t.requires_grad else None for t in sources]

    def with_ends(self, incoming: list[Tensor | None], arriving: Sequence[Tensor | None]) -> list[Tensor | None]:
        """What comes to all states, in which room is made for what arrives at the last ones."""
        for i, g in enumerate(arriving, len(incoming) - len(arriving)):  # an output comes before the state
            if g is None:
                continue
            whole = incoming[i] = torch.zeros_like(self.out[i]) if incoming[i] is None else incoming[i]
            assert whole is not None
            if self.lengths is None:
                whole[-1] += g
            else:
                whole[self.lengths - 1, torch.arange(len(g), device=g.device)] += g
        return incoming


def _backwards(
    work: Work, graphs: list[_Graph], tensors: list[Tensor], incoming: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of the tensors of the recurrence and of the module."""
    chunks, seams, states = work.chunks, work.seams, len(leaves(work.recurrence.state))
    inside = torch.arange(chunks.size, device=chunks.lengths.device)[:, None] < chunks.lengths

    def laid_out(g: Tensor) -> Tensor:
        folded = chunks.fold(g)
        if not chunks.even:
            return torch.where(inside.view(*inside.shape, *[1] * (g.dim() - 2)), folded, 0)
        return folded.clone() if folded.data_ptr() == g.data_ptr() else folded  # it will be added to

    folded = [None if g is None else laid_out(g) for g in incoming]
    totals: list[list[Tensor | None]] = [[None] * (len(g.tensors) + len(g.parameters)) for g in graphs]
    scales: list[Any] = [0.0] * states
    arriving: list[Tensor | None] = [None] * states
    slopes = [None] * states if work.slopes is None else leaves(work.slopes)
    sizes: list[float] = []
    seams.backward_sweeps, seams.backward_in_sequence_to = 0.0, None
    for turn in range(MOST * len(graphs)):
        p = -1 - turn % len(graphs)
        begin, steps = chunks.pieces[p]
        if turn == len(graphs):
            folded = [None] * len(folded)  # what comes from outside has come to all pieces
        given = [None if g is None else g[begin : begin + steps] for g in folded]
        found = graphs[p].back(graphs[p].with_ends(given, arriving))
        totals[p] = [a if b is None else b if a is None else a + b for a, b in zip(totals[p], found, strict=True)]
        seams.backward_sweeps += steps / chunks.size
        scales = [
            s if g is None else torch.maximum(_by_number(chunks, g).amax(0), torch.as_tensor(s).to(g))
            for s, g in zip(scales, found, strict=False)
        ]  # [batch, numbers of a state]
        left = found[:states]
        at_seams = p == -len(graphs)
        if at_seams:  # from the start of a chunk to the end of the one before it, less what was carried there before
            known = zip(left, arriving, slopes, strict=True)
            left = [g if g is None or d is None or a is None else g - times(a, d) for g, d, a in known]
            left = [None if g is None else chunks.before(g) for g in left]
            carried = zip(left, slopes, strict=True)
            arriving = [g if g is None or a is None else chunks.predicted_back(g, a) for g, a in carried]
        else:
            arriving = left
        shares = [
            (_by_number(chunks, g) / torch.where(s == 0, 1, s)).flatten(1).amax(1)
            for g, s in zip(arriving, scales, strict=True)
            if g is not None
        ]  # of each chunk; or NaN
        share = torch.stack([s.to(shares[0]) for s in shares]).amax(0) if shares else torch.zeros(1)
        sizes.append(float(share.max()))
        if turn >= len(graphs) - 1 and sizes[-1] <= work.tolerance:
            seams.backward_agreed, seams.backward_defect = True, sizes[-1]
            return _gathered(work, totals)
        if at_seams and turn >= 2 * len(graphs) - 1 and not sizes[-1] < sizes[-1 - len(graphs)] / 2:
            break
    seams.backward_agreed = False
    last = int((~(share <= work.tolerance)).nonzero()[-1, 0]) + 1  # chunks to whose ends more than nothing arrives
    seams.backward_in_sequence_to = last * chunks.size
    more = _in_sequence(work, tensors, left, last * chunks.size)
    found = _gathered(work, totals)
    return [a if b is None else b if a is None else a + b for a, b in zip(found, more, strict=True)]


def _by_number(chunks: Chunks, g: Tensor) -> Tensor:
    """`[chunks, batch, numbers of a state]`: how large each number is at the seam of each chunk."""
    return g.reshape(chunks.count, chunks.batch, -1).abs()


def _gathered(work: Work, totals: list[list[Tensor | None]]) -> list[Tensor | None]:
    """The gradients of all pieces and chunks together, as the recurrence has its tensors."""
    chunks, recurrence = work.chunks, work.recurrence
    states, count = len(leaves(recurrence.state)), len(recurrence.tensors)
    sequences = states + len(all_leaves(recurrence.x))
    found: list[Tensor | None] = []
    for i, parts in enumerate(zip(*totals, strict=True)):
        there = [g for g in parts if g is not None]
        if i < states:
            found.append(None if parts[0] is None else parts[0][: chunks.batch])
        elif not there:
            found.append(None)
        elif i < sequences:
            found.append(chunks.unfold(parts))
        elif i < count:
            found.append(sum(there).reshape(chunks.count, chunks.batch, *there[0].shape[1:]).sum(0))
        else:
            found.append(sum(there))
    return found


def _in_sequence(work: Work, tensors: list[Tensor], left: list[Tensor | None], steps: int) -> list[Tensor | None]:
    """What the first `steps` steps, run in sequence, give of what is left at the ends of their chunks.

    For steps whose gradients are not forgotten. Gradients are linear, so it is what the sum so far lacks.
    """
    recurrence, chunks, count = work.recurrence, work.chunks, len(work.recurrence.tensors)
    if Marks(recurrence.f) != work.marks:
        raise RuntimeError(
            f"{name_of(recurrence.f)} was changed between its run and its gradients, which need another run. Change "
            f"it after backward(), or use engine=lf.Auto()."
        )
    warnings.warn(
        f"The gradients of {name_of(recurrence.f)} before step {steps:,} were computed by a run in sequence: they do "
        f"not fade soon enough for lf.TimeParallel().",
        EngineWarning,
        stacklevel=2,
    )
    own = [t.detach().requires_grad_(t.requires_grad) for t in tensors[:count]]
    with torch.enable_grad(), with_casts((), own[0].device):
        whole = replace(recurrence.on(own), memo={})
        out = leaves(work.inner.run(whole.part(0, steps, whole.state)))
    incoming: list[Tensor | None] = [None] * (len(out) - len(left))
    for row, g in zip(out[len(incoming) :], left, strict=True):
        if g is not None:
            arriving = torch.zeros_like(row)
            arriving[chunks.size - 1 :: chunks.size] = g[: steps // chunks.size * chunks.batch].view(
                -1, chunks.batch, *g.shape[1:]
            )
            incoming.append(arriving)
        else:
            incoming.append(None)
    return _Graph(own, out, tensors[count:]).back(incoming)
