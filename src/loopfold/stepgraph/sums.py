"""Sums in a loop: what of them does not need the state is added up before it."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from loopfold.products import addmm
from loopfold.stepgraph.graph import BATCH, Node
from loopfold.stepgraph.loop import Builder, Value
from loopfold.stepgraph.recipes import Recipe

MOST = 256  # terms and sums of them, in one that is looked through


class Outside(Protocol):
    """What a loop reads: inputs of each step, and constants; and how it gets another input."""

    inputs: list[Recipe]
    constants: list[Recipe]
    dtype: torch.dtype | None

    def input(self, recipe: Recipe, width: int, key: Any) -> Value: ...


class Sums(Builder):
    """A builder that collects, in every sum, the terms that do not need the state, and adds them up before the loop."""

    def __init__(self, outside: Outside) -> None:
        super().__init__()
        self.outside = outside

    def make(self, op: str, *args: Value, width: int | None = None, index: Any = None) -> Value:
        if op == "add":
            terms = _terms(args) or []
            free = [t for t in terms if t.op in ("input", "constant")]
            sized = max((t.width for t in free), default=1)
            if len(free) > 1 and any(t.op == "input" for t in free) and all(t.width in (1, sized) for t in free):
                rest = [t for t in terms if t not in free]
                return self.total([*rest, self._sum(free)]) if rest else self._sum(free)
        return super().make(op, *args, width=width, index=index)

    def _sum(self, terms: list[Value]) -> Value:
        recipes = [(self.outside.inputs if t.op == "input" else self.outside.constants)[t.index] for t in terms]
        width = max(t.width for t in terms)
        recipe = _product_and_row(terms, recipes, self.outside.dtype) or Recipe(
            lambda *parts: sum(parts[1:], parts[0]), tuple(recipes)
        )
        return self.outside.input(recipe, width, tuple(terms))


def _product_and_row(terms: list[Value], recipes: list[Recipe], dtype: torch.dtype | None) -> Recipe | None:
    """`x @ U + b` as one operation, which spares a pass over the whole sequence."""
    if sorted(t.op for t in terms) != ["constant", "input"] or terms[0].width != terms[1].width:
        return None
    row, product = recipes if terms[0].op == "constant" else recipes[::-1]
    node = product.parts[0]
    if not isinstance(node, Node) or node.op != "mm" or node.shape[0] != BATCH or node.dtype != dtype:
        return None
    if getattr(row.parts[0], "op", "") == "number":
        return None
    return Recipe(addmm, (row, *node.args))


def _terms(args: Sequence[Value]) -> list[Value] | None:
    """What is added up in a sum of these; None where that is too much, as in y = y + y many times over."""
    todo, found = [*reversed(args)], list[Value]()
    for _ in range(MOST):
        if not todo:
            return found
        v = todo.pop()
        if v.op == "add":
            todo += reversed(v.args)
        else:
            found.append(v)
    return None
