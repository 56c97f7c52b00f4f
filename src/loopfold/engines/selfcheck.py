"""Compiled runs check themselves: one of their steps is taken again by the user's own `f`, and compared.

A trace fixes what Python was at one moment, and no fingerprint of Python's world is complete. So one step t, drawn at
random, is run as it stands, from the state before it,

    state(t) = f(state(t-1), x(t))

and must be what the engine gave; now and then the gradients of two steps are compared too. The first runs of a program
are always checked, and the first of every batch size; later ones as often as keeps the cost at a hundredth of the time
that running takes.
"""

import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from loopfold.casts import Casts, casts, with_casts
from loopfold.engines.backwards import come_many
from loopfold.engines.base import Recurrence
from loopfold.engines.draws import replayed
from loopfold.engines.sequential import Sequential, where_alive
from loopfold.states import State, detached, has_a_gradient, leaves, parted, rebuild
from loopfold.stepgraph.aten import aten, op_name
from loopfold.stepgraph.graph import NotRun, Unsound
from loopfold.surroundings import fingerprint

SHARE = 0.01  # of the time that runs take
FIRST = 3  # runs of a program that are checked whatever it costs
KINDS = 64  # of runs, the first of which is checked: after that, batch sizes are taken to be arbitrary
GUARDED = 1 / 8  # of the later checks, those that look at gradients too
# How far rounding may take one step apart: of the largest value of a tensor
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
NEIGHBOURS = (16, 112)  # nearby inputs, by which it is found whether rounding explains more than that; if not, more

_draw = random.Random()  # its own: the user's random numbers are not touched


@dataclass(eq=False)
class Watch:
    """When the runs of a program are checked, and what was found."""

    distrusted: str | None = None  # why the program is not used any more
    runs: int = 0
    credit: float = 0.0  # seconds that checks may take
    cost: float = 0.0  # of the last check, in seconds
    kinds: set[Any] = field(default_factory=set)  # of runs that were checked: batch size, lengths or none, …
    guards: int = 0  # runs whose gradients were to be compared too
    pending: tuple[Tensor, Any, int] | None = None  # on a GPU: an answer to come, the event it waits for, the step

    engines: dict[str, "Watch"] = field(default_factory=dict)  # each engine compiles for itself

    def of(self, engine: str) -> "Watch":
        return self.engines.setdefault(engine, Watch())

    def due(self, seconds: float, kind: Any) -> bool:
        """Whether to check the run that has just taken so long: one of the first, the first of its kind, or in turn."""
        self.runs += 1
        self.credit += SHARE * seconds
        new = kind not in self.kinds and len(self.kinds) < KINDS
        if new:
            self.kinds.add(kind)
        return new or self.runs <= FIRST or self.credit >= self.cost

    def paid(self, seconds: float) -> None:
        self.cost = seconds
        self.credit = self.credit - seconds if self.runs > FIRST else 0.0

    def guards_gradients(self) -> bool:
        """Whether the gradients of this run, which is checked, are to be compared too."""
        if self.guards >= FIRST and _draw.random() > GUARDED:
            return False
        self.guards += 1
        return True

    def doubts(self) -> list[int]:
        """The step of which a check on a GPU has found that it disagrees; asked without waiting."""
        pending = self.pending
        if pending is None or not pending[1].query():
            return []
        self.pending = None
        return [] if bool(pending[0]) else [pending[2]]

    def ask(self, agrees: Tensor, t: int) -> None:
        """Note a check whose answer is still on its way from the GPU."""
        answer = torch.ones((), dtype=torch.bool, pin_memory=True)
        answer.copy_(agrees, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(agrees.device))
        self.pending = (answer, event, t)


# ------------------------------------------------------------------ one step forwards


def step_to_check(recurrence: Recurrence, runs: int) -> int:
    """A step that some sequence still takes: the last, the first, then any."""
    last = recurrence.steps if recurrence.lengths is None else int(recurrence.lengths.max())
    return {1: last - 1, 2: 0}.get(runs, _draw.randrange(last))


def disagreement(recurrence: Recurrence, states: State, t: int, rough: torch.dtype | None = None) -> str | None:
    """In words, how step t of `states` differs from what `f` gives there; None where it does not.

    `rough` is the dtype of the fewest digits that the step computes with, if that is another than those of its results.
    """
    return _differ(*_compared(recurrence, states, t), f"state({t + 1})", rough)


def agrees_later(recurrence: Recurrence, states: State, t: int, rough: torch.dtype | None) -> Tensor:
    """On a GPU, whether step t agrees within `TOLERANCE`, as a tensor, for which nothing waits."""
    ours, step, inputs = _compared(recurrence, states, t)
    theirs = step(*inputs)
    return torch.stack(_within(ours, theirs, _margins(theirs, inputs, rough))).all()


def _compared(recurrence: Recurrence, states: State, t: int) -> tuple[list[Tensor], Any, list[Tensor]]:
    """What the engine gave at step t; the step as a function of tensors; and the tensors that it was taken from."""
    ours = [_number(leaf[t].detach()) for leaf in leaves(states)]
    one = recurrence.part(t, 1, state_before(recurrence, states, t))
    alive = None if recurrence.lengths is None else recurrence.alive(t)

    def step(*tensors: Tensor) -> list[Tensor]:  # gradients on or off as they are: a step may ask
        small, device = one.on(tensors), tensors[0].device
        with out_of_sight(), replayed(one.draws), with_casts(casts(device), device):
            new = [leaf.detach() for leaf in leaves(small.take(small.state, 0))]
        return [_number(leaf if alive is None else where_alive(alive, leaf, 0)) for leaf in new]

    return ours, step, [leaf.detach() for leaf in one.tensors]


def _number(leaf: Tensor) -> Tensor:
    """A tensor of truth values, of whole or of complex numbers, as one that can be compared like the others."""
    if leaf.is_complex():
        return torch.view_as_real(leaf.resolve_conj())
    return leaf if leaf.is_floating_point() else leaf.double()


def state_before(recurrence: Recurrence, states: State, t: int) -> State:
    """The state that step t is taken from; a sequence that has ended starts again, as it does in `Sequential`."""
    start = detached(recurrence.state)
    if t == 0:
        return start
    before = [leaf[t - 1].detach() for leaf in leaves(parted(states, start)[1])]
    if recurrence.lengths is not None:
        alive = recurrence.alive(t)
        before = [where_alive(alive, b, s) for b, s in zip(before, leaves(start), strict=True)]
    return rebuild(start, before)


def out_of_sight() -> Any:
    """While open, what autograd saves is hidden from torch.utils.checkpoint, which counts it.

    A result that was saved as it is would hold itself in memory for ever; detached, it does not. As torch does, it
    raises an error where a step has since changed in place what the way back needs.
    """

    def save(tensor: Tensor) -> tuple[Tensor, int]:
        return tensor.detach(), 0 if tensor.is_inference() else tensor._version

    def load(saved: tuple[Tensor, int]) -> Tensor:
        tensor, version = saved
        if not tensor.is_inference() and tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {tuple(tensor.shape)}. lf.Sequential() cannot differentiate the step either."
            )
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(save, load)


# ------------------------------------------------------------------ is it rounding?


def _differ(
    ours: Sequence[Tensor],
    evaluate: Callable[..., list[Tensor]],
    inputs: list[Tensor],
    what: str,
    rough: torch.dtype | None,
) -> str | None:
    """How `ours` differs from `evaluate(*inputs)` by more than rounding explains.

    A step may be badly conditioned, or jump, or cancel large terms: then its results spread as widely when its inputs,
    and all that it computes on the way, are a few roundings off. Whatever lies about those is accepted.
    """
    theirs = evaluate(*inputs)
    if [(a.shape, a.dtype) for a in ours] != [(b.shape, b.dtype) for b in theirs]:
        return f"{what} has another size or dtype"
    margins = _margins(theirs, inputs, rough)
    if all(map(bool, _within(ours, theirs, margins))):
        return None
    spread, reason = [theirs], None
    for many in NEIGHBOURS:
        for i in range(many):
            with _RoundedOtherwise() if i % 2 else nullcontext():
                spread.append(evaluate(*map(_nearby, inputs)))
        reason = _outside(ours, spread, margins, what)
        if reason is None:
            break
    return reason


def _outside(
    ours: Sequence[Tensor], spread: Sequence[list[Tensor]], margins: Sequence[Tensor], what: str
) -> str | None:
    """In words, where `ours` lies outside of what was found at the inputs, which comes first, and nearby.

    One more of a few draws often lies a little outside of them: it may by as much as they are apart.
    """
    for i, (a, margin) in enumerate(zip(ours, margins, strict=True)):
        around = torch.stack([found[i] for found in spread])
        no_number = around.isnan().any(0)
        around = torch.where(around.isnan(), around[0], around)  # what is no number nearby says nothing of the rest
        least, most = around.amin(0), around.amax(0)
        margin = margin + (most - least)
        inside = (a >= least - margin) & (a <= most + margin)
        inside |= (a.isnan() & no_number) | (a == around[0])
        if not bool(inside.all()):
            at = tuple((~inside).nonzero()[0].tolist())
            part = f"{what}, part {i}," if len(ours) > 1 else what
            return f"{part} at {list(at)} is {float(a[at]):.9g}, and should be {float(spread[0][i][at]):.9g}"
    return None


def _margins(theirs: Sequence[Tensor], inputs: Sequence[Tensor], rough: torch.dtype | None) -> list[Tensor]:
    """How far each may be off: a share of its largest value, or of a thousandth of the largest of all."""
    least_share = 0.0 if rough is None else TOLERANCE[rough]
    largest = [_largest(t) for t in theirs]
    least = 1e-3 * torch.stack([*largest, *(_largest(_number(t)) for t in inputs if has_a_gradient(t))]).amax()
    shares = [max(least_share, TOLERANCE.get(b.dtype, 0.0)) for b in theirs]
    return [share * size.maximum(least) for share, size in zip(shares, largest, strict=True)]


def _largest(tensor: Tensor) -> Tensor:
    """The largest size of a finite number."""
    size = _reach(tensor)
    if tensor.is_cpu and size.isfinite():  # a GPU would have to be waited for
        return size
    return torch.where(size.isfinite(), size, _reach(torch.where(tensor.isfinite(), tensor, 0)))


def _reach(tensor: Tensor) -> Tensor:
    """`tensor.abs().amax()`, which may be no number, without another tensor as large."""
    if tensor.numel() == 0:
        return tensor.new_zeros(())
    least, most = tensor.aminmax()
    return most.maximum(-least)


def _within(ours: Sequence[Tensor], theirs: Sequence[Tensor], margins: Sequence[Tensor]) -> list[Tensor]:
    return [_reach(a - b) <= m for a, b, m in zip(ours, theirs, margins, strict=True)]


def _nearby(tensor: Tensor, roundings: float = 64) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_complex(_nearby(_number(tensor), roundings))
    if not tensor.is_floating_point():
        return tensor
    roundings = min(4, roundings) if tensor.dtype in (torch.float16, torch.bfloat16) else roundings
    noise = torch.tensor([_draw.uniform(-1, 1) for _ in range(97)], dtype=tensor.dtype, device=tensor.device)
    noise = noise.repeat(-(-tensor.numel() // 97))[: tensor.numel()].view(tensor.shape)
    return tensor * (1 + roundings * torch.finfo(tensor.dtype).eps * noise)


_PICKING = {
    "_to_copy",
    "where",
    "gather",
    "index",
    "index_select",
    "take",
    "embedding",
    "masked_select",
    "sort",
    "topk",
}
_PICKING |= {"max", "min", "amax", "amin", "maximum", "minimum", "median", "mode", "kthvalue", "cummax", "cummin"}


class _RoundedOtherwise(TorchDispatchMode):
    """While open, whatever torch computes is a rounding or two off; what it moves, picks or writes in place is not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        op = op_name(func)
        if func.is_view or func._schema.is_mutable or aten(op).moves or op in _PICKING:
            return result
        return tree_map_only(Tensor, partial(_nearby, roundings=2), result)


# ------------------------------------------------------------------ two steps backwards


@dataclass(frozen=True, eq=False)
class Guard:
    """Compares the gradients of an engine with autograd's, before any goes back; if they differ, takes autograd's."""

    recurrence: Recurrence
    states: State  # detached
    run: Callable[[Recurrence], State]  # the engine
    watch: Watch
    distrust: Callable[[str], None]
    marks: tuple[Any, ...]  # of the step and its tensors, as they were forwards
    casts: Casts  # of autocast, likewise
    rough: torch.dtype | None  # as of `disagreement`

    def still_holds(self) -> bool:
        """Whether the step is what it was forwards; if not, there is nothing to compare with.

        Nor if hooks are set on what gradients go back to: they would be called for the comparison too.
        """
        hooked = any(root._backward_hooks for root in _roots(self.recurrence))
        return not hooked and marks_of(self.recurrence) == self.marks

    def disagreement(self, arrives: list[bool]) -> str | None:
        """How the gradients of two steps differ, from gradients at those leaves of the state where some arrive."""
        full, t = self.recurrence, _draw.randrange(max(1, self.recurrence.steps - 1))
        t = 0 if self.watch.guards == 1 else t  # where a state of zeros may be a special case
        if full.lengths is not None:
            t = min(t, max(0, int(full.lengths.max()) - 2))
        steps = min(2, full.steps - t)
        part = full.part(t, steps, state_before(full, self.states, t))
        generator = torch.Generator().manual_seed(_draw.getrandbits(32))
        rows = [leaf[t : t + steps] for leaf in leaves(self.states)]
        if any(bool(leaf.isnan().any()) for leaf in rows):  # of NaN, torch's own gradient hangs on where it stands
            return None
        weights = [torch.randn(leaf.shape, generator=generator).to(leaf) for leaf in map(_number, rows)]
        parameters = _parameters(full)

        def gradients(run: Callable[[Recurrence], State], *tensors: Tensor) -> list[Tensor]:
            wanted = [t.clone().requires_grad_() if has_a_gradient(t) else t for t in tensors]
            with torch.enable_grad(), out_of_sight(), self._forwards():
                found = zip(leaves(run(part.on(wanted))), weights, arrives, strict=True)
                loss = sum((_number(leaf) * w).sum() for leaf, w, here in found if here)
            sources = [*[t for t in wanted if t.requires_grad], *parameters]
            if not (isinstance(loss, Tensor) and loss.requires_grad):
                return [_number(torch.zeros_like(t)) for t in sources]
            return list(map(_number, torch.autograd.grad(loss, sources, allow_unused=True, materialize_grads=True)))

        inputs = [leaf.detach() for leaf in part.tensors]
        try:
            ours = gradients(self.run, *inputs)
            return _differ(ours, partial(gradients, _by_definition), inputs, f"a gradient of step {t + 1}", self.rough)
        except Unsound as fault:
            return str(fault)
        except NotRun:  # nothing to compare: the way back itself tells it
            return None

    def _forwards(self) -> AbstractContextManager[None]:
        """While open, autocast is as it was forwards."""
        return with_casts(self.casts, leaves(self.states)[0].device)

    def by_definition(self, incoming: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """The gradients of `_roots(recurrence)`, by autograd through the whole sequence."""
        full = self.recurrence
        given = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in full.tensors]
        with torch.enable_grad(), out_of_sight(), self._forwards():
            states = leaves(_by_definition(full.on(given)))
        pairs = [(leaf, g) for leaf, g in zip(states, incoming, strict=True) if g is not None and leaf.requires_grad]
        sources = [t for t in given if t.requires_grad] + _parameters(full)
        return torch.autograd.grad([l for l, _ in pairs], sources, [g for _, g in pairs], allow_unused=True)


def _by_definition(recurrence: Recurrence) -> State:
    """The run as `Sequential` has it, with the random numbers that were drawn."""
    with replayed(recurrence.draws):
        return Sequential().run(recurrence)


def _parameters(recurrence: Recurrence) -> list[Tensor]:
    assert isinstance(recurrence.f, nn.Module)
    return [p for p in recurrence.f.parameters() if p.requires_grad]


def _roots(recurrence: Recurrence) -> list[Tensor]:
    """All that gradients go back to."""
    return [t for t in recurrence.tensors if t.requires_grad] + _parameters(recurrence)


def marks_of(recurrence: Recurrence) -> tuple[Any, ...]:
    """What must not change between the way forwards and the way back, or the two have nothing in common."""
    tensors = [*recurrence.tensors, *_parameters(recurrence)]
    assert isinstance(recurrence.f, nn.Module)
    return fingerprint(recurrence.f), tuple((id(t), None if t.is_inference() else t._version) for t in tensors)


def guarded(guard: Guard, states: State) -> State:
    """`states`, whose gradients are compared when they come back."""
    roots, parts = _roots(guard.recurrence), leaves(states)
    flow = [i for i, part in enumerate(parts) if part.requires_grad]
    for i, part in zip(flow, _Guarded.apply(guard, flow, *[parts[i] for i in flow], *roots), strict=True):
        parts[i] = part
    return rebuild(states, parts)


class _Guarded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, guard: Guard, flow: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.guard, ctx.flow, ctx.roots = guard, flow, len(tensors) - len(flow)
        ctx.set_materialize_grads(False)
        return tuple(t.clone() for t in tensors[: len(flow)])  # views could not be changed in place

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Any, ...]:
        with with_casts((), leaves(ctx.guard.states)[0].device):
            return _Guarded._back(ctx, incoming)

    @staticmethod
    def _back(ctx: Any, incoming: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
        guard, reason = ctx.guard, None
        arriving: list[Tensor | None] = [None] * len(leaves(guard.states))
        for i, g in zip(ctx.flow, incoming, strict=True):
            arriving[i] = g
        if not come_many(incoming) and guard.still_holds():  # of many at once no value can be looked at
            begin = time.perf_counter()
            reason = guard.disagreement([g is not None for g in arriving])
            if guard.watch.runs > FIRST:
                guard.watch.credit -= time.perf_counter() - begin
        if reason is None:
            return (None, None, *incoming, *[None] * ctx.roots)
        guard.distrust(reason)
        return (None, None, *[None] * len(ctx.flow), *guard.by_definition(arriving))
