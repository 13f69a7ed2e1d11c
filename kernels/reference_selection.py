"""Sparsifiers of the reference backend: everything is sorted."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ..errors import WireError
from .reference_random import choose
from .selection import Histogram


def magnitudes(vector: np.ndarray) -> np.ndarray:
    """Bit patterns without their sign, uint64: they order as the table says."""
    width = 8 * vector.itemsize
    patterns = vector.view(f"u{vector.itemsize}").astype(np.uint64)
    return patterns & np.uint64((1 << width - 1) - 1)


def order(vector: np.ndarray) -> np.ndarray:
    """All positions: greatest magnitude first, of equal ones the lowest position first."""
    return np.lexsort((np.arange(vector.size), ~magnitudes(vector)))


def total(
    gradient: torch.Tensor, residual: torch.Tensor, scale: float, dtype: torch.dtype
) -> np.ndarray:
    """``residual + scale * gradient``: both rounded to ``dtype``, after the product and the sum.

    Sums and products of fp32 in fp64, rounded afterwards, are those of fp32 arithmetic: 53 bits are
    more than twice 24 and two.
    """
    given, held = gradient.to(dtype).numpy(), residual.numpy()
    kind = held.dtype.type
    with np.errstate(all="ignore"):
        product = (np.float64(kind(scale)) * given.astype(np.float64)).astype(held.dtype)
        sums: np.ndarray = (held.astype(np.float64) + product.astype(np.float64)).astype(held.dtype)
    return sums


def store(out: torch.Tensor, values: np.ndarray) -> None:
    """Write NumPy values, rounded to the dtype of ``out``."""
    with np.errstate(all="ignore"):
        out.copy_(torch.from_numpy(values.astype(out.numpy().dtype)))


def accumulate(
    out: torch.Tensor,
    gradient: torch.Tensor,
    residual: torch.Tensor,
    scale: float,
    counts: torch.Tensor,
    energies: torch.Tensor,
) -> None:
    sums = total(gradient, residual, scale, out.dtype)
    store(out, sums)
    # 8 bins an octave in fp32 (23 bits of mantissa), 2 in fp64 (52).
    shift = {torch.float32: 20, torch.float64: 51}[out.dtype]
    places = (magnitudes(sums) >> np.uint64(shift)).astype(np.int64)
    number, energy = np.zeros(counts.numel(), np.int64), np.zeros(counts.numel())
    np.add.at(number, places, 1)
    with np.errstate(all="ignore"):
        np.add.at(energy, places, sums.astype(np.float64) ** 2)
    store(counts, number)
    store(energies, energy)


def accumulate_select(
    out: torch.Tensor,
    gradient: torch.Tensor,
    residual: torch.Tensor,
    scale: float,
    k: int,
    clear: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    store(out, total(gradient, residual, scale, out.dtype))
    return take_topk(out, k, clear)


def accumulate_select_many(
    outs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor],
    scales: Sequence[float],
    ks: Sequence[int],
    clear: bool,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        accumulate_select(*each, clear)
        for each in zip(outs, gradients, residuals, scales, ks, strict=True)
    ]


def take_topk(vector: torch.Tensor, k: int, clear: bool) -> tuple[torch.Tensor, torch.Tensor]:
    indices = select_topk(vector, k)
    values = vector[indices].clone()
    if clear:
        vector[indices] = 0
    return indices, values


def select_topk(vector: torch.Tensor, k: int) -> torch.Tensor:
    return torch.from_numpy(np.sort(order(vector.numpy())[:k]))


def select_sampled(vector: torch.Tensor, k: int) -> torch.Tensor:
    """All ``k``, which the contract allows: what a sample gives is not part of it."""
    indices = select_topk(vector, k)
    return indices[vector[indices] != 0]


def scatter_add(
    out: torch.Tensor, payloads: list[tuple[torch.Tensor, torch.Tensor]], alpha: float
) -> None:
    sums = out.numpy().astype(np.float64)
    with np.errstate(all="ignore"):
        for positions, values in payloads:
            sums[positions.numpy()] += alpha * values.numpy().astype(np.float64)
    store(out, sums)


def pack_block_offsets(indices: torch.Tensor, numel: int) -> torch.Tensor:
    counts = [0] * -(-numel // 65_536)
    for index in indices.tolist():
        counts[index // 65_536] += 1
    parts = [count.to_bytes(4, "little") for count in counts if len(counts) > 1]
    parts += [(index % 65_536).to_bytes(2, "little") for index in indices.tolist()]
    return _bytes(b"".join(parts))


def unpack_block_offsets(buffer: torch.Tensor, numel: int, k: int) -> torch.Tensor:
    data, blocks = bytes(buffer.tolist()), -(-numel // 65_536)
    counts, at = [k], 0
    if blocks > 1:
        at = 4 * blocks
        counts = [
            int.from_bytes(data[4 * i : 4 * i + 4], "little", signed=True) for i in range(blocks)
        ]
    if min(counts) < 0 or sum(counts) != k:
        raise WireError(f"block counts add up to {sum(counts)}, {k} were announced")
    positions = []
    for block, count in enumerate(counts):
        for _ in range(count):
            positions.append(65_536 * block + int.from_bytes(data[at : at + 2], "little"))
            at += 2
    return torch.tensor(positions, dtype=torch.int64)


def pack_int32(indices: torch.Tensor, numel: int) -> torch.Tensor:
    return _bytes(b"".join(index.to_bytes(4, "little") for index in indices.tolist()))


def unpack_int32(buffer: torch.Tensor, numel: int, k: int) -> torch.Tensor:
    data = bytes(buffer.tolist())
    return torch.tensor(
        [int.from_bytes(data[4 * i : 4 * i + 4], "little", signed=True) for i in range(k)],
        dtype=torch.int64,
    )


def pack_bitmap(indices: torch.Tensor, numel: int) -> torch.Tensor:
    flags = np.zeros(numel, np.uint8)
    flags[indices.numpy()] = 1
    return torch.from_numpy(np.packbits(flags, bitorder="little"))


def unpack_bitmap(buffer: torch.Tensor, numel: int) -> torch.Tensor:
    return torch.from_numpy(np.flatnonzero(np.unpackbits(buffer.numpy(), bitorder="little")))


def shared_indices(key: tuple[int, int], numel: int, k: int) -> torch.Tensor:
    return torch.from_numpy(choose(key, numel, k))


def all_finite(tensor: torch.Tensor) -> torch.Tensor:
    return torch.tensor(bool(np.isfinite(tensor.to(torch.float64).numpy()).all()))


def topk_errors(histogram: Histogram, ks: Sequence[int]) -> torch.Tensor:
    """Bin after bin from the largest: of one that is not kept whole, each entry counts the same."""
    errors = []
    for k in ks:
        left, lost = k, []
        bins = zip(histogram.counts.tolist(), histogram.energies.tolist(), strict=True)
        for count, energy in reversed(list(bins)):
            kept = min(left, count)
            lost.append(energy * (count - kept) / count if count else 0.0)
            left -= kept
        errors.append(math.fsum(lost))
    return torch.tensor(errors, dtype=torch.float64)


def _bytes(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)
