"""Many launches of a GPU as one: a run and its way back, replayed as CUDA graphs where the same sizes come often.

A graph works in memory of its own: a replay copies in what it is given, and copies out what it found. There it also
leaves what the way back reads, so until that way has been gone, or cannot be gone any more, the graph is busy, and the
next run takes another graph or none.
"""

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loopfold.casts import with_casts
from loopfold.engines.backwards import come_many, once
from loopfold.engines.base import EngineWarning
from loopfold.engines.driver import new_stream, on_device
from loopfold.engines.writing import tf32

OFTEN = 4  # calls with the same sizes, after which they are captured
MOST_GRAPHS = 4  # of a program: each holds the memory of one run
LONG_AGO = 64  # calls: a graph that was last used before them makes room for another
MOST_SIZES = 256  # whose calls are counted
ROOM = 1 / 4  # of a GPU's memory, that graphs leave to others

Run = Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]  # of what is given, and of the parameters
Whole = Callable[[Sequence[Tensor]], list[Tensor]]  # of both

_capturing = threading.Lock()


class CannotCapture(Exception):
    """CUDA does not capture what a run does."""


class NotNow(Exception):
    """There is no room for a graph, or nothing may wait for the GPU."""


class Replays:
    """The CUDA graphs of a program, by its sizes, so many `at_most`; `name` is the engine's, for messages."""

    def __init__(self, name: str, at_most: int = MOST_GRAPHS) -> None:
        self.name, self.at_most = name, at_most
        self.graphs: list[_Graph] = []
        self.counts: dict[Any, int] = {}  # calls with sizes that have no graph, or none that is free
        self.calls = 0
        self.lock = threading.Lock()
        self.gave_up = torch.version.hip is not None

    def run(self, run: Run, sizes: tuple[Any, ...], given: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
        """`run(given, parameters)`: as it is, or replayed where it has been called with such sizes often enough."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # a graph keeps what is theirs to keep
        if self.gave_up or hooks is not None or torch.cuda.is_current_stream_capturing():
            return run(given, parameters)
        device, grad = given[0].device, torch.is_grad_enabled()
        if any(p.device != device or not p.is_leaf for p in parameters):  # a number fixed for good; one made anew
            return run(given, parameters)
        tensors = [*given, *parameters]
        flows = [grad and t.requires_grad for t in tensors]
        # What may change between a run and its way back is copied in; a parameter that has a gradient may not
        stays = [i >= len(given) and (flows[i] or not any(flows)) for i in range(len(tensors))]
        kinds = [(t.shape, t.stride(), t.dtype, flows[i], stays[i] and t.data_ptr()) for i, t in enumerate(tensors)]
        key = (sizes, device, _precision(), *kinds)

        def whole(tensors: Sequence[Tensor]) -> list[Tensor]:
            return run(tensors[: len(given)], tensors[len(given) :])

        with self.lock, on_device(device.index):
            graph = self._graph(key, whole, tensors, stays)
            if graph is not None:
                graph.used = self.calls
                return graph.run(tensors)
        return run(given, parameters)

    def _graph(self, key: Any, run: Whole, tensors: list[Tensor], stays: list[bool]) -> "_Graph | None":
        self.calls += 1
        free = next((graph for graph in self.graphs if graph.key == key and not graph.busy), None)
        if free is not None or not self._is_worth_it(key):
            return free
        try:
            self.graphs.append(_Graph(self.name, key, run, tensors, stays))
            return self.graphs[-1]
        except NotNow:
            return None
        except CannotCapture as error:
            self.gave_up = True
            warnings.warn(
                f"a run cannot be captured as a CUDA graph, so its launches go one by one: {error}",
                EngineWarning,
                stacklevel=2,
            )
            return None

    def _is_worth_it(self, key: Any) -> bool:
        """Whether sizes come often, and there is room for their graph."""
        if len(self.counts) == MOST_SIZES:
            self.counts.clear()
        self.counts[key] = self.counts.get(key, 0) + 1
        if self.counts[key] < OFTEN:
            return False
        if len(self.graphs) == self.at_most:
            oldest = min(self.graphs, key=lambda graph: graph.used)
            if oldest.used > self.calls - LONG_AGO:
                return False
            self.graphs.remove(oldest)
        del self.counts[key]
        return True


def _precision() -> tuple[Any, ...]:
    """What a captured product has fixed beside its sizes."""
    matmul: Any = torch.backends.cuda.matmul
    reduced = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    accumulation = getattr(matmul, "allow_fp16_accumulation", None)
    return tf32(), *reduced, accumulation, torch.are_deterministic_algorithms_enabled()


# ------------------------------------------------------------------ one graph


@dataclass(eq=False)
class _Captured:
    """Launches, where they read, and where they write; None where there is nothing."""

    graph: Any
    given: list[Tensor]  # as .data, whose changes autograd does not count
    results: Sequence[Tensor | None]

    def __post_init__(self) -> None:
        self.found = [t.detach() for t in self.results if t is not None]

    def replay(self, given: Sequence[Tensor]) -> list[Tensor | None]:
        with torch.no_grad():
            torch._foreach_copy_(self.given, list(given))
            self.graph.replay()
            copies = [torch.empty_like(t) for t in self.found]  # cheaper than clones, which are a launch each
            torch._foreach_copy_(copies, self.found)
            left = iter(copies)
            return [None if t is None else next(left) for t in self.results]


class _Graph:
    """A run in memory of its own, and its ways back: one for each set of results to which gradients come."""

    def __init__(self, name: str, key: Any, run: Whole, tensors: list[Tensor], stays: list[bool]) -> None:
        self.name, self.key, self.stays = name, key, stays
        self.used = 0  # at which call
        self.user: Callable[[], Any] = lambda: None  # the run whose way back has not been gone, if there is one
        self.lock = threading.Lock()
        self.tried: set[tuple[bool, ...]] = set()
        self.ways_back: dict[tuple[bool, ...], _Captured | None] = {}  # None: it cannot be captured
        self.turns = _Turns(tensors[0].device)
        grad = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(grad):
            # .data: the user's hooks are not called here, and a change of a parameter is no mistake
            own = [t.data if stay else torch.empty_like(t) for t, stay in zip(tensors, stays, strict=True)]
            own = [t.detach().requires_grad_(of.requires_grad) for t, of in zip(own, tensors, strict=True)]
            self.sources = [t for t in own if t.requires_grad]
            self.there = self.turns.capture(lambda: run(own), self._copied(own))

    @property
    def busy(self) -> bool:
        return self.user() is not None

    def _copied(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t for t, stay in zip(tensors, self.stays, strict=True) if not stay]

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        if not any(t.requires_grad for t in self.there.results if t is not None):
            return self.forwards(tensors)
        user = _User()
        self.user = weakref.ref(user)
        return list(_Replayed.apply(self, user, *tensors))

    def forwards(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        with self.turns:
            return [t for t in self.there.replay(self._copied(tensors)) if t is not None]

    def back(self, incoming: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of `sources`, from those of the results."""
        arrives, gs = tuple(g is not None for g in incoming), [g for g in incoming if g is not None]
        with self.lock:
            way = None if come_many(incoming) else self._way_back(arrives, gs)
            if way is None:
                return self.turns.aside(lambda: self._gradients(arrives, gs))
            with self.turns:
                return way.replay(gs)

    def _way_back(self, arrives: tuple[bool, ...], gs: list[Tensor]) -> _Captured | None:
        """Captured at the second time: at the first, kernels are compiled."""
        if arrives not in self.tried:
            self.tried.add(arrives)
            return None
        if arrives not in self.ways_back:
            own = [torch.empty(g.shape, dtype=g.dtype, device=g.device) for g in gs]
            try:
                self.ways_back[arrives] = self.turns.capture(lambda: self._gradients(arrives, own), own)
            except NotNow:
                return None
            except CannotCapture:
                self.ways_back[arrives] = None
        return self.ways_back[arrives]

    def _gradients(self, arrives: tuple[bool, ...], gs: Sequence[Tensor]) -> Sequence[Tensor | None]:
        reached = [t for t, here in zip(self.there.results, arrives, strict=True) if here and t is not None]
        with with_casts((), self.sources[0].device):
            return torch.autograd.grad(reached, self.sources, gs, retain_graph=True, allow_unused=True)


class _User:
    """A run whose way back may still be gone."""


class _Replayed(torch.autograd.Function):
    """A replayed run as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, graph: _Graph, user: _User, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.graph, ctx.user = graph, user
        ctx.save_for_backward(*(t for t in tensors if t.requires_grad))  # if they change, torch says so on the way back
        ctx.set_materialize_grads(False)
        results = graph.forwards(tensors)
        pairs = zip(results, graph.there.results, strict=True)
        ctx.mark_non_differentiable(*(found for found, own in pairs if own is not None and not own.requires_grad))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Any, ...]:
        if all(g is None for g in incoming):
            return (None,) * len(ctx.needs_input_grad)
        sources = [t for t in (*ctx.saved_tensors, *incoming) if t is not None and t.requires_grad]
        if ctx.user is None:
            raise RuntimeError("a way back is gone twice: type backward(retain_graph=True) for the first time.")
        with torch.no_grad():
            found = iter(ctx.graph.back(incoming))
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.user = None  # the next run may have the graph
        results = [next(found) if needed else None for needed in ctx.needs_input_grad[2:]]
        if torch.is_grad_enabled():  # this gradient may be differentiated in turn
            results = once(ctx.graph.name, results, sources)
        return None, None, *results


# ------------------------------------------------------------------ streams


class _Turns:
    """Those who use the memory of a graph, one after the other, on whatever stream each of them is."""

    def __init__(self, device: torch.device) -> None:
        self.stream = _own_streams(device).pop()
        self.free = torch.cuda.Event()  # the last one has read what it wanted
        self.pool: Any = None

    def __enter__(self) -> None:
        _current(self.stream.device).wait_event(self.free)

    def __exit__(self, *_: object) -> None:
        self.free.record(_current(self.stream.device))

    def __del__(self) -> None:
        with suppress(Exception):  # a graph's memory may be given to others only when its last run is over
            self.free.synchronize()
            _own_streams(self.stream.device).append(self.stream)

    def capture(self, function: Callable[[], Sequence[Tensor | None]], given: list[Tensor]) -> _Captured:
        if torch.cuda.get_sync_debug_mode() or not self._has_room():
            raise NotNow
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph does not go back to it after a fault
        current = torch.cuda.stream(torch.cuda.current_stream())
        try:
            with _capturing, _no_garbage(), current, torch.cuda.graph(graph, self.pool, self.stream, "thread_local"):
                results = function()
        except torch.OutOfMemoryError:
            raise NotNow from None
        except RuntimeError as error:
            raise CannotCapture(str(error)) from error
        self.pool = graph.pool()
        return _Captured(graph, [t.data for t in given], results)

    def _has_room(self) -> bool:
        device = self.stream.device
        free, total = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for later
        return free + kept >= ROOM * total

    def aside(self, function: Callable[[], Sequence[Tensor | None]]) -> list[Tensor | None]:
        """What a function gives that is not captured, on the stream on which its own part of autograd was recorded."""
        current = _current(self.stream.device)
        self.stream.wait_stream(current)
        self.stream.wait_event(self.free)
        with torch.cuda.stream(self.stream):
            results = function()
        current.wait_stream(self.stream)
        found = [None if t is None else t.clone() for t in results]
        self.free.record(current)
        return found


_known: dict[tuple[torch.device, int], Any] = {}
_streams: dict[torch.device, list[Any]] = {}


def _current(device: torch.device) -> Any:
    """The current stream of a device, as torch.cuda.current_stream, which takes far longer."""
    key = device, torch._C._cuda_getCurrentRawStream(device.index)
    if key not in _known:
        _known[key] = torch.cuda.current_stream(device)
    return _known[key]


def _own_streams(device: torch.device) -> list[Any]:
    """Streams of CUDA that nobody else has; torch gives the same few of its own to all who ask.

    What others do on a stream while it is captured would not be done, but become a part of the graph.
    """
    free = _streams.setdefault(device, [])
    if not free:
        free.append(torch.cuda.ExternalStream(new_stream(device.index), device))
    return free


@contextmanager
def _no_garbage() -> Iterator[None]:
    """While open, none is collected: an event or a graph that dies would break off what is being captured."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
