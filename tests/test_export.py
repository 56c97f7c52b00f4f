"""A step in C, JavaScript and ONNX gives what it gives in Python, whatever it is."""

import ctypes
import json
import math
import random
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_random_steps import BINARY, CHOICES, UNARY, WITH_WEIGHTS, RandomStep
from torch import Tensor, nn
from zoo import AWKWARD, TENSORS, WITH_INPUT, Autonomous, Awkward

import loopfold as lf
from loopfold.exporting.onnx import onnx_model
from loopfold.exporting.program import StepProgram
from loopfold.language.recurrent import recurrent_lm
from loopfold.stepgraph.graph import Refusal
from loopfold.text.vocabulary import Bytes, Characters, Words

Rows = list[list[float]]
CC = shutil.which("cc")
NODE = shutil.which("node")
STRICT = ["-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror"]


def wanted(model: nn.Module, x: Tensor) -> NDArray[Any]:
    """The outputs of one sequence `[τ, …]` by the definition: in float64."""
    stepper = lf.Stepper(model.double().eval())
    found = np.array([np.asarray(stepper.step(row)).reshape(-1) for row in x.double() if True])
    model.float()
    return found


# ------------------------------------------------------------------ running what was written


def compiled(folder: Path, sources: Sequence[Path], optimise: str = "-O1") -> ctypes.CDLL:
    if CC is None:
        pytest.skip("no C compiler")
    library = folder / "exported.so"
    command = [CC, *STRICT, optimise, "-shared", "-fPIC", *map(str, sources), "-o", str(library), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def in_c(library: ctypes.CDLL, name: str, x: Tensor, width: int) -> NDArray[Any]:
    memory = ctypes.create_string_buffer(1 << 20)
    library[f"{name}_init"](memory)
    out = np.full((len(x), width), np.nan, dtype=np.float32)
    for row, into in zip(x, out, strict=True):
        given = np.ascontiguousarray(row.reshape(-1).numpy())
        read = ctypes.c_long(int(given[0])) if row.dtype == torch.int64 else ctypes.c_void_p(given.ctypes.data)
        assert library[f"{name}_step"](memory, read, ctypes.c_void_p(into.ctypes.data)) == 0
    return out


def in_node(folder: Path, names: Sequence[str], xs: Sequence[Tensor]) -> list[NDArray[Any]]:
    if NODE is None:
        pytest.skip("no node")
    data = [{"name": name, "x": x.reshape(len(x), -1).tolist(), "tokens": x.dtype == torch.int64}
            for name, x in zip(names, xs, strict=True)]  # fmt: skip
    (folder / "data.json").write_text(json.dumps(data))
    (folder / "run.mjs").write_text(
        """import { readFileSync, writeFileSync } from "node:fs";
        const found = [];
        for (const { name, x, tokens } of JSON.parse(readFileSync(new URL("data.json", import.meta.url)))) {
          const { create } = await import(`./${name}.mjs`);
          const model = create();
          for (const row of x.slice(0, 2)) model.step(tokens ? row[0] : row);
          model.reset();
          found.push(x.map((row) => [...model.step(tokens ? row[0] : row)].map(String)));
        }
        writeFileSync(new URL("found.json", import.meta.url), JSON.stringify(found));"""
    )
    done = subprocess.run([NODE, str(folder / "run.mjs")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [np.array(rows, dtype=np.float64) for rows in json.loads((folder / "found.json").read_text())]


def in_onnx(program: StepProgram, x: Tensor, one_step: bool = False, lengths: Tensor | None = None) -> list[Any]:
    """The outputs `[τ, batch, …]` and the last state, for x `[τ, batch, …]`."""
    runtime = pytest.importorskip("onnxruntime")
    model = onnx_model(program, one_step, lengths is not None)
    options = runtime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session = runtime.InferenceSession(model.SerializeToString(), options)
    batch = x.shape[1]
    state = [s.reshape(1, *leaf.shape).expand(batch, *leaf.shape).numpy()
             for s, leaf in zip(program.start, program.state, strict=True)]  # fmt: skip
    names = [leaf.name for leaf in program.state]
    given = {program.x[0].name: x.numpy()} | dict(zip(names, state, strict=True))
    if not one_step:
        return session.run(None, given | ({} if lengths is None else {"lengths": lengths.numpy()}))
    outputs = []
    for row in x.numpy():
        out, *state = session.run(None, {program.x[0].name: row} | dict(zip(names, state, strict=True)))
        outputs.append(out)
    return [np.stack(outputs), *state]


# ------------------------------------------------------------------ every kind of step


def steps() -> dict[str, Callable[[], tuple[nn.Module, Tensor]]]:
    def cell(kind: Callable[[int, int], nn.Module]) -> Callable[[], tuple[nn.Module, Tensor]]:
        return lambda: (kind(6, 6), torch.randn(9, 6))

    found = {kind.__name__: cell(kind) for kind in (*WITH_INPUT, *TENSORS)}
    found |= {name: lambda step=step: (Awkward(step, 6), torch.randn(9, 6)) for name, step in AWKWARD.items()}
    return found


def test_every_kind_of_step(tmp_path: Path) -> None:
    close(tmp_path, {f"m{i}": make for i, make in enumerate(steps().values())})


OPERATIONS = [op for op in (*WITH_WEIGHTS, *UNARY, *BINARY, *CHOICES) if op not in ("dropout", "noise")]


@pytest.mark.parametrize("part", range(10))
def test_random_steps(part: int, tmp_path: Path) -> None:
    def make(seed: int) -> tuple[nn.Module, Tensor]:
        choose = random.Random(seed)
        program = [
            (choose.choice(OPERATIONS), choose.randrange(50), choose.randrange(50))
            for _ in range(choose.randrange(1, 9))
        ]
        n = choose.choice([4, 6, 18])
        return RandomStep(program, n, choose.randrange(1, 4)), torch.randn(5, n)

    close(tmp_path, {f"m{i}": lambda i=i: make(1000 * part + i) for i in range(50)})


def close(folder: Path, makes: dict[str, Callable[[], tuple[nn.Module, Tensor]]]) -> None:
    """Each model in every language gives what it gives in Python."""
    programs, xs, truth, bound = {}, {}, {}, {}
    refused = {}
    for i, (name, make) in enumerate(makes.items()):
        torch.manual_seed(i)
        model, x = make()
        try:
            programs[name] = StepProgram.of(model, x[:1])
        except Refusal as reason:
            refused[name] = str(reason)
            continue
        lf.export(model, folder / f"{name}.c", x=x[:1])
        lf.export(model, folder / f"{name}.mjs", x=x[:1])
        xs[name] = x
        single = np.array([np.asarray(o).reshape(-1) for o in map(lf.Stepper(model).step, x[:, None])])
        truth[name] = wanted(model, x[:, None])
        rough = np.abs(single - truth[name]).max()
        bound[name] = max(2e-5, 20 * rough) * max(1.0, np.abs(truth[name]).max())
    assert len(refused) < len(makes) / 10, refused
    library = compiled(folder, [folder / f"{name}.c" for name in programs])
    node = in_node(folder, [*programs], [*xs.values()])
    for name, by_node in zip(programs, node, strict=True):
        error = {
            "C": in_c(library, name, xs[name], truth[name].shape[1]) - truth[name],
            "JavaScript": by_node - truth[name],
            "ONNX": in_onnx(programs[name], xs[name][:, None])[0].reshape(truth[name].shape) - truth[name],
        }
        for language, e in error.items():
            assert np.abs(e).max() <= bound[name], (name, language, programs[name].order)
