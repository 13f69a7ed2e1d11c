"""The plan of a compressor without a controller: one codec and level wherever it saves bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from . import carrier
from .codecs.base import Codec, Level
from .errors import ConfigError
from .layers import GRADIENT_DTYPES, Layer
from .payload import Kind, network_bytes
from .plan import Assignment, Plan, matches


def uniform_plan(
    layers: Iterable[Layer],
    codec: Codec,
    level: Level,
    dense: Codec,
    *,
    size: int,
    min_numel: int,
    exclude: Sequence[str],
    context: Mapping[str, str],
    epoch: int = 0,
) -> Plan:
    """Assign ``codec`` at ``level`` to every layer that takes part, and ``dense`` to the others.

    A layer goes dense if it has fewer than ``min_numel`` elements, if its name matches a pattern
    of ``exclude``, if its dtype is none that we compress, or if the payload would put no fewer
    bytes on the link than its gradient does, with as many ranks as there are, or if the codec has
    no use for its shape.
    """
    if isinstance(exclude, str):
        raise ConfigError(
            f"exclude: needs a sequence of patterns, got {exclude!r}; pass ({exclude!r},)"
        )
    assignments, facts = {}, {**context, **codec.context()}
    for layer in layers:
        tail = carrier.LENGTH * layer.work_dtype.itemsize
        cost = codec.network_bytes(layer, level, size) + network_bytes(Kind.CARRIED, tail, size)
        saves = cost < dense.network_bytes(layer, None, size)
        takes_part = (
            size > 1
            and layer.numel >= max(1, min_numel)
            and layer.dtype in GRADIENT_DTYPES
            and not matches(layer.name, exclude)
            and saves
            and codec.suits(layer, level)
        )
        chosen = Assignment(codec.name, level) if takes_part else Assignment(dense.name)
        assignments[layer.name] = chosen
        shape = "x".join(map(str, layer.shape))
        facts[f"shape of {layer.name}"] = f"{shape} {layer.dtype}"
    return Plan(assignments, epoch, facts)
