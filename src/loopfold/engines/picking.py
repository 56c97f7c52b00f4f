"""Vectors of numbers that stand anywhere in a row: neighbours, perhaps with gaps, all the same one, or one by one.

Which numbers a vector holds is known when a kernel is written, but not which vector it is at: that a loop counts. So
where they begin is computed from the count, or looked up in a table.
"""

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from loopfold.engines.vectors import Vectors


@dataclass(frozen=True, eq=False)
class Spot:
    """Which features of a row a vector holds: one of `chunks`, whose number is only known when the kernel runs."""

    chunks: list[list[int]]
    index: Any = None  # which of them
    mask: Any = None  # of the lanes that are there; None: all
    first: Any = None  # the first feature, where they are neighbours in every chunk, one chunk after the other

    def at(self, index: Any, mask: Any) -> "Spot":
        return Spot(self.chunks, index, mask)


def kind_of(chunks: list[list[int]]) -> str:
    """How the numbers of every chunk stand in memory; -1 is a zero, which stands nowhere."""
    if all(chunk == list(range(chunk[0], chunk[0] + len(chunk))) and chunk[0] >= 0 for chunk in chunks):
        return "neighbours"
    if all(set(chunk) == {chunk[0]} and chunk[0] >= 0 for chunk in chunks):
        return "one"
    gaps = all(p in (-1, _base(chunk) + i) for chunk in chunks for i, p in enumerate(chunk))
    return "neighbours with gaps" if gaps else "scattered"


def _base(chunk: list[int]) -> int:
    """Where the first number of a chunk of neighbours stands, or would stand if it were not a zero."""
    return next((p - i for i, p in enumerate(chunk) if p >= 0), 0)


class Picking(Vectors):
    """A function under construction that reads such vectors."""

    def __init__(self, dtype: str, lanes: int) -> None:
        super().__init__(dtype, lanes)
        self.tables: dict[tuple[int, ...], Any] = {}

    def _chunks(self, width: int) -> list[list[int]]:
        """A row, vector by vector; the last may be shorter."""
        return [list(range(j, min(j + self.lanes, width))) for j in range(0, width, self.lanes)]

    def _chunk(self, j: Any) -> Any:
        """Which vector feature j begins."""
        if isinstance(j, ir.Constant):
            return self._int(j.constant // self.lanes)
        return self.b.lshr(j, self._int(self.lanes.bit_length() - 1))

    def _picked(self, row: Any, chunks: list[list[int]], spot: Spot) -> Any:
        """The numbers of a row at the positions of one of `chunks`: neighbours, all one, or one by one."""
        kind, b = kind_of(chunks), self.b
        if kind == "scattered":
            flat = [p for chunk in chunks for p in (chunk + [0] * self.lanes)[: self.lanes]]
            start, out = self._mul(spot.index, self.lanes), ir.Constant(self.vector, ir.Undefined)
            for i in range(self.lanes):
                at = self._looked_up(flat, self._add(start, self._int(i)))
                there = b.icmp_signed(">=", at, self._int(0))
                number = b.load(self._gep(row, b.select(there, at, self._int(0))), typ=self.number)
                number = b.select(there, number, ir.Constant(self.number, 0.0)) if -1 in flat else number
                out = b.insert_element(out, number, ir.Constant(self.i32, i))
            return out
        at = self._gep(row, self._looked_up([_base(chunk) for chunk in chunks], spot.index))
        if kind == "one":
            return self._splat(b.load(at, typ=self.number))
        mask = spot.mask
        if kind == "neighbours with gaps":
            there = [sum(1 << i for i, p in enumerate(chunk) if p >= 0) for chunk in chunks]
            bits = b.trunc(self._looked_up(there, spot.index), ir.IntType(self.lanes))
            mask = b.bitcast(bits, ir.VectorType(ir.IntType(1), self.lanes))
        return self._load(at, mask)

    def _looked_up(self, numbers: list[int], index: Any) -> Any:
        """numbers[index], from a table, unless they go up by equal steps."""
        step = numbers[1] - numbers[0] if len(numbers) > 1 else 0
        if all(n == numbers[0] + i * step for i, n in enumerate(numbers)):
            return self._add(self._int(numbers[0]), self._mul(index, step))
        key = tuple(numbers)
        if key not in self.tables:
            kind = ir.ArrayType(self.i32, len(numbers))
            table = ir.GlobalVariable(self.module, kind, self.module.get_unique_name("positions"))
            table.initializer, table.global_constant, table.linkage = ir.Constant(kind, numbers), True, "internal"
            self.tables[key] = table
        at = self.b.gep(self.tables[key], [index], source_etype=self.i32)
        return self.b.sext(self.b.load(at, typ=self.i32), self.i64)
