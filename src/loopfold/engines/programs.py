"""From a step to its program, made once and kept as long as it is true.

A program is kept under a fingerprint of all that its trace has fixed. When that has changed, the step is traced again:
if the graph is as before, so is the program; if only numbers differ, they become inputs of the program, and whatever
they are at later calls, nothing is compiled again.
"""

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from loopfold.casts import casts
from loopfold.engines.base import EngineWarning, Recurrence
from loopfold.engines.selfcheck import SHARE, Watch
from loopfold.states import State, all_leaves, leaves, map_state, name_of
from loopfold.stepgraph.differentiate import Reverse, differentiate, kept_values
from loopfold.stepgraph.graph import Node, Refusal, StepGraph, Unsound, with_numbers
from loopfold.stepgraph.hoist import hoist
from loopfold.stepgraph.loop import Value, ordered
from loopfold.stepgraph.settled import settled
from loopfold.stepgraph.split import Loop
from loopfold.stepgraph.trace import Given, retrace, trace
from loopfold.stepgraph.verify import verify, verify_reverse
from loopfold.surroundings import fingerprint, only_numbers_differ


@dataclass(frozen=True, eq=False)
class Program:
    """A traced and split step, with its reverse steps and the kernels that engines made for it."""

    graph: StepGraph
    loop: Loop
    made: dict[Any, Any]  # whatever an engine compiles, under a key of its own
    watch: Watch = field(default_factory=Watch)

    @cached_property
    def parameters(self) -> list[tuple[Node, Callable[[nn.Module], Tensor]]]:
        """Each parameter of the graph, and how it is got from the module."""
        return [(node, attrgetter(name)) for name, node in self.graph.parameters.items()]

    @cached_property
    def kept(self) -> tuple[Value, ...]:
        return kept_values(self.loop)

    @cached_property
    def inputs_read(self) -> list[int]:
        """The inputs that the reverse step reads again; the others need not be kept."""
        reverse = self.reverse((True,) * len(self.loop.emitted))
        order = ordered(reverse.roots(), stop=(*self.loop.emitted, *self.kept))
        return sorted({v.index for v in order if v.op == "input"})

    @cached_property
    def operations(self) -> int:
        """How many values a step of the loop has."""
        return len(ordered(self.loop.emitted))

    @cached_property
    def products(self) -> int:
        """How many numbers the matrices have that a step multiplies by."""
        return sum(v.args[0].width * v.width for v in ordered(self.loop.emitted) if v.op == "matmul")

    @cached_property
    def numbers(self) -> int:
        """How many a run that has a way back holds, for each step and sequence, roughly."""
        return sum(v.width for v in (*self.loop.emitted, *self.kept)) + 2 * sum(self.loop.widths)

    def reverse(self, arrives: tuple[bool, ...]) -> Reverse:
        """The reverse step, where `arrives[k]` says whether a gradient comes to emitted value k."""
        key = ("reverse", arrives)
        if key not in self.made:
            with alone():
                if key not in self.made:
                    reverse = differentiate(self.loop, arrives)
                    verify_reverse(self.loop, reverse, arrives, self.kept)
                    self.made[key] = reverse
        return self.made[key]


@dataclass(frozen=True, eq=False)
class Found:
    """The program of a step as the step is now, with the numbers that it takes as inputs."""

    program: Program
    numbers: tuple[float, ...] = ()
    apart: bool = False  # the first step is another, since the state has another dtype before it than after it


MOST = 16  # programs of one module for one size: a step that is another at every call is better run as it is
MOST_KEYS = 64  # fingerprints that are remembered for a module
TOO_MANY = "it has changed at too many calls. What changes should be a float, or a buffer: self.register_buffer(...)."


@dataclass(eq=False)
class _Shelf:
    """What is known of one module: the program, or why there is none, by (sizes, fingerprint); and by sizes alone."""

    found: dict[Any, Found | str] = field(default_factory=dict)
    programs: dict[Any, list[Program]] = field(default_factory=dict)
    refusals: dict[Any, int] = field(default_factory=dict)  # how many fingerprints of each size were refused
    beside: dict[Any, Any] = field(default_factory=dict)  # what engines keep that holds a program, which none may hold
    misses: int = 0  # calls in a row at which the step was not as any time before
    forgotten: int = 0  # how often a trace was found to be true no more


_shelves: weakref.WeakKeyDictionary[nn.Module, _Shelf] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def alone() -> threading.RLock:
    """`with alone():` one thread at a time traces or compiles; the others then find what it made."""
    return _lock


def _new_lock() -> None:
    global _lock
    _lock = threading.RLock()  # in a forked process the thread that holds the old one is gone


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


def program_of(recurrence: Recurrence) -> Found:
    """The program of a step, traced at the first call, and again when something that the trace fixed has changed."""
    found = recurrence.memo.get("program")
    if found is None:
        with alone():
            found = recurrence.memo["program"] = _find(recurrence)
    if isinstance(found, Found) and found.program.watch.distrusted is not None:
        raise Refusal(found.program.watch.distrusted)
    if isinstance(found, str):
        raise Refusal(found)
    return found


def forget(recurrence: Recurrence) -> None:
    """Make the next call trace the step again, even if its fingerprint is the same."""
    with alone():
        shelf = _shelves.get(recurrence.f)  # type: ignore[call-overload]
        if shelf is not None:
            sizes = _sizes(recurrence)
            shelf.programs.pop(sizes, None)
            shelf.found = {key: found for key, found in shelf.found.items() if key[0] != sizes}
            shelf.beside.clear()
            shelf.forgotten += 1
        recurrence.memo.clear()


def kept_beside(recurrence: Recurrence, program: Program, key: Any, make: Callable[[], Any]) -> Any:
    """What an engine has made for a program under a key. It may hold the program: it goes with the module."""
    with alone():
        beside = _shelves.setdefault(recurrence.f, _Shelf()).beside  # type: ignore[arg-type]
        if (program, key) not in beside:
            beside[program, key] = make()
        return beside[program, key]


def restless(recurrence: Recurrence) -> bool:
    """Whether the step has been another at every one of the last calls, so that each takes a new trace."""
    shelf = _shelves.get(recurrence.f) if isinstance(recurrence.f, nn.Module) else None
    return shelf is not None and shelf.misses > 3


def earn(f: Any, seconds: float) -> None:
    """Let the checks of a step take a share of the time in which what was captured of it has run unchecked."""
    shelf = _shelves.get(f) if isinstance(f, nn.Module) else None
    for found in list(shelf.found.values()) if shelf is not None else ():
        for watch in found.program.watch.engines.values() if isinstance(found, Found) else ():
            watch.credit += SHARE * seconds


def forgotten(f: Any) -> int | None:
    """How often traces of a step were found to be true no more; what was captured before then is not true either.

    None, unless it has been run, always by a program that is trusted and that draws no random numbers.
    """
    shelf = _shelves.get(f) if isinstance(f, nn.Module) else None
    if shelf is None or not shelf.found:
        return None
    with alone():
        programs = [found.program if isinstance(found, Found) else None for found in shelf.found.values()]
        settled = all(p is not None and p.watch.distrusted is None and not p.loop.draws for p in programs)
        return shelf.forgotten if settled else None


def _sizes(recurrence: Recurrence) -> Any:
    parts = leaves(recurrence.state)
    x = tuple((leaf.shape[2:], leaf.dtype) for leaf in recurrence.sequences)
    context = tuple((leaf.shape[1:], leaf.dtype) for leaf in all_leaves(recurrence.context))
    structures = (_types(recurrence.state), _types(recurrence.x), _types(recurrence.context))
    device = parts[0].device
    mixed = casts(device) and (casts(device), recurrence.lengths is None)  # which decides the dtype of a state, too
    return tuple((leaf.shape[1:], leaf.dtype) for leaf in parts), device, x, context, structures, mixed


def _find(recurrence: Recurrence) -> Found | str:
    f = recurrence.f
    if not isinstance(f, nn.Module):
        return "it is a plain function, which may read something else at every call; an nn.Module is compiled."
    shelf = _shelves.setdefault(f, _Shelf())
    key = (_sizes(recurrence), fingerprint(f))
    if key in shelf.found:
        shelf.misses = 0
        return shelf.found[key]
    shelf.misses += 1
    try:
        found: Found | str = _make(recurrence, shelf, key)
    except Refusal as reason:
        found = str(reason)  # as words, since an exception would keep alive all that it has seen
        shelf.refusals[key[0]] = shelf.refusals.get(key[0], 0) + 1
    except Unsound as fault:
        found = f"its program is wrong: {fault}"
        warnings.warn(
            f"{name_of(f)} is not compiled, since {found} This is a fault in Loopfold; the values are right.",
            EngineWarning,
            stacklevel=2,
        )
    if len(shelf.found) == MOST_KEYS:
        del shelf.found[next(iter(shelf.found))]
    shelf.found[key] = found
    return found


def _types(part: State | None) -> Any:
    return (type(part), *map(_types, part)) if isinstance(part, tuple) else part is None


def _make(recurrence: Recurrence, shelf: _Shelf, key: Any) -> Found:
    sizes, marks = key
    programs = shelf.programs.setdefault(sizes, [])
    if shelf.refusals.get(sizes, 0) >= MOST:
        raise Refusal(TOO_MANY)
    if any(of == sizes and only_numbers_differ(before, marks) for of, before in shelf.found):
        graph, apart = _traced(retrace, recurrence)
        found = _same_but_for_numbers(programs, graph)
        if found is not None:
            return replace(found, apart=apart)
    if len(programs) == MOST:
        raise Refusal(TOO_MANY)
    graph, apart = _traced(trace, recurrence)
    found = _same_but_for_numbers(programs, graph) or next(_generalised(programs, graph), None)
    if found is None:
        found = Found(_compile(graph))
    if found.program not in programs:
        programs.append(found.program)
    return replace(found, apart=apart)


def _traced(record: Callable[..., StepGraph], recurrence: Recurrence) -> tuple[StepGraph, bool]:
    x0 = None if recurrence.x is None else map_state(lambda leaf: leaf[0], recurrence.x)
    given = Given(recurrence.state, x0, recurrence.context)
    return settled(record, recurrence.f, given, ends=recurrence.lengths is not None)


def _same_but_for_numbers(programs: list[Program], graph: StepGraph) -> Found | None:
    """The program that `graph` is, where its numbers are inputs of that program or the same."""
    for program in reversed(programs):
        general, numbers = with_numbers(program.graph, graph)
        if general is program.graph:
            return Found(program, numbers)
    return None


def _generalised(programs: list[Program], graph: StepGraph) -> Iterator[Found]:
    """Programs that have those numbers as inputs by which `graph` differs from a program that is there."""
    for program in reversed(programs):
        general, numbers = with_numbers(program.graph, graph)
        if general is not None:
            try:
                yield Found(_compile(general), numbers)
            except Refusal:  # a number in a place where the loop needs to know it
                continue


def _compile(graph: StepGraph) -> Program:
    program = Program(graph, hoist(graph), {})
    verify(program.loop)
    _ = program.inputs_read  # derives the reverse step and what it needs
    return program
