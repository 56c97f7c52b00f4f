"""Random numbers of a step are those that `Sequential` draws, and torch's generator is left as that leaves it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_engines import ENGINES, errors, everything
from test_in_place import Given
from torch import Tensor, nn

import loopfold as lf
from loopfold.engines import compiled

pytestmark = pytest.mark.usefixtures("one_thread")


def _zoneout(f: Any, h: Tensor, x: Tensor) -> Tensor:
    return torch.where(torch.rand_like(h) < 0.3, h, f.gru(x, h))


def _noisy(f: Any, h: Tensor, x: Tensor) -> Tensor:
    torch.rand(len(h), 2)  # drawn, and not used
    with torch.no_grad():
        noise = 0.1 * torch.randn_like(h)
    return 0.9 * h + 0.1 * torch.tanh(h @ f.W + x) + noise


STEPS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "dropout": lambda f, h, x: F.dropout(torch.tanh(h @ f.W + x), 0.3),
    "dropout of x alone": lambda f, h, x: torch.tanh(h @ f.W + F.dropout(x, 0.5)),
    "dropout in place": lambda f, h, x: F.dropout(h @ f.W + x, 0.3, inplace=True) * 0.5,
    "alpha dropout": lambda f, h, x: F.alpha_dropout(torch.tanh(h @ f.W + x), 0.2, True),
    "zoneout": _zoneout,
    "noise": _noisy,
    "normal": lambda f, h, x: torch.tanh(h @ f.W + x + torch.normal(0.0, 0.1, h.shape, dtype=h.dtype)),
    "uniform": lambda f, h, x: torch.tanh(h @ f.W + x) * torch.empty_like(h).uniform_(0.5, 1),
    "bernoulli": lambda f, h, x: torch.tanh(h @ f.W + x) * torch.bernoulli(x.detach(), 0.4),
    "bernoulli of one number": lambda f, h, x: torch.tanh(h @ f.W + x) * torch.bernoulli(torch.full_like(h, 0.4)),
    "normal of one number": lambda f, h, x: torch.tanh(h @ f.W + x + torch.normal(torch.zeros_like(h), f.W[0].abs())),
    "by chance": lambda f, h, x: torch.tanh(h @ f.W + x) * (torch.rand_like(h) < torch.sigmoid(h)),
    "Gumbel": lambda f, h, x: F.gumbel_softmax(h @ f.W + x, dim=-1),
}


def seeded(cell: nn.Module, x: Tensor, engine: lf.Engine, lengths: list[int] | None) -> dict[str, Tensor]:
    torch.manual_seed(7)
    found = everything(cell, x, engine, lengths)
    return {**found, "the next number": torch.rand(3)}


@pytest.mark.parametrize("engine", [*ENGINES, lf.Auto()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", STEPS)
def test_the_same_numbers_as_the_definition(name: str, engine: lf.Engine) -> None:
    cell = Given(STEPS[name]).double()
    for tau, lengths in ((6, None), (6, [6, 2, 4]), (1, None), (40, None)):
        x = torch.randn(tau, 3, 5).double()
        truth = seeded(cell, x, lf.Sequential(), lengths)
        for _ in range(4):  # checked runs, and one that may not be
            found = errors(seeded(cell, x, engine, lengths), truth)
            assert {k: error for k, error in found.items() if not error <= 1e-10} == {}


def test_training_and_evaluation_are_two_programs() -> None:
    class Dropping(lf.Elman):
        def __init__(self) -> None:
            super().__init__(5, 5)
            self.drop = nn.Dropout(0.5)

        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            return self.drop(super().forward(h, x))

    cell, x = Dropping().double(), torch.randn(30, 2, 5).double()
    for training in (True, False, True, False):
        cell.train(training)
        runs = [seeded(cell, x, e, None) for e in (lf.Sequential(), lf.FusedCPU())]
        assert max(errors(runs[1], runs[0]).values()) <= 1e-10
        assert bool((runs[1]["states 0"] == 0).any()) == training


def test_a_trace_draws_nothing() -> None:
    cell = Given(_noisy)
    before = torch.get_rng_state()
    lf.step_graph(cell, torch.zeros(2, 5), torch.zeros(2, 5))
    assert torch.equal(before, torch.get_rng_state())


def test_a_run_that_is_given_up_draws_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, x = Given(_zoneout).double(), torch.randn(6, 3, 5).double()
    truth = seeded(cell, x, lf.Sequential(), None)
    monkeypatch.setattr(compiled, "disagreement", lambda *_: "it is wrong")
    with pytest.warns(lf.EngineWarning, match="was wrong about"):
        found = seeded(cell, x, lf.FusedCPU(), None)
    assert max(errors(found, truth).values()) == 0


def _seeded(f: Any, h: Tensor, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return h + x + torch.rand_like(h)


GENERATOR = torch.Generator()
REFUSED: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], str]] = {
    "by the state": (lambda f, h, x: torch.bernoulli(torch.sigmoid(h @ f.W + x)), r"torch\.rand_like\(p\) < p"),
    "around x": (lambda f, h, x: h + torch.normal(x, 1.0), r"mean \+ torch\.randn_like\(mean\)"),
    "shared weights": (
        lambda f, h, x: torch.tanh(h @ F.dropout(f.W, 0.2) + x),
        "all sequences share.*outside the step",
    ),
    "whole numbers": (lambda f, h, x: h + torch.randint(0, 3, h.shape) + x, r"whole numbers \(aten\.randint\)"),
    "a choice": (lambda f, h, x: h + torch.multinomial(x.softmax(-1), 1), r"whole numbers \(aten\.multinomial\)"),
    "an order": (lambda f, h, x: h + x * torch.randperm(5), r"whole numbers \(aten\.randperm\)"),
    "a generator": (lambda f, h, x: h + x + torch.rand(h.shape, generator=GENERATOR), "leave out generator="),
    "a seed": (_seeded, "random numbers of torch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_drawn_before_the_loop_is_refused(name: str) -> None:
    step, words = REFUSED[name]
    cell, x = Given(step), torch.randn(6, 3, 5)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=words):
        lf.unfold(cell, x, engine=lf.FusedCPU())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("n", [3, 16])
def test_one_kind_of_number_is_drawn_for_all_steps_at_once(n: int) -> None:
    class Shaken(lf.Elman):
        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            return super().forward(h, x) + torch.randn_like(h)

    cell, x, found = Shaken(2, n).double(), torch.randn(5, 3, 2).double(), []
    for engine in (lf.Sequential(), lf.Looped(), lf.FusedCPU()):
        torch.manual_seed(1)
        found.append(torch.cat([lf.unfold(cell, x, engine=engine).hidden.flatten(), torch.rand(1).double()]))
    torch.testing.assert_close(found[1:], [found[0]] * 2, rtol=1e-12, atol=1e-12)
