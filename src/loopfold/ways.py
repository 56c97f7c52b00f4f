"""Ways to score a text beyond the plain ledger: weights that follow it, a cache of it, other models beside the network.

Every way scores each token once, from the tokens before it, and so gives probabilities that sum to one. They wrap one
another: `NeuralCache(over=DynamicEvaluation(0.001))`. Their settings are found on one text, with `tuned`, and then used
on another; on the text that they were tuned on, the figures flatter them.
"""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from loopfold.errors import OptionError
from loopfold.evaluation import Plain, Reading, Way, check_held, checked, evaluating, hidden_of
from loopfold.language.base import LanguageModel
from loopfold.language.ngram import NGramLM
from loopfold.language.recurrent import as_language_model
from loopfold.states import in_evaluation, map_state, whole_number
from loopfold.telling import tell, telling_of
from loopfold.text.streams import Streams
from loopfold.text.vocabulary import Tokens

W = TypeVar("W")

# ------------------------------------------------------------------ weights that follow the text


@dataclass(frozen=True)
class DynamicEvaluation(Way):
    """Weights that follow the text (Krause et al., Dynamic Evaluation of Neural Sequence Models, 2018).

    Each window is scored first. Then the gradient g of its mean loss moves the weights θ, which are drawn back to the
    trained ones, θ₀:

        θ ← θ - rate g / (r + r̄) + min(1, decay r / r̄) (θ₀ - θ)

    Here r = `rms`, what `gradient_rms` finds on the training text, and r̄ is its mean over all parameters. Without
    `rms`, plain gradient descent: `θ ← θ - rate g + decay (θ₀ - θ)`. The text is one stream, and `window` is the number
    of its tokens between two changes. A copy of the model is changed, never the model itself.

    >>> print(DynamicEvaluation(rate=0.1, decay=0.001))
    dynamic evaluation (rate 0.1, decay 0.001, window 20)
    """

    rate: float
    decay: float = 0.0
    window: int = 20
    rms: tuple[Tensor, ...] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        _number("DynamicEvaluation", "rate", self.rate)
        _number("DynamicEvaluation", "decay", self.decay, 1.0)
        whole_number("DynamicEvaluation", "window", self.window)

    def __str__(self) -> str:
        scaled = "" if self.rms is None else ", scaled by RMS"
        return f"dynamic evaluation (rate {self.rate:.4g}, decay {self.decay:.4g}, window {self.window}{scaled})"

    def read(self, model: LanguageModel, ids: Tensor, streams: int, window: int, hidden: bool = False) -> Reading:
        losses, states = list[Tensor](), list[Tensor]()
        with torch.inference_mode(False), torch.enable_grad():
            follower, trained = _copy(model), _trained(model)
            steps, pulls = self._sizes(trained)
            weights = [p for p in follower.parameters() if p.requires_grad]
            context = follower.initial_context(1)
            for part in ids.clone().split(self.window):
                scored = follower(part[:, None].to(context.last.device), context)
                nll = scored.nll[:, 0]
                losses.append(nll.detach().double().cpu())
                tell("scoring", min(len(losses) * self.window, len(ids)), len(ids), "tokens")
                if hidden:
                    if not states:
                        check_held(hidden_of(model, scored), len(ids))
                    states.append(hidden_of(model, scored)[:, 0])
                if not bool(losses[-1].isfinite().all()):
                    raise FloatingPointError(
                        f"the losses are no finite numbers after {sum(map(len, losses)):,} tokens of dynamic "
                        f"evaluation: choose a smaller rate than {self.rate:.4g}."
                    )
                gradients = torch.autograd.grad(nll.mean(), weights, allow_unused=True)
                context = map_state(lambda t: t.detach().clone(), scored.context)
                with torch.no_grad():
                    for p, p_0, g, step, pull in zip(weights, trained, gradients, steps, pulls, strict=True):
                        p.lerp_(p_0, pull)
                        if g is not None:
                            p.addcmul_(g, step, value=-1)
        return Reading(torch.cat(losses), torch.cat(states) if hidden else None)

    def _sizes(self, trained: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """How far each number goes with its gradient, and what share of the way back."""
        if self.rms is None:
            rate, decay = (torch.tensor(size, dtype=torch.float64) for size in (self.rate, self.decay))
            return [rate.to(p) for p in trained], [decay.to(p) for p in trained]
        if [r.shape for r in self.rms] != [p.shape for p in trained]:
            raise ValueError("rms is of another model: type gradient_rms(model, training_tokens).")
        rms = [r.to(p.real) for r, p in zip(self.rms, trained, strict=True)]
        mean = sum(float(r.double().sum()) for r in rms) / sum(r.numel() for r in rms)
        if not 0 < mean < math.inf:
            raise ValueError(f"rms must be positive finite numbers; their mean is {mean}.")
        steps = [self.rate / (r + mean) for r in rms]
        pulls = [(r * (self.decay / mean)).clamp(max=1) for r in rms]
        return _like(trained, steps), _like(trained, pulls)

    @staticmethod
    def tuned(
        model: nn.Module,
        tokens: Tensor | Tokens,
        *,
        rate: float | None = None,
        decay: float | None = None,
        window: int = 20,
        rms: tuple[Tensor, ...] | None = None,
    ) -> "DynamicEvaluation":
        """With the rate, then the decay, that suit a text best; those given stay. It is read some ten times."""
        language_model, ids = _read(model, tokens)
        likely = RATES[PLAIN if rms is None else SCALED]
        start = DynamicEvaluation(likely if rate is None else rate, decay or 0.0, window, rms)

        def loss(way: DynamicEvaluation) -> float:
            try:
                with telling_of(f"tuning, rate {way.rate:.4g}, decay {way.decay:.4g}"):
                    return math.fsum(_reading(way, language_model, ids).losses.tolist())
            except FloatingPointError:
                return math.inf

        best = start
        if rate is None:
            best = _lowest([replace(start, rate=r) for r in RATES], start, loss)
        if decay is None:
            best = _lowest([replace(best, decay=d) for d in DECAYS], best, loss)
        return best


def _like(parameters: list[Tensor], sizes: list[Tensor]) -> list[Tensor]:
    """Sizes in the dtype, and on the device, of what they are for."""
    return [size.to(p) for size, p in zip(sizes, parameters, strict=True)]


RATES = [1e-4 * 2.0**k for k in range(-10, 21)]
SCALED, PLAIN = 11, 20  # where among them the search begins: 0.0002 and 0.1
DECAYS = [0.0, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1]


def gradient_rms(
    model: nn.Module, tokens: Tensor | Tokens, *, streams: int = 32, window: int = 20
) -> tuple[Tensor, ...]:
    """√(mean of |g|²) for each parameter, over the gradients g of a training text's mean loss, window by window."""
    language_model, ids = _read(model, tokens)
    with in_evaluation(language_model), torch.inference_mode(False), torch.enable_grad():
        parts = Streams(ids.clone(), streams, window)
        squares = [torch.zeros_like(p.real) for p in _trained(language_model)]
        parameters = [p for p in language_model.parameters() if p.requires_grad]
        context = language_model.initial_context(parts.count)
        for i, piece in enumerate(parts):
            scored = language_model(piece.tokens.to(context.last.device), context, piece.lengths)
            context = map_state(lambda t: t.detach().clone(), scored.context)
            mean = scored.nll.sum() / parts.tokens_in(i)
            for total, g in zip(squares, torch.autograd.grad(mean, parameters, allow_unused=True), strict=True):
                if g is not None:
                    total.add_((g * g.conj()).real)
            tell("following gradients", (i + 1) * len(ids) // len(parts), len(ids), "tokens")
    return tuple((total / len(parts)).sqrt() for total in squares)


def _trained(model: LanguageModel) -> list[Tensor]:
    found = [p.detach() for p in model.parameters() if p.requires_grad]
    if not found:
        raise OptionError(f"a {type(model).__name__} has no weights that a gradient could change.")
    return found


def _copy(model: LanguageModel) -> LanguageModel:
    try:
        return deepcopy(model)
    except Exception as error:
        raise OptionError(f"dynamic evaluation changes a copy of the model, which cannot be made: {error}") from error


# ------------------------------------------------------------------ a cache of the text


@dataclass(frozen=True)
class NeuralCache(Way):
    """What followed when the hidden state was like this (Grave et al., Improving Neural Language Models with a
    Continuous Cache, 2017).

        p(w)       = (1 - weight) p_model(w) + weight p_cache(w)
        p_cache(w) ∝ Σ_i 1[w_i = w] exp(sharpness h_t·h_i),    i = t - size … t - 1

    h_t is what the readout reads to predict w_t. The cache begins empty: then it says what the model says. The hidden
    states of the whole text are in memory.

    >>> print(NeuralCache(500, weight=0.2, sharpness=0.3, over=DynamicEvaluation(0.1)))
    neural cache (size 500, weight 0.2, sharpness 0.3) over dynamic evaluation (rate 0.1, decay 0, window 20)
    """

    size: int = 2000
    weight: float = 0.1
    sharpness: float = 0.3
    over: Way = Plain()

    def __post_init__(self) -> None:
        whole_number("NeuralCache", "size", self.size)
        _number("NeuralCache", "weight", self.weight, 1.0)
        _number("NeuralCache", "sharpness", self.sharpness, 1e6)
        _check_over(self)

    def __str__(self) -> str:
        name = f"neural cache (size {self.size}, weight {self.weight:.4g}, sharpness {self.sharpness:.4g})"
        return name + _over(self.over)

    def read(self, model: LanguageModel, ids: Tensor, streams: int, window: int, hidden: bool = False) -> Reading:
        found = self.over.read(model, ids, streams, window, hidden=True)
        return found._replace(losses=self._mixed(found, ids))

    def _mixed(self, found: Reading, ids: Tensor) -> Tensor:
        return mixed_losses([found.losses, self._losses(found, ids)], [1 - self.weight, self.weight])

    def _losses(self, found: Reading, ids: Tensor) -> Tensor:
        """−log p_cache of each token: some rows t of the matrix of all h_t·h_i at a time."""
        assert found.hidden is not None
        h = found.hidden.to(torch.promote_types(found.hidden.dtype, torch.float32))
        losses, ids = found.losses.clone(), ids.to(h.device)  # the first, of an empty cache, is the model's
        rows = min(256, max(1, NUMBERS // min(self.size, len(ids))))
        for first in range(1, len(ids), rows):
            end, oldest = min(first + rows, len(ids)), max(first - self.size, 0)
            t, i = torch.arange(first, end, device=h.device)[:, None], torch.arange(oldest, end - 1, device=h.device)
            scores = (self.sharpness * h[first:end]) @ h[oldest : end - 1].T
            inside = (i < t) & (i >= t - self.size)
            every = scores.masked_fill_(~inside, -torch.inf).logsumexp(1)
            same = scores.masked_fill_(ids[t] != ids[i], -torch.inf).logsumexp(1)
            losses[first:end] = (every - same).double().cpu()
            tell("looking back", end, len(ids), "tokens")
        return losses

    @staticmethod
    def tuned(
        model: nn.Module,
        tokens: Tensor | Tokens,
        *,
        size: int = 2000,
        weight: float | None = None,
        sharpness: float | None = None,
        over: Way = Plain(),
    ) -> "NeuralCache":
        """With the sharpness and the weight that suit a text best; those that are given stay. It is read once."""
        given = NeuralCache(size, 0.1 if weight is None else weight, 0.3 if sharpness is None else sharpness, over)
        language_model, ids = _read(model, tokens)
        found = _reading(over, language_model, ids, hidden=True)

        def weighted(way: NeuralCache) -> NeuralCache:
            best = mixture_weights([found.losses, way._losses(found, ids)])[1] if weight is None else weight
            return replace(way, weight=best)

        choices = [replace(given, sharpness=s) for s in (SHARPNESSES if sharpness is None else [sharpness])]
        with torch.no_grad():
            return weighted(_lowest(choices, given, lambda way: float(weighted(way)._mixed(found, ids).sum())))


SHARPNESSES = [0.0, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0]
NUMBERS = 1 << 20  # of the matrix at a time


# ------------------------------------------------------------------ mixtures


@dataclass(frozen=True)
class Mixture(Way):
    """The model and others beside it, such as an n-gram: `p(w) = Σ_k weights[k] p_k(w)` (Jelinek and Mercer, 1980).

    The first weight is that of the model itself, read as `over` says; the others are read plainly.

    >>> ngram = NGramLM(torch.tensor([0, 1, 2, 0, 1]), vocabulary_size=3, order=5)
    >>> print(Mixture((0.7, 0.3), (ngram,), NeuralCache(500)))
    mixture (0.7 of the model, 0.3 of a 5-gram) over neural cache (size 500, weight 0.1, sharpness 0.3)
    """

    weights: tuple[float, ...]
    others: tuple[nn.Module, ...]
    over: Way = Plain()

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", tuple(map(float, self.weights)))
        object.__setattr__(self, "others", tuple(self.others))
        _check_weights(self.weights, 1 + len(self.others))
        _check_over(self)

    def __str__(self) -> str:
        names = [f"a {m.order}-gram" if isinstance(m, NGramLM) else f"a {type(m).__name__}" for m in self.others]
        parts = [f"{w:.4g} of {name}" for w, name in zip(self.weights, ["the model", *names], strict=True)]
        return f"mixture ({', '.join(parts)})" + _over(self.over)

    def read(self, model: LanguageModel, ids: Tensor, streams: int, window: int, hidden: bool = False) -> Reading:
        found = self.over.read(model, ids, streams, window, hidden)
        return found._replace(
            losses=mixed_losses([found.losses, *self._others(model, ids, streams, window)], self.weights)
        )

    def _others(self, model: LanguageModel, ids: Tensor, streams: int, window: int) -> list[Tensor]:
        found = []
        for other in map(as_language_model, self.others):
            if other.vocabulary_size != model.vocabulary_size:
                raise ValueError(
                    f"models of {model.vocabulary_size} and of {other.vocabulary_size} tokens cannot be mixed: they "
                    "need the same vocabulary."
                )
            with evaluating(other):
                found.append(Plain().read(other, ids, streams, window).losses)
        return found

    @staticmethod
    def tuned(
        model: nn.Module, tokens: Tensor | Tokens, others: Sequence[nn.Module], *, over: Way = Plain()
    ) -> "Mixture":
        """With the weights that suit a text best, by expectation maximisation."""
        equal = Mixture((1 / (1 + len(others)),) * (1 + len(others)), tuple(others), over)
        language_model, ids = _read(model, tokens)
        losses = _reading(over, language_model, ids).losses
        return replace(equal, weights=mixture_weights([losses, *equal._others(language_model, ids, 32, 128)]))


def mixed_losses(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """−log Σ_k weights[k] p_k of each token, from the losses −log p_k `[n]` of each model.

    >>> a, b = torch.tensor([0.5, 0.1]), torch.tensor([0.1, 0.7])
    >>> mixed_losses([-a.log(), -b.log()], (0.5, 0.5)).exp() ** -1
    tensor([0.3000, 0.4000], dtype=torch.float64)
    """
    _check_weights(weights, len(losses))
    w = torch.tensor(weights, dtype=torch.float64)
    return -(w.log()[:, None] - _stacked(losses)).logsumexp(0)


def mixture_weights(losses: Sequence[Tensor]) -> tuple[float, ...]:
    """The weights for which `mixed_losses(losses, weights).sum()` is smallest, by expectation maximisation.

        weights[k] ← mean over all tokens of weights[k] p_k / Σ_j weights[j] p_j

    >>> a, b = torch.tensor([0.9, 0.9, 0.1]), torch.tensor([0.1, 0.1, 0.9])
    >>> [round(w, 6) for w in mixture_weights([-a.log(), -b.log()])]
    [0.708333, 0.291667]
    """
    stacked = _stacked(losses)
    if bool(stacked.isnan().any()):
        raise FloatingPointError("losses that are no numbers cannot be mixed.")
    known = stacked[:, ~stacked.isinf().all(0)]  # what no model holds possible tells them not apart
    p = (known.amin(0) - known).exp()  # up to a factor for each token, which makes no difference
    w = torch.full((len(p),), 1 / len(p), dtype=torch.float64)
    for _ in range(ROUNDS if p.numel() else 0):
        before, w = w, w * (p @ (w @ p).reciprocal()) / p.shape[1]
        w = w / w.sum()
        if float((w - before).abs().max()) < 1e-10:
            break
    return tuple(w.tolist())


ROUNDS = 10_000


# ------------------------------------------------------------------ what they share


def _read(model: nn.Module, tokens: Tensor | Tokens) -> tuple[LanguageModel, Tensor]:
    language_model = as_language_model(model)
    ids = checked(tokens, language_model).long()
    if ids.dim() != 1:
        raise ValueError(f"one text [n] is needed; got {tuple(ids.shape)}.")
    return language_model, ids


def _reading(way: Way, model: LanguageModel, ids: Tensor, hidden: bool = False) -> Reading:
    with evaluating(model):
        return way.read(model, ids, 32, 128, hidden)


def _lowest(choices: list[W], start: W, loss: Callable[[W], float]) -> W:
    """From `start` on to the neighbour of a smaller loss, until neither has one; down where all are infinite."""
    found: dict[int, float] = {}

    def at(i: int) -> float:
        if i not in found:
            value = loss(choices[i])
            found[i] = math.inf if math.isnan(value) else value
        return found[i]

    here = choices.index(start)
    while True:
        best = min((i for i in (here - 1, here, here + 1) if 0 <= i < len(choices)), key=at)
        if best == here:
            return choices[here]
        here = best


def _stacked(losses: Sequence[Tensor]) -> Tensor:
    """The losses of all models, `[models, n]`."""
    shapes = {tuple(one.shape) for one in losses}
    if len(shapes) != 1 or any(one.dim() != 1 for one in losses):
        raise ValueError(f"a mixture needs the losses [n] of the same tokens for each model; got {sorted(shapes)}.")
    return torch.stack([one.detach().double().cpu() for one in losses])


def _check_weights(weights: Sequence[float], count: int) -> None:
    if len(weights) != count or not all(w >= 0 for w in weights) or not math.isclose(sum(weights), 1, abs_tol=1e-6):
        raise ValueError(f"a mixture of {count} needs {count} weights of at least 0 whose sum is 1; got {[*weights]}.")


def _check_over(way: "NeuralCache | Mixture") -> None:
    if not isinstance(way.over, Way):
        raise TypeError(f"over must be a way to read the text, such as lf.DynamicEvaluation(0.01); got {way.over!r}.")


def _over(way: Way) -> str:
    return "" if isinstance(way, Plain) else f" over {way}"


def _number(owner: str, name: str, value: float, most: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 <= value <= most and value < math.inf):
        up_to = "" if most == math.inf else f" and at most {most:g}"
        raise ValueError(f"{owner} needs {name} as a number of at least 0{up_to}; got {value!r}.")
