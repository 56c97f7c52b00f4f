"""A run that was killed goes on bit for bit; its folder is whole at every moment, and what is wrong is found."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import flags_of, random_text, wait_for_step

from loopfold import cli
from loopfold.training import watching
from loopfold.training.folder import RunFolder, _flush
from loopfold.training.loop import open_run, resume, train
from loopfold.training.options import Options
from loopfold.training.stored import RunError
from loopfold.training.watching import Silent

pytestmark = pytest.mark.usefixtures("one_thread")

# Two layers, dropout of all kinds, penalties, bfloat16, windows that vary, a ragged last one, evaluations in the middle
# of an epoch, mean weights in the end: 36 steps an epoch, 72 in all.
CHOICES: dict[str, Any] = {
    "cell": "lstm",
    "hidden_size": (8, 7),
    "dropout": 0.3,
    "variational": True,
    "output_dropout": 0.2,
    "input_dropout": 0.1,
    "embedding_dropout": 0.1,
    "weight_drop": 0.2,
    "activation_penalty": 1.0,
    "change_penalty": 0.5,
    "streams": 4,
    "window": 7,
    "vary_window": True,
    "precision": "bf16",
    "epochs": 2.0,
    "weight_decay": 0.01,
    "warmup": 5,
    "evaluate_every": 13,
}
OPTIMISERS: dict[str, dict[str, Any]] = {
    "adamw": {"optimiser": "adamw", "schedule": "cosine", "learning_rate": 0.01, "average": "tail"},
    "sgd": {"optimiser": "sgd", "schedule": "plateau", "learning_rate": 0.9, "momentum": 0.9}
    | {"average": "triggered", "average_after": 1},
}
NEVER = 1e9
STEPS = 72


def options_of(text: Path, optimiser: str = "adamw", **changes: Any) -> Options:
    return Options(sources=(str(text),), split=(80, 10, 10), **(CHOICES | OPTIMISERS[optimiser] | changes))


def bits(path: Path) -> dict[str, Any]:
    """All that a run has come to, down to the last bit, but for the time it took."""

    def timeless(figures: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in figures.items() if key != "seconds"}

    folder = RunFolder.open(path)
    checkpoint = folder.checkpoint
    files = {kind: (checkpoint[kind], (path / checkpoint[kind]).read_bytes()) for kind in ("weights", "best", "state")}
    figures = {"metrics": [*map(timeless, folder.metrics)], "progress": timeless(checkpoint["progress"])}
    return files | figures | {"step": checkpoint["step"]}


def unnamed(path: Path) -> set[str]:
    """What lies in a run folder and is in no checkpoint: a process was writing it."""
    return {p.name for p in path.iterdir()} - {*RunFolder(path).checkpoint["files"], "checkpoint.json"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,250 characters, of which 1,003 are trained on: four streams are of unequal length."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(random_text(1250))
    return path


@pytest.fixture(scope="module")
def reference(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The same runs, never stopped, with no more checkpoints than evaluations."""
    threads, path = torch.get_num_threads(), tmp_path_factory.mktemp("reference")
    torch.set_num_threads(1)
    for optimiser in OPTIMISERS:
        train(options_of(text, optimiser), path / optimiser, save_every=NEVER)
    torch.set_num_threads(threads)
    found = {optimiser: bits(path / optimiser) for optimiser in OPTIMISERS}
    assert found["adamw"]["progress"]["average_from"] == STEPS // 2
    assert 0 < found["sgd"]["progress"]["average_from"] < STEPS
    assert found["sgd"]["progress"]["decays"] > 0
    assert all(run["step"] == STEPS for run in found.values())
    return found


class At(Silent):
    """Does something after a step, or after every one; counts the steps."""

    def __init__(self, step: int | None, then: Callable[[], object]) -> None:
        self.at, self.then, self.steps = step, then, 0

    def step(self, step: int, loss: float) -> None:
        self.steps += 1
        if self.at in (step, None):
            self.then()


# ------------------------------------------------------------------ killed


def kill_often(text: Path, out: Path, optimiser: str, least: int) -> list[dict[str, Any]]:
    """Run and kill, resume and kill; with another run where one ends before `least` kills have hit. How each went.

    The parent has imported torch and compiled the cell, and forks; the child trains. It is killed a random time after
    its first step, or after its start; or by itself, within a random one of the calls that put checkpoints on the disk.
    """
    rng, kills = random.Random(1), list[dict[str, Any]]()
    for attempt in count():
        path, ended = out / str(attempt), False
        while not ended:
            how = ("running", "running", "starting", "running", "writing")[len(kills) % 5]
            how = how if len(kills) < least else "to the end"
            delay, call = rng.uniform(0, 0.1), rng.randrange(50)
            first_step, child_end = os.pipe()
            pid = os.fork()
            if not pid:
                _train_in_child(options_of(text, optimiser), path, child_end, call if how == "writing" else None)
            os.close(child_end)
            if how == "running":
                os.read(first_step, 1)
            if how in ("running", "starting"):
                time.sleep(delay)
                os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
            os.close(first_step)
            if os.WIFEXITED(status):  # it had come to its end before it was killed
                assert os.WEXITSTATUS(status) == 0
                ended = True
                continue
            assert os.WTERMSIG(status) == signal.SIGKILL
            begun = (path / "checkpoint.json").exists()
            step = RunFolder.open(path).checkpoint["step"] if begun else -1
            kills.append({"how": how, "step": step, "unnamed": sorted(unnamed(path)) if begun else []})
            if not begun:
                shutil.rmtree(path, ignore_errors=True)
        if len(kills) >= least:
            break
    return kills


def _train_in_child(options: Options, path: Path, first_step: int, deadly: int | None) -> None:
    """Never returns. The `deadly`-th of the calls that write is the last."""
    code = 1
    try:
        if deadly is not None:
            calls = count()

            def dying(call: Callable[..., Any]) -> Callable[..., Any]:
                return lambda *given: os.kill(os.getpid(), signal.SIGKILL) if next(calls) == deadly else call(*given)

            os.fsync, os.replace = dying(os.fsync), dying(os.replace)
        watcher = At(None, lambda: os.write(first_step, b"."))
        if (path / "checkpoint.json").exists():
            resume(path, watcher=watcher, save_every=0.0)
        else:
            train(options, path, watcher=watcher, save_every=0.0)
        code = 0
    finally:
        os._exit(code)


LEAST = {"adamw": 25, "sgd": 8}  # kills


def test_killed_often_and_resumed_it_is_the_same_run(
    text: Path, reference: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """SIGKILL at random moments, some of them within the writing of a checkpoint."""
    done = subprocess.run(
        [sys.executable, __file__, str(text), str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for optimiser, kills in json.loads(done.stdout).items():
        assert len(kills) >= LEAST[optimiser]
        assert len({kill["step"] for kill in kills}) > len(kills) / 6, kills
        assert sum(bool(kill["unnamed"]) for kill in kills) >= len(kills) // 8, "hardly a kill fell within the writing"
        runs = [*(tmp_path / optimiser).iterdir()]
        assert runs
        for path in runs:
            assert bits(path) == reference[optimiser]
            assert unnamed(path) == set()


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "loopfold", *map(str, arguments), "--quiet", "--save-every", "0"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_command_killed_and_interrupted_is_the_same_run(
    text: Path, reference: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Each time another process: three are killed; Ctrl-C saves first and says so."""
    path, rng = tmp_path / "run", random.Random(2)
    new = ["train", "--out", path, *flags_of(options_of(text))]
    for turn, (step, name) in enumerate([(8, "SIGKILL"), (18, "SIGKILL"), (30, "SIGKILL"), (42, "SIGINT")]):
        process = start(*(["train", "--resume", path] if turn else new))
        wait_for_step(path, step, process)
        time.sleep(rng.uniform(0, 0.02))
        process.send_signal(signal.Signals[name])
        out, said = process.communicate(timeout=30)
        stopped = RunFolder.open(path).checkpoint["step"]
        assert step <= stopped < STEPS
        assert out == ""
        if name == "SIGKILL":
            assert (process.returncode, said) == (-signal.SIGKILL, "")
        else:
            assert process.returncode == 130
            assert said == (
                f"loopfold: stopped at step {stopped} of {STEPS}; everything is saved in {path}. "
                f"Go on with: loopfold train --resume {path}\n"
            )
    process = start("train", "--resume", path)
    out, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")
    assert out == f"{path}\n"
    assert bits(path) == reference["adamw"]


# ------------------------------------------------------------------ stopped


def send(*numbers: int) -> Callable[[], None]:
    def now() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    return now


class Cut(BaseException):
    """As a kill, nothing catches it."""


def cut() -> None:
    raise Cut


@pytest.mark.parametrize(
    ("number", "optimiser"), [(signal.SIGINT, "adamw"), (signal.SIGTERM, "sgd"), (signal.SIGHUP, "sgd")]
)
def test_a_signal_saves_and_stops(
    number: signal.Signals,
    optimiser: str,
    text: Path,
    reference: dict[str, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At the end of the step in which it came. The exit code is the shell's for that signal."""
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    path = tmp_path / "run"
    flags = ["train", "--out", str(path), *flags_of(options_of(text, optimiser))]
    with monkeypatch.context() as context:
        context.setattr(sys, "argv", ["loopfold", *flags])
        context.setattr(watching, "Several", lambda watchers: At(30, send(number)))
        with pytest.raises(SystemExit) as end:
            cli.main()
    assert end.value.code == 128 + number
    said = f"loopfold: stopped at step 31 of 72; everything is saved in {path}. Go on with: loopfold train --resume"
    assert capsys.readouterr() == ("", f"{said} {path}\n")
    assert RunFolder.open(path).checkpoint["step"] == 31
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
    resume(path, save_every=NEVER)
    assert bits(path) == reference[optimiser]


def test_a_second_interrupt_is_obeyed_at_once(text: Path, reference: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(options_of(text), tmp_path, watcher=At(30, send(signal.SIGINT, signal.SIGINT)), save_every=NEVER)
    assert RunFolder.open(tmp_path).checkpoint["step"] == 26, "two evaluations were saved"
    resume(tmp_path)
    assert bits(tmp_path) == reference["adamw"]


def test_a_signal_at_the_last_step_is_no_reason_to_stop(text: Path, tmp_path: Path) -> None:
    train(options_of(text, epochs=0.1, warmup=0), tmp_path, watcher=At(4, send(signal.SIGTERM)))
    assert RunFolder.open(tmp_path).checkpoint["step"] == 4


def test_a_run_in_a_thread_leaves_signals_alone(
    text: Path, reference: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    thread = threading.Thread(target=train, args=(options_of(text), tmp_path))
    thread.start()
    thread.join()
    assert bits(tmp_path) == reference["adamw"]


@pytest.mark.parametrize(("optimiser", "save_every"), [("adamw", NEVER), ("sgd", 0.0)])
def test_what_came_after_the_checkpoint_is_forgotten(
    optimiser: str, save_every: float, text: Path, reference: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Cut at the end of an epoch, after it, after an entry of the curve that no checkpoint followed, and at once."""
    with pytest.raises(Cut):
        train(options_of(text, optimiser), tmp_path, watcher=At(36, cut), save_every=save_every)
    for step in (37, 51, 52):
        with pytest.raises(Cut):
            resume(tmp_path, watcher=At(step, cut), save_every=save_every)
    if save_every:
        RunFolder(tmp_path).log(entry(51, 0.0))  # as if it had been logged just before
        assert RunFolder.open(tmp_path).metrics[-1]["step"] == 39
    watcher = At(0, cut)
    run = resume(tmp_path, watcher=watcher, save_every=NEVER)
    assert watcher.steps == STEPS - (39 if save_every else 51)
    assert run.metrics == RunFolder.open(tmp_path).metrics
    assert bits(tmp_path) == reference[optimiser]


def test_a_finished_run_is_returned_as_it_is(text: Path, tmp_path: Path) -> None:
    options = options_of(text, epochs=0.5)
    first = train(options, tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    watcher = At(0, cut)
    again = resume(tmp_path, watcher=watcher)
    assert watcher.steps == 0
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert again.metrics == first.metrics
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), first.model.parameters(), strict=True))


def test_a_run_out_of_patience_is_finished_too(text: Path, tmp_path: Path) -> None:
    options = options_of(text, "sgd", learning_rate=30.0, clip=10.0, patience=1, evaluate_every=2, warmup=0)
    train(options, tmp_path)
    assert RunFolder.open(tmp_path).checkpoint["step"] < STEPS
    watcher = At(0, cut)
    resume(tmp_path, watcher=watcher)
    assert watcher.steps == 0


# ------------------------------------------------------------------ a folder is whole at every moment


def entry(step: int, train: float) -> dict[str, float]:
    return {"step": step, "epoch": step / 36, "train": train, "seconds": 1.0}


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 4), value), "b": torch.arange(5)}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run folder at step 10, whose best weights are of step 0."""
    about = {"name": "text", "sha256": "0", "tokens": 9}
    with RunFolder.create(tmp_path / "run", Options(), about, {"kind": "bytes"}, {}, tensors(0.0)) as made:
        made.log(entry(10, 2.5))
        made.save(10, {"step": 10}, tensors(10.0), tensors(-10.0), best=False)
    return made


def check_whole(path: Path) -> int:
    """That the folder opens, and holds what belongs to its step; the step."""
    opened = RunFolder.open(path)
    checkpoint = opened.checkpoint
    step: int = checkpoint["step"]
    assert checkpoint["progress"] == {"step": step}
    assert torch.equal(opened.tensors(checkpoint["weights"])["a"], tensors(step)["a"])
    assert torch.equal(opened.tensors(checkpoint["state"])["a"], tensors(-step)["a"])
    assert torch.equal(opened.tensors(checkpoint["best"])["a"], tensors(20.0 if step == 20 else 0.0)["a"])
    assert [line["step"] for line in opened.metrics] == [10, 20][: step // 10]
    return step


def failing(monkeypatch: pytest.MonkeyPatch, kth: int, error: BaseException) -> list[str]:
    """Let the k-th of the calls that put things on the disk fail; the list of those made."""
    made: list[str] = []

    def broken(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any) -> Any:
            made.append(call.__name__)
            if len(made) == kth:
                raise error
            return call(*given)

        return wrapped

    for name in ("fsync", "replace", "open", "unlink", "truncate"):
        monkeypatch.setattr(os, name, broken(getattr(os, name)))
    return made


def go_on(path: Path) -> None:
    opened = RunFolder(path)
    opened.log(entry(20, 1.5))
    opened.save(20, {"step": 20}, tensors(20.0), tensors(-20.0), best=True)


@pytest.mark.parametrize("error", [Cut(), OSError(errno.EIO, "Input/output error")], ids=["killed", "failed"])
def test_a_checkpoint_is_the_old_one_or_the_new_one(error: BaseException, folder: RunFolder, tmp_path: Path) -> None:
    """Whichever of the calls that write is the last."""
    steps = []
    for k in count(1):
        path = tmp_path / str(k)
        shutil.copytree(folder.path, path)
        with pytest.MonkeyPatch.context() as monkeypatch:
            made = failing(monkeypatch, k, error)
            with suppress(Cut, RunError):
                go_on(path)
        if len(made) < k:
            break
        steps.append(check_whole(path))
        RunFolder.open(path).rewind()
        assert unnamed(path) == set()
        if steps[-1] == 10:
            go_on(path)
        assert check_whole(path) == 20
        assert unnamed(path) == set()
    assert steps == sorted(steps), "once the new one is there, it stays"
    assert steps.count(10) > 9
    assert steps.count(20) > 3


class FullDisk:
    """As `Path.open`, on a disk with room for so many bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room, opened = room, Path.open
        disk = self

        class Limited:
            def __init__(self, file: Any) -> None:
                self.file, self.flush, self.fileno = file, file.flush, file.fileno

            def write(self, data: bytes) -> None:
                self.file.write(data[: max(0, disk.room)])
                disk.room -= len(data)
                if disk.room < 0:
                    raise OSError(errno.ENOSPC, "No space left on device")

            def __enter__(self) -> "Limited":
                return self

            def __exit__(self, *_: object) -> None:
                self.file.close()

        def limited(path: Path, mode: str = "r", *given: Any, **more: Any) -> Any:
            file = opened(path, mode, *given, **more)
            return Limited(file) if mode in ("xb", "wb", "ab") else file

        monkeypatch.setattr(Path, "open", limited)
        monkeypatch.setattr("loopfold.training.folder.open_plain", limited)


def test_no_space_left_keeps_the_checkpoint(folder: RunFolder, tmp_path: Path) -> None:
    for room in range(0, 3000, 100):
        path = tmp_path / str(room)
        shutil.copytree(folder.path, path)
        with pytest.MonkeyPatch.context() as monkeypatch:
            FullDisk(monkeypatch, room)
            try:
                go_on(path)
            except RunError as error:
                said = str(error)
            else:
                break
        assert said.startswith(f"no space is left on the disk of {path}. Free some, then resume")
        assert check_whole(path) == 10
        assert not [*path.glob("*.new")]
    assert 1000 < room < 2900


def test_a_run_on_a_full_disk_goes_on_once_there_is_room(
    text: Path, reference: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        FullDisk(monkeypatch, 200_000)
        with pytest.raises(RunError, match="no space is left on the disk"):
            train(options_of(text), tmp_path, save_every=0.0)
    assert 0 < RunFolder.open(tmp_path).checkpoint["step"] < STEPS
    assert not [*tmp_path.glob("*.new")]
    resume(tmp_path, save_every=NEVER)
    assert bits(tmp_path) == reference["adamw"]


@pytest.mark.parametrize("room", [0, 500, 1500, 4000])
def test_a_run_that_could_not_begin_leaves_no_folder(
    room: int, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FullDisk(monkeypatch, room)
    with pytest.raises(RunError, match="no space is left on the disk"):
        train(options_of(text), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def forbidden(*_: object, **__: object) -> None:
    """Permissions are no hindrance to root, who may be running these tests."""
    raise PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.parametrize(("owner", "call"), [(Path, "mkdir"), (os, "fsync"), (os, "replace")])
def test_where_nothing_may_be_written(
    owner: object, call: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    monkeypatch.setattr(owner, call, forbidden)
    with pytest.raises(RunError, match=rf"^{path} cannot be written: Permission denied\. Choose another place"):
        train(options_of(text), path)
    monkeypatch.undo()
    assert not path.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="open files are counted in /proc")
def test_no_file_stays_open_where_a_folder_is_not_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", forbidden)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(PermissionError):
        _flush(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_folder_that_may_not_be_written_or_read_any_more(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", forbidden)
    with pytest.raises(RunError, match=rf"^{folder.path} cannot be written: Permission denied"):
        go_on(folder.path)
    monkeypatch.undo()
    folder.rewind()
    assert check_whole(folder.path) == 10
    monkeypatch.setattr(os, "open", forbidden)
    with pytest.raises(RunError, match=rf"^{folder.path}/config.json cannot be read: Permission denied\.$"):
        RunFolder.open(folder.path)


# ------------------------------------------------------------------ what is wrong is found and named

KINDS = ["weights", "best", "state", "config.json", "vocabulary.json", "metrics.jsonl", "checkpoint.json", "cell.py"]


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one file of every kind: a cell of its own, and best weights that are not the last."""
    path = tmp_path_factory.mktemp("whole")
    (path / "mine.py").write_text("from loopfold import Elman\n\n\nclass Mine(Elman):\n    pass\n")
    options = options_of(text, cell=f"{path / 'mine.py'}:Mine", epochs=0.2, evaluate_every=3)
    with pytest.raises(Cut):
        train(options, path / "run", watcher=At(6, cut), save_every=0.0)
    checkpoint = RunFolder.open(path / "run").checkpoint
    assert (checkpoint["weights"], checkpoint["best"]) == ("weights-5.safetensors", "weights-3.safetensors")
    return path / "run"


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def file_of(path: Path, kind: str) -> Path:
    return path / (RunFolder(path).checkpoint[kind] if kind in ("weights", "best", "state") else kind)


def needing(kind: str) -> list[Callable[[Path], object]]:
    """What needs a file: going on needs all, opening not what only training reads; the curve, when it is asked for."""
    if kind in ("weights", "state"):
        return [RunFolder.open, resume]
    return [RunFolder.open, lambda path: open_run(path).metrics, resume]


def test_every_file_is_of_some_kind(copy: Path) -> None:
    assert {p.name for p in copy.iterdir()} == {file_of(copy, kind).name for kind in KINDS}


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("kind", KINDS)
def test_a_torn_file_is_named(kind: str, kept: float, copy: Path) -> None:
    file = file_of(copy, kind)
    os.truncate(file, int(kept * file.stat().st_size))
    for use in needing(kind):
        with pytest.raises(RunError, match=rf"{file} is damaged"):
            use(copy)


@pytest.mark.parametrize("kind", KINDS)
def test_one_altered_bit_is_found_and_the_file_named(kind: str, copy: Path) -> None:
    """Wherever it is; but that of the format's number makes it another format, which is an error too."""
    file, rng = file_of(copy, kind), random.Random(3)
    good = file.read_bytes()
    places = [0, len(good) - 2, *(rng.randrange(len(good)) for _ in range(60))]
    for place in places:
        data = bytearray(good)
        data[place] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        if kind.startswith("checkpoint") and same_json(data, good):  # 1e-05 became 1E-05
            continue
        with pytest.raises(RunError, match=rf"{file} is damaged|{copy} has format"):
            RunFolder.open(copy)
    file.write_bytes(good)
    RunFolder.open(copy)


def same_json(a: bytes | bytearray, b: bytes | bytearray) -> bool:
    try:
        return bool(json.loads(a) == json.loads(b))
    except ValueError:
        return False


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_file_is_named(kind: str, copy: Path) -> None:
    file = file_of(copy, kind)
    file.unlink()
    said = {
        "config.json": f"{copy} is not a run folder: it has no config.json",
        "checkpoint.json": f"{copy} has no check",
    }
    for use in needing(kind):
        with pytest.raises(RunError, match=said.get(kind, f"{copy} is not complete: {file.name} is missing")):
            use(copy)


def test_no_run_folder(tmp_path: Path, text: Path) -> None:
    with pytest.raises(RunError, match=rf"there is no run folder {tmp_path / 'none'}\. `loopfold train` makes one"):
        resume(tmp_path / "none")
    with pytest.raises(RunError, match=f"{text} is a file, not a run folder"):
        resume(text)
    with pytest.raises(RunError, match="is not a run folder: it has no config.json"):
        resume(tmp_path)


def test_a_run_killed_before_its_first_checkpoint_says_so(copy: Path, text: Path) -> None:
    (copy / "checkpoint.json").unlink()
    with pytest.raises(RunError, match="the run ended before its first step, or it was not copied"):
        resume(copy)
    with pytest.raises(RunError, match=f"{copy} exists already: choose another out, or remove it"):
        train(options_of(text), copy)


def test_nothing_that_is_there_is_overwritten(copy: Path, text: Path) -> None:
    before = {p.name: p.read_bytes() for p in copy.iterdir()}
    with pytest.raises(RunError, match=f"{copy} exists already: choose another out, or resume it"):
        train(options_of(text), copy)
    with pytest.raises(RunError, match=f"{text} exists already"):
        train(options_of(text), text)
    assert {p.name: p.read_bytes() for p in copy.iterdir()} == before


def test_another_format_says_who_wrote_it(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["format"], config["versions"]["loopfold"] = 2, "9.1"
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match=r"has format 2, and this .* reads format 1\. Loopfold 9\.1 wrote it: use that"):
        RunFolder.open(copy)


def test_weights_that_do_not_fit_the_model(text: Path, copy: Path) -> None:
    """Each file is as it was noted, but they do not belong together."""
    opened = RunFolder.open(copy)
    opened.save(99, opened.checkpoint["progress"], tensors(1.0), {}, best=True)
    with pytest.raises(RunError, match="weights-99.safetensors does not fit the model of config.json"):
        open_run(copy)


def test_a_changed_text_is_found(copy: Path, text: Path) -> None:
    good = text.read_text()
    try:
        text.write_text(good.replace("cat", "bat", 1))
        with pytest.raises(RunError, match=r"the text of text.txt has changed since the run began"):
            resume(copy)
        with pytest.raises(RunError, match=r"the text of text.txt has changed since the run began"):
            open_run(copy).corpus()
        text.unlink()
        with pytest.raises(RunError, match=f"was {text}, which is not there. Name the place where it is"):
            resume(copy)
    finally:
        text.write_text(good)


def test_the_command_names_what_is_damaged(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    os.truncate(file_of(copy, "state"), 20)
    monkeypatch.setattr(sys, "argv", ["loopfold", "train", "--resume", str(copy)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        f"loopfold: {copy}/state-5.safetensors is damaged or was altered: "
        "its SHA-256 is not the one in checkpoint.json.\n"
    )


if __name__ == "__main__":  # the process that forks
    text_, out_ = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    train(options_of(text_, epochs=1.0), out_ / "compiled")
    print(json.dumps({name: kill_often(text_, out_ / name, name, least) for name, least in LEAST.items()}))
