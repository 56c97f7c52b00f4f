"""A recurrence through the output alone is weaker, but trains in parallel.

Where the only way to the future is the output (book Fig. 10.4), a network can carry what its outputs say and nothing
else. The outputs are trained to match the targets, so what the targets do not say is lost, unless the user knows the
state of the system and makes it part of the targets (book 10.2.1). In return, under teacher forcing the true outputs
are known beforehand: no step waits for another, and all of them are computed at once. Here a network reads one of four
symbols, then blanks, then a question, and must answer with the symbol; until then its target is silence. In a second
version of the task the target until then is "I remember 3". What training in parallel gains is measured as time for one
iteration, against the same network one step at a time, and against a hidden recurrence.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import loopfold as lf

SYMBOLS, INPUTS, OUTPUTS = 4, 6, 9  # read: a symbol, a blank or the question; say: a symbol, "I remember …" or nothing
BLANK, QUESTION, SILENCE = 4, 5, 8
Model = lf.SequenceToSequence | lf.OutputRecurrence


@dataclass
class Result:
    delays: Sequence[int]  # blanks between symbol and question
    right: dict[str, list[list[float]]]  # right answers, by network and delay, of each start
    tau: int
    milliseconds: dict[str, float]  # for one iteration of training on one sequence of τ steps


def questions(number: int, delay: int, state_in_targets: bool) -> tuple[Tensor, Tensor]:
    """For symbol 3 and a delay of 2, x is 3 _ _ ? and y is silence, silence, silence, 3."""
    symbol = torch.randint(SYMBOLS, (number,))
    x, y = torch.full((delay + 2, number), BLANK), torch.full((delay + 2, number), SILENCE)
    x[0], x[-1], y[-1] = symbol, QUESTION, symbol
    if state_in_targets:
        y[:-1] = SYMBOLS + symbol  # "I remember 3"
    return nn.functional.one_hot(x, INPUTS).float(), y


def answers(model: Model, delay: int, iterations: int, feeding: lf.Feeding | None, state_in_targets: bool) -> float:
    """The share of right answers after training; in use, an output recurrence reads its own outputs."""

    def loss(model: Model, x: Tensor, y: Tensor) -> Tensor:
        return model.loss(model(x) if feeding is None else model(x, y, feeding), y) / 64

    batches = (questions(64, delay, state_in_targets) for _ in range(iterations))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    lf.fit(model, batches, iterations, loss=loss, optimiser=optimiser, clip=None)
    x, y = questions(1000, delay, state_in_targets)
    in_use = feeding if isinstance(feeding, lf.FreeRunning) else lf.FreeRunning()
    with torch.no_grad():
        o = model(x) if feeding is None else model(x, feeding=in_use)
    return float((o[-1].argmax(-1) == y[-1]).float().mean())


def milliseconds(tau: int, n: int, rounds: int) -> dict[str, float]:
    """One iteration of training on one sequence, forwards and backwards: medians, the four taking turns."""
    x, y = torch.randn(tau, 1, INPUTS), torch.randint(OUTPUTS, (tau, 1))
    output = lf.OutputRecurrence(INPUTS, n, OUTPUTS)
    looped = lf.OutputRecurrence(INPUTS, n, OUTPUTS, engine=lf.Sequential())
    in_turn = lf.GeneralisedTeacherForcing(1.0)  # the truth, as under teacher forcing, but one step at a time
    plain = lf.SequenceToSequence(lf.Recurrent(lf.Elman(INPUTS, n), engine=lf.Sequential()), OUTPUTS)
    compiled = lf.SequenceToSequence(lf.Elman(INPUTS, n), OUTPUTS)
    ways: dict[str, Callable[[], Tensor]] = {
        "output recurrence, step by step": lambda: looped.loss(looped(x, y, in_turn), y),
        "output recurrence, all steps at once": lambda: output.loss(output(x, y, lf.TeacherForcing()), y),
        "hidden recurrence, step by step": lambda: plain.loss(plain(x), y),
        "hidden recurrence, its loop compiled": lambda: compiled.loss(compiled(x), y),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 2):  # the first two warm up
        for name, loss in ways.items():
            start = time.process_time()  # of this one thread alone, whatever else the machine does
            loss().backward()
            times[name].append(1e3 * (time.process_time() - start))
    return {name: statistics.median(of[2:]) for name, of in times.items()}


def experiment(
    delays: Sequence[int] = (0, 1, 2, 4, 8),
    iterations: int = 400,
    n: int = 32,
    tau: int = 500,
    rounds: int = 20,
    starts: int = 3,
) -> Result:
    def hidden() -> Model:
        return lf.SequenceToSequence(lf.Elman(INPUTS, n, recurrent_init=lf.Orthogonal()), OUTPUTS)

    def output() -> Model:
        return lf.OutputRecurrence(INPUTS, n, OUTPUTS)

    networks = {
        "hidden recurrence": (hidden, None, False),
        "output recurrence, teacher forcing": (output, lf.TeacherForcing(), False),
        "output recurrence, free running on ŷ": (output, lf.FreeRunning(), False),
        "output recurrence, free running on o": (output, lf.FreeRunning(lf.Raw()), False),
        "output recurrence, state in the targets": (output, lf.TeacherForcing(), True),
    }
    right: dict[str, list[list[float]]] = {name: [[] for _ in delays] for name in networks}
    for name, (network, feeding, state_in_targets) in networks.items():
        for seed in range(starts):
            torch.manual_seed(seed)
            for delay, shares in zip(delays, right[name], strict=True):
                shares.append(answers(network(), delay, iterations, feeding, state_in_targets))
    return Result(delays, right, tau, milliseconds(tau, n, rounds))


def table(result: Result) -> str:
    lines = [f"{'right answers after a delay of':<40}" + "".join(f"{delay:>8}" for delay in result.delays)]
    for name, by_delay in result.right.items():
        lines += [f"{name:<40}" + "".join(f"{statistics.median(shares):>8.1%}" for shares in by_delay)]
    apart = max(max(shares) - min(shares) for by_delay in result.right.values() for shares in by_delay)
    lines += [f"medians of {len(by_delay[0])} starts, which differ by at most {100 * apart:.1f} points"]
    slow = max(result.milliseconds.values())
    lines += ["", f"{f'one iteration, τ = {result.tau}, one thread':<40}{'ms':>8}   times faster"]
    lines += [f"{name:<40}{ms:>8.2f}{slow / ms:>15.1f}" for name, ms in result.milliseconds.items()]
    return "\n".join(lines)


def picture(result: Result) -> lf.Drawing:
    blue, orange, green, purple, red = "C0", "C1", "C2", "C3", "C5"
    with lf.style():
        figure = Figure(figsize=(9.6, 4.4), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=[1.2, 1])
        marks = [("o-", 12, blue), ("s-", 11, orange), ("^-", 5, purple), ("v-", 8, red), ("D--", 6, green)]
        for (name, by_delay), (marker, size, colour) in zip(result.right.items(), marks, strict=True):
            line = [statistics.median(shares) for shares in by_delay]
            left.plot(result.delays, line, marker, markersize=size, color=colour, label=name, fillstyle="none", mew=1.6)
        left.axhline(1 / SYMBOLS, color="0.5", linewidth=1, linestyle=(0, (4, 3)), zorder=0)
        left.text(max(result.delays), 1 / SYMBOLS - 0.05, "a guess", color="0.5", ha="right", va="top")
        left.set(xlabel="blanks between symbol and question", ylabel="right answers", ylim=(0, 1.05))
        left.set_xticks(result.delays)
        left.yaxis.set_major_formatter("{x:.0%}")
        figure.legend(loc="outside upper left", ncols=3)
        names = [name.replace(", ", ",\n") for name in result.milliseconds]
        times = list(result.milliseconds.values())
        right.bar_label(right.barh(names, times, color=[orange, orange, blue, blue], height=0.5), fmt="%.1f", padding=3)
        right.set(xlabel=f"ms for one iteration of training, τ = {result.tau}", xlim=(0, 1.15 * max(times)))
        right.invert_yaxis()
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
    return lf.Drawing(figure, "Output recurrence: right answers against the delay, and time for one iteration")


def found(result: Result) -> str:
    at = next(i for i, delay in enumerate(result.delays) if delay)
    right = {name: statistics.median(by_delay[at]) for name, by_delay in result.right.items()}
    hidden, truth, own, raw, _ = right.values()
    carries = {"the truth": truth > 0.5, "ŷ": own > 0.5, "raw o": raw > 0.5}
    lost = " and ".join(name for name, carried in carries.items() if not carried)
    kept = " and ".join(name for name, carried in carries.items() if carried)
    carried = f"holds for {lost}" + f"; not where {kept} goes back" * bool(kept) if lost else "does not hold here"
    slow, fast, _, compiled = result.milliseconds.values()
    parallel = "holds" + ", but a compiled loop is about as fast" * (compiled < 2 * fast)
    return f"""\
claim     A recurrence through the output alone cannot carry what the output does not say
holds if  after the least delay at most half of its answers are right, and more of the hidden recurrence's
verdict   {carried if hidden > 0.5 else "does not hold here: the hidden recurrence carries nothing either"}
figures   a delay of {result.delays[at]}: {truth:.1%} right, hidden recurrence {hidden:.1%}; on raw o {raw:.1%}

claim     In return it trains in parallel
holds if  all steps at once take less than half the time of one by one
verdict   {parallel if 2 * fast < slow else "does not hold here"}
figures   {slow / fast:.1f} times faster than step by step; the hidden loop compiled, {slow / compiled:.1f}

The truth and the probabilities ŷ carry nothing beyond the targets. The unnormalised o can, where the network trains on
it, for there is room in o: a constant added to all of it changes no probability. So the weakness is one of targets as
messages, and of teacher forcing, more than of the arrow from output to hidden.
What all steps at once save is a loop in Python, and a compiled loop over the hidden recurrence does without it too."""


def main() -> None:
    torch.set_num_threads(1)  # the products are small: two threads would wait for each other
    result = experiment()
    print(table(result), found(result), sep="\n\n")
    picture(result).save(Path(__file__).parent / "pictures" / "04_output_recurrence.svg")


if __name__ == "__main__":
    main()
