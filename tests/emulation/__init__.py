"""GPU kernels without a GPU: the generated source, compiled by the machine's C++ compiler and run thread by thread."""

import ctypes
import functools
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loopfold.engines.base import Engine, Recurrence
from loopfold.engines.compiled import compiled_refusal, run_compiled
from loopfold.engines.cuda import CudaCode
from loopfold.engines.cuda_plan import Geometry
from loopfold.engines.driver import PRELUDE
from loopfold.engines.fused_gpu import GPUWriter
from loopfold.states import State

HERE = Path(__file__).parent
FLAGS = ["-O0", "-w", "-std=c++17", "-shared", "-fPIC", "-DEMULATED"]
LAUNCH = """
extern "C" int run(const Args* a, int blocks, int threads, int bytes) { return launch(a, blocks, threads, bytes); }
"""


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="loopfold-emulation-")


@functools.cache
def _library(text: str) -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp(dir=_folder().name))
    (folder / "kernel.cpp").write_text(text + LAUNCH)
    command = ["g++", *FLAGS, f"-I{PRELUDE.parent}", f"-I{HERE}", "kernel.cpp", "-o", "kernel.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "kernel.so"))


class EmulatedLauncher:
    """In place of the driver: runs a kernel on tensors of the CPU."""

    def __init__(self, name: str, code: CudaCode) -> None:
        self.code, self.library = code, _library(code.text)

    def launch(self, blocks: int, args: Any, device: torch.device) -> None:
        threads = self.code.plan.geometry.threads
        stuck = self.library.run(ctypes.byref(args), blocks, threads, self.code.plan.shared_bytes)
        assert not stuck, f"{stuck} threads wait for ever"

    def most_blocks(self, device: torch.device) -> int:
        return 6


@dataclass(frozen=True)
class Emulated(Engine):
    """`FusedGPU` on a CPU, with a geometry of the test's own."""

    geometry: Geometry = Geometry(1, 8, 2)
    steps: int | None = None

    def refusal(self, recurrence: Recurrence) -> str | None:
        return compiled_refusal(recurrence)

    def run(self, recurrence: Recurrence) -> State:
        return run_compiled(self, self._writer(), recurrence)

    def code(self, recurrence: Recurrence) -> str:
        return self._writer().code(recurrence)

    def _writer(self) -> GPUWriter:
        return GPUWriter(EmulatedLauncher, self.geometry, True, self.steps)
