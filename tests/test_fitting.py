"""One optimiser loop: what reaches the optimiser, which weights remain, when it stops, and what it says."""

import io
import math
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import loopfold as lf
from loopfold.wiring import Pattern

pytestmark = pytest.mark.usefixtures("one_thread")


def line(lr: float = 0.1) -> tuple[nn.Linear, torch.optim.SGD]:
    """o = w x with w = 0: against y = 1 at x = 1, the loss (w - 1)² has the gradient 2 (w - 1)."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr)


ONE = [(torch.ones(1, 1), torch.ones(1, 1))]


def square(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def classifier(seed: int = 0, dropout: float = 0.0) -> tuple[lf.SequenceToOne, Tensor, Tensor]:
    """A network, and 64 sequences whose sum is above 0 or below."""
    torch.manual_seed(seed)
    model = lf.SequenceToOne(lf.Stacked([lf.GRU(1, 8), lf.GRU(8, 8)], dropout=dropout), outputs=2)
    x = torch.randn(10, 64, 1)
    return model, x, (x.sum((0, 2)) > 0).long()


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=0.01)


# ------------------------------------------------------------------ the loop


def test_it_is_the_loop_that_one_would_write() -> None:
    """To the last bit, with dropout, clipping and a schedule."""
    ours, x, y = classifier(dropout=0.3)
    optimiser = adam(ours)
    fitted = lf.fit(ours, [(x, y)], 20, optimiser=optimiser, schedule=CosineAnnealingLR(optimiser, 20), clip=0.1)

    theirs, x, y = classifier(dropout=0.3)
    optimiser = adam(theirs)
    schedule = CosineAnnealingLR(optimiser, 20)
    losses = []
    for _ in range(20):
        optimiser.zero_grad()
        loss = theirs.loss(theirs(x), y) / 64
        loss.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
    assert fitted.losses == losses
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert (fitted.steps, fitted.valid, fitted.best, fitted.stopped_early) == (20, {}, None, False)


def test_the_same_seed_gives_the_same_result() -> None:
    runs = []
    for _ in range(2):
        model, x, y = classifier(dropout=0.5)
        runs.append(lf.fit(model, [(x, y)], 10, valid=[(x, y)], evaluate_every=3))
    assert runs[0] == runs[1]


def test_the_default_optimiser_learns_and_leaves_frozen_parameters_alone() -> None:
    model, x, y = classifier()
    model.readout.requires_grad_(False)
    V = model.V.clone()
    fitted = lf.fit(model, [(x, y)], 200)
    assert fitted.losses[-1] < 0.7 * fitted.losses[0]
    assert torch.equal(model.V, V)


@pytest.mark.parametrize(("clip", "w"), [(1.0, 0.1), (None, 0.2), (1e9, 0.2), (0.01, 0.001)])
def test_clipping_bounds_the_norm_of_the_gradient(clip: float | None, w: float) -> None:
    model, optimiser = line()
    lf.fit(model, ONE, 1, loss=square, optimiser=optimiser, clip=clip)  # the gradient is -2, the rate 0.1
    assert model.weight.item() == pytest.approx(w, rel=1e-4)


def test_only_what_the_optimiser_steps_is_clipped() -> None:
    (stepped, optimiser), (other, _) = line(), line()
    both = nn.ModuleList([stepped, other])
    lf.fit(
        both,
        ONE,
        1,
        loss=lambda both, *batch: square(stepped, *batch) + 1e6 * square(other, *batch),
        optimiser=optimiser,
    )
    assert stepped.weight.item() == pytest.approx(0.1, rel=1e-4)
    assert other.weight.item() == 0


def test_a_schedule_may_be_a_function_of_the_step() -> None:
    model, optimiser = line(0.5)
    seen: list[int] = []
    rates: list[float] = []

    def half(step: int) -> float:
        seen.append(step)
        return 0.5**step

    def watch(step: int, loss: float) -> None:
        rates.append(optimiser.param_groups[0]["lr"])

    lf.fit(model, ONE, 3, loss=square, optimiser=optimiser, schedule=half, clip=None, watch=watch)
    assert rates == [0.25, 0.125, 0.0625]  # after each step, the rate of the next
    assert seen == [0, 1, 2, 3]
    w = 0.0
    for rate in (0.5, 0.25, 0.125):
        w -= rate * 2 * (w - 1)
    assert model.weight.item() == pytest.approx(w)


def test_a_ramp_schedules_the_default_optimiser() -> None:
    model, _ = line()
    lf.fit(model, ONE, 4, loss=square, schedule=lf.Ramp(1.0, 0.0, over=2))
    assert model.weight.item() == pytest.approx(0.0015, rel=0.01)  # Adam moves by its rate: 1, 0.5, 0 and 0 thousandths


def test_a_plateau_is_that_of_what_is_measured() -> None:
    figures = iter([3.0, 2.0, 2.0, 1.0, 1.0])
    model, optimiser = line(1.0)
    rates: list[float] = []

    def valid(model: nn.Module) -> float:
        rates.append(optimiser.param_groups[0]["lr"])
        return next(figures)

    schedule = ReduceLROnPlateau(optimiser, factor=0.5, patience=0)
    lf.fit(model, ONE, 9, loss=square, optimiser=optimiser, schedule=schedule, valid=valid, evaluate_every=2)
    assert rates == [1.0, 1.0, 1.0, 0.5, 0.5]
    assert optimiser.param_groups[0]["lr"] == 0.25


def test_an_ordinary_module_with_a_loss() -> None:
    x = torch.linspace(-1, 1, 50)[:, None]
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    fitted = lf.fit(model, [(x, x**2)], 300, loss=square, optimiser=adam(model))
    assert fitted.losses[-1] < 0.01


# ------------------------------------------------------------------ patterns and their own loss


SIZE = 3  # of inputs, of the vectors and of the outputs
Make = Callable[[lf.Outputs], Pattern]
PATTERNS: dict[str, Make] = {
    "SequenceToSequence": lambda outputs: lf.SequenceToSequence(lf.Elman(SIZE, 8), outputs),
    "SequenceToOne": lambda outputs: lf.SequenceToOne(lf.LSTM(SIZE, 8), outputs),
    "OutputRecurrence": lambda outputs: lf.OutputRecurrence(SIZE, 8, outputs),
    "VectorToSequence": lambda outputs: lf.VectorToSequence(lf.GRU(SIZE + SIZE, 8), outputs),
    "EncoderDecoder": lambda outputs: lf.EncoderDecoder(lf.GRU(SIZE, 8), lf.GRU(8 + SIZE, 8), outputs),
    "Autoencoder": lambda outputs: lf.Autoencoder(lf.GRU(SIZE, 8), lf.GRU(8 + SIZE, 8), outputs),
    "Bidirectional": lambda outputs: lf.SequenceToSequence(
        lf.Stacked([lf.Bidirectional(lf.GRU(SIZE, 4), lf.GRU(SIZE, 4)), lf.Elman(8, 8)]), outputs
    ),
}
OUTPUTS = [lf.Classes(SIZE), lf.Reals(SIZE)]


def data(model: Pattern, tau: int, batch: int) -> tuple[Tensor, Tensor]:
    x = F.one_hot(torch.randint(SIZE, (tau, batch)), SIZE).float()
    if isinstance(model, lf.Autoencoder):
        return x, model.targets(x)
    y = x.cumsum(0) / tau if isinstance(model.outputs, lf.Reals) else x.argmax(-1).roll(1, 0)
    if isinstance(model, lf.VectorToSequence):
        return x[0], y
    return x, y[-1] if isinstance(model, lf.SequenceToOne) else y


@pytest.mark.parametrize("outputs", OUTPUTS, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_learns_by_its_own_loss(name: str, outputs: lf.Outputs) -> None:
    model = PATTERNS[name](outputs)
    x, y = data(model, 5, 16)
    with torch.no_grad():
        o = model.given(x, y)
        mean = float(outputs.losses(o, y).mean())  # over the targets: steps and sequences, not numbers of a vector
    fitted = lf.fit(model, [(x, y)], 60, optimiser=adam(model))
    assert fitted.losses[0] == pytest.approx(mean, rel=1e-5)
    assert fitted.losses[-1] < 0.9 * fitted.losses[0]


@pytest.mark.parametrize("outputs", OUTPUTS, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_with_lengths_the_loss_is_that_of_each_sequence_by_itself(
    name: str, outputs: lf.Outputs, kind: Callable[[list[int]], Any]
) -> None:
    """And padding counts for nothing. An encoder-decoder has lengths of x alone, so all of its y counts."""
    model = PATTERNS[name](outputs)
    lengths = [6, 2, 5]
    x, y = data(model, 6, 3)
    total, targets = 0.0, 0
    padded_x, padded_y = x.clone(), y.clone()
    with torch.no_grad():
        for i, n in enumerate(lengths):
            x_i = x[i : i + 1] if isinstance(model, lf.VectorToSequence) else x[:n, i : i + 1]
            if isinstance(model, lf.SequenceToOne):
                y_i = y[i : i + 1]
            else:
                y_i = y[: 6 if isinstance(model, lf.EncoderDecoder) else n, i : i + 1]
            o = model.given(x_i, y_i)
            total += float(model.loss(o, y_i))
            targets += o.shape[:-1].numel()
            if not isinstance(model, lf.VectorToSequence):
                padded_x[n:, i] = 7.0
            if not isinstance(model, lf.SequenceToOne | lf.EncoderDecoder):
                padded_y[n:, i] = 1
    fitted = lf.fit(model, [(padded_x, padded_y, kind(lengths))], 1)
    assert fitted.losses[0] == pytest.approx(total / targets, rel=1e-5)


@pytest.mark.parametrize("outputs", OUTPUTS, ids=lambda o: type(o).__name__)
def test_a_pattern_that_makes_its_targets_needs_x_alone(outputs: lf.Outputs) -> None:
    model = PATTERNS["Autoencoder"](outputs)
    x, y = data(model, 6, 3)
    lengths = [6, 2, 5]

    def first(batch: Any) -> float:
        return lf.fit(deepcopy(model), [batch], 1).losses[0]

    assert first(x) == first((x,)) == first((x, y)) == first((x, y.clone(), None))
    assert first((x, None, lengths)) == first((x, y, lengths)) != first(x)
    for other in (y.roll(1, 0), y[:-1], "y"):
        with pytest.raises(ValueError, match=r"Autoencoder makes its targets from x: got a y that .*type \(x,\) or"):
            first((x, other))
    with pytest.raises(ValueError, match="a y that differs"):
        first((x, y.roll(1, 0), lengths))


def test_scheduled_sampling_moves_with_the_step() -> None:
    """A batch may hold anything for a loss of one's own: here what is fed back at this step."""
    model = lf.OutputRecurrence(SIZE, 8, outputs=SIZE)
    x, y = data(model, 5, 4)
    feeding = lf.ScheduledSampling(lf.Ramp(0.0, 1.0, over=4))
    seen = []

    def loss(model: lf.OutputRecurrence, x: Tensor, y: Tensor, feeding: lf.ScheduledSampling) -> Tensor:
        seen.append(feeding.probability)
        return model.loss(model(x, y, feeding), y)

    lf.fit(model, lambda step: (x, y, feeding.at(step)), 5, loss=loss)
    assert seen == [0.0, 0.25, 0.5, 0.75, 1.0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_follow_the_model_to_its_device() -> None:
    model, x, y = classifier()
    model.cuda()
    fitted = lf.fit(model, [(x, y, torch.full((64,), 10))], 5, valid=[(x, y)])
    assert fitted.best == 5


# ------------------------------------------------------------------ batches


def test_batches_may_be_a_data_loader_read_epoch_after_epoch() -> None:
    x = torch.arange(6.0)[:, None]
    loader = DataLoader(TensorDataset(x, x), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(0))
    seen: list[float] = []

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.extend(x.flatten().tolist())
        return square(model, x, y)

    lf.fit(line()[0], loader, 3 * len(loader), loss=loss)
    epochs = [seen[:6], seen[6:12], seen[12:]]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4, 5] for epoch in epochs)
    assert epochs[0] != epochs[1]  # shuffled again


def test_batches_may_be_a_function_of_the_step() -> None:
    steps: list[int] = []

    def batch(step: int) -> tuple[Tensor, Tensor]:
        steps.append(step)
        return ONE[0]

    lf.fit(line()[0], batch, 4, loss=square)
    assert steps == [0, 1, 2, 3]


def test_of_an_iterator_no_batch_more_is_taken_than_there_are_steps() -> None:
    batches = iter(ONE * 5)
    lf.fit(line()[0], batches, 3, loss=square)
    assert len(list(batches)) == 2


def test_a_batch_that_is_no_tuple_is_one_argument() -> None:
    fitted = lf.fit(line()[0], [torch.ones(2, 1)], 2, loss=lambda model, x: model(x).square().mean())
    assert fitted.losses == [0.0, 0.0]


def test_a_spent_generator_gives_one_clear_error() -> None:
    with pytest.raises(ValueError, match=r"after 3 of 10 steps.*got a generator, expected a list, a DataLoader"):
        lf.fit(line()[0], (batch for batch in ONE * 3), 10, loss=square)
    with pytest.raises(ValueError, match="batches is empty: got a list with no batch, expected at least one"):
        lf.fit(line()[0], [], 10, loss=square)


# ------------------------------------------------------------------ the best weights


def scripted(figures: list[float]) -> tuple[nn.Linear, dict[str, Any], list[float]]:
    """Weights that change with every step, and a `valid` that gives these figures one after the other."""
    model, optimiser = line()
    weights: list[float] = []

    def valid(model: nn.Linear) -> float:
        weights.append(float(model.weight))
        return figures[len(weights) - 1]

    return model, {"loss": square, "optimiser": optimiser, "valid": valid, "evaluate_every": 1}, weights


def test_the_best_weights_are_put_back() -> None:
    model, options, weights = scripted([3.0, 1.0, 2.0, 1.0, 5.0])
    fitted = lf.fit(model, ONE, 5, **options)
    assert len(set(weights)) == 5
    assert fitted.valid == {1: 3.0, 2: 1.0, 3: 2.0, 4: 1.0, 5: 5.0}
    assert fitted.best == 2  # of equals, the first
    assert model.weight.item() == weights[1]
    assert not fitted.stopped_early


def test_buffers_are_part_of_the_weights() -> None:
    norm = nn.BatchNorm1d(1)
    model = nn.Sequential(norm, nn.Linear(1, 1))
    means: list[Tensor] = []

    def valid(model: nn.Sequential) -> int:
        means.append(norm.get_buffer("running_mean").clone())
        return len(means)

    lf.fit(model, [(torch.randn(8, 1) + 5, torch.zeros(8, 1))], 3, loss=square, valid=valid, evaluate_every=1)
    assert means[0] < means[1] < means[2]
    assert norm.get_buffer("running_mean") == means[0]


def test_patience_counts_measurements_that_are_no_better() -> None:
    model, options, weights = scripted([3.0, 4.0, 2.0, 2.0, 9.0, 1.0])
    fitted = lf.fit(model, ONE, 6, patience=2, **options)
    assert list(fitted.valid) == [1, 2, 3, 4, 5]
    assert fitted.stopped_early
    assert fitted.best == 3
    assert model.weight.item() == weights[2]


@pytest.mark.parametrize(("steps", "every", "measured"), [(10, 4, [4, 8, 10]), (8, 4, [4, 8]), (3, 100, [3])])
def test_it_is_measured_every_so_often_and_at_the_end(steps: int, every: int, measured: list[int]) -> None:
    fitted = lf.fit(line()[0], ONE, steps, loss=square, valid=ONE, evaluate_every=every)
    assert list(fitted.valid) == measured


def test_valid_batches_are_scored_by_the_mean_of_their_losses() -> None:
    model, optimiser = line()
    held_out = [(torch.ones(1, 1), torch.full((1, 1), y)) for y in (1.0, 3.0)]
    fitted = lf.fit(model, ONE, 1, loss=square, optimiser=optimiser, clip=None, valid=held_out)
    assert fitted.valid[1] == pytest.approx(((0.2 - 1) ** 2 + (0.2 - 3) ** 2) / 2)


def test_measuring_keeps_no_gradient_and_modes_are_put_back() -> None:
    model, x, y = classifier(dropout=0.5)
    model.eval()
    model.readout.train()  # a mixture, to be found again
    before = {part: part.training for part in model.modules()}
    seen: list[tuple[str, bool, bool]] = []

    def loss(model: lf.SequenceToOne, x: Tensor, y: Tensor) -> Tensor:
        modes = {part.training for part in model.modules()}
        seen.append(("loss", modes == {True}, torch.is_grad_enabled()))
        return model.loss(model(x), y)

    def valid(model: nn.Module) -> float:
        modes = {part.training for part in model.modules()}
        seen.append(("valid", modes == {False}, torch.is_grad_enabled()))
        return 1.0

    lf.fit(model, [(x, y)], 3, loss=loss, valid=valid, evaluate_every=2)
    train, measure = ("loss", True, True), ("valid", True, False)
    assert seen == [train, train, measure, train, measure]
    assert {part: part.training for part in model.modules()} == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_best_weights_and_the_modes_survive_an_interrupt(error: type[BaseException]) -> None:
    model, options, weights = scripted([1.0, 2.0, 3.0])
    model.eval()

    def batches() -> Iterator[Any]:
        yield from ONE * 3
        raise error

    with pytest.raises(error):
        lf.fit(model, batches(), 10, **options)
    assert len(weights) == 3
    assert model.weight.item() == weights[0]
    assert not model.training


# ------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_with_the_best_weights(bad: float) -> None:
    model, options, weights = scripted([1.0, 2.0, 3.0])
    batches = [*ONE, *ONE, (torch.ones(1, 1), torch.full((1, 1), bad))]
    with pytest.raises(
        lf.Diverged, match=rf"at step 3, loss.*got {bad} and .*best weights, those of step 1\. Try a lower"
    ):
        lf.fit(model, batches, 3, **options)
    assert model.weight.item() == weights[0]


def test_a_gradient_that_is_not_finite_never_reaches_the_weights() -> None:
    model, optimiser = line()

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return model(x).abs().sqrt().sum()  # 0, with an infinite slope

    with pytest.raises(lf.Diverged, match=r"at step 1, loss and gradient's norm must be finite: got 0 and (nan|inf)\."):
        lf.fit(model, ONE, 3, loss=loss, optimiser=optimiser)
    assert model.weight.item() == 0


def test_a_figure_that_is_not_finite_stops_it_too() -> None:
    model, options, weights = scripted([1.0, math.nan])
    with pytest.raises(lf.Diverged, match="at step 2, what valid gives must be finite: got nan"):
        lf.fit(model, ONE, 3, **options)
    assert model.weight.item() == weights[0]


def test_a_pattern_needs_x_and_y() -> None:
    model, x, y = classifier()
    with pytest.raises(ValueError, match=r"got a batch of \(10, 64, 1\); expected \(x, y\).*type \[\(x, y\)\]"):
        lf.fit(model, (x, y), 3)


def test_a_module_needs_a_loss() -> None:
    with pytest.raises(TypeError, match=r"Linear has no loss of its own: got loss=None, expected .*cross_entropy"):
        lf.fit(line()[0], ONE, 3)


def test_a_loss_is_one_number() -> None:
    with pytest.raises(TypeError, match=r"loss: got a tensor \(2, 1\), expected a tensor of one number.*\.mean\(\)"):
        lf.fit(line()[0], [torch.ones(2, 1)], 3, loss=lambda model, x: model(x))
    with pytest.raises(TypeError, match="loss: got float"):
        lf.fit(line()[0], [torch.ones(2, 1)], 3, loss=lambda model, x: 1.0)  # type: ignore[arg-type, return-value]


MODEL, OPTIMISER = line()
LBFGS = torch.optim.LBFGS(MODEL.parameters())
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no steps": ({"steps": 0}, "steps as a whole number of at least 1"),
    "steps that are no number": ({"steps": 1e3}, "steps as a whole number"),
    "steps left open": ({"steps": None}, "steps as a whole number"),
    "x and y": ({"steps": torch.ones(1)}, r"steps: got a tensor, .*type fit\(model, \[\(x, y\)\], steps\)"),
    "evaluate_every": ({"evaluate_every": 0}, "evaluate_every as a whole number"),
    "patience": ({"patience": 0, "valid": ONE}, "patience as a whole number"),
    "patience alone": ({"patience": 3}, "patience needs something to measure"),
    "clip": ({"clip": 0.0}, "clip: got 0.0, expected a number above 0, or None"),
    "optimiser": ({"optimiser": torch.optim.Adam}, "optimiser: got .* expected one such as torch.optim.Adam"),
    "LBFGS": ({"optimiser": LBFGS}, "LBFGS computes the loss several times a step: expected .* torch.optim.Adam"),
    "another's optimiser": ({"optimiser": line()[1]}, "no parameter of this model"),
    "another's schedule": ({"schedule": CosineAnnealingLR(line()[1], 3)}, "type optimiser=schedule.optimizer"),
    "a generator": ({"valid": (batch for batch in ONE)}, "got a generator, expected a list"),
    "nothing to measure": ({"valid": []}, "valid is empty"),
    "a number to measure": ({"valid": 3}, "valid: got 3, expected a list, a DataLoader or a function model -> number"),
    "a figure that is none": ({"valid": lambda model: None}, "valid is a function that gives one number: got None"),
    "figures": ({"valid": lambda model: torch.ones(2)}, r"gives one number: got tensor\(\[1., 1.\]\)"),
    "a valid without the model": ({"valid": lambda: 1.0}, "valid: got a function that does not take one argument"),
    "no batches": ({"batches": None}, "batches: got None, expected a list, a DataLoader or a function step -> batch"),
    "batches by name": ({"batches": "train"}, "batches: got 'train', expected a list"),
    "batches without the step": (
        {"batches": lambda: ONE[0]},
        "batches: got a function that does not take one argument, expected a function step -> batch",
    ),
    "clip as text": ({"clip": "1"}, "clip: got '1', expected a number above 0, or None"),
    "a schedule by name": ({"schedule": "cosine"}, "schedule: got 'cosine', expected one of torch's schedulers, or a"),
    "the class of a schedule": ({"schedule": CosineAnnealingLR}, "schedule: got <class .* expected one of torch's"),
    "a model by name": ({"model": "lstm"}, "model: got 'lstm', expected one such as lf.SequenceToOne"),
    "the class of a model": ({"model": nn.Linear}, "model: got <class .* expected one such as"),
    "a frozen model": (
        {"model": nn.Linear(1, 1).requires_grad_(False)},
        r"no parameter to train, all are frozen: type model.requires_grad_\(\)",
    ),
    "a plateau alone": (
        {"model": MODEL, "optimiser": OPTIMISER, "schedule": ReduceLROnPlateau(OPTIMISER)},
        "ReduceLROnPlateau needs something to measure: got valid=None",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_say_what_is_wrong(name: str) -> None:
    options, message = WRONG[name]
    given = {"model": line()[0], "batches": ONE, "steps": 2, "loss": square, **options}
    with pytest.raises((ValueError, TypeError), match=message):
        lf.fit(**given)


def test_an_optimiser_of_frozen_parameters_is_refused() -> None:
    both = nn.ModuleList([line()[0], line()[0]])
    both[0].requires_grad_(False)
    with pytest.raises(ValueError, match="the optimiser has no parameter of this model to train"):
        lf.fit(both, ONE, 1, loss=square, optimiser=torch.optim.SGD(both[0].parameters()))


# ------------------------------------------------------------------ looking on


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for screen, shown in ((Screen(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", screen)
        lf.fit(line()[0], ONE, 3, loss=square)
        assert ("3/3" in screen.getvalue()) is shown


def test_watch_takes_the_place_of_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    seen: list[tuple[int, float]] = []
    fitted = lf.fit(line()[0], ONE, 3, loss=square, watch=lambda step, loss: seen.append((step, loss)))
    assert seen == list(enumerate(fitted.losses, start=1))
    assert screen.getvalue() == ""


def test_the_learning_curve() -> None:
    plain = lf.Fit(3, [3.0, 2.0, 1.0], {}).draw()
    assert plain.svg().startswith("<svg")
    measured = lf.Fit(4, [3.0, 2.0, 1.0], {1: 2.5, 2: 2.25, 3: 2.75}).draw()
    assert "loss 1 after 3 steps, valid 2.25 at best, at step 2" in measured.svg()
    assert "losses" not in repr(lf.Fit(3, [3.0, 2.0, 1.0], {}))  # thousands of them would fill the screen
