"""Natural compression: every element becomes a power of two, and travels as its exponent.

Source: Horváth et al. 2022 (arXiv 1905.10988).
"""

from __future__ import annotations

import math

import torch

from .. import kernels
from ..errors import WireError
from ..layers import Layer
from ..registry import register_codec
from .base import Level, Work
from .quant_wire import GatheredQuantiser, random_key

#: Stands for the exponent of a vector that is not finite.
_NONFINITE = 1 << 20


@register_codec(
    "natural",
    public="Natural",
    memory="none",
    description="every element as a power of two in 8 bits, unbiased",
)
class NaturalCodec(GatheredQuantiser):
    """Every magnitude rounded to one of the two powers of two around it, without bias.

    Natural compression (Horváth et al. 2022): the error depends on each element's own size, not
    on its neighbours', and its variance is at most 1/8 of the element's square. There is no level;
    8 bits an element, a sign and 7 bits of exponent, and 4 bytes a layer: a quarter of dense.

    Exponents count down from that of the layer's largest magnitude, M. What lies more than 126
    powers of two below (M times 1e-38) becomes that smallest power or zero, still without bias;
    so nothing is left out that fp32 could add to M. A value that would be rounded up to a power
    which the dtype cannot hold (2^128) becomes the dtype's largest number, one part in 2^24 less.

    Needs no memory; goes with every one, as its error is less than its input.
    """

    name = "natural"

    def unbiased(self, level: Level) -> bool:
        return True

    def contractive(self, level: Level) -> bool:
        return True

    def expected_error(self, layer: Layer, vector: torch.Tensor, level: Level = None) -> float:
        """E||C(x) - x||^2, summed over elements; those far below the largest are left out."""
        magnitudes = vector.double().abs()
        exponents = torch.frexp(magnitudes).exponent.double() - 1
        lower = torch.where(magnitudes > 0, torch.exp2(exponents), 0.0)
        return float(((magnitudes - lower) * (2 * lower - magnitudes)).sum())

    def sections(self, layer: Layer, level: Level) -> tuple[int, int]:
        return 4, layer.numel

    def write(
        self, work: Work, vector: torch.Tensor, header: torch.Tensor, codes: torch.Tensor
    ) -> torch.Tensor:
        peak = torch.maximum(vector.amax(), -vector.amin())
        finite, (lowest, highest) = peak.isfinite(), _limits(work.layer)
        exponent = torch.frexp(peak).exponent.clamp(lowest, highest).to(torch.int32)
        header.view(torch.int32).copy_(torch.where(finite, exponent, _NONFINITE))
        kernels.natural_pack(vector, exponent, random_key(work), codes)
        return finite

    def add(
        self,
        layer: Layer,
        level: Level,
        header: torch.Tensor,
        codes: torch.Tensor,
        alpha: float,
        out: torch.Tensor,
    ) -> None:
        exponent, (lowest, highest) = int(header.view(torch.int32)), _limits(layer)
        if exponent == _NONFINITE:
            factor = math.nan
        elif lowest <= exponent < highest:
            factor = math.ldexp(1.0, exponent)
        elif exponent == highest:
            factor = torch.finfo(layer.work_dtype).max
        else:
            raise WireError(f"exponent {exponent} received, it is {lowest} to {highest}")
        kernels.natural_add(codes, factor * alpha, out)


def _limits(layer: Layer) -> tuple[int, int]:
    """Least and greatest exponent that is sent. With the least, subnormal vectors fit as well."""
    return (-1022, 1024) if layer.work_dtype == torch.float64 else (-126, 128)
