"""No selection at all: the whole gradient in fp32, fp16 or bf16."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .. import kernels
from ..errors import ConfigError, WireError
from ..layers import Layer, carried_dtype
from ..payload import Kind, Payload, Reduced, network_bytes
from ..registry import register_codec
from .base import Codec, Level, Turn, Work

#: Sums beyond this are infinite in fp16.
HALF_MAX = 65504.0

WIRES = {"native": None, "fp32": torch.float32, "fp16": torch.float16}


@register_codec("dense", public="Dense", description="every entry, fp32: stock Horovod")
class DenseCodec(Codec):
    """Every element, carried by the stock allreduce in the given dtype.

    Args:
        wire: ``"native"`` sends the gradient's own dtype (bf16, which Horovod cannot add up, as
            fp32), without a copy; ``"fp32"`` and ``"fp16"`` convert. A sum in fp16 overflows when
            an element's total over all ranks passes 65,504 (the same holds for Horovod's own fp16
            compression; ``gradient_predivide_factor`` moves that limit), and elements below 6e-8
            become zero.
    """

    kind = Kind.CARRIED

    def __init__(self, wire: str = "native") -> None:
        if wire not in WIRES:
            raise ConfigError(f"wire: {wire!r} is none of {', '.join(WIRES)}, bf16")
        self.wire = wire
        self.name = "dense" if wire == "native" else wire

    def unbiased(self, level: Level) -> bool:
        return True  # but for rounding

    def contractive(self, level: Level) -> bool:
        return False  # it keeps nothing back, and there is nothing to remember

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """dtype on the wire for gradients of ``dtype``."""
        return WIRES[self.wire] or carried_dtype(dtype)

    def wire_bytes(self, layer: Layer, level: Level, size: int) -> int:
        return layer.numel * self.wire_dtype(layer.dtype).itemsize

    def errors(self, work: Work, vector: torch.Tensor, levels: Sequence[Level]) -> list[float]:
        # Rounding to 11 bits, evenly spread; below 6e-5 to multiples of 6e-8. What cannot be added
        # up in fp16 is no choice.
        if self.wire_dtype(work.layer.dtype) != torch.float16:
            return [0.0] * len(levels)
        energy = kernels.squared_norm(vector)
        if math.sqrt(energy) * work.size > HALF_MAX:
            return [math.inf] * len(levels)
        error = energy * 2.0**-22 / 3 + work.layer.numel * 2.0**-48 / 12
        return [error] * len(levels)

    def encode(self, work: Work, vector: torch.Tensor) -> Payload:
        return Payload(Kind.CARRIED, vector.to(self.wire_dtype(work.layer.dtype)))

    def encode_absent(self, work: Work, like: torch.Tensor) -> Payload:
        zeros = torch.zeros(
            work.layer.numel, dtype=self.wire_dtype(work.layer.dtype), device=like.device
        )
        return Payload(Kind.CARRIED, zeros)

    def decode(self, work: Work, sent: Payload, reduced: Reduced, out: torch.Tensor) -> None:
        out.copy_(reduced.buffer)


register_codec("fp16", public="", description="every entry, 2 bytes each", fixed={"wire": "fp16"})(
    DenseCodec
)


@register_codec("bf16", public="", description="every entry, 2 bytes with fp32's range")
class BF16Codec(Codec):
    """Every element in bfloat16: two bytes with fp32's range, added up in fp32.

    No collective takes bf16, so each rank gets one shard of everybody's gradient as bytes
    (alltoall), adds it up in fp32, rounds once, and all shards are gathered. Both rounds together
    move what a ring allreduce of two-byte elements would, and the sum is better than one: each
    contribution is rounded once and the mean once, whatever the number of ranks.
    """

    name = "bf16"
    rounds = 2
    kind = Kind.SCATTER

    def wire_bytes(self, layer: Layer, level: Level, size: int) -> int:
        shard = _shard(layer.numel, size)
        return 2 * shard * size + 2 * shard

    def network_bytes(self, layer: Layer, level: Level, size: int) -> int:
        shard = _shard(layer.numel, size)
        scatter = network_bytes(Kind.SCATTER, 2 * shard * size, size)
        return scatter + network_bytes(Kind.GATHER, 2 * shard, size)

    def encode(self, work: Work, vector: torch.Tensor) -> Payload:
        shard = _shard(work.layer.numel, work.size)
        total = shard * work.size
        buffer = work.buffers.get("send", total, torch.bfloat16, vector.device)
        buffer[: work.layer.numel].copy_(vector)
        buffer[work.layer.numel :].zero_()
        splits = (2 * shard,) * work.size
        return Payload(Kind.SCATTER, buffer.view(torch.uint8), splits=splits)

    def encode_absent(self, work: Work, like: torch.Tensor) -> Payload:
        zeros = torch.zeros(work.layer.numel, dtype=work.layer.work_dtype, device=like.device)
        return self.encode(work, zeros)

    def unbiased(self, level: Level) -> bool:
        return True  # but for rounding to 8 bits

    def next_round(self, turn: Turn) -> Payload:
        size = turn.work.size
        shard = _shard(turn.work.layer.numel, size)
        pieces = _bf16(turn.reduced, shard * size).view(size, shard)
        mean = pieces.to(torch.float32).mean(dim=0).to(torch.bfloat16)
        return Payload(Kind.GATHER, mean.view(torch.uint8))

    def decode(self, work: Work, sent: Payload, reduced: Reduced, out: torch.Tensor) -> None:
        total = _shard(work.layer.numel, work.size) * work.size
        out.copy_(_bf16(reduced, total)[: work.layer.numel])


def _shard(numel: int, size: int) -> int:
    """Elements of each rank's shard; the last ranks' are filled up with zeros."""
    return -(-numel // size)


def _bf16(reduced: Reduced, numel: int) -> torch.Tensor:
    """Received bytes as ``numel`` bf16 values."""
    if reduced.buffer.numel() != 2 * numel:
        raise WireError(f"{2 * numel} bytes of bf16 expected, got {reduced.buffer.numel()}")
    return reduced.buffer.view(torch.bfloat16)
