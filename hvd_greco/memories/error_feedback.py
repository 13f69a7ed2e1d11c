"""Error feedback (Seide et al. 2014; Stich et al. 2018; Karimireddy et al. 2019)."""

from __future__ import annotations

import torch

from ..layers import Given
from ..registry import register_memory
from .base import Memory, Own


@register_memory("ef", description="what is not sent is added to the next gradient")
class ErrorFeedback(Memory):
    """``a = g + e``, send ``C(a)``, ``e' = a - C(a)``.

    Costs one fp32 copy of the compressed layers. The residual is in unscaled units, so an AMP
    loss scale may change at any step. It is left untouched until the step is accepted; the sum is
    formed again then, from the same numbers in the same order, instead of being kept: that is
    what allows an exact return to the state before without a second copy.
    """

    name = "ef"
    copies = 1

    def compensate(self, given: Given, out: torch.Tensor) -> None:
        if given.state.residual is None:
            given.state.residual = torch.zeros(
                given.layer.numel, dtype=given.layer.work_dtype, device=given.gradient.device
            )
        torch.add(given.state.residual, given.gradient, alpha=given.unscale, out=out)

    def commit(self, given: Given, own: Own) -> None:
        assert given.state.residual is not None
        given.state.residual.add_(given.gradient, alpha=given.unscale)
        own.add_to(given.state.residual, -1.0)
