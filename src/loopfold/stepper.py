"""Stepper: a model that is run one step at a time, as its inputs come."""

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from loopfold.engines.base import EngineWarning, Recurrence, first_step
from loopfold.engines.programs import forget
from loopfold.engines.selfcheck import disagreement
from loopfold.engines.stepped import NativeStep
from loopfold.onestep import Steps, around, check_hooks, one_step, start_of
from loopfold.reading import (
    Reads,
    as_context,
    as_given,
    as_state,
    as_tensors,
    check_out,
    copied,
    numbers_of,
    plainly,
    state_like,
)
from loopfold.staleness import unaltered
from loopfold.states import (
    State,
    Step,
    asks_for_index,
    describe,
    from_reals,
    in_reals,
    leaves,
    map_state,
    name_of,
    parted,
    whole_number,
)
from loopfold.stepgraph.graph import Refusal
from loopfold.surroundings import fingerprint
from loopfold.unfolding import check_order

ndarray, from_numpy = np.ndarray, torch.from_numpy  # found sooner so

FIRST = 3  # steps that are checked, whatever it costs
SELDOM = 2_000  # steps at least from one later check to the next, so that 99.9 % of all steps are not held up
SHARE = 0.01  # of the time that steps take, for those later checks
FEW, RESTLESS, PAUSE = 16, 4, 1_000  # after so many changes, each few steps after the last, a pause from compiling


class Stepper:
    """A model that keeps its state and takes one step at a time: `output = stepper.step(x)`.

    `model`    a transition, `Recurrent`, `Stacked`, `SequenceToSequence` or `SequenceToOne`; any step `f(state, x)`
    `batch`    how many streams it takes at once; by default as many as the first x has
    `context`  what every step reads, `[batch, …]`, for a step that reads one

    On a CPU the whole step is one call of native code where it compiles, and `explain()` says whether it does. The
    values are those of `unfold`, step by step. No gradients are kept, and `torch.autocast` has no effect. A stepper is
    for one thread at a time; several steppers of one model may run in several threads.

    >>> from loopfold import LSTM, SequenceToSequence
    >>> model, x = SequenceToSequence(LSTM(3, 5), outputs=4), torch.randn(7, 1, 3)
    >>> stepper = Stepper(model)
    >>> o = torch.stack([stepper.step(x_t) for x_t in x])
    >>> torch.allclose(o, model(x), atol=1e-6)
    True
    >>> stepper.state.c.shape
    torch.Size([1, 5])
    """

    def __init__(self, model: nn.Module | Step, batch: int | None = None, context: Any = None) -> None:
        self.model = model
        self._f = one_step(model)
        check_order(self._f)
        self._given_batch = None if batch is None else whole_number("Stepper", "batch", batch)
        self._context = None if context is None else as_context(context, self._f)
        self._state: State | None = None  # None: the start, whatever that is. Native code has places of its own
        self._reads: Reads | None = None  # what x is like; None: not known yet
        self._counts: Tensor | None = None  # [batch], the number of each stream's next step, where the step asks for it
        self._native: NativeStep | None = None
        self._fast: Any = None  # all that a step of rows of numbers needs, and of tokens
        self._tokens: Any = None
        self._asks: bool | None = None  # whether the step reads its number
        self._why = "it has not taken a step yet."  # there is no native code
        self._same: Any = None  # whether that reason may still hold; None: ask
        self._period = self._checks = 0  # steps from the last check to the next, and checks so far
        self._pace, self._since = math.inf, 0.0  # seconds that a step takes; and when the last check was over
        self._changes = self._pause = 0
        self._stepped = False  # whether the two places of the native code hold the state before and after a step
        self._open = False  # whether the next x may be another number of streams

    # ---- one step

    def step(self, x: Any = None, out: Any = None) -> Any:
        """Read x(t), go on by one step, and return the output: a new array or tensor, or `out`, filled.

        `x`    `[batch, …]` as the step reads it: a numpy array, a tensor, numbers, tokens, or a tuple of such. For one
               stream the batch may be left out, `[…]`; then it is left out of the output too
        `out`  an array or tensor of the shape and dtype of the output, to write to

        The output is what the step gives beside its state, or else the first part of its state, the hidden state. It is
        a numpy array where x is one, and else a tensor.
        """
        fast = self._fast
        if fast is not None and out is None:
            unaltered, call, job, dtype, sizes, into, places = fast
            kind = type(x)
            try:
                rows = x if kind is ndarray else x.numpy() if kind is Tensor else into
            except (RuntimeError, TypeError):  # it needs a gradient, or is on another device
                rows = into
            if rows is not into and rows.dtype is dtype and unaltered():
                size = rows.shape
                if size in sizes:
                    into[...] = rows
                    place = call(job)
                    if place < 2:
                        output = places[place].copy()
                        output = output if size == sizes[0] else output[0]
                        return output if kind is ndarray else from_numpy(output)
        elif fast is None and self._tokens is not None and out is None:
            output = self._token_step(x)
            if output is not None:
                return output
        with plainly():
            return self._step(x, out)

    def _token_step(self, x: Any) -> Any:
        """The same for a token of one stream; None where x is something else, or the model has changed."""
        unaltered, call, job, table, into, row, places = self._tokens
        kind = type(x)
        is_array = kind is ndarray or kind is Tensor
        if kind is not int and not (is_array and x.shape in ((), (1,)) and x.dtype in (np.int64, torch.int64)):
            return None
        token = x if kind is int else x.item()
        if not 0 <= token < len(table) or not unaltered():
            return None
        row[0] = table[token]
        into[0] = token
        place = call(job)
        if place > 1:
            return None
        output = places[place].copy()
        output = output if is_array and x.shape else output[0]
        return output if kind is ndarray else from_numpy(output)

    def _step(self, x: Any, out: Any) -> Any:
        """The same, whatever x is, and with all checks."""
        given = as_tensors(x)
        if self._open and self._reads is not None and not self._reads.fits(given):
            self._forget()
        if self._native is not None and not self._native.unaltered():
            self._leave()
        before, native = (self._state, self._counts), self._native
        first, self._reads = self._reads is None, self._reads or Reads.first(given, self._f, self._expected())
        try:
            tensors, bare = self._reads.checked(given)
            if native is not None and out is not None:
                check_out(native.output(0), bare, out)
            output = self._by_the_model(tensors) if native is None else self._by_native_code(tensors)
            output = as_given(output, given, bare, out)
        except Exception as error:
            reads = self._reads
            if first:  # what this x is like says nothing of the next
                self._forget()
            if native is None:  # be as before the step, also where only its output was refused
                self._drop()
                self._state, self._counts = before
            reads.check_model(self.model, error)
            raise
        self._open = False
        if self._native is not None:
            self._fast, self._tokens = self._native.rows, self._native.tokens
        return output

    def _by_native_code(self, x: State | None, first: bool = True) -> State:
        """One step of the native code, which is checked when it is time for that."""
        native, reads = self._native, self._reads
        assert native is not None
        assert reads is not None
        self._stepped, self._fast, self._tokens = False, None, None  # until this x, which is written now, is accepted
        for into, leaf in zip(native.x, [] if x is None else in_reals(leaves(x)), strict=False):
            into.copy_(leaf)
        if self._counts is not None:
            native.x[-1][:, 0] = self._counts
        reads.check_nan(x)
        native.look_up()
        due = native.left <= 0
        native.left = 1 if due else native.left
        if native.call(native.job) > 1:
            native.call_anyway()  # the NaN is one of the model's own
        self._stepped = True
        reason = self._disagreement() if due else None
        if reason is not None:
            return self._otherwise(x, reason, first)
        self._count()
        output = native.output(native.place)
        if due and self._has_changed():
            self._leave()
        return output

    def _by_the_model(self, x: State | None, first: bool = True) -> State:
        """One step of the model's own code; or of native code, if there is some that was not there before."""
        assert self._reads is not None
        if isinstance(self.model, nn.Module):
            check_hooks(self.model)
        changed = self._same is None or not self._same()
        if changed or not isinstance(self._f, Steps):  # of which the other question has been asked just now
            self._unwrap()
        self._reads.check_nan(x)
        state = self._start(self._reads.batch, x) if self._state is None else self._state
        recurrence = self._recurrence(x, state)
        self._pause -= self._pause > 0
        if self._same is None or (changed and not self._pause):
            self._asks = None
            recurrence = self._recurrence(x, state)
            new = first_step(recurrence)  # with its checks, in words
            self._bind(recurrence)
            if self._native is not None:
                return self._by_native_code(x, first)
        else:
            new = recurrence.take(state, 0)
        output, self._state = parted(new, state)
        self._count()
        return leaves(self._state)[0] if output is None else output

    def _unwrap(self) -> None:
        """Look at what the model is made of again: a layer of it may be another, or one that has no single steps."""
        f = one_step(self.model)
        if f is not self._f and not (isinstance(f, Steps) and type(f) is type(self._f)):  # those hold the whole model
            check_order(f)
            self._f, self._same, self._asks = f, None, None

    def _recurrence(self, x: State | None, state: State) -> Recurrence:
        """A sequence of this one step."""
        like, index = leaves(state)[0], None
        if self._asks is None:
            self._asks = asks_for_index(self._f, 1 + (x is not None) + (self._context is not None))
        if self._asks:
            if self._counts is None:
                self._counts = torch.zeros(len(like), dtype=torch.int64)
            index = self._counts.to(like).view(1, -1, 1)
        rows = None if x is None else map_state(lambda leaf: leaf[None], x)
        return Recurrence(self._f, rows, 1, state, None, self._context, index)

    def _count(self) -> None:
        if self._counts is not None:
            self._counts = self._counts + 1

    # ---- native code, and whether it is right

    def _bind(self, recurrence: Recurrence) -> None:
        """Native code for the step, from this state on; or the reason why there is none."""
        try:
            self._native = NativeStep(recurrence, around(self.model))
        except Refusal as reason:
            self._why = str(reason)
            f = self._f
            self._same = unaltered(f, [], [], around(self.model))[0] if isinstance(f, nn.Module) else lambda: True
            return
        self._same, self._state = None, None
        self._period = 0

    def _leave(self) -> None:
        """The model has changed: take the state back, and look for native code again; or not, where that is in vain."""
        assert self._native is not None
        served = self._period - self._native.left
        self._state = map_state(copied, self._native.state(self._native.place))
        self._drop()
        self._checks = min(self._checks, FIRST - 1)
        self._changes = self._changes + 1 if served < FEW else 0
        if self._changes >= RESTLESS:
            self._changes, self._pause, self._same = 0, PAUSE, lambda: False
            self._why = f"it changes at almost every step, so that the next {PAUSE:,} are not compiled."

    def check(self) -> None:
        """Take the last step again by the model's own code, and compare; the next check is then as far off as can be.

        Steps are checked in this way without being asked: the first three, then one in 2,000 or more, which takes about
        ten times as long as a step of the model's own code. Call this in pauses of your own, at least once in 2,000
        steps, and no step is held up.
        """
        with plainly():
            if self._native is not None and (not self._native.unaltered() or self._has_changed()):
                self._leave()
            if self._native is not None and self._stepped and self._disagreement() is not None:
                recurrence = self._before()
                forget(recurrence)
                _, self._state = parted(recurrence.take(recurrence.state, 0), recurrence.state)
                self._drop()

    def _before(self) -> Recurrence:
        """The step that was last taken, and the state before it."""
        native, reads = self._native, self._reads
        assert native is not None
        assert reads is not None
        x = None if reads.like is None else from_reals(reads.like, native.x)
        found = self._recurrence(x, map_state(copied, native.state(1 - native.place)))
        return found if found.index is None else replace(found, index=native.x[-1][None])

    def _disagreement(self) -> str | None:
        """In words, how the last step differs from what the model's own code gives, if it does."""
        native = self._native
        assert native is not None
        begin, taken = time.perf_counter(), self._period - native.left
        if taken >= SELDOM // 2:  # pauses are no part of it, so the least counts
            self._pace = min(self._pace, (begin - self._since) / taken)
        reason = disagreement(self._before(), native.returned(native.place), 0)
        self._since = time.perf_counter()
        self._checks += 1
        cost = self._since - begin
        self._period = 0 if self._checks < FIRST else max(SELDOM, int(cost / (SHARE * self._pace)))
        native.left = self._period
        return reason

    def _has_changed(self) -> bool:
        """Whether something is another than when the native code was made: asked of all, not only of what is quick."""
        assert isinstance(self._f, nn.Module)
        return self._native is not None and fingerprint(self._f) != self._native.marks

    def _otherwise(self, x: State | None, reason: str, first: bool) -> State:
        """The last step again, since it was wrong: traced anew; and by the model's own code, if that is wrong too."""
        recurrence = self._before()
        if first:
            forget(recurrence)
            self._state = recurrence.state
            self._drop()
            return self._by_the_model(x, first=False)
        self._distrust(reason, recurrence)
        return self._by_the_model(x)

    def _distrust(self, reason: str, recurrence: Recurrence) -> None:
        """Use the native code no more, and say so; go on from the state of `recurrence`."""
        assert self._native is not None
        self._native.found.program.made["step"] = f"its native code was wrong: {reason}."
        self._state = recurrence.state
        self._drop()
        warnings.warn(
            f"the native code of a Stepper was wrong about {name_of(self._f)}, so its own code runs: {reason}. Either "
            "the step depends on something that Loopfold does not see, or this is a fault in Loopfold.",
            EngineWarning,
            stacklevel=2,
        )

    def explain(self, x: Any = None) -> str:
        """In words: whether the steps are native code, and why not. Before the first step, x is needed to tell.

        >>> from loopfold import GRU
        >>> print(Stepper(GRU(3, 5)).explain([0.0, 0.0, 0.0]))
        GRU step by step, batch 1, float32 on cpu: native code, the whole step in one call.
        """
        if self._reads is None:
            other = Stepper(self.model, self._given_batch, self._context)
            if self._state is not None:
                other.state = self._state
            with torch.random.fork_rng(devices=[]):
                try:
                    other.step(x)
                except (TypeError, ValueError) as error:
                    if x is not None:
                        raise
                    raise ValueError(
                        f"{name_of(self.model)} has not taken a step yet, and cannot take one without x. "
                        f"Type stepper.explain(x)."
                    ) from error
            return other.explain()
        native = self._native
        like = leaves(self._state if native is None else native.like_state)[0]
        size = f"batch {self._reads.batch}, {str(like.dtype).removeprefix('torch.')} on {like.device}"
        begin = f"{name_of(self.model)} step by step, {size}"
        if native is None:
            return f"{begin}: the model's own code, because {self._why}"
        slow = f"\n  looked at in full before every step: {', '.join(native.long)}" if native.long else ""
        return f"{begin}: native code, the whole step in one call.{slow}"

    # ---- the state

    @property
    def state(self) -> State:
        """The state now, as a copy, in the structure that the step gives; it can be set, to any state like it."""
        if self._native is not None:
            return map_state(copied, self._native.state(self._native.place))
        state = self._state
        if state is None:
            with plainly():
                state = self._start(self._expected() or 1, None)
        return map_state(copied, state)

    @state.setter
    def state(self, state: State) -> None:
        self.reset(state)

    def reset(self, state: State | None = None, streams: Sequence[int] | None = None, *, context: Any = None) -> None:
        """Go back to the start, or to `state`; all streams, or only some, given by their numbers from 0.

        `state`    what to set, a row for each of these streams; by default what the model starts from
        `context`  what every step from now on reads in place of the context so far

        For a step that reads its number `t`, this is 0 again, unless a state is given for all streams.
        """
        with plainly():
            if self._native is not None and not self._native.unaltered():
                self._leave()
            if context is not None:
                self._new_context(context)
            if streams is not None:
                self._reset_some(state, streams)
            elif state is not None:
                self._set(state)
            elif self._native is None or self._reads is None:
                self._forget()
            else:
                self._put(self._start(self._reads.batch, self._reads.like))
                self._counts = None if self._counts is None else torch.zeros_like(self._counts)
                self._open = True

    def _put(self, state: State) -> None:
        """Let the native code go on from `state`; the next step takes the long way, once."""
        assert self._native is not None
        self._native.set_state(state)
        self._fast = self._tokens = None
        self._stepped = False

    def _forget(self) -> None:
        """Be as new."""
        self._drop()
        self._state = self._counts = self._same = self._reads = self._asks = None
        self._open = False

    def _drop(self) -> None:
        """Have no native code any more."""
        self._native = self._fast = self._tokens = None

    def _new_context(self, context: Any) -> None:
        if self._context is None:
            raise ValueError("this stepper has no context. Type lf.Stepper(model, context=c).")
        now = self._native.state(self._native.place) if self._native is not None else self._state
        self._state = None if now is None else map_state(copied, now)
        self._context, self._same = as_context(context, self._f), None
        self._drop()

    def _reset_some(self, state: State | None, streams: Sequence[int]) -> None:
        batch = self._expected()
        if len(streams) == 0:
            return
        if batch is None:
            raise ValueError("no step was taken yet, so all streams are at their start.")
        at = numbers_of(streams, batch)
        now = self.state
        like = None if self._reads is None else self._reads.like
        new = map_state(lambda leaf: leaf[at], self._start(batch, like)) if state is None else as_state(state)
        parts = list(zip(leaves(now), leaves(new), strict=False))
        if len(leaves(new)) != len(leaves(now)) or any(b.shape != a[at].shape for a, b in parts):
            wanted = map_state(lambda leaf: leaf[at], now)
            raise ValueError(f"the state is {describe(new)}; for {len(at)} streams it must be {describe(wanted)}.")
        for leaf, rows in parts:
            leaf[at.to(leaf.device)] = rows.to(leaf)
        self._set(now)
        if self._counts is not None and state is None:
            self._counts[at] = 0

    def _set(self, state: State) -> None:
        """All of the state, if it is like the one that there is."""
        known = self._state is not None or self._native is not None or self._expected() is not None
        try:
            new = state_like(as_state(state), self.state if known else None, name_of(self.model))
        except TypeError as error:
            if self._reads is not None:
                self._reads.check_model(self.model, error)
            raise
        if self._native is not None:
            self._put(new)
        else:
            self._state = map_state(copied, new)
        self._open = False

    def _expected(self) -> int | None:
        """How many streams there are, if that is known."""
        if self._given_batch is not None or self._reads is not None:
            return self._given_batch or (self._reads.batch if self._reads else None)
        known = [*([] if self._state is None else leaves(self._state))]
        known += [] if self._context is None else leaves(self._context)
        return len(known[0]) if known else None

    def _start(self, batch: int, x: State | None) -> State:
        self._unwrap()
        return map_state(copied, start_of(self._f, batch, x, self._context))

    # ---- copies

    def __getstate__(self) -> dict[str, Any]:
        known = self._state is not None or self._native is not None
        return {
            "model": self.model,
            "f": self._f,  # what was traced, so that a copy need not be
            "batch": self._given_batch,
            "context": self._context,
            "state": self.state if known else None,
            "counts": None if self._counts is None else self._counts.clone(),
        }

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.__init__(saved["model"], saved["batch"], saved["context"])  # type: ignore[misc]
        self._f, self._state, self._counts = saved["f"], saved["state"], saved["counts"]

    def __repr__(self) -> str:
        return f"Stepper({name_of(self.model)}, batch={self._expected()})"
