"""The training loop, to be read from top to bottom: `train` and `resume` prepare, `_loop` trains."""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from loopfold.drawing.charts import learning_curves
from loopfold.drawing.figure import Drawing
from loopfold.evaluation import perplexity
from loopfold.language.base import LanguageModel
from loopfold.processes import Processes, ProcessLost, join_processes
from loopfold.states import detached, leaves
from loopfold.text.corpus import Corpus, read_corpus
from loopfold.text.streams import Streams
from loopfold.text.vocabulary import Tokens, Vocabulary, vocabulary_from_json
from loopfold.training.checkpoint import load_state, load_weights, state_of, weights_of
from loopfold.training.folder import RunError, RunFolder, baselines
from loopfold.training.options import OptionError, Options, make_model, make_vocabulary
from loopfold.training.watching import Plan, Silent, Watcher

LOG_EVERY = 50  # steps


class Diverged(Exception):
    """A loss or a gradient that is no number any more."""


class Stopped(Exception):
    """The run was asked to stop; it was saved first. `signal` is the number of the signal that asked."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.signal = number


@dataclass(frozen=True)
class Run:
    """A run as it stands: its model with the weights that did best on the valid text, and what belongs to it."""

    path: Path
    options: Options
    vocabulary: Vocabulary = field(repr=False)
    model: LanguageModel = field(repr=False)
    metrics: list[dict[str, Any]] = field(repr=False)
    config: dict[str, Any] = field(repr=False)

    def corpus(self) -> Corpus:
        """The text that it was trained on, read again; it must not have changed."""
        return self._corpus

    def learning_curve(self) -> Drawing:
        """Nats per token in training and on the valid text; across, what `loopfold compare` found, if it ran."""
        if not self.curves:
            raise RunError(f"{self.path} has no learning curve yet: its first entry comes after {LOG_EVERY} steps.")
        name = f"{self.config['corpus']['name']}, {self.options.kind}"
        found = RunFolder(self.path).comparison()
        if found is None:
            return learning_curves(self.curves, title=name)
        return learning_curves(self.curves, baselines(found.rows), f"{name}; across, the {found.on} text")

    @property
    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Points (step, nats per token) in training and on the valid text, where they are finite numbers."""
        points = {
            part: [(entry["step"], entry[part]) for entry in self.metrics if math.isfinite(entry.get(part, math.nan))]
            for part in ("train", "valid")
        }
        return {part: found for part, found in points.items() if found}

    @cached_property
    def _corpus(self) -> Corpus:
        return _read_again(self.options, RunFolder(self.path))


@dataclass(frozen=True)
class Progress:
    """What the loop counts, and a checkpoint keeps."""

    step: int = 0
    nll: float = 0.0  # of the tokens since the last entry of the learning curve
    tokens: int = 0
    best: float | None = None  # nats a token on the valid text, once it was evaluated
    misses: int = 0  # evaluations since then
    seconds: float = 0.0


def train(options: Options, out: str | Path, *, watcher: Watcher = Silent(), save_every: float = 30.0) -> Run:
    """Train a language model as `options` say, in a new run folder `out`; a checkpoint every `save_every` seconds."""
    _check_device(options.device)
    processes = join_processes(options.device)
    _check_shares(options.streams, processes)
    _check_text(options, processes)
    corpus = read_corpus(options.sources, options.split, options.valid, options.test)
    if options.patience is not None and not corpus.valid:
        raise OptionError("patience needs a valid text to watch, and there is none: leave it out, or give one.")
    folder = RunFolder(Path(out))
    if processes.first:
        vocabulary = make_vocabulary(options, corpus.train)
        train_ids = vocabulary.encode(corpus.train).ids
        distinct = len({*train_ids.unique().tolist()} - {vocabulary.unknown, vocabulary.end})
        if distinct < 2:
            raise OptionError(f"the text has only {distinct} distinct {vocabulary.unit}: there is nothing to predict.")
        _check_shares(min(options.streams, len(train_ids)), processes)
        model = make_model(options, vocabulary.size)
        _try(model, options)  # before anything is written: a cell may not fit
        about = {"name": corpus.name, "sha256": corpus.sha256, "tokens": len(train_ids)}
        start = asdict(Progress()), weights_of(model)
        folder = RunFolder.create(Path(out), options.from_anywhere(), about, vocabulary.as_json(), *start)
    with _together(folder):
        processes.any(False)  # the others wait here until the folder is there
    _check_same_text(corpus, folder)
    return _go_on(folder, corpus, processes, watcher, save_every)


def resume(path: str | Path, *, watcher: Watcher = Silent(), save_every: float = 30.0) -> Run:
    """Go on with a run that was stopped or killed, from its last checkpoint, bit for bit as if it never had been."""
    folder = RunFolder.open(Path(path))
    options = folder.options
    _check_device(options.device)
    processes = join_processes(options.device)
    corpus = _read_again(options, folder)
    if processes.first:
        folder.rewind()
    with _together(folder):
        processes.any(False)
    return _go_on(folder, corpus, processes, watcher, save_every)


def open_run(path: str | Path, device: str = "cpu") -> Run:
    """The run in a folder, ready to be evaluated and to generate. It may be training at the same time."""
    _check_device(device)
    for _ in range(5):
        before = RunFolder(Path(path)).step()
        try:
            folder = RunFolder.open(Path(path))
            options, config, metrics = folder.options, folder.config, folder.metrics
            vocabulary = vocabulary_from_json(folder.vocabulary)
            model = make_model(options, vocabulary.size)
            load_weights(model, folder, folder.checkpoint["best"])
            break
        except (RunError, OSError):  # perhaps a new checkpoint has come meanwhile, and its files gone
            if RunFolder(Path(path)).step() == before:
                raise
    return Run(Path(path), options, vocabulary, model.to(device).eval(), metrics, config)


# ------------------------------------------------------------------ the loop


def _go_on(folder: RunFolder, corpus: Corpus, processes: Processes, watcher: Watcher, save_every: float) -> Run:
    options = folder.options
    vocabulary = vocabulary_from_json(folder.vocabulary)
    train_tokens, valid_tokens = vocabulary.encode(corpus.train), vocabulary.encode(corpus.valid)
    model = make_model(options, vocabulary.size)
    load_weights(model, folder, folder.checkpoint["weights"])
    model.to(options.device)
    alone = folder.locked() if processes.first else nullcontext()
    with torch.random.fork_rng(devices=[]), _Interrupts() as interrupts, alone, watcher, _together(folder):
        _loop(folder, options, model, train_tokens, valid_tokens, processes, watcher, interrupts, save_every)
        processes.any(False)  # until the first process has written the last checkpoint
    return open_run(folder.path)


def _loop(
    folder: RunFolder,
    options: Options,
    model: LanguageModel,
    train_tokens: Tokens,
    valid_tokens: Tokens,
    processes: Processes,
    watcher: Watcher,
    interrupts: "_Interrupts",
    save_every: float,
) -> None:
    streams = Streams(train_tokens.ids, options.streams, options.window)
    _check_shares(streams.count, processes)
    mine = streams.part(processes.rank, processes.count)
    steps = max(1, round(options.epochs * len(streams)))
    evaluate_every = options.evaluate_every or len(streams)
    cold = model.initial_context(streams.count)

    optimiser = _optimiser(options, model)
    progress = Progress(**folder.checkpoint["progress"])
    context = processes.share(load_state(folder, model, optimiser, cold))
    if _finished(progress, steps, options):
        return
    parallel: nn.Module = model
    if processes.count > 1:  # of a learned initial state, only an epoch's first window has a gradient
        learned = any(leaf.requires_grad for leaf in leaves(cold))
        parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=learned)
    watcher.begin(Plan(str(folder.path), options, model, steps, len(streams), len(train_tokens), progress.step))
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
        evaluate = len(valid_tokens) > 0 and (progress.step % evaluate_every == 0 or at_end)
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
                ledger = perplexity(model, valid_tokens, processes=processes)
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
        f"Start anew with a lower --learning-rate or --clip."
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


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without CUDA
        reason = str(error).partition("\n")[0].rstrip(".")
        raise OptionError(f"device {device!r} cannot be used: {reason}. Type --device cpu.") from error


def _check_shares(streams: int, processes: Processes) -> None:
    if streams % processes.count:
        raise OptionError(f"{streams} streams cannot be shared by {processes.count} processes; change --streams.")


def _try(model: LanguageModel, options: Options) -> None:
    """One step. It can fail where the cell is the user's own; elsewhere it is a fault of ours."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(torch.zeros(1, 1, dtype=torch.int64), model.initial_context(1))
    except Exception as error:
        if ":" not in options.cell:
            raise
        raise OptionError(f"the first step of {options.cell} failed: {error}") from error


@contextmanager
def _together(folder: RunFolder) -> Iterator[None]:
    """Say in one sentence that another process is gone, wherever the exchange with it has failed."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, ProcessLost | dist.DistError) and "gloo" not in str(error):  # gloo has no error class
            raise
        raise ProcessLost(
            f"another process of the run has ended or cannot be reached, so this one ends too. "
            f"If {folder.path} has a checkpoint, --resume goes on from it."
        ) from error


# ------------------------------------------------------------------ the text


def _check_text(options: Options, processes: Processes) -> None:
    if "-" in (*options.sources, options.valid, options.test) and processes.count > 1:
        raise OptionError("several processes cannot share standard input: put the text in a file.")


def _read_again(options: Options, folder: RunFolder) -> Corpus:
    corpus = read_corpus(options.sources, options.split, options.valid, options.test)
    _check_same_text(corpus, folder)
    return corpus


def _check_same_text(corpus: Corpus, folder: RunFolder) -> None:
    if corpus.sha256 != folder.config["corpus"]["sha256"]:
        raise RunError(f"the text of {corpus.name} has changed since the run began: {folder.path} needs the old one.")


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
