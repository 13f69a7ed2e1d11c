"""What a lab is to be like, checked before anything is made."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass

from ..config import check_count
from .errors import LabConfigError

LEAST_HOSTS, MOST_HOSTS = 2, 32
MOST_SLOTS = 64
DEFAULT_HOSTS = 2
DEFAULT_RATE = "1gbit"
DEFAULT_SUBNET = "10.213.77.0/24"
#: Words for a link without a limit.
UNSHAPED = ("none", "unshaped")
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_RATE = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s?(kbit|mbit|gbit)(?:/s)?", re.ASCII)
#: Below, one packet takes longer than a Horovod cycle; above, this machine is slower than the link.
LEAST_BITS, MOST_BITS = 10**6, 10**11


@dataclass(frozen=True)
class Rate:
    """Bits a second of a host's link, in each direction; None: no limit."""

    bits: int | None

    def __str__(self) -> str:
        if self.bits is None:
            return "none"
        for unit, factor in reversed(_UNITS.items()):
            if self.bits >= factor and self.bits % (factor // 1000) == 0:
                return f"{self.bits / factor:.10g}{unit}"
        return f"{self.bits}bit"


def parse_rate(text: str | Rate) -> Rate:
    """``"200mbit"``, ``"1.5gbit"`` or ``"none"``.

    Raises:
        LabConfigError: it is none of these, or out of range.
    """
    if isinstance(text, Rate):
        return text
    word = text.strip().lower() if isinstance(text, str) else ""
    if word in UNSHAPED:
        return Rate(None)
    found = _RATE.fullmatch(word)
    if found is None:
        # tc reads "mbps" as bytes a second, most people as bits: neither is guessed here.
        raise LabConfigError(
            f"rate: {text!r} is no rate; use bits a second such as 50mbit, 1gbit or 1.5gbit, or "
            "none for links without a limit"
        )
    bits = float(found[1]) * _UNITS[found[2]]
    if not LEAST_BITS <= bits <= MOST_BITS:
        raise LabConfigError(f"rate: {text!r} is out of range; use 1mbit to 100gbit, or none")
    # What the state file and tc are told is a whole number of bits.
    return Rate(math.floor(bits + 0.5))


@dataclass(frozen=True)
class LabOptions:
    """One lab.

    Attributes:
        hosts: how many.
        rate: of each host's link.
        slots: ranks that ``mpirun`` may start on each host.
        subnet: addresses of the hosts, from its first.
    """

    hosts: int
    rate: Rate
    slots: int
    subnet: ipaddress.IPv4Network

    def addresses(self) -> list[str]:
        """Of the hosts, in their order."""
        first = int(self.subnet.network_address) + 1
        return [str(ipaddress.IPv4Address(first + host)) for host in range(self.hosts)]


def make_options(
    hosts: int = DEFAULT_HOSTS,
    rate: str | Rate = DEFAULT_RATE,
    slots: int = 1,
    subnet: str = DEFAULT_SUBNET,
) -> LabOptions:
    """Check a lab's options and put them together.

    Raises:
        ConfigError: an option has a value that cannot work.
    """
    if check_count("hosts", hosts, LEAST_HOSTS) > MOST_HOSTS:
        raise LabConfigError(f"hosts: {hosts} is too many; use {LEAST_HOSTS} to {MOST_HOSTS}")
    if check_count("slots", slots, 1) > MOST_SLOTS:
        raise LabConfigError(f"slots: {slots} is too many ranks a host; use 1 to {MOST_SLOTS}")
    return LabOptions(hosts, parse_rate(rate), slots, _parse_subnet(subnet, hosts))


def _parse_subnet(text: str, hosts: int) -> ipaddress.IPv4Network:
    advice = f"use a private IPv4 subnet that is not in use, such as {DEFAULT_SUBNET}"
    try:
        subnet = ipaddress.IPv4Network(text)
    except ValueError as error:
        raise LabConfigError(f"subnet: {text!r} is no subnet ({error}); {advice}") from None
    special = subnet.is_loopback or subnet.is_link_local or subnet.is_multicast
    if special or not subnet.is_private or not 8 <= subnet.prefixlen <= 30:
        raise LabConfigError(f"subnet: {text!r} cannot carry hosts; {advice}")
    if subnet.num_addresses - 2 < hosts:
        raise LabConfigError(
            f"subnet: {text!r} has room for {subnet.num_addresses - 2} hosts, and {hosts} are "
            f"wanted; {advice}"
        )
    return subnet
