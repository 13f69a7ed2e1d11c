"""The log of decisions: one JSON object a line, written by rank 0 as they are made.

A line is an :class:`Interval` (what was decided, why, what that took) or a :class:`LayerLine` (one
layer of it). :func:`read_journal` checks every line against these records.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ..errors import ConfigError

_log = logging.getLogger("hvd_greco")

#: Lines longer than this are no journal's.
_MOST_BYTES = 1 << 20


class Interval(msgspec.Struct, tag="interval", tag_field="kind"):
    """One decision.

    Attributes:
        interval: how many came before.
        step: completed steps; the decision is in force from the next one on.
        policy: who decided.
        reason: why.
        changed: layers whose option changed.
        bytes: bytes on the link in a step, as decided; ``bytes_before`` as it was.
        error: predicted squared error of all layers, over the interval's samples and ranks, by
            the decision; ``error_default`` by the uniform default.
        seconds: rank 0's time for statistics, synchronisation and the decision itself.
        figures: further numbers of the policy.
        measured_seconds: of a step in the interval that ended, the median; None: not measured.
        predicted_seconds: of a step from here on, by the model.
    """

    interval: int
    step: int
    policy: str
    reason: str
    changed: int
    bytes: float
    bytes_before: float
    error: float
    error_default: float
    seconds: dict[str, float]
    figures: dict[str, float] = {}
    measured_seconds: float | None = None
    predicted_seconds: float | None = None


class LayerLine(msgspec.Struct, tag="layer", tag_field="kind"):
    """One layer in one decision.

    Attributes:
        interval: as for the decision.
        layer: its name.
        old: codec and level before, as text.
        new: from now on.
        bytes: on the link in a step.
        error: predicted squared error, over samples and ranks.
        energy: squared norm of what is encoded, likewise.
        codec_seconds: measured, in a step of the interval that ended (of all ranks, the mean).
        reason: why it changed or not, where there is more to say than for the whole.
        predicted_codec_seconds: in a step from here on, by the model; None: not asked for.
        predicted_link_seconds: likewise, of the bytes alone, whether they overlap or not.
    """

    interval: int
    layer: str
    old: str
    new: str
    bytes: float
    error: float
    energy: float
    codec_seconds: float
    reason: str = ""
    predicted_codec_seconds: float | None = None
    predicted_link_seconds: float | None = None


Line = Interval | LayerLine


class Journal:
    """Appends lines to a file.

    Args:
        path: where; None: nowhere. Begun anew.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
        except OSError as error:
            raise ConfigError(f"log: {str(path)!r} cannot be written ({error})") from error

    def write(self, lines: Iterable[Line]) -> None:
        """Append; a full disk ends the log, and not the training."""
        if self._path is None:
            return
        text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        try:
            with self._path.open("ab") as file:
                file.write(text)
        except OSError as error:
            _log.warning("the log of decisions ends here: %s (%s)", self._path, error)
            self._path = None


def read_journal(path: Path) -> list[Line]:
    """All lines of a log.

    Raises:
        ConfigError: the file cannot be read, or a line is none of ours; says which.
    """
    found: list[Line] = []
    decoder = msgspec.json.Decoder(Line)
    try:
        with path.open("rb") as file:
            while line := file.readline(_MOST_BYTES + 1):
                if len(line) > _MOST_BYTES:
                    raise ConfigError(
                        f"{path}: line {len(found) + 1} is longer than {_MOST_BYTES:,} bytes"
                    )
                found.append(decoder.decode(line))
    except OSError as error:
        raise ConfigError(f"{path}: {error}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: line {len(found) + 1}: {error}") from error
    return found
