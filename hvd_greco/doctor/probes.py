"""Looking at native libraries from a safe distance: every import happens in a process of its own.

A library that crashes, hangs or prints is then a line in a table and not the end of the doctor.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

#: Seconds for one probe: cold imports of torch over a network file system take their time.
TIMEOUT = 60.0

_MAPS = """
import json, re
def libmpi():
    pattern = re.compile(r"/lib(mpi|mpich|mpi_ilp64)\\.so[.0-9]*$")
    with open("/proc/self/maps") as maps:
        paths = {line.split(None, 5)[5].strip() for line in maps if len(line.split(None, 5)) == 6}
    return sorted(path for path in paths if pattern.search(path))
def tell(**facts):
    print("\\n" + json.dumps(facts))
"""

TORCH = """
import torch
torch.ones(2).sum().item()
tell(version=torch.__version__, cuda=torch.version.cuda, threads=torch.get_num_threads(),
     devices=torch.cuda.device_count() if torch.version.cuda else 0)
"""

MPI4PY = """
import mpi4py
from mpi4py import MPI
names = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED",
         MPI.THREAD_SERIALIZED: "SERIALIZED", MPI.THREAD_MULTIPLE: "MULTIPLE"}
tell(version=mpi4py.__version__, library=MPI.Get_library_version(), libmpi=libmpi(),
     thread=names[MPI.Query_thread()])
"""

HOROVOD = """
import torch, horovod, horovod.torch as hvd
tell(version=horovod.__version__, mpi=bool(hvd.mpi_built()), gloo=bool(hvd.gloo_built()),
     nccl=bool(hvd.nccl_built()), cuda=bool(hvd.cuda_built()), libmpi=libmpi())
"""

#: As in a job: Horovod starts MPI, mpi4py joins; MPI's thread level is what Horovod's call got.
TOGETHER = """
import torch, horovod.torch as hvd
hvd.init()
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
started = bool(MPI.Is_initialized())
names = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED",
         MPI.THREAD_SERIALIZED: "SERIALIZED", MPI.THREAD_MULTIPLE: "MULTIPLE"}
sizes = [hvd.size(), MPI.COMM_WORLD.size] if started else [hvd.size()]
total = hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist()
tell(started=started, sizes=sizes, sum=total, libmpi=libmpi(),
     thread=names[MPI.Query_thread()] if started else None)
hvd.shutdown()
"""

CUPY = """
import cupy
try:
    devices, reason = cupy.cuda.runtime.getDeviceCount(), ""
except Exception as error:
    devices, reason = 0, str(error)
tell(version=cupy.__version__, devices=devices, reason=reason)
"""

NUMBA = """
import numba
compiled = numba.njit(lambda x: x + 1)(1)
tell(version=numba.__version__)
"""

DRIVER = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
code = cuda.cuInit(0)
version, count = ctypes.c_int(), ctypes.c_int()
cuda.cuDriverGetVersion(ctypes.byref(version))
if code == 0:
    cuda.cuDeviceGetCount(ctypes.byref(count))
tell(code=code, version="%d.%d" % (version.value // 1000, version.value % 1000 // 10),
     devices=count.value)
"""


@dataclass(frozen=True)
class Answer:
    """What a probe found: facts, or the reason why there are none.

    ``absent`` is set where the module asked for is simply not installed.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    absent: bool = False

    def __bool__(self) -> bool:
        return not self.reason


def probe(code: str, module: str = "", timeout: float = TIMEOUT) -> Answer:
    """Run ``code`` in a fresh process of this Python.

    Args:
        code: ends with a call of ``tell(name=value, ...)``.
        module: the package it is about; its absence is told from its being broken.
        timeout: seconds, after which the process is killed.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _MAPS + code],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return Answer(reason=f"did not finish within {timeout:.0f} s")
    for line in reversed(done.stdout.splitlines()):
        # The facts count even if the process crashes later, in its exit handlers.
        if line.startswith("{"):
            return Answer(json.loads(line))
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if module and re.search(rf"No module named '{re.escape(module)}'$", done.stderr, re.MULTILINE):
        return Answer(reason="not installed", absent=True)
    if done.returncode < 0:
        return Answer(reason=f"ended by signal {-done.returncode}")
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Warning)\b", line)]
    return Answer(reason=(errors or lines or [f"exit code {done.returncode}"])[-1][:300])


def output(*command: str, timeout: float = 20.0) -> str:
    """Output of a program, empty where it cannot be run."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def mpi_name(text: str) -> str:
    """``Open MPI 5.0.11`` and the like, from what an MPI library or an ``mpirun`` says of itself.

    Both word it differently; equal results mean the same MPI in the same version.
    """
    for pattern, name in (
        (r"Open MPI\)?[ ,]*v?(\d[\w.]*)", "Open MPI"),
        (r"OpenRTE\)? (\d[\w.]*)", "Open MPI"),
        (r"Intel\(R\) MPI Library\D*(\d[\w.]*)", "Intel MPI"),
        (r"MVAPICH2?\s*Version\D*(\d[\w.]*)", "MVAPICH"),
        (r"MPICH\s*Version\D*(\d[\w.]*)", "MPICH"),
        (r"HYDRA build details:\s*Version\D*(\d[\w.]*)", "MPICH"),
    ):
        match = re.search(pattern, text)
        if match:
            return f"{name} {match[1]}"
    return ""
