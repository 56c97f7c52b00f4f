"""What a run is: every choice that it depends on, as plain data that a run folder stores."""

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loopfold.language.base import LanguageModel
from loopfold.language.recurrent import recurrent_lm
from loopfold.language.window import ConvolutionLM, WindowLM
from loopfold.states import name_of
from loopfold.text.corpus import PYTHON_DOCS
from loopfold.text.vocabulary import Bytes, Characters, Subwords, Vocabulary, Words
from loopfold.training.contents import check_fields
from loopfold.transitions import CELLS

MODELS = ("recurrent", "window", "convolution")
UNITS = ("characters", "bytes", "words", "subwords")
OPTIMISERS = ("adamw", "sgd")
SCHEDULES = ("constant", "linear", "cosine")


class OptionError(ValueError):
    """An option that cannot be; the message says what can."""


@dataclass(frozen=True)
class Options:
    """Every choice of a run. Sizes are numbers of units, rates are per step; None means what its comment says."""

    # the text
    sources: tuple[str, ...] = ("python-docs",)
    split: tuple[float, float, float] = (90, 5, 5)  # train, valid, test
    valid: str | None = None  # files of their own, in place of a split
    test: str | None = None
    unit: str = "characters"
    vocabulary_size: int | None = None  # None: all words, 2000 subwords

    # the model
    model: str = "recurrent"
    cell: str = "gru"  # a name, "path/to/file.py:Class", or a class itself, which then becomes one of these
    hidden_size: int = 256
    layers: int = 1
    embedding_size: int | None = None  # None: the hidden size
    one_hot: bool = False
    tied: bool = False
    dropout: float = 0.0
    variational: bool = False
    span: int = 8  # of the baselines: how many tokens they see

    # the training
    streams: int = 32
    window: int = 64
    epochs: float = 10.0
    optimiser: str = "adamw"
    learning_rate: float = 3e-3
    weight_decay: float = 0.0
    momentum: float = 0.0  # of sgd
    clip: float = 1.0  # the largest norm of the gradient; 0: not clipped
    schedule: str = "cosine"
    warmup: int = 50  # steps in which the rate rises to its full size
    patience: int | None = None  # evaluations without a better one before it stops; None: it runs to its end
    evaluate_every: int | None = None  # steps; None: after every epoch
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if isinstance(self.sources, str | PathLike):
            object.__setattr__(self, "sources", (self.sources,))
        if isinstance(self.sources, list | tuple):
            object.__setattr__(self, "sources", tuple(map(_plain, self.sources)))
        for name in ("valid", "test"):
            object.__setattr__(self, name, _plain(getattr(self, name)))
        if isinstance(self.cell, type):
            object.__setattr__(self, "cell", _name_of_cell(self.cell))
        if isinstance(self.seed, int) and not 0 <= self.seed < 1 << 63:
            raise OptionError(f"seed must be from 0 to {(1 << 63) - 1}; {self.seed} came.")
        with _mended():
            check_fields(self)
        for name, known in (
            ("unit", UNITS),
            ("model", MODELS),
            ("optimiser", OPTIMISERS),
            ("schedule", SCHEDULES),
        ):
            choose(name, getattr(self, name), known)
        for name in ("hidden_size", "layers", "span", "streams", "window", "vocabulary_size", "embedding_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name} must be at least 1; {value} came.")
        for name in ("patience", "evaluate_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name} must be at least 1, or left out; {value} came.")
        if not 0 <= self.dropout < 1:
            raise OptionError(f"dropout is a probability from 0 up to but not including 1; {self.dropout} came.")
        for name in ("epochs", "learning_rate"):
            if not 0 < getattr(self, name) < float("inf"):
                raise OptionError(f"{name} must be above 0; {getattr(self, name)} came.")
        if self.span > 1 << 20:
            raise OptionError(f"span must be at most {1 << 20}; got {self.span}.")
        if self.epochs > 1e9:
            raise OptionError(f"epochs must be at most 1e9; got {self.epochs}. --patience ends a run by itself.")
        for name in ("weight_decay", "momentum", "clip", "warmup"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise OptionError(f"{name} must be 0 or more; {getattr(self, name)} came.")

    @property
    def kind(self) -> str:
        """What the model is called: its cell, or the baseline that it is."""
        return self.cell.rpartition(":")[2] if self.model == "recurrent" else self.model

    def from_anywhere(self) -> "Options":
        """The same with whole paths, so that a run can be resumed from another folder."""

        def whole(source: str) -> str:
            return source if source in ("-", PYTHON_DOCS) else str(Path(source).absolute())

        valid, test = (None if source is None else whole(source) for source in (self.valid, self.test))
        return replace(self, sources=tuple(map(whole, self.sources)), valid=valid, test=test)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Options":
        """Options as stored; a name that is not known is an error."""
        known = {field.name for field in fields(Options)}
        for name in data:
            if name not in known:
                raise OptionError(f"the options hold {name!r}, which this version does not know.")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return Options(**values)


# A preset says how large a model is and how it learns. With two cores, and a megabyte of text: two minutes (quick) and
# ten (standard); `words` takes some twenty minutes for a million words, of which ten thousand are distinct.
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
        "dropout": 0.4,
        "learning_rate": 2e-3,
        "weight_decay": 0.05,
        "epochs": 6.0,
    },
}


def preset(name: str, **changes: Any) -> Options:
    """The options of a preset, with changes.

    >>> preset("quick", layers=2).layers
    2
    """
    return replace(Options(**PRESETS[choose("preset", name, tuple(PRESETS))]), **changes)


def choose(what: str, name: str, known: tuple[str, ...]) -> str:
    """`name`, if it is one of those known; else an error that has a neighbour to offer."""
    if name not in known:
        close = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise OptionError(f"there is no {what} {name!r}; choose from {', '.join(known)}.{hint}")
    return name


# ------------------------------------------------------------------ from options to objects


def make_vocabulary(options: Options, text: str) -> Vocabulary:
    """The vocabulary of the training text."""
    size = options.vocabulary_size
    with _mended():
        if options.unit == "words":
            return Words.of(text, max_size=size)
        if options.unit == "subwords":
            return Subwords.of(text, size or 2000)
    if size is not None:
        raise OptionError(f"a vocabulary of {options.unit} has the size that it has: leave its size out.")
    return Bytes() if options.unit == "bytes" else Characters.of(text)


def make_model(options: Options, vocabulary_size: int) -> LanguageModel:
    """A model that starts from the seed alone."""
    n = options.hidden_size
    with torch.random.fork_rng(devices=[]), _mended():
        torch.manual_seed(options.seed)
        if options.model == "window":
            return WindowLM(vocabulary_size, options.span, options.embedding_size or n, n, options.dropout)
        if options.model == "convolution":
            layers = max(1, (options.span - 1).bit_length())
            return ConvolutionLM(vocabulary_size, 2, layers, n, options.dropout)
        embedding_size = None if options.one_hot else options.embedding_size or n
        first = vocabulary_size if embedding_size is None else embedding_size
        cells = [make_cell(options.cell, first if k == 0 else n, n) for k in range(options.layers)]
        with _mended(" Or untie them: --no-tied." if options.tied else ""):
            return recurrent_lm(
                vocabulary_size,
                cells,
                embedding_size,
                options.dropout,
                variational=options.variational,
                tied=options.tied,
            )


@contextmanager
def _mended(hint: str = "") -> Iterator[None]:
    """What cannot be built from options is for whoever chose them to mend."""
    try:
        yield
    except ValueError as error:
        raise OptionError(f"{error}{hint}") from error


def _plain(source: Any) -> Any:
    """A path as the text that a run folder stores."""
    return fspath(source) if isinstance(source, PathLike) else source


def _name_of_cell(kind: type[nn.Module]) -> str:
    """A class as a run folder can name it."""
    for name, own in CELLS.items():
        if kind is own:
            return name
    if kind.__module__ == "__main__":
        raise OptionError(
            f"a run folder keeps the file of {kind.__name__} and runs it again, and that file is the script that runs "
            f"now: put {kind.__name__} in a file of its own and import it."
        )
    path = inspect.getsourcefile(kind) or ""
    if not Path(path).is_file() or "." in kind.__qualname__:
        raise OptionError(
            f"{kind.__name__} is not at the top of a file, and a run folder keeps its file: put it in one."
        )
    return f"{path}:{kind.__name__}"


def make_cell(name: str, input_size: int, hidden_size: int) -> nn.Module:
    """A cell by its name, or of the user's own: `path/to/file.py:Class`, made as `Class(input_size, hidden_size)`."""
    if ":" not in name:
        if name.endswith(".py"):
            raise OptionError(f"{name} may hold several classes; say which one is the cell: {name}:MyCell.")
        return CELLS[choose("cell", name, tuple(CELLS))](input_size, hidden_size)
    path, _, wanted = name.rpartition(":")
    kind = _load_class(Path(path), wanted)
    try:
        cell = kind(input_size, hidden_size)
    except Exception as error:
        raise OptionError(
            f"{wanted} of {path} could not be made as {wanted}({input_size}, {hidden_size}), "
            f"its input size and hidden size: {error}"
        ) from error
    if not isinstance(cell, nn.Module):
        raise OptionError(f"{wanted} of {path} is no torch.nn.Module with forward(state, x): a {name_of(cell)} came.")
    return cell


def _load_class(path: Path, name: str) -> Any:
    if not path.is_file():
        raise OptionError(f"there is no file {path}; a cell of your own is given as path/to/file.py:Class.")
    spec = importlib.util.spec_from_file_location(f"cell_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise OptionError(f"{path} is no Python file; a cell of your own is given as path/to/file.py:Class.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    try:  # from the source, and not by the loader: that would run compiled code which lies beside it
        exec(compile(path.read_bytes(), path, "exec"), vars(module))
    except Exception as error:
        raise OptionError(f"{path} does not run: {type(error).__name__}: {error}") from error
    found = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, nn.Module)]
    if not isinstance(vars(module).get(name), type):
        raise OptionError(f"{path} has no class {name!r}; it has {', '.join(found) or 'no torch.nn.Module at all'}.")
    return vars(module)[name]
