"""Training a word model: tokens a second and memory, beside the same model written plainly with torch.nn.

    python benchmarks/words.py
    python benchmarks/words.py --device cuda
    python benchmarks/words.py --vocabulary 33278 --hidden 512

10,000 words, one LSTM of 256 units whose embeddings are tied to the readout, dropout 0.4, 32 streams, windows of 35,
AdamW, gradients clipped. The plain model is `nn.Embedding`, `nn.LSTM`, `F.linear` and cross-entropy. Both take turns in
one run, a step each; the medians are compared. Memory is the largest resident set of a process that trains one of them
alone, and beside it how much of that came with its steps; or the most that torch has held of a GPU.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from memory import largest
from torch import Tensor, nn

import loopfold as lf
from loopfold.language.recurrent import recurrent_lm
from loopfold.states import detached

STREAMS, WINDOW, DROPOUT = 32, 35, 0.4
Step = Callable[[], None]


class Plain(nn.Module):
    """The model as one writes it with torch alone."""

    def __init__(self, words: int, n: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, n)
        self.recurrent = nn.LSTM(n, n)
        self.c = nn.Parameter(torch.zeros(words))
        nn.init.normal_(self.embedding.weight, std=n**-0.5)

    def forward(self, x: Tensor, state: object) -> tuple[Tensor, object]:
        hidden, state = self.recurrent(self.embedding(x), state)
        return F.linear(F.dropout(hidden, DROPOUT, self.training), self.embedding.weight, self.c), state


def plain_step(words: int, n: int, device: str) -> Step:
    model = Plain(words, n).to(device)
    tokens = torch.randint(words, (WINDOW + 1, STREAMS), device=device)
    descend, state = _descent(model), None

    def step() -> None:
        nonlocal state
        o, new = model(tokens[:-1], state)
        state = detached(new)
        descend(F.cross_entropy(o.flatten(0, 1), tokens[1:].flatten()))

    return step


def our_step(words: int, n: int, device: str) -> Step:
    model = recurrent_lm(words, [lf.LSTM(n, n)], n, DROPOUT, tied=True).to(device)
    tokens = torch.randint(words, (WINDOW, STREAMS), device=device)
    descend, context = _descent(model), model.initial_context(STREAMS)

    def step() -> None:
        nonlocal context
        scored = model(tokens, context)
        context = detached(scored.context)
        descend(scored.nll.sum() / tokens.numel())

    return step


def _descent(model: nn.Module) -> Callable[[Tensor], None]:
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def descend(loss: Tensor) -> None:
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()

    return descend


MAKE = {"ours": our_step, "torch.nn": plain_step}


def compare(words: int, n: int, device: str, turns: int = 40) -> dict[str, float]:
    """Seconds a step of each."""
    steps = {name: make(words, n, device) for name, make in MAKE.items()}
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(turns):
        for name, step in steps.items():
            wait()
            begin = time.perf_counter()
            step()
            wait()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(found[8:]) for name, found in times.items()}


def memory(which: str, words: int, n: int, device: str) -> tuple[float, float]:
    """The most MB that training takes, and how much of it came with its steps, measured in a process of its own."""
    flags = ["--memory", which, "--vocabulary", str(words), "--hidden", str(n), "--device", device]
    done = subprocess.run([sys.executable, __file__, *flags], capture_output=True, text=True, check=True)
    before, peak = map(float, done.stdout.split())
    return peak, peak - before


def _measure_memory(which: str, words: int, n: int, device: str) -> None:
    def most() -> float:
        return torch.cuda.max_memory_allocated() / 1e6 if device == "cuda" else largest()

    step = MAKE[which](words, n, device)
    before = most()
    for _ in range(12):
        step()
    print(before, most())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--vocabulary", type=int, default=10_000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--memory", choices=MAKE, help="only the memory of one of them")
    given = parser.parse_args()
    words, n, device = given.vocabulary, given.hidden, given.device
    if given.memory:
        _measure_memory(given.memory, words, n, device)
        return
    print(f"|V| = {words:,}, n = {n}, {STREAMS} streams, windows of {WINDOW}; torch {torch.__version__}, {device}")
    seconds = compare(words, n, device)
    for name in MAKE:
        rate, (most, more) = STREAMS * WINDOW / seconds[name], memory(name, words, n, device)
        print(f"{name:<9} {rate:>9,.0f} tokens/s {most:>7,.0f} MB   (its steps {more:.0f})")
    print(f"{seconds['torch.nn'] / seconds['ours']:.2f} times torch.nn's tokens a second")


if __name__ == "__main__":
    main()
