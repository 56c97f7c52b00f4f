"""The learning rate of each step: a warm-up, then one of several ways down."""

import math

from loopfold.training.options import Options

WARMUP = 50  # steps


def warmup_of(options: Options, steps: int) -> int:
    """In how many steps the learning rate rises."""
    return min(WARMUP, steps // 10) if options.warmup is None else options.warmup


def rate_of(options: Options, step: int, steps: int, steps_per_epoch: int, decays: int) -> float:
    """The learning rate of step number `step`, from 0, of `steps`; `decays`: how often an evaluation made it fall.

    constant   it stays
    linear     it falls to zero in a straight line
    cosine     the same along half a cosine
    step       it stays for `decay_after` epochs, and is then multiplied by `decay` for each (Zaremba et al., 2014)
    plateau    it is multiplied by `decay` whenever an evaluation is not the best so far

    >>> options = Options(learning_rate=20, schedule="step", decay=0.5, decay_after=2, warmup=0)
    >>> [rate_of(options, step, 8, steps_per_epoch=2, decays=0) for step in range(8)]
    [20.0, 20.0, 20.0, 20.0, 10.0, 10.0, 5.0, 5.0]
    """
    rise = min(1.0, (step + 1) / (warmup_of(options, steps) + 1))
    done, epoch = step / steps, step // steps_per_epoch
    fall = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "step": options.decay ** max(0, epoch + 1 - options.decay_after),
        "plateau": options.decay**decays,
    }
    return options.learning_rate * rise * fall[options.schedule]
