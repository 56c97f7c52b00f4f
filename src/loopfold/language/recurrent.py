"""The recurrent language model: the past as a hidden state, P(x(t) | x(1…t-1)) = P(x(t) | h(t-1))."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from loopfold.feedback import kept_step
from loopfold.feeding import Pick, TeacherForcing, undrawn
from loopfold.language.base import Chooser, Context, LanguageModel, Next, Scored, Written, losses
from loopfold.language.readout import readout_losses
from loopfold.outputs import Classes, Outputs
from loopfold.patterns import SequenceToSequence
from loopfold.recurrent import (
    Bidirectional,
    Recurrent,
    RecurrentLayer,
    Stacked,
    engine_of,
    is_plain,
    step_of,
)
from loopfold.regularisers import EmbeddingDropout, VariationalDropout, WeightDrop
from loopfold.states import State, alive, at_end, leaves, name_of, whole_number
from loopfold.surroundings import global_hooks
from loopfold.transitions import Embedded
from loopfold.wiring import Readout, Wiring


class RecurrentLM(LanguageModel):
    """`network`, made to predict each token from those before it: what it reads at step t is the token of step t-1.

    `network` reads tokens, 0 … |V|-1 and |V| for the start of a text (see `Embedded`), or vectors `[τ, batch, |V|]`,
    to which a token is given one-hot and the start as zeros.

    `dropout`            falls on what the readout reads
    `input_dropout`      falls on the embeddings of tokens, and `embedding_dropout` on whole rows of their table
    `penalty`            is added to the loss in training

    >>> from loopfold import LSTM
    >>> model = RecurrentLM(SequenceToSequence(LSTM(10, 5), outputs=10))
    >>> model(torch.tensor([[3, 1, 4, 1]]).T, model.initial_context(1)).nll.shape
    torch.Size([4, 1])
    """

    def __init__(
        self,
        network: SequenceToSequence,
        dropout: nn.Module | None = None,
        *,
        input_dropout: nn.Module | None = None,
        embedding_dropout: EmbeddingDropout | None = None,
        penalty: "ActivationPenalty | None" = None,
    ) -> None:
        super().__init__()
        if not isinstance(network, SequenceToSequence) or not isinstance(network.outputs, Classes):
            raise TypeError("a language model needs an output at every step: SequenceToSequence(layer, outputs=|V|).")
        if any(isinstance(module, Bidirectional) for module in network.modules()):
            raise ValueError("a language model predicts what comes; a Bidirectional layer has read it already.")
        self.network = network
        self.dropout = dropout or nn.Identity()
        self.vocabulary_size = network.outputs.size
        tables = [module.embedding for module in network.modules() if isinstance(module, Embedded)]
        self.reads_tokens = bool(tables)
        self.input_dropout, self.embedding_dropout = input_dropout, embedding_dropout
        self.penalty = penalty
        if not tables and (input_dropout or embedding_dropout):
            raise ValueError("one-hot vectors are no embeddings: input_dropout and embedding_dropout need a table.")
        if tables and tables[0].num_embeddings <= self.vocabulary_size:
            raise ValueError(
                f"the embedding has {tables[0].num_embeddings} rows; it needs one for each of {self.vocabulary_size} "
                f"tokens and one for the start of a text: nn.Embedding({self.vocabulary_size + 1}, size)."
            )

    @property
    def wiring(self) -> Wiring:
        """The network's, with what is fed back as all that it reads."""
        return replace(self.network.wiring, x=None, feeding=TeacherForcing())

    def initial_context(self, batch: int) -> Context:
        start = torch.full((batch,), self.vocabulary_size, device=self.network.c.device)
        return Context(start, self.network.recurrent.initial_state(batch))

    def forward(self, tokens: Tensor, context: Context, lengths: Tensor | None = None) -> Scored:
        x = torch.cat([context.last[None], tokens[:-1]])  # x(t) = token(t-1)
        run = self.network.recurrent(self._read(x), context.memory, lengths)
        h, readout = self.dropout(run.hidden), self.network.readout
        if is_plain(readout, Readout) and not global_hooks():
            nll = readout_losses(h, readout.V, readout.c, tokens, lengths)
        else:
            nll = losses(readout(h), tokens, lengths)
        penalty = self.penalty(run.hidden, h, lengths) if self.training and self.penalty else None
        return Scored(nll, Context(at_end(tokens, lengths), run.last), penalty, h)

    def next(self, context: Context) -> Next:
        run = self.network.recurrent(self.encode(context.last[None]), context.memory)
        return Next(self.network.readout(run.last_hidden).log_softmax(-1), run.last)

    def write(self, context: Context, steps: int, pick: Pick, noise: Tensor | None, unknown: int | None) -> Written:
        """All steps are one loop, which an engine runs."""
        if type(self).next is not RecurrentLM.next:  # a model of its own, which says itself what may follow
            return super().write(context, steps, pick, noise, unknown)
        network, c = self.network, self.network.c
        parts = (network.recurrent, network.readout, network.outputs, undrawn(pick, network.outputs), unknown)
        step = kept_step(network, Writes, *parts, self.reads_tokens, c.device, c.dtype)
        memory = context.memory
        dtype = leaves(memory)[0].dtype
        if not dtype.is_floating_point or self.vocabulary_size >= 1 / torch.finfo(dtype).eps:
            dtype = torch.float64  # which has every token; engines that compile need one dtype, and refuse
        last = context.last[:, None].to(dtype)
        noise = (
            last.new_zeros(steps, len(last), 0)
            if noise is None
            else noise.to(c.device, torch.promote_types(noise.dtype, c.dtype))
        )
        run = Recurrent(step, engine_of(network.recurrent))(noise, (memory, last))
        assert isinstance(run.outputs, tuple)
        tokens, best = run.outputs
        return Written(tokens, best, Context(tokens[-1], run.last[0]))

    def _read(self, x: Tensor) -> Tensor | tuple[Tensor]:
        """Tokens as `network` reads them in training, where words and numbers of them may be dropped."""
        if not (self.training and (self.input_dropout or self.embedding_dropout)):
            return self.encode(x)
        embedding = next(module.embedding for module in self.network.modules() if isinstance(module, Embedded))
        rows = embedding(x)
        if self.embedding_dropout:
            rows = rows * self.embedding_dropout(rows.new_ones(embedding.num_embeddings, 1))[x]
        return (self.input_dropout(rows) if self.input_dropout else rows,)

    def encode(self, x: Tensor) -> Tensor:
        """Tokens as `network` reads them; |V| is the start of a text."""
        return x if self.reads_tokens else one_hot(x, self.vocabulary_size, self.network.c.dtype)


def one_hot(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Tokens as vectors; `size` itself, the start of a text, as zeros."""
    return F.one_hot(x, size + 1)[..., :-1].to(dtype)


class Writes(nn.Module):
    """One step of a language model that reads what it has written: the state is (memory, the last token)."""

    rows: Tensor | None

    def __init__(
        self,
        layer: RecurrentLayer,
        readout: nn.Module,
        outputs: Outputs,
        pick: Pick,
        unknown: int | None,
        reads_tokens: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.layer, self.readout, self.size, self.reads_tokens = layer, readout, outputs.size, reads_tokens
        self.choose = Chooser(pick, outputs, unknown, device)
        # as rows of a table, one-hot vectors need no product with a matrix: what it makes of each is computed once
        self.register_buffer("rows", torch.eye(self.size + 1, self.size, device=device) if self.size < 1000 else None)

    def forward(self, state: tuple[State, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[State, Tensor]]:
        memory, last = state  # the token as a number, as states are
        token = last[:, 0].clamp(0, self.size).long()
        read = token if self.reads_tokens else self._vector(token)
        h, _, memory = step_of(self.layer, memory, read, t=torch.zeros_like(last))
        token, best = self.choose(self.readout(h), x if x.shape[1] else None)
        return (token, best), (memory, token[:, None].to(last.dtype))

    def _vector(self, token: Tensor) -> Tensor:
        return one_hot(token, self.size, self.dtype) if self.rows is None else self.rows.to(self.dtype)[token]


class TiedReadout(Readout):
    """`o = c + V h`, where `V` is the table of embeddings too, less its last row, the start of a text."""

    def __init__(self, embedding: nn.Embedding) -> None:
        nn.Module.__init__(self)
        self.embedding = embedding
        self.c = nn.Parameter(embedding.weight.new_zeros(embedding.num_embeddings - 1))

    @property
    def V(self) -> Tensor:  # type: ignore[override]
        return self.embedding.weight[:-1]


class ActivationPenalty(nn.Module):
    """Small activations, and such as change slowly: `α mean(dropped h²) + β mean((h(t) - h(t-1))²)`.

    Merity et al., Revisiting Activation Regularization for Language RNNs (2017). The first is of the hidden states that
    the readout reads, after dropout; the second of those before it.

    >>> h = torch.tensor([[[1.0]], [[2.0]], [[4.0]]])
    >>> float(ActivationPenalty(2, 1)(h, h, None))  # 2 (1 + 4 + 16) / 3 + (1 + 4) / 2
    16.5
    """

    def __init__(self, activation: float = 0.0, change: float = 0.0) -> None:
        super().__init__()
        self.activation, self.change = activation, change

    def forward(self, h: Tensor, dropped: Tensor, lengths: Tensor | None) -> Tensor:
        def mean_square(x: Tensor, ends: Tensor | None) -> Tensor:  # of sequences that have ended, nothing counts
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            if ends is None:
                return x.square().mean()
            there = alive(x, ends)
            return torch.where(there, x, 0).square().sum() / (there.sum() * x.shape[-1]).clamp(min=1)

        total = self.activation * mean_square(dropped, lengths)
        if self.change and len(h) > 1:
            total = total + self.change * mean_square(h[1:] - h[:-1], None if lengths is None else lengths - 1)
        return total

    def extra_repr(self) -> str:
        return f"activation={self.activation}, change={self.change}"


def recurrent_lm(
    vocabulary_size: int,
    cells: Sequence[nn.Module],
    embedding_size: int | None,
    dropout: float = 0.0,
    *,
    variational: bool = False,
    tied: bool = False,
    output_dropout: float | None = None,
    input_dropout: float = 0.0,
    embedding_dropout: float = 0.0,
    weight_drop: float = 0.0,
    activation_penalty: float = 0.0,
    change_penalty: float = 0.0,
) -> RecurrentLM:
    """Embedding, stacked cells, readout. The first cell reads `embedding_size` numbers; None means one-hot vectors.

    `dropout` falls between layers and before the readout, where `output_dropout` may be another, `input_dropout` on
    what the first layer reads; `variational`: with one mask for all steps of a window. `embedding_dropout` silences
    whole words, `weight_drop` single weights `W` of the cells. `tied` makes the readout's `V` the table of embeddings
    itself.
    """
    if not cells:
        raise ValueError("a recurrent language model needs at least one cell.")
    kinds = whole_number("a language model", "vocabulary_size", vocabulary_size) + 1  # the start of a text is one
    if embedding_size is None:
        if tied:
            raise ValueError("one-hot vectors have no table to tie the readout to: give an embedding size.")
        embedding = nn.Embedding.from_pretrained(torch.eye(kinds, vocabulary_size))
    else:
        embedding = nn.Embedding(kinds, embedding_size)
    kind = VariationalDropout if variational else nn.Dropout
    layers = [Recurrent(Embedded(cells[0], embedding)), *map(Recurrent, cells[1:])]
    network = SequenceToSequence(Stacked(layers, kind(dropout)), vocabulary_size)
    if tied:
        n = network.recurrent.hidden_size
        if n != embedding_size:
            raise ValueError(f"tied weights need an embedding of the hidden size, {n}; got {embedding_size}.")
        nn.init.normal_(embedding.weight, std=1 / math.sqrt(n))  # as an output layer starts
        network.readout = TiedReadout(embedding)
    for cell in dict.fromkeys(cells) if weight_drop else ():  # one may be there twice
        if "W" not in cell._parameters:
            raise ValueError(
                f"weight_drop needs a cell with a parameter W, from state to state; {name_of(cell)} has none."
            )
        register_parametrization(cell, "W", WeightDrop(weight_drop))
    return RecurrentLM(
        network,
        kind(dropout if output_dropout is None else output_dropout),
        input_dropout=kind(input_dropout) if input_dropout else None,
        embedding_dropout=EmbeddingDropout(embedding_dropout) if embedding_dropout else None,
        penalty=ActivationPenalty(activation_penalty, change_penalty) if activation_penalty or change_penalty else None,
    )


def as_language_model(model: nn.Module) -> LanguageModel:
    """A language model as it is; a `SequenceToSequence` over one-hot vectors or tokens as a `RecurrentLM`."""
    if isinstance(model, LanguageModel):
        return model
    if isinstance(model, SequenceToSequence):
        found = RecurrentLM(model)
        found.training = model.training
        return found
    raise TypeError(
        f"a {type(model).__name__} is not a language model. Give one of ours, such as lf.NGramLM, or a "
        f"lf.SequenceToSequence whose outputs are the tokens; or derive from lf.LanguageModel."
    )
