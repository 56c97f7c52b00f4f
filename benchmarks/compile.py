"""torch.compile around layers of ours: is a training step ever slower than without it?

    python benchmarks/compile.py

A step is zero_grad, the loss and its gradients, on one thread; both ways in turn in one process, medians of seconds of
the CPU. Each layer is one operation in torch's graph, which runs the same engine: what is left to gain is the rest, and
what a graph costs by itself is in the first rows, where a linear layer stands in place of the recurrent one.
"""

import statistics
import time

import torch
from tide import Tide
from torch import nn

import loopfold as lf

TAU = 64


MODELS = {  # and what each reads
    "nn.Linear": (lambda: nn.Linear(32, 50), 32),
    "LSTM 32": (lambda: lf.SequenceToSequence(lf.LSTM(32, 32), outputs=50), 32),
    "2 × LSTM 128": (
        lambda: lf.SequenceToSequence(lf.Stacked([lf.LSTM(128, 128), lf.LSTM(128, 128)]), outputs=50),
        128,
    ),
    "GRU 256": (lambda: lf.SequenceToSequence(lf.GRU(256, 256), outputs=50), 256),
    "a cell of one's own, 64": (lambda: lf.SequenceToSequence(Tide(64, 64), outputs=50), 64),
}


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(f"{'model':26}{'batch':>6}{'eager ms':>10}{'compiled':>10}{'eager / compiled':>18}")
    for name, (make, n) in MODELS.items():
        for batch in (1, 16, 64):
            model = make()
            calls = (model, torch.compile(model, fullgraph=True))
            x, y = torch.randn(TAU, batch, n), torch.randint(50, (TAU, batch))
            times: list[list[float]] = [[], []]
            for turn in range(120):
                for call, found in zip(calls, times, strict=True):
                    begin = time.thread_time()
                    model.zero_grad()
                    nn.functional.cross_entropy(call(x).flatten(0, 1), y.flatten()).backward()
                    found += [time.thread_time() - begin] if turn >= 20 else []
            eager, graph = map(statistics.median, times)
            print(f"{name:26}{batch:6}{eager * 1e3:10.2f}{graph * 1e3:10.2f}{eager / graph:18.2f}", flush=True)
            torch._dynamo.reset()


if __name__ == "__main__":
    main()
