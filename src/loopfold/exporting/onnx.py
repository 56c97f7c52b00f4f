"""ONNX: a step with its state in and out, or the whole recurrence as a `Scan`, for any batch and any length."""

import json
import math
from collections.abc import Callable
from typing import Any

import torch

from loopfold.exporting.program import Leaf, StepProgram
from loopfold.exporting.stock import Stock, layers
from loopfold.stepgraph.loop import Value
from loopfold.stepgraph.ops import Kind

OPSET, IR = 18, 10

# Operations that ONNX has under a name of its own, with their arguments as they are
_SAME = {
    "add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "power": "Pow", "maximum": "Max", "minimum": "Min",
    "lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual", "eq": "Equal",
    "and": "And", "or": "Or", "not": "Not", "where": "Where", "neg": "Neg", "abs": "Abs", "sign": "Sign",
    "relu": "Relu", "tanh": "Tanh", "sigmoid": "Sigmoid", "exp": "Exp", "log": "Log", "sqrt": "Sqrt",
    "reciprocal": "Reciprocal", "sin": "Sin", "cos": "Cos", "tan": "Tan", "sinh": "Sinh", "cosh": "Cosh",
    "floor": "Floor", "ceil": "Ceil", "round": "Round", "asin": "Asin", "acos": "Acos", "atan": "Atan",
    "asinh": "Asinh", "acosh": "Acosh", "atanh": "Atanh", "erf": "Erf",
    "detach": "Identity",
}  # fmt: skip


class Graph:
    """Nodes of ONNX in order, each with one result; initializers are shared with the graphs inside."""

    def __init__(self, helper: Any, outer: "Graph | None" = None) -> None:
        self.helper = helper
        self.nodes: list[Any] = []
        self.initializers: dict[str, Any] = outer.initializers if outer else {}
        self._count: list[int] = outer._count if outer else [0]

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        return self.several(op, *inputs, results=1, **attributes)[0]

    def several(self, op: str, *inputs: str, results: int, **attributes: Any) -> list[str]:
        """A node of several results."""
        self._count[0] += 1
        name = f"/{op.lower()}_{self._count[0]}"  # as no name of the user's begins
        names = [name] if results == 1 else [f"{name}_{i}" for i in range(results)]
        self.nodes.append(self.helper.make_node(op, list(inputs), names, name=name, **attributes))
        return names

    def tensor(self, value: torch.Tensor) -> str:
        import onnx.numpy_helper

        key = f"/constant_{len(self.initializers)}"
        self.initializers[key] = onnx.numpy_helper.from_array(value.numpy(), key)
        return key

    def number(self, value: float) -> str:
        return self.tensor(torch.tensor(value, dtype=torch.float32))

    def integers(self, *values: int) -> str:
        return self.tensor(torch.tensor(values, dtype=torch.int64))


class Operations:
    """The operations of a step as nodes. A value is `[batch, width]`, or `[width]` where all rows are alike."""

    def __init__(self, graph: Graph, program: StepProgram, states: list[str], inputs: list[str]) -> None:
        self.graph, self.states, self.inputs = graph, states, inputs
        rows = graph.node("Slice", graph.node("Shape", (states or inputs)[0]), *map(graph.integers, (0, 1)))
        self.batch = rows
        self.constants, self.weights = program.constants, dict[int, str]()
        self.names: dict[Value, str] = {}
        self.alike: set[Value] = set()
        for v in program.forward.order:
            if not v.args and v.op in ("number", "constant") or (v.args and v.is_pointwise and {*v.args} <= self.alike):
                self.alike.add(v)
            self.names[v] = self._of(v)

    def whole(self, v: Value) -> str:
        """A value as `[batch, width]`."""
        if v not in self.alike:
            return self.names[v]
        g = self.graph
        return g.node("Expand", self.names[v], g.node("Concat", self.batch, g.integers(v.width), axis=0))

    def _weight(self, i: int) -> str:
        if i not in self.weights:
            self.weights[i] = self.graph.tensor(self.constants[i])
        return self.weights[i]

    def _of(self, v: Value) -> str:
        g = self.graph
        if v.op == "number":
            return g.number(v.index)
        if v.op == "constant":
            return self._weight(v.index)
        if v.op == "input":
            return self.inputs[v.index]
        if v.op == "state":
            return self.states[v.index]
        if v.is_pointwise:
            return self._pointwise(v, [self.names[a] for a in v.args])
        a = v.args[0]
        if v.op == "matmul":
            i, transposed = v.index
            assert not transposed  # which only a way back is
            return g.node("MatMul", self.whole(a), self._weight(i))
        if v.op == "row":
            i, k = v.index
            inside = g.node("Clip", self.whole(a), g.number(0), g.number(k - 1))
            which = g.node("Cast", inside, to=7)
            return g.node("Reshape", g.node("Gather", self._weight(i), which, axis=0), g.integers(-1, v.width))
        if v.op == "slice":
            ends = map(g.integers, (v.index, v.index + v.width, 1))
            return g.node("Slice", self.whole(a), *ends)
        if v.op == "cat":
            return g.node("Concat", *map(self.whole, v.args), axis=1)
        if v.op == "take":
            row = self.whole(a)
            if -1 in v.index:
                zero = g.node("Expand", g.number(0), g.node("Concat", self.batch, g.integers(1), axis=0))
                row = g.node("Concat", row, zero, axis=1)
            return g.node("Gather", row, g.integers(*(a.width if p < 0 else p for p in v.index)), axis=1)
        assert v.kind is Kind.REDUCTION, v.op
        parts = g.node("Reshape", self.whole(a), g.integers(-1, v.width, a.width // v.width))
        reduce = {"sum": "ReduceSum", "prod": "ReduceProd", "amax": "ReduceMax", "amin": "ReduceMin"}[v.op]
        return g.node(reduce, parts, g.integers(2), keepdims=0)

    def _pointwise(self, v: Value, a: list[str]) -> str:
        g = self.graph
        if v.op in _SAME:
            return g.node(_SAME[v.op], *a)
        if v.op == "expand":
            return g.node("Expand", a[0], g.integers(v.width) if v in self.alike else g.integers(1, v.width))
        if v.op in ("bfloat16", "float16"):
            kind = {"bfloat16": 16, "float16": 10}[v.op]  # of ONNX's TensorProto
            return g.node("Cast", g.node("Cast", a[0], to=kind), to=1)
        return _MORE[v.op](g, v, *a)


def _angle(g: Graph, v: Value, a: str, b: str) -> str:
    """atan2: the angle by its tangent, and half a turn where that is on the other side."""
    zero, half = g.number(0), g.number(math.pi)
    turn = g.node("Where", g.node("Less", a, zero), g.node("Neg", half), half)
    plain = g.node("Atan", g.node("Div", a, b))
    level = g.node("Equal", g.node("Abs", a), zero)
    beyond = g.node("Where", g.node("Less", b, zero), g.node("Add", plain, turn), plain)
    both = g.node("And", level, g.node("Equal", b, zero))
    return g.node("Where", both, zero, beyond)


def _near_zero(g: Graph, a: str, u: str, plain: str, grows: bool) -> str:
    """exp(a) - 1 where u = exp(a), or log(1 + a) where u = 1 + a, without what u has lost of a small a (Kahan)."""
    one = g.number(1)
    less = g.node("Sub", u, one)
    ratio = g.node("Div", less, g.node("Log", u)) if grows else g.node("Div", g.node("Log", u), less)
    small = g.node("Where", g.node("Equal", u, one), a, g.node("Mul", a, ratio))
    return g.node("Where", g.node("Less", g.node("Abs", a), g.number(0.5)), small, plain)


# (1 + 2x) exp(x²) erfc(x) from x = 0.5 to 10.6, where erfc leaves float32: a polynomial in (x - 3) / (x + 3), by least
# squares at Chebyshev's points, to 2e-8
_TAIL = [0.00219441695, 0.00201461542, -0.023999597, 0.0684308043, -0.119225243]
_TAIL += [0.129633591, -0.0475654673, -0.135620788, 1.25300809]


def _complement(g: Graph, v: Value, a: str) -> str:
    """erfc: 1 - erf(a), which leaves nothing of a small result; so far from zero exp(-a²) times what changes slowly."""
    x = g.node("Clip", a, g.number(0.5), g.number(11))
    t = g.node("Div", g.node("Sub", x, g.number(3)), g.node("Add", x, g.number(3)))
    slow = g.number(_TAIL[0])
    for number in _TAIL[1:]:
        slow = g.node("Add", g.node("Mul", slow, t), g.number(number))
    slow = g.node("Div", slow, g.node("Add", g.node("Mul", x, g.number(2)), g.number(1)))
    head = g.node("Div", g.node("Floor", g.node("Mul", x, g.number(16))), g.number(16))  # whose square is exact
    rest = g.node("Mul", g.node("Sub", x, head), g.node("Add", x, head))
    bell = g.node("Mul", g.node("Exp", g.node("Neg", g.node("Mul", head, head))), g.node("Exp", g.node("Neg", rest)))
    near = g.node("Sub", g.number(1), g.node("Erf", a))
    return g.node("Where", g.node("Greater", a, g.number(0.5)), g.node("Mul", bell, slow), near)  # NaN stays NaN


def _truncated(g: Graph, v: Value, a: str) -> str:
    return g.node("Mul", g.node("Sign", a), g.node("Floor", g.node("Abs", a)))


def _times(number: float) -> Callable[..., str]:
    return lambda g, v, a: g.node("Mul", g.node("Log", a), g.number(number))


_MORE: dict[str, Callable[..., str]] = {
    "ne": lambda g, v, a, b: g.node("Not", g.node("Equal", a, b)),
    "fmod": lambda g, v, a, b: g.node("Mod", a, b, fmod=1),
    "atan2": _angle,
    "expm1": lambda g, v, a: _near_zero(g, a, g.node("Exp", a), g.node("Sub", g.node("Exp", a), g.number(1)), True),
    "log1p": lambda g, v, a: _near_zero(g, a, u := g.node("Add", a, g.number(1)), g.node("Log", u), False),
    "rsqrt": lambda g, v, a: g.node("Reciprocal", g.node("Sqrt", a)),
    "pow": lambda g, v, a: g.node("Pow", a, g.number(v.index)),
    "exp2": lambda g, v, a: g.node("Pow", g.number(2), a),
    "log2": _times(1 / math.log(2)),
    "log10": _times(1 / math.log(10)),
    "trunc": _truncated,
    "erfc": _complement,
    "surrogate": lambda g, v, a, b, w: g.node("Identity", a),
}


def onnx_model(program: StepProgram, one_step: bool, lengths: bool, known: Stock | None = None) -> Any:
    """A model of ONNX: `one_step`, or a whole sequence; `lengths`: with how long each sequence is as another input.

    `known`: the model is made of cells that ONNX has itself.
    """
    try:
        import onnx
        from onnx import TensorProto, helper
    except ImportError:
        raise ModuleNotFoundError("the package onnx is missing: type pip install 'loopfold[onnx]'.") from None

    main = Graph(helper)
    x, outputs = program.x, program.outputs
    results = ["output"] if len(outputs) == 1 else [f"output{i}" for i in range(len(outputs))]
    given_as, states = _names(program, x, results)
    timed = program.counts or lengths
    time = [] if one_step else ["time"]

    def info(name: str, leaf: Leaf, *before: str) -> Any:
        kind = TensorProto.INT64 if leaf.tokens else TensorProto.FLOAT
        return helper.make_tensor_value_info(name, kind, [*before, *leaf.shape])

    given = [info(name, leaf, *([] if leaf.still else time), "batch") for name, leaf in zip(given_as, x, strict=True)]
    given += [info(name, leaf, "batch") for name, leaf in zip(states, program.state, strict=True)]
    rows = [
        main.node("Reshape", name, main.integers(-1, leaf.size))
        for name, leaf in zip(states, program.state, strict=True)
    ]
    if one_step:
        if program.counts:
            given.append(helper.make_tensor_value_info("t", TensorProto.INT64, []))
        after, out = _step(main, program, rows, given_as, "t")
    elif known is not None:
        ends = ""
        if lengths:
            given.append(helper.make_tensor_value_info("lengths", TensorProto.INT64, ["batch"]))
            ends = main.node("Cast", "lengths", to=TensorProto.INT32)
        after, out = layers(main, known, given_as[0], rows, ends)
        if lengths and known.readout is not None:  # whose bias is not zero after the end
            out = [_until(main, out[0], "lengths", given_as[0])]
    else:
        after, out = _scan(main, program, rows, given_as, timed, lengths, given)
    lead = [0] if one_step else [0, 0]
    for flat, name, leaf in zip(out, results, outputs, strict=True):
        main.nodes.append(helper.make_node("Reshape", [flat, main.integers(*lead, *leaf.shape)], [name]))
    for flat, name, leaf in zip(after, states, program.state, strict=True):
        main.nodes.append(helper.make_node("Reshape", [flat, main.integers(0, *leaf.shape)], [f"{name}_after"]))
    told = [info(name, leaf, *time, "batch") for name, leaf in zip(results, outputs, strict=True)]
    told += [info(f"{name}_after", leaf, "batch") for name, leaf in zip(states, program.state, strict=True)]
    graph = helper.make_graph(main.nodes, program.name, given, told, [*main.initializers.values()])
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR, producer_name="loopfold"
    )
    start = {
        name: values.reshape(leaf.shape).tolist()
        for name, leaf, values in zip(states, program.state, program.start, strict=True)
    }
    helper.set_model_props(model, {"start": json.dumps(start)})  # of one sequence
    onnx.checker.check_model(model, full_check=True)
    return model


def _names(program: StepProgram, x: tuple[Leaf, ...], results: list[str]) -> tuple[list[str], list[str]]:
    """What x and the leaves of the state are called: as in the cell, where no two are called the same."""
    given, states = [leaf.name for leaf in x], [leaf.name for leaf in program.state]
    names = [*given, *states, *(f"{name}_after" for name in states), *results, "lengths", "steps", "t"]
    if len({*names}) == len(names) and all(map(str.isidentifier, names)):
        return given, states
    return [f"x{i}" for i in range(len(given))], [f"state{i}" for i in range(len(states))]


def _steps_of(graph: Graph, x: str) -> str:
    """0, 1, … τ - 1, where x is `[τ, …]`."""
    first = graph.node("Slice", graph.node("Shape", x), graph.integers(0), graph.integers(1))
    steps = graph.node("Squeeze", first, graph.integers(0))
    return graph.node("Range", graph.tensor(torch.tensor(0)), steps, graph.tensor(torch.tensor(1)))


def _until(graph: Graph, sequence: str, lengths: str, x: str) -> str:
    """A sequence `[τ, batch, n]`, zero after its end."""
    alive = graph.node("Less", graph.node("Unsqueeze", _steps_of(graph, x), graph.integers(1)), lengths)
    return graph.node("Where", graph.node("Unsqueeze", alive, graph.integers(2)), sequence, graph.number(0))


def _step(graph: Graph, program: StepProgram, states: list[str], x: list[str], t: str) -> tuple[list[str], list[str]]:
    """One step: the leaves of the new state and the outputs, a row for each sequence."""
    inputs = []
    for leaf, table in program.inputs:
        if table is not None:
            inputs.append(graph.node("Gather", graph.tensor(table), x[leaf], axis=0))
        elif program.is_count(leaf):
            number = graph.node("Reshape", graph.node("Cast", t, to=1), graph.integers(1, 1))
            rows = graph.node("Slice", graph.node("Shape", states[0]), graph.integers(0), graph.integers(1))
            ones = graph.node("Concat", rows, graph.integers(1), axis=0)
            inputs.append(graph.node("Expand", number, ones))
        else:
            inputs.append(graph.node("Reshape", x[leaf], graph.integers(-1, program.x[leaf].size)))
    step = Operations(graph, program, states, inputs)
    after, out = ([step.whole(program.loop.emitted[k]) for k in which] for which in (program.after, program.gives))
    return after, out


def _scan(
    main: Graph,
    program: StepProgram,
    states: list[str],
    x: list[str],
    timed: bool,
    lengths: bool,
    given: list[Any],
) -> tuple[list[str], list[str]]:
    """All steps, as one node."""
    from onnx import TensorProto, helper

    def info(name: str, leaf: Leaf) -> Any:
        kind = TensorProto.INT64 if leaf.tokens else TensorProto.FLOAT
        return helper.make_tensor_value_info(name, kind, ["batch", *leaf.shape])

    body = Graph(helper, main)
    before = [f"/before_{i}" for i in range(len(states))]
    moving = [i for i, leaf in enumerate(program.x) if not leaf.still]
    now = [f"/now_{i}" if i in moving else name for i, name in enumerate(x)]  # the body sees a context from within
    after, out = _step(body, program, before, now, "/t")
    if lengths:
        given.append(helper.make_tensor_value_info("lengths", TensorProto.INT64, ["batch"]))
        alive = body.node("Unsqueeze", body.node("Less", "/t", "lengths"), body.integers(1))
        after = [body.node("Where", alive, new, old) for new, old in zip(after, before, strict=True)]
        out = [body.node("Where", alive, new, body.number(0)) for new in out]
    sequences = [x[i] for i in moving]
    if not moving:
        given.append(helper.make_tensor_value_info("steps", TensorProto.INT64, []))
    if timed or not moving:
        zero, one = main.tensor(torch.tensor(0)), main.tensor(torch.tensor(1))
        sequences.append(_steps_of(main, x[0]) if moving else main.node("Range", zero, "steps", one))
    widths = [leaf.size for leaf in (*program.state, *program.outputs)]
    reads = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", leaf.size])
             for name, leaf in zip(before, program.state, strict=True)]  # fmt: skip
    reads += [info(now[i], program.x[i]) for i in moving]
    reads += [helper.make_tensor_value_info("/t", TensorProto.INT64, [])] if len(sequences) > len(moving) else []
    names = [body.node("Identity", name) for name in (*after, *out)]  # no two outputs may be one
    gives = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width])
             for name, width in zip(names, widths, strict=True)]  # fmt: skip
    inner = helper.make_graph(body.nodes, "step", reads, gives)
    found = [f"/scan_{i}" for i in range(len(names))]
    main.nodes.append(
        helper.make_node("Scan", [*states, *sequences], found, body=inner, num_scan_inputs=len(sequences))
    )
    return found[: len(after)], found[len(after) :]
