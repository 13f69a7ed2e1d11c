"""Low-rank methods of the reference backend: Gram-Schmidt and plain products, in fp64 and more."""

from __future__ import annotations

from itertools import islice

import numpy as np
import torch

from .reference_random import words_64
from .reference_selection import store

#: A row nearer to the span of the rows before it, as a share of its length, depends on them.
_DEPENDENT = 2.0**-16


def orthonormalise(stack: torch.Tensor) -> torch.Tensor:
    result = torch.zeros_like(stack)
    for matrix, found in zip(stack, result, strict=True):
        store(found, _gram_schmidt(matrix.numpy().astype(np.longdouble)))
    return result


def _gram_schmidt(rows: np.ndarray) -> np.ndarray:
    basis = np.zeros_like(rows)
    for j, row in enumerate(rows):
        top = np.abs(row).max()
        if not np.isfinite(top) or top == 0:
            continue
        row = row / top
        length = np.sqrt((row * row).sum())
        rest = row / length
        # Twice is enough (Kahan): what rounding leaves of the others the first time goes in the
        # second.
        for _ in range(2):
            for other in basis[:j]:
                rest = rest - (rest * other).sum() * other
        distance = np.sqrt((rest * rest).sum())
        if distance > _DEPENDENT:
            basis[j] = rest / distance
    return basis


def shared_uniform(key: tuple[int, int], numel: int) -> torch.Tensor:
    # The upper 24 bits of a word, as a multiple of 2**-23, from -1 on.
    words = list(islice(words_64(key), numel))
    return torch.tensor([(word >> 40) / 2**23 - 1 for word in words], dtype=torch.float32)


def project_rows(basis: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return _product(out, "rm,nm->rn", basis, matrix)


def project_columns(basis: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return _product(out, "rn,nm->rm", basis, matrix)


def low_rank(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return _product(out, "rn,rm->nm", left, right)


def add_low_rank(
    target: torch.Tensor, left: torch.Tensor, right: torch.Tensor, alpha: float
) -> torch.Tensor:
    product = np.einsum("rn,rm->nm", left.numpy().astype(np.float64), right.numpy())
    store(target, target.numpy() + alpha * product)
    return target


def rank_errors(energy: float, factor: torch.Tensor) -> torch.Tensor:
    values = np.linalg.svd(factor.numpy().astype(np.float64), compute_uv=False)
    squares = np.zeros(factor.shape[0])  # a factor may have more rows than singular values
    squares[: values.size] = values**2
    return torch.from_numpy(np.maximum(energy - np.cumsum(squares), 0))


def _product(out: torch.Tensor, sum_of: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    store(out, np.einsum(sum_of, a.numpy().astype(np.float64), b.numpy().astype(np.float64)))
    return out
