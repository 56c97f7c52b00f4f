"""Two processes, each with half the streams, train what one trains; they end together and go on together."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import flags_of, wait_for_step

from loopfold.training.folder import RunFolder
from loopfold.training.loop import Run, open_run, resume, train
from loopfold.training.options import Options

pytestmark = pytest.mark.usefixtures("one_thread")
CHOICES: dict[str, Any] = {
    "cell": "lstm",
    "hidden_size": 8,
    "streams": 6,
    "window": 7,
    "vary_window": True,
    "schedule": "plateau",
    "average": "tail",
    "epochs": 3.0,
    "learning_rate": 0.02,
    "clip": 0.5,
    "warmup": 3,
    "evaluate_every": 9,
}
STEPS = 51
GONE = (
    "loopfold: another process of the run has ended or cannot be reached, so this one ends too. "
    "If {path} has a checkpoint, --resume goes on from it.\n"
)

# What each process runs: the command, with a note of every call of the model in training.
SPYING = """
import json, os
import torch
from loopfold import cli
from loopfold.language.recurrent import RecurrentLM

calls, forward = [], RecurrentLM.forward

def noting(self, tokens, context, lengths=None):
    if self.training and torch.is_grad_enabled():
        ends = [len(tokens)] * tokens.shape[1] if lengths is None else lengths.tolist()
        calls.append([tokens[:end, b].tolist() for b, end in enumerate(ends)])
    return forward(self, tokens, context, lengths)

RecurrentLM.forward = noting
try:
    cli.main()
finally:
    with open(__file__ + os.environ["RANK"], "w") as file:
        json.dump(calls, file)
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """899 characters, of which 719 are trained on: five streams of 120 and one of 119, so the last window is ragged."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(" ".join(random.Random(0).choices(["the", "cat", "sat", "on", "a", "mat", "ran\n"], k=400))[:899])
    return path


def options_of(text: Path, **changes: Any) -> Options:
    return Options(sources=(str(text),), split=(80, 10, 10), **(CHOICES | changes))


def command(options: Options, out: Path) -> list[str]:
    return ["train", f"--out={out}", "--quiet", "--save-every=0", *flags_of(options)]


def a_free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def pair(*arguments: str) -> list[subprocess.Popen[str]]:
    """The command in two processes, as `torchrun` would start them, but nobody ends one for the other."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(a_free_port()), "OMP_NUM_THREADS": "1"}
    processes: list[subprocess.Popen[str]] = []
    for rank in (0, 1):
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "loopfold", *arguments],
                env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                process_group=processes[0].pid if rank else 0,  # to be killed at the same moment
            )
        )
    return processes


def ends(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Of each: its exit code, what it printed and what it said."""
    try:
        said = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


def bits(path: Path) -> dict[str, Any]:
    """All that a run has come to, down to the last bit, but for the time it took."""
    folder = RunFolder.open(path)
    checkpoint = folder.checkpoint
    metrics = [{key: value for key, value in entry.items() if key != "seconds"} for entry in folder.metrics]
    return {kind: (path / checkpoint[kind]).read_bytes() for kind in ("weights", "best", "state")} | {"curve": metrics}


def assert_close_runs(one: Path, other: Path) -> None:
    """Weights, the carried state, the optimiser's and the curve, up to the rounding of float32."""
    first, second = RunFolder.open(one), RunFolder.open(other)
    assert first.checkpoint["step"] == second.checkpoint["step"] == STEPS
    for kind in ("weights", "best", "state"):
        came, needed = (folder.tensors(folder.checkpoint[kind]) for folder in (first, second))
        torch.testing.assert_close(came, needed, rtol=1e-4, atol=1e-5)
    assert len(first.metrics) == len(second.metrics)
    for entry, needed_entry in zip(first.metrics, second.metrics, strict=True):
        del entry["seconds"], needed_entry["seconds"]
        assert entry == pytest.approx(needed_entry, rel=1e-4)


@pytest.fixture(scope="module")
def alone(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of one process."""
    return train(options_of(text), tmp_path_factory.mktemp("alone") / "run")


@pytest.fixture(scope="module")
def together(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two, started as `loopfold train --help` says, with a note of what each trained on beside it."""
    path = tmp_path_factory.mktemp("together")
    (path / "notes").write_text(SPYING)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={a_free_port()}"]
    done = subprocess.run(
        [sys.executable, *torchrun, path / "notes", *command(options_of(text), path / "run")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{path / 'run'}\n"
    return path / "run"


def test_two_processes_train_what_one_trains(alone: Run, together: Path) -> None:
    """Six evaluations, a ragged last window, clipping by the norm over both; the valid ledger is the same too."""
    assert_close_runs(together, alone.path)
    assert open_run(together).options == alone.options
    assert sum("valid" in entry for entry in alone.metrics) == 6


def test_every_stream_is_trained_by_one_process(alone: Run, together: Path) -> None:
    """Side by side, what the two trained on is what one trains on, in every window."""
    first, second = (json.loads((together.parent / f"notes{rank}").read_text()) for rank in (0, 1))
    assert len(first) == len(second) == STEPS
    assert all(len(window) == 3 for window in first + second)
    epoch = [a + b for a, b in zip(first, second, strict=True)][: STEPS // 3]
    streams = [[token for window in epoch for token in window[b]] for b in range(6)]
    ids = alone.vocabulary.encode(alone.corpus().train).ids.tolist()
    assert [token for stream in streams for token in stream] == ids
    assert {*map(len, streams)} == {119, 120}, "no ragged end is tested"


def test_stopped_and_killed_together_they_go_on_bit_for_bit(text: Path, together: Path, tmp_path: Path) -> None:
    """A signal to one of them stops both after the same step; then both are killed; then they come to their end."""
    path = tmp_path / "run"
    processes = pair(*command(options_of(text), path))
    wait_for_step(path, 7, *processes)
    processes[1].send_signal(signal.SIGTERM)
    done = ends(processes)
    step = RunFolder.open(path).checkpoint["step"]
    said = f"loopfold: stopped at step {step} of {STEPS}; everything is saved in {path}.\n"
    assert done == [(143, "", said), (143, "", said)]

    resumed = ["train", f"--resume={path}", "--quiet", "--save-every=0"]
    processes = pair(*resumed)
    wait_for_step(path, step + 6, *processes)
    os.killpg(processes[0].pid, signal.SIGKILL)
    assert [code for code, *_ in ends(processes)] == [-signal.SIGKILL] * 2
    assert RunFolder.open(path).checkpoint["step"] < STEPS

    assert [code for code, *_ in ends(pair(*resumed))] == [0, 0]
    assert bits(path) == bits(together)


@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_is_killed_the_other_ends_and_says_why(victim: int, text: Path, alone: Run, tmp_path: Path) -> None:
    """Within seconds, without a traceback; then one process goes on alone with what both have done."""
    path = tmp_path / "run"
    processes = pair(*command(options_of(text), path))
    wait_for_step(path, 9, *processes)
    processes[victim].kill()
    killed = time.monotonic()
    processes[1 - victim].wait(timeout=20)
    assert time.monotonic() - killed < 10
    done = ends(processes)
    assert done[victim][0] == -signal.SIGKILL
    assert done[1 - victim] == (1, "", GONE.format(path=path))
    assert 9 <= RunFolder.open(path).checkpoint["step"] < STEPS
    resume(path)
    assert_close_runs(path, alone.path)


def test_streams_that_cannot_be_shared_are_one_clear_error(text: Path, tmp_path: Path) -> None:
    done = ends(pair(*command(options_of(text, streams=5), tmp_path / "run")))
    assert done == [(2, "", "loopfold: 5 streams cannot be shared by 2 processes; change --streams.\n")] * 2
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_named_by_default_is_the_same_for_both(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process chooses it, and tells the other."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(text.parent, "runs/text-lstm-1")  # something is there
    done = ends(pair("train", "--quiet", *flags_of(options_of(text, epochs=0.1, warmup=0))))
    assert [(code, said) for code, _, said in done] == [(0, ""), (0, "")]
    assert done[0][1] == "runs/text-lstm-2\n"
    assert sorted(p.name for p in Path("runs").iterdir()) == ["text-lstm-1", "text-lstm-2"]


def test_what_the_first_process_refuses_ends_the_other_too(text: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    first, second = ends(pair(*command(options_of(text), tmp_path)))
    assert first == (2, "", f"loopfold: {tmp_path} exists already: choose another --out, or remove it.\n")
    assert second == (1, "", GONE.format(path=tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
