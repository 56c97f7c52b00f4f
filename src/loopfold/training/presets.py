"""Options that go well together, by name."""

from typing import Any

from loopfold.errors import Argument, OptionError, choose
from loopfold.training.options import Options

# A preset says how large a model is and how it learns. With two cores: two minutes (quick) and ten (standard) for a
# megabyte of text, ten (words) for a million words, of which ten thousand are distinct; words-large takes an H200 ten
# minutes for these.
PRESETS: dict[str, dict[str, Any]] = {
    "quick": {
        "hidden_size": 320,
        "streams": 16,
        "dropout": 0.2,
        "learning_rate": 4e-3,
        "weight_decay": 0.2,
        "epochs": 6.0,
    },
    "standard": {
        "cell": "lstm",
        "hidden_size": 512,
        "tied": True,
        "dropout": 0.3,
        "learning_rate": 2e-3,
        "weight_decay": 0.05,
    },
    "words": {
        "unit": "words",
        "cell": "lstm",
        "tied": True,
        "dropout": 0.2,
        "streams": 16,
        "window": 35,
        "weight_decay": 0.05,
        "epochs": 5.0,
    },
    "words-large": {
        "unit": "words",
        "cell": "lstm",
        "hidden_size": (1152, 1152, 400),
        "tied": True,
        "dropout": 0.3,
        "output_dropout": 0.4,
        "variational": True,
        "input_dropout": 0.4,
        "embedding_dropout": 0.1,
        "weight_drop": 0.5,
        "activation_penalty": 2.0,
        "change_penalty": 1.0,
        "streams": 40,
        "window": 70,
        "vary_window": True,
        "precision": "bf16",
        "optimiser": "sgd",
        "learning_rate": 30.0,
        "weight_decay": 1.2e-6,
        "clip": 0.25,
        "schedule": "constant",
        "average": "tail",
        "epochs": 290.0,
        "device": "auto",
    },
}


def preset(name: str, **changes: Any) -> Options:
    """The options of a preset, with changes.

    >>> preset("quick", layers=2).layers
    2
    """
    chosen = PRESETS[choose("preset", name, tuple(PRESETS))]
    sizes, layers = chosen.get("hidden_size"), changes.get("layers")
    if isinstance(sizes, tuple) and "hidden_size" not in changes and layers not in (None, len(sizes)):
        raise OptionError(
            Argument("preset", name),
            f" has {len(sizes)} layers of their own sizes, ",
            Argument("hidden_size", sizes),
            f". For {layers}, give ",
            Argument("hidden_size"),
            " too: one size for all of them, or as many sizes.",
        )
    if isinstance(changes.get("hidden_size"), tuple | list):
        chosen = {key: value for key, value in chosen.items() if key != "layers"}  # as many as there are sizes
    return Options(**(chosen | changes))
