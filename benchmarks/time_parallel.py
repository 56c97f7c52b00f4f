"""One long sequence: TimeParallel against the engine that runs it in sequence, and against torch's own layer.

    python benchmarks/time_parallel.py                              # two cores: Elman of 64, 256; GRU; LSTM
    python benchmarks/time_parallel.py --device cuda --sizes 256    # against FusedGPU and cuDNN
    python benchmarks/time_parallel.py --device cuda --sizes 256 --cells GRU --steps 65536 --chunks 128 512 2048
    python benchmarks/time_parallel.py --cells LSTM --forget-bias 4     # that remembers
    OMP_NUM_THREADS=1 python benchmarks/time_parallel.py --work     # processor time, where others use the machine too

A cell reads characters, and is trained for a moment on the text of this repository, so that it remembers what such a
cell remembers; `untrained` is the same cell before that. Then one sequence of τ characters is run, forwards and
backwards, by each in turn; times are medians, errors are of the states and of all gradients, relative to the largest
value of each tensor, against a run in sequence in float64 on the CPU.
"""

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import loopfold as lf

ROOT = Path(__file__).parent.parent
PIECE = 16384  # steps that torch's layer is given at a time: cuDNN refuses 65,536

Forwards = Callable[[], Tensor]  # the hidden states


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
    found = [hidden.detach(), *torch.autograd.grad(hidden, list(cell.parameters()), weights.to(hidden))]
    return [t.double().cpu() for t in found]


def error(ours: list[Tensor], truth: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, truth, strict=True))


def medians(
    turns: dict[str, tuple[Forwards, list[Tensor]]], weights: Tensor, repeats: int, clock: Callable[[], float]
) -> dict[str, tuple[float, float]]:
    """Milliseconds forwards and backwards, of calls that take turns; the first of each is not counted."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}

    def now() -> float:
        if weights.is_cuda:
            torch.cuda.synchronize()
        return clock()

    for _ in range(repeats + 1):
        for name, (forwards, sources) in turns.items():
            begin = now()
            hidden = forwards()
            middle = now()
            torch.autograd.grad(hidden, sources, weights)
            times[name].append((1e3 * (middle - begin), 1e3 * (now() - middle)))
            del hidden
    return {
        name: (statistics.median(there for there, _ in found[1:]), statistics.median(back for _, back in found[1:]))
        for name, found in times.items()
    }


def measure(
    name: str, cell: nn.Module, x: Tensor, chunks: Sequence[int | None], repeats: int, clock: Callable[[], float]
) -> None:
    n = cell.cell.hidden_size  # type: ignore[union-attr]
    weights = torch.randn(len(x), 1, n, device=x.device)
    layer = lf.to_torch(lf.Recurrent(cell.cell))  # type: ignore[arg-type, union-attr]
    engines = {"Auto": lf.Auto()} | {
        f"chunks of {c}" if c else "TimeParallel": lf.TimeParallel(chunk=c) for c in chunks
    }

    def torch_layer() -> Tensor:
        state, parts = None, []
        for piece in cell.embedding(x).split(PIECE):  # type: ignore[operator, union-attr]
            hidden, state = layer(piece, state)
            parts.append(hidden)
        return torch.cat(parts)

    turns: dict[str, tuple[Forwards, list[Tensor]]] = {
        name: (lambda engine=engine: lf.unfold(cell, x, engine=engine).hidden, list(cell.parameters()))  # type: ignore[misc]
        for name, engine in engines.items()
    }
    found = medians(turns, weights, repeats, clock)
    sources = [*layer.parameters(), cell.embedding.weight]  # type: ignore[union-attr]
    found |= medians({"torch's layer": (torch_layer, sources)}, weights, 1, clock)  # type: ignore[dict-item]
    truth = everything(copy.deepcopy(cell).double().cpu(), x.cpu(), lf.Auto(), weights.cpu())
    print(f"{name}, n = {n}, τ = {len(x)}, {lf.Recurrent(cell).explain(x).splitlines()[0].split(': ')[1]}")  # type: ignore[arg-type]
    print(f"  {'ms':16}{'there':>9}{'back':>9}{'both':>9}{'× Auto':>9}{'× torch':>9}{'error':>9}")
    for who, (there, back) in found.items():
        ratios = [sum(found[other]) / (there + back) for other in ("Auto", "torch's layer")]
        line = f"  {who:16}{there:9.1f}{back:9.1f}{there + back:9.1f}{ratios[0]:9.2f}{ratios[1]:9.2f}"
        if who in engines:
            line += f"{error(everything(cell, x, engines[who], weights), truth):9.0e}"
        print(line, flush=True)
    for who, engine in engines.items():
        if not isinstance(engine, lf.TimeParallel):
            continue
        report = engine.report
        assert report is not None
        ways = f"{report.sweeps:.3g} sweeps there and {report.backward_sweeps:.3g} back"
        left = f"seams {report.defect or 0:.0e} apart, back {report.backward_defect or 0:.0e}"
        print(f"  {who}: {report.chunks} × {report.chunk}; {ways}; {left}" if report.agreed else f"  {report.why}")
        for words in lf.Recurrent(cell, engine).explain(x).splitlines()[1:4]:  # type: ignore[arg-type]
            print(f"    explained: {words.strip()}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--cells", nargs="+", default=["Elman", "GRU", "LSTM"])
    parser.add_argument("--steps", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--chunks", type=int, nargs="*", default=[], help="steps of a chunk to try besides its own")
    parser.add_argument("--forget-bias", type=float, default=1.0, help="of an LSTM")
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--work", action="store_true", help="count processor time")
    options = parser.parse_args()
    clock = time.process_time if options.work else time.perf_counter
    warnings.simplefilter("ignore", lf.EngineWarning)
    torch.manual_seed(0)
    ids, kinds = characters(options.device)
    begin = time.perf_counter()
    for kind in options.cells:
        for n in options.sizes:
            more = {"forget_bias": options.forget_bias} if kind == "LSTM" else {}
            cell = lf.Embedded(getattr(lf, kind)(n, n, **more), nn.Embedding(kinds, n)).to(options.device)
            for updates in (0, options.updates):
                trained(cell, ids, kinds, updates)
                for steps in options.steps:
                    x, name = ids[:steps, None], f"{kind}{'' if updates else ', untrained'}"
                    measure(name, cell, x, [None, *options.chunks], options.repeats, clock)
    print(f"{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
