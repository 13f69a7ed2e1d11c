"""Process sets of the ranks on one host, and of the ranks in one place on each host.

Horovod tells a rank its local and cross ranks, but not who its neighbours are, and it can form
process sets only while it starts, or when it was started so that more can be added.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from ..payload import Hosts
from .horovod import hvd

_OMPI = "OMPI_COMM_WORLD_"
#: Variables in which launchers tell a rank (size, rank, local size, local rank).
_LAUNCHERS = (
    (f"{_OMPI}SIZE", f"{_OMPI}RANK", f"{_OMPI}LOCAL_SIZE", f"{_OMPI}LOCAL_RANK"),
    ("HOROVOD_SIZE", "HOROVOD_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_LOCAL_RANK"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
)
_ADVICE = (
    "Set HOROVOD_DYNAMIC_PROCESS_SETS=1 in the environment of all ranks (with mpirun: "
    '-x HOROVOD_DYNAMIC_PROCESS_SETS=1), or call hvd.init(process_sets="dynamic")'
)


def parts(hosts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The sets of ranks that a hierarchical exchange over these hosts needs, in a fixed order.

    Horovod has the set of all ranks already and refuses a second one; a set of one rank needs no
    communication. So with one host, or one rank on each, there are none.
    """
    if len(hosts) == 1 or len(hosts[0]) == 1:
        return []
    return [list(host) for host in hosts] + [
        [host[place] for host in hosts] for place in range(len(hosts[0]))
    ]


def host_process_sets(ranks_per_host: int | None = None) -> list[Any]:
    """Process sets for ``exchange="hierarchical"``, to be handed to ``hvd.init``.

    ``hvd.init(process_sets=greco.host_process_sets())`` is one of two ways to let Horovod form
    them; the other is ``hvd.init(process_sets="dynamic")``, which needs no knowledge of the hosts.

    Args:
        ranks_per_host: None: what the launcher's environment says. Ranks are taken to be numbered
            host by host, as ``mpirun`` does by default; the compressor checks that later.

    Raises:
        ConfigError: the environment does not say, or says that ranks are numbered otherwise.
    """
    size, rank, local_size, local_rank = _launched()
    length = local_size if ranks_per_host is None else ranks_per_host
    if length < 1 or size % length or (ranks_per_host is None and rank % length != local_rank):
        raise ConfigError(
            f"host_process_sets: rank {rank} of {size} has local rank {local_rank} of "
            f"{local_size}, which does not fit ranks numbered host by host, {length} on each. "
            f"{_ADVICE}"
        )
    hosts = [list(range(first, first + length)) for first in range(0, size, length)]
    return [hvd.ProcessSet(ranks) for ranks in parts(hosts)]


def _launched() -> list[int]:
    """Size, rank, local size and local rank, as the launcher's environment says."""
    for names in _LAUNCHERS:
        values = [os.environ.get(name, "") for name in names]
        if all(value.isdigit() for value in values):
            return [int(value) for value in values]
    raise ConfigError(
        "host_process_sets: the environment has none of the variables by which mpirun, horovodrun "
        f"or a PMI launcher tell a rank its place ({_LAUNCHERS[0][2]}, ...). {_ADVICE}"
    )


class HostSets:
    """The two process sets that this rank is in, made or found. All ranks construct it together.

    Attributes:
        hosts: this rank's place.
        local: process set of this host's ranks; None if it is this rank alone.
        cross: process set of this rank's peers on the hosts; None if it is this rank alone.
    """

    def __init__(self) -> None:
        rank = hvd.rank()
        hosts = group_by_host(_facts())
        mine = next(host for host in hosts if rank in host)
        place = mine.index(rank)
        peers = [host[place] for host in hosts]
        self.hosts = Hosts(place, len(mine), peers.index(rank), len(hosts))
        _make(parts(hosts))
        self.local = _process_set(mine)
        self.cross = _process_set(peers)


def _facts() -> list[tuple[int, int, int]]:
    """(local rank, local size, hash of the host's name) of every rank, in rank order."""
    own = torch.tensor([[hvd.local_rank(), hvd.local_size(), _host_hash()]], dtype=torch.int64)
    gathered = hvd.allgather(own, name="greco/hosts")
    return [(row[0], row[1], row[2]) for row in gathered.tolist()]


def _host_hash() -> int:
    """Tells machines apart, and containers of one machine as MPI does: by their names."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    text = f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def group_by_host(facts: Sequence[tuple[int, int, int]]) -> list[list[int]]:
    """Ranks of each host, ascending, from every rank's (local rank, local size, host hash).

    Raises:
        ConfigError: hosts with different numbers of ranks, or no telling which ranks share one.
    """
    sizes = {local_size for _, local_size, _ in facts}
    if len(sizes) > 1:
        raise ConfigError(
            f"exchange: 'hierarchical' needs equally many ranks on every host, but hosts have "
            f"{' and '.join(map(str, sorted(sizes)))}: the mean over hosts would not be the mean "
            "over ranks, and some rank would have no peer on every host. Start the same number on "
            "each (mpirun --map-by ppr:N:node), or leave exchange out"
        )
    length = sizes.pop()
    local_ranks = [local_rank for local_rank, _, _ in facts]
    if local_ranks == [rank % length for rank in range(len(facts))]:
        # Local ranks ascend on each host, so this pattern leaves one way to read it: blocks.
        return [list(range(r, r + length)) for r in range(0, len(facts), length)]
    by_name: dict[int, list[int]] = {}
    for rank, (_, _, name) in enumerate(facts):
        by_name.setdefault(name, []).append(rank)
    hosts = list(by_name.values())
    if any([local_ranks[rank] for rank in host] != list(range(length)) for host in hosts):
        raise ConfigError(
            "exchange: cannot tell which ranks share a host: Horovod's local ranks "
            f"({local_ranks}) do not fit the hosts' names ({len(hosts)} different). Give hosts "
            "names of their own, number ranks host by host (mpirun --map-by slot), or leave "
            "exchange='hierarchical' out"
        )
    return hosts


def _registered() -> dict[tuple[int, ...], int]:
    """Ranks -> id of all process sets that Horovod has; it offers no public way to ask."""
    table = hvd.mpi_ops._basics._get_process_set_ids_and_ranks()
    return {tuple(ranks): number for number, ranks in table.items()}


def _make(wanted: list[list[int]]) -> None:
    """Let Horovod form the sets that it has not yet; every rank takes part, in every one."""
    known = _registered()
    for ranks in wanted:
        if tuple(ranks) in known:
            continue
        try:
            hvd.add_process_set(ranks)
        except ValueError as error:
            raise ConfigError(
                f"exchange: 'hierarchical' needs a process set of ranks {ranks}, and Horovod was "
                f"started without it. {_ADVICE}, or "
                "hvd.init(process_sets=greco.host_process_sets())"
            ) from error


def _process_set(ranks: list[int]) -> Any:
    if len(ranks) == 1:
        return None
    if len(ranks) == hvd.size():
        return hvd.global_process_set
    found = hvd.ProcessSet(ranks)
    found.process_set_id = _registered()[tuple(ranks)]
    return found
