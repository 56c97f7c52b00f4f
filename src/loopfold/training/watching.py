"""What watches while a run trains: nothing, a terminal, TensorBoard."""

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from loopfold.language.base import LanguageModel, count_parameters
from loopfold.training.options import Options

RECENT = 50  # steps, whose mean loss is shown
SHOWN_EVERY, PRINTED_EVERY = 0.2, 10.0  # seconds


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
    notes: tuple[str, ...] = ()  # what the user should know of the text

    def __str__(self) -> str:
        """As in "gru 320, 104 characters, 682,664 parameters; 1,974 steps, 329 an epoch of 336,003 tokens"."""
        made = f"{self.options.name}, {self.model.vocabulary_size:,} {self.options.unit}"
        of = f"{self.steps:,} steps, {self.steps_per_epoch:,} an epoch of {self.tokens_per_epoch:,} tokens"
        going_on = f"; going on from step {self.begin:,}" if self.begin else ""
        return f"{made}, {count_parameters(self.model):,} parameters; {of}{going_on}"

    @property
    def tokens_per_step(self) -> float:
        return self.tokens_per_epoch / self.steps_per_epoch


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
    """A line for every evaluation; below them, a live one with the loss, tokens a second and the time left.

    `loss` is the mean of the last 50 steps, `train` that of all tokens since the evaluation before; without a valid
    text there is a line for every epoch, with the mean of its steps. Where there is no terminal to draw on, such as in
    a log file, the live line is printed every ten seconds.
    """

    def __init__(self, name: str = "training") -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        class Told(Console):
            def on_broken_pipe(self) -> None:
                """Nobody reads it any more. Rich would end the process, and all since the last checkpoint be lost."""
                self.quiet = True
                raise

        self.name = name
        self.console: Console = Told(stderr=True)
        self.live = self.console.is_interactive or self.console.is_jupyter
        self.progress = Progress(
            TextColumn(name),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}  left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[curve]}"),
            console=self.console,
        )
        self.curve: list[float] = []
        self.losses: deque[float] = deque(maxlen=RECENT)

    def begin(self, plan: Plan) -> None:
        self.plan = plan
        self.begun = self.since = time.monotonic()
        self.at = plan.begin
        self.evaluated = plan.options.holds_out("valid")
        self.unseen: list[float] = []  # losses of the steps since the last line, where nothing is evaluated
        if self.live:
            self.progress.start()
        self.task = self.progress.add_task("", total=plan.steps, completed=plan.begin, said="starting", curve="")
        notes = [f"note: {note}" for note in plan.notes] if self.name == "training" else []  # of a baseline: again
        for line in (str(plan), *notes, f"run folder {plan.path}"):
            self._print(line)
        valid = f" {'valid':>7} {'perplexity':>11}" if self.evaluated else ""
        self._print(f"{'epoch':>6} {'step':>7} {'train':>7}{valid}")

    def step(self, step: int, loss: float) -> None:
        self.losses.append(loss)
        if not self.evaluated:
            self._in_training(step, loss)
        now = time.monotonic()
        seconds = now - self.since
        if seconds < (SHOWN_EVERY if self.live else PRINTED_EVERY) and not (self.live and step == self.plan.steps):
            return
        mean = sum(self.losses) / len(self.losses)
        speed = self.plan.tokens_per_step * (step - self.at) / max(seconds, 1e-9)
        if self.live:
            self.progress.update(self.task, completed=step, said=f"loss {mean:.3f}  {speed:,.0f} tokens/s")
        else:
            left = (self.plan.steps - step) * (now - self.begun) / (step - self.plan.begin)
            name = "" if self.name == "training" else f"{self.name}: "
            self._print(
                f"{name}step {step:,} of {self.plan.steps:,}, loss {mean:.3f}, {speed:,.0f} tokens/s, "
                f"{timedelta(seconds=round(left))} left"
            )
        self.since, self.at = now, step

    def entry(self, entry: dict[str, Any]) -> None:
        if "valid" not in entry:
            return
        self.curve.append(entry["valid"])
        self.progress.update(self.task, curve=sparkline(self.curve))
        count = entry.get("averaged", 0)
        averaged = f"  mean weights of {count:,} step{'s'[: count > 1]}" if count else ""
        epoch = shown_epoch(entry["epoch"])
        self._print(
            f"{epoch:>6} {entry['step']:>7,} {entry['train_since_valid']:>7.3f} {entry['valid']:>7.3f} "
            f"{math.exp(min(entry['valid'], 700)):>11.2f}{averaged}"
        )

    def _in_training(self, step: int, loss: float) -> None:
        """Without a valid text: a line for every epoch, and for the last step."""
        self.unseen.append(loss)
        if step % self.plan.steps_per_epoch == 0 or step == self.plan.steps:
            mean = sum(self.unseen) / len(self.unseen)
            self.curve.append(mean)
            self.progress.update(self.task, curve=sparkline(self.curve))
            self._print(f"{shown_epoch(step / self.plan.steps_per_epoch):>6} {step:>7,} {mean:>7.3f}")
            self.unseen.clear()

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress.live.is_started:
            with suppress(OSError):  # a terminal that was closed
                self.progress.stop()


def shown_epoch(epoch: float) -> str:
    """How many epochs have passed: of less than a tenth, two digits that are not 0.

    >>> shown_epoch(3.25), shown_epoch(1), shown_epoch(0.5), shown_epoch(0.0213)
    ('3.2', '1.0', '0.5', '0.021')
    """
    return f"{epoch:.1f}" if epoch >= 0.1 else f"{epoch:.2g}"


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
