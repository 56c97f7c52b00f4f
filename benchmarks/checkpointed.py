"""Checkpointed against the engine inside it: time and memory of a run and its way back, on one long sequence.

Times are medians of rounds in which both take turns. Memory is the peak of torch's own allocator, as the profiler tells
it, in a process of its own for each; beside it, how far the resident set grew. What the loss asks for (the states and
their gradients, x) is there before, and not counted.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from memory import largest

import loopfold as lf

CELLS = {"Elman": lf.Elman, "GRU": lf.GRU, "LSTM": lf.LSTM}


def engines(memory: str | None) -> dict[str, lf.Engine]:
    return {"plain": lf.FusedCPU(), "checkpointed": lf.Checkpointed(lf.FusedCPU(), memory=memory)}


def job(cell: str, engine: lf.Engine, tau: int, n: int, only_last: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    step, x = CELLS[cell](8, n), torch.randn(tau, 1, 8)
    gradient = torch.randn(() if only_last else (tau, 1, n))  # as if from a loss, and there whoever runs

    def run() -> None:
        step.zero_grad()
        done = lf.unfold(step, x, engine=engine, only_last=only_last)
        if only_last:
            done.last_hidden.sum().backward()
        else:
            done.hidden.backward(gradient)

    return run


def peak(run: Callable[[], None]) -> int:
    """The most bytes of torch's allocator at a time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    now = most = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def measured(cell: str, name: str, tau: int, n: int, only_last: bool, memory: str | None) -> dict[str, float]:
    """In this process: the peak of the allocator, and how far the resident set grew, in bytes."""
    engine = engines(memory)[name]
    for _ in range(4):
        job(cell, engine, 2000, n, only_last)()  # compiles
    run = job(cell, engine, tau, n, only_last)
    before = largest()
    for _ in range(4):
        run()  # the first runs of a cell are checked
    return {"resident": (largest() - before) * 2**20, "allocator": peak(run)}


def alone(*arguments: object) -> dict[str, float]:
    """`measured` in a process of its own."""
    text = json.dumps(arguments)
    done = subprocess.run([sys.executable, __file__, "--alone", text], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def medians(
    runs: dict[str, Callable[[], None]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Seconds, in turns; the first few rounds compile, and are checked."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 4):
        for name, run in runs.items():
            begin = clock()
            run()
            if turn > 3:
                times[name].append(clock() - begin)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="one sequence runs on one thread; so do products here")
    parser.add_argument("--cpu-time", action="store_true", help="count the process's own seconds: on a busy machine")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.alone:
        print(json.dumps(measured(*json.loads(options.alone))))
        return
    clock = time.process_time if options.cpu_time else time.perf_counter
    tau, n = 100_000, 64
    print(f"τ = {tau:,}, n = {n}, batch 1, float32, a gradient at every state")
    for cell in CELLS:
        runs = {name: job(cell, engine, tau, n, False) for name, engine in engines(None).items()}
        seconds = medians(runs, options.rounds, clock)
        states = tau * n * 4 * (2 if cell == "LSTM" else 1)
        beside = {name: alone(cell, name, tau, n, False, None)["allocator"] - states for name in seconds}
        print(
            f"{cell:<6} {seconds['plain'] * 1e3:5.0f} ms and {seconds['checkpointed'] * 1e3:5.0f} ms: "
            f"{seconds['checkpointed'] / seconds['plain']:.2f} of the time;  beside the states "
            f"{beside['plain'] / 1e6:6.1f} MB and {beside['checkpointed'] / 1e6:5.2f} MB: "
            f"{100 * beside['checkpointed'] / beside['plain']:.1f} % of the memory"
        )
    print(f"τ = {2**20:,}, n = {n}, batch 1, float32, a loss on the last state, memory as allowed")
    for cell in CELLS:
        for memory in ("64 MB", "4 MB"):
            found = alone(cell, "checkpointed", 2**20, n, True, memory)
            mb = {name: size / 1e6 for name, size in found.items()}
            print(
                f"{cell:<6} {memory}: {mb['allocator']:.1f} MB beside x; the resident set grew {mb['resident']:.1f} MB"
            )


if __name__ == "__main__":
    main()
