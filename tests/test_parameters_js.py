"""What JavaScript trains are the parameters of the torch model, each by its name."""

import errno
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_export import NODE, language_model, node, page, stacked
from torch import Tensor, nn

import loopfold as lf
from loopfold.exporting.places import places_of
from loopfold.onestep import one_step, start_of
from loopfold.states import leaves
from loopfold.stepgraph.graph import Refusal

pytestmark = pytest.mark.skipif(NODE is None, reason="no node")


class Timescales(nn.Module):
    """Learnable time constants, of which more than one thing is made; shapes that broadcast; a learned start."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.U, self.W = nn.Linear(n_in, n), nn.Linear(n, n, bias=False)
        self.tau, self.mix = nn.Parameter(torch.linspace(-1, 2, n)), nn.Parameter(torch.randn(3, n))
        self.gain, self.start = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.randn(n) / 2)
        self.register_buffer("floor", torch.full((n,), 0.1))

    floor: Tensor

    def initial_state(self, batch: int) -> Tensor:
        return self.start.expand(batch, -1)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        alpha = torch.exp(-1 / (F.softplus(self.tau) + self.floor))
        share = torch.softmax(self.mix[1], 0) * len(self.tau) + self.mix[0].sigmoid().mean(0) - self.tau.detach()
        new = torch.tanh(self.U(x) * self.gain.exp() + self.W(h) * share.unsqueeze(0))
        return alpha * h + (1 - alpha).view(1, -1) * new


class Scalars(nn.Module):
    """Every rate is one number, or made of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.W = nn.Parameter(torch.tensor([0.3])), nn.Parameter(torch.randn(4, 4) / 2)
        self.grid = nn.Parameter(torch.randn(2, 2))

    def initial_state(self, batch: int) -> Tensor:
        return self.W.new_zeros(batch, 4)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        rate = torch.sigmoid(self.rate)
        h = torch.lerp(h, torch.tanh(x + h @ self.W), rate)
        return (h.view(-1, 2, 2) * F.relu(self.grid)).flatten(1) - 0.1 * rate**2


class Masked(nn.Module):
    """Some of a matrix is not read at all, and zeros stand in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(4, 4) / 2)
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0]))
        with torch.no_grad():
            self.W.copy_(torch.tril(self.W * self.mask))

    mask: Tensor

    def initial_state(self, batch: int) -> Tensor:
        return self.W.new_zeros(batch, 4)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(h @ torch.tril(self.W * self.mask) + x) * self.mask


class BothWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W, self.b = nn.Parameter(torch.randn(5, 3) / 2), nn.Parameter(torch.randn(3))

    def initial_state(self, batch: int) -> Tensor:
        return torch.cat([self.b, self.b[:2]]).expand(batch, 5)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh((torch.tanh(h @ self.W + self.b) + x) @ self.W.T)


class Joined(nn.Module):
    """One matrix by x and the state, whose gates are cut from it."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Linear(3 + 4, 8)

    def initial_state(self, batch: int) -> Tensor:
        return self.W.weight.new_zeros(batch, 4)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        both = torch.cat([x, h], -1)
        z = torch.sigmoid(both @ self.W.weight[4:].T + self.W.bias[4:])
        return z * h + (1 - z) * torch.tanh(both @ self.W.weight[:4].T + self.W.bias[:4])


__all__ = ["page"]  # a fixture

MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "timescales": lambda: (lf.SequenceToSequence(Timescales(3, 5), outputs=2), torch.randn(7, 3)),
    "scalars": lambda: (Scalars(), torch.randn(6, 4)),
    "masked": lambda: (Masked(), torch.randn(6, 4)),
    "both ways": lambda: (BothWays(), torch.randn(6, 3)),
    "joined": lambda: (Joined(), torch.randn(6, 3)),
    "one step": lambda: (Timescales(1, 3), torch.randn(1, 1)),
    "lstm": lambda: (lf.LSTM(3, 5), torch.randn(7, 3)),
    "gru": lambda: (lf.GRU(3, 5), torch.randn(7, 3)),
    "elman": lambda: (lf.Elman(3, 5), torch.randn(7, 3)),
    "stacked": lambda: (stacked(), torch.randn(5, 3)),
    "tied": lambda: (language_model("bytes").eval(), torch.randint(5, (6,))),
}
TRAIN = """const w = decoded(), model = create(w), x = %s, rate = 0.05, firsts = [];
for (let k = 0; k < 4; k++) {
  model.reset();
  const { weights } = model.backward(model.unfold(x));
  firsts.push(weights.slice());
  for (let i = 0; i < w.length; i++) w[i] -= rate * weights[i];
}
const plain = (o) => Object.fromEntries(Object.entries(o).map(([name, row]) => [name, [...row].map(String)]));
const shapes = Object.fromEntries(Object.entries(parameters).map(([name, { shape }]) => [name, shape]));
console.log(JSON.stringify([plain(named(firsts[0])), plain(named(w)), shapes]));"""


def trained(model: nn.Module, x: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """By torch, one step after the other: the first gradients of ½ Σ o², and the parameters after four updates."""
    first = dict[str, Tensor]()
    for _ in range(4):
        model.zero_grad()
        f = one_step(model.network if isinstance(model, lf.RecurrentLM) else model, "export")
        run = lf.unfold(f, x[:, None], start_of(f, 1, x[:1], None), engine=lf.Sequential())
        outputs = leaves(run.states if run.outputs is None else run.outputs)[0]
        (outputs.square().sum() / 2).backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(0.05 * p.grad)
    return first, dict(model.named_parameters())


@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_training_by_name(name: str, tmp_path: Path) -> None:
    torch.manual_seed(len(name))
    model, x = MODELS[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    lf.export(model, tmp_path / "m.mjs", x=x[:1], backward=True)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    code = TRAIN % json.dumps(x.tolist())
    by_name, after, shapes = node(tmp_path / "m.mjs", "create, decoded, named, parameters", code)
    x = x if x.dtype == torch.int64 else x.double()
    gradients, parameters = trained(model.double(), x)
    assert {*by_name} == {*gradients}
    for key, gradient in gradients.items():
        assert tuple(shapes[key]) == gradient.shape
        for found, exact in ((by_name[key], gradient), (after[key], parameters[key].detach())):
            by_node = torch.tensor([float(v) for v in found], dtype=torch.float64).reshape(exact.shape)
            scale = max(1.0, exact.abs().max().item())
            torch.testing.assert_close(by_node, exact, atol=3e-5 * scale, rtol=1e-4)


def test_a_start_that_is_not_learned_has_no_gradient(tmp_path: Path) -> None:
    lf.export(lf.GRU(2, 3), tmp_path / "m.mjs", backward=True)
    code = "const m = create(); console.log(JSON.stringify([...m.backward(m.unfold([[1, 2], [3, 4]])).weights]));"
    weights = node(tmp_path / "m.mjs", "create", code)
    assert weights[-3:] == [0, 0, 0]
    assert 0 not in weights[:-3]


class Computed(Timescales):
    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.U(x) + h @ torch.exp(self.W.weight))


class Detached(Timescales):
    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.U(x) + self.W(h) + h @ self.W.weight.detach())


class ComputedStart(Timescales):
    def initial_state(self, batch: int) -> Tensor:
        return torch.tanh(self.start).expand(batch, -1)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


class ReversedStart(Timescales):
    def initial_state(self, batch: int) -> Tensor:
        return Reversed.apply(self.start).expand(batch, -1)


class HalfLearned(Timescales):
    """A part of the first state follows the parameters, but no gradient goes there."""

    def initial_state(self, batch: int) -> Tensor:
        return torch.cat([self.start[:1].detach(), self.start[1:]]).expand(batch, -1)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (ReversedStart, "other gradients"),
        (HalfLearned, "other gradients"),
        (Computed, "computes something from its parameters alone"),
        (Detached, "out of the gradient"),
        (ComputedStart, "computes something from its parameters alone"),
    ],
)
def test_what_cannot_be_trained_is_refused(kind: Any, why: str, tmp_path: Path) -> None:
    model, x = kind(2, 3), torch.randn(4, 2)
    with pytest.raises(ValueError, match=f"cannot be exported with its reverse step: it .*{why}.*requires_grad_"):
        lf.export(model, tmp_path / "m.mjs", x=x[:1], backward=True)
    with pytest.raises(Refusal):
        places_of(model, x[:1])
    lf.export(model.requires_grad_(False), tmp_path / "m.mjs", x=x[:1], backward=True)
    x.requires_grad_()
    hidden = lf.unfold(model, x[:, None], engine=lf.Sequential()).hidden
    (dx,) = torch.autograd.grad(hidden.square().sum() / 2, x)
    code = f"""const m = create(), back = m.backward(m.unfold({x.tolist()}), null, null);
    console.log(JSON.stringify([back.x.map((row) => [...row]), parameters]));"""
    found, table = node(tmp_path / "m.mjs", "create, parameters", code)
    torch.testing.assert_close(torch.tensor(found), dx, atol=1e-5, rtol=1e-5)
    assert table == {}


def test_half_precision_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"half precision, .* type model\.float\(\) first"):
        lf.export(lf.GRU(2, 3).bfloat16(), tmp_path / "m.mjs", backward=True)


def test_the_page_on_it(page: dict[str, Any]) -> None:
    (page["folder"] / "train.mjs").write_text(page["javascript"][0])
    (page["folder"] / "package.json").write_text('{"type": "module"}')
    assert NODE is not None
    done = subprocess.run([NODE, "train.mjs"], cwd=page["folder"], capture_output=True, text=True)
    assert done.stdout == page["text"][2], done.stderr


def test_the_file_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("loopfold.exporting.export.write_whole", full)
    with pytest.raises(lf.OptionError, match=r"m\.c cannot be written: No space left on device"):
        lf.export(lf.GRU(2, 3), tmp_path / "m.c")
