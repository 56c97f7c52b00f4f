"""One step: the equations of each cell, how it starts, and what may be a state."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from helpers import FastAndSlow, LearnedStart, Memory, TwoMatrices, assert_same, gradients, randn
from torch import Tensor, nn

import loopfold as lf
from loopfold.states import Step, describe, leaves, map_state, rebuild, zero_state
from loopfold.training.cells import make_cell
from loopfold.training.options import Options
from loopfold.transitions import CELLS, Cell, example_inputs

pytestmark = pytest.mark.usefixtures("one_thread")
f64 = torch.float64


def test_elman_is_the_books_equation() -> None:
    """M7: a = b + W h + U x, h = tanh(a), for one sequence at a time and without matrix tricks."""
    cell, h, x = lf.Elman(3, 5, dtype=f64), randn(2, 5), randn(2, 3)
    for i in range(2):
        a = cell.b + torch.mv(cell.W, h[i]) + torch.mv(cell.U, x[i])
        assert_same(cell(h, x)[i], a.tanh())


@pytest.mark.parametrize("phi", [torch.tanh, torch.relu, torch.sigmoid, nn.Softplus(), lambda a: a.clamp(-1, 1)])
def test_the_activation_is_a_choice(phi: Callable[[Tensor], Tensor]) -> None:
    """M10"""
    cell, h, x = lf.Elman(3, 5, phi, dtype=f64), randn(2, 5), randn(2, 3)
    assert_same(cell(h, x), phi(cell.b + h @ cell.W.T + x @ cell.U.T))


def test_the_activation_decides_how_much_gradient_passes() -> None:
    """M10: relu passes all of it or nothing; tanh passes 1 - h²."""
    h, x, W = randn(1, 4).requires_grad_(), randn(1, 3), randn(4, 4)
    for phi in (torch.tanh, torch.relu):
        cell = lf.Elman(3, 4, phi, dtype=f64)
        cell.W.data.copy_(W)
        new = cell(h, x)
        passed = 1 - new**2 if phi is torch.tanh else (new > 0).to(f64)
        assert_same(gradients(new.sum(), {}, h=h)["h"], passed @ W)


def test_two_products_are_one_product_of_the_concatenation() -> None:
    """M11: h W + x U = [h, x] [W; U], in value and gradient."""
    cell, h, x = lf.Elman(3, 5, dtype=f64), randn(2, 5), randn(2, 3)
    both = torch.cat([cell.W.T, cell.U.T]).detach().requires_grad_()
    one_product = torch.tanh(cell.b + torch.cat([h, x], -1) @ both)
    assert_same(one_product, cell(h, x))
    found = gradients(cell(h, x).square().sum(), cell)
    assert_same(gradients(one_product.square().sum(), {"both": both})["both"], torch.cat([found["W"].T, found["U"].T]))


def test_without_the_hidden_term_it_is_a_multilayer_perceptron() -> None:
    """M12: the same formula, less h(t-1)."""
    cell, x = lf.Elman(3, 5, dtype=f64), randn(7, 2, 3)
    mlp = nn.Sequential(nn.Linear(3, 5, dtype=f64), nn.Tanh())
    mlp.load_state_dict({"0.weight": cell.U.detach(), "0.bias": cell.b.detach()})
    cell.W.data.zero_()
    assert_same(lf.unfold(cell, x).hidden, mlp(x))


def test_lstm_is_torchs() -> None:
    ours, theirs = lf.LSTM(3, 5, dtype=f64), nn.LSTM(3, 5, dtype=f64)
    weights = {"weight_ih_l0": ours.U, "weight_hh_l0": ours.W, "bias_ih_l0": ours.b, "bias_hh_l0": 0 * ours.b}
    theirs.load_state_dict({k: w.detach() for k, w in weights.items()})
    x, h, c = randn(7, 2, 3).requires_grad_(), randn(2, 5).requires_grad_(), randn(2, 5).requires_grad_()
    run = lf.unfold(ours, x, lf.LSTMState(h, c))
    output, (last_h, last_c) = theirs(x, (h[None], c[None]))
    assert_same((run.hidden, run.last.h, run.last.c), (output, last_h[0], last_c[0]))

    came = gradients((run.hidden.sin().sum() + run.last.c.sum()), ours, x=x, h=h, c=c)
    needed = gradients((output.sin().sum() + last_c.sum()), theirs, x=x, h=h, c=c)
    for name, torchs in {
        "U": "weight_ih_l0",
        "W": "weight_hh_l0",
        "b": "bias_ih_l0",
        "x": "x",
        "h": "h",
        "c": "c",
    }.items():
        assert_same(came[name], needed[torchs])


def test_gru_is_torchs() -> None:
    ours, theirs = lf.GRU(3, 5, dtype=f64), nn.GRU(3, 5, dtype=f64)
    hidden_bias = torch.cat([torch.zeros(10, dtype=f64), ours.b_hn])
    weights = {"weight_ih_l0": ours.U, "weight_hh_l0": ours.W, "bias_ih_l0": ours.b, "bias_hh_l0": hidden_bias}
    theirs.load_state_dict({k: w.detach() for k, w in weights.items()})
    x, h = randn(7, 2, 3).requires_grad_(), randn(2, 5).requires_grad_()
    run = lf.unfold(ours, x, h)
    output, last = theirs(x, h[None])
    assert_same((run.hidden, run.last), (output, last[0]))

    came, needed = (gradients(o.sin().sum(), m, x=x, h=h) for o, m in ((run.hidden, ours), (output, theirs)))
    for name, torchs in {"U": "weight_ih_l0", "W": "weight_hh_l0", "b": "bias_ih_l0", "x": "x", "h": "h"}.items():
        assert_same(came[name], needed[torchs])
    assert_same(came["b_hn"], needed["bias_hh_l0"][10:])


def test_layer_norm_lstm_is_the_papers_equations() -> None:
    """Ba, Kiros and Hinton (2016), eqs. 20 to 22, and eq. 15 for LN, one sequence at a time."""
    n = 5
    cell = lf.LayerNormLSTM(3, n, dtype=f64)
    for p in cell.parameters():  # the gains and the bias start as 1 and 0, which would hide a misplaced one
        p.data.copy_(randn(*p.shape))
    h, c, x = randn(2, n), randn(2, n), randn(2, 3)

    def LN(z: Tensor, gain: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        mean = z.sum() / len(z)
        deviation = (((z - mean) ** 2).sum() / len(z) + 1e-5).sqrt()
        return gain * (z - mean) / deviation + bias

    def sigmoid(z: Tensor) -> Tensor:
        return 1 / (1 + (-z).exp())

    new = cell(lf.LSTMState(h, c), x)
    for k in range(2):
        gates = LN(cell.W @ h[k], cell.gamma_h) + LN(cell.U @ x[k], cell.gamma_x) + cell.b
        i, f, g, o = gates[:n], gates[n : 2 * n], gates[2 * n : 3 * n], gates[3 * n :]
        c_new = sigmoid(f) * c[k] + sigmoid(i) * g.tanh()
        h_new = sigmoid(o) * LN(c_new, cell.gamma_c, cell.beta_c).tanh()
        assert_same((new.h[k], new.c[k]), (h_new, c_new))


@pytest.mark.parametrize(
    ("kind", "gates"), [(lf.Elman, 1), (lf.MGU, 2), (lf.GRU, 3), (lf.LSTM, 4), (lf.LayerNormLSTM, 4)]
)
def test_every_gate_of_w_starts_as_asked(kind: Any, gates: int) -> None:
    for gate in kind(3, 6, recurrent_init=lf.Orthogonal(gain=1.5)).W.split(6):
        torch.testing.assert_close(gate @ gate.T, 1.5**2 * torch.eye(6))
    scaled = kind(3, 6, recurrent_init=lf.ScaledIdentity(0.7)).W
    assert torch.equal(scaled, 0.7 * torch.eye(6).repeat(gates, 1))
    uniform = kind(3, 6).W.abs()
    assert 0.9 / 6**0.5 < uniform.max() <= 1 / 6**0.5


def test_orthogonal_works_in_half_precision() -> None:
    W = lf.Elman(3, 6, recurrent_init=lf.Orthogonal(), dtype=torch.bfloat16).W.float()
    torch.testing.assert_close(W @ W.T, torch.eye(6), atol=2e-2, rtol=0)


@pytest.mark.parametrize(
    ("kind", "name"), [(lf.LSTM, "forget_bias"), (lf.LayerNormLSTM, "forget_bias"), (lf.GRU, "update_bias")]
)
def test_the_bias_of_a_gate_goes_to_that_gate_alone(kind: Any, name: str) -> None:
    def bias(**options: float) -> Tensor:
        return kind(3, 5, generator=torch.Generator().manual_seed(1), **options).b.detach()

    needed = bias()
    needed[5:10] = 2.5
    assert torch.equal(bias(**{name: 2.5}), needed)


@pytest.mark.parametrize("kind", CELLS.values())
def test_a_generator_decides_all_of_the_start(kind: Any) -> None:
    def start(seed: int) -> dict[str, Tensor]:
        return kind(3, 5, generator=torch.Generator().manual_seed(seed)).state_dict()

    assert_same(start(1), start(1), 0)
    assert not torch.equal(start(1)["W"], start(2)["W"])
    before = torch.get_rng_state()
    start(3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", CELLS.values())
def test_parameters_and_zeros_have_the_dtype_and_device_asked_for(kind: Any) -> None:
    cell = kind(3, 5, dtype=torch.bfloat16, device="meta")
    for tensor in (*cell.parameters(), *leaves(cell.initial_state(2))):
        assert (tensor.dtype, tensor.device.type) == (torch.bfloat16, "meta")


def test_a_state_is_a_tree_of_tensors() -> None:
    a, b, c = torch.zeros(2, 1), torch.ones(2, 2), torch.ones(2, 3)
    state = (a, Memory(b, c))
    assert [id(leaf) for leaf in leaves(state)] == [id(a), id(b), id(c)]
    doubled = map_state(lambda leaf: 2 * leaf, state)
    assert isinstance(doubled[1], Memory)
    assert torch.equal(doubled[1].slow, 2 * c)
    assert rebuild(state, [c, b, a])[1].slow is a
    assert describe(state) == "tuple((2, 1), Memory(fast (2, 2), slow (2, 3)))"


class Unannotated(TwoMatrices):
    def forward(self, state, x):  # type: ignore[no-untyped-def]
        h, c = state
        return lf.LSTMState(super().forward(h, x), c)


class Tokens(lf.Transition):
    """A cell that reads classes, not vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 5)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(h + self.embed(x))


class Autonomous(lf.Transition):
    """A cell without input."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(4, 4))

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(h @ self.W.T)


@pytest.mark.parametrize(
    ("kind", "needed"),
    [
        (lambda: TwoMatrices(3, 5), "(2, 5)"),
        (lambda: FastAndSlow(3, 5), "Memory(fast (2, 5), slow (2, 5))"),
        (lambda: Unannotated(3, 5), "LSTMState(h (2, 5), c (2, 5))"),
        (Tokens, "(2, 5)"),
        (Autonomous, "(2, 4)"),
    ],
)
def test_the_zero_state_is_found_by_trial(kind: Callable[[], nn.Module], needed: str) -> None:
    state = zero_state(kind(), batch=2)
    assert describe(state) == needed
    assert not any(leaf.any() for leaf in leaves(state))


def test_the_trial_leaves_no_trace() -> None:
    class Noisy(TwoMatrices):
        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            return F.dropout(super().forward(h, x))

    cell, calls = Noisy(3, 5), []
    cell.register_forward_hook(lambda *call: calls.append(call))
    before = torch.get_rng_state()
    zero_state(cell, 2, torch.ones(2, 3))
    assert torch.equal(torch.get_rng_state(), before)
    assert not calls


def test_a_step_that_fits_many_sizes_asks_for_a_state() -> None:
    class Anything(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.randn(2, 3))

        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            return 0.9 * h

    with pytest.raises(ValueError, match=r"Anything accepts states of several sizes \(2, 3\).*Pass state="):
        lf.unfold(Anything(), torch.ones(7, 2, 3))
    with pytest.raises(ValueError, match="no zero state was found for <lambda>.*Pass state="):
        lf.unfold(lambda h, x: h @ x, torch.ones(7, 2, 3))


def test_a_learned_initial_state_gets_its_gradient() -> None:
    cell, x = LearnedStart(3, 5).double(), randn(7, 2, 3)
    h0 = cell.h0.detach().expand(2, -1).clone().requires_grad_()
    needed = gradients(lf.unfold(cell.step, x, h0).hidden.sum(), {"h0": h0})["h0"].sum(0)
    assert_same(gradients(lf.unfold(cell, x).hidden.sum(), cell)["h0"], needed)
    assert needed.abs().min() > 0


def test_a_cell_that_reads_h_and_x_side_by_side_works_in_a_pattern() -> None:
    class Concatenated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3 + 5, 5)

        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(self.layer(torch.cat([h, x], -1)))

    model = lf.SequenceToSequence(Concatenated(), outputs=4)
    assert model(torch.randn(7, 2, 3)).shape == (7, 2, 4)


def test_mgu_is_the_equation_of_zhou_et_al() -> None:
    """f = σ(b_f + W_f h + U_f x), n = tanh(b_n + W_n (f ⊙ h) + U_n x), h = (1 - f) ⊙ h + f ⊙ n, for each sequence."""
    cell, h, x = lf.MGU(3, 5, dtype=f64), randn(2, 5), randn(2, 3)
    (W_f, W_n), (U_f, U_n), (b_f, b_n) = cell.W.split(5), cell.U.split(5), cell.b.split(5)
    for i in range(2):
        f = torch.sigmoid(b_f + torch.mv(W_f, h[i]) + torch.mv(U_f, x[i]))
        n = torch.tanh(b_n + torch.mv(W_n, f * h[i]) + torch.mv(U_n, x[i]))
        assert_same(cell(h, x)[i], (1 - f) * h[i] + f * n)


def test_a_new_cell_is_known_everywhere() -> None:
    cell = make_cell("mgu", 4, 4)  # U is square too, and must not be taken for W
    assert isinstance(cell, lf.MGU)
    assert Options(cell=lf.MGU).cell == "mgu"  # type: ignore[arg-type]
    assert [*lf.eigenvalues(cell).values] == ["W_f", "W_n"]
    torch.testing.assert_close(lf.eigenvalues(cell).values["W_n"], torch.linalg.eigvals(cell.W[4:].double()))
    model = lf.SequenceToSequence(cell, 4)
    assert lf.gradient_flow(model, model.loss, torch.randn(6, 2, 4), torch.zeros(6, 2, dtype=torch.long)).gated
    assert lf.draw(model, 3, level="operations").dot().count("σ") == 3
    assert "FusedCPU" in model.explain(torch.randn(30, 2, 4))


def test_every_cell_has_a_name_on_the_command_line() -> None:
    """Those are the names that run folders hold, so none of them may ever change."""
    assert (
        CELLS.items()
        >= {
            "elman": lf.Elman,
            "lstm": lf.LSTM,
            "gru": lf.GRU,
            "layernorm-lstm": lf.LayerNormLSTM,
            "mgu": lf.MGU,
        }.items()
    )
    public = {kind for kind in vars(lf.public).values() if isinstance(kind, type) and issubclass(kind, Cell)}
    assert public == {*CELLS.values()}  # one without a name, or derived from another, is not left out


def test_a_cell_of_ones_own_does_not_take_the_name_of_the_one_it_derives_from() -> None:
    assert Options(cell=type("Mine", (lf.LSTM,), {})).cell.endswith(".py:Mine")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", CELLS.values())
def test_the_parts_of_an_initial_state_are_tensors_of_their_own(kind: type[Cell]) -> None:
    first, *others = leaves(kind(3, 5).initial_state(2))
    first.add_(1)
    assert not any(other.any() for other in others)


@pytest.mark.parametrize("kind", CELLS.values())
def test_help_names_every_option_of_a_cell(kind: type[Cell]) -> None:
    parameters = inspect.signature(kind).parameters
    assert [*parameters][:2] == ["input_size", "hidden_size"]
    assert [*parameters][-4:] == ["recurrent_init", "generator", "device", "dtype"]
    with pytest.raises(TypeError, match=rf"^{kind.__name__}.__init__\(\) got an unexpected keyword argument 'bias'$"):
        kind(3, 5, bias=False)  # type: ignore[arg-type]


class Named(nn.Module):
    """Two gates; `gate_names` of a module that is no Transition may be anything."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_names = nn.Linear(3, 8)
        self.W = nn.Parameter(torch.randn(8, 4))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        u, n = (self.gate_names(x) + h @ self.W.T).chunk(2, -1)
        return torch.sigmoid(u) * torch.tanh(n)


class Gated(lf.Transition):
    gate_names = ("u", "n")

    def __init__(self) -> None:
        super().__init__()
        self.step = Named()

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.step(h, x)


def test_a_cell_of_ones_own_may_name_its_gates() -> None:
    assert [*lf.eigenvalues(Gated()).values] == ["W_u", "W_n"]
    assert [*lf.eigenvalues(Named()).values] == ["W_1", "W_2"]
    x, y = torch.randn(6, 2, 3), torch.zeros(6, 2, dtype=torch.long)
    for cell, gated in ((Gated(), True), (Named(), False)):
        model = lf.SequenceToSequence(cell, 4)
        assert lf.gradient_flow(model, model.loss, x, y).gated is gated


@pytest.mark.parametrize(
    ("cell", "shapes"),
    [
        (lf.LSTM(3, 5), [(1, 3)]),
        (lf.Embedded(lf.GRU(3, 5), nn.Embedding(7, 3)), [(1,)]),
        (zoo.Autonomous(3), [None]),
        (zoo.MinimalGatedUnit(3, 5), [(1, 3)]),
        (lambda s: s / 2, [None]),
        (lambda s, x: s / 2 + x, [(1, 1)]),
    ],
)
def test_an_input_is_found_for_any_step(cell: Step, shapes: list[tuple[int, ...] | None]) -> None:
    before = torch.get_rng_state()
    assert [x if x is None else tuple(x.shape) for x in example_inputs(cell)] == shapes
    assert torch.equal(torch.get_rng_state(), before)
