"""The ways in which `evaluate` can score a text: their flags, and their settings, tuned on the run's valid text."""

import os
import re
import sys
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loopfold.cli.base import echo, flag
from loopfold.errors import OptionError

if TYPE_CHECKING:
    from torch import Tensor

    from loopfold.evaluation import Way
    from loopfold.text.long import Read
    from loopfold.text.vocabulary import Tokens
    from loopfold.training.run import Run

SCALED_BY = 100_000  # tokens of the training text, by whose gradients those of dynamic evaluation are scaled
FOLLOWED = 10_000  # tokens of the valid text that all is tuned on where weights follow it, which takes long
PANEL = "Ways to score"

DynamicOption = Annotated[
    bool, typer.Option("--dynamic", help="Let the weights follow the text they score.", rich_help_panel=PANEL)
]
RateOption = Annotated[
    float | None, typer.Option(min=0.0, help="How far they follow; tuned by default.", rich_help_panel=PANEL)
]
DecayOption = Annotated[
    float | None,
    typer.Option(
        min=0.0, max=1.0, help="How fast they return to the trained ones; tuned by default.", rich_help_panel=PANEL
    ),
]
StepOption = Annotated[
    int | None, typer.Option(min=1, help="Tokens between two changes; 20 by default.", rich_help_panel=PANEL)
]
CacheOption = Annotated[
    bool,
    typer.Option("--cache", help="Mix in what followed like hidden states in this text.", rich_help_panel=PANEL),
]
SizeOption = Annotated[
    int | None, typer.Option(min=1, help="Tokens that the cache holds; 2000 by default.", rich_help_panel=PANEL)
]
WeightOption = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="The share of the cache; tuned by default.", rich_help_panel=PANEL),
]
SharpnessOption = Annotated[
    float | None,
    typer.Option(
        min=0.0, max=1e6, help="How much likeness counts in the cache; tuned by default.", rich_help_panel=PANEL
    ),
]
MixOption = Annotated[
    bool, typer.Option("--mix-ngram", help="Mix in an n-gram of the training text.", rich_help_panel=PANEL)
]
OrderOption = Annotated[
    int | None, typer.Option(min=0, max=100, help="n of the n-gram; 5 by default.", rich_help_panel=PANEL)
]
ShareOption = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="The share of the n-gram; tuned by default.", rich_help_panel=PANEL),
]


# Of each way, the settings that are tuned where they are not given, and the other, with its default.
SETTINGS: dict[str, tuple[tuple[str, ...], str, int]] = {
    "dynamic": (("dynamic_rate", "dynamic_decay"), "dynamic_window", 20),
    "cache": (("cache_weight", "cache_sharpness"), "cache_size", 2000),
    "mix_ngram": (("ngram_weight",), "ngram_order", 5),
}


def settings_to_tune(typed: dict[str, Any], cold: bool) -> list[str]:
    """Those that were not given. Every setting that was needs its way, and every way the whole text."""
    missing = list[str]()
    for way, (tunable, other, _) in SETTINGS.items():
        if typed[way] and cold:
            raise OptionError(f"{flag(way)} follows the text from its beginning, and --cold begins anew: choose one.")
        for name in (*tunable, other):
            if not typed[way] and typed[name] is not None:
                raise OptionError(f"{flag(name)} has no effect without {flag(way)}: add that, or leave it out.")
        missing += [name for name in tunable if typed[way] and typed[name] is None]
    return missing


def check_values(typed: dict[str, Any], texts: Sequence[str]) -> None:
    """That no number was typed after a way: `--cache 0.1` would be read as a text of that name."""
    for word in texts:
        meant = [f"{flag(way)} {flag(tunable[0], word)}" for way, (tunable, _, _) in SETTINGS.items() if typed[way]]
        if meant and re.fullmatch(r"[\d.]+(e-?\d+)?", word) and not os.path.lexists(word):
            raise OptionError(f"there is no text {word}, and a way to score takes no value: type {' '.join(meant)}.")


def origin(tuned_on: str | None) -> str:
    """Where settings came from, in words."""
    if tuned_on is None:
        return "as given"
    return "tuned on the valid text" if tuned_on == "valid" else f"tuned on {tuned_on}, so the figures flatter it"


def choose_way(
    run: "Run", text: "Read", tokens: "Tokens", typed: dict[str, Any], missing: list[str]
) -> "tuple[Way, str | None]":
    """The ways that were typed, one around the other, and what their missing settings were tuned on.

    That is the run's valid text: "valid"; or, where that is the `text` to be scored or part of it, words that say so.
    """
    import torch

    from loopfold.evaluation import Plain
    from loopfold.language.ngram import NGramLM
    from loopfold.ways import DynamicEvaluation, Mixture, NeuralCache, gradient_rms

    @cache
    def ids(part: str) -> "Tensor":
        return run.tokens(part).ids

    given = typed | {other: size for _, other, size in SETTINGS.values() if typed[other] is None}
    tuned_on, model, followed = None, run.model, slice(FOLLOWED if given["dynamic"] else None)
    if missing:
        if not run.corpus().valid:
            flags = " and ".join(flag(name) for name in missing)
            raise OptionError(f"the run has no valid text to tune settings on: give {flags}.")
        if torch.equal(ids("valid"), tokens.ids):
            tuned_on = "this text"
        else:
            tuned_on = "text that is in this one" if _overlap(run.text("valid"), text) else "valid"
        if sys.stderr.isatty():
            echo(f"loopfold: tuning on {len(ids('valid')[followed]):,} tokens of the valid text ...", err=True)
    way: Way = Plain()
    if given["dynamic"]:
        rate, decay, window = (given[name] for name in ("dynamic_rate", "dynamic_decay", "dynamic_window"))
        rms = gradient_rms(model, ids("train")[:SCALED_BY], window=window)
        if rate is None or decay is None:
            way = DynamicEvaluation.tuned(model, ids("valid")[followed], rate=rate, decay=decay, window=window, rms=rms)
        else:
            way = DynamicEvaluation(rate, decay, window, rms)
    if given["cache"]:
        size, weight, sharpness = (given[name] for name in ("cache_size", "cache_weight", "cache_sharpness"))
        if weight is None or sharpness is None:
            settings = {"size": size, "weight": weight, "sharpness": sharpness}
            way = NeuralCache.tuned(model, ids("valid")[followed], **settings, over=way)
        else:
            way = NeuralCache(size, weight, sharpness, way)
    if given["mix_ngram"]:
        share = given["ngram_weight"]
        ngram = NGramLM(ids("train"), run.vocabulary.size, given["ngram_order"], run.vocabulary.end)
        if share is None:
            way = Mixture.tuned(model, ids("valid")[followed], [ngram], over=way)
        else:
            way = Mixture((1 - share, share), (ngram,), way)
    return way, tuned_on


def _overlap(a: "Read", b: "Read") -> bool:
    """Whether much of one text is in the other; of a text that has no block of its own to look for, all of it."""
    from loopfold.text.overlap import share_in
    from loopfold.training.job import REPEATED

    if isinstance(a, str) and isinstance(b, str) and (a in b or b in a):
        return True
    return max(share_in(a, b), share_in(b, a)) >= REPEATED
