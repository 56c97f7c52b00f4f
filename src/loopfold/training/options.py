"""What a run is: every choice that it depends on, as plain data that a run folder stores. The flags come from here too.

PyTorch is not imported here, so that the command line can show its help at once.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from loopfold.errors import Argument, OptionError, choose
from loopfold.text.corpus import PYTHON_DOCS
from loopfold.training.contents import check_fields, shown


@dataclass(frozen=True)
class Limits:
    """Which numbers an option can be, in words and as a test."""

    words: str
    hold: Callable[[float], bool]


AT_LEAST_1 = Limits("at least 1", lambda n: n >= 1)
SIZE = Limits(f"from 1 to {1 << 20}", lambda n: 1 <= n <= 1 << 20)
AT_LEAST_0 = Limits("0 or more", lambda x: 0 <= x < math.inf)
ABOVE_0 = Limits("above 0", lambda x: 0 < x < math.inf)
SCHEDULES = ("constant", "linear", "cosine", "step", "plateau")
PROBABILITY = Limits("a probability from 0 up to but not including 1", lambda p: 0 <= p < 1)
SHARE = Limits("from 0 up to but not including 1", PROBABILITY.hold)


def _option(default: Any, about: str, limits: Limits | tuple[str, ...] | None = None, alias: str = "") -> Any:
    """A field: its help, its limits, which are the names to choose from where it is text, and another name of it."""
    if isinstance(limits, tuple):
        about = f"{about}: {', '.join(limits[:-1])} or {limits[-1]}."
    return field(default=default, metadata={"help": about, "limits": limits, "alias": alias})


@dataclass(frozen=True)
class Options:
    """Every choice of a run. None means what the help of the field says."""

    # the text
    sources: tuple[str, ...] = _option(
        ("python-docs",), "Files or folders of UTF-8 text, also as .gz; - for standard input; python-docs by default."
    )
    split: tuple[float, float, float] = _option((90, 5, 5), "Shares of train/valid/test.")
    valid: str | None = _option(
        None, "A valid text of its own; then TEXT is all for training. By default a share of TEXT."
    )
    test: str | None = _option(
        None, "A test text of its own; then TEXT is all for training. By default a share of TEXT."
    )
    unit: str = _option("characters", "What a token is", ("characters", "bytes", "words", "subwords"))
    vocabulary_size: int | None = _option(
        None, "The most words, or the number of subwords; all words or 2000 subwords by default.", AT_LEAST_1
    )

    # the model
    model: str = _option("recurrent", "The network, or a baseline in its place", ("recurrent", "window", "convolution"))
    # a class is also accepted: it becomes its name
    cell: str = _option(
        "gru", "lstm, gru, elman, … or your own: path/to/file.py:Class. A wrong name is answered with all of them."
    )
    recurrent_init: str | None = _option(
        None, "How W starts, by default as the cell has it", ("uniform", "orthogonal", "identity")
    )
    forget_bias: float | None = _option(
        None,
        "What the forget gate of an LSTM starts with; 1 helps long memories. By default as the cell has it.",
        Limits("from -1e6 to 1e6", lambda x: -1e6 <= x <= 1e6),
    )
    # a list of sizes, one for each layer, is also accepted
    hidden_size: int | tuple[int, ...] = _option(
        256, "Units in a layer; as 1152-1152-400, those of each.", SIZE, alias="hidden"
    )
    layers: int = _option(1, "Layers on top of each other.", Limits("from 1 to 1000", lambda n: 1 <= n <= 1000))
    embedding_size: int | None = _option(
        None, "Numbers for each token; the hidden size, of the last layer, by default.", SIZE
    )
    one_hot: bool = _option(False, "One-hot vectors, no embedding.")
    tied: bool = _option(False, "One table for embedding and readout.")
    dropout: float = _option(0.0, "Between layers and before the readout.", PROBABILITY)
    output_dropout: float | None = _option(
        None, "Dropout before the readout, where it is not that between layers.", PROBABILITY
    )
    variational: bool = _option(False, "Dropout with one mask for a whole window.")
    input_dropout: float = _option(0.0, "Dropout on what the first layer reads.", PROBABILITY)
    embedding_dropout: float = _option(0.0, "Dropout of whole words, for a whole window.", PROBABILITY)
    weight_drop: float = _option(0.0, "Dropout of the weights W of the cells, for a whole window.", PROBABILITY)
    span: int = _option(8, "How many tokens a window or a convolution sees.", SIZE)

    # the training
    streams: int = _option(32, "Parts of the text read side by side: the batch size.", AT_LEAST_1, alias="batch_size")
    window: int = _option(64, "Steps that gradients go back; the state goes further.", AT_LEAST_1)
    vary_window: bool = _option(False, "Windows of unequal length, other ones in each epoch.")
    precision: str = _option("float32", "What training computes in; weights stay float32", ("float32", "bf16"))
    epochs: float = _option(10.0, "Times through the text.", Limits("above 0 and at most 1e9", lambda x: 0 < x <= 1e9))
    optimiser: str = _option("adamw", "How weights are updated", ("adamw", "sgd"), alias="optimizer")
    learning_rate: float = _option(3e-3, "The highest that it gets.", ABOVE_0, alias="lr")
    weight_decay: float = _option(0.0, "How fast weights shrink by themselves.", AT_LEAST_0)
    momentum: float = _option(0.0, "The momentum of sgd.", SHARE)
    activation_penalty: float = _option(0.0, "How much the mean square of hidden states adds to the loss.", AT_LEAST_0)
    change_penalty: float = _option(0.0, "How much their mean squared change from step to step adds to it.", AT_LEAST_0)
    clip: float = _option(1.0, "The largest norm of the gradient; 0: not clipped.", AT_LEAST_0)
    schedule: str = _option("cosine", "The learning rate after the warm-up", SCHEDULES)
    decay: float = _option(
        0.5,
        "What the rate is multiplied by: by step in each epoch, by plateau after an evaluation that is not the best.",
        Limits("above 0 and below 1", lambda x: 0 < x < 1),
    )
    decay_after: int = _option(4, "Epochs before step does so for the first time.", AT_LEAST_0)
    warmup: int | None = _option(
        None, "Steps in which the rate rises; 50 by default, or a tenth of the run if that is less.", AT_LEAST_0
    )
    average: str = _option(
        "none", "The mean of many steps' weights, in place of the last", ("none", "tail", "triggered")
    )
    average_share: float = _option(
        0.5,
        "The share of the run, at its end, whose weights tail averages.",
        Limits("above 0 and at most 1", lambda x: 0 < x <= 1),
    )
    average_after: int = _option(
        5, "triggered begins when the valid loss is above the best of more than so many evaluations ago.", AT_LEAST_1
    )
    patience: int | None = _option(
        None, "Stop after so many evaluations without a better one; never by default.", AT_LEAST_1
    )
    evaluate_every: int | None = _option(
        None, "Steps from one evaluation to the next; an epoch by default.", AT_LEAST_1
    )
    seed: int = _option(
        0,
        "For the first weights and for dropout.",
        Limits(f"from 0 to {(1 << 63) - 1}", lambda n: 0 <= n < 1 << 63),
    )
    device: str = _option("cpu", "cpu, cuda, or auto: cuda where there is a GPU that works, otherwise cpu.")

    def __post_init__(self) -> None:
        if isinstance(self.sources, str | PathLike):
            object.__setattr__(self, "sources", (self.sources,))
        if isinstance(self.sources, list | tuple):
            object.__setattr__(self, "sources", tuple(map(_plain, self.sources)))
        if isinstance(self.hidden_size, list):
            object.__setattr__(self, "hidden_size", tuple(self.hidden_size))
        for name in ("valid", "test"):
            object.__setattr__(self, name, _plain(getattr(self, name)))
        if isinstance(self.cell, type):
            from loopfold.training.cells import name_of_cell

            object.__setattr__(self, "cell", name_of_cell(self.cell))
        for source in (*(self.sources if isinstance(self.sources, tuple) else ()), self.valid, self.test, self.cell):
            if isinstance(source, str) and any("\ud800" <= c <= "\udfff" for c in source):
                kept = f"{source!r} is not UTF-8, and a run folder keeps it as text"
                raise OptionError(f"{kept}: give the file, or the folder that it is in, another name.")
        for option in fields(self):
            value, limits = getattr(self, option.name), option.metadata["limits"]
            for number in value if isinstance(value, tuple) else (value,):
                known = isinstance(number, int | float) and not isinstance(number, bool)
                if isinstance(limits, Limits) and known and not limits.hold(number):
                    words = limits.words + (", or left out" if option.default is None else "")
                    raise OptionError(Argument(option.name), f" must be {words}; got {shown(number)}.")
                if isinstance(number, int) and abs(number) >= 1 << 63:
                    raise OptionError(Argument(option.name), " is too large a number: it must fit in 64 bits.")
            if isinstance(limits, tuple) and isinstance(value, str):
                choose(option.name, value, limits)
        try:
            check_fields(self)
        except ValueError as error:
            raise OptionError(str(error)) from error
        if isinstance(self.hidden_size, tuple) and self.layers not in (1, len(self.hidden_size)):
            needed = len(self.hidden_size)
            sizes = f" has {needed} sizes, one for each layer: leave out "
            raise OptionError(
                Argument("hidden_size"), sizes, Argument("layers"), ", or choose ", Argument("layers", needed), "."
            )
        if self.hidden_size == ():
            raise OptionError(Argument("hidden_size"), " needs a size for each layer; got none.")
        if isinstance(self.hidden_size, tuple):
            object.__setattr__(self, "layers", len(self.hidden_size))

    @staticmethod
    def about(name: str) -> str:
        """The help of an option."""
        return next(option.metadata["help"] for option in fields(Options) if option.name == name)

    @property
    def kind(self) -> str:
        """What the model is called: its cell, or the baseline that it is."""
        return self.cell.rpartition(":")[2] if self.model == "recurrent" else self.model

    @property
    def texts(self) -> list[str]:
        """Every file or folder that it reads: the sources, then the valid and the test text, if they are apart."""
        return [*self.sources, *(source for source in (self.valid, self.test) if source is not None)]

    @property
    def name(self) -> str:
        """What the model is called in a table: its kind and its sizes."""
        if isinstance(self.hidden_size, tuple):
            return f"{self.kind} {'-'.join(map(str, self.hidden_size))}"
        layers = f" × {self.layers}" if self.layers > 1 and self.model == "recurrent" else ""
        return f"{self.kind} {self.hidden_size}{layers}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """The units of each layer."""
        return self.hidden_size if isinstance(self.hidden_size, tuple) else (self.hidden_size,) * self.layers

    def steps(self, tokens: int) -> int:
        """How many steps a run on so many tokens takes, if its patience lasts: windows of all streams at a time."""
        rows = tokens // min(self.streams, tokens)
        return max(1, round(self.epochs * -(-rows // self.window)))

    def holds_out(self, part: str) -> bool:
        """Whether there is a text of this part, "valid" or "test"."""
        given = {"valid": self.valid, "test": self.test}
        if given == {"valid": None, "test": None}:
            return self.split[("train", "valid", "test").index(part)] > 0
        return given[part] is not None

    def from_anywhere(self) -> "Options":
        """The same with absolute paths, so that a run can be resumed from another folder."""

        def whole(source: str) -> str:
            return source if source in ("-", PYTHON_DOCS) else str(Path(source).absolute())

        valid, test = (None if source is None else whole(source) for source in (self.valid, self.test))
        return replace(self, sources=tuple(map(whole, self.sources)), valid=valid, test=test)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Options":
        """Options as stored; a name that is not known is an error."""
        known = {option.name for option in fields(Options)}
        for name in data:
            if name not in known:
                raise OptionError(f"the options hold {name!r}, which this version does not know.")
        return Options(**_tuples(data))

    def changed(self, changes: Mapping[str, Any]) -> "Options":
        """These options with stored changes; one that makes the run something else is an error."""
        for name in changes:
            if name not in (*CHANGEABLE, *PLACES):
                raise OptionError(f"the changes hold {name!r}, which cannot change on the way.")
        return replace(self, **_tuples(changes))


def _panels() -> dict[str, list[str]]:
    first = {"sources": "Text", "model": "Model", "streams": "Training", "device": "Run"}
    found: dict[str, list[str]] = {}
    panel = ""
    for option in fields(Options):
        panel = first.get(option.name, panel)
        found.setdefault(panel, []).append(option.name)
    return found


PANELS = _panels()  # the names of all options, by what they are about

# What may change while a run trains and leave it the same run; and where its text is.
CHANGEABLE = ("epochs", "device", "patience", "evaluate_every")
PLACES = ("sources", "valid", "test")

# What a run keeps of the one whose weights it starts with: all that they depend on.
KEPT = (
    "unit",
    "vocabulary_size",
    "model",
    "cell",
    "recurrent_init",
    "forget_bias",
    "hidden_size",
    "layers",
    "embedding_size",
    "one_hot",
    "tied",
    "weight_drop",
    "span",
)


def _tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}


def _plain(source: Any) -> Any:
    """A path as the text that a run folder stores."""
    return fspath(source) if isinstance(source, PathLike) else source
