"""The perplexity ledger against one stream read token by token."""

import json
import math
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import assert_same, randn
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import loopfold as lf
from loopfold import evaluation
from loopfold.language.base import Context, LanguageModel, Next, Scored
from loopfold.language.recurrent import as_language_model, recurrent_lm
from loopfold.processes import Processes
from loopfold.states import leaves

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 4  # |V|


class Table(LanguageModel):
    """P(token | the token before) as `p [|V|+1, |V|]` says; the last row is for the first token."""

    def __init__(self, p: Tensor) -> None:
        super().__init__()
        self.vocabulary_size = p.shape[1]
        self.log_p = p.log()

    def initial_context(self, batch: int) -> Context:
        return Context(torch.full((batch,), self.vocabulary_size), torch.zeros(batch, 0))

    def forward(self, tokens: Tensor, context: Context, lengths: Tensor | None = None) -> Scored:
        ends = torch.full((tokens.shape[1],), len(tokens)) if lengths is None else lengths
        nll = -self.log_p[torch.cat([context.last[None], tokens[:-1]]), tokens]
        nll = nll.where(torch.arange(len(tokens))[:, None] < ends, 0)
        return Scored(nll, Context(tokens.gather(0, ends[None] - 1)[0], context.memory))

    def next(self, context: Context) -> Next:
        return Next(self.log_p[context.last], context.memory)


class Counter(lf.Transition):
    """Never forgets: h counts the tokens of each kind."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale))

    def initial_state(self, batch: int) -> Tensor:
        return self.get_buffer("scale").new_zeros(batch, SIZE)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return h + self.get_buffer("scale") * x


class Amnesiac(lf.Transition):
    """Forgets at once: h is the token just read."""

    def initial_state(self, batch: int) -> Tensor:
        return torch.zeros(batch, SIZE, dtype=torch.float64)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return 2 * x


def plain(cell: lf.Transition) -> lf.Recurrent:
    """Without a compiler, which takes its time to start, in each process anew."""
    return lf.Recurrent(cell, lf.Sequential())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Counter": lambda: lf.SequenceToSequence(plain(Counter()), SIZE),
    "Amnesiac": lambda: lf.SequenceToSequence(Amnesiac(), SIZE),
    "Elman": lambda: lf.SequenceToSequence(lf.Elman(SIZE, 3), SIZE),
    "LSTM and Counter": lambda: lf.SequenceToSequence(lf.Stacked([plain(Counter(0.1)), plain(lf.LSTM(SIZE, 3))]), SIZE),
    "tied": lambda: recurrent_lm(SIZE, [lf.GRU(3, 3)], 3, 0.5, tied=True),
    "WindowLM": lambda: lf.WindowLM(SIZE, 4, 3, 3),
    "ConvolutionLM": lambda: lf.ConvolutionLM(SIZE, 2, 2, 3),
    "NGramLM 2": lambda: lf.NGramLM(torch.randint(SIZE, (99,)), SIZE, 2),
    "NGramLM 4": lambda: lf.NGramLM(torch.randint(SIZE, (99,)), SIZE, 4, boundary=1),
    "Table": lambda: Table(randn(SIZE + 1, SIZE).softmax(-1)),
}


@cache
def made(name: str) -> nn.Module:
    """The same model in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return MODELS[name]().double()


def uniform(size: int = SIZE) -> Table:
    return Table(torch.full((size + 1, size), 1 / size, dtype=torch.float64))


def naive(model: nn.Module, text: Sequence[int]) -> float:
    """−Σ log P: ask for the distribution of the next token, look up the token, go on."""
    reader = as_language_model(model)
    training = reader.training
    reader.eval()
    context, nll = reader.initial_context(1), []
    with torch.no_grad():
        for token in text:
            log_p, memory = reader.next(context)
            nll.append(-float(log_p[0, token]))
            context = Context(torch.tensor([token]), memory)
    reader.train(training)
    return math.fsum(nll)


# ------------------------------------------------------------------ M23: what perplexity is


@pytest.mark.parametrize("size", [1, 2, 27, 1000])
@pytest.mark.parametrize("carried", [True, False])
def test_a_uniform_model_has_the_perplexity_of_its_vocabulary(size: int, carried: bool) -> None:
    """M23."""
    network = lf.SequenceToSequence(lf.Elman(size, 2), size).double()
    nn.init.zeros_(network.V)
    nn.init.zeros_(network.c)
    for model in (uniform(size), network, lf.NGramLM(torch.tensor([0]), size, order=0)):
        ledger = lf.perplexity(model, torch.randint(size, (23,)), streams=3, window=5, carried=carried)
        assert ledger.perplexity == pytest.approx(size, rel=1e-12)
        assert ledger.bits_per_token == pytest.approx(math.log2(size), rel=1e-12)
        assert ledger.tokens == 23


def in_a_circle() -> Table:
    """Certain that 1 follows 0, 2 follows 1, …; and that 0 comes first."""
    return Table(torch.eye(SIZE, dtype=torch.float64).roll(1, 1)[[*range(SIZE), SIZE - 1]])


@pytest.mark.parametrize("carried", [True, False])
def test_a_perfect_model_has_perplexity_1(carried: bool) -> None:
    """M23."""
    ledger = lf.perplexity(in_a_circle(), torch.arange(20) % SIZE, streams=3, window=SIZE, carried=carried)
    assert (ledger.perplexity, ledger.nll, ledger.bits_per_token) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("streams", [1, 2, 7])
def test_one_impossible_token_makes_it_infinite(streams: int) -> None:
    """M23."""
    text = torch.arange(20) % SIZE
    text[13] = 0
    ledger = lf.perplexity(in_a_circle(), text, streams=streams, window=3)
    assert (ledger.perplexity, ledger.nll, ledger.bits_per_token) == (math.inf, math.inf, math.inf)
    network = lf.SequenceToSequence(lf.Elman(SIZE, 2), SIZE)
    with torch.no_grad():
        network.c[2] = -torch.inf
    assert lf.perplexity(network, text, streams=streams).perplexity == math.inf


def test_what_is_too_large_for_a_float_is_infinite_too() -> None:
    assert lf.Ledger(nll=2000.0, tokens=2).perplexity == math.inf
    assert lf.Ledger(nll=1400.0, tokens=2).perplexity == pytest.approx(math.exp(700))


@pytest.mark.parametrize(("streams", "window"), [(1, 1), (1, 9), (2, 1), (3, 2), (9, 4)])
def test_it_is_the_exponential_of_the_mean_over_all_tokens(streams: int, window: int) -> None:
    """Not the mean of exponentials, nor of streams, windows or batches: those have unequal numbers of tokens."""
    model = Table(torch.tensor([0.9, 0.1], dtype=torch.float64).expand(3, 2))
    text = [0, 0, 0, 1, 0, 1, 1]
    nll = [-math.log([0.9, 0.1][token]) for token in text]
    for carried in (True, False):
        ledger = lf.perplexity(model, torch.tensor(text), streams=streams, window=window, carried=carried)
        assert ledger.nll == pytest.approx(sum(nll), rel=1e-14)
        assert ledger.perplexity == pytest.approx((0.9**4 * 0.1**3) ** (-1 / 7), rel=1e-14)
        assert ledger.perplexity != pytest.approx(sum(map(math.exp, nll)) / 7, rel=0.1)
        assert ledger.nats_per_token == pytest.approx(sum(nll) / 7, rel=1e-14)


# ------------------------------------------------------------------ streams and windows change the time, not the value


texts = st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=40)
some = st.integers(1, 45)


@given(st.sampled_from([*MODELS]), texts, some, some)
def test_every_number_of_streams_and_every_window_give_the_naive_sum(
    name: str, text: list[int], streams: int, window: int
) -> None:
    ledger = lf.perplexity(made(name), torch.tensor(text), streams=streams, window=window)
    assert ledger.nll == pytest.approx(naive(made(name), text), rel=1e-9)
    assert (ledger.tokens, ledger.carried) == (len(text), True)


@given(st.sampled_from([*MODELS]), texts, some, some)
def test_cold_means_that_every_window_is_a_text_of_its_own(
    name: str, text: list[int], streams: int, window: int
) -> None:
    ledger = lf.perplexity(made(name), torch.tensor(text), streams=streams, window=window, carried=False)
    pieces = [text[start : start + window] for start in range(0, len(text), window)]
    assert ledger.nll == pytest.approx(sum(naive(made(name), piece) for piece in pieces), rel=1e-9)
    assert (ledger.tokens, ledger.carried) == (len(text), False)


def test_what_never_forgets_needs_the_state_of_all_streams_before() -> None:
    """Carried, cold and cut into streams differ for it, so that the agreement above means something."""
    text = torch.randint(SIZE, (40,))
    warm, cold = (lf.perplexity(made("Counter"), text, window=10, carried=carried).nll for carried in (True, False))
    assert abs(warm - cold) > 0.1 * warm
    first = [lf.perplexity(made("Counter"), text[i : i + 5], streams=1).nll for i in range(0, 40, 5)]
    assert abs(sum(first) - warm) > 0.1 * warm


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_state_may_be_small(dtype: torch.dtype) -> None:
    """What counts as the same state is a matter of its own size: here h is tiny, and the readout makes it large."""
    small = 100 * torch.finfo(dtype).eps / 1000
    model = lf.SequenceToSequence(Counter(small), SIZE).to(dtype)
    with torch.no_grad():
        model.V.div_(10 * small)
    text = torch.randint(SIZE, (60,))
    whole = lf.perplexity(model, text, streams=1).nll
    for streams in (2, 7):
        assert lf.perplexity(model, text, streams=streams, window=5).nll == pytest.approx(whole, rel=1e-5)


class Leap(nn.Module):
    """Counts, and goes far away for good where token 0 comes."""

    def initial_state(self, batch: int) -> Tensor:
        return torch.zeros(batch, 1)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return h + 1e-3 * x[:, 1:2] + 1e6 * x[:, :1]


def test_a_large_state_in_one_stream_hides_nothing_in_another() -> None:
    model = lf.SequenceToSequence(Leap(), SIZE)
    with torch.no_grad():
        model.V.copy_(100 * torch.arange(SIZE)[:, None] / SIZE)
    text = torch.ones(64, dtype=torch.long)
    text[-2] = 0
    whole = lf.perplexity(model, text, streams=1).nll
    for streams in (2, 4, 8):
        assert lf.perplexity(model, text, streams=streams, window=4).nll == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_carries_its_state_too(dtype: torch.dtype) -> None:
    """One unit in the last place is a part in 128 of a bfloat16; these counts are exact in it all the same."""
    text = torch.randint(SIZE, (60,))
    model = lf.SequenceToSequence(Counter(1 / 64), SIZE)
    with torch.no_grad():
        model.V.mul_(8)
    model = model.to(dtype)
    whole = lf.perplexity(model, text, streams=1, window=6).nll
    for streams in (2, 5, 10):
        assert lf.perplexity(model, text, streams=streams, window=6).nll == pytest.approx(whole, rel=1e-3)


class Watched(LanguageModel):
    """A model that notes how it is called."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model, self.vocabulary_size = model, model.vocabulary_size
        self.calls: list[tuple[int, bool, bool]] = []  # τ, training, gradients

    def initial_context(self, batch: int) -> Context:
        return self.model.initial_context(batch)

    def forward(self, tokens: Tensor, context: Context, lengths: Tensor | None = None) -> Scored:
        self.calls.append((len(tokens), self.training, torch.is_grad_enabled()))
        return self.model(tokens, context, lengths)

    def next(self, context: Context) -> Next:
        return self.model.next(context)


def test_a_model_that_forgets_reads_little_twice() -> None:
    watched = Watched(as_language_model(made("Amnesiac")))
    lf.perplexity(watched, torch.randint(SIZE, (400,)), streams=4, window=10)
    assert len(watched.calls) == 10 + 1  # ten windows cold; again the first, at whose end nothing has changed


def test_of_each_window_only_its_end_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only of the first windows; whatever comes after them is read again to the end, and is right."""
    text, compared = torch.randint(SIZE, (400,)), list[Context]()

    def watched(a: Context, b: Context | None, same: Callable[..., bool] = evaluation._same) -> bool:
        compared.append(a)
        return same(a, b)

    monkeypatch.setattr(evaluation, "_same", watched)
    expected = lf.perplexity(made("LSTM and Counter"), text, streams=4, window=10).nll
    assert compared
    assert all(leaf.untyped_storage().nbytes() == leaf.nbytes for context in compared for leaf in leaves(context))
    for kept in (0, 1, 3):
        monkeypatch.setattr(evaluation, "KEPT", kept)
        assert lf.perplexity(made("LSTM and Counter"), text, streams=4, window=10).nll == pytest.approx(
            expected, rel=1e-12
        )


def test_what_is_not_a_number_ends() -> None:
    model = lf.SequenceToSequence(lf.Elman(SIZE, 3), SIZE)
    with torch.no_grad():
        model.recurrent.get_parameter("cell.W").fill_(torch.nan)
    watched = Watched(as_language_model(model))
    ledger = lf.perplexity(watched, torch.randint(SIZE, (23,)), streams=5, window=2)
    assert math.isnan(ledger.nll)
    assert math.isnan(ledger.perplexity)
    assert len(watched.calls) <= 5 * 3


# ------------------------------------------------------------------ what may be given, and what comes back


@pytest.mark.parametrize("name", ["Counter", "tied", "WindowLM", "NGramLM 4"])
def test_a_block_is_so_many_texts(name: str) -> None:
    block = torch.randint(SIZE, (13, 3))
    columns = [block[:, i] for i in range(3)]
    ledger = lf.perplexity(made(name), block, streams=2, window=4)
    assert ledger.nll == pytest.approx(sum(lf.perplexity(made(name), c).nll for c in columns), rel=1e-9)
    assert (ledger.tokens, ledger.unit, ledger.unknown, ledger.bytes) == (39, "token", None, None)
    cold = lf.perplexity(made(name), block, streams=2, window=4, carried=False)
    needed = sum(lf.perplexity(made(name), c, window=4, carried=False).nll for c in columns)
    assert cold.nll == pytest.approx(needed, rel=1e-9)
    assert cold.tokens == 39
    one = lf.perplexity(made(name), block[:, :1])
    assert one.nll == pytest.approx(lf.perplexity(made(name), columns[0]).nll, rel=1e-9)


def test_any_kind_of_whole_number() -> None:
    text = [3, 1, 0, 2, 1]
    needed = lf.perplexity(made("Elman"), torch.tensor(text))
    assert lf.perplexity(made("Elman"), text) == needed  # type: ignore[arg-type]
    for dtype in (torch.uint8, torch.int32):
        assert lf.perplexity(made("Elman"), torch.tensor(text, dtype=dtype)) == needed


CHINESE = "汉字是字。\n汉语用汉字"


@pytest.mark.parametrize(
    ("vocabulary", "text", "tokens", "unknown"),
    [
        (lf.Characters.of("abc\n"), "cab\nxéa", 7, 2),
        (lf.Characters.of(CHINESE), CHINESE, 11, 0),
        (lf.Words.of("to be or not to be"), "to be\nor not to be\n", 8, 2),
        (lf.Words.of(CHINESE), CHINESE + "\n", 12, 4),
        (lf.Bytes(), "naïve", 6, 0),
        (lf.Bytes(), CHINESE, 31, 0),
        (lf.Subwords.of(CHINESE * 9, size=270), CHINESE, None, 0),
    ],
    ids=["characters", "汉 characters", "words", "汉 words", "bytes", "汉 bytes", "汉 subwords"],
)
def test_the_same_totals_in_every_unit(vocabulary: lf.Vocabulary, text: str, tokens: int | None, unknown: int) -> None:
    encoded = vocabulary.encode(text)
    model = uniform(vocabulary.size)
    for carried in (True, False):
        ledger = lf.perplexity(model, encoded, streams=3, window=2, carried=carried)
        n = len(encoded) if tokens is None else tokens
        bits = n * math.log2(vocabulary.size)
        assert (ledger.tokens, ledger.unit, ledger.unknown) == (n, vocabulary.unit, unknown)
        assert (ledger.characters, ledger.bytes) == (len(text), len(text.encode()))
        assert ledger.carried is carried
        assert ledger.perplexity == pytest.approx(vocabulary.size, rel=1e-12)
        assert ledger.bits_per_character == pytest.approx(bits / len(text), rel=1e-12)
        assert ledger.bits_per_byte == pytest.approx(bits / len(text.encode()), rel=1e-12)


def test_chinese_characters_are_three_bytes_each() -> None:
    ledger = lf.perplexity(uniform(256), lf.Bytes().encode("汉字"))
    assert (ledger.tokens, ledger.characters, ledger.bytes) == (6, 2, 6)
    assert ledger.bits_per_token == pytest.approx(8)
    assert ledger.bits_per_byte == pytest.approx(8)
    assert ledger.bits_per_character == pytest.approx(24)


def test_a_total_does_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = lf.NGramLM(torch.randint(7, (500,)), 7, 3), torch.randint(7, (301,))  # it scores tokens one by one
    needed = math.fsum(lf.token_losses(model, ids).tolist())
    for part in (1, 3, 100, 1 << 16):
        monkeypatch.setattr(evaluation, "PART", part)
        assert lf.Ledger.of(ids, lf.token_losses(model, ids)).nll == needed
        for streams, window in ((1, 301), (1, 7), (4, 13)):
            assert lf.perplexity(model, ids, streams=streams, window=window).nll == needed
        cold: dict[str, Any] = {"streams": 3, "window": 8, "carried": False}
        assert lf.perplexity(model, ids, **cold).nll == math.fsum(lf.token_losses(model, ids, **cold).tolist())


def test_losses_are_not_held_as_numbers_of_python() -> None:
    ids = torch.zeros(1_000_000, dtype=torch.uint8)
    tracemalloc.start()
    try:
        assert lf.Ledger.of(ids, torch.ones(len(ids), dtype=torch.float64)).nll == len(ids)
        assert tracemalloc.get_traced_memory()[1] < 8e6
    finally:
        tracemalloc.stop()


def test_hidden_states_are_not_held_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[list[Tensor]] = []
    carried = evaluation._carried

    def noted(*given: Any, **more: Any) -> Any:
        found = carried(*given, **more)
        kept.append(found.hidden)
        return found

    monkeypatch.setattr(evaluation, "_carried", noted)
    model, ids = as_language_model(lf.SequenceToSequence(lf.GRU(5, 3), outputs=5)), torch.randint(5, (50,))
    with torch.no_grad():
        hidden = evaluation.Plain().read(model, ids, 3, 4, hidden=True).hidden
    assert hidden is not None
    assert hidden.shape == (50, 3)
    assert [h.numel() for h in kept[0]] == [0] * 4


def test_a_ledger_as_json() -> None:
    ledger = lf.perplexity(uniform(256), lf.Bytes().encode("汉字"), window=4, carried=False)
    data = json.loads(json.dumps(ledger.as_json()))
    figures = {name: data.pop(name) for name in ("perplexity", "nats_per_token", "bits_per_token")}
    figures |= {name: data.pop(name) for name in ("bits_per_character", "bits_per_byte")}
    assert lf.Ledger(**data) == ledger
    assert figures == {name: getattr(ledger, name) for name in figures}
    assert data["carried"] is False
    short = lf.Ledger(nll=2.0, tokens=4).as_json()
    assert (short["unit"], short["bits_per_character"], short["bits_per_byte"]) == ("token", None, None)
    assert short["nats_per_token"] == 0.5


# ------------------------------------------------------------------ a model is left as it was


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("carried", [True, False])
def test_a_model_is_evaluated_without_dropout_and_given_back_as_it_was(training: bool, carried: bool) -> None:
    watched = Watched(recurrent_lm(SIZE, [lf.GRU(3, 3)], 3, dropout=0.9)).double().train(training)
    text = torch.randint(SIZE, (23,))
    ledgers = [lf.perplexity(watched, text, streams=3, window=4, carried=carried) for _ in range(2)]
    assert ledgers[0] == ledgers[1]
    assert {(mode, gradients) for _, mode, gradients in watched.calls} == {(False, False)}
    assert [module.training for module in watched.modules()] == [training for _ in watched.modules()]
    assert torch.is_grad_enabled()
    assert all(p.grad is None for p in watched.parameters())


def test_each_part_of_a_model_keeps_its_own_mode() -> None:
    """Whoever trains with a part frozen in its evaluation mode finds it so afterwards."""
    network = lf.SequenceToSequence(lf.Stacked([lf.Elman(SIZE, 3), lf.Elman(3, 3)], dropout=0.5), SIZE)
    for model in (network, lf.RecurrentLM(network)):
        network.train()
        network.recurrent.get_submodule("dropout").eval()
        lf.perplexity(model, torch.tensor([1, 2, 3]))
        assert network.training
        assert not network.recurrent.get_submodule("dropout").training


def test_a_model_that_fails_is_given_back_too() -> None:
    class Failing(Table):
        def forward(self, tokens: Tensor, context: Context, lengths: Tensor | None = None) -> Scored:
            raise RuntimeError("no more")

    model = Failing(torch.ones(3, 2) / 2)
    with pytest.raises(RuntimeError, match="no more"):
        lf.perplexity(model, torch.tensor([0, 1]))
    assert model.training
    assert torch.is_grad_enabled()


def test_evaluation_leaves_the_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    lf.perplexity(made("tied"), torch.tensor([3, 1, 0, 2]))
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([0.0, 1.0]), r"tokens must be whole numbers, \[n\] or \[τ, batch\]; got torch.float32 \(2,\)"),
        (torch.tensor(3), r"got torch.int64 \(\)"),
        (torch.zeros(2, 2, 2).long(), r"got torch.int64 \(2, 2, 2\)"),
        (torch.zeros(0).long(), r"got torch.int64 \(0,\)"),
        (torch.zeros(0, 3).long(), r"got torch.int64 \(0, 3\)"),
        (torch.tensor([0, SIZE]), "tokens run from 0 to 4; the model knows 0 to 3"),
        (torch.tensor([-1, 2]), "tokens run from -1 to 2"),
        (torch.tensor([-100]), "tokens run from -100 to -100"),
        (lf.Bytes().encode("ab"), "tokens run from 97 to 98; the model knows 0 to 3"),
        (lf.Bytes().encode(""), r"got torch.int64 \(0,\)"),
    ],
    ids=str,
)
def test_wrong_tokens(tokens: Tensor | lf.Tokens, message: str) -> None:
    for model in (made("Elman"), made("NGramLM 2")):
        with pytest.raises(ValueError, match=message):
            lf.perplexity(model, tokens)


def test_wrong_models_and_numbers() -> None:
    with pytest.raises(TypeError, match="a Linear is not a language model"):
        lf.perplexity(nn.Linear(3, 3), torch.tensor([0]))
    with pytest.raises(ValueError, match="streams as a whole number of at least 1; got 0"):
        lf.perplexity(made("Elman"), torch.tensor([0]), streams=0)
    with pytest.raises(ValueError, match="window as a whole number of at least 1; got 0"):
        lf.perplexity(made("Elman"), torch.tensor([0]), window=0, carried=False)


# ------------------------------------------------------------------ several processes


CASES = [
    (name, length, streams, window)
    for name in ("Counter", "LSTM and Counter", "WindowLM", "NGramLM 2", "NGramLM 4")
    for length, streams, window in ((37, 7, 3), (37, 32, 128), (1, 32, 128), (5, 1, 2))
]


def scored(case: tuple[str, int, int, int], processes: Processes) -> lf.Ledger:
    name, length, streams, window = case
    text = torch.randint(SIZE, (length,), generator=torch.Generator().manual_seed(length))
    return lf.perplexity(made(name), text, streams=streams, window=window, processes=processes)


def one_of_two(rank: int, folder: Path) -> None:
    """What each process does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    processes = Processes(rank, 2)
    state = (torch.arange(12.0).view(4, 3), torch.zeros(4, 0), torch.arange(8).view(2, 4).T)
    share = processes.share(state)
    assert [len(leaf) for leaf in share] == [2, 2, 2]
    for came, needed in zip(processes.gather(share), state, strict=True):
        assert torch.equal(came, needed)
    t = torch.tensor([1.0, rank])
    assert processes.sum(t).tolist() == [2.0, 1.0]
    assert t.tolist() == [1.0, rank]  # what was given is left as it was
    assert [processes.any(flag) for flag in (rank == 0, rank == 1, False)] == [True, True, False]
    assert processes.first is (rank == 0)
    found = [scored(case, processes).as_json() for case in CASES]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def test_two_processes_find_what_one_finds(tmp_path: Path) -> None:
    mp.spawn(one_of_two, (tmp_path,), nprocs=2)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert found[0] == found[1]
    for case, came in zip(CASES, found[0], strict=True):
        needed = scored(case, Processes())
        assert came["nll"] == pytest.approx(needed.nll, rel=1e-12), case
        assert replace(lf.Ledger(**{key: came[key] for key in asdict(needed)}), nll=needed.nll) == needed


def test_one_process_sends_nothing() -> None:
    alone, state = Processes(), (randn(3, 2), torch.arange(3))
    assert (alone.first, alone.any(True), alone.any(False)) == (True, True, False)
    assert_same(alone.sum(state[0]), state[0], 0)
    assert_same(alone.gather(state), state, 0)
    assert_same(alone.share(state), state, 0)
    assert replace(alone, rank=1).first is False
