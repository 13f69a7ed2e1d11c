"""EF21 (Richtárik et al. 2021, arXiv 2106.05203) and its momentum variant for minibatches."""

from __future__ import annotations

import torch

from ..errors import ConfigError
from ..layers import Given, Layer, LayerState
from ..registry import register_memory
from .base import Memory, Own, kept


@register_memory("ef21", description="sends compressed differences to a running estimate")
class EF21(Memory):
    """Every rank keeps an estimate ``g_i`` of its gradient, and all keep their mean.

    Sends ``C(g - g_i)``; then ``g_i += C(.)`` and ``mean += mean C(.)``; the optimizer gets the
    mean. Where error feedback repays a debt later, EF21 converges to the gradient itself: on a
    constant gradient the estimate becomes exact. With minibatches its noise does not average
    out: use ``ef21-sgdm``.

    Costs two fp32 copies of the compressed layers. A rank without a gradient sends the
    difference to a zero gradient.
    """

    name = "ef21"
    copies = 2
    absent_is_zero = True

    def compensate(self, given: Given, out: torch.Tensor) -> None:
        out.copy_(given.gradient).mul_(given.unscale)
        out.sub_(kept(given.state, "ef21.own", given.layer, out))

    def commit(self, given: Given, own: Own) -> None:
        own.add_to(given.state.slots["ef21.own"], 1.0)

    def deliver(self, layer: Layer, state: LayerState, mean: torch.Tensor) -> None:
        estimate = kept(state, "ef21.mean", layer, mean)
        estimate.add_(mean)
        mean.copy_(estimate)


@register_memory("ef21-sgdm", description="EF21 on a momentum average, for minibatches")
class EF21SGDM(EF21):
    """EF21 on ``v = (1 - eta) v + eta g`` (Fatkhullin et al. 2023, arXiv 2305.15155).

    Costs three fp32 copies of the compressed layers.

    Args:
        eta: weight of the new gradient, in (0, 1]; 1 is EF21. 0.1 averages over about ten
            steps. The optimizer's own momentum should be 0.

    Raises:
        ConfigError: ``eta`` is outside (0, 1].
    """

    name = "ef21-sgdm"
    copies = 3

    def __init__(self, eta: float = 0.1) -> None:
        if not 0 < eta <= 1:
            raise ConfigError(f"eta: {eta!r} is not in (0, 1]")
        self.eta = float(eta)

    def describe(self) -> str:
        return f"{self.name}(eta={self.eta:g})"

    def compensate(self, given: Given, out: torch.Tensor) -> None:
        self._average(given, out)
        out.sub_(kept(given.state, "ef21.own", given.layer, out))

    def commit(self, given: Given, own: Own) -> None:
        held = given.state.slots.get("ef21.average")
        if held is None:
            # The average begins at the first gradient; from zero it would be too small for long.
            held = torch.empty(
                given.layer.numel, dtype=given.layer.work_dtype, device=given.gradient.device
            )
        self._average(given, held)
        given.state.slots["ef21.average"] = held
        super().commit(given, own)

    def _average(self, given: Given, out: torch.Tensor) -> None:
        """Write the new average into ``out``, which may be the old one."""
        gradient, unscale = given.gradient, given.unscale
        held = given.state.slots.get("ef21.average")
        if held is None:
            out.copy_(gradient).mul_(unscale)
        else:
            torch.mul(held, 1.0 - self.eta, out=out).add_(gradient, alpha=self.eta * unscale)
