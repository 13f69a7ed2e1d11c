"""The one place that touches CuPy: compiled modules, torch's current stream, and tables uploaded.

CuPy is imported at the first launch, so that everything else here works where there is none.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from . import build
from .tables import THREADS

_launched = 0


@cache
def unavailable() -> str | None:
    """Why kernels cannot be launched here, in words for the user; None if they can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # a broken installation raises whatever it likes
        major = (torch.version.cuda or "12").split(".")[0]
        return (
            f"CuPy cannot be used ({type(error).__name__}: {error}); "
            f"`pip install cupy-cuda{major}x` fits this torch"
        )
    return None


@cache
def _kernel(file: str, kernel: str) -> Any:
    import cupy

    # CuPy compiles once for each device, and keeps the result on disk by the hash of the text.
    module = cupy.RawModule(code=build.source(file), options=build.OPTIONS, backend="nvrtc")
    return module.get_function(kernel)


def launch(
    file: str,
    kernel: str,
    grid: int,
    device: torch.device,
    *arguments: torch.Tensor | np.generic,
) -> None:
    """Start ``kernel`` of ``<file>.cu`` on torch's current stream of ``device``.

    Args:
        file: without its ending.
        kernel: its name.
        grid: blocks; nothing happens if it is 0.
        device: where the tensors are.
        *arguments: tensors go as pointers (so that a bf16 one needs no format that CuPy lacks),
            NumPy scalars as they are.
    """
    if not grid:
        return
    import cupy

    count_launch()
    pointers = tuple(
        np.uint64(argument.data_ptr()) if isinstance(argument, torch.Tensor) else argument
        for argument in arguments
    )
    stream = torch.cuda.current_stream(device)
    with (
        cupy.cuda.Device(stream.device_index),
        cupy.cuda.ExternalStream(stream.cuda_stream, stream.device_index),
    ):
        _kernel(file, kernel)((grid,), (THREADS,), pointers)


def count_launch() -> None:
    """Called before each launch, by whoever launches."""
    global _launched
    _launched += 1


def launches() -> int:
    """How many kernels this process has launched; those of torch itself are not counted."""
    return _launched


def upload(device: torch.device, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Copies of ``arrays`` on ``device``, as uint8, each 16-byte aligned, in one transfer."""
    sizes = [array.nbytes + -array.nbytes % 16 for array in arrays]
    together = np.zeros(sum(sizes), dtype=np.uint8)
    starts = np.cumsum([0, *sizes]).tolist()
    for array, start in zip(arrays, starts[:-1], strict=True):
        together[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
    there = torch.from_numpy(together).to(device)
    return [there[start:end] for start, end in itertools.pairwise(starts)]


def zeros(device: torch.device, *words: int) -> list[torch.Tensor]:
    """int64 zeros on ``device``, one tensor for each number of ``words``, cleared at once.

    Each begins at a multiple of 16 bytes.
    """
    sizes = [count + count % 2 for count in words]
    together = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
    return list(together.split(sizes))
