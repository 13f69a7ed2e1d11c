"""No memory: what is not sent is lost."""

from __future__ import annotations

import torch

from ..codecs.base import Codec, Level
from ..errors import ConfigError
from ..layers import Given
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

    def compensate(self, given: Given, out: torch.Tensor) -> None:
        out.copy_(given.gradient)
        if given.unscale != 1.0:
            out.mul_(given.unscale)

    def commit(self, given: Given, own: Own) -> None:
        return
