"""The table's entries for sparsifiers: which entries are kept, and how they travel.

Order among entries is that of their magnitude's bit pattern, so it is total and the same on every
backend: NaN above infinity above every finite value, and among equals the lowest index wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import ConfigError, WireError
from .dispatch import backend_of
from .dispatch import call as _call
from .dispatch import need_flat as _need_flat

#: Elements covered by one table of 16-bit offsets.
BLOCK = 65_536
_WORK = (torch.float32, torch.float64)
_GRADIENTS = (torch.float16, torch.bfloat16, *_WORK)
#: Low bits of a magnitude's pattern that its histogram bin leaves out, and the number of bins.
BIN_SHIFT = {torch.float32: 20, torch.float64: 51}
BINS = {torch.float32: 2048, torch.float64: 4096}


@dataclass(frozen=True)
class Histogram:
    """How many entries of a vector have which magnitude, and how much of its energy.

    Bin i holds magnitudes whose bit pattern, shifted right by ``BIN_SHIFT``, is i: 8 bins an
    octave in fp32, 2 in fp64. The last ones are infinity and NaN.

    Attributes:
        counts: int64, shape ``[BINS]``; their sum is the vector's length.
        energies: fp64, shape ``[BINS]``: sum of squares of each bin's entries, in an order that
            depends on the number of threads (last bits only).
        dtype: of the vector.
    """

    counts: torch.Tensor
    energies: torch.Tensor
    dtype: torch.dtype

    @property
    def finite(self) -> bool:
        """No entry is infinite or NaN."""
        exponents = {torch.float32: 255, torch.float64: 2047}[self.dtype]
        first = exponents * self.counts.numel() // (exponents + 1)
        return not bool(self.counts[first:].any())


def accumulate(
    gradient: torch.Tensor, residual: torch.Tensor, scale: float, out: torch.Tensor
) -> Histogram:
    """``out = residual + scale * gradient``, and the histogram of it, in one pass.

    The product is rounded before it is added (no fused multiply-add), on every backend.

    Args:
        gradient: shape ``[d]``, contiguous; fp16, bf16, fp32 or fp64.
        residual: shape ``[d]``, contiguous; fp32 or fp64.
        scale: 1 / loss scale.
        out: like ``residual``; may be that tensor or ``gradient`` itself.
    """
    _check_sum("accumulate", gradient, residual, out)
    counts = torch.zeros(BINS[out.dtype], dtype=torch.int64, device=out.device)
    energies = torch.zeros(BINS[out.dtype], dtype=torch.float64, device=out.device)
    _call("accumulate", out, gradient, residual, scale, counts, energies)
    return Histogram(counts, energies, out.dtype)


def accumulate_select(
    gradient: torch.Tensor,
    residual: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    k: int,
    clear: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``out = residual + scale * gradient`` and its ``k`` entries of greatest magnitude.

    Args:
        gradient: as for :func:`accumulate`.
        residual: as for :func:`accumulate`.
        scale: as for :func:`accumulate`.
        out: as for :func:`accumulate`.
        k: how many, ``1 <= k <= d``.
        clear: leave zeros where entries were taken: what error feedback keeps.

    Returns:
        Positions (int64, shape ``[k]``, ascending) and the entries there.
    """
    _check_sum("accumulate_select", gradient, residual, out)
    _check_k("accumulate_select", k, out)
    found: tuple[torch.Tensor, torch.Tensor] = _call(
        "accumulate_select", out, gradient, residual, scale, k, clear
    )
    return found


def accumulate_select_many(
    gradients: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor],
    scales: Sequence[float],
    outs: Sequence[torch.Tensor],
    ks: Sequence[int],
    clear: bool = False,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """:func:`accumulate_select` of several vectors on one device; few launches for all of them."""
    for gradient, residual, out, k in zip(gradients, residuals, outs, ks, strict=True):
        _check_sum("accumulate_select_many", gradient, residual, out)
        _check_k("accumulate_select_many", k, out)
    backend = backend_of(outs[0].device.type) if outs else None
    many = getattr(backend, "accumulate_select_many", None)
    if many is None:
        return [
            _call("accumulate_select", out, gradient, residual, scale, k, clear)
            for out, gradient, residual, scale, k in zip(
                outs, gradients, residuals, scales, ks, strict=True
            )
        ]
    found: list[tuple[torch.Tensor, torch.Tensor]] = many(
        outs, gradients, residuals, scales, ks, clear
    )
    return found


def take_topk(
    vector: torch.Tensor, k: int, clear: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`accumulate_select` of a vector that is there already: fp32 or fp64, ``[d]``."""
    _need_flat("take_topk", vector, *_WORK)
    _check_k("take_topk", k, vector)
    found: tuple[torch.Tensor, torch.Tensor] = _call("take_topk", vector, k, clear)
    return found


def select_topk(vector: torch.Tensor, k: int) -> torch.Tensor:
    """The positions of :func:`take_topk` alone."""
    _need_flat("select_topk", vector, *_WORK)
    _check_k("select_topk", k, vector)
    return take_topk(vector, k)[0]


def select_sampled(vector: torch.Tensor, k: int) -> torch.Tensor:
    """About ``k`` entries of greatest magnitude, by a threshold that a strided sample gives.

    The threshold is lowered, at most 10 times, until at least 0.8 k entries reach it; of more
    than k, exactly the k that :func:`select_topk` takes are kept. Where 10 times do not suffice
    the selection is exact. Zeros are never selected, so few or no positions may come back.

    Args:
        vector: fp32 or fp64, shape ``[d]``, contiguous.
        k: how many, ``1 <= k <= d``.

    Returns:
        int64, ascending, at most ``k``; at least ``0.8 k`` unless fewer entries are not zero.
    """
    _need_flat("select_sampled", vector, *_WORK)
    _check_k("select_sampled", k, vector)
    return _call("select_sampled", vector, k)


def scatter_add(
    out: torch.Tensor,
    payloads: list[tuple[torch.Tensor, torch.Tensor]],
    alpha: float = 1.0,
) -> None:
    """``out[positions] += alpha * values`` for each payload, in order.

    The product is rounded before it is added, so that every backend gives the same bits.

    Args:
        out: fp32 or fp64, shape ``[d]``, contiguous.
        payloads: positions (int64, ascending, distinct, below d) and values (like ``out``) of
            each rank. They were checked when they were unpacked.
        alpha: factor.
    """
    _need_flat("scatter_add", out, *_WORK)
    for positions, values in payloads:
        _need_flat("scatter_add", positions, torch.int64)
        _need_flat("scatter_add", values, out.dtype)
        if positions.numel() != values.numel():
            raise ConfigError(
                f"scatter_add: {positions.numel()} positions and {values.numel()} values"
            )
    _call("scatter_add", out, payloads, alpha)


def blocks(numel: int) -> int:
    """Number of 65,536-element blocks in ``numel`` elements."""
    return -(-numel // BLOCK)


def pack_block_offsets(indices: torch.Tensor, numel: int) -> torch.Tensor:
    """Ascending positions as 16-bit offsets within blocks, after the count of each block.

    Args:
        indices: int64, shape ``[k]``, strictly ascending, below ``numel``.
        numel: length of the vector that the positions refer to.

    Returns:
        uint8, ``4 * blocks(numel) + 2 * k`` bytes: int32 counts, then uint16 offsets. With a
        single block its count is ``k`` and is left out.
    """
    _need_flat("pack_block_offsets", indices, torch.int64)
    return _call("pack_block_offsets", indices, numel)


def unpack_block_offsets(buffer: torch.Tensor, numel: int, k: int) -> torch.Tensor:
    """Inverse of :func:`pack_block_offsets`.

    Raises:
        WireError: the counts do not add up to ``k``, or a position is not below ``numel``.
    """
    _need_flat("unpack_block_offsets", buffer, torch.uint8)
    tables = 0 if blocks(numel) == 1 else 4 * blocks(numel)
    if buffer.numel() != tables + 2 * k:
        raise WireError(
            f"block offsets of {k} positions in {numel} elements take {tables + 2 * k} bytes, "
            f"got {buffer.numel()}"
        )
    indices = _call("unpack_block_offsets", buffer, numel, k)
    return _check_range("block offsets", indices, numel)


def pack_int32(indices: torch.Tensor, numel: int) -> torch.Tensor:
    """Positions as little-endian int32: uint8, ``4 * k`` bytes. ``numel`` must be below 2**31."""
    _need_flat("pack_int32", indices, torch.int64)
    return indices.to(torch.int32).view(torch.uint8)


def unpack_int32(buffer: torch.Tensor, numel: int, k: int) -> torch.Tensor:
    """Inverse of :func:`pack_int32`; raises :class:`WireError` for a position out of range."""
    _need_flat("unpack_int32", buffer, torch.uint8)
    if buffer.numel() != 4 * k:
        raise WireError(f"{k} int32 positions take {4 * k} bytes, got {buffer.numel()}")
    return _check_range("int32 positions", buffer.view(torch.int32).to(torch.int64), numel)


def pack_bitmap(indices: torch.Tensor, numel: int) -> torch.Tensor:
    """Positions as one bit an element: uint8, ``ceil(numel / 8)`` bytes, lowest bit first."""
    _need_flat("pack_bitmap", indices, torch.int64)
    return _call("pack_bitmap", indices, numel)


def unpack_bitmap(buffer: torch.Tensor, numel: int, k: int) -> torch.Tensor:
    """Inverse of :func:`pack_bitmap`.

    Raises:
        WireError: the bitmap does not have exactly ``k`` bits set below ``numel``.
    """
    _need_flat("unpack_bitmap", buffer, torch.uint8)
    if buffer.numel() != -(-numel // 8):
        raise WireError(f"a bitmap of {numel} takes {-(-numel // 8)} bytes, got {buffer.numel()}")
    indices = _call("unpack_bitmap", buffer, numel)
    if indices.numel() != k:
        raise WireError(f"bitmap has {indices.numel()} bits set, {k} were announced")
    return _check_range("bitmap", indices, numel)


def _check_range(what: str, indices: torch.Tensor, numel: int) -> torch.Tensor:
    if indices.numel():
        low, high = torch.aminmax(indices)
        if int(low) < 0 or int(high) >= numel:
            raise WireError(f"{what}: position {int(low)}..{int(high)} outside 0..{numel - 1}")
    return indices


def _check_k(name: str, k: int, vector: torch.Tensor) -> None:
    if not 1 <= k <= vector.numel():
        raise ConfigError(f"{name}: k={k} is outside 1..{vector.numel()}")


def _check_sum(
    name: str, gradient: torch.Tensor, residual: torch.Tensor, out: torch.Tensor
) -> None:
    _need_flat(name, out, *_WORK)
    _need_flat(name, residual, out.dtype)
    _need_flat(name, gradient, *_GRADIENTS)
    if not gradient.numel() == residual.numel() == out.numel():
        raise ConfigError(
            f"{name}: gradient, residual and out have {gradient.numel()}, {residual.numel()} and "
            f"{out.numel()} elements"
        )
