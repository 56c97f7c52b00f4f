"""What hidden units do over a text: every state, and the unit that best tracks brackets, quotes or the line."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor, nn

from loopfold.drawing import charts
from loopfold.drawing.figure import Drawing
from loopfold.evaluation import evaluating
from loopfold.language.recurrent import RecurrentLM, as_language_model
from loopfold.recurrent import RecurrentLayer, Stacked
from loopfold.states import State, leaves
from loopfold.text.long import Read
from loopfold.text.vocabulary import Vocabulary

Feature = Callable[[str], Sequence[float]]  # of a text: a number for each of its characters
JUDGED = 6_000  # characters of a run's text by which its units are judged

# ------------------------------------------------------------------ features of a text


def bracket_depth(text: str) -> list[float]:
    """How many brackets are open after each character.

    >>> bracket_depth("f(a[1])")
    [0.0, 1.0, 1.0, 2.0, 2.0, 1.0, 0.0]
    """
    steps = (1.0 if c in "([{" else -1.0 if c in ")]}" else 0.0 for c in text)
    return list(accumulate(steps, lambda depth, step: max(0.0, depth + step), initial=0.0))[1:]


def inside_quotes(text: str) -> list[float]:
    """1 from an opening double quote up to the one that closes it. A quote ends with its paragraph at the latest."""
    inside, marks, before = False, [], ""
    for c in text:
        if c == '"':
            inside = not inside
        elif c in "“”":
            inside = c == "“"
        elif c == before == "\n":
            inside = False
        marks.append(float(inside))
        before = c
    return marks


def position_in_line(text: str) -> list[float]:
    """How many characters the line has so far; a line end begins the next."""
    place, places = 0, []
    for c in text:
        place = 0 if c == "\n" else place + 1
        places.append(float(place))
    return places


def length_of_line_before(text: str) -> list[float]:
    """How long the last whole line was, which is as much of a line's length as can be known within the next."""
    lines = text.split("\n")
    lengths = [0, *map(len, lines)]
    return [float(n) for n, line in zip(lengths, lines, strict=False) for _ in line + "\n"][: len(text)]


FEATURES: dict[str, Feature] = {
    "bracket depth": bracket_depth,
    "inside quotes": inside_quotes,
    "position in the line": position_in_line,
    "length of the line before": length_of_line_before,
    "upper case": lambda text: [c.isupper() for c in text],
    "letters": lambda text: [c.isalpha() for c in text],
    "digits": lambda text: [c.isdigit() for c in text],
    "spaces": lambda text: [c.isspace() for c in text],
}

# ------------------------------------------------------------------ hidden states


@dataclass(frozen=True)
class Tracked:
    """The unit that tracks a feature best, and Pearson's correlation of the two over all steps."""

    feature: str
    unit: int
    correlation: float


@dataclass(frozen=True, eq=False)
class HiddenStates:
    """The hidden state after each token of a text.

    `values`         `[τ, n]`
    `pieces`         what each token reads as; together they are the text as the model reads it
    `correlations`   of every feature that varies within the text: Pearson's r of each unit with it, `[n]`
    `tracking`       the unit that goes best with each feature; the best first
    """

    values: Tensor = field(repr=False)
    pieces: list[str] = field(repr=False)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @cached_property
    def correlations(self) -> dict[str, Tensor]:
        numbers = {name: self._per_token(name, feature) for name, feature in FEATURES.items()}
        return {name: _correlations(self.values, f) for name, f in numbers.items() if not _is_constant(f)}

    @property
    def tracking(self) -> list[Tracked]:
        found = [_best(name, r) for name, r in self.correlations.items()]
        return sorted(found, key=lambda tracked: -abs(tracked.correlation))

    def tracks(self, feature: Feature | Sequence[float] | Tensor, name: str = "your feature") -> Tracked:
        """The unit that goes best with a feature of your own.

        `feature` is a function from a text to one number for each character, or one number for each token.
        """
        numbers = self._per_token(name, feature)
        if _is_constant(numbers):
            raise ValueError(
                f"{name} is {float(numbers[0]):g} at every step, so no unit can go with it: give another text."
            )
        if not bool(numbers.isfinite().all()):
            raise ValueError(f"{name} holds numbers that are not finite, so nothing correlates with it.")
        return _best(name, _correlations(self.values, numbers))

    def draw(self, units: Sequence[int] | None = None, *, steps: int = 240) -> Drawing:
        """Units over the first `steps` tokens, a row each.

        Without `units` they are all, or 40: those that track something, then those whose values vary most.
        """
        strong = [tracked for tracked in self.tracking if abs(tracked.correlation) >= 0.5]
        names: dict[int, str] = {}
        for tracked in strong:
            said = f"{tracked.feature} {tracked.correlation:+.2f}".replace("-", "−")
            names[tracked.unit] = f"{names[tracked.unit]}, {said}" if tracked.unit in names else said
        if units is None and self.values.shape[1] > charts.MOST_UNITS:
            varied = charts.varied_units(self.values, charts.MOST_UNITS)
            units = [*names, *(unit for unit in varied if unit not in names)][: charts.MOST_UNITS]
        return charts.hidden_states(self.values[:steps], self.pieces[:steps], units, names)

    def __repr__(self) -> str:
        return f"HiddenStates(values={tuple(self.values.shape)}, text={self.text[:40]!r})"

    def _per_token(self, name: str, feature: Feature | Sequence[float] | Tensor) -> Tensor:
        """A feature after each token; after a piece of several characters, that of its last."""
        if not callable(feature):
            numbers = torch.as_tensor(feature, dtype=torch.float64)
            if numbers.shape != (len(self.pieces),):
                raise ValueError(
                    f"{name} has shape {tuple(numbers.shape)}; the text has {len(self.pieces)} tokens, so a list of "
                    f"{len(self.pieces)} numbers is needed."
                )
            return numbers
        numbers = torch.as_tensor(feature(self.text), dtype=torch.float64)
        if numbers.shape != (len(self.text),):
            raise ValueError(
                f"{name} gave numbers of shape {tuple(numbers.shape)}; the text has {len(self.text)} characters, so "
                f"a list of {len(self.text)} is needed."
            )
        ends = torch.tensor([*accumulate(map(len, self.pieces))])
        return numbers[(ends - 1).clamp(min=0)] if len(numbers) else torch.zeros(len(self.pieces))


def beginning(text: Read) -> str:
    """What of a run's text its units are judged by, wherever they are: the beginning, without empty lines before it."""
    return text[: 1 << 20].lstrip("\n")[:JUDGED]


def hidden_states(model: nn.Module, vocabulary: Vocabulary, text: str, *, layer: int = -1) -> HiddenStates:
    """Read a text from its start, and keep the hidden state after every token.

    `model`   a `RecurrentLM`, or a `SequenceToSequence` over one-hot vectors or tokens
    `layer`   which layer of a stack: 0 is the lowest, -1 the top

    >>> from loopfold import GRU, Characters, SequenceToSequence
    >>> vocabulary = Characters.of("f(x) = y\\n")
    >>> model = SequenceToSequence(GRU(vocabulary.size, 5), outputs=vocabulary.size)
    >>> states = hidden_states(model, vocabulary, "f(f(x))\\n")
    >>> states.values.shape, states.pieces[:3]
    (torch.Size([8, 5]), ['f', '(', 'f'])
    """
    reader = as_language_model(model)
    if not isinstance(reader, RecurrentLM):
        raise TypeError(
            f"a {type(reader).__name__} keeps no hidden state; hidden_states needs a lf.RecurrentLM, or a "
            f"lf.SequenceToSequence whose outputs are the tokens."
        )
    if reader.vocabulary_size != vocabulary.size:
        raise ValueError(f"the model knows {reader.vocabulary_size} tokens, the vocabulary has {vocabulary.size}.")
    ids = vocabulary.beginning(text)
    if not len(ids):
        raise ValueError("the text has no tokens, so there are no states after them: give a longer text.")
    with evaluating(reader):
        start = reader.initial_context(1)
        x = torch.cat([start.last, ids.to(start.last.device)])[:, None]  # the start of a text, then its tokens
        recurrent = reader.network.recurrent
        layers = of_layers(recurrent, recurrent(reader.encode(x), start.memory).states)
    if not -len(layers) <= layer < len(layers):
        raise ValueError(f"there is no layer {layer}: the model has {len(layers)}, from 0 to {len(layers) - 1}.")
    read = vocabulary.stream()
    pieces = [read(token) for token in ids.tolist()]
    return HiddenStates(layers[layer][1:, 0].flatten(1).cpu(), pieces)


def of_layers(layer: nn.Module, states: State) -> list[Tensor]:
    """The hidden sequence of each layer `[τ, batch, n]`, the lowest first."""
    if isinstance(layer, Stacked):
        parts = zip(layer.layers, states, strict=True)
        return [h for part, own in parts if isinstance(part, RecurrentLayer) for h in of_layers(part, own)]
    return [leaves(states)[0]]


def _is_constant(numbers: Tensor) -> bool:
    return bool((numbers == numbers[0]).all())


def _correlations(values: Tensor, numbers: Tensor) -> Tensor:
    """Pearson's r of each unit of `values [τ, n]` with the numbers `[τ]`; 0 for a unit that does not move."""
    h, f = values.double(), numbers.double()
    h, f = h - h.mean(0), f - f.mean()
    r = (f @ h) / (f.norm() * h.norm(dim=0))
    return torch.where((values != values[0]).any(0), r, 0.0).nan_to_num(0.0, 0.0, 0.0)


def _best(name: str, r: Tensor) -> Tracked:
    unit = int(r.abs().argmax())
    return Tracked(name, unit, float(r[unit]))
