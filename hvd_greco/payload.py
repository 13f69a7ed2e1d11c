"""What travels: one buffer for each layer, rank and round, and what comes back of it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .errors import WireError


class Kind(enum.Enum):
    """How the buffers of all ranks are combined."""

    #: Rides the stock allreduce that Horovod runs for the parameter: comes back as the mean (or
    #: the sum, as the user's ``op`` says), so decoding must be linear in it.
    CARRIED = "carried"
    #: A named allreduce of our own: comes back as the exact sum.
    SUM = "sum"
    #: A named allgather: comes back as all ranks' buffers, in rank order.
    GATHER = "gather"
    #: A named alltoall: rank r gets every rank's r-th piece, in rank order.
    SCATTER = "scatter"
    #: Nothing is sent in this round by any rank of this rank's part of the group.
    NOTHING = "nothing"


class Scope(enum.Enum):
    """Which ranks a round goes over."""

    #: The whole process set.
    ALL = "all"
    #: The ranks on this host.
    LOCAL = "local"
    #: The ranks with this rank's place on each host.
    CROSS = "cross"


@dataclass(frozen=True)
class Hosts:
    """This rank's place, where every host has equally many ranks.

    Attributes:
        local_rank: this rank among those on its host.
        local_size: ranks on each host.
        cross_rank: this rank among those with its local rank, one on each host.
        cross_size: number of hosts.
    """

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


@dataclass
class Payload:
    """One rank's contribution to one round.

    Attributes:
        kind: how it is combined.
        buffer: what is sent: 1-D, contiguous, a dtype that the collective takes
            (Horovod: no bf16 anywhere, no uint8 in an allreduce). May be empty for GATHER.
        splits: for SCATTER, the number of elements for each rank.
        own: what the codec needs to know of its own contribution later; never sent.
        scope: which ranks take part (hierarchical exchanges; else all).
        finite: 0-dim bool tensor: was the encoded vector free of inf and NaN? None: not known.
        rest: the vector that was encoded now holds what was not sent of it.
    """

    kind: Kind
    buffer: torch.Tensor
    splits: tuple[int, ...] | None = None
    own: Any = None
    finite: torch.Tensor | None = None
    scope: Scope = Scope.ALL
    rest: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes handed to the collective."""
        return self.buffer.numel() * self.buffer.element_size()


@dataclass(frozen=True)
class Reduced:
    """What a round returned: the combined buffer and the number of ranks in it.

    The buffer is to be read only: where a part of the group is this rank alone, it is what was
    sent.
    """

    kind: Kind
    buffer: torch.Tensor
    world_size: int

    def parts(self, nbytes: int) -> list[torch.Tensor]:
        """The gathered buffers, each ``nbytes`` long; ranks that sent nothing are left out.

        Raises:
            WireError: the total is not a multiple of ``nbytes``, or more than all ranks can send.
        """
        total = self.buffer.numel()
        count, rest = divmod(total, nbytes) if nbytes else (0, total)
        if rest or count > self.world_size:
            raise WireError(
                f"gathered {total} bytes from {self.world_size} ranks, each of which sends "
                f"{nbytes} or nothing: ranks run different codecs, levels or versions"
            )
        return [self.buffer[i * nbytes : (i + 1) * nbytes] for i in range(count)]

    def parts_of(self, length: Callable[[torch.Tensor], int]) -> list[torch.Tensor]:
        """The gathered buffers of ranks whose payloads say themselves how long they are.

        Args:
            length: bytes of the first payload in what it is given, read from its header.

        Raises:
            WireError: a payload longer than what was gathered, or more payloads than ranks.
        """
        parts: list[torch.Tensor] = []
        at, total = 0, self.buffer.numel()
        while at < total:
            nbytes = length(self.buffer[at:])
            if not 0 < nbytes <= total - at or len(parts) == self.world_size:
                raise WireError(
                    f"gathered {total} bytes from {self.world_size} ranks; payload "
                    f"{len(parts) + 1} at byte {at} announces {nbytes}: ranks run different "
                    "codecs, levels or versions"
                )
            parts.append(self.buffer[at : at + nbytes])
            at += nbytes
        return parts


def network_bytes(kind: Kind, nbytes: int, world_size: int) -> int:
    """Bytes that one rank must put on the link for one collective, by the best-known algorithm.

    An allreduce moves 2(N-1)/N of its buffer (ring), an alltoall (N-1)/N, and an allgather N-1
    times it: that growth is why a payload's size alone says too little for more than two ranks.
    """
    if world_size == 1 or kind is Kind.NOTHING:
        return 0
    others = world_size - 1
    if kind is Kind.GATHER:
        return nbytes * others
    if kind is Kind.SCATTER:
        return nbytes * others // world_size
    return 2 * nbytes * others // world_size
