"""Each operation on NumPy arrays: tables as the launcher makes them, kernels by the harness."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import harness
import tables


@functools.cache
def library(name: str) -> harness.Library:
    """The kernels of one file, compiled once."""
    return harness.build(name)


def address(array: np.ndarray | None) -> np.uint64:
    return np.uint64(0 if array is None else array.ctypes.data)


def aligned_empty(length: int, dtype: np.dtype | type, offset: int = 0) -> np.ndarray:
    """An array that begins ``offset`` elements behind a 16-byte boundary, and ends its memory.

    A byte read behind it is therefore out of bounds for AddressSanitizer.
    """
    size = np.dtype(dtype).itemsize
    start = offset * size
    memory = np.empty(start + length * size + 16, dtype=np.uint8)
    shift = -memory.ctypes.data % 16
    # Only memory that is aligned as it comes can end where the array does.
    if shift == 0:
        memory = np.empty(start + length * size, dtype=np.uint8)
        shift = -memory.ctypes.data % 16
        if shift:
            memory = np.empty(start + length * size + 16, dtype=np.uint8)
            shift = -memory.ctypes.data % 16
    return memory[shift + start : shift + start + length * size].view(dtype)


def placed(values: np.ndarray, offset: int = 0) -> np.ndarray:
    """A copy of ``values`` at such a place."""
    array = aligned_empty(len(values), values.dtype, offset)
    array[:] = values
    return array


@dataclass
class Histogram:
    """``counts`` and ``energies`` by bin."""

    counts: np.ndarray
    energies: np.ndarray


def accumulate(
    kind: str,
    gradients: Sequence[np.ndarray],
    residuals: Sequence[np.ndarray | None],
    outs: Sequence[np.ndarray | None],
    scale: float,
    *,
    lib: harness.Library | None = None,
    **options: int,
) -> list[Histogram]:
    """``accumulate_<kind>`` over all vectors in one launch; writes ``outs``."""
    size = 8 if kind == "float64" else 4
    blocks = [tables.accumulate_blocks(len(g), size) for g in gradients]
    of_block, first = tables.block_map(blocks)
    counts = np.zeros((len(blocks), tables.BINS[size]), dtype=np.uint64)
    energies = np.zeros_like(counts)
    finished = np.zeros(len(blocks), dtype=np.uint64)
    segments = np.zeros(len(blocks), dtype=tables.ACCUMULATE_SEGMENT)
    for i, gradient in enumerate(gradients):
        segments[i] = (
            address(gradient), address(residuals[i]), address(outs[i]), len(gradient), scale,
            address(counts[i]), address(energies[i]), address(finished[i:]), first[i], blocks[i],
        )  # fmt: skip
    lib = lib or library("accumulate")
    lib.launch(f"accumulate_{kind}", len(of_block), segments, of_block, **options)
    return [
        Histogram(c.astype(np.int64), e.view(np.float64))
        for c, e in zip(counts, energies, strict=True)
    ]


@dataclass
class Selection:
    """Positions (ascending) and values."""

    index: np.ndarray
    value: np.ndarray


def select(
    vectors: Sequence[np.ndarray],
    ks: Sequence[int],
    *,
    clear: bool = False,
    histograms: Sequence[np.ndarray] | None = None,
    lib: harness.Library | None = None,
    **options: int,
) -> list[Selection]:
    """The ``ks[i]`` entries of greatest magnitude of every vector, in few launches."""
    dtype = vectors[0].dtype
    name, size = str(dtype), dtype.itemsize
    low = {4: 20, 8: 51}[size]
    count = len(vectors)
    blocks = [tables.select_blocks(len(v)) for v in vectors]
    refine = [tables.refine_blocks(len(v)) for v in vectors]
    of_block, first = tables.block_map(blocks)
    of_refine, first_refine = tables.block_map(refine)
    segments = np.zeros(count, dtype=tables.SELECT_SEGMENT)
    state = np.zeros((count, tables.SELECT_STATE // 8), dtype=np.uint64)
    digits = np.zeros((count, tables.DIGITS), dtype=np.uint32)
    keep, found = [], []
    for i, vector in enumerate(vectors):
        bits = magnitude(vector) >> low
        counts = np.bincount(bits.astype(np.int64), minlength=tables.BINS[size]).astype(np.uint64)
        if histograms is not None:
            assert np.array_equal(counts, histograms[i])
        states = np.zeros((2, blocks[i]), dtype=np.uint64)
        # Exactly as long as the list becomes, so that AddressSanitizer sees one that grows longer.
        at_least = np.cumsum(counts[::-1])
        candidates = int(at_least[np.searchsorted(at_least, ks[i])])
        list_index = aligned_empty(candidates, np.uint32)
        list_value = aligned_empty(candidates, dtype)
        out = Selection(np.full(ks[i], -1, dtype=np.int64), np.full(ks[i], 77, dtype=dtype))
        keep.append((counts, states, list_index, list_value))
        found.append(out)
        segments[i] = (
            address(vector), len(vector), ks[i], address(counts), address(state[i]),
            address(digits[i]), address(states[0]), address(states[1]), address(list_index),
            address(list_value), address(out.index), address(out.value), clear, first[i],
            first_refine[i], refine[i],
        )  # fmt: skip
    lib = lib or library("select")
    tickets = np.zeros(2, dtype=np.uint64)
    lib.launch(f"select_threshold_{name}", count, segments, **options)
    lib.launch(f"select_compact_{name}", len(of_block), segments, of_block, tickets, **options)
    for shift, width in tables.REFINEMENTS[size]:
        lib.launch(
            f"select_refine_{name}", len(of_refine), segments, of_refine, np.uint32(shift),
            np.uint32(width), **options,
        )  # fmt: skip
    lib.launch(f"select_filter_{name}", len(of_block), segments, of_block, tickets[1:], **options)
    assert not digits.any()
    return found


def scatter_add(
    kind: str,
    outs: Sequence[np.ndarray],
    payloads: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]],
    alpha: float,
    *,
    lib: harness.Library | None = None,
    **options: int,
) -> None:
    """Adds every rank's ``(positions, values)`` to every vector, in one launch."""
    blocks = [tables.scatter_blocks(len(out)) for out in outs]
    of_block, first = tables.block_map(blocks)
    segments = np.zeros(len(outs), dtype=tables.SCATTER_SEGMENT)
    rows = []
    for i, out in enumerate(outs):
        table = np.zeros(len(payloads[i]), dtype=tables.SCATTER_PAYLOAD)
        for j, (index, value) in enumerate(payloads[i]):
            table[j] = address(index), address(value), len(index)
        rows.append(table)
        segments[i] = address(out), len(out), alpha, address(table), len(table), first[i]
    lib = lib or library("scatter")
    lib.launch(f"scatter_add_{kind}", len(of_block), segments, of_block, **options)


def magnitude(vector: np.ndarray) -> np.ndarray:
    """Bits without the sign."""
    if vector.dtype == np.float64:
        return vector.view(np.uint64) & np.uint64(0x7FFF_FFFF_FFFF_FFFF)
    return vector.view(np.uint32) & np.uint32(0x7FFF_FFFF)


def orthonormalise(
    stack: np.ndarray, lib: harness.Library | None = None, **options: int
) -> tuple[np.ndarray, int]:
    """Rows made orthonormal, with further passes where needed, and how many passes there were."""
    batch, rank, length = stack.shape
    name, shape = str(stack.dtype), tables.ortho_shape(*stack.shape)
    out = aligned_empty(stack.size, stack.dtype).reshape(stack.shape)
    given = placed(stack.reshape(-1))
    tops, sums = np.zeros(shape.tops, dtype=np.uint64), np.zeros(shape.sums, dtype=np.uint64)
    weights, downs = aligned_empty(shape.weights, stack.dtype), np.zeros(shape.tops)
    active: np.ndarray | None = None
    lib = lib or library("orthonormalise")
    for passes in range(1, 2 + tables.ORTHO_REPEATS):
        hard = np.full(batch, 7, dtype=np.uint32)
        tops[:] = sums[:] = 0
        table = np.zeros(1, dtype=tables.ORTHO_STACK)
        source = given if passes == 1 else out
        table[0] = (
            address(source), address(out), address(tops), address(sums), address(weights),
            address(downs), address(active), address(hard), rank, length, shape.chunks,
        )  # fmt: skip
        lib.launch(f"ortho_top_{name}", shape.top, table, **options)
        lib.launch(f"ortho_gram_{name}", shape.gram, table, **options)
        lib.launch(f"ortho_factor_{name}", batch, table, **options)
        lib.launch(f"ortho_apply_{name}", shape.apply, table, **options)
        active = hard
        if not hard.any():
            break
    return out, passes
