"""What goes into a step and comes out of it, as trees of tensors; and the zeros that a step starts from.

A state is a tensor `[batch, n]`, or a tuple or NamedTuple of tensors whose first dimension is the batch. So is what a
step reads (x, a context), and what it gives beside the state (an output).
"""

import inspect
import typing
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from loopfold.surroundings import unchanged

State = Any  # Tensor | tuple[State, ...] | NamedTuple; Python's types cannot say "any NamedTuple of tensors"
Step = Callable[
    ..., State
]  # f(state, x, context) -> state or (output, state); without x, without context where none is


def leaves(state: State) -> list[Tensor]:
    """The tensors of a state, in order.

    >>> [tuple(leaf.shape) for leaf in leaves((torch.zeros(2, 3), torch.zeros(2, 5)))]
    [(2, 3), (2, 5)]
    """
    if isinstance(state, Tensor):
        return [state]
    if isinstance(state, tuple):
        return [leaf for part in state for leaf in leaves(part)]
    raise TypeError(
        f"a state is a tensor, or a tuple or NamedTuple of tensors; this one holds a {type(state).__name__}."
    )


def all_leaves(*parts: State | None) -> list[Tensor]:
    """The tensors of several parts, in order; where a part is None, it has none."""
    return [leaf for part in parts if part is not None for leaf in leaves(part)]


def rebuild(like: State, new: Iterable[Tensor]) -> State:
    """A state with the structure of `like` and the tensors of `new`."""
    return _rebuild(like, iter(new))


def _rebuild(part: State, flow: Iterator[Tensor]) -> State:
    if isinstance(part, Tensor):
        return next(flow)
    parts = [_rebuild(p, flow) for p in part]
    return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)


def in_reals(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Real tensors: of a complex one both parts, others as they are.

    >>> in_reals([torch.tensor([1 + 2j]), torch.tensor([3.0])])
    [tensor([1.]), tensor([2.]), tensor([3.])]
    """
    return [part for t in tensors for part in ((t.real, t.imag) if t.is_complex() else (t,))]


def from_reals(like: State, reals: Iterable[Tensor]) -> State:
    """A state like `like`, whose complex tensors are made of two of `reals` each."""
    flow = iter(reals)
    return rebuild(
        like, [torch.complex(next(flow), next(flow)) if t.is_complex() else next(flow) for t in leaves(like)]
    )


def map_state(function: Callable[..., Tensor], state: State, *others: State) -> State:
    """`function` applied leaf by leaf; the result has the structure of `state`."""
    columns = zip(leaves(state), *map(leaves, others), strict=True)
    return rebuild(state, [function(*column) for column in columns])


# ------------------------------------------------------------------ how a step is called, and what it returns


def take_step(f: Step, state: State, x: State | None = None, context: State | None = None, t: Any = None) -> State:
    """What `f` returns, called with what there is: `f(state, x, context, t=t)`; the others are left out."""
    given = [part for part in (x, context) if part is not None]
    return f(state, *given) if t is None else f(state, *given, t=t)


def asks_for_index(f: Step, others: int) -> bool:
    """Whether `f` has a parameter named `t` besides the `others` that it is given by their place.

    >>> asks_for_index(lambda h, x, t: h, 2), asks_for_index(lambda h, t: h, 2)
    (True, False)
    """
    function = f.forward if isinstance(f, nn.Module) else f
    code = getattr(inspect.unwrap(function), "__code__", None)  # for most steps; a signature takes longer
    if code is not None:
        if "t" not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            return False
    elif not hasattr(function, "__dict__"):
        return False  # a function of torch's, not written in Python
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    first = [p.name for p in parameters[:others]]
    return any(
        p.name == "t" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and "t" not in first for p in parameters
    )


def gives_output(returned: State, state: State) -> bool:
    """Whether a step that was given `state` has returned `(output, state)`: the second part is like it, all is not.

    >>> h = torch.zeros(2, 3)
    >>> gives_output((torch.zeros(2, 5), h), h), gives_output((h, h), (h, h))
    (True, False)
    """
    if not isinstance(returned, tuple) or len(returned) != 2:
        return False
    return _sizes_of(returned[1]) == _sizes_of(state) and len(leaves(returned)) > len(leaves(state))


def _sizes_of(part: State) -> Any:
    return part.shape if isinstance(part, Tensor) else [_sizes_of(p) for p in part] if isinstance(part, tuple) else part


def parted(returned: State, state: State) -> tuple[State | None, State]:
    """The output and the state that a step, or an engine, has returned, where the state is like `state`."""
    return (None, returned) if len(leaves(returned)) == len(leaves(state)) else returned


def has_a_gradient(tensor: Tensor) -> bool:
    """Whether it can have one: real and complex numbers can, whole numbers and truth values cannot."""
    return tensor.is_floating_point() or tensor.is_complex()


def in_double(tensor: Tensor) -> Tensor:
    """The same numbers in double precision; complex ones stay complex."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float64))


def detached(state: State) -> State:
    """The same numbers, through which no gradient goes back."""
    return map_state(Tensor.detach, state)


def alive(sequence: Tensor, lengths: Tensor) -> Tensor:
    """Where in `sequence [τ, batch, …]` each has not ended: `[τ, batch, 1, …]`, which goes with it."""
    t = torch.arange(sequence.shape[0], device=sequence.device)[:, None]
    return (t < lengths.to(sequence.device)).view(*sequence.shape[:2], *[1] * (sequence.dim() - 2))


def until_the_end(sequence: Tensor, lengths: Tensor | None) -> Tensor:
    """`sequence [τ, batch, …]`, with zeros (False, of truth values) where each has ended."""
    if lengths is None:
        return sequence
    return torch.where(alive(sequence, lengths), sequence, False if sequence.dtype == torch.bool else 0)


def at_end(sequence: Tensor, lengths: Tensor | None) -> Tensor:
    """`[batch, …]`: what `sequence [τ, batch, …]` holds at the last step of each."""
    if lengths is None:
        return sequence[-1]
    end = lengths.to(sequence.device) - 1
    return sequence[end, torch.arange(end.shape[0], device=sequence.device)]  # `len` would fix it in torch.export


def describe(state: State) -> str:
    """The structure and shapes of a state in words, for error messages: `LSTMState(h (2, 3), c (2, 3))`."""
    if isinstance(state, Tensor):
        return str(tuple(state.shape))
    if not isinstance(state, tuple):
        return type(state).__name__
    fields = getattr(state, "_fields", None)
    parts = [describe(part) for part in state]
    if fields:
        return f"{type(state).__name__}({', '.join(f'{k} {p}' for k, p in zip(fields, parts, strict=True))})"
    return f"tuple({', '.join(parts)})"


def name_of(f: Step) -> str:
    """What to call a step in messages."""
    if isinstance(f, nn.Module):
        return f._get_name().removeprefix("Parametrized" if is_parametrized(f) else "")
    return getattr(f, "__name__", type(f).__name__)


@contextmanager
def in_evaluation(f: Step) -> Iterator[None]:
    """Inside it, every module of `f` is in evaluation mode; afterwards each is as it was before."""
    modes = {part: part.training for part in f.modules()} if isinstance(f, nn.Module) else {}
    for part in modes:
        part.training = False
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


def whole_number(owner: str, name: str, number: int) -> int:
    """`number`, if it is a whole number of at least 1; `owner` and `name` say in the error what it was for."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"{owner} needs {name} as a whole number of at least 1; got {number!r}.")
    return number


# ------------------------------------------------------------------ the state that a step starts from


def zero_state(f: Step, batch: int, x: State | None = None, context: State | None = None) -> State:
    """Zeros of the size that `f` maps onto itself: f([batch, n], x) is [batch, n] again.

    The sizes tried are those of the parameters of `f` and of `x [batch, ...]`, where it is known; the structures
    are a tensor, the NamedTuple that the first argument is annotated with, and a pair.
    """
    key = tuple((leaf.shape[1:], leaf.dtype) for leaf in all_leaves(x, context)), x is None, context is None
    found = _known_states.setdefault(f, {}) if isinstance(f, nn.Module) else {}
    if key not in found:
        found[key] = _one_state(f, x, context)
    like = _a_tensor_of(f, x)
    return map_state(lambda leaf: like.new_zeros(batch, *leaf.shape[1:], dtype=_dtype(leaf, like)), found[key])


def _dtype(leaf: Tensor, like: Tensor) -> torch.dtype:
    """That of `like`, or its complex one where the step returns complex numbers."""
    return like.dtype.to_complex() if leaf.is_complex() else like.dtype


_known_states: weakref.WeakKeyDictionary[nn.Module, dict[Any, State]] = weakref.WeakKeyDictionary()


def _one_state(f: Step, x: State | None, context: State | None) -> State:
    found, error = trials(f, x, context=context)
    if not all(trial.output is not None for trial in found):
        found = [trial for trial in found if trial.output is None]
    plainest = min((trial.structure for trial in found), default=0)
    states = {trial.size: trial.state for trial in found if trial.structure == plainest}
    if len(states) == 1:
        return next(iter(states.values()))
    if states:
        raise ValueError(
            f"{name_of(f)} accepts states of several sizes ({', '.join(map(str, sorted(states)))}), so zeros cannot be "
            f"chosen for it. Pass state=..., or define initial_state(self, batch) on it."
        )
    raise ValueError(
        f"no zero state was found for {name_of(f)}: no size among {sorted(_sizes(f, x, context))} "
        f"is mapped onto itself. Pass state=..., or define initial_state(self, batch) on it."
        + (f" The first trial failed with: {error}" if error else "")
    ) from error


# ------------------------------------------------------------------ what a step can be given


@dataclass(frozen=True)
class Trial:
    """An input and a state that a step maps onto a state of the same sizes."""

    x: State | None  # [TRIAL_BATCH, …]; None for a step without input
    state: State  # as the step returned it, which may be a NamedTuple
    size: int  # n of its tensors; 0 for a state that was given
    structure: int  # 0 is the first structure tried
    output: State | None  # what the step returned beside the state


TRIAL_BATCH = 7  # odd enough that nothing fits by chance: `h, c = state` fails on a plain tensor


def trials(
    f: Step,
    x: State | None = None,
    start: Callable[[int], State] | None = None,
    context: State | None = None,
) -> tuple[list[Trial], Exception | None]:
    """What `f` can be given, among zeros of the sizes that its parameters suggest; and what the first trial raised.

    `x [batch, …]` is an input, and `start(batch)` a state, where they are known. For each input, only the first
    structure of a state that fits counts; one that fits with an output beside it, only if no other does: a step that
    returns a pair is more often one whose state is a pair.
    """
    if isinstance(f, nn.Module) and any(nn.parameter.is_lazy(p) for p in f.parameters()):
        return [], None  # a trial would fix the sizes of its parameters
    like = _a_tensor_of(f, x)
    inputs = _possible_inputs(f, like) if x is None else [_blank(x)]
    given_context = None if context is None else _blank(context)
    found: list[Trial] = []
    first: Exception | None = None
    structures, dtypes = _possible_structures(f), [like.dtype]
    if any(t.is_complex() for t in _tensors_of(f)):
        dtypes.append(like.dtype.to_complex())
    for given in inputs:
        sizes = sorted(_sizes(f, given, context))
        zeros = [{n: like.new_zeros(TRIAL_BATCH, n, dtype=dtype) for n in sizes} for dtype in dtypes]
        groups = [{n: partial(build, leaf) for n, leaf in of.items()} for of in zeros for build in structures]
        fits: list[Trial] = []
        with_output: list[Trial] = []
        for structure, group in enumerate([{0: partial(start, TRIAL_BATCH)}] if start else groups):
            here: list[Trial] = []
            for n, make in group.items():
                try:
                    state, new = _trial(f, make, given, given_context)
                    if [leaf.shape for leaf in leaves(new)] == [leaf.shape for leaf in leaves(state)]:
                        fits.append(Trial(given, new, n, structure, None))
                    elif gives_output(new, state):
                        here.append(Trial(given, new[1], n, structure, new[0]))
                except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
                    first = first or error
            with_output = with_output or here
            if fits:
                break
        found += fits or with_output
    return found, first


def _trial(f: Step, make: Callable[[], State], x: State | None, context: State | None) -> tuple[State, State]:
    """The state before a step, and what the step returns."""
    step = f.forward if isinstance(f, nn.Module) else f  # not f itself: hooks on a module are no part of the trial
    with torch.no_grad(), torch.random.fork_rng(devices=[]), unchanged(f):
        state = make()
        asks = asks_for_index(f, 1 + (x is not None) + (context is not None))
        t = leaves(state)[0].new_zeros(TRIAL_BATCH, 1) if asks else None
        return state, take_step(step, state, x, context, t)


def _blank(given: State) -> State:
    return map_state(lambda leaf: leaf.new_zeros(TRIAL_BATCH, *leaf.shape[1:]), given)


def _tensors_of(f: Step) -> list[Tensor]:
    tensors = [*f.parameters(), *f.buffers()] if isinstance(f, nn.Module) else []
    return [t for t in tensors if not nn.parameter.is_lazy(t)]


def _a_tensor_of(f: Step, x: State | None) -> Tensor:
    """A tensor whose dtype and device the state takes over."""
    tensors = [t.detach() for t in (*_tensors_of(f), *all_leaves(x))]
    floating = [t for t in tensors if t.is_floating_point()] or [t.real for t in tensors if t.is_complex()]
    return floating[0] if floating else torch.zeros(())


def _sizes(f: Step, x: State | None, context: State | None = None) -> set[int]:
    own = {size for t in _tensors_of(f) for size in t.shape}
    return own | {size for leaf in all_leaves(x, context) for size in leaf.shape[1:]}


def _possible_inputs(f: Step, like: Tensor) -> list[Tensor | None]:
    """Vectors of the sizes that may be read, a class, and no input at all."""
    known = getattr(f, "input_size", None)
    sizes = _sizes(f, None)
    differences = {a - b for a in sizes for b in sizes if a > b}  # a matrix may read h and x side by side
    widths = [known] if isinstance(known, int) else sorted(sizes | differences)
    classes = torch.zeros(TRIAL_BATCH, dtype=torch.long, device=like.device)
    return [*(like.new_zeros(TRIAL_BATCH, m) for m in widths), classes, None]


def _possible_structures(f: Step) -> list[Callable[[Tensor], State]]:
    structures: list[Callable[[Tensor], State]] = [lambda leaf: leaf, lambda leaf: (leaf, leaf)]
    function = f.forward if isinstance(f, nn.Module) else f
    try:
        hints = typing.get_type_hints(function)
        first = next(iter(inspect.signature(function).parameters))
        fields = getattr(hints.get(first), "_fields", None)
    except (NameError, TypeError, ValueError, StopIteration):
        fields = None  # no signature, or annotations that name things out of reach: the plain structures remain
    if fields is not None:
        structures.insert(0, lambda leaf: hints[first](*[leaf] * len(fields)))
    return structures
