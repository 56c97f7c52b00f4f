"""Readout and losses in pieces against the same in one: values, every gradient, second derivatives, memory."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import loopfold as lf
from loopfold.language import readout
from loopfold.language.base import losses
from loopfold.language.readout import readout_losses
from loopfold.language.recurrent import recurrent_lm

N, KINDS = 5, 23


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(readout.PIECE, "cpu", 4 * KINDS * 4)  # four tokens
    monkeypatch.setattr(readout, "SMALL", 0)


Given = tuple[Tensor, Tensor, Tensor]


def given(tau: int, batch: int, dtype: torch.dtype = torch.float64) -> Given:
    h, V, c = (torch.randn(*size).to(dtype).requires_grad_() for size in ((tau, batch, N), (KINDS, N), (KINDS,)))
    return h, V, c


def plain(h: Tensor, V: Tensor, c: Tensor, y: Tensor, lengths: Tensor | None = None) -> Tensor:
    """The oracle."""
    return losses(c + h @ V.T, y, lengths)


def weighted(kind: str, nll: Tensor) -> Tensor:
    """A loss: of all tokens alike, of some, of each by a weight of its own."""
    torch.manual_seed(3)
    return {
        "sum": lambda: nll.sum(),
        "mean": lambda: 2 * nll.mean(),
        "parts": lambda: nll[: 1 + len(nll) // 2].sum(),
        "weights": lambda: (nll * torch.randn(nll.shape, dtype=nll.dtype)).sum(),
        "none": lambda: 0 * nll.sum(),
    }[kind]()


@pytest.mark.parametrize("kind", ["sum", "mean", "parts", "weights", "none"])
@pytest.mark.parametrize(("tau", "batch"), [(1, 5), (5, 1), (7, 3), (4, 2), (2, 19)])
@pytest.mark.parametrize("ragged", [False, True])
def test_values_and_gradients_are_those_of_one_piece(tau: int, batch: int, ragged: bool, kind: str) -> None:
    tensors, y = given(tau, batch), torch.randint(KINDS, (tau, batch))
    lengths = torch.randint(1, tau + 1, (batch,)) if ragged else None
    found, expected = (f(*tensors, y, lengths) for f in (readout_losses, plain))
    assert type(found.grad_fn).__name__ == "_LossesBackward"
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(weighted(kind, nll), tensors) for nll in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2)], ids=str)
@pytest.mark.parametrize("kind", ["sum", "weights"])
def test_gradients_of_some(needed: tuple[int, ...], kind: str) -> None:
    tensors, y = given(6, 3), torch.randint(KINDS, (6, 3))
    for i, t in enumerate(tensors):
        t.requires_grad_(i in needed)
    sources = [tensors[i] for i in needed]
    gradients = [torch.autograd.grad(weighted(kind, f(*tensors, y)), sources) for f in (readout_losses, plain)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_without_gradients_none_are_computed() -> None:
    tensors, y = given(6, 3), torch.randint(KINDS, (6, 3))
    with torch.no_grad():
        found = readout_losses(*tensors, y)
    assert not found.requires_grad
    torch.testing.assert_close(found, plain(*tensors, y).detach(), rtol=1e-12, atol=1e-12)


def test_a_way_back_may_be_gone_twice() -> None:
    tensors, y = given(6, 3), torch.randint(KINDS, (6, 3))
    loss = 3 * readout_losses(*tensors, y).sum()
    first = [t.clone() for t in torch.autograd.grad(loss, tensors, retain_graph=True)]
    second = torch.autograd.grad(loss, tensors)
    torch.testing.assert_close(list(second), first, rtol=0, atol=0)


def test_gradients_can_be_differentiated() -> None:
    tensors, y = given(3, 2), torch.randint(KINDS, (3, 2))
    assert torch.autograd.gradcheck(lambda h, V, c: readout_losses(h, V, c, y), tensors)
    assert torch.autograd.gradgradcheck(lambda h, V, c: readout_losses(h, V, c, y), tensors)


def test_a_changed_weight_is_noticed() -> None:
    tensors, y = given(6, 3), torch.randint(KINDS, (6, 3))
    loss = readout_losses(*tensors, y).sum()
    with torch.no_grad():
        tensors[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_numbers_of_any_size() -> None:
    """Outputs of ±1e4, -inf where a class is ruled out, NaN and +inf: as in one piece."""
    h, V, c = given(6, 3, torch.float32)
    y = torch.randint(1, KINDS, (6, 3))
    for wrong in (1e4, -torch.inf, torch.nan, torch.inf):
        with torch.no_grad():
            c[0] = wrong
            torch.testing.assert_close(
                readout_losses(h, V, c, y), plain(h, V, c, y), rtol=1e-6, atol=1e-6, equal_nan=True
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_other_precisions_are_no_worse_than_in_one_piece(dtype: torch.dtype) -> None:
    tensors, y = given(9, 4), torch.randint(KINDS, (9, 4))
    rounded = [t.detach().to(dtype).requires_grad_() for t in tensors]
    truth = [t.detach().double().requires_grad_() for t in rounded]

    def figures(f: Callable[..., Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        nll = f(*tensors, y)
        return [t.detach().double() for t in (nll, *torch.autograd.grad(nll.sum(), tensors))]

    exact = figures(plain, truth)
    ours, theirs = (
        max(float((a - b).abs().max()) for a, b in zip(figures(f, rounded), exact, strict=True))
        for f in (readout_losses, plain)
    )
    assert ours <= 1.5 * theirs


def test_autocast() -> None:
    tensors, y = given(9, 4, torch.float32), torch.randint(KINDS, (9, 4))
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (f(*tensors, y) for f in (readout_losses, plain))
    assert ours.dtype == theirs.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for a, b in zip(*(torch.autograd.grad(nll.sum(), tensors) for nll in (ours, theirs)), strict=True):
        assert a.dtype == b.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


def test_wrong_tokens_are_refused() -> None:
    tensors = given(6, 3)
    with pytest.raises(ValueError, match="targets run from"):
        readout_losses(*tensors, torch.full((6, 3), KINDS))


# ------------------------------------------------------------------ in a language model


@pytest.fixture
def model() -> lf.RecurrentLM:
    return recurrent_lm(KINDS, [lf.GRU(N, N)], N, tied=True).double()


def test_a_language_model_reads_out_in_pieces(model: lf.RecurrentLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, lengths = torch.randint(KINDS, (7, 3)), torch.tensor([7, 2, 5])
    parameters = list(model.parameters())
    found = {}
    for small in (0, 1 << 30):
        monkeypatch.setattr(readout, "SMALL", small)
        nll = model(tokens, model.initial_context(3), lengths).nll
        found[small] = [nll.detach(), *torch.autograd.grad(nll.sum(), parameters)]
    torch.testing.assert_close(*found.values(), rtol=1e-12, atol=1e-12)


def test_a_readout_of_another_kind_is_called(model: lf.RecurrentLM) -> None:
    tokens = torch.randint(KINDS, (7, 3))
    seen: list[Tensor] = []
    model.network.readout.register_forward_hook(lambda module, given, o: seen.append(o))
    model(tokens, model.initial_context(3))
    assert [tuple(o.shape) for o in seen] == [(7, 3, KINDS)]
