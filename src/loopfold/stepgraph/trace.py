"""Trace a step into a graph of tensor operations, with the user's own names and a free batch size."""

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from loopfold.states import State, Step, leaves, name_of, rebuild, zero_state
from loopfold.stepgraph.graph import Node, Refusal, StepGraph, merge
from loopfold.surroundings import habits, unchanged

NOT_ITS_OWN = (
    "it reads a tensor that is neither its parameter nor its buffer. Register it: self.register_buffer(name, tensor)."
)


def step_graph(f: Step, x0: Tensor | None = None, state: State | None = None) -> StepGraph:
    """The graph of one step of `f` on `x0 [batch, n_in]`, from `state` (zeros by default).

    >>> from loopfold import Elman
    >>> print(step_graph(Elman(3, 5), torch.zeros(1, 3)))
    Elman(h [batch, 5], x [batch, 3])
      parameters: U [5, 3], W [5, 5], b [5]
      permute = permute(W, (1, 0))  [5, 5]
      mm = mm(h, permute)  [batch, 5]
      add = add(b, mm)  [batch, 5]
      permute_1 = permute(U, (1, 0))  [3, 5]
      mm_1 = mm(x, permute_1)  [batch, 5]
      add_1 = add(add, mm_1)  [batch, 5]
      tanh = tanh(add_1)  [batch, 5]
      return tanh
    """
    if state is None:
        if x0 is None:
            raise ValueError("step_graph needs an example input x0 [batch, n_in], or a state for a step without input.")
        own = getattr(f, "initial_state", None)
        state = zero_state(f, x0.shape[0], x0) if own is None else own(x0.shape[0])
    try:
        return trace(f, x0, state)
    except Refusal as reason:
        raise ValueError(f"{name_of(f)} cannot be traced: {reason}") from reason


def trace(f: Step, x0: Tensor | None, state: State) -> StepGraph:
    """The graph of a step: what comes out is a state again, which the next step can read."""
    graph = trace_map(f, x0, state)
    if [o.shape for o in graph.outputs] != [s.shape for s in graph.state]:
        raise Refusal("it returns a state of another structure or size than it was given.")
    return graph


def retrace(f: Step, x0: Tensor | None, state: State) -> StepGraph:
    """The graph of a step that was traced before, when nothing but numbers has changed since."""
    _check_traceable(f)
    first, second = _batch_sizes(f, x0, state)
    return merge(_record(f, x0, state, first), _record(f, x0, state, second), first, second)


def trace_map(f: Step, x0: Tensor | None, state: State) -> StepGraph:
    """Trace `f` at several batch sizes; what differs between the traces, and only that, is the batch size.

    What comes out may be of another size than what goes in, as it is for an output layer.
    """
    _check_traceable(f)
    first, second = _batch_sizes(f, x0, state)
    one = _record(f, x0, state, first)
    merge(one, _record(f, x0, state, 1), first, 1)  # a step that treats a batch of one in its own way is found here
    return merge(one, _record(f, x0, state, second), first, second)


def _batch_sizes(f: Step, x0: Tensor | None, state: State) -> tuple[int, int]:
    """Two batch sizes that cannot be taken for another size."""
    taken = {size for t in (*tensors_of(f).values(), x0, *leaves(state)) if t is not None for size in t.shape[-3:]}
    first, second = [p for p in range(1009, 1100, 2) if p not in taken][:2]
    return first, second


# ------------------------------------------------------------------ recording


def tensors_of(f: Step) -> dict[str, Tensor]:
    """The parameters and buffers of a step."""
    return {**dict(f.named_parameters()), **dict(f.named_buffers())} if isinstance(f, nn.Module) else {}


def _check_traceable(f: Step) -> None:
    if isinstance(f, nn.Module):
        for part in f.modules():
            if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
                raise Refusal(f"{name_of(part)} has hooks, which a compiled step would not call.")
        for name, tensor in tensors_of(f).items():
            if nn.parameter.is_lazy(tensor):
                raise Refusal("its parameters have no size yet.")
            if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.layout != torch.strided:
                kind = "sparse" if tensor.layout != torch.strided else f"a {type(tensor).__name__}"
                raise Refusal(f"its {name} is {kind}; a kernel needs plain dense tensors.")


_WATCHES = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_", "backward"}


class _Stand(TorchFunctionMode):
    """Puts tensors without data in the place of the module's own, wherever these are arguments.

    The module itself is never touched, so other threads may use it meanwhile.
    """

    def __init__(self, fakes: dict[int, Tensor]) -> None:
        super().__init__()
        self.fakes = fakes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _WATCHES:
            raise Refusal(f"it calls .{func.__name__}(), which a compiled step would not.")
        if getattr(func, "__self__", None) is Tensor.requires_grad:
            raise Refusal("it asks whether a tensor needs a gradient.")
        return func(*_stood(self.fakes, args), **_stood(self.fakes, kwargs or {}))


def _stood(fakes: dict[int, Tensor], arguments: Any) -> Any:
    return tree_map_only(Tensor, lambda t: fakes.get(id(t), t), arguments)


class _Recorder(TorchDispatchMode):
    """Writes down every operation. Values are known by the identity of their tensor."""

    def __init__(self, fakes: dict[int, Tensor], gradients: bool) -> None:
        super().__init__()
        self.fakes, self.gradients = fakes, gradients
        self.nodes: list[Node] = []
        self.known: dict[int, tuple[Node, Tensor]] = {}  # the tensor is held, so that its id stays its own
        self.names: dict[str, int] = {}

    def leaf(self, op: str, name: str, tensor: Tensor) -> Node:
        node = Node(self._fresh(name), op, shape=tuple(tensor.shape), dtype=tensor.dtype)
        self.known[id(tensor)] = (node, tensor)
        return node

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = _stood(self.fakes, args), _stood(self.fakes, kwargs or {})
        if func.namespace == "prim":  # a question about a tensor, such as its device
            return func(*args, **kwargs)
        op = func._schema.name.removeprefix("aten::")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Refusal(f"it draws random numbers (aten.{op}), which differ at every step.")
        if func._schema.is_mutable:
            raise Refusal(f"it, or something that it calls, updates a tensor in place (aten.{op}). Make a new tensor.")
        if self.gradients and not torch.is_grad_enabled():
            raise Refusal("it switches gradients off (torch.no_grad, where .detach() would do, or autograd.Function).")
        result = func(*args, **kwargs)
        inputs = tuple(self._lookup(a) for a in args), {k: self._lookup(v) for k, v in kwargs.items()}
        self._record(op, func, inputs, result)
        return result

    def _record(self, op: str, func: OpOverload, inputs: tuple[Any, Any], result: Any) -> None:
        args, kwargs = inputs
        name = op.strip("_").removeprefix("native_")
        if isinstance(result, Tensor):
            if id(result) not in self.known:  # an operation may give back its own input
                self._add(Node(self._fresh(name), op, args, kwargs, tuple(result.shape), result.dtype, func), result)
            return
        whole = Node(self._fresh(name), op, args, kwargs, target=func)
        self.nodes.append(whole)
        for i, part in enumerate(result or ()):
            if isinstance(part, Tensor):
                self._add(
                    Node(self._fresh(f"{whole.name}.{i}"), "getitem", (whole, i), {}, tuple(part.shape), part.dtype),
                    part,
                )

    def _add(self, node: Node, tensor: Tensor) -> None:
        self.nodes.append(node)
        self.known[id(tensor)] = (node, tensor)

    def _lookup(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in self.known:
                raise Refusal(NOT_ITS_OWN)
            return self.known[id(value)][0]
        if isinstance(value, list | tuple):
            return tuple(self._lookup(v) for v in value)
        return value

    def _fresh(self, name: str) -> str:
        count = self.names.get(name, 0)
        self.names[name] = count + 1
        return f"{name}_{count}" if count else name


def _record(f: Step, x0: Tensor | None, state: State, batch: int) -> StepGraph:
    """The graph of one call of `f`. Gradients are on, so that torch.no_grad() inside the step is seen."""
    names, iterators, remembers = habits(f)
    if "is_inference_mode_enabled" in names:
        raise Refusal("it asks for the inference mode.")
    if iterators and "next" in names:
        raise Refusal(f"it takes from the iterator {iterators[0]}, which has another value at every step.")
    if remembers:  # first with real tensors, so that a cache keeps none without data
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), unchanged(f):
                f(state, *([] if x0 is None else [x0]))
        except Exception as error:
            raise Refusal(f"it fails: {error}") from None
    gradients = torch.is_grad_enabled() if "is_grad_enabled" in names else True
    with torch.inference_mode(False), torch.set_grad_enabled(gradients):  # in that mode layers are not taken apart
        return _recorded(f, x0, state, batch, gradients)


def _recorded(f: Step, x0: Tensor | None, state: State, batch: int, gradients: bool) -> StepGraph:
    fake = FakeTensorMode()

    def blank(like: Tensor, *shape: int) -> Tensor:
        with fake:
            return torch.empty(shape, dtype=like.dtype, device=like.device)

    own = tensors_of(f)
    inputs = [blank(leaf, batch, *leaf.shape[1:]) for leaf in leaves(state)]
    x = None if x0 is None else blank(x0, batch, *x0.shape[1:])
    fakes = {id(t): blank(t, *t.shape) for t in own.values()}
    recorder = _Recorder(fakes, gradients)
    state_nodes = tuple(recorder.leaf("state", k, t) for k, t in zip(_state_names(f, state), inputs, strict=True))
    x_node = None if x is None else recorder.leaf("x", "x", x)
    parameters = {name: recorder.leaf("parameter", name, fakes[id(t)]) for name, t in own.items()}
    arguments = (rebuild(state, inputs), *([] if x is None else [x]))
    with unchanged(f) as changed, _quiet(), fake, recorder, _Stand(fakes):
        try:
            new = f(*arguments)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise Refusal("it asks for the values of a tensor (if, while, float, .item()). Use torch.where.") from None
        except Refusal:
            raise
        except Exception as error:
            if "convert all Tensors to FakeTensors" in str(error):
                raise Refusal(NOT_ITS_OWN) from None
            raise Refusal(f"it fails where the batch is {batch}: {error}") from None
    if changed:
        raise Refusal(f"it changes {', '.join(dict.fromkeys(changed))} at every step, which a compiled step would not.")
    outputs = tuple(recorder._lookup(leaf) for leaf in leaves(new))
    structure = rebuild(new, [torch.empty(0)] * len(outputs))
    return StepGraph(name_of(f), parameters, state_nodes, x_node, tuple(recorder.nodes), outputs, structure)


@contextmanager
def _quiet() -> Iterator[None]:
    """torch logs an error of its own for an operation that fails in a trace; the refusal says it in words."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _state_names(f: Step, state: State) -> list[str]:
    """The names that a reader knows: the fields of a NamedTuple, or the name of the step's first argument."""
    if isinstance(state, tuple):
        fields = getattr(state, "_fields", None) or [f"state{i}" for i in range(len(state))]
        if len(fields) == len(leaves(state)):
            return list(fields)
        return [f"state{i}" for i in range(len(leaves(state)))]
    try:
        return [next(iter(inspect.signature(f.forward if isinstance(f, nn.Module) else f).parameters))]
    except (ValueError, StopIteration):
        return ["state"]
