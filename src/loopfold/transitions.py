"""Transitions: one step of a recurrent network, `state = f(state, x)`. Nothing here knows of time."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopfold.states import State, Step, name_of, whole_number, zero_state

# ------------------------------------------------------------------ how W starts


@dataclass(frozen=True)
class Uniform:
    """Every weight from U(-1/√n, 1/√n), as `torch.nn.RNN` starts."""

    def __call__(self, W: Tensor, generator: torch.Generator | None = None) -> None:
        bound = 1 / math.sqrt(W.shape[-1])
        nn.init.uniform_(W, -bound, bound, generator=generator)


@dataclass(frozen=True)
class Orthogonal:
    """An orthogonal `W`, times `gain`: every singular value is `gain`, so h neither grows nor shrinks at first."""

    gain: float = 1.0

    def __call__(self, W: Tensor, generator: torch.Generator | None = None) -> None:
        wide = W.detach().to(torch.promote_types(W.dtype, torch.float32))  # QR knows no half precision
        W.detach().copy_(nn.init.orthogonal_(wide, self.gain, generator=generator))


@dataclass(frozen=True)
class ScaledIdentity:
    """`W = scale · I`. With ReLU and scale 1 this is the IRNN of Le, Jaitly and Hinton (2015)."""

    scale: float = 1.0

    def __call__(self, W: Tensor, generator: torch.Generator | None = None) -> None:
        with torch.no_grad():
            W.copy_(torch.eye(*W.shape, dtype=W.dtype, device=W.device) * self.scale)


Initialiser = Callable[[Tensor, torch.Generator | None], None]  # changes a matrix in place


# ------------------------------------------------------------------ transitions


class Transition(nn.Module, ABC):
    """One step of a recurrent network: `state = f(state, x)`.

    Write `forward(state, x) -> state`; the state may be a tensor `[batch, n]`, a tuple or a NamedTuple of such.
    `x` is what the network reads at one step, `[batch, n_in]`. A step without input is `forward(state) -> state`.

    >>> class Leaky(Transition):
    ...     def __init__(self, n_in, n):
    ...         super().__init__()
    ...         self.U = nn.Parameter(torch.randn(n, n_in))
    ...     def forward(self, h, x):
    ...         return 0.9 * h + x @ self.U.T
    >>> Leaky(3, 5).initial_state(batch=2).shape
    torch.Size([2, 5])
    """

    input_size: int | None = None  # where a transition sets it, sizes of x are checked before the first step

    @abstractmethod
    def forward(self, *args: Any) -> State:
        """The state after one step: `forward(state, x)`, or `forward(state)` where there is no input."""

    def initial_state(self, batch: int) -> State:
        """h(0), zeros unless a transition says otherwise. The size is the one that `forward` maps onto itself."""
        return zero_state(self, batch)


class Embedded(Transition):
    """A transition that reads tokens: `f(state, E[x])`, where x is a whole number and `E` a table with a row for each.

    `embedding` is an `nn.Embedding`; `nn.Embedding.from_pretrained(torch.eye(k))` makes the rows one-hot vectors. What
    a step computes from x alone, compiled engines compute once for every token that occurs, not at every step.

    >>> from loopfold import unfold
    >>> unfold(Embedded(LSTM(3, 5), nn.Embedding(10, 3)), torch.randint(10, (7, 2))).hidden.shape
    torch.Size([7, 2, 5])
    """

    def __init__(self, cell: nn.Module, embedding: nn.Embedding) -> None:
        super().__init__()
        if not isinstance(embedding, nn.Embedding):
            raise TypeError(f"Embedded needs an nn.Embedding(tokens, size); a {type(embedding).__name__} came.")
        self.embedding = embedding
        self.cell = cell

    def forward(self, state: State, x: Tensor) -> State:
        return self.cell(state, self.embedding(x))

    def initial_state(self, batch: int) -> State:
        return initial_state(self.cell, batch, self.embedding.weight.new_zeros(batch, self.embedding.embedding_dim))


def initial_state(f: Step, batch: int, x: Tensor | None = None) -> State:
    """What `f` says of its own, or zeros of the size that it maps onto itself; `x [batch, …]` helps to find that."""
    own = getattr(f, "initial_state", None)  # any module may bring its own, not Transition alone
    if own is None or (isinstance(f, Transition) and type(f).initial_state is Transition.initial_state):
        return zero_state(f, batch, x)
    return own(batch)


class Elman(Transition):
    """The network of book Fig. 10.3: `a = b + W h + U x`, `h = φ(a)`.

    Parameters `U [n, n_in]`, `W [n, n]`, `b [n]`; `activation` is φ, tanh by default.

    >>> h = Elman(3, 5)(torch.zeros(2, 5), torch.ones(2, 3))
    >>> h.shape
    torch.Size([2, 5])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        activation: Callable[[Tensor], Tensor] = torch.tanh,
        *,
        recurrent_init: Initialiser = Uniform(),
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.input_size = whole_number(name_of(self), "input_size", input_size)
        self.hidden_size = whole_number(name_of(self), "hidden_size", hidden_size)
        self.activation = activation
        self.U, self.W, self.b = _gates(1, input_size, hidden_size, recurrent_init, generator, device, dtype)

    def initial_state(self, batch: int) -> Tensor:
        return self.W.new_zeros(batch, self.hidden_size)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        a = self.b + h @ self.W.T + x @ self.U.T  # book (10.8)
        return self.activation(a)  # book (10.9)

    def extra_repr(self) -> str:
        name = getattr(self.activation, "__name__", None)  # a module shows itself
        return f"{self.input_size}, {self.hidden_size}" + (f", activation={name}" if name else "")


class LSTMState(NamedTuple):
    h: Tensor
    c: Tensor


class LSTM(Transition):
    """Long short-term memory, as `torch.nn.LSTM`: `c = σ(f) c + σ(i) tanh(g)`, `h = σ(o) tanh(c)`.

    Parameters `U [4n, n_in]`, `W [4n, n]`, `b [4n]`, gates in torch's order i, f, g, o. torch keeps two biases
    whose sum is `b`. `forget_bias` starts the forget gate's part of `b` at that value; 1 helps long memories.

    >>> lstm = LSTM(3, 5, forget_bias=1.0)
    >>> lstm(lstm.initial_state(batch=2), torch.ones(2, 3)).c.shape
    torch.Size([2, 5])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        forget_bias: float | None = None,
        recurrent_init: Initialiser = Uniform(),
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.input_size = whole_number(name_of(self), "input_size", input_size)
        self.hidden_size = whole_number(name_of(self), "hidden_size", hidden_size)
        self.U, self.W, self.b = _gates(4, input_size, hidden_size, recurrent_init, generator, device, dtype)
        _start_gate(self.b, 1, 4, forget_bias)  # of i, f, g, o

    def initial_state(self, batch: int) -> LSTMState:
        zeros = self.W.new_zeros(batch, self.hidden_size)
        return LSTMState(zeros, zeros)

    def forward(self, state: LSTMState, x: Tensor) -> LSTMState:
        h, c = state
        i, f, g, o = (self.b + h @ self.W.T + x @ self.U.T).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return LSTMState(h, c)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}"


class LayerNormLSTM(Transition):
    """LSTM with layer normalisation (Ba, Kiros and Hinton, 2016, eqs. 20 to 22).

    `i, f, g, o = LN(W h; γ_h) + LN(U x; γ_x) + b`, `c = σ(f) c + σ(i) tanh(g)`, `h = σ(o) tanh(LN(c; γ_c, β_c))`.

    >>> lstm = LayerNormLSTM(3, 5)
    >>> lstm(lstm.initial_state(batch=2), torch.ones(2, 3)).h.shape
    torch.Size([2, 5])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        forget_bias: float | None = None,
        recurrent_init: Initialiser = Uniform(),
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.input_size = whole_number(name_of(self), "input_size", input_size)
        self.hidden_size = whole_number(name_of(self), "hidden_size", hidden_size)
        self.U, self.W, self.b = _gates(4, input_size, hidden_size, recurrent_init, generator, device, dtype)
        _start_gate(self.b, 1, 4, forget_bias)  # of i, f, g, o
        n = self.hidden_size
        self.gamma_h = nn.Parameter(self.W.new_ones(4 * n))
        self.gamma_x = nn.Parameter(self.W.new_ones(4 * n))
        self.gamma_c = nn.Parameter(self.W.new_ones(n))
        self.beta_c = nn.Parameter(self.W.new_zeros(n))

    def initial_state(self, batch: int) -> LSTMState:
        zeros = self.W.new_zeros(batch, self.hidden_size)
        return LSTMState(zeros, zeros)

    def forward(self, state: LSTMState, x: Tensor) -> LSTMState:
        h, c = state
        n = self.hidden_size
        from_h = F.layer_norm(h @ self.W.T, (4 * n,), self.gamma_h)
        from_x = F.layer_norm(x @ self.U.T, (4 * n,), self.gamma_x)
        i, f, g, o = (from_h + from_x + self.b).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(F.layer_norm(c, (n,), self.gamma_c, self.beta_c))
        return LSTMState(h, c)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}"


class GRU(Transition):
    """Gated recurrent unit, as `torch.nn.GRU`: `h = (1 - z) ñ + z h`, `ñ = tanh(b_n + U_n x + r (W_n h + b_hn))`.

    Parameters `U [3n, n_in]`, `W [3n, n]`, `b [3n]`, gates in torch's order r, z, n; and `b_hn [n]`, the bias that
    the reset gate multiplies. The other biases of torch appear only as sums, and `b` holds those. `update_bias` starts
    the update gate's part of `b` at that value: the larger, the more of h stays from step to step.

    >>> GRU(3, 5)(torch.zeros(2, 5), torch.ones(2, 3)).shape
    torch.Size([2, 5])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        update_bias: float | None = None,
        recurrent_init: Initialiser = Uniform(),
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.input_size = whole_number(name_of(self), "input_size", input_size)
        self.hidden_size = whole_number(name_of(self), "hidden_size", hidden_size)
        self.U, self.W, self.b = _gates(3, input_size, hidden_size, recurrent_init, generator, device, dtype)
        self.b_hn = nn.Parameter(self.b.new_zeros(self.hidden_size))
        bound = 1 / math.sqrt(self.hidden_size)
        nn.init.uniform_(self.b_hn, -bound, bound, generator=generator)
        _start_gate(self.b, 1, 3, update_bias)  # of r, z, n

    def initial_state(self, batch: int) -> Tensor:
        return self.W.new_zeros(batch, self.hidden_size)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        x_r, x_z, x_n = (self.b + x @ self.U.T).chunk(3, -1)
        h_r, h_z, h_n = (h @ self.W.T).chunk(3, -1)
        r = torch.sigmoid(x_r + h_r)
        z = torch.sigmoid(x_z + h_z)
        n = torch.tanh(x_n + r * (h_n + self.b_hn))
        return (1 - z) * n + z * h

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}"


def _gates(
    gates: int,
    n_in: int,
    n: int,
    recurrent_init: Initialiser,
    generator: torch.Generator | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
    """U, W and b for a number of gates stacked along the rows; every gate's own W is initialised by itself."""
    if not callable(recurrent_init):
        raise TypeError(f"recurrent_init must be an object such as lf.Orthogonal(); {recurrent_init!r} came.")
    U = nn.Parameter(torch.empty(gates * n, n_in, device=device, dtype=dtype))
    W = nn.Parameter(torch.empty(gates * n, n, device=device, dtype=dtype))
    b = nn.Parameter(torch.empty(gates * n, device=device, dtype=dtype))
    bound = 1 / math.sqrt(n)
    nn.init.uniform_(U, -bound, bound, generator=generator)
    nn.init.uniform_(b, -bound, bound, generator=generator)
    for gate in W.detach().split(n):
        recurrent_init(gate, generator)
    return U, W, b


def _start_gate(b: Tensor, gate: int, gates: int, value: float | None) -> None:
    """Start one gate's part of the bias at a value."""
    if value is not None:
        b.detach().chunk(gates)[gate].fill_(value)
