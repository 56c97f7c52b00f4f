"""What an output means, and what goes back in at the next step: the truth, the model's own outputs, or a mixture."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from loopfold.errors import Argument, OptionError
from loopfold.states import whole_number

# ------------------------------------------------------------------ what an output means


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
        self._check(y)
        return F.one_hot(y.long(), self.size).to(torch.get_default_dtype())

    def soft(self, o: Tensor) -> Tensor:
        return o.softmax(-1)

    def greedy(self, o: Tensor) -> Tensor:
        return F.one_hot(o.argmax(-1), self.size).to(o.dtype)

    def sample(self, o: Tensor, generator: torch.Generator | None) -> Tensor:
        probabilities = o.detach().softmax(-1).flatten(0, -2)
        drawn = torch.multinomial(probabilities, 1, generator=generator)
        return F.one_hot(drawn.view(o.shape[:-1]), self.size).to(o.dtype)

    def losses(self, o: Tensor, y: Tensor) -> Tensor:
        self._check(y)
        if y.shape != o.shape[:-1]:
            raise ValueError(
                f"y has shape {tuple(y.shape)}; o is {tuple(o.shape)}, so y must be {tuple(o.shape[:-1])}."
            )
        return F.cross_entropy(o.flatten(0, -2), y.flatten().long(), reduction="none").view(y.shape)

    def _check(self, y: Tensor) -> None:
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


# ------------------------------------------------------------------ how an output becomes an input


class Pick(ABC):
    """How the model's own output `o(t)` becomes the vector that step t+1 reads."""

    flows: ClassVar[bool] = True  # whether gradients come back through it

    @abstractmethod
    def __call__(self, o: Tensor, outputs: Outputs) -> Tensor: ...


@dataclass(frozen=True)
class Soft(Pick):
    """ŷ itself; gradients flow back through it."""

    def __call__(self, o: Tensor, outputs: Outputs) -> Tensor:
        return outputs.soft(o)


@dataclass(frozen=True)
class Raw(Pick):
    """o itself, before the softmax, as the book's Fig. 10.4 has it; gradients flow back through it."""

    def __call__(self, o: Tensor, outputs: Outputs) -> Tensor:
        return o


@dataclass(frozen=True)
class Greedy(Pick):
    """The most likely class, as a one-hot vector; no gradient."""

    flows = False

    def __call__(self, o: Tensor, outputs: Outputs) -> Tensor:
        return outputs.greedy(o)


@dataclass(frozen=True)
class Sample(Pick):
    """A draw from the model's distribution, as a one-hot vector; no gradient.

    `temperature`  below 1 sharpens the distribution, above 1 flattens it
    `top_k`        only the k likeliest classes can be drawn
    `top_p`        only the likeliest ones that together reach this probability (Holtzman et al., 2020)
    """

    flows = False

    generator: torch.Generator | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise TypeError(f"generator is a torch.Generator; got {self.generator!r}. Type Sample(temperature=...).")
        if not 1e-6 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be above 0; got {self.temperature}. For the likeliest, type Greedy().")
        if self.top_k is not None:
            whole_number("Sample", "top_k", self.top_k)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise OptionError(Argument("top_p"), f" is a probability above 0 and up to 1; got {self.top_p}.")

    def __call__(self, o: Tensor, outputs: Outputs) -> Tensor:
        return outputs.sample(self.narrowed(o), self.generator)

    def narrowed(self, o: Tensor) -> Tensor:
        """`o` at this temperature, with -∞ for the classes that cannot be drawn.

        >>> o = torch.tensor([[0.5, 0.3, 0.2]]).log()
        >>> Sample(top_p=0.6).narrowed(o).softmax(-1)
        tensor([[0.6250, 0.3750, 0.0000]])
        """
        o = o / self.temperature
        if self.top_k is not None and self.top_k < o.shape[-1]:
            least = o.topk(self.top_k, -1).values[..., -1:]
            o = o.masked_fill(o < least, -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            likeliest, order = o.softmax(-1).sort(-1, descending=True)
            before = likeliest.cumsum(-1) - likeliest  # what the likelier ones have together
            o = o.masked_fill((before >= self.top_p).gather(-1, order.argsort(-1)), -torch.inf)
        return o


# ------------------------------------------------------------------ feeding


class Feeding(ABC):
    """What step t+1 reads as "the output of step t".

    `known` and `next` are what runs. The attributes say what `next` reads, for those who draw it; with `reads_truth`,
    a pattern refuses to run without targets, so `y` is never None.
    """

    reads_truth: ClassVar[bool] = True  # the target y(t)
    reads_own: ClassVar[bool] = True  # the model's own output o(t)
    pick: Pick | None = None  # the form in which o(t) is read, where that is a choice

    @property
    def flows(self) -> bool:
        """Whether gradients come back to o(t)."""
        return self.reads_own and (self.pick is None or self.pick.flows)

    @abstractmethod
    def known(self, y: Any, outputs: Outputs) -> Tensor | None:
        """Every vector fed back, y(1…τ) as `[τ, batch, size]`, where none needs the model's outputs; else None."""

    @abstractmethod
    def next(self, o: Tensor, y: Any, outputs: Outputs) -> Tensor:
        """The vector fed back after one step, from its output `o [batch, size]` and its target `y`."""


def checked_feeding(feeding: Feeding) -> Feeding:
    """`feeding`, if it is one."""
    if not isinstance(feeding, Feeding):
        raise TypeError(f"feeding must be an object such as lf.TeacherForcing(); got {feeding!r}.")
    return feeding


@dataclass(frozen=True)
class TeacherForcing(Feeding):
    """The true y(t). All inputs are known beforehand, so nothing has to wait for the model's outputs (M20)."""

    reads_own = False

    def known(self, y: Tensor, outputs: Outputs) -> Tensor:
        return outputs.encode(y)

    def next(self, o: Tensor, y: Tensor, outputs: Outputs) -> Tensor:
        return outputs.encode(y).to(o.dtype)


@dataclass(frozen=True)
class FreeRunning(Feeding):
    """The model's own output, as in use (M21); `pick` says in which form."""

    reads_truth = False

    pick: Pick = Soft()

    def known(self, y: Tensor | None, outputs: Outputs) -> None:
        return None

    def next(self, o: Tensor, y: Tensor | None, outputs: Outputs) -> Tensor:
        return self.pick(o, outputs)


class Coin(Enum):
    """How often `ScheduledSampling` chooses: once a step for the whole batch, or for every sequence by itself."""

    STEP = "step"
    ELEMENT = "element"


@dataclass(frozen=True)
class Ramp:
    """A probability that goes in a straight line from `start` to `end` over a number of iterations, then stays.

    >>> [Ramp(0.0, 0.5, over=10)(i) for i in (0, 5, 100)]
    [0.0, 0.25, 0.5]
    """

    start: float
    end: float
    over: int

    def __post_init__(self) -> None:
        whole_number("Ramp", "over", self.over)

    def __call__(self, iteration: int) -> float:
        return self.start + (self.end - self.start) * min(iteration / self.over, 1.0)


@dataclass(frozen=True)
class ScheduledSampling(Feeding):
    """With probability `p` the model's own output, else the truth (Bengio et al., 2015).

    `p` is a number, or a schedule `iteration -> number`, such as `Ramp`; `feeding.at(iteration)` moves along it.

    >>> feeding = ScheduledSampling(Ramp(0.0, 0.5, over=1000))
    >>> feeding.at(500).probability
    0.25
    """

    p: float | Callable[[int], float]
    pick: Pick = Soft()
    coin: Coin = Coin.ELEMENT
    generator: torch.Generator | None = None
    iteration: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "coin", Coin(self.coin))  # its value will do: "step"
        if not 0 <= self.probability <= 1:
            raise ValueError(f"ScheduledSampling needs a probability from 0 to 1; got {self.probability}.")

    @property
    def probability(self) -> float:
        return self.p(self.iteration) if callable(self.p) else self.p

    def at(self, iteration: int) -> "ScheduledSampling":
        """The same feeding at a later point of its schedule."""
        return replace(self, iteration=iteration)

    def known(self, y: Tensor | None, outputs: Outputs) -> None:
        return None

    def next(self, o: Tensor, y: Tensor, outputs: Outputs) -> Tensor:
        truth = outputs.encode(y).to(o.dtype)
        coins = (1 if self.coin is Coin.STEP else o.shape[0], 1)
        device = o.device if self.generator is None else self.generator.device
        own = torch.rand(coins, generator=self.generator, device=device).to(o.device) < self.probability
        return torch.where(own, self.pick(o, outputs), truth)


@dataclass(frozen=True)
class GeneralisedTeacherForcing(Feeding):
    """`(1 - α) ŷ(t) + α y(t)`, the model's own output pulled towards the truth (Hess et al., 2023).

    Gradients go back through ŷ, and each step takes 1 - α of them: `alpha` keeps them from exploding where the truth
    is chaotic. 0 is `FreeRunning`, 1 has the values of `TeacherForcing`; `pick` is the form of ŷ.

    >>> feeding = GeneralisedTeacherForcing(0.25)
    >>> feeding.next(torch.tensor([[4.0]]), torch.tensor([[8.0]]), Reals(1)).tolist()
    [[5.0]]
    """

    alpha: float
    pick: Pick = Soft()

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"GeneralisedTeacherForcing needs an alpha from 0 to 1; got {self.alpha}.")

    def known(self, y: Tensor | None, outputs: Outputs) -> None:
        return None

    def next(self, o: Tensor, y: Tensor, outputs: Outputs) -> Tensor:
        truth = outputs.encode(y).to(o.dtype)
        return (1 - self.alpha) * self.pick(o, outputs) + self.alpha * truth


# ------------------------------------------------------------------ random numbers


@contextmanager
def as_if_undrawn(*given: Any) -> Iterator[None]:
    """Afterwards, the generators among `given`, and those that its feedings and picks hold, are as they were before."""
    states = [(generator, generator.get_state()) for generator in _generators(given)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def _generators(given: Any) -> list[torch.Generator]:
    if isinstance(given, torch.Generator):
        return [given]
    if isinstance(given, Feeding | Pick):
        given = {**vars(type(given)), **vars(given)}.values()  # it may hold another feeding or pick
    elif not isinstance(given, tuple):
        return []
    return [generator for part in given for generator in _generators(part)]
