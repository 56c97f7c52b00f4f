"""draw(): any network as a circuit or as an unfolded graph."""

from typing import Any

from torch import Tensor

from loopfold.drawing.circuit import Circuit, Level, Role, Variable
from loopfold.drawing.figure import Drawing
from loopfold.drawing.networks import circuit as circuit_of
from loopfold.drawing.networks import wiring_of
from loopfold.drawing.paint import paint
from loopfold.drawing.picture import COLUMNS, circuit_scene, how_many_shown, unfolded_scene
from loopfold.drawing.unfolded import Gradients, Unfolded
from loopfold.errors import Argument, OptionError
from loopfold.feeding import Feeding
from loopfold.states import State, whole_number
from loopfold.wiring import When


def draw(
    model: Any,
    steps: int | tuple[int, int] | None = None,
    gradients: bool = False,
    *,
    level: Level | str = Level.BOOK,
    feeding: Feeding | None = None,
    x: State | None = None,
    y: Tensor | None = None,
    context: State | None = None,
    columns: int = COLUMNS,
) -> Drawing:
    """A network as a picture: its circuit, or its graph unfolded for a number of steps.

    `model`      a transition, a layer, a pattern or a recurrent language model
    `steps`      None: the circuit; else τ, one column per step; two numbers for an encoder and its decoder
    `gradients`  the way back in place of the way forward; with `x` and `y`, edges and nodes carry the size of ∂L/∂
    `level`      `Level.BOOK`: x, h, o, L, y; `Level.OPERATIONS`: every operation of the step graph
    `feeding`    what goes back in, for networks that feed outputs back: `TeacherForcing()`, `FreeRunning()`
    `x`, `y`     inputs `[τ, batch, …]` and targets, as the model takes them
    `context`    an example of what every step reads, `[batch, …]`, for a transition that takes one; it needs x too
    `columns`    how many steps are shown; where there are more, the first three and the last two are

    >>> from loopfold import Elman, SequenceToSequence
    >>> draw(SequenceToSequence(Elman(3, 5), outputs=4), steps=4)
    <Drawing: The unfolded graph of SequenceToSequence, 4 steps>
    """
    level = _level(level)
    for count in () if steps is None else steps if isinstance(steps, tuple) else (steps,):
        whole_number("draw", "steps", count)
    if gradients and steps is None:
        raise ValueError("a circuit has no time for gradients to go back through: give steps=τ, such as steps=4.")
    if y is not None and not gradients:
        raise ValueError("targets are needed for the size of gradients alone: type gradients=True, or leave y out.")
    for name, data in (("x", x), ("y", y)):
        if data is not None and not isinstance(data, Tensor | tuple if name == "x" else Tensor):
            raise TypeError(f"{name} must be a tensor; got a {type(data).__name__}. Type torch.as_tensor({name}).")
    whole_number("draw", "columns", columns)
    circuit = circuit_of(model, level, feeding, x, context)
    _check_size(circuit, steps, columns)
    if steps is None:
        return paint(circuit_scene(circuit))
    unfolded = Unfolded(circuit, steps)
    if isinstance(steps, tuple) and len(steps) != 1 + max(variable.phase for variable in circuit.variables):
        raise ValueError(f"steps={steps} is for an encoder and its decoder; {circuit.name} needs one number.")
    targets = wiring.targets if (wiring := wiring_of(model)) else None
    if gradients and targets is not None and x is not None and y is None:
        y = targets(x)
    if gradients and x is not None and y is None and any(v.role is Role.TARGET for v in circuit.variables):
        raise ValueError("the size of gradients needs both: give the targets y=… beside the inputs x=….")
    if y is None or isinstance(x, tuple):
        return paint(unfolded_scene(unfolded, None, gradients, columns))
    return paint(unfolded_scene(unfolded, sizes(unfolded, x, y), gradients, columns))


SHOWN, FOLLOWED = 20_000, 10_000_000  # arrows of a picture at most, and of the steps that it stands for: minutes


def _check_size(circuit: Circuit, steps: int | tuple[int, ...] | None, columns: int) -> None:
    """Refuse a picture that would take much longer than minutes, before it is begun."""
    arrows, tau = len(circuit.edges), 1 if steps is None else max(steps) if isinstance(steps, tuple) else steps
    shown = arrows * how_many_shown(tau, columns)
    if shown <= SHOWN and arrows * tau <= FOLLOWED:
        return
    fewer = (Argument("steps"), " or ", Argument("columns")) if shown > SHOWN else (Argument("steps"),)
    many, most = (shown, SHOWN) if shown > SHOWN else (arrows * tau, FOLLOWED)
    smaller = (
        ("choose fewer ", *fewer, ", or a smaller network.") if steps else ("draw a part of it, or a smaller one.",)
    )
    raise OptionError(f"the graph of {circuit.name} has {many:,} arrows, and {most:,} can be drawn: ", *smaller)


def sizes(unfolded: Unfolded, x: Tensor | None, y: Tensor) -> Gradients:
    """The sizes of the gradients on these data."""
    given = data_of(unfolded, x, y)
    (batch,) = set(_batches(given))
    try:
        return unfolded.gradients(given, batch)
    except (RuntimeError, IndexError) as error:
        got = ", ".join(f"{variable.label} {tuple(data.shape)}" for variable, data in given.items())
        raise ValueError(f"{unfolded.circuit.name} cannot be run on these data ({got}): {error}") from error


def _level(level: Level | str) -> Level:
    """A level, or its value: "operations"."""
    try:
        return Level(level)
    except ValueError:
        choices = " or ".join(f"lf.Level.{known.name} ({known.value!r})" for known in Level)
        raise ValueError(f"level is {choices}; got {level!r}.") from None


def data_of(unfolded: Unfolded, x: Tensor | None, y: Tensor) -> dict[Variable, Tensor]:
    """The data by the variable that holds them, as long as what is drawn."""
    circuit = unfolded.circuit
    targets = [v for v in circuit.variables if v.role is Role.TARGET]
    inputs = [v for v in circuit.variables if v.role is Role.INPUT and v not in circuit.rules]
    if not targets:
        raise ValueError(
            f"{circuit.name} has no outputs, so no loss whose gradients could be drawn: put it into a pattern, such "
            f"as lf.SequenceToSequence(cell, outputs=…), or leave y out."
        )
    if inputs and x is None:
        raise ValueError("the size of gradients needs both: give the inputs x=… beside the targets y=….")
    if x is not None and not inputs:
        raise ValueError(f"{circuit.name} reads its own targets: leave x out, y is enough.")
    given = {targets[0]: _fitted("y", y, targets[0], unfolded)}
    if x is not None:
        given[inputs[0]] = _fitted("x", x, inputs[0], unfolded)
    batches = _batches(given)
    if len(set(batches)) > 1:
        raise ValueError(f"y has batch {batches[0]} and x has batch {batches[1]}; they must be the same.")
    return given


def _batches(given: dict[Variable, Tensor]) -> list[int]:
    return [data.shape[1 if variable.when is When.EVERY else 0] for variable, data in given.items()]


def _fitted(name: str, data: Tensor, variable: Variable, unfolded: Unfolded) -> Tensor:
    if data.dim() < (2 if variable.when is When.EVERY else 1):
        shape = "[τ, batch, …]" if variable.when is When.EVERY else "[batch, …]"
        raise ValueError(f"{name} has shape {tuple(data.shape)}; it must be {shape}.")
    if variable.when is When.EVERY and data.shape[0] != unfolded.tau(variable):
        raise ValueError(
            f"{name} has {data.shape[0]} steps; expected {unfolded.tau(variable)}, as many as are drawn. "
            f"For an encoder and its decoder, type steps=(of x, of y)."
        )
    return data
