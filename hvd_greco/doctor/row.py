"""One line of the doctor's table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OK, WARN, MISSING, BROKEN = "ok", "warn", "missing", "broken"


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: the subject.
        status: ``ok``, ``warn`` (works, but look), ``missing``, or ``broken`` (there, but does not
            work).
        found: what is there.
        advice: what to type; empty where nothing needs doing.
        required: whether training on the CPU fails while this row is missing or broken.
    """

    name: str
    status: str
    found: str
    advice: str = ""
    required: bool = False

    @property
    def stops(self) -> bool:
        """Whether training on the CPU cannot work because of this row."""
        return self.required and self.status in (MISSING, BROKEN)


def cpu_path_works(rows: Sequence[Row]) -> bool:
    """Whether a job on the CPU would run with what was found."""
    return not any(row.stops for row in rows)
