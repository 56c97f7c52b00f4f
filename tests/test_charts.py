"""Heat maps and curves: they show the numbers that they were given, legibly, and follow light and dark."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, to_hex
from matplotlib.text import Text
from torch import Tensor

import loopfold as lf
from loopfold.drawing import charts, glyphs
from loopfold.drawing.figure import COLOURS, LIGHT, Drawing

pytestmark = pytest.mark.usefixtures("one_thread")


def network(cell: Any, outputs: int = 5) -> lf.SequenceToSequence:
    return lf.SequenceToSequence(cell, outputs)


def flow_of(model: Any, tau: int = 24) -> lf.GradientFlow:
    y = torch.randint(5, (4,)) if isinstance(model, lf.SequenceToOne) else torch.randint(5, (tau, 4))
    return lf.gradient_flow(model, model.loss, torch.randn(tau, 4, 3), y)


NETWORKS = {
    "tanh": lambda: network(lf.Elman(3, 8)),
    "relu": lambda: network(lf.Elman(3, 8, torch.relu)),
    "exploding": lambda: network(lf.Elman(3, 8, torch.relu, recurrent_init=lf.ScaledIdentity(2.0))),
    "LSTM": lambda: network(lf.LSTM(3, 8)),
    "GRU": lambda: network(lf.GRU(3, 8)),
    "bidirectional": lambda: network(lf.Bidirectional(lf.GRU(3, 4), lf.GRU(3, 4))),
    "stacked": lambda: network(lf.Stacked([lf.GRU(3, 4), lf.LSTM(4, 4)])),
    "one output": lambda: lf.SequenceToOne(lf.GRU(3, 8), 5),
}


def data_of(axes: Axes, image: int = 0) -> tuple[Tensor, Tensor]:
    """What an image holds, and where it is blank."""
    shown: Any = axes.images[image].get_array()
    return torch.tensor(shown.data), torch.tensor(shown.mask).expand(shown.shape)


def texts_of(drawing: Drawing) -> list[Text]:
    """Every text that is seen, once the picture has been laid out."""
    FigureCanvasAgg(drawing.figure).draw()
    axes: list[Any] = drawing.figure.axes
    axis = [axis for a in axes for axis in (a.xaxis, a.yaxis)]
    kept = [tick for a in axis for tick in (*a.majorTicks, *a.minorTicks)]
    seen = [tick for a in axis for tick in a._update_ticks()]  # matplotlib keeps more than it draws
    hidden = {label for tick in kept for label in (tick.label1, tick.label2)}
    hidden -= {label for tick in seen for label in (tick.label1, tick.label2)}
    found: Any = drawing.figure.findobj(Text)
    return [text for text in found if text.get_text().strip() and text.get_visible() and text not in hidden]


def assert_legible(drawing: Drawing) -> None:
    """No two texts overlap, and none is cut off by the edge of the picture."""
    texts = texts_of(drawing)
    boxes = [(text.get_text(), Text.get_window_extent(text)) for text in texts]  # of words, not of arrows
    width, height = drawing.figure.bbox.size
    for words, box in boxes:
        assert box.x0 >= -1, words
        assert box.y0 >= -1, words
        assert box.x1 <= width + 1, words
        assert box.y1 <= height + 1, words
    for (one, a), (other, b) in combinations(boxes, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        down = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across < 1 or down < 1, f"{one!r} lies over {other!r}"


# ------------------------------------------------------------------ gradient flow


@pytest.mark.parametrize("name", NETWORKS)
def test_the_map_shows_the_norms(name: str) -> None:
    """M17"""
    flow = flow_of(NETWORKS[name]())
    drawing = flow.draw()
    left, right = drawing.figure.axes[:2]
    shown, blank = data_of(left)
    norms = flow.norms.double()
    assert torch.equal(shown[norms > 0], norms[norms > 0])
    t, k = torch.arange(len(norms))[:, None] + norms.shape[1] - len(norms), torch.arange(norms.shape[1])
    if name == "bidirectional":
        assert not blank.any()
    else:
        assert torch.equal(blank, k > t)  # the future does not act upon the past
    assert not blank[norms > 0].any()
    assert isinstance(left.images[0].norm, LogNorm)
    line = next(line for line in right.lines if len(line.get_xdata()) == len(flow.reach))  # type: ignore[arg-type]
    assert line.get_ydata() == pytest.approx(flow.reach.tolist())
    levels = {float(line.get_ydata()[0]) for line in right.lines}  # type: ignore[index,arg-type]
    assert {1e-3, 1e3} <= levels
    assert right.get_yscale() == "log"


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_drawn_legibly(name: str) -> None:
    model = NETWORKS[name]()
    assert_legible(flow_of(model).draw())
    y = torch.randint(5, (4,)) if name == "one output" else torch.randint(5, (24, 4))
    assert_legible(lf.per_step_gradients(model, model.loss, torch.randn(24, 4, 3), y).draw())
    assert_legible(lf.eigenvalues(model).draw())


def test_steps_count_from_1_and_t_goes_down() -> None:
    left = flow_of(network(lf.Elman(3, 4)), tau=30).draw().figure.axes[0]
    assert [*left.images[0].get_extent()] == [0.5, 30.5, 30.5, 0.5]
    for ticks in (left.get_xticks(), left.get_yticks()):
        assert ticks.tolist() == [1, 5, 10, 15, 20, 25, 30]


def test_the_verdict_is_under_the_picture() -> None:
    flow = flow_of(network(lf.Elman(3, 4)))
    drawing = flow.draw()
    said = [" ".join(text.get_text().split()) for text in texts_of(drawing)]
    assert flow.verdict[0].upper() + flow.verdict[1:] in said
    assert flow.verdict in drawing.title


def test_the_activation_can_be_seen() -> None:
    """M10: with W = I, relu carries further than tanh, and the two curves show it."""
    ends = {}
    for phi in (torch.tanh, torch.relu):
        torch.manual_seed(0)
        flow = flow_of(network(lf.Elman(3, 16, phi, recurrent_init=lf.ScaledIdentity())))
        curve = flow.draw().figure.axes[1].lines[-1].get_ydata()
        ends[phi] = float(curve[-1])  # type: ignore[index,arg-type]
    assert ends[torch.relu] > 2 * ends[torch.tanh]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_no_number_is_red_and_said(value: float) -> None:
    norms = torch.ones(6, 6).tril()
    norms[4:, 0] = value
    drawing = lf.GradientFlow(norms).draw()
    left = drawing.figure.axes[0]
    _, blank = data_of(left)
    _, not_red = data_of(left, 1)
    assert torch.equal(~not_red, ~norms.isfinite())
    assert blank[4:, 0].all()
    assert to_hex(left.images[1].get_cmap()(0.0)) == LIGHT["red"]
    assert any("2 of 36 norms are no finite number" in text.get_text().replace("\n", " ") for text in texts_of(drawing))
    assert_legible(lf.GradientFlow(torch.full((6, 6), value)).draw())
    assert "at once" in lf.GradientFlow(torch.full((6, 6), value)).verdict


def test_odd_sizes(tmp_path: Path) -> None:
    for flow in (
        flow_of(network(lf.GRU(3, 4)), tau=1),
        flow_of(lf.SequenceToOne(lf.GRU(3, 4), 5), tau=1),
        flow_of(network(lf.GRU(3, 4)), tau=2),
        lf.GradientFlow(
            torch.exp(-0.05 * torch.arange(500).double())[(torch.arange(500)[:, None] - torch.arange(500)).abs()]
        ),
        lf.GradientFlow(torch.zeros(5, 5)),
        lf.GradientFlow(torch.tensor([[1e-300, 0.0], [1e300, 1e-300]], dtype=torch.float64)),
        lf.GradientFlow(torch.tensor([[1.0, 0.0], [1e-300, 1.0]], dtype=torch.float64)),
        lf.GradientFlow(torch.full((5, 5), 1e-40).tril()),
    ):
        assert_legible(flow.draw())
        flow.draw().save(tmp_path / "flow.svg")


def test_zero_is_dark_where_there_could_be_something_and_blank_where_not() -> None:
    norms = torch.ones(6, 6).tril()
    norms[5, 0] = 0  # vanished altogether
    norms[2] = 0  # a step without a loss
    left = lf.GradientFlow(norms).draw().figure.axes[0]
    shown, blank = data_of(left)
    assert blank[2].all()
    assert not blank[5, 0]
    image: Any = left.images[0]
    assert 0 < shown[5, 0] < image.norm.vmin
    assert image.colorbar.extend == "min"


def test_the_scale_leaves_out_what_is_far_from_typical() -> None:
    norms = torch.tensor([[1.0, 0.0], [1e-30, 1.0]], dtype=torch.float64)
    scale: Any = lf.GradientFlow(norms).draw().figure.axes[0].images[0].norm
    assert (scale.vmin, scale.vmax) == (pytest.approx(1e-6), pytest.approx(1.0))


# ------------------------------------------------------------------ the share of each step


def test_the_shares_of_each_step() -> None:
    """M16"""
    model = network(lf.Elman(3, 4))
    shares = lf.per_step_gradients(model, model.loss, torch.randn(12, 2, 3), torch.randint(5, (12, 2)))
    assert isinstance(shares, lf.StepGradients)
    assert isinstance(shares, dict)
    axes = shares.draw().figure.axes[0]
    shown, blank = data_of(axes)
    assert [label.get_text() for label in axes.get_yticklabels()] == [*shares]
    for row, share in zip(shown, shares.values(), strict=True):
        norms = share.flatten(1).norm(dim=1).double()
        torch.testing.assert_close(row[norms > 0], norms[norms > 0])
    assert not blank.any()
    assert shown[[*shares].index("W"), 0] < axes.images[0].norm.vmin  # type: ignore[operator]


def test_small_shares_are_small_and_not_zero() -> None:
    sizes = torch.tensor([[1e-30, 3e-30], [1e-300, 1e-300]], dtype=torch.float64)
    shares = lf.StepGradients({"W": sizes[0][:, None].float().repeat(1, 4), "b": sizes[1][:, None].repeat(1, 4)})
    shown, _ = data_of(shares.draw().figure.axes[0])
    torch.testing.assert_close(shown, 2 * sizes, rtol=1e-6, atol=0)


def test_parameters_with_fewer_steps_are_blank_after_them() -> None:
    model = lf.SequenceToOne(lf.GRU(3, 4), 5)
    shares = lf.per_step_gradients(model, model.loss, torch.randn(12, 2, 3), torch.randint(5, (2,)))
    _, blank = data_of(shares.draw().figure.axes[0])
    for name, row in zip(shares, blank, strict=True):
        steps = len(shares[name])
        assert not row[:steps].any()
        assert row[steps:].all()
    assert {len(share) for share in shares.values()} == {1, 12}


def test_shares_that_are_no_number() -> None:
    drawing = charts.step_gradients({"W": torch.tensor([1.0, math.inf]), "b": torch.tensor([math.nan])})
    assert any("2 norms are no finite number" in text.get_text() for text in texts_of(drawing))
    charts.step_gradients({"W": torch.full((3,), math.nan)})
    charts.step_gradients({"W": torch.zeros(3)})
    with pytest.raises(ValueError, match="at least one parameter; got none"):
        charts.step_gradients({})


# ------------------------------------------------------------------ eigenvalues


def test_eigenvalues_stand_where_they_are() -> None:
    cell = lf.LSTM(3, 6)
    found = lf.eigenvalues(cell)
    panels = found.draw().figure.axes
    assert len(panels) == 4
    for axes, (name, values), W in zip(panels, found.values.items(), cell.W.detach().double().split(6), strict=True):
        points = torch.tensor(axes.collections[0].get_offsets().data)  # type: ignore[union-attr]
        torch.testing.assert_close(torch.complex(points[:, 0], points[:, 1]), values)
        torch.testing.assert_close(values.sum().real, W.trace())
        assert axes.get_title() == f"{name},  $\\rho = {found.radius[name]:.3g}$"
        circle = next(line for line in axes.lines if len(line.get_xdata()) > 2)  # type: ignore[arg-type]
        assert torch.tensor(circle.get_xydata()).norm(dim=1).allclose(torch.ones(361).double())
        low, high = axes.get_xlim()
        assert -low == high > max(1.0, *found.radius.values())
    assert_legible(found.draw())


@pytest.mark.parametrize("count", [1, 3, 6, 9])
def test_panels(count: int) -> None:
    matrices = {
        f"recurrent.layers.{i}.forwards.cell.W_i": torch.linalg.eigvals(torch.randn(5, 5)) for i in range(count)
    }
    drawing = charts.eigenvalues(matrices)
    assert len(drawing.figure.axes) == count
    assert_legible(drawing)
    with pytest.raises(ValueError, match="at least one matrix"):
        charts.eigenvalues({})


# ------------------------------------------------------------------ hidden states


def labels(texts: Iterable[Text]) -> list[str]:
    return [text.get_text() for text in texts]


def test_a_text_is_wrapped_into_bands_and_all_of_it_is_there() -> None:
    values, text = torch.randn(290, 7), "the cat sat. " * 22 + "the "
    drawing = charts.hidden_states(values, list(text))
    *bands, bar = drawing.figure.axes
    assert len(bands) == 3
    seen = torch.cat([data_of(axes)[0] for axes in bands], 1)
    assert torch.equal(seen, values.T.double())
    assert "".join(label for axes in bands for label in labels(axes.get_xticklabels())) == text.replace(" ", "·")
    for axes in bands:
        image: Any = axes.images[0]
        assert -image.norm.vmin == image.norm.vmax == pytest.approx(float(values.abs().max()))
    assert bar.get_ylabel() == "activation"
    assert_legible(drawing)


def test_of_many_units_those_that_vary_most() -> None:
    values = torch.randn(30, 100) * torch.linspace(0.1, 2, 100)
    axes = charts.hidden_states(values, list("a" * 30)).figure.axes[0]
    most = sorted(values.double().var(0).argsort(descending=True)[:40].tolist())
    assert labels(axes.get_yticklabels()) == [str(unit) for unit in most]
    chosen = charts.hidden_states(values, list("a" * 30), units=[99, 3]).figure.axes[0]
    assert torch.equal(data_of(chosen)[0], values[:, [99, 3]].T.double())


def test_every_character_is_visible_and_none_begins_a_formula() -> None:
    pieces = list("a \n\t\r\0$x$中é\u0301\u200b\N{GRINNING FACE}\\$^{")
    drawing = charts.hidden_states(torch.randn(len(pieces), 3), pieces)
    shown = labels(drawing.figure.axes[0].get_xticklabels())
    assert shown[:9] == ["a", "·", "⏎", "⇥", "↤", "¤", r"\$", "x", r"\$"]
    assert "" not in [label.strip() for label in shown]
    assert_legible(drawing)  # draws, so that a glyph which no font has would warn, and a warning is an error
    assert drawing.svg()


@pytest.mark.parametrize("missing", [True, False])
def test_a_font_of_the_machine_is_used_where_ours_lacks_a_character(
    missing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = glyphs._glyphs

    def with_chinese(file: str) -> frozenset[int]:
        return real(file) | ({ord("中")} if "Serif" in file and not missing else set())

    for function in (glyphs._font_of, glyphs._glyphs):
        function.cache_clear()
    monkeypatch.setattr(glyphs, "_glyphs", lambda file: with_chinese(file) - ({ord("中")} if missing else set()))
    assert glyphs.visible("中") == ("▯" if missing else "中")
    fonts = glyphs.families("a中")
    assert fonts[0] == "DejaVu Sans Mono"
    assert len(fonts) == (1 if missing else 2)
    glyphs._font_of.cache_clear()


def test_words_are_written_upwards() -> None:
    words = [f" word{i}" for i in range(99)] + [" incomprehensibilities", "\n"]
    drawing = charts.hidden_states(torch.randn(101, 3), words)
    ticks = [tick for axes in drawing.figure.axes[:2] for tick in axes.get_xticklabels()]
    assert {tick.get_rotation() for tick in ticks} == {90.0}
    assert labels(ticks)[0] == "word0"
    assert labels(ticks)[-2:] == ["incomprehen…", "⏎"]
    assert_legible(drawing)


def test_states_that_do_not_fit_their_text() -> None:
    with pytest.raises(ValueError, match="a piece of text for each state; got 2 for 3"):
        charts.hidden_states(torch.zeros(3, 2), ["a", "b"])
    with pytest.raises(ValueError, match="at least one unit"):
        charts.hidden_states(torch.zeros(1, 2), ["a"], units=[])
    values = torch.tensor([[0.0, math.nan], [0.0, math.inf]])
    _, blank = data_of(charts.hidden_states(values, ["a", "b"]).figure.axes[0])
    assert blank.tolist() == [[False, False], [True, True]]


# ------------------------------------------------------------------ learning curves

CURVE = [(step, 4.0 * math.exp(-step / 300) + 1.1) for step in range(50, 2000, 50)]


@pytest.mark.parametrize(
    "baselines",
    [
        {},
        {"uniform": 4.64, "unigram": 3.18, "9-gram": 1.1596, "window": 1.39, "convolution": 1.25},
        {f"{n}-gram": 1.1 + 0.001 * n for n in range(14)},
        {f"{n}-gram": 5.0 for n in range(14)},
    ],
)
def test_names_at_the_ends_of_lines_do_not_overlap(baselines: dict[str, float]) -> None:
    drawing = charts.learning_curves(
        {"train": CURVE, "valid": [(x, y + 0.05) for x, y in CURVE[::5]]}, baselines, "a $run$"
    )
    axes = drawing.figure.axes[0]
    assert_legible(drawing)
    assert len(axes.texts) == 2 + len(baselines)
    names = labels(sorted(axes.texts, key=lambda text: Text.get_window_extent(text).y0))
    values = [float(re.findall(r"  (\d\.\d+) ", name)[0]) for name in names]
    assert values == sorted(values)
    drawn = {tuple(map(tuple, line.get_xydata().tolist())) for line in axes.lines}  # type: ignore[union-attr]
    assert tuple(CURVE) in drawn
    levels = [line.get_ydata()[0] for line in axes.lines[2:]]  # type: ignore[index]
    assert levels == [*baselines.values()]
    assert axes.get_title(loc="left") == r"a \$run\$"
    assert axes.get_ylabel() == "nats per token"


def test_a_curve_shows_perplexity_too_and_leaves_out_what_is_no_number() -> None:
    drawing = charts.learning_curves({"train": [(1, 2.0), (2, math.nan)], "valid": []}, {"broken": math.inf})
    assert labels(drawing.figure.axes[0].texts) == [f"train  2.000  (perplexity {math.exp(2):.4g})"]
    with pytest.raises(ValueError, match="at least one point"):
        charts.learning_curves({"train": [(1, math.nan)]})
    assert "∞" in labels(charts.learning_curves({"train": [(1, 1000.0)]}).figure.axes[0].texts)[0]


@pytest.mark.parametrize("wanted", [[0.5] * 7, [0.0, 0.01, 0.5, 0.99, 1.0], [0.1, 0.9], [0.98, 0.99, 1.0]])
def test_spread(wanted: Sequence[float]) -> None:
    places = charts.spread(wanted, 0.1)
    assert all(b - a >= 0.1 - 1e-9 for a, b in zip(places, places[1:], strict=False))
    assert places[0] >= 0
    assert places[-1] <= 1 + 1e-9


# ------------------------------------------------------------------ all of them

FORMULA = r"$\frac$ 中_{"  # what a user may call something, and matplotlib would stumble over


KINDS: dict[str, Callable[[], Drawing]] = {
    "flow": lambda: charts.gradient_flow(torch.ones(3, 3).tril(), torch.ones(3), FORMULA),
    "steps": lambda: charts.step_gradients({FORMULA: torch.ones(4), "b": torch.arange(4)}),
    "eigenvalues": lambda: charts.eigenvalues({FORMULA: torch.linalg.eigvals(torch.eye(3))}),
    "states": lambda: charts.hidden_states(torch.eye(4)[:, :3], list("$a$中"), names={1: FORMULA}),
    "curves": lambda: charts.learning_curves({FORMULA: [(1, 2.0), (2, 1.0)]}, {"$x": 1.5}, FORMULA),
}


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_follow_light_and_dark_and_take_any_text(kind: str, tmp_path: Path) -> None:
    drawing = KINDS[kind]()
    assert_legible(drawing)
    svg = drawing.svg()
    dark, painted = svg.split("</style>", 1)
    assert dark.count("@media screen and (prefers-color-scheme: dark)") == 1
    used = set(re.findall(r"(fill|stroke): ([^;\"]+)", painted))
    assert {colour for _, colour in used if not re.fullmatch("none|#[0-9a-f]{6}", colour)} == set()  # for any viewer
    assert {("fill", LIGHT["ink"]), ("fill", LIGHT["muted"])} <= used
    names = {light: (light, dark) for light, dark in COLOURS.values()}
    for paint, colour in used & {(paint, colour) for paint in ("fill", "stroke") for colour in names}:
        assert f'[style*="{paint}: {colour}"] {{ {paint}: {names[colour][1]} !important }}' in dark
    left = {colour for _, colour in used} - {"none", *names}
    assert left <= {"#ffffff", "#000000"} or kind in ("flow", "steps", "states")  # those have a bar of colours
    assert KINDS[kind]().svg() == KINDS[kind]().svg()  # the same picture is the same file
    for ending in ("png", "pdf", "html"):
        assert drawing.save(tmp_path / f"x.{ending}").stat().st_size > 1000
    assert any(r"\$" in text.get_text() for text in texts_of(drawing))


def test_nothing_of_matplotlibs_own_state_is_touched() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    for draw in KINDS.values():
        draw()
    assert dict(matplotlib.rcParams) == before
