"""What watches while a run trains: nothing, a terminal, TensorBoard."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from loopfold.language.base import LanguageModel, count_parameters
from loopfold.training.options import Options


@dataclass(frozen=True)
class Plan:
    """What is about to happen."""

    path: str
    options: Options
    model: LanguageModel
    steps: int
    steps_per_epoch: int
    tokens_per_epoch: int
    begin: int  # the step to go on from


class Watcher(ABC):
    """Is told what happens in a run, and is open during it: `with watcher: …`."""

    @abstractmethod
    def begin(self, plan: Plan) -> None: ...

    @abstractmethod
    def step(self, step: int, loss: float) -> None:
        """After every step: its number, and the loss in nats a token."""

    @abstractmethod
    def entry(self, entry: dict[str, Any]) -> None:
        """A line of the learning curve, as in `metrics.jsonl`."""

    @abstractmethod
    def __enter__(self) -> "Watcher": ...

    @abstractmethod
    def __exit__(self, *_: object) -> None: ...


class Silent(Watcher):
    """Says nothing."""

    def begin(self, plan: Plan) -> None: ...

    def step(self, step: int, loss: float) -> None: ...

    def entry(self, entry: dict[str, Any]) -> None: ...

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *_: object) -> None: ...


class Several(Watcher):
    """All of them; each is closed, whichever of them fails to open or close."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self.watchers = watchers

    def begin(self, plan: Plan) -> None:
        for watcher in self.watchers:
            watcher.begin(plan)

    def step(self, step: int, loss: float) -> None:
        for watcher in self.watchers:
            watcher.step(step, loss)

    def entry(self, entry: dict[str, Any]) -> None:
        for watcher in self.watchers:
            watcher.entry(entry)

    def __enter__(self) -> "Several":
        with ExitStack() as stack:  # which closes those that are open if the next fails to open
            for watcher in self.watchers:
                stack.enter_context(watcher)
            self.opened = stack.pop_all()
        return self

    def __exit__(self, *details: Any) -> None:
        self.opened.__exit__(*details)


class Terminal(Watcher):
    """A live line with the loss, tokens a second and the time left; above it, a line for every evaluation."""

    def __init__(self, name: str = "training") -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.progress = Progress(
            TextColumn(name),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s  left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[curve]}"),
            console=Console(stderr=True),
        )
        self.curve: list[float] = []

    def begin(self, plan: Plan) -> None:
        self.plan = plan
        self.progress.start()
        self.loss, self.since, self.at = math.nan, time.monotonic(), plan.begin
        self.task = self.progress.add_task(
            "", total=plan.steps, completed=plan.begin, loss=math.nan, speed=0.0, curve=""
        )
        self.progress.console.print(
            f"{plan.steps:,} steps, {plan.steps_per_epoch:,} an epoch of {plan.tokens_per_epoch:,} tokens; "
            f"{count_parameters(plan.model):,} parameters"
            + (f"; going on from step {plan.begin:,}" if plan.begin else ""),
            highlight=False,
        )
        self.progress.console.print(f"run folder {plan.path}", highlight=False, soft_wrap=True, markup=False)
        self.progress.console.print(f"{'epoch':>6} {'step':>7} {'train':>7} {'valid':>7} {'perplexity':>11}")

    def step(self, step: int, loss: float) -> None:
        self.loss = loss if math.isnan(self.loss) else 0.98 * self.loss + 0.02 * loss
        seconds = time.monotonic() - self.since
        per_step = self.plan.tokens_per_epoch / self.plan.steps_per_epoch
        if seconds > 0.2 or step == self.plan.steps:
            speed = per_step * (step - self.at) / seconds
            self.progress.update(self.task, completed=step, loss=self.loss, speed=speed)
            self.since, self.at = time.monotonic(), step

    def entry(self, entry: dict[str, Any]) -> None:
        if "valid" not in entry:
            return
        self.curve.append(entry["valid"])
        self.progress.update(self.task, curve=sparkline(self.curve))
        self.progress.console.print(
            f"{entry['epoch']:>6.1f} {entry['step']:>7,} {entry['train']:>7.3f} {entry['valid']:>7.3f} "
            f"{math.exp(min(entry['valid'], 700)):>11.2f}",
            highlight=False,
        )

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress.live.is_started:
            self.progress.stop()


def sparkline(values: Sequence[float], width: int = 20) -> str:
    """The last values as a little curve.

    >>> sparkline([3.0, 2.0, 1.5, 1.0])
    '█▅▃▁'
    """
    kept = [v for v in values[-width:] if math.isfinite(v)] or [0.0]
    low, high = min(kept), max(kept)
    scale = 7 / (high - low) if high > low else 0
    return "".join("▁▂▃▄▅▆▇█"[int((v - low) * scale + 0.5)] for v in kept)


class TensorBoard(Watcher):
    """Event files for TensorBoard, in the run folder."""

    def __init__(self) -> None:
        try:  # now, before there is a run folder
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoard is not installed: type pip install 'loopfold[tensorboard]'.") from error
        self.writer_at = SummaryWriter
        self.writer: Any = None

    def begin(self, plan: Plan) -> None:
        self.writer = self.writer_at(plan.path, purge_step=plan.begin + 1)

    def step(self, step: int, loss: float) -> None: ...

    def entry(self, entry: dict[str, Any]) -> None:
        for name in ("train", "valid", "gradient_norm", "learning_rate"):
            if name in entry:
                self.writer.add_scalar(name, entry[name], entry["step"])

    def __enter__(self) -> "TensorBoard":
        return self

    def __exit__(self, *_: object) -> None:
        if self.writer is not None:
            self.writer.close()
