"""Names as the field writes them: W₁, γ_h, h⁽ᵗ⁾, in matplotlib's mathtext."""

import re
from collections.abc import Iterable

from loopfold.stepgraph.aten import aten

_GREEK = re.compile(
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|chi|psi|omega"
)
_LETTER = re.compile(rf"([^\W\d_]|{_GREEK.pattern})(?:_+|(?=\d))([\w.]*[^\W_])_*")  # and its subscript
_MATRIX = re.compile(r"[A-Z](?:_\w+|\w{0,2})")  # what a layer is called that is a matrix
_WORDS = {"at", "by", "in", "of", "on", "to", "up"}  # other pairs of letters are indices: h and n in b_hn
_UNKNOWN = re.compile(r"[^0-9A-Za-z_\u0370-\u03ff]")  # what mathtext has no glyph for, or another use

_PLAIN = {
    r"\cdots": "⋯",
    r"\cdot ": "·",
    r"\cdot": "·",
    r"\,": " ",
    r"\;": " ",
    r"\mathrm": "",
    r"\odot": "⊙",
    r"\rightarrow": "→",
    r"\leftarrow": "←",
}
_PLAIN |= {"\\" + name: letter for name, letter in zip(_GREEK.pattern.split("|"), "αβγδεζηθκλμνξρστφχψω", strict=True)}


def symbol(name: str, *subscripts: str) -> str:
    """A variable's or parameter's name as mathematics, without dollars.

    A letter's first underscore begins its subscript, which stands as it is written; so does a name that is a word.

    >>> print(symbol("b_hn", "2"), symbol("W1"), symbol("W_in_2"), symbol("hidden_to_hidden"))
    b_{hn,2} W_{1} W_{\\mathrm{in\\_2}} \\mathrm{hidden\\_to\\_hidden}
    >>> print(symbol("W_in"), symbol("W_rec"))
    W_{\\mathrm{in}} W_{\\mathrm{rec}}
    """
    base, rest = name, ""
    if letter := _LETTER.fullmatch(name):
        base, rest = letter.groups()
    words = [_word(part) for part in rest.split(".") if part] + list(subscripts)
    return _word(base or "?", lead=True) + (f"_{{{','.join(words)}}}" if words else "")


def subscripted(symbol: str, subscript: str) -> str:
    """A symbol with one more subscript.

    >>> print(subscripted("U", "y"), subscripted("U_{d}", "y"))
    U_{y} U_{d,y}
    """
    return f"{symbol[:-1]},{subscript}}}" if symbol.endswith("}") and "_{" in symbol else f"{symbol}_{{{subscript}}}"


def _word(part: str, lead: bool = False) -> str:
    if _GREEK.fullmatch(part):
        return rf"\{part}"
    part = _UNKNOWN.sub("?", part)
    if len(part) == 1 or part.isdigit() or (not lead and len(part) == 2 and part not in _WORDS):
        return part.replace("_", r"\_")
    return rf"\mathrm{{{part}}}".replace("_", r"\_")


def parameter_symbols(names: Iterable[str], *subscripts: str) -> dict[str, str]:
    """Each parameter's full name as short as tells it from the others: `cell.U` → U; `a.W`, `b.W` → W_a, W_b.

    `gate.weight` is W_gate and `gate.bias` b_gate, as the field writes them; where the layer's name is a letter, as in
    `U.weight`, that is what the matrix is called. A table of embeddings is E.
    """
    paths = {name: _path(name) for name in names}
    longest = max(map(len, paths.values()), default=1)
    found: dict[str, str] = {}
    for name, path in paths.items():
        for k in range(1, longest + 1):
            if sum(other[-k:] == path[-k:] for other in paths.values()) == 1:
                break
        *before, last = path[-k:]
        found[name] = symbol(last, *map(_word, before), *subscripts)
    return found


def _path(name: str) -> tuple[str, ...]:
    """The parts of a name, the letter last: `gate.weight` → W_gate in one; numbers belong to what is before them."""
    *before, last = name.split(".")
    if before and last.isdigit():  # an entry of a ParameterList
        last = f"{before.pop()}_{last}"
    if before and (last in ("weight", "bias") or last.startswith(("weight_", "bias_"))):
        letter, _, rest = last.partition("_")
        if before[-1] == "embedding":
            return (*before[:-1], "E")
        owner = before.pop()
        while owner.isdigit() and before:
            owner = f"{before.pop()}.{owner}"
        if last == "weight" and _MATRIX.fullmatch(owner):
            return (*before, owner)
        words = ".".join(word for word in (rest, owner) if word)
        return (*before, f"{'W' if letter == 'weight' else 'b'}_{words}")
    return (*before, last)


def operation_symbol(op: str) -> str:
    """What stands in the box of an operation of torch."""
    return aten(op).symbol or op.strip("_").removeprefix("native_")


def plain(mathtext: str) -> str:
    """Mathtext as plain text, for titles and files that know no mathematics: `h_{1}^{(2)}` → `h1(2)`."""
    for formula, sign in _PLAIN.items():
        mathtext = mathtext.replace(formula, sign)
    return re.sub(r"(?<!\\)[{}_^$]|\\", "", mathtext)
