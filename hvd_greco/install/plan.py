"""What will be built: the user's wishes and this machine's facts, made one immutable plan."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from . import facts
from .errors import InstallError
from .patches import Patch, patches_for
from .source import HOROVOD_VERSION, SDIST_SHA256

#: Variables of Horovod's build that a user may set and we pass on. Every other HOROVOD_ variable
#: is dropped from the build: it would change the wheel behind the cache key's back.
_PASSED_ON = (
    "HOROVOD_CUDA_HOME",
    "HOROVOD_NCCL_HOME",
    "HOROVOD_NCCL_INCLUDE",
    "HOROVOD_NCCL_LIB",
    "HOROVOD_NCCL_LINK",
    "HOROVOD_BUILD_ARCH_FLAGS",
    "HOROVOD_BUILD_CUDA_CC_LIST",
    "CXX",
    "CXXFLAGS",
    "LDFLAGS",
)
MPI_CHOICES = ("auto", "pip", "system", "none")
#: Memory that one compiler process takes at its peak on torch's headers.
_BYTES_PER_JOB = 2 * 2**30


@dataclass(frozen=True)
class BuildOptions:
    """What the user asked for; None means: decide from what is installed."""

    mpi: str = "auto"
    gloo: bool | None = None
    cuda: bool | None = None
    nccl: bool = False
    jobs: int | None = None
    sdist: Path | None = None

    def __post_init__(self) -> None:
        if self.mpi not in MPI_CHOICES:
            raise InstallError(f"--mpi {self.mpi}: use one of {', '.join(MPI_CHOICES)}")
        if self.mpi == "none" and self.gloo is False:
            raise InstallError(
                "--mpi none --no-gloo leaves Horovod no way to communicate: drop one of the two"
            )
        if self.nccl and self.cuda is False:
            raise InstallError("--nccl --no-cuda: NCCL needs CUDA, drop one of the two")
        if self.jobs is not None and self.jobs < 1:
            raise InstallError(f"--jobs {self.jobs}: use 1 or more")
        if self.sdist is not None and not self.sdist.is_file():
            raise InstallError(
                f"--sdist {self.sdist}: there is no such file; it should be "
                f"horovod-{HOROVOD_VERSION}.tar.gz from the package index"
            )


@dataclass(frozen=True)
class BuildPlan:
    """Everything the compiled wheel depends on (so: what its cache key is made of)."""

    torch: facts.TorchFacts
    mpi: facts.MpiFacts
    gloo: bool
    cuda: bool
    nccl: bool
    python: str
    machine: str
    rpath: tuple[str, ...]
    passed_on: tuple[tuple[str, str], ...]
    jobs: int

    @property
    def patches(self) -> tuple[Patch, ...]:
        """Changes to Horovod's source, in the order in which they are made."""
        return patches_for(
            rpath=self.rpath,
            mpi_wrapper=self.mpi.wrapper,
            cuda=self.cuda,
        )

    def identity(self) -> dict[str, object]:
        """The facts behind :attr:`key`; the number of jobs and the folder of torch don't count."""
        return {
            "horovod": HOROVOD_VERSION,
            "sdist": SDIST_SHA256,
            "torch": self.torch.version,
            "torch_cuda": self.torch.cuda,
            "python": self.python,
            "machine": self.machine,
            "mpi": [self.mpi.kind, self.mpi.version],
            "gloo": self.gloo,
            "cuda": self.cuda,
            "nccl": self.nccl,
            "rpath": list(self.rpath),
            "environment": dict(self.passed_on),
            # A wrapper's path inside the environment differs between checkouts that may share
            # the wheel; for a system MPI, `rpath` holds the folder that matters.
            "patches": [[p.file, p.old, p.new] for p in patches_for(self.rpath, None, self.cuda)],
        }

    @property
    def key(self) -> str:
        """Name of the wheel's folder in the cache: readable, and unique by its last part."""
        text = json.dumps(self.identity(), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        mpi = self.mpi.version.lower().replace(" ", "") if self.mpi.wrapper else "gloo"
        readable = "".join(c if c.isalnum() or c in ".+-" else "_" for c in mpi)[-40:]
        return f"torch{self.torch.version}-{self.python}-{readable}-{digest}"

    def settings(self) -> list[tuple[str, str, str]]:
        """(variable, value, why) for Horovod's build script."""
        with_mpi, off = self.mpi.kind != "none", "not used by this package; saves build time"
        rows = [
            ("HOROVOD_WITH_PYTORCH", "1", "fail if the torch part cannot be built"),
            ("HOROVOD_WITHOUT_TENSORFLOW", "1", off),
            ("HOROVOD_WITHOUT_MXNET", "1", off),
            (
                "HOROVOD_WITH_MPI" if with_mpi else "HOROVOD_WITHOUT_MPI",
                "1",
                f"collectives over {self.mpi.version}" if with_mpi else "asked for by --mpi none",
            ),
            (
                "HOROVOD_WITH_GLOO" if self.gloo else "HOROVOD_WITHOUT_GLOO",
                "1",
                "asked for, or the only way to communicate"
                if self.gloo
                else "MPI does its work here; leaving it out more than halves the build",
            ),
        ]
        if with_mpi:
            rows.append(("HOROVOD_CPU_OPERATIONS", "MPI", "CPU tensors travel over MPI"))
        if self.nccl:
            rows.append(("HOROVOD_GPU_OPERATIONS", "NCCL", "asked for by --nccl"))
        rows.append(("MAKEFLAGS", f"-j{self.jobs}", "compilers at a time (cores and memory)"))
        rows.extend((name, value, "set in your environment") for name, value in self.passed_on)
        return rows

    def environment(self) -> dict[str, str]:
        """The build's environment: the user's, less what would change the wheel unseen."""
        dropped = ("HOROVOD_", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "CMAKE_GENERATOR")
        clean = {name: v for name, v in os.environ.items() if not name.startswith(dropped)}
        clean.update((name, value) for name, value, _ in self.settings())
        scripts = sysconfig.get_path("scripts")
        clean["PATH"] = scripts + os.pathsep + clean.get("PATH", os.defpath)
        return clean


def make_plan(options: BuildOptions) -> BuildPlan:
    """Decide what ``options`` leave open.

    Raises:
        InstallError: torch, the MPI or the CUDA toolkit asked for is missing.
    """
    if not (3, 10) <= sys.version_info[:2] <= (3, 12):
        raise InstallError(
            f"Python {sys.version_info[0]}.{sys.version_info[1]} does not fit: Horovod "
            f"{HOROVOD_VERSION} is known to work here with Python 3.10, 3.11 and 3.12. Make an "
            "environment with one of these: `python3.11 -m venv .venv`"
        )
    torch = facts.find_torch()
    mpi = facts.find_mpi(options.mpi)
    return BuildPlan(
        torch=torch,
        mpi=mpi,
        gloo=mpi.kind == "none" if options.gloo is None else options.gloo,
        cuda=_decide_cuda(options, torch),
        nccl=options.nccl,
        python=facts.python_tag(),
        machine=facts.machine(),
        rpath=library_search(mpi.library_dirs, Path(sysconfig.get_path("platlib"))),
        passed_on=tuple((n, os.environ[n]) for n in _PASSED_ON if os.environ.get(n)),
        jobs=options.jobs or _default_jobs(),
    )


def _decide_cuda(options: BuildOptions, torch: facts.TorchFacts) -> bool:
    wanted = options.cuda if options.cuda is not None else (True if options.nccl else None)
    nvcc = facts.find_nvcc()
    if wanted and torch.cuda is None:
        raise InstallError(
            f"--{'nccl' if options.nccl else 'cuda'}: torch {torch.version} is a CPU build; "
            "install a CUDA build of torch first"
        )
    if wanted and nvcc is None:
        raise InstallError(
            f"--{'nccl' if options.nccl else 'cuda'}: no CUDA toolkit was found (nvcc is neither "
            f"on PATH nor under $CUDA_HOME or /usr/local/cuda). Install CUDA {torch.cuda}, as "
            "torch was built for, or load its module"
        )
    if wanted is not None:
        return wanted
    return torch.cuda is not None and nvcc is not None and facts.has_cuda_headers(nvcc)


def library_search(folders: tuple[Path, ...], platlib: Path) -> tuple[str, ...]:
    """Where the compiled extension looks for MPI's and torch's libraries.

    Folders inside this Python's environment are written relative to the extension, so that the
    cached wheel works in an environment at another path; others (a system MPI) stay absolute.
    """
    extension = platlib / "horovod" / "torch"
    prefix = Path(sys.prefix).resolve()
    entries = []
    for folder in folders:
        full = Path(os.path.abspath(folder))
        if full.resolve().is_relative_to(prefix) and extension.resolve().is_relative_to(prefix):
            relative = os.path.relpath(full.resolve(), extension.resolve())
            entries.append(f"$ORIGIN/{relative}")
        else:
            entries.append(str(full))
    entries.append("$ORIGIN/../../torch/lib")
    return tuple(dict.fromkeys(entries))


def _default_jobs() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // _BYTES_PER_JOB))
