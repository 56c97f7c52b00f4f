"""Bad input: each error says what it got, what it expected, and where it can, what to type."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import TwoMatrices
from torch import Tensor, nn

import loopfold as lf

wrong: Any = lf  # for calls that a type checker would already refuse

Case = tuple[Callable[[], Any], type[Exception], str]


def x(*shape: int) -> Tensor:
    return torch.zeros(shape or (7, 2, 3))


def y(*shape: int) -> Tensor:
    return torch.zeros(shape or (7, 2), dtype=torch.long)


def holed(t: int, sequence: int) -> Tensor:
    data = x()
    data[t, sequence, 0] = torch.nan
    return data


def seq(n_in: int = 3, n: int = 5, k: int = 4) -> lf.SequenceToSequence:
    return lf.SequenceToSequence(lf.Elman(n_in, n), outputs=k)


class Halves(lf.Feeding):
    def known(self, y: Tensor, outputs: lf.Outputs) -> None:
        return None

    def next(self, o: Tensor, y: Tensor, outputs: lf.Outputs) -> Tensor:
        return outputs.encode(y) / 2


def check(case: Case) -> None:
    call, error, message = case
    with pytest.raises(error, match=re.escape(message)) as raised:
        call()
    assert type(raised.value) is error


ELMAN, LSTM = lf.Elman(3, 5), lf.LSTM(3, 5)

SIZES: list[Case] = [
    (
        lambda: lf.unfold(ELMAN, x(7, 3)),
        ValueError,
        "x has shape (7, 3); Elman needs [τ, batch, 3]. For one sequence, type x.unsqueeze(1).",
    ),
    (lambda: lf.unfold(ELMAN, x(7, 2, 4)), ValueError, "x has shape (7, 2, 4); Elman reads 3 features: [τ, batch, 3]."),
    (lambda: lf.unfold(ELMAN, x(3, 7, 2)), ValueError, "Features come last: type x.movedim(0, 2)."),
    (lambda: lf.unfold(ELMAN, x(7, 3, 2)), ValueError, "Features come last: type x.movedim(1, 2)."),
    (lambda: lf.unfold(ELMAN, x(7, 0, 3)), ValueError, "x has shape (7, 0, 3): a batch of no sequences."),
    (lambda: lf.unfold(torch.add, torch.zeros(7)), ValueError, "x has shape (7,); add needs [τ, batch, n_in]."),
    (
        lambda: lf.unfold(TwoMatrices(3, 5), x(7, 2, 4), x(2, 5)),
        ValueError,
        "TwoMatrices could not take its first step from state (2, 5) and x(t) (2, 4): ",
    ),
    (
        lambda: lf.unfold(lambda h, x: x, x(), x(2, 5)),
        ValueError,
        "<lambda> was given state (2, 5) and returned (2, 3); a step must return a state of the structure and sizes",
    ),
    (
        lambda: lf.OutputRecurrence(3, 5, 4)(x(7, 2, 4), y()),
        ValueError,
        "x has shape (7, 2, 4); OutputRecurrence reads 3 features: [τ, batch, 3].",
    ),
    (
        lambda: lf.OutputRecurrence(3, 5, 4)(x(), y(6, 2)),
        ValueError,
        "y has shape (6, 2); 7 steps of a batch of 2 need [7, 2, …].",
    ),
    (
        lambda: lf.VectorToSequence(lf.Elman(7, 5), 4)(x(), y()),
        ValueError,
        "the vector has shape (7, 2, 3); VectorToSequence needs [batch, n].",
    ),
    (
        lambda: lf.VectorToSequence(lf.Elman(3, 5), 4)(x(2, 3), y()),
        ValueError,
        "the recurrence reads 3 features; a vector of 3 and outputs of 4 need 7.",
    ),
    (
        lambda: lf.EncoderDecoder(lf.GRU(3, 5), lf.GRU(5, 6), 4),
        ValueError,
        "the recurrence reads 5 features; a vector of 5 and outputs of 4 need 9.",
    ),
    (
        lambda: lf.VectorToSequence(lf.Bidirectional(lf.GRU(7, 5), lf.GRU(7, 5)), 4),
        ValueError,
        "cannot be read backwards: no Bidirectional here.",
    ),
    (lambda: seq().loss(x(7, 2, 4), y(2, 7)), ValueError, "y has shape (2, 7); o is (7, 2, 4), so y must be (7, 2)."),
    (
        lambda: lf.Reals(4).losses(x(7, 2, 4), x(7, 2, 3)),
        ValueError,
        "y has shape (7, 2, 3); Reals(4) needs that of o, (7, 2, 4).",
    ),
    (lambda: lf.bptt(seq(), x(7), y()), ValueError, "x has shape (7,); Elman needs [τ, batch, 3]."),
    (lambda: lf.bptt(seq(), x(), y(6, 2)), ValueError, "y has shape (6, 2); o is (7, 2, 4), so y must be (7, 2)."),
    (
        lambda: lf.truncated_bptt(seq(), seq().loss, x(), y(6, 2), window=2),
        ValueError,
        "x has 7 steps and y has 6; both need the same τ",
    ),
    (lambda: lf.Elman(3, 0), ValueError, "Elman needs hidden_size as a whole number of at least 1; got 0."),
    (lambda: wrong.LSTM(2.5, 4), ValueError, "LSTM needs input_size as a whole number of at least 1; got 2.5."),
    (
        lambda: lf.OutputRecurrence(3, 0, 4),
        ValueError,
        "OutputRecurrence needs hidden_size as a whole number of at least 1; got 0.",
    ),
    (lambda: lf.Classes(0), ValueError, "Classes needs size as a whole number of at least 1; got 0."),
    (lambda: lf.Stacked([]), ValueError, "Stacked needs at least one layer."),
]


@pytest.mark.parametrize("case", SIZES, ids=lambda case: case[2])
def test_wrong_sizes(case: Case) -> None:
    check(case)


STATES: list[Case] = [
    (
        lambda: lf.unfold(ELMAN, x(), x(4, 5)),
        ValueError,
        "the state has shape (4, 5); x has batch 2, so it must be (2, 5).",
    ),
    (
        lambda: lf.unfold(ELMAN, x(), x(2, 6)),
        ValueError,
        "the state has shape (2, 6); x has batch 2, so it must be (2, 5).",
    ),
    (
        lambda: lf.unfold(TwoMatrices(3, 5), x(), x(4, 5)),
        ValueError,
        "the state has shape (4, 5); x has batch 2, so it must be (2, 5).",
    ),
    (
        lambda: lf.unfold(LSTM, x(), x(2, 5)),
        ValueError,
        "the state is (2, 5); LSTM needs LSTMState(h (2, 5), c (2, 5)).",
    ),
    (
        lambda: lf.unfold(ELMAN, x(), (x(2, 5), x(2, 5))),
        ValueError,
        "the state is tuple((2, 5), (2, 5)); Elman needs (2, 5).",
    ),
    (
        lambda: lf.unfold(ELMAN, x(), [x(2, 5)]),
        TypeError,
        "a state is a tensor, or a tuple or NamedTuple of tensors; this one holds a list.",
    ),
    (lambda: lf.unfold(ELMAN, x(), ()), TypeError, "the state is an empty tuple; it must hold at least one tensor."),
    (
        lambda: lf.unfold(ELMAN, x(), x(2, 5).double()),
        TypeError,
        "the state is torch.float64; Elman needs torch.float32.",
    ),
    (
        lambda: lf.unfold(lambda h, x: None, x(), x(2, 5)),
        TypeError,
        "<lambda> returned a NoneType; a step returns the next state, (2, 5).",
    ),
    (
        lambda: lf.unfold(lambda s, x: s.h, x(), (x(2, 5), x(2, 5))),
        ValueError,
        "<lambda> could not take its first step from state tuple((2, 5), (2, 5)) and x(t) (2, 3): 'tuple' object",
    ),
    (
        lambda: lf.unfold(torch.sin, steps=3),
        ValueError,
        "without an input x the state must be given: unfold(f, steps=τ, state=s0).",
    ),
    (
        lambda: lf.Stacked([ELMAN, lf.Elman(5, 5)])(x(), (x(2, 5),)),
        ValueError,
        "Stacked has 2 layers, so it needs 2 states; got 1.",
    ),
    (
        lambda: lf.Bidirectional(ELMAN, lf.Elman(3, 5))(x(), (x(2, 5),)),
        ValueError,
        "Bidirectional needs a pair of states, forwards and backwards; got 1.",
    ),
    (
        lambda: lf.OutputRecurrence(3, 5, 4)(x(), y(), state=x(2, 5)),
        ValueError,
        "the state has shape (2, 5); x has batch 2 and outputs are of size 4, so it must be (2, 4).",
    ),
]


@pytest.mark.parametrize("case", STATES, ids=lambda case: case[2])
def test_wrong_state(case: Case) -> None:
    check(case)


LENGTHS: list[Case] = [
    (
        lambda: lf.unfold(ELMAN, x(), lengths=[7, 8]),
        ValueError,
        "lengths run from 7 to 8; each must be from 1 to τ = 7.",
    ),
    (
        lambda: lf.unfold(ELMAN, x(), lengths=[7, 0]),
        ValueError,
        "lengths run from 0 to 7; each must be from 1 to τ = 7.",
    ),
    (
        lambda: lf.unfold(ELMAN, x(), lengths=[7, 4, 1]),
        ValueError,
        "lengths has shape (3,); the batch has 2, so it must be (2,).",
    ),
    (
        lambda: lf.unfold(ELMAN, x(), lengths=torch.tensor(7)),
        ValueError,
        "lengths has shape (); the batch has 2, so it must be (2,).",
    ),
    (
        lambda: lf.unfold(ELMAN, x(), lengths=torch.tensor([7.0, 4.0])),
        TypeError,
        "lengths must be whole numbers; got torch.float32. Type lengths.long().",
    ),
    (
        lambda: lf.unfold(ELMAN, x(), lengths=torch.tensor([True, False])),
        TypeError,
        "lengths must be whole numbers; got torch.bool.",
    ),
    (
        lambda: wrong.unfold(ELMAN, x(), lengths=["7", "4"]),
        TypeError,
        "lengths must be whole numbers, one for each sequence; got ['7', '4'].",
    ),
    (
        lambda: lf.unfold(torch.sin, steps=7, state=torch.ones(()), lengths=[7]),
        ValueError,
        "lengths need a batch as the first dimension of the state; it is ().",
    ),
    (
        lambda: lf.Bidirectional(ELMAN, ELMAN)(x(), lengths=[7, 8]),
        ValueError,
        "lengths run from 7 to 8; each must be from 1 to τ = 7.",
    ),
    (
        lambda: seq().loss(x(7, 2, 4), y(), lengths=[7, 8]),
        ValueError,
        "lengths run from 7 to 8; each must be from 1 to τ = 7.",
    ),
    (
        lambda: seq().loss(x(7, 2, 4), y(), lengths=[7]),
        ValueError,
        "lengths has shape (1,); the batch has 2, so it must be (2,).",
    ),
    (
        lambda: lf.SequenceToOne(ELMAN, 4).loss(x(2, 4), y(2), lengths=[7, 4]),
        ValueError,
        "o is (2, 4), one output a sequence; lengths are for [τ, batch, size].",
    ),
]


@pytest.mark.parametrize("case", LENGTHS, ids=lambda case: case[2])
def test_wrong_lengths(case: Case) -> None:
    check(case)


STEPS: list[Case] = [
    (lambda: lf.unfold(ELMAN, x(0, 2, 3)), ValueError, "a sequence needs at least one step; got τ = 0."),
    (lambda: lf.unfold(torch.sin, steps=0, state=x(2)), ValueError, "a sequence needs at least one step; got τ = 0."),
    (lambda: wrong.unfold(torch.sin, steps=2.0, state=x(2)), TypeError, "steps must be a whole number; got 2.0."),
    (
        lambda: lf.unfold(torch.sin, state=x(2)),
        ValueError,
        "unfold needs an input x [τ, batch, n_in], or steps=τ where there is none.",
    ),
    (lambda: lf.unfold(ELMAN, x(), steps=6), ValueError, "x has 7 steps and steps=6 was given; give x alone."),
    (
        lambda: lf.OutputRecurrence(3, 5, 4)(x(0, 2, 3), y(0, 2)),
        ValueError,
        "a sequence needs at least one step; got τ = 0.",
    ),
    (
        lambda: lf.VectorToSequence(lf.Elman(7, 5), 4)(x(2, 3), steps=0, feeding=lf.FreeRunning()),
        ValueError,
        "a sequence needs at least one step; got τ = 0.",
    ),
    (
        lambda: lf.VectorToSequence(lf.Elman(7, 5), 4)(x(2, 3), feeding=lf.FreeRunning()),
        ValueError,
        "how long should the sequence be? Give the targets y, or steps=τ.",
    ),
    (
        lambda: lf.truncated_bptt(seq(), seq().loss, x(), y(), window=0),
        ValueError,
        "truncated_bptt needs window as a whole number of at least 1; got 0.",
    ),
    (lambda: lf.Ramp(0.0, 1.0, over=0), ValueError, "Ramp needs over as a whole number of at least 1; got 0."),
]


@pytest.mark.parametrize("case", STEPS, ids=lambda case: case[2])
def test_no_steps(case: Case) -> None:
    check(case)


NAN: list[Case] = [
    (
        lambda: lf.unfold(ELMAN, holed(4, 1)),
        ValueError,
        "x holds NaN, first at step 4 (from 0) of sequence 1. Type x.nan_to_num() to drop it.",
    ),
    (
        lambda: lf.unfold(ELMAN, holed(4, 1), lengths=[1, 5]),
        ValueError,
        "x holds NaN, first at step 4 (from 0) of sequence 1.",
    ),
    (
        lambda: lf.OutputRecurrence(3, 5, 4)(holed(0, 0), y()),
        ValueError,
        "x holds NaN, first at step 0 (from 0) of sequence 0.",
    ),
]


@pytest.mark.parametrize("case", NAN, ids=lambda case: case[2])
def test_nan(case: Case) -> None:
    check(case)


def test_infinity_is_not_nan() -> None:
    data = x()
    data[0, 0, 0], data[1, 0, 0] = torch.inf, -torch.inf
    assert lf.unfold(lf.Elman(3, 5, torch.sigmoid), data).hidden.isfinite().all()


META = torch.device("meta")
PLACES: list[Case] = [
    (
        lambda: lf.unfold(ELMAN, x().to(META)),
        ValueError,
        "x is on meta and Elman's parameters on cpu; move one of them with .to(...).",
    ),
    (
        lambda: lf.unfold(ELMAN, x(), x(2, 5).to(META)),
        ValueError,
        "the state is on meta and x on cpu; move one of them with .to(...).",
    ),
    (
        lambda: lf.unfold(lf.Elman(3, 5, device=META), x()),
        ValueError,
        "x is on cpu and Elman's parameters on meta; move one of them",
    ),
    (lambda: seq()(x().to(META)), ValueError, "x is on meta and Elman's parameters on cpu; move one of them"),
    (
        lambda: lf.OutputRecurrence(3, 5, 4)(x().to(META), y()),
        ValueError,
        "x is on meta and OutputRecurrence's parameters on cpu",
    ),
    (
        lambda: lf.unfold(ELMAN, x().double()),
        TypeError,
        "x is torch.float64 and Elman's parameters are torch.float32. Type x.to(torch.float32), or .to(torch.float64)",
    ),
    (
        lambda: lf.unfold(ELMAN, y(7, 2, 3)),
        TypeError,
        "x is torch.int64 and Elman's parameters are torch.float32. Type x.to(torch.float32)",
    ),
]


@pytest.mark.parametrize("case", PLACES, ids=lambda case: case[2])
def test_mixed_devices_and_dtypes(case: Case) -> None:
    check(case)


KINDS: list[Case] = [
    (lambda: wrong.unfold(3, x()), TypeError, "unfold needs a step f(state, x) -> state; got a int."),
    (
        lambda: wrong.unfold(ELMAN, [[1.0]]),
        TypeError,
        "x must be a tensor [τ, batch, n_in]; got a list. Type torch.as_tensor(x).",
    ),
    (
        lambda: wrong.unfold(ELMAN, x(), engine="fast"),
        TypeError,
        "engine must be an object such as lf.Sequential(); got 'fast'.",
    ),
    (
        lambda: wrong.unfold(ELMAN, x(), engine=lf.Sequential),
        TypeError,
        "engine must be an object such as lf.Sequential(); got <class",
    ),
    (
        lambda: lf.Recurrent(lf.Recurrent(ELMAN)),
        TypeError,
        "Recurrent needs a transition f(state, x) -> state; got a Recurrent.",
    ),
    (
        lambda: lf.Bidirectional(ELMAN, ELMAN)(None),
        TypeError,
        "Bidirectional reads an input x [τ, batch, n_in]; got a NoneType.",
    ),
    (
        lambda: lf.Stacked([ELMAN], dropout=1.0),
        ValueError,
        "dropout is a probability from 0 up to but not including 1; got 1.0.",
    ),
    (
        lambda: wrong.from_torch(nn.Linear(3, 5)),
        TypeError,
        "from_torch takes nn.RNN, nn.LSTM or nn.GRU, or their cells; got a Linear.",
    ),
    (
        lambda: lf.from_torch(nn.LSTM(3, 5, proj_size=2)),
        ValueError,
        "from_torch cannot take proj_size=2: our LSTM has no projection of h.",
    ),
    (
        lambda: lf.to_torch(lf.LayerNormLSTM(3, 5)),
        TypeError,
        "torch has Elman, LSTM and GRU networks only; LayerNormLSTM is none of them.",
    ),
    (
        lambda: lf.to_torch(lf.Stacked([lf.GRU(3, 5), lf.GRU(5, 4)])),
        ValueError,
        "torch needs every layer alike; layer 1 holds GRU(5, 4) where GRU(5, 5) in 1 direction(s) was needed.",
    ),
    (
        lambda: lf.to_torch(lf.Elman(3, 5, torch.sigmoid)),
        ValueError,
        "torch's nn.RNN has torch.tanh or torch.relu in all its layers",
    ),
    (
        lambda: lf.Classes(4).losses(x(7, 2, 4), x(7, 2)),
        TypeError,
        "targets of Classes(4) are whole numbers; got torch.float32. Type y.long().",
    ),
    (
        lambda: lf.Classes(4).losses(x(7, 2, 4), y() + 4),
        ValueError,
        "targets run from 4 to 4; Classes(4) needs 0 to 3.",
    ),
    (lambda: lf.Reals(4).encode(x(7, 2)), ValueError, "targets of Reals(4) are […, 4]; got (7, 2) of torch.float32."),
    (
        lambda: lf.Sample()(x(2, 3), lf.Reals(3)),
        ValueError,
        "Reals predicts a vector, not a distribution to draw from: use pick=Soft() or Greedy().",
    ),
    (
        lambda: lf.OutputRecurrence(3, 5, 4)(x()),
        ValueError,
        "TeacherForcing needs the targets y. To feed the model's own outputs back, type feeding=lf.FreeRunning().",
    ),
    (
        lambda: lf.OutputRecurrence(3, 5, 4)(x(), None, lf.ScheduledSampling(0.5)),
        ValueError,
        "ScheduledSampling needs the targets y.",
    ),
    (
        lambda: lf.VectorToSequence(lf.GRU(7, 5), 4)(x(2, 3), None, Halves(), steps=3),
        ValueError,
        "Halves needs the targets y. To feed the model's own outputs back, type feeding=lf.FreeRunning().",
    ),
    (lambda: lf.ScheduledSampling(1.5), ValueError, "ScheduledSampling needs a probability from 0 to 1; got 1.5."),
    (
        lambda: lf.ScheduledSampling(lf.Ramp(0.0, 2.0, over=10)).at(10),
        ValueError,
        "ScheduledSampling needs a probability from 0 to 1; got 2.0.",
    ),
    (
        lambda: lf.bptt(lf.SequenceToSequence(LSTM, 4), x(), y()),
        TypeError,
        "got LSTM(3, 5) with Classes(size=4). For any other model use lf.per_step_gradients.",
    ),
    (
        lambda: lf.bptt(lf.SequenceToSequence(lf.Elman(3, 5, torch.relu), 4), x(), y()),
        TypeError,
        "with tanh; got Elman(3, 5, activation=relu) with Classes(size=4).",
    ),
    (
        lambda: lf.bptt(lf.SequenceToSequence(ELMAN, lf.Reals(4)), x(), x(7, 2, 4)),
        TypeError,
        "with Reals(size=4). For any other",
    ),
    (
        lambda: lf.per_step_gradients(seq(), lambda o, y: o, x(), y()),
        ValueError,
        "loss_fn must return one number; got a tensor of shape (7, 2, 4). Sum it.",
    ),
    (
        lambda: lf.gradient_flow(nn.Linear(3, 4), torch.dist, x(), y()),
        TypeError,
        "Linear holds no lf.Recurrent with a module as its transition",
    ),
    (
        lambda: lf.gradient_flow(lf.EncoderDecoder(lf.GRU(3, 5), lf.GRU(9, 5), 4), torch.dist, x(), y()),
        TypeError,
        "gradient_flow follows networks that take one step for each x(t); not EncoderDecoder.",
    ),
    (
        lambda: lf.gradient_flow(lf.Recurrent(ELMAN), torch.dist, x(), y()),
        TypeError,
        "gradient_flow needs a model that returns outputs o; got a Unfolding.",
    ),
]


@pytest.mark.parametrize("case", KINDS, ids=lambda case: case[2])
def test_wrong_kinds_of_things(case: Case) -> None:
    check(case)


def test_running_out_of_memory_is_not_called_bad_input() -> None:
    def greedy(h: Tensor, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        lf.unfold(greedy, x(), x(2, 5))


def test_a_step_that_overwrites_its_state_is_told_so() -> None:
    class Overwriting(lf.Transition):
        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            h += x
            return h

    with pytest.raises(ValueError, match=r"changes the state that it was given in place.*h = h \+ x, not h \+= x"):
        lf.unfold(Overwriting(), x(4, 2, 3), state=x(2, 3))


def test_an_initialiser_is_an_object() -> None:
    with pytest.raises(TypeError, match=r"such as lf\.Orthogonal\(\); got 'orthogonal'"):
        wrong.Elman(3, 5, recurrent_init="orthogonal")


def test_truncation_needs_a_loss_at_every_step() -> None:
    model: Any = lf.SequenceToOne(lf.Elman(3, 5), outputs=4)
    with pytest.raises(TypeError, match="truncated_bptt needs SequenceToSequence.*got SequenceToOne"):
        lf.truncated_bptt(model, model.loss, x(), y(), window=2)


OBJECTS: list[Case] = [
    (lambda: wrong.unfold(lf.Elman, x()), TypeError, "not its class: type Elman(...) with its sizes"),
    (lambda: wrong.Recurrent(lf.Elman), TypeError, "not its class: type Elman(...) with its sizes"),
    (lambda: wrong.Recurrent(lf.Elman(3, 5), engine="auto"), TypeError, "such as lf.Auto(); got 'auto'"),
    (lambda: wrong.Recurrent(nn.LSTM(3, 5)), TypeError, "Type lf.from_torch(...)"),
    (lambda: wrong.Stacked(lf.Elman(3, 5), lf.Elman(5, 5)), TypeError, "Stacked([a, b]); got a Elman"),
    (
        lambda: wrong.OutputRecurrence(3, 5, 4)(x(), y(), lf.TeacherForcing),
        TypeError,
        "feeding must be an object such as lf.TeacherForcing()",
    ),
    (
        lambda: lf.unfold(ELMAN, wrong_x(nn.utils.rnn.pack_sequence([x(4, 3), x(2, 3)]))),
        TypeError,
        "x is a PackedSequence. Type x, n = pad_packed_sequence(x), and pass lengths=n.",
    ),
    (lambda: lf.unfold(ELMAN, y()), ValueError, "nn.functional.one_hot(x, n).float()"),
    (
        lambda: lf.OutputRecurrence(3, 5, lf.Reals(2))(x(), torch.full((7, 2, 2), torch.nan)),
        ValueError,
        "the targets that are fed back hold NaN",
    ),
]


def wrong_x(value: Any) -> Any:
    return value


@pytest.mark.parametrize("case", OBJECTS)
def test_classes_and_strings_in_place_of_objects(case: Case) -> None:
    check(case)


def test_truncation_goes_forwards_only() -> None:
    model = lf.SequenceToSequence(lf.Bidirectional(lf.Elman(3, 5), lf.Elman(3, 5)), outputs=4)
    with pytest.raises(TypeError, match="Bidirectional also reads from the end"):
        lf.truncated_bptt(model, model.loss, x(), y(), window=2)


def test_a_coin_may_be_named_by_its_value() -> None:
    assert wrong.ScheduledSampling(0.5, coin="step").coin is lf.Coin.STEP
    with pytest.raises(ValueError, match="'heads' is not a valid Coin"):
        wrong.ScheduledSampling(0.5, coin="heads")


def test_the_mistake_in_a_step_is_shown() -> None:
    class Mistaken(TwoMatrices):
        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(h @ wrong_x(self).missing)

    with pytest.raises(ValueError, match=r"The first trial failed with: .*has no attribute 'missing'"):
        lf.unfold(Mistaken(3, 5), x())
