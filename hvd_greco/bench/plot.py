"""The roofline: counted bytes a second of every operation against size, under the copy's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ..errors import ConfigError
from .record import Record, Row

#: Endings that matplotlib's own backends write.
ENDINGS = (".png", ".svg", ".pdf")


def check_plot(path: Path | None) -> None:
    """Refuse a plot that could not be drawn before anything is measured for it.

    Raises:
        ConfigError: matplotlib is not installed, or the file's ending is none of its own.
    """
    if path is None:
        return
    if path.suffix.lower() not in ENDINGS:
        raise ConfigError(f"--plot: {str(path)!r} ends in none of {', '.join(ENDINGS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot: matplotlib is not installed; `pip install matplotlib` (or hvd-greco[bench]), "
            "or leave --plot out: --json keeps all numbers, and `hvd-greco bench show FILE --plot` "
            "draws them later"
        )


def draw(record: Record, path: Path) -> None:
    """Write the plot.

    A line joins an operation's cases at its base point (density 0.01, 4 bits, 4 ranks, r 4,
    gaussian, or what is nearest); its other cases are dots of the same colour. The roof is the
    copy that took turns with them: high where source and target fit in a cache.
    """
    # Not pyplot: that looks for a display, and keeps every figure.
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    axes = figure.add_subplot()
    sizes, roof = _roof(record.rows)
    axes.plot(sizes, roof, color="black", linewidth=2, label="copy (the roof)")
    axes.fill_between(sizes, roof, 1e6, color="0.92")
    names = list(dict.fromkeys(row.operation for row in record.rows))
    for place, name in enumerate(names):
        colour = colormaps["tab20"](place % 20)
        marker = "o" if place < 20 else "s"
        rows = [row for row in record.rows if row.operation == name]
        line = _base_line(rows)
        axes.plot(
            [row.numel for row in line], [row.bytes_per_second / 1e9 for row in line],
            color=colour, marker=marker, markersize=5, label=name,
        )  # fmt: skip
        others = [row for row in rows if row not in line]
        axes.scatter(
            [row.numel for row in others], [row.bytes_per_second / 1e9 for row in others],
            color=[colour], marker=marker, s=9,
        )  # fmt: skip
    rates = [row.bytes_per_second / 1e9 for row in record.rows] + roof
    axes.set(
        xscale="log", yscale="log", ylim=(min(rates) / 1.5, max(rates) * 1.5),
        xlabel="elements (fp32)", ylabel="counted bytes a second (GB/s)",
    )  # fmt: skip
    machine = record.machine
    axes.set_title(
        f"{machine.gpu or machine.cpu}, {record.threads} threads, {record.date[:10]}", fontsize=10
    )
    axes.grid(True, which="both", linewidth=0.3)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)


def _roof(rows: list[Row]) -> tuple[list[int], list[float]]:
    """Sizes, and the median copy's GB/s at each: those of vectors, unless there are none.

    Factors that are made orthonormal have sizes of their own, with a case or two at each: their
    copies would say more about chance than about the machine.
    """
    found: dict[int, list[float]] = {}
    for row in [row for row in rows if row.length is None] or rows:
        found.setdefault(row.numel, []).append(row.copy_bytes_per_second / 1e9)
    sizes = sorted(found)
    return sizes, [sorted(found[size])[len(found[size]) // 2] for size in sizes]


def _base_line(rows: list[Row]) -> list[Row]:
    """The first row of each size, which is the base point, by size."""
    first: dict[int, Row] = {}
    for row in rows:
        first.setdefault(row.numel, row)
    return [first[size] for size in sorted(first)]
