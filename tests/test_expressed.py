"""torch's operations that the compiler expresses by others: of ordinary numbers, and at the edges of what they take."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from test_engines import DTYPES, ENGINES, assert_agrees
from torch import Tensor, nn

import loopfold as lf
from loopfold.engines.writing import forwards
from loopfold.stepgraph.hoist import hoist
from loopfold.stepgraph.loop import ordered

pytestmark = pytest.mark.usefixtures("one_thread")
Of = Callable[[Tensor, Tensor], Tensor]

POINTWISE: dict[str, Of] = {
    "maximum": torch.maximum,
    "hardswish": lambda a, c: F.hardswish(3 * a) + c,
    "logit": lambda a, c: torch.logit(torch.sigmoid(a)) + torch.logit(torch.sigmoid(c), 0.2),
    "logaddexp": torch.logaddexp,
    "hypot": torch.hypot,
    "clamp": lambda a, c: a.clamp(-0.4, 0.3) + c.clamp(min=-0.2),
    "clamp between": lambda a, c: torch.clamp(c, a, 2 * a.abs()) + torch.clamp(a, max=c),
    "powers": lambda a, c: torch.pow(-2.0, a.round()) * c + a.abs() ** 1.5 + (c.abs() + 0.1) ** -1.5,
}


class Step(nn.Module):
    """An operation on what changes from step to step, kept to an ordinary size."""

    def __init__(self, f: Of, n: int = 5) -> None:
        super().__init__()
        self.f = f
        self.W, self.U = (nn.Parameter(torch.randn(n, n) / n**0.5) for _ in range(2))

    def initial_state(self, batch: int) -> Tensor:
        return torch.linspace(-1, 1, 5).repeat(batch, 1).to(self.W)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.f(h @ self.W + x, x @ self.U - 0.5 * h))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", POINTWISE)
def test_they_have_torchs_values_and_gradients(name: str, engine: lf.Engine) -> None:
    step, x = Step(POINTWISE[name]).double(), torch.randn(5, 3, 5).double()
    for lengths in (None, [5, 1, 3]):
        assert_agrees(engine, step, x, lengths)


# ------------------------------------------------------------------ at the edges


class Pair(nn.Module):
    """An operation on two states of which nothing else is done."""

    def __init__(self, f: Of) -> None:
        super().__init__()
        self.f = f

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.f(*state), state[1]


EDGES = [0, -0.0, 1, -1, 0.5, -0.3, 3, -3, 6, -6, 40, -40, 1e-20, -1e-20, 1e20, -1e20, math.inf, -math.inf, math.nan]
AT_EDGES: dict[str, Of] = {
    **{f.__name__: f for f in (torch.maximum, torch.minimum, torch.hypot, torch.logaddexp, torch.atan2)},
    **{f.__name__: f for f in (torch.pow, torch.div)},
    "logit": lambda a, c: torch.logit(a),
    "relu": lambda a, c: torch.relu(a),
    "hardswish": lambda a, c: F.hardswish(a),
    "logit of what is bounded": lambda a, c: torch.logit(a, 0.1),
    "clamp": lambda a, c: a.clamp(-1, 0.5),
    "clamp from below": lambda a, c: a.clamp(min=-1),
    "clamp by c": lambda a, c: torch.clamp(a, min=c),
    "clamp by c from above": lambda a, c: torch.clamp(a, max=c),
    "clamp between c and more": lambda a, c: torch.clamp(a, c, c + 1),
    "clamp of c, bounds in no order": lambda a, c: torch.clamp(c, a, a.abs() - 1),
    "powers of a negative number": lambda a, c: torch.pow(-2.0, a),
    "pow, of which much comes back": lambda a, c: 1e20 * torch.pow(a, c),
    "power 1.5": lambda a, c: a**1.5,
}
# Of NaN torch gives two of these other gradients in a vector than in what is left over; of the last, NaN is left out
NO_NAN = ("hardswish", "logit of what is bounded", "clamp of c, bounds in no order")


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", AT_EDGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_they_are_torchs_at_the_edges(dtype: torch.dtype, name: str, engine: lf.Engine) -> None:
    """Every number beside every other; no warning tells of a disagreement."""
    edges = torch.tensor(EDGES[:-1] if name in NO_NAN else EDGES, dtype=dtype)
    step, n = Pair(AT_EDGES[name]), len(edges)

    def found(engine: lf.Engine) -> list[Tensor]:
        torch.manual_seed(0)
        state = edges.repeat(n, 1).requires_grad_(), edges[:, None].repeat(1, n).requires_grad_()
        y = lf.unfold(step, state=state, steps=1, engine=engine).states[0]
        if not y.requires_grad:
            return [y, *(torch.zeros_like(part) for part in state)]
        gradients = torch.autograd.grad(y, state, torch.randn(y.shape).to(y), materialize_grads=True, allow_unused=True)
        return [y.detach(), *gradients]

    for ours, theirs in zip(found(engine), found(lf.Sequential()), strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-11 if dtype == torch.float64 else 2e-5, atol=1e-30, equal_nan=True
        )


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("f", [F.hardtanh, F.softshrink, F.elu, F.hardswish], ids=lambda f: f.__name__)
def test_no_number_is_no_reason_for_distrust(f: Callable[[Tensor], Tensor], engine: lf.Engine) -> None:
    """torch itself gives two gradients: one in whole vectors, the other in what is left over."""
    for n in (1, 64):
        state = torch.full((1, n), math.nan), torch.zeros(1, n, requires_grad=True)
        lf.unfold(Pair(lambda a, c: f(a + c)), state=state, steps=1, engine=engine).states[0].sum().backward()


def test_what_only_gradients_read_is_not_computed_forwards() -> None:
    loop = hoist(lf.step_graph(Pair(torch.logaddexp), None, (torch.randn(2, 5), torch.randn(2, 5))))
    assert "sigmoid" in {v.op for v in ordered(loop.emitted)}
    assert "sigmoid" not in {v.op for v in ordered(forwards(loop).out)}
