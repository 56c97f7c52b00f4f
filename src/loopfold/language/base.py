"""What every language model is: P(token | the tokens before it), one token after the other."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from loopfold.outputs import Classes
from loopfold.states import State, alive


class Context(NamedTuple):
    """Where a model stands in its texts. Every tensor has the batch first, so a context can be cut and reordered."""

    last: Tensor  # [batch], the token to be read next, which was scored last; |V| where a text has not begun
    memory: State  # what the model keeps of the tokens before that one


class Scored(NamedTuple):
    """What a model says of some tokens, and where it stands after them."""

    nll: Tensor  # [τ, batch], −log P(token | all before it) in nats; 0 after a text's end
    context: Context


class Next(NamedTuple):
    """The distribution of the token to come; `Context(token, memory)` is where the model stands once it has."""

    log_probabilities: Tensor  # [batch, |V|]
    memory: State


class LanguageModel(nn.Module, ABC):
    """P(token | the tokens before it), over tokens 0 … |V|-1.

    A model reads a text in pieces of any length: `scored = model(tokens, context)`, then on with `scored.context`.
    """

    vocabulary_size: int

    @abstractmethod
    def initial_context(self, batch: int) -> Context:
        """Before the first token of each of `batch` texts."""

    @abstractmethod
    def forward(self, tokens: Tensor, context: Context, lengths: Tensor | None = None) -> Scored:
        """Score `tokens [τ, batch]`; text `i` ends after `lengths[i]` of them."""

    @abstractmethod
    def next(self, context: Context) -> Next:
        """Read `context.last`, and say what may follow."""


def count_parameters(model: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def losses(o: Tensor, tokens: Tensor, lengths: Tensor | None) -> Tensor:
    """−log P of each token under `o [τ, batch, |V|]`; 0 after a text's end."""
    nll = Classes(o.shape[-1]).losses(o, tokens)
    return nll if lengths is None else torch.where(alive(tokens, lengths), nll, 0)
