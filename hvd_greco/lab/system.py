"""The machine underneath: the programs that are needed, and running them."""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence

from .errors import LabError
from .plan import OURS, SWITCH, Command

#: Program -> Debian's package of it.
PROGRAMS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
}
#: Where programs for root lie, which a user's PATH may lack.
_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
#: What an error of ip or tc says -> what it means and what to do.
_HINTS = {
    "Operation not permitted": "root here lacks CAP_SYS_ADMIN and CAP_NET_ADMIN; a container needs "
    "--privileged",
    "qdisc kind is unknown": "this kernel lacks tbf; try `modprobe sch_tbf`, or --rate none",
    "Unknown device type": "this kernel lacks veth or bridge; try `modprobe veth bridge`",
    "Operation not supported": "this kernel lacks veth or bridge; try `modprobe veth bridge`",
}


def find_program(name: str) -> str:
    """Path of a program.

    Raises:
        LabError: it is not installed.
    """
    found = shutil.which(name, path=_PATH)
    if found is None:
        raise LabError(
            f"{name} is not installed: on Debian or Ubuntu, apt install {PROGRAMS[name]}"
        )
    return found


def check_needs() -> None:
    """See that a lab can be made here at all.

    Raises:
        LabError: this is not root, or programs are missing; says what to type.
    """
    if os.geteuid() != 0:
        raise LabError(
            'a lab needs root, for network namespaces and tc: sudo -E env PATH="$PATH" hvd-greco '
            "lab ..."
        )
    missing = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing:
        packages = sorted({PROGRAMS[name] for name in missing})
        raise LabError(
            f"a lab needs {', '.join(missing)}, not installed here: on Debian or Ubuntu, "
            f"apt install {' '.join(packages)}"
        )


def execute(command: Command) -> str:
    """Run one command and return what it printed.

    Raises:
        LabError: it failed; has the command and what it said.
    """
    done = subprocess.run(
        [find_program(command[0]), *command[1:]],
        capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        hints = [f" ({hint})" for text, hint in _HINTS.items() if text in said]
        raise LabError(f"`{' '.join(command)}` failed: {said}{''.join(hints[:1])}")
    return done.stdout


def execute_all(commands: Iterable[Command]) -> None:
    """Run commands in order, up to the first that fails."""
    for command in commands:
        execute(command)


def our_namespaces() -> list[str]:
    """Namespaces there are that bear a name which a lab gives: the switch, then the hosts."""
    lines = execute(("ip", "netns", "list")).splitlines()
    names = [line.split()[0] for line in lines if line.strip()]
    ours = [name for name in names if OURS.fullmatch(name)]
    return sorted(ours, key=lambda name: (name != SWITCH, len(name), name))


def subnets_in_use() -> list[ipaddress.IPv4Network]:
    """Networks that this machine has addresses in, or routes to (its default route left out)."""
    found = []
    for route in json.loads(
        execute(("ip", "-json", "-4", "route", "show", "table", "all")) or "[]"
    ):
        text = str(route.get("dst", "default"))
        if text != "default":
            found.append(ipaddress.IPv4Network(text, strict=False))
    return found


def queues(namespace: str, device: str) -> list[str]:
    """Kinds of the queues that a device has."""
    text = execute(("tc", "-json", "-n", namespace, "qdisc", "show", "dev", device))
    return [str(queue["kind"]) for queue in json.loads(text or "[]")]


def processes(namespaces: Sequence[str]) -> dict[str, list[int]]:
    """Numbers of the processes in each of these namespaces."""
    return {
        name: [int(word) for word in execute(("ip", "netns", "pids", name)).split()]
        for name in namespaces
    }


def end_processes(namespaces: Sequence[str], grace: float = 5.0) -> None:
    """End what runs in these namespaces: nameless, a namespace lives on with them."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + grace
        running = _all_processes(namespaces)
        if os.getpid() in running:
            raise LabError("this command itself runs on a host of the lab; run it outside the lab")
        for pid in running:
            try:
                os.kill(pid, sign)
            except ProcessLookupError:
                continue
        while running and time.monotonic() < deadline:
            time.sleep(0.05)
            running = _all_processes(namespaces)
        if not running:
            return
    raise LabError(f"processes {running} in the lab's namespaces cannot be ended")


def _all_processes(namespaces: Sequence[str]) -> list[int]:
    return sorted({pid for found in processes(namespaces).values() for pid in found})
