"""Hierarchical exchange: dense inside a host, where links are fast; compressed between hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from .. import kernels
from ..layers import Given, Layer
from ..payload import Hosts, Kind, Payload, Reduced, Scope, network_bytes
from .base import Codec, Level, Turn, Work
from .wrapping import WrapperCodec

if TYPE_CHECKING:
    from ..memories.base import Memory, Own


@dataclass(frozen=True)
class _Between:
    """What this rank knows of its host's part in the exchange between hosts.

    Attributes:
        payload: the inner codec's payload: the leader's, or an empty one on other ranks.
        mean: the leader's mean over its host; None on other ranks, and if the memory has nothing
            to settle (no rank of the host has a gradient).
        finite: 0-dim bool, whether the vector that the leader coded was finite.
    """

    payload: Payload
    mean: torch.Tensor | None = None
    finite: torch.Tensor | None = None


class HierarchicalCodec(WrapperCodec):
    """Another codec between hosts, and plain sums inside each.

    Round 1 adds up a host's gradients. Then one rank of each host, the layer's leader, codes the
    host's mean (plus what the memory adds) and exchanges it with the leaders on other hosts; last,
    it hands what came back to the ranks beside it, and all decode the same bytes. Layers are dealt
    out by size, so that a host's ranks lead about equally much. N ranks on H hosts cost the link
    between them H payloads, not N.

    The memory's accounts are kept by the leader, over host means: for op Sum, decoded + L sum of
    e' = sum of g + L sum of e, with L ranks on each host and sums of e over the hosts' leaders. A
    host on which no rank has a gradient contributes nothing, and its residual stays. If finite
    gradients overflow in a host's sum, that host's leader keeps its residual, and every rank gets
    non-finite values.

    Levels are those of the inner codec. The residual is held by one rank of a host alone: 1/L of a
    copy per rank, and one more of the layers in flight.

    Args:
        inner: a codec of one round.
        hosts: this rank's place.
        sizes: layer name -> elements, for all layers of the model.
        memory: what the leader does with what was not sent; must be allowed with ``inner``.
        own: class of the contribution that ``memory`` is shown.
    """

    rounds = 3
    kind = Kind.SUM

    def __init__(
        self,
        inner: Codec,
        hosts: Hosts,
        sizes: Mapping[str, int],
        memory: Memory,
        own: type[Own],
    ) -> None:
        super().__init__(inner, "hierarchical")
        self._hosts = hosts
        self._leader = leaders(sizes, hosts.local_size)
        self._memory = memory
        self._own = own

    def context(self) -> dict[str, str]:
        return {**super().context(), "ranks on each host": str(self._hosts.local_size)}

    def _leads(self, layer: Layer) -> bool:
        return self._leader[layer.name] == self._hosts.local_rank

    def _summed(self) -> bool:
        """The inner codec's payloads are added up between hosts, not gathered."""
        return self.inner.kind is not Kind.GATHER

    def wire_bytes(self, layer: Layer, level: Level, size: int) -> int:
        """Bytes that *this* rank hands to collectives: a layer's leader sends more than others.

        The one codec whose answer differs between ranks; plans use :meth:`network_bytes`.
        """
        cross = self._hosts.cross_size
        return self._bytes(layer, self.inner.wire_bytes(layer, level, cross))

    def step_bytes(self, work: Work) -> int:
        return self._bytes(work.layer, self.inner.step_bytes(self._between_hosts(work)))

    def _bytes(self, layer: Layer, payload: int) -> int:
        """Bytes of all three rounds, where a leader's payload has as many as that."""
        local, cross = self._hosts.local_size, self._hosts.cross_size
        total = (layer.numel + 1) * layer.work_dtype.itemsize if local > 1 else 0
        if self._leads(layer):
            total += payload if cross > 1 else 0
            total += (payload if self._summed() else payload * cross) if local > 1 else 0
        return total

    def outgoing_bytes(self, layer: Layer, level: Level, size: int) -> int:
        cross = self._hosts.cross_size
        return self.inner.outgoing_bytes(layer, level, cross) if cross > 1 else 0

    def network_bytes(self, layer: Layer, level: Level, size: int) -> int:
        """Bytes that a layer's leader puts on the link between hosts, the only one that counts."""
        cross = self._hosts.cross_size
        kind = Kind.SUM if self._summed() else Kind.GATHER
        return network_bytes(kind, self.inner.wire_bytes(layer, level, cross), cross)

    def encode(self, work: Work, vector: torch.Tensor) -> Payload:
        shares = self._shares(work, vector)
        # Divided before they are added up: the mean of finite gradients is finite.
        torch.div(vector, self._hosts.local_size, out=shares[:-1])
        shares[-1] = 1.0
        return Payload(Kind.SUM, shares, scope=Scope.LOCAL)

    def encode_absent(self, work: Work, like: torch.Tensor) -> Payload:
        return Payload(Kind.SUM, self._shares(work, like).zero_(), scope=Scope.LOCAL)

    def _shares(self, work: Work, like: torch.Tensor) -> torch.Tensor:
        """The send buffer of round 1: the vector, and 1 if this rank has a gradient at all."""
        return work.buffers.get("host", work.layer.numel + 1, work.layer.work_dtype, like.device)

    def next_round(self, turn: Turn) -> Payload:
        if turn.sent.scope is Scope.LOCAL:
            return self._between(turn)
        # Last round: only the leader has something to hand on.
        known: _Between = turn.sent.own
        buffer = turn.reduced.buffer if self._leads(turn.work.layer) else known.payload.buffer[:0]
        return Payload(Kind.GATHER, buffer, own=known, scope=Scope.LOCAL)

    def _between(self, turn: Turn) -> Payload:
        """The payload for the other hosts, from the sum over this one."""
        work, summed = self._between_hosts(turn.work), turn.reduced.buffer
        leads = self._leads(work.layer)
        present = leads and (self._memory.absent_is_zero or bool(summed[-1] > 0))
        if not present:
            payload = self.inner.encode_absent(work, summed)
            if not leads:
                nothing = payload.buffer[:0]
                return Payload(Kind.NOTHING, nothing, own=_Between(payload), scope=Scope.CROSS)
            return self._to_hosts(payload, _Between(payload))
        mean = summed[:-1]
        vector = torch.empty_like(mean)
        self._memory.compensate(Given(work.layer, work.state, mean, 1.0), vector)
        payload = self.inner.encode(work, vector)
        finite = payload.finite
        if finite is None:
            finite = kernels.all_finite(vector)
        return self._to_hosts(payload, _Between(payload, mean, finite))

    def _to_hosts(self, payload: Payload, known: _Between) -> Payload:
        kind = Kind.SUM if self._summed() else Kind.GATHER
        return Payload(kind, payload.buffer, own=known, scope=Scope.CROSS)

    def decode(self, work: Work, sent: Payload, reduced: Reduced, out: torch.Tensor) -> None:
        known: _Between = sent.own
        inner = self._between_hosts(work)
        self.inner.decode(inner, known.payload, self._back(reduced), out)

    def commit(self, work: Work, sent: Payload, reduced: Reduced) -> None:
        known: _Between = sent.own
        inner = self._between_hosts(work)
        if known.mean is not None and known.finite is not None and bool(known.finite):
            own = self._own(self.inner, inner, known.payload)
            self._memory.commit(Given(work.layer, work.state, known.mean, 1.0), own)
        self.inner.commit(inner, known.payload, self._back(reduced))

    def _between_hosts(self, work: Work) -> Work:
        """The work as the inner codec sees it, among the ranks with this place on each host."""
        return replace(
            work,
            rank=self._hosts.cross_rank,
            size=self._hosts.cross_size,
            buffers=work.buffers.under("inner"),
        )

    def _back(self, reduced: Reduced) -> Reduced:
        """What the leader got from the hosts, as the inner codec expects it."""
        cross = self._hosts.cross_size
        if self.inner.kind is Kind.CARRIED:  # the mean, as if Horovod had carried it
            return Reduced(Kind.CARRIED, reduced.buffer / cross, cross)
        return Reduced(self.inner.kind, reduced.buffer, cross)


def leaders(sizes: Mapping[str, int], local_size: int) -> dict[str, int]:
    """Layer name -> local rank of its leader: the largest layers first, each to who has least.

    By size and not in turn: weights and biases alternate in most models, and with two ranks on a
    host one of them would get all the weights.
    """
    load, chosen = [0] * local_size, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        place = load.index(min(load))
        chosen[name] = place
        load[place] += sizes[name]
    return chosen
