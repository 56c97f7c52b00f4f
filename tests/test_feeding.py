"""What an output means, and what goes back in."""

from collections.abc import Callable

import pytest
import torch
from helpers import assert_same, gradients, randn
from torch import Tensor

import loopfold as lf
from loopfold.feeding import Feeding
from loopfold.outputs import Outputs

pytestmark = pytest.mark.usefixtures("one_thread")
f64 = torch.float64


def test_classes_are_softmax_and_cross_entropy() -> None:
    """M7: ŷ = softmax(o), L = -log ŷ_y."""
    outputs, o, y = lf.Classes(3), randn(5, 2, 3), torch.randint(3, (5, 2))
    y_hat = o.exp() / o.exp().sum(-1, keepdim=True)
    assert_same(outputs.soft(o), y_hat)
    assert_same(outputs.losses(o, y), -y_hat.gather(-1, y[..., None])[..., 0].log())
    assert outputs.greedy(o).argmax(-1).equal(o.argmax(-1))
    assert outputs.encode(y).argmax(-1).equal(y)
    for one_hot in (outputs.greedy(o), outputs.encode(y)):
        assert one_hot.sum(-1).eq(1).all()
        assert one_hot.max(-1).values.eq(1).all()


def test_reals_are_squared_error() -> None:
    outputs, o, y = lf.Reals(3), randn(5, 2, 3), randn(5, 2, 3)
    assert_same(outputs.losses(o, y), ((o - y) ** 2).sum(-1))
    assert outputs.soft(o) is o
    assert outputs.encode(y) is y


def test_samples_follow_the_models_distribution() -> None:
    """M21: or samples from them."""
    probabilities = torch.tensor([0.7, 0.2, 0.1])
    o = probabilities.log().expand(20000, 3)
    drawn = lf.Sample(torch.Generator().manual_seed(0))(o, lf.Classes(3))
    assert drawn.sum(-1).eq(1).all()
    torch.testing.assert_close(drawn.mean(0), probabilities, atol=0.01, rtol=0)


def test_a_sample_is_the_generators_and_leaves_the_global_one_alone() -> None:
    o, before = torch.randn(100, 3), torch.get_rng_state()
    one, same, other = (lf.Sample(torch.Generator().manual_seed(s))(o, lf.Classes(3)) for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("pick", "flows"), [(lf.Soft(), True), (lf.Raw(), True), (lf.Greedy(), False), (lf.Sample(), False)]
)
def test_the_gradient_goes_back_through_soft_outputs_only(pick: lf.Soft, flows: bool) -> None:
    assert pick(randn(4, 3).requires_grad_(), lf.Classes(3)).requires_grad is flows


class Truth(Feeding):
    """Teacher forcing that says nothing beforehand, so that patterns must loop: the oracle of `TeacherForcing`."""

    def known(self, y: Tensor | None, outputs: Outputs) -> None:
        return None

    def next(self, o: Tensor, y: Tensor | None, outputs: Outputs) -> Tensor:
        assert y is not None
        return outputs.encode(y).to(o.dtype)


Run = Callable[[Feeding], Tensor]
PATTERNS = ["OutputRecurrence", "VectorToSequence", "EncoderDecoder", "Autoencoder"]


def fed_back(name: str, outputs: Outputs, batch: int = 4) -> tuple[torch.nn.Module, Run]:
    """A pattern that feeds outputs back, and what it gives on some data under a feeding."""
    size = outputs.size
    x = (
        randn(6, batch, size)
        if isinstance(outputs, lf.Reals)
        else lf.Classes(size).encode(torch.randint(size, (6, batch)))
    )
    x = x.to(f64)
    y = randn(6, batch, size) if isinstance(outputs, lf.Reals) else torch.randint(size, (6, batch))
    if name == "OutputRecurrence":
        one = lf.OutputRecurrence(size, 5, outputs).double()
        return one, lambda feeding: one(x, y, feeding)
    if name == "VectorToSequence":
        two = lf.VectorToSequence(lf.Stacked([lf.GRU(size + size, 5), lf.LSTM(5, 4)]), outputs).double()
        return two, lambda feeding: two(x[0], y, feeding)
    if name == "EncoderDecoder":
        three = lf.EncoderDecoder(lf.GRU(size, 5), lf.LSTM(5 + size, 4), outputs).double()
        return three, lambda feeding: three(x, y, feeding, lengths=[6, 3, 1, 2][:batch])
    four = lf.Autoencoder(lf.Elman(size, 5), lf.GRU(5 + size, 4), outputs).double()
    return four, lambda feeding: four(x, feeding)


@pytest.mark.parametrize("outputs", [lf.Classes(3), lf.Reals(3)], ids=["Classes", "Reals"])
@pytest.mark.parametrize("name", PATTERNS)
def test_teacher_forcing_at_once_is_the_loop_that_feeds_the_truth(name: str, outputs: Outputs) -> None:
    """M20: with output recurrence and with hidden recurrence too; values and every gradient."""
    model, run = fed_back(name, outputs)
    at_once, looped = run(lf.TeacherForcing()), run(Truth())
    assert_same(at_once, looped)
    weights = randn(*at_once.shape)
    assert_same(gradients((at_once * weights).sum(), model), gradients((looped * weights).sum(), model))


@pytest.mark.parametrize("outputs", [lf.Classes(3), lf.Reals(3)], ids=["Classes", "Reals"])
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("coin", lf.Coin)
def test_scheduled_sampling_runs_from_all_truth_to_none(name: str, outputs: Outputs, coin: lf.Coin) -> None:
    """M21: training may mix teacher-forced and free-running inputs; p=0 is one, p=1 is the other, p=½ is neither."""
    model, run = fed_back(name, outputs)
    forced, free = run(lf.TeacherForcing()), run(lf.FreeRunning())
    assert not torch.allclose(forced, free)
    for p, needed in ((0.0, forced), (1.0, free)):
        came = run(lf.ScheduledSampling(p, coin=coin))
        assert_same(came, needed)
        assert_same(gradients(came.square().sum(), model), gradients(needed.square().sum(), model))
    mixed = run(lf.ScheduledSampling(0.5, coin=coin, generator=torch.Generator().manual_seed(1)))
    assert not torch.allclose(mixed, forced)
    assert not torch.allclose(mixed, free)


@pytest.mark.parametrize("pick", [lf.Soft(), lf.Raw(), lf.Greedy(), lf.Sample(torch.Generator().manual_seed(0))])
def test_scheduled_sampling_picks_as_free_running_does(pick: lf.Soft) -> None:
    o, y = randn(50, 3), torch.randint(3, (50,))
    own = lf.ScheduledSampling(1.0, pick=pick).next(o, y, lf.Classes(3))
    if isinstance(pick, lf.Sample):
        assert own.sum(-1).eq(1).all()
        assert not own.argmax(-1).equal(o.argmax(-1))
    else:
        assert_same(own, lf.FreeRunning(pick).next(o, None, lf.Classes(3)), 0)


def chosen(feeding: lf.ScheduledSampling, batch: int = 1000) -> Tensor:
    """Which sequences of a batch were fed their own output, at one step."""
    return feeding.next(torch.ones(batch, 1), torch.zeros(batch, 1), lf.Reals(1))[:, 0]


def test_the_coin_is_thrown_once_a_step_or_for_every_sequence() -> None:
    generator = torch.Generator().manual_seed(0)
    per_element = lf.ScheduledSampling(0.3, generator=generator)
    assert float(chosen(per_element).mean()) == pytest.approx(0.3, abs=0.05)
    per_step = lf.ScheduledSampling(0.3, coin=lf.Coin.STEP, generator=generator)
    throws = [chosen(per_step, 7) for _ in range(1000)]
    assert all(throw.unique().numel() == 1 for throw in throws)
    assert float(torch.stack(throws).mean()) == pytest.approx(0.3, abs=0.05)


def test_scheduled_sampling_is_the_generators_and_leaves_the_global_one_alone() -> None:
    before = torch.get_rng_state()
    one, same, other = (
        chosen(lf.ScheduledSampling(0.5, generator=torch.Generator().manual_seed(s))) for s in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_probability_follows_its_schedule() -> None:
    feeding = lf.ScheduledSampling(lf.Ramp(0.0, 0.8, over=100))
    assert [feeding.at(i).probability for i in (0, 25, 100, 1000)] == [0.0, 0.2, 0.8, 0.8]
    assert lf.ScheduledSampling(lambda i: 1 / (1 + i)).at(3).probability == 0.25
    assert not chosen(feeding.at(0)).any()
    assert float(chosen(feeding.at(100)).mean()) == pytest.approx(0.8, abs=0.05)
    assert feeding.at(100).at(0) == feeding


@pytest.mark.parametrize("outputs", [lf.Classes(3), lf.Reals(3)], ids=["Classes", "Reals"])
@pytest.mark.parametrize("name", PATTERNS)
def test_generalised_teacher_forcing_runs_from_none_of_the_truth_to_all(name: str, outputs: Outputs) -> None:
    model, run = fed_back(name, outputs)
    for alpha, needed in ((0.0, run(lf.FreeRunning())), (1.0, run(lf.TeacherForcing()))):
        got = run(lf.GeneralisedTeacherForcing(alpha))
        assert_same(got, needed)
        assert_same(gradients(got.square().sum(), model), gradients(needed.square().sum(), model))
    mixed = run(lf.GeneralisedTeacherForcing(0.5))
    assert not any(torch.allclose(mixed, run(other)) for other in (lf.FreeRunning(), lf.TeacherForcing()))


def test_generalised_teacher_forcing_is_the_mixture_of_hess_et_al() -> None:
    """ỹ = (1 - α) ŷ + α y, and ∂ỹ/∂o is (1 - α) ∂ŷ/∂o."""
    o, y, outputs = randn(4, 3).requires_grad_(), torch.randint(3, (4,)), lf.Classes(3)
    fed = lf.GeneralisedTeacherForcing(0.3).next(o, y, outputs)
    assert_same(fed, 0.7 * o.softmax(-1) + 0.3 * outputs.encode(y).to(f64))
    weights = randn(4, 3)
    (got,) = torch.autograd.grad(fed, o, weights)
    (needed,) = torch.autograd.grad(o.softmax(-1), o, 0.7 * weights)
    assert_same(got, needed)
    assert not lf.GeneralisedTeacherForcing(0.3, lf.Greedy()).next(o, y, outputs).requires_grad
    with pytest.raises(ValueError, match="an alpha from 0 to 1; got 1.5"):
        lf.GeneralisedTeacherForcing(1.5)
