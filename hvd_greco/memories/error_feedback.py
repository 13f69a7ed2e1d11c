"""Error feedback (Seide et al. 2014; Stich et al. 2018; Karimireddy et al. 2019)."""

from __future__ import annotations

import torch

from ..layers import Layer, LayerState
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

    def compensate(
        self,
        layer: Layer,
        state: LayerState,
        gradient: torch.Tensor,
        unscale: float,
        out: torch.Tensor,
    ) -> None:
        if state.residual is None:
            state.residual = torch.zeros(
                layer.numel, dtype=layer.work_dtype, device=gradient.device
            )
        torch.add(state.residual, gradient, alpha=unscale, out=out)

    def commit(
        self,
        layer: Layer,
        state: LayerState,
        gradient: torch.Tensor,
        unscale: float,
        own: Own,
    ) -> None:
        assert state.residual is not None
        state.residual.add_(gradient, alpha=unscale)
        own.add_to(state.residual, -1.0)
