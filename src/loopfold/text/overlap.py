"""How much of one text is in another, word for word: figures on text that was trained on say nothing about new text."""

from collections.abc import Iterator

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from loopfold.text.long import Text, utf8_of

BLOCK = 100  # characters: as much comes twice in a text only where it was copied
_PIECE = 1 << 20  # characters at a time
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_BITS = 24
_BYTES = 104  # of a block in a long text
_ONE_IN = 64  # places


def share_in(text: Text, other: Text) -> float:
    """The share of `text`, in blocks of 100 characters, that stands somewhere in `other`; 0 for less than a block.

    Where one of them is long, this is an estimate, from blocks of 104 bytes at one place in 64; the eight bytes at a
    place decide whether it is taken, so that whatever stands in both is taken in both or in neither.

    >>> rhyme = "".join(f"{n} green bottles hanging on the wall, " for n in range(100))
    >>> share_in(rhyme[1200:1600], "to begin with: " + rhyme), share_in(rhyme, rhyme[::-1])
    (1.0, 0.0)
    """
    own, others = _sampled(text), _sampled(other)
    if isinstance(text, str) and isinstance(other, str):
        step = _PIECE // BLOCK * BLOCK
        own = (_hashes(text[i : i + step])[::BLOCK] for i in range(0, len(text) // BLOCK * BLOCK, step))
        others = (_hashes(other[i : i + _PIECE + BLOCK - 1]) for i in range(0, len(other), _PIECE))
    blocks = np.concatenate([np.empty(0, np.uint64), *own])
    if not len(blocks):
        return 0.0
    wanted = np.unique(blocks)
    maybe = np.zeros(1 << _BITS, dtype=bool)  # most of `other` is ruled out by a look at this
    maybe[wanted >> np.uint64(64 - _BITS)] = True
    found = np.zeros(len(wanted), dtype=bool)
    for hashes in others:
        hashes = hashes[maybe[hashes >> np.uint64(64 - _BITS)]]
        places = np.searchsorted(wanted, hashes).clip(max=len(wanted) - 1)
        found[places[wanted[places] == hashes]] = True
    return float(found[np.searchsorted(wanted, blocks)].mean())


def _sampled(text: Text) -> Iterator[NDArray[np.uint64]]:
    """A number for each of the blocks of a text that are taken."""
    before = b""
    for piece in utf8_of(text):
        data = before + piece
        before = data[-(_BYTES - 1) :]
        if len(data) < _BYTES:
            continue
        places = []
        for k in range(8):
            eight = np.frombuffer(data, "<u8", count=(len(data) - _BYTES - k) // 8 + 1, offset=k)
            places.append(8 * np.flatnonzero(eight * np.uint64(_BASE) < np.uint64(2**64 // _ONE_IN)) + k)
        blocks = sliding_window_view(np.frombuffer(data, np.uint8), _BYTES)[np.concatenate(places)]
        hashes = np.zeros(len(blocks), np.uint64)
        for eight in blocks.view("<u8").T:
            hashes = _mixed(hashes ^ eight)
        yield hashes


def _hashes(text: str) -> NDArray[np.uint64]:
    """A number for the block that begins at each place: Σ r(c(i+k)) Bᵏ modulo 2^64, and its bits mixed.

    With the sums S(i) = Σ r(c(j)) B^j over j < i, that is (S(i + 100) - S(i)) B^-i.
    """
    codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4").astype(np.uint64)
    if len(codes) < BLOCK:
        return np.empty(0, dtype=np.uint64)
    powers, inverses = _powers(_BASE, len(codes)), _powers(pow(_BASE, -1, 1 << 64), len(codes))
    sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(_mixed(codes) * powers, dtype=np.uint64)])
    return _mixed((sums[BLOCK:] - sums[:-BLOCK]) * inverses[: len(codes) - BLOCK + 1])


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    """1, B, B², … modulo 2^64."""
    factors = np.full(count, base, dtype=np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Numbers that look random, one for each; the low bits of a sum modulo 2^64 depend on too little."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))
