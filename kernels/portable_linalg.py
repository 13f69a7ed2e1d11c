"""Low-rank operations in NumPy and torch: any device, no compiler. The checks are in the table.

Ranks must agree on an orthonormal factor to the last bit, although each computes it for itself:
in batches that differ from rank to rank (a batch is whatever happens to be ready), perhaps with
another number of threads or on another device. BLAS promises none of that: torch.bmm gives other
bits for one matrix alone than for the same matrix among several. So the two places that add many
numbers up, the Gram matrix and the product with the inverse factor, work on integers in fp64 that
are small enough for every partial sum to be exact; then no order of addition can show. All else
is element by element, where IEEE 754 leaves no choice.
"""

from __future__ import annotations

import numpy as np
import torch

#: Entries become integers of up to this many bits, relative to the largest of their row: a little
#: more than fp32 holds.
_BITS = 26
#: Low bits of an entry that are multiplied apart from the high ones.
_LOW = 13
#: Columns of one exact partial sum: 2**(26 - 13) * 2**26 * 2**12 = 2**51. Their sums are added in
#: order, so every backend must use the same number.
_CHUNK = 1 << 12
#: A row whose distance from the span of the rows before it is less than this share of its length
#: depends on them: fp32 entries say no more.
_DEPENDENT = 2.0**-16
#: Growth of the inverse factor from which rounding in fp64 could show in fp32: go over it again.
_HARD = 2.0**12
_PASSES = 5


def orthonormalise(stack: torch.Tensor) -> torch.Tensor:
    # In NumPy, which costs a third of torch per operation on arrays of this size.
    work = stack.detach().cpu().numpy()
    found, hard = _cholesky_pass(work)
    todo = np.flatnonzero(hard)
    for _ in range(_PASSES):
        if not todo.size:
            break
        # Each matrix is gone over as often as it needs by itself, whatever else is in the stack.
        found[todo], hard = _cholesky_pass(found[todo])
        todo = todo[hard]
    return torch.from_numpy(found).to(stack.device)


def _cholesky_pass(work: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One Cholesky QR, and for which matrices it was too ill-conditioned for one to do."""
    batch, rank, length = work.shape
    top = np.maximum(work.max(axis=2), -work.min(axis=2)).astype(np.float64)
    finite = np.isfinite(top)
    if not finite.all():
        work = np.where(finite[:, :, None], work, work.dtype.type(0))
        top = np.where(finite, top, 0.0)
    # Powers of two: nothing is rounded, and neither 1e-38 nor 1e38 is squared. (The limit keeps
    # the factor finite for fp64's smallest numbers, which then have fewer bits.)
    scale = np.ldexp(1.0, np.minimum(_BITS - np.frexp(top)[1], 1000))[:, :, None]

    width = min(length, _CHUNK)
    whole = np.empty((batch, rank, width))
    parts = np.empty((batch, 2 * rank, width))
    sums = np.zeros((batch, 2 * rank, rank))

    def chunk(begin: int) -> tuple[np.ndarray, np.ndarray]:
        """Entries as whole numbers, and room for twice as many."""
        given = work[:, :, begin : begin + _CHUNK]
        numbers, room = whole[:, :, : given.shape[2]], parts[:, :, : given.shape[2]]
        np.multiply(given, scale, out=numbers)
        return np.rint(numbers, out=numbers), room

    for begin in range(0, length, _CHUNK):
        numbers, both = chunk(begin)
        high, low = both[:, :rank], both[:, rank:]
        np.rint(np.multiply(numbers, 2.0**-_LOW, out=high), out=high)
        np.subtract(numbers, np.multiply(high, 2.0**_LOW, out=low), out=low)
        sums += both @ numbers.transpose(0, 2, 1)
    inverse, hard = _inverse_factor(sums[:, :rank] * 2.0**_LOW + sums[:, rank:])

    # The inverse factor as integers as well, in two parts; each row has a power of two of its own.
    bits = 53 - _BITS - (rank - 1).bit_length()
    exponent = np.frexp(np.abs(inverse).max(axis=2))[1][:, :, None]
    scaled = np.ldexp(inverse, bits - exponent)
    first = np.rint(scaled)
    second = np.rint((scaled - first) * 2.0**bits)
    weights = np.concatenate((first, second), axis=1)
    back = np.ldexp(1.0, exponent - bits)
    rows = np.empty_like(work)
    for begin in range(0, length, _CHUNK):
        numbers, both = chunk(begin)
        np.matmul(weights, numbers, out=both)
        high, low = both[:, :rank], both[:, rank:]
        high += np.multiply(low, 2.0**-bits, out=low)
        np.multiply(high, back, out=rows[:, :, begin : begin + _CHUNK], casting="same_kind")
    return rows, hard


def _inverse_factor(gram: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inverses of the lower Cholesky factors of ``[b, r, r]``, with zeros for dependent rows.

    Gaussian elimination beside a unit matrix, a row of all matrices at a time: unlike LAPACK it
    goes on behind a zero pivot, and its rounding does not depend on the library.
    """
    batch, rank = gram.shape[:2]
    square = np.einsum("bii->bi", gram)
    alive = square > 0
    length = 1.0 / np.sqrt(np.where(alive, square, 1.0)) * alive
    beside = np.broadcast_to(np.eye(rank), gram.shape)
    table = np.concatenate((gram * length[:, :, None] * length[:, None, :], beside), axis=2)
    for j in range(rank):
        pivot = table[:, j, j]
        good = pivot > _DEPENDENT**2
        row = table[:, j] / np.sqrt(np.where(good, pivot, 1.0))[:, None]
        row[~good] = 0.0
        table[:, j] = row
        table[:, j + 1 :] -= row[:, j + 1 : rank, None] * row[:, None, :]
    inverse = table[:, :, rank:]
    hard = np.abs(inverse).reshape(batch, -1).max(axis=1) > _HARD
    return inverse * length[:, None, :], hard


def shared_uniform(key: tuple[int, int], numel: int) -> torch.Tensor:
    # Raw words, since NumPy promises the same ones in every release (not so for distributions).
    words = np.random.Philox(key=np.array(key, dtype=np.uint64)).random_raw(numel)
    values = (words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
    return torch.from_numpy(values)


def project_rows(basis: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    # `out=` also keeps autocast from turning the product into one of half precision.
    return torch.mm(basis, matrix.t(), out=out)


def project_columns(basis: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.mm(basis, matrix, out=out)


def low_rank(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    if out.data_ptr() % 64 == 0:
        return torch.mm(left.t(), right, out=out)
    # BLAS may round otherwise where the result lies otherwise in memory, and that may differ
    # between ranks.
    aligned = torch.empty_like(out)
    return out.copy_(torch.mm(left.t(), right, out=aligned))


def add_low_rank(
    target: torch.Tensor, left: torch.Tensor, right: torch.Tensor, alpha: float
) -> torch.Tensor:
    return target.addmm_(left.t(), right, alpha=alpha)
