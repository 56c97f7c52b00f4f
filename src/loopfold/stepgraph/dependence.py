"""What each operation of a step depends on, and what is better computed in the loop all the same."""

import torch

from loopfold.stepgraph.aten import MOVING, aten
from loopfold.stepgraph.graph import Node, Refusal, StepGraph, batch_at, features, needed_for
from loopfold.stepgraph.moves import size_of, sources_of
from loopfold.stepgraph.ops import ROUNDED
from loopfold.stepgraph.rowwise import is_pointwise
from loopfold.stepgraph.rules import RULES


def dependence(graph: StepGraph) -> dict[Node, str]:
    """Each node as `once`, `aside`, `before` or `state`: the most that anything it reads depends on."""
    found: dict[Node, str] = dict.fromkeys((*graph.parameters.values(), *graph.numbers), "once")
    found |= dict.fromkeys(graph.state, "state")
    found |= dict.fromkeys(graph.x, "before")
    found |= dict.fromkeys(graph.context, "aside")
    of_the_batch = "aside" if graph.context else "before"
    for node in graph.operations:
        reads = {found[n] for n in node.inputs()}
        if node.is_draw:
            _check_draw(graph, node)
            found[node] = "before"
        elif "state" in reads or reads >= {"before", "aside"}:  # both meet within the loop, where neither is copied
            found[node] = "state"
        elif reads & {"before", "aside"}:
            found[node] = "before" if "before" in reads else "aside"
        else:
            found[node] = of_the_batch if batch_at(node.shape) is not None else "once"
    return found


def dependence_in_a_step(graph: StepGraph) -> dict[Node, str]:
    """The same for a step by itself: what reads x waits for it as the state does, but for the rows of a table."""
    found = dependence(graph)
    for node in graph.operations:
        if node.is_draw or node.is_check:
            raise Refusal(f"it {'draws random numbers' if node.is_draw else 'checks values'} (aten.{node.op}).")
        if found[node] == "before" and not table_of(graph, node):
            found[node] = "state"
    return found


# Of what moves numbers: what reads one tensor and gives one
PLACED = (
    *("view", "_unsafe_view", "reshape", "expand", "unsqueeze", "squeeze", "permute", "t", "transpose"),
    *("slice", "select", "clone", "alias"),
)


def table_of(graph: StepGraph, node: Node) -> Node | None:
    """The table of parameters of which `node` is the rows that x names, as an embedding has it."""
    if node.op != "embedding" or node.args[1] not in graph.x or node.args[0] not in graph.parameters.values():
        return None
    return node.args[0]


def made_of(graph: StepGraph, depends: dict[Node, str], learned: frozenset[Node]) -> set[Node]:
    """What is computed once from `learned` parameters, and can as well be computed at every step.

    That is what works number by number, or along given dimensions, and is read in such ways alone: a matrix that rows
    are multiplied with is no value of a loop.
    """
    found, reads, of_learned = set[Node](), dict[Node, list[Node]](), set(learned)
    for node in graph.operations:
        if of_learned & {*node.inputs()}:
            of_learned.add(node)
        for n in node.inputs():
            reads.setdefault(n, []).append(node)
    for node in reversed(graph.operations):
        fits = depends[node] == "once" and node in of_learned and node.dtype == graph.state[0].dtype
        if fits and _is_small_work(node) and all(_is_beside(node, n, n in found) for n in reads.get(node, ())):
            found.add(node)
    return found


def _is_small_work(node: Node) -> bool:
    if node.op not in RULES:
        return False
    if aten(node.op).along:
        return node.argument("dim") not in (None, ())
    return is_pointwise(node) or node.op in PLACED or node.op == "detach"


def _is_beside(node: Node, reader: Node, inside: bool) -> bool:
    """Whether what reads a node takes it as a row."""
    bias = reader.op == "addmm" and node is reader.args[0] and node not in reader.args[1:3]
    return inside or bias or (batch_at(reader.shape) is not None and is_pointwise(reader))


def grown(graph: StepGraph, depends: dict[Node, str]) -> set[Node]:
    """What depends on x alone but is much larger than what it is made from, as an outer product is.

    For all τ steps at once it would be a long way through memory; the loop makes it from its parts.
    """
    found: set[Node] = set()
    for node in graph.operations:
        if depends[node] == "before" and len(features(node.shape)) > 1 and node.dtype == graph.state[0].dtype:
            sources = sources_of(node)
            larger = size_of(node.shape) >= 2 * sum(size_of(n.shape) for n in sources)
            if (
                sources
                and (larger or any(n in found for n in sources))
                and (is_pointwise(node) or node.op in MOVING or node.op == "bmm")
            ):
                found.add(node)
    return found


def closer_to_the_state(graph: StepGraph, depends: dict[Node, str], in_loop: set[Node]) -> list[Node]:
    """What is better computed in the loop, though no later step reads it.

    That is what reads the context, which is not copied there, and what is far smaller than a matrix that it reads.
    """
    found = []
    for node in graph.operations:
        if depends[node] == "state" and node not in in_loop and node.op in RULES:
            small = 4 * size_of(node.shape)
            reads = [n for n in node.inputs() if depends[n] in ("state", "aside")]
            large = [n for n in reads if len(features(n.shape)) > 1 and size_of(n.shape) >= small > 0]
            if large or any(depends[n] == "aside" for n in reads):
                found.append(node)
    return found


def loop_dtype(graph: StepGraph, depends: dict[Node, str]) -> torch.dtype:
    """The dtype of the loop. Of a step in half precision it is float32, if some of the step is, as under autocast."""
    leaves = {leaf.dtype for leaf in (*graph.state, *graph.outputs)}
    wide = {dtype for dtype in leaves if dtype not in ROUNDED}
    if len(wide) > 1 or any(dtype is None or not dtype.is_floating_point for dtype in leaves):
        raise Refusal(f"its state has {', '.join(sorted(map(str, leaves)))}; a kernel needs one floating dtype.")
    computed = [node for node in needed_for(list(graph.outputs), set()) if depends[node] == "state"]
    found = {node.dtype for node in (*computed, *graph.parameters.values()) if is_floating(node)} | leaves
    if not wide and (torch.float32 in found or len(leaves) > 1):
        return torch.float32
    (dtype,) = wide or leaves
    assert dtype is not None
    return dtype


def is_floating(node: Node) -> bool:
    """Whether it is one tensor, of floating numbers."""
    return node.dtype is not None and node.dtype.is_floating_point


def _check_draw(graph: StepGraph, node: Node) -> None:
    """Random numbers are drawn before the loop: they read nothing of a step, and every sequence has its own."""
    read = needed_for(node.inputs(), set())
    if {*graph.state, *graph.x, *graph.context} & {*read}:
        raise Refusal(
            f"it draws random numbers (aten.{node.op}) whose distribution depends on the state or on x. Draw them "
            f"as they always are, and then compare or scale: torch.rand_like(p) < p, mean + torch.randn_like(mean)."
        )
    if batch_at(node.shape if node.dtype is not None else node.inputs()[0].shape) is None:
        raise Refusal(
            f"it draws random numbers (aten.{node.op}) for a tensor that all sequences share, so that this is "
            f"another one at every step. Draw it once for each run, outside the step, into a buffer; or draw rows "
            f"[batch, n]."
        )
