"""The state of a recurrence as a tree of tensors, and the zeros that a step starts from.

A state is a tensor `[batch, n]`, or a tuple or NamedTuple of tensors whose first dimension is the batch.
"""

import inspect
import itertools
import typing
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from loopfold.surroundings import unchanged

State = Any  # Tensor | tuple[State, ...] | NamedTuple; Python's types cannot say "any NamedTuple of tensors"
Step = Callable[..., State]  # f(state, x) -> state, or f(state) -> state where there is no input


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


def rebuild(like: State, new: Iterable[Tensor]) -> State:
    """A state with the structure of `like` and the tensors of `new`."""
    return _rebuild(like, iter(new))


def _rebuild(part: State, flow: Iterator[Tensor]) -> State:
    if isinstance(part, Tensor):
        return next(flow)
    parts = [_rebuild(p, flow) for p in part]
    return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)


def map_state(function: Callable[..., Tensor], state: State, *others: State) -> State:
    """`function` applied leaf by leaf; the result has the structure of `state`."""
    columns = zip(leaves(state), *map(leaves, others), strict=True)
    return rebuild(state, [function(*column) for column in columns])


def detached(state: State) -> State:
    """The same numbers, through which no gradient goes back."""
    return map_state(Tensor.detach, state)


def alive(sequence: Tensor, lengths: Tensor) -> Tensor:
    """Where in `sequence [τ, batch, …]` each has not ended: `[τ, batch, 1, …]`, which goes with it."""
    t = torch.arange(sequence.shape[0], device=sequence.device)[:, None]
    return (t < lengths.to(sequence.device)).view(*sequence.shape[:2], *[1] * (sequence.dim() - 2))


def at_end(sequence: Tensor, lengths: Tensor | None) -> Tensor:
    """`[batch, …]`: what `sequence [τ, batch, …]` holds at the last step of each."""
    if lengths is None:
        return sequence[-1]
    end = lengths.to(sequence.device) - 1
    return sequence[end, torch.arange(len(end), device=sequence.device)]


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
    return type(f).__name__ if isinstance(f, nn.Module) else getattr(f, "__name__", type(f).__name__)


@contextmanager
def in_evaluation(f: Step) -> Iterator[None]:
    """While open, every module of `f` is as it is when used, not trained; then each is as it was before."""
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
        raise ValueError(f"{owner} needs {name} as a whole number of at least 1; {number!r} came.")
    return number


# ------------------------------------------------------------------ the state that a step starts from


def zero_state(f: Step, batch: int, x: Tensor | None = None) -> State:
    """Zeros of the size that `f` maps onto itself: f([batch, n], x) is [batch, n] again.

    The sizes tried are those of the parameters of `f` and of `x [batch, ...]`, where it is known; the structures
    are a tensor, the NamedTuple that the first argument is annotated with, and a pair.
    """
    key = (None if x is None else x.shape[1:], None if x is None else x.dtype)
    found = _known_states.setdefault(f, {}) if isinstance(f, nn.Module) else {}
    if key not in found:
        found[key] = _search_state(f, x)
    like = _a_tensor_of(f, x)
    return map_state(lambda leaf: like.new_zeros(batch, *leaf.shape[1:]), found[key])


_known_states: weakref.WeakKeyDictionary[nn.Module, dict[Any, State]] = weakref.WeakKeyDictionary()
_TRIAL_BATCH = 7  # odd enough that `h, c = state` fails on a plain tensor


def _a_tensor_of(f: Step, x: Tensor | None) -> Tensor:
    """A tensor whose dtype and device the state takes over."""
    tensors = [*f.parameters(), *f.buffers()] if isinstance(f, nn.Module) else []
    floating = [t for t in (*tensors, x) if t is not None and t.is_floating_point()]
    return floating[0] if floating else torch.zeros(())


def _search_state(f: Step, x: Tensor | None) -> State:
    tensors = [*f.parameters(), *f.buffers()] if isinstance(f, nn.Module) else []
    sizes = sorted({size for t in tensors for size in t.shape} | (set(x.shape[1:]) if x is not None else set()))
    like = _a_tensor_of(f, x)
    if x is not None:
        inputs: list[tuple[Tensor, ...]] = [(x.new_zeros(_TRIAL_BATCH, *x.shape[1:]),)]
    else:
        known = getattr(f, "input_size", None)
        differences = {a - b for a in sizes for b in sizes if a > b}  # a matrix may read h and x side by side
        widths = sorted({*sizes, *differences}) if known is None else [known]
        vectors = [like.new_zeros(_TRIAL_BATCH, m) for m in widths]
        classes = torch.zeros(_TRIAL_BATCH, dtype=torch.long, device=like.device)
        inputs = [(), *((vector,) for vector in vectors), (classes,)]

    step = f.forward if isinstance(f, nn.Module) else f  # not f itself: hooks on a module are no part of the trial
    error: Exception | None = None
    for structure in _possible_structures(f):
        fits = {}
        for n, arguments in itertools.product(sizes, inputs):
            state = structure(like.new_zeros(_TRIAL_BATCH, n))
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=[]), unchanged(f):
                    new = step(state, *arguments)
                if [leaf.shape for leaf in leaves(new)] == [leaf.shape for leaf in leaves(state)]:
                    fits[n] = new  # in the structure that f returns, which may be a NamedTuple
            except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as reason:
                error = error or reason  # the first is of the plainest state
        if len(fits) == 1:
            return next(iter(fits.values()))
        if fits:
            raise ValueError(
                f"{name_of(f)} accepts states of several sizes ({', '.join(map(str, fits))}), so zeros cannot be "
                f"chosen for it. Pass state=..., or define initial_state(self, batch) on it."
            )
    raise ValueError(
        f"no zero state was found for {name_of(f)}: no size among {sizes} is mapped onto itself. "
        f"Pass state=..., or define initial_state(self, batch) on it."
        + (f" The first trial failed with: {error}" if error else "")
    ) from error


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
