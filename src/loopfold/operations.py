"""A layer as one operation of torch, which torch.compile and torch.export put into their graphs as it is.

Without it torch's compiler would stop at every layer of ours and go on behind it. The operation runs the layer as a
call outside of torch.compile does, by its engine and with all checks, so a step that changes later is still run right.
"""

import copy
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from functools import lru_cache
from itertools import count
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from loopfold.engines.base import EngineWarning
from loopfold.engines.programs import program_of
from loopfold.states import State, all_leaves, has_a_gradient, leaves, name_of, parted, rebuild
from loopfold.stepgraph.graph import Refusal, StepGraph, sizes_of
from loopfold.stepgraph.stored import StoredStep, from_text, to_text
from loopfold.transitions import initial_state, own_start
from loopfold.unfolding import Unfolding, checked, unfold

Layer = Any  # a `Recurrent`, which is further down

# `layer` is the number of a layer in this process; or `step` is the step itself as text, in a graph of torch.export,
# which may run in another one. `cast` is the dtype of torch.autocast, "" where that is off. `tensors` are x, the leaves
# of the state where one is given (`starts` of them), and the parameters; `needs` says which of them a gradient goes to.
# Of the results, the first is the number of the run, by which its way back is found; the way back is given the others
# again, though it does not read them: so the compiler writes over none of them before it, and they need not be copied.
#
# A graph of torch.compile(mode="reduce-overhead") would replay without Python, and so without the way back of its run:
# it leaves these operations out of its CUDA graphs, where an engine captures graphs of its own.
torch.library.define(
    "loopfold::unfold",
    "(int layer, str step, int starts, bool only_last, str cast, bool[] needs, Tensor[] tensors, Tensor? lengths)"
    " -> Tensor[]",
    tags=torch.Tag.cudagraph_unsafe,
)
torch.library.define(
    "loopfold::unfold_backward",
    "(Tensor run, bool[] needs, Tensor?[] incoming, Tensor[] tensors, Tensor[] results) -> Tensor[]",
    tags=torch.Tag.cudagraph_unsafe,
)

_layers: weakref.WeakValueDictionary[int, Layer] = weakref.WeakValueDictionary()
_runs: dict[int, tuple[list[Tensor], list[Tensor], set[int]]] = {}  # the results, their sources, where buffers lie
_numbers = count(1)
_lock = threading.Lock()
_rebuilds = WeakIdKeyDictionary()  # steps that were stored as text, by the first of their parameters
_NONE = torch.empty(0)  # of a step that has none
_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def numbered(layer: Layer) -> int:
    """A number by which the operation finds the layer, in this process."""
    number = next(_numbers)
    _layers[number] = layer
    return number


def unfold_in_graph(
    layer: Layer, x: Tensor, state: State | None, lengths: Tensor | list[int] | None, only_last: bool
) -> Unfolding:
    """What torch's compiler sees of a call of the layer."""
    kind = x.device.type
    cast = _NAMES[torch.get_autocast_dtype(kind)] if torch.is_autocast_enabled(kind) else ""
    starts = [] if state is None else leaves(state)
    number, step, parameters = layer.number, "", list(layer.cell.parameters())
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
        try:
            step, starts, parameters = _stored(layer, x, state, cast)
            number = 0
        except Refusal as reason:
            warnings.warn(
                f"{name_of(layer.cell)} is not stored in the program, which runs only in this process: {reason}",
                EngineWarning,
                stacklevel=2,
            )
    tensors = [x, *starts, *parameters]
    grad, later = torch.is_grad_enabled(), torch.compiler.is_exporting()  # who runs it may want other gradients
    needs = [grad and (t.is_floating_point() if later else t.requires_grad) for t in tensors]
    if isinstance(lengths, list):
        lengths = torch.tensor(lengths, device=x.device)
    _, *results = torch.ops.loopfold.unfold(number, step, len(starts), only_last, cast, needs, tensors, lengths)
    outputs, states = _structured(layer.returns, iter(results))
    return Unfolding.of_ends(outputs, states) if only_last else Unfolding.of(outputs, states, lengths)


def _stored(layer: Layer, x: Tensor, state: State | None, cast: str) -> tuple[str, list[Tensor], list[Tensor]]:
    """The step as text, the leaves of the state before it, and the parameters that it reads.

    While torch exports a layer, its parameters have no numbers. So a copy with others is traced, and one more, since a
    step that looks at numbers may be another with others.
    """
    cell: Any = layer.cell
    own = own_start(cell)
    tensors = [*cell.parameters(), *cell.buffers()]
    texts = set()
    if layer.training and any(map(parametrize.is_parametrized, cell.modules())):
        raise Refusal("in training, its weights may be others in each run.")
    with ExitStack() as stack:
        for _ in _get_current_function_mode_stack():  # which would note that a trace switches gradients off
            stack.enter_context(_pop_mode_temporarily())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(_casting(cast, x))
        for turn in range(2):
            example = torch.zeros([1, 2, *map(int, x.shape[2:])], dtype=x.dtype, device=x.device)
            try:
                twin = copy.deepcopy(cell, {id(t): _like(t, turn) for t in tensors})
                recurrence = checked(twin, example, None, None, None)
                if any(leaf.is_complex() for leaf in (*leaves(recurrence.state), x)):
                    raise Refusal("its state or x is complex.")
                found = program_of(recurrence)
                layer.returns = tuple(_marked(p) for p in parted(found.program.graph.structure, recurrence.state))
                texts.add(to_text(found.program.graph))
            except Refusal:
                raise
            except Exception as error:  # of the user's own code, or of what deepcopy does not copy
                raise Refusal(f"it cannot be copied and traced ({str(error) or type(error).__name__}).") from error
    if found.apart or recurrence.index is not None:
        raise Refusal("its steps are not all alike.")
    if len(texts) > 1:
        raise Refusal("it is another step with other numbers in its parameters.")
    if state is None:
        sizes = [(leaf.shape[1:], leaf.dtype) for leaf in leaves(recurrence.state)]
        zeros = [x.new_zeros([x.shape[1], *size], dtype=dtype) for size, dtype in sizes]
        state = tuple(zeros) if own is None else own(x.shape[1])
    parameters = [attrgetter(name)(cell) for name in found.program.graph.parameters]
    return texts.pop(), leaves(state), parameters


def _like(tensor: Tensor, turn: int) -> Tensor:
    """A tensor like one that has no numbers, with such as it may have."""
    sizes: Any = {"size": tensor.shape, "dtype": tensor.dtype, "device": tensor.device}
    if not has_a_gradient(tensor):
        return torch.full(fill_value=turn, **sizes)
    made = torch.rand(**sizes, generator=torch.Generator(tensor.device).manual_seed(turn))
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _structured(like: Any, flow: Iterator[Tensor]) -> Any:
    """`like`, with a tensor for every True in it."""
    if like is None:
        return None
    if like is True:
        return next(flow)
    parts = [_structured(part, flow) for part in like]
    return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *_, needs, tensors, _ = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.needs = needs
    ctx.set_materialize_grads(False)  # a way back that is given no gradient of a result does not read any


def _way_back(ctx: Any, incoming: list[Tensor | None]) -> Any:
    run, *kept = ctx.saved_tensors
    results, tensors = kept[: len(incoming) - 1], kept[len(incoming) - 1 :]
    found = iter(torch.ops.loopfold.unfold_backward(run, ctx.needs, incoming[1:], tensors, results))
    return *[None] * 6, [next(found) if need else None for need in ctx.needs], None


def _once(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(
        "a layer has first derivatives only under torch.compile and in programs of torch.export. For second ones use "
        "engine=lf.Sequential(), outside of them."
    )


torch.library.register_autograd("loopfold::unfold", _way_back, setup_context=_keep)
torch.library.register_autograd("loopfold::unfold_backward", _once)


# ------------------------------------------------------------------ what runs


def _casting(cast: str, x: Tensor) -> Any:
    """torch.autocast as it was around the call."""
    if not cast and not torch.is_autocast_enabled(x.device.type):
        return nullcontext()
    return torch.autocast(x.device.type, getattr(torch, cast) if cast else None, enabled=bool(cast))


def _layer(number: int) -> Layer:
    layer = _layers.get(number)
    if layer is None:
        raise RuntimeError(
            "a graph of torch.compile, or one of torch.export whose step is no plain data, holds its lf.Recurrent by "
            "number, so it runs only in the process that made it, and as long as the layer is there."
        )
    return layer


@lru_cache(64)
def _graph(step: str) -> StepGraph:
    return from_text(step)


def _rebuilt(step: str, given: list[Tensor], needs: list[bool]) -> StoredStep:
    """The step that is stored in a text, with the parameters that are given, in the memory where they are."""
    places = [(t.data_ptr(), t.shape, t.stride()) for t in given]
    holder = given[0] if given else _NONE
    with _lock:
        known = _rebuilds.setdefault(holder, {})
        if (step, *needs) not in known or known[step, *needs][0] != places:
            own = [t.detach().requires_grad_(need) for t, need in zip(given, needs, strict=True)]
            known[step, *needs] = places, StoredStep(_graph(step), own)
        return known[step, *needs][1]


def _autograd() -> Any:
    """While open, autograd is at work, and z.conj() is conjugated: inside of an operation torch may switch both off."""
    off, keys = torch._C._dispatch_tls_local_exclude_set(), torch._C.DispatchKey
    off = off.remove(keys.Conjugate).remove(keys.Negative).remove(keys.ZeroTensor)
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor, keys.ADInplaceOrView):
        off = off.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), off)


@torch.library.impl("loopfold::unfold", "CompositeExplicitAutograd")
def _run(
    number: int,
    step: str,
    starts: int,
    only_last: bool,
    cast: str,
    needs: list[bool],
    tensors: list[Tensor],
    lengths: Tensor | None,
) -> list[Tensor]:
    needs = [need and not torch.is_inference_mode_enabled() for need in needs]
    given, record = tensors[1 + starts :], any(needs)
    layer: Any = None if step else _layer(number)
    cell = _rebuilt(step, given, needs[1 + starts :]) if step else layer.cell
    own = list(cell.buffers() if step else cell.parameters())
    if len(own) != len(given) or any(a.data_ptr() != b.data_ptr() for a, b in zip(own, given, strict=False)):
        raise RuntimeError("a compiled graph was given other parameters than those of the layer that it was made of.")
    with _autograd(), torch.set_grad_enabled(record), _casting("" if step else cast, tensors[0]):
        x, *start = [t.detach().requires_grad_(need) for t, need in zip(tensors[: 1 + starts], needs, strict=False)]
        if step:  # whose graph has the casts in it
            run = unfold(cell, x, tuple(start), lengths, only_last=only_last)
        else:
            state = rebuild(initial_state(cell, x.shape[1], x[0]), start) if starts else None
            run = layer.forward(x, state, lengths, only_last=only_last)  # whose hooks torch's compiler has called
        results = [leaf[0] if only_last else leaf for leaf in all_leaves(run.outputs, run.states)]
    buffers = {t.untyped_storage().data_ptr() for t in cell.buffers()}
    memory = buffers | {t.untyped_storage().data_ptr() for t in tensors}
    name = next(_numbers)
    ticket = torch.tensor(name)
    if record:
        _runs[name] = (results, [t for t, need in zip([x, *start, *own], needs, strict=True) if need], buffers)
        weakref.finalize(ticket, _runs.pop, name, None)
    return [ticket, *(_given_away(leaf.detach(), memory) for leaf in results)]


def _given_away(tensor: Tensor, memory: set[int]) -> Tensor:
    """A tensor laid out as torch's compiler expects it, outside of `memory`: the compiler may write over it."""
    storage = tensor.untyped_storage()
    whole = tensor.is_contiguous() and len(storage) == tensor.nbytes
    if not whole or storage.data_ptr() in memory:
        return tensor.clone(memory_format=torch.contiguous_format)
    memory.add(storage.data_ptr())
    return tensor


@torch.library.impl("loopfold::unfold_backward", "CompositeExplicitAutograd")
def _back(
    run: Tensor, needs: list[bool], incoming: list[Tensor | None], tensors: list[Tensor], results: list[Tensor]
) -> list[Tensor]:
    if int(run) not in _runs:
        raise RuntimeError("a layer that was exported under torch.no_grad has no gradients: export it without.")
    outputs, sources, buffers = _runs[int(run)]
    with _autograd(), torch.enable_grad():
        pairs = [(r, g) for r, g in zip(outputs, incoming, strict=True) if r.requires_grad and g is not None]
        outputs, gs = [r for r, _ in pairs], [g for _, g in pairs]
        grads: Any = [None] * len(sources)  # where what was asked for depends on none of them
        if pairs:
            grads = torch.autograd.grad(outputs, sources, gs, allow_unused=True, retain_graph=True)
    memory = {t.untyped_storage().data_ptr() for t in (*tensors, *results, *(g for g in incoming if g is not None))}
    memory |= buffers
    return [
        torch.zeros_like(s, memory_format=torch.contiguous_format) if g is None else _given_away(g, memory)
        for s, g in zip(sources, grads, strict=True)
    ]


# ------------------------------------------------------------------ the sizes of what comes


@torch.library.register_fake("loopfold::unfold")  # type: ignore[untyped-decorator]
def _sizes(
    number: int,
    step: str,
    starts: int,
    only_last: bool,
    cast: str,
    needs: list[bool],
    tensors: list[Tensor],
    lengths: Tensor | None,
) -> list[Tensor]:
    x = tensors[0]
    if step:
        graph = _graph(step)
        like = [(sizes_of(node.shape[1:]), node.dtype) for node in (*graph.results, *graph.outputs)]
    else:
        like = _returned(_layer(number), x, cast)
    lead = x.shape[1:2] if only_last else x.shape[:2]
    results = [torch.empty([*lead, *shape], dtype=dtype, device=x.device) for shape, dtype in like]
    return [torch.empty((), dtype=torch.int64), *results]


def _returned(layer: Layer, x: Tensor, cast: str) -> list[tuple[Any, Any]]:
    """The sizes and dtypes of what a step of the layer gives; its structure is noted for the caller."""
    with _disable_current_modes(), torch.no_grad(), _casting(cast, x):
        example = torch.zeros([1, 1, *map(int, x.shape[2:])], dtype=x.dtype, device=x.device)
        recurrence = checked(layer.cell, example, None, None, None)
        new = recurrence.take(recurrence.state, 0)
        layer.returns = tuple(_marked(part) for part in parted(new, recurrence.state))
    return [(leaf.shape[1:], leaf.dtype) for leaf in leaves(new)]


def _marked(part: Any) -> Any:
    """The structure of a part, with True for every tensor."""
    if part is None or isinstance(part, Tensor):
        return None if part is None else True
    parts = [_marked(each) for each in part]
    return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)


@torch.library.register_fake("loopfold::unfold_backward")  # type: ignore[untyped-decorator]
def _sizes_back(
    run: Tensor, needs: list[bool], incoming: list[Tensor | None], tensors: list[Tensor], results: list[Tensor]
) -> list[Tensor]:
    return [t.new_empty(t.shape) for t, need in zip(tensors, needs, strict=True) if need]
