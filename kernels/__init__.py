"""The table of operations: what every backend must provide, checked and documented once.

An operation is called here, never on a backend: this module checks shapes, dtypes and ranges and
then calls the backend that serves the tensor's device. Today there is one backend,
:mod:`.portable` (torch and NumPy, any device); a faster one registers the same names for a device
type with :func:`register_backend` and takes over without a change anywhere else.

Kernels know nothing of layers, codecs or Horovod, and import nothing of this package but its
errors.
"""

from __future__ import annotations

import torch

from ..errors import ConfigError, WireError
from . import portable
from .dispatch import call as _call
from .dispatch import need_flat as _need_flat
from .dispatch import register_backend as register_backend
from .linalg import (  # noqa: F401  (the part of the table that is about low-rank methods)
    add_low_rank,
    low_rank,
    orthonormalise,
    project_columns,
    project_rows,
    shared_uniform,
)
from .quantise import (  # noqa: F401  (the part of the table that is about quantisers)
    bucket_scales,
    dequantise_add,
    lane_words,
    lanes_add,
    mean_magnitude,
    natural_add,
    natural_pack,
    pack_bits,
    packed_bytes,
    quantise_lanes,
    quantise_pack,
    sign_add,
    sign_pack,
    unpack_bits,
)

#: Elements covered by one table of 16-bit offsets.
BLOCK = 65_536


def all_finite(tensor: torch.Tensor) -> torch.Tensor:
    """0-dim bool on the tensor's device: no inf and no NaN in it. Any shape, also empty."""
    if not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    # NaN comes through both. One pass, and 20 times as fast on the CPU as isfinite().all() or the
    # largest norm.
    low, high = torch.aminmax(tensor)
    return low.isfinite() & high.isfinite()


def select_topk(vector: torch.Tensor, k: int) -> torch.Tensor:
    """Positions of the ``k`` entries of greatest magnitude.

    The order is that of the magnitude's bit pattern, so it is total and the same everywhere:
    NaN above infinity above every finite value, and among equals the lowest index wins.

    Args:
        vector: fp32 or fp64, shape ``[d]``, contiguous.
        k: how many, ``1 <= k <= d``.

    Returns:
        int64, shape ``[k]``, ascending.
    """
    _need_flat("select_topk", vector, torch.float32, torch.float64)
    if not 1 <= k <= vector.numel():
        raise ConfigError(f"select_topk: k={k} is outside 1..{vector.numel()}")
    return _call("select_topk", vector, k)


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
    _need_flat("select_sampled", vector, torch.float32, torch.float64)
    if not 1 <= k <= vector.numel():
        raise ConfigError(f"select_sampled: k={k} is outside 1..{vector.numel()}")
    return _call("select_sampled", vector, k)


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


def shared_indices(key: tuple[int, int], numel: int, k: int, device: torch.device) -> torch.Tensor:
    """``k`` distinct positions below ``numel``, uniformly drawn, the same wherever ``key`` is.

    Args:
        key: two 64-bit words; ranks that pass the same words get the same positions.
        numel: population.
        k: sample size, ``0 <= k <= numel``.
        device: where the result goes.

    Returns:
        int64, shape ``[k]``, ascending (for locality; the set is what is random).
    """
    if not 0 <= k <= numel:
        raise ConfigError(f"shared_indices: k={k} is outside 0..{numel}")
    return portable.shared_indices(key, numel, k).to(device, non_blocking=True)


def _check_range(what: str, indices: torch.Tensor, numel: int) -> torch.Tensor:
    if indices.numel():
        low, high = torch.aminmax(indices)
        if int(low) < 0 or int(high) >= numel:
            raise WireError(f"{what}: position {int(low)}..{int(high)} outside 0..{numel - 1}")
    return indices
