"""Codes of 2 to 8 bits in bytes, without gaps."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import scalar
from .jit import inline

_with_code = inline(scalar.with_code)
_byte_of = inline(scalar.byte_of)


def _packer(bits: int) -> Any:
    """Eight codes at a time; as ``bits`` is a constant, the compiler unrolls the loops."""

    @inline
    def run(codes, out):
        whole = codes.size // 8
        for group in range(whole):
            word = np.uint64(0)
            for i in range(8):
                word = _with_code(word, codes[8 * group + i], i, bits)
            for i in range(bits):
                out[group * bits + i] = _byte_of(word, i)
        word = np.uint64(0)
        for i in range(codes.size - 8 * whole):
            word = _with_code(word, codes[8 * whole + i], i, bits)
        for i in range(((codes.size - 8 * whole) * bits + 7) // 8):
            out[whole * bits + i] = _byte_of(word, i)

    return run


def _unpacker(bits: int) -> Any:
    mask = np.uint64((1 << bits) - 1)

    @inline
    def run(packed, codes):
        whole = codes.size // 8
        for group in range(whole):
            word = np.uint64(0)
            for i in range(bits):
                word |= np.uint64(packed[group * bits + i]) << np.uint64(8 * i)
            for i in range(8):
                codes[8 * group + i] = np.uint8((word >> np.uint64(i * bits)) & mask)
        word = np.uint64(0)
        for i in range(((codes.size - 8 * whole) * bits + 7) // 8):
            word |= np.uint64(packed[whole * bits + i]) << np.uint64(8 * i)
        for i in range(codes.size - 8 * whole):
            codes[8 * whole + i] = np.uint8((word >> np.uint64(i * bits)) & mask)

    return run


_pack_2, _pack_3, _pack_5, _pack_6, _pack_7 = map(_packer, (2, 3, 5, 6, 7))
_unpack_2, _unpack_3, _unpack_5, _unpack_6, _unpack_7 = map(_unpacker, (2, 3, 5, 6, 7))


@inline
def pack(codes, bits, out):
    """Codes of one byte each, into ``bits`` bits each; ``out`` ends where the last one does."""
    if bits == 8:
        for i in range(codes.size):
            out[i] = codes[i]
    elif bits == 4:
        for i in range(codes.size // 2):
            out[i] = codes[2 * i] | (codes[2 * i + 1] << 4)
        if codes.size & 1:
            out[codes.size // 2] = codes[codes.size - 1]
    elif bits == 2:
        _pack_2(codes, out)
    elif bits == 3:
        _pack_3(codes, out)
    elif bits == 5:
        _pack_5(codes, out)
    elif bits == 6:
        _pack_6(codes, out)
    else:
        _pack_7(codes, out)


@inline
def unpack(packed, bits, codes):
    """Inverse of :func:`pack`; ``codes`` begins where a byte does."""
    if bits == 8:
        for i in range(codes.size):
            codes[i] = packed[i]
    elif bits == 4:
        for i in range(codes.size // 2):
            codes[2 * i] = packed[i] & 15
            codes[2 * i + 1] = packed[i] >> 4
        if codes.size & 1:
            codes[codes.size - 1] = packed[codes.size // 2] & 15
    elif bits == 2:
        _unpack_2(packed, codes)
    elif bits == 3:
        _unpack_3(packed, codes)
    elif bits == 5:
        _unpack_5(packed, codes)
    elif bits == 6:
        _unpack_6(packed, codes)
    else:
        _unpack_7(packed, codes)
