"""How much of one text is in another, word for word: figures on text that was trained on say nothing about new text."""

import numpy as np
from numpy.typing import NDArray

BLOCK = 100  # characters: as much comes twice in a text only where it was copied
_PIECE = 1 << 20  # characters at a time
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_BITS = 24


def share_in(text: str, other: str) -> float:
    """The share of `text`, in blocks of 100 characters, that stands somewhere in `other`; 0 for less than a block.

    >>> rhyme = "".join(f"{n} green bottles hanging on the wall, " for n in range(100))
    >>> share_in(rhyme[1200:1600], "to begin with: " + rhyme), share_in(rhyme, rhyme[::-1])
    (1.0, 0.0)
    """
    count = len(text) // BLOCK
    if not count or len(other) < BLOCK:
        return 0.0
    blocks = np.concatenate(
        [
            _hashes(text[i : i + _PIECE // BLOCK * BLOCK])[::BLOCK]
            for i in range(0, count * BLOCK, _PIECE // BLOCK * BLOCK)
        ]
    )
    wanted = np.unique(blocks)
    maybe = np.zeros(1 << _BITS, dtype=bool)  # most of `other` is ruled out by a look at this
    maybe[wanted >> np.uint64(64 - _BITS)] = True
    found = np.zeros(len(wanted), dtype=bool)
    for start in range(0, len(other), _PIECE):
        hashes = _hashes(other[start : start + _PIECE + BLOCK - 1])
        hashes = hashes[maybe[hashes >> np.uint64(64 - _BITS)]]
        places = np.searchsorted(wanted, hashes).clip(max=len(wanted) - 1)
        found[places[wanted[places] == hashes]] = True
    return float(found[np.searchsorted(wanted, blocks)].mean())


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
