"""How sparse values and their positions lie in one uint8 buffer.

Values first, then positions in whichever form is smallest for this many of this many; zero bytes
at the end up to a multiple of 8, so that buffers which are gathered end to end stay aligned. The
form is a function of (d, k, dtype), never of the data: every rank knows every other's layout and
length without a header, and a payload's size is known before it is encoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from .. import kernels
from ..errors import WireError

_ALIGN = 8


@dataclass(frozen=True)
class SparseLayout:
    """The layout of ``k`` values of a ``numel``-vector.

    Attributes:
        numel: length of the dense vector.
        k: number of values.
        dtype: dtype of the values.
        form: ``"all"`` (k = d, no positions), ``"block"`` (16-bit offsets), ``"int32"`` or
            ``"bitmap"``.
        index_bytes: bytes of the positions.
    """

    numel: int
    k: int
    dtype: torch.dtype
    form: str
    index_bytes: int

    @property
    def value_bytes(self) -> int:
        """Bytes of the values."""
        return self.k * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer, padding included."""
        return -(-(self.value_bytes + self.index_bytes) // _ALIGN) * _ALIGN

    def pack(self, values: torch.Tensor, indices: torch.Tensor, out: torch.Tensor) -> None:
        """Write ``values`` (shape ``[k]``) at ascending int64 ``indices`` into uint8 ``out``."""
        end = self.value_bytes + self.index_bytes
        out[: self.value_bytes].view(self.dtype).copy_(values)
        if self.index_bytes:
            out[self.value_bytes : end].copy_(_PACK[self.form](indices, self.numel))
        out[end:].zero_()

    def unpack(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Values and positions (None: all of them, in order) of a received buffer.

        Raises:
            WireError: wrong length, or positions that cannot be.
        """
        if buffer.numel() != self.nbytes:
            raise WireError(f"payload of {self.nbytes} bytes expected, got {buffer.numel()}")
        values = buffer[: self.value_bytes].view(self.dtype)
        if self.form == "all":
            return values, None
        section = buffer[self.value_bytes : self.value_bytes + self.index_bytes]
        return values, _UNPACK[self.form](section, self.numel, self.k)


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
def sparse_layout(numel: int, k: int, dtype: torch.dtype) -> SparseLayout:
    """The smallest layout for ``k`` values of a ``numel``-vector; the first named wins a tie."""
    if k == numel:
        return SparseLayout(numel, k, dtype, "all", 0)
    tables = 0 if kernels.blocks(numel) == 1 else 4 * kernels.blocks(numel)
    sizes = {"block": tables + 2 * k, "bitmap": -(-numel // 8)}
    if numel < 2**31:
        sizes["int32"] = 4 * k
    form = min(sizes, key=lambda name: sizes[name])
    return SparseLayout(numel, k, dtype, form, sizes[form])
