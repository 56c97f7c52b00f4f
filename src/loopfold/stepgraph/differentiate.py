"""The reverse step, derived from the loop: one rule per operation, and what the forward pass must keep for it.

The reverse loop carries ∇state from each step to the one before. What a step adds to the gradient of a matrix is
an outer product, `v(t)ᵀ g(t)`, and leaves the loop: the rows v and g of all steps make one product at the end.

What is kept. The states are there anyway. Of the other values that the reverse step reads, those that a few additions
and multiplications give again are computed again; so is one function of a state, such as tanh(c). All else (products,
gates) is kept for every step. For an Elman network nothing but h is kept; for an LSTM the four gates are.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from loopfold.stepgraph.hoist import Loop
from loopfold.stepgraph.loop import LEAVES, REDUCTIONS, Builder, Value, ordered


@dataclass(frozen=True, eq=False)
class Product:
    """`gradient of matrix i += leftᵀ @ right`, summed over steps and sequences."""

    matrix: int
    left: Value
    right: Value


@dataclass(frozen=True, eq=False)
class Reverse:
    """The reverse step of a loop, for a given set of emitted values whose gradients come in."""

    carries: tuple[Value, ...]  # ∇ of each carried leaf of the state before the step
    inputs: tuple[Value | None, ...]  # ∇ of each input at this step
    products: tuple[Product, ...]
    rows: tuple[tuple[int, Value], ...]  # (constant i, what this step adds to its gradient)
    reached: tuple[bool, ...]  # whether a gradient goes back to each carried leaf at all; if not, it is None, not zero

    def stored(self) -> list[Value]:
        """What is needed of every step: gradients of inputs, and the right sides of products; each once."""
        found = [g for g in self.inputs if g is not None] + [p.right for p in self.products]
        return list(dict.fromkeys(found))

    def roots(self) -> list[Value]:
        return [*self.carries, *self.stored(), *[g for _, g in self.rows]]


def differentiate(loop: Loop, incoming: tuple[bool, ...]) -> Reverse:
    """The reverse step, where `incoming[k]` says whether a gradient arrives at emitted value k."""
    b = loop.builder
    gradients: dict[Value, list[Value]] = {}
    cuts: dict[Value, list[tuple[int, Value]]] = {}
    carrying = _carrying(loop, incoming)
    for k, v in enumerate(loop.emitted):
        if k in carrying:
            gradients.setdefault(v, []).append(b.make("carry", width=v.width, index=k))
        if incoming[k]:
            gradients.setdefault(v, []).append(b.make("incoming", width=v.width, index=k))

    def send(v: Value, g: Value) -> None:
        if v.width == 1 and g.width != 1:
            g = b.make("sum", g, width=1)
        if v.op != "number" and not v.is_bool:
            gradients.setdefault(v, []).append(b.expand(g, v.width))

    totals: dict[Value, Value] = {}
    products: list[Product] = []
    for v in reversed(ordered(loop.emitted)):
        if v not in gradients and v not in cuts:
            continue
        parts = gradients.get(v, []) + ([_assemble(b, v.width, cuts[v])] if v in cuts else [])
        g = totals[v] = b.total(parts)
        if v.op == "slice":
            cuts.setdefault(v.args[0], []).append((v.index, g))
        elif v.op == "cat":
            start = 0
            for part in v.args:
                send(part, b.slice(g, start, part.width))
                start += part.width
        elif v.op == "matmul":
            products.append(Product(v.index[0], v.args[0], g))
            send(v.args[0], b.make("matmul", g, width=v.args[0].width, index=(v.index[0], True)))
        elif v.op not in LEAVES:
            for argument, gradient in zip(v.args, GRADIENTS[v.op](b, v, g, *v.args), strict=True):
                if gradient is not None:
                    send(argument, gradient)

    leaf = {(v.op, v.index): g for v, g in totals.items() if v.op in LEAVES}
    widths = {v.index: v.width for v in ordered(loop.emitted) if v.op == "state"}
    zero = b.number(0)
    carries = tuple(
        b.expand(leaf.get(("state", i), zero), widths.get(i, loop.next[k].width)) for k, i in enumerate(loop.carried)
    )
    inputs = tuple(leaf.get(("input", i)) for i in range(len(loop.inputs)))
    rows = tuple((i, g) for (op, i), g in leaf.items() if op == "constant")
    reached = tuple(("state", i) in leaf for i in loop.carried)
    return Reverse(carries, inputs, tuple(products), rows, reached)


def _carrying(loop: Loop, incoming: tuple[bool, ...]) -> set[int]:
    """The carried leaves through which some gradient goes back from step to step."""
    found: set[int] = set()
    while True:
        roots = [v for k, v in enumerate(loop.emitted) if incoming[k] or k in found]
        passing = ordered(roots, stop=[v for v in ordered(roots) if v.op == "detach" or v.is_bool])
        reached = {loop.carried.index(v.index) for v in passing if v.op == "state"}
        if reached <= found:
            return found
        found |= reached


def _assemble(b: Builder, width: int, cuts: list[tuple[int, Value]]) -> Value:
    """The gradient of a row, from the gradients of its parts; where no part was read it is zero."""
    layers: list[list[tuple[int, Value]]] = []
    for start, g in sorted(cuts, key=lambda cut: cut[0]):
        for layer in layers:
            if layer[-1][0] + layer[-1][1].width <= start:
                layer.append((start, g))
                break
        else:
            layers.append([(start, g)])
    rows = []
    for layer in layers:
        pieces: list[Value] = []
        for start, g in layer:
            gap = start - sum(p.width for p in pieces)
            pieces += [b.expand(b.number(0), gap), g] if gap else [g]
        left = width - sum(p.width for p in pieces)
        pieces += [b.expand(b.number(0), left)] if left else []
        rows.append(b.cat(pieces))
    return b.total(rows)


_FEW = {"add", "sub", "mul", "neg", "relu", "abs", "sign", "where", "maximum", "minimum", "slice", "detach", "expand"}
_FEW |= {"lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not"}
_ONE = {"tanh", "sigmoid", "exp", "sqrt", "rsqrt", "reciprocal", "div"}  # worth computing again, from a state


def kept_values(loop: Loop) -> tuple[Value, ...]:
    """The forward values to keep for every step, besides the emitted ones, so that any reverse step can run."""
    reverse = differentiate(loop, (True,) * len(loop.emitted))
    emitted, forward = set(loop.emitted), ordered(loop.emitted)
    kept: dict[Value, None] = {}

    def there(v: Value) -> bool:
        return v.op in LEAVES or v in emitted or v in kept

    def again(v: Value) -> bool:
        if there(v):
            return True
        if v.op in _ONE:
            return all(there(a) for a in v.args)
        return v.op in _FEW and all(again(a) for a in v.args)

    def keep(v: Value) -> None:
        if again(v):
            return
        missing = [a for a in v.args if not again(a)]
        if v.is_bool or (v.op in _FEW and v.op != "slice" and sum(a.width > 1 for a in missing) <= 1):
            for a in missing:  # one row, and numbers, from which v and perhaps others come again
                keep(a)
        else:
            kept[v] = None

    inside = set(forward)
    reverse_only = [v for v in ordered(reverse.roots(), stop=inside) if v not in inside]
    read = {a for v in reverse_only for a in v.args if a in inside} | {v for v in reverse.roots() if v in inside}
    lefts = {p.left for p in reverse.products}
    compared = {a for v in read if v.op in ("amax", "amin") for a in v.args}  # computed again, it might miss by a bit
    for v in forward:  # arguments first: what is kept early serves what comes later
        if (v in lefts or v in compared) and not there(v):
            kept[v] = None
        elif v in read:
            keep(v)
    return _whole_where_all_parts(list(kept))


def _whole_where_all_parts(kept: list[Value]) -> tuple[Value, ...]:
    """A row in place of its parts, where they add up to it."""
    cut: dict[Value, int] = {}
    for v in kept:
        if v.op == "slice":
            cut[v.args[0]] = cut.get(v.args[0], 0) + v.width
    whole = {v for v, width in cut.items() if width >= v.width or v in kept}
    rest = [v for v in kept if v not in whole and not (v.op == "slice" and v.args[0] in whole)]
    return tuple([v for v in cut if v in whole] + rest)


# ------------------------------------------------------------------ one rule per operation: y = f(a, …), g = ∇y


_Rule = Callable[..., tuple[Value | None, ...]]


def _ties(b: Builder, a: Value, other: Value, greater: str) -> Value:
    """1 where `a` is the one chosen, ½ where both are, else 0."""
    return b.where(b.make(greater, a, other), 1, b.where(b.make("eq", a, other), 0.5, 0))


def _chosen(b: Builder, y: Value, g: Value, a: Value) -> tuple[Value]:
    """Greatest or least of a row: every place that attains it gets the same share."""
    hit = b.where(b.make("eq", a, y), 1, 0)
    return (b.mul(hit, b.div(g, b.make("sum", hit, width=1))),)


GRADIENTS: dict[str, _Rule] = {
    "add": lambda b, y, g, a, c: (g, g),
    "sub": lambda b, y, g, a, c: (g, b.make("neg", g)),
    "mul": lambda b, y, g, a, c: (b.mul(g, c), b.mul(g, a)),
    "div": lambda b, y, g, a, c: (b.div(g, c), b.make("neg", b.div(b.mul(g, y), c))),
    "maximum": lambda b, y, g, a, c: (b.mul(g, _ties(b, a, c, "gt")), b.mul(g, _ties(b, c, a, "gt"))),
    "minimum": lambda b, y, g, a, c: (b.mul(g, _ties(b, a, c, "lt")), b.mul(g, _ties(b, c, a, "lt"))),
    "where": lambda b, y, g, c, p, q: (None, b.where(c, g, 0), b.where(c, 0, g)),
    "neg": lambda b, y, g, a: (b.make("neg", g),),
    "tanh": lambda b, y, g, a: (b.mul(g, b.sub(1, b.mul(y, y))),),
    "sigmoid": lambda b, y, g, a: (b.mul(g, b.mul(y, b.sub(1, y))),),
    "relu": lambda b, y, g, a: (b.where(b.make("gt", y, b.number(0)), g, 0),),
    "exp": lambda b, y, g, a: (b.mul(g, y),),
    "expm1": lambda b, y, g, a: (b.mul(g, b.add(y, 1)),),
    "log": lambda b, y, g, a: (b.div(g, a),),
    "log1p": lambda b, y, g, a: (b.div(g, b.add(a, 1)),),
    "sqrt": lambda b, y, g, a: (b.div(b.mul(g, 0.5), y),),
    "rsqrt": lambda b, y, g, a: (b.mul(b.mul(g, -0.5), b.mul(y, b.mul(y, y))),),
    "reciprocal": lambda b, y, g, a: (b.make("neg", b.mul(g, b.mul(y, y))),),
    "abs": lambda b, y, g, a: (b.mul(g, b.make("sign", a)),),
    "sign": lambda b, y, g, a: (b.number(0),),
    "sin": lambda b, y, g, a: (b.mul(g, b.make("cos", a)),),
    "cos": lambda b, y, g, a: (b.make("neg", b.mul(g, b.make("sin", a))),),
    "erf": lambda b, y, g, a: (b.mul(b.mul(g, 2 / math.sqrt(math.pi)), b.make("exp", b.make("neg", b.mul(a, a)))),),
    "pow": lambda b, y, g, a: (
        b.mul(b.mul(g, y.index), b.make("pow", a, index=y.index - 1)) if y.index else b.number(0),
    ),
    "expand": lambda b, y, g, a: (g,),
    "detach": lambda b, y, g, a: (None,),
    "sum": lambda b, y, g, a: (b.expand(g, a.width),),
    "amax": _chosen,
    "amin": _chosen,
}
assert GRADIENTS.keys() >= REDUCTIONS
