"""Loopfold: write the recurrence once.

The modules in the order in which data flows; each imports only from those above it.

    errors           errors that the user can mend, in words for Python and for the command line
    files            a file is written as a whole or not at all; archives
    telling          how far something long is, for whoever listens
    memory           how much is free, and a refusal of what needs more
    undoing          how the contents of lists, modules, sources of random numbers, … are read, compared and put back
    surroundings     what a step reads besides its tensors: has it changed, and did a trial call change it
    casts            torch.autocast around a call: what it was told, without it, with it again
    staleness        whether all that a trace has fixed is as it was, in a microsecond
    products         large products of matrices on a CPU, by the faster library
    states           the state as a tree of tensors, and the zeros that a step starts from
    transitions      one step f(state, x) -> state, knows nothing of time: Elman, LSTM, GRU, …
    stepgraph        the step as data: graph; surrogate, pick, complex_numbers, complex_rules, recorder, functions,
                     trace; aten (what is known of torch's operations), moves (where they put numbers); ops and loop
                     (the loop's own language), settled (one graph for all steps), recipes, rules (from one to the
                     other), rowwise, dependence, split, sums, hoist, differentiate, verify, stored (a graph as text)
    engines          the ways to run it: base, sequential; backwards, draws, selfcheck, programs, kernel, writing, cache
                     (what the next share); cuda_plan, cuda_values, cuda_products, cuda (CUDA code), driver; replay,
                     compiled; looped; plan, vectors, picking, rows, turned, native (machine code), fused_cpu, stepped;
                     fused_gpu; auto; around others: budget, pieces, checkpointed; chunks, forgetting, adjoint,
                     time_parallel; in words: explaining
    unfolding        unfold(), Unfolding
    operations       a layer as one operation of torch, for torch.compile and torch.export
    regularisers     dropout of inputs, weights and words: VariationalDropout, WeightDrop, EmbeddingDropout
    recurrent        nn.Modules around unfold: Recurrent, Stacked, Bidirectional
    conversion       from_torch, to_torch: torch's own modules as ours, and back
    outputs          what an output means: Classes, Reals
    feeding          what goes back in: TeacherForcing, FreeRunning, ScheduledSampling
    feedback         a network that reads its own outputs, as one step
    wiring           what a pattern is: Pattern, its Readout and its Wiring
    patterns         SequenceToSequence, OutputRecurrence, SequenceToOne, VectorToSequence, EncoderDecoder, Autoencoder
    attention        AttentionDecoder, which looks back at all that its encoder read
    onestep          a model as one step: of a transition, of layers, of layers and a readout
    reading          what a stepper is given: arrays, tensors, numbers; and states
    stepper          Stepper: a model that is run one step at a time
    drawing          pictures: the circuit, the unfolded graph, heat maps and curves
    backpropagation  the book's gradients by hand; truncated back-propagation
    gradients        the share of each step; how far gradients reach
    spectrum         the eigenvalues of W
    text             long (text in a file), corpus, tokens (and their files), vocabulary, overlap, streams
    language         P(token | the tokens before it): base, recurrent, ngram, window
    processes        one process, or several under torchrun
    evaluation       the perplexity ledger, and what a way to score a text is
    ways             such ways: DynamicEvaluation, NeuralCache, Mixture
    exporting        a step without Python: program, places, texts, writing (what C and JavaScript share), c, labels,
                     javascript (with the reverse step); stock, onnx; export()
    training         options, effects, presets, cells, making; averaging, schedules; contents, stored, folder, packed (a
                     run on disk), trust, listing, checkpoint, table, run; watching, guards, job, replaying, loop,
                     rehearsal
    fitting          fit(): one optimiser loop for any pattern and any batches
    generation       sampling and beam search
    probing          hidden states over a text, and what units track
    comparison       a run beside its baselines
    report           one page on a run, for a browser
    play             a page on which a network learns: programs (in JavaScript, which train), page
    cli              the commands: flags become objects, once
    __main__         python -m loopfold
    public           the names of `import loopfold as lf`
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from loopfold.public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """The public names, once the first is asked for: `loopfold --help` need not wait for torch."""
    public = import_module("loopfold.public") if name == "__all__" or not name.startswith("__") else None
    if public is None or name not in ("__all__", *public.__all__):
        raise AttributeError(f"module 'loopfold' has no attribute {name!r}")
    globals().update({key: getattr(public, key) for key in (*public.__all__, "__all__")})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
