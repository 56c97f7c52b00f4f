"""One optimiser loop for any pattern and any batches; `fit` is to be read from top to bottom."""

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from numbers import Real
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.utils.data import Dataset

from loopfold.drawing.figure import CYCLE, Drawing, new_figure, style
from loopfold.evaluation import evaluating
from loopfold.states import alive, in_evaluation, whole_number
from loopfold.training.loop import Diverged
from loopfold.wiring import Pattern, When

Batches = Iterable[Any] | Callable[[int], Any]
Loss = Callable[..., Tensor]
Valid = Callable[[Any], float] | Iterable[Any]
Watch = Callable[[int, float], None]


@dataclass(frozen=True)
class Fit:
    """How training went. Step 1 is the first.

    `steps`   how many were asked for
    `losses`  the loss of each step's batch, before its update
    `valid`   the figures that were measured, by the step after which they were
    """

    steps: int
    losses: list[float] = field(repr=False)
    valid: dict[int, float]

    @property
    def best(self) -> int | None:
        """The step with the lowest figure of `valid`, whose weights the model has now; None if there was no `valid`."""
        return min(self.valid, key=self.valid.__getitem__, default=None)

    @property
    def stopped_early(self) -> bool:
        """`patience` ran out before the last step."""
        return len(self.losses) < self.steps

    @style()
    def draw(self) -> Drawing:
        """The learning curve: the loss of every step, and what was measured on the way, with a ring around the best."""
        figure = new_figure(7.2, 4.2)
        axes = figure.subplots()
        axes.plot(range(1, len(self.losses) + 1), self.losses, color=CYCLE[0], linewidth=1, label="loss of a batch")
        if self.best is not None:
            look: dict[str, Any] = {"color": CYCLE[1], "clip_on": False}
            axes.plot([*self.valid], [*self.valid.values()], "o-", markersize=4, label="valid", **look)
            axes.plot(self.best, self.valid[self.best], "o", markersize=11, fillstyle="none", **look)
        axes.set(xlabel="steps of training", ylabel="loss", xlim=(0, len(self.losses)))
        axes.legend()
        best = f", valid {self.valid[self.best]:.4g} at best, at step {self.best:,}" if self.best else ""
        return Drawing(figure, f"Learning curve: loss {self.losses[-1]:.4g} after {len(self.losses):,} steps{best}")


def fit(
    model: nn.Module,
    batches: Batches,
    steps: int,
    *,
    loss: Loss | None = None,
    optimiser: torch.optim.Optimizer | None = None,
    schedule: LRScheduler | Callable[[int], float] | None = None,
    clip: float | None = 1.0,
    valid: Valid | None = None,
    evaluate_every: int = 100,
    patience: int | None = None,
    watch: Watch | None = None,
) -> Fit:
    """Train `model` in place for a number of `steps`, one batch each.

    `batches`    (x, y) or (x, y, lengths), time first: a list, a DataLoader or the like, read again when it ends (ten
                 epochs are `steps=10 * len(loader)`); or a function of the step, which gets 0, 1, …; (x,) or
                 (x, None, lengths) for a pattern that makes its targets from x, such as `Autoencoder`
    `loss`       `loss(model, *batch)`, a tensor of one number; by default a pattern's own, the mean over its targets
                 (an EncoderDecoder reads lengths as those of x: all of y counts). With a loss, a batch may hold
                 anything, for example `lambda i: (x, y, feeding.at(i))`
    `optimiser`  by default Adam with a learning rate of 0.001
    `schedule`   of the learning rate: one of torch's schedulers, or a function of the step that gives a factor, such as
                 `lf.Ramp(1, 0, over=2000)`; `ReduceLROnPlateau` follows `valid`, one step a measurement
    `clip`       the largest norm that a gradient may have; None: any
    `valid`      what to measure every `evaluate_every` steps and after the last: a function of the model, the lower the
                 better, or batches, for the mean of their losses. The model ends with its best weights, not its last
    `patience`   stop after so many measurements in a row that are no better than the best
    `watch`      called with the number and the loss of every step, in place of the progress bar on a terminal

    Ctrl-C and `Diverged`, the error for a loss or a gradient that is not finite, leave the best weights in place too.

    >>> from loopfold import GRU, SequenceToOne
    >>> _ = torch.manual_seed(0)
    >>> model = SequenceToOne(GRU(1, 8), outputs=2)
    >>> x = torch.randn(10, 64, 1)
    >>> y = (x.sum((0, 2)) > 0).long()
    >>> fitted = fit(model, [(x, y)], steps=200, optimiser=torch.optim.Adam(model.parameters(), lr=0.01))
    >>> fitted.losses[0] > 0.5, fitted.losses[-1] < 0.1
    (True, True)
    """
    loss = loss or _own_loss
    _check_model(model, optimiser, schedule)
    _check(batches, schedule, clip, valid, steps=steps, evaluate_every=evaluate_every, patience=patience)
    if optimiser is None:
        optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
    if schedule is not None and not isinstance(schedule, LRScheduler):
        schedule = LambdaLR(optimiser, schedule)
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    device = parameters[0].device
    losses: list[float] = []
    figures: dict[int, float] = {}
    best, best_weights, misses = 0, None, 0

    def check_finite(what: str, *numbers: float) -> None:
        if not all(map(math.isfinite, numbers)):
            got = " and ".join(f"{number:.4g}" for number in numbers)
            kept = f" The model has its best weights, those of step {best}." if best else ""
            raise Diverged(f"at step {len(losses)}, {what}: got {got}.{kept} Try a lower learning rate or clip.")

    with in_evaluation(model), nullcontext(watch) if watch else _bar(steps) as tell:  # at the end, modes are as before
        model.train()
        try:
            for step, batch in enumerate(_drawn(batches, steps), start=1):
                optimiser.zero_grad()
                L = _loss_of(batch, model, loss, device)
                L.backward()
                norm = nn.utils.clip_grad_norm_(parameters, math.inf if clip is None else clip)
                losses.append(L.item())
                check_finite("loss and gradient's norm must be finite", losses[-1], norm.item())
                optimiser.step()
                if schedule is not None and not isinstance(schedule, ReduceLROnPlateau):
                    schedule.step()
                tell(step, losses[-1])

                if valid is None or (step % evaluate_every and step != steps):
                    continue
                with evaluating(model):
                    figures[step] = _figure(valid(model)) if callable(valid) else _mean(valid, model, loss, device)
                check_finite("what valid gives must be finite", figures[step])
                if isinstance(schedule, ReduceLROnPlateau):
                    schedule.step(figures[step])
                misses += 1
                if not best or figures[step] < figures[best]:
                    best, best_weights, misses = step, deepcopy(model.state_dict()), 0
                if misses == patience:
                    break
        finally:
            if best_weights is not None:
                model.load_state_dict(best_weights)
    return Fit(steps, losses, figures)


def _drawn(batches: Batches, steps: int) -> Iterator[Any]:
    """So many batches; what ends before is read again."""
    step = 0
    while step < steps:
        begun = step
        for batch in map(batches, range(steps)) if callable(batches) else batches:
            yield batch
            step += 1
            if step == steps:
                return
        if step == 0:
            raise ValueError(f"batches is empty: got a {type(batches).__name__} with no batch, expected at least one.")
        if step == begun:
            raise ValueError(
                f"batches ended after {step} of {steps} steps, and there was nothing when they were read again: got a "
                f"{type(batches).__name__}, expected a list, a DataLoader or a function step -> batch."
            )


def _loss_of(batch: Any, model: nn.Module, loss: Loss, device: torch.device) -> Tensor:
    """A batch that is a tuple or a list holds several arguments, anything else is one; tensors go to the device."""
    parts = batch if isinstance(batch, tuple | list) else (batch,)
    L: Any = loss(model, *(part.to(device) if isinstance(part, Tensor) else part for part in parts))
    if not isinstance(L, Tensor) or L.numel() != 1:
        got = f"a tensor {tuple(L.shape)}" if isinstance(L, Tensor) else type(L).__name__
        raise TypeError(f"loss: got {got}, expected a tensor of one number. To average, type .mean().")
    return L


def _figure(measured: Any) -> float:
    try:
        return float(measured)
    except (TypeError, ValueError, RuntimeError):  # the last where it is a tensor of several numbers
        raise TypeError(f"valid is a function that gives one number: got {measured!r}.") from None


def _mean(batches: Iterable[Any], model: nn.Module, loss: Loss, device: torch.device) -> float:
    losses = [float(_loss_of(batch, model, loss, device)) for batch in batches]
    if not losses:
        raise ValueError("valid is empty: got no batch, expected at least one.")
    return fmean(losses)


def _own_loss(model: nn.Module, *batch: Any) -> Tensor:
    """A pattern's own loss, the mean over its targets."""
    if not isinstance(model, Pattern):
        raise TypeError(
            f"{type(model).__name__} has no loss of its own: got loss=None, expected a function loss(model, *batch), "
            f"such as loss=lambda model, x, y: torch.nn.functional.cross_entropy(model(x), y)."
        )
    wiring = model.wiring
    if not (2 if wiring.targets is None else 1) <= len(batch) <= 3:
        got = ", ".join(str(tuple(p.shape)) if isinstance(p, Tensor) else type(p).__name__ for p in batch)
        raise ValueError(f"got a batch of {got}; expected (x, y) or (x, y, lengths). For one batch, type [(x, y)].")
    x, y, lengths = (*batch, None, None)[:3]
    of_targets = wiring.answers is When.EVERY and (wiring.encoder is None or wiring.targets is not None)
    if wiring.targets is not None:
        own = wiring.targets(x)
        if y is not None and not _same(own, y, lengths if of_targets else None):
            raise ValueError(
                f"{type(model).__name__} makes its targets from x: got a y that differs from them. "
                f"Leave it out: type (x,) or (x, None, lengths)."
            )
        y = own
    o = model.given(x, y) if lengths is None else model.given(x, y, lengths)
    if lengths is None or not of_targets:
        return model.loss(o, y) / o.shape[:-1].numel()
    return model.loss(o, y, lengths) / int(torch.as_tensor(lengths).sum())


def _same(own: Tensor, y: Any, lengths: Any) -> bool:
    """Whether these are the same targets, padding aside."""
    if not isinstance(y, Tensor) or own.shape != y.shape:
        return False
    same = own == y
    return bool((same if lengths is None else same | ~alive(own, torch.as_tensor(lengths))).all())


@contextmanager
def _bar(steps: int) -> Iterator[Watch]:
    """A bar with the loss and the time left, on a terminal alone; it vanishes at the end."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda step, loss: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    shown = TextColumn("loss {task.fields[loss]:.4g}  left")
    columns = TextColumn("fit"), BarColumn(), MofNCompleteColumn(), shown, TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=steps, loss=math.nan)
        yield lambda step, loss: progress.update(task, completed=step, loss=loss)


# ------------------------------------------------------------------ what can be asked for


def _check_model(model: Any, optimiser: Any, schedule: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {model!r}, expected one such as lf.SequenceToOne(lf.GRU(1, 8), outputs=2).")
    trained = {p for p in model.parameters() if p.requires_grad}
    if not trained:
        raise ValueError("the model has no parameter to train, all are frozen: type model.requires_grad_().")
    if optimiser is not None and not isinstance(optimiser, torch.optim.Optimizer):
        raise TypeError(f"optimiser: got {optimiser!r}, expected one such as torch.optim.Adam(model.parameters()).")
    if isinstance(optimiser, torch.optim.LBFGS):
        raise TypeError("LBFGS computes the loss several times a step: expected an optimiser such as torch.optim.Adam.")
    if optimiser is not None and not {p for group in optimiser.param_groups for p in group["params"]} & trained:
        raise ValueError("the optimiser has no parameter of this model to train: make it of model.parameters().")
    if schedule is not None and (isinstance(schedule, type) or not isinstance(schedule, LRScheduler | Callable)):
        raise TypeError(
            f"schedule: got {schedule!r}, expected one of torch's schedulers, or a function of the step that gives a "
            f"factor, such as lf.Ramp(1, 0, over=2000)."
        )
    if isinstance(schedule, LRScheduler) and schedule.optimizer is not optimiser:
        raise ValueError("the schedule is that of another optimiser: type optimiser=schedule.optimizer.")


def _check(batches: Any, schedule: Any, clip: Any, valid: Any, **counts: Any) -> None:
    if isinstance(counts["steps"], Tensor):
        raise TypeError("steps: got a tensor, expected a number. For one batch, type fit(model, [(x, y)], steps).")
    for name, count in counts.items():
        if (name, count) != ("patience", None):
            whole_number("fit", name, count)
    _check_source("batches", batches, "a function step -> batch")
    if clip is not None and not (isinstance(clip, Real) and float(clip) > 0):
        raise ValueError(f"clip: got {clip!r}, expected a number above 0, or None for no clipping.")
    if isinstance(valid, Iterator):
        raise TypeError(f"valid is read many times: got a {type(valid).__name__}, expected a list. Type list(…).")
    if valid is not None:
        _check_source("valid", valid, "a function model -> number")
    needs = {"patience": counts["patience"] is not None, "ReduceLROnPlateau": isinstance(schedule, ReduceLROnPlateau)}
    for name, given in needs.items():
        if given and valid is None:
            raise ValueError(f"{name} needs something to measure: got valid=None, expected batches or a function.")


def _check_source(name: str, source: Any, function: str) -> None:
    if callable(source):
        try:
            inspect.signature(source).bind(None)
        except TypeError:
            raise TypeError(f"{name}: got a function that does not take one argument, expected {function}.") from None
        except ValueError:
            pass  # a function of C may not say what it takes
    elif isinstance(source, str) or not isinstance(source, Iterable | Dataset):
        raise TypeError(f"{name}: got {source!r}, expected a list, a DataLoader or {function}.")
