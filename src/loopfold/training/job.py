"""What the loop trains: made anew from options and a text, begun in a folder, or as a folder keeps it."""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from loopfold.errors import Argument, OptionError
from loopfold.language.base import LanguageModel
from loopfold.processes import Processes
from loopfold.text.corpus import Corpus
from loopfold.text.overlap import share_in
from loopfold.text.streams import Streams
from loopfold.text.vocabulary import Tokens, Vocabulary
from loopfold.training import trust as trusted
from loopfold.training.cells import check_cell
from loopfold.training.checkpoint import model_with, weights_of
from loopfold.training.contents import check_fields
from loopfold.training.folder import RunFolder, Taken
from loopfold.training.guards import check_room, check_shares, check_watched, try_step
from loopfold.training.making import make_model, make_vocabulary, outline
from loopfold.training.options import KEPT, Options
from loopfold.training.run import Run
from loopfold.training.schedules import WARMUP, warmup_of
from loopfold.training.stored import RunError

REPEATED = 0.1  # of a held-out text, in the training text too; of ordinary texts it is at most 0.03


@dataclass(frozen=True)
class Progress:
    """What the loop counts, and a checkpoint keeps."""

    step: int = 0
    nll: float = 0.0  # of the tokens since the last entry of the learning curve
    tokens: int = 0
    best: float | None = None  # nats a token on the valid text, once it was evaluated
    misses: int = 0  # evaluations since then
    decays: int = 0  # evaluations in all that were not the best; after each, the schedule plateau falls
    average_from: int | None = None  # the step after which weights are averaged, once they are
    seconds: float = 0.0

    @staticmethod
    def of(folder: RunFolder) -> "Progress":
        """What the checkpoint of a folder has kept."""
        try:
            progress = Progress(**folder.checkpoint["progress"])
            check_fields(progress)
            counts = progress.step, progress.tokens, progress.misses, progress.decays
            if min(counts) < 0 or not 0 <= progress.seconds < math.inf:
                raise ValueError("a count is below 0, or the time is not a number")
            if progress.average_from is not None and folder.options.average == "none":
                raise ValueError("it averages weights, and the options do not")
            if progress.average_from is not None and not 0 <= progress.average_from <= progress.step:
                raise ValueError(f"an average begins at step {progress.average_from} of {progress.step}")
            if progress.step != folder.checkpoint["step"]:
                raise ValueError(f"it is of step {progress.step}, and the checkpoint of {folder.checkpoint['step']}")
        except (TypeError, ValueError) as error:
            raise RunError(
                f"{folder.path / 'checkpoint.json'} is damaged: its progress is impossible ({error})."
            ) from error
        return progress


def streams_of(options: Options, tokens: Tokens) -> Streams:
    varied = options.seed if options.vary_window else None
    return Streams(tokens.ids, options.streams, options.window, varied=varied)


def anew(options: Options) -> Options:
    """Options of a run for another one. Older runs have a warm-up of 50 steps, however short they are."""
    return replace(options, warmup=None) if options.warmup == WARMUP else options


# ------------------------------------------------------------------ a new run


@dataclass(frozen=True)
class New:
    """A run that could begin: all is made and has been tried, and nothing is written yet."""

    options: Options
    corpus: Corpus
    vocabulary: Vocabulary
    model: LanguageModel
    tokens: Tokens
    notes: tuple[str, ...]  # what the user should know of the text
    came_from: dict[str, Any] | None

    @staticmethod
    def of(
        options: Options,
        corpus: Corpus,
        processes: Processes,
        start: Run | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> "New":
        check_watched(options, bool(corpus.valid))
        if start is not None:
            _check_start(options, start)
        vocabulary = vocabulary or (make_vocabulary(options, corpus.train) if start is None else start.vocabulary)
        tokens = vocabulary.encode(corpus.train)
        distinct = len(_some_kinds(tokens) - {vocabulary.unknown, vocabulary.end})
        if distinct < 2:
            raise OptionError(f"the text has only {distinct} distinct {vocabulary.unit}: there is nothing to predict.")
        check_shares(min(options.streams, len(tokens)), processes)
        steps = options.steps(len(tokens))
        if warmup_of(options, steps) >= steps:
            raise OptionError(
                Argument("warmup", options.warmup),
                f" is not shorter than the run, which has {steps} step{'s'[: steps > 1]}: choose fewer, or leave it "
                f"out.",
            )
        form = outline(options, vocabulary.size)
        if form is not None:
            check_room(form, options, len(tokens), processes)
        if start is None:
            model = make_model(options, vocabulary.size)
        else:
            model = model_with(options, vocabulary.size, weights_of(start.model), start.path)
        try_step(model, options)  # before anything is written: a cell may not fit
        if form is None:
            check_room(model, options, len(tokens), processes)
        notes = _notes(corpus, tokens, start) + _shares(options) + _in_vain(options, tokens)
        return New(options, corpus, vocabulary, model, tokens, notes, None if start is None else _origin(start))

    def place(self, out: str | Path | None) -> Path:
        """Where the run would go."""
        path = next(path for path in self._places(out) if out is not None or not os.path.lexists(path))
        RunFolder(path).check_free()
        return path

    def begin(self, out: str | Path | None, held: ExitStack) -> "Job":
        """The run in a new folder, which is locked for as long as `held` is open."""
        options, corpus = self.options, self.corpus
        about = {"name": corpus.name, "sha256": corpus.sha256, "tokens": len(self.tokens)}
        start = asdict(Progress()), weights_of(self.model)
        for path in self._places(out):
            try:
                kept = options.from_anywhere(), about, self.vocabulary.as_json(), *start, self.came_from
                folder = held.enter_context(RunFolder.create(path, *kept))
                break
            except Taken:
                if out is not None:
                    raise
        if digest := folder.cell_digest():
            trusted.remember(digest)  # it has run already
        check_cell(folder.options.cell)  # the copy of the user's own, now and not when the trained run is opened
        valid = self.vocabulary.encode(corpus.valid)
        return Job(folder, folder.options, self.model, self.tokens, valid, self.notes)

    def _places(self, out: str | Path | None) -> Iterator[Path]:
        """The folder that was named; or those that a run may have by default, where the first that is free counts."""
        first = self.options.sources[0]
        name = "stdin" if first == "-" else Path(first).stem
        for n in count(1):
            yield Path("runs") / f"{name}-{self.options.kind}-{n}" if out is None else Path(out)


def _some_kinds(tokens: Tokens) -> set[int]:
    """Different tokens of a text: all of them where they are few, and at least four where they are not."""
    found: set[int] = set()
    for piece in tokens.ids.split(1 << 20):
        found |= {*np.unique(piece.numpy()).tolist()}
        if len(found) >= 4:
            break
    return found


def _check_start(options: Options, start: Run) -> None:
    """A run that starts with the weights of another has its model and vocabulary."""
    for name in KEPT:
        value = getattr(start.options, name)
        if getattr(options, name) != value:
            raise OptionError(
                f"a run that starts from {start.path} keeps its model and vocabulary: it has ",
                Argument(name, value),
                ".",
            )


def _origin(start: Run) -> dict[str, Any]:
    """What a run folder says of the run whose weights it began with."""
    from safetensors.torch import save

    digest = sha256(save(weights_of(start.model))).hexdigest()
    return {"run": str(start.path.absolute()), "weights": digest, "corpus": dict(start.config["corpus"])}


def _notes(corpus: Corpus, tokens: Tokens, start: Run | None) -> tuple[str, ...]:
    notes = []
    for part in ("valid", "test"):
        share = share_in(getattr(corpus, part), corpus.train)
        if share >= REPEATED:
            notes.append(
                f"{100 * share:.0f} % of the {part} text is in the training text too, so its figures say nothing "
                f"about new text"
            )
    if start is not None and tokens.unknown:
        share = tokens.unknown / len(tokens)
        notes.append(f"{100 * share:.2g} % of the text's {tokens.unit}s are unknown to the vocabulary of {start.path}")
    return tuple(notes)


def _shares(options: Options) -> tuple[str, ...]:
    """What a split comes to whose shares are no percentages: 8/1/1 is meant so, and 90/10/10 is perhaps not."""
    whole = sum(options.split)
    if options.valid is not None or options.test is not None or abs(whole - 100) < 1e-6 or abs(whole - 1) < 1e-6:
        return ()
    typed = "/".join(f"{share:g}" for share in options.split)
    meant = "/".join(f"{100 * share / whole:.3g}" for share in options.split)
    return (f"the shares {typed} add up to {whole:g}, not to 100: the text is split {meant} %",)


def _in_vain(options: Options, tokens: Tokens) -> tuple[str, ...]:
    """What was chosen and cannot come to pass in a run of this length, or on this device."""
    steps, epoch = options.steps(len(tokens)), len(streams_of(options, tokens))
    evaluations = -(-steps // (options.evaluate_every or epoch))
    notes = []
    if options.average == "triggered" and evaluations < options.average_after + 2:
        notes.append(
            f"no weights will be averaged: that takes {options.average_after + 2} evaluations, and this run has "
            f"{evaluations}"
        )
    if options.schedule == "step" and options.decay_after >= options.epochs:
        notes.append(f"the learning rate never falls: the run is over before {options.decay_after} epochs are")
    rows = len(tokens) // min(options.streams, len(tokens))
    if epoch == 1 and rows < options.window:
        notes.append(
            f"an epoch is one step, of windows of {rows:,}, since {options.streams:,} streams share {len(tokens):,} "
            f"{tokens.unit}s: fewer streams give more steps"
        )
    if options.precision == "bf16" and options.device == "cpu":
        notes.append("most CPUs take longer in bf16 than in float32")
    return tuple(notes)


# ------------------------------------------------------------------ a run that has begun


@dataclass(frozen=True)
class Job:
    """What the loop trains, as `New` made it or as a run folder keeps it."""

    folder: RunFolder
    options: Options
    model: LanguageModel
    train_tokens: Tokens
    valid_tokens: Tokens
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(folder: RunFolder, corpus: Corpus) -> "Job":
        """What a folder keeps, as its last checkpoint has it."""
        options, vocabulary, name = folder.options, folder.vocabulary, folder.checkpoint["weights"]
        model = model_with(options, vocabulary.size, folder.tensors(name), folder.path / name)
        train, valid = vocabulary.encode(corpus.train), vocabulary.encode(corpus.valid)
        return Job(folder, options, model, train, valid)

    def changed(self, changes: Mapping[str, Any]) -> "Job":
        """The same with other values of options that may change on the way."""
        options = replace(self.options, **changes)
        streams, step = streams_of(options, self.train_tokens), Progress.of(self.folder).step
        least = step + (self.options.steps(len(streams.ids)) > step)  # a run that goes on has an end that is evaluated
        if "epochs" in changes and options.steps(len(streams.ids)) < least:
            raise OptionError(
                f"{self.folder.path} has trained for {step / len(streams):.3g} epochs already: ",
                Argument("epochs"),
                f" must be more; got {options.epochs:g}.",
            )
        check_watched(options, len(self.valid_tokens) > 0)
        return replace(self, options=options)
