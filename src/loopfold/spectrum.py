"""The eigenvalues of what multiplies the state: whether W by itself shrinks a state or lets it grow."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loopfold.drawing import charts
from loopfold.drawing.figure import Drawing
from loopfold.gradients import cells_of, core_of, gates_of, short_names
from loopfold.states import in_double, in_evaluation, name_of
from loopfold.stepgraph.aten import Product, aten
from loopfold.stepgraph.graph import Node, Refusal, StepGraph, apply, batch_at, needed_for, sizes_of
from loopfold.stepgraph.trace import tensors_of, trace
from loopfold.transitions import example_inputs, initial_state


@dataclass(frozen=True)
class Eigenvalues:
    """The eigenvalues of every square matrix that multiplies the state (M17).

    `values`   `{"W": [n] complex}`; a `W [k·n, n]` of k gates is k matrices, `"W_i"`, `"W_f"`, …; one that multiplies
               several parts of the state has a block for each, `"W (h)"`, `"W (c)"`
    `radius`   the largest modulus of each, ρ(W): below 1, W by itself makes every state vanish in the end
    """

    values: dict[str, Tensor]

    @property
    def radius(self) -> dict[str, float]:
        return {name: float(values.abs().max()) for name, values in self.values.items()}

    def draw(self) -> Drawing:
        """The eigenvalues on the complex plane, with the unit circle."""
        return charts.eigenvalues(self.values)


def eigenvalues(model: nn.Module) -> Eigenvalues:
    """The eigenvalues of the recurrent matrices of a transition, or of every transition in a model.

    A recurrent matrix multiplies the state and is the same at every step: a parameter or a buffer, the part of one
    that meets the state, or what is computed from them, `"f(A)"` where that is no part of A. The step graph says
    which do, as they are in evaluation, without dropout. A step that cannot be traced is refused; the error says why.

    >>> from loopfold import GRU, Elman, ScaledIdentity
    >>> eigenvalues(Elman(3, 5, recurrent_init=ScaledIdentity(0.5))).radius
    {'W': 0.5}
    >>> list(eigenvalues(GRU(3, 5)).values)
    ['W_r', 'W_z', 'W_n']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"eigenvalues needs a transition or a model, a torch.nn.Module; got a {type(model).__name__}.")
    known = {id(t): _plain(name) for name, t in tensors_of(model).items()}
    short = short_names(known.values())
    values: dict[str, Tensor] = {}
    with in_evaluation(model):
        for cell in map(core_of, cells_of(model) or [model]):
            own = tensors_of(cell)
            names = {name: short[known[id(t)]] for name, t in own.items()}
            for name, W in _named(_recurrent_matrices(_graph(cell), own, names), gates_of(cell)):
                if not bool(W.isfinite().all()):
                    raise ValueError(f"{name} holds numbers that are not finite, so it has no eigenvalues.")
                values[name] = torch.linalg.eigvals(W)
    if not values:
        raise ValueError(
            f"{name_of(model)} has no matrix that multiplies its state. eigenvalues needs a transition with a fixed "
            f"matrix [k·n, n], where n is the size of the state, such as lf.Elman; or a model that holds one."
        )
    return Eigenvalues(values)


def _plain(name: str) -> str:
    """A parameter's name; what torch.nn.utils.parametrize computes W from goes by the name of W."""
    return re.sub(r"parametrizations\.(\w+)\..*", r"\1", name)


# ------------------------------------------------------------------ what multiplies the state


@dataclass(frozen=True)
class _Matrix:
    """What multiplies one part of the state: `W [k·n, n]`, what it comes from, and the name of that part."""

    W: Tensor
    source: str
    leaf: str


def _recurrent_matrices(graph: StepGraph, own: dict[str, Tensor], names: dict[str, str]) -> list[_Matrix]:
    """Every constant matrix that multiplies a leaf of the state, once, and only what of it meets that leaf."""
    sources = {node: names[name] for name, node in graph.parameters.items()}
    constants = _constants(graph, own)
    formulas = _formulas(graph)
    found: dict[Any, _Matrix] = {}
    for leaf in graph.state:
        columns = _columns(graph, leaf)
        for node in graph.operations:
            product = aten(node.op).product
            if product is Product.ROWS and node.args[-2] in columns and node.args[-1] in constants:
                matrix = node.args[-1]
                for rows in _blocks(columns[node.args[-2]][0]):
                    W = in_double(constants[matrix][rows].T).cpu()  # h @ W.T is what W h is for columns
                    if len(W) % len(rows) == 0 and (len(rows) > 1 or leaf.shape[-1] == 1):  # not a lone column
                        key = formulas[matrix], tuple(rows)
                        found.setdefault(key, _Matrix(W, _source(matrix, sources), leaf.name))
            elif product is Product.OTHER and any(part in columns for part in node.inputs()):
                raise ValueError(
                    f"{graph.name} multiplies its state in a way that eigenvalues cannot read, aten.{node.op}. Write "
                    f"it as a product of rows [batch, n], such as h @ W.T."
                )
    return list(found.values())


def _constants(graph: StepGraph, own: dict[str, Tensor]) -> dict[Node, Any]:
    """All that is the same at every step and for every batch: parameters, buffers, and what is computed from them."""
    found: dict[Node, Any] = {node: own[name].detach() for name, node in graph.parameters.items()}
    for node in graph.operations:
        if batch_at(node.shape) is None and all(part in found for part in node.inputs()):
            found[node] = apply(node, found, 1)
    return found


def _named(matrices: list[_Matrix], letters: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    """Each square matrix under a name of its own: gates have letters or numbers, parts of the state their names."""
    by_source: dict[str, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    for matrix in matrices:
        by_source[matrix.source][matrix.leaf] += matrix.W.split(matrix.W.shape[1])
    for source, by_leaf in by_source.items():
        for leaf, gates in by_leaf.items():
            marks = letters if len(gates) == len(letters) else range(1, len(gates) + 1)
            for mark, W in zip(marks, gates, strict=True):
                part = f" ({leaf})" if len(by_leaf) > 1 else ""
                yield source + (f"_{mark}" if len(gates) > 1 else "") + part, W


def _columns(graph: StepGraph, leaf: Node) -> dict[Node, Any]:
    """Which columns of a leaf of the state each value holds at each of its places, counted from 1; 0 is none.

    A value without any is left out. What comes out of a product is no state any more; any other operation that keeps
    the shape, as `0.5 * h`, a gate or a norm, leaves the columns where they are.
    """
    found: dict[Node, Any] = {leaf: torch.arange(1, 1 + _blank(leaf).numel()).view(_blank(leaf).shape)}
    for node in graph.operations:
        held = [part for part in node.inputs() if part in found]
        if not held or aten(node.op).product in (Product.ROWS, Product.OTHER):
            continue
        if aten(node.op).moves and not (node.op == "getitem" and isinstance(found[held[0]], Tensor)):
            moved = apply(node, {part: found.get(part, _blank(part)) for part in node.inputs()}, 1)
            if not isinstance(moved, Tensor) or bool(moved.any()):
                found[node] = moved
            continue
        kept = [columns for columns in map(found.__getitem__, held) if _fits(columns, node)]
        if kept:
            found[node] = kept[0] if node.dtype is None else kept[0].expand(_blank(node).shape)
    return found


def _fits(columns: Tensor, node: Node) -> bool:
    """Whether a value can have the columns of what it is computed from. One of several results: its parts can."""
    if node.dtype is None:
        return True
    ours, theirs = columns.shape[::-1], _blank(node).shape[::-1]
    return (
        len(ours) <= len(theirs)
        and ours[0] == theirs[0]
        and all(a in (1, b) for a, b in zip(ours, theirs, strict=False))
    )


def _blank(node: Node) -> Tensor:
    """Zeros of the shape of a value, for a batch of one."""
    return torch.zeros(sizes_of(node.shape), dtype=torch.long)


def _blocks(columns: Tensor) -> list[list[int]]:
    """Where the columns of the state stand, in their own order; a list for each time that they come."""
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    times: dict[int, int] = defaultdict(int)
    for place, column in enumerate(columns.tolist()):
        if column:
            found[times[column]].append((column, place))
            times[column] += 1
    return [[place for _, place in sorted(block)] for block in found.values()]


def _source(matrix: Node, names: dict[Node, str]) -> str:
    """What a matrix comes from: the parameter that it is a part of, or those that it is computed from."""
    needed = needed_for([matrix], set())
    parts = dict.fromkeys(name for node, name in names.items() if node in needed)
    is_part = all(aten(node.op).moves or node.op == "parameter" for node in needed)
    is_parametrised = all("parametrizations." in node.name for node in needed if node in names)
    return next(iter(parts)) if len(parts) == 1 and (is_part or is_parametrised) else f"f({', '.join(parts)})"


def _formulas(graph: StepGraph) -> dict[Node, int]:
    """A number for each value, the same where the same is computed from the same: `self.W.T` may be written twice."""
    numbers: dict[Any, int] = {}
    found: dict[Node, int] = {}

    def plain(a: Any) -> Any:
        if isinstance(a, Node):
            return found.setdefault(a, numbers.setdefault(a, len(numbers)))
        return tuple(map(plain, a)) if isinstance(a, tuple) else (type(a), repr(a))

    for node in graph.operations:
        formula = (node.op, node.target, plain(node.args), plain(tuple(sorted(node.kwargs.items()))))
        found[node] = numbers.setdefault(formula, len(numbers))
    return found


# ------------------------------------------------------------------ the step graph


def _graph(cell: nn.Module) -> StepGraph:
    """The step graph, with the first kind of input that the step takes."""
    for x in example_inputs(cell):
        try:
            graph = trace(cell, x, initial_state(cell, 1, x), real=False)
            if any(node.is_draw for node in graph.operations):
                raise Refusal("it draws random numbers, which differ at every step.")
            return graph
        except Refusal as reason:
            raise ValueError(
                f"which matrices multiply the state of {name_of(cell)} is not known, since it cannot be traced: "
                f"{reason} {_advice(str(reason))}"
            ) from reason
    raise ValueError(
        f"{name_of(cell)} takes no step f(state, x) -> state of any size that was tried, so nothing multiplies its "
        f"state. eigenvalues needs a transition, such as lf.Elman, or a model that holds one; self.input_size and "
        f"initial_state(self, batch) on a transition of your own say its sizes."
    )


def _advice(reason: str) -> str:
    if "hooks" in reason:
        return "Take them off first: handle.remove()."
    return "Give eigenvalues a step without that, or torch.linalg.eigvals the matrix itself."
