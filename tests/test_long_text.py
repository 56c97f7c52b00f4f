"""Long text: in a file, in pieces, its tokens in a file too; all of it equal to what a `str` gives, bit for bit."""

import bz2
import gzip
import json
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import loopfold as lf
from loopfold import comparison
from loopfold.cli import base
from loopfold.language import ngram
from loopfold.report.subject import Subject
from loopfold.telling import telling
from loopfold.text import corpus as corpora
from loopfold.text import long, overlap, tokens
from loopfold.text.corpus import CorpusError, _split, read_corpus, read_text
from loopfold.text.long import Gathering, LongText, Text, cuts, lines
from loopfold.text.overlap import share_in
from loopfold.text.streams import Streams

pytestmark = pytest.mark.usefixtures("one_thread")

ODD = "naïve café 日本語のテキスト e\u0301 👩‍👩‍👧 ไทย 1 <unk> x\u2028y\x1c"
TEXT = (
    "".join(f"{n}: the {n % 7} quick\tbrown  foxes {ODD[n % 40 :]}\n" + "\n" * (n % 3) for n in range(60)) + "the end"
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def cache(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache without tokens; compiled kernels are kept in it from test to test."""
    monkeypatch.setenv("LOOPFOLD_CACHE", str(kernels))
    yield kernels
    shutil.rmtree(kernels / "tokens", ignore_errors=True)


@pytest.fixture
def all_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text is long, and is read and cut in tiny pieces."""
    for module in (long, corpora):
        monkeypatch.setattr(module, "LARGE", 64)
    for name, value in {"CHUNK": 7, "LINES": 50}.items():
        monkeypatch.setattr(long, name, value)
    monkeypatch.setattr(corpora, "_READ", 5)


def long_text(text: str, *edges: int) -> LongText:
    """A text that lies in a file, written in pieces that end at `edges`."""
    gathered = Gathering()
    for start, end in zip((0, *edges), (*edges, len(text)), strict=True):
        gathered.add(text[start:end])
    found = gathered.text()
    assert isinstance(found, LongText)
    return found


# ------------------------------------------------------------------ the text


@given(st.text("aé日👩\n", min_size=70, max_size=200), st.data())
def test_a_long_text_is_cut_as_a_str_is(text: str, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long, "LARGE", 64)
        patch.setattr(long, "CHUNK", 7)
        edges = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
        found = long_text(text, *edges)
        assert (len(found), found.size, found.encode()) == (len(text), len(text.encode()), text.encode())
        assert "".join(cuts(found)) == "".join(cuts(text)) == text
        a, b = data.draw(st.tuples(*[st.integers(-220, 220) | st.none()] * 2))
        assert found[a:b] == text[a:b]
        for size in (1, 9, 50):
            patch.setattr(long, "LINES", size)
            assert [*lines(found)] == [*lines(text)] == [*_lines(text, size)]
        start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        part = found.part(start, end)
        assert isinstance(part, str) == (len(text[start:end].encode()) < 64)
        assert part[:] == text[start:end]
        assert long_text(text) == found != long_text(text + "x")
        no_str: Any = found
        for wrong in (lambda: no_str[3], lambda: "x" in no_str, lambda: [*no_str], lambda: no_str[::2]):
            with pytest.raises(TypeError, match=r"is no str: cut what you need, as in text\[:1000\]"):
                wrong()


def _lines(text: str, size: int) -> Iterator[str]:
    """By the words of `lines`: so many characters, and on to the end of the line."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + size) + 1 or len(text)
        yield text[start:end]
        start = end


@given(st.text("ab\né", min_size=300, max_size=600), st.tuples(*[st.sampled_from([0.0, 1.0, 5.0, 90.0])] * 3))
def test_a_long_text_is_split_where_a_str_is(text: str, shares: tuple[float, float, float]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long, "LARGE", 64)
        try:
            wanted = _split(text, shares)
        except CorpusError as error:
            with pytest.raises(CorpusError, match=re.escape(str(error))):
                _split(long_text(text), shares)
            return
        found = _split(long_text(text), shares)
        assert [part[:] for part in found] == [*wanted]
        assert lf.Corpus("x", *found).sha256 == lf.Corpus("x", *wanted).sha256


RAW = {
    "plain.txt": TEXT.encode(),
    "windows.txt": ("\ufeff" + TEXT).replace("\n", "\r\n").encode(),
    "old.txt": TEXT.replace("\n", "\r").encode() + b"\r",
    "mixed.txt": b"a\r\r\n\rb\n" * 30 + b"\xef\xbb\xbf",
    "unended.txt": b"x" * 200,
    "small.txt": b"small",
    "packed.txt.gz": gzip.compress(TEXT.encode()),
    "packed.txt.bz2": bz2.compress(TEXT.encode()),
    "packed.txt.xz": lzma.compress(TEXT.encode()),
}


def test_what_is_read_in_pieces_is_what_is_read_at_once(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for name, raw in RAW.items():
        (tmp_path / name).write_bytes(raw)
    names = [str(tmp_path / name) for name in RAW]
    wanted = [read_text([name]) for name in names]
    together, both = read_text(names), read_corpus(names, (8, 1, 1))
    assert all(isinstance(text, str) for text in wanted)
    request.getfixturevalue("all_long")
    for name, text in zip(names, wanted, strict=True):
        assert read_text([name])[:] == text
    assert isinstance(read_text(names), LongText)
    assert read_text(names)[:] == together
    again = read_corpus(names, (8, 1, 1))
    assert (again.sha256, again.test[:]) == (both.sha256, both.test[:])
    assert isinstance(again.train, LongText)


@pytest.mark.parametrize(
    "raw",
    [
        TEXT.encode() + b"caf\xe9 x",
        TEXT.encode() + "é".encode()[:1],
        b"\0" + TEXT.encode(),
        b"\0" + TEXT.encode() + b"\xff",
        b"%PDF" + TEXT.encode() + b"\xff",
        TEXT.encode("utf-16"),
        b" \n" * 200,
    ],
)
def test_what_is_wrong_with_a_text_is_said_in_the_same_words(
    tmp_path: Path, raw: bytes, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(raw)
    with pytest.raises(CorpusError) as wanted:
        read_text([str(path)])
    request.getfixturevalue("all_long")
    with pytest.raises(CorpusError) as found:
        read_text([str(path)])
    assert str(found.value) == str(wanted.value)


def test_a_packed_text_that_is_damaged_is_called_damaged(tmp_path: Path, all_long: None) -> None:
    packed = bytearray(gzip.compress(os.urandom(3000)))
    packed[-8] ^= 1  # of its checksum: what comes before is no UTF-8 either
    (tmp_path / "a.txt.gz").write_bytes(packed)
    with pytest.raises(CorpusError, match="cannot be decompressed"):
        read_text([str(tmp_path / "a.txt.gz")])


def test_a_text_for_which_there_is_no_file_stays_in_memory(
    cache: Path, all_long: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    found = long_text(TEXT)
    assert not [*cache.glob("tmp*")]  # it has no name
    monkeypatch.setattr(long.tempfile, "TemporaryFile", full)
    assert long_text(TEXT)[:] == found[:] == TEXT
    assert "kept in memory, since no file can be written: [Errno 28] No space left" in caplog.text
    kept = found._kept
    on_disk = kept.file
    monkeypatch.setattr(kept, "file", Full(on_disk))
    kept.write(3, b"end")
    assert on_disk.closed  # and its space is free
    assert LongText(kept, 0, len(TEXT) + 3)[:] == TEXT + "end"
    assert "kept in memory, since its file cannot be written" in caplog.text


class Full:
    """A file on a disk that has no room left."""

    def __init__(self, file: object) -> None:
        self.file = file

    def write(self, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    def __getattr__(self, name: str) -> object:
        return getattr(self.file, name)


# ------------------------------------------------------------------ its tokens


def learned(text: Text) -> list[lf.Vocabulary]:
    return [lf.Characters.of(text), lf.Bytes.of(text), lf.Words.of(text), lf.Subwords.of(text, 300)]


CLOSED = "".join(f"the <unk> of {n % 9} 日本 is <unk>\n" for n in range(40))


@pytest.mark.parametrize("text", [TEXT, CLOSED, TEXT.replace("\n", " "), "x\n" * 90, "日本" * 70])
def test_the_tokens_of_pieces_are_those_of_the_whole(text: str, request: pytest.FixtureRequest) -> None:
    vocabularies = learned(text)
    others = [v.encode(TEXT + CLOSED) for v in vocabularies]
    wanted = [v.encode(text) for v in vocabularies]
    long_lines = long.LINES
    request.getfixturevalue("all_long")
    assert learned(long_text(text))[:3] == vocabularies[:3]
    long.LINES = long_lines  # of subwords: what they are learned from depends on where lines are cut
    assert learned(long_text(text)) == vocabularies
    for vocabulary, whole, other in zip(vocabularies, wanted, others, strict=True):
        for given_, expected in ((text, whole), (TEXT + CLOSED, other)):
            for _ in range(2):  # made, and found
                found = vocabulary.encode(long_text(given_))
                assert found.ids.dtype == {True: torch.uint8, False: torch.uint16}[vocabulary.size <= 256]
                assert found.ids.tolist() == expected.ids.tolist()
                counts = found.unit, found.characters, found.bytes, found.unknown
                assert counts == (expected.unit, expected.characters, expected.bytes, expected.unknown)


def test_integers_are_as_small_as_the_vocabulary_allows() -> None:
    sizes = [2, 256, 257, 65536, 65537, 10**6]
    assert [tokens.smallest(size).name for size in sizes] == ["uint8", "uint8", "uint16", "uint16", "int32", "int32"]
    for size in sizes:
        assert np.array([size - 1]).astype(tokens.smallest(size)).tolist() == [size - 1]


def test_a_token_file_is_made_once_and_again_where_it_is_damaged(
    cache: Path, all_long: None, caplog: pytest.LogCaptureFixture
) -> None:
    text, vocabulary = long_text(TEXT), lf.Characters.of(TEXT)
    wanted = vocabulary.encode(text).ids.tolist()
    (path,) = (cache / "tokens").iterdir()
    made, whole = path.stat().st_ino, path.read_bytes()
    assert vocabulary.encode(text).ids.tolist() == wanted
    assert path.stat().st_ino == made
    for damage in (
        whole[:-1],
        whole[:20],
        b"",
        bytes([whole[0] ^ 1]) + whole[1:],
        whole + b"x",
        whole[:-33] + whole[-32:],
    ):
        path.write_bytes(damage)
        assert vocabulary.encode(text).ids.tolist() == wanted
        assert path.read_bytes() == whole
        assert "is damaged and is made again" in caplog.text
    path.unlink()
    kept = vocabulary.encode(text)
    path.unlink()
    assert kept.ids.tolist() == wanted  # who has it does not lose it
    assert vocabulary.encode(text).ids.tolist() == wanted
    kept.ids.zero_()  # a copy on write: the file stays as it is
    assert path.read_bytes() == whole
    other = lf.Characters(vocabulary.symbols[::-1])
    assert other.encode(text).ids.tolist() == lf.Characters(vocabulary.symbols[::-1]).encode(TEXT).ids.tolist()
    assert len([*(cache / "tokens").iterdir()]) == 2


@pytest.mark.parametrize("unit", [lf.Characters, lf.Words], ids=lambda unit: unit.__name__)
def test_a_forged_token_file_is_made_again(
    unit: Any, cache: Path, all_long: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checksum is right, and what it says is not: more or fewer tokens, or such as the vocabulary has not."""
    monkeypatch.setattr(tokens, "_READ", 64)
    text, vocabulary = long_text(TEXT), unit.of(TEXT)
    wanted = vocabulary.encode(text).ids.tolist()
    (path,) = (cache / "tokens").iterdir()
    whole, count = path.read_bytes(), len(wanted)
    ids, about = whole[:-40].split(b"{")[0], json.loads(b"{" + whole[:-40].split(b"{")[-1])
    size = len(ids) // count
    last = vocabulary.size.to_bytes(size, "little")  # the first number that is no token
    forgeries: list[tuple[bytes, Any]] = [
        (ids, about | {"tokens": 10 * count}),
        (ids, about | {"tokens": count - 1}),
        (ids, about | {"tokens": -count}),
        (ids, about | {"tokens": float(count)}),
        (ids, about | {"unknown": "many"}),
        (ids, {"tokens": count}),
        (ids, [count]),
        (ids[:-size] + last, about),
        (last + ids[size:], about),
    ]
    for forged, said in forgeries:
        line = json.dumps(said).encode()
        data = forged + line + len(line).to_bytes(8, "little")
        path.write_bytes(data + sha256(data).digest())
        caplog.clear()
        assert vocabulary.encode(text).ids.tolist() == wanted
        assert "is damaged and is made again" in caplog.text, said
        assert path.read_bytes() == whole


@pytest.mark.parametrize("trouble", ["a file in its place", "a full disk", "no rename"])
def test_tokens_that_no_file_can_keep_stay_in_memory(
    cache: Path,
    all_long: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
    trouble: str,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    text, vocabulary = long_text(TEXT), lf.Words.of(TEXT)
    if trouble == "a file in its place":
        (cache / "tokens").write_text("")
        request.addfinalizer((cache / "tokens").unlink)
    else:
        owner, name = (tokens.Path, "open") if trouble == "a full disk" else (tokens.os, "replace")
        monkeypatch.setattr(owner, name, full)
    found = vocabulary.encode(text)
    assert found.ids.tolist() == vocabulary.encode(TEXT).ids.tolist()
    assert "the tokens of a long text are kept in memory, since their file cannot be" in caplog.text
    monkeypatch.undo()
    assert not [*cache.glob("tokens/*")]


def test_token_files_that_were_used_last_stay(cache: Path, all_long: None, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache / "tokens"
    folder.mkdir()
    for age, name in enumerate(("new.tokens", "old.tokens", "left.new", "older.tokens")):
        (folder / name).write_bytes(bytes(1000))
        os.utime(folder / name, (time.time() - 90_000 * age, time.time() - 90_000 * age))
    (folder / "dangling.tokens").symlink_to("nowhere")
    monkeypatch.setattr(tokens, "KEPT", len(TEXT) + 1500)
    lf.Characters.of(TEXT).encode(long_text(TEXT))
    assert {path.name for path in folder.iterdir() if len(path.name) < 20} == {"new.tokens", "dangling.tokens"}
    assert len([*folder.iterdir()]) == 3


def test_what_a_stopped_process_has_left_is_removed(cache: Path, all_long: None) -> None:
    """By whoever reads or writes tokens next; what a process is still writing stays, however long it takes."""
    text, vocabulary, folder = long_text(TEXT), lf.Characters.of(TEXT), cache / "tokens"
    slow = """if True:
        import os, sys, time
        from loopfold.text import tokens
        from loopfold.text.tokens import Encoded, np
        def pieces():
            yield Encoded(np.zeros(9, np.int64), 9, 9, 0)
            print("begun", flush=True)
            time.sleep(60)
        tokens.in_file("slow", "character", 5, pieces)
    """
    with subprocess.Popen([sys.executable, "-c", slow], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "begun\n"
        (new,) = folder.glob("*.new")
        os.utime(new, (time.time() - 60, time.time() - 60))
        vocabulary.encode(text)
        assert new.exists()
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        assert new.exists()
    vocabulary.encode(text)  # from its file
    assert not new.exists()
    assert len([*folder.iterdir()]) == 1


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32])
def test_streams_and_figures_of_small_integers_are_those_of_int64(dtype: torch.dtype) -> None:
    ids = torch.randint(9, (103,))
    for count, window in ((1, 5), (4, 7), (200, 3)):
        pairs = zip(Streams(ids, count, window), Streams(ids.to(dtype), count, window), strict=True)
        for a, b in pairs:
            assert b.tokens.dtype == torch.int64
            assert a.tokens.equal(b.tokens)
            assert str(a.lengths) == str(b.lengths)
    models = [lf.NGramLM(ids, 9, 3), lf.SequenceToSequence(lf.GRU(9, 4), outputs=9)]
    for model in models:
        for carried in (True, False):
            how: dict[str, Any] = {"streams": 3, "window": 10, "carried": carried}
            assert lf.perplexity(model, ids, **how) == lf.perplexity(model, ids.to(dtype), **how)
            assert lf.token_losses(model, ids, **how).equal(lf.token_losses(model, ids.to(dtype), **how))
        with pytest.raises(ValueError, match="tokens run from 0 to 200; the model knows 0 to 8"):
            lf.perplexity(model, torch.tensor([0, 200]).to(dtype))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.sampled_from([None, 0, 3]), st.integers(1, 9))
def test_ngrams_of_rising_order_are_those_of_each_order(ids: list[int], boundary: int | None, piece: int) -> None:
    text = torch.tensor(ids)
    wanted = [lf.NGramLM(text, 5, order, boundary) for order in range(6)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram, "_AT_A_TIME", piece)
        patch.setattr(ngram, "LARGE", 40)
        for a, b in zip(wanted, islice(lf.NGramLM.rising(text.to(torch.uint8), 5, boundary), 6), strict=True):
            assert a.entries_by_order == b.entries_by_order
            for x, y in zip(a._orders, b._orders, strict=True):
                assert all(map(np.array_equal, x, y))


# ------------------------------------------------------------------ the same passage in two texts


def test_the_overlap_of_long_texts_is_near_that_of_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    train, new = ("".join(map(chr, generator.integers(97, 123, 300_000))) for _ in range(2))
    for share in (0.0, 0.2, 1.0):
        cut = round(share * 60_000)
        test = train[777 : 777 + cut] + new[: 60_000 - cut]
        monkeypatch.setattr(long, "LARGE", 1 << 30)
        exact = share_in(test, train)
        monkeypatch.setattr(long, "LARGE", 64)
        monkeypatch.setattr(long, "CHUNK", 1000)
        assert share_in(test, long_text(train)) == pytest.approx(exact, abs=0.03)
        assert share_in(long_text(test), long_text(train)) == share_in(test, long_text(train))
    assert share_in("é" * 20, long_text(train)) == share_in("", long_text(train)) == 0


def test_which_blocks_are_taken_does_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "_ONE_IN", 4)
    text = (TEXT * 3)[:2000]
    wanted = np.sort(np.concatenate([*overlap._sampled(text)]))
    assert 200 < len(wanted) < 1000
    for chunk in (1, 50, 104, 999):
        monkeypatch.setattr(long, "CHUNK", chunk)
        assert np.array_equal(np.sort(np.concatenate([*overlap._sampled(text)])), wanted)


# ------------------------------------------------------------------ training


@pytest.fixture
def written(tmp_path: Path) -> str:
    (tmp_path / "a.txt").write_text(TEXT * 3)
    return str(tmp_path / "a.txt")


def small(source: str, unit: str = "characters") -> lf.Options:
    sizes: dict[str, Any] = {"hidden_size": 5, "streams": 8, "window": 25, "epochs": 1, "warmup": 5}
    return lf.Options(sources=(source,), unit=unit, split=(80, 10, 10), **sizes)


def weights(run: lf.Run) -> dict[str, torch.Tensor]:
    return run.model.state_dict()


def same(a: lf.Run, b: lf.Run) -> bool:
    return all(x.equal(weights(b)[name]) for name, x in weights(a).items())


@pytest.mark.parametrize("unit", ["characters", "words"])
def test_a_run_is_the_same_from_memory_and_from_a_file(
    tmp_path: Path, cache: Path, written: str, unit: str, request: pytest.FixtureRequest
) -> None:
    options = small(written, unit)
    wanted = lf.train(options, tmp_path / "memory")
    table = comparison.compare([wanted], neural=False)
    ledger = lf.perplexity(wanted.model, wanted.tokens("train"))
    assert not (cache / "tokens").exists()  # short texts leave nothing behind
    request.getfixturevalue("all_long")
    run = lf.train(options, tmp_path / "file")
    assert isinstance(run.corpus().train, LongText)
    assert run.tokens("train").ids.dtype != torch.int64
    assert same(run, wanted)
    assert run.config["corpus"] == wanted.config["corpus"]
    assert (run.vocabulary, run.curves) == (wanted.vocabulary, wanted.curves)
    assert lf.perplexity(run.model, run.tokens("train")) == ledger
    for a, b in zip(comparison.compare([run], neural=False), table, strict=True):
        assert (a.name, a.parameters, a.ledger) == (b.name, b.parameters, b.ledger)
    assert run.passages(7, "train")[0].equal(wanted.passages(7, "train")[0])
    assert Subject(run).text == Subject(wanted).text


def test_a_run_goes_on_bit_for_bit_whatever_becomes_of_its_token_files(
    tmp_path: Path, cache: Path, written: str, all_long: None
) -> None:
    whole = lf.train(replace(small(written), epochs=2, schedule="constant"), tmp_path / "whole")
    half = lf.train(replace(small(written), epochs=1, schedule="constant"), tmp_path / "half").path
    for trouble in ("none", "gone", "damaged"):
        path = Path(shutil.copytree(half, tmp_path / trouble))
        for file in (cache / "tokens").iterdir():
            if trouble == "gone":
                file.unlink()
            elif trouble == "damaged":
                file.write_bytes(file.read_bytes()[:-100])
        assert same(lf.resume(path, epochs=2), whole)
    Path(written).write_text(TEXT * 3 + "more")
    with pytest.raises(lf.RunError, match=r"the text of a.txt has changed since the run began"):
        lf.resume(tmp_path / "gone", epochs=3)


KILLED = """
import sys
from pathlib import Path
import loopfold as lf
from loopfold.text import corpus, long
from loopfold.training.watching import Silent

corpus.LARGE = long.LARGE = 64

class Slow(Silent):
    def step(self, step, loss):
        if step == 15:
            Path(sys.argv[2]).touch()
            sys.stdin.read()

sizes = {"hidden_size": 5, "streams": 8, "window": 25, "epochs": 1, "warmup": 5}
options = lf.Options(sources=(sys.argv[1],), split=(80, 10, 10), **sizes)
lf.train(options, sys.argv[3], watcher=Slow(), save_every=0)
"""


def test_a_run_that_was_killed_goes_on_from_its_token_files(tmp_path: Path, cache: Path, written: str) -> None:
    whole = lf.train(small(written), tmp_path / "whole")
    there = tmp_path / "there"
    command = [sys.executable, "-c", KILLED, written, str(there), str(tmp_path / "run")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        while not there.exists():
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert len([*(cache / "tokens").glob("*.tokens")]) == 2
    shutil.rmtree(cache / "tokens")
    assert same(lf.resume(tmp_path / "run"), whole)


def test_how_far_a_long_text_is_read_is_told(written: str, tmp_path: Path, all_long: None) -> None:
    told: list[tuple[str, int, int]] = []
    with telling(lambda *what: told.append(what[:3])):
        lf.train(replace(small(written), epochs=0.01, warmup=None), tmp_path / "run")
    kinds = [*dict.fromkeys(doing for doing, _, _ in told)]
    assert kinds == ["reading a.txt", "learning the vocabulary", "encoding the text"]
    for kind in kinds:
        done = [(at, of) for doing, at, of in told if doing == kind]
        assert done[-1][0] <= done[-1][1]
        assert (done[-1][1], done[-1][1]) in done
    told.clear()
    read_text([written])
    assert not told


@pytest.mark.parametrize("live", [False, True])
def test_a_command_shows_how_far_it_has_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], live: bool
) -> None:
    monkeypatch.setattr(sys, "argv", ["loopfold", "train"])
    clock = iter(range(0, 1000, 8))
    monkeypatch.setattr(base.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: live)
    with base._telling():
        for done in (100, 200, 300):
            long.tell("reading a\x1b.txt", done * 10**6, 300 * 10**6)
    assert capsys.readouterr().err.replace("\r\x1b[K", "|") == (
        "|reading a\\x1b.txt: 100 of 300 MB|reading a\\x1b.txt: 200 of 300 MB, 0:00:08 left||"
        if live
        else "reading a\\x1b.txt: 200 of 300 MB, 0:00:08 left\n"
    )
    monkeypatch.setattr(sys, "argv", ["loopfold", "train", "-q"])
    with base._telling():
        long.tell("reading", 1, 1)
    assert capsys.readouterr().err == ""
