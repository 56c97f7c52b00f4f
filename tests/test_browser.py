"""The report in a browser, offline: what moves on it, by pointer and by keyboard, and that nothing else does.

Needs Chromium or Chrome. Where there is none these tests are skipped, or fail under LOOPFOLD_BROWSER=required.
"""

import base64
import io
import os
import re
import shutil
import struct
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image
from reports import hostile

import loopfold as lf
from loopfold.drawing import charts
from loopfold.drawing.figure import COLOURS
from loopfold.report.subject import Subject

try:
    from playwright.sync_api import sync_playwright
except ImportError:
    sync_playwright = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
MISSING = (
    "no playwright: pip install playwright"
    if sync_playwright is None
    else "no browser: apt-get install chromium"
    if CHROMIUM is None
    else None
)
if MISSING and os.environ.get("LOOPFOLD_BROWSER") != "required":
    pytest.skip(MISSING, allow_module_level=True)


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    assert MISSING is None, MISSING
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def tab(browser: "Browser", request: pytest.FixtureRequest) -> "Iterator[Page]":
    """The page in a tab without a network. A request, a remark on the console or an error fails the test."""
    settings: dict[str, Any] = {"viewport": {"width": 1200, "height": 900}} | getattr(request, "param", {})
    context = browser.new_context(offline=True, **settings)
    tab = context.new_page()
    address = hostile()[1].as_uri()
    wrong: list[str] = []
    tab.on("request", lambda r: None if r.url.startswith((address, "data:")) else wrong.append(r.url))
    tab.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.goto(address)
    yield tab
    assert tab.evaluate("window.hacked") is None
    context.close()
    assert not wrong


def graph(tab: "Page") -> list[tuple[str | None, str | None]]:
    """Which of the unfolded graphs can be seen."""
    found = tab.locator("figure[data-steps]:visible").all()
    return [(figure.get_attribute("data-steps"), figure.get_attribute("data-way")) for figure in found]


# ------------------------------------------------------------------ the unfolded graph


def test_the_slider_moves_by_keyboard(tab: "Page") -> None:
    slider = tab.get_by_role("slider", name="Steps")
    assert graph(tab) == [("3", "forward")]
    slider.focus()
    slider.press("ArrowRight")
    assert graph(tab) == [("4", "forward")]
    assert tab.locator("#steps-shown").inner_text() == "τ = 4"
    slider.press("Home")
    assert graph(tab) == [("1", "forward")]
    slider.press("End")
    assert graph(tab) == [("100", "forward")]
    assert slider.get_attribute("aria-valuetext") == "100 steps"


def test_every_place_of_the_slider_has_its_graph_both_ways(tab: "Page") -> None:
    for way in ("Backward", "Forward"):
        tab.get_by_role("radio", name=way).check()
        for place, steps in enumerate([*range(1, 9), 100], start=1):
            tab.get_by_role("slider", name="Steps").fill(str(place))
            assert graph(tab) == [(str(steps), way.lower())]
            assert tab.locator("figure[data-steps]:visible svg").bounding_box()["width"] > 50  # type: ignore[index]


def test_the_direction_changes_by_keyboard(tab: "Page") -> None:
    tab.get_by_role("radio", name="Forward").focus()
    tab.keyboard.press("ArrowRight")
    assert graph(tab) == [("3", "backward")]


# ------------------------------------------------------------------ the maps


def number(text: str) -> float:
    return float(re.findall(r": ([+−]?[\d.]+)", text)[0].replace("−", "-"))


def point(tab: "Page", row: int, column: int) -> dict[str, float]:
    """Where on the map of hidden states a cell is."""
    size = tab.locator("#states-map").evaluate("c => [c.offsetWidth, c.offsetHeight]")
    rows, columns = 8, len(Subject(hostile()[0]).tokens[1])
    return {"x": (column + 0.5) * size[0] / columns, "y": (row + 0.5) * (size[1] - 22) / rows}


def test_pointing_at_a_hidden_state_says_its_value_and_a_click_keeps_it(tab: "Page") -> None:
    run, _ = hostile()
    values = lf.hidden_states(run.model, run.vocabulary, run.corpus().test).values
    tab.get_by_role("combobox", name="Units").select_option("all")
    canvas, readout, kept = (tab.locator(f"#states-{name}") for name in ("map", "readout", "kept"))
    for row, column in ((0, 0), (3, 7), (7, 40)):
        canvas.hover(position=point(tab, row, column))  # type: ignore[arg-type]
        said = readout.inner_text()
        assert said.startswith(f"unit {row} at character {column + 1}, ")
        assert number(said) == pytest.approx(float(values[column, row]), abs=6e-4)
        piece = run.corpus().test[column]
        assert {" ": "space", "\n": "end of line"}.get(piece, f"“\u2068{piece}\u2069”") in said

    canvas.click(position=point(tab, 2, 5))  # type: ignore[arg-type]
    first = readout.inner_text()
    canvas.click(position=point(tab, 4, 9))  # type: ignore[arg-type]
    canvas.click(position=point(tab, 4, 9))  # type: ignore[arg-type]
    canvas.hover(position=point(tab, 1, 1))  # type: ignore[arg-type]
    assert kept.locator("li").all_inner_texts()[0] == first
    assert kept.locator("li").count() == 2
    tab.locator("#states-clear").click()
    assert kept.locator("li").count() == 0
    assert not tab.locator("#states-clear").is_visible()


def test_the_map_of_hidden_states_by_keyboard(tab: "Page") -> None:
    tab.get_by_role("combobox", name="Units").select_option("all")
    canvas, readout = tab.locator("#states-map"), tab.locator("#states-readout")
    canvas.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowUp"):
        canvas.press(key)
    assert readout.inner_text().startswith("unit 1 at character ")
    canvas.press("Home")
    assert readout.inner_text().startswith("unit 1 at character 1, ")
    canvas.press("ArrowUp")
    canvas.press("ArrowUp")  # an edge is an edge
    assert readout.inner_text().startswith("unit 0 at character 1, ")
    canvas.press("End")
    last = len(Subject(hostile()[0]).tokens[1])
    assert readout.inner_text().startswith(f"unit 0 at character {last}, ")
    assert canvas.evaluate("c => c.parentElement.scrollLeft") > 0 or last < 80
    canvas.press("Enter")
    assert tab.locator("#states-kept li").all_inner_texts() == [readout.inner_text()]
    canvas.press("Tab")
    assert tab.evaluate("document.activeElement.id") == "states-clear"
    tab.keyboard.press("Enter")
    assert tab.locator("#states-kept li").count() == 0


def test_units_are_sorted_by_what_they_go_with(tab: "Page") -> None:
    run, _ = hostile()
    tracking = lf.hidden_states(run.model, run.vocabulary, run.corpus().test).tracking
    assert tracking
    for tracked in tracking:
        tab.get_by_role("combobox", name="Units").select_option(f"{tracked.feature}, {tracked.correlation:+.2f}")
        tab.locator("#states-map").hover(position=point(tab, 0, 3))  # type: ignore[arg-type]
        assert tab.locator("#states-readout").inner_text().startswith(f"unit {tracked.unit} at")
        assert tab.locator("#states-units li").first.inner_text() == str(tracked.unit)


def test_the_map_of_gradients(tab: "Page") -> None:
    run, _ = hostile()
    assert isinstance(run.model, lf.RecurrentLM)
    x, y = (part[:64] for part in Subject(run).x_and_y)
    norms = lf.gradient_flow(run.model.network, run.model.network.loss, x, y).norms
    canvas, readout = tab.locator("#flow-map"), tab.locator("#flow-readout")
    size = canvas.evaluate("c => [c.offsetWidth, c.offsetHeight]")
    t, k = 40, 30
    canvas.click(position={"x": (k + 0.5) * size[0] / len(x), "y": (t + 0.5) * size[1] / len(x)})
    said = readout.inner_text()
    assert said.startswith("∂L(41)/∂h(31): size ")
    assert said.endswith(", 10 steps back")
    assert float(said.split("size ")[1].split(",")[0]) == pytest.approx(float(norms[t, k]), rel=6e-3)
    canvas.press("End")
    assert "none, since step" in readout.inner_text()
    assert tab.locator("#flow-kept li").all_inner_texts() == [said]


def test_a_map_says_why_there_is_no_number(browser: "Browser", tmp_path: Path) -> None:
    """Vanished, no finite number, and out of reach are three things."""
    text = hostile()[1].read_text(encoding="utf-8")
    norms = '{"norms":[[1,0,0],[0,2,0],[null,0.5,3]],"first":0}'
    text = re.sub(r'(id="flow-data">)[^<]*', rf"\g<1>{norms}", text)
    unit_0_to_2 = base64.b64encode(struct.pack("<3h", -32768, 0, 32767)).decode()  # at the first token
    text = re.sub(r'("values":").{8}', lambda found: found[1] + unit_0_to_2, text, count=1)
    page = tmp_path / "page.html"
    page.write_text(text, encoding="utf-8")
    context = browser.new_context(offline=True)
    tab = context.new_page()
    tab.goto(page.as_uri())
    canvas, readout = tab.locator("#flow-map"), tab.locator("#flow-readout")
    canvas.focus()
    said = {}
    for row, column in ((0, 2), (1, 0), (2, 0), (2, 1)):
        canvas.press("Control+Home")
        for key, times in (("ArrowDown", row), ("ArrowRight", column)):
            for _ in range(times):
                canvas.press(key)
        said[row, column] = readout.inner_text()
    assert said == {
        (0, 2): "∂L(1)/∂h(3): none, since step 3 cannot reach L(1)",
        (1, 0): "∂L(2)/∂h(1): vanished, below what a float holds",
        (2, 0): "∂L(3)/∂h(1): no finite number",
        (2, 1): "∂L(3)/∂h(2): size 0.500, 1 step back",
    }
    tab.get_by_role("combobox", name="Units").select_option("all")
    canvas, readout = tab.locator("#states-map"), tab.locator("#states-readout")
    canvas.focus()
    for value in ("no finite number", "+0.000"):
        assert f": {value}" in readout.inner_text()
        canvas.press("ArrowDown")
    context.close()


# ------------------------------------------------------------------ every reader


@pytest.mark.parametrize("tab", [{"viewport": {"width": 360, "height": 740}, "has_touch": True}], indirect=True)
def test_a_phone_scrolls_no_way_but_down(tab: "Page") -> None:
    for place in ("1", "9"):
        tab.get_by_role("slider", name="Steps").fill(place)
        assert tab.evaluate("document.documentElement.scrollWidth") == 360
    tab.locator("#states-map").tap(position={"x": 30, "y": 30})
    assert tab.locator("#states-kept li").count() == 1


def background(tab: "Page") -> str:
    return tab.evaluate("getComputedStyle(document.documentElement).backgroundColor")


def test_light_and_dark(tab: "Page") -> None:
    image = "document.getElementById('states-map').toDataURL()"
    light, cells = background(tab), tab.evaluate(image)
    tab.emulate_media(color_scheme="dark")
    assert background(tab) != light
    tab.wait_for_function(f"{image} !== '{cells}'")  # the maps follow
    tab.emulate_media(media="print")
    assert background(tab) == light  # paper is white


def test_every_colour_of_a_picture_follows_light_and_dark(browser: "Browser", tmp_path: Path) -> None:
    """Those of markers too, which are painted where they are used."""
    file = charts.learning_curves({"train": [(1, 3.0), (2, 2.0)]}, {"2-gram": 1.5}).save(tmp_path / "curve.svg")
    context = browser.new_context(offline=True, device_scale_factor=4)
    tab = context.new_page()
    tab.goto(file.as_uri())

    def seen() -> set[str]:
        image = np.array(Image.open(io.BytesIO(tab.locator("svg").screenshot())).convert("RGB"))
        colours, counts = np.unique(image.reshape(-1, 3), axis=0, return_counts=True)
        return {"#" + bytes(colour).hex() for colour in colours[counts > 20]}

    uses = ("paper", "ink", "muted", "blue")
    light, dark = ({COLOURS[use][i] for use in uses} for i in (0, 1))
    assert seen() & (light | dark) == light
    tab.emulate_media(color_scheme="dark")
    assert seen() & (light | dark) == dark
    tab.emulate_media(media="print")
    assert seen() & (light | dark) == light
    context.close()


def test_print_shows_every_section_and_no_control(tab: "Page") -> None:
    tab.emulate_media(media="print")
    assert tab.locator("section:visible").count() == 8
    assert tab.locator("svg:visible, canvas:visible").count() >= 5
    assert tab.locator("input:visible, select:visible, button:visible, nav:visible").count() == 0
    assert tab.evaluate("document.documentElement.scrollWidth") <= 1200
    whole = "canvas => canvas.getBoundingClientRect().right <= canvas.parentElement.getBoundingClientRect().right"
    assert tab.locator("#states-map").evaluate(whole)
    for drawn in (".bar", ".live-text"):  # by its background alone, which paper has only if told so
        assert tab.locator(drawn).first.evaluate("part => getComputedStyle(part).printColorAdjust") == "exact"


def test_every_control_has_a_name_and_can_be_reached(tab: "Page") -> None:
    """By Tab alone, in the order of the page."""
    seen: list[str] = []
    while "states-map" not in seen and len(seen) < 60:
        tab.keyboard.press("Tab")
        seen.append(tab.evaluate("document.activeElement.id || document.activeElement.name || ''"))
    tried = ["typed", "mode", "text", "temperature", "top", "length", "write", "steps", "step", "graph"]
    own = [f"live-{name}" for name in tried]
    assert [name for name in seen if name] == [*own, "steps", "way", "flow-map", "states-choice", "states-map"]
    unnamed = "[...document.querySelectorAll('input, select, button, canvas')].filter(e => !(e.labels?.length || "
    assert tab.evaluate(unnamed + "e.textContent.trim() || e.getAttribute('aria-label')))") == []


def test_without_its_script_the_page_can_be_read(browser: "Browser") -> None:
    context = browser.new_context(java_script_enabled=False, offline=True)
    tab = context.new_page()
    tab.goto(hostile()[1].as_uri())
    assert graph(tab) == [("3", "forward")]
    assert tab.locator("input:visible, select:visible, button:visible").count() == 0
    assert "Without JavaScript" in tab.inner_text("header")
    assert "runs here, offline" not in tab.inner_text("body")
    context.close()


def test_an_exported_model_runs_in_a_page(browser: "Browser", tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of docs/export.md, over HTTP, shows the numbers that Python prints there."""
    text = (Path(__file__).parent.parent / "docs" / "export.md").read_text(encoding="utf-8")
    blocks = dict(reversed(re.findall(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S)))  # the first of each language
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        exec(blocks["python"], {})
    (tmp_path / "index.html").write_text(blocks["html"], encoding="utf-8")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tab = browser.new_page()
        tab.goto(f"http://127.0.0.1:{server.server_address[1]}/")
        tab.wait_for_function("document.getElementById('numbers').textContent")
        assert tab.inner_text("#numbers") + "\n" == blocks["text"]
        tab.close()
        server.shutdown()
