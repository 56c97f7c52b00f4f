"""Forward and backward cost O(τ), in time and in memory.

Each state needs the one before it, so a sequence of τ steps takes τ steps one after the other, and no number of
processors makes them fewer. Each state is read again on the way back, so all of them must be kept until then. An engine
of Loopfold changes how much a step costs; it cannot change that there are τ of them. What it can do is to keep few of
the states and compute the others again, memory for time; and to begin in many places at once, where a network forgets.

Both are measured here against τ, and the slope of a straight line through the points on log-log axes is their order: 1
for O(τ). A last column lays the same number of steps side by side, as many short sequences instead of a few long ones:
the arithmetic is the same, the chain is not. Time is that of the one processor that is used, and what it does meanwhile
for other programs is not in it.

Memory is what autograd keeps between forward and backward: the bytes of all tensors that the graph saved, each storage
once, without parameters, inputs and targets. torch's allocator reports the same number. The graph's own nodes, which
Sequential makes at every step, are not in it.

A second table is of one long sequence with a loss on its last state alone, up to a million steps. Memory there is the
most that torch's allocator has given at a time, on the way forwards or back, beside x.
"""

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

import loopfold as lf

FITTED = 4  # the order is fitted to so many of the largest τ: below them the fixed cost of a call weighs too
ENGINES: list[lf.Engine] = [lf.Sequential(), lf.Looped(), lf.FusedCPU()]
LONG: dict[str, lf.Engine] = {  # by the name in the table
    "FusedCPU": lf.FusedCPU(),
    "Checkpointed": lf.Checkpointed(lf.FusedCPU()),
    "Checkpointed, 4 MB": lf.Checkpointed(lf.FusedCPU(), memory="4 MB"),
    "TimeParallel": lf.TimeParallel(lf.FusedCPU()),
}


@dataclass
class Row:
    engine: str
    taus: list[int]
    forward: list[float]  # seconds, one for each τ
    backward: list[float]
    kept: list[int]  # bytes
    side_by_side: float  # seconds, forward and backward: the work of the largest τ as sequences of the smallest

    def slope(self, costs: list[float] | list[int]) -> float:
        return slope(self.taus, costs)


@dataclass
class Long:
    engine: str
    taus: list[int]
    seconds: list[float]  # forward and backward, one for each τ
    peak: list[int]  # bytes


@dataclass
class Costs:
    rows: list[Row]
    long: list[Long]


def slope(taus: list[int], costs: list[float] | list[int]) -> float:
    """The order of costs in τ."""
    points = zip(taus[-FITTED:], costs[-FITTED:], strict=True)
    log_tau, log_cost = zip(*((math.log(tau), math.log(cost)) for tau, cost in points), strict=True)
    return statistics.linear_regression(log_tau, log_cost).slope


@dataclass
class Task:
    """A network, and data of one length."""

    model: lf.SequenceToSequence
    x: Tensor
    y: Tensor

    def loss(self) -> Tensor:
        return self.model.loss(self.model(self.x), self.y)

    def seconds(self) -> tuple[float, float]:
        gc.disable()  # Python's collector looks through every tensor alive, again and again: that is not our O(τ)
        start = time.process_time()
        loss = self.loss()
        middle = time.process_time()
        loss.backward()
        end = time.process_time()
        gc.enable()
        return middle - start, end - middle

    def kept(self) -> int:
        """The bytes that the graph holds once the loss is there."""
        sizes: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = self.loss()  # its name keeps the graph, so no storage is given up and used twice
        ours = {t.untyped_storage().data_ptr() for t in (self.x, self.y, *self.model.parameters(), loss)}
        return sum(size for place, size in sizes.items() if place not in ours)


def task(engine: lf.Engine, tau: int, batch: int, n: int) -> Task:
    torch.manual_seed(0)
    model = lf.SequenceToSequence(lf.Recurrent(lf.Elman(8, n), engine), outputs=8)
    return Task(model, torch.randn(tau, batch, 8), torch.randint(8, (tau, batch)))


def long(taus: tuple[int, ...], n: int, rounds: int = 3) -> list[Long]:
    """One sequence, and a loss on its last state."""
    torch.manual_seed(0)
    model = lf.SequenceToOne(lf.Elman(8, n), outputs=1)
    rows = []
    for name, engine in LONG.items():
        lf.SequenceToOne(model.recurrent, outputs=1, engine=engine)  # sets it
        row = Long(name, [*taus], [], [])
        for tau in taus:
            x = torch.randn(tau, 1, 8)

            def both_ways(x: Tensor = x) -> float:
                start = time.process_time()
                model(x).sum().backward()
                return time.process_time() - start

            row.seconds.append(min(both_ways() for _ in range(rounds)))
            row.peak.append(min(peak(both_ways) for _ in range(rounds)))  # a run that checks itself keeps more
        rows.append(row)
    return rows


def peak(run: Callable[[], object]) -> int:
    """The most bytes of torch's allocator at a time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    assert profile.profiler is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes))


def experiment(
    taus: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384),
    batch: int = 1,
    n: int = 128,
    seconds: float = 8.0,
    long_taus: tuple[int, ...] = (10_000, 31_623, 100_000, 316_228, 1_000_000),
) -> Costs:
    rows = []
    for engine in ENGINES:
        tasks = [task(engine, tau, batch, n) for tau in taus]
        wide = task(engine, taus[0], batch * taus[-1] // taus[0], n)
        for each in (*tasks, wide):
            each.seconds()  # compiles what is to be compiled
        times: list[list[tuple[float, float]]] = []
        end = time.process_time() + seconds
        while len(times) < 3 or time.process_time() < end:
            times.append([each.seconds() for each in (*tasks, wide)])
        # The least of all rounds: whatever else the machine does can only add to it.
        forward, backward = ([min(t[way] for t in turn) for turn in zip(*times, strict=True)] for way in (0, 1))
        kept = [min(each.kept() for _ in range(3)) for each in tasks]  # now and then a run keeps more, to check itself
        side_by_side = forward.pop() + backward.pop()
        rows.append(Row(type(engine).__name__, [*taus], forward, backward, kept, side_by_side))
    return Costs(rows, long(long_taus, n // 2))


def table(result: Costs) -> str:
    first, last = result.rows[0].taus[0], result.rows[0].taus[-1]
    lines = [
        f"engine      at τ = {last:,}                          order in τ               the same work",
        f"            forward   backward      kept   forward backward   kept   at τ = {first}, wider",
    ]
    for row in result.rows:
        slopes = [row.slope(costs) for costs in (row.forward, row.backward, row.kept)]
        lines.append(
            f"{row.engine:<10} {row.forward[-1] * 1e3:>5.1f} ms  {row.backward[-1] * 1e3:>6.1f} ms "
            f"{row.kept[-1] / 1e6:>6.2f} MB   {slopes[0]:>7.2f} {slopes[1]:>8.2f} {slopes[2]:>6.2f}   "
            f"{row.side_by_side * 1e3:>12.1f} ms"
        )
    taus = result.long[0].taus
    lines += [
        "",
        f"{'a loss on the last state':<24} both ways, in seconds{'':>24}at most at a time, in MB",
        f"{'at τ =':<18}" + " ".join(f"{tau:>9,}" for tau in (*taus, *taus)) + "   order",
    ]
    for each in result.long:
        times, sizes = (f"{s:>9.3f}" for s in each.seconds), (f"{size / 1e6:>9.2f}" for size in each.peak)
        order = f"{slope(each.taus, each.seconds):.2f}, {slope(each.taus, each.peak):.2f}"
        lines.append(f"{each.engine:<18}{' '.join(times)} {' '.join(sizes)}   {order}")
    return "\n".join(lines)


@lf.style()
def picture(result: Costs) -> lf.Drawing:
    figure = Figure(figsize=(9.6, 7.4), layout="constrained")
    (time_axes, memory_axes), (long_time, long_memory) = figure.subplots(2, 2)
    for row, marker in zip(result.rows, "os^", strict=True):
        seconds = [a + b for a, b in zip(row.forward, row.backward, strict=True)]
        for axes, costs, unit in ((time_axes, seconds, 1e-3), (memory_axes, row.kept, 1e6)):
            label = f"{row.engine}, slope {row.slope(costs):.2f}"
            axes.plot(row.taus, [cost / unit for cost in costs], f"{marker}-", label=label)
    for axes, what in ((time_axes, "forward and backward, in ms"), (memory_axes, "kept for the way back, in MB")):
        axes.set_xscale("log", base=2)
        axes.set(yscale="log", xlabel="steps $\\tau$", ylabel=what, xticks=result.rows[0].taus)
        axes.set_xticklabels([f"{tau:,}" for tau in result.rows[0].taus])
        axes.legend()
    for each, marker in zip(result.long, itertools.cycle("^Dvos"), strict=False):
        long_time.plot(each.taus, each.seconds, f"{marker}-", label=each.engine)
        long_memory.plot(each.taus, [size / 1e6 for size in each.peak], f"{marker}-", label=each.engine)
    for axes, what in ((long_time, "both ways, in s"), (long_memory, "at most at a time, in MB")):
        axes.set(xscale="log", yscale="log", xlabel="steps $\\tau$, a loss on the last state", ylabel=what)
        axes.legend()
    return lf.Drawing(figure, "Time and memory against the number of steps, on log-log axes")


def found(result: Costs) -> str:
    orders = [row.slope(costs) for row in result.rows for costs in (row.forward, row.backward)]
    linear = all(abs(row.slope(row.kept) - 1) < 0.02 for row in result.rows)
    gains = ", ".join(
        f"{row.engine} {(row.forward[-1] + row.backward[-1]) / row.side_by_side:.1f}" for row in result.rows
    )
    fused = result.rows[-1]
    plain, few, _, parallel = result.long
    memory = "holds where all states are kept" + ", which need not be" * (slope(few.taus, few.peak) < 0.75)
    return f"""\
claim     Forward and backward take O(τ) time, in sequence
holds if  their order is 1 for every engine, give or take 0.25 for a machine's caches
verdict   {"holds" if all(abs(order - 1) < 0.25 for order in orders) else "does not hold here"}
figures   order in τ of {fused.engine}: {fused.slope(fused.forward):.2f} forward, \
{fused.slope(fused.backward):.2f} backward

claim     They take O(τ) memory
holds if  the order of what is kept is 1, give or take 0.02; it need not be if Checkpointed's is below 0.75
verdict   {memory if linear else "does not hold here"}
figures   {plain.taus[-1]:,} steps: {plain.peak[-1] / 1e6:.2f} MB, and {few.peak[-1] / 1e6:.2f} MB under {few.engine}

Engines differ in what a step costs, and in how much of that waits for the step before. The same work side by side is
faster by these factors: {gains}.

Memory need not be: where few states are kept and the others computed again, it grows with √τ, or not at all. That
takes one more run forwards; on a long sequence, memory that stays in the caches may make up for it. Over the longest,
{few.engine} took {few.seconds[-1] / plain.seconds[-1]:.2f} times as long as {plain.engine}.

Nor need the chain be τ steps long where the network forgets, as this one does: {parallel.engine} starts chunks of
time side by side and makes sure that each began where the one before it ended. What it takes are processors that would
wait for the chain: on one, there is the same to compute and a little more, and it took \
{parallel.seconds[-1] / plain.seconds[-1]:.2f} times as long."""


def main() -> None:
    torch.set_num_threads(1)  # a chain has no use for more, and one is measured with less noise
    result = experiment()
    print(table(result), found(result), sep="\n\n")
    picture(result).save(Path(__file__).parent / "pictures" / "07_costs.svg")


if __name__ == "__main__":
    main()
