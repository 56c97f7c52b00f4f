"""Split a step graph at the loop: what depends on parameters alone, on x alone, on the state, and on nothing after.

    once      what depends on parameters alone: computed once per call, by torch, with its own gradients
    aside     what depends on the context but on neither x nor the state: computed once for each sequence
    before    what depends on x but not on the state: computed for all τ steps at once, as one product each
    loop      what is left: from the state before a step to the state after it
    after     what no later step reads: computed for all τ steps at once from the states

Three things go into the loop though they could stay outside, since they would be copied or stored for every step: what
reads both x and the context, what is far larger than the x that it is made from, and what is far smaller than the
state that it reads.

Where a step computes in several dtypes, as under torch.autocast, its loop is of the widest, and what the step has in a
narrower one is rounded to that.

`before` and `after` run the user's own operations with the τ steps as extra batch. That is right only where every
row stands for itself, so operations that mix the sequences of a batch are refused.
"""

from collections.abc import Callable
from typing import Any

import torch

from loopfold.products import mm
from loopfold.stepgraph.aten import Truth, aten, no_kernel
from loopfold.stepgraph.dependence import (
    PLACED,
    closer_to_the_state,
    dependence,
    dependence_in_a_step,
    grown,
    is_floating,
    loop_dtype,
    made_of,
)
from loopfold.stepgraph.graph import (
    BATCH,
    Node,
    Refusal,
    StepGraph,
    batch_at,
    needed_for,
    nodes_in,
    rows_first,
    sizes_of,
)
from loopfold.stepgraph.loop import Builder, Value, ordered
from loopfold.stepgraph.moves import broadcast, cut_of, places_in, size_of
from loopfold.stepgraph.ops import ROUNDED
from loopfold.stepgraph.recipes import Matrix, Recipe
from loopfold.stepgraph.rowwise import check_rowwise, is_pointwise
from loopfold.stepgraph.rules import OWN, RULES
from loopfold.stepgraph.rules.dimensions import exact_up_to
from loopfold.stepgraph.split import Loop
from loopfold.stepgraph.sums import Sums
from loopfold.surroundings import INDICES

FEW_ROWS = 1024  # of a table: a product with each of them, once, takes less time than one at every step


def hoist(graph: StepGraph) -> Loop:
    """Split `graph` at its loop, or say why that cannot be done."""
    try:
        return _Hoist(graph).split(closer=True)
    except Refusal:
        return _Hoist(graph).split(closer=False)


def whole_step(graph: StepGraph, learned: frozenset[Node] = frozenset()) -> Loop:
    """All of a step as the loop, for steps that are taken one at a time; or say why that cannot be done.

    What depends on x alone and what no later step reads are in it too. Outside is only what is the same at every step,
    and the rows of tables that tokens stand for. What is computed from `learned` parameters alone is inside as far as
    the loop has a kernel for it, so that the reverse step gives gradients by these parameters themselves.
    """
    return _Hoist(graph, True, learned).split(closer=False)


class _Hoist:
    def __init__(self, graph: StepGraph, whole: bool = False, learned: frozenset[Node] = frozenset()) -> None:
        self.graph = graph
        self.whole = whole
        self.builder = Builder() if whole else Sums(self)
        self.constants: list[Recipe] = []
        self.lengths: list[int] = []
        self.inputs: list[Recipe] = []
        self.widths: list[int] = []
        self.contexts: list[Recipe] = []
        self.leaf_of: dict[Any, Value] = {}
        self.value_of: dict[Node, Any] = {}
        self.bounds: dict[Value, tuple[float, float]] = {}  # of values, where they are known
        self.depends = dependence_in_a_step(graph) if whole else dependence(graph)
        self.grown = set[Node]() if whole else grown(graph, self.depends)
        self.inside = made_of(graph, self.depends, learned)
        self.depends |= dict.fromkeys(self.inside, "state")
        self.dtype = loop_dtype(graph, self.depends)

    def split(self, closer: bool) -> Loop:
        graph = self.graph
        for node in graph.operations:
            if self.depends[node] != "once" and not node.is_draw and node not in self.inside:
                check_rowwise(node)
        everything = set(needed_for([*graph.outputs, *graph.results], set()))
        carried = tuple(i for i, leaf in enumerate(graph.state) if leaf in everything)
        in_loop = everything if self.whole else set(needed_for([graph.outputs[i] for i in carried], set()))
        if closer and carried:
            better = set(closer_to_the_state(graph, self.depends, in_loop))
            in_loop |= set(needed_for([node for node in graph.operations if node in better & everything], set()))
        for node in graph.operations:
            if node in in_loop and self.depends[node] == "state":
                self._check_numbers(node)
                self.value_of[node] = self._value(node)

        emitted: list[Value] = []
        taps: dict[Node, int] = {}

        def emit(node: Node) -> int:
            value = self._as_row(node)
            if value not in emitted:
                emitted.append(value)
            taps[node] = emitted.index(value)
            return taps[node]

        for i in carried:
            emitted.append(self._as_row(graph.outputs[i]))
            taps[graph.outputs[i]] = len(emitted) - 1
        leaves: list[int | Node] = []
        for leaf in (*graph.outputs, *graph.results):
            if batch_at(leaf.shape) != 0 or leaf.shape[0] != BATCH:
                raise Refusal(f"{leaf.name}, which it returns, has shape {leaf.shape}; it must begin with the batch.")
        for i, leaf in enumerate((*graph.outputs, *graph.results)):
            if i in carried:
                leaves.append(carried.index(i))
            else:
                inside = leaf in in_loop and (self.whole or self.depends[leaf] == "state")
                place = emit(leaf) if inside else None
                if self.whole and i < len(graph.outputs) and place in leaves:  # a state can be set, part by part
                    emitted.append(emitted[place])
                    place = len(emitted) - 1
                leaves.append(leaf if place is None or not is_floating(leaf) else place)
        for node in needed_for([leaf for leaf in leaves if isinstance(leaf, Node)], in_loop):
            if node.op == "getitem" and node.args[0] in self.value_of:  # one of several results
                self.value_of[node] = self._value(node)
                emit(node)
                continue
            for read in node.inputs():  # what runs after the loop may read values from inside it
                if read in self.value_of and read not in taps:
                    emit(read)
        return self._without_unused(carried, tuple(emitted), tuple(leaves), taps)

    def _without_unused(
        self,
        carried: tuple[int, ...],
        emitted: tuple[Value, ...],
        leaves: tuple[int | Node, ...],
        taps: dict[Node, int],
    ) -> Loop:
        """Renumber constants and inputs, without those that a rewriting left unused."""
        order = ordered(emitted)
        used_constants = sorted({_constant(v) for v in order if v.op in ("constant", "matmul", "row")})
        used_inputs = sorted({v.index for v in order if v.op == "input"})
        used_contexts = sorted({v.index for v in order if v.op == "context"})
        builder = Builder()
        new: dict[Value, Value] = {}
        for v in order:
            index = v.index
            if v.op in ("matmul", "row"):
                index = (used_constants.index(v.index[0]), v.index[1])
            elif v.op == "constant":
                index = used_constants.index(v.index)
            elif v.op == "input":
                index = used_inputs.index(v.index)
            elif v.op == "context":
                index = used_contexts.index(v.index)
            new[v] = builder.make(v.op, *[new[a] for a in v.args], width=v.width, index=index)
        return Loop(
            self.graph,
            self.dtype,
            builder,
            tuple(self.constants[i] for i in used_constants),
            tuple(self.lengths[i] for i in used_constants),
            tuple(self.inputs[i] for i in used_inputs),
            tuple(self.widths[i] for i in used_inputs),
            tuple(self.contexts[i] for i in used_contexts),
            carried,
            tuple(new[v] for v in emitted),
            leaves,
            taps,
            tuple(node for node, kind in self.depends.items() if kind == "aside"),
            tuple(node for node in self.graph.operations if node.is_check),
        )

    # ---- nodes as values of the loop

    def _check_numbers(self, node: Node) -> None:
        """The loop computes in the dtype of the state. It has choices too: whole numbers that it made itself."""
        choice = aten(node.op).choices
        fits = node.dtype in (torch.bool, None) or self._fits(node.dtype)
        if not fits and not (choice and node.dtype in INDICES):
            raise Refusal(f"aten.{node.op} gives {node.dtype} where the state is {self.dtype}.")
        whole = bool(node.inputs()) and all(_is_whole(n) for n in node.inputs())
        known = all(self.depends[n] == "state" or self._counts(n) for n in node.inputs())
        if whole and not (known and (choice or node.dtype == self.dtype)):
            raise Refusal(f"aten.{node.op} computes with whole numbers in the loop.")

    def _counts(self, node: Node) -> bool:
        """Whether it is 0, 1, 2, …, and the dtype of the state has all of these."""
        return node.op == "arange" and node.shape[0] <= exact_up_to(self.dtype)

    def _as_row(self, node: Node) -> Value:
        """A node as a row of its full width."""
        if not size_of(node.shape):
            raise Refusal(f"{node.name} has no features.")
        if batch_at(node.shape) is None:
            raise Refusal(f"{node.name} has shape {node.shape}: the same for all sequences of a batch.")
        return self.builder.expand(self.row(self.argument(node)), size_of(node.shape))

    def _value(self, node: Node) -> Any:
        kind = self.depends[node]
        if node in self.graph.state:
            width = size_of(node.shape)
            if not width:
                raise Refusal(f"its state {node.name} has no features.")
            return self.builder.make("state", width=width, index=self.graph.state.index(node))
        if kind == "once":
            return node  # a rule asks for it as a row or as a matrix
        if kind == "before":
            return self._grown(node) if node in self.grown else self.input_node(node)
        if kind == "aside":
            return self._from_outside(node, self.context)
        return self._computed(node)

    def _computed(self, node: Node) -> Any:
        if node in self.inside and node.op in PLACED:
            return self.builder.take(self._flat(node.args[0]), places_in(node))
        rule = RULES.get(node.op)
        if rule is None:
            raise Refusal(no_kernel(node.op))
        known, own = aten(node.op), OWN.get(node.op)
        places = [a for i, a in enumerate(node.args) if own is None and i not in known.numbers]
        if any(n in self.graph.numbers for n in nodes_in((*places, *node.kwargs.values()))):
            raise Refusal(f"aten.{node.op} has a kernel for fixed numbers only.")
        arguments = [self.argument(a) for a in node.args]
        if is_pointwise(node):
            pairs = zip(node.args, arguments, strict=True)
            arguments = [self._beside(a, v, node) if isinstance(a, Node) else v for a, v in pairs]
        if node in self.inside:  # where rules need not reckon with what is not a value of the loop
            arguments = [self._flat(v) if isinstance(v, Node) else v for v in arguments]
        if node.dtype == torch.bool and known.truth is not Truth.SAME and not (own is not None and own.truth):
            if known.truth is Truth.UNKNOWN:
                raise Refusal(f"aten.{node.op} of truth values has no kernel.")
            arguments = [self._numbers(a) for a in arguments]
            return self.condition(rule(self, node, *arguments, **dict(node.kwargs)))
        return self._rounded(node, rule(self, node, *arguments, **dict(node.kwargs)))

    def _beside(self, a: Node, v: Any, node: Node) -> Any:
        """The value of a node, as torch lays it beside others: in their shape, and one number also in their dtype."""
        v = self.broadcast(a, v, node.shape)
        op = None if node.dtype == self.dtype else ROUNDED.get(node.dtype)  # type: ignore[arg-type]
        if op is None or a.dtype == node.dtype or not is_floating(a) or a.op == "number":
            return v
        return self.builder.make(op, self.row(v))

    def _rounded(self, node: Node, value: Any) -> Any:
        """What torch computes for a node of a narrower dtype: it rounds each result once. What only moves is so."""
        source = node.args[0] if node.op == "getitem" else node
        if node.dtype in (self.dtype, None) or aten(source.op).moves or not isinstance(value, Value):
            return value
        op = ROUNDED.get(node.dtype)  # truth values have none
        return value if op in (None, value.op) else self.builder.make(op, value)

    def _fits(self, dtype: torch.dtype | None) -> bool:
        """Whether the loop has values of a dtype: its own, or half precision, which is rounded to."""
        return dtype == self.dtype or (dtype in ROUNDED and self.dtype not in ROUNDED)

    def _grown(self, node: Node) -> Any:
        if node not in self.value_of:
            try:
                self.value_of[node] = self._computed(node)
            except Refusal:
                self.value_of[node] = self.input_node(node)
        return self.value_of[node]

    def _numbers(self, a: Any) -> Any:
        """An argument with 0 and 1 in place of truth values."""
        if isinstance(a, tuple):
            return tuple(self._numbers(v) for v in a)
        return self.row(a) if isinstance(a, Value) else a

    def argument(self, a: Any) -> Any:
        if isinstance(a, Node):
            return self.value_of[a] if a in self.value_of else self._value(a)
        return tuple(self.argument(v) for v in a) if isinstance(a, tuple) else a

    # ---- what the loop reads from outside

    def broadcast(self, a: Node, v: Any, shape: tuple[Any, ...]) -> Any:
        """The value of a node, as torch lays it beside others in an operation that gives `shape`."""
        width = size_of(shape)
        if isinstance(v, Value):
            if v.width in (1, width):
                return v
            taken = self.builder.take(self.row(v), broadcast(a.shape, shape))
            return self.condition(taken) if v.is_bool else taken
        if len(a.shape) < 2 and size_of(a.shape) in (1, width):
            return v
        self._check_dtype(a)
        sizes, dtype = sizes_of(shape), self.dtype
        recipe = Recipe(lambda t: t.expand(sizes).reshape(-1).to(dtype).contiguous(), (a,))
        return self.constant(recipe, width, ("row", a, shape))

    def row(self, a: Any) -> Value:
        """An argument of a pointwise operation as a row: a value, a number, or something computed once."""
        if isinstance(a, Value):
            return self.builder.where(a, 1, 0) if a.is_bool else a
        if not isinstance(a, Node):
            return self.builder.number(a)
        if len(a.shape) > 2 or (len(a.shape) == 2 and a.shape[0] != 1):
            raise Refusal(f"{a.name} has shape {a.shape}; beside rows [batch, n] a kernel needs [n] or one number.")
        if a.op == "number":  # a plain number, which a call makes a row
            return self.constant(Recipe(lambda number: number, (a,)), 1, ("row", a))
        self._check_dtype(a)
        width, dtype = a.shape[-1] if a.shape else 1, self.dtype
        return self.constant(Recipe(lambda t: t.reshape(-1).to(dtype).contiguous(), (a,)), width, ("row", a))

    def _flat(self, a: Node) -> Value:
        """What is the same for all sequences as one row, whatever its shape."""
        v = self.argument(a)
        return self.row(v if isinstance(v, Value) else self.broadcast(a, v, a.shape))

    def _check_dtype(self, node: Node) -> None:
        """As torch has it, one number, and whole numbers, take on the dtype of the rows that they meet; no others."""
        assert node.dtype is not None
        weak = not node.dtype.is_floating_point or not node.shape
        if node.dtype.is_complex or (not self._fits(node.dtype) and not weak):
            raise Refusal(f"{node.name} is {node.dtype} where the state is {self.dtype}.")

    def condition(self, a: Any) -> Value:
        """An argument as yes or no."""
        return a if isinstance(a, Value) and a.is_bool else self.builder.make("ne", self.row(a), self.builder.number(0))

    def constant(self, recipe: Recipe, width: int, key: Any) -> Value:
        if key not in self.leaf_of:
            self.constants.append(recipe)
            self.lengths.append(width)
            self.leaf_of[key] = self.builder.make("constant", width=width, index=len(self.constants) - 1)
        return self.leaf_of[key]

    def matmul(self, v: Value, matrix: Matrix, start: int = 0) -> Value:
        """`v @ matrix`. Where v is several rows side by side, each is multiplied by its own part of the matrix."""
        if v.op == "cat":
            terms = []
            for part in v.args:
                terms.append(self.matmul(part, matrix, start))
                start += part.width
            return self.builder.total(terms)
        stop, columns = start + v.width, matrix.shape[1]
        dtype = self.dtype
        rows = Recipe(lambda t: t.to(dtype), (matrix.rows(start, stop),))
        if v.op == "expand" and v.args[0].op == "number":  # a column of ones, for a bias
            number = v.args[0].index
            return self.constant(Recipe(lambda m: number * m.sum(0), (rows,)), columns, (v, matrix, start))
        if v.op == "number":
            return self.matmul(self.builder.make("expand", v, width=1), matrix, start)
        if not self._fits(matrix.node.dtype):
            raise Refusal(f"{matrix.node.name} is {matrix.node.dtype} where the state is {self.dtype}.")
        if v.op == "row" and v.args[0].width == 1 and v.index[1] <= FEW_ROWS and not self.whole:  # once for each row
            table, k = self.constants[v.index[0]], v.index[1]
            product = self.constant(Recipe(mm, (table, rows)), k, ("product", v.index, matrix, start))
            return self.builder.make("row", v.args[0], width=columns, index=(product.index, k))
        sequence, low = (v.args[0], v.index) if v.op == "slice" else (v, 0)
        if sequence.op == "input" and not self.whole:
            x = Recipe(lambda t: t[:, low : low + v.width], (self.inputs[sequence.index],))
            return self.input(Recipe(mm, (x, rows)), columns, (v, matrix, start))
        if sequence.op == "context":
            c = Recipe(lambda t: t[:, low : low + v.width], (self.contexts[sequence.index],))
            return self.context(Recipe(mm, (c, rows)), columns, (v, matrix, start))
        index = self.constant(rows, v.width, ("matrix", matrix, start, stop)).index
        return self.builder.make("matmul", v, width=columns, index=(index, False))

    def input_node(self, node: Node) -> Value:
        """A node that depends on x alone, as a sequence; parts of a node are cut from the whole."""
        cut = cut_of(node)
        if cut is not None:
            parent, start = cut
            return self.builder.slice(self.input_node(parent), start, node.shape[1])
        return self._from_outside(node, self.input)

    def _from_outside(self, node: Node, leaf: Callable[[Recipe, int, Any], Value]) -> Value:
        """A node that is computed outside of the loop, as a row that the loop reads."""
        shape, width, dtype = node.shape, size_of(node.shape), self.dtype
        if batch_at(shape) is None:
            raise Refusal(f"{node.name} is another at every step, but the same for all sequences of a batch.")
        self._check_dtype(node)
        if not width:
            raise Refusal(f"{node.name} has no features.")
        value = leaf(Recipe(lambda t: rows_first(t, shape).to(dtype), (node,)), width, node)
        return self.condition(value) if node.dtype == torch.bool else value

    def input(self, recipe: Recipe, width: int, key: Any) -> Value:
        if key not in self.leaf_of:
            self.inputs.append(recipe)
            self.widths.append(width)
            self.leaf_of[key] = self.builder.make("input", width=width, index=len(self.inputs) - 1)
        return self.leaf_of[key]

    def context(self, recipe: Recipe, width: int, key: Any) -> Value:
        if key not in self.leaf_of:
            self.contexts.append(recipe)
            self.leaf_of[key] = self.builder.make("context", width=width, index=len(self.contexts) - 1)
        return self.leaf_of[key]


def _is_whole(node: Node) -> bool:
    return node.dtype is not None and node.dtype != torch.bool and not node.dtype.is_floating_point


def _constant(v: Value) -> int:
    return v.index if v.op == "constant" else v.index[0]
