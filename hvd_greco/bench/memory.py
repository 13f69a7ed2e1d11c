"""What a call takes beside its arguments, and how many calls it makes: counted, not estimated."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..kernels import backend_of

#: How it is measured, for tables and the record.
CPU_METHOD = (
    "growth of the process's peak resident memory (VmHWM) over one warmed-up call, after free "
    "memory went back to the system (malloc_trim); results included, whole pages"
)
CUDA_METHOD = "torch.cuda.max_memory_allocated over one call; what CuPy allocates is not in it"


def extra_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Peak memory of one call on top of what was there before; its results count.

    On the CPU that is resident memory, whoever asked for it: torch, NumPy or compiled code. Pages
    that are asked for and never touched are not in it. None where the system does not tell (it
    takes Linux's ``/proc/self/clear_refs``).
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        held = call()
        torch.cuda.synchronize()
        del held
        return int(torch.cuda.max_memory_allocated() - before)
    try:
        # Otherwise the call would find room that an earlier one left, and seem to need none.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
        before = _status("VmHWM")
        held = call()
        peak = _status("VmHWM")
        del held
    except (OSError, AttributeError, KeyError):
        return None
    return max(0, peak - before)


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines[name].split()[0]) * 1024


class _Traced:
    """Names of the compiled functions that are called while it is open; None without Numba."""

    def __init__(self) -> None:
        self.names: list[str] | None = None
        self._jit: Any = None

    def __enter__(self) -> _Traced:
        if backend_of("cpu") is not None:
            from ..kernels.cpu import jit

            self._jit, self.names = jit, []
            jit.trace = self.names
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._jit is not None:
            self._jit.trace = None


class _Dispatched(TorchDispatchMode):
    """Counts the torch operations that this thread runs, allocations and views left out."""

    _FREE = frozenset(
        f"aten::{name}"
        for name in (
            "empty", "empty_like", "empty_strided", "view", "_unsafe_view", "slice", "select", "t",
            "transpose", "unsqueeze", "detach", "alias", "lift_fresh", "expand",
            "as_strided", "permute",
        )
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._lock = threading.Lock()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func._schema.name not in self._FREE:
            with self._lock:
                self.count += 1
        return func(*args, **(kwargs or {}))


def launches(call: Callable[[], object], device: torch.device) -> int | None:
    """Kernels that one call starts.

    On the CPU: calls of our compiled functions, one for each thread that takes part, and torch
    operations, allocations and views left out. (What the portable backend does in NumPy is not
    counted.) On CUDA: kernels and copies that torch's profiler sees; None where it sees nothing.
    """
    if device.type == "cuda":
        return _gpu_launches(call)
    with _Traced() as traced, _Dispatched() as dispatched:
        call()
    return dispatched.count + len(traced.names or [])


def _gpu_launches(call: Callable[[], object]) -> int | None:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
        found = sum(event.device_type == DeviceType.CUDA for event in profiler.events() or [])
    except RuntimeError:  # no permission to profile, or another profiler at work
        return None
    return found or None
