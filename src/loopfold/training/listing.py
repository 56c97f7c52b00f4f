"""The runs below a folder, each in a few facts. Only JSON is read, and torch is not imported."""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from loopfold.errors import Mendable
from loopfold.training.folder import RunFolder
from loopfold.training.packed import PackedRun
from loopfold.training.stored import PACKED, StoredRun, steadily

_SIGNS = ("checkpoint.json", "config.json", "metrics.jsonl")  # a folder with two of these is a run, whole or not


@dataclass(frozen=True)
class Listed:
    """A run in a few facts; all but its place and its state are None where it is damaged."""

    path: str
    state: str  # finished, training, stopped or damaged
    model: str | None = None
    unit: str | None = None
    text: str | None = None
    step: int | None = None
    steps: int | None = None
    perplexity: float | None = None  # the best on the valid text
    changed: str | None = None  # when it was saved last

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def list_below(folder: Path) -> Iterator[Listed]:
    """Every run below a folder, or that is the folder itself; what is inside of a run belongs to that."""
    for at, folders, names in os.walk(folder):
        if len({*names} & {*_SIGNS}) > 1:
            folders.clear()
            yield _listed(Path(at), RunFolder.find)
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if name.endswith(PACKED) and (Path(at) / name).is_file():
                yield _listed(Path(at) / name, PackedRun.find)


def _listed(path: Path, find: Callable[[Path], StoredRun]) -> Listed:
    try:
        stored = find(path)
        return steadily(stored, lambda: _facts(stored))
    except Mendable:  # whatever it is, the others are listed too
        return Listed(str(path), "damaged")


def _facts(stored: StoredRun) -> Listed:
    options, checkpoint, standing = stored.options, stored.checkpoint, stored.standing
    stored.check("config.json")
    state = "finished" if standing.finished else "training" if stored.training else "stopped"
    nats = checkpoint["progress"].get("best")
    return Listed(
        str(stored.path),
        state,
        options.name,
        options.unit,
        stored.config["corpus"]["name"],
        standing.step,
        standing.steps,
        math.exp(nats) if isinstance(nats, int | float) and 0 <= nats < 700 else None,
        datetime.fromtimestamp(stored.saved_at).isoformat(" ", "minutes"),
    )
