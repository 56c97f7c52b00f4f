"""Mean weights in place of the last ones, and when to begin with them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from loopfold.training.options import Options

PIECE = 1 << 18  # numbers that a CPU adds at a time, so that their float64 copy stays in its cache


class PolyakAverage:
    """The mean of a model's weights over many steps, which is calmer than the last of them (Polyak and Juditsky, 1992).

    Call `add()` after each step of an optimiser. While `applied()` is open, the model has the mean; then its own again.

    Parameters that are trained count, each once, wherever it is used; of one with parametrizations, such as
    `WeightDrop`, the original. The sums are float64: the mean of 100,000 steps would stand still in float32, since
    what one step adds to it is less than the last digit.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> average = PolyakAverage(model)
    >>> for value in (1.0, 2.0, 6.0):
    ...     _ = nn.init.constant_(model.weight, value)
    ...     average.add()
    >>> with average.applied():
    ...     model.weight.item()
    3.0
    >>> model.weight.item()
    6.0
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.count = model, 0
        self.sums: dict[str, Tensor] = {}

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The parameters that are averaged, as the model has them now."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def add(self) -> None:
        """Count the weights as they are now."""
        for name, p in self.weights.items():
            if not self.count:
                self.sums[name] = p.to(_wide(p), copy=True, memory_format=torch.contiguous_format)
                continue
            size = PIECE if p.device.type == "cpu" else max(1, p.numel())
            for total, part in zip(self.sums[name].view(-1).split(size), p.reshape(-1).split(size), strict=True):
                total += part
        self.count += 1

    def clear(self) -> None:
        """Forget all."""
        self.count, self.sums = 0, {}

    def load(self, count: int, sums: Mapping[str, Tensor]) -> None:
        """Go on with sums over so many steps."""
        self.count, self.sums = count, {name: sums[name].to(p.device, _wide(p)) for name, p in self.weights.items()}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While open, the model has the mean, if there is one."""
        if not self.count:
            yield
            return
        own = {name: p.detach().clone() for name, p in self.weights.items()}
        try:
            with torch.no_grad():  # in place: what an engine has compiled reads the parameters where they are
                for name, p in self.weights.items():
                    p.copy_(self.sums[name] / self.count)
            yield
        finally:
            with torch.no_grad():
                for name, p in self.weights.items():
                    p.copy_(own[name])


def _wide(p: Tensor) -> torch.dtype:
    return torch.promote_types(p.dtype, torch.float64)


def tail_from(options: Options, step: int, steps: int, begun: int | None) -> int | None:
    """The step after which `average="tail"` has begun to count, `begun` before now; None where it has not yet.

    A run that goes on for longer than it was to may be before its tail again.
    """
    first = steps - max(1, round(options.average_share * steps))
    return None if step < first else step if begun is None else begun


def is_triggered(valid: Sequence[float], after: int) -> bool:
    """Whether the last loss on the valid text is above the best of those more than `after` evaluations ago.

    The trigger of NT-ASGD (Merity, Keskar and Socher, Regularizing and Optimizing LSTM Language Models, 2018).

    >>> is_triggered([5, 4, 3, 3.2, 3.1], after=2), is_triggered([5, 4, 3, 3.2, 3.1, 3.3], after=2)
    (False, True)
    """
    known = [loss if math.isfinite(loss) else math.inf for loss in valid]
    earlier = known[: max(0, len(known) - 1 - after)]
    return bool(earlier) and known[-1] > min(earlier)
