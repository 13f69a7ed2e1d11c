"""The one error of the builder."""

from __future__ import annotations

from ..errors import GrecoError


class InstallError(GrecoError, RuntimeError):
    """Horovod cannot be built or installed as asked; the message says why and what to type."""
