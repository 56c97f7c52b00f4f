"""Transitions: one step of a recurrent network, `state = f(state, x)`. Nothing here knows of time.

A state is a tensor `[batch, n]`, or a tuple or NamedTuple of tensors whose first dimension is the batch.
"""

import inspect
import itertools
import math
import typing
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

State = Any  # Tensor | tuple[State, ...] | NamedTuple; Python's types cannot say "any NamedTuple of tensors"
Step = Callable[..., State]  # f(state, x) -> state, or f(state) -> state where there is no input


# ------------------------------------------------------------------ the state as a tree of tensors


def leaves(state: State) -> list[Tensor]:
    """The tensors of a state, in order.

    >>> [tuple(leaf.shape) for leaf in leaves((torch.zeros(2, 3), torch.zeros(2, 5)))]
    [(2, 3), (2, 5)]
    """
    if isinstance(state, Tensor):
        return [state]
    if isinstance(state, tuple):
        return [leaf for part in state for leaf in leaves(part)]
    raise TypeError(
        f"a state is a tensor, or a tuple or NamedTuple of tensors; this one holds a {type(state).__name__}."
    )


def rebuild(like: State, new: Iterable[Tensor]) -> State:
    """A state with the structure of `like` and the tensors of `new`."""
    flow = iter(new)

    def build(part: State) -> State:
        if isinstance(part, Tensor):
            return next(flow)
        parts = [build(p) for p in part]
        return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)

    return build(like)


def map_state(function: Callable[..., Tensor], state: State, *others: State) -> State:
    """`function` applied leaf by leaf; the result has the structure of `state`."""
    columns = zip(leaves(state), *map(leaves, others), strict=True)
    return rebuild(state, [function(*column) for column in columns])


def describe(state: State) -> str:
    """The structure and shapes of a state in words, for error messages: `LSTMState(h (2, 3), c (2, 3))`."""
    if isinstance(state, Tensor):
        return str(tuple(state.shape))
    if not isinstance(state, tuple):
        return type(state).__name__
    fields = getattr(state, "_fields", None)
    parts = [describe(part) for part in state]
    if fields:
        return f"{type(state).__name__}({', '.join(f'{k} {p}' for k, p in zip(fields, parts, strict=True))})"
    return f"tuple({', '.join(parts)})"


def name_of(f: Step) -> str:
    """What to call a step in messages."""
    return type(f).__name__ if isinstance(f, nn.Module) else getattr(f, "__name__", type(f).__name__)


def whole_number(owner: str, name: str, number: int) -> int:
    """`number`, if it is a whole number of at least 1; `owner` and `name` say in the error what it was for."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"{owner} needs {name} as a whole number of at least 1; {number!r} came.")
    return number


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


Initialiser = Uniform | Orthogonal | ScaledIdentity


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
        _start_forget_gate(self.b, forget_bias)

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
        _start_forget_gate(self.b, forget_bias)
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
    the reset gate multiplies. The other biases of torch appear only as sums, and `b` holds those.

    >>> GRU(3, 5)(torch.zeros(2, 5), torch.ones(2, 3)).shape
    torch.Size([2, 5])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
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
    U = nn.Parameter(torch.empty(gates * n, n_in, device=device, dtype=dtype))
    W = nn.Parameter(torch.empty(gates * n, n, device=device, dtype=dtype))
    b = nn.Parameter(torch.empty(gates * n, device=device, dtype=dtype))
    bound = 1 / math.sqrt(n)
    nn.init.uniform_(U, -bound, bound, generator=generator)
    nn.init.uniform_(b, -bound, bound, generator=generator)
    for gate in W.detach().split(n):
        recurrent_init(gate, generator)
    return U, W, b


def _start_forget_gate(b: Tensor, value: float | None) -> None:
    if value is not None:
        i, f, g, o = b.detach().chunk(4)
        f.fill_(value)


# ------------------------------------------------------------------ the state that a step starts from


def zero_state(f: Step, batch: int, x: Tensor | None = None) -> State:
    """Zeros of the size that `f` maps onto itself: f([batch, n], x) is [batch, n] again.

    The sizes tried are those of the parameters of `f` and of `x [batch, ...]`, where it is known; the structures
    are a tensor, the NamedTuple that the first argument is annotated with, and a pair.
    """
    key = (None if x is None else x.shape[1:], None if x is None else x.dtype)
    found = _known_states.setdefault(f, {}) if isinstance(f, nn.Module) else {}
    if key not in found:
        found[key] = _search_state(f, x)
    like = _a_tensor_of(f, x)
    return map_state(lambda leaf: like.new_zeros(batch, *leaf.shape[1:]), found[key])


_known_states: weakref.WeakKeyDictionary[nn.Module, dict[Any, State]] = weakref.WeakKeyDictionary()
_TRIAL_BATCH = 7  # odd enough that `h, c = state` fails on a plain tensor


def _a_tensor_of(f: Step, x: Tensor | None) -> Tensor:
    """A tensor whose dtype and device the state takes over."""
    tensors = [*f.parameters(), *f.buffers()] if isinstance(f, nn.Module) else []
    floating = [t for t in (*tensors, x) if t is not None and t.is_floating_point()]
    return floating[0] if floating else torch.zeros(())


def _search_state(f: Step, x: Tensor | None) -> State:
    tensors = [*f.parameters(), *f.buffers()] if isinstance(f, nn.Module) else []
    sizes = sorted({size for t in tensors for size in t.shape} | (set(x.shape[1:]) if x is not None else set()))
    like = _a_tensor_of(f, x)
    if x is not None:
        inputs: list[tuple[Tensor, ...]] = [(x.new_zeros(_TRIAL_BATCH, *x.shape[1:]),)]
    else:
        vectors = [like.new_zeros(_TRIAL_BATCH, m) for m in sizes]
        classes = torch.zeros(_TRIAL_BATCH, dtype=torch.long, device=like.device)
        inputs = [(), *((vector,) for vector in vectors), (classes,)]

    step = f.forward if isinstance(f, nn.Module) else f  # not f itself: hooks on a module are no part of the trial
    error: Exception | None = None
    for structure in _possible_structures(f):
        fits = {}
        for n, arguments in itertools.product(sizes, inputs):
            state = structure(like.new_zeros(_TRIAL_BATCH, n))
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    new = step(state, *arguments)
                if [leaf.shape for leaf in leaves(new)] == [leaf.shape for leaf in leaves(state)]:
                    fits[n] = new  # in the structure that f returns, which may be a NamedTuple
            except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as reason:
                error = reason
        if len(fits) == 1:
            return next(iter(fits.values()))
        if fits:
            raise ValueError(
                f"{name_of(f)} accepts states of several sizes ({', '.join(map(str, fits))}), so zeros cannot be "
                f"chosen for it. Pass state=..., or define initial_state(self, batch) on it."
            )
    raise ValueError(
        f"no zero state was found for {name_of(f)}: no size among {sizes} is mapped onto itself. "
        f"Pass state=..., or define initial_state(self, batch) on it."
    ) from error


def _possible_structures(f: Step) -> list[Callable[[Tensor], State]]:
    structures: list[Callable[[Tensor], State]] = [lambda leaf: leaf, lambda leaf: (leaf, leaf)]
    function = f.forward if isinstance(f, nn.Module) else f
    try:
        hints = typing.get_type_hints(function)
        first = next(iter(inspect.signature(function).parameters))
        fields = getattr(hints.get(first), "_fields", None)
    except (NameError, TypeError, ValueError, StopIteration):
        fields = None  # no signature, or annotations that name things out of reach: the plain structures remain
    if fields is not None:
        structures.insert(0, lambda leaf: hints[first](*[leaf] * len(fields)))
    return structures
