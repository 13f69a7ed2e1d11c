"""The same work in CuPy's own functions, on a GPU that has CuPy; nowhere else anything.

They share torch's memory and run on torch's current stream, so that one clock serves all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Rivals = dict[str, Callable[[], object]]


def _cupy(tensor: torch.Tensor) -> Any:
    """CuPy, if it is there and can use the tensor's device."""
    if tensor.device.type != "cuda":
        return None
    try:
        import cupy

        cupy.from_dlpack(tensor[:1])
    except Exception:  # not installed, or broken in whatever way: then there is no rival
        return None
    return cupy


def _on_stream(cupy: Any, work: Callable[[], object]) -> Rivals:
    def run() -> object:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            return work()

    return {"cupy": run}


def topk_feedback(gradient: torch.Tensor, residual: torch.Tensor, k: int) -> Rivals:
    """argpartition of the sum's magnitudes."""
    cupy = _cupy(gradient)
    if cupy is None:
        return {}
    given, held = cupy.from_dlpack(gradient), cupy.from_dlpack(residual)

    def work() -> object:
        cupy.add(held, given, out=held)
        positions = cupy.argpartition(cupy.abs(held), held.size - k)[held.size - k :]
        values = held[positions]
        held[positions] = 0
        return positions, values

    return _on_stream(cupy, work)


def scatter_add(out: torch.Tensor, payloads: list[tuple[torch.Tensor, torch.Tensor]]) -> Rivals:
    """``cupy.add.at`` for each rank."""
    cupy = _cupy(out)
    if cupy is None:
        return {}
    target = cupy.from_dlpack(out)
    arrays = [(cupy.from_dlpack(p), cupy.from_dlpack(v)) for p, v in payloads]

    def work() -> object:
        for positions, values in arrays:
            cupy.add.at(target, positions, values)
        return None

    return _on_stream(cupy, work)


def qr(columns: torch.Tensor) -> Rivals:
    """``cupy.linalg.qr``."""
    cupy = _cupy(columns)
    if cupy is None:
        return {}
    matrix = cupy.from_dlpack(columns)
    return _on_stream(cupy, lambda: cupy.linalg.qr(matrix)[0])
