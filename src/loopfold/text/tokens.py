"""A text as numbers: in memory or, of a long text, in a token file, which is made once and mapped into memory.

Token files are in the folder `tokens` of the cache (`LOOPFOLD_CACHE`, or the user's cache folder), each under a name
that follows from the text and the vocabulary. Nothing needs them: one that is missing or damaged is made again. Where
they take more than 20 GB, those go first that were used longest ago, but none that was used today. A file is

    the ids, in the smallest integers that hold the vocabulary (uint8, uint16 or int32, little-endian)
    a line of JSON: how many they are, and what a ledger counts
    the length of that line, as 8 bytes, and the SHA-256 of all before it, as 32
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopfold.files import cache_folder

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

KEPT = 20 * 10**9  # bytes of token files
_DAY = 86400.0  # seconds
_READ = 1 << 20
_END = 8 + 32

_log = logging.getLogger("loopfold")


@dataclass(frozen=True, eq=False)
class Tokens:
    """A text as numbers, and what is needed to compare losses per token, per character and per byte.

    >>> from loopfold import Words
    >>> tokens = Words(("good", "day")).encode("  good   morning")
    >>> tokens.ids.tolist(), tokens.unknown, tokens.characters  # of "good morning" and the end of a line
    ([2, 0, 1], 1, 13)
    """

    ids: Tensor  # [n] int64; of a long text uint8, uint16 or int32, in a file that is mapped into memory
    unit: str
    characters: int  # of the text that the tokens stand for
    bytes: int  # the same in UTF-8
    unknown: int  # how many ids stand for something unknown

    def __len__(self) -> int:
        return len(self.ids)


class Encoded(NamedTuple):
    """One piece of a text, as in `Tokens`."""

    ids: NDArray[Any]
    characters: int
    bytes: int
    unknown: int


def smallest(size: int) -> np.dtype[Any]:
    """The integers that a token file has for a vocabulary of some size."""
    return np.dtype(np.uint8 if size <= 1 << 8 else np.uint16 if size <= 1 << 16 else np.int32)


def in_memory(unit: str, pieces: Iterator[Encoded], dtype: Any = np.int64) -> Tokens:
    ids, counts = [np.empty(0, dtype)], np.zeros(3, np.int64)
    for piece in pieces:
        ids.append(piece.ids)
        counts += piece[1:]
    joined = np.concatenate(ids, dtype=dtype, casting="unsafe")  # unsafe: from int64 to what holds every id
    return Tokens(torch.from_numpy(joined), unit, *counts.tolist())


def in_file(name: str, unit: str, size: int, pieces: Callable[[], Iterator[Encoded]]) -> Tokens:
    """The tokens of the file `name`, made from `pieces` unless it is there; ids are below `size`."""
    dtype = smallest(size)
    try:
        path = cache_folder() / "tokens" / f"{name}.tokens"
        found = _read(path, unit, dtype, size)
        if found is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _sweep(path.parent)
            _write(path, unit, dtype, pieces())
            found = _read(path, unit, dtype, size)
        _sweep(path.parent)
        if found is not None:
            return found
        reason = "it was damaged as soon as it was written"
    except (OSError, RuntimeError) as error:  # a full disk, a folder that may not be written, or no home
        reason = str(error)
    _log.warning("the tokens of a long text are kept in memory, since their file cannot be: %s", reason)
    return in_memory(unit, pieces(), dtype)


def _write(path: Path, unit: str, dtype: np.dtype[Any], pieces: Iterator[Encoded]) -> None:
    """All of the file or nothing, as of two processes at a time each writes its own."""
    new, digest, count, counts = path.with_name(f"{path.stem}.{token_hex(4)}.new"), sha256(), 0, [0, 0, 0]
    try:
        with new.open("xb") as file:
            _locked(file)  # until this process ends, however it ends

            def write(data: bytes) -> None:
                file.write(data)
                digest.update(data)

            for piece in pieces:
                write(piece.ids.astype(dtype.newbyteorder("<"), copy=False).tobytes())
                count += len(piece.ids)
                counts = [a + b for a, b in zip(counts, piece[1:], strict=True)]
            about = dict(zip(("unit", "tokens", "characters", "bytes", "unknown"), (unit, count, *counts), strict=True))
            line = json.dumps(about).encode()
            write(line)
            write(len(line).to_bytes(8, "little"))
            file.write(digest.digest())  # and no fsync: what a crash has torn is found by this
        os.replace(new, path)
    except BaseException:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def _read(path: Path, unit: str, dtype: np.dtype[Any], size: int) -> Tokens | None:
    """What is in a token file; None where it is missing, not whole or not of a vocabulary of `size`."""
    try:
        with path.open("rb") as file:
            about = _about(file, dtype.newbyteorder("<"), size)
            if about is None:
                _log.warning("%s is damaged and is made again", path)
                return None
            with suppress(OSError):
                os.utime(path)  # it was used
            n = about["tokens"]
            ids = np.memmap(file, dtype, mode="c", shape=(n,)) if n else np.empty(0, dtype)
    except FileNotFoundError:
        return None
    if sys.byteorder == "big":
        ids = ids.byteswap()
    return Tokens(torch.from_numpy(ids), unit, about["characters"], about["bytes"], about["unknown"])


def _about(file: IO[bytes], dtype: np.dtype[Any], below: int) -> dict[str, int] | None:
    """What a file says of its tokens, if it is whole and all of them are `below` so much: it may come from anyone.

    It is read in pieces: a map of it would count as memory.
    """
    size = os.fstat(file.fileno()).st_size
    if size < _END:
        return None
    file.seek(size - _END)
    length, needed = int.from_bytes(file.read(8), "little"), file.read()
    if length > size - _END:
        return None
    file.seek(size - _END - length)
    try:
        found = json.loads(file.read(length))
        about = {name: found[name] for name in ("tokens", "characters", "bytes", "unknown")}
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    if not all(type(count) is int and count >= 0 for count in about.values()):
        return None
    ids = about["tokens"] * dtype.itemsize
    if ids + length + _END != size:
        return None
    digest, at = sha256(), 0
    file.seek(0)
    while at < size - 32 and (data := file.read(min(size - 32 - at, _READ))):
        digest.update(data)
        part = np.frombuffer(data[: max(ids - at, 0)], dtype)
        if len(part) and not 0 <= int(part.min()) <= int(part.max()) < below:
            return None
        at += len(data)
    return about if digest.digest() == needed else None


def _sweep(folder: Path) -> None:
    """Remove what was used longest ago, where there is too much, and what a process that was stopped has left."""
    found, total = [], 0
    with suppress(OSError):  # a folder that may not be listed
        for file in folder.iterdir():
            with suppress(OSError):  # another process has removed it
                found.append((file.stat(), file))
    for about, file in sorted(found, key=lambda f: -f[0].st_mtime):
        total += about.st_size
        age = time.time() - about.st_mtime
        with suppress(OSError):
            left = file.suffix == ".new" and (age > _DAY or (age > 1 and _is_left(file)))  # 1: until it is locked
            if left or (age > _DAY and total > KEPT):
                file.unlink()


def _is_left(path: Path) -> bool:
    """Whether no process writes a file any more; False where the system cannot tell."""
    with path.open("rb") as file:
        return _locked(file, shared=True)


def _locked(file: IO[bytes], shared: bool = False) -> bool:
    """Lock a file until it is closed, if no one else has."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:  # another process has, or the file system has no locks
        return False
    return True
