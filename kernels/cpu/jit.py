"""Compiling: once for each function and dtype, by one process at a time, cached on disk.

Numba's cache goes by the file that a function stands in, and would miss a change in what is
compiled into it from another one. So ours lies in a folder named after the contents, place and
time of all of them. Its files are written atomically, but two processes that compile different
versions of a function at once may give both the same file name. N ranks on a shared home do just
that: the first compilation happens under a file lock, and a marker says that it is done; from then
on no rank waits for another.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from filelock import FileLock, Timeout

#: Longer than any compilation here takes, even with many ranks on few cores.
_PATIENCE_SECONDS = 120.0

#: Seconds spent on compiling or loading in this process.
spent_seconds = 0.0

#: Where the benchmark wants the names of the compiled functions that are called; None costs least.
trace: list[str] | None = None

_OPTIONS: dict[str, Any] = {
    "nogil": True,  # threads are ours: see .threads
    "error_model": "numpy",  # a division by zero is inf, not an exception
}


def inline(function: Callable[..., Any]) -> Any:
    """For functions that only other compiled functions call; they are compiled into them."""
    return numba.njit(**_OPTIONS)(function)


def inline_sum(function: Callable[..., Any]) -> Any:
    """:func:`inline` for sums whose order does not matter, so that the compiler may choose it.

    Either they are exact in any order, or they are statistics.
    """
    return numba.njit(**_OPTIONS, fastmath={"reassoc", "contract"})(function)


class Kernel:
    """A compiled function that is called like the Python one; arrays and NumPy scalars only."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._compiled = _cached(function)
        self._name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        self._ready: set[tuple[Any, ...]] = set()
        self._lock = threading.Lock()

    def __call__(self, *arguments: Any) -> Any:
        key = tuple([getattr(a, "dtype", None) or type(a) for a in arguments])
        if key not in self._ready:
            self._prepare(key, arguments)
        if trace is not None:
            trace.append(self._name)  # a list's append is atomic, unlike += on a number
        return self._compiled(*arguments)

    def _prepare(self, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> None:
        global spent_seconds
        signature = tuple(numba.typeof(argument) for argument in arguments)
        with self._lock:
            if key in self._ready:
                return
            began = time.perf_counter()
            self._compile(signature)
            spent_seconds += time.perf_counter() - began
            self._ready.add(key)

    def _compile(self, signature: tuple[Any, ...]) -> None:
        """Compile, or load from the cache, what takes arguments of these types."""
        folder = cache_folder()
        if folder is not None:
            # Layouts are part of a signature: a slice may be contiguous or not.
            digest = hashlib.blake2b(str(signature).encode(), digest_size=8).hexdigest()
            marker = folder / f"{self._name}-{digest}.done"
            try:
                if not marker.exists():
                    with FileLock(folder / "compiling.lock", timeout=_PATIENCE_SECONDS):
                        self._compiled.compile(signature)
                        marker.touch()
                    return
            except (Timeout, OSError):
                # A lock that nobody gives back, or a disk that takes no lock: compiling beside
                # others is no less right, only the cache may have to be made again.
                pass
        self._compiled.compile(signature)


def _cached(function: Callable[..., Any]) -> Any:
    """The function with Numba's cache in our folder; without one if there is nowhere to put it."""
    folder = cache_folder()
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = "" if folder is None else str(folder)
    try:
        # Where the cache lies is settled here, and not changed by what the user's own code sets.
        return numba.njit(cache=folder is not None, **_OPTIONS)(function)
    finally:
        numba.config.CACHE_DIR = before


@functools.cache
def cache_folder() -> Path | None:
    """Where compiled code is kept: ``~/.cache/hvd-greco/kernels/<version>``.

    ``NUMBA_CACHE_DIR`` or ``XDG_CACHE_HOME`` in place of ``~/.cache``; None if it cannot be
    written.
    """
    base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    here = Path(__file__).parent
    sources = [*here.glob("*.py"), here.parent / "scalar.py", here.parent / "cholesky.py"]
    try:
        folder = Path(base) if base else Path.home() / ".cache"
        folder = folder / "hvd-greco" / "kernels" / version_of(sources)
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{socket.gethostname()}-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except (OSError, RuntimeError):  # no home, or none that can be written
        return None
    return folder


def version_of(sources: list[Path]) -> str:
    """Another one whenever Numba would compile anew.

    That is also so for files that lie elsewhere or were written at another time, whatever they
    say. Markers must not outlive it: ranks would compile beside each other.
    """
    digest = hashlib.blake2b(digest_size=8)
    for source in sorted(sources):
        digest.update(f"{source} {source.stat().st_mtime_ns} ".encode())
        digest.update(source.read_bytes())
    digest.update(f"{numba.__version__} {np.__version__} {platform.machine()} {_cpu()}".encode())
    return digest.hexdigest()


def _cpu() -> str:
    from llvmlite import binding

    return f"{binding.get_host_cpu_name()} {binding.get_host_cpu_features().flatten()}"
