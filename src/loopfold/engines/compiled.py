"""What every engine that compiles a step shares: the trace, the parts outside the loop, and the check of each run.

An engine brings a `Kernel`, which runs the loop forwards and backwards. All else is here, so an engine cannot get it
wrong: parameters enter as the user's own tensors, and what stands outside the loop is run by torch with its own
gradients.
"""

import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from loopfold.casts import casts, with_casts
from loopfold.engines.base import Engine, EngineWarning, Recurrence
from loopfold.engines.draws import Draws, draw, generators, set_generators
from loopfold.engines.kernel import Call, Kernel, LoopFunction
from loopfold.engines.programs import Found, forget, kept_beside, program_of
from loopfold.engines.replay import Replays
from loopfold.engines.selfcheck import (
    FIRST,
    Guard,
    agrees_later,
    disagreement,
    guarded,
    marks_of,
    step_to_check,
)
from loopfold.engines.sequential import Sequential
from loopfold.states import (
    State,
    alive,
    all_leaves,
    detached,
    from_reals,
    in_reals,
    leaves,
    map_state,
    name_of,
    parted,
    rebuild,
    until_the_end,
)
from loopfold.stepgraph.graph import Node, NotRun, Refusal, Unsound, apply, batch_at, from_rows
from loopfold.surroundings import global_hooks, in_a_transform


def compiled_refusal(recurrence: Recurrence) -> str | None:
    """Why no compiling engine can run this call, or None; each engine asks, and the call is looked at once."""
    if "refusal" not in recurrence.memo:
        recurrence.memo["refusal"] = _refusal(recurrence)
    return recurrence.memo["refusal"]


IN_A_TRANSFORM = "it is called inside a torch.func transform or forward-mode differentiation."


def _refusal(recurrence: Recurrence) -> str | None:
    """What the call decides is asked first, and not remembered for later ones."""
    parts = leaves(recurrence.state)
    tensors = recurrence.tensors
    if any(t.is_meta for t in tensors):
        return "it is called on tensors without data."
    batches = {leaf.shape[0] for leaf in parts if leaf.dim()}
    if len(batches) != 1 or 0 in batches:
        return "its states have no sequences, or not equally many."
    if torch.is_grad_enabled() and any(t.is_inference() for t in tensors):
        return "it is called with gradients on tensors made under torch.inference_mode."
    if nn.utils.parametrize._cache_enabled:
        return "parametrize.cached() holds tensors from one call to the next."
    if in_a_transform():
        return IN_A_TRANSFORM
    if any(type(t) not in (Tensor, nn.Parameter) or t.layout != torch.strided for t in tensors):
        return "it is called on a special kind of tensor."
    modes = _get_current_function_mode_stack()
    if torch._C._len_torch_dispatch_stack() or any(not isinstance(mode, DeviceContext) for mode in modes):
        return "it is called under a mode that watches or changes torch's operations."
    if global_hooks():
        return "hooks are set for all modules, which a compiled step would not call."
    try:
        program_of(recurrence)
    except Refusal as reason:
        return str(reason)
    return None


# ------------------------------------------------------------------ a run


def run_compiled(engine: Engine, kernel: Kernel, recurrence: Recurrence) -> State:
    """Run a recurrence through its program, and check it. What is not right is never returned.

    If a check fails, the step is traced again, since something that its trace fixed may have changed unseen; if that
    fails too, `Sequential` runs the recurrence, now and from now on, and says so.
    """
    if program_of(recurrence).apart:
        return _first_by_itself(engine, kernel, recurrence)
    doubted: list[int] = []
    like = leaves(recurrence.state)[0]
    draws = program_of(recurrence).program.loop.draws and not captures(like)
    before = generators(like) if draws else None
    wrong = True
    try:
        states, reason = _checked(engine, kernel, recurrence, doubted)
        if reason is not None:
            if before is not None:
                set_generators(like, before)
            forget(recurrence)
            states, reason = _checked(engine, kernel, recurrence, doubted)
    except Refusal as refusal:  # the step has become one that cannot be compiled
        reason = str(refusal)
    except NotRun as error:
        wrong, reason = False, str(error)
    if reason is None:
        return states
    if before is not None:
        set_generators(like, before)
    states = Sequential().run(recurrence)  # if the step itself fails, that is no reason for distrust
    _distrust(engine, recurrence, reason, wrong)
    return states


def _first_by_itself(engine: Engine, kernel: Kernel, recurrence: Recurrence) -> State:
    """The first step as `Sequential` takes it; then the others, which are alike."""
    first = Sequential().run(recurrence.part(0, 1, recurrence.state))
    if recurrence.steps == 1:
        return first
    state = map_state(lambda leaf: leaf[0], parted(first, recurrence.state)[1])
    memo = {"program": replace(program_of(recurrence), apart=False)}
    rest = run_compiled(engine, kernel, replace(recurrence.part(1, recurrence.steps - 1, state), memo=memo))
    return rebuild(first, [torch.cat(pair) for pair in zip(leaves(first), leaves(rest), strict=True)])


def _checked(engine: Engine, kernel: Kernel, recurrence: Recurrence, doubted: list[int]) -> tuple[State, str | None]:
    """The states, and what is wrong with them, if that was looked at and found; `doubted` are steps to look at."""
    found = program_of(recurrence)
    watch = found.program.watch.of(type(engine).__name__)
    begin = time.perf_counter()
    if found.program.loop.draws and recurrence.draws is None:
        recurrence = replace(recurrence, draws=_drawn(recurrence, found))
    try:
        states = _run_or_replay(engine, kernel, recurrence, found)
    except Unsound as fault:
        return None, str(fault)
    end = time.perf_counter()
    device, record = leaves(states)[0].device, any(leaf.requires_grad for leaf in leaves(states))
    on_gpu = device.type == "cuda"
    if captures(leaves(states)[0]):
        return states, None
    doubted += watch.doubts() if on_gpu else []
    wait = not on_gpu or bool(doubted) or watch.runs < FIRST
    due = watch.due(end - begin, (leaves(states)[0].shape[1], recurrence.lengths is None, record, device))
    if not (due or doubted):
        return states, None
    t, reason, rough = step_to_check(recurrence, watch.runs), None, found.program.graph.roughest
    doubted[:] = dict.fromkeys([*(d for d in doubted if d < recurrence.steps), t, *([0] if watch.runs == 1 else [])])
    try:
        if wait:
            reason = next(filter(None, (disagreement(recurrence, states, d, rough) for d in doubted)), None)
        elif watch.pending is None:  # the answer is read at a later run, so that the CPU does not wait for the GPU
            watch.ask(agrees_later(recurrence, states, t, rough), t)
    except torch.OutOfMemoryError:
        return states, None  # no room to look
    except Exception as error:  # the step itself fails there, and `Sequential` will say how
        reason = f"the step fails: {error}"
    watch.paid(time.perf_counter() - end)
    if reason is None and wait and record and watch.guards_gradients():
        again, distrust = partial(_run, engine, kernel, found=found), partial(_distrust, engine, recurrence)
        marks = marks_of(recurrence)
        guard = Guard(recurrence, detached(states), again, watch, distrust, marks, casts(device), rough)
        states = guarded(guard, states)
    return states, reason


def _distrust(engine: Engine, recurrence: Recurrence, reason: str, wrong: bool = True) -> None:
    """Use the program of a step no more, and say so; if it was not `wrong`, the machine did not run it."""
    name, reason = type(engine).__name__, reason.rstrip(".")
    with suppress(Refusal):
        watch = program_of(recurrence).program.watch
        watch.distrusted = f"its compiled run was wrong: {reason}." if wrong else f"its kernel was not run: {reason}."
    blame = "Either the step depends on something that Loopfold does not see, or this is a fault in Loopfold."
    warnings.warn(
        f"{name} {'was wrong about' if wrong else 'could not run'} {name_of(recurrence.f)}, so lf.Sequential() runs "
        f"it: {reason}.{f' {blame}' if wrong else ''}",
        EngineWarning,
        stacklevel=2,
    )


def _run_or_replay(engine: Engine, kernel: Kernel, recurrence: Recurrence, found: Found) -> State:
    """As `_run`; on a GPU as a CUDA graph, where that gains and such calls come often."""
    program, like = found.program, leaves(recurrence.state)[0]
    steps, batch = recurrence.steps, like.shape[0]
    if not like.is_cuda or program.loop.draws or not kernel.gains_by_replay(program, steps, batch):
        return _run(engine, kernel, recurrence, found)
    tensors, index, lengths = recurrence.tensors, recurrence.index, recurrence.lengths
    more = [t if t is None else t.to(like.device) for t in (index, lengths)]

    def run(given: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
        rest = iter(given[len(tensors) :])
        index, lengths = [t if t is None else next(rest) for t in more]
        part = replace(recurrence.on(given[: len(tensors)]), index=index, lengths=lengths)
        return leaves(_run(engine, kernel, part, found, parameters))

    replays = kept_beside(recurrence, program, kernel, lambda: Replays(type(engine).__name__))
    given = [*tensors, *(t for t in more if t is not None)]
    sizes = (steps, lengths is None, index is None, *map(repr, found.numbers))  # -0.0 is another than 0.0
    return rebuild(program.graph.structure, replays.run(run, sizes, given, parameters_of(recurrence, found)))


def _run(
    engine: Engine,
    kernel: Kernel,
    recurrence: Recurrence,
    found: Found,
    parameters: Sequence[Tensor] | None = None,
) -> State:
    """Run it without autocast, whose casts are operations of the step graph; with its parameters, or with others."""
    with with_casts((), leaves(recurrence.state)[0].device):
        return _run_parts(engine, kernel, recurrence, found, parameters)


def _run_parts(
    engine: Engine, kernel: Kernel, recurrence: Recurrence, found: Found, parameters: Sequence[Tensor] | None
) -> State:
    """Once, before, the loop, after."""
    program = found.program
    loop, graph, tau = program.loop, program.graph, recurrence.steps
    start = in_reals(leaves(recurrence.state))
    batch = start[0].shape[0]
    rows = tau * batch

    values = given_to(recurrence, found, parameters)
    if loop.draws:
        values |= recurrence.draws.sequences()
    many, which = rows, None
    xs = [leaf.reshape(rows, *leaf.shape[2:]) for leaf in in_reals(recurrence.sequences)]
    tokens = len(xs) == 1 and xs[0].dim() == 1 and not xs[0].is_floating_point()
    if tokens and not (loop.outside or loop.draws or start[0].is_cuda):  # a GPU would have to say how many kinds
        xs[0], which = xs[0].unique(return_inverse=True)  # tokens: each kind is computed on once
        many = len(xs[0])
    values |= zip(graph.x, xs, strict=True)
    for node in loop.before:
        values[node] = apply(node, values, many)
    constants = [as_row(recipe.make(values), start[0], loop.dtype) for recipe in loop.constants]
    if any(len(constant) != k for constant, k in zip(constants, loop.lengths, strict=True)):
        raise Unsound("a row or matrix of what is computed once has another size than the loop reads.")
    inputs = [_sized(r.make(values), many, w) for r, w in zip(loop.inputs, loop.widths, strict=True)]
    if which is not None:
        inputs = [F.embedding(which, table) for table in inputs]
    inputs = [sequence.reshape(tau, batch, -1) for sequence in inputs]
    values |= zip(graph.context, in_reals(all_leaves(recurrence.context)), strict=True)
    for node in loop.aside:
        values[node] = apply(node, values, batch)
    rows_before = [start[i].to(graph.state[i].dtype).to(loop.dtype) for i in loop.carried]
    state = [leaf if leaf.dim() == 2 else leaf.reshape(batch, -1) for leaf in rows_before]
    state += [recipe.make(values) for recipe in loop.contexts]

    record = torch.is_grad_enabled() and any(t.requires_grad for t in (*constants, *inputs, *state))
    call = Call(tau, batch, recurrence.lengths, record)
    emitted: list[Tensor] = []
    if loop.emitted:  # else no step reads the one before
        tensors = (*constants, *inputs, *state)
        emitted = list(LoopFunction.apply(engine, kernel, program, call, len(constants), len(inputs), *tensors))

    if loop.outside:
        for node in loop.repeated:
            values[node] = torch.cat([values[node]] * tau, batch_at(node.shape) or 0)
        for node, k in loop.taps.items():
            sequence = _alive_or_first(emitted[k], recurrence.lengths).reshape(rows, -1)
            values[node] = from_rows(sequence, node.shape).to(node.dtype)
        for k in loop.read_after:
            i = loop.carried[k]
            before = torch.cat([state[k][None], emitted[k][:-1]])
            before = _alive_or_first(before, recurrence.lengths).reshape(rows, *start[i].shape[1:])
            values[graph.state[i]] = before.to(graph.state[i].dtype)
        for node in loop.after:
            values[node] = apply(node, values, rows)
    results, returned = [], (*graph.outputs, *graph.results)
    for leaf in loop.leaves:
        if isinstance(leaf, Node):
            whole = until_the_end(values[leaf].reshape(tau, batch, *leaf.shape[1:]), recurrence.lengths)
            own = leaf.target is not None and not leaf.target.is_view
            results.append(whole if own else whole.clone())  # x itself is not ours to give away
        else:  # two leaves that are one value have memory of their own
            sequence = emitted[leaf] if loop.leaves.index(leaf) == len(results) else emitted[leaf].clone()
            node = returned[len(results)]
            shape = (tau, batch, *node.shape[1:])
            results.append((sequence if sequence.shape == shape else sequence.view(shape)).to(node.dtype))
    cut = len(graph.outputs)
    return from_reals(graph.structure, [*results[cut:], *results[:cut]])


def given_to(recurrence: Recurrence, found: Found, parameters: Sequence[Tensor] | None = None) -> dict[Node, Any]:
    """The parameters and the numbers of the step, as they are now."""
    tensors = parameters_of(recurrence, found) if parameters is None else parameters
    values: dict[Node, Any] = {node: t for (node, _), t in zip(found.program.parameters, tensors, strict=True)}
    values |= zip(found.program.graph.numbers, found.numbers, strict=True)
    return values


def parameters_of(recurrence: Recurrence, found: Found) -> list[Tensor]:
    """The parameters and buffers that the step reads, in the order of the program."""
    assert isinstance(recurrence.f, nn.Module)
    return [tensor_of(recurrence.f) for _, tensor_of in found.program.parameters]


def _drawn(recurrence: Recurrence, found: Found) -> Draws:
    like = leaves(recurrence.state)[0]
    with with_casts((), like.device):
        return draw(found.program.loop, given_to(recurrence, found), recurrence.steps, like)


def captures(like: Tensor) -> bool:
    """Whether a CUDA graph is being made, in which no size may depend on a value."""
    return like.is_cuda and torch.cuda.is_current_stream_capturing()


def _sized(rows: Tensor, many: int, width: int) -> Tensor:
    return rows if rows.shape == (many, width) else rows.expand(many, width)


def as_row(constant: Tensor | float | range, like: Tensor, dtype: torch.dtype) -> Tensor:
    """What a recipe has made, as a tensor."""
    if isinstance(constant, range):
        return torch.arange(len(constant), dtype=dtype, device=like.device)
    return constant if isinstance(constant, Tensor) else like.new_full((1,), constant, dtype=dtype)


def _alive_or_first(sequence: Tensor, lengths: Tensor | None) -> Tensor:
    """After a sequence's end, its first value again: a value that the operations after the loop can handle."""
    return sequence if lengths is None else torch.where(alive(sequence, lengths), sequence, sequence[:1])
