"""Unfolding: the same step at every moment of a sequence."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loopfold.engines.base import Engine, Recurrence
from loopfold.engines.sequential import Sequential
from loopfold.transitions import State, Step, Transition, describe, leaves, map_state, name_of, rebuild, zero_state


@dataclass(frozen=True)
class Unfolding:
    """What a run over a sequence gives. Outputs and final state are different things, so each has its name.

    `states`        every state, state(1…τ): the structure of the state, each leaf `[τ, batch, …]`
    `last`          the state after each sequence's own last step; pass it as `state=` to go on from there
    `hidden`        `[τ, batch, n]`, what a layer above reads: the first leaf of `states`
    `last_hidden`   `[batch, n]`, the same for `last`: what a whole sequence leaves behind

    With unequal lengths, `states` and `hidden` are zero after a sequence's end, as torch pads them.
    """

    states: State
    last: State
    hidden: Tensor
    last_hidden: Tensor


def unfold(
    f: Step,
    x: Tensor | None = None,
    state: State | None = None,
    lengths: Tensor | list[int] | None = None,
    engine: Engine = Sequential(),
    *,
    steps: int | None = None,
) -> Unfolding:
    """Run a step over a sequence: `state(t) = f(state(t-1), x(t))` for t = 1…τ.

    `f`        a `Transition`, or any module or function `f(state, x) -> state`
    `x`        `[τ, batch, n_in]`; without input give `steps=τ`, and `f(state) -> state`
    `state`    state(0); zeros, or what `f.initial_state(batch)` says, by default
    `lengths`  `[batch]` whole numbers from 1 to τ for sequences of unequal length, padded at the end
    `engine`   how to run it; the choice changes time and memory, never the value

    >>> from loopfold import Elman
    >>> run = unfold(Elman(3, 5), torch.ones(7, 2, 3), lengths=[7, 4])
    >>> run.hidden.shape, run.last.shape
    (torch.Size([7, 2, 5]), torch.Size([2, 5]))
    >>> unfold(lambda s: 2 * s, steps=3, state=torch.tensor([1.0])).hidden.tolist()
    [[2.0], [4.0], [8.0]]
    """
    recurrence = _checked(f, x, state, lengths, steps)
    reason = engine.refusal(recurrence)
    if reason is not None:
        raise ValueError(f"{type(engine).__name__} cannot run {name_of(f)}: {reason}")
    states = engine.run(recurrence)
    last = map_state(lambda leaf: _at_end(leaf, recurrence.lengths), states)
    return Unfolding(states, last, leaves(states)[0], leaves(last)[0])


def _at_end(leaf: Tensor, lengths: Tensor | None) -> Tensor:
    if lengths is None:
        return leaf[-1]
    end = lengths.to(leaf.device) - 1
    return leaf[end, torch.arange(len(end), device=leaf.device)]


# ------------------------------------------------------------------ checks: what came, what was needed, what to type


def _checked(
    f: Step, x: Tensor | None, state: State | None, lengths: Tensor | list[int] | None, steps: int | None
) -> Recurrence:
    if not callable(f):
        raise TypeError(f"unfold needs a step f(state, x) -> state; a {type(f).__name__} came.")
    if x is None:
        if steps is None:
            raise ValueError("unfold needs an input x [τ, batch, n_in], or steps=τ where there is none.")
        if not isinstance(steps, int) or isinstance(steps, bool):
            raise TypeError(f"steps must be a whole number; {steps!r} came.")
        if state is None:
            raise ValueError("without an input x the state must be given: unfold(f, steps=τ, state=s0).")
        tau = steps
    else:
        _check_input(f, x, steps)
        tau = x.shape[0]
    if tau < 1:
        raise ValueError(f"a sequence needs at least one step; τ = {tau} came.")
    if state is None:
        assert x is not None
        state = _initial_state(f, x)
    else:
        state = _check_state(f, x, state)
    checked_lengths = None if lengths is None else _check_lengths(lengths, x, state, tau)
    if x is not None:
        _check_nan(x, checked_lengths)
        if checked_lengths is not None:
            x = _repeat_last(x, checked_lengths)
    return Recurrence(f, x, tau, state, checked_lengths)


def _check_input(f: Step, x: Tensor, steps: int | None) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor [τ, batch, n_in]; a {type(x).__name__} came. Type torch.as_tensor(x).")
    if steps is not None and steps != x.shape[0]:
        raise ValueError(f"x has {x.shape[0]} steps and steps={steps} was given; give x alone.")
    size = f.input_size if isinstance(f, Transition) else None
    if x.dim() < 2 or (size is not None and x.dim() != 3):
        one = " For one sequence, type x.unsqueeze(1)." if x.dim() == 2 else ""
        raise ValueError(f"x has shape {tuple(x.shape)}; {name_of(f)} needs [τ, batch, {size or 'n_in'}].{one}")
    if size is not None and x.shape[2] != size:
        hint = " Time comes first: type x.transpose(0, 1)." if size in x.shape[:2] else ""
        raise ValueError(f"x has shape {tuple(x.shape)}; {name_of(f)} reads {size} features: [τ, batch, {size}].{hint}")
    if x.shape[1] < 1:
        raise ValueError(f"x has shape {tuple(x.shape)}: a batch of no sequences.")
    parameter = next(f.parameters(), None) if isinstance(f, nn.Module) else None
    if parameter is not None:
        _check_device("x", x, f"{name_of(f)}'s parameters", parameter)
        if size is not None and x.dtype != parameter.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"x is {x.dtype} and {name_of(f)}'s parameters are {parameter.dtype}. "
                f"Type x.to({parameter.dtype}), or cell.to({x.dtype})."
            )


def _check_device(a_name: str, a: Tensor, b_name: str, b: Tensor) -> None:
    if a.device != b.device:
        raise ValueError(f"{a_name} is on {a.device} and {b_name} on {b.device}; move one of them with .to(...).")


def _initial_state(f: Step, x: Tensor) -> State:
    own = getattr(f, "initial_state", None)  # any module may bring its own, not Transition alone
    return zero_state(f, x.shape[1], x[0]) if own is None else own(x.shape[1])


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


def _check_lengths(lengths: Tensor | list[int], x: Tensor | None, state: State, tau: int) -> Tensor:
    lengths = torch.as_tensor(lengths)
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise TypeError(f"lengths must be whole numbers; {lengths.dtype} came. Type lengths.long().")
    batch = x.shape[1] if x is not None else leaves(state)[0].shape[0]
    if lengths.shape != (batch,):
        raise ValueError(f"lengths has shape {tuple(lengths.shape)}; the batch has {batch}, so it must be ({batch},).")
    if int(lengths.min()) < 1 or int(lengths.max()) > tau:
        raise ValueError(
            f"lengths run from {int(lengths.min())} to {int(lengths.max())}; each must be from 1 to τ = {tau}."
        )
    return lengths.long()


def _check_nan(x: Tensor, lengths: Tensor | None) -> None:
    """Refuse NaN in x, where looking costs next to nothing: not on a GPU, which would have to wait for the answer."""
    if x.device.type != "cpu" or not x.is_floating_point() or torch.compiler.is_compiling():
        return
    if torch._C._functorch.is_batchedtensor(x) or not bool(x.detach().sum().isnan()):  # type: ignore[attr-defined]
        return
    bad = x.detach().isnan().flatten(2).any(2) if x.dim() > 2 else x.detach().isnan()  # [τ, batch]
    if lengths is not None:
        bad = bad & (torch.arange(x.shape[0])[:, None] < lengths.to(x.device))
    if bool(bad.any()):
        t, sequence = bad.nonzero()[0].tolist()
        raise ValueError(
            f"x holds NaN, first at step {t} (from 0) of sequence {sequence}. Type x.nan_to_num() to drop it."
        )


def _repeat_last(x: Tensor, lengths: Tensor) -> Tensor:
    """x with each sequence's last input in place of its padding, so that padding of any value stays out of all sums."""
    tau, batch = x.shape[:2]
    lengths = lengths.to(x.device)
    time = torch.minimum(torch.arange(tau, device=x.device)[:, None], lengths - 1)  # [τ, batch]
    return x[time, torch.arange(batch, device=x.device)]
