"""``select.cu`` on the CPU: exactly the k greatest, ties to the lowest position, in order."""

from __future__ import annotations

import numpy as np
import pytest

import harness
import on_cpu
import tables
import vectors

TILE = tables.SELECT_TILE


def expected(vector: np.ndarray, k: int) -> np.ndarray:
    """Positions by a stable sort of the magnitudes' bits."""
    bits = on_cpu.magnitude(vector)
    return np.sort(np.argsort(np.iinfo(bits.dtype).max - bits, kind="stable")[:k])


def check(given: list[np.ndarray], ks: list[int], **options: object) -> None:
    """``select`` on placed copies of ``given``."""
    clear = bool(options.get("clear"))
    found = on_cpu.select(given_copies := [on_cpu.placed(v) for v in given], ks, **options)
    for vector, copy, k, selection in zip(given, given_copies, ks, found, strict=True):
        positions = expected(vector, k)
        assert np.array_equal(selection.index, positions)
        raw = np.uint64 if vector.dtype == np.float64 else np.uint32
        assert np.array_equal(selection.value.view(raw), vector[positions].view(raw))
        left = vector.copy()
        if clear:
            left[positions] = 0
        assert np.array_equal(copy.view(raw), left.view(raw))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", vectors.KINDS)
def test_lengths_and_shares(dtype: type, kind: str) -> None:
    """One launch over vectors of all lengths, each with several k."""
    given, ks = [], []
    for length in [*vectors.LENGTHS, 2 * TILE + 5]:
        shares = {1, max(1, length // 100), -(-length // 3), length}
        for k in sorted(shares if not harness.sanitizing() else {-(-length // 3), length}):
            given.append(vectors.make(kind, length, dtype))
            ks.append(k)
    check(given, ks, clear=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("offset", [1, 2])
def test_unaligned(dtype: type, offset: int) -> None:
    vector = on_cpu.placed(vectors.make("gaussian", TILE + 9, dtype), offset)
    (found,) = on_cpu.select([vector], [100])
    assert np.array_equal(found.index, expected(vector, 100))


def test_every_digit_decides() -> None:
    """Magnitudes that differ in one bit only, at each place that a refinement looks at."""
    step = 5 if harness.sanitizing() else 1
    for dtype, raw, low in ((np.float32, np.uint32, 20), (np.float64, np.uint64, 51)):
        given, ks = [], []
        for place in range(0, low, step):
            bits = np.full(300, raw(3) << raw(low), dtype=raw)
            bits[50::3] |= raw(1) << raw(place)
            given.append(bits.view(dtype))
            ks.append(60)
        check(given, ks)


def test_many_blocks_at_once_and_in_random_order() -> None:
    """More tiles than a look-back window has lanes, and blocks that wait for one another."""
    vector = vectors.make("ties", 40 * TILE + 17)
    k = len(vector) // 3
    placed = on_cpu.placed(vector)
    for seed in (0, 3):
        (found,) = on_cpu.select([placed], [k], seed=seed, workers=4)
        assert np.array_equal(found.index, expected(vector, k))


def test_look_back_over_tiles_that_know_only_themselves() -> None:
    """Where no predecessor has published its sum the window goes on to the tiles before it."""
    source = harness.include_all((harness.KERNELS / "lookback.cuh").read_text()) + _LOOK_BACK
    states = np.zeros(100, dtype=np.uint64)
    own, known = np.uint64(1 << 62), np.uint64(2 << 62)
    counts = np.arange(100, dtype=np.uint64) * np.uint64((5 << 31) + 3)
    library = harness.build_source(source)
    for last_known in (0, 3, 31, 32, 66, 67, 98):
        states[:99] = counts[:99] | own
        states[last_known] = counts[: last_known + 1].sum() | known
        out = np.zeros(256, dtype=np.uint64)
        library.launch("only_look_back", 1, states, np.uint32(99), counts[99:], out)
        assert np.all(out == counts[:99].sum())
        assert states[99] == counts.sum() | known


_LOOK_BACK = """
extern "C" __global__ void only_look_back(u64* states, u32 tile, const u64* total, u64* out) {
    out[threadIdx.x] = look_back(states, tile, *total);
}
"""
