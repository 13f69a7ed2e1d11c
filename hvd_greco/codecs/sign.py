"""Sign compression with error feedback: one bit for each element.

Source: Seide et al. 2014; the scale and the proof, Karimireddy et al. 2019 (arXiv 1901.09847).
"""

from __future__ import annotations

import torch

from .. import kernels
from ..layers import Layer
from ..registry import register_codec
from .base import Level, Work
from .quant_wire import GatheredQuantiser


@register_codec(
    "sign",
    public="Sign",
    memory="ef",
    description="one bit for each element, error feedback",
)
class SignCodec(GatheredQuantiser):
    """Every element's sign, times the mean magnitude of the layer.

    1-bit SGD with error feedback (Seide et al. 2014; Karimireddy et al. 2019): the mean magnitude
    is what makes the step right on average over the layer, the residual what makes it right for
    each element over time. There is no level: 1 bit an element and one number a layer, about 1/32
    of dense. One fp32 copy of the compressed layers is kept (the residual).

    The sign of zero counts as positive; a layer of zeros has scale 0 and stays exactly zero. The
    payloads of all ranks are gathered, and the mean is that of scaled signs, not a majority vote.

    Biased, so ``memory="none"`` is refused. Not scale-free within a layer: where magnitudes differ
    widely between parts of one layer, small elements get steps as large as everybody's until
    their residual turns the sign; warm-up and a lower learning rate help.
    """

    name = "sign"

    def sections(self, layer: Layer, level: Level) -> tuple[int, int]:
        return layer.work_dtype.itemsize, kernels.packed_bytes(layer.numel, 1)

    def expected_error(self, layer: Layer, vector: torch.Tensor, level: Level = None) -> float:
        """||C(x) - x||^2 = ||x||^2 - ||x||_1^2 / d."""
        x = vector.double()
        return float(x.square().sum() - x.abs().sum() ** 2 / x.numel())

    def write(
        self, work: Work, vector: torch.Tensor, header: torch.Tensor, codes: torch.Tensor
    ) -> torch.Tensor:
        scale = kernels.mean_magnitude(vector)
        header.view(work.layer.work_dtype).copy_(scale)
        kernels.sign_pack(vector, codes)
        return scale.isfinite()

    def add(
        self,
        layer: Layer,
        level: Level,
        header: torch.Tensor,
        codes: torch.Tensor,
        alpha: float,
        out: torch.Tensor,
    ) -> None:
        kernels.sign_add(codes, header.view(layer.work_dtype)[0], alpha, out)
