"""`loopfold play`: the page is small and whole, learns as torch does, and does what its controls say.

The tests in a browser need Chromium, as those of the report do.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from test_browser import CHROMIUM, MISSING, sync_playwright
from test_cli import loopfold, refused, worked
from torch import Tensor, nn

import loopfold as lf
from loopfold.exporting.places import places_of
from loopfold.exporting.program import StepProgram
from loopfold.play.page import CELLS
from loopfold.states import leaves
from loopfold.stepgraph.graph import Refusal
from loopfold.training.cells import make_cell

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

OWN = """
import torch
from torch import nn

class Leaky(nn.Module):
    def __init__(self, n_in, n):
        super().__init__()
        self.U, self.W, self.rate = nn.Linear(n_in, n), nn.Linear(n, n, bias=False), nn.Parameter(torch.zeros(n))
        self.register_buffer("most", torch.full((n,), 0.5))

    def initial_state(self, batch):
        return self.rate.new_zeros(batch, len(self.rate))

    def forward(self, h, x):
        a = torch.sigmoid(self.rate) * self.most
        return (1 - a) * h + a * torch.tanh(self.U(x) + self.W(h))

class Wrong(Leaky):
    def forward(self, h, x):
        return h + self.U(x).oops

class Computed(Leaky):
    def forward(self, h, x):
        return torch.tanh(h @ torch.exp(self.W.weight) + self.U(x))

class Unsaid(nn.Module):  # it does not say how it starts
    def __init__(self, n_in, n):
        super().__init__()
        self.U, self.W = nn.Linear(n_in, n), nn.Linear(n, n)

    def forward(self, h, x):
        print("a step")
        return torch.tanh(self.U(x) + self.W(h)) * self.missing

class Double(Leaky):
    def forward(self, h, x):
        return super().forward(h, x).double()

class Branching(Leaky):
    def forward(self, h, x):
        return h + self.U(x) if h.sum() > 0 else h - self.U(x)

class Twice(Leaky):
    def forward(self, h, x):
        return torch.tanh(h @ self.W.weight + x.mean(-1, keepdim=True) * self.rate) @ self.W.weight.T
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("play")
    (folder / "cell.py").write_text(OWN)
    said = worked("play", "--cell", f"{folder / 'cell.py'}:Leaky", "--out", folder / "play.html")
    assert said == f"The page is in {folder / 'play.html'}. Open it in a browser and press Play.\n"
    return folder / "play.html"


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    if MISSING and os.environ.get("LOOPFOLD_BROWSER") != "required":
        pytest.skip(MISSING)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def tab(browser: "Browser", path: Path, request: pytest.FixtureRequest) -> "Iterator[Page]":
    """The page without a network. A request, a remark on the console or an error fails the test."""
    settings: dict[str, Any] = {"viewport": {"width": 1200, "height": 900}} | getattr(request, "param", {})
    context = browser.new_context(offline=True, **settings)
    tab = context.new_page()
    wrong: list[str] = []
    tab.on("request", lambda r: None if r.url.startswith((path.as_uri(), "data:")) else wrong.append(r.url))
    tab.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.goto(path.as_uri())
    yield tab
    context.close()
    assert not wrong


# ------------------------------------------------------------------ the file


def test_one_small_file(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    weights = re.findall(r'"weights":"([^"]*)"', page)
    assert len(weights) == 12  # those of the cell that is not ours, at every size of every task
    assert len(page.encode()) - sum(map(len, weights)) < 400_000
    assert not re.findall(r"\b(?:src|href)=\"(?!data:|#)", page)


def test_what_is_refused(path: Path, tmp_path: Path) -> None:
    cell = path.parent / "cell.py"
    refused("there is no folder", "play", "--out", tmp_path / "none" / "play.html")
    refused("/proc/play.html cannot be written", "play", "--out", "/proc/play.html")
    refused("must end in .html; got play.txt", "play", "--out", tmp_path / "play.txt")
    refused("path/to/file.py:Class", "play", "--cell", "lstm")
    refused("has no class 'Other'", "play", "--cell", f"{cell}:Other", "--out", tmp_path / "play.html")
    refused("cell.py, line 20, in forward: AttributeError", "play", "--cell", f"{cell}:Wrong", "--out",
            tmp_path / "play.html")  # fmt: skip
    said = loopfold("play", "--cell", f"{cell}:Unsaid", "--out", tmp_path / "play.html")
    assert "in forward: AttributeError: 'Unsaid' object has no attribute 'missing'" in said.err
    refused("Double failed: its step gives torch.float64 where", "play", "--cell", f"{cell}:Double", "--out",
            tmp_path / "play.html")  # fmt: skip
    refused("Use torch.where", "play", "--cell", f"{cell}:Branching", "--out", tmp_path / "play.html")
    refused("Computed cannot be trained in a page: it computes something from its parameters alone",
            "play", "--cell", f"{cell}:Computed", "--out", tmp_path / "play.html")  # fmt: skip
    refused("Twice cannot be trained in a page: it uses a parameter in two ways",
            "play", "--cell", f"{cell}:Twice", "--out", tmp_path / "play.html")  # fmt: skip
    assert not (tmp_path / "play.html").exists()


def test_what_is_trained(path: Path) -> None:
    model = lf.SequenceToSequence(make_cell(f"{path.parent / 'cell.py'}:Leaky", 2, 3), outputs=1)
    x, before = torch.zeros(1, 2), [p.detach().clone() for p in model.parameters()]
    ranges = places_of(model, x).trained
    assert sum(to - start for start, to in ranges) == sum(p.numel() for p in model.parameters())
    assert sum(to - start for start, to in ranges) == len(numbers_of(model, 2)) - 3 - 3  # buffer and start
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(Refusal, match="from its parameters alone"):
        places_of(lf.SequenceToSequence(nn.utils.parametrizations.weight_norm(lf.Elman(2, 3), "W"), outputs=1))


# ------------------------------------------------------------------ learning, beside torch

COSTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "echo": F.mse_loss,
    "adding": F.mse_loss,
    "parity": F.binary_cross_entropy_with_logits,
    "text": F.cross_entropy,
}
SHOWN = """([cell, task, seed]) => {
  const [inputs, outputs] = facts.shapes[task], length = 7;
  const l = new Learner(tasks[task], networks[`${cell}/8/${inputs}/${outputs}`], 8, seed, 1.5);
  const start = [...l.weights], radius = l.blocks().map((b) => l.radiusOf(b));
  const batches = [1, 2, 3, 4, 5].map(() => l.sequences(length, 3));
  const seen = l.look(batches[0][0]);
  const losses = batches.map((batch) => l.update(batch, 0.05));
  l.setRadius(1.25);
  return { start, batches, losses, inputs, outputs, norms: seen.norms, radius,
           after: l.blocks().map((b) => l.radiusOf(b)), end: [...l.weights] };
}"""


def numbers_of(model: nn.Module, inputs: int) -> Tensor:
    return StepProgram.of(model, torch.zeros(1, inputs), learning=True).numbers()


def like_page(cell: nn.Module, inputs: int, outputs: int, weights: list[float]) -> lf.SequenceToSequence:
    """A model whose program has these weights."""
    model = lf.SequenceToSequence(cell, outputs=outputs)
    parameters = [*model.parameters()]
    ids = torch.arange(1.0, 1 + sum(p.numel() for p in parameters))
    with torch.no_grad():
        for p, part in zip(parameters, ids.split([p.numel() for p in parameters]), strict=True):
            p.copy_(part.reshape(p.shape))
        found = numbers_of(model, inputs)
        flat = torch.zeros(len(ids))
        for place, weight in zip(found.tolist(), weights, strict=True):
            if place >= 1:
                flat[int(place) - 1] = weight
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.copy_(part.reshape(p.shape))
    return model


def by_torch(model: lf.SequenceToSequence, task: str, batches: list[Any]) -> list[float]:
    optimiser, losses = torch.optim.Adam(model.parameters(), 0.05), []
    for batch in batches:
        x = torch.tensor([sequence["x"] for sequence in batch]).float().transpose(0, 1)
        asked = torch.tensor([[y is not None for y in sequence["y"]] for sequence in batch]).T
        y = torch.tensor([[y or 0 for y in sequence["y"]] for sequence in batch]).T[asked]
        outputs = model(x)[asked]
        loss = COSTS[task](outputs, y) if task == "text" else COSTS[task](outputs[:, 0], y.float())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
    return losses


def gradient_norms(model: lf.SequenceToSequence, task: str, sequence: Any) -> Tensor:
    """Of the cost of the last answer, by the state before each step."""
    cell: Any = model.recurrent.cell
    x, y = torch.tensor(sequence["x"])[:, None].float(), torch.tensor([sequence["y"][-1]])
    start, norms = cell.initial_state(1), []
    for t in range(len(x)):
        parts = [part.detach().requires_grad_() for part in leaves(start)]
        last = lf.unfold(cell, x[t:], parts[0] if len(parts) == 1 else type(start)(*parts)).last
        output = model.readout(leaves(last)[0])
        loss = COSTS[task](output, y) if task == "text" else COSTS[task](output[:, 0], y.float())
        grads = torch.autograd.grad(loss, parts, allow_unused=True)
        norms.append(torch.cat([g.flatten() for g in grads if g is not None]).norm())
        start = cell(start, x[t])
    return torch.stack(norms)


@pytest.mark.parametrize("cell", [*CELLS, "own"])
def test_it_learns_as_torch_does(cell: str, tab: "Page", path: Path) -> None:
    name = f"{path.parent / 'cell.py'}:Leaky" if cell == "own" else cell
    for seed, task in enumerate(COSTS):
        found = tab.evaluate(SHOWN, [cell, task, seed])
        torch.manual_seed(0)
        model = like_page(make_cell(name, found["inputs"], 8), found["inputs"], found["outputs"], found["start"])
        torch.testing.assert_close(numbers_of(model, found["inputs"]), torch.tensor(found["start"]))
        own: Any = model.recurrent
        W: Tensor = own.cell.W.weight if cell == "own" else own.cell.W
        radius = [torch.linalg.eigvals(block).abs().max().item() for block in W.detach().double().split(8)]
        assert found["radius"] == pytest.approx(radius, rel=5e-3)
        assert found["after"] == pytest.approx([1.25] * len(radius), rel=1e-5)
        norms = gradient_norms(model, task, found["batches"][0][0])
        torch.testing.assert_close(torch.tensor(found["norms"]), norms, rtol=1e-3, atol=1e-7)
        losses = by_torch(model, task, found["batches"])
        assert found["losses"] == pytest.approx(losses, abs=1e-4), (cell, task)
        if cell != "own":
            bound = 8**-0.5
            drawn = torch.tensor(found["start"][: len(found["start"]) - (16 if cell == "lstm" else 8)])
            drawn = drawn[drawn != 1.5]  # the bias of a gate, which is chosen
            assert bool((drawn.abs() <= bound).all())
            assert drawn.std().item() == pytest.approx(bound / 3**0.5, rel=0.15)


def test_a_guess_scores_the_baseline(tab: "Page") -> None:
    found = tab.evaluate("""() => Object.entries(tasks).map(([name, task]) => {
      const random = chance(5), ys = [];
      for (let i = 0; i < 20000; i++) ys.push(...task.sequence(random, 16).y.filter((y) => y !== null));
      const mean = ys.reduce((a, b) => a + b, 0) / ys.length;
      const counts = Array(facts.letters.length).fill(1e-9);
      for (const y of ys) counts[y]++;
      const output = { square: [mean], bit: [0], letter: counts.map(Math.log) }[task.cost];
      return [name, task.baseline, ys.reduce((sum, y) => sum + COSTS[task.cost](output, y)[0], 0) / ys.length];
    })""")
    assert [name for name, _, _ in found] == [*COSTS]
    for name, baseline, scored in found:
        assert scored == pytest.approx(baseline, rel=0.02), name


# ------------------------------------------------------------------ the controls


def choose(tab: "Page", name: str, value: str) -> None:
    tab.locator(f'input[name="{name}"][value="{value}"]').check(force=True)


def drag(tab: "Page", name: str, value: float) -> None:
    tab.locator(f"#{name}").fill(str(value))


def until(tab: "Page", holds: str) -> None:
    """Wait for something to hold; the page lets nobody evaluate strings in it, Playwright's own waiting included."""
    for _ in range(400):
        if tab.evaluate(holds):
            return
        tab.wait_for_timeout(50)
    raise AssertionError(f"it never came to {holds}")


def verdict(tab: "Page") -> str:
    tab.wait_for_timeout(100)
    return tab.locator("#verdict b").inner_text()


def test_gradients_vanish_explode_or_survive(tab: "Page") -> None:
    drag(tab, "radius", 0.5)
    assert verdict(tab) == "The gradient vanishes."
    assert tab.locator("#radius-shown").inner_text() == "0.50"
    drag(tab, "radius", 3)
    assert verdict(tab) == "The gradient explodes."
    choose(tab, "cell", "lstm")
    assert verdict(tab) == "The gradient survives."
    drag(tab, "bias", 1.5)
    assert verdict(tab) == "The gradient fades."
    drag(tab, "bias", 0)
    assert verdict(tab) == "The gradient vanishes."
    powers = [-20, -3.1, -2.9, -1.1, -0.9, 1.9, 2.1, "Infinity"]
    words = ["vanishes"] * 2 + ["fades"] * 2 + ["survives"] * 2 + ["explodes"] * 2
    assert tab.evaluate(f"[{', '.join(map(str, powers))}].map((power) => fateOf(power)[1])") == words
    assert tab.locator("[data-cell]:visible").get_attribute("data-cell") == "lstm"


def test_play_pause_step_and_reset(tab: "Page") -> None:
    updates = "play.learner().losses.length"
    tab.locator("#step").click()
    tab.locator("#step").click()
    assert tab.evaluate(updates) == 2
    losses = tab.evaluate("play.learner().losses")
    tab.locator("h1").click()
    tab.keyboard.press("Space")
    until(tab, f"{updates} > 12")
    assert tab.locator("#play").inner_text() == "Pause"
    tab.locator("#play").press("Enter")
    stopped = tab.evaluate(updates)
    tab.wait_for_timeout(150)
    assert tab.evaluate(updates) == stopped
    tab.locator("#reset").click()
    assert tab.evaluate(updates) == 0
    tab.locator("#step").click()
    tab.locator("#step").click()
    assert tab.evaluate("play.learner().losses") == losses  # from the same seed, the same numbers
    for typed, taken in (("-5", "0"), ("1000000000", "999999"), ("2", "2")):
        tab.locator("#seed").fill(typed)
        tab.locator("#seed").blur()
        assert tab.locator("#seed").input_value() == taken
    tab.locator("#step").click()
    assert tab.evaluate("play.learner().losses")[0] != losses[0]


def test_it_moves_and_learns_every_cell_and_task(tab: "Page") -> None:
    tab.locator("#play").click()
    for cell, task in [("own", "text"), ("gru", "parity"), ("lstm", "adding"), ("elman", "echo")]:
        choose(tab, "cell", cell)
        choose(tab, "task", task)
        until(tab, "play.learner().losses.length > 3")
        if task == "text":
            until(tab, "document.getElementById('written').textContent.startsWith('It writes: ')")
    before = tab.evaluate("play.drawn()")
    tab.wait_for_timeout(1000)
    assert tab.evaluate("play.drawn()") - before > 5  # far more on a machine that does nothing else
    until(tab, "play.learner().losses.slice(-5).every((loss) => loss < 0.5)")


@pytest.mark.parametrize("tab", [{"viewport": {"width": 390, "height": 844}, "color_scheme": "dark",
                                  "reduced_motion": "reduce"}], indirect=True)  # fmt: skip
def test_on_a_phone_in_the_dark_without_motion(tab: "Page") -> None:
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    drag(tab, "speed", 0)
    tab.locator("#play").click()
    until(tab, "play.learner().losses.length > 0")
    assert tab.evaluate("still.matches")
    tab.locator("#reset").click()
    for size in ("64", "8"):
        choose(tab, "size", size)
        drag(tab, "length", 4)
        tab.locator("#step").click()
        assert tab.evaluate("play.learner().losses.length") == 1
