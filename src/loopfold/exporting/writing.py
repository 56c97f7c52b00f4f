"""A step in a language like C, line by line: what its printers share."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch

from loopfold.exporting.program import Leaf, Schedule, StepProgram
from loopfold.exporting.texts import Texts
from loopfold.stepgraph.loop import Value
from loopfold.stepgraph.ops import OPS, Kind

# Words that no variable may be called, in C, its headers, C++ or JavaScript
_WORDS = """
auto break case char const continue default do double else enum extern float for goto if inline int long register
restrict return short signed sizeof static struct switch typedef union unsigned void volatile while
I complex imaginary NULL NAN INFINITY HUGE_VAL weights count last
and asm bool catch class delete explicit export false friend mutable namespace new not operator or private protected
public template this throw true try typename using virtual xor await function import in let null var with yield
"""
_RESERVED = frozenset(_WORDS.split())


def is_name(text: str) -> bool:
    """Whether a program in C or JavaScript can call something so."""
    return re.fullmatch(r"[A-Za-z]\w*", text, re.ASCII) is not None and text not in _RESERVED


def field_names(state: Iterable[Leaf]) -> list[str]:
    """The user's own names of the leaves of a state, where a program can have them."""
    names = [leaf.name for leaf in state]
    plain = all(map(is_name, names)) and len({*names}) == len(names)
    return names if plain else [f"state{i}" for i in range(len(names))]


class Writer(ABC):
    """Writes a step: `v1`, `v2`, … are rows, and `s1`, `s2`, … one feature of each, in a loop over features.

    `names`  what the leaves of x are called
    `body`   the lines from the state and x to all that the step gives
    `gives`  the rows that are its outputs, and `moves` those that become leaf i of the state, where it changes
    """

    def __init__(self, program: StepProgram, texts: Texts | None) -> None:
        self.program, self.texts = program, texts
        self.number: dict[Value, int] = {}
        self.offsets: list[int] = []  # of each of the program's weights in one array
        self.size = 0
        for tensor in program.weights():
            self.offsets.append(self.size)
            self.size += tensor.numel()
        self.lines: list[str] = []
        self.stored = set[Value]()
        self._numbers: set[str] = set()
        self.indices: list[tuple[str, tuple[int, ...]]] = []  # what is put elsewhere, and where it stood
        kinds = ["token" if leaf.tokens else "x" for leaf in program.x if not leaf.still]
        self.names = kinds if len(kinds) < 2 else [f"{kind}{i}" for i, kind in enumerate(kinds)]
        self.names += [leaf.name for leaf in program.x if leaf.still]
        self.fields = field_names(program.state)
        self.body = self._written(self.forward())
        rows = [self._given(f"given{k}", value) for k, value in enumerate(program.loop.emitted)]
        self.gives = [rows[k] for k in program.gives]
        self.moves = {i: rows[k] for i, k in enumerate(program.after) if not self._stays(i, program.loop.emitted[k])}

    def forward(self) -> Schedule:
        """What the step computes."""
        return self.program.forward

    def _given(self, name: str, v: Value) -> str:
        """The row of what a step gives; where it is part of what is written over by the next, a copy."""
        row = self.row(v)
        if self.root(v).op not in ("state", "input", "carry", "incoming"):
            return row
        self.declare(name, v.width)
        self.copy(row, v.width, name, 0)
        return name

    def root(self, v: Value) -> Value:
        """The row of which a value is a part."""
        while v.op == "slice":
            v = v.args[0]
        return v

    def _stays(self, leaf: int, v: Value) -> bool:
        return v.op == "state" and v.index == leaf

    @property
    def starts(self) -> list[int]:
        """Where each leaf of the first state stands among the weights."""
        return self.offsets[len(self.offsets) - len(self.program.start) :]

    def table_at(self, i: int) -> int:
        """Where the table of input i stands among the weights."""
        tables = [j for j, (_, table) in enumerate(self.program.inputs) if table is not None]
        return self.offsets[len(self.program.constants) + tables.index(i)]

    def _written(self, schedule: Schedule) -> list[str]:
        """The lines that compute what a schedule says; what is written later goes to the end of them."""
        self.lines, self.stored = [], schedule.stored
        for v in schedule.order:
            self.number.setdefault(v, len(self.number))
        for phase in schedule.phases:
            for v in phase.rows:
                self._whole_row(v)
            for width, values in phase.loops.items():
                self._loop(width, values)
        return self.lines

    # ---- what is not a loop over features

    def _whole_row(self, v: Value) -> None:
        a, name = v.args[0], f"v{self.number[v]}"
        if v.op == "slice":
            self.alias(name, self.row(a), v.index)
            return
        self.declare(name, v.width)
        if v.op == "matmul":
            i, transposed = v.index
            sizes = (v.width, a.width) if transposed else (a.width, v.width)  # of the matrix
            function = "product_back" if transposed else "product"
            self.call(function, self.row(a), self.weight(self.offsets[i]), *map(str, sizes), name)
        elif v.op == "row":
            i, k = v.index
            each = v.width // a.width
            self.call("rows", self.row(a), str(a.width), self.weight(self.offsets[i]), str(k), str(each), name)
        elif v.op == "take":
            self.indices.append((f"i{self.number[v]}", v.index))
            self.call("take", self.row(a), f"i{self.number[v]}", str(v.width), name)
        elif v.op == "cat":
            at = 0
            for part in v.args:
                self.copy(self.row(part), part.width, name, at)
                at += part.width
        else:
            self._reduction(v, a, name)

    def _reduction(self, v: Value, a: Value, name: str) -> None:
        op, each = OPS[v.op], a.width // v.width
        assert v.kind is Kind.REDUCTION, v.op
        assert op.start is not None
        self.lines += [self.loop_of("i", v.width), f"{self.variable} s = {self.literal(op.start)};"]
        self.lines += [
            self.loop_of("j", each),
            f"s = {op.c.format('s', f'{self.row(a)}[i * {each} + j]')};",
            "}",
            f"{name}[i] = s;",
            "}",
        ]

    # ---- loops over features

    def _loop(self, width: int, values: list[Value]) -> None:
        for v in values:
            if v in self.stored:
                self.declare(f"v{self.number[v]}", width)
        self.lines.append(self.loop_of("i", width))
        here = set(values)
        for v in values:
            name = f"s{self.number[v]}"
            arguments = [self._feature(a, here) for a in v.args]
            index = self.literal(v.index) if isinstance(v.index, int | float) else ""
            what = self.expression(v.op).format(*arguments, index=index)
            self.lines.append(f"{self.truth if v.is_bool else self.constant} {name} = {self.rounded(v, what)};")
            if v in self.stored:
                self.lines.append(f"v{self.number[v]}[i] = {name};")
        self.lines.append("}")

    def _feature(self, v: Value, here: set[Value]) -> str:
        if v.op == "number":
            return f"({self.literal(v.index)})" if v.index < 0 else self.literal(v.index)
        if v in here:
            return f"s{self.number[v]}"
        return f"{self.row(v)}[{'0' if v.width == 1 else 'i'}]"

    def row(self, v: Value) -> str:
        """A whole row, by name."""
        if v.op == "number":  # which a product, or something like it, reads as a row of one
            name = f"v{self.number[v]}"
            if name not in self._numbers:
                self._numbers.add(name)
                self.declare(name, 1)
                self.lines.append(f"{name}[0] = {self.literal(v.index)};")
            return name
        if v.op == "constant":
            return self.constant_row(v.index, v.width)
        if v.op in ("input", "state", "carry", "incoming"):
            return f"{v.op}{v.index}"
        assert v.op != "context"
        return f"v{self.number[v]}"

    # ---- what the languages say differently

    variable: str
    constant: str
    truth: str

    def expression(self, op: str) -> str:
        return OPS[op].c

    def rounded(self, v: Value, what: str) -> str:
        """An expression, as a number of 32 bits."""
        return what

    @abstractmethod
    def literal(self, number: float) -> str: ...

    @abstractmethod
    def loop_of(self, index: str, count: int) -> str: ...

    @abstractmethod
    def declare(self, name: str, width: int) -> None: ...

    @abstractmethod
    def alias(self, name: str, row: str, start: int) -> None: ...

    @abstractmethod
    def copy(self, row: str, width: int, into: str, at: int) -> None: ...

    @abstractmethod
    def weight(self, offset: int) -> str: ...

    @abstractmethod
    def constant_row(self, index: int, width: int) -> str: ...

    def call(self, function: str, *arguments: str) -> None:
        self.lines.append(f"loopfold_{function}({', '.join(arguments)});")


def single(number: float) -> float:
    """A number as 32 bits have it."""
    return torch.tensor(number, dtype=torch.float32).item()


def indented(lines: Iterable[str], by: str) -> str:
    """Lines as a text, those between braces further in; what has several lines, or is data, as it stands."""
    depth, out = 0, []
    for line in lines:
        if "\n" in line or len(line) > 1000:
            out.append(line)
            continue
        depth -= line.startswith("}")
        out.append(by * depth + line if line else "")
        depth += line.endswith("{")
    return "\n".join(out) + "\n"
