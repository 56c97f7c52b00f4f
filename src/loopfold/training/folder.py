"""The run folder: all that a run is and has come to, in JSON and safetensors, whole at every moment.

    config.json                 options, seed, versions, the corpus and its checksum
    vocabulary.json
    cell.py                     the user's own cell, where the run has one
    stdin.txt                   the text, where it came from standard input
    metrics.jsonl               a line for every entry of the learning curve
    weights-1200.safetensors    the model after 1,200 steps; also the one that was best on the valid text
    state-1200.safetensors      the optimiser, and the state carried from window to window
    checkpoint.json             which of these files belong together, and the SHA-256 of each

A file is written under another name, flushed to the disk and then renamed. `checkpoint.json` comes last: until it is
there, the one before it stands, with all its files. So a run can be killed at any moment and goes on from the last
checkpoint, and a file that was torn or altered is found and named.
"""

import contextlib
import errno
import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import Tensor

from loopfold.files import write_whole
from loopfold.text.corpus import read_text
from loopfold.training.options import Options

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

FORMAT = 1


class RunError(Exception):
    """A run folder that cannot be used, or not be written; the message says why and what to do."""


class RunFolder:
    """A run on disk. `create` begins one, `open` finds one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    # ---------------------------------------------------------------- the beginning

    @staticmethod
    def create(
        path: Path,
        options: Options,
        corpus: Mapping[str, Any],
        vocabulary: Mapping[str, Any],
        progress: Mapping[str, Any],
        weights: dict[str, Tensor],
    ) -> "RunFolder":
        """A new folder with a checkpoint of step 0, or none. Nothing that is there already is overwritten."""
        folder = RunFolder(path)
        with _writing(path):
            there = path.exists()
            if there and (not path.is_dir() or any(path.iterdir())):
                word = "--resume it" if (path / "checkpoint.json").exists() else "remove it"
                raise RunError(f"{path} is there already: choose another --out, or {word}.")
            path.mkdir(parents=True, exist_ok=True)
        config = {
            "format": FORMAT,
            "options": options.as_json(),
            "corpus": dict(corpus),
            "versions": {"loopfold": _version(), "torch": torch.__version__, "python": platform.python_version()},
        }
        try:
            if ":" in options.cell:
                folder._write("cell.py", Path(options.cell.rpartition(":")[0]).read_bytes())
            if "-" in (*options.sources, options.valid, options.test):
                folder._write("stdin.txt", read_text(["-"]).encode())
            folder._write("vocabulary.json", _json(vocabulary))
            folder._write("config.json", _json(config))
            folder._write("metrics.jsonl", b"")
            folder.save(0, progress, weights, {}, best=True)
        except BaseException:
            for file in path.iterdir():  # all ours: it was empty, or not there
                file.unlink(missing_ok=True)
            if not there:
                path.rmdir()
            raise
        return folder

    @staticmethod
    def open(path: Path) -> "RunFolder":
        """The run at `path`, every one of its files checked."""
        folder = RunFolder(path)
        try:
            if not path.is_dir():
                raise RunError(f"there is no run folder {path}. `loopfold train` makes one and says where.")
            if not (path / "config.json").is_file():
                raise RunError(f"{path} is no run folder: it has no config.json.")
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror}.") from error
        config = folder._read_json("config.json")
        if config.get("format") != FORMAT:
            raise RunError(
                f"{path} has format {config.get('format')!r}, and this version of loopfold ({_version()}) reads format "
                f"{FORMAT}. Loopfold {config.get('versions', {}).get('loopfold', 'unknown')} wrote it: use that."
            )
        if not (path / "checkpoint.json").is_file():
            raise RunError(f"{path} has no checkpoint: the run ended before its first step. Remove it and start anew.")
        checkpoint = folder.checkpoint
        for name, digest in checkpoint["files"].items():
            size = checkpoint["metrics_bytes"] if name == "metrics.jsonl" else None  # lines may have followed
            if not (path / name).is_file():
                raise RunError(f"{path} is not complete: {name} is missing.")
            if _sha256(folder._read(name)[:size]) != digest:
                raise RunError(f"{path / name} is damaged or was altered: its SHA-256 is not the one noted.")
        return folder

    # ---------------------------------------------------------------- what it holds

    @property
    def config(self) -> dict[str, Any]:
        return self._read_json("config.json")

    @property
    def options(self) -> Options:
        """The options, with what the folder keeps taken from it: the user's own cell, a text from standard input."""
        data = dict(self.config["options"])
        if ":" in data["cell"]:
            data["cell"] = f"{self.path / 'cell.py'}:{data['cell'].rpartition(':')[2]}"
        kept = {"-": str(self.path / "stdin.txt")}
        data["sources"] = [kept.get(source, source) for source in data["sources"]]
        data |= {name: kept.get(data[name], data[name]) for name in ("valid", "test")}
        return Options.from_json(data)

    @property
    def vocabulary(self) -> dict[str, Any]:
        return self._read_json("vocabulary.json")

    @property
    def checkpoint(self) -> dict[str, Any]:
        """Where the run stands: `step`, `progress` (what the loop counts), `weights`, `best`, `state`, `files`."""
        data = self._read_json("checkpoint.json")
        if data.pop("sha256", None) != _sha256(_json(data)):
            raise RunError(f"{self.path / 'checkpoint.json'} is damaged or was altered: its SHA-256 is not its own.")
        return data

    def step(self) -> int | None:
        """The step of the last checkpoint; None where there is none, or none that can be read."""
        try:
            return self.checkpoint["step"]
        except RunError:
            return None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The learning curve up to the last checkpoint."""
        kept = (self.path / "metrics.jsonl").read_bytes()[: self.checkpoint["metrics_bytes"]]
        return [json.loads(line) for line in kept.splitlines()]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of one file."""
        from safetensors.torch import load_file

        return load_file(self.path / name)

    # ---------------------------------------------------------------- going on

    def log(self, entry: Mapping[str, Any]) -> None:
        """Add a line to the learning curve. It counts once a checkpoint has followed."""
        with _writing(self.path), (self.path / "metrics.jsonl").open("ab") as file:
            file.write(json.dumps(entry).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())  # a checkpoint that counts it must not reach the disk first

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """While open, no other process trains here. The system lets go of the lock when a process ends, however."""
        if fcntl is None:
            yield
            return
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise RunError(f"another process is training in {self.path}: wait for it, or stop it.") from error
        finally:
            os.close(descriptor)

    def rewind(self) -> None:
        """Forget what was logged after the last checkpoint, and files that no checkpoint names."""
        with _writing(self.path):
            os.truncate(self.path / "metrics.jsonl", self.checkpoint["metrics_bytes"])
        self._sweep()

    def save(
        self, step: int, progress: Mapping[str, Any], weights: dict[str, Tensor], state: dict[str, Tensor], best: bool
    ) -> None:
        """Make `step` the checkpoint from which the run goes on; `best`: its weights are the best so far."""
        from safetensors.torch import save

        before = self.checkpoint if (self.path / "checkpoint.json").exists() else {}
        weights_name, state_name = f"weights-{step}.safetensors", f"state-{step}.safetensors"
        best_name = weights_name if best or not before else before["best"]
        digests = {
            weights_name: self._write(weights_name, save(weights)),
            state_name: self._write(state_name, save(state)),
        }
        if best_name != weights_name:
            digests[best_name] = before["files"][best_name]
        for name in ("config.json", "vocabulary.json", "cell.py", "stdin.txt"):
            if (self.path / name).exists():
                digests[name] = before["files"][name] if before else _sha256((self.path / name).read_bytes())
        metrics = (self.path / "metrics.jsonl").read_bytes()
        digests["metrics.jsonl"] = _sha256(metrics)
        checkpoint = {
            "step": step,
            "progress": dict(progress),
            "weights": weights_name,
            "best": best_name,
            "state": state_name,
            "metrics_bytes": len(metrics),
            "files": digests,
        }
        self._write("checkpoint.json", _json(checkpoint | {"sha256": _sha256(_json(checkpoint))}))
        self._sweep()

    def write_json(self, name: str, data: Mapping[str, Any]) -> None:
        """A result beside the run, such as a comparison."""
        self._write(name, _json(data))

    def comparison(self) -> "Comparison | None":
        """What `loopfold compare` left here; None where it did not run."""
        path = self.path / "comparison.json"
        if not path.exists():
            return None
        try:
            data = json.loads(self._read(path.name))
            return Comparison(str(data["on"]), tuple(comparison_row(row) for row in data["rows"]))
        except (ValueError, LookupError, TypeError) as error:
            command = f"loopfold compare {quote(str(self.path))}"
            raise RunError(f"{path} is damaged ({error}). Remove it, or type {command}") from error

    # ---------------------------------------------------------------- bytes

    def _sweep(self) -> None:
        """Remove the tensors that no checkpoint names, and what a killed process was writing."""
        named = self.checkpoint["files"]
        for pattern in ("weights-*.safetensors", "state-*.safetensors", "*.new"):
            for path in self.path.glob(pattern):
                if path.name not in named:
                    with contextlib.suppress(OSError):  # it is in nobody's way
                        path.unlink(missing_ok=True)

    def _write(self, name: str, data: bytes) -> str:
        """Put `data` in place as a whole or not at all; its SHA-256."""
        with _writing(self.path):
            write_whole(self.path / name, data)
            _flush(self.path)
        return _sha256(data)

    def _read(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise RunError(f"{self.path / name} cannot be read: {error.strerror}.") from error

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            return json.loads(self._read(name))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise RunError(f"{self.path / name} is damaged: it is not JSON ({error}).") from error


@dataclass(frozen=True)
class Comparison:
    """A table of perplexities: the text that it is on, test or valid, and a `comparison_row` for each model."""

    on: str
    rows: tuple[dict[str, Any], ...]


def comparison_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """What is shown of a row of a comparison, in numbers that are numbers; None for those that are not finite."""
    ledger = row["ledger"]
    names = ("nll", "perplexity", "nats_per_token", "bits_per_character")
    figures: dict[str, Any] = {"tokens": int(ledger["tokens"]), "unit": str(ledger["unit"])}
    figures |= {name: None if ledger[name] is None else float(ledger[name]) for name in names}
    return {"name": str(row["name"]), "parameters": int(row["parameters"]), "ledger": figures}


def baselines(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What a learning curve is shown beside, in nats per token: the runs compared, the networks, the best n-gram."""
    nats = {row["name"]: row["ledger"]["nats_per_token"] for row in rows}
    known = {name: value for name, value in nats.items() if value is not None}
    tables = [name for name in known if name.endswith("gram")]
    worse = {"uniform", *sorted(tables, key=known.__getitem__)[1:]}
    return {name: value for name, value in known.items() if name not in worse}


def _flush(folder: Path) -> None:
    """Let the renaming itself reach the disk."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Say in one sentence what kept us from writing."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise RunError(
                f"no space is left on the disk of {path}. Free some, then --resume if there is a checkpoint."
            ) from error
        raise RunError(f"{path} cannot be written: {error.strerror}. Choose another place with --out.") from error


def _json(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, indent=1, ensure_ascii=False).encode() + b"\n"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _version() -> str:
    try:
        return version("loopfold")
    except PackageNotFoundError:  # run from its source, not installed
        return "not installed"
