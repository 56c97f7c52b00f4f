"""A file is written as a whole or not at all."""

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Put `data` in place at once, on the disk: nobody sees half of it, and what was there stays if this fails."""
    new = path.with_name(f"{path.name}.{os.getpid()}.new")  # its own, should another process write the same file
    try:
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
