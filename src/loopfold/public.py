"""The public names, those that `import loopfold as lf` gives."""

from loopfold.attention import AttentionDecoder
from loopfold.backpropagation import BPTT, bptt, truncated_bptt
from loopfold.comparison import compare
from loopfold.conversion import from_torch, to_torch
from loopfold.drawing.charts import draw_attention
from loopfold.drawing.circuit import Level
from loopfold.drawing.draw import draw
from loopfold.drawing.figure import Drawing, style
from loopfold.drawing.paint import beside
from loopfold.engines.auto import Auto
from loopfold.engines.base import Engine, EngineWarning, Recurrence
from loopfold.engines.checkpointed import Checkpointed
from loopfold.engines.fused_cpu import FusedCPU
from loopfold.engines.fused_gpu import FusedGPU
from loopfold.engines.looped import Looped
from loopfold.engines.sequential import Sequential
from loopfold.engines.time_parallel import TimeParallel
from loopfold.errors import OptionError
from loopfold.evaluation import Ledger, Way, perplexity, token_losses
from loopfold.exporting.export import export
from loopfold.feeding import (
    Coin,
    Feeding,
    FreeRunning,
    GeneralisedTeacherForcing,
    Greedy,
    Pick,
    Ramp,
    Raw,
    Sample,
    ScheduledSampling,
    Soft,
    TeacherForcing,
)
from loopfold.fitting import Fit, fit
from loopfold.generation import Beam, generate
from loopfold.gradients import GradientFlow, StepGradients, gradient_flow, per_step_gradients
from loopfold.language.base import Context, LanguageModel, Next, Scored, count_parameters
from loopfold.language.ngram import NGramLM
from loopfold.language.recurrent import RecurrentLM
from loopfold.language.window import ConvolutionLM, WindowLM
from loopfold.outputs import Classes, Outputs, Reals
from loopfold.patterns import (
    Autoencoder,
    EncoderDecoder,
    OutputRecurrence,
    SequenceToOne,
    SequenceToSequence,
    VectorToSequence,
)
from loopfold.probing import HiddenStates, Tracked, hidden_states
from loopfold.processes import Processes
from loopfold.recurrent import Bidirectional, Recurrent, Stacked
from loopfold.regularisers import EmbeddingDropout, VariationalDropout, WeightDrop
from loopfold.report.page import write_report
from loopfold.spectrum import Eigenvalues, eigenvalues
from loopfold.stepgraph.graph import StepGraph
from loopfold.stepgraph.trace import step_graph
from loopfold.stepper import Stepper
from loopfold.text.corpus import Corpus, CorpusError, read_corpus
from loopfold.text.vocabulary import Bytes, Characters, Subwords, Tokens, Vocabulary, Words
from loopfold.training.averaging import PolyakAverage
from loopfold.training.loop import Diverged, Stopped, resume, train
from loopfold.training.options import Options
from loopfold.training.packed import pack_run
from loopfold.training.presets import preset
from loopfold.training.run import Run, open_run
from loopfold.training.stored import RunError
from loopfold.training.table import Row
from loopfold.training.watching import Terminal, Watcher
from loopfold.transitions import (
    GRU,
    LSTM,
    MGU,
    Elman,
    Embedded,
    LayerNormLSTM,
    LSTMState,
    Orthogonal,
    ScaledIdentity,
    Transition,
    Uniform,
)
from loopfold.unfolding import Unfolding, unfold
from loopfold.ways import DynamicEvaluation, Mixture, NeuralCache, gradient_rms, mixed_losses, mixture_weights
from loopfold.wiring import Pattern, Prediction, Readout, When, Wiring

__all__ = [
    "AttentionDecoder",
    "Auto",
    "Autoencoder",
    "BPTT",
    "Beam",
    "Bidirectional",
    "Bytes",
    "Characters",
    "Checkpointed",
    "Classes",
    "Coin",
    "Context",
    "ConvolutionLM",
    "Corpus",
    "CorpusError",
    "Diverged",
    "Drawing",
    "DynamicEvaluation",
    "Eigenvalues",
    "Elman",
    "Embedded",
    "EncoderDecoder",
    "Engine",
    "EngineWarning",
    "Feeding",
    "Fit",
    "FreeRunning",
    "FusedCPU",
    "FusedGPU",
    "GRU",
    "GeneralisedTeacherForcing",
    "GradientFlow",
    "Greedy",
    "HiddenStates",
    "LSTM",
    "LSTMState",
    "LanguageModel",
    "LayerNormLSTM",
    "Ledger",
    "Level",
    "Looped",
    "MGU",
    "Mixture",
    "NGramLM",
    "NeuralCache",
    "Next",
    "OptionError",
    "Options",
    "Orthogonal",
    "OutputRecurrence",
    "Outputs",
    "Pattern",
    "Pick",
    "PolyakAverage",
    "Prediction",
    "Processes",
    "Ramp",
    "Raw",
    "Readout",
    "Reals",
    "Recurrence",
    "Recurrent",
    "RecurrentLM",
    "Row",
    "Run",
    "RunError",
    "Sample",
    "ScaledIdentity",
    "ScheduledSampling",
    "Scored",
    "SequenceToOne",
    "SequenceToSequence",
    "Sequential",
    "Soft",
    "Stacked",
    "StepGradients",
    "StepGraph",
    "Stepper",
    "Stopped",
    "Subwords",
    "TeacherForcing",
    "Terminal",
    "TimeParallel",
    "Tokens",
    "Tracked",
    "Transition",
    "Unfolding",
    "Uniform",
    "VariationalDropout",
    "WeightDrop",
    "EmbeddingDropout",
    "VectorToSequence",
    "Vocabulary",
    "Watcher",
    "Way",
    "When",
    "WindowLM",
    "Wiring",
    "Words",
    "beside",
    "bptt",
    "compare",
    "count_parameters",
    "draw",
    "draw_attention",
    "eigenvalues",
    "export",
    "fit",
    "from_torch",
    "generate",
    "gradient_flow",
    "gradient_rms",
    "hidden_states",
    "mixed_losses",
    "mixture_weights",
    "open_run",
    "pack_run",
    "per_step_gradients",
    "perplexity",
    "token_losses",
    "preset",
    "read_corpus",
    "resume",
    "step_graph",
    "style",
    "to_torch",
    "train",
    "truncated_bptt",
    "unfold",
    "write_report",
]
