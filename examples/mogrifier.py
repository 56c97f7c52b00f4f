"""Two cells that are good at words, as a user writes them.

loopfold train text.txt --preset words --cell examples/mogrifier.py:Mogrifier
"""

import torch
from torch import Tensor, nn

import loopfold as lf


class CappedLSTM(lf.LSTM):
    """An LSTM whose input gate lets in no more than the forget gate has let go (Melis, Dyer and Blunsom, 2018)."""

    def forward(self, state: lf.LSTMState, x: Tensor) -> lf.LSTMState:
        h, c = state
        i, f, g, o = (self.b + h @ self.W.T + x @ self.U.T).chunk(4, -1)
        f = torch.sigmoid(f)
        i = torch.minimum(torch.sigmoid(i), 1 - f)
        c = f * c + i * torch.tanh(g)
        return lf.LSTMState(torch.sigmoid(o) * torch.tanh(c), c)


class Mogrifier(CappedLSTM):
    """Before each step, x and h scale each other by turns, five times (Melis, Kočiský and Blunsom, 2020)."""

    def __init__(self, input_size: int, hidden_size: int, rounds: int = 5) -> None:
        super().__init__(input_size, hidden_size)
        shapes = [(input_size, hidden_size), (hidden_size, input_size)]
        self.gates = nn.ParameterList(nn.init.normal_(torch.empty(shapes[k % 2]), std=0.01) for k in range(rounds))

    def forward(self, state: lf.LSTMState, x: Tensor) -> lf.LSTMState:
        h, c = state
        for k, gate in enumerate(self.gates):
            if k % 2 == 0:
                x = 2 * torch.sigmoid(h @ gate.T) * x
            else:
                h = 2 * torch.sigmoid(x @ gate.T) * h
        return super().forward(lf.LSTMState(h, c), x)
