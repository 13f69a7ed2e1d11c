"""Vectors that kernels are tried on: lengths around warps, vectors of 16 bytes and blocks."""

from __future__ import annotations

import numpy as np

import harness

#: Lengths around a 16-byte access, a warp, a block's threads and a block's tile.
LENGTHS = [1, 3, 4, 5, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 4095, 4096, 4097]
if harness.sanitizing():
    # Which makes each several times as long.
    LENGTHS = [1, 5, 33, 257, 1025, 4097]
KINDS = ["gaussian", "constant", "zeros", "ties", "special", "tiny"]


def make(kind: str, length: int, dtype: type = np.float32, seed: int = 0) -> np.ndarray:
    """A vector of one of the ``KINDS``."""
    rng = np.random.default_rng([seed, length])
    values = rng.standard_normal(length)
    if kind == "constant":
        values[:] = -1.5
    elif kind == "zeros":
        values[rng.random(length) < 0.999] = 0.0
    elif kind == "ties":
        values = rng.integers(-3, 4, length) * 0.25
    elif kind == "special":
        odd = rng.random(length)
        values[odd < 0.02] = np.nan
        values[(odd >= 0.02) & (odd < 0.04)] = np.inf
        values[(odd >= 0.04) & (odd < 0.06)] = -np.inf
        values[(odd >= 0.06) & (odd < 0.1)] = -0.0
    elif kind == "tiny":
        # Down to where numbers are subnormal.
        values *= np.finfo(dtype).tiny * 2.0 ** rng.integers(-12, 4, length)
    with np.errstate(over="ignore", under="ignore"):
        return values.astype(dtype)
