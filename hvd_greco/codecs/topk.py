"""Top-k: each rank sends its own largest entries, and all of them are added.

Source: Aji and Heafield 2017; with error feedback Stich et al. 2018 (arXiv 1809.07599) and
Karimireddy et al. 2019 (arXiv 1901.09847).
"""

from __future__ import annotations

import torch

from .. import kernels
from ..config import check_density
from ..layers import Layer, LayerState
from ..payload import Kind, Payload, Reduced, network_bytes
from ..registry import register_codec
from .base import Codec, Level, StepContext
from .sparse_wire import SparseLayout, sparse_layout


def kept(numel: int, density: float) -> int:
    """k = max(1, round(density d)), at most d: the number of entries that a density keeps."""
    return min(numel, max(1, round(density * numel)))


@register_codec(
    "topk",
    public="TopK",
    level="density",
    default=0.01,
    memory="ef",
    description="largest entries of each rank, error feedback",
)
class TopKCodec(Codec):
    """Largest-magnitude entries of every rank, gathered and averaged.

    The level is the density in (0, 1]: the share of entries that each rank sends. The wire holds
    4-byte values and positions of mostly 2 bytes, so density 0.01 sends about 1/66 of dense. The
    mean has up to N times as many entries, since ranks choose for themselves, and the allgather
    costs N-1 payloads: for many ranks prefer a lower density.

    Ties go to the lowest index; NaN and infinity count as the largest, so they are always sent
    and every rank sees them (``kernels.select_topk``).
    """

    name = "topk"

    def check_level(self, level: Level) -> Level:
        return check_density("density", level)

    def menu(self, layer: Layer) -> tuple[Level, ...]:
        return (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25)

    def unbiased(self, level: Level) -> bool:
        return level == 1.0

    def _layout(self, layer: Layer, level: Level) -> SparseLayout:
        assert level is not None
        return sparse_layout(layer.numel, kept(layer.numel, level), layer.work_dtype)

    def wire_bytes(self, layer: Layer, level: Level, size: int) -> int:
        return self._layout(layer, level).nbytes

    def network_bytes(self, layer: Layer, level: Level, size: int) -> int:
        return network_bytes(Kind.GATHER, self.wire_bytes(layer, level, size), size)

    def encode(
        self,
        layer: Layer,
        state: LayerState,
        vector: torch.Tensor,
        level: Level,
        context: StepContext,
    ) -> Payload:
        layout = self._layout(layer, level)
        indices = kernels.select_topk(vector, layout.k)
        values = vector[indices]
        buffer = context.buffers.get("send", layout.nbytes, torch.uint8, vector.device)
        layout.pack(values, indices, buffer)
        # A non-finite entry is larger than all finite ones, so it is among the values.
        finite = values.isfinite().all()
        return Payload(Kind.GATHER, buffer, own=(indices, values), finite=finite)

    def encode_absent(
        self,
        layer: Layer,
        state: LayerState,
        level: Level,
        context: StepContext,
        like: torch.Tensor,
    ) -> Payload:
        return Payload(Kind.GATHER, torch.empty(0, dtype=torch.uint8, device=like.device))

    def decode(
        self,
        layer: Layer,
        level: Level,
        context: StepContext,
        sent: Payload,
        reduced: Reduced,
        out: torch.Tensor,
    ) -> None:
        layout = self._layout(layer, level)
        out.zero_()
        # In rank order on every rank: the sums are bitwise the same everywhere.
        for part in reduced.parts(layout.nbytes):
            values, indices = layout.unpack(part)
            if indices is None:
                out.add_(values)
            else:
                # Positions within one payload are distinct, so this is a plain scatter-add and
                # does not depend on the order in which threads work.
                out[indices] += values
        out.div_(reduced.world_size)

    def add_own(
        self,
        layer: Layer,
        level: Level,
        context: StepContext,
        sent: Payload,
        vector: torch.Tensor,
        alpha: float,
    ) -> None:
        if sent.own is not None:
            indices, values = sent.own
            vector[indices] += alpha * values

    def clear_own(self, sent: Payload, vector: torch.Tensor) -> None:
        if sent.own is not None:
            vector[sent.own[0]] = 0
