"""Text of a user's in a picture: never taken for a formula, every character visible, none that no font has."""

import unicodedata
from functools import cache

MONOSPACED, PLAIN = "DejaVu Sans Mono", "DejaVu Sans"  # matplotlib brings both
NO_GLYPH = "▯"
_UNFIT = ("Last Resort", "Emoji")  # a box for every character; colours that cannot be drawn
_VISIBLE = {"\n": "⏎", "\t": "⇥", "\r": "↤"}


def label(text: str) -> str:
    """A name or a sentence: `$` begins no formula, and ▯ stands for what the font lacks.

    >>> print(label("cost in $"))
    cost in \\$
    """
    words = " ".join(text.split())
    return "".join(c if _font_of(c, PLAIN) == PLAIN else NO_GLYPH for c in words).replace("$", r"\$")


def visible(piece: str) -> str:
    """A token: line ends, spaces and what cannot be printed are seen.

    >>> visible("a b\\n\\0")
    'a·b⏎¤'
    """
    return "".join(map(_visible, piece)).replace("$", r"\$")


def _visible(c: str) -> str:
    kind = unicodedata.category(c)
    if c in _VISIBLE or kind == "Zs":
        return _VISIBLE.get(c, "·")
    if kind.startswith("C") or kind in ("Zl", "Zp"):
        return "¤"
    if _font_of(c, MONOSPACED) is None:
        return NO_GLYPH
    return "◌" + c if kind in ("Mn", "Me") else c  # an accent by itself needs something to stand on


def beginning(text: str, most: int = 12) -> str:
    """The beginning of a text that is too long."""
    return text if len(text) <= most else text[: most - 1] + "…"


def ending(name: str, most: int = 24) -> str:
    """The end of a long name, which tells it from others."""
    return name if len(name) <= most else "…" + name[1 - most :]


def families(text: str) -> list[str]:
    """The fonts in which every character of a `visible` text has a glyph, the monospaced one first."""
    others = dict.fromkeys(_font_of(c, MONOSPACED) for c in dict.fromkeys(text))
    return [MONOSPACED, *(font for font in others if font not in (None, MONOSPACED))]


def is_wide(text: str) -> bool:
    """Whether some character is as wide as two, as Chinese is."""
    return any(unicodedata.east_asian_width(c) in "WF" for c in text)


@cache
def _font_of(character: str, wanted: str) -> str | None:
    """`wanted`, if it has a glyph for the character; else another font of this machine that has; else None."""
    from matplotlib.font_manager import findfont, fontManager

    if ord(character) in _glyphs(findfont(wanted)):
        return wanted
    for font in sorted(fontManager.ttflist, key=lambda font: (font.weight != 400, font.name)):
        usable = font.style == "normal" and not any(word in font.name for word in _UNFIT)
        if usable and ord(character) in _glyphs(font.fname):
            return font.name
    return None


@cache
def _glyphs(file: str) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(file).get_charmap())
    except (OSError, RuntimeError):  # gone since matplotlib looked, or broken
        return frozenset()


@cache
def advance(character: str, family: str, italic: bool = False) -> float:
    """How far after a character the next begins, as a share of the size of the letters."""
    from matplotlib.font_manager import FontProperties, findfont
    from matplotlib.ft2font import FT2Font

    font = FT2Font(findfont(FontProperties(family=[family], style="italic" if italic else "normal")))
    font.set_size(100, 72)
    return font.load_char(ord(character)).linearHoriAdvance / 65536 / 100
