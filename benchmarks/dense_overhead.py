"""Step time with ``greco.Dense`` against ``hvd.Compression.none``: the cost of our bookkeeping.

Run ``python benchmarks/dense_overhead.py`` (it starts mpirun itself). The two are interleaved, one
step each in turn, on models of equal shape; rank 0 prints both medians and the median of the
ratios of neighbouring blocks, and writes JSON with ``--output``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path


def worker(steps: int, blocks: int, output: str | None) -> None:
    """One rank."""
    import horovod.torch as hvd
    import torch

    import hvd_greco as greco

    hvd.init()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.size()))

    def trainer(ours: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layers: list[torch.nn.Module] = []
        for _ in range(12):
            layers += [torch.nn.Linear(256, 256), torch.nn.LayerNorm(256), torch.nn.ReLU()]
        model = torch.nn.Sequential(*layers)
        names = [(f"{'ours' if ours else 'stock'}.{n}", p) for n, p in model.named_parameters()]
        compression = greco.Dense(names) if ours else hvd.Compression.none
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return model, hvd.DistributedOptimizer(
            optimizer, named_parameters=names, compression=compression
        )

    pair = {"stock": trainer(False), "ours": trainer(True)}
    data = torch.randn(256, 256, generator=torch.Generator().manual_seed(hvd.rank()))
    times: dict[str, list[float]] = {"stock": [], "ours": []}
    ratios = []
    for block in range(blocks):
        block_times: dict[str, list[float]] = {"stock": [], "ours": []}
        for step in range(steps):
            order = ["stock", "ours"] if step % 2 else ["ours", "stock"]
            for name in order:
                model, optimizer = pair[name]
                hvd.barrier()
                started = time.perf_counter()
                optimizer.zero_grad()
                model(data).square().mean().backward()
                optimizer.step()
                block_times[name].append(time.perf_counter() - started)
        if block:  # the first block warms up
            medians = {name: statistics.median(block_times[name]) for name in block_times}
            ratios.append(medians["ours"] / medians["stock"])
            for name in times:
                times[name] += block_times[name]
    if hvd.rank() == 0:
        result = {
            "ranks": hvd.size(),
            "steps": steps * (blocks - 1),
            "stock_ms": statistics.median(times["stock"]) * 1e3,
            "ours_ms": statistics.median(times["ours"]) * 1e3,
            "ratio_median": statistics.median(ratios),
            "ratio_quartiles": statistics.quantiles(ratios, n=4),
            "torch": torch.__version__,
        }
        print(json.dumps(result, indent=2))
        if output:
            Path(output).write_text(json.dumps(result, indent=2) + "\n")


def main() -> None:
    """Parse arguments; start the ranks unless this is one of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="steps a block")
    parser.add_argument("--blocks", type=int, default=9, help="blocks, the first not counted")
    parser.add_argument("--output", help="write JSON here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.steps, arguments.blocks, arguments.output)
        return
    from hvd_greco.launch import python_command, run_ranks

    sys.exit(
        run_ranks(
            arguments.ranks, python_command(__file__, *sys.argv[1:], "--worker"), timeout=900
        ).returncode
    )


if __name__ == "__main__":
    main()
