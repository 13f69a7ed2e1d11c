"""The kernels that Numba compiles for CUDA, in its simulator: `test_cuda_numba.py` runs this file.

With ``NUMBA_ENABLE_CUDASIM=1``, which has to be set before Numba is imported. The simulator has a
Python thread for each CUDA thread, so vectors are tiny.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import config
from test_backends import DTYPES, KEY, Data, check, cpu, public, serving

from hvd_greco import kernels
from hvd_greco.errors import WireError
from hvd_greco.kernels.cuda import numba_launch, quantisers

OPERATIONS = sorted(public(quantisers) & public(kernels))


def test_it_is_the_simulator() -> None:
    assert config.ENABLE_CUDASIM
    assert len(OPERATIONS) == 8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["gauss", "special", "subnormal"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_agrees_with_the_reference(operation: str, kind: str, dtype: torch.dtype) -> None:
    for numel in (1, 33, 257):
        check(operation, Data(kind, numel, dtype), {"cuda": quantisers})


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bucket", [64, 72, 512, 600, 2000])
def test_buckets_of_every_kind_agree_with_the_cpu(bucket: int, norm: str) -> None:
    """Powers of two and others, that begin inside a group of random numbers, of several chunks."""
    numel, bits = 2205, 3
    gradient, residual = (Data("gauss", numel, torch.float32).vector(i) for i in (1, 2))
    found = []
    for backend in (cpu, quantisers):
        vector, out = residual.clone(), torch.zeros(kernels.packed_bytes(numel, bits)).byte()
        scales = torch.zeros(-(-numel // bucket))
        with serving(backend):
            kernels.accumulate_quantise(
                gradient, vector, 0.3, vector, bucket, norm, bits, KEY, scales, out
            )
        found.append((vector, scales, out))
    for one, other in zip(*found, strict=True):
        # Sums of squares are rounded, and a scale's last bit may tip a code.
        if norm == "max":
            assert torch.equal(one, other)
        elif one.dtype == torch.uint8:
            assert int((one != other).sum()) <= 3
        elif one.numel() == scales.numel():
            assert torch.allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 32])
def test_the_number_of_threads_does_not_show(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    vector = Data("heavy", 700, torch.float64).vector()
    found = []
    for count in (8, threads):
        monkeypatch.setattr(numba_launch, "SIMULATED_THREADS", count)
        out, scales = torch.zeros(350, dtype=torch.uint8), torch.zeros(11, dtype=torch.float64)
        rest = vector.clone()
        quantisers.quantise(rest, 64, "max", 4, KEY, scales, out, True)
        found.append((out, scales, rest))
    assert all(map(torch.equal, *found))


def test_a_code_that_is_never_sent_is_refused() -> None:
    packed = torch.tensor([0, 0, 0b1110_0000], dtype=torch.uint8)
    with pytest.raises(WireError, match="code 7 received, 3 bits go up to 6"):
        quantisers.dequantise_add(packed, torch.ones(1), 8, 3, 1.0, torch.zeros(8))
    sent = torch.cat((torch.ones(1).view(torch.uint8), packed, torch.zeros(1).byte()))
    sent = torch.cat((sent, sent))
    with pytest.raises(WireError, match="code 7 received"):
        quantisers.dequantise_mean(torch.zeros(8), sent, [0, 8], 4, 8, 3, 2)


def test_nothing_is_done_to_nothing() -> None:
    none, byte = torch.empty(0), torch.empty(0, dtype=torch.uint8)
    with serving(quantisers):
        kernels.quantise_pack(none, none, 512, 4, KEY, byte)
        kernels.quantise(none, 512, "max", 4, KEY, none, byte, True)
        kernels.accumulate_quantise(none, none, 1.0, none, 512, "l2", 4, None, none, byte)
        kernels.dequantise_mean(byte, [0, 0], 0, 512, 4, 2, none)
        kernels.dequantise_add(byte, none, 512, 4, 1.0, none)
        kernels.natural_pack(none, torch.zeros((), dtype=torch.int32), KEY, byte)
        kernels.natural_add(byte, 1.0, none)


def test_words_are_those_of_the_generator() -> None:
    """Of elements in several groups: a code of rounding noise alone shows each element's word."""
    numel = 600
    halves = torch.full((numel,), 0.5)
    scales, found = torch.ones(1), []
    for backend in (cpu, quantisers):
        out = torch.zeros(numel, dtype=torch.uint8)
        with serving(backend):
            kernels.quantise_pack(halves, scales, numel, 8, KEY, out)
        found.append(out)
    assert np.unique(found[0].numpy()).tolist() == [190, 191]
    assert torch.equal(*found)
