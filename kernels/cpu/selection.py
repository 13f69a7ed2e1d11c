"""Sparsifiers: one pass that adds the residual and collects what may be among the k largest.

The k largest are found without sorting and without a second pass over the vector: a sample gives
a threshold that most likely lies just below the k-th largest magnitude, and one pass collects
everything from there on, about 1.2 k candidates; the exact choice is then made among those.
If there are fewer than k (a sample can mislead), a second pass collects with a threshold that
rises as it goes: that one cannot fail. So no input costs more than two passes. Inputs of few
different values (zeros, constants) fill a thread's list quickly, and are cut back to k each time
it is full.

Magnitudes are compared as numbers with ``not (|x| < t)``, which NaN passes too, and chosen by
their bit patterns, so that the order is total (NaN above infinity above all else).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...errors import WireError
from . import threads
from .jit import Kernel, inline

#: Elements looked at before it is known whether any of them is a candidate: the test over a whole
#: group runs in vector registers.
_GROUP = 32
#: At most so many elements make a sample, in runs of 16 (a line of cache).
_SAMPLE, _RUN = 1 << 16, 16
#: Up to here a sample gains nothing.
_SMALL = 1 << 12
_BLOCK = 65_536
#: Candidates that one thread has chosen among before others have been woken.
_FEW = 1 << 13

Parts = list[tuple[int, int]]

_SIGNED = {torch.float32: (np.int32, 0x7FFF_FFFF), torch.float64: (np.int64, (1 << 63) - 1)}
#: Low bits of a magnitude that its histogram bin leaves out.
_SHIFT = {torch.float32: 20, torch.float64: 51}


# -- compiled --------------------------------------------------------------------------------


@inline
def _kth_largest(keys, k):
    """The k-th largest of integers: counts over the range that is left, 4096 steps at a time."""
    low, high = keys[0], keys[0]
    for i in range(keys.size):
        low, high = min(low, keys[i]), max(high, keys[i])
    counts = np.zeros(4096, np.int64)
    left = k
    while True:
        width, shift = np.uint64(high - low), np.uint64(0)
        while (width >> shift) >= np.uint64(4096):
            shift += np.uint64(1)
        counts[:] = 0
        for i in range(keys.size):
            if low <= keys[i] <= high:
                counts[np.uint64(keys[i] - low) >> shift] += 1
        step = np.int64(width >> shift)
        while left > counts[step]:
            left -= counts[step]
            step -= 1
        low += step << np.int64(shift)
        if shift == 0:
            return low
        high = min(high, low + (1 << np.int64(shift)) - 1)


@inline
def _cut(bits, magnitude, start, positions, keys, count, k):
    """Keep the k largest of the first ``count`` positions, in order.

    Returns the smallest magnitude that may still be chosen: of what equals the k-th, those that
    come later are not.
    """
    for i in range(count):
        keys[i] = bits[positions[i] - start] & magnitude
    kth = _kth_largest(keys[:count], k)
    above = 0
    for i in range(count):
        above += keys[i] > kth
    ties, kept = k - above, 0
    for i in range(count):
        if keys[i] > kth or (keys[i] == kth and ties > 0):
            ties -= keys[i] == kth
            positions[kept] = positions[i]
            kept += 1
    keys[0] = kth + 1
    return keys[:1]


@inline
def _append(vector, begin, end, limit, start, positions, count):
    """Positions of the group's candidates, behind the first ``count``; how many there are then."""
    for i in range(begin, end):
        positions[count] = start + i
        count += not (abs(vector[i]) < limit)
    return count


@Kernel
def _collect(vector, bits, magnitude, threshold, k, start, positions, keys):
    """Positions (from ``start`` on) of all that may be among the k largest, in order.

    ``positions`` and ``keys`` need room for k and two groups; more room means fewer cuts.
    """
    count, room, limit = 0, positions.size - _GROUP, threshold
    whole = vector.size // _GROUP * _GROUP
    # Groups of a fixed length: only those become straight vector code.
    for begin in range(0, whole, _GROUP):
        hits = False
        for i in range(begin, begin + _GROUP):
            hits |= not (abs(vector[i]) < limit)
        if hits:
            count = _append(vector, begin, begin + _GROUP, limit, start, positions, count)
            if count > room:
                cut = _cut(bits, magnitude, start, positions, keys, count, k)
                count, limit = k, cut.view(vector.dtype)[0]
    return _append(vector, whole, vector.size, limit, start, positions, count)


@Kernel
def _add_and_collect(
    vector, gradient, residual, scale, bits, magnitude, threshold, k, start, positions, keys
):
    """``vector = residual + scale * gradient``, and :func:`_collect` on the way."""
    count, room, limit = 0, positions.size - _GROUP, threshold
    whole = vector.size // _GROUP * _GROUP
    for begin in range(0, whole, _GROUP):
        hits = False
        for i in range(begin, begin + _GROUP):
            value = residual[i] + scale * gradient[i]
            vector[i] = value
            hits |= not (abs(value) < limit)
        if hits:
            count = _append(vector, begin, begin + _GROUP, limit, start, positions, count)
            if count > room:
                cut = _cut(bits, magnitude, start, positions, keys, count, k)
                count, limit = k, cut.view(vector.dtype)[0]
    for i in range(whole, vector.size):
        vector[i] = residual[i] + scale * gradient[i]
    return _append(vector, whole, vector.size, limit, start, positions, count)


@Kernel
def _add_in_place_and_collect(
    vector, own, other, factor, bits, magnitude, threshold, k, start, positions, keys
):
    """``vector = own * vector + factor * other``, else like :func:`_add_and_collect`.

    The compiler uses vector registers only where it can tell that no array overlaps another.
    """
    count, room, limit = 0, positions.size - _GROUP, threshold
    whole = vector.size // _GROUP * _GROUP
    for begin in range(0, whole, _GROUP):
        hits = False
        for i in range(begin, begin + _GROUP):
            value = own * vector[i] + factor * other[i]
            vector[i] = value
            hits |= not (abs(value) < limit)
        if hits:
            count = _append(vector, begin, begin + _GROUP, limit, start, positions, count)
            if count > room:
                cut = _cut(bits, magnitude, start, positions, keys, count, k)
                count, limit = k, cut.view(vector.dtype)[0]
    for i in range(whole, vector.size):
        vector[i] = own * vector[i] + factor * other[i]
    return _append(vector, whole, vector.size, limit, start, positions, count)


@inline
def _take(vector, keys, positions, k, chosen, values, clear):
    """The k largest of ``keys``, which belong to ``positions`` (None: all in order).

    Their entries of ``vector`` are cleared if so wished.
    """
    kth = _kth_largest(keys, k)
    above = 0
    for i in range(keys.size):
        above += keys[i] > kth
    ties, kept = k - above, 0
    for i in range(keys.size):
        if kept < k and (keys[i] > kth or (keys[i] == kth and ties > 0)):
            ties -= keys[i] == kth
            at = i if positions is None else positions[i]
            chosen[kept] = at
            values[kept] = vector[at]
            kept += 1
            if clear:
                vector[at] = 0


@Kernel
def _choose(vector, bits, magnitude, positions, keys, k, chosen, values, clear):
    """The k largest of the candidates, ascending."""
    for i in range(positions.size):
        keys[i] = bits[positions[i]] & magnitude
    _take(vector, keys, positions, k, chosen, values, clear)


@Kernel
def _look_up(bits, magnitude, positions, patterns, keys):
    """The candidates' patterns, and those of their magnitudes."""
    for i in range(positions.size):
        pattern = bits[positions[i]]
        patterns[i] = pattern
        keys[i] = pattern & magnitude


@Kernel
def _kth_of_all(keys, k, ends, above, equal):
    """The k-th largest key, and how many of each part's keys are above it and equal to it."""
    kth = _kth_largest(keys, k)
    begin = 0
    for part in range(ends.size):
        for i in range(begin, ends[part]):
            above[part] += keys[i] > kth
            equal[part] += keys[i] == kth
        begin = ends[part]
    return kth


@Kernel
def _take_part(vector, positions, patterns, keys, kth, ties, chosen, values, clear):
    """Entries above the k-th, and the first ``ties`` of those equal to it; ``values`` as patterns.

    They are not read from the vector again: so far apart, each would be a line of cache.
    """
    kept = 0
    for i in range(positions.size):
        if keys[i] > kth or (keys[i] == kth and ties > 0):
            ties -= keys[i] == kth
            chosen[kept] = positions[i]
            values[kept] = patterns[i]
            kept += 1
            if clear:
                vector[positions[i]] = 0


@Kernel
def _choose_of_all(vector, bits, magnitude, keys, k, chosen, values, clear):
    """The k largest of a small vector, ascending."""
    for i in range(vector.size):
        keys[i] = bits[i] & magnitude
    _take(vector, keys, None, k, chosen, values, clear)


@inline
def _rank_in_sample(k, size, numel):
    # Four standard deviations of what a random sample has above the k-th largest.
    expected = k * size / numel
    return int(expected + 4 * np.sqrt(expected) + 4)


@inline
def _threshold(bits, magnitude, k, size, keys):
    """Pattern of a magnitude that some more than k elements should reach, from a sample.

    The sample is ``size`` elements in runs at equal distances; 0 where it says nothing.
    """
    runs = size // _RUN
    step = (bits.size - _RUN) / max(1, runs)
    for run in range(runs):
        begin = int(run * step)
        for i in range(_RUN):
            keys[run * _RUN + i] = bits[begin + i] & magnitude
    rank = _rank_in_sample(k, runs * _RUN, bits.size)
    if rank >= runs * _RUN:
        keys[0] = 0
    else:
        keys[0] = _kth_largest(keys[: runs * _RUN], rank)
    return keys[:1]


@Kernel
def _sampled_threshold(bits, magnitude, k, size, keys):
    """:func:`_threshold`, into ``keys[0]``."""
    _threshold(bits, magnitude, k, size, keys)


@Kernel
def _sampled_threshold_of_sum(gradient, residual, scale, work, bits, magnitude, k, size, keys):
    """:func:`_threshold` of ``residual + scale * gradient``; ``bits`` are those of ``work``."""
    runs = size // _RUN
    step = (gradient.size - _RUN) / runs
    for run in range(runs):
        begin = int(run * step)
        for i in range(_RUN):
            work[run * _RUN + i] = residual[begin + i] + scale * gradient[begin + i]
    rank = _rank_in_sample(k, size, gradient.size)
    if rank >= size:
        keys[0] = 0
        return
    for i in range(size):
        keys[i] = bits[i] & magnitude
    keys[0] = _kth_largest(keys[:size], rank)


@Kernel
def _add_and_select(
    vector, own, other, factor, bits, magnitude, k, size, positions, keys, chosen, values, clear
):
    """All of it in one call, where the call itself would cost more than the work.

    ``vector = own * vector + factor * other``, then the k largest; ``positions`` and ``keys`` as
    long as ``vector``, and two groups more.
    """
    for i in range(vector.size):
        vector[i] = own * vector[i] + factor * other[i]
    limit = _threshold(bits, magnitude, k, size, keys).view(vector.dtype)[0]
    count, whole = 0, vector.size // _GROUP * _GROUP
    for begin in range(0, whole, _GROUP):
        hits = False
        for i in range(begin, begin + _GROUP):
            hits |= not (abs(vector[i]) < limit)
        if hits:
            count = _append(vector, begin, begin + _GROUP, limit, 0, positions, count)
    count = _append(vector, whole, vector.size, limit, 0, positions, count)
    if count < k:
        count = vector.size
        for i in range(count):
            positions[i] = i
    for i in range(count):
        keys[i] = bits[positions[i]] & magnitude
    _take(vector, keys[:count], positions, k, chosen, values, clear)


@Kernel
def _add_and_count(vector, gradient, residual, scale, bits, magnitude, shift, counts, energies):
    """``vector = residual + scale * gradient``; counts and energies of its magnitude bins.

    Four tables take turns, since one bin often follows itself and would wait for its own store.
    """
    bins = counts.size
    four, power = np.zeros((4, bins), np.int64), np.zeros((4, bins), np.float64)
    whole = vector.size // 256 * 256
    for begin in range(0, whole, 256):
        for i in range(begin, begin + 256):
            vector[i] = residual[i] + scale * gradient[i]
        for i in range(begin, begin + 256):
            place = np.uint64((bits[i] & magnitude) >> shift)
            four[np.uint64(i & 3), place] += 1
            value = np.float64(vector[i])
            power[np.uint64(i & 3), place] += value * value
    for i in range(whole, vector.size):
        vector[i] = residual[i] + scale * gradient[i]
        place = np.uint64((bits[i] & magnitude) >> shift)
        four[0, place] += 1
        power[0, place] += np.float64(vector[i]) ** 2
    for table in range(4):
        for place in range(bins):
            counts[place] += four[table, place]
            energies[place] += power[table, place]


@Kernel
def _scatter(positions, values, alpha, first, last, out):
    """``out[position - first] += alpha * value`` for ascending positions in first..last."""
    at = np.searchsorted(positions, first)
    for i in range(at, positions.size):
        if positions[i] >= last:
            break
        out[positions[i] - first] += alpha * values[i]


@Kernel
def _block_offsets(positions, counts, offsets):
    for i in range(positions.size):
        counts[positions[i] >> 16] += 1
        offsets[i] = positions[i] & 0xFFFF


@Kernel
def _from_block_offsets(counts, offsets, positions):
    at = 0
    for block in range(counts.size):
        for i in range(at, at + counts[block]):
            positions[i] = (block << 16) + offsets[i]
        at += counts[block]


# -- operations ------------------------------------------------------------------------------


def _arrays(vector: torch.Tensor) -> tuple[np.ndarray, np.ndarray, Any]:
    """The vector, its bit patterns, and the mask of their magnitudes."""
    signed, magnitude = _SIGNED[vector.dtype]
    array = vector.numpy()
    return array, array.view(signed), signed(magnitude)


def accumulate(
    out: torch.Tensor,
    gradient: torch.Tensor,
    residual: torch.Tensor,
    scale: float,
    counts: torch.Tensor,
    energies: torch.Tensor,
) -> None:
    array, bits, magnitude = _arrays(out)
    given, held, factor = _addends(gradient, residual, scale, out)
    parts = threads.spans(out.numel())
    tables = [
        (np.zeros(counts.numel(), np.int64), np.zeros(counts.numel(), np.float64)) for _ in parts
    ]
    shift = bits.dtype.type(_SHIFT[out.dtype])
    threads.each(
        _add_and_count,
        [
            (array[a:b], given[a:b], held[a:b], factor, bits[a:b], magnitude, shift, *table)
            for (a, b), table in zip(parts, tables, strict=True)
        ],
    )
    # In order of the spans. How many there are shows in the last bits of an energy.
    counts.copy_(torch.from_numpy(sum(table[0] for table in tables)))
    energies.copy_(torch.from_numpy(sum(table[1] for table in tables)))


def accumulate_select(
    out: torch.Tensor,
    gradient: torch.Tensor,
    residual: torch.Tensor,
    scale: float,
    k: int,
    clear: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    array, bits, magnitude = _arrays(out)
    given, held, factor = _addends(gradient, residual, scale, out)
    one = array.dtype.type(1)
    chosen, values = np.empty(k, np.int64), np.empty(k, array.dtype)
    in_residual = out.data_ptr() == residual.data_ptr()
    in_gradient = out.data_ptr() == gradient.data_ptr()
    size = _sample_size(k, array.size)
    if array.size < 2 * threads.LEAST_ELEMENTS:
        if not (in_residual or in_gradient):
            np.copyto(array, held)
        addends = (factor, held, one) if in_gradient else (one, given, factor)
        room = array.size + 2 * _GROUP
        _add_and_select(
            array, *addends, bits, magnitude, k, size, np.empty(room, np.int64),
            np.empty(room, bits.dtype), chosen, values, clear,
        )  # fmt: skip
        return torch.from_numpy(chosen), torch.from_numpy(values)
    size = size or _RUN
    keys, work = np.empty(size, bits.dtype), np.empty(size, array.dtype)
    patterns = work.view(bits.dtype)
    _sampled_threshold_of_sum(given, held, factor, work, patterns, magnitude, k, size, keys)
    threshold = keys[:1].view(array.dtype)[0]
    if in_residual:
        kernel, sums = _add_in_place_and_collect, lambda a, b: (one, given[a:b], factor)
    elif in_gradient:
        kernel, sums = _add_in_place_and_collect, lambda a, b: (factor, held[a:b], one)
    else:
        kernel, sums = _add_and_collect, lambda a, b: (given[a:b], held[a:b], factor)
    parts = threads.spans(array.size, _GROUP)
    found = _gather(
        kernel,
        [
            (array[a:b], *sums(a, b), bits[a:b], magnitude, threshold, k, a, *room)
            for (a, b), room in zip(parts, _rooms(parts, k, bits.dtype), strict=True)
        ],
    )
    _exactly(array, bits, magnitude, parts, found, chosen, values, clear)
    return torch.from_numpy(chosen), torch.from_numpy(values)


def accumulate_select_many(
    outs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor],
    scales: Sequence[float],
    ks: Sequence[int],
    clear: bool,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        accumulate_select(*each, clear)
        for each in zip(outs, gradients, residuals, scales, ks, strict=True)
    ]


def take_topk(vector: torch.Tensor, k: int, clear: bool) -> tuple[torch.Tensor, torch.Tensor]:
    array, bits, magnitude = _arrays(vector)
    chosen, values = np.empty(k, np.int64), np.empty(k, array.dtype)
    size = _sample_size(k, array.size)
    if not size:
        keys = np.empty(array.size, bits.dtype)
        _choose_of_all(array, bits, magnitude, keys, k, chosen, values, clear)
        return torch.from_numpy(chosen), torch.from_numpy(values)
    keys = np.empty(size, bits.dtype)
    _sampled_threshold(bits, magnitude, k, size, keys)
    parts = threads.spans(array.size, _GROUP)
    found = _collected(array, bits, magnitude, parts, keys[:1].view(array.dtype)[0], k)
    _exactly(array, bits, magnitude, parts, found, chosen, values, clear)
    return torch.from_numpy(chosen), torch.from_numpy(values)


def scatter_add(
    out: torch.Tensor, payloads: list[tuple[torch.Tensor, torch.Tensor]], alpha: float
) -> None:
    array = out.numpy()
    arrays = [(p.numpy(), v.numpy()) for p, v in payloads]
    factor = array.dtype.type(alpha)

    def span(first: int, last: int) -> None:
        # Payload after payload on every span: sums are in rank order whatever the threads.
        for positions, values in arrays:
            _scatter(positions, values, factor, first, last, array[first:last])

    entries = sum(p.size for p, _ in arrays)
    parts = threads.spans(out.numel()) if entries > threads.LEAST_ELEMENTS else [(0, out.numel())]
    threads.each(span, parts)


def pack_block_offsets(indices: torch.Tensor, numel: int) -> torch.Tensor:
    blocks, k = -(-numel // _BLOCK), indices.numel()
    tables = 0 if blocks == 1 else 4 * blocks
    out = np.empty(tables + 2 * k, np.uint8)
    counts = np.zeros(blocks, np.int32)
    _block_offsets(indices.numpy(), counts, out[tables:].view(np.uint16))
    if tables:
        out[:tables].view(np.int32)[:] = counts
    return torch.from_numpy(out)


def unpack_block_offsets(buffer: torch.Tensor, numel: int, k: int) -> torch.Tensor:
    blocks, received = -(-numel // _BLOCK), buffer.numpy()
    if blocks == 1:
        return torch.from_numpy(received.view(np.uint16).astype(np.int64))
    counts = received[: 4 * blocks].view(np.int32)
    if (counts < 0).any() or int(counts.sum(dtype=np.int64)) != k:
        raise WireError(
            f"block counts add up to {int(counts.sum(dtype=np.int64))}, {k} were announced"
        )
    positions = np.empty(k, np.int64)
    _from_block_offsets(counts, received[4 * blocks :].view(np.uint16), positions)
    return torch.from_numpy(positions)


# -- how candidates are found ----------------------------------------------------------------


def _addends(
    gradient: torch.Tensor, residual: torch.Tensor, scale: float, out: torch.Tensor
) -> tuple[np.ndarray, np.ndarray, Any]:
    """Gradient, residual and scale in the dtype of ``out``."""
    given = gradient if gradient.dtype == out.dtype else gradient.to(out.dtype)
    held = residual.numpy()
    return given.numpy(), held, held.dtype.type(scale)


def _sample_size(k: int, numel: int) -> int:
    """Elements of a sample that has about a hundred of the k largest, or a few of very few."""
    if numel < _SMALL or 2 * k >= numel:
        return 0
    return min(_SAMPLE, numel // 8, max(1024, 128 * numel // k)) // _RUN * _RUN


def _rooms(parts: Parts, k: int, dtype: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each span room for its candidates, and for as many keys."""
    rooms = []
    for a, b in parts:
        size = min(b - a, 2 * k) + 2 * _GROUP
        rooms.append((np.empty(size, np.int64), np.empty(size, dtype)))
    return rooms


def _gather(kernel: Kernel, calls: list[tuple[Any, ...]]) -> list[np.ndarray]:
    """The positions that each span's call collected; the last but one argument is their room."""
    counts = threads.each(kernel, calls)
    return [call[-2][:count] for call, count in zip(calls, counts, strict=True)]


def _collected(
    array: np.ndarray, bits: np.ndarray, magnitude: Any, parts: Parts, threshold: Any, k: int
) -> list[np.ndarray]:
    return _gather(
        _collect,
        [
            (array[a:b], bits[a:b], magnitude, threshold, k, a, *room)
            for (a, b), room in zip(parts, _rooms(parts, k, bits.dtype), strict=True)
        ],
    )


def _exactly(
    array: np.ndarray,
    bits: np.ndarray,
    magnitude: Any,
    parts: Parts,
    found: list[np.ndarray],
    chosen: np.ndarray,
    values: np.ndarray,
    clear: bool,
) -> None:
    """The k largest of the candidates; of all elements, should those be too few."""
    k = chosen.size
    if sum(positions.size for positions in found) < k:
        found = _collected(array, bits, magnitude, parts, array.dtype.type(0), k)
    count = sum(positions.size for positions in found)
    keys = np.empty(count, bits.dtype)
    if len(found) == 1 or count < _FEW:
        candidates = found[0] if len(found) == 1 else np.concatenate(found)
        _choose(array, bits, magnitude, candidates, keys, k, chosen, values, clear)
        return
    ends = np.cumsum([positions.size for positions in found])
    spans = [slice(int(end) - each.size, int(end)) for end, each in zip(ends, found, strict=True)]
    patterns = np.empty(count, bits.dtype)
    threads.each(
        _look_up,
        [
            (bits, magnitude, each, patterns[span], keys[span])
            for each, span in zip(found, spans, strict=True)
        ],
    )
    above, equal = np.zeros(len(found), np.int64), np.zeros(len(found), np.int64)
    kth = bits.dtype.type(_kth_of_all(keys, k, ends, above, equal))
    # Of what equals the k-th, the first ones in the vector.
    before = np.concatenate(([0], equal.cumsum()[:-1]))
    ties = np.clip(k - above.sum() - before, 0, equal)
    begins = np.concatenate(([0], (above + ties).cumsum()))
    taken = values.view(bits.dtype)
    threads.each(
        _take_part,
        [
            (array, each, patterns[span], keys[span], kth, tie, chosen[a:b], taken[a:b], clear)
            for each, span, tie, a, b in zip(
                found, spans, ties.tolist(), begins[:-1], begins[1:], strict=True
            )
        ],
    )
