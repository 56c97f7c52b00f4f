"""Unfolding: the same step at every moment of a sequence."""

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from loopfold.engines.auto import Auto
from loopfold.engines.base import Engine, Recurrence
from loopfold.states import (
    State,
    Step,
    asks_for_index,
    at_end,
    describe,
    leaves,
    map_state,
    name_of,
    parted,
    rebuild,
    zero_state,
)
from loopfold.transitions import Transition, own_start


@dataclass(frozen=True)
class Unfolding:
    """What a run over a sequence gives. Outputs and final state are different things, so each has its name.

    `states`        every state, state(1…τ): the structure of the state, each leaf `[τ, batch, …]`
    `last`          the state after each sequence's own last step; pass it as `state=` to go on from there
    `hidden`        `[τ, batch, n]`, what a layer above reads: the first leaf of `outputs`, or of `states`
    `last_hidden`   `[batch, n]`, the same at each sequence's end: what a whole sequence leaves behind
    `outputs`       what the step gave beside the state, each leaf `[τ, batch, …]`; None where it gives none

    With unequal lengths, `states`, `hidden` and `outputs` are zero after a sequence's end, as torch pads them. Where
    `only_last` was asked for, they hold the last step of each sequence alone: τ is 1. At the top of a `Stacked`, what
    can only be called as it is, a `Bidirectional` or a layer that has hooks, still gives all steps.
    """

    states: State
    last: State
    hidden: Tensor
    last_hidden: Tensor
    outputs: State | None = None

    @staticmethod
    def of(outputs: State | None, states: State, lengths: Tensor | None) -> "Unfolding":
        """What follows from the outputs, if there are some, and the states of all steps."""
        last = map_state(lambda leaf: at_end(leaf, lengths), states)
        if outputs is None:
            return Unfolding(states, last, leaves(states)[0], leaves(last)[0])
        hidden = leaves(outputs)[0]
        return Unfolding(states, last, hidden, at_end(hidden, lengths), outputs)

    @staticmethod
    def of_ends(outputs: State | None, last: State) -> "Unfolding":
        """What follows from those of each sequence's last step."""
        end = leaves(last if outputs is None else outputs)[0]
        steps = None if outputs is None else map_state(_one_step, outputs)
        return Unfolding(map_state(_one_step, last), last, end[None], end, steps)

    def __repr__(self) -> str:
        outputs = "" if self.outputs is None else f", outputs={describe(self.outputs)}"
        return f"Unfolding(states={describe(self.states)}, last={describe(self.last)}{outputs})"


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _outside_of_torch_compile(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function`, which torch.compile leaves as it is: it has a compiler of its own.

    As torch.compiler.disable, but torch's compiler is not imported for those who never use it.
    """
    wrapped: list[Callable[_P, _R]] = []

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not wrapped:
            wrapped.append(torch.compiler.disable(function))
        return wrapped[0](*args, **kwargs)

    return call


@_outside_of_torch_compile
def unfold(
    f: Step,
    x: State | None = None,
    state: State | None = None,
    lengths: Tensor | list[int] | None = None,
    engine: Engine = Auto(),
    context: State | None = None,
    *,
    steps: int | None = None,
    only_last: bool = False,
) -> Unfolding:
    """Run a step over a sequence: `state(t) = f(state(t-1), x(t))` for t = 1…τ.

    `f`        a `Transition`, or any module or function `f(state, x) -> state`, or `-> (output, state)`
    `x`        `[τ, batch, n_in]`, or a tuple or NamedTuple of such, which the step is given with x(t) in it; without
               input give `steps=τ`, and `f(state) -> state`
    `state`    state(0); zeros, or what `f.initial_state(batch)` says, by default
    `lengths`  `[batch]` whole numbers from 1 to τ for sequences of unequal length, padded at the end
    `engine`   how to run it; the choice changes time and memory, never the value
    `context`  what every step reads, `[batch, …]`, or a tuple of such: then `f(state, x, context)`
    `only_last`  whether only each sequence's own last step is wanted; `Checkpointed` then never holds the others

    A step with a further parameter `t` is given the number of the step, from 0, in every call of `unfold`, as a tensor
    `[batch, 1]` of the dtype of the state: `f(state, x, t)`.

    >>> from loopfold import Elman
    >>> run = unfold(Elman(3, 5), torch.ones(7, 2, 3), lengths=[7, 4])
    >>> run.hidden.shape, run.last.shape
    (torch.Size([7, 2, 5]), torch.Size([2, 5]))
    >>> unfold(lambda s: 2 * s, steps=3, state=torch.tensor([1.0])).hidden.tolist()
    [[2.0], [4.0], [8.0]]
    >>> run = unfold(lambda s, x, c, t: (c * s, s + x + t), torch.ones(3, 1, 1), context=torch.full((1, 1), 5.0))
    >>> run.states.flatten().tolist(), run.outputs.flatten().tolist()
    ([1.0, 3.0, 6.0], [0.0, 5.0, 15.0])
    """
    if not isinstance(engine, Engine):
        raise TypeError(f"engine must be an object such as lf.Sequential(); got {engine!r}.")
    recurrence = checked(f, x, state, lengths, steps, context)
    reason = engine.refusal(recurrence)
    if reason is not None:
        raise ValueError(f"{type(engine).__name__} cannot run {name_of(f)}: {reason} Or use engine=lf.Auto().")
    if only_last:
        return Unfolding.of_ends(*parted(engine.last(recurrence), recurrence.state))
    return Unfolding.of(*parted(engine.run(recurrence), recurrence.state), recurrence.lengths)


def _one_step(leaf: Tensor) -> Tensor:
    return leaf[None]


# ------------------------------------------------------------------ checks: what it got, what it expected, what to type


def checked(
    f: Step,
    x: State | None,
    state: State | None,
    lengths: Tensor | list[int] | None,
    steps: int | None,
    context: State | None = None,
) -> Recurrence:
    """What `unfold` was given, with every check that needs no step, ready for an engine."""
    if isinstance(f, type):
        raise TypeError(f"unfold needs a step, not its class: type {f.__name__}(...) with its sizes.")
    if not callable(f):
        raise TypeError(f"unfold needs a step f(state, x) -> state; got a {type(f).__name__}.")
    if x is None:
        if steps is None:
            raise ValueError("unfold needs an input x [τ, batch, n_in], or steps=τ where there is none.")
        if state is None:
            raise ValueError("without an input x the state must be given: unfold(f, steps=τ, state=s0).")
        tau = steps
    else:
        check_order(f)
        _check_inputs(f, x)
        tau = leaves(x)[0].shape[0]
        if steps is not None and steps != tau:
            raise ValueError(f"x has {tau} steps and steps={steps} was given; give x alone.")
    check_steps(tau)
    first = None if x is None else leaves(x)[0]
    if context is not None:
        _check_context(context, first, state)
    if state is None:
        assert first is not None
        own, batch = own_start(f), first.shape[1]
        state = own(batch) if own else zero_state(f, batch, map_state(lambda leaf: leaf[0], x), context)
    else:
        state = _check_state(f, first, state)
    checked_lengths = None if lengths is None else check_lengths(lengths, tau, _batch(first, state))
    index = _index(tau, leaves(state)[0]) if asks_for_index(f, 1 + (x is not None) + (context is not None)) else None
    if x is not None:
        for name, leaf in _named("x", x):
            check_nan(leaf, checked_lengths, name)
    if checked_lengths is not None:
        x = None if x is None else map_state(partial(_without_padding, lengths=checked_lengths), x)
        index = None if index is None else _without_padding(index, checked_lengths)
    return Recurrence(f, x, tau, state, checked_lengths, context, index)


def _index(tau: int, like: Tensor) -> Tensor:
    """`[τ, batch, 1]`: the number of each step, for each sequence."""
    t = torch.arange(tau, device=like.device, dtype=like.dtype)
    batch = like.shape[:1]
    return t.view(tau, *[1] * len(batch), 1).expand(tau, *batch, 1)


def _named(name: str, part: State) -> list[tuple[str, Tensor]]:
    """The tensors of x or of a context, under the names that a user writes: `x`, `x[0]`, `x.speed`."""
    if not isinstance(part, tuple):
        return [(name, part)]
    fields = getattr(part, "_fields", None)
    names = [f"{name}.{key}" for key in fields] if fields else [f"{name}[{i}]" for i in range(len(part))]
    return [named for key, inner in zip(names, part, strict=True) for named in _named(key, inner)]


def _check_inputs(f: Step, x: State) -> None:
    """That every tensor of x is `[τ, batch, …]`, with one τ and one batch."""
    parameter = next(f.parameters(), None) if isinstance(f, nn.Module) else None
    size = f.input_size if isinstance(f, Transition) else None
    if not isinstance(x, tuple) or isinstance(x, nn.utils.rnn.PackedSequence):
        check_input(name_of(f), x, size, parameter)
        return
    parts = _named("x", x)
    if not parts:
        raise TypeError("x is an empty tuple; it must hold at least one tensor [τ, batch, …].")
    if size is not None:
        raise TypeError(
            f"x is {describe(x)}; {name_of(f)} reads one tensor [τ, batch, {size}]. Type torch.cat(x, -1), "
            f"or a step of your own that takes x apart."
        )
    for name, leaf in parts:
        check_input(name_of(f), leaf, None, parameter, name)
    (first_name, first), *others = parts
    for name, leaf in others:
        if leaf.shape[:2] != first.shape[:2]:
            raise ValueError(
                f"{name} has shape {tuple(leaf.shape)} and {first_name} {tuple(first.shape)}; all that a step reads "
                f"needs the same steps and batch, so {name} must be {(*first.shape[:2], *leaf.shape[2:])}."
            )
        _check_device(name, leaf, first_name, first)


def _check_context(context: State, x: Tensor | None, state: State | None) -> None:
    """That every tensor of a context is `[batch, …]`, beside x or, without one, the state."""
    for name, leaf in (parts := _named("context", context)):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"{name} must be a tensor [batch, …], or a tuple or NamedTuple of such; got a {type(leaf).__name__}."
            )
    if not parts:
        raise TypeError("the context is an empty tuple; leave it out, or give it a tensor [batch, …].")
    other, like = ("x", x[0]) if x is not None else ("the state", leaves(state)[0])
    if not like.dim():
        raise ValueError("a context needs a batch: the state is one number; make it [batch, n].")
    for name, leaf in parts:
        if leaf.shape[:1] != like.shape[:1]:
            batch = len(like)
            hint = f" Type {name}.transpose(0, 1)." if leaf.dim() > 1 and leaf.shape[1] == batch else ""
            hint = f" Type {name}.expand({batch}, -1)." if leaf.dim() == 1 else hint
            raise ValueError(
                f"{name} has shape {tuple(leaf.shape)}; {other} has batch {batch}, so it must be ({batch}, …).{hint}"
            )
        _check_device(name, leaf, other, like)


_INPUTS = {"x", "x_t", "xt", "xs", "input", "inputs", "input_", "inp", "token", "tokens"}
_STATES = {"h", "hx", "h_t", "ht", "hc", "h_prev", "state", "states", "hidden", "hidden_state", "carry", "memory"}


def check_order(f: Step) -> None:
    """That `f` takes the state first: where both have one size, an exchange of the two would not be seen otherwise."""
    names = _arguments(type(f).forward if isinstance(f, nn.Module) else f)
    if len(names) < 2 or names[0].lower() not in _INPUTS or names[1].lower() not in _STATES:
        return
    name, order = name_of(f), f"({names[0]}, {names[1]})"
    ours = {"RNNCell": "Elman", "LSTMCell": "LSTM", "GRUCell": "GRU"}.get(type(f).__name__)
    better = f"lf.{ours}(n_in, n), which is the same network, or " if ours and isinstance(f, nn.RNNCellBase) else ""
    raise TypeError(
        f"{name} takes {order}, the input first; a step takes the state first: f(state, x). Type {better}"
        f"a module with def forward(self, h, x): return self.cell(x, h)."
    )


def _arguments(function: Callable[..., object]) -> tuple[str, ...]:
    """The names of what a step is given, without `self`; none where it is not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    names = () if code is None else code.co_varnames[: code.co_argcount]
    return names[1:] if names[:1] == ("self",) else names


def check_steps(tau: int) -> None:
    """That there is at least one step."""
    if not isinstance(tau, int) or isinstance(tau, bool):
        raise TypeError(f"steps must be a whole number; got {tau!r}.")
    if tau < 1:
        raise ValueError(f"a sequence needs at least one step; got τ = {tau}.")


def check_input(name: str, x: State, size: int | None, parameter: Tensor | None, what: str = "x") -> None:
    """That `x` is `[τ, batch, size]` where the size is known, and goes with the parameters of what reads it."""
    if not isinstance(x, Tensor):
        if isinstance(x, nn.utils.rnn.PackedSequence):
            raise TypeError("x is a PackedSequence. Type x, n = pad_packed_sequence(x), and pass lengths=n.")
        raise TypeError(
            f"{what} must be a tensor [τ, batch, n_in]; got a {type(x).__name__}. Type torch.as_tensor({what})."
        )
    if x.dim() < 2 or (size is not None and x.dim() != 3):
        one = f" For one sequence, type {what}.unsqueeze(1)." if x.dim() == 2 else ""
        if one and not x.is_floating_point():
            one = " Classes must be made vectors first: nn.functional.one_hot(x, n).float(), or an nn.Embedding."
        raise ValueError(f"{what} has shape {tuple(x.shape)}; {name} needs [τ, batch, {size or 'n_in'}].{one}")
    if size is not None and x.shape[2] != size:
        where = [dim for dim in (0, 1) if x.shape[dim] == size]
        hint = f" Features come last: type x.movedim({where[0]}, 2)." if where else ""
        raise ValueError(f"x has shape {tuple(x.shape)}; {name} reads {size} features: [τ, batch, {size}].{hint}")
    if x.shape[1] < 1:
        raise ValueError(f"{what} has shape {tuple(x.shape)}: a batch of no sequences.")
    if parameter is not None:
        _check_device(what, x, f"{name}'s parameters", parameter)
        if size is not None and x.dtype != parameter.dtype and not torch.is_autocast_enabled(x.device.type):
            other = f", or .to({x.dtype}) on the module" if x.is_floating_point() else ""
            raise TypeError(
                f"x is {x.dtype} and {name}'s parameters are {parameter.dtype}. Type x.to({parameter.dtype}){other}."
            )


def _check_device(a_name: str, a: Tensor, b_name: str, b: Tensor) -> None:
    if a.device != b.device:
        raise ValueError(f"{a_name} is on {a.device} and {b_name} on {b.device}; move one of them with .to(...).")


def _check_state(f: Step, x: Tensor | None, state: State) -> State:
    given = leaves(state)
    if not given:
        raise TypeError("the state is an empty tuple; it must hold at least one tensor.")
    if x is None:
        return state
    needed = leaves(f.initial_state(x.shape[1])) if isinstance(f, Transition) and f.input_size else None
    if needed is not None:
        if len(given) != len(needed):
            like = describe(f.initial_state(x.shape[1]))  # type: ignore[attr-defined]
            raise ValueError(f"the state is {describe(state)}; {name_of(f)} needs {like}.")
        for leaf, other in zip(given, needed, strict=True):
            if leaf.shape != other.shape:
                raise ValueError(
                    f"the state has shape {tuple(leaf.shape)}; x has batch {x.shape[1]}, "
                    f"so it must be {tuple(other.shape)}."
                )
            if leaf.dtype != other.dtype and not torch.is_autocast_enabled(x.device.type):
                raise TypeError(f"the state is {leaf.dtype}; {name_of(f)} needs {other.dtype}.")
    for leaf in given:
        if leaf.dim() < 1 or leaf.shape[0] != x.shape[1]:
            raise ValueError(
                f"the state has shape {tuple(leaf.shape)}; x has batch {x.shape[1]}, "
                f"so it must be {(x.shape[1], *leaf.shape[1:])}."
            )
        _check_device("the state", leaf, "x", x)
    return rebuild(state, given)


def _batch(x: Tensor | None, state: State) -> int:
    if x is not None:
        return x.shape[1]
    shapes = [tuple(leaf.shape) for leaf in leaves(state)]
    if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
        raise ValueError(f"lengths need a batch as the first dimension of the state; it is {describe(state)}.")
    return shapes[0][0]


def check_lengths(lengths: Tensor | list[int], tau: int, batch: int) -> Tensor:
    """`lengths` as a tensor `[batch]` of whole numbers from 1 to τ."""
    try:
        lengths = torch.as_tensor(lengths)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"lengths must be whole numbers, one for each sequence; got {lengths!r}.") from error
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise TypeError(f"lengths must be whole numbers; got {lengths.dtype}. Type lengths.long().")
    if lengths.shape != (batch,):
        raise ValueError(f"lengths has shape {tuple(lengths.shape)}; the batch has {batch}, so it must be ({batch},).")
    if int(lengths.min()) < 1 or int(lengths.max()) > tau:
        raise ValueError(
            f"lengths run from {int(lengths.min())} to {int(lengths.max())}; each must be from 1 to τ = {tau}."
        )
    return lengths.long().clone()  # a copy, since the caller may change theirs later


def check_nan(x: Tensor, lengths: Tensor | None, what: str = "x") -> None:
    """Refuse NaN in x, where looking costs next to nothing: not on a GPU, which would have to wait for the answer."""
    if x.device.type != "cpu" or not x.is_floating_point() or torch.compiler.is_compiling():
        return
    if torch._C._functorch.is_functorch_wrapped_tensor(x) or not bool(x.detach().sum().isnan()):
        return  # values cannot be read under vmap
    bad = x.detach().isnan().flatten(2).any(2) if x.dim() > 2 else x.detach().isnan()  # [τ, batch]
    if lengths is not None:
        bad = bad & (torch.arange(x.shape[0])[:, None] < lengths.to(x.device))
    if bool(bad.any()):
        t, sequence = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{what} holds NaN, first at step {t} (from 0) of sequence {sequence}. Type {what}.nan_to_num() to drop it."
        )


def _without_padding(x: Tensor, lengths: Tensor) -> Tensor:
    """x with each sequence's first input in place of its padding, which may then hold anything, NaN too."""
    tau, batch = x.shape[:2]
    lengths = lengths.to(x.device)
    t = torch.arange(tau, device=x.device)[:, None]
    time = torch.where(t < lengths, t, 0)  # [τ, batch]
    return x[time, torch.arange(batch, device=x.device)]
