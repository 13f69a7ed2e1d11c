"""What codecs share that wrap another codec and move its payloads by another route."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch

from ..buffers import Buffers
from ..errors import ConfigError
from ..layers import Layer, LayerState
from ..payload import Kind
from .base import Codec, Level, Work

#: Large enough for every codec to take part, small enough to cost nothing.
_PROBE = Layer(0, "probe", (64, 64), torch.float32)


def kind_of(codec: Codec) -> Kind:
    """How the payloads of a codec of one round travel.

    Raises:
        ConfigError: it has several rounds.
    """
    if codec.rounds != 1:
        raise ConfigError(
            f"exchange: {codec.name!r} has {codec.rounds} rounds and a route of its own, which "
            "cannot be exchanged for another; leave exchange out"
        )
    return codec.kind


def has_fixed_size(codec: Codec, level: Level) -> bool:
    """Whether payloads are as long as ``wire_bytes`` says even for a vector of zeros."""
    zeros = torch.zeros(_PROBE.numel, dtype=_PROBE.work_dtype)
    sent = codec.encode(_probe(level), zeros)
    return sent.nbytes == codec.wire_bytes(_PROBE, level, 2)


def _probe(level: Level) -> Work:
    return Work(_PROBE, level, LayerState(), step=0, rank=0, size=2, seed=0, buffers=Buffers())


class WrapperCodec(Codec):
    """A codec that leaves the coding to another one; its levels and properties are that one's.

    Args:
        inner: a codec of one round.
        route: what is added to its name.

    Raises:
        ConfigError: ``inner`` has several rounds.
    """

    def __init__(self, inner: Codec, route: str) -> None:
        kind_of(inner)  # raises if it has several rounds
        self.inner = inner
        self.name = f"{inner.name}+{route}"

    def adapt_to(self, memory: str) -> None:
        self.inner.adapt_to(memory)

    def context(self) -> dict[str, str]:
        return self.inner.context()

    def check_level(self, level: Level) -> Level:
        return self.inner.check_level(level)

    def menu(self, layer: Layer) -> tuple[Level, ...]:
        return self.inner.menu(layer)

    def suits(self, layer: Layer, level: Level) -> bool:
        return self.inner.suits(layer, level)

    def unbiased(self, level: Level) -> bool:
        return self.inner.unbiased(level)

    def contractive(self, level: Level) -> bool:
        return self.inner.contractive(level)


def inner_work(work: Work, label: str) -> Work:
    """The work for one use of an inner codec: a random stream and buffer names of its own.

    A codec draws from (seed, layer, step, rank), so two uses in one step must differ in the seed,
    or the second would repeat the first one's draws and its error would not be independent.
    """
    words = hashlib.blake2b(f"{work.seed}/{label}".encode(), digest_size=4).digest()
    seed = int.from_bytes(words, "little")
    return replace(work, seed=seed, buffers=work.buffers.under("inner"))
