"""``objective="time"`` on links of known speed: is the prediction right, and does it ever lose?

``sudo python benchmarks/lgreco_time.py`` makes two hosts of network namespaces (``hvd-greco lab``),
and for every rate of their link trains each model dense, in fp16, with uniform top-k, and with
L-GreCo for time, in turns of one interval each. For L-GreCo, the step time that it predicted for
its plan is compared with what the next intervals took; all contenders' medians are compared.
Without root: ``hvd-greco lab`` says what is missing; ``mpirun ... --worker`` runs on any cluster.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RATES = ("100mbit", "300mbit", "1gbit")
INTERVAL = 20
#: Turns of one interval each; L-GreCo's first one is its dense warm-up.
TURNS = 6
CONTENDERS = {
    "dense": "dense",
    "fp16": "fp16",
    "topk 1 %": "topk:density=0.01",
    "lgreco topk": f"lgreco:family=topk,objective=time,interval={INTERVAL}",
    "lgreco auto": f"lgreco:family=auto,objective=time,interval={INTERVAL}",
}


def _text() -> tuple[Any, Callable[[Any], Any]]:
    """The demo's transformer in its larger size, on random bytes: 1.9 M parameters."""
    import torch
    from torch import nn

    from hvd_greco.demo.model import build_model

    tokens = torch.randint(256, (8, 65))
    return build_model("base", 1), lambda model: nn.functional.cross_entropy(
        model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
    )


def _mlp() -> tuple[Any, Callable[[Any], Any]]:
    """Little to compute for much to send: 2.1 M parameters, a batch of 16."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    layers = [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10))
    inputs, labels = torch.randn(16, 784), torch.randint(10, (16,))
    return model, lambda model: nn.functional.cross_entropy(model(inputs), labels)


def _cnn() -> tuple[Any, Callable[[Any], Any]]:
    """Much to compute for little to send: 0.4 M parameters, 32 images."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    widths = (3, 32, 64, 128, 256)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 256, 10))
    inputs, labels = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
    return model, lambda model: nn.functional.cross_entropy(model(inputs), labels)


MODELS = {"text": _text, "mlp": _mlp, "cnn": _cnn}


class Trainer:
    """One contender on one model."""

    def __init__(self, model: str, name: str, spec: str, log: str) -> None:
        import horovod.torch as hvd
        import torch

        from hvd_greco import methods

        torch.manual_seed(7)
        self.module, self.loss = MODELS[model]()
        named = [(f"{model}/{name}/{n}", p) for n, p in self.module.named_parameters()]
        own = {"log": log} if spec.startswith("lgreco") else {}
        self.log = Path(log) if own else None
        self.compression = methods.build(spec, named, **own)
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.module.parameters(), lr=0.01),
            named_parameters=named,
            compression=self.compression,
        )
        self.seconds: list[list[float]] = []

    def turn(self) -> None:
        """One interval of steps."""
        import horovod.torch as hvd

        hvd.barrier()
        found = []
        for _ in range(INTERVAL):
            began = time.perf_counter()
            self.optimizer.zero_grad()
            self.loss(self.module).backward()
            self.optimizer.step()
            found.append(time.perf_counter() - began)
        self.seconds.append(found)

    def figures(self) -> dict[str, Any]:
        """What became of it; without the first turn."""
        # A turn's first step is another contender's aftermath, and its last one may decide.
        later = [each[2:-1] for each in self.seconds[1 if self.log is None else 2 :]]
        found: dict[str, Any] = {
            "median_ms": 1e3 * statistics.median(itertools.chain(*later)),
            "turns_ms": [1e3 * statistics.median(each) for each in later],
            "sent_bytes": self.compression.last_report.sent_bytes,
        }
        if self.log is not None:
            found["decisions"] = self._decisions()
        return found

    def _decisions(self) -> list[dict[str, Any]]:
        """Each decision's prediction beside what the turn after it took."""
        from hvd_greco.adapt.journal import Interval, read_journal

        assert self.log is not None
        found = []
        for line in read_journal(self.log):
            if isinstance(line, Interval) and line.predicted_seconds is not None:
                turn = line.step // INTERVAL
                if turn < len(self.seconds):
                    found.append(
                        {
                            "predicted_ms": 1e3 * line.predicted_seconds,
                            # From one end of a step to the next, as the prediction is.
                            "measured_ms": 1e3 * statistics.median(self.seconds[turn][3:-1]),
                            "dense_ms": 1e3 * line.figures.get("dense_seconds", 0.0),
                            "overhead_ms": {k: 1e3 * v for k, v in line.seconds.items()},
                            "figures": line.figures,
                            "changed": line.changed,
                            "bytes": line.bytes,
                            "reason": line.reason,
                        }
                    )
        return found


def worker(arguments: argparse.Namespace) -> None:
    """One rank: every model with every contender, in turns."""
    # A host of one core each: where ranks wander between the cores, the same plan's steps differ
    # by half from one turn to the next.
    cores = sorted(os.sched_getaffinity(0))
    own = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0")) % len(cores)
    os.sched_setaffinity(0, {cores[own]})
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.size()))
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.models:
            trainers = {
                name: Trainer(model, name, spec, f"{folder}/{name.replace(' ', '-')}.jsonl")
                for name, spec in CONTENDERS.items()
            }
            names = list(trainers)
            for turn in range(TURNS):
                for i in range(len(names)):
                    name = names[(i + turn) % len(names)]
                    # What never changes needs fewer turns, and is the slowest.
                    if "lgreco" in name or turn % 2 or "topk" in name:
                        trainers[name].turn()
            if hvd.rank() == 0:
                result[model] = {name: each.figures() for name, each in trainers.items()}
            for each in trainers.values():
                each.compression.close()
    if hvd.rank() == 0:
        Path(arguments.worker).write_text(json.dumps(result))


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        "| link | model | dense (ms) | fp16 | uniform top-k 1 % | L-GreCo top-k | off | at worst "
        "| L-GreCo auto | off | at worst | beside the better of dense and fp16 |",
        "| --- | --- |" + " ---: |" * 10,
    ]
    for rate, models in result["rates"].items():
        for model, found in models.items():
            plain = [found[name]["median_ms"] for name in ("dense", "fp16")]
            cells = [rate, model, *(f"{found[n]['median_ms']:.1f}" for n in list(CONTENDERS)[:3])]
            beside = []
            for name in ("lgreco topk", "lgreco auto"):
                # How far predictions were off, as a factor: the median decision and the worst.
                off = [
                    abs(math.log(each["predicted_ms"] / each["measured_ms"]))
                    for each in found[name]["decisions"]
                ]
                cells += [
                    f"{found[name]['median_ms']:.1f}",
                    f"{100 * math.expm1(statistics.median(off)):.0f} %",
                    f"{100 * math.expm1(max(off)):.0f} %",
                ]
                beside.append(f"{found[name]['median_ms'] / min(plain):.2f}")
            lines.append("| " + " | ".join([*cells, ", ".join(beside)]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Parse arguments; make the hosts unless this is a rank."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rates", nargs="+", default=list(RATES))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--output", help="write JSON here")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    import torch

    from hvd_greco import lab
    from hvd_greco.launch import python_command

    rates: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, lab.session(arguments.hosts, arguments.rates[0]):
        for rate in arguments.rates:
            lab.set_rate(rate)
            target = Path(folder) / f"{rate}.json"
            command = python_command(
                os.path.abspath(__file__), "--models", *arguments.models, "--worker", str(target)
            )
            status = lab.run(command, timeout=1800).returncode
            if status:
                sys.exit(status)
            rates[rate] = json.loads(target.read_text())
            print(table({"rates": {rate: rates[rate]}}), flush=True)
    command_line = "python benchmarks/lgreco_time.py " + " ".join(sys.argv[1:])
    result = {
        "command": command_line.strip(), "hosts": arguments.hosts, "torch": torch.__version__,
        "rates": rates,
    }  # fmt: skip
    print(table(result))
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
