"""Random numbers of :mod:`..scalar`, a group of counters at a time."""

from __future__ import annotations

import numpy as np

from .. import scalar
from .jit import Kernel, inline

_GROUP, _LANES, _ROUNDS = scalar.GROUP, scalar.LANES, scalar.ROUNDS
_WEYL_0, _WEYL_1 = scalar.WEYL_0, scalar.WEYL_1
_round = inline(scalar.philox_round)


@inline
def random_words(key, begin, out):
    """32-bit numbers of elements ``begin`` and on; both ``begin`` and the length in groups.

    ``key`` is uint32: both halves of the key, and the upper half of the counters.
    """
    for group in range(out.size // _GROUP):
        words = out[group * _GROUP : (group + 1) * _GROUP]
        base = np.uint64((begin // _GROUP + group) * _LANES)
        for lane in range(_LANES):
            counter = base + np.uint64(lane)
            words[lane] = np.uint32(counter)
            words[_LANES + lane] = np.uint32(counter >> np.uint64(32))
            words[2 * _LANES + lane] = key[2]
            words[3 * _LANES + lane] = key[3]
        k0, k1 = key[0], key[1]
        # Rounds outside, lanes inside: the inner loop runs in vector registers.
        for _ in range(_ROUNDS):
            for lane in range(_LANES):
                c0, c1, c2, c3 = _round(
                    words[lane], words[_LANES + lane], words[2 * _LANES + lane],
                    words[3 * _LANES + lane], k0, k1,
                )  # fmt: skip
                words[lane] = c0
                words[_LANES + lane] = c1
                words[2 * _LANES + lane] = c2
                words[3 * _LANES + lane] = c3
            k0 = np.uint32(k0 + _WEYL_0)
            k1 = np.uint32(k1 + _WEYL_1)


@inline
def noise_between(key, begin, end, words):
    """Where in ``words`` the noise (23 bits) of elements ``begin`` to ``end`` starts.

    ``words`` has room for the groups that they touch.
    """
    first = begin // _GROUP * _GROUP
    count = (end - first + _GROUP - 1) // _GROUP * _GROUP
    random_words(key, first, words[:count])
    for i in range(count):
        words[i] &= np.uint32(0x7F_FFFF)
    return begin - first


@Kernel
def fill(key, out):
    """Numbers of elements 0 and on; ``out`` in whole groups."""
    random_words(key, 0, out)


def key_words(key: tuple[int, int]) -> np.ndarray:
    """An operation's two 64-bit words as four of 32 bits."""
    return np.array([key[0], key[1]], dtype=np.uint64).view(np.uint32)
