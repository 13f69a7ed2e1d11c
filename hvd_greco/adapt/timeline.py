"""When gradients are ready in a step, and how long steps take: medians of the last ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Steps that are remembered.
KEEP = 48


@dataclass(frozen=True)
class Times:
    """One rank's steps, in seconds since the end of the step before.

    Attributes:
        ready: when each layer's gradient was there, encoding of others subtracted; shape
            ``[layers]``, NaN for layers that took no part.
        total: when the step ended; NaN if none was timed.
    """

    ready: np.ndarray
    total: float


class Timeline:
    """Listens to one compressor.

    A step ends with its last mean. What the optimizer does then belongs to the next one, in which
    it comes before the first gradient.

    Args:
        names: the layers.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._place = {name: i for i, name in enumerate(names)}
        self._rows = np.full((KEEP, len(names) + 1), np.nan)
        self._count = 0
        self._ended: float | None = None
        self._begin()

    def _begin(self) -> None:
        self._row = np.full(self._rows.shape[1], np.nan)
        self._spent = 0.0
        self._since = 0.0

    def enter(self, layer: str) -> None:
        """A gradient is ready, and encoding begins."""
        self._since = time.perf_counter()
        if self._ended is not None:
            self._row[self._place[layer]] = self._since - self._ended - self._spent

    def leave(self) -> None:
        """Encoding has ended."""
        self._spent += time.perf_counter() - self._since

    def close(self, usual: bool) -> None:
        """The step has ended; ``usual``: it says something about others like it."""
        if usual and self._ended is not None:
            self._row[-1] = time.perf_counter() - self._ended
            self._rows[self._count % KEEP] = self._row
            self._count += 1
        self._begin()

    def resume(self) -> None:
        """The next step begins now."""
        self._ended = time.perf_counter()

    def forget(self) -> None:
        """Begin anew: another plan is in force."""
        self._rows[:] = np.nan
        self._count = 0

    def take(self) -> Times:
        """Medians of what is remembered."""
        rows = self._rows[: min(self._count, KEEP)]
        if not len(rows):
            rows = np.full((1, self._rows.shape[1]), np.nan)
        seen = np.isfinite(rows).any(axis=0)
        medians = np.full(rows.shape[1], np.nan)
        medians[seen] = np.nanmedian(rows[:, seen], axis=0)
        return Times(medians[:-1], float(medians[-1]))


def slowest(times: Sequence[Times]) -> Times:
    """Of all ranks: a collective begins when the last of them is ready."""
    with np.errstate(all="ignore"):
        ready = np.fmax.reduce([each.ready for each in times])
    return Times(ready, float(np.fmax.reduce([each.total for each in times])))
