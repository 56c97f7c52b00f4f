"""Layers under torch.compile and torch.export: one operation in one graph, the same values and gradients."""

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from zoo import MinimalGatedUnit, OutputFed

import loopfold as lf
from loopfold import operations

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's compiler uses old parts of torch
]


class Net(nn.Module):
    """Torch's own modules before and after a layer of ours."""

    def __init__(self, layer: nn.Module, n_in: int = 5, n: int = 6) -> None:
        super().__init__()
        self.before, self.layer, self.after = nn.Linear(n_in, n_in), layer, nn.Linear(n, 3)

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        run = self.layer(self.before(x).tanh(), *rest)
        return self.after(run.hidden).square().mean() + run.last_hidden.sum()


def both(module: nn.Module, *given: Any, backend: str = "aot_eager", **options: Any) -> None:
    """The compiled module gives what the module gives, and the same gradients."""
    module.double()
    compiled = torch.compile(module, backend=backend, fullgraph=True, **options)
    found = []
    for call in (module, compiled):
        tensors = [g.clone().requires_grad_() if isinstance(g, Tensor) and g.is_floating_point() else g for g in given]
        value = call(*tensors).sum()
        leaves = [*module.parameters(), *(t for t in tensors if isinstance(t, Tensor) and t.requires_grad)]
        found.append([value, *torch.autograd.grad(value, leaves)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def x(tau: int = 7, batch: int = 3, n: int = 5) -> Tensor:
    return torch.randn(tau, batch, n, dtype=torch.float64)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: lf.Recurrent(lf.LSTM(5, 6)),
    "a cell of one's own": lambda: lf.Recurrent(MinimalGatedUnit(5, 6)),
    "Sequential": lambda: lf.Recurrent(lf.GRU(5, 6), lf.Sequential()),
    "Checkpointed": lambda: lf.Recurrent(lf.GRU(5, 6), lf.Checkpointed(every=3)),
    "stacked": lambda: lf.Stacked([lf.Recurrent(lf.GRU(5, 4)), lf.Recurrent(lf.LSTM(4, 6))]),
    "both ways": lambda: lf.Bidirectional(lf.Recurrent(lf.GRU(5, 3)), lf.Recurrent(lf.GRU(5, 3))),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_one_operation(name: str) -> None:
    both(Net(LAYERS[name]()), x())


@pytest.mark.parametrize("name", ["LSTM", "stacked"])
def test_a_state_and_lengths(name: str) -> None:
    layer: Any = LAYERS[name]().double()
    lengths = torch.tensor([7, 1, 4])
    both(Net(layer), x(), None, lengths)
    if name == "LSTM":

        class WithState(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = layer

            def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
                return self.layer(x, lf.LSTMState(h, c), [7, 1, 4]).last.c.square()

        both(WithState(), x(), torch.randn(3, 6).double(), torch.randn(3, 6).double())


@pytest.mark.parametrize(
    "make",
    [
        lambda: lf.SequenceToSequence(lf.GRU(5, 6), outputs=3),
        lambda: lf.SequenceToOne(lf.LSTM(5, 6), outputs=3),
        lambda: lf.SequenceToSequence(OutputFed(5, 6), outputs=3),
    ],
)
def test_patterns(make: Callable[[], nn.Module]) -> None:
    both(make(), x())


class Hands(lf.Transition):
    """Of its state one part stays as it is; the outputs are x, and what it gives as its state."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(5, 5) / 3)

    def initial_state(self, batch: int) -> Any:
        return self.W.new_full((batch, 5), 0.5), self.W.new_zeros(batch, 5)

    def forward(self, state: Any, x: Tensor) -> Any:
        kept, h = state
        h = torch.tanh(h @ self.W + x * kept)
        return (x, h, kept), (kept, h)


class WrittenOver(nn.Module):
    """What a layer gives is written over, and read again."""

    def __init__(self, engine: lf.Engine, only_last: bool) -> None:
        super().__init__()
        self.layer, self.only_last = lf.Recurrent(Hands(), engine), only_last

    def forward(self, x: Tensor) -> Tensor:
        run = self.layer(x, only_last=self.only_last)
        again, h, kept = run.outputs
        if not torch.is_grad_enabled():  # else torch may say that it needs them as they were
            h.mul_(3)
            kept.add_(h)
            again.fill_(7)
        mixed = (h * 3 - again).tanh() * (kept * 2 + 1)
        return (again.sin() * mixed).sum() + (run.last[1] * 2 + 1).square().sum()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Net(lf.Stacked([lf.LSTM(5, 4), MinimalGatedUnit(4, 6)])),  # whose gradients have layouts of their own
        lambda: WrittenOver(lf.Auto(), only_last=False),
    ],
)
def test_by_inductor(make: Callable[[], nn.Module]) -> None:
    both(make(), x(), backend="inductor")


@pytest.mark.parametrize("only_last", [False, True])
@pytest.mark.parametrize("engine", [lf.Sequential(), lf.Looped(), lf.FusedCPU()], ids=lambda e: type(e).__name__)
def test_what_is_written_over_is_the_graphs_own(engine: lf.Engine, only_last: bool) -> None:
    model, given = WrittenOver(engine, only_last), x()
    both(model, given)
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(compiled(given), model(given), rtol=1e-11, atol=1e-11)


def test_a_result_that_depends_on_nothing() -> None:
    layer = lf.Recurrent(Hands())
    compiled = torch.compile(lambda x: layer(x).outputs[2].sum(), backend="aot_eager", fullgraph=True)
    compiled(torch.randn(7, 3, 5)).backward()
    grad: Any = next(layer.parameters()).grad
    assert grad is None or not grad.any()


def test_no_gradient_is_made_up() -> None:
    """Where nothing reads a result, its way back is given none; the graph has no zeros in its place."""
    seen: list[Any] = []

    def backend(graph: torch.fx.GraphModule, given: Any) -> Any:
        def compiler(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
            calls = [node for node in gm.graph.nodes if "unfold_backward" in str(node.target)]
            seen.extend(node.args[2] for node in calls)
            return make_boxed_func(gm.forward)

        return aot_module_simplified(graph, given, fw_compiler=compiler)

    layer = lf.Recurrent(lf.LSTM(5, 6))
    torch.compile(lambda x: layer(x).hidden.sum(), backend=backend, fullgraph=True)(torch.randn(7, 3, 5)).backward()
    (incoming,) = seen
    assert incoming[0] is not None
    assert incoming[1] is None


def test_tokens() -> None:
    model = lf.SequenceToSequence(lf.Recurrent(lf.Embedded(lf.GRU(4, 6), nn.Embedding(9, 4))), outputs=3)
    both(model, torch.randint(9, (7, 3)))


def test_other_sizes_need_no_other_graph() -> None:
    model = Net(lf.Recurrent(lf.LSTM(5, 6))).double()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for tau, batch in ((7, 3), (11, 4), (5, 8)):
        given = x(tau, batch)
        torch.testing.assert_close(compiled(given), model(given), rtol=1e-11, atol=1e-11)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


@pytest.mark.parametrize("strict", [False, True])
def test_torch_export_with_a_free_batch_and_length(strict: bool) -> None:
    model = lf.SequenceToSequence(lf.LSTM(5, 6), outputs=3)
    time, batch = torch.export.Dim("time", min=2), torch.export.Dim("batch", min=2)
    exported = torch.export.export(
        model, (torch.randn(7, 3, 5),), dynamic_shapes=(({0: time, 1: batch},),), strict=strict
    )
    given = torch.randn(12, 4, 5)
    torch.testing.assert_close(exported.module()(given), model(given))


class Leaky(lf.Transition):
    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.W = 0.5, nn.Parameter(torch.randn(5, 5) / 3)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return (1 - self.alpha) * h + self.alpha * torch.tanh(h @ self.W + x)


def test_a_step_that_changes_afterwards_is_run_as_it_is() -> None:
    layer: Any = lf.Recurrent(Leaky()).double()
    compiled, given = torch.compile(layer, backend="aot_eager", fullgraph=True), x()
    for alpha in (0.5, 0.1):
        layer.cell.alpha = alpha
        torch.testing.assert_close(compiled(given).hidden, layer(given).hidden, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        layer.cell.W.mul_(0.5)
    torch.testing.assert_close(compiled(given).hidden, layer(given).hidden, rtol=1e-12, atol=1e-12)


def test_copies_are_layers_of_their_own() -> None:
    layer = lf.Recurrent(Leaky()).double()
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    others = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False)]
    given = x()
    for other in others:
        with torch.no_grad():
            other.cell.W.normal_()
        found = torch.compile(other, backend="aot_eager", fullgraph=True)(given).hidden
        torch.testing.assert_close(found, other(given).hidden, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(found, layer(given).hidden)


def test_autocast_around_and_inside() -> None:
    model, given = Net(lf.Recurrent(lf.GRU(5, 6))), torch.randn(7, 3, 5)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(given), model(given))

    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = lf.Recurrent(lf.GRU(5, 6))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.layer(x).hidden

    found = []
    for call in (model, compiled):
        with torch.autocast("cpu", torch.bfloat16):
            value = call(given)
        found.append(torch.autograd.grad(value, [*model.parameters()]))
    assert all(map(torch.equal, *found))

    casting = Casting()
    cast = torch.compile(casting, backend="aot_eager", fullgraph=True)(given)
    assert torch.equal(cast, casting(given))
    assert not torch.equal(cast, casting.layer(given).hidden)


def test_nothing_is_held_after_a_run() -> None:
    model, given = Net(lf.Recurrent(lf.GRU(5, 6))), torch.randn(7, 3, 5)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    gc.collect()
    before = len(operations._runs)
    value = compiled(given)
    assert len(operations._runs) == before + 1
    value.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    value.backward()
    for a, p in zip(first, model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad)
    del value
    gc.collect()
    assert len(operations._runs) == before
    compiled(given)  # and never goes back
    with torch.no_grad():
        compiled(given)
    gc.collect()
    assert len(operations._runs) == before


def test_frozen_parameters_and_other_ones() -> None:
    model: Any = Net(lf.Recurrent(lf.GRU(5, 6)))
    model.layer.cell.W.requires_grad_(False)
    compiled, given = torch.compile(model, backend="aot_eager", fullgraph=True), torch.randn(7, 3, 5)
    compiled(given).backward()
    assert model.layer.cell.W.grad is None
    assert model.layer.cell.U.grad is not None
    others = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match="other parameters than those of the layer"):
        torch.compile(lambda p, x: torch.func.functional_call(model, p, (x,)), backend="aot_eager")(others, given)


def test_a_graph_whose_layer_is_gone_says_so() -> None:
    model = lf.SequenceToSequence(lf.GRU(5, 6), outputs=3)
    exported = torch.export.export(model, (torch.randn(7, 3, 5),), strict=True)
    del model
    gc.collect()
    with pytest.raises(RuntimeError, match="holds its lf.Recurrent by "):
        exported.module()(torch.randn(7, 3, 5))


def test_training_under_torch_compile_is_training() -> None:
    model = Net(lf.Recurrent(lf.LSTM(5, 6)))
    twin, given = copy.deepcopy(model), torch.randn(7, 3, 5)
    for module in (model, twin):
        call = torch.compile(module, backend="aot_eager", fullgraph=True) if module is model else module
        optimiser = torch.optim.Adam(module.parameters(), 1e-2)
        for _ in range(5):
            optimiser.zero_grad()
            call(given).backward()
            optimiser.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
