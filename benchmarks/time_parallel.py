"""One long sequence: TimeParallel against the engine that runs it in sequence, and against torch's own layer.

    python benchmarks/time_parallel.py                              # two cores: Elman of 64, 256; GRU; LSTM
    python benchmarks/time_parallel.py --device cuda --sizes 256    # against cuDNN
    OMP_NUM_THREADS=1 python benchmarks/time_parallel.py --work     # processor time, where others use the machine too

A cell reads characters, and is trained for a moment on the text of this repository, so that it remembers what such a
cell remembers; `untrained` is the same cell before that. Then one sequence of τ characters is run, forwards and
backwards, by each in turn; times are medians, errors are of the states and of all gradients, relative to the largest
value of each tensor, against the engine that runs it in sequence in float64.
"""

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import loopfold as lf

ROOT = Path(__file__).parent.parent
PIECE = 16384  # steps that torch's layer is given at a time: cuDNN refuses 65,536


def characters(device: str) -> tuple[Tensor, int]:
    text = "".join(path.read_text() for path in sorted(ROOT.glob("docs/*.md")) + sorted(ROOT.glob("src/**/*.py")))
    alphabet = {character: i for i, character in enumerate(sorted(set(text)))}
    return torch.tensor([alphabet[character] for character in text], device=device), len(alphabet)


def trained(cell: nn.Module, ids: Tensor, kinds: int, updates: int) -> None:
    n = cell.cell.hidden_size  # type: ignore[union-attr]
    readout = nn.Linear(n, kinds, device=ids.device)
    optimiser = torch.optim.Adam([*cell.parameters(), *readout.parameters()], 3e-3)
    for _ in range(updates):
        begins = torch.randint(len(ids) - 101, (32,)).tolist()
        windows = torch.stack([ids[begin : begin + 101] for begin in begins], 1)
        logits = readout(lf.unfold(cell, windows[:-1]).hidden)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), windows[1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(cell.parameters(), 1.0)
        optimiser.step()


def everything(cell: nn.Module, x: Tensor, engine: lf.Engine, weights: Tensor) -> list[Tensor]:
    hidden = lf.unfold(cell, x, engine=engine).hidden
    return [hidden.detach(), *torch.autograd.grad(hidden, list(cell.parameters()), weights.to(hidden))]


def error(ours: list[Tensor], truth: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, truth, strict=True))


def medians(
    turns: dict[str, Callable[[], object]], device: str, repeats: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Milliseconds, of calls that take turns."""
    times: dict[str, list[float]] = {name: [] for name in turns}
    for i in range(repeats + 1):
        for name, turn in turns.items():
            if device == "cuda":
                torch.cuda.synchronize()
            begin = clock()
            turn()
            if device == "cuda":
                torch.cuda.synchronize()
            if i:
                times[name].append(1e3 * (clock() - begin))
    return {name: statistics.median(found) for name, found in times.items()}


def measure(name: str, cell: nn.Module, x: Tensor, repeats: int, clock: Callable[[], float]) -> None:
    n, device = cell.cell.hidden_size, x.device.type  # type: ignore[union-attr]
    weights = torch.randn(len(x), 1, n, device=device)
    layer = lf.to_torch(lf.Recurrent(cell.cell))  # type: ignore[arg-type, union-attr]
    ours, plain = lf.TimeParallel(), lf.Auto()

    def torch_layer() -> None:
        state, parts = None, []
        for piece in cell.embedding(x).split(PIECE):  # type: ignore[operator, union-attr]
            hidden, state = layer(piece, state)
            parts.append(hidden)
        leaves = [*layer.parameters(), cell.embedding.weight]  # type: ignore[union-attr]
        torch.autograd.grad(torch.cat(parts), leaves, weights)

    def forwards(engine: lf.Engine) -> None:
        with torch.no_grad():
            lf.unfold(cell, x, engine=engine)

    found = medians(
        {
            "plain": lambda: everything(cell, x, plain, weights),
            "ours": lambda: everything(cell, x, ours, weights),
            "plain forwards": lambda: forwards(plain),
            "ours forwards": lambda: forwards(ours),
        },
        device,
        repeats,
        clock,
    ) | medians({"torch": torch_layer}, device, 1, clock)
    truth = everything(copy.deepcopy(cell).double(), x, plain, weights.double())
    errors = [error(everything(cell, x, engine, weights), truth) for engine in (ours, plain)]
    report = ours.report
    assert report is not None
    how = f"{report.chunks} × {report.chunk}, forgets in {report.forgets}" if report.agreed else "in sequence"
    sweeps = f"{report.sweeps:.2f} + {report.backward_sweeps:.2f}"
    print(
        f"{name:22}{n:5}{len(x):8}  {how:32}{sweeps:12}{found['plain']:9.1f}{found['ours']:9.1f}{found['torch']:9.1f}"
        f"{found['plain'] / found['ours']:8.2f}{found['plain forwards'] / found['ours forwards']:8.2f}"
        f"{found['torch'] / found['ours']:8.2f}   {errors[0]:.0e} ({errors[1]:.0e})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--cells", nargs="+", default=["Elman", "GRU", "LSTM"])
    parser.add_argument("--steps", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--work", action="store_true", help="count processor time")
    options = parser.parse_args()
    clock = time.process_time if options.work else time.perf_counter
    warnings.simplefilter("ignore", lf.EngineWarning)
    torch.manual_seed(0)
    ids, kinds = characters(options.device)
    print(
        f"{'cell':22}{'n':>5}{'τ':>8}  {'chunks':32}{'sweeps':12}{'Auto ms':>9}{'ours':>9}{'torch':>9}"
        f"{'× Auto':>8}{'fwd':>8}{'× torch':>8}   error (Auto's)"
    )
    for kind in options.cells:
        for n in options.sizes:
            cell = lf.Embedded(getattr(lf, kind)(n, n), nn.Embedding(kinds, n)).to(options.device)
            for updates in (0, options.updates):
                trained(cell, ids, kinds, updates)
                for steps in options.steps:
                    x = ids[:steps, None]
                    measure(f"{kind}{'' if updates else ', untrained'}", cell, x, options.repeats, clock)


if __name__ == "__main__":
    main()
