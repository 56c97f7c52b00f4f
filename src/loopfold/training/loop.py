"""The training loop, to be read from top to bottom: `train` and `resume` prepare, `_loop` trains."""

import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loopfold.errors import OptionError
from loopfold.evaluation import perplexity
from loopfold.language.base import Context
from loopfold.processes import Processes, join_processes
from loopfold.states import detached, leaves, map_state
from loopfold.telling import telling
from loopfold.text.corpus import read_corpus
from loopfold.text.streams import Streams, Window
from loopfold.text.vocabulary import Vocabulary
from loopfold.training.averaging import PolyakAverage, is_triggered, tail_from
from loopfold.training.cells import blaming
from loopfold.training.checkpoint import load_state, state_of, weights_of
from loopfold.training.folder import RunFolder
from loopfold.training.guards import Diverged, Interrupts, Stopped, check_shares, check_sources, diverged, together
from loopfold.training.job import Job, New, Progress, streams_of
from loopfold.training.making import make_optimiser
from loopfold.training.options import CHANGEABLE, Options
from loopfold.training.replaying import WindowLoss
from loopfold.training.run import (
    LOG_EVERY,
    Run,
    check_device,
    check_same_text,
    check_trust,
    moved_to,
    open_run,
    read_again,
)
from loopfold.training.schedules import rate_of
from loopfold.training.watching import Plan, Silent, Watcher

__all__ = ["Diverged", "Run", "Stopped", "open_run", "resume", "train"]


def train(
    options: Options,
    out: str | Path | None = None,
    *,
    start: Run | None = None,
    vocabulary: Vocabulary | None = None,
    watcher: Watcher = Silent(),
    save_every: float = 30.0,
) -> Run:
    """Train a language model as `options` say, in a new run folder; a checkpoint every `save_every` seconds.

    `out`         the folder, new or empty; by default runs/NAME-N, with the first N that is free
    `start`       a run with whose weights and vocabulary this one begins; its options say the same of the model
    `vocabulary`  its tokens; learned from the training text by default
    """
    processes = join_processes(check_device(options.device))
    check_shares(options.streams, processes)
    if "-" in options.texts and processes.count > 1:
        raise OptionError("several processes cannot share standard input: put the text in a file.")
    check_sources(options)

    def begin(held: ExitStack) -> Job:  # when this ends, a long text is not needed any more, and its file is gone
        corpus = read_corpus(options.sources, options.split, options.valid, options.test)
        job = New.of(options, corpus, processes, start, vocabulary).begin(out, held) if processes.first else None
        with together(Path(out or "runs")):  # the other processes wait here until the folder exists
            path = processes.told(str(job.folder.path) if job else "")
        if job is None:
            folder = RunFolder(Path(path))
            check_same_text(corpus, folder)
            job = Job.of(folder, corpus)
        return job

    with ExitStack() as held:
        return _go_on(begin(held), processes, watcher, save_every)


def resume(
    path: str | Path,
    *,
    text: str | Path | Sequence[str | Path] = (),
    watcher: Watcher = Silent(),
    save_every: float = 30.0,
    trust: bool = False,
    **changes: Any,
) -> Run:
    """Go on with a run that was stopped or killed, from its last checkpoint, bit for bit as if it never had been.

    `text`     the new places of a text that has moved: one for each of its files, or a folder that holds them
    `trust`    as in `open_run`
    `changes`  other values of `epochs`, `device`, `patience` or `evaluate_every`, which the run keeps. The learning
               rate follows from the share of all steps that is done: with more epochs it is higher again
    """
    for name in changes:
        if name not in CHANGEABLE:
            raise OptionError(f"{name!r} makes a run what it is; only {', '.join(CHANGEABLE)} may change on the way.")
    folder = RunFolder.find(Path(path))
    processes = join_processes(check_device(replace(folder.options, **changes).device))
    with folder.locked() if processes.first else nullcontext():
        RunFolder.open(folder.path)  # only now: while another process trains, its files change
        check_trust(folder, trust)
        places = [str(place) for place in ([text] if isinstance(text, str | Path) else text)]

        def begin() -> Job:
            corpus, job = read_again(folder.options, folder, places), None
            if processes.first:
                folder.rewind()
                job = Job.of(folder, corpus)
            with together(folder.path):
                processes.any(False)  # the other processes wait here: what the first has encoded, they find
            return job or Job.of(folder, corpus)

        job = begin()
        if places:
            moved = moved_to(folder.options, places)
            changes |= {"sources": moved.sources, "valid": moved.valid, "test": moved.test}
        job = job.changed(changes)
        if changes and processes.first:
            folder.change(changes)
        return _go_on(job, processes, watcher, save_every)


# ------------------------------------------------------------------ the loop


def _go_on(job: Job, processes: Processes, watcher: Watcher, save_every: float) -> Run:
    job.model.to(check_device(job.options.device))
    folder = job.folder

    with torch.random.fork_rng(devices=[]), Interrupts() as interrupts, watcher, together(folder.path):
        _loop(job, processes, watcher, interrupts, save_every)
        processes.any(False)  # until the first process has written the last checkpoint
    return open_run(folder.path, trust=True)


def _loop(job: Job, processes: Processes, watcher: Watcher, interrupts: Interrupts, save_every: float) -> None:
    folder, options, model = job.folder, job.options, job.model
    streams = streams_of(options, job.train_tokens)
    check_shares(streams.count, processes)
    mine = streams.part(processes.rank, processes.count)
    steps = options.steps(len(streams.ids))
    evaluate_every = options.evaluate_every or len(streams)
    cold = model.initial_context(streams.count)
    device = cold.last.device

    optimiser, average = make_optimiser(options, model), PolyakAverage(model)
    progress, entries = Progress.of(folder), folder.metrics
    averaged = 0 if progress.average_from is None else progress.step - progress.average_from
    context = processes.share(load_state(folder, model, optimiser, cold, average, averaged))
    if _finished(progress, steps, options):
        return
    parallel: nn.Module = model
    if processes.count > 1:  # of a learned initial state, only an epoch's first window has a gradient
        learned = any(leaf.requires_grad for leaf in leaves(cold))
        parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=learned)
    loss_of = WindowLoss(options, model, parallel)
    size = len(streams), len(job.train_tokens)
    with interrupts.watched():
        watcher.begin(Plan(str(folder.path), options, model, steps, *size, progress.step, job.notes))
    begun = saved_at = time.monotonic()
    already = progress.seconds
    unread: list[tuple[int, int, Tensor]] = []  # steps, their tokens, their loss and gradient's norm

    def failed() -> str:
        return f"training stopped; the last checkpoint, of step {folder.checkpoint['step']}, is in {folder.path}"

    def save(best: bool) -> None:
        whole = processes.gather(context)
        if processes.first:
            state = state_of(model, optimiser, whole, average)
            with average.applied():  # what a run is opened with, and what was evaluated
                folder.save(progress.step, asdict(progress), weights_of(model), state, best)

    model.train()
    while not _finished(progress, steps, options):
        # one window: forwards, backwards, a step downhill
        epoch, place = divmod(progress.step, len(streams))
        if place == 0:
            context = processes.share(model.initial_context(streams.count))
        cut = mine.in_epoch(epoch)
        window, count = cut[place], cut.tokens_in(place)
        rate = rate_of(options, progress.step, steps, len(streams), progress.decays)
        for group in optimiser.param_groups:  # a longer window has more to say (Merity et al., 2018)
            group["lr"] = rate * (len(window.tokens) / options.window if options.vary_window else 1)
        _seed(options, progress.step, processes, device)  # so dropout depends on the step alone
        share = processes.count / count  # a mean over all processes' tokens, once DDP has averaged
        with blaming(failed):
            nll, norm, context = gradient_of(loss_of, window, context, cold, share)

        optimiser.step()
        if options.average == "tail":
            progress = replace(progress, average_from=tail_from(options, progress.step, steps, progress.average_from))
        average.clear() if progress.average_from is None else average.add()
        progress = replace(progress, step=progress.step + 1, seconds=already + time.monotonic() - begun)
        unread.append((progress.step, count, torch.stack([nll.double().sum(), norm.double()])))

        # what the processes must agree on
        due = time.monotonic() - saved_at > save_every
        stop, due_now = processes.sum(torch.tensor([interrupts.number, int(due and processes.first)])).tolist()
        at_end = progress.step == steps
        in_turn = progress.step % evaluate_every == 0
        evaluate = len(job.valid_tokens) > 0 and (in_turn or at_end)
        log = progress.step % LOG_EVERY == 0 or evaluate or at_end
        if log or stop or due_now or device.type != "cuda":  # else a GPU would have to wait for Python after every step
            for step, tokens, total, mean_norm in _read(unread, processes):
                if not math.isfinite(total + mean_norm):
                    raise diverged(folder, step, "loss", total / tokens, mean_norm)
                progress = replace(progress, nll=progress.nll + total, tokens=progress.tokens + tokens)
                with interrupts.watched():
                    watcher.step(step, total / tokens)
            unread.clear()

        # the learning curve
        best = progress.best is None  # until there is an evaluation, the newest
        if log:
            entry = {
                "step": progress.step,
                "epoch": progress.step / len(streams),
                "train": progress.nll / progress.tokens,
                "gradient_norm": mean_norm,
                "learning_rate": rate,
                "seconds": progress.seconds,
            }
            entries.append(entry)
            progress = replace(progress, nll=0.0, tokens=0)
            if evaluate:
                with blaming(failed), average.applied(), telling(None):  # the watcher shows how far the run is
                    ledger = perplexity(model, job.valid_tokens, processes=processes)
                if math.isnan(ledger.nll):
                    raise diverged(folder, progress.step, "valid loss", ledger.nll, mean_norm)
                entry["train_since_valid"] = _since_valid(entries, streams)
                entry["valid"] = ledger.nats_per_token
                best = progress.best is None or ledger.nats_per_token < progress.best
                if best:
                    progress = replace(progress, best=ledger.nats_per_token, misses=0)
                elif in_turn:  # else a run that has ended and goes on would have a miss more than a longer one
                    progress = replace(progress, misses=progress.misses + 1, decays=progress.decays + 1)
                if average.count:
                    entry["averaged"] = average.count
                elif options.average == "triggered":
                    found = is_triggered([e["valid"] for e in entries if "valid" in e], options.average_after)
                    progress = replace(progress, average_from=progress.step if found else None)
            if processes.first:
                folder.log(entry)
            with interrupts.watched():
                watcher.entry(entry)
        if evaluate or at_end or stop or due_now:
            save(best)
            saved_at = time.monotonic()
        if stop and not at_end:
            number = interrupts.number or int(signal.SIGTERM)
            said = f"stopped at step {progress.step} of {steps}; everything is saved in {folder.path}."
            raise Stopped(said, number, folder.path)


def gradient_of(
    loss_of: WindowLoss, window: Window, context: Context, cold: Context, share: float
) -> tuple[Tensor, Tensor, Context]:
    """A window forwards and backwards: the losses of its tokens, the gradient's norm before clipping, the next context.

    `cold` is a context as the model begins with, `share` what makes a mean of the sum of all losses.
    """
    device, model = context.last.device, loss_of.model
    tokens = window.tokens.pin_memory() if device.type == "cuda" else window.tokens
    loss = loss_of(tokens.to(device, non_blocking=True), context, window.lengths, share)
    model.zero_grad()
    loss.total.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), loss_of.options.clip or math.inf)
    # of one dtype in all windows: a cell may give bfloat16 under autocast
    carried = map_state(lambda leaf, like: leaf.to(like.dtype), detached(loss.context), cold)
    return loss.nll.detach(), norm, carried


def _finished(progress: Progress, steps: int, options: Options) -> bool:
    return progress.step >= steps or (options.patience is not None and progress.misses >= options.patience)


def _since_valid(entries: Sequence[Mapping[str, Any]], streams: Streams) -> float:
    """The mean of all tokens trained on since the evaluation before: each entry has that since the entry before it."""
    nll, end = 0.0, entries[-1]["step"]
    for entry, before in zip(reversed(entries), [*reversed(entries[:-1]), {"step": 0}], strict=True):
        nll += entry["train"] * (streams.tokens_to(entry["step"]) - streams.tokens_to(before["step"]))
        if "valid" in before or not before["step"]:
            break
    return nll / (streams.tokens_to(end) - streams.tokens_to(before["step"]))


def _read(unread: Sequence[tuple[int, int, Tensor]], processes: Processes) -> Iterator[tuple[int, int, float, float]]:
    """Steps, their tokens, their loss and their gradient's norm: of all processes together, and the mean of theirs."""
    figures = processes.sum(torch.stack([pair for *_, pair in unread]).cpu()).tolist()
    for (step, tokens, _), (total, norms) in zip(unread, figures, strict=True):
        yield step, tokens, total, norms / processes.count


def _seed(options: Options, step: int, processes: Processes, device: torch.device) -> None:
    seed = ((options.seed << 40) + step * processes.count + processes.rank) % (1 << 63)
    if device.type not in ("cpu", "cuda"):
        torch.manual_seed(seed)  # which asks every kind of device, and takes longer than some steps
        return
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
