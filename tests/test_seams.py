"""TimeParallel where a network remembers: what its seams predict, and how it is finished in sequence."""

import copy
import random
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from emulation import Emulated
from helpers import randn, random_text
from test_engines import SINGLE, errors, everything
from test_time_parallel import EXACT, Fickle, Straight, found
from torch import Tensor, nn

import loopfold as lf
from loopfold.engines import explaining, time_parallel
from loopfold.engines.chunks import Chunks, slopes_between
from loopfold.states import leaves
from loopfold.unfolding import checked

pytestmark = pytest.mark.usefixtures("one_thread")


class Sum(nn.Module):
    """Numbers that are added up, each by itself, and two that fade at their own rates; nothing is forgotten soon."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.keep = nn.Parameter(torch.tensor([1.0, 0.9995, 0.997], dtype=torch.float64))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.keep * h + self.a * torch.sin(x)


@pytest.fixture(scope="module")
def remembering() -> tuple[nn.Module, Tensor]:
    """An LSTM whose forget gates are open, trained for a moment on a text, and the text."""
    torch.manual_seed(0)
    text = random_text(4096)
    ids = torch.tensor([sorted(set(text)).index(character) for character in text])
    kinds = int(ids.max()) + 1
    cell = lf.Embedded(lf.LSTM(8, 16, forget_bias=4.0), nn.Embedding(kinds, 8))
    readout = nn.Linear(16, kinds)
    optimiser = torch.optim.Adam([*cell.parameters(), *readout.parameters()], 0.01)
    for i in range(60):
        windows = ids[64 * (i % 8) :][: 16 * 64].view(16, 64).T
        logits = readout(lf.unfold(cell, windows[:-1]).hidden)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), windows[1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return cell, ids[:, None]


@pytest.mark.parametrize("inner", [lf.Auto(), lf.Looped()], ids=str)
@pytest.mark.parametrize("lengths", [None, [4000, 1, 2333]], ids=str)
def test_a_network_that_keeps_its_numbers_is_run_side_by_side(inner: lf.Engine, lengths: list[int] | None) -> None:
    cell, x, engine = Sum(), randn(4000, 3, 3), lf.TimeParallel(inner)
    ours, theirs = (everything(cell, x, e, lengths, state=x[0]) for e in (engine, lf.Sequential()))
    assert {k: e for k, e in errors(ours, theirs).items() if not e <= EXACT} == {}
    report = found(engine)
    assert (report.agreed, report.why, report.backward_agreed, report.forgets) == (True, "", True, None), report
    assert (report.chunks, report.chunk) == (32, 128)
    assert report.sweeps <= 6
    assert report.backward_sweeps <= 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_trained_lstm_that_remembers_is_run_side_by_side(
    remembering: tuple[nn.Module, Tensor], dtype: torch.dtype
) -> None:
    """And no less exactly than in sequence."""
    (cell, x), engine = remembering, lf.TimeParallel()
    results = []
    for of, e in ((torch.float64, lf.Looped()), (dtype, lf.FusedCPU()), (dtype, engine)):
        own = copy.deepcopy(cell).to(of)
        hidden = lf.unfold(own, x, engine=e).hidden
        weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
        gradients = torch.autograd.grad(hidden, list(own.parameters()), weights.to(of))
        results.append({str(i): t.detach().double() for i, t in enumerate((hidden, *gradients))})
    report = found(engine)
    assert (report.agreed, report.backward_agreed, report.forgets) == (True, True, None), report
    assert report.sweeps <= 8  # of 32 that a run in sequence is
    truth, theirs, ours = results
    assert max(errors(ours, truth).values()) <= max(EXACT, 5 * max(errors(theirs, truth).values()))


def test_on_a_gpu_what_forgets_late_is_tried_as_if_it_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """There only the steps one after the other count; and where that fails, it is run as what forgets."""
    monkeypatch.setattr(time_parallel, "waits_for_steps", lambda device: True)
    cell, x, engine = Sum(), randn(40_000, 1, 3), lf.TimeParallel()
    with torch.no_grad():
        cell.keep.fill_(0.98)
    ours, theirs = (everything(cell, x, e, state=x[0]) for e in (engine, lf.FusedCPU()))
    assert max(errors(ours, theirs).values()) <= EXACT
    assert (found(engine).agreed, found(engine).backward_agreed, found(engine).chunk) == (True, True, 313)
    monkeypatch.setattr(time_parallel, "slopes_between", lambda *given: torch.full_like(given[0], 0.99))  # all wrong
    ours = everything(cell, x, engine, state=x[0])
    assert max(errors(ours, theirs).values()) <= EXACT
    report = found(engine)
    assert (report.agreed, report.why, report.chunk, report.chunks) == (True, "", 16384, 3)


def test_seams_are_predicted_as_a_loop_over_chunks_would() -> None:
    """start(k+1) = end(k) + slope(k) · what start(k) moves by; and back, what arrives and what goes on of it."""
    x, state = randn(30, 2, 3), randn(2, 3)
    chunks = Chunks(checked(Sum(), x, state, None, None), lf.Sequential(), 5, 5)
    with torch.no_grad():
        first = chunks.to_end(0, chunks.start)
        starts = chunks.after(first.ends)
        second = chunks.to_end(0, starts)
        slopes = slopes_between(chunks.start, starts, first.ends, second.ends, torch.zeros_like(starts), second.sizes)
        keep = Sum().keep.expand(12, 3)
        torch.testing.assert_close(slopes[2:], keep[2:] ** 5)  # the first chunk has not moved
        slopes = keep**5
        truth = lf.Sequential().run(chunks.recurrence)
        torch.testing.assert_close(
            chunks.predicted(starts, second.ends, slopes)[2:].view(5, 2, 3), truth[4:25:5]
        )  # one step of Newton: it is linear
        arriving = randn(12, 3)
        needed = arriving.clone().view(6, 2, 3)
        for k in reversed(range(5)):
            needed[k] += slopes.view(6, 2, 3)[k + 1] * needed[k + 1]
        torch.testing.assert_close(chunks.predicted_back(arriving, slopes).view(6, 2, 3), needed)


@dataclass
class Counting(lf.Engine):
    """Notes how many steps of how many sequences it was given, and whether with a gradient."""

    seen: list[tuple[int, int, bool]] = field(default_factory=list)

    def refusal(self, recurrence: lf.Recurrence) -> None:
        return None

    def run(self, recurrence: lf.Recurrence) -> Any:
        self.seen.append((recurrence.steps, len(leaves(recurrence.state)[0]), torch.is_grad_enabled()))
        return lf.Looped().run(recurrence)


@pytest.mark.parametrize("lengths", [None, [3000, 900, 2750], [2950, 2110, 1]], ids=str)
def test_what_is_certain_is_not_run_in_sequence(lengths: list[int] | None) -> None:
    cell, x, inner = Fickle(), randn(3000, 3, 1), Counting()
    x[2000:2700] = 101.0
    engine = lf.TimeParallel(inner, chunk=100)
    theirs = everything(cell, x, lf.Sequential(), lengths, state=x[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lf.EngineWarning)
        ours = everything(cell, x, engine, lengths, state=x[0])
    assert {k: e for k, e in errors(ours, theirs).items() if not e <= EXACT} == {}
    report = found(engine)
    start, end = report.in_sequence_from, report.backward_in_sequence_to
    if lengths is not None and max(lengths[1:]) <= 2000:
        return
    assert start is not None
    assert 2000 < start < 2600
    in_sequence = [steps for steps, rows, _ in inner.seen if rows == 3]
    assert in_sequence == [3000 - start, *([] if end is None else [end])]


@pytest.mark.parametrize("use", [lambda h: h[-1].sum(), lambda h: h[50].sum(), lambda h: h[:700].sin().sum()])
def test_gradients_that_last_are_finished_from_where_they_do(use: Callable[[Tensor], Tensor]) -> None:
    cell, x, engine = Fickle(), randn(3000, 2, 1), lf.TimeParallel(chunk=100)
    x[500:1100] = 101.0
    results = []
    for e in (lf.Sequential(), engine):
        own = x.clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", lf.EngineWarning)
            loss = use(lf.unfold(cell, own, engine=e).hidden)
            results.append(torch.autograd.grad(loss, [own, cell.a]))
    torch.testing.assert_close(results[1], results[0], rtol=EXACT, atol=EXACT)


def test_what_jumps_is_still_run_in_sequence() -> None:
    """Slopes say nothing about a chaotic network; nor may what is not a number spread from one sequence to another."""
    cell = lf.Elman(3, 5).double()
    with torch.no_grad():
        cell.W.mul_(12.0)
    engine, x = lf.TimeParallel(), 0.1 * randn(2500, 1, 3)
    with pytest.warns(lf.EngineWarning, match="does not forget soon enough"):
        hidden = lf.unfold(cell, x, engine=engine).hidden
    start = found(engine).in_sequence_from
    assert start is not None
    assert start < 1000
    again = lf.unfold(cell, x[:start], engine=lf.Sequential()).hidden
    torch.testing.assert_close(hidden[:100], again[:100], rtol=1e-9, atol=1e-9)
    summing, x = Sum(), randn(2500, 2, 3)
    x[1300, 0] = torch.inf  # whose sine is not a number
    with pytest.warns(lf.EngineWarning, match="does not forget soon enough"):
        hidden = lf.unfold(summing, x, torch.zeros(2, 3).double(), engine=engine).hidden
    truth = lf.unfold(summing, x, torch.zeros(2, 3).double(), engine=lf.Sequential()).hidden
    torch.testing.assert_close(hidden, truth, rtol=EXACT, atol=EXACT, equal_nan=True)


# ------------------------------------------------------------------ what Auto says of it


def test_on_a_gpu_explain_suggests_it_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Auto never takes it; on a CPU it is not even measured."""
    cell, x = lf.Elman(3, 5), torch.randn(20_000, 1, 3)
    asked: list[int] = []

    def expected(gain: float) -> Callable[..., Any]:
        def of(self: lf.TimeParallel, recurrence: lf.Recurrence) -> Any:
            asked.append(recurrence.steps)
            return ["  two states were one after 9 steps"], gain, recurrence

        return of

    monkeypatch.setattr(lf.TimeParallel, "expected", expected(12.3))
    assert "lf.TimeParallel" not in lf.Recurrent(cell).explain(x)
    assert asked == []
    monkeypatch.setattr(explaining, "waits_for_steps", lambda device: True)
    text = lf.Recurrent(cell).explain(x)
    assert "float32 on cpu: FusedCPU, because" in text
    assert text.endswith(
        "\n  engine=lf.TimeParallel() should be about 12 times as fast here: two states were one after 9 steps"
    )
    for given, engine in (
        (x[:9000], lf.Auto()),
        (torch.randn(20_000, 5, 3), lf.Auto()),
        (x, lf.FusedCPU()),
    ):
        assert "lf.TimeParallel" not in lf.Recurrent(cell, engine).explain(given)
    assert asked == [20_000]
    monkeypatch.setattr(lf.TimeParallel, "expected", expected(1.4))
    assert "lf.TimeParallel" not in lf.Recurrent(cell).explain(x)


def test_what_is_expected_is_measured() -> None:
    lines, gain, part = lf.TimeParallel().expected(checked(lf.Elman(3, 5), torch.randn(20_000, 1, 3), None, None, None))
    assert len(lines) == 3
    assert 0 < gain < 100
    assert part.steps == 128


# ------------------------------------------------------------------ any sizes, and kernels of a GPU


@pytest.mark.parametrize("seed", range(12))
def test_random_sizes_agree_with_the_definition(seed: int) -> None:
    """Chunks, lengths and stretches that are remembered at random: side by side, in part, or in sequence."""
    draw = random.Random(seed)
    batch, tau, chunk = draw.choice([1, 2, 3]), draw.randint(100, 900), draw.choice([None, 1, 7, 20, 33])
    cell = draw.choice([Sum, Fickle, Straight])()
    lengths = [draw.randint(1, tau) for _ in range(batch)] if seed % 2 else None
    n = 3 if isinstance(cell, Sum) else 1
    x, begin = randn(tau, batch, n) * (0.1 if isinstance(cell, Straight) else 1), draw.randint(0, tau)
    if isinstance(cell, Fickle):
        x[begin : begin + draw.randint(0, 400)] = 101.0
    engine = lf.TimeParallel(draw.choice([lf.Looped(), lf.FusedCPU()]), chunk=chunk)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lf.EngineWarning)
        start = randn(batch, n)
        ours, theirs = (everything(cell, x, e, lengths, state=start) for e in (engine, lf.Sequential()))
    assert {k: e for k, e in errors(ours, theirs).items() if not e <= EXACT} == {}


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_over_kernels_of_a_gpu() -> None:
    """As many chunks as are run at once, and a batch of one: emulated thread by thread."""
    cell, x = lf.Elman(3, 5), torch.randn(130, 1, 3)
    with torch.no_grad():
        cell.W.mul_(0.1)
    truth = everything(copy.deepcopy(cell).double(), x.double(), lf.Sequential())
    for engine in (lf.TimeParallel(Emulated(), chunk=60), lf.Checkpointed(Emulated(), every=60)):
        ours = everything(cell, x, engine)
        assert max(errors({k: v.double() for k, v in ours.items()}, truth).values()) <= SINGLE


class Fading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([0.97, 0.97]))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return h * self.a + x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("from_outside", [False, True])
@pytest.mark.filterwarnings("ignore::loopfold.EngineWarning")
def test_a_large_number_long_ago_hides_no_seam(from_outside: bool, dtype: torch.dtype) -> None:
    x, start = torch.randn(2000, 1, 2, dtype=dtype), torch.full((1, 2), 1e6, dtype=dtype)
    if from_outside:
        x[70], start = 1e8, torch.zeros(1, 2, dtype=dtype)
    step = Fading().to(dtype)
    found, expected = (
        lf.unfold(step, x, start, engine=engine).states[1500:].detach()
        for engine in (lf.TimeParallel(lf.Looped(), chunk=64), lf.Sequential())
    )
    assert float((found - expected).abs().max()) < 1000 * torch.finfo(dtype).eps * float(expected.abs().max())
