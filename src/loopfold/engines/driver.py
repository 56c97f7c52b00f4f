"""CUDA by way of ctypes: NVRTC, which every CUDA build of torch brings along, and the driver's few calls."""

import ctypes
import functools
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from loopfold.engines import cache
from loopfold.engines.cuda import CudaCode
from loopfold.stepgraph.graph import NotRun

PRELUDE = Path(__file__).parent / "prelude.cuh"
_SHARED_BYTES = 8  # the name of an attribute of functions
_OUT_OF_MEMORY = 2
_FLAGS = ("-std=c++17", "-w")


class DriverError(NotRun):
    """CUDA refused a kernel."""


@functools.cache
def nvrtc() -> Any:
    """The compiler's library, or None where there is none."""
    folders = [Path(p, "nvidia") for p in sys.path if p and Path(p, "nvidia").is_dir()]
    beside_torch = [
        str(found) for folder in folders for found in sorted(folder.glob("*/lib/libnvrtc.so.1*"), reverse=True)
    ]
    ours = f"libnvrtc.so.{(torch.version.cuda or '').partition('.')[0]}"  # the version that torch was built for, if any
    names = sorted(beside_torch, key=lambda path: not path.endswith(ours))
    for name in (*names, ours, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@functools.cache
def _cuda() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"{what}: the GPU has no memory left.")
    if status:
        text = ctypes.c_char_p()
        _cuda().cuGetErrorString(status, ctypes.byref(text))
        raise DriverError(f"{what}: {(text.value or b'error').decode()} ({status}).")


@functools.cache
def _version() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _compile(name: str, text: str, architecture: str) -> bytes:
    """A cubin, from disk or compiled now."""
    prelude = PRELUDE.read_text(encoding="utf-8")
    key = cache.key_of("cuda", _version(), architecture, *_FLAGS, prelude, text)
    image = cache.read(key)
    if image is None:
        begin = time.perf_counter()
        image = _nvrtc(text, prelude, architecture)
        cache.tell(name, time.perf_counter() - begin)
        cache.write(key, image)
    return image


def _nvrtc(text: str, prelude: str, architecture: str) -> bytes:
    library, program = nvrtc(), ctypes.c_void_p()
    headers, names = (ctypes.c_char_p * 1)(prelude.encode()), (ctypes.c_char_p * 1)(b"prelude.cuh")
    if library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"loop.cu", 1, headers, names):
        raise DriverError("NVRTC took no kernel.")
    flags = [flag.encode() for flag in (f"-arch={architecture}", *_FLAGS)]
    size = ctypes.c_size_t()
    try:
        if library.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags)):
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise DriverError(f"NVRTC refused a kernel: {log.value.decode()[:2000]}")
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, cubin)
        return cubin.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def problem(device: torch.device) -> str | None:
    """Why no kernel can be compiled for a device and loaded, or None: tried once, with one that does nothing."""
    if nvrtc() is None:
        return "NVRTC, which comes with torch's CUDA builds, was not found."
    try:
        index = torch.cuda.current_device() if device.index is None else device.index
        with on_device(index):
            module = ctypes.c_void_p()
            image = _nvrtc('extern "C" __global__ void kernel() {}', "", _architecture(device))
            _check(_cuda().cuModuleLoadData(ctypes.byref(module), image), "a kernel was not loaded")
    except (DriverError, OSError) as error:
        return f"{error} Perhaps the driver or torch is older than the GPU."
    return None


def _architecture(device: torch.device | int) -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


class CudaLauncher:
    """A kernel on the devices that have asked for it."""

    def __init__(self, name: str, code: CudaCode) -> None:
        self.name, self.code = name, code
        self.functions: dict[int, tuple[Any, int]] = {}

    def launch(self, blocks: int, args: Any, device: torch.device) -> None:
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        threads, shared = self.code.plan.geometry.threads, self.code.plan.shared_bytes
        with on_device(device.index):
            function, _ = self._function(device.index)
            stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device.index))
            status = _cuda().cuLaunchCooperativeKernel(
                function, blocks, 1, 1, threads, 1, 1, shared, stream, parameters
            )
        _check(status, f"{self.name} was not launched")

    def most_blocks(self, device: torch.device) -> int:
        """How many blocks can run at the same time."""
        with on_device(device.index):
            return self._function(device.index)[1]

    def _function(self, device: int) -> tuple[Any, int]:
        if device not in self.functions:
            properties = torch.cuda.get_device_properties(device)
            image = _compile(self.name, self.code.text, _architecture(device))
            module, function, each = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
            _check(_cuda().cuModuleLoadData(ctypes.byref(module), image), "a kernel was not loaded")
            _check(_cuda().cuModuleGetFunction(ctypes.byref(function), module, b"kernel"), "a kernel was not found")
            shared, threads = self.code.plan.shared_bytes, self.code.plan.geometry.threads
            _check(_cuda().cuFuncSetAttribute(function, _SHARED_BYTES, shared), "a kernel needs too much shared memory")
            _check(
                _cuda().cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    ctypes.byref(each), function, threads, ctypes.c_size_t(shared)
                ),
                "how many blocks fit is not known",
            )
            self.functions[device] = function, each.value * properties.multi_processor_count
        return self.functions[device]


def new_stream(device: int) -> int:
    """A stream of the driver's own, as an address; it waits for no other."""
    stream = ctypes.c_void_p()
    with on_device(device):
        _check(_cuda().cuStreamCreate(ctypes.byref(stream), 1), "there is no stream")
    assert stream.value is not None
    return stream.value


@functools.cache
def _context(device: int) -> int:
    context = ctypes.c_void_p()
    _check(_cuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "there is no context")
    assert context.value is not None
    return context.value


def on_device(device: int) -> AbstractContextManager[Any]:
    """`with on_device(device):` it is the current one, and the thread has its context, as those of autograd may not."""
    current = ctypes.c_void_p()
    _cuda().cuCtxGetCurrent(ctypes.byref(current))
    if not current.value:
        _check(_cuda().cuCtxSetCurrent(ctypes.c_void_p(_context(device))), "the context was not set")
    return nullcontext() if torch.cuda.current_device() == device else torch.cuda.device(device)
