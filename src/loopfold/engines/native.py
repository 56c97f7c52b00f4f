"""Native code for a loop: from rows and operations to one function of machine code, by way of LLVM.

Rows are taken in tiles: R sequences at a time share every load of a matrix, and their partial sums stay in registers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir

from loopfold.engines.picking import Spot, kind_of
from loopfold.engines.plan import Place, Plan
from loopfold.engines.rows import Shape
from loopfold.engines.turned import Turned
from loopfold.engines.vectors import LLVM
from loopfold.engines.writing import Buffer, Role, Source
from loopfold.stepgraph.loop import Value
from loopfold.stepgraph.ops import OPS

LONG = 24  # passes: a longer step is cut into functions of so many
OPENMP = ("omp_get_thread_num", "omp_get_num_threads")  # what a kernel asks of the library that runs its threads


@dataclass(frozen=True, eq=False)
class Code:
    """A kernel as LLVM code: `void kernel(steps, batch, first row, last row + 1, lengths*, buffers**)`."""

    code: str
    table: list[Buffer]  # what it is given, in order
    scratch: int  # elements of the scratch buffer of one thread


def write(source: Source, shape: Shape) -> Code:
    """Write the kernel that computes `source`."""
    writer = _Writer(Plan(source, shape.lanes), shape)
    return Code(str(writer.module), writer.table, writer.row_size * shape.tile)


class _Writer(Turned):
    def __init__(self, plan: Plan, shape: Shape) -> None:
        super().__init__(plan, shape)
        self._body()
        if plan.source.single:
            self._one()
        else:
            self._team()

    # ---- the whole function

    def _body(self) -> None:
        b, source = self.b, self.source
        self.steps, self.batch, first, last, self.lengths, self.buffers = self.function.args
        with self._range(first, last, self.shape.tile) as row0:
            self.row0 = row0
            left = b.sub(last, row0)
            self.valid = b.select(
                b.icmp_signed("<", left, self._int(self.shape.tile)), left, self._int(self.shape.tile)
            )
            self._start_carries()
            with self._range(self._int(0), self.steps, 1) as i:
                self.t = b.sub(b.sub(self.steps, self._int(1)), i) if source.backwards else i
                self.parity = b.and_(i, self._int(1))
                self._step()
            self._finish_carries()
        b.ret_void()

    def _step(self) -> None:
        """All passes of a step. LLVM's time grows with the square of a function's length, so a long one is cut up."""
        passes = self._passes()
        if len(passes) <= LONG:
            for run in passes:
                run()
        else:
            for start in range(0, len(passes), LONG):
                self._part(passes[start : start + LONG])

    def _passes(self) -> list[Callable[[], None]]:
        """What one step does, in order."""
        found: list[Callable[[], None]] = []
        groups = sorted({*self.plan.stores, *self.plan.adds})
        for stage in sorted({*self.plan.products, *(group[0] for group in groups)}):
            products = self.plan.products.get(stage, ())
            kinds = {"matmul": self._product, "row": self._lookup}
            found += [partial(self._pass, kinds.get(v.op, self._reduction), v) for v in products]
            found += [partial(self._pass, self._pointwise, group) for group in groups if group[0] == stage]
        if self.source.masked:
            places = {place.buffer: place for _, place in self.plan.roots}
            found += [partial(self._clear_ended, place) for place in places.values()]
        return found

    def _part(self, passes: list[Callable[[], None]]) -> None:
        """Some of the passes as a function of their own."""
        given = [self.steps, self.batch, self.row0, self.valid, self.t, self.parity, self.lengths, self.buffers]
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in given])
        part = ir.Function(self.module, kind, self.module.get_unique_name("part"))
        part.linkage = "internal"
        part.attributes.add("noinline")
        self.b.call(part, given)
        outside = self.function, self.b, self.pointers
        self.function, self.b, self.pointers = part, ir.IRBuilder(part.append_basic_block("entry")), {}
        body = part.append_basic_block()  # the first block is for addresses
        self.b.branch(body)
        self.b.position_at_end(body)
        (self.steps, self.batch, self.row0, self.valid, self.t, self.parity, self.lengths, self.buffers) = part.args
        for run in passes:
            run()
        self.b.ret_void()
        self.function, self.b, self.pointers = outside
        (self.steps, self.batch, self.row0, self.valid, self.t, self.parity, self.lengths, self.buffers) = given

    def _team(self) -> None:
        """`team(jobs*)`: what every thread of an OpenMP team runs: thread i of n takes jobs i, i + n, i + 2n, …

        Before the first job stands their number; a job is what `kernel` is called with, as six words.
        """
        pointer, word = ir.PointerType(), self.i64
        team = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [pointer]), "team")
        b = ir.IRBuilder(team.append_basic_block("entry"))
        (jobs,) = team.args

        def at(index: Any, kind: Any) -> Any:
            return b.load(b.gep(jobs, [index], source_etype=word), typ=kind)

        mine, threads = (b.sext(b.call(self._declare(name, self.i32, 0), []), word) for name in OPENMP)
        count = at(self._int(0), word)
        head, body, done = (team.append_basic_block(name) for name in ("head", "body", "done"))
        entry = b.block
        b.branch(head)
        b.position_at_end(head)
        job = b.phi(word)
        job.add_incoming(mine, entry)
        b.cbranch(b.icmp_signed("<", job, count), body, done)
        b.position_at_end(body)
        first = b.add(self._int(1), b.mul(job, self._int(6)))
        words = [at(b.add(first, self._int(i)), word if i < 4 else pointer) for i in range(6)]
        b.call(self.function, words)
        job.add_incoming(b.add(job, threads), body)
        b.branch(head)
        b.position_at_end(done)
        b.ret_void()

    def _one(self) -> None:
        """`team(job*)`, for a step by itself. Returns in which of two places, 0 or 1, the state was before it.

        Or 2, where `left` is 0, so that someone should look first, and 3, where what the step reads holds NaN: then
        nothing is done.

        The job is five words: the place, `left`, the batch, and the buffers for a step from either place, which change
        places after it. One call with one argument takes the least time in Python.
        """
        pointer, word = ir.PointerType(), self.i64
        team = ir.Function(self.module, ir.FunctionType(word, [pointer]), "team")
        (job,) = team.args
        outside = self.function, self.b
        self.function, self.b = team, ir.IRBuilder(team.append_basic_block("entry"))
        b = self.b
        at = [b.gep(job, [self._int(i)], source_etype=word) for i in range(5)]
        place, left, batch = (b.load(address, typ=word) for address in at[:3])
        with b.if_then(b.icmp_signed("<=", left, self._int(0))):
            b.ret(self._int(2))
        first, second = (b.load(address, typ=pointer) for address in at[3:])
        buffers = b.select(b.icmp_signed("==", place, self._int(0)), first, second)
        found: Any = ir.Constant(ir.IntType(1), 0)
        widths = {v.index: v.width for v in self.plan.order() if v.op == "input"}
        for i, width in widths.items():
            index = self._int(self.table.index(Buffer(Role.INPUT, i)))
            row = b.load(b.gep(buffers, [index], source_etype=pointer), typ=pointer)
            before = b.block
            with self._range(self._int(0), b.mul(batch, self._int(width)), 1) as j:
                seen = b.phi(ir.IntType(1))
                number = b.load(self._gep(row, j), typ=self.number)
                now = b.or_(seen, b.fcmp_unordered("uno", number, number))
                seen.add_incoming(found, before)
                seen.add_incoming(now, b.block)
            found = now
        with b.if_then(found):
            b.ret(self._int(3))
        nothing = ir.Constant(pointer, None)
        b.call(outside[0], [self._int(1), batch, self._int(0), batch, nothing, buffers])
        b.store(b.sub(self._int(1), place), at[0])
        b.store(b.sub(left, self._int(1)), at[1])
        b.ret(place)
        self.function, self.b = outside

    # ---- carried rows

    def _start_carries(self) -> None:
        """The rows carried into the first step: those of the buffers, which then receive the last ones."""
        for k, v in self.plan.carried:
            with self._rows() as r, self._features(v.width) as (j, mask):
                at = self._add(self._mul(self._row(r), v.width), j)
                from_ = self._gep(self._pointer(Buffer(Role.CARRY, k)), at)
                to = self._scratch(r, self._int(self.carry_at[k]), j)
                self._save(self._load(from_, mask), to, None)

    def _finish_carries(self) -> None:
        at_end = self.b.and_(self.steps, self._int(1))
        for k, v in self.plan.carried:
            with self._rows() as r, self._features(v.width) as (j, mask):
                offset = self._add(self._int(self.carry_at[k]), self._mul(at_end, self._padded(v.width)))
                value = self._load(self._scratch(r, offset, j), None)
                at = self._add(self._mul(self._row(r), v.width), j)
                self._save(value, self._gep(self._pointer(Buffer(Role.CARRY, k)), at), mask)

    def _clear_ended(self, place: Place) -> None:
        """After a sequence's end nothing counts: what was stored for it at this step becomes zero."""
        whole = Place(place.buffer, place.width)
        with self._rows() as r, self.b.if_then(self.b.not_(self._alive(r))), self._features(place.width) as (j, mask):
            self._save(self._splat(0.0), self._at(whole, r, j), mask if place.buffer.role is Role.OUT else None)

    # ---- products and reductions

    def _product(self, v: Value) -> None:
        """y[r, :] = Σ_k row[r, k] · M[k, :] for the R rows of the tile, one block of columns at a time."""
        pitch = self.source.pitches[v.index[0]] if self.source.pitches else 0
        if pitch < 0:
            self._turned_product(v, -pitch)
            return
        b, left, tile = self.b, v.args[0], self.shape.tile
        depth, home = left.width, self.plan.home(v)
        blocks, vectors = self.shape.block(v.width)
        chains = 1 if tile * vectors >= 8 else 2  # independent sums, so that additions need not wait for each other
        chains = 4 if tile * vectors <= 2 else chains
        rows = [self._row_pointer(left, self._int(r)) for r in range(tile)]
        matrix = self._pointer(Buffer(Role.MATRIX, *v.index))
        width = vectors * self.lanes
        # A matrix somewhat larger than the first-level cache, or the second, would be fetched again at every step. Read
        # back to front at every second one, it finds there what was read last. Tiles of many rows gain nothing by it.
        size = depth * blocks * width * self._align() >> 10
        turns = tile <= 2 and (24 <= size <= 96 or 768 <= size <= 3072)

        def block(start: ir.Value, index: ir.Value, masks: list[Any]) -> None:
            base = self._gep(matrix, start if pitch else self._mul(index, depth * width))
            parts = masks if pitch else [None] * vectors  # what is packed has full rows
            zero = [[[self._splat(0.0)] * vectors for _ in range(tile)] for _ in range(chains)]
            main = depth // chains
            with self._accumulate(main, zero) as (k, sums):
                k = self._there_and_back(k, main) if turns else k
                for c in range(chains):
                    at = self._add(self._mul(k, chains), self._int(c))
                    self._multiply_add(sums[c], rows, base, at, pitch or width, parts)
            sums = self._accumulated
            for c, k_left in enumerate(range(main * chains, depth)):
                self._multiply_add(sums[c], rows, base, self._int(k_left), pitch or width, parts)
            for r in range(tile):
                for i in range(vectors):
                    value = sums[0][r][i]
                    for c in range(1, chains):
                        value = b.fadd(value, sums[c][r][i])
                    if masks[i] is not False:
                        j = self._add(start, self._int(i * self.lanes))
                        self._save(value, self._at(home, self._int(r), j), masks[i])

        self._writes(home, v.width)
        padded = home.buffer.role is not Role.OUT and not pitch
        full = blocks if padded and blocks * width == self._padded(v.width) else v.width // width
        if full > 1:
            with self._range(self._int(0), self._int(full), 1) as index:
                index = self._there_and_back(index, full) if turns else index
                block(self._mul(index, width), index, [None] * vectors)
        else:
            for index in range(full):
                block(self._int(index * width), self._int(index), [None] * vectors)
        for index in range(full, blocks):
            masks = [self._mask(v.width - index * width - i * self.lanes, padded) for i in range(vectors)]
            block(self._int(index * width), self._int(index), masks)

    def _there_and_back(self, i: Any, count: int) -> Any:
        """i, or count - 1 - i at every second step."""
        forwards = self.b.sub(self._int(1), self.b.mul(self.parity, self._int(2)))
        return self.b.add(self.b.mul(self.parity, self._int(count - 1)), self.b.mul(i, forwards))

    def _multiply_add(
        self, sums: list[list[Any]], rows: list[Any], base: Any, k: Any, pitch: int, masks: list[Any]
    ) -> None:
        line = [self._splat(0.0) if mask is False
                else self._load(self._gep(base, self._add(self._mul(k, pitch), self._int(i * self.lanes))), mask)
                for i, mask in enumerate(masks)]  # fmt: skip
        for r, row in enumerate(rows):
            number = self._splat(self.b.load(self._gep(row, k), typ=self.number))
            sums[r] = [self._call("fma", number, line[i], sums[r][i]) for i in range(len(line))]

    def _mask(self, count: int, padded: bool) -> Any:
        """Which lanes of a vector are there: None for all, False for none."""
        if count >= self.lanes or (padded and count > 0):
            return None
        return False if count <= 0 else self._first(count)

    def _lookup(self, v: Value) -> None:
        """For each number of a row, the row of the table that it says; what is not there is not read."""
        b, (index, k), count = self.b, v.index, v.args[0].width
        width, home = v.width // count, self.plan.home(v)
        table = self._pointer(Buffer(Role.CONSTANT, index))
        with self._rows() as r:
            which = self._row_pointer(v.args[0], r)
            with self._range(self._int(0), self._int(count), 1) as i:
                number, last = b.load(self._gep(which, i), typ=self.number), ir.Constant(self.number, float(k - 1))
                number = b.select(
                    b.fcmp_ordered(">", number, ir.Constant(self.number, 0.0)), number, ir.Constant(self.number, 0.0)
                )
                number = b.select(b.fcmp_ordered("<", number, last), number, last)
                row = self._gep(table, self._mul(b.fptosi(number, self.i64), width))
                start = self._mul(i, width)
                with self._features(width) as (j, mask):
                    to = self._at(home, r, self._add(start, j))
                    self._save(self._load(self._gep(row, j), mask), to, mask)
        self._writes(home, v.width)

    def _reduction(self, v: Value) -> None:
        """Each of equal parts of a row down to one number: vectors along a part, or across parts, whichever is less."""
        count, width = v.args[0].width // v.width, v.width
        along = [[j * count + c for c in chunk] for j in range(width) for chunk in self._chunks(count)]
        across = [[j * count + c for j in chunk] for chunk in self._chunks(width) for c in range(count)]
        with self._rows() as r:
            if self._cost(v, along) + 6 * width <= self._cost(v, across):  # each part is then summed up by itself
                self._reduce_along(v, Spot(along), r)
            else:
                self._reduce_across(v, Spot(across), r)
        self._writes(self.plan.home(v), width)

    def _cost(self, v: Value, chunks: list[list[int]]) -> int:
        """Roughly, in vectors: one that is put together number by number takes several times as long."""
        kinds = [kind_of(self._through(read, chunks)) for read in self.plan.reads(v) if read.width > 1]
        return len(chunks) * (1 + 8 * kinds.count("scattered"))

    def _through(self, v: Value, chunks: list[list[int]]) -> list[list[int]]:
        """Where the features of `chunks` of a value stand in the row that it is read from."""
        return [[v.index[p] for p in chunk] for chunk in chunks] if self.plan.is_taken(v) else chunks

    def _reduce_along(self, v: Value, spot: Spot, r: Any) -> None:
        start, join = OPS[v.op].start, partial(LLVM[v.op], self)
        count = v.args[0].width // v.width
        full, rest = divmod(count, self.lanes)
        chunks = full + (rest > 0)

        def part(j: Any, i: Any, mask: Any) -> Any:
            here = spot.at(self._add(self._mul(j, chunks), i), mask)
            return self._value(v.args[0], None, r, here, {})

        with self._range(self._int(0), self._int(v.width), 1) as j:
            with self._accumulate(full, [[[self._splat(start)]]]) as (i, sums):
                sums[0][0][0] = join(sums[0][0][0], part(j, i, None))
            total = self._accumulated[0][0][0]
            if rest:
                mask = self._first(rest)
                total = join(total, self.b.select(mask, part(j, self._int(full), mask), self._splat(start)))
            numbers = [self.b.extract_element(total, ir.Constant(self.i32, i)) for i in range(self.lanes)]
            while len(numbers) > 1:  # pairwise, as a sum should be
                half = len(numbers) // 2
                numbers = [join(numbers[i], numbers[i + half]) for i in range(half)]
            self.b.store(numbers[0], self._at(self.plan.home(v), r, j))

    def _reduce_across(self, v: Value, spot: Spot, r: Any) -> None:
        start, join, home = OPS[v.op].start, partial(LLVM[v.op], self), self.plan.home(v)
        count = v.args[0].width // v.width
        with self._features(v.width) as (j, mask):
            block = self._mul(self._chunk(j), count)
            with self._accumulate(count, [[[self._splat(start)]]]) as (c, sums):
                part = self._value(v.args[0], None, r, spot.at(self._add(block, c), mask), {})
                sums[0][0][0] = join(sums[0][0][0], part)
            outside = home.buffer.role is Role.OUT
            self._save(self._accumulated[0][0][0], self._at(home, r, j), mask if outside else None)

    # ---- pointwise operations

    def _pointwise(self, group: tuple[int, int, int]) -> None:
        with self._rows() as r:
            counts = self._counts(r) if group in self.plan.adds else None
            with self._features(group[2]) as (j, mask):
                made: dict[Value, Any] = {}
                spot = Spot(self._chunks(group[2]), self._chunk(j), mask, j)
                for v, place in self.plan.stores.get(group, ()):
                    value = self._value(v, group, r, spot, made)
                    masked = mask if place.buffer.role is Role.OUT or group[2] < place.width else None
                    self._save(value, self._at(place, r, j), masked)
                    self._writes(place, v.width)
                for v, k in self.plan.adds.get(group, ()):
                    value = self._value(v, group, r, spot, made)
                    value = self.b.select(counts, value, self._splat(0.0))
                    at = self._gep(self._pointer(Buffer(Role.SUM, k)), j)
                    self._save(self.b.fadd(self._load(at, mask), value), at, mask)

    def _value(self, v: Value, group: Any, r: Any, spot: Spot, made: dict[Value, Any]) -> Any:
        """`v` at row r, at the features of `spot`: from a register, from memory, or computed.

        `group` is the pass that it is for; None: a reduction.
        """
        todo = [v]
        while todo:
            u = todo[-1]
            if u not in made:
                ours = u in self.plan.fused if group is None else self.plan.group(u) == group
                computed = u.op != "number" and self.plan.is_computed(u, ours)
                missing = [a for a in u.args if a not in made] if computed else []
                if missing:
                    todo += reversed(missing)
                    continue
                made[u] = self._operation(u, [made[a] for a in u.args]) if computed else self._read(u, r, spot)
            todo.pop()
        return made[v]

    def _read(self, v: Value, r: Any, spot: Spot) -> Any:
        if v.op == "number":
            return self._splat(v.index)
        if v.width == 1 and not self.plan.is_taken(v):
            return self._splat(self.b.load(self._row_pointer(v, r), typ=self.number))
        if self.plan.is_taken(v) or spot.first is None:
            row = v.args[0] if self.plan.is_taken(v) else v
            return self._picked(self._row_pointer(row, r), self._through(v, spot.chunks), spot)
        at = self._gep(self._row_pointer(v, r), spot.first)
        return self._load(at, spot.mask if self._is_outside(v) else None)
