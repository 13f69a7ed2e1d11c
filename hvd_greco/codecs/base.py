"""The contract of a codec, and what the compressor tells it of the present step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..buffers import Buffers
from ..layers import Layer, LayerState
from ..payload import Payload, Reduced

Level = float | int | None


@dataclass(frozen=True)
class StepContext:
    """The present step, as a codec may see it.

    Attributes:
        step: how many steps were completed before this one; the same on all ranks.
        rank: this rank within the process set.
        size: ranks in the process set.
        seed: the compressor's seed; the same on all ranks.
        buffers: memory of this rank and layer that is reused from step to step.
    """

    step: int
    rank: int
    size: int
    seed: int
    buffers: Buffers


class Codec(ABC):
    """Turns a vector into a :class:`~hvd_greco.payload.Payload`, and what came back into a mean.

    The life of one layer's step, on every rank:

    1. :meth:`encode` (or :meth:`encode_absent` on a rank without a gradient) gives round 1.
    2. For each further round, :meth:`next_round` turns what came back into the next payload.
    3. :meth:`decode` writes the mean over all ranks.
    4. If all ranks' gradients were finite: :meth:`remove_own` leaves in the residual what was not
       sent, and :meth:`commit` stores what the codec wants to keep.

    Nothing before 4 may change ``state``, so that a step with an overflow leaves no trace.
    """

    #: Short name, used in plans, reports and on the command line.
    name: str
    #: Number of communication rounds.
    rounds: ClassVar[int] = 1
    #: Payloads travel by collectives of our own; False: their kind is ``Kind.CARRIED``.
    private: ClassVar[bool] = True
    #: Whether dropped parts may be fed back (a residual needs ``remove_own``).
    takes_residual: bool = True

    def context(self) -> dict[str, str]:
        """Options that must be alike on all ranks, as text; part of the plan's digest."""
        return {}

    def check_level(self, level: Level) -> Level:
        """Return the level in its normal form.

        Raises:
            ConfigError: the level cannot work with this codec.
        """
        return level

    @abstractmethod
    def wire_bytes(self, layer: Layer, level: Level, size: int) -> int:
        """Exact bytes that a rank hands to collectives in one step, over all rounds.

        The carrier that rides Horovod's own allreduce is the compressor's, and not included.
        """

    @abstractmethod
    def network_bytes(self, layer: Layer, level: Level, size: int) -> int:
        """Bytes a rank must put on the link in one step (see ``payload.network_bytes``)."""

    @abstractmethod
    def encode(
        self,
        layer: Layer,
        state: LayerState,
        vector: torch.Tensor,
        level: Level,
        context: StepContext,
    ) -> Payload:
        """Round 1 from this rank's vector.

        Args:
            layer: which.
            state: read only.
            vector: gradient plus residual, shape ``[d]`` in ``layer.work_dtype``. Valid during
                this call only. A codec that overwrites it must fill in ``Payload.finite``.
            level: what the plan says.
            context: the step.
        """

    @abstractmethod
    def encode_absent(
        self,
        layer: Layer,
        state: LayerState,
        level: Level,
        context: StepContext,
        like: torch.Tensor,
    ) -> Payload:
        """Round 1 of a rank that has no gradient: takes part, and contributes zero.

        ``like`` is any tensor on the layer's device.
        """

    def next_round(
        self,
        layer: Layer,
        state: LayerState,
        level: Level,
        context: StepContext,
        sent: Payload,
        reduced: Reduced,
    ) -> Payload:
        """The payload that follows ``sent``, from what came back of it."""
        raise NotImplementedError(f"{type(self).__name__} has one round")

    @abstractmethod
    def decode(
        self,
        layer: Layer,
        level: Level,
        context: StepContext,
        sent: Payload,
        reduced: Reduced,
        out: torch.Tensor,
    ) -> None:
        """Write the mean over all ranks, from the last round, into ``out``.

        Args:
            out: shape ``[d]`` in ``layer.work_dtype``; its contents are undefined before.
        """

    def remove_own(self, layer: Layer, sent: Payload, vector: torch.Tensor) -> None:
        """Subtract this rank's own contribution C(vector) from ``vector``, in place."""
        raise NotImplementedError(f"{type(self).__name__} has no residual")

    def commit(self, layer: Layer, state: LayerState, sent: Payload) -> None:
        """Store in ``state.slots`` what the codec keeps; called when the step is accepted."""
        return
