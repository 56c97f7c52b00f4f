"""Options that make recurrent networks good at words: windows that vary, averages, schedules, precision, sizes."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from loopfold.text.streams import Streams

# ------------------------------------------------------------------ windows of varying length


@given(
    n=st.integers(1, 300),
    count=st.integers(1, 12),
    window=st.integers(1, 30),
    seed=st.integers(0, 1 << 63),
    epoch=st.integers(0, 3),
)
def test_varied_windows_hold_every_token_once_and_in_order(
    n: int, count: int, window: int, seed: int, epoch: int
) -> None:
    ids, whole = torch.arange(1, n + 1), Streams(torch.arange(1, n + 1), count, window)
    streams = Streams(ids, count, window, varied=seed).in_epoch(epoch)
    assert len(streams) == len(whole)
    read: list[list[int]] = [[] for _ in range(streams.count)]
    for i, part in enumerate(streams):
        tau = len(part.tokens)
        last = i == len(streams) - 1
        assert (1 if last else window - 2 * (window // 4)) <= tau <= window + 2 * (window // 4) + last
        assert last or tau * 2 >= window
        lengths = [tau] * streams.count if part.lengths is None else part.lengths.tolist()
        assert min(lengths) >= 1
        step = epoch * len(streams) + i
        assert streams.tokens_in(i) == sum(lengths) == streams.tokens_to(step + 1) - streams.tokens_to(step)
        for b, length in enumerate(lengths):
            read[b] += part.tokens[:length, b].tolist()
    assert sum(read, []) == ids.tolist()
    assert streams.tokens_to(epoch * len(streams)) == epoch * n


def test_windows_vary_with_seed_and_epoch_alone_and_take_every_length() -> None:
    def lengths(seed: int, epoch: int) -> list[int]:
        return [len(part.tokens) for part in Streams(torch.arange(10_000), 2, 20, varied=seed).in_epoch(epoch)]

    assert lengths(0, 0) == lengths(0, 0)
    assert lengths(0, 0) != lengths(0, 1) != lengths(1, 1)
    assert {*lengths(0, 0)[1:-1]} >= {*range(11, 30)}
    assert sum(lengths(0, 0)) == 5000
