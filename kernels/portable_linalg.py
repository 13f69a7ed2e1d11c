"""Low-rank operations in NumPy and torch: any device, no compiler. The checks are in the table.

Ranks must agree on an orthonormal factor to the last bit, although each computes it for itself:
in batches that differ from rank to rank (a batch is whatever happens to be ready), perhaps with
another number of threads, another backend or another device. BLAS promises none of that: torch.bmm
gives other bits for one matrix alone than for the same matrix among several. So the one place that
adds many numbers up, the Gram matrix, works on whole numbers small enough for every partial sum to
be exact in fp64 (:mod:`.cholesky`); then no order of addition can show. All else is element by
element in a fixed order, where IEEE 754 leaves no choice.
"""

from __future__ import annotations

import numpy as np
import torch

from . import cholesky


def orthonormalise(stack: torch.Tensor) -> torch.Tensor:
    # In NumPy, which costs a third of torch per operation on arrays of this size.
    work = stack.detach().cpu().numpy()
    found, hard = _cholesky_pass(work)
    todo = np.flatnonzero(hard)
    for _ in range(cholesky.PASSES):
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
    alive = np.isfinite(top) & (top > 0)
    exponents = np.frexp(np.where(alive, top, 1.0))[1].astype(np.int64)
    # Powers of two: nothing is rounded, and neither 1e-38 nor 1e38 is squared. (The limit keeps
    # them finite for fp64's smallest numbers, which then have fewer bits.)
    whole = np.ldexp(1.0, np.minimum(cholesky.BITS - exponents, 1000)) * alive
    gram = np.zeros((batch, rank, rank))
    for begin in range(0, length, cholesky.CHUNK):
        part = np.where(alive[:, :, None], work[:, :, begin : begin + cholesky.CHUNK], 0)
        numbers = np.rint(part.astype(np.float64) * whole[:, :, None])
        gram += numbers @ numbers.transpose(0, 2, 1)
    inverse, hard = _inverse_factor(gram)
    return _product(work, inverse, exponents, alive), hard


def _product(
    work: np.ndarray, inverse: np.ndarray, exponents: np.ndarray, alive: np.ndarray
) -> np.ndarray:
    """``inverse @ work`` in the dtype of ``work``, row by row in order."""
    rank = work.shape[1]
    safe = (alive & (np.abs(exponents) <= cholesky.SAFE)).all(axis=1)
    scale = np.ldexp(1.0, np.where(safe[:, None], cholesky.BITS - exponents, cholesky.BITS))
    weights = (inverse * scale[:, None, :]).astype(work.dtype)
    # Dead rows, or very large or small ones: all are brought to below 1 first, dead ones to 0.
    down = np.ldexp(1.0, np.minimum(-exponents, 1000))
    rows = np.array(work)
    for b in np.flatnonzero(~safe):
        clean = np.where(alive[b][:, None], work[b], 0).astype(np.float64)
        rows[b] = clean * down[b][:, None]
    out = weights[:, :, :1] * rows[:, :1]
    for j in range(1, rank):
        out[:, j:] += weights[:, j:, j : j + 1] * rows[:, j : j + 1]
    return out


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
    # Lower half times the row's factor first, and the upper half its mirror image.
    lower = np.tril(gram * length[:, :, None] * length[:, None, :])
    table = np.concatenate((lower + np.tril(lower, -1).transpose(0, 2, 1), beside), axis=2)
    for j in range(rank):
        pivot = table[:, j, j]
        good = pivot > cholesky.DEPENDENT**2
        row = table[:, j] / np.sqrt(np.where(good, pivot, 1.0))[:, None]
        row[~good] = 0.0
        table[:, j] = row
        table[:, j + 1 :] -= row[:, j + 1 : rank, None] * row[:, None, :]
    inverse = table[:, :, rank:]
    hard = np.abs(inverse).reshape(batch, -1).max(axis=1) > cholesky.HARD
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
