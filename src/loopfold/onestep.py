"""A model as one step: the step of a transition, of layers on top of each other, or of those and a readout."""

from typing import Any

import torch
from torch import Tensor, nn

from loopfold.patterns import SequenceToOne, SequenceToSequence
from loopfold.recurrent import Recurrent, RecurrentLayer, Stacked, step_of
from loopfold.regularisers import VariationalDropout
from loopfold.states import State, Step, asks_for_index, leaves, name_of
from loopfold.transitions import initial_state
from loopfold.wiring import Pattern


def one_step(model: nn.Module | Step, who: str = "Stepper") -> Step:
    """What `who` calls at every step: `f(state, x) -> state`, or `-> (output, state)`."""
    if isinstance(model, type) or not callable(model):
        raise TypeError(f"lf.{who} needs a model such as lf.LSTM(3, 5); got {model!r}.")
    if isinstance(model, nn.RNNBase):
        raise TypeError(f"{type(model).__name__} is a layer of torch's. Type lf.{who}(lf.from_torch(...)).")
    if isinstance(model, Recurrent) and _is_ours(model):
        check_hooks(model)
        return one_step(model.cell, who)
    if isinstance(model, nn.Module) and not isinstance(model, RecurrentLayer | Pattern):
        return model
    if not isinstance(model, nn.Module):
        return model
    layer = model.recurrent if isinstance(model, SequenceToSequence | SequenceToOne) and _is_ours(model) else model
    if not isinstance(layer, RecurrentLayer) or not all(map(_is_ours, _layers(layer))):
        raise TypeError(_cannot(model, who))
    timed = any(asks_for_index(part.cell, 2) for part in layer.modules() if isinstance(part, Recurrent))
    return TimedSteps(model) if timed else Steps(model)


def around(model: nn.Module | Step) -> list[nn.Module]:
    """What `one_step` leaves behind where it takes the step out of a layer."""
    return [model] if isinstance(model, Recurrent) else []


def _is_ours(part: nn.Module) -> bool:
    """Whether it does at every step what we know: a class derived from ours may do something else."""
    return type(part) in (Recurrent, Stacked) or (
        type(part).predict in (SequenceToSequence.predict, SequenceToOne.predict)
        and type(part).forward in (Pattern.forward, SequenceToOne.forward)
        if isinstance(part, SequenceToSequence | SequenceToOne)
        else False
    )


def _layers(model: nn.Module) -> list[nn.Module]:
    return [part for part in model.modules() if isinstance(part, RecurrentLayer)]


def _cannot(model: nn.Module, who: str) -> str:
    inner = next((part for part in model.modules() if type(part).__name__ == "Bidirectional"), None)
    why = (
        "Bidirectional reads what comes later"
        if inner is not None
        else "it feeds its outputs back, or is a class of your own"
    )
    return (
        f"lf.{who} cannot take single steps of {name_of(model)}: {why}. It takes a transition, lf.Recurrent, "
        f"lf.Stacked, lf.SequenceToSequence or lf.SequenceToOne; or write the step as a module f(state, x)."
    )


def check_hooks(model: nn.Module) -> None:
    """Refuse hooks on what reads whole sequences: nothing of it is called when steps are taken one at a time."""
    for part in model.modules():
        if isinstance(part, RecurrentLayer | Pattern) and (part._forward_hooks or part._forward_pre_hooks):
            raise ValueError(
                f"{name_of(part)} has hooks, which are called for whole sequences, not for single steps. "
                f"Set them on its cell."
            )
        if isinstance(part, VariationalDropout) and part.training and part.p > 0:
            raise ValueError(
                "VariationalDropout has one mask for a whole sequence, which single steps do not know. "
                "Type model.eval()."
            )


def start_of(f: Step, batch: int, x: State | None, context: State | None) -> State:
    """The state that a step starts from; `x [batch, …]`, where it is known, helps to find it."""
    return f.start(batch, x) if isinstance(f, Steps) else initial_state(f, batch, x, context)


class Steps(nn.Module):
    """One step of the layers of a model, the lowest first, and of its readout."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, state: State, *x: State) -> State:
        return self._step(state, x, None)

    def _step(self, state: State, x: tuple[State, ...], t: Tensor | None) -> State:
        found = step_of(_layer_of(self.model), state, x[0] if x else None, t=t)
        if isinstance(self.model, Pattern):
            return self.model.readout(found.hidden), found.state
        return found.outputs if leaves(found.outputs) else found.hidden, found.state

    def start(self, batch: int, x: State | None) -> State:
        """The state that the model starts from; `x [batch, …]`, where it is known, helps to find that of each layer."""
        layer = _layer_of(self.model)
        return layer.initial_state(batch) if x is None else _start(layer, batch, x)[1]


class TimedSteps(Steps):
    """The same where some cell asks for the number of the step."""

    def forward(self, state: State, *x: State, t: Tensor) -> State:  # type: ignore[override]
        return self._step(state, x, t)


def lowest(f: Step) -> Step:
    """The cell that reads x."""
    if not isinstance(f, Steps):
        return f
    return next(part.cell for part in _layer_of(f.model).modules() if isinstance(part, Recurrent))


def _layer_of(model: nn.Module) -> RecurrentLayer:
    layer = model.recurrent if isinstance(model, SequenceToSequence | SequenceToOne) else model
    assert isinstance(layer, RecurrentLayer)
    return layer


def _start(layer: Any, batch: int, x: State) -> tuple[Tensor, State]:
    """What a layer above reads of the first step, and the state before it."""
    if isinstance(layer, Recurrent):
        state = initial_state(layer.cell, batch, x)
        t = leaves(state)[0].new_zeros(batch, 1)
        with torch.no_grad():
            return step_of(layer, state, x, t=t).hidden, state
    states = []
    for part in layer.parts:
        x, state = _start(part, batch, x)
        states.append(state)
    return x, tuple(states)
