"""``scatter.cu`` on the CPU: the same bits as adding one payload after another."""

from __future__ import annotations

import numpy as np
import pytest

import on_cpu
import tables
import vectors

STRETCH = tables.SCATTER_STRETCH
LENGTHS = [1, 31, 257, STRETCH - 1, STRETCH, STRETCH + 1, 3 * STRETCH + 11]


def payload(length: int, share: float, kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Ascending positions, with both ends of the vector and of a block's stretch, and values."""
    rng = np.random.default_rng([seed, length])
    taken = rng.random(length) < share
    if share:
        taken[[0, -1]] = True
        taken[STRETCH - 1 : STRETCH + 1] = True
    index = np.flatnonzero(taken).astype(np.int64)
    value = vectors.make("gaussian", len(index), seed=seed)
    if kind == "float64":
        value = value.astype(np.float64)
    elif kind == "float16":
        value = value.astype(np.float16)
    elif kind == "bfloat16":
        value = (value.view(np.uint32) >> 16).astype(np.uint16)
    return on_cpu.placed(index), on_cpu.placed(value)


def wide(value: np.ndarray, kind: str) -> np.ndarray:
    if kind == "bfloat16":
        return (value.astype(np.uint32) << 16).view(np.float32)
    return value.astype(np.float64 if kind == "float64" else np.float32)


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "float64"])
def test_ranks_in_order(kind: str) -> None:
    """Sparse, empty and full payloads, of up to five ranks, for vectors of all lengths at once."""
    dtype = np.float64 if kind == "float64" else np.float32
    outs = [on_cpu.placed(vectors.make("gaussian", n, dtype)) for n in LENGTHS]
    payloads = [
        [payload(n, share, kind, rank) for rank, share in enumerate([0.1, 0.0, 1.0, 0.01, 0.3])]
        for n in LENGTHS
    ]
    expected = [out.copy() for out in outs]
    alpha = 0.7
    for out, ranks in zip(expected, payloads, strict=True):
        for index, value in ranks:
            out[index] += wide(value, kind) * dtype(alpha)
    on_cpu.scatter_add(kind, outs, payloads, alpha)
    raw = np.uint64 if kind == "float64" else np.uint32
    for out, values in zip(outs, expected, strict=True):
        assert np.array_equal(out.view(raw), values.view(raw))


def test_the_order_of_ranks_shows() -> None:
    """The test above would not see another order if sums came out alike."""
    out = on_cpu.placed(np.zeros(1, dtype=np.float32))
    index = on_cpu.placed(np.zeros(1, dtype=np.int64))
    numbers = [np.float32(1e8), np.float32(-1e8), np.float32(1)]
    ranks = [(index, on_cpu.placed(np.array([number]))) for number in numbers]
    on_cpu.scatter_add("float32", [out], [ranks], 1.0)
    assert out[0] == 1
    out[0] = 0
    on_cpu.scatter_add("float32", [out], [[ranks[0], ranks[2], ranks[1]]], 1.0)
    assert out[0] == 0


def test_no_ranks() -> None:
    out = on_cpu.placed(vectors.make("gaussian", 10))
    before = out.copy()
    on_cpu.scatter_add("float32", [out], [[]], 1.0)
    assert np.array_equal(out, before)
