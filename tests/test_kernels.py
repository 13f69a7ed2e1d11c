"""The operation table against obvious NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_greco import kernels
from hvd_greco.errors import ConfigError, WireError

CPU = torch.device("cpu")


def oracle_topk(vector: torch.Tensor, k: int) -> list[int]:
    """Case 27: sort by (magnitude descending, index ascending), NaN above infinity."""
    magnitudes = vector.abs().double().numpy()
    keys = [
        (-2.0, i) if np.isnan(m) else (-1.0, i) if np.isinf(m) else (1.0 / (1.0 + m), i)
        for i, m in enumerate(magnitudes)
    ]
    # 1/(1+m) is strictly decreasing but rounds; compare exact magnitudes among finite ones.
    order = sorted(
        range(len(keys)),
        key=lambda i: (
            0 if np.isnan(magnitudes[i]) else 1 if np.isinf(magnitudes[i]) else 2,
            -magnitudes[i] if np.isfinite(magnitudes[i]) else 0.0,
            i,
        ),
    )
    return sorted(order[:k])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [1, 2, 7, 100, 1023, 1024, 1025])
@pytest.mark.parametrize("kind", ["gauss", "constant", "zeros", "ties", "special", "subnormal"])
def test_select_topk_matches_the_oracle(dtype: torch.dtype, numel: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(numel)
    vector = torch.randn(numel, generator=generator, dtype=dtype)
    if kind == "constant":
        vector.fill_(-3.0)
    elif kind == "zeros":
        vector.zero_()
    elif kind == "ties":
        vector = torch.randint(-2, 3, (numel,), generator=generator).to(dtype)
    elif kind == "special":
        vector[::5] = float("nan")
        vector[1::7] = float("-inf")
    elif kind == "subnormal":
        vector *= torch.finfo(dtype).tiny * 1e-2
    for k in sorted({1, max(1, numel // 3), numel - 1, numel} - {0}):
        assert kernels.select_topk(vector, k).tolist() == oracle_topk(vector, k)


def test_select_topk_refuses_what_cannot_be() -> None:
    vector = torch.zeros(4)
    for k in (0, 5, -1):
        with pytest.raises(ConfigError, match=f"k={k}"):
            kernels.select_topk(vector, k)
    with pytest.raises(ConfigError, match="float16"):
        kernels.select_topk(vector.half(), 1)
    with pytest.raises(ConfigError, match="1-D"):
        kernels.select_topk(torch.zeros(2, 2), 1)
    with pytest.raises(ConfigError, match="strides"):
        kernels.select_topk(torch.zeros(8)[::2], 1)


PACKERS = {
    "block": (kernels.pack_block_offsets, kernels.unpack_block_offsets),
    "int32": (kernels.pack_int32, kernels.unpack_int32),
    "bitmap": (kernels.pack_bitmap, kernels.unpack_bitmap),
}


@st.composite
def index_sets(draw: st.DrawFn) -> tuple[int, list[int]]:
    numel = draw(
        st.one_of(st.integers(1, 300), st.sampled_from([65_535, 65_536, 65_537, 131_072, 200_000]))
    )
    size = draw(st.integers(0, min(numel, 60)))
    chosen = draw(st.sets(st.integers(0, numel - 1), min_size=size, max_size=size))
    return numel, sorted(chosen)


@pytest.mark.parametrize("form", PACKERS)
@given(case=index_sets())
@settings(max_examples=150, deadline=None)
def test_positions_survive_packing(form: str, case: tuple[int, list[int]]) -> None:
    numel, chosen = case
    pack, unpack = PACKERS[form]
    packed = pack(torch.tensor(chosen, dtype=torch.int64), numel)
    assert packed.dtype == torch.uint8
    assert unpack(packed, numel, len(chosen)).tolist() == chosen


@pytest.mark.parametrize("form", PACKERS)
def test_a_full_block_survives(form: str) -> None:
    """A block of 65,536 chosen positions: its count does not fit 16 bits."""
    numel = 3 * 65_536 + 5
    chosen = torch.arange(65_536 - 1, 2 * 65_536 + 1)
    pack, unpack = PACKERS[form]
    assert torch.equal(unpack(pack(chosen, numel), numel, chosen.numel()), chosen)


@pytest.mark.parametrize("form", PACKERS)
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_arbitrary_bytes_never_yield_a_position_out_of_range(
    form: str, data: st.DataObject
) -> None:
    numel = data.draw(st.sampled_from([1, 9, 100, 65_536, 65_537, 140_000]))
    k = data.draw(st.integers(0, 8))
    length = {
        "block": (0 if numel <= 65_536 else 4 * -(-numel // 65_536)) + 2 * k,
        "int32": 4 * k,
        "bitmap": -(-numel // 8),
    }[form]
    off = data.draw(st.sampled_from([0, 0, 0, 1, -1]))
    raw = data.draw(st.binary(min_size=max(0, min(length + off, 64)), max_size=64))
    raw = (raw + b"\0" * max(0, length + off))[: max(0, length + off)]
    buffer = (
        torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        if raw
        else torch.empty(0, dtype=torch.uint8)
    )
    try:
        found = PACKERS[form][1](buffer, numel, k)
    except WireError:
        return
    assert len(raw) == length
    assert found.numel() == k
    assert all(0 <= i < numel for i in found.tolist())


def test_shared_indices_depend_on_the_key_alone() -> None:
    one = kernels.shared_indices((1, 2), 1000, 37, CPU)
    torch.manual_seed(99)
    np.random.seed(99)
    assert torch.equal(one, kernels.shared_indices((1, 2), 1000, 37, CPU))
    assert not torch.equal(one, kernels.shared_indices((1, 3), 1000, 37, CPU))
    assert one.unique().numel() == 37
    assert kernels.shared_indices((1, 2), 5, 5, CPU).tolist() == [0, 1, 2, 3, 4]


def test_shared_indices_are_uniform() -> None:
    """Every position is drawn equally often: chi-square over 4,000 draws of 10 in 50."""
    counts = np.zeros(50)
    for key in range(4000):
        counts[kernels.shared_indices((key, 7), 50, 10, CPU).numpy()] += 1
    expected = 4000 * 10 / 50
    # Without replacement the counts' variance is smaller than multinomial by 1 - 10/50.
    chi_square = ((counts - expected) ** 2 / (expected * 0.8)).sum()
    assert 20 < chi_square < 95  # 49 degrees of freedom: P(outside) < 1e-4


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-18, 1.0, 1e15, 1e25, math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_squared_norms_of_any_size(scale: float, dtype: torch.dtype) -> None:
    values = (torch.randn(1000, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)
    expected = float(values.double().square().sum())
    found = kernels.squared_norm(values.view(10, 100))
    assert math.isclose(found, expected, rel_tol=1e-5) or math.isnan(found) == math.isnan(expected)
    if math.isfinite(expected):
        assert math.isclose(found, expected, rel_tol=1e-5)
