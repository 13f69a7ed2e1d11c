"""What encoding and decoding take on this machine: measured on a few layers, fitted for the rest.

A codec's time is taken as ``a + b * elements + c * effort`` with coefficients from 0 up, where the
codec itself says what its effort grows with (``Codec.effort``): bytes to decode, or elements times
rank. The whole path of a layer is timed, carrier and memory included, over a group that echoes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..codecs.base import Codec
from ..exchange.echo import EchoGroup
from ..identity import Slot
from ..layers import Layer
from ..memories.base import Memory
from ..plan import Assignment, Plan
from ..reduction import Reduction
from .options import Options

#: Layers to measure: that many, from the smallest to the largest, but none with more elements.
_LAYERS, _MOST_ELEMENTS = 3, 1 << 21
_REPEATS = 3
#: Once this many seconds have gone by, what is left to measure is measured once only.
_PATIENCE = 1.0


@dataclass(frozen=True)
class CodecTimes:
    """Coefficients by codec: of encoding and of decoding, each for 1, elements and effort."""

    coefficients: Mapping[str, tuple[np.ndarray, np.ndarray]]

    def seconds(self, codec: Codec, layer: Layer, assignment: Assignment, size: int) -> np.ndarray:
        """Seconds of encoding and of decoding, fp64, shape ``[2]``."""
        features = _features(codec, layer, assignment, size)
        encode, decode = self.coefficients[codec.name]
        return np.array([features @ encode, features @ decode])


def _features(codec: Codec, layer: Layer, assignment: Assignment, size: int) -> np.ndarray:
    return np.array([1.0, layer.numel, codec.effort(layer, assignment.level, size)])


def measure_codecs(
    options: Sequence[Options], codecs: Mapping[str, Codec], memory: Memory, size: int
) -> CodecTimes:
    """Time every codec on a few of the layers, at its lowest and its highest level.

    Args:
        options: the layers with a choice; at least one.
        codecs: by name; those that no layer has as an option are left out.
        memory: as the compressor has it.
        size: number of ranks, whose payloads are decoded.
    """
    by_size = sorted(options, key=lambda each: each.layer.numel)
    fit = [each for each in by_size if each.layer.numel <= _MOST_ELEMENTS] or by_size[:1]
    places = np.unique(np.linspace(0, len(fit) - 1, _LAYERS).round().astype(int))
    began = time.perf_counter()
    points: dict[str, list[tuple[np.ndarray, float, float]]] = {}
    for place in places:
        each = fit[place]
        by_codec: dict[str, list[Assignment]] = {}
        for assignment in each.assignments:
            by_codec.setdefault(assignment.codec, []).append(assignment)
        for name, assignments in by_codec.items():
            for assignment in dict.fromkeys((assignments[0], assignments[-1])):
                late = time.perf_counter() - began > _PATIENCE
                took = _measure(each.layer, assignment, codecs, memory, size, 1 if late else 0)
                where = _features(codecs[name], each.layer, assignment, size)
                points.setdefault(name, []).append((where, *took))
    found = {}
    for name, rows in points.items():
        features = np.array([row[0] for row in rows])
        encode, decode = (np.array([row[i] for row in rows]) for i in (1, 2))
        found[name] = _fit(features, encode), _fit(features, decode)
    return CodecTimes(found)


def _measure(
    layer: Layer,
    assignment: Assignment,
    codecs: Mapping[str, Codec],
    memory: Memory,
    size: int,
    repeats: int,
) -> tuple[float, float]:
    """Seconds of encoding and of decoding one layer: the medians."""
    parameter = torch.nn.Parameter(torch.zeros(layer.shape, dtype=layer.dtype))
    gradient = torch.randn(layer.shape, generator=torch.Generator().manual_seed(0)).to(layer.dtype)
    slot = Slot(layer, parameter)
    reduction = Reduction(EchoGroup(size), memory, "calibration", 0)
    plan = Plan({layer.name: assignment})
    took = []
    for _ in range(1 + (repeats or _REPEATS)):
        parameter.grad = gradient.clone()
        slot.fresh = True
        reduction.open(1.0)
        reduction.adopt(plan, codecs)
        began = time.perf_counter()
        carried, pending = reduction.start(
            slot, parameter.grad, codecs[assignment.codec], assignment.level
        )
        reduction.advance(complete=True)
        encoded = time.perf_counter()
        reduction.finish(pending, carried)
        decoded = time.perf_counter()
        reduction.close()
        took.append((encoded - began, decoded - encoded))
    encode, decode = np.median(took[1:], axis=0)
    return float(encode), float(decode)


def _fit(features: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Coefficients from 0 up with the least sum of squared relative errors."""
    rows = features / seconds[:, None]
    best, coefficients = np.inf, np.zeros(features.shape[1])
    for count in range(1, features.shape[1] + 1):
        for chosen in map(list, itertools.combinations(range(features.shape[1]), count)):
            found, *_ = np.linalg.lstsq(rows[:, chosen], np.ones(len(rows)), rcond=None)
            if (found < 0).any():
                continue
            error = float(np.square(rows[:, chosen] @ found - 1).sum())
            # More coefficients than points fit anything.
            if error < best * (1 - 1e-6) and count <= len(rows):
                best, coefficients = error, np.zeros(features.shape[1])
                coefficients[chosen] = found
    return coefficients
