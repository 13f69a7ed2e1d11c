"""What concerns MPI itself. The only module that imports mpi4py, and only in jobs over MPI."""

from __future__ import annotations

import sys
import threading
from typing import Any

_keyval: int | None = None


def shut_down_before_finalize(horovod: Any) -> None:
    """Stop Horovod first when the script calls ``MPI.Finalize()`` by itself.

    Horovod's background thread calls MPI about once a millisecond; without this, a job that
    finalises MPI aborts at its very end, after all its work. MPI deletes the attributes of
    COMM_SELF before anything else in MPI_Finalize, which is the standard's place for such things.

    Args:
        horovod: the module ``horovod.torch``.
    """
    global _keyval
    if _keyval is not None or not horovod.mpi_built() or "mpi4py.MPI" not in sys.modules:
        return
    from mpi4py import MPI

    thread = threading.get_ident()

    def stop(comm: Any, keyval: int, value: Any) -> None:
        # Where Horovod started MPI, hvd.shutdown() comes here on Horovod's own thread.
        if threading.get_ident() == thread and horovod.is_initialized():
            horovod.shutdown()

    _keyval = MPI.Comm.Create_keyval(delete_fn=stop)
    MPI.COMM_SELF.Set_attr(_keyval, True)


def world() -> tuple[int, int] | None:
    """This process's rank in MPI's world and its size; None without mpi4py or a running MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    if not MPI.Is_initialized() or MPI.Is_finalized():
        return None
    return int(MPI.COMM_WORLD.Get_rank()), int(MPI.COMM_WORLD.Get_size())


def duplicate() -> Any:
    """A communicator of all processes that nobody else uses; collective."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.Dup()
