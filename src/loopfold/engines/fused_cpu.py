"""FusedCPU: the loop compiled into native code, forwards and backwards, with no compiler on the user's machine."""

import ctypes
import functools
import hashlib
import itertools
import logging
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loopfold.engines.base import Engine, Recurrence, Unsound
from loopfold.engines.compiled import Call, Gradients, Kernel, Saved, compiled_refusal, run_compiled
from loopfold.engines.plan import Place, Source
from loopfold.engines.programs import Program, alone
from loopfold.states import State, leaves, whole_number
from loopfold.stepgraph.loop import Value

_log = logging.getLogger("loopfold")
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
        if leaf.dtype not in (torch.float32, torch.float64):
            return f"it has kernels for float32 and float64; {leaf.dtype} came."
        reason = compiled_refusal(recurrence)
        if reason is not None:
            return reason
        try:
            import llvmlite  # noqa: F401
        except ImportError:
            return "llvmlite is not installed. Type pip install llvmlite."
        return None

    def run(self, recurrence: Recurrence) -> State:
        return run_compiled(self, _FusedKernel(self.threads or torch.get_num_threads()), recurrence)


@dataclass(frozen=True)
class _FusedKernel(Kernel):
    threads: int

    def forward(
        self, program: Program, call: Call, constants: list[Tensor], inputs: list[Tensor], state: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        loop = program.loop
        out = [*loop.emitted, *(program.kept if call.record else ())]
        native = self._native(
            program,
            call,
            state[0].dtype,
            ("forward", call.record),
            lambda: Source(
                roots=tuple((v, Place("sequence", i, v.width)) for i, v in enumerate(out)),
                sums=(),
                given={},
                carries=(),
                backwards=False,
                masked=call.lengths is not None,
            ),
        )
        sequences = [state[0].new_empty(call.steps, call.batch, v.width) for v in out]
        buffers: dict[Any, Tensor] = {("sequence", i): t for i, t in enumerate(sequences)}
        buffers |= _common(program, constants, inputs, state, sequences)
        native.run(call, buffers, constants, self.threads)
        return sequences[: len(loop.emitted)], sequences[len(loop.emitted) :]

    def backward(self, program: Program, call: Call, saved: Saved, incoming: list[Tensor | None]) -> Gradients:
        loop, reverse, state, emitted = program.loop, program.reverse(incoming), saved.state, saved.emitted
        stored, given = reverse.stored(), [*loop.emitted, *program.kept]
        places = [Place("sequence", len(given) + i, v.width) for i, v in enumerate(stored)]
        carries = [Place("carry", k, v.width) for k, v in enumerate(reverse.carries)]
        native = self._native(
            program,
            call,
            state[0].dtype,
            ("backward", tuple(g is not None for g in incoming)),
            lambda: Source(
                roots=(*zip(stored, places, strict=True), *zip(reverse.carries, carries, strict=True)),
                sums=tuple(v for _, v in reverse.rows),
                given={v: i for i, v in reversed(list(enumerate(given)))},
                carries=tuple(v.width for v in reverse.carries),
                backwards=True,
                masked=call.lengths is not None,
            ),
        )
        sequences = [state[0].new_empty(call.steps, call.batch, v.width) for v in stored]
        initial = [torch.zeros_like(s) for s in state]
        buffers: dict[Any, Tensor] = {("sequence", i): t for i, t in enumerate([*emitted, *saved.kept, *sequences])}
        buffers |= {("incoming", k): t for k, t in enumerate(incoming) if t is not None}
        buffers |= {("initial", k): t for k, t in enumerate(initial)}
        buffers |= _common(program, saved.constants, saved.inputs, state, emitted)
        sums = native.run(call, buffers, saved.constants, self.threads)
        return Gradients(initial, sequences, sums)

    def _native(
        self, program: Program, call: Call, dtype: torch.dtype, what: tuple[Any, ...], source: Callable[[], Any]
    ) -> "_Native":
        tile = _tile(call.batch, self.threads)
        key = ("fused", what, dtype, tile, call.lengths is not None)
        if key not in program.made:
            with alone():
                if key not in program.made:
                    program.made[key] = _Native.compile(f"{program.graph.name} {what[0]}", source(), dtype, tile)
        return program.made[key]


def _common(
    program: Program, constants: list[Tensor], inputs: list[Any], state: list[Tensor], emitted: list[Tensor]
) -> dict[Any, Tensor]:
    found: dict[Any, Tensor] = {("input", i): t for i, t in enumerate(inputs) if t is not None}
    found |= {("constant", i): t for i, t in enumerate(constants)}
    for k, i in enumerate(program.loop.carried):
        found |= {("start", i): state[k], ("states", i): emitted[k]}
    return found


@functools.cache
def _tile(batch: int, threads: int) -> int:
    """How many sequences a kernel takes together: enough to share the loads, not so many that threads stand idle."""
    most = (_machine().registers - 6) // 2  # two vectors of partial sums for each

    def cost(tile: int) -> float:  # of the thread with the most to do; a tile costs something whatever its size
        return math.ceil(math.ceil(batch / tile) / threads) * (tile + 1.5)

    return min(range(1, most + 1), key=lambda tile: (cost(tile), -tile))


# ------------------------------------------------------------------ compiled kernels


@dataclass(frozen=True, eq=False)
class _Native:
    """A kernel in memory, ready to call."""

    kernel: int  # addresses of the two functions
    team: int
    table: list[tuple[str, Any]]
    scratch: int
    tile: int
    sums: tuple[Value, ...]
    shape: Any

    @staticmethod
    def compile(name: str, source: Any, dtype: torch.dtype, tile: int) -> "_Native":
        from loopfold.engines.native import Shape, write

        shape = Shape(tile, "float" if dtype == torch.float32 else "double", _machine())
        written = write(source, shape)
        kernel, team = _load(name, written.code)
        return _Native(kernel, team, written.table, written.scratch, tile, source.sums, shape)

    def run(self, call: Call, buffers: dict[Any, Tensor], constants: list[Tensor], threads: int) -> list[Tensor]:
        """Run over all sequences, in `threads` shares; returns the sums."""
        like = next(iter(buffers.values()))
        packed = {key: self._pack(constants[key[1][0]], key[1][1]) for key in self.table if key[0] == "matrix"}
        lengths = None if call.lengths is None else call.lengths.to(torch.int64).contiguous()
        tiles = -(-call.batch // self.tile)
        shares = min(threads, tiles)
        scratch = like.new_empty(shares, self.scratch + self.shape.lanes)
        sums = [like.new_zeros(shares, v.width) for v in self.sums]
        jobs, held = [], []
        for i in range(shares):
            first, last = (tiles * i // shares) * self.tile, (tiles * (i + 1) // shares) * self.tile
            own = {("scratch", 0): scratch[i]} | {("sum", k): s[i] for k, s in enumerate(sums)}
            tensors = [own[key] if key in own else packed[key] if key in packed else buffers[key] for key in self.table]
            if not all(t.dtype == like.dtype and t.is_contiguous() for t in tensors):  # addresses say nothing of that
                raise Unsound(f"a kernel for {like.dtype} was given other rows.")
            pointers = (ctypes.c_int64 * len(tensors))(*[t.data_ptr() for t in tensors])
            held.append(pointers)
            end = 0 if lengths is None else lengths.data_ptr()
            jobs.append((call.steps, call.batch, first, min(last, call.batch), end, ctypes.addressof(pointers)))
        _run_jobs(self.kernel, self.team, jobs)
        return [s.sum(0) for s in sums]

    def _pack(self, matrix: Tensor, transposed: bool) -> Tensor:
        """A matrix in the order in which the kernel reads it: blocks of columns, each row by row."""
        matrix = matrix.T if transposed else matrix
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

    from loopfold.engines.native import Machine

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
    identity = "\n".join([llvmlite.__version__, binding.get_host_cpu_name(), features, target.triple, code])
    key = hashlib.sha256(identity.encode()).hexdigest()[:32]
    if key not in _loaded:
        image = _read(key)
        if image is None:
            image = _compile(name, code)
            _write(key, image)
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
    took = time.perf_counter() - begin
    level = logging.WARNING if took > 1 else logging.INFO  # what nobody would notice is not worth a line
    _log.log(level, "compiled %s in %.2f s; it is kept for next time", name, took)
    return image


def _folder() -> Path:
    own, base = os.environ.get("LOOPFOLD_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    return (Path(base) if base else Path.home() / ".cache") / "loopfold"


def _read(key: str) -> bytes | None:
    try:
        data = (_folder() / f"{key}.kernel").read_bytes()
    except (OSError, RuntimeError):  # no such file, or no home
        return None
    image, digest = data[:-32], data[-32:]
    return image if hashlib.sha256(image).digest() == digest else None  # a torn file is compiled anew


def _write(key: str, image: bytes) -> None:
    try:
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            file = Path(beside, key)
            file.write_bytes(image + hashlib.sha256(image).digest())
            file.replace(folder / f"{key}.kernel")
    except (OSError, RuntimeError) as error:
        _log.warning("compiled kernels cannot be kept: %s", error)
