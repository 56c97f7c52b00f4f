"""Many small launches of a GPU as one: a function of tensors, replayed as a CUDA graph where its sizes repeat."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MOST_GRAPHS = 4  # of a function: each holds the memory of one run
MOST_SIZES = 64  # that are remembered as called once


@dataclass(frozen=True, eq=False)
class _Graph:
    graph: Any
    given: list[Tensor]  # where the graph reads
    results: list[Tensor]  # where it writes
    free: Any  # an event: the last run has read its results


class Replays:
    """`function(*sizes, *tensors)`, which returns tensors and waits for nothing on the host.

    The first call with some sizes runs it as it is, the second captures it, all others replay what was captured.
    """

    def __init__(self, function: Callable[..., list[Tensor]]) -> None:
        self.function = function
        self.graphs: dict[Any, _Graph | None] = {}  # None: called once, or not to be captured
        self.lock = threading.Lock()
        self.gave_up = False

    def run(self, sizes: tuple[int, ...], given: list[Tensor]) -> list[Tensor]:
        if torch.cuda.is_current_stream_capturing() or self.gave_up:
            return self.function(*sizes, *given)
        key = (sizes, given[0].device, *((t.shape, t.stride(), t.dtype) for t in given))
        with self.lock:
            if key not in self.graphs:
                if len(self.graphs) == MOST_SIZES:
                    del self.graphs[next(key for key, found in self.graphs.items() if found is None)]
                self.graphs[key] = None
                return self.function(*sizes, *given)
            with torch.cuda.device(given[0].device):
                found = self.graphs.pop(key) or self._captured(sizes, given)
                if found is None:
                    return self.function(*sizes, *given)
                self.graphs[key] = found  # the last that was used stands last
                return _replayed(found, given)

    def _captured(self, sizes: tuple[int, ...], given: list[Tensor]) -> _Graph | None:
        kept = [key for key, found in self.graphs.items() if found is not None]
        if len(kept) == MOST_GRAPHS:
            del self.graphs[kept[0]]
        torch.cuda.current_stream().synchronize()
        try:
            graph = torch.cuda.CUDAGraph()
            own = [torch.empty_like(t) for t in given]
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                results = self.function(*sizes, *own)
        except RuntimeError:  # no memory is left, or an operation that cannot be captured
            self.gave_up = True
            return None
        return _Graph(graph, own, results, torch.cuda.Event())


def _replayed(found: _Graph, given: list[Tensor]) -> list[Tensor]:
    stream = torch.cuda.current_stream()
    stream.wait_event(found.free)  # another stream may still read what the last run has written
    torch._foreach_copy_(found.given, given)
    found.graph.replay()
    results = [t.clone() for t in found.results]
    found.free.record(stream)
    return results
