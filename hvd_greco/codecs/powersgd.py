"""PowerSGD: one step of subspace iteration on the summed matrix, in two small allreduces.

Source: Vogels, Karimireddy and Jaggi 2019 (arXiv 1905.13727).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import kernels
from ..layers import Layer
from ..payload import Kind, Payload, Reduced
from ..registry import register_codec
from .base import Codec, Level, Turn, Work
from .low_rank import (
    check_rank,
    drawn,
    factor,
    low_rank_errors,
    rank_menu,
    rank_of,
    resized,
    scaled_rows,
)

#: The warm start: the right factor of the last step, shape [r, m].
_SLOT = "powersgd.q"


@register_codec(
    "powersgd",
    public="PowerSGD",
    level="rank",
    default=4,
    memory="ef",
    description="rank-r approximation of the summed gradient, error feedback",
)
class PowerSGDCodec(Codec):
    """Every layer's mean gradient as a product of two thin factors, found in two allreduces.

    The first adds up ``P = M Q`` with last step's right factor Q; all ranks orthonormalise the
    sum, and the second adds up ``Q = M^T P``. The result ``P Q^T / N`` is the projection of the
    *mean* gradient, and it follows the leading singular directions from step to step (Vogels et
    al. 2019, arXiv 1905.13727). A layer is seen as a matrix of shape[0] rows by the rest; biases
    and other layers that would grow go dense.

    The level is the rank r: 1 or 2 for convolutional networks, 4 and more for transformers and
    language models. A layer of n by m sends 4 r (n + m) bytes in fp32 whatever the number of
    ranks (1024 x 1024 at rank 4: 1/128 of dense), and a rank above min(n, m) counts as that.
    When the rank changes in mid-training, the leading directions are kept. Half-precision
    gradients are worked on in fp32.

    Memory: r m values for each layer that persist, r (n + m) in reused buffers, and error
    feedback's copy. Where a rank's own directions are not the common ones its share waits in its
    residual. Compared with ACP: two rounds in place of one, for a better projection in each step.
    """

    name = "powersgd"
    rounds = 2
    kind = Kind.SUM

    def check_level(self, level: Level) -> Level:
        return check_rank(level)

    def menu(self, layer: Layer) -> tuple[Level, ...]:
        return rank_menu(layer)

    def wire_bytes(self, layer: Layer, level: Level, size: int) -> int:
        return rank_of(layer, level) * sum(layer.matrix) * layer.work_dtype.itemsize

    def effort(self, layer: Layer, level: Level, size: int) -> float:
        return float(rank_of(layer, level)) * layer.numel

    def errors(self, work: Work, vector: torch.Tensor, levels: Sequence[Level]) -> list[float]:
        return low_rank_errors(work, vector, levels, work.state.slots.get(_SLOT))

    def encode(self, work: Work, vector: torch.Tensor) -> Payload:
        rank, (n, m) = rank_of(work.layer, work.level), work.layer.matrix
        start = resized(work.state.slots.get(_SLOT), work, rank, m, vector)
        if start is None:
            start = drawn(work, "start", rank, m, vector)
        sent = work.buffers.get("powersgd.p", rank * n, work.layer.work_dtype, vector.device)
        kernels.project_rows(start, vector.view(n, m), sent.view(rank, n))
        return Payload(Kind.SUM, sent, finite=kernels.all_finite(vector))

    def encode_absent(self, work: Work, like: torch.Tensor) -> Payload:
        count = rank_of(work.layer, work.level) * work.layer.matrix[0]
        sent = work.buffers.get("powersgd.p", count, work.layer.work_dtype, like.device)
        return Payload(Kind.SUM, sent.zero_())

    def next_round(self, turn: Turn) -> Payload:
        return self.next_rounds([turn])[0]

    def next_rounds(self, turns: Sequence[Turn]) -> list[Payload]:
        # The matrices themselves are not stacked: that would copy them, and a product for each
        # is limited by reading them. The factors are small, and cost one call for each operation.
        alike: dict[tuple[object, ...], list[int]] = {}
        sums = []
        for i, turn in enumerate(turns):
            summed = factor(
                turn.reduced, rank_of(turn.work.layer, turn.work.level), turn.work.layer.matrix[0]
            )
            sums.append(summed)
            alike.setdefault((summed.shape, summed.dtype, summed.device), []).append(i)
        payloads: dict[int, Payload] = {}
        for places in alike.values():
            bases = kernels.orthonormalise(torch.stack([sums[i] for i in places]))
            for i, basis in zip(places, bases, strict=True):
                payloads[i] = self._second(turns[i], basis)
        return [payloads[i] for i in range(len(turns))]

    def _second(self, turn: Turn, basis: torch.Tensor) -> Payload:
        (n, m), rank = turn.work.layer.matrix, basis.shape[0]
        buffers = turn.work.buffers
        sent = buffers.get("powersgd.q", rank * m, basis.dtype, basis.device)
        kernels.project_columns(basis, turn.vector().view(n, m), sent.view(rank, m))
        return Payload(Kind.SUM, sent, own=basis)

    def decode(self, work: Work, sent: Payload, reduced: Reduced, out: torch.Tensor) -> None:
        n, m = work.layer.matrix
        mean = factor(reduced, rank_of(work.layer, work.level), m) / reduced.world_size
        kernels.low_rank(sent.own, mean, out.view(n, m))

    def add_own(self, work: Work, sent: Payload, vector: torch.Tensor, alpha: float) -> None:
        n, m = work.layer.matrix
        local = sent.buffer.view(rank_of(work.layer, work.level), m)
        kernels.add_low_rank(vector.view(n, m), sent.own, local, alpha)

    def commit(self, work: Work, sent: Payload, reduced: Reduced) -> None:
        rank, m = rank_of(work.layer, work.level), work.layer.matrix[1]
        found = scaled_rows(factor(reduced, rank, m))
        if found is None:
            return  # no gradient anywhere: the directions that were found stay
        start, alive = found
        if not bool(alive.all()):
            # A direction without a gradient would stay zero for ever: look elsewhere.
            fresh = drawn(work, f"again/{work.step}", rank, m, start)
            start = torch.where(alive.unsqueeze(1), start, fresh)
        work.state.slots[_SLOT] = start
