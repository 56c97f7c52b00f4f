"""autograd.Functions of the user's own inside a step: the value as it is, the gradient as it is written."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_engines import ENGINES, assert_agrees
from test_in_place import Given
from torch import Tensor

import loopfold as lf

pytestmark = pytest.mark.usefixtures("one_thread")


class FastSigmoid(torch.autograd.Function):
    """Zenke and Ganguli (2018): a spike, with the slope 1 / (1 + k|v|)²."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, k: float) -> Tensor:
        ctx.save_for_backward(v)
        ctx.k = k
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor, None]:
        (v,) = ctx.saved_tensors
        return g[0] / (1 + ctx.k * v.abs()) ** 2, None


class Arctan(torch.autograd.Function):
    """With the context set up apart from the value."""

    @staticmethod
    def forward(v: Tensor) -> Tensor:
        return (v >= 0).to(v.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Tensor:
        (v,) = ctx.saved_tensors
        return 1 / (1 + (torch.pi * v / 2) ** 2) * g[0]


class Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        s = torch.sigmoid(4 * v)
        ctx.save_for_backward(s)
        return v.gt(0).to(v)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *g: Tensor) -> Tensor:
        (s,) = ctx.saved_tensors
        return 4 * g[0] * s * (1 - s)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        return (v * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Tensor:
        return g[0]


class Inside(torch.autograd.Function):
    """The gradient is cut outside [-1, 1], in place."""

    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        ctx.save_for_backward(v)
        return v.sign()

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Tensor:
        (v,) = ctx.saved_tensors
        gradient = g[0].clone()
        gradient[v.abs() > 1] = 0
        return gradient


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        return v.view_as(v)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Tensor:
        return -0.5 * g[0]


class Both(torch.autograd.Function):
    """A product whose gradients are those of a sum."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor, Tensor]:
        return g[0], 2 * g[0]


spike = FastSigmoid.apply  # held on to, as many do


def _lif(fire: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """A leaky neuron that is set back where it fires."""

    def step(f: Any, h: Tensor, x: Tensor) -> Tensor:
        v = 0.9 * h + h @ f.W + x
        return v - fire(v - 1)

    return step


STEPS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "fast sigmoid": _lif(lambda v: spike(v, 10.0)),
    "arctan": _lif(Arctan.apply),
    "sigmoid": _lif(Sigmoid.apply),
    "straight through": lambda f, h, x: Straight.apply(torch.tanh(h @ f.W + x)),
    "straight through, cut": lambda f, h, x: 0.5 * h + 0.2 * Inside.apply(h @ f.W + x),
    "reversed": lambda f, h, x: torch.tanh(Reversed.apply(h) @ f.W + x),
    "of x alone": lambda f, h, x: torch.tanh(h @ f.W + Straight.apply(Reversed.apply(x))),
    "of a parameter": lambda f, h, x: torch.tanh(h @ Inside.apply(f.W) * 0.3 + x),
    "of two": lambda f, h, x: torch.tanh(Both.apply(h @ f.W, x)),
    "updated without gradients": lambda f, h, x: _limited(torch.tanh(h @ f.W) + x),
}


def _limited(v: Tensor) -> Tensor:
    with torch.no_grad():
        v.clamp_(-0.5, 0.5)
    return v * v


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", STEPS)
def test_values_and_gradients_are_as_written(name: str, engine: lf.Engine) -> None:
    cell, x = Given(STEPS[name]).double(), torch.randn(6, 3, 5).double()
    for lengths in (None, [6, 2, 4]):
        assert_agrees(engine, cell, x, lengths)


def test_other_threads_use_their_functions_meanwhile() -> None:
    stop, wrong = threading.Event(), []
    owners = torch.autograd.Function, torch.autograd.function._SingleLevelFunction
    before = [vars(o).get("apply") for o in owners]

    def use() -> None:
        while not stop.is_set():
            v = torch.tensor([0.5], requires_grad=True)
            (g,) = torch.autograd.grad(spike(v, 2.0), v)
            wrong.extend([] if float(g) == 0.25 else [g])

    thread = threading.Thread(target=use)
    thread.start()
    try:
        for _ in range(5):
            lf.step_graph(Given(STEPS["fast sigmoid"]), torch.zeros(2, 5), torch.zeros(2, 5))
    finally:
        stop.set()
        thread.join()
    assert not wrong
    assert [vars(o).get("apply") for o in owners] == before


class Clipped(Straight):
    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Tensor:
        return g[0].clamp(-1, 1)


class Shifted(Straight):
    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Tensor:
        return g[0] + 1


class Spread(Straight):
    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Tensor:
        return g[0].mean(-1, keepdim=True).expand_as(g[0])


@pytest.mark.parametrize("function", [Clipped, Shifted, Spread])
def test_a_gradient_that_is_no_multiple_is_refused(function: Any) -> None:
    cell = Given(lambda f, h, x: function.apply(torch.tanh(h @ f.W + x)))
    with pytest.raises(ValueError, match=rf"autograd\.Function {function.__name__} is not a factor.*g \* factor"):
        lf.unfold(cell, torch.randn(6, 3, 5), engine=lf.FusedCPU())
