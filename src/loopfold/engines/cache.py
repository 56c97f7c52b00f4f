"""Compiled kernels on disk: in `LOOPFOLD_CACHE`, or in the user's cache folder."""

import hashlib
import logging
import tempfile
from functools import cache
from pathlib import Path

from loopfold.files import cache_folder

_log = logging.getLogger("loopfold")


def key_of(*parts: str) -> str:
    """The name of a kernel that these parts decide."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def read(key: str) -> bytes | None:
    """What was kept under `key`, if it is there and whole."""
    try:
        data = (cache_folder() / f"{key}.kernel").read_bytes()
    except (OSError, RuntimeError):  # no such file, or no home
        return None
    image, digest = data[:-32], data[-32:]
    return image if hashlib.sha256(image).digest() == digest else None  # a damaged file is compiled again


def write(key: str, image: bytes) -> None:
    """Keep `image`, as a whole or not at all."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            file = Path(beside, key)
            file.write_bytes(image + hashlib.sha256(image).digest())
            file.replace(folder / f"{key}.kernel")
    except (OSError, RuntimeError) as error:
        _warn(str(error))


@cache
def _warn(error: str) -> None:
    """Once, not for every kernel."""
    _log.warning("compiled kernels cannot be kept: %s", error)


def tell(name: str, seconds: float) -> None:
    """Say that a kernel was compiled; a short wait is not worth a warning."""
    level = logging.WARNING if seconds > 1 else logging.INFO
    _log.log(level, "compiled %s in %.2f s; it is kept for next time", name, seconds)
