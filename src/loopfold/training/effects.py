"""Options that have no effect beside others, and why: who asks for one is told."""

from collections.abc import Callable, Mapping
from typing import Any

from loopfold.errors import Argument, OptionError
from loopfold.training.options import Options


def _recurrent(options: Options) -> bool:
    return options.model == "recurrent"


def _embedded(options: Options) -> bool:
    return _recurrent(options) and not options.one_hot


def _with_valid(options: Options) -> bool:
    return options.holds_out("valid")


def _drops(options: Options) -> bool:
    """Whether `dropout` falls anywhere."""
    return not _recurrent(options) or options.output_dropout is None or len(options.sizes) > 1


# An option has an effect only where this holds; why it has none elsewhere; and what to add, if something helps.
EFFECT: dict[str, tuple[Callable[[Options], bool], str, Argument | None]] = {
    "split": (
        lambda o: o.valid is None and o.test is None,
        "the valid or the test text is given by itself, so the rest is all for training",
        None,
    ),
    "vocabulary_size": (
        lambda o: o.unit in ("words", "subwords"),
        "characters and bytes are as many as there are",
        Argument("unit", "subwords"),
    ),
    "cell": (_recurrent, "only a recurrent model has a cell", None),
    "recurrent_init": (_recurrent, "only a recurrent model has W", None),
    "forget_bias": (_recurrent, "only a recurrent model can have a forget gate", None),
    "layers": (
        lambda o: _recurrent(o) and not isinstance(o.hidden_size, tuple),
        "sizes by layer say how many there are, a window has one, and a convolution as many as its span needs",
        None,
    ),
    "embedding_size": (
        lambda o: o.model == "window" or (_recurrent(o) and not o.one_hot),
        "one-hot vectors are no embedding, and that of a convolution has its hidden size",
        None,
    ),
    "one_hot": (_recurrent, "only a recurrent model can read one-hot vectors", None),
    "tied": (_recurrent, "only a recurrent model can be tied", None),
    "dropout": (
        _drops,
        "one layer has none between layers, and before its readout it is another",
        Argument("layers", 2),
    ),
    "variational": (
        lambda o: _recurrent(o) and max(o.dropout * _drops(o), o.output_dropout or 0, o.input_dropout) > 0,
        "it is a kind of dropout, of recurrent models",
        Argument("dropout", 0.2),
    ),
    "output_dropout": (_recurrent, "a window and a convolution have no other dropout", None),
    "input_dropout": (_embedded, "only a recurrent model with an embedding has it", None),
    "embedding_dropout": (_embedded, "only a recurrent model with an embedding has it", None),
    "weight_drop": (_recurrent, "only a recurrent model has W", None),
    "activation_penalty": (_recurrent, "only a recurrent model has hidden states", None),
    "change_penalty": (_recurrent, "only a recurrent model has hidden states", None),
    "span": (lambda o: not _recurrent(o), "a recurrent model sees all tokens before", Argument("model", "window")),
    "momentum": (lambda o: o.optimiser == "sgd", "adamw has a momentum of its own", Argument("optimiser", "sgd")),
    "vary_window": (lambda o: o.window >= 4, "of a window of less than 4 steps, a quarter is none", None),
    "schedule": (lambda o: o.schedule != "plateau" or _with_valid(o), "there is no valid text to watch", None),
    "decay": (
        lambda o: o.schedule in ("step", "plateau"),
        "the schedule is another one",
        Argument("schedule", "step"),
    ),
    "decay_after": (lambda o: o.schedule == "step", "the schedule is another one", Argument("schedule", "step")),
    "average": (lambda o: o.average != "triggered" or _with_valid(o), "there is no valid text to watch", None),
    "average_share": (lambda o: o.average == "tail", "the tail is not averaged", Argument("average", "tail")),
    "average_after": (
        lambda o: o.average == "triggered" and _with_valid(o),
        "no evaluation starts an average",
        Argument("average", "triggered"),
    ),
    "patience": (_with_valid, "there is no valid text to watch", None),
    "evaluate_every": (_with_valid, "there is no valid text to evaluate on", None),
}


def check_effect(options: Options, given: Mapping[str, Any]) -> None:
    """Refuse what was asked for and has no effect; what asks for nothing, such as no dropout, is let through."""
    for name, value in given.items():
        if name in EFFECT and value:
            holds, why, instead = EFFECT[name]
            if not holds(options):
                hint = [", or add ", instead] if instead else []
                raise OptionError(Argument(name), f" has no effect here: {why}. Leave it out", *hint, ".")
