"""What a page is about: a run, its text, the passage that it looks at, and its table of perplexities."""

import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import Tensor

from loopfold.comparison import held_out, name_of_run, ngrams
from loopfold.evaluation import Ledger, perplexity
from loopfold.generation import prompt_ids
from loopfold.language.base import count_parameters
from loopfold.language.recurrent import RecurrentLM
from loopfold.text.corpus import Corpus
from loopfold.training.folder import RunError
from loopfold.training.loop import Run
from loopfold.training.options import OptionError

SEEN = 300  # tokens of the passage
CHEAP = 2_000_000  # tokens of training text for which n-grams are counted at once


@dataclass(frozen=True)
class Subject:
    """A run as the page shows it. `given` is a passage of the user's; by default the held-out text's beginning."""

    run: Run
    given: str | None = field(default=None, repr=False)

    @cached_property
    def corpus(self) -> Corpus:
        return self.run.corpus()

    @cached_property
    def part(self) -> str | None:
        """The text that was held out: test or valid; None where all of it was for training."""
        return self.corpus.part if self.corpus.test or self.corpus.valid else None

    @cached_property
    def name(self) -> str:
        return name_of_run(self.run)

    @property
    def unit(self) -> str:
        return self.run.vocabulary.unit

    # ---------------------------------------------------------------- the passage

    @cached_property
    def text(self) -> str:
        """The text to look at; longer than what is shown, so that what units do is judged by more."""
        if self.given is not None and not self.given.strip():
            raise OptionError("the passage is empty: give some text after --passage, or leave it out.")
        held = {"test": self.corpus.test, "valid": self.corpus.valid}.get(self.part or "", self.corpus.train)
        return (self.given or held)[: 20 * SEEN].lstrip("\n")

    @cached_property
    def ids(self) -> Tensor:
        """The tokens of the text that are shown."""
        return prompt_ids(self.run.vocabulary, self.text)[:SEEN]

    @cached_property
    def x_and_y(self) -> tuple[Tensor, Tensor]:
        """The tokens as the network reads it and as it should answer, `[τ, 1]`: x(t) is the token before y(t)."""
        assert isinstance(self.run.model, RecurrentLM)
        y = self.ids[:, None].to(self.run.model.network.c.device)
        start = torch.full_like(y[:1], self.run.model.vocabulary_size)
        return self.run.model.encode(torch.cat([start, y[:-1]])), y

    # ---------------------------------------------------------------- figures

    @cached_property
    def ledger(self) -> Ledger | None:
        """What the model makes of the held-out text."""
        if self.part is None:
            return None
        return perplexity(self.run.model, held_out(self.run, self.corpus, self.part))

    @cached_property
    def parameters(self) -> int:
        return count_parameters(self.run.model)

    @cached_property
    def seconds(self) -> float:
        return self.run.metrics[-1]["seconds"] if self.run.metrics else 0.0

    @cached_property
    def speed(self) -> float | None:
        """Tokens a second in training."""
        if not self.seconds:
            return None
        return self.run.config["corpus"]["tokens"] * self.run.metrics[-1]["epoch"] / self.seconds

    @cached_property
    def table(self) -> "Table":
        """The run beside its baselines: as `loopfold compare` has left it, or else with n-grams alone."""
        command = f"loopfold compare {quote(str(self.run.path))}"
        found = self._compared()
        if found is not None:
            return found
        if self.part is None or self.ledger is None:
            note = "No text was held out, so there is nothing to measure on. Train with --split 90/5/5."
            return Table([], self.name, note)
        own = _row({"name": self.name, "parameters": self.parameters, "ledger": self.ledger.as_json()})
        tokens = self.run.config["corpus"]["tokens"]
        if tokens > CHEAP:
            note = f"The training text has {tokens:,} tokens. For the baselines, type {command}"
            return Table([own], self.name, note)
        rows = ngrams(self.run, self.corpus, held_out(self.run, self.corpus, self.part))
        note = f"For a window and a convolution trained as long as this run, type {command}"
        return Table([*(_row(row.as_json()) for row in rows), own], self.name, note)

    def _compared(self) -> "Table | None":
        """What `loopfold compare` has left, if it is of the run as it is now."""
        path: Path = self.run.path / "comparison.json"
        if not path.exists() or self.ledger is None:
            return None
        try:
            data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            rows = [_row(row) for row in data["rows"]]
            ledgers = {row["name"]: row["ledger"] for row in rows}
            if data["on"] != self.part:
                return None
            own = next((n for n in (self.name, f"{self.name} ({self.run.path.name})") if n in ledgers), None)
            if own is None or not math.isclose(ledgers[own]["nll"], self.ledger.nll, rel_tol=1e-4):
                return None
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise RunError(
                f"{path} is damaged ({error}). Remove it, or type loopfold compare {quote(str(self.run.path))}"
            ) from error
        return Table(rows, own, "")


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """What a page needs of a row, in numbers that are numbers."""
    ledger = row["ledger"]
    names = ("nll", "perplexity", "nats_per_token", "bits_per_character")
    figures: dict[str, Any] = {"tokens": int(ledger["tokens"]), "unit": str(ledger["unit"])}
    figures |= {name: None if ledger[name] is None else float(ledger[name]) for name in names}
    return {"name": str(row["name"]), "parameters": int(row["parameters"]), "ledger": figures}


@dataclass(frozen=True)
class Table:
    """Rows of a comparison, what the run's own is called, and what to do for more."""

    rows: list[dict[str, Any]]
    own: str
    note: str

    @property
    def lines(self) -> dict[str, float]:
        """Nats per token by name: of the run, the best n-gram, and the networks that see only so far."""
        nats = {row["name"]: row["ledger"]["nats_per_token"] for row in self.rows}
        known = {name: value for name, value in nats.items() if value is not None}
        grams = [name for name in known if name.endswith("gram")]
        best = sorted(grams, key=known.__getitem__)[:1]
        return {name: known[name] for name in [self.own, *best, "window", "convolution"] if name in known}
