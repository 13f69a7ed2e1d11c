"""The one place where Numba meets torch: tensors as device arrays, launches on torch's stream."""

from __future__ import annotations

from typing import Any

import torch
from numba import config, cuda

from . import numba_kernels
from .runtime import count_launch

#: The simulator runs a Python thread for each of them.
SIMULATED_THREADS = 8


def arrays(*tensors: torch.Tensor) -> tuple[Any, ...]:
    """What Numba takes for contiguous tensors: the same memory."""
    return tuple(_array(tensor) for tensor in tensors)


def _array(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach()
    if config.ENABLE_CUDASIM:
        from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

        # NumPy arrays would be copied there and back, which loses what one of two arguments that
        # are the same memory has got.
        return FakeCUDAArray(tensor.numpy())
    return cuda.as_cuda_array(tensor, sync=False)


def start(kernel: Any, blocks: int, device: torch.device, *arguments: Any) -> None:
    """Run ``kernel`` in ``blocks`` blocks on torch's current stream of ``device``."""
    count_launch()
    if config.ENABLE_CUDASIM:
        kernel[blocks, SIMULATED_THREADS](*arguments)
        return
    stream = torch.cuda.current_stream(device)
    with cuda.gpus[stream.device_index]:
        kernel[blocks, numba_kernels.THREADS, cuda.external_stream(stream.cuda_stream)](*arguments)
