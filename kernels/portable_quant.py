"""Quantisation in torch and NumPy: any device, no compiler. The checks are in the table.

Everything goes through memory in pieces that fit a core's cache, so nothing here allocates more
than a megabyte or two, whatever the layer (as long as its buckets are smaller than such a piece).

Random rounding adds a 23-bit integer to a fixed-point number and cuts the fraction off. As all
2**23 values are equally likely, the result is unbiased to the last bit of the fixed-point number,
with no rounding of a floating-point sum in between.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ..errors import WireError
from . import scalar

#: Elements worked on at a time.
CHUNK = 1 << 17
#: Bits of the fraction of a code before it is rounded.
FRACTION = 23
_LOW = (1 << FRACTION) - 1


class _Noise:
    """Uniform 23-bit integers for the elements of a vector, in order: :mod:`.scalar` in NumPy."""

    def __init__(self, key: tuple[int, int]) -> None:
        self._words = np.array(key, dtype=np.uint64).view(np.uint32)
        self._at = 0

    def take(self, count: int, device: torch.device) -> torch.Tensor:
        """The next numbers, int32. ``count`` must be a multiple of 256, or this call the last."""
        groups = -(-count // scalar.GROUP)
        first = self._at // scalar.GROUP * scalar.LANES
        counters = np.arange(first, first + groups * scalar.LANES, dtype=np.uint64)
        state = (
            (counters & np.uint64(0xFFFF_FFFF)).astype(np.uint32),
            (counters >> np.uint64(32)).astype(np.uint32),
            np.full(counters.size, self._words[2]),
            np.full(counters.size, self._words[3]),
        )
        k0, k1 = self._words[:1], self._words[1:2]
        for _ in range(scalar.ROUNDS):
            state = _philox_round(*state, k0, k1)
            k0, k1 = k0 + scalar.WEYL_0, k1 + scalar.WEYL_1
        self._at += count
        words = np.stack(state, axis=1).reshape(groups, scalar.LANES, 4).transpose(0, 2, 1)
        numbers = words.reshape(-1)[:count].view(np.int32) & _LOW
        return torch.from_numpy(numbers).to(device)


def _philox_round(
    c0: np.ndarray, c1: np.ndarray, c2: np.ndarray, c3: np.ndarray, k0: np.ndarray, k1: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """:func:`.scalar.philox_round` of arrays."""
    first = c0.astype(np.uint64) * np.uint64(0xD2511F53)
    second = c2.astype(np.uint64) * np.uint64(0xCD9E8D57)
    low = np.uint64(0xFFFF_FFFF)
    return (
        (second >> np.uint64(32)).astype(np.uint32) ^ c1 ^ k0,
        (second & low).astype(np.uint32),
        (first >> np.uint64(32)).astype(np.uint32) ^ c3 ^ k1,
        (first & low).astype(np.uint32),
    )


def _pieces(numel: int, bucket: int = 1) -> Iterator[tuple[int, int]]:
    """Ranges that begin at a bucket and at a multiple of 256 elements; the last takes the rest."""
    step = bucket * max(256, CHUNK // bucket // 256 * 256)
    for start in range(0, numel, step):
        yield start, min(start + step, numel)


def _over_buckets(
    operation: str, piece: torch.Tensor, factors: torch.Tensor, bucket: int
) -> torch.Tensor:
    """``piece * factors`` or ``piece / factors``, each factor for ``bucket`` elements in turn."""
    body = piece.numel() // bucket * bucket
    out, apply = torch.empty_like(piece), getattr(torch, operation)
    if body:
        rows = piece[:body].view(-1, bucket)
        apply(rows, factors[: rows.shape[0], None], out=out[:body].view(-1, bucket))
    if body < piece.numel():
        apply(piece[body:], factors[-1], out=out[body:])
    return out


def bucket_scales(vector: torch.Tensor, bucket: int, norm: str) -> torch.Tensor:
    numel, limits = vector.numel(), torch.finfo(vector.dtype)
    scales = torch.empty(-(-numel // bucket), dtype=vector.dtype, device=vector.device)
    for start, stop in _pieces(numel, bucket):
        body = start + (stop - start) // bucket * bucket
        first, last = start // bucket, body // bucket
        if body > start:
            scales[first:last] = _row_scales(vector[start:body].view(-1, bucket), norm)
        if body < stop:
            scales[last:] = _row_scales(vector[body:stop].view(1, -1), norm)
    return scales.masked_fill_(scales < limits.tiny, 0)


def _row_scales(rows: torch.Tensor, norm: str) -> torch.Tensor:
    peaks = torch.maximum(rows.amax(1), -rows.amin(1))
    if norm == "max":
        return peaks
    # Squares of what is divided by the peak neither overflow nor vanish.
    safe = peaks.clamp(min=torch.finfo(rows.dtype).tiny)
    norms = torch.linalg.vector_norm(rows / safe[:, None], dim=1) * safe
    # Rounding must not make the norm less than an entry, nor more than the dtype holds.
    norms = norms.clamp(max=torch.finfo(rows.dtype).max).maximum(peaks)
    return torch.where(peaks.isfinite(), norms, peaks)


def _divisors(scales: torch.Tensor) -> torch.Tensor:
    # x / inf is 0, the code of a bucket whose scale is 0.
    return scales.masked_fill(scales == 0, torch.inf)


def _codes(ratios: torch.Tensor, levels: int, noise: _Noise | None) -> torch.Tensor:
    """Codes 0..2 levels, uint8, of ratios in -1..1; ``levels`` stands for 0."""
    fixed = ratios.mul_(levels << FRACTION).to(torch.int32)
    if noise is None:
        fixed.add_((levels << FRACTION) + (1 << FRACTION - 1))
    else:
        fixed.add_(noise.take(fixed.numel(), fixed.device)).add_(levels << FRACTION)
    # The clamp matters for NaN only, whose conversion to integers is anything.
    return fixed.bitwise_right_shift_(FRACTION).clamp_(0, 2 * levels).to(torch.uint8)


def quantise_pack(
    vector: torch.Tensor,
    scales: torch.Tensor,
    bucket: int,
    bits: int,
    key: tuple[int, int] | None,
    out: torch.Tensor,
) -> None:
    levels, divisors = (1 << bits - 1) - 1, _divisors(scales)
    noise = None if key is None else _Noise(key)
    for start, stop in _pieces(vector.numel(), bucket):
        ratios = _over_buckets("div", vector[start:stop], divisors[start // bucket :], bucket)
        codes = _codes(ratios, levels, noise)
        pack_bits(codes, bits, out[start * bits // 8 : -(-stop * bits // 8)])


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
    quantise_pack(vector, scales, bucket, bits, key, out)
    if leave:
        dequantise_add(out, scales.nan_to_num(0, 0, 0), bucket, bits, -1.0, vector)


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
    given = gradient.to(vector.dtype)
    torch.add(residual, given if scale == 1 else given * scale, out=vector)
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
    out.zero_()
    nbytes = -(-out.numel() * bits // 8)
    for start in starts:
        scales = buffer[start : start + scale_bytes].view(out.dtype)
        codes = buffer[start + scale_bytes : start + scale_bytes + nbytes]
        dequantise_add(codes, scales, bucket, bits, 1.0, out)
    out.div_(ranks)


def dequantise_add(
    packed: torch.Tensor,
    scales: torch.Tensor,
    bucket: int,
    bits: int,
    alpha: float,
    out: torch.Tensor,
) -> None:
    levels = (1 << bits - 1) - 1
    for start, stop in _pieces(out.numel(), bucket):
        section = packed[start * bits // 8 : -(-stop * bits // 8)]
        codes = unpack_bits(section, bits, stop - start)
        if int(codes.max()) > 2 * levels:
            raise WireError(f"code {int(codes.max())} received, {bits} bits go up to {2 * levels}")
        # Divided before it meets the scale, so that the largest code gives the scale itself.
        shares = codes.to(out.dtype).sub_(levels).mul_(1 / levels)
        values = _over_buckets("mul", shares, scales[start // bucket :], bucket)
        # Not add(alpha=): that may round once where other backends round twice, and ranks that
        # decode with another one must have equal results.
        out[start:stop].add_(values if alpha == 1 else values.mul_(alpha))


def quantiser_errors(vector: torch.Tensor, bucket: int, norm: str, nearest: bool) -> torch.Tensor:
    scales = bucket_scales(vector, bucket, norm).double()
    errors = torch.zeros(7, dtype=torch.float64, device=vector.device)
    for start, stop in _pieces(vector.numel(), bucket):
        piece = vector[start:stop].double()
        factors = scales[start // bucket :].repeat_interleave(bucket)[: piece.numel()]
        dead = factors == 0
        for width in range(7):
            steps = factors / ((1 << width + 1) - 1)
            ratios = torch.where(dead, 0.0, piece / steps)
            if nearest:
                loss = (ratios - ratios.round()) ** 2
            else:
                share = ratios - ratios.floor()
                loss = share * (1 - share)
            errors[width] += torch.where(dead, piece**2, loss * steps**2).sum()
    return errors


# -- bits -----------------------------------------------------------------------------------


def pack_bits(codes: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    numel = codes.numel()
    if bits == 8:
        out.copy_(codes)
        return
    if numel % 8:
        padded = torch.zeros(-(-numel // 8) * 8, dtype=torch.uint8, device=codes.device)
        padded[:numel] = codes
        codes = padded
    # Eight codes in a 64-bit word, each in a byte of its own. Neighbours are moved together
    # three times: fields of 8, then 16, then 32 bits.
    words = codes.view(torch.int64)
    for field in (8, 16, 32):
        used = bits * field // 8
        low = _spread(2 * field, (1 << used) - 1)
        words = (words & low) | ((words & (low << field)) >> (field - used))
    out.copy_(words.view(torch.uint8).view(-1, 8)[:, :bits].reshape(-1)[: out.numel()])


def unpack_bits(packed: torch.Tensor, bits: int, numel: int) -> torch.Tensor:
    if bits == 8:
        return packed
    count = -(-numel // 8)
    if packed.numel() < count * bits:
        packed = torch.nn.functional.pad(packed, (0, count * bits - packed.numel()))
    spread = torch.zeros(count, 8, dtype=torch.uint8, device=packed.device)
    spread[:, :bits] = packed.view(count, bits)
    words = spread.view(-1).view(torch.int64)
    for field in (32, 16, 8):
        used = bits * field // 8
        low = _spread(2 * field, (1 << used) - 1)
        words = (words & low) | ((words << (field - used)) & (low << field))
    return words.view(torch.uint8)[:numel]


def _spread(field: int, mask: int) -> int:
    """``mask`` in every ``field``-bit field of a 64-bit word."""
    return sum(mask << shift for shift in range(0, 64, field))


# -- lanes ----------------------------------------------------------------------------------


def quantise_lanes(
    vector: torch.Tensor,
    scale: torch.Tensor,
    bits: int,
    width: int,
    key: tuple[int, int] | None,
    out: torch.Tensor,
) -> None:
    levels, divisor = (1 << bits - 1) - 1, _divisors(scale)
    out.zero_()
    noise = None if key is None else _Noise(key)
    for start, stop in _pieces(vector.numel()):
        codes = _codes(vector[start:stop] / divisor, levels, noise)
        for lane, first, last, part in _lane_parts(start, stop, out.numel()):
            signed = codes[part].to(torch.int32).sub_(levels)
            out[first:last].add_(signed.bitwise_left_shift_(lane * width))


def lanes_add(
    words: torch.Tensor,
    scale: torch.Tensor,
    bits: int,
    width: int,
    ranks: int,
    alpha: float,
    out: torch.Tensor,
) -> None:
    levels = (1 << bits - 1) - 1
    zero, mask = ranks * levels, (1 << width) - 1
    # Lifts every lane by `zero`, so that none of them borrows from the next one any more.
    lift = sum(zero << lane * width for lane in range(32 // width))
    lift = (lift + 2**31) % 2**32 - 2**31
    for start, stop in _pieces(out.numel()):
        for lane, first, last, part in _lane_parts(start, stop, words.numel()):
            sums = words[first:last].add(lift)
            sums.bitwise_right_shift_(lane * width).bitwise_and_(mask)
            if int(sums.max()) > 2 * zero:
                raise WireError(
                    f"sum of codes {int(sums.max())} received, {ranks} ranks with {bits} bits "
                    f"cannot pass {2 * zero}"
                )
            shares = sums.sub_(zero).to(out.dtype).mul_(alpha / levels)
            out[start:stop][part].add_(shares.mul_(scale))


def _lane_parts(start: int, stop: int, words: int) -> Iterator[tuple[int, int, int, slice]]:
    """Where elements ``start..stop`` lie, lane by lane: (lane, first word, last, elements).

    Elements are counted from ``start``. Lane i holds a run of ``words`` elements, so that all
    accesses are to neighbours.
    """
    done = 0
    while start + done < stop:
        lane, first = divmod(start + done, words)
        count = min(stop - start - done, words - first)
        yield lane, first, first + count, slice(done, done + count)
        done += count


# -- powers of two and signs ----------------------------------------------------------------


def natural_pack(
    vector: torch.Tensor, exponent: torch.Tensor, key: tuple[int, int], out: torch.Tensor
) -> None:
    noise = _Noise(key)
    factor = power_of_two(-exponent).to(vector.dtype)
    for start, stop in _pieces(vector.numel()):
        pattern = (vector[start:stop] * factor).to(torch.float32).view(torch.int32)
        # The mantissa carries into the exponent as often as the value lies above the lower power.
        magnitude = (pattern & 0x7FFF_FFFF).add_(noise.take(stop - start, pattern.device))
        magnitude.bitwise_right_shift_(FRACTION).bitwise_and_(0x7F)
        sign = pattern.bitwise_right_shift_(24).bitwise_and_(0x80)
        out[start:stop] = magnitude.bitwise_or_(sign)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2**exponent for -1074 < exponent < 1024, fp64, exact (which pow and exp2 need not be)."""
    biased = exponent.to(torch.int64) + 1023
    subnormal = torch.bitwise_left_shift(torch.ones_like(biased), (biased + 51).clamp_(0, 62))
    return torch.where(biased > 0, biased << 52, subnormal).view(torch.float64)


def natural_add(codes: torch.Tensor, factor: float, out: torch.Tensor) -> None:
    for start, stop in _pieces(out.numel()):
        code = codes[start:stop].to(torch.int32)
        sign = (code & 0x80).bitwise_left_shift_(24)
        values = code.bitwise_and_(0x7F).bitwise_left_shift_(FRACTION).bitwise_or_(sign)
        out[start:stop].add_(values.view(torch.float32), alpha=factor)


def mean_magnitude(vector: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64, device=vector.device)
    # Scaled first: a sum of fp64 magnitudes may overflow where their mean does not. By a power of
    # two, which rounds nothing.
    share = 1.0 if vector.dtype == torch.float32 else 0.5 ** vector.numel().bit_length()
    for start, stop in _pieces(vector.numel()):
        magnitudes = vector[start:stop].abs()
        total += (magnitudes if share == 1 else magnitudes.mul_(share)).sum(dtype=torch.float64)
    return (total / (vector.numel() * share)).to(vector.dtype)


def sign_pack(vector: torch.Tensor, out: torch.Tensor) -> None:
    negative = vector < 0
    if vector.device.type == "cpu":
        out.copy_(torch.from_numpy(np.packbits(negative.numpy(), bitorder="little")))
    else:
        pack_bits(negative.to(torch.uint8), 1, out)


def sign_add(packed: torch.Tensor, scale: torch.Tensor, alpha: float, out: torch.Tensor) -> None:
    step = scale * alpha
    for start, stop in _pieces(out.numel()):
        section = packed[start // 8 : -(-stop // 8)]
        if out.device.type == "cpu":
            bits = np.unpackbits(section.numpy(), count=stop - start, bitorder="little")
            negative = torch.from_numpy(bits)
        else:
            negative = unpack_bits(section, 1, stop - start)
        out[start:stop].add_(negative.to(out.dtype).mul_(-2).add_(1).mul_(step))
