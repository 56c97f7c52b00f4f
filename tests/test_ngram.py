"""The n-gram model against the slow and obvious one: dictionaries, exact fractions, the paper's formulas."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loopfold.language.base import Context, LanguageModel
from loopfold.language.ngram import NGramLM

pytestmark = pytest.mark.usefixtures("one_thread")

Gram = tuple[int, ...]
ODD_TEXTS = [
    [0],
    [3],
    [2, 2, 2],
    [0, 1, 2],
    [4, 4, 0, 4],
    [0, 1] * 20,
    [1] * 30 + [0],
    [0, 1, 2, 3, 4, 3, 2, 1, 0, 0, 1, 1, 2, 2],
]
NOTHING = -1  # what stands before the first token of a stream


def histories(text: Sequence[int], boundary: int | None) -> list[Gram]:
    """For each token, all that its context may reach: back to the last boundary, or to the beginning."""
    history: Gram = () if boundary is None else (boundary,)
    found = []
    for w in text:
        found.append(history)
        history = (w,) if w == boundary else (*history[-9:], w)  # no order here looks further back
    return found


class Slow:
    """Chen and Goodman (1998), section 3, and their equation (26)."""

    def __init__(self, text: Sequence[int], vocabulary_size: int, order: int, boundary: int | None = None) -> None:
        self.vocabulary_size, self.boundary = vocabulary_size, boundary
        counts: Counter[Gram] = Counter()
        before: defaultdict[Gram, set[int]] = defaultdict(set)
        for history, w in zip(histories(text, boundary), text, strict=True):
            for k in range(1, min(order, len(history) + 1) + 1):
                gram = (*history[len(history) - k + 1 :], w)
                counts[gram] += 1
                before[gram].add(history[-k] if k <= len(history) else NOTHING)

        def plain(gram: Gram) -> bool:
            return len(gram) == order or (len(gram) > 1 and gram[0] == boundary)

        self.a = {gram: c if plain(gram) else len(before[gram]) for gram, c in counts.items()}
        self.D = {k: self.discounts([a for gram, a in self.a.items() if len(gram) == k]) for k in range(1, order + 1)}
        self.after: defaultdict[Gram, dict[int, int]] = defaultdict(dict)
        for gram, a in self.a.items():
            self.after[gram[:-1]][gram[-1]] = a
        self.order = order

    @staticmethod
    def discounts(a: list[int]) -> tuple[Fraction, Fraction, Fraction]:
        n1, n2, n3, n4 = (a.count(i) for i in (1, 2, 3, 4))
        if n1 and n2 and n3:
            Y = Fraction(n1, n1 + 2 * n2)
            D1, D2, D3 = 1 - 2 * Y * n2 / n1, 2 - 3 * Y * n3 / n2, 3 - 4 * Y * n4 / n3
            if D1 > 0 and D2 > 0 and D3 > 0:
                return D1, D2, D3
        return Fraction(1, 2), Fraction(1), Fraction(3, 2)

    def P(self, w: int, history: Gram) -> Fraction:
        return self._P(w, history[max(0, len(history) - self.order + 1) :]) if self.order else self._uniform()

    def _uniform(self) -> Fraction:
        return Fraction(1, self.vocabulary_size)

    def _P(self, w: int, h: Gram) -> Fraction:
        lower = self._P(w, h[1:]) if h else self._uniform()
        if h not in self.after:
            return lower
        D1, D2, D3 = self.D[len(h) + 1]
        a, total = self.after[h].get(w, 0), sum(self.after[h].values())
        N1, N2, N3 = (sum(min(c, 3) == i for c in self.after[h].values()) for i in (1, 2, 3))
        gamma = (D1 * N1 + D2 * N2 + D3 * N3) / total
        return Fraction(a - (0, D1, D2, D3)[min(a, 3)]) / total + gamma * lower

    def nll(self, text: Sequence[int]) -> list[float]:
        return [-math.log(self.P(w, h)) for h, w in zip(histories(text, self.boundary), text, strict=True)]


def drawn(length: int, vocabulary_size: int, seed: int) -> list[int]:
    """A text whose tokens are unequally likely, so that all counts of counts occur."""
    u = torch.rand(length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (u**3 * vocabulary_size).long().tolist()


def column(text: Sequence[int]) -> Tensor:
    return torch.tensor(text)[:, None]


def score(model: LanguageModel, text: Sequence[int]) -> list[float]:
    return model(column(text), model.initial_context(1)).nll[:, 0].tolist()


def same_context(a: Context, b: Context) -> bool:
    return torch.equal(a.last, b.last) and torch.equal(a.memory, b.memory)


@pytest.mark.parametrize("boundary", [None, 0, 5])
@pytest.mark.parametrize("order", range(7))
def test_scores_are_those_of_the_formulas(order: int, boundary: int | None) -> None:
    text, other = drawn(300, 6, seed=0), drawn(60, 6, seed=1)
    slow, model = Slow(text, 6, order, boundary), NGramLM(torch.tensor(text), 6, order, boundary)
    assert score(model, other) == pytest.approx(slow.nll(other), rel=1e-12)
    assert score(model, text) == pytest.approx(slow.nll(text), rel=1e-12)
    assert model.entries_by_order == [sum(len(gram) == k for gram in slow.a) for k in range(1, order + 1)]
    assert model.entries == len(slow.a)


@pytest.mark.parametrize("boundary", [None, 0, 4])
@pytest.mark.parametrize("text", ODD_TEXTS, ids=str)
def test_odd_texts_too(text: list[int], boundary: int | None) -> None:
    for order in range(7):
        slow, model = Slow(text, 5, order, boundary), NGramLM(torch.tensor(text), 5, order, boundary)
        for other in (text, [0, 1, 2, 3, 4, 4, 3, 2, 1, 0, 0]):
            assert score(model, other) == pytest.approx(slow.nll(other), rel=1e-12, abs=1e-14)


tokens = st.integers(0, 3)
texts = st.lists(tokens, min_size=1, max_size=60)


@given(texts, st.lists(tokens, min_size=1, max_size=8), st.integers(0, 6), st.none() | tokens)
def test_any_text_gives_a_distribution_in_which_nothing_is_impossible(
    text: list[int], other: list[int], order: int, boundary: int | None
) -> None:
    slow, model = Slow(text, 4, order, boundary), NGramLM(torch.tensor(text), 4, order, boundary)
    assert score(model, other) == pytest.approx(slow.nll(other), rel=1e-12, abs=1e-14)
    context = model.initial_context(1)
    for h, w in zip(histories(other, boundary), other, strict=True):
        assert sum(slow.P(v, h) for v in range(4)) == 1  # the oracle is exact
        log_p, memory = model.next(context)
        assert log_p[0].exp().tolist() == pytest.approx([float(slow.P(v, h)) for v in range(4)], rel=1e-12)
        assert log_p.isfinite().all()
        context = Context(torch.tensor([w]), memory)


def test_a_probability_by_hand() -> None:
    """a b a b a: P(b | a) has a(ab) = 2 and A(a) = 2; below it b follows one word and a follows b or nothing."""
    model = NGramLM(torch.tensor([0, 1, 0, 1, 0]), 3, order=2)
    P_1 = (1 - 0.5) / 3 + (0.5 + 1) / 3 * (1 / 3)  # a(b) = 1, a(a) = 2; too few counts for (26), so D = ½, 1, 1½
    P_2 = (2 - 1) / 2 + 1 / 2 * P_1
    assert model.next(Context(torch.tensor([0]), torch.zeros(1, 0).long())).log_probabilities[0, 1].exp() == (
        pytest.approx(P_2, rel=1e-14)
    )


def test_discounts_are_equation_26() -> None:
    """Unigrams of counts 1, 1, 1, 1, 2, 2, 3, 4: n = 4, 2, 1, 1, so Y = 1/2 and D = 1/2, 5/4, 1."""
    text = [w for w, c in enumerate([1, 1, 1, 1, 2, 2, 3, 4]) for _ in range(c)]
    p = NGramLM(torch.tensor(text), 8, order=1).next(NGramLM(torch.tensor(text), 8, 1).initial_context(1))
    gamma = (4 * 0.5 + 2 * 1.25 + 2 * 1) / 15
    expected = [(c - D) / 15 + gamma / 8 for c, D in [(1, 0.5)] * 4 + [(2, 1.25)] * 2 + [(3, 1), (4, 1)]]
    assert p.log_probabilities[0].exp().tolist() == pytest.approx(expected, rel=1e-14)


def test_a_discount_of_zero_would_leave_no_room_and_is_not_used() -> None:
    """n = 2, 1, 2, 0: (26) gives D2 = 2 − 3 · ½ · 2 < 0; n = 3, 3, 6: D2 = 2 − 3 · ⅓ · 2 = 0."""
    for counts in ([1, 1, 2, 3, 3], [1] * 3 + [2] * 3 + [3] * 6):
        text = [w for w, c in enumerate(counts) for _ in range(c)]
        model = NGramLM(torch.tensor(text), 20, order=1)
        p = model.next(model.initial_context(1)).log_probabilities[0].exp()
        gamma = sum((0, 0.5, 1, 1.5)[c] for c in counts) / len(text)
        assert p[19].item() == pytest.approx(gamma / 20, rel=1e-14)


@pytest.mark.parametrize("size", [1, 2, 27, 10_000])
def test_order_0_is_uniform(size: int) -> None:
    model = NGramLM(torch.tensor([0]), size, order=0)
    nll = model(torch.randint(size, (7, 3)), model.initial_context(3)).nll
    assert nll.mean().exp().item() == pytest.approx(size, rel=1e-14)
    assert (model.entries, model.entries_by_order, model.table_size) == (0, [], 1)


@pytest.mark.parametrize("boundary", [None, 0])
@pytest.mark.parametrize("order", range(6))
def test_pieces_score_as_the_whole_to_the_last_bit(order: int, boundary: int | None) -> None:
    model = NGramLM(torch.tensor(drawn(400, 6, seed=0)), 6, order, boundary)
    block = torch.tensor(drawn(23 * 5, 6, seed=2)).view(23, 5)
    whole = model(block, model.initial_context(5))
    for size in (1, 2, 3, 8):
        context, parts = model.initial_context(5), []
        for piece in block.split(size):
            nll, context, *_ = model(piece, context)
            parts.append(nll)
        assert torch.equal(torch.cat(parts), whole.nll)
        assert same_context(context, whole.context)
    alone = [model(block[:, i : i + 1], model.initial_context(1)).nll for i in range(5)]
    assert torch.equal(torch.cat(alone, 1), whole.nll)


@pytest.mark.parametrize("boundary", [None, 0])
@pytest.mark.parametrize("order", range(6))
def test_texts_of_several_lengths(order: int, boundary: int | None) -> None:
    model = NGramLM(torch.tensor(drawn(400, 6, seed=0)), 6, order, boundary)
    block, lengths = torch.tensor(drawn(9 * 4, 6, seed=3)).view(9, 4), torch.tensor([9, 0, 4, 1])
    padded = block.where(torch.arange(9)[:, None] < lengths, -100)
    scored = model(padded, model.initial_context(4), lengths)
    assert (scored.nll.shape, scored.nll.dtype) == ((9, 4), torch.float64)
    for i, n in enumerate(lengths.tolist()):
        alone = model(block[:n, i : i + 1], model.initial_context(1))
        assert torch.equal(scored.nll[:n, i], alone.nll[:, 0])
        assert not scored.nll[n:, i].any()
        own = Context(scored.context.last[i : i + 1], scored.context.memory[i : i + 1])
        assert same_context(own, alone.context)
    assert scored.context.last[1] == 6  # it has not begun


@pytest.mark.parametrize("boundary", [None, 0])
@pytest.mark.parametrize("order", range(6))
def test_next_sums_to_one_and_says_what_forward_says(order: int, boundary: int | None) -> None:
    model = NGramLM(torch.tensor(drawn(400, 6, seed=0)), 6, order, boundary)
    context, block = model.initial_context(5), torch.tensor(drawn(12 * 5, 6, seed=4)).view(12, 5)
    for row in block:
        log_p, memory = model.next(context)
        assert (log_p.shape, log_p.dtype) == ((5, 6), torch.float64)
        torch.testing.assert_close(log_p.logsumexp(1), torch.zeros(5).double(), rtol=0, atol=1e-14)
        for w in range(6):
            assert torch.equal(model(torch.full((1, 5), w), context).nll[0], -log_p[:, w])
        after = model(row[None], context).context
        context = Context(row, memory)
        assert same_context(context, after)


def test_a_boundary_hides_what_stands_before_it() -> None:
    model = NGramLM(torch.tensor(drawn(400, 6, seed=0)), 6, order=5, boundary=0)
    line = [3, 1, 2, 0]
    assert score(model, [4, 5, 1, 0, *line])[4:] == score(model, line)
    stream = NGramLM(torch.tensor(drawn(400, 6, seed=0)), 6, order=5)
    assert score(stream, [4, 5, 1, 0, *line])[4:] != score(stream, line)


def test_nothing_hides_what_stands_before_it() -> None:
    """In keys h · |V| + token, a -1 after the context 1 would read as the last token after the context 0."""
    model = NGramLM(torch.tensor([0, 2, 1, 0, 2, 1, 1, 0, 2]), 3, order=4)
    odd, first = Context(torch.tensor([3]), torch.tensor([[0, 1]])), model.initial_context(1)
    assert torch.equal(model.next(odd).log_probabilities, model.next(first).log_probabilities)


def test_what_is_kept() -> None:
    """M22: the full table has |V|ⁿ entries; those kept are the n-grams of the text."""
    model = NGramLM(torch.tensor([0, 1, 0, 1, 2]), 10_000, order=6)
    assert model.table_size == 10_000**6
    assert model.entries_by_order == [3, 3, 3, 2, 1, 0]
    assert model.entries == 12
    assert not list(model.parameters())
    first = model.initial_context(3)
    assert first.last.tolist() == [10_000] * 3
    assert first.memory.tolist() == [[10_000] * 4] * 3


def test_any_kind_of_whole_number_and_no_tokens_at_all() -> None:
    model = NGramLM(torch.tensor([0, 1, 0, 1, 2], dtype=torch.int32), 3, order=3)
    context = model.initial_context(2)
    short = model(torch.tensor([[0, 1]], dtype=torch.uint8), context)
    assert torch.equal(short.nll, model(torch.tensor([[0, 1]]), context).nll)
    none = model(torch.zeros(0, 2).long(), short.context)
    assert none.nll.shape == (0, 2)
    assert same_context(none.context, short.context)


TEXT = torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((TEXT, 3, -1), ValueError, "order as a whole number of at least 0; got -1"),
        ((TEXT, 3, 2.0), ValueError, "order as a whole number of at least 0; got 2.0"),
        ((TEXT, 3, True), ValueError, "order as a whole number"),
        ((TEXT, 0, 2), ValueError, "vocabulary_size as a whole number"),
        (([0, 1], 3, 2), TypeError, r"got a list. Type torch.as_tensor\(tokens\)"),
        ((TEXT.float(), 3, 2), TypeError, r"got torch.float32. Type tokens.long\(\)"),
        ((TEXT[:0], 3, 2), ValueError, "at least one token"),
        ((TEXT[None], 3, 2), ValueError, r"got \(1, 3\)"),
        ((TEXT, 2, 2), ValueError, "tokens run from 0 to 2; a vocabulary of 2 needs 0 to 1"),
        ((TEXT - 1, 3, 2), ValueError, "tokens run from -1 to 1"),
        ((TEXT, 3, 2, 3), ValueError, "boundary as a token from 0 to 2, or None; got 3"),
        ((TEXT, 3, 2, True), ValueError, "boundary as a token from 0 to 2, or None; got True"),
        ((TEXT, 3, 2, "<eos>"), ValueError, "boundary as a token from 0 to 2, or None; got '<eos>'"),
    ],
)
def test_bad_texts(arguments: tuple[object, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        NGramLM(*arguments)  # type: ignore[arg-type]


def test_bad_blocks() -> None:
    model = NGramLM(TEXT, 3, order=4)
    context, block = model.initial_context(2), torch.zeros(5, 2).long()
    with pytest.raises(TypeError, match="got torch.float32"):
        model(block.float(), context)
    with pytest.raises(ValueError, match=r"\[τ, batch\]; got \(5,\)"):
        model(block[:, 0], context)
    with pytest.raises(ValueError, match="tokens run from 0 to 3; a vocabulary of 3 needs 0 to 2"):
        model(block.index_fill(0, torch.tensor([2]), 3), model.initial_context(2), None)
    with pytest.raises(ValueError, match=r"tokens \(5, 2\) need a context of .*initial_context\(2\)"):
        model(block, model.initial_context(3))
    with pytest.raises(ValueError, match=r"last \(2,\) and memory \(2, 1\); order 4 needs \[batch\] and \[batch, 2\]"):
        model(block, NGramLM(TEXT, 3, order=3).initial_context(2))
    with pytest.raises(ValueError, match="lengths must be 2 whole numbers from 0 to 5"):
        model(block, context, torch.tensor([6, 1]))
    with pytest.raises(ValueError, match="lengths must be 2 whole numbers from 0 to 5"):
        model(block, context, torch.tensor([5]))
    with pytest.raises(TypeError, match=r"got a list. Type torch.as_tensor\(lengths\)"):
        model(block, context, [5, 5])
    with pytest.raises(ValueError, match="the context's tokens run from 0 to 4; a vocabulary of 3 needs 0 to 3"):
        model.next(Context(torch.tensor([4]), torch.zeros(1, 2).long()))
