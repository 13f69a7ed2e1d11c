"""Orthonormalisation: Cholesky QR, with sums that no order of addition can change.

Ranks must agree to the last bit on a factor that each works out for itself, with other threads, in
other batches, perhaps on another CPU. So the one place that adds many numbers up, the Gram matrix,
works on whole numbers of 22 bits, for which every partial sum of 512 products is exact in fp64;
the compiler may add those as it likes. All else is element by element in a fixed order, where
IEEE 754 leaves no choice. :mod:`..portable_linalg` gives the same bits.

The entries themselves are not rounded to 22 bits: only the Gram matrix is worked out from such
entries, and that is within 2e-7 of the true one. Where rows nearly depend on each other, a second
pass over the result settles what that leaves.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from .. import cholesky
from . import threads
from .jit import Kernel, inline, inline_sum

_CHUNK, _BITS, _PASSES = cholesky.CHUNK, cholesky.BITS, cholesky.PASSES
_DEPENDENT, _HARD = cholesky.DEPENDENT, cholesky.HARD
#: Entries from which another thread is worth its handing over, twice.
_PER_THREAD = 1 << 18


@inline_sum
def _dot(x, y):
    total = 0.0
    for k in range(x.size):
        total += x[k] * y[k]
    return total


@inline
def _exponents(patterns, magnitude, infinite, like, exponents):
    """Of each row's largest magnitude: it is below ``2**exponent``. Dead rows get ``DEAD``."""
    room = np.empty(1, patterns.dtype)
    for i in range(patterns.shape[0]):
        row = patterns[i]
        top = row[0] & magnitude
        for k in range(row.size):
            top = max(top, row[k] & magnitude)
        if top == 0 or top >= infinite:
            exponents[i] = cholesky.DEAD
        else:
            room[0] = top
            exponents[i] = math.frexp(np.float64(room.view(like.dtype)[0]))[1]


@inline
def _power(exponent):
    """2**exponent, in fp64; the largest one for fp64's smallest numbers, which have fewer bits."""
    return math.ldexp(1.0, min(exponent, 1000))


@inline
def _gram(rows, exponents, first, last, sums):
    """Gram matrices of chunks ``first`` to ``last``, of whole numbers: lower triangles."""
    rank, length = rows.shape
    room = np.empty((rank, _CHUNK), np.float64)
    for chunk in range(first, last):
        begin, end = chunk * _CHUNK, min((chunk + 1) * _CHUNK, length)
        for i in range(rank):
            source, target = rows[i, begin:end], room[i, : end - begin]
            if exponents[i] == cholesky.DEAD:
                target[:] = 0.0
                continue
            scale = _power(_BITS - exponents[i])
            for k in range(source.size):
                target[k] = np.rint(np.float64(source[k]) * scale)
        for i in range(rank):
            x = room[i, : end - begin]
            for j in range(i + 1):
                sums[chunk, i, j] = _dot(x, room[j, : end - begin])


@inline
def _inverse(sums, inverse):
    """Inverse of the Cholesky factor of the chunks' sum; whether it is hard.

    Gaussian elimination beside a unit matrix, which goes on behind a zero pivot: dependent rows
    come out zero.
    """
    rank = inverse.shape[0]
    table, lengths = np.zeros((rank, 2 * rank), np.float64), np.zeros(rank, np.float64)
    for chunk in range(sums.shape[0]):
        for i in range(rank):
            for j in range(i + 1):
                table[i, j] += sums[chunk, i, j]
    for i in range(rank):
        if table[i, i] > 0:
            lengths[i] = 1.0 / np.sqrt(table[i, i])
    for i in range(rank):
        for j in range(i + 1):
            table[i, j] = table[i, j] * lengths[i] * lengths[j]
            table[j, i] = table[i, j]
        table[i, rank + i] = 1.0
    for j in range(rank):
        pivot = table[j, j]
        if pivot > _DEPENDENT * _DEPENDENT:
            root = np.sqrt(pivot)
            for k in range(2 * rank):
                table[j, k] /= root
        else:
            table[j, :] = 0.0
        for i in range(j + 1, rank):
            factor = table[j, i]
            for k in range(2 * rank):
                table[i, k] -= factor * table[j, k]
    worst = 0.0
    for i in range(rank):
        for j in range(rank):
            worst = max(worst, abs(table[i, rank + j]))
            inverse[i, j] = table[i, rank + j] * lengths[j]
    return worst > _HARD


@inline
def _weights(inverse, exponents, weights):
    """Factors of the rows as they are; whether those are safe from overflow and underflow."""
    rank, safe = inverse.shape[0], True
    for j in range(rank):
        dead = exponents[j] == cholesky.DEAD
        safe &= not dead and abs(exponents[j]) <= cholesky.SAFE
        scale = _power(_BITS - exponents[j]) if safe else 0.0
        for i in range(rank):
            weights[i, j] = inverse[i, j] * scale
    if not safe:
        for i in range(rank):
            for j in range(rank):
                weights[i, j] = inverse[i, j] * 2.0**_BITS
    return safe


@inline
def _combine(weights, i, rows, begin, part):
    """``part = sum over j <= i of weights[i, j] * rows[j]``, in order, from column ``begin``.

    Four rows at a time: sums are stored and read less often.
    """
    end = begin + part.size
    w0, x0 = weights[i, 0], rows[0, begin:end]
    for k in range(part.size):
        part[k] = w0 * x0[k]
    j = 1
    while j + 3 <= i:
        w0, w1, w2, w3 = weights[i, j], weights[i, j + 1], weights[i, j + 2], weights[i, j + 3]
        x0, x1 = rows[j, begin:end], rows[j + 1, begin:end]
        x2, x3 = rows[j + 2, begin:end], rows[j + 3, begin:end]
        for k in range(part.size):
            total = (part[k] + w0 * x0[k]) + w1 * x1[k]
            part[k] = (total + w2 * x2[k]) + w3 * x3[k]
        j += 4
    while j <= i:
        w0, x0 = weights[i, j], rows[j, begin:end]
        for k in range(part.size):
            part[k] += w0 * x0[k]
        j += 1


@inline
def _apply(rows, exponents, inverse, first, last, out):
    """``out = inverse @ rows`` for chunks ``first`` to ``last``; the factor is lower triangular.

    In the rows' own dtype. Where a row is dead, or very large or small, all are first brought to
    below 1, and dead ones to 0.
    """
    rank, length = rows.shape
    weights = np.empty((rank, rank), rows.dtype)
    safe = _weights(inverse, exponents, weights)
    room = np.empty((rank, _CHUNK), rows.dtype)
    for chunk in range(first, last):
        begin, end = chunk * _CHUNK, min((chunk + 1) * _CHUNK, length)
        if safe:
            for i in range(rank):
                _combine(weights, i, rows, begin, out[i, begin:end])
            continue
        for i in range(rank):
            if exponents[i] == cholesky.DEAD:
                room[i, :] = 0
                continue
            scale, source, target = _power(-exponents[i]), rows[i, begin:end], room[i]
            for k in range(source.size):
                target[k] = np.float64(source[k]) * scale
        for i in range(rank):
            _combine(weights, i, room, 0, out[i, begin:end])


@Kernel
def _one_pass(stack, patterns, magnitude, infinite, out, hard):
    """Every matrix of a stack, whole."""
    batch, rank, length = stack.shape
    chunks = (length + _CHUNK - 1) // _CHUNK
    sums, exponents = np.zeros((chunks, rank, rank), np.float64), np.empty(rank, np.int64)
    inverse = np.empty((rank, rank), np.float64)
    for b in range(batch):
        _exponents(patterns[b], magnitude, infinite, stack, exponents)
        _gram(stack[b], exponents, 0, chunks, sums)
        hard[b] = _inverse(sums, inverse)
        _apply(stack[b], exponents, inverse, 0, chunks, out[b])


@Kernel
def _exponents_of(patterns, magnitude, infinite, like, exponents):
    _exponents(patterns, magnitude, infinite, like, exponents)


@Kernel
def _gram_of(rows, exponents, first, last, sums):
    _gram(rows, exponents, first, last, sums)


@Kernel
def _inverse_of(sums, inverse, hard):
    hard[0] = _inverse(sums, inverse)


@Kernel
def _apply_to(rows, exponents, inverse, first, last, out):
    _apply(rows, exponents, inverse, first, last, out)


def orthonormalise(stack: torch.Tensor) -> torch.Tensor:
    given = stack.detach().numpy()
    out, hard = np.empty_like(given), np.zeros(given.shape[0], np.bool_)
    _pass(given, out, hard)
    todo = np.flatnonzero(hard)
    for _ in range(_PASSES):
        if not todo.size:
            break
        # Each matrix is gone over as often as it needs by itself, whatever else is in the stack.
        again = out[todo]
        result, hard = np.empty_like(again), np.zeros(todo.size, np.bool_)
        _pass(again, result, hard)
        out[todo] = result
        todo = todo[hard]
    return torch.from_numpy(out)


def _pass(given: np.ndarray, out: np.ndarray, hard: np.ndarray) -> None:
    """One Cholesky QR of every matrix, and for which of them it was too ill-conditioned to do."""
    batch = given.shape[0]
    signed = {4: np.int32, 8: np.int64}[given.itemsize]
    patterns, infinite = given.view(signed), np.array([np.inf], given.dtype).view(signed)[0]
    masks = (signed(np.iinfo(signed).max), infinite)
    workers = min(threads.count(), given.size // _PER_THREAD)
    if workers < 2:
        _one_pass(given, patterns, *masks, out, hard)
    elif batch >= workers:
        spans = list(pairwise(batch * i // workers for i in range(workers + 1)))
        threads.each(
            _one_pass,
            [(given[a:b], patterns[a:b], *masks, out[a:b], hard[a:b]) for a, b in spans],
        )
    else:
        for b in range(batch):
            _large(given[b], patterns[b], masks, out[b], hard[b : b + 1], workers)


def _large(
    rows: np.ndarray,
    patterns: np.ndarray,
    masks: tuple[Any, Any],
    out: np.ndarray,
    hard: np.ndarray,
    workers: int,
) -> None:
    """One matrix on several threads."""
    rank, length = rows.shape
    chunks = -(-length // _CHUNK)
    spans = list(pairwise(chunks * i // workers for i in range(workers + 1)))
    exponents, inverse = np.empty(rank, np.int64), np.empty((rank, rank), np.float64)
    sums = np.zeros((chunks, rank, rank), np.float64)
    _exponents_of(patterns, *masks, rows, exponents)
    threads.each(_gram_of, [(rows, exponents, a, b, sums) for a, b in spans])
    _inverse_of(sums, inverse, hard)
    threads.each(_apply_to, [(rows, exponents, inverse, a, b, out) for a, b in spans])
