"""torch.export of layers: a program that is saved runs in a process that does not have the user's cell."""

import io
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import loopfold as lf
from loopfold.stepgraph.stored import from_text, to_text

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch")


class Learned(lf.Transition):
    """A cell of one's own: a start that is learned, a buffer, an output, a NamedTuple for a state."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.start, self.W = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6, 6) / 3)
        self.U = nn.Linear(5, 6)
        self.register_buffer("scale", torch.tensor([0.5, 1.0, 2.0, 0.25, 1.5, 0.1]))

    def initial_state(self, batch: int) -> lf.LSTMState:
        return lf.LSTMState(self.start.expand(batch, -1), self.start.new_zeros(batch, 6))

    def forward(self, state: lf.LSTMState, x: Tensor) -> tuple[Tensor, lf.LSTMState]:
        h, c = state
        h = torch.tanh(h @ self.W + self.U(x)) * self.scale
        c = 0.9 * c + h
        return h * c, lf.LSTMState(h, c)


class Tagger(nn.Module):
    def __init__(self, layer: nn.Module, n: int) -> None:
        super().__init__()
        self.layer, self.readout = layer, nn.Linear(n, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        run = self.layer(x, None, lengths)
        return self.readout(run.hidden), run.last_hidden


MODELS: dict[str, Callable[[], nn.Module]] = {
    "stacked": lambda: Tagger(lf.Stacked([lf.LSTM(5, 4), lf.GRU(4, 6)]), 6),
    "both ways": lambda: Tagger(lf.Bidirectional(lf.Recurrent(zoo.MinimalGatedUnit(5, 3)), lf.GRU(5, 3)), 6),
    "learned": lambda: Tagger(lf.Recurrent(Learned(), lf.Looped()), 6),
    "tokens": lambda: Tagger(lf.Recurrent(lf.Embedded(lf.Elman(4, 6), nn.Embedding(9, 4))), 6),
    "peephole": lambda: Tagger(lf.Recurrent(zoo.PeepholeLSTM(5, 6)), 6),
}
READ = """
import pathlib, sys
import torch
import loopfold.operations

for path in sorted(pathlib.Path(sys.argv[1]).glob("*.pt2")):
    given, expected, gradients = torch.load(path.with_suffix(".pt"))
    program = torch.export.load(path).module()
    found = program(*given)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    (found[0].square().sum() + found[1].sum()).backward()
    for name, parameter in program.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        for parameter in program.parameters():
            parameter.mul_(1.5)
        assert not torch.allclose(program(*given)[0], expected[0])  # it reads the parameters as they are
    print(path.stem)
assert "zoo" not in sys.modules
"""


def test_a_saved_program_runs_in_another_process(tmp_path: Path) -> None:
    torch.manual_seed(0)
    time, batch = torch.export.Dim("time", min=2), torch.export.Dim("batch", min=2)
    for name, make in MODELS.items():
        model = make().double()
        x, lengths = torch.randn(7, 3, 5).double(), torch.tensor([7, 1, 4])
        more = torch.randn(11, 4, 5).double(), torch.tensor([3, 11, 2, 11])
        if name == "tokens":
            x, more = torch.randint(9, (7, 3)), (torch.randint(9, (11, 4)), more[1])
        sizes = ({0: time, 1: batch}, {0: batch})
        program = torch.export.export(model, (x, lengths), dynamic_shapes=sizes)
        torch.export.save(program, tmp_path / f"{name}.pt2")
        expected = model(*more)
        (expected[0].square().sum() + expected[1].sum()).backward()
        gradients = {key: p.grad for key, p in model.named_parameters()}
        torch.save((more, [t.detach() for t in expected], gradients), tmp_path / f"{name}.pt")
    (tmp_path / "read.py").write_text(READ)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(tmp_path / "read.py"), str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[:-1] == sorted(MODELS)


class Permuted(lf.Transition):
    """Where numbers go is decided by a buffer, which a graph takes as it is at the time."""

    order: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.tensor([2, 0, 4, 1, 3]))
        self.W = nn.Parameter(torch.randn(5, 5) / 3)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(h @ self.W + x)[:, self.order]


def test_what_is_no_plain_data_stays_in_its_process() -> None:
    locked: Any = lf.Elman(5, 5)
    locked.lock = threading.Lock()
    for cell, reason in (
        (Permuted(), "another step with other numbers in its parameters"),
        (lf.Elman(5, 5, activation=nn.Dropout(0.5)), "it draws random numbers"),
        (locked, "cannot pickle '_thread.lock' object"),
    ):
        layer = lf.Recurrent(cell).train()
        with pytest.warns(lf.EngineWarning, match=f"runs only in this process: .*{reason}"):
            program = torch.export.export(Hidden(layer), (torch.randn(7, 3, 5),))
        arguments = next(node.args for node in program.graph.nodes if "loopfold" in str(node.target))
        assert arguments[:2] == (layer.number, "")
    layer = lf.Recurrent(Permuted())
    x = torch.randn(7, 3, 5)
    with pytest.warns(lf.EngineWarning, match="Permuted is not stored in the program"):
        program = torch.export.export(Hidden(layer), (x,))
    torch.testing.assert_close(program.module()(x), layer(x).hidden)


def test_an_exported_program_keeps_its_step() -> None:
    layer = lf.Recurrent(zoo.MinimalGatedUnit(5, 6))
    x = torch.randn(7, 3, 5)
    expected = layer(x).hidden.detach()
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(Hidden(layer), (x,)), buffer)
    del layer
    buffer.seek(0)
    torch.testing.assert_close(torch.export.load(buffer).module()(x), expected)


class Hidden(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).hidden


def test_a_graph_as_text_is_the_graph() -> None:
    for make in (*zoo.WITH_INPUT, *zoo.TENSORS):
        graph = lf.step_graph(make(6, 6), torch.randn(2, 6))
        text = to_text(graph)
        assert to_text(from_text(text)) == text
        assert str(from_text(text)) == str(graph)
    with pytest.raises(ValueError, match="stored by another version of Loopfold"):
        from_text(text.replace('"version":1', '"version":2'))


def _exported(net: nn.Module, x: Tensor) -> nn.Module:
    return torch.export.export(net, (x,)).module()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.readout = lf.Recurrent(lf.Elman(3, 4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.layer(x).hidden)


def test_a_program_has_gradients_that_nobody_wanted_when_it_was_exported() -> None:
    net, x = Net(), torch.randn(5, 2, 3)
    net.layer.requires_grad_(False)
    program = _exported(net, x)
    for model in (net, program):
        model.requires_grad_(True)
    given = [x.clone().requires_grad_() for _ in range(2)]
    for model, own in zip((net, program), given, strict=True):
        model(own).square().sum().backward()
    torch.testing.assert_close(given[1].grad, given[0].grad)
    parameters = dict(net.named_parameters())
    for name, parameter in program.named_parameters():
        torch.testing.assert_close(parameter.grad, parameters[name].grad)


def test_a_program_without_gradients() -> None:
    net, x = Net(), torch.randn(5, 2, 3)
    expected = net(x).detach()
    program = _exported(net, x)
    with torch.inference_mode():
        torch.testing.assert_close(program(x), expected)
    with torch.no_grad():
        program = _exported(net, x)
    torch.testing.assert_close(program(x), expected)
    with pytest.raises(RuntimeError, match=r"exported under torch\.no_grad has no gradients: export it without"):
        program(x).sum().backward()


def test_second_derivatives_are_refused_in_words() -> None:
    net, x = Net(), torch.randn(5, 2, 3, requires_grad=True)
    for model in (_exported(net, x), torch.compile(net, backend="eager")):
        (g,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="first derivatives only"):
            torch.autograd.grad(g.square().sum(), x)
