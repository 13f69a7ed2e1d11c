"""Checks of arguments that several public functions take, each with an error that helps."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

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
    """A whole number of at least ``minimum``, and below 2**63, which all that counts can hold."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < minimum:
        raise ConfigError(f"{argument}: needs a whole number >= {minimum}, got {value!r}")
    if int(value) >= 2**63:
        raise ConfigError(f"{argument}: needs a whole number below 2**63, got {value!r}")
    return int(value)


def check_level_count(argument: str, value: object, minimum: int) -> int:
    """:func:`check_count` for a level; a whole float counts, as controllers and files have it."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return check_count(argument, value, minimum)


def check_flag(argument: str, value: object) -> bool:
    """True or False, and nothing that merely counts as one."""
    if not isinstance(value, bool):
        raise ConfigError(f"{argument}: needs True or False, got {value!r}")
    return value


def check_name(argument: str, value: object) -> str | None:
    """A text that is not empty, or None."""
    if value is not None and not (isinstance(value, str) and value):
        raise ConfigError(f"{argument}: needs a text that is not empty, or None, got {value!r}")
    return value


def check_callable(argument: str, value: object, example: str) -> Any:
    """Something to call, or None."""
    if value is not None and not callable(value):
        raise ConfigError(f"{argument}: needs a callable such as {example}, got {value!r}")
    return value


def check_patterns(argument: str, value: object) -> tuple[str, ...]:
    """Several texts, as a tuple."""
    if isinstance(value, str):
        raise ConfigError(
            f"{argument}: needs a sequence of patterns, got {value!r}; pass ({value!r},)"
        )
    patterns = tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(
            f'{argument}: needs a sequence of patterns such as ("*.bias",), got {value!r}'
        )
    return patterns


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
