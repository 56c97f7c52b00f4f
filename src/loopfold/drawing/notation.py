"""Names as the field writes them: W₁, γ_h, h⁽ᵗ⁾, in matplotlib's mathtext."""

import re

_GREEK = re.compile(
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|chi|psi|omega"
)
_OPERATIONS = {
    "add": "+",
    "sub": "−",
    "rsub": "−",
    "mul": r"$\odot$",
    "div": "÷",
    "mm": "@",
    "bmm": "@",
    "addmm": "@",
    "baddbmm": "@",
    "neg": "−",
    "sigmoid": r"$\sigma$",
    "relu": "ReLU",
    "embedding": "look up",
    "native_layer_norm": "norm",
    "_softmax": "softmax",
}


def symbol(name: str, *subscripts: str) -> str:
    """A variable's or parameter's name as mathematics, without dollars: `b_hn`, layer 2 → `b_{hn,2}`."""
    base, *parts = [part for part in re.split(r"_+|(?<=[A-Za-z])(?=\d)", name) if part] or ["?"]
    words = [_word(part) for part in parts] + list(subscripts)
    return _word(base, lead=True) + (f"_{{{','.join(words)}}}" if words else "")


def _word(part: str, lead: bool = False) -> str:
    if _GREEK.fullmatch(part):
        return rf"\{part}"
    if len(part) == 1 or part.isdigit() or (not lead and len(part) == 2):
        return escape(part)
    return rf"\mathrm{{{escape(part)}}}"


def parameter_symbol(name: str, *subscripts: str) -> str:
    """A parameter's full name shortened: `cell.U` → U, `gate.weight` → gate, E for embeddings."""
    parts = name.split(".")
    if parts[-1] in ("weight", "bias") and len(parts) > 1:
        parts.pop()
    last = {"embedding": "E"}.get(parts[-1], parts[-1])
    return symbol(last, *subscripts)


def operation_symbol(op: str) -> str:
    """What stands in the box of an operation of torch."""
    return _OPERATIONS.get(op, op.strip("_").removeprefix("native_"))


def escape(text: str) -> str:
    """Text inside mathematics that stands for itself."""
    return re.sub(r"([$_^%#&{}\\])", r"\\\1", text)


def plain(mathtext: str) -> str:
    """Mathtext as plain text, for titles and files that know no mathematics: `h_{1}^{(2)}` → `h1(2)`."""
    text = mathtext.replace("$", "").replace(r"\mathrm", "").replace(r"\odot", "⊙").replace(r"\sigma", "σ")
    text = text.replace(r"\rightarrow", "→").replace(r"\leftarrow", "←")
    return re.sub(r"[{}_^]|\\(?=[A-Za-z])|\\", "", text)
