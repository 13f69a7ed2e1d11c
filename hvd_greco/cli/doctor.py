"""``hvd-greco doctor``: one table of what is installed here, and whether it fits together."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .._version import __version__
from ..doctor import Row, cpu_path_works, examine

_STYLE = {"ok": "green", "warn": "yellow", "missing": "dim", "broken": "bold red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which one library's probe counts as hanging.")
    ] = 60.0,
) -> None:
    """Show Python, torch, Horovod, MPI and GPU libraries, what does not fit, and what to type.

    Exit code 0 if training on the CPU would work, 1 if not.
    """
    console = Console()
    if as_json:
        rows = examine(timeout)
        works = cpu_path_works(rows)
        facts = {"version": __version__, "ok": works, "rows": [dataclasses.asdict(r) for r in rows]}
        typer.echo(json.dumps(facts, indent=1))
    else:
        with console.status("looking at torch, Horovod and MPI ..."):
            rows = examine(timeout)
        works = cpu_path_works(rows)
        console.print(_table(rows))
        console.print(
            "[green]Training on the CPU works.[/]"
            if works
            else "[bold red]Training on the CPU does not work yet:[/] see the right column."
        )
    raise typer.Exit(0 if works else 1)


def _table(rows: list[Row]) -> Table:
    table = Table(title=f"hvd-greco {__version__}")
    for heading in ("", "status", "found", "what to type"):
        # Paths are there to be read and copied: folded, never cut.
        table.add_column(heading, overflow="fold")
    for row in rows:
        style = "bold red" if row.stops else _STYLE[row.status]
        table.add_row(row.name, f"[{style}]{row.status}[/]", escape(row.found), escape(row.advice))
    return table
