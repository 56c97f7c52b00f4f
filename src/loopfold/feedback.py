"""A network that reads its own outputs, as one step: the state is (the layer's state, what is fed back).

`h, s = layer(s, fed)`, `o = readout(h)`, `fed = feeding(o)`. What a feeding draws and encodes is there beforehand and
is a part of x, so the step is a function of tensors like any other, and every engine runs the loop.
"""

import functools
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from loopfold.engines.base import Engine
from loopfold.feeding import Beside, Feeding, Mixed, draws_by_noise, generators_in, is_mixed
from loopfold.outputs import Outputs, check_drawable
from loopfold.recurrent import Recurrent, RecurrentLayer, hidden_of, recurrences_of, runs_by_steps, start_of, step_of
from loopfold.states import State, Step, asks_for_index, at_end, leaves, name_of
from loopfold.unfolding import Unfolding


class Read(NamedTuple):
    """What a step reads that is another at every step; what there is none of is ()."""

    x: State  # beside what is fed back
    beside: State  # what the feeding reads: `Beside`, or the targets themselves
    t: State  # the number of the step


class Carried(NamedTuple):
    """What goes from step to step."""

    state: State  # of the layer; () where what is fed back is all that a step knows of those before it
    fed: Tensor  # [batch, size]


class Feedback(nn.Module):
    """One step of a network that reads `[context, fed, x]`, of which there are those that are given.

    `layer` is a layer, or a module `h = f(fed, x)`; a context that is no vector goes to the layer as it is.
    """

    def __init__(self, layer: nn.Module, readout: nn.Module, outputs: Outputs, feeding: Feeding) -> None:
        super().__init__()
        self.layer, self.readout, self.outputs, self.feeding = layer, readout, outputs, feeding

    def _get_name(self) -> str:
        """What to call it: by the transition that it runs."""
        return name_of(self.layer.cell if isinstance(self.layer, Recurrent) else self.layer)

    def forward(self, state: Carried, x: Read, context: State | None = None) -> tuple[tuple[State, ...], Carried]:
        if isinstance(self.layer, RecurrentLayer):
            vector = isinstance(context, Tensor)
            whole = beside_each_other(context if vector else (), state.fed, x.x)
            t = x.t if isinstance(x.t, Tensor) else None
            h, outputs, inner = step_of(self.layer, state.state, whole, None if vector else context, t)
        else:
            h, outputs, inner = self.layer(state.fed, x.x), (), ()
        o = self.readout(h)
        if is_mixed(self.feeding):
            fed = self.feeding.mixed(o, x.beside, self.outputs)  # type: ignore[attr-defined]
        else:
            fed = self.feeding.next(o, x.beside if isinstance(x.beside, Tensor) else None, self.outputs)
        there = isinstance(self.layer, RecurrentLayer) and hidden_of(self.layer, outputs, inner) is not None
        return (o, () if there else h, outputs), Carried(inner, fed)


def beside_each_other(*parts: State) -> Tensor:
    """The rows that there are, side by side."""
    rows = [part for part in parts if isinstance(part, Tensor)]
    return rows[0] if len(rows) == 1 else torch.cat(rows, -1)


class Fed(NamedTuple):
    """A run of a network that reads its own outputs."""

    o: Tensor  # [τ, batch, size]
    run: Unfolding  # of the layer
    feds: Tensor  # what was fed back after each step
    last: Tensor  # what was fed back last


def run_fed(
    owner: nn.Module,
    network: tuple[nn.Module, nn.Module, Outputs],
    fed: Tensor,
    y: Tensor | None,
    feeding: Feeding,
    steps: int,
    *,
    engine: Engine,
    x: Tensor | None = None,
    state: State | None = None,
    context: State | None = None,
    lengths: Tensor | None = None,
    before: int | Tensor = 0,
) -> Fed:
    """Run (layer, readout, outputs) for `steps`, the first of which is fed `fed [batch, size]`.

    `before`, a number or one for each sequence `[batch]`, is how many steps came before, from which `t` goes on.

    `owner` is the module that they belong to, for as long as which the compiled step is kept.
    """
    layer, _, outputs = network
    start: State = ()
    if isinstance(layer, RecurrentLayer):
        vector = context if isinstance(context, Tensor) else ()
        first = beside_each_other(vector, fed, () if x is None else x[0])
        start = start_of(layer, first, state, None if isinstance(context, Tensor) else context)
    mixture = feeding if isinstance(feeding, Mixed) and is_mixed(feeding) else None
    if mixture is not None:
        beside: State = mixture.beside(y, (steps, len(fed)), outputs, fed)
    else:
        beside = () if y is None else y
    cells = [part.cell for part in recurrences_of(layer).values()]
    empty = x is None and not isinstance(beside, Tensor) and beside == Beside()
    apart = context is not None and not isinstance(context, Tensor)  # a vector is a part of x
    asking = [cell for cell in cells if asks_for_index(cell, 2 + apart)]
    if asking and isinstance(layer, RecurrentLayer) and not runs_by_steps(layer):
        raise ValueError(
            f"{name_of(asking[0])} reads the number of the step, but its layer has hooks or a forward of its own: it "
            f"is called for one step at a time, each of which would be number 0. Take the hooks off, or put that "
            f"forward into the transition."
        )
    counted = empty or bool(asking)
    if isinstance(before, Tensor):
        before = before.to(fed.device)
    t = (torch.arange(steps, device=fed.device)[:, None] + before)[..., None].expand(-1, len(fed), 1).to(fed.dtype)
    read = Read(() if x is None else x, beside, t if counted else ())
    step = kept_step(owner, Feedback, *network, feeding if mixture is None else mixture.undrawn(outputs))
    run = Recurrent(step, engine)(read, Carried(start, fed), lengths, context=context)
    assert isinstance(run.outputs, tuple)
    o, h, given = run.outputs
    if (
        mixture is not None and o.device.type == "cpu" and draws_by_noise(feeding.pick, outputs)
    ):  # a GPU would have to be waited for
        check_drawable(o)
    if isinstance(layer, RecurrentLayer) and not isinstance(h, Tensor):
        h = hidden_of(layer, given, run.states.state)
    states = Unfolding(run.states.state, run.last.state, h, at_end(h, lengths), given if leaves(given) else None)
    return Fed(o, states, run.states.fed, run.last.fed)


# ------------------------------------------------------------------ steps are kept, since their programs are


_steps: weakref.WeakKeyDictionary[nn.Module, list[tuple[tuple[Any, ...], Step]]] = weakref.WeakKeyDictionary()
MOST = 16  # of one module


def kept_step(owner: nn.Module, kind: type[nn.Module], *parts: Any) -> Step:
    """`kind(*parts)`, a step that belongs to `owner`: that of an earlier call, where it was made of the same parts."""
    known = _steps.setdefault(owner, [])
    for made_of, step in known:
        if made_of[0] is kind and all(map(_same, made_of[1:], parts)):
            return step
    made = kind(*parts)
    functions = any(not isinstance(part.cell, nn.Module) for part in recurrences_of(made).values())
    plain = functions or bool(generators_in(parts))  # a trace would draw from these
    step = functools.partial(made) if plain else made  # engines compile no plain function
    known.append(((kind, *parts), step))
    del known[:-MOST]
    return step


def _same(a: Any, b: Any) -> bool:
    """Whether a step made with the one does what a step made with the other does."""
    if a is b or isinstance(a, nn.Module) or type(a) is not type(b):
        return a is b
    try:
        return bool(a == b)
    except Exception:  # such as that of tensors, which compare number by number
        return False
