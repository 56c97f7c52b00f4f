"""Short sequences: is `Auto` ever slower than `Sequential`? Cells, batches, sizes and lengths, from one step on.

    python benchmarks/short_sequences.py

A turn is a run forwards, then one forwards and backwards, by both engines in turn; ratios are of medians. What `Auto`
picks by itself is named, and the worst ratio comes last.
"""

import statistics
import time
from collections.abc import Callable

import torch

import loopfold as lf

SIZES = [("Elman", 16), ("Elman", 256), ("Elman", 1024), ("Elman", 4096), ("GRU", 64), ("GRU", 256), ("LSTM", 64)]
SIZES += [("LSTM", 512), ("LSTM", 1024)]
LENGTHS = (1, 2, 4, 8, 16, 50)


def medians(turns: list[Callable[[], None]], seconds: float = 0.5) -> list[float]:
    for turn in turns * 3:
        turn()
    times: list[list[float]] = [[] for _ in turns]
    end = time.perf_counter() + seconds
    while len(times[0]) < 7 or (time.perf_counter() < end and len(times[0]) < 200):
        for turn, found in zip(turns, times, strict=True):
            begin = time.perf_counter()
            turn()
            found.append(time.perf_counter() - begin)
    return [statistics.median(found) for found in times]


def forwards(cell: torch.nn.Module, x: torch.Tensor, engine: lf.Engine) -> None:
    with torch.no_grad():
        lf.unfold(cell, x, engine=engine)


def both_ways(cell: torch.nn.Module, x: torch.Tensor, engine: lf.Engine) -> None:
    cell.zero_grad()
    lf.unfold(cell, x, engine=engine).hidden.sum().backward()


def main() -> None:
    torch.manual_seed(0)
    worst = (0.0, "")
    rows = 0
    print(f"{'cell':12}{'batch':>6}{'τ':>4}  {'Auto takes':12}{'forwards':>10}{'both ways':>11}   (Auto / Sequential)")
    for name, n in SIZES:
        cell = getattr(lf, name)(n, n)
        for batch in (1, 16):
            for tau in LENGTHS if batch == 1 else (2, 8, 50):
                if n * n * batch * tau > 1_000_000_000:
                    continue
                x = torch.randn(tau, batch, n)
                ratios = []
                for way in (forwards, both_ways):
                    auto, plain = medians(
                        [lambda e=e, way=way: way(cell, x, e) for e in (lf.Auto(), lf.Sequential())]  # noqa: B023
                    )
                    ratios.append(auto / plain)
                taken = lf.Recurrent(cell).explain(x).split(": ")[1].split(",")[0]
                print(f"{name:6}{n:6}{batch:6}{tau:4}  {taken:12}{ratios[0]:10.2f}{ratios[1]:11.2f}", flush=True)
                worst = max(worst, (max(ratios), f"{name} {n}, batch {batch}, τ = {tau}"))
                rows += 1
    print(f"{rows} rows; the worst: {worst[0]:.2f} of Sequential, {worst[1]}")


if __name__ == "__main__":
    main()
