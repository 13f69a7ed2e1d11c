"""The CPU backend: Numba-compiled loops over memory, one piece of it on each thread.

A module for each part of the table; every function here is an operation's name in the table
(:mod:`hvd_greco.kernels`), which has checked its arguments. Nothing is compiled before it is first
called with a dtype, and what was compiled is cached on disk (:mod:`.jit`).
"""

from __future__ import annotations

from .elementwise import (  # noqa: F401
    lanes_add,
    mean_magnitude,
    natural_add,
    natural_pack,
    pack_bitmap,
    quantise_lanes,
    sign_add,
    sign_pack,
    unpack_bitmap,
)
from .orthonormal import orthonormalise  # noqa: F401
from .quantisers import (  # noqa: F401
    accumulate_quantise,
    bucket_scales,
    dequantise_add,
    dequantise_mean,
    quantise,
    quantise_pack,
    quantiser_errors,
)
from .selection import (  # noqa: F401
    accumulate,
    accumulate_select,
    accumulate_select_many,
    pack_block_offsets,
    scatter_add,
    take_topk,
    unpack_block_offsets,
)
