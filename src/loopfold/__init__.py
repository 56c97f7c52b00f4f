"""Loopfold: write the recurrence once.

The modules in the order in which data flows; each imports only from those above it.

    transitions    one step f(state, x) -> state, knows nothing of time: Elman, LSTM, GRU, …
    engines        the ways to run it: base (Engine, Recurrence), sequential
    unfolding      unfold(), Unfolding
    recurrent      nn.Modules around unfold: Recurrent, Stacked, Bidirectional; from_torch, to_torch
    feeding        what an output means and what goes back in: TeacherForcing, FreeRunning, ScheduledSampling
    patterns       SequenceToSequence, OutputRecurrence, SequenceToOne, VectorToSequence, EncoderDecoder, Autoencoder
    bptt           the book's gradients by hand; the share of each step; how far gradients reach
    demo           a small network learns a task while you watch
"""

from loopfold.bptt import BPTT, GradientFlow, bptt, gradient_flow, per_step_gradients, truncated_bptt
from loopfold.engines.base import Engine, Recurrence
from loopfold.engines.sequential import Sequential
from loopfold.feeding import (
    Classes,
    Coin,
    FreeRunning,
    Greedy,
    Ramp,
    Reals,
    Sample,
    ScheduledSampling,
    Soft,
    TeacherForcing,
)
from loopfold.patterns import (
    Autoencoder,
    EncoderDecoder,
    OutputRecurrence,
    Prediction,
    SequenceToOne,
    SequenceToSequence,
    VectorToSequence,
)
from loopfold.recurrent import Bidirectional, Recurrent, Stacked, from_torch, to_torch
from loopfold.transitions import (
    GRU,
    LSTM,
    Elman,
    LayerNormLSTM,
    LSTMState,
    Orthogonal,
    ScaledIdentity,
    Transition,
    Uniform,
)
from loopfold.unfolding import Unfolding, unfold

__version__ = "0.1.0"
__all__ = [
    "BPTT",
    "GRU",
    "LSTM",
    "Autoencoder",
    "Bidirectional",
    "Classes",
    "Coin",
    "Elman",
    "EncoderDecoder",
    "Engine",
    "FreeRunning",
    "GradientFlow",
    "Greedy",
    "LSTMState",
    "LayerNormLSTM",
    "Orthogonal",
    "OutputRecurrence",
    "Prediction",
    "Ramp",
    "Reals",
    "Recurrence",
    "Recurrent",
    "Sample",
    "ScaledIdentity",
    "ScheduledSampling",
    "Sequential",
    "SequenceToOne",
    "SequenceToSequence",
    "Soft",
    "Stacked",
    "TeacherForcing",
    "Transition",
    "Unfolding",
    "Uniform",
    "VectorToSequence",
    "bptt",
    "from_torch",
    "gradient_flow",
    "per_step_gradients",
    "to_torch",
    "truncated_bptt",
    "unfold",
]
