"""Where gradients vanish and explode.

Back-propagation through time multiplies one Jacobian a step: ∂L(t)/∂h(k) = ∂L(t)/∂h(t) · Π ∂h(j)/∂h(j-1). For a plain
network a factor is diag(φ′(a)) W, so the gradient should shrink where the spectral radius ρ of W is below 1 and grow
where it is above, and a network should learn nothing from a cause that its gradient does not reach. An LSTM adds to its
memory instead of multiplying it, and a GRU can too, so with an open gate the factor is close to 1.

Here the norms are measured in networks before any training. Then the same networks learn to name the symbol shown at
the first step after a delay filled with noise, a delay twice as long each time, until one is too long for them.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

import loopfold as lf

SYMBOLS = 4
DELAYS = (5, 10, 20, 40, 80, 160)  # in steps
BAND = 1e3  # a gradient within so large a factor of what it was has neither vanished nor exploded
COLOURS = {"tanh": "C0", "ReLU": "C1", "LSTM": "C2", "GRU": "C3"}


@dataclass
class Row:
    name: str
    radius: float | None  # ρ(W); a gated cell has several W
    reach: list[float]  # ‖∂L(t)/∂h(t-d)‖ by distance d, relative to d = 0
    rate: float  # its factor a step
    delays: list[int]  # the longest that was learnt, from each of some starts; 0: none

    @property
    def fate(self) -> str:
        return "vanishes" if self.reach[-1] < 1 / BAND else "explodes" if self.reach[-1] > BAND else "stays"

    @property
    def said(self) -> str:
        """The fate that is claimed for a ρ."""
        return "vanishes" if self.radius < 0.99 else "explodes" if self.radius > 1.01 else "stays"

    @property
    def delay(self) -> int:
        return statistics.median_low(self.delays)


def make(name: str, n: int, seed: int) -> lf.Transition:
    """The cell of a row. An orthogonal W times ρ has all its eigenvalues on the circle of radius ρ."""
    torch.manual_seed(seed)
    kind, _, rest = name.partition(" ")
    if kind in ("tanh", "ReLU"):
        φ = torch.tanh if kind == "tanh" else torch.relu
        return lf.Elman(SYMBOLS + 1, n, φ, recurrent_init=lf.Orthogonal(float(rest.removeprefix("ρ = "))))
    if kind == "LSTM":
        return lf.LSTM(SYMBOLS + 1, n, forget_bias=3.0 if "open" in rest else None)
    return lf.GRU(SYMBOLS + 1, n, update_bias=3.0 if "open" in rest else None)


def shown(delay: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A symbol, one-hot at the first step; then noise in a channel of its own. The symbol is the answer.

    symbol  b . . . . .
    noise   . ~ ~ ~ ~ ~   answer: b
    """
    y = torch.randint(SYMBOLS, (batch,), generator=generator)
    x = torch.zeros(delay + 1, batch, SYMBOLS + 1)
    x[0, torch.arange(batch), y] = 1.0
    x[1:, :, SYMBOLS] = torch.randn(delay, batch, generator=generator)
    return x, y


def accuracy(cell: lf.Transition, delay: int, updates: int, seed: int) -> float:
    """After a small training, on sequences not seen in it. Clipping takes care of gradients that explode."""
    generator = torch.Generator().manual_seed(seed)
    model = lf.SequenceToOne(cell, outputs=SYMBOLS)
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3, fused=True)
    lf.fit(model, lambda i: shown(delay, 16, generator), updates, optimiser=optimiser)
    x, y = shown(delay, 500, generator)
    return float((model(x).argmax(-1) == y).float().mean())


def longest(name: str, n: int, updates: int, delays: tuple[int, ...], seed: int) -> int:
    learnt = 0
    for delay in delays:
        if accuracy(make(name, n, seed), delay, updates, seed) < 0.9:
            break
        learnt = delay
    return learnt


def experiment(
    names: tuple[str, ...] = (
        *("tanh ρ = 0.5", "tanh ρ = 1", "tanh ρ = 1.5"),
        *("ReLU ρ = 0.5", "ReLU ρ = 1", "ReLU ρ = 2"),
        *("LSTM as started", "LSTM forget gate open", "GRU as started", "GRU update gate open"),
    ),
    n: int = 32,
    steps: int = 60,
    updates: int = 200,
    delays: tuple[int, ...] = DELAYS,
    seeds: tuple[int, ...] = (0, 1, 2),
) -> list[Row]:
    rows = []
    for name in names:
        model = lf.SequenceToSequence(make(name, n, seeds[0]), outputs=SYMBOLS)
        x, y = torch.randn(steps, 4, SYMBOLS + 1), torch.randint(SYMBOLS, (steps, 4))
        flow = lf.gradient_flow(model, model.loss, x, y)
        radius = lf.eigenvalues(model).radius.get("W")
        learnt = [longest(name, n, updates, delays, seed) for seed in seeds]
        rows.append(Row(name, radius, flow.reach.tolist(), flow.rate, learnt))
    return rows


def table(result: list[Row]) -> str:
    last = len(result[0].reach) - 1
    lines = [f"{'cell':<22} {'ρ(W)':>6} gradient, relative to distance 0   longest delay learnt"]
    lines += [f"{'':<29} {'a step':>13} {f'after {last} steps':>20}   {'median':>6}   of each start"]
    for row in result:
        radius = "" if row.radius is None else f"{row.radius:.2f}"
        starts = ", ".join(map(str, row.delays))
        lines.append(f"{row.name:<22} {radius:>6} {row.rate:>13.2f} {row.reach[-1]:>20.1e}   {row.delay:>6}   {starts}")
    return "\n".join(lines)


@lf.style()
def picture(result: list[Row], delays: tuple[int, ...] = DELAYS) -> lf.Drawing:
    """On the left the gradient by distance, on the right what could be learnt; a row and its curve share their look."""
    figure = Figure(figsize=(9.6, 5.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.15, 1])
    tried = (0, *delays)
    seen: dict[str, int] = {}
    for place, row in enumerate(result):
        kind = row.name.split()[0]
        seen[kind] = seen.get(kind, -1) + 1
        look = {"color": COLOURS[kind], "linestyle": ("-", "--", ":")[seen[kind]]}
        left.plot(row.reach, linewidth=1.8, label=row.name, **look)
        right.plot([0, tried.index(row.delay)], [place, place], linewidth=2, **look)
        right.plot([tried.index(d) for d in row.delays], [place] * len(row.delays), "o", color=COLOURS[kind], ms=3.5)
        right.plot(tried.index(row.delay), place, "D", color=COLOURS[kind], ms=7)
    left.set(yscale="log", xlabel="steps back, $d$", xlim=(0, len(result[0].reach) - 1))
    left.set_ylabel(r"$\Vert\,\partial L^{(t)} / \partial h^{(t-d)}\,\Vert$, relative to $d = 0$")
    left.axhspan(1 / BAND, BAND, color="0.5", alpha=0.15, linewidth=0, label="neither vanished nor exploded")
    right.set(yticks=range(len(result)), ylim=(len(result) - 0.5, -0.5), xlim=(-0.1, len(tried) - 0.5))
    right.set_xlabel(
        f"longest delay learnt, in steps, of those tried\n(dots: {len(result[0].delays)} starts; ◆: median)"
    )
    right.set_xticks(range(len(tried)), ["none", *map(str, delays)])
    right.set_yticklabels([row.name for row in result])
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=4, fontsize=9)
    return lf.Drawing(figure, "How far gradients reach before training, and the longest delay that is learnt")


def found(result: list[Row]) -> str:
    last = len(result[0].reach) - 1
    plain = [row for row in result if row.radius is not None]
    wrong = [row for row in plain if row.fate != row.said]
    gated = [row for row in result if row.radius is None]
    opened, started = ([row for row in gated if ("open" in row.name) == is_open] for is_open in (True, False))
    left = ", ".join(f"{row.reach[-1]:.1e} for {row.name}" for row in wrong or plain)
    least, most = min(row.reach[-1] for row in opened), max(row.reach[-1] for row in started)
    radius = f"in part: not for {', '.join(row.name for row in wrong)}" if wrong else "holds"
    gates = "holds" if all(row.fate == "stays" for row in started) else "holds once they are open, not by being there"
    short, long = (
        ", ".join(str(delay) for delay in sorted(row.delay for row in result if (row.fate == "vanishes") == vanishes))
        for vanishes in (True, False)
    )
    return f"""\
claim     Gradients vanish where ρ(W) is below 1 and explode where it is above
holds if  they do so by a factor of {BAND:,.0f} or more, and do not where ρ is 1
verdict   {radius if len(wrong) < len(plain) else "does not hold here"}
figures   left after {last} steps: {left}

claim     Gates carry the gradient
holds if  what is left is within a factor of {BAND:,.0f} of what it was
verdict   {gates if all(row.fate == "stays" for row in opened) else "does not hold here"}
figures   left after {last} steps: at least {least:.1e} where they are open, at most {most:.1e} as started

ρ is the rate of a linear network. With φ it is neither the rate nor a bound: what bounds a step is the largest singular
value of W, where |φ′| ≤ 1. A tanh that saturates and a ReLU that is silent take their share, so that gradients may
vanish at ρ = 1, and need not explode above it. Where they vanish, the longest delays learnt are
{short} steps, elsewhere {long}. Training moves what was measured before it, so the one does
not bound the other."""


def main() -> None:
    torch.set_num_threads(1)  # the tensors are tiny: a second thread would only wait
    result = experiment()
    print(table(result), found(result), sep="\n\n")
    picture(result).save(Path(__file__).parent / "pictures" / "06_gradients.svg")


if __name__ == "__main__":
    main()
