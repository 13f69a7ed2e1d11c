"""The contract of a codec, and what the compressor tells it of the present step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..buffers import Buffers
from ..layers import Addends, Layer, LayerState
from ..payload import Kind, Payload, Reduced, network_bytes

Level = float | int | None


@dataclass(frozen=True)
class Work:
    """One layer in the present step, as a codec may see it.

    Attributes:
        layer: which.
        level: what the plan says.
        state: what persists; only :meth:`Codec.commit` may change it.
        step: how many steps were completed before this one; the same on all ranks.
        rank: this rank within the process set.
        size: ranks in the process set.
        seed: the compressor's seed; the same on all ranks.
        buffers: memory of this rank and layer that is reused from step to step.
    """

    layer: Layer
    level: Level
    state: LayerState
    step: int
    rank: int
    size: int
    seed: int
    buffers: Buffers


@dataclass(frozen=True)
class Turn:
    """A layer between two rounds: its work, and what came back of ``sent``.

    Attributes:
        vector: gives this rank's vector again, as it was given to ``encode`` (zeros on a rank
            without a gradient). It is formed anew at each call, in memory that all layers share:
            valid until it is called for any layer again.
    """

    work: Work
    sent: Payload
    reduced: Reduced
    vector: Callable[[], torch.Tensor]


class Codec(ABC):
    """Turns a vector into a :class:`~hvd_greco.payload.Payload`, and what came back into a mean.

    The life of one layer's step, on every rank:

    1. :meth:`encode` (or :meth:`encode_absent` on a rank without a gradient) gives round 1.
    2. For each further round, :meth:`next_round` turns what came back into the next payload.
    3. If all ranks' gradients were finite, the memory stores what was not sent, by way of
       :meth:`add_own`, and :meth:`commit` stores what the codec wants to keep.
    4. :meth:`decode` writes the mean over all ranks.

    Nothing before 3 may change ``work.state``, so that a step with an overflow leaves no trace.

    Attributes:
        name: short name, used in plans and reports.
        rounds: number of communication rounds.
        kind: how the payload of the first round travels; the only one, in most codecs.
        leaves_rest: :meth:`encode_sum` leaves in the vector what it did not send.
        encodes_many: :meth:`encode_many` takes fewer launches on a GPU than one call for each.
        errors_of_parts: :meth:`errors` can be asked for some of a layer's entries, since they
            do not depend on its shape. Others see all of it, and less often.
    """

    name: str
    rounds: int = 1
    kind: Kind = Kind.GATHER
    leaves_rest: bool = False
    encodes_many: bool = False
    errors_of_parts: bool = False

    def adapt_to(self, memory: str) -> None:
        """Learn which memory the codec works with, before anything else is asked of it."""
        return

    def context(self) -> dict[str, str]:
        """Options that must be alike on all ranks, as text; part of the plan's digest."""
        return {}

    def check_level(self, level: Level) -> Level:
        """Return the level in its normal form.

        Raises:
            ConfigError: the level cannot work with this codec.
        """
        return level

    def menu(self, layer: Layer) -> tuple[Level, ...]:
        """Levels worth considering for a layer, from fewest bytes to most."""
        return ()

    def suits(self, layer: Layer, level: Level) -> bool:
        """Whether the codec may serve the layer at all, whatever its bytes are on average."""
        return True

    def unbiased(self, level: Level) -> bool:
        """Whether E[C(x)] = x: such codecs need no memory."""
        return False

    def contractive(self, level: Level) -> bool:
        """Whether ||C(x) - x||^2 <= (1 - a) ||x||^2 for some a > 0: what error feedback needs."""
        return True

    def errors(self, work: Work, vector: torch.Tensor, levels: Sequence[Level]) -> list[float]:
        """``||C(x) - x||^2`` at every level, from as few passes over the vector as can be.

        What a controller weighs against bytes: an expected or estimated value where the codec
        draws random numbers, or where an exact one would cost as much as encoding.

        Args:
            work: the layer in this step; its level is of no account.
            vector: shape ``[d]`` in ``layer.work_dtype``, finite; comes back unchanged. Of large
                layers it is a part of the entries if the codec has ``errors_of_parts``.
            levels: from :meth:`menu`, or any that :meth:`check_level` allows.

        Raises:
            NotImplementedError: the codec has no levels to weigh.
        """
        raise NotImplementedError(f"{type(self).__name__} does not tell its errors")

    def effort(self, layer: Layer, level: Level, size: int) -> float:
        """What the time for encoding and decoding grows with, beside the number of elements.

        In any unit; by default the bytes of all ranks' payloads, which are decoded one by one.
        """
        return float(self.wire_bytes(layer, level, size)) * (
            size if self.kind is Kind.GATHER else 1
        )

    @abstractmethod
    def wire_bytes(self, layer: Layer, level: Level, size: int) -> int:
        """Bytes that a rank hands to collectives in one step, over all rounds.

        The most it can be, where ranks or factors take turns (:meth:`step_bytes` is exact then) or
        the data decides (say so in the docs). The carrier that rides Horovod's own allreduce is
        the compressor's, and not included.
        """

    def step_bytes(self, work: Work) -> int:
        """Bytes that this rank hands to collectives in that very step, if it has a gradient."""
        return self.wire_bytes(work.layer, work.level, work.size)

    def outgoing_bytes(self, layer: Layer, level: Level, size: int) -> int:
        """What any rank hands at most to collectives beyond its host; the same on all ranks."""
        return self.wire_bytes(layer, level, size)

    def network_bytes(self, layer: Layer, level: Level, size: int) -> int:
        """Bytes a rank must put on the link in one step (see ``payload.network_bytes``).

        The default is right where all rounds are of one kind.
        """
        return network_bytes(self.kind, self.wire_bytes(layer, level, size), size)

    @abstractmethod
    def encode(self, work: Work, vector: torch.Tensor) -> Payload:
        """Round 1 from this rank's vector.

        Args:
            work: the layer in this step; its state is read only.
            vector: gradient plus what the memory adds, shape ``[d]`` in ``layer.work_dtype``.
                Valid during this call only. A codec that overwrites it must fill in
                ``Payload.finite``.
        """

    def encode_sum(self, work: Work, addends: Addends, vector: torch.Tensor) -> Payload:
        """:meth:`encode` of a sum that is still to be formed; override to do both in one pass.

        Args:
            work: as for :meth:`encode`.
            addends: what the memory adds up.
            vector: where to, shape ``[d]``; may be the memory of ``addends.gradient``. It stays
                ours until the step ends if the payload says that it holds the ``rest``.
        """
        torch.add(addends.residual, addends.gradient, alpha=addends.scale, out=vector)
        return self.encode(work, vector)

    def encode_many(
        self, works: Sequence[Work], addends: Sequence[Addends], vectors: Sequence[torch.Tensor]
    ) -> list[Payload]:
        """:meth:`encode_sum` of several layers at once, with the same results."""
        return [self.encode_sum(*each) for each in zip(works, addends, vectors, strict=True)]

    @abstractmethod
    def encode_absent(self, work: Work, like: torch.Tensor) -> Payload:
        """Round 1 of a rank that has no gradient: takes part, and contributes zero.

        ``like`` is any tensor on the layer's device.
        """

    def next_round(self, turn: Turn) -> Payload:
        """The payload that follows ``turn.sent``, from what came back of it."""
        raise NotImplementedError(f"{type(self).__name__} has one round")

    def next_rounds(self, turns: Sequence[Turn]) -> list[Payload]:
        """:meth:`next_round` of several layers at once; override to batch equal shapes."""
        return [self.next_round(turn) for turn in turns]

    @abstractmethod
    def decode(self, work: Work, sent: Payload, reduced: Reduced, out: torch.Tensor) -> None:
        """Write the mean over all ranks, from the last round, into ``out``.

        Args:
            sent: the last round's payload of this rank.
            reduced: what came back of it. A CARRIED payload comes back as the mean (times what
                the user's ``op`` asks for, so decoding is linear in it), a SUM as the sum.
            out: shape ``[d]`` in ``layer.work_dtype``; its contents are undefined before.
        """

    def add_own(self, work: Work, sent: Payload, vector: torch.Tensor, alpha: float) -> None:
        """``vector += alpha * C``, with C this rank's own contribution, in place.

        The default decodes the rank's own payload as if it were alone, which is right for codecs
        of one round. ``sent`` is the last round's payload.
        """
        own = torch.empty_like(vector)
        self.decode(work, sent, Reduced(sent.kind, sent.buffer, 1), own)
        vector.add_(own, alpha=alpha)

    def clear_own(self, sent: Payload, vector: torch.Tensor) -> None:
        """Zero ``vector`` wherever this rank sent something; for sparse codecs (DGC's masking)."""
        raise NotImplementedError(f"{type(self).__name__} sends every entry")

    def commit(self, work: Work, sent: Payload, reduced: Reduced) -> None:
        """Store in ``work.state.slots`` what the codec keeps.

        Called when the step is accepted, on every rank, with or without a gradient: what is kept
        must follow from what all ranks know, if it is to be the same on all of them.
        """
        return
