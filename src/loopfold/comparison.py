"""A run beside its baselines, all on the same text, in the same tokens, by the same ledger."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from loopfold.evaluation import Ledger, perplexity
from loopfold.language.base import count_parameters
from loopfold.language.ngram import NGramLM
from loopfold.text.corpus import Corpus
from loopfold.text.vocabulary import Tokens
from loopfold.training.folder import RunError, RunFolder
from loopfold.training.loop import resume, train
from loopfold.training.options import OptionError
from loopfold.training.run import Run
from loopfold.training.watching import Silent, Watcher

BASELINES: dict[str, dict[str, Any]] = {
    "window": {"span": 10, "hidden_size": 128, "dropout": 0.0},
    "convolution": {"span": 16, "hidden_size": 128, "dropout": 0.0},
}
MOST = 20  # the order at which the search for the best n-gram ends


@dataclass(frozen=True)
class Row:
    """One model of the table. `parameters` counts the numbers fitted; of an n-gram, the entries that it keeps."""

    name: str
    parameters: int
    table: int | None  # |V|^n, of which an n-gram keeps the entries that occur
    tokens_per_second: float  # in training
    ledger: Ledger

    def as_json(self) -> dict[str, Any]:
        table = None if self.table is None else str(self.table)  # too long a number for most readers of JSON
        return asdict(self) | {"table": table, "ledger": self.ledger.as_json()}


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
    corpus = first.corpus()
    for run in runs[1:]:
        if run.config["corpus"]["sha256"] != corpus.sha256:
            raise RunError(f"{run.path} was trained on another text than {first.path}: they cannot be compared.")
    part = part or corpus.part
    tokens = held_out(first, corpus, part)
    rows = ngrams(first, corpus, tokens)
    if neural:
        rows += [_row(_baseline(first, kind, watcher(kind)), kind, tokens) for kind in BASELINES]
    for run in runs:
        name = name_of_run(run) + (f" ({run.path.name})" if len(runs) > 1 else "")
        rows.append(_row(run, name, held_out(run, corpus, part)))
    return rows


def name_of_run(run: Run) -> str:
    """What a run is called in a table."""
    options = run.options
    return f"{options.kind} {options.hidden_size}" + (f" × {options.layers}" if options.layers > 1 else "")


def held_out(run: Run, corpus: Corpus, part: str) -> Tokens:
    """The test, valid or training text in the run's tokens."""
    texts = {"test": corpus.test, "valid": corpus.valid, "train": corpus.train}
    if not texts[part]:
        have = " and ".join(name for name, other in texts.items() if other)
        raise OptionError(f"the run has no {part} text, only {have}: choose with --on.")
    return run.vocabulary.encode(texts[part])


def ngrams(run: Run, corpus: Corpus, tokens: Tokens) -> list[Row]:
    """The uniform model and n-grams of rising order, until the next is no better on the valid text."""
    train_ids = run.vocabulary.encode(corpus.train).ids
    valid = run.vocabulary.encode(corpus.valid or corpus.train[-10_000:])
    rows: list[Row] = []
    before = math.inf
    for order in range(MOST + 1):
        begin = time.perf_counter()
        model = NGramLM(train_ids, run.vocabulary.size, order, run.vocabulary.end)
        seconds = time.perf_counter() - begin
        name = {0: "uniform", 1: "unigram"}.get(order, f"{order}-gram")
        ledger = perplexity(model, tokens, streams=1, window=len(tokens))
        rows.append(Row(name, model.entries, model.table_size, len(train_ids) / seconds, ledger))
        now = perplexity(model, valid, streams=1, window=len(valid)).nll
        if now > before:
            break
        before = now
    return rows


def _baseline(run: Run, kind: str, watcher: Watcher) -> Run:
    """A window or a convolution, trained as the run was; found where it was trained before."""
    path = RunFolder(run.path).below("baselines", kind)
    if (path / "checkpoint.json").exists():
        return resume(path, watcher=watcher)
    options = replace(run.options, model=kind, cell="gru", one_hot=False, tied=False, **BASELINES[kind])
    return train(options, path, watcher=watcher)


def _row(run: Run, name: str, tokens: Tokens) -> Row:
    last = run.metrics[-1] if run.metrics else None
    speed = run.config["corpus"]["tokens"] * last["epoch"] / last["seconds"] if last and last["seconds"] else math.nan
    return Row(name, count_parameters(run.model), None, speed, perplexity(run.model, tokens))
