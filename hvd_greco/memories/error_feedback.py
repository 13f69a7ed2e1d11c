"""Error feedback (Seide et al. 2014; Stich et al. 2018; Karimireddy et al. 2019)."""

from __future__ import annotations

import torch

from ..layers import Addends, Given, LayerState
from ..registry import register_memory
from .base import Memory, Own


@register_memory("ef", description="what is not sent is added to the next gradient")
class ErrorFeedback(Memory):
    """``a = g + e``, send ``C(a)``, ``e' = a - C(a)``.

    Costs one fp32 copy of the compressed layers. The residual is in unscaled units, so an AMP
    loss scale may change at any step. It is left untouched until the step is accepted, which is
    what allows an exact return to the state before. Until then, what was not sent waits in the
    gradient's own memory, which nobody needs any more; where that does not do (half-precision
    gradients, several rounds) the sum is formed again, from the same numbers in the same order.
    Neither needs a second copy.
    """

    name = "ef"
    copies = 1

    def addends(self, given: Given) -> Addends:
        if given.state.residual is None:
            given.state.residual = torch.zeros(
                given.layer.numel, dtype=given.layer.work_dtype, device=given.gradient.device
            )
        return Addends(given.state.residual, given.gradient, given.unscale)

    def compensate(self, given: Given, out: torch.Tensor) -> None:
        terms = self.addends(given)
        torch.add(terms.residual, terms.gradient, alpha=terms.scale, out=out)

    def commit(self, given: Given, own: Own) -> None:
        assert given.state.residual is not None
        if own.rest is not None:
            given.state.residual.copy_(own.rest)
            return
        given.state.residual.add_(given.gradient, alpha=given.unscale)
        own.add_to(given.state.residual, -1.0)

    def owed(self, state: LayerState) -> torch.Tensor | None:
        return state.residual

    def settle(self, state: LayerState) -> None:
        state.residual = None
