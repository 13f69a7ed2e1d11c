"""ACP-SGD: PowerSGD's two products in turns, one of them a step.

Source: Zhang, Shi and Li 2023, "Evaluation and Optimization of Gradient Compression for
Distributed Deep Learning" (arXiv 2306.08881).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import kernels
from ..layers import Layer
from ..payload import Kind, Payload, Reduced, network_bytes
from ..registry import register_codec
from .base import Codec, Level, Work
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

#: The factor of the last step, orthonormal: left [r, n] or right [r, m]. One of them is held.
_LEFT, _RIGHT = "acp.p", "acp.q"


@dataclass(frozen=True)
class _Own:
    """The orthonormal factor that this step works with, and on which side of the product it is."""

    basis: torch.Tensor
    left: bool

    def factor_shape(self, layer: Layer) -> tuple[int, int]:
        """Shape of the other factor, which is added up in this step."""
        n, m = layer.matrix
        return (self.basis.shape[0], m if self.left else n)


@register_codec(
    "acp",
    public="ACP",
    level="rank",
    default=4,
    memory="ef",
    description="one factor of a rank-r approximation a step, in turns, error feedback",
)
class ACPCodec(Codec):
    """Low rank in one small allreduce a step, carried by Horovod's own (ACP-SGD).

    In one step all ranks hold an orthonormal right factor Q and add up ``P = M Q``; in the next
    they orthonormalise that P and add up ``Q = M^T P``; and so on: PowerSGD's iteration at half
    the pace (Zhang et al. 2023, arXiv 2306.08881). There is no second round to wait for, and
    nothing travels but what rides Horovod's allreduce, so it goes with ``join()`` and costs less
    time than PowerSGD; in fast-changing phases its projection lags behind.

    The level is the rank r, chosen as for PowerSGD. A layer of n by m (shape[0] by the rest)
    sends 4 r n and 4 r m bytes in turn, in fp32. Horovod
    negotiates anew about a tensor whose size changes; measured, that costs nothing beside the
    step (288 ms, and 292 with both turns padded, on a busy machine), and for oblong layers
    padding sends up to twice the bytes. A rank above min(n, m) counts as that. When the rank
    changes in mid-training, the leading directions are kept. Half-precision gradients are worked
    on in fp32.

    Memory: at most r max(n, m) values for each layer that persist, as many in reused buffers,
    and error feedback's copy.
    """

    name = "acp"
    kind = Kind.CARRIED

    def check_level(self, level: Level) -> Level:
        return check_rank(level)

    def menu(self, layer: Layer) -> tuple[Level, ...]:
        return rank_menu(layer)

    def suits(self, layer: Layer, level: Level) -> bool:
        # Below this, half the steps could send more than the gradient has.
        return rank_of(layer, level) * sum(layer.matrix) < layer.numel

    def wire_bytes(self, layer: Layer, level: Level, size: int) -> int:
        return rank_of(layer, level) * max(layer.matrix) * layer.work_dtype.itemsize

    def step_bytes(self, work: Work) -> int:
        rank, (n, m) = rank_of(work.layer, work.level), work.layer.matrix
        held = work.state.slots.get(_LEFT)
        return rank * (n if held is None else m) * work.layer.work_dtype.itemsize

    def network_bytes(self, layer: Layer, level: Level, size: int) -> int:
        # The mean of two steps: what counts when levels are compared.
        both = rank_of(layer, level) * sum(layer.matrix) * layer.work_dtype.itemsize
        return network_bytes(Kind.CARRIED, both // 2, size)

    def effort(self, layer: Layer, level: Level, size: int) -> float:
        return float(rank_of(layer, level)) * layer.numel

    def errors(self, work: Work, vector: torch.Tensor, levels: Sequence[Level]) -> list[float]:
        return low_rank_errors(work, vector, levels, work.state.slots.get(_RIGHT))

    def encode(self, work: Work, vector: torch.Tensor) -> Payload:
        own = self._basis(work, vector)
        shape = own.factor_shape(work.layer)
        sent = work.buffers.get("acp", math.prod(shape), work.layer.work_dtype, vector.device)
        product = kernels.project_columns if own.left else kernels.project_rows
        product(own.basis, vector.view(work.layer.matrix), sent.view(shape))
        return Payload(Kind.CARRIED, sent, own=own, finite=kernels.all_finite(vector))

    def encode_absent(self, work: Work, like: torch.Tensor) -> Payload:
        own = self._basis(work, like)
        count = math.prod(own.factor_shape(work.layer))
        sent = work.buffers.get("acp", count, work.layer.work_dtype, like.device)
        return Payload(Kind.CARRIED, sent.zero_(), own=own)

    def decode(self, work: Work, sent: Payload, reduced: Reduced, out: torch.Tensor) -> None:
        left, right = self._factors(work.layer, sent.own, reduced)
        kernels.low_rank(left, right, out.view(work.layer.matrix))

    def add_own(self, work: Work, sent: Payload, vector: torch.Tensor, alpha: float) -> None:
        local = Reduced(sent.kind, sent.buffer, 1)
        left, right = self._factors(work.layer, sent.own, local)
        kernels.add_low_rank(vector.view(work.layer.matrix), left, right, alpha)

    def commit(self, work: Work, sent: Payload, reduced: Reduced) -> None:
        left, right = self._factors(work.layer, sent.own, reduced)
        # Scaled to a power of two first: the mean and the sum of two ranks keep the same bits.
        found = scaled_rows(right if sent.own.left else left)
        if found is None:
            return  # no gradient anywhere: the same turn again, with the directions that we have
        # Here rather than in the next encode, which runs inside the backward pass.
        basis = kernels.orthonormalise(found[0].unsqueeze(0))[0]
        alive = basis.any(dim=1)
        if not bool(alive.all()):
            # Directions that the gradient lacks now: look elsewhere, behind those that it has.
            kept = basis[alive]
            missing, length = basis.shape[0] - kept.shape[0], basis.shape[1]
            fresh = drawn(work, f"again/{work.step}", missing, length, basis)
            basis = kernels.orthonormalise(torch.cat((kept, fresh)).unsqueeze(0))[0]
        now, before = (_RIGHT, _LEFT) if sent.own.left else (_LEFT, _RIGHT)
        work.state.slots[now] = basis
        work.state.slots.pop(before, None)

    def _factors(
        self, layer: Layer, own: _Own, reduced: Reduced
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Left and right factor: the basis, and what was added up."""
        summed = factor(reduced, *own.factor_shape(layer))
        return (own.basis, summed) if own.left else (summed, own.basis)

    def _basis(self, work: Work, like: torch.Tensor) -> _Own:
        """Whose turn it is. What was added up last decides, so a skipped step loses no turn."""
        rank, (n, m) = rank_of(work.layer, work.level), work.layer.matrix
        held = resized(work.state.slots.get(_LEFT), work, rank, n, like)
        if held is not None:
            return _Own(held, left=True)
        held = resized(work.state.slots.get(_RIGHT), work, rank, m, like)
        if held is None:
            start = drawn(work, "start", rank, m, like)
            held = kernels.orthonormalise(start.unsqueeze(0))[0]
        return _Own(held, left=False)
