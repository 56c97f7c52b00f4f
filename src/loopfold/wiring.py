"""What a pattern is: a network with outputs, and how its parts are put together."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from loopfold.feeding import Feeding, as_if_undrawn
from loopfold.outputs import Outputs
from loopfold.recurrent import RecurrentLayer, explain_run
from loopfold.states import name_of
from loopfold.unfolding import Unfolding, check_lengths


class When(Enum):
    """At which steps of a network something is there."""

    EVERY = "at every step"
    LAST = "after the last step"
    ONCE = "once for all steps"


@dataclass(frozen=True)
class Wiring:
    """How a network is put together, for what draws it, explains it or follows its gradients.

    `recurrent`  the layer that outputs are read from; or a module `h = f(fed, x)`, where what is fed back is all that
                 one step knows of those before it
    `readout`    from h to o, for targets of the kind `outputs`
    `x`          when x is there: at `EVERY` step, or `ONCE`, a vector that every step reads; None: there is no x
    `answers`    when there is an output: at `EVERY` step, or after the `LAST`
    `feeding`    what is fed back by default; None: nothing is
    `encoder`    the layer that reads x first, where the rest reads only what that leaves behind
    `targets`    what makes the targets from x; None: they are given
    `attends`    whether every step reads all that the encoder left, as its context, and not the last of it alone
    """

    recurrent: nn.Module
    readout: "Readout"
    outputs: Outputs
    x: When | None = When.EVERY
    answers: When = When.EVERY
    feeding: Feeding | None = None
    encoder: RecurrentLayer | None = None
    targets: Callable[[Tensor], Tensor] | None = None
    attends: bool = False

    def __post_init__(self) -> None:
        for name, (kind, example) in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise TypeError(f"{name} must be an object such as {example}; got {value!r}.")
        if self.targets is not None and not callable(self.targets):
            raise TypeError(f"targets must be a function of x, such as lambda x: x; got {self.targets!r}.")
        if self.x is When.LAST:
            raise ValueError("x is read at every step or once for all steps: x=When.EVERY or When.ONCE.")
        if self.answers is When.ONCE or (self.answers is When.LAST and self.feeding is not None):
            raise ValueError("outputs are there after the last step, or at every step if they are fed back.")
        if not isinstance(self.recurrent, RecurrentLayer) and (self.feeding is None or self.encoder is not None):
            raise TypeError(
                f"{name_of(self.recurrent)} is not a layer such as lf.Recurrent(cell): "
                f"it needs a feeding, and no encoder."
            )

    @property
    def one_step_for_each_x(self) -> bool:
        return self.x is When.EVERY and self.encoder is None


@dataclass(frozen=True)
class Prediction:
    """`o`, the outputs of a model (unnormalised log probabilities, or real vectors), and the `run` beneath them."""

    o: Tensor
    run: Unfolding


class Readout(nn.Module):
    """`o = c + V h` (book 10.10), at one step or at all of them. Parameters `V [size, n]`, `c [size]`."""

    def __init__(self, hidden_size: int, size: int, below: nn.Module | None = None) -> None:
        super().__init__()
        bound = 1 / math.sqrt(hidden_size)
        like = _a_parameter_of(below)  # V and c live where the network below them lives
        self.V = nn.Parameter(like.new_empty(size, hidden_size).uniform_(-bound, bound))
        self.c = nn.Parameter(like.new_empty(size).uniform_(-bound, bound))

    def forward(self, h: Tensor) -> Tensor:
        if h.is_complex():
            raise ValueError(
                "a readout reads real numbers, and the hidden states are complex. Return (output, state) from the "
                "step, with a real output, such as z.real or torch.view_as_real(z).flatten(1)."
            )
        return self.c + h @ self.V.T  # book (10.10)


_KINDS: dict[str, tuple[Any, str]] = {  # of the fields of a wiring, with an example of each
    "recurrent": (nn.Module, "lf.Recurrent(cell)"),
    "readout": (Readout, "lf.Readout(hidden_size, outputs)"),
    "outputs": (Outputs, "lf.Classes(4)"),
    "x": (When | None, "lf.When.EVERY"),
    "answers": (When, "lf.When.EVERY"),
    "feeding": (Feeding | None, "lf.TeacherForcing()"),
    "encoder": (RecurrentLayer | None, "lf.Recurrent(cell)"),
}


def _a_parameter_of(module: nn.Module | None) -> Tensor:
    parameters = () if module is None else module.parameters()
    return next((p.detach() for p in parameters if p.is_floating_point()), torch.empty(()))


class Pattern(nn.Module, ABC):
    """A network with outputs: `model(x, …)` gives `o`; `model.predict(x, …)` gives `o` with the run beneath it.

    A pattern of your own writes `predict`, `given` and `wiring`; then it is drawn and explained, and its gradients
    followed, like ours. `engine=`, wherever a pattern takes it, runs every recurrence inside: it is set on the layers
    that are passed in, not on copies.
    """

    outputs: Outputs
    readout: Readout

    @abstractmethod
    def predict(self, *args: Any, **options: Any) -> Prediction:
        """The outputs, and the run that they were read from."""

    @property
    @abstractmethod
    def wiring(self) -> Wiring:
        """How it is put together."""

    @abstractmethod
    def given(self, x: Tensor, y: Tensor, lengths: Tensor | list[int] | None = None) -> Tensor:
        """The outputs in training, when the targets are known: what a loss compares with `y`."""

    def forward(self, *args: Any, **options: Any) -> Tensor:
        return self.predict(*args, **options).o

    def explain(self, *args: Any, code: bool = False, **options: Any) -> str:
        """In words: how each recurrence of this call would be run, and why. Takes what `predict` takes.

        >>> from loopfold import Elman, FreeRunning, VectorToSequence
        >>> print(VectorToSequence(Elman(3 + 4, 5), 4).explain(torch.ones(2, 3), feeding=FreeRunning(), steps=60))
        Elman over τ = 60, batch 2, float32 on cpu: FusedCPU, because its loop is native code.
          before the loop, for all steps at once: 0 sequences of what x decides alone
          once for each sequence: 1 row of what the context decides alone
          in the loop: 3 products (5×5, 4×5, 5×4), 13 other operations
          kept for the way back, beside the states: 5 numbers a step and sequence
        """
        f, made = self.wiring.recurrent, list[Any]()

        def run() -> None:
            if isinstance(f, RecurrentLayer):  # which is watched anyway; a hook would have it called for each step
                self.predict(*args, **options)
                return
            hook = f.register_forward_hook(lambda f, inputs, h: made.append(h))
            try:
                self.predict(*args, **options)
            finally:
                hook.remove()

        with as_if_undrawn(*args, *options.values(), self.wiring.feeding):
            text = explain_run(self, run, code)
        if text or isinstance(f, RecurrentLayer):
            return text
        steps = f"{len(made)} step{'s'[: len(made) != 1]}"
        loop = f"a plain loop of {steps}, since each waits for the output of the one before"
        at_once = made[0].dim() == 3  # h is [τ, batch, n], not [batch, n]
        how = "all steps at once, since what is fed back is known beforehand" if at_once else loop
        return f"{name_of(f)}: {how}; no engine is needed."

    def loss(self, o: Tensor, y: Tensor, lengths: Tensor | list[int] | None = None) -> Tensor:
        """L = Σ_t L(t), also summed over the batch; steps after a sequence's end do not count."""
        if lengths is not None:
            if o.dim() != 3:
                raise ValueError(f"o is {tuple(o.shape)}, one output a sequence; lengths are for [τ, batch, size].")
            tau, batch = o.shape[:2]
            check_targets(y, tau, batch)
            alive = torch.arange(tau)[:, None] < check_lengths(lengths, tau, batch).cpu()
            o, y = o[alive], y[alive]  # left out, not multiplied by 0: padding may hold anything, NaN too
        return self.outputs.losses(o, y).sum()

    @property
    def V(self) -> nn.Parameter:
        return self.readout.V

    @property
    def c(self) -> nn.Parameter:
        return self.readout.c


def check_targets(y: Tensor | None, tau: int, batch: int) -> None:
    if y is not None and not isinstance(y, Tensor):
        raise TypeError(f"targets must be a tensor; got a {type(y).__name__}. Type torch.as_tensor(y).")
    if y is not None and y.shape[:2] != (tau, batch):
        raise ValueError(f"y has shape {tuple(y.shape)}; {tau} steps of a batch of {batch} need [{tau}, {batch}, …].")
