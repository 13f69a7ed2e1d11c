"""The compressor's ``exchange=``: by which route a codec's payloads travel."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .codecs.base import Codec, Level
from .codecs.hierarchical import HierarchicalCodec
from .codecs.scatter_reduce import ScatterReduceCodec
from .codecs.wrapping import kind_of
from .errors import ConfigError
from .exchange.base import Group
from .layers import Given, Layer, LayerState
from .memories.base import Memory, Own
from .payload import Kind

EXCHANGES = ("allgather", "scatter", "hierarchical")
#: Memories whose accounts hold over host means; others count on seeing each rank's gradient.
_OVER_HOSTS = ("none", "ef", "ef21", "ef21-sgdm")


class OverHosts(Memory):
    """Another memory's part on ranks, when its accounts are kept over host means by leaders.

    The vector that a rank encodes is its gradient itself; settling is the codec's, which is the
    one that knows the host's mean.
    """

    def __init__(self, inner: Memory) -> None:
        if inner.name not in _OVER_HOSTS:
            raise ConfigError(
                f"memory: {inner.name!r} does not go with exchange='hierarchical', which shows it "
                f"one mean per host in place of each rank's gradient; use {', '.join(_OVER_HOSTS)}"
            )
        self.inner = inner
        self.name = inner.name
        self.copies = inner.copies

    def describe(self) -> str:
        return f"{self.inner.describe()} over hosts"

    def check(self, codec: Codec, level: Level) -> None:
        self.inner.check(codec, level)

    def bind(self, parameters: Mapping[str, torch.Tensor], size: int) -> None:
        self.inner.bind(parameters, size)

    def compensate(self, given: Given, out: torch.Tensor) -> None:
        out.copy_(given.gradient).mul_(given.unscale)

    def commit(self, given: Given, own: Own) -> None:
        return

    def deliver(self, layer: Layer, state: LayerState, mean: torch.Tensor) -> None:
        self.inner.deliver(layer, state, mean)


def routed(
    exchange: str | None, codec: Codec, memory: Memory, group: Group, sizes: Mapping[str, int]
) -> tuple[Codec, Memory]:
    """The codec and the memory for that route; for ``"hierarchical"``, all ranks call it together.

    Args:
        sizes: layer name -> elements, for all layers of the model.

    Raises:
        ConfigError: no such route, or it does not go with the codec, the memory or the group.
    """
    if exchange is None or exchange == "allgather":
        return codec, memory
    if exchange == "scatter":
        return ScatterReduceCodec(codec), memory
    if exchange == "hierarchical":
        over_hosts = OverHosts(memory)
        return HierarchicalCodec(codec, group.hosts(), sizes, memory, Own), over_hosts
    raise ConfigError(f"exchange: {exchange!r} is none of {', '.join(EXCHANGES)}")


def check_allgather(codec: Codec) -> None:
    """Raise :class:`ConfigError` unless the codec's payloads are gathered, as was asked for."""
    kind = kind_of(codec)
    if kind is not Kind.GATHER:
        raise ConfigError(
            f"exchange: 'allgather' does not go with {codec.name!r}, whose payloads are added up "
            f"on the way ({kind.value}); leave exchange out"
        )
