"""What is remembered of an interval: errors of every option, in O(layers x options) numbers.

One fixed fp64 buffer, laid out alike on all ranks (layers in the order of their names), so that one
sum over ranks is all that synchronises it. Errors are squared norms, which add up exactly over
layers, samples and ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .. import kernels
from ..codecs.base import Codec, Level, Work
from .options import Options

#: Of layers with more than this many elements a part is looked at: one block in four, other ones in
#: the next sample. Curves are shares of the energy, and a hundred thousand entries tell them.
_LARGE = 1 << 19
_BLOCK, _STRIDE = 4096, 4
#: Numbers of a layer beside its options' errors.
_ENERGY, _GRADIENT, _SAMPLES, _SECONDS, _STEPS = range(5)
_OTHERS = 5


@dataclass(frozen=True)
class Sums:
    """One layer over an interval and all ranks.

    Attributes:
        errors: squared error of each option, shape ``[options]``, summed over samples.
        energy: squared norm of what is encoded.
        gradient_energy: squared norm of the gradients.
        samples: how many were taken, over all ranks.
        codec_seconds: mean time in the codec in a step, as the plan was.
    """

    errors: np.ndarray
    energy: float
    gradient_energy: float
    samples: int
    codec_seconds: float = 0.0


def kept_back(sums: Sums, steps: int) -> np.ndarray:
    """Squared norm of what error feedback will hold after ``steps`` steps, for each option.

    An option that loses the share ``d`` of what it is given leaves, of a residual ``e`` and a
    gradient ``g``, about ``d (e^2 + g^2)`` after one step (gradients of different steps are taken
    as orthogonal), so after T steps ``d^T e^2 + (d + d^2 + ... + d^T) g^2``. One step's error alone
    says too little where much is lost: top-k at 1 % may lose 0.9 of a layer and skipping it 1.0,
    but after a hundred steps the one holds nine gradients, and the other a hundred.

    Args:
        sums: a layer's statistics.
        steps: of an interval.

    Returns:
        fp64, shape ``[options]``, summed over samples as the statistics are.
    """
    if sums.energy <= 0:
        return np.zeros_like(sums.errors)
    share = sums.errors / sums.energy
    gradient = min(sums.gradient_energy, sums.energy)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        left = share**steps
        near = np.abs(1 - share) < 1e-9
        total = np.where(near, float(steps), share * (1 - left) / np.where(near, 1.0, 1 - share))
        found = left * (sums.energy - gradient) + gradient * total
    # More than anybody can hold: no choice.
    return np.where(np.isfinite(found), found, np.inf)


def _part(vector: torch.Tensor, turn: int) -> torch.Tensor:
    """A large vector's entries that are looked at in a sample; a small one as it is."""
    if vector.numel() <= _LARGE:
        return vector
    whole = vector.numel() // _BLOCK * _BLOCK
    return vector[:whole].view(-1, _BLOCK)[turn % _STRIDE :: _STRIDE].reshape(-1)


class Statistics:
    """Sums over the samples of one interval.

    Args:
        options: the layers that have a choice.
        codecs: by name.
    """

    def __init__(self, options: Sequence[Options], codecs: Mapping[str, Codec]) -> None:
        self.options = sorted(options, key=lambda each: each.layer.name)
        self._codecs = codecs
        #: Where each layer's errors begin, and how many they are; then come its other numbers.
        self._place: dict[str, tuple[int, int]] = {}
        at = 0
        for each in self.options:
            self._place[each.layer.name] = at, len(each.assignments)
            at += len(each.assignments) + _OTHERS
        self._buffer = np.zeros(at)
        #: Samples of the present step, which counts only if no rank overflows in it.
        self._staged: dict[str, np.ndarray] = {}
        #: Shares of the energy that an option loses, where they are looked at once an interval.
        self._shares: dict[tuple[str, str], np.ndarray] = {}
        #: Counts samples, so that each looks at another part of large layers.
        self._turn = 0
        #: Which codec serves which options of a layer, worked out once.
        self._levels: dict[str, list[tuple[Codec, list[Level], list[int]]]] = {}
        for each in self.options:
            rows: dict[str, tuple[Codec, list[Level], list[int]]] = {}
            for i, assignment in enumerate(each.assignments[:-2]):
                codec = codecs[assignment.codec]
                _, levels, places = rows.setdefault(codec.name, (codec, [], []))
                levels.append(assignment.level)
                places.append(i)
            self._levels[each.layer.name] = list(rows.values())

    def nbytes(self) -> int:
        """Bytes held."""
        held = itertools.chain(self._staged.values(), self._shares.values())
        return self._buffer.nbytes + sum(each.nbytes for each in held)

    def knows(self, layer: str) -> bool:
        """Whether the layer has a choice."""
        return layer in self._place

    def add(self, work: Work, vector: torch.Tensor, gradient_energy: float) -> None:
        """One sample of one layer.

        Args:
            work: the layer in the present step.
            vector: what would be encoded: gradient and residual, shape ``[d]``.
            gradient_energy: squared norm of the gradient alone, loss scale divided out.
        """
        name = work.layer.name
        energy = kernels.squared_norm(vector)
        if not np.isfinite(energy):
            return  # the step will not be accepted
        _, count = self._place[name]
        sample = np.zeros(count + _OTHERS)
        part = _part(vector, self._turn)
        for codec, levels, places in self._levels[name]:
            if codec.errors_of_parts:
                known = kernels.squared_norm(part) if part is not vector else energy
                errors = np.asarray(codec.errors(work, part, levels), dtype=np.float64)
                sample[places] = errors * (energy / known) if known > 0 else energy
                continue
            share = self._shares.get((name, codec.name))
            if share is None:
                errors = np.asarray(codec.errors(work, vector, levels), dtype=np.float64)
                share = errors / energy if energy > 0 else np.zeros(len(levels))
                self._shares[name, codec.name] = share
            sample[places] = share * energy
        sample[count - 2] = energy  # skip; dense, the last, loses nothing
        others = sample[count:]
        others[_ENERGY], others[_GRADIENT], others[_SAMPLES] = energy, gradient_energy, 1
        self._staged[name] = sample

    def close(self, accepted: bool) -> None:
        """End a step: its samples count if it was ``accepted``, on all ranks or on none."""
        if accepted:
            self._turn += bool(self._staged)
            for name, sample in self._staged.items():
                at = self._place[name][0]
                self._buffer[at : at + sample.size] += sample
        self._staged.clear()

    def spend(self, layer: str, seconds: float) -> None:
        """Time that a layer's codec took in one step."""
        at = sum(self._place[layer])
        self._buffer[at + _SECONDS] += seconds
        self._buffer[at + _STEPS] += 1

    def take(self) -> np.ndarray:
        """The buffer, to be summed over ranks; starts anew."""
        taken, self._buffer = self._buffer, np.zeros_like(self._buffer)
        self._shares.clear()
        return taken

    def read(self, total: np.ndarray) -> dict[str, Sums]:
        """The layers' sums from a buffer that was summed over ranks."""
        found = {}
        for each in self.options:
            at, count = self._place[each.layer.name]
            errors, others = total[at : at + count], total[at + count : at + count + _OTHERS]
            found[each.layer.name] = Sums(
                errors=errors.copy(),
                energy=float(others[_ENERGY]),
                gradient_energy=float(others[_GRADIENT]),
                samples=int(others[_SAMPLES]),
                codec_seconds=float(others[_SECONDS] / max(1.0, others[_STEPS])),
            )
        return found
