"""One step's unfinished layers, and the private collectives that they go through."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from . import carrier
from .codecs.base import Codec, Turn, Work
from .exchange.base import Group
from .identity import Slot
from .payload import Kind, Payload, Reduced, Scope
from .telemetry import Ledger

#: Pause between looks at unfinished rounds; Horovod itself acts once a millisecond.
_POLL_SECONDS = 1e-4


class Pending:
    """One layer between ``compress`` and ``decompress``; what Horovod keeps as the context."""

    __slots__ = (
        "check", "codec", "fresh", "gradient", "owes", "rest", "round", "sent", "slot", "ticket",
        "unscale", "work",
    )  # fmt: skip

    work: Work
    sent: Payload

    def __init__(self, slot: Slot, gradient: torch.Tensor, codec: Codec, unscale: float) -> None:
        self.slot = slot
        self.gradient = gradient
        self.codec = codec
        #: 1 / loss scale of this step.
        self.unscale = unscale
        #: This rank has a new gradient, and settles accounts when the step is accepted.
        self.fresh = True
        #: What was not sent, in the gradient's memory.
        self.rest: torch.Tensor | None = None
        #: The gradient's sum, if it was reduced before.
        self.check: float | None = None
        self.round = 1
        self.ticket: Any = None
        #: A dense layer that sends its residual along.
        self.owes = False

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

    A step's first private payload is preceded by a roll call, one small allreduce, and all of
    them are held back until it is answered. A rank that called ``hvd.join()`` must never meet an
    allgather or alltoall of ours: Horovod 0.28.1 refuses the first of a name as it should, but
    crashes its background thread on one that its response cache knows, and the others then hang
    in MPI where no stall limit reaches them. The answer comes during the backward pass.

    Args:
        group: our ranks.
        prefix: start of the names of our collectives.
        ledger: where bytes are counted.
        vector: forms a layer's vector again, for codecs that need it in a later round.
    """

    #: Bytes of the roll call.
    NBYTES = 4

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
        self.reset()

    def reset(self) -> None:
        """Begin a step."""
        #: Layers whose first round waits for the roll call.
        self._held: list[Pending] = []
        self._roll_call: Any = None
        #: How many ranks answered it; None: not known yet.
        self._present: int | None = None

    def submit(self, pending: Pending) -> None:
        """Start a private layer's first round as soon as all ranks are known to take part."""
        # A rank outside the process set submits nothing: its decompress will say what is wrong.
        if self._group.rank < 0:
            return
        if self._roll_call is None:
            ones = Payload(Kind.SUM, torch.ones(1))
            self._roll_call = self._group.submit(f"{self._prefix}/present", ones)
            self._ledger.add(None, Kind.SUM, self.NBYTES, self._group.size)
        self._held.append(pending)

    def check_present(self, wait: bool) -> None:
        """Raise if the roll call is answered (or after waiting for that) and a rank is missing.

        Raises:
            UnsupportedError: a rank called ``hvd.join()``.
        """
        if self._called(wait) and self._present != self._group.size:
            raise carrier.joined(self._group.size - (self._present or 0), self._group.size)

    def _called(self, wait: bool) -> bool:
        """Whether the roll call is answered."""
        if self._present is None and self._roll_call is not None:
            if not (wait or self._group.poll(self._roll_call)):
                return False
            self._present = round(self._group.wait(self._roll_call).buffer.item())
        return self._present is not None

    def _send(self, pending: Pending) -> None:
        name = pending.slot.layer.name
        pending.ticket = self._group.submit(f"{self._prefix}/{name}/{pending.round}", pending.sent)
        self._count(name, pending.sent)
        if pending.round == 1 and pending.owes_rounds:
            self._owing.append(pending)

    def _count(self, layer: str, sent: Payload) -> None:
        size = self._group.part_size(sent.scope)
        if sent.kind is Kind.NOTHING or (size == 1 and sent.scope is not Scope.ALL):
            return
        local = sent.scope is Scope.LOCAL
        self._ledger.add(layer, sent.kind, sent.nbytes, size, local)

    def advance(self) -> bool:
        """Move on every multi-round exchange whose present round is done; never waits.

        Returns whether this rank still owes a round to the others.
        """
        if self._held and self._called(wait=False) and self._present == self._group.size:
            held, self._held = self._held, []
            for pending in held:
                self._send(pending)
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
        self.check_present(wait=True)
        while self.advance():
            if not pending.owes_rounds and self._group.poll(pending.ticket):
                break
            time.sleep(_POLL_SECONDS)
        return self._group.wait(pending.ticket)

    def abandon(self) -> None:
        """Bring what was started to its end, so that its names are free again, and forget it."""
        for pending in self.pending.values():
            if pending.ticket is not None or pending in self._held:
                self.finish(pending)
        self.pending = {}

    def _next_rounds(self, batch: list[Pending]) -> None:
        turns = [
            Turn(
                pending.work,
                pending.sent,
                self._group.wait(pending.ticket),
                partial(self._vector, pending),
            )
            for pending in batch
        ]
        began = time.perf_counter()
        payloads = batch[0].codec.next_rounds(turns)
        share = (time.perf_counter() - began) / len(batch)
        for pending, sent in zip(batch, payloads, strict=True):
            self._ledger.spend(pending.slot.layer.name, share)
            pending.sent = sent
            pending.round += 1
            self._send(pending)
