"""CUDA kernels: ``.cu`` files launched through CuPy, and Python that Numba compiles.

:mod:`.operations` is the backend. Importing this package needs neither CuPy nor a GPU.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from ...errors import ConfigError
from .runtime import unavailable


def load() -> ModuleType:
    """The backend's operations.

    Raises:
        ConfigError: kernels cannot be launched here; says why, and what to install.
    """
    reason = unavailable()
    if reason:
        raise ConfigError(reason)
    return importlib.import_module(".operations", __name__)
