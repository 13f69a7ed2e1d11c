"""Making a lab, changing its rate, looking at it, and removing it."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from . import plan, system
from .errors import LabConfigError, LabError
from .job import write_files
from .options import (
    DEFAULT_HOSTS,
    DEFAULT_RATE,
    DEFAULT_SUBNET,
    LabOptions,
    Rate,
    make_options,
    parse_rate,
)
from .state import (
    LabState,
    locked,
    make_state,
    path,
    prepare_folder,
    read_state,
    remove_files,
    with_rate,
    write_state,
)


def up(
    hosts: int = DEFAULT_HOSTS,
    rate: str | Rate = DEFAULT_RATE,
    slots: int = 1,
    subnet: str = DEFAULT_SUBNET,
    *,
    replace: bool = False,
) -> LabState:
    """Make a lab, and return its record. If that fails half-way, what was made is removed.

    Args:
        hosts: 2 to 32.
        rate: of each host's link, in and out (``"200mbit"``), or ``"none"``.
        slots: ranks that :func:`~.job.run` may start on each host.
        subnet: of the hosts' addresses.
        replace: remove a lab that is up first.

    Raises:
        ConfigError: an argument cannot work.
        LabError: a lab is up, this is not root, or the machine cannot do it.
    """
    options = make_options(hosts, rate, slots, subnet)
    system.check_needs()
    with locked():
        _make_room(replace)
        check_free(options.subnet, system.subnets_in_use())
        # On record before it is made: whoever comes after a crash knows what to remove.
        write_state(make_state(options, ready=False))
        try:
            system.execute_all(plan.up_commands(options))
            write_files(options)
            state = make_state(options, ready=True)
            write_state(state)
        except BaseException:
            _remove(plan.namespaces(options.hosts))
            raise
    return state


def _make_room(replace: bool) -> None:
    """See that no lab is in the way: one that was cut short in the making is removed."""
    found, state = system.our_namespaces(), None
    try:
        state = read_state()
    except LabError:
        if not replace:
            raise
    if not replace:
        if state is not None and state.ready:
            raise LabError(
                f"a lab of {state.hosts} hosts at {state.rate} is up: use it (hvd-greco lab "
                "status), change its rate (hvd-greco lab rate 50mbit), remove it (hvd-greco lab "
                "down), or have it replaced with --replace (replace=True)"
            )
        if state is None and found:
            raise LabError(
                f"network namespaces {', '.join(found)} bear names of ours, and no lab is recorded "
                f"in {path()}; if nothing else made them, `hvd-greco lab down` removes them"
            )
    _remove(found)


def check_free(subnet: ipaddress.IPv4Network, used: Sequence[ipaddress.IPv4Network]) -> None:
    """Raise LabConfigError if this machine has a use for some of these addresses."""
    for other in used:
        if subnet.overlaps(other):
            raise LabConfigError(
                f"subnet: {subnet} is not free, this machine has a route to {other}; choose "
                "another with --subnet, such as 10.214.78.0/24"
            )


def down() -> list[str]:
    """Remove the lab, the processes in it included. What was removed; empty if there was nothing.

    Only network namespaces with names of ours are touched, and nothing outside them was made.

    Raises:
        LabError: this is not root, or something cannot be removed.
    """
    system.check_needs()
    with locked():
        found = system.our_namespaces()
        # Without a record that can be read, the names alone say what is ours.
        with suppress(LabError):
            state = read_state()
            if state is not None:
                found = [name for name in found if name in state.made]
        _remove(found)
    return found


def _remove(names: Sequence[str]) -> None:
    """Remove those of these namespaces that there are, then the record."""
    present = set(system.our_namespaces())
    names = [name for name in names if name in present]
    system.end_processes(names)
    system.execute_all(plan.down_commands(names))
    remove_files()


def require() -> LabState:
    """The lab that is up.

    Raises:
        LabError: none is.
    """
    system.check_needs()
    state = read_state()
    if state is None:
        raise LabError("no lab is up: hvd-greco lab up --hosts 4 --rate 200mbit")
    prepare_folder()
    missing = sorted(set(state.made) - set(system.our_namespaces()))
    if missing or not state.ready:
        raise LabError(
            "the lab is not whole: "
            + (
                f"namespaces {', '.join(missing)} are gone"
                if missing
                else "making it was cut short"
            )
            + "; hvd-greco lab down, then up again"
        )
    return state


def set_rate(rate: str | Rate) -> LabState:
    """Give all links of the running lab another rate; jobs in it go on.

    Raises:
        ConfigError: this is no rate.
        LabError: no lab is up, or the kernel refuses.
    """
    wanted = parse_rate(rate)
    system.check_needs()
    with locked():
        state = require()
        _apply(state.options(), wanted)
        changed = with_rate(state, wanted)
        write_state(changed)
    return changed


def _apply(options: LabOptions, rate: Rate) -> None:
    system.execute_all(plan.rate_commands(options.hosts, rate))
    if rate.bits is None:
        # Asked of the kernel, not of the record: a change that was cut short left some unshaped.
        for where, end in plan.shaped_ends(options.hosts):
            if "tbf" in system.queues(where, end):
                system.execute(plan.unshape_command(where, end))


@dataclass(frozen=True)
class HostStatus:
    """One host.

    Attributes:
        name: its hostname, and its namespace's name.
        address: in the lab's subnet.
        present: its namespace is there.
        processes: that run in it.
    """

    name: str
    address: str
    present: bool
    processes: int


@dataclass(frozen=True)
class LabStatus:
    """What there is.

    Attributes:
        state: the record; None if no lab is up.
        hosts: of the record.
        whole: everything recorded is there.
        strays: namespaces with names of ours that are not on record.
    """

    state: LabState | None
    hosts: tuple[HostStatus, ...]
    whole: bool
    strays: tuple[str, ...]


def status() -> LabStatus:
    """Look at the lab.

    Raises:
        LabError: this is not root, or the record cannot be read.
    """
    system.check_needs()
    state = read_state()
    present = system.our_namespaces()
    if state is None:
        return LabStatus(None, (), False, tuple(present))
    running = system.processes(present)
    names = plan.host_names(state.hosts)
    hosts = tuple(
        HostStatus(name, address, name in present, len(running.get(name, ())))
        for name, address in zip(names, state.options().addresses(), strict=True)
    )
    return LabStatus(
        state=state,
        hosts=hosts,
        whole=state.ready and set(state.made) <= set(present),
        strays=tuple(sorted(set(present) - set(state.made))),
    )
