"""Random-k: all ranks send the same randomly drawn positions, so only values travel.

Source: Stich et al. 2018 (arXiv 1809.07599). The 2024 study (arXiv 2502.07634) found it very bad
for language models; it is here as the baseline that any chooser of positions has to beat, and
because its payload is summable: its cost does not grow with the number of ranks.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from .. import kernels
from ..config import check_density
from ..layers import Layer
from ..payload import Kind, Payload, Reduced
from ..registry import register_codec
from .base import Codec, Level, Work
from .topk import kept


@register_codec(
    "randomk",
    public="RandomK",
    level="density",
    default=0.01,
    memory="ef",
    description="the same random entries on all ranks",
)
class RandomKCodec(Codec):
    """Values at positions drawn alike on all ranks from (seed, layer, step), carried by Horovod.

    The level is the density in (0, 1].

    Without a memory, values are multiplied by d/k: unbiased, with a variance of (d/k - 1) g^2 that
    asks for a far smaller learning rate. With one they are sent as they are.
    """

    name = "randomk"
    kind = Kind.CARRIED

    def __init__(self) -> None:
        self._rescale = False

    def adapt_to(self, memory: str) -> None:
        self._rescale = memory == "none"

    def unbiased(self, level: Level) -> bool:
        return self._rescale

    def contractive(self, level: Level) -> bool:
        return not self._rescale

    def context(self) -> dict[str, str]:
        # NumPy does not promise that `choice` draws alike in every release.
        return {"randomk numpy": np.__version__}

    def check_level(self, level: Level) -> Level:
        return check_density("density", level)

    def wire_bytes(self, layer: Layer, level: Level, size: int) -> int:
        assert level is not None
        return kept(layer.numel, level) * layer.work_dtype.itemsize

    def encode(self, work: Work, vector: torch.Tensor) -> Payload:
        indices = self._positions(work, vector.device)
        values = vector[indices]
        if self._rescale:
            values *= work.layer.numel / indices.numel()
        # Whether the vector is finite is left to the compressor: most entries are not sent.
        return Payload(Kind.CARRIED, values, own=indices)

    def encode_absent(self, work: Work, like: torch.Tensor) -> Payload:
        indices = self._positions(work, like.device)
        values = torch.zeros(indices.numel(), dtype=work.layer.work_dtype, device=like.device)
        return Payload(Kind.CARRIED, values, own=indices)

    def decode(self, work: Work, sent: Payload, reduced: Reduced, out: torch.Tensor) -> None:
        out.zero_()
        out[sent.own] = reduced.buffer

    def add_own(self, work: Work, sent: Payload, vector: torch.Tensor, alpha: float) -> None:
        vector[sent.own] += alpha * sent.buffer

    def clear_own(self, sent: Payload, vector: torch.Tensor) -> None:
        vector[sent.own] = 0

    def _positions(self, work: Work, device: torch.device) -> torch.Tensor:
        assert work.level is not None
        return shared_positions(work, kept(work.layer.numel, work.level), device)


def shared_positions(work: Work, k: int, device: torch.device) -> torch.Tensor:
    """``k`` positions drawn from (seed, layer, step): the same on all ranks."""
    words = hashlib.blake2b(
        f"{work.seed}/{work.layer.name}/{work.step}".encode(), digest_size=16
    ).digest()
    key = (int.from_bytes(words[:8], "little"), int.from_bytes(words[8:], "little"))
    return kernels.shared_indices(key, work.layer.numel, k, device)
