"""What a step may read and give beyond `state = f(state, x)`: a context, several inputs, its number, an output."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers import assert_same, randn
from torch import Tensor, nn

import loopfold as lf
from loopfold.drawing.networks import circuit
from loopfold.engines.programs import program_of
from loopfold.engines.selfcheck import disagreement
from loopfold.states import asks_for_index, gives_output, leaves
from loopfold.unfolding import checked

pytestmark = pytest.mark.usefixtures("one_thread")
f64 = torch.float64
ENGINES = (lf.Looped(), lf.FusedCPU())
COMPILED = pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(randn(*shape) / shape[-1] ** 0.5)


class Step(nn.Module):
    """Parameters for all of the steps here."""

    def __init__(self, n: int = 5, n_in: int = 3) -> None:
        super().__init__()
        self.W, self.U, self.V, self.C = matrix(n, n), matrix(n, n_in), matrix(4, n), matrix(n, 2)
        self.clock = matrix(n)

    def initial_state(self, batch: int) -> Tensor:
        return self.W.new_zeros(batch, self.W.shape[0])


class Signals(NamedTuple):
    speed: Tensor
    gate: Tensor


class TwoInputs(Step):
    def forward(self, h: Tensor, x: Signals) -> Tensor:
        return torch.tanh(h @ self.W.T + x.speed @ self.U.T) * torch.sigmoid(x.gate)


class Nested(Step):
    def forward(self, h: Tensor, x: Any) -> Tensor:
        (speed, token), gate = x
        return torch.tanh(h @ self.W.T + speed @ self.U.T + self.clock * token[:, None]) * torch.sigmoid(gate)


class Clocked(Step):
    def forward(self, h: Tensor, x: Tensor, t: Tensor) -> Tensor:
        return torch.tanh(h @ self.W.T + x @ self.U.T + torch.sin(self.clock * t))


class KeywordClock(Step):
    def forward(self, h: Tensor, x: Tensor, *, scale: float = 0.5, t: Tensor) -> Tensor:
        return torch.tanh(h @ self.W.T + x @ self.U.T) / (1 + scale * t)


class WithOutput(Step):
    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ self.W.T + x @ self.U.T)
        return h @ self.V.T, h


class Looks(NamedTuple):
    before: Tensor  # of the state that was given
    inside: Tensor  # a part of the step itself
    new: Tensor  # the state, once more
    x: Tensor
    high: Tensor  # truth values
    largest: Tensor  # whole numbers


class ManyOutputs(Step):
    def forward(self, state: lf.LSTMState, x: Tensor) -> tuple[Looks, lf.LSTMState]:
        h, c = state
        inside = h @ self.W.T + x @ self.U.T
        new = torch.tanh(inside) + c
        return Looks(h, inside, new, x, new > 0, new.argmax(-1)), lf.LSTMState(new, c * 0.5 + new)

    def initial_state(self, batch: int) -> Any:
        return lf.LSTMState(self.W.new_zeros(batch, 5), self.W.new_zeros(batch, 5))


class OnlyOutputsReadIt(Step):
    """Nothing but the output reads the state."""

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return h @ self.V.T, x @ self.U.T


class All(Step):
    def forward(self, h: Tensor, x: Signals, t: Tensor) -> tuple[Any, Tensor]:
        h = torch.tanh(h @ self.W.T + x.speed @ self.U.T + t * self.clock) * x.gate
        return (h @ self.V.T, (h * t,)), h


def signals(tau: int, batch: int) -> Signals:
    return Signals(randn(tau, batch, 3), randn(tau, batch, 5))


STEPS: list[tuple[type[Step], Callable[[int, int], Any]]] = [
    (TwoInputs, signals),
    (Nested, lambda tau, batch: ((randn(tau, batch, 3), torch.randint(9, (tau, batch))), randn(tau, batch, 5))),
    (Clocked, lambda tau, batch: randn(tau, batch, 3)),
    (KeywordClock, lambda tau, batch: randn(tau, batch, 3)),
    (WithOutput, lambda tau, batch: randn(tau, batch, 3)),
    (ManyOutputs, lambda tau, batch: randn(tau, batch, 3)),
    (OnlyOutputsReadIt, lambda tau, batch: randn(tau, batch, 3)),
    (All, signals),
]


def everything(
    cell: nn.Module, x: Any, engine: lf.Engine, lengths: list[int] | None, context: Any = None, **options: Any
) -> dict[str, Tensor]:
    """All that a run gives, and every gradient of a loss that uses it all."""
    cell.zero_grad()
    given = {f"x{i}": leaf for i, leaf in enumerate(leaves(x))} if x is not None else {}
    given |= {f"context{i}": leaf for i, leaf in enumerate(leaves(context))} if context is not None else {}
    given = {k: v.requires_grad_() for k, v in given.items() if v.is_floating_point()}
    for leaf in given.values():
        leaf.grad = None
    run = lf.unfold(cell, x, lengths=lengths, engine=engine, context=context, **options)
    parts = {"states": run.states, "last": run.last, "outputs": run.outputs, "hidden": run.hidden}
    parts |= {"last_hidden": run.last_hidden}
    found = {f"{k} {i}": leaf for k, v in parts.items() if v is not None for i, leaf in enumerate(leaves(v))}
    weights = torch.Generator().manual_seed(5)
    loss = sum(
        (v * torch.randn(v.shape, generator=weights, dtype=f64)).sum() for v in found.values() if v.is_floating_point()
    )
    assert isinstance(loss, Tensor)
    loss.backward()
    found |= {f"∇{k}": v.grad for k, v in {**given, **dict(cell.named_parameters())}.items() if v.grad is not None}
    return {k: v.detach() for k, v in found.items()}


def written_out(cell: Callable[..., Any], x: Any, state: Any, tau: int) -> list[Any]:
    """What the step returns at every step."""
    returned = []
    for t in range(tau):
        batch = leaves(state)[0].shape[0]
        extra = {"t": torch.full((batch, 1), float(t), dtype=f64)} if asks_for_index(cell, 2) else {}
        returned.append(cell(state, lf.states.map_state(lambda leaf, t=t: leaf[t], x), **extra))
        state = returned[-1][1] if gives_output(returned[-1], state) else returned[-1]
    return returned


@pytest.mark.parametrize(("kind", "make"), STEPS, ids=lambda v: getattr(v, "__name__", "x"))
def test_sequential_is_the_written_out_loop(kind: type[Step], make: Callable[[int, int], Any]) -> None:
    cell, x = kind(), make(4, 2)
    run = lf.unfold(cell, x, engine=lf.Sequential())
    returned = written_out(cell, x, cell.initial_state(2), 4)
    came = leaves(run.states) if run.outputs is None else [*leaves(run.outputs), *leaves(run.states)]
    assert_same(came, [torch.stack(leaf) for leaf in zip(*map(leaves, returned), strict=True)], 0)


@COMPILED
@pytest.mark.parametrize(("kind", "make"), STEPS, ids=lambda v: getattr(v, "__name__", "x"))
def test_engines_agree(engine: lf.Engine, kind: type[Step], make: Callable[[int, int], Any]) -> None:
    for tau, batch, lengths in ((1, 1, None), (9, 3, None), (9, 4, [9, 1, 4, 8])):
        cell, x = kind(), make(tau, batch)
        came, needed = (everything(cell, x, e, lengths) for e in (engine, lf.Sequential()))
        assert {k: v.dtype for k, v in came.items()} == {k: v.dtype for k, v in needed.items()}
        assert_same(came, needed)


# ------------------------------------------------------------------ a context


class Source(NamedTuple):
    memory: Tensor  # [batch, places, n]
    mask: Tensor  # [batch, places], truth values


class Attends(Step):
    def forward(self, h: Tensor, x: Tensor, context: Source) -> tuple[Tensor, Tensor]:
        scores = (context.memory @ h[:, :, None])[..., 0].masked_fill(~context.mask, -torch.inf)
        weights = scores.softmax(-1)
        read = (weights[:, None] @ context.memory)[:, 0]
        return weights, torch.tanh(h @ self.W.T + x @ self.U.T + read)


class Speaker(Step):
    def forward(self, h: Tensor, x: Tensor, context: Tensor, t: Tensor) -> Tensor:
        return torch.tanh(h @ self.W.T + x @ self.U.T + context @ self.C.T + self.clock * t)


class Free(Step):
    """Without an input."""

    def forward(self, h: Tensor, context: Tensor) -> Tensor:
        return torch.tanh(h @ self.W.T + context @ self.C.T)


def source(batch: int) -> Source:
    return Source(randn(batch, 6, 5), torch.arange(6) < torch.tensor([6, 2, 3, 1][:batch])[:, None])


def test_a_context_is_given_to_every_step() -> None:
    cell, x, context = Speaker(), randn(4, 2, 3), randn(2, 2)
    h, states = cell.initial_state(2), []
    for t in range(4):
        h = cell(h, x[t], context, torch.full((2, 1), float(t), dtype=f64))
        states.append(h)
    assert_same(lf.unfold(cell, x, context=context).states, torch.stack(states))
    free = Free()
    run = lf.unfold(free, steps=3, state=h, context=context)
    assert_same(run.last, free(free(free(h, context), context), context))


def test_each_sequence_reads_its_own_context_and_the_gradient_goes_back_to_it() -> None:
    """A batch with lengths gives what each sequence gives alone: values, and gradients of the context."""
    cell, x, lengths, context = Attends(), randn(7, 4, 3), [7, 1, 3, 5], source(4)
    context.memory.requires_grad_()
    run = lf.unfold(cell, x, lengths=lengths, context=context)
    assert run.outputs is run.hidden
    assert run.outputs.shape == (7, 4, 6)
    assert_same(run.outputs[0].sum(-1), torch.ones(4, dtype=f64))
    (slope,) = torch.autograd.grad(run.last.square().sum() + run.outputs.square().sum(), context.memory)
    for i, length in enumerate(lengths):
        own = Source(context.memory[i : i + 1].detach().requires_grad_(), context.mask[i : i + 1])
        alone = lf.unfold(cell, x[:length, i : i + 1], context=own)
        assert alone.outputs is not None
        assert_same(run.outputs[:length, i : i + 1], alone.outputs)
        assert not run.outputs[length:, i].any()
        assert_same(run.last_hidden[i], alone.outputs[-1, 0])
        (needed,) = torch.autograd.grad(alone.last.square().sum() + alone.outputs.square().sum(), own.memory)
        assert_same(slope[i : i + 1], needed)


@pytest.mark.parametrize("kind", [Attends, Speaker])
def test_auto_runs_a_context(kind: type[Step]) -> None:
    cell, x, context = kind(), randn(9, 4, 3), source(4) if kind is Attends else randn(4, 2)
    came, needed = (everything(cell, x, e, [9, 1, 3, 5], context) for e in (lf.Auto(), lf.Sequential()))
    assert_same(came, needed)
    assert "∇context0" in came


def test_a_context_that_the_step_does_not_read_changes_nothing() -> None:
    class Deaf(Step):
        def forward(self, h: Tensor, x: Tensor, context: Tensor) -> Tensor:
            return torch.tanh(h @ self.W.T + x @ self.U.T)

    cell, x, context = Deaf(), randn(5, 2, 3), randn(2, 4)
    needed = lf.unfold(cell, x, context=context, engine=lf.Sequential()).states
    for engine in ENGINES:
        assert_same(lf.unfold(cell, x, context=context, engine=engine).states, needed)


# ------------------------------------------------------------------ the number of the step


def test_the_number_of_a_step_counts_from_zero_for_every_sequence() -> None:
    run = lf.unfold(lambda h, t: h + t, steps=5, state=torch.zeros(2, 1), lengths=[5, 3])
    assert run.states[..., 0].T.tolist() == [[0, 1, 3, 6, 10], [0, 1, 3, 0, 0]]
    assert run.states.dtype == torch.float32


@pytest.mark.parametrize(
    ("step", "others", "asks"),
    [
        (lambda h, x, t: h, 2, True),
        (lambda h, x, *, t: h, 2, True),
        (lambda h, x, context, t: h, 3, True),
        (lambda h, t: h, 2, False),  # the user's own name for x
        (lambda h, t: h, 1, True),
        (lambda h, x, *args, **kwargs: h, 2, False),
        (lambda h, x, *t: h, 2, False),
        (torch.add, 2, False),
        (lf.Elman(3, 5), 2, False),
        (Clocked(), 2, True),
        (KeywordClock(), 2, True),
    ],
)
def test_a_step_asks_for_its_number_by_its_signature(step: Any, others: int, asks: bool) -> None:
    assert asks_for_index(step, others) is asks


# ------------------------------------------------------------------ outputs


def test_an_output_stands_beside_the_state() -> None:
    cell, x = WithOutput(), randn(6, 2, 3)
    run = lf.unfold(cell, x, lengths=[6, 2])
    assert run.hidden is run.outputs
    assert run.outputs.shape == (6, 2, 4)
    assert run.last.shape == (2, 5)
    assert_same(run.last_hidden, torch.stack([run.outputs[5, 0], run.outputs[1, 1]]), 0)
    assert "outputs=(6, 2, 4)" in repr(run)
    first = lf.unfold(cell, x[:2])
    assert_same(lf.unfold(cell, x[2:], first.last).outputs, lf.unfold(cell, x).hidden[2:])
    assert lf.unfold(lf.Elman(3, 5), torch.ones(2, 1, 3)).outputs is None


def test_a_pair_that_is_like_the_state_is_the_state() -> None:
    h = torch.zeros(2, 3)
    assert not gives_output((h, h), (h, h))
    assert gives_output((h, (h, h)), (h, h))
    assert gives_output(((h, h), h), h)
    assert not gives_output((h, torch.zeros(2, 4)), h)
    assert not gives_output((h, h, h), h)


class Pair(nn.Module):
    """Its state is a pair, though a tensor would go through, and come out as a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.W = matrix(5, 5)

    def forward(self, state: Any, x: Tensor) -> Any:
        return torch.tanh(state[0] @ self.W.T + x), state[1] + x


def test_zeros_are_found_for_steps_with_outputs_too() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.V = lf.LSTM(3, 5, dtype=f64), matrix(4, 5)

        def forward(self, state: lf.LSTMState, x: Tensor) -> tuple[Tensor, lf.LSTMState]:
            state = self.cell(state, x)
            return state.h @ self.V.T, state

    run = lf.unfold(Bare(), randn(6, 2, 3))
    assert run.last.c.shape == (2, 5)
    assert run.outputs is not None
    run = lf.unfold(Pair(), randn(6, 2, 5))
    assert run.outputs is None
    assert len(run.last) == 2


def test_a_wrong_output_of_a_compiled_step_is_found() -> None:
    """The check of a compiled run looks at the outputs too."""
    cell, x = WithOutput(), randn(9, 2, 3)
    recurrence = checked(cell, x, None, None, None)
    good = lf.Looped().run(recurrence)
    assert disagreement(recurrence, good, 4) is None
    assert "state(5), part 0" in str(disagreement(recurrence, (good[0] + 1e-3, good[1]), 4))


# ------------------------------------------------------------------ the graph of such a step


def test_the_graph_has_the_users_names() -> None:
    text = str(lf.step_graph(All(), Signals(randn(2, 3), randn(2, 5))))
    assert text.startswith("All(h [batch, 5], speed [batch, 3], gate [batch, 5], t [batch, 1])")
    assert "\n  output " in text
    graph = lf.step_graph(Attends(), randn(1, 3), context=source(1))
    assert [node.name for node in graph.context] == ["memory", "mask"]
    assert [str(node.shape) for node in graph.context] == ["(batch, 6, 5)", "(batch, 6)"]
    assert len(graph.results) == 1
    graph = lf.step_graph(Nested(), ((randn(1, 3), torch.zeros(1, dtype=torch.long)), randn(1, 5)))
    assert [node.name for node in graph.x] == ["x0", "x1", "x2"]


def test_numbers_that_change_do_not_take_a_new_program() -> None:
    class Scaled(Step):
        scale = 0.5

        def forward(self, h: Tensor, x: Signals, t: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(h @ self.W.T + self.scale * (x.speed @ self.U.T)) * x.gate
            return self.scale * h + t, h

    cell, x = Scaled(), signals(6, 2)
    programs = []
    for cell.scale in (0.5, 0.7, 0.9):
        recurrence = checked(cell, x, None, None, None)
        assert_same(lf.Looped().run(recurrence), lf.Sequential().run(recurrence))
        programs.append(program_of(recurrence).program)
    assert programs[1] is programs[2]


@pytest.mark.parametrize("kind", [All, WithOutput])
def test_explain_understands_it(kind: type[Step]) -> None:
    x = signals(20, 2) if kind is All else randn(20, 2, 3)
    assert "part" in lf.Recurrent(kind()).explain(x)


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: lf.unfold(TwoInputs(), Signals(randn(4, 2, 3), randn(5, 2, 5))),
            ValueError,
            "x.gate has shape (5, 2, 5) and x.speed (4, 2, 3)",
        ),
        (lambda: lf.unfold(TwoInputs(), (randn(4, 2, 3), 1)), TypeError, "x[1] must be a tensor"),
        (lambda: lf.unfold(TwoInputs(), ()), TypeError, "empty tuple"),
        (lambda: lf.unfold(lf.Elman(3, 5), (randn(4, 2, 3), randn(4, 2, 3))), TypeError, "torch.cat(x, -1)"),
        (
            lambda: lf.unfold(TwoInputs(), Signals(randn(4, 2, 3), randn(4, 2, 5) * torch.nan)),
            ValueError,
            "x.gate holds NaN",
        ),
        (
            lambda: lf.unfold(Speaker(), randn(4, 2, 3), context=randn(3, 2)),
            ValueError,
            "context has shape (3, 2); x has batch 2, so it must be (2, …). Type context.transpose(0, 1).",
        ),
        (
            lambda: lf.unfold(Attends(), randn(4, 2, 3), context=Source(randn(2, 6, 5), torch.ones(3, 6) > 0)),
            ValueError,
            "context.mask has shape (3, 6); x has batch 2, so it must be (2, …).",
        ),
        (lambda: lf.unfold(Speaker(), randn(4, 2, 3), context=[1.0]), TypeError, "context must be a tensor"),
        (lambda: lf.unfold(Speaker(), randn(4, 2, 3), context=()), TypeError, "empty tuple"),
        (
            lambda: lf.unfold(Speaker(), randn(4, 2, 3), context=randn(2, 2).to("meta")),
            ValueError,
            "context is on meta and x on cpu",
        ),
        (
            lambda: lf.unfold(Free(), steps=3, state=randn(2, 5), context=randn(3, 2)),
            ValueError,
            "the state has batch 2",
        ),
        (
            lambda: lf.unfold(Speaker(), randn(4, 2, 3), context=randn(2, 7)),
            ValueError,
            "and x(t) (2, 3) and context (2, 7) and t (batch, 1)",
        ),
        (
            lambda: lf.unfold(lambda h, x, c: h + c.mul_(2), randn(4, 2, 3), context=randn(2, 3)),
            ValueError,
            "changes the context",
        ),
        (
            lambda: lf.unfold(lambda h, x: (h.sum(0), h), randn(4, 2, 3), randn(2, 3)),
            ValueError,
            "gave an output of shape (3,)",
        ),
        (
            lambda: lf.unfold(lambda h, x: (h, h[:, 1:]), randn(4, 2, 3), randn(2, 3)),
            ValueError,
            "or (output, state)",
        ),
    ],
)
def test_errors_say_what_to_type(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert text in str(raised.value)


# ------------------------------------------------------------------ layers and drawings


def test_a_layer_passes_a_context_on_and_the_one_above_reads_the_output() -> None:
    cell, x, context = Attends(), randn(4, 2, 3), source(2)
    assert_same(lf.Recurrent(cell)(x, context=context).hidden, lf.unfold(cell, x, context=context).outputs)
    assert lf.Recurrent(WithOutput()).hidden_size == 4
    assert lf.Stacked([WithOutput(), lf.GRU(4, 6, dtype=f64)])(x).hidden.shape == (4, 2, 6)
    both = lf.Bidirectional(WithOutput(), lf.GRU(3, 6, dtype=f64))(x, lengths=[4, 2])
    assert both.hidden.shape == (4, 2, 10)
    assert both.outputs is not None
    assert_same(both.outputs[0], both.hidden[..., :4], 0)
    assert both.outputs[1] is None
    assert "Looped" in lf.Recurrent(cell, lf.Looped()).explain(x, context=context)


def test_such_steps_can_be_drawn() -> None:
    def labels(cell: nn.Module, x: Any = None, context: Any = None) -> list[tuple[str, str]]:
        drawn = circuit(cell, lf.Level.BOOK, None, x, context)
        return [(variable.label, variable.role.value) for variable in drawn.variables]

    x, context = randn(4, 2, 3), source(2)
    memory, mask = (r"\mathrm{memory}", "input"), (r"\mathrm{mask}", "input")
    assert labels(Attends(), x=x, context=context) == [("x", "input"), memory, mask, ("h", "state"), ("o", "output")]
    assert labels(WithOutput()) == [("x", "input"), ("h", "state"), ("o", "output")]
    assert ("t", "input") in labels(Clocked())
    for level in lf.Level:
        for steps in (None, 3):
            assert lf.draw(Attends(), steps, x=x, context=context, level=level).svg()
            assert lf.draw(lf.Recurrent(All()), steps, x=signals(4, 2), level=level).svg()
    with pytest.raises(ValueError, match="only a transition"):
        lf.draw(lf.Stacked([lf.GRU(3, 5)]), x=x, context=context)
