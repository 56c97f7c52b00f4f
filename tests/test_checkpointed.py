"""Checkpointed changes memory and time, never the value; and it holds no more than it says."""

import copy
import itertools
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers import FastAndSlow, LearnedStart
from test_engines import assert_agrees, everything
from torch import Tensor, nn

import loopfold as lf
from loopfold.engines.budget import Costs, fitted_spacings, size_in_bytes
from loopfold.states import all_leaves, leaves
from loopfold.unfolding import checked

pytestmark = pytest.mark.usefixtures("one_thread")
INNER = [lf.Sequential(), lf.Looped(), lf.FusedCPU(), lf.Auto()]
SIZES = [(1, 1, 3, False), (63, 1, 17, False), (23, 5, 3, True)]  # τ, batch, n, unequal lengths


def small_budget(cell: nn.Module, x: Tensor) -> int:
    """One in which no piece of many steps fits."""
    costs = Costs.of(checked(cell, x, None, None, None), compiled=False)
    return costs.least(len(x)) + costs.step


@pytest.mark.parametrize("inner", INNER, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("make", [lf.Elman, lf.LSTM, lf.GRU, FastAndSlow, LearnedStart], ids=lambda m: m.__name__)
def test_it_agrees_with_the_definition(inner: lf.Engine, make: Callable[[int, int], nn.Module]) -> None:
    for tau, batch, n, unequal in SIZES:
        cell, x = make(4, n).double(), torch.randn(tau, batch, 4).double()
        lengths = [1 + (7 * i) % tau for i in range(batch)] if unequal else None
        for every in (None, 1, 7, 1000):
            assert_agrees(lf.Checkpointed(inner, every=every), cell, x, lengths)
        engine = lf.Checkpointed(inner, memory=small_budget(cell, x))
        assert_agrees(engine, cell, x, lengths)


@pytest.mark.parametrize("inner", INNER, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("spacings", [(8, 4, 2, 1), (60, 12, 3), (400, 20)], ids=str)
def test_several_levels_agree(inner: lf.Engine, spacings: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lf.Checkpointed, "spacings", lambda self, recurrence: spacings)
    cell, x = lf.LSTM(3, 5).double(), torch.randn(71, 2, 3).double()
    for lengths in (None, [71, 40]):
        assert_agrees(lf.Checkpointed(inner), cell, x, lengths)


@pytest.mark.parametrize("lengths", [None, [400, 170]], ids=str)
def test_with_chunks_of_time_inside_it_or_around_it(lengths: list[int] | None) -> None:
    cell, x = lf.Elman(3, 5).double(), torch.randn(400, 2, 3).double()
    with torch.no_grad():
        cell.W.mul_(0.2)
    around = lf.TimeParallel(lf.Checkpointed(every=30), chunk=100)
    inside = lf.TimeParallel(chunk=64)
    for engine in (around, lf.Checkpointed(inside, every=200)):
        assert_agrees(engine, cell, x, lengths)
    for report in (around.report, inside.report):
        assert report is not None
        assert (report.agreed, report.backward_agreed) == (True, True)


def test_float32_agrees_too() -> None:
    for engine in (lf.Checkpointed(every=10), lf.Checkpointed(lf.Looped(), every=10)):
        assert_agrees(engine, lf.GRU(4, 17), torch.randn(63, 3, 4), [63, 12, 1])


class Output(NamedTuple):
    read: Tensor
    sign: Tensor


class Full(lf.Transition):
    """All that a step may have: several tensors, a context, t, an output of numbers and of whole numbers."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.W, self.V = nn.Parameter(torch.randn(n, n) / n**0.5), nn.Parameter(torch.randn(n, 2))
        self.unused, self.frozen = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(n), requires_grad=False)

    def forward(self, state: Any, x: Any, context: Tensor, t: Tensor) -> Any:
        h, s = state
        a, b = x
        h = torch.tanh(h @ self.W + a + context * torch.sin(t) + self.frozen)
        return Output(h @ self.V, (h[:, :1] > 0).long()), (h, 0.9 * s + b * h)


def _full(engine: lf.Engine, lengths: list[int] | None, use: Callable[[Any], Tensor]) -> dict[str, Any]:
    torch.manual_seed(0)
    cell, n = Full(4).double(), 4
    a, b = torch.randn(19, 3, n).double(), torch.randn(19, 3, n).double().requires_grad_()  # a has no gradient
    state = tuple(torch.randn(3, n).double().requires_grad_() for _ in range(2))
    context = torch.randn(3, n).double().requires_grad_()
    run = lf.unfold(cell, (a, b), state, lengths, engine, context)
    use(run).backward()
    found: dict[str, Any] = {"W": cell.W, "V": cell.V, "unused": cell.unused, "b": b, "h": state[0], "s": state[1]}
    grads = {name: t.grad for name, t in (found | {"context": context, "frozen": cell.frozen, "a": a}).items()}
    values = {f"value {i}": leaf.detach() for i, leaf in enumerate(all_leaves(run.states, run.last, run.outputs))}
    asked = {f"asked {i}": leaf.requires_grad for i, leaf in enumerate(all_leaves(run.states, run.outputs))}
    return grads | values | asked


USES: dict[str, Callable[[Any], Tensor]] = {
    "all": lambda run: run.outputs.read.sin().sum() + run.states[1].cos().sum() + run.last[0].sum(),
    "only an output": lambda run: run.outputs.read[3:5].square().sum(),
    "only the first states": lambda run: run.states[0][:2].sum(),
    "only the last state": lambda run: run.last[1].sum(),
}


@pytest.mark.parametrize("inner", INNER, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("use", USES)
def test_a_step_with_everything_and_losses_on_parts(inner: lf.Engine, use: str) -> None:
    for lengths in (None, [19, 1, 8]):
        needed = _full(lf.Sequential(), lengths, USES[use])
        for every in (4, 19):
            came = _full(lf.Checkpointed(inner, every=every), lengths, USES[use])
            assert {k for k, v in came.items() if v is None} == {k for k, v in needed.items() if v is None}
            torch.testing.assert_close(came, needed, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("inner", INNER, ids=lambda e: type(e).__name__)
def test_only_the_last_step(inner: lf.Engine) -> None:
    """With `only_last` all is as in a full run, at the last step of each sequence."""
    for lengths in (None, [19, 1, 8]):
        full = _full(lf.Sequential(), lengths, lambda run: run.last[0].sum() + run.last_hidden.cos().sum())
        for every in (1, 4, 30):
            torch.manual_seed(0)
            cell = Full(4).double()
            x = (torch.randn(19, 3, 4).double(), torch.randn(19, 3, 4).double().requires_grad_())
            state = tuple(torch.randn(3, 4).double().requires_grad_() for _ in range(2))
            context = torch.randn(3, 4).double().requires_grad_()
            engine = lf.Checkpointed(inner, every=every)
            run = lf.unfold(cell, x, state, lengths, engine, context, only_last=True)
            (run.last[0].sum() + run.last_hidden.cos().sum()).backward()
            assert [len(leaf) for leaf in all_leaves(run.states, run.outputs, run.hidden)] == [1] * 5
            came = {"W": cell.W, "V": cell.V, "b": x[1], "h": state[0], "s": state[1], "context": context}
            grads = {name: t.grad for name, t in came.items()}
            torch.testing.assert_close(grads, {name: full[name] for name in came}, rtol=1e-11, atol=1e-11)
            torch.testing.assert_close(run.last[1].detach(), full["value 3"], rtol=1e-11, atol=1e-11)
            assert torch.equal(run.hidden[0], run.last_hidden)


@pytest.mark.parametrize("lengths", [None, [9, 4]], ids=str)
def test_of_a_stack_too_there_is_only_the_last_step(lengths: list[int] | None) -> None:
    stack = lf.Stacked([lf.LSTM(3, 4), lf.Stacked([lf.GRU(4, 5), lf.GRU(5, 6)])])
    x = torch.randn(9, 2, 3)
    ends, full = stack(x, lengths=lengths, only_last=True), stack(x, lengths=lengths)
    assert [len(leaf) for leaf in all_leaves(ends.states, ends.hidden)] == [1] * 5
    torch.testing.assert_close([leaf[0] for leaf in leaves(ends.states)], leaves(full.last))
    torch.testing.assert_close(ends.last, full.last)


def test_patterns_that_read_the_end_ask_for_no_more() -> None:
    x, seen = torch.randn(50, 2, 3), []

    class Spy(lf.Engine):
        def refusal(self, recurrence: lf.Recurrence) -> None:
            return None

        def run(self, recurrence: lf.Recurrence) -> Any:
            seen.append("all")
            return lf.Sequential().run(recurrence)

        def last(self, recurrence: lf.Recurrence) -> Any:
            seen.append("last")
            return lf.Sequential().last(recurrence)

    model = lf.SequenceToOne(lf.Stacked([lf.GRU(3, 4), lf.GRU(4, 5)]), outputs=2, engine=Spy())
    for lengths in (None, [50, 7]):
        torch.testing.assert_close(model(x, lengths=lengths), model.predict(x, lengths=lengths).o)
    assert seen == ["all", "last", "all", "all"] * 2
    seen.clear()
    both = lf.SequenceToOne(lf.Bidirectional(lf.GRU(3, 4), lf.GRU(3, 4)), outputs=2, engine=Spy())
    both(x)
    lf.EncoderDecoder(lf.GRU(3, 5), lf.GRU(5 + 4, 6), outputs=4, engine=Spy())(x, torch.zeros(3, 2, dtype=torch.long))
    assert seen == ["all", "all", "last", "all"]

    class Own(lf.SequenceToOne):
        def predict(self, *args: Any, **options: Any) -> lf.Prediction:
            done = super().predict(*args, **options)
            return lf.Prediction(2 * done.o, done.run)

    own = Own(lf.GRU(3, 5), outputs=2)
    assert torch.equal(own(x), own.predict(x).o)


# ------------------------------------------------------------------ what is drawn, and what changes


class Noisy(lf.Elman):
    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(h, 0.5), x) + 0.1 * torch.randn_like(h)


@pytest.mark.parametrize("inner", INNER, ids=lambda e: type(e).__name__)
def test_random_numbers_are_drawn_once_and_are_those_of_sequential(inner: lf.Engine) -> None:
    cell, x = Noisy(3, 5).double(), torch.randn(40, 2, 3).double()
    several = lf.Checkpointed(lf.Sequential(), memory=small_budget(cell, x))
    for engine in (lf.Checkpointed(inner, every=7), several):
        after = []
        for e in (lf.Sequential(), engine):
            torch.manual_seed(3)
            hidden = lf.unfold(cell, x, engine=e).hidden
            before = torch.get_rng_state()
            hidden.sum().backward()
            assert torch.equal(torch.get_rng_state(), before)  # the way back takes none
            after.append(before)
        assert torch.equal(*after)
        assert_agrees(engine, cell, x)


def _changing(change: Callable[[Any], None], cell: Any, inner: lf.Engine = lf.Sequential()) -> None:
    run = lf.unfold(cell, torch.randn(20, 2, 3), engine=lf.Checkpointed(inner, every=6))
    change(cell)
    run.hidden.sum().backward()


class Scaled(lf.Elman):
    scale = 1.0
    calls = 0

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.scale * super().forward(h, x)


class Counting(Scaled):
    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(h, x) / self.calls


def test_a_step_that_has_changed_has_no_way_back() -> None:
    def scale(cell: Any) -> None:
        cell.scale = 2.0

    def replace_weights(cell: Any) -> None:
        cell.W = nn.Parameter(cell.W.detach().clone())

    def update(cell: Any) -> None:
        with torch.no_grad():
            cell.W += 1

    with pytest.raises(RuntimeError, match=r"Scaled is not what it was .* engine=lf\.Sequential\(\)"):
        _changing(scale, Scaled(3, 4))
    for inner in (lf.Sequential(), lf.FusedCPU()):
        with pytest.raises(RuntimeError, match="reads another tensor"):
            _changing(replace_weights, Scaled(3, 4), inner)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            _changing(update, Scaled(3, 4), inner)
    with pytest.raises(RuntimeError, match="Counting is not what it was"):
        _changing(lambda cell: None, Counting(3, 4))
    numbers, x = iter(range(1000)), torch.randn(20, 2, 3).requires_grad_()
    run = lf.unfold(lambda h, x: torch.tanh(h + x) + next(numbers) * 1e-3, x, engine=lf.Checkpointed(every=6))
    with pytest.raises(RuntimeError, match="was another when it was run again"):
        run.hidden.sum().backward()


def test_a_mask_of_another_run_is_noticed() -> None:
    cell = lf.LSTM(3, 5)
    layer = lf.Recurrent(cell, lf.Checkpointed(every=6))
    nn.utils.parametrize.register_parametrization(cell, "W", lf.WeightDrop(0.5))
    x = torch.randn(20, 2, 3)
    layer(x).hidden.sum().backward()
    first = layer(x)
    layer(x)
    with pytest.raises(RuntimeError, match="reads another tensor"):
        first.hidden.sum().backward()


class Read(lf.Transition):
    """What an output alone reads: weights, a buffer, a frozen parameter, a tensor that is neither; and a number."""

    scale: Tensor
    seen: Tensor
    latest: Tensor

    def __init__(self, n_in: int = 3, n: int = 4) -> None:
        super().__init__()
        self.W, self.U = nn.Parameter(torch.randn(n, n) / n), nn.Parameter(torch.randn(n_in, n))
        self.V, self.frozen = nn.Parameter(torch.randn(n, 2)), nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("seen", torch.zeros(()))  # these are changed, but not read
        self.register_buffer("latest", torch.zeros(()))
        self.plain, self.number = [torch.ones(2)], lambda: 1.0

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ self.W + x @ self.U)
        self.seen += 1
        self.latest = h.detach().sum().to(self.latest)
        return h @ self.V * self.scale * self.frozen * self.plain[0] * self.number(), h


def test_what_only_an_output_reads_may_not_change_either() -> None:
    def scale(cell: Read) -> None:
        cell.scale = cell.scale * 2

    def in_place(cell: Read) -> None:
        cell.scale.mul_(2)

    def frozen(cell: Read) -> None:
        cell.frozen.add_(1)

    def plain(cell: Read) -> None:
        cell.plain[0].mul_(-1)

    def data(cell: Read) -> None:
        cell.frozen.data = cell.frozen.data.flip(0) * torch.tensor([1.0, 1.001])

    def nothing(cell: Read) -> None:
        pass

    x = torch.randn(20, 2, 3)
    changes = {scale: "another tensor", in_place: "in place", frozen: "in place", plain: "outputs", data: "outputs"}
    for change, reason in ({nothing: ""} | changes).items():
        for only_last in (False, True):
            cell = Read()
            run: Any = lf.unfold(cell, x, engine=lf.Checkpointed(lf.Sequential(), every=7), only_last=only_last)
            change(cell)
            if change is nothing:
                run.outputs.sum().backward(retain_graph=True)
                run.outputs.sum().backward()  # when steps have changed `seen` themselves
                continue
            with pytest.raises(RuntimeError, match=rf"Read is not what it was .*{reason}.* engine=lf\.Sequential\(\)"):
                run.outputs.sum().backward()
    cell = Read()
    cell.number = lambda: random.random()
    run = lf.unfold(cell, x, engine=lf.Checkpointed(lf.Sequential(), every=7))
    with pytest.raises(RuntimeError, match="its outputs after step 14 were others"):
        run.outputs.sum().backward()


def test_a_mask_of_another_run_is_noticed_in_an_output() -> None:
    cell = Read()
    layer = lf.Recurrent(cell, lf.Checkpointed(lf.Sequential(), every=6))
    nn.utils.parametrize.register_parametrization(cell, "V", lf.WeightDrop(0.5))
    first: Any = layer(torch.randn(20, 2, 3))
    layer(torch.randn(20, 2, 3))
    with pytest.raises(RuntimeError, match="reads another tensor"):
        first.outputs.sum().backward()


def test_outputs_that_are_not_finite_are_the_same_again() -> None:
    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h + x)
        return torch.cat([h.log(), h * factor], 1), h  # NaN where h < 0

    for change in (False, True):
        factor, x = torch.ones(3), torch.randn(20, 2, 3).requires_grad_()
        run: Any = lf.unfold(step, x, torch.zeros(2, 3), engine=lf.Checkpointed(lf.Sequential(), every=6))
        if not change:
            run.outputs.sum().backward()
            continue
        factor.mul_(2)
        with pytest.raises(RuntimeError, match="were others when they were run again"):
            run.outputs.sum().backward()


# ------------------------------------------------------------------ autograd around it


def test_hooks_see_whole_gradients_once() -> None:
    cell, x = lf.Elman(3, 5).double(), torch.randn(20, 2, 3).double()
    lf.unfold(cell, x, engine=lf.Sequential()).hidden.sum().backward()
    assert cell.W.grad is not None
    needed, seen = 2 * cell.W.grad.clamp(-1, 1), []
    cell.zero_grad()

    def hook(g: Tensor) -> Tensor:
        seen.append(g)
        return 2 * g.clamp(-1, 1)

    cell.W.register_hook(hook)
    lf.unfold(cell, x, engine=lf.Checkpointed(every=6)).hidden.sum().backward()
    torch.testing.assert_close(cell.W.grad, needed)
    assert len(seen) == 1


@pytest.mark.parametrize("engine", [lf.Checkpointed(every=6), lf.TimeParallel(lf.Looped(), chunk=30)], ids=str)
def test_hooks_see_whole_gradients_in_several_threads(engine: lf.Engine) -> None:
    cell, x = lf.Elman(3, 5).double(), torch.randn(90, 2, 3).double()
    with torch.no_grad():
        cell.W.mul_(0.2)
    (needed,) = torch.autograd.grad(lf.unfold(cell, x, engine=lf.Sequential()).hidden.sum(), cell.W)
    seen: list[Tensor] = []
    cell.W.register_hook(seen.append)

    def work() -> None:
        for _ in range(8):
            torch.autograd.grad(lf.unfold(cell, x, engine=engine).hidden.sum(), cell.W)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 32
    torch.testing.assert_close(seen, [needed] * 32)


def test_functions_that_close_over_tensors() -> None:
    W, x = torch.randn(3, 3).double().requires_grad_(), torch.randn(20, 2, 3).double()
    found = []
    for engine in (lf.Sequential(), lf.Checkpointed(every=6)):
        run = lf.unfold(lambda h, x: torch.tanh(h @ W + x), x, torch.zeros(2, 3).double(), engine=engine)
        found.append(torch.autograd.grad(run.hidden.cos().sum(), W)[0])
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-11)
    M = W.exp()
    with pytest.raises(ValueError, match="computed outside of it"):
        lf.unfold(lambda h, x: torch.tanh(h @ M + x), x, torch.zeros(2, 3).double(), engine=lf.Checkpointed())

    refused: list[ValueError] = []

    def elsewhere() -> None:  # where nodes are counted anew
        try:
            lf.unfold(lambda h, x: torch.tanh(h @ M + x), x, torch.zeros(2, 3).double(), engine=lf.Checkpointed())
        except ValueError as error:
            refused.append(error)

    for _ in range(1000):
        M = M + 1
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "computed outside of it" in str(refused)


class Named(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.variable = "which is a name as any other"
        return 2 * h

    @staticmethod
    def backward(ctx: Any, *gs: Any) -> Any:
        return 2 * gs[0]


def test_a_function_of_ones_own_may_name_things_as_it_likes() -> None:
    x, found = torch.randn(20, 2, 3).double().requires_grad_(), []
    for engine in (lf.Sequential(), lf.Checkpointed(lf.Sequential(), every=6)):
        hidden = lf.unfold(lambda h, x: torch.tanh(Named.apply(h) + x), x, torch.zeros(2, 3).double(), engine=engine)
        found.append(torch.autograd.grad(hidden.hidden.sum(), x))
    torch.testing.assert_close(*found)


def test_what_kinds_of_gradients_there_are() -> None:
    cell, x = lf.Elman(3, 5).double(), torch.randn(20, 2, 3).double().requires_grad_()
    engine = lf.Checkpointed(every=6)
    hidden = lf.unfold(cell, x, engine=engine).hidden
    hidden.sum().backward(retain_graph=True)
    once = copy.deepcopy(cell.W.grad)
    hidden.sum().backward()  # the same again
    assert once is not None
    torch.testing.assert_close(cell.W.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        hidden.sum().backward()
    (g,) = torch.autograd.grad(lf.unfold(cell, x, engine=engine).hidden.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"Checkpointed has first derivatives only.*engine=lf\.Sequential\(\)"):
        g.square().sum().backward()
    with pytest.raises(ValueError, match=r"torch\.func"):
        torch.func.grad(lambda x: lf.unfold(cell, x, engine=engine).hidden.sum())(x)

    def jacobian(e: lf.Engine) -> Any:
        return torch.autograd.functional.jacobian(lambda x: lf.unfold(cell, x, engine=e).last, x, vectorize=True)

    torch.testing.assert_close(jacobian(engine), jacobian(lf.Sequential()))


def test_autocast_is_as_it_was_forwards() -> None:
    for cell in (lf.LSTM(3, 8), lf.GRU(3, 8)):
        x, found = torch.randn(30, 2, 3), []
        for inner in (lf.FusedCPU(), lf.Looped(), lf.Sequential()):
            for engine in (inner, lf.Checkpointed(inner, every=7)):
                cell.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    hidden = lf.unfold(cell, x, engine=engine).hidden
                hidden.float().sum().backward()  # outside of it
                found.append(
                    [hidden.detach().float(), *[p.grad.clone() for p in cell.parameters() if p.grad is not None]]
                )
        for plain, ours in zip(found[::2], found[1::2], strict=True):
            assert ours[0].dtype == plain[0].dtype
            for a, b in zip(ours, plain, strict=True):
                torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * float(b.abs().max()))


def test_autocast_leaves_the_checksums_of_outputs_alone() -> None:
    cell, x = Read(), torch.randn(20, 2, 3)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            run: Any = lf.unfold(cell, x, engine=lf.Checkpointed(lf.Sequential(), every=6))
        run.outputs.float().sum().backward()  # outside of it
        cell.double()
        run = lf.unfold(cell, x.double(), engine=lf.Checkpointed(lf.Sequential(), every=6))
        with torch.autocast("cpu", dtype):
            run.outputs.sum().backward()
        cell.float()


def test_half_precision_sums_are_wide() -> None:
    cell, x = lf.Elman(3, 5, dtype=torch.bfloat16), torch.randn(64, 2, 3, dtype=torch.bfloat16)
    lf.unfold(cell, x, engine=lf.Checkpointed(lf.Looped(), every=1)).hidden.sum().backward()
    many = [p.grad.float() for p in cell.parameters() if p.grad is not None]
    cell.zero_grad()
    lf.unfold(cell, x, engine=lf.Looped()).hidden.sum().backward()
    for a, p in zip(many, cell.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(a, p.grad.float(), rtol=0.02, atol=0.02 * float(p.grad.abs().max()))

    class Bias(lf.Transition):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))

        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            return x + self.b

    count, start = Bias(), torch.zeros(1, 1, dtype=torch.bfloat16)
    lf.unfold(count, torch.zeros(600, 1, 1).bfloat16(), start, engine=lf.Checkpointed(every=1)).hidden.sum().backward()
    assert count.b.grad == 600  # a sum in bfloat16 stops at 256, where one more is lost


def test_without_gradients_nothing_is_kept() -> None:
    cell, x = lf.LSTM(3, 5), torch.randn(50, 2, 3)
    expected = lf.unfold(cell, x, engine=lf.Sequential()).hidden
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            hidden = lf.unfold(cell, x, engine=lf.Checkpointed(every=7)).hidden
        assert not hidden.requires_grad
        torch.testing.assert_close(hidden, expected)
    hidden = lf.unfold(cell.requires_grad_(False), x, engine=lf.Checkpointed(every=7)).hidden
    assert hidden.grad_fn is None
    cell.b.requires_grad_()  # all others are frozen
    needed = torch.autograd.grad(lf.unfold(cell, x, engine=lf.Sequential()).hidden.sum(), cell.b)
    came = torch.autograd.grad(lf.unfold(cell, x, engine=lf.Checkpointed(every=7)).hidden.sum(), cell.b)
    torch.testing.assert_close(came, needed)


@pytest.mark.parametrize("inner", INNER, ids=lambda e: type(e).__name__)
def test_what_is_no_number_stays_where_it_is(inner: lf.Engine) -> None:
    """NaN of one sequence, from some step on; and a step that overflows after the end of a short sequence."""
    cell, x = lf.Elman(3, 4, activation=torch.relu).double(), torch.randn(20, 3, 3).double()
    with torch.no_grad():
        cell.W.mul_(40)
    x[9, 1] = torch.inf
    found = []
    for engine in (lf.Sequential(), lf.Checkpointed(inner, every=6)):
        cell.zero_grad()
        run = lf.unfold(cell, x, lengths=[20, 20, 3], engine=engine)
        run.states[:4].sum().backward()
        found.append([run.hidden.detach(), *[p.grad.clone() for p in cell.parameters() if p.grad is not None]])
    torch.testing.assert_close(found[1], found[0], rtol=1e-11, atol=1e-11, equal_nan=True)


# ------------------------------------------------------------------ memory


def peak(run: Callable[[], Any]) -> int:
    """The most bytes of torch's own allocator at a time, while it runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = profile.profiler.kineto_results.events()
    now = most = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize(("make", "tau", "share"), [(lf.Elman, 100_000, 0.055), (lf.LSTM, 10_000, 0.12)])
def test_memory_is_what_was_asked_for(make: Callable[[int, int], Any], tau: int, share: float) -> None:
    n = 16
    cell, x = make(4, n), torch.randn(tau, 1, 4)
    gradient = torch.randn(tau, 1, n)

    def run(engine: lf.Engine) -> Callable[[], None]:
        def both_ways() -> None:
            cell.zero_grad()
            lf.unfold(cell, x, engine=engine).hidden.backward(gradient)

        for _ in range(4):
            both_ways()  # compiled, and checked
        return both_ways

    def end(engine: lf.Engine) -> Callable[[], None]:
        return lambda: lf.unfold(cell, x, engine=engine, only_last=True).last_hidden.sum().backward()

    results = sum(leaf.nbytes for leaf in leaves(lf.unfold(cell, x).states))
    plain = peak(run(lf.FusedCPU())) - results
    assert peak(run(lf.Checkpointed(lf.FusedCPU()))) - results < share * plain
    for memory in ("1 MB", "350 kB"):
        engine = lf.Checkpointed(lf.FusedCPU(), memory=memory)
        assert peak(run(engine)) - results < size_in_bytes(memory)
        assert peak(end(engine)) < size_in_bytes(memory)


def test_between_forwards_and_backwards_there_are_only_checkpoints() -> None:
    """What autograd saves is x, the parameters and nothing else; and no state but the kept ones outlives a run."""
    cell, x = lf.GRU(4, 16), torch.randn(4000, 1, 4)
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    def forwards() -> Tensor:
        return lf.unfold(cell, x, engine=lf.Checkpointed(), only_last=True).last_hidden

    for _ in range(4):  # compiled, and checked
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            forwards()
    ours = {t.data_ptr() for t in (x, *cell.parameters())}
    assert {t.data_ptr() for t in saved if t.numel() > 16} <= ours
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = forwards()
    assert kept.requires_grad
    assert sum(event.self_cpu_memory_usage for event in profile.key_averages()) < 20_000  # 12 states and a generator


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize("memory", ["64 MX", "", "MB", 0, -5, "-3 MB", 2.5, "0 MB", True], ids=str)
def test_a_bad_size_is_told(memory: Any) -> None:
    with pytest.raises(ValueError, match=r'a size such as "64 MB"'):
        lf.Checkpointed(memory=memory)


def test_bad_settings_are_told() -> None:
    for every in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="every as a whole number of at least 1"):
            lf.Checkpointed(every=every)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not both"):
        lf.Checkpointed(every=3, memory="64 MB")
    with pytest.raises(ValueError, match="Checkpointed inside Checkpointed"):
        lf.Checkpointed(lf.Checkpointed())
    with pytest.raises(TypeError, match=r"lf\.Auto\(\)"):
        lf.Checkpointed(64)  # type: ignore[arg-type]
    x = torch.randn(500, 2, 3)
    with pytest.raises(ValueError, match=r"memory='1 kB' is too little: 500 steps take at least [\d.]+ kB"):
        lf.unfold(lf.Elman(3, 5), x, engine=lf.Checkpointed(memory="1 kB"))
    for inner, size in itertools.product((lf.FusedCPU(), lf.Looped(), lf.TimeParallel()), (None, "1 MB")):
        name, engine = type(inner).__name__, lf.Checkpointed(inner, memory=size)
        with pytest.raises(ValueError, match=f"{name} cannot run its pieces: it is a plain function"):
            lf.unfold(lambda h, x: h + x, x, engine=engine)
        text = lf.Recurrent(lambda h, x: h + x, engine).explain(x, torch.zeros(2, 3))
        assert f"Checkpointed refuses, because {name} cannot run its pieces" in text


class Own(lf.Engine):
    """An engine of one's own, which runs anything."""

    def refusal(self, recurrence: lf.Recurrence) -> None:
        return None

    def run(self, recurrence: lf.Recurrence) -> Any:
        return lf.Sequential().run(recurrence)


def test_a_budget_for_an_engine_of_ones_own() -> None:
    x, found = torch.randn(50, 2, 3).double().requires_grad_(), []
    for engine in (lf.Sequential(), lf.Checkpointed(Own(), memory="1 MB")):
        hidden = lf.unfold(lambda h, x: torch.tanh(h + x), x, torch.zeros(2, 3).double(), engine=engine).hidden
        found.append(torch.autograd.grad(hidden.sum(), x))
    torch.testing.assert_close(*found)


def test_sizes_and_spacings() -> None:
    assert [size_in_bytes(s) for s in ("64MB", "1 GiB", "3 kB", "12", 12)] == [64_000_000, 2**30, 3000, 12, 12]
    costs = Costs(fixed=0, state=100, step=1000)
    assert fitted_spacings(costs, 10**9, 5000) == (5000,)  # all fits in one piece
    one, two = fitted_spacings(costs, 300_000, 100_000), fitted_spacings(costs, 100_000, 100_000)
    assert one is not None
    assert len(one) == 1
    assert two is not None
    assert len(two) == 2
    for steps in (1, 2, 3, 1000, 99_999):
        spacings = fitted_spacings(costs, costs.least(steps), steps)
        assert spacings is not None
        assert costs.held(spacings, steps) <= costs.least(steps)
    assert fitted_spacings(costs, 1000, 100_000) is None


def test_it_explains_itself() -> None:
    x = torch.randn(5000, 2, 4)
    text = lf.Recurrent(lf.LSTM(4, 16), lf.Checkpointed(every=500)).explain(x)
    assert "Checkpointed, because it was asked for" in text
    assert "10 pieces of 500 steps" in text
    assert "inside it FusedCPU, because its loop is native code" in text
    assert "kept for the way back" in text
    text = lf.Recurrent(lf.LSTM(4, 16), lf.Checkpointed(lf.Sequential(), memory="200 kB")).explain(x)
    assert "levels, of" in text
    assert "inside it Sequential, because it was asked for." in text
    assert "too little" in lf.Recurrent(lf.LSTM(4, 16), lf.Checkpointed(memory="2 kB")).explain(x)
    assert "define" in lf.Recurrent(lf.LSTM(4, 16), lf.Checkpointed(lf.FusedCPU())).explain(x, code=True)
    assert "Checkpointed(" in repr(lf.Recurrent(lf.LSTM(4, 16), lf.Checkpointed(every=5)))


class Meets(lf.Transition):
    """The sequences of a batch see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.eye(3))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        h = torch.tanh(h @ self.W + x)
        return h - 0.5 * h.mean(0)


class Normalised(Meets):
    """They do so where no trace sees it: it ends at the statistics, which the step adds up."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(h @ self.W + x))


@pytest.mark.parametrize("inner", [lf.Sequential(), lf.Auto()], ids=str)
@pytest.mark.parametrize("make", [Meets, Normalised])
def test_sequences_that_meet_and_end_at_different_steps(make: Callable[[], nn.Module], inner: lf.Engine) -> None:
    """One that has ended starts again from the first state, which is not that of a piece, and others see it."""

    def found(engine: lf.Engine, lengths: list[int] | None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        cell, x, state = make().double(), torch.randn(7, 4, 3).double(), torch.randn(4, 3).double()
        with warnings.catch_warnings(action="ignore", category=lf.EngineWarning):
            return everything(cell, x, engine, lengths, state=state) | dict(cell.named_buffers())

    for lengths in ([7, 1, 3, 5], [4, 4, 4, 6], None):
        for every in (1, 2, 3, 7):
            ours, theirs = (found(e, lengths) for e in (lf.Checkpointed(inner, every=every), lf.Sequential()))
            for name, tensor in theirs.items():
                torch.testing.assert_close(ours[name], tensor, rtol=1e-11, atol=1e-11, msg=f"{name}, every {every}")


class Learns(lf.Transition):
    """Its state is a row of weights, which it improves by a gradient of its own at every step."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.k, self.v, self.rate = nn.Linear(n_in, n), nn.Linear(n_in, n), nn.Parameter(torch.tensor(0.3))

    def initial_state(self, batch: int) -> Tensor:
        return self.k.weight.new_zeros(batch, self.k.out_features)

    def forward(self, w: Tensor, x: Tensor) -> Tensor:
        with torch.enable_grad():
            own = w.detach().requires_grad_()
            loss = (torch.tanh(own * self.k(x)) - self.v(x)).square().sum()
            (g,) = torch.autograd.grad(loss, own, create_graph=True)
        return w - self.rate * g


def test_a_step_may_differentiate_by_tensors_of_its_own() -> None:
    cell, x = Learns(4, 5).double(), torch.randn(9, 3, 4).double()
    for lengths in (None, [9, 1, 5]):
        assert_agrees(lf.Checkpointed(lf.Sequential(), every=2), cell, x, lengths)


def test_gradients_of_a_step_itself_are_made_in_its_own_thread() -> None:
    """Where a GPU's threads made them, their operations would not be counted among those of their piece."""
    seen = list[bool]()

    class Asks(Learns):
        def forward(self, w: Tensor, x: Tensor) -> Tensor:
            seen.append(torch.autograd.is_multithreading_enabled())
            return super().forward(w, x)

    lf.unfold(Asks(4, 5), torch.randn(9, 3, 4), engine=lf.Checkpointed(lf.Sequential(), every=2))
    assert len(seen) >= 9
    assert not any(seen)
    assert torch.autograd.is_multithreading_enabled()
