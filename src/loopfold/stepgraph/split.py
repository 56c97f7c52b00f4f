"""A step graph, split at its loop, as data: what each part runs, and what the loop reads from outside."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from loopfold.stepgraph.graph import Node, StepGraph, needed_for
from loopfold.stepgraph.loop import Builder, Value
from loopfold.stepgraph.recipes import Recipe


@dataclass(frozen=True, eq=False)
class Loop:
    """A step graph, split. `leaves[i]` is where a leaf of the new state comes from: an emitted value, or a node.

    After those of the state come those of the graph's results.
    """

    graph: StepGraph
    dtype: torch.dtype  # of all that the loop computes and reads
    builder: Builder
    constants: tuple[Recipe, ...]  # rows [k] and matrices [k, m]
    lengths: tuple[int, ...]  # of the constants: k of each
    inputs: tuple[Recipe, ...]  # sequences [τ·batch, k]
    widths: tuple[int, ...]  # of the inputs
    contexts: tuple[Recipe, ...]  # rows [batch, k], the same at every step
    carried: tuple[int, ...]  # the leaves of the state that some later step reads
    emitted: tuple[Value, ...]  # the values kept for every step; the first are the carried leaves after the step
    leaves: tuple[int | Node, ...]
    taps: dict[Node, int]  # the nodes that the emitted values stand for
    by_sequence: tuple[Node, ...]  # the context, and what depends on nothing else that is not the same for all
    checks: tuple[Node, ...]  # run once a call for the errors that they may raise

    def computed(self) -> "Loop":
        """The loop without what only gradients read: to be run, and no more to be differentiated."""
        return replace(self, emitted=tuple(self.builder.computed(self.emitted)))

    @cached_property
    def draws(self) -> tuple[Node, ...]:
        """The operations that draw random numbers: run first, for one step after the other."""
        return tuple(node for node in self.graph.operations if node.is_draw)

    @cached_property
    def before_draws(self) -> list[Node]:
        """What the draws read: sizes, and what depends on parameters alone."""
        reads = [n for node in self.draws for n in node.inputs()]
        return self._operations(needed_for(reads, {*self.graph.parameters.values(), *self.graph.numbers}))

    @cached_property
    def fixed(self) -> frozenset[int]:
        """The inputs that are random numbers and nothing else, so that no gradient goes to them."""
        leaves = {*self.graph.parameters.values(), *self.graph.x}
        return frozenset(
            i for i, recipe in enumerate(self.inputs) if not leaves & {*needed_for(recipe.nodes(), {*self.draws})}
        )

    @property
    def next(self) -> tuple[Value, ...]:
        """The carried leaves of the state after the step."""
        return self.emitted[: len(self.carried)]

    @cached_property
    def before(self) -> list[Node]:
        """The operations that run before the loop, on parameters, numbers and x."""
        checks = [node for node in self.checks if node not in self.by_sequence]
        roots = [*checks, *(node for recipe in (*self.constants, *self.inputs) for node in recipe.nodes())]
        return self._operations(needed_for(roots, self._known()))

    @cached_property
    def aside(self) -> list[Node]:
        """The operations that run once for each sequence, on the context."""
        checks = [node for node in self.checks if node in self.by_sequence]
        roots = [*checks, *self.repeated, *(node for recipe in self.contexts for node in recipe.nodes())]
        return self._operations(needed_for(roots, {*self._known(), *self.graph.context, *self.before}))

    @cached_property
    def after(self) -> list[Node]:
        """The operations that run after the loop, on what is known then: also the taps, and the state before a step."""
        known = {*self._known(), *self.before, *self.taps, *self.by_sequence}
        return self._operations(needed_for(self.outside, known))

    @cached_property
    def repeated(self) -> list[Node]:
        """What is the same at every step and is read after the loop, where all steps are taken together."""
        return [node for node in self.by_sequence if node in self._reads_after]

    @cached_property
    def outside(self) -> list[Node]:
        """The leaves of the new state that the loop does not emit."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Node)]

    @cached_property
    def read_after(self) -> list[int]:
        """Which of the carried leaves, as they were before a step, are read after the loop."""
        return [k for k, i in enumerate(self.carried) if self.graph.state[i] in self._reads_after]

    @cached_property
    def _reads_after(self) -> set[Node]:
        return {n for node in self.after for n in node.inputs()} | {*self.outside}

    def _known(self) -> set[Node]:
        return {*self.graph.parameters.values(), *self.graph.numbers, *self.graph.x, *self.draws}

    def _operations(self, needed: list[Node]) -> list[Node]:
        wanted = set(needed)
        return [node for node in self.graph.operations if node in wanted]
