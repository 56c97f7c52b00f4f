"""What each step adds to a gradient, and how far back gradients reach; for any transition."""

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from loopfold.backpropagation import Loss
from loopfold.drawing import charts
from loopfold.drawing.figure import Drawing
from loopfold.errors import Argument, Spelt
from loopfold.recurrent import Bidirectional, plain_loops, recurrences_of
from loopfold.states import State, has_a_gradient, in_double, in_reals, leaves, map_state, name_of
from loopfold.telling import tell
from loopfold.transitions import Embedded, Transition
from loopfold.wiring import Pattern

# ------------------------------------------------------------------ the share of each step


class StepGradients(dict[str, Tensor]):
    """What each step adds to each gradient: `[steps, *shape]` under every parameter's name."""

    def draw(self) -> Drawing:
        """‖∇W(t)‖ of every parameter, a row each, and a column for each step (M16)."""
        return charts.step_gradients({n: torch.stack([_size([g]) for g in share]) for n, share in self.items()})


def per_step_gradients(model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor) -> StepGradients:
    """What each step adds to each gradient: ∇W(t), where W(t) is a copy of W that step t alone uses (M16).

    For any transition and pattern; `loss_fn(o, y)` is a scalar, with `model.loss` the book's. Every entry is
    `[steps, *shape]` and sums over its steps to `.grad`. Names are shortened as far as they stay unique: `"W"`,
    not `"recurrent.cell.W"`. Steps count in the order in which they are taken: a backward layer's first is x(τ).
    What a parameter does outside the steps, as a learned initial state, counts with the first of them.

    >>> from loopfold import Elman, SequenceToSequence
    >>> model = SequenceToSequence(Elman(3, 5), outputs=4)
    >>> shares = per_step_gradients(model, model.loss, torch.randn(7, 2, 3), torch.zeros(7, 2, dtype=torch.long))
    >>> shares["W"].shape
    torch.Size([7, 5, 5])
    """
    with plain_loops(model), _copies_for_each_call(model, {x.shape[:2], y.shape[:2]}) as calls, torch.enable_grad():
        loss = loss_fn(_outputs(model, x, y), y)
    if loss.dim() != 0:
        raise ValueError(f"loss_fn must return one number; got a tensor of shape {tuple(loss.shape)}. Sum it.")
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    wanted = [*parameters.values()]
    for call in calls:
        wanted += [*call.copies.values(), *([call.output] if call.is_for_all_steps else [])]
    found: tuple[Tensor | None, ...] = torch.autograd.grad(loss, wanted, allow_unused=True)
    gradients = dict(zip(map(id, wanted), found, strict=True))

    shares: dict[str, Tensor] = {}
    for name, p in parameters.items():
        steps = [_shares(call, p, gradients) for call in calls if p in call.copies]
        outside = gradients[id(p)]  # not through any call's copy
        if outside is not None:
            steps = [torch.cat([steps[0][:1] + outside, steps[0][1:]]), *steps[1:]] if steps else [outside[None]]
        if steps:
            shares[name] = torch.cat(steps)
    short = short_names(name for name, _ in model.named_parameters())
    return StepGradients({short[name]: share for name, share in shares.items()})


@dataclass
class _Call:
    """One use of a module that owns parameters, and the copies of them that it alone used."""

    owner: nn.Module
    inputs: tuple[Any, ...]
    copies: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    output: Any = None
    is_for_all_steps: bool = False


def cells_of(model: nn.Module) -> list[nn.Module]:
    """The transitions of a model, each once."""
    found = (part.cell for part in recurrences_of(model).values())
    return list(dict.fromkeys(cell for cell in found if isinstance(cell, nn.Module)))


def core_of(cell: nn.Module) -> nn.Module:
    """A transition without the table of embeddings that it reads through."""
    return core_of(cell.cell) if isinstance(cell, Embedded) else cell


def gates_of(cell: nn.Module) -> tuple[str, ...]:
    """The names of a transition's gates; none where it has none, or says nothing of them."""
    return cell.gate_names if isinstance(cell, Transition) else ()


@contextmanager
def _copies_for_each_call(model: nn.Module, sequences: set[torch.Size]) -> Iterator[list[_Call]]:
    """Each call of a transition, and of any other module with parameters of its own, uses copies made for it alone.

    A call of such another module on sequences, whose shapes `[τ, batch]` are given, is for all their steps.
    """
    cells = cells_of(model)
    inside = {part for cell in cells for part in cell.modules()}
    owners = {cell: [*cell.modules()] for cell in cells} | {m: [m] for m in model.modules() if m not in inside}
    slots = {
        owner: [(m, key, p) for m in parts for key, p in m._parameters.items() if p is not None and p.requires_grad]
        for owner, parts in owners.items()
    }
    calls: list[_Call] = []
    running: list[_Call] = []

    def enter(owner: nn.Module, inputs: tuple[Any, ...]) -> None:
        call = _Call(owner, inputs)
        for module, key, p in slots[owner]:
            if module._parameters[key] is p:  # else it is a copy already: this call is a part of another
                module._parameters[key] = call.copies.setdefault(p, nn.Parameter(p.detach().clone()))
        calls.append(call)
        running.append(call)

    def leave(owner: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        call = running.pop()
        call.output = output
        shapes = {part.shape[:2] if isinstance(part, Tensor) else None for part in (*inputs, output)}
        alone = owner not in cells and next(owner.children(), None) is None
        call.is_for_all_steps = alone and len(shapes) == 1 and shapes <= sequences and output.requires_grad
        for module, key, p in slots[owner]:
            if p in call.copies:
                module._parameters[key] = p

    watched = [owner for owner in slots if slots[owner]]
    hooks = [owner.register_forward_pre_hook(enter) for owner in watched]
    hooks += [owner.register_forward_hook(leave) for owner in watched]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
        for module, key, p in (slot for owner in watched for slot in slots[owner]):
            module._parameters[key] = p


@torch.enable_grad()
def _shares(call: _Call, p: nn.Parameter, gradients: dict[int, Tensor | None]) -> Tensor:
    """What a call adds to the gradient of `p`, `[steps, *shape]`."""
    whole = gradients[id(call.copies[p])]
    if whole is None:
        whole = torch.zeros_like(p)
    flow = gradients[id(call.output)] if call.is_for_all_steps else None
    if flow is None:
        return whole[None]
    name = next(name for name, own in call.owner.named_parameters() if own is p)
    tensors = {key: _exact(t) for key, t in (*call.owner.named_parameters(), *call.owner.named_buffers())}
    inputs = [_exact(part) for part in call.inputs]

    def run(theta: Tensor, *inputs: Tensor) -> Tensor:
        return torch.func.functional_call(call.owner, tensors | {name: theta}, inputs)

    theta = tensors[name].repeat(len(flow), *[1] * p.dim()).requires_grad_()  # θ(t): one copy for every step
    try:
        by_step = torch.vmap(run)(theta, *inputs)
        (shares,) = torch.autograd.grad(by_step, theta, _exact(flow))
        together = run(tensors[name], *inputs)
    except (RuntimeError, TypeError):
        return whole[None]
    # a module that mixes the steps, such as a convolution over time, has no share that belongs to one step
    rounding = torch.finfo(whole.dtype).eps
    is_by_step = (
        _apart(by_step, together) <= 1e-9 * _largest(together)
        and _apart(together, call.output) <= rounding**0.5 * _largest(together)  # it is the call that was made
        and _apart(shares.sum(0), whole) <= min(256 * rounding, 0.1) * _largest(shares.abs().sum(0))
    )
    return shares.to(whole.dtype) if is_by_step else whole[None]


def _exact(value: Tensor) -> Tensor:
    """In double precision, so that no rounding of single precision is taken for a mixing of steps."""
    return in_double(value.detach()) if has_a_gradient(value) else value.detach()


def _apart(a: Tensor, b: Tensor) -> float:
    return _largest(a.detach() - b.detach())


def _largest(a: Tensor) -> float:
    return float(a.detach().abs().max()) if a.numel() else 0.0


def _outputs(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    return model.given(x, y) if isinstance(model, Pattern) else model(x)


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Each name without the leading parts that are not needed to tell it from the others."""
    names = {name: re.sub(r"parametrizations\.(\w+)\.original$", r"\1", name) for name in names}

    def short(name: str) -> str:
        parts = name.split(".")
        for k in range(1, len(parts) + 1):
            end = ".".join(parts[-k:])
            if sum(other == end or other.endswith("." + end) for other in names.values()) == 1:
                return end
        return name

    return {name: short(plain) for name, plain in names.items()}


# ------------------------------------------------------------------ how far gradients reach


@dataclass(frozen=True)
class GradientFlow:
    """How much the loss at one step depends on the state at an earlier one (M17).

    `norms[t, k]`   ‖∂L(t)/∂h(k)‖ over the whole state and batch, in float64, zero where k cannot influence t; a model
                    with one output at the end has one row
    `reach[d]`      the same by distance d, relative to d = 0: the geometric mean over all t and k = t - d
    `rate`          the factor by which the gradient changes with every step back
    `verdict`       what that means, in words, and what to do about it
    """

    norms: Tensor
    gated: bool = False  # whether all transitions have gates already, so that the advice is not to use them
    reach: Tensor = field(init=False)
    rate: float = field(init=False)
    verdict: str = field(init=False)
    said: tuple[object, ...] = field(init=False, repr=False)  # the verdict, with advice that others may spell otherwise

    def __post_init__(self) -> None:
        reach = _by_distance(self.norms)
        rate = _rate(reach)
        object.__setattr__(self, "reach", reach)
        object.__setattr__(self, "rate", rate)
        object.__setattr__(self, "said", tuple(_verdict(reach, rate, self.gated)))
        object.__setattr__(self, "verdict", "".join(map(str, self.said)))

    def draw(self) -> Drawing:
        """`norms` as a picture, k across and t downwards, with `reach` and `verdict`."""
        return charts.gradient_flow(self.norms, self.reach, self.verdict, (VANISHED, EXPLODED))


VANISHED, EXPLODED = 1e-3, 1e3  # the size relative to distance 0 at which a gradient counts as gone, or as too large
FADED, LONG = 0.1, 100  # a gradient this small fades, even if not vanished; so does one that will vanish this soon


def gradient_flow(model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor) -> GradientFlow:
    """The norms of ∂L(t)/∂h(k) = ∂L(t)/∂h(t) · Π ∂h(j)/∂h(j-1), for any transition (M17).

    `h` is the whole state of the network, of all its layers and of both h and c for an LSTM. `loss_fn(o, y)` is
    called on each step by itself, `o[t:t+1]` and `y[t:t+1]`. Costs τ passes backwards: O(τ²).

    >>> from loopfold import Elman, SequenceToSequence
    >>> model = SequenceToSequence(Elman(3, 5), outputs=4)
    >>> flow = gradient_flow(model, model.loss, torch.randn(40, 2, 3), torch.zeros(40, 2, dtype=torch.long))
    >>> flow.norms.shape, flow.verdict.split()[0]
    (torch.Size([40, 40]), 'vanishes')
    """
    if not cells_of(model):
        raise TypeError(
            f"{name_of(model)} holds no lf.Recurrent with a module as its transition, so no states to follow."
        )
    if isinstance(model, Pattern) and not model.wiring.one_step_for_each_x:
        raise TypeError(f"gradient_flow follows networks that take one step for each x(t); not {name_of(model)}.")
    tau = x.shape[0]
    with plain_loops(model), _chains(model) as chains, torch.enable_grad():
        o = _outputs(model, x, y)
        if not isinstance(o, Tensor):
            raise TypeError(f"gradient_flow needs a model that returns outputs o; got a {type(o).__name__}.")
        every_step = o.dim() > 2 and o.shape[:2] == x.shape[:2]
        losses = [loss_fn(o[t : t + 1], y[t : t + 1]) for t in range(tau)] if every_step else [loss_fn(o, y)]

    backwards = _read_backwards(model)
    steps = [chain[::-1] if cell in backwards else chain for cell, chain in chains.items()]
    if any(len(chain) != tau for chain in steps):
        raise ValueError(
            f"gradient_flow follows networks whose every layer takes one step for each x(t), τ = {tau}; "
            f"{name_of(model)} took {sorted({len(chain) for chain in steps})}."
        )
    nodes = [leaf for k in range(tau) for chain in steps for leaf in leaves(chain[k])]
    width = len(nodes) // tau
    norms = o.new_zeros(len(losses), tau, dtype=torch.float64)
    for t, loss in enumerate(losses):
        found = torch.autograd.grad(loss, nodes, retain_graph=True, allow_unused=True)
        for k in range(tau):
            norms[t, k] = _size([g for g in found[k * width : (k + 1) * width] if g is not None])
        tell("following gradients", t + 1, len(losses), "steps")
    return GradientFlow(norms, gated=all(gates_of(core_of(cell)) for cell in cells_of(model)))


def _size(parts: list[Tensor]) -> Tensor:
    """‖parts‖ as one vector. In double precision and relative to the largest entry, or squares would underflow."""
    g = torch.cat(
        [torch.zeros(1, dtype=torch.float64), *(p.detach().double().flatten().cpu() for p in in_reals(parts))]
    )
    largest = g.abs().max()
    return (g / largest).norm() * largest if 0 < largest < torch.inf else largest


@contextmanager
def _chains(model: nn.Module) -> Iterator[dict[nn.Module, list[State]]]:
    """Every state of every transition, in the order in which they are taken."""
    chains: dict[nn.Module, list[State]] = {}

    def record(cell: nn.Module, inputs: tuple[Any, ...], state: State) -> State:
        # copies, so that the gradient at one leaf leaves out its way through another: h(t) = σ(o) tanh(c(t)) of an LSTM
        state = map_state(lambda leaf: leaf.clone(), state)
        chains.setdefault(cell, []).append(state)
        return state

    hooks = [cell.register_forward_hook(record) for cell in cells_of(model)]
    try:
        yield chains
    finally:
        for hook in hooks:
            hook.remove()


def _read_backwards(model: nn.Module) -> set[nn.Module]:
    """The transitions that take x(τ) first. Backwards within backwards is forwards again."""
    found: set[nn.Module] = set()
    for part in model.modules():
        if isinstance(part, Bidirectional):
            found ^= set(cells_of(part.backwards))
    return found


def _by_distance(norms: Tensor) -> Tensor:
    """The geometric mean of `norms` by the distance t - k, relative to distance 0."""
    rows, tau = norms.shape
    logs = norms.double().log()
    t = torch.arange(tau - rows, tau, device=norms.device)  # one output: its row is t = τ
    counts = norms[t - (tau - rows), t] != 0  # a step without a loss counts for nothing
    means = []
    for d in range(tau):
        there = counts & (t >= d)
        if not bool(there.any()):
            break
        means.append(logs[there, t[there] - d].mean())
    if not means:
        return norms.new_zeros(1, dtype=torch.float64)
    reach = torch.stack(means)
    return (reach - reach[0]).exp()


def _rate(reach: Tensor) -> float:
    """The factor per step: the slope of a straight line through log reach, as far as it has not underflowed."""
    seen = (reach > 0) & reach.isfinite()
    count = int(seen.long().cumprod(0).sum())
    if count < 2:
        return 0.0 if len(reach) > 1 else 1.0
    d = torch.arange(count, dtype=torch.float64)
    log = reach[:count].log()
    slope = ((d - d.mean()) * (log - log.mean())).sum() / (d - d.mean()).square().sum()
    return math.exp(float(slope))


# Advice, for those who write Python and for those who type commands.
CLIP = Spelt("Clip the gradient (torch.nn.utils.clip_grad_norm_)", ("Clip the gradient (", Argument("clip", 1.0), ")"))
ORTHOGONAL = Spelt("recurrent_init=lf.Orthogonal()", (Argument("recurrent_init", "orthogonal"),))
GATED = Spelt("(lf.LSTM, lf.GRU)", ("(", Argument("cell", "lstm"), ", ", Argument("cell", "gru"), ")"))
OPEN = Spelt(
    "an lf.LSTM with an open forget gate (forget_bias=1.0)",
    ("an LSTM with an open forget gate (", Argument("cell", "lstm"), " ", Argument("forget_bias", 1.0), ")"),
)
NOTHING = Spelt(
    "Look at loss_fn and at the outputs.", ("Its readout or its states are all zero: train it anew, or longer.",)
)


def _verdict(reach: Tensor, rate: float, gated: bool) -> list[object]:
    if not float(reach[0]):
        return ["no gradient: the loss does not depend on the states at all. ", NOTHING]
    if len(reach) < 2 and bool(reach.isfinite().all()):
        return ["healthy: one step only, so there is nothing to carry."]
    if not bool(reach.isfinite().all()) or float(reach.max()) > EXPLODED:
        d = int((~(reach <= EXPLODED)).nonzero()[0])
        grows = f"explodes after about {d} steps: it grows {rate:.3g}-fold with every step back"
        begin = f"{grows if d else 'explodes at once: it is not a finite number'}. "
        cell = [] if gated else [", or use a gated cell ", GATED]
        return [begin, CLIP, ", start W smaller or orthogonal (", ORTHOGONAL, ")", *cell, "."]
    if float(reach.min()) < VANISHED:
        d = int((reach < VANISHED).nonzero()[0])
        begin = f"vanishes after about {d} steps: {rate:.3g} of it is left with every step back. Use "
        cell = [OPEN] if gated else ["a gated cell ", GATED]
        return [begin, *cell, ", or start W orthogonal (", ORTHOGONAL, ")."]
    after = f"{float(reach[-1]):.2g} times its size after {len(reach) - 1} steps"
    if 0 < rate < 1:
        d = math.ceil(math.log(VANISHED) / math.log(rate))
        if d < LONG or float(reach[-1]) < FADED:
            return [
                f"fades: {rate:.3g} of it is left with every step back, {after}. At this rate it vanishes after about "
                f"{d}, so look at a longer sequence if causes may be further back than that."
            ]
    return [f"healthy: {rate:.3g} times its size with every step back, {after}."]
