"""What runs a loop, and the loop as one operation of autograd.

A `Kernel` runs the loop forwards and backwards. What is the same for all of them is here: what is kept for the way
back, and the gradients of matrices, each one product at the end.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loopfold.casts import with_casts
from loopfold.engines.backwards import come_many, each, once
from loopfold.engines.base import Engine
from loopfold.engines.programs import Program
from loopfold.products import mm
from loopfold.stepgraph.differentiate import Product, Reverse
from loopfold.stepgraph.loop import Value
from loopfold.stepgraph.ops import OPS, ROUNDED
from loopfold.stepgraph.split import Loop


@dataclass(frozen=True, eq=False)
class Gradients:
    """What a backward kernel returns; sequences are `[τ, batch, k]`."""

    state: list[Tensor]  # ∇ of each carried leaf of state(0), then of each context that has one; of any dtype
    stored: list[Tensor]  # the sequences of `reverse.stored()`
    rows: list[Tensor]  # ∇ of each constant in `reverse.rows`


class Kernel(ABC):
    """Runs the loop of a program. All but the constants are contiguous; `call.lengths` is None or `[batch]`.

    `state` holds the carried leaves of the state, then the contexts.
    """

    @abstractmethod
    def forward(
        self, program: Program, call: "Call", constants: list[Tensor], inputs: list[Tensor], state: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The sequences of the emitted values, and of the kept ones (none where `call.record` is False)."""

    @abstractmethod
    def backward(self, program: Program, call: "Call", saved: "Saved", incoming: list[Tensor | None]) -> Gradients:
        """The way back, from the gradients that come to the emitted values (None where none does)."""

    def gains_by_replay(self, program: Program, steps: int, batch: int) -> bool:
        """Whether a GPU runs it faster as a CUDA graph, for which the memory of a run is kept."""
        return False


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


class LoopFunction(torch.autograd.Function):
    """The loop as one operation of autograd."""

    @staticmethod
    def forward(
        ctx: Any, engine: Engine, kernel: Kernel, program: Program, call: Call, *rest: Any
    ) -> tuple[Tensor, ...]:
        n_constants, n_inputs, *tensors = rest
        constants = tensors[:n_constants]
        constants = [t.resolve_neg() for t in constants]
        inputs = [t.contiguous().resolve_neg() for t in tensors[n_constants : n_constants + n_inputs]]
        state = [t.contiguous().resolve_neg() for t in tensors[n_constants + n_inputs :]]
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
        if all(g is None for g in incoming):  # nothing comes back this way
            return (None,) * len(ctx.needs_input_grad)
        tensors = list(ctx.saved_tensors)
        sources = [t for t in (*tensors, *incoming) if t is not None and t.requires_grad]
        n_constants, n_inputs, n_state, n_emitted = ctx.counts

        def take(count: int) -> list[Tensor]:
            taken = tensors[:count]
            del tensors[:count]
            return taken

        program, call = ctx.program, ctx.call
        needs = ctx.needs_input_grad[6:]
        constants = take(n_constants)
        read = dict(zip(program.inputs_read, take(len(program.inputs_read)), strict=True))
        inputs = [read.get(i) for i in range(n_inputs)]
        saved = Saved(constants, inputs, take(n_state), take(n_emitted), tensors)

        def back(*arriving: Tensor | None) -> list[Tensor | None]:
            gs = [None if g is None else g.contiguous().resolve_neg() for g in arriving]
            found = ctx.kernel.backward(program, call, saved, gs)
            return _collect(program, saved, program.reverse(tuple(g is not None for g in gs)), found, needs)

        with torch.no_grad(), with_casts((), saved.state[0].device):
            results = each(back, incoming) if come_many(incoming) else back(*incoming)
        if torch.is_grad_enabled():  # this gradient may be differentiated in turn
            results = once(type(ctx.engine).__name__, results, sources)
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
        if product.rows is not None:
            add(product.matrix, _rows_added(constants[product.matrix], parts))
            continue
        half = _half(product)
        if constants[product.matrix].stride(0) == 1:  # W.T of the user's W: the gradient in the layout of W
            add(product.matrix, _product([(r, l) for l, r in parts], half).T)
        else:
            add(product.matrix, _product(parts, half))
    for (i, _), g in zip(reverse.rows, found.rows, strict=True):
        add(i, g.sum_to_size(constants[i].shape))
    by_input = [None if g is None else stored[g] for g in reverse.inputs]
    carried = len(loop.carried)
    by_state: list[Tensor | None] = [None] * len(saved.state)  # the carried leaves of the state, then the contexts
    wanted = needs[len(constants) + len(by_input) :]
    places = [k if reached else None for k, reached in enumerate(reverse.reached)]
    places += [carried + i for i, _ in reverse.contexts]
    for k, g in zip(places, found.state, strict=True):
        if k is not None and wanted[k]:
            by_state[k] = g.to(saved.state[k].dtype)
    return [*by_constant, *by_input, *by_state]


def _rows(v: Value, loop: Loop, saved: Saved, sequences: dict[Value, Tensor]) -> list[Tensor]:
    """The rows `[τ·batch, k]` of all steps, in one piece or two."""
    if v.op == "state":  # v(t) is the state before step t: state(0), then what was emitted
        k = loop.carried.index(v.index)
        return [saved.state[k], saved.emitted[k][:-1].flatten(0, 1)]
    if v not in sequences and v.op == "slice":
        return [part[:, v.index : v.index + v.width] for part in _rows(v.args[0], loop, saved, sequences)]
    if v not in sequences and v.op in ROUNDED.values():
        return [OPS[v.op].apply(part) for part in _rows(v.args[0], loop, saved, sequences)]
    return [sequences[v].flatten(0, 1)]


def _half(product: Product) -> torch.dtype | None:
    """The dtype to which both sides of a product have been rounded, if there is one."""

    def rounded(v: Value, op: str) -> bool:
        return v.op == op or (v.op in ("cat", "slice") and all(rounded(a, op) for a in v.args))

    both = (product.left, product.right)
    return next((dtype for dtype, op in ROUNDED.items() if all(rounded(v, op) for v in both)), None)


def _product(parts: list[tuple[Tensor, Tensor]], half: torch.dtype | None) -> Tensor:
    """Σ leftᵀ right over the parts; in that dtype nothing is lost, and a GPU multiplies faster."""
    left, right = parts[-1]
    if half is not None and left.is_cuda and left.dtype == torch.float32:
        total = torch.mm(left.to(half).T, right.to(half), out_dtype=torch.float32)
    else:
        total = mm(left.T, right)
    for left, right in parts[:-1]:
        total.addmm_(left.T, right)
    return total


def _rows_added(table: Tensor, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Zeros like `table`, with each right added to the rows that its left says."""
    total = torch.zeros_like(table)
    for left, right in parts:
        total.index_add_(0, left.flatten().long(), right.reshape(-1, table.shape[1]))
    return total
