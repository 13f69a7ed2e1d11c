"""Skip: nothing is sent, and all of it waits in the residual."""

from __future__ import annotations

import torch

from .. import kernels
from ..layers import Addends, Layer
from ..payload import Kind, Payload, Reduced
from .base import Codec, Level, Work


class SkipCodec(Codec):
    """An adaptive controller's cheapest option, for a layer whose gradients hardly matter now.

    Not registered, since it is no method by itself: what is never sent never arrives. The
    controller sees the growing residual, and sends it once it is worth its bytes.
    """

    name = "skip"
    kind = Kind.NOTHING
    leaves_rest = True

    def contractive(self, level: Level) -> bool:
        return False

    def wire_bytes(self, layer: Layer, level: Level, size: int) -> int:
        return 0

    def encode(self, work: Work, vector: torch.Tensor) -> Payload:
        finite = kernels.all_finite(vector)
        return Payload(Kind.NOTHING, vector.new_empty(0), finite=finite)

    def encode_sum(self, work: Work, addends: Addends, vector: torch.Tensor) -> Payload:
        payload = super().encode_sum(work, addends, vector)
        payload.rest = True
        return payload

    def encode_absent(self, work: Work, like: torch.Tensor) -> Payload:
        return Payload(Kind.NOTHING, like.new_empty(0))

    def decode(self, work: Work, sent: Payload, reduced: Reduced, out: torch.Tensor) -> None:
        out.zero_()

    def add_own(self, work: Work, sent: Payload, vector: torch.Tensor, alpha: float) -> None:
        return
