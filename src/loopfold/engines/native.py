"""Native code for a loop: from rows and operations to one function of machine code, by way of LLVM.

`Plan` decides what is computed when and where it is kept; `_Writer` writes it down as LLVM code. A step runs in
stages. Each stage first makes its products and reductions, which read whole rows from memory, then its pointwise
operations, one pass over the features for each width. Rows are taken in tiles: R sequences at a time share every load
of a matrix, and their partial sums stay in registers.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from llvmlite import ir

from loopfold.stepgraph.loop import LEAVES, POINTWISE, REDUCTIONS, Value, ordered

OPENMP = ("omp_get_thread_num", "omp_get_num_threads")  # what a kernel asks of the library that runs its threads


@dataclass(frozen=True)
class Machine:
    """What the generator needs to know of the processor."""

    vector_bytes: int
    registers: int

    def lanes(self, dtype_bytes: int) -> int:
        return self.vector_bytes // dtype_bytes


@dataclass(frozen=True, eq=False)
class Place:
    """Where rows of a value lie: a sequence, a buffer of the tile, or a buffer that the next step reads."""

    kind: str  # "sequence" | "scratch" | "carry"
    index: int  # which sequence or carry; for scratch the offset of the buffer
    width: int
    start: int = 0  # a part of the row: where it starts


@dataclass(frozen=True, eq=False)
class Source:
    """What a kernel computes: its roots, and where they go."""

    roots: tuple[tuple[Value, Place], ...]
    sums: tuple[Value, ...]  # values of which only the sum over steps and sequences is wanted, one accumulator each
    given: dict[Value, int]  # values that come as sequences: the index of the sequence
    carries: tuple[int, ...]  # the widths of the rows carried from step to step
    backwards: bool
    masked: bool


@dataclass(eq=False)
class Plan:
    """The order of work in one step."""

    source: Source
    lanes: int
    places: dict[Value, Place] = field(default_factory=dict)
    stores: dict[tuple[int, int, int], list[tuple[Value, Place]]] = field(default_factory=dict)
    adds: dict[tuple[int, int, int], list[tuple[Value, int]]] = field(default_factory=dict)
    products: dict[int, list[Value]] = field(default_factory=dict)
    scratch: int = 0  # elements a row of the tile needs
    _stages: dict[Value, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        source = self.source
        order = ordered([*[v for v, _ in source.roots], *source.sums], stop=source.given)
        for v in order:
            self._stages[v] = self._stage(v)
        for v, place in source.roots:
            if v not in self.places and v.op not in LEAVES and v not in source.given:
                self.places[v] = place  # rows that are kept anyway need no second home
        for v, place in source.roots:
            self._store(v, place)
        for k, v in enumerate(source.sums):
            self.adds.setdefault(self._group(v), []).append((v, k))
        for v in order:
            if (v.op == "matmul" or v.op in REDUCTIONS) and v not in source.given:
                self.home(v)
                self.products.setdefault(self._stages[v], []).append(v)
                self._at_hand(v.args[0])
        done: set[Any] = set()
        while True:  # a value may need a home in an earlier group, which then grows
            groups = {*self.stores, *self.adds}
            todo = [(g, v) for g in groups for v in self._values_in(g) if (g, v) not in done]
            for group, v in todo:
                done.add((group, v))
                self._reads(v, group)
            if not todo:
                break

    def _values_in(self, group: tuple[int, int, int]) -> list[Value]:
        return [v for v, _ in (*self.stores.get(group, ()), *self.adds.get(group, ()))]

    # ---- when

    def _stage(self, v: Value) -> int:
        """The stage in which a value is computed; products and reductions come first in their stage."""
        if v.op in LEAVES or v in self.source.given:
            return 0
        if v.op == "matmul" or v.op in REDUCTIONS:
            return self._in_memory(v.args[0])
        if v.op == "slice":
            return self._stages[v.args[0]] if v.args[0].op != "cat" else self._in_memory(v.args[0])
        if v.op == "cat":
            return max(self._in_memory(a) for a in v.args)
        return max((self._in_memory(a) if a.op == "cat" else self._stages[a] for a in v.args), default=0)

    def _in_memory(self, v: Value) -> int:
        """The first stage that can read whole rows of `v`."""
        if v.op in LEAVES or v in self.source.given:
            return 0
        if v.op == "slice":
            return self._in_memory(v.args[0])
        return self._stages[v] if v.op == "cat" else self._stages[v] + 1

    def _group(self, v: Value) -> tuple[int, int, int]:
        """(stage, 0 for numbers and 1 for rows, width): numbers come first, since rows read them."""
        stage = self._stages[v]
        return stage, int(v.width > 1), v.width

    # ---- where

    def home(self, v: Value) -> Place:
        """Where rows of `v` are kept within a step."""
        if v not in self.places:
            padded = -(-v.width // self.lanes) * self.lanes
            self.places[v] = Place("scratch", self.scratch, v.width)
            self.scratch += padded
            if v.op not in REDUCTIONS and v.op != "matmul":
                self._store(v, self.places[v])
        return self.places[v]

    def _store(self, v: Value, place: Place) -> None:
        if v.op == "cat" and v not in self.source.given:
            start = place.start
            for part in v.args:
                self._store(part, Place(place.kind, place.index, place.width, start))
                start += part.width
        elif not (v.op in ("matmul", *REDUCTIONS) and self.places.get(v) is place):
            self.stores.setdefault(self._group(v), []).append((v, place))

    def _at_hand(self, v: Value) -> None:
        """Make sure that rows of `v` can be read from memory."""
        if v.op == "slice" and v not in self.source.given:
            self._at_hand(v.args[0])
        elif v.op not in LEAVES and v not in self.source.given:
            self.home(v)

    def _reads(self, v: Value, group: tuple[int, int, int]) -> None:
        """Give a home to everything that `group` needs for `v` and does not compute itself."""
        if v.op in LEAVES or v in self.source.given:
            return
        if v.op in POINTWISE and (v.is_bool or self._group(v) == group):
            for a in v.args:
                self._reads(a, group)
        else:
            self._at_hand(v)


# ------------------------------------------------------------------ writing it down


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


@dataclass(frozen=True, eq=False)
class Written:
    """A kernel as LLVM code: `void kernel(steps, batch, first row, last row + 1, lengths*, buffers**)`."""

    code: str
    table: list[tuple[str, Any]]  # what each of the buffers is
    scratch: int  # elements of the scratch buffer of one thread


def write(source: Source, shape: Shape) -> Written:
    """Write the kernel that computes `source`."""
    writer = _Writer(Plan(source, shape.lanes), shape)
    return Written(str(writer.module), writer.table, writer.row_size * shape.tile)


class _Writer:
    def __init__(self, plan: Plan, shape: Shape) -> None:
        self.plan, self.source, self.shape = plan, plan.source, shape
        self.lanes = shape.lanes
        self.module = ir.Module("loopfold")
        self.number = ir.FloatType() if shape.dtype == "float" else ir.DoubleType()
        self.vector = ir.VectorType(self.number, self.lanes)
        self.i64, self.i32 = ir.IntType(64), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [self.i64] * 4 + [ir.PointerType()] * 2)
        self.function = ir.Function(self.module, kind, "kernel")
        self.b = ir.IRBuilder(self.function.append_basic_block("entry"))
        self._body()
        self._team()

    # ---- the whole function

    def _body(self) -> None:
        b, source = self.b, self.source
        self.steps, self.batch, first, last, self.lengths, table = self.function.args
        self.table = self._table()
        self.pointer = {
            key: b.load(b.gep(table, [self._int(i)], source_etype=ir.PointerType()), typ=ir.PointerType())
            for i, key in enumerate(self.table)
        }
        self.carry_at, at = [], self.plan.scratch
        for width in source.carries:
            self.carry_at.append(at)
            at += 2 * self._padded(width)  # one to read and one to write, changing places at every step
        self.row_size = at
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

    def _table(self) -> list[tuple[str, Any]]:
        """Every buffer that the kernel is given, in order."""
        source = self.source
        roots = [v for v, _ in source.roots]
        live = [v for v in ordered([*roots, *source.sums], stop=source.given) if v not in source.given]
        sequences = {p.index for _, p in source.roots if p.kind == "sequence"} | {*source.given.values()}
        found: list[tuple[str, Any]] = [("sequence", i) for i in sorted(sequences)]
        for op in ("input", "incoming", "constant"):
            found += [(op, i) for i in sorted({v.index for v in live if v.op == op})]
        for i in sorted({v.index for v in live if v.op == "state"}):
            found += [("start", i), ("states", i)]
        found += [("matrix", m) for m in sorted({v.index for v in live if v.op == "matmul"})]
        found += [("sum", k) for k in range(len(source.sums))]
        found += [("initial", k) for k in range(len(source.carries))]
        return [*found, ("scratch", 0)]

    def _step(self) -> None:
        stages = {*self.plan.products, *(g[0] for g in (*self.plan.stores, *self.plan.adds))}
        for stage in sorted(stages):
            for v in self.plan.products.get(stage, ()):
                self._product(v) if v.op == "matmul" else self._reduction(v)
            for group in sorted({*self.plan.stores, *self.plan.adds}):
                if group[0] == stage:
                    self._pointwise(group)
        if self.source.masked:
            self._clear_ended()

    def _team(self) -> None:
        """`team(jobs*)`: what every thread of an OpenMP team runs, taking every so-manyth job.

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

    # ---- carried rows

    def _start_carries(self) -> None:
        """The rows carried into the first step: those of the buffer `initial`, which then receives the last ones."""
        for k, width in enumerate(self.source.carries):
            with self._rows() as r, self._features(width) as (j, mask):
                from_ = self._gep(self.pointer["initial", k], self._add(self._mul(self._row(r), width), j))
                to = self._scratch(r, self._int(self.carry_at[k]), j)
                self._save(self._load(from_, mask), to, None)

    def _finish_carries(self) -> None:
        at_end = self.b.and_(self.steps, self._int(1))
        for k, width in enumerate(self.source.carries):
            with self._rows() as r, self._features(width) as (j, mask):
                offset = self._add(self._int(self.carry_at[k]), self._mul(at_end, self._padded(width)))
                value = self._load(self._scratch(r, offset, j), None)
                to = self._gep(self.pointer["initial", k], self._add(self._mul(self._row(r), width), j))
                self._save(value, to, mask)

    def _clear_ended(self) -> None:
        """After a sequence's end nothing counts: what was stored for it at this step becomes zero."""
        places = {(p.kind, p.index): p for _, p in self.source.roots}
        with self._rows() as r, self.b.if_then(self.b.not_(self._alive(r))):
            for place in places.values():
                whole = Place(place.kind, place.index, place.width)
                with self._features(place.width) as (j, mask):
                    mask = mask if place.kind == "sequence" else None
                    self._save(self._splat(0.0), self._at(whole, r, j), mask)

    # ---- products and reductions

    def _product(self, v: Value) -> None:
        """y[r, :] = Σ_k row[r, k] · M[k, :] for the R rows of the tile, one block of columns at a time."""
        b, left, tile = self.b, v.args[0], self.shape.tile
        depth, home = left.width, self.plan.home(v)
        blocks, vectors = self.shape.block(v.width)
        chains = 1 if tile * vectors >= 8 else 2  # independent sums, so that additions need not wait for each other
        chains = 4 if tile * vectors <= 2 else chains
        rows = [self._row_pointer(left, self._int(r)) for r in range(tile)]
        matrix = self.pointer["matrix", v.index]
        width = vectors * self.lanes

        def block(start: ir.Value, index: ir.Value, masks: list[Any]) -> None:
            base = self._gep(matrix, self._mul(index, depth * width))
            zero = [[[self._splat(0.0)] * vectors for _ in range(tile)] for _ in range(chains)]
            main = depth // chains
            with self._accumulate(main, zero) as (k, sums):
                for c in range(chains):
                    at = self._add(self._mul(k, chains), self._int(c))
                    self._multiply_add(sums[c], rows, base, at, width, vectors)
            sums = self._accumulated
            for c, k_left in enumerate(range(main * chains, depth)):
                self._multiply_add(sums[c], rows, base, self._int(k_left), width, vectors)
            for r in range(tile):
                for i in range(vectors):
                    value = sums[0][r][i]
                    for c in range(1, chains):
                        value = b.fadd(value, sums[c][r][i])
                    if masks[i] is not False:
                        j = self._add(start, self._int(i * self.lanes))
                        self._save(value, self._at(home, self._int(r), j), masks[i])

        padded = home.kind != "sequence"
        full = blocks if padded and blocks * width == self._padded(v.width) else v.width // width
        if full > 1:
            with self._range(self._int(0), self._int(full), 1) as index:
                block(self._mul(index, width), index, [None] * vectors)
        else:
            for index in range(full):
                block(self._int(index * width), self._int(index), [None] * vectors)
        for index in range(full, blocks):
            masks = [self._mask(v.width - index * width - i * self.lanes, padded) for i in range(vectors)]
            block(self._int(index * width), self._int(index), masks)

    def _multiply_add(
        self, sums: list[list[Any]], rows: list[Any], base: Any, k: Any, width: int, vectors: int
    ) -> None:
        fma = self._intrinsic("llvm.fma", 3)
        line = [self._load(self._gep(base, self._add(self._mul(k, width), self._int(i * self.lanes))), None)
                for i in range(vectors)]  # fmt: skip
        for r, row in enumerate(rows):
            number = self._splat(self.b.load(self._gep(row, k), typ=self.number))
            sums[r] = [self.b.call(fma, [number, line[i], sums[r][i]]) for i in range(vectors)]

    def _mask(self, count: int, padded: bool) -> Any:
        """Which lanes of a vector are there: None for all, False for none."""
        if count >= self.lanes or (padded and count > 0):
            return None
        return False if count <= 0 else self._first(count)

    def _reduction(self, v: Value) -> None:
        b, a = self.b, v.args[0]
        start = {"sum": 0.0, "amax": -math.inf, "amin": math.inf}[v.op]
        join = {"sum": lambda p, q: b.fadd(p, q), "amax": self._maximum, "amin": self._minimum}[v.op]
        with self._rows() as r:
            row = self._row_pointer(a, r)
            full, rest = divmod(a.width, self.lanes)
            with self._accumulate(full, [[[self._splat(start)]]]) as (i, sums):
                part = self._load(self._gep(row, self._mul(i, self.lanes)), None)
                sums[0][0][0] = join(sums[0][0][0], part)
            total = self._accumulated[0][0][0]
            if rest:
                mask = self._first(rest)
                part = self._load(self._gep(row, self._int(full * self.lanes)), mask)
                total = join(total, b.select(mask, part, self._splat(start)))
            numbers = [b.extract_element(total, ir.Constant(self.i32, i)) for i in range(self.lanes)]
            while len(numbers) > 1:  # pairwise, as a sum should be
                half = len(numbers) // 2
                numbers = [self._join_numbers(v.op, numbers[i], numbers[i + half]) for i in range(half)]
            b.store(numbers[0], self._at(self.plan.home(v), r, self._int(0)))

    def _join_numbers(self, op: str, p: Any, q: Any) -> Any:
        if op == "sum":
            return self.b.fadd(p, q)
        name = "llvm.maximum" if op == "amax" else "llvm.minimum"
        return self.b.call(self._declare(f"{name}.{self._suffix(False)}", self.number, 2), [p, q])

    # ---- pointwise operations

    def _pointwise(self, group: tuple[int, int, int]) -> None:
        with self._rows() as r:
            counts = self._counts(r) if group in self.plan.adds else None
            with self._features(group[2]) as (j, mask):
                made: dict[Value, Any] = {}
                for v, place in self.plan.stores.get(group, ()):
                    value = self._value(v, group, r, j, mask, made)
                    masked = mask if place.kind == "sequence" or group[2] < place.width else None
                    self._save(value, self._at(place, r, j), masked)
                for v, k in self.plan.adds.get(group, ()):
                    value = self._value(v, group, r, j, mask, made)
                    value = self.b.select(counts, value, self._splat(0.0))
                    at = self._gep(self.pointer["sum", k], j)
                    self._save(self.b.fadd(self._load(at, mask), value), at, mask)

    def _value(self, v: Value, group: tuple[int, int, int], r: Any, j: Any, mask: Any, made: dict[Value, Any]) -> Any:
        """`v` at row r, features j and on: from a register, from memory, or computed."""
        if v not in made:
            ours = v.is_bool or self.plan._group(v) == group
            if v.op == "number":
                made[v] = self._splat(v.index)
            elif v.op in POINTWISE and v not in self.source.given and ours:
                args = [self._value(a, group, r, j, mask, made) for a in v.args]
                made[v] = self._operation(v, args)
            elif v.width == 1:
                made[v] = self._splat(self.b.load(self._row_pointer(v, r), typ=self.number))
            else:
                made[v] = self._load(self._gep(self._row_pointer(v, r), j), mask if self._is_outside(v) else None)
        return made[v]

    def _is_outside(self, v: Value) -> bool:
        """Whether reading past the end of a row may leave the memory that is ours (or the row)."""
        if v in self.source.given or v.op in LEAVES or v.op == "slice":
            return v.op != "carry"
        return self.plan.places[v].kind == "sequence"

    def _operation(self, v: Value, args: list[Any]) -> Any:
        b = self.b
        simple: dict[str, Callable[..., Any]] = {
            "add": lambda p, q: b.fadd(p, q, flags=("contract",)),
            "sub": lambda p, q: b.fsub(p, q, flags=("contract",)),
            "mul": lambda p, q: b.fmul(p, q, flags=("contract",)),
            "div": b.fdiv,
            "neg": b.fneg,
            "maximum": self._maximum,
            "minimum": self._minimum,
            "where": b.select,
            "and": b.and_,
            "or": b.or_,
            "not": b.not_,
            "relu": lambda p: b.select(b.fcmp_ordered("<=", p, self._splat(0.0)), self._splat(0.0), p),
            "tanh": self._tanh,
            "sigmoid": self._sigmoid,
            "exp": self._exp,
            "reciprocal": lambda p: b.fdiv(self._splat(1.0), p),
            "sqrt": lambda p: b.call(self._intrinsic("llvm.sqrt", 1), [p]),
            "rsqrt": lambda p: b.fdiv(self._splat(1.0), b.call(self._intrinsic("llvm.sqrt", 1), [p])),
            "abs": lambda p: b.call(self._intrinsic("llvm.fabs", 1), [p]),
            "sign": self._sign,
            "expand": lambda p: p,
            "detach": lambda p: p,
        }
        if v.op in simple:
            return simple[v.op](*args)
        comparisons = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "=="}
        if v.op in comparisons:
            return b.fcmp_ordered(comparisons[v.op], *args)
        if v.op == "ne":
            return b.fcmp_unordered("!=", *args)
        if v.op == "pow":
            return self._each_lane("pow", args[0], v.index)
        return self._each_lane(v.op, args[0])  # log, log1p, expm1, sin, cos, erf: the C library's, lane by lane

    def _each_lane(self, name: str, p: Any, *numbers: float) -> Any:
        symbol = name + ("f" if self.shape.dtype == "float" else "")
        function = self._declare(symbol, self.number, 1 + len(numbers))
        out = ir.Constant(self.vector, ir.Undefined)
        for i in range(self.lanes):
            lane = ir.Constant(self.i32, i)
            args = [self.b.extract_element(p, lane), *[ir.Constant(self.number, n) for n in numbers]]
            out = self.b.insert_element(out, self.b.call(function, args), lane)
        return out

    def _maximum(self, p: Any, q: Any) -> Any:
        return self.b.call(self._intrinsic("llvm.maximum", 2), [p, q])

    def _minimum(self, p: Any, q: Any) -> Any:
        return self.b.call(self._intrinsic("llvm.minimum", 2), [p, q])

    def _sign(self, p: Any) -> Any:
        b, zero = self.b, self._splat(0.0)
        below = b.select(b.fcmp_ordered("<", p, zero), self._splat(-1.0), zero)
        return b.select(b.fcmp_ordered(">", p, zero), self._splat(1.0), below)

    def _polynomial(self, x: Any, coefficients: tuple[float, ...]) -> Any:
        """Horner's scheme, the highest power first."""
        fma = self._intrinsic("llvm.fma", 3)
        value = self._splat(coefficients[0])
        for c in coefficients[1:]:
            value = self.b.call(fma, [value, x, self._splat(c)])
        return value

    def _exp(self, x: Any) -> Any:
        """2ⁿ eʳ with n = round(x / ln 2) and |r| ≤ ln 2 / 2; eʳ by its series, to half a unit in the last place."""
        b, fma = self.b, self._intrinsic("llvm.fma", 3)
        single = self.shape.dtype == "float"
        bits, mantissa, bias = (32, 23, 127) if single else (64, 52, 1023)
        low, high = (-104.0, 89.0) if single else (-746.0, 710.0)
        x = b.select(b.fcmp_ordered("<", x, self._splat(low)), self._splat(low), x)
        x = b.select(b.fcmp_ordered(">", x, self._splat(high)), self._splat(high), x)
        # adding 1.5 · 2^mantissa rounds to a whole number and leaves it in the lowest bits
        magic = 1.5 * 2.0**mantissa
        shifted = b.call(fma, [x, self._splat(1 / math.log(2)), self._splat(magic)])
        n = b.fsub(shifted, self._splat(magic))
        ln2_high = 0.693359375 if single else 6.93145751953125e-1  # few bits, so that n · ln2_high is exact
        ln2_low = -2.12194440054690583e-4 if single else 1.42860682030941723212e-6
        r = b.call(fma, [n, self._splat(-ln2_high), x])
        r = b.call(fma, [n, self._splat(-ln2_low), r])
        terms = 7 if single else 13
        p = self._polynomial(r, tuple(1 / math.factorial(k) for k in range(terms, -1, -1)))
        whole = ir.VectorType(ir.IntType(bits), self.lanes)

        def integers(value: int) -> ir.Constant:
            return ir.Constant(whole, [value] * self.lanes)

        magic_bits = ((bias + mantissa) << mantissa) | (1 << (mantissa - 1))
        exponent = b.sub(b.bitcast(shifted, whole), integers(magic_bits))
        half = b.ashr(exponent, integers(1))  # two factors, so that neither over- nor underflows by itself
        for part in (half, b.sub(exponent, half)):
            power = b.bitcast(b.shl(b.add(part, integers(bias)), integers(mantissa)), self.vector)
            p = b.fmul(p, power)
        return p

    def _sigmoid(self, x: Any) -> Any:
        b, one = self.b, self._splat(1.0)
        return b.fdiv(one, b.fadd(one, self._exp(b.fneg(x))))

    def _tanh(self, x: Any) -> Any:
        """1 - 2 / (e^{2|x|} + 1) with the sign of x; near zero, where that cancels, x + x³ P(x²)."""
        b, one = self.b, self._splat(1.0)
        size = b.call(self._intrinsic("llvm.fabs", 1), [x])
        bound = b.select(b.fcmp_ordered(">", size, self._splat(20.0)), self._splat(20.0), size)
        e = self._exp(b.fadd(bound, bound))
        large = b.fsub(one, b.fdiv(self._splat(2.0), b.fadd(e, one)))
        large = b.call(self._intrinsic("llvm.copysign", 2), [large, x])
        z = b.fmul(x, x)
        if self.shape.dtype == "float":
            p = self._polynomial(z, TANH_NEAR_ZERO_SINGLE)
        else:
            p = b.fdiv(self._polynomial(z, TANH_NEAR_ZERO_DOUBLE[0]), self._polynomial(z, TANH_NEAR_ZERO_DOUBLE[1]))
        small = b.call(self._intrinsic("llvm.fma", 3), [b.fmul(x, z), p, x])
        return b.select(b.fcmp_ordered(">=", size, self._splat(0.625)), large, small)

    # ---- rows, addresses, vectors

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
        if v in self.source.given:
            return self._at(Place("sequence", self.source.given[v], v.width), r, self._int(0))
        if v.op == "slice":
            return self._gep(self._row_pointer(v.args[0], r), self._int(v.index))
        if v.op == "constant":
            return self.pointer["constant", v.index]
        if v.op == "carry":
            offset = self._add(self._int(self.carry_at[v.index]), self._mul(self.parity, self._padded(v.width)))
            return self._scratch(r, offset, self._int(0))
        if v.op == "state":  # state(0) at the first step, then the sequence of states, one step back
            b, row = self.b, self._row(r)
            before = self._mul(b.add(self._mul(b.sub(self.t, self._int(1)), self.batch), row), v.width)
            first = self._mul(row, v.width)
            at_start = b.icmp_signed("==", self.t, self._int(0))
            base = b.select(at_start, self.pointer["start", v.index], self.pointer["states", v.index])
            return self._gep(base, b.select(at_start, first, before))
        if v.op in ("input", "incoming"):
            at = self._mul(self._add(self._mul(self.t, self.batch), self._row(r)), v.width)
            return self._gep(self.pointer[v.op, v.index], at)
        return self._at(self.plan.places[v], r, self._int(0))

    def _at(self, place: Place, r: Any, j: Any) -> Any:
        j = self._add(self._int(place.start), j)
        if place.kind == "scratch":
            return self._scratch(r, self._int(place.index), j)
        if place.kind == "carry":
            other = self.b.sub(self._int(1), self.parity)
            offset = self._add(self._int(self.carry_at[place.index]), self._mul(other, self._padded(place.width)))
            return self._scratch(r, offset, j)
        at = self._mul(self._add(self._mul(self.t, self.batch), self._row(r)), place.width)
        return self._gep(self.pointer["sequence", place.index], self._add(at, j))

    def _scratch(self, r: Any, offset: Any, j: Any) -> Any:
        return self._gep(self.pointer["scratch", 0], self._add(self._add(self._mul(r, self.row_size), offset), j))

    def _padded(self, width: int) -> int:
        return -(-width // self.lanes) * self.lanes

    def _int(self, value: int) -> ir.Constant:
        return ir.Constant(self.i64, value)

    def _add(self, a: Any, c: Any) -> Any:
        if isinstance(a, ir.Constant) and isinstance(c, ir.Constant):
            return self._int(a.constant + c.constant)
        return self.b.add(a, c)

    def _mul(self, a: Any, c: Any) -> Any:
        c = self._int(c) if isinstance(c, int) else c
        if isinstance(a, ir.Constant) and isinstance(c, ir.Constant):
            return self._int(a.constant * c.constant)
        return self.b.mul(a, c)

    def _gep(self, pointer: Any, index: Any) -> Any:
        return self.b.gep(pointer, [index], source_etype=self.number)

    def _splat(self, value: Any) -> Any:
        if isinstance(value, float):
            return ir.Constant(self.vector, [value] * self.lanes)
        one = self.b.insert_element(ir.Constant(self.vector, ir.Undefined), value, ir.Constant(self.i32, 0))
        zeros = ir.Constant(ir.VectorType(self.i32, self.lanes), [0] * self.lanes)
        return self.b.shuffle_vector(one, ir.Constant(self.vector, ir.Undefined), zeros)

    def _first(self, count: int) -> ir.Constant:
        kind = ir.VectorType(ir.IntType(1), self.lanes)
        return ir.Constant(kind, [int(i < count) for i in range(self.lanes)])

    def _load(self, pointer: Any, mask: Any) -> Any:
        if mask is None:
            return self.b.load(pointer, align=self._align(), typ=self.vector)
        function = self._masked("load")
        return self.b.call(function, [pointer, ir.Constant(self.i32, self._align()), mask, self._splat(0.0)])

    def _save(self, value: Any, pointer: Any, mask: Any) -> None:
        if mask is None:
            self.b.store(value, pointer, align=self._align())
        else:
            self.b.call(self._masked("store"), [value, pointer, ir.Constant(self.i32, self._align()), mask])

    def _align(self) -> int:
        return 4 if self.shape.dtype == "float" else 8

    # ---- declarations and loops

    def _suffix(self, vector: bool) -> str:
        return f"v{self.lanes}" * vector + ("f32" if self.shape.dtype == "float" else "f64")

    def _declare(self, name: str, result: Any, arity: int) -> ir.Function:
        if name in self.module.globals:
            return self.module.globals[name]
        return ir.Function(self.module, ir.FunctionType(result, [result] * arity), name)

    def _intrinsic(self, name: str, arity: int) -> ir.Function:
        return self._declare(f"{name}.{self._suffix(True)}", self.vector, arity)

    def _masked(self, what: str) -> ir.Function:
        name = f"llvm.masked.{what}.{self._suffix(True)}.p0"
        if name in self.module.globals:
            return self.module.globals[name]
        mask = ir.VectorType(ir.IntType(1), self.lanes)
        pointer = ir.PointerType()
        if what == "load":
            kind = ir.FunctionType(self.vector, [pointer, self.i32, mask, self.vector])
        else:
            kind = ir.FunctionType(ir.VoidType(), [self.vector, pointer, self.i32, mask])
        return ir.Function(self.module, kind, name)

    @contextmanager
    def _range(self, start: Any, stop: Any, step: int) -> Iterator[Any]:
        """`for i in range(start, stop, step)`; at least one turn."""
        b = self.b
        before, body = b.block, self.function.append_basic_block()
        b.branch(body)
        b.position_at_end(body)
        i = b.phi(self.i64)
        i.add_incoming(start, before)
        yield i
        following = b.add(i, self._int(step))
        i.add_incoming(following, b.block)
        after = self.function.append_basic_block()
        b.cbranch(b.icmp_signed("<", following, stop), body, after)
        b.position_at_end(after)

    @contextmanager
    def _accumulate(self, count: int, start: list[list[list[Any]]]) -> Iterator[tuple[Any, list[list[list[Any]]]]]:
        """A loop of `count` turns that changes nested lists of vectors; afterwards they are in `_accumulated`."""
        b = self.b
        if count == 0:
            spare = self.function.append_basic_block()  # never reached: keeps the caller's code free of cases
            here = b.block
            b.position_at_end(spare)
            sums = [[list(row) for row in chain] for chain in start]
            yield self._int(0), sums
            b.unreachable()
            b.position_at_end(here)
            self._accumulated = [[list(row) for row in chain] for chain in start]
            return
        before, body = b.block, self.function.append_basic_block()
        b.branch(body)
        b.position_at_end(body)
        i = b.phi(self.i64)
        i.add_incoming(self._int(0), before)
        phis = [[[b.phi(self.vector) for _ in row] for row in chain] for chain in start]
        sums = [[list(row) for row in chain] for chain in phis]
        yield i, sums
        following = b.add(i, self._int(1))
        i.add_incoming(following, b.block)
        for chain, chain0, chain1 in zip(phis, start, sums, strict=True):
            for row, row0, row1 in zip(chain, chain0, chain1, strict=True):
                for phi, first, last in zip(row, row0, row1, strict=True):
                    phi.add_incoming(first, before)
                    phi.add_incoming(last, b.block)
        after = self.function.append_basic_block()
        b.cbranch(b.icmp_signed("<", following, self._int(count)), body, after)
        b.position_at_end(after)
        self._accumulated = sums

    @contextmanager
    def _rows(self) -> Iterator[Any]:
        if self.shape.tile == 1:
            yield self._int(0)
        else:
            with self._range(self._int(0), self._int(self.shape.tile), 1) as r:
                yield r

    @contextmanager
    def _features(self, width: int) -> Iterator[tuple[Any, Any]]:
        """One vector of features after another: (the first of them, the mask of those that exist or None for all)."""
        whole = width % self.lanes == 0
        if width <= self.lanes:
            yield self._int(0), None if whole else self._first(width)
            return
        with self._range(self._int(0), self._int(width), self.lanes) as j:
            yield j, None if whole else self._below(j, width)

    def _below(self, j: Any, width: int) -> Any:
        kind = ir.VectorType(self.i64, self.lanes)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), j, ir.Constant(self.i32, 0))
        zeros = ir.Constant(ir.VectorType(self.i32, self.lanes), [0] * self.lanes)
        at = self.b.add(
            self.b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros),
            ir.Constant(kind, list(range(self.lanes))),
        )
        return self.b.icmp_signed("<", at, ir.Constant(kind, [width] * self.lanes))


# tanh(x) = x + x³ P(x²) for |x| < 0.625; the coefficients are those of the Cephes library, the highest power first
TANH_NEAR_ZERO_SINGLE = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
TANH_NEAR_ZERO_DOUBLE = (
    (-9.64399179425052238628e-1, -9.92877231001918586564e1, -1.61468768441708447952e3),
    (1.0, 1.12811678491632931402e2, 2.23548839060100448583e3, 4.84406305325125486048e3),
)
