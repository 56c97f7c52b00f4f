"""The shapes of network that the book draws: what is read, where outputs stand, and what is fed back."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from loopfold.engines.auto import Auto
from loopfold.engines.base import Engine
from loopfold.feedback import run_fed
from loopfold.feeding import Feeding, FreeRunning, Pick, Soft, TeacherForcing, checked_feeding
from loopfold.outputs import Outputs, Reals, as_outputs
from loopfold.recurrent import (
    Bidirectional,
    Recurrent,
    RecurrentLayer,
    as_layer,
    checked_engine,
    engine_of,
    read_to_end,
)
from loopfold.states import State, Step, at_end, leaves, until_the_end, whole_number
from loopfold.transitions import Embedded, Transition
from loopfold.unfolding import Unfolding, check_input, check_lengths, check_nan, check_steps
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

    def forecast(
        self,
        x: Tensor,
        steps: int,
        known: Tensor | None = None,
        *,
        pick: Pick = Soft(),
        state: State | None = None,
        lengths: Tensor | list[int] | None = None,
    ) -> Prediction:
        """Read x, and go on for so many steps by itself: each output is what the next step reads.

        For a network that predicts what comes: `o(t)` is of x(t+1). `x [τ, batch, n_in]` is the past; the outputs are
        those for the `steps` after it. `pick` is the form in which one goes back in. Where x has more features than
        the outputs, these come after them and are known beforehand: `known [steps, batch, more]` has them for the
        steps to come (the last is not read). A transition that reads `t` goes on counting after the end of x.

        >>> from loopfold import GRU, Reals
        >>> model = SequenceToSequence(GRU(2 + 1, 5), Reals(2))  # two numbers to predict, one that is known
        >>> model.forecast(torch.randn(7, 4, 3), steps=10, known=torch.randn(10, 4, 1)).o.shape
        torch.Size([10, 4, 2])
        """
        check_steps(steps)
        if any(isinstance(part, Bidirectional) for part in self.recurrent.modules()):
            raise ValueError("a forecast cannot be read backwards: no Bidirectional here.")
        if any(isinstance(part, Embedded) for part in self.recurrent.modules()):
            raise ValueError(
                "a forecast feeds vectors back, and this network reads tokens. Type lf.generate(model, vocabulary)."
            )
        if type(self).predict is not SequenceToSequence.predict:
            raise ValueError(
                f"{type(self).__name__} has a predict of its own, which is not called for single steps of a forecast. "
                f"Put what it does into the readout or a transition, or write a forecast of its own too."
            )
        feeding = FreeRunning(pick)
        size, more = self.outputs.size, x.shape[-1] - self.outputs.size
        given = 0 if known is None else known.shape[-1]
        if more != given or (known is not None and known.shape[:2] != (steps, x.shape[1])):
            came = "none was given" if known is None else f"got known {tuple(known.shape)}"
            needed = f"known=[{steps}, {x.shape[1]}, {more}]" if more > 0 else "no known"
            what = f"x has {x.shape[-1]} features and outputs are of size {size}"
            raise ValueError(
                f"{what}, so a forecast of {steps} steps needs {needed}; {came}."
                if more >= 0
                else f"{what}: a forecast reads its outputs back, so x must have {size} features or more."
            )
        past = self.predict(x, state, lengths)
        ends = None if lengths is None else check_lengths(lengths, *x.shape[:2])
        o = at_end(past.o, ends)
        if steps == 1:
            return Prediction(o[None], past.run)
        network = (self.recurrent, self.readout, self.outputs)
        fed = feeding.next(o, None, self.outputs)
        future = None if known is None else known[:-1]
        found = run_fed(
            self,
            network,
            fed,
            None,
            feeding,
            steps - 1,
            engine=engine_of(self.recurrent),
            x=future,
            state=past.run.last,
            before=len(x) if ends is None else ends,
        )
        return Prediction(torch.cat([o[None], found.o]), found.run)

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

    def forward(self, x: Tensor, state: State | None = None, lengths: Tensor | list[int] | None = None) -> Tensor:
        """The `o` of `predict`, for which an engine need not give the states of all steps."""
        if type(self).predict is not SequenceToOne.predict:  # of a class of the user's own
            return self.predict(x, state, lengths).o
        return self.readout(read_to_end(self.recurrent, x, state, lengths).last_hidden)

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
        whole_number("OutputRecurrence", "input_size", input_size)
        whole_number("OutputRecurrence", "hidden_size", hidden_size)
        self.outputs = as_outputs(outputs)
        self.hidden = OutputToHidden(input_size, hidden_size, self.outputs.size)
        self.readout = Readout(hidden_size, self.outputs.size)
        self.engine = Auto() if engine is None else checked_engine(engine)

    def predict(
        self,
        x: Tensor,
        y: Tensor | None = None,
        feeding: Feeding = TeacherForcing(),
        state: Tensor | None = None,
        lengths: Tensor | list[int] | None = None,
    ) -> Prediction:
        check_input("OutputRecurrence", x, self.U.shape[1], self.U)
        tau, batch = x.shape[:2]
        check_steps(tau)
        ends = None if lengths is None else check_lengths(lengths, tau, batch)
        check_nan(x, ends)
        y = _without_padding(y, tau, batch, ends)
        fed = x.new_zeros(batch, self.outputs.size) if state is None else state
        if fed.shape != (batch, self.outputs.size):
            raise ValueError(
                f"the state has shape {tuple(fed.shape)}; x has batch {batch} and outputs are of size "
                f"{self.outputs.size}, so it must be {(batch, self.outputs.size)}."
            )
        known = _checked_truth(feeding, y).known(y, self.outputs)
        if known is None:
            network = (self.hidden, self.readout, self.outputs)
            found = run_fed(self, network, fed, y, feeding, tau, engine=self.engine, x=x, lengths=ends)
            return Prediction(found.o, replace(found.run, states=found.feds, last=found.last))
        known = known.to(x.dtype)  # nothing waits: every step at once
        h = self.hidden(torch.cat([fed[None], known[:-1]]), x)
        o, h, known = (until_the_end(part, ends) for part in (self.readout(h), h, known))
        return Prediction(o, Unfolding(known, at_end(known, ends), h, at_end(h, ends)))

    @property
    def wiring(self) -> Wiring:
        return Wiring(self.hidden, self.readout, self.outputs, feeding=TeacherForcing())

    def given(self, x: Tensor, y: Tensor, lengths: Tensor | list[int] | None = None) -> Tensor:
        return self(x, y, lengths=lengths)

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
        lengths: Tensor | list[int] | None = None,
    ) -> Prediction:
        """`x [batch, n]`; `y [τ, batch, …]`, or `steps=τ`, is what is written, with `lengths` of each."""
        if x.dim() != 2:
            raise ValueError(f"the vector has shape {tuple(x.shape)}; VectorToSequence needs [batch, n].")
        self._check_width(x.shape[1])

        def run(fed: Tensor, lengths: Tensor | None) -> Unfolding:
            return self.recurrent(torch.cat([x.expand(len(fed), *x.shape), fed], -1), state, lengths)

        return written(self, self.recurrent, run, x, y, feeding, steps, lengths, state=state)

    @property
    def wiring(self) -> Wiring:
        return Wiring(self.recurrent, self.readout, self.outputs, x=When.ONCE, feeding=TeacherForcing())

    def given(self, x: Tensor, y: Tensor, lengths: Tensor | list[int] | None = None) -> Tensor:
        return self(x, y, lengths=lengths)

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
        target_lengths: Tensor | list[int] | None = None,
    ) -> Prediction:
        """`x` with `lengths` is what is read; `y`, or `steps=τ`, what is written, with `target_lengths`."""
        vector = read_to_end(self.encoder, x, lengths=lengths).last_hidden
        return self.decoder.predict(vector, y, feeding, steps=steps, lengths=target_lengths)

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
        return self.network.predict(x, self.targets(x), feeding, lengths=lengths, target_lengths=lengths)

    @property
    def wiring(self) -> Wiring:
        return replace(self.network.wiring, feeding=FreeRunning(), targets=self.targets)

    def given(self, x: Tensor, y: Tensor, lengths: Tensor | list[int] | None = None) -> Tensor:
        return self(x, lengths=lengths)


def written(
    model: Pattern,
    layer: RecurrentLayer,
    run: Callable[[Tensor, Tensor | None], Unfolding],
    context: State,
    y: Tensor | None,
    feeding: Feeding,
    steps: int | None,
    lengths: Tensor | list[int] | None,
    *,
    state: State | None = None,
) -> Prediction:
    """A sequence that is written step by step: each step of `layer` is fed what the one before gave, zeros at first.

    `run(fed [τ, batch, size], lengths)` is the layer over what is fed back, where all of that is known beforehand.
    """
    if y is None and steps is None:
        raise ValueError("how long should the sequence be? Give the targets y, or steps=τ.")
    tau = steps if y is None or steps is not None else y.shape[0]
    assert tau is not None
    check_steps(tau)
    first = leaves(context)[0]
    ends = None if lengths is None else check_lengths(lengths, tau, len(first))
    y = _without_padding(y, tau, len(first), ends)
    start = first.new_zeros(len(first), model.outputs.size)
    known = _checked_truth(feeding, y).known(y, model.outputs)
    if known is not None:  # the inputs are known beforehand: one run over the sequence
        whole = run(torch.cat([start[None], known[:-1].to(start.dtype)]), ends)
        return Prediction(until_the_end(model.readout(whole.hidden), ends), whole)
    network, engine = (layer, model.readout, model.outputs), engine_of(layer)
    found = run_fed(model, network, start, y, feeding, tau, engine=engine, state=state, context=context, lengths=ends)
    return Prediction(found.o, found.run)


def _without_padding(y: Tensor | None, tau: int, batch: int, lengths: Tensor | None) -> Tensor | None:
    """Targets, checked, with zeros after each sequence's end, where they may hold anything."""
    check_targets(y, tau, batch)
    return y if y is None else until_the_end(y, lengths)


def _checked_truth(feeding: Feeding, y: Tensor | None) -> Feeding:
    """`feeding`, if it is one, and has the targets that it reads."""
    if checked_feeding(feeding).reads_truth and y is None:
        raise ValueError(
            f"{type(feeding).__name__} needs the targets y. To feed the model's own outputs back, "
            f"type feeding=lf.FreeRunning()."
        )
    return feeding
