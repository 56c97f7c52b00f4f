"""Many small launches of a GPU as one: a function of tensors, replayed as a CUDA graph where its sizes repeat."""

import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loopfold.engines.base import EngineWarning
from loopfold.engines.writing import tf32

OFTEN = 4  # calls with the same sizes, after which it is captured
MOST_GRAPHS = 4  # of a function: each holds the memory of one run
LONG_AGO = 64  # calls: a graph that was last used before them makes room for another
MOST_SIZES = 256  # whose calls are counted

_capturing = threading.Lock()


@dataclass(eq=False)
class _Graph:
    graph: Any
    given: list[Tensor]  # where the graph reads
    results: list[Tensor]  # where it writes
    free: Any  # an event: the last run has read its results
    used: int = 0  # at which call

    def __del__(self) -> None:
        with suppress(Exception):  # its memory may be given to others only when its last run is over
            self.free.synchronize()

    def replay(self, given: list[Tensor]) -> list[Tensor]:
        stream = torch.cuda.current_stream()
        stream.wait_event(self.free)  # another stream may still read what the last run has written
        torch._foreach_copy_(self.given, given)
        self.graph.replay()
        results = [t.clone() for t in self.results]
        self.free.record(stream)
        return results


class Replays:
    """The CUDA graphs of a function, by its sizes. It waits for nothing on the host, and returns tensors."""

    def __init__(self) -> None:
        self.graphs: dict[Any, _Graph] = {}
        self.counts: dict[Any, int] = {}  # calls with sizes that were not captured
        self.calls = 0
        self.lock = threading.Lock()
        self.gave_up = False

    def run(self, function: Callable[..., list[Tensor]], sizes: tuple[int, ...], given: list[Tensor]) -> list[Tensor]:
        """`function(*given)`: as it is, or replayed where it has been called with such sizes often enough."""
        if torch.cuda.is_current_stream_capturing() or self.gave_up:
            return function(*given)
        key = (sizes, given[0].device, _precision(), *((t.shape, t.stride(), t.dtype) for t in given))
        with self.lock, torch.cuda.device(given[0].device):
            self.calls += 1
            graph = self.graphs.get(key)
            if graph is None and self._is_worth_it(key):
                graph = self._capture(function, given)
                if graph is not None:
                    self.graphs[key] = graph
            if graph is not None:
                graph.used = self.calls
                return graph.replay(given)
        return function(*given)

    def _is_worth_it(self, key: Any) -> bool:
        """Whether sizes come often, and there is room for their graph."""
        if len(self.counts) == MOST_SIZES:
            self.counts.clear()
        self.counts[key] = self.counts.get(key, 0) + 1
        if self.counts[key] < OFTEN:
            return False
        if len(self.graphs) == MOST_GRAPHS:
            oldest = min(self.graphs, key=lambda key: self.graphs[key].used)
            if self.graphs[oldest].used > self.calls - LONG_AGO:
                return False
            del self.graphs[oldest]
        del self.counts[key]
        return True

    def _capture(self, function: Callable[..., list[Tensor]], given: list[Tensor]) -> _Graph | None:
        torch.cuda.current_stream().synchronize()
        stream = torch.cuda.Stream(given[0].device)  # not torch's own, which belongs to the first device that captured
        try:
            with _capturing, torch.inference_mode(False), torch.no_grad():
                graph, own = torch.cuda.CUDAGraph(), [torch.empty_like(t) for t in given]
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    results = function(*own)
            return _Graph(graph, own, results, torch.cuda.Event())
        except torch.OutOfMemoryError:  # another time, perhaps
            return None
        except RuntimeError as error:
            self.gave_up = True
            warnings.warn(
                f"a loop cannot be captured as a CUDA graph, so its launches go one by one: {error}",
                EngineWarning,
                stacklevel=2,
            )
            return None


def _precision() -> tuple[Any, ...]:
    """What a captured product has fixed beside its sizes."""
    matmul: Any = torch.backends.cuda.matmul
    reduced = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    return tf32(), *reduced, torch.are_deterministic_algorithms_enabled()
