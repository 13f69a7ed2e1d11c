"""The demo's result: a JSON file that is whole or absent, and a table."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from rich.table import Table

from .config import DemoConfig

#: Keys that each entry of ``results`` has; further ones may follow.
RESULT_KEYS = (
    "method",
    "wire_bytes_per_step",
    "dense_bytes_per_step",
    "ratio",
    "step_ms_median",
    "val_bits_per_byte",
)


def make_summary(
    config: DemoConfig, start: dict[str, Any], results: list[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """Put the run's settings and what rank 0 reported together."""
    return {
        "world_size": start["world_size"],
        "steps": config.steps,
        "seed": config.seed,
        "parameters": start["parameters"],
        "results": results,
        "model": config.model,
        "batch_per_rank": config.batch,
        "seq": config.seq,
        "lr": config.lr,
        "device": start["device"],
        "threads_per_rank": start["threads_per_rank"],
        "versions": start["versions"],
        "seconds": round(seconds, 1),
    }


def write_summary(summary: dict[str, Any], folder: Path) -> Path:
    """Write ``summary.json`` in one move: readers see the old file or the new one."""
    target = folder / "summary.json"
    text = json.dumps(summary, indent=1, allow_nan=False) + "\n"
    handle, name = tempfile.mkstemp(prefix=".summary-", dir=folder)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp's 0600 would hide it from other users
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return target


def make_table(summary: dict[str, Any]) -> Table:
    """The same for the eye; the last column compares with dense."""
    dense = next(r["val_bits_per_byte"] for r in summary["results"] if r["method"] == "dense")
    table = Table(
        title=f"{summary['parameters']:,} parameters, {summary['world_size']} ranks, "
        f"{summary['steps']:,} steps, seed {summary['seed']}",
        caption="wire bytes: handed to collectives by each rank in a step, counted; "
        "ratio: dense bytes / wire bytes; on link: what each rank must then put on the network; "
        "codec: encoding, decoding and residuals, without waiting for anybody",
    )
    table.add_column("method", no_wrap=True)
    headings = (
        "wire bytes/step", "ratio", "on link", "ms/step", "codec ms", "val bits/byte", "vs dense",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right")
    for result in summary["results"]:
        bits = result["val_bits_per_byte"]
        known = bits is not None and dense is not None
        table.add_row(
            result["method"],
            f"{result['wire_bytes_per_step']:,}",
            "-" if result["ratio"] is None else f"{result['ratio']:.1f}x",
            f"{result['network_bytes_per_step']:,}",
            f"{result['step_ms_median']:.1f}",
            f"{result['codec_ms_median']:.1f}",
            "diverged" if bits is None else f"{bits:.3f}",
            f"{100 * (bits / dense - 1):+.1f} %" if known else "-",
        )
    return table


def make_plan_tables(summary: dict[str, Any]) -> list[Table]:
    """What each layer ended with, for every adaptive method."""
    tables = []
    for result in summary["results"]:
        if "plan" not in result:
            continue
        table = Table(title=f"{result['method']}: the plan at the end")
        for heading in ("layer", "method(level)"):
            table.add_column(heading, no_wrap=True)
        for heading in ("wire bytes", "dense bytes", "ratio"):
            table.add_column(heading, justify="right")
        for row in result["plan"]:
            wire, dense = row["wire_bytes"], row["dense_bytes"]
            table.add_row(
                row["layer"],
                row["assignment"],
                *(
                    ("-", "-", "-")
                    if wire is None
                    else (f"{wire:,}", f"{dense:,}", f"{dense / wire:.1f}x")
                ),
            )
        tables.append(table)
    return tables
