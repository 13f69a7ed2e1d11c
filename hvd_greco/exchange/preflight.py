"""Was the job started so that Horovod sees the ranks that the launcher started?"""

from __future__ import annotations

import os
import warnings

import horovod.torch as hvd

from ..errors import LaunchError
from .mpi import shut_down_before_finalize

#: Set by mpirun (Open MPI; MPICH and its kin) for the ranks it starts.
_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def launched_size() -> tuple[str, int] | None:
    """The launcher's number of ranks and the variable that says so, or None without a launcher."""
    for variable in _SIZE_VARIABLES:
        value = os.environ.get(variable, "")
        if value.isdigit():
            return variable, int(value)
    return None


def check_launch() -> None:
    """Compare Horovod's size with the launcher's, and the MPI thread level with what is needed.

    Raises:
        LaunchError: several processes were started but each sees itself alone, which trains
            without exchanging anything; or MPI runs below ``MPI_THREAD_MULTIPLE``.
    """
    size = hvd.size()
    launched = launched_size()
    if launched is not None and launched[1] != size:
        message = (
            f"the launcher started {launched[1]} ranks ({launched[0]}), but Horovod sees {size}. "
        )
        if size == 1:
            raise LaunchError(
                message + "Usually Horovod was built without MPI, or with another MPI than this "
                "mpirun. Run `hvd-greco doctor`; `hvd-greco install-horovod` builds it for the MPI "
                "of this Python"
            )
        warnings.warn(
            message + "If that is not what you want (hvd.init(comm=[...]) does it), run "
            "`hvd-greco doctor`",
            RuntimeWarning,
            stacklevel=4,
        )
    if hvd.mpi_enabled() and not hvd.mpi_threads_supported():
        raise LaunchError(
            "MPI was started without MPI_THREAD_MULTIPLE, which Horovod's background thread "
            "needs. Something called MPI_Init before hvd.init(): import mpi4py after hvd.init(), "
            'or leave mpi4py.rc.thread_level at its default ("multiple")'
        )
    shut_down_before_finalize()
