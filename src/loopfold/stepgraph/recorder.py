"""Writes down what a step does, operation by operation, as operations that change nothing.

A step may update tensors that it has made itself, through views too. Each tensor stands for the value that it has by
now: after `z[:, :3] = v` the tensor z stands for `cat([v, z[:, 3:]])`, and a view of z is taken again when it is read.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from loopfold.stepgraph.aten import op_name
from loopfold.stepgraph.complex_numbers import ComplexNumbers
from loopfold.stepgraph.complex_rules import RULES
from loopfold.stepgraph.graph import Node, Refusal
from loopfold.stepgraph.pick import PICK
from loopfold.stepgraph.surrogate import SURROGATE
from loopfold.surroundings import INDICES

aten = torch.ops.aten

NOT_ITS_OWN = (
    "it reads a tensor that is neither its parameter nor its buffer. Register it: self.register_buffer(name, tensor)."
)


def stood(fakes: dict[int, Tensor], arguments: Any) -> Any:
    """The arguments, with tensors without data in the place of the module's own."""
    return tree_map_only(Tensor, lambda t: fakes.get(id(t), t), arguments)


@dataclass(frozen=True, eq=False)
class _View:
    """How a tensor is a part of another: result `index` of `func(parent, *args, **kwargs)`."""

    parent: Tensor
    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None


def _in_order(like: Tensor) -> bool:
    """Whether a tensor that torch makes like this one has its numbers in order in memory, as a new one has."""
    strides = [stride for size, stride in zip(like.shape, like.stride(), strict=True) if size != 1]
    return 0 not in strides and strides == sorted(strides, reverse=True)


class Recorder(TorchDispatchMode):
    """Writes down every operation. Values are known by the identity of their tensor."""

    def __init__(
        self,
        fakes: dict[int, Tensor],
        gradients: bool,
        own: Iterable[Tensor] = (),
        called: dict[str, str] | None = None,
        real: bool = True,
    ) -> None:
        super().__init__()
        self.called = called  # to be filled: the variable of the step's own that holds each node, if that is wanted
        self.own = {id(fakes[id(t)]): t for t in own}  # the module's tensors, by those that stand for them
        self.fakes, self.gradients = fakes, gradients
        self.nodes: list[Node] = []
        self.known: dict[int, tuple[Node, Tensor]] = {}  # the tensor is held, so that its id stays its own
        self.names: dict[str, int] = {}
        self.given: dict[int, Node] = {}  # what is not the step's own to change
        self.views: dict[int, _View] = {}
        self.parts: dict[int, list[Tensor]] = {}  # the views of each tensor
        self.stale: set[int] = set()  # views of what has changed since
        self.plain: set[Node] = set()  # what no gradient goes through: random numbers, and what is made of them alone
        self.settled: set[Node] = set()  # what was updated without gradients, and has the gradient that torch gives it
        self.own_gradient = False  # inside an autograd.Function
        self.complex = ComplexNumbers(self.take, RULES) if real else None

    def leaf(self, op: str, name: str, tensor: Tensor) -> dict[str, Node]:
        """What stands for a tensor that the step is given, by its name: a node, or two for complex numbers."""
        parts = {name: tensor}
        if self.complex is not None and tensor.is_complex():
            parts = dict(zip((f"{name}.real", f"{name}.imag"), self.complex.leaf(tensor), strict=True))
        nodes = {}
        for name, part in parts.items():
            nodes[name] = Node(self._fresh(name), op, shape=tuple(part.shape), dtype=part.dtype)
            self.known[id(part)] = (nodes[name], part)
            self.given[id(part)] = nodes[name]
        return nodes

    def result(self, tensor: Tensor) -> list[Node]:
        """What stands for a tensor that the step returns, likewise."""
        if self.complex is None or not tensor.is_complex():
            return [self.lookup(tensor)]
        return [self.lookup(part) for part in self.complex.tensors(tensor)]

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.called is not None:
            self._read_names(self.called)
        with torch._C._DisableAutocast():  # its casts are written down by now, and the recorder's own need none
            return self._dispatched(func, stood(self.fakes, args), stood(self.fakes, kwargs or {}))

    def _read_names(self, called: dict[str, str]) -> None:
        """Look at the variables of the functions that are running: those of the step, outermost first, not torch's."""
        frames, frame = [], sys._getframe(2)
        while frame is not None and frame.f_code.co_name != "take_step":
            frames.append(frame)
            frame = frame.f_back  # type: ignore[assignment]
        for frame in reversed(frames):
            if not frame.f_globals.get("__name__", "").startswith(("torch.", "loopfold.stepgraph.")):
                for name, value in frame.f_locals.items():
                    if isinstance(value, Tensor) and id(value) in self.known:
                        called.setdefault(self.known[id(value)][0].name, name)

    def _dispatched(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.namespace == "prim":  # a question about a tensor, such as its device
            return func(*args, **kwargs)
        result = self._result(func, args, kwargs)
        if self._without_gradients():
            parts = result if isinstance(result, list | tuple) else [result]
            nodes = [node for part in parts if isinstance(part, Tensor) for node in self.result(part)]
            if not all(node in self.plain | self.settled for node in nodes):
                raise Refusal("it switches gradients off (torch.no_grad). Use .detach() on what should have none.")
        return result

    def _result(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op = op_name(func)
        if op in ("index", "index_select"):
            func, args = self._picked(func, args)
        if self.complex is not None and self.complex.concerns(func, args, kwargs):
            return self.complex.run(func, args, kwargs)
        if op == "lift_fresh" and not args[0].dim():  # torch.tensor(0.5)
            with no_dispatch():
                number = args[0].item()
            return self.take(aten.full.default, (), number, dtype=args[0].dtype, device=args[0].device)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._draw(func, args, kwargs)
        return self._update(func, args, kwargs) if func._schema.is_mutable else self.take(func, *args, **kwargs)

    def _picked(self, func: OpOverload, args: tuple[Any, ...]) -> tuple[OpOverload, tuple[Any, ...]]:
        """Indexing by a buffer of whole numbers, as an operation with those numbers; other indexing as it is."""
        v, dim, at = args if op_name(func) == "index_select" else (args[0], *_only_one(args[1]))
        if at is None or id(at) not in self.own or at.dim() != 1 or at.dtype not in INDICES:
            return func, args
        if self.own[id(at)].is_inference():  # a change of its numbers would not be seen
            return func, args
        with no_dispatch():
            numbers = self.own[id(at)].tolist()
        size = v.shape[dim]
        if not all(-size <= k < size for k in numbers):
            return func, args
        return PICK, (v, dim % v.dim(), [k % size for k in numbers])

    def _without_gradients(self) -> bool:
        return self.gradients and not self.own_gradient and not torch.is_grad_enabled()

    # ---- operations that change nothing

    def take(self, func: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Run an operation on tensors without data, and write it down."""
        result = func(*args, **kwargs)
        inputs = tuple(self.lookup(a) for a in args), {k: self.lookup(v) for k, v in kwargs.items()}
        written = _SAFE.get(func, func)
        new = self._record(op_name(written), written, inputs, result)
        if func._schema.arguments and func._schema.arguments[0].alias_info is not None:
            for index, part in enumerate(result) if isinstance(result, list | tuple) else [(None, result)]:
                if part is not args[0]:
                    self.views[id(part)] = _View(args[0], func, args[1:], kwargs, index)
                    self.parts.setdefault(id(args[0]), []).append(part)
        reads = [n for n in new[:1] for n in n.inputs()]
        if op_name(func) in _NEW or all(n in self.plain for n in reads):
            self.plain.update(new)
        return result

    def _record(self, op: str, func: OpOverload, inputs: tuple[Any, Any], result: Any) -> list[Node]:
        args, kwargs = inputs
        name = op.strip("_").removeprefix("native_")
        if isinstance(result, Tensor):
            if id(result) in self.known:  # an operation may give back its own input
                return []
            return [
                self._add(Node(self._fresh(name), op, args, kwargs, tuple(result.shape), result.dtype, func), result)
            ]
        whole = Node(self._fresh(name), op, args, kwargs, target=func)
        self.nodes.append(whole)
        found = [whole]
        for i, part in enumerate(result or ()):
            if isinstance(part, Tensor):
                shape = tuple(part.shape)
                node = Node(self._fresh(f"{whole.name}.{i}"), "getitem", (whole, i), {}, shape, part.dtype)
                found.append(self._add(node, part))
        return found

    def _add(self, node: Node, tensor: Tensor) -> Node:
        self.nodes.append(node)
        self.known[id(tensor)] = (node, tensor)
        return node

    def lookup(self, value: Any) -> Any:
        """Arguments with nodes in place of tensors."""
        if isinstance(value, Tensor):
            if id(value) not in self.known:
                raise Refusal(NOT_ITS_OWN)
            if id(value) in self.stale:
                self.stale.discard(id(value))
                view = self.views[id(value)]
                whole = self._bound(self.lookup(view.parent), view.parent)
                again = self.take(view.func, whole, *view.args, **view.kwargs)
                self.known[id(value)] = (self.lookup(again if view.index is None else again[view.index]), value)
            return self.known[id(value)][0]
        if isinstance(value, list | tuple):
            return tuple(self.lookup(v) for v in value)
        return value

    def _fresh(self, name: str) -> str:
        count = self.names.get(name, 0)
        self.names[name] = count + 1
        return f"{name}_{count}" if count else name

    def _bound(self, node: Node, like: Tensor) -> Tensor:
        """A tensor without data that stands for a node and is no view of another."""
        tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        self.known[id(tensor)] = (node, tensor)
        return tensor

    # ---- updates in place

    def _update(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An update in place, as a new value that its tensor stands for from now on."""
        op = op_name(func)
        target = self._changed(func, args, kwargs)
        new = self._new_value(func, target, args, kwargs)
        func(*args, **kwargs)  # raises the error of an update that torch does not allow
        if new.dtype != target.dtype:
            new = self.take(aten._to_copy.default, new, dtype=target.dtype)
        if self._without_gradients() and self.lookup(target) not in self.plain and id(target) not in self.views:
            # a new value, and the gradient goes on to where the old one came from
            old = self._bound(self.lookup(target), target)
            new = self.take(SURROGATE, self.take(aten.detach.default, new), old, self.take(aten.ones_like.default, old))
            self._assign(target, new, op)
            self.settled.add(self.lookup(target))
            return target
        self._assign(target, new, op)
        return target

    def _changed(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The tensor that is updated: one that the step has made itself."""
        op, arguments = op_name(func), func._schema.arguments
        named = {**dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}
        changed = [named.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        if len(changed) != 1 or not isinstance(changed[0], Tensor) or torch.Tag.inplace_view in func.tags:
            raise Refusal(f"it updates a tensor in place by aten.{op}, of which there is no other form.")
        whole = changed[0]
        while True:
            if self.complex is not None and id(whole) in self.complex.parts and id(whole) not in self.given:
                raise Refusal(f"it updates a part of complex numbers in place (aten.{op}). Make a new tensor.")
            if id(whole) not in self.views:
                break
            whole = self.views[id(whole)].parent
        self.lookup(whole)
        given = self.given.get(id(whole))
        if given is not None and given.op == "parameter":
            raise Refusal(
                f"it updates {given.name}, a tensor of the module, in place (aten.{op}), as a compiled step would not. "
                f"What changes from step to step is a part of the state."
            )
        if given is not None:
            raise Refusal(
                f"it updates {given.name}, which it was given, in place (aten.{op}). "
                f"Make a new tensor, {given.name} + v, or begin with {given.name}.clone()."
            )
        return changed[0]

    def _new_value(self, func: OpOverload, target: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """What an update gives, by an operation that gives a new tensor."""
        op = op_name(func)
        if op == "zero_":
            return self.take(aten.zeros_like.default, target)
        if op in ("fill_", "copy_") and not (isinstance(args[1], Tensor) and args[1].dim()):
            number = self._number(args[1])
            if number is not None:
                return self.take(aten.full_like.default, target, number)
        if op in ("fill_", "copy_"):
            source = args[1]
            return source if source.shape == target.shape else self.take(aten.expand.default, source, target.shape)
        if op == "index_put_":
            at, value, *accumulate = args[1:]
            mask = at[0] if len(at) == 1 else None
            if mask is None or mask.dtype != torch.bool or mask.shape != target.shape or value.dim() or any(accumulate):
                raise Refusal("it assigns to places that a tensor says. Use torch.where(mask, value, tensor).")
            number = self._number(value)
            if number is None:
                return self.take(aten.where.self, mask, value, target)
            return self.take(aten.masked_fill.Scalar, target, mask, number)
        same = _functional(func)
        if same is None:
            raise Refusal(f"it updates a tensor in place by aten.{op}, of which there is no other form.")
        named = {k: v for k, v in kwargs.items() if k != "out"}
        return self.take(same, *args, **named)

    def _number(self, value: Any) -> Any:
        """The number that a tensor is, where it was made from one; None for other tensors."""
        if not isinstance(value, Tensor):
            return value
        node = self.lookup(value)
        return node.args[1] if node.op == "full" and not node.shape else None

    def _assign(self, target: Tensor, new: Tensor, op: str) -> None:
        """Let a tensor stand for a new value, and all that it is a part of with it."""
        chain: list[tuple[Tensor, Node]] = []
        while True:
            chain.append((target, self.lookup(new)))
            view = self.views.get(id(target))
            if view is None:
                break
            whole = self._bound(self.lookup(view.parent), view.parent)
            target, new = view.parent, self._put(view, whole, new, op)
        todo = [target]
        while todo:
            parts = self.parts.get(id(todo.pop()), [])
            self.stale.update(map(id, parts))
            todo += parts
        for tensor, node in chain:
            self.known[id(tensor)] = (node, tensor)
            self.stale.discard(id(tensor))

    def _put(self, view: _View, whole: Tensor, part: Tensor, op: str) -> Tensor:
        """`whole`, with `part` where the view is."""
        name, args = op_name(view.func), view.args
        if name in ("view", "_unsafe_view", "unsqueeze", "squeeze", "alias", "_reshape_alias"):
            return self.take(aten.reshape.default, part, whole.shape)
        if name == "detach" and self.lookup(whole) in self.plain:  # new tensors come with one
            return self.take(aten.detach.default, part)
        if name in ("t", "transpose"):
            first, second = args if args else (0, len(whole.shape) - 1)
            return self.take(aten.transpose.int, part, first, second) if whole.dim() > 1 else part
        if name == "permute":
            order = [d % whole.dim() for d in args[0]]
            return self.take(aten.permute.default, part, [order.index(d) for d in range(whole.dim())])
        if name in ("slice", "split", "split_with_sizes"):
            places = {"slice": 0, "split": 1, "split_with_sizes": 1}
            dim = (*args[places[name] :], 0)[0] % whole.dim() if args else 0
            if name == "slice":
                start = args[1] if len(args) > 1 and args[1] is not None else 0
                start = max(0, start + whole.shape[dim]) if start < 0 else start
                if (*args, None, None, None, 1)[3] not in (1, None) and len(args) > 3:
                    raise Refusal("it assigns to every so many features. Use torch.where with a mask.")
            else:
                assert view.index is not None
                sizes = args[0]
                start = view.index * sizes if isinstance(sizes, int) else sum(sizes[: view.index])
            return self._between(whole, part, dim, start)
        if name in ("select", "unbind"):
            dim = (args[0] if args else 0) % whole.dim()
            at = args[1] % whole.shape[dim] if name == "select" else view.index or 0
            return self._between(whole, self.take(aten.unsqueeze.default, part, dim), dim, at)
        raise Refusal(f"it updates a tensor in place (aten.{op}) through aten.{name}. Make a new tensor.")

    def _between(self, whole: Tensor, part: Tensor, dim: int, start: int) -> Tensor:
        """`part` from `start` on, and `whole` before and after it."""
        stop = start + part.shape[dim]
        pieces = [part]
        if start:
            pieces.insert(0, self.take(aten.slice.Tensor, whole, dim, 0, start))
        if stop < whole.shape[dim]:
            pieces.append(self.take(aten.slice.Tensor, whole, dim, stop, whole.shape[dim]))
        return part if len(pieces) == 1 else self.take(aten.cat.default, pieces, dim)

    # ---- random numbers

    def _draw(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Random numbers: drawn before the loop, for every step, as `Sequential` would draw them."""
        op = op_name(func)
        if any(isinstance(a, torch.Generator) for a in (*args, *kwargs.values())):
            raise Refusal("it draws random numbers from a generator of its own. Use torch's: leave out generator=.")
        if op.rstrip("_") in _OF_INTEGERS:
            raise Refusal(
                f"it draws whole numbers (aten.{op}). Draw them before the run, as a part of x; "
                f"for yes or no, torch.rand_like(p) < p."
            )
        if op not in _DRAWS:
            raise Refusal(f"it draws random numbers by aten.{op}. Use torch.rand or torch.randn, or draw them before.")
        if op == "native_dropout":
            ones = self.take(aten.ones.default, args[0].shape, dtype=args[0].dtype, device=args[0].device)
            kept, mask = self._drawn(func, ones, *args[1:])
            return self.take(aten.mul.Tensor, args[0], kept), mask
        if not _DRAWS[op] and func is not aten.bernoulli.p:
            return self._drawn(func, *[self._sized(a) if isinstance(a, Tensor) else a for a in args], **kwargs)
        like = args[0]
        if not (_in_order(like) if not func._schema.is_mutable else like.is_contiguous()):
            raise Refusal(
                f"it draws random numbers (aten.{op}) in the order of a transposed tensor. Use torch.randn(v.shape) or "
                f"torch.rand(v.shape), or draw like v.contiguous()."
            )
        sized = self.take(aten.zeros.default, like.shape, dtype=like.dtype, device=like.device)
        if not func._schema.is_mutable:
            return self._drawn(func, sized, *args[1:], **kwargs)
        target = self._changed(func, args, kwargs)
        same = aten.normal_functional.default if op == "normal_" else _functional(func)
        assert same is not None
        rest = [a.default_value for a in func._schema.arguments[len(args) :] if not a.kwarg_only]
        self._assign(target, self._drawn(same, sized, *args[1:], *rest, **kwargs), op)
        return target

    def _sized(self, t: Tensor) -> Tensor:
        """One number everywhere, of the size of another tensor, as full_like gives it: without that other tensor."""
        node = self.lookup(t)
        while node.op == "detach":
            node = node.args[0]
        number = {"zeros_like": 0, "new_zeros": 0, "ones_like": 1, "new_ones": 1}.get(node.op)
        if node.op in ("full_like", "new_full"):
            number = node.args[1 if node.op == "full_like" else 2]
        if not isinstance(number, int | float):
            return t
        return self.take(aten.full.default, t.shape, number, dtype=t.dtype, device=t.device)

    def _drawn(self, func: OpOverload, *args: Any, **kwargs: Any) -> Any:
        result = self.take(func, *args, **kwargs)
        for part in [result] if isinstance(result, Tensor) else result:
            self.plain.add(self.lookup(part))
        return result


# Operations through which no gradient goes
_NEW = {f"{kind}{what}" for what in ("empty", "zeros", "ones", "full") for kind in ("", "new_")}
_NEW |= {"detach", *(f"{what}_like" for what in ("empty", "zeros", "ones", "full"))}
# Operations that promise to share no memory, and are others otherwise
_SAFE = {
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
    aten.unsafe_chunk.default: aten.chunk.default,
}
_OF_INTEGERS = ("randint", "randint_like", "randperm", "random", "multinomial", "poisson", "binomial", "geometric")
# The random operations that are known, and whether the first argument says nothing but how many numbers to draw
_DRAWS = {
    **dict.fromkeys(("rand", "randn", "normal", "bernoulli", "native_dropout"), False),
    **dict.fromkeys(("rand_like", "randn_like", "bernoulli_", "uniform_", "normal_"), True),
    **dict.fromkeys(("exponential_", "cauchy_", "log_normal_"), True),
}


def _only_one(at: list[Tensor | None]) -> tuple[int, Tensor | None]:
    """The dimension that is indexed and by what, where it is only one."""
    found = [(dim, index) for dim, index in enumerate(at) if index is not None]
    return found[0] if len(found) == 1 else (0, None)


@cache
def _functional(func: OpOverload) -> OpOverload | None:
    """The operation that gives as a new tensor what `func` writes into one."""

    def signature(op: OpOverload) -> list[tuple[str, str]]:
        return [(a.name, str(a.type)) for a in op._schema.arguments if a.name != "out"]

    packet = getattr(aten, op_name(func).removesuffix("_"), None)
    if packet is None:
        return None
    named = [getattr(packet, name) for name in packet.overloads()]
    found = [op for op in named if not op._schema.is_mutable and signature(op) == signature(func)]
    return found[0] if found else None
