"""On a GPU: layers under torch.compile inside CUDA graphs, one's own and those of mode="reduce-overhead".

Skipped where there is no GPU.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loopfold as lf
from loopfold.engines import replay, selfcheck

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),  # Inductor; single precision is meant
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),  # so Inductor begins its own
]
ENGINES = (lf.FusedGPU(), lf.Looped(), lf.Auto())


class Net(nn.Module):
    def __init__(self, engine: lf.Engine) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.layer = lf.Stacked([lf.LSTM(8, 64), lf.GRU(64, 32)], engine=engine)
        self.after = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layer(self.before(x).tanh()).hidden).square().mean()


def gradients(model: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    model.zero_grad()
    given = x.clone().requires_grad_()
    value = call(given)
    value.backward()
    assert given.grad is not None
    return [value.detach().clone(), given.grad, *[p.grad.clone() for p in model.parameters() if p.grad is not None]]


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: type(engine).__name__)
def test_a_graph_of_cuda_captures_a_compiled_layer_with_its_way_back(engine: lf.Engine) -> None:
    torch.manual_seed(0)
    model: Any = Net(engine).cuda()
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(20, 16, 8, device="cuda", requires_grad=True)
    found: list[Tensor] = []

    def step() -> None:
        model.zero_grad()
        x.grad = None
        value = compiled(x)
        value.backward()
        found[:] = [value.detach(), *(t.grad for t in (x, *model.parameters()) if t.grad is not None)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(max(selfcheck.FIRST, replay.OFTEN) + 2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.copy_(torch.randn(20, 16, 8))
            model.layer.layers[0].cell.W.mul_(0.9)
        graph.replay()
        torch.cuda.synchronize()
        replayed = [t.clone() for t in found]
        expected = gradients(model, x.detach(), model)
        torch.testing.assert_close(replayed, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: type(engine).__name__)
def test_reduce_overhead(engine: lf.Engine) -> None:
    torch.manual_seed(0)
    model = Net(engine).cuda()
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for seed in range(9):
        torch.manual_seed(seed)
        x = torch.randn(20, 16, 8, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        found = [t.clone() for t in gradients(model, x, compiled)]
        torch.testing.assert_close(found, gradients(model, x, model), rtol=1e-4, atol=1e-5)
