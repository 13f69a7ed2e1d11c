"""The plan of a compressor without a controller: one codec and level wherever it saves bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from . import carrier
from .codecs.base import Codec, Level
from .codecs.dense import DenseCodec
from .layers import GRADIENT_DTYPES, Layer
from .payload import Kind, network_bytes
from .plan import Assignment, Plan, matches


def uniform_plan(
    layers: Iterable[Layer],
    codec: Codec,
    level: Level,
    dense: DenseCodec,
    *,
    size: int,
    shared_bytes: int,
    min_numel: int,
    exclude: Sequence[str],
    context: Mapping[str, str],
    epoch: int = 0,
) -> Plan:
    """Assign ``codec`` at ``level`` to every layer that takes part, and ``dense`` to the others.

    A layer goes dense if it has fewer than ``min_numel`` elements, if its name matches a pattern
    of ``exclude``, if its dtype is none that we compress, if the payload would hand no fewer bytes
    to collectives than its gradient does, or put no fewer on the link with as many ranks as there
    are, or if the codec has no use for its shape. All of them do if together they save less than
    ``shared_bytes``, which a step with any compressed layer sends for its checks.
    """
    layers = list(layers)
    saved = {
        layer.name: _saved(layer, codec, level, dense, size)
        for layer in layers
        if size > 1
        and layer.numel >= max(1, min_numel)
        and layer.dtype in GRADIENT_DTYPES
        and not matches(layer.name, exclude)
        and codec.suits(layer, level)
    }
    chosen = {name for name, nbytes in saved.items() if nbytes > 0}
    if sum(saved[name] for name in chosen) <= shared_bytes and not isinstance(codec, DenseCodec):
        chosen = set()
    facts = {**context, **codec.context()}
    for layer in layers:
        shape = "x".join(map(str, layer.shape))
        facts[f"shape of {layer.name}"] = f"{shape} {layer.dtype}"
    assignments = {
        layer.name: Assignment(codec.name, level)
        if layer.name in chosen
        else Assignment(dense.name)
        for layer in layers
    }
    return Plan(assignments, epoch, facts)


def _saved(layer: Layer, codec: Codec, level: Level, dense: DenseCodec, size: int) -> int:
    """Bytes that a rank need not hand to collectives beyond its host; 0 if the link gains none."""
    # Plain allreduces in another dtype need no checks of their own.
    tail = 0 if isinstance(codec, DenseCodec) else carrier.LENGTH * layer.work_dtype.itemsize
    cost = codec.network_bytes(layer, level, size) + network_bytes(Kind.CARRIED, tail, size)
    if cost >= dense.network_bytes(layer, None, size):
        return 0
    return layer.dense_bytes - codec.outgoing_bytes(layer, level, size) - tail
