"""FusedCPU: the loop compiled into native code, forwards and backwards, with no compiler on the user's machine."""

import ctypes
import functools
import itertools
import math
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopfold.engines import cache
from loopfold.engines.base import Engine, Recurrence
from loopfold.engines.compiled import compiled_refusal, run_compiled
from loopfold.engines.kernel import Call
from loopfold.engines.programs import alone, program_of
from loopfold.engines.writing import Buffer, Ran, Role, Source, Writer, Written
from loopfold.states import State, leaves, whole_number
from loopfold.stepgraph.graph import Unsound
from loopfold.stepgraph.loop import Builder, Value

if TYPE_CHECKING:
    from loopfold.engines.native import Code
    from loopfold.engines.rows import Shape

OPTIMISE = 3  # how long LLVM thinks about a kernel, from 0 to 3


@dataclass(frozen=True)
class FusedCPU(Engine):
    """One native kernel for the whole forward loop and one for the reverse loop, made from the step graph by LLVM.

    Runs float32 and float64 on the CPU, any number of state tensors, products in series, reductions over features, and
    unequal lengths; the sequences of a batch are shared out over `threads` (torch's own number by default). Kernels are
    kept on disk, in `LOOPFOLD_CACHE` or the user's cache folder. Agrees with `Sequential` to rounding: sums are taken
    in another order, and tanh, sigmoid and exp are accurate to two units in the last place.
    """

    threads: int | None = None

    def __post_init__(self) -> None:
        if self.threads is not None:
            whole_number("FusedCPU", "threads", self.threads)

    def refusal(self, recurrence: Recurrence) -> str | None:
        leaf = leaves(recurrence.state)[0]
        if leaf.device.type != "cpu":
            return f"it runs on the CPU and the state is on {leaf.device}."
        reason = compiled_refusal(recurrence)
        if reason is not None:
            return reason
        dtype = program_of(recurrence).program.loop.dtype
        if dtype not in (torch.float32, torch.float64):
            return f"it has kernels for float32 and float64, and got {dtype}."
        try:
            import llvmlite  # noqa: F401
        except ImportError:
            return "llvmlite is not installed. Type pip install llvmlite."
        return None

    def run(self, recurrence: Recurrence) -> State:
        return run_compiled(self, self._kernel(), recurrence)

    def code(self, recurrence: Recurrence) -> str:
        return self._kernel().code(recurrence)

    def _kernel(self) -> "_FusedKernel":
        return _FusedKernel(self.threads or torch.get_num_threads())


@dataclass(frozen=True)
class _FusedKernel(Writer):
    threads: int

    def write(self, name: str, source: Source, builder: Builder, dtype: torch.dtype) -> Written:
        return Fused(name, source, dtype, self.threads)


@functools.cache
def _tile(batch: int, threads: int) -> int:
    """How many sequences a kernel takes together: enough to share the loads, few enough for all threads."""
    most = (_machine().registers - 6) // 2  # two vectors of partial sums for each

    def cost(tile: int) -> float:  # of the thread with the most to do; a tile costs something whatever its size
        return math.ceil(math.ceil(batch / tile) / threads) * (tile + 1.5)

    return min(range(1, most + 1), key=lambda tile: (cost(tile), -tile))


# ------------------------------------------------------------------ compiled kernels


class Fused(Written):
    """A source, and the kernels in memory that were made for it."""

    def __init__(self, name: str, source: Source, dtype: torch.dtype, threads: int) -> None:
        self.name, self.source, self.dtype, self.threads = name, source, dtype, threads
        self.natives: dict[int, Native] = {}

    def code(self, state: Tensor) -> str:
        _, code = self._code(_tile(len(state), self.threads))
        buffers = [f"; buffer {i}: {buffer}" for i, buffer in enumerate(code.table)]
        return "\n".join([f"; {self.name}", *buffers, code.code])

    def _code(self, tile: int) -> "tuple[Shape, Code]":
        from loopfold.engines.native import write
        from loopfold.engines.rows import Shape

        shape = Shape(tile, "float" if self.dtype == torch.float32 else "double", _machine())
        return shape, write(self.source, shape)

    def native(self, batch: int) -> "Native":
        tile = _tile(batch, self.threads)
        if tile not in self.natives:
            with alone():
                if tile not in self.natives:
                    shape, code = self._code(tile)
                    self.natives[tile] = Native(*_load(self.name, code.code), code.table, code.scratch, shape)
        return self.natives[tile]

    def run(self, call: Call, buffers: dict[Buffer, Tensor]) -> Ran:
        source, like = self.source, next(iter(buffers.values()))
        out = [like.new_empty(call.steps, call.batch, v.width) for v in source.out]
        buffers = buffers | {Buffer(Role.OUT, i): t for i, t in enumerate(out)}
        moved = []
        for before, after in source.moves:
            if before.op == "state":
                buffers[Buffer(Role.STATES, before.index)] = out[source.out.index(after)]
            else:
                moved.append(like.new_zeros(call.batch, after.width))
                buffers[Buffer(Role.CARRY, before.index)] = moved[-1]
        return Ran(out, moved, self.native(call.batch).run(call, buffers, source.sums, self.threads))


@dataclass(frozen=True, eq=False)
class Native:
    """A kernel in memory, ready to call."""

    kernel: int  # addresses of the two functions
    team: int
    table: list[Buffer]
    scratch: int
    shape: "Shape"

    def run(self, call: Call, buffers: dict[Buffer, Tensor], wanted: tuple[Value, ...], threads: int) -> list[Tensor]:
        """Run over all sequences, in `threads` shares; returns the sums that are wanted."""
        like, tile = next(iter(buffers.values())), self.shape.tile
        matrices = [buffer for buffer in self.table if buffer.role is Role.MATRIX]
        constants = {b: buffers[Buffer(Role.CONSTANT, b.index)] for b in matrices}
        buffers = buffers | {b: self.pack(t.T if b.transposed else t) for b, t in constants.items()}
        lengths = None if call.lengths is None else call.lengths.to(torch.int64).contiguous()
        tiles = -(-call.batch // tile)
        shares = min(threads, tiles)
        scratch = like.new_empty(shares, self.scratch + self.shape.lanes)
        sums = [like.new_zeros(shares, v.width) for v in wanted]
        jobs, held = [], []
        for i in range(shares):
            first, last = (tiles * i // shares) * tile, (tiles * (i + 1) // shares) * tile
            own = {Buffer(Role.SCRATCH, 0): scratch[i]} | {Buffer(Role.SUM, k): s[i] for k, s in enumerate(sums)}
            tensors = [own[buffer] if buffer in own else buffers[buffer] for buffer in self.table]
            if not all(t.dtype == like.dtype and t.is_contiguous() for t in tensors):  # addresses say nothing of that
                raise Unsound(f"a kernel for {like.dtype} was given other rows.")
            pointers = (ctypes.c_int64 * len(tensors))(*[t.data_ptr() for t in tensors])
            held.append(pointers)
            end = 0 if lengths is None else lengths.data_ptr()
            jobs.append((call.steps, call.batch, first, min(last, call.batch), end, ctypes.addressof(pointers)))
        _run_jobs(self.kernel, self.team, jobs)
        return [s.sum(0) for s in sums]

    def pack(self, matrix: Tensor) -> Tensor:
        """A matrix in the order in which the kernel reads it: blocks of columns, each row by row."""
        depth, columns = matrix.shape
        blocks, vectors = self.shape.block(columns)
        width = vectors * self.shape.lanes
        packed, whole = matrix.new_empty(blocks, depth, width), columns // width
        if matrix.stride(1) == 1:
            packed[:whole].copy_(matrix[:, : whole * width].unflatten(1, (whole, width)).transpose(0, 1))
        else:  # W.T of the user's W: torch transposes two dimensions several times faster than three
            for i in range(whole):
                packed[i].copy_(matrix[:, i * width : (i + 1) * width])
        if whole < blocks:
            packed[whole].zero_()
            packed[whole, :, : columns - whole * width] = matrix[:, whole * width :]
        return packed


_Kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 6)  # called without the GIL


def _run_jobs(kernel: int, team: int, jobs: Sequence[tuple[int, ...]]) -> None:
    """Run the jobs side by side: on torch's own OpenMP threads, which would else spin beside ours, or on new ones."""
    openmp = _openmp() if len(jobs) > 1 else None
    if openmp is not None and os.getpid() == _process:  # in a forked process OpenMP's threads are gone
        words = [len(jobs), *(word for job in jobs for word in job)]
        table = (ctypes.c_int64 * len(words))(*words)
        openmp.GOMP_parallel(ctypes.c_void_p(team), table, len(jobs), 0)
        return
    function = _Kernel(kernel)
    if len(jobs) == 1:
        function(*jobs[0])
        return
    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(lambda job: function(*job), jobs))


@functools.cache
def _openmp() -> Any:
    """The OpenMP library that torch has loaded, where it can be found and has GNU's entry point."""
    from loopfold.engines.native import OPENMP

    try:
        lines = Path("/proc/self/maps").read_text().split("\n")
        path = next(line.split()[-1] for line in lines if re.search(r"/lib[gi]omp[^/]*$", line))
        library = ctypes.CDLL(path)
        return library if all(hasattr(library, name) for name in ("GOMP_parallel", *OPENMP)) else None
    except (OSError, StopIteration):
        return None


# ------------------------------------------------------------------ LLVM, and the kernels on disk


@functools.cache
def _machine() -> Any:
    from llvmlite import binding

    from loopfold.engines.rows import Machine

    features = binding.get_host_cpu_features()
    if features.get("avx512f"):
        return Machine(vector_bytes=64, registers=32)
    if features.get("avx"):
        return Machine(vector_bytes=32, registers=16)
    return Machine(vector_bytes=16, registers=32 if "neon" in features else 16)


@functools.cache
def _target() -> Any:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    features = binding.get_host_cpu_features().flatten()
    return binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=features, opt=OPTIMISE, reloc="pic", codemodel="default"
    )


@functools.cache
def _linker() -> Any:
    from llvmlite import binding

    return binding.create_lljit_compiler(_target(), use_jit_link=False)


_count = itertools.count()
_process = os.getpid()
_loaded: dict[str, Any] = {}  # holding the library keeps its code in memory


def _load(name: str, code: str) -> tuple[int, int]:
    """The addresses of the functions that `code` describes: from memory, from disk, or compiled now."""
    import llvmlite
    from llvmlite import binding

    from loopfold.engines.native import OPENMP

    target = _target()
    features = binding.get_host_cpu_features().flatten()
    key = cache.key_of(llvmlite.__version__, binding.get_host_cpu_name(), features, target.triple, code)
    if key not in _loaded:
        image = cache.read(key)
        if image is None:
            image = _compile(name, code)
            cache.write(key, image)
        library = binding.JITLibraryBuilder().add_object_img(image).add_current_process()
        openmp = _openmp()
        for symbol in OPENMP:  # where there is no OpenMP, `team` is never called
            address = ctypes.cast(openmp[symbol], ctypes.c_void_p).value if openmp else 0
            library = library.import_symbol(symbol, address)
        library = library.export_symbol("kernel").export_symbol("team")
        _loaded[key] = library.link(_linker(), f"loopfold {next(_count)}")  # names cannot be used again
    return _loaded[key]["kernel"], _loaded[key]["team"]


def _compile(name: str, code: str) -> bytes:
    from llvmlite import binding

    begin = time.perf_counter()
    target = _target()
    module = binding.parse_assembly(code)
    module.verify()
    options = binding.create_pipeline_tuning_options(speed_level=OPTIMISE)
    builder = binding.create_pass_builder(target, options)
    builder.getModulePassManager().run(module, builder)
    image = target.emit_object(module)
    cache.tell(name, time.perf_counter() - begin)
    return image
