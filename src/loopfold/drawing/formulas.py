"""What stands in an operation's box and beside its edges: parameters, and what is made of them alone, as formulas."""

from collections.abc import Callable
from typing import Any

import torch

from loopfold.drawing.notation import operation_symbol
from loopfold.stepgraph.aten import aten
from loopfold.stepgraph.graph import Node

# the same numbers in another shape, which no formula shows
_SHAPES = {"view", "_unsafe_view", "reshape", "expand", "unsqueeze", "squeeze", "permute", "t", "transpose"}
_SHAPES |= {"clone", "alias", "detach", "_to_copy"}
_PARTS = {"getitem", "slice", "select"}
_PRODUCTS = {"mul", "mm", "bmm", "mv", "dot"}
_NUMBERS = {"zeros": "0", "zeros_like": "0", "new_zeros": "0", "ones": "1", "ones_like": "1", "new_ones": "1"}
_EITHER_WAY = {"add", "mul", "maximum", "minimum", "eq", "ne", "logical_and", "logical_or", "logical_xor"}
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
_TWO = {"add", "sub", "rsub", "div"} | _COMPARISONS  # of two operands, of which the second may be scaled
_NORMS = {"native_layer_norm": 2, "native_group_norm": 1}  # where the factor stands; what is added is next
_WORDS = {  # for what an operation's arguments are to it; others are numbered
    "where": {"condition": "condition", "self": "if true", "other": "if false"},
    "masked_fill": {"self": "if false", "mask": "condition", "value": "if true"},
    "lerp": {"self": "from", "end": "to", "weight": "share"},
    "pow": {"self": "base", "exponent": "power"},
    "clamp": {"min": "≥", "max": "≤"},
    **dict.fromkeys(_NORMS, {"weight": r"$\odot$", "bias": "+"}),
    **dict.fromkeys(("index", "index_select", "embedding"), {"indices": "index", "index": "index", "weight": "table"}),
}
_SUM, _PRODUCT, _ATOM = range(3)  # how tightly the parts of a formula hold together


class Formulas:
    """Formulas of what is made of parameters alone; `symbols` are theirs, `names` those that the step gives values.

    Where a name stands in the place of a formula, `said` is told which.
    """

    def __init__(self, symbols: dict[Node, str], names: dict[Node, str], said: dict[str, str]) -> None:
        self.symbols = symbols
        self.names = names
        self.said = said

    def of(self, value: Any, at_least: int = _SUM) -> str:
        """A value as mathtext, in brackets where its parts hold together less than `at_least`."""
        text, tightness = self._of(value)
        return text if tightness >= at_least else f"({text})"

    def _of(self, value: Any) -> tuple[str, int]:
        if not isinstance(value, Node):
            return _number(value), _SUM if isinstance(value, int | float) and value < 0 else _ATOM
        if value in self.symbols:
            return self.symbols[value], _ATOM
        if value.op in _SHAPES:
            return self._of(value.args[0])
        text, tightness = self._made(value)
        name = self.names.get(value)
        if name is None or value.op in _PARTS or not value.inputs() or name in self.symbols.values():
            return text, tightness
        return (name, _ATOM) if self.said.setdefault(name, text) == text else (text, tightness)

    def _made(self, value: Node) -> tuple[str, int]:
        """The formula of what an operation makes."""
        op, args = value.op, value.args
        if op in _PARTS:
            return self._part(value), _ATOM
        if op in _TWO and not value.kwargs.get("rounding_mode"):
            first, second, scale = _operands(value)
            sign, tight = {"add": ("+", _SUM), "div": ("/", _PRODUCT)}.get(op, (operation_symbol(op), _SUM))
            return f"{self.of(first, tight)} {sign} {scale}{self.of(second, tight + 1)}", tight
        if op == "neg":
            return f"−{self.of(args[0], _PRODUCT)}", _SUM
        if op in _PRODUCTS:
            first, second = args if isinstance(args[0], Node) and isinstance(args[1], Node) else (args[1], args[0])
            return self._product(first, second)
        if op == "reciprocal":
            return f"1/{self.of(args[0], _ATOM)}", _PRODUCT
        if op == "pow":
            return f"{self.of(args[0], _ATOM)}^{{{self.of(args[1])}}}", _ATOM
        if op in _NUMBERS:
            return _NUMBERS[op], _ATOM
        if op in ("full", "full_like", "new_full"):
            return self._of(args[-1])
        given = [self.of(a) for a in (*args, *value.kwargs.values()) if isinstance(a, Node | float | int)]
        given += [self.of(v) for a in args if isinstance(a, tuple) for v in a if isinstance(v, Node)]
        sign = operation_symbol(op)
        sign = sign.strip("$") if sign.startswith("$") else rf"\mathrm{{{sign}}}".replace("_", r"\_")
        return f"{sign}({', '.join(given)})", _ATOM

    def _product(self, first: Any, second: Any) -> tuple[str, int]:
        """One after the other: a sign before both, and what is divided by below a stroke."""
        if isinstance(first, int | float) and first < 0:
            text, tightness = (self.of(second, _PRODUCT), _SUM) if first == -1 else self._product(-first, second)
            return f"−{text}", min(tightness, _SUM)
        if isinstance(second, Node) and second.op == "reciprocal" and second not in self.names:
            return f"{self.of(first, _PRODUCT)}/{self.of(second.args[0], _ATOM)}", _PRODUCT
        return rf"{self.of(first, _PRODUCT)}\,{self.of(second, _PRODUCT)}", _PRODUCT

    def _part(self, node: Node) -> str:
        """A part of a tensor: as the step calls it, else by its place."""
        if node in self.names:
            return self.names[node]
        if node.op == "getitem":
            whole, place = node.args
            of = whole.args[0] if aten(whole.op).moves else whole  # a part of what was split
            return f"{self.of(of, _ATOM)}[{place}]"
        return f"{self.of(node.args[0], _ATOM)}{_place(node)}"

    # ------------------------------------------------------------------ an operation that is drawn

    def factor(self, node: Node, factor: Node) -> list[str]:
        """What an operation multiplies with, beside the edge of what it multiplies; a divisor is in the box."""
        return [] if node.op == "div" and not node.kwargs.get("rounding_mode") else [self.of(factor)]

    def box(self, node: Node, varies: Callable[[Any], bool]) -> str:
        """Its sign, with the numbers and the parameters that it takes besides what its edges bring."""
        op, args, sign = node.op, node.args, operation_symbol(node.op)
        if op in _TWO and not node.kwargs.get("rounding_mode"):
            first, second, scale = _operands(node)
            if varies(first) and varies(second):
                return sign
            tight = _ATOM if op == "div" else _PRODUCT
            if varies(first):
                return f"{sign} ${scale}{self.of(second, tight)}$"
            if op == "add" and not scale:
                return f"{sign} ${self.of(first)}$"
            return f"${self.of(first, tight)}$ {sign}" + (f" ${scale}\\cdot$" if scale else "")
        if op == "pow":
            base, power = (r"\cdot" if varies(a) else self.of(a, _ATOM) for a in args[:2])
            return f"${base}^{{{power}}}$"
        if op == "mul":
            return " ".join([sign, *(f"{_number(a)}" for a in args if not isinstance(a, Node))])
        if op in ("slice", "select"):
            return _place(node)
        if op in ("clamp", "clamp_min", "clamp_max"):
            return self._clamp(node, sign, varies)
        if op in _NORMS:
            terms = zip((r"$\odot$", "+"), args[_NORMS[op] :], strict=False)
            given = (f"{joined} ${self.of(v, _PRODUCT)}$" for joined, v in terms if v is not None and not varies(v))
            return " ".join([sign, *given])
        if op == "where":
            words = zip(("condition", "if true", "if false"), args, strict=False)
            return ", ".join([sign, *(f"{word} ${self.of(v)}$" for word, v in words if not varies(v))])
        low, high = aten(op).factors
        factors = node.inputs()[low:high]
        added = [f"${self.of(n)}$" for n in node.inputs() if not varies(n) and n not in factors]
        if op in ("addmm", "baddbmm", "addmv"):
            scales = [f"{k} {_number(v)}" for k, v in node.kwargs.items() if v != 1]
            return " + ".join([sign, *added]) + "".join(f", {scale}" for scale in scales)
        return " ".join([sign, *added, *_settings(node)])

    def _clamp(self, node: Node, sign: str, varies: Callable[[Any], bool]) -> str:
        low, high = {"clamp_max": (None, node.args[1])}.get(node.op) or (*node.args[1:], None, None)[:2]
        low, high = ("" if v is None or varies(v) else self.of(v) for v in (low, high))
        if low and high:
            return f"{sign} $[{low}, {high}]$"
        return f"{sign} $≥ {low}$" if low else f"{sign} $≤ {high}$" if high else sign

    def beside(self, node: Node, read: Node, varies: Callable[[Any], bool]) -> str:
        """A word beside the edge of one of several values that cannot change places: a − b is not b − a."""
        several = [n for n in dict.fromkeys(node.inputs()) if varies(n)]
        if len(several) < 2 or node.op in _EITHER_WAY and node.kwargs.get("alpha", 1) == 1:
            return ""
        if node.op in _TWO:
            _, second, scale = _operands(node)
            return operation_symbol(node.op) + (f" ${scale}\\cdot$" if scale else "") if read is second else ""
        arguments = node.target._schema.arguments if node.target is not None else []
        for argument, value in zip(arguments, node.args, strict=False):
            if value is read:
                return _WORDS.get(node.op, {}).get(argument.name, str(1 + several.index(read)))
            if isinstance(value, tuple) and read in value:
                return str(1 + value.index(read))
        return ""


def _settings(node: Node) -> list[str]:
    """The plain numbers and words that decide what an operation computes, and not along which dimension."""
    pointwise = aten(node.op).pointwise or (node.target is not None and torch.Tag.pointwise in node.target.tags)
    if not pointwise and node.op != "roll":
        return []
    values = [(v for v in a) if isinstance(a, tuple) else (a,) for a in (*node.args, *node.kwargs.values())]
    return [_number(v) for part in values for v in part if isinstance(v, int | float | str)]


def _operands(node: Node) -> tuple[Any, Any, str]:
    """The two operands as they are read, and what scales the second."""
    first, second = node.args[:2] if node.op != "rsub" else (node.args[1], node.args[0])
    scale = (*node.args[2:], node.kwargs.get("alpha", 1))[0]
    return first, second, "" if scale == 1 else rf"{_number(scale)}\,"


def _place(node: Node) -> str:
    """Which part of a tensor it is, as Python writes it."""
    given = [*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :]]
    dim, start, end, step = given
    before = "…, " if dim == -1 else ":, " * dim
    if node.op == "select":
        return f"[{before}{start}]"
    last = "" if end is None or end >= 2**62 else end
    return f"[{before}{start or 0}:{last}{f':{step}' if step != 1 else ''}]"


def _number(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:g}".replace("-", "−")
    return str(value)
