"""Layer-adaptive gradient compression for PyTorch models trained with stock Horovod.

One keyword argument in a script that already works::

    import horovod.torch as hvd
    import hvd_greco as greco

    hvd.init()
    compression = greco.TopK(model.named_parameters(), density=0.01)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )

Public names are loaded when first used, so that ``hvd-greco install-horovod`` and
``hvd-greco doctor`` work on a machine where Horovod or torch is missing or broken.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .errors import (
    ConfigError,
    GrecoError,
    HorovodNotFoundError,
    LaunchError,
    MismatchError,
    NotInitializedError,
    PolicyError,
    StallError,
    UnknownTensorError,
    UnsupportedError,
    WireError,
)

if TYPE_CHECKING:
    from .adapt.other_policies import AccordionPolicy, SchedulePolicy
    from .adapt.policy import Decision, Evidence, Policy
    from .codecs.base import Codec
    from .compressor import Compressor
    from .constructors import Dense
    from .exchange.hosts import host_process_sets
    from .exchange.local import LocalGroup
    from .layers import Layer, LayerState
    from .payload import Payload
    from .plan import Plan
    from .telemetry import LayerReport, StepReport

#: public name -> module that defines it
_LAZY = {
    "AccordionPolicy": "adapt.other_policies",
    "SchedulePolicy": "adapt.other_policies",
    "Compressor": "compressor",
    "Dense": "constructors",
    "Codec": "codecs.base",
    "Decision": "adapt.policy",
    "Evidence": "adapt.policy",
    "Policy": "adapt.policy",
    "LocalGroup": "exchange.local",
    "host_process_sets": "exchange.hosts",
    "Layer": "layers",
    "LayerState": "layers",
    "Payload": "payload",
    "Plan": "plan",
    "StepReport": "telemetry",
    "LayerReport": "telemetry",
}

__all__ = [
    "ACP",
    "DGC",
    "QSGD",
    "AccordionPolicy",
    "Codec",
    "Compressor",
    "ConfigError",
    "Decision",
    "Dense",
    "Evidence",
    "GrecoError",
    "HorovodNotFoundError",
    "LGreco",
    "LaunchError",
    "Layer",
    "LayerReport",
    "LayerState",
    "LocalGroup",
    "MismatchError",
    "Natural",
    "NotInitializedError",
    "Payload",
    "Plan",
    "Policy",
    "PolicyError",
    "PowerSGD",
    "RandomK",
    "SchedulePolicy",
    "SharedTopK",
    "Sign",
    "StallError",
    "StepReport",
    "SummableQuant",
    "TopK",
    "UnknownTensorError",
    "UnsupportedError",
    "WireError",
    "__version__",
    "host_process_sets",
]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is not None:
        value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    else:
        # Constructors of codecs (TopK, RandomK, ...) are made from the registry.
        value = None
        if name[:1].isupper():
            constructors = importlib.import_module(f"{__name__}.constructors")
            value = constructors.by_public_name(name)
        if value is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


# The command line has better to say about it: `doctor` and `install-horovod` are the remedy.
_in_cli = os.path.basename(sys.argv[0]) == "hvd-greco"
if not _in_cli and importlib.util.find_spec("horovod") is None:
    warnings.warn(
        "Horovod is not installed, and `pip install horovod` fails against torch >= 2.1. "
        "Run `hvd-greco install-horovod`: it builds Horovod 0.28.1 for the torch and MPI of this "
        "Python (minutes, once), then everything here works.",
        stacklevel=2,
    )
