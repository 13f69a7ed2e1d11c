"""Vectors of entries as gradients have them, and as they should not."""

from __future__ import annotations

import torch


def make_input(kind: str, numel: int, device: torch.device, seed: int = 1) -> torch.Tensor:
    """fp32, ``[numel]``, the same for the same arguments.

    Args:
        kind: ``gaussian``; ``uniform`` in [-1, 1); ``heavy``, Student's t with two degrees of
            freedom (no variance: a few entries are thousands of times the median); ``constant``,
            where every entry ties; ``zeros``, 99.9 % of them, the rest gaussian.
        numel: entries.
        device: where it goes; it is drawn on the CPU.
        seed: of torch's generator.
    """
    generator = torch.Generator().manual_seed(seed)
    if kind == "constant":
        return torch.full((numel,), 0.25, device=device)
    if kind == "uniform":
        return torch.rand(numel, generator=generator).mul_(2).sub_(1).to(device)
    vector = torch.randn(numel, generator=generator)
    if kind == "heavy":
        # t with 2 degrees of freedom: a normal number over the root of an exponential one.
        vector /= torch.empty(numel).exponential_(generator=generator).sqrt_().clamp_(min=1e-6)
    elif kind == "zeros":
        vector[torch.rand(numel, generator=generator) >= 1e-3] = 0
    return vector.to(device)


def some_positions(k: int, numel: int, device: torch.device, seed: int) -> torch.Tensor:
    """``k`` ascending positions, int64: one at random in each of ``k`` equal stretches."""
    generator = torch.Generator().manual_seed(seed)
    stretch = numel // k
    offsets = torch.randint(0, stretch, (k,), generator=generator)
    return (torch.arange(k) * stretch + offsets).to(device)
