"""Building stock Horovod 0.28.1 for the torch, Python and MPI that are installed here.

``pip install horovod`` fails against every torch since 2.1, so users need this before anything
else in the package. It changes nothing in Horovod's behaviour: a handful of build settings, each
listed with its reason by ``hvd-greco install-horovod --dry-run``. The wheel is built once and
kept in the user's cache, whose key holds all that the compiled code depends on.

The steps, each a module of its own: ``facts`` (what is here), ``plan`` (what to build), ``source``
(Horovod's own source, by its hash), ``patches``, ``build``, ``cache``, ``installer`` (all of it in
order). Nothing here imports torch: the builder has to work where torch's import fails.
"""

from __future__ import annotations

from .cache import WheelCache
from .errors import InstallError
from .facts import MpiFacts, TorchFacts, find_mpi, find_torch
from .installer import ensure_wheel, install_horovod
from .plan import BuildOptions, BuildPlan, make_plan
from .source import HOROVOD_VERSION

__all__ = [
    "HOROVOD_VERSION",
    "BuildOptions",
    "BuildPlan",
    "InstallError",
    "MpiFacts",
    "TorchFacts",
    "WheelCache",
    "ensure_wheel",
    "find_mpi",
    "find_torch",
    "install_horovod",
    "make_plan",
]
