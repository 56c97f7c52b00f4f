"""Tokens laid out as parallel streams, so that the state carries over from one window of time to the next."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b

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

    `varied`, a seed, makes windows of unequal length, others in each epoch: each cut between two windows is moved by a
    quarter of a window, forwards, backwards or not at all, and all of them by up to an eighth. So a cut may fall almost
    anywhere, but few lengths occur, since what is kept for a length, such as a CUDA graph, is to be of use again. There
    are as many windows as before, and still each token is in one of them.

    >>> streams = Streams(torch.arange(11), count=3, window=2)
    >>> streams[1].tokens.tolist(), streams[1].lengths
    ([[2, 6, 10], [3, 7, 0]], tensor([2, 2, 1]))
    """

    ids: Tensor  # [n] int64, or smaller integers as in a token file
    count: int
    window: int
    rank: int = 0
    world: int = 1
    varied: int | None = None
    epoch: int = 0

    def __post_init__(self) -> None:
        if self.ids.dim() != 1 or self.ids.dtype not in WHOLE or not len(self.ids):
            kinds = f"{', '.join(map(str, WHOLE[:-1]))} or {WHOLE[-1]}"
            got = f"{tuple(self.ids.shape)} of {self.ids.dtype}"
            raise ValueError(f"Streams needs ids [n] of {kinds}, n at least 1; got {got}.")
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

    def in_epoch(self, epoch: int) -> "Streams":
        """The same tokens, cut as in that epoch."""
        return self if epoch == self.epoch else replace(self, epoch=epoch)

    def __len__(self) -> int:
        return -(-(len(self.ids) // self.count) // self.window)

    def __iter__(self) -> Iterator[Window]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> Window:
        first, end = self._rows(i)
        least, longer = divmod(len(self.ids), self.count)  # the first `longer` streams have one token more
        b = torch.arange(self.count, device=self.ids.device).view(self.world, -1)[self.rank]
        t = torch.arange(first, end, device=self.ids.device)[:, None]
        ends = least + (b < longer)
        tokens = self.ids[(b * least + b.clamp(max=longer) + t).clamp(max=len(self.ids) - 1)].long() * (t < ends)
        return Window(tokens, ends - first if longer and i == len(self) - 1 else None)

    def tokens_in(self, i: int) -> int:
        """How many tokens window `i` has over the streams of all processes."""
        first, end = self._rows(i)
        return min(self.count * end, len(self.ids)) - self.count * first

    def tokens_to(self, step: int) -> int:
        """How many tokens all windows up to a step have that is counted on from epoch to epoch."""
        epoch, i = divmod(step, len(self))
        return epoch * len(self.ids) + self.count * self.in_epoch(epoch)._cut(i)

    def _rows(self, i: int) -> tuple[int, int]:
        """Where window `i` begins, and where it ends."""
        if not 0 <= i < len(self):
            raise IndexError(f"windows run from 0 to {len(self) - 1}; got {i}.")
        return self._cut(i), self._cut(i + 1)

    def _cut(self, i: int) -> int:
        """The first row of window `i`; it depends on nothing but the seed, the epoch and `i`."""
        if i == len(self):
            return -(-len(self.ids) // self.count)  # with the ragged row
        if self.varied is None or i == 0:
            return i * self.window
        moved = i * self.window + self._drawn(0, self.window // 8) + self.window // 4 * self._drawn(i, 1)
        return min(moved, len(self.ids) // self.count - 1)  # of a short last window, a row is left

    def _drawn(self, i: int, most: int) -> int:
        """A whole number from -`most` to `most` for cut `i` of this epoch."""
        digest = blake2b(f"{self.varied} {self.epoch} {i}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % (2 * most + 1) - most
