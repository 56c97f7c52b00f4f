"""A run beside its baselines, all on the same text, in the same tokens, by the same ledger."""

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from loopfold.errors import Argument, OptionError
from loopfold.evaluation import perplexity
from loopfold.language.base import count_parameters
from loopfold.language.ngram import NGramLM
from loopfold.text.vocabulary import Tokens
from loopfold.training.folder import RunFolder
from loopfold.training.job import anew
from loopfold.training.loop import resume, train
from loopfold.training.options import CHANGEABLE, Options
from loopfold.training.run import Run, moved_to, open_run
from loopfold.training.stored import RunError
from loopfold.training.table import Comparison, Row
from loopfold.training.watching import Silent, Watcher

BASELINES: dict[str, dict[str, Any]] = {
    "window": {"span": 10, "hidden_size": 128, "dropout": 0.0},
    "convolution": {"span": 16, "hidden_size": 128, "dropout": 0.0},
}
AT_A_TIME = 1 << 22  # tokens that an n-gram scores
MOST = 20  # the order at which the search for the best n-gram ends


def compare(
    runs: Sequence[Run],
    part: str | None = None,
    *,
    neural: bool = True,
    watcher: Callable[[str], Watcher] = lambda name: Silent(),
) -> list[Row]:
    """Rows for the uniform model, n-grams up to the best order, a window, a convolution, and the runs themselves.

    The baselines are those of the first run's text and vocabulary; every other run must be of the same text. The window
    and the convolution are trained as long as the first run was, in folders under its own, where a second comparison
    finds them. `part` is "test" or "valid"; by default test, or valid where there is no test text.
    """
    if isinstance(runs, Run) or not runs:
        raise TypeError("compare needs a list of runs: compare([run]); lf.open_run(folder) opens one.")
    first = runs[0]
    if not any(map(first.options.holds_out, ("test", "valid"))):
        without = (
            f"{first.path} was trained on all of its text, and models are compared on text that is held out: train "
        )
        raise OptionError(without, "one that has some, with ", Argument("split"), " or ", Argument("test"), ".")
    for run in runs[1:]:
        if run.config["corpus"]["sha256"] != first.config["corpus"]["sha256"]:
            raise RunError(f"{_otherwise(first, run)}: they cannot be compared.")
    text = first.text(part)
    tokens = first.vocabulary.encode(text)
    rows = ngrams(first, tokens)
    if neural:
        rows += [_baseline(first, kind, part or first.corpus().part, tokens, watcher) for kind in BASELINES]
    for run in runs:
        name = run.name + (f" ({run.path.name})" if len(runs) > 1 else "")
        rows.append(row_of(run, name, run.vocabulary.encode(text)))
    return rows


def _otherwise(first: Run, run: Run) -> str:
    """What is not the same in the texts of two runs."""
    a, b = (r.options.from_anywhere() for r in (first, run))
    for part in ("test", "valid"):
        without = [r.path for r in (first, run) if not r.options.holds_out(part)]
        if a.sources == b.sources and len(without) == 1:
            other = first.path if without[0] == run.path else run.path
            return f"{without[0]} has no {part} text, and {other} has one"
    if a.sources == b.sources and a.split != b.split:
        return f"{run.path} was trained on another part of the same text than {first.path}"
    return f"{run.path} was trained on another text than {first.path}"


def ngrams(run: Run, tokens: Tokens) -> list[Row]:
    """The uniform model and n-grams of rising order, until the next is no better on the valid text."""
    train_ids = run.tokens("train").ids
    valid = run.tokens("valid") if run.corpus().valid else run.vocabulary.encode(run.text("train")[-10_000:])
    rows: list[Row] = []
    before, seconds = math.inf, 0.0
    models = NGramLM.rising(train_ids, run.vocabulary.size, run.vocabulary.end)
    for order in range(MOST + 1):
        begin = time.perf_counter()
        model = next(models)
        seconds += time.perf_counter() - begin  # each goes on from the one before it
        name = {0: "uniform", 1: "unigram"}.get(order, f"{order}-gram")
        ledger = perplexity(model, tokens, streams=1, window=min(len(tokens), AT_A_TIME))
        rows.append(Row(name, model.entries, model.table_size, len(train_ids) / seconds, ledger))
        now = perplexity(model, valid, streams=1, window=min(len(valid), AT_A_TIME)).nll
        if now > before:
            break
        before = now
    return rows


def _baseline(run: Run, kind: str, part: str, tokens: Tokens, watcher: Callable[[str], Watcher]) -> Row:
    """A window or a convolution, trained as the run was; found where it was trained before.

    Nothing is written into a packed run or a folder that may not be written. What was found of the run as it is now,
    before it was packed, is taken as it is; what is trained now is gone afterwards.
    """
    device = next(run.model.parameters()).device.type
    plain = replace(anew(run.options), cell="gru", recurrent_init=None, forget_bias=None, one_hot=False, tied=False)
    options = moved_to(replace(plain, model=kind, device=device, **BASELINES[kind]), run.moved)
    if isinstance(run.stored, RunFolder):
        path = run.stored.below("baselines", kind)
        if (path / "checkpoint.json").exists():
            return row_of(_resumed(path, options, watcher(kind)), kind, tokens)
        if os.access(run.path, os.W_OK):
            return row_of(train(options, path, vocabulary=run.vocabulary, watcher=watcher(kind)), kind, tokens)
    kept = Comparison.read(run.stored)
    if kept is not None and kept.on == part:
        same = kept.own(run.name, run.path, perplexity(run.model, tokens)) is not None
        for row in kept.rows if same else []:
            if row.name == kind and (row.ledger.tokens, row.ledger.unit) == (len(tokens), tokens.unit):
                return row
    with TemporaryDirectory() as folder:
        return row_of(
            train(options, Path(folder) / kind, vocabulary=run.vocabulary, watcher=watcher(kind)), kind, tokens
        )


def _resumed(path: Path, options: Options, watcher: Watcher) -> Run:
    """A baseline that has begun; what has changed of the run since then changes for it too."""
    found = RunFolder.find(path)
    own, wanted = found.options, options.from_anywhere()
    changes = {name: getattr(options, name) for name in CHANGEABLE if getattr(own, name) != getattr(options, name)}
    if own.epochs > options.epochs:
        del changes["epochs"]
    if found.standing.finished and not {*changes} - {"device"}:
        return open_run(path, options.device)
    return resume(path, text=[] if own.texts == wanted.texts else wanted.texts, watcher=watcher, **changes)


def row_of(run: Run, name: str, tokens: Tokens) -> Row:
    """A run as a row of the table."""
    return Row(name, count_parameters(run.model), None, run.tokens_per_second, perplexity(run.model, tokens))
