"""The law of engines: an engine changes time and memory, never the value. `Sequential` is the oracle."""

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import loopfold as lf
from loopfold.engines import compiled
from loopfold.states import leaves

ENGINES = (lf.Looped(), lf.FusedCPU())
DTYPES = [torch.float64, torch.float32]
EXACT = 1e-11  # in float64, of the largest value of a tensor
SINGLE = 5e-6  # in float32 likewise, against the truth in float64; or 5 times the worst error of Sequential itself
# τ, batch, n, unequal lengths
SIZES = [(1, 1, 3, False), (1, 5, 17, False), (63, 1, 17, False), (63, 5, 3, True), (8, 33, 64, True)]


def everything(
    cell: nn.Module, x: Tensor | None, engine: lf.Engine, lengths: list[int] | None = None, **options: Any
) -> dict[str, Tensor]:
    """States, last state, and the gradients of all parameters, of x and of state(0), for a loss that uses them all."""
    cell.zero_grad()
    x = None if x is None else x.clone().requires_grad_()
    options = {k: v.clone().requires_grad_() if isinstance(v, Tensor) else v for k, v in options.items()}
    torch.manual_seed(11)  # a step may draw random numbers, and each engine must draw the same
    run = lf.unfold(cell, x, lengths=lengths, engine=engine, **options)
    found = {f"states {i}": leaf for i, leaf in enumerate(leaves(run.states))}
    found |= {f"last {i}": leaf for i, leaf in enumerate(leaves(run.last))}
    weights = torch.Generator().manual_seed(5)
    loss = sum((v * torch.randn(v.shape, generator=weights).to(v.dtype)).sum() for v in found.values())
    assert isinstance(loss, Tensor)
    if loss.requires_grad:  # a random step may use nothing that has a gradient
        loss.backward()
    inputs = {"x": x, **options}
    found |= {f"∇{k}": v.grad for k, v in inputs.items() if isinstance(v, Tensor) and v.grad is not None}
    found |= {f"∇{name}": p.grad for name, p in cell.named_parameters() if p.grad is not None}
    return {k: v.detach() for k, v in found.items()}


def errors(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """The largest error of each tensor, relative to the largest value in it."""
    assert found.keys() == truth.keys()
    return {k: float((found[k] - v).abs().max() / v.abs().max().clamp(min=1e-3)) for k, v in truth.items()}


def assert_agrees(engine: lf.Engine, cell: nn.Module, x: Tensor | None, *arguments: Any, **options: Any) -> None:
    """In float64 `engine` gives what Sequential gives; in float32 it is no further from the truth than that is."""
    dtype = next(cell.parameters()).dtype
    ours, theirs = (everything(cell, x, e, *arguments, **options) for e in (engine, lf.Sequential()))
    if dtype == torch.float64:
        bound, found = EXACT, errors(ours, theirs)
    else:
        wide: dict[str, Any] = {k: v.double() if isinstance(v, Tensor) else v for k, v in options.items()}
        x = None if x is None else x.double()
        truth = everything(copy.deepcopy(cell).double(), x, lf.Sequential(), *arguments, **wide)
        bound, found = max(SINGLE, 5 * max(errors(theirs, truth).values())), errors(ours, truth)
    assert {k: error for k, error in found.items() if not error <= bound} == {}


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("make", [*zoo.WITH_INPUT, *zoo.REWRITTEN], ids=lambda m: m.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_engines_agree_with_the_definition(
    engine: lf.Engine, make: Callable[[int, int], nn.Module], dtype: torch.dtype
) -> None:
    for tau, batch, n, unequal in SIZES:
        cell = make(4, n).to(dtype)
        x = torch.randn(tau, batch, 4, dtype=dtype)
        lengths = [1 + (7 * i) % tau for i in range(batch)] if unequal else None
        assert_agrees(engine, cell, x, lengths)


@pytest.mark.parametrize("make", [*zoo.WITH_INPUT, *zoo.REWRITTEN], ids=lambda m: m.__name__)
def test_checkpointed_agrees_with_the_definition(make: Callable[[int, int], nn.Module]) -> None:
    test_engines_agree_with_the_definition(lf.Checkpointed(), make, torch.float64)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("make", zoo.TENSORS, ids=lambda m: m.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_of_any_shape_agree_with_the_definition(
    engine: lf.Engine, make: Callable[[int, int], nn.Module], dtype: torch.dtype
) -> None:
    for tau, batch, n, unequal in ((1, 1, 3, False), (4, 1, 17, False), (5, 3, 6, True), (3, 33, 1, False)):
        cell = make(4, n).to(dtype)
        lengths = [1 + (7 * i) % tau for i in range(batch)] if unequal else None
        assert_agrees(engine, cell, torch.randn(tau, batch, 4, dtype=dtype), lengths)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", zoo.AWKWARD)
def test_awkward_steps_agree(engine: lf.Engine, name: str) -> None:
    """Steps that a compiler is likely to get wrong; a few may be refused by it, but none of these."""
    for dtype, n in ((torch.float64, 5), (torch.float32, 5), (torch.float64, 1)):
        cell = zoo.Awkward(zoo.AWKWARD[name], n).to(dtype)
        for lengths in (None, [4, 1, 2]):
            assert_agrees(engine, cell, torch.randn(4, 3, n, dtype=dtype), lengths)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_autonomous_system_agrees(engine: lf.Engine, dtype: torch.dtype) -> None:
    cell = zoo.Autonomous(17).to(dtype)
    state = torch.randn(5, 17, dtype=dtype)
    for tau in (1, 63):
        assert_agrees(engine, cell, None, steps=tau, state=state)


@pytest.mark.parametrize("engine", [lf.Looped(), lf.FusedCPU(), lf.FusedCPU(threads=1)], ids=str)
def test_a_given_state_and_only_some_outputs(engine: lf.Engine) -> None:
    cell = lf.LSTM(3, 5).double()
    x, h, c = torch.randn(9, 2, 3).double(), torch.randn(2, 5).double(), torch.randn(2, 5).double()
    results = []
    for e in (lf.Sequential(), engine):
        cell.zero_grad()
        h0, c0 = h.clone().requires_grad_(), c.clone().requires_grad_()
        lf.unfold(cell, x, state=(h0, c0), engine=e).last.c.sum().backward()  # no gradient comes to h
        results.append([h0.grad, c0.grad, *[p.grad for p in cell.parameters()]])
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("engine", [lf.Looped(), lf.FusedCPU()], ids=str)
def test_backward_twice_through_one_run(engine: lf.Engine) -> None:
    cell = lf.GRU(3, 5)
    run = lf.unfold(cell, torch.randn(9, 2, 3), engine=engine)
    run.hidden.sum().backward(retain_graph=True)
    assert cell.W.grad is not None
    once = cell.W.grad.clone()
    run.hidden.sum().backward()
    torch.testing.assert_close(cell.W.grad, 2 * once)


def test_without_gradients_nothing_is_recorded() -> None:
    cell, x = lf.LSTM(3, 5), torch.randn(9, 2, 3)
    with torch.no_grad():
        run = lf.unfold(cell, x, engine=lf.FusedCPU())
    assert not run.hidden.requires_grad
    torch.testing.assert_close(run.hidden, lf.unfold(cell, x, engine=lf.Sequential()).hidden)


def test_looped_runs_half_precision() -> None:
    cell = lf.Elman(3, 5, dtype=torch.bfloat16)
    x = torch.randn(9, 2, 3, dtype=torch.bfloat16)
    expected = lf.unfold(cell, x, engine=lf.Sequential()).hidden
    torch.testing.assert_close(lf.unfold(cell, x, engine=lf.Auto()).hidden, expected, rtol=0, atol=0.02)


@pytest.mark.parametrize("engine", [lf.Looped(), lf.FusedCPU()], ids=str)
def test_second_derivatives_name_the_way_out(engine: lf.Engine) -> None:
    cell, x = lf.Elman(3, 5).double(), torch.randn(6, 2, 3).double().requires_grad_()
    (g,) = torch.autograd.grad(lf.unfold(cell, x, engine=engine).hidden.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"engine=lf\.Sequential\(\)"):
        g.square().sum().backward()
    (g,) = torch.autograd.grad(lf.unfold(cell, x, engine=lf.Sequential()).hidden.sum(), x, create_graph=True)
    g.square().sum().backward()


# ------------------------------------------------------------------ refusals


class Refused(lf.Transition):
    def __init__(self, step: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(4, 4) / 2)
        self.step = step
        self.kept = torch.ones(4)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.step(self, h, x)


def _branch(cell: Any, h: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(h @ cell.W + x) if h.sum() > 0 else x


def _without_gradient(cell: Any, h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = h.abs().mean(-1, keepdim=True)
    return torch.tanh(h @ cell.W + x) / (1 + scale)


def _only_for_two(h: Tensor) -> Tensor:
    assert len(h) == 2, "only for two"
    return h


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        return v.round()

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Tensor:
        return g[0].clamp(-1, 1)


REFUSED: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], str]] = {
    "branch on values": (_branch, r"asks for the values of a tensor.*torch\.where"),
    "x in place": (lambda c, h, x: (h @ c.W).tanh() + x.mul_(1), r"updates x.*in place \(aten\.mul_\).*x\.clone\(\)"),
    "a part of x in place": (lambda c, h, x: x[:, :2].zero_().sum() + h, r"updates x.*in place \(aten\.zero_\)"),
    "no_grad": (_without_gradient, r"torch\.no_grad.*\.detach\(\)"),
    "sort": (lambda c, h, x: torch.tanh(h @ c.W + x).sort(-1).values, r"aten\.sort has no kernel"),
    "across the batch": (lambda c, h, x: torch.tanh(h @ c.W + x) - h.mean(0), r"aten\.mean mixes the sequences"),
    "x across the batch": (lambda c, h, x: torch.tanh(h @ c.W + (x - x.mean(0))), r"aten\.mean mixes the sequences"),
    "batch of one": (lambda c, h, x: torch.tanh(h @ c.W + x) if len(h) == 1 else x, "different batch sizes"),
    "batch size as a factor": (lambda c, h, x: torch.tanh(h @ c.W + torch.add(x, x, alpha=len(x))), "batch sizes?"),
    "batch size as features": (
        lambda c, h, x: torch.tanh(h @ c.W + x[:, :1].expand(-1, len(x)).sum()),
        "against each other",
    ),
    "own autograd": (lambda c, h, x: _Clipped.apply(torch.tanh(h @ c.W + x)), r"autograd\.Function.*g \* factor"),
    "own error": (lambda c, h, x: _only_for_two(h) @ c.W + x, "it fails on a batch of another size: only for two"),
    "batch size": (lambda c, h, x: torch.tanh(h @ c.W + x) / h.shape[0], "batch size itself"),
    "a tensor not its own": (lambda c, h, x: torch.tanh(h @ c.W + x) * c.kept, r"register_buffer"),
    "a product of states": (
        lambda c, h, x: torch.tanh((h.T @ h @ c.W)[:1] + h + x),
        "mixes the sequences",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("engine", [lf.Looped(), lf.FusedCPU()], ids=str)
def test_what_cannot_be_compiled_is_refused_by_name(name: str, engine: lf.Engine) -> None:
    step, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"{type(engine).__name__} cannot run Refused: .*{message}"):
        lf.unfold(Refused(step), torch.randn(3, 2, 4), state=torch.ones(2, 4), engine=engine)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_still_runs_under_auto(name: str) -> None:
    cell, x, state = Refused(REFUSED[name][0]), torch.randn(3, 2, 4), torch.ones(2, 4)
    runs = [lf.unfold(cell, x, state=state, engine=e).hidden for e in (lf.Auto(), lf.Sequential())]
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)


def test_hooks_are_never_skipped() -> None:
    cell = lf.Elman(3, 5)
    seen: list[int] = []
    hook = cell.register_forward_hook(lambda *_: seen.append(1))
    with pytest.raises(ValueError, match="hooks"):
        lf.unfold(cell, torch.randn(4, 2, 3), engine=lf.FusedCPU())
    seen.clear()
    lf.unfold(cell, torch.randn(4, 2, 3))
    assert len(seen) == 4
    hook.remove()


def test_what_a_step_sets_on_itself_is_set() -> None:
    """A compiled step would set nothing, so such a step is not compiled; and no trace is left behind."""

    class Watching(lf.Elman):
        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            self.seen = super().forward(h, x)
            return self.seen

    cell, x = Watching(3, 5), torch.randn(4, 2, 3)
    with pytest.raises(ValueError, match=r"changes self\.seen at every step"):
        lf.unfold(cell, x, engine=lf.Looped())
    assert not hasattr(cell, "seen")
    assert torch.equal(lf.unfold(cell, x).last, cell.seen)


GAIN = 1.0
AROUND = {"gain": 1.0}


def helper() -> float:
    return GAIN * AROUND["gain"]


@dataclass
class Options:
    gain: float = 1.0


class Changing(lf.Transition):
    """A step that depends on everything a step can depend on."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.options, self.listed, self.named = Options(), [1.0], {"gain": 1.0}
        self.activation: Callable[[Tensor], Tensor] = torch.tanh

    def gain(self) -> float:
        return helper() * self.scale * self.options.gain * self.listed[0] * self.named["gain"]

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.activation(self.one(h) - self.two(x)) * self.gain()


def test_a_change_of_the_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, x, state = Changing(), torch.randn(6, 2, 4), torch.zeros(2, 4)
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: setattr(cell, "activation", lambda v: torch.sin(v)),
        lambda: setattr(cell, "activation", lambda v: torch.cos(v)),
        lambda: setattr(cell, "activation", lambda v: torch.sin(v) * 0.5),
        lambda: setattr(cell.options, "gain", 0.9),
        lambda: setattr(cell, "options", Options(0.8)),
        lambda: cell.listed.__setitem__(0, 0.7),
        lambda: cell.named.__setitem__("gain", 1.3),
        lambda: monkeypatch.setattr(Changing, "scale", 0.6),
        lambda: monkeypatch.setitem(globals(), "GAIN", 1.2),
        lambda: monkeypatch.setitem(AROUND, "gain", 1.1),
        lambda: monkeypatch.setitem(globals(), "helper", lambda: 0.4),
        lambda: setattr(cell.two, "weight", nn.Parameter(torch.randn(4, 4))),
    ]
    results = []
    for change in changes:
        change()
        results.append(lf.unfold(cell, x, state=state, engine=lf.Sequential()).hidden)
        torch.testing.assert_close(lf.unfold(cell, x, state=state, engine=lf.FusedCPU()).hidden, results[-1])
    assert all(not torch.equal(a, b) for a, b in pairwise(results))


def _repeated(v: Tensor, times: int) -> Tensor:
    return torch.tanh(v) if times == 0 else _repeated(torch.sin(v), times - 1)


def test_a_step_that_never_stays_the_same_is_left_to_the_plain_loop() -> None:
    """Another number is an input of the program; another operation is another program, and sixteen are enough."""
    cell, x = Changing(), torch.randn(600, 2, 4)
    for i in range(20):
        cell.activation = functools.partial(_repeated, times=i)
        run = lf.unfold(cell, x, state=torch.zeros(2, 4))
        torch.testing.assert_close(
            run.hidden, lf.unfold(cell, x, state=torch.zeros(2, 4), engine=lf.Sequential()).hidden
        )
    assert "changed at too many calls" in lf.Recurrent(cell).explain(x, torch.zeros(2, 4))


def test_a_refusal_keeps_nothing_alive() -> None:
    cell, x = Refused(_branch), torch.randn(3, 2, 4)
    alive = weakref.ref(x), weakref.ref(cell)
    lf.unfold(cell, x, state=torch.ones(2, 4))
    del cell, x
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_results_have_memory_of_their_own(engine: lf.Engine) -> None:
    class Passing(lf.Transition):
        def initial_state(self, batch: int) -> tuple[Tensor, ...]:
            return tuple(torch.zeros(batch, 3) for _ in range(3))

        def forward(self, state: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor, ...]:
            h = torch.tanh(state[0] + state[1] + x)
            return h, h, x

    x = torch.randn(4, 2, 3)
    kept = x.clone()
    run = lf.unfold(Passing(), x, engine=engine)
    expected = run.states[1].clone()
    run.states[0].zero_()
    run.states[2].zero_()
    assert torch.equal(run.states[1], expected)
    assert torch.equal(x, kept)


def test_one_trace_serves_every_batch_and_length(monkeypatch: pytest.MonkeyPatch) -> None:
    from loopfold.engines import programs

    traces = []
    real = programs.trace

    def counted(*arguments: Any) -> lf.StepGraph:
        traces.append(1)
        return real(*arguments)

    monkeypatch.setattr(programs, "trace", counted)
    cell = lf.GRU(3, 5)
    for tau, batch in ((2, 1), (9, 4), (30, 17)):
        lf.unfold(cell, torch.randn(tau, batch, 3), engine=lf.FusedCPU())
    assert len(traces) == 1


def test_torch_func_transforms_run_the_definition() -> None:
    cell, x = lf.Elman(3, 5), torch.randn(4, 2, 3)
    gradient = torch.func.grad(lambda x: lf.unfold(cell, x).hidden.sum())(x)
    leaf = x.clone().requires_grad_()
    lf.unfold(cell, leaf).hidden.sum().backward()
    torch.testing.assert_close(gradient, leaf.grad)


# ------------------------------------------------------------------ native code


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("function", [torch.tanh, torch.sigmoid, torch.exp], ids=lambda f: f.__name__)
def test_functions_are_accurate_to_a_few_units_in_the_last_place(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    class Apply(lf.Transition):
        def forward(self, h: Tensor) -> Tensor:
            return function(h)

    span = 700 if function is torch.exp and dtype is torch.float64 else 87
    x = torch.cat([torch.linspace(-span, span, 20001), torch.linspace(-1, 1, 20001), torch.logspace(-30, 0, 5000)])
    x = x.to(dtype)[None]
    got = lf.unfold(Apply(), steps=1, state=x, engine=lf.FusedCPU()).last
    if dtype is torch.float32:
        exact = function(x.double())
    else:
        import mpmath

        mpmath.mp.prec = 120
        precise = {"tanh": mpmath.tanh, "exp": mpmath.exp, "sigmoid": lambda v: 1 / (1 + mpmath.exp(-v))}
        x, got = x[:, ::23], got[:, ::23]
        exact = torch.tensor([[float(precise[function.__name__](v)) for v in x[0].tolist()]], dtype=dtype)
    reference = exact.to(dtype)
    ulp = torch.nextafter(reference.abs(), torch.full_like(reference, torch.inf)) - reference.abs()
    assert float(((got.double() - exact).abs() / ulp.double()).max()) < 3


def test_special_values_pass_through_native_code() -> None:
    class Apply(lf.Transition):
        def forward(self, h: Tensor) -> Tensor:
            return torch.cat([torch.tanh(h[:, :5]), torch.sigmoid(h[:, 5:10]), torch.exp(h[:, 10:])], -1)

    values = torch.tensor([[torch.inf, -torch.inf, torch.nan, 0.0, 1000.0] * 3])
    got = lf.unfold(Apply(), steps=1, state=values, engine=lf.FusedCPU()).last
    torch.testing.assert_close(got, Apply()(values), equal_nan=True)


def test_kernels_are_kept_on_disk(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from loopfold.engines import fused_cpu

    monkeypatch.setenv("LOOPFOLD_CACHE", str(tmp_path / "kernels"))
    monkeypatch.setattr(fused_cpu, "_loaded", {})
    compiled = []
    real = fused_cpu._compile

    def counted(*arguments: str) -> bytes:
        compiled.append(1)
        return real(*arguments)

    monkeypatch.setattr(fused_cpu, "_compile", counted)

    def run() -> Tensor:
        torch.manual_seed(0)
        return lf.unfold(lf.Elman(3, 7), torch.ones(5, 2, 3), engine=lf.FusedCPU()).hidden

    first = run()
    assert len(compiled) == 1
    fused_cpu._loaded.clear()
    torch.testing.assert_close(run(), first, rtol=0, atol=0)
    assert len(compiled) == 1  # read from disk
    (file,) = (tmp_path / "kernels").glob("*.kernel")
    file.write_bytes(file.read_bytes()[:-40] + b"torn" * 10)
    fused_cpu._loaded.clear()
    torch.testing.assert_close(run(), first, rtol=0, atol=0)
    assert len(compiled) == 2  # a torn file is found out and compiled anew


def test_explain_says_which_engine_and_why() -> None:
    text = lf.Recurrent(lf.LSTM(3, 5)).explain(torch.randn(9, 2, 3))
    assert "LSTM over τ = 9, batch 2, float32 on cpu: FusedCPU" in text
    assert "1 product (5×20)" in text
    assert "20 numbers a step and sequence" in text
    assert "beside the states: nothing" in lf.Recurrent(lf.Elman(3, 5)).explain(torch.randn(30, 2, 3))
    assert "Sequential, because so few steps" in lf.Recurrent(lf.Elman(3, 5)).explain(torch.randn(3, 2, 3))
    assert "Looped, because its matrices are large" in lf.Recurrent(lf.Elman(1024, 1024)).explain(
        torch.randn(9, 1, 1024)
    )
    refused = lf.Recurrent(Refused(_branch)).explain(torch.randn(9, 2, 4), state=torch.ones(2, 4))
    assert "Sequential" in refused
    assert "torch.where" in refused


# ------------------------------------------------------------------ tokens: what x decides alone, once for every kind


class LookUp(lf.Transition):
    """A step that reads tokens; the ones below do so in ways of their own. The table has `kinds` rows."""

    def __init__(self, kinds: int, n: int) -> None:
        super().__init__()
        self.E = nn.Embedding(kinds, n)
        self.W = nn.Parameter(torch.randn(n, n) / n**0.5)
        self.b = nn.Parameter(torch.randn(n))

    def initial_state(self, batch: int) -> Any:
        return self.W.new_zeros(batch, len(self.b))

    def forward(self, h: Any, x: Tensor) -> Any:
        return torch.tanh(h @ self.W + self.E(x))


class TableTwice(LookUp):
    """The table is read by token, and is a matrix of the step too."""

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(h @ self.W + self.E(x) + torch.sigmoid(h @ self.E.weight.T) @ self.E.weight)


class TwoTables(LookUp):
    """Two tables, of unequal size; the smaller one says how many kinds there are."""

    def __init__(self, kinds: int, n: int) -> None:
        super().__init__(kinds, n)
        self.gate = nn.Embedding(kinds + 3, n)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(x)) * torch.tanh(h @ self.W + self.E(x)) + self.b * h.tanh()


class GivesItsInput(LookUp):
    """A part of the state that no step reads, so that it is computed after the loop, from x."""

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor]:
        return self.W.new_zeros(batch, len(self.b)), self.W.new_zeros(batch, len(self.b))

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(state[0] @ self.W + self.E(x))
        return h, h * self.E(x) + self.b


class InputAlone(LookUp):
    """No step reads the one before: all is computed outside the loop."""

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.E(x) @ self.W + self.b)


class AlsoANumber(LookUp):
    """The token is looked up and counted with too, so that a table of kinds would not do."""

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(h @ self.W + self.E(x) * (x % 3)[:, None])


def frozen(kinds: int, n: int) -> lf.Embedded:
    return lf.Embedded(lf.GRU(3, n), nn.Embedding.from_pretrained(torch.randn(kinds, 3)))


def padded(kinds: int, n: int) -> lf.Embedded:
    return lf.Embedded(lf.LSTM(3, n), nn.Embedding(kinds, 3, padding_idx=1))


TOKEN_STEPS: dict[str, Callable[[int, int], nn.Module]] = {
    "Elman": lambda kinds, n: lf.Embedded(lf.Elman(3, n), nn.Embedding(kinds, 3)),
    "LSTM": lambda kinds, n: lf.Embedded(lf.LSTM(3, n), nn.Embedding(kinds, 3)),
    **{step.__name__: step for step in (frozen, padded)},
    **{step.__name__: step for step in (LookUp, TableTwice, TwoTables, GivesItsInput, InputAlone, AlsoANumber)},
}


def of_tokens(cell: nn.Module, x: Tensor, engine: lf.Engine, lengths: list[int] | None) -> dict[str, Tensor]:
    """As `everything`, for an x that has no gradient."""
    cell.zero_grad()
    run = lf.unfold(cell, x, lengths=lengths, engine=engine)
    found = {f"states {i}": leaf for i, leaf in enumerate(leaves(run.states))}
    found |= {f"last {i}": leaf for i, leaf in enumerate(leaves(run.last))} | {"hidden": run.hidden}
    weights = torch.Generator().manual_seed(5)
    torch.stack([(v * torch.randn(v.shape, generator=weights)).sum() for v in found.values()]).sum().backward()
    found |= {f"∇{name}": p.grad for name, p in cell.named_parameters() if p.grad is not None}
    return {k: v.detach() for k, v in found.items()}


def assert_tokens_agree(cell: nn.Module, x: Tensor, lengths: list[int] | None = None) -> None:
    truth = of_tokens(cell, x, lf.Sequential(), lengths)
    for engine in (*ENGINES, lf.Auto()):
        found = errors(of_tokens(cell, x, engine, lengths), truth)
        assert {k: error for k, error in found.items() if not error <= EXACT} == {}, engine


@pytest.mark.parametrize("name", TOKEN_STEPS)
def test_tokens_agree(name: str) -> None:
    """Each kind of token is computed on once, then looked up: with fewer kinds than tokens, and with more."""
    cells = {kinds: TOKEN_STEPS[name](kinds, 4).double() for kinds in (5, 50)}
    for kinds, tau, batch in ((5, 9, 1), (5, 7, 3), (5, 1, 6), (5, 2, 2), (50, 7, 3), (50, 1, 1)):
        cell, x = cells[kinds], torch.randint(kinds, (tau, batch))
        for lengths in (None, [1 + (5 * i) % tau for i in range(batch)]):
            assert_tokens_agree(cell, x, lengths)


def test_each_kind_of_token_is_computed_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: set[int] = set()
    apply = compiled.apply

    def noted(node: Any, values: dict[Any, Any], many: int) -> Any:
        rows.add(many)
        return apply(node, values, many)

    monkeypatch.setattr(compiled, "apply", noted)
    lf.unfold(TOKEN_STEPS["LSTM"](9, 4), torch.tensor([[3, 1], [4, 1], [5, 3]]), engine=lf.FusedCPU())
    assert rows == {4}  # 1, 3, 4 and 5, not the six places


def test_a_run_leaves_no_cycle_that_holds_tensors() -> None:
    """Or memory would be freed only when Python next looks for cycles, some windows later."""
    cell = TOKEN_STEPS["LSTM"](9, 4)
    for _ in range(2):
        gc.collect()
        gc.disable()
        try:
            gc.set_debug(gc.DEBUG_SAVEALL)
            lf.unfold(cell, torch.zeros(7, 3, dtype=torch.long), engine=lf.FusedCPU()).hidden.sum().backward()
            gc.collect()
            kept = [thing for thing in gc.garbage if isinstance(thing, Tensor)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert kept == []  # of the second run: the first one compiles


@pytest.mark.parametrize("name", ["LSTM", "frozen"])
def test_the_gradient_of_an_embedding(name: str) -> None:
    """It has a row for each token that was read, summed over its places, and zeros elsewhere; none if it is frozen."""
    cell = TOKEN_STEPS[name](8, 4).double()
    x = torch.tensor([[1, 6], [6, 6], [2, 1]] * 5)
    for engine in (*ENGINES, lf.Auto()):
        found = of_tokens(cell, x, engine, None)
        if name == "frozen":
            assert "∇embedding.weight" not in found
        else:
            assert found["∇embedding.weight"].ne(0).any(-1).nonzero().flatten().tolist() == [1, 2, 6]


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_tokens_may_be_small_whole_numbers_and_go_without_gradients(engine: lf.Engine) -> None:
    cell, x = TOKEN_STEPS["LSTM"](5, 4).double(), torch.randint(5, (9, 2))
    needed = lf.unfold(cell, x, engine=lf.Sequential()).hidden
    with torch.no_grad():
        for tokens in (x, x.int()):
            torch.testing.assert_close(lf.unfold(cell, tokens, engine=engine).hidden, needed)


@pytest.mark.parametrize("engine", [*ENGINES, lf.Auto(), lf.Sequential()], ids=str)
@pytest.mark.parametrize("steps", [2, 20])
@pytest.mark.parametrize("token", [-1, 5, 1000])
def test_a_token_that_has_no_row_is_refused(engine: lf.Engine, steps: int, token: int) -> None:
    cell, x = TOKEN_STEPS["Elman"](5, 4), torch.zeros(steps, 2, dtype=torch.long)
    x[-1, 1] = token
    with pytest.raises((IndexError, ValueError), match="out of (range|bounds)"):
        lf.unfold(cell, x, engine=engine)
    x[-1, 1] = 0
    lf.unfold(cell, x, engine=engine)


READINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda e: e.sum(1),
    "side by side": lambda e: e.flatten(1)[:, 2:6],
    "one of them": lambda e: e[:, 1],
}


@pytest.mark.parametrize("reading", READINGS)
def test_several_tokens_a_step(reading: str) -> None:
    """x is [τ, batch, 3]: a step looks up three of them, so kinds of tokens are not kinds of x."""

    class Several(LookUp):
        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(h @ self.W + READINGS[reading](self.E(x)))

    for kinds in (5, 50):
        assert_tokens_agree(Several(kinds, 4).double(), torch.randint(kinds, (7, 3, 3)))


def test_a_row_that_no_token_names_does_no_harm() -> None:
    """Row 0 is zeros, where e / |e| is not a number; but no token is 0."""

    class Direction(LookUp):
        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            e = self.E(x)
            return torch.tanh(h @ self.W + (e / e.norm(dim=-1, keepdim=True)) @ self.W)

    cell = Direction(5, 4).double()
    nn.init.zeros_(cell.E.weight[0].detach())
    assert_tokens_agree(cell, torch.randint(1, 5, (7, 3)))
    assert_tokens_agree(cell, torch.randint(1, 5, (7, 3)), [7, 1, 2])
