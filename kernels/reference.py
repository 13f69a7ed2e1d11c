"""The reference backend: every operation of the table in NumPy, slow and obvious, the oracle.

Written from the contract in the table and from nothing else. Where a result is discrete (which
positions, codes, packed bytes, lanes, random words, and the sum that ``accumulate`` rounds twice)
every backend has these bits. Elsewhere this is arithmetic in fp64 or more, and :data:`TOLERANCES`
says how far from it a backend may be.

It may serve for real: ``register_backend("cpu", reference)``.
"""

from __future__ import annotations

from .reference_linalg import (  # noqa: F401
    add_low_rank,
    low_rank,
    orthonormalise,
    project_columns,
    project_rows,
    rank_errors,
    shared_uniform,
)
from .reference_quant import (  # noqa: F401
    accumulate_quantise,
    bucket_scales,
    dequantise_add,
    dequantise_mean,
    lanes_add,
    mean_magnitude,
    natural_add,
    natural_pack,
    pack_bits,
    quantise,
    quantise_lanes,
    quantise_pack,
    quantiser_errors,
    sign_add,
    sign_pack,
    unpack_bits,
)
from .reference_selection import (  # noqa: F401
    accumulate,
    accumulate_select,
    accumulate_select_many,
    all_finite,
    pack_bitmap,
    pack_block_offsets,
    pack_int32,
    scatter_add,
    select_sampled,
    select_topk,
    shared_indices,
    take_topk,
    topk_errors,
    unpack_bitmap,
    unpack_block_offsets,
    unpack_int32,
)

#: Results that are rounded on the way: how far a backend may be from this one for fp32 and for
#: fp64, in units in the last place of the largest number that went into an entry (for sums of
#: many: of their magnitudes' sum). Whatever is not here agrees to the last bit.
TOLERANCES: dict[str, tuple[float, float]] = {
    # Added up one by one in fp64: the error may grow with how many there are.
    "accumulate.energies": (2.0**17, 2.0**17),
    "scatter_add.out": (8, 8),
    "bucket_scales.l2": (64, 2.0**13),
    "quantise.l2": (64, 2.0**13),
    "quantise.vector": (2, 2),
    "quantise.whole": (4, 4),  # what is left and what was sent
    "accumulate_quantise.l2": (64, 2.0**13),
    "accumulate_quantise.vector": (2, 2),
    "accumulate_quantise.whole": (4, 4),
    "dequantise_mean.out": (8, 8),
    "dequantise_add.out": (2, 2),
    "lanes_add.out": (3, 3),
    "natural_add.out": (1, 1),
    "mean_magnitude.mean": (2, 2.0**13),  # added up one by one as well
    "sign_add.out": (2, 2),
    # Squared errors, fp64: beside the whole energy, with the vector's precision.
    "topk_errors.errors": (64, 64),
    "rank_errors.errors": (2.0**17, 2.0**17),
    "quantiser_errors.float32": (2.0**32, 2.0**32),
    "quantiser_errors.float64": (256, 256),
    # What fp64 has beyond fp32 is not promised.
    "orthonormalise.rows": (64, 2.0**30),
    "project_rows.out": (64, 64),
    "project_columns.out": (64, 64),
    "low_rank.out": (8, 8),
    "add_low_rank.out": (8, 8),
}
#: What CUDA kernels add up otherwise: squares in fixed point, so that no order of threads shows.
CUDA_TOLERANCES: dict[str, tuple[float, float]] = {
    "accumulate.energies": (2.0**33, 2.0**33),  # 1e-6 of a bin's energy
}
