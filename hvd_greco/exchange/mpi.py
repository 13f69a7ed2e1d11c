"""What concerns MPI itself. The only module that imports mpi4py, and only if the script did."""

from __future__ import annotations

import sys
import threading
from typing import Any

import horovod.torch as hvd

_keyval: int | None = None


def shut_down_before_finalize() -> None:
    """Stop Horovod first when the script calls ``MPI.Finalize()`` by itself.

    Horovod's background thread calls MPI about once a millisecond; without this, a job that
    finalises MPI aborts at its very end, after all its work. MPI deletes the attributes of
    COMM_SELF before anything else in MPI_Finalize, which is the standard's place for such things.
    """
    global _keyval
    if _keyval is not None or not hvd.mpi_built() or "mpi4py.MPI" not in sys.modules:
        return
    from mpi4py import MPI

    thread = threading.get_ident()

    def stop(comm: Any, keyval: int, value: Any) -> None:
        # Where Horovod started MPI, hvd.shutdown() comes here on Horovod's own thread.
        if threading.get_ident() == thread and hvd.is_initialized():
            hvd.shutdown()

    _keyval = MPI.Comm.Create_keyval(delete_fn=stop)
    MPI.COMM_SELF.Set_attr(_keyval, True)
