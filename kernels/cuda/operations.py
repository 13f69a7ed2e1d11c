"""The CUDA backend: what :mod:`..dispatch` loads when the first CUDA tensor comes.

Functions have the signatures of the table. Arithmetic of other dtypes than the kernels know (an
fp64 gradient for an fp32 residual, say) is left to torch, and so are vectors whose positions 31
bits cannot number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import portable
from . import launch
from .launch import orthonormalise as orthonormalise
from .quantisers import (  # noqa: F401
    accumulate_quantise,
    dequantise_add,
    dequantise_mean,
    natural_add,
    natural_pack,
    quantise,
    quantise_lanes,
    quantise_pack,
)

_MOST = (1 << 31) - 1


def _fits(out: torch.Tensor, gradient: torch.Tensor) -> bool:
    """The kernels add these two: fp64 to fp64, or anything shorter to fp32."""
    return (out.dtype == torch.float64) == (gradient.dtype == torch.float64)


def accumulate(
    out: torch.Tensor,
    gradient: torch.Tensor,
    residual: torch.Tensor,
    scale: float,
    counts: torch.Tensor,
    energies: torch.Tensor,
) -> None:
    if out.numel() and _fits(out, gradient):
        args = ([gradient], [residual], scale, [out], counts[None], energies[None])
        launch.accumulate_many(*args)
    else:
        portable.accumulate(out, gradient, residual, scale, counts, energies)


def accumulate_select(
    out: torch.Tensor,
    gradient: torch.Tensor,
    residual: torch.Tensor,
    scale: float,
    k: int,
    clear: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    if out.numel() > _MOST or not _fits(out, gradient):
        portable.add(out, gradient, residual, scale)
        return take_topk(out, k, clear)
    counts, energies = launch.histograms(1, out)
    launch.accumulate_many([gradient], [residual], scale, [out], counts, energies)
    return launch.select_many([out], [k], counts, clear)[0]


def accumulate_select_many(
    outs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor],
    scales: Sequence[float],
    ks: Sequence[int],
    clear: bool,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    kinds = {(g.dtype, out.dtype, s) for g, out, s in zip(gradients, outs, scales, strict=True)}
    fit = all(_fits(out, gradient) for out, gradient in zip(outs, gradients, strict=True))
    if len(kinds) > 1 or not fit or max(out.numel() for out in outs) > _MOST:
        return [
            accumulate_select(*each, clear)
            for each in zip(outs, gradients, residuals, scales, ks, strict=True)
        ]
    counts, energies = launch.histograms(len(outs), outs[0])
    launch.accumulate_many(gradients, residuals, scales[0], outs, counts, energies)
    return launch.select_many(outs, ks, counts, clear)


def take_topk(vector: torch.Tensor, k: int, clear: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if vector.numel() > _MOST:
        return portable.take_topk(vector, k, clear)
    return launch.select_many([vector], [k], clear=clear)[0]


def scatter_add(
    out: torch.Tensor, payloads: list[tuple[torch.Tensor, torch.Tensor]], alpha: float
) -> None:
    if out.numel():
        launch.scatter_add_many([out], [payloads], alpha)
