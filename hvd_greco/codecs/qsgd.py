"""QSGD: every element rounded at random to one of a few levels of its bucket's scale.

Source: Alistarh et al. 2017 (arXiv 1610.02132); scaling by the largest magnitude as in L-GreCo
(Alimohammadi et al. 2024) and CGX (Markov et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .. import kernels
from ..config import check_count
from ..errors import ConfigError
from ..layers import Addends, Layer
from ..payload import Kind, Payload, Reduced
from ..registry import register_codec
from .base import Level, Work
from .quant_wire import GatheredQuantiser, check_bits, random_key


def levels_of(bits: Level) -> int:
    """s: codes go from -s to s."""
    return int((1 << int(bits or 0) - 1) - 1)


@register_codec(
    "qsgd",
    public="QSGD",
    level="bits",
    default=4,
    memory="none",
    description="every element in 2 to 8 bits, unbiased, one scale a bucket",
)
class QSGDCodec(GatheredQuantiser):
    """Every element rounded to a multiple of ``scale / (2**(bits-1) - 1)`` of its bucket.

    The rounding is random and unbiased (QSGD, Alistarh et al. 2017), so no memory is needed, and
    none is kept. The level is the number of bits, 2 to 8, packed without gaps: 4 send 0.127 of
    dense, scales included. Each bit less doubles the steps, and multiplies the variance by four
    or more; 8 and 7 are hardly noticed, 4 suits most models, below that train with error feedback.

    Args:
        bucket: elements that share a scale, which is sent in the work dtype (fp32, or fp64 for
            fp64 gradients). Fewer are more accurate and cost ``32 / bucket`` bits an element.
        norm: the scale: ``"max"``, the largest magnitude, or ``"l2"``, the Euclidean norm as in
            the paper, which is larger, so that most elements of few bits become zero.

    With a memory (``"ef"``, ``"ef21"``) elements are rounded to nearest instead: a residual repays
    what is lost, so no chance is needed, and the error is less than half. With ``norm="l2"`` that
    needs more than ``sqrt(bucket) / 2`` levels (5 bits for 512): with fewer, a bucket of equal
    elements would come out as zeros for ever, and the combination is refused.

    Buckets whose scale is below the smallest normal number (1.2e-38) become zeros.
    """

    name = "qsgd"
    leaves_rest = True
    errors_of_parts = True

    def __init__(self, bucket: int = 512, norm: str = "max") -> None:
        self.bucket = check_count("bucket", bucket, minimum=1)
        if norm not in ("max", "l2"):
            raise ConfigError(f"norm: {norm!r} is neither 'max' nor 'l2'")
        self.norm = norm
        self._nearest = False

    def adapt_to(self, memory: str) -> None:
        self._nearest = memory != "none"

    def context(self) -> dict[str, str]:
        return {"qsgd bucket": str(self.bucket), "qsgd norm": self.norm}

    def check_level(self, level: Level) -> Level:
        return check_bits(level)

    def menu(self, layer: Layer) -> tuple[Level, ...]:
        return (2, 3, 4, 5, 6, 7, 8)

    def unbiased(self, level: Level) -> bool:
        return not self._nearest

    def contractive(self, level: Level) -> bool:
        # In units of a step: an element r = n + f costs f(1-f) on average rounded at random, and
        # min(f, 1-f)^2 rounded to nearest. "max": the largest element is a whole s and costs
        # nothing. To nearest, no other costs more than its r^2: ||x||^2 shrinks by s^2 at least.
        # At random it may, by up to 1/8 (at r = 1/4). "l2": r^2 adds up to s^2; the worst are
        # equal elements, r = s / sqrt(bucket), for either way of rounding.
        s = levels_of(level)
        if self.norm == "l2":
            return s > math.sqrt(self.bucket) / 2
        return self._nearest or s * s > (self.bucket - 1) / 8

    def expected_error(self, layer: Layer, vector: torch.Tensor, level: Level) -> float:
        """E||C(x) - x||^2 of a vector at a level, summed over its elements."""
        errors = kernels.quantiser_errors(vector, self.bucket, self.norm, self._nearest)
        return float(errors[kernels.WIDTHS.index(check_bits(level))])

    def errors(self, work: Work, vector: torch.Tensor, levels: Sequence[Level]) -> list[float]:
        every = kernels.quantiser_errors(vector, self.bucket, self.norm, self._nearest)
        return [float(every[kernels.WIDTHS.index(check_bits(level))]) for level in levels]

    def sections(self, layer: Layer, level: Level) -> tuple[int, int]:
        assert level is not None
        scales = -(-layer.numel // self.bucket)
        return scales * layer.work_dtype.itemsize, kernels.packed_bytes(layer.numel, int(level))

    def write(
        self, work: Work, vector: torch.Tensor, header: torch.Tensor, codes: torch.Tensor
    ) -> torch.Tensor:
        assert work.level is not None
        scales = header.view(work.layer.work_dtype)
        key = None if self._nearest else random_key(work)
        kernels.quantise(vector, self.bucket, self.norm, int(work.level), key, scales, codes)
        return kernels.all_finite(scales)

    def encode_sum(self, work: Work, addends: Addends, vector: torch.Tensor) -> Payload:
        assert work.level is not None
        buffer, header, codes = self.room(work, vector.device)
        scales = header.view(work.layer.work_dtype)
        kernels.accumulate_quantise(
            addends.gradient, addends.residual, addends.scale, vector, self.bucket, self.norm,
            int(work.level), None, scales, codes,
        )  # fmt: skip
        return Payload(Kind.GATHER, buffer, finite=kernels.all_finite(scales), rest=True)

    def decode(self, work: Work, sent: Payload, reduced: Reduced, out: torch.Tensor) -> None:
        assert work.level is not None
        nbytes = self.wire_bytes(work.layer, work.level, work.size)
        starts = [nbytes * i for i in range(len(reduced.parts(nbytes)))]
        header = self.sections(work.layer, work.level)[0]
        kernels.dequantise_mean(
            reduced.buffer, starts, header, self.bucket, int(work.level), reduced.world_size, out
        )

    def add(
        self,
        layer: Layer,
        level: Level,
        header: torch.Tensor,
        codes: torch.Tensor,
        alpha: float,
        out: torch.Tensor,
    ) -> None:
        assert level is not None
        scales = header.view(layer.work_dtype)
        kernels.dequantise_add(codes, scales, self.bucket, int(level), alpha, out)
