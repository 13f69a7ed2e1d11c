"""The table's error curves: what every level of a method would lose of a vector, from one pass.

All are squared errors, ``||C(x) - x||^2`` summed over the elements, as Python-side fp64 tensors:
they are what a controller weighs against bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import ConfigError
from .dispatch import call, need_flat
from .quantisers import _check_bucket, _check_norm
from .selection import Histogram

#: Bit widths whose errors :func:`quantiser_errors` gives.
WIDTHS = (2, 3, 4, 5, 6, 7, 8)


def topk_errors(histogram: Histogram, ks: Sequence[int]) -> torch.Tensor:
    """What keeping the k largest entries loses, for every k, from a vector's histogram.

    Exact where k entries fill whole bins; in between, the entries of a bin count as equal. A bin
    is an eighth of an octave in fp32, so a share of one is off by less than a quarter of it.

    Args:
        histogram: of :func:`~.selection.accumulate`.
        ks: numbers of entries kept, each 0 to d.

    Returns:
        fp64, shape ``[len(ks)]``.

    Raises:
        ConfigError: a k that the vector does not have.
    """
    numel = int(histogram.counts.sum())
    for k in ks:
        if not 0 <= k <= numel:
            raise ConfigError(f"topk_errors: k={k} is outside 0..{numel}")
    # From the largest bin down: entries and energy above each, and in it.
    counts = histogram.counts.flip(0).to(torch.float64)
    energies = histogram.energies.flip(0)
    above = counts.cumsum(0) - counts
    wanted = torch.tensor(list(ks), dtype=torch.float64, device=counts.device)
    place = (torch.searchsorted(above, wanted, right=True) - 1).clamp_(min=0)
    share = ((wanted - above[place]) / counts[place].clamp(min=1)).clamp_(0, 1)
    # Summed from the smallest up: what is lost may be tiny beside the whole.
    below = energies.flip(0).cumsum(0).flip(0) - energies
    return below[place] + (1 - share) * energies[place]


def quantiser_errors(vector: torch.Tensor, bucket: int, norm: str, nearest: bool) -> torch.Tensor:
    """The expected error of quantising at 2 to 8 bits, all widths in one pass.

    Args:
        vector: fp32 or fp64, shape ``[d]``, contiguous, finite.
        bucket: as for :func:`~.quantisers.bucket_scales`.
        norm: as for :func:`~.quantisers.bucket_scales`.
        nearest: rounded to nearest; else at random, whose error is the expected one.

    Returns:
        fp64, shape ``[7]``, for :data:`WIDTHS`.
    """
    need_flat("quantiser_errors", vector, torch.float32, torch.float64)
    _check_bucket("quantiser_errors", bucket)
    _check_norm("quantiser_errors", norm)
    errors: torch.Tensor = call("quantiser_errors", vector, bucket, norm, nearest)
    return errors


def rank_errors(energy: float, factor: torch.Tensor) -> torch.Tensor:
    """What a low-rank approximation loses, for every rank up to that of a factor.

    With ``factor = P^T M`` for an orthonormal P of r columns (one subspace iteration), the singular
    values of the factor stand for the leading ones of M: ``||M||^2 - sum of their squares``.

    Args:
        energy: ``||M||^2``.
        factor: fp32 or fp64, shape ``[r, m]``.

    Returns:
        fp64, shape ``[r]``: errors at ranks 1 to r, never increasing, at least 0. They are upper
        bounds: the iteration can only have missed energy.
    """
    if factor.dim() != 2 or not factor.is_floating_point():
        raise ConfigError(
            f"rank_errors: needs a matrix [r, m], got {factor.dtype} of shape {tuple(factor.shape)}"
        )
    rows = factor.to(torch.float64)
    squares = torch.linalg.eigvalsh(rows @ rows.t()).flip(0).clamp_(min=0)
    return (energy - squares.cumsum(0)).clamp_(min=0)
