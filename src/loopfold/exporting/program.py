"""A model's step as plain data: its operations in order, and every number that they read."""

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
from loopfold.states import State, Step, all_leaves, asks_for_index, in_evaluation, leaves, map_state, name_of
from loopfold.stepgraph.graph import Refusal, StepGraph, compute
from loopfold.stepgraph.loop import Value, ordered
from loopfold.transitions import Embedded


@dataclass(frozen=True)
class Leaf:
    """A tensor that goes in or comes out, of one sequence: its name and its sizes."""

    name: str
    shape: tuple[int, ...]
    tokens: int = 0  # so many rows has the table of which it names one; 0: it is numbers

    @property
    def size(self) -> int:
        return 1 if self.tokens else torch.Size(self.shape).numel()


@dataclass(frozen=True, eq=False)
class Phase:
    """A part of a step in which nothing waits: first whole rows, then loops over features, the narrowest first."""

    rows: list[Value]
    loops: dict[int, list[Value]]  # by width


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
    emitted: tuple[Value, ...]
    constants: tuple[Tensor, ...]
    inputs: tuple[tuple[int, Tensor | None], ...]  # for each input the leaf of x, and its table
    counts: bool  # an input that follows the leaves of x is the number of the step

    @staticmethod
    def of(model: nn.Module | Step, x: Any = None) -> "StepProgram":
        """The program of a model; `x [batch, …]` is like what a step reads, where the model does not say its size."""
        if isinstance(model, RecurrentLM):
            model = model.network
        if isinstance(model, LanguageModel):
            raise Refusal("it has no state that goes from step to step. A recurrent language model has one.")
        f = one_step(model, "export")
        if not isinstance(f, nn.Module):
            raise Refusal("it is a plain function, which may read something else at every call; write an nn.Module.")
        with in_evaluation(f), torch.no_grad():
            return _program(model, f, _example(model, f) if x is None else map_state(lambda leaf: leaf[:1], x))

    @cached_property
    def order(self) -> list[Value]:
        """Every value, arguments first."""
        return ordered(self.emitted)

    @cached_property
    def phases(self) -> list[Phase]:
        """All that is computed, in parts that follow each other."""
        level: dict[Value, int] = {}
        phases: dict[int, Phase] = {}
        for v in self.order:
            if v.is_leaf:
                level[v] = 0
                continue
            whole = not v.is_pointwise
            level[v] = max(level[a] + (whole and a.is_pointwise) for a in v.args)
            phase = phases.setdefault(level[v], Phase([], {}))
            (phase.rows if whole else phase.loops.setdefault(v.width, [])).append(v)
        return [
            Phase(phase.rows, dict(sorted(phase.loops.items())))
            for _, phase in sorted(phases.items(), key=lambda p: p[0])
        ]

    @cached_property
    def stored(self) -> set[Value]:
        """What a loop over features must leave behind: another part reads it, or the step gives it."""
        needed = {v for v in self.emitted if v.is_pointwise}
        home = {v: (i, width) for i, phase in enumerate(self.phases) for width, vs in phase.loops.items() for v in vs}
        for v in self.order:
            needed |= {a for a in v.args if a.is_pointwise and home[a] != home.get(v)}
        return needed

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


def _example(model: Any, f: nn.Module) -> State | None:
    """An x for one step, of the size that the cell which reads it has."""
    cell = lowest(f)
    if isinstance(cell, Embedded):
        return torch.zeros(1, dtype=torch.int64)
    size = getattr(cell, "input_size", None)
    if size is None and isinstance(cell, nn.Module) and len(signature(cell.forward).parameters) == 1:
        return None  # f(state)
    if size is None:
        raise ValueError(f"{name_of(model)} does not say how large x is: give an example, x=torch.zeros(1, size).")
    return torch.zeros(1, size, dtype=next(f.parameters(), torch.zeros(())).dtype)


def _program(model: Any, f: nn.Module, x: State | None) -> StepProgram:
    start = start_of(f, 1, x, None)
    like = leaves(start)[0]
    rows = None if x is None else map_state(lambda leaf: leaf[None].to(like.device), x)
    counts = asks_for_index(f, 1 + (x is not None))
    index = torch.zeros(1, 1, 1, dtype=like.dtype, device=like.device) if counts else None
    recurrence = Recurrence(f, rows, 1, start, None, None, index)
    first_step(recurrence)  # with its checks, in words
    found = program_of(recurrence)
    graph = found.program.graph
    if any(node.is_draw for node in graph.operations):
        raise Refusal("it draws random numbers at every step.")
    code = StepCode(graph)
    loop = code.loop
    values = given_to(recurrence, found, [tensor.detach() for tensor in parameters_of(recurrence, found)])
    tables = [table for _, table in code.reads if table is not None]
    compute(graph, [*(n for recipe in loop.constants for n in recipe.nodes()), *tables], values, rows=1)

    def plain(value: Any) -> Tensor:
        return as_row(value, like, torch.float32).detach().to("cpu", torch.float32).contiguous()

    table_of = {leaf: values[table] for leaf, table in code.reads if table is not None}
    state = tuple(
        Leaf(name, tuple(leaf.shape[1:])) for name, leaf in zip(_names(f, start, graph), leaves(start), strict=True)
    )
    outputs = tuple(Leaf(f"output{i}", node.shape[1:]) for i, node in enumerate(graph.results))
    emitted = tuple(k for k in loop.leaves if isinstance(k, int))
    after, gives = emitted[: len(state)], emitted[len(state) :]
    return StepProgram(
        name=type(model).__name__,
        x=tuple(
            Leaf(node.name, tuple(leaf.shape[2:]), len(table_of[i]) if i in table_of else 0)
            for i, (node, leaf) in enumerate(zip(graph.x, all_leaves(rows), strict=False))
        ),
        state=state,
        start=tuple(plain(leaf).reshape(-1) for leaf in leaves(start)),
        outputs=outputs or state[:1],
        after=after,
        gives=gives or after[:1],
        emitted=loop.emitted,
        constants=tuple(plain(recipe.make(values)) for recipe in loop.constants),
        inputs=tuple((leaf, None if table is None else plain(values[table])) for leaf, table in code.reads),
        counts=counts,
    )


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
