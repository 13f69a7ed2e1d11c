"""No memory: what is not sent is lost."""

from __future__ import annotations

import torch

from ..codecs.base import Codec, Level
from ..errors import ConfigError
from ..layers import Layer, LayerState
from ..registry import register_memory
from .base import Memory, Own


@register_memory("none", description="what is not sent is lost: for unbiased codecs")
class NoMemory(Memory):
    """Sends the gradient itself. For codecs whose result is right on average."""

    name = "none"

    def check(self, codec: Codec, level: Level) -> None:
        if not codec.unbiased(level):
            raise ConfigError(
                f"memory: 'none' does not go with {codec.name!r} at level {level}: the codec is "
                "biased, so what it drops would be dropped in every step and never arrive. Use "
                "memory='ef' (error feedback) or 'ef21'"
            )

    def compensate(
        self,
        layer: Layer,
        state: LayerState,
        gradient: torch.Tensor,
        unscale: float,
        out: torch.Tensor,
    ) -> None:
        out.copy_(gradient)
        if unscale != 1.0:
            out.mul_(unscale)

    def commit(
        self,
        layer: Layer,
        state: LayerState,
        gradient: torch.Tensor,
        unscale: float,
        own: Own,
    ) -> None:
        return
