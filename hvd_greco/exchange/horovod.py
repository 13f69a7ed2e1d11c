"""Named asynchronous collectives of stock Horovod. The only module that imports them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..errors import (
    ConfigError,
    HorovodNotFoundError,
    MismatchError,
    NotInitializedError,
    UnsupportedError,
)
from ..payload import Hosts, Kind, Payload, Reduced, Scope

if TYPE_CHECKING:
    from .hosts import HostSets

try:
    import horovod.torch as hvd
    from horovod.common.exceptions import HorovodInternalError
except ImportError as error:
    raise HorovodNotFoundError(
        f"Horovod's torch extension cannot be imported ({error}). "
        "`pip install horovod` fails against torch >= 2.1; run `hvd-greco install-horovod`, which "
        "builds Horovod 0.28.1 for the torch and MPI of this Python, then `hvd-greco doctor`"
    ) from error


def require_initialized(what: str) -> None:
    """Raise :class:`NotInitializedError` unless ``hvd.init()`` was called."""
    if not hvd.is_initialized():
        raise NotInitializedError(f"call hvd.init() before {what}(...): Horovod is not initialised")


@dataclass(frozen=True)
class _Ticket:
    #: None: there was nothing to communicate, and ``alone`` is the result.
    handle: int | None
    kind: Kind
    name: str
    size: int
    alone: torch.Tensor


class HorovodGroup:
    """A Horovod process set (all ranks by default) as a :class:`~.base.Group`."""

    def __init__(self, process_set: Any = None) -> None:
        if process_set is None:
            process_set = hvd.global_process_set
        if not isinstance(process_set, hvd.ProcessSet):
            raise ConfigError(
                f"process_set: needs a horovod.torch.ProcessSet, got {process_set!r}; pass the "
                "same object that hvd.DistributedOptimizer gets"
            )
        if process_set.process_set_id is None:
            raise ConfigError(
                "process_set: it is not registered with Horovod; pass it to "
                "hvd.init(process_sets=[...]) or hvd.add_process_set(...) first"
            )
        self.process_set = process_set
        self.members = tuple(process_set.ranks or range(hvd.size()))
        self.global_rank = int(hvd.rank())
        self.rank = self.members.index(self.global_rank) if self.global_rank in self.members else -1
        self.size = len(self.members)
        self.identity = str(process_set.process_set_id)
        self._host_sets: HostSets | None = None

    @property
    def over_mpi(self) -> bool:
        """Whether Horovod itself runs over MPI in this job."""
        return bool(hvd.mpi_enabled())

    def hosts(self) -> Hosts:
        if self.size != hvd.size():
            raise ConfigError(
                "exchange: 'hierarchical' needs all ranks; it does not go with process_set="
                f"{list(self.members)} of {hvd.size()} ranks. Leave one of the two out"
            )
        if self._host_sets is None:
            from .hosts import HostSets  # imports this module

            self._host_sets = HostSets()
        return self._host_sets.hosts

    def part_size(self, scope: Scope) -> int:
        if scope is Scope.ALL:
            return self.size
        hosts = self.hosts()
        return hosts.local_size if scope is Scope.LOCAL else hosts.cross_size

    def _part(self, scope: Scope) -> Any:
        """Process set of that scope; None if it is this rank alone."""
        if scope is Scope.ALL:
            return self.process_set
        self.hosts()
        assert self._host_sets is not None
        return self._host_sets.local if scope is Scope.LOCAL else self._host_sets.cross

    def submit(self, name: str, payload: Payload) -> _Ticket:
        tensor, part = payload.buffer, self._part(payload.scope)
        size = self.part_size(payload.scope)
        if payload.kind is Kind.NOTHING or part is None:
            return _Ticket(None, payload.kind, name, size, tensor)
        where = {"name": name, "process_set": part}
        if payload.kind is Kind.SUM:
            handle = hvd.allreduce_async(tensor, op=hvd.Sum, **where)
        elif payload.kind is Kind.GATHER:
            handle = hvd.allgather_async(tensor, **where)
        elif payload.kind is Kind.SCATTER:
            handle = hvd.alltoall_async(tensor, splits=_splits(payload), **where)
        else:
            raise ConfigError(f"{payload.kind} payloads ride Horovod's own allreduce")
        return _Ticket(handle, payload.kind, name, size, tensor)

    def poll(self, ticket: _Ticket) -> bool:
        return ticket.handle is None or bool(hvd.poll(ticket.handle))

    def wait(self, ticket: _Ticket) -> Reduced:
        if ticket.handle is None:
            return Reduced(ticket.kind, ticket.alone, ticket.size)
        try:
            result = hvd.synchronize(ticket.handle)
        except HorovodInternalError as error:
            raise _explained(error, ticket) from error
        # alltoall returns the received splits as well.
        buffer = result[0] if isinstance(result, tuple) else result
        return Reduced(ticket.kind, buffer, ticket.size)


def _splits(payload: Payload) -> Any:
    if payload.splits is None:
        raise ConfigError("a SCATTER payload needs splits")
    return torch.tensor(payload.splits, dtype=torch.int32)


def _explained(error: Exception, ticket: _Ticket) -> Exception:
    """The error with what it was about; Horovod's own class where elastic training expects it."""
    text = str(error)
    if "oin" in text and "not supported" in text:
        return UnsupportedError(
            "hvd.join() was called on a rank that ran out of data, but Horovod cannot run the "
            f"{ticket.kind.value} that this method needs while a rank has joined. Give all ranks "
            "the same number of steps (drop_last, or a sampler that pads), or use a method whose "
            "payload rides the allreduce (greco.RandomK, greco.Dense)"
        )
    if "Mismatched" in text:
        return MismatchError(f"{ticket.name}: {text}")
    return type(error)(f"{text} [hvd_greco was waiting for {ticket.name!r}]")
