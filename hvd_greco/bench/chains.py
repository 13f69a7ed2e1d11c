"""The torch chains: what a compressor would write without kernels of its own, and write well.

In place where torch can, no sort that is not needed, no check of what was received, and the last
bucket left out where it is not whole: whatever is unequal is so in the chain's favour.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

Payloads = list[tuple[torch.Tensor, torch.Tensor]]
_BLOCK = 65_536
_FRACTION = 23


def topk(vector: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions in any order, and entries."""
    positions = torch.topk(vector.abs(), k, sorted=False).indices
    return positions, vector[positions]


def topk_feedback(
    gradient: torch.Tensor, residual: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`topk` of the sum, and zeros where entries were taken."""
    residual.add_(gradient)
    positions, values = topk(residual, k)
    residual[positions] = 0
    return positions, values


def histogram(
    gradient: torch.Tensor, residual: torch.Tensor, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts and energies of 2,048 bins of the sum's magnitude."""
    torch.add(residual, gradient, out=out)
    bins = (out.view(torch.int32) & 0x7FFF_FFFF).bitwise_right_shift_(20)
    counts = torch.bincount(bins, minlength=2048)
    return counts, torch.bincount(bins, out.double().square_(), minlength=2048)


def scatter_add(out: torch.Tensor, payloads: Payloads) -> None:
    """The fastest of four ways on the CPU: index_add_, index_put_ and ``+=`` take 1.5 times it."""
    for positions, values in payloads:
        out.scatter_add_(0, positions, values)


def pack_blocks(positions: torch.Tensor, numel: int) -> torch.Tensor:
    """Counts of the blocks, unless there is one, and 16-bit offsets."""
    # int64 to int32 to int16: torch has hardly any operation on uint16.
    offsets = (positions & 0xFFFF).to(torch.int32).to(torch.int16).view(torch.uint8)
    blocks = -(-numel // _BLOCK)
    if blocks == 1:
        return offsets
    counts = torch.bincount(positions >> 16, minlength=blocks).to(torch.int32)
    return torch.cat((counts.view(torch.uint8), offsets))


def unpack_blocks(packed: torch.Tensor, numel: int) -> torch.Tensor:
    """Reverse of :func:`pack_blocks`."""
    blocks = -(-numel // _BLOCK)
    if blocks == 1:
        return packed.view(torch.int16).to(torch.int64).bitwise_and_(0xFFFF)
    counts = packed[: 4 * blocks].view(torch.int32)
    offsets = packed[4 * blocks :].view(torch.int16).to(torch.int64).bitwise_and_(0xFFFF)
    starts = torch.arange(0, blocks * _BLOCK, _BLOCK, device=packed.device)
    return offsets.add_(torch.repeat_interleave(starts, counts))


def pack_bitmap(positions: torch.Tensor, numel: int) -> torch.Tensor:
    """One bit an element, lowest first."""
    flags = torch.zeros(-(-numel // 8) * 8, dtype=torch.uint8, device=positions.device)
    flags[positions] = 1
    return _pack_flags(flags)


def _pack_flags(flags: torch.Tensor) -> torch.Tensor:
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=flags.device)
    return (flags.view(-1, 8) * weights).sum(dim=1, dtype=torch.uint8)


def _unpack_flags(packed: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) >> shifts) & 1).view(-1)


def unpack_bitmap(packed: torch.Tensor, numel: int) -> torch.Tensor:
    """Positions of the bits that are set."""
    return _unpack_flags(packed).nonzero().flatten()


def quantise(
    vector: torch.Tensor, bucket: int, bits: int, random: bool, leave: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and packed codes of the whole buckets; ``vector`` keeps the rest if it shall."""
    rows = vector[: vector.numel() // bucket * bucket].view(-1, bucket)
    levels = (1 << bits - 1) - 1
    scales = rows.abs().amax(1, keepdim=True)
    codes = rows * (levels / scales.clamp(min=torch.finfo(rows.dtype).tiny))
    if random:
        codes = codes.add_(torch.rand_like(codes)).floor_()
    else:
        codes = codes.round_()
    packed = _pack((codes + levels).to(torch.uint8).view(-1), bits)
    if leave:
        rows.sub_(codes.mul_(scales / levels))
    return scales.view(-1), packed


def quantise_feedback(
    gradient: torch.Tensor, residual: torch.Tensor, bucket: int, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`quantise` of the sum, to nearest; the residual keeps the rest."""
    residual.add_(gradient)
    return quantise(residual, bucket, bits, random=False, leave=True)


def dequantise_mean(
    buffer: torch.Tensor,
    starts: list[int],
    scale_bytes: int,
    bucket: int,
    bits: int,
    ranks: int,
    out: torch.Tensor,
) -> None:
    """The mean of several payloads, of the whole buckets."""
    rows = out[: out.numel() // bucket * bucket].view(-1, bucket)
    levels = (1 << bits - 1) - 1
    for rank, start in enumerate(starts):
        scales = buffer[start : start + scale_bytes].view(out.dtype)[: rows.shape[0], None]
        codes = buffer[start + scale_bytes :][: rows.numel() * bits // 8]
        values = _unpack(codes, bits).to(out.dtype).sub_(levels).view(-1, bucket)
        if rank:
            rows.addcmul_(values, scales, value=1 / (levels * ranks))
        else:
            torch.mul(values, scales / (levels * ranks), out=rows)


def natural_pack(vector: torch.Tensor, factor: float, out: torch.Tensor) -> None:
    """Powers of two: random bits added below the exponent, and the exponent taken."""
    pattern = (vector * factor).view(torch.int32)
    noise = torch.randint(0, 1 << _FRACTION, vector.shape, dtype=torch.int32, device=vector.device)
    codes = noise.add_(pattern & 0x7FFF_FFFF).bitwise_right_shift_(_FRACTION)
    out.copy_(codes.bitwise_or_(pattern.bitwise_right_shift_(24).bitwise_and_(0x80)))


def natural_add(codes: torch.Tensor, factor: float, out: torch.Tensor) -> None:
    """Exponents put back into place, and added."""
    wide = codes.to(torch.int32)
    sign = (wide & 0x80).bitwise_left_shift_(24)
    values = wide.bitwise_and_(0x7F).bitwise_left_shift_(_FRACTION).bitwise_or_(sign)
    out.add_(values.view(torch.float32), alpha=factor)


def sign_pack(vector: torch.Tensor) -> torch.Tensor:
    """One bit an element, 1 where it is negative."""
    negative = (vector < 0).view(torch.uint8)
    return _pack_flags(pad(negative, (0, -vector.numel() % 8)))


def sign_add(packed: torch.Tensor, step: torch.Tensor, out: torch.Tensor) -> None:
    """``step`` added where the bit is 0, and subtracted elsewhere."""
    flags = _unpack_flags(packed)[: out.numel()]
    out.add_(flags.to(out.dtype).mul_(-2 * step).add_(step))


def quantise_lanes(
    vector: torch.Tensor, scale: torch.Tensor, bits: int, width: int, out: torch.Tensor
) -> None:
    """Signed codes, to nearest, several in a word of 32 bits."""
    levels, words = (1 << bits - 1) - 1, out.numel()
    codes = (vector * (levels / scale)).round_().to(torch.int32)
    out.copy_(codes[:words])
    for lane in range(1, 32 // width):
        part = codes[lane * words : (lane + 1) * words]
        out[: part.numel()].add_(part.bitwise_left_shift_(lane * width))


def lanes_add(
    words: torch.Tensor, scale: torch.Tensor, bits: int, width: int, ranks: int, out: torch.Tensor
) -> None:
    """What :func:`quantise_lanes` of so many ranks gave, added up, back in fp32."""
    levels, count = (1 << bits - 1) - 1, words.numel()
    # Lifts each lane above zero, so that none borrows from the next.
    lift = sum(ranks * levels << lane * width for lane in range(32 // width))
    lifted = words + ((lift + 2**31) % 2**32 - 2**31)
    for lane in range(32 // width):
        part = out[lane * count : (lane + 1) * count]
        sums = (lifted[: part.numel()] >> lane * width).bitwise_and_((1 << width) - 1)
        part.add_(sums.sub_(ranks * levels).to(out.dtype).mul_(scale / levels))


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of one byte, a multiple of eight of them, without gaps."""
    if bits == 8:
        return codes
    if 8 % bits == 0:
        columns = codes.view(-1, 8 // bits)
        packed = columns[:, 0].clone()
        for i in range(1, 8 // bits):
            packed |= columns[:, i] << i * bits
        return packed
    shifts = torch.arange(0, 8 * bits, bits, device=codes.device)
    words = (codes.view(-1, 8).to(torch.int64) << shifts).sum(1)
    return words.view(torch.uint8).view(-1, 8)[:, :bits].reshape(-1)


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Reverse of :func:`_pack`."""
    if bits == 8:
        return packed
    mask = (1 << bits) - 1
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
        return ((packed.unsqueeze(1) >> shifts) & mask).view(-1)
    words = pad(packed.view(-1, bits), (0, 8 - bits)).view(torch.int64)
    shifts = torch.arange(0, 8 * bits, bits, device=packed.device)
    return ((words >> shifts) & mask).to(torch.uint8).view(-1)
