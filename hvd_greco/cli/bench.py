"""``hvd-greco bench``: how fast the kernels are on this machine."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer
from rich.console import Console

from ..bench.options import (
    DEFAULTS,
    DEVICES,
    INPUTS,
    LEAST_ROUNDS,
    QUICK,
    QUICK_SECONDS,
    SECONDS,
    check_target,
    make_options,
)

if TYPE_CHECKING:
    from ..bench.record import Record

bench_app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode="rich",
    help="How fast the kernels are on this machine, beside torch and a plain copy.",
)  # fmt: skip

_List = Optional[str]  # noqa: UP045 - typer reads this on Python 3.10
_File = Optional[Path]  # noqa: UP045


def _list(name: str, what: str) -> typer.models.OptionInfo:
    text = f"{what} Default: {DEFAULTS[name]}; quick: {QUICK[name]}."
    option: typer.models.OptionInfo = typer.Option(
        f"--{name.replace('_', '-')}", help=text, show_default=False
    )
    return option


@bench_app.command("kernels")
def kernels(
    sizes: Annotated[_List, _list("sizes", "Elements of a vector, commas between.")] = None,
    operations: Annotated[
        str, typer.Option(help="Names or patterns: topk_ef,quantise*,orthonormalise.")
    ] = "*",
    densities: Annotated[_List, _list("densities", "Shares that sparsifiers keep.")] = None,
    bits: Annotated[_List, _list("bits", "Bits of a code, 2 to 8.")] = None,
    ranks: Annotated[_List, _list("ranks", "Ranks whose payloads are decoded together.")] = None,
    low_ranks: Annotated[_List, _list("low_ranks", "r of low-rank factors.")] = None,
    lengths: Annotated[_List, _list("lengths", "n of factors made orthonormal.")] = None,
    inputs: Annotated[_List, _list("inputs", f"Entries: {', '.join(INPUTS)}.")] = None,
    device: Annotated[str, typer.Option(help=f"{' or '.join(DEVICES)}.")] = "cpu",
    seconds: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            help=f"How long each case is measured, in {LEAST_ROUNDS} rounds at least. "
            f"Default: {SECONDS:g}; quick: {QUICK_SECONDS:g}.",
            show_default=False,
        ),
    ] = None,
    repetitions: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Rounds of each case, in place of --seconds.", show_default=False),
    ] = None,
    threads: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Of torch and of the kernels. Default: torch's.", show_default=False),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A minute: few cases, small ones, and no --starts.")
    ] = False,
    starts: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option(
            "--starts/--no-starts",
            help="Measure cold and warm start, in processes of their own. Default: unless quick.",
            show_default=False,
        ),
    ] = None,
    json_file: Annotated[
        _File, typer.Option("--json", help="Write the record here.", show_default=False)
    ] = None,
    plot_file: Annotated[
        _File,
        typer.Option(
            "--plot",
            help="Draw counted bytes a second under the copy's here (.png, .svg, .pdf; needs "
            "matplotlib).",
            show_default=False,
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table as Markdown.")
    ] = False,
) -> None:
    """Time every operation of the kernels beside a plain copy and a chain of torch calls.

    The three take turns, a call of each in every round, so that whatever else
    the machine does meets all of them; reported are medians. docs/kernels.md
    explains the columns, and how bytes are counted.

    Where an operation has several axes (density, bits, ranks, inputs), each is
    varied alone, from density 0.01, 4 bits, 4 ranks, r 4 and gaussian entries,
    or what is nearest to those.

    [bold]Examples[/]
    hvd-greco bench kernels --quick
    hvd-greco bench kernels --operations 'topk*' --sizes 1.6e7 --densities 0.01
    hvd-greco bench kernels --json kernels.json --plot kernels.png
    """
    from ..bench.plot import check_plot

    options = make_options(
        sizes=sizes,
        operations=operations,
        densities=densities,
        bits=bits,
        ranks=ranks,
        low_ranks=low_ranks,
        lengths=lengths,
        inputs=inputs,
        device=device,
        seconds=seconds,
        repetitions=repetitions,
        threads=threads,
        quick=quick,
        starts=starts,
    )
    check_plot(plot_file)
    check_target("--json", json_file)
    check_target("--plot", plot_file)

    from ..bench.runner import run_bench

    command = shlex.join(["hvd-greco", *sys.argv[1:]])
    # Progress on stderr: stdout holds the result alone, for a file or a pipe.
    with Console(stderr=True).status("") as status:
        record = run_bench(
            options, command, lambda text, done, of: status.update(f"{done}/{of} {text}")
        )
    if json_file is not None:
        json_file.write_text(record.to_json())
    _show(record, markdown, plot_file)


@bench_app.command("show")
def show(
    file: Annotated[Path, typer.Argument(help="What --json wrote.", show_default=False)],
    plot_file: Annotated[
        _File, typer.Option("--plot", help="Draw the plot here.", show_default=False)
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table as Markdown.")
    ] = False,
) -> None:
    """Show a record again: its table, in Markdown if so wished, or its plot."""
    from ..bench.plot import check_plot
    from ..bench.record import read_record

    check_plot(plot_file)
    check_target("--plot", plot_file)
    _show(read_record(file), markdown, plot_file)


def _show(record: Record, markdown: bool, plot_file: Path | None) -> None:
    from ..bench import report

    console = Console()
    if markdown:
        typer.echo(report.markdown(record))
    else:
        console.print(report.make_table(record))
        if record.starts:
            console.print(report.make_starts(record.starts))
        console.print(f"extra MB: {record.memory_method}.", highlight=False)
    warning = report.warning(record)
    if warning:
        Console(stderr=True).print(f"[yellow]{warning}[/]", highlight=False)
    if plot_file is not None:
        from ..bench.plot import draw

        draw(record, plot_file)
