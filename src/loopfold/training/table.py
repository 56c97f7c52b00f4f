"""The table of a comparison: its rows, their file `comparison.json`, and which of them a curve is shown beside.

{"on": "test", "rows": [{"name": "2-gram", "parameters": 812, "table": "4356", "tokens_per_second": 3.1e6,
                         "ledger": {"nll": 8123.4, "tokens": 5000, …}}, …]}
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from shlex import quote
from typing import Any

from loopfold.evaluation import Ledger
from loopfold.training.contents import COMPARISON, check_fields, from_json, mapping, value_of
from loopfold.training.stored import RunError, StoredRun


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
        speed = self.tokens_per_second if math.isfinite(self.tokens_per_second) else None
        return asdict(self) | {"table": table, "tokens_per_second": speed, "ledger": self.ledger.as_json()}

    @staticmethod
    def from_json(data: Any) -> "Row":
        """A row as stored; ValueError where it cannot be one."""
        row = {"table": None, "tokens_per_second": None} | mapping(data, "a row")
        totals = {total.name for total in fields(Ledger)}  # whatever else a ledger holds follows from these
        stored = {key: value for key, value in mapping(row.get("ledger"), "a ledger").items() if key in totals}
        value_of(stored, "tokens", int, 1)
        stored["nll"] = _number(stored, "nll", math.inf)
        ledger = Ledger(**stored)
        check_fields(ledger)
        table = value_of(row, "table", str | None)
        return Row(
            value_of(row, "name", str),
            value_of(row, "parameters", int, 0),
            None if table is None else int(table),
            _number(row, "tokens_per_second", math.nan),
            ledger,
        )


def _known(nll: float) -> float:
    """A sum of losses that can be compared; a file does not tell what is not finite apart."""
    return nll if math.isfinite(nll) else math.inf


def _number(data: Mapping[str, Any], name: str, otherwise: float) -> float:
    """A number; None stands for one that is not finite, which JSON does not have."""
    found = value_of(data, name, float | None)
    return otherwise if found is None else found


@dataclass(frozen=True)
class Comparison:
    """Rows on one text, test or valid."""

    on: str
    rows: Sequence[Row]

    def __post_init__(self) -> None:
        found = sorted({row.ledger.way for row in self.rows})
        if len(found) > 1:
            raise ValueError(f"rows that were scored in different ways cannot be compared: {'; '.join(found)}.")

    def as_json(self) -> dict[str, Any]:
        return {"on": self.on, "rows": [row.as_json() for row in self.rows]}

    def own(self, name: str, path: Path, ledger: Ledger) -> Row | None:
        """The row of a run, if it is of the run as it is now; several are told apart by where they were."""
        names = (name, f"{name} ({path.name})", f"{name} ({path.stem})")  # the last: it was packed since
        row = next((row for row in self.rows if row.name in names), None)
        same = (
            row is not None
            and row.ledger.way == ledger.way
            and math.isclose(_known(row.ledger.nll), _known(ledger.nll), rel_tol=1e-4)
        )
        return row if same else None

    def write(self, stored: StoredRun) -> None:
        """Leave it with a run."""
        stored.write_json(COMPARISON, self.as_json())

    @staticmethod
    def read(stored: StoredRun) -> "Comparison | None":
        """What was left with a run; None where nothing was."""
        data = stored.result(COMPARISON)
        if data is None:
            return None
        try:
            found = from_json(data)
            rows = value_of(found, "rows", list)
            return Comparison(value_of(found, "on", str), [Row.from_json(row) for row in rows])
        except ValueError as error:
            command = f"loopfold compare {quote(str(stored.path))}"
            raise RunError(f"{stored.path / COMPARISON} is damaged ({error}). Remove it, or type {command}") from error


def baselines(rows: Sequence[Row]) -> dict[str, float]:
    """What a learning curve is shown beside, in nats per token: the networks, and of the n-grams the best."""
    known = [row for row in rows if math.isfinite(row.ledger.nats_per_token)]
    grams = [row for row in known if row.table is not None and row.table > 1]  # that of the uniform model is 1
    best = min(grams, key=lambda row: row.ledger.nats_per_token, default=None)
    return {row.name: row.ledger.nats_per_token for row in known if row is best or row.table is None}
