"""Deep Gradient Compression: top-k on momentum-corrected velocities, with a warm-up.

Source: Lin et al. 2018 (arXiv 1712.01887).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..config import check_count, check_density
from ..registry import find_memory, register_codec
from .topk import TopKCodec

#: Densities of the paper's warm-up, before the final one.
STAGES = (0.25, 0.0625, 0.015625, 0.004)


def warm_up(density: float, steps: int) -> Callable[[int], float]:
    """Density as a function of the step: ``steps`` steps in each stage above ``density``."""
    stages = [*(stage for stage in STAGES if stage > density), density]

    def schedule(step: int) -> float:
        return stages[min(step // steps, len(stages) - 1)]

    return schedule


def assemble(
    density: float = 0.001,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    clip: float | None = None,
    weight_decay: float = 0.0,
    warmup: int = 0,
    values: str = "fp32",
    selection: str = "exact",
) -> dict[str, Any]:
    """The codec, memory and schedule of DGC; see :class:`DGCCodec`."""
    density = check_density("density", density)
    steps = check_count("warmup", warmup)
    return {
        "codec": DGCCodec(values, selection),
        "level": density,
        "memory": find_memory("dgc").make(
            momentum=momentum, nesterov=nesterov, clip=clip, weight_decay=weight_decay
        ),
        "schedule": warm_up(density, steps) if steps else None,
    }


@register_codec(
    "dgc",
    public="DGC",
    level="density",
    default=0.001,
    memory="dgc",
    description="top-k with momentum on each rank, clipping and a density warm-up",
    assemble=assemble,
)
class DGCCodec(TopKCodec):
    """Deep Gradient Compression (Lin et al. 2018): every rank sends the largest of its velocities.

    Momentum is applied on each rank before compressing (``u = m u + g``, ``v += u``) and cleared
    where an entry was sent, so that what is sent late is what momentum SGD would have sent, and
    no stale direction is repeated. **The optimizer's own momentum must be 0**, and its weight
    decay too where ours is set: both are checked in every step. Layers that are too small to
    compress get the same momentum, weight decay and clipping after averaging. On a single rank
    Horovod calls no compressor: there give momentum and weight decay to the optimizer.

    Values and positions travel as in :class:`TopK` (about 6 bytes a kept entry with fp32 values,
    4 with fp16). Memory: two fp32 copies of the compressed layers, one of the others. Use it with
    ``op=hvd.Average``, or with ``op=hvd.Sum`` and a learning rate that is N times smaller.

    Args:
        density: share of entries that each rank sends, in (0, 1]. The paper's 0.001 wants a
            warm-up; 0.01 is a safe start. At 1 the result is that of momentum SGD.
        momentum: what you would give to ``torch.optim.SGD``; with 0 the optimizer may have one.
        nesterov: Nesterov's variant, as in ``torch.optim.SGD``.
        clip: threshold of gradient clipping. Every rank clips its gradient at
            ``clip / sqrt(N)`` before accumulating it, by the norm of each **layer**: the paper
            clips by the norm of all layers, which no hook knows. None: none.
        weight_decay: as in ``torch.optim.SGD``, added on each rank before the momentum.
        warmup: steps at each of the densities 0.25, 0.0625, 0.015625 and 0.004 that lie
            above ``density``, before it is used; the paper takes one epoch for each. 0: none.
        values: form of the values on the wire, as for :class:`TopK`.
        selection: ``"exact"`` or ``"sampled"``, as for :class:`TopK`; the paper samples.

    Raises:
        ConfigError: a value is out of range, or the optimizer has momentum or weight decay of
            its own beside ours (at the first step).
    """

    name = "dgc"
