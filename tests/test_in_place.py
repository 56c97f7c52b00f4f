"""Steps that update tensors which they made themselves are compiled; what they were given stays as it is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_engines import ENGINES, assert_agrees
from torch import Tensor, nn

import loopfold as lf

pytestmark = pytest.mark.usefixtures("one_thread")


class Given(lf.Transition):
    """A step given as a function of (the module, h, x)."""

    def __init__(self, step: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.W, self.step = nn.Parameter(torch.randn(5, 5) / 2), step
        self.rms, self.relu, self.gru = nn.RMSNorm(5), nn.ReLU(inplace=True), nn.GRUCell(5, 5)
        self.register_buffer("seen", torch.zeros(5))

    def initial_state(self, batch: int) -> Tensor:
        return self.W.new_zeros(batch, 5)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.step(self, h, x)


def _sum(f: Given, h: Tensor, x: Tensor) -> Tensor:
    a = h @ f.W
    a += x
    return a.tanh_()


def _parts(f: Given, h: Tensor, x: Tensor) -> Tensor:
    z = h @ f.W + x
    first, rest = z[:, :3], z[:, 3:]
    z[:, :3] = torch.tanh(first)
    rest.mul_(0.5)
    return z + 0.1 * torch.cat([first, rest], -1)


def _later(f: Given, h: Tensor, x: Tensor) -> Tensor:
    """A view that is read after what it shows has changed, twice."""
    z = h @ f.W + x
    part = z[:, 1:4][:, 1:]
    z *= 0.5
    part += 1
    z[:, 2:3] = 0.25
    return torch.tanh(z + torch.cat([part, part, part[:, :1]], -1))


def _masked(f: Given, h: Tensor, x: Tensor) -> Tensor:
    z = h @ f.W + x
    z[z > 0.5] = 0.1
    z.masked_fill_(x < 0, -0.2)
    return z.clamp_(-1, 1)


def _copied(f: Given, h: Tensor, x: Tensor) -> Tensor:
    z = h.clone()
    z.copy_(torch.tanh(h @ f.W + x))
    kept = torch.zeros_like(z)
    kept[:, 1:] = z[:, :-1]
    kept[:, :1].fill_(0.3)
    return kept.add_(z, alpha=0.5)


def _wide(f: Given, h: Tensor, x: Tensor) -> Tensor:
    z = torch.empty_like(h)
    z.copy_(h @ f.W).add_(x)
    z.view_as(h).sigmoid_()
    return z


STEPS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "a sum": _sum,
    "parts": _parts,
    "a view read later": _later,
    "by a mask": _masked,
    "copies": _copied,
    "an empty tensor": _wide,
    "ReLU(inplace=True)": lambda f, h, x: f.relu(h @ f.W + x) * 0.5,
    "RMSNorm": lambda f, h, x: f.rms(torch.tanh(h @ f.W) + x),
    "GRUCell": lambda f, h, x: f.gru(x, h),
    "one feature": lambda f, h, x: torch.tanh(_one_feature(h @ f.W + x)),
}


def _one_feature(z: Tensor) -> Tensor:
    z[:, 0] += 1
    z[:, 1] = z[:, 2]
    return z


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", STEPS)
def test_updates_of_its_own_tensors_agree(name: str, engine: lf.Engine) -> None:
    cell, x = Given(STEPS[name]).double(), torch.randn(6, 3, 5).double()
    for lengths in (None, [6, 2, 4]):
        assert_agrees(engine, cell, x, lengths)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("make", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_torchs_cells_inside_a_step_agree(make: Any, engine: lf.Engine) -> None:
    class Around(lf.Transition):
        def __init__(self) -> None:
            super().__init__()
            self.cell = make(4, 5)

        def initial_state(self, batch: int) -> Any:
            zeros = self.cell.weight_hh.new_zeros(batch, 5)
            return (zeros, zeros) if make is nn.LSTMCell else zeros

        def forward(self, h: Any, x: Tensor) -> Any:
            return self.cell(x, h)

    cell, x = Around().double(), torch.randn(6, 3, 4).double()
    assert_agrees(engine, cell, x, [6, 2, 4])
    ours = lf.from_torch(cell.cell)
    theirs = lf.unfold(cell, x, engine=lf.Sequential()).hidden
    torch.testing.assert_close(lf.unfold(ours, x, engine=engine).hidden, theirs)


REFUSED: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], str]] = {
    "the state": (lambda f, h, x: h.add_(x), r"updates h, which it was given.*aten\.add_.*h\.clone\(\)"),
    "a part of the state": (lambda f, h, x: h[:, :2].zero_() @ f.W[:2] + x, "updates h, which it was given"),
    "x": (lambda f, h, x: h + x.mul_(2), "updates x, which it was given"),
    "a parameter": (lambda f, h, x: h @ f.W.mul_(2) + x, "updates W, a tensor of the module.*part of the state"),
    "a buffer": (lambda f, h, x: h + f.seen.add_(1) + x, "updates seen, a tensor of the module"),
    "by an index": (
        lambda f, h, x: (h @ f.W).index_put_((torch.zeros_like(h).long(),), x.sum()) + x,
        "places that a tensor says",
    ),
    "in every second place": (lambda f, h, x: _every_second(h @ f.W + x), "every so many features"),
}


def _every_second(z: Tensor) -> Tensor:
    z[:, ::2] = 0
    return z


@pytest.mark.parametrize("name", REFUSED)
def test_other_updates_are_refused_and_leave_everything_as_it_was(name: str) -> None:
    step, words = REFUSED[name]
    cell, x, h = Given(step), torch.randn(6, 3, 5), torch.randn(3, 5)
    before = [t.clone() for t in (*cell.parameters(), *cell.buffers(), x, h)]
    with pytest.raises(ValueError, match=words):
        lf.unfold(cell, x, state=h, engine=lf.FusedCPU())
    assert all(map(torch.equal, before, (*cell.parameters(), *cell.buffers(), x, h)))


def test_an_update_that_torch_cannot_differentiate_raises_here_too() -> None:
    """tanh needs its result for the way back, and the step changes that."""
    cell, x = Given(lambda f, h, x: torch.tanh(h @ f.W + x).mul_(0.5)), torch.randn(6, 3, 5)
    for engine in (lf.Sequential(), lf.FusedCPU()):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            lf.unfold(cell, x, engine=engine).hidden.sum().backward()
