"""The circuit of a network: of a transition, a layer, a pattern or a language model."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from loopfold.drawing.circuit import Circuit, Level, Port, Role, Source, Values, Variable, same
from loopfold.drawing.notation import symbol
from loopfold.errors import Argument, OptionError
from loopfold.feeding import Feeding, checked_feeding
from loopfold.recurrent import Bidirectional, Recurrent, RecurrentLayer, Stacked, as_layer
from loopfold.states import State, Step, in_evaluation, leaves, map_state, name_of
from loopfold.stepgraph.graph import Node, Refusal, StepGraph
from loopfold.stepgraph.trace import tensors_of, trace, trace_map
from loopfold.transitions import Embedded, example_inputs, initial_state, one_number
from loopfold.unfolding import check_input, check_steps, checked
from loopfold.wiring import Pattern, When, Wiring


def circuit(
    model: Any, level: Level, feeding: Feeding | None, x: State | None, context: State | None = None
) -> Circuit:
    """The circuit of `model`; `x`, a sequence that it could read, is needed only where its size cannot be found.

    A transition, or a layer of one, that reads several inputs or a `context` needs examples of them.
    """
    if isinstance(model, type):
        raise TypeError(f"draw needs a network, not its class: type {model.__name__}(...) with its sizes.")
    if not callable(model):
        raise TypeError(f"draw takes a transition, a layer or a pattern; got a {type(model).__name__}.")
    wiring = wiring_of(model)
    if wiring is None and hasattr(model, "initial_context"):  # a language model; those modules stand below this one
        raise TypeError(f"{name_of(model)} has no recurrence to draw; draw takes recurrent language models.")
    if feeding is not None:
        checked_feeding(feeding)
    drawn = _Drawn(model, level)
    if context is not None or isinstance(x, tuple):
        cell = model.cell if isinstance(model, Recurrent) else model
        if wiring is not None or isinstance(cell, RecurrentLayer):
            raise ValueError(f"only a transition, or Recurrent(cell), reads a context or several inputs; not {cell}.")
        return drawn.transition(cell, x, context)
    if feeding is not None and (wiring is None or wiring.feeding is None):
        raise OptionError(f"{drawn.circuit.name} feeds no output back: leave out ", Argument("feeding"), ".")
    if wiring is not None and wiring.attends:
        raise ValueError(
            f"{drawn.circuit.name} reads all that its encoder left at every step, which draw does not show; draw its "
            f"parts: model.encoder, and model.recurrent with examples x=… and context=…."
        )
    if wiring is None:
        return drawn.layer_alone(as_layer(model), x)
    return drawn.network(wiring, feeding or wiring.feeding, x)


def wiring_of(model: Any) -> Wiring | None:
    """How a pattern or a recurrent language model is put together; None for a transition or a layer."""
    wiring = model.wiring if isinstance(model, Pattern) else getattr(model, "wiring", None)
    return wiring if isinstance(wiring, Wiring) else None


class _Drawn:
    """A circuit in the making."""

    def __init__(self, model: Any, level: Level) -> None:
        self.circuit = Circuit(name_of(model.cell if isinstance(model, Recurrent) else model), level)

    def layer_alone(self, layer: RecurrentLayer, x: Tensor | None) -> Circuit:
        self._layer(layer, self._input(_lowest(layer), x))
        return self.circuit

    def transition(self, cell: Step, x: State | None, context: State | None) -> Circuit:
        """A transition with all that it may read: each input, each part of a context, under its own name."""
        given = checked(cell, x, None, None, None, context)
        first = None if x is None else map_state(lambda leaf: leaf[0], given.x)
        graph, called = _traced(partial(trace, context=context), cell, first, given.state)
        ports = {
            node: Port(
                (Source(self.circuit.add(Variable(symbol(called.get(node.name, node.name)), Role.INPUT, when))),)
            )
            for nodes, when in ((graph.x, When.EVERY), (graph.context, When.ONCE))
            for node in nodes
        }
        self._step(graph, called, cell, ports, lambda batch: initial_state(cell, batch, first, context))
        return self.circuit

    def network(self, wiring: Wiring, feeding: Feeding | None, x: Tensor | None) -> Circuit:
        """Figures 10.3 to 10.6, 10.9 and 10.12 of the book, and others of the same parts.

        What the lowest layer reads may come from the top of the network, so the top's variables are made first.
        """
        phase, marks = (0, ()) if wiring.encoder is None else (1, ("d",))
        o = Variable("o", Role.OUTPUT, wiring.answers, phase)
        y = Variable("y" if wiring.targets is None else "x", Role.TARGET, wiring.answers, phase)
        fed = None if feeding is None else self._feedback(wiring, feeding, o, y)
        layer = wiring.recurrent
        if isinstance(layer, RecurrentLayer):
            hidden = self._layer(layer, self._reads(wiring, layer, fed, x), marks=marks, phase=phase)
        else:
            assert fed is not None
            hidden = [self._map(wiring, layer, fed, x)]
        self._readout(wiring, hidden, o, y)
        return self.circuit

    # ------------------------------------------------------------------ its parts

    def _reads(
        self, wiring: Wiring, layer: RecurrentLayer, fed: Port | None, x: Tensor | None
    ) -> tuple[Port, Tensor] | None:
        """What the lowest layer reads: x, or the C that an encoder leaves behind; what is fed back; or both."""
        size = 0 if fed is None else wiring.outputs.size
        if wiring.encoder is not None:
            read = self._layer(wiring.encoder, self._input(_lowest(wiring.encoder), x), marks=("e",))
            vector = self.circuit.add(Variable("C", Role.INPUT, When.ONCE, phase=1))
            self.circuit.connect(vector, [Port(tuple(map(Source, read)), _side_by_side)], same)
            width = wiring.encoder.hidden_size
        elif fed is None and wiring.x is not When.ONCE:
            return self._input(_lowest(layer), x)
        elif fed is not None and wiring.x is None:  # what is fed back is the input
            vector = self.circuit.add(Variable("x", Role.INPUT))
            self.circuit.connect(vector, [fed], same)
            return Port((Source(vector),)), fed.combine([None] * len(fed.sources), 1)
        else:
            assert wiring.x is not None
            width = _width(layer, size, x)
            vector = self.circuit.add(Variable("x", Role.INPUT, wiring.x))

        def combine(values: Values, batch: int) -> Tensor:
            return values[0] if fed is None else torch.cat([values[0], fed.combine(values[1:], batch)], -1)

        if fed is None:
            return Port((Source(vector),), combine), wiring.readout.c.new_zeros(1, width)
        back = "y" if wiring.targets is None else "x"  # whether it is the truth, or an output in its place
        sources = [Source(vector, part=vector.label), *(source._replace(part=back) for source in fed.sources)]
        return Port(tuple(sources), combine), wiring.readout.c.new_zeros(1, width + size)

    def _input(self, cell: Step, x: Tensor | None) -> tuple[Port, Tensor] | None:
        """The variable x, and an example of what it holds at one step; None for a step without input."""
        if x is not None:
            check_input(
                name_of(cell), x, getattr(cell, "input_size", None), next(iter(tensors_of(cell).values()), None)
            )
            check_steps(x.shape[0])
        example = _example(cell) if x is None else x[0, :1]
        if example is None:
            return None
        variable = self.circuit.add(Variable(symbol(_input_name(cell)), Role.INPUT))
        return Port((Source(variable),)), example

    def _map(self, wiring: Wiring, f: nn.Module, fed: Port, x: Tensor | None) -> Variable:
        """h = f(fed, x), with no way from one h to the next but through what is fed back."""
        like = wiring.readout.c
        known = getattr(f, "input_size", None)
        read = self._input(f, like.new_zeros(1, 1, known) if x is None and isinstance(known, int) else x)
        graph, called = _traced(trace_map, f, None if read is None else read[1], like.new_zeros(1, wiring.outputs.size))
        h = self.circuit.add(Variable("h", Role.STATE, layer=1))
        ports = {graph.state[0]: fed}
        if read is not None:
            ports[graph.x[0]] = read[0]
        self.circuit.step(graph, tensors_of(f), ports, [h], called=called)
        return h

    def _layer(
        self,
        layer: RecurrentLayer,
        reads: tuple[Port, Tensor] | None,
        depth: int = 1,
        marks: tuple[str, ...] = (),
        phase: int = 0,
        backwards: bool = False,
    ) -> list[Variable]:
        """The variables that a layer above reads, side by side; `marks` tell this layer's names from others'."""
        if isinstance(layer, Stacked):
            for i, part in enumerate(layer.parts):
                own = (*marks, str(i + 1)) if len(layer.layers) > 1 else marks
                hidden = self._layer(part, reads, depth + i, own, phase, backwards)
                example = leaves(part.initial_state(1))[0].new_zeros(1, part.hidden_size)
                reads = Port(tuple(map(Source, hidden)), _side_by_side), example
            return hidden
        if isinstance(layer, Bidirectional):
            there = self._layer(layer.forwards, reads, depth, (*marks, r"\rightarrow"), phase, backwards)
            back = self._layer(layer.backwards, reads, depth, (*marks, r"\leftarrow"), phase, not backwards)
            return there + back
        if not isinstance(layer, Recurrent):
            raise TypeError(
                f"{name_of(layer)} is a layer of its own kind; draw knows Recurrent, Stacked, Bidirectional."
            )
        return [self._cell(layer.cell, reads, depth, marks, phase, backwards)]

    def _cell(
        self,
        cell: Step,
        reads: tuple[Port, Tensor] | None,
        depth: int,
        marks: tuple[str, ...],
        phase: int,
        backwards: bool,
    ) -> Variable:
        example = None if reads is None else reads[1]
        state = _state_of(cell, example)
        graph, called = _traced(trace, cell, example, state(1))
        ports = {} if reads is None else {graph.x[0]: reads[0]}
        for node in graph.x[len(ports) :]:  # the number of the step
            ports[node] = Port((Source(self.circuit.add(Variable(node.name, Role.INPUT, phase=phase))),))
        return self._step(graph, called, cell, ports, state, depth, marks, phase, backwards)

    def _step(
        self,
        graph: StepGraph,
        called: dict[str, str],
        cell: Step,
        inputs: dict[Node, Port],
        state: Callable[[int], State],
        depth: int = 1,
        marks: tuple[str, ...] = (),
        phase: int = 0,
        backwards: bool = False,
    ) -> Variable:
        """The states of a step, what it gives beside them, and the variable that a layer above reads."""
        names = _state_names(graph, called)
        variables = [
            self.circuit.add(
                Variable(
                    symbol(name, *marks),
                    Role.STATE,
                    When.EVERY,
                    phase,
                    depth,
                    backwards,
                    initial=_leaf(state, i),
                )
            )
            for i, name in enumerate(names)
        ]
        lag = -1 if backwards else 1
        ports = {node: Port((Source(v, lag),)) for node, v in zip(graph.state, variables, strict=True)} | inputs
        outputs = [
            self.circuit.add(Variable(symbol(name, *marks), Role.OUTPUT, When.EVERY, phase, depth, backwards))
            for name in _output_names(graph)
        ]
        self.circuit.step(graph, tensors_of(cell), ports, [*variables, *outputs], marks, called)
        return (outputs or variables)[0]

    def _readout(self, wiring: Wiring, hidden: Sequence[Variable], o: Variable, y: Variable) -> None:
        """o, L and y above what they are read from."""
        loss = Variable("L", Role.LOSS, o.when, o.phase)
        readout, outputs = wiring.readout, wiring.outputs
        graph, _ = _traced(trace_map, readout, None, readout.c.new_zeros(1, readout.V.shape[1]))
        ports = {graph.state[0]: Port(tuple(map(Source, hidden)), _side_by_side)}
        for variable in (o, loss, y):
            self.circuit.add(variable)
        self.circuit.step(graph, tensors_of(readout), ports, [o])
        self.circuit.connect(
            loss,
            [Port((Source(o),)), Port((Source(y, flows=False),))],
            lambda values, batch: outputs.losses(*values).sum(),
        )

    def _feedback(self, wiring: Wiring, feeding: Feeding, o: Variable, y: Variable) -> Port:
        """What goes back in: the true target, the model's own output, or what is made of both."""
        outputs, like = wiring.outputs, wiring.readout.c
        tokens = wiring.x is None and any(isinstance(part, Embedded) for part in wiring.recurrent.modules())
        own = (Source(o, 1, flows=feeding.flows),) if feeding.reads_own else ()
        true = (Source(y, 1, flows=False),) if feeding.reads_truth else ()

        def following(values: Values, batch: int) -> Tensor:
            if all(value is None for value in values):  # before the first step; the start of a text is a token too
                return like.new_full((batch,), outputs.size, dtype=torch.long) if tokens else zeros(batch)
            vector = feeding.next(values[0] if own else zeros(batch), values[-1] if true else None, outputs)
            return vector.argmax(-1) if tokens else vector

        def zeros(batch: int) -> Tensor:
            return like.new_zeros(batch, outputs.size)

        return Port((*own, *true), following)


def _side_by_side(values: Values, batch: int) -> Tensor:
    return values[0] if len(values) == 1 else torch.cat(list(values), -1)


def _state_of(cell: Step, example: Tensor | None) -> Callable[[int], State]:
    """The state before the first step, for a batch."""

    def state(batch: int) -> State:
        x = None if example is None else example.expand(batch, *example.shape[1:])
        if isinstance(cell, nn.Module) or example is not None:
            return initial_state(cell, batch, x)
        return one_number(batch)

    return state


def _leaf(state: Callable[[int], State], i: int) -> Callable[[int], Tensor]:
    return lambda batch: leaves(state(batch))[i]


def _traced(how: Callable[..., StepGraph], f: Step, x: State | None, state: State) -> tuple[StepGraph, dict[str, str]]:
    """The graph of a step, and what the step calls the values of its nodes."""
    called: dict[str, str] = {}
    try:
        with in_evaluation(f):
            return how(f, x, state, called=called, real=False), called
    except Refusal as reason:
        raise ValueError(f"{name_of(f)} cannot be drawn, because it cannot be traced: {reason}") from reason


def _state_names(graph: StepGraph, called: dict[str, str]) -> list[str]:
    """The user's own names, of fields or of what the state is unpacked into; else h, or s₁, s₂, …"""
    names = [node.name for node in graph.state]
    if names == ["state"]:
        return ["h"]
    own = [called.get(name, name) if name == f"state{i}" else name for i, name in enumerate(names)]
    if len(set(own)) < len(own):  # one variable for all in turn
        own = names
    return [f"s_{i + 1}" if name == f"state{i}" else name for i, name in enumerate(own)]


def _input_name(cell: Step) -> str:
    """What a step calls its input: the name of its second argument, else x."""
    try:
        parameters = list(inspect.signature(cell.forward if isinstance(cell, nn.Module) else cell).parameters.values())
    except (TypeError, ValueError):
        return "x"
    named = [p.name for p in parameters[:2] if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return named[1] if len(named) == 2 and named[1].strip("_") else "x"


def _output_names(graph: StepGraph) -> list[str]:
    """The fields of a NamedTuple, else o, or o₁, o₂, …"""
    count = len(graph.results)
    fields = getattr(graph.structure[0], "_fields", ()) if count else ()
    if len(fields) == count:
        return list(fields)
    return ["o"] if count == 1 else [f"o_{i + 1}" for i in range(count)]


# ------------------------------------------------------------------ what a transition reads


def _lowest(layer: RecurrentLayer) -> Step:
    """The transition that reads x."""
    while not isinstance(layer, Recurrent):
        if isinstance(layer, Stacked):
            layer = layer.parts[0]
        elif isinstance(layer, Bidirectional):
            layer = layer.forwards
        else:
            raise TypeError(f"{name_of(layer)} is a layer of its own kind; draw its parts, or give it an example x=….")
    return layer.cell


def _example(cell: Step) -> Tensor | None:
    """An x that `cell` reads at one step; None for a step without input."""
    possible = example_inputs(cell)
    found = [x for x in possible if x is not None]
    if len(found) < len(possible):
        return None
    if len(found) == 1:
        return found[0]
    what = f"x of several sizes ({_shapes(found)}) could be what" if found else "no size of x was found that"
    raise ValueError(f"{what} {name_of(cell)} reads: give an example, draw(..., x=torch.zeros(τ, batch, n_in)).")


def _shapes(examples: list[Tensor]) -> str:
    return ", ".join("a class" if x.dim() == 1 else str(x.shape[1]) for x in examples)


def _width(layer: RecurrentLayer, size: int, x: Tensor | None) -> int:
    """The size of the vector that is read beside outputs of a size."""
    if x is not None:
        return x.shape[-1]
    example = _example(_lowest(layer))
    if example is None or example.dim() != 2 or example.shape[1] <= size:
        raise ValueError("the size of the vector was not found: give an example, draw(..., x=torch.zeros(batch, n)).")
    return example.shape[1] - size
