"""CUDA kernels of the quantisers, in Python that Numba compiles.

Random numbers, rounding and packing are those of :mod:`..scalar`, the source that the CPU's kernels
are made from too, so codes agree to the last bit. Where a product is added to something it goes
through :func:`product`: Numba offers no way to forbid fused multiply-adds, which would round once
where the CPU rounds twice.

Any number of threads that is a power of two, up to ``MOST_THREADS``, may run a kernel; nothing here
uses warps, since Numba's simulator has none. Importing this module needs Numba, and no GPU.
"""

from __future__ import annotations

import math

import numpy as np
from numba import config, cuda, float32, float64, int32, uint8

from .. import scalar

THREADS = 128
MOST_THREADS = 256
#: Elements between two barriers, whose codes are in shared memory: whole groups of the generator.
CHUNK = 4 * scalar.GROUP
#: Elements of a block where no bucket has to stay together, and words of lanes.
SPAN = 4 * CHUNK

_GROUP, _LANES, _ROUNDS = scalar.GROUP, scalar.LANES, scalar.ROUNDS
_WEYL_0, _WEYL_1 = scalar.WEYL_0, scalar.WEYL_1
_FRACTION = scalar.FRACTION
_HALF = 1 << _FRACTION - 1
_round = cuda.jit(device=True)(scalar.philox_round)
_code_of = cuda.jit(device=True)(scalar.code_of)
_natural_code = cuda.jit(device=True)(scalar.natural_code)
_with_code = cuda.jit(device=True)(scalar.with_code)
_byte_of = cuda.jit(device=True)(scalar.byte_of)

if config.ENABLE_CUDASIM:

    def product(x, y):
        return x * y

    def _pattern(x):
        return np.float32(x).view(np.int32)

    def _from_pattern(bits):
        return np.int32(bits).view(np.float32)

else:
    from numba.cuda import libdevice
    from numba.cuda.extending import overload

    def product(x, y):
        """``x * y``, rounded before anything else happens to it. Both fp32, or both fp64."""
        raise NotImplementedError("runs on the device only")

    @overload(product, target="cuda")
    def _product(x, y):
        if x == float64:
            return lambda x, y: libdevice.dmul_rn(x, y)
        return lambda x, y: libdevice.fmul_rn(x, y)

    def _pattern_of(x):
        return libdevice.float_as_int(x)

    def _of_pattern(bits):
        return libdevice.int_as_float(bits)

    _pattern = cuda.jit(device=True)(_pattern_of)
    _from_pattern = cuda.jit(device=True)(_of_pattern)


@cuda.jit(device=True)
def _random_words(key, counter):
    """The four words of a counter: of elements 64 apart."""
    c0, c1 = np.uint32(counter), np.uint32(np.uint64(counter) >> np.uint64(32))
    c2, c3 = key[2], key[3]
    k0, k1 = key[0], key[1]
    for _ in range(_ROUNDS):
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
        k0 = np.uint32(k0 + _WEYL_0)
        k1 = np.uint32(k1 + _WEYL_1)
    return c0, c1, c2, c3


@cuda.jit(device=True)
def _noise_of(word):
    return np.int32(word & np.uint32(0x7F_FFFF))


@cuda.jit(device=True)
def _one_noise(key, i):
    """Of element i alone."""
    a, b, c, d = _random_words(key, i // _GROUP * _LANES + i % _LANES)
    place = i // _LANES % 4
    return _noise_of(a if place == 0 else b if place == 1 else c if place == 2 else d)


@cuda.jit(device=True)
def _code_one(vector, i, scale, steps, zero, step, noise, leave):
    """Code of element i; with ``leave``, the vector keeps what the code does not say."""
    value = vector[i]
    code = _code_of(value / scale * steps, zero, noise)
    if leave:
        share = vector.dtype.type(code - (zero >> np.int32(_FRACTION))) * step
        vector[i] = value - product(share, scale)
    return code


@cuda.jit(device=True)
def _bucket_of(i, bucket, shift):
    """A division of 64-bit numbers costs more than all else that is done to an element."""
    return i >> shift if shift >= 0 else i // bucket


@cuda.jit(device=True)
def _code_range(vector, begin, end, scales, bucket, shift, bits, key, drawn, packed, leave, codes):
    """Codes of elements ``begin`` to ``end``, by all threads of the block; ``begin`` in eights.

    ``bucket`` is ``1 << shift``, unless that is negative.
    """
    levels = np.int32((1 << (bits - 1)) - 1)
    zero, kind = np.int32(levels << _FRACTION), vector.dtype.type
    step, steps = kind(1.0 / levels), kind(zero)
    for base in range(begin // _GROUP * _GROUP, end, CHUNK):
        for t in range(cuda.threadIdx.x, CHUNK // 4, cuda.blockDim.x):
            first = base + t // _LANES * _GROUP + t % _LANES
            if first >= end or first + 3 * _LANES < begin:
                continue
            a = b = c = d = np.int32(_HALF)
            if drawn:
                p, q, r, s = _random_words(key, first // _GROUP * _LANES + t % _LANES)
                a, b, c, d = _noise_of(p), _noise_of(q), _noise_of(r), _noise_of(s)
            for part in range(4):
                i = first + part * _LANES
                if i < begin or i >= end:
                    continue
                scale = scales[_bucket_of(i, bucket, shift)]
                code = levels  # of zero, for buckets of zeros and those that are not finite
                if scale > 0 and scale < np.inf:
                    noise = a if part == 0 else b if part == 1 else c if part == 2 else d
                    code = _code_one(vector, i, scale, steps, zero, step, noise, leave)
                codes[i - base] = np.uint8(code)
        cuda.syncthreads()
        start, stop = max(begin, base), min(end, base + CHUNK)
        for group in range(cuda.threadIdx.x, (stop - start + 7) // 8, cuda.blockDim.x):
            at = start + 8 * group
            count = min(8, stop - at)
            word = np.uint64(0)
            for i in range(count):
                word = _with_code(word, codes[at - base + i], i, bits)
            to = at // 8 * bits
            for i in range((count * bits + 7) // 8):
                packed[to + i] = _byte_of(word, i)
        cuda.syncthreads()


@cuda.jit(device=True)
def _larger(a, b):
    """NaN if one is."""
    return b if b > a or b != b else a


@cuda.jit(device=True)
def _fold(room, add):
    """Of one number from each thread, their sum or the largest, for all threads."""
    cuda.syncthreads()
    step = cuda.blockDim.x // 2
    while step:
        me = cuda.threadIdx.x
        if me < step:
            room[me] = room[me] + room[me + step] if add else _larger(room[me], room[me + step])
        cuda.syncthreads()
        step //= 2
    result = room[0]
    cuda.syncthreads()
    return result


@cuda.jit(device=True)
def _scale_of(vector, begin, end, l2, tiny, largest, room):
    """The norm of elements ``begin`` to ``end``, for all threads of the block."""
    kind = vector.dtype.type
    top = kind(0)
    for i in range(begin + cuda.threadIdx.x, end, cuda.blockDim.x):
        top = _larger(top, abs(vector[i]))
    room[cuda.threadIdx.x] = top
    peak = _fold(room, False)
    if not (peak <= largest):
        return peak
    if not l2:
        return peak if peak >= tiny else kind(0)
    # Squares of what is divided by the peak neither overflow nor vanish.
    unit, total = max(peak, tiny), kind(0)
    for i in range(begin + cuda.threadIdx.x, end, cuda.blockDim.x):
        ratio = vector[i] / unit
        total += product(ratio, ratio)
    room[cuda.threadIdx.x] = total
    norm = product(kind(math.sqrt(_fold(room, True))), unit)
    if norm < tiny:
        return kind(0)
    # Rounding must not make the norm less than an entry, nor more than the dtype holds.
    return min(max(peak, norm), largest)


@cuda.jit(device=True)
def _quantise_buckets(
    vector, other, own, factor, adds, l2, tiny, largest, scales, bucket, shift, bits, key, drawn,
    packed, leave, room, codes,
):  # fmt: skip
    place = cuda.blockIdx.x
    begin, end = place * bucket, min((place + 1) * bucket, vector.size)
    if adds:
        for i in range(begin + cuda.threadIdx.x, end, cuda.blockDim.x):
            vector[i] = product(own, vector[i]) + product(factor, other[i])
    # What the same thread wrote it reads again; other threads' entries only after the barrier.
    scale = _scale_of(vector, begin, end, l2, tiny, largest, room)
    if cuda.threadIdx.x == 0:
        scales[place] = scale
    cuda.syncthreads()
    _code_range(vector, begin, end, scales, bucket, shift, bits, key, drawn, packed, leave, codes)


@cuda.jit
def quantise_float32(
    vector, other, own, factor, adds, l2, tiny, largest, scales, bucket, shift, bits, key, drawn,
    packed, leave,
):  # fmt: skip
    """A block for each bucket (in eights of elements): add, scale, code, pack, leave the rest."""
    _quantise_buckets(
        vector, other, own, factor, adds, l2, tiny, largest, scales, bucket, shift, bits, key,
        drawn, packed, leave, cuda.shared.array(MOST_THREADS, float32),
        cuda.shared.array(CHUNK, uint8),
    )  # fmt: skip


@cuda.jit
def quantise_float64(
    vector, other, own, factor, adds, l2, tiny, largest, scales, bucket, shift, bits, key, drawn,
    packed, leave,
):  # fmt: skip
    """:func:`quantise_float32` for fp64."""
    _quantise_buckets(
        vector, other, own, factor, adds, l2, tiny, largest, scales, bucket, shift, bits, key,
        drawn, packed, leave, cuda.shared.array(MOST_THREADS, float64),
        cuda.shared.array(CHUNK, uint8),
    )  # fmt: skip


@cuda.jit
def quantise_given(vector, scales, bucket, shift, bits, key, drawn, packed, leave):
    """Codes where the scales are known. A block for each ``SPAN`` elements."""
    codes = cuda.shared.array(CHUNK, uint8)
    begin = cuda.blockIdx.x * SPAN
    end = min(begin + SPAN, vector.size)
    _code_range(vector, begin, end, scales, bucket, shift, bits, key, drawn, packed, leave, codes)


@cuda.jit(device=True)
def _code_at(packed, start, i, bits):
    """Code i of what is packed from byte ``start`` on."""
    bit = i * bits
    byte, shift = start + (bit >> 3), bit & 7
    word = np.int32(packed[byte])
    if shift + bits > 8:
        word |= np.int32(packed[byte + 1]) << np.int32(8)
    return (word >> np.int32(shift)) & np.int32((1 << bits) - 1)


@cuda.jit
def dequantise_mean(buffer, words, starts, places, bucket, shift, bits, ranks, worst, out):
    """The mean of what several ranks sent, added up in order; the largest code too.

    ``starts`` says where the codes of each payload begin in ``buffer``, and ``places`` where its
    scales do in ``words``.
    """
    levels, kind = np.int32((1 << (bits - 1)) - 1), out.dtype.type
    step, top = kind(1.0 / levels), np.int32(0)
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        total = kind(0)
        place = _bucket_of(i, bucket, shift)
        for payload in range(starts.size):
            code = _code_at(buffer, starts[payload], i, bits)
            top = max(top, code)
            scale = words[places[payload] + place]
            total += product(kind(code - levels) * step, scale)
        out[i] = total / kind(ranks)
    if top > 2 * levels:
        cuda.atomic.max(worst, 0, top)


@cuda.jit
def dequantise_add(packed, scales, bucket, shift, bits, alpha, worst, out):
    """``out += alpha * values``; the largest code too."""
    levels, kind = np.int32((1 << (bits - 1)) - 1), out.dtype.type
    step, top = kind(1.0 / levels), np.int32(0)
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        code = _code_at(packed, 0, i, bits)
        top = max(top, code)
        out[i] += product(alpha, kind(code - levels) * step * scales[_bucket_of(i, bucket, shift)])
    if top > 2 * levels:
        cuda.atomic.max(worst, 0, top)


@cuda.jit
def natural_pack(vector, factor, key, out):
    """Rounded powers of two, a thread for each counter of the generator: four elements."""
    groups = (vector.size + _GROUP - 1) // _GROUP
    for counter in range(cuda.grid(1), groups * _LANES, cuda.gridsize(1)):
        a, b, c, d = _random_words(key, counter)
        first = counter // _LANES * _GROUP + counter % _LANES
        for part in range(4):
            i = first + part * _LANES
            if i < vector.size:
                noise = _noise_of(a if part == 0 else b if part == 1 else c if part == 2 else d)
                pattern = _pattern(np.float32(vector[i] * factor))
                out[i] = np.uint8(_natural_code(pattern, noise))


@cuda.jit
def natural_add(codes, factor, out):
    """``out += factor * value`` of each code."""
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        word = np.int32(codes[i])
        value = _from_pattern(
            np.int32(
                ((word & np.int32(0x7F)) << np.int32(23))
                | ((word & np.int32(0x80)) << np.int32(24))
            )
        )
        out[i] += product(out.dtype.type(value), factor)


@cuda.jit
def quantise_lanes(vector, divisor, bits, width, key, drawn, out):
    """A thread for each word, of ``32 // width`` lanes."""
    levels = np.int32((1 << (bits - 1)) - 1)
    zero = np.int32(levels << _FRACTION)
    steps = vector.dtype.type(zero)
    for word in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        total = np.int32(0)
        for lane in range(32 // width):
            i = lane * out.size + word
            if i < vector.size:
                noise = _one_noise(key, i) if drawn else np.int32(_HALF)
                code = _code_of(vector[i] / divisor * steps, zero, noise)
                total += (code - levels) << np.int32(lane * width)
        out[word] = total


def signatures() -> dict[str, tuple[object, tuple]]:
    """Every kernel with argument types, as compiled for fp32 and fp64 gradients."""
    from numba import boolean, int64, types, uint32

    found: dict[str, tuple[object, tuple]] = {}
    flat, key = uint8[::1], types.UniTuple(uint32, 4)
    for kind, quantiser in ((float32, quantise_float32), (float64, quantise_float64)):
        array, name = kind[::1], str(kind)
        found[f"quantise_{name}"] = quantiser, (
            array, array, kind, kind, boolean, boolean, kind, kind, array, int64, int64, int64, key,
            boolean, flat, boolean,
        )  # fmt: skip
        found[f"quantise_given_{name}"] = quantise_given, (
            array, array, int64, int64, int64, key, boolean, flat, boolean,
        )  # fmt: skip
        found[f"dequantise_mean_{name}"] = dequantise_mean, (
            flat, array, int64[::1], int64[::1], int64, int64, int64, int64, int32[::1], array,
        )  # fmt: skip
        found[f"dequantise_add_{name}"] = dequantise_add, (
            flat, array, int64, int64, int64, kind, int32[::1], array,
        )  # fmt: skip
        found[f"natural_pack_{name}"] = natural_pack, (array, kind, key, flat)
        found[f"natural_add_{name}"] = natural_add, (flat, kind, array)
        found[f"quantise_lanes_{name}"] = quantise_lanes, (
            array, kind, int64, int64, key, boolean, int32[::1],
        )  # fmt: skip
    return found
