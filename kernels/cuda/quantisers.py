"""The quantisers' operations on CUDA tensors, by the kernels that Numba compiles.

One launch each, and one more where buckets are of another size than the kernels like. Decoding
waits for the device once, to know whether a code was received that is never sent.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...errors import WireError
from .. import portable_quant
from . import numba_kernels as kernels
from .numba_launch import arrays, start

#: Buckets that a block of threads goes over on its own. (Smaller ones leave threads idle, larger
#: ones other blocks.)
_BUCKETS = range(64, 1 << 16)


def _shift(bucket: int) -> int:
    """``log2`` of a power of two, -1 for others."""
    return bucket.bit_length() - 1 if bucket & (bucket - 1) == 0 else -1


def _key(key: tuple[int, int] | None) -> tuple[Any, bool]:
    """Four words, and whether anything is drawn with them."""
    words = np.array((0, 0) if key is None else key, dtype=np.uint64).view(np.uint32)
    return tuple(words), key is not None


def _limits(dtype: torch.dtype) -> tuple[Any, Any]:
    kind, limits = _kind(dtype), torch.finfo(dtype)
    return kind(limits.tiny), kind(limits.max)


def _kind(dtype: torch.dtype) -> Any:
    return np.float64 if dtype == torch.float64 else np.float32


def quantise_pack(
    vector: torch.Tensor,
    scales: torch.Tensor,
    bucket: int,
    bits: int,
    key: tuple[int, int] | None,
    out: torch.Tensor,
) -> None:
    _code(vector, scales, bucket, bits, key, out, False)


def _code(
    vector: torch.Tensor,
    scales: torch.Tensor,
    bucket: int,
    bits: int,
    key: tuple[int, int] | None,
    out: torch.Tensor,
    leave: bool,
) -> None:
    numel = vector.numel()
    if not numel:
        return
    start(
        kernels.quantise_given, -(-numel // kernels.SPAN), vector.device,
        *arrays(vector, scales), bucket, _shift(bucket), bits, *_key(key),
        *arrays(out), leave,
    )  # fmt: skip


def quantise(
    vector: torch.Tensor,
    bucket: int,
    norm: str,
    bits: int,
    key: tuple[int, int] | None,
    scales: torch.Tensor,
    out: torch.Tensor,
    leave: bool,
) -> None:
    _quantise(vector, None, 1.0, 1.0, bucket, norm, bits, key, scales, out, leave)


def accumulate_quantise(
    vector: torch.Tensor,
    gradient: torch.Tensor,
    residual: torch.Tensor,
    scale: float,
    bucket: int,
    norm: str,
    bits: int,
    key: tuple[int, int] | None,
    scales: torch.Tensor,
    out: torch.Tensor,
) -> None:
    if vector.data_ptr() == gradient.data_ptr():
        other, own, factor = residual, scale, 1.0
    else:
        if vector.data_ptr() != residual.data_ptr():
            vector.copy_(residual)
        other, own, factor = gradient.to(vector.dtype), 1.0, scale
    _quantise(vector, other, own, factor, bucket, norm, bits, key, scales, out, True)


def _quantise(
    vector: torch.Tensor,
    other: torch.Tensor | None,
    own: float,
    factor: float,
    bucket: int,
    norm: str,
    bits: int,
    key: tuple[int, int] | None,
    scales: torch.Tensor,
    out: torch.Tensor,
    leave: bool,
) -> None:
    """``vector = own * vector + factor * other`` and its codes."""
    numel = vector.numel()
    if not numel:
        return
    bucket = min(bucket, -(-numel // 8) * 8)
    if bucket % 8 or bucket not in _BUCKETS:
        if other is not None:
            first = vector if own == 1 else vector * own
            torch.add(first, other if factor == 1 else other * factor, out=vector)
        scales.copy_(portable_quant.bucket_scales(vector, bucket, norm))
        _code(vector, scales, bucket, bits, key, out, leave)
        return
    kind = _kind(vector.dtype)
    wide = vector.dtype == torch.float64
    start(
        kernels.quantise_float64 if wide else kernels.quantise_float32,
        -(-numel // bucket), vector.device,
        *arrays(vector, vector if other is None else other), kind(own), kind(factor),
        other is not None, norm == "l2", *_limits(vector.dtype), *arrays(scales), bucket,
        _shift(bucket), bits, *_key(key),
        *arrays(out), leave,
    )  # fmt: skip


def dequantise_mean(
    out: torch.Tensor,
    buffer: torch.Tensor,
    starts: list[int],
    scale_bytes: int,
    bucket: int,
    bits: int,
    ranks: int,
) -> None:
    numel, width = out.numel(), out.element_size()
    if not starts or not numel:
        out.zero_()
        return
    offsets = np.array(starts, dtype=np.int64)
    tables = np.stack((offsets + scale_bytes, offsets // width))
    places = torch.from_numpy(tables).to(out.device)
    scales = buffer[: buffer.numel() // width * width].view(out.dtype)
    worst = torch.zeros(1, dtype=torch.int32, device=out.device)
    start(
        kernels.dequantise_mean, -(-numel // kernels.SPAN), out.device,
        *arrays(buffer, scales, places[0], places[1]), bucket, _shift(bucket), bits, ranks,
        *arrays(worst, out),
    )  # fmt: skip
    _check_codes(worst, bits)


def dequantise_add(
    packed: torch.Tensor,
    scales: torch.Tensor,
    bucket: int,
    bits: int,
    alpha: float,
    out: torch.Tensor,
) -> None:
    numel = out.numel()
    if not numel:
        return
    worst = torch.zeros(1, dtype=torch.int32, device=out.device)
    start(
        kernels.dequantise_add, -(-numel // kernels.SPAN), out.device, *arrays(packed, scales),
        bucket, _shift(bucket), bits, _kind(out.dtype)(alpha), *arrays(worst, out),
    )  # fmt: skip
    _check_codes(worst, bits)


def _check_codes(worst: torch.Tensor, bits: int) -> None:
    code = int(worst)
    if code:
        raise WireError(f"code {code} received, {bits} bits go up to {(1 << bits) - 2}")


def natural_pack(
    vector: torch.Tensor, exponent: torch.Tensor, key: tuple[int, int], out: torch.Tensor
) -> None:
    if not vector.numel():
        return
    factor = _kind(vector.dtype)(portable_quant.power_of_two(-exponent).item())
    start(
        kernels.natural_pack, -(-vector.numel() // kernels.SPAN), vector.device, *arrays(vector),
        factor, _key(key)[0], *arrays(out),
    )  # fmt: skip


def natural_add(codes: torch.Tensor, factor: float, out: torch.Tensor) -> None:
    if out.numel():
        start(
            kernels.natural_add, -(-out.numel() // kernels.SPAN), out.device, *arrays(codes),
            _kind(out.dtype)(factor), *arrays(out),
        )  # fmt: skip


def quantise_lanes(
    vector: torch.Tensor,
    scale: torch.Tensor,
    bits: int,
    width: int,
    key: tuple[int, int] | None,
    out: torch.Tensor,
) -> None:
    if not vector.numel():
        return
    # x / inf is 0, the code of a layer whose scale is 0.
    divisor = _kind(vector.dtype)(scale.item() or np.inf)
    start(
        kernels.quantise_lanes, -(-out.numel() // kernels.SPAN), vector.device, *arrays(vector),
        divisor, bits, width, *_key(key), *arrays(out),
    )  # fmt: skip
