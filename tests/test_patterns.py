"""The shapes of network: what is read, where outputs stand, what flows on."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import CELLS, assert_same, cells, gradients, randn
from torch import Tensor, nn

import loopfold as lf
from loopfold.outputs import Outputs
from loopfold.wiring import Pattern

pytestmark = pytest.mark.usefixtures("one_thread")
f64 = torch.float64


def test_sequence_to_sequence_is_the_books_equations() -> None:
    """M7: (10.8) to (10.11) and L = Σ -log p(y(t) | x(1..t)), one number at a time."""
    n_in, n, k, tau = 2, 3, 4, 5
    model = lf.SequenceToSequence(lf.Recurrent(lf.Elman(n_in, n)), outputs=k).double()
    cell, x, y = _cell(model), randn(tau, 1, n_in), torch.randint(k, (tau, 1))
    U, W, b, V, c = (p.tolist() for p in (cell.U, cell.W, cell.b, model.V, model.c))
    h, loss = [0.0] * n, 0.0
    o = model(x)
    for t in range(tau):
        a = [
            b[i] + sum(W[i][j] * h[j] for j in range(n)) + sum(U[i][j] * float(x[t, 0, j]) for j in range(n_in))
            for i in range(n)
        ]
        h = [math.tanh(a_i) for a_i in a]
        o_t = [c[i] + sum(V[i][j] * h[j] for j in range(n)) for i in range(k)]
        y_hat = [math.exp(o_i) / sum(map(math.exp, o_t)) for o_i in o_t]
        loss -= math.log(y_hat[int(y[t, 0])])
        assert o[t, 0].tolist() == pytest.approx(o_t, rel=1e-12)
    assert float(model.loss(o, y).detach()) == pytest.approx(loss, rel=1e-12)


def _cell(model: lf.SequenceToSequence) -> lf.Elman:
    assert isinstance(model.recurrent, lf.Recurrent)
    assert isinstance(model.recurrent.cell, lf.Elman)
    return model.recurrent.cell


@pytest.mark.parametrize("name", CELLS)
def test_outputs_read_the_hidden_state_of_any_cell(name: str) -> None:
    """M3, M14: `o` at every step is one thing, the final state below it another."""
    cell, x = cells(3, 5)[name], randn(6, 2, 3)
    model = lf.SequenceToSequence(cell, outputs=4)
    prediction = model.predict(x)
    assert_same(prediction.o, lf.unfold(cell, x).hidden @ model.V.T + model.c)
    assert prediction.o.shape == (6, 2, 4)
    assert prediction.run.last_hidden.shape == (2, 5)
    assert_same(model(x), prediction.o, 0)


def test_the_size_of_a_model_does_not_depend_on_the_length() -> None:
    """M12"""
    model = lf.SequenceToSequence(lf.Elman(3, 5), outputs=4)
    for tau in (1, 10, 100):
        assert model(torch.randn(tau, 2, 3)).shape == (tau, 2, 4)
    assert sum(p.numel() for p in model.parameters()) == 5 * 3 + 5 * 5 + 5 + 4 * 5 + 4


@pytest.mark.parametrize("outputs", [lf.Classes(4), lf.Reals(4)], ids=["Classes", "Reals"])
def test_the_loss_leaves_out_what_comes_after_the_end(outputs: Outputs) -> None:
    """Whatever the padding of x and y holds, the loss and its gradients are the sums over the sequences alone."""
    model, x, lengths = lf.SequenceToSequence(lf.Elman(3, 5), outputs).double(), randn(6, 3, 3), [6, 2, 4]
    y = randn(6, 3, 4) if isinstance(outputs, lf.Reals) else torch.randint(4, (6, 3))
    for i, length in enumerate(lengths):
        x[length:, i] = torch.nan
        y[length:, i] = torch.nan if isinstance(outputs, lf.Reals) else -1
    came = model.loss(model(x, lengths=lengths), y, lengths)
    alone = [slice(i, i + 1) for i in range(3)]
    needed = sum(model.loss(model(x[:n, i]), y[:n, i]) for i, n in zip(alone, lengths, strict=True))
    assert_same(came, needed)
    assert_same(gradients(came, model), gradients(torch.as_tensor(needed), model))


@pytest.mark.parametrize("kind", [lf.Elman, lf.LSTM])
def test_sequence_to_one_reads_each_sequences_own_end(kind: Any) -> None:
    """M9: read the whole sequence, then predict; what stands after the end is not read."""
    model, x, lengths = lf.SequenceToOne(kind(3, 5), outputs=4).double(), randn(6, 3, 3), [6, 2, 4]
    x[2:, 1], x[4:, 2] = torch.inf, torch.nan
    o = model(x, lengths=lengths)
    assert o.shape == (3, 4)
    for i, length in enumerate(lengths):
        assert_same(o[i : i + 1], model(x[:length, i : i + 1]))
    y = torch.randint(4, (3,))
    assert_same(model.loss(o, y), nn.functional.cross_entropy(o, y, reduction="sum"))


def test_sequence_to_one_depends_on_every_input() -> None:
    """M9"""
    model, x = lf.SequenceToOne(lf.GRU(3, 5), outputs=4).double(), randn(6, 2, 3).requires_grad_()
    reached = gradients(model(x).square().sum(), {}, x=x)["x"]
    assert reached.abs().amin((1, 2)).gt(0).all()


def test_a_model_is_built_where_its_recurrence_lives() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        model = lf.SequenceToSequence(lf.LSTM(3, 5, dtype=dtype), outputs=4)
        assert model(torch.randn(6, 2, 3, dtype=dtype)).dtype == dtype
    assert lf.SequenceToOne(lf.GRU(3, 5, device="meta"), outputs=4).V.device.type == "meta"


def test_output_recurrence_under_teacher_forcing_has_no_loop() -> None:
    """M8: all steps decouple and are computed in parallel, by one call for any τ; running free takes τ calls."""
    model = lf.OutputRecurrence(3, 5, outputs=4)
    calls: list[Any] = []
    model.hidden.register_forward_hook(lambda *call: calls.append(call))
    model.readout.register_forward_hook(lambda *call: calls.append(call))
    x, y = torch.randn(50, 2, 3), torch.randint(4, (50, 2))
    model(x, y)
    assert len(calls) == 2
    model(x, feeding=lf.FreeRunning())
    assert len(calls) == 2 + 2 * 50


@pytest.mark.parametrize("outputs", [lf.Classes(4), lf.Reals(4)], ids=["Classes", "Reals"])
def test_output_recurrence_running_free_is_the_loop_written_out(outputs: Outputs) -> None:
    """M8, M21: h(t) = tanh(b + W ŷ(t-1) + U x(t)), o(t) = c + V h(t), with the model's own outputs coming back."""
    model, x = lf.OutputRecurrence(3, 5, outputs).double(), randn(6, 2, 3)
    fed, o, h = torch.zeros(2, 4, dtype=f64), [], []
    for t in range(6):
        h.append(torch.tanh(model.b + fed @ model.W.T + x[t] @ model.U.T))
        o.append(model.c + h[t] @ model.V.T)
        fed = o[t].softmax(-1) if isinstance(outputs, lf.Classes) else o[t]
    prediction = model.predict(x, feeding=lf.FreeRunning())
    assert_same(prediction.o, torch.stack(o))
    assert_same(prediction.run.hidden, torch.stack(h))
    assert_same(prediction.run.last, fed)
    assert_same(gradients(prediction.o.square().sum(), model), gradients(torch.stack(o).square().sum(), model))


def test_only_the_output_reaches_the_future() -> None:
    """M8: weaker than hidden recurrence. Where the outputs fed back are the same, the past makes no difference."""
    x, y = randn(6, 2, 3), torch.randint(4, (6, 2))
    other = torch.cat([randn(1, 2, 3), x[1:]])
    weak, strong = lf.OutputRecurrence(3, 5, 4).double(), lf.SequenceToSequence(lf.Elman(3, 5), 4).double()
    assert not torch.equal(weak(x, y)[0], weak(other, y)[0])
    assert torch.equal(weak(x, y)[1:], weak(other, y)[1:])
    assert not (strong(x)[1:] == strong(other)[1:]).any()
    assert not torch.allclose(weak(x, feeding=lf.FreeRunning())[1:], weak(other, feeding=lf.FreeRunning())[1:])


@pytest.mark.parametrize("feeding", [lf.TeacherForcing(), lf.FreeRunning()])
def test_output_recurrence_goes_on_from_where_it_was(feeding: Any) -> None:
    model, x, y = lf.OutputRecurrence(3, 5, outputs=4).double(), randn(6, 2, 3), torch.randint(4, (6, 2))
    first = model.predict(x[:2], y[:2], feeding)
    second = model.predict(x[2:], y[2:], feeding, state=first.run.last)
    assert_same(torch.cat([first.o, second.o]), model(x, y, feeding))


def test_vector_to_sequence_running_free_is_the_loop_written_out() -> None:
    """M21: the recurrence reads [vector, output of the step before]; hidden recurrence carries the rest."""
    cell = lf.LSTM(3 + 4, 5)
    model, x = lf.VectorToSequence(cell, outputs=4).double(), randn(2, 3)
    state, fed, o = cell.initial_state(2), torch.zeros(2, 4, dtype=f64), []
    for _ in range(6):
        state = cell(state, torch.cat([x, fed], -1))
        o.append(state.h @ model.V.T + model.c)
        fed = nn.functional.one_hot(o[-1].argmax(-1), 4).to(f64)
    prediction = model.predict(x, feeding=lf.FreeRunning(lf.Greedy()), steps=6)
    assert_same(prediction.o, torch.stack(o))
    assert_same(prediction.run.last, state)
    assert prediction.run.states.c.shape == (6, 2, 5)


def test_encoder_decoder_writes_a_sequence_of_another_length() -> None:
    """The vector between them is the encoder's state at each sequence's own end."""
    encoder, decoder = lf.GRU(3, 5), lf.LSTM(5 + 4, 6)
    model, x = lf.EncoderDecoder(encoder, decoder, outputs=4).double(), randn(7, 2, 3)
    x[3:, 1] = torch.nan
    o = model(x, feeding=lf.FreeRunning(), steps=9, lengths=[7, 3])
    assert o.shape == (9, 2, 4)
    vector = torch.cat([lf.unfold(encoder, x[:, :1]).last, lf.unfold(encoder, x[:3, 1:]).last])
    assert_same(o, model.decoder(vector, feeding=lf.FreeRunning(), steps=9))
    y = torch.randint(4, (2, 2))
    assert model(x, y, lengths=[7, 3]).shape == (2, 2, 4)


def test_teacher_forcing_and_back_propagation_through_time_work_together() -> None:
    """M20: with hidden recurrence the loss at the end still reaches the first step through h."""
    cell = lf.GRU(3 + 4, 5)
    model, x, y = lf.VectorToSequence(cell, outputs=4).double(), randn(2, 3), torch.randint(4, (6, 2))
    shares = lf.per_step_gradients(model, lambda o, y: model.outputs.losses(o[-1], y[-1]).sum(), x, y)
    assert shares["W"].shape == (6, 15, 5)
    assert shares["U"].flatten(1).norm(dim=1).gt(0).all()


def trained_to_rebuild(n: int) -> float:
    """The share of symbols that an autoencoder with a state of n numbers rebuilds, of all sequences of 3 symbols."""
    y = torch.cartesian_prod(*[torch.arange(3)] * 3).T  # [3, 27]
    x = lf.Classes(3).encode(y)
    model = lf.Autoencoder(lf.GRU(3, n), lf.GRU(n + 3, 16), outputs=3)
    assert torch.equal(model.targets(x), y)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(300):
        optimiser.zero_grad()
        model.loss(model(x), model.targets(x)).backward()
        optimiser.step()
    return float((model(x).argmax(-1) == y).float().mean())


def test_an_autoencoder_learns_to_rebuild_what_it_read() -> None:
    """M5: the state is a summary of the past, and how lossy it is can be measured: one number loses more than 16."""
    wide, narrow = trained_to_rebuild(16), trained_to_rebuild(1)
    assert wide == 1.0
    assert narrow < 0.95


def test_an_autoencoder_of_real_vectors_aims_at_its_input() -> None:
    """M5: nothing but the state crosses from reading to writing, so equal states are rebuilt equally."""
    model, x = lf.Autoencoder(lf.GRU(3, 5), lf.GRU(5 + 3, 5), outputs=lf.Reals(3)).double(), randn(4, 2, 3)
    assert model.targets(x) is x
    assert_same(model(x), model.network(x, feeding=lf.FreeRunning(), steps=4), 0)
    for p in model.network.encoder.parameters():
        p.data.zero_()
    assert_same(model(x), model(randn(4, 2, 3)), 0)


@pytest.mark.parametrize("outputs", [lf.Classes(3), lf.Reals(3)], ids=["Classes", "Reals"])
def test_every_pattern_knows_its_outputs_in_training(outputs: Outputs) -> None:
    """One way to write a training loop for all of them: model.loss(model.given(x, y), y)."""
    x, y = torch.randn(5, 2, 3), torch.randn(5, 2, 3)
    y = y if isinstance(outputs, lf.Reals) else y.argmax(-1)
    models: list[tuple[Any, Tensor, Tensor]] = [
        (lf.SequenceToSequence(lf.Elman(3, 5), outputs), x, y),
        (lf.SequenceToOne(lf.Elman(3, 5), outputs), x, y[0]),
        (lf.OutputRecurrence(3, 5, outputs), x, y),
        (lf.VectorToSequence(lf.Elman(6, 5), outputs), x[0], y),
        (lf.EncoderDecoder(lf.GRU(3, 5), lf.GRU(8, 5), outputs), x, y),
        (lf.Autoencoder(lf.GRU(3, 5), lf.GRU(8, 5), outputs), x, y),
    ]
    for model, x, y in models:
        model.loss(model.given(x, y), y).backward()
        assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def patterns(engine: lf.Engine | None) -> dict[str, tuple[Pattern, tuple[Any, ...]]]:
    """Each pattern with what its `predict` takes."""
    x, y = randn(30, 2, 3).float(), torch.randint(4, (30, 2))
    stack = [lf.Bidirectional(lf.GRU(3, 5), lf.LSTM(3, 4)), lf.Elman(9, 6)]
    free = lf.FreeRunning()
    return {
        "SequenceToSequence": (lf.SequenceToSequence(lf.Stacked(stack), 4, engine=engine), (x,)),
        "SequenceToOne": (lf.SequenceToOne(lf.GRU(3, 5), 4, engine=engine), (x, None, [30, 4])),
        "VectorToSequence": (lf.VectorToSequence(lf.GRU(3 + 4, 5), 4, engine=engine), (x[0], y)),
        "EncoderDecoder": (lf.EncoderDecoder(lf.GRU(3, 5), lf.LSTM(5 + 4, 6), 4, engine=engine), (x, y)),
        "Autoencoder": (lf.Autoencoder(lf.GRU(3, 5), lf.GRU(5 + 3, 6), lf.Reals(3), engine=engine), (x, free)),
    }


@pytest.mark.parametrize("name", patterns(None))
@pytest.mark.parametrize("engine", [lf.Sequential(), lf.Looped(), None])
def test_a_pattern_is_explained_as_it_is_run(name: str, engine: lf.Engine | None) -> None:
    model, given = patterns(engine)[name]
    parts = {path: part for path, part in model.named_modules() if isinstance(part, lf.Recurrent)}
    assert {type(part.engine) for part in parts.values()} == {type(engine or lf.Auto())}
    before = torch.get_rng_state()
    paragraphs = model.explain(*given).split("\n\n")
    assert torch.equal(torch.get_rng_state(), before)
    assert len(paragraphs) == len(parts)
    for (path, part), text in zip(parts.items(), paragraphs, strict=True):
        begin = f"{path}: " if len(parts) > 1 else ""
        assert text.startswith(f"{begin}{type(part.cell).__name__} over τ = ")
        assert type(engine or lf.FusedCPU()).__name__ in text or "only one step" in text
    assert model.explain(*given, code=True)
    assert {type(part.engine) for part in parts.values()} == {type(engine or lf.Auto())}


class Wrapped(lf.Feeding):
    """Another feeding, inside one of one's own."""

    def __init__(self, inner: lf.Feeding) -> None:
        self.inner = inner

    def known(self, y: Tensor, outputs: lf.Outputs) -> None:
        return None

    def next(self, o: Tensor, y: Tensor, outputs: lf.Outputs) -> Tensor:
        return self.inner.next(o, y, outputs) + 0 * outputs.encode(y)


@pytest.mark.parametrize("own", [False, True], ids=["torch's generator", "a generator of one's own"])
@pytest.mark.parametrize(
    "make",
    [
        lambda g: lf.ScheduledSampling(0.5, generator=g),
        lambda g: lf.ScheduledSampling(0.5, lf.Sample(g)),
        lambda g: lf.FreeRunning(lf.Sample(g)),
        lambda g: Wrapped(lf.FreeRunning(lf.Sample(g))),
    ],
)
def test_an_explanation_draws_no_random_numbers(
    make: Callable[[torch.Generator | None], lf.Feeding], own: bool
) -> None:
    generator = torch.Generator()
    feeding = make(generator if own else None)
    y = torch.randint(4, (9, 2))
    for model, x in (
        (lf.OutputRecurrence(3, 5, 4), randn(9, 2, 3).float()),
        (lf.VectorToSequence(lf.GRU(7, 5), 4), randn(2, 3).float()),
    ):
        results = []
        for explained in (False, True):
            generator.manual_seed(0)
            torch.manual_seed(0)
            if explained:
                model.explain(x, y, feeding)
                model.explain(x, y, feeding=feeding)
            results.append(model(x, y, feeding))
        assert torch.equal(*results)


def test_the_explanation_has_the_sizes_that_each_layer_reads() -> None:
    model, given = patterns(lf.Looped())["EncoderDecoder"]
    encoder, decoder = model.explain(*given).split("\n\n")
    assert encoder.startswith("encoder: GRU over τ = 30, batch 2, float32 on cpu: Looped, because it was asked for.")
    assert "1 product (6×24)" in decoder
    free = model.explain(given[0], feeding=lf.FreeRunning(), steps=7).split("\n\n")[1]
    assert free.startswith("decoder.recurrent: LSTM over τ = 7, batch 2, float32 on cpu: Looped, because")
    assert "3 products" in free  # W h, U [vector, fed] and V h: the loop goes through the output


def test_output_recurrence_says_how_it_is_run() -> None:
    model, x, y = lf.OutputRecurrence(3, 5, 4, engine=lf.Auto()), torch.randn(7, 2, 3), torch.randint(4, (7, 2))
    assert model.explain(x, y) == (
        "OutputToHidden: all steps at once, since what is fed back is known beforehand; no engine is needed."
    )
    for engine in (lf.Looped(), lf.FusedCPU()):
        model.engine = engine
        free = model.explain(x, feeding=lf.FreeRunning())
        assert free.startswith(f"OutputToHidden over τ = 7, batch 2, float32 on cpu: {type(engine).__name__}, because")
    assert "2 products (4×5, 5×4)" in free
    model.engine = lf.Auto()
    assert "there is only one step" in model.explain(x[:1], feeding=lf.FreeRunning())
    assert "all steps at once" in model.explain(x[:1], y[:1])
    assert lf.OutputRecurrence(3, 5, 4, engine=lf.Looped()).engine == lf.Looped()
    with pytest.raises(TypeError, match="engine must be an object"):
        lf.OutputRecurrence(3, 5, 4, engine="looped")  # type: ignore[arg-type]
