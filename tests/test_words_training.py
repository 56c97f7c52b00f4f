"""Options that make recurrent networks good at words: windows that vary, bfloat16, mean weights, schedules, sizes."""

import copy
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import randn, random_text, said_by, sign, sign_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from test_examples import load as load_example
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

import loopfold as lf
from loopfold.engines import native, programs, replay
from loopfold.report.sections import the_run
from loopfold.report.subject import Subject
from loopfold.states import leaves
from loopfold.text.streams import Streams
from loopfold.training import loop
from loopfold.training.averaging import is_triggered, tail_from
from loopfold.training.folder import RunFolder
from loopfold.training.loop import open_run, resume, train
from loopfold.training.making import make_model
from loopfold.training.options import OptionError, Options
from loopfold.training.rehearsal import rehearse
from loopfold.training.schedules import rate_of
from loopfold.training.watching import Plan, Silent

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parent.parent

# ------------------------------------------------------------------ windows of varying length


@given(
    n=st.integers(1, 300),
    count=st.integers(1, 12),
    window=st.integers(1, 30),
    seed=st.integers(0, 1 << 63),
    epoch=st.integers(0, 3),
)
def test_varied_windows_hold_every_token_once_and_in_order(
    n: int, count: int, window: int, seed: int, epoch: int
) -> None:
    ids, whole = torch.arange(1, n + 1), Streams(torch.arange(1, n + 1), count, window)
    streams = Streams(ids, count, window, varied=seed).in_epoch(epoch)
    assert len(streams) == len(whole)
    read: list[list[int]] = [[] for _ in range(streams.count)]
    for i, part in enumerate(streams):
        tau = len(part.tokens)
        last = i == len(streams) - 1
        assert (1 if last else (window + 1) // 2) <= tau <= window + window // 2 + last
        lengths = [tau] * streams.count if part.lengths is None else part.lengths.tolist()
        assert min(lengths) >= 1
        step = epoch * len(streams) + i
        assert streams.tokens_in(i) == sum(lengths) == streams.tokens_to(step + 1) - streams.tokens_to(step)
        for b, length in enumerate(lengths):
            read[b] += part.tokens[:length, b].tolist()
    assert sum(read, []) == ids.tolist()
    assert streams.tokens_to(epoch * len(streams)) == epoch * n


def test_windows_vary_with_seed_and_epoch_alone() -> None:
    def lengths(seed: int, epoch: int) -> list[int]:
        return [len(part.tokens) for part in Streams(torch.arange(10_000), 2, 20, varied=seed).in_epoch(epoch)]

    assert lengths(0, 0) == lengths(0, 0)
    assert lengths(0, 0) != lengths(0, 1) != lengths(1, 1)
    assert sum(lengths(0, 0)) == 5000


def test_few_lengths_and_cuts_at_many_places() -> None:
    cuts, found = set[int](), set[int]()
    for epoch in range(120):
        lengths = [len(part.tokens) for part in Streams(torch.arange(4000), 2, 40, varied=1).in_epoch(epoch)]
        found |= {*lengths[1:-1]}
        cuts |= {sum(lengths[:i]) - 40 * i for i in range(1, len(lengths) - 1)}
    assert found == {20, 30, 40, 50, 60}
    assert cuts == {*range(-15, 16)}


def test_cuda_graphs_of_varied_windows_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[int] = []

    class Graph:
        busy, used = False, 0

        def __init__(self, name: str, key: int, *_: Any) -> None:
            self.key = key
            captured.append(key)

    monkeypatch.setattr(replay, "_Graph", Graph)
    replays, found = replay.Replays("FusedGPU"), []
    for epoch in range(5):
        streams = Streams(torch.zeros(40_000, dtype=torch.int64), 2, 35, varied=0).in_epoch(epoch)
        for window in streams:
            graph: Any = replays._graph(len(window.tokens), lambda tensors: [], [], [])
            found.append(graph is not None)
            if graph is not None:
                graph.used = replays.calls
    assert len(captured) <= 2 * replay.MOST_GRAPHS
    assert sum(found) > 0.8 * len(found)


# ------------------------------------------------------------------ runs

# Tied tables, weights that are dropped, layers of unequal size: 16 steps an epoch, 32 in all.
CHOICES: dict[str, Any] = {
    "cell": "lstm",
    "hidden_size": (8, 6),
    "tied": True,
    "weight_drop": 0.2,
    "dropout": 0.1,
    "streams": 4,
    "window": 16,
    "vary_window": True,
    "precision": "bf16",
    "epochs": 2.0,
    "learning_rate": 0.02,
    "warmup": 3,
    "evaluate_every": 4,
    "average": "tail",
}
STEPS = 32


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(random_text(1250))
    return path


def options_of(text: Path, **changes: Any) -> Options:
    return Options(sources=(str(text),), split=(80, 10, 10), **(CHOICES | changes))


class Noting(Silent):
    """Notes the weights after each step, and what the model was called with in training."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.calls: list[tuple[Tensor, Any, torch.dtype]] = []  # tokens, dtypes of the carried state, that of products
        self.evaluations: list[torch.dtype] = []

    def begin(self, plan: Plan) -> None:
        self.model = plan.model

        def note(model: nn.Module, given: tuple[Any, ...]) -> None:
            tokens, context = given[:2]
            product = (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
            if model.training:
                self.calls.append((tokens, [leaf.dtype for leaf in leaves(context.memory)], product))
            else:
                self.evaluations.append(product)

        plan.model.register_forward_pre_hook(note)

    def step(self, step: int, loss: float) -> None:
        self.weights.append({name: p.detach().clone() for name, p in self.model.named_parameters()})


@pytest.fixture(scope="module")
def noted(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[lf.Run, Noting]:
    notes, path = Noting(), tmp_path_factory.mktemp("runs") / "run"
    with torch.random.fork_rng():
        return train(options_of(text), path, watcher=notes), notes


def mean(weights: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The oracle: all of them side by side, in float64."""
    return {name: torch.stack([w[name].double() for w in weights]).mean(0) for name in weights[0]}


def assert_is_mean(model: nn.Module, weights: list[dict[str, Tensor]]) -> None:
    for name, needed in mean(weights).items():
        assert model.get_parameter(name).equal(needed.float()), name


def test_an_epoch_of_varied_windows_trains_on_every_token_once(noted: tuple[lf.Run, Noting]) -> None:
    run, notes = noted
    assert len(notes.calls) == STEPS
    windows = [tokens for tokens, *_ in notes.calls]
    ids = run.tokens("train").ids
    for epoch in (windows[:16], windows[16:]):
        rows = torch.cat(epoch)
        assert rows.T.flatten().tolist() == ids.tolist()
    assert [*map(len, windows[:16])] != [*map(len, windows[16:])]
    assert run.standing.steps == STEPS == run.options.steps(len(ids))


def test_the_learning_rate_of_a_window_goes_with_its_length(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []
    original = torch.optim.SGD.step

    def step(self: torch.optim.SGD) -> None:
        rates.append(self.param_groups[0]["lr"])
        original(self)

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    notes, changes = Noting(), {"optimiser": "sgd", "schedule": "constant", "learning_rate": 1.6, "warmup": 0}
    run = train(options_of(text, epochs=1.0, **changes), tmp_path / "run", watcher=notes)
    assert rates == pytest.approx([0.1 * len(tokens) for tokens, *_ in notes.calls])
    assert {entry["learning_rate"] for entry in run.metrics} == {1.6}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was traced and compiled, and the code that was written."""
    names: list[str] = []

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*given: Any, **more: Any) -> Any:
            names.append(name)
            return original(*given, **more)

        monkeypatch.setattr(owner, name, counted)

    for owner, name in ((programs, "_compile"), (programs, "trace"), (native, "write")):
        count(owner, name)
    return names


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_run_compiles_nothing_for_another_length(precision: str, made: list[str], text: Path, tmp_path: Path) -> None:
    by_step: list[int] = []
    notes = Noting()
    notes.step = lambda step, loss: by_step.append(len(made))  # type: ignore[method-assign]
    options = options_of(text, precision=precision, window=32, epochs=4.0, evaluate_every=8, weight_drop=0.0)
    train(options, tmp_path / "run", watcher=notes)
    assert len({len(tokens) for tokens, *_ in notes.calls}) > 6
    assert by_step[-1] == by_step[9], "something was compiled after the first epoch and the first evaluation"
    assert 0 < made.count("_compile") <= 8  # two layers, in training and in evaluation; with and without lengths


@pytest.mark.parametrize("engine", [lf.Looped(), lf.FusedCPU()], ids=lambda e: type(e).__name__)
def test_engines_compile_nothing_for_another_length(engine: lf.Engine, made: list[str]) -> None:
    layer, by_length = lf.Recurrent(lf.LSTM(3, 5), engine), []
    for tau in range(10, 31):
        layer(torch.randn(tau, 4, 3)).hidden.sum().backward()
        by_length.append(len(made))
    assert by_length[0] == by_length[-1] > 0


# ------------------------------------------------------------------ precision


def test_training_is_bfloat16_and_all_that_is_kept_float32(noted: tuple[lf.Run, Noting]) -> None:
    run, notes = noted
    assert {product for *_, product in notes.calls} == {torch.bfloat16}
    assert {*notes.evaluations} == {torch.float32}
    folder = RunFolder.open(run.path)
    weights, state = (folder.tensors(folder.checkpoint[kind]) for kind in ("weights", "state"))
    assert {t.dtype for t in weights.values()} == {torch.float32}
    kinds = {(name.partition("/")[0], t.dtype) for name, t in state.items() if name != "context/0"}
    assert kinds == {(kind, torch.float32) for kind in ("optimiser", "last", "context")} | {("sum", torch.float64)}


def test_precision_changes_what_is_learned_a_little(text: Path, tmp_path: Path) -> None:
    found = []
    for precision in ("float32", "bf16"):
        options = options_of(text, precision=precision, epochs=0.2, evaluate_every=1, warmup=0, average="none")
        found.append(train(options, tmp_path / precision).metrics)
    assert found[0][0]["train"] != found[1][0]["train"]
    for a, b in zip(*found, strict=True):
        assert a["valid"] == pytest.approx(b["valid"], rel=0.02)


HALF = """
import torch
from torch import nn

class Half(nn.Module):
    def __init__(self, n_in, n):
        super().__init__()
        self.W, self.U = nn.Linear(n, n), nn.Linear(n_in, n)

    def forward(self, h, x):
        return torch.tanh(self.W(h) + self.U(x))
"""


def test_a_state_that_autocast_makes_bfloat16_is_float32_in_every_window(text: Path, tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(HALF)
    changes = {"cell": f"{tmp_path / 'half.py'}:Half", "weight_drop": 0.0, "epochs": 0.5}
    notes = Noting()
    whole = train(options_of(text, **changes), tmp_path / "whole", watcher=notes)
    assert {dtype for _, dtypes, _ in notes.calls for dtype in dtypes} == {torch.float32}

    class Cut(Noting):
        def step(self, step: int, loss: float) -> None:
            if step == 6:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(options_of(text, **changes), tmp_path / "cut", watcher=Cut(), save_every=0)
    assert RunFolder.open(tmp_path / "cut").checkpoint["step"] == 5
    again = resume(tmp_path / "cut")
    for name, p in whole.model.named_parameters():
        assert again.model.get_parameter(name).equal(p), name


def test_a_rehearsal_takes_the_steps_of_training(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipped as the options say, and with a state that is float32 in every window."""
    (tmp_path / "half.py").write_text(HALF)
    options = options_of(text, cell=f"{tmp_path / 'half.py'}:Half", weight_drop=0.0, clip=0.25)
    dtypes, clips = set[torch.dtype](), set[float]()
    scored, clip = lf.RecurrentLM.forward, nn.utils.clip_grad_norm_

    def noted(self: lf.RecurrentLM, tokens: Tensor, context: Any, *rest: Any) -> Any:
        dtypes.update(leaf.dtype for leaf in leaves(context.memory))
        return scored(self, tokens, context, *rest)

    def clipped(parameters: Any, most: float) -> Tensor:
        clips.add(most)
        return clip(parameters, most)

    monkeypatch.setattr(lf.RecurrentLM, "forward", noted)
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", clipped)
    rehearse(options)
    assert (dtypes, clips) == ({torch.float32}, {0.25})


# ------------------------------------------------------------------ mean weights


def test_the_tail_is_the_mean_of_its_weights(noted: tuple[lf.Run, Noting]) -> None:
    """What is evaluated, stored and opened; the run goes on with the weights of the last step."""
    run, notes = noted
    folder = RunFolder.open(run.path)
    progress = folder.checkpoint["progress"]
    assert progress["average_from"] == STEPS // 2
    stored: Any = make_model(run.options, run.vocabulary.size)
    stored.load_state_dict(folder.tensors(folder.checkpoint["weights"]), strict=False)
    assert_is_mean(stored, notes.weights[STEPS // 2 :])
    assert stored.network.readout.V.data_ptr() == stored.network.recurrent.layers[0].cell.embedding.weight.data_ptr()
    state = folder.tensors(folder.checkpoint["state"])
    assert all(state[f"last/{name}"].equal(p) for name, p in notes.weights[-1].items())
    for entry in run.metrics:
        part = notes.weights[STEPS // 2 : entry["step"]] or [notes.weights[entry["step"] - 1]]
        assert entry.get("averaged", 1) == len(part)
        model = copy.deepcopy(run.model)
        model.load_state_dict({name: w.float() for name, w in mean(part).items()}, strict=False)
        assert lf.perplexity(model, run.tokens("valid")).nats_per_token == pytest.approx(entry["valid"], abs=1e-12)
    best = min(run.metrics, key=lambda entry: entry["valid"])
    assert lf.perplexity(run.model, run.tokens("valid")).nats_per_token == pytest.approx(best["valid"], abs=1e-12)
    assert best["step"] > STEPS // 2, "the mean should be the best here"


def test_a_run_without_a_valid_text_is_opened_with_the_mean(text: Path, tmp_path: Path) -> None:
    notes = Noting()
    options = replace(options_of(text, evaluate_every=None, average_share=0.25), split=(100, 0, 0))
    run = train(options, tmp_path / "run", watcher=notes)
    steps = run.standing.steps
    assert_is_mean(run.model, notes.weights[steps - round(0.25 * steps) :])


def test_triggered_begins_after_the_evaluation_that_calls_for_it(text: Path, tmp_path: Path) -> None:
    notes, changes = Noting(), {"optimiser": "sgd", "learning_rate": 20.0, "evaluate_every": 2, "clip": 5.0}
    run = train(options_of(text, average="triggered", average_after=2, **changes), tmp_path / "run", watcher=notes)
    valid = [entry["valid"] for entry in run.metrics]
    first = next(i for i in range(len(valid)) if is_triggered(valid[: i + 1], 2))
    assert RunFolder.open(run.path).checkpoint["progress"]["average_from"] == run.metrics[first]["step"] < STEPS - 2
    for i, entry in enumerate(run.metrics):
        assert entry.get("averaged") == (2 * (i - first) if i > first else None)
    last = RunFolder.open(run.path)
    stored = make_model(run.options, run.vocabulary.size)
    stored.load_state_dict(last.tensors(last.checkpoint["weights"]), strict=False)
    assert_is_mean(stored, notes.weights[run.metrics[first]["step"] :])


def test_a_run_that_goes_on_before_its_tail_begins_it_anew(noted: tuple[lf.Run, Noting], tmp_path: Path) -> None:
    run, _ = noted
    path = Path(shutil.copytree(run.path, tmp_path / "run"))
    notes = Noting()
    longer = resume(path, epochs=6.0, watcher=notes)
    averaged = {entry["step"]: entry.get("averaged") for entry in longer.metrics}
    assert (averaged[STEPS], averaged[STEPS + 4], averaged[3 * STEPS]) == (STEPS // 2, None, 3 * STEPS // 2)
    folder = RunFolder.open(path)
    stored = make_model(longer.options, longer.vocabulary.size)
    stored.load_state_dict(folder.tensors(folder.checkpoint["weights"]), strict=False)
    assert_is_mean(stored, notes.weights[-3 * STEPS // 2 :])


@pytest.mark.parametrize(("step", "needed"), [(0, None), (7, None), (8, 8), (9, 9)])
def test_where_a_tail_begins(step: int, needed: int | None) -> None:
    options = Options(average="tail", average_share=0.2)
    assert tail_from(options, step, 10, None) == needed
    assert tail_from(options, step, 10, 3) == (None if needed is None else 3)


@given(st.lists(st.floats(0, 9), min_size=1, max_size=9), st.integers(1, 5))
def test_the_trigger_is_that_of_the_paper(valid: list[float], after: int) -> None:
    """Merity et al. (2018), algorithm 1: t > n and v > min over l in 0 … t - n - 1 of logs[l]."""
    *logs, v = valid
    t, n = len(logs), after
    assert is_triggered(valid, after) == (t > n and v > min(logs[max(i, 0)] for i in range(max(1, t - n))))


def test_a_loss_that_is_not_finite_is_as_bad_as_can_be() -> None:
    for bad in (math.inf, math.nan):  # a file has one for the other
        assert not is_triggered([bad, 3.0, 2.0], 1)
        assert is_triggered([3.0, 2.0, bad], 1)


def test_a_mean_of_many_in_float32_parameters_is_exact() -> None:
    """Where a running mean in float32 would not move any more; parameters in any layout, shared and frozen ones."""
    model: Any = nn.Sequential(nn.Linear(3, 300), nn.Linear(300, 300), nn.Linear(300, 3))
    model[1].weight = nn.Parameter(model[1].weight.detach().T)  # not contiguous
    model[2].bias.requires_grad_(False)
    model.append(model[0])
    register_parametrization(model[0], "weight", lf.WeightDrop(0.5))
    average, seen = lf.PolyakAverage(model), []
    with torch.no_grad(), average.applied():
        pass  # there is no mean yet
    for _ in range(50):
        with torch.no_grad():
            for p in average.weights.values():
                p.add_(torch.randn_like(p), alpha=1e-3)
        average.add()
        seen.append({name: p.detach().clone() for name, p in average.weights.items()})
    assert "2.bias" not in average.weights
    assert sum("original" in name for name in average.weights) == 1
    own = {name: p.clone() for name, p in average.weights.items()}
    with average.applied():
        assert_is_mean(model, seen)
    assert all(p.equal(own[name]) for name, p in average.weights.items())


def test_a_mean_that_fails_half_way_is_taken_back() -> None:
    """A lack of memory, or Ctrl-C, in the middle of the copying."""
    model = nn.Linear(3, 2)
    average = lf.PolyakAverage(model)
    average.add()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    average.sums["bias"] = torch.zeros(5)  # does not fit
    with pytest.raises(RuntimeError, match="size"), average.applied():
        pass
    assert all(p.equal(own[name]) for name, p in model.named_parameters())


# ------------------------------------------------------------------ schedules


def test_step_is_that_of_zaremba() -> None:
    """lr · decay^max(i + 1 - after, 0) in epoch i, from 0."""
    options = Options(schedule="step", learning_rate=2.0, decay=0.8, decay_after=3, warmup=0)
    for step in range(70):
        needed = 2.0 * 0.8 ** max(step // 10 + 1 - 3, 0)
        assert rate_of(options, step, 70, 10, decays=5) == rate_of(options, step, 700, 10, decays=0) == needed


def test_plateau_falls_after_each_evaluation_that_is_not_the_best(text: Path, tmp_path: Path) -> None:
    changes = {"schedule": "plateau", "decay": 0.7, "learning_rate": 0.5, "evaluate_every": 2, "warmup": 0}
    run = train(options_of(text, average="none", **changes), tmp_path / "run")
    needed, best = 0.5, math.inf
    rates = []
    for entry in run.metrics:
        rates.append(needed)
        needed *= 1 if entry["valid"] < best else 0.7
        best = min(best, entry["valid"])
    assert [entry["learning_rate"] for entry in run.metrics] == pytest.approx(rates)
    assert len({*rates}) > 2


def test_an_evaluation_out_of_turn_lowers_nothing(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every evaluation is worse than the one before it; that of the 32nd step, the last, comes after four in turn."""
    losses = iter(range(100))
    monkeypatch.setattr(loop, "perplexity", lambda *_, **__: lf.Ledger(float(next(losses)), 1))
    changes = {"schedule": "plateau", "decay": 0.5, "evaluate_every": 7, "warmup": 0, "average": "none", "patience": 9}
    short = train(options_of(text, **changes), tmp_path / "short")
    progress = RunFolder.open(short.path).checkpoint["progress"]
    assert [entry["step"] for entry in short.metrics] == [7, 14, 21, 28, 32]
    assert (progress["decays"], progress["misses"]) == (3, 3)
    longer, whole = (
        resume(short.path, epochs=3.0),
        train(options_of(text, epochs=3.0, **changes), tmp_path / "whole"),
    )
    rates = [{entry["step"]: entry["learning_rate"] for entry in run.metrics} for run in (longer, whole)]
    assert rates[0].pop(32) == rates[1][28] / 2
    assert rates[0] == rates[1]


# ------------------------------------------------------------------ sizes by layer


def test_layers_have_the_sizes_that_are_given() -> None:
    model: Any = make_model(Options(cell="lstm", hidden_size=(7, 5, 3), tied=True), 11)
    cells = [layer.cell for layer in model.network.recurrent.layers]
    assert [tuple(cell.W.shape) for cell in (cells[0].cell, *cells[1:])] == [(28, 7), (20, 5), (12, 3)]
    assert [tuple(cell.U.shape) for cell in (cells[0].cell, *cells[1:])] == [(28, 3), (20, 7), (12, 5)]
    assert cells[0].embedding.weight.shape == (12, 3)  # of the last layer's size, so that it can be tied
    untied: Any = make_model(Options(hidden_size=(7, 5), embedding_size=2), 11)
    assert untied.network.recurrent.layers[0].cell.embedding.weight.shape == (12, 2)


def test_one_size_for_all_layers_is_the_same_model_as_ever() -> None:
    one, two = (
        make_model(Options(**sizes), 11) for sizes in ({"hidden_size": 5, "layers": 2}, {"hidden_size": [5, 5]})
    )
    assert all(p.equal(two.get_parameter(name)) for name, p in one.named_parameters())
    assert Options(hidden_size=5, layers=2).name == "gru 5 × 2"
    assert Options(hidden_size=(7, 5), cell="lstm").name == "lstm 7-5"


def test_sizes_come_back_from_json() -> None:
    for size in (8, (8, 4)):
        options = Options(hidden_size=size)
        assert Options.from_json(json.loads(json.dumps(options.as_json()))) == options


def test_sizes_say_how_many_layers_there_are(noted: tuple[lf.Run, Noting], tmp_path: Path) -> None:
    sizes = Options(hidden_size=(8, 6))
    assert sizes.layers == 2
    assert sizes == Options(hidden_size=(8, 6), layers=2)
    assert Options.from_json(sizes.as_json() | {"layers": 1}) == sizes  # as it was stored before
    run = noted[0]
    train(replace(run.options, layers=2, epochs=0.2, warmup=0), tmp_path / "run", start=run)
    shown = the_run(Subject(run)).body
    for name, value in (("hidden size", "8-6"), ("layers", "2")):
        assert re.search(rf">{name}</t[hd]><td[^>]*>{value}</td>", shown), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": (4, 0)}, "hidden_size must be from 1 to 1048576; got 0"),
        ({"hidden_size": ()}, "hidden_size needs a size for each layer; got none"),
        ({"hidden_size": (4, "x")}, "hidden_size must be a whole number or whole numbers; got"),
        ({"hidden_size": (4, 3), "layers": 3}, "hidden_size has 2 sizes, one for each layer: leave out layers"),
        ({"precision": "float16"}, "no precision 'float16'; choose from float32, bf16"),
        ({"decay": 1.0}, "decay must be above 0 and below 1; got 1.0"),
        ({"average_share": 0.0}, "average_share must be above 0 and at most 1; got 0.0"),
        ({"average": "polyak"}, "no average 'polyak'; choose from none, tail, triggered"),
    ],
)
def test_options_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Options(**changes)


def test_models_that_cannot_have_such_sizes() -> None:
    with pytest.raises(OptionError, match="a window has layers of one size: hidden_size must be one number"):
        make_model(Options(model="window", hidden_size=(4, 3)), 11)
    with pytest.raises(OptionError, match=r"tied weights need an embedding of the hidden size, 3; got 4.* Or untie"):
        make_model(Options(hidden_size=(4, 3), embedding_size=4, tied=True), 11)


def test_sizes_of_a_preset_give_way_to_those_that_are_named() -> None:
    assert lf.preset("words-large", hidden_size=(9, 8, 7, 6)).sizes == (9, 8, 7, 6)
    assert lf.preset("quick", hidden_size=9, layers=2).sizes == (9, 9)


# ------------------------------------------------------------------ on the command line


def flags(text: Path) -> list[object]:
    sizes = "--cell lstm --hidden-size 8-6 --streams 4 --window 16 --epochs 2 --warmup 0 --split 80/10/10 --dropout 0"
    return ["train", text, *sizes.split()]


def test_the_command_takes_all_of_it(text: Path, tmp_path: Path) -> None:
    new = "--vary-window --precision bfloat16 --average tail --average-share 0.3 --schedule step --decay 0.9"
    new += " --decay-after 1"
    code, out, err = said_by(*flags(text), *new.split(), "--dry-run", "--out", tmp_path / "run")
    assert code == 0, err
    assert out.startswith("lstm 8-6, ")
    assert not (tmp_path / "run").exists()
    code, _, err = said_by(*flags(text), *new.split(), "--out", tmp_path / "run")
    assert code == 0, err
    assert "lstm 8-6, " in err
    assert re.search(r"mean weights of \d+ steps", err)
    assert "lstm 8-6" in said_by("list", tmp_path)[1]
    assert open_run(tmp_path / "run").options.hidden_size == (8, 6)
    code, _, err = said_by("train", "--resume", tmp_path / "run", "--epochs", 3)
    assert code == 0, err
    code, _, err = said_by("train", text, "--from", tmp_path / "run", "--average", "none", "--out", tmp_path / "tuned")
    assert code == 0, err
    assert open_run(tmp_path / "tuned").options.precision == "bf16"
    code, _, err = said_by("train", text, "--from", tmp_path / "run", "--hidden-size", "8-6")
    assert (code, "leave out --hidden-size" in err) == (2, True)
    code, _, err = said_by("train", "--resume", tmp_path / "run", "--precision", "float32")
    assert (code, "leave out --precision" in err) == (2, True)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--average tail --average-share 0.25", "the run ended before its tail, the last 25 %"),
        ("--average triggered --average-after 90", "no evaluation called for it"),
        ("--average tail --average-share 1", None),
        ("--average none", None),
    ],
)
def test_that_nothing_was_averaged_is_said(more: str, said: str | None, text: Path, tmp_path: Path) -> None:
    early = "--patience 1 --evaluate-every 2 --learning-rate 9 --optimiser sgd --schedule constant"
    code, _, err = said_by(*flags(text), *early.split(), *more.split(), "--out", tmp_path / "run")
    assert code == 0, err
    step = open_run(tmp_path / "run").standing.step
    assert step < 0.7 * STEPS
    assert ("no weights were averaged" in err) == (said is not None)
    assert said is None or f"\nnote: no weights were averaged: {said}\n" in err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--hidden-size 8-", "--hidden-size needs a whole number; got '8-'"),
        ("--hidden-size 12,10,8", "got '12,10,8'. Sizes by layer are typed as 12-10-8"),
        ("--hidden-size 1,150", "got '1,150'. Did you mean 1150"),
        ("--hidden-size -8", "--hidden-size must be from 1 to 1048576; got -8"),
        ("--layers 2", "--layers has no effect here: sizes by layer say how many"),
        ("--window 3 --vary-window", "--vary-window has no effect here: of a window of less than 4 steps"),
        ("--schedule plateau --split 90/0/10", "--schedule has no effect here: there is no valid text to watch"),
        ("--average triggered --split 90/0/10", "--average has no effect here: there is no valid text to watch"),
        ("--decay 0.7", "--decay has no effect here: .* add --schedule step"),
        ("--schedule plateau --decay-after 7", "--decay-after has no effect here: .* add --schedule step"),
        ("--average-share 0.3", "--average-share has no effect here: .* add --average tail"),
        ("--average tail --average-after 3", "--average-after has no effect here: .* add --average triggered"),
    ],
)
def test_what_is_refused(more: str, message: str, text: Path) -> None:
    code, _, err = said_by(*flags(text), *more.split(), "--dry-run")
    assert code == 2
    assert re.search(message, err), err


@pytest.mark.parametrize("changes", [{"schedule": "plateau"}, {"average": "triggered"}], ids=str)
def test_what_watches_needs_something_to_watch(changes: dict[str, str], text: Path, tmp_path: Path) -> None:
    (name, value) = next(iter(changes.items()))
    options = replace(options_of(text, **changes), split=(100, 0, 0), evaluate_every=None)
    with pytest.raises(OptionError, match=f"{name}='{value}' needs a valid text to watch, and there is none"):
        train(options, tmp_path / "run")


# ------------------------------------------------------------------ forged runs


@pytest.mark.parametrize("value", [-1, 1000, 1 << 62, 0.5, "x", True, []], ids=str)
@pytest.mark.parametrize("name", ["decays", "average_from"])
def test_progress_that_cannot_be(name: str, value: Any, noted: tuple[lf.Run, Noting], tmp_path: Path) -> None:
    path = Path(shutil.copytree(noted[0].path, tmp_path / "run"))
    checkpoint = RunFolder.open(path).checkpoint
    checkpoint["progress"][name] = value
    sign_checkpoint(path, checkpoint)
    if name == "decays" and isinstance(value, int) and not isinstance(value, bool) and value > 0:
        resume(path)  # many: the rate is nearly nothing
        return
    with pytest.raises(lf.RunError, match="its progress is impossible"):
        resume(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: {name: t for name, t in state.items() if not name.startswith("sum/")},
        lambda state: {name: t for name, t in state.items() if not name.startswith("last/")},
        lambda state: state | {"sum/none": torch.zeros(3)},
        lambda state: state | {name: t[:1].contiguous() for name, t in state.items() if name.startswith("sum/")},
        lambda state: state | {name: t.long() for name, t in state.items() if name.startswith("sum/")},
        lambda state: {},
    ],
    ids=range(6),
)
def test_sums_that_do_not_fit(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], noted: tuple[lf.Run, Noting], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(noted[0].path, tmp_path / "run"))
    name = RunFolder.open(path).checkpoint["state"]
    sign(path, name, save(change(load((path / name).read_bytes()))))
    with pytest.raises(lf.RunError, match=f"{name} does not fit the model of config.json"):
        resume(path, epochs=3.0)


def test_an_average_that_no_one_asked_for(noted: tuple[lf.Run, Noting], tmp_path: Path) -> None:
    path = Path(shutil.copytree(noted[0].path, tmp_path / "run"))
    checkpoint = RunFolder.open(path).checkpoint
    checkpoint["progress"]["average_from"] = None
    sign_checkpoint(path, checkpoint)
    with pytest.raises(lf.RunError, match="does not fit the model of config.json"):
        resume(path, epochs=3.0)


def test_an_average_against_the_options(noted: tuple[lf.Run, Noting], tmp_path: Path) -> None:
    path = Path(shutil.copytree(noted[0].path, tmp_path / "run"))
    config = json.loads((path / "config.json").read_text())
    config["options"]["average"] = "none"
    sign(path, "config.json", json.dumps(config).encode())
    with pytest.raises(lf.RunError, match="its progress is impossible .it averages weights, and the options do not"):
        resume(path, epochs=3.0)


# ------------------------------------------------------------------ cells of one's own


@pytest.fixture(scope="module")
def cells() -> Any:
    return load_example("mogrifier")


def test_the_page_shows_the_cells_as_they_are() -> None:
    page, example = ((ROOT / name).read_text() for name in ("docs/language_models.md", "examples/mogrifier.py"))
    assert example[example.index("class CappedLSTM") :] in page


def capped(cell: Any, h: Tensor, c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    a = [
        b + h @ W.T + x @ U.T for b, W, U in zip(cell.b.chunk(4), cell.W.chunk(4), cell.U.chunk(4), strict=True)
    ]  # i f g o
    i, f, o = (1 / (1 + torch.exp(-part)) for part in (a[0], a[1], a[3]))
    c = f * c + torch.where(i < 1 - f, i, 1 - f) * torch.tanh(a[2])
    return o * torch.tanh(c), c


def mogrified(cell: Any, h: Tensor, c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Melis et al. (2020), (1) and (2): x ← 2σ(Q h) ⊙ x in odd rounds, h ← 2σ(R x) ⊙ h in even ones."""
    for i, M in enumerate(cell.gates, start=1):
        if i % 2:
            x = 2 / (1 + torch.exp(-(h @ M.T))) * x
        else:
            h = 2 / (1 + torch.exp(-(x @ M.T))) * h
    return capped(cell, h, c, x)


@pytest.mark.parametrize("name", ["CappedLSTM", "Mogrifier"])
@pytest.mark.parametrize(("tau", "batch", "n_in", "n"), [(1, 1, 3, 5), (7, 3, 5, 3), (4, 2, 17, 17)])
def test_cells_are_their_equations_and_compiled(name: str, tau: int, batch: int, n_in: int, n: int, cells: Any) -> None:
    cell = getattr(cells, name)(n_in, n).double()
    with torch.no_grad():
        for p in cell.parameters():
            p += 0.5 * torch.randn_like(p)
    x = randn(tau, batch, n_in)
    h = c = torch.zeros(batch, n, dtype=torch.float64)
    rows = []
    for t in range(tau):
        h, c = (capped if name == "CappedLSTM" else mogrified)(cell, h, c, x[t])
        rows.append(h)
    needed = torch.stack(rows)
    found = lf.unfold(cell, x, engine=lf.FusedCPU()).hidden  # no Refusal
    torch.testing.assert_close(found, needed)
    weights = [*cell.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), weights, allow_unused=tau == 1),
        torch.autograd.grad(needed.square().sum(), weights, allow_unused=tau == 1),
    )


@pytest.mark.filterwarnings("error::loopfold.EngineWarning")
def test_a_mogrifier_trains(text: Path, tmp_path: Path) -> None:
    cell = f"{ROOT / 'examples' / 'mogrifier.py'}:Mogrifier"
    run = train(options_of(text, cell=cell, hidden_size=8, precision="float32", epochs=1.0), tmp_path / "run")
    valid = [entry["valid"] for entry in run.metrics]
    assert valid[-1] < valid[0] - 0.1


def test_what_cannot_come_to_pass_is_said_beforehand(text: Path, tmp_path: Path) -> None:
    asked = "--average triggered --schedule step --decay-after 3 --precision bf16 --epochs 3"
    code, _, err = said_by(*flags(text), *asked.split(), "--out", tmp_path / "run")
    assert code == 0, err
    assert "no weights will be averaged: that takes 7 evaluations, and this run has 3" in err
    assert "the learning rate never falls: the run is over before 3 epochs are" in err
    assert "most CPUs take longer in bf16" in err
