"""The step as data: a graph of tensor operations with a free batch size; and what two graphs of a step share."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload

from loopfold.states import State


class Refusal(Exception):
    """Why a step cannot be compiled, in words. The engines pass it on; it never means a wrong result."""


class Unsound(Exception):
    """A program or a kernel that cannot be right: a fault of ours, found before any of its code runs."""


class _Batch:
    def __repr__(self) -> str:
        return "batch"


BATCH = _Batch()  # stands for the batch size in shapes and arguments, which is free


@dataclass(frozen=True, eq=False)
class Node:
    """One value of the step: a leaf (`parameter`, `state`, `x`), an operation of torch, or a part of its results."""

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

    def inputs(self) -> list["Node"]:
        """The nodes that this one reads, in order."""
        return list(nodes_in((*self.args, *self.kwargs.values())))

    def __str__(self) -> str:
        arguments = [_show(a) for a in self.args] + [f"{k}={_show(v)}" for k, v in self.kwargs.items()]
        shape = f"  [{', '.join(map(str, self.shape))}]" if self.dtype else ""  # several results: shown by their parts
        return f"{self.name} = {self.op}({', '.join(arguments)}){shape}"


@dataclass(frozen=True, eq=False)
class StepGraph:
    """A step as plain data: what it reads, what it does, and what state it returns. `print` shows it."""

    name: str
    parameters: dict[str, Node]  # parameters and buffers, under the user's own names
    state: tuple[Node, ...]  # the leaves of the state that goes in
    x: Node | None
    operations: tuple[Node, ...]  # in the order in which they run
    outputs: tuple[Node, ...]  # the leaves of the state that comes out
    structure: State  # a state with the structure of the one that comes out
    numbers: tuple[Node, ...] = ()  # numbers of the step that may be others at every call

    def __str__(self) -> str:
        def leaf(node: Node) -> str:
            return f"{node.name} [{', '.join(map(str, node.shape))}]"

        reads = [leaf(n) for n in (*self.state, *([self.x] if self.x else []))]
        lines = [f"{self.name}({', '.join(reads)})"]
        lines += [f"  parameters: {', '.join(leaf(p) for p in self.parameters.values())}"] if self.parameters else []
        lines += [f"  {node}" for node in self.operations]
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


def apply(node: Node, values: dict[Node, Any], rows: int) -> Any:
    """Run one operation on the values of what it reads, for a batch of `rows`."""
    if node.op == "getitem":
        return values[node.args[0]][node.args[1]]
    assert node.target is not None
    kwargs = {k: _real(v, values, rows) for k, v in node.kwargs.items()}
    return node.target(*[_real(a, values, rows) for a in node.args], **kwargs)


def _real(a: Any, values: dict[Node, Any], rows: int) -> Any:
    if isinstance(a, Node):
        return values[a]
    if isinstance(a, tuple):
        return [_real(v, values, rows) for v in a]
    return rows if a is BATCH else a


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
        if type(a) is int and type(b) is int and (a, b) == (first, second):
            return BATCH
        same = a.hex() == b.hex() if type(a) is type(b) is float else type(a) is type(b) and (a is b or a == b)
        if not same:
            raise Refusal(f"it computes with the batch size itself, or changes from call to call ({a!r}, then {b!r}).")
        return a

    def merge_node(a: Node, b: Node) -> Node:
        if (a.op, a.name, a.kwargs.keys()) != (b.op, b.name, b.kwargs.keys()):
            raise Refusal("it does different things at different batch sizes.")
        args, shape = merged(a.args, b.args), merged(a.shape, b.shape)
        kwargs = {k: merged(v, b.kwargs[k]) for k, v in a.kwargs.items()}
        if BATCH in shape[1:]:
            raise Refusal(f"aten.{a.op} moves the batch from the first place.")
        if not _is_size(args) or BATCH in kwargs.values():
            raise Refusal(f"it computes with the batch size itself (in aten.{a.op}).")
        new[id(a)] = Node(a.name, a.op, args, kwargs, shape, a.dtype, a.target)
        return new[id(a)]

    if len(one.operations) != len(two.operations):
        raise Refusal("it does different things at different batch sizes.")
    parameters = {k: merge_node(p, two.parameters[k]) for k, p in one.parameters.items()}
    state = tuple(merge_node(a, b) for a, b in zip(one.state, two.state, strict=True))
    x = merge_node(one.x, two.x) if one.x is not None and two.x is not None else None
    operations = tuple(merge_node(a, b) for a, b in zip(one.operations, two.operations, strict=True))
    needed = _needed([new[id(o)] for o in one.outputs] + [n for n in operations if n.is_check])
    return StepGraph(
        one.name,
        parameters,
        state,
        x,
        tuple(n for n in operations if n in needed),
        tuple(merged(one.outputs, two.outputs)),
        one.structure,
    )


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
        parameters = {k: both_nodes(p, new.parameters[k]) for k, p in known.parameters.items()}
        state = tuple(both_nodes(a, b) for a, b in zip(known.state, new.state, strict=True))
        x = both_nodes(known.x, new.x) if known.x is not None and new.x is not None else None
        operations = tuple(both_nodes(a, b) for a, b in zip(known.operations, new.operations, strict=True))
        outputs = both(known.outputs, new.outputs)
    except Refusal:
        return None, ()
    if numbers.keys() == set(known.numbers):
        return known, tuple(numbers[leaf] for leaf in known.numbers)
    found = StepGraph(known.name, parameters, state, x, operations, outputs, known.structure, tuple(numbers))
    return found, tuple(numbers.values())


def _is_size(args: tuple[Any, ...]) -> bool:
    """Whether the batch size stands, if anywhere, at the head of a list of sizes."""
    return BATCH not in args and all(BATCH not in a[1:] for a in args if isinstance(a, tuple))


def _needed(roots: list[Node]) -> set[Node]:
    seen: set[Node] = set()
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += node.inputs()
    return seen


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
