"""Arithmetic of single elements, in plain Python that Numba compiles for the CPU and for CUDA.

One source, so that both give the same bits. Arguments and results are NumPy scalars of stated
widths; nothing here knows of arrays, threads or blocks.

The generator is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"):
a function of a 64-bit key and a 128-bit counter, so any thread can have the number of any element.
An operation's ``key`` is two 64-bit words: the first is Philox's key, the second the upper half of
its counters. Element i of a vector gets word ``i // 64 % 4`` of counter ``i // 256 * 64 + i % 64``:
64 neighbours have 64 neighbouring counters, which suits vector registers and a GPU's warps alike.
"""

from __future__ import annotations

import numpy as np

#: Elements that share the word of a counter's block, and those that one group of counters serves.
LANES, GROUP = 64, 256
ROUNDS = 10
#: What the two halves of the key grow by in each round.
WEYL_0, WEYL_1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
#: Bits of the fraction of a code before it is rounded, and of a random number.
FRACTION = 23


def philox_round(c0, c1, c2, c3, k0, k1):
    """One round on the four 32-bit words of a counter, with the round's two words of the key."""
    first = np.uint64(0xD2511F53) * np.uint64(c0)
    second = np.uint64(0xCD9E8D57) * np.uint64(c2)
    return (
        np.uint32(second >> np.uint64(32)) ^ c1 ^ k0,
        np.uint32(second),
        np.uint32(first >> np.uint64(32)) ^ c3 ^ k1,
        np.uint32(first),
    )


def code_of(scaled, zero, noise):
    """Code 0..2s of a number in -s * 2**23..s * 2**23: ``(trunc(scaled) + noise + zero) >> 23``.

    Args:
        scaled: fp32 or fp64.
        zero: ``s * 2**23``, int32.
        noise: int32 below 2**23; ``2**22`` rounds to nearest.
    """
    code = (np.int32(scaled) + noise + zero) >> np.int32(23)
    # Only for what is larger than its scale, or NaN: a corrupt scale must not make corrupt codes.
    return min(max(code, np.int32(0)), zero >> np.int32(22))


def natural_code(pattern, noise):
    """Sign and rounded power of two of an fp32 pattern (int32), as eight bits.

    The mantissa carries into the exponent as often as the value lies above the lower power.
    """
    magnitude = (pattern & np.int32(0x7FFF_FFFF)) + noise
    return ((magnitude >> np.int32(23)) & np.int32(0x7F)) | (
        (pattern >> np.int32(24)) & np.int32(0x80)
    )


def with_code(word, code, place, bits):
    """``word`` (uint64, 0 at first) with the ``place``-th of eight codes of ``bits`` bits."""
    return word | (np.uint64(code) << np.uint64(place * bits))


def byte_of(word, place):
    """The ``place``-th byte of a packed word."""
    return np.uint8((word >> np.uint64(8 * place)) & np.uint64(255))
