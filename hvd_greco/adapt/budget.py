"""What a plan may cost: an error, a ratio, or a step's time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import ConfigError

_FORMS = "a factor of the uniform default's error (1.0), 'ratio:100' or 'step:0.120' (seconds)"


@dataclass(frozen=True)
class Budget:
    """One of three limits.

    Attributes:
        kind: ``"error"``: ``value`` times the uniform default's error; ``"ratio"``: dense bytes by
            bytes on the link, at least ``value``; ``"step"``: predicted seconds of a step, at most
            ``value``.
        value: positive (an error may be 0: nothing may be lost).
    """

    kind: str
    value: float

    def __str__(self) -> str:
        return f"{self.kind}:{self.value:g}"


def parse_budget(budget: float | str | Budget) -> Budget:
    """A budget as users write it: ``1.0``, ``"error:1.0"``, ``"ratio:100"`` or ``"step:0.12"``.

    Raises:
        ConfigError: none of these.
    """
    if isinstance(budget, Budget):
        return budget
    kind, _, text = str(budget).rpartition(":")
    kind = kind or "error"
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    least = 0.0 if kind == "error" else 1e-300
    if kind not in ("error", "ratio", "step") or not (least <= value < math.inf):
        raise ConfigError(f"budget: {budget!r} is none of {_FORMS}")
    return Budget(kind, value)
