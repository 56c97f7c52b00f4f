"""A run opened: its model at its best, the text that it was trained on, read again, and passages of it."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from loopfold.drawing.charts import learning_curves
from loopfold.drawing.figure import Drawing
from loopfold.errors import Argument, OptionError, choose
from loopfold.language.base import LanguageModel
from loopfold.text.corpus import PYTHON_DOCS, Corpus, is_there_once, read_corpus
from loopfold.text.long import Read
from loopfold.text.vocabulary import Tokens, Vocabulary
from loopfold.training import trust as trusted
from loopfold.training.checkpoint import model_with
from loopfold.training.contents import METRICS
from loopfold.training.options import Options
from loopfold.training.packed import find_run
from loopfold.training.stored import RunError, Standing, StoredRun, steadily
from loopfold.training.table import Comparison, baselines

LOG_EVERY = 50  # steps
PARTS = ("test", "valid", "train")
PASSAGES = 8  # read side by side


@dataclass(frozen=True)
class Run:
    """A run as it stands: its model with the weights that did best on the valid text, and what belongs to it."""

    stored: StoredRun = field(repr=False)  # where it is kept
    options: Options
    vocabulary: Vocabulary = field(repr=False)
    model: LanguageModel = field(repr=False)
    config: dict[str, Any] = field(repr=False)
    standing: Standing
    moved: tuple[str, ...] = ()  # the new places of its text
    _metrics: list[dict[str, Any]] | RunError = field(default_factory=list, repr=False)

    @property
    def path(self) -> Path:
        """The folder or the file that it is in."""
        return self.stored.path

    @property
    def name(self) -> str:
        """What it is called in a table."""
        return self.options.name

    # ---------------------------------------------------------------- how training went

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The learning curve. What is wrong with it is said only here: a model can write without it."""
        if isinstance(self._metrics, RunError):
            raise self._metrics
        return self._metrics

    @property
    def seconds(self) -> float:
        """How long it has trained."""
        return self.metrics[-1]["seconds"] if self.metrics else 0.0

    @property
    def tokens_per_second(self) -> float:
        """The speed of training; NaN before the first entry of the learning curve."""
        if not self.seconds:
            return math.nan
        return self.config["corpus"]["tokens"] * self.metrics[-1]["epoch"] / self.seconds

    @property
    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Points (step, nats per token) in training and on the valid text, where they are finite numbers."""
        points = {
            part: [(entry["step"], entry[part]) for entry in self.metrics if math.isfinite(entry.get(part, math.nan))]
            for part in ("train", "valid")
        }
        return {part: found for part, found in points.items() if found}

    def learning_curve(self) -> Drawing:
        """Nats per token in training and on the valid text; across, what `loopfold compare` found, if it ran."""
        if not self.curves:
            raise RunError(f"{self.path} has no learning curve yet: its first entry comes after {LOG_EVERY} steps.")
        name = f"{self.config['corpus']['name']}, {self.options.kind}"
        found = Comparison.read(self.stored)
        if found is None:
            return learning_curves(self.curves, title=name)
        return learning_curves(self.curves, baselines(found.rows), f"{name}; across, the {found.on} text")

    # ---------------------------------------------------------------- its text, and passages of it

    def corpus(self) -> Corpus:
        """The text that it was trained on, read again; it must not have changed."""
        return self._corpus

    @cached_property
    def _corpus(self) -> Corpus:
        return read_again(self.options, self.stored, self.moved)

    def text(self, part: str | None = None) -> Read:
        """The test, valid or train text; by default test, or valid where there is no test text."""
        corpus = self.corpus()
        part = choose("part", part or corpus.part, PARTS)
        texts = {name: getattr(corpus, name) for name in PARTS}
        if not texts[part]:
            have = " and ".join(name for name, text in texts.items() if text)
            raise OptionError(f"the run has no {part} text, only {have}: choose with ", Argument("part"), ".")
        return texts[part]

    def tokens(self, part: str | None = None) -> Tokens:
        """The same in the tokens of the run."""
        return self.vocabulary.encode(self.text(part))

    def passages(self, steps: int, part: str | None = None) -> tuple[Tensor, Tensor]:
        """Passages from all over a text, x and y `[τ, passages]`: y(t) is the token after x(t). τ is at most `steps`.

        The eleven tokens a…k, in passages of three steps. Time goes down:

            x   a  d  h      y   b  e  i
                b  e  i          c  f  j
                c  f  j          d  g  k
        """
        ids = self.tokens(part).ids
        if len(ids) < 2:
            raise OptionError(f"the text has {len(ids)} token, needs 2: choose another with ", Argument("part"), ".")
        steps = min(steps, len(ids) - 1)
        count = min(PASSAGES, (len(ids) - 1) // steps)
        starts = torch.arange(count) * (len(ids) - 1 - steps) // max(count - 1, 1)
        place = starts + torch.arange(steps)[:, None]
        return ids[place].long(), ids[place + 1].long()

    def opening(self, text: str, steps: int) -> tuple[Tensor, Tensor]:
        """The beginning of any text as such a passage, x and y `[τ, 1]`: x(1) is |V|, the start of a text."""
        y = self.vocabulary.beginning(text)[:steps, None]
        return torch.cat([torch.full_like(y[:1], self.vocabulary.size), y[:-1]]), y


def open_run(path: str | Path, device: str | None = "cpu", *, trust: bool = False, text: Sequence[str] = ()) -> Run:
    """The run in a folder or a packed file, ready to be evaluated and to generate. It may be training at the same time.

    Only what it needs for that is read and checked: options, vocabulary and weights. So nothing else must be there.

    `device`  where its model is to be; None: a GPU if it was trained for one and one is there, otherwise the CPU
    `trust`   run the code of its `cell.py`, where it has one; needed once for each that you have not trained with
    `text`    the new place of its text, where that has moved; one for each source, in the old order, or a folder
    """
    device = None if device is None else check_device(device)
    stored = find_run(Path(path))
    found = steadily(stored, lambda: _read(stored))
    check_trust(stored, trust)
    model = model_with(found.options, found.vocabulary.size, found.weights, stored.path / found.best)
    device = device or check_device("cpu" if found.options.device == "cpu" else "auto")
    return Run(
        stored,
        found.options,
        found.vocabulary,
        model.to(device).eval(),
        found.config,
        found.standing,
        (text,) if isinstance(text, str) else tuple(text),
        found.metrics,
    )


class _Found(NamedTuple):
    """What belongs to one checkpoint of a run."""

    options: Options
    config: dict[str, Any]
    vocabulary: Vocabulary
    best: str  # the name of the weights
    weights: dict[str, Tensor]
    standing: Standing
    metrics: list[dict[str, Any]] | RunError


def _read(stored: StoredRun) -> _Found:
    options, step, best = stored.options, stored.checkpoint["step"], stored.checkpoint["best"]
    stored.check("config.json", "vocabulary.json", *(["cell.py"] if ":" in options.cell else []), best)
    config, vocabulary, weights, standing = stored.config, stored.vocabulary, stored.tensors(best), stored.standing
    metrics: list[dict[str, Any]] | RunError
    try:
        stored.check(METRICS)
        metrics = stored.metrics
    except RunError as error:
        if stored.step() != step:
            raise
        metrics = error
    return _Found(options, config, vocabulary, best, weights, standing, metrics)


def check_trust(stored: StoredRun, trust: bool) -> None:
    """Refuse to run a stranger's code, unless the user says to."""
    digest = stored.cell_digest()
    if digest is None:
        return
    if trust:
        trusted.remember(digest)
    elif not trusted.is_trusted(digest):
        raise RunError(
            f"{stored.path} has a cell of its own, and opening it would run the code in {stored.shown('cell.py')}. "
            f"Read it; if you trust it, add ",
            Argument("trust", True),
            ".",
        )


def check_device(device: str) -> str:
    """The device, if it can be used; "auto" is CUDA where a GPU is there and works, otherwise the CPU."""
    if device == "auto":
        try:
            return check_device("cuda")
        except OptionError:
            return "cpu"
    try:
        torch.zeros(1, device=device).tolist()  # a tensor on `meta` holds nothing
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without CUDA
        reason = str(error).partition("\n")[0].rstrip(".!")
        if reason.startswith("Expected one of"):  # a list of twenty, most of which we could not use
            reason = "there is no such device"
        if reason.startswith("Could not run"):  # and which of torch's operations
            reason = "this PyTorch was built without it"
        raise OptionError(
            f"device {device!r} cannot be used: {reason}. Use ", Argument("device", "cpu"), "."
        ) from error
    return device


# ------------------------------------------------------------------ the text


def read_again(options: Options, folder: StoredRun, moved: Sequence[str] = ()) -> Corpus:
    """The text of a run; `moved` names its new places, as in `moved_to`. It must be the one that the run began with."""
    old, options = options.texts, moved_to(options, moved)
    named = all(map(os.path.lexists, moved))  # else reading what was named says what is wrong
    for source in options.texts:
        if named and source not in ("-", PYTHON_DOCS) and not os.path.lexists(source):
            raise _gone(source, old, folder, moved)
        if is_there_once(source):
            raise RunError(f"the text of {folder.path} is {source}, which is not a file and cannot be read again.")
    corpus = read_corpus(options.sources, options.split, options.valid, options.test)
    check_same_text(corpus, folder)
    return corpus


def _gone(source: str, old: Sequence[str], folder: StoredRun, moved: Sequence[str]) -> RunError:
    """That a text is not there; with new places, all that were tried for it."""
    if not moved:
        gone = f"the text of {folder.path} was {source}, which is not there. Name the place where it is with "
        return RunError(gone, Argument("text"), "; a packed run holds none." if folder.path.is_file() else ".")
    name, names = Path(source).name, [Path(text).name for text in old]
    tried = dict.fromkeys([*(str(Path(place) / name) for place in moved if Path(place).is_dir()), source])
    return RunError(
        f"{name}, which {folder.path} was trained with, is not there; tried {' and '.join(tried)}. With ",
        Argument("text"),
        f", name a folder that holds {' and '.join(names)}, or one place for each, in this order.",
    )


def moved_to(options: Options, places: Sequence[str]) -> Options:
    """The options of a run whose text has moved, with whole paths: to places in the old order, or to one folder."""
    if not places:
        return options
    if "-" in places:
        raise OptionError("a text that moved is a file or a folder, which can be read again; got standard input.")
    old, new = options.texts, [*places]
    inside = [str(Path(places[0]) / Path(source).name) for source in old]
    if len(places) == 1 and all(map(os.path.lexists, inside)):  # a folder that holds them all under their old names
        new = inside
    elif len(places) == len(options.sources):
        new += old[len(places) :]
    if len(new) != len(old):
        names = ", ".join(Path(source).name for source in old)
        raise OptionError(
            f"the run has {len(old)} texts ({names}), and {len(places)} new places were named: name one for each, in "
            "this order, or a folder that holds them all."
        )
    others = iter(new[len(options.sources) :])
    valid, test = (None if source is None else next(others) for source in (options.valid, options.test))
    return replace(options, sources=tuple(new[: len(options.sources)]), valid=valid, test=test).from_anywhere()


def check_same_text(corpus: Corpus, folder: StoredRun) -> None:
    if corpus.sha256 != folder.config["corpus"]["sha256"]:
        raise RunError(
            f"the text of {corpus.name} has changed since the run began, or is another: {folder.path} needs the "
            "old one."
        )
