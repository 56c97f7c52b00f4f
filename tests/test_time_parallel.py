"""TimeParallel: chunks of time side by side give what the loop in sequence gives, or it is run in sequence."""

from collections.abc import Callable
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
    assert found(engine).chunks == 1 if chunk == 2000 else True
