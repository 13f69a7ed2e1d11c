"""The errors of the lab."""

from __future__ import annotations

from ..errors import ConfigError, GrecoError


class LabError(GrecoError, RuntimeError):
    """The lab cannot be made, found or used; the message says why and what to type."""


class LabConfigError(LabError, ConfigError):
    """An argument of a lab's command has a value that cannot work."""
