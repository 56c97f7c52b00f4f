"""More of `export`: the tail of erfc, steps that read a context, the size of files."""

import ctypes
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import loopfold as lf
from loopfold.exporting.program import StepProgram
from loopfold.states import leaves


class Bells(lf.Transition):
    """The complement of erf of what it reads, and gelu."""

    def __init__(self) -> None:
        super().__init__()
        self.input_size, self.k = 7, nn.Parameter(torch.ones(7))

    def initial_state(self, batch: int) -> Tensor:
        return self.k.new_zeros(batch, 7)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Any, Tensor]:
        return (torch.erfc(x * self.k), F.gelu(x)), h * 0.5


def in_onnx(path: Path, **given: Any) -> list[Any]:
    session = pytest.importorskip("onnxruntime").InferenceSession(path)
    return session.run(None, {name: np.asarray(value) for name, value in given.items()})


def test_the_tail_of_erfc_in_onnx(tmp_path: Path) -> None:
    lf.export(Bells(), tmp_path / "bells.onnx")
    x = torch.cat(
        [torch.linspace(-9, 9, 7 * 600), torch.tensor([10.0, 30, -30, torch.inf, -torch.inf, torch.nan, 0.5])]
    )
    x = x.reshape(-1, 1, 7)
    erfc, gelu, _ = (
        torch.from_numpy(t).double() for t in in_onnx(tmp_path / "bells.onnx", x=x, h=np.zeros((1, 7), "f"))
    )
    true, small = torch.erfc(x.double()), torch.finfo(torch.float32).tiny
    torch.testing.assert_close(erfc, true, rtol=2e-6, atol=small, equal_nan=True)
    torch.testing.assert_close(gelu[:-1], F.gelu(x.double())[:-1], rtol=1e-6, atol=3e-6)


# ------------------------------------------------------------------ a context


class Conditioned(lf.Transition):
    """It reads x, a context of two parts of odd sizes, one of them true or false, and the number of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.input_size = 3
        self.U, self.C, self.W = nn.Linear(3, 5), nn.Linear(4, 5), nn.Linear(5, 5)

    def initial_state(self, batch: int) -> Tensor:
        return self.W.bias.new_full((batch, 5), 0.25)

    def forward(self, h: Tensor, x: Tensor, context: tuple[Tensor, Tensor], t: Tensor) -> tuple[Tensor, Tensor]:
        where, which = context
        c = self.C(where).amax(1) * torch.sin(t)
        h = torch.where(which, torch.tanh(self.U(x) + self.W(h) + c), h)
        return h * 2, h


class Driven(lf.Transition):
    """It reads nothing but a context."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Linear(5, 5)

    def initial_state(self, batch: int) -> Tensor:
        return self.W.bias.new_zeros(batch, 5)

    def forward(self, h: Tensor, context: Tensor) -> Tensor:
        return torch.tanh(self.W(h) + context)


def attention() -> tuple[nn.Module, Tensor, Any]:
    model = lf.AttentionDecoder(lf.GRU(3, 5), lf.LSTM(4 + 5, 6), outputs=4)
    source = model.attention.source(torch.randn(7, 2, 5), torch.tensor([7, 3]))
    return model.attention, torch.randn(9, 2, 4), type(source)(*(part.detach() for part in source))


CONTEXTS: dict[str, Callable[[], tuple[nn.Module, Tensor | None, Any]]] = {
    "conditioned": lambda: (Conditioned(), torch.randn(9, 2, 3), (torch.randn(2, 3, 4), torch.rand(2, 5) > 0.3)),
    "driven": lambda: (lf.Recurrent(Driven()), None, torch.randn(2, 5)),
    "attention": attention,
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_is_another_input(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, context = CONTEXTS[name]()
    f: Any = model.cell if isinstance(model, lf.Recurrent) else model
    start, steps = f.initial_state(2), 9
    run = lf.unfold(f, x, start, context=context, steps=steps, engine=lf.Sequential())
    truth = [leaf.detach().numpy() for leaf in (leaves(run.states if run.outputs is None else run.outputs))]
    given = [np.asarray(leaf, dtype=np.float32) for leaf in leaves(context)]
    like = None if x is None else x[0]
    for ending in ("c", "mjs", "onnx"):
        lf.export(model, tmp_path / f"m.{ending}", x=like, context=context)

    program = StepProgram.of(model, like, context)
    names = [leaf.name for leaf in program.x if leaf.still]
    feeds: dict[str, Any] = dict(zip(names, given, strict=True))
    feeds |= {leaf.name: part.detach() for leaf, part in zip(program.state, leaves(start), strict=True)}
    feeds |= {"steps": np.array(steps)} if x is None else {"x": x.numpy()}
    found = in_onnx(tmp_path / "m.onnx", **feeds)
    for a, b in zip(truth, found, strict=False):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)

    if x is not None:  # sequences of other lengths
        lf.export(model, tmp_path / "lengths.onnx", x=like, context=context, lengths=True)
        found = in_onnx(tmp_path / "lengths.onnx", **feeds, lengths=np.array([9, 4]))
        np.testing.assert_allclose(truth[0][:4, 1], found[0][:4, 1], rtol=1e-5, atol=1e-5)
        assert not found[0][4:, 1].any()

    for i in range(2):  # sequence by sequence
        still = [part[i].reshape(-1).tolist() for part in given]
        rows = [[*([] if x is None else [x[t, i].tolist()]), *still] for t in range(steps)]
        expected = [np.concatenate([part[t, i].reshape(-1) for part in truth]) for t in range(steps)]
        for found in (in_c(tmp_path, rows, [part[0, 0].size for part in truth]), in_node(tmp_path, rows)):
            np.testing.assert_allclose(np.stack(expected), found, rtol=1e-5, atol=1e-5)


def in_c(folder: Path, rows: list[list[list[float]]], widths: list[int]) -> Any:
    if (cc := shutil.which("cc")) is None:
        pytest.skip("no C compiler")
    library = folder / "m.so"
    if not library.exists():
        command = [cc, "-O1", "-std=c99", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", str(folder / "m.c"), "-o"]
        subprocess.run([*command, str(library), "-lm"], check=True)
    code, memory = ctypes.CDLL(str(library)), ctypes.create_string_buffer(1 << 16)
    code.m_init(memory)
    found = []
    for row in rows:
        read = [(ctypes.c_float * len(part))(*part) for part in row]
        out = [(ctypes.c_float * width)() for width in widths]
        assert code.m_step(memory, *read, *out) == 0
        found.append(np.concatenate([np.array(part) for part in out]))
    return np.stack(found)


def in_node(folder: Path, rows: list[list[list[float]]]) -> Any:
    if (node := shutil.which("node")) is None:
        pytest.skip("no node")
    (folder / "run.mjs").write_text(
        f"""import {{ create }} from "./m.mjs";
        const model = create();
        const flat = (output) => output[0].length === undefined ? [...output] : output.flatMap((part) => [...part]);
        console.log(JSON.stringify({json.dumps(rows)}.map((row) => flat(model.step(...row)))));"""
    )
    done = subprocess.run([node, str(folder / "run.mjs")], capture_output=True, text=True, check=True)
    return np.array(json.loads(done.stdout))


def test_where_no_context_goes(tmp_path: Path) -> None:
    stack = lf.Stacked([lf.GRU(3, 5), lf.GRU(5, 5)])
    with pytest.raises(ValueError, match="layers on top of each other read no context; a transition or lf.Recurrent"):
        lf.export(stack, tmp_path / "m.c", context=torch.zeros(1, 3))
    with pytest.raises(ValueError, match="with a context if context= is given"):
        lf.export(Conditioned(), tmp_path / "m.c")
    assert [*tmp_path.iterdir()] == []


# ------------------------------------------------------------------ how large


def test_files_are_as_large_as_their_weights(tmp_path: Path) -> None:
    model = lf.SequenceToSequence(lf.GRU(64, 128), outputs=64)
    weights = sum(p.nbytes for p in model.parameters())
    files = lf.export(model, tmp_path / "m.c", weights_beside=True)
    for written in (files, lf.export(model, tmp_path / "m.onnx"), lf.export(model, tmp_path / "m.js", half=True)):
        assert sum(file.stat().st_size for file in written) <= 1.1 * weights
