"""The harness sees faults: barriers left out, stray threads, memory that no one wrote or owns."""

from __future__ import annotations

import faulthandler
import multiprocessing
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import harness
import on_cpu
import vectors

HERE = Path(__file__).resolve().parent
SEEDS = range(1, 9)


def run_accumulate(lib: harness.Library, seed: int) -> list[np.ndarray]:
    vector = on_cpu.placed(vectors.make("gaussian", 4097 + 4096, np.float64))
    out = on_cpu.aligned_empty(len(vector), np.float64)
    (found,) = on_cpu.accumulate("float64", [vector], [None], [out], 0.3, lib=lib, seed=seed)
    return [found.counts, found.energies, out]


def run_select(lib: harness.Library, seed: int) -> list[np.ndarray]:
    # In 400 different magnitudes, so that every digit matters and ties as well.
    values = vectors.make("gaussian", 20_000)
    vector = on_cpu.placed(values[np.arange(20_000) % 400])
    (found,) = on_cpu.select([vector], [7007], clear=True, lib=lib, seed=seed)
    return [found.index, found.value, vector]


def run_scatter(lib: harness.Library, seed: int) -> list[np.ndarray]:
    # A rank's thread reads what another thread of the rank before wrote, and ranges differ.
    out = on_cpu.placed(np.zeros(700, dtype=np.float32))
    ranks = []
    for rank in range(4):
        index = np.arange(90 * rank, 400 + 17 * rank, dtype=np.int64)
        value = vectors.make("gaussian", len(index), seed=rank)
        ranks.append((on_cpu.placed(index), on_cpu.placed(value)))
    on_cpu.scatter_add("float32", [out], [ranks], 1.0, lib=lib, seed=seed)
    return [out]


def run_orthonormalise(lib: harness.Library, seed: int) -> list[np.ndarray]:
    stack = np.random.default_rng(2).standard_normal((2, 13, 600)).astype(np.float32)
    # So that one of the two needs another pass.
    stack[1, 1:] = stack[1, :1] + np.float32(1e-4) * stack[1, 1:]
    found, passes = on_cpu.orthonormalise(stack, lib, seed=seed)
    return [found, np.array(passes)]


RUN: dict[str, Callable[[harness.Library, int], list[np.ndarray]]] = {
    "accumulate": run_accumulate,
    "select": run_select,
    "scatter": run_scatter,
    "orthonormalise": run_orthonormalise,
}
BARRIER = "__syncthreads();"


def without_barrier(source: str, which: int) -> str:
    """``source`` with its ``which``-th barrier taken out."""
    places = [found.start() for found in re.finditer(re.escape(BARRIER), source)]
    at = places[which]
    return source[:at] + source[at + len(BARRIER) :]


def barriers(name: str) -> int:
    return harness.include_all((harness.KERNELS / f"{name}.cu").read_text()).count(BARRIER)


def _differs(name: str, lib: harness.Library) -> None:
    """Exit with status 1 if some order of threads gives what the real kernel does not."""
    faulthandler.disable()  # whose report of an expected crash would be long
    expected = RUN[name](on_cpu.library(name), 0)
    for seed in SEEDS:
        found = RUN[name](lib, seed)
        pairs = zip(found, expected, strict=True)
        if not all(a.tobytes() == b.tobytes() for a, b in pairs):
            sys.exit(1)


def caught(name: str, lib: harness.Library) -> bool:
    """Whether some order of threads makes ``lib`` fail, crash, or give other results."""
    # In a process of its own: a faulty kernel may write anywhere.
    process = multiprocessing.get_context("fork").Process(target=_differs, args=(name, lib))
    process.start()
    process.join()
    return process.exitcode != 0


def test_real_kernels_give_the_same_in_every_order() -> None:
    for name in RUN:
        assert not caught(name, on_cpu.library(name))


#: One of the header's, of the look-back's, and of each kernel's own.
FEW = [
    ("accumulate", 2),
    ("accumulate", 3),
    ("select", 3),
    ("select", 10),
    ("scatter", 3),
    ("orthonormalise", 6),
]
#: The barrier before a block says that it is done matters when blocks run side by side; the
#: header's other one is not used by every kernel.
UNSEEN = {
    *((name, 0) for name in RUN),
    ("scatter", 1),
    ("orthonormalise", 1),
}
ALL = [(name, i) for name in RUN for i in range(barriers(name)) if (name, i) not in UNSEEN]


def _missing_barrier(name: str, which: int) -> None:
    assert caught(name, harness.build(name, lambda source: without_barrier(source, which)))


@pytest.mark.parametrize(("name", "which"), FEW)
def test_missing_barrier_is_caught(name: str, which: int) -> None:
    _missing_barrier(name, which)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "which"), sorted(set(ALL) - set(FEW)))
def test_every_missing_barrier_is_caught(name: str, which: int) -> None:
    _missing_barrier(name, which)


FAULTS = """
#include "common.cuh"
extern "C" __global__ void half_a_barrier(u32* out) {
    if (threadIdx.x < 100) __syncthreads();
    out[threadIdx.x] = 1;
}
extern "C" __global__ void lost_lane(u32* out) {
    if (threadIdx.x == 40) return;
    out[threadIdx.x] = __ballot_sync(EVERY_LANE, 1);
}
extern "C" __global__ void wrong_mask(u32* out) {
    out[threadIdx.x] = __ballot_sync(0xffffu, 1);
}
extern "C" __global__ void never_filled(u32* out) {
    __shared__ u32 cells[256];
    if (out[threadIdx.x]) cells[threadIdx.x] = out[threadIdx.x];
    out[threadIdx.x] = cells[threadIdx.x];
}
extern "C" __global__ void shuffles(u32* out) {
    const u32 lane = threadIdx.x & 31;
    u64 wide = (u64)lane << 40;
    out[threadIdx.x] = (u32)(__shfl_up_sync(EVERY_LANE, wide, 3) >> 40) |
                       __shfl_xor_sync(EVERY_LANE, lane, 5) << 8 |
                       __shfl_sync(EVERY_LANE, lane, 7) << 16;
}
extern "C" __global__ void beyond(u32* out) { out[threadIdx.x + 1] = 1; }
extern "C" __global__ void crooked(u32* out) { *(uint4*)(out + 1) = uint4{1, 2, 3, 4}; }
extern "C" __global__ void beyond_shared(u32* out) {
    __shared__ u32 cells[8];
    cells[threadIdx.x + 1] = out[threadIdx.x];
    out[threadIdx.x] = cells[0];
}
"""


def faults() -> harness.Library:
    return harness.build_source(harness.include_all(FAULTS))


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("half_a_barrier", "others"),
        ("lost_lane", "lane 8, which has ended|never come"),
        ("wrong_mask", "lacks the calling lane"),
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_stray_threads_are_reported(kernel: str, said: str, seed: int) -> None:
    with pytest.raises(harness.HarnessError, match=said):
        faults().launch(kernel, 1, np.zeros(256, dtype=np.uint32), seed=seed)


def test_shared_memory_begins_with_rubbish() -> None:
    out = np.zeros(256, dtype=np.uint32)
    faults().launch("never_filled", 1, out)
    assert np.all(out == 0xFFFF_FFFF)


def test_shuffles() -> None:
    lane = np.arange(256, dtype=np.uint32) % 32
    up = np.where(lane < 3, lane, lane - 3)
    for seed in (0, 1):
        out = np.zeros(256, dtype=np.uint32)
        faults().launch("shuffles", 1, out, seed=seed)
        assert np.array_equal(out, up | (lane ^ 5) << 8 | 7 << 16)


def _python(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True, text=True, cwd=HERE, env={**harness.sanitizer_environment(), **more},
    )  # fmt: skip


@pytest.mark.skipif(harness.sanitizing(), reason="starts such a process itself")
@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("beyond", "heap-buffer-overflow"),
        ("crooked", "misaligned address"),
        ("beyond_shared", "index 8 out of bounds"),
    ],
)
def test_sanitizers_catch(kernel: str, said: str) -> None:
    size = 8 if kernel == "beyond_shared" else 256
    program = (
        "import numpy, harness, test_cuda_harness\n"
        f"out = numpy.ones({size}, dtype=numpy.uint32)\n"
        f"test_cuda_harness.faults().launch('{kernel}', 1, out, block={size})\n"
        "print('nothing seen')\n"
    )
    done = _python("-c", program, PYTHONPATH="../../kernels/cuda")
    assert done.returncode != 0
    assert "nothing seen" not in done.stdout
    assert re.search(said, done.stderr), done.stderr[-3000:]


#: Those that run kernels and do without torch, which would take long to load here.
KERNEL_TESTS = [
    path.name
    for path in sorted(HERE.glob("test_cuda_*.py"))
    if "on_cpu." in path.read_text() and "torch = pytest" not in path.read_text()
]


@pytest.mark.skipif(harness.sanitizing(), reason="is what it starts")
@pytest.mark.parametrize("file", sorted(set(KERNEL_TESTS) - {Path(__file__).name}))
def test_kernels_under_sanitizers(file: str) -> None:
    """The tests of one ``.cu`` file over again, in shuffled order, with the sanitizers."""
    done = _python(
        "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly",
        "-m", "not slow", file, GRECO_HARNESS_SEED="11",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout[-1000:]
    assert int(passed.group(1)) >= 2
