"""The section in which the model itself runs: its program and weights, and what the page knows of its units."""

import base64
import zlib
from copy import deepcopy
from dataclasses import replace
from string import Template
from typing import Any

import numpy as np
import torch

from loopfold.errors import OptionError
from loopfold.evaluation import evaluating
from loopfold.exporting.export import module_of
from loopfold.language.base import count_parameters
from loopfold.language.ngram import NGramLM
from loopfold.language.recurrent import RecurrentLM
from loopfold.probing import hidden_states, of_layers
from loopfold.report.markup import asset, escape
from loopfold.report.sections import Section
from loopfold.report.subject import CHEAP, Subject
from loopfold.states import leaves

MEGABYTES = 8.0  # the most that a model adds to the page, unless told otherwise
ROUNDING = 3e-4  # weights have 16 bits where no probability of the passage moves further by it, else 24
ORDER, ENTRIES = 5, 150_000  # of the n-gram in the page: the most tokens it counts together, and n-grams it keeps
GOES_WITH = 0.3  # a unit is named after what it goes with from this correlation on
HEADING = "Try it"
EXPORTS = "globalThis.loopfold = { create, decoded, read, decode, pick, logProbabilities, texts, unknown, graph };\n"


def the_model(subject: Subject, megabytes: float = MEGABYTES) -> Section:
    """The model in the page, or why it is not there."""
    if subject.trouble is not None:
        return _without(subject.trouble)
    model, vocabulary = subject.run.model, subject.run.vocabulary
    size = count_parameters(model) * 2 * 4 / 3 / 1e6  # 16 bits each, in base64; 24 take half as much again
    try:
        half = size > megabytes or not isinstance(model, RecurrentLM) or rounding(subject, model) < ROUNDING
        size *= 1 if half else 1.5
        if size > megabytes:
            needed = f"its weights are {size:,.1f} MB, and {megabytes:g} MB is the most that was allowed"
            return _without(f"{needed}: a report with model_megabytes={np.ceil(size):.0f} takes it along.")
        module = module_of(model, vocabulary, 16 if half else 24)
        assert isinstance(model, RecurrentLM)  # no other can be exported
        data = _data(subject, model)
    except OptionError:  # of the passage, say, which the user can mend
        raise
    except (ValueError, TypeError) as error:
        return _without(str(error))
    unit, grams = escape(subject.unit), data["ngram"]
    rival = f"A {grams['order']}-gram of the training text stands beside it. " if grams else ""
    typed = (
        "Type or paste what you like. "
        if subject.unit != "subword"
        else "This model reads subwords, which only Python can cut from a text, so the text below can be "
        "continued but not typed into. "
    )
    body = Template(asset("live.html")).substitute(
        unit=unit, units=f"{unit}s", rival=rival, typed=typed, readonly="readonly" if subject.unit == "subword" else ""
    )
    return Section("try", HEADING, body, {"live-data": data}, module + EXPORTS)


def _without(reason: str) -> Section:
    return Section("try", HEADING, f'<p class="note">The model does not run in this page: {escape(reason)}</p>')


def rounding(subject: Subject, model: RecurrentLM) -> float:
    """How far a probability of the passage moves where the weights have 16 bits."""
    coarse = deepcopy(model)
    x, _ = subject.x_and_y
    with torch.no_grad(), evaluating(model), evaluating(coarse):
        for p in coarse.parameters():
            p.copy_(p.half())
        one, other = (m.network(x).softmax(-1) for m in (model, coarse))
    apart = (one - other).abs().max()
    return float(apart) if apart.isfinite() else float("inf")


def _data(subject: Subject, model: RecurrentLM) -> dict[str, Any]:
    """What the page knows besides the program."""
    vocabulary = subject.run.vocabulary
    tokens = subject.tokens[1].flatten().tolist()
    if subject.unit == "subword":  # which the page cannot find in a text by itself
        read = vocabulary.stream()
        text: dict[str, Any] = {"tokens": tokens, "pieces": [read(token) for token in tokens]}
    else:
        text = {"text": subject.text, "count": len(tokens)}
    return {
        "unit": subject.unit,
        "start": vocabulary.size,
        **text,
        "hidden": _hidden(model),
        "units": _units(subject, model),
        "ngram": _ngram(subject),
        "where": "held-out" if subject.part else "training",
    }


def _hidden(model: RecurrentLM) -> int:
    """Which leaf of the state is the hidden state of the top layer."""
    layer = model.network.recurrent
    start = layer.initial_state(1)
    top = of_layers(layer, start)[-1]
    return next(i for i, leaf in enumerate(leaves(start)) if leaf is top)


def _units(subject: Subject, model: RecurrentLM) -> list[list[Any]]:
    """Of each unit the mean and the deviation over held-out text, and what it goes with there."""
    held_out = replace(subject, given=None)
    found = hidden_states(model, subject.run.vocabulary, held_out.text)
    values = found.values.double()
    mean, deviation = values.mean(0), values.std(0, correction=0)
    features = [*found.correlations]
    r = torch.stack([*found.correlations.values()]) if features else torch.zeros(1, values.shape[1])
    best = r.abs().argmax(0)
    names = [
        f"{features[k]} {float(r[k, i]):+.2f}".replace("-", "−") if abs(float(r[k, i])) >= GOES_WITH else ""
        for i, k in enumerate(best.tolist())
    ]
    return [[float(f"{m:.5g}"), float(f"{d:.5g}"), name] for m, d, name in zip(mean, deviation, names, strict=True)]


# ------------------------------------------------------------------ the n-gram beside it


def _ngram(subject: Subject) -> dict[str, Any] | None:
    """The n-gram of the training text of the highest order that fits, packed; None where the text is long."""
    run = subject.run
    if run.config["corpus"]["tokens"] > CHEAP or run.vocabulary.size > 65535:
        return None
    rising = NGramLM.rising(run.tokens("train").ids, run.vocabulary.size, run.vocabulary.end)
    model = next(rising)
    while model.order < ORDER and (longer := next(rising)).entries <= ENTRIES:
        model = longer
    return packed(model) if model.order else None


def packed(model: NGramLM) -> dict[str, Any]:
    """An n-gram for the page: for each order how many tokens follow each context, which, and −log2 of their shares.

    The tokens that follow a context stand together, contexts in the order of their ids; a number of 16 bits is 1/2048
    of a bit, and 65535 stands for a share of 0.
    """
    rows: list[Any] = []
    sizes = []
    for order in model._orders:
        contexts = len(order.gamma) - 1
        h, w = np.divmod(order.keys[:-1], model.vocabulary_size)
        rows += [np.bincount(h, minlength=contexts), w, _bits(order.share[:-1]), _bits(order.gamma[:-1])]
        sizes.append([contexts, len(w)])
    numbers = np.concatenate(rows)
    planes = numbers.astype("<u2").view(np.uint8).reshape(-1, 2).T.tobytes()  # low bytes, then high: packs better
    return {
        "order": model.order,
        "sizes": sizes,
        "boundary": model.boundary,
        "numbers": base64.b64encode(zlib.compress(planes, 9)).decode(),
    }


def _bits(share: Any) -> Any:
    with np.errstate(divide="ignore"):
        return np.where(share > 0, np.minimum(np.rint(-np.log2(share) * 2048), 65534), 65535)
