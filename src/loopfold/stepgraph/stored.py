"""A step graph as text, and a module that runs it: for a process that does not have the user's cell."""

import json
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from loopfold.states import State, leaves
from loopfold.stepgraph.graph import Batch, Node, Refusal, StepGraph, compute

VERSION = 1
_KINDS = (torch.dtype, torch.memory_format, torch.layout)  # constants of torch's, which are attributes of it


def to_text(graph: StepGraph) -> str:
    """The graph in JSON, or a `Refusal` that says what of it is no plain data."""
    parts = (graph.state, graph.x, graph.context, graph.operations, graph.outputs, graph.results)
    if graph.numbers or any(node.is_draw for node in graph.operations):
        raise Refusal("it draws random numbers, or computes with numbers that change.")
    leaf_nodes = [*graph.parameters.values(), *graph.state, *graph.x, *graph.context]
    number = {node: i for i, node in enumerate((*leaf_nodes, *graph.operations))}

    def plain(value: Any) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return {"float": value.hex()}  # inf and NaN too
        if isinstance(value, Node):
            return {"node": number[value]}
        if isinstance(value, tuple):
            return [plain(part) for part in value]
        if isinstance(value, Batch):
            return {"batch": value.times}
        if isinstance(value, _KINDS):
            return {"torch": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        raise Refusal(f"it computes with a {type(value).__name__}.")

    nodes = [
        {
            "name": node.name,
            "op": node.op,
            "args": plain(node.args),
            "kwargs": {key: plain(value) for key, value in node.kwargs.items()},
            "shape": plain(node.shape),
            "dtype": plain(node.dtype),
            "target": None if node.target is None else str(node.target),
        }
        for node in number
    ]
    places = [[number[node] for node in part] for part in parts]
    data = {"version": VERSION, "name": graph.name, "parameters": [*graph.parameters], "nodes": nodes, "parts": places}
    return json.dumps(data, separators=(",", ":"))


def from_text(text: str) -> StepGraph:
    """The graph again; its results and states are tuples, whatever they were."""
    data = json.loads(text)
    if data["version"] != VERSION:
        raise ValueError(
            f"a step was stored by another version of Loopfold (format {data['version']}, this one reads {VERSION}): "
            f"export the model again."
        )
    made: list[Node] = []

    def real(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(real(part) for part in value)
        if not isinstance(value, dict):
            return value
        ((kind, what),) = value.items()
        if kind == "node":
            return made[what]
        if kind == "torch":
            return getattr(torch, what)
        kinds: dict[str, Any] = {"float": float.fromhex, "batch": Batch, "device": torch.device}
        return kinds[kind](what)

    for node in data["nodes"]:
        name: str | None = node["target"]
        target: Any = None if name is None else reduce(getattr, name.split("."), torch.ops)
        kwargs = {key: real(value) for key, value in node["kwargs"].items()}
        shape, dtype = real(node["shape"]), real(node["dtype"])
        made.append(Node(node["name"], node["op"], real(node["args"]), kwargs, shape, dtype, target))
    state, x, context, operations, outputs, results = (tuple(made[i] for i in part) for part in data["parts"])
    parameters = dict(zip(data["parameters"], made, strict=False))
    blank = torch.empty(0)
    new: State = tuple(blank for _ in outputs)
    structure = (tuple(blank for _ in results), new) if results else new
    return StepGraph(data["name"], parameters, state, x, operations, outputs, structure, (), context, results)


class StoredStep(nn.Module):
    """The step of a graph with other parameters, in the order of the graph: `f(state, x)`, where a state is a tuple."""

    def __init__(self, graph: StepGraph, parameters: list[Tensor]) -> None:
        super().__init__()
        self.graph = graph
        for i, tensor in enumerate(parameters):
            self.register_buffer(f"p{i}", tensor)

    def forward(self, state: State, x: Tensor) -> State:
        graph, given = self.graph, leaves(state)
        values: dict[Node, Any] = dict(zip(graph.parameters.values(), self.buffers(), strict=True))
        values |= zip(graph.state, given, strict=True)
        values |= zip(graph.x, leaves(x), strict=True)
        compute(graph, [*graph.outputs, *graph.results], values, len(given[0]))
        new = tuple(values[node] for node in graph.outputs)
        return (tuple(values[node] for node in graph.results), new) if graph.results else new
