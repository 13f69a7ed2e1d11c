"""The command line: ``hvd-greco``. Each command has a module of its own here.

torch is imported by no module of this package at the top: ``--help``, ``doctor`` and
``install-horovod`` must answer at once, and where torch or Horovod is missing or broken.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.console import Console

from .._version import __version__
from ..errors import GrecoError
from .bench import bench_app
from .demo import demo
from .doctor import doctor
from .install import install_horovod
from .lab import lab_app
