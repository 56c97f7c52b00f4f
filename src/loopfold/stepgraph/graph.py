"""The step as data: a graph of tensor operations with a free batch size; and what two graphs of a step share."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from loopfold.products import addmm, mm
from loopfold.states import State


class Refusal(Exception):
    """Why a step cannot be compiled, in words. The engines pass it on; it never means a wrong result."""


MIXES = "mixes the sequences of a batch"  # as a refusal says it


class Unsound(Exception):
    """A program or a kernel that cannot be right: a fault of ours, found before any of its code runs."""


class NotRun(Exception):
    """A kernel that a machine did not run, in the words of its driver; the kernel itself need not be wrong."""


@dataclass(frozen=True)
class Batch:
    """Stands for the batch size, which is free, in shapes and arguments; or for so many rows of every sequence."""

    times: int = 1

    def __repr__(self) -> str:
        return "batch" if self.times == 1 else f"{self.times}·batch"


BATCH = Batch()


def batch_at(shape: tuple[Any, ...]) -> int | None:
    """Which dimension of a shape is the batch."""
    return next((i for i, size in enumerate(shape) if isinstance(size, Batch)), None)


def sizes_of(shape: tuple[Any, ...], rows: int = 1) -> tuple[int, ...]:
    """A shape in numbers, for a batch of `rows`.

    >>> sizes_of((Batch(4), 5)), sizes_of((BATCH, 3), rows=2)
    ((4, 5), (2, 3))
    """
    return tuple(rows * size.times if isinstance(size, Batch) else size for size in shape)


def features(shape: tuple[Any, ...]) -> tuple[int, ...]:
    """The sizes of what belongs to one sequence.

    >>> features((BATCH, 3, 5)), features((Batch(4), 5)), features((4, BATCH, 5))
    ((3, 5), (4, 5), (4, 5))
    """
    return sizes_of(tuple(size for size in shape if size != BATCH))


def rows_first(tensor: Tensor, shape: tuple[Any, ...]) -> Tensor:
    """A tensor of such a shape as `[rows, features]`, a row for each sequence."""
    at = batch_at(shape)
    assert at is not None
    parts = tensor.unflatten(at, (-1, shape[at].times)).movedim(at, 0)
    return parts.reshape(len(parts), -1)


def from_rows(tensor: Tensor, shape: tuple[Any, ...]) -> Tensor:
    """`[rows, features]` as a tensor of such a shape."""
    at = batch_at(shape)
    assert at is not None
    sizes = features((*shape[:at], *shape[at + 1 :]))
    times = shape[at].times
    parts = tensor.reshape(len(tensor), *sizes[:at], times, *sizes[at:])
    return parts.movedim(0, at).flatten(at, at + 1)


@dataclass(frozen=True, eq=False)
class Node:
    """One value: a leaf (`parameter`, `state`, `x`, `context`), an operation of torch, or a part of its results."""

    name: str
    op: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    shape: tuple[Any, ...] = ()
    dtype: torch.dtype | None = None
    target: OpOverload | None = None

    @property
    def is_check(self) -> bool:
        """Whether it gives nothing and only raises an error where something is wrong, such as a singular matrix."""
        return self.target is not None and not self.target._schema.returns

    @property
    def is_draw(self) -> bool:
        """Whether it draws random numbers: others at every step, and in the order of the step."""
        return self.target is not None and torch.Tag.nondeterministic_seeded in self.target.tags

    def argument(self, name: str) -> Any:
        """What one of its arguments is, given or by default, under the name that torch has for it; None if it has none.

        >>> Node("s", "sum", (Node("h", "state"), (1,)), target=torch.ops.aten.sum.dim_IntList).argument("dim")
        (1,)
        """
        assert self.target is not None
        for place, known in enumerate(self.target._schema.arguments):
            if known.name == name:
                given = self.args[place] if place < len(self.args) else known.default_value
                return self.kwargs.get(name, given)
        return None

    def inputs(self) -> list["Node"]:
        """The nodes that this one reads, in order."""
        return list(nodes_in((*self.args, *self.kwargs.values())))

    def __str__(self) -> str:
        arguments = [_show(a) for a in self.args] + [f"{k}={_show(v)}" for k, v in self.kwargs.items()]
        shape = f"  [{', '.join(map(str, self.shape))}]" if self.dtype else ""  # several results: shown by their parts
        return f"{self.name} = {self.op}({', '.join(arguments)}){shape}"


@dataclass(frozen=True, eq=False)
class StepGraph:
    """A step as plain data: what it reads, what it does, and what it returns. `print` shows it."""

    name: str
    parameters: dict[str, Node]  # parameters and buffers, under the user's own names
    state: tuple[Node, ...]  # the leaves of the state that goes in
    x: tuple[Node, ...]  # what is another at every step: the leaves of x, and t where the step asks for its number
    operations: tuple[Node, ...]  # in the order in which they run
    outputs: tuple[Node, ...]  # the leaves of the state that comes out
    structure: State  # with the structure of what comes out: the leaves of the results, then those of the state
    numbers: tuple[Node, ...] = ()  # numbers of the step that may be others at every call
    context: tuple[Node, ...] = ()  # what every step reads alike, [batch, …]
    results: tuple[Node, ...] = ()  # the leaves of an output beside the state, which no later step reads

    @property
    def roughest(self) -> torch.dtype | None:
        """The dtype of fewest digits that some of it has, where that is half precision, as under torch.autocast."""
        found = {node.dtype for node in (*self.state, *self.operations)}
        return next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in found), None)

    def __str__(self) -> str:
        def leaf(node: Node) -> str:
            return f"{node.name} [{', '.join(map(str, node.shape))}]"

        reads = [leaf(n) for n in (*self.state, *self.x, *self.context)]
        lines = [f"{self.name}({', '.join(reads)})"]
        lines += [f"  parameters: {', '.join(leaf(p) for p in self.parameters.values())}"] if self.parameters else []
        lines += [f"  {node}" for node in self.operations]
        lines += [f"  output {', '.join(n.name for n in self.results)}"] if self.results else []
        lines += [f"  return {', '.join(n.name for n in self.outputs)}"]
        return "\n".join(lines)


# ------------------------------------------------------------------ parts of a graph


def needed_for(roots: list[Node], given: dict[Node, Any] | set[Node]) -> list[Node]:
    """The nodes that must run to have `roots`, when `given` are there."""
    seen: dict[Node, None] = {}
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node not in seen and node not in given:
            seen[node] = None
            todo += node.inputs()
    return list(seen)


_FASTER: dict[OpOverload, Callable[..., Tensor]] = {torch.ops.aten.mm.default: mm, torch.ops.aten.addmm.default: addmm}


def apply(node: Node, values: dict[Node, Any], rows: int) -> Any:
    """Run one operation on the values of what it reads, for a batch of `rows`."""
    if node.op == "getitem":
        return values[node.args[0]][node.args[1]]
    assert node.target is not None
    kwargs = {k: _real(v, values, rows) for k, v in node.kwargs.items()}
    args = [_real(a, values, rows) for a in node.args]
    if node.op in ("view", "_unsafe_view") and isinstance(args[1], list):
        return args[0].reshape(args[1])  # these numbers may stand in another order in memory
    return _FASTER.get(node.target, node.target)(*args, **kwargs)


def compute(graph: StepGraph, roots: list[Node], values: dict[Node, Any], rows: int) -> None:
    """Add to `values` what must run to have `roots`, for a batch of `rows`."""
    needed = set(needed_for(roots, {*values}))
    for node in graph.operations:
        if node in needed:
            values[node] = apply(node, values, rows)


def _real(a: Any, values: dict[Node, Any], rows: int) -> Any:
    if isinstance(a, Node):
        return values[a]
    if isinstance(a, tuple):
        return [_real(v, values, rows) for v in a]
    return rows * a.times if isinstance(a, Batch) else a


# ------------------------------------------------------------------ what differs between batch sizes


def merge(one: StepGraph, two: StepGraph, first: int, second: int) -> StepGraph:
    """The graph with BATCH wherever `one` has its batch size and `two` has its own."""
    new: dict[int, Node] = {}

    def merged(a: Any, b: Any) -> Any:
        if isinstance(a, Node):
            if not isinstance(b, Node) or a.name != b.name:
                raise Refusal("it does different things at different batch sizes.")
            return new[id(a)]
        if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
            return tuple(merged(p, q) for p, q in zip(a, b, strict=True))
        if type(a) is int and type(b) is int and a != b and a % first == 0 and (a // first) * second == b:
            return Batch(a // first)
        same = a.hex() == b.hex() if type(a) is type(b) is float else type(a) is type(b) and (a is b or a == b)
        if not same:
            raise Refusal(f"it computes with the batch size itself, or changes from call to call ({a!r}, then {b!r}).")
        return a

    def merge_node(a: Node, b: Node) -> Node:
        if (a.op, a.name, a.kwargs.keys()) != (b.op, b.name, b.kwargs.keys()):
            raise Refusal("it does different things at different batch sizes.")
        args, shape = merged(a.args, b.args), merged(a.shape, b.shape)
        kwargs = {k: merged(v, b.kwargs[k]) for k, v in a.kwargs.items()}
        if sum(isinstance(size, Batch) for size in shape) > 1:
            raise Refusal(f"aten.{a.op} sets the sequences of a batch against each other.")
        if any(isinstance(v, Batch) for v in (*args, *kwargs.values())) and a.op != "native_group_norm":
            raise Refusal(f"it computes with the batch size itself (in aten.{a.op}).")
        new[id(a)] = Node(a.name, a.op, args, kwargs, shape, a.dtype, a.target)
        return new[id(a)]

    if len(one.operations) != len(two.operations):
        raise Refusal("it does different things at different batch sizes.")
    graph = _pair_by_pair(one, two, merge_node)
    outputs, results = merged((one.outputs, one.results), (two.outputs, two.results))
    always = [n for n in graph.operations if n.is_check or n.is_draw]
    needed = set(needed_for([*outputs, *results, *always], set()))
    operations = tuple(n for n in graph.operations if n in needed)
    return replace(graph, operations=operations, outputs=outputs, results=results)


def with_numbers(known: StepGraph, new: StepGraph) -> tuple[StepGraph | None, tuple[float, ...]]:
    """`known` with a leaf wherever `new` has another number, and the numbers of `new` in these places.

    The graph is `known` itself where every difference is a leaf of it already, and None where more than numbers differ.
    """
    numbers: dict[Node, float] = {}
    made: dict[Node, Node] = {}

    def both(a: Any, b: Any) -> Any:
        if isinstance(a, Node) and a.op == "number" and type(b) is float:
            numbers[a] = b
            return a
        if isinstance(a, Node) and isinstance(b, Node) and a.name == b.name:
            return made[a]
        if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
            return tuple(both(p, q) for p, q in zip(a, b, strict=True))
        if type(a) is float and type(b) is float and a.hex() != b.hex():
            leaf = Node(f"number{len(numbers)}", "number", dtype=torch.float64)
            numbers[leaf] = b
            return leaf
        if type(a) is not type(b) or isinstance(a, Node) or (a is not b and a != b):
            raise Refusal("more than numbers differ.")
        return a

    def both_nodes(a: Node, b: Node) -> Node:
        if (a.op, a.name, a.target, a.dtype) != (b.op, b.name, b.target, b.dtype) or a.kwargs.keys() != b.kwargs.keys():
            raise Refusal("more than numbers differ.")
        args, kwargs = both(a.args, b.args), {k: both(v, b.kwargs[k]) for k, v in a.kwargs.items()}
        made[a] = Node(a.name, a.op, args, kwargs, both(a.shape, b.shape), a.dtype, a.target)
        return made[a]

    if len(known.operations) != len(new.operations) or known.parameters.keys() != new.parameters.keys():
        return None, ()
    try:
        graph = _pair_by_pair(known, new, both_nodes)
        outputs, results = both((known.outputs, known.results), (new.outputs, new.results))
    except Refusal:
        return None, ()
    if numbers.keys() == set(known.numbers):
        return known, tuple(numbers[leaf] for leaf in known.numbers)
    return replace(graph, outputs=outputs, results=results, numbers=tuple(numbers)), tuple(numbers.values())


def _pair_by_pair(one: StepGraph, two: StepGraph, both: Callable[[Node, Node], Node]) -> StepGraph:
    """`one` with what `both` makes of each of its leaves and operations and of that of `two`, arguments first."""

    def each(a: tuple[Node, ...], b: tuple[Node, ...]) -> tuple[Node, ...]:
        return tuple(both(p, q) for p, q in zip(a, b, strict=True))

    return replace(
        one,
        parameters={k: both(p, two.parameters[k]) for k, p in one.parameters.items()},
        state=each(one.state, two.state),
        x=each(one.x, two.x),
        context=each(one.context, two.context),
        operations=each(one.operations, two.operations),
    )


def nodes_in(values: Any) -> Iterator[Node]:
    """The nodes among arguments, in order."""
    for value in values:
        if isinstance(value, Node):
            yield value
        elif isinstance(value, tuple):
            yield from nodes_in(value)


def _show(value: Any) -> str:
    if isinstance(value, Node):
        return value.name
    if isinstance(value, tuple):
        return f"({', '.join(map(_show, value))})"
    return str(value)
