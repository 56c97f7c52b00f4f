"""Windows of training that are replayed: without a GPU, as in test_replay."""

import copy
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from test_replay import _Turns, emulated  # noqa: F401
from torch import Tensor, nn

import loopfold as lf
from loopfold.engines import auto, compiled, programs
from loopfold.language.recurrent import RecurrentLM, recurrent_lm
from loopfold.recurrent import recurrences_of
from loopfold.states import detached
from loopfold.training import replaying
from loopfold.training.options import Options
from loopfold.training.replaying import WindowLoss

OPTIONS = Options(sources=("text.txt",), clip=0.25)
STREAMS = 3


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "DEVICES", {"cpu"})
    modes = torch._C._len_torch_dispatch_stack  # the tape is one, and is CUDA's capture here
    monkeypatch.setattr(compiled, "captures", lambda like: modes() > 0)
    monkeypatch.setattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)


def model(*cells: nn.Module, **more: Any) -> RecurrentLM:
    """Of tensor operations alone, which the emulation can note."""
    torch.manual_seed(0)
    everything: dict[str, Any] = {"variational": True, "tied": True, "activation_penalty": 2.0, "change_penalty": 1.0}
    everything |= {"input_dropout": 0.2, "embedding_dropout": 0.1, "weight_drop": 0.5 * (not cells)} | more
    made = recurrent_lm(11, cells or [lf.LSTM(4, 6), lf.LSTM(6, 4)], 4, 0.3, **everything).double()
    for part in made.modules():
        if isinstance(part, lf.Recurrent):
            part.engine = lf.Looped()
    return made.train()


class Apart(nn.Module):
    """What is called in the place of a model is not replayed."""

    def __init__(self, made: RecurrentLM) -> None:
        super().__init__()
        self.made = made

    def forward(self, *args: Any) -> Any:
        return self.made(*args)


class Pair:
    """A model whose windows may be replayed, and its copy, whose never are."""

    def __init__(self, made: RecurrentLM) -> None:
        other = copy.deepcopy(made)
        self.losses = [WindowLoss(OPTIONS, made), WindowLoss(OPTIONS, other, Apart(other))]
        self.contexts = [made.initial_context(STREAMS)] * 2
        self.turn = 0

    @property
    def captured(self) -> int:
        return len(self.losses[0].replays.graphs)

    def step(self, tau: int, lengths: Tensor | None = None) -> None:
        """Losses, contexts and gradients are the same; then a step downhill."""
        tokens = torch.randint(11, (tau, STREAMS))
        self.turn += 1
        found: list[Any] = []
        for i, loss_of in enumerate(self.losses):
            torch.manual_seed(self.turn)
            loss = loss_of(tokens, self.contexts[i], lengths, 1 / tokens.numel())
            self.contexts[i] = detached(loss.context)
            loss_of.model.zero_grad()
            loss.total.backward()
            found.append((loss, torch.rand(()), {k: p.grad for k, p in loss_of.model.named_parameters()}))
            with torch.no_grad():
                for p in loss_of.model.parameters():
                    assert p.grad is not None
                    p.sub_(p.grad, alpha=0.3)
        torch.testing.assert_close(found[0], found[1])

    def steps(self, *lengths: int, times: int = 7) -> None:
        for _ in range(times):
            for tau in lengths:
                self.step(tau)


def cell_of(loss_of: WindowLoss) -> Any:
    return next(iter(recurrences_of(loss_of.model).values())).cell


def test_replayed_windows_are_those_of_the_model() -> None:
    """With dropout of every kind, over windows of several lengths and over those that are never replayed."""
    pair = Pair(model())
    pair.steps(9, 12, 9, 10, times=14)
    assert pair.captured == 3
    assert _Turns.captures == 6  # each there and back


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.dropout, "p", 0.7),
        lambda m: m.network.recurrent.layers[1].cell.parametrizations.W[0].__setattr__("p", 0.1),
        lambda m: setattr(m.penalty, "activation", 0.0),
        lambda m: setattr(m, "input_dropout", None),
    ],
)
def test_what_changes_in_the_model_changes_the_windows(change: Callable[[RecurrentLM], Any]) -> None:
    pair = Pair(model())
    pair.steps(9)
    assert pair.captured == 1
    for loss_of in pair.losses:
        change(cast(RecurrentLM, loss_of.model))
    pair.steps(9)


class Scaled(lf.Transition):
    """A buffer, which may be another tensor at any time, and a number."""

    scale: Tensor

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.U, self.W, self.leak = nn.Linear(n_in, n), nn.Linear(n, n), 0.5
        self.register_buffer("scale", torch.ones(n), persistent=False)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.leak * h + torch.tanh(self.scale * self.W(h) + self.U(x))


def test_buffers_and_numbers_of_a_cell_are_as_they_are_now() -> None:
    pair = Pair(model(Scaled(4, 4)))
    pair.steps(9)
    assert pair.captured == 1
    for k in range(5):
        for loss_of in pair.losses:
            cell_of(loss_of).cell.scale = torch.full((4,), 0.1 * k, dtype=torch.float64)
        pair.step(9)
    assert pair.captured == 1
    for k in range(5):
        for loss_of in pair.losses:
            cell_of(loss_of).cell.leak = 0.1 * k
        pair.step(9)
    assert pair.captured == 1


def test_windows_that_are_not_replayed() -> None:
    """Where sequences end, a module has a hook, or a cell draws numbers of its own."""
    pair = Pair(model())
    for _ in range(9):
        pair.step(9, torch.tensor([9, 8, 8]))
    calls: list[int] = []
    for loss_of in pair.losses:
        cast(RecurrentLM, loss_of.model).dropout.register_forward_hook(lambda *_: calls.append(1))
    pair.steps(9)
    assert not pair.captured
    assert len(calls) == 14

    class Noisy(Scaled):
        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            return super().forward(h + 0.1 * torch.randn_like(h), x)

    pair = Pair(model(Noisy(4, 4)))
    pair.steps(9)
    assert not pair.captured


def test_a_cell_that_is_not_compiled_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "_told", set())  # as if no test had been told before

    class Branches(Scaled):
        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            return super().forward(h if h.sum() > 0 else -h, x)

    made = model(Branches(4, 4))
    for part in made.modules():
        if isinstance(part, lf.Recurrent):
            part.engine = lf.Auto()
    pair = Pair(made)
    with pytest.warns(lf.EngineWarning, match="Python loop"):
        pair.step(9)
    pair.steps(9)
    assert not pair.captured


SWITCH = {"on": 1.0}


def test_a_window_is_not_replayed_once_its_trace_was_found_to_be_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of a window that is run as it stands finds it; from then on nothing captured before is replayed."""

    class Switched(Scaled):
        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            return super().forward(h, x) * globals()["SWI" + "TCH"]["on"]  # where no fingerprint looks

    pair = Pair(model(Switched(4, 4)))
    pair.steps(9)
    assert pair.captured == 1
    monkeypatch.setitem(SWITCH, "on", 0.5)
    pair.losses[0].calls = replaying.AS_IT_STANDS - 1
    for loss_of in pair.losses:
        (found,) = programs._shelves[cell_of(loss_of)].found.values()
        assert isinstance(found, programs.Found)
        found.program.watch.of("Looped").credit = 1.0  # as after many runs
    pair.steps(9)
    assert pair.captured == 2


class Listed(Scaled):
    """Parameters that stand in a list, too, and are read there."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__(n_in, n)
        self.a, self.b = nn.Parameter(torch.tensor(0.9)), nn.Parameter(torch.tensor(0.7))
        self.gains = [self.a, self.b]

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return super().forward(self.gains[0] * h, self.gains[1] * x)


class Ordered(Scaled):
    """A buffer of whole numbers, which a trace fixes."""

    order: Tensor

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__(n_in, n)
        self.register_buffer("order", torch.tensor([2, 0, 3, 1]))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return super().forward(h[:, self.order], x)


@pytest.mark.parametrize(("cell", "captured"), [(Listed, 0), (Ordered, 1)])
def test_a_cell_is_traced_with_its_own_tensors(cell: type[Scaled], captured: int) -> None:
    """While a window is captured, others stand in their places: a trace of these would be one of something else."""
    pair = Pair(model(cell(4, 4)))
    pair.steps(9)
    assert pair.captured == captured
    for loss_of in pair.losses:
        if cell is Ordered:
            cell_of(loss_of).cell.order = torch.tensor([1, 0, 2, 3])
    pair.steps(9)


def test_modules_that_are_replaced_are_seen() -> None:
    pair = Pair(model(Scaled(4, 4)))
    pair.steps(9)
    assert pair.captured == 1
    fresh = nn.Linear(4, 4).double()
    for loss_of in pair.losses:
        cell_of(loss_of).cell.W = copy.deepcopy(fresh)
    pair.steps(9)
    assert pair.captured == 2


def test_checks_have_their_share_of_the_time_of_replayed_windows() -> None:
    pair = Pair(model(Scaled(4, 4)))
    pair.steps(9)
    (found,) = programs._shelves[cell_of(pair.losses[0])].found.values()
    assert isinstance(found, programs.Found)
    watch = found.program.watch.of("Looped")
    pair.losses[0].calls, pair.losses[0].earned, runs = replaying.AS_IT_STANDS - 1, time.monotonic() - 1000, watch.runs
    watch.cost = 5.0
    pair.step(9)
    assert watch.runs == runs + 1
    assert watch.cost < 5  # there was time for a check
