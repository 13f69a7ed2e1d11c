"""The table of operations: what every backend must provide, checked and documented once.

An operation is called here, never on a backend: this package checks shapes, dtypes and ranges and
then calls the backend that serves the tensor's device (:mod:`.dispatch`): Numba on the CPU
(:mod:`.cpu`), CuPy and Numba on CUDA (:mod:`.cuda`), and :mod:`.portable`, in torch and NumPy, for
whatever a device has nothing faster for.

Kernels know nothing of layers, codecs or Horovod, and import nothing of this package but its
errors.
"""

from __future__ import annotations

import math

import torch

from ..errors import ConfigError
from . import portable
from .curves import WIDTHS, quantiser_errors, rank_errors, topk_errors  # noqa: F401
from .dispatch import backend_of as backend_of
from .dispatch import register_backend as register_backend
from .linalg import (  # noqa: F401  (the part of the table that is about low-rank methods)
    add_low_rank,
    low_rank,
    orthonormalise,
    project_columns,
    project_rows,
    shared_uniform,
)
from .quantisers import (  # noqa: F401  (the part of the table that is about quantisers)
    accumulate_quantise,
    bucket_scales,
    dequantise_add,
    dequantise_mean,
    lane_words,
    lanes_add,
    mean_magnitude,
    natural_add,
    natural_pack,
    pack_bits,
    packed_bytes,
    quantise,
    quantise_lanes,
    quantise_pack,
    sign_add,
    sign_pack,
    unpack_bits,
)
from .selection import (  # noqa: F401  (the part of the table that is about sparsifiers)
    BLOCK,
    Histogram,
    accumulate,
    accumulate_select,
    accumulate_select_many,
    blocks,
    pack_bitmap,
    pack_block_offsets,
    pack_int32,
    scatter_add,
    select_sampled,
    select_topk,
    take_topk,
    unpack_bitmap,
    unpack_block_offsets,
    unpack_int32,
)

_YES, _NO = torch.tensor(True), torch.tensor(False)


def all_finite(tensor: torch.Tensor) -> torch.Tensor:
    """0-dim bool on the tensor's device: no inf and no NaN in it. Any shape, also empty.

    To be read only: on the CPU it is one of two constants.
    """
    if not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    # NaN comes through both. One pass, and 20 times as fast on the CPU as isfinite().all() or the
    # largest norm.
    low, high = torch.aminmax(tensor)
    if tensor.device.type == "cpu":
        # Two numbers: of small vectors, five tensor operations would cost more than the pass.
        return _YES if math.isfinite(low.item()) and math.isfinite(high.item()) else _NO
    return low.isfinite() & high.isfinite()


def squared_norm(tensor: torch.Tensor) -> float:
    """Sum of squares, as a Python float; within 1e-5, any shape and dtype.

    For decisions, not for what ranks must agree on to the last bit. fp32 is added up in fp32, which
    takes a sixth of the time, unless that overflows or vanishes.
    """
    if tensor.dtype == torch.float32:
        norm = float(torch.linalg.vector_norm(tensor))
        if 1e-15 < norm < math.inf:
            return norm * norm
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


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
