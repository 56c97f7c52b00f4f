"""Modules around `unfold`: Recurrent, Stacked, Bidirectional; and to and from torch's own."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopfold.engines.auto import Auto, explain
from loopfold.engines.base import Engine, Recurrence
from loopfold.engines.sequential import Sequential
from loopfold.states import State, Step, in_evaluation, map_state, name_of
from loopfold.transitions import GRU, LSTM, Elman, hidden_size, initial_state
from loopfold.unfolding import Unfolding, checked, unfold


class RecurrentLayer(nn.Module, ABC):
    """A module that reads a sequence `x [τ, batch, n_in]` and returns an `Unfolding`."""

    @abstractmethod
    def forward(
        self, x: Tensor | None = None, state: State | None = None, lengths: Tensor | list[int] | None = None
    ) -> Unfolding:
        """Read the sequence from `state` (zeros by default)."""

    @abstractmethod
    def initial_state(self, batch: int) -> State:
        """The state that a run of `batch` sequences starts from where none is given."""

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """The size of `run.hidden`, which a layer above reads."""

    def explain(self, *args: Any, code: bool = False, **options: Any) -> str:
        """In words: which engine would run this call, why, and what the compiler made of each transition.

        Takes what a call takes, and `code=True` to see the compiled loop as well.

        >>> print(Recurrent(Elman(3, 5)).explain(torch.ones(20, 2, 3)))
        Elman over τ = 20, batch 2, float32 on cpu: FusedCPU, because its loop is native code.
          before the loop, for all steps at once: 1 sequence of what x decides alone
          in the loop: 1 product (5×5), 2 other operations
          kept for the way back, beside the states: nothing
        """
        if isinstance(self, Recurrent):  # no need to run it
            return explain(self.engine, self.recurrence(*args, **options), code)
        return explain_run(self, lambda: self(*args, **options), code)


class Recurrent(RecurrentLayer):
    """A transition, unfolded over whatever it is called on.

    It takes what `unfold` takes: `lengths`, `steps`, a `context`. A layer above reads `run.hidden`, which is the first
    part of the output of a transition that returns `(output, state)`.

    >>> run = Recurrent(LSTM(3, 5))(torch.ones(7, 2, 3))
    >>> run.hidden.shape, run.last.c.shape
    (torch.Size([7, 2, 5]), torch.Size([2, 5]))
    """

    def __init__(self, cell: Step, engine: Engine = Auto()) -> None:
        super().__init__()
        if isinstance(cell, nn.RNNBase):
            raise TypeError(f"{type(cell).__name__} is a layer of torch's, not a transition. Type lf.from_torch(...).")
        if isinstance(cell, type):
            raise TypeError(f"Recurrent needs a transition, not its class: type {cell.__name__}(...) with its sizes.")
        if isinstance(cell, RecurrentLayer) or not callable(cell):
            raise TypeError(f"Recurrent needs a transition f(state, x) -> state; got a {type(cell).__name__}.")
        self.cell = cell
        self.engine = checked_engine(engine)

    def forward(
        self,
        x: State | None = None,
        state: State | None = None,
        lengths: Tensor | list[int] | None = None,
        *,
        steps: int | None = None,
        context: State | None = None,
    ) -> Unfolding:
        return unfold(self.cell, x, state, lengths, self.engine, context, steps=steps)

    def recurrence(
        self,
        x: State | None = None,
        state: State | None = None,
        lengths: Tensor | list[int] | None = None,
        *,
        steps: int | None = None,
        context: State | None = None,
    ) -> Recurrence:
        """What an engine is given for such a call."""
        return checked(self.cell, x, state, lengths, steps, context)

    def initial_state(self, batch: int) -> State:
        return initial_state(self.cell, batch)

    @property
    def hidden_size(self) -> int:
        return hidden_size(self.cell)

    def extra_repr(self) -> str:
        return f"engine={self.engine}"


def checked_engine(engine: Engine) -> Engine:
    """`engine`, if it is one."""
    if not isinstance(engine, Engine):
        raise TypeError(f"engine must be an object such as lf.Auto(); got {engine!r}.")
    return engine


def as_layer(layer: RecurrentLayer | Step, engine: Engine | None = None) -> RecurrentLayer:
    """A transition as a layer; a layer as it is. `engine`, if one is given, is set on every recurrence in it."""
    made = layer if isinstance(layer, RecurrentLayer) else Recurrent(layer)
    if engine is not None:
        checked_engine(engine)
        for part in recurrences_of(made).values():
            part.engine = engine
    return made


def recurrences_of(model: nn.Module) -> dict[str, Recurrent]:
    """Every recurrence that an engine runs, by its name in the model."""
    return {name: part for name, part in model.named_modules() if isinstance(part, Recurrent)}


@contextmanager
def plain_loops(model: nn.Module) -> Iterator[None]:
    """Inside it, every recurrence of `model` runs as the plain loop, which calls the transition at every step."""
    parts = recurrences_of(model).values()
    engines = [part.engine for part in parts]
    try:
        for part in parts:
            part.engine = Sequential()
        yield
    finally:
        for part, engine in zip(parts, engines, strict=True):
            part.engine = engine


def explain_run(model: nn.Module, run: Callable[[], Any], code: bool) -> str:
    """A paragraph on each recurrence of `model`, as it is called in `run`; none where it has none."""
    parts = recurrences_of(model)
    calls: list[tuple[str, Recurrence]] = []
    hooks = [
        part.register_forward_pre_hook(
            lambda part, args, options, name=name: calls.append((name, part.recurrence(*args, **options))),
            with_kwargs=True,
        )
        for name, part in parts.items()
    ]
    try:
        with torch.random.fork_rng(_gpus(model)), plain_loops(model), in_evaluation(model), torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    texts = Counter((name, explain(parts[name].engine, recurrence, code)) for name, recurrence in calls)
    return "\n\n".join(
        (f"{name}: " if len(parts) > 1 else "") + text + (f"\n  so {count} times, one after the other" * (count > 1))
        for (name, text), count in texts.items()
    )


def _gpus(model: nn.Module) -> list[torch.device]:
    return [device for device in {p.device for p in model.parameters()} if device.type == "cuda"]


class VariationalDropout(nn.Module):
    """Dropout with one mask for all steps of a sequence, so that the same units are silent throughout.

    Gal and Ghahramani (2016) put such masks on what a layer reads; `Stacked` does so between its layers.

    >>> kept = VariationalDropout(0.5)(torch.ones(7, 2, 5))
    >>> bool((kept == kept[0]).all())
    True
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = _probability(p)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        return x * F.dropout(torch.ones_like(x[:1]), self.p)  # [τ, batch, n] times [1, batch, n]

    def extra_repr(self) -> str:
        return f"p={self.p}"


def _probability(p: float) -> float:
    if not 0 <= p < 1:
        raise ValueError(f"dropout is a probability from 0 up to but not including 1; got {p}.")
    return p


class Stacked(RecurrentLayer):
    """Layers on top of each other: each reads the hidden sequence of the one below. Dropout falls between them.

    `dropout` is a probability, or a module such as `VariationalDropout(0.3)`. `engine`, if one is given, runs every
    recurrence inside, here and wherever layers are put together: it is set on the layers passed in, not on copies.
    `run.states` and `run.last` are tuples with one entry a layer, the lowest first; `run.hidden` is the top's.

    >>> Stacked([Elman(3, 5), LSTM(5, 4)], dropout=0.1)(torch.ones(7, 2, 3)).hidden.shape
    torch.Size([7, 2, 4])
    """

    def __init__(
        self,
        layers: Sequence[RecurrentLayer | Step],
        dropout: float | nn.Module = 0.0,
        *,
        engine: Engine | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(layers, list | tuple):
            raise TypeError(f"Stacked needs a list of layers: Stacked([a, b]); got a {type(layers).__name__}.")
        if not layers:
            raise ValueError("Stacked needs at least one layer.")
        self.layers = nn.ModuleList(as_layer(layer, engine) for layer in layers)
        self.dropout = dropout if isinstance(dropout, nn.Module) else nn.Dropout(_probability(dropout))

    def forward(
        self, x: Tensor | None = None, state: State | None = None, lengths: Tensor | list[int] | None = None
    ) -> Unfolding:
        if state is not None and len(state) != len(self.layers):
            raise ValueError(
                f"Stacked has {len(self.layers)} layers, so it needs {len(self.layers)} states; got {len(state)}."
            )
        runs: list[Unfolding] = []
        for i, layer in enumerate(self.layers):
            if i > 0:
                x = self.dropout(runs[-1].hidden)
            runs.append(layer(x, None if state is None else state[i], lengths))
        states, last = tuple(run.states for run in runs), tuple(run.last for run in runs)
        return replace(runs[-1], states=states, last=last)

    def initial_state(self, batch: int) -> State:
        return tuple(layer.initial_state(batch) for layer in self.parts)

    @property
    def hidden_size(self) -> int:
        return self.parts[-1].hidden_size

    @property
    def parts(self) -> list[RecurrentLayer]:
        """The layers, the lowest first."""
        return [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]


class Bidirectional(RecurrentLayer):
    """Two layers, one of which reads each sequence from its own end to its start.

    `run.hidden` puts both side by side: at step t, what comes before and what comes after. `run.states` and
    `run.last` are pairs; the second of `run.last` is the backward layer's state after it has read x(1). What comes
    after is part of every step, so a sequence read in two halves does not equal the whole.

    >>> Bidirectional(GRU(3, 5), GRU(3, 4))(torch.ones(7, 2, 3), lengths=[7, 4]).hidden.shape
    torch.Size([7, 2, 9])
    """

    def __init__(
        self,
        forwards: RecurrentLayer | Step,
        backwards: RecurrentLayer | Step,
        *,
        engine: Engine | None = None,
    ) -> None:
        super().__init__()
        self.forwards = as_layer(forwards, engine)
        self.backwards = as_layer(backwards, engine)

    def forward(
        self, x: Tensor | None = None, state: State | None = None, lengths: Tensor | list[int] | None = None
    ) -> Unfolding:
        if not isinstance(x, Tensor):
            raise TypeError(f"Bidirectional reads an input x [τ, batch, n_in]; got a {type(x).__name__}.")
        if state is not None and len(state) != 2:
            raise ValueError(f"Bidirectional needs a pair of states, forwards and backwards; got {len(state)}.")
        first, second = (None, None) if state is None else state
        there = self.forwards(x, first, lengths)  # checks x and lengths
        back = self.backwards(_reverse(x, lengths), second, lengths)
        states, outputs = (
            None if part is None else map_state(lambda leaf: _reverse(leaf, lengths), part)
            for part in (back.states, back.outputs)
        )
        return Unfolding(
            outputs=None if there.outputs is None and outputs is None else (there.outputs, outputs),
            states=(there.states, states),
            last=(there.last, back.last),
            hidden=torch.cat([there.hidden, _reverse(back.hidden, lengths)], -1),
            last_hidden=torch.cat([there.last_hidden, back.last_hidden], -1),
        )

    def initial_state(self, batch: int) -> State:
        return self.forwards.initial_state(batch), self.backwards.initial_state(batch)

    @property
    def hidden_size(self) -> int:
        return self.forwards.hidden_size + self.backwards.hidden_size


def _reverse(x: Tensor, lengths: Tensor | list[int] | None) -> Tensor:
    """Each sequence of `x [τ, batch, …]` back to front within its own length; padding stays where it is."""
    if lengths is None:
        return x.flip(0)
    lengths = torch.as_tensor(lengths, device=x.device)
    t = torch.arange(x.shape[0], device=x.device)[:, None]
    time = torch.where(t < lengths, lengths - 1 - t, t)  # [τ, batch]
    return x[time, torch.arange(x.shape[1], device=x.device)]


# ------------------------------------------------------------------ torch's modules and ours


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
