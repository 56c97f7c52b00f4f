"""Choices inside the loop: the place of the largest, and rows of a table by an index that the step computes."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from test_engines import DTYPES, ENGINES, assert_agrees
from torch import Tensor, nn

import loopfold as lf

pytestmark = pytest.mark.usefixtures("one_thread")
nan = float("nan")


class Chooses(nn.Module):
    """A state of n numbers, from which `choose(v, table)` makes n others."""

    def __init__(self, choose: Callable[[Tensor, nn.Embedding], Tensor], n: int) -> None:
        super().__init__()
        self.choose, self.n = choose, n
        self.W, self.table = nn.Linear(n, n), nn.Embedding(n, n)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.5 * h + self.choose(self.W(h) + x, self.table))

    def initial_state(self, batch: int) -> Tensor:
        return torch.zeros(batch, self.n, dtype=self.W.weight.dtype)


def pairs(v: Tensor) -> Tensor:
    """Rows as [batch, 2, n / 2], or as they are where n is odd."""
    return v.unflatten(-1, (2, -1)) if v.shape[-1] % 2 == 0 else v[:, None]


CHOICES: dict[str, Callable[[Tensor, nn.Embedding], Tensor]] = {
    "one-hot": lambda v, E: F.one_hot(v.argmax(-1), v.shape[-1]).to(v.dtype) - v,
    "one-hot of the least": lambda v, E: v * F.one_hot(v.argmin(-1), v.shape[-1]),
    "one-hot product": lambda v, E: F.one_hot(v.argmax(-1), v.shape[-1]).to(v.dtype) @ E.weight,
    "index as a number": lambda v, E: v + 0.1 * v.argmax(-1, keepdim=True).to(v.dtype),
    "embedding": lambda v, E: E(v.argmax(-1)) + v,
    "table[index]": lambda v, E: E.weight[v.argmax(-1)] * v,
    "index_select": lambda v, E: E.weight.index_select(0, v.argmin(-1)) * v,
    "a product of the row": lambda v, E: E(v.argmax(-1)) @ E.weight.T,
    "both products": lambda v, E: torch.cat([E(v.argmax(-1)), v], -1) @ torch.cat([E.weight, E.weight.T]),
    "several rows": lambda v, E: E(torch.stack([v.argmax(-1), v.argmin(-1), (v * v).argmax(-1)], -1)).mean(-2) + v,
    "one number of a row": lambda v, E: E.weight[:, 0][v.argmax(-1)][:, None] * v,
    "along another dimension": lambda v, E: v + 0.1 * pairs(v).argmax(1).to(v.dtype).sum(-1, keepdim=True),
    "an index that is bounded": lambda v, E: E((3 * v).clamp(0, v.shape[-1] - 1).long()).sum(1) + v,
    "an index by condition": lambda v, E: E(torch.where(v[:, 0] > 0, v.argmax(-1), v.argmin(-1))) + v,
    "places compared": lambda v, E: torch.where((v.argmax(-1) > v.argmin(-1))[:, None], v, -E(v.argmax(-1))),
}


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", CHOICES)
def test_choices_have_torchs_values_and_gradients(name: str, engine: lf.Engine) -> None:
    for dtype in DTYPES:
        for tau, batch, n in ((6, 3, 5), (1, 1, 1), (5, 1, 18), (4, 9, 2)):
            step = Chooses(CHOICES[name], n).to(dtype)
            for lengths in (None, [1 + (7 * i) % tau for i in range(batch)]):
                assert_agrees(engine, step, torch.randn(tau, batch, n, dtype=dtype), lengths)


MARK = 1e30


class Places(nn.Module):
    """The places of the largest and the least of a row, found within the loop; NaN stands where x has a mark."""

    def forward(self, s: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        row = torch.where(x == MARK, nan, x) + s  # s is 0, but the loop does not know that
        return torch.stack([row.argmax(-1), row.argmin(-1)], -1), 0.5 * s


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
def test_ties_and_what_is_not_a_number_are_chosen_as_torch_does(engine: lf.Engine) -> None:
    """The first of equals, of which 0 and -0 are two; NaN before all numbers."""
    for n in (1, 3, 16, 17, 40):
        x = torch.randint(-2, 2, (200, 3, n)).double()
        x[::3] *= 0.0
        x[1::7, :, n // 2] = torch.inf
        x[2::7] = torch.where(torch.rand(x[2::7].shape) < 0.3, -torch.inf, x[2::7])
        x = torch.where(torch.rand(x.shape) < 0.5 / n, MARK, x)
        rows = torch.where(x == MARK, nan, x)
        found = lf.unfold(Places(), x, state=torch.zeros(3, 1).double(), engine=engine).outputs
        assert isinstance(found, Tensor)
        assert found.dtype == torch.int64
        assert found.equal(torch.stack([rows.argmax(-1), rows.argmin(-1)], -1))


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 5, dtype=torch.float64))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.table[h[:, 0].long().clamp(0, 3)] + x


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
def test_what_is_not_a_number_is_an_index_that_lies_within(engine: lf.Engine) -> None:
    """Which one, C++ leaves open."""
    x = torch.randn(4, 2, 5, dtype=torch.float64)
    step, state = Rows(), torch.tensor([nan, 2.0], dtype=torch.float64)[:, None].repeat(1, 5)
    found = lf.unfold(step, x, state=state, engine=engine).states[0] - x[0]
    assert any(found[0].equal(row + x[0, 0] - x[0, 0]) for row in step.table)
    torch.testing.assert_close(found[1], step.table[2])


def test_an_index_that_may_be_anything_is_refused_in_words() -> None:
    step = Chooses(lambda v, E: E(v.long()).sum(1), 5)
    x = torch.randn(6, 2, 5)
    for engine in ENGINES:
        with pytest.raises(ValueError, match=r"may be any number. Bound it: index.clamp\(0, 4\)"):
            lf.unfold(step, x, engine=engine)


@pytest.mark.parametrize(
    ("choose", "words"),
    [
        (lambda v, E: F.embedding(v.argmax(-1), E.weight, padding_idx=1), "with padding_idx"),
        (lambda v, E: v + v[:, v.argmax(-1)[0]][:, None], "values of a tensor|has no kernel"),
        (lambda v, E: v.gather(1, v[:, :1].long()) + v, "may be any. Bound it"),
        (lambda v, E: v + (v.argmax(-1) + 1)[:, None], "aten.add gives torch.int64"),
        (lambda v, E: v + v.argmax(), "mixes the sequences"),
    ],
)
def test_other_choices_are_refused_in_words(choose: Callable[[Tensor, nn.Embedding], Tensor], words: str) -> None:
    x = torch.randn(6, 2, 5)
    for engine in ENGINES:
        with pytest.raises(ValueError, match=words):
            lf.unfold(Chooses(choose, 5), x, engine=engine)


def test_a_dtype_that_has_not_every_place_refuses() -> None:
    step = Chooses(CHOICES["one-hot"], 300).to(torch.bfloat16)
    with pytest.raises(ValueError, match="bfloat16 has not every place"):
        lf.unfold(step, torch.randn(6, 2, 300, dtype=torch.bfloat16), engine=lf.Looped())
