"""A small network learns to remember, while you watch: `python -m loopfold.demo`.

A source emits one of four symbols a step, and mostly repeats itself. The task is to name the symbol of six steps ago:

    t      1  2  3  4  5  6  7  8  9 10
    x(t)   b  b  b  d  d  a  a  a  a  c
    y(t)   .  .  .  .  .  .  b  b  b  d      no target where nothing was seen six steps ago

Since symbols repeat, x(t) is itself a fair guess at y(t). That guess is the best that a model without memory can do,
and the score to beat.
"""

import math
import textwrap
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import loopfold as lf


@dataclass(frozen=True)
class Recall:
    """Name the symbol of `delay` steps ago, of a source that repeats its last symbol with probability `repeat`."""

    delay: int = 6
    symbols: int = 4
    repeat: float = 0.85

    def draw(self, steps: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """x `[steps, batch, symbols]`, one-hot, and y `[steps, batch]`; the first `delay` of y cannot be known."""
        total = self.delay + steps
        s = torch.randint(self.symbols, (total, batch), generator=generator)
        repeats = torch.rand(total, batch, generator=generator) < self._copy
        for t in range(1, total):
            s[t] = torch.where(repeats[t], s[t - 1], s[t])
        return F.one_hot(s[self.delay :], self.symbols).float(), s[:steps]

    @property
    def _copy(self) -> float:
        """How often to copy; a fresh draw is the old symbol too, once in `symbols` times."""
        return (self.repeat - self.chance) / (1 - self.chance)

    @property
    def chance(self) -> float:
        """The accuracy of a blind guess."""
        return 1 / self.symbols

    @property
    def memoryless_accuracy(self) -> float:
        """P(y(t) = x(t)): the accuracy of the best model that sees x(t) alone."""
        return self.chance + (1 - self.chance) * self._copy**self.delay

    @property
    def memoryless_loss(self) -> float:
        """H(y(t) | x(t)): the mean loss of that model, in nats."""
        same, other = self.memoryless_accuracy, (1 - self.memoryless_accuracy) / (self.symbols - 1)
        return -same * math.log(same) - (self.symbols - 1) * other * math.log(other)

    def score(self, model: lf.SequenceToSequence, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
        """Mean loss and accuracy over the steps whose target can be known."""
        o, y = model(x)[self.delay :], y[self.delay :]
        return model.loss(o, y) / y.numel(), float((o.argmax(-1) == y).float().mean())


def train(task: Recall, model: lf.SequenceToSequence, steps: int, iterations: int, generator: torch.Generator) -> None:
    """Gradient descent on fresh sequences. None is seen twice, so every score shown is one on unseen data."""
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    print(f"{'iteration':>9}  {'loss':>6}  {'accuracy':>8}")
    for i in range(iterations + 1):
        loss, accuracy = task.score(model, *task.draw(steps, 32, generator))
        if i % max(iterations // 10, 1) == 0:
            print(f"{i:>9}  {loss.item():>6.3f}  {accuracy:>8.1%}  {'#' * round(30 * accuracy)}")
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimiser.step()


def main(iterations: int = 1000, seed: int = 0) -> float:
    """Train, test on other lengths, look at the gradient. Returns the accuracy on the longest sequences."""
    task, steps = Recall(), 30
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = lf.SequenceToSequence(lf.Elman(task.symbols, 32), outputs=task.symbols)

    print(f"Task: name the symbol of {task.delay} steps ago, one of {task.symbols}. Sequences of {steps} steps.")
    print(f"Blind guess:             loss {math.log(task.symbols):.3f}, accuracy {task.chance:.1%}")
    print(f"Best without a memory:   loss {task.memoryless_loss:.3f}, accuracy {task.memoryless_accuracy:.1%}")
    parameters = sum(p.numel() for p in model.parameters())
    print(f"Model: SequenceToSequence(Elman), 32 hidden units, {parameters:,} parameters.\n")

    sequences = task.draw(60, 8, generator)
    before = lf.gradient_flow(model, model.loss, *sequences)
    train(task, model, steps, iterations, generator)
    after = lf.gradient_flow(model, model.loss, *sequences)

    print("\nThe same parameters on lengths never seen in training:")
    print(f"{'steps':>9}  {'loss':>6}  {'accuracy':>8}")
    accuracy = 0.0
    for length in (10, 100, 1000):
        with torch.no_grad():
            loss, accuracy = task.score(model, *task.draw(length, 64, generator))
        print(f"{length:>9}  {loss.item():>6.3f}  {accuracy:>8.1%}")

    print(f"\nHow far the gradient reaches; the task needs {task.delay} steps.")
    for when, flow in (("Before training", before), ("After training", after)):
        print(textwrap.fill(f"{when}: {flow.verdict}", width=100, subsequent_indent="    "))
    return accuracy


if __name__ == "__main__":
    main()
