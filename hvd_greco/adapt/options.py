"""What each layer may be given: codecs and levels with their bytes, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .. import carrier
from ..codecs.base import Codec, Level
from ..codecs.dense import DenseCodec
from ..codecs.skip import SkipCodec
from ..config import check_density, check_level_count
from ..errors import ConfigError
from ..layers import GRADIENT_DTYPES, Layer
from ..memories.base import Memory
from ..payload import Kind, network_bytes
from ..plan import Assignment, matches

#: Family -> codecs that it chooses among, beside dense and skip.
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "topk": ("topk",),
    "qsgd": ("qsgd",),
    "powersgd": ("powersgd",),
    "acp": ("acp",),
    "auto": ("topk", "qsgd", "powersgd", "fp16"),
}
#: Levels beside the default: what it is multiplied by.
_DENSITIES = tuple(2.0 ** (i / 2) for i in range(-8, 11))
_RANKS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
_BITS = (2, 3, 4, 5, 6, 7, 8)


@dataclass(frozen=True)
class Options:
    """One layer's choices, in a fixed order; the last two are ``skip`` and ``dense``.

    Attributes:
        layer: which.
        assignments: what each option is.
        bytes: what a rank puts on the link in a step for it, the carrier included.
        default: place of the uniform default, or of ``dense`` where that would not compress.
    """

    layer: Layer
    assignments: tuple[Assignment, ...]
    bytes: tuple[float, ...]
    default: int

    def place(self, assignment: Assignment) -> int:
        """Where an assignment stands; raises ValueError if it is none of ours."""
        return self.assignments.index(assignment)

    @property
    def skip(self) -> int:
        """Place of skip."""
        return len(self.assignments) - 2

    @property
    def dense(self) -> int:
        """Place of dense."""
        return len(self.assignments) - 1

    def levels(self, codec: str) -> list[Level]:
        """The levels of one codec, in order."""
        return [a.level for a in self.assignments if a.codec == codec]


def menu(codec: Codec, default: Level) -> Sequence[Level]:
    """Levels around a default: densities by factors of 1.41, ranks by a quarter to four times.

    Raises:
        ConfigError: the default is no level of the codec.
    """
    if codec.name == "topk":
        density = check_density("default", default)
        return sorted({float(f"{min(1.0, density * f):.3g}") for f in _DENSITIES})
    if codec.name in ("powersgd", "acp"):
        rank = check_level_count("default", default, minimum=1)
        return sorted({max(1, round(rank * f)) for f in _RANKS})
    if codec.name == "qsgd":
        return list(_BITS)
    if codec.name == "fp16":
        return [None]
    raise ConfigError(f"codec: {codec.name!r} has no levels to choose from")


def layer_options(
    layer: Layer,
    codecs: Sequence[tuple[Codec, Sequence[Level]]],
    default: Assignment,
    memory: Memory,
    dense: DenseCodec,
    skip: SkipCodec,
    *,
    size: int,
    min_numel: int,
    exclude: Sequence[str],
) -> Options | None:
    """A layer's options; None if it always goes dense.

    An option that puts no fewer bytes on the link than dense does is left out.

    Args:
        layer: which.
        codecs: codecs with their levels, in order.
        default: the uniform default.
        memory: what happens to what is not sent; decides which levels may be.
        dense: no compression.
        skip: nothing is sent.
        size: ranks.
        min_numel: layers with fewer elements go dense.
        exclude: patterns of names that go dense.
    """
    if (
        size < 2
        or layer.numel < max(1, min_numel)
        or layer.dtype not in GRADIENT_DTYPES
        or matches(layer.name, exclude)
    ):
        return None
    tail = network_bytes(Kind.CARRIED, carrier.LENGTH * layer.work_dtype.itemsize, size)
    most = dense.network_bytes(layer, None, size)
    found: list[tuple[Assignment, float]] = []
    for codec, levels in codecs:
        seen: set[float] = set()
        bare = isinstance(codec, DenseCodec)
        for level in levels:
            cost = codec.network_bytes(layer, level, size) + (0 if bare else tail)
            # Levels that come to the same (ranks above the matrix's, say) are one option.
            if cost >= most or cost in seen or not codec.suits(layer, level):
                continue
            if not bare and not _allowed(memory, codec, level):
                continue
            seen.add(cost)
            found.append((Assignment(codec.name, level), float(cost)))
    if not found:
        return None
    found += [(Assignment(skip.name), float(tail)), (Assignment(dense.name), float(most))]
    assignments = tuple(assignment for assignment, _ in found)
    where = assignments.index(default) if default in assignments else len(found) - 1
    return Options(layer, assignments, tuple(cost for _, cost in found), where)


def _allowed(memory: Memory, codec: Codec, level: Level) -> bool:
    try:
        memory.check(codec, level)
    except ConfigError:
        return False
    return True
