"""N ranks in one process: the same interface as Horovod's, without MPI.

Ranks are threads. That is what makes it a fair stand-in: a wait blocks only its own rank, ranks
submit in different orders, and a collective that some rank never joins shows as a
:class:`~hvd_greco.errors.StallError` after a short limit instead of a hang.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ..errors import ConfigError, MismatchError, StallError
from ..payload import Hosts, Kind, Payload, Reduced, Scope

T = TypeVar("T")
_numbers = itertools.count()


def combine(payloads: Sequence[Payload]) -> list[Reduced]:
    """What each rank gets back when all ranks' payloads of one round meet."""
    kinds = {payload.kind for payload in payloads}
    if len(kinds) != 1:
        raise MismatchError(
            f"ranks submitted different collectives: {sorted(k.value for k in kinds)}"
        )
    kind, size = kinds.pop(), len(payloads)
    buffers = [payload.buffer for payload in payloads]
    if len({buffer.dtype for buffer in buffers}) != 1:
        raise MismatchError(f"ranks submitted different dtypes: {[b.dtype for b in buffers]}")
    if kind is Kind.GATHER:
        return [Reduced(kind, torch.cat(buffers), size) for _ in range(size)]
    if kind is Kind.SCATTER:
        pieces = [torch.split(p.buffer, list(p.splits or ())) for p in payloads]
        return [
            Reduced(kind, torch.cat([pieces[source][rank] for source in range(size)]), size)
            for rank in range(size)
        ]
    if len({buffer.shape for buffer in buffers}) != 1:
        raise MismatchError(f"ranks submitted different sizes: {[b.numel() for b in buffers]}")
    total = buffers[0].clone()
    for buffer in buffers[1:]:
        total += buffer
    return [Reduced(kind, total.clone(), size) for _ in range(size)]


@dataclass
class _Meeting:
    """One named collective of some ranks, until all of them have submitted to it."""

    ranks: tuple[int, ...]
    payloads: dict[int, Payload] = field(default_factory=dict)
    results: dict[int, Reduced] = field(default_factory=dict)
    error: Exception | None = None


class LocalGroup:
    """N simulated ranks.

    Args:
        size: number of ranks.
        stall: seconds after which a wait raises :class:`StallError`.
        hosts: ranks on each of the hosts that the ranks are said to be on, numbered host by host;
            None: nothing is said of hosts.

    Example:
        >>> group = LocalGroup(2)
        >>> group.run(lambda member: member.rank)
        [0, 1]
    """

    def __init__(self, size: int, stall: float = 20.0, hosts: int | None = None) -> None:
        if size < 1:
            raise ConfigError(f"size: needs at least one rank, got {size}")
        if hosts is not None and (hosts < 1 or size % hosts):
            raise ConfigError(f"hosts: {size} ranks cannot be {hosts} on each host")
        self.size = size
        self.ranks_per_host = hosts
        self.identity = f"local{next(_numbers)}"
        self.stall = stall
        self._changed = threading.Condition()
        self._meetings: dict[tuple[str, tuple[int, ...]], _Meeting] = {}
        self._failed: BaseException | None = None

    def member(self, rank: int) -> LocalMember:
        """The group as seen from ``rank``."""
        return LocalMember(self, rank)

    def run(self, work: Callable[[LocalMember], T]) -> list[T]:
        """Call ``work(member)`` on all ranks at once and return their results in rank order.

        The first exception on any rank wakes the others (as an aborting MPI job would) and is
        raised here.
        """

        def guarded(rank: int) -> T:
            try:
                return work(self.member(rank))
            except BaseException as error:
                with self._changed:
                    self._failed = self._failed or error
                    self._changed.notify_all()
                raise

        self._failed = None
        self._meetings.clear()
        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(guarded, rank) for rank in range(self.size)]
        if self._failed is not None:
            raise self._failed
        return [future.result() for future in futures]

    def _part(self, rank: int, scope: Scope) -> tuple[int, ...]:
        """The ranks that take part in a round of that scope with ``rank``."""
        if scope is Scope.ALL:
            return tuple(range(self.size))
        if self.ranks_per_host is None:
            raise ConfigError(
                "exchange: 'hierarchical' needs to know the hosts: LocalGroup(size, hosts=ranks "
                "on each host)"
            )
        host, place = divmod(rank, self.ranks_per_host)
        if scope is Scope.LOCAL:
            first = host * self.ranks_per_host
            return tuple(range(first, first + self.ranks_per_host))
        return tuple(range(place, self.size, self.ranks_per_host))

    def _submit(self, rank: int, name: str, payload: Payload) -> _Meeting:
        ranks = self._part(rank, payload.scope)
        if payload.kind is Kind.NOTHING:
            nothing = Reduced(Kind.NOTHING, payload.buffer, len(ranks))
            return _Meeting(ranks, results={rank: nothing})
        with self._changed:
            meeting = self._meetings.setdefault((name, ranks), _Meeting(ranks))
            if rank in meeting.payloads:
                raise MismatchError(f"rank {rank} submitted {name!r} twice before all others did")
            meeting.payloads[rank] = payload
            if len(meeting.payloads) == len(ranks):
                del self._meetings[name, ranks]
                try:
                    combined = combine([meeting.payloads[r] for r in ranks])
                    meeting.results = dict(zip(ranks, combined, strict=True))
                except Exception as error:
                    meeting.error = type(error)(f"{name}: {error}")
                self._changed.notify_all()
            return meeting

    def _done(self, meeting: _Meeting) -> bool:
        return bool(meeting.results) or meeting.error is not None

    def _wait(self, rank: int, name: str, meeting: _Meeting) -> Reduced:
        with self._changed:
            finished = self._changed.wait_for(
                lambda: self._done(meeting) or self._failed is not None, timeout=self.stall
            )
            if self._failed is not None and not self._done(meeting):
                raise StallError(f"{name}: another rank failed: {self._failed}")
            if not finished:
                missing = sorted(set(meeting.ranks) - set(meeting.payloads))
                raise StallError(f"{name}: rank {rank} waited {self.stall:g} s for ranks {missing}")
        if meeting.error is not None:
            raise meeting.error
        return meeting.results[rank]


@dataclass(frozen=True)
class LocalMember:
    """One rank of a :class:`LocalGroup`; a :class:`~.base.Group`."""

    group: LocalGroup
    rank: int

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(range(self.group.size))

    @property
    def global_rank(self) -> int:
        return self.rank

    @property
    def identity(self) -> str:
        return self.group.identity

    def hosts(self) -> Hosts:
        local = self.group._part(self.rank, Scope.LOCAL)
        cross = self.group._part(self.rank, Scope.CROSS)
        return Hosts(local.index(self.rank), len(local), cross.index(self.rank), len(cross))

    def part_size(self, scope: Scope) -> int:
        return len(self.group._part(self.rank, scope))

    def submit(self, name: str, payload: Payload) -> tuple[str, _Meeting]:
        return name, self.group._submit(self.rank, name, payload)

    def poll(self, ticket: tuple[str, _Meeting]) -> bool:
        return self.group._done(ticket[1])

    def wait(self, ticket: tuple[str, _Meeting]) -> Reduced:
        return self.group._wait(self.rank, *ticket)

    def reduce_gradients(
        self,
        parameters: Iterable[tuple[str, torch.Tensor]],
        compression: Any,
        average: bool = True,
    ) -> None:
        """Do to ``parameters`` what Horovod's optimizer does between backward and step.

        For each pair, in the order given (which may differ between ranks): compress the gradient
        (zeros where there is none) and start the allreduce named after it; then finish all and
        replace the gradients.

        Args:
            parameters: names and parameters.
            compression: a compressor of this rank (built with ``group=member``).
            average: op Average; False is op Sum.
        """
        pending = []
        for name, parameter in parameters:
            if parameter.grad is None:
                # As Horovod does it: contiguous, whatever the parameter's layout.
                parameter.grad = parameter.data.new(parameter.shape).zero_()
            tensor, context = compression.compress(parameter.grad)
            # In place, as Horovod's allreduce_async_ is: what comes back is the same tensor.
            payload = Payload(Kind.SUM, tensor.reshape(-1))
            pending.append((parameter, tensor, context, self.submit(f"allreduce.{name}", payload)))
        for parameter, tensor, context, ticket in pending:
            total = self.wait(ticket).buffer
            tensor.copy_((total / self.size if average else total).view_as(tensor))
            assert parameter.grad is not None
            result = compression.decompress(tensor, context)
            with torch.no_grad():
                parameter.grad.set_(result)
