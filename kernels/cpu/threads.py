"""Our own few threads: compiled functions release the interpreter, so a pool of them is enough.

Not Numba's ``parallel=True``: its default layer aborts the process when two threads call it at
once, as autograd's thread and the main thread do, and its pool knows nothing of other ranks on
the host.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

#: Handing work to another thread and waiting for it costs tens of microseconds: below this many
#: elements a thread gains nothing.
LEAST_ELEMENTS = 1 << 16

#: Environment variables in which launchers tell how many ranks a host has.
_RANKS_ON_HOST = (
    "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "HOROVOD_LOCAL_SIZE", "LOCAL_WORLD_SIZE",
    "SLURM_NTASKS_PER_NODE",
)  # fmt: skip

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_pool_process = -1


def count() -> int:
    """Threads that an operation may use: torch's, and no more than this rank's share of the host.

    A rank that is bound to some cores has those. One that is not shares all of them with the other
    ranks on the host.
    """
    return max(1, min(torch.get_num_threads(), _share()))


@functools.cache
def _share() -> int:
    """Cores that are ours."""
    allowed = len(os.sched_getaffinity(0))
    if allowed == (os.cpu_count() or 1):
        allowed //= _ranks_on_host()
    return max(1, allowed)


def _ranks_on_host() -> int:
    for name in _RANKS_ON_HOST:
        value = os.environ.get(name, "")
        if value.isdigit() and int(value):
            return int(value)
    return 1


def spans(numel: int, align: int = 64) -> list[tuple[int, int]]:
    """Contiguous ranges of about equal length, one for each thread; all but the last aligned."""
    parts = max(1, min(count(), numel // LEAST_ELEMENTS))
    step = max(1, -(-numel // parts // align)) * align
    return [(start, min(start + step, numel)) for start in range(0, numel, step)] or [(0, 0)]


def each(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """``function(*arguments)`` for all ``calls`` at once, the first one on this thread."""
    if len(calls) == 1:
        return [function(*calls[0])]
    pool = _workers()
    others = [pool.submit(function, *arguments) for arguments in calls[1:]]
    try:
        first = function(*calls[0])
    finally:
        # Nobody may still write to our arrays once we are gone.
        rest = [future.result() for future in others]
    return [first, *rest]


def _workers() -> ThreadPoolExecutor:
    global _pool, _pool_process
    with _lock:
        if _pool is None or _pool_process != os.getpid():  # a fork has no threads
            _pool = ThreadPoolExecutor(
                max(1, (os.cpu_count() or 2) - 1), thread_name_prefix="greco-kernel"
            )
            _pool_process = os.getpid()
        return _pool
