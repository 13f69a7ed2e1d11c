"""How sparse values and their positions lie in one uint8 buffer.

Values first, then positions in whichever form is smallest for this many of this many; zero bytes
at the end up to a multiple of 8, so that buffers which are gathered end to end stay aligned. The
form is a function of (d, k, dtype, values), never of the data: every rank knows every other's
layout and length without a header, and a payload's size is known before it is encoded. Where the
data decides how many values there are, :func:`pack_counted` puts their number in front.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from .. import kernels
from ..errors import WireError

_ALIGN = 8
#: Bytes of the number of values in front of a payload whose length the data decides.
HEADER = 8

#: Forms of the values: as they are, fp16 times a power of two, 8 and 4 bits with scales.
VALUES = ("fp32", "fp16", "q8", "q4")
_BITS = {"q8": 8, "q4": 4}
#: Values that share one scale, their largest magnitude. It is sent in the values' dtype.
_BUCKET = 512


@dataclass(frozen=True)
class SparseLayout:
    """The layout of ``k`` values of a ``numel``-vector.

    Attributes:
        numel: length of the dense vector.
        k: number of values.
        dtype: dtype of the values in and out: fp32 or fp64.
        values: their form on the wire, one of ``VALUES``; ``"fp32"`` sends ``dtype`` as it is.
        form: ``"all"`` (k = d, no positions), ``"block"`` (16-bit offsets), ``"int32"`` or
            ``"bitmap"``.
        index_bytes: bytes of the positions.
    """

    numel: int
    k: int
    dtype: torch.dtype
    form: str
    index_bytes: int
    values: str = "fp32"

    @cached_property
    def value_bytes(self) -> int:
        """Bytes of the values, up to a multiple of 4, so that int32 positions may follow."""
        if self.values == "fp32":
            return self.k * self.dtype.itemsize
        if self.values == "fp16":
            used = (self.dtype.itemsize + 2 * self.k) if self.k else 0
        else:
            used = _scale_bytes(self.k, self.dtype) + kernels.packed_bytes(
                self.k, _BITS[self.values]
            )
        return -(-used // 4) * 4

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole buffer, padding included."""
        return -(-(self.value_bytes + self.index_bytes) // _ALIGN) * _ALIGN

    def pack(self, values: torch.Tensor, indices: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write ``values`` (shape ``[k]``) at ascending int64 ``indices`` into uint8 ``out``.

        Returns:
            The values as receivers will read them: ``values`` itself where nothing is rounded.
        """
        end = self.value_bytes + self.index_bytes
        section = out[: self.value_bytes]
        self.pack_positions(indices, out[self.value_bytes : end])
        out[end:].zero_()
        if self.values == "fp32" or not self.k:
            section.view(self.dtype).copy_(values)
            return values
        packed = (
            _pack_fp16(values)
            if self.values == "fp16"
            else _pack_quantised(values, _BITS[self.values])
        )
        section[: packed.numel()].copy_(packed)
        section[packed.numel() :].zero_()
        return self._read_values(section)

    def unpack(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Values and positions (None: all of them, in order) of a received buffer.

        Raises:
            WireError: wrong length, or positions that cannot be.
        """
        if buffer.numel() != self.nbytes:
            raise WireError(f"payload of {self.nbytes} bytes expected, got {buffer.numel()}")
        values = self._read_values(buffer[: self.value_bytes])
        section = buffer[self.value_bytes : self.value_bytes + self.index_bytes]
        return values, self.unpack_positions(section)

    def pack_positions(self, indices: torch.Tensor, out: torch.Tensor) -> None:
        """Write positions alone into ``index_bytes`` bytes."""
        if self.index_bytes:
            out.copy_(_PACK[self.form](indices, self.numel))

    def unpack_positions(self, section: torch.Tensor) -> torch.Tensor | None:
        """Inverse of :meth:`pack_positions`; None: all of them, in order.

        Raises:
            WireError: wrong length, or positions that cannot be.
        """
        return None if self.form == "all" else _UNPACK[self.form](section, self.numel, self.k)

    def _read_values(self, section: torch.Tensor) -> torch.Tensor:
        if self.values == "fp32" or not self.k:
            return section.view(self.dtype)
        if self.values == "fp16":
            return _unpack_fp16(section, self.k, self.dtype)
        return _unpack_quantised(section, self.k, _BITS[self.values], self.dtype)


def _scale_bytes(k: int, dtype: torch.dtype) -> int:
    return -(-k // _BUCKET) * dtype.itemsize


def _pack_quantised(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Scales, then codes. Rounded to nearest, so that no error is larger than the value."""
    scales = kernels.bucket_scales(values, _BUCKET, "max")
    nbytes = kernels.packed_bytes(values.numel(), bits)
    codes = torch.empty(nbytes, dtype=torch.uint8, device=values.device)
    kernels.quantise_pack(values, scales, _BUCKET, bits, None, codes)
    return torch.cat((scales.view(torch.uint8), codes))


def _unpack_quantised(section: torch.Tensor, k: int, bits: int, dtype: torch.dtype) -> torch.Tensor:
    at = _scale_bytes(k, dtype)
    codes = section[at : at + kernels.packed_bytes(k, bits)]
    values = torch.zeros(k, dtype=dtype, device=section.device)
    kernels.dequantise_add(codes, section[:at].view(dtype), _BUCKET, bits, 1.0, values)
    return values


def _pack_fp16(values: torch.Tensor) -> torch.Tensor:
    """Inverse factor in the values' dtype, then values times a power of two, as fp16.

    The factor puts the largest magnitude into [2^14, 2^15): none overflows, and those within
    2^-28 of the largest keep fp16's 11 bits. Being a power of two it rounds nothing.
    """
    exponent = torch.frexp(values.abs().amax())[1]
    # Both the factor and its inverse must be normal numbers; below that, only tiny values are.
    low = -1000 if values.dtype == torch.float64 else -110
    exponent = exponent.clamp(low, -low + 24)
    # What would round up to 2^15 might be too large once it is multiplied back.
    scaled = (values * _power_of_two(15 - exponent, values.dtype)).clamp_(-32_752, 32_752)
    halves = scaled.to(torch.float16)
    inverse = _power_of_two(exponent - 15, values.dtype).view(1)
    return torch.cat((inverse.view(torch.uint8), halves.view(torch.uint8)))


def _power_of_two(exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """2^exponent from its bits: exact for normal numbers, which torch.ldexp is not for fp64."""
    if dtype == torch.float64:
        return ((exponent.to(torch.int64) + 1023) << 52).view(dtype)
    return ((exponent.to(torch.int32) + 127) << 23).view(dtype)


def _unpack_fp16(section: torch.Tensor, k: int, dtype: torch.dtype) -> torch.Tensor:
    inverse = section[: dtype.itemsize].view(dtype)
    halves = section[dtype.itemsize : dtype.itemsize + 2 * k].view(torch.float16)
    return halves.to(dtype).mul_(inverse)


_PACK = {
    "block": kernels.pack_block_offsets,
    "int32": kernels.pack_int32,
    "bitmap": kernels.pack_bitmap,
}
_UNPACK = {
    "block": kernels.unpack_block_offsets,
    "int32": kernels.unpack_int32,
    "bitmap": kernels.unpack_bitmap,
}


@lru_cache(maxsize=4096)
def _positions(numel: int, k: int) -> tuple[str, int]:
    """Form and bytes of the smallest layout of ``k`` positions; the first named wins a tie."""
    if k == numel:
        return "all", 0
    tables = 0 if kernels.blocks(numel) == 1 else 4 * kernels.blocks(numel)
    sizes = {"block": tables + 2 * k, "bitmap": -(-numel // 8)}
    if numel < 2**31:
        sizes["int32"] = 4 * k
    form = min(sizes, key=lambda name: sizes[name])
    return form, sizes[form]


@lru_cache(maxsize=4096)
def sparse_layout(numel: int, k: int, dtype: torch.dtype, values: str = "fp32") -> SparseLayout:
    """The smallest layout for ``k`` values of a ``numel``-vector."""
    return SparseLayout(numel, k, dtype, *_positions(numel, k), values)


def pack_counted(
    layout: SparseLayout, values: torch.Tensor, indices: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """:meth:`SparseLayout.pack` with the number of values in front: ``HEADER`` bytes more."""
    out[:HEADER].view(torch.int64).fill_(layout.k)
    return layout.pack(values, indices, out[HEADER:])


def counted_layout(
    buffer: torch.Tensor, numel: int, limit: int, dtype: torch.dtype, values: str
) -> SparseLayout:
    """The layout that a received buffer's first ``HEADER`` bytes announce.

    Raises:
        WireError: no header, or a count that is not in 0..limit.
    """
    if buffer.numel() < HEADER:
        raise WireError(f"{buffer.numel()} bytes are left, too few for a payload's header")
    count = int(buffer[:HEADER].view(torch.int64))
    if not 0 <= count <= limit:
        raise WireError(f"a payload announces {count} values, {limit} are the most there may be")
    return sparse_layout(numel, count, dtype, values)
