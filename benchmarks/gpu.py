"""Forward and backward time of a recurrence on a GPU: FusedGPU against cuDNN of every dtype and a Python loop.

    python benchmarks/gpu.py                     every table
    python benchmarks/gpu.py --only "LSTM 512"   the rows whose name begins so
    python benchmarks/gpu.py --tau 256           sequences of another length
    python benchmarks/gpu.py --launches 1000000  so many launches beside a busy stream: all equal, bit for bit?

Microseconds a step of one turn: a forward and a backward pass, with the projection of x and the gradients of x and of
all parameters. "GPU" is the replay of a CUDA graph, without any Python; "wall" is the median of calls from Python, the
contenders taking turns. cuDNN's figure is that of its fastest dtype, on the clock that is kinder to it.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tide import Tide
from torch import Tensor, nn

import loopfold as lf

SIZES = [(128, 16), (256, 16), (512, 16), (1024, 16), (1024, 64), (2048, 16)]  # n, batch
ODD_SIZES = [(256, 1), (512, 1), (1024, 1), (512, 128), (512, 512), (650, 20), (1152, 40)]
CELLS: dict[str, tuple[Any, Any]] = {"Elman": (lf.Elman, nn.RNN), "LSTM": (lf.LSTM, nn.LSTM), "GRU": (lf.GRU, nn.GRU)}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# FlashRNN's fused kernels in bf16 (Pöppel et al., 2025), not measured here: µs a step, forward and backward
FLASH_RNN = {"Elman 512, 16": 6.7, "LSTM 512, 16": 10.4, "Elman 1024, 16": 9.2}
Turn = Callable[[], None]


def turn_of(module: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> Turn:
    gradient = torch.ones_like(run(x))

    def turn() -> None:
        module.zero_grad()
        x.grad = None
        run(x).backward(gradient)

    return turn


def ours(cell: nn.Module, x: Tensor, engine: lf.Engine) -> Turn:
    return turn_of(cell, lambda x: lf.unfold(cell, x, engine=engine).hidden, x)


def on_the_gpu(turn: Turn, tau: int) -> float:
    """Microseconds a step of a replayed graph; infinity where the turn cannot be captured."""
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(5):
                turn()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            turn()
    except RuntimeError:
        return float("inf")
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / tau)
    return statistics.median(times)


def on_the_wall(turns: dict[str, Turn], tau: int, rounds: int = 21, warm: int = 9) -> dict[str, float]:
    """Microseconds a step; the first turns are not counted: kernels are compiled, and graphs captured at the sixth."""
    times: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(warm + rounds):
        for name, turn in turns.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            turn()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - begin) * 1e6 / tau)
    return {name: statistics.median(found[warm:]) for name, found in times.items()}


def row(kind: str, n: int, batch: int, tau: int, dtype: str) -> str:
    """One cell at one size, beside the fastest cuDNN."""
    cell, theirs = CELLS[kind]
    fused, wide = cell(n, n).to("cuda", DTYPES[dtype]), torch.randn(tau, batch, n, device="cuda")
    turns = {"ours": ours(fused, wide.to(DTYPES[dtype]).requires_grad_(), lf.FusedGPU())}
    for name, each in DTYPES.items() if dtype != "fp32" else [("fp32", torch.float32)]:
        rnn = theirs(n, n).to("cuda", each)
        turns[name] = turn_of(rnn, lambda x, rnn=rnn: rnn(x)[0], wide.to(each).requires_grad_())
    wall = on_the_wall(turns, tau)
    gpu = {name: on_the_gpu(turn, tau) for name, turn in turns.items()}
    best = min((min(gpu[name], wall[name]), name) for name in turns if name != "ours")
    published = FLASH_RNN.get(f"{kind} {n}, {batch}") if dtype == "bf16" else None
    flash = f"{published:9.1f}" if published else f"{'':9}"
    ratios = f"{best[0] / gpu['ours']:6.2f} {min(wall[k] for k in turns if k != 'ours') / wall['ours']:6.2f}"
    name = f"{kind} {n}, {batch}"
    return f"{name:18}{gpu['ours']:8.2f}{wall['ours']:8.2f}{best[0]:9.2f} {best[1]:5}{flash}  {ratios}"


def own_cell(n: int, batch: int, tau: int) -> str:
    cell = Tide(n, n).to("cuda", torch.bfloat16)
    x = torch.randn(tau, batch, n, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    engines = {"FusedGPU": lf.FusedGPU(), "Looped": lf.Looped(), "Sequential": lf.Sequential()}
    wall = on_the_wall({name: ours(cell, x, engine) for name, engine in engines.items()}, tau)
    figures = "  ".join(f"{name} {figure:.2f}" for name, figure in wall.items())
    return f"Tide {n}, {batch}: {figures}; {wall['Sequential'] / wall['FusedGPU']:.0f} times the Python loop"


def launches(count: int, each: int = 500) -> str:
    """Many short runs, replayed as graphs of `each`, while another stream keeps the GPU busy."""
    cell, x = lf.LSTM(8, 256).to("cuda", torch.bfloat16), torch.randn(4, 16, 8, device="cuda", dtype=torch.bfloat16)
    wrong, big = torch.zeros((), dtype=torch.int64, device="cuda"), torch.randn(4096, 4096, device="cuda")
    busy = torch.cuda.Stream()
    with torch.no_grad():
        expected = [lf.unfold(cell, x, engine=lf.FusedGPU()).hidden for _ in range(5)][-1]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(each):
                wrong += (lf.unfold(cell, x, engine=lf.FusedGPU()).hidden != expected).any()
        begin = time.perf_counter()
        for turn in range(count // each):
            graph.replay()
            with torch.cuda.stream(busy):
                big @ big
            if turn % 20 == 0:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
    lf.unfold(cell, x, engine=lf.FusedGPU())  # raises an error where a kernel has waited in vain
    seconds = time.perf_counter() - begin
    return f"{count // each * each:,} launches beside a busy stream in {seconds:.0f} s: {int(wrong)} differ"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name begins so")
    parser.add_argument("--tau", type=int, default=1024, help="steps of a sequence")
    parser.add_argument("--launches", type=int, help="how many, beside a busy stream; no tables")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU.")
    warnings.filterwarnings("ignore", message="RNN module weights")
    if arguments.launches:
        print(launches(arguments.launches))
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, τ = {arguments.tau}")
    for dtype, sizes in (("bf16", SIZES), ("bf16", ODD_SIZES), ("fp32", SIZES[:4])):
        names = [(kind, n, batch) for kind in CELLS for n, batch in sizes]
        names = [(kind, n, b) for kind, n, b in names if f"{kind} {n}, {b}".startswith(arguments.only)]
        if names:
            print(f"\n{dtype}, µs a step{'':3}     GPU    wall    cuDNN       FlashRNN  GPU ×  wall ×")
        for kind, n, batch in names:
            print(row(kind, n, batch, arguments.tau, dtype), flush=True)
    if "Tide".startswith(arguments.only):
        print("\n" + own_cell(512, 16, arguments.tau))


if __name__ == "__main__":
    main()
