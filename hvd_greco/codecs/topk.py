"""Top-k: each rank sends its own largest entries, and all of them are added.

Source: Aji and Heafield 2017; with error feedback Stich et al. 2018 (arXiv 1809.07599) and
Karimireddy et al. 2019 (arXiv 1901.09847). Threshold from a sample: Lin et al. 2018
(arXiv 1712.01887).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .. import kernels
from ..config import check_density
from ..errors import ConfigError
from ..layers import Addends, Layer
from ..payload import Kind, Payload, Reduced
from ..registry import register_codec
from .base import Codec, Level, Work
from .sparse_wire import (
    HEADER,
    VALUES,
    SparseLayout,
    counted_layout,
    pack_counted,
    sparse_layout,
)

SELECTIONS = ("exact", "sampled")


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

    Args:
        values: form of the values on the wire. ``"fp32"``: as they are (fp64 for fp64
            gradients). ``"fp16"``: 2 bytes each, times a power of two for each layer and step,
            so none overflows. ``"q8"``, ``"q4"``: rounded to 8 or 4 bits, with one scale for
            512 values. A kept value then costs 6, 4, 3 or 2.5 bytes, its position included. The
            memory keeps what rounding took as well as what was not selected.
        selection: ``"exact"``, or ``"sampled"``: a strided sample gives the threshold, several
            times faster for large layers. Between 0.8 and 1 of the entries asked for are then
            sent, mostly the very ones of ``"exact"``, and zeros never; ``wire_bytes()`` is the
            most that a payload can take.

    Raises:
        ConfigError: an option is none of these.
    """

    name = "topk"
    leaves_rest = True
    encodes_many = True
    errors_of_parts = True

    def __init__(self, values: str = "fp32", selection: str = "exact") -> None:
        if values not in VALUES:
            raise ConfigError(f"values: {values!r} is none of {', '.join(VALUES)}")
        if selection not in SELECTIONS:
            raise ConfigError(f"selection: {selection!r} is none of {', '.join(SELECTIONS)}")
        self.values = values
        self.selection = selection

    def context(self) -> dict[str, str]:
        return {f"{self.name} values": self.values, f"{self.name} selection": self.selection}

    def check_level(self, level: Level) -> Level:
        return check_density("density", level)

    def menu(self, layer: Layer) -> tuple[Level, ...]:
        return (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25)

    def unbiased(self, level: Level) -> bool:
        return level == 1.0 and self.values == "fp32"

    def _layout(self, layer: Layer, level: Level) -> SparseLayout:
        """The layout of a full selection."""
        assert level is not None
        k = kept(layer.numel, level)
        return sparse_layout(layer.numel, k, layer.work_dtype, self.values)

    def _counted(self, layout: SparseLayout) -> bool:
        """The data decides how many values there are, so payloads say it."""
        return self.selection == "sampled" and layout.k < layout.numel

    def wire_bytes(self, layer: Layer, level: Level, size: int) -> int:
        layout = self._layout(layer, level)
        return layout.nbytes + (HEADER if self._counted(layout) else 0)

    def errors(self, work: Work, vector: torch.Tensor, levels: Sequence[Level]) -> list[float]:
        # What rounding of the values takes (``values="q4"`` and the like) is left out: it is a
        # small share of what is sent, and that is small beside what is not.
        histogram = kernels.accumulate(vector, vector, 0.0, vector)
        ks = [kept(vector.numel(), check_density("density", level)) for level in levels]
        found: list[float] = kernels.topk_errors(histogram, ks).tolist()
        return found

    def encode(self, work: Work, vector: torch.Tensor) -> Payload:
        layout = self._layout(work.layer, work.level)
        if self._counted(layout):
            indices = kernels.select_sampled(vector, layout.k)
            return self._payload(work, indices, vector[indices])
        return self._payload(work, *kernels.take_topk(vector, layout.k))

    def encode_sum(self, work: Work, addends: Addends, vector: torch.Tensor) -> Payload:
        layout = self._layout(work.layer, work.level)
        if self._counted(layout):
            payload = super().encode_sum(work, addends, vector)
            vector[payload.own[0]] = 0
        else:
            found = kernels.accumulate_select(
                addends.gradient, addends.residual, addends.scale, vector, layout.k, clear=True
            )
            payload = self._payload(work, *found)
        return self._with_rest(payload, vector)

    def encode_many(
        self, works: Sequence[Work], addends: Sequence[Addends], vectors: Sequence[torch.Tensor]
    ) -> list[Payload]:
        layouts = [self._layout(work.layer, work.level) for work in works]
        if any(map(self._counted, layouts)):
            return super().encode_many(works, addends, vectors)
        found = kernels.accumulate_select_many(
            [given.gradient for given in addends],
            [given.residual for given in addends],
            [given.scale for given in addends],
            vectors,
            [layout.k for layout in layouts],
            clear=True,
        )
        return [
            self._with_rest(self._payload(work, *entries), vector)
            for work, entries, vector in zip(works, found, vectors, strict=True)
        ]

    def _with_rest(self, payload: Payload, vector: torch.Tensor) -> Payload:
        """``vector`` has zeros where entries were taken, and then all that was not sent."""
        if self.values != "fp32":
            # What rounding took stays as well.
            indices, sent, values = payload.own
            vector[indices] = values - sent
        payload.rest = True
        return payload

    def _payload(self, work: Work, indices: torch.Tensor, values: torch.Tensor) -> Payload:
        """The payload of those entries; ``own``: positions, values as received, as they were."""
        layout = self._layout(work.layer, work.level)
        room = self.wire_bytes(work.layer, work.level, work.size)
        buffer = work.buffers.get("send", room, torch.uint8, values.device)
        if self._counted(layout):
            layout = sparse_layout(
                work.layer.numel, indices.numel(), work.layer.work_dtype, self.values
            )
            buffer = buffer[: HEADER + layout.nbytes]
            sent = pack_counted(layout, values, indices, buffer)
        else:
            sent = layout.pack(values, indices, buffer)
        # A non-finite entry is larger than all finite ones, so it is among the values.
        finite = kernels.all_finite(values)
        return Payload(Kind.GATHER, buffer, own=(indices, sent, values), finite=finite)

    def encode_absent(self, work: Work, like: torch.Tensor) -> Payload:
        return Payload(Kind.GATHER, torch.empty(0, dtype=torch.uint8, device=like.device))

    def decode(self, work: Work, sent: Payload, reduced: Reduced, out: torch.Tensor) -> None:
        out.zero_()
        ranks = reduced.world_size
        # The inverse of a power of two is exact, and need only meet what was sent.
        share = 1.0 / ranks if ranks & (ranks - 1) == 0 else 1.0
        sparse = []
        # In rank order on every rank: the sums are bitwise the same everywhere.
        for values, indices in self._received(self._layout(work.layer, work.level), reduced):
            if indices is None:
                out.add_(values, alpha=share)
            else:
                sparse.append((indices, values))
        kernels.scatter_add(out, sparse, share)
        if share * ranks != 1.0:
            out.div_(ranks)

    def _received(
        self, layout: SparseLayout, reduced: Reduced
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        if not self._counted(layout):
            yield from map(layout.unpack, reduced.parts(layout.nbytes))
            return

        def announced(buffer: torch.Tensor) -> SparseLayout:
            return counted_layout(buffer, layout.numel, layout.k, layout.dtype, layout.values)

        for part in reduced.parts_of(lambda buffer: HEADER + announced(buffer).nbytes):
            yield announced(part).unpack(part[HEADER:])

    def add_own(self, work: Work, sent: Payload, vector: torch.Tensor, alpha: float) -> None:
        if sent.own is not None:
            indices, values, _ = sent.own
            vector[indices] += alpha * values

    def clear_own(self, sent: Payload, vector: torch.Tensor) -> None:
        if sent.own is not None:
            indices, values, _ = sent.own
            # A zero is filled in where too few entries differ from it, or what rounding left.
            vector[indices[values != 0]] = 0
