"""Dropout of weights, words and inputs, and penalties: what each does, in training and not in evaluation."""

from collections.abc import Callable

import pytest
import torch
from helpers import randn
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

import loopfold as lf
from loopfold.language.recurrent import ActivationPenalty, RecurrentLM, recurrent_lm

KINDS, N = 11, 6


# ------------------------------------------------------------------ weights


@pytest.fixture(params=[lf.Elman, lf.LSTM, lf.GRU], ids=lambda kind: kind.__name__)
def layer(request: pytest.FixtureRequest) -> lf.Recurrent:
    layer = lf.Recurrent(request.param(3, 5).double(), lf.FusedCPU())
    register_parametrization(layer.cell, "W", lf.WeightDrop(0.4))  # type: ignore[arg-type]
    return layer.double()


def weights(layer: lf.Recurrent) -> Tensor:
    return layer.get_parameter("cell.parametrizations.W.original")


def mask(layer: lf.Recurrent) -> Tensor:
    return layer.get_buffer("cell.parametrizations.W.0.mask")


def test_all_steps_of_a_run_have_the_same_weights_and_the_next_run_others(layer: lf.Recurrent) -> None:
    x, masks = randn(7, 2, 3), []
    for _ in range(3):
        found = layer(x).hidden
        masks.append(mask(layer))
        expected = lf.unfold(layer.cell, x, engine=lf.Sequential()).hidden  # whose every step reads cell.W again
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(h.sum(), [*layer.parameters()]) for h in (found, expected)]
        torch.testing.assert_close(*gradients)
        of_W = dict(zip(dict(layer.named_parameters()), gradients[0], strict=True))["cell.parametrizations.W.original"]
        assert bool((of_W[masks[-1] == 0] == 0).all())  # what is silent learns nothing
    assert not masks[0].equal(masks[1])
    assert {*masks[0].unique().tolist()} <= {0.0, 1 / 0.6}


def test_two_runs_may_wait_for_their_way_back(layer: lf.Recurrent) -> None:
    x, expected = randn(7, 2, 3), torch.zeros_like(weights(layer))
    first = layer(x).hidden
    kept = [mask(layer)]
    second = layer(2 * x).hidden
    kept.append(mask(layer))
    (first.sum() + second.sum()).backward()
    for scale, own in zip((1, 2), kept, strict=True):
        layer.get_submodule("cell.parametrizations.W.0").mask = own
        h = lf.unfold(layer.cell, scale * x, engine=lf.Sequential()).hidden
        expected += torch.autograd.grad(h.sum(), weights(layer))[0]
    torch.testing.assert_close(weights(layer).grad, expected)


def test_evaluation_has_all_weights(layer: lf.Recurrent) -> None:
    x = randn(7, 2, 3)
    layer(x)
    layer.eval()
    plain = type(layer.cell).__mro__[1](3, 5).double()
    state = {
        k.removeprefix("cell.").replace("parametrizations.W.original", "W"): v for k, v in layer.state_dict().items()
    }
    plain.load_state_dict(state)
    torch.testing.assert_close(layer(x).hidden, lf.unfold(plain, x).hidden)


def test_nothing_is_drawn_in_evaluation() -> None:
    """Not by generation either, whose loop is a layer of its own."""
    model = made(weight_drop=0.5).eval()
    before = torch.get_rng_state()
    with torch.inference_mode():
        model.write(model.initial_context(2), 3, lf.Greedy(), None, None)
    assert torch.get_rng_state().equal(before)
    assert model.network.get_buffer("recurrent.layers.0.cell.cell.parametrizations.W.0.mask").dim() == 0


def test_after_other_parametrizations() -> None:
    layer = lf.Recurrent(lf.LSTM(3, 5))
    nn.utils.parametrizations.weight_norm(layer.cell, "W")  # type: ignore[arg-type]
    register_parametrization(layer.cell, "W", lf.WeightDrop(0.5))  # type: ignore[arg-type]
    layer(torch.ones(7, 2, 3)).hidden.sum().backward()
    W = torch.as_tensor(layer.get_submodule("cell").W)
    assert 0.2 < float((W == 0).double().mean()) < 0.8


def test_a_cell_that_is_there_twice_is_dropped_once() -> None:
    cell = lf.LSTM(N, N)
    recurrent_lm(KINDS, [cell, cell], N, weight_drop=0.5)
    assert len(cell.parametrizations.W) == 1  # type: ignore[union-attr, arg-type]


def test_what_cannot_be_done_with_dropped_weights() -> None:
    cell = lf.Elman(3, 5)
    register_parametrization(cell, "W", lf.WeightDrop(0.5))
    with pytest.raises(TypeError, match="Elman has parametrizations, which torch's networks have not"):
        lf.to_torch(lf.Recurrent(cell))
    with pytest.raises(TypeError, match="with tanh; got ParametrizedElman"):
        lf.bptt(lf.SequenceToSequence(cell, 4), torch.ones(7, 2, 3), torch.zeros(7, 2, dtype=torch.int64))


def test_numbers_are_no_tokens() -> None:
    layer = lf.Recurrent(lf.Embedded(lf.Elman(3, 5), nn.Embedding(10, 3)))
    with pytest.raises(ValueError, match="could not take its first step"):
        layer(torch.randint(10, (7, 3)).float())


def test_how_many_are_dropped() -> None:
    drop = lf.WeightDrop(0.3)
    drop.draw(torch.empty(300, 300))
    assert float((drop.mask == 0).double().mean()) == pytest.approx(0.3, abs=0.01)
    assert float(drop.mask.mean()) == pytest.approx(1, abs=0.02)


def test_a_mask_is_no_part_of_what_is_saved(layer: lf.Recurrent) -> None:
    layer(randn(7, 2, 3))
    assert not any("mask" in name for name in layer.state_dict())


def test_it_is_compiled_and_called_by_its_name(layer: lf.Recurrent) -> None:
    said = layer.explain(randn(70, 2, 3))
    assert said.startswith(type(layer.cell).__mro__[1].__name__)
    assert "FusedCPU" in said


# ------------------------------------------------------------------ in a language model


def made(**options: float | bool | None) -> RecurrentLM:
    torch.manual_seed(1)
    return recurrent_lm(KINDS, [lf.LSTM(N, N), lf.LSTM(N, N)], N, **options).double()  # type: ignore[arg-type]


TOKENS = torch.tensor([[1, 2, 3], [2, 2, 1], [1, 5, 3], [1, 2, 2]])


def read(model: RecurrentLM, seen: list[Tensor]) -> None:
    model.network.recurrent.register_forward_pre_hook(lambda module, given: seen.append(given[0][0]))
    model(TOKENS, model.initial_context(3))


def test_a_word_is_silent_wherever_it_stands() -> None:
    model, seen = made(embedding_dropout=0.5), list[Tensor]()
    read(model, seen)
    table = model.network.get_parameter("recurrent.layers.0.cell.embedding.weight")
    x = torch.cat([torch.full((1, 3), KINDS), TOKENS[:-1]])
    ratios = (seen[0] / table[x]).detach()
    for word in x.unique():
        first = float(ratios[x == word][0, 0])
        torch.testing.assert_close(ratios[x == word], torch.full_like(ratios[x == word], first))
        assert first in (pytest.approx(0), pytest.approx(2))


def test_a_mask_on_what_is_read_is_the_same_over_a_window() -> None:
    for variational in (True, False):
        model, seen = made(input_dropout=0.5, variational=variational), list[Tensor]()
        read(model, seen)
        silent = seen[0] == 0
        assert bool((silent == silent[0]).all()) == variational
        assert 0.2 < float(silent.double().mean()) < 0.8


@pytest.mark.parametrize(("between", "before"), [(0.5, None), (0.5, 0.0), (0.0, 0.5)])
def test_the_readout_may_have_a_dropout_of_its_own(between: float, before: float | None) -> None:
    model, seen = made(dropout=between, output_dropout=before), list[Tensor]()
    model.network.get_submodule("recurrent.layers.1").register_forward_pre_hook(
        lambda layer, given: seen.append(given[0])
    )
    read = model(TOKENS, model.initial_context(3)).hidden
    assert read is not None
    assert [bool((x == 0).any()) for x in (seen[0], read)] == [between > 0, (between if before is None else before) > 0]


EVERYTHING: dict[str, float | bool] = {
    "dropout": 0.3,
    "output_dropout": 0.4,
    "input_dropout": 0.3,
    "embedding_dropout": 0.2,
    "weight_drop": 0.4,
    "activation_penalty": 2.0,
    "change_penalty": 1.0,
    "variational": True,
    "tied": True,
}


def test_evaluation_knows_nothing_of_it() -> None:
    model, plain = made(**EVERYTHING).eval(), made(tied=True).eval()
    state = {name.replace("parametrizations.W.original", "W"): t for name, t in model.state_dict().items()}
    plain.load_state_dict(state)
    found, expected = (m(TOKENS, m.initial_context(3)) for m in (model, plain))
    torch.testing.assert_close(found.nll, expected.nll)
    assert found.penalty is None
    assert lf.perplexity(model, TOKENS[:, 0]).nll == pytest.approx(lf.perplexity(plain, TOKENS[:, 0]).nll)


def test_the_same_seed_drops_the_same() -> None:
    model, found = made(**EVERYTHING), []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        found.append(model(TOKENS, model.initial_context(3)).nll)
    assert found[0].equal(found[1])
    assert not found[0].equal(found[2])


@pytest.mark.parametrize("lengths", [None, [4, 1, 3]], ids=str)
def test_penalties_are_their_formulas(lengths: list[int] | None) -> None:
    h, dropped = randn(4, 3, 5), randn(4, 3, 5)
    ends = lengths or [4, 4, 4]
    there = [(t, i) for i in range(3) for t in range(ends[i])]
    activation = torch.stack([dropped[t, i] for t, i in there]).square().mean()
    change = torch.stack([h[t, i] - h[t - 1, i] for t, i in there if t]).square().mean()
    given = None if lengths is None else torch.tensor(lengths)
    torch.testing.assert_close(ActivationPenalty(2, 3)(h, dropped, given), 2 * activation + 3 * change)
    assert float(ActivationPenalty(0, 3)(h[:1], dropped[:1], None)) == 0
    many = torch.full((70, 64, 40), 2.0, dtype=torch.float16)
    assert float(ActivationPenalty(1, 0)(many, many, torch.full((64,), 70))) == 4


def test_a_penalty_is_of_the_last_layer() -> None:
    model, hidden = made(activation_penalty=1.0), list[Tensor]()
    model.network.recurrent.register_forward_hook(lambda module, given, run: hidden.append(run.hidden))
    scored = model(TOKENS, model.initial_context(3))
    assert scored.penalty is not None
    torch.testing.assert_close(scored.penalty, hidden[0].square().mean())


@pytest.mark.parametrize("kind", [lf.VariationalDropout, lf.WeightDrop, lf.EmbeddingDropout])
def test_no_probability(kind: Callable[[float], nn.Module]) -> None:
    for p in (-0.1, 1.0, 7):
        with pytest.raises(ValueError, match=r"dropout is a probability from 0 up to but not including 1; got"):
            kind(p)


def test_one_hot_vectors_have_no_embedding() -> None:
    network = lf.SequenceToSequence(lf.Elman(KINDS, 3), KINDS)
    with pytest.raises(ValueError, match="one-hot vectors are no embeddings"):
        RecurrentLM(network, embedding_dropout=lf.EmbeddingDropout(0.1))
