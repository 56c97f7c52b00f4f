"""What teacher forcing gains an output recurrence: all steps at once against the same model step by step.

    python benchmarks/output_recurrence.py

Forward and backward, τ = 1000, n = 128, two CPU threads. Both ways are first shown to give the same loss and
gradients; then they take turns, so that whatever else the machine does falls on both, and medians are compared.
At batch 1 the loop pays for τ small calls; at batch 16 the products themselves weigh more, the more so the more
inputs and classes there are, and no order of computing them makes them cheaper.
"""

import itertools
import platform
import statistics
import time

import torch
from torch import Tensor

import loopfold as lf
from loopfold.feeding import Feeding

STEPS, HIDDEN, THREADS = 1000, 128, 2
SIZES = (32, 64, 128)  # of inputs, and of classes
TARGETS = {1: 30, 16: 5}  # batch: how many times faster "at once" must be
ROUNDS = 15
IN_TURN = lf.GeneralisedTeacherForcing(1.0)  # the truth, as under teacher forcing, but one step at a time


def forward_backward(model: lf.OutputRecurrence, x: Tensor, y: Tensor, feeding: Feeding) -> Tensor:
    model.zero_grad()
    loss = model.loss(model(x, y, feeding), y)
    loss.backward()
    return loss.detach()


def seconds(model: lf.OutputRecurrence, x: Tensor, y: Tensor, feeding: Feeding) -> float:
    start = time.perf_counter()
    forward_backward(model, x, y, feeding)
    return time.perf_counter() - start


def check_same(model: lf.OutputRecurrence, x: Tensor, y: Tensor) -> None:
    """Both ways give the same loss and gradients, so that their times may be compared. Warms both up, too."""
    loss = forward_backward(model, x, y, lf.TeacherForcing())
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(forward_backward(model, x, y, IN_TURN), loss, rtol=1e-4, atol=1e-4)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-3, atol=1e-3 * float(gradient.abs().max()))


def main() -> None:
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    print(f"OutputRecurrence, τ = {STEPS}, n = {HIDDEN}, float32, forward + backward; medians of {ROUNDS} rounds")
    print(f"torch {torch.__version__}, {THREADS} threads, {platform.machine()}\n")
    print("batch   inputs = classes   step by step      at once   ratio   target")
    for (batch, target), size in itertools.product(TARGETS.items(), SIZES):
        model = lf.OutputRecurrence(size, HIDDEN, outputs=size, engine=lf.Sequential())
        x, y = torch.randn(STEPS, batch, size), torch.randint(size, (STEPS, batch))
        check_same(model, x, y)
        rounds = [(seconds(model, x, y, IN_TURN), seconds(model, x, y, lf.TeacherForcing())) for _ in range(ROUNDS)]
        slow, fast = (1e3 * statistics.median(column) for column in zip(*rounds, strict=True))
        met = "met" if slow / fast >= target else "NOT met"
        print(
            f"{batch:>5}   {size:>16}   {slow:>9.1f} ms   {fast:>7.2f} ms   {slow / fast:>4.1f}×   ≥ {target}×: {met}"
        )


if __name__ == "__main__":
    main()
