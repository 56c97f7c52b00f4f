"""A layer as one operation of torch, which torch.compile and torch.export put into their graphs as it is.

Without it torch's compiler would stop at every layer of ours and go on behind it. The operation runs the layer as a
call outside of torch.compile does, by its engine and with all checks, so a step that changes later is still run right.
"""

import weakref
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from loopfold.states import State, all_leaves, leaves, parted, rebuild
from loopfold.transitions import initial_state
from loopfold.unfolding import Unfolding, checked

Layer = Any  # a `Recurrent`, which is further down

# `cast` is the dtype of torch.autocast, "" where that is off. `tensors` are x, the leaves of the state where one is
# given (`starts` of them), and the parameters; `needs` says which of them a gradient goes to. Of the results, the first
# is the number of the run, by which its way back is found.
torch.library.define(
    "loopfold::unfold",
    "(int layer, int starts, bool only_last, str cast, bool[] needs, Tensor[] tensors, Tensor? lengths) -> Tensor[]",
)
torch.library.define(
    "loopfold::unfold_backward", "(Tensor run, bool[] needs, Tensor?[] incoming, Tensor[] tensors) -> Tensor[]"
)

_layers: weakref.WeakValueDictionary[int, Layer] = weakref.WeakValueDictionary()
_runs: dict[int, tuple[list[Tensor], list[Tensor]]] = {}  # what was given, and what it was made from
_numbers = count(1)
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
    starts = [] if state is None else leaves(state)
    cell: Any = layer.cell
    tensors = [x, *starts, *cell.parameters()]
    grad = torch.is_grad_enabled()
    needs = [grad and tensor.requires_grad for tensor in tensors]
    if isinstance(lengths, list):
        lengths = torch.tensor(lengths, device=x.device)
    kind = x.device.type
    cast = _NAMES[torch.get_autocast_dtype(kind)] if torch.is_autocast_enabled(kind) else ""
    results = _Unfold.apply(layer.number, len(starts), only_last, cast, needs, lengths, *tensors)
    outputs, states = _structured(layer.returns, iter(results))
    return Unfolding.of_ends(outputs, states) if only_last else Unfolding.of(outputs, states, lengths)


def _structured(like: Any, flow: Iterator[Tensor]) -> Any:
    """`like`, with a tensor for every True in it."""
    if like is None:
        return None
    if like is True:
        return next(flow)
    parts = [_structured(part, flow) for part in like]
    return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)


class _Unfold(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        number: int,
        starts: int,
        only_last: bool,
        cast: str,
        needs: list[bool],
        lengths: Tensor | None,
        *tensors: Tensor,
    ) -> Any:
        run, *results = torch.ops.loopfold.unfold(number, starts, only_last, cast, needs, list(tensors), lengths)
        ctx.save_for_backward(run, *tensors)
        ctx.needs = needs
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        run, *tensors = ctx.saved_tensors
        found = iter(torch.ops.loopfold.unfold_backward(run, ctx.needs, list(incoming), tensors))
        return *[None] * 6, *[next(found) if need else None for need in ctx.needs]


# ------------------------------------------------------------------ what runs


def _casting(cast: str, x: Tensor) -> Any:
    """torch.autocast as it was around the call."""
    return torch.autocast(x.device.type, getattr(torch, cast) if cast else None, enabled=bool(cast))


def _layer(number: int) -> Layer:
    layer = _layers.get(number)
    if layer is None:
        raise RuntimeError(
            "a graph of torch.compile or torch.export holds its lf.Recurrent by number, so it runs only in the process "
            "that made it, and as long as the layer is there."
        )
    return layer


def _autograd() -> Any:
    """While open, autograd is at work, which torch switches off inside of an operation."""
    off, keys = torch._C._dispatch_tls_local_exclude_set(), torch._C.DispatchKey
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor, keys.ADInplaceOrView):
        off = off.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), off)


@torch.library.impl("loopfold::unfold", "CompositeExplicitAutograd")
def _run(
    number: int,
    starts: int,
    only_last: bool,
    cast: str,
    needs: list[bool],
    tensors: list[Tensor],
    lengths: Tensor | None,
) -> list[Tensor]:
    layer: Any = _layer(number)
    own = list(layer.cell.parameters())
    given = tensors[1 + starts :]
    if len(own) != len(given) or any(a.data_ptr() != b.data_ptr() for a, b in zip(own, given, strict=False)):
        raise RuntimeError("a compiled graph was given other parameters than those of the layer that it was made of.")
    record = any(needs)
    with _autograd(), torch.set_grad_enabled(record), _casting(cast, tensors[0]):
        x, *start = [t.detach().requires_grad_(need) for t, need in zip(tensors[: 1 + starts], needs, strict=False)]
        state = None
        if starts:
            state = rebuild(initial_state(layer.cell, x.shape[1], x[0]), start)
        run = layer.forward(x, state, lengths, only_last=only_last)  # whose hooks torch's compiler has called
        results = [leaf[0] if only_last else leaf for leaf in all_leaves(run.outputs, run.states)]
    name = next(_numbers)
    ticket = torch.tensor(name)
    if record:
        _runs[name] = (results, [t for t, need in zip([x, *start, *own], needs, strict=True) if need])
        weakref.finalize(ticket, _runs.pop, name, None)
    return [ticket, *(leaf.detach().clone() for leaf in results)]  # which torch's compiler may write over


@torch.library.impl("loopfold::unfold_backward", "CompositeExplicitAutograd")
def _back(run: Tensor, needs: list[bool], incoming: list[Tensor | None], tensors: list[Tensor]) -> list[Tensor]:
    results, sources = _runs[int(run)]
    with _autograd(), torch.enable_grad():
        pairs = [(r, g) for r, g in zip(results, incoming, strict=True) if r.requires_grad and g is not None]
        grads = torch.autograd.grad(
            [r for r, _ in pairs], sources, [g for _, g in pairs], allow_unused=True, retain_graph=True
        )
    return [torch.zeros_like(s) if g is None else g.clone() for s, g in zip(sources, grads, strict=True)]


# ------------------------------------------------------------------ the sizes of what comes


@torch.library.register_fake("loopfold::unfold")  # type: ignore[untyped-decorator]
def _sizes(
    number: int,
    starts: int,
    only_last: bool,
    cast: str,
    needs: list[bool],
    tensors: list[Tensor],
    lengths: Tensor | None,
) -> list[Tensor]:
    layer, x = _layer(number), tensors[0]
    with _disable_current_modes(), torch.no_grad(), _casting(cast, x):
        example = torch.zeros([1, 1, *map(int, x.shape[2:])], dtype=x.dtype, device=x.device)
        recurrence = checked(layer.cell, example, None, None, None)
        new = recurrence.take(recurrence.state, 0)
        like = [(leaf.shape[1:], leaf.dtype) for leaf in leaves(new)]
        layer.returns = tuple(_marked(part) for part in parted(new, recurrence.state))  # read by the caller
    lead = x.shape[1:2] if only_last else x.shape[:2]
    results = [torch.empty([*lead, *shape], dtype=dtype, device=x.device) for shape, dtype in like]
    return [torch.empty((), dtype=torch.int64), *results]


def _marked(part: Any) -> Any:
    """The structure of a part, with True for every tensor."""
    if part is None or isinstance(part, Tensor):
        return None if part is None else True
    parts = [_marked(each) for each in part]
    return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)


@torch.library.register_fake("loopfold::unfold_backward")  # type: ignore[untyped-decorator]
def _sizes_back(run: Tensor, needs: list[bool], incoming: list[Tensor | None], tensors: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(t) for t, need in zip(tensors, needs, strict=True) if need]
