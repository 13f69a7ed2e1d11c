"""One step's unfinished layers, and the private collectives that they go through."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .codecs.base import Codec, Level, StepContext, Turn
from .exchange.base import Group
from .identity import Slot
from .payload import Kind, Payload, Reduced, Scope
from .telemetry import Ledger

#: Pause between looks at unfinished rounds; Horovod itself acts once a millisecond.
_POLL_SECONDS = 1e-4


class Pending:
    """One layer between ``compress`` and ``decompress``; what Horovod keeps as the context."""

    __slots__ = (
        "check", "codec", "context", "fresh", "gradient", "level", "round", "sent", "slot",
        "ticket", "unscale",
    )  # fmt: skip

    context: StepContext
    sent: Payload

    def __init__(
        self, slot: Slot, gradient: torch.Tensor, codec: Codec, level: Level, unscale: float
    ) -> None:
        self.slot = slot
        self.gradient = gradient
        self.codec = codec
        self.level = level
        #: 1 / loss scale of this step.
        self.unscale = unscale
        #: This rank has a new gradient, and settles accounts when the step is accepted.
        self.fresh = True
        #: The gradient's sum, if it was reduced before.
        self.check: float | None = None
        self.round = 1
        self.ticket: Any = None

    @property
    def owes_rounds(self) -> bool:
        """Rounds after the present one are still to come."""
        return self.round < self.codec.rounds

    @property
    def private(self) -> bool:
        """The payload travels by our own collectives."""
        return self.sent.kind is not Kind.CARRIED


class Rounds:
    """The private exchanges of one compressor: started in hooks, moved on whenever possible.

    Args:
        group: our ranks.
        prefix: start of the names of our collectives.
        ledger: where bytes are counted.
        vector: forms a layer's vector again, for codecs that need it in a later round.
    """

    def __init__(
        self,
        group: Group,
        prefix: str,
        ledger: Ledger,
        vector: Callable[[Pending], torch.Tensor],
    ) -> None:
        self._group = group
        self._vector = vector
        self._prefix = prefix
        self._ledger = ledger
        #: Layer name -> layer between compress and decompress, in the order of compress.
        self.pending: dict[str, Pending] = {}
        #: Those of them whose last round was not submitted yet.
        self._owing: list[Pending] = []

    def submit(self, pending: Pending) -> None:
        """Start the collective of a private layer's present round."""
        # A rank outside the process set submits nothing: its decompress will say what is wrong.
        if self._group.rank < 0:
            return
        name = pending.slot.layer.name
        pending.ticket = self._group.submit(f"{self._prefix}/{name}/{pending.round}", pending.sent)
        self._count(name, pending.sent)
        if pending.round == 1 and pending.owes_rounds:
            self._owing.append(pending)

    def _count(self, layer: str, sent: Payload) -> None:
        size = self._group.part_size(sent.scope)
        if sent.kind is Kind.NOTHING or (size == 1 and sent.scope is not Scope.ALL):
            return
        # What stays inside a host is handed to a collective, but put on no link.
        link = 1 if sent.scope is Scope.LOCAL else size
        self._ledger.add(layer, sent.kind, sent.nbytes, link)

    def advance(self) -> bool:
        """Move on every multi-round exchange whose present round is done; never waits.

        Returns whether this rank still owes a round to the others.
        """
        while ready := [p for p in self._owing if self._group.poll(p.ticket)]:
            by_codec: dict[int, list[Pending]] = {}
            for pending in ready:
                by_codec.setdefault(id(pending.codec), []).append(pending)
            for batch in by_codec.values():
                self._next_rounds(batch)
            self._owing = [pending for pending in self._owing if pending.owes_rounds]
        return bool(self._owing)

    def finish(self, pending: Pending) -> Reduced:
        """Wait for the last round of a private layer.

        Ranks finish layers in different orders, so a rank that simply waited for one layer could
        hold back the next round of the very layer that another rank waits for. While any round
        is owed, every layer moves on.
        """
        while self.advance():
            if not pending.owes_rounds and self._group.poll(pending.ticket):
                break
            time.sleep(_POLL_SECONDS)
        return self._group.wait(pending.ticket)

    def abandon(self) -> None:
        """Bring what was started to its end, so that its names are free again, and forget it."""
        for pending in self.pending.values():
            if pending.ticket is not None:
                self.finish(pending)
        self.pending = {}

    def _next_rounds(self, batch: list[Pending]) -> None:
        turns = [
            Turn(
                pending.slot.layer,
                pending.slot.state,
                pending.level,
                pending.context,
                pending.sent,
                self._group.wait(pending.ticket),
                partial(self._vector, pending),
            )
            for pending in batch
        ]
        for pending, sent in zip(batch, batch[0].codec.next_rounds(turns), strict=True):
            pending.sent = sent
            pending.round += 1
            self.submit(pending)
