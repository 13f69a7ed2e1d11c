"""Powers of two, signs and lanes: one code for each element, no buckets."""

from __future__ import annotations

import numpy as np
import torch

from ...errors import WireError
from .. import portable_quant, scalar
from . import threads
from .jit import Kernel, inline
from .random import key_words, noise_between

#: Elements of one piece; a multiple of the random generator's groups and of eight.
_PIECE = 4096
_HALF = 1 << scalar.FRACTION - 1
_natural_code = inline(scalar.natural_code)
_code_of = inline(scalar.code_of)


@Kernel
def _natural_pack(vector, factor, key, first, out):
    scaled, noise = np.empty(_PIECE, np.float32), np.empty(_PIECE + 512, np.uint32)
    patterns = scaled.view(np.int32)
    for begin in range(0, vector.size, _PIECE):
        part = vector[begin : begin + _PIECE]
        at = noise_between(key, first + begin, first + begin + part.size, noise)
        chance, code = noise[at : at + part.size], out[begin : begin + part.size]
        for i in range(part.size):
            scaled[i] = np.float32(part[i] * factor)
        for i in range(part.size):
            code[i] = np.uint8(_natural_code(patterns[i], np.int32(chance[i])))


@Kernel
def _natural_add(codes, factor, out):
    patterns = np.empty(_PIECE, np.int32)
    values = patterns.view(np.float32)
    for begin in range(0, codes.size, _PIECE):
        code, part = codes[begin : begin + _PIECE], out[begin : begin + _PIECE]
        for i in range(code.size):
            word = np.int32(code[i])
            patterns[i] = ((word & 0x7F) << 23) | ((word & 0x80) << 24)
        for i in range(code.size):
            part[i] += out.dtype.type(values[i]) * factor


@Kernel
def _mean_magnitude(vector, share):
    """Sum of ``|x| * share``, in 16 lanes."""
    lanes = np.zeros(16, np.float64)
    whole = vector.size // 16 * 16
    for begin in range(0, whole, 16):
        for i in range(16):
            lanes[i] += abs(np.float64(vector[begin + i])) * share
    total = 0.0
    for i in range(16):
        total += lanes[i]
    for i in range(whole, vector.size):
        total += abs(np.float64(vector[i])) * share
    return total


@Kernel
def _sign_pack(vector, out):
    whole = vector.size // 8
    for byte in range(whole):
        bits = np.uint8(0)
        for i in range(8):
            bits |= np.uint8(vector[8 * byte + i] < 0) << np.uint8(i)
        out[byte] = bits
    if whole < out.size:
        bits = np.uint8(0)
        for i in range(vector.size - 8 * whole):
            bits |= np.uint8(vector[8 * whole + i] < 0) << np.uint8(i)
        out[whole] = bits


@Kernel
def _sign_add(packed, step, out):
    whole = out.size // 8
    for byte in range(whole):
        bits = np.int32(packed[byte])
        for i in range(8):
            out[8 * byte + i] += out.dtype.type(1 - 2 * ((bits >> i) & 1)) * step
    for i in range(8 * whole, out.size):
        out[i] += out.dtype.type(1 - 2 * ((np.int32(packed[i // 8]) >> (i % 8)) & 1)) * step


@Kernel
def _quantise_lanes(vector, divisor, levels, width, key, first, words, out):
    """Words ``first`` to ``first + out.size`` of ``words`` in all; every lane of them."""
    zero, steps = np.int32(levels << 23), vector.dtype.type(levels << 23)
    noise = np.empty(_PIECE + 512, np.uint32)
    out[:] = 0
    for lane in range(32 // width):
        for begin in range(0, out.size, _PIECE):
            start = lane * words + first + begin
            stop = min(start + min(_PIECE, out.size - begin), vector.size)
            if stop <= start:
                break
            part, target = vector[start:stop], out[begin : begin + stop - start]
            if key.size:
                at = noise_between(key, start, stop, noise)
                chance = noise[at : at + part.size]
                for i in range(part.size):
                    code = _code_of(part[i] / divisor * steps, zero, np.int32(chance[i]))
                    target[i] += (code - np.int32(levels)) << np.int32(lane * width)
            else:
                for i in range(part.size):
                    code = _code_of(part[i] / divisor * steps, zero, np.int32(_HALF))
                    target[i] += (code - np.int32(levels)) << np.int32(lane * width)


@Kernel
def _lanes_add(words, scale, zero, lift, width, share, first, total, out):
    """Lanes of ``words`` from ``first`` on, of ``total`` in all; returns the largest sum."""
    mask, worst = np.uint32((1 << width) - 1), np.uint32(0)
    for lane in range(32 // width):
        start = lane * total + first
        stop = min(start + words.size, out.size)
        if stop <= start:
            break
        part = out[start:stop]
        for i in range(part.size):
            found = ((np.uint32(words[i]) + lift) >> np.uint32(lane * width)) & mask
            worst = max(worst, found)
            part[i] += out.dtype.type(np.int32(found) - zero) * share * scale
    return worst


@Kernel
def _bitmap(positions, out):
    for i in range(positions.size):
        out[positions[i] >> 3] |= np.uint8(1) << np.uint8(positions[i] & 7)


@Kernel
def _from_bitmap(bitmap, positions):
    """Positions of the bits that are set, at most as many as there is room for; how many are."""
    count = 0
    for byte in range(bitmap.size):
        bits = bitmap[byte]
        while bits:
            low = np.uint8(bits & (~bits + np.uint8(1)))
            if count < positions.size:
                place = 0
                while low > 1:
                    low >>= np.uint8(1)
                    place += 1
                positions[count] = 8 * byte + place
            count += 1
            bits &= np.uint8(bits - np.uint8(1))
    return count


# -- operations ------------------------------------------------------------------------------


def natural_pack(
    vector: torch.Tensor, exponent: torch.Tensor, key: tuple[int, int], out: torch.Tensor
) -> None:
    array, codes, words = vector.numpy(), out.numpy(), key_words(key)
    factor = array.dtype.type(portable_quant.power_of_two(-exponent).item())
    threads.each(
        _natural_pack,
        [(array[a:b], factor, words, a, codes[a:b]) for a, b in threads.spans(array.size)],
    )


def natural_add(codes: torch.Tensor, factor: float, out: torch.Tensor) -> None:
    given, target = codes.numpy(), out.numpy()
    kind = target.dtype.type(factor)
    threads.each(
        _natural_add, [(given[a:b], kind, target[a:b]) for a, b in threads.spans(given.size)]
    )


def mean_magnitude(vector: torch.Tensor) -> torch.Tensor:
    array = vector.numpy()
    # Scaled first: a sum of fp64 magnitudes may overflow where their mean does not. By a power of
    # two, which rounds nothing.
    share = 1.0 if vector.dtype == torch.float32 else 0.5 ** array.size.bit_length()
    calls = [(array[a:b], share) for a, b in threads.spans(array.size)]
    total = sum(threads.each(_mean_magnitude, calls))
    return torch.tensor(total / (array.size * share), dtype=vector.dtype)


def sign_pack(vector: torch.Tensor, out: torch.Tensor) -> None:
    array, packed = vector.numpy(), out.numpy()
    threads.each(
        _sign_pack,
        [(array[a:b], packed[a // 8 : -(-b // 8)]) for a, b in threads.spans(array.size)],
    )


def sign_add(packed: torch.Tensor, scale: torch.Tensor, alpha: float, out: torch.Tensor) -> None:
    bits, target = packed.numpy(), out.numpy()
    step = target.dtype.type(scale.item()) * target.dtype.type(alpha)
    threads.each(
        _sign_add,
        [(bits[a // 8 : -(-b // 8)], step, target[a:b]) for a, b in threads.spans(target.size)],
    )


def quantise_lanes(
    vector: torch.Tensor,
    scale: torch.Tensor,
    bits: int,
    width: int,
    key: tuple[int, int] | None,
    out: torch.Tensor,
) -> None:
    array, words = vector.numpy(), out.numpy()
    levels = (1 << bits - 1) - 1
    # x / inf is 0, the code of a layer whose scale is 0.
    divisor = array.dtype.type(scale.item() or np.inf)
    chance = np.empty(0, np.uint32) if key is None else key_words(key)
    threads.each(
        _quantise_lanes,
        [
            (array, divisor, levels, width, chance, a, words.size, words[a:b])
            for a, b in threads.spans(words.size)
        ],
    )


def lanes_add(
    words: torch.Tensor,
    scale: torch.Tensor,
    bits: int,
    width: int,
    ranks: int,
    alpha: float,
    out: torch.Tensor,
) -> None:
    given, target = words.numpy(), out.numpy()
    levels = (1 << bits - 1) - 1
    zero = ranks * levels
    # Lifts every lane by `zero`, so that none of them borrows from the next one any more.
    lift = np.uint32(sum(zero << lane * width for lane in range(32 // width)) & 0xFFFF_FFFF)
    kind = target.dtype.type
    worst = max(
        threads.each(
            _lanes_add,
            [
                (
                    given[a:b], kind(scale.item()), np.int32(zero), lift, width,
                    kind(alpha / levels), a, given.size, target,
                )
                for a, b in threads.spans(given.size)
            ],
        )
    )  # fmt: skip
    if worst > 2 * zero:
        raise WireError(
            f"sum of codes {worst} received, {ranks} ranks with {bits} bits cannot pass {2 * zero}"
        )


def pack_bitmap(indices: torch.Tensor, numel: int) -> torch.Tensor:
    out = np.zeros(-(-numel // 8), np.uint8)
    _bitmap(indices.numpy(), out)
    return torch.from_numpy(out)


def unpack_bitmap(buffer: torch.Tensor, numel: int) -> torch.Tensor:
    bitmap = buffer.numpy()
    count = int(np.bitwise_count(bitmap).sum()) if hasattr(np, "bitwise_count") else 8 * bitmap.size
    positions = np.empty(count, np.int64)
    return torch.from_numpy(positions[: _from_bitmap(bitmap, positions)])
