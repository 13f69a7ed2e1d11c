"""``orthonormalise.cu`` on the CPU: the same bits as ``portable_linalg``, pass by pass."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import harness
import on_cpu


def _portable() -> types.ModuleType:
    """``kernels/portable_linalg.py`` by itself: of torch it needs the name only, to be imported."""
    package = types.ModuleType("kernels_alone")
    package.__path__ = [str(Path(__file__).resolve().parents[2] / "kernels")]
    had = sys.modules.get("torch")
    sys.modules["kernels_alone"] = package
    sys.modules["torch"] = had or types.SimpleNamespace(Tensor=None)  # type: ignore[assignment]
    try:
        return importlib.import_module("kernels_alone.portable_linalg")
    finally:
        if had is None:
            del sys.modules["torch"]


portable = _portable()


def expected(stack: np.ndarray) -> tuple[np.ndarray, int]:
    """The loop of ``portable_linalg.orthonormalise``, counting."""
    found, hard = portable._cholesky_pass(stack)
    todo, passes = np.flatnonzero(hard), 1
    for _ in range(portable.cholesky.PASSES):
        if not todo.size:
            break
        found[todo], hard = portable._cholesky_pass(found[todo])
        todo = todo[hard]
        passes += 1
    return found, passes


def check(stack: np.ndarray, **options: int) -> int:
    """Bits and number of passes agree; returns the latter."""
    values, passes = expected(stack.copy())
    found, took = on_cpu.orthonormalise(stack, **options)
    raw = np.uint64 if stack.dtype == np.float64 else np.uint32
    assert np.array_equal(found.view(raw), values.view(raw))
    assert took == passes
    return took


def gaussian(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(list(shape)).standard_normal(shape).astype(dtype)


RANKS = [1, 2, 3, 4, 5, 8, 13, 16, 32, 33, 64]
if harness.sanitizing():
    RANKS = [1, 5, 16, 64]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rank", RANKS)
def test_ranks(rank: int, dtype: type) -> None:
    for length in (rank, 130 + rank):
        check(gaussian(2, rank, length, dtype=dtype))


LENGTHS = [1, 31, 33, 127, 128, 129, 511, 513, 4096, 4097, 16_385]
if harness.sanitizing():
    LENGTHS = [1, 33, 129, 513]


@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length: int) -> None:
    """Around the columns of each kernel's block, and of a partial sum."""
    check(gaussian(1, 3, length))


def test_entries_of_any_size() -> None:
    """Down to subnormal numbers and up to near overflow, a matrix of each, rows of unlike size."""
    for dtype in (np.float32, np.float64):
        info = np.finfo(dtype)
        sizes = [info.tiny / 64, info.tiny, 1e-30, 1.0, 1e30, info.max / 8]
        stack = gaussian(len(sizes), 4, 40, dtype=dtype)
        stack /= np.abs(stack).max()
        stack *= np.array(sizes, dtype=dtype)[:, None, None]
        stack[:, 1] *= dtype(2.0**-20)
        check(stack)


def test_zero_dependent_and_spoilt_rows() -> None:
    stack = gaussian(6, 5, 70)
    stack[0, 2] = 0
    stack[1, 3] = stack[1, 0] - 2 * stack[1, 1]
    stack[2, 1, 7] = np.nan
    stack[3, 0, 69] = -np.inf
    stack[4] = 0
    check(stack)
    found, _ = on_cpu.orthonormalise(stack)
    assert not found[2, 1].any()
    assert not found[4].any()
    assert np.allclose(found[5] @ found[5].T, np.eye(5), atol=1e-5)


def test_hard_matrices_are_gone_over_again() -> None:
    """Some of a batch only, and those alone; the others keep what the first pass gave."""
    stack = gaussian(4, 6, 300)
    for i, close in ((1, 1e-4), (3, 3e-5)):
        stack[i, 1:] = stack[i, :1] + close * stack[i, 1:]
    assert check(stack) >= 2
    alone, _ = on_cpu.orthonormalise(stack[3:4].copy())
    found, _ = on_cpu.orthonormalise(stack)
    assert np.array_equal(found[3:4], alone)
    assert np.allclose(found[3] @ found[3].T, np.eye(6), atol=1e-5)


def test_halves_go_to_the_even_number() -> None:
    """Entries of few bits, so that what is cut off is often exactly a half."""
    rng = np.random.default_rng(5)
    stack = rng.integers(-(1 << 22), 1 << 22, (3, 4, 200)).astype(np.float32)
    stack[:, :, 0] = 1 << 22  # one bit more than whole numbers have
    check(stack)


def near_one() -> np.ndarray:
    """Rows so long and full that partial sums are rounded when they are added up."""
    rng = np.random.default_rng(3)
    return 1 - rng.random((1, 4, 20 * 512 + 1)) * 2.0**-8


def test_partial_sums_are_added_in_order() -> None:
    check(near_one())
    # And it shows: with the last one first something else comes out.
    chunk = "sums[chunk * square + i]"
    last_first = "sums[(s.chunks - 1 - chunk) * square + i]"
    other = harness.build("orthonormalise", lambda text: text.replace(chunk, last_first))
    found, _ = on_cpu.orthonormalise(near_one(), lib=other)
    assert not np.array_equal(found, expected(near_one())[0])


def test_zeros_keep_their_signs() -> None:
    """Also those of dependent and dead rows, and of rows before others that begin with zeros."""
    stack = np.zeros((3, 4, 8), dtype=np.float32)
    stack[:, range(4), range(4)] = [1, -1, -2, 3]
    stack[1, 2], stack[2, 1] = stack[1, 0], -0.0
    check(stack)
    check(-stack)


def test_blocks_side_by_side_in_random_order() -> None:
    check(gaussian(3, 8, 600), seed=9, workers=3)
