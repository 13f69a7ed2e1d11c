"""``hvd-greco demo``: train with compressed gradients on this machine, and compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from ..demo.config import (
    DEFAULT_METHODS,
    DEFAULT_OUTPUT,
    DEFAULT_STEPS,
    DEVICES,
    MODELS,
    make_config,
)
from ..methods import ORDER


def demo(
    ranks: Annotated[int, typer.Option("--ranks", "-np", help="Processes that mpirun starts.")] = 2,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each method.")] = DEFAULT_STEPS,
    method_list: Annotated[
        str,
        typer.Option(
            "--methods",
            help=f"Commas between: {', '.join(ORDER)}, each with options if you like "
            "(topk:density=0.001), or [bold]all[/]. dense always runs first, to compare with.",
        ),
    ] = DEFAULT_METHODS,
    model: Annotated[str, typer.Option(help=f"Size: {', '.join(MODELS)}.")] = "small",
    batch: Annotated[int, typer.Option(help="Windows of text per rank and step.")] = 8,
    seq: Annotated[int, typer.Option(help="Bytes per window.")] = 64,
    lr: Annotated[
        Optional[float],  # noqa: UP045 - typer reads this on Python 3.10
        typer.Option(
            help="Peak learning rate, the same for every method. Default: what suits the model.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides initial weights and batches.")] = 1,
    device: Annotated[str, typer.Option(help=f"{' or '.join(DEVICES)}.")] = "cpu",
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder that gets summary.json.")
    ] = DEFAULT_OUTPUT,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON instead of a table.")
    ] = False,
) -> None:
    """Train a small transformer with stock Horovod, dense and compressed, and compare.

    Starts mpirun on this machine and trains a byte-level transformer on the
    English of Python's own help pages (nothing is downloaded): once dense and
    once with each method, from the same weights, batches and learning rates.
    Ends with a table of bytes sent, step time and validation bits per byte, and
    writes them to summary.json.

    [bold]Examples[/]
    hvd-greco demo
    hvd-greco demo --methods topk:density=0.001,fp16 --steps 3000
    hvd-greco demo -np 4 --model base --methods all --output runs/base
    """
    from ..demo.runner import run_demo
    from ..demo.summary import make_plan_tables, make_table

    config = make_config(
        ranks=ranks,
        steps=steps,
        method_list=method_list,
        model=model,
        batch=batch,
        seq=seq,
        lr=lr,
        seed=seed,
        device=device,
    )
    # Progress on stderr: stdout holds the result alone, for a file or a pipe.
    summary = run_demo(config, output, Console(stderr=True))
    if as_json:
        typer.echo(json.dumps(summary, indent=1))
        return
    console = Console()
    console.print(make_table(summary))
    for table in make_plan_tables(summary):
        console.print(table)
    if config.ranks == 1:
        console.print("One rank sends nothing: Horovod leaves the compressor out.")
    console.print(f"Written to {output / 'summary.json'}", highlight=False, soft_wrap=True)
