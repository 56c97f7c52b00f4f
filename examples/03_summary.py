"""The state is a lossy summary of the past.

A state has a fixed size and the past may have any length, so in general something must be lost; training decides what
is kept (book 10.1). The hardest thing to ask of a state is the whole past back, as an autoencoder does: it reads a
sequence, keeps the last state alone, and rebuilds the sequence from it. Here the sequences are random symbols, one of
four, so that nothing can be guessed from what is usual or from neighbours: τ symbols are 2τ bits, and a state that
keeps none of them is right one time in four. The accuracy is measured against the length τ and the size n of the state.
All networks have the same decoder and the same training, and each is started three times, a dot each in the picture;
two of them are also trained four times as long, to tell what is lost to the size of the state from what has not been
learned yet.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import loopfold as lf


@dataclass
class Result:
    symbols: int
    accuracy: dict[tuple[int, int], list[float]]  # by n and τ: the share of symbols that come back, for each start
    longer: dict[tuple[int, int], list[float]]  # the same after more training
    more: int  # how many times more


def sequences(symbols: int, tau: int, number: int) -> tuple[Tensor, Tensor]:
    """Random symbols, one-hot `[τ, number, symbols]`, and the same as numbers `[τ, number]`."""
    y = torch.randint(symbols, (tau, number))
    return nn.functional.one_hot(y, symbols).float(), y


def rebuilt(symbols: int, n: int, tau: int, iterations: int, decoder: int, seed: int) -> float:
    """The share of symbols that a state of n numbers gives back after training, on new sequences."""
    torch.manual_seed(seed)
    model = lf.Autoencoder(lf.GRU(symbols, n), lf.GRU(n + symbols, decoder), outputs=symbols)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    lf.fit(model, lambda i: sequences(symbols, tau, 64), iterations, optimiser=optimiser)
    x, y = sequences(symbols, tau, 1000)
    with torch.no_grad():
        return float((model(x).argmax(-1) == y).float().mean())


def experiment(
    sizes: Sequence[int] = (2, 4, 8, 32),
    lengths: Sequence[int] = (2, 4, 8, 12),
    iterations: int = 300,
    longer: Sequence[tuple[int, int]] = ((2, 8), (32, 8)),
    more: int = 4,
    symbols: int = 4,
    decoder: int = 64,
    starts: int = 3,
) -> Result:
    def shares(n: int, tau: int, iterations: int) -> list[float]:
        return [rebuilt(symbols, n, tau, iterations, decoder, seed) for seed in range(starts)]

    short = {(n, tau): shares(n, tau, iterations) for n in sizes for tau in lengths}
    long = {(n, tau): shares(n, tau, more * iterations) for n, tau in longer}
    return Result(symbols, short, long, more)


def table(result: Result) -> str:
    sizes, lengths = (list(dict.fromkeys(of)) for of in zip(*result.accuracy, strict=True))
    bits = math.log2(result.symbols)
    median, starts = statistics.median, len(next(iter(result.accuracy.values())))
    lines = [
        f"symbols that come back, median of {starts} starts; a guess is right {1 / result.symbols:.0%} of the time"
    ]
    lines += ["", "length τ         " + "".join(f"{tau:>9}" for tau in lengths)]
    lines += ["bits to keep     " + "".join(f"{tau * bits:>9.0f}" for tau in lengths), ""]
    for n in sizes:
        lines += [f"state of {n:>2}      " + "".join(f"{median(result.accuracy[n, tau]):>9.1%}" for tau in lengths)]
    (n, tau), apart = max(result.accuracy.items(), key=lambda item: max(item[1]) - min(item[1]))
    lines += [f"the starts differ most for a state of {n} and τ = {tau}: {min(apart):.1%} to {max(apart):.1%}", ""]
    for (n, tau), shares in result.longer.items():
        before, after = median(result.accuracy[n, tau]), median(shares)
        lines += [f"state of {n:>2}, τ = {tau}, {result.more} times the training: {after:.1%} instead of {before:.1%}"]
    return "\n".join(lines)


def picture(result: Result) -> lf.Drawing:
    sizes, lengths = (list(dict.fromkeys(of)) for of in zip(*result.accuracy, strict=True))
    colours = dict(zip(sizes, ["C1", "C3", "C2", "C0"], strict=False))
    with lf.style():
        figure = Figure(figsize=(6.4, 4), layout="constrained")
        axes = figure.subplots()
        for n, colour in colours.items():
            line = [statistics.median(result.accuracy[n, tau]) for tau in lengths]
            axes.plot(lengths, line, "o-", color=colour, label=f"state of {n}")
            for tau in lengths:
                shares = result.accuracy[n, tau]
                axes.plot([tau] * len(shares), shares, ".", color=colour, markersize=4)
        for (n, tau), shares in result.longer.items():
            median = statistics.median(shares)
            axes.plot(tau, median, "o", markerfacecolor="none", color=colours[n], label=f"{n}, {result.more}× training")
        axes.axhline(1 / result.symbols, color="0.5", linewidth=1, linestyle=(0, (4, 3)))
        axes.text(max(lengths), 1 / result.symbols - 0.015, "a guess", color="0.5", ha="right", va="top")
        axes.set(xlabel="length τ of the sequence", ylabel="symbols that come back", ylim=(0.15, 1.03), xticks=lengths)
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend()
    return lf.Drawing(figure, "How much of a random sequence its last state gives back, by length and size of state")


def found(result: Result) -> str:
    sizes, lengths = ({of[i] for of in result.accuracy} for i in (0, 1))
    small, large, short, long = min(sizes), max(sizes), min(lengths), max(lengths)
    share = {of: statistics.median(shares) for of, shares in result.accuracy.items()}
    lossy = share[small, long] == min(share[n, long] for n in sizes) and all(
        share[n, long] < share[n, short] for n in sizes
    )
    kept, bits = 32 * small, math.log2(result.symbols) * long  # a number of a state has 32
    return f"""\
claim     The state is a lossy summary of the past
holds if  every state gives back less of the longest sequences than of the shortest, and the smallest state the least
verdict   {"holds" + ", long before its bits run out" * (kept > bits) if lossy else "does not hold here"}
figures   of {long} symbols a state of {small} gives back {share[small, long]:.1%}, \
one of {large} {share[large, long]:.1%}

A state of {small} has {kept} bits, and the longest sequences need {bits:.0f}. A code that loses nothing need not be one
that training finds. What comes back after more training was not lost to the size of the state."""


def main() -> None:
    torch.set_num_threads(1)  # the products are small: two threads would wait for each other
    result = experiment()
    print(table(result), found(result), sep="\n\n")
    picture(result).save(Path(__file__).parent / "pictures" / "03_summary.svg")


if __name__ == "__main__":
    main()
