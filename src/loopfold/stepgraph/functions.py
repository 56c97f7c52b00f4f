"""autograd.Functions of the user's own in a trace: the value as it is, and the gradient as a factor.

The backward of such a Function is traced too, for an incoming gradient of ones. What it gives is the factor w of

    ∇a = w · ∇y

which is right where every number of ∇a is a multiple of the same number of ∇y: the recorded operations tell.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import _C, Tensor
from torch.autograd.function import Function, FunctionCtx, _SingleLevelFunction

from loopfold.casts import with_casts
from loopfold.stepgraph.graph import Node, Refusal
from loopfold.stepgraph.recorder import Recorder, stood
from loopfold.stepgraph.surrogate import SURROGATE

_here = threading.local()
_lock = threading.Lock()
_traces = 0  # that are under way, in all threads
_APPLY = _C._FunctionBase.__dict__["apply"]
_OWNER: Any = Function if Function.__dict__["apply"] is _APPLY else _SingleLevelFunction  # the former from 2.15 on
_INHERITED = "apply" not in vars(_OWNER)


@contextmanager
def watched(recorder: Recorder) -> Iterator[None]:
    """While open, what this thread asks of autograd.Functions is recorded; other threads notice nothing."""
    global _traces
    before = getattr(_here, "recorder", None)
    with _lock:
        _traces += 1
        _OWNER.apply = classmethod(_apply)
    _here.recorder = recorder
    try:
        yield
    finally:
        _here.recorder = before
        with _lock:
            _traces -= 1
            if not _traces:
                if _INHERITED:
                    del _OWNER.apply
                else:
                    _OWNER.apply = _APPLY


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of what `Function.apply` is, or calls; then also where a step holds on to `Spike.apply`."""
    recorder = getattr(_here, "recorder", None)
    if recorder is None:
        return _APPLY.__get__(None, cls)(*args, **kwargs)
    return _recorded(recorder, cls, stood(recorder.fakes, args))


class _Context(FunctionCtx):
    """What a Function keeps from forwards to backwards."""

    to_save: tuple[Any, ...] = ()
    dirty_tensors: tuple[Any, ...] = ()
    non_differentiable: tuple[Any, ...] = ()

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return self.to_save


def _recorded(recorder: Recorder, cls: Any, args: tuple[Any, ...]) -> Any:
    name = cls.__name__
    floating = [isinstance(a, Tensor) and a.is_floating_point() for a in args]
    ctx, outer = _Context(tuple(floating)), recorder.own_gradient
    recorder.own_gradient = True
    try:
        with torch.no_grad():
            if cls.setup_context is _SingleLevelFunction.setup_context:
                y = cls.forward(ctx, *args)
            else:
                y = cls.forward(*args)
                cls.setup_context(ctx, args, y)
            if any(isinstance(a, Tensor) and a.is_complex() for a in (*args, y)):
                raise Refusal(f"its autograd.Function {name} computes with complex numbers.")
            if outer:  # its gradient is not asked for
                return y
            if not isinstance(y, Tensor) or ctx.dirty_tensors:
                raise Refusal(f"its autograd.Function {name} gives several results, or updates a tensor in place.")
            if ctx.non_differentiable or not y.is_floating_point():
                return y.detach()
            ones = torch.ones_like(y)
            g = recorder.lookup(ones)  # as it is before a backward that may change it in place
            back = _backward(cls, ctx, ones)
    finally:
        recorder.own_gradient = outer
    y = y.detach()
    for a, w in zip(args, back, strict=False):
        if not (isinstance(a, Tensor) and a.is_floating_point() and isinstance(w, Tensor)):
            continue
        if not (
            a.shape == y.shape == w.shape and a.dtype == y.dtype == w.dtype and _is_multiple(recorder.lookup(w), g)
        ):
            raise Refusal(
                f"the backward of its autograd.Function {name} is not a factor times the gradient that comes, number "
                f"by number. Write it as g * factor, or as torch operations: y = a + (y - a).detach()."
            )
        y = SURROGATE(y, a, w)
    return y


def _backward(cls: Any, ctx: _Context, ones: Tensor) -> tuple[Any, ...]:
    try:
        with with_casts((), ones.device):  # as on the way back
            back = cls.backward(ctx, ones)
    except Refusal:
        raise
    except Exception as error:
        raise Refusal(f"the backward of its autograd.Function {cls.__name__} cannot be traced: {error}") from None
    return back if isinstance(back, tuple) else (back,)


_SAME = {"clone", "alias", "detach", "neg", "view", "_unsafe_view", "reshape", "expand", "_to_copy"}


def _is_multiple(node: Node, g: Node) -> bool:
    """Whether every number of a node is a multiple of the same number of g, by what is not g."""
    reads: dict[Node, bool] = {}
    todo = [node]
    while todo:  # which nodes depend on g; what a node reads stands before it
        at = todo[-1]
        missing = [n for n in at.inputs() if n not in reads]
        if at is g or not missing:
            reads[at] = at is g or any(reads[n] for n in at.inputs())
            todo.pop()
        else:
            todo += missing

    def zero(a: Any) -> bool:
        return a.op in ("zeros", "zeros_like") if isinstance(a, Node) else a == 0

    def passes(a: Any) -> bool:
        """A multiple of g, or 0."""
        if not isinstance(a, Node) or not reads.get(a):
            return zero(a)
        if a is g:
            return True
        flows = [isinstance(b, Node) and reads[b] for b in a.args]
        if a.shape != node.shape:
            return False
        if a.op in _SAME:
            return passes(a.args[0]) and a.dtype == a.args[0].dtype
        if a.op == "mul":
            return sum(flows) == 1 and passes(a.args[flows.index(True)])
        if a.op == "div":
            return flows == [True, False] and not a.kwargs and passes(a.args[0])
        if a.op in ("add", "sub"):
            return passes(a.args[0]) and passes(a.args[1])
        if a.op == "where":
            return not flows[0] and passes(a.args[1]) and passes(a.args[2])
        if a.op == "masked_fill":
            return not flows[1] and passes(a.args[0]) and zero(a.args[2])
        return False

    return passes(node)
