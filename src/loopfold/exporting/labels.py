"""What the operations of a step are called where a reader sees them: their signs, and the parameters that they take."""

import re
from functools import cache

from loopfold.drawing.formulas import Formulas
from loopfold.drawing.notation import parameter_symbols, plain
from loopfold.exporting.program import StepProgram
from loopfold.stepgraph.loop import Value

_LAYER = re.compile(r"\blayers\.(\d+)\.")  # in the name of a parameter
_BETWEEN = {"add": "+", "sub": "−", "mul": "×", "div": "÷", "and": "∧", "or": "∨"}
_BETWEEN |= {"lt": "<", "le": "≤", "gt": ">", "ge": "≥", "eq": "=", "ne": "≠"}
_EITHER_WAY = {"add", "mul", "and", "or", "eq", "ne"}
_TWICE = {"add": "2 ×", "mul": "·²"}  # of the same value
_CALLED = {"sigmoid": "σ", "sum": "Σ", "prod": "Π", "neg": "−", "not": "¬", "abs": "|·|", "sqrt": "√"}
_CALLED |= {"rsqrt": "1 ÷ √", "reciprocal": "1 ÷", "cat": "join", "take": "reorder"}
_CALLED |= {"amax": "max", "maximum": "max", "amin": "min", "minimum": "min"}
_SUBSCRIPTS, _POWERS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"), str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_LONGEST = 32  # signs of a formula


class Labels:
    """Labels of what a step computes. Parameters and states have the number of their layer, where there are several."""

    def __init__(self, program: StepProgram) -> None:
        self.program = program
        graph = program.loop.graph
        layers: dict[str, list[str]] = {}
        for name in graph.parameters:
            found = _LAYER.search(name)
            layers.setdefault(found[1] if found else "", []).append(name)
        self.layers = len({*layers} - {""})
        symbols = dict.fromkeys(graph.numbers, "k")
        for layer, names in layers.items():
            subscript = [str(int(layer) + 1)] if layer and self.layers > 1 else []
            symbols |= {graph.parameters[n]: s for n, s in parameter_symbols(names, *subscript).items()}
        self.formulas = Formulas(symbols, {}, {})
        self.constant = cache(self._constant)

    def states(self) -> list[str]:
        """What the leaves of the state are called: layers are counted from 1, as in the pictures."""
        names = [leaf.name for leaf in self.program.state]
        ends = [re.fullmatch(r"(.*\D)(\d+)", name) for name in names]
        if self.layers < 2 or {int(end[2]) if end else -1 for end in ends} != {*range(self.layers)}:
            return names
        return [end[1] + str(int(end[2]) + 1).translate(_SUBSCRIPTS) for end in ends if end]

    def of(self, v: Value) -> str:
        """An operation with all that it takes besides what other operations give it, for which a dot may stand."""
        if v.op == "matmul":
            matrix, transposed = v.index
            return self.constant(matrix) + "ᵀ" * transposed
        if v.op == "row":
            return f"{self.constant(v.index[0])}[·]"
        if v.op == "pow":
            power = f"{v.index:g}"
            return f"·{power.translate(_POWERS)}" if power.isdigit() else f"·^{_minus(power)}"
        given = [self._given(a) for a in v.args]
        if v.op not in _BETWEEN:
            name = _CALLED.get(v.op, v.op)
            return f"{name}({', '.join(text or '·' for text in given)})" if any(given) else name
        sign = _BETWEEN[v.op]
        if v.args[0] is v.args[1]:
            return _TWICE.get(v.op, f"· {sign} ·")
        first, second = (f"({text})" if text and " " in text and v.op != "add" else text for text in given)
        if first and not second and v.op in _EITHER_WAY:
            first, second = second, first
        return " ".join(part for part in (first, sign, second) if part)

    def _given(self, v: Value) -> str | None:
        """A number or a parameter, or a part of one; None where it is computed."""
        while v.op == "slice":
            v = v.args[0]
        if v.op == "number":
            return _minus(f"{v.index:g}")
        return self.constant(v.index) if v.op == "constant" else None

    def _constant(self, index: int) -> str:
        nodes = self.program.loop.constants[index].nodes()
        text = ", ".join(dict.fromkeys(_text(self.formulas.of(node)) for node in nodes)) or "k"
        return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _text(formula: str) -> str:
    """Mathtext in plain letters: `W_{1}` is W₁, `b_{hn}` is b_hn."""
    formula = re.sub(r"_\{([\d,]+)\}", lambda found: found[1].translate(_SUBSCRIPTS), formula)
    formula = re.sub(r"\^\{(\d+)\}", lambda found: found[1].translate(_POWERS), formula)
    return _minus(plain(re.sub(r"([_^])\{", r"\\\1{", formula)))


def _minus(text: str) -> str:
    return text.replace("-", "−")
