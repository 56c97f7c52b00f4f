"""torch's own recurrent modules as ours, and ours as torch's: the same network, with a copy of the weights."""

from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from loopfold.engines.auto import Auto
from loopfold.engines.base import Engine
from loopfold.recurrent import Bidirectional, Recurrent, RecurrentLayer, Stacked
from loopfold.states import Step, name_of
from loopfold.transitions import GRU, LSTM, Elman

_Torch = nn.RNN | nn.LSTM | nn.GRU
_TorchCell = nn.RNNCell | nn.LSTMCell | nn.GRUCell


@overload
def from_torch(module: _TorchCell) -> Elman | LSTM | GRU: ...
@overload
def from_torch(module: _Torch, engine: Engine = Auto()) -> Stacked: ...
def from_torch(module: _Torch | _TorchCell, engine: Engine = Auto()) -> Stacked | Elman | LSTM | GRU:
    """`nn.RNN`, `nn.LSTM` or `nn.GRU` as a `Stacked` of our own layers, with a copy of its weights.

    Ours reads time first, `[τ, batch, n_in]`, whatever the module's `batch_first` was. A cell, such as `nn.GRUCell`,
    becomes a transition of ours, which takes the state first.

    >>> theirs = nn.LSTM(3, 5, num_layers=2, bidirectional=True)
    >>> x = torch.ones(7, 2, 3)
    >>> torch.allclose(from_torch(theirs)(x).hidden, theirs(x)[0], atol=1e-6)
    True
    """
    if isinstance(module, nn.RNNCell | nn.LSTMCell | nn.GRUCell):
        return _cell_from(module, "").train(module.training)
    if not isinstance(module, nn.RNN | nn.LSTM | nn.GRU):
        raise TypeError(f"from_torch takes nn.RNN, nn.LSTM or nn.GRU, or their cells; got a {type(module).__name__}.")
    if module.proj_size:
        raise ValueError(f"from_torch cannot take proj_size={module.proj_size}: our LSTM has no projection of h.")
    layers: list[RecurrentLayer] = []
    for k in range(module.num_layers):
        directions = [Recurrent(_cell_from(module, f"_l{k}{suffix}")) for suffix in _suffixes(module)]
        layers.append(Bidirectional(*directions) if module.bidirectional else directions[0])
    return Stacked(layers, module.dropout, engine=engine).train(module.training)


def _suffixes(module: _Torch) -> list[str]:
    return ["", "_reverse"] if module.bidirectional else [""]


def _cell_from(module: _Torch | _TorchCell, name: str) -> Elman | LSTM | GRU:
    """One layer and direction of a torch module as a transition. Their two biases become our one."""
    weights = {key: p.detach() for key, p in module.named_parameters()}
    U, W = weights[f"weight_ih{name}"], weights[f"weight_hh{name}"]
    options: dict[str, Any] = {"device": U.device, "dtype": U.dtype}
    cell: Elman | LSTM | GRU
    if isinstance(module, nn.RNN | nn.RNNCell):
        activation = torch.tanh if module.nonlinearity == "tanh" else torch.relu
        cell = Elman(U.shape[1], W.shape[1], activation, **options)
    elif isinstance(module, nn.LSTM | nn.LSTMCell):
        cell = LSTM(U.shape[1], W.shape[1], **options)
    else:
        cell = GRU(U.shape[1], W.shape[1], **options)
    zeros = U.new_zeros(U.shape[0])
    b_ih, b_hh = weights.get(f"bias_ih{name}", zeros), weights.get(f"bias_hh{name}", zeros)
    with torch.no_grad():
        cell.U.copy_(U)
        cell.W.copy_(W)
        cell.b.copy_(b_ih + b_hh)
        if isinstance(cell, GRU):
            n = cell.hidden_size
            cell.b[2 * n :] = b_ih[2 * n :]  # the candidate's two biases do not add up: r multiplies only one
            cell.b_hn.copy_(b_hh[2 * n :])
    if not module.bias:  # no bias: zeros that are not trained
        for parameter in _biases(cell):
            parameter.requires_grad_(False)
    return cell


def _biases(cell: Elman | LSTM | GRU) -> list[nn.Parameter]:
    return [cell.b, cell.b_hn] if isinstance(cell, GRU) else [cell.b]


def to_torch(layer: RecurrentLayer | Step) -> _Torch:
    """The torch module that computes the same, with a copy of the weights: the way back from `from_torch`.

    >>> to_torch(Stacked([GRU(3, 5), GRU(5, 5)]))
    GRU(3, 5, num_layers=2)
    """
    stack = layer if isinstance(layer, Stacked) else Stacked([layer])
    rows = [_directions(part) for part in stack.layers]
    cells = [cell for row in rows for cell in row]
    first = cells[0]
    kind, n, width = type(first), first.hidden_size, len(rows[0])
    for k, row in enumerate(rows):
        n_in = first.input_size if k == 0 else n * width
        for cell in row:
            if type(cell) is not kind or (cell.input_size, cell.hidden_size) != (n_in, n) or len(row) != width:
                raise ValueError(
                    f"torch needs every layer alike; layer {k} holds {cell} where {kind.__name__}({n_in}, {n}) "
                    f"in {width} direction(s) was needed."
                )
    if not isinstance(stack.dropout, nn.Dropout):
        raise ValueError(f"torch has plain dropout between layers only; {stack.dropout} is another.")
    biased = any(p.requires_grad or bool(p.any()) for cell in cells for p in _biases(cell))
    options: dict[str, Any] = {
        "num_layers": len(rows),
        "bias": biased,
        "dropout": stack.dropout.p if len(rows) > 1 else 0.0,
        "bidirectional": width == 2,
        "device": first.W.device,
        "dtype": first.W.dtype,
    }
    assert first.input_size is not None
    module: _Torch
    if isinstance(first, Elman):
        module = nn.RNN(first.input_size, n, nonlinearity=_nonlinearity(cells), **options)
    elif isinstance(first, LSTM):
        module = nn.LSTM(first.input_size, n, **options)
    else:
        module = nn.GRU(first.input_size, n, **options)
    with torch.no_grad():
        for k, row in enumerate(rows):
            for cell, suffix in zip(row, _suffixes(module), strict=True):
                _copy_into(module, f"l{k}{suffix}", cell)
    return module.train(stack.training)


def _directions(layer: nn.Module) -> list[Elman | LSTM | GRU]:
    parts = [layer.forwards, layer.backwards] if isinstance(layer, Bidirectional) else [layer]
    cells: list[Elman | LSTM | GRU] = []
    for part in parts:
        cell = part.cell if isinstance(part, Recurrent) else part
        if isinstance(cell, nn.Module) and is_parametrized(cell):
            raise TypeError(
                f"{name_of(cell)} has parametrizations, which torch's networks have not: remove them first."
            )
        if not isinstance(cell, Elman | LSTM | GRU) or type(cell) not in (Elman, LSTM, GRU):  # a subclass may differ
            raise TypeError(f"torch has Elman, LSTM and GRU networks only; {name_of(cell)} is none of them.")
        cells.append(cell)
    return cells


def _nonlinearity(cells: list[Any]) -> str:
    names = {torch.tanh: "tanh", torch.relu: "relu", F.relu: "relu", F.tanh: "tanh"}
    found = {names.get(cell.activation) for cell in cells}
    if len(found) != 1 or None in found:
        raise ValueError("torch's nn.RNN has torch.tanh or torch.relu in all its layers; got another activation.")
    return str(found.pop())


def _copy_into(module: _Torch, name: str, cell: Elman | LSTM | GRU) -> None:
    weights = dict(module.named_parameters())
    weights[f"weight_ih_{name}"].copy_(cell.U)
    weights[f"weight_hh_{name}"].copy_(cell.W)
    if module.bias:
        weights[f"bias_ih_{name}"].copy_(cell.b)
        weights[f"bias_hh_{name}"].zero_()
        if isinstance(cell, GRU):
            weights[f"bias_hh_{name}"][2 * cell.hidden_size :] = cell.b_hn
