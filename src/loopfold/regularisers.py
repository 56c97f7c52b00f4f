"""What keeps a network from learning its training text by heart: dropout of inputs, of weights, of whole words."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList


class VariationalDropout(nn.Module):
    """Dropout with one mask for all steps of a sequence, so that the same units are silent throughout.

    Gal and Ghahramani (2016) put such masks on what a layer reads; `Stacked` does so between its layers. Where a
    network is fed its own outputs, as under `FreeRunning`, each step is a sequence of its own, with another mask.

    >>> kept = VariationalDropout(0.5)(torch.ones(7, 2, 5))
    >>> bool((kept == kept[0]).all())
    True
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = probability(p)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        return x * F.dropout(torch.ones_like(x[:1]), self.p)  # [τ, batch, n] times [1, batch, n]

    def extra_repr(self) -> str:
        return f"p={self.p}"


class WeightDrop(nn.Module):
    """Dropout of weights, as a parametrization in torch's sense; `Recurrent` draws a new mask for each of its runs.

    DropConnect (Wan et al., 2013) on `W`, the weights from state to state, is what made LSTMs good at words (Merity et
    al., Regularizing and Optimizing LSTM Language Models, 2018). All steps of a run have the same weights, so that the
    step is compiled as any other. The mask is the module's own: train it in one thread at a time. Elsewhere, as in
    `unfold` of the cell alone, the mask is that of the last run.

    >>> from loopfold import LSTM, Recurrent
    >>> layer = Recurrent(LSTM(3, 5))
    >>> _ = nn.utils.parametrize.register_parametrization(layer.cell, "W", WeightDrop(0.5))
    >>> layer(torch.ones(7, 2, 3)).hidden.shape, 0 < int((layer.cell.W == 0).sum()) < 100
    (torch.Size([7, 2, 5]), True)
    """

    mask: Tensor

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = probability(p)
        self.register_buffer("mask", torch.ones(()), persistent=False)

    def forward(self, W: Tensor) -> Tensor:
        return W * self.mask if self.training and self.p else W

    def draw(self, W: Tensor) -> None:
        """Another mask, for weights like these. It is a new tensor: an earlier run may need its own on its way back."""
        self.mask = F.dropout(torch.ones_like(W), self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def draw_weights(module: nn.Module) -> None:
    """A new mask for every weight in a module that is subject to `WeightDrop` in training."""
    for part in module.modules():
        if isinstance(part, ParametrizationList) and any(isinstance(drop, WeightDrop) for drop in part):
            with torch.no_grad():
                names = ["original"] if part.is_tensor else [f"original{i}" for i in range(part.ntensors)]
                W = tuple(getattr(part, name) for name in names)
                for step in part:  # as torch applies them, one after the other
                    if isinstance(step, WeightDrop) and step.training and step.p:
                        step.draw(W[0])
                    W = (step(*W),)


class EmbeddingDropout(nn.Module):
    """Dropout of whole words: rows of a table of embeddings, the same ones wherever in a sequence a word stands.

    Gal and Ghahramani, A Theoretically Grounded Application of Dropout in Recurrent Neural Networks (2016).

    >>> table = EmbeddingDropout(0.5)(torch.ones(1000, 4))
    >>> bool((table == table[:, :1]).all()), 300 < int((table[:, 0] == 0).sum()) < 700
    (True, True)
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = probability(p)

    def forward(self, table: Tensor) -> Tensor:
        return table * F.dropout(torch.ones_like(table[:, :1]), self.p) if self.training and self.p else table

    def extra_repr(self) -> str:
        return f"p={self.p}"


def probability(p: float) -> float:
    """`p`, if it can be the probability of dropout."""
    if not 0 <= p < 1:
        raise ValueError(f"dropout is a probability from 0 up to but not including 1; got {p}.")
    return p
