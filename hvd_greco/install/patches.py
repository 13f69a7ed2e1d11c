"""The changes to Horovod's source, each with its reason. None of them touches what it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import InstallError


@dataclass(frozen=True)
class Patch:
    """Replace ``old`` (which must occur exactly once) by ``new`` in ``file``, because ``why``."""

    file: str
    old: str
    new: str
    why: str


_TORCH_CMAKE = "horovod/torch/CMakeLists.txt"


def patches_for(rpath: Sequence[str], mpi_wrapper: Path | None, cuda: bool) -> tuple[Patch, ...]:
    """The patches for one build.

    Args:
        rpath: where the extension looks for libraries, ``$ORIGIN`` meaning its own folder.
        mpi_wrapper: the compiler wrapper of the MPI to use, or None to leave that to CMake.
        cuda: whether tensors on a GPU are to be supported.
    """
    standard = "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"
    patches = [
        Patch("CMakeLists.txt", *standard, "torch's headers need C++17 since torch 2.1"),
        Patch(_TORCH_CMAKE, *standard, "the same, for the torch extension"),
        Patch(
            _TORCH_CMAKE,
            "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
            "import sysconfig; print(sysconfig.get_paths()['include'])",
            "Python 3.12 has no distutils",
        ),
        Patch(
            "horovod/runner/js_run.py",
            "from distutils.spawn import find_executable",
            "from shutil import which as find_executable",
            "the same, for horovodrun",
        ),
        Patch(
            _TORCH_CMAKE,
            'set_target_properties(${PYTORCH_TARGET_LIB} PROPERTIES OUTPUT_NAME "mpi_lib_v2")',
            'set_target_properties(${PYTORCH_TARGET_LIB} PROPERTIES OUTPUT_NAME "mpi_lib_v2")\n'
            "set_target_properties(${PYTORCH_TARGET_LIB} PROPERTIES BUILD_WITH_INSTALL_RPATH TRUE "
            f'INSTALL_RPATH "{_cmake(";".join(rpath))}")',
            "libraries are looked for relative to the extension, so that the wheel also works in "
            "another environment than the one it was built in",
        ),
    ]
    if mpi_wrapper is not None:
        find = "    find_package(MPI ${MPI_REQUIRED})"
        patches.append(
            Patch(
                "CMakeLists.txt",
                find,
                f'    set(MPI_CXX_COMPILER "{_cmake(str(mpi_wrapper))}" CACHE FILEPATH "")\n{find}',
                "compile against the MPI that was chosen, not the first one CMake finds",
            )
        )
    if not cuda:
        patches.append(
            Patch(
                "cmake/Modules/FindPytorch.cmake",
                "print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) "
                "else False)",
                "print(False)",
                "no GPU tensors: leave CUDA out even where a toolkit happens to be installed",
            )
        )
    return tuple(patches)


def _cmake(text: str) -> str:
    """Text for a quoted CMake argument."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")


def apply_patches(source: Path, patches: Sequence[Patch]) -> None:
    """Apply ``patches`` to the unpacked source.

    Raises:
        InstallError: a file or the text to replace is not there exactly once: this is not the
            source that the patches were written for.
    """
    for patch in patches:
        path = source / patch.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        found = text.count(patch.old)
        if found != 1:
            raise InstallError(
                f"Horovod's {patch.file} holds the text {patch.old.strip()!r} {found} times "
                "instead of once, so this is not the source of Horovod 0.28.1 that the change "
                f"({patch.why}) was written for; nothing was built"
            )
        path.write_text(text.replace(patch.old, patch.new), encoding="utf-8")
