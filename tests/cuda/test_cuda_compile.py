"""Every ``.cu`` file compiled for every architecture, with no GPU: registers, spills, wide loads.

Needs NVRTC, ptxas and nvdisasm from pip: the extra ``cuda-build``, which ``dev`` includes.
"""

from __future__ import annotations

import re

import pytest

import harness
from hvd_greco.kernels.cuda import build

ARCHITECTURES = ["75", "80", "90", "100"]
#: Most registers of a thread, by the beginning of a kernel's name. With 256 threads in a block, 64
#: leave 4 blocks on each multiprocessor, and 128 leave 2.
REGISTERS = {
    "accumulate": 64,
    "select_threshold": 64,
    "select_refine": 48,
    "select_compact": 128,
    "select_filter": 128,
    "scatter_add": 40,
    "ortho_top": 48,
    "ortho_gram": 128,
    "ortho_factor": 128,
    "ortho_apply": 96,
}
#: Fewest 16-byte loads and stores of global memory, likewise, where there must be any.
WIDE_LOADS = {"accumulate": 2, "select_compact": 4, "select_filter": 4, "select_refine": 1}
WIDE_LOADS["ortho_apply"] = 2
WIDE_STORES = {"accumulate": 1}
#: Shared memory that a block may have without asking for more.
SHARED = 48 * 1024


def limit(table: dict[str, int], kernel: str) -> int | None:
    """The entry of ``table`` for ``kernel``."""
    return next((value for prefix, value in table.items() if kernel.startswith(prefix)), None)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", build.FILES)
def test_registers_spills_and_wide_loads(name: str, arch: str) -> None:
    found, code = build.resources(name, arch), build.disassemble(name, arch)
    assert set(found) == set(code) == set(build.kernels(name)) != set()
    for kernel, taken in found.items():
        most = limit(REGISTERS, kernel)
        assert most is not None, f"{kernel}: state its limit"
        assert taken.registers <= most, f"{kernel}: {taken}"
        assert taken.spills == 0, f"{kernel}: {taken}"
        assert taken.shared <= SHARED
        loads = len(re.findall(r"\bLDG\.E[.\w]*\.128", code[kernel]))
        stores = len(re.findall(r"\bSTG\.E[.\w]*\.128", code[kernel]))
        assert loads >= (limit(WIDE_LOADS, kernel) or 0), f"{kernel}: {loads} 16-byte loads"
        assert stores >= (limit(WIDE_STORES, kernel) or 0), f"{kernel}: {stores} 16-byte stores"
        # A fused product and sum would round once, where the CPU rounds twice. (Quotients and
        # roots are made of such steps, and are correctly rounded.)
        if not kernel.startswith("ortho_factor"):
            assert not re.search(r"\b[FD]FMA\b", code[kernel]), kernel


def test_the_harness_runs_what_is_compiled() -> None:
    for name in build.FILES:
        text = harness.include_all((harness.KERNELS / f"{name}.cu").read_text())
        assert build.source(name) == text
        assert "#include" not in text


def test_cubin_from_nvrtc() -> None:
    assert build.compile_cubin("scatter", "90")[:4] == b"\x7fELF"


def test_errors_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "source", lambda name: "extern __global__ void broken( {")
    with pytest.raises(RuntimeError, match=r"no_such\.cu for sm_80(.|\n)*error"):
        build.compile_ptx("no_such", "80")


def test_spills_are_seen() -> None:
    said = (
        "ptxas info    : Compiling entry function 'few' for 'sm_80'\n"
        "    0 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 32 registers, used 1 barriers, 280 bytes smem, 376 bytes cmem[0]\n"
        "ptxas info    : Compiling entry function 'none' for 'sm_80'\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 9 registers, 376 bytes cmem[0]\n"
    )
    assert build.read_resources(said) == {
        "few": build.Resources(32, 20, 280),
        "none": build.Resources(9, 0, 0),
    }
