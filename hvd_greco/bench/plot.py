"""Rooflines: every operation against size and against intensity, under what a copy reaches."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

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
    """Write the plot: bytes a second against size, elements a second against intensity.

    On the left, a line joins an operation's cases at its base point (density 0.01, 4 bits, 4
    ranks, r 4, gaussian, or what is nearest); its other cases are dots of the same colour. The roof
    is the copy that took turns with them: high where source and target fit in a cache.
    """
    # Not pyplot: that looks for a display, and keeps every figure.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 6.5), layout="constrained")
    by_size, by_intensity = figure.subplots(1, 2)
    _draw_sizes(record, by_size)
    _draw_intensities(record, by_intensity)
    machine = record.machine
    figure.suptitle(
        f"{machine.gpu or machine.cpu}, {record.threads} threads, {record.date[:10]}", fontsize=10
    )
    handles, labels = by_size.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)


def _styles(record: Record) -> dict[str, tuple[Any, str]]:
    """Colour and marker of each operation."""
    from matplotlib import colormaps

    names = dict.fromkeys(row.operation for row in record.rows)
    return {
        name: (colormaps["tab20"](place % 20), "o" if place < 20 else "s")
        for place, name in enumerate(names)
    }


def _draw_sizes(record: Record, axes: Any) -> None:
    """Counted bytes a second against size."""
    sizes, roof = _roof(record.rows)
    axes.plot(sizes, roof, color="black", linewidth=2, label="copy (the roof)")
    axes.fill_between(sizes, roof, 1e6, color="0.92")
    for name, (colour, marker) in _styles(record).items():
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
    axes.grid(True, which="both", linewidth=0.3)


def _draw_intensities(record: Record, axes: Any) -> None:
    """Elements a second against elements a counted byte, at each operation's largest size.

    Memory allows what its bandwidth times the intensity is: the slope. Sums and comparisons of
    such operations are few, so there is no other roof.
    """
    sizes, roof = _roof(record.rows)
    found = []
    for name, (colour, marker) in _styles(record).items():
        rows = [row for row in record.rows if row.operation == name]
        most = max(row.numel for row in rows)
        for row in (row for row in rows if row.numel == most):
            place = row.numel / row.counted_bytes, row.numel / row.seconds / 1e9
            axes.plot(*place, color=colour, marker=marker, markersize=5)
            found.append(place)
    span = [min(x for x, _ in found) / 1.5, max(x for x, _ in found) * 1.5]
    ceiling = [x * roof[-1] for x in span]
    axes.plot(span, ceiling, color="black", linewidth=2)
    axes.fill_between(span, ceiling, 1e6, color="0.92")
    least = min(y for _, y in found)
    axes.set(
        xscale="log", yscale="log", xlim=span, ylim=(least / 1.5, max(*ceiling, least) * 1.5),
        xlabel="intensity: elements a counted byte", ylabel="elements a second (10⁹)",
    )  # fmt: skip
    axes.set_title(f"the slope is the copy of {sizes[-1]:,} elements", fontsize=9)
    axes.grid(True, which="both", linewidth=0.3)


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
