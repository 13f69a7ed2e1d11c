"""What the compressor needs of a group of ranks, whoever provides it."""

from __future__ import annotations

from typing import Any, Protocol

from ..payload import Hosts, Payload, Reduced, Scope


class Group(Protocol):
    """The ranks of one process set, seen from one of them.

    Names decide which submissions belong together; the order of submission may differ between
    ranks. A name can be used again once its result was waited for.
    """

    @property
    def rank(self) -> int:
        """This rank within the group, or -1 if it is not a member."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    @property
    def members(self) -> tuple[int, ...]:
        """Global ranks of the group, ascending."""

    @property
    def global_rank(self) -> int:
        """This process's global rank, member or not."""

    @property
    def identity(self) -> str:
        """A short text that is alike on all members and differs between groups."""

    def hosts(self) -> Hosts:
        """This rank's place on the hosts; to be called before the scopes LOCAL and CROSS are used.

        The first call may communicate and wait: all ranks make it at the same point, outside of
        a step.

        Raises:
            ConfigError: the parts cannot be formed; says what to do.
        """

    def part_size(self, scope: Scope) -> int:
        """Ranks that take part in a round of that scope."""

    def submit(self, name: str, payload: Payload) -> Any:
        """Start a named collective on the payload and return a ticket at once."""

    def poll(self, ticket: Any) -> bool:
        """Whether :meth:`wait` would return at once."""

    def wait(self, ticket: Any) -> Reduced:
        """Block until the collective is done."""
