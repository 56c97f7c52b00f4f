"""Dynamic evaluation, the neural cache and mixtures against slow loops over tokens, in float64."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

import loopfold as lf
from loopfold import evaluation, ways
from loopfold.language.recurrent import recurrent_lm
from loopfold.states import map_state

pytestmark = pytest.mark.usefixtures("one_thread")
SIZE = 7  # |V|


class Leaky(nn.Module):
    """A cell as a user writes one."""

    def __init__(self, size: int, n: int) -> None:
        super().__init__()
        self.W, self.U = nn.Parameter(torch.randn(n, n) / 3), nn.Parameter(torch.randn(n, size) / 3)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return 0.3 * h + 0.7 * torch.tanh(h @ self.W.T + x @ self.U.T)


class Turning(lf.Transition):
    """With a complex state, and a complex parameter."""

    def __init__(self, size: int, n: int) -> None:
        super().__init__()
        self.lam, self.U = nn.Parameter(torch.randn(n, dtype=torch.complex128) / 3), nn.Linear(size, n)

    def initial_state(self, batch: int) -> Tensor:
        return torch.zeros(batch, len(self.lam), dtype=self.lam.dtype, device=self.lam.device)

    def forward(self, z: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.lam * z + self.U(x)
        return z.real + z.imag, z


def one_hot() -> nn.Module:
    return lf.SequenceToSequence(lf.Elman(SIZE, 4), outputs=SIZE)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: recurrent_lm(SIZE, [lf.LSTM(3, 5)], 3, 0.2),
    "complex": lambda: recurrent_lm(SIZE, [Turning(3, 5)], 3),
    "tied, weights dropped": lambda: recurrent_lm(
        SIZE, [lf.LSTM(4, 5), lf.LSTM(5, 4)], 4, 0.3, tied=True, weight_drop=0.4
    ),
    "a cell of one's own, two layers": lambda: recurrent_lm(SIZE, [Leaky(3, 5), Leaky(5, 4)], 3, 0.1),
    "one-hot vectors": lambda: recurrent_lm(SIZE, [lf.GRU(SIZE, 4)], None, 0.0),
    "a pattern": one_hot,
}


def made(name: str) -> nn.Module:
    torch.manual_seed(len(name))
    model = MODELS[name]().double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)  # so that hidden states differ
    return model


def text(n: int) -> Tensor:
    return torch.randint(0, SIZE, (n,), generator=torch.Generator().manual_seed(n))


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}


def language_model(model: nn.Module) -> lf.LanguageModel:
    return model if isinstance(model, lf.LanguageModel) else lf.RecurrentLM(model)  # type: ignore[arg-type]


def by_token(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """log p of every token of the vocabulary `[n, |V|]`, and the hidden states `[n, size]`, step by step."""
    lm = language_model(model).eval()
    log_p, hidden, context = [], [], lm.initial_context(1)
    with torch.no_grad():
        for token in ids:
            log_p.append(lm.next(context).log_probabilities[0])
            scored = lm(token.view(1, 1), context)
            assert scored.hidden is not None
            hidden.append(scored.hidden[0, 0])
            context = scored.context
    return torch.stack(log_p), torch.stack(hidden)


def with_cache(log_p: Tensor, h: Tensor, ids: Tensor, size: int, weight: float, sharpness: float) -> Tensor:
    """Grave et al. (2017), equations (3) and (4), for every token of the vocabulary."""
    found = []
    for t in range(len(ids)):
        p, cache = log_p[t].exp(), torch.zeros(SIZE, dtype=torch.float64)
        for i in range(max(t - size, 0), t):
            cache[ids[i]] += math.exp(sharpness * float(h[t] @ h[i]))
        found.append((1 - weight) * p + weight * cache / cache.sum() if t else p)
    return torch.stack(found)


def followed(model: nn.Module, ids: Tensor, way: lf.DynamicEvaluation) -> tuple[Tensor, Tensor]:
    """Dynamic evaluation, written as the equation is: on a model that is thrown away."""
    lm = language_model(model).eval()
    lm.requires_grad_(True)
    if isinstance(lm, lf.RecurrentLM) and lm.reads_tokens:
        for name, p in lm.named_parameters():
            p.requires_grad_("embedding" not in name or p.shape[1] < SIZE)
    weights = [p for p in lm.parameters() if p.requires_grad]
    trained = [p.detach().clone() for p in weights]
    losses, hidden, context = [], [], lm.initial_context(1)
    for first in range(0, len(ids), way.window):
        window, total = ids[first : first + way.window], torch.zeros((), dtype=torch.float64)
        for token in window:
            scored = lm(token.view(1, 1), context)
            losses.append(scored.nll.item())
            assert scored.hidden is not None
            hidden.append(scored.hidden.detach()[0, 0])
            total, context = total + scored.nll.sum(), scored.context
        lm.zero_grad()
        (total / len(window)).backward()
        context = map_state(Tensor.detach, context)
        mean = float(torch.cat([r.flatten() for r in way.rms]).mean()) if way.rms else 0.0
        with torch.no_grad():
            for k, (p, p_0) in enumerate(zip(weights, trained, strict=True)):
                g = torch.zeros_like(p) if p.grad is None else p.grad
                if way.rms is None:
                    p.add_(-way.rate * g + way.decay * (p_0 - p))
                else:
                    r = way.rms[k]
                    pull = torch.minimum(torch.ones_like(r), way.decay * r / mean)
                    p.add_(-way.rate * g / (r + mean) + pull * (p_0 - p))
    return torch.tensor(losses, dtype=torch.float64), torch.stack(hidden)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


# ------------------------------------------------------------------ the cache


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("n", "size"), [(1, 3), (2, 1), (31, 1), (31, 5), (40, 1000)])
def test_the_cache_is_the_loop_over_tokens(name: str, n: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = made(name), text(n)
    log_p, h = by_token(model, ids)
    for weight, sharpness in ((0.3, 0.7), (1.0, 2.0), (0.2, 0.0)):
        p = with_cache(log_p, h, ids, size, weight, sharpness)
        close(p.sum(1), torch.ones(n, dtype=torch.float64))
        needed = -p[torch.arange(n), ids].log()
        way = lf.NeuralCache(size, weight, sharpness)
        for streams, window, numbers in ((1, 128, 1 << 20), (3, 4, 1), (32, 5, 17)):
            monkeypatch.setattr(ways, "NUMBERS", numbers)
            close(lf.token_losses(model, ids, streams=streams, window=window, way=way), needed)
    plain = lf.token_losses(model, ids)
    assert torch.equal(lf.token_losses(model, ids, way=lf.NeuralCache(size, 0.0, 1.0)), plain)


def test_the_cache_sees_nothing_that_is_to_come() -> None:
    """Whatever comes after a token, its loss is the same."""
    model, ids = made("lstm"), text(30)
    way = lf.NeuralCache(9, 0.5, 1.0, over=lf.DynamicEvaluation(0.1, 0.01, window=4))
    losses = lf.token_losses(model, ids, streams=1, way=way)
    for t in range(1, 30, 3):
        other = torch.cat([ids[:t], (ids[t:] + 1) % SIZE])
        close(lf.token_losses(model, other, streams=1, way=way)[:t], losses[:t])


def test_a_cache_of_large_numbers() -> None:
    """Products far beyond what exp holds, in single precision too."""
    model = made("lstm").float()
    losses = lf.token_losses(model, text(50), way=lf.NeuralCache(20, 0.5, 1e6))
    assert bool(losses.isfinite().all())
    sharpest = lf.token_losses(made("lstm"), text(50), way=lf.NeuralCache(20, 0.5, 1e6))
    torch.testing.assert_close(losses, sharpest, rtol=1e-3, atol=1e-3)


def test_a_cache_that_does_not_fit_into_memory_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopfold.memory.free_memory", lambda device: 40 * 5 * 8 - 1)
    for over in (lf.DynamicEvaluation(0.1), evaluation.Plain()):
        way = lf.NeuralCache(5, over=over)
        assert len(lf.token_losses(made("lstm"), text(39), way=way)) == 39
        with pytest.raises(lf.OptionError, match=r"a cache of a text of 40 tokens needs at least 0\.0 GB of memory"):
            lf.token_losses(made("lstm"), text(40), way=way)


# ------------------------------------------------------------------ weights that follow


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_dynamic_evaluation_is_the_equation(name: str, scaled: bool) -> None:
    model = made(name).train()
    rms = lf.gradient_rms(model, text(40), streams=3, window=4) if scaled else None
    before = tensors(model)
    for n, window in ((1, 1), (1, 5), (23, 1), (23, 5), (24, 8)):
        way = lf.DynamicEvaluation(0.05, 0.1, window, rms)
        needed, hidden = followed(made(name), text(n), way)
        close(lf.token_losses(model, text(n), way=way), needed)
        cached = lf.NeuralCache(6, 0.3, 0.5, over=way)
        p = with_cache(-needed[:, None].expand(-1, SIZE), hidden, text(n), 6, 0.3, 0.5)
        close(lf.token_losses(model, text(n), way=cached), -p[torch.arange(n), text(n)].log())
    assert all(part.training for part in model.modules())
    after = tensors(model)
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_without_a_rate_nothing_changes(name: str) -> None:
    model, ids = made(name), text(33)
    plain = lf.token_losses(model, ids)
    for decay in (0.0, 0.3):
        close(lf.token_losses(model, ids, way=lf.DynamicEvaluation(0.0, decay, window=4)), plain)


def test_what_drops_and_what_is_tied_follows_the_text() -> None:
    """What a parametrization's original is, and the one table, change; the first window is scored before that."""
    model = made("tied, weights dropped")
    cells = [part for part in model.modules() if is_parametrized(part, "W")]
    assert len(cells) == 2
    plain = lf.token_losses(model, text(20))
    came = lf.token_losses(model, text(20), way=lf.DynamicEvaluation(0.1, window=5))
    close(came[:5], plain[:5])
    assert not torch.isclose(came[5:], plain[5:]).any()


@pytest.mark.parametrize("name", ["lstm", "complex"])
def test_gradient_rms_is_the_root_of_the_mean_square(name: str) -> None:
    model, ids = made(name), text(23)
    came = lf.gradient_rms(model, ids, streams=2, window=4)
    lm = made(name).eval()
    assert isinstance(lm, lf.LanguageModel)
    squares, contexts = [torch.zeros_like(p.real) for p in lm.parameters()], lm.initial_context(2)
    first, second = ids[:12], ids[12:]
    for start, end in ((0, 4), (4, 8), (8, 12)):
        nll, ends = [], []
        for k, part in enumerate((first, second)):
            scored = lm(part[start:end, None], map_state(lambda t, k=k: t[k : k + 1], contexts))
            nll.append(scored.nll)
            ends.append(map_state(Tensor.detach, scored.context))
        contexts = map_state(lambda *two: torch.cat(two), *ends)
        for total, g in zip(squares, torch.autograd.grad(torch.cat(nll).mean(), [*lm.parameters()]), strict=True):
            total += g.abs() ** 2
    for a, b in zip(came, squares, strict=True):
        close(a, (b / 3).sqrt())


class Broken(lf.Elman):
    """A cell that fails after some steps."""

    left = 10**9

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        type(self).left -= 1
        if type(self).left < 0:
            raise KeyboardInterrupt
        return super().forward(h, x)


def test_the_model_is_left_as_it_was_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = recurrent_lm(SIZE, [Broken(3, 4)], 3, 0.0).double()
    model.network.recurrent.layers[0].engine = lf.Sequential()  # type: ignore[union-attr, index]
    model.train()
    before = tensors(model)
    monkeypatch.setattr(Broken, "left", 12)
    with pytest.raises(KeyboardInterrupt):
        lf.perplexity(model, text(40), way=lf.DynamicEvaluation(0.1, window=3))
    assert all(torch.equal(tensors(model)[key], value) for key, value in before.items())
    assert all(part.training for part in model.modules())


@pytest.mark.filterwarnings("ignore::loopfold.EngineWarning")  # engines disagree about what is infinite
def test_weights_that_run_away_are_told() -> None:
    with pytest.raises(FloatingPointError, match=r"no finite numbers after \d+ tokens .* a smaller rate than 1e\+300"):
        lf.perplexity(made("lstm"), text(40), way=lf.DynamicEvaluation(1e300))


def test_in_any_mode_of_autograd() -> None:
    model, way = made("lstm"), lf.DynamicEvaluation(0.1, window=5)
    needed = lf.perplexity(model, text(20), way=way)
    with torch.no_grad():
        assert lf.perplexity(model, text(20), way=way) == needed
    with torch.inference_mode():
        assert lf.perplexity(model, text(20), way=way) == needed


# ------------------------------------------------------------------ mixtures


def test_a_mixture_is_the_sum_of_probabilities() -> None:
    model, ids, train = made("lstm"), text(31), text(200)
    ngram, other = lf.NGramLM(train, SIZE, 3), made("one-hot vectors")
    weights = (0.5, 0.2, 0.3)
    log_ngram, context = [], ngram.initial_context(1)
    for token in ids:
        log_ngram.append(ngram.next(context).log_probabilities[0])
        context = ngram(token.view(1, 1), context).context
    parts = [by_token(model, ids)[0], torch.stack(log_ngram), by_token(other, ids)[0]]
    p = sum(w * part.exp() for w, part in zip(weights, parts, strict=True))
    assert isinstance(p, Tensor)
    close(p.sum(1), torch.ones(31, dtype=torch.float64))
    close(lf.token_losses(model, ids, way=lf.Mixture(weights, (ngram, other))), -p[torch.arange(31), ids].log())
    alone = lf.token_losses(model, ids, way=lf.Mixture((1, 0), (ngram,)))
    assert torch.equal(alone, lf.token_losses(model, ids))


def test_ways_wrap_one_another() -> None:
    """Dynamic evaluation, a cache of its states, and an n-gram beside both."""
    model, ids = made("lstm"), text(31)
    ngram = lf.NGramLM(text(200), SIZE, 2)
    dynamic = lf.DynamicEvaluation(0.1, 0.01, window=4)
    cache = lf.NeuralCache(8, 0.3, 0.5, over=dynamic)
    way = lf.Mixture((0.7, 0.3), (ngram,), over=cache)
    needed = lf.mixed_losses([lf.token_losses(model, ids, way=cache), lf.token_losses(ngram, ids)], (0.7, 0.3))
    close(lf.token_losses(model, ids, way=way), needed)
    ledger = lf.perplexity(model, ids, way=way)
    assert ledger.nll == math.fsum(needed.tolist())
    assert ledger.way == (
        "mixture (0.7 of the model, 0.3 of a 2-gram) over neural cache (size 8, weight 0.3, sharpness 0.5) over "
        "dynamic evaluation (rate 0.1, decay 0.01, window 4)"
    )


def likelihood(losses: list[Tensor], w: tuple[float, ...]) -> float:
    return -float(lf.mixed_losses(losses, w).sum())


def test_expectation_maximisation_never_falls_and_finds_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    for shift in (0.0, 0.3, 5.0):
        two = [-torch.rand(200, generator=generator, dtype=torch.float64).log() + k * shift for k in range(2)]
        risen = []
        for rounds in (1, 2, 3, 5, 9, 20, 100):
            monkeypatch.setattr(ways, "ROUNDS", rounds)
            risen.append(likelihood(two, lf.mixture_weights(two)))
        assert all(b >= a - 1e-12 for a, b in pairwise(risen))
        monkeypatch.undo()
        scan = max(likelihood(two, (1 - k / 1000, k / 1000)) for k in range(1001))
        assert likelihood(two, lf.mixture_weights(two)) >= scan - 1e-7
    three = [-torch.rand(100, generator=generator, dtype=torch.float64).log() for _ in range(3)]
    found = lf.mixture_weights(three)
    assert sum(found) == pytest.approx(1, abs=1e-12)
    grid = [(a / 40, b / 40, (40 - a - b) / 40) for a in range(41) for b in range(41 - a)]
    assert likelihood(three, found) >= max(likelihood(three, w) for w in grid)


def test_mixtures_of_the_impossible() -> None:
    """A token that one holds impossible, and one that all do."""
    a, b = torch.tensor([0.5, math.inf, 1.0]), torch.tensor([1.0, 2.0, math.inf])
    w = lf.mixture_weights([a, b])
    assert all(0 < x < 1 for x in w)
    assert lf.mixed_losses([a, b], w).isfinite().all()
    nothing = torch.tensor([1.0, math.inf])
    assert lf.mixture_weights([nothing, nothing]) == (0.5, 0.5)
    assert lf.mixed_losses([nothing, nothing], (0.5, 0.5))[1] == math.inf
    with pytest.raises(FloatingPointError, match="no numbers"):
        lf.mixture_weights([a, torch.full((3,), math.nan)])


# ------------------------------------------------------------------ tuned on one text, used on another


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    """A network that has seen a little of a text in which everything is possible."""
    torch.manual_seed(0)
    model = recurrent_lm(20, [lf.GRU(8, 16)], 8, 0.0)
    ids = torch.randint(0, 20, (400, 8))
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(20):
        optimiser.zero_grad()
        model(ids, model.initial_context(8)).nll.mean().backward()
        optimiser.step()
    return model


def test_a_text_that_repeats_itself_is_followed(trained: nn.Module) -> None:
    phrase = torch.randint(0, 20, (12,), generator=torch.Generator().manual_seed(1))
    valid, test = phrase.repeat(8), phrase.flip(0).repeat(8)
    rms = lf.gradient_rms(trained, torch.randint(0, 20, (400,)), streams=4)
    plain = lf.perplexity(trained, test)
    assert plain.way == "plain"
    assert plain.perplexity > 19
    cache = lf.NeuralCache.tuned(trained, valid, size=100)
    assert lf.perplexity(trained, test, way=cache).perplexity < 0.7 * plain.perplexity
    tuned = lf.DynamicEvaluation.tuned(trained, valid, decay=0.0, window=6, rms=rms)
    for dynamic in (lf.DynamicEvaluation(1.0, window=6), tuned):
        assert lf.perplexity(trained, test, way=dynamic).perplexity < 0.8 * plain.perplexity
    ngram = lf.NGramLM(phrase.flip(0).repeat(3), 20, 3)
    mixture = lf.Mixture.tuned(trained, test[:60], [ngram])
    assert mixture.weights[1] > 0.9


def test_what_is_tuned_is_the_best_of_its_neighbours(trained: nn.Module) -> None:
    valid = torch.randint(0, 20, (10,), generator=torch.Generator().manual_seed(1)).repeat(6)

    def nll(way: lf.Way) -> float:
        return lf.perplexity(trained, valid, way=way).nll

    cache = lf.NeuralCache.tuned(trained, valid, size=60)
    best = nll(cache) - 1e-6
    assert all(best <= nll(replace(cache, sharpness=sharpness)) for sharpness in ways.SHARPNESSES)
    assert all(best <= nll(replace(cache, weight=weight)) for weight in (0.1, cache.weight - 0.02, 0.9))
    fixed = lf.NeuralCache.tuned(trained, valid, size=60, weight=0.25, sharpness=0.5)
    assert fixed == lf.NeuralCache(60, 0.25, 0.5)
    assert lf.NeuralCache.tuned(trained, valid, size=60, weight=0.25).weight == 0.25
    assert lf.NeuralCache.tuned(trained, valid, size=60, sharpness=0.5).sharpness == 0.5
    dynamic = lf.DynamicEvaluation.tuned(trained, valid, decay=0.0)
    best = nll(dynamic) - 1e-6
    assert all(best <= nll(replace(dynamic, rate=dynamic.rate * factor)) for factor in (0.5, 2))
    assert lf.DynamicEvaluation.tuned(trained, valid, rate=0.2, decay=0.1) == lf.DynamicEvaluation(0.2, 0.1)
    assert lf.DynamicEvaluation.tuned(trained, valid, rate=0.2).rate == 0.2


class Small(lf.Way):
    """Hidden states of a third of the size."""

    def read(self, model: Any, ids: Tensor, streams: int, window: int, hidden: bool = False) -> Any:
        found = evaluation.Plain().read(model, ids, streams, window, hidden)
        return found if found.hidden is None else found._replace(hidden=found.hidden / 3)


def test_what_small_hidden_states_need_is_on_the_grid(trained: nn.Module) -> None:
    g = torch.Generator().manual_seed(1)
    text, other = torch.randint(0, 20, (12,), generator=g).repeat(20), torch.randint(0, 20, (240,), generator=g)
    valid = torch.where(torch.rand(240, generator=g) < 0.1, other, text)
    sharpness = lf.NeuralCache.tuned(trained, valid, size=60, over=Small()).sharpness
    assert 10 < sharpness < ways.SHARPNESSES[-1]


# ------------------------------------------------------------------ the ledger, and what is refused


def test_the_ledger_names_the_way() -> None:
    model, vocabulary = made("lstm"), lf.Characters("abcdef")
    tokens = vocabulary.encode("abcabc")
    way = lf.NeuralCache(3, 0.5, 0.1)
    ledger = lf.perplexity(model, tokens, way=way)
    assert ledger.as_json()["way"] == ledger.way == str(way)
    assert (ledger.unit, ledger.characters) == ("character", 6)
    assert lf.Ledger.of(tokens, lf.token_losses(model, tokens, way=way), way=way) == ledger
    assert lf.Ledger(1.0, 2).way == "plain"
    with pytest.raises(ValueError, match="6 tokens need as many losses; got"):
        lf.Ledger.of(tokens, torch.zeros(5))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a cache of no size": (lambda: lf.NeuralCache(0), "size as a whole number of at least 1; got 0"),
    "a weight over one": (lambda: lf.NeuralCache(weight=1.5), "weight as a number of at least 0 and at most 1"),
    "a sharpness that is no number": (lambda: lf.NeuralCache(sharpness=math.nan), "sharpness as a number of at least"),
    "a negative rate": (lambda: lf.DynamicEvaluation(-1.0), "rate as a number of at least 0; got -1.0"),
    "a decay over one": (lambda: lf.DynamicEvaluation(1.0, 2.0), "decay as a number of at least 0 and at most 1"),
    "weights that are too few": (lambda: lf.Mixture((1.0,), (one_hot(),)), "a mixture of 2 needs 2 weights"),
    "weights that are too much": (lambda: lf.mixed_losses([torch.ones(2)] * 2, (1, 1)), "whose sum is 1"),
    "other tokens": (lambda: lf.mixture_weights([torch.ones(2), torch.ones(3)]), "losses .* of the same tokens"),
    "a way by name": (lambda: lf.perplexity(one_hot(), text(5), way="cache"), "an object such as"),  # type: ignore
    "over a name": (lambda: lf.NeuralCache(over="dynamic"), "over must be a way"),  # type: ignore[arg-type]
    "a state that starts again": (
        lambda: lf.perplexity(one_hot(), text(5), carried=False, way=lf.NeuralCache()),
        "from its beginning, so carried must be True",
    ),
    "texts side by side": (
        lambda: lf.perplexity(one_hot(), text(6).view(3, 2), way=lf.NeuralCache()),
        r"follows one text \[n\]",
    ),
    "no weights": (
        lambda: lf.perplexity(lf.NGramLM(text(9), SIZE, 2), text(5), way=lf.DynamicEvaluation(0.1)),
        "an? NGramLM has no weights that a gradient could change",
    ),
    "no hidden states": (
        lambda: lf.perplexity(lf.NGramLM(text(9), SIZE, 2), text(5), way=lf.NeuralCache()),
        "an? NGramLM has no hidden states",
    ),
    "another vocabulary": (
        lambda: lf.perplexity(one_hot(), text(5), way=lf.Mixture((0.5, 0.5), (lf.NGramLM(text(9), 9, 2),))),
        "models of 7 and of 9 tokens cannot be mixed",
    ),
    "rms of another model": (
        lambda: lf.perplexity(one_hot(), text(5), way=lf.DynamicEvaluation(0.1, rms=(torch.ones(3),))),
        "rms is of another model",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    act, message = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=message):
        act()
