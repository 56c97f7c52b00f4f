"""What an output means: the kind of target that it predicts, and its loss."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from loopfold.states import whole_number


class Outputs(ABC):
    """The kind of target that an output layer predicts. `size` is the number of units of `o`."""

    size: int

    @abstractmethod
    def encode(self, y: Tensor) -> Tensor:
        """A target as the vector that a later step reads: `[…, size]`."""

    @abstractmethod
    def soft(self, o: Tensor) -> Tensor:
        """The model's own output in that form, ŷ, with its gradient."""

    @abstractmethod
    def greedy(self, o: Tensor) -> Tensor:
        """The most likely target in that form."""

    @abstractmethod
    def sample(self, o: Tensor, generator: torch.Generator | None) -> Tensor:
        """A target drawn from the model's distribution, in that form."""

    @abstractmethod
    def losses(self, o: Tensor, y: Tensor) -> Tensor:
        """L for every target: `o […, size]` against `y`, shape `[…]`."""


@dataclass(frozen=True)
class Classes(Outputs):
    """One of `size` classes: `ŷ = softmax(o)`, `L = -log ŷ_y`. Targets are whole numbers from 0 to size - 1.

    >>> Classes(3).encode(torch.tensor([2, 0])).tolist()
    [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """

    size: int

    def __post_init__(self) -> None:
        whole_number("Classes", "size", self.size)

    def encode(self, y: Tensor) -> Tensor:
        self.check(y)
        return F.one_hot(y.long(), self.size).to(torch.get_default_dtype())

    def soft(self, o: Tensor) -> Tensor:
        return o.softmax(-1)

    def greedy(self, o: Tensor) -> Tensor:
        return F.one_hot(o.argmax(-1), self.size).to(o.dtype)

    def sample(self, o: Tensor, generator: torch.Generator | None) -> Tensor:
        check_drawable(o)
        return self.greedy(o.detach() + gumbel(o.shape, generator, o)).to(o.dtype)

    def losses(self, o: Tensor, y: Tensor) -> Tensor:
        self.check(y)
        if y.shape != o.shape[:-1]:
            raise ValueError(
                f"y has shape {tuple(y.shape)}; o is {tuple(o.shape)}, so y must be {tuple(o.shape[:-1])}."
            )
        return F.cross_entropy(o.flatten(0, -2), y.flatten().long(), reduction="none").view(y.shape)

    def check(self, y: Tensor) -> None:
        if y.is_floating_point() or y.is_complex():
            raise TypeError(f"targets of Classes({self.size}) are whole numbers; got {y.dtype}. Type y.long().")
        if y.numel() and y.device.type == "cpu" and not 0 <= int(y.min()) <= int(y.max()) < self.size:
            raise ValueError(
                f"targets run from {int(y.min())} to {int(y.max())}; Classes({self.size}) needs 0 to {self.size - 1}."
            )


@dataclass(frozen=True)
class Reals(Outputs):
    """A real vector of `size` numbers: `ŷ = o`, `L = ‖o - y‖²`.

    >>> Reals(2).losses(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 5.0]])).tolist()
    [9.0]
    """

    size: int

    def __post_init__(self) -> None:
        whole_number("Reals", "size", self.size)

    def encode(self, y: Tensor) -> Tensor:
        if not isinstance(y, Tensor):
            raise TypeError(f"targets must be a tensor; got a {type(y).__name__}. Type torch.as_tensor(y).")
        if y.is_floating_point() and bool(y.isnan().any()):
            raise ValueError("the targets that are fed back hold NaN; padding must hold numbers here, such as 0.")
        if not y.is_floating_point() or y.dim() < 1 or y.shape[-1] != self.size:
            raise ValueError(f"targets of Reals({self.size}) are […, {self.size}]; got {tuple(y.shape)} of {y.dtype}.")
        return y

    def soft(self, o: Tensor) -> Tensor:
        return o

    def greedy(self, o: Tensor) -> Tensor:
        return o.detach()

    def sample(self, o: Tensor, generator: torch.Generator | None) -> Tensor:
        raise ValueError("Reals predicts a vector, not a distribution to draw from: use pick=Soft() or Greedy().")

    def losses(self, o: Tensor, y: Tensor) -> Tensor:
        if y.shape != o.shape:
            raise ValueError(f"y has shape {tuple(y.shape)}; Reals({self.size}) needs that of o, {tuple(o.shape)}.")
        return (o - y).square().sum(-1)


def as_outputs(outputs: Outputs | int) -> Outputs:
    """A number means that many classes."""
    return outputs if isinstance(outputs, Outputs) else Classes(outputs)


# ------------------------------------------------------------------ random numbers


def uniform(shape: Sequence[int], generator: torch.Generator | None, like: Tensor) -> Tensor:
    """Numbers from 0 up to 1 in single precision, one after the other from `generator` or torch's own.

    On a CPU they are the same in many pieces as in one. They go to the device of `like`.
    """
    device = like.device if generator is None else generator.device
    return torch.rand(tuple(shape), generator=generator, device=device, dtype=torch.float32).to(like.device)


def gumbel(shape: Sequence[int], generator: torch.Generator | None, like: Tensor) -> Tensor:
    """Numbers -log(-log(u)): the place of the largest of `o + gumbel` is a draw from softmax(o) (Gumbel, 1954).

    They are in single precision at least: sums in half precision are equal so often that the first class would win.
    """
    noise = -torch.log(-torch.log(uniform(shape, generator, like)))
    return noise.to(torch.promote_types(like.dtype, torch.float32))


def check_drawable(o: Tensor) -> None:
    """Raise an error if the outputs hold what is no number."""
    if o.isnan().any() or o.isposinf().any():
        raise FloatingPointError("an output is not a finite number, so nothing can be drawn from it.")
