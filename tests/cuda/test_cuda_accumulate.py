"""``accumulate.cu`` on the CPU against NumPy: sums to the last bit, counts, and energies."""

from __future__ import annotations

import numpy as np
import pytest

import on_cpu
import tables
import vectors

TILE = tables.ACCUMULATE_TILE


def bfloat16(values: np.ndarray) -> np.ndarray:
    """fp32 values that bf16 can express, and their bits."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def expected_energies(values: np.ndarray) -> np.ndarray:
    """What the comment at the top of accumulate.cu says, bin by bin, in its own arithmetic."""
    size = values.dtype.itemsize
    low, lead_bits, bias, square_bits = {4: (20, 3, 127, 13), 8: (51, 1, 1023, 17)}[size]
    bits = on_cpu.magnitude(values)
    bins = (bits >> low).astype(np.int64)
    one = 1 << lead_bits
    lead = np.where(bins < one, bins, (bins & (one - 1)) | one)
    f = (bits & ((1 << low) - 1)).astype(values.dtype) * values.dtype.type(2.0**-low)
    rest = np.rint(f * ((2 * lead).astype(values.dtype) + f) * values.dtype.type(2**square_bits))
    total = np.zeros(tables.BINS[size])
    counts = np.bincount(bins, minlength=len(total))
    sums = np.bincount(bins, weights=rest.astype(np.float64), minlength=len(total))
    for b in np.flatnonzero(counts):
        exponent, first = divmod(int(b), one)
        if exponent == 2 * bias + 1:
            total[b] = np.nan if first else np.inf
            continue
        square = float(first if exponent == 0 else first + one) ** 2
        unit = max(exponent, 1) - bias - lead_bits
        with np.errstate(over="ignore", under="ignore"):
            total[b] = np.ldexp(counts[b] * square + sums[b] * 2.0**-square_bits, 2 * unit)
    return total


def check(values: np.ndarray, histogram: on_cpu.Histogram) -> None:
    """``histogram`` is that of ``values``."""
    low = 51 if values.dtype == np.float64 else 20
    bins = (on_cpu.magnitude(values) >> low).astype(np.int64)
    expected = np.bincount(bins, minlength=len(histogram.counts))
    assert np.array_equal(histogram.counts, expected)
    energies = expected_energies(values)
    assert np.array_equal(histogram.energies, energies, equal_nan=True)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        squares = values.astype(np.longdouble) ** 2
        exact = np.zeros(len(energies), dtype=np.longdouble)
        np.add.at(exact, bins, squares)
        whole = np.isfinite(exact) & (exact < 1e300) & (exact > 1e-290)
        assert np.allclose((energies / exact)[whole].astype(float), 1.0, rtol=0, atol=1e-6)


def bits(values: np.ndarray) -> np.ndarray:
    """Comparable, with all NaNs alike: which one comes of a sum is the device's choice."""
    same = np.where(np.isnan(values), values.dtype.type(np.nan), values)
    return same.view(np.uint64 if values.dtype == np.float64 else np.uint32)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", vectors.KINDS)
@pytest.mark.parametrize("offset", [0, 1])
def test_sum_and_histogram(dtype: type, kind: str, offset: int) -> None:
    """All lengths in one launch, aligned and not; ``scale`` makes both roundings matter."""
    tile = TILE[np.dtype(dtype).itemsize]
    lengths = [*vectors.LENGTHS, 0, tile - 1, tile, tile + 1, 2 * tile + 7]
    gradients = [on_cpu.placed(vectors.make(kind, n, dtype), offset) for n in lengths]
    residuals = [on_cpu.placed(vectors.make("gaussian", n, dtype, 1), offset) for n in lengths]
    outs = [on_cpu.aligned_empty(n, dtype, offset) for n in lengths]
    scale = 0.3
    with np.errstate(invalid="ignore"):
        expected = [r + g * dtype(scale) for g, r in zip(gradients, residuals, strict=True)]
    found = on_cpu.accumulate(np.dtype(dtype).name, gradients, residuals, outs, scale)
    for out, values, histogram in zip(outs, expected, found, strict=True):
        assert np.array_equal(bits(out), bits(values))
        check(out, histogram)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("offset", [0, 1])
def test_half_formats(kind: str, offset: int) -> None:
    """Every one of the 65,536 numbers of the format, and lengths around a vector of eight."""
    every = np.arange(65_536, dtype=np.uint32).astype(np.uint16)
    lengths = [1, 7, 8, 9, 255, 2049, 65_536]
    gradients = [on_cpu.placed(every[-n:], offset) for n in lengths]
    residuals = [on_cpu.placed(vectors.make("gaussian", n), offset) for n in lengths]
    outs = [on_cpu.aligned_empty(n, np.float32, offset) for n in lengths]
    found = on_cpu.accumulate(kind, gradients, residuals, outs, 0.7)
    for gradient, residual, out, histogram in zip(gradients, residuals, outs, found, strict=True):
        if kind == "float16":
            wide = gradient.view(np.float16).astype(np.float32)
        else:
            wide = (gradient.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            expected = residual + wide * np.float32(0.7)
        assert np.array_equal(bits(out), bits(expected))
        check(out, histogram)


@pytest.mark.parametrize("alias", ["residual", "gradient", "no residual", "no out"])
def test_places(alias: str) -> None:
    """``out`` may be either input or left out; without a residual it counts as zero."""
    gradient = on_cpu.placed(vectors.make("gaussian", 5000))
    residual = on_cpu.placed(vectors.make("ties", 5000))
    expected = (gradient if alias == "no residual" else residual + gradient).copy()
    before = residual.copy()
    out = {"residual": residual, "gradient": gradient, "no out": None}.get(
        alias, on_cpu.aligned_empty(5000, np.float32)
    )
    given = None if alias == "no residual" else residual
    (found,) = on_cpu.accumulate("float32", [gradient], [given], [out], 1.0)
    if out is None:
        assert np.array_equal(residual, before)
    else:
        assert np.array_equal(out, expected)
    check(expected, found)


def test_full_tile_of_the_greatest_squares() -> None:
    """A block's sums of squares stay below 2**32 where every element has the greatest share."""
    values = on_cpu.placed(np.full(TILE[4], np.nextafter(np.float32(2), np.float32(0))))
    wide = on_cpu.placed(np.full(TILE[8], np.nextafter(2.0, 0.0)))
    for kind, vector in (("float32", values), ("float64", wide)):
        # One lone number in front of each thread's run, so that runs are flushed in the middle.
        (found,) = on_cpu.accumulate(kind, [vector], [None], [None], 1.0)
        check(vector, found)


def test_blocks_side_by_side_in_random_order() -> None:
    vector = on_cpu.placed(vectors.make("gaussian", 4 * TILE[8] + 3, np.float64))
    (plain,) = on_cpu.accumulate("float64", [vector], [None], [None], 1.0)
    (found,) = on_cpu.accumulate("float64", [vector], [None], [None], 1.0, seed=5, workers=3)
    assert np.array_equal(plain.counts, found.counts)
    assert np.array_equal(plain.energies, found.energies)
