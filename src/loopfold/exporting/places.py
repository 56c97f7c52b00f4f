"""Where the parameters of a model stand among the weights of its program, which can then be trained in their place."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loopfold.exporting.program import StepProgram
from loopfold.stepgraph.graph import Refusal

_DIGIT = 4096  # addresses are given in two numbers, each of which float32 has exactly
_NOWHERE = -(1 << 48)


@dataclass(frozen=True)
class Part:
    """A block of a parameter from element `start` on: its element i, j is weight `at + i·strides[0] + j·strides[1]`."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    at: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Places:
    """Of each parameter that is trained its shape and its parts, and what else there is to know.

    `trained`  ranges of the weights that are parameters
    `fixed`    and of those that stay as they are: buffers, zeros of a mask, a first state that is not learned
    `ties`     (at, of, step, count): weights from `at` on that are others once more, those from `of` on in such steps
    """

    parameters: dict[str, tuple[tuple[int, ...], list[Part]]]
    trained: list[tuple[int, int]]
    fixed: list[tuple[int, int]]
    ties: list[tuple[int, int, int, int]]


def places_of(model: nn.Module, x: Any = None, context: Any = None) -> Places:
    """Where the parameters are, found by giving them other values.

    Every weight that a parameter has an effect on must be one number of it: what is computed from parameters before
    the first step is refused.

    >>> from loopfold import GRU, SequenceToSequence
    >>> places_of(SequenceToSequence(GRU(1, 2), outputs=1)).trained  # all but the first state
    [(0, 29)]
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        return Places({}, [], [], [])
    if any(p.dtype.itemsize < 4 for p in named.values()):
        raise Refusal("it has parameters in half precision, where small steps are lost: type model.float() first.")
    program = StepProgram.of(model, x, context, learning=True)
    if program.cut_off:
        raise Refusal("it takes a matrix of parameters out of the gradient, as detach() does, which no weight can say.")
    count = sum(p.numel() for p in named.values())
    generator, address = torch.Generator().manual_seed(0), torch.arange(1, count + 1)
    a, b = (3 * torch.randn(count, generator=generator) for _ in range(2))
    tables = [address % _DIGIT, address // _DIGIT, a, b, -a, -b]
    low, high, *found = (_numbers_with(table.float(), [*named.values()], model, x, context) for table in tables)
    fixed = torch.stack([low == other for other in (high, *found)]).all(0)
    which = (high.nan_to_num().long() * _DIGIT + low.nan_to_num().long()).clamp(1, count) - 1
    same = torch.stack([table[which] == other for table, other in zip(tables[2:], found, strict=True)]).all(0)
    if not bool((fixed | same).all()):
        raise Refusal(
            "it computes something from its parameters alone, such as a normalised matrix or a first state, that only "
            "torch can compute before the first step; what works number by number on a row is no trouble."
        )
    if not _begins_plainly(program, which, fixed, [*named.values()]):
        raise Refusal("it starts from parameters in a way that gives them other gradients than the state has.")
    at = (~fixed).nonzero().flatten()
    place = torch.full((count,), _NOWHERE).scatter_reduce(0, which[at], at, "amin", include_self=False)  # the first
    again = at[place[which[at]] != at]
    trained = torch.zeros(len(fixed), dtype=torch.bool)
    trained[place[place >= 0]] = True
    parts = place.split([p.numel() for p in named.values()])
    shapes = [tuple(p.shape) for p in named.values()]
    return Places(
        parameters={
            name: (shape, blocks)
            for name, shape, part in zip(named, shapes, parts, strict=True)
            if (blocks := [*_parts(part.reshape(shape), (0,) * len(shape))])
        },
        trained=_ranges(trained),
        fixed=_ranges(fixed),
        ties=_runs(again.tolist(), place[which[again]].tolist()),
    )


def _numbers_with(table: Tensor, parameters: list[nn.Parameter], model: nn.Module, x: Any, context: Any) -> Tensor:
    """The weights of a model's program when its parameters have these values."""
    with _holding(parameters, table):
        return StepProgram.of(model, x, context, learning=True).numbers()


def _begins_plainly(program: StepProgram, which: Tensor, fixed: Tensor, parameters: list[nn.Parameter]) -> bool:
    """Whether a gradient by the first state is one by those numbers of the parameters that stand there."""
    sizes, generator = [leaf.size for leaf in program.state], torch.Generator().manual_seed(1)
    arriving = [torch.randn(size, generator=generator) * learned
                for size, learned in zip(sizes, program.learned, strict=True)]  # fmt: skip
    pairs = [(leaf, g.to(leaf).view_as(leaf)) for leaf, g in zip(program.begins, arriving, strict=True)
             if leaf.requires_grad]  # fmt: skip
    if not pairs:
        return True
    outputs, gradients = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, parameters, gradients, retain_graph=True, materialize_grads=True)
    behind = len(fixed) - sum(sizes)
    there = torch.where(fixed[behind:], 0, torch.cat(arriving))
    expected = torch.zeros(sum(p.numel() for p in parameters)).index_add_(0, which[behind:], there)
    return torch.allclose(torch.cat([g.flatten().to(expected) for g in found]), expected, atol=1e-5)


@contextmanager
def _holding(parameters: list[nn.Parameter], table: Tensor) -> Iterator[None]:
    """Other values in the parameters for a while; the memory of their own is not touched."""
    before = [p.data for p in parameters]
    try:
        for p, part in zip(parameters, table.split([p.numel() for p in parameters]), strict=True):
            p.data = torch.empty_like(p).copy_(part.reshape(p.shape))
        yield
    finally:
        for p, value in zip(parameters, before, strict=True):
            p.data = value


def _parts(place: Tensor, start: tuple[int, ...]) -> Iterator[Part]:
    """Blocks of a parameter, whose numbers stand at `place`, such that each has strides."""
    if not place.numel():
        return
    at, rank = int(place.flatten()[0]), place.dim()
    strides = [int(place.select(d, 1).flatten()[0]) - at if place.shape[d] > 1 else 0 for d in range(rank)]
    expected = torch.full_like(place, at)
    for d, stride in enumerate(strides):
        sizes = [-1 if d == e else 1 for e in range(rank)]
        expected = expected + stride * torch.arange(place.shape[d]).view(sizes)
    wrong = (place != expected) | ((place < 0) != (at < 0))
    if not bool(wrong.any()):
        if at >= 0:
            yield Part(start, tuple(place.shape), at, tuple(strides))
        return
    firsts = wrong.nonzero().min(0).values.tolist()  # along each dimension, where the first wrong one stands
    cut, d = max((first * place.numel() // place.shape[d], d) for d, first in enumerate(firsts))
    first = firsts[d] if cut else 1
    d = d if cut else next(e for e in range(rank) if place.shape[e] > 1)
    yield from _parts(place.narrow(d, 0, first), start)
    rest = tuple(s + first * (e == d) for e, s in enumerate(start))
    yield from _parts(place.narrow(d, first, place.shape[d] - first), rest)


def _ranges(where: Tensor) -> list[tuple[int, int]]:
    """Where it is so: from and to."""
    edge = torch.tensor([False])
    edges = torch.cat([edge, where, edge]).int().diff().nonzero().flatten().tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _runs(at: list[int], of: list[int]) -> list[tuple[int, int, int, int]]:
    """Pairs as runs, one after the other in `at`, in equal steps in `of`.

    >>> _runs([7, 8, 9, 10], [0, 2, 1, 3])
    [(7, 0, 2, 2), (9, 1, 2, 2)]
    """
    runs = list[tuple[int, int, int, int]]()
    for i, j in zip(at, of, strict=True):
        if runs:
            first, start, step, count = runs[-1]
            step = j - start if count == 1 else step
            if i == first + count and j == start + count * step:
                runs[-1] = (first, start, step, count + 1)
                continue
        runs.append((i, j, 1, 1))
    return runs
