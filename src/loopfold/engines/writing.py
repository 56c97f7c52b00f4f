"""Kernels that are written for a program: what one computes, the buffers that it is given, what it gives back.

A new writer is one file: a `Writer`, whose `write` turns a `Source` into a `Written`, and an engine that takes it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from loopfold.engines.base import Recurrence
from loopfold.engines.kernel import Call, Gradients, Kernel, Saved
from loopfold.engines.programs import Program, alone, program_of
from loopfold.states import leaves
from loopfold.stepgraph.loop import Builder, Value, ordered
from loopfold.stepgraph.ops import ROUNDED
from loopfold.stepgraph.split import Loop


@dataclass(frozen=True, eq=False)
class Halves:
    """What of a loop in a wider dtype has no more digits than half precision, and which: under torch.autocast, much."""

    states: dict[int, torch.dtype]  # leaves of the state
    matrices: dict[int, torch.dtype]  # constants

    @staticmethod
    def of(loop: Loop) -> "Halves":
        states = {i: node.dtype for i, node in enumerate(loop.graph.state) if node.dtype in ROUNDED}
        made = {i: {node.dtype for node in recipe.nodes()} for i, recipe in enumerate(loop.constants)}
        matrices = {i: dtype for i, of in made.items() for dtype in ROUNDED if of == {dtype}}
        return Halves(states, matrices)

    def row(self, v: Value) -> torch.dtype | None:
        """Of a row of numbers: the dtype that it was rounded to."""
        if v.op == "state":
            return self.states.get(v.index)
        if v.op in ("slice", "cat", "take"):
            first, *more = {self.row(a) for a in v.args}
            return None if more else first
        return _ROUNDS_TO.get(v.op)


_ROUNDS_TO = {op: dtype for dtype, op in ROUNDED.items()}


@dataclass(frozen=True, eq=False)
class Source:
    """What a kernel computes, step by step.

    `out`    the values wanted of every step
    `moves`  (a row before a step, the same row after it): of the state, or of ∇state on the way back
    `sums`   the values of which only the sum over steps and sequences is wanted
    `given`  values that come as sequences, and are not computed
    """

    out: tuple[Value, ...]
    moves: tuple[tuple[Value, Value], ...]
    sums: tuple[Value, ...]
    given: tuple[Value, ...]
    backwards: bool
    masked: bool  # whether sequences end at steps of their own
    halves: Halves
    single: bool = False  # whether it is called for one step at a time, with addresses that stay as they are
    pitches: tuple[int, ...] = ()  # of matrices that are read where they lie: from row to row; < 0: of the transpose

    def computed(self, builder: Builder) -> "Source":
        """The same without what only gradients read."""
        before, after = zip(*self.moves, strict=True) if self.moves else ((), ())
        found = iter(builder.computed([*self.out, *after, *self.sums, *self.given]))
        out, after, sums, given = (
            tuple(next(found) for _ in part) for part in (self.out, after, self.sums, self.given)
        )
        return replace(self, out=out, moves=tuple(zip(before, after, strict=True)), sums=sums, given=given)

    @cached_property
    def given_at(self) -> dict[Value, int]:
        """Which of `given` a value is: the first, where it is there twice."""
        return {v: i for i, v in reversed(list(enumerate(self.given)))}

    @cached_property
    def products_of(self) -> torch.dtype | None:
        """The dtype of half precision that all products multiply numbers of, rows and matrices; None: not all."""
        roots = [*self.out, *self.sums, *(after for _, after in self.moves)]
        products = [v for v in ordered(roots, stop=self.given) if v.op == "matmul" and v not in self.given_at]
        found = {self.halves.row(v.args[0]) for v in products}
        found |= {self.halves.matrices.get(v.index[0]) for v in products}
        return next(iter(found)) if len(found) == 1 else None


def forwards(loop: Loop, kept: tuple[Value, ...] = (), masked: bool = False, **how: Any) -> Source:
    """What a run computes: what the loop emits, and `kept` for the way back; `how` are further fields of it."""
    carried = zip(loop.carried, loop.next, strict=True)
    moves = tuple((loop.builder.make("state", width=v.width, index=i), v) for i, v in carried)
    source = Source((*loop.emitted, *kept), moves, (), (), False, masked, Halves.of(loop), **how)
    return source.computed(loop.builder)


class Role(Enum):
    """What a buffer holds: the first seven are given to a kernel, the others are a writer's own."""

    __hash__ = object.__hash__  # buffers are looked up at every call; Enum's own takes far longer

    START = "leaf {i} of the state before the first step: [batch, width]"
    STATES = "leaf {i} of the state after each step: [τ, batch, width]"
    INPUT = "sequence {i}, computed before the loop: [τ, batch, width]"
    INCOMING = "∇ of emitted value {i}, from outside the loop: [τ, batch, width]"
    CONTEXT = "row {i} of what is computed once for each sequence: [batch, width]"
    GIVEN = "kept value {i}: [τ, batch, width]"
    CONSTANT = "row or matrix {i} of what is computed once: [width] or [k, width]"
    OUT = "wanted value {i}: [τ, batch, width]"
    CARRY = "∇ of leaf {i} of the state, or of a context, before the first step and then after the last: [batch, width]"
    SUM = "∇ of row {i} of what is computed once: [width]"
    MATRIX = "matrix {i} of what is computed once, in the order in which the kernel reads it"
    CARRIED = "∇ of leaf {i} of the state after the last step, where that has a place of its own: [batch, width]"
    EXCHANGE = "exchange {i}: rows that blocks of a GPU read from each other, at every step"
    PARTIAL = "reduction {i}: the part of each block of a GPU, at every step"
    SCRATCH = "rows of the step itself, from element {i} on"


class Buffer(NamedTuple):
    """Memory that a kernel reads or writes."""

    role: Role
    index: int  # type: ignore[assignment]  # a tuple's own `index` is not asked for
    transposed: bool = False

    def __str__(self) -> str:
        return self.role.value.format(i=self.index) + ", transposed" * self.transposed


@dataclass(frozen=True, eq=False)
class Ran:
    """What a kernel gives back; rows and sums may be of a wider dtype."""

    out: list[Tensor]  # [τ, batch, width] each
    moved: list[Tensor]  # the rows of `Source.moves` after the last step; only asked for on the way back
    sums: list[Tensor]


class Written(ABC):
    """A kernel that can be called."""

    @abstractmethod
    def run(self, call: Call, buffers: dict[Buffer, Tensor]) -> Ran:
        """Run over all steps. Of `buffers`, the first is a START."""

    @abstractmethod
    def code(self, state: Tensor) -> str:
        """What was generated for such a state, for people to read."""


@dataclass(frozen=True)
class Writer(Kernel):
    """A kernel that is written, once for each program, way and dtype."""

    @abstractmethod
    def write(self, name: str, source: Source, builder: Builder, dtype: torch.dtype) -> Written:
        """The kernel that computes `source`; `name` is for messages, `builder` makes further values."""

    def forward(
        self, program: Program, call: Call, constants: list[Tensor], inputs: list[Tensor], state: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        buffers = _common(program, constants, inputs, state)
        ran = self._forwards(program, call, state[0].dtype).run(call, buffers)
        emitted = len(program.loop.emitted)
        return ran.out[:emitted], ran.out[emitted:]

    def backward(self, program: Program, call: Call, saved: Saved, incoming: list[Tensor | None]) -> Gradients:
        buffers = _common(program, saved.constants, saved.inputs, saved.state)
        for k, i in enumerate(program.loop.carried):
            buffers[Buffer(Role.STATES, i)] = saved.emitted[k]
        buffers |= {Buffer(Role.INCOMING, k): g for k, g in enumerate(incoming) if g is not None}
        buffers |= {Buffer(Role.GIVEN, k): t for k, t in enumerate((*saved.emitted, *saved.kept))}
        arrives = tuple(g is not None for g in incoming)
        ran = self._backwards(program, call, saved.state[0].dtype, arrives).run(call, buffers)
        return Gradients(ran.moved, ran.out, ran.sums)

    def code(self, recurrence: Recurrence) -> str:
        """All that is generated for a run and its way back; nothing where no step reads the one before."""
        return "\n".join(kernel.code(leaves(recurrence.state)[0]) for kernel in self.both_ways(recurrence))

    def both_ways(self, recurrence: Recurrence) -> list[Written]:
        """The kernels of a run that has a way back, where gradients come to all that it emits."""
        program, state = program_of(recurrence).program, leaves(recurrence.state)[0]
        if not program.loop.emitted:
            return []
        call = Call(recurrence.steps, state.shape[0], recurrence.lengths, record=True)
        dtype = program.loop.dtype
        there = self._forwards(program, call, dtype)
        return [there, self._backwards(program, call, dtype, (True,) * len(program.loop.emitted))]

    def _forwards(self, program: Program, call: Call, dtype: torch.dtype) -> Written:
        def source() -> Source:
            return forwards(program.loop, program.kept if call.record else (), call.lengths is not None)

        return self._made(program, call, dtype, ("forward", call.record), source)

    def _backwards(self, program: Program, call: Call, dtype: torch.dtype, arrives: tuple[bool, ...]) -> Written:
        def source() -> Source:
            loop, reverse = program.loop, program.reverse(arrives)
            moving = enumerate(reverse.moving())
            moves = tuple((loop.builder.make("carry", width=g.width, index=k), g) for k, g in moving)
            sums, given = tuple(g for _, g in reverse.rows), (*loop.emitted, *program.kept)
            masked, halves = call.lengths is not None, Halves.of(loop)
            source = Source(tuple(reverse.stored()), moves, sums, given, True, masked, halves)
            return source.computed(loop.builder)

        return self._made(program, call, dtype, ("backward", arrives), source)

    def _made(
        self, program: Program, call: Call, dtype: torch.dtype, what: tuple[str, Any], source: Callable[[], Source]
    ) -> Written:
        key = (self, what, dtype, call.lengths is not None)
        if key not in program.made:
            with alone():
                if key not in program.made:
                    program.made[key] = self.write(
                        f"{program.graph.name} {what[0]}", source(), program.loop.builder, dtype
                    )
        return program.made[key]


def tf32() -> bool:
    """Whether the user lets products of float32 be those of TF32, in either of the ways in which torch is told so."""
    matmul: Any = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", "none")
    return matmul.allow_tf32 if precision == "none" else precision == "tf32"


def _common(program: Program, constants: list[Tensor], inputs: list[Any], state: list[Tensor]) -> dict[Buffer, Tensor]:
    carried = program.loop.carried
    found = {Buffer(Role.START, i): t for i, t in zip(carried, state, strict=False)}
    found |= {Buffer(Role.CONTEXT, i): t for i, t in enumerate(state[len(carried) :])}
    found |= {Buffer(Role.INPUT, i): t for i, t in enumerate(inputs) if t is not None}
    return found | {Buffer(Role.CONSTANT, i): t for i, t in enumerate(constants)}
