"""What goes back in at the next step: the truth, the model's own outputs, or a mixture.

What a mixture reads besides the output is drawn and encoded beforehand, for all steps, so that what is left is a
function of tensors: a part of the step, which engines compile (see `feedback`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from loopfold.errors import Argument, OptionError, Spelt
from loopfold.outputs import Classes, Outputs, gumbel, uniform
from loopfold.states import State, map_state, whole_number

# ------------------------------------------------------------------ how an output becomes an input


class Pick(ABC):
    """How the model's own output `o(t)` becomes the vector that step t+1 reads."""

    flows: ClassVar[bool] = True  # whether gradients come back through it

    @abstractmethod
    def __call__(self, o: Tensor, outputs: Outputs) -> Tensor: ...


def checked_pick(pick: Pick) -> Pick:
    """`pick`, if it is one."""
    if not isinstance(pick, Pick):
        raise TypeError(f"pick must be an object such as lf.Soft() or lf.Greedy(); got {pick!r}.")
    return pick


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
            likeliest = Spelt("type Greedy().", ("type ", Argument("greedy", True), "."))
            wrong = f" must be a finite number of at least 1e-6; got {self.temperature}. For the likeliest, "
            raise OptionError(Argument("temperature"), wrong, likeliest)
        if self.top_k is not None:
            whole_number("Sample", "top_k", self.top_k)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise OptionError(Argument("top_p"), f" is a probability above 0 and up to 1; got {self.top_p}.")

    def __call__(self, o: Tensor, outputs: Outputs) -> Tensor:
        return outputs.sample(self.narrowed(o), self.generator)

    def narrowed(self, o: Tensor, temperature: Tensor | None = None) -> Tensor:
        """`o` at this temperature, or at that given, with -∞ for the classes that cannot be drawn.

        >>> o = torch.tensor([[0.5, 0.3, 0.2]]).log()
        >>> Sample(top_p=0.6).narrowed(o).softmax(-1)
        tensor([[0.6250, 0.3750, 0.0000]])
        """
        o = o / (self.temperature if temperature is None else temperature)
        if self.top_k is not None and self.top_k < o.shape[-1]:
            o = o.masked_fill(self._beyond_k(o, self.top_k), -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            o = o.masked_fill(self._beyond_p(o, self.top_p), -torch.inf)
        return o

    def _beyond_k(self, o: Tensor, k: int) -> Tensor:
        """Where k others or more are likelier."""
        if o.shape[-1] <= FEW:  # each against each, which a compiled loop can do; there is no sorting in one
            return (o[..., None, :] > o[..., :, None]).to(o.dtype).sum(-1) >= k
        return o < o.topk(k, -1).values[..., -1:]

    def _beyond_p(self, o: Tensor, p: float) -> Tensor:
        """Where the likelier ones have `p` or more together; of equally likely ones the first counts as likelier."""
        shares = o.softmax(-1)
        if o.shape[-1] <= FEW:
            mine, other = shares[..., :, None], shares[..., None, :]
            earlier = torch.ones(o.shape[-1], o.shape[-1], dtype=torch.bool, device=o.device).tril(-1)
            before = torch.where((other > mine) | ((other == mine) & earlier), other, 0.0).sum(-1)
            return before >= p
        likeliest, order = shares.sort(dim=-1, descending=True, stable=True)
        return (likeliest.cumsum(-1) - likeliest >= p).gather(-1, order.argsort(-1))


FEW = 256  # classes


def draws_by_noise(pick: Pick | None, outputs: Outputs) -> bool:
    """Whether a draw is the place of the largest of an output and as many random numbers, drawn beforehand."""
    return type(pick) is Sample and type(outputs).sample is Classes.sample


def noise_of(pick: Pick | None, outputs: Outputs, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
    """The random numbers of so many picks, `[*shape, size]`; None for a pick that takes none beforehand."""
    if not isinstance(pick, Sample) or not draws_by_noise(pick, outputs):
        return None
    return gumbel((*shape, outputs.size), pick.generator, like)


def scores(pick: Pick, o: Tensor, outputs: Outputs, noise: Tensor | None, temperature: Tensor | None = None) -> Tensor:
    """What is largest at the class that `pick` picks, at its own temperature or that given."""
    if isinstance(pick, Sample) and noise is not None:
        o = o.detach()
        if o.dtype.itemsize < noise.dtype.itemsize:  # sums in half precision are equal too often
            o = o.to(noise.dtype)
        return pick.narrowed(o, temperature) + noise
    return o.detach() if type(pick) is Greedy and type(outputs) is Classes else pick(o, outputs)


def undrawn(pick: Pick, outputs: Outputs) -> Pick:
    """The pick without its source of random numbers, where these are drawn beforehand."""
    return replace(pick, generator=None) if isinstance(pick, Sample) and draws_by_noise(pick, outputs) else pick


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


class Beside(NamedTuple):
    """What a mixture reads beside o(t), at one step or at all of them; what it does not read is ()."""

    truth: State = ()  # y(t) as the vector that a later step reads
    own: State = ()  # where the model's own output is read
    noise: State = ()  # the random numbers of a pick
    temperature: State = ()  # at which it draws
    alpha: State = ()  # how much of the truth there is in it


class Mixed(Feeding):
    """A feeding that is a function of o(t) and of what can be drawn and encoded beforehand.

    A subclass that writes a `next` of its own is asked for that, one step after the other.
    """

    def known(self, y: Tensor | None, outputs: Outputs) -> None:
        return None

    @abstractmethod
    def beside(self, y: Tensor | None, shape: tuple[int, int], outputs: Outputs, like: Tensor) -> Beside:
        """What `mixed` reads at all steps, `[τ, batch, …]`, for targets `y` and a `shape` of (τ, batch)."""

    @abstractmethod
    def mixed(self, o: Tensor, beside: Beside, outputs: Outputs) -> Tensor:
        """The vector fed back after one step, with no randomness of its own."""

    @abstractmethod
    def undrawn(self, outputs: Outputs) -> "Mixed":
        """What `mixed` depends on, and no more: without what `beside` says."""

    def next(self, o: Tensor, y: Any, outputs: Outputs) -> Tensor:
        beside = self.beside(None if y is None else y[None], (1, len(o)), outputs, o)
        return self.mixed(o, map_state(lambda leaf: leaf[0], beside), outputs)


def is_mixed(feeding: Feeding) -> bool:
    """Whether what is fed back is what `mixed` says."""
    return isinstance(feeding, Mixed) and type(feeding).next is Mixed.next


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
class FreeRunning(Mixed):
    """The model's own output, as in use (M21); `pick` says in which form."""

    reads_truth = False

    pick: Pick = Soft()

    def __post_init__(self) -> None:
        checked_pick(self.pick)

    def beside(self, y: Tensor | None, shape: tuple[int, int], outputs: Outputs, like: Tensor) -> Beside:
        return _drawn(self.pick, outputs, shape, like)

    def mixed(self, o: Tensor, beside: Beside, outputs: Outputs) -> Tensor:
        return _picked(self.pick, o, outputs, beside)

    def undrawn(self, outputs: Outputs) -> Mixed:
        return replace(self, pick=_at_any_temperature(undrawn(self.pick, outputs), outputs))


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
class ScheduledSampling(Mixed):
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
        checked_pick(self.pick)
        object.__setattr__(self, "coin", Coin(self.coin))  # its value will do: "step"
        if not 0 <= self.probability <= 1:
            raise ValueError(f"ScheduledSampling needs a probability from 0 to 1; got {self.probability}.")

    @property
    def probability(self) -> float:
        return self.p(self.iteration) if callable(self.p) else self.p

    def at(self, iteration: int) -> "ScheduledSampling":
        """The same feeding at a later point of its schedule."""
        return replace(self, iteration=iteration)

    def beside(self, y: Tensor | None, shape: tuple[int, int], outputs: Outputs, like: Tensor) -> Beside:
        steps, batch = shape
        coins = uniform((steps, 1 if self.coin is Coin.STEP else batch, 1), self.generator, like)
        own = (coins < self.probability).expand(steps, batch, 1)
        return _drawn(self.pick, outputs, shape, like)._replace(truth=_truth(y, outputs, like), own=own)

    def mixed(self, o: Tensor, beside: Beside, outputs: Outputs) -> Tensor:
        return torch.where(beside.own, _picked(self.pick, o, outputs, beside), beside.truth)

    def undrawn(self, outputs: Outputs) -> Mixed:
        pick = _at_any_temperature(undrawn(self.pick, outputs), outputs)
        return replace(self, p=0.0, generator=None, iteration=0, pick=pick)


@dataclass(frozen=True)
class GeneralisedTeacherForcing(Mixed):
    """`(1 - α) ŷ(t) + α y(t)`, the model's own output pulled towards the truth (Hess et al., 2023).

    Gradients go back through ŷ, and each step takes 1 - α of them: `alpha` keeps them from exploding where the truth
    is chaotic. 0 is `FreeRunning`, 1 has the values of `TeacherForcing`; `pick` is the form of ŷ.

    >>> from loopfold import Reals
    >>> feeding = GeneralisedTeacherForcing(0.25)
    >>> feeding.next(torch.tensor([[4.0]]), torch.tensor([[8.0]]), Reals(1)).tolist()
    [[5.0]]
    """

    alpha: float
    pick: Pick = Soft()

    def __post_init__(self) -> None:
        checked_pick(self.pick)
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"GeneralisedTeacherForcing needs an alpha from 0 to 1; got {self.alpha}.")

    def beside(self, y: Tensor | None, shape: tuple[int, int], outputs: Outputs, like: Tensor) -> Beside:
        drawn = _drawn(self.pick, outputs, shape, like)
        return drawn._replace(truth=_truth(y, outputs, like), alpha=_everywhere(self.alpha, shape, like))

    def mixed(self, o: Tensor, beside: Beside, outputs: Outputs) -> Tensor:
        own = _picked(self.pick, o, outputs, beside)
        mixed = (1 - beside.alpha) * own + beside.alpha * beside.truth
        return mixed.to(own.dtype) if own.dtype == beside.truth.dtype else mixed

    def undrawn(self, outputs: Outputs) -> Mixed:
        return replace(self, alpha=0.0, pick=_at_any_temperature(undrawn(self.pick, outputs), outputs))


def _truth(y: Tensor | None, outputs: Outputs, like: Tensor) -> Tensor:
    assert y is not None  # a pattern has checked it
    return outputs.encode(y).to(like.dtype)


def _drawn(pick: Pick, outputs: Outputs, shape: tuple[int, int], like: Tensor) -> Beside:
    """The random numbers of a pick that takes some beforehand, and its temperature, which may change at every run."""
    noise = noise_of(pick, outputs, shape, like)
    if noise is None or not isinstance(pick, Sample):
        return Beside()
    return Beside(noise=noise, temperature=_everywhere(pick.temperature, shape, like))


def _everywhere(number: float, shape: tuple[int, int], like: Tensor) -> Tensor:
    """A number as an input of every step, so that the compiled step is the same for all numbers."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.full((1, 1, 1), number, dtype=dtype, device=like.device).expand(*shape, 1)


def _at_any_temperature(pick: Pick, outputs: Outputs) -> Pick:
    return replace(pick, temperature=1.0) if isinstance(pick, Sample) and draws_by_noise(pick, outputs) else pick


def _picked(pick: Pick, o: Tensor, outputs: Outputs, beside: Beside) -> Tensor:
    """The model's own output as the vector that the next step reads."""
    if not isinstance(beside.noise, Tensor):
        return pick(o, outputs)
    return outputs.greedy(scores(pick, o, outputs, beside.noise, beside.temperature)).to(o.dtype)


# ------------------------------------------------------------------ random numbers


@contextmanager
def as_if_undrawn(*given: Any) -> Iterator[None]:
    """Afterwards, the generators among `given`, and those that its feedings and picks hold, are as they were before."""
    states = [(generator, generator.get_state()) for generator in generators_in(given)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def generators_in(given: Any) -> list[torch.Generator]:
    """The generators among what is given, and those that its feedings, picks and outputs hold."""
    if isinstance(given, torch.Generator):
        return [given]
    if isinstance(given, Feeding | Pick | Outputs):
        given = {**vars(type(given)), **vars(given)}.values()  # it may hold another feeding or pick
    elif not isinstance(given, tuple):
        return []
    return [generator for part in given for generator in generators_in(part)]
