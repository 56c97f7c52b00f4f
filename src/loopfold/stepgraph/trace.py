"""Trace a step into a graph of tensor operations, with the user's own names and a free batch size."""

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.overrides import TorchFunctionMode

from loopfold.casts import casts, with_casts
from loopfold.states import (
    State,
    Step,
    all_leaves,
    asks_for_index,
    gives_output,
    has_a_gradient,
    in_reals,
    leaves,
    map_state,
    name_of,
    take_step,
    zero_state,
)
from loopfold.stepgraph.functions import watched
from loopfold.stepgraph.graph import BATCH, Node, Refusal, StepGraph, apply, merge
from loopfold.stepgraph.recorder import NOT_ITS_OWN, Recorder, stood
from loopfold.surroundings import habits, unchanged


def step_graph(f: Step, x0: State | None = None, state: State | None = None, context: State | None = None) -> StepGraph:
    """The graph of one step of `f` on `x0 [batch, n_in]`, from `state` (zeros by default), with a `context` if any.

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
        own, batch = getattr(f, "initial_state", None), leaves(x0)[0].shape[0]
        state = zero_state(f, batch, x0, context) if own is None else own(batch)
    try:
        return trace(f, x0, state, context)
    except Refusal as reason:
        raise ValueError(f"{name_of(f)} cannot be traced: {reason}") from reason


def trace(
    f: Step,
    x0: State | None,
    state: State,
    context: State | None = None,
    called: dict[str, str] | None = None,
    *,
    real: bool = True,
) -> StepGraph:
    """The graph of a step: what comes out is a state again, which the next step can read."""
    graph = trace_map(f, x0, state, context, called, real=real)
    if [o.shape for o in graph.outputs] != [s.shape for s in graph.state]:
        raise Refusal("it returns a state of another structure or size than it was given.")
    for result in graph.results:
        if result.shape[:1] != (BATCH,):
            raise Refusal(f"its output {result.name} has shape {result.shape}, without a batch.")
    return graph


def retrace(f: Step, x0: State | None, state: State, context: State | None = None) -> StepGraph:
    """The graph of a step that was traced before, when nothing but numbers has changed since."""
    _check_traceable(f)
    given = Given(state, x0, context)
    first, second = _batch_sizes(f, given)
    return merge(_record(f, given, first), _record(f, given, second), first, second)


def trace_map(
    f: Step,
    x0: State | None,
    state: State,
    context: State | None = None,
    called: dict[str, str] | None = None,
    *,
    real: bool = True,
) -> StepGraph:
    """Trace `f` at several batch sizes; what differs between the traces, and only that, is the batch size.

    What comes out may be of another size than what goes in, as it is for an output layer. `called`, if given, is
    filled with what the step itself calls its values: the name of a node → that of the variable that held it first.
    `real`: complex numbers are written down as pairs of real ones, and not as the step has them.
    """
    _check_traceable(f)
    given = Given(state, x0, context)
    first, second = _batch_sizes(f, given)
    one = _record(f, given, first, called, real)
    graph = merge(one, _record(f, given, second, real=real), first, second)
    try:
        merge(one, _record(f, given, 1, real=real), first, 1)
    except Refusal:  # torch's own operations take short cuts there, and a step may treat a batch of one in its own way
        if not _true_of_one(f, graph, given, real):
            raise
    return graph


def _true_of_one(f: Step, graph: StepGraph, given: "Given", real: bool) -> bool:
    """Whether the graph gives what `f` gives for one sequence: the first of the batch, and any numbers."""
    one = [None if part is None else map_state(lambda leaf: leaf[:1], part) for part in (*given, given.number(f))]
    random = torch.Generator().manual_seed(0)

    def drawn(leaf: Tensor) -> Tensor:
        return torch.randn(leaf.shape, generator=random).to(leaf) if has_a_gradient(leaf) else leaf

    any_numbers = [None if part is None else map_state(drawn, part) for part in one]
    return all(_gives_the_same(f, graph, example, in_reals if real else list) for example in (one, any_numbers))


def _gives_the_same(f: Step, graph: StepGraph, example: list[Any], parts: Callable[..., list[Tensor]]) -> bool:
    """`parts` are the tensors of the graph that stand for those of the step."""
    own, device, devices = (
        tensors_of(f),
        leaves(example[0])[0].device,
        {leaf.device for leaf in leaves(example[0]) if leaf.is_cuda},
    )
    with torch.no_grad(), torch.random.fork_rng(devices), unchanged(f):
        before = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]
        try:
            with with_casts(casts(device), device):
                wanted = parts(leaves(take_step(f, *example)))
        except Exception as error:
            raise Refusal(f"it fails where the batch is 1: {str(error).rstrip('.')}.") from None
        state, x, context, number = (parts(all_leaves(part)) for part in example)
        values: dict[Node, Any] = dict(zip(graph.parameters.values(), parts(own.values()), strict=True))
        values |= zip((*graph.state, *graph.x, *graph.context), (*state, *x, *number, *context), strict=True)
        torch.set_rng_state(before[0])  # the graph draws the same numbers, in the same order
        for device, generator in zip(devices, before[1], strict=True):
            torch.cuda.set_rng_state(generator, device)
        with with_casts((), device):
            for node in graph.operations:
                values[node] = apply(node, values, 1)
        found = [values[node] for node in (*graph.results, *graph.outputs)]
    near = torch.finfo(state[0].dtype).eps ** 0.5 if state[0].is_floating_point() else 0.0
    return all(
        a.shape == b.shape and torch.allclose(a, b, near, near, equal_nan=True)
        for a, b in zip(found, wanted, strict=True)
    )


class Given(NamedTuple):
    """What a step is called with; None stands for what it is not given."""

    state: State
    x: State | None
    context: State | None

    def leaves(self) -> list[Tensor]:
        return all_leaves(*self)

    def number(self, f: Step) -> Tensor | None:
        """An example of t, for a step that asks for its number."""
        asks = asks_for_index(f, 1 + (self.x is not None) + (self.context is not None))
        return leaves(self.state)[0].new_zeros(*leaves(self.state)[0].shape[:1], 1) if asks else None


def _batch_sizes(f: Step, given: Given) -> tuple[int, int]:
    """Two batch sizes that cannot be taken for another size."""
    taken = {size for t in (*tensors_of(f).values(), *given.leaves()) for size in t.shape[-3:]}
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
        return func(*stood(self.fakes, args), **stood(self.fakes, kwargs or {}))


def _record(f: Step, given: Given, batch: int, called: dict[str, str] | None = None, real: bool = True) -> StepGraph:
    """The graph of one call of `f`. Gradients are on, so that torch.no_grad() inside the step is seen."""
    names, iterators, remembers = habits(f)
    if "is_inference_mode_enabled" in names:
        raise Refusal("it asks for the inference mode.")
    if iterators and "next" in names:
        raise Refusal(f"it takes from the iterator {iterators[0]}, which has another value at every step.")
    if remembers:  # first with real tensors, so that a cache keeps none without data
        try:
            device = leaves(given.state)[0].device
            with torch.no_grad(), torch.random.fork_rng(devices=[]), unchanged(f), with_casts(casts(device), device):
                take_step(f, *given, given.number(f))
        except Exception as error:
            raise Refusal(f"it fails: {error}") from None
    gradients = torch.is_grad_enabled() if "is_grad_enabled" in names else True
    with torch.inference_mode(False), torch.set_grad_enabled(gradients):  # in that mode layers are not taken apart
        return _recorded(f, given, batch, gradients, called, real)


def _recorded(
    f: Step, given: Given, batch: int, gradients: bool, called: dict[str, str] | None, real: bool
) -> StepGraph:
    fake = FakeTensorMode()

    def blank(like: Tensor, *shape: int) -> Tensor:
        with fake:
            return torch.empty(shape, dtype=like.dtype, device=like.device)

    own = tensors_of(f)
    state, x, context, t = [
        None if part is None else map_state(lambda leaf: blank(leaf, batch, *leaf.shape[1:]), part)
        for part in (*given, given.number(f))
    ]
    fakes = {id(t): blank(t, *t.shape) for t in own.values()}
    recorder = Recorder(fakes, gradients, own.values(), called, real)

    def nodes(op: str, named: Iterable[tuple[str, Tensor]]) -> tuple[Node, ...]:
        return tuple(node for name, tensor in named for node in recorder.leaf(op, name, tensor).values())

    state_nodes = nodes("state", zip(_state_names(f, state), leaves(state), strict=True))
    x_nodes = nodes("x", (*_named("x", x), *_named("t", t)))
    context_nodes = nodes("context", _named("context", context))
    parameters = {
        k: node for name, t in own.items() for k, node in recorder.leaf("parameter", name, fakes[id(t)]).items()
    }
    with unchanged(f) as changed, _quiet(), plain_attention(), fake, recorder, watched(recorder), _Stand(fakes):
        try:
            new = take_step(f, state, x, context, t)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise Refusal(
                "it asks for the values of a tensor (if, while, float, .item()). Use torch.where; and of "
                "torch.distributions, validate_args=False."
            ) from None
        except Refusal:
            raise
        except Exception as error:
            if "convert all Tensors to FakeTensors" in str(error):
                raise Refusal(NOT_ITS_OWN) from None
            raise Refusal(f"it fails on a batch of another size: {str(error).rstrip('.')}.") from None
    if changed:
        raise Refusal(f"it changes {', '.join(dict.fromkeys(changed))} at every step, which a compiled step would not.")
    returned = [recorder.result(leaf) for leaf in leaves(new)]
    cut = sum(map(len, returned[: len(leaves(new[0]))])) if gives_output(new, state) else 0
    found = tuple(node for parts in returned for node in parts)
    return StepGraph(
        name_of(f),
        parameters,
        state_nodes,
        x_nodes,
        tuple(recorder.nodes),
        found[cut:],
        map_state(lambda leaf: torch.empty(0, dtype=torch.cfloat if leaf.is_complex() else None), new),
        context=context_nodes,
        results=found[:cut],
    )


def plain_attention() -> AbstractContextManager[None]:
    """While open, torch's attention is products and a softmax, and no kernel of its own."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH)


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
        return [name for name, _ in _named("state", state)]
    try:
        return [next(iter(inspect.signature(f.forward if isinstance(f, nn.Module) else f).parameters))]
    except (ValueError, StopIteration):
        return ["state"]


def _named(name: str, part: State | None) -> list[tuple[str, Tensor]]:
    """The leaves of a part, by the fields of a NamedTuple, or by a name: x, or x0, x1, …"""
    if part is None or isinstance(part, Tensor):
        return [] if part is None else [(name, part)]
    fields, parts = getattr(part, "_fields", ()), leaves(part)
    names = fields if len(fields) == len(parts) else [f"{name}{i}" for i in range(len(parts))]
    return list(zip(names, parts, strict=True))
