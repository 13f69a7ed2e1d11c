"""DGC's accounts: momentum correction, factor masking, local clipping (Lin et al. 2018)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ..codecs.base import Codec, Level
from ..codecs.topk import kept as kept_entries
from ..config import check_flag, check_nonnegative
from ..errors import ConfigError
from ..layers import Given, Layer, LayerState
from ..registry import register_memory
from .base import Memory, Own, kept


@register_memory("dgc", description="momentum kept on each rank, for sparse codecs")
class DGCMemory(Memory):
    """Accumulates velocities instead of gradients: ``u = m u + g``, ``v += u``, sends ``C(v)``.

    What is sent leaves ``v``, and ``u`` becomes zero there (momentum factor masking), unless a
    layer sends all of its entries: then nothing is delayed that could be stale, and the result
    is that of momentum SGD. ``v`` is the residual.

    Layers that go dense get the same momentum after averaging, so that the optimizer's own can
    be 0 for all layers. A momentum gathered while a layer was dense is taken along when it is
    compressed.

    Costs two fp32 copies of the compressed layers, one of those that go dense. A rank without a
    gradient goes on with a zero one, as it would with momentum SGD.

    Args:
        momentum: m, in [0, 1).
        nesterov: ``v += g + m u`` instead of ``v += u``.
        clip: every rank scales its gradient of a layer down to a norm of ``clip / sqrt(N)``
            before it is accumulated; None for no clipping. By layer, since a hook sees no more.
        weight_decay: added times the parameter to the gradient, before the momentum and after
            clipping.

    Raises:
        ConfigError: a value is out of range.
    """

    name = "dgc"
    copies = 2
    absent_is_zero = True
    serves_dense = True

    def __init__(
        self,
        momentum: float = 0.9,
        nesterov: bool = False,
        clip: float | None = None,
        weight_decay: float = 0.0,
    ) -> None:
        self.momentum = check_nonnegative("momentum", momentum)
        if self.momentum >= 1:
            raise ConfigError(f"momentum: {momentum!r} is not in [0, 1)")
        self.nesterov = check_flag("nesterov", nesterov)
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov: needs a momentum > 0, got momentum=0")
        self.clip = None if clip is None else check_nonnegative("clip", clip)
        if self.clip == 0:
            raise ConfigError("clip: 0 would zero every gradient; pass a norm > 0, or None")
        self.weight_decay = check_nonnegative("weight_decay", weight_decay)
        self._parameters: Mapping[str, torch.Tensor] = {}
        self._limit = math.inf

    def describe(self) -> str:
        return (
            f"{self.name}(momentum={self.momentum:g}, nesterov={self.nesterov}, "
            f"clip={self.clip}, weight_decay={self.weight_decay:g})"
        )

    def check(self, codec: Codec, level: Level) -> None:
        super().check(codec, level)
        if type(codec).clear_own is Codec.clear_own:
            raise ConfigError(
                f"memory: {self.name!r} needs a codec that sends some entries and not others, "
                f"which {codec.name!r} does not: there is nothing to mask. Use memory='ef'"
            )

    def bind(self, parameters: Mapping[str, torch.Tensor], size: int) -> None:
        self._parameters = parameters
        if self.clip is not None:
            self._limit = self.clip / math.sqrt(size)
        if size == 1 and (self.momentum or self.weight_decay or self.clip):
            warnings.warn(
                "DGC on a single rank: Horovod does not call a compressor there, so neither "
                "momentum nor weight decay nor clipping is applied. Leave DGC out, and give them "
                "to the optimizer",
                stacklevel=4,
            )

    def check_optimizer(self, optimizer: Any) -> None:
        if optimizer is None:
            return
        for group in optimizer.param_groups:
            for option, held in (
                ("momentum", group.get("momentum", 0)),
                ("betas[0]", (group.get("betas") or (0,))[0]),
            ):
                if self.momentum and held:
                    raise ConfigError(
                        f"momentum: DGC applies {self.momentum:g} before compressing, and the "
                        f"optimizer ({type(optimizer).__name__}) has {option}={held} of its own: "
                        f"it would act twice. Give the optimizer {option}=0, e.g. torch.optim.SGD("
                        "..., momentum=0) (and cycle_momentum=False to a scheduler), or DGC "
                        "momentum=0"
                    )
            if self.weight_decay and group.get("weight_decay"):
                raise ConfigError(
                    f"weight_decay: DGC adds {self.weight_decay:g} before the momentum, and the "
                    f"optimizer ({type(optimizer).__name__}) has "
                    f"weight_decay={group['weight_decay']} of its own: it would act twice. Give "
                    "the optimizer weight_decay=0"
                )

    def compensate(self, given: Given, out: torch.Tensor) -> None:
        if given.state.residual is None:
            given.state.residual = torch.zeros_like(out)
        factor = given.unscale * self._clipping(given.gradient, given.unscale)
        self._update_momentum(given.layer, given.state, given.gradient, factor, out)
        # The same operations in the same order as in commit: what was sent leaves exact zeros.
        if self.nesterov:
            torch.add(given.state.residual, out, alpha=self.momentum, out=out)
            self._add_gradient(given.layer, given.gradient, factor, out)
        else:
            torch.add(given.state.residual, out, out=out)

    def commit(self, given: Given, own: Own) -> None:
        velocity = given.state.residual
        assert velocity is not None
        factor = given.unscale * self._clipping(given.gradient, given.unscale)
        momentum = kept(given.state, "dgc.momentum", given.layer, velocity)
        self._update_momentum(given.layer, given.state, given.gradient, factor, momentum)
        given.state.slots.pop("dgc.dense", None)
        if self.nesterov:
            velocity.add_(momentum, alpha=self.momentum)
            self._add_gradient(given.layer, given.gradient, factor, velocity)
        else:
            velocity.add_(momentum)
        own.add_to(velocity, -1.0)
        assert own.work.level is not None
        if kept_entries(given.layer.numel, own.work.level) < given.layer.numel:
            own.clear(momentum)

    def deliver_dense(
        self, layer: Layer, state: LayerState, mean: torch.Tensor, scale: float
    ) -> None:
        momentum = kept(state, "dgc.dense", layer, mean)
        factor = self._clipping(mean, 1.0 / scale) / scale
        momentum.mul_(self.momentum)
        self._add_gradient(layer, mean, factor, momentum)
        if self.nesterov:
            step = momentum * self.momentum
            self._add_gradient(layer, mean, factor, step)
        else:
            step = momentum
        mean.copy_(step if scale == 1.0 else step * scale)

    def _update_momentum(
        self,
        layer: Layer,
        state: LayerState,
        gradient: torch.Tensor,
        factor: float,
        out: torch.Tensor,
    ) -> None:
        """``out = m u + g``; ``out`` may be u itself."""
        momentum = kept(state, "dgc.momentum", layer, out)
        dense = state.slots.get("dgc.dense")
        if dense is None:
            torch.mul(momentum, self.momentum, out=out)
        else:
            torch.add(momentum, dense, out=out).mul_(self.momentum)
        self._add_gradient(layer, gradient, factor, out)

    def _add_gradient(
        self, layer: Layer, gradient: torch.Tensor, factor: float, out: torch.Tensor
    ) -> None:
        """``out += factor g + weight_decay p``."""
        out.add_(gradient, alpha=factor)
        if self.weight_decay:
            parameter = self._parameters[layer.name].detach().contiguous().view(-1)
            out.add_(parameter, alpha=self.weight_decay)

    def _clipping(self, gradient: torch.Tensor, unscale: float) -> float:
        """What brings the gradient down to the limit: at most 1."""
        if math.isinf(self._limit):
            return 1.0
        # In fp64, since squares of large fp32 values overflow. NaN fails the comparison: no
        # clipping, and the step is dropped.
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) * unscale
        return self._limit / norm if norm > self._limit else 1.0
