"""Logs of decisions for the eye: tables, and a picture of every layer's level over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from ..errors import ConfigError
from .journal import Interval, LayerLine, Line


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f}"


def intervals_table(lines: Sequence[Line]) -> Table:
    """One row for each decision."""
    table = Table(
        title="decisions",
        caption="bytes: on the link, each rank, a step; error: beside the uniform default's; "
        "overhead: statistics, synchronisation and decision on rank 0, in the whole interval",
    )
    headings = (
        "step", "changed", "bytes before", "bytes", "error", "measured ms", "predicted ms",
        "overhead ms",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right")
    table.add_column("reason")
    for line in lines:
        if isinstance(line, Interval):
            table.add_row(
                f"{line.step:,}", str(line.changed), f"{line.bytes_before:,.0f}",
                f"{line.bytes:,.0f}", _percent(line.error, line.error_default),
                _milliseconds(line.measured_seconds), _milliseconds(line.predicted_seconds),
                _milliseconds(sum(line.seconds.values())), line.reason,
            )  # fmt: skip
    return table


def layers_table(lines: Sequence[Line], interval: int | None = None) -> Table:
    """One row for each layer in one decision.

    Args:
        lines: of a log.
        interval: which decision; None: the last.

    Raises:
        ConfigError: the log has no such decision.
    """
    layers = [line for line in lines if isinstance(line, LayerLine)]
    known = sorted({line.interval for line in layers})
    chosen = interval if interval is not None else (known[-1] if known else 0)
    if chosen not in known:
        there = f"0 to {known[-1]}" if known else "none"
        raise ConfigError(f"--interval: {chosen} is not in the log, which has {there}")
    table = Table(title=f"layers, decision {chosen}")
    table.add_column("layer", no_wrap=True)
    for heading in ("before", "from then on"):
        table.add_column(heading)
    for heading in ("bytes", "error", "codec ms", "link ms"):
        table.add_column(heading, justify="right")
    table.add_column("reason")
    for line in layers:
        if line.interval == chosen:
            table.add_row(
                line.layer, line.old, line.new, f"{line.bytes:,.0f}",
                _percent(line.error, line.energy), _milliseconds(line.predicted_codec_seconds),
                _milliseconds(line.predicted_link_seconds), line.reason,
            )  # fmt: skip
    return table


def draw(lines: Sequence[Line], path: Path) -> None:
    """Write a heat map: layers by decisions, dark where many bytes are sent, options as text.

    Args:
        lines: of a log, with at least one decision.
        path: file; its ending decides the format.
    """
    import numpy as np
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    layers = [line for line in lines if isinstance(line, LayerLine)]
    steps = {line.interval: line.step for line in lines if isinstance(line, Interval)}
    if not layers:
        raise ConfigError("the log has no decision to draw")
    names = list(dict.fromkeys(line.layer for line in layers))
    when = sorted(steps)
    # A column for what was in force before the first decision, too.
    texts = np.full((len(names), len(when) + 1), "", dtype=object)
    bytes_ = np.full(texts.shape, np.nan)
    for line in layers:
        row, column = names.index(line.layer), when.index(line.interval)
        texts[row, column + 1] = line.new
        bytes_[row, column + 1] = max(1.0, line.bytes)
        if not column:
            texts[row, 0] = line.old
    # Equal options of one layer have equal bytes, in whatever decision.
    for row in range(len(names)):
        same = np.flatnonzero(texts[row, 1:] == texts[row, 0]) + 1
        if same.size:
            bytes_[row, 0] = bytes_[row, same[0]]
    width, height = 2.5 + 0.9 * texts.shape[1], 1.2 + 0.28 * len(names)
    figure = Figure(figsize=(min(width, 40), min(height, 60)), layout="constrained")
    axes = figure.subplots()
    low, high = float(np.nanmin(bytes_)), float(np.nanmax(bytes_))
    image = axes.imshow(
        bytes_, aspect="auto", cmap="Greys", norm=LogNorm(low, max(high, low * 1.01))
    )
    middle = np.sqrt(low * high)
    for row in range(len(names)):
        for column in range(texts.shape[1]):
            dark = bytes_[row, column] > middle
            axes.text(
                column, row, texts[row, column], ha="center", va="center", fontsize=6,
                color="white" if dark else "black",
            )  # fmt: skip
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_xticks(range(texts.shape[1]), ["start", *(f"{steps[i]:,}" for i in when)], fontsize=7)
    axes.set_xlabel("in force from step")
    figure.colorbar(image, label="bytes on the link, each rank, a step")
    figure.savefig(path, dpi=130)
