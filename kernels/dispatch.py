"""Which backend serves an operation, and the checks that every entry of the table begins with.

A device type's backend is imported when its first tensor comes. If that fails (no CuPy, a Numba
that does not fit this NumPy), the reason is logged once and the portable backend serves the
device: slower, and the same results.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from types import ModuleType
from typing import Any

import torch

from ..errors import ConfigError
from . import portable, portable_linalg, portable_quant

_log = logging.getLogger("hvd_greco")

#: What serves every device that has nothing faster, operation by operation.
_PORTABLE = (portable, portable_quant, portable_linalg)
#: Device type -> module, below this package.
_MODULES = {"cpu": ".cpu", "cuda": ".cuda"}
#: ``portable`` here switches the others off, for comparisons and for a machine they fail on.
VARIABLE = "HVD_GRECO_KERNELS"

_BACKENDS: dict[str, ModuleType | None] = {}
_importing = threading.RLock()


def register_backend(device_type: str, module: ModuleType | None) -> None:
    """Let ``module`` serve tensors on ``device_type`` (``"cpu"``, ``"cuda"``).

    Operations that the module lacks are served by the portable backend; None leaves it all.
    """
    _BACKENDS[device_type] = module


def backend_of(device_type: str) -> ModuleType | None:
    """The module that serves a device type; None if the portable backend does."""
    if device_type not in _BACKENDS:
        with _importing:
            if device_type not in _BACKENDS:
                _BACKENDS[device_type] = _load(device_type)
    return _BACKENDS[device_type]


def _load(device_type: str) -> ModuleType | None:
    name = _MODULES.get(device_type)
    if name is None or os.environ.get(VARIABLE) == "portable":
        return None
    try:
        module = importlib.import_module(name, __package__)
        # A backend that is not for every machine says so itself, and what it consists of.
        return module.load() if hasattr(module, "load") else module
    except Exception as error:  # whatever a broken installation may raise
        _log.warning(
            "kernels for %s are not available (%s: %s); slower ones in torch serve instead",
            device_type, type(error).__name__, error,
        )  # fmt: skip
        return None


def call(name: str, tensor: torch.Tensor, *arguments: object) -> Any:
    """Run operation ``name`` on the backend that serves ``tensor``'s device."""
    operation = getattr(backend_of(tensor.device.type), name, None)
    if operation is None:
        operation = next(filter(None, (getattr(module, name, None) for module in _PORTABLE)))
    return operation(tensor, *arguments)


def need_flat(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Raise :class:`ConfigError` unless ``tensor`` is 1-D, contiguous and of one of ``dtypes``."""
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ConfigError(
            f"{name}: needs a contiguous 1-D tensor, got shape {tuple(tensor.shape)} with "
            f"strides {tensor.stride()}"
        )
    if tensor.dtype not in dtypes:
        raise ConfigError(
            f"{name}: needs dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}"
        )
