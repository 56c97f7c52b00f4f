"""What every engine that compiles a step shares: the trace, the parts outside the loop, and autograd around it.

An engine brings a `Kernel`, which runs the loop forwards and backwards. All else is here, so an engine cannot get it
wrong: parameters enter as the user's own tensors, `once`, `before` and `after` are run by torch with its own gradients,
and one autograd function stands for the loop.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopfold.engines.base import Engine, Recurrence
from loopfold.states import State, alive, leaves, rebuild
from loopfold.stepgraph.differentiate import Reverse, differentiate, kept_values
from loopfold.stepgraph.hoist import Loop, hoist, needed_for
from loopfold.stepgraph.loop import Value, ordered
from loopfold.stepgraph.trace import Node, Refusal, StepGraph, trace
from loopfold.surroundings import fingerprint


@dataclass(frozen=True, eq=False)
class Program:
    """A traced and split step, with its reverse steps and the kernels that engines made for it."""

    graph: StepGraph
    loop: Loop
    made: dict[Any, Any]  # whatever an engine compiles, under a key of its own

    @cached_property
    def kept(self) -> tuple[Value, ...]:
        return kept_values(self.loop)

    @cached_property
    def inputs_read(self) -> list[int]:
        """The inputs that the reverse step reads again; the others need not be kept."""
        reverse = self._reverse((True,) * len(self.loop.emitted))
        order = ordered(reverse.roots(), stop=(*self.loop.emitted, *self.kept))
        return sorted({v.index for v in order if v.op == "input"})

    def reverse(self, incoming: Sequence[Tensor | None]) -> Reverse:
        """The reverse step for gradients that come to those emitted values where `incoming` is not None."""
        return self._reverse(tuple(g is not None for g in incoming))

    def _reverse(self, arrives: tuple[bool, ...]) -> Reverse:
        key = ("reverse", arrives)
        if key not in self.made:
            self.made[key] = differentiate(self.loop, arrives)
        return self.made[key]


@dataclass(frozen=True, eq=False)
class Gradients:
    """What a backward kernel returns; sequences are `[τ, batch, k]`."""

    state: list[Tensor]  # ∇ of each carried leaf of state(0)
    stored: list[Tensor]  # the sequences of `reverse.stored()`
    rows: list[Tensor]  # ∇ of each constant in `reverse.rows`


class Kernel(ABC):
    """Runs the loop of a program. All but the constants are contiguous; `call.lengths` is None or `[batch]`."""

    @abstractmethod
    def forward(
        self, program: Program, call: "Call", constants: list[Tensor], inputs: list[Tensor], state: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The sequences of the emitted values, and of the kept ones (none where `call.record` is False)."""

    @abstractmethod
    def backward(self, program: Program, call: "Call", saved: "Saved", incoming: list[Tensor | None]) -> Gradients:
        """The way back, from the gradients that come to the emitted values (None where none does)."""


@dataclass(frozen=True, eq=False)
class Call:
    """The sizes of one run."""

    steps: int
    batch: int
    lengths: Tensor | None
    record: bool  # whether a backward pass may follow


@dataclass(frozen=True, eq=False)
class Saved:
    """What a run leaves for the way back; of the inputs only those that are read again, the others are None."""

    constants: list[Tensor]
    inputs: list[Tensor | None]
    state: list[Tensor]
    emitted: list[Tensor]
    kept: list[Tensor]


# ------------------------------------------------------------------ from a step to its program, once


_programs: weakref.WeakKeyDictionary[nn.Module, dict[Any, Program | str]] = weakref.WeakKeyDictionary()
_MOST = 16  # programs of one module: a step that is another at every call is better run as it is


def program_of(recurrence: Recurrence) -> Program:
    """The program of a step, traced at the first call, and again when something that the trace fixed has changed."""
    found = recurrence.memo.get("program") or _find(recurrence)
    recurrence.memo["program"] = found
    if isinstance(found, str):
        raise Refusal(found)
    return found


def _find(recurrence: Recurrence) -> Program | str:
    f, x = recurrence.f, recurrence.x
    if not isinstance(f, nn.Module):
        return "it is a plain function, which may read anything anew at every call; an nn.Module is compiled."
    known = _programs.setdefault(f, {})
    sizes = [(leaf.shape[1:], leaf.dtype) for leaf in leaves(recurrence.state)]
    key = (fingerprint(f), None if x is None else (x.shape[2:], x.dtype), _types(recurrence.state), *sizes)
    if key not in known:
        if len(known) == _MOST:
            return "it has changed at too many calls. What changes should be a buffer: self.register_buffer(...)."
        known[key] = _make(f, x, recurrence.state)
    return known[key]


def _types(state: State) -> Any:
    return None if isinstance(state, Tensor) else (type(state), *map(_types, state))


def _make(f: nn.Module, x: Tensor | None, state: State) -> Program | str:
    """A program, or why there can be none: as words, since an exception would keep alive all that it has seen."""
    try:
        graph = trace(f, None if x is None else x[0], state)
        program = Program(graph, hoist(graph), {})
        _ = program.inputs_read  # derives the reverse step and what it needs
        return program
    except Refusal as reason:
        return str(reason)


def compiled_refusal(recurrence: Recurrence) -> str | None:
    """Why no compiling engine can run this, or None."""
    if torch.is_autocast_enabled(leaves(recurrence.state)[0].device.type):
        return "torch.autocast chooses dtypes operation by operation."
    tensors = [t for t in (recurrence.x, *leaves(recurrence.state)) if t is not None]
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return "it is called inside a torch.func transform or forward-mode differentiation."
    if any(type(t) not in (Tensor, nn.Parameter) for t in tensors):
        return "it is called on a special kind of tensor."
    try:
        program_of(recurrence)
    except Refusal as reason:
        return str(reason)
    return None


# ------------------------------------------------------------------ a run


def run_compiled(engine: Engine, kernel: Kernel, recurrence: Recurrence) -> State:
    """Run a recurrence through its program: once, before, the loop, after."""
    program = program_of(recurrence)
    loop, graph, tau = program.loop, program.graph, recurrence.steps
    start = leaves(recurrence.state)
    batch = start[0].shape[0]
    rows = tau * batch

    assert isinstance(recurrence.f, nn.Module)
    values: dict[Node, Any] = {node: _tensor(recurrence.f, name) for name, node in graph.parameters.items()}
    outside = [leaf for leaf in loop.leaves if isinstance(leaf, Node)]
    many, which = rows, None
    if graph.x is not None:
        assert recurrence.x is not None
        x = recurrence.x.reshape(rows, *recurrence.x.shape[2:])
        if x.dim() == 1 and not x.is_floating_point() and not outside:  # tokens: each kind is computed on once
            x, which = x.unique(return_inverse=True)
            many = len(x)
        values[graph.x] = x
    loop.run([*loop.checks, *(n for r in (*loop.constants, *loop.inputs) for n in r.nodes())], values, many)
    constants = [recipe.make(values) for recipe in loop.constants]
    inputs = [r.make(values).expand(many, w) for r, w in zip(loop.inputs, loop.widths, strict=True)]
    if which is not None:
        inputs = [F.embedding(which, table) for table in inputs]
    inputs = [sequence.reshape(tau, batch, -1) for sequence in inputs]
    state = [start[i] for i in loop.carried]

    record = torch.is_grad_enabled() and any(t.requires_grad for t in (*constants, *inputs, *state))
    call = Call(tau, batch, recurrence.lengths, record)
    emitted: list[Tensor] = []
    if loop.emitted:  # else no step reads the one before
        tensors = (*constants, *inputs, *state)
        emitted = list(_Loop.apply(engine, kernel, program, call, len(constants), len(inputs), *tensors))

    if outside:
        for node, k in loop.taps.items():
            values[node] = _alive_or_first(emitted[k], recurrence.lengths).reshape(rows, -1).to(node.dtype)
        reads = needed_for(outside, values)
        for k, i in enumerate(loop.carried):
            if graph.state[i] in reads:
                before = torch.cat([start[i][None], emitted[k][:-1]])
                values[graph.state[i]] = _alive_or_first(before, recurrence.lengths).reshape(rows, -1)
        loop.run(outside, values, rows)
    results = []
    for leaf in loop.leaves:
        if isinstance(leaf, Node):
            whole = values[leaf].reshape(tau, batch, *leaf.shape[1:])
            if recurrence.lengths is not None:
                whole = torch.where(alive(whole, recurrence.lengths), whole, 0)
            own = leaf.target is not None and not leaf.target.is_view
            results.append(whole if own else whole.clone())  # x itself is not ours to give away
        else:
            results.append(emitted[leaf])
    return rebuild(graph.structure, results)


def _alive_or_first(sequence: Tensor, lengths: Tensor | None) -> Tensor:
    """After a sequence's end its first value again, on which the operations after the loop are known to be at home."""
    return sequence if lengths is None else torch.where(alive(sequence, lengths), sequence, sequence[:1])


def _tensor(f: nn.Module, name: str) -> Tensor:
    module, _, last = name.rpartition(".")
    return getattr(f.get_submodule(module), last)


class _Loop(torch.autograd.Function):
    """The loop as one operation of autograd."""

    @staticmethod
    def forward(
        ctx: Any, engine: Engine, kernel: Kernel, program: Program, call: Call, *rest: Any
    ) -> tuple[Tensor, ...]:
        n_constants, n_inputs, *tensors = rest
        constants = tensors[:n_constants]
        inputs = [t.contiguous() for t in tensors[n_constants : n_constants + n_inputs]]
        state = [t.contiguous() for t in tensors[n_constants + n_inputs :]]
        emitted, kept = kernel.forward(program, call, constants, inputs, state)
        if call.record:
            ctx.engine, ctx.kernel, ctx.program, ctx.call = engine, kernel, program, call
            ctx.counts = (n_constants, n_inputs, len(state), len(emitted))
            read = [inputs[i] for i in program.inputs_read]
            ctx.save_for_backward(*constants, *read, *state, *emitted, *kept)
            ctx.set_materialize_grads(False)
        return tuple(emitted)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Any, ...]:
        tensors = list(ctx.saved_tensors)
        sources = [t for t in (*tensors, *incoming) if t is not None and t.requires_grad]
        n_constants, n_inputs, n_state, n_emitted = ctx.counts

        def take(count: int) -> list[Tensor]:
            taken = tensors[:count]
            del tensors[:count]
            return taken

        program, call = ctx.program, ctx.call
        constants = take(n_constants)
        read = dict(zip(program.inputs_read, take(len(program.inputs_read)), strict=True))
        inputs = [read.get(i) for i in range(n_inputs)]
        saved = Saved(constants, inputs, take(n_state), take(n_emitted), tensors)
        with torch.no_grad():
            gs = [None if g is None else g.contiguous() for g in incoming]
            found = ctx.kernel.backward(program, call, saved, gs)
            results = _collect(program, saved, program.reverse(gs), found, ctx.needs_input_grad[6:])
        if torch.is_grad_enabled():  # someone wants to differentiate this gradient
            name = type(ctx.engine).__name__
            results = [None if r is None else _Once.apply(name, r, *sources) for r in results]
        return (*[None] * 6, *results)


def _collect(
    program: Program, saved: Saved, reverse: Reverse, found: Gradients, needs: tuple[bool, ...]
) -> list[Tensor | None]:
    """The gradients in the order of the loop's arguments; every sum over time of outer products is one product here."""
    loop, stored = program.loop, dict(zip(reverse.stored(), found.stored, strict=True))
    constants, emitted = saved.constants, saved.emitted
    by_constant: list[Tensor | None] = [None] * len(constants)

    def add(i: int, g: Tensor) -> None:
        old = by_constant[i]
        by_constant[i] = g if old is None else old + g

    sequences = dict(zip(loop.emitted, emitted, strict=True)) | dict(zip(program.kept, saved.kept, strict=True))
    for product in reverse.products:
        if not needs[product.matrix]:
            continue
        left, right = _rows(product.left, loop, saved, sequences), stored[product.right]
        rights = [right.flatten(0, 1)] if len(left) == 1 else [right[0], right[1:].flatten(0, 1)]
        parts = list(zip(left, rights, strict=True))
        if constants[product.matrix].stride(0) == 1:  # W.T of the user's W: the gradient in the layout of W
            add(product.matrix, _product([(r, l) for l, r in parts]).T)
        else:
            add(product.matrix, _product(parts))
    for (i, _), g in zip(reverse.rows, found.rows, strict=True):
        add(i, g.sum_to_size(constants[i].shape))
    by_input = [None if g is None else stored[g] for g in reverse.inputs]
    return [*by_constant, *by_input, *found.state]


def _rows(v: Value, loop: Loop, saved: Saved, sequences: dict[Value, Tensor]) -> list[Tensor]:
    """The rows `[τ·batch, k]` of all steps, in one piece or two."""
    if v.op == "state":  # v(t) is the state before step t: state(0), then what was emitted
        k = loop.carried.index(v.index)
        return [saved.state[k], saved.emitted[k][:-1].flatten(0, 1)]
    if v not in sequences and v.op == "slice":
        return [part[:, v.index : v.index + v.width] for part in _rows(v.args[0], loop, saved, sequences)]
    return [sequences[v].flatten(0, 1)]


def _product(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Σ leftᵀ right over the parts."""
    left, right = parts[-1]
    total = left.T @ right
    for left, right in parts[:-1]:
        total.addmm_(left.T, right)
    return total


class _Once(torch.autograd.Function):
    """A gradient that cannot be differentiated again, and says so to whoever tries."""

    @staticmethod
    def forward(ctx: Any, name: str, gradient: Tensor, *sources: Tensor) -> Tensor:
        ctx.engine_name = name
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(
            f"{ctx.engine_name} has first derivatives only. For second derivatives run the recurrence with "
            f"engine=lf.Sequential()."
        )
