"""What controllers say to each other: a few small collectives at step boundaries, over MPI.

All ranks call the same methods in the same order, on the main thread, between steps. Over MPI they
go through a duplicated communicator, so nothing of Horovod's or the user's can mix with them, and
are waited for with a limit. A job without MPI, or whose MPI sees other ranks than Horovod, uses the
group's own collectives, which have Horovod's limits on stalls.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch

from ..errors import MismatchError, StallError
from ..payload import Kind, Payload
from .base import Group

_log = logging.getLogger("hvd_greco")

#: Seconds that a rank waits for the others; ranks differ by what they do between two steps.
PATIENCE = "HVD_GRECO_CONTROL_TIMEOUT"
_PATIENCE_SECONDS = 300.0


class Control(ABC):
    """Collectives of one controller. ``over`` says in words what carries them."""

    over: str

    @abstractmethod
    def sum(self, values: np.ndarray) -> np.ndarray:
        """The sum over all ranks of fp64 vectors of one length."""

    @abstractmethod
    def broadcast(self, data: bytes | None) -> bytes:
        """What rank 0 passed; the others pass None."""

    @abstractmethod
    def gather(self, data: bytes) -> list[bytes]:
        """What every rank passed, in rank order."""


class GroupControl(Control):
    """Over the collectives of a :class:`~.base.Group`.

    Args:
        group: the ranks.
        prefix: start of the names of its collectives.
    """

    over = "the group's own collectives"

    def __init__(self, group: Group, prefix: str) -> None:
        self._group = group
        self._prefix = prefix

    def _run(self, what: str, payload: Payload) -> torch.Tensor:
        ticket = self._group.submit(f"{self._prefix}/{what}", payload)
        return self._group.wait(ticket).buffer

    def sum(self, values: np.ndarray) -> np.ndarray:
        sent = torch.from_numpy(np.array(values, dtype=np.float64))
        return self._run("sum", Payload(Kind.SUM, sent)).numpy()

    def broadcast(self, data: bytes | None) -> bytes:
        sent = np.frombuffer(data or b"", dtype=np.uint8).copy()
        payload = Payload(Kind.GATHER, torch.from_numpy(sent))
        return self._run("broadcast", payload).numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        framed = len(data).to_bytes(8, "little") + data
        sent = torch.from_numpy(np.frombuffer(framed, dtype=np.uint8).copy())
        everything = self._run("gather", Payload(Kind.GATHER, sent)).numpy().tobytes()
        found, at = [], 0
        while at < len(everything):
            size = int.from_bytes(everything[at : at + 8], "little")
            if size > len(everything) - at - 8:
                raise MismatchError(f"{self._prefix}/gather: {size} bytes announced, fewer came")
            found.append(everything[at + 8 : at + 8 + size])
            at += 8 + size
        return found


class MPIControl(Control):
    """Over an MPI communicator of its own, with buffers (no pickle) and a limit on waiting.

    Args:
        comm: a communicator that nobody else uses.
    """

    over = "MPI"

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._patience = float(os.environ.get(PATIENCE) or _PATIENCE_SECONDS)
        self.sum(np.zeros(1))  # connections are made now, not in a step

    def _wait(self, request: Any, what: str) -> None:
        until = time.monotonic() + self._patience
        pause = 0.0
        while not request.Test():
            if time.monotonic() > until:
                raise StallError(
                    f"control {what}: the other ranks did not come within {self._patience:g} s "
                    f"({PATIENCE} changes that). A rank has stopped, or does not run as many "
                    "steps as the others"
                )
            # Horovod's thread wants the processor too.
            time.sleep(pause)
            pause = min(1e-3, pause + 2e-5)

    def sum(self, values: np.ndarray) -> np.ndarray:
        sent = np.ascontiguousarray(values, dtype=np.float64)
        total = np.empty_like(sent)
        self._wait(self._comm.Iallreduce(sent, total), "sum")
        return total

    def broadcast(self, data: bytes | None) -> bytes:
        size = np.array([len(data or b"")], dtype=np.int64)
        self._wait(self._comm.Ibcast(size, root=0), "broadcast")
        room = np.zeros(int(size[0]), dtype=np.uint8)
        if data:
            room[:] = np.frombuffer(data, dtype=np.uint8)
        self._wait(self._comm.Ibcast(room, root=0), "broadcast")
        return room.tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        count = self._comm.Get_size()
        sizes = np.zeros(count, dtype=np.int64)
        own = np.array([len(data)], dtype=np.int64)
        self._wait(self._comm.Iallgather(own, sizes), "gather")
        starts = np.concatenate(([0], np.cumsum(sizes)))
        room = np.zeros(int(starts[-1]), dtype=np.uint8)
        sent = np.frombuffer(data, dtype=np.uint8).copy()
        layout = [room, (sizes.tolist(), starts[:-1].tolist())]
        self._wait(self._comm.Iallgatherv(sent, layout), "gather")
        return [room[a:b].tobytes() for a, b in itertools.pairwise(starts)]


def make_control(group: Group, prefix: str) -> Control:
    """Control for the ranks of ``group``; all of them call this at the same point.

    MPI if every rank can: its world has the group's ranks in the group's order.
    """
    fallback = GroupControl(group, prefix)
    able, reason = _mpi_fits(group)
    if fallback.sum(np.array([1.0 if able else 0.0]))[0] == group.size:
        from .mpi import duplicate

        return MPIControl(duplicate())
    if group.rank == 0 and reason:
        _log.info("adaptive control goes over Horovod's collectives: %s", reason)
    return fallback


def _mpi_fits(group: Group) -> tuple[bool, str]:
    """Whether MPI's world is the group, and if not, why."""
    # A LocalGroup has no such thing, and its ranks are threads of one process.
    from .mpi import world

    if not getattr(group, "over_mpi", False):
        return False, "this Horovod does not run over MPI"
    ranks = world()
    if ranks is None:
        return False, "mpi4py cannot be imported"
    if ranks != (group.rank, group.size):
        return False, f"MPI has {ranks[1]} ranks, the process set {group.size}"
    return True, ""
