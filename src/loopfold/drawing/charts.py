"""Heat maps and curves, from plain numbers: where gradients go, what units do, how training went."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopfold.drawing.figure import CYCLE, LIGHT, Drawing, new_figure, style
from loopfold.drawing.glyphs import beginning, ending, families, is_wide, label, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import LogNorm
    from matplotlib.image import AxesImage

SIZES, SIGNED = "viridis", "RdBu_r"  # colours of how much there is, and of values about 0
DECADES = 6  # how far a scale of sizes reaches below and above what is typical; what vanished is simply dark
EXTREMES = 1e-250, 1e250  # a float holds little more, and axes need room at their ends

# ------------------------------------------------------------------ gradients


@style()
def gradient_flow(norms: Tensor, reach: Tensor, verdict: str, limits: tuple[float, float] = (1e-3, 1e3)) -> Drawing:
    """‖∂L(t)/∂h(k)‖ for every pair of steps, and beside it the same by distance.

    `norms`    `[rows, τ]`, the rows of the last steps t, all of them or one; blank where k cannot influence t
    `reach`    `[distances]`, relative to distance 0
    `limits`   where a gradient counts as vanished and as exploded
    """
    norms = norms.detach().double().cpu()
    rows, tau = norms.shape
    t, k = torch.arange(tau - rows, tau)[:, None], torch.arange(tau)
    backwards = bool((norms.ne(0) & (k > t)).any())  # some layer reads from the end
    there = ((k <= t) | backwards) & norms.ne(0).any(1, keepdim=True)  # a row of zeros: a step without a loss
    one = rows == 1
    figure = new_figure(7.6, 5.4) if one else new_figure(9.6, 4.6)
    if one:
        pairs, curve = figure.subplots(2, 1, height_ratios=[1, 6])
    else:
        pairs, curve = figure.subplots(1, 2, width_ratios=[1.12, 1])
    image = _heat(pairs, norms, there, typical=_middle(norms.diagonal(tau - rows)), first=tau - rows + 1)
    pairs.set_xlabel("state at step $k$")
    if one:
        pairs.set_yticks([])
    else:
        _ticks(pairs.yaxis, tau - rows + 1, tau)
        pairs.set_ylabel("loss at step $t$")
    step = rf"{{({tau})}}" if one else "{(t)}"
    size = rf"$\Vert\,\partial L^{step} / \partial h^{{(k)}}\,\Vert$"
    _colour_bar(image, pairs, size, pad=0.02, aspect=40 if one else 20, location="top" if one else "right")
    _reach(curve, reach, limits)
    odd = int((~norms.isfinite()).sum())
    red = f" In red: {odd:,} of {norms.numel():,} norms are no finite number." if odd else ""
    _caption(figure, verdict[:1].upper() + verdict[1:] + red)
    return Drawing(figure, f"Gradient flow over {tau} steps: {verdict}")


def _reach(axes: "Axes", reach: Tensor, limits: tuple[float, float]) -> None:
    """The gradient by distance, on a log axis, with the lines that it should stay between."""
    values = reach.detach().double().cpu()
    seen = values[values.isfinite() & (values > 0)]
    decades = seen.clamp(*EXTREMES).log10().tolist()
    low, high = min([math.log10(limits[0]), *decades]), max([math.log10(limits[1]), *decades])
    axes.set_yscale("log")
    room = 0.08 * (high - low)  # for the words beyond the lines
    axes.set_ylim(10 ** (low - room), 10 ** (high + room))
    most = max(1, len(values) - 1)
    axes.set_xlim(-0.02 * most, most * 1.02)
    _ticks(axes.xaxis, 0, most)
    across, away = axes.get_yaxis_transform(), 10 ** (0.015 * (high - low))
    for value, at, side, word in (
        (limits[0], limits[0] / away, "top", "vanished"),
        (limits[1], limits[1] * away, "bottom", "exploded"),
    ):
        axes.axhline(value, color=LIGHT["red"], linewidth=1, linestyle=(0, (4, 3)))
        axes.text(0.99, at, word, transform=across, ha="right", va=side, fontsize=9, color=LIGHT["red"])
    axes.axhline(1, color=LIGHT["grid"], linewidth=1, zorder=0)
    shown = torch.where(values.isfinite() & (values > 0), values, torch.nan)
    marker = "o" if len(values) < 20 else None
    axes.plot(range(len(values)), shown.tolist(), color=CYCLE[0], linewidth=1.8, marker=marker, markersize=4)
    if not seen.numel():
        word = "no gradient" if bool(values.isfinite().all()) else "no finite number"
        axes.text(0.5, 0.5, word, transform=axes.transAxes, ha="center", va="bottom")
    axes.set_xlabel("distance $d = t - k$")
    axes.set_ylabel("norm relative to $d = 0$")


@style()
def step_gradients(norms: Mapping[str, Tensor]) -> Drawing:
    """‖∇W(t)‖, a row for each parameter, by its name, and a column for each step; rows may be of unequal length."""
    if not norms:
        raise ValueError("step_gradients needs the norms of at least one parameter; got none.")
    rows = {name: row.detach().double().cpu().flatten() for name, row in norms.items()}
    steps = max(map(len, rows.values()))
    data = torch.zeros(len(rows), steps, dtype=torch.float64)
    there = torch.zeros_like(data, dtype=torch.bool)
    for i, row in enumerate(rows.values()):
        data[i, : len(row)], there[i, : len(row)] = row, True
    figure = new_figure(8.4, 1.5 + 0.3 * len(rows))
    axes = figure.subplots()
    typical = data.nan_to_num(0.0, 0.0, 0.0).max().item()
    image = _heat(axes, data, there, typical=typical, first=1)
    axes.set_yticks(range(1, len(rows) + 1), [label(name) for name in rows])
    axes.tick_params(axis="y", length=0, labelcolor=LIGHT["ink"])
    for i in range(1, len(rows)):
        axes.axhline(i + 0.5, color=LIGHT["paper"], linewidth=2)
    axes.set_xlabel("step $t$, in the order in which steps are taken")
    _colour_bar(image, axes, r"$\Vert\,\nabla\theta^{(t)}\,\Vert$", pad=0.015, aspect=max(8, 4 * len(rows)))
    odd = int((~data.isfinite()).sum())
    if odd:
        _caption(figure, f"In red: {odd:,} norms are no finite number.")
    return Drawing(figure, f"What each of {steps} steps adds to the gradient of {', '.join(rows)}")


@style()
def eigenvalues(values: Mapping[str, Tensor]) -> Drawing:
    """Eigenvalues on the complex plane beside the unit circle, a panel for each matrix; ρ is the largest modulus."""
    if not values:
        raise ValueError("eigenvalues needs those of at least one matrix; got none.")
    radii = {name: float(v.abs().max()) for name, v in values.items()}
    columns = min(len(values), min((4, 3), key=lambda width: -len(values) % width))  # with as few gaps as possible
    rows = math.ceil(len(values) / columns)
    size = 2.6 if columns > 1 else 3.6
    between = "\n" if columns > 1 and max(map(len, values)) > 8 else ",  "  # a long name has a line of its own
    figure = new_figure(size * columns + 0.5, (size + (0.45 if between == "\n" else 0.25)) * rows + 0.35)
    figure.set_layout_engine("constrained", h_pad=0.1)  # titles of two lines need it
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    edge = 1.12 * max(1.0, *radii.values())
    turn = torch.linspace(0, 2 * math.pi, 361)
    for axes, (name, v) in zip(panels, values.items(), strict=False):
        axes.axhline(0, color=LIGHT["grid"], linewidth=0.8, zorder=0)
        axes.axvline(0, color=LIGHT["grid"], linewidth=0.8, zorder=0)
        axes.plot(turn.cos().tolist(), turn.sin().tolist(), color=LIGHT["ink"], linewidth=1.1, zorder=3)
        points = v.detach().cpu()
        area = max(3.0, min(14.0, 1500 / len(points)))  # the more there are, the smaller
        axes.scatter(points.real.tolist(), points.imag.tolist(), s=area, color=CYCLE[0], alpha=0.8, linewidths=0)
        axes.set_title(f"{label(ending(name))}{between}$\\rho = {radii[name]:.3g}$", fontsize=10)
        axes.set_aspect("equal")
        axes.locator_params(nbins=5)
        axes.set_xlim(-edge, edge)
        axes.set_ylim(-edge, edge)
    for axes in panels[len(values) :]:
        axes.remove()
    for i, axes in enumerate(panels[: len(values)]):
        if i + columns >= len(values):
            axes.set_xlabel("real part")
            axes.tick_params(labelbottom=True)
        if i % columns == 0:
            axes.set_ylabel("imaginary part")
    words = ", ".join(f"{name} {radius:.3g}" for name, radius in radii.items())
    return Drawing(figure, f"Eigenvalues on the complex plane; spectral radius: {words}")


# ------------------------------------------------------------------ hidden states

MOST_UNITS, MOST_TOKENS = 40, 120  # of one picture, and of one of its bands


@style()
def hidden_states(
    values: Tensor,
    pieces: Sequence[str],
    units: Sequence[int] | None = None,
    names: Mapping[int, str] | None = None,
    first: int = 1,
) -> Drawing:
    """Units over a text: a row for each unit, a column for each token; red above 0, blue below.

    `values`   `[τ, n]`, the state after each token
    `pieces`   what each of the τ tokens reads as
    `units`    which rows, in their order; by default all, or the 40 whose values vary most
    `names`    what some units are called, beside their number
    `first`    the number of the first token, for the title
    """
    values = values.detach().double().cpu()
    tau, n = values.shape
    if len(pieces) != tau or not tau:
        raise ValueError(f"hidden_states needs a piece of text for each state; got {len(pieces)} for {tau}.")
    units = varied_units(values) if units is None else list(units)
    if wrong := [unit for unit in units if not 0 <= unit < n]:
        raise ValueError(f"there is no unit {wrong[0]}: the state has {n}, from 0 to {n - 1}.")
    if not units:
        raise ValueError("hidden_states needs at least one unit to draw; got none.")
    shown = [visible(piece) for piece in pieces]
    several = max(len(piece) for piece in pieces) > 1  # words or subwords, which are written upwards
    if several:
        shown = [visible(beginning(piece.strip(" "))) for piece in pieces]
    cell = 0.15 if several else 0.125 if is_wide("".join(pieces)) else 0.085  # inches
    bands = math.ceil(tau / round(MOST_TOKENS * 0.085 / cell))
    across = math.ceil(tau / bands)
    called = [f"{label(names[unit])}    {unit}" if names and unit in names else str(unit) for unit in units]
    below = 0.1 + 0.075 * max(len(piece) for piece in shown) if several else 0.25
    margin = 1.3 + 0.07 * max(map(len, called))
    figure = new_figure(max(4.0, across * cell + margin), bands * (0.13 * len(units) + below + 0.1) + 0.55)
    panels = figure.subplots(bands, 1, squeeze=False).flatten()
    data = values[:, units].T
    finite = data[data.isfinite()]
    edge = float(finite.abs().max()) if finite.numel() and bool(finite.any()) else 1.0
    fonts = families("".join(shown))
    for band, axes in enumerate(panels):
        part = slice(band * across, (band + 1) * across)
        cells = data[:, part]
        image = _cells(axes, cells, cells.isfinite(), cmap=SIGNED, vmin=-edge, vmax=edge)
        axes.set_xlim(-0.5, across - 0.5)  # the last band may be shorter; its cells are as wide
        axes.set_xticks(range(len(cells.T)), shown[part], rotation=90 if several else 0, fontfamily=fonts, fontsize=7)
        axes.set_yticks(range(len(units)), called, fontsize=7)
        axes.tick_params(length=0, pad=2, labelcolor=LIGHT["ink"])
        axes.spines[:].set_visible(False)
    panels[0].set_title(f"hidden state after each token, {first} to {first + tau - 1}", fontsize=10, loc="left")
    figure.supylabel("unit", fontsize=10)
    bar = figure.colorbar(image, ax=panels.tolist(), pad=0.01, aspect=25, shrink=min(1.0, 3 / figure.get_figheight()))
    bar.outline.set_visible(False)
    bar.set_label("activation")
    return Drawing(figure, f"{len(units)} of {n} hidden units over {tau} tokens of text")


def varied_units(values: Tensor, most: int = MOST_UNITS) -> list[int]:
    """The units of `values [τ, n]` whose values vary most, in the order of their numbers."""
    return sorted(liveliest(values)[:most])


def liveliest(values: Tensor) -> list[int]:
    """All units of `values [τ, n]`, the one whose values vary most first."""
    variance = values.detach().double().var(0, correction=0).nan_to_num(0.0, 0.0, 0.0)
    return variance.argsort(descending=True, stable=True).tolist()


@style()
def draw_attention(weights: Tensor, read: Sequence[str], written: Sequence[str]) -> Drawing:
    """Where a decoder looked: a row for each token that it wrote, a column for each that it could read.

    `weights`  `[τ, places]`, of one sequence: `prediction.run.outputs.weights[:, i]`
    `read`     what each place reads as; places after the last of them, where the source has ended, are left out
    `written`  what each step wrote; steps after the last of them are left out

    >>> draw_attention(torch.eye(3), ["eins", "zwei", "drei"], ["one", "two", "three"])
    <Drawing: Attention of 3 steps over 3 places>
    """
    if weights.dim() != 2:
        raise ValueError(f"weights has shape {tuple(weights.shape)}; one sequence is [τ, places]: type weights[:, i].")
    rows, columns = len(written), len(read)
    if not (0 < rows <= weights.shape[0] and 0 < columns <= weights.shape[1]):
        raise ValueError(
            f"weights is {tuple(weights.shape)}, [τ, places]; got {rows} written and {columns} read tokens."
        )
    data = weights.detach().double().cpu()[:rows, :columns]
    above, beside = [visible(beginning(piece)) for piece in read], [visible(beginning(piece)) for piece in written]
    cell = 0.3  # inches
    widest, highest = max(map(len, beside)), max(map(len, above))
    figure = new_figure(max(3.2, cell * columns + 0.09 * widest + 1.5), max(1.6, cell * rows + 0.08 * highest + 0.7))
    axes = figure.subplots()
    image = _cells(axes, data, data.isfinite(), cmap=SIZES, vmin=0.0, vmax=1.0)
    axes.set_xticks(range(columns), above, rotation=90 if highest > 2 else 0, fontfamily=families("".join(above)))
    axes.set_yticks(range(rows), beside, fontfamily=families("".join(beside)))
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.tick_params(length=0, labelcolor=LIGHT["ink"])
    axes.spines[:].set_visible(False)
    axes.set_xlabel("read")
    axes.set_ylabel("written")
    bar = figure.colorbar(image, ax=axes, pad=0.02, aspect=20)
    bar.outline.set_visible(False)
    bar.set_label("weight")
    return Drawing(figure, f"Attention of {rows} steps over {columns} places")


# ------------------------------------------------------------------ learning curves


@style()
def learning_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    baselines: Mapping[str, float] | None = None,
    title: str = "",
) -> Drawing:
    """Nats per token against steps, as points (step, nats), and baselines as lines across; each named at its end."""
    kept = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in curves.items()}
    kept = {name: points for name, points in kept.items() if points}
    if not kept:
        raise ValueError("learning_curves needs at least one point (step, nats); got none.")
    lines = {name: y for name, y in (baselines or {}).items() if math.isfinite(y)}
    height = max(4.2, 1.2 + 0.2 * (len(kept) + len(lines)))
    figure = new_figure(8.2, height)
    axes = figure.subplots()
    every = [y for points in kept.values() for _, y in points] + list(lines.values())
    room = 0.06 * ((max(every) - min(every)) or 1.0)
    low, high = min(every) - room, max(every) + room
    ends: list[tuple[float, str, str]] = []  # where, what it says, its colour
    for i, (name, points) in enumerate(kept.items()):
        x, y = zip(*points, strict=True)
        colour = CYCLE[i % len(CYCLE)]
        marker = "o" if len(points) <= 30 else None
        axes.plot(x, y, color=colour, linewidth=1.6, marker=marker, markersize=3.5, clip_on=False, zorder=3)
        ends.append((y[-1], name, colour))
    for name, value in lines.items():
        axes.axhline(value, color=LIGHT["muted"], linewidth=1, linestyle=(0, (4, 3)))
        ends.append((value, name, LIGHT["muted"]))
    axes.set_ylim(low, high)
    last = max(x for points in kept.values() for x, _ in points)
    axes.set_xlim(0, last or 1)
    _name_ends(axes, ends, line=16 / (72 * (height - 0.9)))
    axes.set_xlabel("steps of training")
    axes.set_ylabel("nats per token")
    if title:
        axes.set_title(label(title), loc="left")
    return Drawing(figure, "Learning curve: " + ", ".join(f"{name} {y:.3f} nats per token" for y, name, _ in ends))


def _name_ends(axes: "Axes", ends: list[tuple[float, str, str]], line: float) -> None:
    """Each line's name and last value to the right of the axes, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    ends = sorted(ends)
    leader = {"arrowstyle": "-", "linewidth": 0.7, "shrinkA": 1, "shrinkB": 0, "relpos": (0, 0.5)}
    places = spread([(y - low) / (high - low) for y, _, _ in ends], line)
    for (y, name, colour), place in zip(ends, places, strict=True):
        axes.annotate(
            f"{label(name)}  {y:.3f}  (perplexity {_perplexity(y)})",
            (1, (y - low) / (high - low)),
            (1.045, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            color=colour,
            arrowprops={**leader, "color": colour},
        )


def _perplexity(nats: float) -> str:
    return f"{math.exp(nats):.4g}" if nats < 700 else "∞"


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Places from 0 to 1, as near as can be to those wanted (rising), no two of them closer than `gap`.

    >>> [round(place, 2) for place in spread([0.1, 0.5, 0.5, 0.9], 0.1)]
    [0.1, 0.45, 0.55, 0.9]
    """
    groups: list[list[float]] = []  # of neighbours that touch: each minus its own distance from the first
    for i, place in enumerate(wanted):
        groups.append([place - i * gap])
        while len(groups) > 1 and fmean(groups[-2]) >= fmean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    means = [fmean(group) for group in groups for _ in group]
    highest = 1 - (len(means) - 1) * gap
    return [max(0.0, min(mean, highest)) + i * gap for i, mean in enumerate(means)]


# ------------------------------------------------------------------ what heat maps share


def _heat(axes: "Axes", data: Tensor, there: Tensor, typical: float, first: int) -> "AxesImage":
    """Sizes on a log scale, `[rows, columns]`; blank where they are not `there`, red where they are no finite number.

    A size of 0 is the darkest there is. Columns count from 1, rows from `first`.
    """
    from matplotlib.colors import ListedColormap

    rows, columns = data.shape
    box = (0.5, columns + 0.5, first + rows - 0.5, first - 0.5)
    scale = _scale(data[there], typical)
    finite = data.isfinite()
    sizes = torch.where(data == 0, (scale.vmin or 1.0) * 1e-3, data)
    image = _cells(axes, sizes, there & finite, cmap=SIZES, norm=scale, extent=box)
    if not bool(finite.all()):
        _cells(axes, torch.ones_like(data), ~finite, cmap=ListedColormap([LIGHT["red"]]), extent=box)
    _ticks(axes.xaxis, 1, columns)
    axes.spines[:].set_visible(False)
    return image


def _scale(values: Tensor, typical: float) -> "LogNorm":
    """A log scale over the values, but at most `DECADES` decades from the typical one."""
    from matplotlib.colors import LogNorm

    seen = values[values.isfinite() & (values > 0)]
    if not seen.numel():
        return LogNorm(0.1, 1.0)
    seen = seen.clamp(*EXTREMES)
    if not EXTREMES[0] <= typical <= EXTREMES[1]:
        typical = float(seen.median())
    low = max(float(seen.min()), typical * 10.0**-DECADES)
    high = min(float(seen.max()), typical * 10.0**DECADES)
    if high < 10 * low:  # a decade at least, or noise would look like a pattern
        middle = math.sqrt(low) * math.sqrt(high)
        low, high = middle / math.sqrt(10), middle * math.sqrt(10)
    return LogNorm(low, high)


def _colour_bar(
    image: "AxesImage", axes: "Axes", title: str, pad: float, aspect: float = 20, location: str = "right"
) -> None:
    from matplotlib.ticker import NullFormatter

    data, scale = image.get_array(), image.norm
    assert data is not None
    below, above = bool((data < scale.vmin).any()), bool((data > scale.vmax).any())
    extend = {(True, True): "both", (True, False): "min", (False, True): "max"}.get((below, above), "neither")
    bar = axes.figure.colorbar(image, ax=axes, pad=pad, aspect=aspect, extend=extend, location=location)
    bar.outline.set_visible(False)
    bar.set_label(title)
    if location == "top":  # side by side there is room for powers of ten alone
        bar.ax.xaxis.set_minor_formatter(NullFormatter())


def _cells(axes: "Axes", data: Tensor, there: Tensor, **colours: Any) -> "AxesImage":
    """A rectangle for each number, blank where it is not `there`."""
    import numpy as np

    shown = np.ma.masked_array(data.numpy(), ~there.numpy())
    return axes.imshow(shown, aspect="auto", interpolation="nearest", **colours)


def _middle(values: Tensor) -> float:
    seen = values[values.isfinite() & (values > 0)]
    return float(seen.median()) if seen.numel() else 1.0


def _ticks(axis: Any, low: int, high: int, most: int = 8) -> None:
    """Whole numbers from `low` to `high`: the first, and round ones."""
    step = next(s * 10**e for e in range(12) for s in (1, 2, 5) if (high - low) / (s * 10**e) <= most)
    round_ones = range(-(-low // step) * step, high + 1, step)
    axis.set_ticks([low, *(tick for tick in round_ones if tick - low >= 0.6 * step)])


def _caption(figure: Any, text: str) -> None:
    """A sentence or two under the picture."""
    lines = textwrap.wrap(text, round(figure.get_figwidth() * 13))
    figure.supxlabel("\n".join(map(label, lines)), x=0.012, ha="left", fontsize=10)
