"""Generation against the loop written out, and search against all texts there are."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import loopfold as lf
from loopfold.language.base import Context, LanguageModel, Next, Scored
from loopfold.language.recurrent import as_language_model, recurrent_lm
from loopfold.outputs import gumbel
from loopfold.states import leaves

pytestmark = pytest.mark.usefixtures("one_thread")

LETTERS = lf.Characters.of("abcd ")
CHINESE = "汉字是字。汉语用汉字。\n"


def letters_model(hidden: int = 6) -> lf.RecurrentLM:
    """A model of random weights, large enough to have opinions, with dropout that must not be there."""
    model = recurrent_lm(LETTERS.size, [lf.LSTM(3, hidden), lf.GRU(hidden, 5)], 3, dropout=0.5).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    return model


def written_out(model: LanguageModel, ids: list[int], length: int, unknown: int | None) -> list[int]:
    """The likeliest token, again and again; a prompt is read token by token."""
    model.eval()
    context, found = model.initial_context(1), []
    with torch.no_grad():
        for t in range(len(ids) + length):
            log_p, memory = model.next(context)
            scores = log_p[0].tolist()
            if unknown is not None:
                scores[unknown] = -math.inf
            token = ids[t] if t < len(ids) else scores.index(max(scores))
            found.append(token)
            context = Context(torch.tensor([token]), memory)
    return found[len(ids) :]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ------------------------------------------------------------------ one token after the other


@pytest.mark.parametrize("prompt", ["", "a", "abcd dcba ab"])
@pytest.mark.parametrize("length", [1, 2, 23])
def test_greedy_is_the_loop_written_out(prompt: str, length: int) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        model = letters_model()
        ids = written_out(model, LETTERS.encode(prompt).ids.tolist(), length, unknown=0)
        assert lf.generate(model, LETTERS, prompt, length, lf.Greedy()) == LETTERS.decode(ids)
        assert len(ids) == length


NARROW = [
    lf.Sample(seeded(), temperature=1e-4),
    lf.Sample(seeded(), top_k=1),
    lf.Sample(seeded(), top_p=1e-6),
    lf.Sample(seeded(), temperature=5.0, top_k=1, top_p=0.5),
    lf.Beam(1),
    lf.Soft(),
]


@pytest.mark.parametrize("pick", NARROW, ids=["cold", "top k", "top p", "all three", "beam", "soft"])
def test_what_leaves_no_choice_is_greedy(pick: lf.Pick | lf.Beam) -> None:
    model = letters_model()
    assert lf.generate(model, LETTERS, "ab", 20, pick) == lf.generate(model, LETTERS, "ab", 20, lf.Greedy())


def test_the_same_seed_writes_the_same_text() -> None:
    model, before = letters_model(), torch.get_rng_state()
    one, same, other = (lf.generate(model, LETTERS, "ab", 60, lf.Sample(seeded(s))) for s in (1, 1, 2))
    assert one == same != other
    assert torch.equal(torch.get_rng_state(), before)
    generator = seeded(1)
    parts = [lf.generate(model, LETTERS, "ab", 60, lf.Sample(generator)) for _ in range(2)]
    assert parts[0] == one != parts[1]  # the generator goes on


def test_what_was_generated_may_be_the_next_prompt() -> None:
    """The state is all that is carried, so a text in two parts is the text in one."""
    for model in (letters_model(), lf.WindowLM(LETTERS.size, 3, 4, 5), lf.NGramLM(torch.randint(6, (99,)), 6, 4)):
        whole = lf.generate(model, LETTERS, "ab", 20, lf.Greedy())
        first = lf.generate(model, LETTERS, "ab", 7, lf.Greedy())
        assert first + lf.generate(model, LETTERS, "ab" + first, 13, lf.Greedy()) == whole


class Counting(LanguageModel):
    """A model that counts what it is asked, and answers with a tensor of its own that it wants to keep."""

    def __init__(self, log_p: Tensor) -> None:
        super().__init__()
        self.vocabulary_size, self.log_p = log_p.shape[-1], log_p
        self.read: list[int] = []  # the lengths of the pieces that were read
        self.asked: list[bool] = []  # whether in training
        self.gradients: set[bool] = set()

    def initial_context(self, batch: int) -> Context:
        return Context(torch.full((batch,), self.vocabulary_size), torch.zeros(batch, 0))

    def forward(self, tokens: Tensor, context: Context, lengths: Tensor | None = None) -> Scored:
        self.read.append(len(tokens))
        return Scored(-self.log_p[tokens], Context(tokens[-1], context.memory))

    def next(self, context: Context) -> Next:
        self.asked.append(self.training)
        self.gradients.add(torch.is_grad_enabled())
        return Next(self.log_p.expand(len(context.last), -1), context.memory)


def a_distribution() -> Tensor:
    return torch.tensor([0.3, 0.1, 0.25, 0.2, 0.1, 0.05], dtype=torch.float64).log()


@pytest.mark.parametrize("pick", [lf.Greedy(), lf.Sample(seeded()), lf.Beam(2)], ids=["Greedy", "Sample", "Beam"])
def test_every_token_costs_the_same_and_the_model_is_left_as_it_was(pick: lf.Pick | lf.Beam) -> None:
    model = Counting(a_distribution())
    for training in (True, False):
        model.train(training)
        model.read, model.asked = [], []
        lf.generate(model, LETTERS, "abc", 9, pick)
        assert (model.read, model.asked) == ([3], [False] * 9)
        assert model.training is training
    assert model.gradients == {False}
    assert torch.is_grad_enabled()
    assert torch.equal(model.log_p, a_distribution())


def test_text_is_shown_as_soon_as_there_is_some() -> None:
    model, shown = Counting(a_distribution()), []

    def show(piece: str) -> None:
        shown.append(piece)
        if len(shown) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lf.generate(model, LETTERS, "", 100, lf.Greedy(), show)
    assert (len(shown), len(model.asked)) == (3, 3)
    assert model.training


# ------------------------------------------------------------------ samples


def test_draws_follow_the_distribution() -> None:
    """Without what stands for unknown things; χ² has 4 degrees of freedom, and is above 18.5 once in a thousand."""
    text = lf.generate(Counting(a_distribution()), LETTERS, "", 4000, lf.Sample(seeded()))
    p = a_distribution().exp()[1:] / 0.7
    counts = torch.bincount(LETTERS.encode(text).ids, minlength=6)
    assert counts[0] == 0
    expected = 4000 * p
    assert float(((counts[1:] - expected) ** 2 / expected).sum()) < 18.5


@pytest.mark.parametrize(
    ("pick", "needed"),
    [
        (lf.Sample(seeded(), temperature=0.5), [0.49, 0.04, 0.01]),
        (lf.Sample(seeded(), temperature=2.0), [0.7**0.5, 0.2**0.5, 0.1**0.5]),
        (lf.Sample(seeded(), top_k=2), [0.7, 0.2, 0.0]),
        (lf.Sample(seeded(), top_p=0.8), [0.7, 0.2, 0.0]),
        (lf.Sample(seeded(), top_p=0.69), [0.7, 0.0, 0.0]),
        (lf.Sample(seeded(), top_k=3, top_p=1.0), [0.7, 0.2, 0.1]),
    ],
    ids=["sharper", "flatter", "top_k", "top_p", "top_p by one", "all"],
)
def test_draws_follow_the_narrowed_distribution(pick: lf.Sample, needed: list[float]) -> None:
    o = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64).log().expand(20000, 3)
    p = torch.tensor(needed, dtype=torch.float64)
    drawn = pick(o, lf.Classes(3)).mean(0)
    torch.testing.assert_close(drawn, p / p.sum(), rtol=0, atol=0.012)
    assert not drawn[p == 0].any()


values = st.one_of(st.integers(-3, 3).map(float), st.floats(-20, 20))  # ties, and none
logits = st.lists(values, min_size=1, max_size=9).map(lambda o: torch.tensor([o], dtype=torch.float64))


def test_a_sample_is_by_default_of_the_distribution_itself() -> None:
    o = torch.randn(50, 7)
    assert lf.Sample().narrowed(o).equal(o)
    drawn = lf.Sample(seeded())(o, lf.Classes(7))
    assert drawn.equal(lf.Classes(7).sample(o, seeded()))


@given(logits, st.integers(1, 10), st.sampled_from([0.5, 1.0, 3.0]))
def test_top_k_leaves_the_k_likeliest_and_those_as_likely(o: Tensor, k: int, temperature: float) -> None:
    came = lf.Sample(temperature=temperature, top_k=k).narrowed(o)[0].tolist()
    given = (o[0] / temperature).tolist()
    least = sorted(given, reverse=True)[min(k, len(given)) - 1]
    assert came == [v if v >= least else -math.inf for v in given]


@given(logits, st.none() | st.integers(1, 10), st.floats(0.01, 1.0), st.sampled_from([0.5, 1.0, 3.0]))
def test_top_p_leaves_the_fewest_that_reach_p(o: Tensor, k: int | None, p: float, temperature: float) -> None:
    """After temperature and top_k. Of equally likely ones any may be left, as many as it takes."""
    came = lf.Sample(temperature=temperature, top_k=k, top_p=p).narrowed(o)[0].tolist()
    before = lf.Sample(temperature=temperature, top_k=k).narrowed(o)[0].tolist()
    largest = max(before)
    total = math.fsum(math.exp(v - largest) for v in before)
    shares = [math.exp(v - largest) / total for v in before]
    kept = [i for i, v in enumerate(came) if v > -math.inf]
    assert [came[i] for i in kept] == [before[i] for i in kept]
    assert kept
    assert math.fsum(shares[i] for i in kept) >= p - 1e-12
    assert math.fsum(sorted((shares[i] for i in kept), reverse=True)[:-1]) < p + 1e-12  # one fewer would not
    dropped = [share for i, share in enumerate(shares) if i not in kept]
    assert min(shares[i] for i in kept) >= max(dropped, default=0.0)


@given(logits, st.integers(1, 10), st.floats(0.01, 1.0))
def test_what_cannot_be_drawn_is_not_drawn(o: Tensor, k: int, p: float) -> None:
    pick = lf.Sample(seeded(), top_k=k, top_p=p)
    drawn = pick(o.expand(50, -1), lf.Classes(o.shape[-1]))
    assert drawn.sum(-1).eq(1).all()
    assert not drawn[:, pick.narrowed(o)[0].isinf()].any()


def test_rows_are_narrowed_each_by_itself() -> None:
    o = torch.randn(4, 5, 7, dtype=torch.float64)
    pick = lf.Sample(temperature=0.7, top_k=4, top_p=0.8)
    rows = [pick.narrowed(row[None])[0] for row in o.flatten(0, 1)]
    assert torch.equal(pick.narrowed(o).flatten(0, 1), torch.stack(rows))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"temperature": 0.0},
            r"temperature must be a finite number of at least 1e-6; got 0.0. For the likeliest, type Greedy\(\)",
        ),
        ({"temperature": -1.0}, "temperature must be a finite number of at least 1e-6; got -1.0"),
        ({"temperature": math.nan}, "temperature must be a finite number of at least 1e-6; got nan"),
        ({"temperature": math.inf}, "temperature must be a finite number of at least 1e-6; got inf"),
        ({"top_k": 0}, "top_k as a whole number of at least 1; got 0"),
        ({"top_k": 1.5}, "top_k as a whole number of at least 1; got 1.5"),
        ({"top_p": 0.0}, "top_p is a probability above 0 and up to 1; got 0.0"),
        ({"top_p": 1.1}, "top_p is a probability above 0 and up to 1; got 1.1"),
    ],
    ids=str,
)
def test_wrong_ways_to_sample(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lf.Sample(**options)  # type: ignore[arg-type]


# ------------------------------------------------------------------ search


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_wide_beam_finds_the_best_text_of_all(length: int) -> None:
    vocabulary = lf.Characters.of("abc")
    differs = 0
    for seed in range(6):
        torch.manual_seed(seed)
        model = recurrent_lm(4, [lf.LSTM(3, 6)], 3).double().eval()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(4)
            texts = torch.tensor([*itertools.product([1, 2, 3], repeat=length)]).T  # 0 is never generated
            prompt = vocabulary.encode("cab").ids[:, None].expand(-1, texts.shape[1])
            context = model(prompt, model.initial_context(texts.shape[1])).context
            best = texts[:, model(texts, context).nll.sum(0).argmin()].tolist()
        for width in (4 ** (length - 1), 4**length, 1000):
            assert lf.generate(model, vocabulary, "cab", length, lf.Beam(width)) == vocabulary.decode(best)
        differs += lf.generate(model, vocabulary, "cab", length, lf.Greedy()) != vocabulary.decode(best)
    assert (differs > 0) is (length > 1)  # else the search would have nothing to find


def test_a_beam_keeps_only_so_many() -> None:
    """a is likelier at first, but b leads on to a certainty: a beam of one takes a, a beam of two finds b."""

    class Trap(Counting):
        def next(self, context: Context) -> Next:
            table = torch.tensor([[0.0, 0.5, 0.5], [0.0, 1.0, 0.0], [0.0, 0.6, 0.4]]).log()
            return Next(table[context.last - 1], context.memory)

    vocabulary, model = lf.Characters("ab"), Trap(torch.zeros(3))
    assert lf.generate(model, vocabulary, "", 2, lf.Beam(1)) == "aa"
    assert lf.generate(model, vocabulary, "", 2, lf.Beam(2)) == "ba"


def test_a_beam_needs_a_width() -> None:
    with pytest.raises(ValueError, match="Beam needs width as a whole number of at least 1; got 0"):
        lf.Beam(0)


# ------------------------------------------------------------------ prompts and vocabularies


@pytest.mark.parametrize("pick", [lf.Greedy(), lf.Sample(seeded(), 3.0), lf.Beam(7)], ids=["Greedy", "Sample", "Beam"])
def test_what_stands_for_unknown_things_is_never_generated(pick: lf.Pick | lf.Beam) -> None:
    """Here <unk> is most of the text that was learnt from, and the likeliest token after all but `be`."""
    vocabulary = lf.Words(("to", "be"))
    model = lf.NGramLM(vocabulary.encode("x y z u v w to x y z u v w be\n" * 9).ids, vocabulary.size, 2)
    everywhere = Context(torch.arange(4), torch.zeros(4, 0).long())
    assert model.next(everywhere).log_probabilities.argmax(-1).tolist() == [0, 0, 0, 1]
    assert "<unk>" not in lf.generate(model, vocabulary, "to", 60, pick)


def test_a_prompt_that_the_model_cannot_read() -> None:
    model = letters_model()
    with pytest.raises(ValueError, match="the prompt holds what the model has never seen: 'x', 'y'. Leave it out"):
        lf.generate(model, LETTERS, "axxya", 5)
    with pytest.raises(ValueError, match="'e', 'f', 'g', 'h', 'i', …. Leave it out"):
        lf.generate(model, LETTERS, "efghijk", 5)
    words = lf.Words(("to", "be"))
    with pytest.raises(ValueError, match="'never', 'seen'"):
        lf.generate(lf.NGramLM(words.encode("to be").ids, 4, 2), words, "to never be seen", 5)


@pytest.mark.parametrize("length", [0, -1, 2.5])
def test_a_length_that_is_none(length: int) -> None:
    with pytest.raises(ValueError, match="generate needs length as a whole number of at least 1"):
        lf.generate(letters_model(), LETTERS, "a", length)


VOCABULARIES: dict[str, tuple[lf.Vocabulary, str, str]] = {  # with a text to learn, and a prompt
    "characters": (lf.Characters.of("abcd abcd"), "abcd dcba aabbccdd", "ab"),
    "汉 characters": (lf.Characters.of(CHINESE), CHINESE * 3, "汉"),
    "bytes": (lf.Bytes(), "naïve café — déjà vu\n" * 3, "na"),
    "汉 bytes": (lf.Bytes(), CHINESE * 3, "汉"),
    "words": (lf.Words.of("to be or not to be or not\n" * 2), "to be or not to be or not\n" * 3, "to be"),
    "汉 words": (lf.Words.of(CHINESE * 2), CHINESE * 3, "汉字"),
    "汉 subwords": (lf.Subwords.of(CHINESE * 9, 262), CHINESE * 3, "汉"),
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_the_pieces_that_are_shown_make_up_the_text(name: str) -> None:
    vocabulary, text, prompt = VOCABULARIES[name]
    model = lf.NGramLM(vocabulary.encode(text).ids, vocabulary.size, order=7)
    for length in (1, 2, 3, 30):
        for pick in (lf.Greedy(), lf.Sample(seeded()), lf.Beam(3)):
            pieces: list[str] = []
            came = lf.generate(model, vocabulary, prompt, length, pick, pieces.append)
            assert "".join(pieces) == came
            assert len(pieces) == length
        ids = written_out(model, vocabulary.beginning(prompt).tolist(), length, vocabulary.unknown)
        whole = vocabulary.decode([*vocabulary.beginning(prompt).tolist(), *ids])
        came = lf.generate(model, vocabulary, prompt, length, lf.Greedy())
        assert prompt + came == whole.rstrip("\N{REPLACEMENT CHARACTER}")  # a character may not be whole yet


def test_a_text_that_is_known_by_heart_goes_on() -> None:
    """Order 12 looks back over four Chinese characters, which say here what follows."""
    model = lf.NGramLM(lf.Bytes().encode(CHINESE * 9).ids, 256, order=12)
    assert lf.generate(model, lf.Bytes(), CHINESE[:4], 3 * 7 + 1, lf.Greedy()) == CHINESE[4:]


def test_a_line_that_is_not_at_its_end_has_no_end() -> None:
    vocabulary = lf.Words(("be", "to"))
    eos, be, to = 1, 2, 3
    assert vocabulary.beginning("").tolist() == []
    assert vocabulary.beginning("to be").tolist() == [to, be]
    assert vocabulary.beginning("to be\n").tolist() == [to, be, eos]
    assert vocabulary.beginning("to be\nbe").tolist() == [to, be, eos, be]
    assert vocabulary.beginning("\n").tolist() == [eos]
    assert LETTERS.beginning("ab").tolist() == LETTERS.encode("ab").ids.tolist()
    model = lf.NGramLM(vocabulary.encode("to be\n" * 9).ids, vocabulary.size, 3)
    assert lf.generate(model, vocabulary, "to be", 1, lf.Greedy()) == "\n"
    assert lf.generate(model, vocabulary, "to be\n", 2, lf.Greedy()) == "to be"


def test_words_go_on_after_the_words_of_the_prompt() -> None:
    """Whoever prints the prompt and then the text reads words, not `beor`."""
    vocabulary = lf.Words(("be", "or", "to"))
    model = lf.NGramLM(vocabulary.encode("to be or\n" * 9).ids, vocabulary.size, 3)
    assert lf.generate(model, vocabulary, "to be", 1, lf.Greedy()) == " or"
    assert lf.generate(model, vocabulary, "to be or\n", 1, lf.Greedy()) == "to"
    assert lf.generate(model, vocabulary, "", 2, lf.Greedy()) == "to be"


# ------------------------------------------------------------------ many tokens at a time, and many texts


def test_torch_draws_the_same_numbers_in_pieces_as_at_once() -> None:
    """What makes a text the same whatever the blocks in which it is written."""
    for shape in ((7, 3, 5), (1, 1, 17), (40, 2, 104)):
        whole = torch.rand(shape, generator=seeded())
        generator = seeded()
        assert torch.equal(torch.cat([torch.rand(1, *shape[1:], generator=generator) for _ in range(shape[0])]), whole)


MODELS: dict[str, Any] = {
    "embedded": letters_model,
    "one layer": lambda: recurrent_lm(LETTERS.size, [lf.GRU(6, 9)], None).double(),
    "tied": lambda: recurrent_lm(LETTERS.size, [lf.GRU(9, 9)], 9, tied=True).double(),
    "one-hot vectors": lambda: lf.SequenceToSequence(lf.LSTM(LETTERS.size, 7), LETTERS.size).double(),
    "ngram": lambda: lf.NGramLM(torch.randint(6, (99,)), 6, 4),
    "window": lambda: lf.WindowLM(LETTERS.size, 3, 4, 5),
}
DRAWS: dict[str, dict[str, float]] = {
    "plain": {},
    "cold": {"temperature": 0.7},
    "top k": {"top_k": 3},
    "top p": {"top_p": 0.8},
    "all": {"temperature": 2.0, "top_k": 4, "top_p": 0.9},
}


@pytest.mark.parametrize("name", MODELS)
def test_a_text_is_the_same_whatever_the_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from loopfold import generation

    model = MODELS[name]()
    for options, samples in itertools.product(DRAWS.values(), (1, 3)):
        pick = [lf.Sample(seeded(3), **options) for _ in range(5)]  # type: ignore[arg-type]
        monkeypatch.setattr(generation, "FIRST", 16)
        whole = lf.generate(model, LETTERS, "ab", 41, pick[0], samples=samples)
        assert lf.generate(model, LETTERS, "ab", 41, pick[1], lambda piece: None, samples=samples) == whole
        for block, p in zip((1, 2, 7), pick[2:], strict=True):
            monkeypatch.setattr(generation, "FIRST", block)
            monkeypatch.setattr(generation, "MOST", block)
            assert lf.generate(model, LETTERS, "ab", 41, p, samples=samples) == whole
        monkeypatch.undo()


@pytest.mark.parametrize("engine", [lf.Sequential(), lf.Looped(), lf.FusedCPU()], ids=lambda e: type(e).__name__)
def test_every_engine_writes_what_the_loop_over_next_writes(engine: lf.Engine) -> None:
    for name in ("embedded", "one layer", "tied", "one-hot vectors"):
        model = MODELS[name]()
        for part in model.modules():
            if isinstance(part, lf.Recurrent):
                part.engine = engine
        model = as_language_model(model).eval()
        for options in DRAWS.values():
            pick = lf.Sample(seeded(), **options)  # type: ignore[arg-type]
            noise = gumbel((30, 4, LETTERS.size), seeded(1), torch.zeros((), dtype=torch.float64))
            with torch.no_grad():
                context = model.initial_context(4)
                ours = model.write(context, 30, pick, noise, 0)
                theirs = LanguageModel.write(model, context, 30, pick, noise, 0)
            assert torch.equal(ours.tokens, theirs.tokens)
            assert torch.equal(ours.context.last, theirs.context.last)
            for mine, other in zip(leaves(ours.context.memory), leaves(theirs.context.memory), strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


def test_a_recurrent_model_writes_in_a_compiled_loop() -> None:
    from loopfold.engines.auto import Auto
    from loopfold.engines.explaining import explain
    from loopfold.feedback import _steps
    from loopfold.unfolding import checked

    for options in DRAWS.values():
        model = letters_model()
        lf.generate(model, LETTERS, "", 100, lf.Sample(seeded(), **options))  # type: ignore[arg-type]
        ((_, step),) = _steps[model.network]
        start = model.initial_context(2)
        state = (start.memory, start.last[:, None].double())
        said = explain(Auto(), checked(step, torch.randn(300, 2, LETTERS.size).double(), state, None, None))
        assert "FusedCPU, because its loop is native code" in said


@pytest.mark.parametrize("name", DRAWS)
def test_many_texts_follow_the_models_distribution(name: str) -> None:
    """The first token of 4,000 texts: chi-square, once in a thousand above 20.5 with 5 degrees of freedom or fewer."""
    model, pick = letters_model(), lf.Sample(seeded(7), **DRAWS[name])  # type: ignore[arg-type]
    texts = lf.generate(model, LETTERS, "ab", 2, pick, samples=4000)
    assert isinstance(texts, list)
    assert len(texts) == 4000
    with torch.no_grad():
        model.eval()
        context = model(LETTERS.encode("ab").ids[:, None], model.initial_context(1)).context
        o = model.next(context).log_probabilities
    o[0, 0] = -torch.inf
    p = pick.narrowed(o)[0].softmax(-1)
    counts = torch.bincount(torch.cat([LETTERS.encode(text[:1]).ids for text in texts]), minlength=6)
    assert not counts[p == 0].any()
    expected = 4000 * p[p > 0]
    assert float(((counts[p > 0] - expected) ** 2 / expected).sum()) < 20.5
    second = {text[1:] for text in texts}
    assert len(second) > 1  # the texts part ways


def test_several_texts_are_shown_whole_and_come_as_a_list() -> None:
    model, shown = letters_model(), list[str]()
    texts = lf.generate(model, LETTERS, "ab", 20, lf.Sample(seeded()), shown.append, samples=3)
    assert texts == shown
    assert len(set(texts)) == 3
    assert lf.generate(model, LETTERS, "ab", 20, lf.Greedy(), samples=2) == 2 * [
        lf.generate(model, LETTERS, "ab", 20, lf.Greedy())
    ]
    with pytest.raises(ValueError, match="Beam finds one text, the likeliest; got samples=2"):
        lf.generate(model, LETTERS, "ab", 5, lf.Beam(2), samples=2)
    with pytest.raises(ValueError, match="generate needs samples as a whole number of at least 1; got 0"):
        lf.generate(model, LETTERS, "ab", 5, samples=0)


def test_a_model_whose_outputs_are_no_numbers_writes_nothing() -> None:
    for name, pick in itertools.product(("embedded", "one-hot vectors", "window"), (lf.Sample(), lf.Greedy())):
        model = MODELS[name]()
        with torch.no_grad():
            next(model.parameters()).fill_(torch.nan)
        with pytest.raises(FloatingPointError, match="not a finite number"):
            lf.generate(model, LETTERS, "", 5, pick)


def test_half_precision_writes_every_token() -> None:
    """bfloat16 has not every whole number above 256, so the last token is no part of a compiled state there."""
    vocabulary = lf.Characters.of("".join(map(chr, range(300, 900))))
    model = recurrent_lm(vocabulary.size, [lf.GRU(4, 6)], 4).to(torch.bfloat16).eval()
    noise = torch.zeros(20, 2, vocabulary.size)
    noise.scatter_(2, torch.randint(257, 600, (20, 2, 1)), 1e4)  # such tokens as are drawn
    with torch.no_grad():
        ours = model.write(model.initial_context(2), 20, lf.Sample(), noise, None)
        theirs = LanguageModel.write(model, model.initial_context(2), 20, lf.Sample(), noise, None)
    assert torch.equal(ours.tokens, noise.argmax(-1))
    assert torch.equal(ours.tokens, theirs.tokens)


class Louder(lf.RecurrentLM):
    """A model with a `next` of its own, which is what counts."""

    def next(self, context: Context) -> Next:
        found = super().next(context)
        return Next((found.log_probabilities * 3).log_softmax(-1), found.memory)


def test_a_next_of_ones_own_is_asked() -> None:
    network = lf.SequenceToSequence(lf.LSTM(LETTERS.size, 7), LETTERS.size).double()
    loud, sharp = lf.Sample(seeded(2)), lf.Sample(seeded(2), temperature=1 / 3)
    assert lf.generate(Louder(network), LETTERS, "ab", 30, loud) == lf.generate(network, LETTERS, "ab", 30, sharp)


class Tripled(lf.Recurrent):
    def forward(self, *args: Any, **options: Any) -> Any:
        run = super().forward(*args, **options)
        return replace(run, hidden=3 * run.hidden, last_hidden=3 * run.last_hidden)


def test_the_forward_of_a_layer_is_called_and_so_are_its_hooks() -> None:
    for hooked in (False, True):
        torch.manual_seed(0)
        layer = (lf.Recurrent if hooked else Tripled)(lf.GRU(LETTERS.size, 16))
        if hooked:
            layer.register_forward_hook(lambda _, args, run: replace(run, last_hidden=-run.hidden[-1]))
        model = lf.SequenceToSequence(layer, LETTERS.size).double()
        if hooked:
            layer.register_forward_hook(lambda _, args, run: replace(run, hidden=-run.hidden))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3)
        found = lf.generate(model, LETTERS, "ab", 40, lf.Greedy())
        expected = written_out(as_language_model(model), LETTERS.encode("ab").ids.tolist(), 40, LETTERS.unknown)
        assert found == LETTERS.decode(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [False, True])
def test_draws_are_fair_in_half_precision(dtype: torch.dtype, tokens: bool) -> None:
    """Two equal classes at a logit of 50, where sums with noise in half precision would often be equal."""
    vocabulary = lf.Characters.of("ab")
    network = lf.SequenceToSequence(lf.GRU(vocabulary.size, 4), vocabulary.size)
    model: Any = recurrent_lm(vocabulary.size, [lf.GRU(3, 4)], 3) if tokens else lf.RecurrentLM(network)
    model = model.to(dtype)
    with torch.no_grad():
        model.network.readout.V.zero_()
        model.network.readout.c.fill_(50.0)
    texts = "".join(lf.generate(model, vocabulary, "a", 100, lf.Sample(seeded(6)), samples=400))
    assert len(texts) == 40_000
    assert 4 * (texts.count("a") - 20_000) ** 2 / 40_000 < 15
    assert len(lf.generate(model, vocabulary, "a", 5, lf.Greedy())) == 5
