"""A network trained on true inputs alone goes astray when it reads its own outputs.

Teacher forcing feeds the true output of the last step back in (book 10.2.1). In use there is no truth, and the network
reads its own outputs. These differ from all that it saw in training, its errors feed on themselves, and they grow with
the length that is written. The remedy is to train on the network's own outputs too: free running throughout, or a
mixture that starts with the truth and moves to the network's own (scheduled sampling). Here an encoder reads 20 steps
of a wave, the sum of two sines, and a decoder writes what follows; training asks for 20 steps, the test for 40. It is
done with clean waves and with noise on all that is read. The error is that of the clean wave, relative to its variance:
a network that always writes the mean has an error of 1. Every network is started three times; the errors are medians,
in the picture with a band from the least to the greatest.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

import loopfold as lf


@dataclass
class Result:
    asked: int  # steps written in training
    free: dict[tuple[float, str], Tensor]  # by noise and training: errors `[starts, τ]`, reading its own outputs
    forced: dict[tuple[float, str], Tensor]  # the same, reading true inputs


def waves(number: int, tau: int, noise: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Waves of two fixed periods, random phases and heights, `[τ, number, 1]`: as they are, and as they are read."""
    phase = 2 * math.pi * torch.rand(number, 2, generator=generator)
    height = 0.5 + torch.rand(number, 2, generator=generator)
    t = torch.arange(tau)[:, None, None]
    clean = (height * torch.sin(2 * math.pi * t / torch.tensor([12.0, 23.3]) + phase)).sum(-1, keepdim=True)
    return clean, clean + noise * torch.randn(clean.shape, generator=generator)


def trained(
    feeding: Callable[[int], lf.Feeding], noise: float, iterations: int, past: int, asked: int, seed: int
) -> lf.EncoderDecoder:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = lf.EncoderDecoder(lf.GRU(1, 32), lf.GRU(32 + 1, 32), outputs=lf.Reals(1))

    def loss(model: lf.EncoderDecoder, clean: Tensor, read: Tensor, feeding: lf.Feeding) -> Tensor:
        x, y = read[:past], read[past:]
        return model.loss(model(x, y, feeding), y) / y.numel()

    batches = ((*waves(64, past + asked, noise, generator), feeding(i)) for i in range(iterations))
    lf.fit(model, batches, iterations, loss=loss, optimiser=torch.optim.Adam(model.parameters(), lr=0.005))
    return model


def experiment(
    noises: Sequence[float] = (0.0, 0.3),
    iterations: int = 300,
    past: int = 20,
    asked: int = 20,
    written: int = 40,
    starts: int = 3,
) -> Result:
    trainings = {  # what is fed back at each iteration
        "teacher forcing": lambda i: lf.TeacherForcing(),
        "scheduled sampling": lf.ScheduledSampling(lf.Ramp(0.0, 1.0, over=3 * iterations // 4)).at,
        "free running": lambda i: lf.FreeRunning(),
    }
    free: dict[tuple[float, str], Tensor] = {}
    forced: dict[tuple[float, str], Tensor] = {}
    for noise in noises:
        clean, read = waves(500, past + written, noise, torch.Generator().manual_seed(99))
        x, y = read[:past], read[past:]
        for name, feeding in trainings.items():
            models = [trained(feeding, noise, iterations, past, asked, seed) for seed in range(starts)]
            with torch.no_grad():
                own = [model(x, feeding=lf.FreeRunning(), steps=written) for model in models]
                true = [model(x, y, lf.TeacherForcing()) for model in models]
            free[noise, name], forced[noise, name] = _errors(own, clean[past:]), _errors(true, clean[past:])
    return Result(asked, free, forced)


def _errors(predictions: list[Tensor], truth: Tensor) -> Tensor:
    """The mean square error of each start at each step, `[starts, τ]`, relative to the variance of the wave."""
    return (torch.stack(predictions) - truth).square().mean((2, 3)) / truth.var()


def table(result: Result) -> str:
    written = next(iter(result.free.values())).shape[1]
    steps = [step for step in (1, 2, 5, 10, 20, 30, 40) if step <= written]
    lines = [f"{'error of step':<42}" + "".join(f"{step:>8}" for step in steps) + f"   step {result.asked}, each start"]
    for (noise, name), errors in result.free.items():
        shown = "".join(f"{errors[:, step - 1].median():>8.3f}" for step in steps)
        low, high = errors[:, result.asked - 1].aminmax()
        lines += [f"noise {noise}, trained by {name:<20}{shown}   {low:.3f} to {high:.3f}"]
        if name == "teacher forcing":
            shown = "".join(f"{result.forced[noise, name][:, step - 1].median():>8.3f}" for step in steps)
            lines += [f"{'           the same, fed true inputs':<42}{shown}"]
    return "\n".join(lines)


def picture(result: Result) -> lf.Drawing:
    colours = {"teacher forcing": "C1", "scheduled sampling": "C3", "free running": "C0"}
    noises = list(dict.fromkeys(noise for noise, _ in result.free))
    with lf.style():
        figure = Figure(figsize=(9.6, 4), layout="constrained")
        panels = figure.subplots(1, len(noises), sharey=True, squeeze=False)[0]
        for axes, noise in zip(panels, noises, strict=True):
            for name, colour in colours.items():
                errors = result.free[noise, name]
                steps = range(1, errors.shape[1] + 1)
                axes.plot(steps, errors.median(0).values, color=colour, label=f"trained by {name}")
                axes.fill_between(steps, *errors.aminmax(dim=0), color=colour, alpha=0.15, linewidth=0)
            forced = result.forced[noise, "teacher forcing"].median(0).values
            axes.plot(steps, forced, ":", color=colours["teacher forcing"], label="by teacher forcing, fed the truth")
            axes.axvline(result.asked, color="0.5", linewidth=1, linestyle=(0, (4, 3)))
            axes.set(yscale="log", xlabel="step written")
            axes.set_title("clean waves" if noise == 0 else f"noise of {noise} on all that is read", fontsize=11)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.spines[["top", "right"]].set_visible(False)
        bottom = panels[0].get_ylim()[0]
        panels[0].text(result.asked + 0.5, bottom, "asked for in training\nup to here", color="0.5", va="bottom")
        panels[0].set_ylabel("error; 1 is that of always writing the mean")
        panels[-1].legend(loc="lower right", frameon=True, edgecolor="none", framealpha=1)
    return lf.Drawing(figure, "The error of each step that is written, by training and by noise on the inputs")


def found(result: Result) -> str:
    step = result.asked
    astray, others, figures, fed = [], [], [], []
    for noise in dict.fromkeys(noise for noise, _ in result.free):
        where = f"with noise of {noise}" if noise else "on clean inputs"
        forced, sampled = (
            float(result.free[noise, training][:, step - 1].median())
            for training in ("teacher forcing", "scheduled sampling")
        )
        (astray if forced >= 3 * sampled else others).append(where)
        figures.append(f"{forced:.3f} and {sampled:.3f} {where}")
        fed.append(f"{result.forced[noise, 'teacher forcing'][:, step - 1].median():.3f} {where}")
    verdict = f"holds {' and '.join(astray)}" + "".join(f", not {where}" for where in others)
    return f"""\
claim     Trained on true inputs alone, a network goes astray on its own
holds if  its error of step {step} is at least three times that of a network trained by scheduled sampling
verdict   {verdict if astray else "does not hold here"}
figures   step {step} by teacher forcing and scheduled sampling: {"; ".join(figures)}

Fed the truth, the network trained on it has an error of {", ".join(fed)}. Training on
its own outputs teaches a network to mend its errors, but only as far as it is asked to write: beyond that it never had
to go on. With noise no input can be trusted, true or not, so that training on the truth teaches some of the same."""


def main() -> None:
    torch.set_num_threads(1)  # the products are small: two threads would wait for each other
    result = experiment()
    print(table(result), found(result), sep="\n\n")
    picture(result).save(Path(__file__).parent / "pictures" / "05_teacher_forcing.svg")


if __name__ == "__main__":
    main()
