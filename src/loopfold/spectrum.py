"""The eigenvalues of what multiplies the state: whether W by itself shrinks a state or lets it grow."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loopfold.drawing import charts
from loopfold.drawing.figure import Drawing
from loopfold.gradients import cells_of, core_of, short_names
from loopfold.states import State, leaves, name_of
from loopfold.stepgraph.trace import Node, Refusal, StepGraph, trace
from loopfold.transitions import GRU, LSTM, LayerNormLSTM, initial_state

GATES: dict[type[nn.Module], str] = {LSTM: "ifgo", LayerNormLSTM: "ifgo", GRU: "rzn"}


@dataclass(frozen=True)
class Eigenvalues:
    """The eigenvalues of every square matrix that multiplies the state (M17).

    `values`   `{"W": [n] complex}`; a `W [k·n, n]` of k gates is k matrices: `"W_i"`, `"W_f"`, …
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

    A recurrent matrix is a parameter, or the part of one, that multiplies the state; the step graph says which do.

    >>> from loopfold import Elman, ScaledIdentity
    >>> eigenvalues(Elman(3, 5, recurrent_init=ScaledIdentity(0.5))).radius
    {'W': 0.5}
    >>> list(eigenvalues(GRU(3, 5)).values)
    ['W_r', 'W_z', 'W_n']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"eigenvalues needs a transition or a model, a torch.nn.Module; a {type(model).__name__} came.")
    names = {id(p): name for name, p in model.named_parameters()}
    short = short_names(model)
    values: dict[str, Tensor] = {}
    for cell in cells_of(model) or [model]:
        for p, W in _recurrent_matrices(core_of(cell)):
            gates = W.detach().double().cpu().split(W.shape[1])
            letters = next((gates for kind, gates in GATES.items() if isinstance(core_of(cell), kind)), None)
            for i, gate in enumerate(gates):
                name = short[names[id(p)]]
                if len(gates) > 1:
                    name += f"_{letters[i] if letters else i + 1}"
                if not bool(gate.isfinite().all()):
                    raise ValueError(f"{name} holds numbers that are not finite, so it has no eigenvalues.")
                values[name] = torch.linalg.eigvals(gate)
    if not values:
        raise ValueError(
            f"{name_of(model)} has no matrix that multiplies its state. eigenvalues needs a transition with a "
            f"parameter [k·n, n], where n is the size of the state, such as lf.Elman; or a model that holds one."
        )
    return Eigenvalues(values)


# ------------------------------------------------------------------ what multiplies the state

_TURNS = ("permute", "t", "transpose")  # of a matrix: each swaps rows and columns


def _recurrent_matrices(cell: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """Each parameter that multiplies the state, and the part of it that does, `[k·n, n]`."""
    own = dict(cell.named_parameters())
    found: dict[tuple[str, int], Tensor] = {}
    graph = _graph(cell)
    if graph is None:  # a step that cannot be traced: by shape, then
        sizes = {leaf.shape[-1] for leaf in leaves(_zeros(cell)) if leaf.dim() > 1}
        found = {(name, 0): p for name, p in own.items() if p.dim() == 2 and p.shape[1] in sizes}
    else:
        names = {node: name for name, node in graph.parameters.items()}
        for left, right in _products(graph):
            node, turns = right, 0
            while node.op in _TURNS:
                node, turns = node.inputs()[0], turns + 1
            name, place = names.get(node, ""), _state_in(left)
            if name in own and place is not None:
                W = own[name] if turns % 2 else own[name].T  # h @ W.T is what W h is for columns
                found[name, place[0]] = W[:, place[0] : sum(place)]
    square = {key: W for key, W in found.items() if W.shape[0] % W.shape[1] == 0}
    return [(own[name], W) for (name, _), W in square.items()]


def _products(graph: StepGraph) -> Iterator[tuple[Node, Node]]:
    for node in graph.operations:
        if node.op in ("mm", "addmm"):
            yield node.args[-2], node.args[-1]


def _state_in(node: Node) -> tuple[int, int] | None:
    """Where in the columns of a value a leaf of the state stands: its first column, and how many. None: nowhere."""
    if node.op == "state":
        return 0, node.shape[-1]
    if node.op == "cat":
        start = 0
        for part in node.inputs():
            if (place := _state_in(part)) is not None:
                return start + place[0], place[1]
            start += part.shape[-1]
        return None
    if node.op in ("mm", "addmm"):  # what comes out of a product is no state any more
        return None
    places = (_state_in(part) for part in node.inputs() if part.shape == node.shape)
    return next((place for place in places if place is not None), None)


def _graph(cell: nn.Module) -> StepGraph | None:
    """The step graph, with the first kind of input that the step takes; None where there is none."""
    for x0 in _possible_inputs(cell):
        try:
            return trace(cell, x0, initial_state(cell, 1, x0))
        except (Refusal, ValueError, RuntimeError, TypeError):  # not with this input
            continue
    return None


def _possible_inputs(cell: nn.Module) -> Iterator[Tensor | None]:
    like = next((p.detach() for p in cell.parameters() if p.is_floating_point()), torch.zeros(()))
    sizes = {size for p in cell.parameters() for size in p.shape}
    widths = {*sizes, *(a - b for a in sizes for b in sizes if a > b)}  # a matrix may read h and x side by side
    known = getattr(cell, "input_size", None)
    for width in sorted(widths) if known is None else [known]:
        yield like.new_zeros(1, width)
    yield torch.zeros(1, dtype=torch.long, device=like.device)
    yield None


def _zeros(cell: nn.Module) -> State:
    """What a step starts from; nothing, where it is no step at all."""
    try:
        return initial_state(cell, 1)
    except (ValueError, RuntimeError, TypeError):
        return ()
