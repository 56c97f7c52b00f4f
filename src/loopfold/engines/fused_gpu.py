"""FusedGPU: the loop compiled into one persistent kernel of a CUDA GPU, forwards and backwards."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from loopfold.engines.base import Engine, Recurrence
from loopfold.engines.compiled import compiled_refusal, run_compiled
from loopfold.engines.cuda import CudaCode, write_cuda
from loopfold.engines.cuda_plan import LOAD, TILE, Geometry, Plan
from loopfold.engines.cuda_values import FORMATS
from loopfold.engines.kernel import Call
from loopfold.engines.programs import alone
from loopfold.engines.writing import Buffer, Ran, Role, Source, Writer, Written
from loopfold.states import State, leaves
from loopfold.stepgraph.loop import Builder, ordered
from loopfold.stepgraph.ops import Kind

EXCHANGE_BYTES = 256 << 20  # of one launch; longer sequences take several
MOST_BYTES = 2 << 30  # of one value at one step, since a kernel counts them in 32 bits
OLDEST = (8, 0)  # compute capability: Ampere


@dataclass(frozen=True)
class FusedGPU(Engine):
    """One CUDA kernel for the whole forward loop and one for the reverse loop, made from the step graph by NVRTC.

    Runs bfloat16, float16 and float32 on NVIDIA GPUs from Ampere on, with any number of state tensors, products in
    series, reductions over features, and unequal lengths; the weights must fit into the registers and the shared memory
    of the GPU. Kernels are kept on disk, as those of `FusedCPU`. Agrees with `Sequential` to rounding: sums are float32
    and taken in another order; products of float32 are exact to 2e-6, or TF32 where
    `torch.backends.cuda.matmul.allow_tf32` says so.
    """

    def refusal(self, recurrence: Recurrence) -> str | None:
        leaf = leaves(recurrence.state)[0]
        if leaf.device.type != "cuda":
            return f"it runs on a CUDA GPU and the state is on {leaf.device}."
        if leaf.dtype not in FORMATS:
            return f"it has kernels for bfloat16, float16 and float32, and got {leaf.dtype}."
        from loopfold.engines.driver import problem

        if torch.version.hip is not None or torch.cuda.get_device_capability(leaf.device) < OLDEST:
            return f"it needs an NVIDIA GPU of compute capability {OLDEST[0]}.{OLDEST[1]} or more."
        reason = compiled_refusal(recurrence) or problem(leaf.device)
        return self._writer().misfit(recurrence) if reason is None else reason

    def run(self, recurrence: Recurrence) -> State:
        return run_compiled(self, self._writer(), recurrence)

    def code(self, recurrence: Recurrence) -> str:
        return self._writer().code(recurrence)

    def _writer(self) -> "GPUWriter":
        from loopfold.engines.driver import CudaLauncher

        return GPUWriter(CudaLauncher, None, not _tf32())


def _tf32() -> bool:
    """Whether the user lets products of float32 be those of TF32, in either of the ways in which torch is told so."""
    matmul: Any = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", "none")
    return matmul.allow_tf32 if precision == "none" else precision == "tf32"


class Launcher(Protocol):
    """Something that can run a kernel: the driver, or in tests an emulation."""

    def launch(self, blocks: int, args: ctypes.Structure, like: Tensor) -> None: ...

    def most_blocks(self, like: Tensor) -> int: ...


@dataclass(frozen=True)
class GPUWriter(Writer):
    """Writes kernels for `launcher`; the geometry is chosen for each, unless one is given."""

    launcher: Callable[[str, CudaCode], Launcher]
    geometry: Geometry | None = None
    exact: bool = True
    most_steps: int | None = None  # of one launch

    def write(self, name: str, source: Source, builder: Builder, dtype: torch.dtype) -> Written:
        return _OnGPU(name, source, builder, dtype, self)

    def misfit(self, recurrence: Recurrence) -> str | None:
        """Why a step of the loop language does not fit the GPU."""
        state = leaves(recurrence.state)[0]
        for kernel in self.both_ways(recurrence):
            assert isinstance(kernel, _OnGPU)
            if kernel.has_parts:
                return "it computes with heads, matrices, parts of rows or a context, for which it has no kernel yet."
            try:
                geometry = kernel.geometry(state)
            except RecursionError:
                return "its step is too long for one kernel."
            if geometry is None:
                return "it does not fit into the registers and the shared memory of the GPU."
            if len(state) * kernel.widest * state.element_size() >= MOST_BYTES:
                return f"one step of its batch has more than {MOST_BYTES >> 30} GiB."
        return None


class _OnGPU(Written):
    """A source, and the kernels that were made for it."""

    def __init__(self, name: str, source: Source, builder: Builder, dtype: torch.dtype, writer: GPUWriter) -> None:
        self.name, self.source, self.builder, self.dtype, self.writer = name, source, builder, dtype, writer
        rows = [*source.out, *source.sums, *(v for move in source.moves for v in move)]
        self.widest = max(v.width for v in ordered(rows))
        computed = ordered(rows, stop=source.given)
        self.has_parts = any(
            v.op in ("take", "context") or (v.kind is Kind.REDUCTION and v.width > 1) for v in computed
        )
        self.kernels: dict[tuple[Geometry, bool], _Kernel] = {}
        self.choices: dict[tuple[int, torch.device], Geometry | None] = {}

    def geometry(self, like: Tensor) -> Geometry | None:
        """How the work is shared out, for a batch such as that of `like`; None: it does not fit."""
        key = len(like), like.device
        if self.writer.geometry is not None:
            return self.writer.geometry
        if key not in self.choices:
            with alone():
                self.choices[key] = choose(self.source, self.builder, self.dtype, *key)
        return self.choices[key]

    def _kernel(self, like: Tensor) -> "_Kernel":
        geometry = self.geometry(like)
        assert geometry is not None
        key = geometry, len(like) % geometry.rows == 0
        if key not in self.kernels:
            with alone():
                if key not in self.kernels:
                    code = write_cuda(self.source, self.builder, self.dtype, geometry, self.writer.exact, key[1])
                    self.kernels[key] = _Kernel(code, self.writer.launcher(self.name, code))
        return self.kernels[key]

    def code(self, state: Tensor) -> str:
        return f"// {self.name}\n{self._kernel(state).code.text}"

    def run(self, call: Call, buffers: dict[Buffer, Tensor]) -> Ran:
        source, like = self.source, next(iter(buffers.values()))
        out = [like.new_empty(call.steps, call.batch, v.width) for v in source.out]
        carried = [after.width for before, after in source.moves if before.op == "carry"]
        widths = [*carried, *(v.width for v in source.sums)]
        zeros = like.new_zeros(sum(widths) * call.batch, dtype=torch.float32).split([w * call.batch for w in widths])
        rows = [part.view(call.batch, width) for part, width in zip(zeros, widths, strict=True)]
        moved, sums = rows[: len(carried)], rows[len(carried) :]
        for role, tensors in ((Role.OUT, out), (Role.SUM, sums)):
            buffers |= {Buffer(role, i): t for i, t in enumerate(tensors)}
        moved = self._kernel(like).run(call, buffers, moved, source.backwards, self.writer.most_steps)
        return Ran(out, [t.to(like.dtype) for t in moved], [t.sum(0).to(like.dtype) for t in sums])


class _Kernel:
    """A kernel that can be launched."""

    def __init__(self, code: CudaCode, launcher: Launcher) -> None:
        self.code, self.launcher = code, launcher
        pointers, matrices = max(1, len(code.table)), max(1, len(code.matrices))
        fields = [("p", ctypes.c_void_p * pointers), ("stride_k", ctypes.c_longlong * matrices)]
        fields += [("stride_f", ctypes.c_longlong * matrices), ("lengths", ctypes.c_void_p), ("error", ctypes.c_void_p)]
        fields += [(name, ctypes.c_int) for name in ("first", "last", "batch", "groups", "group")]
        self.Args: Any = type("Args", (ctypes.Structure,), {"_fields_": fields})
        self.at = {buffer: i for i, buffer in enumerate(code.table)}
        self.own = [buffer for buffer in code.table if buffer.role in (Role.EXCHANGE, Role.PARTIAL)]
        self.exchanges = list(code.plan.exchanges.values())
        self.matrices = {buffer.index for buffer in code.matrices}  # those come with their strides

    def _words(self, buffer: Buffer, steps: int, batch: int, groups: int) -> int:
        """How many words are exchanged in so many steps."""
        if buffer.role is Role.PARTIAL:
            return steps * batch * self.code.plan.geometry.blocks
        lags = self.exchanges[buffer.index].lags
        return (steps + lags) * groups * self.exchanges[buffer.index].slot_bytes // 4

    def run(
        self,
        call: Call,
        buffers: dict[Buffer, Tensor],
        carries: list[Tensor],
        backwards: bool,
        most_steps: int | None,
    ) -> list[Tensor]:
        """Run over all steps, in one launch or several; returns the carries after the last."""
        code, geometry = self.code, self.code.plan.geometry
        like = next(iter(buffers.values()))
        groups = -(-call.batch // geometry.rows)
        if most_steps is None:
            each = 4 * sum(self._words(b, 1, call.batch, groups) for b in self.own)
            most_steps = max(1, min(call.steps, EXCHANGE_BYTES // max(1, each)))
        error = _error(like.device)
        args, held = self.Args(), []
        for buffer, i in self.at.items():
            if buffer in buffers:
                held.append(self._placed(buffer, buffers[buffer], like))
                args.p[i] = held[-1].data_ptr()
        for i, buffer in enumerate(code.matrices):
            matrix = buffers[Buffer(Role.CONSTANT, buffer.index)]
            args.stride_k[i], args.stride_f[i] = matrix.stride()[::-1] if buffer.transposed else matrix.stride()
        lengths = None if call.lengths is None else call.lengths.to(like.device, torch.int64).contiguous()
        args.lengths = 0 if lengths is None else lengths.data_ptr()
        args.error, args.batch, args.groups = error.data_ptr(), call.batch, groups
        at_once = max(1, self.launcher.most_blocks(like) // geometry.blocks)
        times = [(a, min(call.steps, a + most_steps)) for a in range(0, call.steps, most_steps)]
        for args.first, args.last in reversed(times) if backwards else times:
            steps = args.last - args.first
            words = [self._words(b, steps, call.batch, groups) for b in self.own]
            sizes = [-(-count // 32) * 32 for count in words]  # whole cache lines
            exchange = torch.full((sum(sizes),), -1, dtype=torch.int32, device=like.device)
            for buffer, part in zip(self.own, exchange.split(sizes), strict=True):
                args.p[self.at[buffer]] = part.data_ptr()
            after = [torch.empty_like(row) for row in carries]  # not in place: blocks start and end at their own times
            for role, rows in ((Role.CARRY, carries), (Role.CARRIED, after)):
                for i, row in enumerate(rows):
                    if Buffer(role, i) in self.at:
                        args.p[self.at[Buffer(role, i)]] = row.data_ptr()
            for args.group in range(0, groups, at_once):
                self.launcher.launch(min(at_once, groups - args.group) * geometry.blocks, args, like)
            held, carries = [*held, *carries], after
        return carries

    def _placed(self, buffer: Buffer, tensor: Tensor, like: Tensor) -> Tensor:
        """A tensor as a kernel can read it: on its device, and at an address of whole loads. What it writes is ours."""
        if buffer.role in (Role.OUT, Role.SUM):
            return tensor
        if buffer.role is Role.CONSTANT:
            tensor = tensor.to(like.device)
            if buffer.index in self.matrices:
                return tensor
        tensor = tensor.contiguous()
        return tensor.clone() if tensor.data_ptr() % LOAD else tensor


_errors: dict[torch.device, Tensor] = {}  # a word of each device, in memory of the host, that its kernels can write


def _error(device: torch.device) -> Tensor:
    """The word that a kernel sets where it has given up; the next call on that device raises an error."""
    if device not in _errors:
        _errors[device] = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
    if int(_errors[device]):
        _errors[device].zero_()
        raise RuntimeError(
            "a kernel of an earlier call waited for numbers that did not come, so its results are wrong: throw them "
            "away. If it happens again, use engine=lf.Looped()."
        )
    return _errors[device]


# ------------------------------------------------------------------ how the work is shared out


def choose(source: Source, builder: Builder, dtype: torch.dtype, batch: int, device: torch.device) -> Geometry | None:
    """The geometry that should be fastest, by a rough model of the GPU; None where none fits."""
    about: Any = torch.cuda.get_device_properties(device)
    found = []
    for rows in (8, 16, 32, 64):
        if rows > TILE and rows >= 2 * batch:
            break
        for blocks in (1, 2, 4, 8, 16, 32, 64, 128):
            if blocks > about.multi_processor_count:
                break
            plan = Plan(source, builder, dtype.itemsize, Geometry(blocks, rows))
            pairs = max(plan.pairs(v.width) for v in plan.values())
            if plan.shared_bytes <= about.shared_memory_per_block_optin and pairs <= 4:
                found.append((_microseconds(plan, batch, about.multi_processor_count), blocks, rows))
    return Geometry(*min(found)[1:]) if found else None


def _microseconds(plan: Plan, batch: int, multiprocessors: int) -> float:
    """What a step takes, roughly. The figures were fitted to an H200; they only decide which geometry is taken."""
    geometry, tiles = plan.geometry, plan.geometry.rows / TILE
    groups = -(-batch // geometry.rows)
    waves = -(-groups // max(1, multiprocessors // geometry.blocks))
    stages = len({plan.stage(p.value) for p in plan.products.values()} | {plan.stage(v) for v in plan.reductions})
    exchange = stages * (0.25 if plan.alone else 0.7 + 0.001 * geometry.blocks)
    work = 0.0
    for p in plan.products.values():
        work += tiles * p.chunks_of_warp * (0.01 + 0.008 * p.tiles_of_warp)
        work += 0.02 * (p.chunks_of_warp - p.in_registers) * p.tiles_of_warp  # weights out of shared memory
    pairs = sum(plan.pairs(v.width) for v in plan.values() if v.is_pointwise and v.width > 1)
    return waves * (exchange + work + 0.004 * pairs)
