"""What a run would be, without one: everything is made and a few steps are taken, and nothing is written."""

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from loopfold.processes import Processes
from loopfold.text.corpus import read_corpus
from loopfold.training.cells import blaming
from loopfold.training.guards import check_sources
from loopfold.training.job import New, streams_of
from loopfold.training.loop import gradient_of
from loopfold.training.making import make_optimiser
from loopfold.training.options import Options
from loopfold.training.replaying import WindowLoss
from loopfold.training.run import Run, check_device
from loopfold.training.watching import Plan

SECONDS, STEPS = 2.0, 20  # of timed steps, at most
CAPTURES = 8  # steps on a GPU until one is replayed, there and back


@dataclass(frozen=True)
class Rehearsal:
    """What would happen, and how fast; evaluations take a little more."""

    plan: Plan
    tokens_per_second: float
    memory: int | None  # bytes that it took at most; None where the system does not tell

    @property
    def seconds(self) -> float:
        """How long training would take."""
        return self.plan.steps * self.plan.tokens_per_step / self.tokens_per_second


def rehearse(options: Options, out: str | Path | None = None, *, start: Run | None = None) -> Rehearsal:
    """What `train` would do with the same arguments. It takes a few steps, the first of which compiles the cell."""
    options = replace(options, device=check_device(options.device))
    check_sources(options)
    corpus = read_corpus(options.sources, options.split, options.valid, options.test)
    new = New.of(options, corpus, Processes(), start)
    streams = streams_of(options, new.tokens)
    steps = options.steps(len(streams.ids))
    plan = Plan(str(new.place(out)), options, new.model, steps, len(streams), len(new.tokens), 0, new.notes)
    model = new.model.to(options.device).train()
    optimiser, cold = make_optimiser(options, model), model.initial_context(streams.count)
    loss_of = WindowLoss(options, model)
    context = cold
    begun, tokens = 0.0, 0
    failed = f"the first steps of {options.cell} failed"
    with torch.random.fork_rng(devices=[]), blaming(lambda: failed):
        first = CAPTURES if options.device.startswith("cuda") else 0
        for i in range(1 + first + STEPS):
            window, count = streams[i % len(streams)], streams.tokens_in(i % len(streams))
            _, norm, context = gradient_of(loss_of, window, context, cold, 1 / count)
            float(norm)  # so that a GPU is waited for
            optimiser.step()
            tokens += count
            if i <= first:
                begun, tokens = time.perf_counter(), 0
            elif time.perf_counter() - begun > SECONDS:
                break
    return Rehearsal(plan, tokens / (time.perf_counter() - begun), _memory(options.device))


def _memory(device: str) -> int | None:
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
