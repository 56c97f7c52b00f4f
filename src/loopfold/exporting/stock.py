"""ONNX's own LSTM, GRU and RNN, for a model of such cells: runtimes are faster there than in a `Scan`."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from loopfold.patterns import SequenceToSequence
from loopfold.recurrent import Recurrent, Stacked, is_plain
from loopfold.regularisers import VariationalDropout
from loopfold.transitions import GRU, LSTM, Elman, Embedded
from loopfold.wiring import Readout

# torch has i f g o, and r z n; ONNX has i o f c, and z r h
_OPS: dict[Any, str] = {LSTM: "LSTM", GRU: "GRU", Elman: "RNN"}
_ORDERS: dict[Any, tuple[int, ...]] = {LSTM: (0, 3, 1, 2), GRU: (1, 0, 2), Elman: (0,)}
_NONLINEARITIES: dict[Any, str] = {torch.tanh: "Tanh", torch.relu: "Relu", torch.sigmoid: "Sigmoid"}


class Stock(NamedTuple):
    """A model of such cells: a table of its tokens if it reads some, the cells, the lowest first, and a readout."""

    table: Tensor | None
    cells: list[Any]
    readout: Readout | None


def stock(model: Any) -> Stock | None:
    """What a model is made of, if it is nothing else."""
    readout = None
    if type(model) is SequenceToSequence and is_plain(model.readout, Readout):
        model, readout = model.recurrent, model.readout
    layers = [model]
    if is_plain(model, Stacked) and isinstance(model.dropout, nn.Dropout | VariationalDropout):  # nothing in evaluation
        layers = [*model.layers]
    cells = [layer.cell if is_plain(layer, Recurrent) else layer for layer in layers]
    table = None
    if is_plain(cells[0], Embedded) and is_plain(cells[0].embedding, nn.Embedding):
        if cells[0].embedding.max_norm is not None:
            return None
        table, cells[0] = cells[0].embedding.weight, cells[0].cell
    return None if any(_kind(cell) is None for cell in cells) else Stock(table, cells, readout)


def _kind(cell: Any) -> Any:
    """Which of ONNX's cells it is, as that came: no step of its own, and an activation that ONNX has."""
    kind = next((kind for kind in _OPS if is_plain(cell, kind)), None)
    return None if kind is Elman and cell.activation not in _NONLINEARITIES else kind


def arranged(cell: Any) -> tuple[Tensor, Tensor, Tensor]:
    """W, R and B of ONNX, each `[1, …]`."""
    order, n = _ORDERS[_kind(cell)], cell.hidden_size

    def gates(matrix: Tensor) -> Tensor:
        blocks = matrix.detach().float().cpu().reshape(len(order), n, -1)[list(order)]
        return blocks.reshape(len(order) * n, -1)

    zero = torch.zeros_like(cell.b)
    if _kind(cell) is GRU:
        zero = torch.cat([zero[: 2 * n], cell.b_hn])
    bias = torch.cat([gates(cell.b), gates(zero)]).reshape(1, -1)
    return gates(cell.U)[None].contiguous(), gates(cell.W)[None].contiguous(), bias


def attributes(cell: Any) -> dict[str, Any]:
    if _kind(cell) is Elman:
        return {"activations": [_NONLINEARITIES[cell.activation]]}
    return {"linear_before_reset": 1} if _kind(cell) is GRU else {}


def layers(graph: Any, found: Stock, x: str, states: list[str], lengths: str) -> tuple[list[str], list[str]]:
    """Nodes for all steps: the leaves of the last state `[batch, n]`, and the output `[time, batch, …]`."""
    if found.table is not None:
        x = graph.node("Gather", graph.tensor(found.table.detach().float().cpu()), x, axis=0)
    after, flow = [], iter(states)
    for cell in found.cells:
        leaves = [graph.node("Unsqueeze", next(flow), graph.integers(0)) for _ in range(1 + (_kind(cell) is LSTM))]
        weights = [graph.tensor(tensor) for tensor in arranged(cell)]
        many = graph.several(
            _OPS[_kind(cell)],
            x,
            *weights,
            lengths,
            *leaves,
            results=1 + len(leaves),
            hidden_size=cell.hidden_size,
            **attributes(cell),
        )
        after += [graph.node("Squeeze", leaf, graph.integers(0)) for leaf in many[1:]]
        x = graph.node("Squeeze", many[0], graph.integers(1))
    if found.readout is not None:
        matrix, bias = (t.detach().float().cpu() for t in (found.readout.V.T, found.readout.c))
        x = graph.node("Add", graph.node("MatMul", x, graph.tensor(matrix.contiguous())), graph.tensor(bias))
    return after, [x]
