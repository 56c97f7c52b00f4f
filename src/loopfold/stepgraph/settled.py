"""One graph for all steps, where the state comes out of the first in another dtype than it went in.

So it may be under torch.autocast: h = tanh(linear(h)) takes float32 and gives bfloat16, which the second step takes.
The graph is that of later steps. The first may compute the same but for casts; else it is taken by itself.
"""

from collections.abc import Callable
from typing import Any

import torch

from loopfold.states import Step, from_reals, in_reals, leaves
from loopfold.stepgraph.aten import aten
from loopfold.stepgraph.graph import Node, Refusal, StepGraph
from loopfold.stepgraph.ops import ROUNDED
from loopfold.stepgraph.trace import Given


def settled(record: Callable[..., StepGraph], f: Step, given: Given, ends: bool) -> tuple[StepGraph, bool]:
    """The graph of all steps, by `trace` or `retrace`; and whether the first computes otherwise, so is none of them.

    `ends`: sequences end at steps of their own.
    """
    start = in_reals(leaves(given.state))

    def after(graph: StepGraph) -> list[torch.dtype]:
        """What the next step finds. Where sequences end, `Sequential` puts state(0) in place of what came out."""
        found = [node.dtype for node in graph.outputs if node.dtype is not None]
        return [torch.promote_types(a, leaf.dtype) if ends else a for a, leaf in zip(found, start, strict=True)]

    graph = record(f, given.x, given.state, given.context)
    before, later = [leaf.dtype for leaf in start], after(graph)
    if later == before or not {*before, *later} <= {torch.float32, *ROUNDED}:
        return graph, False
    state = from_reals(given.state, [leaf.detach().to(dtype) for leaf, dtype in zip(start, later, strict=True)])
    steady = record(f, given.x, state, given.context)
    apart = not _same_but_for_casts(graph, steady)
    if after(steady) != later or (apart and ends):
        first, second = (", ".join(str(dtype).removeprefix("torch.") for dtype in each) for each in (before, later))
        raise Refusal(
            f"its state is {first} before the first step and {second} after it, and the first step computes otherwise "
            f"than later ones. Give it in the dtype that it takes on: state=state.to(dtype)."
        )
    return steady, apart


def _same_but_for_casts(first: StepGraph, later: StepGraph) -> bool:
    """Whether two graphs of a step compute the same, given states in other dtypes.

    They do where a state, in the wider of its two dtypes, is only read cast to the narrower; and where it is the
    narrower at first, and meets what is wider.
    """
    pairs = [(a, b) for a, b in zip(first.state, later.state, strict=True) if a.dtype != b.dtype]
    at_first = _by_place(first, {a: b.dtype for a, b in pairs}, exact=False)
    return at_first is not None and at_first == _by_place(later, {b: a.dtype for a, b in pairs}, exact=True)


def _by_place(graph: StepGraph, other: dict[Node, Any], exact: bool) -> list[Any] | None:
    """The operations of a graph without names, and without the casts of a state to its `other` dtype.

    None where a state in its wider dtype is read as it is: by what gives that dtype it may be, if it is `exact`, with
    no more digits than the narrower has.
    """
    inputs = (*graph.parameters.values(), *graph.state, *graph.x, *graph.context)
    places: dict[Node, int] = {node: i for i, node in enumerate(inputs)}
    own: dict[Node, Any] = {node: node.dtype for node in other}  # of states, and of what only moves their numbers

    def placed(a: Any) -> Any:
        if isinstance(a, Node):
            return ("node", places[a])
        return [placed(v) for v in a] if isinstance(a, tuple) else (type(a), repr(a) if isinstance(a, float) else a)

    found: list[Any] = []
    for node in graph.operations:
        reads = node.inputs()
        states = {(own[n], other[n]) for n in reads if n in own}
        if states and node.op == "_to_copy" and node.dtype == other[reads[0]]:
            places[node] = places[reads[0]]
            continue
        dtype = node.dtype
        if len(states) == 1 and all(n in own for n in reads) and aten(node.op).moves:
            ((own[node], other[node]),) = states
            dtype = None
        elif any(torch.promote_types(a, b) != b and not (exact and node.dtype == a) for a, b in states):
            return None
        found.append((node.target, dtype, node.shape, placed(node.args), placed(tuple(node.kwargs.items()))))
        places[node] = len(inputs) + len(found)
    return [*found, *((node.dtype, placed(node)) for node in (*graph.outputs, *graph.results))]
