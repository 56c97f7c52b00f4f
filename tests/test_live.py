"""The model in the report's page, in a browser, offline: what it says is what Python says, and each thing to try works.

Needs Chromium or Chrome, as test_browser.py does.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from reports import HOSTILE, NAME, trained
from test_browser import CHROMIUM, sync_playwright

import loopfold as lf
from loopfold.language.ngram import NGramLM
from loopfold.report.live import the_model
from loopfold.report.page import page_of
from loopfold.report.subject import Subject

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

OWN = '''
import torch
import loopfold as lf

class Tide(lf.Transition):
    """Two leaves, and a step that no library has."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.input_size = n_in
        self.U, self.W = torch.nn.Linear(n_in, n), torch.nn.Linear(n, n)
        self.rate = torch.nn.Parameter(torch.linspace(-2, 2, n))

    def forward(self, state, x):
        h, slow = state
        a = torch.sigmoid(self.rate)
        slow = a * slow + (1 - a) * torch.tanh(self.U(x) + self.W(h))
        return torch.tanh(slow + h * self.rate), slow

    def initial_state(self, batch):
        return self.rate.new_zeros(batch, len(self.rate)), self.rate.new_zeros(batch, len(self.rate))

class Odd(Tide):
    """Its leaves change places, and what it takes besides has to be named."""

    def forward(self, state, x):
        h, old = state
        a = torch.tanh(self.U(x) + self.W(h))
        return 0.5 * torch.tanh((a - self.rate) * (0.5 - old) + a * a - torch.maximum(old, self.rate)), h

class Choosy(Tide):
    def forward(self, state, x):
        h, slow = state
        if float(h.detach().sum()) > 0:
            h = -h
        return super().forward((h, slow), x)
'''
WORDS = 'the cat sat on the mat .\nthe dog <b> ate the "cat" & ran .\n猫 sat on 犬 .\n\n' * 20
RUNS: dict[str, dict[str, Any]] = {
    "gru": {"cell": "gru"},
    "own": {"cell": "own.py:Tide"},
    "words": {"cell": "lstm", "layers": 2, "unit": "words", "text": WORDS},
    "bytes": {"cell": "elman", "unit": "bytes"},
    "subwords": {"cell": "elman", "unit": "subwords", "vocabulary_size": 300},
    "odd": {"cell": "own.py:Odd"},
}


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[lf.Run, Path]]:
    """A run of some kind and a page with its model alone, each made once."""
    found: dict[str, tuple[lf.Run, Path]] = {}

    def make(name: str) -> tuple[lf.Run, Path]:
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            options = dict(RUNS[name])
            if options["cell"].startswith("own.py"):
                (folder / "own.py").write_text(OWN, encoding="utf-8")
                options["cell"] = str(folder / options["cell"])
            run = trained(folder, options.pop("text", HOSTILE * 12), NAME, **options)
            subject, page = Subject(run), folder / "page.html"
            page.write_text(page_of(subject, [the_model(subject)]), encoding="utf-8")
            found[name] = run, page
        return found[name]

    return make


@pytest.fixture
def opened(
    browser: "Browser", made: Callable[[str], tuple[lf.Run, Path]]
) -> "Iterator[Callable[..., tuple[lf.Run, Page]]]":
    """Opens the page of a run in a tab without a network, in which any request, remark or error fails the test."""
    contexts, wrong = [], []

    def open_tab(name: str = "gru", **settings: Any) -> "tuple[lf.Run, Page]":
        run, page = made(name)
        context = browser.new_context(offline=True, **({"viewport": {"width": 1200, "height": 900}} | settings))
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(10_000)
        tab.on("request", lambda r: None if r.url == page.as_uri() else wrong.append(r.url))
        tab.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.goto(page.as_uri())
        ready(tab)
        return run, tab

    yield open_tab
    for context in contexts:
        assert all(tab.evaluate("window.hacked") is None for tab in context.pages)
        context.close()
    assert not wrong


def ready(tab: "Page") -> None:
    tab.wait_for_selector("#live-text[aria-busy=false]")


def typed(tab: "Page", text: str) -> None:
    tab.locator("#live-typed").fill(text)
    ready(tab)


SAID = """() => { const r = loopfoldLive.reader; return { tokens: r.tokens, bits: r.bits, best: r.best, grams: r.grams,
  states: r.states.map((h) => [...h]), own: perplexity(r.bits) } }"""


def agrees(run: lf.Run, tab: "Page", ids: Any, atol: float = 1e-3) -> None:
    """All that the page says of the tokens in its text is what Python says."""
    said = tab.evaluate(SAID)
    assert said["tokens"] == ids.tolist()
    model, x = run.model, ids.long()[:, None]
    assert isinstance(model, lf.RecurrentLM)
    with torch.no_grad():
        model.eval()
        start = model.initial_context(1)
        read = torch.cat([start.last, ids.long()])[:, None]
        p = model.network(model.encode(read), start.memory).squeeze(1).softmax(-1)
    own = p[:-1].gather(1, x).squeeze(1)
    torch.testing.assert_close(torch.tensor(said["bits"]).neg().exp2(), own, atol=atol, rtol=0)
    for (token, share), row in zip((best[0] for best in said["best"]), p, strict=True):
        assert float(row[token]) == pytest.approx(float(row.max()), abs=atol)
        assert share == pytest.approx(float(row.max()), abs=atol)
    fives = torch.tensor([[share for _, share in best] for best in said["best"]])
    torch.testing.assert_close(fives, p.topk(5).values, atol=atol, rtol=0)


@pytest.mark.parametrize("name", RUNS)
def test_the_page_says_what_python_says(opened: Any, name: str) -> None:
    """Of the passage that is shown: every probability, the five likeliest, every hidden unit, and the n-gram."""
    run, tab = opened(name)
    ids = Subject(run).tokens[1].flatten()
    agrees(run, tab, ids)
    said = tab.evaluate(SAID)
    states = lf.hidden_states(run.model, run.vocabulary, Subject(run).text).values[: len(ids)]
    torch.testing.assert_close(torch.tensor(said["states"]), states.float(), atol=2e-3, rtol=0)
    order = int(tab.locator("#live-rival-name").inner_text().split("-")[0])
    grams = NGramLM(run.tokens("train").ids, run.vocabulary.size, order, run.vocabulary.end)
    nll = grams(ids[:, None], grams.initial_context(1)).nll.flatten() / torch.tensor(2.0).log()
    torch.testing.assert_close(torch.tensor(said["grams"], dtype=nll.dtype), nll, atol=3e-3, rtol=0)
    assert float(tab.locator("#live-own").inner_text()) == pytest.approx(said["own"], abs=6e-4)
    assert float(tab.locator("#live-grams").inner_text()) == pytest.approx(float(nll.mean().exp2()), rel=3e-3)


# ------------------------------------------------------------------ type


STRANGE = (
    '</script><script>window.hacked = 6</script> "it\'s" <!-- & אבג \u202e x 👩\u200d🚀 \0 \x1b é\r\u2028 (end)\n\n'
)


def set_text(tab: "Page", text: str) -> None:
    """As `typed`, with what no keyboard can type; lone surrogates are asked for as U+E000."""
    tab.evaluate(
        """(text) => { const box = document.getElementById("live-typed");
          box.value = text.replaceAll("\\ue000", "\\ud800");
          box.dispatchEvent(new Event("input", { bubbles: true })); }""",
        text,
    )
    ready(tab)


@pytest.mark.parametrize("name", ["gru", "words", "bytes"])
def test_whatever_is_typed_is_read_as_python_reads_it(opened: Any, name: str) -> None:
    run, tab = opened(name)
    text = STRANGE + 'the cat "said\n'
    set_text(tab, text)
    shown = tab.evaluate("document.getElementById('live-typed').value")  # where \r is a newline
    agrees(run, tab, run.vocabulary.beginning(shown))
    assert tab.locator("#live-text script, #live-text img").count() == 0
    assert tab.locator("#live-text").text_content() == shown + "…"
    if name != "bytes":
        assert "never seen" in tab.locator("#live-note").inner_text()
    set_text(tab, "the \ue000 cat")  # a lone surrogate stays in its place
    assert tab.evaluate("document.getElementById('live-text').textContent.charCodeAt(4)") == 0xD800
    set_text(tab, "")
    assert tab.locator("#live-own").inner_text() == "—"
    assert tab.locator("#live-best li").count() == 5  # what may come first
    assert tab.locator("#live-unfold-none").is_visible()


def test_typing_here_and_there_reads_no_more_than_it_must(opened: Any) -> None:
    """What was kept of the text before is right after edits at its end, in its middle, and while it is still read."""
    run, tab = opened()
    box = tab.locator("#live-typed")
    box.press("Control+End")
    box.press_sequentially("left (at 9")
    box.evaluate("box => box.setSelectionRange(40, 41)")
    box.press_sequentially("yes")
    ready(tab)
    agrees(run, tab, run.vocabulary.beginning(box.input_value()))
    set_text(tab, "He left. " * 100)
    tab.evaluate(
        """(texts) => { const box = document.getElementById("live-typed");
          for (const text of texts) { box.value = text; box.dispatchEvent(new Event("input")); } }""",
        ["He said " * 900, "He " + "said " * 900, "He left. " * 50 + "no"],
    )
    ready(tab)
    agrees(run, tab, run.vocabulary.beginning("He left. " * 50 + "no"))


def test_a_long_paste_does_not_hold_the_page_up(opened: Any) -> None:
    _, tab = opened()
    longest = tab.evaluate(
        """async (text) => { const box = document.getElementById("live-typed"), gaps = [];
          let last = performance.now();
          const clock = setInterval(() => { gaps.push(performance.now() - last); last = performance.now(); }, 1);
          box.value = text; box.dispatchEvent(new Event("input"));
          while (document.getElementById("live-text").getAttribute("aria-busy") === "true") {
            await new Promise((go) => setTimeout(go, 5)); }
          clearInterval(clock);
          return [gaps.length, loopfoldLive.reader.bits.length]; }""",
        "He said no. " * 1000,
    )
    assert longest[0] > 5  # many turns for others while it was read
    assert longest[1] == 10_000
    assert "Only the first 10,000" in tab.locator("#live-note").inner_text()


def test_pointing_or_arrow_keys_say_the_probability_and_the_five_likeliest(opened: Any) -> None:
    run, tab = opened()
    said = tab.evaluate(SAID)
    text, readout = tab.locator("#live-text"), tab.locator("#live-readout")
    tab.locator("#live-7").hover()
    assert f"probability {2 ** -said['bits'][7]:.4f}, {said['bits'][7]:.2f} bits" in readout.inner_text()
    shares = tab.locator("#live-best li > :last-child").evaluate_all("rows => rows.map((r) => Number(r.dataset.p))")
    assert shares == [p for _, p in said["best"][7]]
    text.focus()
    for key in ("Home", "ArrowRight", "ArrowRight"):
        text.press(key)
    assert text.get_attribute("aria-activedescendant") == "live-2"
    assert f"probability {2 ** -said['bits'][2]:.4f}" in readout.inner_text()
    text.press("End")
    assert readout.inner_text() == "What comes next"
    for key in ("ArrowUp", "ArrowDown", "PageUp", "ArrowUp"):
        text.press(key)
    assert 0 <= int(text.get_attribute("aria-activedescendant").split("-")[1]) < len(said["bits"])


def test_a_chosen_end_is_no_end_of_reading(opened: Any) -> None:
    """The end may be chosen by taking what was written, by a key, or by emptying the text; and it stays the end."""
    run, tab = opened()
    box, text = tab.locator("#live-typed"), tab.locator("#live-text")

    def goes_on(more: str) -> None:
        box.press("Control+End")
        box.press_sequentially(more)
        ready(tab)
        agrees(run, tab, run.vocabulary.beginning(box.input_value()))
        assert text.get_attribute("aria-activedescendant") == f"live-{len(box.input_value())}"
        assert tab.locator("#live-readout").inner_text() == "What comes next"

    tab.locator("#live-length").fill("5")
    tab.locator("#live-write").click()
    tab.locator("#live-ways button:enabled").first.click()
    goes_on("abc")
    text.focus()
    text.press("End")
    goes_on("left")
    tab.locator("#live-3").click()
    typed(tab, "")
    goes_on("He")
    tab.locator("#live-1").click()
    box.press("Control+End")
    box.press_sequentially(" said")
    ready(tab)
    assert text.get_attribute("aria-activedescendant") == "live-1"  # any other place stays where it is


@pytest.mark.parametrize("name", ["gru", "words"])
def test_the_text_stands_as_it_was_written(opened: Any, name: str) -> None:
    """Not as the model reads it, with <unk> for what it does not know."""
    run, tab = opened(name)
    shown = tab.locator("#live-typed").input_value()
    assert Subject(run).text.startswith(shown)
    assert tab.locator("#live-text").text_content() == shown + "…"
    data = the_model(Subject(run, "the zebra ∂")).data
    assert data is not None
    assert data["live-data"]["text"] == "the zebra ∂"


# ------------------------------------------------------------------ write


@pytest.mark.parametrize("name", ["gru", "words", "bytes", "subwords"])
def test_it_writes_on_from_a_place_as_python_does(opened: Any, name: str) -> None:
    run, tab = opened(name)
    ids = Subject(run).tokens[1].flatten()
    place = 11
    tab.locator(f"#live-{place}").click()
    tab.locator("#live-temperature").fill("0")
    tab.locator("#live-length").fill("12")
    tab.locator("#live-write").click()
    tab.wait_for_selector("#live-ways button:enabled")
    context = run.model.initial_context(1)
    with torch.no_grad():
        context = run.model(ids[: place + 1, None].long(), context).context
        truth = run.model.write(context, 12, lf.Greedy(), None, run.vocabulary.unknown).tokens.flatten().tolist()
    ways = tab.locator("#live-ways pre").evaluate_all("all => all.map((one) => one.textContent)")
    written = run.vocabulary.decode([*ids[: place + 1].tolist(), *truth])
    before = run.vocabulary.decode(ids[: place + 1].tolist())
    if name in ("gru", "words"):
        assert ways == [written[len(before) :]] * 3
    tab.locator("#live-temperature").fill("1")
    tab.locator("#live-top").fill("1")  # the likeliest of one
    tab.locator("#live-write").click()
    tab.wait_for_selector("#live-ways button:enabled")
    assert tab.locator("#live-ways pre").evaluate_all("all => all.map((one) => one.textContent)") == ways
    tab.locator("#live-ways button").nth(1).click()
    ready(tab)
    if name != "bytes":  # whose greedy bytes need not be text
        agrees(run, tab, torch.tensor([*ids[: place + 1].tolist(), *truth]))
    tab.locator("#live-temperature").fill("1.2")
    tab.locator("#live-top").fill("0")
    tab.locator("#live-length").fill("60")
    tab.locator("#live-write").press("Enter")
    tab.wait_for_selector("#live-ways button:enabled")
    assert len({*tab.locator("#live-ways pre").all_inner_texts()}) > 1
    for length, top, shown in (("-3", "-1", ["1", "0"]), ("", "", ["1", "0"]), ("7.6", "2.2", ["8", "2"])):
        tab.locator("#live-length").fill(length)
        tab.locator("#live-top").fill(top)
        tab.locator("#live-write").click()
        assert [tab.locator(f"#live-{field}").input_value() for field in ("length", "top")] == shown


# ------------------------------------------------------------------ units, and what bears on a prediction


def test_units_colour_the_text_and_stand_out_in_a_passage(opened: Any) -> None:
    run, tab = opened()
    states = lf.hidden_states(run.model, run.vocabulary, Subject(run).text)
    seen = len(Subject(run).tokens[1])
    away = (states.values - states.values.mean(0)) / states.values.std(0, correction=0)
    tab.get_by_label("A unit", exact=True).check()
    best = states.tracking[0]
    options = tab.locator("#live-unit option").all_inner_texts()
    assert len(options) == 8
    assert options[0] == f"{best.unit}: {best.feature} {best.correlation:+.2f}".replace("-", "−")
    tab.locator("#live-unit").select_option("3")
    shares = tab.locator("#live-text > span").evaluate_all(
        "all => all.slice(0, -1).map((s) => Number(s.style.getPropertyValue('--share')) * "
        "(s.style.getPropertyValue('--colour').includes('blue') ? -1 : 1))"
    )
    torch.testing.assert_close(torch.tensor(shares), (away[:seen, 3] / 3).clamp(-1, 1).float(), atol=6e-3, rtol=0)
    said = tab.evaluate("loopfoldLive.pieces.map((_, i) => loopfoldLive.said(i).split('unit 3 after it ')[1])")
    assert "-" not in "".join(said)  # a minus sign, as everywhere on the page
    values = torch.tensor([float(number.replace("−", "-")) for number in said])
    torch.testing.assert_close(values, states.values[:seen, 3].float(), atol=3e-3, rtol=0)

    text = tab.locator("#live-text")
    tab.locator("#live-5").click()
    for _ in range(4):
        text.press("Shift+ArrowRight")
    assert tab.locator("#live-text [aria-selected=true]").count() == 5
    tab.locator("#live-unit").select_option(index=1)  # the colours are another unit's, the passage is the same
    assert tab.locator("#live-text [aria-selected=true]").count() == 5
    means = away[5:10].mean(0)
    first = int(means.abs().argmax())
    found = tab.locator("#live-passage-units li > button:first-child").all_inner_texts()
    assert len(found) == 6
    assert found[0].split(",")[0].split(":")[0] == f"Unit {first}"
    assert float(found[0].split(", ")[-1].replace("−", "-")) == pytest.approx(float(means[first]), abs=0.06)
    tab.locator("#live-passage-units li > button:first-child").first.click()
    assert tab.locator("#live-unit").input_value() == str(first)
    other = tab.locator("#live-passage-units .elsewhere").first
    other.press("Enter")
    unit, place = (int(tab.evaluate(f"loopfoldLive.{what}")) for what in ("unitChosen", "reading.chosen"))
    assert not 5 <= place < 10
    assert abs(float(away[place, unit])) > 0.95


@pytest.mark.parametrize("name", ["gru", "own", "words"])
def test_what_bears_on_a_prediction_is_its_gradient(opened: Any, name: str) -> None:
    """By torch: of log2 p by the embedding of each token before it, times how far that is from the mean embedding."""
    run, tab = opened(name)
    ids = Subject(run).tokens[1].flatten().long()
    model = run.model
    table = next(m for m in model.modules() if isinstance(m, torch.nn.Embedding)).weight.detach()
    for place in (0, 9, min(130, len(ids) - 1)):
        start = model.initial_context(1)
        rows = table[torch.cat([start.last, ids[:place]])][:, None].requires_grad_()
        model.eval()
        o = model.network((rows,), start.memory)
        bits = o[-1, 0].log_softmax(-1)[ids[place]] / torch.tensor(2.0).log()
        (gradient,) = torch.autograd.grad(bits, rows)
        truth = (gradient * (rows - table[:-1].mean(0))).sum(-1).flatten()[1:].detach()
        found = tab.evaluate(f"loopfoldLive.bearing.of({place})")
        assert [at for at, _ in found] == list(range(max(place - 100, 0) - (place > 100), place))
        mine = torch.tensor([bits for _, bits in found])
        torch.testing.assert_close(mine, truth[max(place - 101, 0) :], atol=2e-3, rtol=1e-2)
    tab.get_by_label("Influence").check()
    tab.locator("#live-9").hover()
    tab.wait_for_selector("#live-readout:has-text('Strongest influence: ')")
    assert tab.evaluate("async () => (await Promise.all([5, 6].map((i) => loopfoldLive.bearing.of(i))))[0]") is None
    share = "s => s.style.getPropertyValue('--share')"
    assert tab.locator("#live-9").evaluate(share) == "0.000"
    assert max(float(tab.locator(f"#live-{i}").evaluate(share)) for i in range(9)) == 1


# ------------------------------------------------------------------ unfold


@pytest.mark.parametrize("name", ["own", "words"])
def test_the_step_unfolds_over_the_text_with_its_values(opened: Any, name: str) -> None:
    run, tab = opened(name)
    states = lf.hidden_states(run.model, run.vocabulary, Subject(run).text).values
    pieces = tab.locator("#live-text > span").all_inner_texts()
    slider, step = tab.locator("#live-steps"), tab.locator("#live-step")
    shown, most = tab.locator("#live-steps-shown"), min(100, len(pieces) - 1)
    widths = []
    for steps in (1, 2, 3, 10, most):
        slider.fill(str(steps))
        assert shown.inner_text() == (f"{steps} steps" if steps > 1 else "1 step")
        assert tab.locator("#live-graph .token:not(.next)").count() == steps
        widths.append(float(tab.locator("#live-graph .now").get_attribute("width") or 0))
    assert widths == sorted(widths, reverse=True)
    slider.press("Home")
    slider.press("ArrowRight")
    assert shown.inner_text() == "2 steps"
    names = tab.locator("#live-values li > :first-child").all_inner_texts()
    assert "tanh" in names
    assert ("σ" in names) == (name == "words")
    slider.fill("5")
    for now in (1, 4):
        step.fill(str(now))
        hidden = tab.evaluate(
            f"[...loopfoldLive.unfold.steps[{now - 1}].values[loopfold.graph.after[loopfoldLive.data.hidden]]]"
        )
        torch.testing.assert_close(torch.tensor(hidden), states[now - 1].float(), atol=2e-3, rtol=0)
    tab.locator("#live-graph .state[data-step='1']").first.click()
    assert tab.locator("#live-step-shown").inner_text().startswith("2:")
    tab.locator("#live-20").click()  # unfolds from there on
    assert tab.locator("#live-graph .token:not(.next)").first.text_content() == tab.evaluate(
        "[...visible(bare(loopfoldLive.pieces[20])).replace(' ', '␣')].slice(0, 20).join('')"
    )


LABELS = {
    "gru": {"U", "W", "V", "+", "+ b", "+ b_hn", "+ c", "σ", "1 −", "tanh", "×", "+ → h"},
    "odd": {"U", "W", "V", "+", "+ b_U", "+ b_W", "+ c", "tanh", "−", "− rate", "0.5 −", "×", "·²"}
    | {"max(·, rate)", "× 0.5 → state0"},
    "words": {"+", "σ", "tanh", "×", "V", "+ c"}
    | {f"{sign}{i}" for i in "₁₂" for sign in ("W", "U", "+ b", "+ → c", "× → h")},
}


@pytest.mark.parametrize("name", LABELS)
def test_operations_are_named_by_what_they_take(opened: Any, name: str) -> None:
    _, tab = opened(name)
    assert {*tab.locator("#live-values li > :first-child").all_inner_texts()} == LABELS[name]


def test_the_unfolded_states_read_what_they_read_and_no_more(opened: Any) -> None:
    """In two layers x goes to the lower one alone, and in each h follows from c; where leaves change places, too."""
    _, tab = opened("words")
    graph = tab.evaluate("loopfold.graph")
    h, c, upper, cell = graph["after"]
    assert graph["state"] == ["h₁", "c₁", "h₂", "c₂"]
    reads = [{*sources} for sources in graph["sources"]]
    assert reads[:2] == [{c, "input0", "state0"}, {"input0", "state0", "state1"}]
    assert reads[2:] == [{cell, h, "state2"}, {h, "state2", "state3"}, {upper}]
    tab.locator("#live-steps").fill("20")  # so many that only states are shown
    assert tab.locator("#live-graph .node").count() == 80
    assert tab.locator("#live-graph g path").count() == 20 * sum(map(len, reads))
    boxes = tab.locator("#live-graph .node[data-step='3']").evaluate_all(
        "all => all.map((one) => [one.x, one.width, one.y].map((v) => v.baseVal.value))"
    )
    for i, (x, wide, y) in enumerate(boxes):  # circles that do not overlap
        assert all((x - u) ** 2 + (y - v) ** 2 >= wide**2 for u, _, v in boxes[:i])
    _, tab = opened("odd")
    assert tab.evaluate("loopfold.graph.after")[1] == "state0"
    assert {*tab.evaluate("loopfold.graph.sources")[0]} == {"input0", "state0", "state1"}


# ------------------------------------------------------------------ where it cannot be, and for every reader


def test_where_the_model_cannot_run_a_sentence_says_why(made: Any, tmp_path: Path) -> None:
    run, _ = made("gru")
    large = the_model(Subject(run), 0.001)
    assert "model_megabytes=1 takes it along" in large.body
    assert not large.module
    assert not large.data
    assert not the_model(Subject(run), 0).module
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    choosy = the_model(Subject(trained(tmp_path, cell=f"{tmp_path / 'own.py'}:Choosy", epochs=0.5)))
    assert "The model does not run in this page: " in choosy.body
    assert "cannot be exported" in choosy.body
    assert not choosy.module
    assert page_of(Subject(run), [large])


def test_weights_have_24_bits_where_16_would_not_do(
    made: Any, browser: "Browser", monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Then all that the page says is closer still to what Python says; it takes a quarter less than in 32."""
    run, page = made("gru")
    subject = Subject(run)
    coarse = the_model(subject).module
    monkeypatch.setattr("loopfold.report.live.rounding", lambda *_: 0.01)
    fine = the_model(subject)
    weights = 4 / 3 * lf.count_parameters(run.model)
    assert len(fine.module) - len(coarse) == pytest.approx(weights, abs=300)
    assert coarse in page.read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(page_of(subject, [fine]), encoding="utf-8")
    tab = browser.new_page(offline=True)
    tab.goto((tmp_path / "page.html").as_uri())
    ready(tab)
    agrees(run, tab, subject.tokens[1].flatten(), atol=2e-5)
    tab.close()


def test_a_phone_and_a_keyboard_are_enough(opened: Any) -> None:
    _, tab = opened("gru", viewport={"width": 360, "height": 740}, has_touch=True)
    assert tab.evaluate("document.documentElement.scrollWidth") == 360
    tab.locator("#live-9").tap()
    assert tab.locator("#live-text").get_attribute("aria-activedescendant") == "live-9"
    tab.locator("#live-typed").focus()
    seen: list[str] = []
    while "live-graph" not in seen and len(seen) < 30:
        tab.keyboard.press("Tab")
        seen.append(tab.evaluate("document.activeElement.id || document.activeElement.name"))
    names = ["mode", "text", "temperature", "top", "length", "write", "steps", "step", "graph"]
    assert seen == [f"live-{name}" for name in names]
    assert tab.evaluate("document.documentElement.scrollWidth") == 360
