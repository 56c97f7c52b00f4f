"""What holds for every language model, and each against its formula written out."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import FastAndSlow, LearnedStart, TwoMatrices, assert_same, gradients, randn
from torch import Tensor, nn

import loopfold as lf
from loopfold.language.base import Context, LanguageModel
from loopfold.language.recurrent import TiedReadout, as_language_model, recurrent_lm
from loopfold.states import leaves, map_state

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 7  # |V|
SIZES = [(1, 1), (1, 3), (9, 1), (13, 3)]  # τ, batch; the last has more tokens than there are kinds

MODELS: dict[str, Callable[[], LanguageModel]] = {
    "Elman": lambda: recurrent_lm(SIZE, [lf.Elman(3, 5)], 3),
    "LSTM": lambda: recurrent_lm(SIZE, [lf.LSTM(3, 5)], 3),
    "GRU on LSTM": lambda: recurrent_lm(SIZE, [lf.LSTM(3, 5), lf.GRU(5, 4)], 3),
    "a plain module": lambda: recurrent_lm(SIZE, [TwoMatrices(3, 5)], 3),
    "a NamedTuple": lambda: recurrent_lm(SIZE, [FastAndSlow(3, 5), lf.Elman(5, 4)], 3),
    "a learnt start": lambda: recurrent_lm(SIZE, [LearnedStart(3, 5)], 3),
    "tied": lambda: recurrent_lm(SIZE, [lf.LSTM(5, 4), lf.GRU(4, 5)], 5, tied=True),
    "one-hot": lambda: recurrent_lm(SIZE, [lf.GRU(SIZE, 5)], None),
    "vectors": lambda: lf.RecurrentLM(lf.SequenceToSequence(lf.Stacked([lf.LSTM(SIZE, 5), lf.Elman(5, 4)]), SIZE)),
    "WindowLM 1": lambda: lf.WindowLM(SIZE, span=1, embedding_size=3, hidden_size=5),
    "WindowLM 4": lambda: lf.WindowLM(SIZE, span=4, embedding_size=3, hidden_size=5),
    "ConvolutionLM 2·2": lambda: lf.ConvolutionLM(SIZE, width=2, layers=2, hidden_size=5),
    "ConvolutionLM 3": lambda: lf.ConvolutionLM(SIZE, width=3, layers=1, hidden_size=5),
    "ConvolutionLM 1": lambda: lf.ConvolutionLM(SIZE, width=1, layers=2, hidden_size=5),
    "NGramLM 1": lambda: lf.NGramLM(torch.randint(SIZE, (200,)), SIZE, order=1),
    "NGramLM 4": lambda: lf.NGramLM(torch.randint(SIZE, (200,)), SIZE, order=4, boundary=2),
}
ALL = pytest.mark.parametrize("name", MODELS)


def made(name: str) -> LanguageModel:
    return MODELS[name]().double()


def text(*shape: int) -> Tensor:
    return torch.randint(SIZE, shape)


def read_slowly(model: LanguageModel, tokens: Tensor) -> tuple[Tensor, Context]:
    """The definition: ask for the distribution of the next token, look up the token, go on."""
    context, nll = model.initial_context(tokens.shape[1]), []
    for row in tokens:
        log_p, memory = model.next(context)
        nll.append([-log_p[i, token] for i, token in enumerate(row.tolist())])
        context = Context(row, memory)
    return torch.stack([torch.stack(row) for row in nll]), context


def table_of(model: lf.RecurrentLM) -> nn.Parameter:
    """The embeddings."""
    (found,) = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    assert isinstance(found, nn.Parameter)
    return found


def assert_same_context(got: Context, needed: Context) -> None:
    assert torch.equal(got.last, needed.last)
    assert_same(leaves(got.memory), leaves(needed.memory))


# ------------------------------------------------------------------ what holds for every model


@ALL
def test_forward_says_what_next_says_token_by_token(name: str) -> None:
    model = made(name)
    for tau, batch in SIZES:
        tokens = text(tau, batch)
        scored, (nll, context) = model(tokens, model.initial_context(batch)), read_slowly(model, tokens)
        assert (scored.nll.shape, scored.nll.dtype) == ((tau, batch), torch.float64)
        assert_same(scored.nll, nll)
        assert_same_context(scored.context, context)


@ALL
def test_next_is_a_distribution(name: str) -> None:
    model = made(name)
    first = model.initial_context(3)
    assert first.last.tolist() == [SIZE] * 3
    for context in (first, model(text(6, 3), first).context):
        log_p = model.next(context).log_probabilities
        assert log_p.shape == (3, SIZE)
        assert_same(log_p.exp().sum(-1), torch.ones(3, dtype=torch.float64))


@ALL
def test_pieces_of_any_size_are_the_whole(name: str) -> None:
    model = made(name)
    for batch in (1, 3):
        tokens = text(13, batch)
        whole = model(tokens, model.initial_context(batch))
        for sizes in ([1] * 13, [2] * 6 + [1], [12, 1], [1, 12], [3, 1, 9]):
            context, parts = model.initial_context(batch), []
            for piece in tokens.split(sizes):
                nll, context, *_ = model(piece, context)
                parts.append(nll)
            assert_same(torch.cat(parts), whole.nll)
            assert_same_context(context, whole.context)


@ALL
def test_a_short_text_in_a_batch_is_that_text_alone(name: str) -> None:
    """Its scores, 0 after its end, its own context, and its gradient; in the middle of a text too."""
    model, tokens, lengths = made(name), text(9, 5), torch.tensor([9, 1, 4, 8, 1])
    for start in (model.initial_context(5), model(text(5, 5), model.initial_context(5)).context):
        start = map_state(lambda leaf: leaf.detach(), start)
        alive = torch.arange(9)[:, None] < lengths
        scored = [model(tokens.where(alive, filler), start, lengths) for filler in (text(9, 5), torch.tensor(0))]
        assert torch.equal(scored[0].nll, scored[1].nll)
        total: Tensor | float = 0.0
        for i, n in enumerate(lengths.tolist()):
            own = map_state(lambda leaf: leaf[i : i + 1], start)  # noqa: B023
            alone = model(tokens[:n, i : i + 1], own)
            assert_same(scored[0].nll[:n, i], alone.nll[:, 0])
            assert not scored[0].nll[n:, i].any()
            for got in scored:
                assert_same_context(map_state(lambda leaf: leaf[i : i + 1], got.context), alone.context)  # noqa: B023
            total = total + alone.nll.sum()
        if list(model.parameters()):
            assert isinstance(total, Tensor)
            trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
            assert_same(gradients(scored[0].nll.sum(), trained), gradients(total, trained))


@ALL
def test_the_order_of_a_batch_is_only_an_order(name: str) -> None:
    model, tokens, order = made(name), text(8, 5), torch.tensor([3, 0, 4, 4, 1])
    first = model(tokens[:5], model.initial_context(5))
    straight = model(tokens[5:], first.context)
    moved = model(tokens[5:, order], map_state(lambda leaf: leaf[order], first.context))
    assert_same(moved.nll, straight.nll[:, order])
    assert_same_context(moved.context, map_state(lambda leaf: leaf[order], straight.context))


@ALL
def test_no_token_is_scored_with_knowledge_of_itself_or_what_follows(name: str) -> None:
    """Were it, a token that sums to one over its own kinds would not: P is one distribution, whatever comes."""
    model, tokens = made(name), text(6, 1).expand(6, SIZE).clone()
    tokens[3] = torch.arange(SIZE)  # every kind of token at this place
    nll = model(tokens, model.initial_context(SIZE)).nll
    assert_same(nll[:3], nll[:3, :1].expand(3, SIZE))
    assert_same(nll[3].neg().exp().sum(), torch.ones((), dtype=torch.float64))


# ------------------------------------------------------------------ models with a window


@pytest.mark.parametrize("span", [1, 4])
@pytest.mark.parametrize(("tau", "batch"), [(1, 1), (3, 2), (4, 2), (9, 2)], ids=str)
def test_the_window_is_its_formula(span: int, tau: int, batch: int) -> None:
    """M12: o = c + V tanh(b + Σ_k U_k x(t-k)); U_k has weights of its own for each place. By table, or one by one."""
    model = lf.WindowLM(SIZE, span, embedding_size=3, hidden_size=5).double()
    nn.init.normal_(model.b)
    tokens = text(tau, batch)
    E, V, c = model.embedding.weight, model.readout.weight, model.readout.bias
    needed = torch.zeros(tau, batch, dtype=torch.float64)
    for t in range(tau):
        for i in range(batch):
            a: Tensor = model.b
            for k in range(1, span + 1):
                token = int(tokens[t - k, i]) if t - k >= 0 else SIZE
                a = a + E[token] @ model.U[span - k]
            o = c + V @ torch.tanh(a)
            needed[t, i] = o.exp().sum().log() - o[tokens[t, i]]
    got = model(tokens, model.initial_context(batch)).nll
    assert_same(got, needed)
    weights = randn(tau, batch)
    assert_same(gradients((got * weights).sum(), model), gradients((needed * weights).sum(), model))


@pytest.mark.parametrize(("width", "layers"), [(1, 1), (2, 1), (2, 3), (3, 2)])
def test_the_convolution_is_torchs(width: int, layers: int) -> None:
    """M13: h ← h + relu(b + Σ_k U_k h(t-k·d)), the same weights at every step."""
    model = lf.ConvolutionLM(SIZE, width, layers, hidden_size=5).double()
    assert model.span == width**layers
    for b in model.b:
        nn.init.normal_(b)
    for tau, batch in SIZES:
        tokens = text(tau, batch)
        x = torch.cat([torch.full((model.span, batch), SIZE), tokens])[:-1]
        h = model.embedding(x).permute(1, 2, 0)  # [batch, n, span-1+τ]
        for k, (U, b) in enumerate(zip(model.U, model.b, strict=True)):
            kernel = U.view(width, 5, 5).permute(2, 1, 0)  # [out, in, place]
            new = F.conv1d(h, kernel, b, dilation=width**k)
            h = h[..., -new.shape[-1] :] + torch.relu(new)
        o = model.readout(h.permute(2, 0, 1))
        needed = -o.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        got = model(tokens, model.initial_context(batch)).nll
        assert_same(got, needed)
        assert_same(gradients(got.sum(), model), gradients(needed.sum(), model))


@pytest.mark.parametrize("name", ["WindowLM 1", "WindowLM 4", "ConvolutionLM 2·2", "ConvolutionLM 3"])
def test_what_is_seen_ends_with_the_span(name: str) -> None:
    """M13: each output sees a few neighbours: the token `span` back has influence, the one before it none."""
    model = made(name)
    assert isinstance(model, lf.WindowLM | lf.ConvolutionLM)
    t = model.span + 1
    tokens = text(t + 1, 20)

    def scores_after_a_change_of(place: int) -> Tensor:
        changed = tokens.clone()
        changed[place] = (changed[place] + 1) % SIZE
        return model(changed, model.initial_context(20)).nll[t]

    nll = model(tokens, model.initial_context(20)).nll[t]
    assert torch.equal(scores_after_a_change_of(t - model.span - 1), nll)
    assert not scores_after_a_change_of(t - model.span).isclose(nll, rtol=1e-6, atol=1e-6).all()


def test_parameters_grow_with_the_window_or_with_its_logarithm() -> None:
    """M12, M13: the perceptron has U for each place; the convolution reaches twice as far with one layer more."""
    sizes = [sum(p.numel() for p in lf.WindowLM(SIZE, span, 3, 5).U) for span in (1, 4, 8)]
    assert sizes == [15, 60, 120]
    sizes = [sum(p.numel() for p in lf.ConvolutionLM(SIZE, 2, layers, 5).U) for layers in (1, 2, 3)]
    assert sizes == [50, 100, 150]  # spans 2, 4, 8


# ------------------------------------------------------------------ recurrent models


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("layers", [1, 2])
def test_a_recurrent_model_is_torchs(kind: type[nn.RNN | nn.LSTM | nn.GRU], layers: int) -> None:
    """nn.Embedding, nn.LSTM, nn.Linear with the same weights: every score and every gradient."""
    embedding = nn.Embedding(SIZE + 1, 3).double()
    network = kind(3, 5, num_layers=layers).double()
    readout = nn.Linear(5, SIZE).double()
    cells = [layer.get_submodule("cell") for layer in lf.from_torch(network).layers]
    ours = recurrent_lm(SIZE, cells, 3).double()
    with torch.no_grad():
        table_of(ours).copy_(embedding.weight)
        ours.network.V.copy_(readout.weight)
        ours.network.c.copy_(readout.bias)

    for tau, batch in SIZES:
        tokens, weights = text(tau, batch), randn(tau, batch)
        x = torch.cat([torch.full((1, batch), SIZE), tokens[:-1]])
        o = readout(network(embedding(x))[0])
        needed = F.cross_entropy(o.flatten(0, 1), tokens.flatten(), reduction="none").view(tau, batch)
        got = ours(tokens, ours.initial_context(batch)).nll
        assert_same(got, needed, 1e-10)

        g = gradients((got * weights).sum(), ours)
        theirs = gradients(
            (needed * weights).sum(),
            {"E": embedding.weight, "V": readout.weight, "c": readout.bias, **dict(network.named_parameters())},
        )
        expected = {"network.readout.V": theirs["V"], "network.readout.c": theirs["c"]}
        for k in range(layers):
            cell = f"network.recurrent.layers.{k}.cell." + ("cell." if k == 0 else "")  # the lowest is in an Embedded
            expected[f"{cell}U"] = theirs[f"weight_ih_l{k}"]
            expected[f"{cell}W"] = theirs[f"weight_hh_l{k}"]
            expected[f"{cell}b"] = theirs[f"bias_ih_l{k}"]
            if kind is nn.GRU:
                expected[f"{cell}b_hn"] = theirs[f"bias_hh_l{k}"][10:]
        expected["network.recurrent.layers.0.cell.embedding.weight"] = theirs["E"]
        assert_same(g, expected, 1e-10)


def test_one_hot_is_vectors_given_one_hot() -> None:
    cell = lf.LSTM(SIZE, 5)
    tokens_in = recurrent_lm(SIZE, [cell], None).double()
    vectors_in = lf.RecurrentLM(lf.SequenceToSequence(cell, SIZE)).double()
    vectors_in.network.readout = tokens_in.network.readout
    assert (tokens_in.reads_tokens, vectors_in.reads_tokens) == (True, False)
    tokens = text(13, 3)
    scores = [model(tokens, model.initial_context(3)).nll for model in (tokens_in, vectors_in)]
    assert_same(scores[0], scores[1])
    assert_same(gradients(scores[0].sum(), cell), gradients(scores[1].sum(), cell))
    assert not table_of(tokens_in).requires_grad
    assert table_of(tokens_in).tolist() == torch.eye(SIZE + 1, SIZE).tolist()  # the start is zeros


def test_the_start_of_a_text_is_zeros_to_a_network_over_vectors() -> None:
    network = lf.SequenceToSequence(lf.Elman(SIZE, 5), SIZE).double()
    model, tokens = lf.RecurrentLM(network), text(4, 1)
    x = torch.cat([torch.zeros(1, 1, SIZE), F.one_hot(tokens[:-1], SIZE)]).double()
    needed = -network(x).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    assert_same(model(tokens, model.initial_context(1)).nll, needed)


def test_tied_weights_are_one_table_with_the_gradients_of_both_uses() -> None:
    cells = [lf.LSTM(5, 4), lf.GRU(4, 5)]
    tied = recurrent_lm(SIZE, copy.deepcopy(cells), 5, tied=True).double()
    apart = recurrent_lm(SIZE, copy.deepcopy(cells), 5).double()
    assert isinstance(tied.network.readout, TiedReadout)
    table = table_of(tied)
    assert tied.network.readout.embedding.weight is table
    nn.init.normal_(tied.network.c)
    assert [key for key, p in tied.named_parameters() if p.shape[0] in (SIZE, SIZE + 1) and p.dim() == 2] == [
        "network.recurrent.layers.0.cell.embedding.weight"
    ]
    assert sum(p.numel() for p in apart.parameters()) - sum(p.numel() for p in tied.parameters()) == SIZE * 5
    with torch.no_grad():
        table_of(apart).copy_(table)
        apart.network.V.copy_(table[:-1])
        apart.network.c.copy_(tied.network.c)

    tokens, weights = text(13, 3), randn(13, 3)
    scores = [model(tokens, model.initial_context(3)).nll for model in (tied, apart)]
    assert_same(scores[0], scores[1])
    one, two = (gradients((nll * weights).sum(), m) for nll, m in zip(scores, (tied, apart), strict=True))
    key = "network.recurrent.layers.0.cell.embedding.weight"
    two[key] = two[key] + F.pad(two.pop("network.readout.V"), (0, 0, 0, 1))
    assert_same(one, two)


def test_a_step_of_training_moves_both_uses_of_a_tied_table() -> None:
    model = recurrent_lm(SIZE, [lf.GRU(5, 5)], 5, tied=True).double()
    tokens = text(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model(tokens, model.initial_context(2)).nll.sum()
    before.backward()
    optimizer.step()
    assert model(tokens, model.initial_context(2)).nll.sum().item() < before.item()
    assert torch.equal(model.network.V, table_of(model)[:-1])


# ------------------------------------------------------------------ dropout


@pytest.mark.parametrize("variational", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_dropout_is_for_training_only(variational: bool, tied: bool) -> None:
    cells, tokens = [lf.LSTM(5, 4), lf.GRU(4, 5)], text(13, 3)
    model = recurrent_lm(SIZE, cells, 5, 0.5, variational=variational, tied=tied).double()
    plain = recurrent_lm(SIZE, copy.deepcopy(cells), 5, tied=tied).double()
    plain.load_state_dict(model.state_dict())
    needed = plain(tokens, plain.initial_context(3)).nll
    one, other = (model(tokens, model.initial_context(3)).nll for _ in range(2))
    assert not torch.allclose(one, other)
    model.eval()
    assert_same(model(tokens, model.initial_context(3)).nll, needed)


@pytest.mark.parametrize(("variational", "kind"), [(False, nn.Dropout), (True, lf.VariationalDropout)])
def test_dropout_falls_between_layers_and_before_the_readout(variational: bool, kind: type[nn.Module]) -> None:
    model = recurrent_lm(SIZE, [lf.Elman(3, 6), lf.Elman(6, 5)], 3, 0.5, variational=variational).double()
    seen: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, kind):
            module.register_forward_hook(lambda module, x, y: seen.append((y / x[0]).round(decimals=9)))
    model(text(9, 4), model.initial_context(4))
    assert [tuple(mask.shape) for mask in seen] == [(9, 4, 6), (9, 4, 5)]
    for mask in seen:
        assert mask.unique().tolist() == [0, 2]
        assert bool((mask == mask[0]).all()) is variational  # one mask for all steps, or one for each
        assert not (mask == mask[:, :1]).all()  # but every text has its own


def test_variational_dropout_keeps_the_mean_and_silences_the_same_units_throughout() -> None:
    dropout, x = lf.VariationalDropout(0.3), randn(7, 50, 400)
    y = dropout(x)
    mask = y / x
    assert_same(mask, mask[:1].expand_as(mask))
    assert_same(mask.round(decimals=9).unique(), torch.tensor([0, 1 / 0.7], dtype=torch.float64), 1e-8)
    assert float(mask.mean()) == pytest.approx(1, abs=0.02)
    assert not torch.equal(dropout(x), y)  # the next window has a mask of its own
    assert dropout(randn(1, 1, 3)).shape == (1, 1, 3)
    assert dropout.eval()(x) is x
    assert lf.VariationalDropout(0.0)(x) is x


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5])
def test_a_probability_of_dropout(p: float) -> None:
    with pytest.raises(ValueError, match=f"from 0 up to but not including 1; got {p}"):
        lf.VariationalDropout(p)
    with pytest.raises(ValueError, match=f"from 0 up to but not including 1; got {p}"):
        recurrent_lm(SIZE, [lf.Elman(3, 5)], 3, p, variational=True)


# ------------------------------------------------------------------ what is no language model


def test_what_has_read_the_future_cannot_predict_it() -> None:
    layer = lf.Bidirectional(lf.GRU(SIZE, 3), lf.GRU(SIZE, 3))
    for network in (lf.SequenceToSequence(part, SIZE) for part in (layer, lf.Stacked([layer, lf.Elman(6, 4)]))):
        with pytest.raises(ValueError, match="Bidirectional layer has read it already"):
            lf.RecurrentLM(network)


@pytest.mark.parametrize(
    "network",
    [
        lf.SequenceToSequence(lf.GRU(SIZE, 3), lf.Reals(SIZE)),
        lf.SequenceToOne(lf.GRU(SIZE, 3), SIZE),
        lf.GRU(SIZE, 3),
    ],
    ids=["Reals", "SequenceToOne", "GRU"],
)
def test_a_language_model_has_a_distribution_at_every_step(network: nn.Module) -> None:
    with pytest.raises(TypeError, match=r"SequenceToSequence\(layer, outputs=\|V\|\)"):
        lf.RecurrentLM(network)  # type: ignore[arg-type]


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="one-hot vectors have no table to tie the readout to"):
        recurrent_lm(SIZE, [lf.GRU(SIZE, SIZE)], None, tied=True)
    with pytest.raises(ValueError, match="tied weights need an embedding of the hidden size, 4; got 5"):
        recurrent_lm(SIZE, [lf.GRU(5, 5), lf.GRU(5, 4)], 5, tied=True)
    with pytest.raises(ValueError, match="vocabulary_size as a whole number of at least 1; got 0"):
        recurrent_lm(0, [lf.GRU(3, 5)], 3)
    with pytest.raises(ValueError, match="WindowLM needs span as a whole number of at least 1; got 0"):
        lf.WindowLM(SIZE, 0, 3, 5)
    with pytest.raises(ValueError, match="WindowLM needs vocabulary_size"):
        lf.WindowLM(0, 2, 3, 5)
    with pytest.raises(ValueError, match=r"ConvolutionLM needs width as a whole number of at least 1; got 2\.0"):
        lf.ConvolutionLM(SIZE, 2.0, 2, 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ConvolutionLM needs layers as a whole number of at least 1; got 0"):
        lf.ConvolutionLM(SIZE, 2, 0, 5)
    with pytest.raises(TypeError, match=r"Embedded needs an nn\.Embedding\(tokens, size\); got a Linear"):
        lf.Embedded(lf.GRU(3, 5), nn.Linear(7, 3))  # type: ignore[arg-type]


def test_what_is_taken_for_a_language_model() -> None:
    model = made("WindowLM 4")
    assert as_language_model(model) is model
    network = lf.SequenceToSequence(lf.GRU(SIZE, 3), SIZE)
    for training in (True, False):
        taken = as_language_model(network.train(training))
        assert isinstance(taken, lf.RecurrentLM)
        assert taken.network is network
        assert (taken.training, network.training, network.recurrent.training) == (training, training, training)
    with pytest.raises(TypeError, match=r"a Linear is not a language model.*lf\.SequenceToSequence"):
        as_language_model(nn.Linear(3, 3))
