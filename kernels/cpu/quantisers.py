"""Quantisers: each bucket is read once, and all that is done to it is done while it is in cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...errors import WireError
from .. import scalar
from . import threads
from .jit import Kernel, inline, inline_sum
from .packing import pack, unpack
from .random import key_words, noise_between

_SIGNED = {torch.float32: (np.int32, 0x7FFF_FFFF), torch.float64: (np.int64, (1 << 63) - 1)}
_HALF = 1 << scalar.FRACTION - 1
_code_of = inline(scalar.code_of)
_natural_code = inline(scalar.natural_code)
#: Elements of one piece where there are no buckets; a multiple of the random generator's groups.
_PIECE = 4096


# -- compiled --------------------------------------------------------------------------------


@inline
def _scale(part, patterns, magnitude, tiny, l2):
    """The norm of a bucket; 0 below the smallest normal number; inf or NaN if an entry is."""
    top = patterns[0] & magnitude
    for i in range(patterns.size):
        top = max(top, patterns[i] & magnitude)
    room = np.empty(1, patterns.dtype)
    room[0] = top
    peak = room.view(part.dtype)[0]
    if not np.isfinite(peak):
        return peak
    if not l2:
        return peak if peak >= tiny else part.dtype.type(0)
    # Squares of what is divided by the peak neither overflow nor vanish. Many entries below the
    # smallest normal number may have a norm above it.
    unit, total = max(peak, tiny), 0.0
    for i in range(part.size):
        ratio = np.float64(part[i] / unit)
        total += ratio * ratio
    norm = part.dtype.type(np.sqrt(total) * np.float64(unit))
    if norm < tiny:
        return part.dtype.type(0)
    # Rounding must not make the norm less than an entry, nor more than the dtype holds.
    return max(peak, norm) if np.isfinite(norm) else np.finfo(part.dtype).max


@Kernel
def _scales(vector, patterns, magnitude, tiny, l2, bucket, scales):
    for place in range(scales.size):
        begin, end = place * bucket, min((place + 1) * bucket, vector.size)
        scales[place] = _scale(vector[begin:end], patterns[begin:end], magnitude, tiny, l2)


@Kernel
def _quantise(
    vector, patterns, other, own, factor, adds, magnitude, tiny, l2, given, scales, bucket, bits,
    key, first, packed, leave,
):  # fmt: skip
    """A span: add (if ``adds``), scale (unless ``given``), code, pack, and leave what was lost.

    ``first`` is the span's first element, for the random numbers (``key`` empty: to nearest).
    Eight buckets at a time, since those begin and end with a byte whatever their length.
    """
    levels = (1 << (bits - 1)) - 1
    zero, inverse = np.int32(levels << 23), vector.dtype.type(1.0 / levels)
    steps = vector.dtype.type(levels << 23)
    codes = np.empty(8 * bucket, np.uint8)
    noise = np.empty(8 * bucket + 512, np.uint32)
    for begin in range(0, vector.size, 8 * bucket):
        end = min(begin + 8 * bucket, vector.size)
        at = 0
        if key.size:
            at = noise_between(key, first + begin, first + end, noise)
        for start in range(begin, end, bucket):
            stop = min(start + bucket, end)
            part, chance = vector[start:stop], noise[at + start - begin : at + stop - begin]
            if adds:
                addend = other[start:stop]
                for i in range(part.size):
                    part[i] = own * part[i] + factor * addend[i]
            if not given:
                scales[start // bucket] = _scale(part, patterns[start:stop], magnitude, tiny, l2)
            scale = scales[start // bucket]
            code = codes[start - begin : stop - begin]
            if scale == 0 or not np.isfinite(scale):
                for i in range(part.size):
                    code[i] = np.uint8(levels)
                continue  # zeros: all that there is is left
            if key.size:
                for i in range(part.size):
                    code[i] = np.uint8(_code_of(part[i] / scale * steps, zero, np.int32(chance[i])))
            else:
                for i in range(part.size):
                    code[i] = np.uint8(_code_of(part[i] / scale * steps, zero, np.int32(_HALF)))
            if leave:
                for i in range(part.size):
                    share = part.dtype.type(np.int32(code[i]) - levels) * inverse
                    part[i] -= share * scale
        pack(codes[: end - begin], bits, packed[begin * bits // 8 :])


@inline
def _values(codes, levels, scale, out):
    """Values of codes. Divided before it meets the scale: the largest code gives the scale."""
    kind = out.dtype.type
    inverse = kind(1.0 / levels)
    for i in range(codes.size):
        out[i] = kind(np.int32(codes[i]) - levels) * inverse * scale


@inline
def _largest(codes):
    top = np.uint8(0)
    for i in range(codes.size):
        top = max(top, codes[i])
    return np.int64(top)


@Kernel
def _dequantise_add(packed, scales, bucket, bits, alpha, out):
    """``out += alpha * values``; returns the largest code."""
    levels = np.int32((1 << (bits - 1)) - 1)
    codes, values = np.empty(8 * bucket, np.uint8), np.empty(bucket, out.dtype)
    worst = 0
    for begin in range(0, out.size, 8 * bucket):
        end = min(begin + 8 * bucket, out.size)
        found = codes[: end - begin]
        unpack(packed[begin * bits // 8 :], bits, found)
        worst = max(worst, _largest(found))
        for start in range(begin, end, bucket):
            stop = min(start + bucket, end)
            part, value = out[start:stop], values[: stop - start]
            _values(found[start - begin : stop - begin], levels, scales[start // bucket], value)
            for i in range(part.size):
                part[i] += alpha * value[i]
    return worst


@Kernel
def _dequantise_mean(buffer, words, offsets, scale_bytes, bucket, bits, ranks, first, out):
    """The mean of several payloads, added up in order, over one span; returns the largest code.

    Up to four payloads at a time: sums are stored and read again less often.
    """
    levels, kind = np.int32((1 << (bits - 1)) - 1), out.dtype.type
    codes = np.empty((4, 8 * bucket), np.uint8)
    worst, width, step = 0, out.itemsize, kind(1.0 / levels)
    exact = ranks & (ranks - 1) == 0  # then the inverse is, and costs less than a division
    divisor, inverse = kind(ranks), kind(1.0 / ranks)
    for begin in range(0, out.size, 8 * bucket):
        end = min(begin + 8 * bucket, out.size)
        target = out[begin:end]
        skip = scale_bytes + (first + begin) * bits // 8
        payload = 0
        if offsets.size < 4:
            target[:] = 0
        while payload < offsets.size:
            left = offsets.size - payload
            group = 4 if left >= 4 else 2 if left >= 2 else 1
            for i in range(group):
                found = codes[i, : end - begin]
                unpack(buffer[offsets[payload + i] + skip :], bits, found)
                worst = max(worst, _largest(found))
            factor = inverse if exact and group == left else kind(1)
            for start in range(0, target.size, bucket):
                stop = min(start + bucket, target.size)
                place = (first + begin + start) // bucket
                part, a = target[start:stop], codes[0, start:stop]
                p = words[offsets[payload] // width + place]
                if group == 1:
                    for i in range(part.size):
                        total = part[i] + kind(np.int32(a[i]) - levels) * step * p
                        part[i] = total * factor
                    continue
                b, q = codes[1, start:stop], words[offsets[payload + 1] // width + place]
                if group == 2:
                    for i in range(part.size):
                        total = part[i] + kind(np.int32(a[i]) - levels) * step * p
                        total += kind(np.int32(b[i]) - levels) * step * q
                        part[i] = total * factor
                    continue
                c, r = codes[2, start:stop], words[offsets[payload + 2] // width + place]
                d, s = codes[3, start:stop], words[offsets[payload + 3] // width + place]
                if payload == 0:
                    for i in range(part.size):
                        total = kind(np.int32(a[i]) - levels) * step * p
                        total += kind(np.int32(b[i]) - levels) * step * q
                        total += kind(np.int32(c[i]) - levels) * step * r
                        total += kind(np.int32(d[i]) - levels) * step * s
                        part[i] = total * factor
                else:
                    for i in range(part.size):
                        total = part[i] + kind(np.int32(a[i]) - levels) * step * p
                        total += kind(np.int32(b[i]) - levels) * step * q
                        total += kind(np.int32(c[i]) - levels) * step * r
                        total += kind(np.int32(d[i]) - levels) * step * s
                        part[i] = total * factor
            payload += group
        if not exact:
            for i in range(target.size):
                target[i] /= divisor
    return worst


@inline_sum
def _rounding(part, factor, nearest):
    """Sum of the squared errors of rounding ``|x| * factor`` to whole numbers, in whole numbers."""
    total = 0.0
    if nearest:
        for i in range(part.size):
            ratio = np.float64(part[i]) * factor
            loss = ratio - np.rint(ratio)
            total += loss * loss
    else:
        for i in range(part.size):
            ratio = np.float64(part[i]) * factor
            share = ratio - np.floor(ratio)
            total += share * (1.0 - share)
    return total


@inline_sum
def _energy(part):
    total = 0.0
    for i in range(part.size):
        total += np.float64(part[i]) * np.float64(part[i])
    return total


@Kernel
def _errors(vector, patterns, magnitude, tiny, l2, bucket, nearest, errors):
    """Adds each width's error to ``errors``."""
    for begin in range(0, vector.size, bucket):
        end = min(begin + bucket, vector.size)
        part = vector[begin:end]
        scale = np.float64(_scale(part, patterns[begin:end], magnitude, tiny, l2))
        if scale == 0:  # comes out as zeros
            energy = _energy(part)
            for width in range(errors.size):
                errors[width] += energy
            continue
        for width in range(errors.size):
            levels = (1 << (width + 1)) - 1
            step = scale / levels
            errors[width] += _rounding(part, levels / scale, nearest) * step * step


# -- operations ------------------------------------------------------------------------------


def _call(
    vector: torch.Tensor,
    addends: tuple[np.ndarray, Any, Any] | None,
    norm: str,
    given: bool,
    scales: torch.Tensor,
    bucket: int,
    bits: int,
    key: tuple[int, int] | None,
    out: torch.Tensor,
    leave: bool,
) -> None:
    signed, magnitude = _SIGNED[vector.dtype]
    array = vector.numpy()
    patterns, one = array.view(signed), array.dtype.type(1)
    other, own, factor = addends or (array, one, one)
    words = np.empty(0, np.uint32) if key is None else key_words(key)
    tiny = np.finfo(array.dtype).tiny
    held, packed = scales.numpy(), out.numpy()
    threads.each(
        _quantise,
        [
            (
                array[a:b], patterns[a:b], other[a:b], own, factor, addends is not None,
                signed(magnitude), tiny, norm == "l2", given, held[a // bucket : -(-b // bucket)],
                bucket, bits, words, a, packed[a * bits // 8 : -(-b * bits // 8)], leave,
            )
            for a, b in threads.spans(array.size, 8 * bucket)
        ],
    )  # fmt: skip


def bucket_scales(vector: torch.Tensor, bucket: int, norm: str) -> torch.Tensor:
    signed, magnitude = _SIGNED[vector.dtype]
    array = vector.numpy()
    scales = np.empty(-(-array.size // bucket), array.dtype)
    tiny, l2 = np.finfo(array.dtype).tiny, norm == "l2"
    bucket = min(bucket, max(1, array.size))
    threads.each(
        _scales,
        [
            (
                array[a:b], array[a:b].view(signed), signed(magnitude), tiny, l2, bucket,
                scales[a // bucket : -(-b // bucket)],
            )
            for a, b in threads.spans(array.size, bucket)
        ],
    )  # fmt: skip
    return torch.from_numpy(scales)


def quantise_pack(
    vector: torch.Tensor,
    scales: torch.Tensor,
    bucket: int,
    bits: int,
    key: tuple[int, int] | None,
    out: torch.Tensor,
) -> None:
    bucket = min(bucket, max(1, vector.numel()))
    _call(vector, None, "max", True, scales, bucket, bits, key, out, False)


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
    bucket = min(bucket, max(1, vector.numel()))
    _call(vector, None, norm, False, scales, bucket, bits, key, out, leave)


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
    array = vector.numpy()
    one, factor = array.dtype.type(1), array.dtype.type(scale)
    if vector.data_ptr() == gradient.data_ptr():
        addends = (residual.numpy(), factor, one)
    else:
        if vector.data_ptr() != residual.data_ptr():
            vector.copy_(residual)
        given = gradient if gradient.dtype == vector.dtype else gradient.to(vector.dtype)
        addends = (given.numpy(), one, factor)
    bucket = min(bucket, max(1, vector.numel()))
    _call(vector, addends, norm, False, scales, bucket, bits, key, out, True)


def quantiser_errors(vector: torch.Tensor, bucket: int, norm: str, nearest: bool) -> torch.Tensor:
    signed, magnitude = _SIGNED[vector.dtype]
    array = vector.numpy()
    tiny = np.finfo(array.dtype).tiny
    bucket = min(bucket, max(1, array.size))
    parts = threads.spans(array.size, bucket)
    errors = np.zeros((len(parts), 7))
    threads.each(
        _errors,
        [
            (
                array[a:b], array[a:b].view(signed), signed(magnitude), tiny, norm == "l2", bucket,
                nearest, row,
            )
            for (a, b), row in zip(parts, errors, strict=True)
        ],
    )  # fmt: skip
    return torch.from_numpy(errors.sum(axis=0))


def dequantise_add(
    packed: torch.Tensor,
    scales: torch.Tensor,
    bucket: int,
    bits: int,
    alpha: float,
    out: torch.Tensor,
) -> None:
    codes, held, target = packed.numpy(), scales.numpy(), out.numpy()
    bucket = min(bucket, max(1, target.size))
    calls = [
        (
            codes[a * bits // 8 : -(-b * bits // 8)], held[a // bucket : -(-b // bucket)], bucket,
            bits, target.dtype.type(alpha), target[a:b],
        )
        for a, b in threads.spans(target.size, 8 * bucket)
    ]  # fmt: skip
    _check_codes(max(threads.each(_dequantise_add, calls)), bits)


def dequantise_mean(
    out: torch.Tensor,
    buffer: torch.Tensor,
    starts: list[int],
    scale_bytes: int,
    bucket: int,
    bits: int,
    ranks: int,
) -> None:
    received, target = buffer.numpy(), out.numpy()
    if not starts:
        target.fill(0)
        return
    words = received[: received.size // target.itemsize * target.itemsize].view(target.dtype)
    offsets = np.array(starts, np.int64)
    bucket = min(bucket, max(1, target.size))
    calls = [
        (received, words, offsets, scale_bytes, bucket, bits, ranks, a, target[a:b])
        for a, b in threads.spans(target.size, 8 * bucket)
    ]
    _check_codes(max(threads.each(_dequantise_mean, calls)), bits)


def _check_codes(worst: int, bits: int) -> None:
    limit = (1 << bits) - 2
    if worst > limit:
        raise WireError(f"code {worst} received, {bits} bits go up to {limit}")
