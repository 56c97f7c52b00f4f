"""A run folder belongs to one process at a time, runs no stranger's code, and leads nowhere outside itself."""

import errno
import io
import json
import os
import py_compile
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import cache_from_source
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import everything, flags_of, said_by, sign, sign_checkpoint, wait_for_step

import loopfold as lf
from loopfold import cli
from loopfold.comparison import compare
from loopfold.files import write_whole
from loopfold.training import folder
from loopfold.training.folder import RunFolder
from loopfold.training.loop import open_run, resume, train
from loopfold.training.options import Options
from loopfold.training.stored import RunError
from loopfold.training.watching import Silent

pytestmark = pytest.mark.usefixtures("one_thread", "no_waiting")

CELL = """
from pathlib import Path
from loopfold import Elman

Path(__file__).with_name("ran").touch()


class Mine(Elman):
    pass
"""


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """A file that is no file, such as a pipe, must not be waited at."""

    def waited(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, waited)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("the cat sat on the mat; the rat ran.\n" * 30)
    return path


def options_of(text: Path, **changes: Any) -> Options:
    sizes: dict[str, Any] = {"cell": "elman", "hidden_size": 4, "streams": 3, "window": 8, "epochs": 1.0}
    return Options(sources=(str(text),), split=(80, 10, 10), evaluate_every=7, **(sizes | changes))


def at_call(k: int, then: Callable[[], object]) -> Any:
    """Just before the k-th call that touches the disk, do something else, once."""
    calls = count(1)

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*given: Any, **named: Any) -> Any:
            if next(calls) == k:
                then()
            return call(*given, **named)

        return instead

    names = ("fsync", "replace", "open", "unlink", "rmdir", "stat", "mkdir", "scandir", "listdir")
    instead: Any = {name: wrapped(getattr(os, name)) for name in names}
    return mock.patch.multiple(os, **instead)


# ------------------------------------------------------------------ one process at a time


def test_a_run_that_trains_cannot_be_resumed_and_is_not_touched(text: Path, tmp_path: Path) -> None:
    """Not its curve, of which a line may be newer than the checkpoint, nor files that no checkpoint names yet."""
    path, seen = tmp_path / "run", []

    class Meddling(Silent):
        def entry(self, entry: dict[str, Any]) -> None:
            (path / "weights-99999.safetensors").write_bytes(b"about to be named")
            before = everything(path)
            with pytest.raises(RunError, match=rf"^another process is training in {path}: wait for it, or stop it"):
                resume(path)
            assert everything(path) == before
            seen.append(entry["step"])

    train(options_of(text), path, watcher=Meddling(), save_every=0.0)
    assert len(seen) > 3
    assert [entry["step"] for entry in open_run(path).metrics] == seen


def test_no_command_disturbs_the_process_that_trains(text: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    new = ["train", "--out", path, *flags_of(options_of(text, epochs=1000.0)), "--quiet", "--save-every", "0"]
    process = subprocess.Popen([sys.executable, "-m", "loopfold", *map(str, new)], stderr=subprocess.PIPE, text=True)
    wait_for_step(path, 3, process)
    uses = (["train", "--resume"], ["evaluate"], ["compare", "--no-neural"], ["generate", "--length=9"], ["report"])
    codes = {use[0]: said_by(*use, path)[0] for use in uses}
    assert process.poll() is None, "it must train for longer to be disturbed"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, "stopped at step" in said) == (130, True), said
    assert codes == {"train": 2, "evaluate": 0, "compare": 0, "generate": 0, "report": 0}
    RunFolder.open(path)


def test_training_leaves_alone_what_other_commands_write(text: Path, tmp_path: Path) -> None:
    """A report that is half written when a checkpoint is saved."""
    path, written = tmp_path / "run", []

    class Reporting(Silent):
        def step(self, step: int, loss: float) -> None:
            written.extend([*path.glob("report.html.*.new")] or [path / "report.html.abc.new"])
            written[-1].write_bytes(b"half a page")

    train(options_of(text), path, watcher=Reporting(), save_every=0.0)
    assert written[-1].read_bytes() == b"half a page"


def create(path: Path, value: float) -> None:
    about = {"name": "text", "sha256": "0", "tokens": 9}
    with RunFolder.create(path, Options(), about, {"kind": "bytes"}, {}, {"a": torch.tensor([value])}):
        pass


def owner(path: Path) -> float:
    found = RunFolder.open(path)
    return float(found.tensors(found.checkpoint["weights"])["a"])


@pytest.mark.parametrize("locks", ["flock", "not on this disk", "none"])
@pytest.mark.parametrize("there", [False, True], ids=["new", "empty"])
def test_of_two_that_begin_in_one_folder_exactly_one_does(
    there: bool, locks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the second comes: it runs as a whole within each of the calls of the first."""
    if locks == "not on this disk":
        monkeypatch.setattr(folder.fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    elif locks == "none":
        monkeypatch.setattr(folder, "fcntl", None)
    won = {1.0: 0, 2.0: 0}
    for k in count(1):
        path = tmp_path / str(k)
        outcomes: dict[float, str] = {}
        if there:
            path.mkdir()

        def attempt(value: float, path: Path = path, outcomes: dict[float, str] = outcomes) -> None:
            try:
                create(path, value)
                outcomes[value] = "made"
            except RunError as error:
                outcomes[value] = str(error)

        with at_call(k, lambda attempt=attempt: attempt(2.0)):  # type: ignore[misc]
            attempt(1.0)
        if 2.0 not in outcomes:
            break
        winners = [value for value, outcome in outcomes.items() if outcome == "made"]
        assert len(winners) == 1, outcomes
        won[winners[0]] += 1
        assert owner(path) == winners[0]
        other = outcomes[3.0 - winners[0]]
        assert other.startswith((f"{path} exists already", f"another process is training in {path}")), other
    assert min(won.values()) >= 1
    assert sum(won.values()) > 20


def test_a_failure_removes_nothing_of_another_process(tmp_path: Path) -> None:
    """The disk fails at every call in turn, just after another has put a file there."""
    for k in count(1):
        path = tmp_path / str(k)
        failed: list[int] = []

        def fail(path: Path = path, failed: list[int] = failed) -> None:
            failed.append(1)
            if path.is_dir():
                (path / "notes.txt").write_text("mine")
            raise OSError(5, "Input/output error")

        with at_call(k, fail), suppress(RunError):
            create(path, 1.0)
        if not failed:
            break
        left = {p.name for p in path.iterdir()} if path.exists() else set()
        if "checkpoint.json" in left:
            assert owner(path) == 1.0
        else:
            assert left <= {"notes.txt"}, left
    assert k > 20


def test_a_run_named_by_default_takes_the_next_name_if_another_was_faster(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another takes runs/text-elman-1 at each moment of the beginning."""
    monkeypatch.chdir(tmp_path)
    first = Path("runs/text-elman-1")
    taken = set()
    for k in (*range(1, 20), *range(20, 80, 5), 10_000):  # at the last, nobody is faster
        fresh = options_of(text, epochs=0.01)

        def other() -> None:
            with suppress(RunError), torch.device("cpu"):  # as another process, whatever ours is making
                create(first, 7.0)

        with at_call(k, other):
            run = train(fresh)
        if run.path != first:
            assert (str(run.path), owner(first)) == ("runs/text-elman-2", 7.0)
        taken.add(run.path)
        assert open_run(run.path).options.hidden_size == 4
        shutil.rmtree("runs")
    assert len(taken) == 2


def test_a_folder_that_was_removed_and_made_anew_is_not_written_to(text: Path, tmp_path: Path) -> None:
    """The process that trains holds the old one; another run may be in its place."""
    path = tmp_path / "run"

    class Replacing(Silent):
        def step(self, step: int, loss: float) -> None:
            if step == 5:
                shutil.rmtree(path)
                create(path, 3.0)

    with pytest.raises(RunError, match=rf"^{path} was removed or replaced while this process was training in it"):
        train(options_of(text), path, watcher=Replacing(), save_every=0.0)
    assert owner(path) == 3.0


def test_a_run_can_be_opened_however_often_it_saves(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint replaces the one before while that is being read: seven times in a row."""
    path, times = tmp_path / "run", iter(range(7))
    train(options_of(text, epochs=0.1), path)
    found, tensors = RunFolder.open(path), RunFolder.tensors
    checkpoint, weights = found.checkpoint, found.tensors(found.checkpoint["weights"])

    def late(self: RunFolder, name: str) -> dict[str, torch.Tensor]:
        for i in times:
            found.save(1000 + i, checkpoint["progress"], weights, {}, best=True)
            break
        return tensors(self, name)

    monkeypatch.setattr(RunFolder, "tensors", late)
    assert open_run(path).options.hidden_size == 4
    assert next(times, None) is None


def test_a_temporary_name_that_is_taken_is_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever guesses it could have left a link there."""
    (tmp_path / "outside").write_text("mine")
    monkeypatch.setattr("loopfold.files.token_hex", lambda n: "guessed")
    (tmp_path / "a.guessed.new").symlink_to(tmp_path / "outside")
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "a", b"new")
    assert (tmp_path / "outside").read_text() == "mine"
    assert (tmp_path / "a.guessed.new").is_symlink(), "it is another's"


# ------------------------------------------------------------------ code of one's own


@pytest.fixture(scope="module")
def with_cell(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose cell leaves a file named `ran` beside itself."""
    path = tmp_path_factory.mktemp("with-cell")
    (path / "mine.py").write_text(CELL)
    train(options_of(text, cell=f"{path / 'mine.py'}:Mine", epochs=0.2), path / "run")
    (path / "run" / "ran").unlink()
    return path / "run"


@pytest.fixture
def strange(with_cell: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same as it came from someone else: this user has neither trained it nor said that it is trusted."""
    monkeypatch.setenv("LOOPFOLD_CONFIG", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(with_cell, tmp_path / "strange"))


USES: list[tuple[str, ...]] = [
    ("train", "--resume", "strange", "--quiet"),
    ("evaluate", "strange"),
    ("compare", "strange", "--no-neural"),
    ("generate", "strange", "--length", "5"),
    ("draw", "strange"),
    ("gradients", "strange", "--steps", "5"),
    ("report", "strange"),
    ("export", "strange", "--to", "strange.js"),
]


@pytest.mark.parametrize("arguments", USES, ids=lambda a: a[0])
def test_every_command_asks_before_it_runs_code(arguments: tuple[str, ...], strange: Path) -> None:
    before = everything(strange.parent)
    code, out, err = said_by(*arguments)
    assert (code, out) == (2, "")
    assert err == (
        "loopfold: strange has a cell of its own, and opening it would run the code in strange/cell.py. "
        "Read it; if you trust it, add --trust.\n"
    )
    assert everything(strange.parent) == before
    assert said_by(*arguments, "--trust")[0] == 0
    assert (strange / "ran").exists()
    (strange / "ran").unlink()
    assert said_by(*arguments)[0] == 0, "it is asked once"
    assert (strange / "ran").exists()


def test_every_command_that_opens_a_run_is_among_these() -> None:
    """The others open none: one copies files, one reads JSON, one needs no run."""
    commands = {command.name or command.callback.__name__ for command in cli.app.registered_commands}  # type: ignore[union-attr]
    assert {use[0] for use in USES} == commands - {"pack", "list", "play"}


def test_functions_ask_too(strange: Path) -> None:
    for use in (open_run, resume, lf.open_run, lf.resume):
        with pytest.raises(RunError, match=r"would run the code in .*cell\.py.* trust=True"):
            use(strange)
    assert not (strange / "ran").exists()
    assert lf.open_run(strange, trust=True).options.kind == "Mine"
    assert lf.resume(strange).options.kind == "Mine"


def test_other_code_is_asked_about_again(strange: Path) -> None:
    open_run(strange, trust=True)
    sign(strange, "cell.py", (CELL + "# more\n").encode())
    with pytest.raises(RunError, match="would run the code"):
        open_run(strange)


def test_code_that_one_has_trained_with_needs_no_word(strange: Path, text: Path, tmp_path: Path) -> None:
    """It is one's own file; nor does the run that the same cell has come from elsewhere."""
    (tmp_path / "own.py").write_text(CELL)
    assert (
        said_by("train", *flags_of(options_of(text, cell="own.py:Mine", epochs=0.1)), "--out", "o", "--quiet")[0] == 0
    )
    assert said_by("generate", "o", "--length", "5")[0] == 0
    assert said_by("generate", "strange", "--length", "5")[0] == 0


def test_where_nothing_can_be_remembered_it_asks_every_time(strange: Path, tmp_path: Path) -> None:
    (tmp_path / "config").write_text("no folder")
    assert said_by("generate", "strange", "--length", "5", "--trust")[0] == 0
    assert said_by("generate", "strange", "--length", "5")[0] == 2


def test_what_is_trusted_is_kept_in_the_users_own_place(
    strange: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOOPFOLD_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    open_run(strange, trust=True)
    assert [p.parent for p in (tmp_path / "xdg").rglob("*") if p.is_file()] == [tmp_path / "xdg/loopfold/trusted"]
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(RunError, match="would run the code"):
        open_run(strange)
    open_run(strange, trust=True)
    assert (tmp_path / "home/.config/loopfold/trusted").is_dir()
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pathlib.Path.home", mock.Mock(side_effect=RuntimeError("no home")))
    open_run(strange, trust=True)


def test_the_code_that_runs_is_the_code_that_was_read(strange: Path) -> None:
    """Python would rather run compiled code that lies beside it, and can be told not to compare."""
    open_run(strange, trust=True)
    evil = strange / "evil.py"
    evil.write_text("raise SystemExit('caught')")
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(evil), cache_from_source(str(strange / "cell.py")), invalidation_mode=unchecked)
    with mock.patch.object(sys, "dont_write_bytecode", False):
        open_run(strange)


def test_no_compiled_code_is_left_in_the_folder(strange: Path) -> None:
    with mock.patch.object(sys, "dont_write_bytecode", False):
        open_run(strange, trust=True)
    assert not (strange / "__pycache__").exists()


def test_a_baseline_has_no_code_of_its_own(strange: Path) -> None:
    """Trust in a run is none in what lies below it."""
    run = open_run(strange, trust=True)
    (strange / "ran").unlink()
    below = strange / "baselines" / "window"
    shutil.copytree(strange, below)
    sign(below, "cell.py", (CELL + "# other\n").encode())
    with pytest.raises(RunError, match="baselines/window has a cell of its own"):
        compare([run])
    assert not (below / "ran").exists()


def test_trust_without_resume_is_a_mistake(text: Path) -> None:
    assert said_by("train", text, "--trust") == (
        2,
        "",
        "loopfold: --trust goes with --resume or --from: a cell of your own, given with --cell, is yours already.\n",
    )


# ------------------------------------------------------------------ nothing outside the folder


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is not at its end, with a file of every kind that has one."""
    path = tmp_path_factory.mktemp("trained")
    (path / "mine.py").write_text("from loopfold import Elman\n\n\nclass Mine(Elman):\n    pass\n")

    class Stopping(Silent):
        def step(self, step: int, loss: float) -> None:
            if step == 9:
                raise KeyboardInterrupt

    options = options_of(text, cell=f"{path / 'mine.py'}:Mine")
    from_stdin = Options.from_json(options.as_json() | {"sources": ["-"]})
    stdin = mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.read_bytes())))
    with stdin, pytest.raises(KeyboardInterrupt):
        train(from_stdin, path / "run", watcher=Stopping(), save_every=0)
    (path / "run" / "comparison.json").write_text('{"on": "test", "rows": []}')
    return path / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def files_of(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.is_file())


def uses_of(path: Path, name: str) -> list[Callable[[], object]]:
    """All that is done with a file: opening a run leaves alone what only training, or only the curve, needs."""
    checkpoint = RunFolder(path).checkpoint
    uses: dict[str, Callable[[], object]] = {
        "open": lambda: open_run(path),
        "resume": lambda: resume(path),
        "draw": lambda: open_run(path).learning_curve(),
    }
    only = {
        "comparison.json": ["draw"],
        "metrics.jsonl": ["resume", "draw"],
        "stdin.txt": ["resume"],
        checkpoint["state"]: ["resume"],
        checkpoint["weights"]: ["resume"],
        checkpoint["best"]: [*uses],
    }
    return [uses[use] for use in only.get(name, [*uses])]


def test_a_link_in_place_of_a_file_is_refused(run: Path, tmp_path: Path) -> None:
    """Each of them in turn. What it leads to is neither read nor written."""
    assert len(files_of(run)) == 10
    for name in files_of(run):
        uses = uses_of(run, name)
        outside = tmp_path / f"outside-{name}"
        (run / name).rename(outside)
        (run / name).symlink_to(outside)
        with outside.open("ab") as file:
            file.write(b"\n" if name == "metrics.jsonl" else b"")  # something to cut off
        before = outside.read_bytes()
        for use in uses:
            with pytest.raises(
                RunError, match=rf"^{run / name} cannot be (read|written): it is a symbolic link.+there\.$"
            ):
                use()
        assert outside.read_bytes() == before
        (run / name).unlink()
        (run / name).write_bytes(before)
    for use in uses_of(run, "config.json"):
        use()


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a folder"])
def test_what_is_no_plain_file_is_refused_and_not_waited_for(kind: str, run: Path) -> None:
    for name in files_of(run):
        uses = uses_of(run, name)
        (run / name).rename(run / "kept")
        if kind == "a pipe":
            os.mkfifo(run / name)
        elif kind == "a device":
            (run / name).symlink_to("/dev/zero")
        else:
            (run / name).mkdir()
        for use in uses:
            with pytest.raises(
                RunError, match=rf"{run / name} cannot be read: it is (not a plain file|a symbolic link)"
            ):
                use()
        (run / name).rmdir() if kind == "a folder" else (run / name).unlink()
        (run / "kept").rename(run / name)


def test_a_run_may_be_reached_through_a_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run)
    assert resume(tmp_path / "link").metrics


def test_a_new_run_may_be_made_through_a_link(text: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    train(options_of(text, epochs=0.1), tmp_path / "link")
    assert open_run(tmp_path / "real").metrics


@pytest.mark.parametrize(
    "bad", ["../outside", "/etc/passwd", "a/weights-1.safetensors", "weights-1.safetensors/..", ""]
)
@pytest.mark.parametrize("key", ["weights", "best", "state", "files"])
def test_a_checkpoint_names_no_place_outside(key: str, bad: str, run: Path) -> None:
    uses = uses_of(run, "checkpoint.json")
    checkpoint = json.loads((run / "checkpoint.json").read_text())
    if key == "files":
        checkpoint["files"][bad] = "0" * 64
    else:
        checkpoint["files"][bad] = checkpoint["files"][checkpoint[key]]
        checkpoint[key] = bad
    sign_checkpoint(run, checkpoint)
    for use in uses:
        with pytest.raises(RunError, match=rf"^{run}/checkpoint.json is damaged: .*{bad!r}"):
            use()


@pytest.mark.parametrize("which", ["baselines", "baselines/window"])
def test_baselines_are_not_trained_elsewhere(which: str, run: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (run / which).parent.mkdir(exist_ok=True)
    (run / which).symlink_to(tmp_path / "outside")
    with pytest.raises(RunError, match=rf"^{run / which} is a symbolic link"):
        compare([open_run(run)])
    assert not [*(tmp_path / "outside").iterdir()]


def test_pictures_are_not_written_elsewhere(run: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (run / "pictures").symlink_to(tmp_path / "outside")
    code, _, err = said_by("gradients", run, "--steps", 5)
    assert (code, f"{run}/pictures is a symbolic link" in err) == (2, True), err
    assert not [*(tmp_path / "outside").iterdir()]


@pytest.mark.parametrize(
    ("name", "command"), [("comparison.json", ("compare", "--no-neural")), ("report.html", ("report",))]
)
def test_results_replace_a_link_and_do_not_follow_it(
    name: str, command: tuple[str, ...], run: Path, tmp_path: Path
) -> None:
    (tmp_path / "outside").write_text("mine")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(tmp_path / "outside")
    said_by(*command, run)
    assert (tmp_path / "outside").read_text() == "mine"


def test_a_folder_of_runs_that_is_a_link_to_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No free name is looked for without end."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("to be or not to be " * 50)
    Path("runs").symlink_to("nowhere")
    with pytest.raises(lf.RunError, match="cannot be made: runs is not a folder"):
        lf.train(lf.Options(sources=("text.txt",), hidden_size=4, epochs=0.1))
