"""Memory that is reused from step to step instead of being allocated in each."""

from __future__ import annotations

import torch


class Buffers:
    """Named 1-D tensors, made when first asked for and handed out again afterwards.

    A buffer is valid until the same name is asked for again, so each name has one user and one
    use a step. A larger request, or one of another dtype or device, replaces the buffer; a
    smaller one gets a view of its front.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._prefix = ""

    def under(self, prefix: str) -> Buffers:
        """The same memory with names of its own: for a codec that works inside another one."""
        inner = Buffers()
        inner._tensors = self._tensors
        inner._prefix = f"{self._prefix}{prefix}/"
        return inner

    def get(
        self,
        name: str,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        """A tensor of shape ``[numel]``; its contents are undefined."""
        name = self._prefix + name
        held = self._tensors.get(name)
        if held is None or held.dtype != dtype or held.device != device or held.numel() < numel:
            held = torch.empty(numel, dtype=dtype, device=device)
            self._tensors[name] = held
        return held if held.numel() == numel else held[:numel]

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())
