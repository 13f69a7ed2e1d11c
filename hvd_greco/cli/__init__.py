"""The command line: ``hvd-greco``. Each command has a module of its own here.

torch is imported by no module of this package at the top: ``--help``, ``doctor`` and
``install-horovod`` must answer at once, and where torch or Horovod is missing or broken.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.console import Console

from .._version import __version__
from ..errors import GrecoError
from .bench import bench_app
from .demo import demo
from .doctor import doctor
from .install import install_horovod
from .lab import lab_app
from .plan import plan

app = typer.Typer(
    name="hvd-greco",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
_TRACEBACK = "HVD_GRECO_TRACEBACK"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hvd-greco {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
    traceback: Annotated[
        bool,
        typer.Option(
            "--traceback", help=f"Show Python's traceback with an error (or set {_TRACEBACK}=1)."
        ),
    ] = False,
) -> None:
    """Gradient compression for PyTorch models trained with stock Horovod."""
    if traceback:
        os.environ[_TRACEBACK] = "1"


app.command("demo")(demo)
app.command("plan")(plan)
app.command("install-horovod")(install_horovod)
app.command("doctor")(doctor)
app.add_typer(bench_app, name="bench")
app.add_typer(lab_app, name="lab")


def main() -> None:
    """Entry point: what this package raises on purpose is a message and exit code 2."""
    try:
        app()
    except GrecoError as error:
        if os.environ.get(_TRACEBACK, "") not in ("", "0"):
            raise
        console = Console(stderr=True)
        console.print("[bold red]error:[/] ", end="")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
