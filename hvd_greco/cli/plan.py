"""``hvd-greco plan``: what an adaptive controller decided, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console


def plan(
    log: Annotated[Path, typer.Argument(help="File that greco.LGreco(log=...) wrote.")],
    interval: Annotated[
        Optional[int],  # noqa: UP045 - typer reads this on Python 3.10
        typer.Option(help="Which decision's layers to show, from 0. Default: the last."),
    ] = None,
    plot: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Draw every layer's level over time: .png, .svg or .pdf."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the checked lines as one JSON list instead.")
    ] = False,
) -> None:
    """Show a log of decisions: each interval, the layers of one, and a plot over time.

    [bold]Examples[/]
    hvd-greco demo --methods lgreco
    hvd-greco plan runs/demo/decisions-lgreco.jsonl
    hvd-greco plan runs/demo/decisions-lgreco.jsonl --plot levels.png
    """
    import msgspec

    from ..adapt.journal import read_journal
    from ..adapt.show import draw, intervals_table, layers_table
    from ..bench.plot import check_plot

    check_plot(plot)
    lines = read_journal(log)
    if as_json:
        typer.echo(msgspec.json.encode(lines).decode())
    else:
        console = Console()
        console.print(intervals_table(lines))
        console.print(layers_table(lines, interval))
    if plot is not None:
        draw(lines, plot)
        typer.echo(f"Drawn to {plot}", err=True)
