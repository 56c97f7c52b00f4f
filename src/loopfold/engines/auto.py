"""Auto: the fastest engine that does not refuse."""

import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loopfold.engines.base import Engine, EngineWarning, Recurrence
from loopfold.engines.fused_cpu import FusedCPU
from loopfold.engines.fused_gpu import FusedGPU
from loopfold.engines.looped import Looped
from loopfold.engines.programs import Program, program_of, restless
from loopfold.engines.sequential import Sequential
from loopfold.states import State, leaves, name_of
from loopfold.stepgraph.graph import batch_at


@dataclass(frozen=True)
class Auto(Engine):
    """Picks by what the step graph and the sizes say. It refuses nothing: `Sequential` runs what cannot be compiled."""

    def refusal(self, recurrence: Recurrence) -> None:
        return None

    def run(self, recurrence: Recurrence) -> State:
        engine, why = self.choose(recurrence)
        states = engine.run(recurrence)
        self.tell(recurrence, why)
        return states

    def tell(self, recurrence: Recurrence, why: str) -> None:
        """Warn, where a module that was meant to be compiled was not."""
        if isinstance(recurrence.memo.get("program"), str) and isinstance(recurrence.f, nn.Module):  # a refusal
            _tell_once(recurrence.f, why)

    def choose(self, recurrence: Recurrence) -> tuple[Engine, str]:
        """The engine, and why."""
        if recurrence.steps == 1:
            return Sequential(), "there is only one step, so no loop to compile."
        parts = leaves(recurrence.state)
        key = (recurrence.steps, torch.is_grad_enabled(), parts[0].device, *(leaf.shape for leaf in parts))
        short = _short.setdefault(recurrence.f, set()) if isinstance(recurrence.f, nn.Module) else set()
        if key in short:
            return Sequential(), SHORT
        if parts[0].device.type != "cpu":
            return self._on_a_gpu(recurrence)
        other = Looped().refusal(recurrence)
        if other is not None:
            return Sequential(), f"it cannot be compiled: {other}"
        reason = FusedCPU().refusal(recurrence)
        gains = _Gains.of(program_of(recurrence).program, recurrence)
        if reason is None and gains.of_native_code > 0:
            return FusedCPU(), "its loop is native code."
        if gains.of_a_lean_loop > 0:
            why = "its matrices are large and its steps few." if reason is None else _cannot(FusedCPU, reason)
            return Looped(), why
        if len(short) < MOST_SHORT:
            short.add(key)
        return Sequential(), SHORT

    def _on_a_gpu(self, recurrence: Recurrence) -> tuple[Engine, str]:
        if recurrence.steps < FEW or restless(recurrence):
            why = "so few steps, or a step that changes at every call, are not worth a kernel."
        elif (reason := FusedGPU().refusal(recurrence)) is None:
            return FusedGPU(), "its loop is one kernel."
        else:
            why = _cannot(FusedGPU, reason)
        other = Looped().refusal(recurrence)
        return (Looped(), why) if other is None else (Sequential(), f"it cannot be compiled: {other}")


def _cannot(engine: type[Engine], reason: str) -> str:
    return f"{engine.__name__} cannot run it: {reason}"


FEW = 8  # steps on a GPU that launches of torch's operations do about as fast as a kernel of our own
SHORT = "so few steps take less time than preparing a compiled loop."
MOST_SHORT = 256  # sizes of a step
_short: weakref.WeakKeyDictionary[nn.Module, set[Any]] = weakref.WeakKeyDictionary()  # sizes known to be too short


@dataclass(frozen=True)
class _Gains:
    """What compiled loops save against `Sequential`, less what preparing them costs: in seconds, forwards, roughly.

    The figures were fitted to `benchmarks/short_sequences.py`. They only decide which engine runs.
    """

    of_native_code: float
    of_a_lean_loop: float

    @staticmethod
    def of(program: Program, recurrence: Recurrence) -> "_Gains":
        leaf = leaves(recurrence.state)[0]
        batch, bytes_each = leaf.shape[0], leaf.element_size()
        inside = program.products
        products = [node.inputs()[-1].shape for node in program.graph.operations if node.op in ("mm", "addmm")]
        outside = sum(k * n for k, n in products if batch_at((k, n)) is None) - inside
        operations = sum(node.op != "getitem" for node in program.graph.operations)
        # a step: no calls of Python; matrices that stay in the cache; products by tiles; those of x all at once
        calls, cache = 2.5e-6 * operations, 1.5e-11 * inside * bytes_each
        tiles = 1.8e-11 * (batch - 1) * inside
        hoisted = (3e-11 if torch.is_grad_enabled() else 7e-12) * max(0, outside) * bytes_each
        packing = 3e-10 * inside * bytes_each  # of the matrices, into the order in which a kernel reads them
        trace = 2e-4 * operations if restless(recurrence) else 0.0
        native = recurrence.steps * (calls + cache + tiles) - packing - 2e-4
        return _Gains(native - trace, recurrence.steps * (0.4 * calls + hoisted) - 3e-4 - trace)


_told: set[tuple[str, str, str]] = set()


def _tell_once(f: nn.Module, why: str) -> None:
    """Of every class once: what was meant to be compiled runs as a Python loop, many times slower."""
    key = (type(f).__module__, type(f).__qualname__, why)
    if key not in _told:
        _told.add(key)
        warnings.warn(
            f"{name_of(f)} runs as a Python loop: {why} Type engine=lf.Sequential() if that is meant.",
            EngineWarning,
            stacklevel=2,
        )
