"""One step as native code, bound to the memory that it reads and writes: for steps that are taken one at a time.

Parameters are read where they lie, so whatever is written to them, by whomever, the next step sees. What is computed
from them beforehand (a mask on a matrix, a normalised weight) is a copy, which is known to be old by their versions.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from loopfold.engines.base import Recurrence
from loopfold.engines.compiled import as_row, given_to, parameters_of
from loopfold.engines.fused_cpu import Fused, FusedCPU, Native
from loopfold.engines.programs import Found, alone, program_of
from loopfold.engines.writing import Buffer, Role, forwards
from loopfold.staleness import unaltered
from loopfold.states import State, all_leaves, from_reals, in_reals, leaves
from loopfold.stepgraph.dependence import table_of
from loopfold.stepgraph.graph import Node, Refusal, StepGraph, compute, needed_for
from loopfold.stepgraph.hoist import whole_step
from loopfold.stepgraph.loop import ordered
from loopfold.stepgraph.recipes import Recipe
from loopfold.stepgraph.verify import verify
from loopfold.surroundings import INDICES, fingerprint

LONG = 1 << 21  # products of two numbers in a step, from which on other threads of Python run meanwhile


class StepCode:
    """A whole step as one function: what depends on x alone, and what no later step reads, are part of it."""

    def __init__(self, graph: StepGraph, learned: frozenset[Node] = frozenset()) -> None:
        self.graph, self.loop = graph, whole_step(graph, learned)
        verify(self.loop)
        self.reads = [_read(graph, recipe) for recipe in self.loop.inputs]
        dtypes = {node.dtype for node in (*graph.state, *graph.outputs, *graph.results)}
        nodes = any(isinstance(leaf, Node) for leaf in self.loop.leaves)
        if not self.loop.emitted or nodes or dtypes != {self.loop.dtype}:
            raise Refusal(f"it returns something else than numbers of its state's dtype, {graph.state[0].dtype}.")
        self.products = sum(v.args[0].width * v.width for v in ordered(self.loop.emitted) if v.op == "matmul")
        self._kernels: dict[tuple[int, ...], Fused] = {}

    def kernel(self, pitches: tuple[int, ...]) -> Fused:
        """The kernel for matrices that lie in memory in such a way; see `Source.pitches`."""
        with alone():
            if pitches not in self._kernels:
                source = forwards(self.loop, single=True, pitches=pitches)
                self._kernels[pitches] = Fused(f"{self.graph.name} step", source, self.loop.dtype, 1)
            return self._kernels[pitches]


def _read(graph: StepGraph, recipe: Recipe) -> tuple[int, Node | None]:
    """Which part of x an input is, and the table of which it names the rows, if it does."""
    (node,) = recipe.nodes()
    table = table_of(graph, node)
    leaf = node if table is None else node.args[1]
    if leaf not in graph.x or (table is None and leaf.dtype != graph.state[0].dtype):
        raise Refusal(f"it computes with {node.name}, which is {node.dtype}.")
    return graph.x.index(leaf), table


def step_code(found: Found) -> StepCode:
    """The code of a step, made once for its program."""
    made = found.program.made
    with alone():
        if "step" not in made:
            try:
                made["step"] = StepCode(found.program.graph)
            except Refusal as reason:
                made["step"] = str(reason)
    if isinstance(made["step"], str):
        raise Refusal(made["step"])
    return made["step"]


class NativeStep:
    """The code of a step, the parameters and the context that it reads, and two places for what it gives.

    At every second step the state is read from the one and written to the other. Where there is no such code, a
    `Refusal` says why. `around` are modules that the step was taken out of: see `unaltered`.
    """

    def __init__(self, recurrence: Recurrence, around: Sequence[nn.Module] = ()) -> None:
        reason = FusedCPU().refusal(recurrence)
        if reason is not None:
            raise Refusal(reason)
        assert isinstance(recurrence.f, nn.Module)
        self.found = program_of(recurrence)
        self.code = code = step_code(self.found)
        self.marks = fingerprint(recurrence.f)
        loop, graph, start = code.loop, code.graph, in_reals(leaves(recurrence.state))
        self.like, self.batch = start[0], len(start[0])
        tensors = parameters_of(recurrence, self.found)
        own = {node: tensor for (node, _), tensor in zip(self.found.program.parameters, tensors, strict=True)}
        if any(tensor.is_inference() for tensor in own.values()):
            raise Refusal("its parameters were made under torch.inference_mode, so that changes could not be seen.")
        values = given_to(recurrence, self.found, [tensor.detach() for tensor in tensors])
        values |= zip(graph.context, in_reals(all_leaves(recurrence.context)), strict=True)
        compute(graph, [n for r in (*loop.constants, *loop.contexts) for n in r.nodes()], values, self.batch)
        constants = [as_row(recipe.make(values), self.like, self.like.dtype) for recipe in loop.constants]
        contexts = [recipe.make(values).contiguous() for recipe in loop.contexts]
        tables = [(i, values[table]) for i, (_, table) in enumerate(code.reads) if table is not None]
        if any(not table.is_contiguous() for _, table in tables):
            raise Refusal("a table of its tokens has rows that are not one after the other in memory.")

        memory = {tensor.untyped_storage().data_ptr() for tensor in own.values()}
        pitches = tuple(_pitch(c) if c.untyped_storage().data_ptr() in memory else 0 for c in constants)
        self.x = [torch.empty(leaf.shape[1:], dtype=leaf.dtype) for leaf in in_reals(recurrence.sequences)]
        rows = {i: torch.empty(self.batch, table.shape[1], dtype=table.dtype) for i, table in tables}
        self.tables = [(code.reads[i][0], table.numpy(), rows[i].numpy()) for i, table in tables]
        self.out = [[torch.empty(self.batch, v.width, dtype=self.like.dtype) for v in loop.emitted] for _ in range(2)]
        native = code.kernel(pitches).native(self.batch)
        copies = [c.untyped_storage().data_ptr() not in memory or (c.dim() == 2 and not p)
                  for c, p in zip(constants, pitches, strict=True)]  # fmt: skip
        matrices = {b.index: constants[b.index] if pitches[b.index] else native.pack(constants[b.index])
                    for b in native.table if b.role is Role.MATRIX}  # fmt: skip
        given = {Buffer(Role.CONSTANT, i): c.contiguous() if c.dim() == 1 else c for i, c in enumerate(constants)}
        given |= {Buffer(Role.MATRIX, i): matrix for i, matrix in matrices.items()}
        given |= {Buffer(Role.CONTEXT, i): c for i, c in enumerate(contexts)}
        given |= {Buffer(Role.INPUT, i): rows.get(i, self.x[leaf]) for i, (leaf, _) in enumerate(code.reads)}
        given[Buffer(Role.SCRATCH, 0)] = torch.empty(native.scratch + native.shape.lanes, dtype=self.like.dtype)
        self._held: Any = [given, *(self._bind(native, given, place) for place in range(2))]
        self._job = (ctypes.c_int64 * 5)(0, 0, self.batch, *map(ctypes.addressof, self._held[1:]))  # see native._one
        self.job = ctypes.addressof(self._job)
        kind = ctypes.CFUNCTYPE if code.products * self.batch > LONG else ctypes.PYFUNCTYPE  # the latter keeps the GIL
        self.call = kind(ctypes.c_int64, ctypes.c_void_p)(native.team)
        self._kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 6)(native.kernel)
        self.like_state = recurrence.state
        self.set_state(recurrence.state)

        copied = [recipe for recipe, copy in zip(loop.constants, copies, strict=True) if copy]
        sources = needed_for([n for r in (*copied, *loop.contexts) for n in r.nodes()], set())
        versions = [t for node, t in own.items() if node in sources or (t.dim() and t.dtype in INDICES)]
        used = {
            *needed_for([n for r in (*loop.constants, *loop.contexts) for n in r.nodes()], set()),
            *(t for _, t in code.reads),
        }
        in_place = [t for n, t in own.items() if n in used]
        in_place += [t._base for t in in_place if t._base is not None]  # the parameter, of whose numbers t is a part
        self.unaltered, self.long = unaltered(recurrence.f, in_place, versions, around)
        counts = recurrence.index is not None  # the number of the step is one of `x`, but not the caller's to give
        self.rows, self.tokens = (None, None) if counts else (self._rows_alone(), self._token_alone())

    @property
    def place(self) -> int:
        """In which of the two the state is now: 0 or 1."""
        return self._job[0]

    @property
    def left(self) -> int:
        """How many more steps may be taken before someone looks; where there is none, no step is."""
        return self._job[1]

    @left.setter
    def left(self, steps: int) -> None:
        self._job[1] = steps

    def _bind(self, native: Native, given: dict[Buffer, Tensor], place: int) -> Any:
        """The addresses of all that a step reads and writes which finds the state in `place`."""
        before, after = self.out[place], self.out[1 - place]
        carried = self.code.loop.carried
        own = {Buffer(Role.START, i): before[k] for k, i in enumerate(carried)}
        own |= {Buffer(Role.STATES, i): after[k] for k, i in enumerate(carried)}
        own |= {Buffer(Role.OUT, k): t for k, t in enumerate(after)}
        tensors = [own[b] if b in own else given[b] for b in native.table]
        if any(t.dtype != self.like.dtype for t in tensors):
            raise Refusal("what is computed once has another dtype than its state.")
        return (ctypes.c_int64 * len(tensors))(*[t.data_ptr() for t in tensors])

    def call_anyway(self) -> None:
        """The same call, whether or not there is NaN in what it reads."""
        place, left, batch, *buffers = self._job
        self._kernel(1, batch, 0, batch, 0, buffers[place])
        self._job[0], self._job[1] = 1 - place, left - 1

    def look_up(self) -> None:
        """Fetch the rows of tables that the tokens in `x` name."""
        for leaf, table, rows in self.tables:
            tokens = self.x[leaf].numpy()
            if tokens.min() < 0 or tokens.max() >= len(table):
                wrong = int(tokens[(tokens < 0) | (tokens >= len(table))][0])
                raise IndexError(f"x holds the token {wrong}; the table has {len(table)} rows, from 0 on.")
            table.take(tokens, 0, out=rows, mode="clip")

    def _rows_alone(self) -> tuple[Any, ...] | None:
        """All that a step needs that reads one row of numbers and gives one: where x goes, and what comes.

        None for other steps.
        """
        if len(self.x) != 1 or self.tables or not self._gives_a_row():
            return None
        x, places = self.x[0].numpy(), self._places()
        bare = x.shape[1:] if self.batch == 1 else x.shape
        return self.unaltered, self.call, self.job, x.dtype, (x.shape, bare), x, places

    def _token_alone(self) -> tuple[Any, ...] | None:
        """The same for a step of one stream that reads one token, and nothing else."""
        if len(self.x) != 1 or len(self.tables) != 1 or self.batch != 1 or not self._gives_a_row():
            return None
        ((_, table, rows),) = self.tables
        return self.unaltered, self.call, self.job, table, self.x[0].numpy(), rows, self._places()

    def _gives_a_row(self) -> bool:
        """Whether its output is one tensor of real numbers."""
        like = leaves(self.output(0))
        return len(like) == 1 and not like[0].is_complex()

    def _places(self) -> list[Any]:
        """The output after a step, by the place where the state was before it."""
        leaf = len(self.code.graph.outputs) * len(self.code.graph.results)
        return [self.rows_of(leaf, 1 - place).numpy() for place in range(2)]

    def output(self, place: int) -> State:
        """What the step that wrote to `place` gives to its caller: no copy."""
        graph = self.code.graph
        cut = len(graph.outputs)
        if not graph.results:
            return from_reals(leaves(graph.structure)[0], [self.rows_of(i, place) for i in range(cut)])
        return from_reals(graph.structure[0], [self.rows_of(cut + i, place) for i in range(len(graph.results))])

    def rows_of(self, leaf: int, place: int) -> Tensor:
        """Leaf `leaf` of the state and then of the outputs, in one of the two places."""
        graph, k = self.code.graph, self.code.loop.leaves[leaf]
        node: Any = (*graph.outputs, *graph.results)[leaf]
        assert isinstance(k, int)
        return self.out[place][k].view(self.batch, *node.shape[1:])

    def state(self, place: int) -> State:
        """The state in one of the two places: no copy."""
        graph = self.code.graph
        like = graph.structure[1] if graph.results else graph.structure
        return from_reals(like, [self.rows_of(i, place) for i in range(len(self.code.graph.outputs))])

    def set_state(self, state: State) -> None:
        for i, leaf in enumerate(in_reals(leaves(state))):
            self.rows_of(i, self.place).copy_(leaf)

    def returned(self, place: int) -> State:
        """What the step that wrote to `place` returned, as a sequence of one step."""
        graph = self.code.graph
        count, cut = len(graph.outputs) + len(graph.results), len(graph.outputs)
        rows = [self.rows_of(i, place)[None] for i in range(count)]
        return from_reals(graph.structure, [*rows[cut:], *rows[:cut]])


def _pitch(matrix: Tensor) -> int:
    """How far apart the rows of a matrix lie, less than 0 for those of its transpose; 0 if neither is in one piece."""
    if matrix.dim() != 2 or matrix.is_neg():
        return 0
    down, across = matrix.stride()
    if down == 1 and across >= matrix.shape[0]:
        return -across
    return down if across == 1 and down >= matrix.shape[1] else 0
