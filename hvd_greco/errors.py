"""Every error this package raises on purpose, in one place, at the bottom of the import order.

Each message names the argument, the value that was given and what would work. All classes derive
from :class:`GrecoError`, so ``except greco.GrecoError`` catches what this package says and nothing
else; where a built-in class fits the fault (``ValueError``, ``ImportError``), the class derives
from it too, so that code which expects the built-in one keeps working.
"""

from __future__ import annotations


class GrecoError(Exception):
    """Base class of all errors raised by hvd_greco."""


class ConfigError(GrecoError, ValueError):
    """An argument has a value that cannot work."""


class HorovodNotFoundError(GrecoError, ImportError):
    """Horovod's torch extension cannot be imported."""


class NotInitializedError(GrecoError, RuntimeError):
    """``hvd.init()`` has not been called."""


class LaunchError(GrecoError, RuntimeError):
    """The job was started in a way in which Horovod and MPI do not see the same ranks."""


class UnknownTensorError(GrecoError, RuntimeError):
    """Horovod passed a tensor which is not the gradient of a parameter we were given."""


class UnsupportedError(GrecoError, RuntimeError):
    """A Horovod feature that cannot work together with this compressor."""


class MismatchError(GrecoError, RuntimeError):
    """Ranks disagree: on the process set, on the plan, or on what was sent."""


class PolicyError(GrecoError, RuntimeError):
    """An adaptive policy, or the statistics that it needs, failed on some rank; raised on all."""


class WireError(GrecoError, RuntimeError):
    """Bytes received from other ranks do not form a valid payload."""


class StallError(GrecoError, RuntimeError):
    """A rank did not take part in a collective within the time limit."""
