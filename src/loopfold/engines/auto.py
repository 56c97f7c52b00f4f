"""Auto: the fastest engine that does not refuse, and the reasons in words."""

import warnings
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loopfold.casts import casts
from loopfold.engines.base import Engine, EngineWarning, Recurrence
from loopfold.engines.fused_cpu import FusedCPU
from loopfold.engines.fused_gpu import FusedGPU
from loopfold.engines.looped import Looped
from loopfold.engines.programs import Program, program_of, restless
from loopfold.engines.sequential import Sequential
from loopfold.states import State, leaves, name_of
from loopfold.stepgraph.graph import batch_at
from loopfold.stepgraph.loop import Value, ordered
from loopfold.stepgraph.ops import Kind


@dataclass(frozen=True)
class Auto(Engine):
    """Picks by what the step graph and the sizes say. It refuses nothing: `Sequential` runs what cannot be compiled."""

    def refusal(self, recurrence: Recurrence) -> None:
        return None

    def run(self, recurrence: Recurrence) -> State:
        engine, why = self.choose(recurrence)
        states = engine.run(recurrence)
        if isinstance(recurrence.memo.get("program"), str) and isinstance(recurrence.f, nn.Module):  # a refusal
            _tell_once(recurrence.f, why)
        return states

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
        inside = sum(v.args[0].width * v.width for v in ordered(program.loop.emitted) if v.op == "matmul")
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


def explain(engine: Engine, recurrence: Recurrence, code: bool = False) -> str:
    """Which engine runs this, why, and what the compiler made of the step; or why `engine` refuses it.

    `code`  with what was generated: Python for `Looped`, LLVM's language for `FusedCPU`, CUDA C++ for `FusedGPU`
    """
    leaf = leaves(recurrence.state)[0]
    dtype = str(leaf.dtype).removeprefix("torch.")
    size = f"τ = {recurrence.steps}, batch {leaf.shape[0]}, {dtype} on {leaf.device}"
    for _, to in casts(leaf.device):
        size += f", under autocast to {str(to).removeprefix('torch.')}"
    begin = f"{name_of(recurrence.f)} over {size}"
    reason = engine.refusal(recurrence)
    if reason is not None:
        return f"{begin}: {type(engine).__name__} refuses, because {reason}"
    chosen, why = engine.choose(recurrence) if isinstance(engine, Auto) else (engine, "it was asked for.")
    lines = [f"{begin}: {type(chosen).__name__}, because {why}"]
    lines += [f"  {line}" for line in chosen.remarks(recurrence)]
    if not isinstance(chosen, Sequential):
        lines += _parts(program_of(recurrence).program)
    if code and (text := chosen.code(recurrence)):
        lines += ["", text.rstrip()]
    return "\n".join(lines)


def _parts(program: Program) -> list[str]:
    loop = program.loop
    order = ordered(loop.emitted)
    products = Counter(f"{v.args[0].width}×{v.width}" for v in order if v.op == "matmul")
    sizes = ", ".join(f"{n} of {size}" if n > 3 else ", ".join([size] * n) for size, n in products.items())
    others = sum(v.kind in (Kind.POINTWISE, Kind.REDUCTION) for v in order)
    after = [leaf for leaf in loop.leaves if not isinstance(leaf, int)]
    inside = f"{_count(products.total(), 'product')} ({sizes})" if products else "no product"
    alone = "x and random numbers decide" if loop.draws else "x decides"
    lines = [f"  before the loop, for all steps at once: {_count(len(loop.inputs), 'sequence')} of what {alone} alone"]
    if loop.contexts:
        lines += [f"  once for each sequence: {_count(len(loop.contexts), 'row')} of what the context decides alone"]
    lines += [f"  in the loop: {inside}, {_count(others, 'other operation')}"]
    if after:
        what = "output" if len(after) <= len(loop.graph.results) else "state"
        lines += [
            f"  after the loop, for all steps at once: {_count(len(after), 'part')} of the {what} that no step reads"
        ]
    lines += [f"  kept for the way back, beside the states: {_sizes(program.kept)}"]
    return lines


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _sizes(kept: tuple[Value, ...]) -> str:
    return f"{sum(v.width for v in kept)} numbers a step and sequence" if kept else "nothing"
