"""What only the compiled backend can get wrong: threads, samples that mislead, caches, dispatch.

Results of single operations are checked in test_backends.py.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_backends import (
    DTYPES,
    OPERATIONS,
    ROWS,
    Data,
    Outcome,
    assert_near,
    assert_same,
    compare,
    reference_tables,
    serving,
    vector_of,
)

from hvd_greco import kernels
from hvd_greco.errors import WireError
from hvd_greco.kernels import dispatch, portable, portable_quant, reference
from hvd_greco.kernels.reference_random import noise, philox

jit = pytest.importorskip("hvd_greco.kernels.cpu.jit")
cpu = pytest.importorskip("hvd_greco.kernels.cpu")
selection = pytest.importorskip("hvd_greco.kernels.cpu.selection")
threads = pytest.importorskip("hvd_greco.kernels.cpu.threads")

COMPILED = [name for name in OPERATIONS if hasattr(cpu, name)]


# -- random numbers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "counter", "key", "expected"),
    [
        (32, 0, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (32, -1, -1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (64, 0, 0, "16554d9eca36314c db20fe9d672d0fdc d7e772cee186176b 7e68b68aec7ba23b"),
    ],
)
def test_philox_is_that_of_its_authors(width: int, counter: int, key: int, expected: str) -> None:
    """Known answers that come with Random123."""
    mask = (1 << width) - 1
    found = philox([counter & mask] * 4, (key & mask, key & mask), width)
    assert " ".join(f"{word:0{width // 4}x}" for word in found) == expected


@settings(max_examples=30, deadline=None)
@given(st.tuples(*[st.integers(0, 2**64 - 1)] * 2), st.integers(1, 1500))
def test_random_numbers_are_the_same_everywhere(key: tuple[int, int], numel: int) -> None:
    random = pytest.importorskip("hvd_greco.kernels.cpu.random")
    words = np.empty(-(-numel // 256) * 256, np.uint32)
    random.fill(random.key_words(key), words)
    expected = noise(key, numel)
    assert np.array_equal(words[:numel] & 0x7F_FFFF, expected)
    taken = portable_quant._Noise(key).take(numel, torch.device("cpu"))
    assert np.array_equal(taken.numpy(), expected)


# -- properties ------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=80), st.data())
def test_any_bit_pattern_has_its_place_in_the_order(
    patterns: list[int], data: st.DataObject
) -> None:
    """NaN of all patterns, both zeros, subnormal numbers: the order is total and one."""
    raw = torch.from_numpy(np.array(patterns, np.uint32).view(np.float32).copy())
    k = data.draw(st.integers(1, raw.numel()))
    expected = reference.select_topk(raw, k)
    assert torch.equal(portable.select_topk(raw, k), expected)
    assert torch.equal(cpu.take_topk(raw.clone(), k, True)[0], expected)


def outcome_or_error(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except WireError:
        return "refused"


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_received_bytes_are_refused_alike(data: st.DataObject) -> None:
    """Whatever comes over the wire: all backends accept it with one result, or none does."""
    numel, bits = data.draw(st.integers(1, 40)), data.draw(st.integers(2, 8))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    size = kernels.packed_bytes(numel, bits)
    # Few ones, so that the code that is never used is not in every buffer.
    thinning = random.integers(0, 256, size) & random.integers(0, 256, size)
    packed = torch.from_numpy(thinning.astype(np.uint8))
    scales = torch.ones(-(-numel // 7))

    def decoded(backend: Any) -> Any:
        out = torch.zeros(numel)
        with serving(backend):
            return outcome_or_error(
                lambda: [kernels.dequantise_add(packed, scales, 7, bits, 1.0, out), out.tolist()]
            )

    expected = decoded(reference)
    for backend in (None, cpu):
        found = decoded(backend)
        if expected == "refused" or found == "refused":
            assert found == expected
        else:
            assert found[1] == pytest.approx(expected[1], rel=1e-6)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-900, 900), max_size=9, min_size=1))
def test_impossible_sums_are_refused_alike(values: list[int]) -> None:
    words = torch.tensor(values, dtype=torch.int32)
    numel = 3 * len(values) - len(values) // 2

    def decoded(backend: Any) -> Any:
        out = torch.zeros(numel, dtype=torch.float64)
        with serving(backend):
            return outcome_or_error(
                lambda: (
                    kernels.lanes_add(
                        words, torch.tensor(3.0, dtype=out.dtype), 4, 10, 50, 1.0, out
                    ),
                    out.tolist(),
                )[1]
            )

    expected, found = decoded(reference), decoded(None)
    assert found == (expected if expected == "refused" else pytest.approx(expected))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_block_offsets_from_anywhere_are_read_alike(data: st.DataObject) -> None:
    numel = data.draw(st.sampled_from([3, 65_536, 65_537, 150_000]))
    blocks = kernels.blocks(numel)
    counts = data.draw(st.lists(st.integers(-1, 4), min_size=blocks, max_size=blocks))
    k = data.draw(st.integers(0, 5) | st.just(max(0, sum(counts))))
    offsets = data.draw(st.lists(st.integers(0, 65_535), min_size=k, max_size=k))
    raw = np.array(counts, "<i4").tobytes() if blocks > 1 else b""
    raw += np.array(offsets, "<u2").tobytes()
    buffer = torch.tensor(list(raw), dtype=torch.uint8)
    found = []
    for backend in (reference, None, cpu):
        with serving(backend):
            found.append(
                outcome_or_error(lambda: kernels.unpack_block_offsets(buffer, numel, k).tolist())
            )
    assert found[1:] == found[:1] * 2


# -- threads ---------------------------------------------------------------------------------


@pytest.fixture
def many_spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three spans from 192 elements on, as if this host had the cores; torch's threads restored."""
    monkeypatch.setattr(threads, "LEAST_ELEMENTS", 64)
    monkeypatch.setattr(threads, "_share", lambda: 3)
    for module in vars(cpu).values():
        if hasattr(module, "_PER_THREAD"):
            monkeypatch.setattr(module, "_PER_THREAD", 64)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def outcomes(operation: str, sizes: tuple[int, ...]) -> list[tuple[str, Outcome]]:
    """All runs of an operation's row."""
    found = []
    for numel, kind in zip(sizes, ("gauss", "ties", "special", "rare"), strict=False):
        for dtype in DTYPES:
            for label, run in ROWS[operation](Data(kind, numel, dtype)):
                found.append((f"{operation} {kind} {numel} {dtype} {label}", run()))
    return found


#: Sums over all elements that stay on their rank: the number of threads may show, by so many
#: units in the last place. Everything else has one result.
THREADS_SHOW = {
    "accumulate.energies": 2.0**13,
    "mean_magnitude.mean": 2.0,
    "quantiser_errors.float32": 2.0**8,
    "quantiser_errors.float64": 2.0**8,
}


def assert_alike(
    operation: str, found: list[tuple[str, Outcome]], expected: list[tuple[str, Outcome]]
) -> None:
    """To the last bit, also where rounding is allowed to show between backends."""
    assert [label for label, _ in found] == [label for label, _ in expected]
    for (label, one), (_, other) in zip(found, expected, strict=True):
        for name in other:
            allowed = THREADS_SHOW.get(f"{operation}.{name}")
            if allowed is not None:
                assert_near(one[name], other[name], allowed, f"{label} {name}")
            else:
                assert_same(one[name], other[name], f"{label} {name}")


@pytest.mark.parametrize("operation", COMPILED)
def test_the_number_of_threads_does_not_show(operation: str, many_spans: None) -> None:
    sizes = (129, 257, 777, 5001)
    with reference_tables():
        truth = outcomes(operation, sizes)
    torch.set_num_threads(1)
    assert len(threads.spans(257)) == 1
    expected = outcomes(operation, sizes)
    for (label, found), (_, true) in zip(expected, truth, strict=True):
        compare(operation, found, true, label)
    for count in (2, 3):
        torch.set_num_threads(count)
        assert len(threads.spans(257)) == count
        assert_alike(operation, outcomes(operation, sizes), expected)


def test_python_threads_may_call_at_once(many_spans: None) -> None:
    """As autograd's thread and the main thread do; each of them asks for three spans."""
    torch.set_num_threads(3)
    sizes = (300, 4097)
    expected = {name: outcomes(name, sizes) for name in COMPILED}
    with serving(dispatch.backend_of("cpu")), ThreadPoolExecutor(6) as pool:
        futures = [(name, pool.submit(outcomes, name, sizes)) for name in COMPILED * 2]
        for name, future in futures:
            assert_alike(name, future.result(), expected[name])


def test_work_that_fails_on_one_thread_is_heard_of(many_spans: None) -> None:
    torch.set_num_threads(3)
    done = []

    def work(part: int) -> int:
        if part == 1:
            raise ValueError("part 1")
        done.append(part)
        return part

    with pytest.raises(ValueError, match="part 1"):
        threads.each(work, [(0,), (1,), (2,)])
    assert threads.each(work, [(0,), (2,), (3,)]) == [0, 2, 3]


@pytest.mark.parametrize(
    ("torch_threads", "allowed", "cores", "environment", "expected"),
    [
        (8, 16, 16, {}, 8),  # torch has the last word
        (8, 4, 16, {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),  # bound to four cores: all are ours
        (8, 16, 16, {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),  # a quarter of the host
        (8, 2, 2, {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 1),  # more ranks than cores
        (2, 16, 16, {"HOROVOD_LOCAL_SIZE": "4"}, 2),
        (8, 16, 16, {"SLURM_NTASKS_PER_NODE": "2(x3)"}, 8),  # nothing that says a number
        (8, 16, 16, {"OMPI_COMM_WORLD_LOCAL_SIZE": "0"}, 8),
    ],
)
def test_as_many_threads_as_are_ours(
    torch_threads: int,
    allowed: int,
    cores: int,
    environment: dict[str, str],
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in threads._RANKS_ON_HOST:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)))
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: torch_threads)
    threads._share.cache_clear()
    try:
        assert threads.count() == expected
    finally:
        threads._share.cache_clear()


@given(st.integers(0, 10**7), st.sampled_from([1, 32, 64, 800]), st.integers(1, 9))
def test_spans_cover_all_once(numel: int, align: int, count: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "count", lambda: count)
        spans = threads.spans(numel, align)
    assert spans[0][0] == 0
    assert spans[-1][1] == numel
    assert all(a[1] == b[0] and a[1] % align == 0 for a, b in itertools.pairwise(spans))
    assert len(spans) <= count


# -- samples that mislead --------------------------------------------------------------------


def sampled(numel: int, k: int) -> np.ndarray:
    """Which elements the sample of a vector holds."""
    runs = selection._sample_size(k, numel) // selection._RUN
    step = (numel - selection._RUN) / runs
    mask = np.zeros(numel, bool)
    for run in range(runs):
        mask[int(run * step) : int(run * step) + selection._RUN] = True
    return mask


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [20_000, 200_000])
@pytest.mark.parametrize("large", ["in the sample", "outside of it", "outside, falling", "but one"])
def test_a_misleading_sample_costs_a_pass_and_no_entry(
    large: str, numel: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    k = numel // 100
    inside = sampled(numel, k)
    assert k < inside.sum() < numel // 2
    factor = np.where(inside == (large == "in the sample"), 1e6, 1.0)
    vector = vector_of("gauss", numel, dtype).sign() + vector_of("gauss", numel, dtype, 1) / 8
    vector *= torch.from_numpy(factor).to(dtype)
    if large == "outside, falling":
        # All of the k largest are in the list already when it is cut for the first time.
        fall = torch.linspace(2e6, 1e6, numel, dtype=dtype)
        vector = torch.where(torch.from_numpy(inside), vector / 1e6, fall)
    elif large == "but one":
        # k - 1 entries reach the threshold that the sample gives.
        vector = torch.linspace(1, 2, numel, dtype=dtype)
        vector[np.flatnonzero(inside)[: k - 1]] = 9.0
    expected = reference.select_topk(vector, k)

    passes = []
    collected = selection._collected

    def counted(*arguments: Any) -> Any:
        found = collected(*arguments)
        passes.append(sum(part.size for part in found))
        return found

    monkeypatch.setattr(selection, "_collected", counted)
    positions, values = cpu.take_topk(vector.clone(), k, False)
    assert torch.equal(positions, expected)
    assert torch.equal(values, vector[expected])
    too_few = large in ("in the sample", "but one")
    if too_few:
        # The first pass finds too few, the second all that are needed.
        assert len(passes) == 2
        assert passes[0] < k <= passes[1]
    else:
        # So many reach the threshold that the list was cut back on the way.
        signed = {torch.float32: np.int32, torch.float64: np.int64}[dtype]
        bits, keys = vector.numpy().view(signed), np.empty(int(inside.sum()), signed)
        mask = signed(np.iinfo(signed).max)
        selection._sampled_threshold(bits, mask, k, keys.size, keys)
        assert ((bits & mask) >= keys[0]).sum() > 2 * k + 4 * selection._GROUP
        assert len(passes) == 1

    passes.clear()
    half = vector / 2  # exact, and so is the sum
    for out in (torch.empty_like(vector), half.clone()):
        again = half.clone()
        found, _ = cpu.accumulate_select(out, again, half, 1.0, k, True)
        assert torch.equal(found, expected)
        assert not bool(out[expected].any())
        keep = torch.ones(numel, dtype=torch.bool).index_fill_(0, expected, False)
        assert torch.equal(out[keep], vector[keep])
    if numel > 2 * threads.LEAST_ELEMENTS and too_few:
        assert len(passes) == 2, "one extra pass for each call"


# -- compiling, caching, dispatch ------------------------------------------------------------

PROGRAM = """
import hashlib, sys, torch
from hvd_greco import kernels
from hvd_greco.kernels.cpu import jit
if "remove" in sys.argv:
    import shutil
    shutil.rmtree(jit.cache_folder())
vector = torch.arange(300, dtype=torch.float32).remainder(17) - 8
positions, values = kernels.take_topk(vector.clone(), 40, True)
scales, packed = torch.empty(3), torch.empty(150, dtype=torch.uint8)
kernels.quantise(vector, 128, "max", 4, (1, 2), scales, packed)
digest = hashlib.sha256()
for tensor in (positions, values, scales, packed):
    digest.update(tensor.numpy().tobytes())
from hvd_greco.kernels.dispatch import backend_of
print(digest.hexdigest(), backend_of("cpu").__name__, jit.cache_folder())
"""


def expected_digest() -> str:
    """What PROGRAM prints, by the reference."""
    vector = torch.arange(300, dtype=torch.float32).remainder(17) - 8
    scales, packed = torch.empty(3), torch.empty(150, dtype=torch.uint8)
    with serving(reference):
        positions, values = kernels.take_topk(vector.clone(), 40, True)
        kernels.quantise(vector, 128, "max", 4, (1, 2), scales, packed)
    digest = hashlib.sha256()
    for tensor in (positions, values, scales, packed):
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def started(cache: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    environment.pop(dispatch.VARIABLE, None)
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def printed(process: subprocess.Popen[str]) -> list[str]:
    try:
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "Warning" not in err
    return out.split(maxsplit=2)


def test_ranks_that_compile_at_once(tmp_path: Path) -> None:
    """An empty cache on a shared home: all four are right, and the next one compiles nothing."""
    ranks = [started(tmp_path) for _ in range(4)]
    for found in [printed(rank) for rank in ranks]:
        assert found[0] == expected_digest()
        assert found[1] == "hvd_greco.kernels.cpu"
    folder = Path(found[2].strip())
    assert folder.is_relative_to(tmp_path)
    assert len(list(folder.glob("*.done"))) == 2
    code = {path: path.stat().st_mtime_ns for path in folder.rglob("*.nb[ci]")}
    assert len(code) >= 4  # an index and the code for both functions
    assert printed(started(tmp_path))[0] == expected_digest()
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.nb[ci]")} == code


def test_without_a_cache(tmp_path: Path) -> None:
    """A folder that cannot be made, and one that goes while we run, as scratch folders do."""
    (tmp_path / "file").touch()
    nowhere, gone = started(tmp_path / "file" / "cache"), started(tmp_path / "gone", "remove")
    found = printed(nowhere)
    assert found[0] == expected_digest()
    assert found[1:] == ["hvd_greco.kernels.cpu", "None\n"]
    assert printed(gone)[:2] == [expected_digest(), "hvd_greco.kernels.cpu"]


def test_sources_written_again_have_a_cache_of_their_own(tmp_path: Path) -> None:
    """Numba compiles them anew, and must do so under the lock."""
    file, other = tmp_path / "a.py", tmp_path / "b.py"
    file.write_text("1")
    other.write_text("1")
    before = jit.version_of([file])
    assert jit.version_of([file]) == before
    assert jit.version_of([other]) != before
    os.utime(file, ns=(1, 1))
    assert jit.version_of([file]) != before


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend was asked for yet."""
    monkeypatch.setattr(dispatch, "_BACKENDS", {})
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)


@pytest.mark.parametrize("error", [ImportError("no numba here"), SystemError("built for NumPy 1")])
def test_a_backend_that_cannot_be_loaded_is_explained_once(
    error: Exception,
    unloaded: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    attempts = []

    def broken(name: str, package: str) -> None:
        attempts.append((name, package))
        raise error

    monkeypatch.setattr(dispatch.importlib, "import_module", broken)
    with caplog.at_level(logging.WARNING, logger="hvd_greco"):
        for _ in range(3):
            assert kernels.select_topk(torch.tensor([1.0, -3.0, 2.0]), 2).tolist() == [1, 2]
    assert attempts == [(".cpu", "hvd_greco.kernels")]
    (record,) = caplog.records
    assert record.name == "hvd_greco"
    assert all(part in record.getMessage() for part in ("cpu", type(error).__name__, str(error)))
    assert dispatch.backend_of("cpu") is None


def test_the_compiled_backend_can_be_switched_off(
    unloaded: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert dispatch._load("cpu") is cpu
    monkeypatch.setenv("HVD_GRECO_KERNELS", "portable")
    assert dispatch._load("cpu") is None
    assert not caplog.records, "whoever switched it off need not be told"
    assert dispatch._load("meta") is None


def test_what_a_backend_lacks_is_served_by_the_portable_one() -> None:
    vector = torch.tensor([1.0, -2.0])
    with serving(logging):  # any module without operations
        assert kernels.bucket_scales(vector, 2, "max").tolist() == [2.0]
