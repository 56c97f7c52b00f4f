"""The training loop, to be read from top to bottom: `train` and `resume` prepare, `_loop` trains."""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from loopfold.errors import Argument, Mendable, OptionError
from loopfold.evaluation import perplexity
from loopfold.language.base import LanguageModel
from loopfold.processes import Processes, ProcessLost, join_processes
from loopfold.states import detached, leaves
from loopfold.text.corpus import Corpus, read_corpus
from loopfold.text.streams import Streams
from loopfold.text.vocabulary import Tokens
from loopfold.training import trust as trusted
from loopfold.training.cells import check_cell
from loopfold.training.checkpoint import forms_of, load_state, model_with, state_of, weights_of
from loopfold.training.contents import check_fields
from loopfold.training.folder import RESUME, RunError, RunFolder, Taken
from loopfold.training.making import make_model, make_vocabulary
from loopfold.training.options import Options
from loopfold.training.run import LOG_EVERY, Run, check_device, check_same_text, check_trust, open_run, read_again
from loopfold.training.watching import Plan, Silent, Watcher


class Diverged(Mendable):
    """A loss or a gradient that is no longer a finite number."""


class Stopped(Exception):
    """The run was asked to stop, and was saved first. `signal` is the number of the signal that asked."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.signal = number


@dataclass(frozen=True)
class Progress:
    """What the loop counts, and a checkpoint keeps."""

    step: int = 0
    nll: float = 0.0  # of the tokens since the last entry of the learning curve
    tokens: int = 0
    best: float | None = None  # nats a token on the valid text, once it was evaluated
    misses: int = 0  # evaluations since then
    seconds: float = 0.0

    @staticmethod
    def of(folder: RunFolder) -> "Progress":
        """What the checkpoint of a folder has kept."""
        try:
            progress = Progress(**folder.checkpoint["progress"])
            check_fields(progress)
            if min(progress.step, progress.tokens, progress.misses) < 0 or not 0 <= progress.seconds < math.inf:
                raise ValueError("a count is below 0, or the time is not a number")
        except (TypeError, ValueError) as error:
            raise RunError(
                f"{folder.path / 'checkpoint.json'} is damaged: its progress is impossible ({error})."
            ) from error
        return progress


@dataclass(frozen=True)
class _Job:
    """What the loop trains, as `train` made it or as a run folder keeps it."""

    folder: RunFolder
    options: Options
    model: LanguageModel
    train_tokens: Tokens
    valid_tokens: Tokens

    @staticmethod
    def of(folder: RunFolder, corpus: Corpus) -> "_Job":
        """What a folder keeps, as its last checkpoint has it."""
        options, vocabulary, name = folder.options, folder.vocabulary, folder.checkpoint["weights"]
        model = model_with(options, vocabulary.size, folder.tensors(name), folder.path / name)
        return _Job(folder, options, model, vocabulary.encode(corpus.train), vocabulary.encode(corpus.valid))


def train(
    options: Options, out: str | Path | None = None, *, watcher: Watcher = Silent(), save_every: float = 30.0
) -> Run:
    """Train a language model as `options` say, in a new run folder; a checkpoint every `save_every` seconds.

    `out`  the folder, which must not exist yet or be empty; by default runs/NAME-N, with the first N that is free
    """
    check_device(options.device)
    processes = join_processes(options.device)
    _check_shares(options.streams, processes)
    if "-" in options.texts and processes.count > 1:
        raise OptionError("several processes cannot share standard input: put the text in a file.")
    corpus = read_corpus(options.sources, options.split, options.valid, options.test)
    if options.patience is not None and not corpus.valid:
        raise OptionError(
            Argument("patience"), " needs a valid text to watch, and there is none: leave it out, or give one."
        )
    with ExitStack() as held:
        job = _begin(options, corpus, out, processes, held) if processes.first else None
        with _together(Path(out or "runs")):  # the other processes wait here until the folder exists
            path = processes.told(str(job.folder.path) if job else "")
        if job is None:
            folder = RunFolder(Path(path))
            check_same_text(corpus, folder)
            job = _Job.of(folder, corpus)
        return _go_on(job, processes, watcher, save_every)


def _begin(options: Options, corpus: Corpus, out: str | Path | None, processes: Processes, held: ExitStack) -> _Job:
    """A new run in a new folder, which is locked for as long as `held` is open."""
    vocabulary = make_vocabulary(options, corpus.train)
    tokens = vocabulary.encode(corpus.train)
    distinct = len({*tokens.ids.unique().tolist()} - {vocabulary.unknown, vocabulary.end})
    if distinct < 2:
        raise OptionError(f"the text has only {distinct} distinct {vocabulary.unit}: there is nothing to predict.")
    _check_shares(min(options.streams, len(tokens)), processes)
    model = make_model(options, vocabulary.size)
    _try(model, options)  # before anything is written: a cell may not fit
    about = {"name": corpus.name, "sha256": corpus.sha256, "tokens": len(tokens)}
    start = asdict(Progress()), weights_of(model)
    name = "stdin" if options.sources[0] == "-" else Path(options.sources[0]).stem
    for n in count(1):
        path = Path(out) if out is not None else Path("runs") / f"{name}-{options.kind}-{n}"
        try:
            new = RunFolder.create(path, options.from_anywhere(), about, vocabulary.as_json(), *start)
            folder = held.enter_context(new)
            break
        except Taken:
            if out is not None:
                raise
    if digest := folder.cell_digest():
        trusted.remember(digest)  # it has run already
    kept = folder.options
    check_cell(kept.cell)  # the copy of the user's own, now and not when the trained run is opened
    return _Job(folder, kept, model, tokens, vocabulary.encode(corpus.valid))


def resume(path: str | Path, *, watcher: Watcher = Silent(), save_every: float = 30.0, trust: bool = False) -> Run:
    """Go on with a run that was stopped or killed, from its last checkpoint, bit for bit as if it never had been.

    `trust`  as in `open_run`
    """
    folder = RunFolder.find(Path(path))
    options = folder.options
    check_device(options.device)
    processes = join_processes(options.device)
    with folder.locked() if processes.first else nullcontext():
        RunFolder.open(folder.path)  # only now: while another process trains, its files change
        check_trust(folder, trust)
        corpus = read_again(options, folder)
        if processes.first:
            folder.rewind()
        with _together(folder.path):
            processes.any(False)
        return _go_on(_Job.of(folder, corpus), processes, watcher, save_every)


# ------------------------------------------------------------------ the loop


def _go_on(job: _Job, processes: Processes, watcher: Watcher, save_every: float) -> Run:
    job.model.to(job.options.device)
    path = job.folder.path
    with torch.random.fork_rng(devices=[]), _Interrupts() as interrupts, watcher, _together(path):
        _loop(job, processes, watcher, interrupts, save_every)
        processes.any(False)  # until the first process has written the last checkpoint
    return open_run(path, trust=True)


def _loop(job: _Job, processes: Processes, watcher: Watcher, interrupts: "_Interrupts", save_every: float) -> None:
    folder, options, model = job.folder, job.options, job.model
    streams = Streams(job.train_tokens.ids, options.streams, options.window)
    _check_shares(streams.count, processes)
    mine = streams.part(processes.rank, processes.count)
    steps = max(1, round(options.epochs * len(streams)))
    evaluate_every = options.evaluate_every or len(streams)
    cold = model.initial_context(streams.count)

    optimiser = _optimiser(options, model)
    progress = Progress.of(folder)
    context = processes.share(load_state(folder, model, optimiser, cold))
    if _finished(progress, steps, options):
        return
    parallel: nn.Module = model
    if processes.count > 1:  # of a learned initial state, only an epoch's first window has a gradient
        learned = any(leaf.requires_grad for leaf in leaves(cold))
        parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=learned)
    watcher.begin(Plan(str(folder.path), options, model, steps, len(streams), len(job.train_tokens), progress.step))
    begun = saved_at = time.monotonic()
    already = progress.seconds

    def save(best: bool) -> None:
        whole = processes.gather(context)
        if processes.first:
            folder.save(progress.step, asdict(progress), weights_of(model), state_of(model, optimiser, whole), best)

    model.train()
    while not _finished(progress, steps, options):
        # one window: forwards, backwards, a step downhill
        place = progress.step % len(streams)
        if place == 0:
            context = processes.share(model.initial_context(streams.count))
        window = mine[place]
        rate = _set_rate(optimiser, options, progress.step, steps)
        torch.manual_seed(_seed(options, progress.step, processes))  # so dropout depends on the step alone
        tokens, count = window.tokens.to(options.device), streams.tokens_in(place)
        scored = parallel(tokens, context, window.lengths)
        loss = scored.nll.sum() * (processes.count / count)  # a mean over all processes' tokens, once DDP has averaged
        optimiser.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), options.clip or math.inf)

        # what the processes must agree on
        due = time.monotonic() - saved_at > save_every
        figures = torch.stack([scored.nll.detach().double().sum(), norm.double()]).cpu()
        flags = torch.tensor([float(interrupts.number), float(due and processes.first)], dtype=torch.float64)
        total, norms, stop, due_now = processes.sum(torch.cat([figures, flags])).tolist()
        if not math.isfinite(total + norms):
            raise _diverged(folder, progress.step + 1, "loss", total / count, norms / processes.count)
        optimiser.step()
        context = detached(scored.context)
        progress = replace(
            progress,
            step=progress.step + 1,
            nll=progress.nll + total,
            tokens=progress.tokens + count,
            seconds=already + time.monotonic() - begun,
        )
        watcher.step(progress.step, total / count)

        # the learning curve
        at_end = progress.step == steps
        evaluate = len(job.valid_tokens) > 0 and (progress.step % evaluate_every == 0 or at_end)
        best = progress.best is None  # until there is an evaluation, the newest
        if progress.step % LOG_EVERY == 0 or evaluate or at_end:
            entry = {
                "step": progress.step,
                "epoch": progress.step / len(streams),
                "train": progress.nll / progress.tokens,
                "gradient_norm": norms / processes.count,
                "learning_rate": rate,
                "seconds": progress.seconds,
            }
            progress = replace(progress, nll=0.0, tokens=0)
            if evaluate:
                ledger = perplexity(model, job.valid_tokens, processes=processes)
                if math.isnan(ledger.nll):
                    raise _diverged(folder, progress.step, "valid loss", ledger.nll, norms / processes.count)
                entry["valid"] = ledger.nats_per_token
                best = progress.best is None or ledger.nats_per_token < progress.best
                if best:
                    progress = replace(progress, best=ledger.nats_per_token, misses=0)
                else:
                    progress = replace(progress, misses=progress.misses + 1)
            if processes.first:
                folder.log(entry)
            watcher.entry(entry)
        if evaluate or at_end or stop or due_now:
            save(best)
            saved_at = time.monotonic()
        if stop and not at_end:
            number = interrupts.number or int(signal.SIGTERM)
            raise Stopped(f"stopped at step {progress.step} of {steps}; everything is saved in {folder.path}.", number)


def _diverged(folder: RunFolder, step: int, what: str, loss: float, norm: float) -> Diverged:
    return Diverged(
        f"at step {step} the {what} is {loss:.4g} and the gradient's norm {norm:.4g}, so training stopped. "
        f"The last good checkpoint, of step {folder.checkpoint['step']}, is in {folder.path}. "
        "Start again with a lower ",
        Argument("learning_rate"),
        " or ",
        Argument("clip"),
        ".",
    )


def _finished(progress: Progress, steps: int, options: Options) -> bool:
    return progress.step >= steps or (options.patience is not None and progress.misses >= options.patience)


def _set_rate(optimiser: torch.optim.Optimizer, options: Options, step: int, steps: int) -> float:
    """Rise over the warm-up, then stay (constant), or fall to zero in a straight line or along a cosine."""
    rise = min(1.0, (step + 1) / (options.warmup + 1))
    done = step / steps
    fall = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[options.schedule]
    rate = options.learning_rate * rise * fall
    for group in optimiser.param_groups:
        group["lr"] = rate
    return rate


def _seed(options: Options, step: int, processes: Processes) -> int:
    return ((options.seed << 40) + step * processes.count + processes.rank) % (1 << 63)


def _optimiser(options: Options, model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if options.optimiser == "sgd":
        return torch.optim.SGD(
            parameters, options.learning_rate, options.momentum, weight_decay=options.weight_decay, fused=True
        )
    return torch.optim.AdamW(parameters, options.learning_rate, weight_decay=options.weight_decay, fused=True)


# ------------------------------------------------------------------ what must hold, and what to say if not


def _check_shares(streams: int, processes: Processes) -> None:
    if streams % processes.count:
        shared = f"{streams} streams cannot be shared by {processes.count} processes; change "
        raise OptionError(shared, Argument("streams"), ".")


def _try(model: LanguageModel, options: Options) -> None:
    """One step of a copy, since what a cell keeps of it must not reach training. A cell of the user's own may fail."""
    try:
        model = deepcopy(model)
        before = forms_of(model)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(torch.zeros(1, 1, dtype=torch.int64), model.initial_context(1))
        if forms_of(model) != before:
            raise ValueError("it changed the parameters that __init__ made, so the model could not be built again")
    except Exception as error:
        if ":" not in options.cell:
            raise
        raise OptionError(f"the first step of {options.cell} failed: {error}") from error


@contextmanager
def _together(path: Path) -> Iterator[None]:
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


class _Interrupts:
    """While open, SIGINT and SIGTERM are noted, for the loop to stop at a good moment; a second SIGINT is obeyed."""

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> "_Interrupts":
        self._before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread: signals are someone else's
                return self
        return self

    def _note(self, number: int, frame: Any) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
