"""What every language model is: P(token | the tokens before it), one token after the other."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from loopfold.feeding import Pick, scores
from loopfold.outputs import Classes, Outputs
from loopfold.states import State, alive


class Context(NamedTuple):
    """Where a model stands in its texts. Every tensor has the batch first, so a context can be cut and reordered."""

    last: Tensor  # [batch], the token to be read next, which was scored last; |V| where a text has not begun
    memory: State  # what the model keeps of the tokens before that one


class Scored(NamedTuple):
    """What a model says of some tokens, and where it stands after them."""

    nll: Tensor  # [τ, batch], −log P(token | all before it) in nats; 0 after a text's end
    context: Context
    penalty: Tensor | None = None  # what training adds to the mean loss, if anything
    hidden: Tensor | None = None  # [τ, batch, n], what the readout read for each token, where a model has a readout

    def loss(self, share: float) -> Tensor:
        """What training makes small: the sum of nll, of which `share` makes a mean, and the penalty."""
        mean = self.nll.sum() * share
        return mean if self.penalty is None else mean + self.penalty


class Next(NamedTuple):
    """The distribution of the token to come; `Context(token, memory)` is where the model stands once it has."""

    log_probabilities: Tensor  # [batch, |V|]
    memory: State


class Written(NamedTuple):
    """What a model has written, and where it stands after that."""

    tokens: Tensor  # [τ, batch]
    best: Tensor  # [τ, batch], the largest output at each step: not a finite number where nothing can be chosen
    context: Context


class Chooser(nn.Module):
    """The token that `pick` picks from outputs `o [batch, |V|]`, and never `unknown`; and the largest of o."""

    never: Tensor

    def __init__(self, pick: Pick, outputs: Outputs, unknown: int | None, device: torch.device) -> None:
        super().__init__()
        self.pick, self.outputs, self.knows_all = pick, outputs, unknown is None
        self.register_buffer("never", torch.arange(outputs.size, device=device) == (-1 if unknown is None else unknown))

    def forward(self, o: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        o = o if self.knows_all else o.masked_fill(self.never, -torch.inf)
        return scores(self.pick, o, self.outputs, noise).argmax(-1), o.amax(-1)


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

    def write(self, context: Context, steps: int, pick: Pick, noise: Tensor | None, unknown: int | None) -> Written:
        """So many more tokens, each of which is read next: one call of `next` a token.

        `noise [steps, batch, |V|]` is what `feeding.noise_of(pick, …)` drew, and `unknown` a token never to be written.
        """
        choose = Chooser(pick, Classes(self.vocabulary_size), unknown, context.last.device)
        tokens, best = [], []
        for t in range(steps):
            log_p, memory = self.next(context)
            token, largest = choose(log_p, None if noise is None else noise[t].to(log_p.device))
            context = Context(token, memory)
            tokens.append(token)
            best.append(largest)
        return Written(torch.stack(tokens), torch.stack(best), context)


def count_parameters(model: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def losses(o: Tensor, tokens: Tensor, lengths: Tensor | None) -> Tensor:
    """−log P of each token under `o [τ, batch, |V|]`; 0 after a text's end."""
    nll = Classes(o.shape[-1]).losses(o, tokens)
    return nll if lengths is None else torch.where(alive(tokens, lengths), nll, 0)
