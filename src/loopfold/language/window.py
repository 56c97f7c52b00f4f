"""Language models that see a fixed number of tokens back: a multilayer perceptron and a convolution over time.

Both are baselines beside the recurrent network. The perceptron has weights of its own for every place in its window
(M12); the convolution uses the same few weights at every step (M13), and sees further with every layer:

    width 2, three layers        o(t)
                                 /  |
                              /     |          dilation 4
                           h        h
                          / |      / |         dilation 2
                         h  h     h  h
                        /| /|    /| /|         dilation 1
                      x(t-7) …   …  x(t)       2·2·2 = 8 tokens are seen
"""

import math
from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopfold.language.base import Context, LanguageModel, Next, Scored, losses
from loopfold.states import whole_number


class FixedContextLM(LanguageModel):
    """P(token | the `span` tokens before it). The memory of such a model is those tokens themselves."""

    span: int

    def __init__(self, vocabulary_size: int, embedding_size: int, dropout: float) -> None:
        super().__init__()
        self.vocabulary_size = whole_number(type(self).__name__, "vocabulary_size", vocabulary_size)
        whole_number(type(self).__name__, "embedding_size", embedding_size)
        self.embedding = nn.Embedding(vocabulary_size + 1, embedding_size)  # the last row: no token there
        self.dropout = nn.Dropout(dropout)  # on what the readout reads

    @abstractmethod
    def logits(self, x: Tensor) -> Tensor:
        """o(t) `[τ, batch, |V|]` for every token, from the tokens before it: `x [span-1+τ, batch]`."""

    def initial_context(self, batch: int) -> Context:
        nothing = torch.full((batch, self.span), self.vocabulary_size, device=self.embedding.weight.device)
        return Context(nothing[:, 0], nothing[:, 1:])

    def forward(self, tokens: Tensor, context: Context, lengths: Tensor | None = None) -> Scored:
        seen = torch.cat([context.memory.T, context.last[None], tokens])  # [span+τ, batch]
        o = self.logits(seen[:-1])
        ends = torch.full_like(tokens[0], len(tokens)) if lengths is None else lengths.to(tokens.device)
        places = ends + torch.arange(self.span, device=tokens.device)[:, None]  # the last `span` tokens of each text
        *memory, last = seen.gather(0, places)
        return Scored(losses(o, tokens, lengths), Context(last, torch.stack(memory, 1) if memory else context.memory))

    def next(self, context: Context) -> Next:
        seen = torch.cat([context.memory, context.last[:, None]], 1)  # [batch, span]
        return Next(self.logits(seen.T)[-1].log_softmax(-1), seen[:, 1:])


class WindowLM(FixedContextLM):
    """A multilayer perceptron over the last `span` tokens (Bengio et al., 2003): `o = c + V φ(b + Σ_k U_k x(t-k))`.

    >>> model = WindowLM(10, span=3, embedding_size=4, hidden_size=5)
    >>> model(torch.tensor([[3, 1, 4, 1]]).T, model.initial_context(1)).nll.shape
    torch.Size([4, 1])
    """

    def __init__(
        self, vocabulary_size: int, span: int, embedding_size: int, hidden_size: int, dropout: float = 0.0
    ) -> None:
        super().__init__(vocabulary_size, embedding_size, dropout)
        self.span = whole_number("WindowLM", "span", span)
        self.U = nn.Parameter(_uniform(span, embedding_size, hidden_size, fan_in=span * embedding_size))
        self.b = nn.Parameter(torch.zeros(hidden_size))
        self.readout = nn.Linear(hidden_size, vocabulary_size)

    def logits(self, x: Tensor) -> Tensor:
        tau = len(x) - self.span + 1
        places = [x[k : k + tau] for k in range(self.span)]
        if self.embedding.num_embeddings < places[0].numel():  # U_k E once for every token, then looked up
            parts = [F.embedding(p, self.embedding.weight @ U) for p, U in zip(places, self.U, strict=True)]
        else:
            parts = [self.embedding(p) @ U for p, U in zip(places, self.U, strict=True)]
        return self.readout(self.dropout(torch.tanh(sum(parts, self.b))))


class ConvolutionLM(FixedContextLM):
    """Causal convolutions over time, each reaching `width` times as far back as the one below it.

    A layer is `h ← h + φ(b + Σ_k U_k h(t-k·d))` with d = 1, width, width², … The first reads the embeddings.

    >>> model = ConvolutionLM(10, width=2, layers=3, hidden_size=5)
    >>> model.span
    8
    >>> model(torch.tensor([[3, 1, 4, 1]]).T, model.initial_context(1)).nll.shape
    torch.Size([4, 1])
    """

    def __init__(self, vocabulary_size: int, width: int, layers: int, hidden_size: int, dropout: float = 0.0) -> None:
        super().__init__(vocabulary_size, hidden_size, dropout)
        self.width = whole_number("ConvolutionLM", "width", width)
        self.span = self.width ** whole_number("ConvolutionLM", "layers", layers)
        n = hidden_size
        self.U = nn.ParameterList(_uniform(width * n, n, fan_in=width * n) for _ in range(layers))
        self.b = nn.ParameterList(torch.zeros(n) for _ in range(layers))
        self.readout = nn.Linear(n, vocabulary_size)

    def logits(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for k, (U, b) in enumerate(zip(self.U, self.b, strict=True)):
            d = self.width**k
            tau = len(h) - (self.width - 1) * d
            seen = torch.cat([h[j * d : j * d + tau] for j in range(self.width)], -1)  # [τ, batch, width·n]
            h = h[-tau:] + torch.relu(b + seen @ U)
        return self.readout(self.dropout(h))


def _uniform(*shape: int, fan_in: int) -> Tensor:
    bound = 1 / math.sqrt(fan_in)
    return torch.empty(shape).uniform_(-bound, bound)
