"""Several hosts on one machine, joined by links of a known speed: ``hvd-greco lab``.

Each host is a network namespace with a host name of its own; a link is a veth pair to a bridge,
shaped at both ends by the kernel's token bucket filter. ``plan`` has the names and the commands,
``network`` runs them, ``job`` starts mpirun over the hosts, ``measure`` and ``probe`` see what the
links really do, ``state`` is what is remembered, ``options`` checks arguments and ``system`` is the
machine underneath.

>>> from hvd_greco import lab
>>> with lab.session(hosts=4, rate="200mbit"):      # doctest: +SKIP
...     lab.run(["python", "train.py"]).returncode
...     lab.set_rate("50mbit")
...     lab.measure().bandwidth_mbit
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from . import job as _job
from . import measure as _measure
from .errors import LabConfigError, LabError
from .measure import Measurement
from .network import HostStatus, LabStatus, down, require, set_rate, status, up
from .options import DEFAULT_HOSTS, DEFAULT_RATE, DEFAULT_SUBNET, Rate, parse_rate
from .state import LabState

__all__ = [
    "HostStatus",
    "LabConfigError",
    "LabError",
    "LabState",
    "LabStatus",
    "Measurement",
    "Rate",
    "down",
    "measure",
    "parse_rate",
    "run",
    "session",
    "set_rate",
    "status",
    "up",
]


def run(
    command: Sequence[str],
    np: int | None = None,
    timeout: float | None = None,
    *,
    env: Mapping[str, str] | None = None,
    capture: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command on ranks over the lab's hosts with ``mpirun``, and wait.

    Args:
        command: what each rank runs.
        np: ranks; None: one for every slot. Fewer fill the hosts in their order.
        timeout: seconds, after which the job is killed on all hosts.
        env: variables on top of this process's own, which ranks inherit.
        capture: return what ranks print in ``.stdout`` instead of passing it through.

    Returns:
        The finished job: ``.returncode`` is mpirun's.

    Raises:
        ConfigError: more ranks than slots, or no command.
        LabError: no lab is up, or there is no Open MPI.
        subprocess.TimeoutExpired: the limit passed; ``output`` holds what was printed.
    """
    options = require().options()
    return _job.run_in(options, command, np, timeout=timeout, env=env, capture=capture)


def measure() -> Measurement:
    """Measure bandwidth and latency from host 0 to host 1, in two or three seconds.

    Raises:
        LabError: no lab is up, or its hosts do not reach each other.
    """
    return _measure.measure_in(require().options())


@contextmanager
def session(
    hosts: int = DEFAULT_HOSTS,
    rate: str | Rate = DEFAULT_RATE,
    slots: int = 1,
    subnet: str = DEFAULT_SUBNET,
    *,
    replace: bool = False,
) -> Iterator[LabState]:
    """A lab for the length of a ``with`` block; the arguments are those of :func:`up`."""
    state = up(hosts, rate, slots, subnet, replace=replace)
    try:
        yield state
    finally:
        down()
