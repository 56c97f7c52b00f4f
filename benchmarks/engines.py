"""Forward and backward time of a recurrence: our engines against torch.nn, a Python loop, torch.compile and JAX's scan.

    make bench                                        the whole table
    python benchmarks/engines.py --only "Elman 1"     the rows whose name begins so
    python benchmarks/engines.py --compile            with torch.compile of the loop, where it finishes in two minutes

Every ratio is of medians from one run, in which the contenders take turns. A turn is one forward and one backward pass
with a given gradient of every h(t), in float32, for the gradients of all parameters. "of peak" is the share of the rate
that this machine reaches in one large matrix product, by the faster of torch's libraries. "MB" is the peak of a turn
above what is held between turns, each contender in a process of its own.
"""

import argparse
import ctypes
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tide import Tide
from torch import Tensor, nn

import loopfold as lf
from loopfold.products import mm


@dataclass(frozen=True)
class Row:
    cell: str
    batch: int
    n: int
    tau: int
    over_torch: float | None  # the targets: how many times faster
    over_jax: float

    @property
    def name(self) -> str:
        return f"{self.cell} {self.batch}, {self.n}, {self.tau}"

    @property
    def gates(self) -> float:
        return {"Elman": 1, "Tide": 1.5, "GRU": 3, "LSTM": 4}[self.cell]  # Tide: two from x, one from h


ROWS = [
    Row("Elman", 1, 64, 10_000, 40, 2),
    Row("Elman", 1, 128, 1_000, 15, 1.8),
    Row("Elman", 16, 256, 100, 1.5, 1.5),
    Row("Elman", 32, 512, 100, 1.5, 1.5),
    Row("GRU", 1, 64, 10_000, 20, 1.5),
    Row("GRU", 16, 256, 100, 1.5, 1.3),
    Row("LSTM", 1, 128, 1_000, 1.5, 1.5),
    Row("LSTM", 16, 256, 100, 1.0, 1.3),
    Row("Tide", 1, 64, 10_000, None, 1.5),
]


# ------------------------------------------------------------------ the contenders


def contenders(row: Row, with_compile: bool) -> dict[str, Callable[[], Any]]:
    torch.manual_seed(0)
    x, g = torch.randn(row.tau, row.batch, row.n), torch.randn(row.tau, row.batch, row.n)
    cell: nn.Module = (Tide if row.cell == "Tide" else getattr(lf, row.cell))(row.n, row.n)

    def ours(engine: lf.Engine) -> Callable[[], None]:
        return lambda: backward(cell, lf.unfold(cell, x, engine=engine).hidden, g)

    found = {"FusedCPU": ours(lf.FusedCPU()), "Looped": ours(lf.Looped()), "Python loop": ours(lf.Sequential())}
    if row.cell != "Tide":
        theirs = lf.to_torch(cell)
        found["torch.nn"] = lambda: backward(theirs, theirs(x)[0], g)
    if with_compile and row.tau <= 100:
        compiled = torch.compile(plain_loop)
        found["torch.compile"] = lambda: backward(cell, compiled(cell, x), g)
    try:
        found["JAX scan"] = jax_scan(row, x, g)
    except ImportError:
        print("JAX is not installed: pip install jax", file=sys.stderr)
    return found


def backward(module: nn.Module, hidden: Tensor, g: Tensor) -> None:
    module.zero_grad()
    hidden.backward(g)


def plain_loop(cell: nn.Module, x: Tensor) -> Tensor:
    state = cell.initial_state(x.shape[1])  # type: ignore[operator]
    hidden = []
    for t in range(x.shape[0]):
        state = cell(state, x[t])
        hidden.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(hidden)


def jax_scan(row: Row, x: Tensor, g: Tensor) -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    n = row.n
    U, W, b, p = (jnp.asarray(torch.randn(s).numpy()) / n**0.5 for s in ((4 * n, n), (4 * n, n), (4 * n,), (n,)))
    gates = {"Elman": 1, "GRU": 3, "LSTM": 4, "Tide": 2}[row.cell] * n
    parameters = {"U": U[:gates], "W": W[: n if row.cell == "Tide" else gates], "b": b[:gates], "p": p}

    def elman(q: Any, h: Any, u: Any) -> Any:
        h = jnp.tanh(u + h @ q["W"].T)
        return h, h

    def gru(q: Any, h: Any, u: Any) -> Any:
        (x_r, x_z, x_n), (h_r, h_z, h_n) = jnp.split(u, 3, -1), jnp.split(h @ q["W"].T, 3, -1)
        r, z = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z)
        h = (1 - z) * jnp.tanh(x_n + r * (h_n + q["p"])) + z * h
        return h, h

    def lstm(q: Any, state: Any, u: Any) -> Any:
        h, c = state
        i, f, new, o = jnp.split(u + h @ q["W"].T, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(new)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    def tide(q: Any, h: Any, u: Any) -> Any:
        keep, new = jnp.split(u, 2, -1)
        keep = jax.nn.sigmoid(keep + q["p"] * h)
        h = keep * h + (1 - keep) * jnp.tanh(new + h @ q["W"].T)
        return h, h

    step = {"Elman": elman, "GRU": gru, "LSTM": lstm, "Tide": tide}[row.cell]
    zeros = jnp.zeros((row.batch, n))
    start = (zeros, zeros) if row.cell == "LSTM" else zeros
    x_, g_ = jnp.asarray(x.numpy()), jnp.asarray(g.numpy())

    def loss(q: Any, x: Any) -> Any:  # the products with x are hoisted here too, so that the comparison is fair
        _, hidden = jax.lax.scan(lambda state, u: step(q, state, u), start, x @ q["U"].T + q["b"])
        return (hidden * g_).sum()

    gradient = jax.jit(jax.grad(loss))
    return lambda: jax.block_until_ready(gradient(parameters, x_))


# ------------------------------------------------------------------ measuring


def medians(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Seconds; the contenders take turns, the slow ones fewer."""
    first: dict[str, float] = {}
    for name, run in list(runs.items()):
        begin = time.perf_counter()
        run()  # compiles
        if time.perf_counter() - begin > 120:
            print(f"{name} took more than two minutes to compile and is left out", file=sys.stderr)
            del runs[name]
            continue
        begin = time.perf_counter()
        run()
        first[name] = time.perf_counter() - begin
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds):
        for name, run in runs.items():
            if first[name] < 0.5 or i < 3:
                begin = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(t) for name, t in times.items()}


def peak_rate() -> float:
    """Floating-point operations a second in one large product, forwards and as for a gradient."""
    a = torch.randn(1024, 1024)
    best = min(medians({"mm": lambda: mm(a, a), "t": lambda: mm(a.T, a)}, 15).values())
    return 2 * 1024**3 / best


def megabytes(row: Row, name: str) -> str:
    command = [sys.executable, __file__, "--only", row.name, "--peak", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "?"


def print_peak(row: Row, name: str) -> None:
    """Megabytes at the peak of a turn, above what the process holds between turns (Linux)."""
    run = contenders(row, False)[name]
    run()  # compiles
    ctypes.CDLL(None).malloc_trim(0)  # what is free goes back, or the next turn would find it there
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
    held = memory("VmRSS")
    run()
    print(f"{memory('VmHWM') - held:.0f}")


def memory(line: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{line}:")[1].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the rows whose name begins so")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--compile", action="store_true", help="with torch.compile of the loop, where τ is 100 at most")
    parser.add_argument("--no-memory", action="store_true", help="without peak memory")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    rows = [row for row in ROWS if row.name.startswith(options.only)]
    if options.peak:
        print_peak(rows[0], options.peak)
        return
    rate = peak_rate()
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {rate / 1e9:.0f} GFLOP/s in one large product\n"
    )
    print(f"{'cell, batch, n, τ':22} {'ms':>8} {'of peak':>8}   times faster than (target)")
    for row in rows:
        runs = contenders(row, options.compile)
        found = medians(runs, options.rounds)
        ours = found["FusedCPU"]
        work = 5 * 2 * row.tau * row.batch * row.n * row.n * row.gates  # products with U and W; ∇h, ∇W, ∇U
        targets = {
            "torch.nn": row.over_torch,
            "JAX scan": row.over_jax,
            "Python loop": 50 if row.cell == "Tide" else None,
        }
        ratios = []
        for name in ("torch.nn", "JAX scan", "Python loop", "torch.compile", "Looped"):
            if name in found:
                ratio, target = found[name] / ours, targets.get(name)
                mark = "" if target is None else f" ({'≥' if ratio >= target else 'MISSED'} {target:g})"
                ratios.append(f"{name} {ratio:.2f}{mark}")
        print(f"{row.name:22} {ours * 1e3:8.2f} {work / ours / rate:8.0%}   {'; '.join(ratios)}", flush=True)
        if not options.no_memory:
            peers = [name for name in ("FusedCPU", "torch.nn", "JAX scan", "Python loop") if name in runs]
            print(f"{'':32} MB: {', '.join(f'{name} {megabytes(row, name)}' for name in peers)}", flush=True)


if __name__ == "__main__":
    main()
