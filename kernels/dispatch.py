"""Which backend serves an operation, and the checks that every entry of the table begins with."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from ..errors import ConfigError
from . import portable, portable_linalg, portable_quant

#: What serves every device that has nothing faster, operation by operation.
_PORTABLE = (portable, portable_quant, portable_linalg)
_BACKENDS: dict[str, ModuleType] = {}


def register_backend(device_type: str, module: ModuleType) -> None:
    """Let ``module`` serve tensors on ``device_type`` (``"cpu"``, ``"cuda"``).

    Operations that the module lacks are served by the portable backend.
    """
    _BACKENDS[device_type] = module


def call(name: str, tensor: torch.Tensor, *arguments: object) -> Any:
    """Run operation ``name`` on the backend that serves ``tensor``'s device."""
    candidates = (_BACKENDS.get(tensor.device.type), *_PORTABLE)
    operation = next(filter(None, (getattr(module, name, None) for module in candidates)))
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
