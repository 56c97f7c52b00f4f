"""unfold: the same step at every moment, with and without input, from any state, over sequences of any length."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import CELLS, TwoMatrices, assert_same, cells, gradients, randn
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import loopfold as lf
from loopfold.states import leaves, map_state

pytestmark = pytest.mark.usefixtures("one_thread")
f64 = torch.float64


def loop(f: Callable[..., Any], x: Tensor, state: Any) -> list[Any]:
    """The definition, written out."""
    states = []
    for t in range(len(x)):
        state = f(state, x[t])
        states.append(state)
    return states


def test_the_folded_recurrence_is_the_unfolded_expression() -> None:
    """M1: s(t) = f(s(t-1)) run for three steps is f(f(f(s)))."""
    theta = randn(4, 4)

    def f(s: Tensor) -> Tensor:
        return torch.sin(s @ theta)

    s = randn(2, 4)
    run = lf.unfold(f, steps=3, state=s)
    assert_same(run.states, torch.stack([f(s), f(f(s)), f(f(f(s)))]), 0)
    assert_same(run.last, f(f(f(s))), 0)


@given(tau=st.integers(1, 30), rate=st.floats(-0.9, 0.9))
def test_any_number_of_steps_follows_the_closed_form(tau: int, rate: float) -> None:
    """M1: s(t) = r s(t-1) is rᵗ s(0), for a state of a single number."""
    run = lf.unfold(lambda s: rate * s, steps=tau, state=torch.tensor(2.0, dtype=f64))
    assert_same(run.hidden, 2 * torch.tensor([rate**t for t in range(1, tau + 1)], dtype=f64))


def test_a_signal_drives_the_system() -> None:
    """M2: s(t) = f(s(t-1), x(t)); this f sums up, so its states are the running sums of the signal."""
    x = randn(20, 3, 2)
    assert_same(lf.unfold(lambda s, x: s + x, x).states, x.cumsum(0))


@pytest.mark.parametrize("name", CELLS)
def test_every_cell_unfolds_as_the_written_out_loop(name: str) -> None:
    """M3: users bring their own f; the state may be a tensor or a NamedTuple."""
    cell, x = cells(3, 5)[name], randn(6, 2, 3)
    run = lf.unfold(cell, x, engine=lf.Sequential())
    start = map_state(lambda leaf: leaf * 0, run.last) if name != "LearnedStart" else cell.initial_state(2)  # type: ignore[operator]
    states = loop(cell, x, start)
    assert type(run.last) is type(states[-1])
    for came, *needed in zip(leaves(run.states), *map(leaves, states), strict=True):
        assert_same(came, torch.stack(needed), 0)
    assert_same(leaves(run.last), leaves(states[-1]), 0)


def test_a_nested_state_keeps_its_structure() -> None:
    def f(state: Any, x: Tensor) -> Any:
        (a, b), c = state
        return (b, a + x), c * b.sum(-1, keepdim=True)

    start = ((randn(2, 3), randn(2, 3)), randn(2, 1))
    x = randn(5, 2, 3)
    run, states = lf.unfold(f, x, start, lengths=[5, 5]), loop(f, x, start)
    assert_same(run.last, states[-1], 0)
    assert_same(run.states[0][1], torch.stack([state[0][1] for state in states]), 0)
    assert run.hidden is run.states[0][0]


def test_every_step_uses_the_same_parameters_whatever_the_length() -> None:
    """M4, M12: the count of parameters does not grow with τ, and a longer run begins as a shorter one."""
    cell, x = lf.Elman(3, 5, dtype=f64), randn(50, 2, 3)
    count = sum(p.numel() for p in cell.parameters())
    for engine, tolerance in ((lf.Sequential(), 0.0), (lf.FusedCPU(), 1e-11), (lf.Auto(), 1e-11)):
        long = lf.unfold(cell, x, engine=engine).hidden
        for tau in (1, 2, 7, 49):
            assert_same(lf.unfold(cell, x[:tau], engine=engine).hidden, long[:tau], tolerance)
    assert sum(p.numel() for p in cell.parameters()) == count == 5 * 3 + 5 * 5 + 5


def echo(tau: int, batch: int) -> tuple[Tensor, Tensor]:
    """A leaky sum of the input, which two numbers describe for every length."""
    x = randn(tau, batch, 1)
    return x, lf.unfold(lambda s, x: 0.8 * s + 0.5 * x, x).hidden


def fitted(x: Tensor, y: Tensor) -> nn.Module:
    """A linear cell of one unit, trained to end in y."""
    cell = lf.Elman(1, 1, lambda a: a, recurrent_init=lf.ScaledIdentity(0.5), dtype=f64)
    optimiser = torch.optim.LBFGS(cell.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = (lf.unfold(cell, x).last - y).square().sum()
        loss.backward()
        return loss.detach()

    optimiser.step(closure)
    return cell


def test_a_model_runs_on_lengths_it_never_saw_in_training() -> None:
    """M4: trained on 5 steps, right on 100."""
    x, y = echo(5, 20)
    cell = fitted(x, y[-1])
    x, y = echo(100, 20)
    assert (lf.unfold(cell, x).hidden - y).abs().max() < 1e-4


def test_sharing_needs_fewer_examples_than_separate_models() -> None:
    """M4: from 5 examples of 10 steps, the shared step is found; a linear g(10) of its own has 10 unknowns."""
    x, y = echo(10, 5)
    cell = fitted(x, y[-1])
    separate = torch.linalg.lstsq(x[..., 0].T, y[-1], driver="gelsd").solution
    new_x, new_y = echo(10, 200)
    shared_error = (lf.unfold(cell, new_x).last - new_y[-1]).square().mean()
    separate_error = (new_x[..., 0].T @ separate - new_y[-1]).square().mean()
    assert shared_error < 1e-6 < 0.05 < separate_error


def test_outputs_of_every_step_and_the_final_state_have_their_own_names() -> None:
    """M14"""
    cell, x = lf.LSTM(3, 5, dtype=f64), randn(7, 2, 3)
    run = lf.unfold(cell, x, lengths=[7, 4])
    assert run.hidden.shape == (7, 2, 5)
    assert run.last.h.shape == run.last.c.shape == run.last_hidden.shape == (2, 5)
    assert run.hidden is run.states.h
    assert run.last_hidden is run.last.h
    assert_same(run.last_hidden, torch.stack([run.hidden[6, 0], run.hidden[3, 1]]), 0)
    assert_same(run.last.c, torch.stack([run.states.c[6, 0], run.states.c[3, 1]]), 0)


sizes = st.integers(1, 4)


@given(name=st.sampled_from(CELLS), data=st.data(), tau=st.integers(1, 6), batch=sizes, n_in=sizes, n=sizes)
@pytest.mark.parametrize("padding", [math.nan, math.inf, 1e300, 0.0])
def test_padding_changes_nothing(
    padding: float, name: str, data: st.DataObject, tau: int, batch: int, n_in: int, n: int
) -> None:
    """Each sequence of a padded batch gives what it gives alone: states, last, and every gradient."""
    lengths = data.draw(st.lists(st.integers(1, tau), min_size=batch, max_size=batch))
    cell, x = cells(n_in, n)[name], randn(tau, batch, n_in)
    weights, last_weights = randn(tau, batch, n), randn(batch, n)
    for i, length in enumerate(lengths):
        x[length:, i] = padding
    x.requires_grad_()
    run = lf.unfold(cell, x, lengths=lengths)
    came = gradients((run.hidden * weights).sum() + (run.last_hidden * last_weights).sum(), cell, x=x)

    loss = torch.zeros((), dtype=f64)
    for i, length in enumerate(lengths):
        alone = lf.unfold(cell, x[:length, i : i + 1])
        assert_same([leaf[:length, i : i + 1] for leaf in leaves(run.states)], leaves(alone.states))
        assert_same([leaf[i : i + 1] for leaf in leaves(run.last)], leaves(alone.last))
        assert not any(leaf[length:, i].any() for leaf in leaves(run.states))
        loss = loss + (alone.hidden * weights[:length, i : i + 1]).sum() + (alone.last_hidden * last_weights[i]).sum()
    assert_same(came, gradients(loss, cell, x=x))


def test_what_the_step_would_do_after_the_end_does_not_matter() -> None:
    """One step more would overflow, and 0 · inf in the gradient would be NaN."""
    s = torch.tensor([[0.5], [5.0]], requires_grad=True)
    run = lf.unfold(torch.exp, steps=4, state=s, lengths=[2, 1])
    (slope,) = torch.autograd.grad(run.last.sum(), s)
    torch.testing.assert_close(run.last, torch.stack([s[0].exp().exp(), s[1].exp()]))
    torch.testing.assert_close(slope, torch.stack([s[0].exp().exp() * s[0].exp(), s[1].exp()]))


def test_lengths_may_be_a_tensor_of_any_whole_numbers() -> None:
    cell, x = lf.GRU(3, 5), torch.randn(7, 2, 3)
    needed = lf.unfold(cell, x, lengths=[7, 4]).hidden
    for dtype in (torch.int64, torch.int32, torch.uint8):
        assert_same(lf.unfold(cell, x, lengths=torch.tensor([7, 4], dtype=dtype)).hidden, needed, 0)


@given(name=st.sampled_from(CELLS), tau=st.integers(2, 9), data=st.data())
def test_two_halves_equal_the_whole(name: str, tau: int, data: st.DataObject) -> None:
    """The state carries over from one call to the next: values, and gradients through the seam."""
    cut = data.draw(st.integers(1, tau - 1))
    cell, x = cells(3, 4)[name], randn(tau, 2, 3).requires_grad_()
    whole = lf.unfold(cell, x)
    first = lf.unfold(cell, x[:cut])
    second = lf.unfold(cell, x[cut:], state=first.last)
    assert_same(torch.cat([first.hidden, second.hidden]), whole.hidden)
    assert_same(leaves(second.last), leaves(whole.last))
    weights = randn(2, 4)
    came, needed = ((run.last_hidden * weights).sum() for run in (second, whole))
    assert_same(gradients(came, cell, x=x), gradients(needed, cell, x=x))


def test_two_halves_equal_the_whole_without_input() -> None:
    s = randn(2, 3)
    first = lf.unfold(torch.sin, steps=2, state=s)
    assert_same(lf.unfold(torch.sin, steps=3, state=first.last).last, lf.unfold(torch.sin, steps=5, state=s).last, 0)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("lengths", [None, [6, 3]])
def test_every_dtype(name: str, dtype: torch.dtype, tolerance: float, lengths: list[int] | None) -> None:
    cell, x = cells(3, 5)[name], randn(6, 2, 3)
    needed = lf.unfold(cell, x, lengths=lengths).hidden
    run = lf.unfold(cell.to(dtype), x.to(dtype), lengths=lengths)
    assert {leaf.dtype for leaf in (*leaves(run.states), *leaves(run.last))} == {dtype}
    torch.testing.assert_close(run.hidden.double(), needed, rtol=tolerance, atol=tolerance)


@given(name=st.sampled_from(CELLS), tau=sizes, batch=sizes, n_in=sizes, n=sizes)
def test_sizes_of_one_are_sizes_like_any_other(name: str, tau: int, batch: int, n_in: int, n: int) -> None:
    cell, x = cells(n_in, n)[name], randn(tau, batch, n_in)
    run = lf.unfold(cell, x)
    assert run.hidden.shape == (tau, batch, n)
    assert_same(run.hidden[:, 0], lf.unfold(cell, x[:, :1]).hidden[:, 0])


def test_x_may_have_no_features_or_more_dimensions() -> None:
    """A function decides what x(t) is: classes [batch], or pictures [batch, height, width]."""
    assert_same(lf.unfold(lambda s, x: s + x, randn(4, 2), state=torch.zeros(2, dtype=f64)).hidden.shape, (4, 2))
    pictures = randn(4, 2, 3, 3)
    run = lf.unfold(lambda s, x: s + x.sum((1, 2)), pictures, state=torch.zeros(2, dtype=f64), lengths=[4, 1])
    assert_same(run.last, torch.stack([pictures[:, 0].sum(), pictures[0, 1].sum()]))


def test_it_runs_under_the_transforms_of_torch() -> None:
    cell, x = lf.GRU(3, 5, dtype=f64), randn(4, 6, 2, 3)

    def loss(x: Tensor) -> Tensor:
        return lf.unfold(cell, x, lengths=[6, 4]).hidden.sum()

    needed = torch.stack([torch.autograd.functional.jacobian(loss, part) for part in x])
    assert_same(torch.vmap(torch.func.grad(loss))(x), needed)
    assert_same(torch.vmap(loss)(x), torch.stack([loss(part) for part in x]))


def test_gradients_of_gradients() -> None:
    cell, x = TwoMatrices(2, 2).double(), randn(3, 1, 2).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: lf.unfold(cell, x, engine=lf.Sequential()).last, x)


class Fussy(lf.Engine):
    def refusal(self, recurrence: lf.Recurrence) -> str | None:
        return None if recurrence.steps < 3 else "it gets tired after 2 steps. Use engine=Sequential()."

    def run(self, recurrence: lf.Recurrence) -> Any:
        return lf.Sequential().run(recurrence)


def test_an_engine_that_refuses_is_not_passed_over_in_silence() -> None:
    cell, x = lf.Elman(3, 5), torch.randn(3, 2, 3)
    needed = lf.unfold(cell, x[:2], engine=lf.Sequential()).hidden
    assert_same(lf.unfold(cell, x[:2], engine=Fussy()).hidden, needed, 0)
    with pytest.raises(ValueError, match="Fussy cannot run Elman: it gets tired after 2 steps. Use engine="):
        lf.unfold(cell, x, engine=Fussy())
