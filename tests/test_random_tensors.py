"""Random programs whose values are heads, matrices and memories, compiled and compared with the definition."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_engines import ENGINES, EXACT, errors
from test_random_steps import gradients_of
from test_random_steps import quick_compilation as quick_compilation
from torch import Tensor, nn

import loopfold as lf
from loopfold.states import leaves

HEADS, PLACES, MOST = 2, 3, 150  # MOST: numbers of a value


def _axis(a: Tensor, j: int) -> int:
    return 1 + j % (a.dim() - 1)


def _rows(a: Tensor) -> Tensor:
    """[batch, k], with few features."""
    return a.flatten(1)[:, :7]


def _in_place(a: Tensor, j: int) -> Tensor:
    new = a + 0.2
    new *= 0.5
    new.select(_axis(a, j), 0).add_(0.1)
    return new


UNARY: dict[str, Callable[[Tensor, int], Tensor]] = {
    "tanh": lambda a, j: torch.tanh(a),
    "softplus": lambda a, j: F.softplus(a),
    "sum": lambda a, j: a.sum(_axis(a, j), keepdim=j % 2 == 0),
    "mean": lambda a, j: a.mean(_axis(a, j)),
    "greatest": lambda a, j: a.amax(_axis(a, j), keepdim=True),
    "softmax": lambda a, j: a.softmax(_axis(a, j)),
    "logsumexp": lambda a, j: a.logsumexp(_axis(a, j)),
    "so far": lambda a, j: a.cumsum(_axis(a, j)),
    "norm": lambda a, j: a / (1 + a.norm(dim=_axis(a, j), keepdim=True)),
    "spread": lambda a, j: a.var(_axis(a, j), keepdim=True, correction=0) + a,
    "whole": lambda a, j: a.sum(tuple(range(1, a.dim())), keepdim=True) * 0.2,
    "turned": lambda a, j: a.transpose(1, -1),
    "flipped": lambda a, j: a.flip(_axis(a, j)),
    "rolled": lambda a, j: a.roll(1, _axis(a, j)),
    "part": lambda a, j: a.narrow(_axis(a, j), 0, (1 + a.shape[_axis(a, j)]) // 2),
    "every second": lambda a, j: a[:, ::2],
    "one": lambda a, j: a.select(_axis(a, j), -1),
    "another axis": lambda a, j: a.unsqueeze(_axis(a, j)),
    "flat": lambda a, j: a.flatten(1),
    "stacked": lambda a, j: torch.stack([a, torch.tanh(2 * a)], _axis(a, j)),
    "parts": lambda a, j: torch.cat(a.chunk(2, _axis(a, j))[::-1], _axis(a, j)),
    "padded": lambda a, j: F.pad(a, (1, 0)),
    "triangle": lambda a, j: torch.tril(a) if a.dim() > 2 else a,
    "updated": _in_place,
    "noise": lambda a, j: a + 0.1 * torch.randn(a.shape, dtype=a.dtype),
    "dropout": lambda a, j: F.dropout(a.contiguous(), 0.3),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "outer": lambda a, b: _rows(a).unsqueeze(2) * _rows(b).unsqueeze(1),
    "outer by einsum": lambda a, b: torch.einsum("bi,bj->bij", _rows(a), _rows(b)),
    "inner": lambda a, b: (_rows(a)[:, None, :1] @ _rows(b)[:, :1, None]).flatten(1),
    "matrix by row": lambda a, b: torch.einsum("bij,bj->bi", _square(a), _rows(b).repeat(1, 3)[:, :3]),
    "matrix by matrix": lambda a, b: _square(a) @ _square(b).mT,
    "by the first": lambda a, b: a * b.flatten(1)[:, 0].view(-1, *[1] * (a.dim() - 1)),
    "laid over": lambda a, b: (
        a
        + b.flatten(1)[:, : a.shape[-1]]
        .repeat(1, a.shape[-1])[:, : a.shape[-1]]
        .view(-1, *[1] * (a.dim() - 2), a.shape[-1])
    ),
    "where": lambda a, b: torch.where(a > 0.1, a, b.flatten(1)[:, :1].view(-1, *[1] * (a.dim() - 1))),
}


def _square(a: Tensor) -> Tensor:
    """[batch, 3, 3]"""
    return a.flatten(1).repeat(1, 9)[:, :9].view(-1, 3, 3)


class RandomTensors(lf.Transition):
    """A state of a row and a matrix for each head, a context of places, and an output beside the state."""

    def __init__(self, program: list[tuple[str, int, int]], d: int) -> None:
        super().__init__()
        self.program, self.d = tuple(program), d
        self.blocks = nn.Parameter(torch.randn(HEADS, d, d) / d**0.5)
        self.shared = nn.Linear(d, d)
        self.scale = nn.Parameter(torch.randn(HEADS, 1, d))

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor]:
        ramp = torch.linspace(-0.5, 0.4, HEADS * self.d * self.d).to(self.scale)
        S = ramp.view(HEADS, self.d, self.d).repeat(batch, 1, 1, 1)
        return S[:, :, 0].flatten(1), S

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor, context: tuple[Tensor, Tensor]) -> Any:
        h, S = state
        memory, mask = context
        values = [h, S, x, h.view(-1, HEADS, self.d)]
        for op, i, j in self.program:
            a, b = values[i % len(values)], values[j % len(values)]
            if op == "heads":
                new = torch.einsum("bhi,hij->bhj", _fit(a, (HEADS, self.d)), self.blocks)
            elif op == "linear":
                new = self.shared(_fit(a, (HEADS, self.d)))
            elif op == "scaled":
                new = _fit(a, (HEADS, self.d, self.d)) * self.scale
            elif op == "attention":
                alike = torch.einsum("bpd,bd->bp", memory, _fit(a, (self.d,))).masked_fill(~mask, -torch.inf)
                new = torch.einsum("bp,bpd->bd", alike.softmax(-1), memory)
            elif op == "memory":
                new = torch.tanh(memory * _fit(a, (1, self.d)))
            else:
                new = UNARY[op](a, j) if op in UNARY else BINARY[op](a, b)
            new = new if new.dim() > 1 else new.unsqueeze(1)
            values.append(torch.tanh(new if new[0].numel() <= MOST else new.flatten(1)[:, :MOST]))
        last = values[-1]
        S = torch.tanh(0.7 * S + _fit(last, (HEADS, self.d, self.d)))
        return (last, torch.tanh(values[-2])), (torch.tanh(0.5 * h + _fit(values[-2], h.shape[1:])), S)


def _fit(a: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The numbers of a value, cut off or repeated, in another shape."""
    size = torch.Size(shape).numel()
    flat = a.flatten(1)
    return flat.repeat(1, -(-size // flat.shape[1]))[:, :size].view(-1, *shape)


WITH_WEIGHTS = ("heads", "linear", "scaled", "attention", "memory")
OPERATIONS = [*WITH_WEIGHTS, *UNARY, *BINARY]


def run(
    cell: RandomTensors, x: Tensor, memory: Tensor, engine: lf.Engine, lengths: list[int] | None, parts: int
) -> Any:
    """States, outputs, and the gradients of a loss on some of them: those whose bit is set in `parts`."""
    torch.manual_seed(7)
    cell.zero_grad()
    x, memory = (t.clone().requires_grad_() for t in (x, memory))
    start = tuple(leaf.clone().requires_grad_() for leaf in cell.initial_state(x.shape[1]))
    mask = torch.arange(PLACES) < 1 + torch.arange(x.shape[1])[:, None] % PLACES
    found = lf.unfold(cell, x, start, lengths, engine, context=(memory, mask))
    results = [*leaves(found.outputs), *leaves(found.states)]
    sources = {"x": x, "memory": memory, "h": start[0], "S": start[1], **dict(cell.named_parameters())}
    values = {f"result {i}": leaf.detach() for i, leaf in enumerate(results)}
    return values | gradients_of(results, parts, sources)


@pytest.mark.parametrize("seed", range(150))
def test_random_tensors_agree(quick_compilation: Any, seed: int) -> None:
    choose = random.Random(seed)
    torch.manual_seed(seed)
    program = [(choose.choice(OPERATIONS), choose.randrange(50), choose.randrange(50)) for _ in range(1 + seed % 7)]
    d, tau, batch, parts = choose.choice([1, 3, 4]), choose.choice([1, 2, 5]), choose.randrange(1, 6), 1 + seed % 15
    cell = RandomTensors(program, d).double()
    x, memory = torch.randn(tau, batch, d + 1).double(), torch.randn(batch, PLACES, d).double()
    lengths = [1 + i % tau for i in range(batch)] if choose.random() < 0.5 else None
    truth = run(cell, x, memory, lf.Sequential(), lengths, parts)
    for engine in ENGINES:
        found = errors(run(cell, x, memory, engine, lengths, parts), truth)
        assert {k: error for k, error in found.items() if not error <= EXACT} == {}, type(engine).__name__
