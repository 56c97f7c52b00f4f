"""The perplexity ledger: what a model makes of a text, as totals from which every figure follows."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from loopfold.engines.chunks import distance
from loopfold.errors import OptionError
from loopfold.language.base import Context, LanguageModel, Scored
from loopfold.language.recurrent import as_language_model
from loopfold.memory import check_memory
from loopfold.processes import Processes
from loopfold.states import alive, in_evaluation, leaves, map_state, whole_number
from loopfold.telling import tell
from loopfold.text.streams import WHOLE, Streams
from loopfold.text.vocabulary import Tokens

PART = 1 << 16  # losses that are in memory as numbers of Python
KEPT = 256  # windows of a text whose ends are remembered, to see whether a state has settled


@dataclass(frozen=True)
class Ledger:
    """Totals over a text. Perplexity is the exponential of the mean over all tokens, never a mean of exponentials.

    >>> uniform = Ledger(nll=3 * math.log(8), tokens=3, unit="character", characters=3, bytes=3)
    >>> round(uniform.perplexity, 12), round(uniform.bits_per_token, 12)
    (8.0, 3.0)
    """

    nll: float  # −Σ log P(token | the tokens before it), in nats
    tokens: int  # how many were scored
    unit: str = "token"  # what a token is
    unknown: int | None = None  # how many of them stand for something that is not in the vocabulary
    characters: int | None = None  # of the text that they stand for; white space is one, where words are tokens
    bytes: int | None = None  # the same in UTF-8
    carried: bool = True  # whether the state went through the whole text, or started again with every window
    way: str = "plain"  # how it was scored, beyond that: figures of different ways are not of one model

    @staticmethod
    def of(tokens: Tensor | Tokens, losses: Tensor, *, carried: bool = True, way: "Way | str" = "plain") -> "Ledger":
        """The ledger of a text `[n]` whose tokens have these losses, in nats: what `token_losses` gives, or a mixture.

        >>> round(Ledger.of(torch.tensor([3, 1]), torch.tensor([1.0, 3.0])).perplexity, 4)  # exp(2)
        7.3891
        """
        if losses.shape != (len(tokens),):
            raise ValueError(f"{len(tokens)} tokens need as many losses; got {tuple(losses.shape)}.")
        return Ledger._of(tokens, math.fsum(_sums(losses).tolist()), carried, way)

    @staticmethod
    def _of(tokens: Any, nll: float, carried: bool, way: "Way | str") -> "Ledger":
        if isinstance(tokens, Tokens):
            text = (tokens.unit, tokens.unknown, tokens.characters, tokens.bytes)
            return Ledger(nll, len(tokens), *text, carried, str(way))
        count = tokens.numel() if isinstance(tokens, Tensor) else len(tokens)
        return Ledger(nll, count, carried=carried, way=str(way))

    @property
    def nats_per_token(self) -> float:
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        """`exp(-(1/n) Σ log P)`: 1 for a perfect model, |V| for a uniform one, ∞ where a token was held impossible."""
        try:
            return math.exp(self.nats_per_token)
        except OverflowError:
            return math.inf

    @property
    def bits_per_token(self) -> float:
        return self.nats_per_token / math.log(2)

    @property
    def bits_per_character(self) -> float | None:
        return None if not self.characters else self.nll / math.log(2) / self.characters

    @property
    def bits_per_byte(self) -> float | None:
        return None if not self.bytes else self.nll / math.log(2) / self.bytes

    def as_json(self) -> dict[str, Any]:
        """The totals, and what follows from them; None for what is not finite, which JSON cannot hold."""
        names = ("perplexity", "nats_per_token", "bits_per_token", "bits_per_character", "bits_per_byte")
        figures = asdict(self) | {name: getattr(self, name) for name in names}
        infinite = {name for name, value in figures.items() if isinstance(value, float) and not math.isfinite(value)}
        return {name: None if name in infinite else value for name, value in figures.items()}


class Reading(NamedTuple):
    """What was found of each token of a text."""

    losses: Tensor  # [n] float64, on the CPU
    hidden: Tensor | None = None  # [n, size], what the readout read for it; None where that was not asked for


class Way(ABC):
    """How the tokens of a text are scored: each once, from those before it. `str(way)` is what a ledger calls it."""

    @abstractmethod
    def read(self, model: LanguageModel, ids: Tensor, streams: int, window: int, hidden: bool = False) -> Reading:
        """Score the text `ids [n]` with a model in its evaluation mode; with `hidden`, keep what the readout read."""


@dataclass(frozen=True)
class Plain(Way):
    """The model as it is: its weights stay, its state is carried, and nothing is mixed in."""

    def __str__(self) -> str:
        return "plain"

    def read(self, model: LanguageModel, ids: Tensor, streams: int, window: int, hidden: bool = False) -> Reading:
        found = _carried(model, ids, streams, window, Processes(), hidden=hidden)
        losses, states = torch.empty(len(ids), dtype=torch.float64), None
        for i, piece in enumerate(Streams(torch.arange(len(ids)), found.streams.count, window)):
            inside = alive(piece.tokens, piece.lengths) if piece.lengths is not None else slice(None)
            places = piece.tokens[inside]
            losses[places] = found.nll[i][inside]
            if hidden:  # of a long text these are most of all memory, so none is held twice
                h, found.hidden[i] = found.hidden[i], losses[:0]
                states = h.new_empty(len(ids), h.shape[-1]) if states is None else states
                states[places.to(h.device)] = h[inside if isinstance(inside, slice) else inside.to(h.device)]
        return Reading(losses, states)


def perplexity(
    model: nn.Module,
    tokens: Tensor | Tokens,
    *,
    streams: int = 32,
    window: int = 128,
    carried: bool = True,
    way: Way = Plain(),
    processes: Processes = Processes(),
) -> Ledger:
    """Score every token of a text exactly once, each from all the tokens before it.

    `model`    a `LanguageModel`, or a `SequenceToSequence` over one-hot vectors, whose first input is zeros
    `tokens`   what a vocabulary's `encode` gives, or whole numbers: `[n]`, or `[τ, batch]` for texts of equal length
    `streams`  how many parts of the text are read side by side; like `window`, it changes the time, not the value
    `carried`  False: the state starts again every `window` tokens, as for a model that sees only that much
    `way`      the model as it is, by default; or `DynamicEvaluation`, a `NeuralCache`, a `Mixture`

    >>> from loopfold import Elman, SequenceToSequence
    >>> model = SequenceToSequence(Elman(8, 5), outputs=8)
    >>> _ = nn.init.zeros_(model.V), nn.init.zeros_(model.c)
    >>> round(perplexity(model, torch.tensor([3, 1, 4, 1, 5])).perplexity, 5)
    8.0
    """
    language_model = as_language_model(model)
    ids = checked(tokens, language_model)
    whole_number("perplexity", "streams", streams)
    whole_number("perplexity", "window", window)
    _check_way(way, carried and ids.dim() == 1)
    if not isinstance(way, Plain):
        of = tokens if isinstance(tokens, Tokens) else ids
        losses = token_losses(model, of, streams=streams, window=window, carried=carried, way=way)
        return Ledger.of(of, losses, carried=carried, way=way)
    with evaluating(language_model):  # of a long text, the losses of all tokens would not fit in memory
        if ids.dim() == 2:
            nll = _total(_score(language_model, ids, len(ids) if carried else window))
        elif carried:
            nll = _carried(language_model, ids, streams, window, processes, _sums).total()
        else:
            parts = _pieces(ids, window, streams)
            nll = _total(nll for part in parts for nll in _score(language_model, part, window))
    return Ledger._of(tokens if isinstance(tokens, Tokens) else ids, nll, carried, way)


def token_losses(
    model: nn.Module,
    tokens: Tensor | Tokens,
    *,
    streams: int = 32,
    window: int = 128,
    carried: bool = True,
    way: Way = Plain(),
) -> Tensor:
    """−log P of each token of a text `[n]`, in nats and float64: what `perplexity` sums, token by token.

    The arguments are those of `perplexity`. In memory are the losses, and |V| outputs for one window at a time.
    """
    language_model = as_language_model(model)
    ids = checked(tokens, language_model)
    if ids.dim() != 1:
        raise ValueError(f"token_losses needs one text [n]; got {tuple(ids.shape)}.")
    whole_number("token_losses", "streams", streams)
    whole_number("token_losses", "window", window)
    _check_way(way, carried)
    with evaluating(language_model):
        if carried:
            return way.read(language_model, ids if isinstance(way, Plain) else ids.long(), streams, window).losses
        places, losses = torch.arange(len(ids)), torch.empty(len(ids), dtype=torch.float64)
        for part, where in zip(_pieces(ids, window, streams), _pieces(places, window, streams), strict=True):
            losses[where] = torch.cat(_score(language_model, part, window))
    return losses


def _check_way(way: Way, carried: bool) -> None:
    if not isinstance(way, Way):
        raise TypeError(f"way must be an object such as lf.NeuralCache(); got {way!r}.")
    if not carried and not isinstance(way, Plain):
        raise ValueError(f"a {type(way).__name__} follows one text [n] from its beginning, so carried must be True.")


def checked(tokens: Any, model: LanguageModel) -> Tensor:
    """The tokens as whole numbers, all of which the model knows."""
    ids = tokens.ids if isinstance(tokens, Tokens) else tokens
    if isinstance(ids, str):
        raise TypeError("tokens must be whole numbers; got a text. Type vocabulary.encode(text).")
    ids = torch.as_tensor(ids)
    if ids.is_floating_point() or ids.dim() not in (1, 2) or not ids.numel():
        raise ValueError(f"tokens must be whole numbers, [n] or [τ, batch]; got {ids.dtype} {tuple(ids.shape)}.")
    whole = ids.cpu().numpy()  # torch has no min of uint16
    if int(whole.min()) < 0 or int(whole.max()) >= model.vocabulary_size:
        raise ValueError(
            f"tokens run from {int(whole.min())} to {int(whole.max())}; the model knows 0 to "
            f"{model.vocabulary_size - 1}."
        )
    return ids if ids.dtype in WHOLE else ids.long()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """While open, the model is in its evaluation mode and no gradient is kept."""
    with in_evaluation(model), torch.no_grad():
        yield


def _score(model: LanguageModel, ids: Tensor, window: int) -> list[Tensor]:
    """The losses of texts `[τ, batch]`, each by itself, with a new start every `window` tokens."""
    context = model.initial_context(ids.shape[1])
    return [model(part.to(context.last.device).long(), context).nll.double().cpu() for part in ids.split(window)]


def _total(losses: Iterable[Tensor]) -> float:
    return math.fsum(number for nll in losses for number in _sums(nll).tolist())


def _sums(nll: Tensor) -> Tensor:
    """A few numbers with the same sum, so that a total does not depend on the pieces that it is made of.

    They are the sums of parts, each followed by what its rounding has left out.
    """
    sums = list[float]()
    for part in nll.flatten().split(PART):
        numbers = part.tolist()
        total = math.fsum(numbers)
        sums += [total, math.fsum([*numbers, -total]) if math.isfinite(total) else 0.0]
    return torch.tensor(sums, dtype=torch.float64)


def _pieces(ids: Tensor, window: int, streams: int) -> Iterator[Tensor]:
    """A text in pieces of `window` tokens, `streams` of them at a time: `[window, ≤ streams]`; last, what is left."""
    whole = len(ids) // window * window
    if whole:
        yield from ids[:whole].view(-1, window).T.split(streams, dim=1)
    if whole < len(ids):
        yield ids[whole:, None]


@dataclass(frozen=True)
class _Carried:
    """The losses of this process's streams, window by window."""

    streams: Streams
    nll: list[Tensor]  # [τ, streams] float64, or numbers with the same sum
    hidden: list[Tensor]  # [τ, streams, n] where they were asked for
    processes: Processes

    def total(self) -> float:
        own = math.fsum(number for nll in self.nll for number in nll.flatten().tolist())
        return float(self.processes.sum(torch.tensor(own, dtype=torch.float64)))


def _carried(
    model: LanguageModel,
    ids: Tensor,
    streams: int,
    window: int,
    processes: Processes,
    kept: Callable[[Tensor], Tensor] = lambda nll: nll,
    hidden: bool = False,
) -> _Carried:
    """The losses of one text whose state is carried from its first token to its last, computed in parallel streams.

    At first every stream begins cold. Then each begins again where the one before it has ended, and is read until the
    context at the end of a window is what it was before: from there on nothing can change. This is repeated until no
    beginning moves. The first k streams are right after k rounds at the latest; a model that forgets takes two.

    `TimeParallel` is not used for it: that is given one recurrence, and holds the states of all steps; here any model
    is read window by window, its losses are summed up as they come, and streams are shared out among processes.
    """
    count = min(streams, len(ids)) // processes.count * processes.count
    if not count:
        processes, count = Processes(), min(streams, len(ids))  # hardly any text: each process reads it all
    part = Streams(ids, count, window).part(processes.rank, processes.count)
    cold = model.initial_context(count)
    device = cold.last.device
    starts = cold
    nll: list[Tensor] = [torch.zeros(())] * len(part)
    states: list[Tensor] = [torch.zeros(())] * len(part)
    ends: list[Context | None] = [None] * min(len(part), KEPT)
    for _ in range(count):
        context = processes.share(starts)
        for i in range(len(part)):
            piece = part[i]
            scored = model(piece.tokens.to(device), context, piece.lengths)
            nll[i] = kept(scored.nll.double().cpu())
            if hidden:
                states[i] = hidden_of(model, scored)
                if starts is cold and i == 0:
                    check_held(states[i], len(ids))
            context = map_state(Tensor.clone, scored.context)  # not the states of all steps, of which it is a view
            if starts is cold:  # what comes after is little
                tell("scoring", len(ids) * (i + 1) // len(part), len(ids), "tokens")
            if i < KEPT:
                before, ends[i] = ends[i], context
                if before is not None and _same(context, before):
                    break
        else:
            last = context
        shifted = map_state(lambda c, e: torch.cat([c[:1], e[:-1]]), cold, processes.gather(last))
        if _same(shifted, starts):
            break
        starts = shifted
    return _Carried(part, nll, states, processes)


def check_held(h: Tensor, tokens: int) -> None:
    """That there is room for states such as `h [τ, batch, n]` of so many tokens."""
    needed = tokens * h.nbytes // (h.shape[0] * h.shape[1])
    check_memory(
        f"a cache of a text of {tokens:,} tokens", needed, str(h.device), "score a shorter text, or without a cache"
    )


def hidden_of(model: LanguageModel, scored: Scored) -> Tensor:
    """What the readout of a model read."""
    if scored.hidden is None:
        raise OptionError(
            f"a {type(model).__name__} has no hidden states, and a cache needs them: use a recurrent network."
        )
    return scored.hidden.detach()


def _same(a: Context, b: Context) -> bool:
    """Equal, up to rounding."""
    dtypes = [leaf.dtype for leaf in leaves(a) if leaf.is_floating_point()]
    # no tighter: from step to step each state is rounded again, so two that have met still differ by a few eps
    tolerance = min([100 * torch.finfo(dtype).eps for dtype in dtypes] + [1e-4])
    return bool((distance(a, b) <= tolerance).all())
