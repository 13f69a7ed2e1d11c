"""Checks of arguments that several public functions take, each with an error that helps."""

from __future__ import annotations

import math
import numbers

from .errors import ConfigError


def check_density(argument: str, value: object) -> float:
    """A share in (0, 1], as a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(
            f"{argument}: needs a number in (0, 1], got {value!r} of type {type(value).__name__}"
        )
    density = float(value)
    if not (math.isfinite(density) and 0 < density <= 1):
        hint = f"; for {value} percent pass {density / 100:g}" if 1 < density <= 100 else ""
        raise ConfigError(f"{argument}: {value!r} is not in (0, 1]{hint}")
    return density


def check_count(argument: str, value: object, minimum: int = 0) -> int:
    """A whole number of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
        raise ConfigError(f"{argument}: needs a whole number >= {minimum}, got {value!r}")
    return int(value)


def check_nonnegative(argument: str, value: object) -> float:
    """A finite number of at least 0, as a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(
            f"{argument}: needs a number >= 0, got {value!r} of type {type(value).__name__}"
        )
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ConfigError(f"{argument}: {value!r} is not a finite number >= 0")
    return number
