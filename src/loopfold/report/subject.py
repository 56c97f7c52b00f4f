"""What a page is about: a run, its text, the passage that it looks at, and its table of perplexities."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from shlex import quote

from torch import Tensor

from loopfold.comparison import ngrams, row_of
from loopfold.errors import Argument, OptionError
from loopfold.evaluation import Ledger
from loopfold.language.recurrent import RecurrentLM
from loopfold.probing import beginning
from loopfold.text.corpus import Corpus
from loopfold.training.run import Run
from loopfold.training.table import Comparison, Row, baselines

SEEN = 300  # tokens of the passage
REMEDY = "Train again with a smaller learning rate."
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

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def unit(self) -> str:
        return self.run.vocabulary.unit

    # ---------------------------------------------------------------- the passage

    @cached_property
    def text(self) -> str:
        """The text to look at; longer than what is shown, so that units are judged by more of it."""
        if self.given is not None and not self.given.strip():
            raise OptionError("the passage is empty: give some text as ", Argument("passage"), ", or leave it out.")
        return beginning(self.given or self.run.text(self.part or "train"))

    @cached_property
    def tokens(self) -> tuple[Tensor, Tensor]:
        """The passage, x and y `[τ, 1]`: the tokens that are shown are y."""
        x, y = self.run.opening(self.text, SEEN)
        if not len(y):
            where = "the passage" if self.given is not None else f"the {self.part or 'training'} text"
            raise OptionError(f"{where} has no {self.unit} to look at: give another as ", Argument("passage"), ".")
        return x, y

    @cached_property
    def x_and_y(self) -> tuple[Tensor, Tensor]:
        """The passage as the network reads it, and as it should answer."""
        assert isinstance(self.run.model, RecurrentLM)
        x, y = (part.to(self.run.model.network.c.device) for part in self.tokens)
        return self.run.model.encode(x), y

    # ---------------------------------------------------------------- figures

    @cached_property
    def trouble(self) -> str | None:
        """What a reader must know of a model that diverged; None where nothing is wrong."""
        if not all(bool(p.isfinite().all()) for p in self.run.model.parameters()):
            return f"Some weights of this model are not finite numbers: its training diverged. {REMEDY}"
        if self.ledger is not None and math.isnan(self.ledger.nll):
            return f"The outputs of this model are not finite numbers. {REMEDY}"
        return None

    @cached_property
    def best(self) -> float | None:
        """The best loss on the valid text."""
        return min((nats for _, nats in self.run.curves.get("valid", [])), default=None)

    @cached_property
    def own(self) -> Row | None:
        """The run as a row of the table; None where no text was held out."""
        return None if self.part is None else row_of(self.run, self.name, self.run.tokens(self.part))

    @property
    def ledger(self) -> Ledger | None:
        return None if self.own is None else self.own.ledger

    @cached_property
    def table(self) -> "Table":
        """The run beside its baselines: those that `loopfold compare` found, or else n-grams alone."""
        command = f"loopfold compare {quote(str(self.run.path))}"
        if self.own is None:
            note = "No text was held out, so there is nothing to measure on. Train with a split such as 90/5/5."
            return Table([], None, note)
        if (compared := self._compared(self.own)) is not None:
            return compared
        tokens = self.run.config["corpus"]["tokens"]
        if tokens > CHEAP:
            note = f"The training text has {tokens:,} tokens. For the baselines, type {command}"
            return Table([self.own], self.own, note)
        note = f"For a window and a convolution trained as long as this run, type {command}"
        return Table([*ngrams(self.run, self.run.tokens(self.part)), self.own], self.own, note)

    def _compared(self, own: Row) -> "Table | None":
        """What `loopfold compare` found, if it is of the run as it is now."""
        found = Comparison.read(self.run.stored)
        if found is None or found.on != self.part:
            return None
        then = found.own(self.name, self.run.path, own.ledger)
        if then is None:
            return None
        now = replace(own, name=then.name)
        return Table([now if row is then else row for row in found.rows], now, "")


@dataclass(frozen=True)
class Table:
    """Rows of a comparison, which of them is the run's own, and what to do for more."""

    rows: Sequence[Row]
    own: Row | None
    note: str

    @property
    def lines(self) -> dict[str, float]:
        """Nats per token by name: of the run, and of the baselines that belong beside it."""
        return baselines(self.rows)
