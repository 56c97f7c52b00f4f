"""How torch makes what the loop reads from outside: rows, matrices and sequences, from the nodes of a step graph."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from loopfold.stepgraph.graph import Node


@dataclass(frozen=True, eq=False)
class Recipe:
    """How torch makes a tensor that the loop reads, from nodes of the step graph and other recipes."""

    function: Callable[..., Any]  # a tensor; or `range(n)`, the numbers 0 … n - 1, which go where the state is
    parts: tuple["Node | Recipe", ...]

    def make(self, values: dict[Node, Any]) -> Any:
        return self.function(*[p.make(values) if isinstance(p, Recipe) else values[p] for p in self.parts])

    def nodes(self) -> list[Node]:
        return [n for p in self.parts for n in (p.nodes() if isinstance(p, Recipe) else [p])]


@dataclass(frozen=True)
class Matrix:
    """A matrix `[k, m]` that is the same at every step: a node, or a part of one, its transpose, or made of it."""

    node: Node
    shape: tuple[int, int]
    part: tuple[int, ...] = ()  # of a node of more than two dimensions
    transposed: bool = False
    made: Callable[[Tensor], Tensor] | None = None

    def rows(self, start: int, stop: int) -> Recipe:
        def make(tensor: Tensor) -> Tensor:
            matrix = tensor[self.part] if self.part else tensor
            matrix = matrix if self.made is None else self.made(matrix)
            matrix = matrix.mT if self.transposed else matrix
            return matrix if (start, stop) == (0, self.shape[0]) else matrix[start:stop]

        return Recipe(make, (self.node,))
