"""What is remembered of a lab between commands: one JSON file in a folder that root alone writes.

The folder is in /run, beside the kernel's own names of namespaces, so both are gone after a reboot.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import filelock
import msgspec

from .errors import LabError
from .options import LEAST_HOSTS, MOST_HOSTS, MOST_SLOTS, LabOptions, Rate, make_options
from .plan import OURS, namespaces

FOLDER = Path("/run/hvd-greco")
SCHEMA = 1
#: Seconds to wait for another command that changes the lab.
PATIENCE = 30.0


class LabState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A lab that was made.

    Attributes:
        hosts: how many.
        rate: of each host's link, as :func:`~.options.parse_rate` reads it.
        slots: ranks a host.
        subnet: of the hosts' addresses.
        made: namespaces, in the order in which they are made.
        ready: False while it is being made or removed, and so for ever if that was cut short.
        schema: of this file.
    """

    hosts: Annotated[int, msgspec.Meta(ge=LEAST_HOSTS, le=MOST_HOSTS)]
    rate: Annotated[str, msgspec.Meta(max_length=32)]
    slots: Annotated[int, msgspec.Meta(ge=1, le=MOST_SLOTS)]
    subnet: Annotated[str, msgspec.Meta(max_length=32)]
    made: Annotated[list[Annotated[str, msgspec.Meta(max_length=16)]], msgspec.Meta(max_length=64)]
    ready: bool
    schema: int = SCHEMA

    def options(self) -> LabOptions:
        """The same, checked."""
        return make_options(self.hosts, self.rate, self.slots, self.subnet)


def make_state(options: LabOptions, *, ready: bool) -> LabState:
    """The record of a lab with these options."""
    return LabState(
        hosts=options.hosts,
        rate=str(options.rate),
        slots=options.slots,
        subnet=str(options.subnet),
        made=namespaces(options.hosts),
        ready=ready,
    )


def with_rate(state: LabState, rate: Rate) -> LabState:
    """The same lab with another rate."""
    return msgspec.structs.replace(state, rate=str(rate))


def path() -> Path:
    """The state's file."""
    return FOLDER / "lab.json"


def read_state() -> LabState | None:
    """The recorded lab; None if there is none.

    Raises:
        LabError: the file is no such record. `hvd-greco lab down` removes what bears our names.
    """
    try:
        text = path().read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LabError(f"{path()}: cannot be read ({error.strerror or error})") from None
    try:
        state = msgspec.json.decode(text, type=LabState)
        if state.schema != SCHEMA:
            raise ValueError(f"schema {state.schema}, this version reads {SCHEMA}")
        strange = [name for name in state.made if not OURS.fullmatch(name)]
        if strange:
            raise ValueError(f"{strange[0]!r} is no name that a lab gives")
        if state.made != namespaces(state.hosts):
            raise ValueError(f"{state.hosts} hosts, and namespaces {', '.join(state.made)}")
        state.options()
    except (msgspec.DecodeError, ValueError) as error:
        raise LabError(
            f"{path()}: is no record of a lab ({error}); `hvd-greco lab down` removes it and every "
            "namespace with a name of ours"
        ) from None
    return state


def write_state(state: LabState) -> None:
    """Record a lab; a reader sees the old record or the new one, whole."""
    fresh = path().with_suffix(".new")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=1) + b"\n")
    fresh.replace(path())


def remove_files() -> None:
    """Forget the lab. The folder stays: its lock may be held."""
    for name in ("agent", "hosts", "hostfile", "lab.new", "lab.json"):
        (FOLDER / name).unlink(missing_ok=True)


def prepare_folder() -> None:
    """Make the folder, or check the one that is there: what lies in it is run as root.

    Raises:
        LabError: somebody else could write into it.
    """
    try:
        FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
        facts = FOLDER.lstat()
    except OSError as error:
        raise LabError(f"{FOLDER}: cannot be made ({error.strerror or error})") from None
    open_to_others = facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or open_to_others:
        raise LabError(
            f"{FOLDER}: must be a folder of root's that nobody else may write into, since programs "
            "in it are run as root; look at it and remove it"
        )


@contextmanager
def locked() -> Iterator[None]:
    """Hold the folder for one command that changes the lab.

    Raises:
        LabError: another command holds it for too long.
    """
    prepare_folder()
    try:
        with filelock.FileLock(FOLDER / "lock", timeout=PATIENCE):
            yield
    except filelock.Timeout:
        raise LabError(
            f"another hvd-greco lab command has been changing the lab for {PATIENCE:.0f} seconds; "
            "wait for it, or end it"
        ) from None
