"""What the job's own collectives take: latency and time per byte, measured as it runs.

The alpha-beta model: a collective takes ``latency + bytes * seconds_per_byte``, where bytes are
those that a rank must put on the link (``payload.network_bytes``), so that growth with the number
of ranks is in them. Both are measured by way of Horovod, whose cycle and negotiation are part of
the latency, and over the job's own ranks, whatever links lie between them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..exchange.base import Group
from ..payload import Kind, Payload, network_bytes

#: Bytes handed to a collective: the first shows its latency, the others grow until one takes long.
_SMALL, _FIRST, _GROWTH, _MOST = 256, 1 << 16, 8, 1 << 25
#: A measurement this long shows a link's rate well enough, and no larger one is made.
_LONG_SECONDS = 0.08
_REPEATS = 5


@dataclass(frozen=True)
class Link:
    """One kind of collective.

    Attributes:
        latency: seconds of one that carries next to nothing.
        seconds_per_byte: of what a rank puts on the link.
    """

    latency: float
    seconds_per_byte: float

    def seconds(self, nbytes: float) -> float:
        """Time of one collective that puts ``nbytes`` on the link."""
        return self.latency + nbytes * self.seconds_per_byte


Links = Mapping[Kind, Link]


def measure_links(group: Group, prefix: str, kinds: Sequence[Kind]) -> Links:
    """Measure collectives of each kind; all ranks call this at the same point, between steps.

    Takes about half a second for each kind on slow links, and much less on fast ones. All ranks
    go by rank 0's clock, so that they agree on when to stop.

    Args:
        group: the job's ranks.
        prefix: start of the collectives' names.
        kinds: SUM and GATHER (SCATTER too if a codec uses it); CARRIED is measured as SUM.
    """
    found: dict[Kind, Link] = {}
    for kind in dict.fromkeys(Kind.SUM if kind is Kind.CARRIED else kind for kind in kinds):
        name = f"{prefix}/link/{kind.value}"
        # The first one of a name is negotiated, which later ones are not.
        for _ in range(2):
            _seconds(group, name, kind, _SMALL, 1)
        latency = _seconds(group, name, kind, _SMALL, _REPEATS)
        points = [(network_bytes(kind, _SMALL, group.size), latency)]
        nbytes = _FIRST
        while True:
            _seconds(group, f"{name}/{nbytes}", kind, nbytes, 1)
            took = _seconds(group, f"{name}/{nbytes}", kind, nbytes, _REPEATS)
            points.append((network_bytes(kind, nbytes, group.size), took))
            if took > _LONG_SECONDS / _GROWTH or nbytes * _GROWTH > _MOST:
                break
            nbytes *= _GROWTH
        # By the largest: small ones may fit into a buffer of the link.
        rate = max(0.0, points[-1][1] - latency) / max(1, points[-1][0] - points[0][0])
        found[kind] = Link(latency, rate)
    found[Kind.CARRIED] = found[Kind.SUM]
    return found


def _seconds(group: Group, name: str, kind: Kind, nbytes: int, repeats: int) -> float:
    """Median time of some collectives on rank 0, the same on all ranks."""
    buffer = torch.zeros(nbytes // 4)
    splits: tuple[int, ...] | None = None
    if kind is Kind.GATHER:
        buffer = buffer.view(torch.uint8)
    elif kind is Kind.SCATTER:
        share = buffer.numel() // group.size
        buffer, splits = buffer[: share * group.size], (share,) * group.size
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        group.wait(group.submit(name, Payload(kind, buffer, splits=splits)))
        took.append(time.perf_counter() - began)
    mine = float(np.median(took)) if group.rank == 0 else 0.0
    agreed = Payload(Kind.SUM, torch.tensor([mine], dtype=torch.float64))
    return float(group.wait(group.submit(f"{name}/agreed", agreed)).buffer.item())
