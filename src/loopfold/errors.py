"""Errors that the user can mend. Messages name arguments, which Python and the command line spell differently.

>>> error = OptionError("device 'gpu' cannot be used. Use ", Argument("device", "cpu"), ".")
>>> print(error)
device 'gpu' cannot be used. Use device='cpu'.
>>> [*error.args]  # what the command line spells as --device cpu
["device 'gpu' cannot be used. Use ", Argument(name='device', value='cpu'), '.']
"""

from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True)
class Argument:
    """An argument of a function, or a function: its name, and the value to give it; None where that is open."""

    name: str
    value: object = None

    def __str__(self) -> str:
        return self.name if self.value is None else f"{self.name}={self.value!r}"


@dataclass(frozen=True)
class Spelt:
    """Words of a message for someone who writes Python, and the same for someone who types commands."""

    python: str
    typed: tuple[object, ...]  # text, and an `Argument` for each flag

    def __str__(self) -> str:
        return self.python


class Mendable(Exception):
    """An error whose message is its `args` joined: text, and an `Argument` for each one that it names."""

    def __str__(self) -> str:
        return "".join(map(str, self.args))


class OptionError(Mendable, ValueError):
    """A choice that is not possible; the message says what is."""


def choose(what: str, name: str, known: tuple[str, ...]) -> str:
    """`name`, if it is one of those known; else an error that suggests the nearest."""
    if name not in known:
        close = get_close_matches(name.lower(), known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise OptionError(f"there is no {what} {name!r}; choose from {', '.join(known)}.{hint}")
    return name
