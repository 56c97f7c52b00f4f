"""Forward and backward cost O(τ), in time and in memory.

Each state needs the one before it, so a sequence of τ steps takes τ steps one after the other, and no number of
processors makes them fewer. Each state is read again on the way back, so all of them must be kept until then. An engine
of Loopfold changes how much a step costs; it cannot change that there are τ of them.

Both are measured here against τ, and the slope of a straight line through the points on log-log axes is their order: 1
for O(τ). A last column lays the same number of steps side by side, as many short sequences instead of a few long ones:
the arithmetic is the same, the chain is not.

Memory is what autograd keeps between forward and backward: the bytes of all tensors that the graph saved, each storage
once, without parameters, inputs and targets. torch's allocator reports the same number. The graph's own nodes, which
Sequential makes at every step, are not in it.
"""

import gc
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

import loopfold as lf

FITTED = 4  # the order is fitted to so many of the largest τ: below them the fixed cost of a call weighs too
ENGINES: list[lf.Engine] = [lf.Sequential(), lf.Looped(), lf.FusedCPU()]


@dataclass
class Row:
    engine: str
    taus: list[int]
    forward: list[float]  # seconds, one for each τ
    backward: list[float]
    kept: list[int]  # bytes
    side_by_side: float  # seconds, forward and backward: the work of the largest τ as sequences of the smallest

    def slope(self, costs: list[float] | list[int]) -> float:
        points = zip(self.taus[-FITTED:], costs[-FITTED:], strict=True)
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
        start = time.perf_counter()
        loss = self.loss()
        middle = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
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


def experiment(
    taus: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384), batch: int = 1, n: int = 128, seconds: float = 8.0
) -> list[Row]:
    rows = []
    for engine in ENGINES:
        tasks = [task(engine, tau, batch, n) for tau in taus]
        wide = task(engine, taus[0], batch * taus[-1] // taus[0], n)
        for each in (*tasks, wide):
            each.seconds()  # compiles what is to be compiled
        times: list[list[tuple[float, float]]] = []
        end = time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < end:
            times.append([each.seconds() for each in (*tasks, wide)])
        # The least of all rounds: whatever else the machine does can only add to it.
        forward, backward = ([min(t[way] for t in turn) for turn in zip(*times, strict=True)] for way in (0, 1))
        kept = [each.kept() for each in tasks]
        side_by_side = forward.pop() + backward.pop()
        rows.append(Row(type(engine).__name__, [*taus], forward, backward, kept, side_by_side))
    return rows


def table(result: list[Row]) -> str:
    first, last = result[0].taus[0], result[0].taus[-1]
    lines = [
        f"engine      at τ = {last:,}                          order in τ               the same work",
        f"            forward   backward      kept   forward backward   kept   at τ = {first}, wider",
    ]
    for row in result:
        slopes = [row.slope(costs) for costs in (row.forward, row.backward, row.kept)]
        lines.append(
            f"{row.engine:<10} {row.forward[-1] * 1e3:>5.1f} ms  {row.backward[-1] * 1e3:>6.1f} ms "
            f"{row.kept[-1] / 1e6:>6.2f} MB   {slopes[0]:>7.2f} {slopes[1]:>8.2f} {slopes[2]:>6.2f}   "
            f"{row.side_by_side * 1e3:>12.1f} ms"
        )
    return "\n".join(lines)


@lf.style()
def picture(result: list[Row]) -> lf.Drawing:
    figure = Figure(figsize=(9.6, 3.9), layout="constrained")
    time_axes, memory_axes = figure.subplots(1, 2)
    for row, marker in zip(result, "os^", strict=True):
        seconds = [a + b for a, b in zip(row.forward, row.backward, strict=True)]
        for axes, costs, unit in ((time_axes, seconds, 1e-3), (memory_axes, row.kept, 1e6)):
            label = f"{row.engine}, slope {row.slope(costs):.2f}"
            axes.plot(row.taus, [cost / unit for cost in costs], f"{marker}-", label=label)
    for axes, what in ((time_axes, "forward and backward, in ms"), (memory_axes, "kept for the way back, in MB")):
        axes.set_xscale("log", base=2)
        axes.set(yscale="log", xlabel="steps $\\tau$", ylabel=what, xticks=result[0].taus)
        axes.set_xticklabels([f"{tau:,}" for tau in result[0].taus])
        axes.legend()
    return lf.Drawing(figure, "Time and memory against the number of steps, on log-log axes")


FOUND = """
As claimed: all are of order 1 in τ, in memory exactly, in time as nearly as a machine with caches allows. Engines
differ in what a step costs. For loops in Python the chain is most of it, so the same work side by side takes a
fraction of the time; the native loop has little but arithmetic left, and gains less."""


def main() -> None:
    torch.set_num_threads(1)  # a chain has no use for more, and one is measured with less noise
    result = experiment()
    print(table(result), FOUND, sep="\n")
    picture(result).save(Path(__file__).parent / "pictures" / "07_costs.svg")


if __name__ == "__main__":
    main()
