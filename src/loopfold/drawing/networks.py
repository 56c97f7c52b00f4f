"""The circuit of a network: of a transition, a layer, a pattern or a language model."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from loopfold.drawing.circuit import Circuit, Level, Port, Role, Source, Values, Variable, When, same
from loopfold.drawing.notation import symbol
from loopfold.feeding import Feeding, FreeRunning, Outputs, Raw, Soft, TeacherForcing
from loopfold.patterns import (
    Autoencoder,
    EncoderDecoder,
    OutputRecurrence,
    Pattern,
    Readout,
    SequenceToOne,
    SequenceToSequence,
    VectorToSequence,
)
from loopfold.recurrent import Bidirectional, Recurrent, RecurrentLayer, Stacked, as_layer
from loopfold.states import State, Step, in_evaluation, leaves, name_of
from loopfold.stepgraph.graph import Refusal, StepGraph
from loopfold.stepgraph.trace import tensors_of, trace, trace_map
from loopfold.transitions import Embedded, example_inputs, initial_state, one_number
from loopfold.unfolding import check_input, check_steps


def circuit(model: Any, level: Level, feeding: Feeding | None, x: Tensor | None) -> Circuit:
    """The circuit of `model`; `x`, a sequence that it could read, is needed only where its size cannot be found."""
    if isinstance(model, type):
        raise TypeError(f"draw needs a network, not its class: type {model.__name__}(...) with its sizes.")
    if not callable(model):
        raise TypeError(f"draw takes a transition, a layer or a pattern; a {type(model).__name__} came.")
    if hasattr(model, "initial_context"):  # a language model; those modules stand below this one
        network = getattr(model, "network", None)
        if not isinstance(network, SequenceToSequence):
            raise TypeError(f"{name_of(model)} has no recurrence to draw; draw takes recurrent language models.")
        return _Drawn(model, level).language_model(network, _fed(feeding, TeacherForcing()))
    drawn = _Drawn(model, level)
    if isinstance(model, Autoencoder):
        fed = _fed(feeding, FreeRunning())
        return drawn.encoder_decoder(model.network, fed, x, target="x")
    if isinstance(model, EncoderDecoder):
        return drawn.encoder_decoder(model, _fed(feeding, TeacherForcing()), x)
    if isinstance(model, VectorToSequence):
        return drawn.vector_to_sequence(model, _fed(feeding, TeacherForcing()), x)
    if isinstance(model, OutputRecurrence):
        return drawn.output_recurrence(model, _fed(feeding, TeacherForcing()))
    if feeding is not None:
        raise ValueError(f"{drawn.circuit.name} feeds no output back, so it has no feeding: leave {feeding} out.")
    if isinstance(model, SequenceToSequence | SequenceToOne):
        return drawn.reader(model, x)
    return drawn.layer_alone(as_layer(model), x)


def _fed(feeding: Feeding | None, default: Feeding) -> Feeding:
    if feeding is not None and not isinstance(feeding, Feeding):
        raise TypeError(f"feeding must be an object such as lf.TeacherForcing(); {feeding!r} came.")
    return feeding or default


class _Drawn:
    """A circuit in the making."""

    def __init__(self, model: Any, level: Level) -> None:
        self.circuit = Circuit(name_of(model.cell if isinstance(model, Recurrent) else model), level)

    # ------------------------------------------------------------------ the patterns

    def layer_alone(self, layer: RecurrentLayer, x: Tensor | None) -> Circuit:
        self._layer(layer, self._input(layer, x))
        return self.circuit

    def reader(self, model: SequenceToSequence | SequenceToOne, x: Tensor | None) -> Circuit:
        """Figures 10.3 and 10.5 of the book."""
        hidden = self._layer(model.recurrent, self._input(model.recurrent, x))
        self._readout(model, hidden, When.LAST if isinstance(model, SequenceToOne) else When.EVERY)
        return self.circuit

    def language_model(self, network: SequenceToSequence, feeding: Feeding) -> Circuit:
        """What is read at step t is the token of step t-1: the true one, or the model's own."""
        tokens = any(isinstance(part, Embedded) for part in network.modules())
        size = network.outputs.size
        like = network.c

        def read(token: Tensor | None, batch: int) -> Tensor:
            start = torch.full((batch,), size, device=like.device)
            token = start if token is None else token
            return token if tokens else nn.functional.one_hot(token, size + 1)[:, :-1].to(like.dtype)

        def following(o: Tensor | None, y: Tensor | None, batch: int) -> Tensor:
            if o is None:
                return read(y, batch)
            vector = feeding.next(o, y, network.outputs)
            return vector.argmax(-1) if tokens else vector

        x = self.circuit.add(Variable("x", Role.INPUT))
        example = torch.zeros(1, dtype=torch.long, device=like.device) if tokens else like.new_zeros(1, size)
        hidden = self._layer(network.recurrent, (Port((Source(x),)), example))
        o, y = self._readout(network, hidden, When.EVERY)
        self.circuit.connect(x, [self._feedback(feeding, o, y, following)], same)
        return self.circuit

    def output_recurrence(self, model: OutputRecurrence, feeding: Feeding) -> Circuit:
        """Figure 10.4, and 10.6 under teacher forcing."""
        x = self.circuit.add(Variable("x", Role.INPUT))
        h = self.circuit.add(Variable("h", Role.STATE, layer=1))
        graph = _traced(trace_map, model.hidden, model.U.new_zeros(1, model.U.shape[1]), self._zeros(model))
        o, y = self._readout(model, [h], When.EVERY)
        fed = self._feedback(feeding, o, y, self._next(feeding, model))
        assert graph.x is not None
        ports = {graph.state[0]: fed, graph.x: Port((Source(x),))}
        self.circuit.step(graph, tensors_of(model.hidden), ports, [h])
        return self.circuit

    def vector_to_sequence(self, model: VectorToSequence, feeding: Feeding, x: Tensor | None) -> Circuit:
        """Figure 10.9: one vector, read at every step, beside the output of the step before."""
        vector = self.circuit.add(Variable("x", Role.INPUT, When.ONCE))
        self._writer(model, feeding, vector, _width(model.recurrent, model.outputs, x))
        return self.circuit

    def encoder_decoder(self, model: EncoderDecoder, feeding: Feeding, x: Tensor | None, target: str = "y") -> Circuit:
        """Figure 10.12: the last state of the encoder is the vector C that the decoder reads at every step."""
        read = self._layer(model.encoder, self._input(model.encoder, x), marks=("e",))
        vector = self.circuit.add(Variable("C", Role.INPUT, When.ONCE, phase=1))
        port = Port(tuple(map(Source, read)), _side_by_side)
        self.circuit.connect(vector, [port], same)
        self._writer(model.decoder, feeding, vector, model.encoder.hidden_size, phase=1, target=target)
        return self.circuit

    def _writer(
        self,
        model: VectorToSequence,
        feeding: Feeding,
        vector: Variable,
        width: int,
        phase: int = 0,
        target: str = "y",
    ) -> None:
        """What the lowest layer reads comes from the top of the network, so the top's variables are made first."""
        o = Variable("o", Role.OUTPUT, phase=phase)
        y = Variable(symbol(target), Role.TARGET, phase=phase)
        following = self._next(feeding, model)
        fed = self._feedback(feeding, o, y, following)

        def read(values: Values, batch: int) -> Tensor:
            return torch.cat([values[0], fed.combine(values[1:], batch)], -1)

        port = Port((Source(vector), *fed.sources), read)
        example = model.V.new_zeros(1, width + model.outputs.size)
        hidden = self._layer(model.recurrent, (port, example), marks=("d",) if phase else (), phase=phase)
        self._readout(model, hidden, When.EVERY, (o, y))

    # ------------------------------------------------------------------ their parts

    def _input(self, layer: RecurrentLayer, x: Tensor | None) -> tuple[Port, Tensor] | None:
        """The variable x, and an example of what it holds at one step; None for a step without input."""
        cell = _lowest(layer)
        if x is not None:
            check_input(
                name_of(cell), x, getattr(cell, "input_size", None), next(iter(tensors_of(cell).values()), None)
            )
            check_steps(x.shape[0])
        example = _example(cell) if x is None else x[0, :1]
        return None if example is None else (Port((Source(self.circuit.add(Variable("x", Role.INPUT))),)), example)

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
        graph = _traced(trace, cell, example, state(1))
        names = _state_names(graph)
        variables = [
            self.circuit.add(
                Variable(
                    symbol(name, *marks),
                    Role.STATE,
                    When.EVERY,
                    phase,
                    depth,
                    backwards,
                    _leaf(state, i),
                )
            )
            for i, name in enumerate(names)
        ]
        lag = -1 if backwards else 1
        ports = {node: Port((Source(v, lag),)) for node, v in zip(graph.state, variables, strict=True)}
        if graph.x is not None and reads is not None:
            ports[graph.x] = reads[0]
        self.circuit.step(graph, tensors_of(cell), ports, variables, marks)
        return variables[0]

    def _readout(
        self,
        model: Pattern,
        hidden: Sequence[Variable],
        when: When,
        tops: tuple[Variable, Variable] | None = None,
    ) -> tuple[Variable, Variable]:
        """o, L and y above what they are read from."""
        phase = hidden[0].phase
        o, y = tops or (Variable("o", Role.OUTPUT, when, phase), Variable("y", Role.TARGET, when, phase))
        loss = Variable("L", Role.LOSS, when, phase)
        readout: Readout = model.readout
        graph = _traced(trace_map, readout, None, readout.c.new_zeros(1, readout.V.shape[1]))
        ports = {graph.state[0]: Port(tuple(map(Source, hidden)), _side_by_side)}
        for variable in (o, loss, y):
            self.circuit.add(variable)
        self.circuit.step(graph, tensors_of(readout), ports, [o])
        outputs = model.outputs
        self.circuit.connect(
            loss,
            [Port((Source(o),)), Port((Source(y, flows=False),))],
            lambda values, batch: outputs.losses(*values).sum(),
        )
        return o, y

    def _feedback(
        self,
        feeding: Feeding,
        o: Variable,
        y: Variable,
        following: Callable[[Tensor | None, Tensor | None, int], Tensor],
    ) -> Port:
        """What goes back in: the true target, the model's own output, or one of the two."""
        true = Source(y, 1, flows=False)
        own = Source(o, 1, flows=isinstance(getattr(feeding, "pick", None), Soft | Raw))  # not through a choice
        if isinstance(feeding, TeacherForcing):
            return Port((true,), lambda values, batch: following(None, values[0], batch))
        if isinstance(feeding, FreeRunning):
            return Port((own,), lambda values, batch: following(values[0], None, batch))
        return Port((own, true), lambda values, batch: following(values[0], values[1], batch))

    def _next(self, feeding: Feeding, model: Pattern) -> Callable[[Tensor | None, Tensor | None, int], Tensor]:
        outputs = model.outputs

        def following(o: Tensor | None, y: Tensor | None, batch: int) -> Tensor:
            if o is None:
                return model.c.new_zeros(batch, outputs.size) if y is None else outputs.encode(y).to(model.c.dtype)
            return feeding.next(o, y, outputs)

        return following

    @staticmethod
    def _zeros(model: Pattern) -> Tensor:
        return model.c.new_zeros(1, model.outputs.size)


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


def _traced(how: Callable[..., StepGraph], f: Step, x: Tensor | None, state: State) -> StepGraph:
    try:
        with in_evaluation(f):
            return how(f, x, state)
    except Refusal as reason:
        raise ValueError(f"{name_of(f)} cannot be drawn, because it cannot be traced: {reason}") from reason


def _state_names(graph: StepGraph) -> list[str]:
    """The user's own names; where there are none, h, or s₁, s₂, …"""
    names = [node.name for node in graph.state]
    if names == ["state"]:
        return ["h"]
    return [f"s_{i + 1}" if name == f"state{i}" else name for i, name in enumerate(names)]


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


def _width(layer: RecurrentLayer, outputs: Outputs, x: Tensor | None) -> int:
    """The size of the vector that is read beside the outputs."""
    if x is not None:
        return x.shape[-1]
    example = _example(_lowest(layer))
    if example is None or example.dim() != 2 or example.shape[1] <= outputs.size:
        raise ValueError("the size of the vector was not found: give an example, draw(..., x=torch.zeros(batch, n)).")
    return example.shape[1] - outputs.size
