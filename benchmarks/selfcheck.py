"""What it costs that every compiled run checks itself: the share of the time that goes into checks.

    python benchmarks/selfcheck.py

Each row is a cell run again and again for some seconds, forwards alone or both ways. "share" is the time spent in
checks, by a clock around them, over all the time from the fourth run on (the first three are always checked); "first"
is what the check of one of the first runs adds to it. "with / without" compares medians of runs in turn, with checks
and with none at all.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import loopfold as lf
from loopfold.engines import compiled, selfcheck

ROWS = [("Elman", 1, 64, 1_000), ("Elman", 1, 64, 10_000), ("GRU", 1, 128, 1_000), ("LSTM", 16, 256, 1_000)]
ROWS += [("Elman", 16, 64, 100), ("LSTM", 16, 256, 100), ("GRU", 32, 64, 20)]
spent = [0.0]


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            spent[0] += time.perf_counter() - begin

    return run


@contextmanager
def no_checks() -> Iterator[None]:
    due, selfcheck.Watch.due = selfcheck.Watch.due, lambda *_: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        selfcheck.Watch.due = due  # type: ignore[method-assign]


def main(seconds: float = 6.0) -> None:
    compiled.disagreement = timed(compiled.disagreement)
    selfcheck.Guard.disagreement = timed(selfcheck.Guard.disagreement)  # type: ignore[method-assign]
    torch.manual_seed(0)
    print(
        f"{'cell':8}{'batch':>6}{'n':>5}{'τ':>7}  {'':10}{'ms a run':>9}{'first':>8}{'share':>8}{'with / without':>16}"
    )
    for name, batch, n, tau in ROWS:
        x = torch.randn(tau, batch, n)
        for training in (False, True):
            cell = getattr(lf, name)(n, n)

            def run() -> float:
                begin = time.perf_counter()
                with torch.set_grad_enabled(training):  # noqa: B023
                    hidden = lf.unfold(cell, x, engine=lf.FusedCPU()).hidden  # noqa: B023
                    if training:  # noqa: B023
                        hidden.sum().backward()
                return time.perf_counter() - begin

            with no_checks():
                run()  # compiles
            spent[0] = 0.0
            for _ in range(selfcheck.FIRST):
                run()
            first, spent[0] = spent[0] / selfcheck.FIRST, 0.0
            plain, checked = [], []
            while sum(checked) < seconds:
                with no_checks():
                    plain.append(run())
                checked.append(run())
            ratio = statistics.median(checked) / statistics.median(plain)
            way = "both ways" if training else "forwards"
            print(
                f"{name:8}{batch:6}{n:5}{tau:7}  {way:10}{1e3 * statistics.median(plain):9.2f}"
                f"{1e3 * first:8.2f}{spent[0] / sum(checked):8.2%}{ratio:16.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
