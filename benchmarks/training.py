"""Training a character model: tokens a second and memory, beside the same model written plainly with torch.nn.

    python benchmarks/training.py
    python benchmarks/training.py --device cuda

One layer of 256 units, an embedding of as many, 32 streams, windows of 64, AdamW, gradients clipped. The plain model is
`nn.Embedding`, `nn.RNN`, `nn.GRU` or `nn.LSTM`, `nn.Linear`, cross-entropy and autograd. Both take turns in one run, a
step each; the medians are compared. Memory, on a CPU, is the largest resident set of a process that trains one of them
alone; beside it, how much that is above the process before its first step.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from memory import largest
from torch import Tensor, nn

import loopfold as lf
from loopfold.states import detached
from loopfold.training.making import make_model

V, N, STREAMS, WINDOW = 66, 256, 32, 64
TORCH = {"elman": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


class Plain(nn.Module):
    """The model as one writes it with torch alone."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V + 1, N)
        self.recurrent = kind(N, N)
        self.readout = nn.Linear(N, V)

    def forward(self, x: Tensor, state: object) -> tuple[Tensor, object]:
        hidden, state = self.recurrent(self.embedding(x), state)
        return self.readout(hidden), state


def plain_step(cell: str, device: str) -> Callable[[], None]:
    model = Plain(TORCH[cell]).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.randint(V, (WINDOW + 1, STREAMS), device=device)
    state: object = None

    def step() -> None:
        nonlocal state
        o, new = model(tokens[:-1], state)
        state = detached(new)
        loss = nn.functional.cross_entropy(o.flatten(0, 1), tokens[1:].flatten())
        _descend(model, optimiser, loss)

    return step


def our_step(cell: str, device: str) -> Callable[[], None]:
    model = make_model(lf.Options(cell=cell, hidden_size=N), V).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.randint(V, (WINDOW, STREAMS), device=device)
    context = model.initial_context(STREAMS)

    def step() -> None:
        nonlocal context
        scored = model(tokens, context)
        context = detached(scored.context)
        _descend(model, optimiser, scored.nll.mean())

    return step


def _descend(model: nn.Module, optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    optimiser.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()


def compare(cell: str, device: str, turns: int = 60) -> tuple[float, float]:
    """Seconds a step, ours and plain."""
    steps = [our_step(cell, device), plain_step(cell, device)]
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times: list[list[float]] = [[], []]
    for turn in range(turns):
        for step, seconds in zip(steps, times, strict=True):
            wait()
            begin = time.perf_counter()
            step()
            wait()
            if turn >= 5:
                seconds.append(time.perf_counter() - begin)
    ours, plain = map(statistics.median, times)
    return ours, plain


def memory(which: str, cell: str) -> tuple[float, float]:
    """The largest resident set in MB, and how much of it came with training, measured in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--memory", which, cell], capture_output=True, text=True, check=True
    )
    before, peak = map(float, done.stdout.split())
    return peak, peak - before


def _measure_memory(which: str, cell: str) -> None:
    step = our_step(cell, "cpu") if which == "ours" else plain_step(cell, "cpu")
    before = largest()
    for _ in range(30):
        step()
    print(before, largest())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--memory", nargs=2, metavar=("WHICH", "CELL"), help="only the memory of one of them")
    arguments = parser.parse_args()
    if arguments.memory:
        _measure_memory(*arguments.memory)
        return
    on_cpu, tokens = arguments.device == "cpu", STREAMS * WINDOW
    print(f"V = {V}, n = {N}, {STREAMS} streams, windows of {WINDOW}; torch {torch.__version__}, {arguments.device}")
    print(f"{'cell':<6} {'ours tok/s':>11} {'torch.nn':>9} {'ratio':>6}" + ("   ours MB  torch.nn" if on_cpu else ""))
    for cell in TORCH:
        ours, plain = compare(cell, arguments.device)
        line = f"{cell:<6} {tokens / ours:>11,.0f} {tokens / plain:>9,.0f} {plain / ours:>6.2f}"
        if on_cpu:
            (our_peak, ours_more), (plain_peak, plain_more) = memory("ours", cell), memory("plain", cell)
            line += f"   {our_peak:>7.0f} {plain_peak:>9.0f}   (training itself {ours_more:.0f} and {plain_more:.0f})"
        print(line)


if __name__ == "__main__":
    main()
