"""A recurrence in pieces: few states are kept, and the steps between them are run again on the way back.

    forwards    state(0) ─────▶ state(k) ─────▶ state(2k) ─────▶ … state(τ)     kept: every k-th state
    backwards                                   state(2k) ─▶ … ─▶ state(τ)      the last piece again, then its way back
                                state(k) ─▶ … ─▶ state(2k)                      then the one before it, …

So of all that an engine makes of x before its loop, and keeps for its way back, there is one piece at a time. With
several levels, a piece of the first is itself run in pieces, whose states are kept until it is on its way back.

A piece is run in the same way both times, gradients on: by the same engine, on the same numbers in the same order. So
it gives the same states to the last bit, and each that was kept shows that it did; of the outputs of a piece, which no
state shows, a checksum does. A frozen parameter or a buffer must be the same tensor, at the same version of torch's.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from loopfold.casts import casts, with_casts
from loopfold.engines.backwards import come_many, each, held, once, partial_gradients
from loopfold.engines.base import Engine, Recurrence
from loopfold.engines.draws import generators, same_generators, set_generators
from loopfold.engines.selfcheck import TOLERANCE, out_of_sight
from loopfold.engines.sequential import where_alive
from loopfold.states import State, all_leaves, at_end, detached, leaves, map_state, name_of, parted, rebuild
from loopfold.surroundings import buffers_kept, fingerprint


def run_in_pieces(engine: Engine, recurrence: Recurrence, spacings: tuple[int, ...], only_last: bool) -> State:
    """What `engine` gives, at all steps or at each sequence's last, in pieces.

    `spacings`  how many steps lie between two states that are kept, at each level; each is a multiple of the next
    """
    run = _Run(engine, recurrence, spacings, only_last)
    results = run.forwards()
    if any(run.flows):
        results = list(_Checkpoints.apply(run, results, *recurrence.tensors, *run.sources))
    return rebuild(run.structure, results)


@dataclass(frozen=True, eq=False)
class _Checkpoint:
    """The state before a step, and where torch's generators stand: all from which steps are taken again."""

    start: int
    state: State  # detached
    needs: list[bool]  # which of its leaves have a gradient
    drawn: Any


class _Shelf:
    """Tensors of one size side by side. Each by itself would lie between two pieces in memory, and hold it up there."""

    def __init__(self, count: int) -> None:
        self.count, self.used, self.rooms = count, 0, list[Tensor]()

    def keep(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of them; themselves where they are of another kind than the first."""
        if not self.rooms:
            self.rooms = [t.new_empty(self.count, *t.shape) for t in tensors]
        places = [room[self.used] for room in self.rooms]
        if any(place.dtype != t.dtype or place.shape != t.shape for place, t in zip(places, tensors, strict=True)):
            return list(tensors)
        self.used += 1
        return [place.copy_(t) for place, t in zip(places, tensors, strict=True)]


@dataclass(eq=False)
class _Run:
    """One run, and its way back."""

    engine: Engine
    recurrence: Recurrence
    spacings: tuple[int, ...]
    only_last: bool
    structure: State = None  # of what the step returns
    flows: list[bool] = field(default_factory=list)  # which of the results have a gradient
    sources: list[Tensor] = field(default_factory=list)  # what the step reads by itself that has a gradient

    def __post_init__(self) -> None:
        full = self.recurrence
        self.start, self.device = detached(full.state), leaves(full.state)[0].device
        self.casts = casts(self.device)
        self.record = torch.is_grad_enabled()
        needs = [self.record and leaf.requires_grad for leaf in full.tensors]
        self.needs, self.given = needs[: len(leaves(self.start))], needs[len(leaves(self.start)) :]
        self.marks = fingerprint(full.f) if self.record else ()  # type: ignore[arg-type]
        self.kept: list[_Checkpoint] = []
        self.checksums: dict[int, list[Tensor]] = {}  # of the outputs of the piece that starts with a step
        self.held: list[Any] = held(full.f) if self.record else []  # parameters and buffers

    # ------------------------------------------------------------------ there

    def forwards(self) -> list[Tensor]:
        """The results: of all steps, or of each sequence's last."""
        f, results = self.recurrence.f, list[Tensor]()
        own = [p for p in f.parameters() if p.requires_grad] if isinstance(f, nn.Module) else []
        read = list[TensorWeakRef]()  # tensors that the steps make and differentiate by are gone after their piece

        def collect(at: _Checkpoint, returned: State, sources: Sequence[Tensor]) -> None:
            rows = leaves(returned)
            if not results:
                self.structure = map_state(lambda leaf: leaf.new_empty(0), returned)  # and none of its memory
                self.flows = [False] * len(rows)
                steps = () if self.only_last else (self.recurrence.steps,)
                results.extend(row.new_empty(*steps, *row.shape[1:], requires_grad=False) for row in rows)
            self.flows = [flow or row.requires_grad for flow, row in zip(self.flows, rows, strict=True)]
            for i, row in enumerate(rows):
                results[i] = self._put(results[i], row.detach(), at.start)
            there = {id(t) for t in (*own, *(ref() for ref in read))}
            read[:] = [ref for ref in read if ref() is not None]
            read.extend(TensorWeakRef(source) for source in sources if id(source) not in there)
            self.checksums[at.start] = self._checksums(returned)

        kept = self._pieces(_Checkpoint(0, self.start, self.needs, self._drawn()), self.recurrence.steps, 0, collect)
        if any(self.flows):
            self.kept, self.sources = kept, [*own, *(t for ref in read if (t := ref()) is not None)]
            # what the steps themselves have changed, such as a count of them, they may change again
            self.held = [a if a[0] is b[0] and a[1] == b[1] else None for a, b in zip(self.held, held(f), strict=False)]
        return results

    def _put(self, results: Tensor, rows: Tensor, start: int) -> Tensor:
        """The results with those of a piece among them."""
        lengths, stop = self.recurrence.lengths, start + len(rows)
        if results.dtype != rows.dtype:
            results = results.to(torch.promote_types(results.dtype, rows.dtype))
        if not self.only_last:
            results[start:stop] = rows
        elif lengths is not None:
            rows = at_end(rows, (lengths - start).clamp(1, len(rows)))
            results = torch.where(_like(self._end_in(start, stop), rows), rows, results)
        elif stop == self.recurrence.steps:
            results.copy_(rows[-1])
        return results

    def _end_in(self, start: int, stop: int) -> Tensor:
        """`[batch]`: which sequences take their last step among these."""
        lengths = self.recurrence.lengths
        assert lengths is not None
        return ((lengths > start) & (lengths <= stop)).to(self.device)

    def _pieces(
        self,
        at: _Checkpoint,
        stop: int,
        level: int,
        collect: Callable[[_Checkpoint, State, Sequence[Tensor]], None] | None = None,
    ) -> list[_Checkpoint]:
        """Run from a checkpoint to step `stop`; the checkpoints of a level from here to there, the last at `stop`."""
        kept, count = list[_Checkpoint](), -(-(stop - at.start) // self.spacings[level])
        states = _Shelf(count)
        while at.start < stop:
            if at.start % self.spacings[level] == 0:
                at = replace(at, state=rebuild(at.state, states.keep(leaves(at.state))))
                kept.append(at)
            returned, sources, _, _ = self._piece(at)
            if collect is not None:
                collect(at, returned, sources)
            at = self._after(at, returned)
            del returned  # before there is another
        return [*kept, at]

    def _piece(self, at: _Checkpoint) -> tuple[State, list[Tensor], list[Tensor], list[Tensor]]:
        """The steps up to the next checkpoint: what they return, and what they read by themselves.

        Then what they were given, and from what sequences that have ended start again, which others may see.
        """
        full = self.recurrence
        part = full.part(at.start, min(self.spacings[-1], full.steps - at.start), at.state)
        given, again = _given(part.tensors, [*at.needs, *self.given]), list[Tensor]()
        if full.lengths is not None and at.start > 0:
            again = _given(leaves(self.start), self.needs)
            part = replace(part, again=rebuild(self.start, again))
        begin = torch._C._autograd._get_sequence_nr()
        counted_here = torch.autograd.set_multithreading_enabled(False)  # what a gradient in a step makes, on a GPU too
        with torch.set_grad_enabled(self.record), counted_here, _hidden(), with_casts(self.casts, self.device):
            returned = self.engine.run(part.on(given))
            if full.lengths is not None and at.start > 0:
                # A sequence that has ended takes one step in each piece, its first again; here it is put out of sight
                running = full.alive(at.start)
                returned = map_state(lambda leaf: torch.where(_like(running, leaf, 1), leaf, _zero(leaf)), returned)
        made = range(begin, torch._C._autograd._get_sequence_nr())
        sources = _sources(returned, made, name_of(full.f)) if self.record else []
        ours = {id(t) for t in (*given, *again)}
        return returned, [t for t in sources if id(t) not in ours], given, again

    def _after(self, at: _Checkpoint, returned: State) -> _Checkpoint:
        """The checkpoint at the end of a piece."""
        full, rows = self.recurrence, parted(returned, self.start)[1]
        stop = at.start + len(leaves(rows)[0])
        state = map_state(lambda leaf: leaf[-1].detach().clone(), rows)
        if full.lengths is not None and stop < full.steps:  # as in Sequential, a sequence that has ended starts again
            running = full.alive(stop)
            state = map_state(lambda leaf, first: where_alive(running, leaf, first), state, self.start)
        drawn, needs = self._drawn(), [leaf.requires_grad for leaf in leaves(rows)]
        if drawn is not None and same_generators(drawn, at.drawn):
            drawn = at.drawn  # one for all checkpoints, where nothing is drawn
        return _Checkpoint(stop, state, needs, drawn)

    def _drawn(self) -> Any:
        return generators(leaves(self.start)[0]) if self.record else None

    # ------------------------------------------------------------------ and back

    def back(self, *incoming: Tensor | None) -> list[Tensor | None]:
        """The gradients of state(0), x, context and what the step reads by itself, in this order."""
        if fingerprint(self.recurrence.f) != self.marks:  # type: ignore[arg-type]
            raise self._changed("something that it reads has been set to another value")
        for new, old in zip(held(self.recurrence.f), self.held, strict=True):
            if old is not None and new[0] is not old[0]:
                raise self._changed("it reads another tensor")
            if old is not None and new[1] != old[1]:
                raise self._changed("a tensor that it holds was changed in place")
        like = leaves(self.start)[0]
        now, way = generators(like), _WayBack(self, incoming)
        try:
            with buffers_kept(self.recurrence.f):  # statistics that the steps add up are added up once
                self._down(self.kept, 0, way)
        finally:
            if self.kept[0].drawn is not self.kept[-1].drawn:
                set_generators(like, now)
        return way.gradients()

    def _down(self, kept: list[_Checkpoint], level: int, way: "_WayBack") -> None:
        for at, following in reversed(list(pairwise(kept))):
            if at.drawn is not following.drawn:
                set_generators(leaves(self.start)[0], at.drawn)
            if level + 1 < len(self.spacings):
                finer = self._pieces(at, following.start, level + 1)
                self._check(finer[-1], following)
                self._down(finer, level + 1, way)
            else:
                returned, sources, given, again = self._piece(at)
                self._check(self._after(at, returned), following)
                for new, old in zip(self._checksums(returned), self.checksums[at.start], strict=True):
                    if not torch.allclose(new, old, rtol=0, atol=float(old[-1]), equal_nan=True):
                        raise self._changed(f"its outputs after step {at.start} were others when they were run again")
                known = {id(t) for t in self.sources}
                others = [TensorWeakRef(t) for t in sources if id(t) not in known]
                way.take(at.start, returned, given, again)
                del returned, sources, given, again
                if any(other() is not None for other in others):  # and was not made by the steps themselves
                    raise self._changed("it reads another tensor")

    def _check(self, again: _Checkpoint, kept: _Checkpoint) -> None:
        """That a state is what it was: else the gradients would be those of something else."""
        for new, old in zip(leaves(again.state), leaves(kept.state), strict=True):
            if torch.equal(new, old):  # as it should be
                continue
            share = TOLERANCE.get(old.dtype, 0.0)
            margin = share * float(old.nan_to_num(0, 0, 0).abs().max())
            if not torch.allclose(new, old, rtol=share, atol=margin, equal_nan=True):
                raise self._changed(f"state({kept.start}) was another when it was run again")

    def _checksums(self, returned: State) -> list[Tensor]:
        """Of each output through which a gradient may come."""
        outputs = parted(returned, self.start)[0]
        with with_casts((), self.device):  # there and back alike
            return [_checksum(leaf.detach()) for leaf in all_leaves(outputs) if leaf.requires_grad]

    def _changed(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"{name_of(self.recurrence.f)} is not what it was on the way forwards: {what}. Checkpointed takes its "
            f"steps again on the way back; where they cannot be the same, use engine=lf.Sequential()."
        )


class _WayBack:
    """The gradients so far, from the last piece to the first."""

    def __init__(self, run: _Run, incoming: Sequence[Tensor | None]) -> None:
        self.run, self.incoming = run, incoming
        full = run.recurrence
        self.tensors = [*full.tensors, *run.sources]
        self.states, self.inputs = len(leaves(run.start)), len(all_leaves(full.x))
        self.carry: list[Tensor | None] = [None] * self.states
        self.by_x: list[Tensor | None] = [None] * self.inputs
        self.sums: list[Tensor | None] = [None] * (len(self.tensors) - self.states - self.inputs)
        self.again: list[Tensor | None] = [None] * self.states  # by state(0), from sequences that have ended

    def take(self, start: int, returned: State, given: list[Tensor], again: list[Tensor]) -> None:
        """Go back through a piece."""
        rows = leaves(returned)
        carries = [*[None] * (len(rows) - self.states), *self.carry]
        arriving = [self._arriving(start, *each) for each in zip(rows, self.incoming, carries, strict=True)]
        pairs = [(r, g) for r, g in zip(rows, arriving, strict=True) if g is not None and r.requires_grad]
        wanted = [*given, *self.run.sources, *again]
        found: list[Tensor | None] = [None] * len(wanted)
        places = [i for i, t in enumerate(wanted) if t.requires_grad]
        if pairs and places:
            ends, gs = zip(*pairs, strict=True)
            gradients = partial_gradients(ends, [wanted[i] for i in places], gs)
            for i, gradient in zip(places, gradients, strict=True):
                found[i] = gradient
        if again:
            running = self.run.recurrence.alive(start)
            _add_up(self.again, found[-self.states :])
            _add_up(self.again, [None if g is None else where_alive(~running, g, 0) for g in found[: self.states]])
            found = found[: -self.states]
        self.carry, others = found[: self.states], found[self.states :]
        for i, g in enumerate(others[: self.inputs]):
            if g is not None:
                whole = self.by_x[i]
                whole = self.by_x[i] = torch.zeros_like(self.tensors[self.states + i]) if whole is None else whole
                whole[start : start + len(g)] = g
        _add_up(self.sums, others[self.inputs :])

    def _arriving(self, start: int, rows: Tensor, g: Tensor | None, carry: Tensor | None) -> Tensor | None:
        """What comes to the results of a piece: from the loss, and from the piece after it by its last state."""
        lengths, stop, last = self.run.recurrence.lengths, start + len(rows), self.run.recurrence.steps
        whole = None if g is None or self.run.only_last else g[start:stop].to(rows.dtype)
        if g is not None and self.run.only_last:
            if lengths is None:
                carry = g if stop == last else carry
            elif bool((here := self.run._end_in(start, stop)).any()):
                whole = torch.zeros_like(rows)
                at = (lengths - start - 1).clamp(0, len(rows) - 1).to(rows.device)
                whole[at, torch.arange(len(at), device=rows.device)] = where_alive(here, g, 0).to(rows.dtype)
        if carry is None:
            return whole
        if lengths is not None and stop < last:
            carry = where_alive(self.run.recurrence.alive(stop), carry, 0)
        new = torch.zeros_like(rows) if whole is None else whole.clone(memory_format=torch.contiguous_format)
        new[-1].add_(carry)
        return new

    def gradients(self) -> list[Tensor | None]:
        _add_up(self.carry, self.again)
        found = [*self.carry, *self.by_x, *self.sums]
        return [None if g is None else g.to(t.dtype) for g, t in zip(found, self.tensors, strict=True)]


def _add_up(sums: list[Tensor | None], more: Sequence[Tensor | None]) -> None:
    for i, part in enumerate(more):
        if part is not None:
            wide = part.float() if part.dtype in (torch.float16, torch.bfloat16) else part  # a sum of many
            old = sums[i]
            sums[i] = wide if old is None else old + wide


def _given(tensors: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    return [t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]


class _Checkpoints(torch.autograd.Function):
    """A run in pieces as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, run: _Run, results: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.save_for_backward(*tensors)  # as the run holds them, but torch sees here whether they are changed in place
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[r for r, flow in zip(results, run.flows, strict=True) if not flow])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Any, ...]:
        sources = [t for t in (*ctx.saved_tensors, *incoming) if t is not None and t.requires_grad]
        if all(g is None for g in incoming):
            return (None,) * len(ctx.needs_input_grad)
        with torch.no_grad():
            results = each(ctx.run.back, incoming) if come_many(incoming) else ctx.run.back(*incoming)
        if torch.is_grad_enabled():  # this gradient may be differentiated in turn
            results = once("Checkpointed", results, sources)
        return (None, None, *results)


def _like(mask: Tensor, leaf: Tensor, before: int = 0) -> Tensor:
    """`mask [batch]` in the shape that goes with a leaf, `[batch, …]`, or with one that has dimensions `before` it."""
    return mask.view(*[1] * before, -1, *[1] * (leaf.dim() - before - 1))


def _zero(leaf: Tensor) -> Any:
    return False if leaf.dtype == torch.bool else 0


def _checksum(rows: Tensor) -> Tensor:
    """What `rows [steps, …]` hold, in few numbers: a sum in which each place has its own weight, the norm, a margin.

    Within the margin lie rows that differ by rounding, as they may on a GPU.
    """
    rows = torch.view_as_real(rows.resolve_conj()) if rows.is_complex() else rows
    flat = rows.nan_to_num(0, 0, 0).flatten(1).to(torch.promote_types(rows.dtype, torch.float32))
    by_step, by_place = (torch.linspace(0.5, 1.5, n, dtype=flat.dtype, device=flat.device) for n in flat.shape)
    norm = torch.linalg.vector_norm(flat)
    margin = (TOLERANCE.get(rows.dtype, 0.0) * norm).nan_to_num(0, 0, 0)
    return torch.stack([by_step @ (flat @ by_place), norm, margin])


def _sources(returned: State, made: range, name: str) -> list[Tensor]:
    """The tensors that autograd's graph of some results goes back to, where its nodes have the numbers `made`.

    Each thread counts its own nodes, so that one of another thread is seen by its number in most cases.
    """
    found, seen = list[Tensor](), set[Any]()
    nodes: list[Any] = [leaf.grad_fn for leaf in leaves(returned)]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            found.append(node.variable)
        elif node._sequence_nr() not in made:
            raise ValueError(
                f"Checkpointed cannot run {name}: it reads a tensor that has a gradient and was computed outside of "
                f"it ({node.name()}). Compute it in the step, give it as context=, or use engine=lf.Sequential()."
            )
        else:
            nodes += [inner for inner, _ in node.next_functions]
    return found


def _hidden() -> AbstractContextManager[Any]:
    """While open, hooks on what autograd saves are not called: a piece goes back to nothing."""
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    return out_of_sight() if hooked else nullcontext()
