"""A file is written completely or not at all; only plain files are opened, at the place that was named; archives."""

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from secrets import token_hex
from typing import IO, Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from loopfold.errors import Argument, OptionError


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file at once, on the disk: no reader sees half of it, and if this fails the old one stays."""
    new = path.with_name(f"{path.name}.{token_hex(4)}.new")  # its own, should another process write the same file
    try:
        with new.open("xb") as file:  # never through a link that someone has put there
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except FileExistsError:  # it is not ours
        raise
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def check_place(path: Path, example: str, place: str = "out") -> None:
    """Before the work that a file takes: that it can be written there. `place` is the argument that says where."""
    elsewhere = "Choose another place with ", Argument(place), "."
    try:
        if path.is_dir():
            raise OptionError(f"{path} is a folder: name a file, such as {path / example}.")
        if not path.parent.is_dir():
            if path.parent.exists():
                raise OptionError(f"{path} cannot be written: {path.parent} is no folder. ", *elsewhere)
            missing = f"{path} cannot be written: there is no folder {path.parent}. Make it, or choose another "
            raise OptionError(missing, Argument(place), ".")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise OptionError(f"{path} cannot be written: Permission denied. ", *elsewhere)
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        raise OptionError(f"{path} cannot be written: {error.strerror}. ", *elsewhere) from error


def cache_folder() -> Path:
    """Where to keep what can be made again: `LOOPFOLD_CACHE`, or a folder among the user's caches."""
    own, base = os.environ.get("LOOPFOLD_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    return (Path(base) if base else Path.home() / ".cache") / "loopfold"


def open_plain(path: Path, mode: str) -> IO[Any]:
    """Open an existing plain file: not a link that leads elsewhere, not a pipe that would have to be waited for."""
    kind = os.lstat(path).st_mode
    if not stat.S_ISREG(kind):
        what = "a symbolic link" if stat.S_ISLNK(kind) else "not a plain file"
        raise OSError(0, f"it is {what}, and Loopfold opens only plain files here: put the file itself there")
    extra = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # it may have been replaced this very moment
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | extra))


def source_of(path: Path) -> bytes:
    """The bytes of a file of code, which may be in an archive: `run.loopfold/cell.py`."""
    return read_member(path.parent, path.name) if path.parent.is_file() else path.read_bytes()


# ------------------------------------------------------------------ archives


def members(path: Path) -> list[str]:
    """The names of the files in an archive; ValueError where it is none."""
    with _archive(path) as archive:
        return archive.namelist()


def read_member(path: Path, name: str) -> bytes:
    """A file of an archive, in memory: nothing is unpacked anywhere. ValueError where that cannot be."""
    with _archive(path) as archive:
        return archive.read(name)


@contextlib.contextmanager
def _archive(path: Path) -> Iterator[ZipFile]:
    """A zip file as `archive` makes it: every file once, as it is, one after the other, and nothing else.

    So none is larger than the archive itself, and whatever program reads it finds the same files.
    """
    try:
        with open_plain(path, "rb") as file, ZipFile(file) as archive:
            size = os.fstat(file.fileno()).st_size
            entries = archive.infolist()
            if len({entry.filename for entry in entries}) < len(entries):
                raise ValueError("it has two files of one name")
            for entry in entries:
                if entry.compress_type != ZIP_STORED or entry.flag_bits & 1 or entry.file_size != entry.compress_size:
                    raise ValueError("a file in it is compressed or encrypted")
                if entry.file_size > size:
                    raise ValueError("a file in it is larger than itself")
            place = 0
            for entry in entries:
                if entry.header_offset != place or entry.comment or entry.extra:
                    raise ValueError("it holds something beside its files")
                place += 30 + len(entry.filename.encode()) + entry.file_size
            names = sum(len(entry.filename.encode()) for entry in entries)
            if archive.comment or place != archive.start_dir or place + 46 * len(entries) + names + 22 != size:
                raise ValueError("it holds something beside its files")
            yield archive
    except (OSError, ValueError):
        raise
    except BadZipFile as error:
        raise ValueError("it is cut off, or was never one") from error
    except Exception as error:  # the library has many
        raise ValueError(str(error).strip("'\"") or "it ends too soon") from error


def archive(files: Mapping[str, bytes]) -> bytes:
    """Files as one such archive; the same files make the same bytes."""
    written = BytesIO()
    with ZipFile(written, "w", ZIP_STORED) as new:
        for name, data in files.items():
            new.writestr(ZipInfo(name), data)
    return written.getvalue()
