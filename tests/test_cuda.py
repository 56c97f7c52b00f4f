"""On a GPU: the same values as on the CPU. Skipped where there is none."""

from collections.abc import Callable

import pytest
import torch
import zoo
from torch import Tensor, nn

import loopfold as lf

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def gradients(cell: nn.Module, x: Tensor, lengths: list[int] | None, engine: lf.Engine) -> list[Tensor]:
    cell.zero_grad()
    run = lf.unfold(cell, x, lengths=lengths, engine=engine)
    (run.hidden.square().sum() + run.last_hidden.sum()).backward()
    return [run.hidden.detach().cpu(), *[p.grad.cpu().clone() for p in cell.parameters() if p.grad is not None]]


@pytest.mark.parametrize("make", zoo.WITH_INPUT, ids=lambda m: m.__name__)
@pytest.mark.parametrize("lengths", [None, [9, 1, 4]])
def test_a_gpu_gives_what_the_cpu_gives(make: Callable[[int, int], nn.Module], lengths: list[int] | None) -> None:
    torch.manual_seed(0)
    cell, x = make(4, 17).double(), torch.randn(9, 3, 4).double()
    expected = gradients(cell, x, lengths, lf.Sequential())
    for engine in (lf.Sequential(), lf.Looped(), lf.Auto()):
        found = gradients(cell.cuda(), x.cuda(), lengths, engine)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_what_stays_on_the_cpu_says_so() -> None:
    cell, x = lf.Elman(3, 5).cuda(), torch.randn(4, 2, 3)
    with pytest.raises(ValueError, match="x is on cpu and Elman's parameters on cuda:0"):
        lf.unfold(cell, x)
    with pytest.raises(ValueError, match="FusedCPU cannot run Elman: it runs on the CPU and the state is on cuda:0"):
        lf.unfold(cell, x.cuda(), engine=lf.FusedCPU())
    assert "Looped" in lf.Recurrent(cell).explain(x.cuda())
