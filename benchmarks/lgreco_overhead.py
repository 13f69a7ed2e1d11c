"""What L-GreCo itself costs: statistics, synchronisation and decisions beside the steps.

``python benchmarks/lgreco_overhead.py`` starts mpirun with 2 and with 4 ranks. Every family trains
each model for three intervals; taken are the last two, from rank 0's log of decisions, and the
median of all steps that are not sampled.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FAMILIES = ("topk", "qsgd", "powersgd", "acp", "auto")
INTERVAL, INTERVALS = 100, 3
#: Model -> number of ranks that it is tried on: four of the larger one do not fit on two cores.
MODELS = {"demo": (2, 4), "transformer": (2,)}


def _build(model: str) -> tuple[Any, Any]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    if model == "demo":
        from hvd_greco.demo.model import build_model

        tokens = torch.randint(256, (8, 65))
        return build_model("small", 1), lambda net: nn.functional.cross_entropy(
            net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    inputs = torch.randn(2, 32, 512)
    return (
        nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
        lambda net: net(inputs).square().mean(),
    )


def worker(arguments: argparse.Namespace) -> None:
    """One rank."""
    import horovod.torch as hvd
    import torch

    import hvd_greco as greco
    from hvd_greco.adapt.journal import Interval, read_journal

    hvd.init()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.size()))
    rows = []
    for family in FAMILIES:
        net, loss = _build(arguments.model)
        named = [(f"{family}/{name}", p) for name, p in net.named_parameters()]
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            compression = greco.LGreco(named, family=family, interval=INTERVAL, log=str(log))
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(net.parameters(), lr=0.01), named_parameters=named,
                compression=compression,
            )  # fmt: skip
            took = []
            for _ in range(INTERVAL * INTERVALS):
                began = time.perf_counter()
                optimizer.zero_grad()
                loss(net).backward()
                optimizer.step()
                took.append(time.perf_counter() - began)
            compression.close()
            if hvd.rank() == 0:
                lines = [x for x in read_journal(log) if isinstance(x, Interval)][1:]
                rows.append(
                    {
                        "model": arguments.model, "ranks": hvd.size(), "family": family,
                        "layers": len(named), "step_ms": 1e3 * statistics.median(took),
                        **{
                            f"{what}_ms": 1e3 * statistics.mean(x.seconds[what] for x in lines)
                            for what in ("statistics", "synchronise", "decide")
                        },
                    }
                )  # fmt: skip
    if hvd.rank() == 0:
        Path(arguments.worker).write_text(json.dumps(rows))


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        "| model | ranks | family | step (ms) | statistics (ms an interval) | synchronisation | "
        "decision | share of 100 steps |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["rows"]:
        parts = [row[f"{what}_ms"] for what in ("statistics", "synchronise", "decide")]
        share = sum(parts) / (INTERVAL * row["step_ms"])
        lines.append(
            f"| {row['model']} | {row['ranks']} | {row['family']} | {row['step_ms']:.1f} | "
            + " | ".join(f"{part:.1f}" for part in parts)
            + f" | {100 * share:.2f} % |"
        )
    return "\n".join(lines)


def main() -> None:
    """Parse arguments; start the ranks unless this is one of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", help="write JSON here")
    parser.add_argument("--model", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    from hvd_greco.launch import python_command, run_ranks

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for model, sizes in MODELS.items():
            for ranks in sizes:
                target = Path(folder) / "rows.json"
                command = python_command(__file__, "--model", model, "--worker", str(target))
                status = run_ranks(ranks, command, timeout=1800).returncode
                if status:
                    sys.exit(status)
                rows += json.loads(target.read_text())
    command_line = "python benchmarks/lgreco_overhead.py " + " ".join(sys.argv[1:])
    result = {"command": command_line.strip(), "interval": INTERVAL, "rows": rows}
    print(table(result))
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
