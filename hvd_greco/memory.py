"""Memories: what happens to the part of a gradient that was not sent."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from .codecs.base import Codec
from .layers import Layer, LayerState
from .payload import Payload


class Memory(ABC):
    """Makes the vector to encode, and settles accounts once the step is accepted."""

    #: Short name, part of the plan's digest.
    name: str

    @abstractmethod
    def compensate(
        self,
        layer: Layer,
        state: LayerState,
        gradient: torch.Tensor,
        unscale: float,
        out: torch.Tensor,
    ) -> None:
        """Write the vector to encode into ``out`` (shape ``[d]``, work dtype); change nothing else.

        Args:
            layer: which.
            state: read only.
            gradient: shape ``[d]``, the gradient's dtype.
            unscale: 1 / loss scale.
            out: where to.
        """

    @abstractmethod
    def commit(
        self,
        layer: Layer,
        state: LayerState,
        gradient: torch.Tensor,
        unscale: float,
        codec: Codec,
        sent: Payload,
    ) -> None:
        """Keep what ``sent`` left out. ``gradient`` and ``unscale`` are those of the encoding."""


class NoMemory(Memory):
    """What is not sent is lost."""

    name = "none"

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
        codec: Codec,
        sent: Payload,
    ) -> None:
        return


class ErrorFeedback(Memory):
    """What is not sent is added to the next gradient: ``a = g + e``, ``e' = a - C(a)``.

    Costs one fp32 copy of the compressed layers. The residual is in unscaled units, so an AMP
    loss scale may change at any step. It is left untouched until the step is accepted; the sum is
    formed again then, from the same numbers in the same order, instead of being kept: that is
    what allows an exact return to the state before without a second copy.
    """

    name = "error feedback"

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
        codec: Codec,
        sent: Payload,
    ) -> None:
        assert state.residual is not None
        state.residual.add_(gradient, alpha=unscale)
        codec.remove_own(layer, sent, state.residual)
