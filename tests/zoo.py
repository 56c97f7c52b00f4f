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


class Memory(NamedTuple):
    h: Tensor  # [batch, n]
    S: Tensor  # [batch, heads, d, d]


class MatrixMemory(lf.Transition):
    """What cells with a matrix for a state share: heads that project x, and a memory for each."""

    def __init__(self, n_in: int, n: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.d = heads, max(1, n // heads)
        self.project = nn.Linear(n_in, 3 * heads * self.d)
        self.gates = nn.Linear(n_in, 2 * heads)
        self.out = nn.Linear(heads * self.d, heads * self.d)

    def initial_state(self, batch: int) -> Memory:
        zeros = self.out.weight.new_zeros
        return Memory(zeros(batch, self.heads * self.d), zeros(batch, self.heads, self.d, self.d))

    def heads_of(self, x: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value: [batch, heads, d] each."""
        return self.project(x).view(-1, 3, self.heads, self.d).unbind(1)


class LinearAttention(MatrixMemory):
    """Katharopoulos et al. (2020): S + v kᵀ, read by S q."""

    def forward(self, state: Memory, x: Tensor) -> Memory:
        q, k, v = self.heads_of(x)
        S = state.S + v.unsqueeze(-1) * F.elu(k + 1).unsqueeze(-2)
        o = (S @ q.unsqueeze(-1)).squeeze(-1).flatten(1)
        return Memory(torch.tanh(self.out(o) + 0.1 * state.h), S)


class DeltaNet(MatrixMemory):
    """Schlag et al. (2021): what the key finds is replaced, not added to; written with einsum."""

    def forward(self, state: Memory, x: Tensor) -> Memory:
        q, k, v = self.heads_of(x)
        k = F.normalize(k + state.h.view_as(k), dim=-1)
        beta = torch.sigmoid(self.gates(x)[:, : self.heads, None])
        found = torch.einsum("bhij,bhj->bhi", state.S, k)
        S = state.S + torch.einsum("bhi,bhj->bhij", beta * (v - found), k)
        return Memory(torch.tanh(torch.einsum("bhij,bhj->bhi", S, q).reshape(len(x), -1)), S)


class MatrixLSTMState(NamedTuple):
    h: Tensor
    C: Tensor  # [batch, heads, d, d]
    n: Tensor  # [batch, heads, d]
    m: Tensor  # [batch, heads], the greatest exponent so far


class MatrixLSTM(MatrixMemory):
    """The mLSTM of xLSTM (Beck et al., 2024): exponential gates, kept in range by m."""

    def initial_state(self, batch: int) -> Any:
        h, C = super().initial_state(batch)
        return MatrixLSTMState(h, C, C[..., 0], C[..., 0, 0])

    def forward(self, state: MatrixLSTMState, x: Tensor) -> MatrixLSTMState:
        q, k, v = self.heads_of(x)
        i, f = self.gates(x).chunk(2, -1)
        f = F.logsigmoid(f)
        m = torch.maximum(f + state.m, i)
        old, new = torch.exp(f + state.m - m), torch.exp(i - m)
        C = old[..., None, None] * state.C + new[..., None, None] * torch.einsum("bhi,bhj->bhij", v, k)
        n = old[..., None] * state.n + new[..., None] * k
        scale = torch.maximum((n * q).sum(-1).abs(), torch.exp(-m)).unsqueeze(-1)
        h = torch.matmul(C, q.unsqueeze(-1)).squeeze(-1) / scale
        return MatrixLSTMState(h.flatten(1), C, n, m)


class HeadedLSTM(lf.Transition):
    """The sLSTM of xLSTM: W in blocks, one for each head; exponential input gate, normaliser, stabiliser."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.heads = 3 if n % 3 == 0 else 1
        self.d = n // self.heads
        self.U = nn.Linear(n_in, 4 * n)
        self.W = nn.Parameter(torch.randn(self.heads, self.d, 4 * self.d) / self.d**0.5)
        self.norm = nn.GroupNorm(self.heads, n) if self.d > 1 else nn.Identity()

    def initial_state(self, batch: int) -> tuple[Tensor, ...]:
        zeros = self.W.new_zeros(batch, self.heads, self.d)
        return zeros, zeros, zeros + 1, zeros

    def forward(self, state: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor, ...]:
        h, c, n, m = state
        a = self.U(x).view(-1, self.heads, 4 * self.d) + torch.einsum("bhi,hij->bhj", h, self.W)
        z, i, f, o = a.chunk(4, -1)
        f = F.logsigmoid(f)
        m_new = torch.maximum(f + m, i)
        i, f = torch.exp(i - m_new), torch.exp(f + m - m_new)
        c, n = f * c + i * torch.tanh(z), f * n + i
        h = self.norm((torch.sigmoid(o) * c / n).flatten(1)).view_as(c)
        return h, c, n, m_new


class FastWeights(lf.Transition):
    """Ba et al. (2016): an associative memory of recent states, read several times within a step."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.U, self.W, self.norm = nn.Linear(n_in, n), _matrix(n, n), nn.LayerNorm(n) if n > 1 else nn.Identity()

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor]:
        n = len(self.W)
        return self.W.new_zeros(batch, n), self.W.new_zeros(batch, n, n)

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        h, A = state
        A = 0.9 * A + 0.5 * torch.bmm(h.unsqueeze(2), h.unsqueeze(1))
        given = h @ self.W.T + self.U(x)
        h = torch.tanh(given)
        for _ in range(2):
            h = torch.tanh(self.norm(given + torch.bmm(A, h.unsqueeze(2)).squeeze(2)))
        return h, A


class TuringMemory(lf.Transition):
    """After Graves et al. (2014): places addressed by what they hold, erased and written; a controller beside it."""

    start: Tensor

    def __init__(self, n_in: int, n: int, places: int = 4) -> None:
        super().__init__()
        self.n, self.places = n, places
        self.controller, self.heads = nn.Linear(n_in + 2 * n, n), nn.Linear(n, 3 * n + 1)
        self.register_buffer("start", torch.linspace(-0.5, 0.5, places * n).view(places, n))

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        zeros = self.start.new_zeros
        return zeros(batch, self.n), zeros(batch, self.n), self.start.expand(batch, -1, -1)

    def forward(self, state: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor, ...]:
        h, read, M = state
        h = torch.tanh(self.controller(torch.cat([x, read, h], -1)))
        key, erase, write, sharp = self.heads(h).split([self.n, self.n, self.n, 1], -1)
        alike = torch.einsum("bpn,bn->bp", M, key) / (1e-3 + M.norm(dim=-1) * key.norm(dim=-1, keepdim=True))
        w = torch.softmax(F.softplus(sharp) * alike, -1).unsqueeze(-1)
        M = M * (1 - w * torch.sigmoid(erase).unsqueeze(1)) + w * torch.tanh(write).unsqueeze(1)
        return h, (w * M).sum(1), M


class HiddenMarkov(lf.Transition):
    """The forward algorithm in log space: a matrix of probabilities, logsumexp over where one came from."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.A, self.B = _matrix(n, n), _matrix(n, n_in)

    def initial_state(self, batch: int) -> Tensor:
        return torch.log_softmax(self.A.new_zeros(batch, len(self.A)), -1)

    def forward(self, alpha: Tensor, x: Tensor) -> Tensor:
        moved = alpha.unsqueeze(2) + torch.log_softmax(self.A, -1)  # [batch, from, to]
        return torch.log_softmax(moved.exp().sum(1).log() + x @ self.B.T, -1)


class Rotation(lf.Transition):
    """A unitary cell in real numbers: pairs of units turn by angles that x gives."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.n, self.angle, self.U = n, nn.Linear(n_in, n), _matrix(2 * n, n_in)

    def initial_state(self, batch: int) -> Tensor:
        return self.U.new_full((batch, self.n, 2), 0.1)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        angle = self.angle(x) + z.square().sum(-1)
        re, im = z[..., 0], z[..., 1]
        turned = torch.stack([re * angle.cos() - im * angle.sin(), re * angle.sin() + im * angle.cos()], -1)
        return turned / (1 + turned.norm(dim=-1, keepdim=True)) + (x @ self.U.T).view(-1, self.n, 2).flip(1)


class Covariance(lf.Transition):
    """A filter that keeps a mean and a matrix P: A P Aᵀ + Q, and a gain by the diagonal."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.A, self.U, self.q = _matrix(n, n), _matrix(n, n_in), _matrix(n)

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor]:
        n = len(self.A)
        return self.A.new_zeros(batch, n), torch.eye(n).to(self.A).repeat(batch, 1, 1)

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        mean, P = state
        P = 0.2 * self.A @ P @ self.A.T + torch.diag_embed(self.q.square())
        gain = P / (1 + P.diagonal(dim1=1, dim2=2).unsqueeze(1))
        mean = torch.tanh(mean @ self.A.T)
        mean = mean + (gain @ (x @ self.U.T - mean).unsqueeze(2)).squeeze(2)
        return mean, 0.5 * (P - gain @ P * 0.1 + P.transpose(1, 2))


class Experts(lf.Transition):
    """A mixture of small networks, weighed by a gate: stack, and a product with a matrix for each."""

    def __init__(self, n_in: int, n: int, experts: int = 3) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.Linear(n_in + n, n) for _ in range(experts)])
        self.gate = nn.Linear(n, experts)

    def initial_state(self, batch: int) -> Tensor:
        return self.gate.weight.new_zeros(batch, self.gate.in_features)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        given = torch.cat([h, x], -1)
        answers = torch.stack([torch.tanh(cell(given)) for cell in self.cells], 1)
        weights = torch.softmax(self.gate(h), -1)
        return (weights.unsqueeze(1) @ answers).squeeze(1) * 0.9 + 0.1 * h.roll(1, -1)


class Zoneout(lf.Transition):
    """Krueger et al. (2017): in training some units keep their state, by chance; torch's own cell inside."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(n_in, n)

    def initial_state(self, batch: int) -> Tensor:
        return self.cell.weight_hh.new_zeros(batch, self.cell.hidden_size)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        new = self.cell(x, h)
        return torch.where(torch.rand_like(h) < 0.2, h, new) if self.training else 0.2 * h + 0.8 * new


class Dropped(lf.GRU):
    """Dropout between steps."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__(n_in, n)
        self.drop = nn.Dropout(0.25)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return super().forward(self.drop(h), x)


class Noisy(lf.Transition):
    """A continuous-time network with noise in its currents, by Euler's method, summed up in place."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.U, self.W, self.sigma = _matrix(n, n_in), _matrix(n, n), _matrix(n)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        current = torch.tanh(h) @ self.W.T
        current += x @ self.U.T
        current += self.sigma * torch.randn_like(h)
        return h + 0.1 * (current - h)


class Spike(torch.autograd.Function):
    """1 above the threshold; its slope is taken to be 1 / (1 + |v|)²."""

    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Tensor:
        (v,) = ctx.saved_tensors
        return g[0] / (1 + v.abs()) ** 2


class SpikingState(NamedTuple):
    v: Tensor
    spikes: Tensor


class Spiking(lf.Transition):
    """Leaky neurons that integrate and fire."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.U, self.W = _matrix(n, n_in), _matrix(n, n)
        self.leak = nn.Parameter(torch.rand(n))

    def forward(self, state: SpikingState, x: Tensor) -> SpikingState:
        v = torch.sigmoid(self.leak) * (state.v - state.spikes) + x @ self.U.T + state.spikes @ self.W.T
        return SpikingState(v, Spike.apply(v - 0.5))

    def initial_state(self, batch: int) -> SpikingState:
        zeros = self.W.new_zeros(batch, self.W.shape[0])
        return SpikingState(zeros, zeros)


class Unitary(lf.Transition):
    """Arjovsky et al. (2016) in real numbers: reflections, and a permutation that is a buffer."""

    order: Tensor

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.U, self.v = _matrix(n, n_in), nn.Parameter(0.5 + torch.rand(2, n))
        self.bias = nn.Parameter(torch.randn(n) / 10)
        self.register_buffer("order", torch.randperm(n, generator=torch.Generator().manual_seed(0)))

    def reflect(self, h: Tensor, v: Tensor) -> Tensor:
        return h - 2 * v * (h @ v)[:, None] / (1 + v.square().sum())  # nearly: its gradients do not cancel

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        h = self.reflect(self.reflect(h, self.v[0])[:, self.order], self.v[1]) + x @ self.U.T
        return torch.sign(h) * torch.relu(h.abs() + self.bias)

    def initial_state(self, batch: int) -> Tensor:
        return self.U.new_full((batch, self.U.shape[0]), 0.3)


class ConvLSTM(lf.Transition):
    """Shi et al. (2015): gates by a convolution over what is read and the state, [batch, channels, places]."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.U, self.conv = _matrix(n, n_in), nn.Conv1d(1 + 2, 4 * 2, 3, padding=1)

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor]:
        h = self.U.new_zeros(batch, 2, self.U.shape[0])
        return h, h.clone()

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        h, c = state
        i, f, o, g = self.conv(torch.cat([(x @ self.U.T)[:, None], h], 1)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


def irnn(n_in: int, n: int) -> lf.Elman:
    return lf.Elman(n_in, n, torch.relu, recurrent_init=lf.ScaledIdentity(1.0))


def relu_elman(n_in: int, n: int) -> lf.Elman:
    return lf.Elman(n_in, n, torch.relu, recurrent_init=lf.Orthogonal(0.9))


WITH_INPUT = (
    *(lf.Elman, relu_elman, lf.LSTM, lf.GRU, lf.MGU, lf.LayerNormLSTM, PeepholeLSTM, MinimalGatedUnit),
    *(MultiplicativeIntegration, DeepTransition, irnn, OutputFed, Clockwork, Slots, Delay, Extremes, Sliced),
)
# Their states are more than rows
TENSORS = (
    *(LinearAttention, DeltaNet, MatrixLSTM, HeadedLSTM, FastWeights, TuringMemory, HiddenMarkov, Rotation),
    *(Covariance, Experts, Unitary, ConvLSTM),
)


# Updated in place, drawn by chance, or with a gradient of their own: what runs is not, line by line, what is recorded
REWRITTEN = (Zoneout, Dropped, Noisy, Spiking)


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


def _filled(h: Tensor, x: Tensor) -> Tensor:
    new = torch.empty_like(h)
    new[:, :1] = x[:, :1]
    new[:, 1:] = h[:, :-1]
    return new


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
    "every second feature": _one(lambda f, h, x: h[:, ::2].repeat(1, 2)[:, : f.n] + x),
    "turned round": _one(lambda f, h, x: h.flip(-1) * x + h.roll(1, -1)),
    "turned round, and multiplied": _one(lambda f, h, x: torch.tanh(h.flip(-1)) @ f.W + (h * x).flip(-1) @ f.A),
    "a column of ones beside the state": _one(
        lambda f, h, x: torch.cat([h, -torch.ones_like(h[:, :1])], -1) @ f.biased + x
    ),
    "angles": _one(lambda f, h, x: torch.atan2(h, (h @ f.W).abs()) + x),
    "one slope": _one(lambda f, h, x: F.prelu(h @ f.W + x, f.one)),
    "a graph": _one(lambda f, h, x: torch.einsum("ij,bjd->bid", f.W, torch.stack([h, x], -1)).sum(-1)),
    "many rows by a matrix": _one(lambda f, h, x: ((h[:, None] * x[:, :, None]).repeat(1, 4, 1) @ f.A).mean(1)),
    "group norm of a folded batch": _one(
        lambda f, h, x: (
            F.group_norm(torch.stack([h, x, h * x, h - x], 1).flatten(0, 1).unsqueeze(-1), 1, f.A[0], f.A[1])
            .view(-1, 4, f.n)
            .sum(1)
            if f.n > 1
            else h + x
        )
    ),
    "filled by parts": _one(lambda f, h, x: _filled(h, x)),
    "columns": _one(lambda f, h, x: (f.W @ h.T).T + x),
    "one feature": _one(lambda f, h, x: h[:, 0].unsqueeze(1) * x + h),
    "padding": _one(lambda f, h, x: F.pad(h[:, : f.n - 1], (1, 0)) @ f.W + x),
    "the same by einsum": _one(lambda f, h, x: torch.einsum("bi,ij->bj", h, f.W) + x),
    "a product with a vector": _one(lambda f, h, x: (h @ f.A[0]).unsqueeze(1) * x + h),
    "a lower triangle": _one(lambda f, h, x: torch.tril(h.unsqueeze(2) * x.unsqueeze(1)).sum(1)),
    "the whole of an outer product": _one(
        lambda f, h, x: (h.unsqueeze(2) * x.unsqueeze(1)).amax((1, 2)).unsqueeze(1) + h
    ),
    "sums so far": _one(
        lambda f, h, x: torch.softmax(h, -1).cumsum(-1) * x + h.unsqueeze(1).repeat(1, 2, 1).cumsum(1)[:, 1]
    ),
    "windows": _one(lambda f, h, x: F.pad(h, (1, 1)).unfold(1, 3, 1).mean(-1) + x),
    "W and its transpose": _one(lambda f, h, x: (h @ f.W) @ f.W.T + x @ f.W),
}
