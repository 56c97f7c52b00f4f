"""One step at a time: the values of `unfold`, whatever the model, whatever has changed in between."""

import copy
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import zoo
from helpers import CELLS, assert_same, cells, randn
from hypothesis import HealthCheck, given, settings
from test_random_steps import PROGRAMS, RandomStep, quick_compilation  # noqa: F401
from torch import Tensor, nn

import loopfold as lf
from loopfold import stepper as stepping
from loopfold.states import leaves

pytestmark = pytest.mark.usefixtures("one_thread")

NATIVE, OWN = "native code", "the model's own code"


def steps(stepper: lf.Stepper, x: Tensor) -> Tensor:
    return torch.stack([stepper.step(x_t) for x_t in x])


def by_definition(f: Any, x: Any, **options: Any) -> Any:
    with torch.no_grad():
        return lf.unfold(f, x, engine=lf.Sequential(), **options)


# ------------------------------------------------------------------ the values are those of unfold


ALL = {getattr(make, "__name__", str(make)): make for make in (*zoo.WITH_INPUT, *zoo.TENSORS, *zoo.REWRITTEN)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("name", ALL)
def test_every_step_is_that_of_the_definition(name: str, batch: int, dtype: torch.dtype) -> None:
    cell = ALL[name](4, 6).to(dtype).eval()
    x = torch.randn(9, batch, 4, dtype=dtype)
    torch.manual_seed(1)
    run = by_definition(cell, x)
    torch.manual_seed(1)
    stepper = lf.Stepper(cell)
    found = steps(stepper, x)
    near = 1e-10 if dtype == torch.float64 else 2e-4
    assert_same(found, run.hidden, near)
    for leaf, last in zip(leaves(stepper.state), leaves(run.last), strict=True):
        assert_same(leaf, last, near)
    assert (NATIVE in stepper.explain()) == (name not in ("Noisy", "Covariance")), stepper.explain()


@pytest.mark.parametrize("name", zoo.AWKWARD)
def test_awkward_steps(name: str) -> None:
    for n in (6, 33) if name != "a slice from before the start" else (6,):
        cell = zoo.Awkward(zoo.AWKWARD[name], n).double()
        x = randn(5, 2, n)
        run = by_definition(cell, x)
        stepper = lf.Stepper(cell)
        assert_same(steps(stepper, x), run.hidden, 1e-10)
        assert_same(stepper.state, run.last, 1e-10)


@pytest.mark.parametrize("batch", [1, 3, 14])
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("n", [1, 17, 64])
def test_odd_sizes(name: str, n: int, batch: int) -> None:
    cell = cells(3, n)[name]
    x = randn(6, batch, 3)
    assert_same(steps(lf.Stepper(cell, batch=batch), x), by_definition(cell, x).hidden)


@pytest.mark.usefixtures("quick_compilation")
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(PROGRAMS, st.sampled_from([4, 17]), st.integers(1, 3), st.sampled_from([1, 3]), st.booleans())
def test_steps_that_nobody_thought_of(
    program: list[tuple[str, int, int]], n: int, n_state: int, batch: int, double: bool
) -> None:
    dtype = torch.float64 if double else torch.float32
    torch.manual_seed(0)
    cell = RandomStep(program, n, n_state).to(dtype)
    x = torch.randn(5, batch, n, dtype=dtype)
    torch.manual_seed(3)
    run = by_definition(cell, x)
    torch.manual_seed(3)
    stepper = lf.Stepper(cell)
    for row, hidden in zip(x, run.hidden, strict=True):
        assert_same(stepper.step(row), hidden, 1e-9 if double else 3e-3)
    if not {"dropout", "noise"} & {op for op, _, _ in program}:
        assert NATIVE in stepper.explain()


def test_without_input() -> None:
    cell, start = zoo.Autonomous(7).double(), randn(2, 7)
    stepper = lf.Stepper(cell)
    stepper.state = start
    found = torch.stack([stepper.step() for _ in range(5)])
    assert_same(found, lf.unfold(cell, steps=5, state=start).hidden.detach())
    assert NATIVE in stepper.explain()


def test_layers_and_patterns() -> None:
    x = randn(8, 3, 4)
    for model in (
        lf.Recurrent(lf.GRU(4, 5)),
        lf.Stacked([lf.LSTM(4, 5), lf.Recurrent(lf.Elman(5, 6)), lf.Stacked([lf.GRU(6, 3)])], dropout=0.3),
        lf.from_torch(nn.LSTM(4, 5, 2)),
    ):
        model = model.double().eval()
        stepper = lf.Stepper(model)
        run = model(x)
        assert_same(steps(stepper, x), run.hidden.detach())
        assert all(
            torch.allclose(a, b, atol=1e-11) for a, b in zip(leaves(stepper.state), leaves(run.last), strict=True)
        )
        assert NATIVE in stepper.explain()
        pattern = lf.SequenceToSequence(model, outputs=4).double().eval()
        stepper = lf.Stepper(pattern)
        assert_same(steps(stepper, x), pattern(x).detach())
        assert NATIVE in stepper.explain()
        last = lf.SequenceToOne(model, outputs=lf.Reals(2)).double().eval()
        assert_same(steps(lf.Stepper(last), x)[-1], last(x).detach())


def test_tokens() -> None:
    table = nn.Embedding(11, 4)
    model = lf.SequenceToSequence(lf.Stacked([lf.Embedded(lf.LSTM(4, 5), table), lf.GRU(5, 6)]), 11).double()
    x = torch.randint(11, (9, 3))
    o = model(x).detach()
    stepper = lf.Stepper(model)
    assert_same(steps(stepper, x), o)
    assert NATIVE in stepper.explain()
    one = lf.Stepper(model)
    assert_same(torch.stack([one.step(int(token)) for token in x[:, 1]]), o[:, 1])
    one.reset()
    found = [one.step(np.array([token])) for token in x[:, 1]]
    assert_same(torch.from_numpy(np.stack(found)), o[:, 1:2])
    for wrong in (11, -1):
        with pytest.raises(IndexError, match=f"token {wrong}; the table has 11 rows"):
            one.step(wrong)
    with pytest.raises(TypeError, match="float32"):
        one.step(np.zeros(1, np.float32))
    with torch.no_grad():
        table.weight.mul_(2)
    assert_same(steps(lf.Stepper(model), x), model(x).detach())
    stepper.reset()
    assert_same(steps(stepper, x), model(x).detach())


class Reader(lf.Transition):
    """Reads two inputs, a context and its number; gives an output beside its state."""

    def __init__(self) -> None:
        super().__init__()
        self.U, self.W, self.C = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(2, 5)

    def initial_state(self, batch: int) -> Tensor:
        return self.U.weight.new_zeros(batch, 5)

    def forward(self, h: Tensor, x: tuple[Tensor, Tensor], context: Tensor, t: Tensor) -> Any:
        a, b = x
        new = torch.tanh(self.W(h) + self.U(a) * b + self.C(context) + 0.1 * t)
        return (new.sum(-1, keepdim=True), new * 2), new


def test_several_inputs_a_context_and_the_number_of_the_step() -> None:
    cell, context = Reader().double(), randn(3, 2)
    x = randn(6, 3, 3), randn(6, 3, 1)
    run = by_definition(cell, x, context=context)
    stepper = lf.Stepper(cell, context=context)
    for t in range(6):
        one, two = stepper.step((x[0][t], x[1][t]))
        assert_same((one, two), (run.outputs[0][t], run.outputs[1][t]))
    assert NATIVE in stepper.explain()
    stepper.reset(streams=[1])  # that stream starts again, its number too
    one, _ = stepper.step((x[0][0], x[1][0]))
    assert_same(one[1], run.outputs[0][0, 1])
    other = randn(3, 2)
    stepper.reset(context=other)
    stepper.reset()
    again = by_definition(cell, x, context=other)
    for t in range(6):
        found = stepper.step((x[0][t].numpy(), x[1][t].numpy()))
        assert isinstance(found[0], np.ndarray)
        assert_same(torch.from_numpy(found[1]), again.outputs[1][t])
    with torch.no_grad():
        cell.C.weight.mul_(3)  # read once for each context, and yet never old
    found = stepper.step((x[0][0], x[1][0]))
    state, index = again.last, torch.full((3, 1), 6.0, dtype=torch.float64)
    assert_same(found[1], cell(state, (x[0][0], x[1][0]), other, index)[0][1].detach())
    with pytest.raises(ValueError, match="x is tuple"):
        stepper.step((x[0][0],))
    with pytest.raises(ValueError, match="no context"):
        lf.Stepper(lf.Elman(3, 5)).reset(context=other)


def test_layers_that_ask_for_the_number() -> None:
    class Timed(lf.Transition):
        def __init__(self) -> None:
            super().__init__()
            self.W = nn.Linear(3, 3)

        def forward(self, h: Tensor, x: Tensor, t: Tensor) -> Tensor:
            return torch.tanh(self.W(h) + x / (1 + t))

    model, x = lf.Stacked([Timed(), lf.Elman(3, 4)]).double(), randn(5, 2, 3)
    assert_same(steps(lf.Stepper(model), x), model(x).hidden.detach())


def test_what_does_not_compile_runs_as_it_is() -> None:
    class Branches(lf.Transition):
        def __init__(self) -> None:
            super().__init__()
            self.W = nn.Linear(3, 3)

        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            h = torch.tanh(self.W(h) + x)
            return h / 2 if float(h.detach().sum()) > 0 else h

    cell, x = Branches().double(), randn(9, 1, 3)
    stepper = lf.Stepper(cell)
    assert_same(steps(stepper, x), by_definition(cell, x).hidden)
    assert OWN in stepper.explain()
    assert "asks for the values" in stepper.explain()
    function = lf.Stepper(lambda s, x: s / 2 + x, batch=2)
    signal = randn(4, 2, 3)
    assert_same(steps(function, signal), by_definition(lambda s, x: s / 2 + x, signal).hidden)
    assert "plain function" in function.explain()


def test_random_numbers_are_those_that_the_definition_draws() -> None:
    cell, x = zoo.Noisy(3, 5).double(), randn(6, 2, 3)
    torch.manual_seed(3)
    needed = by_definition(cell, x).hidden
    torch.manual_seed(3)
    stepper = lf.Stepper(cell)
    assert_same(steps(stepper, x), needed)
    assert "draws random numbers" in stepper.explain()
    model = lf.Stacked([lf.Elman(3, 4), lf.Elman(4, 4)], dropout=0.5).double()
    torch.manual_seed(4)
    one = lf.Stepper(model)
    found = steps(one, x)
    assert OWN in one.explain()
    model.eval()
    one.step(x[0])
    assert NATIVE in one.explain()
    assert found.isfinite().all()


# ------------------------------------------------------------------ what goes in and comes out


def test_arrays_tensors_and_numbers() -> None:
    cell = lf.LSTM(3, 5)
    x = torch.randn(6, 1, 3)
    needed = by_definition(cell, x).hidden
    for make in (
        lambda row: row,
        lambda row: row.numpy(),
        lambda row: row[0],
        lambda row: row[0].numpy(),
        lambda row: row.numpy()[:, ::-1].copy()[:, ::-1],
        lambda row: row.expand(4, 3).T.contiguous().T[:1],
        lambda row: row.requires_grad_(),
        lambda row: row.tolist(),
        lambda row: row[0].tolist(),
        lambda row: tuple(row[0].tolist()),
    ):
        stepper = lf.Stepper(cell)
        for row, h in zip(x.clone(), needed, strict=True):
            given = make(row.clone())
            found = stepper.step(given)
            assert isinstance(found, np.ndarray) == isinstance(given, np.ndarray)
            bare = np.ndim(given.detach() if isinstance(given, Tensor) else given) == 1
            torch.testing.assert_close(torch.as_tensor(found), h[0] if bare else h)
            assert not torch.as_tensor(found).requires_grad


def test_numbers_keep_all_their_digits() -> None:
    cell, x = lf.GRU(3, 5).double(), randn(6, 1, 3)
    stepper = lf.Stepper(cell)
    for row, h in zip(x, by_definition(cell, x).hidden, strict=True):
        assert_same(stepper.step(row.tolist()), h)


def test_an_output_is_the_callers_own() -> None:
    cell, x = lf.GRU(3, 5).double(), randn(6, 2, 3)
    needed = by_definition(cell, x).hidden
    for change in (lambda row: row.fill_(7), lambda row: row.numpy().fill(7)):
        stepper = lf.Stepper(cell)
        outputs = [stepper.step(row) for row in x]
        assert_same(torch.stack(outputs), needed)
        stepper.reset()
        for row, h in zip(x, needed, strict=True):
            found = stepper.step(row)
            assert_same(found, h)
            change(found)
            for leaf in leaves(stepper.state):
                leaf.fill_(9)  # a copy too
    stepper.reset()
    out: Any
    for out in (torch.empty(2, 5, dtype=torch.float64), np.empty((2, 5))):
        stepper.reset()
        for row, h in zip(x, needed, strict=True):
            assert stepper.step(row, out=out) is out
            assert_same(torch.as_tensor(out), h)
    for out in (np.empty((2, 4)), torch.empty(2, 5), [0.0]):
        with pytest.raises((ValueError, TypeError), match=r"out (is|must be)"):
            stepper.step(x[0], out=out)


def test_any_step_reads_one_stream_without_a_batch() -> None:
    cell = zoo.PeepholeLSTM(3, 5)
    x = torch.randn(3)
    found = lf.Stepper(cell).step(x)
    torch.testing.assert_close(found, by_definition(cell, x.view(1, 1, 3)).hidden[0, 0])


@pytest.mark.parametrize("later", [False, True])
def test_wrong_inputs(later: bool) -> None:
    stepper = lf.Stepper(lf.LSTM(3, 5), batch=2)
    x = torch.zeros(2, 3)
    for _ in range(later * 5):
        stepper.step(x)
    before = stepper.state
    for wrong, kind, words in (
        (torch.zeros(2, 4), ValueError, r"x has shape \(2, 4\)"),
        (torch.zeros(3, 3), ValueError, "2 streams"),
        (torch.zeros(3), ValueError, r"x has shape \(3,\)|2 streams"),
        (torch.zeros(2, 3).double(), TypeError, r"x is float64 .* float32. Type x.to\(torch.float32\)"),
        (np.zeros((2, 3)), TypeError, r"x is float64 .* float32. Type x.astype\(numpy.float32\)"),
        (torch.zeros(2, 3, dtype=torch.long), TypeError, "x is int64"),
        (torch.tensor([[0, 0, 0], [0, torch.nan, 0]]), ValueError, r"x holds NaN, in stream 1"),
        (np.array([[0, 0, 0], [0, np.nan, 0]], np.float32), ValueError, r"x holds NaN, in stream 1"),
        ("a word", TypeError, "got a str"),
        (np.array(["a"]), TypeError, "cannot be read as numbers"),
        ((x, x), (ValueError, TypeError), "x"),
        (None, (ValueError, TypeError), "x|x0"),
        (torch.zeros(2, 3, device="meta"), ValueError, "x is on meta"),
    ):
        with pytest.raises(kind, match=words):
            stepper.step(wrong)
        assert_same(stepper.state, before)  # a refused x changes nothing
    torch.testing.assert_close(stepper.step(x), by_definition(stepper.model, x[None], state=before).hidden[0])
    with pytest.raises(ValueError, match="batch"):
        lf.Stepper(lf.LSTM(3, 5), batch=0)
    models: Any = (lf.LSTM, 3, nn.LSTM(3, 4), lf.Bidirectional(lf.GRU(3, 4), lf.GRU(3, 4)), nn.LSTMCell(3, 4))
    for model in models:
        with pytest.raises(TypeError, match="Stepper|input first"):
            lf.Stepper(model)
    with pytest.raises(TypeError, match="feeds its outputs back"):
        lf.Stepper(lf.OutputRecurrence(3, 4, 2))


def test_a_first_x_that_fails_decides_nothing() -> None:
    cell = zoo.PeepholeLSTM(3, 5).double()
    stepper = lf.Stepper(cell)
    for wrong in (randn(2, 4), torch.zeros(1, 3), torch.full((2, 3), torch.nan, dtype=torch.float64)):
        with pytest.raises(ValueError, match="PeepholeLSTM|NaN"):
            stepper.step(wrong)
    x = randn(4, 1, 3)
    assert_same(steps(stepper, x), by_definition(cell, x).hidden)
    tokens = lf.Stepper(lf.Embedded(lf.Elman(3, 5), nn.Embedding(4, 3)))
    with pytest.raises((IndexError, ValueError), match="token|index"):
        tokens.step([1, 9])
    assert tokens.step(1).shape == (5,)


def test_the_dtype_of_x_is_named_before_its_shape() -> None:
    for x in (np.zeros(3, np.int64), torch.zeros(3, dtype=torch.int64), np.zeros((2, 3), np.int64), np.int64(4)):
        for batch in (None, 1, 2):
            with pytest.raises(TypeError, match="x is int64 and GRU's parameters are float32. Type x"):
                lf.Stepper(lf.GRU(3, 5), batch).step(x)
    with pytest.raises(TypeError, match=r"Type torch.from_numpy\(x\).to\(torch.bfloat16\)"):
        lf.Stepper(lf.GRU(3, 5).bfloat16()).step(np.zeros((1, 3), np.float32))


def test_explain_before_the_first_step_needs_x() -> None:
    stepper = lf.Stepper(lf.GRU(3, 5))
    with pytest.raises(ValueError, match=r"has not taken a step yet.* Type stepper.explain\(x\)"):
        stepper.explain()
    with pytest.raises(TypeError, match="x is int64"):
        stepper.explain(np.zeros(3, np.int64))
    assert NATIVE in stepper.explain(torch.zeros(1, 3))
    assert NATIVE in lf.Stepper(Counting()).explain()


class Counting(lf.Transition):
    """Reads the number of its step, and x, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(randn(5, 5))

    def initial_state(self, batch: int) -> Tensor:
        return self.W.new_zeros(batch, 5)

    def forward(self, h: Tensor, *x: Tensor, t: Tensor) -> Tensor:  # type: ignore[override]
        return torch.tanh(h @ self.W + (x[0] if x else 0.3) + 0.1 * t)


class Shifted(Counting):
    def forward(self, h: Tensor, x: Tensor, context: Tensor) -> Tensor:  # type: ignore[override]
        return torch.tanh(h @ self.W + x + context)


def test_a_context_of_any_kind_that_x_may_be_of() -> None:
    cell, x = Shifted().double(), randn(4, 1, 5)
    c = randn(1, 5)
    needed = by_definition(cell, x, context=c).hidden
    for context in (c, c.numpy(), c.tolist()):
        assert_same(steps(lf.Stepper(cell, context=context), x), needed, 1e-10)
        stepper = lf.Stepper(cell, context=torch.zeros_like(c))
        steps(stepper, x)
        stepper.reset()
        stepper.reset(context=context)
        assert_same(steps(stepper, x), needed, 1e-10)
    with pytest.raises(TypeError, match=r"context is float32 .* float64. Type context.astype\(numpy.float64\)"):
        stepper.reset(context=c.float().numpy())
    with pytest.raises(TypeError, match="the context must be a numpy array"):
        stepper.reset(context="a word")


def test_resetting_no_streams_does_nothing() -> None:
    lf.Stepper(lf.GRU(3, 5)).reset(streams=[])
    stepper, x = lf.Stepper(lf.GRU(3, 5).double(), batch=2), randn(9, 2, 3)
    for row, h in zip(x, by_definition(stepper.model, x).hidden, strict=True):
        assert_same(stepper.step(row), h, 1e-10)
        stepper.reset(streams=[])
        stepper.check()


@pytest.mark.parametrize("kind", ["rows", "tokens", "counting"])
def test_a_check_after_a_refused_x(kind: str) -> None:
    cell: Any = {
        "rows": lf.GRU(5, 5),
        "tokens": lf.Embedded(lf.Elman(3, 5), nn.Embedding(4, 3)),
        "counting": Counting(),
    }[kind].double()
    good: Any = torch.tensor([2]) if kind == "tokens" else randn(1, 5)
    bad = torch.tensor([7]) if kind == "tokens" else torch.full((1, 5), torch.nan, dtype=torch.float64)
    sequence = good.expand(12, *good.shape).contiguous()
    stepper, needed = lf.Stepper(cell), by_definition(cell, sequence).hidden
    for i, row in enumerate(needed):
        for _ in range(i % 3):
            with pytest.raises((ValueError, IndexError), match="NaN|token"):
                stepper.step(bad)
            before = stepper.state
            stepper.check()
            assert_same(stepper.state, before)
        assert_same(stepper.step(good), row, 1e-10)
        stepper.check()
        assert_same(stepper.state, row, 1e-10)
    assert NATIVE in stepper.explain()


def test_a_refused_out_leaves_the_state() -> None:
    locked = np.empty((2, 5))
    locked.flags.writeable = False
    noisy = lf.Stacked([lf.GRU(5, 5), lf.GRU(5, 5)], dropout=0.5)
    wrong: tuple[Any, ...] = (np.empty((2, 4)), torch.empty(2, 5), [0.0], np.empty(5), locked, np.empty((2, 5), ">f8"))
    for cell in (lf.LSTM(5, 5), Counting(), noisy):
        x = randn(6, 2, 5)
        torch.manual_seed(2)
        stepper = lf.Stepper(cell.double())
        needed = None if cell is noisy else by_definition(cell, x).hidden
        for i, row in enumerate(x):
            before = stepper.state if i else None
            for out in wrong:
                with pytest.raises((ValueError, TypeError), match=r"out (is|must be)"):
                    stepper.step(row, out=out)
                if before is not None:
                    assert all(map(torch.equal, leaves(stepper.state), leaves(before)))
            found = stepper.step(row, out=np.empty((2, 5)))
            if needed is not None:
                assert_same(torch.as_tensor(found), needed[i], 1e-10)


def test_numpy_has_no_bfloat16() -> None:
    words = lf.Stepper(lf.Embedded(lf.Elman(3, 5), nn.Embedding(4, 3)).bfloat16())
    needed = [lf.Stepper(words.model).step(1)]
    for _ in range(2):
        with pytest.raises(TypeError, match="bfloat16, which numpy does not have. Give x as a tensor"):
            words.step(np.array([1]))
    torch.testing.assert_close(words.step(1), needed[0])
    before = words.state
    with pytest.raises(TypeError, match="numpy does not have"):
        words.step(np.array([1]))
    assert torch.equal(words.state, before)


def test_the_number_of_a_step_is_not_an_x() -> None:
    cell = Counting()
    stepper = lf.Stepper(cell, batch=1)
    needed = by_definition(cell, None, state=cell.initial_state(1), steps=9).hidden
    for row in needed:
        assert_same(stepper.step(), row, 1e-10)
        for x in (randn(1, 1), randn(1), np.zeros((1, 1))):
            with pytest.raises(TypeError, match="reads no x"):
                stepper.step(x)
    assert NATIVE in stepper.explain()


def test_infinity_is_a_number() -> None:
    cell = lf.Elman(3, 4)
    x = torch.tensor([[torch.inf, 0, 1]])
    torch.testing.assert_close(lf.Stepper(cell).step(x), by_definition(cell, x[None]).hidden[0])


def test_nan_in_a_table_is_not_the_callers_fault() -> None:
    table = nn.Embedding(4, 3)
    table.weight.data[2] = torch.nan
    stepper = lf.Stepper(lf.Embedded(lf.Elman(3, 5), table))
    assert stepper.step(1).isfinite().all()
    assert stepper.step(2).isnan().all()


# ------------------------------------------------------------------ the state


def test_reset() -> None:
    cell, x = lf.LSTM(3, 5).double(), randn(4, 3, 3)
    stepper = lf.Stepper(cell)
    first = steps(stepper, x)
    stepper.reset()
    assert_same(steps(stepper, x), first)
    stepper.reset(streams=[0, 2])
    state = stepper.state
    assert (state.h[[0, 2]] == 0).all()
    assert (state.c[1] != 0).all()
    found = steps(stepper, x)
    assert_same(found[:, [0, 2]], first[:, [0, 2]])
    given = lf.LSTMState(randn(1, 5), randn(1, 5))
    stepper.reset(given, streams=[1])
    assert_same(stepper.state.c[1:2], given.c)
    state = lf.LSTMState(randn(3, 5), randn(3, 5))
    stepper.reset(state)
    assert_same(steps(stepper, x), by_definition(cell, x, state=state).hidden)
    stepper.reset()
    assert_same(steps(stepper, x[:, :2]), first[:, :2])  # another number of streams
    with pytest.raises(ValueError, match="2 streams"):
        stepper.step(x[0])
    for wrong in ([3], [-1]):
        with pytest.raises(ValueError, match="2 streams, 0 to 1"):
            stepper.reset(streams=wrong)
    with pytest.raises(ValueError, match="for 1 streams it must be"):
        stepper.reset(state, streams=[1])


class Shown(lf.Transition):
    """A part of the state that no step reads, and that is another part as well."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Linear(3, 3)

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(torch.full((batch, 3), float(i), dtype=self.W.weight.dtype) for i in range(3))  # type: ignore

    def forward(self, state: tuple[Tensor, Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(self.W(state[0]) + x)
        return h, h, h


def test_parts_of_a_state_that_no_step_reads_can_be_set_too() -> None:
    cell, x = Shown().double(), randn(5, 2, 3)
    stepper = lf.Stepper(cell)
    assert_same(steps(stepper, x), by_definition(cell, x).hidden)
    state = randn(2, 3), randn(2, 3), randn(2, 3)
    stepper.state = state
    assert_same(stepper.state, state)
    assert_same(steps(stepper, x), by_definition(cell, x, state=state).hidden)
    assert NATIVE in stepper.explain()


def test_a_learned_start_is_read_at_every_reset() -> None:
    cell: Any = cells(3, 5)["LearnedStart"]
    x = randn(3, 2, 3)
    stepper = lf.Stepper(cell)
    steps(stepper, x)
    with torch.no_grad():
        cell.h0.add_(1)
    stepper.reset()
    assert_same(stepper.state, cell.h0.detach().expand(2, -1))
    assert_same(steps(stepper, x), by_definition(cell, x).hidden)


def test_the_state_can_be_read_and_set() -> None:
    cell, x = lf.LSTM(3, 5).double(), randn(8, 2, 3)
    stepper, other = lf.Stepper(cell), lf.Stepper(cell)
    steps(stepper, x[:4])
    other.state = stepper.state
    assert_same(steps(other, x[4:]), steps(stepper, x[4:]))
    assert isinstance(other.state, lf.LSTMState)
    other.state = tuple(leaf.numpy() for leaf in stepper.state)
    assert_same(other.state, stepper.state)
    assert_same(lf.Stepper(cell, batch=4).state, cell.initial_state(4))
    for wrong, kind in ((randn(2, 5), ValueError), ((randn(2, 4), randn(2, 4)), ValueError), ("h", TypeError)):
        with pytest.raises(kind, match="state"):
            stepper.state = wrong
    with pytest.raises(TypeError, match="float32"):
        stepper.state = tuple(leaf.float() for leaf in stepper.state)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["copy", "deepcopy", "pickle"]
)
def test_copies_go_their_own_way(copied: Callable[[lf.Stepper], lf.Stepper]) -> None:
    model, x = lf.SequenceToSequence(lf.GRU(3, 5), 4).double(), randn(8, 2, 3)
    o = model(x).detach()
    stepper = lf.Stepper(model)
    fresh = copied(stepper)
    steps(stepper, x[:4])
    other = copied(stepper)
    assert (other.model is model) == (copied is copy.copy)
    assert_same(steps(other, x[4:]), o[4:])
    assert_same(steps(stepper, x[4:]), o[4:])
    assert_same(steps(fresh, x), o)
    timed = lf.Stepper(Reader(), context=torch.ones(1, 2))
    one = torch.ones(1, 3), torch.ones(1, 1)
    timed.step(one)
    assert_same(copied(timed).step(one), timed.step(one))


def test_many_threads() -> None:
    model, x = lf.SequenceToSequence(lf.LSTM(3, 17), 4).double(), randn(300, 2, 3)
    o, wrong = model(x).detach(), []

    def run(stream: int) -> None:
        stepper = lf.Stepper(model)
        for _ in range(3):
            found = steps(stepper, x[:, stream % 2 :][:, :1])
            if not torch.allclose(found, o[:, stream % 2 :][:, :1], atol=1e-11):
                wrong.append(stream)
            stepper.reset()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ------------------------------------------------------------------ nothing is ever old


class Times(nn.Module):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0

    def forward(self, h: Tensor) -> Tensor:
        return h * self.factor


class Masked(lf.Transition):
    """A weight that is computed from others; numbers, a list and a flag that the step reads."""

    mask: Tensor
    order: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.W, self.U, self.b = nn.Parameter(randn(5, 5)), nn.Parameter(randn(3, 5)), nn.Parameter(randn(5))
        self.register_buffer("mask", torch.triu(torch.ones(5, 5, dtype=torch.float64)))
        self.register_buffer("order", torch.tensor([1, 2, 3, 4, 0]))
        self.scale, self.factors, self.inner = 0.5, [1.0, 2.0], nn.Sequential(nn.Identity())
        self.helpers = [Times()]

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        h = self.inner(h[:, self.order]) @ (self.W * self.mask).T * self.factors[0] + x @ self.U + self.b
        return self.helpers[0](torch.tanh(h * self.scale)) * (2.0 if self.training else 1.0)


def _set(cell: Any, name: str, value: Any) -> Any:
    setattr(cell, name, value)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda f: f.W.detach().mul_(0.5),
    "an optimiser": lambda f: _optimise(f),
    "loaded": lambda f: f.load_state_dict({k: v * 2 for k, v in f.state_dict().items() if k != "order"}, strict=False),
    "data replaced": lambda f: _set(f.W, "data", f.W.data * 3),
    "data in place, read where it lies": lambda f: f.U.data.mul_(3),
    "through numpy, read where it lies": lambda f: f.b.detach().numpy().fill(0.25),
    "another parameter": lambda f: _set(f, "W", nn.Parameter(f.W.detach() + 1)),
    "a buffer": lambda f: f.mask.fill_(0.5),
    "an order": lambda f: f.order.copy_(torch.tensor([0, 1, 2, 3, 4])),
    "evaluation": lambda f: f.eval(),
    "a number": lambda f: _set(f, "scale", 0.25),
    "the sign of zero": lambda f: _set(f, "scale", 0.0) or _set(f, "scale", -0.0),
    "a number in a list": lambda f: f.factors.__setitem__(0, 0.1),
    "a part": lambda f: f.inner.__setitem__(0, nn.Tanh()),
    "a hook": lambda f: f.inner.register_forward_hook(lambda part, given, h: h * 2),
    "a hook before": lambda f: f.register_forward_pre_hook(lambda part, given: (given[0] * 2, given[1])),
    "a number in a module that is not registered": lambda f: _set(f.helpers[0], "factor", 3.0),
    "its class": lambda f: _set(f, "__class__", Doubled),
    "its code": lambda f: _set(f, "forward", lambda h, x: h + x.sum(-1, keepdim=True)),
    "turned round": lambda f: _set(f.U, "data", f.U.data.T.contiguous().T),
}


class Doubled(Masked):
    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return super().forward(h, x) * 2


def _optimise(f: nn.Module) -> None:
    optimiser = torch.optim.SGD(f.parameters(), 0.1)
    f(randn(2, 5), randn(2, 3)).sum().backward()
    optimiser.step()


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_is_seen_at_once(name: str) -> None:
    cell, x = Masked().double(), randn(12, 2, 3)
    stepper = lf.Stepper(cell)
    steps(stepper, x)
    assert NATIVE in stepper.explain()
    CHANGES[name](cell)
    state = stepper.state
    found = steps(stepper, x)
    assert_same(found, by_definition(cell, x, state=state).hidden, 1e-10)


def test_another_dtype_needs_another_x() -> None:
    cell = lf.LSTM(3, 5)
    stepper = lf.Stepper(cell)
    stepper.step(torch.zeros(1, 3))
    cell.double()
    words = r"LSTM is float64 now, and was float32 .* Type stepper.reset\(\), and give x as float64"
    for wrong in (torch.zeros(1, 3), torch.zeros(1, 3).double(), np.zeros((1, 3), np.float32), [0.0, 0.0, 0.0]):
        with pytest.raises(TypeError, match=words):
            stepper.step(wrong)
    with pytest.raises(TypeError, match=words):
        stepper.state = cell.initial_state(1)
    stepper.reset()
    x = randn(4, 1, 3)
    assert_same(steps(stepper, x), by_definition(cell, x).hidden)


def test_a_parameter_that_changes_at_every_step() -> None:
    cell, x = Masked().double(), randn(40, 2, 3)
    stepper, state = lf.Stepper(cell), randn(2, 5)
    stepper.state = state
    for row in x:
        with torch.no_grad():
            cell.W.mul_(1.01)
            state = cell(state, row)
        assert_same(stepper.step(row), state)
    assert "changes at almost every step" in stepper.explain()
    live = lf.GRU(3, 5).double()
    plain = lf.Stepper(live)
    for row in x:
        with torch.no_grad():
            live.W.mul_(1.001)
        plain.step(row)
    assert NATIVE in plain.explain()  # read where it lies


def test_memory_that_another_process_writes_to() -> None:
    cell, x = lf.GRU(3, 5).double(), randn(4, 1, 3)
    cell.share_memory()
    stepper = lf.Stepper(cell)
    steps(stepper, x)
    state = stepper.state
    torch.from_numpy(cell.W.detach().numpy())[:] *= 0.5  # no version tells of it
    assert_same(steps(stepper, x), by_definition(cell, x, state=state).hidden)


def test_hooks_on_layers_are_refused() -> None:
    model, x = lf.SequenceToSequence(lf.GRU(3, 5), 4), torch.randn(1, 3)
    stepper = lf.Stepper(model)
    stepper.step(x)
    handle = model.recurrent.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="Recurrent has hooks"):
        stepper.step(x)
    handle.remove()
    stepper.step(x)
    dropped = lf.Stacked([lf.GRU(3, 5), lf.GRU(5, 5)], lf.VariationalDropout(0.5))
    with pytest.raises(ValueError, match="one mask for a whole sequence"):
        lf.Stepper(dropped).step(x)
    assert lf.Stepper(dropped.eval()).step(x).shape == (1, 5)


def test_a_layer_that_is_replaced() -> None:
    x = randn(6, 2, 3)
    layer = lf.Recurrent(lf.GRU(3, 5)).double()
    stack = lf.Stacked([lf.GRU(3, 5), lf.GRU(5, 5)]).double()
    whole = lf.SequenceToSequence(lf.GRU(3, 5), outputs=4).double()

    def replaced(new: nn.Module, where: nn.Module, name: str) -> Callable[[], None]:
        return lambda: setattr(where, name, new.double())

    changes: list[tuple[Any, Callable[[], None]]] = [
        (layer, replaced(lf.GRU(3, 5), layer, "cell")),
        (layer, replaced(lf.Elman(3, 5), layer, "cell")),
        (layer, replaced(Masked(), layer, "cell")),
        (stack, replaced(lf.Elman(5, 5), stack.parts[1], "cell")),
        (whole, replaced(lf.Elman(3, 5), whole.recurrent, "cell")),
        (whole, replaced(lf.Recurrent(lf.Elman(3, 5)), whole, "recurrent")),
    ]
    for model, change in changes:
        stepper = lf.Stepper(model)
        steps(stepper, x)
        assert NATIVE in stepper.explain()
        for again in (False, True):  # as it goes on; and from the start
            state = None if again else stepper.state
            if again:
                stepper.reset()
            else:
                change()
            run = model.recurrent(x, state) if model is whole else model(x, state)
            needed = whole.readout(run.hidden) if model is whole else run.hidden
            assert_same(steps(stepper, x), needed.detach(), 1e-10)
        assert NATIVE in stepper.explain()


class Louder(lf.Recurrent):
    """A layer of one's own, of which nobody knows what it does at a step."""


def test_a_layer_that_is_replaced_by_one_without_single_steps() -> None:
    x = randn(5, 1, 3)
    both = lf.Bidirectional(lf.GRU(3, 2), lf.GRU(3, 2)).double()
    for new, words in ((Louder(lf.GRU(3, 4)).double(), "class of your own"), (both, "reads what comes later")):
        model = lf.SequenceToSequence(lf.GRU(3, 4), outputs=2).double()
        for compiled in (True, False):
            stepper = lf.Stepper(model if compiled else model.bfloat16())
            rows = x if compiled else x.bfloat16()
            steps(stepper, rows)
            before, old = stepper.state, model.recurrent
            model.recurrent = new.to(rows.dtype)
            for _ in range(2):
                with pytest.raises(TypeError, match=words):
                    stepper.step(rows[0])
            model.recurrent = old
            assert torch.equal(stepper.state, before)
            stepper.step(rows[0])
            assert (NATIVE in stepper.explain()) == compiled


def test_a_hook_on_a_layer_that_is_only_its_cell() -> None:
    layer, x = lf.Recurrent(lf.GRU(3, 5)), torch.randn(1, 3)
    stepper = lf.Stepper(layer)
    for _ in range(5):
        stepper.step(x)
    before = stepper.state
    handle = layer.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="Recurrent has hooks"):
        stepper.step(x)
    handle.remove()
    torch.testing.assert_close(stepper.step(x), by_definition(layer.cell, x[None], state=before).hidden[0])


# ------------------------------------------------------------------ it checks itself


class Clocked(lf.Transition):
    """Reads something that no fingerprint sees."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.eye(3, dtype=torch.float64) / 2)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return h @ self.W + x * HIDDEN()


def HIDDEN() -> float:
    return float(vars(zoo).get("_".join(["a", "secret"]), 1.0))


def test_what_no_fingerprint_sees_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, x = Clocked(), randn(8, 1, 3)
    stepper = lf.Stepper(cell)
    steps(stepper, x)
    assert NATIVE in stepper.explain()
    state = stepper.state
    monkeypatch.setitem(vars(zoo), "a_secret", 2.0)
    assert stepper._native is not None
    stepper._native.left = 0  # it is time for a check
    assert_same(stepper.step(x[0]), cell(state, x[0]).detach())  # the wrong value never comes out
    assert_same(steps(stepper, x), by_definition(cell, x, state=cell(state, x[0]).detach()).hidden)
    assert NATIVE in stepper.explain()  # traced again
    monkeypatch.setitem(vars(zoo), "a_secret", 3.0)
    stepper.step(x[0])
    stepper.check()  # at a time of the user's own choice
    state = stepper.state
    assert_same(stepper.step(x[0]), cell(state, x[0]).detach())


def test_wrong_native_code_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    original = stepping.NativeStep

    class Broken(original):  # type: ignore[misc, valid-type]
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            right: Any = self.call  # type: ignore[has-type]

            def call(job: int) -> int:
                found = right(job)
                self.out[self.place][0].add_(0.01)
                return found

            self.call = call

    monkeypatch.setattr(stepping, "NativeStep", Broken)
    cell, x = lf.GRU(3, 5).double(), randn(5, 2, 3)
    stepper = lf.Stepper(cell)
    with pytest.warns(lf.EngineWarning, match="was wrong about GRU"):
        found = steps(stepper, x)
    assert_same(found, by_definition(cell, x).hidden)
    assert "its native code was wrong" in stepper.explain()


def test_checks_are_seldom_and_never_where_the_user_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = []
    original = stepping.disagreement

    def counted(*args: Any) -> str | None:
        checks.append(1)
        return original(*args)

    monkeypatch.setattr(stepping, "disagreement", counted)
    stepper, x = lf.Stepper(lf.GRU(3, 5)), np.zeros((1, 3), np.float32)
    for _ in range(1999):
        stepper.step(x)
    assert len(checks) == stepping.FIRST
    stepper.check()
    for _ in range(1999):
        stepper.step(x)
    assert len(checks) == stepping.FIRST + 1


def test_modes_of_torch() -> None:
    cell, x = lf.GRU(3, 5), torch.randn(6, 1, 3)
    needed = by_definition(cell, x).hidden
    with torch.inference_mode():
        stepper = lf.Stepper(cell)
        torch.testing.assert_close(steps(stepper, x), needed)
        assert NATIVE in stepper.explain()
        made = lf.GRU(3, 5)
        torch.testing.assert_close(steps(lf.Stepper(made), x), by_definition(made, x).hidden)
    stepper.reset()
    torch.testing.assert_close(steps(stepper, x), needed)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(steps(lf.Stepper(cell), x), needed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        half = lf.GRU(3, 5).to(torch.bfloat16)
        stepper = lf.Stepper(half)
        torch.testing.assert_close(steps(stepper, x.bfloat16()), by_definition(half, x.bfloat16()).hidden)
    assert OWN in stepper.explain()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    cell, x = lf.GRU(3, 5).cuda(), torch.randn(6, 2, 3)
    stepper = lf.Stepper(cell)
    needed = by_definition(cell, x.cuda()).hidden
    torch.testing.assert_close(steps(stepper, x.cuda()), needed)
    assert OWN in stepper.explain()
    stepper.reset()
    found = np.stack([stepper.step(row.numpy()) for row in x])
    torch.testing.assert_close(torch.from_numpy(found), needed.cpu())
