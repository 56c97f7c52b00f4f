"""Tokens laid out as parallel streams, so that the state carries over from one window of time to the next."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loopfold.states import whole_number

WHOLE = (torch.int64, torch.int32, torch.uint16, torch.uint8)


@dataclass(frozen=True, eq=False)
class Window:
    """The tokens of all streams over some steps; `lengths` says how many each has, None where all have τ."""

    tokens: Tensor  # [τ, B] int64, padded with 0
    lengths: Tensor | None  # [B] int64


@dataclass(frozen=True, eq=False)
class Streams:
    """Tokens as `count` streams side by side, read in windows of `window` steps; each token is in one window, once.

    The eleven tokens a…k in three streams, windows of two. Time goes down, and the longer streams come first:

                      0  1  2   stream
        streams[0]    a  e  i
                      b  f  j
                      ↓  ↓  ↓   the state carries over, stream by stream
        streams[1]    c  g  k
                      d  h  ·   the ragged end: lengths are 2, 2, 1

    The ragged row is never a window by itself, since a window without tokens would have no loss: with windows of three
    steps, streams[0] would be the only one and have all four rows. Fewer tokens than streams make `count` smaller.

    >>> streams = Streams(torch.arange(11), count=3, window=2)
    >>> streams[1].tokens.tolist(), streams[1].lengths
    ([[2, 6, 10], [3, 7, 0]], tensor([2, 2, 1]))
    """

    ids: Tensor  # [n] int64, or smaller integers as in a token file
    count: int
    window: int
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if self.ids.dim() != 1 or self.ids.dtype not in WHOLE or not len(self.ids):
            raise ValueError(
                f"Streams needs ids [n] of torch.int64, n at least 1; got {tuple(self.ids.shape)} of {self.ids.dtype}."
            )
        whole_number("Streams", "window", self.window)
        object.__setattr__(self, "count", min(whole_number("Streams", "count", self.count), len(self.ids)))
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank must be from 0 to {self.world - 1} with {self.world} processes; got {self.rank}.")
        if self.count % self.world:
            raise ValueError(
                f"{self.count} streams of {len(self.ids)} tokens cannot be shared evenly by {self.world} processes: "
                f"choose a count that {self.world} divides, or take more text."
            )

    def part(self, rank: int, world: int) -> "Streams":
        """The share of process `rank` out of `world`: the same windows, with `count / world` of the streams in them."""
        return replace(self, rank=self.rank * world + rank, world=self.world * world)

    def __len__(self) -> int:
        return -(-(len(self.ids) // self.count) // self.window)

    def __iter__(self) -> Iterator[Window]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> Window:
        first = self._first_row(i)
        least, longer = divmod(len(self.ids), self.count)  # the first `longer` streams have one token more
        rows = self.window if i < len(self) - 1 else least + (longer > 0) - first
        b = torch.arange(self.count, device=self.ids.device).view(self.world, -1)[self.rank]
        t = torch.arange(first, first + rows, device=self.ids.device)[:, None]
        ends = least + (b < longer)
        tokens = self.ids[(b * least + b.clamp(max=longer) + t).clamp(max=len(self.ids) - 1)].long() * (t < ends)
        return Window(tokens, ends - first if longer and i == len(self) - 1 else None)

    def tokens_in(self, i: int) -> int:
        """How many tokens window `i` has over the streams of all processes."""
        first = self._first_row(i)
        return self.count * self.window if i < len(self) - 1 else len(self.ids) - self.count * first

    def tokens_to(self, step: int) -> int:
        """How many tokens all windows up to a step have that is counted on from epoch to epoch."""
        epochs, i = divmod(step, len(self))
        return epochs * len(self.ids) + i * self.count * self.window

    def _first_row(self, i: int) -> int:
        if not 0 <= i < len(self):
            raise IndexError(f"windows run from 0 to {len(self) - 1}; got {i}.")
        return i * self.window
