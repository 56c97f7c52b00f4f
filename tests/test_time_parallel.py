"""TimeParallel: chunks of time side by side give what the loop in sequence gives, or it is run in sequence."""

import re
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from helpers import randn
from test_engines import errors, everything
from torch import Tensor, nn

import loopfold as lf
from loopfold.engines.chunks import Seams

pytestmark = pytest.mark.usefixtures("one_thread")
EXACT = 1e-11  # in float64, of the largest value of a tensor


class Two(NamedTuple):
    fast: Tensor
    slow: Tensor


class Leaking(lf.Transition):
    """Two state tensors, of which one lasts longer, and an output beside them."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.W, self.U, self.V = (nn.Parameter(randn(n, k) / k**0.5) for k in (n, n_in, n))
        self.leak = 0.6

    def forward(self, state: Two, x: Tensor) -> tuple[Tensor, Two]:
        fast = torch.tanh(state.slow @ self.W.T + x @ self.U.T)
        return fast @ self.V.T, Two(fast, self.leak * state.slow + (1 - self.leak) * fast)


def small(make: Callable[..., nn.Module], scale: float = 0.5) -> nn.Module:
    """A cell of 5 units with small recurrent weights, so that it forgets within a few dozen steps."""
    cell = make(3, 5).double()
    with torch.no_grad():
        cell.get_parameter("W").mul_(scale)
    return cell


def found(engine: lf.TimeParallel) -> Seams:
    assert engine.report is not None
    return engine.report


def assert_agrees(engine: lf.TimeParallel, cell: nn.Module, x: Tensor | None, *rest: Any, **options: Any) -> None:
    """Both ways side by side, with the values and gradients of the definition."""
    ours, theirs = (everything(cell, x, e, *rest, **options) for e in (engine, lf.Sequential()))
    assert {k: e for k, e in errors(ours, theirs).items() if not e <= EXACT} == {}


def assert_side_by_side(engine: lf.TimeParallel) -> None:
    report = found(engine)
    assert (report.agreed, report.backward_agreed) == (True, True), report
    assert 0 <= (report.defect or 0) < 1e-14


@pytest.mark.parametrize("inner", [lf.Auto(), lf.Looped(), lf.FusedCPU(), lf.Sequential()], ids=str)
@pytest.mark.parametrize("make", [lf.Elman, lf.GRU, Leaking], ids=lambda m: m.__name__)
def test_it_agrees_with_the_definition(inner: lf.Engine, make: Callable[..., nn.Module]) -> None:
    cell = small(make)
    for tau, batch, chunk, unequal in ((640, 1, 160, False), (613, 3, 97, False), (577, 3, 130, True)):
        if isinstance(inner, lf.Looped | lf.Sequential) and not unequal:
            continue
        engine = lf.TimeParallel(inner, chunk=chunk)
        assert_agrees(engine, cell, randn(tau, batch, 3), [tau, 1, 260] if unequal else None)
        assert_side_by_side(engine)
        assert found(engine).chunks == -(-tau // chunk)


@pytest.mark.parametrize("chunk", [None, 7, 64, 2000])
@pytest.mark.parametrize("tau", [1, 2, 63, 255, 256, 257, 1001])
def test_any_length_and_any_chunk(tau: int, chunk: int | None) -> None:
    engine = lf.TimeParallel(lf.Looped(), chunk=chunk)
    cell = small(lf.Elman, 0.3)
    for batch in (1, 3):
        x = randn(tau, batch, 3)
        ours, theirs = (lf.unfold(cell, x, engine=e).hidden for e in (engine, lf.Sequential()))
        torch.testing.assert_close(ours, theirs, rtol=EXACT, atol=EXACT)
    assert found(engine).agreed == (tau >= 2 * (chunk or 128))
    size = found(engine).chunk
    assert size == (tau if not found(engine).agreed else chunk or 128)
    assert found(engine).chunks == -(-tau // size)


# ------------------------------------------------------------------ what a step may read and give


class Everything(nn.Module):
    """Two inputs, a context, the number of the step, and no product between the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, h: Tensor, x: tuple[Tensor, Tensor], context: Tensor, t: Tensor) -> Tensor:
        return self.a * torch.sin(h + x[0] + torch.cos(0.01 * t)) + 0.1 * x[1] * context


def test_tuples_contexts_and_the_number_of_the_step() -> None:
    cell, x = Everything(), (randn(500, 3, 4), randn(500, 3, 4))
    results = []
    for engine in (lf.Sequential(), lf.TimeParallel(chunk=120)):
        own = [t.clone().requires_grad_() for t in (*x, randn(0, 4).new_ones(3, 4), randn(0, 4).new_ones(3, 4))]
        run = lf.unfold(cell, (own[0], own[1]), own[2], [500, 90, 333], engine, own[3])
        found_gradients = torch.autograd.grad((run.hidden**2).sum() + run.last.sum(), [*own, cell.a])
        results.append([run.hidden, run.last, *found_gradients])
    torch.testing.assert_close(results[1], results[0], rtol=EXACT, atol=EXACT)


class Autonomous(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.A = nn.Parameter(0.3 * randn(5, 5))
        self.b = nn.Parameter(randn(5))

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(h @ self.A.T + self.b)


def test_without_an_input() -> None:
    engine = lf.TimeParallel(chunk=100)
    for state in (randn(1, 5), randn(3, 5)):
        assert_agrees(engine, Autonomous(), None, steps=550, state=state)
        assert_side_by_side(engine)


def test_tokens_and_a_start_that_is_learnt() -> None:
    cell = lf.Embedded(small(lf.GRU), nn.Embedding(11, 3)).double()
    tokens, start = torch.randint(11, (600, 2)), nn.Parameter(randn(5))
    results = []
    for engine in (lf.Sequential(), lf.TimeParallel()):
        run = lf.unfold(cell, tokens, start.expand(2, -1), engine=engine)
        results.append([run.hidden, *torch.autograd.grad(run.hidden.sin().sum(), [start, *cell.parameters()])])
    torch.testing.assert_close(results[1], results[0], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("steps", [slice(-1, None), slice(0, 1), slice(150, 350), slice(None, None, 97)], ids=str)
def test_losses_on_parts_of_a_sequence(steps: slice) -> None:
    cell, engine, x = small(Leaking), lf.TimeParallel(chunk=96), randn(500, 2, 3)
    results = []
    for e in (lf.Sequential(), engine):
        own = x.clone().requires_grad_()
        loss = lf.unfold(cell, own, engine=e).hidden[steps].sum()
        results.append(torch.autograd.grad(loss, [own, *cell.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=EXACT, atol=EXACT)
    assert_side_by_side(engine)


def test_float32_is_as_near_to_the_truth_as_the_definition() -> None:
    cell, engine = small(lf.GRU).float(), lf.TimeParallel()
    x = randn(1200, 1, 3).float()
    ours, theirs = (everything(cell, x, e) for e in (engine, lf.Sequential()))
    truth = everything(cell.double(), x.double(), lf.Sequential())
    worst = max(errors({k: v.double() for k, v in theirs.items()}, truth).values())
    assert max(errors({k: v.double() for k, v in ours.items()}, truth).values()) <= max(5e-6, 5 * worst)
    assert found(engine).agreed
    assert (found(engine).defect or 0) <= 4e-6


# ------------------------------------------------------------------ steps that do not forget


class Integrator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.a * h + x


class Fickle(nn.Module):
    """Forgets, but where the input says: there it remembers for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.where(x > 100, h, self.a * h + x)


@pytest.mark.parametrize("chunk", [None, 60])
def test_what_does_not_forget_is_run_in_sequence(chunk: int | None) -> None:
    chaotic = small(lf.Elman, 12.0)
    remembering = lf.LSTM(3, 5, forget_bias=12.0).double()
    for cell, x in (
        (Integrator(), randn(600, 2, 3)),
        (chaotic, 0.1 * randn(600, 2, 3)),
        (remembering, randn(600, 1, 3)),
    ):
        engine = lf.TimeParallel(chunk=chunk)
        with pytest.warns(lf.EngineWarning, match="does not forget soon enough"):
            ours = everything(cell, x, engine)
        torch.testing.assert_close(ours, everything(cell, x, lf.Auto()), rtol=0, atol=0)
        assert not found(engine).agreed
        assert "two states would not be one after" in found(engine).why
        assert (found(engine).chunks, found(engine).chunk) == (1, 600)


def test_a_stretch_that_is_remembered_is_found_at_its_seams() -> None:
    cell, x = Fickle(), randn(6000, 2, 1)
    x[2000:3000] = 101.0  # between the places that are measured
    engine = lf.TimeParallel(chunk=100)
    theirs = everything(cell, x, lf.Sequential())
    with (
        pytest.warns(lf.EngineWarning, match="run in sequence from step 2,.00 on: it does not forget soon enough"),
        pytest.warns(
            lf.EngineWarning, match="gradients of Fickle before step 2,100 were computed by a run in sequence"
        ),
    ):
        ours = everything(cell, x, engine)
    assert max(errors(ours, theirs).values()) <= EXACT
    report = found(engine)
    assert not report.agreed
    assert "apart" in report.why
    assert report.in_sequence_from == 100 * report.chunks  # the stretch, but for a chunk or two that were certain
    assert 2100 <= report.in_sequence_from < 2500
    assert report.backward_in_sequence_to == 2100
    x[2100:] = randn(3900, 2, 1)  # one chunk of it is no hindrance
    ours, theirs = (everything(cell, x, e) for e in (engine, lf.Auto()))
    assert max(errors(ours, theirs).values()) <= EXACT
    assert_side_by_side(engine)
    assert found(engine).sweeps > 2


class Log(nn.Module):
    """The time of the last entry, which is a large number; and a small sum, of all of them or of some stretches."""

    def __init__(self, keep: float) -> None:
        super().__init__()
        self.a, self.keep = nn.Parameter(torch.tensor(1.0)), keep

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        time, more, remembered = x.split(1, 1)
        keep = remembered + (1 - remembered) * self.keep
        return torch.cat([time, keep * h[:, 1:] + self.a * more], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("keep", [1.0, 0.3], ids=["always", "for a stretch"])
def test_a_small_number_beside_a_large_one_is_remembered(keep: float, dtype: torch.dtype) -> None:
    cell, x = Log(keep).to(dtype), randn(2000, 2, 3).abs().to(dtype) / 10
    x[..., 0] += 1.6e9
    x[..., 2] = 0
    x[1100:1900, :, 2] = 1  # between the places that are measured
    engine, start = lf.TimeParallel(chunk=128), torch.zeros(2, 2, dtype=dtype)
    with pytest.warns(lf.EngineWarning, match="does not forget soon enough"):
        ours = lf.unfold(cell, x, start, engine=engine).hidden
    torch.testing.assert_close(ours, lf.unfold(cell, x, start, engine=lf.Sequential()).hidden)
    assert ("would not be one" if keep == 1 else "a sweep left its seams") in found(engine).why
    x[1100:, :, 2] = 0
    if keep < 1:  # and forgotten
        ours = lf.unfold(cell, x, start, engine=engine).hidden
        torch.testing.assert_close(ours, lf.unfold(cell, x, start, engine=lf.Sequential()).hidden)
        assert found(engine).agreed


def test_a_large_number_is_disturbed_by_a_large_one() -> None:
    """What is tried as another state is as far from the first as states are from each other."""
    x, engine = 1e9 * randn(2000, 1, 1).abs().float(), lf.TimeParallel(chunk=128)
    with pytest.warns(lf.EngineWarning, match="does not forget soon enough"):
        lf.unfold(Integrator().float(), x, torch.zeros(1, 1), engine=engine)
    assert found(engine).forgets is None


class Straight(nn.Module):
    """The state is forgotten, since it is set anew; the gradient of what is set is not, since it goes round it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain: Tensor
        self.a = nn.Parameter(torch.tensor(0.2, dtype=torch.float64))
        self.register_buffer("gain", torch.tensor(1.0, dtype=torch.float64))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        h = h + (torch.round(h / 1e3) * 1e3 - h).detach()  # a value of 0, and a gradient of 1
        return h + self.gain * self.a * torch.sin(x)


def test_gradients_that_do_not_come_to_an_end_are_those_of_a_run_in_sequence() -> None:
    cell, x = Straight(), 0.1 * randn(500, 2, 1)
    engine = lf.TimeParallel(chunk=100)
    with pytest.warns(lf.EngineWarning, match="gradients of Straight before step 300 were computed by a run"):
        ours = everything(cell, x, engine)
    assert (found(engine).agreed, found(engine).backward_agreed) == (True, False)
    assert (found(engine).in_sequence_from, found(engine).backward_in_sequence_to) == (None, 300)
    theirs = everything(cell, x, lf.Sequential())
    assert {k: e for k, e in errors(ours, theirs).items() if not e <= EXACT} == {}

    for name, value in (("scale", 2.0), ("gain", 2 * cell.gain)):
        hidden = lf.unfold(cell, x, engine=engine).hidden
        setattr(cell, name, value)
        with pytest.raises(RuntimeError, match="Straight was changed between its run and its gradients"):
            hidden.sum().backward()


def test_numbers_that_are_not_finite_end_it() -> None:
    cell, x = small(lf.Elman), randn(600, 2, 3)
    x[300] = torch.inf
    engine = lf.TimeParallel(chunk=100)
    for _ in range(2):
        with pytest.warns(lf.EngineWarning, match="does not forget soon enough"):
            ours = lf.unfold(cell, x, engine=engine).hidden
        theirs = lf.unfold(cell, x, engine=lf.Sequential()).hidden
        torch.testing.assert_close(ours, theirs, rtol=EXACT, atol=EXACT, equal_nan=True)
        with torch.no_grad():
            cell.get_parameter("W")[0, 0] = torch.nan


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_gradients_that_are_not_finite_are_those_of_the_definition(bad: float) -> None:
    cell, x = small(Leaking), randn(300, 2, 3)
    weights = randn(300, 2, 5)
    weights[170, 1, 2] = bad
    results = []
    for engine in (lf.Sequential(), lf.TimeParallel(chunk=100)):
        own = x.clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", lf.EngineWarning)
            results.append(torch.autograd.grad(lf.unfold(cell, own, engine=engine).hidden, own, weights))
    torch.testing.assert_close(results[1][0][:, 0], results[0][0][:, 0], rtol=EXACT, atol=EXACT)
    assert torch.equal(results[1][0].isfinite(), results[0][0].isfinite())


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_chunks_of_a_step(chunk: int) -> None:
    cell, engine = small(lf.Elman, 0.0), lf.TimeParallel(chunk=chunk)  # the state is what x says
    assert_agrees(engine, cell, randn(20, 2, 3), [20, 9])
    assert_side_by_side(engine)
    hidden = lf.unfold(cell, randn(21, 2, 3), engine=engine).hidden
    hidden *= 2.0  # it is the caller's own
    hidden.sum().backward()


# ------------------------------------------------------------------ refusals, modes, threads


class Mixing(nn.Module):
    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return 0.1 * h.mean(0, keepdim=True) + x


class Noisy(nn.Module):
    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return 0.1 * h + x + torch.rand_like(h)


def test_what_it_cannot_run_is_refused() -> None:
    x = torch.randn(600, 2, 3)
    for cell, reason in ((Mixing(), "mixes the sequences of a batch"), (Noisy(), "draws random numbers")):
        with pytest.raises(ValueError, match=f"TimeParallel cannot run {type(cell).__name__}: .*{reason}"):
            lf.unfold(cell, x, torch.zeros(2, 3), engine=lf.TimeParallel(lf.Sequential()))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match="TimeParallel cannot run Elman: it computes in half precision"),
    ):
        lf.unfold(lf.Elman(3, 5), x, engine=lf.TimeParallel())
    with pytest.raises(ValueError, match="TimeParallel cannot run Elman: it runs on a CUDA GPU"):
        lf.unfold(lf.Elman(3, 5), x, engine=lf.TimeParallel(lf.FusedGPU()))


def test_wrong_settings() -> None:
    with pytest.raises(ValueError, match="cannot run chunks of chunks"):
        lf.TimeParallel(lf.TimeParallel())
    with pytest.raises(TypeError, match="needs an engine to run its chunks"):
        lf.TimeParallel(64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs chunk as a whole number of at least 1; got 0"):
        lf.TimeParallel(chunk=0)
    with pytest.raises(ValueError, match="needs a tolerance between 0 and 1; got 2"):
        lf.TimeParallel(tolerance=2)


def test_modes() -> None:
    cell, engine, x = small(lf.Elman), lf.TimeParallel(chunk=100), randn(500, 2, 3)
    truth = lf.unfold(cell, x, engine=lf.Sequential()).hidden
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            hidden = lf.unfold(cell, x, engine=engine).hidden
        assert not hidden.requires_grad
        torch.testing.assert_close(hidden, truth, rtol=EXACT, atol=EXACT)
        assert found(engine).agreed
    hidden = lf.unfold(cell, x, engine=engine).hidden
    hidden.sum().backward(retain_graph=True)
    W = cell.get_parameter("W")
    assert W.grad is not None
    first = W.grad.clone()
    hidden.sum().backward()
    torch.testing.assert_close(W.grad, 2 * first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        hidden.sum().backward()
    hidden = lf.unfold(cell, x, engine=engine).hidden
    (g,) = torch.autograd.grad(hidden.sum(), [W], create_graph=True)
    with pytest.raises(RuntimeError, match="TimeParallel has first derivatives only"):
        g.sum().backward()
    hidden = lf.unfold(cell, x, engine=engine).hidden
    with torch.no_grad():
        W.mul_(1.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        hidden.sum().backward()


def test_gradients_that_come_many_at_a_time() -> None:
    cell, x = small(lf.Elman), randn(300, 1, 3)
    many = randn(4, 300, 1, 5)
    results = []
    for engine in (lf.Sequential(), lf.TimeParallel(chunk=80)):
        hidden, parameters = lf.unfold(cell, x, engine=engine).hidden, list(cell.parameters())
        results.append(torch.autograd.grad(hidden, parameters, many, is_grads_batched=True, retain_graph=True))
        again = torch.vmap(lambda g, h=hidden, p=parameters: torch.autograd.grad(h, p, g, retain_graph=True))(many)
        torch.testing.assert_close(again, results[-1])
    torch.testing.assert_close(results[1], results[0], rtol=EXACT, atol=EXACT)


def test_threads_have_reports_of_their_own() -> None:
    engine, cell = lf.TimeParallel(chunk=100), small(lf.Elman)
    xs = [randn(400 + 100 * i, 1, 3) for i in range(4)]
    truth = [lf.unfold(cell, x, engine=lf.Sequential()).hidden.detach() for x in xs]
    results: dict[int, Any] = {}

    def work(i: int) -> None:
        for _ in range(5):
            x = xs[i].clone().requires_grad_()
            hidden = lf.unfold(cell, x, engine=engine).hidden
            torch.autograd.grad(hidden.sum(), x)
            results[i] = hidden.detach(), engine.report

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, (hidden, report) in results.items():
        torch.testing.assert_close(hidden, truth[i], rtol=EXACT, atol=EXACT)
        assert (report.chunks, report.agreed, report.backward_agreed) == (4 + i, True, True)


def test_hooks_see_whole_gradients_once() -> None:
    """And as they change them, wherever the gradients come from: side by side, or from a run in sequence."""
    for cell, x in ((small(lf.GRU, 0.3), randn(300, 1, 3)), (Straight(), 0.1 * randn(300, 1, 1))):
        parameter = next(cell.parameters())
        results: list[Any] = []
        seen: list[Tensor] = []

        def hook(g: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(g)
            return g.clamp(-0.1, 0.1)

        handle = parameter.register_hook(hook)
        for engine in (lf.Sequential(), lf.TimeParallel(chunk=50)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", lf.EngineWarning)
                loss = lf.unfold(cell, x, engine=engine).hidden.sum()
                results.append(torch.autograd.grad(loss, list(cell.parameters())))
        torch.testing.assert_close(results[1], results[0], rtol=EXACT, atol=EXACT)
        assert len(seen) == 2
        handle.remove()
        lf.unfold(cell, x, engine=lf.Sequential()).hidden.sum().backward()
        assert len(seen) == 2


@dataclass
class Unhashable(lf.Engine):
    names: list[str]

    def refusal(self, recurrence: lf.Recurrence) -> None:
        return None

    def run(self, recurrence: lf.Recurrence) -> Any:
        return lf.Looped().run(recurrence)


def test_an_engine_inside_need_not_be_hashable() -> None:
    engine, other = (lf.TimeParallel(Unhashable([]), chunk=100) for _ in range(2))
    assert_agrees(engine, small(lf.Elman), randn(400, 1, 3))
    assert_side_by_side(engine)
    assert other.report is None


class Turning(nn.Module):
    """A state that is a matrix, and comes back in another order in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.4, dtype=torch.float64))

    def forward(self, S: Tensor, x: Tensor, context: Tensor) -> Tensor:
        return self.a * S.transpose(1, 2) + x + context.transpose(1, 2)


def test_gradients_that_lie_otherwise_in_memory() -> None:
    cell, x, start = Turning(), randn(300, 2, 3, 3), randn(2, 3, 3)
    results = []
    for engine in (lf.Sequential(), lf.TimeParallel(lf.Sequential(), chunk=60)):
        own = [t.clone().requires_grad_() for t in (x, start, start)]
        run = lf.unfold(cell, own[0], own[1], engine=engine, context=own[2])
        results.append(torch.autograd.grad(run.hidden.sin().sum(), [*own, cell.a]))
    torch.testing.assert_close(results[1], results[0], rtol=EXACT, atol=EXACT)


def test_torch_draws_what_it_would_have_drawn() -> None:
    cell, x = small(lf.Elman), randn(500, 1, 3)
    before = torch.get_rng_state()
    lf.unfold(cell, x, engine=lf.TimeParallel(chunk=100))
    assert torch.equal(torch.get_rng_state(), before)


def test_explain_says_what_to_expect() -> None:
    cell, x = small(lf.Elman), randn(5000, 1, 3)
    text = lf.Recurrent(cell, lf.TimeParallel(chunk=500)).explain(x)
    assert text.startswith("Elman over τ = 5000, batch 1, float64 on cpu: TimeParallel, because it was asked for.")
    assert re.search(r"two states were one after \d+ steps, at 4 places that were tried\n", text)
    assert "10 chunks of 500 steps side by side; about 1.06 sweeps each way\n" in text
    assert "\n  inside it FusedCPU, because its loop is native code.\n" in text
    assert re.search(r"forwards about [\d.]+ times as fast as in sequence", text)
    remembering, start = lf.Recurrent(Integrator(), lf.TimeParallel()), torch.zeros(1, 3, dtype=torch.float64)
    assert "in sequence, since two states would not be one after 250 steps." in remembering.explain(x[:2000], start)
    text = remembering.explain(x, start)
    assert "it remembers; worth a try is whether each number of its state is kept by itself\n" in text
    assert "40 chunks of 128 steps side by side; about 5 sweeps each way\n" in text
    assert "TimeParallel refuses, because" in lf.Recurrent(Noisy(), lf.TimeParallel()).explain(x, torch.zeros(1, 3))
