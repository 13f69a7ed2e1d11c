"""A codec of your own: TernGrad (Wen et al. 2017). Import this, then use `greco.Tern`."""

import torch

from hvd_greco.codecs.base import Codec
from hvd_greco.errors import WireError
from hvd_greco.payload import Kind, Payload
from hvd_greco.registry import register_codec

SHIFTS = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)


@register_codec("tern", public="Tern", description="sign or zero, 2 bits an entry")
class TernCodec(Codec):
    """Each entry becomes -s, 0 or s, with s the largest magnitude, so that the mean is right."""

    name = "tern"

    def unbiased(self, level):
        return True

    def contractive(self, level):
        return False  # a vector with one large entry comes back up to d times as long

    def wire_bytes(self, layer, level, size):
        # Scale, then four entries a byte, up to a multiple of 8: gathered parts stay aligned.
        return -(-(8 + -(-layer.numel // 4)) // 8) * 8

    def encode(self, work, vector):
        seed = hash((work.seed, work.layer.index, work.step, work.rank)) % 2**63
        draw = torch.rand(vector.numel(), generator=torch.Generator().manual_seed(seed))
        scale = torch.linalg.vector_norm(vector, float("inf"))
        codes = torch.where(draw * scale < vector.abs(), vector.sign(), torch.zeros(())) + 1
        send = work.buffers.get(
            "send", self.wire_bytes(work.layer, work.level, 1), torch.uint8, vector.device
        )
        send.zero_()[:8].view(torch.float64).copy_(scale)
        padded = torch.ones(-(-vector.numel() // 4) * 4, dtype=torch.uint8)
        padded[: vector.numel()] = codes.nan_to_num(nan=1.0)
        packed = (padded.view(-1, 4) << SHIFTS).sum(dim=1, dtype=torch.int32)
        send[8 : 8 + packed.numel()].copy_(packed)
        return Payload(Kind.GATHER, send, finite=scale.isfinite())

    def encode_absent(self, work, like):
        return Payload(Kind.GATHER, torch.empty(0, dtype=torch.uint8))

    def decode(self, work, sent, reduced, out):
        out.zero_()
        for part in reduced.parts(self.wire_bytes(work.layer, work.level, 1)):
            codes = ((part[8:].unsqueeze(1) >> SHIFTS) & 3).view(-1)[: work.layer.numel]
            if bool((codes == 3).any()):
                raise WireError("a code is none of 0, 1, 2")
            out.add_(part[:8].view(torch.float64).to(out.dtype) * (codes.to(out.dtype) - 1))
        out.div_(reduced.world_size)
