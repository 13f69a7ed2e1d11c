"""Quantisers of the reference backend: a bit at a time, in fp64 where nothing is rounded to codes.

The codes themselves are discrete: the quotient and its multiple are rounded to the vector's dtype
as on every backend, and then whole numbers do the rest.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from ..errors import WireError
from .reference_random import noise
from .reference_selection import store, total


def bucket_scales(vector: torch.Tensor, bucket: int, norm: str) -> torch.Tensor:
    array = vector.numpy()
    limits = np.finfo(array.dtype)
    scales = np.empty(-(-array.size // bucket), array.dtype)
    for place in range(scales.size):
        # Extended precision: its exponents hold the squares of fp64's largest and smallest.
        part = np.abs(array[place * bucket : (place + 1) * bucket].astype(np.longdouble))
        peak = part.max()
        value = np.sqrt((part * part).sum()) if norm == "l2" else peak
        if np.isfinite(peak):
            value = min(max(value, peak), np.longdouble(limits.max))
        rounded = array.dtype.type(value)
        scales[place] = 0 if rounded < limits.tiny else rounded
    return torch.from_numpy(scales)


def _codes(
    array: np.ndarray, scales: np.ndarray, bucket: int, bits: int, key: tuple[int, int] | None
) -> np.ndarray:
    """Codes 0..2s. s, the code of zero, throughout buckets whose scale is zero or not finite."""
    levels, kind = 2 ** (bits - 1) - 1, array.dtype
    scale = np.repeat(scales, bucket)[: array.size]
    usable = np.isfinite(scale) & (scale != 0)
    chance = np.full(array.size, 2**22) if key is None else noise(key, array.size)
    # fp64 and then fp32 is fp32 arithmetic, as in `total`.
    top = np.where(usable, array, 0).astype(np.float64)
    ratio = (top / np.where(usable, scale, 1).astype(np.float64)).astype(kind)
    fixed = (ratio.astype(np.float64) * (levels * 2**23)).astype(kind)
    code = (np.trunc(fixed).astype(np.int64) + chance + levels * 2**23) // 2**23
    return np.where(usable, np.clip(code, 0, 2 * levels), levels).astype(np.uint8)


def _values(codes: np.ndarray, scales: np.ndarray, bucket: int, bits: int) -> np.ndarray:
    """What codes stand for, fp64; only the bucket of a scale that is not finite has none."""
    levels = 2 ** (bits - 1) - 1
    if codes.size and codes.max() > 2 * levels:
        raise WireError(f"code {codes.max()} received, {bits} bits go up to {2 * levels}")
    scale = np.repeat(scales.astype(np.float64), bucket)[: codes.size]
    with np.errstate(all="ignore"):
        shares: np.ndarray = (codes.astype(np.float64) - levels) / levels * scale
    return shares


def quantise_pack(
    vector: torch.Tensor,
    scales: torch.Tensor,
    bucket: int,
    bits: int,
    key: tuple[int, int] | None,
    out: torch.Tensor,
) -> None:
    codes = _codes(vector.numpy(), scales.numpy(), bucket, bits, key)
    store(out, _packed(codes, bits))


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
    scales.copy_(bucket_scales(vector, bucket, norm))
    array = vector.numpy()
    codes = _codes(array, scales.numpy(), bucket, bits, key)
    store(out, _packed(codes, bits))
    if leave:
        finite = np.nan_to_num(scales.numpy(), nan=0, posinf=0)
        store(vector, array.astype(np.float64) - _values(codes, finite, bucket, bits))


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
    store(vector, total(gradient, residual, scale, vector.dtype))
    quantise(vector, bucket, norm, bits, key, scales, out, True)


def dequantise_mean(
    out: torch.Tensor,
    buffer: torch.Tensor,
    starts: list[int],
    scale_bytes: int,
    bucket: int,
    bits: int,
    ranks: int,
) -> None:
    sums, received = np.zeros(out.numel()), buffer.numpy()
    nbytes = -(-out.numel() * bits // 8)
    for start in starts:
        codes = start + scale_bytes
        scales = np.frombuffer(received[start:codes].tobytes(), out.numpy().dtype)
        unpacked = _unpacked(received[codes : codes + nbytes], bits, out.numel())
        with np.errstate(all="ignore"):
            sums += _values(unpacked, scales, bucket, bits)
    store(out, sums / ranks)


def dequantise_add(
    packed: torch.Tensor,
    scales: torch.Tensor,
    bucket: int,
    bits: int,
    alpha: float,
    out: torch.Tensor,
) -> None:
    codes = _unpacked(packed.numpy(), bits, out.numel())
    with np.errstate(all="ignore"):
        sums = out.numpy() + alpha * _values(codes, scales.numpy(), bucket, bits)
    store(out, sums)


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    every = np.unpackbits(codes[:, None], axis=1, bitorder="little")[:, :bits]
    return np.packbits(every.reshape(-1), bitorder="little")


def _unpacked(packed: np.ndarray, bits: int, numel: int) -> np.ndarray:
    every = np.unpackbits(packed, bitorder="little")[: numel * bits].reshape(numel, bits)
    return np.packbits(every, axis=1, bitorder="little").reshape(-1)


def pack_bits(codes: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    store(out, _packed(codes.numpy(), bits))


def unpack_bits(packed: torch.Tensor, bits: int, numel: int) -> torch.Tensor:
    return torch.from_numpy(_unpacked(packed.numpy(), bits, numel))


def quantise_lanes(
    vector: torch.Tensor,
    scale: torch.Tensor,
    bits: int,
    width: int,
    key: tuple[int, int] | None,
    out: torch.Tensor,
) -> None:
    array, words = vector.numpy(), out.numel()
    codes = _codes(array, scale.numpy().reshape(1), max(1, array.size), bits, key)
    sums = [0] * words
    for element, code in enumerate(codes.tolist()):
        lane, word = divmod(element, words)
        sums[word] += code - (2 ** (bits - 1) - 1) << width * lane
    store(out, np.array([(value + 2**31) % 2**32 - 2**31 for value in sums], np.int64))


def lanes_add(
    words: torch.Tensor,
    scale: torch.Tensor,
    bits: int,
    width: int,
    ranks: int,
    alpha: float,
    out: torch.Tensor,
) -> None:
    levels, left = 2 ** (bits - 1) - 1, words.numpy().astype(np.int64)
    lanes = []
    for _ in range(32 // width):
        # The lowest lane as a number with a sign; what it borrowed goes back to the next one.
        lane = (left + 2 ** (width - 1)) % 2**width - 2 ** (width - 1)
        left = (left - lane) >> width
        lanes.append(lane)
    sums = np.concatenate(lanes)[: out.numel()]
    if sums.size and np.abs(sums).max() > ranks * levels:
        raise WireError(f"sum of codes {np.abs(sums).max()}, {ranks} ranks, {bits} bits")
    with np.errstate(all="ignore"):
        store(out, out.numpy() + alpha * (sums / levels) * float(scale))


def natural_pack(
    vector: torch.Tensor, exponent: torch.Tensor, key: tuple[int, int], out: torch.Tensor
) -> None:
    with np.errstate(all="ignore"):
        scaled = np.ldexp(vector.numpy().astype(np.float64), -int(exponent)).astype(np.float32)
    patterns = scaled.view(np.uint32).astype(np.int64)
    magnitude = patterns % 2**31 + noise(key, patterns.size)
    store(out, patterns // 2**31 * 128 + magnitude // 2**23 % 128)


def natural_add(codes: torch.Tensor, factor: float, out: torch.Tensor) -> None:
    code = codes.numpy().astype(np.int64)
    power = code % 128
    values = np.where(power == 0, 0.0, np.ldexp(1.0, power - 127))
    with np.errstate(all="ignore"):
        store(out, out.numpy() + factor * np.where(code >= 128, -values, values))


def mean_magnitude(vector: torch.Tensor) -> torch.Tensor:
    values, numel = np.abs(vector.numpy().astype(np.float64)), vector.numel()
    finite = bool(np.isfinite(values).all())
    # Divided first: the sum may be more than a double holds.
    mean = math.fsum((values / numel).tolist()) if finite else float(values.sum())
    return torch.tensor(mean, dtype=torch.float64).to(vector.dtype)


def sign_pack(vector: torch.Tensor, out: torch.Tensor) -> None:
    store(out, np.packbits(vector.numpy() < 0, bitorder="little"))


def sign_add(packed: torch.Tensor, scale: torch.Tensor, alpha: float, out: torch.Tensor) -> None:
    negative = np.unpackbits(packed.numpy(), count=out.numel(), bitorder="little") == 1
    with np.errstate(all="ignore"):
        step = alpha * float(scale)
        store(out, out.numpy() + np.where(negative, -step, step))


def quantiser_errors(vector: torch.Tensor, bucket: int, norm: str, nearest: bool) -> torch.Tensor:
    """A bucket whose scale is 0 sends nothing, and loses what it holds."""
    scales = bucket_scales(vector, bucket, norm).numpy().astype(np.float64)
    scale = np.repeat(scales, bucket)[: vector.numel()]
    held, errors = np.abs(vector.numpy().astype(np.float64)), []
    for bits in range(2, 9):
        step = scale / (2 ** (bits - 1) - 1)
        place = held / np.where(step > 0, step, 1)
        above = place - np.floor(place)
        lost = np.minimum(above, 1 - above) ** 2 if nearest else above * (1 - above)
        errors.append(math.fsum(np.where(step > 0, lost * step * step, held * held).tolist()))
    return torch.tensor(errors, dtype=torch.float64)
