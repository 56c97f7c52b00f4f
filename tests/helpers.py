"""Shared by the tests: data in float64, gradients by name, commands to run, and cells as a user would write them."""

import io
import json
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import loopfold as lf
from loopfold import cli
from loopfold.training.effects import EFFECT
from loopfold.training.folder import RunFolder

WORKS = """import torch
from torch import nn

class Works(nn.Module):
    def __init__(self, n_in, n):
        super().__init__()
        self.A = nn.Linear(n_in + n, n)

    def forward(self, h, x):
        return torch.tanh(self.A(torch.cat([h, x], -1)))
"""  # the file of a user's own cell


def random_text(characters: int) -> str:
    """Words in no order, some of which end a line; the same in every test."""
    words = random.Random(0).choices(["the", "cat", "sat", "on", "a", "mat", "ran\n"], k=characters)
    return " ".join(words)[:characters]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def assert_same(came: Any, needed: Any, tolerance: float = 1e-11) -> None:
    """Tensors, or tuples, lists or dicts of them, equal up to rounding in float64."""
    torch.testing.assert_close(came, needed, rtol=tolerance, atol=tolerance)


def gradients(loss: Tensor, of: nn.Module | Mapping[str, Tensor], **inputs: Tensor) -> dict[str, Tensor]:
    """The gradient of `loss` with respect to every parameter and every input, by name; zeros where unused."""
    wanted = {**(dict(of.named_parameters()) if isinstance(of, nn.Module) else of), **inputs}
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(wanted, found, strict=True))


def flags_of(options: lf.Options) -> list[str]:
    """Every option that has an effect as arguments of `loopfold train`, so that no preset has a say."""
    flags = ["--split=" + "/".join(map(str, options.split))]
    for name, value in options.as_json().items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags += [f"--{flag}"] if value else [f"--no-{flag}"] if name != "one_hot" else []
        elif name in EFFECT and not EFFECT[name][0](options):
            continue
        elif value is not None and name not in ("sources", "split"):
            flags.append(f"--{flag}={'-'.join(map(str, value)) if isinstance(value, tuple) else value}")
    return [*options.sources, *flags]


def wait_for_step(path: Path, step: int, *processes: subprocess.Popen[str]) -> None:
    """Until the run at `path` has a checkpoint of that step; all the processes must still be there."""
    until = time.monotonic() + 60
    while not (path / "checkpoint.json").exists() or RunFolder(path).checkpoint["step"] < step:
        assert all(process.poll() is None for process in processes), [p.communicate() for p in processes]
        assert time.monotonic() < until
        time.sleep(0.003)


def said_by(*arguments: object) -> tuple[Any, str, str]:
    """A command in this process: its exit code, what it prints, and what it says."""
    out, err = io.StringIO(), io.StringIO()
    patched = mock.patch.object(sys, "argv", ["loopfold", *map(str, arguments)])
    with patched, redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code, out.getvalue(), err.getvalue()


def everything(path: Path) -> dict[str, bytes | None]:
    """All files below a folder."""
    return {str(p.relative_to(path)): p.read_bytes() if p.is_file() else None for p in path.rglob("*")}


def sign(path: Path, name: str, data: bytes) -> None:
    """Alter a file of a run and note its SHA-256, as whoever makes such a folder would."""
    (path / name).write_bytes(data)
    checkpoint = json.loads((path / "checkpoint.json").read_text())
    checkpoint["files"][name] = sha256(data).hexdigest()
    if name == "metrics.jsonl":
        checkpoint["metrics_bytes"] = len(data)
    sign_checkpoint(path, checkpoint)


def sign_checkpoint(path: Path, checkpoint: Any) -> None:
    if isinstance(checkpoint, dict):
        checkpoint.pop("sha256", None)
        own = json.dumps(checkpoint, indent=1, ensure_ascii=False).encode(errors="surrogatepass") + b"\n"
        checkpoint["sha256"] = sha256(own).hexdigest()
    (path / "checkpoint.json").write_text(json.dumps(checkpoint))


class TwoMatrices(nn.Module):
    """A cell as a user writes it: a plain module, nothing of ours."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.randn(n, n) / n**0.5)
        self.B = nn.Parameter(torch.randn(n, n_in) / n_in**0.5)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return 0.5 * h + torch.sin(h @ self.A.T + x @ self.B.T)


class Memory(NamedTuple):
    fast: Tensor
    slow: Tensor


class FastAndSlow(lf.Transition):
    """A cell with a NamedTuple for a state."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.randn(n, n) / n**0.5)
        self.B = nn.Parameter(torch.randn(n, n_in) / n_in**0.5)

    def forward(self, state: Memory, x: Tensor) -> Memory:
        fast = torch.tanh(state.slow @ self.A.T + x @ self.B.T)
        return Memory(fast, 0.9 * state.slow + 0.1 * fast)


class LearnedStart(lf.Transition):
    """A cell whose h(0) is a parameter."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.step = lf.Elman(n_in, n)
        self.h0 = nn.Parameter(torch.randn(n))

    def initial_state(self, batch: int) -> Tensor:
        return self.h0.expand(batch, -1)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.step(h, x)


def cells(n_in: int, n: int) -> dict[str, nn.Module]:
    """One of every kind of transition, in float64."""
    return {
        "Elman": lf.Elman(n_in, n).double(),
        "LSTM": lf.LSTM(n_in, n).double(),
        "GRU": lf.GRU(n_in, n).double(),
        "LayerNormLSTM": lf.LayerNormLSTM(n_in, n).double(),
        "TwoMatrices": TwoMatrices(n_in, n).double(),
        "FastAndSlow": FastAndSlow(n_in, n).double(),
        "LearnedStart": LearnedStart(n_in, n).double(),
    }


CELLS = ["Elman", "LSTM", "GRU", "LayerNormLSTM", "TwoMatrices", "FastAndSlow", "LearnedStart"]
