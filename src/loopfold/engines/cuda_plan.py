"""How a step is shared out on a GPU: which block has which features, what is computed when, which rows are exchanged.

A group of blocks runs a group of sequences from the first step to the last. Every block owns some features of every row
and keeps the columns of the matrices that make them. What a block needs of a row that others own too, the operand of a
product, is exchanged through memory, without any barrier between blocks (see `cuda`).
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from loopfold.engines.writing import Source
from loopfold.stepgraph.loop import Builder, Value, ordered
from loopfold.stepgraph.ops import ROUNDED, Kind

LOAD = 16  # bytes that a thread loads at once
CHUNK = 64  # bytes of a row in a chunk: four threads' loads
TILE = 8  # sequences that a product of the tensor cores takes
LINE = 128  # bytes of a cache line


@dataclass(frozen=True)
class Geometry:
    """How many blocks share the features of how many sequences, and how large they are."""

    blocks: int
    rows: int  # a multiple of TILE
    warps: int = 8
    warps_k: int = 8  # at most so many share a sum over k; the others have other features
    registers: int = 128  # of a thread, that hold weights; the others are in shared memory

    @property
    def threads(self) -> int:
        return 32 * self.warps


class Piece(NamedTuple):
    """A part of a row that one expression gives."""

    start: int
    value: Value


@dataclass(eq=False)
class Exchange:
    """Rows that every block of a group reads: what is published, and how it lies in memory.

    A chunk holds TILE sequences × CHUNK bytes, in the order in which the tensor cores read them; within a chunk, the
    features of one owner lie together, so that no cache line has two writers.
    """

    row: Value  # what is read: `state` or `carry` as it was before the step, or a value of the step
    published: Value
    pieces: list[Piece]
    lags: bool  # published at one step and read at the next
    index: int = 0
    first_chunk: dict[int, int] = field(default_factory=dict)  # of the piece that starts there
    chunks: int = 0
    slot_bytes: int = 0  # of one step, one group
    shared_at: int = 0  # of a block that is alone: bytes from the start of shared memory


@dataclass(eq=False)
class Product:
    """A product with a matrix: the columns that a block needs, side by side, and how the warps share the work."""

    value: Value
    exchange: Exchange
    start: int  # of the operand within the exchanged row
    index: int
    columns: dict[tuple[int, int], int]  # (start, width) of each part that is read -> its first feature here
    features: int = 0  # of a block, a multiple of 16
    tiles: int = 0  # of 16 features
    warps_k: int = 1  # how many warps share the sum over k
    tiles_of_warp: int = 1
    chunks: int = 0  # along k
    chunks_of_warp: int = 1
    in_registers: int = 0  # chunks of a warp whose weights are in registers
    split: bool = False  # whether these are kept as the two parts that exact products of float32 need
    sums_at: int = 0  # floats from the start of the partial sums of its stage
    weights_at: int = 0  # bytes from the start of shared memory

    @property
    def stride(self) -> int:
        """Floats from one sequence to the next among the partial sums; 4 more, so that banks differ."""
        return self.features + 4


def planned(source: Source, builder: Builder, dtype: torch.dtype, geometry: Geometry, exact: bool) -> "Plan":
    """The plan of a step. Products of nothing but half precision are computed in it, also in a loop of float32."""
    if source.products_of is not None:
        plan = Plan(source, builder, source.products_of, geometry, exact)
        if plan.keeps_digits():
            return plan
    return Plan(source, builder, dtype, geometry, exact and source.products_of is None)  # TF32 has all of their digits


class Plan:
    """When each value of a step is computed, and what is exchanged. `dtype` is that of products and exchanges."""

    def __init__(self, source: Source, builder: Builder, dtype: torch.dtype, geometry: Geometry, exact: bool) -> None:
        self.builder, self.geometry, self.dtype = builder, geometry, dtype
        self.bytes = bytes_each = dtype.itemsize
        self.exact = exact and bytes_each == 4  # products of float32 by three of TF32 each
        self.alone = geometry.blocks == 1  # a block that exchanges nothing with others
        self.per_load, self.per_chunk = LOAD // bytes_each, CHUNK // bytes_each
        self.source = source = without_thin_products(source, builder)
        self.given = source.given_at
        self.after = dict(source.moves)
        self.exchanges: dict[Value, Exchange] = {}
        self.products: dict[Value, Product] = {}
        self.reductions: list[Value] = []
        self.fetches: set[int] = set()  # stages in which numbers are read that other threads have made
        self.fetched: list[Exchange] = []  # where they are read from
        self._stages: dict[Value, int] = {}
        self._pieces: dict[Value, list[Piece]] = {}
        self._cuts: dict[tuple[Value, int, int], Value] = {}
        self._known_seams: dict[Value, set[int]] = {}
        self._read: dict[Value, set[tuple[int, int]]] = {}  # the parts of each product that are read
        roots = [*source.out, *source.sums, *self.after.values()]
        for root in roots:
            for piece in self.pieces(root):
                self.stage(piece.value)
        self.stages = 1 + max(self._stages.values(), default=0)
        shift = CHUNK if self.alone else 0  # in shared memory, so that chunks begin at different banks
        self.chunk_bytes = TILE * CHUNK + shift
        for k, exchange in enumerate(self.exchanges.values()):
            exchange.index = k
            self._lay_out(exchange)
        self._share_products()
        self._lay_out_shared_memory()

    def keeps_digits(self) -> bool:
        """Whether what is read from an exchange, but by products, has no more digits than the dtype of the exchange."""
        rows = [v for x in self.fetched for v in (x.row, *(piece.value for piece in x.pieces))]
        return all(self.source.halves.row(v) == self.dtype for v in rows)

    # ---- parts of rows

    def pieces(self, v: Value) -> list[Piece]:
        """The row cut wherever rows were put side by side."""
        if v not in self._pieces:
            edges = [0, *sorted(self._seams(v)), v.width]
            self._pieces[v] = [Piece(a, self._cut(v, a, b - a)) for a, b in zip(edges, edges[1:], strict=False)]
        return self._pieces[v]

    def _cut(self, v: Value, start: int, width: int) -> Value:
        """Part of a row: a part of what lies in memory, or computed from parts."""
        key = (v, start, width)
        if key not in self._cuts:
            self._cuts[key] = v if width == v.width else self._new_cut(v, start, width)
        return self._cuts[key]

    def _new_cut(self, v: Value, start: int, width: int) -> Value:
        if v not in self.given and v.op == "slice":
            return self._cut(v.args[0], v.index + start, width)
        if v not in self.given and v.op == "cat":
            for part in v.args:
                if start < part.width:
                    return self._cut(part, start, width)
                start -= part.width
        if v not in self.given and v.is_pointwise:
            parts = [a if a.width == 1 else self._cut(a, start, width) for a in v.args]
            return self.builder.make(v.op, *parts, width=width, index=v.index)
        return self.builder.make("slice", v, width=width, index=start)

    def _seams(self, v: Value) -> set[int]:
        if v not in self._known_seams:
            self._known_seams[v] = self._new_seams(v)
        return self._known_seams[v]

    def _new_seams(self, v: Value) -> set[int]:
        if v in self.given or v.kind not in (Kind.POINTWISE, Kind.LAYOUT) or v.op == "slice":
            return set()
        if v.op == "cat":
            found, at = set(), 0
            for part in v.args:
                found |= {at + seam for seam in self._seams(part)} | {at}
                at += part.width
            return found - {0}
        return {seam for a in v.args if a.width == v.width for seam in self._seams(a)}

    def base(self, v: Value) -> tuple[Value, int]:
        """The row that a value is a part of, and where it starts."""
        return (v.args[0], v.index) if v.op == "slice" and v not in self.given else (v, 0)

    def in_a_register(self, row: Value) -> bool:
        """Whether the thread that reads a moving row is the one that made it, at the step before."""
        return len(self.pieces(self.after[row])) == 1

    def is_one_of_many(self, v: Value) -> bool:
        """Whether it is one number of a product, which one thread makes and all need."""
        row, _ = self.base(v)
        return row.op == "matmul" and row not in self.given and v.width == 1 < row.width

    # ---- when

    def stage(self, v: Value) -> int:
        """Products and reductions of a stage come first in it; they read what earlier stages made."""
        if v not in self._stages:
            self._stages[v] = self._stage(v)
        return self._stages[v]

    def _stage(self, v: Value) -> int:
        row, start = self.base(v)
        if row in self.after:
            if start or row.width != v.width or not self.in_a_register(row):
                self.fetched.append(self._exchange(row))
                self.fetches.add(0)
            return 0
        if row in self.given or row.is_leaf:
            return 0
        if self.is_one_of_many(v):
            self.fetched.append(self._exchange(row))
            self.fetches.add(1 + self.stage(row))
            return 1 + self.stage(row)
        if row.op == "matmul":
            self._read.setdefault(row, set()).add((start, v.width))
            return self._product(row)
        if v.kind is Kind.REDUCTION:
            if v not in self.reductions:
                self.reductions.append(v)
            return 1 + max(self.stage(piece.value) for piece in self.pieces(v.args[0]))
        return max((self.stage(a) for a in v.args), default=0)

    def _product(self, v: Value) -> int:
        operand = v.args[0]
        if operand.op == ROUNDED.get(self.dtype) and operand not in self.given:
            operand = operand.args[0]  # to be exchanged is to be rounded
        row, start = self.base(operand)
        if row not in self.after or not self._at_chunks(row, start, operand.width):
            row, start = operand, 0
        if v not in self.products:
            self.products[v] = Product(v, self._exchange(row), start, len(self.products), {})
        return 0 if row in self.after else 1 + max(self.stage(piece.value) for piece in self.pieces(row))

    def _at_chunks(self, row: Value, start: int, width: int) -> bool:
        """Whether a part of a moving row can be read from the exchange of the whole."""
        whole_chunks = start % self.per_chunk == 0 and (width % self.per_chunk == 0 or start + width == row.width)
        return width == row.width or (whole_chunks and self.in_a_register(row))

    def _exchange(self, row: Value) -> Exchange:
        if row not in self.exchanges:
            published = self.after.get(row, row)
            self.exchanges[row] = Exchange(row, published, self.pieces(published), lags=row in self.after)
        return self.exchanges[row]

    # ---- who

    def share(self, width: int, blocks: int | None = None) -> int:
        """How many features of a row of this width a block owns; whole loads, and they fill a chunk or divide it."""
        blocks = self.geometry.blocks if blocks is None else blocks
        if blocks == 1:
            return width + width % 2
        own = _up(-(-width // blocks), self.per_load)
        while own < self.per_chunk and self.per_chunk % own:
            own += self.per_load
        return own if own <= self.per_chunk else _up(own, self.per_chunk)

    def busy_blocks(self, most: int) -> list[int]:
        """The numbers of blocks, up to `most`, none of which is left without features of the widest row."""
        widths = [v.width for v in self.values() if v.is_pointwise]
        width = max(widths + [part for p in self.products.values() for _, part in p.columns], default=1)
        return [n for n in range(1, most + 1) if n == -(-width // self.share(width, n))]

    def pairs(self, width: int) -> int:
        """How many pairs of features of such a row a thread has."""
        return 1 if width == 1 else -(-self.geometry.rows * self.share(width) // 2 // self.geometry.threads)

    def owner_part(self, width: int) -> int:
        """Features of one owner that lie together in a chunk."""
        return self.per_chunk if self.alone else min(self.share(width), self.per_chunk)

    def _lay_out(self, exchange: Exchange) -> None:
        for piece in exchange.pieces:
            exchange.first_chunk[piece.start] = exchange.chunks
            exchange.chunks += -(-piece.value.width // self.per_chunk)
        exchange.slot_bytes = self.geometry.rows // TILE * exchange.chunks * self.chunk_bytes

    def _lay_out_shared_memory(self) -> None:
        """Weights; warps' sums, twice; parts of reductions; reductions; of a block that is alone, exchanges, twice."""
        rows = self.geometry.rows
        parts = [sum(map(self.slots, self.reductions_in(stage))) for stage in range(self.stages)]
        self.sums_at = _up(self.weight_bytes, LINE)
        self.partial_at = self.sums_at + 2 * 4 * self.sum_floats
        self.reduced_at = self.partial_at + 4 * rows * max(parts, default=0)
        at = self.exchanged_at = _up(self.reduced_at + 4 * rows * len(self.reductions), LINE)
        if self.alone:
            for exchange in self.exchanges.values():
                exchange.shared_at = at
                at += 2 * exchange.slot_bytes
        self.shared_bytes = at

    def slots(self, reduction: Value) -> int:
        """Numbers of a row that the threads of a block make, to be joined."""
        widths = (piece.value.width for piece in self.pieces(reduction.args[0]))
        return sum(1 if w == 1 else self.share(w) // 2 for w in widths)

    def _share_products(self) -> None:
        """Warps are divided between the features of a block and the sum over k."""
        warps, budget, shared = self.geometry.warps, self.geometry.registers, 0
        sums = [0] * self.stages
        for product in self.products.values():
            for part in sorted(self._read[product.value]):
                product.columns[part] = product.features
                product.features += _up(self.share(part[1]), 2)
            product.features = _up(product.features, 16)
            product.tiles = product.features // 16
            width = product.value.args[0].width
            whole = width == product.exchange.row.width
            product.chunks = product.exchange.chunks if whole else -(-width // self.per_chunk)
            if self.alone:
                product.warps_k = warps // min(warps, _power(product.tiles))
            else:
                sharing = min(warps, self.geometry.warps_k, _power(product.chunks))
                product.warps_k = max(sharing, warps // _power(product.tiles))
            product.tiles_of_warp = -(-product.tiles // (warps // product.warps_k))
            product.chunks_of_warp = -(-product.chunks // product.warps_k)
            each = 8 * product.tiles_of_warp
            product.split = self.exact and 2 * each * product.chunks_of_warp <= budget
            each *= 1 + product.split
            product.in_registers = min(product.chunks_of_warp, budget // each)
            budget -= product.in_registers * each
            product.weights_at = shared
            rest = product.chunks_of_warp - product.in_registers
            shared += warps * product.tiles_of_warp * rest * 2 * 512
            stage = self.stage(product.value)
            product.sums_at = sums[stage]
            sums[stage] += product.warps_k * self.geometry.rows * product.stride
        self.weight_bytes, self.sum_floats = shared, max(sums, default=0)

    def products_in(self, stage: int) -> list[Product]:
        return [p for p in self.products.values() if self.stage(p.value) == stage]

    def reductions_in(self, stage: int) -> list[Value]:
        return [v for v in self.reductions if self.stage(v) == stage]

    def values(self) -> list[Value]:
        """All that is computed or read in a step."""
        return list(self._stages)


def without_thin_products(source: Source, builder: Builder) -> Source:
    """Products with a single row or column, as the sums and multiplications that they are."""
    given = set(source.given)
    new: dict[Value, Value] = {}
    roots = [*source.out, *source.sums, *(after for _, after in source.moves)]
    for v in ordered(roots, stop=given):
        args = [] if v in given else [new[a] for a in v.args]
        if v in given:
            new[v] = v
        elif v.op == "matmul" and 1 in (v.width, args[0].width):
            width = max(v.width, args[0].width)
            each = builder.mul(args[0], builder.make("constant", width=width, index=v.index[0]))
            new[v] = builder.make("sum", each, width=1) if v.width == 1 and width > 1 else each
        elif args == list(v.args):
            new[v] = v
        elif v.op == "slice":
            new[v] = builder.slice(args[0], v.index, v.width)
        else:
            new[v] = builder.make(v.op, *args, width=v.width, index=v.index)
    out, sums = tuple(new[v] for v in source.out), tuple(new[v] for v in source.sums)
    return replace(source, out=out, sums=sums, moves=tuple((before, new[after]) for before, after in source.moves))


def _up(a: int, b: int) -> int:
    return -(-a // b) * b


def _power(n: int) -> int:
    """The largest power of two that is not above n."""
    return 1 << (max(1, n).bit_length() - 1)
