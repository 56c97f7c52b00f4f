"""A decoder that looks back, at every step, at what an encoder read: additive attention (Bahdanau et al., 2015)."""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from loopfold.engines.auto import Auto
from loopfold.engines.base import Engine
from loopfold.feeding import Feeding, TeacherForcing
from loopfold.outputs import Outputs, as_outputs
from loopfold.patterns import written
from loopfold.recurrent import Recurrent, RecurrentLayer, as_layer
from loopfold.states import State, Step, leaves, name_of, whole_number
from loopfold.transitions import Transition, initial_state
from loopfold.unfolding import Unfolding, check_lengths
from loopfold.wiring import Pattern, Prediction, Readout, Wiring

ROUND = 8  # places: sources of up to so many lengths share one compiled loop


class Source(NamedTuple):
    """What attention looks at: the same at every step."""

    memory: Tensor  # [batch, places, n]: the encoder's states
    keys: Tensor  # [batch, places, m]: K memory, computed once
    mask: Tensor  # [batch, places]: where there is something to look at


class Attended(NamedTuple):
    """What a step of attention gives beside its state."""

    h: Tensor  # [batch, n]
    weights: Tensor  # [batch, places]: how much of each place it read; they sum to 1


class Attention(nn.Module):
    """One step of a decoder with additive attention (Bahdanau, Cho and Bengio, 2015, appendix A.1.2).

    `e_j = vᵀ tanh(Q s + K m_j)`, `α = softmax(e)`, `c = Σ_j α_j m_j`, `s = f(s, [x, c])`, where `s` is the state of the
    decoder's transition f, `m_j` what the encoder left at place j, and x what is fed back.
    """

    def __init__(self, cell: nn.Module, memory_size: int, size: int) -> None:
        super().__init__()
        self.cell = cell
        h = leaves(initial_state(cell, 1))[0]
        self.Q = nn.Parameter(_uniform(h.new_empty(size, h.shape[-1])))
        self.K = nn.Parameter(_uniform(h.new_empty(size, memory_size)))
        self.v = nn.Parameter(_uniform(h.new_empty(size)))

    def source(self, memory: Tensor, lengths: Tensor | None) -> Source:
        """The context of a run over `memory [places, batch, n]`, an encoder's states."""
        places, batch = memory.shape[:2]
        room = places + -places % ROUND
        there = torch.arange(room, device=memory.device).expand(batch, room)
        mask = there < (places if lengths is None else lengths.to(memory.device)[:, None])
        memory = nn.functional.pad(memory.transpose(0, 1), (0, 0, 0, room - places))
        return Source(memory, memory @ self.K.T, mask)

    def forward(self, state: State, x: Tensor, context: Source) -> tuple[Attended, State]:
        s = leaves(state)[0]
        e = (torch.tanh((s @ self.Q.T)[:, None] + context.keys) * self.v).sum(-1)
        weights = e.masked_fill(~context.mask, -torch.inf).softmax(-1)
        c = torch.bmm(weights[:, None], context.memory)[:, 0]
        state = self.cell(state, torch.cat([x, c], -1))
        return Attended(leaves(state)[0], weights), state

    def initial_state(self, batch: int) -> State:
        return initial_state(self.cell, batch)


def _looked_at(run: Unfolding, places: int) -> Unfolding:
    """With weights for the places that there are."""
    assert isinstance(run.outputs, Attended)
    return replace(run, outputs=run.outputs._replace(weights=run.outputs.weights[..., :places]))


def _uniform(W: Tensor) -> Tensor:
    bound = 1 / math.sqrt(W.shape[-1])
    return W.uniform_(-bound, bound)


class AttentionDecoder(Pattern):
    """Read one sequence, write another, and look back at all of the first at every step (Bahdanau et al., 2015).

    Where `EncoderDecoder` must put the whole source into one vector, here every step of the decoder mixes the
    encoder's states with weights of its own: `predict(...).run.outputs.weights [τ, batch, places]`. The decoder is a
    transition that reads `[output of the step before, the mix]`, so `outputs.size + encoder.hidden_size` features.
    `size` is the number of units of attention, by default that of the encoder.

    >>> from loopfold import GRU, FreeRunning
    >>> model = AttentionDecoder(GRU(3, 5), GRU(4 + 5, 6), outputs=4)
    >>> found = model.predict(torch.ones(7, 2, 3), feeding=FreeRunning(), steps=9, lengths=[7, 4])
    >>> found.o.shape, found.run.outputs.weights.shape
    (torch.Size([9, 2, 4]), torch.Size([9, 2, 7]))
    """

    def __init__(
        self,
        encoder: RecurrentLayer | Step,
        decoder: Step,
        outputs: Outputs | int,
        size: int | None = None,
        *,
        engine: Engine | None = None,
    ) -> None:
        super().__init__()
        self.encoder = as_layer(encoder, engine)
        self.outputs = as_outputs(outputs)
        if not isinstance(decoder, nn.Module) or isinstance(decoder, RecurrentLayer):
            raise TypeError(
                f"AttentionDecoder needs a transition as its decoder, such as lf.GRU(n_in, n); got {name_of(decoder)}."
            )
        n, needed = self.encoder.hidden_size, self.outputs.size + self.encoder.hidden_size
        if isinstance(decoder, Transition) and decoder.input_size not in (None, needed):
            raise ValueError(
                f"the decoder reads {decoder.input_size} features; outputs of {self.outputs.size} and "
                f"an encoder of {n} need {needed}."
            )
        units = n if size is None else whole_number("AttentionDecoder", "size", size)
        self.attention = Attention(decoder, n, units)
        self.recurrent = Recurrent(self.attention, Auto() if engine is None else engine)
        self.readout = Readout(leaves(self.recurrent.initial_state(1))[0].shape[-1], self.outputs.size, self.recurrent)

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
        """`x [places, batch, n_in]` with `lengths` is read; `y`, or `steps=τ`, with `target_lengths` is written."""
        read = self.encoder(x, lengths=lengths).hidden
        ends = None if lengths is None else check_lengths(lengths, *read.shape[:2])
        context = self.attention.source(read, ends)

        def run(fed: Tensor, lengths: Tensor | None) -> Unfolding:
            return self.recurrent(fed, lengths=lengths, context=context)

        found = written(self, self.recurrent, run, context, y, feeding, steps, target_lengths)
        return replace(found, run=_looked_at(found.run, len(read)))

    @property
    def wiring(self) -> Wiring:
        return Wiring(
            self.recurrent, self.readout, self.outputs, feeding=TeacherForcing(), encoder=self.encoder, attends=True
        )

    def given(self, x: Tensor, y: Tensor, lengths: Tensor | list[int] | None = None) -> Tensor:
        return self(x, y, lengths=lengths)
