"""N ranks that all send what this one sends: what methods cost, without any communication."""

from __future__ import annotations

from ..errors import ConfigError
from ..payload import Hosts, Payload, Reduced, Scope
from .local import combine


class EchoGroup:
    """A :class:`~.base.Group` in one process, for measurements of codecs.

    Payloads are combined when they are waited for, so that :class:`~hvd_greco.rounds.Rounds` does
    not count that as the codec's time.

    Args:
        size: number of ranks.
    """

    rank = 0
    global_rank = 0
    identity = "echo"

    def __init__(self, size: int) -> None:
        self.size = size

    @property
    def members(self) -> tuple[int, ...]:
        return (0,) * self.size  # this rank, as often as it stands for another

    def hosts(self) -> Hosts:
        raise ConfigError("exchange: 'hierarchical' has no hosts to go between here")

    def part_size(self, scope: Scope) -> int:
        return self.size

    def submit(self, name: str, payload: Payload) -> Payload:
        return payload

    def poll(self, ticket: Payload) -> bool:
        return True

    def wait(self, ticket: Payload) -> Reduced:
        return combine([ticket] * self.size)[0]
