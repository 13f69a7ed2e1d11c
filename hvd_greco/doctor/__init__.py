"""``hvd-greco doctor``: what is installed here, and whether it fits together.

Most failures of a Horovod job are decided before it starts: Horovod built for another torch, mpi4py
on another MPI than Horovod, an ``mpirun`` of a third one. Each is a row here, with what to type.
Nothing native is imported in this process (see ``probes``).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from . import native, probes, programs
from .row import Row, cpu_path_works

__all__ = ["Row", "cpu_path_works", "examine"]


def examine(timeout: float = probes.TIMEOUT) -> list[Row]:
    """All rows of the table.

    Args:
        timeout: seconds for one probe; a library that hangs becomes a row after that.
    """
    with ThreadPoolExecutor(max_workers=3) as pool:
        torch = pool.submit(probes.probe, probes.TORCH, "torch", timeout)
        horovod = pool.submit(probes.probe, probes.HOROVOD, "horovod", timeout)
        mpi4py = pool.submit(probes.probe, probes.MPI4PY, "mpi4py", timeout)
        together = pool.submit(probes.probe, probes.TOGETHER, "", timeout)
        numba = pool.submit(probes.probe, probes.NUMBA, "numba", timeout)
        cupy = pool.submit(probes.probe, probes.CUPY, "cupy", timeout)
        driver = pool.submit(probes.probe, probes.DRIVER, "", timeout)
    mpi = mpi4py.result()
    return [
        native.python_row(),
        native.torch_row(torch.result()),
        native.horovod_row(horovod.result(), torch.result()),
        *native.mpi_rows(horovod.result(), mpi, together.result()),
        *programs.mpirun_rows(mpi, gloo_only=native.gloo_only(horovod.result())),
        programs.horovodrun_row(horovod.result()),
        programs.compiler_row(needed=not horovod.result()),
        native.numba_row(numba.result()),
        native.cupy_row(cupy.result(), driver.result()),
        native.driver_row(driver.result(), torch.result()),
        programs.cache_row(),
    ]
