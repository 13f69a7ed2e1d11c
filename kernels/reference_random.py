"""Random numbers of the reference backend: Philox as its paper gives it, in Python's own integers.

Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". Two widths are in use: four words
of 32 bits for rounding (:mod:`.scalar`), four of 64 bits, in NumPy's order, for what ranks draw in
common.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

_MULTIPLIERS = {32: (0xD2511F53, 0xCD9E8D57), 64: (0xD2E7470EE14C6C93, 0xCA5A826395121157)}
_WEYL = {32: (0x9E3779B9, 0xBB67AE85), 64: (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)}


def philox(counter: list[Any], key: tuple[int, int], width: int) -> list[Any]:
    """Ten rounds on four words of ``width`` bits.

    Args:
        counter: four words, lowest first: Python integers, or (for 32 bits) uint64 arrays of them.
        key: two words.
        width: 32 or 64.

    Returns:
        Four words of the counter's kind.
    """
    mask = (1 << width) - 1
    (m0, m1), (w0, w1), (k0, k1) = _MULTIPLIERS[width], _WEYL[width], key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        first, second = c0 * m0, c2 * m1
        c0, c2 = (second >> width) ^ c1 ^ k0, (first >> width) ^ c3 ^ k1
        c1, c3 = second & mask, first & mask
        k0, k1 = (k0 + w0) & mask, (k1 + w1) & mask
    return [c0, c1, c2, c3]


def noise(key: tuple[int, int], numel: int) -> np.ndarray:
    """The 23-bit integers of elements 0 and on, int64.

    Element i has word ``i // 64 % 4`` of counter ``i // 256 * 64 + i % 64``.
    """
    element = np.arange(numel, dtype=np.uint64)
    counter = element // 256 * 64 + element % 64
    upper = np.full(numel, key[1] & 0xFFFF_FFFF, np.uint64), np.full(numel, key[1] >> 32, np.uint64)
    words = philox(
        [counter & 0xFFFF_FFFF, counter >> 32, *upper], (key[0] & 0xFFFF_FFFF, key[0] >> 32), 32
    )
    chosen = np.choose((element // 64 % 4).astype(np.int64), words)
    return (chosen & 0x7F_FFFF).astype(np.int64)


def words_64(key: tuple[int, int]) -> Iterator[int]:
    """NumPy's Philox: a 128-bit key, and a counter that is raised before it is first used."""
    counter = 0
    while True:
        counter += 1
        mask = (1 << 64) - 1
        yield from philox([counter >> 64 * i & mask for i in range(4)], key, 64)


class Draws:
    """Whole numbers below a bound, as NumPy's ``Generator`` gets them from :func:`words_64`.

    Half a word at a time, the lower half first; Lemire's method (2019, "Fast random integer
    generation in an interval"), which draws again where a product would favour some numbers.
    """

    def __init__(self, key: tuple[int, int]) -> None:
        self._words = words_64(key)
        self._halves: list[int] = []

    def _half(self) -> int:
        if not self._halves:
            word = next(self._words)
            self._halves = [word >> 32, word & 0xFFFF_FFFF]
        return self._halves.pop()

    def up_to(self, greatest: int) -> int:
        """0 to ``greatest``, which is below 2**32 - 1."""
        if greatest == 0:
            return 0
        bound = greatest + 1
        product = self._half() * bound
        while product & 0xFFFF_FFFF < (1 << 32) % bound:
            product = self._half() * bound
        return product >> 32


def choose(key: tuple[int, int], numel: int, k: int) -> np.ndarray:
    """``k`` of ``numel`` positions, ascending, as NumPy's ``choice`` draws them.

    Of many, few: Floyd's method. Otherwise the end of a vector is shuffled.
    """
    draws = Draws(key)
    if numel > 10_000 and k > numel // 20:
        order = list(range(numel))
        for i in range(numel - 1, max(numel - k, 1) - 1, -1):
            j = draws.up_to(i)
            order[i], order[j] = order[j], order[i]
        return np.array(sorted(order[numel - k :]), np.int64)
    chosen: set[int] = set()
    for j in range(numel - k, numel):
        drawn = draws.up_to(j)
        chosen.add(j if drawn in chosen else drawn)
    return np.array(sorted(chosen), np.int64)
