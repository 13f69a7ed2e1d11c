"""What quantisers share: private random streams, and payloads that all ranks gather."""

from __future__ import annotations

import hashlib
from abc import abstractmethod

import torch

from ..config import check_level_count
from ..errors import ConfigError
from ..layers import Layer
from ..payload import Kind, Payload, Reduced
from .base import Codec, Level, Work

_ALIGN = 8


def random_key(work: Work) -> tuple[int, int]:
    """Two 64-bit words that name this rank's own random stream for a layer and step."""
    words = hashlib.blake2b(
        f"{work.seed}/{work.layer.name}/{work.step}/{work.rank}".encode(), digest_size=16
    ).digest()
    return int.from_bytes(words[:8], "little"), int.from_bytes(words[8:], "little")


def check_bits(level: Level) -> int:
    """A level that counts bits: a whole number, 2 to 8."""
    bits = check_level_count("bits", level, minimum=2)
    if bits > 8:
        raise ConfigError(f"bits: {level!r} is above 8; use 2 to 8, or greco.Dense(wire='fp16')")
    return bits


def rounding_error(ratios: torch.Tensor, nearest: bool) -> torch.Tensor:
    """Expected squared error of rounding fp64 ``ratios`` to whole numbers, element by element."""
    fraction = ratios - ratios.floor()
    if nearest:
        return torch.minimum(fraction, 1 - fraction) ** 2
    return fraction * (1 - fraction)


class GatheredQuantiser(Codec):
    """A header and codes for every element, gathered and added up in rank order."""

    @abstractmethod
    def sections(self, layer: Layer, level: Level) -> tuple[int, int]:
        """Bytes of the header and of the codes. Zero bytes follow, up to a multiple of 8."""

    @abstractmethod
    def write(
        self, work: Work, vector: torch.Tensor, header: torch.Tensor, codes: torch.Tensor
    ) -> torch.Tensor:
        """Fill in the uint8 ``header`` and ``codes``; 0-dim bool, whether ``vector`` is finite."""

    @abstractmethod
    def add(
        self,
        layer: Layer,
        level: Level,
        header: torch.Tensor,
        codes: torch.Tensor,
        alpha: float,
        out: torch.Tensor,
    ) -> None:
        """``out += alpha * values`` of one rank's payload."""

    def wire_bytes(self, layer: Layer, level: Level, size: int) -> int:
        return -(-sum(self.sections(layer, level)) // _ALIGN) * _ALIGN

    def encode(self, work: Work, vector: torch.Tensor) -> Payload:
        buffer, header, codes = self.room(work, vector.device)
        finite = self.write(work, vector, header, codes)
        return Payload(Kind.GATHER, buffer, finite=finite)

    def room(
        self, work: Work, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A payload to fill in: all of it, its header and its codes."""
        nbytes = self.wire_bytes(work.layer, work.level, work.size)
        buffer = work.buffers.get("send", nbytes, torch.uint8, device)
        header, codes = self._split(work.layer, work.level, buffer)
        buffer[header.numel() + codes.numel() :].zero_()
        return buffer, header, codes

    def encode_absent(self, work: Work, like: torch.Tensor) -> Payload:
        return Payload(Kind.GATHER, torch.empty(0, dtype=torch.uint8, device=like.device))

    def decode(self, work: Work, sent: Payload, reduced: Reduced, out: torch.Tensor) -> None:
        out.zero_()
        self._add_all(work.layer, work.level, reduced, 1.0, out)
        out.div_(reduced.world_size)

    def add_own(self, work: Work, sent: Payload, vector: torch.Tensor, alpha: float) -> None:
        self._add_all(work.layer, work.level, Reduced(sent.kind, sent.buffer, 1), alpha, vector)

    def _add_all(
        self, layer: Layer, level: Level, reduced: Reduced, alpha: float, out: torch.Tensor
    ) -> None:
        for part in reduced.parts(self.wire_bytes(layer, level, 1)):
            self.add(layer, level, *self._split(layer, level, part), alpha, out)

    def _split(
        self, layer: Layer, level: Level, buffer: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        header, codes = self.sections(layer, level)
        return buffer[:header], buffer[header : header + codes]
