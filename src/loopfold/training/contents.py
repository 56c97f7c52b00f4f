"""What the JSON files of a run folder must hold, else ValueError: they may come from anyone, so all is checked."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

METRICS = "metrics.jsonl"
FIXED = ("config.json", "vocabulary.json")  # these never change
SOMETIMES = ("cell.py", "stdin.txt")  # these neither, where a run has them
COMPARISON = "comparison.json"
_TENSORS = {kind: re.compile(kind + r"-[0-9]{1,19}\.safetensors") for kind in ("weights", "state")}
_SHA256 = re.compile("[0-9a-f]{64}")


def from_json(data: bytes) -> dict[str, Any]:
    """The object in a file."""
    try:
        found = json.loads(data)
        json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair is not text
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from error
    return mapping(found, "it")


def to_json(data: Mapping[str, Any]) -> bytes:
    """An object as a file keeps it."""
    return json.dumps(finite(data), indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def to_line(data: Mapping[str, Any]) -> bytes:
    """An object in one line."""
    return json.dumps(finite(data), allow_nan=False).encode() + b"\n"


def finite(data: Any) -> Any:
    """The same with None for every number that is not finite, since JSON has none of these. All that is written is so.

    >>> finite({"perplexity": math.inf, "rows": [1.0, math.nan]})
    {'perplexity': None, 'rows': [1.0, None]}
    """
    if isinstance(data, Mapping):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [*map(finite, data)]
    return None if isinstance(data, float) and not math.isfinite(data) else data


# ------------------------------------------------------------------ values of the kinds that annotations name


def check_fields(made: Any) -> None:
    """That every field of a dataclass holds what its annotation says."""
    hints = get_type_hints(type(made))
    for field in fields(made):
        value = getattr(made, field.name)
        if not _is(value, hints[field.name]):
            raise ValueError(f"{field.name} must be {_words(hints[field.name])}; got {shown(value)}.")


def _is(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind; whole numbers are numbers too, but True is none, and all fit in 64 bits."""
    if get_origin(kind) is UnionType:
        return any(_is(value, part) for part in get_args(kind))
    if get_origin(kind) is tuple:
        return isinstance(value, list | tuple) and all(_is(item, get_args(kind)[0]) for item in value)
    if kind is float and isinstance(value, float):
        return True
    if kind in (int, float):
        return isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63
    return isinstance(value, kind)


def _words(kind: Any) -> str:
    if get_origin(kind) is UnionType:
        return " or ".join(map(_words, get_args(kind)))
    if get_origin(kind) is tuple:
        return {"text": "texts", "a number": "numbers", "a whole number": "whole numbers"}[_words(get_args(kind)[0])]
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", list: "a list"}
    return words.get(kind, "nothing")


def shown(value: Any) -> str:
    """A value in a message: not too long, whatever it is."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "one of more than 64 bits"
    return text if len(text) < 60 else f"{text[:57]}..."


def mapping(data: Any, what: str) -> dict[str, Any]:
    """An object of JSON, if it is one."""
    if not isinstance(data, dict):
        raise ValueError(f"{what} must be an object; got {shown(data)}")
    return data


def value_of(data: Mapping[str, Any], name: str, kind: Any, least: float = -math.inf) -> Any:
    """A member of an object, if it is there and of its kind."""
    if name not in data:
        raise ValueError(f"{name} is missing")
    value = data[name]
    if not _is(value, kind) or (kind in (int, float) and not least <= value):
        above = f" of at least {least:g}" if math.isfinite(least) else ""
        raise ValueError(f"{name} must be {_words(kind)}{above}; got {shown(value)}")
    return value


# ------------------------------------------------------------------ config.json, checkpoint.json, metrics.jsonl


def check_config(data: dict[str, Any]) -> dict[str, Any]:
    """Options, which check themselves, versions and what the text was."""
    mapping(data.get("options"), "options")
    corpus = mapping(data.get("corpus"), "corpus")
    value_of(corpus, "name", str)
    value_of(corpus, "sha256", str)
    value_of(corpus, "tokens", int, 1)
    if "from" in data:
        value_of(mapping(data["from"], "from"), "run", str)
    return data


def check_checkpoint(data: dict[str, Any]) -> dict[str, Any]:
    """Names of files, all in the folder itself, with the SHA-256 of each.

    `progress` is for the loop to check, and `changes` for the options.
    """
    value_of(data, "step", int, 0)
    value_of(data, "metrics_bytes", int, 0)
    mapping(data.get("progress"), "progress")
    mapping(data.get("changes", {}), "changes")
    files = mapping(data.get("files"), "files")
    for name, digest in files.items():
        if name not in (*FIXED, *SOMETIMES, METRICS) and not is_of_tensors(name):
            raise ValueError(f"a run has no file {shown(name)}")
        if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise ValueError(f"the SHA-256 of {name} must be 64 digits; got {shown(digest)}")
    for kind in ("weights", "best", "state"):
        form = _TENSORS["state" if kind == "state" else "weights"]
        if not form.fullmatch(value_of(data, kind, str)):
            raise ValueError(f"{kind} must be the name of a file of tensors; got {shown(data[kind])}")
    for name in (*FIXED, METRICS, data["weights"], data["best"], data["state"]):
        if name not in files:
            raise ValueError(f"files must hold {name}")
    return data


def is_of_tensors(name: str) -> bool:
    """Whether a file of that name holds the tensors of some step."""
    return any(form.fullmatch(name) for form in _TENSORS.values())


def check_metrics(data: bytes, last: int) -> list[dict[str, Any]]:
    """The learning curve: an object of numbers in every line, with rising steps up to `last` at most."""
    entries, before = [], 0
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            entry = from_json(line)
            value_of(entry, "step", int, 0)
            for name in entry:
                value_of(entry, name, float | None)
            for name in ("epoch", "seconds"):
                if not math.isfinite(value_of(entry, name, float, 0)):
                    raise ValueError(f"{name} must be finite; got {entry[name]}")
            value_of(entry, "train", float | None)
            if not before < entry["step"] <= last:
                raise ValueError(f"step must be above {before} and at most {last}; got {entry['step']}")
            before = entry["step"]
        except ValueError as error:
            raise ValueError(f"in line {number}, {error}") from error
        entries.append({name: math.nan if value is None else value for name, value in entry.items()})
    return entries
