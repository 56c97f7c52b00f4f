"""The circuit: a network as one node per component, and edges that may lead from one step to the next.

Everything here is read off step graphs. The circuit can be run (see `unfolded`), so a missing edge would be seen in
the numbers.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from loopfold.drawing.formulas import Formulas
from loopfold.drawing.notation import parameter_symbols, subscripted, symbol
from loopfold.stepgraph.aten import Product, aten
from loopfold.stepgraph.graph import Node, StepGraph, apply, needed_for
from loopfold.wiring import When


class Level(Enum):
    """How much a drawing shows of a step: its variables, as the book does, or every operation."""

    BOOK = "book"
    OPERATIONS = "operations"


class Role(Enum):
    """What a node is; it decides how the node looks and where it stands."""

    INPUT = "input"
    STATE = "state"
    OUTPUT = "output"
    LOSS = "loss"
    TARGET = "target"
    OPERATION = "operation"


@dataclass(frozen=True, eq=False)
class Variable:
    """A component of the network: a variable of the book, or an operation.

    `label`      mathtext, without the time
    `phase`      0; 1 for what writes, after something else has read
    `layer`      which layer it belongs to, the lowest first; it decides how high it stands
    `backwards`  whether its sequence is read from the end
    """

    label: str
    role: Role
    when: When = When.EVERY
    phase: int = 0
    layer: int = 0
    backwards: bool = False
    carries: bool = False  # an operation that adds or multiplies number by number: what comes in goes on
    initial: Callable[[int], Tensor] | None = None  # of a state: its value before the first step, for a batch


@dataclass(frozen=True, eq=False)
class Edge:
    """`target` reads `source`: of the same step, or of `lag` steps before (-1: of the step after).

    `parameters`  what the value is multiplied with on its way, as mathtext: U, W, V
    `product`     whether each of them multiplies what the one before it has made, as in U E x, or some stand abreast
    `form`        what is done to the value, where `source` is an operation with several results
    `note`        a word on that
    `flows`       whether gradients come back through it: not to what is given, nor through a choice
    """

    source: Variable
    target: Variable
    lag: int = 0
    parameters: tuple[str, ...] = ()
    product: bool = True
    form: Callable[[Any], Any] | None = None
    note: str = ""
    flows: bool = True


Values = Sequence[Any]  # the values of the edges into a variable, in order; None where nothing was fed back yet


class Source(NamedTuple):
    """A variable that is read: of this step or of `lag` before; `flows`: whether gradients come back to it.

    `part` names the part of a vector that it is, beside others: U (x, y) = U_x x + U_y y
    """

    variable: Variable
    lag: int = 0
    flows: bool = True
    part: str = ""


@dataclass(frozen=True)
class Port:
    """Where an input of a step comes from: some variables, and how their values become one."""

    sources: tuple[Source, ...]
    combine: Callable[[Values, int], Tensor] = lambda values, batch: values[0]
    edge: dict[str, Any] = field(default_factory=dict)  # other attributes of its edges
    split: tuple[str, ...] = ()  # of the parameters on its edges, those that multiply what its sources are side by side


@dataclass(frozen=True)
class Circuit:
    """Variables from the bottom up, the edges between them, and the rule by which each is computed."""

    name: str
    level: Level
    variables: list[Variable] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    rules: dict[Variable, Callable[[Values, int], Any]] = field(default_factory=dict)
    symbols: dict[int, str] = field(default_factory=dict)  # of each parameter, by its identity: shared, it has one name
    said: dict[str, str] = field(default_factory=dict)  # what other symbols stand for, as formulas

    def into(self, variable: Variable) -> list[Edge]:
        return [edge for edge in self.edges if edge.target is variable]

    def add(self, variable: Variable) -> Variable:
        self.variables.append(variable)
        return variable

    def connect(self, target: Variable, ports: Sequence[Port], rule: Callable[[list[Tensor], int], Any]) -> None:
        """Compute `target` by `rule`, from one value per port and the batch size."""
        for port in ports:
            for s in port.sources:
                edge = Edge(s.variable, target, s.lag, flows=s.flows, **port.edge)
                names = tuple(subscripted(p, s.part) if s.part and p in port.split else p for p in edge.parameters)
                self.edges.append(replace(edge, parameters=names))
            parts = dict.fromkeys(s.part for s in port.sources if s.part)
            for name in port.split if parts else ():
                self.said[name] = "[" + r"\;\,".join(subscripted(name, part) for part in parts) + "]"

        def compute(values: Values, batch: int) -> Any:
            parts, start = [], 0
            for port in ports:
                parts.append(port.combine(values[start : start + len(port.sources)], batch))
                start += len(port.sources)
            return rule(parts, batch)

        self.rules[target] = compute

    # ------------------------------------------------------------------ from a step graph

    def step(
        self,
        graph: StepGraph,
        tensors: dict[str, Tensor],
        ports: dict[Node, Port],
        results: Sequence[Variable],
        subscripts: tuple[str, ...] = (),
        called: dict[str, str] | None = None,
    ) -> None:
        """Draw `graph`: its leaves are `ports`, what comes out are `results`: the state, then outputs beside it.

        `called` is what the step names its values, by the names of their nodes.
        """
        for name, new in parameter_symbols(graph.parameters, *subscripts).items():
            self.symbols.setdefault(id(tensors[name]), new)
        symbols = {n: self.symbols[id(tensors[name])] for name, n in graph.parameters.items()}
        traced = _Traced(graph, tensors, symbols, called or {}, self.said)
        owners: dict[Node, Variable] = {}
        returned = [*zip((*graph.outputs, *graph.results), results, strict=True)]
        for node, result in returned:
            owners.setdefault(node, result)
        if self.level is Level.OPERATIONS:
            self._operations(traced, ports, owners, results[0])
        else:
            self._quotient(traced, ports, owners)
        for node, result in returned:
            if owners[node] is not result:  # two parts of the state that are always the same
                self.connect(result, [Port((Source(owners[node]),))], same)

    def _quotient(self, traced: "_Traced", ports: dict[Node, Port], owners: dict[Node, Variable]) -> None:
        """The operations between two variables become one edge, labelled with the parameters on the way."""
        for root, result in owners.items():
            if root in ports:  # what goes in comes out
                self.connect(result, [ports[root]], same)
                continue
            known = {node: Port((Source(v),)) for node, v in owners.items() if node is not root} | ports
            inside = needed_for([root], set(known))
            reads = [node for node in traced.order(inside) if node in known]
            multiplied = traced.multiplied(inside, reads, traced.parameters_of)
            labelled = [
                replace(
                    known[node],
                    edge={"parameters": (*multiplied[node].names,), "product": multiplied[node].product},
                    split=traced.split(multiplied[node].names),
                )
                for node in reads
            ]
            self.connect(result, labelled, traced.rule(root, inside, reads))

    def _operations(
        self, traced: "_Traced", ports: dict[Node, Port], owners: dict[Node, Variable], like: Variable
    ) -> None:
        """Every operation is a node; what is made of parameters alone belongs to the operation that reads it."""
        made = dict(ports)  # where the value of a node comes from
        for node in traced.graph.operations:
            if node.op == "getitem" or not traced.varies[node]:
                continue
            returned = node in owners or any(part in owners for part in traced.parts_of(node))
            label, carries = traced.label(node, returned), node.op in ("add", "mul")
            operation = self.add(
                Variable(label, Role.OPERATION, like.when, like.phase, like.layer, like.backwards, carries)
            )
            reads = [n for n in dict.fromkeys(node.inputs()) if traced.varies.get(n, True)]
            inside = needed_for([node], set(reads))
            multiplied = traced.multiplied([node], reads, partial(traced.formulas.factor, node))
            parts = [
                traced.part(
                    made,
                    read,
                    traced.argument(node) is read,
                    traced.split(multiplied[read].names),
                    parameters=(*multiplied[read].names,),
                    note=traced.formulas.beside(node, read, traced.is_read),
                )
                for read in reads
            ]
            self.connect(operation, parts, traced.rule(node, inside, reads))
            made[node] = Port((Source(operation),))
        for node, result in owners.items():
            if traced.varies.get(node, True):
                self.connect(result, [traced.part(made, node)], same)
            else:  # it does not depend on anything that changes
                self.connect(result, [], traced.rule(node, needed_for([node], set()), []))


def same(values: Sequence[Any], batch: int) -> Any:
    """The rule of what only passes a value on."""
    return values[0]


@dataclass
class _Factors:
    """What a value is multiplied with on its way.

    `names`    True: it multiplies the value itself, and not what a matrix has made of it
    `product`  whether each of them multiplies what the one before it has made
    """

    names: dict[str, bool] = field(default_factory=dict)
    product: bool = True


class _Traced:
    """A step graph with the values of its parameters."""

    def __init__(
        self,
        graph: StepGraph,
        tensors: dict[str, Tensor],
        symbols: dict[Node, str],
        called: dict[str, str],
        said: dict[str, str],
    ) -> None:
        self.graph = graph
        self.symbols = symbols
        self.names = _own_names(graph, called)
        self.formulas = Formulas(symbols, self.names, said)
        self.tensors = {node: tensors[name] for name, node in graph.parameters.items()}
        self.varies: dict[Node, bool] = dict.fromkeys(symbols, False)  # whether it differs from step to step
        for node in graph.operations:
            self.varies[node] = node.is_draw or any(self.varies.get(n, True) for n in node.inputs())

    def order(self, nodes: Sequence[Node]) -> list[Node]:
        """What these operations read from outside, in the order in which they do."""
        inside = set(nodes)
        found = [n for node in self.graph.operations if node in inside for n in node.inputs() if n not in inside]
        return list(dict.fromkeys(found))

    def rule(self, root: Node, inside: Sequence[Node], reads: Sequence[Node]) -> Callable[[list[Any], int], Any]:
        """The value of `root` from those of `reads`."""
        kept = set(inside)
        operations = [node for node in self.graph.operations if node in kept]

        def compute(values: list[Any], batch: int) -> Any:
            known: dict[Node, Any] = {**self.tensors, **dict(zip(reads, values, strict=True))}
            for node in operations:
                known[node] = apply(node, known, batch)
            return known[root]

        return compute

    def is_read(self, value: Any) -> bool:
        """Whether it is another value at every step, which an edge brings."""
        return isinstance(value, Node) and self.varies.get(value, True)

    def multiplied(
        self, inside: Sequence[Node], reads: Sequence[Node], names: Callable[[Node], list[str]]
    ) -> dict[Node, _Factors]:
        """What each of `reads` is multiplied with by the operations `inside`, by the `names` of each such factor."""
        kept = set(inside)
        comes_from: dict[Node, dict[Node, set[str]]] = {node: {node: set()} for node in reads}  # and by which factors
        itself: dict[Node, set[Node]] = {node: {node} for node in reads}
        found = {node: _Factors() for node in reads}
        for node in self.graph.operations:
            if node not in kept or not self.varies[node]:
                continue
            inputs = node.inputs()
            ways = [way for n in inputs for way in comes_from.get(n, {}).items()]
            comes_from[node] = {read: set().union(*(by for r, by in ways if r is read)) for read, _ in ways}
            mixes = aten(node.op).product not in (None, Product.EACH)
            itself[node] = set() if mixes else set().union(*(itself.get(n, set()) for n in inputs))
            factors = inputs[slice(*aten(node.op).factors)]
            for name in (name for n in factors if not self.is_read(n) for name in names(n)):
                for n in factors:
                    for read, by in comes_from.get(n, {}).items():
                        factor = found[read]
                        factor.product &= by.issuperset(factor.names.keys() - {name})
                        factor.names[name] = factor.names.get(name, True) and read in itself.get(n, set())
                        comes_from[node][read].add(name)
        return found

    def split(self, names: dict[str, bool]) -> tuple[str, ...]:
        """The parameters that multiply a value itself: where that is several side by side, each has a part of them."""
        return tuple(name for name, itself in names.items() if itself and name in self.symbols.values())

    def parameters_of(self, root: Node) -> list[str]:
        return [self.symbols[node] for node in needed_for([root], set()) if node in self.symbols]

    def part(
        self, made: dict[Node, Port], node: Node, argument: bool = False, split: tuple[str, ...] = (), **edge: Any
    ) -> Port:
        """Where the value of `node` comes from: an operation, or one of the results of one that has several.

        `argument`: the box of what reads it names it already.
        """
        if node.op != "getitem":
            return replace(made[node], edge=edge, split=split)
        whole, index = node.args
        plain = argument or len(self.parts_of(whole)) == 1
        name = "" if plain else f"${self.names[node]}$" if node in self.names else f"[{index}]"
        note = " ".join(filter(None, [name, edge.pop("note", "")]))
        edge |= {"form": lambda value: value[index], "note": note}
        return replace(made[whole], edge=edge, split=split)

    def parts_of(self, whole: Node) -> list[Node]:
        """The results that are used of an operation that has several."""
        return [node for node in self.graph.operations if node.op == "getitem" and node.args[0] is whole]

    def argument(self, node: Node) -> Node | None:
        """The one thing that a function reads, where that is a part of something and has a name: i in σ(i)."""
        reads = [n for n in node.inputs() if self.is_read(n)]
        only = reads[0] if len(reads) == len(node.args) == 1 else None
        return only if only is not None and only.op == "getitem" and only in self.names else None

    def label(self, node: Node, returned: bool) -> str:
        """What stands in an operation's box; `returned`: it stands below the variable that it makes."""
        text = self.formulas.box(node, self.is_read)
        if argument := self.argument(node):
            text += f"$({self.names[argument]})$"
        results = self.parts_of(node)
        named = results[0] if len(results) == 1 else node  # a norm has three, of which one is used
        return text if returned or named not in self.names else f"${self.names[named]}=$ {text}"


def _own_names(graph: StepGraph, called: dict[str, str]) -> dict[Node, str]:
    """What the step calls the results of its operations, where a name stands for one value alone, as mathtext."""
    taken = Counter(called.values())
    return {
        node: symbol(called[node.name])
        for node in graph.operations
        if node.name in called and taken[called[node.name]] == 1 and called[node.name].strip("_")
    }
