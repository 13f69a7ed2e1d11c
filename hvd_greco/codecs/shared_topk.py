"""Shared-index top-k: ranks take turns to choose the positions at which all send values.

Source: ScaleCom's cyclic local top-k, Chen et al. 2020 (arXiv 2104.11125).
"""

from __future__ import annotations

import torch

from .. import kernels
from ..config import check_density
from ..errors import WireError
from ..layers import Layer
from ..payload import Kind, Payload, Reduced, network_bytes
from ..registry import register_codec
from .base import Codec, Level, Turn, Work
from .randomk import shared_positions
from .sparse_wire import SparseLayout, sparse_layout
from .topk import kept


@register_codec(
    "sharedtopk",
    public="SharedTopK",
    level="density",
    default=0.01,
    memory="ef",
    description="largest entries of one rank in turn, values of all",
)
class SharedTopKCodec(Codec):
    """In step t, rank t mod N sends the positions of its largest entries, then all send values.

    The positions are gathered (only the leader sends any), the values added up by an allreduce:
    the bytes that a rank handles do not grow with the number of ranks, as those of
    :class:`TopK`'s allgather do, and the mean has exactly k entries. The price is a second round
    and positions that suit one rank best; residuals of the ranks resemble each other enough for
    that to work (ScaleCom, Chen et al. 2020), and every rank leads in turn.

    The level is the density in (0, 1]: start from 0.01. Memory: one fp32 copy of the compressed
    layers for error feedback. Bytes: 4 a kept value (8 for fp64 gradients) and, from the leader,
    mostly 2 for its position.

    A leader that has no gradient for a layer sends random positions.
    """

    name = "sharedtopk"
    rounds = 2

    def check_level(self, level: Level) -> Level:
        return check_density("density", level)

    def menu(self, layer: Layer) -> tuple[Level, ...]:
        return (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5)

    def unbiased(self, level: Level) -> bool:
        return level == 1.0

    def wire_bytes(self, layer: Layer, level: Level, size: int) -> int:
        layout = _layout(layer, level)
        return _index_bytes(layout) + layout.value_bytes

    def step_bytes(self, work: Work) -> int:
        layout = _layout(work.layer, work.level)
        return layout.value_bytes + (_index_bytes(layout) if _leads(work) else 0)

    def network_bytes(self, layer: Layer, level: Level, size: int) -> int:
        layout = _layout(layer, level)
        # One rank's positions go to all others: every link carries them once.
        positions = _index_bytes(layout) if size > 1 else 0
        return positions + network_bytes(Kind.SUM, layout.value_bytes, size)

    def encode(self, work: Work, vector: torch.Tensor) -> Payload:
        layout = _layout(work.layer, work.level)
        if not _leads(work):
            return _nothing(vector.device)
        return _positions(layout, kernels.select_topk(vector, layout.k), work)

    def encode_absent(self, work: Work, like: torch.Tensor) -> Payload:
        layout = _layout(work.layer, work.level)
        if not _leads(work):
            return _nothing(like.device)
        return _positions(layout, shared_positions(work, layout.k, like.device), work)

    def next_round(self, turn: Turn) -> Payload:
        layout = _layout(turn.work.layer, turn.work.level)
        parts = turn.reduced.parts(_index_bytes(layout))
        if len(parts) != 1:
            raise WireError(
                f"layer {turn.work.layer.name!r}: positions came from {len(parts)} ranks, one leads"
            )
        indices = layout.unpack_positions(parts[0][: layout.index_bytes])
        vector = turn.vector()
        values = turn.work.buffers.get("values", layout.k, layout.dtype, vector.device)
        if indices is None:
            values.copy_(vector)
        else:
            torch.index_select(vector, 0, indices, out=values)
        return Payload(Kind.SUM, values, own=indices)

    def decode(self, work: Work, sent: Payload, reduced: Reduced, out: torch.Tensor) -> None:
        if sent.own is None:
            out.copy_(reduced.buffer)
        else:
            out.zero_()
            out[sent.own] = reduced.buffer
        out.div_(reduced.world_size)

    def add_own(self, work: Work, sent: Payload, vector: torch.Tensor, alpha: float) -> None:
        if sent.own is None:
            vector.add_(sent.buffer, alpha=alpha)
        else:
            vector[sent.own] += alpha * sent.buffer

    def clear_own(self, sent: Payload, vector: torch.Tensor) -> None:
        vector[slice(None) if sent.own is None else sent.own] = 0


def _layout(layer: Layer, level: Level) -> SparseLayout:
    assert level is not None
    return sparse_layout(layer.numel, kept(layer.numel, level), layer.work_dtype)


def _index_bytes(layout: SparseLayout) -> int:
    """Bytes of the leader's payload: never 0, which would be no payload at all."""
    return max(4, layout.index_bytes)


def _leads(work: Work) -> bool:
    return work.step % work.size == work.rank


def _nothing(device: torch.device) -> Payload:
    return Payload(Kind.GATHER, torch.empty(0, dtype=torch.uint8, device=device))


def _positions(layout: SparseLayout, indices: torch.Tensor, work: Work) -> Payload:
    nbytes = _index_bytes(layout)
    buffer = work.buffers.get("positions", nbytes, torch.uint8, indices.device)
    layout.pack_positions(indices, buffer[: layout.index_bytes])
    buffer[layout.index_bytes :].zero_()
    return Payload(Kind.GATHER, buffer)
