"""The table of operations, walked: every entry against torch, in every engine, forwards and backwards, and in C."""

import ctypes
import math
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engines import DTYPES, ENGINES, assert_agrees
from torch import Tensor, nn

import loopfold as lf
from loopfold.engines import programs
from loopfold.engines.vectors import LLVM
from loopfold.engines.writing import Buffer, Role
from loopfold.stepgraph.aten import _KNOWN
from loopfold.stepgraph.differentiate import differentiate, kept_values
from loopfold.stepgraph.graph import Unsound
from loopfold.stepgraph.hoist import hoist
from loopfold.stepgraph.loop import Value, ordered
from loopfold.stepgraph.ops import OPS, Kind, Op
from loopfold.stepgraph.rules import OWN, RULES
from loopfold.stepgraph.rules.registry import plain
from loopfold.stepgraph.split import Loop
from loopfold.stepgraph.verify import verify, verify_reverse

pytestmark = pytest.mark.usefixtures("one_thread")
COMPUTED = [op for op in OPS.values() if op.kind in (Kind.POINTWISE, Kind.REDUCTION)]
POINTWISE = [op for op in COMPUTED if op.kind is Kind.POINTWISE]
EXPONENT = 3.0


def name(op: Op) -> str:
    return op.name


# Onto all numbers, those above 0, those from 0 to 1, those above 1
DOMAINS: tuple[Callable[[Tensor], Tensor], ...] = (lambda a: a, torch.exp, torch.sigmoid, lambda a: 1 + a.exp())


class Step(nn.Module):
    """One operation on what changes from step to step, on the first of some domains where it is defined."""

    def __init__(self, op: Op, domains: tuple[Callable[[Tensor], Tensor], ...] = DOMAINS) -> None:
        super().__init__()
        self.op, self.scale = op, nn.Parameter(torch.linspace(0.5, 1.5, 5))
        for self.domain in domains:
            h, x = torch.linspace(-2, 2, 35).view(7, 5), torch.linspace(1.3, -1.7, 35).view(7, 5)
            if bool(self(h, x).isfinite().all()):
                break

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        args = [self.domain(a) for a in (1.3 * h + x * self.scale, 0.7 * x - h, h * x)[: self.op.arity]]
        if self.op.name == "expand":
            args = [a[:, :1] for a in args]
        args = [a > 0.1 if i < self.op.conditions else a for i, a in enumerate(args)]
        width = 1 if self.op.kind is Kind.REDUCTION else h.shape[1]
        y = self.op.apply(*args, width=width, index=EXPONENT)
        return 0.4 * h + 0.3 * torch.tanh(y.to(h.dtype))  # bounded, whatever the operation


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("op", COMPUTED, ids=name)
def test_every_operation_has_torchs_values_and_gradients(op: Op, engine: lf.Engine) -> None:
    for dtype in DTYPES:
        x, h = torch.randn(6, 3, 5, dtype=dtype), torch.randn(3, 5, dtype=dtype)
        step = Step(op).to(dtype)
        assert_agrees(engine, step, x, None, state=h)
        assert_agrees(engine, step, x, [6, 2, 5], state=h)
    loop = hoist(lf.step_graph(step, x[0], h))
    assert op.name in {v.op for v in ordered(loop.emitted)}  # it was this operation that was tested


def test_every_operation_has_its_line_of_llvm_and_its_rule() -> None:
    assert LLVM.keys() == {op.name for op in COMPUTED}
    reductions = {op.name for op in COMPUTED if op.kind is Kind.REDUCTION}
    assert {op.name for op in OPS.values() if op.start is not None} == reductions
    assert {torch_name for op in POINTWISE for torch_name in op.aten} <= RULES.keys()


def test_torchs_operations_go_by_names_that_torch_has() -> None:
    for known in (*_KNOWN, *RULES):
        assert known in ("getitem", "surrogate", "pick") or hasattr(torch.ops.aten, known), known


def test_a_new_operation_of_truth_values_is_one_entry_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    xor = replace(OPS["and"], name="xor", python="{0} ^ {1}", c="{0} != {1}", aten=("logical_xor", "bitwise_xor"))
    monkeypatch.setitem(OPS, "xor", xor)
    monkeypatch.setitem(LLVM, "xor", lambda w, p, q: w.b.xor(p, q))
    for torch_name in xor.aten:  # what importing `rules` does with the table
        monkeypatch.setitem(OWN, torch_name, xor)
        monkeypatch.setitem(RULES, torch_name, plain(xor))

    class Either(lf.Elman):
        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            return torch.where((h > 0) ^ torch.logical_xor(x > 0, h > 0.5), super().forward(h, x), 0.3 * h)

    for engine in ENGINES:
        assert_agrees(engine, Either(4, 4).double(), torch.randn(6, 3, 4).double())


# ------------------------------------------------------------------ in C


@pytest.fixture(scope="module")
def in_c(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Every pointwise operation as a function of C, on doubles; truth values are 0 and 1."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    functions = ["#include <math.h>"]
    for op in POINTWISE:
        assert op.arity is not None
        names = [f"a{i}" for i in range(op.arity)]
        body = op.c.format(*names, index=EXPONENT)
        functions.append(f"double f_{op.name}({', '.join(f'double {a}' for a in names)}) {{ return {body}; }}")
    folder = tmp_path_factory.mktemp("c")
    Path(folder, "ops.c").write_text("\n".join(functions))
    flags = ["-O1", "-shared", "-fPIC", "-std=c99", "-Wall", "-Werror"]
    subprocess.run([compiler, *flags, "ops.c", "-o", "ops.so", "-lm"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "ops.so"))


@pytest.mark.parametrize("op", POINTWISE, ids=name)
def test_every_operation_means_the_same_in_c(op: Op, in_c: ctypes.CDLL) -> None:
    function = getattr(in_c, f"f_{op.name}")
    function.restype, function.argtypes = ctypes.c_double, [ctypes.c_double] * (op.arity or 0)
    numbers = torch.tensor([-math.inf, -2.5, -1.0, -0.3, 0.0, 0.3, 1.0, 2.5, math.inf, math.nan], dtype=torch.float64)
    columns = torch.cartesian_prod(*[numbers] * (op.arity or 0)).reshape(-1, op.arity or 1)
    args = [c != 0 if i < op.conditions else c for i, c in enumerate(columns.T)]
    wanted = op.apply(*[a[:, None] for a in args], width=1, index=EXPONENT)[:, 0].double()
    found = torch.tensor([function(*map(float, row)) for row in zip(*args, strict=True)], dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0, equal_nan=True)


# ------------------------------------------------------------------ a loop is verified before code is made


def lstm() -> Loop:
    return hoist(lf.step_graph(lf.LSTM(3, 5), torch.zeros(1, 3)))


def wide(width: int) -> Value:
    return Value("state", (), width, 0)


NUMBER, TRUE = Value("number", (), 1, 0.5), Value("gt", (wide(5), wide(5)), 5)
BROKEN: dict[str, Value] = {
    "an operation that there is not": Value("sech", (wide(5),), 5),
    "too many arguments": Value("tanh", (wide(5), wide(5)), 5),
    "too few arguments": Value("where", (TRUE, wide(5)), 5),
    "no part at all": Value("cat", (), 5),
    "rows that do not fit": Value("add", (wide(5), Value("constant", (), 4, 0)), 5),
    "a result too wide": Value("tanh", (wide(5),), 6),
    "a row repeated": Value("expand", (wide(5),), 10),
    "a part beyond the end": Value("slice", (wide(5),), 3, 3),
    "parts that do not add up": Value("cat", (wide(5), wide(5)), 9),
    "a reduction to unequal parts": Value("sum", (wide(5),), 2),
    "a place beyond the end": Value("take", (wide(5),), 3, (0, 5, 1)),
    "fewer places than features": Value("take", (wide(5),), 3, (0, 1)),
    "a state that is not there": Value("state", (), 5, 7),
    "a state of another size": wide(6),
    "an input that is not there": Value("input", (), 20, 9),
    "an input of another size": Value("input", (), 7, 0),
    "a constant that is not there": Value("constant", (), 5, 99),
    "a matrix of two sizes": Value("matmul", (wide(5),), 7, (0, False)),
    "a matrix as a row": Value("constant", (), 5, 0),
    "a table that is not there": Value("row", (NUMBER,), 5, (99, 3)),
    "a table of another size": Value("row", (NUMBER,), 7, (0, 3)),
    "rows that do not come out even": Value("row", (wide(5),), 7, (0, 5)),
    "a gradient in the forward step": Value("carry", (), 5, 0),
    "a truth value as the state": TRUE,
    "a truth value added": Value("add", (TRUE, wide(5)), 5),
    "a number as a condition": Value("where", (wide(5), wide(5), NUMBER), 5),
}


@pytest.mark.parametrize("what", BROKEN)
def test_verify_finds(what: str) -> None:
    loop = lstm()
    verify(loop)
    with pytest.raises(Unsound):
        verify(replace(loop, emitted=(*loop.emitted, BROKEN[what])))


def test_verify_finds_faults_of_the_reverse_step() -> None:
    loop, arrives = lstm(), (True, True)
    reverse, kept = differentiate(loop, arrives), kept_values(loop)
    verify_reverse(loop, reverse, arrives, kept)
    product = reverse.products[0]
    wrong: list[tuple[Any, tuple[bool, ...], tuple[Value, ...]]] = [
        (reverse, arrives, ()),  # products that would be computed again
        (reverse, (True, False), kept),  # a gradient that does not come
        (replace(reverse, carries=reverse.carries[::-1][:1] * 2), arrives, kept[:1]),
        (replace(reverse, carries=(NUMBER, *reverse.carries[1:])), arrives, kept),
        (replace(reverse, inputs=(wide(5),)), arrives, kept),
        (replace(reverse, carries=(TRUE, *reverse.carries[1:])), arrives, kept),
        (replace(reverse, products=(replace(product, matrix=99),)), arrives, kept),
        (replace(reverse, products=(replace(product, left=product.right, right=product.left),)), arrives, kept),
        (replace(reverse, rows=((0, wide(5)),)), arrives, kept),
    ]
    for bad, incoming, values in wrong:
        with pytest.raises(Unsound):
            verify_reverse(loop, bad, incoming, values)


def test_a_program_that_is_wrong_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(loop: Loop) -> None:
        raise Unsound("tanh of 5 features is wrong.")

    monkeypatch.setattr(programs, "verify", fault)
    cell, x = lf.Elman(3, 5), torch.randn(30, 2, 3)
    with pytest.warns(lf.EngineWarning, match="fault in Loopfold"):
        found = lf.unfold(cell, x).hidden
    torch.testing.assert_close(found, lf.unfold(cell, x, engine=lf.Sequential()).hidden, rtol=0, atol=0)


# ------------------------------------------------------------------ the code


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (lf.Looped(), ["torch.sigmoid(", "for t in range(T)"]),
        (lf.FusedCPU(), ["llvm.fma", '@"kernel"', "buffer 0: leaf 0 of the state"]),
    ],
)
def test_the_generated_code_can_be_read(engine: lf.Engine, words: list[str]) -> None:
    cell, x = lf.LSTM(3, 5), torch.randn(30, 2, 3)
    text = lf.Recurrent(cell, engine).explain(x, code=True)
    assert all(word in text for word in [*words, "LSTM forward", "LSTM backward"])
    assert "LSTM forward" not in lf.Recurrent(cell, engine).explain(x)
    assert lf.Recurrent(cell, lf.Sequential()).explain(x, code=True).endswith("it was asked for.")


class Forgetful(lf.Elman):
    """No step reads the one before."""

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.U.T)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
def test_where_there_is_no_loop_there_is_no_code(engine: lf.Engine) -> None:
    layer, x = lf.Recurrent(Forgetful(3, 5), engine), torch.randn(30, 2, 3)
    assert layer.explain(x, code=True) == layer.explain(x)


def test_every_buffer_is_described() -> None:
    assert all("{i}" in role.value for role in Role)
    assert str(Buffer(Role.MATRIX, 3, True)) == (
        "matrix 3 of what is computed once, in the order in which the kernel reads it, transposed"
    )


class Filtered(nn.Module):
    """One convolution over the state, and one back to its sizes."""

    def __init__(self, there: nn.Module, back: nn.Module, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.there, self.back, self.sizes = there, back, sizes

    def initial_state(self, batch: int) -> Tensor:
        start = torch.linspace(-1, 1, batch * math.prod(self.sizes)).view(batch, *self.sizes)
        return start.to(next(self.parameters()).dtype)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.back(torch.relu(self.there(h))) + x.view(h.shape))


@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("there", "back", "sizes"),
    [
        (
            nn.Conv1d(4, 6, 3, padding=2, dilation=2, groups=2),
            nn.ConvTranspose1d(6, 4, 3, padding=1, bias=False),
            (4, 7),
        ),
        (nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.ConvTranspose2d(3, 2, 4, stride=2, padding=1), (2, 4, 6)),
        (nn.Conv2d(3, 3, (1, 3), padding="same", padding_mode="circular", groups=3), nn.Conv2d(3, 3, 1), (3, 2, 5)),
        (nn.Conv3d(1, 2, 2, padding=1), nn.Conv3d(2, 1, 2, bias=False), (1, 2, 3, 2)),
    ],
    ids=["dilated", "strided", "circular", "3d"],
)
def test_a_convolution_over_the_state(
    there: nn.Module, back: nn.Module, sizes: tuple[int, ...], dtype: torch.dtype, engine: lf.Engine
) -> None:
    step = Filtered(there, back, sizes).to(dtype)
    x = torch.randn(6, 3, math.prod(sizes), dtype=dtype)
    assert_agrees(engine, step, x, [6, 1, 4])


def test_a_convolution_that_is_too_large_is_refused() -> None:
    step = Filtered(nn.Conv2d(8, 8, 3, padding=1), nn.Identity(), (8, 32, 32))
    with pytest.raises(ValueError, match="a convolution of 8192 numbers into 8192 is too large"):
        lf.unfold(step, torch.randn(3, 1, 8 * 32 * 32), engine=lf.Looped())
