"""The run folder: everything about a run, in JSON and safetensors, complete at every moment.

    config.json                 options, versions, the corpus and its checksum
    vocabulary.json
    cell.py                     the user's own cell, where the run has one
    stdin.txt                   the text, where it came from standard input
    metrics.jsonl               a line for every entry of the learning curve
    weights-1200.safetensors    the model after 1,200 steps, or the mean up to there; also the one that was best on the
                                valid text
    state-1200.safetensors      the optimiser, and the state carried from window to window; where weights are averaged,
                                their sums and the last ones
    checkpoint.json             which of these files belong together, and the SHA-256 of each; options that have
                                changed since the run began
    comparison.json, baselines  what a comparison found and trained

A file is written under another name, flushed to the disk and then renamed. `checkpoint.json` is written last: until
then the one before it counts, with all its files. So a run can be killed at any moment and resumed from the last
checkpoint, and a damaged file is found and named.

One process at a time trains in a folder, and locks it from before its first write until it ends. Others may read.
What is read is checked, since a folder may come from anyone: every file is a plain file in the folder itself, with a
name that a run uses. Whether its `cell.py` may be run is decided in `trust.py`.
"""

import contextlib
import errno
import os
import platform
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopfold.errors import Argument
from loopfold.files import open_plain, source_of, write_whole
from loopfold.text.corpus import read_text
from loopfold.training import contents
from loopfold.training.options import Options
from loopfold.training.stored import FORMAT, PACKED, RunError, StoredRun, modified, own_version, sha256

if TYPE_CHECKING:
    from torch import Tensor

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

OUT, RESUME = Argument("out"), Argument("resume")
ELSEWHERE = ("Choose another place with ", OUT, ".")


class Taken(RunError):
    """A folder for a new run that another process is using, or that has something in it."""


class RunFolder(StoredRun):
    """A run in a folder of its own. `create` begins one, `open` finds one."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._held: os.stat_result | None = None  # the folder that is locked

    # ---------------------------------------------------------------- the beginning

    @staticmethod
    @contextlib.contextmanager
    def create(
        path: Path,
        options: Options,
        corpus: Mapping[str, Any],
        vocabulary: Mapping[str, Any],
        progress: Mapping[str, Any],
        weights: "dict[str, Tensor]",
        came_from: Mapping[str, Any] | None = None,
    ) -> Iterator["RunFolder"]:
        """A new folder with a checkpoint of step 0, locked while open. Nothing that exists already is overwritten."""
        import torch

        folder = RunFolder(path)
        with _writing(path):
            try:
                path.mkdir(parents=True)
                made = True
            except FileExistsError:  # an empty folder is as good
                made = False
            if not path.is_dir():
                if not os.path.lexists(path):
                    raise RunError(f"{path} cannot be made: {path.parent} is not a folder. ", *ELSEWHERE)
                raise Taken(f"{path} exists already: choose another ", OUT, ", or remove it.")
        with folder.locked():
            folder._claim()
            try:
                if ":" in options.cell:
                    folder._write("cell.py", source_of(Path(options.cell.rpartition(":")[0])))
                if "-" in options.texts:
                    folder._write("stdin.txt", read_text(["-"]).encode())
                folder._write("vocabulary.json", contents.to_json(vocabulary))
                config = {
                    "format": FORMAT,
                    "options": options.as_json(),
                    "corpus": dict(corpus),
                    "versions": {
                        "loopfold": own_version(),
                        "torch": torch.__version__,
                        "python": platform.python_version(),
                    },
                } | ({} if came_from is None else {"from": dict(came_from)})
                folder._write("config.json", contents.to_json(config))
                folder._write(contents.METRICS, b"")
                folder.save(0, progress, weights, {}, best=True)
            except BaseException:
                folder._remove(made)
                raise
            yield folder

    def check_free(self) -> None:
        """Refuse to begin a run where something is already."""
        with _writing(self.path):
            taken = os.path.lexists(self.path) and (not self.path.is_dir() or any(self.path.iterdir()))
        if taken:
            raise self._taken()

    def _taken(self) -> Taken:
        word = RESUME if (self.path / "checkpoint.json").exists() else "remove"
        return Taken(f"{self.path} exists already: choose another ", OUT, ", or ", word, " it.")

    def _claim(self) -> None:
        """Make the folder ours, or refuse. Of two processes only one makes this file, with or without locks."""
        self.check_free()
        with _writing(self.path):
            try:
                (self.path / "config.json").touch(exist_ok=False)
            except FileExistsError as error:
                raise self._taken() from error

    def _remove(self, made: bool) -> None:
        """Take back what `create` has written, and nothing else."""
        names = (*contents.FIXED, *contents.SOMETIMES, contents.METRICS, "weights-0.safetensors", "state-0.safetensors")
        with contextlib.suppress(RunError), self._ours():
            for name in ("checkpoint.json", *names):
                with contextlib.suppress(OSError):
                    (self.path / name).unlink()
            if made:
                self.path.rmdir()  # unless someone has put something there

    @staticmethod
    def find(path: Path) -> "RunFolder":
        """The run at `path`, not checked yet. Its options may be read without the lock."""
        folder = RunFolder(path)
        try:
            if path.suffix == PACKED and path.is_file():
                raise RunError(f"{path} is a packed run, which can be read but not trained: name its folder.")
            if path.is_file():
                raise RunError(f"{path} is a file, not a run folder: name the folder that `loopfold train` made.")
            if not path.is_dir():
                raise RunError(f"there is no run folder {path}. `loopfold train` makes one and says where.")
            os.lstat(path / "config.json")
        except FileNotFoundError as error:
            inside = sorted(below.parent for below in path.glob("*/config.json"))
            such = [f" Name one of the runs in it, such as {run}: `loopfold list {path}` shows them." for run in inside]
            raise RunError(f"{path} is not a run folder: it has no config.json.{''.join(such[:1])}") from error
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror}.") from error
        if not os.path.lexists(path / "checkpoint.json"):
            raise RunError(
                f"{path} has no checkpoint.json: the run ended before its first step, or it was not copied with the "
                "rest. Copy it too, or start again."
            )
        return folder

    @staticmethod
    def open(path: Path) -> "RunFolder":
        """The run at `path`, with all its files checked."""
        folder = RunFolder.find(path)
        options = folder.options
        needed = ["cell.py"] if ":" in options.cell else []
        if str(path / "stdin.txt") in options.texts:
            needed.append("stdin.txt")
        folder.check(*needed, *folder.checkpoint["files"])
        return folder

    # ---------------------------------------------------------------- what it holds

    def holds(self, name: str) -> bool:
        return os.path.lexists(self.path / name)

    def read(self, name: str) -> bytes:
        try:
            with open_plain(self.path / name, "rb") as file:
                return file.read()
        except OSError as error:
            raise RunError(f"{self.path / name} cannot be read: {error.strerror}.") from error

    def shown(self, name: str) -> str:
        return str(self.path / name)

    def beside(self, name: str) -> Path:
        return self.below(name)

    @property
    def training(self) -> bool:
        if fcntl is None:
            return False
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        finally:
            os.close(descriptor)
        return False

    @property
    def saved_at(self) -> float:
        return modified(self.path / "checkpoint.json")

    # ---------------------------------------------------------------- going on

    def log(self, entry: Mapping[str, Any]) -> None:
        """Add a line to the learning curve. It counts once a checkpoint has followed."""
        with self._ours(), open_plain(self.path / contents.METRICS, "ab") as file:
            file.write(contents.to_line(entry))
            file.flush()
            os.fsync(file.fileno())  # a checkpoint that counts it must not reach the disk first

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """While open, no other process trains here. The lock ends with the process, however that ends."""
        if fcntl is None:
            yield
            return
        with _writing(self.path):
            descriptor = os.open(self.path, os.O_RDONLY)
        try:
            try:
                _lock(descriptor)
            except BlockingIOError as error:
                raise Taken(f"another process is training in {self.path}: wait for it, or stop it.") from error
            except OSError:  # a file system without locks
                pass
            self._held = os.fstat(descriptor)
            with self._ours():
                pass
            yield
        finally:
            self._held = None
            os.close(descriptor)

    @contextlib.contextmanager
    def _ours(self) -> Iterator[None]:
        """Write to the folder if it is still the one that was locked: another run may have been put in its place."""
        with _writing(self.path):
            if self._held is not None and not os.path.samestat(self._held, os.stat(self.path)):
                raise RunError(f"{self.path} was removed or replaced while this process was training in it.")
            yield

    def rewind(self) -> None:
        """Forget what was logged after the last checkpoint, and files that no checkpoint names."""
        size = self.checkpoint["metrics_bytes"]
        with self._ours(), open_plain(self.path / contents.METRICS, "r+b") as file:
            file.truncate(size)
        self._sweep()

    def save(
        self,
        step: int,
        progress: Mapping[str, Any],
        weights: "dict[str, Tensor]",
        state: "dict[str, Tensor]",
        best: bool,
    ) -> None:
        """Make `step` the checkpoint to resume from; `best`: its weights are the best so far."""
        from safetensors.torch import save

        with self._ours():
            before = self.checkpoint if (self.path / "checkpoint.json").exists() else {}
            fixed = [n for n in (*contents.FIXED, *contents.SOMETIMES) if (self.path / n).exists()]
        weights_name, state_name = f"weights-{step}.safetensors", f"state-{step}.safetensors"
        best_name = weights_name if best or not before else before["best"]
        digests = {
            weights_name: self._write(weights_name, save(weights)),
            state_name: self._write(state_name, save(state)),
        }
        if best_name != weights_name:
            digests[best_name] = before["files"][best_name]
        for name in fixed:
            if not before or name in before["files"]:
                digests[name] = before["files"][name] if before else sha256(self.read(name))
        metrics = self.read(contents.METRICS)
        digests[contents.METRICS] = sha256(metrics)
        checkpoint = {
            "step": step,
            "progress": dict(progress),
            "weights": weights_name,
            "best": best_name,
            "state": state_name,
            "metrics_bytes": len(metrics),
            "files": digests,
        }
        self._point_to(checkpoint | {name: before[name] for name in ("changes",) if name in before})
        self._sweep()

    def change(self, changes: Mapping[str, Any]) -> None:
        """From now on these options have other values than when the run began."""
        checkpoint = self.checkpoint
        self._point_to(checkpoint | {"changes": checkpoint.get("changes", {}) | dict(changes)})

    def _point_to(self, checkpoint: Mapping[str, Any]) -> None:
        """Make this the checkpoint that counts."""
        own = sha256(contents.to_json(checkpoint))
        self._write("checkpoint.json", contents.to_json({**checkpoint, "sha256": own}))

    def write_json(self, name: str, data: Mapping[str, Any]) -> None:
        self._write(name, contents.to_json(data))

    def below(self, *names: str) -> Path:
        """A place for results in the folder; links would lead out of it."""
        path = self.path
        for name in names:
            path /= name
            if path.is_symlink():
                raise RunError(f"{path} is a symbolic link, and results of a run stay in its folder: remove it.")
        return path

    # ---------------------------------------------------------------- bytes

    def _sweep(self) -> None:
        """Remove the tensors that no checkpoint names, and checkpoints that a killed process was writing."""
        named = self.checkpoint["files"]
        with self._ours():
            for pattern in ("weights-*.safetensors*", "state-*.safetensors*", "checkpoint.json.*.new"):
                for path in self.path.glob(pattern):
                    if path.name not in named:
                        with contextlib.suppress(OSError):  # it does no harm there
                            path.unlink(missing_ok=True)

    def _write(self, name: str, data: bytes) -> str:
        """Put `data` in place as a whole or not at all; its SHA-256."""
        with self._ours():
            write_whole(self.path / name, data)
            _flush(self.path)
        return sha256(data)


def _lock(descriptor: int) -> None:
    """Again after a moment: whoever looks whether a run is training holds its lock for as long as that takes."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(0.01)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _flush(folder: Path) -> None:
    """Make sure that the renaming itself reaches the disk."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Say in one sentence why nothing could be written."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            space = f"no space is left on the disk of {path}. Free some, then "
            raise RunError(space, RESUME, " if there is a checkpoint.") from error
        there = os.path.exists(path / "checkpoint.json")  # a run that goes on cannot be put elsewhere by a word
        advice = ("Make it writable, or copy it to where you may write.",) if there else ELSEWHERE
        raise RunError(f"{path} cannot be written: {error.strerror}. ", *advice) from error
