"""What typer has to say of a command that is not typed right, in one sentence that says what to type."""

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import typer

NOT_FINITE, TOO_LONG = "not finite", "too long"  # what our own check says, beside those of typer

# What is said of a value, and what was needed.
NEEDED = {
    NOT_FINITE: "a finite number",
    TOO_LONG: "a number that fits in 64 bits",
    r"valid string": "text in UTF-8",
    r"valid number": "a number",
    r"valid integer": "a whole number",
    r"greater than or equal to (\S+)": r"a number of at least \1",
    r"less than or equal to (\S+)": r"a number of at most \1",
    r"greater than (\S+)": r"a number above \1",
    r"less than (\S+)": r"a number below \1",
}


def usage(error: typer.TyperException, typed: Sequence[str]) -> str:
    """One sentence on what is wrong with the words that were typed after `loopfold`."""
    said, details = error.format_message().rstrip("."), vars(error)
    context = details.get("ctx")
    path = getattr(context, "command_path", "loopfold")
    more = f"Type {path} --help to see what it takes."
    if parameter := details.get("param"):
        name = next((o for o in parameter.opts if o.startswith("--")), parameter.name.upper())
        if said.startswith("Missing"):
            return f"{name} is missing. {more}"
        return needed(name, _value(parameter.opts, typed), said)
    if "option_name" in details:
        name, close = details["option_name"], details.get("possibilities")
        if said.startswith("No such option"):
            hint = f"Did you mean {close[0]}?" if close else more
            return f"{path} has no option {name}. {hint}"
        return f"{name} needs a value after it." if "requires" in said else f"{name} takes no value: leave it out."
    if found := re.match(r"Got unexpected extra argument\(s\) \((.*)\)$", said, re.DOTALL):
        return f"{path} takes no more arguments, and got {found[1]!r}; a flag may be missing before it. {more}"
    if found := re.match(r"No such command (.+?)(?:\. (Did you mean .*))?$", said, re.DOTALL):
        return f"there is no command {found[1]}. {found[2] or 'Type loopfold --help to see all.'}"
    return f"{said}. {more}"


def _value(names: Sequence[str], typed: Sequence[str]) -> str | None:
    """What was typed for an option, the last time."""
    found = None
    for word, after in zip(typed, [*typed[1:], None], strict=True):
        name, equals, value = word.partition("=")
        if name in names:
            found = value if equals else after
    return found


def needed(name: str, value: str | None, said: str) -> str:
    """What a flag needed, where typer says this of its value."""
    for pattern, words in NEEDED.items():
        if match := re.search(pattern, said):
            got = "" if value is None else f"; got {value!r}"
            return f"{name} needs {match.expand(words)}{got}.{_meant(value or '', 'whole' in words)}"
    return f"{name}: {said.partition(': ')[2] or said}."


def _meant(value: str, whole: bool) -> str:
    """A number that was written with a comma, or a whole one with a point or a power."""
    guess: Any = None
    with suppress(ValueError, OverflowError):
        if not whole and "," in value:
            guess = float(value.replace(",", ".") if value.count(",") == 1 else value.replace(",", ""))
        elif whole and re.fullmatch(r"\d{1,3}(,\d{3})+", value):
            guess = int(value.replace(",", ""))
        elif whole and float(value).is_integer() and abs(float(value)) < 1 << 53:
            guess = int(float(value))
    return "" if guess is None or str(guess) == value else f" Did you mean {guess}?"
