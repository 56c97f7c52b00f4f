"""A run that is there: opened, with its model as it was best, and the text that it was trained on read again."""

import math
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from loopfold.drawing.charts import learning_curves
from loopfold.drawing.figure import Drawing
from loopfold.language.base import LanguageModel
from loopfold.text.corpus import Corpus, read_corpus
from loopfold.text.vocabulary import Vocabulary
from loopfold.training import trust as trusted
from loopfold.training.checkpoint import model_with
from loopfold.training.contents import baselines
from loopfold.training.folder import RunError, RunFolder
from loopfold.training.options import OptionError, Options

LOG_EVERY = 50  # steps
ATTEMPTS = 100


@dataclass(frozen=True)
class Run:
    """A run as it stands: its model with the weights that did best on the valid text, and what belongs to it."""

    path: Path
    options: Options
    vocabulary: Vocabulary = field(repr=False)
    model: LanguageModel = field(repr=False)
    metrics: list[dict[str, Any]] = field(repr=False)
    config: dict[str, Any] = field(repr=False)

    def corpus(self) -> Corpus:
        """The text that it was trained on, read again; it must not have changed."""
        return self._corpus

    def learning_curve(self) -> Drawing:
        """Nats per token in training and on the valid text; across, what `loopfold compare` found, if it ran."""
        if not self.curves:
            raise RunError(f"{self.path} has no learning curve yet: its first entry comes after {LOG_EVERY} steps.")
        name = f"{self.config['corpus']['name']}, {self.options.kind}"
        found = RunFolder(self.path).comparison()
        if found is None:
            return learning_curves(self.curves, title=name)
        return learning_curves(self.curves, baselines(found.rows), f"{name}; across, the {found.on} text")

    @property
    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Points (step, nats per token) in training and on the valid text, where they are finite numbers."""
        points = {
            part: [(entry["step"], entry[part]) for entry in self.metrics if math.isfinite(entry.get(part, math.nan))]
            for part in ("train", "valid")
        }
        return {part: found for part, found in points.items() if found}

    @cached_property
    def _corpus(self) -> Corpus:
        return read_again(self.options, RunFolder(self.path))


def open_run(path: str | Path, device: str = "cpu", *, trust: bool = False) -> Run:
    """The run in a folder, ready to be evaluated and to generate. It may be training at the same time.

    `trust`  run the code of its `cell.py`, where it has one; needed once for each that you have not trained with
    """
    check_device(device)
    for attempt in range(ATTEMPTS):
        before = RunFolder(Path(path)).step()
        try:
            folder = RunFolder.open(Path(path))
            options, config, metrics, vocabulary = folder.options, folder.config, folder.metrics, folder.vocabulary
            name = folder.checkpoint["best"]
            stored = folder.tensors(name)
            break
        except RunError:  # perhaps a new checkpoint has come meanwhile, and its files gone
            if RunFolder(Path(path)).step() == before or attempt == ATTEMPTS - 1:
                raise
    check_trust(folder, trust)
    model = model_with(options, vocabulary.size, stored, folder.path / name)
    return Run(Path(path), options, vocabulary, model.to(device).eval(), metrics, config)


def check_trust(folder: RunFolder, trust: bool) -> None:
    """Refuse to run a stranger's code, unless the user says to."""
    digest = folder.cell_digest()
    if digest is None:
        return
    if trust:
        trusted.remember(digest)
    elif not trusted.is_trusted(digest):
        raise RunError(
            f"{folder.path} has a cell of its own, and opening it would run the code in {folder.path / 'cell.py'}. "
            f"Read it; if you trust it, add --trust (in Python, trust=True)."
        )


def check_device(device: str) -> None:
    try:
        torch.zeros(1, device=device).tolist()  # that of `meta` holds nothing
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without CUDA
        reason = str(error).partition("\n")[0].rstrip(".")
        raise OptionError(f"device {device!r} cannot be used: {reason}. Type --device cpu.") from error


# ------------------------------------------------------------------ the text


def read_again(options: Options, folder: RunFolder) -> Corpus:
    for source in (*options.sources, options.valid, options.test):
        if source and os.path.exists(source) and not (os.path.isfile(source) or os.path.isdir(source)):
            raise RunError(f"the text of {folder.path} is {source}, which is no file and cannot be read again.")
    corpus = read_corpus(options.sources, options.split, options.valid, options.test)
    check_same_text(corpus, folder)
    return corpus


def check_same_text(corpus: Corpus, folder: RunFolder) -> None:
    if corpus.sha256 != folder.config["corpus"]["sha256"]:
        raise RunError(f"the text of {corpus.name} has changed since the run began: {folder.path} needs the old one.")
