"""On a GPU: the same values as on the CPU. Skipped where there is none."""

import copy
import gc
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_autocast
import test_fused_gpu
import test_seams
import test_time_parallel
import torch
import zoo
from test_engines import SINGLE, errors
from test_random_steps import assert_agrees_in_single_precision
from torch import Tensor, nn

import loopfold as lf
from loopfold.engines import driver, looped, programs, replay, selfcheck
from loopfold.language import readout
from loopfold.language.base import losses
from loopfold.language.readout import readout_losses
from loopfold.states import leaves, map_state, rebuild
from loopfold.training import replaying
from loopfold.transitions import initial_state

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def gradients(cell: nn.Module, x: Tensor, lengths: list[int] | None, engine: lf.Engine) -> list[Tensor]:
    cell.zero_grad()
    run = lf.unfold(cell, x, lengths=lengths, engine=engine)
    (run.hidden.square().sum() + run.last_hidden.sum()).backward()
    return [run.hidden.detach().cpu(), *[p.grad.cpu().clone() for p in cell.parameters() if p.grad is not None]]


@pytest.mark.parametrize("make", zoo.WITH_INPUT, ids=lambda m: m.__name__)
@pytest.mark.parametrize("lengths", [None, [9, 1, 4]])
def test_a_gpu_gives_what_the_cpu_gives(make: Callable[[int, int], nn.Module], lengths: list[int] | None) -> None:
    torch.manual_seed(0)
    cell, x = make(4, 17).double(), torch.randn(9, 3, 4).double()
    expected = gradients(cell, x, lengths, lf.Sequential())
    for engine in (lf.Sequential(), lf.Looped(), lf.Auto()):
        found = gradients(cell.cuda(), x.cuda(), lengths, engine)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


# ------------------------------------------------------------------ FusedGPU


SMOOTH = [make for make in zoo.WITH_INPUT if make not in (zoo.relu_elman, zoo.irnn)]


@pytest.mark.parametrize("make", zoo.WITH_INPUT, ids=lambda m: m.__name__)
@pytest.mark.parametrize("n", [3, 17, 128])
def test_fused_kernels_agree_in_single_precision(make: Callable[[int, int], nn.Module], n: int) -> None:
    for tau, batch, unequal in ((1, 1, False), (9, 11, True), (40, 16, False)):
        if make not in SMOOTH and n * tau > 200:  # a unit that is nearly zero may be on either side of it
            continue
        cell, x = make(4, n), torch.randn(tau, batch, 4)
        lengths = [1 + (7 * i) % tau for i in range(batch)] if unequal else None
        truth = _everything(copy.deepcopy(cell).double(), x.double(), lengths, lf.Sequential())
        theirs, ours = (_everything(cell.cuda(), x.cuda(), lengths, e) for e in (lf.Sequential(), lf.FusedGPU()))
        # products have 22 bits, not 24; and a gradient that is a sum of large terms loses some of these
        bound = max(5 * SINGLE, 20 * max(errors(theirs, truth).values()))
        assert {k: error for k, error in errors(ours, truth).items() if not error <= bound} == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", [lf.Elman, lf.LSTM, lf.GRU, lf.MGU, lf.LayerNormLSTM, zoo.PeepholeLSTM, zoo.Slots])
def test_fused_kernels_in_half_precision(make: Callable[[int, int], nn.Module], dtype: torch.dtype) -> None:
    cell, x = make(4, 64).to("cuda", dtype), torch.randn(30, 16, 4).to("cuda", dtype)
    theirs, ours = (_everything(cell, x, None, e) for e in (lf.Sequential(), lf.FusedGPU()))
    truth = _everything(cell.double(), x.double(), None, lf.Sequential())
    assert max(errors(ours, truth).values()) <= 2 * max(errors(theirs, truth).values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", [*SMOOTH, test_fused_gpu.linear], ids=lambda m: m.__name__)
def test_engines_agree_under_autocast(make: Callable[[int, int], nn.Module], dtype: torch.dtype) -> None:
    """Among steps of half precision a result between two neighbours may go to either, and later ones follow it."""
    if make is zoo.Clockwork:  # torch.lerp takes one dtype only
        return
    for n, tau, batch, unequal in ((17, 9, 11, True), (64, 30, 16, False)):
        cell, x = make(4, n).cuda(), torch.randn(tau, batch, 4).cuda()
        lengths = [1 + (7 * i) % tau for i in range(batch)] if unequal else None
        truth = _everything(copy.deepcopy(cell).double(), x.double(), lengths, lf.Sequential())
        theirs = _everything(cell, x, lengths, lf.Sequential(), dtype)
        finite = [k for k, v in theirs.items() if bool(v.isfinite().all())]  # gradients may be too large for float16
        bound = 2 * max(errors(theirs, truth)[k] for k in finite)
        for engine in (lf.Looped(), lf.FusedGPU()):
            found = errors(_everything(cell, x, lengths, engine, dtype), truth)
            assert {k: found[k] for k in finite if not found[k] <= bound} == {}


def test_small_increments_are_not_lost_under_autocast() -> None:
    cell = test_autocast.Plain(lambda f, h, x: 0.9995 * h + x).cuda()
    x = torch.full((2000, 2, 5), 2.0**-12).cuda()
    for engine in (lf.Looped(), lf.FusedGPU()):
        ours, theirs = (_everything(cell, x, None, e, torch.bfloat16) for e in (engine, lf.Sequential()))
        assert max(errors(ours, theirs).values()) <= 1e-5


def _everything(
    cell: nn.Module, x: Tensor, lengths: list[int] | None, engine: lf.Engine, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """States and all gradients, for a loss that uses every state; with a dtype, under autocast to it."""
    cell.zero_grad()
    x = x.detach().clone().requires_grad_()
    with torch.autocast("cuda", dtype, enabled=dtype is not None):
        run = lf.unfold(cell, x, lengths=lengths, engine=engine)
    states = {f"states {i}": leaf for i, leaf in enumerate(leaves(run.states))}
    weights = torch.Generator().manual_seed(5)
    losses = [(v.double() * torch.randn(v.shape, generator=weights).to(v.device)).sum() for v in states.values()]
    torch.stack(losses).sum().backward()
    sources = {"x": x, **dict(cell.named_parameters())}
    found = states | {f"∇{k}": p.grad for k, p in sources.items() if p.grad is not None}
    return {k: v.detach().double().cpu() for k, v in found.items()}


@pytest.mark.parametrize("make", [*test_fused_gpu.STATEFUL], ids=lambda m: m.__name__)
def test_odd_states_on_a_gpu(make: Callable[[], nn.Module]) -> None:
    cell, x = make(), torch.randn(9, 11, test_fused_gpu.STATEFUL[make])
    truth = _everything(copy.deepcopy(cell).double(), x.double(), None, lf.Sequential())
    ours = _everything(cell.cuda(), x.cuda(), None, lf.FusedGPU())
    assert max(errors(ours, truth).values()) <= 5 * SINGLE


def test_tf32_as_torch_is_told() -> None:
    cell, x = lf.LSTM(8, 128).cuda(), torch.randn(20, 16, 8).cuda()
    exact = lf.unfold(cell, x, engine=lf.FusedGPU()).hidden
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        rough = lf.unfold(cell, x, engine=lf.FusedGPU()).hidden
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert 1e-6 < float((exact - rough).detach().abs().max()) < 1e-2


@pytest.mark.parametrize("seed", range(60))
def test_random_steps_on_a_gpu(seed: int) -> None:
    assert_agrees_in_single_precision(seed, lf.FusedGPU(), "cuda")


@pytest.mark.parametrize(("n", "batch"), [(1, 1), (5, 300), (64, 2000), (600, 3), (1024, 130)])
def test_small_and_large_sizes(n: int, batch: int) -> None:
    cell, x = lf.GRU(3, n).cuda(), torch.randn(6, batch, 3).cuda()
    theirs, ours = (_everything(cell, x, None, e) for e in (lf.Sequential(), lf.FusedGPU()))
    assert max(errors(ours, theirs).values()) <= 2e-5


def test_weights_that_do_not_fit_are_refused() -> None:
    cell, x = lf.LSTM(3, 6000).cuda(), torch.randn(9, 2, 3).cuda()
    with pytest.raises(ValueError, match="it does not fit into the registers"):
        lf.unfold(cell, x, engine=lf.FusedGPU())
    assert "Looped, because FusedGPU cannot run it: it does not fit" in lf.Recurrent(cell).explain(x)


def test_a_graph_of_cuda_can_capture_a_run_with_its_way_back() -> None:
    cell, x = lf.LSTM(8, 64).cuda(), torch.randn(20, 16, 8, device="cuda", requires_grad=True)

    def step() -> None:
        cell.zero_grad()
        x.grad = None
        lf.unfold(cell, x, engine=lf.FusedGPU()).hidden.square().sum().backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(selfcheck.FIRST + 1):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    with torch.no_grad():
        x.copy_(torch.randn(20, 16, 8))
    graph.replay()
    torch.cuda.synchronize()
    assert x.grad is not None
    assert cell.W.grad is not None
    replayed = x.grad.clone(), cell.W.grad.clone()
    step()
    torch.testing.assert_close(replayed, (x.grad, cell.W.grad))


def side_by_side(runs: list[tuple[nn.Module, Tensor]], engine: lf.Engine, times: int) -> list[list[Tensor]]:
    """What each run gives, so many times, each on a stream of its own."""
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in runs]
    found: list[list[Tensor]] = [[] for _ in runs]
    for _ in range(times):
        for stream, (cell, x), results in zip(streams, runs, found, strict=True):
            with torch.cuda.stream(stream), torch.no_grad():
                results.append(lf.unfold(cell, x, engine=engine).hidden)
    torch.cuda.synchronize()
    return found


def test_runs_on_several_streams_are_equal_bit_for_bit() -> None:
    cells = [lf.LSTM(8, 256).cuda().bfloat16() for _ in range(2)]
    x = torch.randn(50, 16, 8).cuda().bfloat16()
    alone = [lf.unfold(cell, x, engine=lf.FusedGPU()).hidden.detach() for cell in cells]
    found = side_by_side([(cell, x) for cell in cells], lf.FusedGPU(), 200)
    assert all(torch.equal(one, expected) for results, expected in zip(found, alone, strict=True) for one in results)


def test_a_block_that_is_lost_is_an_error_and_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, x = lf.Elman(8, 512).cuda(), torch.randn(10, 8, 8).cuda()

    def run() -> Tensor:
        with torch.no_grad():
            return lf.unfold(cell, x, engine=lf.FusedGPU()).hidden

    monkeypatch.setattr(replay, "OFTEN", 10**9)  # what is replayed is not launched
    before = [run() for _ in range(selfcheck.FIRST + 1)][-1]  # later runs are not looked at at once
    launch = driver.CudaLauncher.launch
    with monkeypatch.context() as patch:
        patch.setattr(driver.CudaLauncher, "launch", lambda self, blocks, *rest: launch(self, blocks - 1, *rest))
        run()
        torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="waited for numbers that did not come"):
        run()
    assert torch.equal(run(), before)  # the GPU goes on working


# ------------------------------------------------------------------ self-checks


def test_later_checks_make_nobody_wait() -> None:
    """Once the first runs have been checked, none waits for the GPU, though every one of them is checked."""
    cell, x = lf.LSTM(3, 17).cuda(), torch.randn(9, 4, 3).cuda()
    watch = _checked_runs(cell, x)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls this mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        for _ in range(5):
            watch.credit = 1.0
            lf.unfold(cell, x, engine=lf.Looped()).hidden.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watch.pending is not None
    torch.cuda.synchronize()
    assert watch.doubts() == []


def test_a_corrupted_kernel_is_found_out_at_a_later_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, x = lf.LSTM(3, 17).cuda(), torch.randn(9, 4, 3).cuda()
    monkeypatch.setattr(replay, "OFTEN", 10**9)  # what is replayed does not call it
    watch = _checked_runs(cell, x)
    right = looped._LoopedKernel.forward

    def wrong(self: Any, *arguments: Any) -> Any:
        emitted, kept = right(self, *arguments)
        emitted[0][:, 0, -1] += 1e-2
        return emitted, kept

    monkeypatch.setattr(looped._LoopedKernel, "forward", wrong)
    watch.credit = 1.0
    lf.unfold(cell, x, engine=lf.Looped())
    torch.cuda.synchronize()
    with pytest.warns(lf.EngineWarning, match="was wrong about LSTM"):
        found = lf.unfold(cell, x, engine=lf.Looped()).hidden
    assert torch.equal(found, lf.unfold(cell, x, engine=lf.Sequential()).hidden)


def _checked_runs(cell: nn.Module, x: Tensor) -> selfcheck.Watch:
    for _ in range(selfcheck.FIRST + 5):  # once captured, with its way back, nothing waits either
        lf.unfold(cell, x, engine=lf.Looped()).hidden.sum().backward()
    return programs.program_of(lf.unfolding.checked(cell, x, None, None, None)).program.watch.of("Looped")


def test_what_stays_on_the_cpu_says_so() -> None:
    cell, x = lf.Elman(3, 5).cuda(), torch.randn(20, 2, 3)
    with pytest.raises(ValueError, match="x is on cpu and Elman's parameters on cuda:0"):
        lf.unfold(cell, x)
    with pytest.raises(ValueError, match="FusedCPU cannot run Elman: it runs on the CPU and the state is on cuda:0"):
        lf.unfold(cell, x.cuda(), engine=lf.FusedCPU())
    assert "FusedGPU, because its loop is one kernel" in lf.Recurrent(cell).explain(x.cuda())
    assert "Looped, because so few steps" in lf.Recurrent(cell).explain(x[:4].cuda())
    assert "FusedGPU cannot run it: it has kernels for" in lf.Recurrent(cell.double()).explain(x.double().cuda())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["sum", "mean", "autocast"])
def test_a_readout_in_pieces_on_a_gpu(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same in one piece, in double precision; what is lost is what one piece in that dtype loses too."""
    monkeypatch.setattr(readout, "SMALL", 0)
    monkeypatch.setattr(readout, "ROWS", 0)
    monkeypatch.setitem(readout.PIECE, "cuda", 4 * 4 * 300)
    sizes, y = ((7, 3, 20), (300, 20), (300,)), torch.randint(300, (7, 3), device="cuda")
    given = [torch.randn(*size, device="cuda", dtype=dtype).requires_grad_() for size in sizes]

    def figures(f: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16, enabled=kind == "autocast" and tensors is given):
            nll = f(*tensors, y, torch.tensor([7, 1, 4], device="cuda"))
        loss = nll.mean() if kind == "mean" else nll.sum()
        return [t.detach().double() for t in (nll, *torch.autograd.grad(loss, tensors))]

    def in_one(h: Tensor, V: Tensor, c: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        return losses(c + h @ V.T, y, lengths)

    truth = figures(in_one, [t.detach().double().requires_grad_() for t in given])
    for ours, theirs, exact in zip(figures(readout_losses, given), figures(in_one, given), truth, strict=True):
        assert float((ours - exact).abs().max()) <= 2 * float((theirs - exact).abs().max()) + 1e-6


def test_the_device_of_a_run_may_change(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog sat on the cat. " * 80)
    options = lf.Options(sources=(str(tmp_path / "text.txt"),), hidden_size=24, epochs=1.0, streams=4, window=16)
    lf.train(replace(options, device="auto"), tmp_path / "run")
    run = lf.resume(tmp_path / "run", epochs=2.0, device="cpu")
    run = lf.resume(tmp_path / "run", epochs=3.0, device="cuda")
    assert run.options.device == "cuda"
    assert run.metrics[-1]["epoch"] == 3


def test_a_language_model_on_a_gpu_learns_what_it_learns_on_the_cpu(tmp_path: Path) -> None:
    """The whole way: tokens, training, ledger, generation; the two differ by rounding only."""
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog sat on the cat. " * 80)
    options = lf.Options(sources=(str(tmp_path / "text.txt"),), hidden_size=24, epochs=2.0, streams=4, window=16)
    runs = {device: lf.train(replace(options, device=device), tmp_path / device) for device in ("cpu", "cuda")}
    losses = [run.metrics[-1]["valid"] for run in runs.values()]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    run = lf.open_run(tmp_path / "cuda", device="cuda")
    tokens = run.vocabulary.encode("the dog sat on the mat. " * 20)
    on_gpu, on_cpu = lf.perplexity(run.model, tokens), lf.perplexity(runs["cuda"].model.cpu(), tokens)
    assert on_gpu.nll == pytest.approx(on_cpu.nll, rel=1e-4)
    generator = torch.Generator("cuda").manual_seed(0)
    for pick in (lf.Greedy(), lf.Sample(generator, 0.8, top_k=5, top_p=0.9), lf.Beam(3)):
        assert len(lf.generate(run.model, run.vocabulary, "the ", 20, pick)) == 20


# ------------------------------------------------------------------ runs as CUDA graphs


def graphs_of(cell: nn.Module) -> list[Any]:
    return [graph for kept in programs._shelves[cell].beside.values() for graph in kept.graphs]


@pytest.mark.parametrize("make", [lf.LSTM, lf.LayerNormLSTM, zoo.Sliced], ids=lambda m: m.__name__)
@pytest.mark.parametrize("lengths", [None, [9, 1, 4]])
@pytest.mark.parametrize("engine", [lf.Looped(), lf.FusedGPU()], ids=str)
def test_replayed_graphs_give_what_the_cpu_gives(
    engine: lf.Engine, make: Callable[[int, int], nn.Module], lengths: list[int] | None
) -> None:
    """Run, captured, replayed: with other numbers, weights and lengths each time, and at last with other sizes."""
    dtype, tolerance = (torch.float64, 1e-9) if engine == lf.Looped() else (torch.float32, 5e-4)
    cell = make(4, 17).double()
    ours = copy.deepcopy(cell).to("cuda", dtype)
    for turn in range(14):
        x = torch.randn(9 + turn // 12, 3, 4)
        with torch.no_grad():
            for p, own in zip(cell.parameters(), ours.parameters(), strict=True):
                own.copy_(p.add_(0.1 * torch.randn_like(p)))
        ends = None if lengths is None else [lengths[(i + turn) % 3] for i in range(3)]
        expected = gradients(cell, x.double(), ends, lf.Sequential())
        found = gradients(ours, x.to("cuda", dtype), ends, engine)
        torch.testing.assert_close([t.double() for t in found], expected, rtol=tolerance, atol=tolerance)
    (graph,) = graphs_of(ours)
    assert [way is not None for way in graph.ways_back.values()] == [True]


@pytest.mark.parametrize("engine", [lf.Looped(), lf.FusedGPU()], ids=str)
def test_training_by_graphs_is_training_without(engine: lf.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, two runs for each way back, losses on parts, an optimiser."""

    def train(often: int) -> tuple[list[Tensor], int]:
        monkeypatch.setattr(replay, "OFTEN", often)
        torch.manual_seed(1)
        cell = lf.Embedded(lf.LSTM(5, 24), nn.Embedding(11, 5)).cuda()
        optimiser = torch.optim.Adam(cell.parameters(), 0.01)
        tokens = torch.randint(11, (40, 20, 8), generator=torch.Generator().manual_seed(2)).cuda()
        kept = []
        for i, x in enumerate(tokens):
            first = lf.unfold(cell, x, engine=engine)
            second = lf.unfold(cell, x.flip(0), first.last, engine=engine)
            last = [second.hidden[3:].square().sum(), second.last[1].sum(), (second.states[0] - first.hidden).sum()]
            optimiser.zero_grad()
            (last[i % 3] + first.hidden[5].sum()).backward()
            optimiser.step()
            kept.append(second.hidden)
        return [*kept, *cell.parameters()], len(graphs_of(cell))

    (ours, captured), (theirs, none) = train(4), train(10**9)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert captured >= 2
    assert none == 0


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_windows_of_training_are_replayed_bit_for_bit(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout of every kind, windows of several lengths, and a readout in pieces."""
    text = tmp_path / "words.txt"
    generator = torch.Generator().manual_seed(0)
    words = [f"w{int(6000 * r**2)}" for r in torch.rand(30_000, generator=generator).tolist()]
    text.write_text(" ".join(words))
    sizes = {"hidden_size": (72, 72, 40), "streams": 8, "window": 35, "epochs": 2.0, "split": (90, 10, 0)}
    options = lf.preset("words-large", sources=(str(text),), device="cuda", precision=precision, **sizes)
    found, captured = [], []
    for devices in ({"cuda"}, set()):
        made: list[replay.Replays] = []
        monkeypatch.setattr(
            replaying, "Replays", lambda *args, made=made: made.append(replay.Replays(*args)) or made[-1]
        )
        monkeypatch.setattr(replaying, "DEVICES", devices)
        run = lf.train(options, tmp_path / f"run-{len(devices)}")
        found.append({name: p.detach().cpu() for name, p in run.model.named_parameters()})
        captured.append(len(made[0].graphs))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert captured[0] >= 3
    assert captured[1] == 0


def test_a_module_that_is_gone_leaves_no_graph() -> None:
    cell, x = lf.LSTM(4, 17).cuda(), torch.randn(9, 3, 4).cuda()
    for _ in range(8):
        lf.unfold(cell, x, engine=lf.Looped()).hidden.sum().backward()
    ends = [weakref.ref(graph) for graph in graphs_of(cell)]
    del cell
    gc.collect()
    assert [end() for end in ends] == [None]


def test_replayed_graphs_on_several_streams() -> None:
    cell, x = lf.LSTM(8, 64).cuda().double(), torch.randn(50, 16, 8).cuda().double()
    xs = [x * scale for scale in (1, 2, 3)]
    alone = [lf.unfold(cell, x, engine=lf.Sequential()).hidden.detach() for x in xs]
    found = side_by_side([(cell, x) for x in xs], lf.Looped(), 30)
    for results, expected in zip(found, alone, strict=True):
        for one in results:
            torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-9)


def test_several_processes_share_a_gpu(tmp_path: Path) -> None:
    script = """
import torch, loopfold as lf
torch.manual_seed(0)
cell, x = lf.LSTM(8, 512).cuda().bfloat16(), torch.randn(200, 16, 8).cuda().bfloat16()
with torch.no_grad():
    first = lf.unfold(cell, x, engine=lf.FusedGPU()).hidden
    for _ in range(300):
        assert torch.equal(lf.unfold(cell, x, engine=lf.FusedGPU()).hidden, first)
print(float(first.double().sum()))
"""
    processes = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = {process.communicate(timeout=300)[0] for process in processes}
    assert len(outputs) == 1
    assert "" not in outputs


# ------------------------------------------------------------------ engines around others


def _both_ways(
    cell: nn.Module, x: Tensor, start: Any, lengths: list[int] | None, engine: lf.Engine, only_last: bool = False
) -> dict[str, Tensor]:
    """The last states and, unless only these are asked for, all others; the gradients of everything."""
    device, dtype = next((p.device, p.dtype) for p in cell.parameters())
    given = [t.to(device, dtype).requires_grad_() for t in (x, *leaves(start))]
    state = rebuild(start, given[1:])
    run = lf.unfold(cell, given[0], state, lengths, engine, only_last=only_last)
    found = {f"last {i}": leaf for i, leaf in enumerate(leaves(run.last))}
    if not only_last:
        found |= {f"states {i}": leaf for i, leaf in enumerate(leaves(run.states))}
    weights = torch.Generator().manual_seed(5)
    losses = [(v.double() * torch.randn(v.shape, generator=weights).to(v.device)).sum() for v in found.values()]
    sources = {"x": given[0], **{f"start {i}": t for i, t in enumerate(given[1:])}, **dict(cell.named_parameters())}
    gradients = torch.autograd.grad(torch.stack(losses).sum(), list(sources.values()))
    found |= {f"∇{name}": g for name, g in zip(sources, gradients, strict=True)}
    return {k: v.detach().double().cpu() for k, v in found.items()}


def _forgetful(make: Callable[[int, int], nn.Module], n: int) -> nn.Module:
    cell = make(4, n)
    with torch.no_grad():
        cell.get_parameter("W").mul_(0.3)
    return cell


INNER = [lf.Auto(), lf.FusedGPU(), lf.Looped()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("inner", INNER, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("make", [lf.Elman, lf.LSTM, lf.GRU], ids=lambda m: m.__name__)
def test_engines_around_others_agree_on_a_gpu(
    make: Callable[[int, int], nn.Module], inner: lf.Engine, dtype: torch.dtype
) -> None:
    """Pieces and chunks, of which the last is shorter; those that come often are captured as CUDA graphs."""
    if isinstance(inner, lf.FusedGPU) and dtype == torch.float64:
        return  # it has no kernel
    torch.manual_seed(0)
    cell, theirs = _forgetful(make, 17).double(), lf.Sequential()
    ours = copy.deepcopy(cell).to("cuda", dtype)
    chunks = lf.TimeParallel(inner, chunk=150)
    engines = (lf.Checkpointed(inner, every=70), lf.Checkpointed(inner, memory="300 kB"), chunks)
    for batch, lengths in ((1, None), (3, [401, 1, 230])):
        x = torch.randn(401, batch, 4).double()
        start = map_state(torch.randn_like, initial_state(cell, batch, x[0]))
        for only_last in (False, True):
            truth = _both_ways(cell, x, start, lengths, theirs, only_last)
            bound = 1e-10
            if dtype == torch.float32:
                found = _both_ways(ours, x, start, lengths, theirs, only_last)
                bound = max(5 * SINGLE, 20 * max(errors(found, truth).values()))
            for engine in engines:
                for _ in range(2):
                    found = _both_ways(ours, x, start, lengths, engine, only_last)
                    assert {k: error for k, error in errors(found, truth).items() if not error <= bound} == {}
        assert chunks.report is not None
        assert (chunks.report.agreed, chunks.report.backward_agreed) == (True, True), chunks.report


@pytest.mark.parametrize("inner", [lf.FusedGPU(), lf.Looped()], ids=lambda e: type(e).__name__)
def test_graphs_of_pieces_do_not_pile_up(inner: lf.Engine) -> None:
    """Pieces of many lengths come and go; each graph that is kept holds the memory of a run."""
    cell = lf.GRU(4, 17).cuda()
    for tau in range(60, 100, 3):
        gradients(cell, torch.randn(tau, 2, 4).cuda(), None, lf.Checkpointed(inner, every=10))
    assert 1 <= len(graphs_of(cell)) <= replay.MOST_GRAPHS


@pytest.mark.parametrize("inner", [lf.FusedGPU(), lf.Looped()], ids=lambda e: type(e).__name__)
def test_checkpoints_save_memory_on_a_gpu(inner: lf.Engine) -> None:
    def peak(engine: lf.Engine) -> int:
        cell, x = lf.LSTM(8, 64).cuda(), torch.randn(4000, 8, 8, device="cuda")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        lf.unfold(cell, x, engine=engine, only_last=True).last_hidden.sum().backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    assert peak(lf.Checkpointed(inner, every=200)) < peak(inner) / 4


def test_a_network_that_remembers_is_finished_in_sequence_on_a_gpu() -> None:
    """From the first chunk on that does not begin where the one before it ends."""
    cell = test_time_parallel.Fickle()
    x = torch.randn(6000, 2, 1).double()
    x[2000:3000] = 101.0
    results = []
    for device, engine in (("cpu", lf.Sequential()), ("cuda", chunks := lf.TimeParallel(lf.Looped(), chunk=100))):
        own = x.to(device).requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", lf.EngineWarning)
            hidden = lf.unfold(cell.to(device), own, engine=engine).hidden
            found = torch.autograd.grad(hidden.sin().sum(), [own, *cell.parameters()])
        results.append([t.detach().cpu() for t in (hidden, *found)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-10)
    assert chunks.report is not None
    assert not chunks.report.agreed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_network_that_keeps_its_numbers_is_run_side_by_side_on_a_gpu(dtype: torch.dtype) -> None:
    cell, x, start = test_seams.Sum(), torch.randn(3000, 2, 3).double(), torch.randn(2, 3).double()
    for lengths in (None, [3000, 2100]):
        truth = _both_ways(cell.cpu().double(), x, start, lengths, lf.Sequential())
        chunks = lf.TimeParallel()
        found = _both_ways(cell.to("cuda", dtype), x, start, lengths, chunks)
        report = chunks.report
        assert report is not None
        assert (report.agreed, report.backward_agreed, report.forgets) == (True, True, None), report
        assert max(errors(found, truth).values()) <= (1e-10 if dtype == torch.float64 else 1e-4)
