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


def _kth_largest(bits: torch.Tensor, k: int) -> int:
    if bits.device.type == "cpu":
        # NumPy's introselect (vectorised) is 2.5x torch.topk at 10 M elements.
        at = bits.numel() - k
        return int(np.partition(bits.numpy(), at)[at])
    return int(torch.topk(bits, k, sorted=False).values.min())


def _at_least(bits: torch.Tensor, threshold: int) -> torch.Tensor:
    """Positions, ascending."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(bits.numpy() >= threshold))
    return (bits >= threshold).nonzero().flatten()


def accumulate(
    out: torch.Tensor,
    gradient: torch.Tensor,
    residual: torch.Tensor,
    scale: float,
    counts: torch.Tensor,
    energies: torch.Tensor,
) -> None:
    add(out, gradient, residual, scale)
    shift = 51 if out.dtype == torch.float64 else 20
    bins = _magnitude_bits(out).bitwise_right_shift(shift).to(torch.int64)
    counts.copy_(torch.bincount(bins, minlength=counts.numel()))
    energies.copy_(torch.bincount(bins, out.double() ** 2, minlength=counts.numel()))


def add(out: torch.Tensor, gradient: torch.Tensor, residual: torch.Tensor, scale: float) -> None:
    """``out = residual + scale * gradient``."""
    # Not add(alpha=): that may round once where the contract rounds twice.
    given = gradient.to(out.dtype)
    torch.add(residual, given if scale == 1 else given * scale, out=out)


def accumulate_select(
    out: torch.Tensor,
    gradient: torch.Tensor,
    residual: torch.Tensor,
    scale: float,
    k: int,
    clear: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    add(out, gradient, residual, scale)
    return take_topk(out, k, clear)


def take_topk(vector: torch.Tensor, k: int, clear: bool) -> tuple[torch.Tensor, torch.Tensor]:
    indices = select_topk(vector, k)
    values = vector[indices]
    if clear:
        vector[indices] = 0
    return indices, values


def scatter_add(
    out: torch.Tensor, payloads: list[tuple[torch.Tensor, torch.Tensor]], alpha: float
) -> None:
    for positions, values in payloads:
        # Positions within one payload are distinct, so the order of threads cannot show.
        out[positions] += values if alpha == 1 else alpha * values


def select_topk(vector: torch.Tensor, k: int) -> torch.Tensor:
    numel = vector.numel()
    if k == numel:
        return torch.arange(numel, device=vector.device)
    bits = _magnitude_bits(vector)
    kth = _kth_largest(bits, k)
    chosen = _at_least(bits, kth)
    surplus = chosen.numel() - k
    if surplus:
        # More entries than needed equal the k-th magnitude: the highest indices go.
        ties = (bits[chosen] == kth).nonzero().flatten()
        keep = torch.ones(chosen.numel(), dtype=torch.bool, device=chosen.device)
        keep[ties[ties.numel() - surplus :]] = False
        chosen = chosen[keep]
    return chosen


#: A sample holds at least this many of the entries that shall be selected, for a threshold
#: within about 10 %.
_SAMPLED = 128


def select_sampled(vector: torch.Tensor, k: int) -> torch.Tensor:
    numel = vector.numel()
    # Odd, so that it does not walk along one column of a matrix with an even number of them.
    stride = max(1, k // _SAMPLED) | 1
    if stride < 4 or k == numel:
        return _without_zeros(vector, select_topk(vector, k))
    bits = _magnitude_bits(vector)
    sample = bits[::stride].contiguous()
    # Aim above k: then the k largest are among the chosen, and the selection is exact after all.
    wanted = 1.15 * k / stride
    for _ in range(11):
        rank = min(sample.numel(), max(1, round(wanted)))
        threshold = max(1, _kth_largest(sample, rank))
        chosen = _at_least(bits, threshold)
        if chosen.numel() > k:
            # The k largest are among them; both lists ascend, so ties go as in select_topk.
            return chosen[select_topk(vector[chosen], k)]
        if chosen.numel() >= 0.8 * k or threshold == 1:
            return chosen
        if rank == sample.numel():
            break
        # Not enough: go down the sample in proportion, and a little further.
        wanted = max(rank + 1, 1.1 * rank * k / max(1, chosen.numel()))
    return _without_zeros(vector, select_topk(vector, k))


def _without_zeros(vector: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return indices[vector[indices] != 0]


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
