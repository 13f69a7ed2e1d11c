"""Kernels in Numba: compiled for every architecture with no GPU, and run in the simulator."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import numba.cuda.dispatcher
import pytest
from numba import cuda

from hvd_greco.kernels.cuda import build, numba_kernels

SIGNATURES = numba_kernels.signatures()
#: Registers of a thread. With 128 threads in a block, 64 leave 8 blocks on each multiprocessor.
REGISTERS = 64


@pytest.fixture
def device_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """Device functions ask the current device for its compute capability; there is none here."""

    def choose(capability: tuple[int, int]) -> None:
        device = types.SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(numba.cuda.dispatcher, "get_current_device", lambda: device)

    return choose


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (10, 0)], ids=str)
@pytest.mark.parametrize("name", SIGNATURES)
def test_compiles(
    name: str, capability: tuple[int, int], device_of: Callable[[tuple[int, int]], None]
) -> None:
    device_of(capability)
    kernel, signature = SIGNATURES[name]
    ptx, _ = cuda.compile_ptx(kernel.py_func, signature, cc=capability)
    text = ptx if isinstance(ptx, str) else ptx.decode()
    # A fused product and sum would round once, where the CPU rounds twice.
    assert not re.search(r"\bfma\.", text)
    resources = build.assemble(text, "".join(map(str, capability)))
    (taken,) = resources.values()
    assert taken.spills == 0
    assert taken.registers <= REGISTERS


def test_kernels_in_the_simulator() -> None:
    """All of numba_cases.py, in a process of its own."""
    file = Path(__file__).with_name("numba_cases.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"},
        cwd=file.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) >= 60
