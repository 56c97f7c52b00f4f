"""A run in one file, to be sent to someone: all that reading it needs, and nothing that only training needs.

The file is a zip archive of files of the run folder, byte for byte and under their own names: `config.json`,
`vocabulary.json`, `metrics.jsonl`, `checkpoint.json`, the weights of the best step; `cell.py` and `comparison.json`
where the run has them. So it is read and checked as a folder is, every zip program shows what is in it, and unpacked it
is a run folder again. Nothing is compressed, since weights hardly shrink: no file in it is larger than the archive.
The text is not in it; who has that too names its place.
"""

from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from loopfold.files import archive, check_place, members, read_member, write_whole
from loopfold.training import contents
from loopfold.training.folder import ELSEWHERE, OUT, RunFolder
from loopfold.training.stored import PACKED, RunError, StoredRun, modified, steadily

_NAMES = (*contents.FIXED, "checkpoint.json", contents.METRICS, contents.COMPARISON, "cell.py")


class PackedRun(StoredRun):
    """A run in one file, as `pack_run` makes it."""

    @staticmethod
    def find(path: Path) -> "PackedRun":
        """The run in a file, of which only the names are checked yet."""
        packed = PackedRun(path)
        names = packed._names()
        for name in names:
            if name not in _NAMES and not contents.is_of_tensors(name):
                raise RunError(f"{path} is not a packed run: no run has a file {contents.shown(name)}.")
        for name in ("config.json", "checkpoint.json"):
            if name not in names:
                raise RunError(f"{path} is not a packed run: it has no {name}.")
        return packed

    def _names(self) -> list[str]:
        try:
            return members(self.path)
        except ValueError as error:
            if self.path.suffix != PACKED:
                raise RunError(
                    f"{self.path} is neither a run folder nor a packed run: name a folder that loopfold train made, or "
                    f"a file that loopfold pack made, whose name ends in {PACKED}."
                ) from error
            raise RunError(
                f"{self.path} is not a packed run, or is damaged: {str(error).rstrip('.')}. Name a run folder, or a "
                "file that loopfold pack made."
            ) from error
        except OSError as error:
            raise RunError(f"{self.path} cannot be read: {error.strerror or error}.") from error

    def holds(self, name: str) -> bool:
        return name in self._names()

    def read(self, name: str) -> bytes:
        try:
            return read_member(self.path, name)
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path / name} is damaged: {str(error).rstrip('.')}.") from error

    def shown(self, name: str) -> str:
        return f"{name} of {self.path} (type unzip -p {quote(str(self.path))} {name} to see it)"

    def beside(self, name: str) -> Path:
        return self.path.with_name(f"{self.path.stem}-{name}")

    def write_json(self, name: str, data: Mapping[str, Any]) -> None:
        raise RunError(f"{self.path} is a packed run, and nothing is written into it")

    @property
    def training(self) -> bool:
        return False

    @property
    def saved_at(self) -> float:
        return modified(self.path)


def find_run(path: Path) -> StoredRun:
    """The run in a folder or in a file, not checked yet."""
    return PackedRun.find(path) if path.is_file() else RunFolder.find(path)


def pack_run(path: str | Path, out: str | Path | None = None) -> Path:
    """Pack a run folder into one small file, which `open_run` and all commands that read a run take in its place.

    `out`  the file, whose name ends in .loopfold; beside the folder by default. A packed run that is there is replaced
    """
    path = Path(path)
    if path.is_file():
        raise RunError(f"{path} is a file: name a run folder to pack.")
    folder = RunFolder.find(path)
    named = path if path.name not in ("", "..") else path.resolve()
    target = named.with_name(named.name + PACKED) if out is None else Path(out)
    _check_target(target)
    data = archive(steadily(folder, lambda: _files(folder)))
    try:
        write_whole(target, data)
    except OSError as error:
        raise RunError(f"{target} cannot be written: {error.strerror or error}. ", *ELSEWHERE) from error
    return target


def _files(folder: RunFolder) -> dict[str, bytes]:
    """What belongs in the file, each checked."""
    own = ["cell.py"] if ":" in folder.options.cell else []
    checkpoint = folder.read("checkpoint.json")
    names = [*contents.FIXED, *own, contents.METRICS, folder.checkpoint["best"]]
    folder.check(*names)
    found = {"checkpoint.json": checkpoint} | {name: folder.read(name) for name in names}
    found[contents.METRICS] = found[contents.METRICS][: folder.checkpoint["metrics_bytes"]]
    compared = folder.result(contents.COMPARISON)
    if folder.read("checkpoint.json") != checkpoint:
        raise RunError(f"{folder.path} is training, and is saved too often to be packed: wait for it.")
    return found if compared is None else found | {contents.COMPARISON: compared}


def _check_target(target: Path) -> None:
    """Before the work: replace nothing but a packed run."""
    if target.suffix != PACKED:
        raise RunError(f"the name of a packed run ends in {PACKED}; got {target.name}. Choose another ", OUT, ".")
    if target.is_dir() or (target.exists() and not target.is_file()):
        raise RunError(f"{target} is there already and is no file: choose another ", OUT, ".")
    if target.is_file():
        try:
            PackedRun.find(target)
        except RunError as error:
            raise RunError(
                f"{target} is there already and is not a packed run, so it is not replaced: choose another ", OUT, "."
            ) from error
    check_place(target, f"run{PACKED}")
