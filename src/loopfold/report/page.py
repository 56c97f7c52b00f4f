"""The report: one HTML file on a run that needs nothing else, no network least of all."""

from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template

from loopfold.drawing.figure import theme_css
from loopfold.files import check_place, write_whole
from loopfold.report.inside import inside
from loopfold.report.live import MEGABYTES, the_model
from loopfold.report.markup import asset, data_block, escape, fingerprint
from loopfold.report.sections import Section, summary, the_curve, the_run, the_samples, the_table
from loopfold.report.subject import Subject
from loopfold.training.folder import ELSEWHERE
from loopfold.training.run import Run
from loopfold.training.stored import RunError

# What moves on the page, in the order in which it is read
SCRIPTS = ("page", "ngram", "reader", "reading", "writing", "units", "bearing", "unfold", "live")


def write_report(
    run: Run, out: str | Path | None = None, passage: str | None = None, *, model_megabytes: float = MEGABYTES
) -> Path:
    """Write one page on a run: the model itself, curve, table, graphs, gradients, hidden states, samples.

    It works offline, the model included.

    `out`              the file; by default `report.html` in the run's folder, or NAME-report.html beside a packed run.
                       One that is there already is replaced as a whole
    `passage`          the text whose hidden states and gradients are shown; by default the held-out text's beginning
    `model_megabytes`  the most that the model may add to the page: a larger one, or any with 0, is left out
    """
    out = run.stored.beside("report.html") if out is None else Path(out)
    return write_page(out, lambda: report_page(Subject(run, passage), model_megabytes), "report.html")


def write_page(out: Path, make: Callable[[], str], example: str) -> Path:
    """Write a page that takes a while to make; what is wrong with its place is said before."""
    check_place(out, example)
    if out.suffix.lower() not in (".html", ".htm"):
        raise RunError(f"it is a page for a browser, so its name must end in .html; got {out.name}.")
    page = make()
    try:
        write_whole(out, page.encode())
    except OSError as error:
        raise RunError(f"{out} cannot be written: {error.strerror or error}. ", *ELSEWHERE) from error
    return out


def report_page(subject: Subject, model_megabytes: float = MEGABYTES) -> str:
    """The page as a whole."""
    sections = [
        the_model(subject, model_megabytes),
        the_curve(subject),
        the_table(subject),
        the_samples(subject),
        *inside(subject),
        the_run(subject),
    ]
    return page_of(subject, sections)


def page_of(subject: Subject, sections: Sequence[Section]) -> str:
    """A page of some sections."""
    script = "\n".join(asset(f"{name}.js") for name in SCRIPTS)
    modules = [section.module for section in sections if section.module]
    return Template(asset("page.html")).substitute(
        title=escape(f"{subject.name} on {subject.corpus.name}"),
        fingerprints=" ".join(f"'{fingerprint(code)}'" for code in (*modules, script)),
        style=f"{theme_css(':root')}\n{asset('page.css')}",
        summary=summary(subject),
        links="".join(f'<li><a href="#{section.id}">{escape(section.heading)}</a></li>' for section in sections),
        sections="\n".join(map(_html, sections)),
        data="\n".join(data_block(name, value) for s in sections for name, value in (s.data or {}).items()),
        scripts="\n".join(
            [*(f'<script type="module">{code}</script>' for code in modules), f"<script>{script}</script>"]
        ),
    )


def _html(section: Section) -> str:
    name = f"{section.id}-heading"
    return (
        f'<section id="{section.id}" class="columns" aria-labelledby="{name}">'
        f'<h2 id="{name}">{escape(section.heading)}</h2>{section.body}</section>'
    )
