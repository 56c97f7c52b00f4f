"""The sections of the page that every run has: what was trained, how it went, how good it is, what it writes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch

from loopfold.drawing.charts import learning_curves
from loopfold.drawing.figure import TURNS
from loopfold.feeding import Greedy, Pick, Sample
from loopfold.generation import generate
from loopfold.language.base import count_parameters
from loopfold.report.markup import escape, figure, picture, scroll_box, table
from loopfold.report.subject import REMEDY, Subject
from loopfold.training.options import PANELS

TEMPERATURES = (0.5, 0.8, 1.0)
WRITTEN = {"word": 80, "subword": 120}  # tokens of a sample; of characters and bytes, 400


@dataclass(frozen=True)
class Section:
    """A part of the page: its id, its heading, its HTML, the data that its script reads, by their ids, and a module."""

    id: str
    heading: str
    body: str
    data: Mapping[str, Any] | None = None
    module: str = ""


def summary(subject: Subject) -> str:
    """Above all sections: what it is in a sentence, and the few figures that matter."""
    run, ledger = subject.run, subject.ledger
    unit = escape(subject.unit)
    what = "A recurrent network" if run.options.model == "recurrent" else "A network without recurrence"
    sentence = (
        f"{what} ({escape(run.options.kind)}, {_units(run.options.sizes)}) learned to predict the next "
        f"{unit} from {run.config['corpus']['tokens']:,} {unit}s of {escape(subject.corpus.name)}. It knows "
        f"{run.vocabulary.size:,} different {unit}s."
    )
    if subject.best is not None:
        sentence += f" Its best loss on the valid text is {subject.best:.4f} nats per {unit}."
    figures = [("parameters", f"{count_parameters(run.model):,}"), ("in training", duration(run.seconds))]
    if ledger is not None:
        name = f"perplexity a {unit}, {subject.part} text"
        figures.insert(0, (name, number(ledger.perplexity)))
    if math.isfinite(run.tokens_per_second):
        figures.append((f"{unit}s a second in training", f"{run.tokens_per_second:,.0f}"))
    pairs = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures)
    note = f'<p class="note">{escape(subject.trouble)}</p>' if subject.trouble else ""
    return f'<p class="lead">{sentence}</p>{note}<dl class="figures">{pairs}</dl>'


def _units(sizes: Sequence[int]) -> str:
    """How large a network is.

    >>> _units((512,)), _units((1150, 1150, 400))
    ('512 units', '3 layers of 1,150, 1,150 and 400 units')
    """
    layers = f"{len(sizes)} layers of " if len(sizes) > 1 else ""
    *others, last = [f"{n:,}" for n in (sizes if len({*sizes}) > 1 else sizes[:1])]
    return f"{layers}{', '.join(others) + ' and ' if others else ''}{last} units"


# ------------------------------------------------------------------ what was trained


def the_run(subject: Subject) -> Section:
    run, corpus = subject.run, subject.corpus
    options = run.options.as_json()
    if isinstance(run.options.hidden_size, tuple):
        options["hidden_size"] = "-".join(map(str, run.options.hidden_size))
    steps = run.metrics[-1]["step"] if run.metrics else 0
    text = {
        "name": corpus.name,
        "training text": f"{len(corpus.train):,} characters",
        "valid text": f"{len(corpus.valid):,} characters",
        "test text": f"{len(corpus.test):,} characters",
        f"training {subject.unit}s": f"{run.config['corpus']['tokens']:,}",
        "vocabulary": f"{run.vocabulary.size:,} {subject.unit}s",
        "SHA-256": corpus.sha256[:16] + "…",
    }
    model = {"parameters": f"{count_parameters(run.model):,}"}
    training = {
        "steps taken": f"{steps:,}",
        "time": duration(run.seconds),
        "best valid loss": "—" if subject.best is None else f"{subject.best:.4f} nats per {subject.unit}",
        "versions": ", ".join(f"{name} {value}" for name, value in run.config["versions"].items()),
    }
    groups = [
        ("Text", text, PANELS["Text"]),
        ("Model", model, PANELS["Model"]),
        ("Training", training, [*PANELS["Training"], *PANELS["Run"]]),
    ]
    tables = "".join(
        table([], [("", row) for row in _facts(found, {k: options[k] for k in names})], name)
        for name, found, names in groups
    )
    return Section("run", "All that was chosen", f'<div class="options wide">{tables}</div>')


def _facts(found: Mapping[str, str], options: Mapping[str, Any]) -> list[tuple[str, str]]:
    chosen = {name.replace("_", " "): plain(value) for name, value in options.items() if value is not None}
    return [(escape(name), escape(value)) for name, value in (dict(found) | chosen).items()]


def plain(value: Any) -> str:
    """An option as one reads it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | list):
        return ", ".join(map(plain, value))
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def duration(seconds: float) -> str:
    """Seconds as one says them.

    >>> duration(44.6), duration(480), duration(7500)
    ('45 s', '8 min', '2 h 5 min')
    """
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def number(value: float) -> str:
    """A perplexity.

    >>> number(3.10139), number(math.inf), number(math.nan)
    ('3.101', '∞', 'no number')
    """
    if math.isnan(value):
        return "no number"
    return "∞" if math.isinf(value) else f"{value:,.3f}"


# ------------------------------------------------------------------ how it went, and how good it is


def the_curve(subject: Subject) -> Section:
    curves = subject.run.curves
    if not curves:
        said = "No loss of this run is a finite number." if subject.run.metrics else "The run has not taken a step yet."
        return Section("curve", "Learning curve", f'<p class="note">{said}</p>')
    lines = {f"{name}, {subject.part} text": nats for name, nats in subject.table.lines.items()}
    drawing = learning_curves(curves, lines)
    about = "The loss in training and on the valid text"
    rest = f"; across, how the run and its baselines do on the {subject.part} text" if lines else ""
    body = figure(
        scroll_box(picture(drawing), "Learning curve"), f"{about}{escape(rest)}.{_ends(curves, lines)}", "wide curve"
    )
    return Section("curve", "Learning curve", body)


def _ends(curves: Mapping[str, Sequence[tuple[float, float]]], across: Mapping[str, float]) -> str:
    """The curves and the lines across by their names, for a screen on which those beside the picture have no room."""
    last = {name: [y for _, y in points if math.isfinite(y)][-1:] for name, points in curves.items()}
    items = [(name, y[0]) for name, y in last.items() if y]
    lines = [
        f'<li style="color: var(--lf-{use})">{escape(name)} {y:.3f}</li>'
        for (name, y), use in zip(items, cycle(TURNS), strict=False)
    ]
    drawn = sorted(((y, name) for name, y in across.items() if math.isfinite(y)), reverse=True)  # from the top down
    lines += [f'<li style="color: var(--lf-muted)">{escape(name)} {y:.3f}</li>' for y, name in drawn]
    return f'<ul class="ends">{"".join(lines)}</ul>'


def the_table(subject: Subject) -> Section:
    table_of, body = subject.table, ""
    if table_of.rows:
        bits = [row.ledger.bits_per_character for row in table_of.rows]
        shares = [b if b is not None and math.isfinite(b) else None for b in bits]
        most = max((b for b in shares if b is not None), default=1.0)
        ledger = table_of.rows[-1].ledger
        body = (
            "<p>Perplexity says among how many equally likely ones the model in effect has to choose the next "
            f"{escape(subject.unit)}: 1 for a perfect model, the size of the vocabulary for one that knows nothing. "
            "All are scored on the same text, each token once.</p>"
        )
        cells = [
            (
                "own" if row is table_of.own else "",
                (
                    escape(row.name),
                    f"{row.parameters:,}",
                    number(row.ledger.perplexity),
                    "—" if b is None else f"{b:.3f}",
                    _bar((b or 0) / most),
                ),
            )
            for row, b in zip(table_of.rows, shares, strict=True)
        ]
        head = ["model", "parameters", "perplexity", "bits per character", '<span class="unseen">as a bar</span>']
        caption = f"{subject.corpus.name}, {subject.part} text: {ledger.tokens:,} {ledger.unit}s"
        body += scroll_box(table(head, cells, escape(caption)), "Perplexities")
    if table_of.note:
        body += f'<p class="note">{_with_command(table_of.note)}</p>'
    return Section("perplexity", "Perplexity beside baselines", body)


def _bar(share: float) -> str:
    return f'<span class="bar" aria-hidden="true"><span style="width:{100 * share:.1f}%"></span></span>'


def _with_command(note: str) -> str:
    """A sentence that ends in a command to type."""
    said, _, command = note.rpartition(" type ")
    return f"{escape(said)} type <code>{escape(command)}</code>" if said else escape(note)


# ------------------------------------------------------------------ what it writes


def the_samples(subject: Subject) -> Section:
    model, vocabulary = subject.run.model, subject.run.vocabulary
    device = next(model.parameters()).device
    picks: dict[str, Pick] = {
        f"temperature {t}": Sample(torch.Generator(device).manual_seed(0), t) for t in TEMPERATURES
    }
    picks["always the likeliest"] = Greedy()
    length = WRITTEN.get(vocabulary.unit, 400)
    try:
        written = {name: generate(model, vocabulary, "", length, pick) for name, pick in picks.items()}
    except FloatingPointError:
        said = f"It writes nothing: its outputs are not finite numbers. {REMEDY}"
        return Section("samples", "What it writes", f'<p class="note">{said}</p>')
    samples = "".join(
        figure(f'<pre dir="auto">\n{escape(text)}</pre>', name, "sample") for name, text in written.items()
    )
    words = (
        f"<p>{length} {escape(vocabulary.unit)}s each, from the beginning of a text. A low temperature keeps to what "
        "is likely, a high one dares more. The seed is 0, so another report of this run shows the same.</p>"
    )
    return Section("samples", "What it writes", words + samples)
