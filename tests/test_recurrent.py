"""Layers: one cell, a stack of them, both directions; and torch's own modules, there and back."""

from typing import Any

import pytest
import torch
from helpers import CELLS, TwoMatrices, assert_same, cells, gradients, randn
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import loopfold as lf
from loopfold.recurrent import Recurrent, RecurrentLayer
from loopfold.states import leaves

pytestmark = pytest.mark.usefixtures("one_thread")
f64 = torch.float64
KINDS = {
    "RNN tanh": (nn.RNN, {"nonlinearity": "tanh"}),
    "RNN relu": (nn.RNN, {"nonlinearity": "relu"}),
    "LSTM": (nn.LSTM, {}),
    "GRU": (nn.GRU, {}),
}


def torchs(kind: str, **options: Any) -> Any:
    module, own = KINDS[kind]
    return module(3, 4, dtype=f64, **own, **options)


def last_of(ours: lf.Unfolding) -> list[Tensor]:
    """Our last states in torch's order: h of every layer and direction, then c of all of them."""
    tensors = leaves(ours.last)
    return tensors if not isinstance(_first_state(ours.last), lf.LSTMState) else tensors[::2] + tensors[1::2]


def _first_state(last: Any) -> Any:
    while type(last) is tuple:
        last = last[0]
    return last


def cells_of(ours: lf.Stacked) -> list[Any]:
    return [part.cell for part in ours.modules() if isinstance(part, Recurrent)]


def in_torchs_names(ours: lf.Stacked, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our gradients under torch's names, so far as there is one of ours for it."""
    names = {id(p): name for name, p in ours.named_parameters()}
    suffixes = ["", "_reverse"] if isinstance(ours.layers[0], lf.Bidirectional) else [""]
    translated = {}
    for i, cell in enumerate(cells_of(ours)):
        place = f"l{i // len(suffixes)}{suffixes[i % len(suffixes)]}"
        for name, theirs in {"U": "weight_ih", "W": "weight_hh", "b": "bias_ih"}.items():
            if getattr(cell, name).requires_grad:
                translated[f"{theirs}_{place}"] = found[names[id(getattr(cell, name))]]
        if isinstance(cell, lf.GRU) and cell.b_hn.requires_grad:
            zeros = cell.b_hn.new_zeros(2 * cell.hidden_size)
            translated[f"bias_hh_{place}"] = torch.cat([zeros, found[names[id(cell.b_hn)]]])
    return translated


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_from_torch_equals_torchs_packed_sequences(kind: str, num_layers: int, bidirectional: bool, bias: bool) -> None:
    """Outputs, final states and gradients, for sequences of unequal length in no order."""
    theirs = torchs(kind, num_layers=num_layers, bidirectional=bidirectional, bias=bias)
    ours = lf.from_torch(theirs)
    x, lengths = randn(7, 4, 3).requires_grad_(), torch.tensor([5, 7, 1, 4])
    run = ours(x, lengths=lengths)
    packed, last = theirs(pack_padded_sequence(x, lengths, enforce_sorted=False))
    output, _ = pad_packed_sequence(packed)
    last = torch.cat(last) if isinstance(last, tuple) else last
    assert_same(run.hidden, output)
    assert_same(torch.stack(last_of(run)), last)

    w_output, w_last = randn(*output.shape), randn(*last.shape)
    came = gradients(
        (run.hidden * w_output).sum() + (torch.stack(last_of(run)) * w_last).sum(), ours_trained(ours), x=x
    )
    needed = gradients((output * w_output).sum() + (last * w_last).sum(), theirs, x=x)
    assert_same(came["x"], needed["x"])
    translated = in_torchs_names(ours, came)
    assert len(translated) == num_layers * (2 if bidirectional else 1) * ((4 if kind == "GRU" else 3) if bias else 2)
    for name, gradient in translated.items():
        candidate = slice(-4 if name.startswith("bias_hh") else None, None)  # of this bias we keep b_hn alone
        assert_same(gradient[candidate], needed[name][candidate])


def ours_trained(ours: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in ours.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
def test_from_torch_starts_from_a_given_state(kind: str) -> None:
    theirs = torchs(kind, num_layers=2)
    x, h, c = randn(7, 2, 3), randn(2, 2, 4), randn(2, 2, 4)
    if kind == "LSTM":
        output, _ = theirs(x, (h, c))
        state: Any = tuple(lf.LSTMState(h[k], c[k]) for k in range(2))
    else:
        output, _ = theirs(x, h)
        state = tuple(h)
    assert_same(lf.from_torch(theirs)(x, state).hidden, output)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_again(kind: str, num_layers: int, bidirectional: bool, bias: bool) -> None:
    options = {"num_layers": num_layers, "bidirectional": bidirectional, "bias": bias}
    theirs = torchs(kind, dropout=0.25 if num_layers > 1 else 0.0, **options).eval()
    back: Any = lf.to_torch(lf.from_torch(theirs))
    assert repr(back) == repr(theirs)
    assert not back.training
    for name, weight in theirs.named_parameters():
        if name.startswith("weight"):
            assert torch.equal(weight, back.get_parameter(name))
    x = randn(7, 2, 3)
    for came, needed in zip(leaves(back(x)), leaves(theirs(x)), strict=True):
        assert_same(came, needed)


def test_from_torch_copies_the_weights() -> None:
    theirs = nn.GRU(3, 4)
    ours, x = lf.from_torch(theirs), torch.randn(7, 2, 3)
    before = ours(x).hidden
    nn.init.zeros_(theirs.get_parameter("weight_hh_l0"))
    assert torch.equal(ours(x).hidden, before)


def test_from_torch_without_bias_trains_no_bias() -> None:
    ours = lf.from_torch(nn.GRU(3, 4, bias=False))
    assert {name.split(".")[-1] for name in ours_trained(ours)} == {"U", "W"}


def test_to_torch_takes_a_cell_or_a_layer() -> None:
    x = torch.randn(7, 2, 3)
    for layer in (lf.LSTM(3, 4), lf.Recurrent(lf.GRU(3, 4)), lf.Elman(3, 4, torch.relu)):
        needed = lf.Stacked([layer])(x).hidden
        torch.testing.assert_close(lf.to_torch(layer)(x)[0], needed)


@pytest.mark.parametrize("name", CELLS)
def test_recurrent_is_unfold(name: str) -> None:
    """M3: any cell becomes a layer, and the layer knows what a reader of h will see."""
    cell, x = cells(3, 5)[name], randn(6, 2, 3)
    layer = lf.Recurrent(cell)
    assert layer.hidden_size == 5
    assert_same(layer(x, lengths=[6, 2]).hidden, lf.unfold(cell, x, lengths=[6, 2]).hidden, 0)
    assert len(list(layer.parameters())) == len(list(cell.parameters()))


def test_recurrent_runs_without_input() -> None:
    s = randn(2, 3)
    assert_same(lf.Recurrent(torch.sin)(state=s, steps=3).last, s.sin().sin().sin(), 0)


def test_a_stack_reads_what_the_layer_below_says() -> None:
    low, high, x = lf.LSTM(3, 5, dtype=f64), TwoMatrices(5, 4).double(), randn(7, 2, 3)
    stack = lf.Stacked([low, high])
    run, below = stack(x, lengths=[7, 3]), lf.unfold(low, x, lengths=[7, 3])
    above = lf.unfold(high, below.hidden, lengths=[7, 3])
    assert stack.hidden_size == 4
    assert_same((run.hidden, run.last_hidden, run.last), (above.hidden, above.last_hidden, (below.last, above.last)), 0)


def test_a_stack_carries_its_state_over() -> None:
    stack, x = lf.Stacked([lf.LSTM(3, 5), lf.GRU(5, 4)]).double(), randn(7, 2, 3)
    first = stack(x[:3])
    assert_same(stack(x[3:], first.last).last, stack(x).last)


def test_dropout_falls_between_layers_and_only_in_training() -> None:
    layers, x = [lf.Elman(3, 50, dtype=f64), lf.Elman(50, 40, dtype=f64)], randn(7, 2, 3)
    stack, plain = lf.Stacked(layers, dropout=0.5), lf.Stacked(layers)
    assert_same(stack.eval()(x).hidden, plain(x).hidden, 0)
    stack.train()
    assert not torch.equal(stack(x).hidden, stack(x).hidden)
    torch.manual_seed(1)
    came = stack(x)
    torch.manual_seed(1)
    below = plain(x).states[0]
    assert_same(came.states[0], below, 0)  # the lowest layer's own input and output are whole
    assert_same(came.hidden, lf.unfold(layers[1], nn.functional.dropout(below, 0.5)).hidden, 0)


def test_dropout_above_a_single_layer_never_happens() -> None:
    stack, x = lf.Stacked([lf.Elman(3, 5)], dropout=0.9), torch.randn(7, 2, 3)
    assert torch.equal(stack(x).hidden, stack(x).hidden)


@pytest.mark.parametrize("name", CELLS)
def test_bidirectional_gives_each_sequence_what_it_gets_alone(name: str) -> None:
    """Values and gradients; the backward layer starts at each sequence's own end, and padding may be NaN."""
    there, back = cells(3, 4)[name], cells(3, 5)[name]
    both, x, lengths = lf.Bidirectional(there, back), randn(6, 3, 3), [6, 1, 4]
    for i, length in enumerate(lengths):
        x[length:, i] = torch.nan
    x.requires_grad_()
    run = both(x, lengths=lengths)
    assert both.hidden_size == run.hidden.shape[2] == 9
    weights, loss = randn(6, 3, 9), torch.zeros((), dtype=f64)
    for i, length in enumerate(lengths):
        alone = x[:length, i : i + 1]
        forwards, backwards = lf.unfold(there, alone), lf.unfold(back, alone.flip(0))
        hidden = torch.cat([forwards.hidden, backwards.hidden.flip(0)], -1)
        assert_same(run.hidden[:length, i : i + 1], hidden)
        assert not run.hidden[length:, i].any()
        last = torch.cat([forwards.last_hidden, backwards.last_hidden], -1)
        assert_same(run.last_hidden[i : i + 1], last)
        assert_same([leaf[i : i + 1] for leaf in leaves(run.last[1])], leaves(backwards.last))
        loss = loss + (hidden * weights[:length, i : i + 1]).sum() + last.sum()
    came = gradients((run.hidden * weights).sum() + run.last_hidden.sum(), both, x=x)
    assert_same(came, gradients(loss, both, x=x))


def test_layers_nest() -> None:
    deep = lf.Bidirectional(lf.Stacked([lf.GRU(3, 4), lf.Elman(4, 5)]), lf.Stacked([lf.LSTM(3, 6)])).double()
    x = randn(7, 2, 3)
    assert_same(deep(x).hidden[:, :, 5:], deep.backwards(x.flip(0)).hidden.flip(0), 0)


class Twice(RecurrentLayer):
    """A layer of a user's own kind, which says nothing of engines."""

    def __init__(self, layer: RecurrentLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any = None, state: Any = None, lengths: Any = None) -> lf.Unfolding:
        return self.layer(self.layer(x).hidden, state, lengths)

    def initial_state(self, batch: int) -> Any:
        return self.layer.initial_state(batch)

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size


class Ones(RecurrentLayer):
    """A layer with no recurrence inside."""

    def forward(self, x: Any = None, state: Any = None, lengths: Any = None) -> lf.Unfolding:
        h = torch.ones(*x.shape[:2], 1)
        return lf.Unfolding(h, h[-1], h, h[-1])

    def initial_state(self, batch: int) -> Any:
        return torch.ones(batch, 1)

    @property
    def hidden_size(self) -> int:
        return 1


def test_an_engine_is_that_of_every_recurrence_inside() -> None:
    own = lf.Recurrent(lf.GRU(3, 5), lf.Sequential())
    both = lf.Bidirectional(own, lf.GRU(3, 4))
    assert [part.engine for part in both.modules() if isinstance(part, lf.Recurrent)] == [lf.Sequential(), lf.Auto()]
    stack = lf.Stacked([both, Twice(lf.Recurrent(lf.LSTM(9, 9)))], engine=lf.Looped())
    assert {part.engine for part in stack.modules() if isinstance(part, lf.Recurrent)} == {lf.Looped()}
    with pytest.raises(TypeError, match="engine must be an object such as lf.Auto"):
        lf.Stacked([own], engine="looped")  # type: ignore[arg-type]
    assert own.engine == lf.Looped()
    with pytest.raises(TypeError, match="engine must be an object such as lf.Auto"):
        lf.Stacked([Ones()], engine="looped")  # type: ignore[arg-type]


def test_every_layer_is_explained() -> None:
    layer = Twice(lf.Recurrent(lf.LSTM(9, 9)))
    stack = lf.Stacked([lf.Bidirectional(lf.GRU(3, 5), lf.GRU(3, 4)), layer], dropout=0.5, engine=lf.Looped())
    x, before = torch.randn(20, 2, 3), torch.get_rng_state()
    there, back, top = stack.explain(x, lengths=[20, 3]).split("\n\n")
    assert torch.equal(torch.get_rng_state(), before)
    assert there.startswith("layers.0.forwards: GRU over τ = 20, batch 2, float32 on cpu: Looped")
    assert back.startswith("layers.0.backwards: GRU over τ = 20")
    assert top.startswith("layers.1.layer: LSTM over τ = 20")
    assert top.endswith("so 2 times, one after the other")
    assert stack.training


def test_an_engine_that_refuses_is_explained_and_not_run() -> None:
    class Branching(TwoMatrices):
        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            new = super().forward(h, x)
            return new if bool(x.sum() > 0) else -new

    stack = lf.Stacked([lf.GRU(3, 4), Branching(4, 5)], engine=lf.FusedCPU())
    assert "layers.1: Branching over τ = 9, batch 2, float32 on cpu: FusedCPU refuses" in stack.explain(
        torch.randn(9, 2, 3)
    )
