"""On a GPU: the same values as on the CPU. Skipped where there is none."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import loopfold as lf
from loopfold.engines import looped, programs, selfcheck

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
    for _ in range(selfcheck.FIRST + 1):
        lf.unfold(cell, x, engine=lf.Looped()).hidden.sum().backward()
    return programs.program_of(lf.unfolding.checked(cell, x, None, None, None)).program.watch


def test_what_stays_on_the_cpu_says_so() -> None:
    cell, x = lf.Elman(3, 5).cuda(), torch.randn(4, 2, 3)
    with pytest.raises(ValueError, match="x is on cpu and Elman's parameters on cuda:0"):
        lf.unfold(cell, x)
    with pytest.raises(ValueError, match="FusedCPU cannot run Elman: it runs on the CPU and the state is on cuda:0"):
        lf.unfold(cell, x.cuda(), engine=lf.FusedCPU())
    assert "Looped" in lf.Recurrent(cell).explain(x.cuda())


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
