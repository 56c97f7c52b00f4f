"""The report: one HTML file on a run that needs nothing else, no network least of all."""

from pathlib import Path
from string import Template

from loopfold.drawing.figure import theme_css
from loopfold.files import write_whole
from loopfold.report.inside import inside
from loopfold.report.markup import asset, data_block, escape, fingerprint
from loopfold.report.sections import Section, summary, the_curve, the_run, the_samples, the_table
from loopfold.report.subject import Subject
from loopfold.training.folder import ELSEWHERE, OUT, RunError
from loopfold.training.run import Run


def write_report(run: Run, out: str | Path | None = None, passage: str | None = None) -> Path:
    """Write one page on a run: curve, table, graphs, gradients, hidden states, samples. It works offline.

    `out`      the file; by default `report.html` in the run's folder, or NAME-report.html beside a packed run. One that
               is there already is replaced as a whole
    `passage`  the text whose hidden states and gradients are shown; by default the held-out text's beginning
    """
    out = run.stored.beside("report.html") if out is None else Path(out)
    if out.is_dir():
        raise RunError(f"{out} is a folder: name a file, such as {out / 'report.html'}.")
    if out.suffix.lower() not in (".html", ".htm"):
        raise RunError(f"the report is a page for a browser, so its name must end in .html; got {out.name}.")
    if not out.parent.is_dir():  # before the work, not after it
        missing = f"{out} cannot be written: there is no folder {out.parent}. Make it, or choose another "
        raise RunError(missing, OUT, ".")
    page = report_page(Subject(run, passage))
    try:
        write_whole(out, page.encode())
    except OSError as error:
        raise RunError(f"{out} cannot be written: {error.strerror or error}. ", *ELSEWHERE) from error
    return out


def report_page(subject: Subject) -> str:
    """The page as a whole."""
    sections = [
        the_curve(subject),
        the_table(subject),
        the_samples(subject),
        *inside(subject),
        the_run(subject),
    ]
    script = asset("page.js")
    return Template(asset("page.html")).substitute(
        title=escape(f"{subject.name} on {subject.corpus.name}"),
        fingerprint=fingerprint(script),
        style=f"{theme_css(':root')}\n{asset('page.css')}",
        summary=summary(subject),
        links="".join(f'<li><a href="#{section.id}">{escape(section.heading)}</a></li>' for section in sections),
        sections="\n".join(map(_html, sections)),
        data="\n".join(data_block(name, value) for s in sections for name, value in (s.data or {}).items()),
        script=script,
    )


def _html(section: Section) -> str:
    name = f"{section.id}-heading"
    return (
        f'<section id="{section.id}" class="columns" aria-labelledby="{name}">'
        f'<h2 id="{name}">{escape(section.heading)}</h2>{section.body}</section>'
    )
