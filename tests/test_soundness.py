"""What a compiled run must never do: crash, lose weights, or give a wrong value in silence.

Each test is of something that a user did, or could do, and that a compiler is tempted to get wrong.
"""

import array
import collections
import contextlib
import copy
import functools
import gc
import math
import multiprocessing
import random
import subprocess
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from test_engines import ENGINES, assert_agrees
from torch import Tensor, nn

import loopfold as lf
from loopfold.engines import auto, compiled, fused_cpu, looped, programs, selfcheck
from loopfold.engines.kernel import Kernel
from loopfold.states import leaves

X = torch.Generator().manual_seed(1)


def sequence(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=X, dtype=torch.float64).to(dtype)


class Given(lf.Transition):
    """A step given as a function of itself, its state and its input; n units, n inputs."""

    def __init__(self, step: Callable[..., Any], n: int = 4, states: int = 1) -> None:
        super().__init__()
        self.step, self.n, self.states = step, n, states
        self.W = nn.Parameter(torch.randn(n, n) / n**0.5)
        self.wide = nn.Parameter(torch.randn(2 * n, 2 * n) / n**0.5)
        self.norm = nn.LayerNorm(2 * n)

    def initial_state(self, batch: int) -> Any:
        parts = tuple(torch.linspace(-0.4, 0.5 + i, self.n).to(self.W).repeat(batch, 1) for i in range(self.states))
        return parts if self.states > 1 else parts[0]

    def forward(self, state: Any, x: Tensor) -> Any:
        return self.step(self, state, x)


def both(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b], -1)


# ------------------------------------------------------------------ memory that nothing has written


OVER_STATE_AND_INPUT: dict[str, Callable[..., Tensor]] = {
    "layer norm": lambda f, h, x: torch.tanh((f.norm(both(h, x)) @ f.wide)[:, : f.n]),
    "softmax": lambda f, h, x: torch.tanh((torch.softmax(both(h, x), -1) @ f.wide)[:, : f.n]),
    "mean": lambda f, h, x: torch.tanh(h @ f.W + both(h, x).mean(-1, keepdim=True)),
    "sum": lambda f, h, x: torch.tanh(h @ f.W + both(h, x).sum(-1, keepdim=True)),
    "amax": lambda f, h, x: torch.tanh(h @ f.W + both(h, x).amax(-1, keepdim=True)),
    "norm": lambda f, h, x: torch.tanh(h @ f.W + both(x, h).norm(dim=-1, keepdim=True)),
    "of a cat of results": lambda f, h, x: torch.tanh(h @ f.W + both(torch.sin(h), x).mean(-1, keepdim=True)),
    "twice": lambda f, h, x: torch.tanh(f.norm(both(both(h, x).softmax(-1)[:, : f.n] @ f.W, x))[:, : f.n] + h),
}


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", OVER_STATE_AND_INPUT)
def test_a_reduction_over_state_and_input_side_by_side(engine: lf.Engine, name: str) -> None:
    for n, batch in ((4, 1), (9, 3), (17, 5)):
        assert_agrees(engine, Given(OVER_STATE_AND_INPUT[name], n).double(), sequence(5, batch, n))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_loss_on_one_part_of_a_state_that_shares_a_cat(engine: lf.Engine, part: int) -> None:
    def step(f: Given, state: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor, ...]:
        a, b = (both(state[0], state[1]) @ f.wide + both(x, x)).chunk(2, -1)
        return torch.tanh(a), torch.sin(b), torch.tanh(state[2] + a)

    cell, x = Given(step, 5, states=3).double(), sequence(6, 3, 5)
    found = []
    for e in (engine, lf.Sequential()):
        cell.zero_grad()
        leaves(lf.unfold(cell, x, engine=e).states)[part].square().sum().backward()
        found.append([p.grad for p in cell.parameters() if p.grad is not None])
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-10)


def test_a_plan_that_reads_too_early_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in the plan, made on purpose: no kernel is written, and the definition runs."""
    from loopfold.engines.plan import Plan

    right = Plan._stage
    monkeypatch.setattr(Plan, "_stage", lambda self, v: 0 if v.op == "cat" else right(self, v))
    cell, x = Given(OVER_STATE_AND_INPUT["mean"]), sequence(5, 2, 4, dtype=torch.float32)
    with pytest.warns(lf.EngineWarning, match="before it is written"):
        found = lf.unfold(cell, x, engine=lf.FusedCPU()).hidden
    assert torch.equal(found, lf.unfold(cell, x, engine=lf.Sequential()).hidden)


def test_a_plan_of_the_way_back_that_reads_too_early_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from loopfold.engines.plan import Plan

    right = Plan._stage
    monkeypatch.setattr(
        Plan, "_stage", lambda self, v: 0 if v.op == "sum" and self.source.backwards else right(self, v)
    )
    cell, x = Given(OVER_STATE_AND_INPUT["layer norm"]).double(), sequence(5, 2, 4)

    def gradients(engine: lf.Engine) -> Tensor:
        return torch.autograd.grad(lf.unfold(cell, x, engine=engine).hidden.sum(), cell.wide)[0]

    with pytest.warns(lf.EngineWarning, match="before it is written"):
        found = gradients(lf.FusedCPU())
    torch.testing.assert_close(found, gradients(lf.Sequential()))


# ------------------------------------------------------------------ truth values, numbers, dtypes


TRUTH: dict[str, Callable[..., Tensor]] = {
    "a product with one": lambda f, h, x: torch.tanh(h @ f.W + x) * h.bool(),
    "a sum of two": lambda f, h, x: torch.tanh(h @ f.W + x) + ((h > 0) + (x > 0)),
    "a product of two": lambda f, h, x: torch.tanh(h @ f.W + x) + ((h > 0) * (x > 0)),
    "there and back": lambda f, h, x: torch.tanh(h @ f.W + x) + h.to(torch.bool).to(h.dtype),
    "the greater": lambda f, h, x: torch.where(torch.maximum(h > 0, x > 0), torch.tanh(h @ f.W), x),
    "the less": lambda f, h, x: torch.where(torch.minimum(h > 0, x > 0), torch.tanh(h @ f.W), x),
    "side by side": lambda f, h, x: torch.tanh(both(h > 0, x > 0).to(h.dtype) @ f.wide)[:, : f.n] + 0.1 * h,
    "a part": lambda f, h, x: torch.tanh(h @ f.W + x) * (h > 0)[:, :1],
    "chosen": lambda f, h, x: torch.tanh(h @ f.W + x) * torch.where(h > x, h > 0, x > 0),
    "copied": lambda f, h, x: torch.tanh(h @ f.W + x) * (h > 0).clone().detach(),
    "compared": lambda f, h, x: torch.tanh(h @ f.W + x) * ((h > 0) == (x > 0)),
    "chunks": lambda f, h, x: torch.tanh(h @ f.W + x) * both(*(h > 0).chunk(2, -1)[::-1]),
    "not": lambda f, h, x: torch.tanh(h @ f.W + x) * ~(h.bool() & (x > 0)),
}


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", TRUTH)
def test_truth_values_are_what_torch_makes_of_them(engine: lf.Engine, name: str) -> None:
    assert_agrees(engine, Given(TRUTH[name]).double(), sequence(5, 3, 4))
    assert_agrees(engine, Given(TRUTH[name]).double(), sequence(5, 3, 4), [5, 1, 3])


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
def test_a_truth_value_that_is_read_after_the_loop(engine: lf.Engine) -> None:
    def step(f: Given, state: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        up, also = state[0] > 0, x > 0
        h = torch.tanh(torch.where(up, state[0] @ f.W, x))
        return h, h + (up + also)

    assert_agrees(engine, Given(step, states=2).double(), sequence(5, 3, 4))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("exponent", [0, 0.0, 1, 2, 3, -1, 0.5])
def test_powers_at_zero(engine: lf.Engine, exponent: float) -> None:
    def step(f: Given, h: Tensor, x: Tensor) -> Tensor:
        v = torch.relu(h @ f.W)  # many are zero
        return torch.tanh((v if exponent > 0.5 else v + (exponent != 0)) ** exponent + x)

    assert_agrees(engine, Given(step).double(), sequence(5, 3, 4))


@pytest.mark.parametrize("engine", [*ENGINES, lf.Auto()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("of", ["state", "weights", "x"])
def test_dtypes_that_do_not_go_together_raise(engine: lf.Engine, of: str) -> None:
    """As the plain loop does: no kernel reads numbers of one size as numbers of another."""
    cell = Given(lambda f, h, x: torch.tanh(h @ f.W + (x @ f.W)))
    x, state = sequence(5, 4, 4, dtype=torch.float32), torch.zeros(4, 4)
    if of == "state":
        state = state.double()
    elif of == "weights":
        cell = cell.to(torch.bfloat16)
    else:
        x = x.double()
    for e in (engine, lf.Sequential()):
        with pytest.raises((ValueError, RuntimeError, TypeError)):
            lf.unfold(cell, x, state=state, engine=e)


def test_a_large_state_of_another_dtype_does_not_crash() -> None:
    """In a process of its own: it was a segmentation fault."""
    code = """
import torch, loopfold as lf
class Cell(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.W, self.U = torch.nn.Linear(1024, 1024), torch.nn.Linear(5, 1024)
    def forward(self, h, x):
        return torch.tanh(self.W(h) + self.U(x))
try:
    lf.unfold(Cell(), torch.randn(3, 4, 5), state=torch.zeros(4, 1024, dtype=torch.float64))
except (ValueError, RuntimeError) as error:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


def test_a_comparison_of_other_precision_is_not_rounded() -> None:
    """0.1 is another number in float32 than in float64, so h > x would be another truth value."""
    cell = Given(lambda f, h, x: torch.tanh(h @ f.W) * (h > x))
    x = torch.full((4, 2, 4), 0.1, dtype=torch.float64)
    state = torch.full((2, 4), 0.1)
    with pytest.raises(ValueError, match="is torch.float64 where the state is torch.float32"):
        lf.unfold(cell, x, state=state, engine=lf.FusedCPU())
    assert torch.equal(
        lf.unfold(cell, x, state=state).hidden, lf.unfold(cell, x, state=state, engine=lf.Sequential()).hidden
    )


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
def test_inverses_and_solutions_of_parameters(engine: lf.Engine) -> None:
    for step in (
        lambda f, h, x: torch.tanh(h @ torch.linalg.inv(f.W) + x),
        lambda f, h, x: torch.tanh(h @ torch.linalg.solve(f.W, f.W.T) + x),
    ):
        assert_agrees(engine, Given(step).double(), sequence(5, 3, 4))
    singular = Given(lambda f, h, x: torch.tanh(h @ torch.linalg.inv(f.W * 0) + x))
    for e in (engine, lf.Sequential()):
        with pytest.raises((RuntimeError, ValueError), match="singular"):
            lf.unfold(singular, sequence(5, 3, 4, dtype=torch.float32), engine=e)


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(4, 4))

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.tanh(state[0] @ self.W), state[1] * 0.5


@pytest.mark.parametrize("batches", [(5, 2), (5, 1), (0, 0)])
def test_states_of_unequal_batches_are_left_to_the_definition(batches: tuple[int, int]) -> None:
    state = torch.ones(batches[0], 4), torch.ones(batches[1], 3)
    with pytest.raises(ValueError, match="no sequences, or not equally many"):
        lf.unfold(Uneven(), steps=40, state=state, engine=lf.FusedCPU())
    assert [leaf.shape for leaf in lf.unfold(Uneven(), steps=40, state=state).states] == [
        (40, batches[0], 4),
        (40, batches[1], 3),
    ]


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
def test_a_negated_view_keeps_its_sign(engine: lf.Engine) -> None:
    cell, x = lf.Elman(1, 1).double(), sequence(5, 1, 1)
    state = torch.randn(1, 1, dtype=torch.complex128).conj().imag
    found, expected = (lf.unfold(cell, x, state=state, engine=e).hidden for e in (engine, lf.Sequential()))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
def test_a_gradient_that_is_none_stays_none(engine: lf.Engine) -> None:
    """Zeros in its place would let weight decay move a parameter that the loss does not know."""

    def step(f: Given, state: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(state[0] @ f.W + x), torch.tanh(both(state[1], state[0].detach()) @ f.wide)[:, : f.n]

    cell, x = Given(step, states=2).double(), sequence(6, 3, 4)
    for part in (0, 1):
        found = []
        for e in (engine, lf.Sequential()):
            cell.zero_grad()
            start = tuple(leaf.requires_grad_() for leaf in cell.initial_state(3))
            lf.unfold(cell, x, state=start, engine=e).states[part].sum().backward()
            found.append([t.grad is None for t in (*start, cell.W, cell.wide)])
        assert found[0] == found[1]


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
def test_no_result_shares_its_memory(engine: lf.Engine) -> None:
    def step(f: Given, s: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(s[0] @ f.W + torch.cat([s[2], s[2]], -1))
        return y, y, x[:, 1:3]

    cell, x = Given(step).double(), sequence(6, 3, 4)
    kept, z = x.clone(), torch.zeros(3, 4).double()
    with torch.no_grad():
        run = lf.unfold(cell, x, state=(z, z, z[:, :2]), engine=engine)
    run.states[1].zero_()
    run.states[2].zero_()
    assert torch.equal(x, kept)
    assert run.states[0].abs().sum() > 0


# ------------------------------------------------------------------ threads, forks, modes


def _plain(f: Given, h: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(h @ f.W + x)


@pytest.mark.parametrize("make", [lambda: lf.GRU(5, 8), lambda: Given(_plain, 5)])
def test_the_first_call_from_many_threads_keeps_the_weights(make: Callable[[], nn.Module]) -> None:
    cell = make()
    layer, x = lf.Recurrent(cell), sequence(6, 2, 5, dtype=torch.float32)
    failed: list[Any] = []
    before = copy.deepcopy(cell.state_dict())
    expected = lf.unfold(copy.deepcopy(cell), x, engine=lf.Sequential()).hidden
    start = threading.Barrier(8)

    def work(eager: bool) -> None:
        start.wait()
        for _ in range(5):
            found = lf.unfold(cell, x, engine=lf.Sequential()) if eager else layer(x)
            found.hidden.sum().backward()
            if not torch.allclose(found.hidden, expected, atol=1e-5):
                failed.append(found)

    threads = [threading.Thread(target=work, args=(i % 3 == 0,)) for i in range(8)]
    hook, threading.excepthook = threading.excepthook, failed.append
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threading.excepthook = hook
    assert not failed
    assert all(type(p) is nn.Parameter for p in cell.parameters())
    assert {k: v.tolist() for k, v in before.items()} == {k: v.tolist() for k, v in cell.state_dict().items()}


def _in_the_child(queue: Any, cell: nn.Module, other: nn.Module, x: Tensor) -> None:
    torch.set_num_threads(1)
    queue.put([lf.unfold(c, x, engine=lf.FusedCPU()).hidden.detach().tolist() for c in (cell, other)])


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_forked_process_runs_what_was_compiled_and_compiles_more() -> None:
    """Even if another thread was compiling, and holding the lock, at the moment of the fork."""
    cell, other, x = lf.GRU(3, 5), lf.LSTM(3, 5), sequence(7, 33, 3, dtype=torch.float32)
    expected = [lf.unfold(c, x, engine=lf.Sequential()).hidden.detach() for c in (cell, other)]
    lf.unfold(cell, x, engine=lf.FusedCPU())
    done, held = threading.Event(), threading.Event()

    def hold() -> None:
        with programs.alone():
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_in_the_child, args=(queue, cell, other, x))
    process.start()
    try:
        found = queue.get(timeout=60)
    finally:
        done.set()
        thread.join()
        process.join()
    torch.testing.assert_close([torch.tensor(f) for f in found], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, contextlib.nullcontext])
@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
def test_the_mode_of_the_first_call_decides_nothing_for_the_next(mode: Any, engine: lf.Engine) -> None:
    class Layers(lf.Transition):
        def __init__(self) -> None:
            super().__init__()
            self.W, self.U = nn.Linear(5, 5), nn.Linear(3, 5)

        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(self.W(h) + self.U(x))

    cell, x = Layers().double(), sequence(6, 2, 3)
    with mode():
        found = lf.unfold(cell, x, engine=engine).hidden
        torch.testing.assert_close(found, lf.unfold(cell, x, engine=lf.Sequential()).hidden)
    assert_agrees(engine, cell, x)
    assert type(engine).__name__ in lf.Recurrent(cell, engine).explain(x)


def test_a_step_that_switches_gradients_off_is_compiled_for_no_one() -> None:
    def step(f: Given, h: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = h.abs().mean(-1, keepdim=True)
        return torch.tanh(h @ f.W + x) / (1 + scale)

    cell, x = Given(step).double(), sequence(5, 2, 4)
    with torch.no_grad():
        lf.unfold(cell, x)
    assert_agrees(lf.Auto(), cell, x)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
def test_gradients_that_come_many_at_a_time(engine: lf.Engine) -> None:
    cell, x = lf.LSTM(3, 4).double(), sequence(4, 2, 3)

    def jacobians(e: lf.Engine) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        hidden = lf.unfold(cell, leaf, engine=e).hidden
        many = torch.eye(hidden.numel(), dtype=hidden.dtype).view(-1, *hidden.shape)
        by_batch = torch.autograd.grad(hidden, [leaf, *cell.parameters()], many, is_grads_batched=True)
        whole = torch.autograd.functional.jacobian(lambda v: lf.unfold(cell, v, engine=e).last.c, x, vectorize=True)
        hidden = lf.unfold(cell, leaf, engine=e).hidden
        mapped = torch.func.vmap(lambda g: torch.autograd.grad(hidden, leaf, g, retain_graph=True)[0])(many)
        return [*by_batch, whole, mapped]

    torch.testing.assert_close(jacobians(engine), jacobians(lf.Sequential()), rtol=1e-10, atol=1e-10)


def test_vmap_over_sequences() -> None:
    cell, x = lf.GRU(3, 4).double(), sequence(5, 6, 2, 3)
    mapped = torch.func.vmap(lambda v: lf.unfold(cell, v).hidden)(x)
    torch.testing.assert_close(mapped, torch.stack([lf.unfold(cell, v).hidden for v in x]))


def test_a_sparse_matrix_is_left_to_torch() -> None:
    class Sparse(lf.Transition):
        def __init__(self) -> None:
            super().__init__()
            self.W = nn.Parameter(torch.eye(4, dtype=torch.float64).to_sparse())

        def initial_state(self, batch: int) -> Tensor:
            return torch.zeros(batch, 4, dtype=torch.float64)

        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            return torch.tanh((self.W @ h.T).T + x)

    cell, x = Sparse(), sequence(5, 2, 4)
    with pytest.raises(ValueError, match="its W is sparse"):
        lf.unfold(cell, x, engine=lf.FusedCPU())
    assert torch.equal(lf.unfold(cell, x).hidden, lf.unfold(cell, x, engine=lf.Sequential()).hidden)


def test_a_mode_that_watches_operations_sees_them_all() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    cell, x = lf.Elman(3, 5), sequence(6, 2, 3, dtype=torch.float32)
    lf.unfold(cell, x)
    counts = []
    for engine in (lf.Auto(), lf.Sequential()):
        with FlopCounterMode(display=False) as counter:
            lf.unfold(cell, x, engine=engine)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_hooks_of_all_modules_and_of_tensors_are_called() -> None:
    seen: list[int] = []
    cell, x = lf.Elman(3, 5), sequence(6, 2, 3, dtype=torch.float32)
    lf.unfold(cell, x)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    try:
        lf.unfold(cell, x)
    finally:
        handle.remove()
    assert len(seen) == 6

    def step(f: Given, h: Tensor, x: Tensor) -> Tensor:
        new = torch.tanh(h @ f.W + x)
        if new.requires_grad:
            new.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return new

    def always(f: Given, h: Tensor, x: Tensor) -> Tensor:
        new = torch.tanh(h @ f.W + x)
        new.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return new

    assert_agrees(lf.Auto(), Given(always).double(), sequence(5, 2, 4))
    assert_agrees(lf.Auto(), Given(step).double(), sequence(5, 2, 4))


def test_torch_compile_in_a_fresh_process() -> None:
    code = """
import torch, loopfold as lf
torch.manual_seed(0)
model, x = lf.SequenceToSequence(lf.GRU(5, 32), outputs=3), torch.randn(20, 4, 5)
found = torch.compile(model, backend="eager")(x)
print(torch.allclose(found, model(x), atol=1e-6))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr


# ------------------------------------------------------------------ what a step reads from Python's world


def scaled(v: Tensor, by: float = 1.0) -> Tensor:
    return v * by


@dataclass(slots=True)
class Slots:
    alpha: float = 1.0


class Settings:
    alpha = 1.0


module = types.ModuleType("settings_of_a_user")
vars(module).update(alpha=1.0, beta=1.0, inner=types.ModuleType("settings_of_a_user.inner"))
vars(module.inner).update(alpha=1.0)
DEEP = 1.0


def beta() -> float:
    return module.beta


imported = types.ModuleType("imported_by_a_step")
vars(imported).update(alpha=1.0)
sys.modules["imported_by_a_step"] = imported


@functools.singledispatch
def dispatched(v: Any) -> float:
    return beta()


class Table:
    def __init__(self) -> None:
        self.rows = [1.0]

    def __getitem__(self, i: int) -> float:
        return self.rows[i] * DEEP


class AttrDict(dict):  # type: ignore[type-arg]
    """As many configurations are written: it answers to every name."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


def one() -> float:
    return two()


def two() -> float:
    return three()


def three() -> float:
    return four()


def four() -> float:
    return [DEEP for _ in range(1)][0]


class Everything(lf.Transition):
    """A step that reads numbers from wherever numbers can stand."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(4, 4) / 2)
        self.activation = functools.partial(scaled, by=1.0)
        self.slots = Slots()
        self.nested = types.SimpleNamespace(model=types.SimpleNamespace(rnn=types.SimpleNamespace(alpha=1.0)))
        self.array = np.ones(3)
        self.queue = collections.deque([1.0], maxlen=2)
        self.ordered = collections.OrderedDict(alpha=1.0)
        self.listed = [[{"a": (1.0, [1.0])}]]
        self.hidden = [nn.LeakyReLU(1.0)]
        self.switch = False
        self.whole = 2
        self.module, self.config, self.table = module.inner, AttrDict(alpha=1.0), Table()
        self.user, self.chain = collections.UserDict(alpha=1.0), collections.ChainMap({"alpha": 1.0})
        self.numbers, self.fraction = array.array("d", [1.0]), Fraction(1, 1)
        self.optimiser = torch.optim.SGD([self.W], lr=1.0)

    @property
    def gain(self) -> float:
        return Settings.alpha * self.nested.model.rnn.alpha * float(self.array[1]) * self.queue[0]

    def further(self) -> float:
        import imported_by_a_step  # type: ignore[import-not-found]

        held = self.module.alpha * self.config.alpha * self.table[0] * self.user["alpha"] * self.chain["alpha"]
        held = held * self.numbers[0] * float(self.fraction) * self.optimiser.param_groups[0]["lr"]
        return held * imported_by_a_step.alpha

    def initial_state(self, batch: int) -> Tensor:
        return self.W.new_zeros(batch, 4)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        a = self.activation(self.hidden[0](h @ self.W + x))
        a = a * self.gain * self.slots.alpha * self.ordered["alpha"] * self.listed[0][0]["a"][1][0]
        a = a * module.alpha * module.inner.alpha * one() * dispatched(0) * self.further()
        a = a - 0.1 if self.switch else a
        return torch.tanh(a) / self.whole + (0.25 if torch.is_grad_enabled() else 0.0)


def _by_default(f: Everything, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled, "__defaults__", (0.7,))
    f.activation.keywords.clear()


CHANGES: dict[str, Callable[[Everything, pytest.MonkeyPatch], Any]] = {
    "a partial": lambda f, m: setattr(f, "activation", functools.partial(scaled, by=0.7)),
    "an object with slots": lambda f, m: setattr(f.slots, "alpha", 0.7),
    "a nested configuration": lambda f, m: setattr(f.nested.model.rnn, "alpha", 0.7),
    "a class as a namespace": lambda f, m: m.setattr(Settings, "alpha", 0.7),
    "a constant of an imported module": lambda f, m: m.setattr(module, "alpha", 0.7),
    "a constant of a module in a package": lambda f, m: m.setattr(module.inner, "alpha", 0.7),
    "an array in place": lambda f, m: f.array.__setitem__(1, 0.7),
    "a deque": lambda f, m: f.queue.appendleft(0.7),
    "an ordered dict": lambda f, m: f.ordered.update(alpha=0.7),
    "deep in lists": lambda f, m: f.listed[0][0]["a"][1].__setitem__(0, 0.7),
    "a module in a list": lambda f, m: setattr(f.hidden[0], "negative_slope", 0.7),
    "a helper four calls deep": lambda f, m: m.setitem(globals(), "DEEP", 0.7),
    "the default of a function": lambda f, m: _by_default(f, m),
    "what a helper reads of a module": lambda f, m: m.setattr(module, "beta", 0.7),
    "a module that is an attribute": lambda f, m: m.setattr(module.inner, "alpha", 0.7),
    "a module imported in a method": lambda f, m: m.setattr(imported, "alpha", 0.7),
    "a configuration that answers to every name": lambda f, m: f.config.update(alpha=0.7),
    "behind an index": lambda f, m: f.table.rows.__setitem__(0, 0.7),
    "a user's dict": lambda f, m: f.user.update(alpha=0.7),
    "a chain of maps": lambda f, m: f.chain.update(alpha=0.7),
    "an array of Python's": lambda f, m: f.numbers.__setitem__(0, 0.7),
    "a fraction": lambda f, m: setattr(f, "fraction", Fraction(7, 10)),
    "a learning rate": lambda f, m: f.optimiser.param_groups[0].update(lr=0.7),
    "a flag": lambda f, m: setattr(f, "switch", True),
    "a whole number": lambda f, m: setattr(f, "whole", 3),
    "a whole number that becomes a float": lambda f, m: setattr(f, "whole", 2.5),
    "a sign of zero": lambda f, m: setattr(f.slots, "alpha", -0.0),
    "not a number": lambda f, m: setattr(f.slots, "alpha", math.nan),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_around_a_step_is_seen(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the fingerprint alone: the self-check is not asked."""
    monkeypatch.setattr(compiled, "disagreement", lambda *_: None)
    cell, x = Everything().double(), sequence(6, 2, 4)
    for _ in range(2):
        before = lf.unfold(cell, x, engine=lf.FusedCPU()).hidden
    CHANGES[change](cell, monkeypatch)
    after = lf.unfold(cell, x, engine=lf.FusedCPU()).hidden
    expected = lf.unfold(cell, x, engine=lf.Sequential()).hidden
    torch.testing.assert_close(after, expected, equal_nan=True)
    assert not torch.equal(before, after) or "sign" in change


def test_whether_gradients_are_on_is_seen() -> None:
    cell, x = Everything().double(), sequence(6, 2, 4)
    for mode in (torch.no_grad, contextlib.nullcontext, torch.no_grad):
        with mode():
            found, expected = (lf.unfold(cell, x, engine=e).hidden for e in (lf.FusedCPU(), lf.Sequential()))
            torch.testing.assert_close(found, expected)


def test_no_object_is_taken_for_another_at_the_same_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "disagreement", lambda *_: None)

    def step(f: Any, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(h @ f.W + x * float(f.kept))

    cell, x = Given(step).double(), sequence(6, 2, 4)
    for i in range(40):
        vars(cell)["kept"] = Fraction(i, 40)
        found, expected = (lf.unfold(cell, x, engine=e).hidden for e in (lf.FusedCPU(), lf.Sequential()))
        torch.testing.assert_close(found, expected)


def test_a_step_of_many_modules_is_seen_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "disagreement", lambda *_: None)

    class Many(Given):
        def __init__(self) -> None:
            super().__init__(lambda f, h, x: torch.tanh(h @ f.W + x * f.parts[-1].listed[0]))
            self.parts = nn.ModuleList([nn.Linear(1, 1) for _ in range(300)])
            for part in self.parts:
                vars(part)["listed"] = [1.0]

    cell, x = Many().double(), sequence(6, 2, 4)
    before = lf.unfold(cell, x, engine=lf.FusedCPU()).hidden
    vars(cell.parts[-1])["listed"][0] = 0.5
    after = lf.unfold(cell, x, engine=lf.FusedCPU()).hidden
    torch.testing.assert_close(after, lf.unfold(cell, x, engine=lf.Sequential()).hidden)
    assert not torch.equal(before, after)


class Percent(float):
    pass


@functools.lru_cache
def remembered(n: int) -> Tensor:
    return torch.full((n,), 0.3, dtype=torch.float64)


def test_a_cache_keeps_no_tensor_without_data() -> None:
    cell, x = Given(lambda f, h, x: torch.tanh(h @ f.W + x + remembered(4))).double(), sequence(40, 2, 4)
    assert torch.equal(lf.unfold(cell, x).hidden, lf.unfold(cell, x, engine=lf.Sequential()).hidden)
    assert type(remembered(4)) is Tensor


def test_the_batch_size_is_no_annealed_number() -> None:
    def step(f: Any, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh((h @ f.W) * (f.alpha if f.alpha < 0.5 else 1 / len(h)) + x)

    cell, x = Given(step).double(), sequence(40, 3, 4)
    for i in range(8):
        vars(cell)["alpha"] = 0.1 + 0.07 * i
        torch.testing.assert_close(
            lf.unfold(cell, x).hidden, lf.unfold(cell, x, engine=lf.Sequential()).hidden, rtol=1e-10, atol=1e-10
        )


def test_odd_things_that_a_step_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of a class of their own, bytes, private slots, attributes of functions; long and deep structures."""
    monkeypatch.setattr(compiled, "disagreement", lambda *_: None)

    class Private:
        __slots__ = ("__value",)

        def __init__(self, value: float) -> None:
            self.__value = value

        def get(self) -> float:
            return self.__value

    def act(v: Tensor) -> Tensor:
        return v * vars(act)["scale"]

    def step(f: Any, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(act(h @ f.W) + x * (f.percent + f.bytes[0] + f.private.get()))

    act.scale = 1.0  # type: ignore[attr-defined]
    cell, x = Given(step).double(), sequence(6, 2, 4)
    nested: list[Any] = []
    for _ in range(900):
        nested = [nested]
    held = {"nested": nested, "long": [0.5] * 100_000, "percent": Percent(0.5), "bytes": bytearray(b"\x01")}
    vars(cell).update(held, private=Private(0.5))
    changes: list[Callable[[], Any]] = [
        lambda: vars(cell).update(percent=Percent(0.7)),
        lambda: vars(cell)["bytes"].__setitem__(0, 2),
        lambda: vars(cell).update(private=Private(0.7)),
        lambda: setattr(act, "scale", 0.5),
    ]
    for change in (lambda: None, *changes):
        change()
        found, expected = (lf.unfold(cell, x, engine=e).hidden for e in (lf.FusedCPU(), lf.Sequential()))
        torch.testing.assert_close(found, expected)


def test_cached_parametrisations_are_a_matter_of_the_call() -> None:
    cell, x = lf.Elman(4, 4).double(), sequence(40, 2, 4)
    nn.utils.parametrizations.orthogonal(cell, "W")
    with nn.utils.parametrize.cached(), pytest.raises(ValueError, match=r"parametrize\.cached"):
        lf.unfold(cell, x, engine=lf.FusedCPU())
    lf.unfold(cell, x, engine=lf.FusedCPU())


def test_checkpointing_saves_the_same_whether_a_run_is_checked_or_not() -> None:
    layer, x = lf.Recurrent(lf.GRU(4, 5), lf.FusedCPU()), sequence(9, 2, 4, dtype=torch.float32).requires_grad_()
    for _ in range(6):
        hidden = torch.utils.checkpoint.checkpoint(lambda v: layer(v).hidden, x, use_reentrant=False)
        assert isinstance(hidden, Tensor)
        hidden.sum().backward()


def test_an_iterator_is_left_alone() -> None:
    def step(f: Any, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(h @ f.W + x * next(f.iterator))

    cell, x = Given(step).double(), sequence(6, 2, 4)
    vars(cell)["iterator"] = iter([0.1 * i for i in range(100)])
    with pytest.raises(ValueError, match=r"takes from the iterator self\.iterator"):
        lf.unfold(cell, x, engine=lf.FusedCPU())
    assert next(vars(cell)["iterator"]) == 0.0


def test_other_threads_that_draw_random_numbers_are_not_held_against_a_step() -> None:
    stop, drawn = threading.Event(), []

    def draw() -> None:
        while not stop.is_set():
            drawn.append(torch.rand(3).tolist())

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(10):
            lf.unfold(Given(_plain), sequence(6, 2, 4, dtype=torch.float32), engine=lf.FusedCPU())
    finally:
        stop.set()
        thread.join()
    assert len({str(numbers) for numbers in drawn}) == len(drawn)  # none were drawn twice


LOG: list[Any] = []
COUNT = 0


def _count(f: Given, h: Tensor, x: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return torch.tanh(h @ f.W + x)


def _note_on_the_class(f: Any, h: Tensor, x: Tensor) -> Tensor:
    type(f).seen = h
    return torch.tanh(h @ f.W + x)


def _buffer(f: Any, h: Tensor, x: Tensor) -> Tensor:
    f.running = 0.9 * f.running + 0.1 * h.detach()[:1]
    return torch.tanh(h @ f.W + x)


def after(effect: Callable[..., Any]) -> Callable[..., Tensor]:
    """A step that does something besides."""

    def step(f: Any, h: Tensor, x: Tensor) -> Tensor:
        effect(f, h)
        return torch.tanh(h @ f.W + x)

    return step


def chosen_by(draw: Callable[[Any], float]) -> Callable[..., Tensor]:
    return lambda f, h, x: torch.tanh(h @ f.W + x) if draw(f) > 0.5 else x


EFFECTS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "a list of the module": (after(lambda f, h: f.log.append(h.detach())), "self.log"),
    "a dict": (after(lambda f, h: f.notes.update(h=h)), "self.notes"),
    "a set": (after(lambda f, h: f.names.add("h")), "self.names"),
    "an object": (after(lambda f, h: setattr(f.object, "h", h)), "self.object"),
    "a global list": (after(lambda f, h: LOG.append(h)), "LOG"),
    "a global number": (_count, "a global of _count"),
    "the class": (_note_on_the_class, "Noting"),
    "a buffer": (_buffer, "self.running"),
    "a seed": (after(lambda f, h: torch.manual_seed(1)), "random numbers of torch"),
    "random": (chosen_by(lambda f: random.random()), "random numbers of random"),
    "numpy": (chosen_by(lambda f: np.random.rand()), "random numbers of numpy"),  # noqa: NPY002
    "numpy's new": (chosen_by(lambda f: f.rng.random()), "random numbers of self.rng"),
    "its own Random": (chosen_by(lambda f: f.dice.random()), "random numbers of self.dice"),
}


class Noting(Given):
    running: Tensor

    def __init__(self, step: Callable[..., Any]) -> None:
        super().__init__(step)
        self.log: list[Any] = []
        self.notes: dict[str, Any] = {}
        self.names: set[str] = set()
        self.object = types.SimpleNamespace()
        self.rng, self.dice = np.random.default_rng(0), random.Random(0)
        self.register_buffer("running", torch.zeros(1, 4))


@pytest.mark.parametrize("name", EFFECTS)
def test_what_a_step_does_besides_is_found_and_undone(name: str) -> None:
    step, words = EFFECTS[name]
    cell, x = Noting(step), sequence(5, 2, 4, dtype=torch.float32)
    LOG.clear()
    before = _random_states(cell)
    with pytest.raises(ValueError, match=f"it changes .*{words} at every step"):
        lf.unfold(cell, x, engine=lf.FusedCPU())
    assert not any((cell.log, cell.notes, cell.names, vars(cell.object), LOG, hasattr(Noting, "seen"), COUNT))
    assert torch.equal(cell.running, torch.zeros(1, 4))
    assert _random_states(cell) == before


def _random_states(cell: Noting) -> list[Any]:
    numpy = np.random.get_state()  # noqa: NPY002
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        str(numpy),
        cell.dice.getstate(),
        cell.rng.bit_generator.state,
    ]


def test_what_a_step_notes_is_of_the_steps_that_were_taken() -> None:
    cell = Noting(EFFECTS["a list of the module"][0])
    x = sequence(5, 2, 4, dtype=torch.float32)
    run = lf.unfold(cell, x)
    assert len(cell.log) == 5
    torch.testing.assert_close(torch.stack(cell.log[1:]), run.hidden[:-1])


@pytest.mark.parametrize("make", [nn.GRUCell, nn.RNNCell, nn.LSTMCell])
def test_a_cell_that_takes_the_input_first_is_told_so(make: Any) -> None:
    x = sequence(5, 2, 8, dtype=torch.float32)
    with pytest.raises(TypeError, match=rf"{make.__name__} takes \(input, hx\), the input first.*lf\."):
        lf.unfold(make(8, 8), x)

    class Sub(make):  # type: ignore[misc]
        pass

    with pytest.raises(TypeError, match=r"Sub takes \(input, hx\), the input first"):
        lf.Recurrent(Sub(8, 8))(x)
    with pytest.raises(TypeError, match=r"takes \(x, h\), the input first"):
        lf.unfold(lambda x, h: x + h, x, state=torch.zeros(2, 8))


# ------------------------------------------------------------------ long steps


def euler(f: Given, h: Tensor, x: Tensor) -> Tensor:
    for _ in range(40):
        h = h + 0.05 * (h @ f.W - h * h * h + x)
    return h


def cut(f: Given, h: Tensor, x: Tensor) -> Tensor:
    for _ in range(40):
        h = h * (1 - 0.1 * h * h)
    return torch.cat([h[:, 2:], h[:, :2]], 1) @ f.W * 0.1 + x


def doubled(f: Given, h: Tensor, x: Tensor) -> Tensor:
    y = h @ f.W
    for _ in range(50):
        y = y + y
    return torch.tanh(y * 2.0**-50 + x)


def chain(f: Given, h: Tensor, x: Tensor) -> Tensor:
    for _ in range(200):
        h = torch.tanh(0.9 * h + x)
    return h


def truths(f: Given, h: Tensor, x: Tensor) -> Tensor:
    m = h > 0
    for _ in range(30):
        m = (m & (x > 0)) | (m | (h > 0.1))
    return torch.tanh(torch.where(m, h @ f.W, x).sum(1, keepdim=True) + x)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("step", [euler, cut, doubled, chain, truths], ids=lambda f: f.__name__)
def test_a_step_is_compiled_in_a_time_that_grows_with_its_length(
    step: Callable[..., Tensor], engine: lf.Engine
) -> None:
    """Not with the number of ways through it, which is beyond all bounds here; nor is Python's stack too small."""

    def deep(calls: int) -> lf.Unfolding:
        return deep(calls - 1) if calls else lf.unfold(cell, x, engine=engine)

    cell, x = Given(step).double(), 0.1 * sequence(3, 2, 4)
    x.requires_grad_()
    found, expected = deep(200).hidden, lf.unfold(cell, x, engine=lf.Sequential()).hidden
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(hidden.sum(), [x, cell.W], allow_unused=True) for hidden in (found, expected)]
    torch.testing.assert_close(*gradients)


# ------------------------------------------------------------------ numbers at the edges, and buffers


class Edge(nn.Module):
    """An operation on x and a little of the state, with not-a-numbers at hand."""

    def __init__(self, f: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.f = f
        self.W = nn.Parameter(torch.ones(()))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.f(self.W * x + 0.1 * torch.tanh(h), 1e30 * h - 1e30 * h)  # nan where h is infinite


EDGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "lerp by 1": lambda x, nan: torch.lerp(1e8 * torch.ones_like(x), x, torch.ones_like(x)),
    "lerp by less": lambda x, nan: torch.lerp(1e8 * torch.ones_like(x), x, torch.sigmoid(-x)),
    "lerp by a number": lambda x, nan: torch.lerp(1e8 * torch.ones_like(x), x, 1.0),
    "softshrink": lambda x, nan: torch.nn.functional.softshrink(x + nan, 0.1),
    "clamp to nan": lambda x, nan: torch.clamp(x, min=nan),
    "clamp to nan from above": lambda x, nan: torch.clamp(x, max=nan),
    "hypot": lambda x, nan: torch.hypot(1e30 * x, 1e30 * torch.ones_like(x)),
    "xor": lambda x, nan: torch.where((x > 0) ^ (x > 1), x, 2 * x),
    "logical_xor": lambda x, nan: torch.where(torch.logical_xor(x > 0, x > 1), x, 2 * x),
}


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("f", EDGES.values(), ids=EDGES)
def test_numbers_at_the_edges_are_those_of_torch(f: Callable[..., Tensor], engine: lf.Engine) -> None:
    """In float32; from a state that is infinite in one place, and of an ordinary size in the others."""
    x = torch.tensor([[-3.0, 0.05, 0.5, 2.0]]).repeat(5, 2, 1)
    state = torch.tensor([[torch.inf, 0.0, 1.0, -2.0]]).repeat(2, 1)
    found, expected = (lf.unfold(Edge(f), x, state=state, engine=e).hidden for e in (engine, lf.Sequential()))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_attention_beside_random_numbers_is_compiled() -> None:
    """torch says of its attention that it draws random numbers, which without dropout it does not."""

    def step(f: Given, M: Tensor, x: Tensor) -> Tensor:
        M = torch.cat([M[:, 1:], (x @ f.W)[:, None]], 1) + 0.1 * torch.randn_like(M)
        return M + nn.functional.scaled_dot_product_attention(M[:, None], M[:, None], M[:, None])[:, 0]

    cell, x, state = Given(step).double(), sequence(6, 2, 4), sequence(2, 3, 4)
    found = []
    for engine in (lf.Looped(), lf.Sequential()):
        torch.manual_seed(0)
        found.append(lf.unfold(cell, x, state=state, engine=engine).hidden)
    torch.testing.assert_close(*found)


class Statistics(nn.Module):
    """Running statistics, which torch's own code changes without a new version of the tensors; and a count."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.W, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        self.count += 1
        return torch.tanh(self.norm(self.W(h) + x))


@pytest.mark.parametrize(
    "look",
    [
        lambda cell, x: lf.Recurrent(cell).explain(x),
        lambda cell, x: lf.SequenceToSequence(cell, outputs=2),
        lambda cell, x: lf.Stepper(cell),
    ],
)
@pytest.mark.filterwarnings("ignore::loopfold.EngineWarning")
def test_a_step_that_is_only_tried_leaves_buffers_as_they_were(look: Callable[..., Any]) -> None:
    cell, x = Statistics(), torch.randn(6, 3, 3)
    before = copy.deepcopy(dict(cell.named_buffers()))
    look(cell, x)
    torch.testing.assert_close(dict(cell.named_buffers()), before, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::loopfold.EngineWarning", "ignore::UserWarning:torch")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.empty(0),
        lambda: torch.ones(()).expand(3),
        lambda: torch.ones(3, dtype=torch.bool),
        lambda: torch.ones(3).to(torch.float8_e4m3fn),
        lambda: torch.full((3,), torch.nan),
        lambda: torch.ones(3, dtype=torch.complex64).conj(),
    ],
)
def test_buffers_of_any_kind_are_no_hindrance_to_a_trial(make: Callable[[], Tensor]) -> None:
    cell = Statistics()
    cell.register_buffer("other", make())
    lf.Recurrent(cell).explain(torch.randn(6, 3, 3))
    assert int(cell.count) == 0


@pytest.mark.filterwarnings("ignore::loopfold.EngineWarning")
def test_a_buffer_of_inference_is_as_it_was_after_a_trial() -> None:
    class Counts(Statistics):
        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            with torch.inference_mode():
                self.count += 1
            return torch.tanh(self.W(h) + x)

    cell = Counts()
    with torch.inference_mode():
        cell.count = torch.zeros(())
    lf.Recurrent(cell).explain(torch.randn(6, 3, 3))
    assert cell.count.is_inference()
    assert int(cell.count) == 0


@pytest.mark.filterwarnings("ignore::loopfold.EngineWarning")
def test_statistics_are_added_up_once_under_checkpointed() -> None:
    cell, x, found = Statistics(), torch.randn(6, 3, 3), []
    for engine in (lf.Sequential(), lf.Checkpointed(every=2)):
        own = copy.deepcopy(cell)
        lf.unfold(own, x, engine=engine).hidden.sum().backward()
        found.append((dict(own.named_buffers()), {k: p.grad for k, p in own.named_parameters()}))
    assert int(found[0][0]["count"]) == 6
    torch.testing.assert_close(*found)


# ------------------------------------------------------------------ every compiled run checks itself


CLOCK = [0.0]


def hidden_from_the_fingerprint() -> float:
    return globals()["CLO" + "CK"][0]


def stale(f: Given, h: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(h @ f.W + x + hidden_from_the_fingerprint())


@pytest.fixture
def clock() -> Iterator[list[float]]:
    CLOCK[0] = 0.0
    yield CLOCK
    CLOCK[0] = 0.0


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
def test_a_change_that_nobody_could_see_is_caught(engine: lf.Engine, clock: list[float]) -> None:
    """The trace is stale: it is found out, the step is traced anew, and no wrong value is returned."""
    cell, x = Given(stale).double(), sequence(6, 2, 4)
    lf.unfold(cell, x, engine=engine)
    clock[0] = 0.3
    found, expected = (lf.unfold(cell, x, engine=e).hidden for e in (engine, lf.Sequential()))
    torch.testing.assert_close(found, expected)


def test_later_runs_are_checked_as_often_as_a_hundredth_of_the_time_allows() -> None:
    watch, checks = selfcheck.Watch(), 0
    for _ in range(100_000):
        if watch.due(0.001, "one kind"):
            checks += 1
            watch.paid(0.0004)
    assert 0.009 < checks * 0.0004 / 100 < 0.0102


def test_a_later_check_catches_what_the_first_could_not(clock: list[float]) -> None:
    cell, x = Given(stale).double(), sequence(6, 2, 4)
    for _ in range(5):
        lf.unfold(cell, x, engine=lf.FusedCPU())
    watch = programs.program_of(lf.unfolding.checked(cell, x, None, None, None)).program.watch.of("FusedCPU")
    watch.credit = 1.0  # as after many runs
    clock[0] = 0.3
    found, expected = (lf.unfold(cell, x, engine=e).hidden for e in (lf.FusedCPU(), lf.Sequential()))
    torch.testing.assert_close(found, expected)


def test_a_choice_by_the_batch_size_is_caught() -> None:
    """A trace cannot see it; the first run of every batch size is checked."""
    cell = Given(lambda f, h, x: torch.tanh(h @ f.W + x) if len(h) != 2 else torch.sin(h @ f.W + x)).double()
    for batch in (8, 8, 8, 8):
        x = sequence(6, batch, 4)
        torch.testing.assert_close(
            lf.unfold(cell, x, engine=lf.FusedCPU()).hidden, lf.unfold(cell, x, engine=lf.Sequential()).hidden
        )
    x = sequence(6, 2, 4)
    with pytest.warns(lf.EngineWarning, match="was wrong about Given"):
        found = lf.unfold(cell, x, engine=lf.FusedCPU()).hidden
    assert torch.equal(found, lf.unfold(cell, x, engine=lf.Sequential()).hidden)


@pytest.mark.parametrize("unequal", [False, True])
@pytest.mark.parametrize("kernel", [fused_cpu._FusedKernel, looped._LoopedKernel])
def test_a_corrupted_kernel_is_caught(kernel: type[Kernel], unequal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernel.forward

    def wrong(self: Any, *arguments: Any) -> Any:
        emitted, kept = right(self, *arguments)
        emitted[0][:, 0, -1] += 1e-3
        return emitted, kept

    monkeypatch.setattr(kernel, "forward", wrong)
    engine = lf.FusedCPU() if kernel is fused_cpu._FusedKernel else lf.Looped()
    cell, x, lengths = lf.LSTM(3, 5).double(), sequence(7, 3, 3), [7, 2, 5] if unequal else None
    with pytest.warns(lf.EngineWarning, match=r"was wrong about LSTM.*state\(\d\).* at \[0, \d\] is"):
        found = lf.unfold(cell, x, lengths=lengths, engine=engine)
    expected = lf.unfold(cell, x, lengths=lengths, engine=lf.Sequential())
    assert torch.equal(found.states.h, expected.states.h)
    assert "Sequential" in lf.Recurrent(cell).explain(x)
    with pytest.raises(ValueError, match="its compiled run was wrong"):
        lf.unfold(cell, x, lengths=lengths, engine=engine)


@pytest.mark.parametrize("fault", ["state", "stored"])
@pytest.mark.parametrize("kernel", [fused_cpu._FusedKernel, looped._LoopedKernel])
def test_corrupted_gradients_are_caught(kernel: type[Kernel], fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any goes back: those of the definition are taken in their place."""
    right = kernel.backward

    def wrong(self: Any, *arguments: Any) -> Any:
        found = right(self, *arguments)
        getattr(found, fault)[0].mul_(1.01)
        return found

    engine = lf.FusedCPU() if kernel is fused_cpu._FusedKernel else lf.Looped()
    cell, x = lf.GRU(3, 5).double(), sequence(7, 3, 3)
    h = sequence(3, 5)

    def gradients(e: lf.Engine) -> list[Tensor]:
        sources = [x.clone().requires_grad_(), h.clone().requires_grad_(), *cell.parameters()]
        run = lf.unfold(cell, sources[0], state=sources[1], engine=e)
        return list(torch.autograd.grad(run.hidden.square().sum() + run.last.sum(), sources))

    monkeypatch.setattr(kernel, "backward", wrong)
    with pytest.warns(lf.EngineWarning, match="was wrong about GRU.*a gradient of step"):
        found = gradients(engine)
    torch.testing.assert_close(found, gradients(lf.Sequential()), rtol=1e-12, atol=1e-12)


def test_a_step_that_changes_before_its_gradients_come_back() -> None:
    """What counts is what it was forwards; there is nothing to compare with any more."""
    cell, x = Annealed().double(), sequence(6, 3, 4)

    def gradient(engine: lf.Engine) -> Tensor:
        cell.alpha = 0.5
        hidden = lf.unfold(cell, x, engine=engine).hidden
        cell.alpha = 0.1
        return torch.autograd.grad(hidden.square().sum(), cell.W)[0]

    torch.testing.assert_close(gradient(lf.FusedCPU()), gradient(lf.Sequential()))


def test_a_checked_run_is_like_any_other_to_autograd() -> None:
    """Parts without a gradient have none; results may be changed in place; a bias may change before the way back."""

    def step(f: Given, state: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(state[0] @ f.W + x)
        return h, h.detach()

    cell, x = Given(step, states=2), sequence(6, 3, 4, dtype=torch.float32)
    run = lf.unfold(cell, x, engine=lf.FusedCPU())
    assert [leaf.requires_grad for leaf in run.states] == [True, False]

    elman = lf.Elman(4, 5)
    results = []
    for engine in (lf.FusedCPU(), lf.Sequential()):
        hidden = lf.unfold(elman, x, engine=engine).hidden
        with torch.no_grad():
            elman.b.add_(0.0)
        results.append(torch.autograd.grad(hidden.square().sum(), elman.W)[0])
    torch.testing.assert_close(results[0], results[1])


def test_gradients_that_come_back_under_autocast() -> None:
    cell, x = lf.Elman(4, 5), sequence(6, 3, 4, dtype=torch.float32)
    expected = torch.autograd.grad(lf.unfold(cell, x, engine=lf.Sequential()).hidden.sum(), cell.W)[0]
    for _ in range(4):
        hidden = lf.unfold(cell, x, engine=lf.FusedCPU()).hidden
        with torch.autocast("cpu", torch.bfloat16):
            (found,) = torch.autograd.grad(hidden.sum(), cell.W)
        torch.testing.assert_close(found, expected)


JUMPY: dict[str, Callable[..., Tensor]] = {
    "spikes": lambda f, h, x: 0.9 * h + x - (h > 0.3).to(h.dtype),
    "a product of large numbers that cancel": lambda f, h, x: torch.tanh((h @ f.W + 1e6) - 1e6 + x),
    "near a pole": lambda f, h, x: torch.tanh(1 / (h - h.mean(-1, keepdim=True) + 1e-6) * 1e-3 + x),
    "chaos": lambda f, h, x: 3.99 * h.abs().clamp(1e-3, 0.999) * (1 - h.abs().clamp(1e-3, 0.999)),
    "infinity": lambda f, h, x: torch.exp(h @ f.W * 100 + x),
    "not a number": lambda f, h, x: torch.log(h @ f.W + x),
}


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", JUMPY)
def test_rounding_is_no_disagreement(engine: lf.Engine, name: str) -> None:
    """Steps that jump, cancel or blow up: warnings are errors here, so a false alarm would fail."""
    for dtype in (torch.float32, torch.float64):
        for seed in range(12):
            torch.manual_seed(seed)
            cell = Given(JUMPY[name], 9).to(dtype)
            x = torch.randn(40, 8, 9, dtype=dtype)
            for _ in range(3):
                run = lf.unfold(cell, x, engine=engine)
            if run.hidden.requires_grad and name not in ("infinity", "not a number"):
                run.hidden.sum().backward()


def test_the_check_leaves_no_trace_of_itself() -> None:
    """No random number of the user's is drawn, and no hook of a parameter is called."""
    cell, x = lf.GRU(3, 5), sequence(7, 3, 3, dtype=torch.float32).requires_grad_()
    called: list[int] = []
    for hooked in (False, True):
        if hooked:
            cell.W.register_hook(lambda g: called.append(1))
        before = torch.get_rng_state(), random.getstate()
        lf.unfold(cell, x, engine=lf.FusedCPU()).hidden.sum().backward()
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1] == random.getstate()
    assert len(called) == 1


def test_checks_leave_no_tensor_behind() -> None:
    cell, x = lf.GRU(3, 5), sequence(7, 3, 3, dtype=torch.float32)

    def alive() -> int:
        gc.collect()
        return sum(type(thing) is Tensor for thing in gc.get_objects())

    lf.unfold(cell, x, engine=lf.FusedCPU()).hidden.sum().backward()
    before = alive()
    for batch in (4, 5, 6, 7):  # the first run of every batch size is checked
        lf.unfold(cell, sequence(7, batch, 3, dtype=torch.float32), engine=lf.FusedCPU()).hidden.sum().backward()
    assert alive() <= before


def test_nothing_that_is_kept_of_a_module_keeps_it_alive() -> None:
    """Not its program, nor its fingerprint, though a method or a function of the step holds the module itself."""
    x = sequence(7, 3, 4, dtype=torch.float32)

    def make() -> weakref.ref[nn.Module]:
        class Own(Annealed):
            def forward(self, h: Tensor, x: Tensor) -> Tensor:
                return super().forward(h, x) * kept.alpha

        kept = Own()
        vars(kept)["more"] = lambda v: v * kept.alpha
        lf.unfold(kept, x, engine=lf.FusedCPU()).hidden.sum().backward()
        return weakref.ref(kept)

    ref = make()
    gc.collect()
    assert ref() is None


# ------------------------------------------------------------------ numbers that change at every call


class Annealed(lf.Transition):
    def __init__(self) -> None:
        super().__init__()
        self.W, self.alpha, self.slope = nn.Parameter(torch.randn(4, 4) / 2), 0.5, 0.1

    def initial_state(self, batch: int) -> Tensor:
        return self.W.new_zeros(batch, 4)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        new = torch.tanh(h @ self.W + math.exp(-self.alpha) * x)
        return self.alpha * h + (1 - self.alpha) * new.clamp(-self.slope * 9, 9 * self.slope)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
def test_an_annealed_number_is_an_input_of_the_program(engine: lf.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    cell, x = Annealed().double(), sequence(6, 3, 4)
    compilations: list[int] = []
    real = fused_cpu._load

    def counted(*arguments: Any) -> tuple[int, int]:
        compilations.append(1)
        return real(*arguments)

    monkeypatch.setattr(fused_cpu, "_load", counted)
    for i in range(30):
        cell.alpha = 0.9 - 0.02 * i
        cell.slope = 0.1 if i < 20 else 0.01 * i
        assert_agrees(engine, cell, x)
    assert len(compilations) <= 6  # forwards and backwards: as it is, with alpha, with the slope too
    assert type(engine).__name__ in lf.Recurrent(cell, engine).explain(x)


def test_a_number_that_the_loop_must_know_is_another_program() -> None:
    class Powers(Annealed):
        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            return torch.tanh((h @ self.W).abs() ** (2 + self.alpha) + x)

    cell, x = Powers().double(), sequence(6, 3, 4)
    for i in range(4):
        cell.alpha = 0.3 + 0.1 * i
        assert_agrees(lf.FusedCPU(), cell, x)


def test_what_changes_and_does_not_matter_costs_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy(Annealed):
        calls: int
        history: list[float]

    cell, x = Busy(), sequence(6, 3, 4, dtype=torch.float32)
    cell.calls, cell.history = 0, []
    for i in range(40):
        cell.calls, cell.history = i, [*cell.history, float(i)]
        lf.unfold(cell, x, engine=lf.FusedCPU())
    (shelf,) = [shelf for f, shelf in programs._shelves.items() if f is cell]
    assert [len(found) for found in shelf.programs.values()] == [1]


def test_a_fall_to_the_plain_loop_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "_told", set())
    cell, x = Given(lambda f, h, x: torch.tanh(h @ f.W + x).sort(-1).values), sequence(5, 2, 4, dtype=torch.float32)
    with pytest.warns(lf.EngineWarning, match=r"Given runs as a Python loop: .*aten\.sort has no kernel"):
        lf.unfold(cell, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lf.unfold(cell, x)


def test_an_index_that_changes_is_seen() -> None:
    """In place, as another tensor, from a file; and one that points outside is an error, as it is in torch."""
    cell, x = zoo.Unitary(3, 5), torch.randn(20, 2, 3)

    def check() -> None:
        ours, theirs = (lf.unfold(cell, x, engine=engine).hidden for engine in (lf.FusedCPU(), lf.Sequential()))
        torch.testing.assert_close(ours, theirs)

    check()
    other = cell.state_dict()
    cell.order.copy_(cell.order.flip(0))
    check()
    cell.order = torch.tensor([1, -1, 0, 2, 3])
    check()
    cell.load_state_dict({**other, "order": torch.tensor([0, 0, 0, 1, 1])})
    check()
    with torch.inference_mode():
        unseen = torch.tensor([4, 3, 2, 1, 0])
    cell.order = unseen
    with pytest.raises(ValueError, match="aten.index has no kernel"):
        lf.unfold(cell, x, engine=lf.FusedCPU())
    cell.order = torch.tensor([0, 1, 7, 2, 3])
    with pytest.raises(ValueError, match="FusedCPU cannot run Unitary: aten.index has no kernel"):
        lf.unfold(cell, x, engine=lf.FusedCPU())
    with pytest.raises((IndexError, ValueError), match="out of"):
        lf.unfold(cell, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding_is_no_reason_for_distrust(dtype: torch.dtype) -> None:
    """Gradients that cancel, of a normalised single number; and of the greatest number, which has its own count."""
    for seed in range(6):
        torch.manual_seed(seed)
        for cell, x in ((zoo.DeltaNet(4, 1), torch.randn(3, 33, 4)), (zoo.Extremes(4, 17), torch.randn(7, 5, 4))):
            for _ in range(3):
                with warnings.catch_warnings():
                    warnings.simplefilter("error", lf.EngineWarning)
                    run = lf.unfold(cell.to(dtype), x.to(dtype), engine=lf.Looped())
                    run.hidden.square().sum().backward()


def test_what_is_moved_is_not_rounded_otherwise() -> None:
    v = torch.randn(5, 4)
    with selfcheck._RoundedOtherwise():
        moved = torch.cat([v, v.clone()]), v[[1, 0]], v.amax(-1), torch.where(v > 0, v, v), v.flip(0)
        computed = v + 0
    expected = torch.cat([v, v]), v[[1, 0]], v.amax(-1), v, v.flip(0)
    assert all(torch.equal(a, b) for a, b in zip(moved, expected, strict=True))
    assert not torch.equal(computed, v)
    torch.testing.assert_close(computed, v)


class LooksUp(lf.Transition):
    """A row of a table by what may be no number, which torch refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.E = nn.Parameter(torch.randn(5, 4))

    def initial_state(self, batch: int) -> Tensor:
        return torch.ones(batch, 4)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.sqrt(h + x) + 0.1 * self.E[h[:, 0].clamp(0, 4).long()]


def test_a_step_that_fails_by_itself_is_no_reason_for_distrust() -> None:
    cell, x = LooksUp(), torch.ones(12, 2, 4)
    bad = x.clone()
    bad[5] = -100
    with pytest.raises((IndexError, RuntimeError), match="index"):  # the last step of the first run is looked at
        lf.unfold(cell, bad, engine=lf.FusedCPU())
    found = lf.unfold(cell, x, engine=lf.FusedCPU()).hidden
    torch.testing.assert_close(found, lf.unfold(cell, x, engine=lf.Sequential()).hidden)
