"""What a fresh process does until it has its first results; run by :mod:`.starts`."""

from __future__ import annotations

import json
import sys
import time

#: Large enough for the paths that a layer takes, too small for the work itself to show.
NUMEL = 1 << 20


def main() -> None:
    """Print seconds as JSON. The argument is the device."""
    began = time.perf_counter()
    import torch

    from .. import kernels

    device = torch.device(sys.argv[1])
    gradient = torch.linspace(-1, 1, NUMEL, device=device)
    residual, out = torch.zeros_like(gradient), torch.zeros_like(gradient)
    imported = time.perf_counter()

    k = NUMEL // 100
    positions, values = kernels.accumulate_select(gradient, residual, 1.0, residual, k, clear=True)
    packed = kernels.pack_block_offsets(positions, NUMEL)
    kernels.scatter_add(out, [(kernels.unpack_block_offsets(packed, NUMEL, k), values)])
    if device.type == "cuda":
        torch.cuda.synchronize()
    sparse = time.perf_counter()

    bits, bucket = 4, 512
    scale_bytes = 4 * NUMEL // bucket
    gathered = torch.empty(
        scale_bytes + kernels.packed_bytes(NUMEL, bits), dtype=torch.uint8, device=device
    )
    scales, codes = gathered[:scale_bytes].view(torch.float32), gathered[scale_bytes:]
    kernels.accumulate_quantise(
        gradient, residual, 1.0, residual, bucket, "max", bits, None, scales, codes
    )
    kernels.quantise(gradient, bucket, "max", bits, (1, 2), scales, codes)
    kernels.dequantise_mean(gathered, [0], scale_bytes, bucket, bits, 1, out)
    if device.type == "cuda":
        torch.cuda.synchronize()
    done = time.perf_counter()
    print(
        json.dumps(
            {
                "import_seconds": imported - began,
                "topk_seconds": sparse - imported,
                "qsgd_seconds": done - sparse,
            }
        )
    )
