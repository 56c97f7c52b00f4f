"""Looped: the compiled step as a lean Python loop over torch's own operations, forwards and backwards."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loopfold.engines.base import Engine, Recurrence
from loopfold.engines.compiled import compiled_refusal, run_compiled
from loopfold.engines.kernel import Call
from loopfold.engines.programs import Program
from loopfold.engines.writing import Buffer, Ran, Role, Source, Writer, Written
from loopfold.states import State
from loopfold.stepgraph.loop import Builder, Value, ordered
from loopfold.stepgraph.moves import Positions
from loopfold.stepgraph.ops import OPS, Kind

MOST_NUMBERS = 1 << 27  # that a run holds: so many are kept for a CUDA graph
MOST_LAUNCHES = 1 << 16  # of a CUDA graph, roughly: what is longer takes too long to capture


@dataclass(frozen=True)
class Looped(Engine):
    """Hoisted, with the library's products and a hand-scheduled backward pass; any device, any floating dtype.

    Inside the loop is only what a step needs of the one before; parameter gradients are one product at the end. On a
    CUDA GPU the loop becomes a CUDA graph where calls of the same sizes come often.
    Agrees with `Sequential` to rounding: sums are taken in another order.
    """

    def refusal(self, recurrence: Recurrence) -> str | None:
        return compiled_refusal(recurrence)

    def run(self, recurrence: Recurrence) -> State:
        return run_compiled(self, _LoopedKernel(), recurrence)

    def code(self, recurrence: Recurrence) -> str:
        return _LoopedKernel().code(recurrence)


@dataclass(frozen=True)
class _LoopedKernel(Writer):
    def gains_by_replay(self, program: Program, steps: int, batch: int) -> bool:
        return steps * program.operations < MOST_LAUNCHES and steps * batch * program.numbers <= MOST_NUMBERS

    def write(self, name: str, source: Source, builder: Builder, dtype: torch.dtype) -> Written:
        function = _Function(source)
        return _Python(source, function.table, f"# {name}\n{function.text}\n", list(function.positions))


class _Python(Written):
    """A function of Python, and the buffers that it is called with."""

    def __init__(self, source: Source, table: list[Buffer], text: str, positions: list[Positions]) -> None:
        self.source, self.table, self.text = source, table, text
        self.positions = {torch.device("cpu"): [torch.tensor(p) for p in positions]}  # on each device that asked
        namespace: dict[str, Any] = {"torch": torch, "inf": math.inf, "nan": math.nan}
        exec(compile(text, "<loopfold looped>", "exec"), namespace)
        self.function: Callable[..., tuple[list[Tensor], list[Tensor], list[Tensor]]] = namespace["run"]

    def run(self, call: Call, buffers: dict[Buffer, Tensor]) -> Ran:
        like = next(iter(buffers.values()))
        device = like.device
        if device not in self.positions:
            self.positions[device] = [p.to(device) for p in self.positions[torch.device("cpu")]]
        lengths = None if call.lengths is None else call.lengths.to(device)
        given = [buffers[b] for b in self.table]
        out, moved, sums = self.function(call.steps, call.batch, lengths, like, self.positions[device], *given)
        if not self.source.backwards:  # autograd gives these away, so none may share its memory with another
            taken = {t.untyped_storage().data_ptr() for t in buffers.values()}
            for i, t in enumerate(out):
                out[i] = t.clone() if t.untyped_storage().data_ptr() in taken else t
                taken.add(out[i].untyped_storage().data_ptr())
        return Ran(out, [row.clone() for row in moved], sums)  # a row may be a part of a sequence

    def code(self, state: Tensor) -> str:
        return self.text


# ------------------------------------------------------------------ one Python function per loop


class _Function:
    """A function in three parts: what needs no moving row (for all steps at once), the loop, and what is left."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.given = source.given_at
        self.row_of = {before: f"row{k}" for k, (before, _) in enumerate(source.moves)}
        self.roots = [after for _, after in source.moves]
        wanted = [*source.out, *source.sums]
        order = ordered([*self.roots, *wanted], stop=self.given)
        moving = self._moving(order)
        inside = moving & {*ordered(self.roots, stop=self.given), *self.row_of}
        self.loop = [v for v in order if v in inside]
        self.before = [v for v in order if v not in moving and v.op != "number"]
        self.after = [v for v in order if v in moving and v not in inside]
        read_later = {*wanted, *(a for v in self.after for a in v.args)}
        self.stored = [v for v in self.loop if v in read_later]
        self.table: list[Buffer] = []
        self.numbers: dict[str, str] = {}  # numbers as tensors, where torch takes no plain ones
        self.transposed: set[int] = set()
        self.positions: dict[Positions, int] = {}  # what `take` reads, numbered
        self.names = {v: self._leaf(v) or f"v{i}" for i, v in enumerate(order)}
        self.text = "\n".join(self._lines())

    def _moving(self, order: list[Value]) -> set[Value]:
        found: set[Value] = set()
        for v in order:
            if v in self.row_of or (v not in self.given and any(a in found for a in v.args)):
                found.add(v)
        return found

    # ---- names

    def _leaf(self, v: Value) -> str | None:
        """The name of what comes from a buffer or moves from step to step."""
        if v in self.given:
            return self._buffer(Role.GIVEN, self.given[v])
        if v in self.row_of:
            return self.row_of[v]
        if v.op == "constant":
            return self._buffer(Role.CONSTANT, v.index)
        if v.op in ("input", "incoming", "context"):
            return self._buffer(Role[v.op.upper()], v.index)
        return f"before{v.index}" if v.op == "state" else None

    def _buffer(self, role: Role, index: int) -> str:
        if Buffer(role, index) not in self.table:
            self.table.append(Buffer(role, index))
        return f"{role.name.lower()}{index}"

    def _number(self, value: float) -> str:
        return self.numbers.setdefault(repr(value), f"n{len(self.numbers)}")  # -0.0 is not 0.0

    # ---- the text

    def _lines(self) -> list[str]:
        names, stored, masked = self.names, self.stored, self.source.masked
        read = {*self.roots, *(a for v in self.loop for a in v.args)}
        by_step = [v for v in self.before if v in read and v.op not in ("constant", "context")]  # not always the same
        contexts = [v for v in self.before if v.op == "context"]
        outside = {**names, **{v: f"{names[v]}_all" for v in contexts}}
        rows = [f"row{k}" for k in range(len(self.roots))]

        first = [f"{outside[v]} = {names[v]}.expand(T, B, {v.width})" for v in contexts]
        for v in self.before:
            if v.op == "state" and v not in self.given:
                start, states = self._buffer(Role.START, v.index), self._buffer(Role.STATES, v.index)
                first.append(f"{names[v]} = torch.cat([{start}[None], {states}[:-1]])")
            elif not v.is_leaf and v not in self.given:
                first.append(f"{names[v]} = {self._expression(v, outside, '(T, B)')}")
        first += [f"{names[v]}_s = {names[v]}.expand(T, B, {v.width}).unbind(0)" for v in by_step]
        for v in stored:
            dtype = ", dtype=torch.bool" if v.is_bool else ""
            first += [
                f"{names[v]}_b = like.new_empty(T, B, {v.width}{dtype})",
                f"{names[v]}_o = {names[v]}_b.unbind(0)",
            ]
        for row, (before, after) in zip(rows, self.source.moves, strict=True):
            start = self._buffer(Role.START, before.index) if before.op == "state" else ""
            first.append(f"{row} = {start or f'like.new_zeros(B, {after.width})'}")
        if masked:
            first += ["mask = torch.arange(T, device=like.device)[:, None, None] < lengths[:, None]"]
            first += ["alive, zero = mask.unbind(0), like.new_zeros(())"]

        now = {**names, **{v: f"{names[v]}_t" for v in by_step}}
        step = [f"{now[v]} = {names[v]}_s[t]" for v in by_step]
        # the way back computes again from a product that it keeps, so what is added to it here must be the same bits
        fused = {v: product for v, product in _fused_products(self.loop).items() if product not in stored}
        for v in self.loop:
            target = f"{names[v]}_o[t]" if v in stored and not masked else None
            if v in self.row_of:
                step += [f"{target}.copy_({names[v]})"] if target else []
            elif v not in fused.values():
                step.append(f"{names[v]} = {self._expression(v, now, '(B,)', target, fused.get(v))}")
        for v in stored if masked else ():
            kept = f"logical_and(alive[t], {names[v]}" if v.is_bool else f"where(alive[t], {names[v]}, zero"
            step.append(f"torch.{kept}, out={names[v]}_o[t])")
        moved = [self._row(v, now) for v in self.roots]
        if masked:
            moved = [f"torch.where(alive[t], {value}, {row})" for row, value in zip(rows, moved, strict=True)]
        step.append(f"{', '.join(rows)} = {', '.join(moved)}")

        whole = {**outside, **{v: f"{names[v]}_b" for v in stored}}
        last = [f"{names[v]} = {self._expression(v, whole, '(T, B)')}" for v in self.after]
        out = [self._sequence(v, whole) for v in self.source.out]
        sums = [f"{self._sequence(v, whole)}.sum((0, 1))" for v in self.source.sums]
        last.append(f"return [{', '.join(out)}], [{', '.join(rows)}], [{', '.join(sums)}]")

        once = [f"{name} = like.new_full((), {value})" for value, name in self.numbers.items()]
        once += [f"constant{i}_T = constant{i}.T" for i in sorted(self.transposed)]
        parameters = [
            "T",
            "B",
            "lengths",
            "like",
            "positions",
            *(f"{b.role.name.lower()}{b.index}" for b in self.table),
        ]
        time = "range(T - 1, -1, -1)" if self.source.backwards else "range(T)"
        return [
            f"def run({', '.join(parameters)}):",
            *(f"    {line}" for line in (*once, *first)),
            f"    for t in {time}:",
            *(f"        {line}" for line in step),
            *(f"    {line}" for line in last),
        ]

    def _row(self, v: Value, names: dict[Value, str]) -> str:
        """A value as a row for the next step."""
        if v.op == "number":
            return f"like.new_full((B, 1), {v.index!r})"
        return f"{names[v]}.expand(B, {v.width})" if v.op == "constant" else names[v]

    def _sequence(self, v: Value, names: dict[Value, str]) -> str:
        """A value at all steps; zero after a sequence's end."""
        if v in self.stored:
            return names[v]
        whole = f"{names[v]}.expand(T, B, {v.width})" if v.op != "number" else f"like.new_full((T, B, 1), {v.index!r})"
        return f"torch.where(mask, {whole}, 0)" if self.source.masked else whole

    def _expression(
        self,
        v: Value,
        names: dict[Value, str],
        lead: str,
        target: str | None = None,
        product: Value | None = None,
    ) -> str:
        """The value as torch computes it; with `target` it is also written there."""
        into = f", out={target}" if target else ""
        if product is not None:
            other = next(a for a in v.args if a is not product)
            return f"torch.addmm({names[other]}, {names[product.args[0]]}, {self._matrix(product)}{into})"
        if v.op == "matmul":
            return f"torch.matmul({names[v.args[0]]}, {self._matrix(v)}{into})"
        if v.op == "row":
            at = f"{names[v.args[0]]}.nan_to_num().long()"  # which of NaN is no row
            rows = f"torch.nn.functional.embedding({at}, {self._matrix(v)}).flatten(-2)"
            return f"{target}.copy_({rows})" if target else rows
        if v.op == "cat":
            parts = [f"like.new_full((*{lead}, 1), {a.index!r})" if a.op == "number" else names[a] for a in v.args]
            parts = [
                f"{p}.expand(*{lead}, {a.width})" if a.op == "constant" else p
                for p, a in zip(parts, v.args, strict=True)
            ]
            return f"torch.cat([{', '.join(parts)}], -1{into})"
        if v.op == "take":
            return self._taken(v, names[v.args[0]], into)
        if v.kind is Kind.REDUCTION and v.width == 1:
            return f"torch.{v.op}({names[v.args[0]]}, -1, keepdim=True{into})"
        python, tensors = OPS[v.op].python, [a for a in v.args if a.op != "number"]
        function = python.startswith("torch.")
        plain = tensors and not function  # an operator of Python takes plain numbers beside tensors
        args = [names[a] if a in tensors else repr(a.index) if plain else self._number(a.index) for a in v.args]
        if target and not function and len(tensors) == len(args) == 2 and hasattr(torch, v.op):
            return f"torch.{v.op}({', '.join(args)}{into})"  # the same as a function
        text = python.format(*args, index=repr(v.index), width=v.width, lead=lead)
        if target and function:
            return f"{text[:-1]}{into})"
        return f"{target}.copy_({text})" if target else text

    def _taken(self, v: Value, row: str, into: str) -> str:
        """Numbers of a row that stand elsewhere; a zero stands at its end, where one is needed."""
        width = v.args[0].width
        if -1 in v.index:
            row = f"torch.nn.functional.pad({row}, (0, 1))"
        positions = tuple(p if p >= 0 else width for p in v.index)
        number = self.positions.setdefault(positions, len(self.positions))
        return f"torch.index_select({row}, -1, positions[{number}]{into})"

    def _matrix(self, product: Value) -> str:
        i, transposed = product.index[0], product.op == "matmul" and product.index[1]
        name = self._buffer(Role.CONSTANT, i)
        if transposed:
            self.transposed.add(i)
        return f"{name}_T" if transposed else name


def _fused_products(loop: list[Value]) -> dict[Value, Value]:
    """{sum: product} where a product is only added to something: one addmm."""
    inside = set(loop)
    uses: dict[Value, int] = {}
    for v in loop:
        for a in v.args:
            uses[a] = uses.get(a, 0) + 1
    fused = {}
    for v in loop:
        if v.op == "add":
            for a in v.args:
                other = v.args[1] if a is v.args[0] else v.args[0]
                alone = a in inside and uses[a] == 1 and other is not a
                if a.op == "matmul" and alone and other.width == a.width and other.op != "number":
                    fused[v] = a
                    break
    return fused
