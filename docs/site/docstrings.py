"""Docstrings as Markdown, for the reference: what is lined up becomes a list, what is typed becomes code."""

import re
from typing import Any

from griffe import Extension, Object

ITEM = re.compile(r"^(`[^`]+`(?:, `[^`]+`)*)  +(\S.*)$")  # a name, two spaces or more, and what it is


class Markdown(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    lines: list[str] = []
    code = item = False
    for line in docstring.splitlines():
        if code and not line.strip():
            lines.append("```")
            code = False
        elif not code and line.startswith(">>>"):
            lines += ["", "```pycon"]
            code = True
        found = None if code else ITEM.match(line)
        if found:
            lines += [] if item else [""]  # a list begins after an empty line
            line = f"- {found[1]}: {found[2]}"
        elif item and line.startswith("  "):
            line = f"    {line.strip()}"
        elif item and line.strip():
            lines.append("")
        item = bool(found) or (item and line.startswith("    "))
        lines.append(line)
    return "\n".join([*lines, "```"] if code else lines)
