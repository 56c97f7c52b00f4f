"""From options to objects: the vocabulary, the model, the optimiser."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from loopfold.errors import Argument, OptionError
from loopfold.language.base import LanguageModel
from loopfold.language.recurrent import recurrent_lm
from loopfold.language.window import ConvolutionLM, WindowLM
from loopfold.text.long import Text
from loopfold.text.vocabulary import Bytes, Characters, Subwords, Vocabulary, Words
from loopfold.training.cells import STARTS, blaming, make_cell
from loopfold.training.options import Options


def make_vocabulary(options: Options, text: Text) -> Vocabulary:
    """The vocabulary of the training text."""
    size = options.vocabulary_size
    with _mendable():
        if options.unit == "words":
            return Words.of(text, max_size=size)
        if options.unit == "subwords":
            return Subwords.of(text, size or 2000)
    if size is not None:
        fixed = f"a vocabulary of {options.unit} has a fixed size: leave out "
        raise OptionError(fixed, Argument("vocabulary_size"), ".")
    return Bytes() if options.unit == "bytes" else Characters.of(text)


def make_model(options: Options, vocabulary_size: int) -> LanguageModel:
    """A model that starts from the seed alone."""
    with torch.random.fork_rng(devices=[]), _mendable():
        torch.manual_seed(options.seed)
        starts = _starts(options)
        if options.model != "recurrent" and isinstance(options.hidden_size, tuple):
            one = f"a {options.model} has layers of one size: "
            raise OptionError(one, Argument("hidden_size"), " must be one number.")
        n = options.sizes[-1]
        if options.model == "window":
            return WindowLM(vocabulary_size, options.span, options.embedding_size or n, n, options.dropout)
        if options.model == "convolution":
            layers = max(1, (options.span - 1).bit_length())
            return ConvolutionLM(vocabulary_size, 2, layers, n, options.dropout)
        if options.one_hot and options.tied:
            either = Argument("one_hot", False), " or ", Argument("tied", False)
            raise OptionError("one-hot vectors have no table to tie the readout to: use ", *either, ".")
        embedding_size = None if options.one_hot else options.embedding_size or n
        reads = vocabulary_size if embedding_size is None else embedding_size, *options.sizes
        cells = [make_cell(options.cell, below, n, **starts) for below, n in zip(reads, options.sizes, strict=False)]
        hint = [" Or untie them: ", Argument("tied", False), "."] if options.tied else []
        with _mendable(*hint), blaming(lambda: f"the first step of {options.cell} failed"):
            return recurrent_lm(
                vocabulary_size,
                cells,
                embedding_size,
                options.dropout,
                variational=options.variational,
                tied=options.tied,
                output_dropout=options.output_dropout,
                input_dropout=options.input_dropout,
                embedding_dropout=options.embedding_dropout,
                weight_drop=options.weight_drop,
                activation_penalty=options.activation_penalty,
                change_penalty=options.change_penalty,
            )


def outline(options: Options, vocabulary_size: int) -> LanguageModel | None:
    """A model that takes no memory, of any size: the sizes of its parameters alone. None for a cell of the user's own,
    whose code would run for it.
    """
    if ":" in options.cell:
        return None
    with torch.device("meta"):
        return make_model(options, vocabulary_size)


def _starts(options: Options) -> dict[str, object]:
    """How the cells start, where that is not left to them."""
    start = None if options.recurrent_init is None else STARTS[options.recurrent_init]
    starts = {"recurrent_init": start, "forget_bias": options.forget_bias}
    return {name: value for name, value in starts.items() if value is not None}


def make_optimiser(options: Options, model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if options.optimiser == "sgd":
        return torch.optim.SGD(
            parameters, options.learning_rate, options.momentum, weight_decay=options.weight_decay, fused=True
        )
    return torch.optim.AdamW(parameters, options.learning_rate, weight_decay=options.weight_decay, fused=True)


def autocast_of(options: Options, device: str) -> AbstractContextManager[object]:
    """Around the way there of a step of training: bfloat16 for what it is enough for, where that is asked for."""
    return torch.autocast(torch.device(device).type, torch.bfloat16) if options.precision == "bf16" else nullcontext()


@contextmanager
def _mendable(*hint: object) -> Iterator[None]:
    """What cannot be built from options is an error of the options."""
    try:
        yield
    except OptionError:
        raise
    except ValueError as error:
        raise OptionError(str(error), *hint) from error
