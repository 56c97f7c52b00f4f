"""What a picture says is true, in the user's own names, and can be read: labels, straight lines, legends, formats."""

import base64
import re
import struct
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import loopfold as lf
from loopfold.drawing.circuit import Circuit, Role
from loopfold.drawing.figure import LIGHT, Drawing, _element, new_figure, style
from loopfold.drawing.layout import blocks
from loopfold.drawing.legend import legend
from loopfold.drawing.networks import circuit
from loopfold.drawing.notation import parameter_symbols, plain, symbol
from loopfold.drawing.paint import paint
from loopfold.drawing.picture import _size, circuit_scene, unfolded_scene
from loopfold.drawing.routing import _crossings, resampled
from loopfold.drawing.scene import Scene, label_of, parameter_colours
from loopfold.drawing.unfolded import Moment, Unfolded
from loopfold.report.sections import _ends

pytestmark = pytest.mark.usefixtures("one_thread")


def operations(model: Any) -> Circuit:
    return circuit(model, lf.Level.OPERATIONS, None, None)


def labels(drawn: Circuit) -> list[str]:
    """What stands in the boxes and beside the edges, with the box that an edge comes from."""
    boxes = [plain(v.label) for v in drawn.variables]
    beside = [f"{plain(e.source.label)}: {plain(' '.join(e.parameters) or e.note)}" for e in drawn.edges]
    return [*boxes, *(text for text in beside if not text.endswith(": "))]


# ------------------------------------------------------------------ the truth of parameters and operands

Rule = Callable[["Mixed", Tensor, Tensor], Tensor]


class Mixed(lf.Transition):
    """h and n = tanh(U x) mixed by any rule."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.U, self.alpha = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.rand(5))
        self.pack = nn.Parameter(torch.randn(10, 5))
        self.rule = rule

    def initial_state(self, batch: int) -> Tensor:
        return torch.zeros(batch, 5)

    def forward(self, h: Tensor, token: Tensor) -> Tensor:
        n = torch.tanh(token @ self.U.T)
        return self.rule(self, h, n)


RULES: dict[str, tuple[Rule, set[str]]] = {
    "leaky": (lambda c, h, n: (1 - c.alpha) * h + c.alpha * n, {"h: 1 − α", "n= tanh: α"}),
    "no complement": (lambda c, h, n: c.alpha * h + c.alpha * n, {"h: α", "n= tanh: α"}),
    "functions": (
        lambda c, h, n: torch.exp(-c.alpha) * h + torch.sigmoid(c.alpha) * n,
        {"h: exp(−α)", "n= tanh: σ(α)"},
    ),
    "scaled": (
        lambda c, h, n: (2 * c.alpha - 3) * h + (c.alpha - (1 - c.alpha)) * n,
        {"h: 2 α − 3", "n= tanh: α − (1 − α)"},
    ),
    "brackets": (lambda c, h, n: h * ((1 + c.alpha) / (c.alpha * 2)) + n, {"h: (α + 1) / (2 α)"}),
    "power": (lambda c, h, n: h * (-c.alpha) ** 2 + n, {"h: (−α)2"}),
    "h - n": (lambda c, h, n: h - n, {"n= tanh: −"}),
    "n - h": (lambda c, h, n: n - h, {"h: −"}),
    "h / n": (lambda c, h, n: h / n, {"n= tanh: ÷"}),
    "n / h": (lambda c, h, n: n / h, {"h: ÷"}),
    "h / α": (lambda c, h, n: h / c.alpha + n, {"÷ α"}),
    "α / h": (lambda c, h, n: c.alpha / h + n, {"α ÷"}),
    "α - h": (lambda c, h, n: c.alpha - h + n, {"α −"}),
    "h - α": (lambda c, h, n: h - c.alpha + n, {"− α"}),
    "2 - h": (lambda c, h, n: 2 - h + n, {"2 −"}),
    "h + 2 n": (lambda c, h, n: torch.add(h, n, alpha=2), {"n= tanh: + 2 ·"}),
    "n + 2 h": (lambda c, h, n: torch.add(n, h, alpha=2), {"h: + 2 ·"}),
    "h + 3 α": (lambda c, h, n: torch.add(h, c.alpha, alpha=3) + n, {"+ 3 α"}),
    "clamp 1": (lambda c, h, n: torch.clamp(h + n, -1, 1), {"clamp [−1, 1]"}),
    "clamp 2": (lambda c, h, n: torch.clamp(h + n, -1, 2), {"clamp [−1, 2]"}),
    "h^α": (lambda c, h, n: h**c.alpha + n, {"·α"}),
    "first, second part": (lambda c, h, n: h @ c.pack[:5] + n @ c.pack[5:], {"h: pack[0:5]", "n= tanh: pack[5:]"}),
    "chunks": (lambda c, h, n: h @ c.pack.chunk(2)[1] + n @ c.pack.chunk(2)[0], {"h: pack[1]", "n= tanh: pack[0]"}),
    "h, n": (lambda c, h, n: torch.cat([h, n], -1) @ c.pack, {"h: 1", "n= tanh: 2"}),
    "n, h": (lambda c, h, n: torch.cat([n, h], -1) @ c.pack, {"n= tanh: 1", "h: 2"}),
    "columns": (lambda c, h, n: h @ c.pack[::2] + n @ c.pack[:5, 1:2], {"h: pack[0::2]", "n= tanh: pack[0:5][:, 1:2]"}),
    "part of the state": (lambda c, h, n: h[:, 2:3] * n, {"[:, 2:3]"}),
    "one number of it": (lambda c, h, n: h[:, 2, None] * n, {"[:, 2]"}),
    "constants": (lambda c, h, n: h * torch.full_like(c.alpha, 0.5) + n, {"h: 0.5"}),
    "rounded": (lambda c, h, n: torch.div(h, c.alpha, rounding_mode="floor") + n, {"÷ floor", "h: α"}),
    "roll 1": (lambda c, h, n: h.roll(1, -1) + n, {"roll 1 −1"}),
    "roll 2": (lambda c, h, n: h.roll(2, -1) + n, {"roll 2 −1"}),
    "lerp": (lambda c, h, n: torch.lerp(h, n, 0.25), {"lerp 0.25", "h: from", "n= tanh: to"}),
    "at least": (lambda c, h, n: torch.clamp(h + n, min=-1), {"clamp ≥ −1"}),
    "at most": (lambda c, h, n: torch.clamp(h + n, max=0.5), {"clamp ≤ 0.5"}),
    "h > 0": (lambda c, h, n: torch.where(h > 0, h, n), {"> 0", "h: if true", "n= tanh: if false", "> 0: condition"}),
    "h ≤ n": (lambda c, h, n: torch.where(h <= n, n, 0.5), {"n= tanh: ≤", "≤: condition", "n= tanh: if true"}),
    "α < h": (lambda c, h, n: torch.where(c.alpha < h, h, n), {"α <"}),
    "norm": (lambda c, h, n: nn.functional.layer_norm(h + n, (5,), c.alpha, c.alpha), {"norm ⊙ α + α"}),
    "time constant": (
        lambda c, h, n: torch.exp(-1 / c.alpha) * h + -2 / c.alpha * n,
        {"h: exp(−1/α)", "n= tanh: −2/α"},
    ),
    "negative factor": (lambda c, h, n: h * (-3 * c.alpha) + n, {"h: −3 α"}),
}


def test_what_is_computed_of_parameters_and_in_which_order_is_seen() -> None:
    """No two of these rules are the same, so no two pictures are."""
    found = {name: labels(operations(Mixed(rule))) for name, (rule, _) in RULES.items()}
    for name, (_, expected) in RULES.items():
        assert expected <= set(found[name]), name
    assert len({tuple(sorted(all_labels)) for all_labels in found.values()}) == len(found)


# ------------------------------------------------------------------ the user's own names


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.U, self.W, self.gate = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(3, 5)

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(batch, 5), torch.zeros(batch, 5)

    def forward(self, state: tuple[Tensor, Tensor], token: Tensor) -> tuple[Tensor, Tensor]:
        h, c = state
        keep = torch.sigmoid(self.gate(token))
        c = keep * c + torch.tanh(self.U(token) + self.W(h))
        h = torch.tanh(c)
        return h, c


def test_names_are_those_of_the_step() -> None:
    drawn = circuit(Layers(), lf.Level.BOOK, None, torch.zeros(1, 1, 3))
    assert [plain(v.label) for v in drawn.variables] == ["token", "h", "c"]
    assert {e.parameters for e in drawn.edges if e.lag and e.parameters} == {("W",)}
    assert {e.parameters for e in drawn.edges if e.source.role is Role.INPUT} == {(r"W_{\mathrm{gate}}", "U")}
    assert "keep= σ" in labels(circuit(Layers(), lf.Level.OPERATIONS, None, torch.zeros(1, 1, 3)))


def test_one_name_for_all_parts_of_a_state_is_none() -> None:
    def step(state: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part * 0.5 + x for part in state)

    drawn = circuit(Parts(step), lf.Level.BOOK, None, torch.zeros(1, 1, 5))
    assert [v.label for v in drawn.variables] == ["x", "s_{1}", "s_{2}"]


class Parts(nn.Module):
    def __init__(self, step: Callable[..., Any]) -> None:
        super().__init__()
        self.step = step

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(batch, 5), torch.zeros(batch, 5)

    def forward(self, state: Any, x: Tensor) -> Any:
        return self.step(state, x)


def test_gates_by_name() -> None:
    assert {"σ(i)", "σ(f)", "tanh(g)", "σ(o)"} <= set(labels(operations(lf.LSTM(3, 5))))
    assert {"r= σ", "z= σ", "n= tanh"} <= set(labels(operations(lf.GRU(3, 5))))


def test_symbols() -> None:
    names = ["U.weight", "U.bias", "gate.weight", "W_x.weight", "net.0.weight", "hidden_to_hidden", "b_hn"]
    found = [plain(s) for s in parameter_symbols(names).values()]
    assert found == ["U", "bU", "Wgate", "Wx", "Wnet,0", "hidden_to_hidden", "bhn"]
    assert symbol("hidden_to_hidden") == r"\mathrm{hidden\_to\_hidden}"


def test_entries_of_a_list_of_parameters_are_named_after_it() -> None:
    assert parameter_symbols(["W.0", "W.1", "cell.taps.0"]) == {
        "W.0": "W_{0}",
        "W.1": "W_{1}",
        "cell.taps.0": r"\mathrm{taps\_0}",
    }


# ------------------------------------------------------------------ what is where


def test_the_circuits_of_one_output_and_of_one_at_every_step_differ() -> None:
    every = lf.draw(lf.SequenceToSequence(lf.Elman(3, 5), 4)).dot()
    one = lf.draw(lf.SequenceToOne(lf.Elman(3, 5), 4)).dot()
    assert '"o"' in every
    assert '"o(τ)"' in one


@pytest.mark.parametrize("make", [lf.LSTM, lf.GRU, lf.LayerNormLSTM, lf.MGU])
def test_a_state_that_is_carried_on_stands_in_a_straight_line(make: Any) -> None:
    """From where it enters through sums and products to where it leaves, all at one x."""
    drawn = operations(make(3, 5))
    block = blocks(drawn, _size)[0]
    carried = [v for v in drawn.variables if v.role is Role.STATE][-1]  # c, or h where there is no c
    x, _ = block.places[carried]
    assert block.entries[carried, 1][0] == pytest.approx(x)
    above = [v for v in drawn.variables if v.carries and block.places[v][0] == pytest.approx(x)]
    assert len(above) >= 2  # a product and a sum
    entering = [e for e in drawn.edges if e.source is carried and e.lag and e.target in above]
    assert all(place[0] == pytest.approx(x) for edge in entering for place in block.ways[edge])


def test_many_ways_through_sums_and_products_take_no_longer() -> None:
    """Two at each of 40 pairs, none of which arrives: each edge is tried once."""

    class Paired(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W = nn.Linear(3, 3)

        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            z = h
            for _ in range(40):
                z = z + z * x
            return torch.tanh(self.W(z))

    assert len(blocks(operations(Paired()), _size)[0].places) > 80


def test_loops_through_delays_cross_no_others() -> None:
    embedded = lf.RecurrentLM(lf.SequenceToSequence(lf.Embedded(lf.GRU(6, 5), nn.Embedding(11, 6)), outputs=10))
    for scene in (
        circuit_scene(operations(lf.LSTM(3, 5))),
        circuit_scene(operations(Three())),
        unfolded_scene(Unfolded(operations(Three()), 2), None, False),
        circuit_scene(circuit(lf.LSTM(3, 5), lf.Level.BOOK, None, None)),
        circuit_scene(circuit(embedded, lf.Level.BOOK, lf.FreeRunning(), None)),
        circuit_scene(circuit(embedded, lf.Level.BOOK, None, None)),
    ):
        ends = [(scene.shapes[link.source], scene.shapes[link.target]) for link in scene.links]
        loops = [
            (a, way.points)
            for way, (a, b) in zip(scene.routes(), ends, strict=True)
            if "square" in (a.kind, b.kind) or a.spot.x < b.spot.x - 1.0
        ]
        pairs = [(p, q) for (a, p), (b, q) in combinations(loops, 2) if a is not b]  # those of one node share a way
        assert len(pairs) >= 2
        assert not any(_crossings(p, np.stack([q[:-1], q[1:]])) for p, q in pairs), scene.title


class Three(nn.Module):
    """A state of three parts, the highest the last."""

    def __init__(self) -> None:
        super().__init__()
        self.U = nn.Parameter(torch.randn(5, 3))

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        return torch.zeros(batch, 5), torch.zeros(batch, 5), torch.zeros(batch, 5)

    def forward(self, state: tuple[Tensor, Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fast, slow, memory = state
        fast = torch.tanh(x @ self.U.T + fast + slow)
        slow = 0.9 * slow + torch.tanh(fast)
        return fast, slow, memory + torch.sigmoid(slow)


def test_each_arrow_has_its_own_place_at_a_node() -> None:
    """No head lies on another, nor on the beginning of what leaves there."""
    both = lf.Stacked([lf.Bidirectional(lf.GRU(n, 5), lf.GRU(n, 5)) for n in (3, 10)])
    model = lf.EncoderDecoder(both, lf.Stacked([lf.GRU(10 + 4, 6), lf.GRU(6, 6)]), outputs=4)
    scene = unfolded_scene(Unfolded(circuit(model, lf.Level.BOOK, None, None), (3, 3)), None, False)
    ways = [*zip(scene.links, (way.points for way in scene.routes()), strict=True)]
    ends = [(link.target, way[-1]) for link, way in ways]
    begins = [(link.source, way[0]) for link, way in ways]
    for (a, p), (b, q) in product(ends, ends + begins):
        assert a != b or p is q or np.hypot(*(p - q)) > 0.1, a


class LongNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_to_hidden, self.hidden_to_hidden = nn.Linear(3, 5), nn.Linear(5, 5, bias=False)
        self.leak_of_the_membrane = nn.Parameter(torch.rand(5))

    def initial_state(self, batch: int) -> Tensor:
        return torch.zeros(batch, 5)

    def forward(self, membrane_potential: Tensor, sensory_input: Tensor) -> Tensor:
        candidate = torch.tanh(self.input_to_hidden(sensory_input) + self.hidden_to_hidden(membrane_potential))
        return (1 - self.leak_of_the_membrane) * membrane_potential + self.leak_of_the_membrane * candidate


@pytest.mark.parametrize("level", lf.Level)
def test_a_long_label_stands_beside_its_own_edge(level: lf.Level) -> None:
    scene = circuit_scene(circuit(LongNames(), level, None, torch.zeros(1, 1, 3)))
    routes = scene.routes()
    for i, (link, way) in enumerate(zip(scene.links, routes, strict=True)):
        if way.label:
            half = np.array(link.label_size())
            away = [np.maximum(np.abs(resampled(r.points, 200) - way.label) - half, 0).max(1).min() for r in routes]
            others = [gap for gap, ln in zip(away, scene.links, strict=True) if ln.source != link.source]
            assert away[i] < min(0.15, *others), link.parameters


def test_labels_side_by_side_are_not_read_as_one() -> None:
    scene, _ = scenes(lf.VectorToSequence(lf.LSTM(3 + 4, 5), outputs=4), 3)
    boxes = [(r.label, ln.label_size()) for r, ln in zip(scene.routes(), scene.links, strict=True) if r.label]
    for (a, size), (b, other) in combinations(boxes, 2):
        apart = np.abs(np.subtract(a, b)) - np.add(size, other)
        assert apart[0] > 0.09 or apart[1] > 0, (a, b)


def test_a_name_of_several_words_is_large_enough_to_be_read() -> None:
    figure = paint(circuit_scene(circuit(LongNames(), lf.Level.BOOK, None, torch.zeros(1, 1, 3)))).figure
    names = [text for text in figure.axes[0].texts if "potential" in text.get_text()]
    assert [plain(text.get_text()) for text in names] == ["membrane_\npotential"]
    assert float(names[0].get_fontsize()) > 6


def scenes(model: nn.Module, steps: int) -> tuple[Scene, Scene]:
    unfolded = Unfolded(circuit(model, lf.Level.BOOK, None, None), steps)
    return unfolded_scene(unfolded, None, False), unfolded_scene(unfolded, None, True)


def test_everything_stays_where_it_is_when_gradients_are_shown() -> None:
    there, back = scenes(lf.SequenceToOne(lf.LSTM(3, 5), 4), 4)
    assert set(back.shapes) < set(there.shapes)
    assert all(there.shapes[key].spot == shape.spot for key, shape in back.shapes.items())


def test_a_picture_ends_at_what_it_shows() -> None:
    """The way back leaves the targets out, and leaves no empty band where they would be."""
    _, back = scenes(lf.SequenceToOne(lf.LSTM(3, 5), 4), 4)
    top = max(shape.spot.y + shape.spot.half_height for shape in back.shapes.values())
    assert paint(back).figure.axes[0].get_ylim()[1] == pytest.approx(top + 0.12)


def test_the_legend_of_a_wide_picture_is_larger() -> None:
    scene, _ = scenes(lf.Elman(3, 5), 3)
    assert [{key.scale for key in legend(scene, 0.0, 0.0, width)} for width in (7.0, 16.0)] == [{1.0}, {2.0}]


def labels_of_edges(model: nn.Module) -> dict[tuple[str, str], tuple[str, ...]]:
    drawn = circuit(model, lf.Level.BOOK, None, None)
    return {(plain(e.source.label), plain(e.target.label)): tuple(map(plain, e.parameters)) for e in drawn.edges}


def test_two_that_are_read_side_by_side_have_each_its_own_columns_of_the_matrix() -> None:
    found = labels_of_edges(lf.VectorToSequence(lf.Elman(3 + 4, 5), outputs=4))
    assert (found["x", "h"], found["y", "h"], found["h", "h"]) == (("Ux",), ("Uy",), ("W",))
    found = labels_of_edges(lf.EncoderDecoder(lf.GRU(3, 5), lf.GRU(5 + 4, 6), outputs=4))
    assert (found["C", "hd"], found["y", "hd"], found["x", "he"]) == (("Ud,C",), ("Ud,y",), ("Ue",))
    drawn = circuit(lf.Autoencoder(lf.GRU(3, 5), lf.GRU(5 + 3, 5), outputs=lf.Reals(3)), lf.Level.BOOK, None, None)
    assert drawn.said == {"U_{d}": r"[U_{d,C}\;\,U_{d,x}]"}
    keys = legend(circuit_scene(drawn), 0.0, 0.0, 9.0)
    assert r"$U_{d} = [U_{d,C}\;\,U_{d,x}]$" in [key.sign for key in keys]


def test_matrices_stand_in_the_order_of_their_product() -> None:
    cell = lf.Embedded(lf.Elman(6, 5), nn.Embedding(11, 6))
    (found,) = {
        label_of(link.parameters, "")[0]
        for link in circuit_scene(circuit(cell, lf.Level.BOOK, None, None)).links
        if len(link.parameters) > 1
    }
    assert plain(found) == "U E"


def test_matrices_that_stand_abreast_are_no_product() -> None:
    """W_gate x and U x are added: U W_gate would say something else."""
    gates = circuit_scene(circuit(Layers(), lf.Level.BOOK, None, torch.zeros(1, 1, 3)))
    assert "Wgate, U" in [plain(link.label()[0]) for link in gates.links]
    after = lf.Embedded(Layers(), nn.Embedding(11, 3))  # both after E
    drawn = circuit_scene(circuit(after, lf.Level.BOOK, None, torch.zeros(1, 1).long()))
    assert [link.product for link in drawn.links if "E" in link.parameters and len(link.parameters) == 3] == [False]
    chain = lf.Embedded(lf.Elman(6, 5), nn.Embedding(11, 6))
    assert all(link.product for link in circuit_scene(circuit(chain, lf.Level.BOOK, None, None)).links)


class Named(lf.Transition):
    """What is made of parameters alone has a name, and so has one of the three results of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.tau, self.norm = nn.Parameter(torch.ones(5)), nn.LayerNorm(5)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        alpha = torch.exp(-1 / nn.functional.softplus(self.tau))
        z = self.norm(x)
        return alpha * h + torch.tanh(z)


def test_names_for_what_is_made_of_parameters_are_kept_and_explained() -> None:
    drawn = circuit(Named(), lf.Level.OPERATIONS, None, torch.zeros(1, 1, 5))
    assert (r"\alpha",) in {edge.parameters for edge in drawn.edges}
    assert plain(drawn.said[r"\alpha"]) == "exp(−1/softplus(τ))"
    assert any(plain(v.label).startswith("z= norm") for v in drawn.variables)


def test_twelve_steps_are_all_shown_and_more_if_asked_for() -> None:
    unfolded = {steps: Unfolded(circuit(lf.Elman(3, 5), lf.Level.BOOK, None, None), steps) for steps in (12, 13)}

    def shown(steps: int, **options: int) -> int:
        scene = unfolded_scene(unfolded[steps], None, False, **options)
        return sum(isinstance(key, Moment) and key.variable.role is Role.INPUT for key in scene.shapes)

    assert [shown(12), shown(13), shown(13, columns_at_most=13), shown(12, columns_at_most=3)] == [12, 5, 13, 5]
    with pytest.raises(ValueError, match="columns as a whole number of at least 1; got 0"):
        lf.draw(lf.Elman(3, 5), 3, columns=0)


def test_colours_mean_the_same_in_every_picture() -> None:
    for model in (
        lf.SequenceToSequence(lf.LSTM(3, 5), 4),
        lf.SequenceToSequence(lf.Bidirectional(lf.LSTM(3, 5), lf.GRU(3, 5)), 4),
    ):
        drawn = circuit(model, lf.Level.BOOK, None, None)
        scene = circuit_scene(drawn)
        colours = parameter_colours(scene.links)
        first = {
            "blue": next(e for e in drawn.edges if e.source.role is Role.INPUT),
            "orange": next(e for e in drawn.edges if e.lag and e.parameters),
            "green": next(e for e in drawn.edges if e.target.role is Role.OUTPUT),
        }
        assert {use: colours[edge.parameters] for use, edge in first.items()} == {use: LIGHT[use] for use in first}


# ------------------------------------------------------------------ legends and formats


def said(scene: Scene) -> set[str]:
    return {key.text for key in legend(scene, 0.0, 0.0, 9.0)}


def test_signs_are_explained_where_they_are_used() -> None:
    model = lf.SequenceToOne(lf.Elman(3, 5, recurrent_init=lf.ScaledIdentity(0.05)), 4)
    drawn = circuit(model, lf.Level.BOOK, None, None)
    assert said(circuit_scene(drawn)) == {"a delay of one step", "after the last step alone"}
    fed = unfolded_scene(Unfolded(circuit(lf.OutputRecurrence(3, 5, 4), lf.Level.BOOK, None, None), 20), None, False)
    assert said(fed) == {"fed back", "steps that are not shown"}
    sized = lf.draw(model, 9, True, x=torch.randn(9, 2, 3), y=torch.zeros(2).long()).graph
    assert isinstance(sized, Scene)
    assert {"the largest gradient on an edge", "a thousandth of it or less", "less than a millionth"} < said(sized)


def test_text_is_text_and_fonts_are_truetype(tmp_path: Path) -> None:
    drawing = lf.draw(lf.SequenceToSequence(lf.LSTM(3, 5), 4), level=lf.Level.OPERATIONS)
    svg = drawing.svg()
    assert "tanh" in "".join(re.findall(r">([^<]*)<", svg))
    assert "<use" not in svg  # no outlines of letters
    pdf = drawing.save(tmp_path / "a.pdf").read_bytes()
    assert b"/CIDFontType2" in pdf or b"/TrueType" in pdf
    assert b"/Type3" not in pdf


def test_graphviz_gets_ranks_and_colours() -> None:
    dot = lf.draw(lf.SequenceToSequence(lf.Elman(3, 5), 4), steps=3).dot()
    assert dot.count("rank=same") == 5  # x, h, o, L, y
    assert dot.count(f'color="{LIGHT["blue"]}"') >= 3
    assert f'fillcolor="{LIGHT["state"]}"' in dot
    assert "style=dashed" in lf.draw(lf.OutputRecurrence(3, 5, 4)).dot()


def test_the_black_square_is_black_in_the_dark() -> None:
    svg = lf.draw(lf.Elman(3, 5)).svg()
    delay = LIGHT["delay"]
    assert f"fill: {delay}; stroke: " in svg
    assert f'[style*="fill: {delay}"] {{ fill: #000000 !important }}' in svg


def test_formulas_are_runs_of_letters_at_places_of_their_own() -> None:
    """Words stay words in a font that is narrower, and viewers that know no places within a text show formulas too."""
    svg = lf.draw(lf.LSTM(3, 5), steps=2, level=lf.Level.OPERATIONS).svg()
    assert "<tspan" not in svg
    runs = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert {"tanh", "(1)", "(2)", "σ", "what it starts from"} <= set(runs)
    name = r"$\mathrm{hidden}\,\mathrm{input}_{ab}^{(3)}<x$"
    with style():
        figure = new_figure(2, 1)
        figure.text(0.1, 0.5, name)
    runs = re.findall(r"<text[^>]*>([^<]*)</text>", Drawing(figure, "a name").svg())
    assert runs[:2] == ["hidden", "input"]  # a thin space stays a space
    assert sorted(runs[2:]) == sorted(["ab", "(3)", "&lt;", "x"])
    other = '<svg><text>\n<tspan style="font: 12px serif" x="0 5" y="1">ab</tspan>\n</text></svg>'
    assert other[5:-6] in _element(other, "written in some other way")


def test_heat_maps_have_cells_with_edges_where_images_are_smoothed() -> None:
    svg = lf.draw_attention(torch.eye(3), ["a", "b", "c"], ["d", "e", "f"]).svg()
    data = re.findall(r'href="data:image/png;base64,([^"]*)"', svg)[0]
    width, height = struct.unpack(">II", base64.b64decode(data)[16:24])
    assert min(width, height) > 20 * 3


def test_an_unknown_ending_is_refused_before_the_work(tmp_path: Path) -> None:
    from loopfold.cli import app

    found = CliRunner().invoke(app, ["draw", str(tmp_path / "no" / "run"), "--out", "x.jpg"])
    assert "got .jpg (x.jpg)" in str(found.exception)


def test_nothing_covers_the_map_of_gradients_on_paper() -> None:
    css = (Path(lf.__file__).parent / "report" / "page.css").read_text()
    assert re.search(r"@media print \{[^@]*\.over canvas \{ display: none \}", css)


def test_a_narrow_page_names_the_lines_across_a_learning_curve_too() -> None:
    found = _ends({"train": [(1, 2.5), (2, 2.25)]}, {"6-gram, test text": 1.5, "model, test text": 2.0})
    assert re.findall(r">([^<]+)</li>", found) == ["train 2.250", "model, test text 2.000", "6-gram, test text 1.500"]
