"""Modules around `unfold`: Recurrent, Stacked, Bidirectional."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from loopfold.engines.auto import Auto
from loopfold.engines.base import Engine, Recurrence
from loopfold.engines.explaining import explain
from loopfold.engines.sequential import Sequential
from loopfold.operations import numbered, unfold_in_graph
from loopfold.regularisers import draw_weights, probability
from loopfold.states import (
    State,
    Step,
    asks_for_index,
    in_evaluation,
    leaves,
    map_state,
    parted,
    take_step,
)
from loopfold.transitions import hidden_size, initial_state
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

        >>> from loopfold import Elman
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

    >>> from loopfold import LSTM
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
        self.number = numbered(self)
        self.returns: Any = None  # see `operations`

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.number = numbered(self)  # a copy is another layer

    def forward(
        self,
        x: State | None = None,
        state: State | None = None,
        lengths: Tensor | list[int] | None = None,
        *,
        steps: int | None = None,
        context: State | None = None,
        only_last: bool = False,
    ) -> Unfolding:
        plain = isinstance(self.cell, nn.Module) and context is None and steps is None
        if plain and isinstance(x, Tensor) and torch.compiler.is_compiling():
            return unfold_in_graph(self, x, state, lengths, only_last)
        calls = _watched.get()
        if calls is not None:
            calls.append((self, self.recurrence(x, state, lengths, steps=steps, context=context)))
        engine = self.engine if calls is None else Sequential()
        if self.training:
            draw_weights(self)
        return unfold(self.cell, x, state, lengths, engine, context, steps=steps, only_last=only_last)

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


def engine_of(layer: RecurrentLayer) -> Engine:
    """The engine of a loop over single steps of a layer, as of one that is fed its own outputs.

    It is that of all recurrences in the layer; where they have several, or there is none, `Auto` chooses. A layer that
    is called for each step runs its own engine within the plain loop.
    """
    engines = [part.engine for part in recurrences_of(layer).values()]
    if engines and not runs_by_steps(layer):
        return Sequential()
    return engines[0] if engines and all(engine == engines[0] for engine in engines) else Auto()


def recurrences_of(model: nn.Module) -> dict[str, Recurrent]:
    """Every recurrence that an engine runs, by its name in the model."""
    return {name: part for name, part in model.named_modules() if isinstance(part, Recurrent)}


@contextmanager
def plain_loops(model: nn.Module) -> Iterator[None]:
    """Inside it, every recurrence of `model` runs as the plain loop, which calls the transition at every step."""
    parts: list[Any] = [part for part in model.modules() if isinstance(getattr(part, "engine", None), Engine)]
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
    names = {part: name for name, part in model.named_modules() if name}
    calls: list[tuple[Recurrent, Recurrence]] = []
    token = _watched.set(calls)
    try:
        with torch.random.fork_rng(_gpus(model)), in_evaluation(model), torch.no_grad():
            run()
    finally:
        _watched.reset(token)
    texts: Counter[tuple[str, str]] = Counter()
    for part, call in calls:  # a loop that feeds outputs back is named after what it is fed to
        name = next((names[inner] for inner in part.modules() if inner in names), "")
        texts[name, explain(part.engine, call, code)] += 1
    return "\n\n".join(
        (f"{name}: " if len(parts) > 1 else "") + text + (f"\n  so {count} times, one after the other" * (count > 1))
        for (name, text), count in texts.items()
    )


# What is being explained: the calls of recurrences so far, each of which is run as a plain loop
_watched: ContextVar[list[tuple["Recurrent", Recurrence]] | None] = ContextVar("watched", default=None)


def _gpus(model: nn.Module) -> list[torch.device]:
    return [device for device in {p.device for p in model.parameters()} if device.type == "cuda"]


class Stacked(RecurrentLayer):
    """Layers on top of each other: each reads the hidden sequence of the one below. Dropout falls between them.

    `dropout` is a probability, or a module such as `VariationalDropout(0.3)`. `engine`, if one is given, runs every
    recurrence inside, here and wherever layers are put together: it is set on the layers passed in, not on copies.
    Where a network is fed its own outputs, one engine runs all layers: theirs, or `Auto` where they have several.
    `run.states` and `run.last` are tuples with one entry a layer, the lowest first; `run.hidden` is the top's.

    >>> from loopfold import LSTM, Elman
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
        self.dropout = dropout if isinstance(dropout, nn.Module) else nn.Dropout(probability(dropout))

    def forward(
        self,
        x: Tensor | None = None,
        state: State | None = None,
        lengths: Tensor | list[int] | None = None,
        *,
        only_last: bool = False,
    ) -> Unfolding:
        runs: list[Unfolding] = []
        for layer, own in zip(self.layers, self.states_of(state), strict=True):
            x = self.dropout(runs[-1].hidden) if runs else x
            top = only_last and len(runs) + 1 == len(self.layers)
            runs.append(read_to_end(layer, x, own, lengths) if top else layer(x, own, lengths))
        states, last = tuple(run.states for run in runs), tuple(run.last for run in runs)
        if only_last:
            states = (*(map_state(lambda leaf: leaf[None], below) for below in last[:-1]), states[-1])
        return replace(runs[-1], states=states, last=last)

    def states_of(self, state: State | None) -> list[State | None]:
        """The state of each layer, of those that are given."""
        if state is not None and len(state) != len(self.layers):
            raise ValueError(
                f"Stacked has {len(self.layers)} layers, so it needs {len(self.layers)} states; got {len(state)}."
            )
        return [None] * len(self.layers) if state is None else list(state)

    def initial_state(self, batch: int) -> State:
        return tuple(layer.initial_state(batch) for layer in self.parts)

    @property
    def hidden_size(self) -> int:
        return self.parts[-1].hidden_size

    @property
    def parts(self) -> list[RecurrentLayer]:
        """The layers, the lowest first."""
        return [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]


# ------------------------------------------------------------------ one step of a layer, as a part of a larger one


class Stepped(NamedTuple):
    """What one step of a layer gives, as `Unfolding` has it for a run; `outputs` is () where there are none."""

    hidden: Tensor
    outputs: State
    state: State


def is_plain(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of the layer is what `kind` says: neither a `forward` of its own nor a hook has a say in it."""
    if not isinstance(layer, kind) or type(layer).forward is not kind.forward or "forward" in vars(layer):
        return False
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return not any(hooks)


def runs_by_steps(layer: RecurrentLayer) -> bool:
    """Whether a step of the layer is a step of its transitions, and not a call of some layer for one step."""
    if is_plain(layer, Stacked) and isinstance(layer, Stacked):
        return all(map(runs_by_steps, layer.parts))
    return is_plain(layer, Recurrent)


def read_to_end(
    layer: nn.Module, x: Tensor | None, state: State | None = None, lengths: Tensor | list[int] | None = None
) -> Unfolding:
    """A run of a layer of which only the last step of each sequence is read: the others may be missing in it."""
    plain = is_plain(layer, Recurrent) or is_plain(layer, Stacked)
    return layer(x, state, lengths, only_last=True) if plain else layer(x, state, lengths)


def step_of(
    layer: RecurrentLayer, state: State, x: State | None, context: State | None = None, t: Any = None
) -> Stepped:
    """One step of a layer, from x `[batch, …]`; in a stack, each layer reads the one below.

    A layer that has a `forward` of its own, or hooks, is called for one step.
    """
    if isinstance(layer, Recurrent) and is_plain(layer, Recurrent):
        asks = t is not None and asks_for_index(layer.cell, 1 + (x is not None) + (context is not None))
        outputs, new = parted(take_step(layer.cell, state, x, context, t if asks else None), state)
        return Stepped(leaves(new if outputs is None else outputs)[0], () if outputs is None else outputs, new)
    if isinstance(layer, Stacked) and is_plain(layer, Stacked):
        steps: list[Stepped] = []
        for part, own in zip(layer.parts, state, strict=True):
            x = layer.dropout(steps[-1].hidden[None])[0] if steps else x
            steps.append(step_of(part, own, x, t=t))
        return steps[-1]._replace(state=tuple(step.state for step in steps))
    x = None if x is None else map_state(lambda leaf: leaf[None], x)
    run = layer(x, state) if context is None else layer(x, state, context=context)
    outputs = () if run.outputs is None else map_state(lambda leaf: leaf[0], run.outputs)
    return Stepped(run.hidden[0], outputs, run.last)


def hidden_of(layer: RecurrentLayer, outputs: State, states: State) -> Tensor | None:
    """The `hidden` of a layer among its outputs and states, or None where it is none of them."""
    if isinstance(layer, Stacked) and is_plain(layer, Stacked):
        return hidden_of(layer.parts[-1], outputs, states[-1])
    return (leaves(outputs) or leaves(states))[0] if is_plain(layer, Recurrent) else None


def start_of(layer: RecurrentLayer, x: Tensor, state: State | None, context: State | None = None) -> State:
    """The state before the first step, which reads x `[batch, …]`: `state`, checked, or the layer's own."""
    if isinstance(layer, Recurrent) and is_plain(layer, Recurrent):
        return layer.recurrence(x[None], state, context=context).state
    if isinstance(layer, Stacked) and is_plain(layer, Stacked):
        starts: list[State] = []
        for part, own in zip(layer.parts, layer.states_of(state), strict=True):
            starts.append(start_of(part, x, own))
            x = x.new_zeros(len(x), part.hidden_size)
        return tuple(starts)
    return layer.initial_state(len(x)) if state is None else state


class Bidirectional(RecurrentLayer):
    """Two layers, one of which reads each sequence from its own end to its start.

    `run.hidden` puts both side by side: at step t, what comes before and what comes after. `run.states` and
    `run.last` are pairs; the second of `run.last` is the backward layer's state after it has read x(1). What comes
    after is part of every step, so a sequence read in two halves does not equal the whole.

    >>> from loopfold import GRU
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
