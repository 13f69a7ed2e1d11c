"""Names of everything that a lab makes, and the commands that make it. Nothing is run here.

All of it lies in network namespaces of our own, the bridge included: the machine's own interfaces,
routes and firewall are neither changed nor asked, and what removes the namespaces removes it all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .options import LabOptions, Rate

Command = tuple[str, ...]

PREFIX = "greco"
#: Namespace of the bridge, which is the switch between the hosts.
SWITCH = f"{PREFIX}sw"
BRIDGE = f"{PREFIX}br"
#: A host's own end of its link.
INNER = "eth0"
#: What a namespace must be called to be taken for ours.
OURS = re.compile(rf"{PREFIX}(?:sw|[0-9]|[12][0-9]|3[01])", re.ASCII)
#: Every kernel has it, and on short links cubic, most machines' default, does the same. A machine's
#: own choice would decide results: under BBR, messages between pauses take half as long again.
CONGESTION = "reno"
_CONGESTION_FILE = "/proc/sys/net/ipv4/tcp_congestion_control"
#: Queue of each end: what a switch would hold, in seconds at the rate, and never fewer bytes than
#: a few packets.
QUEUE_SECONDS, QUEUE_LEAST = 0.05, 65_536
#: How long the bucket takes to fill. What fits into it passes at the machine's own speed, so it
#: is as small as lets the kernel's timers keep the rate up.
BURST_SECONDS, BURST_LEAST = 0.0005, 4_096
#: Bounds of :func:`offload_bytes`: two packets, and the kernel's own default.
OFFLOAD_LEAST, OFFLOAD_MOST = 3_000, 65_536


def host_names(hosts: int) -> list[str]:
    """Names of the hosts, which are those of their namespaces as well."""
    return [f"{PREFIX}{host}" for host in range(hosts)]


def namespaces(hosts: int) -> list[str]:
    """All namespaces of a lab, in the order in which they are made."""
    return [SWITCH, *host_names(hosts)]


def port(host: int) -> str:
    """The switch's end of a host's link."""
    return f"{PREFIX}v{host}"


def burst_bytes(rate: Rate) -> int:
    """Size of the bucket at each end of a link; 0 without a limit."""
    if rate.bits is None:
        return 0
    return max(BURST_LEAST, int(rate.bits / 8 * BURST_SECONDS))


def offload_bytes(rate: Rate) -> int:
    """Largest piece that a host's TCP hands to its link at once.

    One that does not fit the bucket is cut into packets by the kernel, which costs four times the
    processor time, and above 500 Mbit/s keeps the link from its rate. Half a bucket avoids both.
    """
    if rate.bits is None:
        return OFFLOAD_MOST
    return min(OFFLOAD_MOST, max(OFFLOAD_LEAST, burst_bytes(rate) // 2))


def up_commands(options: LabOptions) -> list[Command]:
    """What makes a lab, in order."""
    commands: list[Command] = [
        ("ip", "netns", "add", SWITCH),
        ("ip", "-n", SWITCH, "link", "add", BRIDGE, "type", "bridge"),
        ("ip", "-n", SWITCH, "link", "set", BRIDGE, "up"),
    ]
    prefix = options.subnet.prefixlen
    for host, (name, address) in enumerate(
        zip(host_names(options.hosts), options.addresses(), strict=True)
    ):
        outer = port(host)
        peer = ("peer", "name", INNER, "netns", name)
        commands += [
            ("ip", "netns", "add", name),
            ("ip", "-n", name, "link", "set", "lo", "up"),
            ("ip", "-n", SWITCH, "link", "add", outer, "type", "veth", *peer),
            ("ip", "-n", SWITCH, "link", "set", outer, "master", BRIDGE, "up"),
            ("ip", "-n", name, "address", "add", f"{address}/{prefix}", "dev", INNER),
            ("ip", "-n", name, "link", "set", INNER, "up"),
            ("ip", "netns", "exec", name, "sh", "-c", f"echo {CONGESTION} > {_CONGESTION_FILE}"),
        ]
    if options.rate.bits is not None:
        commands += rate_commands(options.hosts, options.rate)
    return commands


def rate_commands(hosts: int, rate: Rate) -> list[Command]:
    """What gives all links this rate; for none, :func:`unshape_command` comes on top."""
    ends = shaped_ends(hosts)
    size = str(offload_bytes(rate))
    commands: list[Command] = [
        ("ip", "-n", where, "link", "set", end, "gso_max_size", size)
        for where, end in ends
        if end == INNER
    ]
    if rate.bits is None:
        return commands
    queue = max(QUEUE_LEAST, int(rate.bits / 8 * QUEUE_SECONDS))
    shape = (
        *("tbf", "rate", f"{rate.bits}bit"),
        *("burst", f"{burst_bytes(rate)}b", "limit", f"{queue + burst_bytes(rate)}b"),
    )
    return commands + [
        ("tc", "-n", where, "qdisc", "replace", "dev", end, "root", *shape) for where, end in ends
    ]


def shaped_ends(hosts: int) -> list[tuple[str, str]]:
    """Namespace and device of both ends of every link: in and out are shaped."""
    inner = [(name, INNER) for name in host_names(hosts)]
    return inner + [(SWITCH, port(host)) for host in range(hosts)]


def unshape_command(where: str, end: str) -> Command:
    """What takes away the limit of one end; it fails where there is none."""
    return ("tc", "-n", where, "qdisc", "del", "dev", end, "root")


def down_commands(names: Sequence[str]) -> list[Command]:
    """What removes these namespaces and everything in them: the hosts first, then the switch."""
    ordered = sorted(names, key=lambda name: (name == SWITCH, name))
    return [("ip", "netns", "delete", name) for name in ordered]
