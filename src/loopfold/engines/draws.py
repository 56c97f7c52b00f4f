"""The random numbers of a run: drawn before the loop, as `Sequential` would, and given again to a check of it.

The operations of a step that draw are run for one step after the other, in the order of the step and on its batch. So
the numbers are those of the definition, and torch's generators are left as it leaves them.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from loopfold.stepgraph.graph import Node, Unsound, apply, batch_at, sizes_of
from loopfold.stepgraph.split import Loop
from loopfold.stepgraph.trace import plain_attention

Drawn = tuple[Tensor, ...]  # the results of one operation, each at all steps: [τ, …]


@dataclass(frozen=True, eq=False)
class Draws:
    """What each operation of a step that draws gave, in the order of the step."""

    nodes: tuple[Node, ...]
    results: tuple[Drawn, ...]

    def between(self, start: int, stop: int) -> "Draws":
        return Draws(self.nodes, tuple(tuple(part[start:stop] for part in drawn) for drawn in self.results))

    def sequences(self) -> dict[Node, Any]:
        """The results of each operation, all steps of a sequence side by side in the batch."""
        found: dict[Node, Any] = {}
        for node, drawn in zip(self.nodes, self.results, strict=True):
            at = batch_at(node.shape if node.dtype is not None else node.inputs()[0].shape) or 0
            parts = [part.movedim(0, at).flatten(at, at + 1) for part in drawn]
            found[node] = parts[0] if node.dtype is not None else parts
        return found

    def one_by_one(self) -> Iterator[Drawn]:
        """Step by step, operation by operation."""
        for t in range(len(self.results[0][0])):
            for drawn in self.results:
                yield tuple(part[t] for part in drawn)


def draw(loop: Loop, values: dict[Node, Any], steps: int, like: Tensor) -> Draws:
    """Draw all the random numbers of a run, where `values` has the parameters and the numbers of the step.

    `like` is a tensor of the state.
    """
    batch = len(like)
    known = dict(values)
    with torch.no_grad():
        for node in loop.before_draws:
            known[node] = apply(node, known, batch)
        if len(loop.draws) == 1 and (whole := _in_one_go(loop.draws[0], steps, batch, like)) is not None:
            return Draws(loop.draws, ((whole,),))
        first = [_results(apply(node, known, batch)) for node in loop.draws]
        drawn = [tuple(part.new_empty(steps, *part.shape) for part in parts) for parts in first]
        rows = [[part.unbind(0) for part in parts] for parts in drawn]
        for parts, results in zip(rows, first, strict=True):
            for part, result in zip(parts, results, strict=True):
                part[0].copy_(result)
        for t in range(1, steps):
            for node, parts in zip(loop.draws, rows, strict=True):
                if node.op in _FILLS:
                    _FILLS[node.op](parts[0][t])
                else:
                    for part, result in zip(parts, _results(apply(node, known, batch)), strict=True):
                        part[t].copy_(result)
    return Draws(loop.draws, tuple(drawn))


# What these do is to fill a new tensor so; into one that is there it takes half the time
_FILLS = {
    **dict.fromkeys(("rand", "rand_like"), Tensor.uniform_),
    **dict.fromkeys(("randn", "randn_like"), Tensor.normal_),
}


def _in_one_go(node: Node, steps: int, batch: int, like: Tensor) -> Tensor | None:
    """All steps by one call, where it gives what one call for each step does: on the CPU, normal ones 16 by 16."""
    sizes = sizes_of(node.shape, batch)
    by_sixteen = "randn" not in node.op or math.prod(sizes) % 16 == 0
    if node.op not in _FILLS or like.device.type != "cpu" or not by_sixteen:
        return None
    return _FILLS[node.op](torch.empty(steps, *sizes, dtype=node.dtype))


def _results(result: Any) -> Drawn:
    return (result,) if isinstance(result, Tensor) else tuple(result)


@contextmanager
def replayed(draws: Draws | None) -> Iterator[None]:
    """While open, `f` gets the numbers of these steps, in order, and torch's generators are not touched."""
    if draws is None:
        yield
        return
    with plain_attention(), _Replay(draws):  # attention draws in the order of the trace, or not at all
        yield


class _Replay(TorchDispatchMode):
    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self.left = draws.one_by_one()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        drawn = next(self.left, None)
        if drawn is None:
            raise Unsound("the step draws more random numbers than when it was traced")
        if func._schema.name == "aten::native_dropout":
            return args[0] * drawn[0], drawn[1].clone()
        if func._schema.is_mutable:
            return args[0].copy_(drawn[0])
        return drawn[0].clone()


def generators(like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Where torch's generators stand: of the CPU, and of the device of a tensor."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(like.device) if like.is_cuda else None


def same_generators(one: tuple[Tensor, Tensor | None], other: tuple[Tensor, Tensor | None]) -> bool:
    """Whether nothing was drawn between the two."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None)


def set_generators(like: Tensor, states: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], like.device)
