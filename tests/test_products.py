"""Large products by oneDNN: equal to torch.mm, with all derivatives; and left to torch where they are not plain."""

from collections.abc import Callable

import pytest
import test_engines
import test_readout
import torch
import zoo
from torch import Tensor, nn
from torch.autograd import forward_ad

import loopfold as lf
from loopfold import products
from loopfold.language import readout

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where oneDNN is faster, and for products of any size."""
    monkeypatch.setattr(products, "_on_this_machine", lambda: True)
    monkeypatch.setattr(products, "LEAST", 1)
    monkeypatch.setattr(products, "NARROW", 1)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The sizes of what oneDNN has multiplied."""
    sizes: list[tuple[int, ...]] = []
    onednn = products._onednn

    def noted(c: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        sizes.append((*a.shape, b.shape[1]))
        return onednn(c, a, b)

    monkeypatch.setattr(products, "_onednn", noted)
    return sizes


def laid_out(rows: int, columns: int, how: str) -> Tensor:
    """The same numbers, but for their places in memory."""
    t = torch.randn(rows, columns)
    return {"by rows": t, "by columns": t.T.contiguous().T, "apart": torch.randn(2 * rows, columns + 3)[::2, 3:]}[how]


LAYOUTS = ["by rows", "by columns", "apart"]


@pytest.mark.parametrize("a_layout", LAYOUTS)
@pytest.mark.parametrize("b_layout", LAYOUTS)
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (5, 3, 17), (17, 40, 2), (1, 33, 9), (64, 7, 1), (45, 35, 6), (45, 6, 35)], ids=str
)
def test_values_and_both_derivatives(
    a_layout: str, b_layout: str, sizes: tuple[int, int, int], taken: list[tuple[int, ...]]
) -> None:
    m, k, n = sizes
    given = torch.randn(n), laid_out(m, k, a_layout), laid_out(k, n, b_layout)
    weights, again = torch.randn(m, n), [torch.randn_like(t) for t in given]
    ways: dict[str, Callable[..., Tensor]] = {"ours": products.addmm, "torch": torch.addmm}
    found: dict[str, list[Tensor]] = {}
    for name, way in ways.items():
        c, a, b = (t.double() if name == "torch" else t for t in given)
        c, a, b = (t.detach().requires_grad_() for t in (c, a, b))
        product = way(c, a, b)
        first = torch.autograd.grad((product * weights.to(a.dtype)).sum(), (c, a, b), create_graph=True)
        mixed = sum((g * w.to(a.dtype)).sum() for g, w in zip(first, again, strict=True))
        assert isinstance(mixed, Tensor)
        found[name] = [product, *first, *torch.autograd.grad(mixed, (a, b))]
    for ours, theirs in zip(found["ours"], found["torch"], strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    assert len(taken) >= 5
    total = torch.randn(m, n)
    expected = total.double() + given[1].double() @ given[2].double()
    assert products.addmm_(total, *given[1:]) is total
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)


def test_numbers_may_lie_in_memory_in_any_way(taken: list[tuple[int, ...]]) -> None:
    """A row of which every second number is taken, or one number many times; rows that overlap."""
    a = torch.randn(20, 8)
    rows = [torch.randn(14)[::2], torch.randn(1).expand(7), torch.randn(9)[2:]]
    matrices = [torch.randn(8, 14)[:, ::2], torch.randn(14).as_strided((8, 7), (1, 1)), torch.randn(8, 1).expand(8, 7)]
    for c in rows:
        for b in (*matrices, matrices[1].T.contiguous().T):
            torch.testing.assert_close(products.addmm(c, a, b), torch.addmm(c, a, b), rtol=1e-5, atol=1e-5)
    for m in matrices[1:]:
        torch.testing.assert_close(products.mm(a.T, m.T.repeat(3, 1)[:20]), a.T @ m.T.repeat(3, 1)[:20])
        torch.testing.assert_close(products.mm(m.T, a[:8]), m.T @ a[:8])
    assert len(taken) >= 16


def test_what_is_no_number_stays_where_it_was() -> None:
    a, b = torch.randn(20, 33), torch.randn(33, 18)
    a[3, 32], a[7, 0], b[5, 17] = torch.inf, torch.nan, -torch.inf
    for x, y in ((a, b), (b.T, a.T), (a, b.T.contiguous().T)):
        torch.testing.assert_close(products.mm(x, y), torch.mm(x, y), equal_nan=True)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # which torch itself calls
def test_what_is_not_plain_is_left_to_torch(taken: list[tuple[int, ...]]) -> None:
    a, b = torch.randn(4, 3), torch.randn(3, 5)
    expected = a @ b

    class Own(Tensor):
        pass

    torch._C._set_mkldnn_enabled(False)
    try:
        products.mm(a, b)
    finally:
        torch._C._set_mkldnn_enabled(True)
    products.mm(a.double(), b.double())
    products.mm(a.bfloat16(), b.bfloat16())
    products.mm(a.as_subclass(Own), b)
    products.addmm(torch.randn(4, 5), a, b)
    products.addmm(torch.randn(5), a, b, alpha=2)
    torch.testing.assert_close(torch.vmap(products.mm, (None, 0))(a, torch.stack([b, b]))[1], expected)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(products.mm(forward_ad.make_dual(a, a), b)).tangent
        torch.testing.assert_close(tangent, expected)
    assert not taken
    leaf = a.clone().requires_grad_()
    product = products.mm(leaf, b)  # many gradients at a time
    many = torch.autograd.grad(product, leaf, torch.ones(2, 4, 5), is_grads_batched=True)[0]
    assert torch.equal(many[0], torch.ones(4, 5) @ b.T)
    assert taken == [(4, 3, 5)]


def test_small_products_are_left_to_torch(taken: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LEAST", 4 * 3 * 5)
    products.mm(torch.randn(4, 3), torch.randn(3, 5))
    products.mm(torch.randn(4, 3), torch.randn(3, 4))
    products.mm(torch.randn(0, 3), torch.randn(3, 5))
    monkeypatch.setattr(products, "NARROW", 4)
    products.mm(torch.randn(5, 3), torch.randn(3, 6))
    assert taken == [(4, 3, 5)]


def test_a_sum_over_steps_has_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So has what goes with it: a product of all steps, and its gradient by x."""
    monkeypatch.setattr(products, "NARROW", 2)  # of one row, rows and columns lie in memory alike
    sizes = set[tuple[int, ...]]()
    linear = products._linear

    def noted(a: Tensor, b: Tensor, c: Tensor | None) -> Tensor:
        sizes.add((*a.shape, b.shape[1]))
        return linear(a, b, c)

    monkeypatch.setattr(products, "_linear", noted)
    for n_in in (1, 3):
        W = torch.randn(n_in, 4)
        for steps in range(512, 1024):
            x, g = torch.randn(steps, n_in), torch.randn(steps, 4)
            for a, b in ((x.T, g), (g.T, x), (x, W), (g, W.T)):
                torch.testing.assert_close(products.mm(a, b), a @ b, rtol=1e-4, atol=1e-4)
    assert len(sizes) <= 4 * 17


@pytest.mark.parametrize("engine", [lf.Looped(), lf.FusedCPU()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("make", zoo.WITH_INPUT, ids=lambda m: m.__name__)
def test_engines_agree(engine: lf.Engine, make: Callable[[int, int], nn.Module]) -> None:
    test_engines.test_engines_agree_with_the_definition(engine, make, torch.float32)


def test_an_engine_multiplies_so(taken: list[tuple[int, ...]]) -> None:
    cell, x = lf.LSTM(3, 5), torch.randn(7, 2, 3, requires_grad=True)
    lf.unfold(cell, x, engine=lf.Looped()).hidden.square().sum().backward()
    assert {(14, 3, 20), (14, 20, 3), (3, 14, 20)} <= {*taken}  # x U, its gradient by x, and by U


def test_losses_in_pieces(taken: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = test_readout.KINDS
    monkeypatch.setitem(readout.PIECE, "cpu", 4 * kinds * 4)
    monkeypatch.setattr(readout, "SMALL", 0)
    monkeypatch.setattr(readout, "ROWS", 0)
    tensors, y = test_readout.given(7, 3, torch.float32), torch.randint(kinds, (7, 3))
    ours = readout.readout_losses(*tensors, y)
    h, V, c = (t.double() for t in tensors)
    theirs = test_readout.plain(h, V, c, y)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    found, expected = (torch.autograd.grad(nll.sum(), tensors) for nll in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    n = test_readout.N
    assert {(4, n, kinds), (4, kinds, n), (kinds, 4, n)} <= {*taken}  # o, and the gradients of h and V
