"""Tables that let one launch serve many vectors: what the structs in the ``.cu`` files hold.

A *segment* is one vector of a launch. Every field of a segment is 8 bytes wide, so that the NumPy
record and the C struct agree without padding. Blocks are numbered through; ``segment_of_block``
says whose each one is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Threads of a block, in every kernel (``THREADS`` in common.cuh).
THREADS = 256
#: Elements that a block of ``accumulate_*`` takes, by the size of an element of ``out``.
ACCUMULATE_TILE = {4: 16_384, 8: 4_096}
#: Bins of the histogram, by the size of an element.
BINS = {4: 2_048, 8: 4_096}
#: Elements that a block of ``select_compact_*`` and ``select_filter_*`` takes.
SELECT_TILE = 4_096
#: Elements for each block of ``select_refine_*``, as far as there are blocks.
REFINE_TILE = 16_384
#: More blocks than this do not make ``select_refine_*`` faster: its list is short.
REFINE_BLOCKS = 512
#: Room for the counts of one digit (``DIGITS`` in select.cu).
DIGITS = 2_048
#: ``(shift, width)`` of each launch of ``select_refine_*``, by the size of an element.
REFINEMENTS = {
    4: ((10, 10), (0, 10)),
    8: ((40, 11), (30, 10), (20, 10), (10, 10), (0, 10)),
}
#: Elements of ``out`` that a block of ``scatter_add_*`` owns.
SCATTER_STRETCH = 8_192

#: ``SelectState`` in select.cu: bytes.
SELECT_STATE = 40

_POINTER = np.uint64


def _words(names: str, **other: type) -> np.dtype:
    return np.dtype([(name, other.get(name, _POINTER)) for name in names.split()])


ACCUMULATE_SEGMENT = _words(
    "gradient residual out length scale counts energies finished first_block blocks",
    scale=np.float64,
)
SELECT_SEGMENT = _words(
    "vector length k counts state digits compact_states filter_states list_index list_value "
    "out_index out_value clear first_block first_refine_block refine_blocks"
)
SCATTER_SEGMENT = _words("out length alpha payloads ranks first_block", alpha=np.float64)
SCATTER_PAYLOAD = _words("index value count")

#: ``orthonormalise.cu``: most rows of a matrix, columns of a partial sum and of each block.
MOST_ROWS = 64
ORTHO_CHUNK = 4_096
ORTHO_TOP_COLUMNS = 16_384
ORTHO_GRAM_COLUMNS = 512
ORTHO_APPLY_COLUMNS = 128
ORTHO_STACK = _words("stack out tops sums weights backs active hard rank length chunks")
#: A matrix that is still ill-conditioned after the first pass and these has to stay so.
ORTHO_REPEATS = 5


@dataclass(frozen=True)
class OrthoShape:
    """Blocks of each launch and scratch of one pass over a stack ``[batch, rank, length]``.

    Attributes:
        top: blocks of ``ortho_top_*``.
        gram: blocks of ``ortho_gram_*``.
        apply: blocks of ``ortho_apply_*``; those of ``ortho_factor`` are ``batch``.
        chunks: partial sums of each matrix.
        tops: 64-bit words, to be zero before each pass.
        sums: 64-bit words, likewise.
        weights: 32-bit words.
    """

    top: int
    gram: int
    apply: int
    chunks: int
    tops: int
    sums: int
    weights: int


def ortho_shape(batch: int, rank: int, length: int) -> OrthoShape:
    """What orthonormalising a stack takes; every size is at least 1, and ``rank`` at most 64."""
    chunks, padded = ceil_div(length, ORTHO_CHUNK), 4 * ceil_div(rank, 4)
    return OrthoShape(
        top=batch * rank * ceil_div(length, ORTHO_TOP_COLUMNS),
        gram=batch * ceil_div(length, ORTHO_GRAM_COLUMNS),
        apply=batch * ceil_div(length, ORTHO_APPLY_COLUMNS),
        chunks=chunks,
        tops=batch * rank,
        sums=batch * chunks * 2 * rank * rank,
        weights=batch * rank * padded * 2,
    )


def ceil_div(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


def block_map(blocks: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """How the blocks of one launch are dealt to segments.

    Args:
        blocks: how many each segment gets.

    Returns:
        ``(segment_of_block, first_block)``: uint32 of shape ``[sum(blocks)]``, and uint64 of shape
        ``[len(blocks)]``.
    """
    counts = np.asarray(blocks, dtype=np.int64)
    of_block = np.repeat(np.arange(len(counts), dtype=np.uint32), counts)
    first = np.concatenate(([0], np.cumsum(counts)[:-1])) if len(counts) else counts
    return of_block, first.astype(np.uint64)


def accumulate_blocks(length: int, itemsize: int) -> int:
    """Blocks of ``accumulate_*`` for a vector."""
    return ceil_div(length, ACCUMULATE_TILE[itemsize])


def select_blocks(length: int) -> int:
    """Blocks of ``select_compact_*`` and of ``select_filter_*`` for a vector."""
    return ceil_div(length, SELECT_TILE)


def refine_blocks(length: int) -> int:
    """Blocks of ``select_refine_*`` for a vector: at least one."""
    return max(1, min(REFINE_BLOCKS, ceil_div(length, REFINE_TILE)))


def scatter_blocks(length: int) -> int:
    """Blocks of ``scatter_add_*`` for a vector."""
    return ceil_div(length, SCATTER_STRETCH)
