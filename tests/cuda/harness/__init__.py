"""Compiles a ``.cu`` file with g++ and runs its kernels on the CPU, one fiber for each thread.

The file is the one that NVRTC compiles for a GPU; ``cuda_on_cpu.h`` supplies what a GPU would.

Environment:
    GRECO_HARNESS_SANITIZE: ``1`` compiles with AddressSanitizer and UndefinedBehaviorSanitizer.
        The process must have been started with :func:`sanitizer_environment`, since libasan has
        to come before everything else; both abort the process at the first fault.
    GRECO_HARNESS_SEED: not ``0`` shuffles the order of threads and of blocks.
"""

from __future__ import annotations

import ctypes
import getpass
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[2] / "kernels" / "cuda"

_FLAGS = [
    "-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-pthread", "-ffp-contract=off",
    # CUDA lets a pointer to float be read through one to uint4.
    "-fno-strict-aliasing",
    # Else libraries made from variants of one file would share static variables.
    "-fno-gnu-unique", "-fvisibility=hidden", "-U_FORTIFY_SOURCE",
    "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-unused-function",
]  # fmt: skip
_SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


class HarnessError(RuntimeError):
    """A kernel did what no GPU defines: threads that wait for ever, or lanes that are not there."""


def sanitizing() -> bool:
    """Whether this process is to compile with the sanitizers."""
    return os.environ.get("GRECO_HARNESS_SANITIZE") == "1"


def sanitizer_environment() -> dict[str, str]:
    """The environment of a process that runs kernels under the sanitizers."""
    runtime = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return {
        **os.environ,
        "GRECO_HARNESS_SANITIZE": "1",
        "LD_PRELOAD": runtime,
        # Python and NumPy leak on purpose. Stacks of fibers are our own, without the checks for
        # use after return.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:abort_on_error=1",
        "PYTHONMALLOC": "malloc",
    }


class Library:
    """The kernels of one ``.cu`` file."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def launch(
        self,
        kernel: str,
        grid: int,
        *arguments: np.ndarray | np.generic,
        block: int = 256,
        seed: int | None = None,
        workers: int = 1,
    ) -> None:
        """Run ``kernel`` to its end.

        Args:
            kernel: its name.
            grid: number of blocks; none run if it is 0.
            *arguments: arrays go as pointers, NumPy scalars as they are.
            block: threads of a block.
            seed: of the order of threads; 0 for the natural one, None for what the environment
                says.
            workers: blocks that run at the same time.

        Raises:
            HarnessError: see there.
        """
        if grid == 0:
            return
        if seed is None:
            seed = int(os.environ.get("GRECO_HARNESS_SEED", "0"))
        cells = []
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                argument = np.uint64(argument.ctypes.data)
            cells.append(np.array([argument]))
        table = (ctypes.c_void_p * max(1, len(cells)))(*(cell.ctypes.data for cell in cells))
        text = ctypes.create_string_buffer(512)
        entry = getattr(self._library, f"run_{kernel}")
        failed = entry(
            ctypes.c_uint64(seed), ctypes.c_uint(workers), ctypes.c_uint(grid),
            ctypes.c_uint(block), table, text,
        )  # fmt: skip
        if failed:
            raise HarnessError(f"{kernel}: {text.value.decode()}")


def kernel_names(source: str) -> list[str]:
    """Names of the ``extern "C" __global__`` functions that the preprocessed ``source`` defines."""
    return re.findall(r'extern "C" KERNEL void (\w+)\(', source)


def build(name: str, patch: Callable[[str], str] | None = None) -> Library:
    """Compile ``kernels/cuda/<name>.cu``, or what ``patch`` makes of its text.

    The text is that with the headers of this folder put in, so a patch may change those too.
    """
    source = include_all((KERNELS / f"{name}.cu").read_text())
    if patch:
        changed = patch(source)
        if changed == source:
            raise ValueError("the patch changes nothing")
        source = changed
    return build_source(source)


def include_all(source: str) -> str:
    """``source`` with every ``#include "file"`` replaced by that file's text."""
    return re.sub(
        r'^#include "([\w.]+)"$',
        lambda found: include_all((KERNELS / found.group(1)).read_text()),
        source,
        flags=re.MULTILINE,
    )


def build_source(source: str) -> Library:
    """Compile CUDA source. Results are kept in the temporary folder, by the hash of all inputs."""
    flags = [*_FLAGS, *(_SANITIZE if sanitizing() else [])]
    runtime = [HERE / "cuda_on_cpu.h", HERE / "cuda_on_cpu.cpp"]
    parts = [source, " ".join(flags), *(path.read_text() for path in runtime), __file__]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    folder = Path(tempfile.gettempdir()) / f"greco-harness-{getpass.getuser()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{digest}.so"
    if not library.exists():
        _compile(source, flags, library)
    return Library(library)


def _compile(source: str, flags: list[str], library: Path) -> None:
    # Compilers and sanitizers' runtimes do not mix: without LD_PRELOAD.
    clean = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "kernels.cpp"
        marked = "#undef __global__\n#define __global__ KERNEL"
        text.write_text(f'#include "cuda_on_cpu.h"\n{marked}\n{source}')
        seen = subprocess.run(
            ["g++", "-E", "-P", "-I", str(HERE), str(text)],
            capture_output=True, text=True, env=clean, check=True,
        )  # fmt: skip
        names = kernel_names(re.sub(r"\s+", " ", seen.stdout))
        if not names:
            raise ValueError("no kernel in the source")
        entries = "\n".join(_ENTRY.replace("NAME", name) for name in names)
        text.write_text(f'#include "cuda_on_cpu.h"\n#line 1 "kernels.cu"\n{source}\n{entries}')
        made = Path(folder) / "kernels.so"
        done = subprocess.run(
            ["g++", *flags, "-I", str(HERE), str(text), str(HERE / "cuda_on_cpu.cpp"),
             "-o", str(made)],
            capture_output=True, text=True, env=clean,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"g++ failed:\n{done.stderr[-6000:]}")
        # Another process may be doing the same.
        kept = library.with_suffix(f".{os.getpid()}")
        kept.write_bytes(made.read_bytes())
        kept.replace(library)


_ENTRY = """
extern "C" __attribute__((visibility("default"))) int run_NAME(
    uint64_t seed, unsigned workers, unsigned grid, unsigned size, void** arguments, char* text) {
    std::string error;
    harness::Options options{seed, workers};
    const int failed = harness::launch(options, grid, size, NAME, arguments, error);
    strncpy(text, error.c_str(), 511);
    return failed;
}
"""
