"""What a page is about: a run, its text, the passage that it looks at, and its table of perplexities."""

import math
from dataclasses import dataclass, field
from functools import cached_property
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
from loopfold.training.contents import baselines, comparison_row
from loopfold.training.folder import RunFolder
from loopfold.training.options import OptionError
from loopfold.training.run import Run

SEEN = 300  # tokens of the passage
REMEDY = "Train anew with a smaller --learning-rate."
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
        return (self.given or held).lstrip("\n")[: 20 * SEEN]

    @cached_property
    def ids(self) -> Tensor:
        """The tokens of the text that are shown."""
        ids = prompt_ids(self.run.vocabulary, self.text)[:SEEN]
        if not len(ids):
            where = "the passage" if self.given is not None else f"the {self.part or 'training'} text"
            raise OptionError(f"{where} has no {self.unit} to look at: give another text with --passage.")
        return ids

    @cached_property
    def x_and_y(self) -> tuple[Tensor, Tensor]:
        """The tokens as the network reads it and as it should answer, `[τ, 1]`: x(t) is the token before y(t)."""
        assert isinstance(self.run.model, RecurrentLM)
        y = self.ids[:, None].to(self.run.model.network.c.device)
        start = torch.full_like(y[:1], self.run.model.vocabulary_size)
        return self.run.model.encode(torch.cat([start, y[:-1]])), y

    # ---------------------------------------------------------------- figures

    @cached_property
    def trouble(self) -> str | None:
        """What a reader must know of a model that diverged; None where nothing is wrong."""
        if not all(bool(p.isfinite().all()) for p in self.run.model.parameters()):
            return f"Some weights of this model are no finite numbers: its training diverged. {REMEDY}"
        if self.ledger is not None and math.isnan(self.ledger.nll):
            return f"What this model puts out is no finite number. {REMEDY}"
        return None

    @cached_property
    def best(self) -> float | None:
        """The best loss on the valid text."""
        return min((nats for _, nats in self.run.curves.get("valid", [])), default=None)

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
        own = comparison_row({"name": self.name, "parameters": self.parameters, "ledger": self.ledger.as_json()})
        tokens = self.run.config["corpus"]["tokens"]
        if tokens > CHEAP:
            note = f"The training text has {tokens:,} tokens. For the baselines, type {command}"
            return Table([own], self.name, note)
        rows = ngrams(self.run, self.corpus, held_out(self.run, self.corpus, self.part))
        note = f"For a window and a convolution trained as long as this run, type {command}"
        return Table([*(comparison_row(row.as_json()) for row in rows), own], self.name, note)

    def _compared(self) -> "Table | None":
        """What `loopfold compare` has left, if it is of the run as it is now."""
        found = RunFolder(self.run.path).comparison()
        if found is None or self.ledger is None or found.on != self.part:
            return None
        nll = {row["name"]: row["ledger"]["nll"] for row in found.rows}
        own = next((n for n in (self.name, f"{self.name} ({self.run.path.name})") if n in nll), None)
        if own is None or not math.isclose(_number(nll[own]), _number(self.ledger.nll), rel_tol=1e-4):
            return None
        return Table(list(found.rows), own, "")


def _number(nll: float | None) -> float:
    """A sum of losses that can be compared; a file has None for all that is no finite number."""
    return nll if nll is not None and math.isfinite(nll) else math.inf


@dataclass(frozen=True)
class Table:
    """Rows of a comparison, what the run's own is called, and what to do for more."""

    rows: list[dict[str, Any]]
    own: str
    note: str

    @property
    def lines(self) -> dict[str, float]:
        """Nats per token by name: of the run, and of the baselines that belong beside it."""
        return baselines(self.rows)
