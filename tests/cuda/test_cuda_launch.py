"""The launchers on CPU tensors: all but CuPy itself, which the harness stands in for."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest

import on_cpu
import vectors

torch = pytest.importorskip("torch")

from test_backends import DTYPES, Data, check  # noqa: E402

from hvd_greco.errors import ConfigError  # noqa: E402
from hvd_greco.kernels import cholesky, portable, portable_linalg  # noqa: E402
from hvd_greco.kernels.cuda import launch, operations, runtime, tables  # noqa: E402


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels in the order in which they were launched."""
    names: list[str] = []

    def run(file: str, kernel: str, grid: int, device: torch.device, *arguments: object) -> None:
        names.append(kernel)
        as_numbers = [
            np.uint64(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments
        ]
        on_cpu.library(file).launch(kernel, grid, *as_numbers)

    monkeypatch.setattr(launch, "launch", run)
    return names


def values(kind: str, length: int, dtype: type = np.float32, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(vectors.make(kind, length, dtype, seed))


KERNELS = (
    "accumulate", "accumulate_select", "accumulate_select_many", "take_topk", "scatter_add",
    "orthonormalise",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["gauss", "special", "ties"])
@pytest.mark.parametrize("operation", KERNELS)
def test_operations_agree_with_the_reference(
    launched: list[str], operation: str, kind: str
) -> None:
    """As the table calls them, with all their options; the harness runs the kernels."""
    sizes = (33, 257) if operation == "orthonormalise" else (1, 33, 4097)
    for dtype, numel in itertools.product(DTYPES, sizes):
        check(operation, Data(kind, numel, dtype), {"cuda": operations})
    assert launched


def test_dtypes_that_kernels_do_not_add_are_left_to_torch(launched: list[str]) -> None:
    for narrow, wide in ((torch.float32, torch.float64), (torch.float64, torch.float32)):
        gradient, residual = values("gaussian", 500).to(narrow), values("gaussian", 500).to(wide)
        out, expected = torch.empty_like(residual), torch.empty_like(residual)
        found = operations.accumulate_select(out, gradient, residual, 0.5, 20, True)
        wanted = portable.accumulate_select(expected, gradient, residual, 0.5, 20, True)
        assert torch.equal(out, expected)
        assert all(map(torch.equal, found, wanted))


def test_select_with_a_histogram_and_clearing(launched: list[str]) -> None:
    """Launches do not grow in number with the vectors; values come along and are cleared."""
    given = [values("gaussian", n) for n in (1, 100, 4097, 9000)]
    ks = [1, 10, 300, 4000]
    counts = torch.empty((4, 2048), dtype=torch.int64)
    energies = torch.empty((4, 2048), dtype=torch.float64)
    nothing = [None] * 4
    launch.accumulate_many(given, nothing, 1.0, nothing, counts, energies)
    before = [vector.clone() for vector in given]
    launched.clear()
    found = launch.select_many(given, ks, counts, clear=True)
    assert len(launched) == 5
    for vector, old, k, (index, value) in zip(given, before, ks, found, strict=True):
        assert torch.equal(index, portable.select_topk(old, k))
        assert torch.equal(value, old[index])
        old[index] = 0
        assert torch.equal(vector, old)


def test_select_refuses_what_31_bits_cannot_number() -> None:
    huge = torch.empty(1, dtype=torch.float32).expand(1 << 31)
    with pytest.raises(ConfigError, match="2147483648 elements"):
        launch.select_many([huge], [1])


def test_scatter_add(launched: list[str]) -> None:
    outs = [values("gaussian", n) for n in (70, 20_000)]
    payloads = []
    for out in outs:
        ranks = []
        for rank in range(3):
            index = torch.nonzero(torch.rand(out.numel()) < 0.3).flatten()
            ranks.append((index, torch.randn(index.numel()).to(torch.bfloat16)))
            assert index.numel() or rank is None
        payloads.append(ranks)
    expected = [out.clone() for out in outs]
    for out, ranks in zip(expected, payloads, strict=True):
        for index, value in ranks:
            out[index] += value.float() * torch.tensor(0.7)
    launch.scatter_add_many(outs, payloads, 0.7)
    assert all(map(torch.equal, outs, expected))
    assert len(launched) == 1
    mixed = [(torch.tensor([0]), torch.ones(1)), (torch.tensor([0]), torch.ones(1).half())]
    with pytest.raises(ConfigError, match="one dtype"):
        launch.scatter_add_many(outs[:1], [mixed])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orthonormalise(launched: list[str], dtype: torch.dtype) -> None:
    stack = torch.randn(3, 7, 200, generator=torch.Generator().manual_seed(1), dtype=dtype)
    given = stack.clone()
    assert torch.equal(launch.orthonormalise(stack), portable_linalg.orthonormalise(given))
    assert len(launched) == 4
    stack[1, 1:] = stack[1, :1] + 1e-4 * stack[1, 1:]
    assert torch.equal(launch.orthonormalise(stack), portable_linalg.orthonormalise(stack))
    assert len(launched) == 12
    launched.clear()
    tall = torch.randn(1, 65, 70, dtype=dtype)
    assert torch.equal(launch.orthonormalise(tall), portable_linalg.orthonormalise(tall))
    assert not launched


def test_block_map() -> None:
    of_block, first = tables.block_map([2, 0, 3])
    assert of_block.tolist() == [0, 0, 2, 2, 2]
    assert first.tolist() == [0, 2, 2]
    assert of_block.dtype == np.uint32
    of_block, first = tables.block_map([])
    assert len(of_block) == len(first) == 0


def test_blocks_around_a_tile() -> None:
    assert [tables.accumulate_blocks(n, 4) for n in (0, 1, 16_384, 16_385)] == [0, 1, 1, 2]
    assert [tables.accumulate_blocks(n, 8) for n in (4096, 4097)] == [1, 2]
    assert [tables.select_blocks(n) for n in (1, 4096, 4097)] == [1, 1, 2]
    assert [tables.refine_blocks(n) for n in (1, 16_385, 1 << 30)] == [1, 2, 512]
    assert [tables.scatter_blocks(n) for n in (0, 8192, 8193)] == [0, 1, 2]


def test_tables_agree_with_the_sources() -> None:
    """Constants and structs are stated in C and in Python."""
    texts = {path.name: path.read_text() for path in on_cpu.harness.KERNELS.glob("*.cu*")}
    for name, define, value in (
        ("common.cuh", "THREADS", tables.THREADS),
        ("select.cu", "DIGITS", tables.DIGITS),
        ("scatter.cu", "STRETCH", tables.SCATTER_STRETCH),
        ("orthonormalise.cu", "MOST_ROWS", tables.MOST_ROWS),
        ("orthonormalise.cu", "CHUNK", tables.ORTHO_CHUNK),
        ("orthonormalise.cu", "TOP_COLUMNS", tables.ORTHO_TOP_COLUMNS),
        ("orthonormalise.cu", "ENTRY_BITS", cholesky.BITS),
        ("orthonormalise.cu", "SAFE", cholesky.SAFE),
        ("orthonormalise.cu", "DEPENDENT_SQUARED", "0x1p-32"),
        ("orthonormalise.cu", "HARD", "0x1p4"),
        ("orthonormalise.cu", "APPLY_COLUMNS", tables.ORTHO_APPLY_COLUMNS),
    ):
        assert f"#define {define} {value}\n" in texts[name], define
    assert tables.ORTHO_CHUNK == cholesky.CHUNK
    assert tables.ORTHO_REPEATS == cholesky.PASSES
    assert (cholesky.DEPENDENT**2, cholesky.HARD) == (2.0**-32, 2.0**4)
    for name, struct, dtype in (
        ("accumulate.cu", "AccumulateSegment", tables.ACCUMULATE_SEGMENT),
        ("select.cu", "SelectSegment", tables.SELECT_SEGMENT),
        ("scatter.cu", "ScatterSegment", tables.SCATTER_SEGMENT),
        ("scatter.cu", "ScatterPayload", tables.SCATTER_PAYLOAD),
        ("orthonormalise.cu", "Stack", tables.ORTHO_STACK),
    ):
        body = texts[name].split(f"struct {struct} {{\n")[1].split("};")[0]
        fields = [line.split(";")[0].split()[-1].lstrip("*") for line in body.splitlines()]
        assert fields == list(dtype.names or ()), struct
        assert dtype.itemsize == 8 * len(fields)


def test_uploads_and_zeros_are_aligned() -> None:
    device = torch.device("cpu")
    arrays = [np.arange(3, dtype=np.uint32), np.zeros(0, dtype=np.uint8), np.ones(5)]
    there = runtime.upload(device, arrays)
    assert [int(t.data_ptr() - there[0].data_ptr()) % 16 for t in there] == [0, 0, 0]
    for array, tensor in zip(arrays, there, strict=True):
        assert tensor.numpy()[: array.nbytes].tobytes() == array.tobytes()
    first, second = runtime.zeros(device, 3, 2)
    assert not first.any()
    assert not second.any()
    assert (second.data_ptr() - first.data_ptr()) % 16 == 0


def test_without_cupy_the_backend_says_so() -> None:
    """Once, with what to install; other kernels serve."""
    program = (
        "import logging, sys, torch\n"
        "logging.basicConfig()\n"
        "sys.modules['cupy'] = None\n"
        "torch.cuda.is_available = lambda: True\n"
        "from hvd_greco.kernels import dispatch\n"
        "print(dispatch.backend_of('cuda'), dispatch.backend_of('cuda'))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "None None\n", done.stderr
    assert done.stderr.count("are not available") == done.stderr.count("pip install cupy-cuda") == 1
