"""torch's operations that the compiler expresses by others: of ordinary numbers, and at the edges of what they take."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_engines import DTYPES, ENGINES, assert_agrees
from torch import Tensor, nn

import loopfold as lf
from loopfold.engines.writing import forwards
from loopfold.stepgraph.hoist import hoist
from loopfold.stepgraph.loop import ordered

pytestmark = pytest.mark.usefixtures("one_thread")
Of = Callable[[Tensor, Tensor], Tensor]

POINTWISE: dict[str, Of] = {
    "asin": lambda a, c: torch.asin(torch.tanh(a)) + c,
    "acos": lambda a, c: torch.acos(torch.tanh(a)) * c,
    "acosh": lambda a, c: torch.acosh(1.1 + a.abs()) * c,
    "atanh": lambda a, c: torch.atanh(0.9 * torch.tanh(a)) + c,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "maximum": torch.maximum,
    "nan_to_num": lambda a, c: torch.nan_to_num(a, 0.5, 2.0) + c,
    "hardswish": lambda a, c: F.hardswish(3 * a) + c,
    "logit": lambda a, c: torch.logit(torch.sigmoid(a)) + torch.logit(torch.sigmoid(c), 0.2),
    "logaddexp": torch.logaddexp,
    "hypot": torch.hypot,
    "xlogy": lambda a, c: torch.xlogy(a, c.abs() + 0.1) + torch.xlogy(0.3, c.abs() + 0.1),
    "xlog1py": lambda a, c: torch.special.xlog1py(a, c.abs()),
    "entr": lambda a, c: torch.special.entr(a.abs() + 0.1) * c,
    "sinc": lambda a, c: torch.sinc(a) + c,
    "copysign": torch.copysign,
    "signbit": lambda a, c: torch.where(a.signbit(), a, c),
    "infinite": lambda a, c: torch.where((a / 0).isposinf() | (c / 0).isneginf(), a, c),
    "degrees": lambda a, c: torch.deg2rad(100 * a) + torch.rad2deg(c),
    "round to decimals": lambda a, c: a + torch.round(c, decimals=1) + torch.round(a, decimals=-1),
    "div to whole numbers": lambda a, c: (
        a + torch.div(a, c, rounding_mode="floor").tanh() + torch.div(c, a, rounding_mode="trunc").tanh()
    ),
    "floor_divide": lambda a, c: a + c.detach() // 0.7,
    "remainder": lambda a, c: torch.remainder(a, 0.3 + c.abs()) + c % -0.7,
    "clamp": lambda a, c: a.clamp(-0.4, 0.3) + c.clamp(min=-0.2),
    "clamp between": lambda a, c: torch.clamp(c, a, 2 * a.abs()) + torch.clamp(a, max=c),
    "powers": lambda a, c: torch.pow(-2.0, a.round()) * c + a.abs() ** 1.5 + (c.abs() + 0.1) ** -1.5,
}
ALONG: dict[str, Of] = {
    "prod": lambda a, c: a.prod(-1, keepdim=True) * c,
    "prod with zeros": lambda a, c: torch.relu(a + 1).prod(-1, keepdim=True) + F.relu(c).prod(-1, keepdim=True) + a,
    "prod in the middle": lambda a, c: torch.stack([a, c, a * c], 1).prod(1),
    "cumprod": lambda a, c: torch.cumprod(1 - torch.sigmoid(a), -1) * c,
    "cumprod with zeros": lambda a, c: torch.relu(a + 0.5).cumprod(-1) + c,
    "any": lambda a, c: torch.where((a > 1).any(-1, keepdim=True), a, c),
    "all": lambda a, c: torch.where((torch.stack([a, c], 1) > -0.5).all(1), a, c),
    "any and all numbers": lambda a, c: a * F.relu(c).any(-1, keepdim=True) + c * F.relu(a).all(-1, keepdim=True),
    "how many": lambda a, c: (a > 0).sum(-1, keepdim=True) * c + (c > 0).amax(-1, keepdim=True) * a,
    "nansum": lambda a, c: torch.where(a > 0.3, a, math.nan).nansum(-1, keepdim=True) + c.nanmean(-1, keepdim=True) * a,
    "norms": lambda a, c: sum(
        (c + a.norm(p, -1, keepdim=True) for p in (0, 0.5, 1, 1.5, 3, math.inf, -math.inf)), torch.zeros(())
    ).to(a),
    "norm of a zero": lambda a, c: sum((c + F.relu(a).norm(p, -1, keepdim=True) for p in (0.5, 1, 1.5, 3)), a),
    "normalize": lambda a, c: F.normalize(a, 1, -1) + F.normalize(c, math.inf, -1),
    "distances": lambda a, c: F.pairwise_distance(a, c, keepdim=True) * a + F.pairwise_distance(a, c, 1)[:, None],
    "var_mean": lambda a, c: torch.var_mean(a, -1, keepdim=True)[0] * c + torch.std_mean(c, -1, keepdim=True)[1] * a,
    "max and min": lambda a, c: a.max(-1, keepdim=True).values * c + torch.stack([a, c], 1).min(1)[0],
    "places": lambda a, c: a * a.max(-1, keepdim=True)[1] + c * c.min(-1)[1][:, None] + a.max(-1, True)[0],
    "maxout": lambda a, c: torch.stack([a, c], -1).max(-1)[0],
    "gumbel_softmax": lambda a, c: F.gumbel_softmax(a, hard=True, dim=-1) * c,
    "sort": lambda a, c: torch.sort(a, dim=-1, stable=True)[0] + torch.sort(c, stable=True, descending=True)[0],
    "sort in the middle": lambda a, c: torch.sort(torch.stack([a, c, a * c], 1), dim=1, stable=True)[0][:, 1],
    "sort of equals": lambda a, c: torch.sort(F.relu(a), dim=-1, stable=True)[0] * c,
    "the k largest": lambda a, c: (
        torch.zeros_like(a).scatter(1, torch.sort(a, dim=-1, stable=True, descending=True)[1][:, :2], 1.0) * c + a
    ),
    "gather": lambda a, c: c.gather(1, torch.sort(a, dim=-1, stable=True)[1]) + c.gather(1, a.argmax(-1, True)),
    "gather in the middle": lambda a, c: (
        torch.stack([a, c], 1).gather(1, torch.stack([a, c], 1).argmax(1, keepdim=True))[:, 0]
    ),
    "take_along_dim": lambda a, c: c.take_along_dim(a.argmin(-1, keepdim=True), 1) + a,
    "gather by a remainder": lambda a, c: c.gather(1, (3 * a).long() % 5) + a,
    "gather bounded": lambda a, c: c.gather(1, (2 * a).round().clamp(0, 3).long()) + a,
    "scatter": lambda a, c: a.scatter(1, a.argmax(-1, keepdim=True), c[:, :1]),
    "padding": lambda a, c: F.pad(a, (1, 0), value=0.7)[:, :-1] + F.pad(c[:, None], (2, 2), mode="reflect")[:, 0, :-4],
    "repeated edges": lambda a, c: F.pad(a[:, None], (1, 1), mode="replicate")[:, 0].unfold(1, 3, 1).sum(-1) + c,
    "diagonals": lambda a, c: torch.diag_embed(a).sum(1) + torch.rot90(a[:, :, None] * c[:, None], 1, (1, 2)).sum(1),
    "pixels": lambda a, c: F.pixel_shuffle(torch.stack([a, c, a, c], 1)[..., None], 2).sum(-1)[:, 0, ::2],
    "patches": lambda a, c: F.unfold((a[:, :, None] * c[:, None])[:, None], 3, padding=1).sum(1)[:, :5] + a,
    "twice as many": lambda a, c: F.interpolate(a[:, None], scale_factor=2)[:, 0, :5] + c,
}  # fmt: skip


class Step(nn.Module):
    """An operation on what changes from step to step, kept to an ordinary size."""

    def __init__(self, f: Of, n: int = 5) -> None:
        super().__init__()
        self.f = f
        self.W, self.U = (nn.Parameter(torch.randn(n, n) / n**0.5) for _ in range(2))

    def initial_state(self, batch: int) -> Tensor:
        return torch.linspace(-1, 1, 5).repeat(batch, 1).to(self.W)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.f(h @ self.W + x, x @ self.U - 0.5 * h))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", [*POINTWISE, *ALONG])
def test_they_have_torchs_values_and_gradients(name: str, engine: lf.Engine) -> None:
    step, x = Step((POINTWISE | ALONG)[name]).double(), torch.randn(5, 3, 5).double()
    for lengths in (None, [5, 1, 3]):
        assert_agrees(engine, step, x, lengths)


# ------------------------------------------------------------------ at the edges


class Pair(nn.Module):
    """An operation on two states of which nothing else is done."""

    def __init__(self, f: Of) -> None:
        super().__init__()
        self.f = f

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.f(*state), state[1]


EDGES = [0, -0.0, 1, -1, 0.5, -0.3, 3, -3, 6, -6, 40, -40, 1e-20, -1e-20, 1e20, -1e20, math.inf, -math.inf, math.nan]
AT_EDGES: dict[str, Of] = {
    **{f.__name__: f for f in (torch.maximum, torch.minimum, torch.fmax, torch.fmin, torch.hypot, torch.logaddexp)},
    **{f.__name__: f for f in (torch.atan2, torch.xlogy, torch.special.xlog1py, torch.copysign, torch.pow, torch.div)},
    **{
        f.__name__: lambda a, c, f=f: f(a)  # type: ignore[misc]
        for f in (torch.asin, torch.acos, torch.acosh, torch.atanh, torch.nan_to_num, torch.logit, torch.relu)
    },
    **{
        f.__name__: lambda a, c, f=f: f(a)  # type: ignore[misc]
        for f in (torch.special.entr, torch.sinc, torch.signbit, torch.isposinf, torch.isneginf, F.hardswish)
    },
    "logit of what is bounded": lambda a, c: torch.logit(a, 0.1),
    "nan_to_num with numbers": lambda a, c: torch.nan_to_num(a, 1.5, 2.0, -3.0),
    "clamp": lambda a, c: a.clamp(-1, 0.5),
    "clamp from below": lambda a, c: a.clamp(min=-1),
    "clamp by c": lambda a, c: torch.clamp(a, min=c),
    "clamp by c from above": lambda a, c: torch.clamp(a, max=c),
    "clamp between c and more": lambda a, c: torch.clamp(a, c, c + 1),
    "clamp of c, bounds in no order": lambda a, c: torch.clamp(c, a, a.abs() - 1),
    "remainder by c": lambda a, c: torch.remainder(a.clamp(-50, 50), c.round()),
    "remainder by inf": lambda a, c: torch.remainder(a, math.inf) + c,
    "div and floor": lambda a, c: torch.div(a.clamp(-50, 50), c.round(), rounding_mode="floor"),
    "div and floor, of zeros": lambda a, c: 1 / torch.div(a.clamp(-50, 50), c.round(), rounding_mode="floor"),
    "div and trunc": lambda a, c: torch.div(a, c, rounding_mode="trunc"),
    "round to decimals": lambda a, c: torch.round(a, decimals=2),
    "powers of a negative number": lambda a, c: torch.pow(-2.0, a),
    "pow, of which much comes back": lambda a, c: 1e20 * torch.pow(a, c),
    "power 1.5": lambda a, c: a**1.5,
}
# Of NaN torch gives two of these other gradients in a vector than in what is left over; of the last, NaN is left out
NO_NAN = ("hardswish", "logit of what is bounded", "clamp of c, bounds in no order")


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", AT_EDGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_they_are_torchs_at_the_edges(dtype: torch.dtype, name: str, engine: lf.Engine) -> None:
    """Every number beside every other; no warning tells of a disagreement."""
    edges = torch.tensor(EDGES[:-1] if name in NO_NAN else EDGES, dtype=dtype)
    step, n = Pair(AT_EDGES[name]), len(edges)
    if AT_EDGES[name](edges, edges).dtype == torch.bool:
        step.f = lambda a, c: AT_EDGES[name](a, c).to(a.dtype)

    def found(engine: lf.Engine) -> list[Tensor]:
        torch.manual_seed(0)
        state = edges.repeat(n, 1).requires_grad_(), edges[:, None].repeat(1, n).requires_grad_()
        y = lf.unfold(step, state=state, steps=1, engine=engine).states[0]
        if not y.requires_grad:
            return [y, *(torch.zeros_like(part) for part in state)]
        gradients = torch.autograd.grad(y, state, torch.randn(y.shape).to(y), materialize_grads=True, allow_unused=True)
        return [y.detach(), *gradients]

    for ours, theirs in zip(found(engine), found(lf.Sequential()), strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-11 if dtype == torch.float64 else 2e-5, atol=1e-30, equal_nan=True
        )


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("f", [F.hardtanh, F.softshrink, F.elu, F.hardswish], ids=lambda f: f.__name__)
def test_no_number_is_no_reason_for_distrust(f: Callable[[Tensor], Tensor], engine: lf.Engine) -> None:
    """torch itself gives two gradients: one in whole vectors, the other in what is left over."""
    for n in (1, 64):
        state = torch.full((1, n), math.nan), torch.zeros(1, n, requires_grad=True)
        lf.unfold(Pair(lambda a, c: f(a + c)), state=state, steps=1, engine=engine).states[0].sum().backward()


AT_ZERO: dict[str, Of] = {  # where nothing comes back, or all that there is
    "xlogy": lambda a, c: torch.where(c > 0, torch.xlogy(a, c), 0.0),
    "xlog1py": lambda a, c: torch.where(c > 0, torch.special.xlog1py(a, c - 1), 0.0),
    "maximum": lambda a, c: torch.maximum(a, c).abs().sqrt(),
    "minimum": lambda a, c: torch.minimum(a, c).abs().sqrt(),
    "the sign of zero": lambda a, c: 1 / torch.relu(a * 0) + c,
}


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", AT_ZERO)
def test_what_does_not_come_back_meets_no_infinite_slope(name: str, engine: lf.Engine) -> None:
    edges = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0], dtype=torch.float64)

    def found(engine: lf.Engine) -> list[Tensor]:
        state = edges.repeat(5, 1).requires_grad_(), edges[:, None].repeat(1, 5).requires_grad_()
        y = lf.unfold(Pair(AT_ZERO[name]), state=state, steps=1, engine=engine).states[0]
        return [y.detach(), *torch.autograd.grad(y.sum(), state)]

    ours, theirs = found(engine), found(lf.Sequential())
    torch.testing.assert_close(ours[:2], theirs[:2], equal_nan=True)
    if not name.startswith("xlog"):  # by c, torch's own is no number there
        torch.testing.assert_close(ours[2], theirs[2], equal_nan=True)


class Masked(nn.Module):
    """A value is compared with one that was chosen from it: on the way back both must be the same bits."""

    def __init__(self, f: Of) -> None:
        super().__init__()
        self.f, self.W = f, nn.Parameter(torch.randn(5, 5, dtype=torch.float64) / 5**0.5)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.f(h @ self.W + x, -h))


COMPARED: dict[str, Of] = {
    "the two largest": lambda a, c: torch.where(a > torch.sort(a, stable=True, descending=True)[0][:, 2:3], a, c),
    "the largest": lambda a, c: torch.where(a >= a.max(-1, True)[0], a, c),
    "the largest product": lambda a, c: torch.where(a * c >= (a * c).amax(-1, True), a, c),
    "one at a place": lambda a, c: torch.where(a >= a.gather(1, c.argmax(-1, True)), a, c),
    "the largest of two rows": lambda a, c: torch.stack([a, c], 1).amax((1, 2))[:, None] * a,
}


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", COMPARED)
def test_what_is_compared_with_a_choice_is_the_same_on_the_way_back(name: str, engine: lf.Engine) -> None:
    for seed in range(10):
        torch.manual_seed(seed)
        step, x = Masked(COMPARED[name]), torch.randn(4, 3, 5, dtype=torch.float64)
        found = []
        for each in (engine, lf.Sequential()):
            given = x.clone().requires_grad_()
            start = torch.full((3, 5), 0.1, dtype=torch.float64)
            lf.unfold(step, given, state=start, engine=each).states.sum().backward()
            assert given.grad is not None
            found.append(given.grad)
        torch.testing.assert_close(*found)


class OfBoth(nn.Module):
    def __init__(self, f: Any) -> None:
        super().__init__()
        self.f = f

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.f(h, x)


OF_TRUTHS: dict[str, Of] = {
    "cumsum": lambda a, c: (a > 0).cumsum(-1, dtype=a.dtype) * c,
    "cumprod": lambda a, c: (a > -1).cumprod(-1, dtype=a.dtype) * c,
    "prod": lambda a, c: (a > -1).prod(-1, True, dtype=a.dtype) * c,
    "mean": lambda a, c: (a > 0).mean(-1, True, dtype=a.dtype) * c,
    "order": lambda a, c: c.gather(1, torch.sort(a > 0, dim=-1, stable=True)[1]) + a,
    "in order": lambda a, c: torch.where(torch.sort(a > 0, dim=-1, stable=True)[0], a, c),
    "a place times a number": lambda a, c: 0.1 * a.argmax(-1, keepdim=True) + c,
}
OUTSIDE: dict[str, Any] = {  # indices that do not hang on the state
    "argmax": lambda h, x: h.gather(1, x.argmax(-1, True)) + x,
    "argmax, bounded": lambda h, x: h.gather(1, x.argmax(-1, True).clamp(0, 4)) + x,
    "an order": lambda h, x: h.gather(1, torch.sort(x, stable=True)[1]) * 0.9 + x,
    "remainders": lambda h, x: h.gather(1, (3 * x).long() % 5) * 0.9 + x,
    "take_along_dim": lambda h, x: h.take_along_dim(x.argmax(-1, True), -1) + x,
    "scatter": lambda h, x: h.scatter(1, x.argmax(-1, True), 0.5) * 0.9 + x,
    "moved": lambda h, x: h.gather(1, torch.sort(x, stable=True)[1].flip(1).clamp(1, 3)) * 0.9 + x,
}


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", [*OF_TRUTHS, *OUTSIDE])
def test_truth_values_and_indices_of_x(name: str, engine: lf.Engine) -> None:
    torch.manual_seed(0)
    f = OfBoth(OUTSIDE[name] if name in OUTSIDE else lambda h, x: OF_TRUTHS[name](h, x).tanh())
    x = torch.randn(6, 3, 5, dtype=torch.float64)
    torch.set_default_dtype(torch.float64)
    try:
        found = []
        for each in (engine, lf.Sequential()):
            given = x.clone().requires_grad_()
            states = lf.unfold(f, given, state=torch.ones(3, 5).cumsum(1), engine=each).states
            states.square().sum().backward()
            found.append((states.detach(), given.grad))
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(*found)


def test_a_product_of_many_is_left_to_torch() -> None:
    step, x = OfBoth(lambda h, x: h.cumprod(1) + x), torch.randn(4, 3, 33)
    with pytest.raises(ValueError, match="aten.cumprod over 33 features is too large for a kernel"):
        lf.unfold(step, x, state=torch.zeros(3, 33), engine=lf.FusedCPU())


# ------------------------------------------------------------------ with tables, and refusals


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bilinear, self.levels = nn.Bilinear(5, 4, 3), nn.Parameter(torch.randn(4, 5))
        self.register_buffer("bounds", torch.tensor([-0.5, 0.0, 0.5]))

    def initial_state(self, batch: int) -> Tensor:
        return torch.linspace(-1, 1, 5).repeat(batch, 1).to(self.levels)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        assert isinstance(self.bounds, Tensor)
        both = F.pad(self.bilinear(h, x[:, :4]), (1, 1), value=0.1)
        level = self.levels[torch.bucketize(h, self.bounds)].mean(1)
        above = torch.searchsorted(self.bounds, both, side="right") * both
        return torch.tanh(both + level * h + above + torch.bucketize(h, self.bounds, right=True))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
def test_bilinear_products_and_buckets(engine: lf.Engine) -> None:
    step, x = Tables().double(), torch.randn(5, 3, 5).double()
    for lengths in (None, [5, 1, 3]):
        assert_agrees(engine, step, x, lengths)


def test_what_is_no_number_falls_into_the_last_bucket() -> None:
    bounds, h = torch.tensor([0.0, 1, 1, 2]), torch.tensor([[-1, 0, 0.5, 1, 2, 3, math.nan, math.inf, -math.inf]])

    class Falls(nn.Module):
        def __init__(self, right: bool) -> None:
            super().__init__()
            self.right = right
            self.register_buffer("bounds", bounds)

        def forward(self, h: Tensor) -> Tensor:
            assert isinstance(self.bounds, Tensor)
            return torch.bucketize(h, self.bounds, right=self.right).to(h.dtype)

    for right in (False, True):
        for engine in ENGINES:
            found = lf.unfold(Falls(right), state=h, steps=1, engine=engine).last
            assert torch.equal(found, torch.bucketize(h, bounds, right=right).float())


@pytest.mark.parametrize(
    ("f", "words"),
    [
        (lambda a, c: a.sort(-1).values, r"aten\.sort has no kernel\. torch\.sort\(v, dim=-1, stable=True\) has one"),
        (lambda a, c: a.topk(2).values.sum(-1, True) + c, r"aten\.topk has no kernel\. torch\.sort\(v, dim=-1, stable"),
        (lambda a, c: a * a.max(), r"aten\.max mixes the sequences"),
        (lambda a, c: a * (a > 0).any(), r"aten\.any mixes the sequences"),
        (lambda a, c: a.gather(0, a.argmax(0, keepdim=True)) + c, r"aten\.argmax mixes the sequences"),
        (lambda a, c: a.norm(-2, -1, keepdim=True) + c, r"aten\.linalg_vector_norm of order -2 has no kernel"),
        (lambda a, c: c.gather(1, a.long()), r"an index into 5 numbers may be any.*index\.clamp\(0, 4\)"),
        (lambda a, c: c.scatter(1, torch.sort(a, stable=True)[1], a), r"aten\.scatter has a kernel for one number"),
        (lambda a, c: a[:, :0].prod(-1, keepdim=True) + c, "it works along dimensions without a number"),
        (lambda a, c: torch.special.digamma(a) + c, r"aten\.digamma has no kernel"),
    ],
)
def test_the_rest_is_refused_in_words(f: Any, words: str) -> None:
    for engine in ENGINES:
        with pytest.raises(ValueError, match=words):
            lf.unfold(Step(f), torch.randn(3, 2, 5), engine=engine)


def test_more_comparisons_than_a_kernel_takes_are_refused() -> None:
    step = Pair(lambda a, c: torch.sort(a, dim=-1, stable=True)[0])
    with pytest.raises(ValueError, match="too large for a kernel: it takes 490000 comparisons"):
        lf.unfold(step, state=(torch.randn(2, 700), torch.randn(2, 700)), steps=2, engine=lf.Looped())


def test_a_count_that_half_precision_does_not_hold_is_refused() -> None:
    step, state = Pair(lambda a, c: c * (a > 0).sum(-1, keepdim=True)), torch.randn(2, 300).bfloat16()
    with pytest.raises(ValueError, match=r"aten\.sum over 301 numbers: torch\.bfloat16 has not every place exactly"):
        lf.unfold(step, state=(state, state), steps=2, engine=lf.Looped())


def test_what_only_gradients_read_is_not_computed_forwards() -> None:
    loop = hoist(lf.step_graph(Pair(torch.logaddexp), None, (torch.randn(2, 5), torch.randn(2, 5))))
    assert "sigmoid" in {v.op for v in ordered(loop.emitted)}
    assert "sigmoid" not in {v.op for v in ordered(forwards(loop).out)}
