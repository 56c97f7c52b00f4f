"""A cell of one's own, for benchmarks."""

import torch
from torch import Tensor, nn

import loopfold as lf


class Tide(lf.Transition):
    """A cell that nobody has a kernel for: input and state decide how much of the state stays."""

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.U, self.W, self.b = (nn.Parameter(torch.randn(s) / n**0.5) for s in ((2 * n, n_in), (n, n), (2 * n,)))
        self.p = nn.Parameter(torch.randn(n) / n**0.5)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        keep, new = (x @ self.U.T + self.b).chunk(2, -1)
        keep = torch.sigmoid(keep + self.p * h)
        return keep * h + (1 - keep) * torch.tanh(new + h @ self.W.T)
