"""Whose code may run: cells that this user has trained with, or has said to trust, known by their SHA-256.

A run folder may come from anyone, and one with a cell of its own runs that cell's code when it is opened. So such a
folder is opened only with a word from the user, who is asked once for each content of a `cell.py`:

    ~/.config/loopfold/trusted/3f5a…    an empty file for each; remove it to be asked again
"""

import contextlib
import os
from pathlib import Path


def is_trusted(digest: str) -> bool:
    """Whether code of this SHA-256 is known."""
    try:
        return (_folder() / digest).is_file()
    except (OSError, RuntimeError):  # it may not be read, or there is no home
        return False


def remember(digest: str) -> None:
    """Remember code of this SHA-256; where that cannot be stored, the user is asked again."""
    with contextlib.suppress(OSError, RuntimeError):
        _folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        (_folder() / digest).touch()


def _folder() -> Path:
    own, base = os.environ.get("LOOPFOLD_CONFIG"), os.environ.get("XDG_CONFIG_HOME")
    return (Path(own) if own else (Path(base) if base else Path.home() / ".config") / "loopfold") / "trusted"
