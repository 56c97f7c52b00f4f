"""The whole loop as one persistent CUDA kernel: its text.

Every block runs all steps. Rows that all blocks of a group need are *exchanged* without barrier, flag or fence: the
memory of each step's rows is filled with ones beforehand, owners write their parts, readers load until no word is all
ones. Weights stay in registers and shared memory.
"""

from dataclasses import dataclass

import torch

from loopfold.engines.cuda_plan import Geometry, Piece, Plan, planned
from loopfold.engines.cuda_products import Products
from loopfold.engines.cuda_values import FORMATS, literal
from loopfold.engines.writing import Buffer, Role, Source
from loopfold.stepgraph.loop import Builder, Value
from loopfold.stepgraph.ops import OPS


def _joined(v: Value) -> str:
    """Of a reduction: what it makes of two numbers x and y."""
    return OPS[v.op].c.format("x", "y")


def _start(v: Value) -> str:
    start = OPS[v.op].start
    assert start is not None, v.op
    return literal(start)


@dataclass(frozen=True, eq=False)
class CudaCode:
    """A kernel as CUDA C++: `kernel(Args)`."""

    text: str
    table: list[Buffer]  # the pointers in `Args`, in order
    matrices: list[Buffer]  # whose strides are in `Args`
    plan: Plan


def write_cuda(
    source: Source, builder: Builder, dtype: torch.dtype, geometry: Geometry, exact: bool, whole: bool
) -> CudaCode:
    """Write the kernel. `exact`: float32 products by three of TF32 each; `whole`: every group has all its sequences."""
    return _Kernel(planned(source, builder, dtype, geometry, exact), dtype, whole).code()


class _Kernel(Products):
    def __init__(self, plan: Plan, dtype: torch.dtype, whole: bool) -> None:
        super().__init__(plan, dtype, whole)
        for stage in range(plan.stages):
            self._stage(stage)
        self.update_moving()

    def _stage(self, stage: int) -> None:
        """Products and reductions; then pointwise operations, and of these first what others wait for."""
        plan, body = self.plan, self.body
        products, reductions = plan.products_in(stage), plan.reductions_in(stage)
        body.append(f"// stage {stage}")
        if self.alone and (products or reductions or stage in plan.fetches):
            body.append("__syncthreads();")
        if products:
            body.append("turn ^= 1;")  # sums have two places, so that one barrier is enough
        for product in products:
            self.product(product)
        if reductions and not self.alone:
            self._collect(reductions)
        if products or (reductions and not self.alone):
            body.append("__syncthreads();")
        for product in products:
            self.take_sums(product)
        for exchange in plan.exchanges.values():
            for piece in exchange.pieces:
                if plan.stage(piece.value) == stage:
                    self.publish(exchange, piece)
        self._reduce(plan.reductions_in(stage + 1))
        self.load_ahead()
        for index, v in enumerate(self.source.out):
            for piece in plan.pieces(v):
                if plan.stage(piece.value) == stage:
                    self._store(index, v.width, piece)
        for index, v in enumerate(self.source.sums):
            for piece in plan.pieces(v):
                if plan.stage(piece.value) == stage:
                    self._add(index, v.width, piece)
        self.load_ahead()

    def _store(self, index: int, width: int, piece: Piece) -> None:
        out = self.buffer(Role.OUT, index)
        for n in self.own(piece.value.width):
            a, b = self.alive(n, *self.value(piece.value, n))
            within = f"row_{n} * {width * self.bytes} + ({piece.start} + u_{n}) * {self.bytes}"
            at = f"{out} + (size_t)t * {self.step_bytes(width)} + ({within})"
            put = f"store_pair({at}, {a}, {b});"
            if n.w % 2 or width % 2 or piece.start % 2:
                put = f"store_one({at}, {a}); if (two_{n}) store_one({at} + {self.bytes}, {b});"
            self.body.append(f"if (own_{n}) {{ {put} }}")

    def _add(self, index: int, width: int, piece: Piece) -> None:
        """A sum over steps, for each sequence by itself."""
        for n in self.own(piece.value.width):
            name = f"sum{index}_{piece.start}_{n.i}"
            a, b = self.alive(n, *self.value(piece.value, n))
            self.once.append(f"Pair {name} = {{0.f, 0.f}};")
            self.body.append(f"{name}.a += {a}; {name}.b += {b};")
            at = f"((float*){self.buffer(Role.SUM, index)} + row_{n} * {width} + {piece.start} + u_{n})"
            self.end.append(f"if (own_{n}) {{ {at}[0] += {name}.a; if (two_{n}) {at}[1] += {name}.b; }}")

    # ---- reductions

    def _reduce(self, reductions: list[Value]) -> None:
        """Each thread's numbers of a row are joined, then those of the block; other blocks get the result."""
        rows, warps, at = self.geometry.rows, self.geometry.warps, 0
        starts = []
        for v in reductions:
            slots, slot = self.plan.slots(v), 0
            for piece in self.plan.pieces(v.args[0]):
                w = piece.value.width
                for n in self.own(w):
                    a, b = self.value(piece.value, n)
                    x, y = f"own_{n} ? {a} : {_start(v)}", f"own_{n} && two_{n} ? {b} : {_start(v)}"
                    to = f"partial + ({at + slot} + r_{n} * {slots}" + (")" if w == 1 else f" + l_{n} / 2)") + " * 4"
                    self.body.append(f"if (here_{n}) {{ const float x = {x}, y = {y};")
                    self.body.append(f"  to_shared4({to}, __float_as_uint({_joined(v)})); }}")
                slot += 1 if w == 1 else self.plan.share(w) // 2
            starts.append(at)
            at += rows * slots
        if reductions:
            self.body.append("__syncthreads();")
        for v, start in zip(reductions, starts, strict=True):
            k, slots = self.plan.reductions.index(v), self.plan.slots(v)
            number = f"__uint_as_float(shared4(partial + ({start} + r * {slots} + l) * 4))"
            self.body.append(f"for (int r = warp; r < rows; r += {warps}) {{ float x = {_start(v)}, y;")
            self.body.append(f"  for (int l = lane; l < {slots}; l += 32) {{ y = {number}; x = {_joined(v)}; }}")
            self._across_lanes(v)
            if self.alone:
                self.body.append(f"  if (lane == 0) to_shared4(reduced + ({k * rows} + r) * 4, __float_as_uint(x)); }}")
            else:
                self.body.append(f"  if (lane == 0) exchange4({self._part(k)} + p * 4, word(x)); }}")

    def _part(self, k: int) -> str:
        """The blocks' parts of a reduction, of row r at this step."""
        blocks = self.geometry.blocks
        return f"{self.buffer(Role.PARTIAL, k)} + ((size_t)it * A.batch + row0 + r) * {4 * blocks}"

    def _collect(self, reductions: list[Value]) -> None:
        """The parts of all blocks."""
        for v in reductions:
            k, rows = self.plan.reductions.index(v), self.geometry.rows
            self.body += [
                f"for (int r = warp; r < rows; r += {self.geometry.warps}) {{ float x = {_start(v)}, y;",
                f"  const char* from = {self._part(k)};",
                f"  for (int l = lane; l < {self.geometry.blocks}; l += 32) {{ u32 z, looks = 0;",
                "    while ((z = exchanged4(from + l * 4)) == MISSING && WAIT(looks)) { YIELD }",
                f"    y = __uint_as_float(z); x = {_joined(v)}; }}",
                "  __syncwarp();",
            ]
            self._across_lanes(v)
            self.body.append(f"  if (lane == 0) to_shared4(reduced + ({k * rows} + r) * 4, __float_as_uint(x)); }}")

    def _across_lanes(self, v: Value) -> None:
        self.body.append("  #pragma unroll")
        self.body.append("  for (int m = 16; m; m >>= 1) {")
        self.body.append(f"    y = __shfl_xor_sync(0xffffffffu, x, m); x = {_joined(v)}; }}")

    # ---- the whole

    def code(self) -> CudaCode:
        geometry, plan, backwards = self.geometry, self.plan, self.source.backwards
        first = list(self.publish_first())
        matrices = [Buffer(Role.CONSTANT, *product.value.index) for product in plan.products.values()]
        count, strides = max(1, len(self.table)), max(1, len(matrices))
        begin, time, following = (
            ("A.last - 1", "A.last - 1 - it", "t - 1") if backwards else ("A.first", "A.first + it", "t + 1")
        )
        lines = [
            f"#define THREADS {geometry.threads}",
            f"#define FORMAT {FORMATS[plan.dtype]}",
            f"#define STORED {FORMATS[self.dtype]}",
            '#include "prelude.cuh"',
            f"struct Args {{ char* p[{count}]; long long stride_k[{strides}], stride_f[{strides}];",
            "  const long long* lengths; volatile int* error; int first, last, batch, groups, group; };",
            *self.functions,
            "KERNEL kernel(const Args A) {",
            "SHARED",
            "const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, gq = lane >> 2, tq = lane & 3;",
            f"const int p = blockIdx.x % {geometry.blocks}, group = A.group + blockIdx.x / {geometry.blocks};",
            f"const int row0 = group * {geometry.rows}, steps = A.last - A.first;",
            f"const int rows = A.batch - row0 < {geometry.rows} ? A.batch - row0 : {geometry.rows};",
            f"const u32 base = address(shared), sums = base + {plan.sums_at};",
            f"const u32 partial = base + {plan.partial_at}, reduced = base + {plan.reduced_at};",
            "bool lost = false; int turn = 0; u32 since = cycles();",
            *(f"char* const {b.role.name.lower()}_{b.index} = A.p[{i}];" for i, b in enumerate(self.table)),
            *(line for declared in self.owned.values() for line in declared),
            *self.once,
            *(f"{kind} {name} = {{}};" for kind, name, _ in self.leaves),
        ]
        if self.alone:  # what nobody writes is zero
            lines.append(
                f"for (int z = {plan.exchanged_at} + tid * 4; z < {plan.shared_bytes}; z += {geometry.threads * 4})"
            )
            lines += ["  to_shared4(base + z, 0);", "__syncthreads();"]
        lines += [*first, *(load.replace("(T)", f"({begin})") for _, _, load in self.leaves), "__syncthreads();"]
        lines += ["for (int it = 0; it < steps; ++it) {", f"const int t = {time}, following = {following};"]
        lines += [*self.body, "}", *self.end, "}", ""]
        return CudaCode("\n".join(lines), self.table, matrices, plan)
