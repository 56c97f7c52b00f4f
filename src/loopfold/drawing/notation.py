"""Names as the field writes them: W₁, γ_h, h⁽ᵗ⁾, in matplotlib's mathtext."""

import re
from collections.abc import Iterable

from loopfold.stepgraph.aten import aten

_GREEK = re.compile(
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|chi|psi|omega"
)
_UNKNOWN = re.compile(r"[^0-9A-Za-z\u0370-\u03ff]")  # what mathtext has no glyph for, or another use


def symbol(name: str, *subscripts: str) -> str:
    """A variable's or parameter's name as mathematics, without dollars: `b_hn`, layer 2 → `b_{hn,2}`."""
    base, *parts = [part for part in re.split(r"_+|(?<=[A-Za-z])(?=\d)", name) if part] or ["?"]
    words = [_word(part) for part in parts] + list(subscripts)
    return _word(base, lead=True) + (f"_{{{','.join(words)}}}" if words else "")


def _word(part: str, lead: bool = False) -> str:
    if _GREEK.fullmatch(part):
        return rf"\{part}"
    part = _UNKNOWN.sub("?", part)
    return part if len(part) == 1 or part.isdigit() or (not lead and len(part) == 2) else rf"\mathrm{{{part}}}"


def parameter_symbols(names: Iterable[str], *subscripts: str) -> dict[str, str]:
    """Each parameter's full name as short as tells it from the others: `cell.U` → U; `a.W`, `b.W` → W_a, W_b.

    `gate.weight` is W_gate and `gate.bias` b_gate, as the field writes them; a table of embeddings is E.
    """
    paths = {name: _path(name) for name in names}
    longest = max(map(len, paths.values()), default=1)
    found: dict[str, str] = {}
    for name, path in paths.items():
        for k in range(1, longest + 1):
            if sum(other[-k:] == path[-k:] for other in paths.values()) == 1:
                break
        *before, last = path[-k:]
        found[name] = symbol("_".join([last, *before]), *subscripts)
    return found


def _path(name: str) -> tuple[str, ...]:
    """The parts of a name, the letter last: `gate.weight` → gate_W in one; numbers belong to what is before them."""
    *before, last = name.split(".")
    if before and (last in ("weight", "bias") or last.startswith(("weight_", "bias_"))):
        letter, _, rest = last.partition("_")
        if before[-1] == "embedding":
            return (*before[:-1], "E")
        owner = before.pop()
        while owner.isdigit() and before:
            owner = f"{before.pop()}_{owner}"
        words = [{"weight": "W", "bias": "b"}[letter], rest, owner]
        return (*before, "_".join(word for word in words if word))
    return (*before, last)


def operation_symbol(op: str) -> str:
    """What stands in the box of an operation of torch."""
    return aten(op).symbol or op.strip("_").removeprefix("native_")


def plain(mathtext: str) -> str:
    """Mathtext as plain text, for titles and files that know no mathematics: `h_{1}^{(2)}` → `h1(2)`."""
    text = (
        mathtext.replace("$", "")
        .replace(r"\cdot ", "·")
        .replace(r"\mathrm", "")
        .replace(r"\odot", "⊙")
        .replace(r"\sigma", "σ")
    )
    text = text.replace(r"\rightarrow", "→").replace(r"\leftarrow", "←")
    return re.sub(r"[{}_^]|\\(?=[A-Za-z])|\\", "", text)
