"""Error curves against the errors themselves."""

from __future__ import annotations

import pytest
import torch

from hvd_greco import kernels
from hvd_greco.errors import ConfigError


def draw(kind: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel)
    vector = torch.randn(numel, generator=generator, dtype=torch.float64)
    if kind == "heavy":
        vector = vector / torch.randn(numel, generator=generator, dtype=torch.float64)
    elif kind == "sparse":
        vector *= torch.rand(numel, generator=generator, dtype=torch.float64) < 0.01
    elif kind == "constant":
        vector.fill_(0.3)
    return vector.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["gauss", "heavy", "sparse", "constant"])
def test_topk_errors_are_what_topk_loses(kind: str, dtype: torch.dtype) -> None:
    vector = draw(kind, 30_011, dtype)
    histogram = kernels.accumulate(vector, torch.zeros_like(vector), 1.0, torch.empty_like(vector))
    assert histogram.finite
    assert int(histogram.counts.sum()) == vector.numel()
    ks = [0, 1, 30, 300, 3_000, 15_000, vector.numel()]
    squares = vector.double().square().sort(descending=True)[0]
    total = squares.sum()
    found = kernels.topk_errors(histogram, ks)
    for k, error in zip(ks, found.tolist(), strict=True):
        exact = float(squares[k:].sum())
        # Half a bin's share at most: an octave has 8 bins in fp32, 2 in fp64.
        bin_energy = float(squares[max(0, k - 1) : k + 1].max()) * 300 if k else 0.0
        slack = min(0.02 if dtype == torch.float32 else 0.2, 1.0) * max(exact, bin_energy * 0.01)
        assert abs(error - exact) <= slack + 1e-9 * float(total)
    assert (found.diff() <= 1e-12 * total).all()


def test_topk_errors_are_exact_at_the_edges_of_bins() -> None:
    """Powers of two lie in bins of their own."""
    vector = torch.tensor([8.0, -4.0, 2.0, 1.0, 0.5, 0.0])
    histogram = kernels.accumulate(vector, torch.zeros(6), 1.0, torch.empty(6))
    errors = kernels.topk_errors(histogram, range(7)).tolist()
    assert errors == [85.25, 21.25, 5.25, 1.25, 0.25, 0.0, 0.0]
    with pytest.raises(ConfigError, match=r"k=7 is outside 0\.\.6"):
        kernels.topk_errors(histogram, [7])


def test_a_histogram_tells_inf_and_nan() -> None:
    for poison in (float("inf"), float("-inf"), float("nan")):
        vector = torch.ones(5000)
        vector[4321] = poison
        histogram = kernels.accumulate(vector, torch.zeros(5000), 1.0, torch.empty(5000))
        assert not histogram.finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bucket", [1, 64, 100, 10_000])
def test_quantiser_errors_to_nearest_are_what_is_lost(
    bucket: int, norm: str, dtype: torch.dtype
) -> None:
    vector = draw("gauss", 5_003, dtype)
    vector[:200] = 0
    errors = kernels.quantiser_errors(vector, bucket, norm, nearest=True)
    for bits, error in zip(kernels.WIDTHS, errors.tolist(), strict=True):
        rest = vector.clone()
        scales = torch.empty(-(-5_003 // bucket), dtype=dtype)
        codes = torch.empty(kernels.packed_bytes(5_003, bits), dtype=torch.uint8)
        kernels.quantise(rest, bucket, norm, bits, None, scales, codes, leave=True)
        assert error == pytest.approx(float(rest.double().square().sum()), rel=1e-3, abs=1e-9)


def test_quantiser_errors_at_random_are_the_mean_of_what_is_lost() -> None:
    vector = draw("gauss", 2_000, torch.float32)
    errors = kernels.quantiser_errors(vector, 512, "max", nearest=False)
    for bits in (2, 4, 8):
        lost = []
        for step in range(200):
            rest, scales = vector.clone(), torch.empty(4)
            codes = torch.empty(kernels.packed_bytes(2_000, bits), dtype=torch.uint8)
            kernels.quantise(rest, 512, "max", bits, (step, 1), scales, codes, leave=True)
            lost.append(float(rest.double().square().sum()))
        mean = sum(lost) / len(lost)
        spread = (sum((x - mean) ** 2 for x in lost) / len(lost) / len(lost)) ** 0.5
        assert abs(mean - float(errors[bits - 2])) <= 5 * spread


def test_quantiser_errors_are_the_same_from_both_backends() -> None:
    from hvd_greco.kernels import portable_quant

    vector = draw("heavy", 300_001, torch.float32)
    for nearest in (True, False):
        ours = kernels.quantiser_errors(vector, 512, "max", nearest)
        portable = portable_quant.quantiser_errors(vector, 512, "max", nearest)
        torch.testing.assert_close(ours, portable, rtol=1e-6, atol=0)


def test_rank_errors_are_the_tail_of_the_singular_values() -> None:
    generator = torch.Generator().manual_seed(1)
    left = torch.linalg.qr(torch.randn(60, 40, generator=generator, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(50, 40, generator=generator, dtype=torch.float64))[0]
    sigma = 0.5 ** torch.arange(40, dtype=torch.float64)
    matrix = left * sigma @ right.t()
    basis = left[:, :8]
    errors = kernels.rank_errors(float(matrix.square().sum()), basis.t() @ matrix)
    exact = [float(sigma[rank:].square().sum()) for rank in range(1, 9)]
    torch.testing.assert_close(errors, torch.tensor(exact, dtype=torch.float64))
    # A basis that is not the best one can only show a larger error.
    loose = torch.linalg.qr(torch.randn(60, 8, generator=generator, dtype=torch.float64))[0]
    worse = kernels.rank_errors(float(matrix.square().sum()), loose.t() @ matrix)
    assert (worse >= errors - 1e-12).all()
    with pytest.raises(ConfigError, match="rank_errors"):
        kernels.rank_errors(1.0, torch.zeros(3))
