"""What a controller needs to know of time: collectives and codecs once, steps in every interval."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..codecs.base import Codec
from ..codecs.dense import DenseCodec
from ..exchange.base import Group
from ..exchange.control import Control
from ..layers import Layer
from ..memories.base import Memory
from ..payload import Kind
from .calibrate import CodecTimes, measure_codecs
from .links import Links, measure_links
from .options import Options
from .pipeline import Part, StepModel
from .statistics import Sums
from .timeline import Timeline, Times, slowest

#: Steps after a change of plan that say little: names are negotiated, buffers are made.
SETTLING = 3


class Timing:
    """Times of one compressor's layers.

    Args:
        layers: all of them.
        options: of those that have a choice.
        codecs: by name.
        dense: the codec of the others.

    Attributes:
        timeline: to be told of every step.
        spent: seconds that measuring took at the start.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        options: Sequence[Options],
        codecs: Mapping[str, Codec],
        dense: DenseCodec,
    ) -> None:
        self._layers = list(layers)
        self._options = {each.layer.name: each for each in options}
        self._codecs = {**codecs, dense.name: dense}
        self._dense = dense
        self.timeline = Timeline([layer.name for layer in layers])
        self.spent = 0.0
        self._links: Links | None = None
        self._codec_times: CodecTimes | None = None
        self._slow = 1.0

    def measure(self, group: Group, prefix: str, memory: Memory) -> None:
        """Time collectives and codecs, once; all ranks at the same point."""
        if self._links is not None:
            return
        began = time.perf_counter()
        kinds = [Kind.SUM] + [codec.kind for codec in self._codecs.values()]
        kinds = [kind for kind in dict.fromkeys(kinds) if kind is not Kind.NOTHING]
        self._links = measure_links(group, prefix, kinds)
        self._codec_times = measure_codecs(
            list(self._options.values()), self._codecs, memory, group.size
        )
        self.spent = time.perf_counter() - began

    def model(
        self, control: Control, sums: Mapping[str, Sums], current: Mapping[str, int], size: int
    ) -> tuple[StepModel, float]:
        """The model as of the interval that ended, and what its steps took; on all ranks alike.

        Seconds are NaN if no step of the interval was like others.
        """
        own = self.timeline.take()
        packed = np.append(own.ready, own.total).astype("<f8").tobytes()
        rows = [np.frombuffer(each, dtype="<f8") for each in control.gather(packed)]
        times = slowest([Times(row[:-1], float(row[-1])) for row in rows])
        ready = {
            layer.name: float(at)
            for layer, at in zip(self._layers, times.ready, strict=True)
            if np.isfinite(at)
        }
        scales = self._scales(sums, current, size)
        parts = {
            layer.name: self._parts(layer, scales, size)
            for layer in self._layers
            if layer.name in ready
        }
        assert self._links is not None
        model = StepModel(ready, parts, self._links, self._slow)
        if np.isfinite(times.total) and ready:
            model = model.fitted(current, times.total)
            self._slow = model.slow
        return model, times.total

    def _scales(
        self, sums: Mapping[str, Sums], current: Mapping[str, int], size: int
    ) -> dict[str, float]:
        """How much longer codecs take in the job than they did by themselves."""
        assert self._codec_times is not None
        found: dict[str, list[float]] = {}
        for name, each in self._options.items():
            assignment = each.assignments[current[name]]
            took = sums[name].codec_seconds
            alone = self._codec_times.seconds(
                self._codecs[assignment.codec], each.layer, assignment, size
            ).sum()
            if took > 0 and alone > 0:
                found.setdefault(assignment.codec, []).append(took / alone)
        return {codec: float(np.clip(np.median(each), 0.2, 10.0)) for codec, each in found.items()}

    def _parts(self, layer: Layer, scales: Mapping[str, float], size: int) -> list[Part]:
        options = self._options.get(layer.name)
        if options is None:
            nbytes = self._dense.network_bytes(layer, None, size)
            return [Part(0.0, 0.0, Kind.CARRIED, nbytes)]
        assert self._codec_times is not None
        found = []
        # A codec that is not in use is slowed down as those are that are.
        usual = float(np.median(list(scales.values()))) if scales else 1.0
        for assignment in options.assignments:
            codec = self._codecs[assignment.codec]
            seconds = self._codec_times.seconds(codec, layer, assignment, size)
            encode, decode = seconds * scales.get(codec.name, usual)
            nbytes = codec.network_bytes(layer, assignment.level, size)
            part = Part(float(encode), float(decode), codec.kind, nbytes, codec.rounds)
            if isinstance(codec, DenseCodec):
                part = replace(part, kind=Kind.CARRIED)
            found.append(part)
        return found
