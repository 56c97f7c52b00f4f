"""Outputs are one thing, the final state is another.

A run over a sequence gives a hidden vector at every step, from which outputs are read, and one state at the end. They
are easily confused, for where all sequences are equally long hidden[-1] is the final state. In a batch of unequal
lengths it is not: short sequences are padded, and hidden[-1] is the state after the padding, or zeros where a library
blanks it. Nothing fails; the model is only worse. In Loopfold the final state has a name of its own: given `lengths`,
`run.last` is the state after each sequence's own last step, `run.last_hidden` what a readout reads of it, and
`lf.SequenceToOne` uses nothing else.

The task is easy: name the last symbol but one. Each network is trained on sequences of 5 to 40 symbols, padded to 40,
by one of the ways to read it; then sequences of 20 symbols are padded by more and more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

import loopfold as lf

SYMBOLS, SHORT, LONG = 4, 5, 40

Reading = Callable[[lf.Recurrent, Tensor, Tensor], Tensor]  # a layer, x and lengths: the vector to answer from


def right(layer: lf.Recurrent, x: Tensor, lengths: Tensor) -> Tensor:
    return layer(x, lengths=lengths).last_hidden


def after_padding(layer: lf.Recurrent, x: Tensor, lengths: Tensor) -> Tensor:
    return layer(x).hidden[-1]


def blanked(layer: lf.Recurrent, x: Tensor, lengths: Tensor) -> Tensor:
    return layer(x, lengths=lengths).hidden[-1]  # zero after a sequence's end


READINGS: dict[str, tuple[Reading, Reading]] = {  # in training, and in use
    "last_hidden": (right, right),
    "last_hidden; in use hidden[-1]": (right, after_padding),
    "hidden[-1], lengths not given": (after_padding, after_padding),
    "hidden[-1], lengths given": (blanked, blanked),
}


@dataclass
class Row:
    cell: str
    reading: str
    accuracy: dict[int, float]  # by the number of steps of padding
    moved: dict[int, float]  # the largest change that so much padding makes to an output o


def padded(lengths: Tensor, tau: int, back: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Symbols, one-hot, and zeros after each sequence's end; the answer is symbol `back` from there, the last being 1.

    With back = 2:
    a c b d b   answer: d
    d a . . .   answer: d
    """
    symbols = torch.randint(SYMBOLS, (tau, len(lengths)), generator=generator)
    x = torch.nn.functional.one_hot(symbols, SYMBOLS).float()
    x[torch.arange(tau)[:, None] >= lengths] = 0.0
    return x, symbols[lengths - back, torch.arange(len(lengths))], lengths


def train(layer: lf.Recurrent, readout: torch.nn.Linear, read: Reading, updates: int, back: int) -> None:
    generator = torch.Generator().manual_seed(0)
    both = torch.nn.ModuleList([layer, readout])
    optimiser = torch.optim.Adam(both.parameters(), lr=5e-3, fused=True)

    def loss(both: torch.nn.ModuleList, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(readout(read(layer, x, lengths)), y)

    lengths = (torch.randint(SHORT, LONG + 1, (32,), generator=generator) for _ in range(updates))
    lf.fit(both, (padded(some, LONG, back, generator) for some in lengths), updates, loss=loss, optimiser=optimiser)


def experiment(
    n: int = 32,
    updates: int = 500,
    padding: tuple[int, ...] = (0, 1, 2, 5, 10, 20, 30, 40, 60, 80, 100),
    back: int = 2,
) -> list[Row]:
    x, y, lengths = padded(torch.full((500,), 20), 20, back, torch.Generator().manual_seed(1))
    rows = []
    for cell in (lf.Elman, lf.GRU):
        for name, (in_training, in_use) in READINGS.items():
            torch.manual_seed(0)
            layer, readout = lf.Recurrent(cell(SYMBOLS, n)), torch.nn.Linear(n, SYMBOLS)
            train(layer, readout, in_training, updates, back)
            longer = {p: torch.cat([x, x.new_zeros(p, *x.shape[1:])]) for p in padding}
            o = {p: readout(in_use(layer, x_p, lengths)).detach() for p, x_p in longer.items()}
            accuracy = {p: float((o[p].argmax(-1) == y).float().mean()) for p in padding}
            moved = {p: float((o[p] - o[padding[0]]).abs().max()) for p in padding}
            rows.append(Row(cell.__name__, name, accuracy, moved))
    return rows


def table(result: list[Row]) -> str:
    shown = [p for p in result[0].accuracy if p in (0, 10, 40, 100)]
    steps = "".join(f"{p:>6}" for p in shown)
    lines = [f"{'cell':<6} {'reads':<31}right answers after so many   largest change"]
    lines += [f"{'':<38}steps of padding              of an output"]
    lines += [f"{'':<37}{steps}{f'after {shown[-1]}':>18}"]
    for row in result:
        right = "".join(f"{row.accuracy[p]:>6.2f}" for p in shown)
        lines.append(f"{row.cell:<6} {row.reading:<30}{right}{row.moved[shown[-1]]:>18.2g}")
    return "\n".join(lines)


@lf.style()
def picture(result: list[Row]) -> lf.Drawing:
    figure = Figure(figsize=(9.6, 4.3), layout="constrained")
    padding = list(result[0].accuracy)
    known = LONG - SHORT  # to the right of it, more padding than in training
    cells = list(dict.fromkeys(row.cell for row in result))
    for axes, cell in zip(figure.subplots(1, len(cells), sharey=True), cells, strict=True):
        rows = [row for row in result if row.cell == cell]
        for row, style in zip(rows, ("o-", "D--", "s--", "^:"), strict=True):
            axes.plot(padding, row.accuracy.values(), style, label=row.reading, clip_on=False)
        axes.axvspan(0, known, color="0.5", alpha=0.15, linewidth=0)
        axes.axhline(1 / SYMBOLS, color="0.5", linewidth=0.8)
        axes.set(title=cell, xlabel="steps of padding (log scale from 1 on)", ylim=(0, 1))
        axes.set_xscale("symlog", linthresh=1, linscale=0.5)
        axes.set_xlim(0, padding[-1])
        ticks = [p for p in padding if p in (0, 1, 2, 5, 10, 20, 40, 100)]  # where their numbers have room
        axes.set_xticks(ticks, [str(p) for p in ticks])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.text(0.95 * known, 0.02, "as in training", ha="right", fontsize=9)
        axes.text(padding[-1], 1 / SYMBOLS - 0.02, "a guess", ha="right", va="top", fontsize=9)
    figure.axes[0].set_ylabel("right answers")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return lf.Drawing(figure, "Accuracy against padding, for four ways to read the final state")


def found(result: list[Row]) -> str:
    padding = max(result[0].accuracy)
    row = {(row.cell, row.reading): row for row in result}
    named, taken, after = ([row[cell, reading] for cell in ("Elman", "GRU")] for reading in list(READINGS)[:3])
    least = min(each.accuracy[padding] for each in named)
    most = max(each.accuracy[padding] for each in taken)
    different = most < least / 2 and not any(each.moved[padding] for each in named)
    shares = ", ".join(f"{each.cell} {each.accuracy[0]:.2f} and {each.accuracy[padding]:.2f}" for each in after)
    return f"""\
claim     Outputs and the final state are different things
holds if  padding changes nothing by `last_hidden`; by `hidden[-1]` the same networks are right half as often or less
verdict   {"holds; taken for each other, nothing fails, the model is worse" if different else "does not hold here"}
figures   right after {padding} steps of padding: {least:.2f} by `last_hidden`, {most:.2f} by `hidden[-1]`

Trained on hidden[-1] without lengths, networks are right without padding and after {padding} steps of it:
{shares}. Such a network may take the padding for a sign of the end, and carry its answer
through as much of it as it knew. The task decides what the mistake costs: experiment(back=1) asks for the last symbol
itself."""


def main() -> None:
    torch.set_num_threads(1)  # the tensors are tiny: a second thread would only wait
    result = experiment()
    print(table(result), found(result), sep="\n\n")
    picture(result).save(Path(__file__).parent / "pictures" / "09_last_state.svg")


if __name__ == "__main__":
    main()
