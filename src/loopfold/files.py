"""A file is written completely or not at all; only plain files are opened, at the place that was named."""

import contextlib
import os
import stat
from pathlib import Path
from secrets import token_hex
from typing import IO, Any


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


def open_plain(path: Path, mode: str) -> IO[Any]:
    """Open an existing plain file: not a link that leads elsewhere, not a pipe that would have to be waited for."""
    kind = os.lstat(path).st_mode
    if not stat.S_ISREG(kind):
        what = "a symbolic link" if stat.S_ISLNK(kind) else "not a plain file"
        raise OSError(0, f"it is {what}, and Loopfold opens only plain files here: put the file itself there")
    extra = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # it may have been replaced this very moment
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | extra))
