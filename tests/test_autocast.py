"""Under torch.autocast: every engine gives what `Sequential` gives under the same autocast, in the same dtypes."""

import copy
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from test_engines import ENGINES
from test_random_steps import BINARY, UNARY, WITH_WEIGHTS, RandomStep
from torch import Tensor, nn

import loopfold as lf
from loopfold.engines.programs import program_of
from loopfold.engines.vectors import LLVM
from loopfold.states import leaves, map_state
from loopfold.stepgraph.loop import ordered
from loopfold.stepgraph.ops import OPS, ROUNDED
from loopfold.unfolding import checked

pytestmark = pytest.mark.usefixtures("one_thread")
HALVES = [torch.bfloat16, torch.float16]
# Of the largest value of a tensor. States: sums in another order, so that now and then a result in half precision is
# the neighbour of what it should be; and some of torch's own operations round more than once (log_softmax, pow).
# Gradients: `Sequential` adds up those of a matrix in half precision, step by step
TOLERANCE = {torch.bfloat16: (2e-2, 4e-2), torch.float16: (2e-3, 1e-2)}
CELLS = [make for make in (*zoo.WITH_INPUT, *zoo.REWRITTEN, *zoo.TENSORS) if make is not zoo.Clockwork]  # lerp refuses


def everything(
    cell: nn.Module,
    x: Tensor | None,
    engine: lf.Engine,
    dtype: torch.dtype | None,
    lengths: list[int] | None = None,
    scale: float = 1.0,
    **options: Any,
) -> dict[str, Tensor]:
    """States, last state and all gradients: forwards under autocast (unless dtype is None), backwards outside of it."""
    cell.zero_grad()
    x = None if x is None else x.clone().requires_grad_()
    start = options.pop("state", None)
    if start is not None:
        start = map_state(lambda leaf: leaf.clone().requires_grad_(), start)
    torch.manual_seed(11)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        run = lf.unfold(cell, x, start, lengths=lengths, engine=engine, **options)
    found = {f"states {i}": leaf for i, leaf in enumerate(leaves(run.states))}
    found |= {f"last {i}": leaf for i, leaf in enumerate(leaves(run.last))}
    weights = torch.Generator().manual_seed(5)
    losses = [(v.double() * torch.randn(v.shape, generator=weights)).sum() for v in found.values()]
    (scale * torch.stack(losses).sum()).backward()
    sources = {"x": x, **{f"state {i}": leaf for i, leaf in enumerate(() if start is None else leaves(start))}}
    sources |= dict(cell.named_parameters())
    found |= {f"∇{k}": v.grad for k, v in sources.items() if v is not None and v.grad is not None}
    return {k: v.detach() for k, v in found.items()}


def assert_agrees(
    engine: lf.Engine, cell: nn.Module, x: Tensor | None, dtype: torch.dtype, *more: Any, **o: Any
) -> None:
    ours, theirs = (everything(cell, x, e, dtype, *more, **o) for e in (engine, lf.Sequential()))
    assert {k: v.dtype for k, v in ours.items()} == {k: v.dtype for k, v in theirs.items()}
    for k, v in theirs.items():
        tolerance = TOLERANCE[dtype]["∇" in k]
        error = (ours[k].double() - v.double()).abs().max() / v.double().abs().max().clamp(min=1e-3)
        assert float(error) <= tolerance, (k, float(error))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("make", CELLS, ids=lambda m: m.__name__)
def test_engines_agree_under_autocast(
    make: Callable[[int, int], nn.Module], engine: lf.Engine, dtype: torch.dtype
) -> None:
    for tau, batch, n, unequal in ((1, 1, 3, False), (6, 3, 6, True), (7, 2, 6, False)):
        lengths = [1 + (7 * i) % tau for i in range(batch)] if unequal else None
        assert_agrees(engine, make(4, n), torch.randn(tau, batch, 4), dtype, lengths)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", zoo.AWKWARD)
def test_awkward_steps_agree_under_autocast(engine: lf.Engine, name: str) -> None:
    cell, x = zoo.Awkward(zoo.AWKWARD[name], 5), torch.randn(4, 3, 5)
    for lengths in (None, [4, 1, 2]):
        if possible(cell, x):
            assert_agrees(engine, cell, x, torch.bfloat16, lengths)


def possible(cell: nn.Module, x: Tensor) -> bool:
    """Whether torch itself can, under autocast: some operations take tensors of one dtype only."""
    try:
        everything(cell, x, lf.Sequential(), torch.bfloat16)
    except (RuntimeError, ValueError):
        return False
    return True


class Plain(nn.Module):
    """Its step is a function of (self, h, x), with two linear layers and a few buffers."""

    threshold: Tensor

    def __init__(self, step: Callable[..., Tensor], n: int = 5) -> None:
        super().__init__()
        self.step, self.n = step, n
        self.W, self.U, self.b = nn.Linear(n, n), nn.Linear(n, n, bias=False), nn.Parameter(torch.randn(n))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.norm = nn.LayerNorm(n)
        self.register_buffer("threshold", torch.full((n,), 0.2))

    def initial_state(self, batch: int) -> Tensor:
        return self.b.new_zeros(batch, self.n)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.step(self, h, x)


def _without(f: Plain, h: Tensor, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        exact = f.W(h.float()) - 1000 * x.float()
    return torch.tanh(exact + f.U(h) + 1000 * x)


def _other(f: Plain, h: Tensor, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        rough = f.W(h)
    return torch.tanh(rough + f.U(x))


def _in_place(f: Plain, h: Tensor, x: Tensor) -> Tensor:
    a = f.W(h).clone()
    a[:, :2] = f.U(x)[:, :2]
    a.mul_(0.5).add_(x)
    return torch.tanh(a)


class Step(torch.autograd.Function):
    """1 above zero, with the gradient of a sigmoid."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        return (a > 0).to(a.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (a,) = ctx.saved_tensors
        return g * torch.sigmoid(a) * (1 - torch.sigmoid(a))


STEPS: dict[str, Callable[..., Tensor]] = {
    "half precision from the first step on": lambda f, h, x: torch.tanh(f.W(h) + f.U(x)),
    "another first step": lambda f, h, x: torch.tanh(f.W(h) + f.U(x) + (h - 0.5).to(torch.float16)).to(f.U(x).dtype),
    "float32 by promotion": lambda f, h, x: 0.9995 * h + x,
    "float32 and a product": lambda f, h, x: 0.9 * h + 0.1 * torch.tanh(f.W(h) + f.U(x)),
    "autocast off inside": _without,
    "another dtype inside": _other,
    "updates in place": _in_place,
    "one number beside rows": lambda f, h, x: torch.tanh(f.scale * f.W(h) + f.U(x)),
    "a function that autocast takes to float32": lambda f, h, x: (
        torch.log_softmax(f.W(h), -1) * 0.1 + f.U(x).exp() * 0.1
    ),
    "layer norm": lambda f, h, x: f.norm(f.W(h) + f.U(x)),
    "spikes": lambda f, h, x: 0.9 * h + f.U(x) - (f.W(h) > f.threshold).to(h.dtype),
    "what half precision cannot tell apart": lambda f, h, x: torch.where(torch.sigmoid(4 * f.W(h) + 5) == 1, f.U(x), h),
    "what cancels": lambda f, h, x: torch.tanh(1000 * (1 - torch.sigmoid(f.W(h) + 5)) + f.U(x)),
    "greatest of many that are equal": lambda f, h, x: f.W(h) + torch.round(4 * f.U(x)).amax(-1, keepdim=True) * 0.1,
    "a gradient of its own": lambda f, h, x: 0.5 * Step.apply(f.W(h)) + torch.tanh(f.U(x)),
    "dropout": lambda f, h, x: F.dropout(torch.tanh(f.W(h) + f.U(x)), 0.3),
    "noise": lambda f, h, x: torch.tanh(f.W(h) + f.U(x) + torch.randn_like(x)),
    "no product": lambda f, h, x: torch.tanh(h + x),
    "casts of the step's own": lambda f, h, x: torch.tanh(f.W(h).float() + f.U(x).double().float()),
    "parts of it": lambda f, h, x: torch.cat([torch.tanh(f.W(h))[:, 1:], (h[:, :1] * 0.5).to(f.U(x).dtype)], -1),
    "attention to its own units": lambda f, h, x: (
        F.scaled_dot_product_attention(f.W(h)[:, None, None], f.U(x)[:, None, None], h[:, None, None].to(x.dtype))[
            :, 0, 0
        ]
        * 0.5
        + x
    ),
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", STEPS)
def test_steps_agree_under_autocast(name: str, engine: lf.Engine, dtype: torch.dtype) -> None:
    """With a state of float32 and of half precision; warnings are errors, so all the checks of a run must pass, too."""
    for seed in range(3):
        torch.manual_seed(seed)
        cell, x = Plain(STEPS[name]), torch.randn(6, 3, 5)
        refused = 0
        for state in (None, torch.randn(3, 5), torch.randn(3, 5).to(dtype)):
            for lengths in (None, [6, 1, 3]):
                with torch.autocast("cpu", dtype):
                    reason = engine.refusal(checked(cell, x, state, lengths, None))
                if reason is None:
                    assert_agrees(engine, cell, x, dtype, lengths, **({} if state is None else {"state": state}))
                else:
                    assert "before the first step" in reason or "aten._to_copy gives torch.float64" in reason
                    refused += 1
        assert refused <= {"casts of the step's own": 6}.get(name, 2)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
def test_small_increments_are_not_lost(engine: lf.Engine) -> None:
    """Autocast leaves sums and products with a number in float32, where 1 + 1/4096 is not 1."""
    cell, x = Plain(lambda f, h, x: 0.9995 * h + x), torch.full((2000, 2, 5), 2.0**-12)
    ours, theirs = (everything(cell, x, e, torch.bfloat16) for e in (engine, lf.Sequential()))
    assert ours["last 0"].dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert 0.30 < float(ours["last 0"][0, 0]) < 0.32


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(
    "make", [lf.LSTM, lf.GRU, lambda i, n: Plain(STEPS["half precision from the first step on"], n)]
)
def test_over_many_steps_it_is_no_worse_than_the_definition(
    make: Callable[[int, int], nn.Module], engine: lf.Engine
) -> None:
    """Against float64: `Sequential` adds up the gradient of a matrix in bfloat16, where late terms are lost."""
    cell, x = make(8, 8), torch.randn(300, 4, 8)
    ours, theirs = (everything(cell, x, e, torch.bfloat16) for e in (engine, lf.Sequential()))
    truth = everything(copy.deepcopy(cell).double(), x.double(), lf.Sequential(), None)

    def worst(found: dict[str, Tensor], kind: str) -> float:
        keys = [k for k in truth if k.startswith(kind)]
        return max(float((found[k].double() - truth[k]).abs().max() / truth[k].abs().max()) for k in keys)

    for kind in ("states", "∇"):
        assert worst(ours, kind) <= 1.3 * worst(theirs, kind)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_scaled_loss(engine: lf.Engine, dtype: torch.dtype) -> None:
    """As torch.amp.GradScaler scales it: gradients that half precision could not hold without."""
    cell, x = lf.LSTM(4, 6), torch.randn(7, 3, 4)
    assert_agrees(engine, cell, x, dtype, scale=1024.0)
    tiny = everything(cell, x, engine, dtype, scale=2.0**-20)
    assert all(bool(v.isfinite().all()) for v in tiny.values())
    huge, theirs = (everything(cell, x, e, torch.float16, scale=2.0**30) for e in (engine, lf.Sequential()))
    for k in huge:  # what overflows there overflows here: a scaler must see it
        assert bool(huge[k].isfinite().all()) == bool(theirs[k].isfinite().all()), k


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
def test_one_cell_with_and_without_autocast(engine: lf.Engine) -> None:
    cell, x = lf.GRU(4, 6), torch.randn(5, 3, 4)
    expected = {d: everything(cell, x, lf.Sequential(), d) for d in (None, *HALVES)}
    for dtype in (None, torch.bfloat16, None, torch.float16, torch.bfloat16, None):
        found = everything(cell, x, engine, dtype)
        tolerance = 1e-5 if dtype is None else TOLERANCE[dtype][1]
        for k, v in expected[dtype].items():
            torch.testing.assert_close(found[k], v, rtol=tolerance, atol=tolerance * float(v.abs().max()))
    assert not torch.equal(expected[None]["states 0"], expected[torch.bfloat16]["states 0"])


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
def test_threads_with_an_autocast_each(engine: lf.Engine) -> None:
    cell, x = lf.LSTM(4, 6), torch.randn(5, 3, 4)
    kinds = (None, *HALVES)
    expected = {}
    for dtype in kinds:
        with torch.no_grad(), torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            expected[dtype] = lf.unfold(cell, x, engine=lf.Sequential()).hidden
    barrier = threading.Barrier(len(kinds))

    def work(dtype: torch.dtype | None) -> None:
        for _ in range(10):
            barrier.wait()
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                hidden = lf.unfold(cell, x, engine=engine).hidden
            torch.testing.assert_close(hidden.detach(), expected[dtype], rtol=1e-5, atol=1e-5)
            hidden.sum().backward()

    with ThreadPoolExecutor(len(kinds)) as pool:
        list(pool.map(work, kinds))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
def test_a_check_leaves_autocasts_own_casts_alone(engine: lf.Engine) -> None:
    """Autocast keeps the casts of parameters; one that was made without gradients would leave `Sequential` without."""
    cell, x = Plain(STEPS["half precision from the first step on"]), torch.randn(5, 3, 5)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            lf.unfold(cell, x, engine=engine)  # is traced, and checked
        for one in (lf.Sequential(), engine):
            lf.unfold(cell, x, engine=one).hidden.sum().backward()
            assert cell.W.weight.grad is not None
            cell.zero_grad()


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
def test_gradients_are_checked_under_the_autocast_of_the_way_forwards(engine: lf.Engine) -> None:
    """A step whose gradient is another than its trace says is found out, also where autocast is off by then."""
    cell, x = Plain(lambda f, h, x: torch.tanh(f.W(h) + f.U(x))), torch.randn(5, 3, 5)
    good = everything(cell, x, lf.Sequential(), torch.bfloat16)
    wrong = OPS["tanh"].gradient
    assert wrong is not None
    object.__setattr__(OPS["tanh"], "gradient", lambda b, y, g, a: (b.mul(g, y),))
    try:
        with pytest.warns(lf.EngineWarning, match="a gradient of step"):
            found = everything(cell, x, engine, torch.bfloat16)
    finally:
        object.__setattr__(OPS["tanh"], "gradient", wrong)
    for k, v in good.items():  # those of `Sequential`
        torch.testing.assert_close(found[k], v, rtol=1e-2, atol=1e-2)


def test_a_graph_without_half_precision_is_checked_as_closely_as_ever() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        exact = checked(Plain(STEPS["float32 by promotion"]), torch.randn(4, 2, 5), None, None, None)
        mixed = checked(lf.GRU(5, 5), torch.randn(4, 2, 5), None, None, None)
        assert program_of(exact).program.graph.roughest is None
        assert program_of(mixed).program.graph.roughest == torch.bfloat16
        assert "bfloat16" in {v.op for v in ordered(program_of(mixed).program.loop.emitted)}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_number_is_rounded_as_torch_rounds_it(dtype: torch.dtype) -> None:
    """All patterns of the upper 20 bits of a float32, with the ties, the subnormals and the infinite."""
    patterns = (torch.arange(1 << 20, dtype=torch.int64) << 12).to(torch.int32)
    around = torch.cat([patterns, patterns + 1, patterns - 1]).view(torch.float32)
    x = around[None, None].expand(2, 1, -1)  # two steps, so that there is a loop
    assert ROUNDED[dtype] in LLVM

    class Rounds(lf.Transition):
        def initial_state(self, batch: int) -> Tensor:
            return torch.zeros(batch, around.numel())

        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            return torch.where(h == 0, x, x).to(dtype).float()

    wanted = around.to(dtype).float()
    patched = torch.where(x.isnan(), 0, x)  # x may hold none
    found = lf.unfold(Rounds(), patched, engine=lf.FusedCPU(threads=1)).hidden[-1, 0]
    fine = ~around.isnan()
    assert torch.equal(found[fine], wanted[fine])


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
def test_float64_is_left_alone(engine: lf.Engine) -> None:
    cell, x = lf.GRU(4, 6).double(), torch.randn(5, 3, 4).double()
    ours, theirs = (everything(cell, x, e, torch.bfloat16) for e in (engine, lf.Sequential()))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_auto_compiles_under_autocast() -> None:
    layer, x = lf.Recurrent(lf.LSTM(8, 32)), torch.randn(100, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert "FusedCPU, because" in layer.explain(x)
        assert "bfloat16" in layer.explain(x)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
def test_no_input_a_context_and_outputs_beside_the_state(engine: lf.Engine) -> None:
    assert_agrees(engine, zoo.Autonomous(5), None, torch.bfloat16, steps=6, state=torch.randn(3, 5))

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W, self.V = nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, h: Tensor, x: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.W(h) + x + c)
            return self.V(h), h

    cell, x, c = Reads(), torch.randn(6, 3, 5), torch.randn(3, 5)
    results = []
    for one in (engine, lf.Sequential()):
        with torch.autocast("cpu", torch.bfloat16):
            run = lf.unfold(cell, x, context=c, state=torch.zeros(3, 5), engine=one)
        assert isinstance(run.outputs, Tensor)
        results.append((run.outputs, run.states, *torch.autograd.grad(run.outputs.float().sum(), [*cell.parameters()])))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=4e-2, atol=4e-2)


@pytest.mark.parametrize("seed", range(30))
def test_random_steps_agree_under_autocast(seed: int) -> None:
    choose = random.Random(seed)
    names = [*WITH_WEIGHTS, *UNARY, *BINARY]
    program = [
        (choose.choice(names), choose.randrange(50), choose.randrange(50)) for _ in range(choose.randrange(1, 9))
    ]
    n = choose.choice([4, 6])
    cell, x = RandomStep(program, n, choose.randrange(1, 4)), torch.randn(4, 3, n)
    if possible(cell, x):
        for engine in ENGINES:
            assert_agrees(engine, cell, x, choose.choice(HALVES), choose.choice([None, [4, 1, 2]]))
