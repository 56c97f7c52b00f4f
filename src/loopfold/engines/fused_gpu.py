"""FusedGPU: the loop compiled into one persistent kernel of a CUDA GPU, forwards and backwards."""

import ctypes
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from loopfold.engines.base import Engine, Recurrence
from loopfold.engines.compiled import compiled_refusal, run_compiled
from loopfold.engines.cuda import CudaCode, write_cuda
from loopfold.engines.cuda_plan import LOAD, TILE, Geometry, Plan, planned
from loopfold.engines.cuda_values import FORMATS
from loopfold.engines.kernel import Call
from loopfold.engines.programs import Program, alone, program_of
from loopfold.engines.writing import Buffer, Ran, Role, Source, Writer, Written, tf32
from loopfold.states import State, leaves
from loopfold.stepgraph.loop import Builder, ordered
from loopfold.stepgraph.ops import Kind

EXCHANGE_BYTES = 256 << 20  # of one launch; longer sequences take several
MOST_BYTES = 2 << 30  # of one value at one step, since a kernel counts them in 32 bits
MOST_SIZES = 64  # of runs, for which a kernel has everything prepared
REPLAYED = 1 << 25  # numbers that a run holds: so many are kept for a CUDA graph
OLDEST = (8, 0)  # compute capability: Ampere
SHAPES = [(8, 4, 8), *((rows, 8, warps_k) for rows in (8, 16, 32, 64) for warps_k in (8, 4, 2))]  # as Geometry has them


@dataclass(frozen=True)
class FusedGPU(Engine):
    """One CUDA kernel for the whole forward loop and one for the reverse loop, made from the step graph by NVRTC.

    Runs bfloat16, float16 and float32 on NVIDIA GPUs from Ampere on, with any number of state tensors, products in
    series, reductions over features, and unequal lengths; the weights must fit into the registers and the shared memory
    of the GPU. Kernels are kept on disk, as those of `FusedCPU`. Agrees with `Sequential` to rounding: sums are float32
    and taken in another order; products of float32 are exact to 2e-6, or TF32 where
    `torch.backends.cuda.matmul.allow_tf32` says so. Under torch.autocast, products are of its dtype.
    """

    def refusal(self, recurrence: Recurrence) -> str | None:
        leaf = leaves(recurrence.state)[0]
        if leaf.device.type != "cuda":
            return f"it runs on a CUDA GPU and the state is on {leaf.device}."
        if leaf.dtype not in FORMATS and leaf.dtype != torch.complex64:
            return f"it has kernels for bfloat16, float16 and float32, and got {leaf.dtype}."
        from loopfold.engines.driver import problem

        if torch.version.hip is not None or torch.cuda.get_device_capability(leaf.device) < OLDEST:
            return f"it needs an NVIDIA GPU of compute capability {OLDEST[0]}.{OLDEST[1]} or more."
        reason = compiled_refusal(recurrence) or problem(leaf.device)
        if reason is not None:
            return reason
        dtype = program_of(recurrence).program.loop.dtype
        return (
            self._writer().misfit(recurrence) if dtype in FORMATS else f"its loop is of {dtype}, which has no kernel."
        )

    def run(self, recurrence: Recurrence) -> State:
        _error(leaves(recurrence.state)[0].device)
        return run_compiled(self, self._writer(), recurrence)

    def code(self, recurrence: Recurrence) -> str:
        return self._writer().code(recurrence)

    def _writer(self) -> "GPUWriter":
        from loopfold.engines.driver import CudaLauncher

        return GPUWriter(CudaLauncher, None, not tf32())


class Launcher(Protocol):
    """Something that can run a kernel: the driver, or in tests an emulation."""

    def launch(self, blocks: int, args: Any, device: torch.device) -> None: ...

    def most_blocks(self, device: torch.device) -> int: ...


@dataclass(frozen=True)
class GPUWriter(Writer):
    """Writes kernels for `launcher`; the geometry is chosen for each, unless one is given."""

    launcher: Callable[[str, CudaCode], Launcher]
    geometry: Geometry | None = None
    exact: bool = True
    most_steps: int | None = None  # of one launch

    def write(self, name: str, source: Source, builder: Builder, dtype: torch.dtype) -> Written:
        return _OnGPU(name, source, builder, dtype, self)

    def gains_by_replay(self, program: Program, steps: int, batch: int) -> bool:
        return steps * batch * program.numbers <= REPLAYED  # what takes longer does not wait for Python

    def misfit(self, recurrence: Recurrence) -> str | None:
        """Why a step of the loop language does not fit the GPU; found out once for each batch."""
        program, state = program_of(recurrence).program, leaves(recurrence.state)[0]
        key = ("misfit", self, state.shape[0], state.device, state.dtype, recurrence.lengths is None)
        if key not in program.made:
            reason = None
            for kernel in self.both_ways(recurrence):
                assert isinstance(kernel, _OnGPU)
                reason = reason or kernel.misfit(state)
            program.made[key] = reason
        return program.made[key]


class _OnGPU(Written):
    """A source, and the kernels that were made for it."""

    def __init__(self, name: str, source: Source, builder: Builder, dtype: torch.dtype, writer: GPUWriter) -> None:
        self.name, self.source, self.builder, self.dtype, self.writer = name, source, builder, dtype, writer
        rows = [*source.out, *source.sums, *(v for move in source.moves for v in move)]
        self.widest = max(v.width for v in ordered(rows))
        computed = ordered(rows, stop=source.given)
        self.has_parts = any(
            v.op in ("take", "context", "row") or (v.kind is Kind.REDUCTION and v.width > 1) for v in computed
        )
        self.kernels: dict[tuple[Geometry, bool], _Kernel] = {}
        self.choices: dict[tuple[int, torch.device], Geometry | None] = {}
        self.known: dict[Any, float | None] = {}

    def misfit(self, state: Tensor) -> str | None:
        """Why it does not fit the GPU, for such a state."""
        if self.has_parts:
            return (
                "it computes with heads, matrices, parts of rows, rows of a table or a context, for which it has no "
                "kernel yet."
            )
        try:
            geometry = self.geometry(state)
        except RecursionError:
            return "its step is too long for one kernel."
        if geometry is None:
            return "it does not fit into the registers and the shared memory of the GPU."
        if len(state) * self.widest * self.dtype.itemsize >= MOST_BYTES:
            return f"one step of its batch has more than {MOST_BYTES >> 30} GiB."
        return None

    def geometry(self, like: Tensor) -> Geometry | None:
        """How the work is shared out, for a batch such as that of `like`; None: it does not fit."""
        key = len(like), like.device
        if self.writer.geometry is not None:
            return self.writer.geometry
        if key not in self.choices:
            with alone():
                self.choices[key] = choose(self.source, self.builder, self.dtype, self.writer.exact, *key, self.known)
        return self.choices[key]

    def _kernel(self, like: Tensor) -> "_Kernel":
        geometry = self.geometry(like)
        assert geometry is not None
        key = geometry, len(like) % geometry.rows == 0
        if key not in self.kernels:
            with alone():
                if key not in self.kernels:
                    code = write_cuda(self.source, self.builder, self.dtype, geometry, self.writer.exact, key[1])
                    self.kernels[key] = _Kernel(code, self.writer.launcher(self.name, code), self.writer.most_steps)
        return self.kernels[key]

    def code(self, state: Tensor) -> str:
        return f"// {self.name}\n{self._kernel(state).code.text}"

    def run(self, call: Call, buffers: dict[Buffer, Tensor]) -> Ran:
        source, like = self.source, next(iter(buffers.values()))
        out = [like.new_empty(call.steps, call.batch, v.width) for v in source.out]
        sums = [like.new_zeros(call.batch, v.width, dtype=torch.float32) for v in source.sums]
        for role, tensors in ((Role.OUT, out), (Role.SUM, sums)):
            for i, t in enumerate(tensors):
                buffers[Buffer(role, i)] = t
        moved = self._kernel(like).run(call, buffers)
        return Ran(out, moved, [t.sum(0).to(like.dtype) for t in sums])


class _Kernel:
    """A kernel that can be launched. What depends on sizes alone is made once; a call fills in addresses."""

    def __init__(self, code: CudaCode, launcher: Launcher, most_steps: int | None) -> None:
        self.code, self.launcher, self.most_steps = code, launcher, most_steps
        table, matrices = enumerate(code.table), max(1, len(code.matrices))
        self.Args = struct.Struct(f"{max(1, len(code.table))}Q{2 * matrices}qQQ5i4x")  # as in the kernel's text
        by_role: dict[Role, list[tuple[int, Buffer]]] = {role: [] for role in Role}
        for i, buffer in table:
            by_role[buffer.role].append((i, buffer))
        self.exchanged = by_role[Role.EXCHANGE] + by_role[Role.PARTIAL]
        self.carries, self.carried = by_role[Role.CARRY], by_role[Role.CARRIED]
        self.made = by_role[Role.OUT] + by_role[Role.SUM]
        in_place = {buffer.index for buffer in code.matrices}  # read where they are, by their strides
        constants = by_role[Role.CONSTANT]
        self.matrices = [(i, b) for i, b in constants if b.index in in_place]
        own = (Role.CONSTANT, Role.EXCHANGE, Role.PARTIAL, Role.CARRY, Role.CARRIED, Role.OUT, Role.SUM)
        self.given = [(i, b) for role, found in by_role.items() if role not in own for i, b in found]
        self.given += [(i, b) for i, b in constants if b.index not in in_place]
        self.strides = [(Buffer(Role.CONSTANT, b.index), b.transposed) for b in code.matrices]
        self.widths = [after.width for before, after in code.plan.source.moves if before.op == "carry"]
        self.sizes: dict[tuple[int, int, torch.device], _Sizes] = {}

    def _sizes(self, steps: int, batch: int, device: torch.device) -> "_Sizes":
        key = (steps, batch, device)
        if key not in self.sizes:
            if len(self.sizes) == MOST_SIZES:
                self.sizes.clear()
            self.sizes[key] = self._new_sizes(*key)
        return self.sizes[key]

    def _new_sizes(self, steps: int, batch: int, device: torch.device) -> "_Sizes":
        geometry, exchanges = self.code.plan.geometry, list(self.code.plan.exchanges.values())
        groups = -(-batch // geometry.rows)

        def words(steps: int) -> list[int]:
            """How many are exchanged in so many steps, of each buffer; whole cache lines."""
            found = []
            for _, b in self.exchanged:
                if b.role is Role.PARTIAL:
                    count = steps * batch * geometry.blocks
                else:
                    count = (steps + exchanges[b.index].lags) * groups * exchanges[b.index].slot_bytes // 4
                found.append(-(-count // 32) * 32)
            return found

        most = self.most_steps or max(1, min(steps, EXCHANGE_BYTES // max(1, 4 * sum(words(1)))))
        times = [(first, min(steps, first + most)) for first in range(0, steps, most)]
        at_once = max(1, self.launcher.most_blocks(device) // geometry.blocks)
        parts = [(g, min(at_once, groups - g) * geometry.blocks) for g in range(0, groups, at_once)]
        if self.code.plan.source.backwards:
            times.reverse()
        return _Sizes(groups, [(first, last, words(last - first)) for first, last in times], parts)

    def run(self, call: Call, buffers: dict[Buffer, Tensor]) -> list[Tensor]:
        """Run over all steps, in one launch or several; returns the carries after the last, in float32."""
        like, batch = next(iter(buffers.values())), call.batch
        device = like.device
        sizes = self._sizes(call.steps, batch, device)
        held = [_placed(buffers[b], device) for _, b in self.given]
        lengths = None if call.lengths is None else call.lengths.to(device, torch.int64).contiguous()
        pointers = [0] * max(1, len(self.code.table))
        for (i, _), t in zip(self.given, held, strict=True):
            pointers[i] = t.data_ptr()
        for i, b in self.made:
            pointers[i] = buffers[b].data_ptr()
        matrices = {b: buffers[b].to(device, self.code.plan.dtype) for _, b in self.matrices}
        for i, b in self.matrices:
            pointers[i] = matrices[b].data_ptr()
        strides = [matrices[b].stride() for b, _ in self.strides]
        strides = [s[::-1] if turned else s for s, (_, turned) in zip(strides, self.strides, strict=True)] or [(0, 0)]
        rest = (*(s[0] for s in strides), *(s[1] for s in strides), 0 if lengths is None else lengths.data_ptr())
        error, args = _error(device), ctypes.create_string_buffer(self.Args.size)
        rows: list[Tensor] = []
        for first, last, words in sizes.launches:
            exchange, at = torch.full((sum(words),), -1, dtype=torch.int32, device=device), 0
            for (i, _), count in zip(self.exchanged, words, strict=True):
                pointers[i] = exchange.data_ptr() + 4 * at
                at += count
            for i, b in self.carries:  # before the first step there is none: they are zero
                pointers[i] = rows[b.index].data_ptr() if rows else 0
            held += rows
            rows = [like.new_empty(batch, w, dtype=torch.float32) for w in self.widths]  # blocks end at their own times
            for i, b in self.carried:
                pointers[i] = rows[b.index].data_ptr()
            for group, blocks in sizes.parts:
                self.Args.pack_into(args, 0, *pointers, *rest, error, first, last, batch, sizes.groups, group)
                self.launcher.launch(blocks, args, device)
        return rows


class _Sizes(NamedTuple):
    """What a run of so many steps and sequences needs."""

    groups: int
    launches: list[tuple[int, int, list[int]]]  # first and last step, words of each exchange
    parts: list[tuple[int, int]]  # the first group of those that run at the same time, and their blocks


def _placed(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor as a kernel can read it: on its device, and at an address of whole loads."""
    if tensor.device != device:
        tensor = tensor.to(device)
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % LOAD else tensor


_errors: dict[torch.device, tuple[Tensor, ctypes.c_int]] = {}  # of each device: memory of the host, that it can write


def _error(device: torch.device) -> int:
    """The address of the word that a kernel sets where it gives up; the next call on that device raises an error."""
    if device not in _errors:
        memory = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        _errors[device] = memory, ctypes.c_int.from_address(memory.data_ptr())
    memory, word = _errors[device]
    if word.value:
        word.value = 0
        raise RuntimeError(
            "a kernel of an earlier call waited for numbers that did not come, so its results are wrong: throw them "
            "away. If it happens again, use engine=lf.Looped()."
        )
    return memory.data_ptr()


# ------------------------------------------------------------------ how the work is shared out


def choose(
    source: Source,
    builder: Builder,
    dtype: torch.dtype,
    exact: bool,
    batch: int,
    device: torch.device,
    known: dict[Any, float | None] | None = None,
) -> Geometry | None:
    """The geometry that should be fastest, by a rough model of the GPU; None where none fits.

    `known` is what was found out for other batches: the microseconds of each geometry, None where it does not fit.
    """
    about: Any = torch.cuda.get_device_properties(device)
    known, found = {} if known is None else known, []
    for blocks in planned(source, builder, dtype, Geometry(1, TILE), exact).busy_blocks(about.multi_processor_count):
        for rows, warps, warps_k in SHAPES:
            if rows > TILE and rows >= 2 * batch:
                break
            if blocks == 1 and warps_k < 8:  # which changes nothing there
                continue
            geometry = Geometry(blocks, rows, warps, warps_k)
            if (geometry, device) not in known:
                plan = planned(source, builder, dtype, geometry, exact)
                fits = plan.shared_bytes <= about.shared_memory_per_block_optin
                fits = fits and max(plan.pairs(v.width) for v in plan.values()) <= 4
                known[geometry, device] = _microseconds(plan) if fits else None
            time = known[geometry, device]
            if time is not None:
                waves = -(-batch // rows) / max(1, about.multi_processor_count // blocks)
                found.append((math.ceil(waves) * time, geometry))
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _microseconds(plan: Plan) -> float:
    """What a step takes, roughly, by figures fitted to 900 kernels on an H200; they only decide which one is made.

    Of as many sequences as run at the same time.
    """
    geometry, tiles = plan.geometry, plan.geometry.rows / TILE
    stages = len({plan.stage(p.value) for p in plan.products.values()} | {plan.stage(v) for v in plan.reductions})
    time = stages * (0.07 if plan.alone else 0.34 if geometry.blocks <= 4 else 0.42)  # until what is written is read
    busy = geometry.warps / 4  # warps that take turns
    for p in plan.products.values():
        multiplied = 2 * p.chunks_of_warp * p.tiles_of_warp
        time += 0.0057 * busy * tiles * multiplied * (3 if plan.exact else 1)
        time += 0.017 * busy * multiplied if plan.exact and not p.split else 0.0
        time += 0.0 if plan.alone else 0.06 * tiles * p.chunks_of_warp  # rows, read from the exchange
        time += 0.012 * p.warps_k * sum(plan.pairs(width) for _, width in p.columns)  # warps' sums, added up
    time += 0.011 * sum(plan.pairs(v.width) for v in plan.values() if v.is_pointwise and v.width > 1)
    time *= 1.1 if geometry.warps_k < geometry.warps else 1.0  # for such kernels the figures were not fitted
    return time
