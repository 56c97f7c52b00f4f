"""Networks as JavaScript that trains itself: the step and the reverse step of each cell, at each size of each task."""

import base64
import json
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loopfold.engines.base import Recurrence, first_step
from loopfold.errors import OptionError
from loopfold.exporting.javascript import JavaScriptWriter
from loopfold.exporting.javascript_parts import FUNCTIONS
from loopfold.exporting.places import places_of
from loopfold.exporting.program import StepProgram
from loopfold.patterns import SequenceToSequence
from loopfold.states import State, all_leaves, asks_for_index, leaves
from loopfold.stepgraph.graph import Refusal
from loopfold.training.cells import blaming, place_in_cell
from loopfold.transitions import Cell, initial_state, own_start

SIZES = (8, 16, 32, 64)  # of the state
KEPT = {"lstm": "f", "gru": "z"}  # the gate that lets the state stay, whose bias can be chosen

Maker = Callable[[int, int], nn.Module]  # (input size, hidden size) -> cell


@dataclass(frozen=True)
class Network:
    """A network as the page has it: its code, and where what in its weights.

    `trained`    ranges of the weights that are parameters; the others stay as they are
    `recurrent`  where the matrices stand that multiply the state: (offset, rows, columns), a block for each gate
    `gate`       where the bias stands of the gate that lets the state stay, and its name
    `weights`    how it starts, where that is not drawn in the page by the rule of our own cells
    """

    create: str
    functions: list[str]
    size: int
    trained: list[tuple[int, int]]
    recurrent: list[tuple[int, int, int]]
    gate: tuple[str, int] | None
    weights: str | None

    def entry(self, create: str) -> str:
        """What the page's script says of it, as an object of JavaScript; `create` makes a model of weights."""
        facts = {key: getattr(self, key) for key in ("size", "trained", "recurrent", "gate", "weights")}
        return f"{{ create: {create}, ...{json.dumps(facts, separators=(',', ':'))} }}"


def script_of(makers: dict[str, Maker], shapes: Iterable[tuple[int, int]]) -> str:
    """The script with every network, `networks["cell/hidden/inputs/outputs"]`.

    Those of our own cells are drawn in the page. Of another, this seed's weights come along.
    """
    codes, entries, functions = list[str](), dict[str, str](), dict[str, None]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, maker in makers.items():
            for inputs, outputs in shapes:
                found = [_network(name, maker(inputs, size), inputs, outputs) for size in SIZES]
                code, numbers = one_code([network.create for network in found])
                for size, network, own in zip(SIZES, found, numbers, strict=True):
                    create = f"codes[{len(codes)}]({', '.join(own)})"
                    entries[f"{name}/{size}/{inputs}/{outputs}"] = network.entry(create)
                    functions |= dict.fromkeys(network.functions)
                codes.append(code)
    return "\n".join(
        [
            *(FUNCTIONS[function] for function in functions),
            "const codes = [",
            *(f"{code}," for code in codes),
            "];",
            "const networks = {",
            *(f"{json.dumps(key)}: {entry}," for key, entry in entries.items()),
            "};",
        ]
    )


_NUMBER = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?(?:e[+-]?\d+)?)")


def one_code(codes: list[str]) -> tuple[str, list[list[str]]]:
    """One function for code that differs in numbers alone: of these numbers; and they, for each of the codes.

    >>> one_code(["f(1, 8, 8)", "f(1, 16, 16)"])
    ('(k0) => f(1, k0, k0)', [['8'], ['16']])
    >>> one_code(["f(1)", "g(1)"])
    ('(k0) => [f(1), g(1)][k0]', [['0'], ['1']])
    """
    parts = [_NUMBER.split(code) for code in codes]  # what stands between numbers, and every second one a number
    if len({tuple(part[::2]) for part in parts}) > 1:
        return f"(k0) => [{', '.join(codes)}][k0]", [[str(i)] for i in range(len(codes))]
    names = dict[tuple[str, ...], str]()
    text = ""
    for k, column in enumerate(zip(*parts, strict=True)):
        same = len({*column}) == 1
        text += column[0] if same or k % 2 == 0 else names.setdefault(column, f"k{len(names)}")
    return f"({', '.join(names.values())}) => {text}", [[column[i] for column in names] for i in range(len(codes))]


def check_step(maker: Maker, failed: str) -> None:
    """That a cell takes a step, or say what is wrong with it: before anything is found out by trying."""
    size = SIZES[0]
    cell, x = maker(1, size), torch.zeros(1, 1)
    own = own_start(cell)
    with blaming(lambda: failed), torch.no_grad():
        try:
            _step(cell, x, torch.zeros(1, size) if own is None else own(1), failed)
        except Exception:
            start = None
            if own is None:  # its state may be another than one row of its size
                with suppress(Exception):
                    start = initial_state(cell, 1, x)
            if start is None:
                raise
            _step(cell, x, start, failed)


def _step(cell: nn.Module, x: Tensor, start: State, failed: str) -> None:
    index = torch.zeros(1, 1, 1) if asks_for_index(cell, 2) else None
    try:
        new = first_step(Recurrence(cell, x[None], 1, start, None, None, index))
    except (TypeError, ValueError) as error:
        if place_in_cell(error) is not None:
            raise
        raise OptionError(f"{failed}: {error}") from error
    other = {leaf.dtype for leaf in all_leaves(new)} - {leaf.dtype for leaf in all_leaves(start)}
    if other:
        wrong = f"its step gives {other.pop()} where its state was {leaves(start)[0].dtype}."
        raise OptionError(f"{failed}: {wrong}")


def _network(name: str, cell: Any, inputs: int, outputs: int) -> Network:
    own, x = isinstance(cell, Cell) and name == getattr(cell, "stock_name", None), torch.zeros(1, inputs)
    try:
        with blaming(lambda: f"{type(cell).__name__} was tried for the page"):
            model = SequenceToSequence(cell, outputs=outputs)
            program = StepProgram.of(model, x, learning=True)
            places = None if own else places_of(model, x)
            if places is not None and places.ties:
                raise Refusal("it uses a parameter in two ways, such as W and W.T, which a page would train apart.")
    except (Refusal, TypeError, ValueError) as reason:
        raise OptionError(f"{type(cell).__name__} cannot be trained in a page: {reason}") from reason
    writer = JavaScriptWriter(program, None, backward=True)
    head, *rest = writer.creator("function (weights)")
    data = None if own else base64.b64encode(program.numbers().numpy().astype("<f4").tobytes()).decode()
    return Network(
        create="\n".join([head, *writer.places(), *rest]),
        functions=writer.functions(),
        size=writer.size,
        trained=[(0, writer.starts[0])] if places is None else places.trained,
        recurrent=_recurrent(program, writer.offsets),
        gate=_gate(name, cell, program, writer.offsets) if own else None,
        weights=data,
    )


def _recurrent(program: StepProgram, offsets: list[int]) -> list[tuple[int, int, int]]:
    """The matrices that multiply a leaf of the state and give one or more rows of its size."""
    products = [v for v in program.forward.order if v.op == "matmul" and v.args[0].op == "state"]
    return [(offsets[v.index[0]], v.args[0].width, v.width) for v in products if v.width % v.args[0].width == 0]


def _gate(name: str, cell: Any, program: StepProgram, offsets: list[int]) -> tuple[str, int] | None:
    if name not in KEPT:
        return None
    i = next(i for i, constant in enumerate(program.constants) if torch.equal(constant, cell.b.detach()))
    return KEPT[name], offsets[i] + cell.gate_names.index(KEPT[name]) * cell.hidden_size
