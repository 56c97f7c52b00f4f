"""Networks that read their own outputs: every pattern, feeding and engine against the plain loop, kept here."""

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, randn
from test_random_steps import quick_compilation as quick_compilation
from torch import Tensor, nn

import loopfold as lf
from loopfold.feedback import run_fed
from loopfold.feeding import Beside, Feeding, Mixed, is_mixed
from loopfold.outputs import Outputs
from loopfold.states import leaves, map_state

pytestmark = pytest.mark.usefixtures("one_thread")
f64 = torch.float64
ENGINES = [lf.Sequential(), lf.Looped(), lf.FusedCPU()]
SIZE, TAU, BATCH = 3, 7, 4
LENGTHS = [7, 1, 4, 6]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ------------------------------------------------------------------ the plain loop


def kept(o: Tensor, pick: lf.Sample) -> Tensor:
    """o of the classes that may be drawn, and -∞, row by row, by sorting."""
    rows = []
    for row in o / pick.temperature:
        if pick.top_k is not None:
            least = sorted(row.tolist(), reverse=True)[min(pick.top_k, len(row)) - 1]
            row = torch.where(row < least, -torch.inf, row)
        if pick.top_p is not None:
            shares, before, allowed = row.softmax(-1).tolist(), 0.0, set()
            for i in sorted(range(len(row)), key=lambda i: -shares[i]):  # noqa: B023
                if before < pick.top_p:
                    allowed.add(i)
                before += shares[i]
            row = torch.stack([v if i in allowed else v - torch.inf for i, v in enumerate(row)])
        rows.append(row)
    return torch.stack(rows)


def picked(pick: lf.Pick, o: Tensor, outputs: Outputs, beside: Beside) -> Tensor:
    """What each pick means, in torch's own words."""
    if isinstance(pick, lf.Soft):
        return o.softmax(-1) if isinstance(outputs, lf.Classes) else o
    if isinstance(pick, lf.Raw) or isinstance(outputs, lf.Reals):
        return o.detach() if isinstance(pick, lf.Greedy) else o
    if isinstance(pick, lf.Greedy):
        return F.one_hot(o.argmax(-1), outputs.size).to(o.dtype)
    assert isinstance(pick, lf.Sample)
    return F.one_hot((kept(o.detach(), pick) + beside.noise).argmax(-1), outputs.size).to(o.dtype)


def fed_next(feeding: Any, o: Tensor, beside: Any, outputs: Outputs) -> Tensor:
    if isinstance(feeding, lf.FreeRunning):
        return picked(feeding.pick, o, outputs, beside)
    if isinstance(feeding, lf.ScheduledSampling):
        return torch.where(beside.own, picked(feeding.pick, o, outputs, beside), beside.truth)
    if isinstance(feeding, lf.GeneralisedTeacherForcing):
        return (1 - feeding.alpha) * picked(feeding.pick, o, outputs, beside) + feeding.alpha * beside.truth
    return feeding.next(o, beside, outputs)


Run = Callable[[Tensor, Any], tuple[Tensor, Any]]  # (fed, state) -> (h, state)


def plain_loop(run: Run, readout: nn.Module, outputs: Outputs, fed: Tensor, feeding: Feeding, y: Tensor) -> Tensor:
    """One step after the other, as it is written in the book."""
    beside: Any = y
    if isinstance(feeding, Mixed) and is_mixed(feeding):
        beside = feeding.beside(y, (len(y), len(fed)), outputs, fed)
    os, state = [], None
    for t in range(len(y)):
        h, state = run(fed, state if t else None)
        os.append(readout(h))
        fed = fed_next(feeding, os[-1], map_state(lambda leaf: leaf[t], beside), outputs)  # noqa: B023
    return torch.stack(os)


# ------------------------------------------------------------------ the patterns


@dataclass
class Case:
    """A pattern on some data, and the same by the plain loop."""

    model: Any
    ours: Callable[[Feeding, Any], Tensor]  # (feeding, target lengths) -> o
    theirs: Callable[[Feeding], Tensor]
    inputs: list[Tensor]


def one_step(layer: Any, x: Tensor, state: Any, **options: Any) -> tuple[Tensor, Any]:
    run = layer(x[None], state, **options)
    return run.hidden[0], run.last


def case(name: str, outputs: Outputs, engine: lf.Engine | None, tau: int = TAU, batch: int = BATCH) -> Case:
    torch.manual_seed(0)
    x = randn(5, batch, SIZE).requires_grad_()
    y = randn(tau, batch, SIZE) if isinstance(outputs, lf.Reals) else torch.randint(SIZE, (tau, batch))
    zeros, ends = torch.zeros(batch, SIZE, dtype=f64), [5, 2, 1, 4][:batch]
    if name == "OutputRecurrence":
        one = lf.OutputRecurrence(SIZE, 5, outputs, engine=engine).double()
        long = randn(tau, batch, SIZE).requires_grad_()
        rows = iter(())  # type: Any

        def step(fed: Tensor, state: Any) -> tuple[Tensor, Any]:
            nonlocal rows
            rows = iter(long) if state is None else rows
            return torch.tanh(one.b + fed @ one.W.T + next(rows) @ one.U.T), 1

        return Case(
            one,
            lambda feeding, lengths: one(long, y, feeding, lengths=lengths),
            lambda feeding: plain_loop(step, one.readout, outputs, zeros, feeding, y),
            [long],
        )
    if name in ("VectorToSequence", "Stacked"):
        cell: Any = lf.GRU(2 * SIZE, 5) if name != "Stacked" else lf.Stacked([lf.GRU(2 * SIZE, 5), lf.LSTM(5, 4)])
        two = lf.VectorToSequence(cell, outputs, engine=engine).double()
        return Case(
            two,
            lambda feeding, lengths: two(x[0], y, feeding, lengths=lengths),
            lambda feeding: plain_loop(
                lambda fed, state: one_step(two.recurrent, torch.cat([x[0], fed], -1), state),
                two.readout,
                outputs,
                zeros,
                feeding,
                y,
            ),
            [x],
        )
    if name == "AttentionDecoder":
        three = lf.AttentionDecoder(lf.GRU(SIZE, 5), lf.LSTM(SIZE + 5, 4), outputs, engine=engine).double()

        def attended(feeding: Feeding) -> Tensor:
            read = three.encoder(x, lengths=ends).hidden
            source = three.attention.source(read, torch.tensor(ends))
            return plain_loop(
                lambda fed, state: one_step(three.recurrent, fed, state, context=source),
                three.readout,
                outputs,
                zeros,
                feeding,
                y,
            )

        return Case(
            three,
            lambda feeding, lengths: three(x, y, feeding, lengths=ends, target_lengths=lengths),
            attended,
            [x],
        )
    four = lf.EncoderDecoder(lf.GRU(SIZE, 5), lf.LSTM(5 + SIZE, 4), outputs, engine=engine).double()

    def decoded(feeding: Feeding) -> Tensor:
        vector = four.encoder(x, lengths=ends).last_hidden
        return plain_loop(
            lambda fed, state: one_step(four.decoder.recurrent, torch.cat([vector, fed], -1), state),
            four.readout,
            outputs,
            zeros,
            feeding,
            y,
        )

    return Case(four, lambda feeding, lengths: four(x, y, feeding, lengths=ends, target_lengths=lengths), decoded, [x])


PATTERNS = ["OutputRecurrence", "VectorToSequence", "Stacked", "EncoderDecoder", "AttentionDecoder"]
PICKS: dict[str, Callable[[], lf.Pick]] = {
    "soft": lf.Soft,
    "raw": lf.Raw,
    "greedy": lf.Greedy,
    "sample": lambda: lf.Sample(seeded(1)),
    "cold": lambda: lf.Sample(seeded(1), temperature=0.5),
    "top k": lambda: lf.Sample(seeded(1), top_k=2),
    "top p": lambda: lf.Sample(seeded(1), temperature=2.0, top_p=0.7),
    "both": lambda: lf.Sample(seeded(1), top_k=2, top_p=0.6),
}
FEEDINGS: dict[str, Callable[[lf.Pick], Feeding]] = {
    "free": lf.FreeRunning,
    "scheduled, by element": lambda pick: lf.ScheduledSampling(0.5, pick, generator=seeded(2)),
    "scheduled, by step": lambda pick: lf.ScheduledSampling(0.4, pick, lf.Coin.STEP, generator=seeded(2)),
    "generalised": lambda pick: lf.GeneralisedTeacherForcing(0.3, pick),
}


def found_by(o: Tensor, case: Case, lengths: list[int] | None) -> dict[str, Tensor]:
    """The outputs, and the gradients of a loss on those that count."""
    alive = torch.arange(len(o))[:, None, None] < torch.tensor(lengths or [len(o)] * o.shape[1])[:, None]
    sources = {**dict(case.model.named_parameters()), **{f"input {i}": x for i, x in enumerate(case.inputs)}}
    torch.manual_seed(1)
    weights = randn(*o.shape)
    gradients = torch.autograd.grad((torch.where(alive, o, 0) * weights).sum(), [*sources.values()], allow_unused=True)
    found = {"o": torch.where(alive, o, 0).detach()}
    pairs = zip(sources.items(), gradients, strict=True)
    return found | {name: torch.zeros_like(s) if g is None else g for (name, s), g in pairs}


def assert_is_the_plain_loop(
    name: str, outputs: Outputs, engine: lf.Engine | None, feeding: Callable[[], Feeding], lengths: list[int] | None
) -> None:
    whole = case(name, outputs, engine)
    ours = whole.ours(feeding(), lengths)
    theirs = whole.theirs(feeding())
    if lengths is not None:
        ended = torch.arange(len(ours))[:, None] >= torch.tensor(lengths)
        assert not ours[ended].any()
    assert_same(found_by(ours, whole, lengths), found_by(theirs, whole, lengths))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("feeding", FEEDINGS)
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.usefixtures("quick_compilation")
def test_every_pattern_feeding_and_engine_is_the_plain_loop(name: str, feeding: str, engine: lf.Engine) -> None:
    """Values and every gradient, in float64, with and without unequal lengths."""
    few = feeding != "free" and name != "OutputRecurrence"  # each is one more kernel, there and back
    for pick, make in {k: v for k, v in PICKS.items() if not few or k in ("soft", "greedy", "both")}.items():
        for lengths in (None, LENGTHS):
            assert_is_the_plain_loop(name, lf.Classes(SIZE), engine, lambda: FEEDINGS[feeding](make()), lengths)  # noqa: B023
            if pick in ("soft", "raw", "greedy"):
                assert_is_the_plain_loop(name, lf.Reals(SIZE), engine, lambda: FEEDINGS[feeding](make()), lengths)  # noqa: B023


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(("tau", "batch"), [(1, 1), (1, 3), (6, 1)])
@pytest.mark.usefixtures("quick_compilation")
def test_one_step_and_one_sequence(engine: lf.Engine, tau: int, batch: int) -> None:
    for name, feeding in itertools.product(PATTERNS, FEEDINGS):
        whole = case(name, lf.Classes(SIZE), engine, tau, batch)
        ours = whole.ours(FEEDINGS[feeding](lf.Sample(seeded(3), top_k=2)), None)
        theirs = whole.theirs(FEEDINGS[feeding](lf.Sample(seeded(3), top_k=2)))
        assert_same(found_by(ours, whole, None), found_by(theirs, whole, None))


# ------------------------------------------------------------------ what users write


class Halves(Feeding):
    """A feeding of one's own, which looks at values in Python."""

    def known(self, y: Tensor | None, outputs: Outputs) -> None:
        return None

    def next(self, o: Tensor, y: Tensor | None, outputs: Outputs) -> Tensor:
        assert y is not None
        share = 0.5 if float(o.detach().sum()) > 0 else 0.25
        return share * outputs.soft(o) + 0.5 * outputs.encode(y).to(o.dtype)


class Shifted(Feeding):
    """One that is a function of tensors, and so is compiled."""

    def known(self, y: Tensor | None, outputs: Outputs) -> None:
        return None

    def next(self, o: Tensor, y: Tensor | None, outputs: Outputs) -> Tensor:
        assert y is not None
        return 0.5 * torch.tanh(o) + 0.1 * y[:, None].to(o.dtype)


class Doubled(lf.FreeRunning):
    """One of ours with a `next` of its own, which is what counts."""

    def next(self, o: Tensor, y: Tensor | None, outputs: Outputs) -> Tensor:
        return 2 * super().next(o, y, outputs)


class Rounded(lf.Pick):
    def __call__(self, o: Tensor, outputs: Outputs) -> Tensor:
        return outputs.soft(o).round()


@dataclass(frozen=True)
class Signs(lf.Classes):
    """Outputs of one's own, with draws of their own."""

    def sample(self, o: Tensor, generator: torch.Generator | None) -> Tensor:
        return torch.where(torch.rand(o.shape, generator=generator) < 0.5, -1.0, 1.0).to(o.dtype)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.filterwarnings("ignore::loopfold.EngineWarning")
def test_what_users_write_runs(name: str) -> None:
    for feeding in (Halves(), Shifted(), Doubled()):
        whole = case(name, lf.Classes(SIZE), None)
        for lengths in (None, LENGTHS):
            ours = found_by(whole.ours(feeding, lengths), whole, lengths)
            assert_same(ours, found_by(whole.theirs(Next(feeding)), whole, lengths))
    whole = case(name, Signs(SIZE), None)
    drawn = whole.ours(Seen(lf.Sample(seeded(4))), None)
    assert_same(drawn, whole.theirs(Next(Seen(lf.Sample(seeded(4))))))
    rounded = lf.FreeRunning(Rounded())
    assert_same(whole.ours(rounded, None), whole.theirs(Next(rounded)))


class Next(Feeding):
    """Another feeding, asked for its `next` at every step."""

    def __init__(self, feeding: Feeding) -> None:
        self.feeding = feeding

    def known(self, y: Tensor | None, outputs: Outputs) -> None:
        return None

    def next(self, o: Tensor, y: Tensor | None, outputs: Outputs) -> Tensor:
        return self.feeding.next(o, y, outputs)


class Seen(lf.FreeRunning):
    """As FreeRunning; nothing is changed."""


def test_a_feeding_that_is_a_function_of_tensors_is_compiled_and_others_say_why_not() -> None:
    whole = case("OutputRecurrence", lf.Classes(SIZE), None)
    x, y = randn(60, 2, SIZE), torch.randint(SIZE, (60, 2))
    assert "FusedCPU, because its loop is native code" in whole.model.explain(x, y, Shifted())
    assert "it asks for the values of a tensor" in whole.model.explain(x, y, Halves())


def test_schedules_and_seeds_do_not_compile_again() -> None:
    """What a step does not depend on is no part of it: one program serves all of a schedule, and every generator."""
    from loopfold.engines import programs

    whole = case("VectorToSequence", lf.Classes(SIZE), lf.Looped())
    made: list[Any] = []
    original, patch = programs._compile, pytest.MonkeyPatch()

    def compiled(graph: Any) -> Any:
        made.append(graph)
        return original(graph)

    patch.setattr(programs, "_compile", compiled)
    try:
        for i in range(5):
            feeding = lf.ScheduledSampling(lf.Ramp(0.1, 0.9, 4), lf.Sample(seeded(i)), generator=seeded(i))
            whole.ours(feeding.at(i), None)
    finally:
        patch.undo()
    assert len(made) == 1


def test_the_same_generator_gives_the_same_run_and_the_global_one_is_left_alone() -> None:
    before = torch.get_rng_state()
    for name, feeding in itertools.product(PATTERNS, FEEDINGS):
        whole = case(name, lf.Classes(SIZE), None)
        torch.set_rng_state(before)
        one, same = (whole.ours(FEEDINGS[feeding](lf.Sample(seeded(5))), None) for _ in range(2))
        assert torch.equal(one, same)
        assert torch.equal(torch.get_rng_state(), before)


def test_padding_of_targets_may_hold_anything() -> None:
    for name in PATTERNS:
        whole = case(name, lf.Classes(SIZE), None)
        for feeding in (lf.TeacherForcing(), lf.GeneralisedTeacherForcing(0.5)):
            ours = whole.ours(feeding, LENGTHS)
            ended = torch.arange(TAU)[:, None] >= torch.tensor(LENGTHS)
            assert not ours[ended].any()
    model = lf.VectorToSequence(lf.GRU(2 + SIZE, 5), lf.Classes(SIZE))
    x, y = torch.randn(BATCH, 2), torch.randint(SIZE, (TAU, BATCH))
    padded = y.masked_fill(torch.arange(TAU)[:, None] >= torch.tensor(LENGTHS), -100)
    real = lf.VectorToSequence(lf.GRU(2 + SIZE, 5), lf.Reals(SIZE))
    z = torch.randn(TAU, BATCH, SIZE)
    bad = z.masked_fill((torch.arange(TAU)[:, None] >= torch.tensor(LENGTHS))[..., None], torch.nan)
    for other in (lf.TeacherForcing(), lf.GeneralisedTeacherForcing(0.5), lf.ScheduledSampling(0.0)):
        assert torch.equal(model(x, padded, other, lengths=LENGTHS), model(x, y, other, lengths=LENGTHS))
        assert torch.equal(real(x, bad, other, lengths=LENGTHS), real(x, z, other, lengths=LENGTHS))


# ------------------------------------------------------------------ what surrounds it


def test_runs_have_the_states_of_the_layer() -> None:
    """As the plain loop has them: states, last, hidden, and outputs where there are some."""
    x = randn(3, 2)
    model = lf.VectorToSequence(lf.Stacked([lf.GRU(2 + SIZE, 5), lf.LSTM(5, 4)]), SIZE).double()
    run = model.predict(x, feeding=lf.FreeRunning(), steps=6, lengths=[6, 2, 3]).run
    assert [tuple(leaf.shape) for leaf in leaves(run.states)] == [(6, 3, 5), (6, 3, 4), (6, 3, 4)]
    assert run.hidden is run.states[1].h
    assert_same(run.last_hidden[1], run.hidden[1, 1])
    assert run.outputs is None
    found = lf.AttentionDecoder(lf.GRU(2, 5), lf.GRU(SIZE + 5, 4), SIZE).double()
    free = found.predict(randn(4, 3, 2), feeding=lf.FreeRunning(), steps=6, lengths=[4, 1, 2])
    assert free.run.outputs is not None
    assert free.run.outputs.weights.shape == (6, 3, 4)
    again = model.predict(x, feeding=lf.FreeRunning(), steps=2, state=run.last)
    assert again.o.shape == (2, 3, SIZE)
    with pytest.raises(ValueError, match="Stacked has 2 layers, so it needs 2 states; got 1"):
        model(x, feeding=lf.FreeRunning(), steps=2, state=(run.last[0],))


def test_a_copy_of_a_model_has_steps_of_its_own() -> None:
    model = lf.VectorToSequence(lf.GRU(2 + SIZE, 5), SIZE).double()
    x = randn(3, 2)
    before = model(x, feeding=lf.FreeRunning(), steps=40)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.readout.V.mul_(2)
    assert not torch.allclose(other(x, feeding=lf.FreeRunning(), steps=40), before)
    assert_same(model(x, feeding=lf.FreeRunning(), steps=40), before)
    assert set(model.state_dict()) == set(other.state_dict())
    model.readout = other.readout  # another readout is another step
    assert_same(model(x, feeding=lf.FreeRunning(), steps=40), other(x, feeding=lf.FreeRunning(), steps=40))


def test_a_plain_function_as_the_recurrence_runs_as_it_stands() -> None:
    scale = [0.5]
    model = lf.VectorToSequence(lf.Recurrent(Plain(scale)), SIZE)
    x = torch.randn(3, 2)
    first = model(x, feeding=lf.FreeRunning(), steps=40)
    scale[0] = 0.1
    assert not torch.allclose(model(x, feeding=lf.FreeRunning(), steps=40), first)


class Plain:
    """No module: it may read something else at every call."""

    def __init__(self, scale: list[float]) -> None:
        self.scale = scale

    def __call__(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.scale[0] * h + x.sum(-1, keepdim=True))

    def initial_state(self, batch: int) -> Tensor:
        return torch.zeros(batch, 4)


class Counts(lf.Transition):
    """A step that asks for its number."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.U, self.n = nn.Linear(n_in, n), n

    def forward(self, h: Tensor, x: Tensor, t: Tensor) -> Tensor:
        return torch.tanh(self.U(x) + 0.5 * h + 0.1 * t)

    def initial_state(self, batch: int) -> Tensor:
        return torch.zeros(batch, self.n, dtype=f64)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
def test_a_step_that_asks_for_its_number_gets_it(engine: lf.Engine) -> None:
    model = lf.VectorToSequence(Counts(2 + SIZE, 5), SIZE, engine=engine).double()
    x = randn(3, 2)
    free = model(x, feeding=lf.FreeRunning(lf.Greedy()), steps=9)
    assert_same(model(x, free.argmax(-1)), free)  # forced to write what it wrote, it writes the same


def test_dropout_between_layers_falls_anew_at_every_step() -> None:
    layers = [lf.Elman(1 + 1, 400), lf.Elman(400, 400)]
    for dropout in (0.5, lf.VariationalDropout(0.5)):
        model = lf.VectorToSequence(lf.Stacked(layers, dropout), lf.Reals(1))
        torch.manual_seed(0)
        one, other = (model(torch.ones(2, 1), feeding=lf.FreeRunning(), steps=20) for _ in range(2))
        assert not torch.allclose(one, other)
        assert not torch.allclose(one[:, 0], one[:, 1])
        model.eval()
        one, other = (model(torch.ones(2, 1), feeding=lf.FreeRunning(), steps=20) for _ in range(2))
        assert torch.equal(one, other)


# ------------------------------------------------------------------ forecasts


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("lengths", [None, [6, 1, 4]])
def test_a_forecast_is_the_plain_loop(engine: lf.Engine, lengths: list[int] | None) -> None:
    model = lf.SequenceToSequence(lf.Stacked([lf.GRU(2 + 1, 5), lf.LSTM(5, 4)], engine=engine), lf.Reals(2)).double()
    past, known = randn(6, 3, 3).requires_grad_(), randn(8, 3, 1).requires_grad_()
    found = model.forecast(past, 8, known, lengths=lengths)
    run = model.recurrent(past, None, lengths)
    state, os = run.last, [model.readout(run.last_hidden)]
    for t in range(7):
        step = model.recurrent(torch.cat([os[-1], known[t]], -1)[None], state)
        state = step.last
        os.append(model.readout(step.hidden[0]))
    theirs = torch.stack(os)
    assert_same(found.o, theirs)
    weights, sources = randn(*theirs.shape), [past, known, *model.parameters()]
    ours, needed = (torch.autograd.grad((o * weights).sum(), sources, retain_graph=True) for o in (found.o, theirs))
    assert_same(ours, needed)
    assert_same(model.forecast(past, 1, known[:1], lengths=lengths).o, theirs[:1])


def test_a_forecast_of_classes_reads_what_was_picked() -> None:
    model = lf.SequenceToSequence(lf.GRU(4, 5), 4).double()
    x = F.one_hot(torch.randint(4, (6, 3)), 4).to(f64)
    o = model.forecast(x, 9, pick=lf.Greedy()).o
    again = torch.cat([x, F.one_hot(o.argmax(-1), 4).to(f64)[:-1]])
    assert_same(model(again)[5:], o)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"known": None},
            r"x has 3 features and outputs are of size 2, so a forecast of 4 steps needs known=\[4, 5, 1\]",
        ),
        ({"known": torch.zeros(3, 5, 1)}, r"needs known=\[4, 5, 1\]; got known \(3, 5, 1\)"),
        ({"known": torch.zeros(4, 5, 2)}, r"got known \(4, 5, 2\)"),
        ({"steps": 0}, "at least one step"),
    ],
)
def test_forecasts_that_cannot_be(options: dict[str, Any], words: str) -> None:
    model, x = lf.SequenceToSequence(lf.GRU(3, 5), lf.Reals(2)), torch.randn(6, 5, 3)
    with pytest.raises(ValueError, match=words):
        model.forecast(x, **{"steps": 4, "known": torch.zeros(4, 5, 1), **options})
    both = lf.SequenceToSequence(lf.Bidirectional(lf.GRU(3, 5), lf.GRU(3, 5)), lf.Reals(3))
    with pytest.raises(ValueError, match="cannot be read backwards"):
        both.forecast(x, 4)
    with pytest.raises(ValueError, match="x must have 4 features or more"):
        lf.SequenceToSequence(lf.GRU(3, 5), lf.Reals(4)).forecast(x, 4)


def test_replace_keeps_what_a_feeding_is() -> None:
    """A feeding is still a plain frozen record."""
    feeding = lf.ScheduledSampling(0.5, lf.Sample(seeded(), top_k=2))
    assert replace(feeding, p=0.25).probability == 0.25
    assert feeding.undrawn(lf.Classes(3)) == lf.ScheduledSampling(0.0, lf.Sample(top_k=2))


# ------------------------------------------------------------------ layers of one's own


class Tripled(lf.Recurrent):
    """A layer whose `forward` has a say in what is read above it."""

    def forward(self, *args: Any, **options: Any) -> Any:
        run = super().forward(*args, **options)
        return replace(run, hidden=3 * run.hidden, last_hidden=3 * run.last_hidden)


class Backed(lf.Stacked):
    def forward(self, *args: Any, **options: Any) -> Any:
        run = super().forward(*args, **options)
        return replace(run, hidden=-run.hidden, last_hidden=-run.last_hidden)


def decoders() -> dict[str, Any]:
    n = 2 * SIZE
    return {
        "subclass": Tripled(lf.LSTM(n, 5)),
        "stack": Backed([lf.GRU(n, 5), lf.LSTM(5, 4)]),
        "below": lf.Stacked([Tripled(lf.GRU(n, 5)), lf.LSTM(5, 4)]),
        "on top": lf.Stacked([lf.GRU(n, 5), Tripled(lf.LSTM(5, 4))]),
    }


def fed_by_hand(model: Any, x: Tensor, y: Tensor, feeding: Feeding) -> Tensor:
    """The plain loop, which calls the layer itself."""
    start = torch.zeros(len(x), SIZE, dtype=x.dtype)
    return plain_loop(
        lambda fed, state: one_step(model.recurrent, torch.cat([x, fed], -1), state),
        model.readout,
        model.outputs,
        start,
        feeding,
        y,
    )


@pytest.mark.parametrize("engine", [None, *ENGINES], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", ["subclass", "stack", "below", "on top"])
@pytest.mark.filterwarnings("ignore::loopfold.EngineWarning")
def test_the_forward_of_a_layer_is_called(name: str, engine: lf.Engine | None) -> None:
    torch.manual_seed(0)
    x, y = randn(BATCH, SIZE), torch.randint(SIZE, (TAU, BATCH))
    for feeding in (lf.FreeRunning(), lf.GeneralisedTeacherForcing(0.3)):
        model = lf.VectorToSequence(decoders()[name], SIZE, engine=engine).double()
        whole = Case(model, lambda f, _: model(x, y, f), lambda f: fed_by_hand(model, x, y, f), [])  # noqa: B023
        ours, theirs = whole.ours(feeding, None), whole.theirs(feeding)
        assert_same(found_by(ours, whole, None), found_by(theirs, whole, None))
        run = model.predict(x, y, feeding).run
        assert_same(model.readout(run.hidden), ours)


@pytest.mark.filterwarnings("ignore::loopfold.EngineWarning")
def test_hooks_on_a_layer_are_called() -> None:
    x, y = randn(BATCH, SIZE), torch.randint(SIZE, (TAU, BATCH))
    for engine in (None, *ENGINES):
        model: Any = lf.VectorToSequence(lf.GRU(2 * SIZE, 5), SIZE, engine=engine).double()
        model(x, y, lf.FreeRunning())  # compiled, where it is
        calls: list[int] = []

        def doubled(layer: Any, args: Any, run: Any) -> Any:
            calls.append(1)  # noqa: B023
            return replace(run, hidden=2 * run.hidden)

        hook = model.recurrent.register_forward_hook(doubled)
        ours = model(x, y, lf.FreeRunning())
        assert len(calls) >= TAU
        assert_same(ours, fed_by_hand(model, x, y, lf.FreeRunning()))
        hook.remove()
        assert_same(model(x, y, lf.FreeRunning()), fed_by_hand(model, x, y, lf.FreeRunning()))
    attending: Any = case("AttentionDecoder", lf.Classes(SIZE), None)
    attending.model.recurrent.register_forward_hook(lambda layer, args, run: replace(run, hidden=2 * run.hidden))
    assert_same(attending.ours(lf.FreeRunning(), None), attending.theirs(lf.FreeRunning()))


class Timed(nn.Module):
    """A transition that reads the number of the step."""

    def __init__(self, n_in: int) -> None:
        super().__init__()
        self.W = nn.Linear(n_in, 4)

    def forward(self, h: Tensor, x: Tensor, t: Any) -> Tensor:
        return torch.tanh(self.W(x) + h) + 0.1 * t

    def initial_state(self, batch: int) -> Tensor:
        return torch.zeros(batch, 4, dtype=self.W.weight.dtype)


@pytest.mark.parametrize("feeding", FEEDINGS)
@pytest.mark.parametrize("engine", [None, *ENGINES], ids=lambda e: type(e).__name__)
def test_a_transition_may_read_the_number_of_the_step(feeding: str, engine: lf.Engine | None) -> None:
    torch.manual_seed(0)
    x, y = randn(5, BATCH, SIZE), torch.randint(SIZE, (TAU, BATCH))
    for pick in (lf.Soft, lambda: lf.Sample(seeded(1))):
        model: Any = lf.VectorToSequence(Timed(2 * SIZE), SIZE, engine=engine).double()
        cell, count = model.recurrent.cell, itertools.count()

        def step(fed: Tensor, state: Any) -> tuple[Tensor, Any]:
            h = cell.initial_state(BATCH) if state is None else state  # noqa: B023
            h = cell(h, torch.cat([x[0], fed], -1), next(count))  # noqa: B023
            return h, h

        start = torch.zeros(BATCH, SIZE, dtype=f64)
        theirs = plain_loop(step, model.readout, model.outputs, start, FEEDINGS[feeding](pick()), y)
        assert_same(model(x[0], y, FEEDINGS[feeding](pick())), theirs)
        two: Any = lf.EncoderDecoder(lf.GRU(SIZE, 5), Timed(5 + SIZE), SIZE, engine=engine).double()
        assert_same(
            two(x, y, FEEDINGS[feeding](pick())),
            two.decoder(two.encoder(x).last_hidden, y, FEEDINGS[feeding](pick())),
        )


def test_a_layer_that_is_called_for_each_step_cannot_number_them() -> None:
    model: Any = lf.VectorToSequence(Tripled(Timed(2 * SIZE)), SIZE)
    with pytest.raises(ValueError, match="Timed reads the number of the step, but its layer has hooks or a forward"):
        model(torch.randn(BATCH, SIZE), feeding=lf.FreeRunning(), steps=3)


# ------------------------------------------------------------------ draws


def assert_even(first: int, draws: int) -> None:
    """χ² of two equal classes, one degree of freedom: above 15 once in ten thousand times."""
    assert 4 * (first - draws / 2) ** 2 / draws < 15


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", [None, lf.Sequential(), lf.Looped()], ids=lambda e: type(e).__name__)
@pytest.mark.filterwarnings("ignore::loopfold.EngineWarning")
def test_draws_are_fair_in_half_precision(dtype: torch.dtype, engine: lf.Engine | None) -> None:
    """At a logit of 50, sums with noise in half precision would be equal again and again."""
    o = torch.full((50_000, 2), 50.0, dtype=dtype)
    for pick in (lf.Sample(seeded(0)), lf.Sample(seeded(1), temperature=0.7), lf.Sample(seeded(2), top_k=2, top_p=0.9)):
        own = lf.FreeRunning(pick).next(o, None, lf.Classes(2))
        assert own.dtype == dtype
        assert_even(int(own[:, 0].float().sum()), len(o))
        drawn = lf.Classes(2).sample(o, seeded(3))
        assert drawn.dtype == dtype
        assert_even(int(drawn[:, 0].float().sum()), len(o))
    model: Any = lf.VectorToSequence(lf.GRU(2 + 2, 3), 2, engine=engine).to(dtype)
    with torch.no_grad():
        model.readout.V.zero_()
        model.readout.c.fill_(50.0)
        for feeding in (lf.FreeRunning(lf.Sample(seeded(4))), lf.ScheduledSampling(1.0, lf.Sample(seeded(5)))):
            y = torch.zeros(30, 2000, dtype=torch.long)
            network = (model.recurrent, model.readout, model.outputs)
            start, x = torch.zeros(2000, 2, dtype=dtype), torch.ones(2000, 2, dtype=dtype)
            found = run_fed(model, network, start, y, feeding, 30, engine=engine or lf.Auto(), context=x)
            assert found.o.dtype == found.feds.dtype == dtype
            assert_even(int(found.feds[..., 0].float().sum()), 60_000)


@pytest.mark.filterwarnings("ignore::loopfold.EngineWarning")
def test_nothing_is_drawn_from_what_is_no_number() -> None:
    x, y = torch.randn(BATCH, SIZE), torch.randint(SIZE, (TAU, BATCH))
    for engine, bad in itertools.product((None, *ENGINES), (torch.nan, torch.inf)):
        model: Any = lf.VectorToSequence(lf.GRU(2 * SIZE, 5), SIZE, engine=engine)
        with torch.no_grad():
            model.readout.c[1] = bad
        for feeding in FEEDINGS.values():
            with pytest.raises(FloatingPointError, match="an output is not a finite number"):
                model(x, y, feeding(lf.Sample()))
            assert model(x, y, feeding(lf.Greedy())).shape == (TAU, BATCH, SIZE)


@pytest.mark.parametrize("engine", [lf.Looped(), lf.FusedCPU()], ids=lambda e: type(e).__name__)
def test_annealing_compiles_nothing_again(engine: lf.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """α and the temperature are numbers that a compiled step reads: one program serves all of them."""
    from loopfold.engines import programs

    made: list[Any] = []
    original = programs._compile

    def compiled(graph: Any) -> Any:
        made.append(graph)
        return original(graph)

    monkeypatch.setattr(programs, "_compile", compiled)
    schedules: list[Callable[[float], Feeding]] = [
        lf.GeneralisedTeacherForcing,
        lambda share: lf.FreeRunning(lf.Sample(seeded(7), temperature=0.5 + share)),
        lambda share: lf.ScheduledSampling(share, lf.Sample(seeded(7), temperature=0.5 + share), generator=seeded(8)),
        lambda share: lf.GeneralisedTeacherForcing(share, lf.Sample(seeded(7), temperature=0.5 + share, top_p=0.8)),
    ]
    for schedule in schedules:
        whole = case("VectorToSequence", lf.Classes(SIZE), engine)
        made.clear()
        for i in range(30):
            ours, theirs = whole.ours(schedule(i / 29), None), whole.theirs(schedule(i / 29))
            assert_same(found_by(ours, whole, None), found_by(theirs, whole, None))
        assert len(made) == 2  # the step that is fed, and the layer alone, in the plain loop


def test_a_run_keeps_its_alpha_until_its_gradients_are_there() -> None:
    whole = case("VectorToSequence", lf.Reals(SIZE), None)
    feedings = [lf.GeneralisedTeacherForcing(alpha) for alpha in (0.2, 0.9)]
    both = [whole.ours(feeding, None) for feeding in feedings]
    for o, feeding in zip(both, feedings, strict=True):
        assert_same(found_by(o, whole, None), found_by(whole.theirs(feeding), whole, None))


# ------------------------------------------------------------------ what is refused, and where t goes on


@pytest.mark.parametrize("pick", ["greedy", lf.FreeRunning(), lf.Greedy, None], ids=str)
def test_a_pick_that_is_none_is_refused(pick: Any) -> None:
    model = lf.SequenceToSequence(lf.GRU(2, 4), lf.Reals(2))
    attempts: list[Callable[[], Any]] = [
        lambda: model.forecast(torch.randn(5, 1, 2), 3, pick=pick),
        lambda: lf.FreeRunning(pick),
        lambda: lf.ScheduledSampling(0.5, pick),
        lambda: lf.GeneralisedTeacherForcing(0.5, pick),
    ]
    for attempt in attempts:
        with pytest.raises(TypeError, match=r"pick must be an object such as lf.Soft\(\) or lf.Greedy\(\); got"):
            attempt()


class OwnPredict(lf.SequenceToSequence):
    def predict(self, *args: Any, **options: Any) -> Any:
        found = super().predict(*args, **options)
        return replace(found, o=2 * found.o)


def test_forecasts_of_tokens_and_by_another_predict_are_refused() -> None:
    with pytest.raises(ValueError, match="OwnPredict has a predict of its own"):
        OwnPredict(lf.GRU(2, 4), lf.Reals(2)).forecast(torch.randn(5, 1, 2), 3)
    model = lf.SequenceToSequence(lf.Embedded(lf.GRU(4, 4), nn.Embedding(5, 4)), 5)
    for batch in (2, 5):
        with pytest.raises(ValueError, match=r"this network reads tokens. Type lf.generate"):
            model.forecast(torch.randint(5, (6, batch)), 3)


@pytest.mark.parametrize("lengths", [None, [6, 1, 4]])
@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
def test_in_a_forecast_t_goes_on(engine: lf.Engine, lengths: list[int] | None) -> None:
    """Each sequence by itself: read the past and all outputs so far, from the start, for the next output."""
    torch.manual_seed(0)
    model = lf.SequenceToSequence(Timed(SIZE), lf.Reals(SIZE), engine=engine).double()
    x = randn(6, 3, SIZE)
    found = model.forecast(x, 5, lengths=lengths).o
    for i in range(3):
        read = x[: lengths[i] if lengths else 6, i : i + 1]
        for t in range(5):
            o = model(read)[-1:]
            assert_same(found[t, i], o[0, 0])
            read = torch.cat([read, o])


class Aside(lf.Transition):
    """A step that gives one tensor beside its state."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Linear(5 + 4, 5)

    def initial_state(self, batch: int) -> Tensor:
        return self.W.weight.new_zeros(batch, 5)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.W(torch.cat([h, x], -1)))
        return 2 * h[:, :3], h


@pytest.mark.parametrize("engine", [lf.Sequential(), lf.Looped(), lf.FusedCPU()], ids=str)
def test_a_step_that_gives_a_tensor_beside_its_state(engine: lf.Engine) -> None:
    cell, x = Aside().double(), torch.randn(3, 2, dtype=torch.float64)
    model = lf.VectorToSequence(cell, outputs=lf.Reals(2), engine=engine).double()
    found = model.predict(x, feeding=lf.FreeRunning(), steps=12)
    h, fed, os = cell.initial_state(3), x.new_zeros(3, 2), []
    for _ in range(12):
        given, h = cell(h, torch.cat([x, fed], -1))
        fed = model.readout(given)
        os.append(fed)
    torch.testing.assert_close(found.o, torch.stack(os))
    torch.testing.assert_close(found.run.outputs, found.run.hidden)
    torch.testing.assert_close(found.run.last, h)
