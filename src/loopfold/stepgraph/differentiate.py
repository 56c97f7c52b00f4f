"""The reverse step, derived from the loop by the gradients of `ops`, and what the forward pass must keep for it.

The reverse loop carries ∇state from each step to the one before, and ∇context, to which each step adds. What a step
adds to the gradient of a matrix is an outer product, `v(t)ᵀ g(t)`, and leaves the loop: the rows v and g of all steps
make one product at the end.

What is kept. The states are there anyway. Of the other values that the reverse step reads, those that a few additions
and multiplications give again are computed again; so is one function of a state, such as tanh(c). All else (products,
gates) is kept for every step. For an Elman network nothing but h is kept; for an LSTM the four gates are.
"""

from collections import Counter
from dataclasses import dataclass, replace

from loopfold.stepgraph.loop import Builder, Value, ordered
from loopfold.stepgraph.ops import OPS, ROUNDED, Again
from loopfold.stepgraph.split import Loop


@dataclass(frozen=True, eq=False)
class Product:
    """`gradient of matrix i += leftᵀ @ right`, summed over steps and sequences.

    Or left says which rows of the matrix were read: then right is added to these.
    """

    matrix: int
    left: Value
    right: Value
    rows: int | None = None  # that the matrix has, where left says which


@dataclass(frozen=True, eq=False)
class Reverse:
    """The reverse step of a loop, for a given set of emitted values whose gradients come in."""

    carries: tuple[Value, ...]  # ∇ of each carried leaf of the state before the step
    inputs: tuple[Value | None, ...]  # ∇ of each input at this step
    products: tuple[Product, ...]
    rows: tuple[tuple[int, Value], ...]  # (constant i, what this step adds to its gradient)
    contexts: tuple[tuple[int, Value], ...]  # (context i, its gradient from this step and all later ones)
    reached: tuple[bool, ...]  # whether a gradient goes back to each carried leaf at all; if not, it is None, not zero

    def computed(self, b: Builder) -> "Reverse":
        """The same of the loop without what only gradients read."""
        sides = [v for p in self.products for v in (p.left, p.right)]
        inputs = [g for g in self.inputs if g is not None]
        beside = [g for _, g in (*self.rows, *self.contexts)]
        found = iter(b.computed([*self.carries, *inputs, *sides, *beside]))
        return replace(
            self,
            carries=tuple(next(found) for _ in self.carries),
            inputs=tuple(g if g is None else next(found) for g in self.inputs),
            products=tuple(replace(p, left=next(found), right=next(found)) for p in self.products),
            rows=tuple((i, next(found)) for i, _ in self.rows),
            contexts=tuple((i, next(found)) for i, _ in self.contexts),
        )

    def stored(self) -> list[Value]:
        """What is needed of every step: gradients of inputs, and the right sides of products; each once."""
        found = [g for g in self.inputs if g is not None] + [p.right for p in self.products]
        return list(dict.fromkeys(found))

    def roots(self) -> list[Value]:
        return [*self.moving(), *self.stored(), *[g for _, g in self.rows]]

    def moving(self) -> list[Value]:
        """The rows that go from each step to the one before; `carry` k is the k-th."""
        return [*self.carries, *[g for _, g in self.contexts]]


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
    order = ordered(loop.emitted)
    results = _rounded_results(loop, order)
    for v in reversed(order):
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
        elif v.op == "row":
            products.append(Product(v.index[0], v.args[0], g, v.index[1]))
        elif (rule := OPS[v.op].gradient) is not None:
            for argument, gradient in zip(v.args, rule(b, results.get(v, v), g, *v.args), strict=True):
                if gradient is not None:
                    send(argument, gradient)

    leaf = {(v.op, v.index): g for v, g in totals.items() if v.is_leaf}
    widths = {v.index: v.width for v in ordered(loop.emitted) if v.op == "state"}
    zero = b.number(0)
    carries = tuple(
        b.expand(leaf.get(("state", i), zero), widths.get(i, loop.next[k].width)) for k, i in enumerate(loop.carried)
    )
    inputs = tuple(None if i in loop.fixed else leaf.get(("input", i)) for i in range(len(loop.inputs)))
    rows = tuple((i, g) for (op, i), g in leaf.items() if op == "constant")
    reached = tuple(("state", i) in leaf for i in loop.carried)
    by_context = [(i, g) for (op, i), g in leaf.items() if op == "context"]
    contexts = tuple(
        (i, b.add(b.make("carry", width=g.width, index=k), g)) for k, (i, g) in enumerate(by_context, len(carries))
    )
    return Reverse(carries, inputs, tuple(products), rows, contexts, reached)


def _rounded_results(loop: Loop, order: list[Value]) -> dict[Value, Value]:
    """What gradients read in place of values that are only there to be rounded: torch, too, keeps the rounded one."""
    uses = Counter(a for v in order for a in v.args)
    uses.update(loop.emitted)
    rounded = {v.args[0]: v for v in order if v.op in ROUNDED.values()}
    return {
        a: v
        for a, v in rounded.items()
        if uses[a] == 1 and a.index is None and a.op not in ROUNDED.values() and not OPS[a.op].exact
    }


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


def kept_values(loop: Loop) -> tuple[Value, ...]:
    """The forward values to keep for every step, besides the emitted ones, so that any reverse step can run."""
    reverse = differentiate(loop, (True,) * len(loop.emitted))
    emitted, forward = set(loop.emitted), ordered(loop.emitted)
    kept: dict[Value, None] = {}

    def there(v: Value) -> bool:
        return v.is_leaf or v in emitted or v in kept

    def at_hand(v: Value) -> bool:
        """For a product of all steps together, which needs no more than to round it."""
        source = v.args[0] if v.op in ROUNDED.values() else v
        return there(v) or source.op == "state" or source in emitted or source in kept

    known: dict[Value, bool] = {}  # of `again`, which may become true while more is kept, and never false

    def again(v: Value) -> bool:
        """Whether it can be computed again from what is there."""
        todo = [v]
        while todo:
            u = todo[-1]
            how = OPS[u.op].again
            if how is Again.CHEAP and not there(u):
                unknown = [a for a in u.args if a not in known]
                if unknown:
                    todo += unknown
                    continue
                known[u] = all(known[a] for a in u.args)
            else:
                known[u] = there(u) or (how is not Again.KEPT and all(map(there, u.args)))
            todo.pop()
        return known[v]

    def put(v: Value) -> None:
        kept[v] = None
        for u in [u for u, found in known.items() if not found]:
            del known[u]

    def keep(v: Value) -> None:
        todo = [v]
        while todo:
            v = todo.pop()
            if again(v):
                continue
            missing = [a for a in v.args if not again(a)]
            cheap = OPS[v.op].again is Again.CHEAP and v.op != "slice"
            if v.is_bool or (cheap and sum(a.width > 1 for a in missing) <= 1):
                todo += reversed(missing)  # one row, and numbers, from which v and perhaps others come again
            else:
                put(v)

    inside = set(forward)
    reverse_only = [v for v in ordered(reverse.roots(), stop=inside) if v not in inside]
    read = {a for v in reverse_only for a in v.args if a in inside} | {v for v in reverse.roots() if v in inside}
    lefts = {p.left for p in reverse.products}
    compared = {a for v in read if OPS[v.op].exact for a in v.args}  # computed again, it might miss by a bit
    for v in forward:  # arguments first: what is kept early serves what comes later
        if (v in lefts and not at_hand(v)) or (v in compared and not there(v)):
            put(v)
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
