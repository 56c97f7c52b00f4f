"""Replayed runs, without a GPU: what CUDA would capture is noted operation by operation, and done again."""

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from loopfold.engines import replay
from loopfold.engines.replay import Replays


class _Tape(TorchDispatchMode):
    """Every operation that has run, with where it read and where it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.notes.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, result in self.notes:
                with torch.autograd._unsafe_preserve_version_counter(tuple(_tensors((args, kwargs)))):
                    again = func(*args, **kwargs)
                if not func._schema.is_mutable:
                    for old, new in zip(_tensors(result), _tensors(again), strict=True):
                        old.data.copy_(new)


def _tensors(results: Any) -> list[Tensor]:
    return [t for t in tree_leaves(results) if isinstance(t, Tensor)]


class _Turns:
    """In place of CUDA's streams."""

    captures = 0

    def __init__(self, device: torch.device) -> None:
        pass

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def capture(self, function: Callable[[], Sequence[Tensor | None]], given: list[Tensor]) -> Any:
        _Turns.captures += 1
        for t in given:
            t.data.zero_()  # here they are computed with, and may be numbers of rows
        with _Tape() as tape, torch.random.fork_rng(devices=[]):  # CUDA's generator does not move either
            results = function()
        for _, _, _, made in tape.notes:  # CUDA computes nothing while it captures
            for t in _tensors(made):
                t.data.fill_(torch.nan if t.is_floating_point() else 0)
        return replay._Captured(tape, [t.data for t in given], results)

    def aside(self, function: Callable[[], Sequence[Tensor | None]]) -> list[Tensor | None]:
        return [None if t is None else t.clone() for t in function()]


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    _Turns.captures = 0
    monkeypatch.setattr(replay, "_Turns", _Turns)
    monkeypatch.setattr(replay, "on_device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def run(given: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Two states over five steps, and one thing that has no gradient."""
    (x, a), (W, b) = given, parameters
    h = c = torch.zeros_like(a)
    hs, cs = [], []
    for x_t in (x @ b).unbind():
        c = torch.sigmoid(h) * c + a
        h = torch.tanh(h @ W + x_t * c)
        hs.append(h)
        cs.append(c)
    return [torch.stack(hs), torch.stack(cs), torch.stack(hs).detach() > 0]


@pytest.fixture
def parameters() -> list[Tensor]:
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(n, 4, dtype=torch.float64) / 2) for n in (4, 3)]


def numbers() -> list[Tensor]:
    return [torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True), torch.randn(2, 4, dtype=torch.float64)]


class Compared:
    """Calls of `Replays`, each beside the same without."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.replays, self.parameters = Replays("FusedGPU"), parameters

    def __call__(self, given: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        found = self.replays.run(run, (5,), given, self.parameters)
        expected = run(given, self.parameters)
        torch.testing.assert_close(found, expected)
        assert [t.requires_grad for t in found] == [t.requires_grad for t in expected]
        return found, expected

    def back(
        self, pair: tuple[list[Tensor], list[Tensor]], given: list[Tensor], which: tuple[int, ...] = (0, 1)
    ) -> None:
        gradients = []
        for results in pair:
            losses = [(results[i] * (i + torch.arange(5.0).double())[:, None, None]).sum() for i in which]
            gradients.append(torch.autograd.grad(torch.stack(losses).sum(), [given[0], *self.parameters]))
        torch.testing.assert_close(*gradients)

    def turns(self, times: int, which: tuple[int, ...] = (0, 1)) -> None:
        for _ in range(times):
            given = numbers()
            self.back(self(given), given, which)
            with torch.no_grad():
                for p in self.parameters:
                    p.mul_(0.9)  # as an optimiser does: in place


def test_a_replayed_run_and_its_way_back_are_those_of_the_function(parameters: list[Tensor]) -> None:
    compared = Compared(parameters)
    compared.turns(12)
    assert _Turns.captures == 2
    assert len(compared.replays.graphs) == 1


def test_losses_on_parts_have_ways_back_of_their_own(parameters: list[Tensor]) -> None:
    compared = Compared(parameters)
    compared.turns(6)
    for which in ((0,), (1,), (0, 1), (1,), (0,), (1,)):
        compared.turns(2, which)
    assert _Turns.captures == 4


def test_runs_whose_way_back_waits_keep_what_they_need(parameters: list[Tensor]) -> None:
    """Several runs before the first way back: as many as there are graphs, and one more."""
    compared = Compared(parameters)
    compared.turns(5)
    for _ in range(8):
        waiting = [(given, compared(given)) for given in (numbers() for _ in range(6))]
        for given, pair in reversed(waiting):
            compared.back(pair, given)
    assert 2 <= len(compared.replays.graphs) <= replay.MOST_GRAPHS


def test_results_outlive_later_runs(parameters: list[Tensor]) -> None:
    compared = Compared(parameters)
    kept = []
    for _ in range(10):
        given = numbers()
        pair = compared(given)
        kept.append(pair)
        compared.back(pair, given)
    for found, expected in kept:
        torch.testing.assert_close(found, expected)
    assert len(compared.replays.graphs) == 1  # a result that is kept does not keep its graph


def test_a_run_that_is_dropped_frees_its_graph(parameters: list[Tensor]) -> None:
    compared = Compared(parameters)
    for _ in range(20):
        compared(numbers())
        gc.collect()
    assert len(compared.replays.graphs) == 1


def test_ways_back_that_are_gone_twice(parameters: list[Tensor]) -> None:
    compared = Compared(parameters)
    compared.turns(7)
    given = numbers()
    found, expected = compared(given)
    first, second, true = (
        torch.autograd.grad(results[0].sum(), parameters, retain_graph=True) for results in (found, found, expected)
    )
    assert compared.replays.graphs[0].busy
    torch.testing.assert_close(first, true)
    torch.testing.assert_close(second, true)
    compared(numbers())  # takes another way
    torch.testing.assert_close(torch.autograd.grad(found[0].sum(), parameters), true)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        torch.autograd.grad(found[0].sum(), parameters)


def test_parameters_that_change_before_the_way_back_are_an_error(parameters: list[Tensor]) -> None:
    compared = Compared(parameters)
    compared.turns(7)
    found, _ = compared(numbers())
    with torch.no_grad():
        parameters[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found[0].sum().backward()


def test_other_parameters_in_the_same_place_and_gradients_that_are_not_wanted(parameters: list[Tensor]) -> None:
    compared = Compared(parameters)
    compared.turns(7)
    parameters[0].data = torch.randn(4, 4, dtype=torch.float64)
    compared.turns(7)
    parameters[1].requires_grad_(False)
    for _ in range(7):
        given = numbers()
        pair = compared(given)
        gradients = [torch.autograd.grad(results[1].sum(), [given[0], parameters[0]]) for results in pair]
        torch.testing.assert_close(*gradients)
    with torch.no_grad():
        for _ in range(6):
            compared(numbers())
    with torch.inference_mode():
        for _ in range(6):
            compared([t.clone() for t in numbers()])


def test_nothing_is_recorded_where_no_gradient_is_wanted(parameters: list[Tensor]) -> None:
    replays = Replays("FusedGPU")
    for mode in (torch.no_grad, torch.inference_mode):
        for _ in range(6):
            with mode():
                assert not replays.run(run, (5,), numbers(), parameters)[0].requires_grad
    (graph,) = replays.graphs
    assert not any(t.requires_grad for t in graph.there.results if t is not None)


def test_what_has_no_gradient_may_change_before_the_way_back(parameters: list[Tensor]) -> None:
    """Such as a running mean: the way back has what was there."""
    shift, replays = torch.zeros(3, dtype=torch.float64), Replays("FusedGPU")

    def shifted(given: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
        return run([given[0] + parameters[2], given[1]], parameters[:2])

    for _ in range(9):
        given = numbers()
        pair = replays.run(shifted, (5,), given, [*parameters, shift]), shifted(given, [*parameters, shift])
        shift += 1
        torch.testing.assert_close(*[torch.autograd.grad(r[0].sum(), [given[0], *parameters]) for r in pair])
    assert len(replays.graphs) == 1


def test_parameters_that_are_made_anew_are_not_captured(parameters: list[Tensor]) -> None:
    replays = Replays("FusedGPU")
    for _ in range(9):
        replays.run(run, (5,), numbers(), [2 * p for p in parameters])[0].sum().backward()
    assert not replays.graphs


def test_a_graph_keeps_no_earlier_input_alive(parameters: list[Tensor]) -> None:
    replays, frozen = Replays("FusedGPU"), [p.detach() for p in parameters]
    ends = []
    for _ in range(9):
        x, a = numbers()
        upstream = x * 2
        ends.append(weakref.ref(x))
        replays.run(
            lambda given, parameters: run([given[0].detach(), given[1]], parameters), (5,), [upstream, a], frozen
        )
        del upstream, x
    gc.collect()
    assert [end() for end in ends] == [None] * 9


def test_hooks_are_called_once(parameters: list[Tensor]) -> None:
    calls: list[int] = []
    parameters[0].register_hook(lambda g: calls.append(1))
    replays = Replays("FusedGPU")
    for _ in range(8):
        replays.run(run, (5,), numbers(), parameters)[0].sum().backward()
    assert len(calls) == 8
    assert len(replays.graphs) == 1


def _checkpointed(f: Callable[[], list[Tensor]]) -> list[Tensor]:
    return checkpoint(f, use_reentrant=False)


def _on_the_cpu(f: Callable[[], list[Tensor]]) -> list[Tensor]:
    with torch.autograd.graph.save_on_cpu():
        return f()


@pytest.mark.parametrize("wrap", [_checkpointed, _on_the_cpu])
def test_where_others_keep_what_the_way_back_needs(wrap: Callable[[Any], Any], parameters: list[Tensor]) -> None:
    """There a run goes without a graph."""
    replays = Replays("FusedGPU")
    for _ in range(8):
        given = numbers()
        found = wrap(lambda given=given: replays.run(run, (5,), given, parameters))
        gradients = [torch.autograd.grad(r[0].sum(), parameters) for r in (found, run(given, parameters))]
        torch.testing.assert_close(*gradients)
    assert not replays.graphs


def test_second_derivatives_are_refused(parameters: list[Tensor]) -> None:
    replays = Replays("FusedGPU")
    for _ in range(8):
        given = numbers()
        results = replays.run(run, (5,), given, [p.detach() for p in parameters])
        (g,) = torch.autograd.grad(results[0].sum(), given[0], create_graph=True)
    with pytest.raises(RuntimeError, match="FusedGPU has first derivatives only"):
        g.sum().backward()


def test_many_gradients_at_once(parameters: list[Tensor]) -> None:
    replays = Replays("FusedGPU")
    for _ in range(7):
        given = numbers()
        results = replays.run(run, (5,), given, parameters)
        results[0].sum().backward(retain_graph=True)
    many = torch.randn(3, *results[0].shape, dtype=torch.float64)
    expected = run(given, parameters)[0]
    found = [
        torch.autograd.grad(h, parameters, many, is_grads_batched=True, retain_graph=True)
        for h in (results[0], expected)
    ]
    torch.testing.assert_close(*found)


def test_threads_share_the_graphs_of_a_program(parameters: list[Tensor]) -> None:
    compared, failures = Compared(parameters), []

    def work() -> None:
        try:
            for _ in range(25):
                given = numbers()
                compared.back(compared(given), given)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert compared.replays.graphs
