"""The perplexity ledger: what a model makes of a text, as totals from which every figure follows."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loopfold.language.base import Context, LanguageModel
from loopfold.language.recurrent import as_language_model
from loopfold.processes import Processes
from loopfold.states import alive, in_evaluation, leaves, map_state, whole_number
from loopfold.text.streams import WHOLE, Streams
from loopfold.text.vocabulary import Tokens

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


def perplexity(
    model: nn.Module,
    tokens: Tensor | Tokens,
    *,
    streams: int = 32,
    window: int = 128,
    carried: bool = True,
    processes: Processes = Processes(),
) -> Ledger:
    """Score every token of a text exactly once, each from all the tokens before it.

    `model`    a `LanguageModel`, or a `SequenceToSequence` over one-hot vectors, whose first input is zeros
    `tokens`   what a vocabulary's `encode` gives, or whole numbers: `[n]`, or `[τ, batch]` for texts of equal length
    `streams`  how many parts of the text are read side by side; like `window`, it changes the time, not the value
    `carried`  False: the state starts again every `window` tokens, as for a model that sees only that much

    >>> from loopfold import Elman, SequenceToSequence
    >>> model = SequenceToSequence(Elman(8, 5), outputs=8)
    >>> _ = nn.init.zeros_(model.V), nn.init.zeros_(model.c)
    >>> round(perplexity(model, torch.tensor([3, 1, 4, 1, 5])).perplexity, 5)
    8.0
    """
    language_model = as_language_model(model)
    ids = _checked(tokens.ids if isinstance(tokens, Tokens) else tokens, language_model)
    whole_number("perplexity", "streams", streams)
    whole_number("perplexity", "window", window)
    with evaluating(language_model):
        if ids.dim() == 2:
            nll = _sum(_score(language_model, ids, window if not carried else len(ids)))
        elif not carried:
            nll = sum(_sum(_score(language_model, part, window)) for part in _pieces(ids, window, streams))
        else:
            nll = _carried(language_model, ids, streams, window, processes, Tensor.sum).total()
    if isinstance(tokens, Tokens):
        return Ledger(nll, len(ids), tokens.unit, tokens.unknown, tokens.characters, tokens.bytes, carried)
    return Ledger(nll, ids.numel(), carried=carried)


def token_losses(
    model: nn.Module, tokens: Tensor | Tokens, *, streams: int = 32, window: int = 128, carried: bool = True
) -> Tensor:
    """−log P of each token of a text `[n]`, in nats and float64: what `perplexity` sums, token by token.

    The arguments are those of `perplexity`. In memory are the losses, and |V| outputs for one window at a time.
    """
    language_model = as_language_model(model)
    ids = _checked(tokens.ids if isinstance(tokens, Tokens) else tokens, language_model)
    if ids.dim() != 1:
        raise ValueError(f"token_losses needs one text [n]; got {tuple(ids.shape)}.")
    whole_number("token_losses", "streams", streams)
    whole_number("token_losses", "window", window)
    places, losses = torch.arange(len(ids)), torch.empty(len(ids), dtype=torch.float64)
    with evaluating(language_model):
        if carried:
            found = _carried(language_model, ids, streams, window, Processes())
            for piece, nll in zip(Streams(places, found.streams.count, window), found.nll, strict=True):
                inside = alive(piece.tokens, piece.lengths) if piece.lengths is not None else slice(None)
                losses[piece.tokens[inside]] = nll[inside]
        else:
            pieces = zip(_pieces(ids, window, streams), _pieces(places, window, streams), strict=True)
            for part, where in pieces:
                losses[where] = torch.cat(_score(language_model, part, window))
    return losses


def _checked(ids: Any, model: LanguageModel) -> Tensor:
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


def _sum(losses: list[Tensor]) -> float:
    return sum(float(nll.sum()) for nll in losses)


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
    nll: list[Tensor]  # [τ, streams] float64, or their sum
    processes: Processes

    def total(self) -> float:
        own = math.fsum(float(nll.sum()) for nll in self.nll)
        return float(self.processes.sum(torch.tensor(own, dtype=torch.float64)))


def _carried(
    model: LanguageModel,
    ids: Tensor,
    streams: int,
    window: int,
    processes: Processes,
    kept: Callable[[Tensor], Tensor] = lambda nll: nll,
) -> _Carried:
    """The losses of one text whose state is carried from its first token to its last, computed in parallel streams.

    At first every stream begins cold. Then each begins again where the one before it has ended, and is read until the
    context at the end of a window is what it was before: from there on nothing can change. This is repeated until no
    beginning moves. The first k streams are right after k rounds at the latest; a model that forgets takes two.
    """
    count = min(streams, len(ids)) // processes.count * processes.count
    if not count:
        processes, count = Processes(), min(streams, len(ids))  # hardly any text: each process reads it all
    part = Streams(ids, count, window).part(processes.rank, processes.count)
    cold = model.initial_context(count)
    device = cold.last.device
    starts = cold
    nll: list[Tensor] = [torch.zeros(())] * len(part)
    ends: list[Context | None] = [None] * min(len(part), KEPT)
    for _ in range(count):
        context = processes.share(starts)
        for i in range(len(part)):
            piece = part[i]
            scored = model(piece.tokens.to(device), context, piece.lengths)
            nll[i] = kept(scored.nll.double().cpu())
            context = map_state(Tensor.clone, scored.context)  # not the states of all steps, of which it is a view
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
    return _Carried(part, nll, processes)


def _same(a: Context, b: Context | None) -> bool:
    """Equal, up to rounding: for each stream, measured by the largest number of its own state."""
    for x, y in zip(leaves(a), leaves(b), strict=True):
        if torch.equal(x, y):
            continue
        if not x.is_floating_point():
            return False
        # no tighter: from step to step each state is rounded again, so two that have met still differ by a few eps
        tolerance = min(100 * torch.finfo(x.dtype).eps, 1e-4)
        difference, size = (t.abs().reshape(len(t), -1).amax(1) for t in (x - y, y))
        if not bool((difference <= tolerance * size).all()):
            return False
    return True
