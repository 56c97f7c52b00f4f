"""The shapes of network that the book draws: what is read, where outputs stand, and what is fed back."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from loopfold.engines.auto import Auto
from loopfold.engines.base import Engine
from loopfold.engines.sequential import Sequential
from loopfold.feeding import Feeding, FreeRunning, Outputs, Reals, TeacherForcing, as_if_undrawn, as_outputs
from loopfold.recurrent import Bidirectional, Recurrent, RecurrentLayer, as_layer, checked_engine, explain_run
from loopfold.states import State, Step, map_state, name_of, whole_number
from loopfold.transitions import Transition
from loopfold.unfolding import Unfolding, check_input, check_lengths, check_nan, check_steps


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
    """

    recurrent: nn.Module
    readout: "Readout"
    outputs: Outputs
    x: When | None = When.EVERY
    answers: When = When.EVERY
    feeding: Feeding | None = None
    encoder: RecurrentLayer | None = None
    targets: Callable[[Tensor], Tensor] | None = None

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

        >>> from loopfold import Elman
        >>> print(VectorToSequence(Elman(3 + 4, 5), 4).explain(torch.ones(2, 3), feeding=FreeRunning(), steps=6))
        Elman over τ = 1, batch 2, float32 on cpu: Sequential, because there is only one step, so no loop to compile.
          so 6 times, one after the other
        """
        f, made = self.wiring.recurrent, list[Any]()
        hook = f.register_forward_hook(lambda f, inputs, h: made.append(h))
        try:
            with as_if_undrawn(*args, *options.values(), self.wiring.feeding):
                texts = [explain_run(self, lambda: self.predict(*args, **options), code)]
        finally:
            hook.remove()
        if not isinstance(f, RecurrentLayer):
            steps = f"{len(made)} step{'s'[: len(made) != 1]}"
            loop = f"a plain loop of {steps}, since each waits for the output of the one before"
            at_once = made[0].dim() == 3  # h is [τ, batch, n], not [batch, n]
            how = "all steps at once, since what is fed back is known beforehand" if at_once else loop
            texts.append(f"{name_of(f)}: {how}; no engine is needed.")
        return "\n\n".join(filter(None, texts))

    def loss(self, o: Tensor, y: Tensor, lengths: Tensor | list[int] | None = None) -> Tensor:
        """L = Σ_t L(t), also summed over the batch; steps after a sequence's end do not count."""
        if lengths is not None:
            if o.dim() != 3:
                raise ValueError(f"o is {tuple(o.shape)}, one output a sequence; lengths are for [τ, batch, size].")
            tau, batch = o.shape[:2]
            _check_targets(y, tau, batch)
            alive = torch.arange(tau)[:, None] < check_lengths(lengths, tau, batch).cpu()
            o, y = o[alive], y[alive]  # left out, not multiplied by 0: padding may hold anything, NaN too
        return self.outputs.losses(o, y).sum()

    @property
    def V(self) -> nn.Parameter:
        return self.readout.V

    @property
    def c(self) -> nn.Parameter:
        return self.readout.c


class SequenceToSequence(Pattern):
    """Hidden recurrence with an output at every step (book Fig. 10.3, M7).

    >>> from loopfold import Elman
    >>> model = SequenceToSequence(Recurrent(Elman(3, 5)), outputs=4)
    >>> o = model(torch.ones(7, 2, 3))
    >>> o.shape, model.loss(o, torch.zeros(7, 2, dtype=torch.long)).shape
    (torch.Size([7, 2, 4]), torch.Size([]))
    """

    def __init__(
        self, recurrent: RecurrentLayer | Step, outputs: Outputs | int, *, engine: Engine | None = None
    ) -> None:
        super().__init__()
        self.recurrent = as_layer(recurrent, engine)
        self.outputs = as_outputs(outputs)
        self.readout = Readout(self.recurrent.hidden_size, self.outputs.size, self.recurrent)

    def predict(self, x: Tensor, state: State | None = None, lengths: Tensor | list[int] | None = None) -> Prediction:
        run = self.recurrent(x, state, lengths)
        return Prediction(self.readout(run.hidden), run)

    @property
    def wiring(self) -> Wiring:
        return Wiring(self.recurrent, self.readout, self.outputs)

    def given(self, x: Tensor, y: Tensor, lengths: Tensor | list[int] | None = None) -> Tensor:
        return self(x, lengths=lengths)


class SequenceToOne(Pattern):
    """Read a whole sequence, then predict once, from each sequence's own end (book Fig. 10.5, M9).

    >>> from loopfold import GRU
    >>> SequenceToOne(GRU(3, 5), outputs=4)(torch.ones(7, 2, 3), lengths=[7, 4]).shape
    torch.Size([2, 4])
    """

    def __init__(
        self, recurrent: RecurrentLayer | Step, outputs: Outputs | int, *, engine: Engine | None = None
    ) -> None:
        super().__init__()
        self.recurrent = as_layer(recurrent, engine)
        self.outputs = as_outputs(outputs)
        self.readout = Readout(self.recurrent.hidden_size, self.outputs.size, self.recurrent)

    def predict(self, x: Tensor, state: State | None = None, lengths: Tensor | list[int] | None = None) -> Prediction:
        run = self.recurrent(x, state, lengths)
        return Prediction(self.readout(run.last_hidden), run)

    @property
    def wiring(self) -> Wiring:
        return Wiring(self.recurrent, self.readout, self.outputs, answers=When.LAST)

    def given(self, x: Tensor, y: Tensor, lengths: Tensor | list[int] | None = None) -> Tensor:
        return self(x, lengths=lengths)


class OutputToHidden(nn.Module):
    """`h = tanh(b + W y + U x)`, where `y` is the output fed back: no way from one h to the next but through it."""

    def __init__(self, n_in: int, n: int, size: int) -> None:
        super().__init__()
        self.input_size = n_in
        bound = 1 / math.sqrt(n)
        self.U = nn.Parameter(torch.empty(n, n_in).uniform_(-bound, bound))
        self.W = nn.Parameter(torch.empty(n, size).uniform_(-bound, bound))
        self.b = nn.Parameter(torch.empty(n).uniform_(-bound, bound))

    def forward(self, fed: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.b + fed @ self.W.T + x @ self.U.T)


class OutputRecurrence(Pattern):
    """The only way to the future is the output (book Fig. 10.4, M8): o(t-1) → h(t).

    `h(t) = tanh(b + W ŷ(t-1) + U x(t))`, `o(t) = c + V h(t)`. Under `TeacherForcing` the true y(t-1) stands in for
    ŷ(t-1), so no step waits for another and **all are computed at once**. The state is the vector fed back, zeros
    at first; `predict(...).run.last` continues a sequence.

    >>> model = OutputRecurrence(3, 5, outputs=4)
    >>> x, y = torch.ones(7, 2, 3), torch.zeros(7, 2, dtype=torch.long)
    >>> model(x, y).shape, model(x, feeding=FreeRunning()).shape
    (torch.Size([7, 2, 4]), torch.Size([7, 2, 4]))
    """

    def __init__(
        self, input_size: int, hidden_size: int, outputs: Outputs | int, *, engine: Engine | None = None
    ) -> None:
        super().__init__()
        if engine is not None and not isinstance(checked_engine(engine), Auto | Sequential):
            raise ValueError(
                f"{type(engine).__name__} cannot run OutputRecurrence: its loop goes through the output. "
                f"Leave engine out, or type engine=lf.Auto()."
            )
        whole_number("OutputRecurrence", "input_size", input_size)
        whole_number("OutputRecurrence", "hidden_size", hidden_size)
        self.outputs = as_outputs(outputs)
        self.hidden = OutputToHidden(input_size, hidden_size, self.outputs.size)
        self.readout = Readout(hidden_size, self.outputs.size)

    def predict(
        self, x: Tensor, y: Tensor | None = None, feeding: Feeding = TeacherForcing(), state: Tensor | None = None
    ) -> Prediction:
        check_input("OutputRecurrence", x, self.U.shape[1], self.U)
        check_steps(x.shape[0])
        check_nan(x, None)
        _check_targets(y, x.shape[0], x.shape[1])
        fed = x.new_zeros(x.shape[1], self.outputs.size) if state is None else state
        if fed.shape != (x.shape[1], self.outputs.size):
            raise ValueError(
                f"the state has shape {tuple(fed.shape)}; x has batch {x.shape[1]} and outputs are of size "
                f"{self.outputs.size}, so it must be {(x.shape[1], self.outputs.size)}."
            )
        known = _checked(feeding, y).known(y, self.outputs)
        if known is not None:  # nothing waits: every step at once
            known = known.to(x.dtype)
            h = self.hidden(torch.cat([fed[None], known[:-1]]), x)
            o = self.readout(h)
            return Prediction(o, Unfolding(known, known[-1], h, h[-1]))
        hs, os, feds = [], [], []
        for t in range(x.shape[0]):
            hs.append(self.hidden(fed, x[t]))
            os.append(self.readout(hs[t]))
            fed = feeding.next(os[t], None if y is None else y[t], self.outputs)
            feds.append(fed)
        return Prediction(torch.stack(os), Unfolding(torch.stack(feds), fed, torch.stack(hs), hs[-1]))

    @property
    def wiring(self) -> Wiring:
        return Wiring(self.hidden, self.readout, self.outputs, feeding=TeacherForcing())

    def given(self, x: Tensor, y: Tensor, lengths: Tensor | list[int] | None = None) -> Tensor:
        return self(x, y)  # fed the true y, no step reads a later one, so padding at the end reaches none before it

    @property
    def U(self) -> nn.Parameter:
        return self.hidden.U

    @property
    def W(self) -> nn.Parameter:
        return self.hidden.W

    @property
    def b(self) -> nn.Parameter:
        return self.hidden.b


class VectorToSequence(Pattern):
    """One vector in, a sequence out: the recurrence reads `[vector, output of the step before]` at every step.

    Hidden recurrence and fed-back outputs together (book Fig. 10.9): teacher forcing and BPTT both apply. The
    recurrence must read `vector size + outputs.size` features.

    >>> from loopfold import Elman
    >>> model = VectorToSequence(Elman(3 + 4, 5), outputs=4)
    >>> model(torch.ones(2, 3), feeding=FreeRunning(), steps=6).shape
    torch.Size([6, 2, 4])
    """

    def __init__(
        self, recurrent: RecurrentLayer | Step, outputs: Outputs | int, *, engine: Engine | None = None
    ) -> None:
        super().__init__()
        self.recurrent = as_layer(recurrent, engine)
        if any(isinstance(part, Bidirectional) for part in self.recurrent.modules()):
            raise ValueError("a sequence that is written step by step cannot be read backwards: no Bidirectional here.")
        self.outputs = as_outputs(outputs)
        self.readout = Readout(self.recurrent.hidden_size, self.outputs.size, self.recurrent)

    def predict(
        self,
        x: Tensor,
        y: Tensor | None = None,
        feeding: Feeding = TeacherForcing(),
        *,
        steps: int | None = None,
        state: State | None = None,
    ) -> Prediction:
        if x.dim() != 2:
            raise ValueError(f"the vector has shape {tuple(x.shape)}; VectorToSequence needs [batch, n].")
        self._check_width(x.shape[1])
        if y is None and steps is None:
            raise ValueError("how long should the sequence be? Give the targets y, or steps=τ.")
        tau = steps if y is None or steps is not None else y.shape[0]
        assert tau is not None
        check_steps(tau)
        _check_targets(y, tau, x.shape[0])
        start = x.new_zeros(x.shape[0], self.outputs.size)
        known = _checked(feeding, y).known(y, self.outputs)
        if known is not None:  # the inputs are known beforehand: one run over the sequence
            fed = torch.cat([start[None], known[:-1].to(x.dtype)])
            run = self.recurrent(torch.cat([x.expand(tau, *x.shape), fed], -1), state)
            return Prediction(self.readout(run.hidden), run)
        runs: list[Unfolding] = []
        os: list[Tensor] = []
        fed = start
        for t in range(tau):
            runs.append(self.recurrent(torch.cat([x, fed], -1)[None], state if t == 0 else runs[-1].last))
            os.append(self.readout(runs[-1].last_hidden))
            fed = feeding.next(os[-1], None if y is None else y[t], self.outputs)
        return Prediction(torch.stack(os), _join(runs))

    @property
    def wiring(self) -> Wiring:
        return Wiring(self.recurrent, self.readout, self.outputs, x=When.ONCE, feeding=TeacherForcing())

    def given(self, x: Tensor, y: Tensor, lengths: Tensor | list[int] | None = None) -> Tensor:
        return self(x, y)  # as in OutputRecurrence

    def _check_width(self, n: int) -> None:
        for part in self.recurrent.modules():
            cell = part.cell if isinstance(part, Recurrent) else None
            if isinstance(cell, Transition) and cell.input_size is not None:
                if cell.input_size != n + self.outputs.size:
                    raise ValueError(
                        f"the recurrence reads {cell.input_size} features; a vector of {n} and outputs of "
                        f"{self.outputs.size} need {n + self.outputs.size}."
                    )
                return  # only the lowest layer reads them


class EncoderDecoder(Pattern):
    """Read one sequence into a vector, write another from it (book Fig. 10.12); their lengths may differ.

    The encoder's last hidden state is the vector; the decoder reads `[vector, output of the step before]`.

    >>> from loopfold import GRU
    >>> model = EncoderDecoder(GRU(3, 5), GRU(5 + 4, 6), outputs=4)
    >>> model(torch.ones(7, 2, 3), feeding=FreeRunning(), steps=9).shape
    torch.Size([9, 2, 4])
    """

    def __init__(
        self,
        encoder: RecurrentLayer | Step,
        decoder: RecurrentLayer | Step,
        outputs: Outputs | int,
        *,
        engine: Engine | None = None,
    ) -> None:
        super().__init__()
        self.encoder = as_layer(encoder, engine)
        self.decoder = VectorToSequence(decoder, outputs, engine=engine)
        self.outputs = self.decoder.outputs
        self.decoder._check_width(self.encoder.hidden_size)

    @property
    def readout(self) -> Readout:  # type: ignore[override]
        return self.decoder.readout

    def predict(
        self,
        x: Tensor,
        y: Tensor | None = None,
        feeding: Feeding = TeacherForcing(),
        *,
        steps: int | None = None,
        lengths: Tensor | list[int] | None = None,
    ) -> Prediction:
        vector = self.encoder(x, lengths=lengths).last_hidden
        return self.decoder.predict(vector, y, feeding, steps=steps)

    @property
    def wiring(self) -> Wiring:
        return replace(self.decoder.wiring, x=When.EVERY, encoder=self.encoder)

    def given(self, x: Tensor, y: Tensor, lengths: Tensor | list[int] | None = None) -> Tensor:
        return self(x, y, lengths=lengths)


class Autoencoder(Pattern):
    """Rebuild the input from the state that it left behind: the hardest thing to ask of a summary (M5).

    The targets are the inputs: for `Reals`, `x` itself; for `Classes`, the class that each one-hot `x(t)` names.
    It runs freely by default, since under teacher forcing the decoder would be told what it should remember.

    >>> from loopfold import GRU
    >>> Autoencoder(GRU(3, 5), GRU(5 + 3, 5), outputs=Reals(3))(torch.ones(7, 2, 3)).shape
    torch.Size([7, 2, 3])
    """

    def __init__(
        self,
        encoder: RecurrentLayer | Step,
        decoder: RecurrentLayer | Step,
        outputs: Outputs | int,
        *,
        engine: Engine | None = None,
    ) -> None:
        super().__init__()
        self.network = EncoderDecoder(encoder, decoder, outputs, engine=engine)
        self.outputs = self.network.outputs

    @property
    def readout(self) -> Readout:  # type: ignore[override]
        return self.network.readout

    def targets(self, x: Tensor) -> Tensor:
        """What `o` is compared with."""
        return x if isinstance(self.outputs, Reals) else x.argmax(-1)

    def predict(
        self, x: Tensor, feeding: Feeding = FreeRunning(), lengths: Tensor | list[int] | None = None
    ) -> Prediction:
        return self.network.predict(x, self.targets(x), feeding, lengths=lengths)

    @property
    def wiring(self) -> Wiring:
        return replace(self.network.wiring, feeding=FreeRunning(), targets=self.targets)

    def given(self, x: Tensor, y: Tensor, lengths: Tensor | list[int] | None = None) -> Tensor:
        return self(x, lengths=lengths)


def _checked(feeding: Feeding, y: Tensor | None) -> Feeding:
    if not isinstance(feeding, Feeding):
        raise TypeError(f"feeding must be an object such as lf.TeacherForcing(); got {feeding!r}.")
    if feeding.reads_truth and y is None:
        raise ValueError(
            f"{type(feeding).__name__} needs the targets y. To feed the model's own outputs back, "
            f"type feeding=lf.FreeRunning()."
        )
    return feeding


def _check_targets(y: Tensor | None, tau: int, batch: int) -> None:
    if y is not None and not isinstance(y, Tensor):
        raise TypeError(f"targets must be a tensor; got a {type(y).__name__}. Type torch.as_tensor(y).")
    if y is not None and y.shape[:2] != (tau, batch):
        raise ValueError(f"y has shape {tuple(y.shape)}; {tau} steps of a batch of {batch} need [{tau}, {batch}, …].")


def _join(runs: list[Unfolding]) -> Unfolding:
    """Runs of one step each, end to end."""
    states = map_state(lambda *parts: torch.cat(parts), *[run.states for run in runs])
    return Unfolding(states, runs[-1].last, torch.cat([run.hidden for run in runs]), runs[-1].last_hidden)
