"""A model's step as plain data: its operations in order, and every number that they read."""

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from loopfold.engines.base import Recurrence, first_step
from loopfold.engines.compiled import as_row, given_to, parameters_of
from loopfold.engines.programs import program_of
from loopfold.engines.stepped import StepCode
from loopfold.language.base import LanguageModel
from loopfold.language.recurrent import RecurrentLM
from loopfold.onestep import Steps, lowest, one_step, start_of
from loopfold.recurrent import Recurrent
from loopfold.states import (
    State,
    Step,
    all_leaves,
    asks_for_index,
    in_evaluation,
    leaves,
    map_state,
    name_of,
    rebuild,
    take_step,
)
from loopfold.stepgraph.differentiate import Reverse, differentiate
from loopfold.stepgraph.graph import Node, Refusal, StepGraph, compute, needed_for
from loopfold.stepgraph.loop import Value, ordered
from loopfold.stepgraph.split import Loop
from loopfold.transitions import Embedded


@dataclass(frozen=True)
class Leaf:
    """A tensor that goes in or comes out, of one sequence: its name and its sizes."""

    name: str
    shape: tuple[int, ...]
    tokens: int = 0  # so many rows has the table of which it names one; 0: it is numbers
    still: bool = False  # it is the same at every step: a context

    @property
    def size(self) -> int:
        return 1 if self.tokens else torch.Size(self.shape).numel()


@dataclass(frozen=True, eq=False)
class Phase:
    """A part of a step in which nothing waits: first whole rows, then loops over features, the narrowest first."""

    rows: list[Value]
    loops: dict[int, list[Value]]  # by width


@dataclass(frozen=True, eq=False)
class Schedule:
    """In which order `roots` and all that they need are computed; what is `given` is there already."""

    roots: tuple[Value, ...]
    given: frozenset[Value] = frozenset()

    @cached_property
    def order(self) -> list[Value]:
        """Every value, arguments first."""
        return ordered(self.roots, self.given)

    @cached_property
    def phases(self) -> list[Phase]:
        """All that is computed, in parts that follow each other."""
        level: dict[Value, int] = {}
        phases: dict[int, Phase] = {}
        for v in self.order:
            if not self._is_made(v):
                level[v] = 0
                continue
            whole = not v.is_pointwise
            level[v] = max(level[a] + (whole and a.is_pointwise and self._is_made(a)) for a in v.args)
            phase = phases.setdefault(level[v], Phase([], {}))
            (phase.rows if whole else phase.loops.setdefault(v.width, [])).append(v)
        return [
            Phase(phase.rows, dict(sorted(phase.loops.items())))
            for _, phase in sorted(phases.items(), key=lambda p: p[0])
        ]

    @cached_property
    def stored(self) -> set[Value]:
        """What a loop over features must leave behind: another part reads it, or it is a root."""
        home = {v: (i, width) for i, phase in enumerate(self.phases) for width, vs in phase.loops.items() for v in vs}
        needed = {v for v in self.roots if v in home}
        for v in self.order:
            if self._is_made(v):
                needed |= {a for a in v.args if a in home and home[a] != home.get(v)}
        return needed

    def _is_made(self, v: Value) -> bool:
        return not v.is_leaf and v not in self.given


@dataclass(frozen=True, eq=False)
class StepProgram:
    """One step of a model, for a program that takes it: `(output, state) = step(state, x)`.

    The values are those of the loop language. All numbers are float32: the rows and matrices that it reads, and for an
    input the table of which a token names a row, if it does.
    """

    name: str
    x: tuple[Leaf, ...]
    state: tuple[Leaf, ...]
    start: tuple[Tensor, ...]  # the state before the first step, flat
    outputs: tuple[Leaf, ...]  # the first leaf of the state, where the step gives nothing else
    after: tuple[int, ...]  # which of the emitted values each leaf of the new state is
    gives: tuple[int, ...]  # and each output
    loop: Loop
    traced: Loop  # with what only gradients read
    constants: tuple[Tensor, ...]
    inputs: tuple[tuple[int, Tensor | None], ...]  # for each input the leaf of x, and its table
    counts: bool  # an input that follows the leaves of x is the number of the step
    begins: tuple[Tensor, ...]  # the first state as autograd knows it, with what it is made of
    cut_off: bool  # whether a constant is made of such parameters, but no gradient goes to them, as by detach

    @staticmethod
    def of(model: nn.Module | Step, x: Any = None, context: Any = None, *, learning: bool = False) -> "StepProgram":
        """The program of a model; `x [batch, …]` is like what a step reads, where the model does not say its size.

        A context becomes a part of x, after the others. `learning`: as far as can be, what is computed from parameters
        alone is computed at every step, so that its reverse step gives gradients by the parameters themselves.
        """
        if isinstance(model, RecurrentLM):
            model = model.network
        if isinstance(model, LanguageModel):
            raise Refusal("it has no state that goes from step to step. A recurrent language model has one.")
        f = one_step(model, "export")
        if not isinstance(f, nn.Module):
            raise Refusal("it is a plain function, which may read something else at every call; write an nn.Module.")
        if context is not None and isinstance(f, Steps):
            raise Refusal("layers on top of each other read no context; a transition or lf.Recurrent does.")
        with in_evaluation(f), torch.no_grad():
            x = _example(model, f, context) if x is None else map_state(lambda leaf: leaf[:1], x)
            context = None if context is None else map_state(lambda leaf: leaf[:1], context)
            return _program(model, f, x, context, learning)

    @property
    def learned(self) -> tuple[bool, ...]:
        """Whether each leaf of the first state is made of parameters that are trained."""
        return tuple(leaf.requires_grad for leaf in self.begins)

    @cached_property
    def forward(self) -> Schedule:
        """From the state and x to all that the step gives."""
        return Schedule(self.loop.emitted)

    @cached_property
    def reverse(self) -> Reverse:
        """The reverse step, where a gradient may arrive at all that the step gives."""
        return differentiate(self.traced, (True,) * len(self.loop.emitted)).computed(self.loop.builder)

    @cached_property
    def kept(self) -> tuple[Value, ...]:
        """What the reverse step reads of the forward step."""
        inside = {v for v in self.forward.order if v.op not in ("number", "constant")}
        roots = [*self.reverse.roots(), *(product.left for product in self.reverse.products)]
        read = {a for v in ordered(roots, inside) if v not in inside for a in v.args} | {*roots}
        return tuple(v for v in self.forward.order if v in inside & read)

    @cached_property
    def forward_and_kept(self) -> Schedule:
        """The forward step, with all that the reverse step reads of it."""
        return Schedule((*self.loop.emitted, *self.kept))

    @cached_property
    def backward(self) -> Schedule:
        """From what is kept of a step, and the gradients that come to it, to those that go on from it."""
        return Schedule(tuple(self.reverse.roots()), frozenset(self.kept))

    def is_count(self, leaf: int) -> bool:
        """Whether an input is the number of the step, which nobody need give."""
        return leaf == len(self.x)

    def weights(self) -> list[Tensor]:
        """Constants, tables and the first state, in this order."""
        tables = [table for _, table in self.inputs if table is not None]
        return [*self.constants, *tables, *self.start]

    def numbers(self) -> Tensor:
        """All weights, one after the other."""
        return torch.cat([tensor.reshape(-1) for tensor in self.weights()])


class _Joined(nn.Module):
    """A step that reads its context as a part of x, `(x, *context)`; what is true or false there is 1 or 0."""

    def __init__(self, f: nn.Module, x: State | None, context: State) -> None:
        super().__init__()
        self.f, self.reads = f, x is not None
        self.like = map_state(lambda leaf: leaf.to("meta"), context)

    def forward(self, state: State, x: tuple[State, ...]) -> State:
        return self._step(state, x, None)

    def _step(self, state: State, x: tuple[State, ...], t: Tensor | None) -> State:
        given = x[1:] if self.reads else x
        pairs = zip(given, leaves(self.like), strict=True)
        context = rebuild(self.like, [leaf != 0 if like.dtype == torch.bool else leaf for leaf, like in pairs])
        return take_step(self.f, state, x[0] if self.reads else None, context, t)


class _TimedJoined(_Joined):
    """The same where the step asks for its number."""

    def forward(self, state: State, x: tuple[State, ...], t: Tensor) -> State:  # type: ignore[override]
        return self._step(state, x, t)


def _example(model: Any, f: nn.Module, context: State | None) -> State | None:
    """An x for one step, of the size that the cell which reads it has."""
    cell = lowest(f)
    if isinstance(cell, Embedded):
        return torch.zeros(1, dtype=torch.int64)
    size, alone = getattr(cell, "input_size", None), 1 + (context is not None)
    if size is None and isinstance(cell, nn.Module) and len({*signature(cell.forward).parameters} - {"t"}) == alone:
        return None  # f(state), f(state, context)
    if size is None:
        raise ValueError(f"{name_of(model)} does not say how large x is: give an example, x=torch.zeros(1, size).")
    return torch.zeros(1, size, dtype=next(f.parameters(), torch.zeros(())).dtype)


def _program(model: Any, f: nn.Module, x: State | None, context: State | None, learning: bool) -> StepProgram:
    with torch.enable_grad():
        start = start_of(f, 1, x, context)
    begins = tuple(leaves(start))
    start = map_state(Tensor.detach, start)
    like, cell, moving = leaves(start)[0], f, len(all_leaves(x))
    counts = asks_for_index(f, 1 + (x is not None) + (context is not None))
    if context is not None:
        f = (_TimedJoined if counts else _Joined)(f, x, context)
        still = [leaf.to(like.dtype) if leaf.dtype == torch.bool else leaf for leaf in leaves(context)]
        x = (*([] if x is None else [x]), *still)
    rows = None if x is None else map_state(lambda leaf: leaf[None].to(like.device), x)
    index = torch.zeros(1, 1, 1, dtype=like.dtype, device=like.device) if counts else None
    if any(t.is_complex() for t in (*begins, *all_leaves(x), *f.parameters(), *f.buffers())):
        raise Refusal("it holds or reads complex numbers. Write real and imaginary parts, [batch, n, 2].")
    recurrence = Recurrence(f, rows, 1, start, None, None, index)
    first_step(recurrence)  # with its checks, in words
    found = program_of(recurrence)
    graph = found.program.graph
    if any(node.is_draw for node in graph.operations):
        raise Refusal("it draws random numbers at every step.")
    tensors = parameters_of(recurrence, found)
    pairs = zip(found.program.parameters, tensors, strict=True)
    trained = frozenset(node for (node, _), tensor in pairs if tensor.requires_grad)
    code = _code(graph, trained if learning else frozenset())
    loop = code.loop
    made = needed_for([node for recipe in loop.constants for node in recipe.nodes()], set())
    values = given_to(recurrence, found, [tensor.detach() for tensor in tensors])
    tables = [table for _, table in code.reads if table is not None]
    compute(graph, [*(n for recipe in loop.constants for n in recipe.nodes()), *tables], values, rows=1)

    def plain(value: Any) -> Tensor:
        return as_row(value, like, torch.float32).detach().to("cpu", torch.float32).contiguous()

    table_of = {leaf: values[table] for leaf, table in code.reads if table is not None}
    state = tuple(
        Leaf(name, tuple(leaf.shape[1:])) for name, leaf in zip(_names(cell, start, graph), leaves(start), strict=True)
    )
    outputs = tuple(Leaf(f"output{i}", node.shape[1:]) for i, node in enumerate(graph.results))
    emitted = tuple(k for k in loop.leaves if isinstance(k, int))
    after, gives = emitted[: len(state)], emitted[len(state) :]
    return StepProgram(
        name=type(model).__name__,
        x=tuple(
            Leaf(name, tuple(leaf.shape[2:]), len(table_of[i]) if i in table_of else 0, still=i >= moving)
            for i, (name, leaf) in enumerate(zip(_names_of_x(graph, moving, context), all_leaves(rows), strict=True))
        ),
        state=state,
        start=tuple(plain(leaf).reshape(-1) for leaf in leaves(start)),
        outputs=outputs or state[:1],
        after=after,
        gives=gives or after[:1],
        loop=loop.computed(),
        traced=loop,
        constants=tuple(plain(recipe.make(values)) for recipe in loop.constants),
        inputs=tuple((leaf, None if table is None else plain(values[table])) for leaf, table in code.reads),
        counts=counts,
        begins=begins,
        cut_off=any(node.op == "detach" and trained & {*needed_for([node], set())} for node in made),
    )


def _code(graph: StepGraph, learned: frozenset[Node]) -> StepCode:
    """The step, with what is computed from `learned` parameters alone in it, or before it where that cannot be."""
    if learned:
        with suppress(Refusal):
            return StepCode(graph, learned)
    return StepCode(graph)


def _names_of_x(graph: StepGraph, moving: int, context: State | None) -> list[str]:
    """What the leaves of x are called, and then those of a context."""
    if context is None:
        return [node.name for node in graph.x[:moving]]
    still = leaves(context)
    names = ["x"] if moving == 1 else [f"x{i}" for i in range(moving)]
    return names + (["context"] if len(still) == 1 else [f"context{i}" for i in range(len(still))])


def _names(f: nn.Module, start: State, graph: StepGraph) -> list[str]:
    """What the leaves of the state are called: as in the cell, and of several layers with the number of each."""
    layers = [part for part in f.modules() if isinstance(part, Recurrent)] if isinstance(f, Steps) else []
    cells: list[Any] = [layer.cell for layer in layers] or [f]
    of_layers = layers and type(start) is tuple and len(start) == len(layers)
    parts: Any = start if of_layers else (start,)
    names = []
    for i, (cell, state) in enumerate(zip(cells, parts, strict=False)):
        while isinstance(cell, Embedded):
            cell = cell.cell
        own = [*signature(cell.forward).parameters][:1] if isinstance(state, Tensor) else getattr(state, "_fields", ())
        names += [f"{name}{i if len(cells) > 1 else ''}" for name in own]
    return names if len(names) == len(graph.state) else [node.name for node in graph.state]
