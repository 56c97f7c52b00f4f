"""Loopfold: write the recurrence once.

The modules in the order in which data flows; each imports only from those above it.

    states         the state as a tree of tensors, and the zeros that a step starts from
    transitions    one step f(state, x) -> state, knows nothing of time: Elman, LSTM, GRU, …
    stepgraph      the step as data: trace, loop and rules (its language), hoist, differentiate
    engines        the ways to run it: base, sequential, compiled (what the next share), looped,
                   plan, vectors and native (machine code), fused_cpu, auto
    unfolding      unfold(), Unfolding
    recurrent      nn.Modules around unfold: Recurrent, Stacked, Bidirectional; from_torch, to_torch
    feeding        what an output means and what goes back in: TeacherForcing, FreeRunning, ScheduledSampling
    patterns       SequenceToSequence, OutputRecurrence, SequenceToOne, VectorToSequence, EncoderDecoder, Autoencoder
    bptt           the book's gradients by hand; truncated back-propagation
    gradients      the share of each step; how far gradients reach
    demo           a small network learns a task while you watch
"""

from loopfold.bptt import BPTT, bptt, truncated_bptt
from loopfold.engines.auto import Auto
from loopfold.engines.base import Engine, Recurrence
from loopfold.engines.fused_cpu import FusedCPU
from loopfold.engines.looped import Looped
from loopfold.engines.sequential import Sequential
from loopfold.feeding import (
    Classes,
    Coin,
    Feeding,
    FreeRunning,
    Greedy,
    Outputs,
    Pick,
    Ramp,
    Reals,
    Sample,
    ScheduledSampling,
    Soft,
    TeacherForcing,
)
from loopfold.gradients import GradientFlow, gradient_flow, per_step_gradients
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
from loopfold.stepgraph.trace import StepGraph, step_graph
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
    "Auto",
    "Autoencoder",
    "Bidirectional",
    "Classes",
    "Coin",
    "Elman",
    "EncoderDecoder",
    "Engine",
    "Feeding",
    "FreeRunning",
    "FusedCPU",
    "GradientFlow",
    "Greedy",
    "LSTMState",
    "LayerNormLSTM",
    "Looped",
    "Orthogonal",
    "OutputRecurrence",
    "Outputs",
    "Pick",
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
    "StepGraph",
    "TeacherForcing",
    "Transition",
    "Unfolding",
    "Uniform",
    "VectorToSequence",
    "bptt",
    "from_torch",
    "gradient_flow",
    "per_step_gradients",
    "step_graph",
    "to_torch",
    "truncated_bptt",
    "unfold",
]
