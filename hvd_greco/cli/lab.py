"""``hvd-greco lab``: several hosts on this machine, over links of a known speed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Annotated, NoReturn, Optional

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from ..lab import LabStatus
from ..lab import down as lab_down
from ..lab import measure as lab_measure
from ..lab import run as lab_run
from ..lab import set_rate as lab_set_rate
from ..lab import status as lab_status
from ..lab import up as lab_up
from ..lab.options import DEFAULT_HOSTS, DEFAULT_RATE, DEFAULT_SUBNET

lab_app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode="rich",
    help="Several hosts on this machine, over links of a known speed (needs root).",
)  # fmt: skip

_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
#: What ``timeout`` of coreutils exits with.
_TIMED_OUT = 124


def _end(number: int, frame: object) -> NoReturn:
    """On SIGTERM go the way of an error: what was made is removed, ranks are ended."""
    sys.exit(128 + number)


def _say(text: str) -> None:
    Console(stderr=True).print(text, highlight=False, soft_wrap=True, markup=False)


@lab_app.command("up")
def up(
    hosts: Annotated[int, typer.Option(help="How many, 2 to 32.")] = DEFAULT_HOSTS,
    rate: Annotated[
        str, typer.Option(help="Of each host's link, in and out: 50mbit, 1gbit, none.")
    ] = DEFAULT_RATE,
    slots: Annotated[int, typer.Option(help="Ranks on each host.")] = 1,
    subnet: Annotated[str, typer.Option(help="Of the hosts' addresses.")] = DEFAULT_SUBNET,
    replace: Annotated[
        bool, typer.Option("--replace", help="Remove a lab that is up first, jobs included.")
    ] = False,
) -> None:
    """Make hosts (network namespaces) and their links to a common switch.

    [bold]Examples[/]
    hvd-greco lab up --hosts 4 --rate 200mbit
    hvd-greco lab run -- python train.py
    hvd-greco lab down
    """
    signal.signal(signal.SIGTERM, _end)
    state = lab_up(hosts, rate, slots, subnet, replace=replace)
    _say(
        f"{state.hosts} hosts are up at {state.rate}, {state.slots} slot"
        f"{'' if state.slots == 1 else 's'} each: hvd-greco lab run -- python train.py"
    )


@lab_app.command("down")
def down() -> None:
    """Remove the lab, and end what runs in it. Nothing happens if there is none."""
    removed = lab_down()
    _say(f"removed {', '.join(removed)}" if removed else "no lab was up")


@lab_app.command("rate")
def rate(
    value: Annotated[str, typer.Argument(metavar="RATE", help="50mbit, 1gbit, none.")],
) -> None:
    """Give the links of the running lab another rate; jobs in it go on."""
    state = lab_set_rate(value)
    _say(f"{state.hosts} hosts are at {state.rate}")


@lab_app.command("run")
def run(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="What each rank runs.")
    ],
    np: Annotated[
        Optional[int],  # noqa: UP045 - typer reads this on Python 3.10
        typer.Option("--np", "-np", help="Ranks. Default: one for every slot.", show_default=False),
    ] = None,
    timeout: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Seconds, after which the job is ended.", show_default=False),
    ] = None,
) -> None:
    """Run a command on ranks over the lab's hosts with mpirun, and exit with its status.

    Each host has a host name of its own, so MPI and Horovod take them for separate machines, and
    what they send between hosts goes over the links. Ranks have this shell's environment and
    folder.

    [bold]Examples[/]
    hvd-greco lab run -- python train.py --epochs 1
    hvd-greco lab run -np 2 -- python train.py
    """
    signal.signal(signal.SIGTERM, _end)
    try:
        code = lab_run(command, np, timeout).returncode
    except subprocess.TimeoutExpired as expired:
        _say(f"the job was ended after {expired.timeout:g} seconds")
        raise typer.Exit(_TIMED_OUT) from None
    raise typer.Exit(code if code >= 0 else 128 - code)


@lab_app.command("measure")
def measure(as_json: _Json = False) -> None:
    """Measure bandwidth and latency between the lab's first two hosts, in two or three seconds."""
    found = lab_measure()
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(found), indent=1))
        return
    typer.echo(
        f"links of {found.rate}: {found.bandwidth_mbit:,.1f} Mbit/s of payload, "
        f"{found.latency_us:,.0f} us one way for 64 bytes"
    )


@lab_app.command("status")
def status(as_json: _Json = False) -> None:
    """Show the lab. Exit code 0 if one is up and whole, 1 if not."""
    found = lab_status()
    if as_json:
        typer.echo(json.dumps(_facts(found), indent=1))
    else:
        _show(found)
    raise typer.Exit(0 if found.whole else 1)


def _facts(found: LabStatus) -> dict[str, object]:
    state = found.state
    return {
        "up": found.whole,
        "rate": None if state is None else state.rate,
        "slots": None if state is None else state.slots,
        "subnet": None if state is None else state.subnet,
        "hosts": msgspec.to_builtins(found.hosts),
        "strays": list(found.strays),
    }


def _show(found: LabStatus) -> None:
    console = Console()
    if found.state is None:
        console.print("no lab is up")
    else:
        state = found.state
        table = Table(title=f"{state.hosts} hosts at {state.rate}, {state.subnet}")
        for heading in ("host", "address", "slots", "processes"):
            table.add_column(heading)
        for host in found.hosts:
            running = str(host.processes) if host.present else "[bold red]gone[/]"
            table.add_row(host.name, host.address, str(state.slots), running)
        console.print(table)
        if not found.whole:
            console.print("[bold red]not whole:[/] hvd-greco lab down, then up again")
    if found.strays:
        console.print(
            f"not on record: namespaces {', '.join(found.strays)}; hvd-greco lab down removes "
            "those with names of ours while no lab is up",
            highlight=False,
        )
