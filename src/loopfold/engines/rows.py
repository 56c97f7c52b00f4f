"""Where the rows of a loop lie in memory, and that none is read before it was written."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from loopfold.engines.picking import Picking
from loopfold.engines.plan import Place, Plan
from loopfold.engines.writing import Buffer, Role
from loopfold.stepgraph.graph import Unsound
from loopfold.stepgraph.loop import Value

SCRATCH = Buffer(Role.SCRATCH, 0)  # all rows of a step together


@dataclass(frozen=True)
class Machine:
    """What the generator needs to know of the processor."""

    vector_bytes: int
    registers: int

    def lanes(self, dtype_bytes: int) -> int:
        return self.vector_bytes // dtype_bytes


@dataclass(frozen=True)
class Shape:
    """The sizes that a kernel is compiled for."""

    tile: int  # R, the sequences taken together
    dtype: str  # "float" | "double"
    machine: Machine

    @property
    def lanes(self) -> int:
        return self.machine.lanes(4 if self.dtype == "float" else 8)

    def block(self, columns: int) -> tuple[int, int]:
        """(blocks, vectors in a block) for a product with so many columns; partial sums must fit the registers."""
        vectors = -(-columns // self.lanes)
        most = min(8, max(1, (self.machine.registers - 6) // self.tile))
        size = min(range(1, most + 1), key=lambda v: (-(-vectors // v) * v, -v))  # least waste, then the largest
        return -(-vectors // size), size


def _bits(start: int, width: int) -> int:
    return ((1 << width) - 1) << start


class Rows(Picking):
    """A function under construction that reads and writes rows, at step `t`, of `valid` sequences from `row0` on."""

    steps: Any
    batch: Any
    lengths: Any
    buffers: Any
    row0: Any
    valid: Any
    t: Any
    parity: Any  # of the step: what moves from step to step has two places in turn

    def __init__(self, plan: Plan, shape: Shape) -> None:
        super().__init__(shape.dtype, shape.lanes)
        self.plan, self.source, self.shape = plan, plan.source, shape
        # Which features of each buffer a step has written, one bit each: by the passes before this one, and by this one
        self.written: dict[Buffer, int] = {}
        self.being_written: dict[Buffer, int] = {}
        self.table = self._table()
        self.pointers: dict[Buffer, Any] = {}
        self.carry_at, at = {}, plan.scratch
        for k, v in plan.carried:
            self.carry_at[k] = at
            at += 2 * self._padded(v.width)  # one to read and one to write, changing places at every step
        self.row_size = at

    def _table(self) -> list[Buffer]:
        """Every buffer that the kernel is given, in order."""
        found: dict[Buffer, None] = {}
        for v in self.plan.order():
            if v in self.plan.given:
                found[self.plan.given[v]] = None
            elif v.op == "state":
                found |= {Buffer(Role.START, v.index): None, Buffer(Role.STATES, v.index): None}
            elif v.op == "matmul":
                found[Buffer(Role.MATRIX, *v.index)] = None
            elif v.op == "row":
                found[Buffer(Role.CONSTANT, v.index[0])] = None
            elif v.op in ("input", "incoming", "constant", "context"):
                found[Buffer(Role[v.op.upper()], v.index)] = None
        found |= dict.fromkeys(place.buffer for _, place in self.plan.roots)
        found |= {Buffer(Role.SUM, k): None for k in range(len(self.source.sums))}
        return [*found, SCRATCH]

    # ---- nothing is read before it was written

    def _writes(self, place: Place, width: int) -> None:
        bits = self.being_written.get(place.buffer, 0)
        self.being_written[place.buffer] = bits | _bits(place.start, width)

    def _pass(self, run: Callable[[Any], None], what: Any) -> None:
        run(what)
        for key, bits in self.being_written.items():
            self.written[key] = self.written.get(key, 0) | bits
        self.being_written.clear()

    def _reads(self, v: Value, place: Place) -> None:
        """A pass goes row by row, so of what it writes itself it must read nothing back."""
        if _bits(place.start, v.width) & ~self.written.get(place.buffer, 0):
            raise Unsound(f"a kernel would read {v.op} of {v.width} features before it is written.")

    # ---- addresses

    def _pointer(self, buffer: Buffer) -> Any:
        """The address of a buffer, read once in each function."""
        if buffer not in self.pointers:
            at = self._int(self.table.index(buffer))
            with self.b.goto_entry_block():
                address = self.b.gep(self.buffers, [at], source_etype=ir.PointerType())
                self.pointers[buffer] = self.b.load(address, typ=ir.PointerType())
        return self.pointers[buffer]

    def _is_outside(self, v: Value) -> bool:
        """Whether reading past the end of a row may leave the memory that is ours (or the row)."""
        if self.plan.is_there(v) or v.op == "slice":
            return v.op != "carry"
        return self.plan.places[v].buffer.role is Role.OUT

    def _row(self, r: Any) -> Any:
        """The sequence of row r of the tile; rows beyond the last repeat it."""
        b = self.b
        inside = b.icmp_signed("<", r, self.valid)
        return b.add(self.row0, b.select(inside, r, b.sub(self.valid, self._int(1))))

    def _alive(self, r: Any) -> Any:
        length = self.b.load(self.b.gep(self.lengths, [self._row(r)], source_etype=self.i64), typ=self.i64)
        return self.b.icmp_signed("<", self.t, length)

    def _counts(self, r: Any) -> Any:
        """Whether row r adds to sums over sequences: repeated rows and ended sequences do not. As a vector."""
        b = self.b
        inside = b.icmp_signed("<", r, self.valid)
        if self.source.masked:
            inside = b.and_(inside, self._alive(r))
        kind = ir.VectorType(ir.IntType(1), self.lanes)
        one = b.insert_element(ir.Constant(kind, ir.Undefined), inside, ir.Constant(self.i32, 0))
        zeros = ir.Constant(ir.VectorType(self.i32, self.lanes), [0] * self.lanes)
        return b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros)

    def _row_pointer(self, v: Value, r: Any) -> Any:
        """The start of row r of `v` at this step, in memory."""
        if v in self.plan.given:
            return self._at(Place(self.plan.given[v], v.width), r, self._int(0))
        if v.op == "slice":
            return self._gep(self._row_pointer(v.args[0], r), self._int(v.index))
        if v.op == "constant":
            return self._pointer(Buffer(Role.CONSTANT, v.index))
        if v.op == "context":
            return self._gep(self._pointer(Buffer(Role.CONTEXT, v.index)), self._mul(self._row(r), v.width))
        if v.op == "carry":
            offset = self._add(self._int(self.carry_at[v.index]), self._mul(self.parity, self._padded(v.width)))
            return self._scratch(r, offset, self._int(0))
        if v.op == "state":  # state(0) at the first step, then the sequence of states, one step back
            b, row = self.b, self._row(r)
            before = self._mul(b.add(self._mul(b.sub(self.t, self._int(1)), self.batch), row), v.width)
            first = self._mul(row, v.width)
            at_start = b.icmp_signed("==", self.t, self._int(0))
            start, states = (self._pointer(Buffer(role, v.index)) for role in (Role.START, Role.STATES))
            base = b.select(at_start, start, states)
            return self._gep(base, b.select(at_start, first, before))
        if v.op in ("input", "incoming"):
            at = self._mul(self._add(self._mul(self.t, self.batch), self._row(r)), v.width)
            return self._gep(self._pointer(Buffer(Role[v.op.upper()], v.index)), at)
        self._reads(v, self.plan.places[v])
        return self._at(self.plan.places[v], r, self._int(0))

    def _at(self, place: Place, r: Any, j: Any) -> Any:
        j = self._add(self._int(place.start), j)
        role, index = place.buffer.role, place.buffer.index
        if role is Role.SCRATCH:
            return self._scratch(r, self._int(index), j)
        if role is Role.CARRY:
            other = self.b.sub(self._int(1), self.parity)
            offset = self._add(self._int(self.carry_at[index]), self._mul(other, self._padded(place.width)))
            return self._scratch(r, offset, j)
        at = self._mul(self._add(self._mul(self.t, self.batch), self._row(r)), place.width)
        return self._gep(self._pointer(place.buffer), self._add(at, j))

    def _scratch(self, r: Any, offset: Any, j: Any) -> Any:
        return self._gep(self._pointer(SCRATCH), self._add(self._add(self._mul(r, self.row_size), offset), j))

    @contextmanager
    def _rows(self) -> Iterator[Any]:
        if self.shape.tile == 1:
            yield self._int(0)
        else:
            with self._range(self._int(0), self._int(self.shape.tile), 1) as r:
                yield r
