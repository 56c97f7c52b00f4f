"""The sections that look inside a recurrent network: its graphs, how far its gradients reach, its hidden states."""

import base64
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from loopfold.drawing.charts import liveliest
from loopfold.drawing.circuit import Level
from loopfold.drawing.draw import sizes
from loopfold.drawing.figure import Drawing
from loopfold.drawing.networks import circuit as circuit_of
from loopfold.drawing.paint import paint
from loopfold.drawing.picture import circuit_scene, unfolded_scene
from loopfold.drawing.unfolded import Unfolded
from loopfold.errors import OptionError
from loopfold.gradients import gradient_flow
from loopfold.language.recurrent import RecurrentLM
from loopfold.probing import HiddenStates, hidden_states
from loopfold.report.markup import escape, figure, picture, scroll_box
from loopfold.report.sections import Section
from loopfold.report.subject import Subject

STEPS = (*range(1, 9), 100)  # of the unfolded graphs; of the last, the middle is left out
FIRST = 3  # the one that is shown first
FLOW = 64  # steps over which gradients are followed
UNITS = 32  # rows of the map of hidden states
NO_NUMBER = -32768  # stands for a value that is not a finite number; all others are from -32767 to 32767


def inside(subject: Subject) -> list[Section]:
    """The three sections, or in their place one that says why there are none."""
    model = subject.run.model
    if not isinstance(model, RecurrentLM):
        kind = escape(subject.run.options.kind)
        words = (
            f'<p class="note">A {kind} sees the last {subject.run.options.span} tokens and keeps no state. So there is '
            "no graph to unfold, no gradient that goes back through time and no hidden state to show.</p>"
        )
        return [Section("inside", "Inside", words)]
    makers = [("graphs", "The network", _graphs), ("gradients", "How far gradients reach", _gradients)]
    makers.append(("states", "Hidden states", _states))
    return [_made(name, heading, make, subject, model) for name, heading, make in makers]


def _made(
    name: str, heading: str, make: Callable[[Subject, RecurrentLM], Section], subject: Subject, model: RecurrentLM
) -> Section:
    try:
        return make(subject, model)
    except (TypeError, ValueError) as error:
        if ":" not in subject.run.options.cell or isinstance(error, OptionError):
            raise
        # a cell of the user's own may do what cannot be drawn; the rest of the page still can
        return Section(name, heading, f'<p class="note">This cell cannot be shown here: {escape(error)}</p>')


# ------------------------------------------------------------------ graphs


def _graphs(subject: Subject, model: RecurrentLM) -> Section:
    x, y = subject.x_and_y
    lengths = [steps for steps in STEPS if steps <= len(x)]
    first = min(FIRST, len(lengths))
    circuit = circuit_of(model.network, Level.BOOK, None, x)  # traced once, for all pictures
    graphs = {n: Unfolded(circuit, n) for n in lengths}
    pictures = [
        _graph(
            paint(unfolded_scene(graph, sizes(graph, x[:n], y[:n]) if back else None, back)),
            n,
            back,
            n == lengths[first - 1],
        )
        for back in (False, True)
        for n, graph in graphs.items()
    ]
    controls = f"""
<div class="controls tools needs-script" hidden>
<label for="steps">Steps <input type="range" id="steps" min="1" max="{len(lengths)}" value="{first}">
<output id="steps-shown" for="steps">τ = {lengths[first - 1]}</output></label>
<fieldset><legend>Direction</legend>
<label><input type="radio" name="way" value="forward" checked>Forward</label>
<label><input type="radio" name="way" value="backward">Backward</label></fieldset>
</div>"""
    body = (
        "<p>The circuit has one node for each part of the network. The black square is a delay of one step: what goes "
        "in comes out when the next token is read.</p>"
        + figure(
            scroll_box(picture(paint(circuit_scene(circuit))), "The circuit"),
            f"The circuit of {escape(subject.name)}.",
            "wide graph",
        )
        + "<h3>Unfolded in time</h3><p>The same network with one node for each variable at each step. The parameters "
        "are the same at every step. Backward, gradients go the other way; their sizes are those on the passage "
        "below.</p>" + controls + "".join(pictures)
    )
    return Section("graphs", "The network", body)


def _graph(drawing: Drawing, steps: int, back: bool, shown: bool) -> str:
    way = "backward" if back else "forward"
    hidden = "" if shown and not back else " hidden"
    caption = f"{steps} {'step' if steps == 1 else 'steps'}, {way}"
    more = ". The number in a node is the size of the gradient there." if back else "."
    return (
        f'<figure class="wide graph" data-steps="{steps}" data-way="{way}"{hidden}>'
        f"{scroll_box(picture(drawing), caption)}<figcaption>{caption}{more}</figcaption></figure>"
    )


# ------------------------------------------------------------------ gradients


def _gradients(subject: Subject, model: RecurrentLM) -> Section:
    x, y = (part[:FLOW] for part in subject.x_and_y)
    flow = gradient_flow(model.network, model.network.loss, x, y)
    drawing = flow.draw()
    if bool(flow.norms.isfinite().all()):
        drawing.figure.supxlabel("")  # the verdict, which is said above the picture
    body = (
        f'<p class="verdict">{escape(flow.verdict[:1].upper() + flow.verdict[1:])}</p>'
        "<p>Each cell is the size of ∂L(<i>t</i>)/∂h(<i>k</i>): how much the "
        f"loss at step <i>t</i> depends on the state at step <i>k</i>, over the first {len(x)} tokens of the passage "
        "below.</p>"
        + figure(
            f'<div class="scroll over" role="group" tabindex="0" aria-label="Gradient flow">{picture(drawing)}'
            f"{_canvas('flow', 'Sizes of the gradients, a row for each loss and a column for each state')}</div>",
            "Left, every pair of steps. Right, the same by distance, relative to distance 0." + _readout("flow"),
            "wide",
        )
    )
    norms = [[float(f"{value:.4g}") if math.isfinite(value) else None for value in row] for row in flow.norms.tolist()]
    return Section(
        "gradients", "How far gradients reach", body, {"flow-data": {"norms": norms, "first": len(x) - len(norms)}}
    )


def _canvas(name: str, label: str) -> str:
    return (
        f'<canvas id="{name}-map" class="needs-script" hidden tabindex="0" role="application" '
        f'aria-roledescription="heat map" aria-label="{label}. Arrow keys move, Enter keeps a value." '
        f'aria-describedby="{name}-readout"></canvas>'
    )


def _readout(name: str) -> str:
    """What stands under a map: the value pointed at, and those that were kept."""
    return (
        f'<output id="{name}-readout" class="readout needs-script" hidden for="{name}-map">'
        "Point at a cell, or focus the map and use the arrow keys; click or Enter keeps a value.</output>"
        f'<ol id="{name}-kept" class="kept" aria-label="Kept values"></ol>'
        f'<div class="controls needs-script" hidden><button type="button" id="{name}-clear" hidden>Clear the kept '
        "values</button></div>"
    )


# ------------------------------------------------------------------ hidden states


def _states(subject: Subject, model: RecurrentLM) -> Section:
    found = hidden_states(model, subject.run.vocabulary, subject.text)
    seen = len(subject.tokens[1])
    values, pieces = found.values[:seen].float(), found.pieces[:seen]
    scale = float(values.abs().nan_to_num(0.0, 0.0, 0.0).max()) or 1.0
    whole = (values / scale * 32767).round().where(values.isfinite(), NO_NUMBER).to(torch.int16)
    tracked = {t.unit: f"{t.feature} {t.correlation:+.2f}" for t in reversed(found.tracking)}
    choices = _choices(found)
    data = {
        "units": values.shape[1],
        "scale": scale,
        "values": base64.b64encode(whole.numpy().astype("<i2").tobytes()).decode(),  # [τ, n]
        "pieces": pieces,
        "unit": subject.unit,
        "tracked": tracked,
        "choices": choices,
    }
    options = "".join(f'<option value="{i}">{escape(choice["name"])}</option>' for i, choice in enumerate(choices))
    where = "your passage" if subject.given is not None else f"the {subject.part or 'training'} text"
    body = (
        f"<p>The state after each of the first {len(pieces)} {escape(subject.unit)}s of {where}: a row for each unit, "
        "orange above 0, blue below. Some units go with one thing in the text; how closely, a correlation over "
        f"{len(found.pieces):,} {escape(subject.unit)}s says, from −1 to +1.</p>"
        '<div class="controls tools needs-script" hidden><label for="states-choice">Units '
        f'<select id="states-choice">{options}</select></label></div><p class="hint" id="states-note"></p>'
        + figure(
            '<div class="map"><ol class="units" id="states-units" aria-hidden="true"></ol><div class="scroll">'
            + _canvas("states", "Hidden states, a row for each unit and a column for each token")
            + "</div></div>",
            _readout("states"),
            "wide",
        )
        + "<h3>The passage, as the model reads it</h3>"
        + f'<pre dir="auto">\n{escape("".join(pieces).rstrip())}</pre>'
    )
    return Section("states", "Hidden states", body, {"states-data": data})


def _choices(found: HiddenStates) -> list[dict[str, Any]]:
    """Which units to show and in what order, under a name, with a sentence on them."""
    varied = liveliest(found.values)
    first = dict.fromkeys(tracked.unit for tracked in found.tracking)
    others = [unit for unit in varied if unit not in first]
    choices = [
        ("that go with something", [*first, *others], "First the units that go with something, then the liveliest.")
    ]
    for tracked in found.tracking:
        like = _alikeness(found.values, tracked.unit).argsort(descending=True).tolist()
        rest = [unit for unit in like if unit != tracked.unit]
        said = f"Unit {tracked.unit} goes with it best; below it, the units that move most as that one does."
        choices.append((f"{tracked.feature}, {tracked.correlation:+.2f}", [tracked.unit, *rest], said))
    choices = [(name, order[:UNITS], note) for name, order, note in choices]
    choices.append(("that vary most", varied[:UNITS], "The liveliest first."))
    choices.append(("all", sorted(varied), f"All {len(varied):,}, in their order."))
    return [{"name": name, "order": order, "note": note} for name, order, note in choices]


def _alikeness(values: Tensor, unit: int) -> Tensor:
    """How closely each unit of `values [τ, n]` moves with one of them, in either direction."""
    h = values.double() - values.double().mean(0)
    return ((h[:, unit] @ h).abs() / h.norm(dim=0)).nan_to_num(0.0)
