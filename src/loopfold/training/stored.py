"""A run as it is read, wherever it is kept: in the folder that it trains in, or packed into one file.

Both hold the same files under the same names, so that all is read and checked in one way. A file counts only if its
SHA-256 is the one in `checkpoint.json`; what is not asked for is not looked at, and may be missing.
"""

import contextlib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from loopfold.errors import Mendable
from loopfold.training import contents
from loopfold.training.options import Options

if TYPE_CHECKING:  # `loopfold list` need not wait for torch
    from torch import Tensor

    from loopfold.text.vocabulary import Vocabulary

T = TypeVar("T")
FORMAT = 1
ATTEMPTS = 100
PACKED = ".loopfold"  # how the name of a packed run ends


class RunError(Mendable):
    """A run folder that cannot be used or written; the message says why, and what to do."""


@dataclass(frozen=True)
class Standing:
    """How far a run has come."""

    step: int
    steps: int  # of the whole run; fewer are taken where its patience ends before
    finished: bool

    @property
    def unfinished(self) -> dict[str, int] | None:
        """As JSON says it; None where it is finished."""
        return None if self.finished else {"step": self.step, "steps": self.steps}


class StoredRun(ABC):
    """The files of a run, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def holds(self, name: str) -> bool:
        """Whether there is a file of that name."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """A file as it is, not checked yet."""

    @abstractmethod
    def shown(self, name: str) -> str:
        """How a person finds a file of it."""

    @abstractmethod
    def beside(self, name: str) -> Path:
        """Where a result of the run goes that no other place is named for."""

    @abstractmethod
    def write_json(self, name: str, data: Mapping[str, Any]) -> None:
        """Keep a result with the run, such as a comparison."""

    @property
    @abstractmethod
    def training(self) -> bool:
        """Whether a process is training it at this moment."""

    @property
    @abstractmethod
    def saved_at(self) -> float:
        """When it was written last, in seconds since 1970."""

    # ---------------------------------------------------------------- what it holds

    def check(self, *names: str) -> None:
        """That these files are what the checkpoint says."""
        checkpoint = self.checkpoint
        for name in names:
            if name not in checkpoint["files"]:
                raise RunError(f"{self.path / 'checkpoint.json'} is damaged: files must hold {name}.")
            if not self.holds(name):
                raise RunError(f"{self.path} is not complete: {name} is missing.")
            size = checkpoint["metrics_bytes"] if name == contents.METRICS else None  # lines may have followed
            if sha256(self.read(name)[:size]) != checkpoint["files"][name]:
                raise RunError(
                    f"{self.path / name} is damaged or was altered: its SHA-256 is not the one in checkpoint.json."
                )

    @property
    def config(self) -> dict[str, Any]:
        with self._checking("config.json") as data:
            config = contents.from_json(data)
        if config.get("format") != FORMAT:
            wrote = config.get("versions")
            by = wrote.get("loopfold", "unknown") if isinstance(wrote, dict) else "unknown"
            raise RunError(
                f"{self.path} has format {config.get('format')!r}, and this version of loopfold ({own_version()}) "
                f"reads format {FORMAT}. Loopfold {by} wrote it: use that."
            )
        with self._checking("config.json"):
            return contents.check_config(config)

    @property
    def options(self) -> Options:
        """The options, as they have changed since the run began; the user's own cell and a text from standard input are
        those that are kept with the run."""
        with self._checking("config.json"):
            stored = Options.from_json(self.config["options"])
        with self._checking("checkpoint.json"):
            stored = stored.changed(self.checkpoint.get("changes", {}))
        cell = stored.cell if ":" not in stored.cell else f"{self.path / 'cell.py'}:{stored.cell.rpartition(':')[2]}"
        kept = {"-": str(self.path / "stdin.txt")}
        sources = tuple(kept.get(source, source) for source in stored.sources)
        valid, test = (kept.get(source or "", source) for source in (stored.valid, stored.test))
        return replace(stored, cell=cell, sources=sources, valid=valid, test=test)

    @property
    def vocabulary(self) -> "Vocabulary":
        from loopfold.text.vocabulary import vocabulary_from_json

        with self._checking("vocabulary.json") as data:
            return vocabulary_from_json(contents.from_json(data))

    @property
    def checkpoint(self) -> dict[str, Any]:
        """Where the run stands: `step`, `progress` (what the loop counts), `weights`, `best`, `state`, `files`; and
        `changes`, where options have changed."""
        with self._checking("checkpoint.json") as raw:
            data = contents.from_json(raw)
            if data.pop("sha256", None) != sha256(contents.to_json(data)):
                name = self.path / "checkpoint.json"
                raise RunError(f"{name} is damaged or was altered: its SHA-256 does not match.")
            return contents.check_checkpoint(data)

    @property
    def standing(self) -> Standing:
        options, checkpoint = self.options, self.checkpoint
        step, steps = checkpoint["step"], options.steps(self.config["corpus"]["tokens"])
        misses = checkpoint["progress"].get("misses")
        patient = options.patience is None or not isinstance(misses, int) or misses < options.patience
        return Standing(step, steps, step >= steps or not patient)

    def step(self) -> int | None:
        """The step of the last checkpoint; None where there is none, or none that can be read."""
        try:
            return self.checkpoint["step"]
        except RunError:
            return None

    def cell_digest(self) -> str | None:
        """The SHA-256 of the user's own cell; None where the run has none."""
        return sha256(self.read("cell.py")) if ":" in self.options.cell else None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The learning curve up to the last checkpoint."""
        checkpoint = self.checkpoint
        with self._checking(contents.METRICS) as data:
            return contents.check_metrics(data[: checkpoint["metrics_bytes"]], checkpoint["step"])

    def tensors(self, name: str) -> "dict[str, Tensor]":
        """The tensors of one file."""
        from safetensors.torch import load

        try:
            return load(self.read(name))
        except RunError:
            raise
        except Exception as error:  # the library has many
            raise RunError(f"{self.path / name} is damaged: it does not hold tensors ({error}).") from error

    def result(self, name: str) -> bytes | None:
        """What `write_json` wrote; None if it wrote nothing."""
        return self.read(name) if self.holds(name) else None

    @contextlib.contextmanager
    def _checking(self, name: str) -> Iterator[bytes]:
        """What a file holds; an error names the file."""
        data = self.read(name)
        try:
            yield data
        except ValueError as error:
            raise RunError(f"{self.path / name} is damaged: {str(error).rstrip('.')}.") from error


def steadily(stored: StoredRun, read: Callable[[], T]) -> T:
    """What `read` finds; once more where a new checkpoint has replaced the one that was being read."""
    for _ in range(ATTEMPTS):
        before = stored.step()
        try:
            return read()
        except RunError:
            if stored.step() == before:
                raise
    return read()


def modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from error


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def own_version() -> str:
    try:
        return version("loopfold")
    except PackageNotFoundError:  # run from its source, not installed
        return "not installed"
