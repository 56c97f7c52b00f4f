"""Circuits and unfolded graphs: they are the computation itself, and nothing in them lies on anything else."""

import gc
import inspect
import itertools
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import zoo
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

import loopfold as lf
from loopfold.drawing.circuit import Circuit, Role, Variable
from loopfold.drawing.draw import data_of
from loopfold.drawing.networks import circuit
from loopfold.drawing.paint import paint
from loopfold.drawing.picture import circuit_scene, unfolded_scene
from loopfold.drawing.scene import Scene
from loopfold.drawing.unfolded import Moment, Unfolded
from loopfold.language.recurrent import recurrent_lm
from loopfold.wiring import Pattern

pytestmark = pytest.mark.usefixtures("one_thread")

TAU, BATCH = 5, 3


class Echo(lf.Pattern):
    """A pattern of a user's own: every step reads x(t) and the output of the step before, and has a memory besides."""

    def __init__(self, cell: nn.Module, outputs: int) -> None:
        super().__init__()
        self.recurrent, self.outputs = lf.Recurrent(cell), lf.Classes(outputs)
        self.readout = lf.Readout(self.recurrent.hidden_size, outputs)

    @property
    def wiring(self) -> lf.Wiring:
        return lf.Wiring(self.recurrent, self.readout, self.outputs, feeding=lf.FreeRunning())

    def predict(self, x: Tensor, y: Tensor | None = None, feeding: lf.Feeding = lf.FreeRunning()) -> lf.Prediction:
        fed, state, os = x.new_zeros(x.shape[1], self.outputs.size), None, []
        for t in range(len(x)):
            run = self.recurrent(torch.cat([x[t], fed], -1)[None], state)
            state = run.last
            os.append(self.readout(run.last_hidden))
            fed = feeding.next(os[t], None if y is None else y[t], self.outputs)
        return lf.Prediction(torch.stack(os), run)

    def given(self, x: Tensor, y: Tensor, lengths: Tensor | list[int] | None = None) -> Tensor:
        return self(x, y)


class Repeater(lf.Pattern):
    """An encoder whose vector is all that the decoder reads: nothing is fed back."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.recurrent = lf.Recurrent(lf.GRU(3, 5)), lf.Recurrent(lf.LSTM(5, 6))
        self.outputs, self.readout = lf.Classes(4), lf.Readout(6, 4)

    @property
    def wiring(self) -> lf.Wiring:
        return lf.Wiring(self.recurrent, self.readout, self.outputs, encoder=self.encoder)

    def predict(self, x: Tensor) -> lf.Prediction:
        run = self.recurrent(self.encoder(x).last_hidden.expand(len(x), -1, -1))
        return lf.Prediction(self.readout(run.hidden), run)

    def given(self, x: Tensor, y: Tensor, lengths: Tensor | list[int] | None = None) -> Tensor:
        return self(x)


class Blurred(lf.Feeding):
    """A feeding of a user's own that says nothing of what it reads."""

    def known(self, y: Tensor | None, outputs: lf.Outputs) -> None:
        return None

    def next(self, o: Tensor, y: Tensor | None, outputs: lf.Outputs) -> Tensor:
        assert y is not None
        return 0.9 * outputs.encode(y).to(o.dtype) + 0.1 * outputs.soft(o)


class BlurredTruth(lf.Feeding):
    """One that reads the truth alone, and does not feed it back as it is."""

    reads_own = False

    def known(self, y: Tensor | None, outputs: lf.Outputs) -> None:
        return None

    def next(self, o: Tensor, y: Tensor | None, outputs: lf.Outputs) -> Tensor:
        assert y is not None
        return 0.9 * outputs.encode(y).to(o.dtype)


PATTERNS: dict[str, Callable[[], nn.Module]] = {
    "every step": lambda: lf.SequenceToSequence(lf.Elman(3, 5), 4),
    "LSTM": lambda: lf.SequenceToSequence(lf.LSTM(3, 5), 4),
    "real outputs": lambda: lf.SequenceToSequence(lf.GRU(3, 5), lf.Reals(2)),
    "own cell": lambda: lf.SequenceToSequence(zoo.PeepholeLSTM(3, 5), 4),
    "linear layers": lambda: lf.SequenceToSequence(zoo.MinimalGatedUnit(3, 5), 4),
    "norms": lambda: lf.SequenceToSequence(lf.LayerNormLSTM(3, 5), 4),
    "at the end": lambda: lf.SequenceToOne(lf.GRU(3, 5), 4),
    "both ways": lambda: lf.SequenceToSequence(lf.Bidirectional(lf.GRU(3, 5), lf.LSTM(3, 4)), 4),
    "both ways, at the end": lambda: lf.SequenceToOne(lf.Bidirectional(lf.Elman(3, 5), lf.Elman(3, 4)), 4),
    "stacked": lambda: lf.SequenceToSequence(lf.Stacked([lf.GRU(3, 5), lf.Elman(5, 6), lf.LSTM(6, 4)]), 4),
    "stacked both ways": lambda: lf.SequenceToSequence(
        lf.Stacked([lf.Bidirectional(lf.Elman(3, 5), lf.Elman(3, 4)), lf.Bidirectional(lf.GRU(9, 5), lf.GRU(9, 2))]), 4
    ),
    "outputs back": lambda: lf.OutputRecurrence(3, 5, 4),
    "vector": lambda: lf.VectorToSequence(lf.GRU(3 + 4, 5), 4),
    "encoder-decoder": lambda: lf.EncoderDecoder(lf.LSTM(3, 5), lf.GRU(5 + 4, 6), 4),
    "autoencoder": lambda: lf.Autoencoder(lf.GRU(3, 5), lf.GRU(5 + 3, 6), lf.Reals(3)),
    "own pattern": lambda: Echo(lf.GRU(3 + 4, 5), 4),
    "own pattern, nothing fed back": Repeater,
    "language model": lambda: recurrent_lm(4, [lf.GRU(6, 5), lf.GRU(5, 5)], 6),
    "one-hot language model": lambda: lf.RecurrentLM(lf.SequenceToSequence(lf.Elman(4, 5), 4)),
}
FEEDS = ("outputs back", "vector", "encoder-decoder", "autoencoder", "own pattern")
FEEDINGS = (
    *(None, lf.TeacherForcing(), lf.FreeRunning(), lf.FreeRunning(lf.Greedy())),
    *(Blurred(), BlurredTruth(), lf.GeneralisedTeacherForcing(0.3)),
)
CASES = [
    (name, feeding, level)
    for name in PATTERNS
    for feeding in (FEEDINGS if name in FEEDS else FEEDINGS[:1])
    for level in lf.Level
]


def data(model: nn.Module) -> tuple[Tensor | None, Tensor]:
    """x and y as the model takes them."""
    y = torch.randint(4, (TAU, BATCH))
    if isinstance(model, lf.RecurrentLM):
        return None, y
    x = (
        torch.randn(BATCH, 3).double()
        if isinstance(model, lf.VectorToSequence)
        else torch.randn(TAU, BATCH, 3).double()
    )
    if isinstance(model, lf.Autoencoder):
        return x, model.targets(x).clone()
    if isinstance(model, lf.SequenceToSequence) and isinstance(model.outputs, lf.Reals):
        return x, torch.randn(TAU, BATCH, 2).double()
    return x, y[0] if isinstance(model, lf.SequenceToOne) else y


def loss_of(model: nn.Module, x: Tensor | None, y: Tensor, feeding: lf.Feeding | None) -> Tensor:
    """What the library computes, by no word of the drawing."""
    if isinstance(model, lf.RecurrentLM):
        return model(y, model.initial_context(BATCH)).nll.sum()
    assert isinstance(model, Pattern)
    assert x is not None
    if isinstance(model, lf.Autoencoder):
        return model.loss(model(x, **({"feeding": feeding} if feeding else {})), y)
    if feeding is None:
        return model.loss(model.given(x, y), y)
    return model.loss(model(x, y, feeding), y)


# ------------------------------------------------------------------ the drawing is the computation


@pytest.mark.parametrize(("name", "feeding", "level"), CASES)
def test_running_the_unfolded_graph_gives_the_loss_and_the_gradients(
    name: str, feeding: lf.Feeding | None, level: lf.Level
) -> None:
    """M6: each node is computed from the edges into it alone; were one missing, the numbers would differ."""
    model = PATTERNS[name]().double()
    x, y = data(model)
    drawn = circuit(model, level, feeding, None)
    unfolded = Unfolded(drawn, TAU)
    found = unfolded.gradients(data_of(unfolded, x, y), BATCH)
    if x is not None:
        x.requires_grad_()
    loss = loss_of(model, x, y, feeding)
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-12)
    if x is None or (name == "autoencoder" and feeding is not None and feeding.reads_truth):
        return  # tokens have no gradient; what an autoencoder is forced with is x itself, so it has two ways back
    (expected,) = torch.autograd.grad(loss, x)
    (source,) = [v for v in drawn.variables if v.role is Role.INPUT and v not in drawn.rules]
    steps = [None] if isinstance(model, lf.VectorToSequence) else range(1, TAU + 1)
    for t in steps:
        norm = float((expected if t is None else expected[t - 1]).norm())
        assert found.moments[Moment(source, t)] == pytest.approx(norm, rel=1e-10)


def test_the_gradient_on_an_edge_is_its_share_of_the_node() -> None:
    """Two edges leave h(t): to o(t), which brings Vᵀ ∇o(t), and to h(t+1), which brings the rest (book 10.20)."""
    model = lf.SequenceToSequence(lf.Elman(3, 5), 4).double()
    x, y = torch.randn(TAU, BATCH, 3).double(), torch.randint(4, (TAU, BATCH))
    drawn = circuit(model, lf.Level.BOOK, None, None)
    unfolded = Unfolded(drawn, TAU)
    found = unfolded.gradients(data_of(unfolded, x, y), BATCH)
    hand = lf.bptt(model, x, y)
    V, W = model.V.detach(), dict(model.named_parameters())["recurrent.cell.W"].detach()
    h = model.recurrent(x).hidden.detach()
    by_label = {v.label: v for v in drawn.variables}
    for arrow in unfolded.arrows:
        t = arrow.target.t
        assert t is not None
        if (arrow.source.variable.label, arrow.target.variable.label) == ("h", "o"):
            assert found.arrows[arrow] == pytest.approx(float((hand.o[t - 1] @ V).norm()), rel=1e-10)
        if (arrow.source.variable.label, arrow.target.variable.label) == ("h", "h"):
            back = (1 - h[t - 1] ** 2) * hand.h[t - 1] @ W
            assert found.arrows[arrow] == pytest.approx(float(back.norm()), rel=1e-10)
    for t in range(1, TAU + 1):
        assert found.moments[Moment(by_label["h"], t)] == pytest.approx(float(hand.h[t - 1].norm()), rel=1e-10)


class Executed(TorchDispatchMode):
    """The operations that really run, and which result each one read."""

    def __init__(self, held: list[Tensor]) -> None:
        super().__init__()
        self.made: dict[int, int] = {}  # a tensor → the operation that made it
        self.constant = {id(t) for t in held}
        self.operations: list[str] = []
        self.edges: Counter[tuple[int, int]] = Counter()
        self.keep: list[Any] = [*held]

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        made = [r for r in torch.utils._pytree.tree_leaves(result) if isinstance(r, Tensor)]
        self.keep += [*read, *made]  # held, so that an id stays its own
        if read and all(id(a) in self.constant for a in read):
            self.constant |= {id(r) for r in made}
            return result
        number = len(self.operations)
        self.operations.append(func._schema.name.removeprefix("aten::"))
        self.edges.update((self.made[id(a)], number) for a in {id(a): a for a in read}.values() if id(a) in self.made)
        self.made |= {id(r): number for r in made}
        return result


CELLS: dict[str, Callable[[], nn.Module]] = {make.__name__: partial(make, 3, 5) for make in zoo.WITH_INPUT}
EXAMPLE = torch.zeros(1, 1, 3)


@pytest.mark.parametrize("tau", [1, 4])
@pytest.mark.parametrize("name", CELLS)
def test_the_unfolded_drawing_has_the_operations_that_are_run_and_their_edges(name: str, tau: int) -> None:
    """M6: operation by operation, against a recording of the plain loop; what is of parameters alone is left out."""
    cell = CELLS[name]()
    unfolded = Unfolded(circuit(cell, lf.Level.OPERATIONS, None, EXAMPLE), tau)
    xs, state = torch.randn(tau, 2, 3).unbind(), cell.initial_state(2)  # type: ignore[operator]
    with torch.no_grad(), Executed([*cell.parameters(), *cell.buffers()]) as ran:
        for x in xs:
            state = cell(state, x)

    drawn = [m for m in unfolded.moments if m.variable.role is Role.OPERATION]
    drawn.sort(key=lambda m: (m.t, unfolded.circuit.variables.index(m.variable)))
    number = {moment: i for i, moment in enumerate(drawn)}
    assert len(drawn) == len(ran.operations)

    # edges between operations, those through a state included: h(t-1) is what the last operation of t-1 made
    reads: dict[Moment, list[Moment]] = {}
    for arrow in unfolded.arrows:
        reads.setdefault(arrow.target, []).append(arrow.source)

    def origins(moment: Moment) -> list[Moment]:
        return [moment] if moment in number else [o for m in reads.get(moment, []) for o in origins(m)]

    edges = Counter((number[o], number[m]) for m in drawn for o in {o for r in reads[m] for o in origins(r)})
    assert set(edges) == set(ran.edges)


@pytest.mark.parametrize("name", CELLS)
def test_the_book_level_is_the_operations_level_with_the_operations_left_out(name: str) -> None:
    """Between two variables there is an edge exactly where operations lead from one to the other, past no third."""
    book = circuit(CELLS[name](), lf.Level.BOOK, None, EXAMPLE)
    operations = circuit(CELLS[name](), lf.Level.OPERATIONS, None, EXAMPLE)

    def shown(drawn: Circuit) -> set[tuple[str, str, int]]:
        return {(e.source.label, e.target.label, e.lag) for e in drawn.edges if e.target.role is not Role.OPERATION}

    # what an operation makes may be a state: whoever reads that operation reads the state
    state_of = {e.source: e.target for e in operations.edges if e.target.role is Role.STATE and e.lag == 0}

    def origins(variable: Variable, first: bool = True) -> set[tuple[str, int]]:
        found: set[tuple[str, int]] = set()
        for edge in operations.into(variable):
            source = edge.source
            if source.role is not Role.OPERATION:
                found.add((source.label, edge.lag))
            elif source in state_of and not (first and variable.role is Role.STATE):
                found.add((state_of[source].label, 0))
            else:
                found |= origins(source, False)
        return found

    expected = {(o, v.label, lag) for v in operations.variables if v.role is Role.STATE for o, lag in origins(v)}
    assert shown(book) == expected


def test_an_encoder_and_its_decoder_may_differ_in_length() -> None:
    model = PATTERNS["encoder-decoder"]().double()
    assert isinstance(model, lf.EncoderDecoder)
    x, y = torch.randn(6, BATCH, 3).double(), torch.randint(4, (2, BATCH))
    unfolded = Unfolded(circuit(model, lf.Level.BOOK, None, None), (6, 2))
    found = unfolded.gradients(data_of(unfolded, x, y), BATCH)
    assert found.loss == pytest.approx(float(model.loss(model(x, y), y).detach()), rel=1e-12)
    assert lf.draw(model, (6, 2), True, x=x, y=y).title == "The way back through EncoderDecoder, 6 steps and 2 steps"


def test_gradients_too_small_for_single_precision_are_no_zeros() -> None:
    model = lf.SequenceToOne(lf.Elman(3, 5, recurrent_init=lf.ScaledIdentity(0.05)), 4)
    unfolded = Unfolded(circuit(model, lf.Level.BOOK, None, None), 22)
    found = unfolded.gradients(data_of(unfolded, torch.zeros(22, 1, 3), torch.zeros(1).long()), 1)
    (state,) = [v for v in unfolded.circuit.variables if v.role is Role.STATE]
    assert 0 < found.moments[Moment(state, 1)] < 1e-26


def test_drawing_changes_nothing_of_the_network() -> None:
    stack = lf.Stacked([lf.LSTM(3, 5), lf.GRU(5, 5)], dropout=0.5)
    model = lf.VectorToSequence(lf.Stacked([lf.Elman(7, 5), stack.layers[1]], 0.5), 4).train()
    before, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    x, y = torch.randn(2, 3, generator=torch.Generator()), torch.zeros(3, 2).long()
    drawing = lf.draw(model, 3, True, feeding=lf.ScheduledSampling(0.5), x=x, y=y)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(m.training and not m._forward_hooks for m in model.modules())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    alive = weakref.ref(model.readout.V)
    del model, before
    gc.collect()
    assert alive() is None, "a drawing keeps the network that it shows"
    assert drawing.title


# ------------------------------------------------------------------ what it shows


def edges(model: Any, **options: Any) -> set[tuple[str, str, int, tuple[str, ...]]]:
    drawn = circuit(model, lf.Level.BOOK, options.get("feeding"), None)
    return {(e.source.label, e.target.label, e.lag, e.parameters) for e in drawn.edges}


def test_figure_10_3() -> None:
    """Hidden recurrence: U, W and V on their edges."""
    assert edges(lf.SequenceToSequence(lf.Elman(3, 5), 4)) == {
        ("x", "h", 0, ("U",)),
        ("h", "h", 1, ("W",)),
        ("h", "o", 0, ("V",)),
        ("o", "L", 0, ()),
        ("y", "L", 0, ()),
    }


@pytest.mark.parametrize(
    ("feeding", "fed"),
    [
        (lf.TeacherForcing(), {"y"}),
        (lf.FreeRunning(), {"o"}),
        (lf.ScheduledSampling(0.5), {"o", "y"}),
        (Blurred(), {"o", "y"}),
        (BlurredTruth(), {"y"}),
    ],
)
def test_figures_10_4_and_10_6(feeding: lf.Feeding, fed: set[str]) -> None:
    """Output recurrence: the output comes back, or under teacher forcing the target does."""
    found = edges(lf.OutputRecurrence(3, 5, 4), feeding=feeding)
    assert {source for source, target, lag, _ in found if (target, lag) == ("h", 1)} == fed
    assert ("h", "h", 1, ("W",)) not in found


@pytest.mark.parametrize(
    ("feeding", "flows"),
    [
        (lf.FreeRunning(lf.Raw()), True),
        (lf.FreeRunning(lf.Sample()), False),
        (lf.ScheduledSampling(0.5), True),
        (lf.ScheduledSampling(0.5, lf.Greedy()), False),
        (Blurred(), True),
        (lf.GeneralisedTeacherForcing(0.3), True),
        (lf.GeneralisedTeacherForcing(0.3, lf.Sample()), False),
    ],
)
def test_gradients_are_drawn_where_they_flow(feeding: lf.Feeding, flows: bool) -> None:
    drawn = circuit(lf.OutputRecurrence(3, 5, 4), lf.Level.BOOK, feeding, None)
    assert {edge.flows for edge in drawn.edges if edge.source.label == "o" and edge.lag} == {flows}
    assert not any(edge.flows for edge in drawn.edges if edge.source.label == "y")


def test_the_feeding_that_is_drawn_is_the_one_that_runs() -> None:
    for make in (PATTERNS[name] for name in FEEDS):
        model = make()
        assert isinstance(model, Pattern)
        assert inspect.signature(model.predict).parameters["feeding"].default == model.wiring.feeding


def test_the_gradients_of_a_pattern_of_ones_own() -> None:
    model, x, y = PATTERNS["own pattern"](), torch.randn(6, 2, 3), torch.randint(4, (6, 2))
    assert isinstance(model, Pattern)
    flow = lf.gradient_flow(model, model.loss, x, y)
    assert flow.norms.shape == (6, 6)
    assert flow.norms.tril().equal(flow.norms)
    assert lf.per_step_gradients(model, model.loss, x, y)["W"].shape == (6, 15, 5)
    with pytest.raises(TypeError, match=r"one step for each x\(t\); not Repeater"):
        lf.gradient_flow(repeater := Repeater(), repeater.loss, x, y)


def test_a_wiring_that_cannot_be() -> None:
    wiring = lf.SequenceToOne(lf.GRU(3, 5), 4).wiring
    for wrong in ({"feeding": lf.FreeRunning()}, {"x": lf.When.LAST}, {"answers": lf.When.ONCE}):
        with pytest.raises(ValueError, match="every step"):
            replace(wiring, **wrong)
    with pytest.raises(TypeError, match=r"Linear is not a layer such as lf.Recurrent\(cell\)"):
        replace(wiring, recurrent=nn.Linear(3, 5))
    wrong_kinds: list[tuple[dict[str, Any], str]] = [
        ({"answers": "last"}, r"answers must be an object such as lf\.When\.EVERY; got 'last'"),
        ({"answers": None}, "answers must be"),
        ({"x": "every"}, r"x must be an object such as lf\.When\.EVERY; got 'every'"),
        (
            {"answers": lf.When.EVERY, "feeding": lf.FreeRunning},
            r"feeding must be an object such as lf\.Teacher.*class",
        ),
        ({"encoder": lf.GRU(3, 5)}, r"encoder must be an object such as lf\.Recurrent\(cell\); got GRU"),
        ({"recurrent": lf.Recurrent}, r"recurrent must be an object such as lf\.Recurrent\(cell\)"),
        ({"readout": nn.Linear}, r"readout must be an object such as lf\.Readout"),
        ({"outputs": 4}, r"outputs must be an object such as lf\.Classes\(4\); got 4"),
        ({"targets": "x"}, "targets must be a function of x, such as lambda x: x; got 'x'"),
    ]
    for wrong, message in wrong_kinds:
        with pytest.raises(TypeError, match=message):
            replace(wiring, **wrong)


def test_names_of_layers_and_directions_differ() -> None:
    model = lf.Stacked([lf.Bidirectional(lf.Elman(3, 5), lf.Elman(3, 5)), lf.Elman(10, 5)])
    labels = [v.label for v in circuit(model, lf.Level.BOOK, None, None).variables]
    assert len(labels) == len(set(labels)) == 4


class Parts(lf.Transition):
    """Modules within modules, whose parameters have the same last names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = lf.Elman(5, 5), lf.Elman(5, 5)
        self.net = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        self.dropout = nn.Dropout(0.5)

    def initial_state(self, batch: int) -> Tensor:
        return torch.zeros(batch, 5)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.dropout(self.net(self.a(h, x) * self.b(h, x)))


def test_different_parameters_have_different_names() -> None:
    """And a cell that drops units out in training is drawn as it is used."""
    found = edges(Parts())
    assert ("h", "h", 1, ("W_{a}", "W_{b}", r"W_{\mathrm{net},0}", r"W_{\mathrm{net},2}")) in found


def test_shared_parameters_have_one_name() -> None:
    layer = lf.Recurrent(lf.Elman(5, 5))
    found = edges(lf.Stacked([layer, layer]))
    assert {parameters for source, target, lag, parameters in found if lag == 1} == {("W_{1}",)}


def test_no_gradient_goes_back_through_a_choice() -> None:
    model = lf.OutputRecurrence(3, 5, 4)
    for pick, flows in ((lf.Soft(), True), (lf.Raw(), True), (lf.Greedy(), False), (lf.Sample(), False)):
        drawn = circuit(model, lf.Level.BOOK, lf.FreeRunning(pick), None)
        scene = unfolded_scene(Unfolded(drawn, 3), None, True)
        assert any(link.dashed for link in scene.links) is flows


def test_a_parameter_has_one_colour_at_all_steps_and_its_own() -> None:
    from loopfold.drawing.scene import parameter_colours

    scene = unfolded_scene(Unfolded(circuit(PATTERNS["stacked"](), lf.Level.BOOK, None, None), 3), None, False)
    colours = parameter_colours(scene.links)
    used = {link.parameters for link in scene.links if link.parameters}
    assert len({colours[p] for p in used}) == len(used)


@pytest.mark.parametrize("steps", [13, 1000])
def test_long_sequences_are_elided(steps: int) -> None:
    scene = unfolded_scene(Unfolded(circuit(PATTERNS["LSTM"](), lf.Level.BOOK, None, None), steps), None, False)
    shown = {key.t for key in scene.shapes if isinstance(key, Moment)}
    assert shown == {0, 1, 2, 3, steps - 1, steps}
    assert sum(shape.kind == "dots" for shape in scene.shapes.values()) == 2  # of h and of c


@pytest.mark.parametrize("name", ["outputs back", "vector", "encoder-decoder"])
def test_gradients_turn_the_arrows_round_and_leave_targets_out(name: str) -> None:
    drawn = circuit(PATTERNS[name](), lf.Level.BOOK, None, None)
    unfolded = Unfolded(drawn, 3)
    there, back = (unfolded_scene(unfolded, None, backwards) for backwards in (False, True))
    expected = {
        (link.target, link.source)
        for link in there.links
        if isinstance(link.source, Moment) and link.source.variable.role is not Role.TARGET
    }
    assert {(link.source, link.target) for link in back.links} == expected


# ------------------------------------------------------------------ nothing lies on anything else


def collisions(scene: Scene) -> list[str]:
    """Every pair of things in a scene of which one lies on the other."""
    found = []
    spots = {key: shape.spot for key, shape in scene.shapes.items()}
    routes = scene.routes()
    labels = [
        (i, np.array(r.label), np.array(line.label))
        for i, (r, line) in enumerate(zip(routes, scene.lines(), strict=True))
        if r.label
    ]
    ways = [_dense(r.points) for r in routes]
    for one, two in itertools.combinations(spots.values(), 2):
        away = np.abs(one.centre - two.centre)
        if (away < (one.half_width + two.half_width, one.half_height + two.half_height)).all():
            found.append(f"two nodes at {one.centre}")
    for link, way in zip(scene.links, ways, strict=True):
        for key, spot in spots.items():
            if key not in (link.source, link.target) and spot.holds(way).any():
                found.append(f"an edge over {scene.shapes[key].text}")
    for (_, a, half), (_, b, other) in itertools.combinations(labels, 2):
        if (np.abs(a - b) < half + other).all():
            found.append(f"two labels at {a}")
    for i, place, half in labels:
        found += [
            f"a label over the node at {spot.centre}"
            for spot in spots.values()
            if spot.holds(np.clip(spot.centre, place - half, place + half)[None])[0]
        ]
        gaps = np.array([np.maximum(np.abs(way - place) - half, 0).max(1).min() for way in ways])
        others = np.arange(len(ways)) != i
        if (gaps[others | (not routes[i].on)] == 0).any():  # one that stands on its edge interrupts it
            found.append(f"a label over an edge at {place}")
        said = [link.label() != scene.links[i].label() for link in scene.links]
        if (gaps[said] < gaps[i]).any():
            found.append(f"a label beside the wrong edge at {place}")
    return found


def _dense(points: Any) -> Any:
    pieces = [np.linspace(a, b, 60) for a, b in itertools.pairwise(points)]
    return np.concatenate(pieces)


SCENES = [
    (*case, steps)
    for case in CASES
    if case[1] in FEEDINGS[:3]
    for steps in ((None, 1, 3, 50) if case[2] is lf.Level.BOOK else (None, 3))
]


@pytest.mark.parametrize(("name", "feeding", "level", "steps"), SCENES)
def test_no_node_edge_or_label_lies_on_another(
    name: str, feeding: lf.Feeding | None, level: lf.Level, steps: int | None
) -> None:
    drawn = circuit(PATTERNS[name](), level, feeding, None)
    scene = circuit_scene(drawn) if steps is None else unfolded_scene(Unfolded(drawn, steps), None, False)
    assert collisions(scene) == []


def test_labels_of_layers_both_ways_stand_beside_their_own_edges_or_interrupt_them() -> None:
    both = lf.Stacked([lf.Bidirectional(lf.GRU(n, 5), lf.GRU(n, 5)) for n in (3, 10)])
    model = lf.EncoderDecoder(both, lf.Stacked([lf.GRU(10 + 4, 6), lf.GRU(6, 6)]), outputs=4)
    drawn = circuit(model, lf.Level.BOOK, None, None)
    unfolded = unfolded_scene(Unfolded(drawn, (3, 3)), None, False)
    assert collisions(circuit_scene(drawn)) == collisions(unfolded) == []
    over = sum(way.on for way in unfolded.routes())
    (axes,) = paint(unfolded).figure.axes
    assert sum(text.get_bbox_patch() is not None for text in axes.texts) == over > 0


# ------------------------------------------------------------------ the object


def test_it_saves_itself_in_every_format(tmp_path: Path) -> None:
    drawing = lf.draw(lf.SequenceToSequence(lf.Elman(3, 5), 4), steps=3)
    begins = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF", "html": b"<!doctype html>", "dot": b"digraph"}
    for kind, start in begins.items():
        assert drawing.save(tmp_path / f"a.{kind}").read_bytes().startswith(start)
    ElementTree.parse(tmp_path / "a.svg")
    dot = (tmp_path / "a.dot").read_text()
    assert dot.count("->") == 3 * 5
    assert "h(2)" in dot
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"a.{kind}" for kind in sorted(begins)]  # nothing left over


def test_it_shows_itself_in_notebooks_and_follows_the_theme() -> None:
    drawing = lf.draw(lf.Elman(3, 5))
    page = drawing._repr_html_()
    assert all(part in page for part in ("<svg", "prefers-color-scheme: dark", "fill: #1f2328"))
    assert drawing._repr_png_().startswith(b"\x89PNG")
    assert repr(drawing) == "<Drawing: The circuit of Elman>"


def test_the_same_picture_is_the_same_file() -> None:
    torch.manual_seed(0)
    a = lf.draw(lf.LSTM(3, 5), 2, level=lf.Level.OPERATIONS).svg()
    torch.manual_seed(1)
    assert lf.draw(lf.LSTM(3, 5), 2, level=lf.Level.OPERATIONS).svg() == a


def test_names_that_are_no_mathematics(tmp_path: Path) -> None:
    """Whatever a user calls a parameter, the picture is drawn and escaped."""

    class Odd(lf.Transition):
        def __init__(self) -> None:
            super().__init__()
            for name in (
                "W__x",
                "β",
                "_hidden",
                "a1b2",
                "very_long_name_of_a_matrix",
                "a#b",
                "a&b",
                "权",
                "x$",
                "~",
                "\\",
            ):
                self.register_parameter(name, nn.Parameter(torch.randn(5, 5)))

        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            for p in self.parameters():
                h = h @ p
            return torch.tanh(h + x)

    drawing = lf.draw(Odd(), 2, x=torch.zeros(2, 1, 5))
    ElementTree.fromstring(drawing.svg())


def test_a_step_without_input_and_a_function() -> None:
    """Book Fig. 10.1: s(t) = f(s(t-1))."""
    drawn = circuit(zoo.Autonomous(4), lf.Level.BOOK, None, None)
    assert [v.role for v in drawn.variables] == [Role.STATE]
    lf.draw(zoo.Autonomous(4), 3)

    def halve(h: Tensor, x: Tensor) -> Tensor:
        return h / 2 + x

    assert lf.draw(halve, 3).title == "The unfolded graph of halve, 3 steps"
    assert lf.draw(lambda s: s / 2 + 1, 3).dot().count("->") == 3


def test_settings_of_the_user_stay_out_of_it() -> None:
    import matplotlib

    plain = lf.draw(lf.Elman(3, 5)).svg()
    with matplotlib.rc_context({"text.usetex": True, "svg.fonttype": "none", "savefig.bbox": "tight", "font.size": 30}):
        assert lf.draw(lf.Elman(3, 5)).svg() == plain
        assert matplotlib.rcParams["text.usetex"] is True


# ------------------------------------------------------------------ bad input


class Branching(lf.Transition):
    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.eye(4))

    def initial_state(self, batch: int) -> Tensor:
        return torch.zeros(batch, 4)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return h @ self.W + x if float(h.sum()) > 0 else x


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: lf.draw(lf.Elman(3, 5), steps=0), ValueError, "steps as a whole number of at least 1; got 0"),
        (lambda: lf.draw(lf.Elman(3, 5), steps=2.5), ValueError, "got 2.5"),  # type: ignore[arg-type]
        (lambda: lf.draw(lf.Elman(3, 5), gradients=True), ValueError, "give steps"),
        (lambda: lf.draw(lf.Elman), TypeError, r"type Elman\(\.\.\.\)"),
        (lambda: lf.draw(3), TypeError, "got a int"),
        (lambda: lf.draw(nn.LSTM(3, 5)), TypeError, "from_torch"),
        (
            lambda: lf.draw(Branching()),
            ValueError,
            "Branching cannot be drawn, because it cannot be traced: it asks for",
        ),
        (lambda: lf.draw(lf.Elman(3, 5), level="sketch"), ValueError, "book.*operations.*sketch"),
        (lambda: lf.draw(lf.Elman(3, 5), feeding=lf.FreeRunning()), ValueError, "feeds no output back"),
        (lambda: lf.draw(lf.OutputRecurrence(3, 5, 4), feeding="free"), TypeError, "TeacherForcing"),  # type: ignore[arg-type]
        (lambda: lf.draw(lf.NGramLM(torch.tensor([0, 1, 0]), 2, 2)), TypeError, "no recurrence"),
        (
            lambda: lf.draw(lf.Elman(3, 5), 2, True, x=torch.zeros(2, 1, 3), y=torch.zeros(2, 1).long()),
            ValueError,
            "no loss",
        ),
        (
            lambda: lf.draw(PATTERNS["every step"](), 4, True, x=torch.zeros(3, 1, 3), y=torch.zeros(3, 1).long()),
            ValueError,
            "y has 3 steps; expected 4, as many as are drawn",
        ),
        (lambda: lf.draw(PATTERNS["every step"](), 4, True, y=torch.zeros(4, 1).long()), ValueError, "inputs x"),
        (lambda: lf.draw(PATTERNS["every step"](), 4, y=torch.zeros(4, 1).long()), ValueError, "gradients=True"),
        (lambda: lf.draw(PATTERNS["every step"](), 4, x=torch.zeros(4, 1, 7)), ValueError, "Elman reads 3 features"),
        (lambda: lf.draw(PATTERNS["every step"](), 4, x=torch.zeros(4, 1, 3).double()), TypeError, "float64"),
        (lambda: lf.draw(PATTERNS["every step"](), 4, x=torch.zeros(3)), ValueError, "needs"),
        (lambda: lf.draw(PATTERNS["every step"](), 4, True, x=torch.zeros(4, 1, 3)), ValueError, "targets y"),
        (lambda: lf.draw(PATTERNS["every step"](), (2, 3)), ValueError, "needs one number"),
        (
            lambda: lf.draw(PATTERNS["every step"](), 2, True, x=torch.zeros(2, 1, 3), y=torch.zeros(2, 3).long()),
            ValueError,
            "y has batch 3 and x has batch 1",
        ),
        (
            lambda: lf.draw(PATTERNS["at the end"](), 2, True, x=torch.zeros(2, 1, 3), y=torch.zeros(1, 2).long()),
            ValueError,
            "so y must be",
        ),
        (
            lambda: lf.draw(PATTERNS["vector"](), 2, True, x=torch.zeros(1, 1, 3), y=torch.zeros(2, 1).long()),
            ValueError,
            "cannot be run on these data",
        ),
        (
            lambda: lf.draw(PATTERNS["language model"](), 2, True, x=torch.zeros(2, 1), y=torch.zeros(2, 1).long()),
            ValueError,
            "leave x out",
        ),
        (lf.beside, TypeError, "got none"),
        (lambda: lf.draw(PATTERNS["every step"](), 4, x=[1, 2]), TypeError, "list"),
    ],
)
def test_bad_input_is_told_in_words(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_bad_paths_are_told_in_words(tmp_path: Path) -> None:
    drawing = lf.draw(lf.Elman(3, 5))
    with pytest.raises(ValueError, match=r"\.svg, \.png.*got \.gif"):
        drawing.save(tmp_path / "a.gif")
    with pytest.raises(ValueError, match="without an ending"):
        drawing.save(tmp_path / "a")
    with pytest.raises(OSError, match="cannot be written: No such file or directory"):
        drawing.save(tmp_path / "none" / "a.svg")
    (tmp_path / "a.svg").mkdir()
    with pytest.raises(OSError, match="cannot be written"):
        drawing.save(tmp_path / "a.svg")
    flow = lf.gradient_flow(
        lf.SequenceToSequence(lf.Elman(3, 5), 4), lambda o, y: o.sum(), torch.randn(4, 1, 3), torch.zeros(4, 1).long()
    )
    with pytest.raises(ValueError, match=r"no graph.*\.dot"):
        flow.draw().save(tmp_path / "b.dot")
    assert [p.name for p in tmp_path.iterdir()] == ["a.svg"]


def test_graphs_side_by_side() -> None:
    circuit_alone, unfolded = lf.draw(lf.Elman(3, 5)), lf.draw(lf.Elman(3, 5), steps=3)
    both = lf.beside(circuit_alone, unfolded)
    assert both.dot().count("->") == circuit_alone.dot().count("->") + unfolded.dot().count("->")
    assert isinstance(both.graph, Scene)
    assert collisions(both.graph) == []
    with pytest.raises(TypeError, match="drawings of graphs"):
        lf.beside(both, lf.eigenvalues(lf.Elman(3, 5)).draw())
