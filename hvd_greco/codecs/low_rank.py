"""What the low-rank codecs share: ranks, starts drawn alike on all ranks, and warm starts.

A layer's vector is seen as a matrix M of ``layer.matrix`` = n rows by m columns. Factors lie in
memory as ``[r, n]`` and ``[r, m]``, one row for each direction (``kernels.linalg``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from .. import kernels
from ..config import check_level_count
from ..errors import ConfigError, WireError
from ..layers import Layer
from ..payload import Reduced
from .base import Level, Work

_MENU = (1, 2, 4, 8, 16, 32, 64)


def check_rank(level: Level) -> int:
    """A rank: a whole number of at least 1 (a float such as 4.0 from a controller counts)."""
    try:
        return check_level_count("rank", level, minimum=1)
    except ConfigError as error:
        raise ConfigError(f"{error}; 4 is usual") from None


def rank_of(layer: Layer, level: Level) -> int:
    """The rank that a layer gets: no matrix has more directions than rows or columns."""
    assert level is not None
    return min(int(level), *layer.matrix)


def rank_menu(layer: Layer) -> tuple[Level, ...]:
    """Ranks whose two factors are smaller than the matrix."""
    n, m = layer.matrix
    return tuple(rank for rank in _MENU if rank * (n + m) < n * m)


def factor(reduced: Reduced, rank: int, length: int) -> torch.Tensor:
    """What came back, as a factor ``[rank, length]``.

    Raises:
        WireError: another number of elements.
    """
    if reduced.buffer.numel() != rank * length:
        raise WireError(
            f"a factor of {rank} x {length} elements expected, got "
            f"{reduced.buffer.numel()}: ranks run different levels or versions"
        )
    return reduced.buffer.view(rank, length)


def drawn(work: Work, what: str, rows: int, length: int, like: torch.Tensor) -> torch.Tensor:
    """Random rows ``[rows, length]``, the same on all ranks for the same ``what``."""
    words = hashlib.blake2b(
        f"{work.seed}/{work.layer.name}/{what}".encode(), digest_size=16
    ).digest()
    key = (int.from_bytes(words[:8], "little"), int.from_bytes(words[8:], "little"))
    start = torch.empty(0, dtype=work.layer.work_dtype, device=like.device)
    return kernels.shared_uniform(key, rows, length, start)


def resized(
    held: torch.Tensor | None,
    work: Work,
    rank: int,
    length: int,
    like: torch.Tensor,
) -> torch.Tensor | None:
    """A warm start for ``rank`` directions, from one for as many as there were.

    The leading rows stay as they are: they follow the largest singular values. New ones are
    drawn at random and made orthogonal to them.

    Args:
        held: shape ``[r', length]``, or None.

    Returns:
        Shape ``[rank, length]``; None if there is nothing to start from.
    """
    if held is None or held.dim() != 2 or held.shape[1] != length:
        return None
    held = held.to(like.device, work.layer.work_dtype)
    missing = rank - held.shape[0]
    if missing <= 0:
        return held[:rank]
    fresh = drawn(work, f"wider/{held.shape[0]}", missing, length, like)
    both = kernels.orthonormalise(torch.cat((held, fresh)).unsqueeze(0))[0]
    return torch.cat((held, both[held.shape[0] :]))


def scaled_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Rows with their largest magnitudes brought to between 0.5 and 1, exactly.

    Only directions matter in a warm start. Without this, products with it would underflow for
    gradients of 1e-20, and overflow for those of 1e20.

    Returns:
        A new tensor, and which rows are not zero; None if all are zero, or any entry is not
        finite (finite contributions may add up to inf).
    """
    top = rows.abs().amax(dim=1)
    sizes = top.double().cpu().numpy()
    if not sizes.any() or not np.isfinite(sizes).all():
        return None
    # In fp64, where all of fp32's range has an inverse; fp64's smallest numbers stay small.
    scales = np.ldexp(1.0, np.minimum(-np.frexp(sizes)[1], 1000))
    scaled = rows * torch.from_numpy(scales).to(rows.device).unsqueeze(1)
    return scaled.to(rows.dtype), top > 0


#: Share of the energy of the best directions that warm started ones catch.
_USUAL_EFFICIENCY = 0.7


def low_rank_errors(
    work: Work, vector: torch.Tensor, levels: Sequence[Level], start: torch.Tensor | None
) -> list[float]:
    """Errors of this rank's matrix at several ranks, from one step of subspace iteration.

    The leading singular values of all directions together would be the least that can be lost. The
    codecs lose more: they iterate from what they sent a step before, with as many directions as
    they send. By how much is known where there is a warm start, and taken for all ranks alike;
    0.7 is what was measured in trainings (0.4 to 0.95) where there is none.

    Its own directions are used, where the codecs use those of the sum over ranks: the errors are
    those of one rank alone, and less than what it will be left with where ranks differ.

    Args:
        work: the layer.
        vector: its vector.
        levels: ranks.
        start: a right factor to start from, shape ``[r, m]``; None: random.
    """
    (n, m), ranks = work.layer.matrix, [rank_of(work.layer, level) for level in levels]
    most = max(ranks)
    right = resized(start, work, most, m, vector)
    if right is None:
        right = drawn(work, "errors", most, m, vector)
    matrix = vector.view(n, m)
    left = vector.new_empty(most, n)
    kernels.project_rows(right, matrix, left)
    basis = kernels.orthonormalise(left.unsqueeze(0))[0]
    energy = kernels.squared_norm(vector)
    factor = kernels.project_columns(basis, matrix, vector.new_empty(most, m))
    found = energy - kernels.rank_errors(energy, factor).numpy()
    efficiency = _USUAL_EFFICIENCY
    if start is not None:
        held = min(start.shape[0], most)
        # The first rows of the basis span what the warm start alone leads to.
        best = float(found[held - 1])
        reached = kernels.squared_norm(factor[:held])
        efficiency = min(1.0, reached / best) if best > 0 else 1.0
    return [max(0.0, energy - efficiency * float(found[rank - 1])) for rank in ranks]
