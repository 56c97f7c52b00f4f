"""The commands that read a run: packed runs, stop texts, losses by token, texts that moved, lists, and any terminal."""

import io
import json
import math
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import everything, sign
from safetensors.torch import load, save
from test_cli import loopfold, refused, worked

import loopfold as lf
from loopfold import cli
from loopfold.evaluation import token_losses
from loopfold.files import archive
from loopfold.language.recurrent import recurrent_lm
from loopfold.training import listing
from loopfold.training.contents import finite
from loopfold.training.folder import RunFolder
from loopfold.training.packed import PackedRun
from loopfold.training.watching import Silent

pytestmark = pytest.mark.usefixtures("one_thread")
RHYME = "the cat sat on the mat, and the rat ran at the cat.\n"
SIZES: dict[str, Any] = {"hidden_size": 8, "streams": 3, "window": 16, "learning_rate": 0.03, "warmup": 0}
CELL = "from loopfold import Elman\n\n\nclass Mine(Elman):\n    pass\n"


class Cut(Silent):
    """Ends a run after some steps, as a kill would."""

    def step(self, step: int, loss: float) -> None:
        if step == 9:
            raise KeyboardInterrupt


def trained(path: Path, **changes: Any) -> Path:
    options: dict[str, Any] = {"sources": (str(path.parent / "text.txt"),), "split": (80, 10, 10), "epochs": 3.0}
    lf.train(lf.Options(**SIZES | options | changes), path)
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every kind: `run` on characters, with a comparison; `words`; `mine` with its own cell; `cut` short."""
    path = tmp_path_factory.mktemp("read")
    (path / "text.txt").write_text(RHYME * 16)
    (path / "mine.py").write_text(CELL)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    trained(path / "run")
    trained(path / "words", unit="words", epochs=1.0)
    trained(path / "mine", cell=f"{path / 'mine.py'}:Mine", epochs=1.0)
    with pytest.raises(KeyboardInterrupt):
        lf.train(lf.Options(sources=(str(path / "text.txt"),), **SIZES), path / "cut", watcher=Cut(), save_every=0)
    worked("compare", path / "run", "--quiet", "--no-neural")
    torch.set_num_threads(threads)
    return path


@pytest.fixture
def here(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to work in. The text stays where it was."""
    for name in ("run", "words", "mine", "cut"):
        shutil.copytree(home / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def as_json(*arguments: object, stdin: str = "") -> Any:
    """What a command prints, which is JSON as the standard has it, and nothing else."""

    def none(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(worked(*arguments, "--json", stdin=stdin), parse_constant=none)


# ------------------------------------------------------------------ packed runs


def test_every_command_takes_a_packed_run_with_the_same_figures(here: Path) -> None:
    out = worked("pack", "run")
    assert re.fullmatch(r"The run is packed in run\.loopfold \(\d+ kB\)\. It does not hold the text\.\n", out)
    (here / "elsewhere").mkdir()
    packed = (here / "run.loopfold").rename(here / "elsewhere" / "bard.loopfold")
    for command in (
        ["evaluate"],
        ["evaluate", "--cold", "--on", "valid", "--window", "7"],
        ["compare", "--no-neural"],
        ["generate", "--samples", "2", "--length", "40"],
    ):
        ours, theirs = loopfold(*command, packed, "--json"), loopfold(*command, "run", "--json")
        came, needed = json.loads(ours.out), json.loads(theirs.out)
        for data in (came, needed):
            data.pop("run", None)
            for row in data.get("rows", []):
                row.pop("tokens_per_second")  # of n-grams, this is how fast they are counted now
        assert came == needed, command
        kept = "the table is not kept for the report: .*bard.loopfold is a packed run, and nothing is written into it"
        assert re.fullmatch(rf"loopfold: {kept}\.\n" if command[0] == "compare" else "", ours.err)
    before = everything(here / "run")
    assert worked("report", packed, "--passage", "the cat").endswith(
        f"{packed.with_name('bard-report.html')}. Open it in a browser.\n"
    )
    page = packed.with_name("bard-report.html").read_text()
    worked("report", "run", "--passage", "the cat")
    assert page.replace(str(packed), "run") == (here / "run" / "report.html").read_text()
    worked("gradients", packed, "--steps", "3")
    assert packed.with_name("bard-pictures").is_dir()
    worked("draw", packed, "--steps", "3", "--gradients", "--out", "a.svg")
    worked("draw", "run", "--steps", "3", "--gradients", "--out", "b.svg")
    assert (here / "a.svg").read_bytes() == (here / "b.svg").read_bytes()
    (here / "run" / "report.html").unlink()
    assert everything(here / "run") == before
    run, same = lf.open_run("run"), lf.open_run(packed)
    assert (same.metrics, same.config, same.standing) == (run.metrics, run.config, run.standing)
    assert (same.options, same.path) == (run.options, packed)
    assert len(same.learning_curve().svg()) > 1000


def test_what_is_packed(here: Path) -> None:
    """Files of the folder, byte for byte, and the same again each time; unpacked, it is a run folder."""
    path = lf.pack_run("run", "a.loopfold")
    folder = RunFolder(here / "run")
    with zipfile.ZipFile(path) as packed:
        names = packed.namelist()
        best = folder.checkpoint["best"]
        assert sorted(names) == sorted(
            ["checkpoint.json", "config.json", "vocabulary.json", "metrics.jsonl", best, "comparison.json"]
        )
        assert all(packed.read(name) == (here / "run" / name).read_bytes() for name in names)
        packed.extractall(here / "again")
    assert as_json("evaluate", "again") == as_json("evaluate", "run")
    assert lf.pack_run("run", "b.loopfold").read_bytes() == path.read_bytes()
    lf.pack_run("words", path)  # a packed run may be replaced
    assert lf.open_run(path).vocabulary.unit == "word"


def test_a_packed_run_is_about_as_large_as_its_weights(tmp_path: Path, home: Path) -> None:
    options = {"hidden_size": 200, "epochs": 0.01, "unit": "subwords", "vocabulary_size": 300}
    (tmp_path / "text.txt").write_text(RHYME * 16)
    run = lf.open_run(trained(tmp_path / "large", **options))
    numbers = sum(p.numel() * p.element_size() for p in run.model.parameters())
    assert numbers < lf.pack_run(run.path).stat().st_size < 1.1 * numbers


def test_a_cell_of_its_own_is_packed_and_asked_about(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lf.pack_run("mine")
    monkeypatch.setenv("LOOPFOLD_CONFIG", str(here / "config"))
    shown = r"cell.py of mine.loopfold \(type unzip -p mine.loopfold cell.py to see it\)"
    refused(rf"would run the code in {shown}\. Read it; if you trust it, add --trust", "generate", "mine.loopfold")
    written = worked("generate", "mine.loopfold", "--length", "30", "--trust")
    assert worked("generate", "mine", "--length", "30") == written, "it is asked once for each content"
    assert lf.open_run("mine.loopfold").options.kind == "Mine"
    assert not (here / "cell.py").exists()


def test_a_packed_run_is_not_trained(here: Path) -> None:
    lf.pack_run("run")
    before = everything(here)
    refused("run.loopfold is a packed run, which can be read but not trained", "train", "--resume", "run.loopfold")
    refused("run.loopfold is a file: name a run folder to pack", "pack", "run.loopfold")
    assert everything(here) == before


def test_where_a_run_is_packed(here: Path) -> None:
    (here / "notes.loopfold").write_text("mine")
    (here / "folder.loopfold").mkdir()
    before = everything(here)
    refused("notes.loopfold is there already and is not a packed run", "pack", "run", "--out", "notes.loopfold")
    refused(
        "folder.loopfold is there already and is no file: choose another --out",
        "pack",
        "run",
        "--out",
        "folder.loopfold",
    )
    refused(r"ends in \.loopfold; got run\.zip", "pack", "run", "--out", "run.zip")
    refused("there is no folder none", "pack", "run", "--out", "none/a.loopfold")
    refused("there is no run folder none", "pack", "none")
    weights = here / "run" / RunFolder(here / "run").checkpoint["best"]
    data = weights.read_bytes()
    weights.write_bytes(data[:-1])
    refused("damaged or was altered", "pack", "run")
    weights.write_bytes(data)
    assert everything(here) == before
    with mock.patch("os.replace", side_effect=OSError(28, "No space left on device")):
        refused(
            r"run.loopfold cannot be written: No space left on device\. Choose another place with --out", "pack", "run"
        )
    assert everything(here) == before


def test_a_run_that_is_training_is_packed_as_one_checkpoint(here: Path) -> None:
    """A new checkpoint comes while the old one is being read."""
    folder, read, times = RunFolder(here / "run"), RunFolder.read, iter(range(3))
    checkpoint, weights = folder.checkpoint, folder.tensors(folder.checkpoint["best"])

    def late(self: RunFolder, name: str) -> bytes:
        data = read(self, name)
        if name == "vocabulary.json" and next(times, None) is not None:
            folder.save(checkpoint["step"] + 1, checkpoint["progress"], weights, {}, best=True)
            checkpoint["step"] += 1
        return data

    with mock.patch.object(RunFolder, "read", late):
        path = lf.pack_run("run")
    assert lf.open_run(path).standing.step == checkpoint["step"]


# ------------------------------------------------------------------ files that are no packed run, or a hostile one


def rezipped(path: Path, change: Callable[[dict[str, bytes]], object]) -> bytes:
    with zipfile.ZipFile(path) as packed:
        files = {name: packed.read(name) for name in packed.namelist()}
    change(files)
    return archive(files)


def compressed(path: Path) -> bytes:
    """What could be far larger than the file is."""
    with zipfile.ZipFile(path) as packed, zipfile.ZipFile(path.with_suffix(".new"), "w", zipfile.ZIP_DEFLATED) as new:
        for name in packed.namelist():
            new.writestr(name, packed.read(name))
    return path.with_suffix(".new").read_bytes()


def doubled(path: Path) -> bytes:
    """A reader sees one file, and we another."""
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as packed:
        packed.writestr("config.json", b"{}")
    return path.read_bytes()


def larger(path: Path) -> bytes:
    """A size that is not so, in the directory at the end."""
    data, size = bytearray(path.read_bytes()), 0xFFFFFF00
    at = data.index(b"PK\x01\x02")
    data[at + 20 : at + 28] = struct.pack("<II", size, size)
    return bytes(data)


def without(start: str) -> Callable[[Path], bytes]:
    return lambda path: rezipped(path, lambda files: [files.pop(name) for name in [*files] if name.startswith(start)])


def holding(name: str, data: bytes) -> Callable[[Path], bytes]:
    return lambda path: rezipped(path, lambda files: files.update({name: data}))


def deeper(files: dict[str, bytes]) -> None:
    files["config.json"] = files["config.json"].replace(b'"layers": 1', b'"layers": 2')


def commented(path: Path) -> bytes:
    """A comment at the end, in which another directory could be."""
    written = io.BytesIO(path.read_bytes())
    with zipfile.ZipFile(written, "a") as archive:
        archive.comment = b"PK"
    return written.getvalue()


HOSTILE: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "with a comment": (commented, "it holds something beside its files"),
    "after something else": (lambda p: b"#!/bin/sh\n" + p.read_bytes(), "it holds something beside its files"),
    "empty": (lambda p: b"", "is not a packed run, or is damaged"),
    "text": (lambda p: b"the cat sat on the mat\n" * 99, "is not a packed run, or is damaged"),
    "weights alone": (lambda p: save({"a": torch.ones(3)}), "is not a packed run, or is damaged"),
    "cut off": (lambda p: p.read_bytes()[:-30], "is not a packed run, or is damaged"),
    "its beginning is missing": (lambda p: p.read_bytes()[40:], "damaged"),
    "compressed": (compressed, "is not a packed run, or is damaged: a file in it is compressed or encrypted"),
    "two of one name": (doubled, "is not a packed run, or is damaged: it has two files of one name"),
    "larger than itself": (larger, "is not a packed run, or is damaged: a file in it is larger than itself"),
    "another file": (holding("../x", b""), r"no run has a file '\.\./x'"),
    "no files": (lambda p: archive({}), "is not a packed run: it has no config.json"),
    "no checkpoint": (without("checkpoint"), "it has no checkpoint.json"),
    "no vocabulary": (without("vocabulary"), "is not complete: vocabulary.json is missing"),
    "no weights": (without("weights"), r"is not complete: weights-\d+.safetensors is missing"),
    "config of another form": (holding("config.json", b"[]"), "config.json is damaged: it must be an object; got"),
    "config of wrong types": (
        holding("config.json", b'{"format": 1, "options": 3, "corpus": []}'),
        "config.json is damaged: options must be an object; got 3",
    ),
    "altered options": (lambda p: rezipped(p, deeper), "config.json is damaged or was altered"),
    "altered checkpoint": (holding("checkpoint.json", b'{"step": []}'), "checkpoint.json is damaged"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_file_that_is_no_packed_run_is_one_sentence(case: str, here: Path) -> None:
    path = lf.pack_run("run", "a.loopfold")
    data, message = HOSTILE[case][0](path), HOSTILE[case][1]
    path.write_bytes(data)
    for command in ("evaluate", "generate"):
        refused(message, command, "a.loopfold")
    assert "a.loopfold  " in worked("list", ".")
    assert [run["state"] for run in as_json("list", ".") if run["path"] == "a.loopfold"] == ["damaged"] or case in (
        "no vocabulary",
        "no weights",
    )


def test_no_altered_byte_goes_unnoticed(here: Path) -> None:
    """Whatever comes out is what went in, or an error in words; also where the archive keeps dates and offsets."""
    path = lf.pack_run("run", "a.loopfold")
    good, rng = path.read_bytes(), random.Random(0)
    needed = [p.clone() for p in lf.open_run(path).model.parameters()]
    refusals = 0
    for _ in range(100):
        data = bytearray(good)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            run = lf.open_run(path)
            assert all(map(torch.equal, run.model.parameters(), needed))
            assert run.options == lf.open_run("run").options
        except lf.RunError:
            refusals += 1
    assert refusals > 30


# ------------------------------------------------------------------ what is needed, and what is not


def test_writing_and_other_texts_need_only_weights_vocabulary_and_options(here: Path) -> None:
    (here / "other.txt").write_text(RHYME)
    commands = (["generate", "run", "--length", "20"], ["evaluate", "run", "other.txt"])
    needed = [worked(*command) for command in commands]
    for name in ("state", "metrics", "comparison"):
        for path in (here / "run").glob(f"{name}*"):
            path.write_bytes(b"torn")
            assert [worked(*command) for command in commands] == needed
            path.unlink()
            assert [worked(*command) for command in commands] == needed
    refused("run is not complete: metrics.jsonl is missing", "compare", "run", "--no-neural")
    refused("run is not complete: metrics.jsonl is missing", "report", "run")
    refused(r"run is not complete: state-\d+.safetensors is missing", "train", "--resume", "run")


def test_a_text_that_moved_is_named_with_text(here: Path, home: Path) -> None:
    """And is found to be the same by its checksum."""
    needed = {command: as_json(*command.split(), "run") for command in ("evaluate", "gradients --steps 4")}
    (here / "other.txt").write_text(RHYME * 16 + "more\n")
    away = (home / "text.txt").rename(here / "moved.txt")
    try:
        for command in (
            "evaluate run",
            "compare run --no-neural",
            "report run",
            "gradients run",
            "draw run --steps 2 --gradients",
        ):
            refused(
                r"text of run was .*text\.txt, which is not there\. Name the place where it is with --text\.",
                *command.split(),
            )
            refused("text of other.txt has changed since", *command.split(), "--text", "other.txt")
            refused("there is no file .*none.txt", *command.split(), "--text", "none.txt")
        for command, data in needed.items():
            assert as_json(*command.split(), "run", "--text", "moved.txt") == data
        worked("report", "run", "--text", "moved.txt")
        names = [row["name"] for row in as_json("compare", "run", "--text", "moved.txt")["rows"]]
        assert names[-3:] == ["window", "convolution", "gru 8"]
        refused("choose one: another text", "evaluate", "run", "other.txt", "--text", "moved.txt")
        worked("generate", "run", "--length", "5")
    finally:
        away.rename(home / "text.txt")


def test_a_packed_run_is_compared_with_what_was_found_before(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The networks are not trained again; where they never were, they are trained and gone afterwards."""
    lf.pack_run("run", "bare.loopfold")
    rows = {row["name"]: row for row in as_json("compare", "run")["rows"]}
    lf.pack_run("run")
    before = everything(here)
    said = loopfold("compare", "bare.loopfold", "--json")
    found = {row["name"]: row for row in json.loads(said.out)["rows"]}
    assert {name: row["ledger"] for name, row in found.items()} == {n: row["ledger"] for n, row in rows.items()}
    monkeypatch.setattr("loopfold.comparison.train", None)
    found = {row["name"]: row for row in json.loads(loopfold("compare", "run.loopfold", "--json").out)["rows"]}
    assert found["window"] == rows["window"]
    assert everything(here) == before


def test_a_table_that_cannot_be_kept_is_shown(here: Path) -> None:
    """Permissions are no hindrance to root, who may be running these tests."""
    with mock.patch("loopfold.training.folder.write_whole", side_effect=OSError(30, "Read-only file system")):
        said = loopfold("compare", "run", "--no-neural")
    assert (said.code, "gru 8" in said.out) == (0, True)
    assert said.err == "loopfold: the table is not kept for the report: run cannot be written: Read-only file system.\n"


def test_baselines_of_a_folder_that_may_not_be_written_are_trained_elsewhere(here: Path) -> None:
    before = everything(here)
    refusing = mock.patch(
        "loopfold.training.table.Comparison.write", side_effect=lf.RunError("run cannot be written: no. ")
    )
    with mock.patch("os.access", side_effect=lambda path, mode: mode != os.W_OK), refusing:
        said = loopfold("compare", "run", "--quiet")
    assert (said.code, "convolution" in said.out) == (0, True), said.err
    assert everything(here) == before


# ------------------------------------------------------------------ unfinished


def test_a_run_that_is_unfinished_is_said_to_be(here: Path) -> None:
    (here / "other.txt").write_text(RHYME)
    steps = lf.open_run("cut").standing.steps
    said = rf"cut is unfinished: step 8 of {steps}"
    for command in (["evaluate", "cut"], ["evaluate", "cut", "other.txt"], ["compare", "cut", "--no-neural"]):
        assert re.search(said, worked(*command)), command
    assert as_json("evaluate", "cut")["unfinished"] == {"step": 8, "steps": steps}
    assert as_json("compare", "cut", "--no-neural")["unfinished"] == {"cut": {"step": 8, "steps": steps}}
    assert loopfold("evaluate", "cut", "--per-token").err == f"loopfold: {said}.\n"
    for command in (["evaluate", "run"], ["compare", "run", "--no-neural"]):
        assert "unfinished" not in worked(*command, "--json") + worked(*command)


@pytest.mark.parametrize(("n", "streams", "window", "epochs"), [(100, 3, 16, 1.0), (101, 7, 1, 0.3), (5, 9, 2, 2.5)])
def test_the_number_of_steps_is_that_of_the_loop(n: int, streams: int, window: int, epochs: float) -> None:
    from loopfold.text.streams import Streams

    options = lf.Options(streams=streams, window=window, epochs=epochs)
    windows = len(Streams(torch.zeros(n, dtype=torch.int64), streams, window))
    assert options.steps(n) == max(1, round(epochs * windows))


def test_patience_that_ended_is_an_end(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(RHYME * 16)
    path = trained(tmp_path / "run", patience=1, evaluate_every=1, learning_rate=3.0, epochs=50.0)
    standing = lf.open_run(path).standing
    assert standing.finished
    assert standing.step < standing.steps
    assert [run.state for run in listing.list_below(tmp_path)] == ["finished"]


# ------------------------------------------------------------------ losses by token


def in_order(model: lf.LanguageModel, ids: torch.Tensor, window: int) -> torch.Tensor:
    """One token after the other; from the beginning again every `window` tokens."""
    found, context = [], model.initial_context(1)
    with torch.no_grad():
        for i, token in enumerate(ids):
            context = model.initial_context(1) if i % window == 0 else context
            scored = model(token.view(1, 1), context)
            found.append(scored.nll.view(()))
            context = scored.context
    return torch.stack(found)


@pytest.mark.parametrize("n", [1, 2, 31, 64, 101])
def test_losses_by_token_are_those_of_one_after_the_other(n: int) -> None:
    model = recurrent_lm(7, [lf.LSTM(3, 4)], 3, 0.0).double()
    ids = torch.randint(0, 7, (n,))
    for streams, window in ((1, 1), (3, 7), (32, 128), (5, n)):
        for carried in (True, False):
            came = token_losses(model, ids, streams=streams, window=window, carried=carried)
            needed = in_order(model, ids, n if carried else window)
            torch.testing.assert_close(came, needed, rtol=1e-9, atol=1e-9)
            ledger = lf.perplexity(model, ids, streams=streams, window=window, carried=carried)
            assert math.isclose(math.fsum(came.tolist()), ledger.nll, rel_tol=1e-12)
    with pytest.raises(ValueError, match=r"needs one text \[n\]; got \(3, 2\)"):
        token_losses(model, torch.zeros(3, 2, dtype=torch.int64))


@pytest.mark.parametrize("flags", [[], ["--cold", "--window", "5"], ["--on", "valid", "--streams", "2"]], ids=str)
@pytest.mark.parametrize("name", ["run", "words"])
def test_evaluate_per_token(name: str, flags: list[str], here: Path) -> None:
    ledger = as_json("evaluate", name, *flags)
    lines = [line.split("\t") for line in worked("evaluate", name, *flags, "--per-token").splitlines()]
    assert [int(line[0]) for line in lines] == [*range(ledger["tokens"])]
    assert math.isclose(math.fsum(float(line[2]) for line in lines), ledger["nll"], rel_tol=1e-9)
    run = lf.open_run(name)
    text = run.text(flags[1] if "--on" in flags else None)
    tokens = [json.loads(line[1]) for line in lines]
    if isinstance(run.vocabulary, lf.Words):
        words = [word for line in text.splitlines() for word in [*line.split(), "\n"]]
        assert tokens == [word if word in ("\n", *run.vocabulary.words) else "<unk>" for word in words]
    else:
        assert "".join(tokens) == text
    data = as_json("evaluate", name, *flags, "--per-token")
    assert [[str(t["index"]), json.dumps(t["token"]), repr(t["nats"])] for t in data.pop("per_token")] == lines
    assert data == ledger


def test_tokens_of_bytes_can_be_read() -> None:
    assert [lf.Bytes().token(i) for i in (0x61, 0xC3)] == ["a", "\\xc3"]
    subwords = lf.Subwords.of(RHYME * 9, 270)
    assert "".join(map(subwords.token, subwords.encode(RHYME).ids.tolist())) == RHYME


# ------------------------------------------------------------------ stop texts


def ended(text: str, stops: list[str]) -> str:
    """Character by character: a text ends as soon as a stop text is whole; the longest of those that are."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))]
    return text


VOCABULARIES: dict[str, lf.Vocabulary] = {
    "characters": lf.Characters.of("abc "),
    "bytes": lf.Bytes(),
    "words": lf.Words(("a", "b", "ab", "c")),
    "subwords": lf.Subwords.of("abc abcab cab é " * 40, 264),
}


@pytest.mark.parametrize("unit", VOCABULARIES)
def test_a_text_ends_at_the_first_stop_text(unit: str) -> None:
    """Wherever tokens and blocks of them begin and end; of no stop text is any part shown."""
    vocabulary, rng = VOCABULARIES[unit], random.Random(unit)
    model = recurrent_lm(vocabulary.size, [lf.GRU(4, 6)], 4, 0.0)
    ended_early = 0
    for seed in range(12):
        full = lf.generate(model, vocabulary, "ab", 90, lf.Sample(torch.Generator().manual_seed(seed)))
        cuts = [sorted(rng.sample(range(len(full)), 2)) for _ in range(3)]
        stops = [full[a : min(b, a + rng.choice([1, 2, 9]))] for a, b in cuts] + ["never"]
        shown: list[str] = []
        pick = lf.Sample(torch.Generator().manual_seed(seed))
        came = lf.generate(model, vocabulary, "ab", 90, pick, shown.append, stop=stops)
        assert came == ended(full, stops) == "".join(shown)
        ended_early += came != full
    assert ended_early > 6


def test_of_many_texts_each_ends_by_itself() -> None:
    vocabulary = VOCABULARIES["characters"]
    model = recurrent_lm(vocabulary.size, [lf.GRU(4, 6)], 4, 0.0)
    picks = [lf.Sample(torch.Generator().manual_seed(3)) for _ in range(2)]
    full = lf.generate(model, vocabulary, "", 200, picks[0], samples=7)
    came = lf.generate(model, vocabulary, "", 200, picks[1], samples=7, stop=["abc", "cc"])
    assert came == [ended(text, ["abc", "cc"]) for text in full]
    assert len({*map(len, came)}) > 3
    with pytest.raises(ValueError, match="stop is a list of texts, none of them empty; got 'abc'"):
        lf.generate(model, vocabulary, stop="abc")


def test_generate_stops(here: Path) -> None:
    full = worked("generate", "run", "--prompt", "the", "--length", "80")
    assert (
        worked("generate", "run", "--prompt", "the", "--length", "80", "--stop", "at")
        == "the" + ended(full[3:-1], ["at"]) + "\n"
    )
    assert worked("generate", "run", "--prompt", "the", "--length", "80", "--stop", "no such", "--stop", "%") == full
    data = as_json("generate", "run", "--prompt", "the", "--length", "80", "--stop", "at", "--samples", "3")
    assert all("at" not in sample["text"] for sample in data["samples"])
    assert worked("generate", "run", "--length", "80", "--greedy", "--stop", "t") == worked(
        "generate", "run", "--length", "80", "--beam", "1", "--stop", "t"
    )
    refused("--stop needs some text to end at", "generate", "run", "--stop", "")


# ------------------------------------------------------------------ prompts, JSON


def test_a_prompt_from_standard_input(here: Path) -> None:
    needed = worked("generate", "run", "--prompt", "the c\n", "--length", "30")
    assert worked("generate", "run", "--prompt", "-", "--length", "30", stdin="the c\n") == needed
    refused("standard input is empty: leave out --prompt to begin", "generate", "run", "--prompt", "-")
    assert worked("generate", "run", "--prompt", "-", "--length", "3", stdin="\n")


def test_generate_prints_json(here: Path) -> None:
    text = worked("generate", "run", "--prompt", "the c", "--length", "30", "--seed", "4")[5:-1]
    data = as_json("generate", "run", "--prompt", "the c", "--length", "30", "--seed", "4")
    (sample,) = data["samples"]
    assert (data["prompt"], sample["text"], sample["tokens"], sample["stopped"]) == ("the c", text, 30, False)
    assert (data["options"]["length"], data["options"]["seed"], data["options"]["top_k"]) == (30, 4, None)
    run = lf.open_run("run")
    ids = run.vocabulary.encode("the c" + text).ids
    needed = -float(token_losses(run.model, ids)[5:].sum())
    assert sample["log_probability"] == pytest.approx(needed, rel=1e-6)
    several = as_json("generate", "run", "--length", "300", "--samples", "3", "--stop", "ra")["samples"]
    for sample in several:
        ids = run.vocabulary.encode(sample["text"] + ("ra" if sample["stopped"] else "")).ids
        assert len(ids) == sample["tokens"]
        needed = -float(token_losses(run.model, ids).sum())
        assert sample["log_probability"] == pytest.approx(needed, rel=1e-6)


def test_unknown_words_of_a_prompt_are_read_as_unk(here: Path) -> None:
    said = loopfold("generate", "words", "--prompt", "the dog sat on the frog", "--length", "5")
    assert said.err == "loopfold: not in the vocabulary, so read as <unk>: 'dog', 'frog'.\n"
    assert said.out.startswith("the dog sat on the frog ")
    same = worked("generate", "words", "--prompt", "the <unk> sat on the <unk>", "--length", "5")
    assert said.out.removeprefix("the dog sat on the frog") == same.removeprefix("the <unk> sat on the <unk>")
    assert as_json("generate", "words", "--prompt", "the dog", "--length", "5")["unknown"] == ["dog"]
    refused("the prompt holds what the model has never seen: 'x'", "generate", "run", "--prompt", "x")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_one_sentence(bad: float, here: Path) -> None:
    name = RunFolder(here / "run").checkpoint["best"]
    tensors = load((here / "run" / name).read_bytes())
    for tensor in tensors.values():  # all of them: an infinite bias alone closes gates, and the loss stays finite
        tensor.view(-1)[1:] = bad
    sign(here / "run", name, save(tensors))
    lf.pack_run("run")
    (here / "other.txt").write_text(RHYME)
    for run in ("run", "run.loopfold"):
        for command in (
            ["generate", run],
            ["generate", run, "--beam", "2"],
            ["evaluate", run, "other.txt"],
            ["evaluate", run],
        ):
            refused("the weights of .* are not finite numbers: its training diverged", *command)
    data = json.loads(worked("compare", "run", "--no-neural", "--json"), parse_constant=None)
    assert data["rows"][-1]["ledger"]["perplexity"] is None
    worked("compare", "run", "--no-neural")


def test_outputs_that_are_no_numbers_are_one_sentence(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored = lf.RecurrentLM.forward

    def no_numbers(*given: Any) -> Any:
        found = scored(*given)
        return found._replace(nll=found.nll * math.nan)

    monkeypatch.setattr(lf.RecurrentLM, "forward", no_numbers)
    for flags in ([], ["--per-token"], ["--json"], ["--cold"]):
        refused("the outputs of run are not finite numbers", "evaluate", "run", *flags)


def test_a_beam_over_outputs_that_are_no_numbers() -> None:
    model = recurrent_lm(5, [lf.GRU(3, 4)], 3, 0.0)
    with torch.no_grad():
        model.network.c.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="not a finite number"):
        lf.generate(model, lf.Characters("abcd"), length=3, pick=lf.Beam(2))


def test_no_file_holds_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    """They are null, by one rule; and a curve is read with them."""
    assert finite({"a": [1.0, -math.inf, {"b": math.nan}], "c": (2, "x", None, True)}) == {
        "a": [1.0, None, {"b": None}],
        "c": [2, "x", None, True],
    }
    about = {"name": "text", "sha256": "0", "tokens": 9}
    with RunFolder.create(
        tmp_path / "run", lf.Options(), about, {"kind": "bytes"}, {"best": math.inf}, {"a": torch.ones(1)}
    ) as run:
        run.log({"step": 1, "epoch": 0.5, "train": math.inf, "valid": math.nan, "seconds": 1.0})
        run.save(1, {"best": math.nan}, {"a": torch.ones(1)}, {}, best=True)
        run.write_json("comparison.json", {"nll": math.inf})
        (entry,) = run.metrics
    assert math.isnan(entry["train"])
    for path in (tmp_path / "run").iterdir():
        assert not re.search(rb"NaN|Infinity", path.read_bytes()), path


# ------------------------------------------------------------------ list


def test_the_list_of_runs(here: Path) -> None:
    (here / "runs" / "deep" / "er").mkdir(parents=True)
    (here / "runs" / "notes.txt").write_text("no run")
    (here / "runs" / "model").mkdir()
    (here / "runs" / "model" / "config.json").write_text("{}")  # of something else
    for name in ("run", "cut"):
        shutil.move(here / name, here / "runs" / "deep" / name)
    shutil.move(here / "words", here / "runs" / "words")
    lf.pack_run("runs/deep/cut", "runs/deep/er/sent.loopfold")
    shutil.copytree(here / "runs" / "words", here / "runs" / "torn")
    (here / "runs" / "torn" / "config.json").write_text("{")
    (here / "runs" / "bad.loopfold").write_bytes(b"x")
    found = {run["path"]: run for run in as_json("list")}
    states = {path.removeprefix("runs/"): run["state"] for path, run in found.items()}
    assert states == {
        "bad.loopfold": "damaged",
        "deep/cut": "stopped",
        "deep/er/sent.loopfold": "stopped",
        "deep/run": "finished",
        "torn": "damaged",
        "words": "finished",
    }
    assert [*found] == sorted(found)
    run = found["runs/deep/run"]
    best = min(entry["valid"] for entry in lf.open_run("runs/deep/run").metrics if "valid" in entry)
    assert run["perplexity"] == pytest.approx(math.exp(best))
    assert (run["model"], run["unit"], run["text"], run["step"]) == ("gru 8", "characters", "text.txt", run["steps"])
    assert found["runs/bad.loopfold"]["model"] is None
    lines = worked("list").splitlines()
    assert len(lines) == 1 + len(found)
    assert re.fullmatch(
        r"runs/deep/cut +gru 8 +characters +text.txt +8/\d+ +stopped +20\d\d-\d\d-\d\d \d\d:\d\d", lines[2]
    )
    assert re.fullmatch(r"runs/torn +damaged", lines[5])
    assert worked("list", "runs/words").splitlines()[1].startswith("runs/words ")
    assert as_json("list", "runs/model") == []
    assert loopfold("list", "runs/model").err == "loopfold: there are no runs in runs/model.\n"
    refused("there is no folder none: name the one that your runs are in", "list", "none")


def test_a_run_that_is_training_is_listed_as_that(here: Path) -> None:
    folder = RunFolder(here / "cut")
    with folder.locked():
        assert [run["state"] for run in as_json("list", "cut")] == ["training"]
    assert [run["state"] for run in as_json("list", "cut")] == ["stopped"]
    (here / "cut" / "checkpoint.json").unlink()
    assert [run["state"] for run in as_json("list", "cut")] == ["damaged"]


def test_a_look_at_a_run_does_not_keep_it_from_training(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks holds the lock for a moment, and just then another begins."""
    import fcntl

    held = os.open(here / "cut", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    monkeypatch.setattr("loopfold.training.folder.time.sleep", lambda seconds: os.close(held))
    with RunFolder(here / "cut").locked():
        pass


def test_a_list_needs_no_torch(here: Path) -> None:
    lf.pack_run("run")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "loopfold", "list", "."], capture_output=True, text=True, check=True
    )
    assert len(done.stdout.splitlines()) == 6
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not {"torch", "numpy", "safetensors", "tokenizers", "rich.table"} & imported


# ------------------------------------------------------------------ terminals and pipes


@pytest.fixture(scope="module")
def accented(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a text that ASCII cannot write, of two layers."""
    path = tmp_path_factory.mktemp("accented")
    (path / "text.txt").write_text("é—ß œ\n" * 60)
    return trained(path / "run", layers=2, hidden_size=4, epochs=0.5)


def in_ascii(*arguments: object) -> str:
    """What is printed where only ASCII can be written."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    patched = mock.patch.multiple(sys, argv=["loopfold", *map(str, arguments)], stdout=out)
    with patched, pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    out.flush()
    assert isinstance(out.buffer, io.BytesIO)
    return out.buffer.getvalue().decode("ascii")


def test_a_terminal_that_writes_only_ascii(accented: Path) -> None:
    """The first by a real process."""
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "loopfold", "compare", str(accented), "--no-neural"]
    done = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert done.stderr == b""
    table = done.stdout.decode("ascii")
    assert "|V|^n" in table
    assert "gru 4 x 2" in table
    assert re.search(r"^\+-+\+$", table, re.MULTILINE)
    written = in_ascii("generate", accented, "--length", 60, "--samples", 2)
    assert {"\\u2014", "\\xe9"} & {*re.findall(r"\\u\w{4}|\\x\w\w", written)}
    assert f"\n{'-' * 40}\n" in written
    assert "\\u" in in_ascii("generate", accented, "--length", 60)
    assert "gru 4 x 2" in in_ascii("list", accented.parent)
    assert "distance d = t - k" in in_ascii("gradients", accented, "--steps", 4)
    assert "tokens scored" in in_ascii("evaluate", accented)
    assert json.loads(in_ascii("generate", accented, "--length", 60, "--json"))["samples"][0]["text"].isascii() is False


@pytest.mark.parametrize("command", ["generate run --length 100000", "evaluate run long.txt --per-token"])
def test_a_pipe_that_is_closed_ends_it_without_a_word(command: str, home: Path) -> None:
    (home / "long.txt").write_text(RHYME * 200)  # whose losses are more than a pipe holds
    process = subprocess.Popen(
        [sys.executable, "-m", "loopfold", *command.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=home,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(3)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_a_stored_run_is_a_folder_or_a_file() -> None:
    """One interface: neither has a way of reading of its own."""
    own = {"holds", "read", "shown", "beside", "write_json", "training", "saved_at"}
    for kind in (RunFolder, PackedRun):
        assert own <= {*vars(kind)}
        assert not {"config", "options", "vocabulary", "checkpoint", "metrics", "tensors", "check"} & {*vars(kind)}


# ------------------------------------------------------------------ what one part of the workbench does to another


def test_baselines_of_a_run_that_began_with_another_have_its_vocabulary(here: Path) -> None:
    """The same token must be the same number in all models of a table."""
    Path("other.txt").write_text("a bat sat at a tea; a mat at that!\n" * 30)
    lf.train(lf.Options(sources=("other.txt",), **SIZES | {"epochs": 6.0}), "tuned", start=lf.open_run("run"))
    rows = {row["name"]: row["ledger"] for row in as_json("compare", "tuned")["rows"]}
    for kind in ("window", "convolution"):
        run = lf.open_run(f"tuned/baselines/{kind}")
        assert run.vocabulary == lf.open_run("tuned").vocabulary
        assert rows[kind]["nll"] == pytest.approx(lf.perplexity(run.model, run.tokens("test")).nll)
        assert rows[kind]["perplexity"] < rows["uniform"]["perplexity"]


def test_baselines_follow_what_changed_of_a_run_and_a_packed_one_shows_none_that_are_old(here: Path) -> None:
    shutil.copytree("run", "longer")
    worked("compare", "longer", "--quiet")
    before = {
        row["name"]: row["ledger"]["nll"] for row in json.loads(Path("longer/comparison.json").read_text())["rows"]
    }
    lf.resume("longer", epochs=6.0, evaluate_every=7)
    worked("pack", "longer")
    packed = {
        row["name"]: row["ledger"]["nll"]
        for row in json.loads(loopfold("compare", "longer.loopfold", "--json").out)["rows"]
    }
    assert packed["window"] != pytest.approx(before["window"])
    worked("compare", "longer", "--quiet")
    found = lf.open_run("longer/baselines/window")
    assert (found.options.evaluate_every, found.metrics[-1]["epoch"]) == (7, 6)


def test_a_pipe_among_the_runs_is_not_waited_for(here: Path) -> None:
    os.mkfifo("pipe.loopfold")
    assert "run" in worked("list", ".")


def test_an_error_in_the_cell_of_a_run_is_told_with_its_place(here: Path) -> None:
    Path("bad.py").write_text(
        "import os\nfrom loopfold import Elman\nclass Bad(Elman):\n    def forward(self, h, x):\n"
        "        if 'BOOM' in os.environ:\n            raise KeyError('boom')\n        return super().forward(h, x)\n"
    )
    Path("text.txt").write_text(RHYME * 16)
    trained(here / "bad", cell=f"{here / 'bad.py'}:Bad", epochs=1.0)
    with mock.patch.dict(os.environ, BOOM="1"):
        for command in (["evaluate"], ["generate"], ["compare", "--no-neural"]):
            refused(r"bad/cell.py, line 6, in forward: KeyError: 'boom'", *command, "bad")


def test_names_that_a_terminal_would_obey(here: Path) -> None:
    config = json.loads(Path("run/config.json").read_text())
    config["corpus"]["name"] = "\x1b]0;name\x07text"
    sign(Path("run"), "config.json", json.dumps(config).encode())
    for command in (["compare", "run", "--no-neural"], ["list", "."]):
        assert "\x1b" not in worked(*command, "--quiet" if command[0] == "compare" else "--")
