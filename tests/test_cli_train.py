"""The command `train` as people use it: true figures, longer and finer training, and what it says, and where."""

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import WORKS, everything, random_text, said_by, sign, sign_checkpoint, wait_for_step
from typer.testing import CliRunner

from loopfold import cli
from loopfold.text.corpus import python_docs
from loopfold.text.overlap import BLOCK, share_in
from loopfold.text.streams import Streams
from loopfold.training import guards, loop, watching
from loopfold.training.effects import EFFECT
from loopfold.training.folder import RunFolder
from loopfold.training.job import New
from loopfold.training.loop import open_run, train
from loopfold.training.making import make_model
from loopfold.training.options import Options
from loopfold.training.presets import preset
from loopfold.training.schedules import warmup_of
from loopfold.training.watching import Silent

pytestmark = pytest.mark.usefixtures("one_thread")
FLAGS = "--cell elman --hidden-size 8 --streams 3 --window 8 --split 80/10/10 --warmup 0 --dropout 0"
SIZES = FLAGS.split()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,625 characters, of which 1,300 are trained on: 55 steps an epoch, and a ragged end."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(random_text(1625))
    return path


@pytest.fixture(scope="module")
def trained(text: Path) -> Path:
    """A run of two epochs, with rows of the table and the losses of all steps beside it."""
    out = text.parent / "run"
    code, _, said = said_by("train", text, "--out", out, *SIZES, "--epochs", 2)
    assert code == 0
    (text.parent / "said").write_text(said)
    return out


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it in a folder to work in."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "run")
    return Path("run")


def rows(said: str) -> list[list[str]]:
    """The rows of the table."""
    return [line.split() for line in said.splitlines() if re.fullmatch(r"[\s\d.,]+", line)]


def ok(*arguments: object) -> tuple[str, str]:
    code, out, said = said_by(*arguments)
    assert code == 0, said
    return out, said


def refused(message: str, *arguments: object) -> str:
    """One sentence that has this, exit code 2, and nothing printed or changed here."""
    before = everything(Path())
    code, out, said = said_by(*arguments)
    assert (code, out, said.count("\n")) == (2, "", 1), said
    assert said.startswith("loopfold: ")
    assert re.search(message, said), said
    assert everything(Path()) == before
    return said


# ------------------------------------------------------------------ true figures


class Losses(Silent):
    """Notes the loss of each step, and can end the run after one, as a kill does."""

    def __init__(self, end: int = 0) -> None:
        self.end, self.losses = end, dict[int, float]()

    def step(self, step: int, loss: float) -> None:
        self.losses[step] = loss
        if step == self.end:
            raise KeyboardInterrupt


def by_hand(losses: dict[int, float], options: Options, tokens: int, first: int, last: int) -> float:
    """The mean over all tokens of the steps after `first` up to `last`."""
    streams = Streams(torch.zeros(tokens, dtype=torch.int64), options.streams, options.window)
    counts = {step: streams.tokens_in((step - 1) % len(streams)) for step in range(first + 1, last + 1)}
    return sum(losses[step] * counts[step] for step in counts) / sum(counts.values())


def test_the_train_column_is_the_mean_since_the_row_before(text: Path, trained: Path, tmp_path: Path) -> None:
    """Over all its tokens, also those before the last entry of the curve; and where the run was killed on the way."""
    options, tokens = open_run(trained).options, open_run(trained).config["corpus"]["tokens"]
    whole = Losses()
    train(options, tmp_path / "whole", watcher=whole)
    shown = rows((text.parent / "said").read_text())
    assert [row[1] for row in shown] == ["55", "110"]
    for row, (first, last) in zip(shown, [(0, 55), (55, 110)], strict=True):
        assert row[2] == f"{by_hand(whole.losses, options, tokens, first, last):.3f}"
    assert {shown[0][2]} != {f"{entry['train']:.3f}" for entry in open_run(trained).metrics if entry["step"] == 55}

    with pytest.raises(KeyboardInterrupt):
        train(options, tmp_path / "killed", watcher=Losses(53), save_every=0.0)
    with pytest.raises(KeyboardInterrupt):
        loop.resume(tmp_path / "killed", watcher=Losses(101), save_every=0.0)
    said = ok("train", "--resume", tmp_path / "killed")[1]
    assert rows(said)[-1][2] == shown[1][2]
    column = [entry["train_since_valid"] for entry in open_run(tmp_path / "killed").metrics if "valid" in entry]
    means = [by_hand(whole.losses, options, tokens, first, first + 55) for first in (0, 55)]
    assert column == pytest.approx(means, rel=1e-12)
    assert column == [e["train_since_valid"] for e in open_run(tmp_path / "whole").metrics if "valid" in e]


def test_a_run_of_an_older_version_has_a_true_column_too(run: Path, text: Path, tmp_path: Path) -> None:
    """Its entries have no such figure, and its options say warmup 50 however short it is."""
    options, whole = open_run(run).options, Losses()
    train(options, tmp_path / "whole", watcher=whole)
    with pytest.raises(KeyboardInterrupt):
        train(options, tmp_path / "old", watcher=Losses(104), save_every=0.0)
    lines = [json.loads(line) for line in (tmp_path / "old" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("train_since_valid", None)
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    sign(tmp_path / "old", "metrics.jsonl", data)
    shown = rows(ok("train", "--resume", tmp_path / "old")[1])
    tokens = open_run(run).config["corpus"]["tokens"]
    assert shown[-1][2] == f"{by_hand(whole.losses, options, tokens, 55, 110):.3f}"


def test_the_loss_of_the_bar_is_the_mean_of_the_last_fifty_steps(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off a terminal a line tells it, without control codes; here after every step."""
    monkeypatch.setattr(watching, "PRINTED_EVERY", 0.0)
    said = ok("train", text, "--out", tmp_path / "run", *SIZES, "--epochs", 1.2)[1]
    lines = re.findall(r"^step (\d+) of 66, loss ([\d.]+), [\d,]+ tokens/s, (\d:\d\d:\d\d) left$", said, re.MULTILINE)
    assert [int(line[0]) for line in lines] == [*range(1, 67)]
    assert "\x1b" not in said
    assert lines[-1][2] == "0:00:00"
    whole = Losses()
    train(open_run(tmp_path / "run").options, tmp_path / "again", watcher=whole)
    for step, loss, _ in lines:
        last = [whole.losses[k] for k in range(max(1, int(step) - 49), int(step) + 1)]
        assert loss == f"{sum(last) / len(last):.3f}"


def test_a_terminal_has_a_bar_and_no_lines_between(text: Path, tmp_path: Path) -> None:
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    done = subprocess.Popen(
        [sys.executable, "-m", "loopfold", "train", text, "--out", tmp_path / "run", *SIZES, "--epochs", "0.5"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "120"},
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # it has ended
            part = b""
        said += part
        if not part:
            break
    os.close(ours)
    assert done.wait(60) == 0
    assert "━" in said.decode()
    assert "tokens/s  left" in said.decode()
    assert " starting  left" in said.decode()
    assert "nan" not in said.decode()
    assert "step 28 of" not in said.decode()


# ------------------------------------------------------------------ what is said


def test_the_header_names_the_model_and_the_sizes(trained: Path, text: Path) -> None:
    first, second, third, *_ = (text.parent / "said").read_text().splitlines()
    found = open_run(trained)
    parameters = sum(p.numel() for p in found.model.parameters())
    assert first == (
        f"elman 8, {found.vocabulary.size} characters, {parameters} parameters; 110 steps, 55 an epoch of "
        f"{found.config['corpus']['tokens']:,} tokens"
    )
    assert second == f"run folder {trained}"
    assert third.split() == ["epoch", "step", "train", "valid", "perplexity"]


def test_quiet_prints_the_path_and_nothing_else(run: Path, text: Path) -> None:
    """Not even that a text repeats itself."""
    assert ok("train", text, "--out", "new", *SIZES[:-4], "--epochs", 0.1, "-q") == ("new\n", "")
    assert ok("train", text, "--valid", text, "--hidden-size", 4, "--epochs", 0.1, "--out", "q", "-q") == ("q\n", "")
    assert ok("train", "--resume", "run", "-q") == ("run\n", "")


def test_a_finished_run_says_so_and_how_to_go_on(run: Path) -> None:
    before = everything(run)
    out, said = ok("train", "--resume", "run")
    needed = "run is finished: step 110, epoch 2.0. To train longer: loopfold train --resume run --epochs 4\n"
    assert (out, said) == (needed, "")
    assert everything(run) == before


def test_a_run_out_of_patience_says_so_and_how_to_go_on(run: Path, text: Path) -> None:
    high = ["--lr", 30, "--clip", 10, "--optimizer", "sgd", "--patience", 1, "--evaluate-every", 2]
    ok("train", text, "--out", "new", *SIZES, *high, "--epochs", 3)
    out = ok("train", "--resume", "new")[0]
    assert re.fullmatch(
        r"new is finished: step \d+, .* To train longer: loopfold train --resume new --patience 2\n", out
    )
    ok("train", "--resume", "new", "--patience", 2)
    assert open_run("new").options.patience == 2


def test_a_signal_names_the_command_that_goes_on(text: Path, tmp_path: Path) -> None:
    """As the shell reads it; Ctrl-C is tested where runs are resumed."""
    path = tmp_path / "a run"
    process = subprocess.Popen(
        [sys.executable, "-m", "loopfold", "train", text, "--out", path, *SIZES, "--epochs", "999", "--save-every=0"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_step(path, 3, process)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=30)[1]
    step = RunFolder(path).step()
    assert said.endswith(
        f"loopfold: stopped at step {step} of 54945; everything is saved in {path}. "
        f"Go on with: loopfold train --resume '{path}'\n"
    )
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("evaluate_every", [1, 10**6])
def test_a_terminal_that_is_closed_saves_and_stops(evaluate_every: int, text: Path, tmp_path: Path) -> None:
    """The signal comes from the system, and nothing can be written on that terminal any more."""
    pty = pytest.importorskip("pty")
    code = (
        "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from loopfold import cli; "
        "sys.argv[0] = 'loopfold'; cli.main()"
    )
    flags = ["--out", str(tmp_path / "run"), *SIZES, "--epochs", "999", "--save-every", "1e6"]
    flags += ["--evaluate-every", str(evaluate_every)]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code, "train", str(text), *flags],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "120"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    said = b""
    while said.count(b"tokens/s") < 3:
        said += os.read(ours, 4096)
    os.close(ours)
    assert process.wait(60) == 128 + signal.SIGHUP
    assert RunFolder(tmp_path / "run").step()
    assert open_run(tmp_path / "run").standing.unfinished


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs a terminal that can be closed")
def test_a_run_under_nohup_outlives_its_terminal(text: Path, tmp_path: Path) -> None:
    """Which has SIGHUP ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with guards.Interrupts() as interrupts:
            signal.raise_signal(signal.SIGHUP)
            assert interrupts.number == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_cell_that_is_not_compiled_is_told_once(text: Path, tmp_path: Path) -> None:
    """However many layers have it, and without a line of our own code."""
    (tmp_path / "slow.py").write_text(CELLS)
    command: list[Any] = [
        sys.executable,
        "-m",
        "loopfold",
        "train",
        text,
        *SIZES[2:],
        "--cell",
        "slow.py:Slow",
        "--layers",
        "3",
    ]
    for flags, needed in (([], 1), (["-q"], 0)):
        done = subprocess.run(
            [*command, "--epochs", "0.1", *flags], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert done.stderr.count("the cell runs as a Python loop, which is slow: ") == needed
        assert "EngineWarning" not in done.stderr
        assert "Type engine=" not in done.stderr


def test_a_dry_run_tells_all_and_writes_nothing(run: Path, text: Path) -> None:
    before = everything(Path())
    out, said = ok("train", text, *SIZES, "--epochs", 2, "--dry-run")
    header = (text.parent / "said").read_text().splitlines()[0]
    assert said == ""
    assert out.splitlines()[0] == header
    assert re.search(
        r"^about \d+:\d\d:\d\d at [\d,]+ tokens/s, evaluations not counted, [\d.]+ GB of memory$", out, re.M
    )
    assert out.endswith("The run would be in runs/text-elman-1. Nothing was written.\n")
    assert everything(Path()) == before
    refused("run exists already: choose another --out, or --resume it", "train", text, "--out", "run", "--dry-run")
    refused("there is no cell 'lsmt'", "train", text, "--cell", "lsmt", "--dry-run")
    refused("leave out --dry-run", "train", "--resume", "run", "--dry-run")


def test_the_help_has_the_order_of_thought_and_every_default() -> None:
    shown = CliRunner().invoke(cli.app, ["train", "--help"], env={"COLUMNS": "300"}).output
    panels = re.findall(r"╭─ (\w+) ─", shown)
    assert [panel for panel in panels if panel in ("Text", "Model", "Training", "Run")] == [
        "Text",
        "Model",
        "Training",
        "Run",
    ]
    flags = [line for line in shown.splitlines() if re.match(r"│ --(?!help)", line)]
    switches = ("--dry-run", "--tensorboard", "--quiet", "--trust", "--resume", "--text", "--from")
    without = [line.split()[1] for line in flags if "default" not in line and line.split()[1] not in switches]
    assert not [name for name in without if "by default" not in shown.partition(name)[2].partition("│ --")[0].lower()]
    for command in ("evaluate", "generate"):  # what commands share is not put in a panel of another
        assert "─ Run ─" not in CliRunner().invoke(cli.app, [command, "--help"]).output


# ------------------------------------------------------------------ other names


def test_names_that_fingers_know(run: Path, text: Path) -> None:
    flags = "--cell LSTM --hidden 4 --batch-size 5 --lr 0.01 --optimizer SGD --schedule Linear"
    for unit, needed in {"bpe": "subwords", "Char": "characters", "chars": "characters", "word": "words"}.items():
        size = ["--vocabulary-size", 270] if unit == "bpe" else []
        ok("train", text, "--out", unit, *flags.split(), "--epochs", 0.1, "--unit", unit, *size, "-q")
        options = open_run(unit).options
        assert (options.unit, options.cell, options.hidden_size, options.streams) == (needed, "lstm", 4, 5)
        assert (options.learning_rate, options.optimiser, options.schedule) == (0.01, "sgd", "linear")


# ------------------------------------------------------------------ longer, elsewhere


def test_more_epochs(run: Path, text: Path) -> None:
    """It is the run that had as many from where it stood; the change is kept, beside a config that stays as it was."""
    config = (run / "config.json").read_bytes()
    out, said = ok("train", "--resume", run, "--epochs", 3, "--evaluate-every", 50)
    assert "165 steps, 55 an epoch" in said
    assert "going on from step 110" in said
    assert [row[1] for row in rows(said)] == ["150", "165"]
    assert (run / "config.json").read_bytes() == config
    assert json.loads((run / "checkpoint.json").read_text())["changes"] == {"epochs": 3.0, "evaluate_every": 50}
    found = open_run(run)
    assert (found.options.epochs, found.options.evaluate_every, found.metrics[-1]["epoch"]) == (3.0, 50, 3.0)
    rates = {entry["step"]: entry["learning_rate"] for entry in found.metrics}
    assert rates[150] == pytest.approx(found.options.learning_rate * (1 + math.cos(math.pi * 149 / 165)) / 2)
    assert "165, epoch 3.0" in ok("train", "--resume", run)[0]  # and nothing has to be said again


def test_baselines_train_as_long_as_the_run_and_on_its_text(run: Path, text: Path) -> None:
    """Also where a comparison has trained them before."""
    ok("train", text, "--out", "short", *SIZES, "--epochs", 0.1, "-q")
    ok("compare", "short", "--json")
    moved = Path("moved.txt")
    moved.write_text(text.read_text())
    ok("train", "--resume", "short", "--epochs", 0.2, "--text", moved, "-q")
    ok("compare", "short", "--json")
    for kind in ("window", "convolution"):
        baseline = open_run(f"short/baselines/{kind}")
        assert baseline.options.sources == (str(moved.absolute()),)
        assert baseline.metrics[-1]["step"] == open_run("short").metrics[-1]["step"] == 11


def test_fewer_epochs_but_not_fewer_than_were_trained(run: Path, text: Path) -> None:
    refused(
        "run has trained for 2 epochs already: --epochs must be more; got 1.5",
        "train",
        "--resume",
        run,
        "--epochs",
        1.5,
    )
    with pytest.raises(KeyboardInterrupt):
        train(open_run(run).options, "half", watcher=Losses(60), save_every=0.0)
    ok("train", "--resume", "half", "--epochs", 1.5)
    assert open_run("half").metrics[-1]["step"] == 82


def test_a_longer_run_killed_on_the_way_is_the_same(run: Path) -> None:
    shutil.copytree(run, "killed")
    loop.resume("run", epochs=3.0)
    with pytest.raises(KeyboardInterrupt):
        loop.resume("killed", watcher=Losses(111), epochs=3.0)  # before anything but the change was saved
    with pytest.raises(KeyboardInterrupt):
        loop.resume("killed", watcher=Losses(130), save_every=0.0)
    loop.resume("killed")
    names = [RunFolder(Path(path)).checkpoint[kind] for path in ("run", "killed") for kind in ("weights", "state")]
    assert names[:2] == names[2:]
    assert all((run / name).read_bytes() == (Path("killed") / name).read_bytes() for name in names[:2])


def test_another_device(run: Path) -> None:
    refused("device 'gpu' cannot be used", "train", "--resume", run, "--device", "gpu")
    ok("train", "--resume", run, "--device", "cpu:0", "--epochs", 2.1)
    assert open_run(run).options.device == "cpu:0"


def test_what_makes_a_run_another_cannot_change(run: Path) -> None:
    refused("leave out --no-tied, --learning-rate", "train", "--resume", run, "--lr", 1, "--no-tied")
    refused("leave out TEXT. If its text has moved, .* with --text", "train", "text.txt", "--resume", run)
    refused("leave out --from", "train", "--resume", run, "--from", run)
    with pytest.raises(ValueError, match="'seed' makes a run what it is; only epochs, device"):
        loop.resume(run, seed=3)
    for changes, message in (
        ({"seed": 1}, "the changes hold 'seed', which cannot change"),
        ({"epochs": "many"}, "epochs must be a number; got 'many'"),
        ({"epochs": -1}, "epochs must be above 0"),
        ([1], "changes must be an object"),
    ):
        checkpoint = json.loads((run / "checkpoint.json").read_text())
        sign_checkpoint(run, checkpoint | {"changes": changes})
        for command in (("train", "--resume", run), ("generate", run)):
            refused(rf"run/checkpoint.json is damaged: .*{message}", *command)


def test_a_text_that_moved(run: Path, text: Path) -> None:
    """It is found where it is said to be, if it is the same; and from then on without a word."""
    config = json.loads((run / "config.json").read_text())
    config["options"]["sources"] = ["/nowhere/text.txt"]
    sign(run, "config.json", json.dumps(config).encode())
    refused(
        "the text of run was /nowhere/text.txt, which is not there. Name the place where it is with --text",
        "train",
        "--resume",
        run,
    )
    Path("other.txt").write_text(text.read_text().replace("cat", "rat", 1))
    refused("has changed since the run began", "train", "--resume", run, "--text", "other.txt")
    refused("there is no file .*none.txt", "train", "--resume", run, "--text", "none.txt")
    refused("has 1 texts .* and 2 new places", "train", "--resume", run, "--text", "other.txt", "--text", "other.txt")
    refused("is a file or a folder, .* got standard input", "train", "--resume", run, "--text", "-")
    refused("--text goes with --resume", "train", "other.txt", "--text", "other.txt")
    for place in (text, text.parent):  # the file, or the folder that it is in
        ok("train", "--resume", run, "--text", place)
        assert open_run(run).options.sources == (str(text),)
    assert json.loads(ok("evaluate", run, "--json")[0])["tokens"] > 0


def test_several_texts_that_moved(run: Path, text: Path) -> None:
    for folder in ("old", "new"):
        Path(folder).mkdir()
        for name in ("a.txt", "valid.txt"):
            (Path(folder) / name).write_text(text.read_text() + name)
    ok("train", "old/a.txt", "--valid", "old/valid.txt", "--hidden", 4, "--epochs", 0.1, "--out", "two", "-q")
    shutil.rmtree("old")
    shutil.copytree("two", "three")
    refused("which is not there", "train", "--resume", "two")
    refused("valid.txt, .*, is not there; tried .*old/valid.txt", "train", "--resume", "two", "--text", "new/a.txt")
    ok("train", "--resume", "two", "--text", "new")
    ok("train", "--resume", "three", "--text", "new/a.txt", "--text", "new/valid.txt")
    for name in ("two", "three"):
        assert open_run(name).options.valid == str(Path("new/valid.txt").absolute())


# ------------------------------------------------------------------ from another run


def test_from_a_run(run: Path, text: Path) -> None:
    """Its weights, vocabulary and options, on a text with characters that it does not know."""
    Path("new.txt").write_text("Ω" * 20 + text.read_text().replace("mat", "hat"))
    first = open_run(run)
    spy: dict[str, Any] = {}

    class Begin(Silent):
        def begin(self, plan: watching.Plan) -> None:
            spy.update({name: p.detach().clone() for name, p in plan.model.named_parameters()})

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(watching, "Several", lambda watchers: Begin())
        ok("train", "new.txt", "--from", run, "--epochs", 0.5, "--lr", 0.001, "--out", "tuned")
    assert {name: p.tolist() for name, p in first.model.named_parameters()} == {n: p.tolist() for n, p in spy.items()}
    tuned = open_run("tuned")
    assert tuned.vocabulary == first.vocabulary
    assert tuned.options.learning_rate == 0.001
    assert (tuned.options.split, tuned.options.streams, tuned.options.hidden_size) == ((90, 5, 5), 3, 8)
    assert tuned.config["from"]["run"] == str(run.absolute())
    assert tuned.config["from"]["weights"] == RunFolder(run).checkpoint["files"][RunFolder(run).checkpoint["best"]]
    said = ok("train", "new.txt", "--from", run, "--epochs", 0.1, "--split", "95/5/0", "--out", "said")[1]
    assert re.search(r"note: [\d.]+ % of the text's characters are unknown to the vocabulary of run", said)
    assert ok("train", "new.txt", "--from", run, "--dry-run")[0].startswith("elman 8, ")


def test_from_refuses_another_model_in_one_sentence(run: Path, text: Path) -> None:
    refused(
        "--from keeps .* of run; leave out --preset, --unit, --layers",
        "train",
        text,
        "--from",
        run,
        "--layers",
        2,
        "--unit",
        "words",
        "--preset",
        "quick",
    )
    refused("--from needs a text", "train", "--from", run)
    refused("there is no run folder none", "train", text, "--from", "none")
    with pytest.raises(ValueError, match="keeps its model and vocabulary: it has hidden_size=8"):
        train(Options(sources=(str(text),), cell="elman"), start=open_run(run))


def test_from_a_run_with_a_cell_of_its_own(run: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("cells.py").write_text(CELLS)
    ok("train", text, *SIZES[2:], "--cell", "cells.py:Works", "--epochs", 0.2, "--out", "own", "-q")
    Path("cells.py").unlink()
    monkeypatch.setenv("LOOPFOLD_CONFIG", "elsewhere")  # where nobody has trusted anything
    refused("add --trust", "train", text, "--from", "own", "--out", "tuned")
    ok("train", text, "--from", "own", "--epochs", 0.2, "--out", "tuned", "--trust", "-q")
    assert (Path("tuned") / "cell.py").read_text() == CELLS


# ------------------------------------------------------------------ errors in a cell

CELLS = f"""{WORKS}
class Fails(nn.Module):
    def __init__(self, n_in, n):
        raise RuntimeError("out of luck")

class Wide(Works):
    def forward(self, h, x):
        return torch.tanh(self.A(torch.cat([h, x, x], -1)))

class Late(Works):
    def forward(self, h, x):
        if x.abs().sum() > 0 and len(h) == 3 and float(self.A.weight.norm()) != self.norm():
            raise ValueError("the weights have moved")
        return super().forward(h, x)

    def norm(self):
        if not hasattr(self, "first"):
            self.first = float(self.A.weight.norm())
        return self.first

class Slow(Works):
    def forward(self, h, x):
        h = super().forward(h, x)
        return h + 0 * torch.topk(h, 2).values.sum(-1, keepdim=True)
"""


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (
            "cells.py:Fails",
            r"cells.py, line 14, in __init__: RuntimeError: out of luck \(Fails of cells.py could not be",
        ),
        (
            "./cells.py:Wide",
            r"cells.py, line 18, in forward: RuntimeError: mat1 .* \(the first step of ./cells.py:Wide failed\)",
        ),
        (
            "import.py:A",
            r"import.py, line 2, in <module>: ModuleNotFoundError: .*'nowhere'.*\(import.py does not run\)",
        ),
        ("torn.py:A", r"torn.py, line 3: SyntaxError: .*\(torn.py does not run\)"),
    ],
)
def test_an_error_in_a_cell_has_its_file_and_line_first(cell: str, message: str, run: Path, text: Path) -> None:
    Path("cells.py").write_text(CELLS)
    Path("import.py").write_text("\nimport nowhere\n")
    Path("torn.py").write_text("\n\ndef f(:\n")
    refused("^loopfold: " + message, "train", text, *SIZES[2:], "--cell", cell, "--out", "new")
    refused("^loopfold: " + message, "train", text, *SIZES[2:], "--cell", cell, "--dry-run")


def test_an_error_in_a_later_step_tells_which_checkpoint_is_kept(run: Path, text: Path) -> None:
    Path("cells.py").write_text(CELLS)
    flags = [*SIZES[2:], "--cell", "cells.py:Late", "--out", "new", "-q", "--save-every", 0]
    code, out, said = said_by("train", text, *flags)
    line = CELLS[: CELLS.index("the weights have moved")].count("\n") + 1
    needed = f"cells.py, line {line}, in forward: ValueError: the weights have moved (training stopped; the last "
    step = RunFolder(Path("new")).step()
    assert (code, out, said) == (2, "", f"loopfold: {needed}checkpoint, of step {step}, is in new)\n")
    code, _, said = said_by("train", "--resume", "new", "-q")
    assert code in (0, 2)
    assert code == 0 or said.startswith(f"loopfold: new/cell.py, line {line}, in forward: ValueError")


# ------------------------------------------------------------------ warm-up


@pytest.mark.parametrize(("steps", "needed"), [(1, 0), (9, 0), (20, 2), (499, 49), (500, 50), (9999, 50)])
def test_the_warm_up_fits_the_run(steps: int, needed: int) -> None:
    assert warmup_of(Options(), steps) == warmup_of(preset("quick"), steps) == needed
    assert warmup_of(Options(warmup=50), steps) == 50  # as older runs have it


def test_a_warm_up_as_long_as_the_run_is_refused(run: Path, text: Path) -> None:
    flags = [*SIZES[:10], "--epochs", 1, "--out", "new"]
    refused("--warmup 55 is not shorter than the run, which has 55 steps", "train", text, *flags, "--warmup", 55)
    ok("train", text, *flags, "--warmup", 54, "-q")


def test_an_older_run_with_a_long_warm_up_goes_on(run: Path, text: Path) -> None:
    """Bit for bit: fifty steps were in its config, whatever its length. And it can be compared."""
    options = replace(open_run(run).options, warmup=50, epochs=0.5)  # 28 steps
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("loopfold.training.job.New.of", _unchecked())
        train(options, "whole")
        with pytest.raises(KeyboardInterrupt):
            train(options, "killed", watcher=Losses(9), save_every=0.0)
    ok("train", "--resume", "killed", "-q")
    name = RunFolder(Path("whole")).checkpoint["weights"]
    assert (Path("whole") / name).read_bytes() == (Path("killed") / name).read_bytes()
    assert open_run("killed").metrics[-1]["learning_rate"] < options.learning_rate * 28 / 51
    ok("compare", "killed", "--json")


def _unchecked() -> Callable[..., Any]:
    """As a version made runs that did not look at the warm-up."""
    made = New.of
    return lambda options, *rest: replace(made(replace(options, warmup=0), *rest), options=options)


# ------------------------------------------------------------------ flags without effect

WITHOUT = [
    "--span 9",
    "--model window --cell lstm",
    "--model convolution --cell lstm",
    "--model window --layers 2",
    "--model convolution --embedding-size 4",
    "--model window --tied",
    "--model window --one-hot",
    "--model convolution --dropout 0.1 --variational",
    "--dropout 0 --variational",
    "--one-hot --embedding-size 4",
    "--momentum 0.5",
    "--vocabulary-size 300",
    "--unit bytes --vocabulary-size 300",
    "--split 80/10/10 --valid text.txt",
    "--split 80/10/10 --test text.txt",
    "--split 100/0/0 --evaluate-every 3",
    "--split 100/0/0 --patience 3",
]


@pytest.mark.parametrize("flags", WITHOUT)
def test_a_flag_without_effect_is_refused(flags: str, run: Path, text: Path) -> None:
    shutil.copy(text, "text.txt")
    said = refused(" has no effect here: ", "train", "text.txt", "--out", "new", *flags.split())
    assert said.partition(" has no effect")[0].removeprefix("loopfold: ") in flags
    assert "Leave it out" in said


def test_what_a_preset_says_is_never_refused(run: Path, text: Path) -> None:
    """Nor a flag that asks for nothing."""
    small = ["--hidden", 4, "--epochs", 0.05, "--no-variational", "--momentum", 0, "--dry-run"]
    for model in ("window", "convolution", "recurrent"):
        ok("train", text, "--preset", "standard", "--model", model, "--no-tied", *small)
    Options(span=9, momentum=0.5, model="convolution", layers=2)  # nor what Python says


def test_what_has_no_effect_has_none() -> None:
    """The model is the same with other values of each of those that shape it."""

    def made(**changes: Any) -> dict[str, torch.Tensor]:
        base: dict[str, Any] = {"hidden_size": 6, "model": changes.pop("model", "recurrent")}
        return dict(make_model(Options(**(base | changes)), 9).named_parameters())

    values: dict[str, Any] = {
        "cell": "elman",
        "layers": 3,
        "embedding_size": 5,
        "one_hot": True,
        "tied": True,
        "span": 3,
    }
    for model in ("recurrent", "window", "convolution"):
        for name, value in values.items():
            options = Options(model=model, **{name: value})
            has_effect = EFFECT[name][0](options if name != "embedding_size" else Options(model=model))
            before, after = made(model=model), made(model=model, **{name: value})
            same = {k: p.tolist() for k, p in before.items()} == {k: p.tolist() for k, p in after.items()}
            assert same != has_effect, (model, name)


# ------------------------------------------------------------------ text that repeats itself


def naive(text: str, other: str) -> float:
    blocks = [text[i : i + BLOCK] for i in range(0, len(text) - BLOCK + 1, BLOCK)]
    return sum(block in other for block in blocks) / len(blocks) if blocks else 0.0


def test_overlap_is_what_a_search_for_every_block_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where blocks lie across the pieces that are read at a time."""
    rng = random.Random(0)
    for piece in (1 << 20, 256, 300):
        monkeypatch.setattr("loopfold.text.overlap._PIECE", piece)
        for _ in range(60):
            other = "".join(rng.choices("ab日𝄞", k=rng.randrange(90, 2000)))
            parts = []
            for _ in range(rng.randrange(6)):
                start = rng.randrange(len(other))
                copied = other[start : start + rng.randrange(400)]
                parts.append(copied if rng.random() < 0.6 else "".join(rng.choices("abc", k=50)))
            text = "".join(parts)
            assert share_in(text, other) == pytest.approx(naive(text, other), abs=1e-12)


def test_a_held_out_text_that_was_trained_on_is_called_out(run: Path, text: Path) -> None:
    whole = text.read_text()
    Path("part.txt").write_text(whole[400:1000] + "quite another text, with nothing of the kind in it. " * 12)
    flags = ["--hidden", 4, "--epochs", 0.05]
    said = ok("train", text, "--valid", text, "--test", "part.txt", "--out", "new", *flags)[1].splitlines()
    assert said[1] == (
        "note: 100 % of the valid text is in the training text too, so its figures say nothing about new text"
    )
    assert re.fullmatch("note: [45][0-9] % of the test text is in the training text too, so .*", said[2])
    assert "note:" not in ok("train", text, "--out", "plain", *flags)[1]


def test_ordinary_text_raises_no_alarm() -> None:
    docs = python_docs()
    assert share_in(docs[-20_000:], docs[:-20_000]) < 0.03


def test_a_run_that_goes_on_must_have_a_step_to_go(run: Path) -> None:
    """Otherwise it would end without an evaluation, in the middle of an epoch."""
    cut = Options(sources=(str(run.parent.absolute() / "text.txt"),), hidden_size=8, streams=3, window=8)
    Path("text.txt").write_text("the cat sat on the mat. " * 60)

    class Cut(Silent):
        def step(self, step: int, loss: float) -> None:
            if step == 6:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(cut, "cut", watcher=Cut(), save_every=0)
    step, per_epoch = RunFolder(Path("cut")).checkpoint["step"], RunFolder(Path("cut")).standing.steps / 10
    refused(
        "has trained for .* epochs already: --epochs must be more",
        "train",
        "--resume",
        "cut",
        "--epochs",
        step / per_epoch,
    )


def test_fine_tuning_takes_no_patience_from_the_other_run(run: Path) -> None:
    ok("train", "--resume", run, "--patience", 3, "--epochs", 3)
    Path("new.txt").write_text("the cat ran on a mat. " * 60)
    ok("train", "new.txt", "--from", run, "--out", "tuned", "--split", "90/0/10", "--epochs", 1, "-q")
    assert open_run("tuned").options.patience is None


def test_a_rank_that_is_not_of_torchrun(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "3", ""):  # of other programs that use the word
        monkeypatch.setenv("RANK", name)
        assert ok("evaluate", run)[0]
        assert ok("train", "--resume", run)[0]
    monkeypatch.setenv("WORLD_SIZE", "large")
    assert ok("evaluate", run)[0]
    refused("WORLD_SIZE must be the number of processes, .* got 'large'", "train", "--resume", run)
