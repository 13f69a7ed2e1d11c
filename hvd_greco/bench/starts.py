"""Cold and warm start: a process of its own each, with a cache folder of its own."""

from __future__ import annotations

import os
import subprocess
import tempfile

import msgspec

from ..errors import LaunchError
from ..launch import python_command
from .record import Start

#: A minute of compiling would be a finding; an hour a fault.
_LIMIT_SECONDS = 300.0


def measure_starts(device: str, threads: int) -> list[Start]:
    """A start with an empty cache, and one with what that left.

    Raises:
        LaunchError: the process failed; what it said is in the message.
    """
    with tempfile.TemporaryDirectory(prefix="hvd-greco-start-") as folder:
        return [_start(cache, device, threads, folder) for cache in ("empty", "filled")]


def _start(cache: str, device: str, threads: int, folder: str) -> Start:
    environment = {
        **os.environ,
        "NUMBA_CACHE_DIR": folder,
        "CUPY_CACHE_DIR": os.path.join(folder, "cupy"),
        "OMP_NUM_THREADS": str(threads),
    }
    command = python_command("-c", "from hvd_greco.bench.first import main; main()", device)
    try:
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True,
            timeout=_LIMIT_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"the process that measures a start with the cache {cache} took more than "
            f"{_LIMIT_SECONDS:.0f} seconds; leave it out with --no-starts"
        ) from None
    if done.returncode:
        raise LaunchError(
            f"the process that measures a start with the cache {cache} failed (leave it out with "
            f"--no-starts):\n{done.stderr.strip()[-2000:]}"
        )
    seconds = msgspec.json.decode(done.stdout.splitlines()[-1], type=dict[str, float])
    return Start(cache, **{name: round(value, 3) for name, value in seconds.items()})
