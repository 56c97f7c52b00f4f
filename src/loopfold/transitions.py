"""Transitions: one step of a recurrent network, `state = f(state, x)`. Nothing here knows of time."""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Never, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopfold.states import State, Step, leaves, name_of, trials, whole_number, zero_state

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
        wide = W.detach().to(torch.promote_types(W.dtype, torch.float32))  # there is no QR in half precision
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
    It may read more, `forward(state, x, context, t)`, and give an output beside the state: see `unfold`.

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
    gate_names: ClassVar[tuple[str, ...]] = ()  # of the blocks of rows of W, from the top; () is a cell without gates

    @abstractmethod
    def forward(self, *args: Any) -> State:
        """The state after one step: `forward(state, x)`, or `forward(state)` where there is no input."""

    def initial_state(self, batch: int) -> State:
        """h(0), zeros unless a transition says otherwise. The size is the one that `forward` maps onto itself."""
        return zero_state(self, batch)


class Embedded(Transition):
    """A transition that reads tokens: `f(state, E[x])`, where x is a whole number and `E` a table with a row for each.

    A tuple of one tensor holds vectors that are read as they are, such as rows of E that went through dropout.

    `embedding` is an `nn.Embedding`; `nn.Embedding.from_pretrained(torch.eye(k))` makes the rows one-hot vectors. What
    a step computes from x alone, compiled engines compute once for every token that occurs, not at every step.

    >>> from loopfold import unfold
    >>> unfold(Embedded(LSTM(3, 5), nn.Embedding(10, 3)), torch.randint(10, (7, 2))).hidden.shape
    torch.Size([7, 2, 5])
    """

    def __init__(self, cell: nn.Module, embedding: nn.Embedding) -> None:
        super().__init__()
        if not isinstance(embedding, nn.Embedding):
            raise TypeError(f"Embedded needs an nn.Embedding(tokens, size); got a {type(embedding).__name__}.")
        self.embedding = embedding
        self.cell = cell

    def forward(self, state: State, x: Tensor | tuple[Tensor]) -> State:
        return self.cell(state, x[0] if isinstance(x, tuple) else self.embedding(x))

    def initial_state(self, batch: int) -> State:
        return initial_state(self.cell, batch, self.embedding.weight.new_zeros(batch, self.embedding.embedding_dim))


def initial_state(f: Step, batch: int, x: State | None = None, context: State | None = None) -> State:
    """What `f` says of its own, or zeros of the size that it maps onto itself; `x [batch, …]` helps to find that."""
    own = own_start(f)
    return zero_state(f, batch, x, context) if own is None else own(batch)


def own_start(f: Step) -> Callable[[int], State] | None:
    """What `f` says of its own on the state that it starts from, if anything."""
    is_zeros = isinstance(f, Transition) and type(f).initial_state is Transition.initial_state
    return None if is_zeros else getattr(f, "initial_state", None)  # any module may bring its own, not Transition alone


def hidden_size(f: Step) -> int:
    """The size of what a layer above `f` reads: of its state, or of the output that it gives beside it.

    >>> hidden_size(LSTM(3, 5))
    5
    """
    state = initial_state(f, 1)
    if not isinstance(f, Cell):
        found, _ = trials(f, start=lambda batch: initial_state(f, batch))
        outputs = [trial.output for trial in found if trial.output is not None]
        if outputs and len(outputs) == len(found):
            return leaves(outputs[0])[0].shape[-1]
    return leaves(state)[0].shape[-1]


def one_number(batch: int) -> Tensor:
    """The state of a function that takes any size."""
    return torch.zeros(batch, 1)


def example_inputs(f: Step) -> list[Tensor | None]:
    """Every `x [1, …]` that `f` takes a step on, found by trying; None where it takes one without.

    >>> [None if x is None else tuple(x.shape) for x in example_inputs(Elman(3, 5))]
    [(1, 3)]
    """
    if isinstance(f, nn.Module):
        found, _ = trials(f, start=own_start(f))
    else:  # a function takes any size, so one number
        found = trials(f, torch.zeros(1, 1), one_number)[0] or trials(f, start=one_number)[0]
    inputs = {id(trial.x): trial.x for trial in found}
    sizes = {key: {trial.size for trial in found if id(trial.x) == key} for key in inputs}
    return [x if x is None else x[:1] for key, x in inputs.items() if len(sizes[key]) == 1]  # one state goes with it


# ------------------------------------------------------------------ the cells of the field


class CellOptions(TypedDict, total=False):
    """The options that every cell of ours takes."""

    recurrent_init: Initialiser
    generator: torch.Generator | None
    device: torch.device | str | None
    dtype: torch.dtype | None


class Cell(Transition):
    """A transition with `U [k·n, n_in]`, `W [k·n, n]` and `b [k·n]`, one block of rows for each of its k gates.

    A cell of this kind is its `gate_names` and its equations, `forward`; one of the library also has a `stock_name`.
    """

    stock_name: ClassVar[str]  # on the command line and in run folders, which outlive the name of a class
    state_type: ClassVar[type[Any] | None] = None  # a NamedTuple of tensors [batch, n]; None is one such tensor
    shown: ClassVar[tuple[str, ...]] = ()  # functions among the attributes that `print` shows

    def __init_subclass__(cls) -> None:
        """Where a cell takes `**options: Unpack[CellOptions]`, `help` shows each of them by name."""
        super().__init_subclass__()
        init: Any = vars(cls).get("__init__")
        own = [] if init is None else [*inspect.signature(init).parameters.values()]
        if own and own[-1].annotation == Unpack[CellOptions]:
            shared = [p for p in inspect.signature(Cell).parameters.values() if p.kind is p.KEYWORD_ONLY]
            init.__signature__ = inspect.Signature([*own[:-1], *shared], return_annotation=None)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        recurrent_init: Initialiser = Uniform(),
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **unknown: Never,
    ) -> None:
        super().__init__()
        if unknown:  # Python would say "Cell.__init__()", but another class was called
            raise TypeError(f"{name_of(self)}.__init__() got an unexpected keyword argument {next(iter(unknown))!r}")
        n_in = self.input_size = whole_number(name_of(self), "input_size", input_size)
        n = self.hidden_size = whole_number(name_of(self), "hidden_size", hidden_size)
        if not callable(recurrent_init):
            raise TypeError(f"recurrent_init must be an object such as lf.Orthogonal(); got {recurrent_init!r}.")
        rows = n * max(1, len(self.gate_names))
        self.U = nn.Parameter(torch.empty(rows, n_in, device=device, dtype=dtype))
        self.W = nn.Parameter(torch.empty(rows, n, device=device, dtype=dtype))
        self.b = nn.Parameter(torch.empty(rows, device=device, dtype=dtype))
        bound = 1 / math.sqrt(n)
        nn.init.uniform_(self.U, -bound, bound, generator=generator)
        nn.init.uniform_(self.b, -bound, bound, generator=generator)
        for block in self.W.detach().split(n):
            recurrent_init(block, generator)

    __init__.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # `help` does not show `unknown`
        [*inspect.signature(__init__).parameters.values()][:-1], return_annotation=None
    )

    def initial_state(self, batch: int) -> State:
        shape = batch, self.hidden_size
        if self.state_type is None:
            return self.W.new_zeros(shape)
        return self.state_type(*(self.W.new_zeros(shape) for _ in self.state_type._fields))

    def start_gate(self, gate: str, bias: float | None) -> None:
        """Start one gate's part of `b` at a value; None leaves it as it is."""
        if bias is not None:
            self.b.detach().split(self.hidden_size)[self.gate_names.index(gate)].fill_(bias)

    def extra_repr(self) -> str:
        names = {key: getattr(getattr(self, key), "__name__", None) for key in self.shown}  # a module shows itself
        more = [f"{key}={name}" for key, name in names.items() if name]
        return ", ".join([str(self.input_size), str(self.hidden_size), *more])


class Elman(Cell):
    """The network of book Fig. 10.3: `a = b + W h + U x`, `h = φ(a)`.

    Parameters `U [n, n_in]`, `W [n, n]`, `b [n]`; `activation` is φ, tanh by default.

    >>> h = Elman(3, 5)(torch.zeros(2, 5), torch.ones(2, 3))
    >>> h.shape
    torch.Size([2, 5])
    """

    stock_name = "elman"
    shown = ("activation",)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        activation: Callable[[Tensor], Tensor] = torch.tanh,
        **options: Unpack[CellOptions],
    ) -> None:
        super().__init__(input_size, hidden_size, **options)
        self.activation = activation

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        a = self.b + h @ self.W.T + x @ self.U.T  # book (10.8)
        return self.activation(a)  # book (10.9)


class LSTMState(NamedTuple):
    h: Tensor
    c: Tensor


class LSTM(Cell):
    """Long short-term memory, as `torch.nn.LSTM`: `c = σ(f) c + σ(i) tanh(g)`, `h = σ(o) tanh(c)`.

    Parameters `U [4n, n_in]`, `W [4n, n]`, `b [4n]`, gates in torch's order i, f, g, o. torch keeps two biases
    whose sum is `b`. `forget_bias` starts the forget gate's part of `b` at that value; 1 helps long memories.

    >>> lstm = LSTM(3, 5, forget_bias=1.0)
    >>> lstm(lstm.initial_state(batch=2), torch.ones(2, 3)).c.shape
    torch.Size([2, 5])
    """

    stock_name = "lstm"
    gate_names = ("i", "f", "g", "o")
    state_type = LSTMState

    def __init__(
        self, input_size: int, hidden_size: int, *, forget_bias: float | None = None, **options: Unpack[CellOptions]
    ) -> None:
        super().__init__(input_size, hidden_size, **options)
        self.start_gate("f", forget_bias)

    def forward(self, state: LSTMState, x: Tensor) -> LSTMState:
        h, c = state
        i, f, g, o = (self.b + h @ self.W.T + x @ self.U.T).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return LSTMState(h, c)


class LayerNormLSTM(Cell):
    """LSTM with layer normalisation (Ba, Kiros and Hinton, 2016, eqs. 20 to 22).

    `i, f, g, o = LN(W h; γ_h) + LN(U x; γ_x) + b`, `c = σ(f) c + σ(i) tanh(g)`, `h = σ(o) tanh(LN(c; γ_c, β_c))`.

    >>> lstm = LayerNormLSTM(3, 5)
    >>> lstm(lstm.initial_state(batch=2), torch.ones(2, 3)).h.shape
    torch.Size([2, 5])
    """

    stock_name = "layernorm-lstm"
    gate_names = ("i", "f", "g", "o")
    state_type = LSTMState

    def __init__(
        self, input_size: int, hidden_size: int, *, forget_bias: float | None = None, **options: Unpack[CellOptions]
    ) -> None:
        super().__init__(input_size, hidden_size, **options)
        self.start_gate("f", forget_bias)
        n = self.hidden_size
        self.gamma_h = nn.Parameter(self.W.new_ones(4 * n))
        self.gamma_x = nn.Parameter(self.W.new_ones(4 * n))
        self.gamma_c = nn.Parameter(self.W.new_ones(n))
        self.beta_c = nn.Parameter(self.W.new_zeros(n))

    def forward(self, state: LSTMState, x: Tensor) -> LSTMState:
        h, c = state
        n = self.hidden_size
        from_h = F.layer_norm(h @ self.W.T, (4 * n,), self.gamma_h)
        from_x = F.layer_norm(x @ self.U.T, (4 * n,), self.gamma_x)
        i, f, g, o = (from_h + from_x + self.b).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(F.layer_norm(c, (n,), self.gamma_c, self.beta_c))
        return LSTMState(h, c)


class GRU(Cell):
    """Gated recurrent unit, as `torch.nn.GRU`: `h = (1 - z) ñ + z h`, `ñ = tanh(b_n + U_n x + r (W_n h + b_hn))`.

    Parameters `U [3n, n_in]`, `W [3n, n]`, `b [3n]`, gates in torch's order r, z, n; and `b_hn [n]`, the bias that
    the reset gate multiplies. The other biases of torch appear only as sums, and `b` holds those. `update_bias` starts
    the update gate's part of `b` at that value: the larger, the more of h stays from step to step.

    >>> GRU(3, 5)(torch.zeros(2, 5), torch.ones(2, 3)).shape
    torch.Size([2, 5])
    """

    stock_name = "gru"
    gate_names = ("r", "z", "n")

    def __init__(
        self, input_size: int, hidden_size: int, *, update_bias: float | None = None, **options: Unpack[CellOptions]
    ) -> None:
        super().__init__(input_size, hidden_size, **options)
        self.b_hn = nn.Parameter(self.b.new_zeros(self.hidden_size))
        bound = 1 / math.sqrt(self.hidden_size)
        nn.init.uniform_(self.b_hn, -bound, bound, generator=options.get("generator"))
        self.start_gate("z", update_bias)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        x_r, x_z, x_n = (self.b + x @ self.U.T).chunk(3, -1)
        h_r, h_z, h_n = (h @ self.W.T).chunk(3, -1)
        r = torch.sigmoid(x_r + h_r)
        z = torch.sigmoid(x_z + h_z)
        n = torch.tanh(x_n + r * (h_n + self.b_hn))
        return (1 - z) * n + z * h


class MGU(Cell):
    """Minimal gated unit (Zhou et al., 2016), a GRU whose one gate both resets and updates: `h = (1 - f) h + f ñ`.

    Parameters `U [2n, n_in]`, `W [2n, n]`, `b [2n]`, first those of the gate f, then those of the candidate ñ.

    >>> MGU(3, 5)(torch.zeros(2, 5), torch.ones(2, 3)).shape
    torch.Size([2, 5])
    """

    stock_name = "mgu"
    gate_names = ("f", "n")

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        W_f, W_n = self.W.chunk(2)
        x_f, x_n = (self.b + x @ self.U.T).chunk(2, -1)
        f = torch.sigmoid(x_f + h @ W_f.T)
        n = torch.tanh(x_n + (f * h) @ W_n.T)
        return (1 - f) * h + f * n


# The cells above that have a name of their own, by that name; a class derived from one of them does not inherit it.
CELLS: dict[str, type[Cell]] = {
    kind.stock_name: kind
    for kind in [*globals().values()]
    if isinstance(kind, type) and issubclass(kind, Cell) and "stock_name" in vars(kind)
}
