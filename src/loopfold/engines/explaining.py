"""Which engine runs a recurrence, and why, in words."""

from collections import Counter

from loopfold.casts import casts
from loopfold.engines.auto import Auto
from loopfold.engines.base import Engine, Recurrence
from loopfold.engines.programs import Program, program_of
from loopfold.engines.sequential import Sequential
from loopfold.engines.time_parallel import TimeParallel, waits_for_steps
from loopfold.states import leaves, name_of
from loopfold.stepgraph.loop import Value, ordered
from loopfold.stepgraph.ops import Kind

FEW, LONG = 4, 16384  # sequences, and steps: with more, or fewer, a GPU is not idle for most of a run
FASTER = 1.5  # times as fast, which is worth a word


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
    chosen, why = _chosen(engine, recurrence)
    suggestion = _suggestion(recurrence) if isinstance(engine, Auto) else []
    lines = [f"{begin}: {type(chosen).__name__}, because {why}"]
    while (around := chosen.around(recurrence)) is not None:
        words, inner, recurrence = around
        chosen, why = _chosen(inner, recurrence)
        lines += [*words, f"  inside it {type(chosen).__name__}, because {why}"]
    if not isinstance(chosen, Sequential):
        lines += _parts(program_of(recurrence).program)
    lines += suggestion
    if code and (text := chosen.code(recurrence)):
        lines += ["", text.rstrip()]
    return "\n".join(lines)


def _suggestion(recurrence: Recurrence) -> list[str]:
    """Where `TimeParallel` should be faster by far: one or a few long sequences on a GPU. It is measured."""
    leaf, other = leaves(recurrence.state)[0], TimeParallel()
    if not waits_for_steps(leaf.device) or len(leaf) > FEW or recurrence.steps < LONG or other.refusal(recurrence):
        return []
    (why, *_), gain, _ = other.expected(recurrence)
    if gain < FASTER:
        return []
    return [f"  engine=lf.TimeParallel() should be about {gain:.2g} times as fast here: {why.strip()}"]


def _chosen(engine: Engine, recurrence: Recurrence) -> tuple[Engine, str]:
    return engine.choose(recurrence) if isinstance(engine, Auto) else (engine, "it was asked for.")


def _parts(program: Program) -> list[str]:
    loop = program.loop
    order = ordered(loop.computed().emitted)
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
