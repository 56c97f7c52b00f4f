"""Transitions as users write them: the known ones of the field, and some of odd structure."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import loopfold as lf


def _matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5)


class PeepholeLSTM(lf.Transition):
    """Gers and Schmidhuber (2000): the gates also see the cell."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.U, self.W, self.b = _matrix(4 * n, n_in), _matrix(4 * n, n), _matrix(4 * n)
        self.p_i, self.p_f, self.p_o = _matrix(n), _matrix(n), _matrix(n)

    def forward(self, state: lf.LSTMState, x: Tensor) -> lf.LSTMState:
        h, c = state
        i, f, g, o = (x @ self.U.T + h @ self.W.T + self.b).chunk(4, -1)
        new_c = torch.sigmoid(f + self.p_f * c) * c + torch.sigmoid(i + self.p_i * c) * torch.tanh(g)
        return lf.LSTMState(torch.sigmoid(o + self.p_o * new_c) * torch.tanh(new_c), new_c)


class MinimalGatedUnit(lf.Transition):
    """Zhou et al. (2016): one gate, and a product of the gated state in series with its own."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.gate, self.candidate = nn.Linear(n_in + n, n), nn.Linear(n_in + n, n)

    def initial_state(self, batch: int) -> Tensor:
        return self.gate.weight.new_zeros(batch, self.gate.out_features)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        f = torch.sigmoid(self.gate(torch.cat([h, x], -1)))
        n = torch.tanh(self.candidate(torch.cat([f * h, x], -1)))
        return (1 - f) * h + f * n


class MultiplicativeIntegration(lf.Transition):
    """Wu et al. (2016): the two products are multiplied."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.U, self.W = _matrix(n, n_in), _matrix(n, n)
        self.alpha, self.beta, self.gamma, self.b = _matrix(n), _matrix(n), _matrix(n), _matrix(n)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        u, w = x @ self.U.T, h @ self.W.T
        return torch.tanh(self.alpha * u * w + self.beta * u + self.gamma * w + self.b)


class DeepTransition(lf.Transition):
    """Two products in series within a step."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.U, self.W1, self.W2 = _matrix(2 * n, n_in), _matrix(2 * n, n), _matrix(n, 2 * n)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(torch.relu(x @ self.U.T + h @ self.W1.T) @ self.W2.T + 0.5 * h)


class OutputState(NamedTuple):
    y: Tensor
    h: Tensor  # no step reads it: an output


class OutputFed(lf.Transition):
    """The only way to the future is the output y; the hidden layer is there to be looked at."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.U, self.W, self.V = _matrix(n, n_in), _matrix(n, 2), _matrix(2, n)

    def initial_state(self, batch: int) -> OutputState:
        return OutputState(self.W.new_zeros(batch, 2), self.W.new_zeros(batch, self.W.shape[0]))

    def forward(self, state: OutputState, x: Tensor) -> OutputState:
        h = torch.tanh(state.y @ self.W.T + x @ self.U.T)
        return OutputState(torch.softmax(h @ self.V.T, -1), h)


class Autonomous(lf.Transition):
    """A dynamical system without input: a damped rotation that bends."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.W = _matrix(n, n)

    def forward(self, s: Tensor) -> Tensor:
        return s + 0.1 * torch.sin(s @ self.W.T) - 0.05 * s**3


class Clockwork(lf.Transition):
    """Half of the units are slow; the mask is a buffer, the speeds a function of parameters alone."""

    mask: Tensor

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.U, self.W, self.rate = _matrix(n, n_in), _matrix(n, n), _matrix(n)
        self.register_buffer("mask", torch.triu(torch.ones(n, n)))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        rate = torch.sigmoid(self.rate)
        new = F.silu(h @ (self.W * self.mask).T + F.elu(x @ self.U.T))
        return torch.lerp(h, new, rate)


class Slots(lf.Transition):
    """Attends to four slots of memory with a query; reductions over features, cut and joined rows."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.Q, self.K = _matrix(4, n_in + n), _matrix(4, n)
        self.norm = nn.LayerNorm(n)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor]:
        return self.K.new_full((batch, self.K.shape[1]), 0.1), self.K.new_zeros(batch, 4)

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        h, counts = state
        weights = torch.softmax(torch.cat([x, h], -1) @ self.Q.T - 0.1 * counts, -1)
        read = weights @ self.K
        first, rest = read[:, :1], read[:, 1:]
        mixed = torch.cat([rest, first], -1) + self.scale * h
        length = mixed.square().sum(-1, keepdim=True).add(1e-3).sqrt()
        return self.norm(read) + mixed / (1 + length), torch.clamp(counts + weights, max=3.0)


class Delay(lf.Transition):
    """Remembers the input itself for a step, and sums up what it has seen."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.U, self.W = _matrix(n, n_in), _matrix(n, n)

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        n, n_in = self.U.shape
        return self.U.new_zeros(batch, n), self.U.new_zeros(batch, n_in), self.U.new_zeros(batch, n)

    def forward(self, state: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor, ...]:
        h, previous, total = state
        h = torch.tanh(h @ self.W.T + (x - previous) @ self.U.T)
        return h, x, total + torch.where(h > 0, h, 0.1 * h.abs())


class Extremes(lf.Transition):
    """Greatest and least, branches by value written with torch.where, numbers that broadcast."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.U, self.W = _matrix(n, n_in), _matrix(n, n)
        self.bound = nn.Parameter(torch.tensor([0.8]))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        a = h @ self.W.T + x @ self.U.T
        peak = torch.maximum(a, 0.5 * h) - a.amax(-1, keepdim=True)
        low = torch.minimum(peak, F.softplus(h.detach()))
        return F.hardtanh(torch.where((low > -1) & (h <= 1), low, -torch.log1p(h.abs())) * self.bound, -2.0, 2.0)


class Sliced(lf.Transition):
    """Gates of unequal width cut out of one product; a part of the state is copied as it is."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.layer = nn.Linear(n_in + n, n + 2)
        self.n = n

    def initial_state(self, batch: int) -> Tensor:
        return self.layer.weight.new_zeros(batch, self.n)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        a = self.layer(torch.cat([h, x], -1))
        gate, shift, body = a.split([1, 1, self.n], -1)
        moved = torch.cat([h[:, 1:], body[:, :1] * shift], -1)
        return torch.sigmoid(gate) * torch.tanh(body) + 0.3 * moved


def irnn(n_in: int, n: int) -> lf.Elman:
    return lf.Elman(n_in, n, torch.relu, recurrent_init=lf.ScaledIdentity(1.0))


def relu_elman(n_in: int, n: int) -> lf.Elman:
    return lf.Elman(n_in, n, torch.relu, recurrent_init=lf.Orthogonal(0.9))


WITH_INPUT = (
    *(lf.Elman, relu_elman, lf.LSTM, lf.GRU, lf.MGU, lf.LayerNormLSTM, PeepholeLSTM, MinimalGatedUnit),
    *(MultiplicativeIntegration, DeepTransition, irnn, OutputFed, Clockwork, Slots, Delay, Extremes, Sliced),
)


class Awkward(lf.Transition):
    """A step given as a function of two states (h, c), with parameters and buffers of every kind."""

    mask: Tensor
    three: Tensor
    fine: Tensor

    def __init__(self, step: Callable[..., tuple[Tensor, Tensor]], n: int) -> None:
        super().__init__()
        self.step, self.n = step, n
        self.W, self.A, self.B, self.wide = _matrix(n, n), _matrix(n, n), _matrix(2 * n, n), _matrix(n, 2 * n)
        self.one, self.biased = nn.Parameter(torch.tensor([0.7])), _matrix(n + 1, n)
        self.register_buffer("mask", torch.arange(n) % 2 == 0)
        self.register_buffer("three", torch.tensor(3))
        self.register_buffer("fine", torch.tensor(0.1, dtype=torch.float64))

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor]:
        return self.W.new_zeros(batch, self.n), self.W.new_zeros(batch, self.n)

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        return self.step(self, *state, x)


def _one(step: Callable[[Any, Tensor, Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda f, h, c, x: (torch.tanh(step(f, h, x)), c + 0.1 * h)


AWKWARD: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "a delay line": lambda f, h, c, x: (torch.cat([h[:, 1:], x[:, :1]], -1), c),
    "parts without features": _one(lambda f, h, x: torch.cat(h.split([0, f.n], -1), -1) @ f.W + x),
    "a column as a row": _one(lambda f, h, x: h * f.A[:, 0] + x),
    "an expanded number": _one(lambda f, h, x: h * f.one.expand(f.n) + x),
    "a condition on x as a number": _one(lambda f, h, x: h * (x > 0) + x @ f.W),
    "a condition on h as a number": _one(lambda f, h, x: h * (h > 0) + x * (h > 0).to(h.dtype)),
    "a mask": _one(lambda f, h, x: (h * f.mask) @ f.W + x),
    "a whole number": _one(lambda f, h, x: h * f.three + x),
    "a number of another precision": _one(lambda f, h, x: h + f.fine * (h @ f.W) + x),
    "a comparison of products": _one(lambda f, h, x: torch.where(h @ f.A > h @ f.W, h + x, x)),
    "conditions on x, h and a buffer": _one(lambda f, h, x: torch.where((x > 0) & f.mask | (h > 0.1), h @ f.W, x)),
    "products of parts of a product": _one(
        lambda f, h, x: (h @ f.wide)[:, : f.n] @ f.W + (h @ f.wide)[:, f.n :] @ f.A + x
    ),
    "a column of ones": _one(lambda f, h, x: torch.cat([h, h.new_ones(len(h), 1)], -1) @ f.biased + x),
    "one matrix, two orders": lambda f, h, c, x: (
        torch.tanh(torch.cat([h, c], -1) @ f.B + torch.cat([c, h], -1) @ f.B + x),
        torch.tanh(c + h),
    ),
    "a rotated row": _one(lambda f, h, x: torch.cat([h[:, 2:], h[:, :2]], -1) @ f.W + h @ f.W + x),
    "a slice from before the start": _one(lambda f, h, x: torch.cat([h[:, -10:2], h[:, 2:]], -1) @ f.W + x),
    "nothing carried": lambda f, h, c, x: (torch.tanh(x @ f.W), x * 2),
    "a number beside a product": _one(lambda f, h, x: h @ f.W + 0.5 + 0 * x),
    "infinity": _one(lambda f, h, x: torch.minimum(h @ f.W + x, torch.full_like(h, torch.inf))),
    "the norm of zero": _one(lambda f, h, x: (h @ f.W) / (1 + (h @ f.W).norm(dim=-1, keepdim=True)) + x),
    "an exponential that overflows": _one(lambda f, h, x: F.elu(h @ f.W + 100 * x) * 0.01),
    "a logarithm after the loop": lambda f, h, c, x: (
        (q := torch.softmax(h @ f.W + x, -1)),
        torch.log(q) @ f.A,
    ),
    "states that change places": lambda f, h, c, x: (torch.tanh(c + x), torch.tanh(h @ f.W)),
    "the same state twice": lambda f, h, c, x: ((new := torch.tanh(h @ f.W + c + x)), new),
    "a part of x in a product": _one(lambda f, h, x: torch.cat([x[:, :1], h[:, 1:]], -1) @ f.W + h),
    "W and its transpose": _one(lambda f, h, x: (h @ f.W) @ f.W.T + x @ f.W),
}
