"""Text as tokens: what is read, how it becomes numbers, how the numbers are laid out in time."""

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from loopfold.text.corpus import Corpus, CorpusError, python_docs, read_corpus
from loopfold.text.streams import Streams
from loopfold.text.vocabulary import Bytes, Characters, Subwords, Vocabulary, Words, vocabulary_from_json

pytestmark = pytest.mark.usefixtures("one_thread")
ENGLISH = "the cat sat on the mat .\nthe dog sat on the log .\n\n  the end\n" * 3
CHINESE = "他说：“你好，世界。”\n世界说：“你好……”\n"
SUBWORDS = Subwords.of(ENGLISH + CHINESE, size=300)
ALL: list[Vocabulary] = [Characters.of(ENGLISH + CHINESE), Bytes(), Words.of(ENGLISH + CHINESE), SUBWORDS]
any_text = st.text(max_size=40) | st.text(alphabet=" \n\tab你。😀é\u3000", max_size=40)


def of_name(vocabulary: Vocabulary) -> str:
    return type(vocabulary).__name__


def streamed(vocabulary: Vocabulary, ids: list[int]) -> str:
    return "".join(map(vocabulary.stream(), ids))


# ------------------------------------------------------------------ every vocabulary


@given(any_text)
def test_characters_come_back(text: str) -> None:
    vocabulary = Characters.of(text)
    tokens = vocabulary.encode(text)
    assert vocabulary.decode(tokens.ids.tolist()) == text == streamed(vocabulary, tokens.ids.tolist())
    assert len(tokens) == tokens.characters == len(text)
    assert tokens.unknown == 0
    assert [*vocabulary.symbols] == sorted(set(text))


@pytest.mark.parametrize("vocabulary", [Bytes(), SUBWORDS], ids=of_name)
@given(text=any_text)
def test_any_text_comes_back_from_bytes(vocabulary: Vocabulary, text: str) -> None:
    tokens = vocabulary.encode(text)
    ids = tokens.ids.tolist()
    assert vocabulary.decode(ids) == text == streamed(vocabulary, ids)
    assert tokens.bytes == len(text.encode())
    assert tokens.unknown == 0
    assert vocabulary.unknown_in(text) == []


@given(st.lists(st.integers(0, ALL[2].size - 1), max_size=30))
def test_words_come_back(ids: list[int]) -> None:
    words, ended = ALL[2], [*ids, 1]
    text = words.decode(ended)
    assert words.encode(text).ids.tolist() == ended
    assert streamed(words, ended) == text


@pytest.mark.parametrize("vocabulary", ALL, ids=of_name)
def test_chinese_in_every_vocabulary(vocabulary: Vocabulary) -> None:
    tokens = vocabulary.encode(CHINESE)
    assert tokens.unit == vocabulary.unit
    assert tokens.ids.dtype == torch.int64
    assert 0 <= int(tokens.ids.min()) <= int(tokens.ids.max()) < vocabulary.size
    assert (tokens.characters, tokens.bytes) == (len(CHINESE), len(CHINESE.encode()))
    if vocabulary.unit != "word":
        assert vocabulary.decode(tokens.ids.tolist()) == CHINESE


@example("a <eos>foo b <eos> c\n")
@given(st.text(st.sampled_from("ab ,\n\t\u3000é汉字。0"), max_size=40))
def test_words_count_the_text_that_they_stand_for(text: str) -> None:
    """Which is what a vocabulary that knows every word makes of its tokens: white space is one character or none."""
    for words in (Words.of(text, min_count=1), Words.of("汉字 <unk>\n" + text, min_count=1), Words(("a", "汉"))):
        everything = Words(tuple(dict.fromkeys([*words.words, *words.unknown_in(text)])))
        if everything._unspaced != words._unspaced:
            continue
        ids = everything.encode(text).ids.tolist()
        meant = everything.decode(ids)
        tokens = words.encode(text)
        assert (tokens.characters, tokens.bytes) == (len(meant), len(meant.encode()))
        assert tokens.unknown == sum(i > 1 and everything.words[i - 2] not in words.words for i in ids)


def test_the_word_unk_is_a_word_of_a_closed_text() -> None:
    words = Words.of("the <unk> sat\nthe cat <unk>\n")
    tokens = words.encode("the <unk> sat on <unk>\n")
    assert (tokens.unknown, words.unknown_in("the <unk> sat on <unk>\n")) == (1, ["on"])
    assert tokens.ids.tolist().count(0) == 3


@pytest.mark.parametrize("vocabulary", ALL, ids=of_name)
def test_a_vocabulary_comes_back_from_json(vocabulary: Vocabulary) -> None:
    again = vocabulary_from_json(json.loads(json.dumps(vocabulary.as_json())))
    assert again == vocabulary
    assert again.size == vocabulary.size
    assert again.encode(ENGLISH).ids.equal(vocabulary.encode(ENGLISH).ids)


@pytest.mark.parametrize("data", [{"kind": "syllables"}, {"kind": "words"}, {}])
def test_json_of_no_vocabulary_is_refused_with_the_kinds(data: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"characters \(with symbols\), bytes, words .* and subwords"):
        vocabulary_from_json(data)


@pytest.mark.parametrize("vocabulary", ALL, ids=of_name)
def test_an_empty_text_and_an_id_too_many(vocabulary: Vocabulary) -> None:
    assert len(vocabulary.encode("")) == 0
    assert vocabulary.encode("").ids.dtype == torch.int64
    assert vocabulary.decode([]) == ""
    for bad in (-1, vocabulary.size):
        with pytest.raises(ValueError, match=f"ids of this vocabulary run from 0 to {vocabulary.size - 1}; got {bad}"):
            vocabulary.decode([0, bad])


@pytest.mark.parametrize("vocabulary", ALL, ids=of_name)
def test_a_long_text_is_the_sum_of_its_lines(vocabulary: Vocabulary) -> None:
    """Long texts are encoded in pieces, which must not show."""
    lines = [f"{' ' * (i % 3)}the {i} cat{' ' * (i % 2)}\n" + "\n" * (i % 4 == 0) for i in range(20_000)]
    whole = vocabulary.encode("".join(lines))
    assert whole.ids.equal(
        torch.cat([vocabulary.encode("".join(lines[i : i + 500])).ids for i in range(0, 20_000, 500)])
    )
    assert type(vocabulary).of("".join(lines)).size > 2  # type: ignore[attr-defined]


# ------------------------------------------------------------------ each by itself


def test_unknown_characters() -> None:
    vocabulary = Characters.of("abc")
    tokens = vocabulary.encode("aébéz")
    assert tokens.ids.tolist() == [1, 0, 2, 0, 0]
    assert tokens.unknown == 3
    assert vocabulary.unknown_in("aébéz") == ["é", "z"]
    assert vocabulary.decode(tokens.ids.tolist()) == "a\ufffdb\ufffd\ufffd"


@pytest.mark.parametrize("vocabulary", [Bytes(), SUBWORDS], ids=of_name)
def test_half_a_character_waits_for_the_other_half(vocabulary: Vocabulary) -> None:
    ids = vocabulary.encode("a😀b").ids.tolist()
    shown = [*map(vocabulary.stream(), ids)]
    assert [text for text in shown if text] == ["a", "😀", "b"]
    assert vocabulary.decode(ids[:2]) == "a\ufffd"


def test_words_are_numbered_by_frequency_then_alphabet() -> None:
    vocabulary = Words.of("b a c\na c a\n", min_count=1)
    assert vocabulary.words == ("a", "c", "b")
    assert vocabulary.encode("a b\n\nc").ids.tolist() == [2, 4, 1, 1, 3, 1]
    assert (vocabulary.unknown, vocabulary.end) == (0, 1)


def test_rare_words_are_unknown_unless_the_text_says_so_itself() -> None:
    assert Words.of("a a b").words == ("a",)
    assert Words.of("a a b <unk>").words == ("a", "b")
    assert Words.of("a a b <unk>", min_count=2).words == ("a",)
    assert Words.of("a a a b b c", min_count=1, max_size=4).words == ("a", "b")
    tokens = Words(("a",)).encode("a x <unk> <eos> y x")
    assert tokens.ids.tolist() == [2, 0, 0, 1, 0, 0, 1]
    assert tokens.unknown == 3  # not the word <unk>, which is known
    assert Words(("a",)).unknown_in("a x <unk> <eos> y x") == ["x", "y"]


def test_words_in_scripts_without_spaces_are_characters() -> None:
    vocabulary = Words.of("我们 love 你\u3000たべる\n", min_count=1)
    assert set(vocabulary.words) == {*"我们你たべる", "love"}
    assert Words.of("ไป", min_count=1).words == ("ป", "ไ")
    assert Words.of("한국어 한국어").words == ("한국어",)
    quoted = Words.of(CHINESE, min_count=1)
    assert quoted.decode(quoted.encode(CHINESE).ids.tolist()) == CHINESE
    mixed = Words.of("我 love 你 。 a b\n", min_count=1)
    assert mixed.decode(mixed.encode("我 love 你 。 a b\na").ids.tolist()) == "我 love 你。 a b\na\n"


def test_a_text_in_words_already_is_taken_at_its_word() -> None:
    """So that WikiText has its 33,278 words, some of which are Japanese."""
    text = "我们 去 <unk> a大b 去\n"
    vocabulary = Words.of(text)
    assert vocabulary.words == ("去", "a大b", "我们")
    assert vocabulary.decode(vocabulary.encode(text).ids.tolist()) == text
    assert vocabulary.encode("你们 去").ids.tolist() == [0, 2, 1]
    assert vocabulary.unknown_in("你们 去") == ["你们"]
    assert vocabulary_from_json(vocabulary.as_json()).encode(text + "a").unknown == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Words.of("a", min_count=0), "min_count as a whole number of at least 1; got 0"),
        (lambda: Words.of("a", max_size=2), "max_size of 3 or more.*got 2"),
        (lambda: Subwords.of("a", size=255), "size of 256 or more.*got 255"),
    ],
)
def test_wrong_sizes_are_refused(wrong: Callable[[], Vocabulary], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()


def test_subwords_are_short_and_the_same_each_time() -> None:
    assert Subwords.of(ENGLISH + CHINESE, size=300) == SUBWORDS
    assert SUBWORDS.size == 300
    assert len(SUBWORDS.encode("the cat")) < 4


def test_subwords_learn_quickly_from_a_text_without_spaces() -> None:
    letters = "ACGT" * 100_000  # as one word this takes most of a minute
    vocabulary = Subwords.of(letters, size=300)
    assert vocabulary.decode(vocabulary.encode(letters).ids.tolist()) == letters


def test_the_library_is_imported_late_and_keeps_quiet_after_a_fork() -> None:
    code = """if True:
        import os, sys
        from loopfold.text.vocabulary import Subwords
        assert "tokenizers" not in sys.modules
        vocabulary = Subwords.of("a b\\n" * 50_000, size=260)
        ids = vocabulary.encode("a b\\n" * 50_000).ids
        child = os.fork()
        if not child:
            os._exit(not vocabulary.encode("a b\\n" * 50_000).ids.equal(ids))
        assert os.waitpid(child, 0)[1] == 0
    """
    quiet = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run([sys.executable, "-c", code], env=quiet, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ------------------------------------------------------------------ corpus

LINES = "".join(f"line {i} of a text\n" for i in range(100))


def written(path: Path, text: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def test_a_split_is_contiguous_and_tears_no_line(tmp_path: Path) -> None:
    corpus = read_corpus([written(tmp_path / "a.txt", LINES)], split=(8, 1, 1))
    assert corpus.train + corpus.valid + corpus.test == LINES
    assert corpus.name == "a.txt"
    assert "line 50" not in repr(corpus)
    for part, share in ((corpus.train, 0.8), (corpus.valid, 0.1), (corpus.test, 0.1)):
        assert part.endswith("\n")
        assert len(part) / len(LINES) == pytest.approx(share, abs=0.011)


@given(
    st.text(alphabet="ab\n", min_size=1200, max_size=3000),
    st.tuples(st.floats(0.5, 1), st.just(0) | st.floats(0.01, 1), st.just(0) | st.floats(0.01, 1)),
)
def test_any_split_keeps_all_text_and_its_shares(text: str, shares: tuple[float, float, float]) -> None:
    from loopfold.text.corpus import _split

    parts = _split(text, shares)
    assert "".join(parts) == text
    for part, share in zip(parts, shares, strict=True):
        assert (len(part) > 0) == (share > 0)
        assert abs(len(part) / len(text) - share / sum(shares)) < 0.012


def test_one_long_line_is_cut_plainly(tmp_path: Path) -> None:
    corpus = read_corpus([written(tmp_path / "a.txt", "x" * 1000)], split=(50, 25, 25))
    assert [len(part) for part in (corpus.train, corpus.valid, corpus.test)] == [500, 250, 250]


def test_shares_of_nothing(tmp_path: Path) -> None:
    corpus = read_corpus([written(tmp_path / "a.txt", LINES)], split=(1, 0, 0))
    assert (corpus.train, corpus.valid, corpus.test) == (LINES, "", "")


def test_sources_follow_each_other_each_on_its_own_line(tmp_path: Path) -> None:
    written(tmp_path / "books" / "b.txt", "second\n")
    written(tmp_path / "books" / "a" / "z.txt", "first")
    written(tmp_path / "books" / ".hidden" / "a.txt", "no")
    written(tmp_path / "books" / ".a.txt", "no")
    written(tmp_path / "books" / "a.md", "no")
    written(tmp_path / "books" / "c.txt", "")
    last = written(tmp_path / "last.txt", LINES)
    corpus = read_corpus([str(tmp_path / "books"), last], split=(1, 0, 0))
    assert corpus.train == "first\nsecond\n" + LINES
    assert corpus.name == "books + last.txt"


def test_line_ends_and_byte_order_mark(tmp_path: Path) -> None:
    corpus = read_corpus([written(tmp_path / "a.txt", "\ufeff" + LINES.replace("\n", "\r\n") + "é\rend")], (1, 0, 0))
    assert corpus.train == LINES + "é\nend"


def test_validation_and_test_files(tmp_path: Path) -> None:
    train, other = written(tmp_path / "a.txt", LINES), written(tmp_path / "b.txt", "other")
    assert read_corpus([train], valid=other) == Corpus("a.txt", LINES, "other", "")
    assert read_corpus([train], valid=other, test=train) == Corpus("a.txt", LINES, "other", LINES)
    assert read_corpus([train], test=other) == Corpus("a.txt", LINES, "", "other")


def test_moving_the_split_changes_the_fingerprint(tmp_path: Path) -> None:
    source = written(tmp_path / "a.txt", LINES)
    prints = {read_corpus([source], split).sha256 for split in ((90, 5, 5), (80, 10, 10), (95, 5, 0), (95, 0, 5))}
    assert len(prints) == 4
    assert read_corpus([source]).sha256 == read_corpus([source], (0.9, 0.05, 0.05)).sha256


def test_python_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "python-docs", LINES)
    assert read_corpus(["python-docs"], (1, 0, 0)).train == python_docs()
    assert read_corpus(["./python-docs"], (1, 0, 0)).train == LINES
    assert len(python_docs()) > 300_000


def stdin(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin(monkeypatch, LINES.encode())
    assert read_corpus(["-"], (1, 0, 0)) == Corpus("standard input", LINES, "", "")
    stdin(monkeypatch, b"")
    with pytest.raises(CorpusError, match="standard input is empty"):
        read_corpus(["-"])
    with pytest.raises(CorpusError, match="read only once"):
        read_corpus(["-"], valid="-")
    stdin(monkeypatch, b"caf\xe9")
    with pytest.raises(CorpusError, match=r"standard input is not UTF-8: byte 3 is 0xe9.*latin1 -t utf-8 old.txt"):
        read_corpus(["-"])


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        (
            "latin.txt",
            LINES.encode() + b"caf\xe9 x",
            r"latin.txt is not UTF-8: byte 1793 is 0xe9. .*iconv -f latin1 -t",
        ),
        (
            "16.txt",
            LINES.encode("utf-16"),
            r"byte 0 is 0xff. If it is utf-16, type iconv -f utf-16 -t utf-8 .*16.txt >",
        ),
        ("image.png", b"PNG\0" + LINES.encode(), "image.png is not text: byte 3 is NUL"),
        ("empty.txt", b"", "empty.txt is empty: name a file with text"),
        ("blank.txt", b" \n" * 100, "blank.txt has white space alone: name a file with text"),
        ("short.txt", b"x" * 100, "training text has 90 characters and needs at least 100: name more text"),
    ],
)
def test_text_that_cannot_be_used(tmp_path: Path, name: str, raw: bytes, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        read_corpus([written(tmp_path / name, raw)])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("storry.txt", "there is no file storry.txt. Did you mean story.txt?"),
        ("notes/ide.md", "there is no file notes/ide.md. Did you mean notes/idea.md?"),
        ("python-doc", "there is no file python-doc. Did you mean python-docs?"),
        ("xyz", "there is no file xyz: name a text file, or type python-docs"),
        ("no/xyz", "there is no file no/xyz and no folder no: name"),
        ("story.txt/x", "there is no file story.txt/x"),
        (
            "notes",
            "the folder notes has no .txt files, only .md, .rst: name the files, as in notes/*.md",
        ),
        ("nothing", "the folder nothing has no files"),
        ("x" * 5000, "cannot be read (File name too long)"),
        ("", "no text was named: name a file"),
    ],
)
def test_files_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "story.txt", LINES)
    for name in ("idea.md", "plan.md", "a.rst"):
        written(tmp_path / "notes" / name, LINES)
    (tmp_path / "nothing").mkdir()
    for wrong in (lambda: read_corpus([source]), lambda: read_corpus(["story.txt"], valid=source)):
        with pytest.raises(CorpusError) as error:
            wrong()
        assert message in str(error.value)


def test_no_source_and_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CorpusError, match="no text was named"):
        read_corpus([])
    source = written(tmp_path / "my secret.txt", LINES)

    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)  # who runs the tests as root may read everything
    with pytest.raises(
        CorpusError, match=r"secret.txt cannot be read \(Permission denied\): type ls -l '.*secret.txt'"
    ):
        read_corpus([source])


@pytest.mark.parametrize(
    "split", [(90, 10), (90, 5, 5, 0), (), (0, 50, 50), (90, -5, 15), (float("nan"), 1, 1), (float("inf"), 1, 1)]
)
def test_a_wrong_split_is_refused(tmp_path: Path, split: tuple[float, ...]) -> None:
    with pytest.raises(CorpusError, match="three shares for training, validation and test.*such as 90, 5, 5"):
        read_corpus([written(tmp_path / "a.txt", LINES)], split)


def test_a_share_that_comes_out_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"the valid text is empty: 1e-05 of 1790 characters is none"):
        read_corpus([written(tmp_path / "a.txt", LINES)], (0.99999, 0.00001, 0))


# ------------------------------------------------------------------ streams

sizes = {"n": st.integers(1, 200), "count": st.integers(1, 12), "window": st.integers(1, 12)}


@given(**sizes)
def test_streams_hold_every_token_once_and_in_order(n: int, count: int, window: int) -> None:
    ids = torch.arange(1, n + 1)
    streams = Streams(ids, count, window)
    read: list[list[int]] = [[] for _ in range(streams.count)]
    for i, part in enumerate(streams):
        tau = len(part.tokens)
        assert tau == window or i == len(streams) - 1
        assert 1 <= tau <= window + 1
        lengths = [tau] * streams.count if part.lengths is None else part.lengths.tolist()
        assert part.lengths is None or (max(lengths) == tau and min(lengths) == tau - 1 >= 1)
        assert streams.tokens_in(i) == sum(lengths) == int((part.tokens > 0).sum())
        for b, length in enumerate(lengths):
            read[b] += part.tokens[:length, b].tolist()
            assert part.tokens[length:, b].eq(0).all()
    assert sum(read, []) == ids.tolist()
    assert streams.count == min(n, count)
    assert {len(read[0]) - len(stream) for stream in read} <= {0, 1}
    assert [len(stream) for stream in read] == sorted(map(len, read), reverse=True)


@given(**sizes, world=st.integers(1, 4))
def test_the_parts_of_all_processes_are_the_whole(n: int, count: int, window: int, world: int) -> None:
    whole = Streams(torch.arange(n + count * world), count * world, window)
    parts = [whole.part(rank, world) for rank in range(world)]
    for i, full in enumerate(whole):
        pieces = [part[i] for part in parts]
        assert torch.cat([piece.tokens for piece in pieces], 1).equal(full.tokens)
        assert {piece.tokens.shape[1] for piece in pieces} == {count}
        lengths = [piece.lengths for piece in pieces if piece.lengths is not None]
        assert full.lengths is None if not lengths else torch.cat(lengths).equal(full.lengths)  # type: ignore[arg-type]
        assert {part.tokens_in(i) for part in parts} == {whole.tokens_in(i)}
    assert {len(part) for part in parts} == {len(whole)}


def test_a_ragged_row_does_not_stand_alone() -> None:
    streams = Streams(torch.arange(11), count=3, window=3)
    assert len(streams) == 1
    assert streams[0].tokens.tolist() == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 0]]
    assert Streams(torch.arange(12), 3, 2)[1].lengths is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda: Streams(torch.arange(0), 2, 2),
            r"ids \[n\] of torch.int64, .* or torch.uint8, n at least 1; got \(0,\)",
        ),
        (lambda: Streams(torch.zeros(3), 2, 2), "got .* of torch.float32"),
        (lambda: Streams(torch.arange(9).view(3, 3), 2, 2), r"\(3, 3\)"),
        (lambda: Streams(torch.arange(9), 0, 2), "count as a whole number of at least 1; got 0"),
        (lambda: Streams(torch.arange(9), 2, 0), "window as a whole number of at least 1; got 0"),
        (lambda: Streams(torch.arange(9), 3, 2).part(0, 2), "3 streams of 9 tokens .* evenly by 2 processes: choose"),
        (lambda: Streams(torch.arange(9), 4, 2).part(2, 2), "rank must be from 0 to 1 with 2 processes; got 2"),
    ],
)
def test_wrong_streams_are_refused(wrong: Callable[[], Streams], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()


def test_there_are_so_many_windows_and_no_more() -> None:
    with pytest.raises(IndexError, match="windows run from 0 to 1; got 2"):
        Streams(torch.arange(11), 3, 2)[2]
