"""The report: what is on the page, that nothing on it does harm, that it needs nothing else, and what it refuses."""

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from reports import HOSTILE, NAME, hostile, trained
from test_cli import loopfold, refused

import loopfold as lf
from loopfold.drawing import networks
from loopfold.report import inside, subject
from loopfold.report.markup import data_block, escape
from loopfold.report.page import report_page, write_report
from loopfold.report.sections import the_samples
from loopfold.report.subject import Subject
from loopfold.stepgraph.trace import trace
from loopfold.training.folder import RunFolder
from loopfold.training.table import Comparison, baselines

pytestmark = pytest.mark.usefixtures("one_thread")
VOID = {"meta", "link", "img", "input", "br"}


class Page(HTMLParser):
    """The elements of a page, its text, and what stands in each script and table. Tags must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
            self.inside.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in {*self.open}:
            self.inside[tag][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def data(self, name: str) -> Any:
        scripts = zip(self.all("script"), self.inside["script"], strict=True)
        return next(json.loads(text) for attributes, text in scripts if attributes.get("id") == name)


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(hostile()[1].read_text(encoding="utf-8"))


@pytest.fixture
def _few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take the most time, and other tests look at all of them."""
    monkeypatch.setattr(inside, "STEPS", (1, 2))


# ------------------------------------------------------------------ what is on the page


def test_every_section_is_there_and_headings_are_in_order(page: Page) -> None:
    ids = ["try", "curve", "perplexity", "samples", "graphs", "gradients", "states", "run"]
    assert [attributes["id"] for attributes in page.all("section")] == ids
    assert {attributes["href"] for attributes in page.all("a")} == {f"#{name}" for name in ids}
    labels = {attributes.get("id") for tag, attributes in page.tags if tag == "h2"}
    assert {attributes["aria-labelledby"] for attributes in page.all("section")} == labels
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in zip(levels, levels[1:], strict=False))
    assert len(page.all("main")) == 1


def test_the_ids_are_unique_and_every_label_finds_its_control(page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len({*ids})
    for attributes in page.all("label"):
        assert "for" not in attributes or attributes["for"] in ids
    assert all(attributes.get("scope") for attributes in page.all("th"))


def test_the_figures_are_those_of_the_run(page: Page) -> None:
    run, _ = hostile()
    about = Subject(run)
    assert about.ledger is not None
    assert f"{about.ledger.perplexity:.3f}" in page.inside["dl"][0]
    table = page.inside["table"][0]
    assert "uniform" in table
    assert f"gru 8{sum(p.numel() for p in run.model.parameters()):,}{about.ledger.perplexity:.3f}" in table
    everything = " ".join(page.inside["table"])
    for name, value in {"learning rate": "0.03", "hidden size": "8", "tied": "no", "split": "80, 10, 10"}.items():
        assert f"{name}{value}" in everything


def test_there_is_a_graph_for_every_number_of_steps_both_ways(page: Page) -> None:
    graphs = [a for a in page.all("figure") if "data-steps" in a]
    assert [(a["data-way"], a["data-steps"]) for a in graphs] == [
        (way, str(steps)) for way in ("forward", "backward") for steps in (*range(1, 9), 100)
    ]
    assert [a["data-steps"] for a in graphs if "hidden" not in a] == ["3"]


def test_the_hidden_states_are_those_of_the_model(page: Page) -> None:
    run, _ = hostile()
    data = page.data("states-data")
    assert "".join(data["pieces"]) == run.corpus().test[:300]
    values = torch.frombuffer(bytearray(base64.b64decode(data["values"])), dtype=torch.int16).view(-1, data["units"])
    states = lf.hidden_states(run.model, run.vocabulary, run.corpus().test)
    torch.testing.assert_close(values / 32767 * data["scale"], states.values[:300], rtol=0, atol=data["scale"] / 32767)
    assert [sorted(choice["order"]) for choice in data["choices"]] == [[*range(8)]] * len(data["choices"])
    best = states.tracking[0]
    assert data["tracked"][str(best.unit)] == f"{best.feature} {best.correlation:+.2f}"


def test_the_gradients_are_those_of_the_model(page: Page) -> None:
    run, _ = hostile()
    assert isinstance(run.model, lf.RecurrentLM)
    x, y = (part[:64] for part in Subject(run).x_and_y)
    flow = lf.gradient_flow(run.model.network, run.model.network.loss, x, y)
    norms = torch.tensor(page.data("flow-data")["norms"], dtype=torch.float64)
    torch.testing.assert_close(norms, flow.norms, rtol=1e-3, atol=0)
    assert flow.verdict[1:] in page.inside["main"][0]


def test_samples_are_the_same_every_time(page: Page) -> None:
    run, _ = hostile()
    drawn = lf.generate(run.model, run.vocabulary, "", 400, lf.Sample(torch.Generator().manual_seed(0), 0.5))
    assert page.inside["pre"][0].lstrip("\n") == drawn.lstrip("\n").replace("\x0b", "\ufffd")


# ------------------------------------------------------------------ nothing does harm, nothing is fetched


def test_nothing_of_the_text_becomes_markup(page: Page) -> None:
    assert not page.all("img")
    assert [a.get("type") for a in page.all("script")] == ["application/json"] * 3 + ["module", None]
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
    text = page.inside["main"][0]
    assert "<img src=x onerror=" in text
    assert NAME in page.inside["title"][0]


def test_the_page_allows_its_own_script_and_no_other(page: Page) -> None:
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    scripts = page.inside["script"][-2:]  # the model's module, and the page's own
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert policy is not None
    assert f"script-src 'sha256-{digests[0]}' 'sha256-{digests[1]}';" in policy
    assert policy.startswith("default-src 'none';")
    assert not any("</" in script for script in scripts)


def test_the_page_names_nothing_outside_itself(page: Page) -> None:
    for tag, attributes in page.tags:
        for name in ("src", "href", "xlink:href", "action", "data", "poster", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, name, value)
    text = hostile()[1].read_text(encoding="utf-8")
    assert not re.search(r"@import|url\((?!#)", text)
    assert {*re.findall(r"https?://[^\"'<> ]+", text)} <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert len(text.encode()) < 5_000_000


@pytest.mark.parametrize(
    "text",
    ["</script>", "<!--", "]]>", "\u2028\u2029", "\0", "\ud800", "&amp;", "\ufffe", '"\'<b onclick="x">', HOSTILE],
)
def test_text_of_any_kind_stays_text(text: str) -> None:
    block = data_block("x", {"pieces": [text]})
    block.encode()
    assert Page(block).data("x") == {"pieces": [text]}
    assert not re.search("[<>&\u2028\u2029]", block[len('<script type="application/json" id="x">') : -len("</script>")])
    shown = escape(text)
    found = Page(f'<p title="{shown}">{shown}</p>'.encode().decode())
    unfit = re.sub("[\0\ud800\ufffe]", "\ufffd", text)
    assert found.inside["p"] == [unfit]
    assert found.tags == [("p", {"title": unfit})]


def test_what_the_page_is_made_of_is_installed() -> None:
    assert {"page.html", "page.css", "page.js"} <= {file.name for file in files("loopfold.report").iterdir()}


# ------------------------------------------------------------------ runs of other kinds


def test_a_run_without_recurrence(tmp_path: Path) -> None:
    page = Page(report_page(Subject(trained(tmp_path, model="window", span=4))))
    assert [a["id"] for a in page.all("section")] == ["try", "curve", "perplexity", "samples", "inside", "run"]
    assert "A window sees the last 4 tokens and keeps no state." in page.inside["main"][0]
    assert len(page.all("script")) == 1


@pytest.mark.usefixtures("_few_graphs")
@pytest.mark.parametrize("unit", ["bytes", "words", "subwords"])
def test_a_run_of_other_units(unit: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"vocabulary_size": 300} if unit == "subwords" else {}
    changes |= {"cell": "lstm", "layers": 2} if unit == "words" else {"cell": "elman"}  # few operations to draw
    run = trained(tmp_path, text=HOSTILE * 60, unit=unit, epochs=0.1, **changes)
    page = Page(report_page(Subject(run)))
    pieces = page.data("states-data")["pieces"]
    assert len(pieces) == (210 if unit == "words" else 300)  # all words that there are
    assert (
        "".join(pieces)[:30] == run.vocabulary.decode(run.vocabulary.encode(run.corpus().test[:200]).ids.tolist())[:30]
    )
    assert not page.all("img")


@pytest.mark.usefixtures("_few_graphs")
def test_a_run_that_holds_nothing_out_and_has_hardly_begun(tmp_path: Path) -> None:
    run = trained(tmp_path, split=(1, 0, 0), epochs=0.01, cell="elman")
    text = Page(report_page(Subject(run))).inside["main"][0]
    assert "No text was held out, so there is nothing to measure on." in text
    assert "of the training text" in text


def own_cell(path: Path) -> str:
    """A cell of the user's own, in a file."""
    (path / "cells.py").write_text(
        "import torch\nclass Own(torch.nn.Module):\n    def __init__(self, n_in, n):\n        super().__init__()\n"
        "        self.A = torch.nn.Linear(n_in + n, n)\n    def forward(self, h, x):\n"
        "        return torch.tanh(self.A(torch.cat([h, x], -1)))\n"
    )
    return f"{path / 'cells.py'}:Own"


@pytest.mark.usefixtures("_few_graphs")
def test_a_cell_that_cannot_be_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ValueError("a branch on values <b>")

    monkeypatch.setattr(inside, "circuit_of", fails)
    text = report_page(Subject(trained(tmp_path, cell=own_cell(tmp_path), epochs=0.01)))
    assert "This cell cannot be shown here: a branch on values &lt;b&gt;" in text
    assert "flow-data" in text  # the rest is
    with pytest.raises(ValueError, match="a branch"):  # with a cell of ours it is a fault of ours
        report_page(Subject(hostile()[0]))


@pytest.mark.usefixtures("_few_graphs")
def test_a_network_is_traced_once_for_all_its_pictures(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []

    def counted(*arguments: Any, **options: Any) -> Any:
        traced.append(arguments)
        return trace(*arguments, **options)

    monkeypatch.setattr(networks, "trace", counted)
    run, path = hostile()
    section = inside.inside(Subject(run))[0]
    assert len(traced) == 1
    drawn, text = re.findall(r"<svg.*?</svg>", section.body, re.DOTALL), path.read_text(encoding="utf-8")
    assert len(drawn) >= 2 * 2
    assert all(picture in text for picture in drawn)
    assert len(page.all("svg")) > 2 * 9


# ------------------------------------------------------------------ texts and runs that are odd


@pytest.mark.usefixtures("_few_graphs")
def test_a_text_that_begins_with_many_line_ends(tmp_path: Path) -> None:
    run = trained(tmp_path, epochs=0.01, cell="elman")
    page = Page(report_page(Subject(run, "\n" * 7000 + HOSTILE)))
    assert "".join(page.data("states-data")["pieces"]) == HOSTILE
    (tmp_path / "held out.txt").write_text("\n" * 7000 + "left at 9.")
    (tmp_path / "more").mkdir()
    held = trained(tmp_path / "more", epochs=0.01, test=str(tmp_path / "held out.txt"), split=(90, 10, 0))
    assert Subject(held).text == "left at 9."


@pytest.mark.parametrize("unit", ["characters", "words"])
@pytest.mark.parametrize("cell", [lambda path: "gru", own_cell])
def test_a_text_of_line_ends_alone_is_refused(cell: Callable[[Path], str], unit: str, tmp_path: Path) -> None:
    text = HOSTILE * 12 + "\n" * 2000
    run = trained(tmp_path, text, epochs=0.01, unit=unit, cell=cell(tmp_path))
    assert run.corpus().test.strip("\n") == ""
    with pytest.raises(lf.OptionError, match=r"the test text has no \w+ to look at: give another as passage"):
        report_page(Subject(run))


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("_few_graphs")
def test_a_passage_of_one_token() -> None:
    page = Page(report_page(Subject(hostile()[0], "a")))
    assert page.data("states-data")["pieces"] == ["a"]
    assert len(page.data("flow-data")["norms"]) == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("_few_graphs")
@pytest.mark.parametrize("compared", [False, True])
@pytest.mark.parametrize("model", ["recurrent", "window"])
def test_a_run_that_diverged_has_a_page_that_says_so(model: str, compared: bool, tmp_path: Path) -> None:
    run = trained(tmp_path, model=model, epochs=0.05)
    for p in run.model.parameters():
        p.data.fill_(math.nan)
    run.metrics[-1] |= {"train": math.nan, "valid": math.nan}
    if compared:
        rows = [row.as_json() for row in lf.compare([run], neural=False)]
        (run.path / "comparison.json").write_text(json.dumps({"on": "test", "rows": rows}))
    page = Page(report_page(Subject(run)))
    said = "Some weights of this model are not finite numbers: its training diverged. Train again with a smaller"
    assert said in page.inside["header"][0]
    assert "It writes nothing: its outputs are not finite numbers." in page.inside["main"][0]
    assert page.inside["dd"][0] == "no number"
    assert "∞" not in page.inside["table"][0]
    if model == "recurrent":
        assert {value for t, row in enumerate(page.data("flow-data")["norms"]) for value in row[: t + 1]} == {None}
        values = base64.b64decode(page.data("states-data")["values"])
        assert {*torch.frombuffer(bytearray(values), dtype=torch.int16).tolist()} == {inside.NO_NUMBER}


def test_outputs_may_be_no_numbers_where_all_weights_are(tmp_path: Path) -> None:
    run = trained(tmp_path, epochs=0.01, cell="elman")
    for name, p in run.model.named_parameters():
        p.data.fill_({"b": 9.0, "V": 3e38}.get(name.rpartition(".")[2], 0.0))  # h(t) = tanh(9), o(t) = ∞
    about = Subject(run)
    assert about.trouble is not None
    assert about.trouble.startswith("The outputs of this model are not finite numbers.")
    assert "It writes nothing" in the_samples(about).body


@pytest.mark.usefixtures("_few_graphs")
def test_what_is_no_number_is_sent_as_none_and_what_vanished_as_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [math.nan, math.inf, 3.0]])
    monkeypatch.setattr(inside, "gradient_flow", lambda *_: lf.GradientFlow(norms))
    page = Page(report_page(Subject(hostile()[0], "abc")))
    assert page.data("flow-data")["norms"] == [[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [None, None, 3.0]]


def test_a_few_values_that_are_no_number_spare_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.tensor([[1.0, -4.0], [math.nan, 2.0], [math.inf, -math.inf]])
    monkeypatch.setattr(inside, "hidden_states", lambda *_: lf.HiddenStates(values, ["a", "b", "c"]))
    section = inside.inside(Subject(hostile()[0], "abc"))[2]
    assert section.data is not None
    data = section.data["states-data"]
    assert data["scale"] == 4.0
    whole = torch.frombuffer(bytearray(base64.b64decode(data["values"])), dtype=torch.int16).tolist()
    assert whole == [8192, -32767, inside.NO_NUMBER, 16384, inside.NO_NUMBER, inside.NO_NUMBER]


# ------------------------------------------------------------------ the table


@pytest.fixture
def about(tmp_path: Path) -> Subject:
    return Subject(trained(tmp_path, name="text", epochs=0.2))


def test_the_table_of_a_comparison_is_used_if_it_is_of_the_run_as_it_is(about: Subject) -> None:
    rows = [row.as_json() for row in lf.compare([about.run])]
    path = about.run.path / "comparison.json"
    path.write_text(json.dumps({"on": "test", "rows": rows}))
    fresh = Subject(about.run)
    assert [row.name for row in fresh.table.rows][-3:] == ["window", "convolution", "gru 8"]
    assert fresh.table.note == ""
    best, *others = fresh.table.lines
    assert best.endswith("-gram")
    assert others == ["window", "convolution", "gru 8"]

    rows[-1]["ledger"]["nll"] *= 1.1  # the run has gone on since
    path.write_text(json.dumps({"on": "test", "rows": rows}))
    stale = Subject(about.run)
    assert "window" not in [row.name for row in stale.table.rows]
    assert stale.table.note.endswith(f"type loopfold compare '{about.run.path}'")

    path.write_text(json.dumps({"on": "test", "rows": [{"name": "gru 8"}]}))
    with pytest.raises(lf.RunError, match=r"comparison.json is damaged .* type loopfold compare"):
        _ = Subject(about.run).table


def test_a_comparison_is_read_as_it_was_written(about: Subject) -> None:
    folder = RunFolder(about.run.path)
    assert Comparison.read(folder) is None
    rows = lf.compare([about.run], neural=False)
    never = replace(rows[-1].ledger, nll=math.nan)  # JSON does not tell it from ∞
    Comparison("test", [*rows, replace(rows[-1], name="diverged", tokens_per_second=math.nan, ledger=never)]).write(
        folder
    )
    found = Comparison.read(folder)
    assert found is not None
    assert (found.on, found.rows[:-1]) == ("test", rows)
    assert found.rows[-1].ledger.perplexity == math.inf
    assert math.isnan(found.rows[-1].tokens_per_second)
    best = min(rows[1:-1], key=lambda row: row.ledger.nll)
    assert [*baselines(found.rows)] == [best.name, "gru 8"]


def test_a_large_text_is_left_to_compare(about: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "CHEAP", 10)
    assert [row.name for row in about.table.rows] == ["gru 8"]
    assert "For the baselines, type loopfold compare" in about.table.note


# ------------------------------------------------------------------ the command


@pytest.mark.usefixtures("_few_graphs")
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path, name="text", epochs=0.1, cell="elman")
    monkeypatch.chdir(tmp_path)
    said = loopfold("report", "run text")
    assert (said.code, said.err) == (0, "")
    assert said.out == "The report is in run text/report.html. Open it in a browser.\n"
    first = (run.path / "report.html").read_bytes()
    loopfold("report", "run text", "--out", "again.html")
    assert Path("again.html").read_bytes() == first
    assert loopfold("report", "run text", "--out", "own.html", "--passage", "yes (or [no]) ∂").code == 0
    page = Page(Path("own.html").read_text())
    assert "".join(page.data("states-data")["pieces"]) == "yes (or [no]) \ufffd"
    assert "of your passage" in page.inside["main"][0]
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt", "run text", "again.html", "own.html"}


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path, name="text", epochs=0.01)
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    refused("there is no run folder none", "report", "none")
    refused(
        "run text is a folder: name a file, such as run text/report.html", "report", "run text", "--out", "run text"
    )
    refused(r"cannot be written: there is no folder none\. Make it, or", "report", "run text", "--out", "none/a.html")
    refused(r"its name must end in \.html; got a\.pdf", "report", "run text", "--out", "a.pdf")
    refused("the passage is empty: give some text as --passage", "report", "run text", "--passage", "  \n")
    refused(r"device 'gpu' cannot be used", "report", "run text", "--device", "gpu")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.usefixtures("_few_graphs")
def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    run = trained(tmp_path, name="text", model="window", epochs=0.01)
    out = tmp_path / "page.html"
    out.write_text("old")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(
        lf.RunError, match=r"page.html cannot be written: No space left on device\. Choose another place with out"
    ):
        write_report(run, out)
    assert out.read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt", "run text", "page.html"}
