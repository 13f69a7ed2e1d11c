"""Summable quantisation: integer codes of one agreed scale, added up by a single allreduce.

After THC (Li et al. 2024, arXiv 2302.08545), whose codes can be aggregated without decoding.
"""

from __future__ import annotations

import torch

from .. import kernels
from ..errors import WireError
from ..layers import Layer
from ..payload import Kind, Payload, Reduced, network_bytes
from ..registry import register_codec
from .base import Codec, Level, Turn, Work
from .qsgd import levels_of
from .quant_wire import check_bits, random_key, rounding_error


def lane_width(bits: int, size: int) -> int:
    """Bits of a lane that holds the sum of ``size`` ranks' codes: bits + ceil(log2 N)."""
    return bits + (size - 1).bit_length()


@register_codec(
    "summable",
    public="SummableQuant",
    level="bits",
    default=4,
    memory="none",
    description="2 to 8 bits with one scale for all ranks, added as integers",
)
class SummableQuantCodec(Codec):
    """Every element rounded to a multiple of one step that all ranks agree on, added as integers.

    After THC (Li et al. 2024): ranks first gather one number each, their largest magnitude; the
    largest of all is the scale. Codes then travel in lanes of ``bits + ceil(log2 N)`` bits, side by
    side in int32 words, and one integer allreduce adds them up: the cost for each rank hardly
    grows with their number, where gathering (``QSGD``) grows with N - 1. The sum is exact and is
    scaled once, after decoding.

    The level is the number of bits, 2 to 8. With 4, the words are 1/6 of dense fp32 on 2 ranks,
    1/5 on 4, 1/4 on 8. Rounding is random and unbiased, and no memory is kept.

    One scale serves a whole layer and all ranks, so elements and ranks far below the largest get
    a relative error that is large (though still unbiased): for layers with heavy tails take more
    bits, or ``QSGD``, which has a scale for every bucket.

    With a memory (``"ef"``, ``"ef21"``) elements are rounded to nearest instead. A rank that is
    small beside the others may then send zeros for a while, until its residual reaches half a
    step; over all ranks together the error is still less than the input, which is what error
    feedback needs. Layers whose largest magnitude is below the smallest normal number
    (1.2e-38) become zeros.
    """

    name = "summable"
    rounds = 2

    def __init__(self) -> None:
        self._nearest = False

    def adapt_to(self, memory: str) -> None:
        self._nearest = memory != "none"

    def check_level(self, level: Level) -> Level:
        return check_bits(level)

    def menu(self, layer: Layer) -> tuple[Level, ...]:
        return (2, 3, 4, 5, 6, 7, 8)

    def unbiased(self, level: Level) -> bool:
        return not self._nearest

    def contractive(self, level: Level) -> bool:
        # To nearest: of all ranks' vectors laid end to end the largest element is met exactly, and
        # no other costs more than its square. At random, small elements may (see QSGD), and with
        # one scale for everything there is no bound that would hold.
        return self._nearest

    def expected_error(
        self, layer: Layer, vector: torch.Tensor, level: Level, scale: float | None = None
    ) -> float:
        """E||C(x) - x||^2 of one rank; ``scale`` None: this rank's own maximum is the largest."""
        x = vector.double()
        step = (float(x.abs().max()) if scale is None else scale) / levels_of(level)
        if step == 0:
            return float(x.square().sum())
        return float(rounding_error(x / step, self._nearest).sum() * step**2)

    def wire_bytes(self, layer: Layer, level: Level, size: int) -> int:
        return layer.work_dtype.itemsize + self._words(layer, level, size) * 4

    def network_bytes(self, layer: Layer, level: Level, size: int) -> int:
        scales = network_bytes(Kind.GATHER, layer.work_dtype.itemsize, size)
        return scales + network_bytes(Kind.SUM, self._words(layer, level, size) * 4, size)

    def _words(self, layer: Layer, level: Level, size: int) -> int:
        assert level is not None
        return kernels.lane_words(layer.numel, lane_width(int(level), size))

    def encode(self, work: Work, vector: torch.Tensor) -> Payload:
        peak = kernels.bucket_scales(vector, work.layer.numel, "max")
        return Payload(Kind.GATHER, peak.view(torch.uint8), own=True, finite=peak[0].isfinite())

    def encode_absent(self, work: Work, like: torch.Tensor) -> Payload:
        peak = torch.zeros(1, dtype=work.layer.work_dtype, device=like.device)
        return Payload(Kind.GATHER, peak.view(torch.uint8), own=False)

    def next_round(self, turn: Turn) -> Payload:
        work, layer = turn.work, turn.work.layer
        assert work.level is not None
        bits, received = int(work.level), turn.reduced.buffer
        if received.numel() != turn.reduced.world_size * layer.work_dtype.itemsize:
            raise WireError(
                f"layer {layer.name!r}: gathered {received.numel()} bytes of maxima from "
                f"{turn.reduced.world_size} ranks, each of which sends {layer.work_dtype.itemsize}"
            )
        # NaN wins over everything, so a step that some rank must reject is NaN for all.
        scale = received.view(layer.work_dtype).amax()
        words = work.buffers.get(
            "words", self._words(layer, work.level, work.size), torch.int32, received.device
        )
        if turn.sent.own:
            key = None if self._nearest else random_key(work)
            width = lane_width(bits, work.size)
            kernels.quantise_lanes(turn.vector(), scale, bits, width, key, words)
        else:
            words.zero_()  # zero in every lane
        return Payload(Kind.SUM, words, own=scale)

    def decode(self, work: Work, sent: Payload, reduced: Reduced, out: torch.Tensor) -> None:
        out.zero_()
        ranks = reduced.world_size
        self._add(work, sent, reduced.buffer, ranks, 1.0 / ranks, out)

    def add_own(self, work: Work, sent: Payload, vector: torch.Tensor, alpha: float) -> None:
        self._add(work, sent, sent.buffer, 1, alpha, vector)

    def _add(
        self,
        work: Work,
        sent: Payload,
        words: torch.Tensor,
        ranks: int,
        alpha: float,
        out: torch.Tensor,
    ) -> None:
        assert work.level is not None
        width = lane_width(int(work.level), work.size)
        kernels.lanes_add(words, sent.own, int(work.level), width, ranks, alpha, out)
