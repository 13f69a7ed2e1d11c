"""Operations in torch and NumPy: any device, no compiler. The checks are in the table.

Magnitudes are compared through their bit patterns: with the sign bit masked off, IEEE-754 numbers
order like integers, and NaN (all exponent bits set, mantissa not zero) comes out above infinity.
"""

from __future__ import annotations

import numpy as np
import torch

from ..errors import WireError

_BLOCK = 65_536


def _magnitude_bits(vector: torch.Tensor) -> torch.Tensor:
    if vector.dtype == torch.float64:
        return vector.view(torch.int64) & 0x7FFF_FFFF_FFFF_FFFF
    return vector.view(torch.int32) & 0x7FFF_FFFF


def select_topk(vector: torch.Tensor, k: int) -> torch.Tensor:
    numel = vector.numel()
    if k == numel:
        return torch.arange(numel, device=vector.device)
    bits = _magnitude_bits(vector)
    if bits.device.type == "cpu":
        # NumPy's introselect (vectorised) is 2.5x torch.topk at 10 M elements.
        array = bits.numpy()
        kth = int(np.partition(array, numel - k)[numel - k])
        chosen = torch.from_numpy(np.flatnonzero(array >= kth))
    else:
        kth = int(torch.topk(bits, k, sorted=False).values.min())
        chosen = (bits >= kth).nonzero().flatten()
    surplus = chosen.numel() - k
    if surplus:
        # More entries than needed equal the k-th magnitude: the highest indices go.
        ties = (bits[chosen] == kth).nonzero().flatten()
        keep = torch.ones(chosen.numel(), dtype=torch.bool, device=chosen.device)
        keep[ties[ties.numel() - surplus :]] = False
        chosen = chosen[keep]
    return chosen


def pack_block_offsets(indices: torch.Tensor, numel: int) -> torch.Tensor:
    # The low 16 bits, as int16 with the same bit pattern as uint16 (torch's uint16 has few ops).
    offsets = (indices & 0xFFFF).to(torch.int32).to(torch.int16).view(torch.uint8)
    blocks = -(-numel // _BLOCK)
    if blocks == 1:
        return offsets
    counts = torch.bincount(indices >> 16, minlength=blocks).to(torch.int32).view(torch.uint8)
    return torch.cat((counts, offsets))


def unpack_block_offsets(buffer: torch.Tensor, numel: int, k: int) -> torch.Tensor:
    blocks = -(-numel // _BLOCK)
    if blocks == 1:
        return buffer.view(torch.int16).to(torch.int64) & 0xFFFF
    counts = buffer[: 4 * blocks].view(torch.int32).to(torch.int64)
    if bool((counts < 0).any()) or int(counts.sum()) != k:
        raise WireError(f"block counts add up to {int(counts.sum())}, {k} were announced")
    offsets = buffer[4 * blocks :].view(torch.int16).to(torch.int64) & 0xFFFF
    starts = torch.arange(blocks, device=buffer.device) * _BLOCK
    return offsets + torch.repeat_interleave(starts, counts)


def pack_bitmap(indices: torch.Tensor, numel: int) -> torch.Tensor:
    flags = torch.zeros(-(-numel // 8) * 8, dtype=torch.uint8, device=indices.device)
    flags[indices] = 1
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=flags.device)
    return (flags.view(-1, 8) * weights).sum(dim=1, dtype=torch.int32).to(torch.uint8)


def unpack_bitmap(buffer: torch.Tensor, numel: int) -> torch.Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=buffer.device)
    flags = (buffer.unsqueeze(1) >> shifts) & 1
    return flags.view(-1).nonzero().flatten()


def shared_indices(key: tuple[int, int], numel: int, k: int) -> torch.Tensor:
    words = np.array(key, dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=words))
    chosen = generator.choice(numel, k, replace=False, shuffle=False)
    chosen.sort()
    return torch.from_numpy(chosen.astype(np.int64, copy=False))
