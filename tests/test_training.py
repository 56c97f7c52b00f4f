"""The training loop: what a step does, what a run goes through, what it keeps, what it says."""

import json
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopfold import cli
from loopfold.evaluation import Ledger, perplexity
from loopfold.language.base import Context
from loopfold.language.recurrent import RecurrentLM
from loopfold.states import leaves
from loopfold.text.corpus import read_corpus
from loopfold.text.vocabulary import Characters
from loopfold.training import cells, loop
from loopfold.training.cells import make_cell
from loopfold.training.folder import RunFolder
from loopfold.training.loop import Diverged, Run, open_run, resume, train
from loopfold.training.making import make_model, make_vocabulary
from loopfold.training.options import OptionError, Options
from loopfold.training.presets import PRESETS, preset
from loopfold.training.stored import RunError
from loopfold.training.watching import Plan, Several, Silent, TensorBoard, Terminal, Watcher
from loopfold.transitions import GRU

pytestmark = pytest.mark.usefixtures("one_thread")
CELL = "network.recurrent.layers.0.cell."


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Sentences of a few words, so that there is something to learn: 497 characters to train on, 62 and 62."""
    rng, path = random.Random(0), tmp_path / "text.txt"
    sentences = (f"the {rng.choice(['cat', 'dog', 'owl'])} {rng.choice(['sat', 'ran'])} here.\n" for _ in range(35))
    path.write_text("".join(sentences)[:621])
    return path


def small(text: Path, **changes: Any) -> Options:
    """A run of 21 steps an epoch."""
    sizes: dict[str, Any] = {"cell": "elman", "hidden_size": 8, "streams": 3, "window": 8, "epochs": 1.0, "warmup": 0}
    return Options(**({"sources": (str(text),), "split": (80, 10, 10)} | sizes | changes))


def train_ids(options: Options) -> Tensor:
    corpus = read_corpus(options.sources, options.split)
    return make_vocabulary(options, corpus.train).encode(corpus.train).ids


class Onlooker(Silent):
    """Is told what happens, and notes it; calls `then` after every step."""

    def __init__(self, then: Callable[[int], object] = lambda step: None) -> None:
        self.then, self.losses, self.entries = then, list[float](), list[dict[str, Any]]()

    def begin(self, plan: Plan) -> None:
        self.plan = plan

    def step(self, step: int, loss: float) -> None:
        self.losses.append(loss)
        self.then(step)

    def entry(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)


@dataclass
class Call:
    """What the model was given in training, and where it stood afterwards."""

    tokens: Tensor
    context: Context
    lengths: Tensor | None
    after: Context


class Spy(Silent):
    """Notes every call of the model while it trains."""

    def __init__(self) -> None:
        self.calls = list[Call]()

    def begin(self, plan: Plan) -> None:
        self.plan = plan
        self.hook = plan.model.register_forward_hook(self.note)

    def note(self, model: nn.Module, given: tuple[Any, ...], came: Any) -> None:
        if model.training:
            tokens, context, lengths = given
            self.calls.append(Call(tokens, context, lengths, came.context))

    def __exit__(self, *_: object) -> None:
        self.hook.remove()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same_context(a: Context, b: Context) -> bool:
    return all(torch.equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))


# ------------------------------------------------------------------ learning


def test_the_loss_goes_down(text: Path, tmp_path: Path) -> None:
    """M19: far below what letters without their neighbours give, on training text and on text never seen."""
    onlooker = Onlooker()
    run = train(small(text, epochs=8.0, learning_rate=0.02), tmp_path / "run", watcher=onlooker)
    assert sum(onlooker.losses[-10:]) < 0.4 * sum(onlooker.losses[:10])
    ids = train_ids(run.options)
    frequency = ids.bincount().double() / len(ids)
    unigram = -sum(p * math.log(p) for p in frequency.tolist() if p)
    assert run.metrics[-1]["train"] < 0.5 * unigram
    assert run.metrics[-1]["valid"] < 0.5 * unigram


@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
def test_two_steps_are_those_of_plain_torch(optimiser: str, text: Path, tmp_path: Path) -> None:
    """Elman's equations, cross-entropy and clipping, all written out; the state goes on, its gradient does not."""
    clip, rate, decay = 0.5, 0.1, 0.01
    options = small(text, epochs=0.1, optimiser=optimiser, learning_rate=rate, weight_decay=decay, clip=clip)
    options = Options(**(options.as_json() | {"schedule": "constant", "momentum": 0.9 if optimiser == "sgd" else 0.0}))
    spy = Spy()
    run = train(options, tmp_path / "run", watcher=spy)
    assert len(spy.calls) == 2

    model = make_model(options, run.vocabulary.size)
    parameters = dict(model.named_parameters())
    E, U, W, b = (parameters[CELL + name] for name in ("embedding.weight", "cell.U", "cell.W", "cell.b"))
    V, c = parameters["network.readout.V"], parameters["network.readout.c"]
    optimiser_of_torch = (
        torch.optim.SGD([E, U, W, b, V, c], rate, 0.9, weight_decay=decay, foreach=False)
        if optimiser == "sgd"
        else torch.optim.AdamW([E, U, W, b, V, c], rate, weight_decay=decay, foreach=False)
    )
    ids = train_ids(options)
    least, longer = divmod(len(ids), 3)
    starts = [k * least + min(k, longer) for k in range(3)]
    h, last = torch.zeros(3, 8), torch.full((3,), run.vocabulary.size)
    for step in range(2):
        losses = []
        for t in range(8 * step, 8 * step + 8):
            h = torch.tanh(b + h @ W.T + E[last] @ U.T)
            last = torch.stack([ids[start + t] for start in starts])
            o = c + h @ V.T
            losses.append(o.logsumexp(-1) - o[torch.arange(3), last])
        optimiser_of_torch.zero_grad()
        torch.stack(losses).mean().backward()
        gradients = [p.grad for p in (E, U, W, b, V, c) if p.grad is not None]
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        assert norm > clip
        for g in gradients:
            g *= clip / norm
        optimiser_of_torch.step()
        h = h.detach()
    torch.testing.assert_close(weights(spy.plan.model), weights(model), rtol=1e-4, atol=2e-6)


def test_clipping_clips_and_the_norm_logged_is_the_one_before_it(text: Path, tmp_path: Path) -> None:
    """One step of plain SGD moves the weights by the rate times the gradient."""

    def moved(clip: float) -> tuple[float, float]:
        options = small(text, epochs=0.01, optimiser="sgd", learning_rate=0.5, schedule="constant", clip=clip)
        run = train(options, tmp_path / f"clip-{clip}")
        before = weights(make_model(options, run.vocabulary.size))
        distance = sum(float((p - before[name]).square().sum()) for name, p in weights(run.model).items())
        return math.sqrt(distance) / 0.5, run.metrics[0]["gradient_norm"]

    came, norm = moved(0.0)
    assert came == pytest.approx(norm, rel=1e-4)
    for clip, needed in ((norm / 10, norm / 10), (10 * norm, norm)):
        came, logged = moved(clip)
        assert came == pytest.approx(needed, rel=1e-3)
        assert logged == pytest.approx(norm)


@pytest.mark.parametrize("warmup", [0, 6])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_schedules(schedule: str, warmup: int, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LOG_EVERY", 1)
    options = small(text, epochs=0.6, split=(80, 0, 20), schedule=schedule, warmup=warmup, learning_rate=0.01)
    run = train(options, tmp_path / "run")
    steps = len(run.metrics)
    assert steps == 13
    for k, entry in enumerate(run.metrics):
        fall = {"constant": 1.0, "linear": (steps - k) / steps, "cosine": math.cos(math.pi / 2 * k / steps) ** 2}
        rise = (k + 1) / (warmup + 1) if k < warmup else 1.0
        assert entry["learning_rate"] == pytest.approx(0.01 * rise * fall[schedule]), k


def test_the_rate_logged_is_the_rate_used(text: Path, tmp_path: Path) -> None:
    """In plain SGD without clipping, a step is rate × gradient: half the rate, half the way."""
    options = small(text, epochs=0.1, optimiser="sgd", schedule="constant", clip=0.0, learning_rate=0.5)
    distances = []

    def end_after_one(step: int) -> None:
        if step == 2:
            raise KeyboardInterrupt

    for warmup in (0, 1):  # with one step of warm-up, the first is taken at half the rate
        path = tmp_path / str(warmup)
        with pytest.raises(KeyboardInterrupt):
            train(replace(options, warmup=warmup), path, watcher=Onlooker(end_after_one), save_every=0.0)
        run = open_run(path)
        assert RunFolder(path).step() == 1
        before = weights(make_model(options, run.vocabulary.size))
        distances.append(sum(float((p - before[name]).square().sum()) for name, p in weights(run.model).items()) ** 0.5)
    assert distances[1] == pytest.approx(distances[0] / 2, rel=1e-4)


# ------------------------------------------------------------------ through the text


@pytest.mark.parametrize(("streams", "window"), [(3, 8), (4, 7), (5, 1000), (1, 50)])
def test_every_token_once_an_epoch(streams: int, window: int, text: Path, tmp_path: Path) -> None:
    spy = Spy()
    options = small(text, epochs=2.0, streams=streams, window=window)
    train(options, tmp_path / "run", watcher=spy)
    half = len(spy.calls) // 2
    assert half == spy.plan.steps_per_epoch
    ids = train_ids(options)
    for calls in (spy.calls[:half], spy.calls[half:]):
        columns: list[list[int]] = [[] for _ in range(streams)]
        for call in calls:
            ends = [len(call.tokens)] * streams if call.lengths is None else call.lengths.tolist()
            for b, end in enumerate(ends):
                columns[b] += call.tokens[:end, b].tolist()
        assert [token for column in columns for token in column] == ids.tolist()


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_the_state_is_carried_through_an_epoch_and_cold_at_its_start(cell: str, text: Path, tmp_path: Path) -> None:
    spy = Spy()
    train(small(text, epochs=2.0, cell=cell, layers=2), tmp_path / "run", watcher=spy)
    half = spy.plan.steps_per_epoch
    cold = spy.plan.model.initial_context(3)
    for k, call in enumerate(spy.calls):
        assert same_context(call.context, cold if k % half == 0 else spy.calls[k - 1].after), k
        assert not any(leaf.requires_grad for leaf in leaves(call.context))
    assert not same_context(spy.calls[half - 1].after, cold)


@pytest.mark.parametrize(("epochs", "share"), [(1.5, 1.5), (0.3, 0.3), (1e-6, 0.0)])
def test_epochs_may_be_fractions(epochs: float, share: float, text: Path, tmp_path: Path) -> None:
    onlooker = Onlooker()
    run = train(small(text, epochs=epochs), tmp_path / "run", watcher=onlooker)
    an_epoch = onlooker.plan.steps_per_epoch
    assert len(onlooker.losses) == max(1, round(share * an_epoch))
    assert run.metrics[-1]["step"] == len(onlooker.losses)
    assert run.metrics[-1]["epoch"] == pytest.approx(len(onlooker.losses) / an_epoch)


def test_the_curve_says_what_happened(text: Path, tmp_path: Path) -> None:
    """`train` is the mean over the tokens since the last entry; `valid` the ledger of the model as it then was."""
    onlooker = Onlooker()
    options = small(text, epochs=1.0, streams=4, window=9, evaluate_every=4)
    run = train(options, tmp_path / "run", watcher=onlooker)
    assert [entry["step"] for entry in run.metrics] == [4, 8, 12, 14]
    assert onlooker.entries == run.metrics
    counts = [36] * 13 + [497 - 36 * 13]
    for begin, entry in zip(range(0, 14, 4), run.metrics, strict=True):
        tokens = counts[begin : begin + 4]
        total = sum(n * loss for n, loss in zip(tokens, onlooker.losses[begin : begin + 4], strict=True))
        assert entry["train"] == pytest.approx(total / sum(tokens))
        assert entry["gradient_norm"] > 0
    valid = run.vocabulary.encode(run.corpus().valid)
    assert run.metrics[-1]["valid"] == pytest.approx(perplexity(onlooker.plan.model, valid).nats_per_token)


def test_without_valid_text_the_last_weights_are_kept(text: Path, tmp_path: Path) -> None:
    onlooker = Onlooker()
    run = train(small(text, split=(100, 0, 0), epochs=1.2), tmp_path / "run", watcher=onlooker)
    assert not any("valid" in entry for entry in run.metrics)
    assert run.metrics[-1]["step"] == onlooker.plan.steps
    torch.testing.assert_close(weights(run.model), weights(onlooker.plan.model), rtol=0, atol=0)


# ------------------------------------------------------------------ the best weights


def scripted(monkeypatch: pytest.MonkeyPatch, *nats: float) -> None:
    """Let the evaluations say this, one after the other."""
    told = iter(nats)
    monkeypatch.setattr(loop, "perplexity", lambda *_, **__: Ledger(next(told), 1))


def test_patience_ends_a_run_and_the_best_weights_are_kept(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two evaluations in a row that are no better: one alone is forgiven, and an equal one is no better."""
    scripted(monkeypatch, 3.0, 3.5, 2.0, 2.5, 2.0, 1.0)
    seen: dict[int, dict[str, Tensor]] = {}
    onlooker = Onlooker(lambda step: seen.setdefault(step, weights(onlooker.plan.model)))
    run = train(small(text, evaluate_every=3, patience=2), tmp_path / "run", watcher=onlooker)
    assert [entry["valid"] for entry in run.metrics] == [3.0, 3.5, 2.0, 2.5, 2.0]
    assert len(onlooker.losses) == 15 < onlooker.plan.steps
    torch.testing.assert_close(weights(run.model), seen[9], rtol=0, atol=0)
    checkpoint = RunFolder.open(run.path).checkpoint
    assert (checkpoint["best"], checkpoint["weights"]) == ("weights-9.safetensors", "weights-15.safetensors")


def test_the_run_returned_is_the_best_on_the_valid_text_not_the_last(text: Path, tmp_path: Path) -> None:
    """A valid text of another kind is soon predicted worse and worse."""
    other = tmp_path / "other.txt"
    other.write_text("".join(random.Random(1).choices(text.read_text(), k=200)))
    run = train(small(text, valid=str(other), epochs=6.0, learning_rate=0.03), tmp_path / "run")
    curve = [entry["valid"] for entry in run.metrics if "valid" in entry]
    assert min(curve) < 0.9 * curve[-1]
    for model in (run.model, open_run(run.path).model):
        ledger = perplexity(model, run.vocabulary.encode(other.read_text()))
        assert ledger.nats_per_token == pytest.approx(min(curve), rel=1e-9)


def test_before_the_first_evaluation_the_newest_weights_are_the_best(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "_files", {__file__})  # an error of a watcher is not blamed on a cell beside it

    class Enough(Exception):
        pass

    def enough(step: int) -> None:
        if step == 5:
            raise Enough

    with pytest.raises(Enough):
        train(small(text), tmp_path / "run", watcher=Onlooker(enough), save_every=0.0)
    checkpoint = RunFolder.open(tmp_path / "run").checkpoint
    assert checkpoint["best"] == checkpoint["weights"] == "weights-4.safetensors"


# ------------------------------------------------------------------ randomness


def test_training_leaves_the_callers_generator_alone(text: Path, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    run = train(small(text, dropout=0.5, layers=2, epochs=0.2), tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), before)
    open_run(run.path)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_is_its_options_alone(text: Path, tmp_path: Path) -> None:
    """The same seed gives the same bits whatever was drawn before; another seed other weights and other masks."""

    def losses(name: str, **changes: Any) -> list[float]:
        onlooker = Onlooker()
        torch.rand(3)
        train(small(text, epochs=0.3, **changes), tmp_path / name, watcher=onlooker)
        return onlooker.losses

    plain = losses("plain")
    dropped = losses("dropped", dropout=0.5)
    assert plain == losses("plain again")
    assert dropped == losses("dropped again", dropout=0.5)
    assert plain[0] != dropped[0]
    assert losses("another", seed=1)[0] != plain[0]
    assert math.isfinite(losses("large", seed=2**63 - 1, dropout=0.5)[-1])


@pytest.mark.parametrize("variational", [False, True])
def test_dropout_falls_in_training_only(variational: bool, text: Path, tmp_path: Path) -> None:
    spy = Spy()
    run = train(small(text, dropout=0.5, layers=2, variational=variational), tmp_path / "run", watcher=spy)
    assert spy.plan.model.training
    assert not run.model.training
    tokens, cold = torch.ones(5, 3, dtype=torch.int64), run.model.initial_context(3)
    assert torch.equal(run.model(tokens, cold).nll, run.model(tokens, cold).nll)
    assert not torch.equal(spy.plan.model(tokens, cold).nll, spy.plan.model(tokens, cold).nll)
    valid = run.vocabulary.encode(run.corpus().valid)
    best = min(entry["valid"] for entry in run.metrics if "valid" in entry)
    assert perplexity(run.model, valid).nats_per_token == pytest.approx(best, rel=1e-9)


def test_a_penalty_keeps_hidden_states_small(text: Path, tmp_path: Path) -> None:
    sizes = {}
    for name, value in (("activation_penalty", 100.0), ("change_penalty", 100.0), ("clip", 1.0)):
        model = train(small(text, epochs=8.0, **{name: value}), tmp_path / name).model
        assert isinstance(model, RecurrentLM)
        tokens = torch.arange(20).remainder(5)[:, None]
        hidden = model.network.recurrent(torch.cat([tokens[:1] * 0, tokens[:-1]])).hidden.detach()
        sizes[name] = hidden.square().mean(), (hidden[1:] - hidden[:-1]).square().mean()
    assert sizes["activation_penalty"][0] < 0.5 * sizes["clip"][0]
    assert sizes["change_penalty"][1] < 0.5 * sizes["clip"][1]


def test_dropout_of_weights_needs_weights(tmp_path: Path, text: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\nclass Own(torch.nn.Module):\n    def __init__(self, n_in, n):\n        super().__init__()\n"
        "        self.U = torch.nn.Linear(n_in + n, n)\n    def forward(self, h, x):\n"
        "        return torch.tanh(self.U(torch.cat([h, x], 1)))\n"
    )
    with pytest.raises(OptionError, match="weight_drop needs a cell with a parameter W, from state to state; Own has"):
        train(small(text, cell=f"{tmp_path / 'own.py'}:Own", weight_drop=0.5), tmp_path / "run")


# ------------------------------------------------------------------ options

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"unit": "charcters"}, "there is no unit 'charcters'; choose from .*Did you mean 'characters'?"),
    ({"model": "windows"}, "there is no model 'windows'; .*Did you mean 'window'?"),
    ({"optimiser": "adam"}, "there is no optimiser 'adam'; choose from adamw, sgd. Did you mean 'adamw'?"),
    ({"schedule": "cosin"}, "there is no schedule 'cosin'; .*Did you mean 'cosine'?"),
    ({"optimiser": "x"}, r"there is no optimiser 'x'; choose from adamw, sgd\.$"),
    ({"hidden_size": 0}, "hidden_size must be from 1 to 1048576; got 0"),
    ({"layers": -1}, "layers must be from 1 to 1000; got -1"),
    ({"streams": 0}, "streams must be at least 1; got 0"),
    ({"window": 0}, "window must be at least 1; got 0"),
    ({"embedding_size": 0}, "embedding_size must be from 1 to 1048576, or left out; got 0"),
    ({"vocabulary_size": 0}, "vocabulary_size must be at least 1, or left out; got 0"),
    ({"patience": 0}, "patience must be at least 1, or left out; got 0"),
    ({"evaluate_every": 0}, "evaluate_every must be at least 1, or left out; got 0"),
    ({"dropout": 1.0}, "dropout must be a probability from 0 up to but not including 1; got 1.0"),
    ({"dropout": math.nan}, "dropout must be a probability .*; got nan"),
    ({"epochs": 0.0}, "epochs must be above 0 and at most 1e9; got 0.0"),
    ({"epochs": math.nan}, "epochs must be above 0 and at most 1e9; got nan"),
    ({"learning_rate": -0.1}, "learning_rate must be above 0; got -0.1"),
    ({"learning_rate": math.inf}, "learning_rate must be above 0; got inf"),
    ({"weight_decay": -1.0}, "weight_decay must be 0 or more; got -1.0"),
    ({"clip": -1.0}, "clip must be 0 or more; got -1.0"),
    ({"clip": math.nan}, "clip must be 0 or more; got nan"),
    ({"warmup": -1}, "warmup must be 0 or more, or left out; got -1"),
    ({"seed": -1}, "seed must be from 0 to 9223372036854775807; got -1"),
    ({"seed": 2**63}, "seed must be from 0 to"),
    ({"layers": "two"}, "layers must be a whole number; got 'two'"),
    ({"layers": 2.0}, "layers must be a whole number; got 2.0"),
    ({"layers": True}, "layers must be a whole number; got True"),
    ({"window": 2**63}, "window is too large a number: it must fit in 64 bits"),
    ({"window": 10**400}, "window is too large a number: it must fit in 64 bits"),
    ({"dropout": "0.1"}, "dropout must be a number; got '0.1'"),
    ({"tied": 1}, "tied must be true or false; got 1"),
    ({"patience": "3"}, "patience must be a whole number or nothing; got '3'"),
    ({"sources": 5}, "sources must be texts; got 5"),
    ({"sources": ("a", 5)}, r"sources must be texts; got \('a', 5\)"),
    ({"split": (90, None, 5)}, r"split must be numbers; got \(90, None, 5\)"),
    ({"valid": 5}, "valid must be text or nothing; got 5"),
    ({"epochs": 1e300}, r"epochs must be above 0 and at most 1e9; got 1e\+300"),
    ({"span": 2**21}, "span must be from 1 to 1048576; got 2097152"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=str)
def test_wrong_options(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Options(**changes)


UNBUILDABLE: list[tuple[dict[str, Any], str]] = [
    ({"cell": "lsmt"}, "there is no cell 'lsmt'; .*Did you mean 'lstm'?"),
    ({"cell": "my.py"}, "say which one is the cell: my.py:MyCell"),
    ({"cell": "nowhere.py:MyCell"}, "there is no file nowhere.py"),
    ({"one_hot": True, "tied": True}, "one-hot vectors have no table to tie .*: use one_hot=False or tied=False"),
    (
        {"tied": True, "embedding_size": 3},
        "tied weights need an embedding of the hidden size, 8; got 3. Or untie them: tied=False.",
    ),
]


@pytest.mark.parametrize(("changes", "message"), UNBUILDABLE, ids=str)
def test_options_from_which_no_model_can_be_made(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_model(Options(hidden_size=8, **changes), 20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"unit": "characters", "vocabulary_size": 9},
            "a vocabulary of characters has a fixed size: leave out vocabulary_size",
        ),
        ({"unit": "words", "vocabulary_size": 2}, "max_size of 3 or more"),
        ({"unit": "subwords", "vocabulary_size": 20}, "size of 256 or more"),
    ],
)
def test_options_from_which_no_vocabulary_can_be_made(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_vocabulary(Options(**changes), "some text")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_build(name: str) -> None:
    options = preset(name)
    model = make_model(options, 50)
    nll = model(torch.randint(50, (4, 2)), model.initial_context(2)).nll
    assert nll.shape == (4, 2)
    assert preset(name, layers=3, seed=7) == Options(**(options.as_json() | {"layers": 3, "seed": 7}))


def test_an_unknown_preset_has_a_neighbour() -> None:
    with pytest.raises(OptionError, match=r"there is no preset 'quikc'; .* Did you mean 'quick'\?"):
        preset("quikc")


def test_options_come_back_from_json() -> None:
    options = Options(sources=("a", "b"), split=(8, 1, 1), patience=3)
    assert Options.from_json(json.loads(json.dumps(options.as_json()))) == options
    with pytest.raises(OptionError, match="the options hold 'depth', which this version does not know"):
        Options.from_json({"depth": 3})


@pytest.mark.parametrize("unit", ["characters", "bytes", "words", "subwords"])
@pytest.mark.parametrize("model", ["recurrent", "window", "convolution"])
def test_every_unit_and_model_trains(unit: str, model: str, text: Path, tmp_path: Path) -> None:
    size = 260 if unit == "subwords" else None
    run = train(small(text, unit=unit, model=model, vocabulary_size=size, epochs=1e-6, span=3), tmp_path / "run")
    assert run.vocabulary.unit == unit.removesuffix("s")
    assert math.isfinite(run.metrics[-1]["valid"])
    assert open_run(run.path).vocabulary == run.vocabulary


# ------------------------------------------------------------------ a cell of one's own

MY_CELL = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class Sizes:
    n_in: int
    n: int

class MyCell(nn.Module):
    def __init__(self, n_in, n):
        super().__init__()
        self.sizes = Sizes(n_in, n)
        self.A = nn.Parameter(torch.randn(n, n) / n**0.5)
        self.B = nn.Parameter(torch.randn(n, n_in) / n_in**0.5)

    def forward(self, h, x):
        return 0.5 * h + torch.sin(h @ self.A.T + x @ self.B.T)

class Dear(nn.Module):
    def __init__(self, n_in, n):
        raise RuntimeError("no memory\\nfor this")

class Stumbling(MyCell):
    def initial_state(self, batch):
        return torch.zeros(batch, self.sizes.n)

    def forward(self, h, x):
        return h @ self.missing

class NoModule:
    def __init__(self, n_in, n): ...
"""


@pytest.fixture
def cell_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MY_CELL)
    return path


def test_a_cell_of_ones_own_is_copied_and_lives_without_its_file(cell_file: Path, text: Path, tmp_path: Path) -> None:
    run = train(small(text, cell=f"{cell_file}:MyCell", layers=2), tmp_path / "run")
    assert (run.path / "cell.py").read_text() == MY_CELL
    cell_file.unlink()
    again = open_run(run.path)
    assert type(again.model.get_submodule(CELL + "cell")).__name__ == "MyCell"
    torch.testing.assert_close(weights(again.model), weights(run.model), rtol=0, atol=0)
    assert loop.resume(run.path).metrics == run.metrics


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Dear", r"mine.py, line \d+, in __init__: RuntimeError: no memory\nfor this \(Dear of .* as Dear\(8, 8\)"),
        ("NoModule", "NoModule of .*mine.py must be a torch.nn.Module with .*; got a? ?NoModule"),
        ("YourCell", "mine.py has no class 'YourCell'; it has MyCell, Dear, Stumbling"),
        ("Stumbling", r"mine.py, line \d+, in forward: AttributeError: .*no attribute 'missing' \(.*:Stumbling failed"),
    ],
)
def test_a_cell_that_cannot_be_used_leaves_no_folder(
    name: str, message: str, cell_file: Path, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=message):
        train(small(text, cell=f"{cell_file}:{name}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


LATE = """
import torch
from torch import nn

class Late(nn.Module):
    def __init__(self, n_in, n):
        super().__init__()
        self.n = n

    def initial_state(self, batch):
        return torch.zeros(batch, self.n)

    def forward(self, h, x):
        self.A = nn.Linear(x.shape[1], self.n)
        return h + self.A(x)

class Lazy(Late):
    def __init__(self, n_in, n):
        super().__init__(n_in, n)
        self.A = nn.LazyLinear(n)

    def forward(self, h, x):
        return h + self.A(x)
"""


@pytest.mark.parametrize("name", ["Lazy", "Late"])
def test_a_cell_that_makes_its_parameters_late_is_refused_at_once(name: str, text: Path, tmp_path: Path) -> None:
    """It could be trained, but not opened again."""
    (tmp_path / "late.py").write_text(LATE)
    with pytest.raises(OptionError, match=rf"the first step of .*late.py:{name} failed"):
        train(small(text, cell=f"{tmp_path / 'late.py'}:{name}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_model_is_built_once_and_the_text_encoded_once(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the run that is returned is opened. An outline, which takes no memory, is not counted."""
    made: list[str] = []
    counted = make_model

    def make(options: Options, size: int) -> Any:
        made.append("model")
        return counted(options, size)

    encode = Characters.encode

    def read(vocabulary: Characters, text: str) -> Any:
        made.append("text")
        return encode(vocabulary, text)

    monkeypatch.setattr("loopfold.training.job.make_model", make)
    monkeypatch.setattr("loopfold.training.checkpoint.make_model", make)
    monkeypatch.setattr(Characters, "encode", read)
    monkeypatch.setattr(loop, "open_run", lambda *_, **__: None)
    train(small(text), tmp_path / "run")
    assert made == ["text", "model", "text"]  # the train text and the valid text
    made.clear()
    resume(tmp_path / "run")
    assert sorted(made) == ["model", "text", "text"]


def test_a_cell_file_that_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "torn.py").write_text("def f(:")
    with pytest.raises(OptionError, match=r"torn.py, line 1: SyntaxError: invalid syntax \(.*torn.py does not run"):
        make_cell(f"{tmp_path / 'torn.py'}:MyCell", 3, 4)
    (tmp_path / "empty.py").write_text("x = 1")
    with pytest.raises(OptionError, match=r"empty.py has no class 'MyCell'; it has no torch.nn.Module at all"):
        make_cell(f"{tmp_path / 'empty.py'}:MyCell", 3, 4)


# ------------------------------------------------------------------ divergence


def diverging(text: Path) -> Options:
    """The first step throws the weights far out; the second has no finite loss."""
    return small(text, optimiser="sgd", learning_rate=1e37, clip=0.0, schedule="constant")


@pytest.mark.parametrize(("save_every", "kept"), [(0.0, 1), (1e9, 0)])
def test_a_loss_that_is_no_number_stops_the_run(save_every: float, kept: int, text: Path, tmp_path: Path) -> None:
    onlooker, path = Onlooker(), tmp_path / "run"
    said = (
        rf"^at step 2 the loss is (nan|inf) and the gradient's norm (nan|inf|\d\S*), so training stopped\. The last "
        rf"good checkpoint, of step {kept}, is in {path}\. Start again with a lower learning_rate, or .* clip=1\.$"
    )
    with pytest.raises(Diverged, match=said):
        train(diverging(text), path, watcher=onlooker, save_every=save_every)
    assert len(onlooker.losses) == 1
    run = open_run(path)
    assert RunFolder.open(path).checkpoint["step"] == kept
    assert all(p.isfinite().all() for p in run.model.parameters())


def test_divergence_is_exit_code_1_and_one_sentence(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--cell elman --hidden-size 8 --optimiser sgd --learning-rate 1e37 --clip 0 --streams 3 --window 8 -q"
    argv = ["loopfold", "train", str(text), "--out", str(tmp_path / "run"), "--warmup", "0", *flags.split()]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr().err
    assert end.value.code == 1
    assert said.startswith("loopfold: at step 2 the loss is ")
    assert said.endswith("Start again with a lower --learning-rate, or clip the gradient: --clip 1.\n")
    assert said.count("\n") == 1


# ------------------------------------------------------------------ watching


def evaluated(text: Path, path: Path, watcher: Watcher) -> Run:
    return train(small(text, epochs=1.0, evaluate_every=6), path, watcher=watcher)


def test_the_terminal_has_a_line_for_every_evaluation(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run = evaluated(text, tmp_path / "run", Terminal())
    out, said = capsys.readouterr()
    assert out == ""
    rows = [line.split() for line in said.splitlines()]
    head = rows.index(["epoch", "step", "train", "valid", "perplexity"])
    valid = [entry for entry in run.metrics if "valid" in entry]
    assert len(valid) > 2
    for row, entry in zip(rows[head + 1 :], valid, strict=False):
        nats = entry["valid"]
        figures = f"{entry['epoch']:.1f} {entry['step']} {entry['train']:.3f} {nats:.3f} {math.exp(nats):.2f}"
        assert row == figures.split()
    assert f"run folder {tmp_path / 'run'}" in said
    parameters = sum(p.numel() for p in run.model.parameters())
    assert f"{parameters:,} parameters" in said


@pytest.mark.filterwarnings("ignore")  # TensorBoard's own
def test_tensorboard_reads_the_curve(text: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    run = evaluated(text, tmp_path / "run", Several([Silent(), TensorBoard()]))
    events = accumulator.EventAccumulator(str(run.path))
    events.Reload()
    for name in ("train", "valid", "gradient_norm", "learning_rate"):
        came = {event.step: event.value for event in events.Scalars(name)}
        assert came == pytest.approx({e["step"]: e[name] for e in run.metrics if name in e}, rel=1e-5, abs=1e-9)
    assert open_run(run.path).metrics == run.metrics


def test_a_watcher_is_open_while_the_run_goes_on_and_closed_when_it_fails(text: Path, tmp_path: Path) -> None:
    class Doors(Silent):
        def __init__(self) -> None:
            self.heard: list[str] = []

        def begin(self, plan: Plan) -> None:
            self.heard.append("begin")

        def __enter__(self) -> "Doors":
            self.heard.append("open")
            return self

        def __exit__(self, *_: object) -> None:
            self.heard.append("close")

    doors = Doors()
    with pytest.raises(Diverged):
        train(diverging(text), tmp_path / "run", watcher=Several([doors]))
    assert doors.heard == ["open", "begin", "close"]


class Door(Silent):
    """Notes when it is opened and closed, and can fail at either."""

    def __init__(self, name: str, heard: list[str], fails: str = "") -> None:
        self.name, self.heard, self.fails = name, heard, fails

    def note(self, what: str) -> None:
        self.heard.append(f"{what} {self.name}")
        if self.fails == what:
            raise OSError(f"{self.name} does not {what}")

    def __enter__(self) -> "Door":
        self.note("open")
        return self

    def __exit__(self, *_: object) -> None:
        self.note("close")


def test_all_watchers_are_closed_where_one_fails_to_open_or_close() -> None:
    heard: list[str] = []
    with pytest.raises(OSError, match="b does not open"), Several([Door("a", heard), Door("b", heard, "open")]):
        heard.append("training")
    assert heard == ["open a", "open b", "close a"]
    heard.clear()
    with pytest.raises(OSError, match="b does not close"), Several([Door("a", heard), Door("b", heard, "close")]):
        heard.append("training")
    assert heard == ["open a", "open b", "training", "close b", "close a"]


# ------------------------------------------------------------------ what users bring


class Learned(nn.Module):
    """Starts from a state that it learns."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.h0 = nn.Parameter(torch.zeros(n))
        self.U, self.W = nn.Linear(n_in, n), nn.Linear(n, n)

    def initial_state(self, batch: int) -> Tensor:
        return torch.tanh(self.h0).expand(batch, -1)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.W(h) + self.U(x))


class Twice(nn.Module):
    """Returns one tensor under two names."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.U, self.W = nn.Linear(n_in, n), nn.Linear(n, n)

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.W(state[0]) + self.U(x))
        return h, h


@pytest.mark.parametrize("cell", [Learned, Twice, GRU])
def test_a_class_is_a_cell_too(cell: type[nn.Module], text: Path, tmp_path: Path) -> None:
    """Over several epochs, each of which begins from the initial state anew, and through the run folder."""
    run = train(small(text, cell=cell, epochs=2.5), tmp_path / "run", save_every=0)
    assert run.metrics[-1]["train"] < math.log(run.vocabulary.size)
    again = resume(tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), run.model.parameters(), strict=True))
    if cell is Learned:
        assert dict(run.model.named_parameters())["network.recurrent.layers.0.cell.cell.h0"].abs().max() > 0


def test_a_class_of_the_script_that_runs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Twice, "__module__", "__main__")
    with pytest.raises(OptionError, match="put Twice in a file of its own and import it"):
        Options(cell=Twice)  # type: ignore[arg-type]


def test_a_class_without_a_file_is_refused() -> None:
    class Inside(Twice):
        pass

    with pytest.raises(OptionError, match="Inside is not at the top level of a file"):
        Options(cell=Inside)  # type: ignore[arg-type]


def test_one_source_may_be_given_as_it_is(text: Path, tmp_path: Path) -> None:
    options = Options(sources=str(text), hidden_size=8, streams=4, epochs=0.1)  # type: ignore[arg-type]
    assert train(options, tmp_path / "run").corpus().train in text.read_text()
    assert open_run(tmp_path / "run").options.sources == (str(text),)


def test_texts_may_be_paths(text: Path, tmp_path: Path) -> None:
    options = Options(sources=text, valid=text, hidden_size=8, streams=4, epochs=0.1)  # type: ignore[arg-type]
    assert (options.sources, options.valid) == ((str(text),), str(text))
    assert train(options, tmp_path / "run").corpus().valid == text.read_text()


def test_a_device_that_holds_nothing(text: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"device 'meta' cannot be used: .+ Use device='cpu'"):
        train(small(text, device="meta"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_two_cannot_train_in_one_folder(text: Path, tmp_path: Path) -> None:
    train(small(text, epochs=0.1), tmp_path / "run")
    with RunFolder(tmp_path / "run").locked(), pytest.raises(RunError, match="another process is training in"):
        resume(tmp_path / "run")
    resume(tmp_path / "run")


@pytest.mark.parametrize("unit", ["bytes", "characters", "subwords"])
def test_one_distinct_token_is_nothing_to_predict(unit: str, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a" * 500)
    with pytest.raises(OptionError, match="nothing to predict|subwords"):
        train(Options(sources=(str(tmp_path / "one.txt"),), unit=unit), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_can_be_opened_while_it_trains(text: Path, tmp_path: Path) -> None:
    class Opening(Silent):
        def step(self, step: int, loss: float) -> None:
            assert open_run(tmp_path / "run").options.hidden_size == 8

    train(small(text, epochs=0.3), tmp_path / "run", watcher=Opening(), save_every=0)


def test_what_a_cell_keeps_of_the_trial_does_not_reach_training(text: Path, tmp_path: Path) -> None:
    (tmp_path / "keeps.py").write_text(
        "import torch\n"
        "import loopfold as lf\n"
        "class Keeps(lf.Elman):\n"
        "    learning = None\n"
        "    def forward(self, h, x):\n"
        "        if self.learning is None:\n"
        "            self.learning = torch.is_grad_enabled()\n"
        "        if torch.is_grad_enabled() and not self.learning:\n"
        "            raise RuntimeError('kept from the trial')\n"
        "        return super().forward(h, x)\n"
    )
    options = small(text, cell=f"{tmp_path / 'keeps.py'}:Keeps", epochs=0.1)
    train(options, tmp_path / "run")


def test_a_run_that_was_trained_for_a_gpu_is_opened_there_if_one_is(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()
    run = train(small(text, device="auto"), tmp_path / "run")

    def on_the_cpu(device: str) -> str:
        asked.append(device)
        return "cpu"

    monkeypatch.setattr("loopfold.training.run.check_device", on_the_cpu)
    for device in (None, "cpu"):
        open_run(run.path, device)
    assert asked == ["auto", "cpu"]
