"""HTML from text that may hold anything, be it a corpus, a model's words or a path: in the page it does nothing."""

import base64
import html
import json
import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loopfold.drawing.figure import Drawing

# What HTML does not allow: control characters except tab and newline, halves of surrogate pairs, and non-characters.
_UNFIT = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


def escape(text: object) -> str:
    """Text as it may stand between tags or in a quoted attribute.

    >>> escape('<b title="x">')
    '&lt;b title=&quot;x&quot;&gt;'
    """
    return html.escape(_UNFIT.sub("\N{REPLACEMENT CHARACTER}", str(text)), quote=True)


def data_block(name: str, value: Any) -> str:
    """JSON for the page's script, under an id. Nothing in it can end the element that it stands in.

    >>> data_block("x", "</script>")
    '<script type="application/json" id="x">"\\\\u003c/script\\\\u003e"</script>'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII: U+2028 and lone surrogates are escaped
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return f'<script type="application/json" id="{name}">{text}</script>'


def table(head: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], caption: str) -> str:
    """A table of cells that are HTML already; the first of a row is its heading. A row comes with its class."""
    names = "".join(f'<th scope="col">{name}</th>' for name in head)
    lines = [
        f'<tr class="{kind}"><th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in rest) + "</tr>"
        for kind, (first, *rest) in rows
    ]
    top = f"<thead><tr>{names}</tr></thead>" if names else ""
    return f"<table><caption>{caption}</caption>{top}<tbody>{''.join(lines)}</tbody></table>"


def scroll_box(content: str, label: str) -> str:
    """A box in which what is too wide for a page scrolls by itself, with the keyboard too."""
    return f'<div class="scroll" role="group" tabindex="0" aria-label="{escape(label)}">{content}</div>'


def picture(drawing: "Drawing") -> str:
    """A drawing as an element of the page, in fewer bytes: without remarks and indents."""
    svg = re.sub(r"<!--.*?-->", "", drawing.svg(), flags=re.DOTALL)
    return re.sub(r"\s*\n\s*", "\n", svg)


def figure(content: str, caption: str, kind: str = "") -> str:
    """A picture and what it shows; both are HTML already."""
    return f'<figure class="{kind}">{content}<figcaption>{caption}</figcaption></figure>'


def asset(name: str) -> str:
    """A file that lies beside this one."""
    return (files("loopfold.report") / name).read_text(encoding="utf-8")


def fingerprint(script: str) -> str:
    """What a Content-Security-Policy calls a script, so that this one may run and no other."""
    return f"sha256-{base64.b64encode(sha256(script.encode()).digest()).decode()}"
