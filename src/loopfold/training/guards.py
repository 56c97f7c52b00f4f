"""What must hold while a run trains, and what to say if it does not; signals."""

import errno
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from loopfold.errors import Argument, Mendable, OptionError
from loopfold.language.base import LanguageModel, count_parameters
from loopfold.memory import check_memory
from loopfold.processes import Processes, ProcessLost
from loopfold.text.corpus import is_there_once
from loopfold.training.cells import blaming
from loopfold.training.checkpoint import forms_of
from loopfold.training.folder import RESUME, RunFolder
from loopfold.training.making import autocast_of
from loopfold.training.options import Options
from loopfold.training.run import check_device


class Diverged(Mendable):
    """A loss or a gradient that is no longer a finite number."""


def diverged(folder: RunFolder, step: int, what: str, loss: float, norm: float) -> Diverged:
    clip = (" or ", Argument("clip")) if folder.options.clip else (", or clip the gradient: ", Argument("clip", 1))
    return Diverged(
        f"at step {step} the {what} is {loss:.4g} and the gradient's norm {norm:.4g}, so training stopped. "
        f"The last good checkpoint, of step {folder.checkpoint['step']}, is in {folder.path}. "
        "Start again with a lower ",
        Argument("learning_rate"),
        *clip,
        ".",
    )


def check_sources(options: Options) -> None:
    """A run must be able to read its text again."""
    for source in options.texts:
        if is_there_once(source):
            raise OptionError(
                f"{source} is not a file, so the run could not read it again: save it to one, or pipe it in and name -."
            )


def check_shares(streams: int, processes: Processes) -> None:
    if streams % processes.count:
        shared = f"{streams} streams cannot be shared by {processes.count} processes; change "
        raise OptionError(shared, Argument("streams"), ".")


def check_watched(options: Options, valid: bool) -> None:
    """That there is a valid text, if the run is guided by one."""
    watching = {
        Argument("patience"): options.patience is not None,
        Argument("schedule", "plateau"): options.schedule == "plateau",
        Argument("average", "triggered"): options.average == "triggered",
    }
    for what, watches in watching.items():
        if watches and not valid:
            raise OptionError(what, " needs a valid text to watch, and there is none: leave it out, or give one.")


def check_room(model: LanguageModel, options: Options, tokens: int, processes: Processes) -> None:
    """That weights, gradients, what the optimiser keeps, and the values of one window fit into memory.

    `model` may be an outline; what it holds already needs no more. `tokens` is the length of the text.
    """
    streams, n = -(-min(options.streams, tokens) // processes.count), options.sizes[-1]  # of this process
    once = min(options.window * streams, tokens)
    values = {
        "recurrent": once * (sum(options.sizes) + (options.embedding_size or 0)),
        "window": once * options.span * n,
        "convolution": (once + options.span * streams) * n * max(1, (options.span - 1).bit_length()),
    }[options.model]
    kept = 2 if options.optimiser == "adamw" else int(options.momentum > 0)  # for each number that is trained
    kept += 0 if options.average == "none" else 2  # in float64
    weights = sum(p.numel() * (p.is_meta + p.requires_grad * (1 + kept)) for p in model.parameters())
    if weights > values:
        names = ["hidden_size", *(["embedding_size"] if options.embedding_size else [])]
        names += ["span"] * (options.model == "window") + ["layers"] * (len(options.sizes) > 1)
        names += ["vocabulary_size"] * (options.unit in ("words", "subwords"))
    else:
        names = ["streams", "window", *(["span"] if options.model != "recurrent" else [])]
    advice = [part for name in names for part in (" or ", Argument(name))][1:]
    count = f"{count_parameters(model):,} parameters, {once:,} tokens at a time,"
    needed = 4 * weights + (2 if options.precision == "bf16" else 4) * values
    device = check_device(options.device)
    check_memory(f"to train {options.name} with {count}", needed, device, "choose a smaller ", *advice)


def try_step(model: LanguageModel, options: Options) -> None:
    """One step of a copy, since what a cell keeps of it must not reach training. A cell of the user's own may fail."""
    failed = f"the first step of {options.cell} failed"
    try:
        with blaming(lambda: failed):
            model = deepcopy(model)
            before = forms_of(model)
            with torch.no_grad(), torch.random.fork_rng(devices=[]), autocast_of(options, "cpu"):
                model(torch.zeros(1, 1, dtype=torch.int64), model.initial_context(1))
            if forms_of(model) != before:
                raise ValueError("it changed the parameters that __init__ made, so the model could not be built again")
    except OptionError:
        raise
    except Exception as error:
        if ":" not in options.cell:
            raise
        raise OptionError(f"{failed}: {error}") from error


@contextmanager
def together(path: Path) -> Iterator[None]:
    """Say in one sentence that another process is gone, wherever the exchange with it failed."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, ProcessLost | dist.DistError) and "gloo" not in str(error):  # gloo has no error class
            raise
        raise ProcessLost(
            f"another process of the run has ended or cannot be reached, so this one ends too. If {path} has a "
            f"checkpoint, ",
            RESUME,
            " goes on from it.",
        ) from error


# ------------------------------------------------------------------ signals


class Stopped(Exception):
    """The run in `path` was asked to stop, and was saved first. `signal` is the number of the signal that asked."""

    def __init__(self, message: str, number: int, path: Path) -> None:
        super().__init__(message)
        self.signal, self.path = number, path


HANGUP = getattr(signal, "SIGHUP", signal.SIGTERM)  # the terminal was closed; Windows has no signal for it


class Interrupts:
    """While open, the signals that ask for an end are noted, for the loop to stop at a good moment.

    A second SIGINT is obeyed.
    """

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> "Interrupts":
        self._before = {}
        for number in {signal.SIGINT, signal.SIGTERM, HANGUP}:
            if number == HANGUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # under nohup
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread: signals are someone else's
                return self
        return self

    def _note(self, number: int, frame: Any) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While a watcher is told something: where nobody reads it any more, as after `| head`, the run is to stop."""
        try:
            yield
        except BrokenPipeError:
            self.number = self.number or getattr(signal, "SIGPIPE", signal.SIGTERM)
        except OSError as error:
            if error.errno != errno.EIO:  # which a terminal that was closed gives
                raise
            self.number = self.number or HANGUP

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
