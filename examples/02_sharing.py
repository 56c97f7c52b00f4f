"""One shared step needs fewer examples than a model for each length, and runs on lengths that it never saw.

After t steps, a state is some function of the whole past: h(t) = g(t)(x(1), …, x(t)). One could learn each g(t) by
itself. A recurrence learns one step f instead, and applies it t times with the same parameters (book 10.1). So every
example teaches the same f, whatever its length, and f can be applied more often than in training. Here a sequence of
commands (leave, toggle, on, off) is read, and at its end the network must say whether the switch is on. One recurrent
network learns from all the examples, and one multilayer perceptron for each length from those of its length. All are
then tested on new sequences; on longer ones the recurrent network alone, since no perceptron has that many inputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import loopfold as lf

LEAVE, TOGGLE, ON, OFF = range(4)


@dataclass
class Result:
    seen: Sequence[int]  # the lengths of the examples
    examples: list[int]
    separate: list[float]  # the share of right answers, lengths as in training
    shared: list[float]
    longer: dict[int, list[float]]  # the same by length, for lengths not in training


def switches(lengths: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random commands, one-hot `[τ, batch, 4]`, and the position of each switch at the end, `[batch]`."""
    commands = torch.randint(4, (int(lengths.max()), len(lengths)), generator=generator)
    commands[torch.arange(len(commands))[:, None] >= lengths] = LEAVE  # padding
    on = torch.zeros(len(lengths), dtype=torch.long)
    for command in commands:
        on = torch.where(command == TOGGLE, 1 - on, on).masked_fill(command == ON, 1).masked_fill(command == OFF, 0)
    return nn.functional.one_hot(commands, 4).float(), on


def fit(model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor], examples: int, iterations: int) -> None:
    """Lower the mean loss of a batch, which is the numbers of up to 256 examples."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    lf.fit(model, lambda i: torch.randperm(examples)[:256], iterations, loss=loss, optimiser=optimiser, clip=None)


def shared(x: Tensor, y: Tensor, lengths: Tensor, n: int, iterations: int) -> lf.SequenceToOne:
    """One f for all lengths and steps."""
    f = lf.SequenceToOne(lf.GRU(4, n), outputs=2)
    fit(f, lambda f, i: f.loss(f(x[:, i], lengths=lengths[i]), y[i]) / len(i), len(y), iterations)
    return f


def separate(x: Tensor, y: Tensor, n: int, iterations: int) -> nn.Module:
    """The g(t) of one length, a perceptron that reads all of x(1…t) at once."""
    g = nn.Sequential(nn.Linear(4 * len(x), n), nn.ReLU(), nn.Linear(n, 2))
    flat = x.transpose(0, 1).flatten(1)
    fit(g, lambda g, i: nn.functional.cross_entropy(g(flat[i]), y[i]), len(y), iterations)
    return g


def right(o: Tensor, y: Tensor) -> float:
    return float((o.argmax(-1) == y).float().mean())


def experiment(
    examples: Sequence[int] = (32, 128, 512, 2048, 8192),
    seen: Sequence[int] = (4, 6, 8, 10),
    unseen: Sequence[int] = (20, 100),
    n: int = 32,
    iterations: int = 300,
    repeats: int = 3,
) -> Result:
    shape = (repeats, len(examples))
    by_g, by_f, longer = torch.zeros(shape), torch.zeros(shape), {t: torch.zeros(shape) for t in unseen}
    for r in range(repeats):
        torch.manual_seed(r)
        generator = torch.Generator().manual_seed(r)
        test = {t: switches(torch.full((1000,), t), generator) for t in [*seen, *unseen]}
        for j, number in enumerate(examples):
            lengths = torch.tensor(seen).repeat(number // len(seen))
            x, y = switches(lengths, generator)
            f = shared(x, y, lengths, n, iterations)
            g = {t: separate(x[:t, lengths == t], y[lengths == t], 2 * n, iterations) for t in seen}
            with torch.no_grad():
                for t, (x, y) in test.items():
                    o = f(x)
                    if t in g:
                        by_f[r, j] += right(o, y) / len(seen)
                        by_g[r, j] += right(g[t](x.transpose(0, 1).flatten(1)), y) / len(seen)
                    else:
                        longer[t][r, j] = right(o, y)
    lists = {t: of.mean(0).tolist() for t, of in longer.items()}
    return Result(seen, list(examples), by_g.mean(0).tolist(), by_f.mean(0).tolist(), lists)


def table(result: Result) -> str:
    seen = ", ".join(map(str, result.seen))
    lines = [f"right answers, lengths {seen} in training; a guess is right half the time", ""]
    lines += ["examples   a g(t) for each    one f" + "".join(f"   one f, length {t}" for t in result.longer)]
    for j, number in enumerate(result.examples):
        longer = "".join(f"   {of[j]:>{14 + len(str(t))}.1%}" for t, of in result.longer.items())
        lines += [f"{number:>8,}   {result.separate[j]:>15.1%}   {result.shared[j]:>6.1%}{longer}"]
    return "\n".join(lines)


def picture(result: Result) -> lf.Drawing:
    with lf.style():
        figure = Figure(figsize=(6.4, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot(result.examples, result.shared, "o-", color="C0", label="one f, lengths as in training")
        for (t, line), style in zip(result.longer.items(), ("s--", "^:"), strict=False):
            axes.plot(result.examples, line, style, color="C2", label=f"one f, length {t}, never seen")
        axes.plot(result.examples, result.separate, "D-", color="C1", label="a g(t) for each length")
        axes.axhline(0.5, color="0.5", linewidth=1, linestyle=(0, (4, 3)))
        axes.text(result.examples[-1], 0.49, "a guess", color="0.5", ha="right", va="top")
        axes.set(
            xscale="log", xlabel="examples in training, all lengths together", ylabel="right answers", ylim=(0.44, 1.03)
        )
        axes.set_xticks(result.examples, [f"{number:,}" for number in result.examples])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 0.14))
    return lf.Drawing(
        figure, "Right answers against examples in training: one shared step, and a model for each length"
    )


def found(result: Result) -> str:
    best = max(range(len(result.examples)), key=result.separate.__getitem__)
    enough = next((j for j, share in enumerate(result.shared) if share >= result.separate[best]), best)
    longest = max(result.longer)
    return f"""\
claim     One shared step needs fewer examples than a model for each length
holds if  f is right as often as the separate models at their best, with fewer examples
verdict   {"holds" if enough < best else "does not hold here"}
figures   {result.shared[enough]:.1%} right with {result.examples[enough]:,} examples; \
separate models {result.separate[best]:.1%} with {result.examples[best]:,}

claim     It runs on lengths that it never saw
holds if  after the most examples f is right at least 95% of the time at each of them
verdict   {"holds" if min(of[-1] for of in result.longer.values()) >= 0.95 else "does not hold here"}
figures   {result.longer[longest][-1]:.1%} right at length {longest}, from at most {max(result.seen)} in training

A g(t) learns from the examples of its own length alone, one in {len(result.seen)}; f learns the same step from all."""


def main() -> None:
    torch.set_num_threads(1)  # the products are small: two threads would wait for each other
    result = experiment()
    print(table(result), found(result), sep="\n\n")
    picture(result).save(Path(__file__).parent / "pictures" / "02_sharing.svg")


if __name__ == "__main__":
    main()
