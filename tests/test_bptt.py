"""Gradients: by the book's equations, by autograd and by finite differences; step by step; and how far they reach."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import CELLS, LearnedStart, TwoMatrices, assert_same, cells, gradients, randn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import loopfold as lf
from loopfold.states import zero_state

pytestmark = pytest.mark.usefixtures("one_thread")
f64 = torch.float64
sizes = st.integers(1, 3)


def elman(n_in: int, n: int, k: int) -> lf.SequenceToSequence:
    return lf.SequenceToSequence(lf.Elman(n_in, n), outputs=k).double()


def letters(model: Any) -> dict[str, Tensor]:
    cell = model.recurrent.cell
    return {"U": cell.U, "W": cell.W, "b": cell.b, "V": model.V, "c": model.c}


def relative_error(got: Tensor, needed: Tensor) -> float:
    return float((got - needed).norm() / needed.norm())


def finite_difference(loss: Callable[[], Tensor], p: Tensor) -> Tensor:
    """∂loss/∂p, number by number, from values of the loss alone.

    A plain central difference cannot reach 1e-9: its truncation falls with ε² while its rounding grows with 1/ε.
    So four of them, at ε, ε/2, ε/4 and ε/8, are extrapolated to ε = 0 (Richardson): the error falls with ε⁸ at an ε
    large enough for rounding not to matter.
    """
    flat, slopes = p.detach().view(-1), torch.empty_like(p).view(-1)
    for i in range(len(flat)):
        here, table = float(flat[i]), []
        for epsilon in (0.04, 0.02, 0.01, 0.005):
            flat[i] = here + epsilon
            above = loss()
            flat[i] = here - epsilon
            table.append((above - loss()) / (2 * epsilon))
        flat[i] = here
        for order in (4, 16, 64):
            table = [(order * fine - coarse) / (order - 1) for coarse, fine in zip(table, table[1:], strict=False)]
        slopes[i] = table[0]
    return slopes.view_as(p)


def test_the_finite_difference_is_good_to_nine_digits() -> None:
    p = randn(7)
    assert (
        relative_error(finite_difference(lambda: p.tanh().exp().sum(), p), p.tanh().exp() * (1 - p.tanh() ** 2)) < 1e-10
    )


@given(tau=st.integers(1, 5), batch=sizes, n_in=sizes, n=sizes, k=st.integers(2, 4), from_zero=st.booleans())
@settings(max_examples=30)
def test_by_hand_by_autograd_and_by_finite_differences(
    tau: int, batch: int, n_in: int, n: int, k: int, from_zero: bool
) -> None:
    """M15: all three agree to 1e-9 relative in float64, for every parameter."""
    model, x, y = elman(n_in, n, k), randn(tau, batch, n_in), torch.randint(k, (tau, batch))
    state = None if from_zero else randn(batch, n)
    by_hand = lf.bptt(model, x, y, state)
    loss = model.loss(model(x, state), y)
    assert_same(by_hand.loss, loss, 1e-12)
    by_autograd = gradients(loss, letters(model))
    for letter, p in letters(model).items():
        if letter == "W" and tau == 1 and from_zero:  # W multiplies h(0) = 0 only
            assert not by_hand.W.any()
            assert not by_autograd["W"].any()
            continue
        with torch.no_grad():
            by_differences = finite_difference(lambda: model.loss(model(x, state), y), p)
        assert relative_error(getattr(by_hand, letter), by_autograd[letter]) < 1e-9
        assert relative_error(getattr(by_hand, letter), by_differences) < 1e-9


def test_the_gradients_of_the_nodes_are_autograds() -> None:
    """M15: ∇o(t) and ∇h(t), not only those of the parameters."""
    model, x, y = elman(3, 5, 4), randn(6, 2, 3), torch.randint(4, (6, 2))
    cell, h, hs, os = letters(model), torch.zeros(2, 5, dtype=f64), [], []
    for t in range(6):
        h = torch.tanh(cell["b"] + h @ cell["W"].T + x[t] @ cell["U"].T)
        hs.append(h)
        os.append(h @ model.V.T + model.c)
    loss, by_hand = model.loss(torch.stack(os), y), lf.bptt(model, x, y)
    assert_same(by_hand.h, torch.stack(torch.autograd.grad(loss, hs, retain_graph=True)))
    assert_same(by_hand.o, torch.stack(torch.autograd.grad(loss, os)))
    assert_same((by_hand.forward.h, by_hand.forward.o), (torch.stack(hs), torch.stack(os)))


def test_each_equation_as_it_is_printed() -> None:
    """M15: evaluated plainly, with diagonals as matrices and sums of outer products."""
    tau, n = 5, 4
    model, x, y, h0 = elman(3, n, 6), randn(tau, 1, 3), torch.randint(6, (tau, 1)), randn(1, n)
    g = lf.bptt(model, x, y, h0)
    U, W, b, V, c = (p.detach() for p in letters(model).values())
    a, h, o, y_hat = (part[:, 0] for part in (g.forward.a, g.forward.h, g.forward.o, g.forward.y_hat))
    do, dh, x_, before = g.o[:, 0], g.h[:, 0], x[:, 0], torch.cat([h0, h[:-1]])
    D = [torch.diag(1 - h[t] ** 2) for t in range(tau)]

    for t in range(tau):
        assert_same(a[t], b + W @ before[t] + U @ x_[t])
        assert_same(h[t], a[t].tanh())
        assert_same(o[t], c + V @ h[t])
        assert_same(y_hat[t], o[t].exp() / o[t].exp().sum())
        assert_same(do[t], y_hat[t] - torch.eye(6, dtype=f64)[y[t, 0]])
    assert_same(dh[-1], V.T @ do[-1])
    for t in range(tau - 1):
        assert_same(dh[t], W.T @ D[t + 1] @ dh[t + 1] + V.T @ do[t])
    assert_same(g.c, torch.stack([do[t] for t in range(tau)]).sum(0))
    assert_same(g.b, torch.stack([D[t] @ dh[t] for t in range(tau)]).sum(0))
    assert_same(g.V, torch.stack([torch.outer(do[t], h[t]) for t in range(tau)]).sum(0))
    assert_same(g.W, torch.stack([torch.outer(D[t] @ dh[t], before[t]) for t in range(tau)]).sum(0))
    assert_same(g.U, torch.stack([torch.outer(D[t] @ dh[t], x_[t]) for t in range(tau)]).sum(0))
    assert_same(g.loss, -y_hat[torch.arange(tau), y[:, 0]].log().sum())


class Copies(nn.Module):
    """M16 to the letter: step t uses a copy of the module that no other step uses."""

    def __init__(self, original: nn.Module, steps: int) -> None:
        super().__init__()
        self.copies = nn.ModuleList(copy.deepcopy(original) for _ in range(steps))
        self.t = 0

    def __getattr__(self, name: str) -> Any:  # for checks of sizes
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.copies[0], name)

    def initial_state(self, batch: int) -> Any:
        first = self.copies[0]
        return first.initial_state(batch) if isinstance(first, lf.Transition) else zero_state(first, batch)

    def forward(self, first: Any, *others: Tensor) -> Any:
        if isinstance(first, Tensor) and first.dim() == 3:  # a call for all steps
            return torch.stack([self(*step) for step in zip(first, *others, strict=True)])
        self.t += 1
        return self.copies[self.t - 1](first, *others)


def assert_shares_are_those_of_copies(model: Any, x: Tensor, y: Tensor, used: dict[str, int]) -> None:
    """`used` says how many steps use each part of the model that has parameters."""
    shares = lf.per_step_gradients(model, model.loss, x, y)
    copied = copy.deepcopy(model)
    for path, steps in used.items():
        parent, _, child = path.rpartition(".")
        setattr(copied.get_submodule(parent), child, Copies(model.get_submodule(path), steps))
    for part in copied.modules():
        if isinstance(part, lf.Recurrent):
            part.engine = lf.Sequential()  # copies count their calls
    copied.loss(copied.given(x, y), y).backward()
    total = gradients(model.loss(model.given(x, y), y), model)
    for path in used:
        for name, _ in model.get_submodule(path).named_parameters():
            full = f"{path}.{name}"
            (share,) = (share for short, share in shares.items() if f".{full}".endswith(f".{short}"))
            copies = (part.get_parameter(name) for part in copied.get_submodule(path).copies)
            assert_same(share, torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in copies]))
            assert_same(share.sum(0), total.pop(full))
    assert not total


@pytest.mark.parametrize("name", CELLS)
def test_the_share_of_a_step_is_the_gradient_of_a_copy_used_there_alone(name: str) -> None:
    """M16: for every parameter of any transition; the shares sum to .grad."""
    model = lf.SequenceToSequence(cells(3, 5)[name], outputs=4).double()
    x, y = randn(6, 2, 3), torch.randint(4, (6, 2))
    assert_shares_are_those_of_copies(model, x, y, {"recurrent.cell": 6, "readout": 6})


PATTERNS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "Stacked": (
        lambda: lf.SequenceToSequence(lf.Stacked([lf.LSTM(3, 5), TwoMatrices(5, 4)]), 4),
        {"recurrent.layers.0.cell": 6, "recurrent.layers.1.cell": 6, "readout": 6},
    ),
    "Bidirectional": (
        lambda: lf.SequenceToSequence(lf.Bidirectional(lf.GRU(3, 5), lf.LayerNormLSTM(3, 4)), 4),
        {"recurrent.forwards.cell": 6, "recurrent.backwards.cell": 6, "readout": 6},
    ),
    "OutputRecurrence": (lambda: lf.OutputRecurrence(3, 5, 4), {"hidden": 6, "readout": 6}),
    "EncoderDecoder": (
        lambda: lf.EncoderDecoder(lf.GRU(3, 5), lf.LSTM(5 + 4, 6), 4),
        {"encoder.cell": 9, "decoder.recurrent.cell": 6, "decoder.readout": 6},
    ),
    "SequenceToOne": (lambda: lf.SequenceToOne(lf.LSTM(3, 5), 4), {"recurrent.cell": 6, "readout": 1}),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_shares_of_steps_go_through_every_pattern(name: str) -> None:
    """M16"""
    kind, used = PATTERNS[name]
    x, y = randn(max(used.values()), 2, 3), torch.randint(4, (2,) if name == "SequenceToOne" else (6, 2))
    assert_shares_are_those_of_copies(kind().double(), x, y, used)


def assert_shares_sum_to_grad(model: nn.Module, loss_fn: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(1)
    shares = lf.per_step_gradients(model, loss_fn, x, y)
    torch.manual_seed(1)
    total = gradients(loss_fn(model(x), y), {n: p for n, p in model.named_parameters() if p.requires_grad})
    assert len(shares) == len(total)
    for name, gradient in total.items():
        (share,) = (share for short, share in shares.items() if f".{name}".endswith(f".{short}"))
        assert_same(share.sum(0), gradient)
    return shares


class Dropping(lf.Transition):
    """A cell that is random."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.step = lf.Elman(n_in, n)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.step(h, x), 0.5)


class RunningSum(nn.Module):
    """A module that reads all steps at once, and none by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x.cumsum(0)


class Everywhere(nn.Module):
    """Parameters in every place: over time, outside any step, of the model itself, tied, and frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.over_time, self.sum = nn.Conv1d(6, 6, 3, padding=1), RunningSum()  # the steps are channels
        self.embed = nn.Linear(3, 5, bias=False)
        self.layer = lf.Recurrent(Dropping(5, 5), lf.Sequential())
        self.again = lf.Recurrent(self.layer.cell, lf.Sequential())
        self.scale = nn.Parameter(torch.randn(()))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.sum(self.over_time(x.transpose(0, 1)).transpose(0, 1))
        h = self.again(self.layer(self.embed(x)).hidden).hidden
        return self.scale * h @ self.embed.weight + self.frozen.sum()


def test_shares_are_by_step_in_single_precision_too() -> None:
    """The readout is one call for all steps; what rounding does to it must not be taken for a mixing of steps."""
    for seed in range(10):
        torch.manual_seed(seed)
        model = lf.SequenceToSequence(lf.Elman(3, 5), outputs=4)
        x, y = torch.randn(40, 8, 3), torch.randint(4, (40, 8))
        assert lf.per_step_gradients(model, model.loss, x, y)["V"].shape == (40, 4, 5)


class Leaking(nn.Module):
    """A linear layer that adds a little of the step before."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.weight, self.share = nn.Parameter(torch.randn(4, 3)), share

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.share * torch.cat([torch.zeros_like(x[:1]), x[:-1]])) @ self.weight.T


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.02])
def test_a_little_mixing_of_steps_is_found_in_every_precision(share: float, dtype: torch.dtype) -> None:
    """M16: whether steps are mixed does not depend on how coarsely numbers are rounded."""
    torch.manual_seed(0)
    model = nn.Sequential(Leaking(share)).to(dtype)
    x, y = torch.randn(12, 2, 3).to(dtype), torch.randn(12, 2, 4).to(dtype)

    def loss(o: Tensor, y: Tensor) -> Tensor:
        return (o - y).square().sum()

    shares = lf.per_step_gradients(model, loss, x, y)["weight"]
    assert shares.shape == (1 if share else 12, 4, 3)
    assert shares.dtype == dtype
    (whole,) = torch.autograd.grad(loss(model(x), y), list(model.parameters()))
    size = float(shares.abs().sum(0).max())
    torch.testing.assert_close(shares.sum(0), whole, rtol=0, atol=8 * torch.finfo(dtype).eps * size)


class Unused(nn.Module):
    """Holds a parameter that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.idle = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x


def test_a_parameter_without_use_has_no_share_in_anything() -> None:
    model, x = nn.Sequential(Unused()), torch.randn(6, 2, 3)
    shares = lf.per_step_gradients(model, lambda o, y: (o - y).square().sum(), x, torch.zeros(6, 2, 3))
    assert shares["gain"].shape == (6, 3)
    assert not shares["idle"].any()


def test_shares_sum_to_the_gradient_wherever_a_parameter_is_used() -> None:
    """M16: also in a model that none of our patterns is."""
    model, x, y = Everywhere().double(), randn(6, 2, 3), randn(6, 2, 3)
    shares = assert_shares_sum_to_grad(model, lambda o, y: (o - y).square().sum(), x, y)
    assert shares["W"].shape == (6 + 6, 5, 5)  # one cell in two layers
    assert shares["embed.weight"].shape == (6, 5, 3)
    assert shares["over_time.weight"].shape == (1, 6, 6, 3)  # no step has a share of its own in these two
    assert shares["gain"].shape == (1, 3)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = lf.Recurrent(lf.GRU(3, 3))
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x).hidden


def test_a_parameter_of_the_whole_model_counts_once() -> None:
    """M16"""
    x, y = randn(6, 2, 3), randn(6, 2, 3)
    shares = assert_shares_sum_to_grad(Scaled().double(), lambda o, y: (o - y).square().sum(), x, y)
    assert shares["scale"].shape == (1, 3)


def test_names_of_shares_are_as_short_as_they_can_be() -> None:
    model = lf.SequenceToSequence(lf.Stacked([lf.Elman(3, 5), lf.GRU(5, 5)]), outputs=4)
    shares = lf.per_step_gradients(model, model.loss, torch.randn(6, 2, 3), torch.randint(4, (6, 2)))
    assert set(shares) == {"V", "c", "b_hn", *(f"{layer}.cell.{letter}" for layer in (0, 1) for letter in "UWb")}


def test_looking_at_gradients_leaves_the_model_as_it_was() -> None:
    model, x, y = (
        lf.SequenceToSequence(lf.Recurrent(lf.LSTM(3, 5), Unsteady()), 4),
        torch.randn(6, 2, 3),
        torch.ones(6, 2).long(),
    )
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}

    def broken(o: Tensor, y: Tensor) -> Tensor:
        raise ArithmeticError

    for look in (lf.per_step_gradients, lf.gradient_flow):
        look(model, model.loss, x, y)
        with pytest.raises(ArithmeticError):
            look(model, broken, x, y)
    with pytest.raises(ValueError, match="x has shape"):
        lf.per_step_gradients(model, model.loss, x[0], y)
    assert isinstance(model.recurrent, lf.Recurrent)
    assert isinstance(model.recurrent.engine, Unsteady)
    for name, p in model.named_parameters():
        assert p.grad is None
        assert id(p) == before[name][0]
        assert torch.equal(p, before[name][1])
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


class Unsteady(lf.Engine):
    """An engine that shows hooks nothing; whoever wants to see steps must not use it."""

    def refusal(self, recurrence: lf.Recurrence) -> None:
        return None

    def run(self, recurrence: lf.Recurrence) -> Any:
        raise AssertionError("the plain loop was needed")


def linear(scale: float, n: int = 6) -> lf.SequenceToSequence:
    """h(t) = scale · Q h(t-1) + U x(t) with Q orthogonal: every step back changes a gradient by exactly `scale`."""
    cell = lf.Elman(3, n, lambda a: a, recurrent_init=lf.Orthogonal(scale), dtype=f64)
    return lf.SequenceToSequence(cell, outputs=4)


@pytest.mark.parametrize("name", ["Elman", "GRU", "TwoMatrices"])
def test_gradient_flow_is_the_product_of_jacobians(name: str) -> None:
    """M17: ∂L(t)/∂h(k) = ∂L(t)/∂h(t) · Π ∂h(j)/∂h(j-1), each factor by itself."""
    cell, tau = cells(3, 4)[name], 6
    model, x, y = lf.SequenceToSequence(cell, outputs=5), randn(tau, 1, 3), torch.randint(5, (tau, 1))
    h = model.predict(x).run.hidden.detach()
    flow = lf.gradient_flow(model, model.loss, x, y)
    for t in range(tau):
        h_t = h[t].clone().requires_grad_()
        (row,) = torch.autograd.grad(model.loss(model.readout(h_t), y[t]), h_t)
        for k in range(t, -1, -1):
            assert_same(flow.norms[t, k], row.norm())
            if k > 0:
                jacobian = torch.func.jacrev(lambda h, k=k: cell(h, x[k]))(h[k - 1])[0, :, 0]
                row = row @ jacobian
    assert not flow.norms.triu(1).any()


def test_gradient_flow_of_an_lstm_is_of_its_whole_state() -> None:
    """M17: h and c as the two halves of the state, so h(k) counts apart from c(k)."""
    cell, tau = lf.LSTM(3, 4, dtype=f64), 5
    model, x, y = lf.SequenceToSequence(cell, outputs=5), randn(tau, 2, 3), torch.randint(5, (tau, 2))
    states = lf.unfold(cell, x).states
    flow = lf.gradient_flow(model, model.loss, x, y)
    for k in range(tau):
        h, c = (leaf[k].detach().requires_grad_() for leaf in states)
        later = lf.unfold(cell, x[k + 1 :], (h, c)).hidden if k + 1 < tau else None
        for t in range(k, tau):
            o = model.readout(h if later is None or t == k else later[t - k - 1])
            found = torch.autograd.grad(model.loss(o, y[t]), (h, c), allow_unused=True, retain_graph=True)
            parts = torch.cat([g.flatten() for g in found if g is not None])
            assert_same(flow.norms[t, k], parts.norm())


@pytest.mark.parametrize(
    ("scale", "verdict"),
    [
        (0.5, "vanishes after about 10 steps: 0.5 of it is left with every step back. Use a gated cell"),
        (0.9, "fades: 0.9 of it is left with every step back, 0.016 times its size after 39 steps. At this rate it"),
        (1.0, "healthy: 1 times its size with every step back, 1 times its size after 39 steps"),
        (1.5, "explodes after about 18 steps: it grows 1.5-fold with every step back. Clip the gradient"),
    ],
)
def test_the_verdict_says_what_the_gradient_does_and_what_to_do(scale: float, verdict: str) -> None:
    """M17: 0.5¹⁰ < 1/1000 < 0.5⁹, and 1.5¹⁷ < 1000 < 1.5¹⁸."""
    model, x, y = linear(scale), randn(40, 2, 3) / 100, torch.randint(4, (40, 2))
    one_end = lf.SequenceToOne(model.recurrent, outputs=4).double()
    flow = lf.gradient_flow(one_end, one_end.loss, x, y[0])
    assert flow.norms.shape == (1, 40)
    assert flow.rate == pytest.approx(scale, rel=1e-6)
    assert_same(flow.reach, scale ** torch.arange(40, dtype=f64), 1e-8)
    assert flow.verdict.startswith(verdict)


def test_every_step_has_its_row_and_reach_is_their_mean() -> None:
    """M17"""
    model, x, y = linear(0.5), randn(12, 2, 3), torch.randint(4, (12, 2))
    flow = lf.gradient_flow(model, model.loss, x, y)
    own = flow.norms.diagonal()
    for d in range(12):
        assert_same(flow.norms.diagonal(-d), 0.5**d * own[d:])
        needed = (0.5**d * own[d:]).log().mean() - own.log().mean()
        assert_same(flow.reach[d], needed.exp())


def test_one_output_is_one_row_even_where_the_batch_is_as_long_as_the_sequence() -> None:
    model = lf.SequenceToOne(lf.Elman(3, 5), outputs=4)
    assert lf.gradient_flow(model, model.loss, torch.randn(4, 4, 3), torch.randint(4, (4,))).norms.shape == (1, 4)


def test_steps_that_the_loss_leaves_out_say_nothing_about_the_flow() -> None:
    model, x, y = linear(0.5), randn(12, 2, 3), torch.randint(4, (12, 2))
    y[5:] = -100

    def loss(o: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(o.flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")

    flow = lf.gradient_flow(model, loss, x, y)
    assert flow.reach.shape == (5,)
    assert flow.reach.isfinite().all()
    nothing = lf.gradient_flow(model, lambda o, y: 0 * o.sum(), x, y)
    assert nothing.verdict.startswith("no gradient")


def test_gradient_flow_lines_up_both_directions() -> None:
    """M17: step k of a backward layer is where it reads x(k); only the future of t can reach it there."""
    layers = lf.Bidirectional(lf.Stacked([lf.Elman(3, 5)]), lf.Stacked([lf.Elman(3, 5), lf.GRU(5, 5)]))
    model = lf.SequenceToSequence(layers, outputs=4).double()
    x, y = randn(6, 2, 3), torch.randint(4, (6, 2))
    for p in layers.forwards.parameters():
        p.data.zero_()
    flow = lf.gradient_flow(model, lambda o, y: model.loss(o, y), x, y)
    backwards = flow.norms - flow.norms.tril(-1)
    assert (backwards.triu() > 0).eq(torch.ones(6, 6).triu().bool()).all()


def test_gradient_flow_of_a_network_that_reads_classes() -> None:
    class Tokens(lf.Transition):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.step = nn.Embedding(9, 3), lf.Elman(3, 5)

        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            return self.step(h, self.embed(x))

    model, x, y = lf.SequenceToSequence(Tokens(), outputs=4), torch.randint(9, (6, 2)), torch.randint(4, (6, 2))
    norms = lf.gradient_flow(model, lambda o, y: model.loss(o, y), x, y).norms
    assert norms.is_floating_point()
    assert norms.diagonal().gt(0).all()


def test_the_activation_shows_in_the_flow() -> None:
    """M10: with W = I, relu keeps the gradient of what is positive whole; tanh wears it down."""
    x, y, rates = randn(30, 2, 3).abs(), torch.randint(4, (30, 2)), {}
    for phi in (torch.tanh, torch.relu):
        cell = lf.Elman(3, 5, phi, recurrent_init=lf.ScaledIdentity(), dtype=f64)
        cell.U.data.abs_()
        cell.b.data.zero_()
        model = lf.SequenceToSequence(cell, outputs=4)
        rates[phi] = lf.gradient_flow(model, model.loss, x, y).rate
    assert rates[torch.relu] == pytest.approx(1.0, abs=0.05)
    assert rates[torch.tanh] < 0.8


def added(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("window", [7, 8, 100])
def test_a_window_as_long_as_the_sequence_is_the_full_gradient(window: int) -> None:
    model, x, y, state = elman(3, 5, 4), randn(7, 2, 3), torch.randint(4, (7, 2)), randn(2, 5)
    needed = gradients(model.loss(model(x, state), y), model)
    done = lf.truncated_bptt(model, model.loss, x, y, window, state)
    assert_same(added(model), needed)
    assert_same(done.last, model.predict(x, state).run.last.detach())
    assert not done.last.requires_grad


@pytest.mark.parametrize("window", [1, 3])
def test_a_window_stops_the_gradient_and_not_the_state(window: int) -> None:
    """Each window starts from the states of the whole run, as constants."""
    model, x, y = lf.SequenceToSequence(lf.LSTM(3, 5), outputs=4).double(), randn(7, 2, 3), torch.randint(4, (7, 2))
    states, loss = model.predict(x).run.states, torch.zeros((), dtype=f64)
    for t in range(0, 7, window):
        before = None if t == 0 else lf.LSTMState(states.h[t - 1].detach(), states.c[t - 1].detach())
        loss = loss + model.loss(model(x[t : t + window], before), y[t : t + window])
    done = lf.truncated_bptt(model, model.loss, x, y, window)
    assert_same(done.loss, model.loss(model(x), y).detach())
    assert_same(added(model), gradients(loss, model))
    assert not torch.allclose(
        added(model)["recurrent.cell.W"], gradients(model.loss(model(x), y), model)["recurrent.cell.W"]
    )


def test_truncated_gradients_add_up_and_clip_as_any_other() -> None:
    model, x, y = elman(3, 5, 4), randn(7, 2, 3), torch.randint(4, (7, 2))
    lf.truncated_bptt(model, model.loss, x, y, window=2)
    once = {name: g.clone() for name, g in added(model).items()}
    lf.truncated_bptt(model, model.loss, x, y, window=2)
    assert_same(added(model), {name: 2 * g for name, g in once.items()})
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert math.sqrt(sum(float(g.square().sum()) for g in added(model).values())) == pytest.approx(0.1, rel=1e-4)


def test_a_learned_start_is_part_of_the_first_step() -> None:
    """M16"""
    model, x, y = lf.SequenceToSequence(LearnedStart(3, 5), 4).double(), randn(6, 2, 3), torch.randint(4, (6, 2))
    shares = assert_shares_sum_to_grad(model, model.loss, x, y)
    assert shares["h0"][0].all()
    assert not shares["h0"][1:].any()


def test_a_gated_network_is_not_told_to_use_gates() -> None:
    model = lf.SequenceToSequence(lf.LSTM(3, 5, forget_bias=-8.0), outputs=4)
    flow = lf.gradient_flow(model, model.loss, torch.randn(30, 2, 3), torch.zeros(30, 2, dtype=torch.long))
    assert "vanishes" in flow.verdict
    assert "forget_bias=1.0" in flow.verdict
    assert "gated cell" not in flow.verdict


@pytest.mark.parametrize(("dtype", "steps"), [(torch.float32, 30), (f64, 200)])
def test_small_gradients_are_small_and_not_zero(dtype: torch.dtype, steps: int) -> None:
    """M17: a square underflows long before what is squared does, in single precision below 1e-23."""
    cell = lf.Elman(3, 4, lambda a: a, recurrent_init=lf.ScaledIdentity(0.05), dtype=dtype)
    model = lf.SequenceToSequence(cell, outputs=4)
    flow = lf.gradient_flow(model, model.loss, torch.randn(steps, 2, 3, dtype=dtype), torch.zeros(steps, 2).long())
    assert flow.norms.dtype == f64
    last = flow.norms[-1]
    torch.testing.assert_close(last[1:] / last[:-1], torch.full((steps - 1,), 20.0, dtype=f64), rtol=1e-3, atol=0)
    assert flow.rate == pytest.approx(0.05, rel=1e-2)


def test_one_step_that_is_no_number_is_not_healthy() -> None:
    assert lf.GradientFlow(torch.full((1, 1), math.nan)).verdict.startswith("explodes at once")
