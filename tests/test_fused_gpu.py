"""FusedGPU without a GPU: its kernels, emulated thread by thread, against the definition."""

import shutil
from collections.abc import Callable
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any

import pytest
import test_autocast
import torch
import zoo
from emulation import Emulated, EmulatedLauncher
from test_engines import SINGLE, assert_agrees, errors, everything
from test_expressed import ALONG, POINTWISE
from test_expressed import Step as ExpressedStep
from test_operations import COMPUTED, DOMAINS, Step
from test_random_steps import assert_agrees_in_single_precision
from torch import Tensor, nn

import loopfold as lf
from loopfold.engines import driver
from loopfold.engines.cuda_plan import Geometry, Plan, planned
from loopfold.engines.cuda_values import FORMATS
from loopfold.engines.fused_gpu import FusedGPU, GPUWriter, choose
from loopfold.stepgraph.ops import ROUNDED

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler"),
]
APART = Emulated(Geometry(blocks=3, rows=8, warps=2))  # rows of 17 features, shared by three blocks
ALONE = Emulated(Geometry(blocks=1, rows=16, warps=2), steps=3)  # in launches of three steps


def linear(n_in: int, n: int) -> nn.Module:
    """Under autocast its state is of half precision, and all that a step computes."""
    return test_autocast.Plain(lambda f, h, x: torch.tanh(f.W(h) + 0.5 * f.U(h) + x[:, :1].to(f.W(h).dtype)), n)


@pytest.mark.parametrize("make", zoo.WITH_INPUT, ids=lambda m: m.__name__)
def test_kernels_agree_with_the_definition(make: Callable[[int, int], nn.Module]) -> None:
    assert_agrees(APART, make(4, 17), torch.randn(4, 5, 4), [4, 1, 3, 2, 4])
    assert_agrees(ALONE, make(4, 17), torch.randn(7, 9, 4))


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(1, 8, 4),
        Geometry(2, 8, 2, registers=8),
        Geometry(4, 16, 2),
        Geometry(2, 32, 2, registers=0),
        Geometry(16, 8, 2),
    ],
    ids=str,
)
def test_every_geometry_gives_the_same(geometry: Geometry) -> None:
    """Weights in registers and in shared memory, whole groups and others, more sequences than run at once."""
    for n, batch in ((32, 16), (21, 40)):
        assert_agrees(Emulated(geometry), lf.GRU(4, n), torch.randn(3, batch, 4))


def plans(cell: nn.Module, batch: int, geometry: Geometry) -> list[Plan]:
    """Of the way there and the way back."""
    recurrence = lf.unfolding.checked(cell, torch.randn(3, batch, 4), None, None, None)
    kernels: Any = GPUWriter(EmulatedLauncher, geometry).both_ways(recurrence)
    return [planned(kernel.source, kernel.builder, kernel.dtype, geometry, True) for kernel in kernels]


@pytest.mark.parametrize("warps_k", [1, 2, 4])
def test_few_warps_may_share_a_sum_and_have_more_features_each(warps_k: int) -> None:
    cell, geometry = lf.LSTM(4, 70), Geometry(3, 16, 4, warps_k)
    there, back = (p for plan in plans(cell, 9, geometry) for p in plan.products.values())
    assert (there.warps_k, back.warps_k) == (warps_k, max(2, warps_k))  # back there are features for two warps alone
    assert_agrees(Emulated(geometry), cell, torch.randn(2, 9, 4))


@pytest.mark.parametrize("make", zoo.WITH_INPUT, ids=lambda m: m.__name__)
def test_the_geometry_that_is_chosen_fits_and_leaves_no_block_idle(
    make: Callable[[int, int], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU like an H200, for sizes that no power of two divides."""
    gpu = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232_448)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    for n, batch in ((72, 5), (400, 40)):
        cell = make(4, n)
        recurrence = lf.unfolding.checked(cell, torch.randn(3, batch, 4), None, None, None)
        kernels: Any = GPUWriter(EmulatedLauncher).both_ways(recurrence)
        for kernel in kernels:
            if kernel.has_parts:
                continue
            found = choose(kernel.source, kernel.builder, kernel.dtype, True, batch, torch.device("cuda", 0))
            assert found is not None
            plan = planned(kernel.source, kernel.builder, kernel.dtype, found, True)
            assert found.blocks in plan.busy_blocks(132)
            assert plan.shared_bytes <= gpu.shared_memory_per_block_optin


def test_a_wide_lstm_is_shared_by_as_many_blocks_as_its_size_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """1152 units are 36 blocks of 32, of which three groups fit; of 64 blocks, 28 would be idle."""
    gpu = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232_448)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    with torch.autocast("cpu", torch.bfloat16):
        recurrence = lf.unfolding.checked(lf.LSTM(4, 1152), torch.randn(3, 40, 4), None, None, None)
        kernels: Any = GPUWriter(EmulatedLauncher).both_ways(recurrence)
    for k in kernels:
        found = choose(k.source, k.builder, k.dtype, True, 40, torch.device("cuda", 0))
        assert found is not None
        assert found.blocks == 36


class Forgets(lf.Transition):
    """No gradient goes from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.U, self.W = nn.Linear(4, 17), nn.Linear(17, 17)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.W(h.detach()) + self.U(x))


def test_a_way_back_on_which_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232_448)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    recurrence = lf.unfolding.checked(Forgets(), torch.randn(3, 5, 4), None, None, None)
    kernels: Any = GPUWriter(EmulatedLauncher).both_ways(recurrence)
    for k in kernels:
        assert choose(k.source, k.builder, k.dtype, True, 5, torch.device("cuda", 0)) is not None
    assert_agrees(APART, Forgets(), torch.randn(4, 5, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", [lf.LSTM, lf.LayerNormLSTM, zoo.Sliced], ids=lambda m: m.__name__)
def test_half_precision_is_no_worse_than_the_definition(
    make: Callable[[int, int], nn.Module], dtype: torch.dtype
) -> None:
    cell, x = make(4, 18).to(dtype), torch.randn(4, 5, 4).to(dtype)
    ours, theirs = (everything(cell, x, engine) for engine in (APART, lf.Sequential()))
    truth = everything(cell.double(), x.double(), lf.Sequential())
    bound = 2 * max(errors({k: v.double() for k, v in theirs.items()}, truth).values())
    assert max(errors({k: v.double() for k, v in ours.items()}, truth).values()) <= bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", [lf.Elman, lf.LSTM, lf.LayerNormLSTM, zoo.Sliced, zoo.DeepTransition, linear])
def test_kernels_agree_under_autocast(make: Callable[[int, int], nn.Module], dtype: torch.dtype) -> None:
    for engine, lengths in ((APART, [4, 1, 3, 2, 4]), (ALONE, None)):
        test_autocast.assert_agrees(engine, make(4, 17), torch.randn(4, 5, 4), dtype, lengths)


def test_products_under_autocast_are_of_half_precision() -> None:
    """And what is read from an exchange in another way keeps its digits: then all of the exchange is float32."""
    for cell, format in ((lf.LSTM(4, 17), 1), (zoo.DeepTransition(4, 17), 1), (zoo.Sliced(4, 17), 0)):
        with torch.autocast("cpu", torch.bfloat16):
            text = APART.code(lf.unfolding.checked(cell, torch.randn(4, 5, 4), None, None, None))
        assert text.count(f"#define FORMAT {format}\n#define STORED 0\n") == 2


class Deaf(lf.Transition):
    """Several states and no input; one of a single number, and one whose parts change places."""

    def __init__(self) -> None:
        super().__init__()
        self.W, self.a = nn.Parameter(torch.randn(6, 6) / 3), nn.Parameter(torch.randn(6, 1))

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor]:
        return torch.linspace(-1, 1, 6 * batch).view(batch, 6), torch.ones(batch, 1)

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, scale = state
        new = torch.tanh(h @ self.W + scale * torch.cat([h[:, 4:], h[:, :4]], -1))
        return new, torch.sigmoid(new @ self.a) * scale


@pytest.mark.parametrize("engine", [APART, ALONE], ids=["apart", "alone"])
def test_thin_products_and_parts_of_the_state(engine: lf.Engine) -> None:
    start = tuple(Deaf().initial_state(3))
    cell = Deaf()

    def run(cell: nn.Module, engine: lf.Engine, dtype: torch.dtype) -> list[Tensor]:
        state = tuple(part.detach().to(dtype).requires_grad_() for part in start)
        found = lf.unfold(cell.to(dtype), state=state, steps=5, engine=engine)
        grads = torch.autograd.grad(found.hidden.square().sum() + found.last[1].sum(), [*state, *cell.parameters()])
        return [part.double() for part in (found.hidden, found.last[1], *grads)]

    ours, truth = run(cell, engine, torch.float32), run(cell, lf.Sequential(), torch.float64)
    torch.testing.assert_close(ours, truth, rtol=SINGLE, atol=SINGLE)


class Joined(lf.Transition):
    """A number and a row side by side, times one matrix: of it the number meets a row that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.W, self.V = nn.Parameter(torch.randn(7, 8) / 3), nn.Parameter(torch.randn(7, 9) / 3)

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor]:
        return self.W.new_ones(batch, 7), self.W.new_ones(batch, 1)

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        h, a = state
        h = torch.tanh(torch.cat([a, h], -1) @ self.W.T + x)
        return h, torch.tanh(h @ self.V[:, 3:4])


@pytest.mark.parametrize("engine", [APART, ALONE], ids=["apart", "alone"])
def test_matrices_of_one_row_or_column_that_are_parts_of_others(engine: lf.Engine) -> None:
    assert_agrees(engine, Joined(), torch.randn(4, 3, 7))


class Guided(lf.Transition):
    """A state that never changes, read by a product and as a part; and a number that is summed up."""

    def __init__(self) -> None:
        super().__init__()
        self.W, self.V = nn.Parameter(torch.randn(17, 17) / 5), nn.Parameter(torch.randn(5, 17) / 3)

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.W.new_zeros(batch, 17), self.W.new_ones(batch, 5), self.W.new_ones(batch, 1)

    def forward(self, state: tuple[Tensor, Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, context, total = state
        new = torch.tanh(h @ self.W + context @ self.V + context[:, 3:4] * x)
        return new, context, 0.5 * total + h.sum(-1, keepdim=True)


class Summed(lf.Transition):
    """No product at all, so that no block waits for another."""

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor]:
        return self.a.new_zeros(batch, 17), self.a.new_ones(batch, 1)

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(17))

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        h, total = state
        return torch.tanh(self.a * h + x), 0.5 * total + h.sum(-1, keepdim=True)


@pytest.mark.parametrize("engine", [APART, ALONE], ids=["apart", "alone"])
@pytest.mark.parametrize("make", [Guided, Summed])
def test_states_that_pass_through_and_numbers_that_add_up(make: Callable[[], nn.Module], engine: lf.Engine) -> None:
    assert_agrees(engine, make(), torch.randn(5, 9, 17))


STATEFUL: dict[Callable[[], nn.Module], int] = {Guided: 17, Summed: 17, Joined: 7}  # and how wide x is


def test_addresses_that_are_not_aligned() -> None:
    cell, packed = lf.LSTM(3, 6), torch.randn(1, 13)
    x, state = torch.randn(4, 1, 3), lf.LSTMState(packed[:, 1:7], packed[:, 7:])
    found = []
    for engine in (APART, lf.Sequential()):
        cell.zero_grad()
        run = lf.unfold(cell, x, state, engine=engine)
        torch.cat([torch.ones(1), run.hidden.flatten()]).square().sum().backward()
        assert cell.W.grad is not None
        found.append((run.hidden.detach(), cell.W.grad.clone()))
    torch.testing.assert_close(found[0], found[1])


class Clamped(lf.Transition):
    """Infinities on the way, and beside the part that a product reads."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.rand(32, 40))

    def initial_state(self, batch: int) -> Tensor:
        return torch.cat([torch.ones(batch, 31), torch.full((batch, 9), torch.inf)], -1)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.clamp(h[:, :32] @ self.W, max=2) + x


@pytest.mark.parametrize("engine", [APART, ALONE], ids=["apart", "alone"])
def test_infinities(engine: lf.Engine) -> None:
    x = torch.randn(1, 3, 40)
    with torch.no_grad():
        found, expected = (lf.unfold(Clamped(), x, engine=e).hidden.isfinite() for e in (engine, lf.Sequential()))
    assert found.all()
    assert expected.all()


def test_a_step_of_many_shared_values_is_planned_in_no_time() -> None:
    class Deep(lf.Elman):
        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            h = super().forward(h, x)
            for _ in range(40):
                h = h + 0.1 * torch.tanh(h)
            return h

    recurrence = lf.unfolding.checked(Deep(3, 17), torch.randn(4, 2, 3), None, None, None)
    assert "multiply_add" in APART.code(recurrence)


class Every(lf.Transition):
    """Every operation of the table, each on what changes from step to step.

    But for those that round: beside the truth in float64, a number between two neighbours may go to either.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList([Step(op, DOMAINS[1:]) for op in COMPUTED if op.name not in ROUNDED.values()])

    def initial_state(self, batch: int) -> Tensor:
        return next(self.parameters()).new_zeros(batch, 5)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        total = 0 * h
        for step in self.steps:
            total = total + step(h, x) / len(self.steps)
        return total


@pytest.mark.parametrize("engine", [APART, ALONE], ids=["apart", "alone"])
def test_every_operation_of_the_table(engine: lf.Engine) -> None:
    assert_agrees(engine, Every(), torch.randn(4, 3, 5), [4, 2, 3])


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_kernels_compile_for_every_architecture(architecture: str) -> None:
    if driver.nvrtc() is None:
        pytest.skip("NVRTC is not installed")
    for dtype in FORMATS:
        for cell, n_in in ((zoo.Slots(4, 40), 4), (Every(), 5)):
            x = torch.randn(4, 5, n_in).to(dtype)
            recurrence = lf.unfolding.checked(cell.to(dtype), x, None, None, None)
            for text in APART.code(recurrence).split(f"// {type(cell).__name__} ")[1:]:
                assert driver._nvrtc(f"// {text}", driver.PRELUDE.read_text(), architecture)
    for dtype in (torch.bfloat16, torch.float16):
        for mixed in (lf.GRU(4, 40), zoo.Sliced(4, 40)):
            with torch.autocast("cpu", dtype):
                code = APART.code(lf.unfolding.checked(mixed, torch.randn(4, 5, 4), None, None, None))
            for text in code.split(f"// {type(mixed).__name__} ")[1:]:
                assert driver._nvrtc(f"// {text}", driver.PRELUDE.read_text(), architecture)


@pytest.mark.parametrize("bits", [-1, 0x7FFFFFFF, 0x7F800001])
def test_no_number_looks_like_one_that_is_missing(bits: int) -> None:
    """Memory that is exchanged is filled with ones beforehand, which as a number is a NaN."""
    strange = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    cell, x, state = lf.Elman(3, 17), torch.randn(4, 2, 3), torch.zeros(2, 17)
    state[1, 5] = strange
    found = lf.unfold(cell, x, state=state, engine=APART).hidden  # and it ends
    assert found[:, 0].isfinite().all()
    assert found[:, 1].isnan().all()


def test_what_it_cannot_run_it_refuses_in_words() -> None:
    cell, x = lf.Elman(3, 5), torch.randn(4, 2, 3)
    with pytest.raises(ValueError, match="FusedGPU cannot run Elman: it runs on a CUDA GPU and the state is on cpu"):
        lf.unfold(cell, x, engine=FusedGPU())


def test_the_code_can_be_read() -> None:
    text = lf.Recurrent(lf.LSTM(3, 17), APART).explain(torch.randn(4, 2, 3), code=True)
    assert all(word in text for word in ("// LSTM forward", "// LSTM backward", "multiply_add(", "publish("))


def test_what_the_driver_refuses_is_told_as_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, x = lf.LSTM(4, 17), torch.randn(4, 5, 4, requires_grad=True)
    expected = lf.unfold(cell, x, engine=lf.Sequential()).hidden

    def refused(*arguments: Any) -> None:
        raise driver.DriverError("a kernel was not launched: unspecified launch failure (719).")

    there = lf.unfold(cell, x, engine=ALONE)
    with monkeypatch.context() as patch:
        patch.setattr(EmulatedLauncher, "launch", refused)
        with pytest.raises(driver.DriverError, match=r"launch failure \(719\)"):
            there.hidden.sum().backward()
        with pytest.warns(lf.EngineWarning, match="could not run LSTM, so .*a kernel was not launched.*719") as told:
            found = lf.unfold(cell, x, engine=ALONE).hidden
    assert torch.equal(found, expected)
    assert "wrong" not in str(told[0].message)
    with pytest.raises(ValueError, match="its kernel was not run: a kernel was not launched: unspecified"):
        lf.unfold(cell, x, engine=ALONE)
    with pytest.raises(torch.OutOfMemoryError, match="a kernel was not loaded: the GPU has no memory left"):
        driver._check(2, "a kernel was not loaded")


@pytest.mark.parametrize("seed", range(8))
def test_random_steps(seed: int) -> None:
    """A few; on a GPU there are more."""
    assert_agrees_in_single_precision(seed, (APART, ALONE)[seed % 2])


def test_operations_that_are_expressed_by_others() -> None:
    """But for those that jump: beside the truth in float64, a number at a jump may go to either side."""
    jump = ("round to decimals", "div to whole numbers", "floor_divide", "remainder", "powers")
    smooth = [f for name, f in POINTWISE.items() if name not in jump]
    chosen = [ALONG[name] for name in ("prod", "norms", "any", "places", "how many")]
    for parts in (smooth, chosen):
        step = ExpressedStep(partial(_mean_of, parts))
        for engine in (APART, ALONE):
            assert_agrees(engine, step, torch.randn(4, 3, 5), [4, 2, 3])


def _mean_of(parts: list[Callable[[Tensor, Tensor], Tensor]], a: Tensor, c: Tensor) -> Tensor:
    return reduce(torch.add, [f(a, c) for f in parts]) / len(parts)
