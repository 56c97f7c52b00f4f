"""The shapes of network that the book draws: what is read, where outputs stand, and what is fed back."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from loopfold.engines.auto import Auto
from loopfold.engines.base import Engine
from loopfold.engines.sequential import Sequential
from loopfold.feeding import Feeding, FreeRunning, Outputs, Reals, TeacherForcing, as_outputs, checked_feeding
from loopfold.recurrent import Bidirectional, Recurrent, RecurrentLayer, as_layer, checked_engine
from loopfold.states import State, Step, map_state, whole_number
from loopfold.transitions import Transition
from loopfold.unfolding import Unfolding, check_input, check_nan, check_steps
from loopfold.wiring import Pattern, Prediction, Readout, When, Wiring, check_targets


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
        check_targets(y, x.shape[0], x.shape[1])
        fed = x.new_zeros(x.shape[1], self.outputs.size) if state is None else state
        if fed.shape != (x.shape[1], self.outputs.size):
            raise ValueError(
                f"the state has shape {tuple(fed.shape)}; x has batch {x.shape[1]} and outputs are of size "
                f"{self.outputs.size}, so it must be {(x.shape[1], self.outputs.size)}."
            )
        known = _checked_truth(feeding, y).known(y, self.outputs)
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

        def run(fed: Tensor, state: State | None) -> Unfolding:
            return self.recurrent(torch.cat([x.expand(len(fed), *x.shape), fed], -1), state)

        return written(self, run, x.new_zeros(x.shape[0], self.outputs.size), y, feeding, steps, state)

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


def written(
    model: Pattern,
    run: Callable[[Tensor, State | None], Unfolding],
    start: Tensor,
    y: Tensor | None,
    feeding: Feeding,
    steps: int | None,
    state: State | None = None,
) -> Prediction:
    """A sequence that is written step by step, each step fed what the one before gave.

    `run(fed [τ, batch, size], state)` runs the recurrence; `start [batch, size]` is fed to the first step.
    """
    if y is None and steps is None:
        raise ValueError("how long should the sequence be? Give the targets y, or steps=τ.")
    tau = steps if y is None or steps is not None else y.shape[0]
    assert tau is not None
    check_steps(tau)
    check_targets(y, tau, len(start))
    known = _checked_truth(feeding, y).known(y, model.outputs)
    if known is not None:  # the inputs are known beforehand: one run over the sequence
        whole = run(torch.cat([start[None], known[:-1].to(start.dtype)]), state)
        return Prediction(model.readout(whole.hidden), whole)
    runs: list[Unfolding] = []
    os: list[Tensor] = []
    fed = start
    for t in range(tau):
        runs.append(run(fed[None], state if t == 0 else runs[-1].last))
        os.append(model.readout(runs[-1].last_hidden))
        fed = feeding.next(os[-1], None if y is None else y[t], model.outputs)
    return Prediction(torch.stack(os), _joined(runs))


def _checked_truth(feeding: Feeding, y: Tensor | None) -> Feeding:
    """`feeding`, if it is one, and has the targets that it reads."""
    if checked_feeding(feeding).reads_truth and y is None:
        raise ValueError(
            f"{type(feeding).__name__} needs the targets y. To feed the model's own outputs back, "
            f"type feeding=lf.FreeRunning()."
        )
    return feeding


def _joined(runs: list[Unfolding]) -> Unfolding:
    """Runs of one step each, end to end."""
    states = map_state(lambda *parts: torch.cat(parts), *[run.states for run in runs])
    outputs = [run.outputs for run in runs]
    joined = None if outputs[0] is None else map_state(lambda *parts: torch.cat(parts), *outputs)
    return Unfolding(states, runs[-1].last, torch.cat([run.hidden for run in runs]), runs[-1].last_hidden, joined)
