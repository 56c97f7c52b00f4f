"""Steps that nobody thought of: thousands of random programs, compiled and compared with the definition."""

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from test_engines import ENGINES, EXACT, errors
from torch import Tensor, nn

import loopfold as lf
from loopfold.engines import cache, fused_cpu
from loopfold.states import leaves


def in_place(v: Tensor) -> Tensor:
    """A tensor of its own, updated through a view and as a whole; the view is read afterwards."""
    part = v[:, 1:3]
    part += 0.5
    v[:, :1] = 0.25
    v *= 0.9
    return v + part.sum(-1, keepdim=True)


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    **{"tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu": torch.relu, "neg": torch.neg, "abs": torch.abs},
    **{"sin": torch.sin, "cos": torch.cos, "erf": torch.erf, "softmax": lambda v: torch.softmax(v, -1)},
    **{"silu": nn.functional.silu, "gelu": nn.functional.gelu, "elu": nn.functional.elu},
    **{"softplus": nn.functional.softplus, "mish": nn.functional.mish, "leaky": nn.functional.leaky_relu},
    "bounded exp": lambda v: torch.exp(-v.abs()),
    "log": lambda v: torch.log(v.abs() + 1.5),
    "log softmax": lambda v: torch.log_softmax(v, -1),
    "sqrt": lambda v: torch.sqrt(v.square() + 0.5),
    "rsqrt": lambda v: torch.rsqrt(v.square() + 0.5),
    "mean": lambda v: v.mean(-1, keepdim=True) + v,
    "sum": lambda v: torch.tanh(v.sum(-1, keepdim=True)) * v,
    "amax": lambda v: v - v.amax(-1, keepdim=True),
    "amin": lambda v: v * v.amin(-1, keepdim=True),
    "norm": lambda v: v / (1 + v.norm(dim=-1, keepdim=True)),
    "layer norm": lambda v: nn.functional.layer_norm(v, v.shape[-1:]),
    "clamp": lambda v: v.clamp(-0.7, 0.9),
    "hardtanh": nn.functional.hardtanh,
    "detach": lambda v: v.detach() * v,
    "swap": lambda v: torch.cat([v[:, 2:], v[:, :2]], -1),
    "chunks": lambda v: torch.cat([v.chunk(2, -1)[1], torch.tanh(v.chunk(2, -1)[0])], -1),
    "asin": lambda v: torch.asin(0.9 * torch.tanh(v)),
    "prod": lambda v: torch.tanh(v).prod(-1, keepdim=True) + v,
    "cumprod": lambda v: torch.sigmoid(v).cumprod(-1) - v,
    "norm of order 1": lambda v: v / (1 + v.norm(1, -1, keepdim=True)),
    "any": lambda v: torch.where((v > 1).any(-1, keepdim=True), 0.5 * v, v),
    "cube": lambda v: torch.tanh(v) ** 3,
    "to the power of zero": lambda v: v**0 + v,
    "sign": lambda v: v.sign() * v,
    "truth": lambda v: v * v.bool(),
    "there and back": lambda v: v + (v > 0.2).to(torch.bool).to(v.dtype),
    "first feature": lambda v: v * v[:, :1],
    "a part in place": lambda v: in_place(v + 0.0),
    "dropout": lambda v: nn.functional.dropout(v, 0.3),
    "noise": lambda v: v + 0.1 * torch.randn_like(v),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{"add": torch.add, "sub": torch.sub, "mul": torch.mul, "maximum": torch.maximum, "minimum": torch.minimum},
    "div": lambda a, b: a / (b.abs() + 1),
    "where": lambda a, b: torch.where(a > b, a, 0.5 * b),
    "rsub": lambda a, b: 1 - a * b,
    "gate": lambda a, b: torch.sigmoid(a) * b,
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "either": lambda a, b: torch.where((a > 0.1) + (b > 0.1), a, b),
    "logaddexp": torch.logaddexp,
    "hypot": lambda a, b: torch.hypot(a, b + 3),
    "both": lambda a, b: a * ((a > 0) * (b > 0)),
    "neither": lambda a, b: b * ~((a > 0) | (b < 0.3)),
    "mean of both": lambda a, b: a + torch.cat([a, b], -1).mean(-1, keepdim=True),
    "greatest of both": lambda a, b: b - torch.cat([b, a], -1).amax(-1, keepdim=True),
    "norm of both": lambda a, b: nn.functional.layer_norm(torch.cat([a, b], -1), (2 * a.shape[1],))[:, : a.shape[1]],
    "softmax of both": lambda a, b: torch.softmax(torch.cat([a, torch.tanh(b)], -1), -1)[:, 1 : a.shape[1] + 1],
    "crossed": lambda a, b: torch.cat([a[:, ::1][:, : a.shape[1] // 2], b[:, a.shape[1] // 2 :]], -1),
}
WITH_WEIGHTS = ("matmul", "matmul", "matmul", "row", "matmul of both")


def largest(v: Tensor) -> Tensor:
    """The place of the largest; of rounded numbers, since rounding may decide between two that are nearly equal."""
    return (7.3 * v).round().argmax(-1)


CHOICES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one-hot": lambda v, table: v - nn.functional.one_hot(largest(v), v.shape[1]),
    "one-hot product": lambda v, table: nn.functional.one_hot(largest(v), v.shape[1]).to(v.dtype) @ table,
    "row of a table": lambda v, table: v * table[largest(v)],
    "product of a row": lambda v, table: table.index_select(0, largest(-v)) @ table,
    "rows of a table": lambda v, table: nn.functional.embedding(torch.stack([largest(v), v.argmin(-1)], 1), table).mean(
        1
    ),
    "the number at a place": lambda v, table: v.gather(1, largest(v)[:, None]) * v,
    "in order": lambda v, table: v.gather(1, torch.sort((7.3 * v).round(), dim=-1, stable=True)[1]),
    "bounded index": lambda v, table: table[(3 * v).round().clamp(0, v.shape[1] - 1).long()].sum(1) + v,
}


class RandomStep(lf.Transition):
    """A step made of instructions: (operation, where its arguments stand among the values so far)."""

    def __init__(self, program: list[tuple[str, int, int]], n: int, n_state: int) -> None:
        super().__init__()
        self.program, self.n, self.n_state = tuple(program), n, n_state
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(n, n) / n**0.5) for _ in range(2)])
        self.wide = nn.Parameter(torch.randn(2 * n, 2 * n) / n**0.5)
        self.rows = nn.ParameterList([nn.Parameter(torch.randn(n)), nn.Parameter(torch.randn(1))])

    def initial_state(self, batch: int) -> tuple[Tensor, ...]:
        ramp = torch.linspace(-0.4, 0.5, self.n).to(self.rows[0])  # not all alike: layer norm needs a spread
        return tuple((ramp * (i + 1)).repeat(batch, 1) for i in range(self.n_state))

    def forward(self, state: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor, ...]:
        values = [*state, x]
        for op, i, j in self.program:
            a, b = values[i % len(values)], values[j % len(values)]
            if op == "matmul":
                values.append(a @ self.weights[j % 2])
            elif op == "matmul of both":
                values += (torch.cat([a, b], -1) @ self.wide).chunk(2, -1)
            elif op == "row":
                values.append(a * self.rows[j % 2])
            elif op in CHOICES:
                values.append(CHOICES[op](a, self.weights[j % 2]))
            elif op in UNARY:
                values.append(UNARY[op](a))
            else:
                values.append(BINARY[op](a, b))
        return tuple(torch.tanh(v + 0.1 * values[k]) for k, v in enumerate(values[-self.n_state :]))


OPERATIONS = st.sampled_from([*WITH_WEIGHTS, *UNARY, *BINARY, *CHOICES])
PROGRAMS = st.lists(st.tuples(OPERATIONS, st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=10)


def run(
    cell: RandomStep, x: Tensor, engine: lf.Engine, lengths: list[int] | None, parts: int, last: bool
) -> dict[str, Tensor]:
    """States, and the gradients of a loss on some parts of the state: those whose bit is set in `parts`."""
    cell.zero_grad()
    x = x.clone().requires_grad_()
    start = tuple(leaf.requires_grad_() for leaf in cell.initial_state(x.shape[1]))
    torch.manual_seed(3)  # each engine draws the same numbers
    found = lf.unfold(cell, x, state=start, lengths=lengths, engine=engine)
    states = leaves(found.last if last else found.states)
    results = {f"states {i}": leaf.detach() for i, leaf in enumerate(leaves(found.states))}
    sources = {"x": x, **{f"start {i}": s for i, s in enumerate(start)}, **dict(cell.named_parameters())}
    return results | gradients_of(states, parts, sources)


def gradients_of(results: list[Tensor], parts: int, sources: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of a loss on some of the results: those whose bit is set in `parts`."""
    weights = torch.Generator().manual_seed(5)
    chosen = [leaf for i, leaf in enumerate(results) if parts >> i & 1] or results[:1]
    loss = sum((v * torch.randn(v.shape, generator=weights).to(v)).sum() for v in chosen)
    assert isinstance(loss, Tensor)
    if loss.requires_grad:
        loss.backward()
    return {f"∇{k}": torch.zeros_like(v) if v.grad is None else v.grad for k, v in sources.items()}


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Thousands of kernels, each run a few times: LLVM need not think long about them, nor keep them on disk."""
    patch = pytest.MonkeyPatch()
    patch.setattr(fused_cpu, "OPTIMISE", 0)
    patch.setattr(cache, "write", lambda *_: None)
    patch.setattr(cache, "read", lambda *_: None)
    fused_cpu._target.cache_clear()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    patch.undo()
    fused_cpu._target.cache_clear()


@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    program=PROGRAMS,
    n_state=st.integers(1, 3),
    n=st.sampled_from([4, 6, 18]),
    tau=st.sampled_from([1, 2, 5]),
    batch=st.integers(1, 5),
    parts=st.integers(1, 7),
    last=st.booleans(),
)
def test_random_steps_agree(quick_compilation: Any, program: Any, n_state: int, n: int, tau: int, batch: int,
                            parts: int, last: bool) -> None:  # fmt: skip
    torch.manual_seed(len(program))
    cell = RandomStep(program, n, n_state).double()
    x = torch.randn(tau, batch, n).double()
    lengths = [1 + i % tau for i in range(batch)] if len(program) % 2 else None
    truth = run(cell, x, lf.Sequential(), lengths, parts, last)
    for engine in ENGINES:
        found = errors(run(cell, x, engine, lengths, parts, last), truth)
        assert {k: error for k, error in found.items() if not error <= EXACT} == {}, type(engine).__name__


def assert_agrees_in_single_precision(seed: int, engine: lf.Engine, device: str = "cpu") -> None:
    """One random step in float32: no further from the truth than the definition in float32, or than rounding."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    names = [op for op in (*WITH_WEIGHTS, *UNARY, *BINARY) if op not in ("dropout", "noise")]  # others in float64
    program = [
        (choose.choice(names), choose.randrange(50), choose.randrange(50)) for _ in range(choose.randrange(1, 9))
    ]
    n, n_state, batch, tau = choose.choice([4, 6, 18]), choose.randrange(1, 4), choose.choice([1, 3, 9]), 4
    cell, x = RandomStep(program, n, n_state), torch.randn(tau, batch, n)
    lengths = [1 + (5 * i) % tau for i in range(batch)] if choose.random() < 0.5 else None
    loss = choose.randrange(1, 8), choose.random() < 0.3
    truth = run(copy.deepcopy(cell).double(), x.double(), lf.Sequential(), lengths, *loss)
    theirs, ours = (
        {k: v.double().cpu() for k, v in run(cell.to(device), x.to(device), e, lengths, *loss).items()}
        for e in (lf.Sequential(), engine)
    )
    bound = max(2e-5, 20 * max(errors(theirs, truth).values()))
    assert {k: error for k, error in errors(ours, truth).items() if not error <= bound} == {}, program
