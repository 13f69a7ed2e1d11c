"""Step times of stock Horovod, of our methods and of torch's DDP, interleaved in one run.

``python benchmarks/step_time.py`` starts mpirun itself. Every contender trains a model of its own,
from the same weights, on the same batches. They take turns step by step, starting from another one
each time, so that whatever else the machine does meets all of them alike; ranks start each step
together. Reported are the median over steps and the median over blocks of the ratio to stock
Horovod, with its quartiles. Between ranks of one machine compression buys no time: what is
compared there is what the methods cost.

Contenders, beside the methods of ``hvd-greco demo --help``:

    none, hvd-fp16              hvd.Compression.none and .fp16
    ddp, ddp-powersgd:RANK      torch.nn.parallel.DistributedDataParallel over Gloo, plain and with
                                torch's own PowerSGD hook
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CONTENDERS = [
    "none", "hvd-fp16", "dense", "fp16", "bf16",
    "topk:density=0.01", "topk:density=0.01,values=fp16", "topk:density=0.01,selection=sampled",
    "dgc:density=0.001,warmup=0", "sharedtopk:density=0.01", "randomk:density=0.01",
    "qsgd:bits=4", "natural", "sign", "summable:bits=4", "powersgd:rank=4", "acp:rank=4",
    "ddp", "ddp-powersgd:4",
]  # fmt: skip


def transformer() -> tuple[torch.nn.Module, tuple[int, ...]]:
    """Four encoder layers of width 512: 12.6 million parameters, in matrices of 0.26 to 1 M."""
    from torch import nn

    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), (2, 32, 512)


def small() -> tuple[torch.nn.Module, tuple[int, ...]]:
    """48 tensors, 0.8 million parameters: what a layer costs, whatever its size."""
    from torch import nn

    layers: list[nn.Module] = []
    for _ in range(12):
        layers += [nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU()]
    return nn.Sequential(*layers), (256, 256)


MODELS = {"transformer": transformer, "small": small}


class Trainer:
    """One contender: its model, its optimizer and one step of both."""

    def __init__(self, spec: str, model: str, address: str) -> None:
        import horovod.torch as hvd
        import torch

        from hvd_greco import methods

        torch.manual_seed(0)
        module, shape = MODELS[model]()
        generator = torch.Generator().manual_seed(hvd.rank())
        self.data = torch.randn(shape, generator=generator)
        self.module = module
        self.compression: Any = None
        self.optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.01)
        if spec.startswith("ddp"):
            self.module = _ddp(module, spec, address)
            return
        named = [(f"{spec}/{name}", parameter) for name, parameter in module.named_parameters()]
        if spec in ("none", "hvd-fp16"):
            stock = hvd.Compression.none if spec == "none" else hvd.Compression.fp16
            options = {"compression": stock}
        else:
            self.compression = methods.build(spec, named)
            options = {"compression": self.compression}
        self.optimizer = hvd.DistributedOptimizer(self.optimizer, named_parameters=named, **options)

    def step(self) -> float:
        """Seconds of one step."""
        started = time.perf_counter()
        self.optimizer.zero_grad()
        self.module(self.data).square().mean().backward()
        self.optimizer.step()
        return time.perf_counter() - started


def _ddp(module: torch.nn.Module, spec: str, address: str) -> Any:
    import horovod.torch as hvd
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=address, rank=hvd.rank(), world_size=hvd.size())
    name, _, rank = spec.partition(":")
    compressed = name == "ddp-powersgd"
    # The hook's allreduces of several buckets are started by Gloo's own threads, in an order that
    # differs between ranks; Gloo matches by order, and aborts (seen in seconds). So: one bucket.
    options = {"bucket_cap_mb": 4096} if compressed else {}
    wrapped: Any = DistributedDataParallel(module, **options)
    if compressed:
        # It wants two dense steps first; they fall into the warm-up.
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=int(rank), start_powerSGD_iter=2
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped


def _address() -> str:
    """Where Gloo's ranks meet: a free port of rank 0's host."""
    import socket

    import horovod.torch as hvd

    def free() -> str:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{socket.gethostbyname(socket.gethostname())}:{probe.getsockname()[1]}"

    return str(
        hvd.broadcast_object(free() if hvd.rank() == 0 else None, root_rank=0, name="address")
    )


def worker(arguments: argparse.Namespace) -> None:
    """One rank."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    threads = max(1, (os.cpu_count() or 1) // hvd.size())
    torch.set_num_threads(threads)
    specs = list(dict.fromkeys(["none", *arguments.contenders]))
    address = _address()
    trainers = {spec: Trainer(spec, arguments.model, address) for spec in specs}
    times: dict[str, list[float]] = {spec: [] for spec in specs}
    ratios: dict[str, list[float]] = {spec: [] for spec in specs}
    turn = 0
    for block in range(arguments.blocks + 1):
        mine: dict[str, list[float]] = {spec: [] for spec in specs}
        for _ in range(arguments.steps):
            turn += 1
            for i in range(len(specs)):
                spec = specs[(i + turn) % len(specs)]
                hvd.barrier()
                mine[spec].append(trainers[spec].step())
        if not block:
            continue  # the first warms up
        for spec in specs:
            times[spec] += mine[spec]
            ratios[spec].append(statistics.median(mine[spec]) / statistics.median(mine["none"]))
    if hvd.rank() == 0:
        contenders = {spec: _figures(trainers[spec], times[spec], ratios[spec]) for spec in specs}
        result = {
            "command": "python benchmarks/step_time.py "
            + " ".join(a for a in sys.argv[1:] if a != "--worker"),
            "model": arguments.model,
            "ranks": hvd.size(),
            "threads_per_rank": threads,
            "cpu": _cpu(),
            "torch": torch.__version__,
            "steps": arguments.steps * arguments.blocks,
            "contenders": contenders,
        }
        print(table(result), flush=True)
        if arguments.output:
            Path(arguments.output).write_text(json.dumps(result, indent=1) + "\n")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _figures(trainer: Trainer, times: list[float], ratios: list[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    report = trainer.compression and trainer.compression.last_report
    return {
        "median_ms": round(statistics.median(times) * 1e3, 3),
        "ratio": round(middle, 4),
        "ratio_quartiles": [round(low, 4), round(high, 4)],
        "sent_bytes": report.sent_bytes if report else None,
        "dense_bytes": sum(p.numel() * p.element_size() for p in trainer.module.parameters()),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} x {names[0] if names else 'unknown'}"


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        f"| contender ({result['model']}, {result['ranks']} ranks) | step (ms) | beside stock "
        "Horovod | quartiles | bytes sent |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for spec, figures in result["contenders"].items():
        low, high = figures["ratio_quartiles"]
        sent = figures["sent_bytes"]
        lines.append(
            f"| {spec} | {figures['median_ms']:.1f} | {figures['ratio']:.2f} | {low:.2f} to "
            f"{high:.2f} | {'' if sent is None else f'{sent:,}'} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Parse arguments; start the ranks unless this is one of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("contenders", nargs="*", help="default: all of them", default=CONTENDERS)
    parser.add_argument("--model", choices=MODELS, default="transformer")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="steps a block")
    parser.add_argument("--blocks", type=int, default=8, help="blocks, after one of warm-up")
    parser.add_argument("--output", help="write JSON here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    from hvd_greco.launch import python_command, run_ranks

    command = python_command(__file__, *sys.argv[1:], "--worker")
    # Every contender has names of its own; evicting some of them from the cache would cost time.
    env = {"HOROVOD_CACHE_CAPACITY": "16384"}
    sys.exit(run_ranks(arguments.ranks, command, timeout=3600, env=env).returncode)


if __name__ == "__main__":
    main()
