"""What a stepper is given: arrays, tensors or numbers become the tensors `[batch, …]` that a step reads; and states."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from loopfold.casts import with_casts
from loopfold.onestep import lowest
from loopfold.states import State, Step, all_leaves, describe, leaves, map_state, name_of, rebuild
from loopfold.transitions import Transition, example_inputs


@dataclass(frozen=True, eq=False)
class Given:
    """One x as it came: its tensors; whether the caller deals in numpy arrays; whether it was mere numbers."""

    x: State | None
    numpy: bool
    numbers: bool


def as_tensors(x: Any, what: str = "x") -> Given:
    """An x of any kind, called `what` in errors; what it holds is checked later."""
    if x is None:
        return Given(None, False, False)
    if isinstance(x, tuple) and x and all(isinstance(part, int | float) for part in x):
        x = list(x)
    first = x
    while isinstance(first, tuple) and first:
        first = first[0]
    is_numpy = isinstance(first, np.ndarray | np.generic)
    return Given(_tensors(x, what), is_numpy, not is_numpy and not isinstance(first, Tensor))


def as_context(context: Any, f: Step) -> State:
    """A context of any kind that x may be of, as tensors of its own."""
    given, parameter = as_tensors(context, "the context"), _parameter(f)
    dtype = torch.get_default_dtype() if parameter is None else parameter.dtype

    def placed(leaf: Tensor) -> Tensor:
        leaf = leaf.to(dtype) if given.numbers and leaf.is_floating_point() else leaf
        if parameter is not None and (given.numpy or given.numbers):
            leaf = leaf.to(parameter.device)
            if leaf.is_floating_point():
                _check_dtype(leaf, dtype, f"{name_of(f)}'s parameters are", given, "context")
        return copied(leaf)

    assert given.x is not None
    return map_state(placed, given.x)


def _tensors(x: Any, what: str) -> State:
    if isinstance(x, Tensor):
        return x.detach()
    if isinstance(x, tuple) and x:
        parts = [_tensors(part, what) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    try:
        if isinstance(x, np.ndarray | np.generic):
            return torch.from_numpy(np.array(x, dtype=x.dtype.newbyteorder("=")))
        if isinstance(x, list | int | float):
            found = torch.tensor(x)  # of the default dtype, which may have fewer digits than the numbers, and the model
            return torch.tensor(x, dtype=torch.float64) if found.is_floating_point() else found
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{what} cannot be read as numbers: {error}") from None
    raise TypeError(f"{what} must be a numpy array, a tensor, numbers, or a tuple of such; got a {type(x).__name__}.")


@dataclass(frozen=True, eq=False)
class Reads:
    """What a step reads: `like` has the structure, shapes, dtypes and device of x; None for a step without x."""

    name: str
    like: State | None
    batch: int
    dtype: torch.dtype | None = None  # of the model's parameters, at the first step

    @staticmethod
    def first(given: Given, f: Step, batch: int | None) -> "Reads":
        """What the first x of a stepper says on this, where `batch` streams are expected, if any number is."""
        parameter = _parameter(f)
        if given.x is None:
            return Reads(name_of(f), None, batch or 1, None if parameter is None else parameter.dtype)
        parts = leaves(given.x)
        size = _input_size(f)
        if given.numbers:
            own = torch.get_default_dtype() if parameter is None else parameter.dtype
            parts = [leaf.to(own) if leaf.is_floating_point() or size is not None else leaf for leaf in parts]
        if all(leaf.dim() == 0 for leaf in parts) or _is_one_stream(parts, f, size, batch):
            parts = [leaf[None] for leaf in parts]
        elif any(leaf.dim() == 0 for leaf in parts):
            raise ValueError(f"x is {describe(given.x)}; each of its parts needs the batch as its first dimension.")
        if parameter is not None and (given.numpy or given.numbers):
            parts = [leaf.to(parameter.device) for leaf in parts]
        dtype = None if parameter is None else parameter.dtype
        reads = Reads(name_of(f), rebuild(given.x, parts), batch or len(parts[0]), dtype)
        for leaf in parts:
            if size is not None and dtype is not None:
                _check_dtype(leaf, dtype, f"{name_of(f)}'s parameters are", given)
            if len(leaf) < 1:
                raise ValueError(f"x has shape {tuple(leaf.shape)}: a batch of no streams.")
            reads._check_batch(leaf)
            if size is not None and parameter is not None and leaf.shape[1:] != (size,):
                raise ValueError(
                    f"x has shape {tuple(leaf.shape)}; {name_of(f)} reads {size} features: [batch, {size}]."
                )
            if parameter is not None:
                _check_device(leaf, parameter.device)
        return reads

    def fits(self, given: Given) -> bool:
        """Whether x has as many streams as there were so far."""
        try:
            self.checked(given)
        except (TypeError, ValueError):
            return False
        return True

    def checked(self, given: Given) -> tuple[State | None, bool]:
        """The tensors of an x, `[batch, …]`, if it is like the first; and whether it came without the batch."""
        if given.x is None or self.like is None:
            if given.x is not None or self.like is not None:
                takes = "no x" if self.like is None else f"an x like {describe(self.like)}"
                raise TypeError(f"{self.name} reads {takes}, as at its first step.")
            return None, False
        likes, parts = leaves(self.like), leaves(given.x)
        bare = self.batch == 1 and all(p.dim() == l.dim() - 1 for p, l in zip(parts, likes, strict=False))
        if bare:
            parts = [leaf[None] for leaf in parts]
        if _shape(given.x) != _shape(self.like):
            raise ValueError(
                f"x is {describe(given.x)}; {self.name} reads {describe(self.like)}, as at its first step."
            )
        for i, (leaf, like) in enumerate(zip(parts, likes, strict=True)):
            if leaf.shape != like.shape:
                if leaf.dim():
                    self._check_batch(leaf)
                raise ValueError(
                    f"x has shape {tuple(leaf.shape)}; {self.name} reads {tuple(like.shape)}, as at its first step."
                )
            if given.numbers:
                if leaf.is_floating_point() and not like.is_floating_point():
                    raise TypeError(f"x is {leaf.dtype}; {self.name} reads {like.dtype}, as at its first step.")
                parts[i] = leaf.to(like)
            elif leaf.dtype != like.dtype:
                _check_dtype(leaf, like.dtype, f"{self.name} reads", given)
            if given.numpy:
                parts[i] = leaf.to(like.device)
            elif leaf.device != like.device:
                _check_device(leaf, like.device)
        return rebuild(self.like, parts), bare

    def check_model(self, model: nn.Module | Step, error: Exception) -> None:
        """Where the model has another dtype than at the first step, say so: that is what `error` is about."""
        parameter = _parameter(model)
        if parameter is not None and self.dtype is not None and parameter.dtype != self.dtype:
            now, then = (str(dtype).removeprefix("torch.") for dtype in (parameter.dtype, self.dtype))
            raise TypeError(
                f"{name_of(model)} is {now} now, and was {then} at the first step, as its state is. "
                f"Type stepper.reset(), and give x as {now}."
            ) from error

    def _check_batch(self, leaf: Tensor) -> None:
        if len(leaf) != self.batch:
            raise ValueError(
                f"x has shape {tuple(leaf.shape)}; this stepper has {self.batch} stream{'s'[: self.batch != 1]}, so it "
                f"must be {(self.batch, *leaf.shape[1:])}. For others, type lf.Stepper(model, batch={len(leaf)})."
            )

    def check_nan(self, x: State | None) -> None:
        """Refuse NaN in x, where looking costs next to nothing, as `unfold` does."""
        for leaf in all_leaves(x):
            if leaf.device.type == "cpu" and leaf.is_floating_point() and bool(leaf.sum().isnan()):
                bad = leaf.isnan().flatten(1).any(1) if leaf.dim() > 1 else leaf.isnan()
                if bool(bad.any()):
                    stream = int(bad.nonzero()[0])
                    raise ValueError(
                        f"x holds NaN, in stream {stream} (from 0); the state is as it was. "
                        f"Type x.nan_to_num(), or numpy.nan_to_num(x), to drop it."
                    )


def as_given(output: State, given: Given, bare: bool, out: Any) -> Any:
    """An output in memory of its own, of the kind that x was; or in `out`."""
    if out is not None:
        check_out(output, bare, out).copy_(output[0] if bare else output)
        return out
    output = map_state(lambda leaf: leaf[0], output) if bare else output
    if given.numpy:
        if any(leaf.dtype == torch.bfloat16 for leaf in leaves(output)):
            raise TypeError(
                "the output is bfloat16, which numpy does not have. Give x as a tensor: torch.from_numpy(x)."
            )
        return map_state(lambda leaf: leaf.cpu().numpy().copy(), output)
    return map_state(copied, output)


def check_out(output: State, bare: bool, out: Any) -> Tensor:
    """The memory of `out`, if such an output can be written to it."""
    if not isinstance(out, np.ndarray | Tensor) or not isinstance(output, Tensor):
        raise TypeError(f"out must be an array or a tensor; got a {type(out).__name__}, for {describe(output)}.")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError("out is an array that cannot be written to.")
    try:
        into = torch.from_numpy(out) if isinstance(out, np.ndarray) else out.detach()
    except (TypeError, ValueError) as error:
        raise TypeError(f"out must be an array that torch can read: {error}") from None
    shape = output.shape[1:] if bare else output.shape
    if into.shape != shape or into.dtype != output.dtype:
        raise ValueError(f"out is {tuple(into.shape)} of {into.dtype}; the output is {tuple(shape)} of {output.dtype}.")
    return into


def _shape(x: State) -> Any:
    return [_shape(part) for part in x] if isinstance(x, tuple) else None


def _parameter(f: Step) -> Tensor | None:
    tensors = [*f.parameters(), *f.buffers()] if isinstance(f, nn.Module) else []
    return next((t for t in tensors if t.is_floating_point()), None)


def _input_size(f: Step) -> int | None:
    """How many features the lowest cell reads, where it says so."""
    cell = lowest(f)
    return cell.input_size if isinstance(cell, Transition) else None


def _is_one_stream(parts: list[Tensor], f: Step, size: int | None, batch: int | None) -> bool:
    """Whether a single row is the features of one stream, and not a batch of numbers."""
    if len(parts) != 1 or parts[0].dim() != 1 or not parts[0].is_floating_point() or (batch or 1) != 1:
        return False
    if size is not None:
        return True
    return any(x is not None and x.shape == (1, len(parts[0])) for x in example_inputs(lowest(f)))


def _check_dtype(leaf: Tensor, dtype: torch.dtype, whose: str, given: Given, what: str = "x") -> None:
    if leaf.dtype != dtype:
        name = str(dtype).removeprefix("torch.")
        how = f"{what}.astype(numpy.{name})" if given.numpy else f"{what}.to({dtype})"
        if given.numpy and dtype == torch.bfloat16:  # numpy has none
            how = f"torch.from_numpy({what}).to({dtype})"
        raise TypeError(f"{what} is {str(leaf.dtype).removeprefix('torch.')} and {whose} {name}. Type {how}.")


def _check_device(leaf: Tensor, device: torch.device) -> None:
    if leaf.device != device:
        raise ValueError(f"x is on {leaf.device} and the model on {device}; move one of them with .to(...).")


# ------------------------------------------------------------------ states


def as_state(state: Any) -> State:
    """A state of tensors or numpy arrays, as tensors."""
    if isinstance(state, np.ndarray):
        return torch.from_numpy(state)
    if isinstance(state, tuple):
        parts = [as_state(part) for part in state]
        return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
    if not isinstance(state, Tensor):
        raise TypeError(f"a state is a tensor, or a tuple of tensors; got a {type(state).__name__}.")
    return state.detach()


def state_like(new: State, now: State | None, name: str) -> State:
    """`new`, in the structure of the state that there is now, if it is of its sizes."""
    parts = leaves(new)
    if not parts or (now is None and len({leaf.shape[:1] for leaf in parts}) != 1):
        raise ValueError(f"the state is {describe(new)}; its parts need the same batch.")
    if now is None:
        return new
    if [leaf.shape for leaf in parts] != [leaf.shape for leaf in leaves(now)]:
        raise ValueError(f"the state is {describe(new)}; {name} needs {describe(now)}.")
    for leaf, like in zip(parts, leaves(now), strict=True):
        if leaf.dtype != like.dtype or leaf.device != like.device:
            raise TypeError(f"the state is {leaf.dtype} on {leaf.device}; it must be {like.dtype} on {like.device}.")
    return rebuild(now, parts)


def numbers_of(streams: Sequence[int], batch: int) -> Tensor:
    """The numbers of some of `batch` streams, as a tensor."""
    at = torch.as_tensor(streams)
    if at.dtype == torch.bool or at.is_floating_point() or at.dim() != 1:
        raise TypeError(f"streams must be a list of whole numbers, such as [0, 2]; got {streams!r}.")
    if at.numel() and (int(at.min()) < 0 or int(at.max()) >= batch):
        raise ValueError(f"this stepper has {batch} streams, 0 to {batch - 1}; got {list(streams)}.")
    return at


def copied(leaf: Tensor) -> Tensor:
    """The same numbers in memory of their own."""
    return leaf.detach().clone(memory_format=torch.contiguous_format)


@contextmanager
def plainly() -> Iterator[None]:
    """While open, no gradients are kept and no dtypes changed, whatever the caller has set."""
    if not torch._C._is_any_autocast_enabled() and not torch.is_inference_mode_enabled():  # the others take far longer
        with torch.no_grad():
            yield
        return
    with torch.inference_mode(False), torch.no_grad(), with_casts((), torch.device("cuda")):
        yield
