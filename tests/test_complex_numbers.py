"""Steps that compute with complex numbers: compiled as real arithmetic, and equal to `Sequential`."""

import shutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulation import Emulated
from test_engines import errors
from torch import Tensor, nn

import loopfold as lf
from loopfold.engines.cuda_plan import Geometry
from loopfold.states import State, leaves

pytestmark = pytest.mark.usefixtures("one_thread")


class Diagonal(lf.Transition):
    """h(t) = λ ⊙ h(t-1) + γ ⊙ B x(t), and the output D Re(C h(t)): a linear recurrent unit (Orvieto et al., 2023)."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.n = n
        self.decay, self.angle = nn.Parameter(torch.randn(n)), nn.Parameter(3 * torch.rand(n))
        self.B = nn.Parameter(torch.randn(n, n_in, dtype=torch.complex128) / n_in)
        self.C = nn.Parameter(torch.randn(n_in, n, dtype=torch.complex128) / n)

    def initial_state(self, batch: int) -> Tensor:
        return torch.zeros(batch, self.n, dtype=self.B.dtype)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        lam = torch.exp(torch.complex(-torch.exp(self.decay), self.angle))
        h = lam * h + (1 - lam.abs() ** 2).sqrt() * (x.to(self.B.dtype) @ self.B.T)
        return (h @ self.C.T).real + x, h


class Dense(lf.Transition):
    """A whole matrix W, modReLU (Arjovsky, Shah and Bengio, 2016), and a real state beside the complex one."""

    turn: Tensor

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.n = n
        self.W = nn.Parameter(torch.randn(n, n, dtype=torch.complex128) / n)
        self.U, self.b = nn.Linear(n_in, n), nn.Parameter(torch.randn(n))
        self.register_buffer("turn", torch.polar(torch.ones(n), torch.arange(n).double()))

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor]:
        return torch.ones(batch, self.n, dtype=self.W.dtype), torch.zeros(batch, self.n)

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        z, power = state
        z = (z @ self.W.T) * self.turn + self.U(x)
        z = torch.relu(z.abs() + self.b) * z.sgn()
        return z, 0.9 * power + (z * z.conj()).real


class Oscillators(lf.Transition):
    """All real outside: pairs of numbers are turned, as complex ones inside the step."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.n = n
        self.angle, self.U = nn.Parameter(torch.randn(n)), nn.Linear(n_in, 2 * n)

    def initial_state(self, batch: int) -> Tensor:
        return torch.zeros(batch, self.n, 2)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        z = torch.view_as_complex(h) * torch.exp(1j * self.angle)
        z = z + torch.view_as_complex(self.U(x).view(-1, self.n, 2))
        return torch.view_as_real(z / (1 + z.abs()))


CELLS = [Diagonal, Dense, Oscillators]
Make = Callable[[int, int], nn.Module]


def everything(f: nn.Module, x: Tensor, engine: lf.Engine, **more: Any) -> dict[str, Tensor]:
    """States, outputs and all gradients of a loss on all of them, as real numbers."""
    x = x.clone().requires_grad_()
    f.zero_grad()
    run = lf.unfold(f, x, engine=engine, **more)
    parts = [*leaves(run.states), *leaves(run.last), *([] if run.outputs is None else leaves(run.outputs))]
    random = torch.Generator().manual_seed(3)
    loss = sum(
        (real(t) * torch.randn(real(t).shape, generator=random, dtype=torch.float64).to(real(t))).sum() for t in parts
    )
    assert isinstance(loss, Tensor)
    loss.backward()
    found = {f"part {i}": t.detach() for i, t in enumerate(parts)}
    assert x.grad is not None
    found |= {"x": x.grad, **{name: p.grad for name, p in f.named_parameters() if p.grad is not None}}
    return {name: real(t) for name, t in found.items()}


def real(t: Tensor) -> Tensor:
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


@pytest.fixture(autouse=True)
def _doubles() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


ENGINES = [lf.FusedCPU(), lf.Looped(), lf.Checkpointed(lf.FusedCPU(), every=4), lf.Auto()]


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("make", CELLS)
@pytest.mark.parametrize(("tau", "batch", "n"), [(1, 1, 3), (9, 1, 17), (13, 5, 3)])
def test_complex_cells_agree(make: Make, engine: lf.Engine, tau: int, batch: int, n: int) -> None:
    f, x = make(4, n), torch.randn(tau, batch, 4)
    for lengths in (None, [1 + (3 * i) % tau for i in range(batch)]):
        truth = everything(f, x, lf.Sequential(), lengths=lengths)
        assert max(errors(everything(f, x, engine, lengths=lengths), truth).values()) < 1e-11


ON_A_GPU = Emulated(Geometry(blocks=3, rows=8, warps=2))


@pytest.mark.parametrize("make", CELLS)
def test_complex_cells_in_single_precision(make: Make) -> None:
    f, x = make(4, 17), torch.randn(20, 3, 4)
    truth = everything(f, x, lf.Sequential())
    with torch.no_grad():
        for p in (*f.parameters(), *f.buffers()):
            p.data = p.data.to(torch.complex64 if p.is_complex() else torch.float32)
    torch.set_default_dtype(torch.float32)
    engines: list[lf.Engine] = [lf.FusedCPU(), lf.Looped()]
    if make is not Oscillators and shutil.which("g++"):  # whose rows of pairs have no kernel on a GPU
        engines.append(ON_A_GPU)
    for engine in engines:
        found = everything(f, x.float(), engine)
        assert {t.dtype for t in found.values()} == {torch.float32}
        assert max(errors(found, truth).values()) < 1e-4


@pytest.mark.parametrize("make", CELLS)
def test_they_are_compiled(make: Make) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = lf.Recurrent(make(4, 8)).explain(torch.randn(30, 3, 4))
    assert "FusedCPU, because its loop is native code" in text
    assert "complex128 on cpu" in text or make is Oscillators


class Given(lf.Transition):
    """A step of one line."""

    def __init__(self, function: Callable[[Tensor, Tensor, Any], Any], n: int = 4) -> None:
        super().__init__()
        self.function, self.n = function, n
        self.w = nn.Parameter(torch.randn(n, dtype=torch.complex128))
        self.M = nn.Parameter(torch.randn(n, n, dtype=torch.complex128) / n)
        self.register_buffer("order", torch.tensor([2, 0, 3, 1]))

    def initial_state(self, batch: int) -> Tensor:
        return torch.randn(batch, self.n, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.function(z, x, self)


OUTSIDE = torch.ones(4, dtype=torch.complex128)
OPERATIONS: dict[str, Callable[[Tensor, Tensor, Any], Tensor]] = {
    "add": lambda z, x, f: torch.add(z, x, alpha=0.5) + f.w + (1 - 2j),
    "sub": lambda z, x, f: 0.5 * (x - z) - torch.sub(f.w, z, alpha=0.25) - 1j,
    "rsub": lambda z, x, f: 0.3 * ((2 + 1j) - z) + x,
    "mul": lambda z, x, f: z * f.w * x * (0.3 + 0.2j) + 0.1,
    "times i": lambda z, x, f: 0.9j * z + 1j * x,
    "div": lambda z, x, f: (z + x) / (f.w + 2) + 1 / (z + 3) + x / (z + 3j),
    "div by a number": lambda z, x, f: z / (1 + 2j) + z / 2.0 + x / (1 - 1j),
    "div by real ones": lambda z, x, f: z / (x.abs() + 1),
    "reciprocal": lambda z, x, f: torch.reciprocal(z + 2) + x,
    "neg": lambda z, x, f: -z * 0.5 + x,
    "conj": lambda z, x, f: z.conj() * f.w.conj() + x,
    "conj of a product": lambda z, x, f: (z.conj() @ f.M).conj() * 0.5 + x,
    "abs": lambda z, x, f: z / (1 + z.abs()) + x,
    "angle": lambda z, x, f: torch.polar(torch.tanh(z.abs() + x), z.angle() + 0.1),
    "sgn": lambda z, x, f: 0.5 * torch.sgn(z) + x,
    "exp": lambda z, x, f: torch.exp(0.1 * z) * f.w + x,
    "log": lambda z, x, f: torch.log(z + 3 + x.abs()),
    "square": lambda z, x, f: 0.1 * z**2 + z.square() * 0.1 + x,
    "powers": lambda z, x, f: 0.1 * z**1 + 0.1 * z**2.0 + (z + 3) ** -1 + (z + 3) ** -2.0 + x,
    "cube": lambda z, x, f: 0.05 * z**3 + x,
    "mm": lambda z, x, f: z @ f.M.T + x,
    "mm of real ones": lambda z, x, f: x @ f.M.real + z * 0.5 + (x.to(z.dtype) @ f.M),
    "matvec": lambda z, x, f: torch.einsum("bi,ji->bj", z, f.M) * 0.5 + x,
    "bmm": lambda z, x, f: torch.bmm(z[:, None], f.M.expand(len(z), -1, -1))[:, 0] + x,
    "addmm": lambda z, x, f: torch.addmm(f.w, z, f.M, beta=0.5, alpha=0.3j) + x,
    "outer": lambda z, x, f: (z[:, :, None] * z.conj()[:, None, :]).sum(-1) * 0.1 + x,
    "real and imag": lambda z, x, f: torch.complex(z.imag + x, 0.5 * z.real) * 0.7,
    "real of a new one, twice": lambda z, x, f: z * 0.5 + ((w := torch.complex(x, x)).real + w.real) * x,
    "real twice": lambda z, x, f: 0.3 * z * (z.real + z.real) + (v := f.w * z).real * v.real + x,
    "views": lambda z, x, f: torch.view_as_complex(torch.view_as_real(z).flip(-1).contiguous() * 0.5) + x,
    "padding with a number": lambda z, x, f: 0.5 * nn.functional.pad(z, (1, -1), value=0.5) + x,
    "moves": lambda z, x, f: torch.cat([z[:, 2:], z[:, :2]], 1).flip(1).roll(1, 1) * 0.5 + x,
    "cat with real ones": lambda z, x, f: 0.5 * torch.cat([z[:, 2:], x[:, :2].to(z.dtype)], 1),
    "stack": lambda z, x, f: torch.stack([z, f.w.expand_as(z)], 1).mean(1) + x,
    "split": lambda z, x, f: torch.cat([a * b for a, b in zip(z.split(2, 1), f.w.chunk(2), strict=True)], 1) + x,
    "sums": lambda z, x, f: 0.1 * (z.sum(1, keepdim=True) + z.mean(1, keepdim=True) + z.cumsum(1)) + x,
    "where": lambda z, x, f: torch.where(z.real > 0, 0.5 * z, f.w + x) + torch.where(x > 0, 0.1j * z, 0.2),
    "masked_fill": lambda z, x, f: (0.5 * z + x).masked_fill(x > 1, 1 - 1j),
    "masked_fill by a tensor": lambda z, x, f: (
        z.masked_fill(x > 1, torch.tensor(0.5)).masked_fill(x < -1, torch.tensor(1 - 1j)) * 0.5
        + z.masked_fill(x > 0, f.w[0]) * 0.1
        + x
    ),
    "sums in another dtype": lambda z, x, f: 0.1 * z.sum(1, True, dtype=torch.complex128) + x,
    "vdot": lambda z, x, f: z * 0.5 + torch.vdot(f.w, f.M[0]) + x,
    "new ones": lambda z, x, f: z * 0.5 + torch.ones_like(z) + torch.full_like(z, 0.5j) + z.new_zeros(1) + x,
    "a constant": lambda z, x, f: z * torch.tensor(0.5 + 0.1j) + torch.tensor(0.1) * x,
    "norm": lambda z, x, f: z / (1 + torch.linalg.vector_norm(z, dim=1, keepdim=True)) + x,
    "lerp": lambda z, x, f: torch.lerp(z, f.w.expand_as(z), torch.tensor(0.3 + 0j)) + x,
    "addcmul": lambda z, x, f: torch.addcmul(x.to(z.dtype), z, f.w, value=0.3),
    "equal": lambda z, x, f: z * 0.5 + (z != z.conj()).to(x.dtype) * x,
    "equal to a number": lambda z, x, f: z * 0.5 + ((0 * z == 0j) & (x != 1j)).to(x.dtype) * x,
    "equal at ∞": lambda z, x, f: (
        z * 0.5 + (torch.log(0 * z.abs()) + 0j == torch.complex(0 * x - torch.inf, 0 * x)) * x
    ),
    "detach": lambda z, x, f: z * 0.5 + z.detach() * 0.1 + x.to(z.dtype).clone(),
    "a permutation": lambda z, x, f: z[:, f.order] * 0.5 + f.w[f.order] + x,
    "a table": lambda z, x, f: z * 0.5 + f.M[(x[:, 0] > 0).long()] + x,
    "padding": lambda z, x, f: nn.functional.pad(z[:, :3], (1, 0)) + x,
    "fft": lambda z, x, f: torch.fft.ifft(torch.fft.fft(z) * f.w) * 0.5 + torch.fft.fft(z, norm="ortho") * 0.1 + x,
    "rfft": lambda z, x, f: z * 0.5 + torch.fft.irfft(torch.fft.rfft(x + z.real) * torch.fft.rfft(f.M.real[0]), n=4),
    "rfft of odd lengths": lambda z, x, f: (
        z * 0.5 + torch.fft.irfft(torch.fft.rfft(x[:, :3] + z.imag[:, :3]), n=3)[:, :1]
    ),
    "to real": lambda z, x, f: (z.real.to(torch.complex128) + 1j * z.imag) * 0.5 + x,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_of_complex_numbers(name: str) -> None:
    f, x = Given(OPERATIONS[name]), torch.randn(7, 3, 4)
    truth = everything(f, x, lf.Sequential())
    for engine in (lf.FusedCPU(), lf.Looped()):
        assert max(errors(everything(f, x, engine), truth).values()) < 1e-11


@pytest.mark.parametrize("seed", range(25))
def test_random_steps_of_complex_numbers(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    names = list(OPERATIONS)
    chosen = [OPERATIONS[names[int(torch.randint(len(names), (), generator=random))]] for _ in range(4)]

    def function(z: Tensor, x: Tensor, f: Any) -> Tensor:
        for operation in chosen:
            z = operation(z / (1 + z.abs()), x, f)
        return z / (1 + z.abs())

    f, x = Given(function), torch.randn(6, 3, 4)
    truth = everything(f, x, lf.Sequential())
    for engine in (lf.FusedCPU(), lf.Looped()):
        assert max(errors(everything(f, x, engine), truth).values()) < 1e-10


@torch.no_grad()
def test_real_numbers_are_put_among_complex_ones() -> None:
    """torch has no gradient for these."""
    for function in (
        lambda z, x, f: z * 0.5 + torch.select_scatter(z, x[:, 0], 1, 2),
        lambda z, x, f: z * 0.5 + torch.slice_scatter(x * z, x[:, :2], 1, 1, 3),
        lambda z, x, f: torch.diagonal_scatter(z[:, :, None] * x[:, None], x, 0, 1, 2).mean(1),
    ):
        f, x = Given(function), torch.randn(5, 2, 4)
        for engine in (lf.FusedCPU(), lf.Looped()):
            torch.testing.assert_close(
                lf.unfold(f, x, engine=engine).states, lf.unfold(f, x, engine=lf.Sequential()).states
            )


def test_angles_of_zeros_are_those_of_their_signs() -> None:
    f, zero = Given(lambda z, x, f: torch.complex(x.angle(), 0 * x.real)), torch.tensor([0.0, -0.0])
    x = torch.complex(*torch.meshgrid(zero, zero, indexing="ij")).view(1, 1, 4)
    for engine in (lf.FusedCPU(), lf.Looped()):
        assert torch.equal(lf.unfold(f, x, engine=engine).states.real[0], x[0].angle())


def test_at_zero_gradients_are_those_of_torch() -> None:
    for function in (
        lambda z, x, f: z * 0 + x * z.abs(),
        lambda z, x, f: z * 0 + x * z.sgn(),
        lambda z, x, f: z * 0 + x * z.angle(),
    ):
        f, x = Given(function), torch.randn(5, 2, 4)
        start = torch.zeros(2, 4, dtype=torch.complex128, requires_grad=True)
        for engine in (lf.Sequential(), lf.FusedCPU(), lf.Looped()):
            run = lf.unfold(f, x, state=start, engine=engine)
            (g,) = torch.autograd.grad(real(run.states).sum(), start)
            assert torch.equal(g, torch.zeros_like(g))


def test_large_and_small_divisors() -> None:
    f, x = Given(lambda z, x, f: x / z), torch.ones(1, 3, 4)
    for size in (1e-300, 1e-160, 1e160, 1e300):
        start = size * torch.randn(3, 4, dtype=torch.complex128)
        run, truth = (lf.unfold(f, x, state=start, engine=e).last for e in (lf.Looped(), lf.Sequential()))
        torch.testing.assert_close(run, truth, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda z, x, f: z.mul_(2), "in place"),
        (lambda z, x, f: (z * 1).mul_(2), "updates complex numbers in place"),
        (lambda z, x, f: torch.complex((z * 2).real.mul_(2), x), "updates a part of complex numbers in place"),
        (lambda z, x, f: torch.linalg.eigvals(f.M) * z, "aten.linalg_eig of complex numbers has no kernel"),
        (lambda z, x, f: torch.fft.fft(z, dim=0), "a Fourier transform has a kernel for rows"),
        (lambda z, x, f: z**0.5, "aten.pow of complex numbers has a kernel for exponents 1 to 8"),
        (lambda z, x, f: z + OUTSIDE, "neither its parameter nor its buffer"),
    ],
)
def test_what_is_not_compiled_is_told(function: Any, words: str) -> None:
    reason = lf.Recurrent(Given(function), lf.FusedCPU()).explain(torch.randn(5, 2, 4))
    assert words in reason, reason


def test_complex_inputs_contexts_and_states_of_several_parts() -> None:
    class Many(lf.Transition):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, dtype=torch.complex128))

        def initial_state(self, batch: int) -> State:
            return torch.zeros(batch, 4), (torch.zeros(batch, 4, dtype=torch.complex128), torch.zeros(batch, 2))

        def forward(self, state: State, x: Tensor, c: Tensor, t: Tensor) -> State:
            a, (z, b) = state
            z = 0.5 * z * self.w + x * c
            return a * 0.5 + z.abs(), (z, b + t)

    f, x, c = Many(), torch.randn(6, 3, 4, dtype=torch.complex128), torch.randn(3, 4, dtype=torch.complex128)
    c.requires_grad_()
    truth = everything(f, x, lf.Sequential(), context=c)
    for engine in (lf.FusedCPU(), lf.Looped()):
        assert max(errors(everything(f, x, engine, context=c), truth).values()) < 1e-12


@pytest.mark.parametrize("make", CELLS)
def test_a_stepper_takes_complex_steps(make: Make) -> None:
    f, x = make(4, 5), torch.randn(12, 2, 4)
    run, stepper = lf.unfold(f, x, engine=lf.Sequential()), lf.Stepper(f)
    outputs = run.hidden if run.outputs is None else run.outputs
    for t in range(12):
        torch.testing.assert_close(stepper.step(x[t]), outputs[t].detach())
        for now, then in zip(leaves(stepper.state), leaves(run.states), strict=True):
            torch.testing.assert_close(now, then[t].detach())
    assert "native code, the whole step in one call" in stepper.explain()
    stepper.reset(state=lf.states.map_state(lambda leaf: leaf[3].detach(), run.states))
    torch.testing.assert_close(stepper.step(x[4]), outputs[4].detach())


@pytest.mark.parametrize("change", ["in place", "other memory"])
def test_a_stepper_sees_that_complex_parameters_change(change: str) -> None:
    f, x = Diagonal(4, 5), torch.randn(1, 4)
    stepper = lf.Stepper(f)
    for _ in range(5):  # more than are checked whatever it costs
        stepper.step(x)
    before = stepper.state
    with torch.no_grad():
        if change == "in place":
            f.B.mul_(-2j)
        else:
            f.B.data = torch.randn_like(f.B)
    torch.testing.assert_close(stepper.step(x), f(before, x)[0].detach())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore:Torchinductor does not support", "ignore::DeprecationWarning")
@pytest.mark.usefixtures("fresh_compiler")
def test_conjugates_are_conjugated_under_torch_compile(backend: str) -> None:
    for engine in (lf.Sequential(), lf.FusedCPU()):
        layer, x = lf.Recurrent(Dense(4, 5), engine), torch.randn(6, 2, 4)
        expected = everything_of(layer, x, layer)
        found = everything_of(layer, x, torch.compile(layer, fullgraph=True, backend=backend))
        assert max(errors(found, expected).values()) < 1e-11


def everything_of(layer: nn.Module, x: Tensor, call: Any) -> dict[str, Tensor]:
    layer.zero_grad()
    states = leaves(call(x).states)
    sum(real(leaf).square().sum() for leaf in states).backward()  # type: ignore[union-attr]
    found = {f"state {i}": real(leaf.detach()) for i, leaf in enumerate(states)}
    return found | {name: real(p.grad) for name, p in layer.named_parameters() if p.grad is not None}


def test_what_cannot_read_complex_numbers_says_so() -> None:
    f, x = Dense(4, 5), torch.randn(6, 2, 4)
    with pytest.raises(ValueError, match="cannot be exported: it holds or reads complex numbers"):
        lf.export(f, "step.c", x=torch.zeros(1, 4))
    with pytest.raises(ValueError, match="a readout reads real numbers, and the hidden states are complex"):
        lf.SequenceToSequence(f, outputs=2)(x)
    assert "TimeParallel refuses, because it holds or reads complex numbers" in lf.Recurrent(
        f, lf.TimeParallel()
    ).explain(x)


@pytest.mark.parametrize("make", CELLS)
def test_they_are_drawn_as_they_are_written(make: Make) -> None:
    f = make(4, 5)
    for level in lf.Level:
        assert lf.draw(f, level=level, steps=2).svg().count("<text") > 10
    assert "sgn" in lf.draw(Dense(4, 5), level=lf.Level.OPERATIONS).svg()


def test_eigenvalues_of_a_complex_matrix() -> None:
    f = Dense(4, 5)
    torch.testing.assert_close(
        lf.eigenvalues(f).values["W"].abs().sort().values, torch.linalg.eigvals(f.W.detach()).abs().sort().values
    )


def test_gradients_are_followed_through_complex_states() -> None:
    model, x, y = lf.SequenceToSequence(Diagonal(4, 5), lf.Reals(2)), torch.randn(7, 2, 4), torch.randn(7, 2, 2)
    shares = lf.per_step_gradients(model, model.loss, x, y)
    model.zero_grad()
    model.loss(model(x), y).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(shares[name.rpartition(".")[2]].sum(0), p.grad)
    flow = lf.gradient_flow(model, model.loss, x, y)
    f: Any = model.recurrent.cell
    lam = torch.exp(torch.complex(-torch.exp(f.decay), f.angle)).detach()  # by hand: ∂L(t)/∂h(k) = ∂L(t)/∂h(t) λ̄^(t-k)
    h = lf.unfold(f, x).states.detach()[5:6].requires_grad_()
    o = model.readout((h @ f.C.T).real + x[5:6])
    (g,) = torch.autograd.grad(model.loss(o, y[5:6]), h)
    torch.testing.assert_close(flow.norms[5, 2], (g * lam.conj() ** 3).norm())
    assert "<svg" in lf.draw(model, steps=7, gradients=True, x=x, y=y).svg()


def test_zeros_are_found_for_complex_states() -> None:
    class Bare(lf.Transition):
        def __init__(self, dense: bool) -> None:
            super().__init__()
            self.dense, self.W = dense, nn.Parameter(torch.randn(5, 5, dtype=torch.complex128) / 5)
            self.U = nn.Linear(4, 5)

        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            return (h @ self.W if self.dense else h * self.W[0]) + self.U(x)

    for dense in (False, True):
        run = lf.unfold(Bare(dense), torch.randn(6, 2, 4), engine=lf.FusedCPU())
        assert run.hidden.dtype == torch.complex128
        assert run.hidden.shape == (6, 2, 5)


def test_zeros_have_the_precision_of_what_is_complex() -> None:
    class Alone(lf.Transition):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(5, dtype=torch.complex128))

        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            return 0.5 * h * self.w + x

    torch.set_default_dtype(torch.float32)
    run = lf.unfold(Alone(), torch.randn(6, 2, 5, dtype=torch.complex128), engine=lf.FusedCPU())
    assert run.hidden.dtype == torch.complex128


def test_a_complex_state_is_not_stored_in_an_exported_program() -> None:
    class Hidden(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return real(self.layer(x).states)

    model, x = Hidden(lf.Recurrent(Diagonal(4, 5))), torch.randn(6, 2, 4)
    with pytest.warns(lf.EngineWarning, match="Diagonal is not stored in the program.*: its state or x is complex"):
        program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x))


def test_numbers_taken_for_others_are_refused() -> None:
    for function in (
        lambda z, x, f: z * 0.5 + z.view(torch.float64)[:, :4] + x,
        lambda z, x, f: z * 0.5 + x.view(torch.complex128).sum(1, True),
    ):
        with pytest.raises(ValueError, match="it takes complex numbers for real ones, or real for complex. Use torch"):
            lf.unfold(Given(function), torch.randn(6, 3, 4), engine=lf.FusedCPU())
