"""The commands, as they are typed: what they print, what they leave behind, and what they say to bad input."""

import ast
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from helpers import WORKS
from typer.testing import CliRunner

import loopfold as lf
from loopfold import cli, comparison
from loopfold.text.vocabulary import Characters
from loopfold.training.cells import CELLS as CELL_NAMES
from loopfold.training.loop import open_run
from loopfold.training.run import Run
from loopfold.training.watching import Silent

pytestmark = pytest.mark.usefixtures("one_thread")
RHYME = "the cat sat on the mat, and the rat ran at the cat.\n"
SIZES = "--cell gru --hidden-size 8 --streams 3 --window 16 --epochs 5 --learning-rate 0.03 --warmup 0 --dropout 0"
WHOLE = [*SIZES.split(), "--quiet"]
TINY = [*WHOLE, "--split", "80/10/10"]


class Said(NamedTuple):
    code: int | str | None
    out: str
    err: str


def loopfold(*arguments: object, stdin: str = "") -> Said:
    """What the command does, in this process; an exception that a user would see as a traceback comes through."""
    out, err = io.StringIO(), io.StringIO()
    given = io.TextIOWrapper(io.BytesIO(stdin.encode()))
    patched = mock.patch.multiple(sys, argv=["loopfold", *map(str, arguments)], stdin=given)
    with patched, redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
        cli.main()
    return Said(end.value.code, out.getvalue(), err.getvalue())


def worked(*arguments: object, stdin: str = "") -> str:
    """What a command prints that ends well and has nothing to complain of."""
    said = loopfold(*arguments, stdin=stdin)
    assert (said.code, said.err) == (0, "")
    return said.out


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text and the folder of a run on it."""
    path = tmp_path_factory.mktemp("home")
    (path / "text.txt").write_text(RHYME * 16)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    out = worked("train", path / "text.txt", "--out", path / "run", *TINY)
    torch.set_num_threads(threads)
    assert out == f"{path}/run\n"
    return path


@pytest.fixture
def here(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a copy of the run, and all that a user can get wrong."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(home / "run", tmp_path / "run")
    (tmp_path / "text.txt").write_text(RHYME * 16)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "blank.txt").write_text(" \n\n\t")
    (tmp_path / "tiny.txt").write_text(RHYME[:50])
    (tmp_path / "latin.txt").write_bytes(RHYME.encode() * 9 + b"caf\xe9")
    (tmp_path / "one.txt").write_text("a" * 500)
    (tmp_path / "once.txt").write_text(" ".join(map(str, range(100))))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "page.html").write_text(RHYME)
    (tmp_path / "cells.py").write_text(CELLS)
    return tmp_path


CELLS = f"""{WORKS}
class Fails(nn.Module):
    def __init__(self, n_in, n):
        raise RuntimeError("out of\\nluck")

class Stumbles(Works):
    def forward(self, h, x):
        return h @ self.missing

class Returns(Works):
    def forward(self, h, x):
        super().forward(h, x)
"""


def everything(path: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(path)): p.read_bytes() if p.is_file() else None for p in path.rglob("*")}


# ------------------------------------------------------------------ help

COMMANDS = [command.name or getattr(command.callback, "__name__", "") for command in cli.app.registered_commands]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command: str) -> None:
    for flag in ("--help", "-h"):
        shown = CliRunner().invoke(cli.app, [command, flag], env={"COLUMNS": "200"})
        assert shown.exit_code == 0
        assert "Example" in shown.output
        assert f"loopfold {command} " in shown.output.split("Example")[1]


@pytest.mark.parametrize("command", [[], ["train"]], ids=str)
def test_help_starts_without_torch(command: list[str]) -> None:
    """So that it comes at once; and that of all commands names each."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "loopfold", *command, "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert {"train", "evaluate", "compare", "generate"} <= {*COMMANDS}
    assert command or {*COMMANDS} <= {*re.findall(r"\w+", done.stdout)}
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "loopfold.cli" in imported
    assert not {"torch", "numpy", "safetensors", "tokenizers"} & imported


def test_every_option_of_a_run_has_a_flag_and_every_preset_is_in_the_help() -> None:
    from dataclasses import fields

    from loopfold.training.options import Options
    from loopfold.training.presets import PRESETS, preset

    shown = CliRunner().invoke(cli.app, ["train", "--help"], env={"COLUMNS": "300"}).output
    for option in fields(Options):
        flag = option.name.replace("_", "-")
        assert option.name == "sources" or f"--{flag}" in shown, option.name
        for name in option.metadata["limits"] if isinstance(option.metadata["limits"], tuple) else ():
            assert re.search(rf"\b{name}\b", shown), name
        needed = getattr(preset("quick"), option.name)
        if isinstance(needed, int | float) and not isinstance(needed, bool):
            assert re.search(rf"--{flag}[ ,].*default: {needed}\b", shown), option.name
    assert all(re.search(rf"\b{name}\b", shown) for name in PRESETS)


def test_an_unknown_cell_is_told_all_that_there_are(here: Path) -> None:
    said = loopfold("train", "text.txt", *NEW, "--cell", "lsmt").err
    assert said == f"loopfold: there is no cell 'lsmt'; choose from {', '.join(CELL_NAMES)}. Did you mean 'lstm'?\n"


# ------------------------------------------------------------------ the way of a run


def test_a_run_has_a_name_of_its_own_by_default(here: Path) -> None:
    for n in (1, 2):
        out = worked("train", "text.txt", *TINY, "--epochs", "0.01")
        assert out == f"runs/text-gru-{n}\n"
        assert open_run(f"runs/text-gru-{n}").options.hidden_size == 8


def test_flags_become_options(here: Path) -> None:
    flags = "--cell cells.py:Works --layers 2 --unit words --optimiser sgd --momentum 0.5 --learning-rate 0.1 --clip 2"
    more = (
        "--schedule linear --warmup 3 --patience 4 --evaluate-every 5 --seed 6 --one-hot --variational --preset words"
    )
    texts = ["--valid", "text.txt", "--test", "text.txt", "--no-tied", "--dropout", 0.1]
    worked("train", "text.txt", "--out", "new", *WHOLE, *flags.split(), *more.split(), *texts, "--epochs", "1")
    options = open_run("new").options.as_json()
    whole = str(here / "text.txt")  # whole paths, so that a run can be opened from another folder
    needed = {
        "sources": (whole,),
        "valid": whole,
        "test": whole,
        "layers": 2,
        "unit": "words",
        "optimiser": "sgd",
        "momentum": 0.5,
        "learning_rate": 0.1,
        "clip": 2.0,
        "schedule": "linear",
        "warmup": 3,
        "patience": 4,
        "evaluate_every": 5,
        "seed": 6,
        "one_hot": True,
        "variational": True,
        "tied": False,
        "dropout": 0.1,
        "cell": "new/cell.py:Works",
    }
    assert {name: options[name] for name in needed} == needed


def test_progress_is_shown_unless_quiet_and_not_among_the_results(here: Path) -> None:
    said = loopfold("train", "text.txt", "--out", "new", *SIZES.split(), "--epochs", "0.1")
    assert said.code == 0
    assert said.out.count("\n") == 1
    assert "perplexity" in said.err


def test_a_finished_run_may_be_resumed(here: Path) -> None:
    before = everything(here)
    assert worked("train", "--resume", "run", "--quiet") == "run\n"
    said = "run is finished: step 70, epoch 5.0. To train longer: loopfold train --resume run --epochs 10\n"
    assert worked("train", "--resume", "run") == said
    assert everything(here) == before


def test_text_from_standard_input(here: Path) -> None:
    worked("train", "-", "--out", "new", *TINY, "--epochs", "0.1", stdin=RHYME * 16)
    assert open_run("new").config["corpus"]["sha256"] == open_run("run").config["corpus"]["sha256"]


# ------------------------------------------------------------------ evaluate


def evaluated(*arguments: object, stdin: str = "") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(worked("evaluate", *arguments, "--json", stdin=stdin))
    return found


def test_evaluate_prints_the_ledger(here: Path) -> None:
    ledger = evaluated("run")
    run = open_run("run")
    assert ledger["tokens"] == ledger["characters"] == len(run.corpus().test)
    assert (ledger["unit"], ledger["unknown"], ledger["carried"]) == ("character", 0, True)
    assert ledger["perplexity"] == pytest.approx(math.exp(ledger["nll"] / ledger["tokens"]))
    assert ledger["bits_per_character"] == pytest.approx(ledger["nll"] / ledger["tokens"] / math.log(2))
    assert 1 < ledger["perplexity"] < run.vocabulary.size
    shown = worked("evaluate", "run")
    for line in (
        f"tokens scored +{ledger['tokens']} \\(characters\\), 0 of them unknown",
        "state +carried through the whole text",
        f"perplexity +{ledger['perplexity']:.4f}",
        f"bits per character +{ledger['bits_per_character']:.4f}",
    ):
        assert re.search(line, shown), line


def test_evaluate_on_the_parts_of_the_text(here: Path) -> None:
    run = open_run("run")
    parts = {part: evaluated("run", "--on", part) for part in ("train", "valid", "test")}
    assert sum(ledger["tokens"] for ledger in parts.values()) == len(RHYME) * 16
    best = min(entry["valid"] for entry in run.metrics if "valid" in entry)
    assert parts["valid"]["nats_per_token"] == pytest.approx(best, rel=1e-6)


def test_streams_and_window_change_nothing_unless_cold(here: Path) -> None:
    carried = evaluated("run")["nll"]
    assert evaluated("run", "--streams", 2, "--window", 5)["nll"] == pytest.approx(carried, rel=1e-6)
    cold = evaluated("run", "--cold", "--window", 5)
    assert cold["carried"] is False
    assert cold["nll"] > carried * 1.01
    assert evaluated("run", "--cold", "--window", 10**6)["nll"] == pytest.approx(carried, rel=1e-6)
    assert "started again every 5 tokens" in worked("evaluate", "run", "--cold", "--window", 5)


def test_evaluate_another_text_from_files_or_standard_input(here: Path) -> None:
    other = "a rat sat on a mat: ÄÖ\n"
    (here / "other.txt").write_text(other)
    ledger = evaluated("run", "other.txt")
    assert (ledger["tokens"], ledger["bytes"], ledger["unknown"]) == (23, 25, 3)
    assert evaluated("run", "-", stdin=other) == ledger
    assert evaluated("run", "other.txt", "other.txt")["tokens"] == 46
    assert "other.txt" in worked("evaluate", "run", "other.txt")


# ------------------------------------------------------------------ compare


def test_compare(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uniform, n-grams up to the best order, a window, a convolution, the run: all by one ledger."""
    data = json.loads(worked("compare", "run", "--json"))
    assert json.loads((here / "run" / "comparison.json").read_text()) == data
    rows = {row["name"]: row for row in data["rows"]}
    names = [*rows]
    assert names[:4] == ["uniform", "unigram", "2-gram", "3-gram"]
    assert names[-3:] == ["window", "convolution", "gru 8"]
    assert all(re.fullmatch(r"\d+-gram", name) for name in names[2:-3])

    size = Characters.of(RHYME).size
    assert rows["uniform"]["ledger"]["perplexity"] == pytest.approx(size)
    assert (rows["uniform"]["parameters"], rows["3-gram"]["table"]) == (0, str(size**3))
    assert rows["gru 8"]["table"] is None
    assert rows["unigram"]["ledger"]["perplexity"] < size
    for name in ("gru 8", "window", "convolution"):
        assert rows[name]["ledger"]["perplexity"] < rows["unigram"]["ledger"]["perplexity"], name
    assert len({row["ledger"]["tokens"] for row in rows.values()}) == 1
    assert all(row["tokens_per_second"] > 0 for row in rows.values())
    assert rows["gru 8"]["ledger"] == evaluated("run")
    for kind in ("window", "convolution"):
        baseline = open_run(here / "run" / "baselines" / kind)
        assert (baseline.options.model, baseline.metrics[-1]["epoch"]) == (kind, 5.0)
        assert rows[kind]["parameters"] == sum(p.numel() for p in baseline.model.parameters())

    # A second time the baselines are found, not trained; here for a table to read.
    monkeypatch.setattr(comparison, "train", None)
    before = everything(here / "run" / "baselines")
    monkeypatch.setenv("COLUMNS", "200")
    shown = worked("compare", "run")
    assert everything(here / "run" / "baselines") == before
    for row in rows.values():
        assert re.search(rf"{row['name']} .* {row['ledger']['perplexity']:,.3f} ", shown), row["name"]
    assert f"text.txt, test text: {rows['uniform']['ledger']['tokens']} characters" in shown


def test_a_comparison_that_was_cut_short_goes_on(here: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Cut(Silent):
        def step(self, step: int, loss: float) -> None:
            if step == 20:
                raise KeyboardInterrupt

    def compared() -> dict[str, Any]:
        rows = comparison.compare([open_run("run")], neural=True)
        return {row.name: row.ledger for row in rows}

    with pytest.raises(KeyboardInterrupt):
        comparison.compare([open_run("run")], watcher=lambda name: Cut())
    checkpoint = here / "run" / "baselines" / "window" / "checkpoint.json"
    assert json.loads(checkpoint.read_text())["step"] < 20
    got = compared()
    assert open_run(here / "run" / "baselines" / "window").metrics[-1]["epoch"] == 5.0
    shutil.rmtree(here / "run" / "baselines")
    assert compared() == got


def test_compare_two_runs_on_the_valid_text_without_neural_baselines(here: Path) -> None:
    worked("train", "text.txt", "--out", "other", *TINY, "--cell", "elman", "--layers", "2", "--epochs", "0.5")
    data = json.loads(worked("compare", "run", "other", "--on", "valid", "--no-neural", "--json"))
    names = [row["name"] for row in data["rows"]]
    assert names[-2:] == ["gru 8 (run)", "elman 8 × 2 (other)"]
    assert "window" not in names
    assert not (here / "run" / "baselines").exists()
    assert data["on"] == "valid"
    assert data["rows"][-2]["ledger"]["nll"] == pytest.approx(evaluated("run", "--on", "valid")["nll"], rel=1e-6)


def test_runs_on_other_texts_are_not_compared(here: Path) -> None:
    (here / "text2.txt").write_text(RHYME * 17)
    worked("train", "text2.txt", "--out", "other", *TINY, "--epochs", "0.01")
    before = everything(here)
    refused("other was trained on another text than run: they cannot be compared", "compare", "run", "other")
    assert everything(here) == before


# ------------------------------------------------------------------ generate


def test_generate_writes_many_texts_side_by_side(here: Path) -> None:
    written = worked("generate", "run", "--prompt", "the c", "--length", 40, "--samples", 3)
    texts = written.rstrip("\n").split(f"\n{'─' * 40}\n")
    assert len({*texts}) == 3
    assert all(text.startswith("the c") for text in texts)
    assert worked("generate", "run", "--prompt", "the c", "--length", 40, "--samples", 3) == written
    for flags in (["--greedy"], ["--beam", 2], ["--temperature", 0]):
        refused("find one text, the same each time: leave out --samples", "generate", "run", *flags, "--samples", 2)


def test_generate_goes_on_from_a_prompt(here: Path) -> None:
    written = worked("generate", "run", "--prompt", "the c", "--length", 40)
    assert written.startswith("the c")
    assert len(written) == 5 + 40 + 1
    assert written.endswith("\n")
    assert {*written} <= {*RHYME}


def test_the_same_seed_writes_the_same_text(here: Path) -> None:
    one, same, other = (worked("generate", "run", "--length", 60, "--seed", seed) for seed in (1, 1, 2))
    assert one == same != other


def test_the_likeliest_text(here: Path) -> None:
    greedy = worked("generate", "run", "--length", 30, "--greedy")
    for same in (["--temperature", 0], ["--top-k", 1], ["--beam", 1], ["--top-p", 1e-9]):
        assert worked("generate", "run", "--length", 30, *same) == greedy, same
    assert len(worked("generate", "run", "--length", 30, "--beam", 3)) == 31


# ------------------------------------------------------------------ bad input


def refused(message: str, *arguments: object, stdin: str = "") -> None:
    """Exit code 2, and one line that says what is wrong and what to do; no traceback."""
    said = loopfold(*arguments, stdin=stdin)
    assert (said.code, said.out) == (2, "")
    assert re.fullmatch(r"loopfold: .+\n", said.err), said.err
    assert re.search(message, said.err), said.err


NEW = ("--out", "new", *TINY)
BAD: dict[str, tuple[tuple[object, ...], str]] = {
    "an empty file": (("train", "empty.txt", *NEW), "empty.txt is empty: name a file with text"),
    "a blank file": (("train", "blank.txt", *NEW), "blank.txt has white space alone: name a file with text"),
    "list a file": (("list", "text.txt"), "text.txt is a file: name the folder that your runs are in"),
    "export to no folder": (("export", "run", "--to", "none/a.c"), "no folder none. Make it, or choose another --to"),
    "a tiny file": (("train", "tiny.txt", *NEW), "the training text has 40 characters and needs at least 100"),
    "no file": (("train", "txt.txt", *NEW), "there is no file txt.txt. Did you mean text.txt"),
    "not UTF-8": (("train", "latin.txt", *NEW), "latin.txt is not UTF-8: byte .* type iconv -f latin1"),
    "a folder without text": (("train", "folder", *NEW), "the folder folder has no .txt files, only .html"),
    "one distinct character": (("train", "one.txt", *NEW), "only 1 distinct character: there is nothing to predict"),
    "no word twice": (("train", "once.txt", *NEW, "--unit", "words"), r"only \d distinct word.*nothing to predict"),
    "a part that is empty": (("train", "text.txt", *NEW, "--split", "99.99/0.005/0.005"), "text is empty"),
    "unknown cell": (("train", "text.txt", *NEW, "--cell", "lsmt"), "no cell 'lsmt'; .* Did you mean 'lstm'?"),
    "no cell file": (("train", "text.txt", *NEW, "--cell", "none.py:A"), "there is no file none.py; a cell of your"),
    "no cell class": (("train", "text.txt", *NEW, "--cell", "cells.py"), "say which one is the cell: cells.py:MyCell"),
    "another class": (("train", "text.txt", *NEW, "--cell", "cells.py:A"), "no class 'A'; it has Works, Fails, Stumb"),
    "a cell that fails": (
        ("train", "text.txt", *NEW, "--cell", "cells.py:Fails"),
        "in __init__: RuntimeError: out of luck",
    ),
    "a step that fails": (("train", "text.txt", *NEW, "--cell", "cells.py:Stumbles"), "no attribute 'missing'"),
    "a cell that is no Python": (("train", "text.txt", *NEW, "--cell", "text.txt:A"), "text.txt is not a Python file"),
    "unknown preset": (("train", "text.txt", *NEW, "--preset", "quik"), "no preset 'quik'; .* Did you mean 'quick'?"),
    "unknown unit": (("train", "text.txt", *NEW, "--unit", "wrods"), "no unit 'wrods'; .* Did you mean 'words'?"),
    "unknown model": (("train", "text.txt", *NEW, "--model", "windw"), "no model 'windw'; .* Did you mean 'window'?"),
    "unknown optimiser": (("train", "text.txt", *NEW, "--optimiser", "adam"), "Did you mean 'adamw'?"),
    "unknown schedule": (("train", "text.txt", *NEW, "--schedule", "cos"), "Did you mean 'cosine'?|choose from"),
    "two shares": (
        ("train", "text.txt", *NEW, "--split", "90/10"),
        "--split needs shares .* such as 90/5/5 or 90/10/0; got '90/10'",
    ),
    "no numbers": (("train", "text.txt", *NEW, "--split", "most"), "--split needs shares .*; got 'most'"),
    "no training": (("train", "text.txt", *NEW, "--split", "0/1/1"), "the first above 0, such as 90, 5, 5"),
    "a size of 0": (("train", "text.txt", *NEW, "--hidden-size", 0), "--hidden-size must be from 1 to 1048576; got 0"),
    "a rate that is no number": (
        ("train", "text.txt", *NEW, "--learning-rate", "nan"),
        "--learning-rate needs a finite number; got 'nan'",
    ),
    "a seed too large": (("train", "text.txt", *NEW, "--seed", 2**64), "--seed needs a number that fits in 64 bits"),
    "a seed below 0": (("train", "text.txt", *NEW, "--seed", -1), "--seed must be from 0 to"),
    "tied one-hot vectors": (
        ("train", "text.txt", *NEW, "--tied", "--one-hot"),
        "to tie the readout to: use --no-one-hot or --no-tied.",
    ),
    "few words": (("train", "text.txt", *NEW, "--unit", "words", "--vocabulary-size", 2), "--vocabulary-size of 3 or"),
    "few subwords": (
        ("train", "text.txt", *NEW, "--unit", "subwords", "--vocabulary-size", 9),
        "--vocabulary-size of 256 or more",
    ),
    "a device of no kind": (
        ("train", "text.txt", *NEW, "--device", "gpu"),
        "device 'gpu' cannot be used: .*Use --device cpu",
    ),
    "a taken folder": (
        ("train", "text.txt", "--out", "run"),
        "run exists already: choose another --out, or --resume it",
    ),
    "a taken name": (("train", "text.txt", "--out", "folder"), "folder exists already: .*, or remove it"),
    "below a file": (("train", "text.txt", "--out", "text.txt/new"), "text.txt/new cannot be written: Not a directory"),
    "resume with flags": (("train", "--resume", "run", "--layers", 2, "--clip", 3), "leave out --layers, --clip"),
    "resume untied": (("train", "--resume", "run", "--no-tied", "--one-hot"), "leave out --one-hot, --no-tied"),
    "resume with a preset": (("train", "--resume", "run", "--preset", "quick"), "leave out --preset"),
    "resume with a text": (("train", "text.txt", "--resume", "run"), "leave out TEXT"),
    "resume into": (("train", "--resume", "run", "--out", "new"), "leave out --out"),
    "resume nothing": (("train", "--resume", "none"), "there is no run folder none"),
    "resume a file": (("train", "--resume", "text.txt"), "text.txt is a file, not a run folder: name the folder"),
    "resume no run": (("train", "--resume", "folder"), "folder is not a run folder: it has no config.json"),
    "evaluate nothing": (("evaluate", "none"), "there is no run folder none"),
    "evaluate a text": (("evaluate", "text.txt"), "text.txt is neither a run folder nor a packed run: name a folder"),
    "report on a page": (("report", "folder/page.html"), "page.html is neither a run folder nor a packed run"),
    "generate from several": (("generate", "."), "not a run folder: .* such as run: `loopfold list .` shows them"),
    "evaluate no part": (("evaluate", "run", "--on", "tests"), "no part 'tests'; .* Did you mean 'test'?"),
    "evaluate no file": (("evaluate", "run", "none.txt"), "there is no file none.txt"),
    "evaluate no text": (("evaluate", "run", "empty.txt"), "empty.txt is empty"),
    "evaluate no input": (("evaluate", "run", "-"), "standard input is empty"),
    "draw more than the text": (
        ("draw", "run", "--steps", 5000, "--gradients"),
        "held-out text has only [0-9]+ steps; got --steps 5000",
    ),
    "draw into a folder": (("draw", "lstm", "--out", "folder"), "folder is a folder: name a file, such as folder/pict"),
    "draw into no folder": (
        ("draw", "lstm", "--out", "none/a.svg"),
        "no folder none. Make it, or choose another --out",
    ),
    "draw no steps": (("draw", "lstm", "--steps", 0), "--steps needs a number of at least 1; got '0'"),
    "draw what stumbles": (("draw", "cells.py:Stumbles"), r"loopfold: cells.py, line \d+, in forward: .*'missing'"),
    "draw what returns nothing": (("draw", "cells.py:Returns"), "cells.py:Returns failed: Returns returned a NoneType"),
    "export to a name that C has not": (
        ("export", "run", "--to", "1.c"),
        "a letter first, and no keyword, as in model.c",
    ),
    "export to a folder": (("export", "run", "--to", "folder"), "folder is a folder: name a file, such as folder/mod"),
    "pictures into a file": (("gradients", "run", "--out", "text.txt"), "text.txt is a file: name a folder"),
    "draw what is not fed back": (("draw", "lstm", "--feeding", "free"), "LSTM feeds no output back: leave out --feed"),
    "compare nothing": (("compare", "run", "none"), "there is no run folder none"),
    "compare no part": (("compare", "run", "--on", "train"), "there is no part 'train'; choose from test, valid"),
    "generate from nothing": (("generate", "none"), "there is no run folder none"),
    "an unknown prompt": (("generate", "run", "--prompt", "the ∂og"), "has never seen: '∂', 'g'"),
    "greedy and beam": (("generate", "run", "--greedy", "--beam", 2), "choose one: --greedy, --beam, or a draw"),
    "greedy and warm": (("generate", "run", "--greedy", "--temperature", 0.5), "choose one: --greedy, --beam, or"),
    "beam and top": (("generate", "run", "--beam", 2, "--top-k", 3), "choose one: --greedy, --beam, or a draw"),
    "beam and cold": (("generate", "run", "--beam", 2, "--temperature", 0), "choose one: --greedy, --beam, or a draw"),
    "no probability": (
        ("generate", "run", "--top-p", 2),
        "loopfold: --top-p is a probability above 0 and up to 1; got 2.0",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing(name: str, here: Path) -> None:
    arguments, message = BAD[name]
    before = everything(here)
    refused(message, *arguments)
    assert everything(here) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("arguments", [("train", "text.txt", *NEW), ("generate", "run")], ids=lambda a: str(a[0]))
def test_a_gpu_that_is_not_there(arguments: tuple[str, ...], here: Path) -> None:
    before = everything(here)
    refused(r"device 'cuda' cannot be used: .+\. Use --device cpu\.", *arguments, "--device", "cuda")
    assert everything(here) == before


def test_an_out_folder_that_may_not_be_made(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions are no hindrance to root, who may be running these tests."""

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    before = everything(here)
    monkeypatch.setattr(Path, "mkdir", forbidden)
    refused(r"new cannot be written: Permission denied\. Choose another place with --out", "train", "text.txt", *NEW)
    assert everything(here) == before


def spoil(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((run / "config.json").read_text())
    change(config)
    (run / "config.json").write_text(json.dumps(config))


USES = [("train", "--resume", "run"), ("evaluate", "run"), ("compare", "run"), ("generate", "run")]


@pytest.mark.parametrize("arguments", USES, ids=lambda a: str(a[0]))
def test_a_run_folder_that_cannot_be_used(arguments: tuple[str, ...], here: Path) -> None:
    """By any command, and it stays as it is."""
    good = here / "good"
    (here / "run").rename(good)
    vocabulary = "vocabulary.json"
    cases: list[tuple[Callable[[Path], object], str]] = [
        (lambda run: spoil(run, lambda config: config.update(format=2)), "run has format 2, and this version .* reads"),
        (
            lambda run: spoil(run, lambda config: config["options"].update(layers=2)),
            "run/config.json is damaged or was",
        ),
        (lambda run: (run / "config.json").write_text("{"), "run/config.json is damaged: it is not JSON"),
        (lambda run: (run / "config.json").unlink(), "run is not a run folder: it has no config.json"),
        (lambda run: (run / vocabulary).unlink(), "run is not complete: vocabulary.json is missing"),
        (lambda run: next(run.glob("weights-*")).unlink(), r"run is not complete: weights-\d+.safetensors is missing"),
        (lambda run: (run / "checkpoint.json").unlink(), "run has no checkpoint"),
    ]
    if arguments[0] == "train":  # only training needs it
        state = r"run/state-\d+.safetensors is damaged or was altered"
        cases.append((lambda run: os.truncate(next(run.glob("state-*")), 9), state))
    for change, message in cases:
        shutil.copytree(good, here / "run")
        change(here / "run")
        before = everything(here)
        refused(message, *arguments)
        assert everything(here) == before
        shutil.rmtree(here / "run")


@pytest.mark.parametrize("arguments", [("evaluate", "new"), ("compare", "new", "--no-neural")], ids=lambda a: str(a[0]))
def test_a_part_that_the_run_does_not_have(arguments: tuple[str, ...], here: Path) -> None:
    worked("train", "text.txt", "--out", "new", *TINY, "--split", "90/10/0", "--epochs", "0.01")
    refused(r"the run has no test text, only valid and train: choose with --on", *arguments, "--on", "test")
    assert "valid" in worked(*arguments)  # the best that there is


@pytest.mark.parametrize("held_out", [("--split", "100/0/0"), ("--valid", "text.txt", "--test", "a.txt")], ids=str)
def test_to_draw_gradients_of_a_run_without_held_out_text(held_out: tuple[str, ...], here: Path) -> None:
    """There is no --on to choose another text with."""
    (here / "a.txt").write_text("a")
    worked("train", "text.txt", "--out", "new", *WHOLE, *held_out, "--epochs", "0.01")
    said = loopfold("draw", "new", "--gradients", "--steps", 3).err
    assert "has only 0 steps; got --steps 3. Type fewer, or leave out --gradients." in said
    assert "--on" not in said


@pytest.mark.parametrize("arguments", [USES[0], USES[1], USES[2]], ids=lambda a: str(a[0]))
def test_a_text_that_has_changed(arguments: tuple[str, ...], home: Path, here: Path) -> None:
    good = (home / "text.txt").read_text()
    try:
        (home / "text.txt").write_text(good[1:])
        refused("the text of text.txt has changed since the run began", *arguments)
    finally:
        (home / "text.txt").write_text(good)


def test_tensorboard_that_is_not_installed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = everything(here)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    refused(
        r"TensorBoard is not installed: type pip install 'loopfold\[tensorboard\]'",
        "train",
        "text.txt",
        *NEW,
        "--tensorboard",
    )
    assert everything(here) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "text.txt", *NEW, "--hiden-size", 8), "--hidden-size"),
        (("train", "text.txt", *NEW, "--layers", "two"), "--layers"),
        (("evaluate", "run", "--window", 0), "--window"),
        (("evaluate", "run", "--streams", 0), "--streams"),
        (("generate", "run", "--length", 0), "--length"),
        (("generate", "run", "--temperature", -1), "--temperature"),
        (("generate",), "RUN is missing"),
        (("trian",), "train"),
    ],
    ids=str,
)
def test_flags_that_are_mistyped(arguments: tuple[object, ...], message: str, here: Path) -> None:
    """These are found by typer, which would say so in a box of its own."""
    before = everything(here)
    refused(message, *arguments)
    assert everything(here) == before


def test_the_exit_code_of_a_process(here: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "loopfold", "train", "txt.txt", "--out", "new"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "loopfold: there is no file txt.txt. Did you mean text.txt?\n"


def test_messages_of_the_library_name_no_flags() -> None:
    """They name arguments of Python; the command line spells them as flags."""
    root = Path(cli.__file__).parent.parent
    for path in root.rglob("*.py"):
        if path.parent.name != "cli":
            nodes = [*ast.walk(ast.parse(path.read_text()))]
            documentation = [node.value for node in nodes if isinstance(node, ast.Expr)]
            texts = [node.value for node in nodes if isinstance(node, ast.Constant) and node not in documentation]
            assert not [text for text in texts if re.search(r"--(?!lf-)[a-z]", str(text))], path


def test_a_fault_of_ours_is_not_hidden(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence is for what a user can mend; the rest keeps its traceback."""
    monkeypatch.setattr(Run, "text", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loopfold("evaluate", "run")


def test_a_text_from_standard_input_is_kept_with_the_run(here: Path) -> None:
    worked("train", "-", "--out", "piped", *TINY, "--epochs", "0.2", stdin=RHYME * 16)
    assert (here / "piped" / "stdin.txt").read_text() == RHYME * 16
    assert evaluated("piped")["tokens"] > 0  # nothing is piped in any more
    names = [row["name"] for row in json.loads(worked("compare", "piped", "--json"))["rows"]]
    assert names[-3:] == ["window", "convolution", "gru 8"]
    worked("train", "--resume", "piped", "--quiet")


def test_a_text_that_the_model_does_not_know_is_said_to_be_one(here: Path) -> None:
    (here / "other.txt").write_text("世界你好。\n" * 20)
    assert "of this text is unknown to the model" in worked("evaluate", "run", "other.txt")
    assert "unknown to the model" not in worked("evaluate", "run")
    refused("choose one: another text, or --on", "evaluate", "run", "other.txt", "--on", "valid")


def test_no_figure_of_the_table_is_cut_off(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    worked("train", "text.txt", "--out", "bytes", *TINY, "--epochs", "0.1", "--unit", "bytes")
    shown = worked("compare", "run", "bytes", "--no-neural")
    assert "…" not in shown
    assert "gru 8 (bytes), bytes" in shown  # perplexities of different units cannot be compared


def test_the_version() -> None:
    assert worked("--version") == f"{lf.__version__}\n"
