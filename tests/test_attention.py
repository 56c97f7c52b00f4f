"""AttentionDecoder: additive attention by its equations, masked after a source's end, under every feeding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_same, gradients, randn
from torch import Tensor

import loopfold as lf

pytestmark = pytest.mark.usefixtures("one_thread")
f64 = torch.float64


def model(decoder: str = "GRU") -> lf.AttentionDecoder:
    cells = {"GRU": lf.GRU(4 + 5, 6), "LSTM": lf.LSTM(4 + 5, 6)}
    return lf.AttentionDecoder(lf.GRU(3, 5), cells[decoder], outputs=4, size=7).double()


def by_hand(network: lf.AttentionDecoder, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs [τ, 4] and the weights [τ, places] of one sequence, by the paper's equations (GRU alone)."""
    m = lf.unfold(network.encoder.cell, x[:, None]).hidden[:, 0]  # type: ignore[arg-type]
    Q, K, v = network.attention.Q, network.attention.K, network.attention.v
    s, fed, os, alphas = torch.zeros(1, 6, dtype=f64), torch.zeros(4, dtype=f64), [], []
    for target in y:
        e = torch.stack([v @ torch.tanh(Q @ s[0] + K @ m_j) for m_j in m])
        alphas.append(e.exp() / e.exp().sum())
        c = sum(alpha * m_j for alpha, m_j in zip(alphas[-1], m, strict=True))
        s = network.attention.cell(s, torch.cat([fed, c])[None])
        os.append(network.c + network.V @ s[0])
        fed = torch.nn.functional.one_hot(target, 4).double()
    return torch.stack(os), torch.stack(alphas)


def test_it_follows_the_equations_for_sources_of_any_length() -> None:
    network, x, y, lengths = model(), randn(7, 3, 3), torch.randint(4, (5, 3)), [7, 2, 4]
    found = network.predict(x, y, lengths=lengths)
    outputs = found.run.outputs
    assert outputs is not None
    for i, length in enumerate(lengths):
        o, weights = by_hand(network, x[:length, i], y[:, i])
        assert_same(found.o[:, i], o)
        assert_same(outputs.weights[:, i, :length], weights)
        assert not outputs.weights[:, i, length:].any()
    assert_same(outputs.weights.sum(-1), torch.ones(5, 3, dtype=f64))
    assert found.run.hidden is outputs.h


@pytest.mark.parametrize("decoder", ["GRU", "LSTM"])
def test_feedings_agree_where_they_feed_the_same(decoder: str) -> None:
    network, x, y = model(decoder), randn(6, 2, 3), torch.randint(4, (5, 2))
    forced = network.predict(x, y)
    stepwise = network.predict(x, y, lf.ScheduledSampling(0.0))  # the truth, but step by step
    assert_same(stepwise.o, forced.o)
    assert_same(stepwise.run.outputs, forced.run.outputs)
    assert_same(gradients(stepwise.o.square().sum(), network), gradients(forced.o.square().sum(), network))
    free = network(x, feeding=lf.FreeRunning(lf.Greedy()), steps=5)
    assert_same(network(x, free.argmax(-1)), free)  # forced to write what it wrote


def test_every_parameter_has_a_gradient_and_padding_none() -> None:
    network, x, y = model(), randn(6, 2, 3).requires_grad_(), torch.randint(4, (5, 2))
    network.loss(network(x, y, lengths=[6, 3]), y).backward()
    assert all(p.grad is not None and p.grad.any() for p in network.parameters())
    assert x.grad is not None
    assert x.grad[:3].any()
    assert not x.grad[3:, 1].any()


def test_it_learns_and_is_explained() -> None:
    torch.manual_seed(0)
    network = lf.AttentionDecoder(lf.Bidirectional(lf.GRU(4, 8), lf.GRU(4, 8)), lf.GRU(4 + 16, 16), outputs=4)
    y = torch.randint(4, (6, 64))
    x = torch.nn.functional.one_hot(y, 4).float()
    before = network.loss(network(x, y), y)
    lf.fit(network, [(x, y)] * 60, 60, optimiser=torch.optim.Adam(network.parameters(), lr=0.02))
    assert network.loss(network(x, y), y) < 0.8 * before
    assert len(network.explain(x, y).split("\n\n")) == 3
    graph = lf.step_graph(
        network.attention, torch.zeros(1, 4), context=network.attention.source(x[..., :1].expand(6, 64, 16), None)
    )
    assert [node.name for node in graph.context] == ["memory", "keys", "mask"]
    shares = lf.per_step_gradients(network, network.loss, x, y)
    assert shares["Q"].shape[0] == 6


def test_where_it_looks_is_drawn() -> None:
    drawing = lf.draw_attention(torch.eye(4)[:3], ["ein", "zwei", "drei"], ["one", "two"])
    assert drawing.title == "Attention of 2 steps over 3 places"
    assert drawing.svg().startswith("<svg")


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: lf.AttentionDecoder(lf.GRU(3, 5), lf.GRU(8, 6), 4), ValueError, "reads 8 features; outputs of 4"),
        (lambda: lf.AttentionDecoder(lf.GRU(3, 5), lf.Recurrent(lf.GRU(9, 6)), 4), TypeError, "needs a transition"),
        (lambda: lf.AttentionDecoder(lf.GRU(3, 5), lf.GRU(9, 6), 4, 0), ValueError, "size"),
        (lambda: model()(randn(6, 2, 3)), ValueError, "how long should the sequence be"),
        (lambda: model()(randn(6, 2, 3), steps=3), ValueError, "needs the targets y"),
        (lambda: model()(randn(6, 2, 3), torch.zeros(3, 4, dtype=torch.long)), ValueError, "y has shape (3, 4)"),
        (lambda: lf.draw(model()), ValueError, "draw its parts"),
        (lambda: lf.draw_attention(torch.ones(3, 2, 4), ["a"], ["b"]), ValueError, "type weights[:, i]"),
        (lambda: lf.draw_attention(torch.ones(3, 2), ["a"] * 3, ["b"]), ValueError, "1 written and 3 read tokens"),
    ],
)
def test_errors_say_what_to_type(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert text in str(raised.value)
