"""CUDA code for values: which numbers of a row a thread has, where they come from, and how they reach other blocks."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from loopfold.engines.cuda_plan import Exchange, Piece, Plan
from loopfold.engines.writing import Buffer, Role
from loopfold.stepgraph.loop import Value
from loopfold.stepgraph.ops import OPS, Kind

FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in prelude.cuh
# Functions of prelude.cuh in place of CUDA's
_OWN = {name: f"{name}_fast({{0}})" for name in ("tanh", "sigmoid")}
_OWN |= {name: f"to_{name}({{0}})" for name in ("bfloat16", "float16")}


class Own(NamedTuple):
    """The i-th pair of features that a thread has, of rows w wide. In the code its names end in `_w_i`:

    `r` and `u`  the sequence, counted in its group, and the first of the two features; `row`: the sequence in the batch
    `here`       there is such a sequence; `own`: and such a feature; `two`: and a second one
    """

    w: int
    i: int

    def __str__(self) -> str:
        return f"{self.w}_{self.i}"


class Values:
    """A kernel under construction, and the means to write what a thread computes."""

    def __init__(self, plan: Plan, dtype: torch.dtype, whole: bool) -> None:
        self.plan, self.source, self.geometry, self.whole = plan, plan.source, plan.geometry, whole
        self.dtype, self.bytes, self.alone = dtype, dtype.itemsize, plan.alone  # of what lies in memory
        self.table: list[Buffer] = []
        self.functions: list[str] = []
        self.owned: dict[int, list[str]] = {}
        self.once: list[str] = []  # before the first step
        self.body: list[str] = []  # a step
        self.later: list[str] = []  # loads for the next step, once others have what they wait for
        self.end: list[str] = []  # after the last step
        self._made: dict[tuple[Value, Own], tuple[str, str]] = {}
        self.leaves: list[tuple[str, str, str]] = []  # (type, name, how it is loaded at time `(T)`)
        self.moving: dict[tuple[Value, int, Own], str] = {}
        self._names = 0
        for x in plan.exchanges.values():
            self._at_function(x)

    def new(self) -> str:
        self._names += 1
        return f"v{self._names}"

    def buffer(self, role: Role, index: int) -> str:
        if Buffer(role, index) not in self.table:
            self.table.append(Buffer(role, index))
        return f"{role.name.lower()}_{index}"

    # ---- what a thread has

    def own(self, w: int) -> Iterator[Own]:
        """The pairs that a thread has of rows w wide."""
        if w not in self.owned:
            self.owned[w] = []
            for i in range(self.plan.pairs(w)):
                self.owned[w] += self._declared(Own(w, i))
        return (Own(w, i) for i in range(self.plan.pairs(w)))

    def _declared(self, n: Own) -> list[str]:
        rows, share, threads = self.geometry.rows, self.plan.share(n.w), self.geometry.threads
        if n.w == 1:
            lines = [f"const int r_{n} = tid < {rows} ? tid : 0, u_{n} = 0;"]
            lines += [f"const bool here_{n} = tid < rows, own_{n} = here_{n} && p == 0, two_{n} = false;"]
        else:
            each, e = share // 2, f"tid + {n.i * threads}"
            inside = "true" if rows * each % threads == 0 else f"{e} < {rows * each}"
            here = inside if self.whole else f"{inside} && r_{n} < rows"
            there = "true" if share * self.geometry.blocks == n.w else f"u_{n} < {n.w}"
            lines = [
                f"const int e_{n} = {inside} ? {e} : 0, q_{n} = e_{n} / {each};",
                f"const int l_{n} = e_{n} % {each} * 2, u_{n} = p * {share} + l_{n};",
                f"const int r_{n} = {_spread(f'q_{n}', share)};",
                f"const bool here_{n} = {here}, own_{n} = here_{n} && {there};",
                f"const bool two_{n} = {f'u_{n} + 1 < {n.w}' if n.w % 2 else 'true'};",
            ]
        lines.append(f"const u32 row_{n} = row0 + r_{n};")
        if self.source.masked:
            lines.append(f"const int length_{n} = here_{n} ? (int)A.lengths[row_{n}] : 0;")
        return lines

    def step_bytes(self, width: int) -> str:
        """Of a sequence. Within a step 32 bits are enough, which spares registers."""
        return f"((u32)A.batch * {width * self.bytes}u)"

    def alive(self, n: Own, *names: str) -> tuple[str, ...]:
        """Zero after a sequence's end."""
        return tuple(f"(t < length_{n} ? {x} : 0.f)" for x in names) if self.source.masked else names

    # ---- values

    def value(self, v: Value, n: Own) -> tuple[str, str]:
        """The names of a pair of features of `v`; of a row of one number, that number twice."""
        if (v, n) not in self._made:
            self._made[v, n] = self._compute(v, n)
        return self._made[v, n]

    def is_now(self, v: Value, n: Own, names: tuple[str, str]) -> None:
        self._made[v, n] = names

    def _compute(self, v: Value, n: Own) -> tuple[str, str]:
        plan = self.plan
        row, start = plan.base(v)
        if v.op == "number":
            return (literal(v.index),) * 2
        if row in plan.given:
            return self._leaf(Role.GIVEN, plan.given[row], row, start, v.width, n)
        if row in plan.after:
            if row.width == v.width and plan.in_a_register(row):
                return self.register(row, 0, n)
            return self._fetch(plan.exchanges[row], start, v.width, n)
        if plan.is_one_of_many(v):
            return self._fetch(plan.exchanges[row], start, 1, n)
        if row.op in ("input", "incoming"):
            return self._leaf(Role[row.op.upper()], row.index, row, start, v.width, n)
        if row.op == "state":
            return self._leaf(Role.STATES, row.index, row, start, v.width, n)
        if row.op == "constant":
            return self._constant(row, start, v.width, n)
        if v.kind is Kind.REDUCTION:
            name, k = self.new(), plan.reductions.index(v)
            at = f"reduced + ({k * self.geometry.rows} + r_{n}) * 4"
            self.body.append(f"const float {name} = __uint_as_float(shared4({at}));")
            return name, name
        assert v.is_pointwise, v.op
        args = [self.value(a, n) for a in v.args]
        c = _OWN.get(v.op, OPS[v.op].c)
        index = literal(v.index) if isinstance(v.index, float) else ""
        names = []
        for side in range(1 if v.width == 1 else 2):
            names.append(self.new())
            kind = "bool" if v.is_bool else "float"
            self.body.append(f"const {kind} {names[-1]} = {c.format(*[a[side] for a in args], index=index)};")
        return names[0], names[-1]

    def _leaf(self, role: Role, index: int, row: Value, start: int, width: int, n: Own) -> tuple[str, str]:
        """A sequence from outside. It is loaded a step ahead, since memory is far away."""
        name, taken, one = f"leaf{len(self.leaves)}", self.new(), width == 1
        at = f"row_{n} * {row.width * self.bytes} + {start * self.bytes}" + ("" if one else f" + u_{n} * {self.bytes}")
        sequence, step = self.buffer(role, index), self.step_bytes(row.width)
        source = f"{sequence} + (size_t)(T) * {step} + ({at})"
        if role is Role.STATES:  # the state before the step
            source = f"((T) ? {sequence} + (size_t)((T) - 1) * {step} : {self.buffer(Role.START, index)}) + ({at})"
        load = f"load_pair({source})"
        if one:
            load = f"load_one({source})"
        elif row.width % 2 or start % 2:
            load = f"load_each({source}, two_{n})"
        load = f"if ({'here' if one else 'own'}_{n}) {name} = {load};"
        self.leaves.append(("float" if one else "Raw", name, load))
        self.later.append(load.replace("(T)", "following"))
        self.body.append(f"const {'float' if one else 'Pair'} {taken} = {name if one else f'decode({name})'};")
        return (taken, taken) if one else (f"{taken}.a", f"{taken}.b")

    def load_ahead(self) -> None:
        if self.later:
            self.body += ["if (it + 1 < steps) {", *self.later, "}"]
            self.later = []

    def _constant(self, row: Value, start: int, width: int, n: Own) -> tuple[str, str]:
        name, at = self.new(), f"{self.buffer(Role.CONSTANT, row.index)} + {start * self.bytes}"
        if width == 1:
            self.once.append(f"const float {name} = load_one({at});")
            return name, name
        load = f"decode(load_each({at} + u_{n} * {self.bytes}, two_{n}))"
        self.once.append(f"Pair {name} = {{0.f, 0.f}}; if (own_{n}) {name} = {load};")
        return f"{name}.a", f"{name}.b"

    # ---- rows that move from step to step

    def register(self, row: Value, start: int, n: Own) -> tuple[str, str]:
        """A moving row in the thread that makes it; for ∇state in several pieces, the one that starts there."""
        key = (row, start, n)
        if key not in self.moving:
            self.moving[key] = name = f"moving{len(self.moving)}"
            a, b = self._before_first(row, start, n)
            there = "here" if row.width == 1 else "own"
            self.once.append(f"Pair {name} = {{0.f, 0.f}}; if ({there}_{n}) {name} = {{{a}, {b}}};")
        name = self.moving[key]
        return (f"{name}.a", f"{name}.a") if row.width == 1 else (f"{name}.a", f"{name}.b")

    def _before_first(self, row: Value, start: int, n: Own) -> tuple[str, str]:
        """A moving row before the first step of this launch: state(0), what the launch before it left, or ∇state."""
        at = f"row_{n} * {row.width} + {start} + u_{n}" if row.width > 1 else f"row_{n}"
        if row.op == "state":
            out = self.buffer(Role.OUT, self.source.out.index(self.plan.after[row]))
            before = f"{out} + (size_t)(A.first - 1) * {self.step_bytes(row.width)}"
            source = f"(A.first ? {before} : {self.buffer(Role.START, row.index)}) + ({at}) * {self.bytes}"
            a, b = f"load_one({source})", f"load_one({source} + {self.bytes})"
        else:
            carry = f"((float*){self.buffer(Role.CARRY, row.index)})"
            a, b = (f"({carry} ? {carry}[{at}{next_}] : 0.f)" for next_ in ("", " + 1"))  # no carry yet: zeros
        return a, f"(two_{n} ? {b} : 0.f)" if row.width > 1 else "0.f"

    def update_moving(self) -> None:
        """Rows as the next step finds them."""
        for row, after in self.plan.after.items():
            for piece in self.plan.pieces(after) if row.op == "carry" else ():  # wanted at the end, read or not
                for n in self.own(piece.value.width):
                    self.register(row, piece.start, n)
                    name, carry = self.moving[row, piece.start, n], self.buffer(Role.CARRIED, row.index)
                    at = f"((float*){carry} + row_{n} * {row.width} + {piece.start} + u_{n})"
                    self.end.append(f"if (own_{n}) {{ {at}[0] = {name}.a; if (two_{n}) {at}[1] = {name}.b; }}")
        updates: list[str] = []
        while len(updates) < len(self.moving):  # what is computed for one may read another
            for row, start, n in list(self.moving)[len(updates) :]:
                name = self.moving[row, start, n]
                value = next(p.value for p in self.plan.pieces(self.plan.after[row]) if p.start == start)
                a, b = self.alive(n, *self.value(value, n))
                self.body.append(f"const Pair next_{name} = {{{a}, {b}}};")
                updates.append(f"{name} = next_{name};")
        self.load_ahead()
        self.body += updates

    # ---- exchanges

    def slot(self, x: Exchange, step: str) -> str:
        """The start of an exchange's rows of one step: in memory, or of a block that is alone in shared memory."""
        if self.alone:
            return f"base + {x.shared_at} + (({step}) & 1) * {x.slot_bytes}"
        return f"{self.buffer(Role.EXCHANGE, x.index)} + ((size_t)({step}) * A.groups + group) * {x.slot_bytes}"

    def _place(self, x: Exchange, piece: Piece, row: str, k: str) -> str:
        own = self.plan.owner_part(piece.value.width)
        return f"place<{x.chunks}, {self.plan.chunk_bytes}, {own}>({row}, {x.first_chunk[piece.start]}, {k})"

    def _at_function(self, x: Exchange) -> None:
        """Where feature k of a row lies."""
        self.functions.append(f"DEV u32 at_{x.index}(int row, int k) {{")
        for piece in x.pieces:
            end = piece.start + piece.value.width
            self.functions.append(f"  if (k < {end}) return {self._place(x, piece, 'row', f'k - {piece.start}')};")
        self.functions += ["  return 0;", "}"]

    def _put(self, x: Exchange, piece: Piece, n: Own, a: str, b: str, step: str) -> str:
        """What a thread publishes. Others load 16 bytes at a time, so a row is padded with zeros to whole loads."""
        at = f"{self.slot(x, step)} + {self._place(x, piece, f'r_{n}', f'u_{n}')}"
        padded = n.w if self.alone else -(-n.w // self.plan.per_load) * self.plan.per_load
        if n.w == 1:
            zeros = [f"publish({at} + {k * self.plan.bytes}, 0.f, 0.f);" for k in range(2, padded, 2)]
            return f"if (own_{n}) {{ publish({at}, {a}, 0.f); {' '.join(zeros)} }}"
        a = f"(u_{n} < {n.w} ? {a} : 0.f)" if padded > n.w + 1 else a
        b = f"(u_{n} + 1 < {n.w} ? {b} : 0.f)" if padded > n.w or n.w % 2 else b
        return f"if (here_{n} && u_{n} < {padded}) publish({at}, {a}, {b});"

    def publish(self, x: Exchange, piece: Piece) -> None:
        for n in self.own(piece.value.width):
            a, b = self.alive(n, *self.value(piece.value, n))
            put = self._put(x, piece, n, a, b, "it + 1" if x.lags else "it")
            self.body.append(f"if (it + 1 < steps) {{ {put} }}" if x.lags else put)

    def publish_first(self) -> Iterator[str]:
        """Moving rows for the first step."""
        for x in self.plan.exchanges.values():
            for piece in x.pieces if x.lags else ():
                for n in self.own(piece.value.width):
                    a, b = self._before_first(x.row, piece.start, n)
                    yield self._put(x, piece, n, f"(own_{n} ? {a} : 0.f)", f"(own_{n} ? {b} : 0.f)", "0")

    def _fetch(self, x: Exchange, start: int, width: int, n: Own) -> tuple[str, str]:
        """Numbers that other threads made, out of an exchange."""
        sides = [(f"own_{n}", f"{start} + u_{n}"), (f"own_{n} && two_{n}", f"{start} + u_{n} + 1")]
        names = []
        for there, k in sides if width > 1 else [(f"here_{n}", str(start))]:
            name, at = self.new(), self.new()
            self.body.append(f"float {name} = 0.f; if ({there}) {{ const u32 {at} = at_{x.index}(r_{n}, {k});")
            if self.alone:
                self.body.append(f"  {name} = number(shared4(({self.slot(x, 'it')} + {at}) & ~3u), {at}); }}")
            else:
                self.body.append(f"  const char* from = {self.slot(x, 'it')} + ({at} & ~3u); u32 word_, looks = 0;")
                self.body.append("  while ((word_ = exchanged4(from)) == MISSING && WAIT(looks)) { YIELD }")
                self.body.append(f"  {name} = number(word_, {at}); }}")
            names.append(name)
        return names[0], names[-1]


def _spread(q: str, share: int) -> str:
    """The sequence of the q-th pair of each owner, in such an order that a warp reads sums from different banks."""
    if share not in (4, 8, 16):
        return q
    step = share // 4
    return f"({q} & ~7) + {q} % {8 // step} * {step} + ({q} & 7) / {8 // step}"


def literal(x: float) -> str:
    """A number in the kernel's text."""
    if math.isinf(x):
        return "INF" if x > 0 else "(-INF)"
    return "NAN" if math.isnan(x) else f"({x!r}f)" if math.copysign(1, x) < 0 else f"{x!r}f"
