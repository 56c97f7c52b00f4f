"""Readout and losses in pieces against the same in one: values, every gradient, second derivatives, memory."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

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
    monkeypatch.setattr(readout, "ROWS", 0)


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


def test_rows_that_fill_up_the_table_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where an odd number of classes is slow in half precision."""
    monkeypatch.setattr(readout, "_short", lambda V: -len(V) % 8)
    tensors, y, lengths = given(7, 3), torch.randint(KINDS, (7, 3)), torch.tensor([7, 2, 4])
    found, expected = (f(*tensors, y, lengths) for f in (readout_losses, plain))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for kind in ("sum", "weights"):
        gradients = [torch.autograd.grad(weighted(kind, nll), tensors, retain_graph=True) for nll in (found, expected)]
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


@pytest.mark.parametrize("create_graph", [False, True])
def test_what_is_read_may_depend_on_the_table(create_graph: bool) -> None:
    """As where embedding and readout are one table: no path counts twice."""
    _, V, c = given(1, 1)
    y = torch.randint(KINDS, (4, 5))
    found = [
        torch.autograd.grad(f(torch.tanh(V[:20]).view(4, 5, N), V, c, y).sum(), V, create_graph=create_graph)[0]
        for f in (readout_losses, plain)
    ]
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_many_gradients_at_once() -> None:
    tensors, y = given(4, 3), torch.randint(KINDS, (4, 3))
    many = torch.randn(5, 4, 3, dtype=torch.float64)
    found = [torch.autograd.grad(f(*tensors, y), tensors, many, is_grads_batched=True) for f in (readout_losses, plain)]
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # which torch itself calls
def test_forward_mode() -> None:
    (h, V, c), y = given(4, 3), torch.randint(KINDS, (4, 3))
    found = []
    for f in (readout_losses, plain):
        with forward_ad.dual_level():
            found.append(forward_ad.unpack_dual(f(forward_ad.make_dual(h, torch.ones_like(h)), V, c, y)).tangent)
    torch.testing.assert_close(*found)


def test_lengths_may_be_used_for_something_else_before_the_way_back() -> None:
    tensors, y, found = given(4, 3), torch.randint(KINDS, (4, 3)), []
    for f in (readout_losses, plain):
        lengths = torch.tensor([4, 4, 2])
        nll = f(*tensors, y, lengths)
        lengths.fill_(1)
        found.append(torch.autograd.grad(weighted("weights", nll), tensors))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_tokens_of_any_kind_and_order() -> None:
    tensors, y = given(4, 3), torch.randint(KINDS, (3, 4)).T
    expected = plain(*tensors, y)
    for other in (y, y.int(), y.short(), y.to(torch.uint8)):
        torch.testing.assert_close(readout_losses(*tensors, other), expected, rtol=1e-12, atol=1e-12)
    for wrong in (y[:, :2], y[:3], y.float()):
        with pytest.raises((ValueError, TypeError), match=r"y has shape|whole numbers"):
            readout_losses(*tensors, wrong)


def test_buffers_outlive_the_modes_that_they_were_made_in() -> None:
    tensors, y = given(4, 3), torch.randint(KINDS, (4, 3))
    for mode in (torch.inference_mode(), torch.device("meta")):
        readout._kept.buffers.clear()
        with mode:
            readout_losses(*tensors, y)
        readout_losses(*tensors, y).sum().backward()


def test_large_outputs_keep_small_losses() -> None:
    """In single precision 3,000 has no room for a loss of 1e-5 beside it."""
    o = torch.full((KINDS,), 3000.0)
    o[0] += 12
    h, V, y = torch.zeros(4, 3, N), torch.zeros(KINDS, N), torch.zeros(4, 3, dtype=torch.int64)
    torch.testing.assert_close(readout_losses(h, V, o, y), plain(h, V, o, y), rtol=1e-3, atol=0)


def test_float16_does_not_overflow() -> None:
    """A sum of gradients over many tokens may, before it is divided by their number."""
    h = torch.full((50_000, 1, 2), 4.0, requires_grad=True)
    V, c, y = torch.zeros(KINDS, 2, requires_grad=True), torch.zeros(KINDS), torch.zeros(50_000, 1, dtype=torch.int64)
    with torch.autocast("cpu", torch.float16):
        loss = readout_losses(h, V, c, y).mean()
    assert bool(torch.autograd.grad(loss, V)[0].isfinite().all())


def test_autocast_leaves_double_precision_alone() -> None:
    tensors, y = given(4, 3), torch.randint(KINDS, (4, 3))
    with torch.autocast("cpu", torch.bfloat16):
        found = readout_losses(*tensors, y)
    torch.testing.assert_close(found, plain(*tensors, y), rtol=1e-12, atol=1e-12)


def test_nothing_is_held_after_the_way_back() -> None:
    for kind in ("sum", "weights"):
        tensors, y = given(4, 3), torch.randint(KINDS, (4, 3))
        nll = readout_losses(*tensors, y)
        weighted(kind, nll).backward()
        assert nll.grad_fn.found is None  # type: ignore[union-attr]


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


def test_texts_of_equal_length_and_cold_windows(model: lf.RecurrentLM) -> None:
    """Whose tokens lie in another order in memory."""
    ids = torch.randint(KINDS, (50,))
    cold = lf.perplexity(model, ids, carried=False, window=8, streams=3)
    parts = [lf.perplexity(model, part) for part in ids.split(8)]
    assert cold.nll == pytest.approx(sum(part.nll for part in parts), rel=1e-9)
