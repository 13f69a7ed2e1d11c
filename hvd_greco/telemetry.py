"""What a step really sent, counted from the buffers handed to the collectives."""

from __future__ import annotations

from dataclasses import dataclass

from .payload import Kind, network_bytes


@dataclass(frozen=True)
class LayerReport:
    """One layer in one step, on this rank.

    Attributes:
        name: the layer.
        codec: its codec.
        level: its level, or None.
        sent_bytes: bytes handed to collectives, the carrier included.
        local_bytes: those of them that went to collectives inside a host
            (``exchange="hierarchical"``), and were put on no link.
        dense_bytes: bytes of its uncompressed gradient, as ``greco.Dense`` would send it: its own
            dtype, but fp32 for bf16, which Horovod cannot add up.
        codec_seconds: time spent on encoding, decoding and memory, between waits; on a GPU, of
            launching that. 0 for dense layers.
    """

    name: str
    codec: str
    level: float | int | None
    sent_bytes: int
    local_bytes: int
    dense_bytes: int
    codec_seconds: float = 0.0


@dataclass(frozen=True)
class StepReport:
    """One step on this rank.

    Attributes:
        step: how many steps were completed before it.
        layers: one report for each layer that took part.
        beacon_bytes: bytes of the two small collectives a step that all layers share: the roll
            call and the checks.
        network_bytes: bytes that this rank must put on the link for all of it, by the best-known
            algorithm of each collective (``payload.network_bytes``).
        nonfinite: some rank had inf or NaN in some layer, and no state was changed.
    """

    step: int
    layers: tuple[LayerReport, ...]
    beacon_bytes: int
    network_bytes: int
    nonfinite: bool

    @property
    def sent_bytes(self) -> int:
        """All bytes handed to collectives in this step."""
        return self.beacon_bytes + sum(layer.sent_bytes for layer in self.layers)

    @property
    def dense_bytes(self) -> int:
        """Bytes of all uncompressed gradients."""
        return sum(layer.dense_bytes for layer in self.layers)

    @property
    def codec_seconds(self) -> float:
        """Time spent on encoding, decoding and memory in all layers, without waiting."""
        return sum(layer.codec_seconds for layer in self.layers)

    @property
    def ratio(self) -> float:
        """``dense_bytes`` by what was sent beyond this host: ``sent_bytes - local_bytes``."""
        outgoing = self.sent_bytes - sum(layer.local_bytes for layer in self.layers)
        return self.dense_bytes / outgoing if outgoing else float("nan")


class Ledger:
    """Counts one step's bytes while they are sent."""

    def __init__(self) -> None:
        self._sent: dict[str, int] = {}
        self._local: dict[str, int] = {}
        self._spent: dict[str, float] = {}
        self._beacon = 0
        self._network = 0

    def add(
        self, layer: str | None, kind: Kind, nbytes: int, world_size: int, local: bool = False
    ) -> None:
        """Count one collective.

        Args:
            layer: whose; None for what all layers share.
            kind: of the collective.
            nbytes: handed to it.
            world_size: ranks that take part.
            local: all of them are on one host.
        """
        if local and layer is not None:
            self._local[layer] = self._local.get(layer, 0) + nbytes
        if layer is None:
            self._beacon += nbytes
        else:
            self._sent[layer] = self._sent.get(layer, 0) + nbytes
        self._network += 0 if local else network_bytes(kind, nbytes, world_size)

    def spend(self, layer: str, seconds: float) -> None:
        """Count time that one layer took this rank's own processor."""
        self._spent[layer] = self._spent.get(layer, 0.0) + seconds

    def close(
        self, step: int, facts: dict[str, tuple[str, float | int | None, int]], nonfinite: bool
    ) -> StepReport:
        """The report of the step; ``facts`` maps a layer to its codec, level and dense bytes."""
        layers = tuple(
            LayerReport(
                name,
                codec,
                level,
                sent_bytes=self._sent.get(name, 0),
                local_bytes=self._local.get(name, 0),
                dense_bytes=dense,
                codec_seconds=self._spent.get(name, 0.0),
            )
            for name, (codec, level, dense) in facts.items()
        )
        report = StepReport(step, layers, self._beacon, self._network, nonfinite)
        self._sent, self._local, self._spent, self._beacon, self._network = {}, {}, {}, 0, 0
        return report
