"""Does a method train as well as dense? Equal steps, several seeds, 2 and 4 ranks.

``python benchmarks/convergence.py digits`` trains a small CNN on scikit-learn's handwritten digits
(1,797 real 8x8 images, a fifth held out); ``... text`` trains the demo's transformer. Every method
of a (task, ranks, seed) starts from the same weights and sees the same batches and learning rates.
Results go to ``benchmarks/results/convergence-TASK.json`` after every run, so that an interrupted
study goes on where it stopped; ``... table`` prints them as Markdown.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"

#: Methods and the options that suit a short training of small models.
METHODS = {
    "digits": [
        "dense", "fp16", "bf16", "topk:density=0.01", "topk:density=0.01,values=fp16",
        "topk:density=0.01,values=q8", "sharedtopk:density=0.01", "randomk:density=0.01",
        "dgc:density=0.001,warmup=45", "qsgd:bits=4", "natural", "sign",
        "summable:bits=4", "powersgd:rank=4", "acp:rank=4", "topk:density=0.01,memory=ef21-sgdm",
        "lgreco:topk,interval=50", "lgreco:qsgd,interval=50", "lgreco:powersgd,interval=50",
        "lgreco:auto,interval=50",
    ],
    "text": [
        "dense", "fp16", "bf16", "topk:density=0.01", "sharedtopk:density=0.01",
        "randomk:density=0.01", "dgc:density=0.01,warmup=60", "qsgd:bits=4", "natural",
        "sign", "summable:bits=4", "powersgd:rank=4", "acp:rank=4", "lgreco:topk,interval=50",
        "lgreco:qsgd,interval=50", "lgreco:powersgd,interval=50",
        "lgreco:auto,interval=50",
    ],
}  # fmt: skip


def digits(spec: str, seed: int, steps: int) -> dict[str, Any]:
    """One training on this rank; returns rank 0's record."""
    import horovod.torch as hvd
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    from hvd_greco import methods

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(7))
    x = (torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16)[order]
    y = torch.tensor(labels)[order]
    held = len(y) // 5
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    momentum = 0.0 if spec.startswith("dgc") else 0.9
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    compression = methods.build(spec, model.named_parameters())
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    batches = torch.Generator().manual_seed(1000 * seed + hvd.rank())
    sent = dense = 0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = (
                0.05 * min(1.0, (step + 1) / 40) * (0.5 * (1 + math.cos(math.pi * step / steps)))
            )
        chosen = held + torch.randint(len(y) - held, (32,), generator=batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
        sent += compression.last_report.sent_bytes
        dense += compression.last_report.dense_bytes
    with torch.no_grad():
        logits = model(x[:held])
        accuracy = (logits.argmax(1) == y[:held]).float().mean().item()
        loss = nn.functional.cross_entropy(logits, y[:held]).item()
    compression.close()
    return {"accuracy": accuracy, "loss": loss, "ratio": dense / sent}


def text(spec: str, seed: int, steps: int) -> dict[str, Any]:
    """One training of the demo's transformer on this rank."""
    import horovod.torch as hvd
    import torch

    from hvd_greco.demo.config import make_config
    from hvd_greco.demo.data import load_corpus
    from hvd_greco.demo.train import train_method

    config = make_config(ranks=hvd.size(), steps=steps, method_list=spec, model="tiny", seed=seed)
    result = train_method(
        config, spec, load_corpus(config.seq), torch.device("cpu"), lambda *_: None
    )
    return {
        "bits_per_byte": result["val_bits_per_byte"],
        "ratio": result["dense_bytes_per_step"] / result["wire_bytes_per_step"],
    }


TASKS = {"digits": (digits, 800), "text": (text, 600)}


def worker(task: str, specs: list[str], seeds: list[int]) -> None:
    """All runs of one world size that are not recorded yet."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.size()))
    path = RESULTS / f"convergence-{task}.json"
    records = json.loads(path.read_text()) if path.exists() else []
    done = {(r["ranks"], r["method"], r["seed"]) for r in records}
    # Rank 0 alone decides what is left: the file may change while the ranks start.
    missing = hvd.broadcast_object(
        [(m, s) for m in specs for s in seeds if (hvd.size(), m, s) not in done], root_rank=0
    )
    run, steps = TASKS[task]
    for spec, seed in missing:
        record = {"ranks": hvd.size(), "method": spec, "seed": seed, "steps": steps}
        record.update(run(spec, seed, steps))
        if hvd.rank() == 0:
            records.append(record)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".tmp").write_text(json.dumps(records, indent=1) + "\n")
            path.with_suffix(".tmp").replace(path)
            print(json.dumps(record), flush=True)


def table(task: str) -> str:
    """The records as a Markdown table: mean and spread over seeds, beside dense."""
    records = json.loads((RESULTS / f"convergence-{task}.json").read_text())
    measure = "accuracy" if task == "digits" else "bits_per_byte"
    ranks = sorted({r["ranks"] for r in records})
    head = ["method", *(f"{measure.replace('_', ' ')}, {n} ranks" for n in ranks)]
    head += [f"beside dense, {n} ranks" for n in ranks] + ["ratio"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]

    def values(spec: str, n: int, key: str) -> list[float]:
        return [r[key] for r in records if r["method"] == spec and r["ranks"] == n]

    for spec in dict.fromkeys(r["method"] for r in records):
        cells, beside = [], []
        for n in ranks:
            own, dense = values(spec, n, measure), values("dense", n, measure)
            if not own or not dense:
                cells.append("-")
                beside.append("-")
                continue
            mean = statistics.mean(own)
            cells.append(f"{mean:.4f} ± {statistics.pstdev(own):.4f}")
            beside.append(f"{100 * (mean / statistics.mean(dense) - 1):+.2f} %")
        ratio = statistics.mean(values(spec, ranks[0], "ratio"))
        lines.append(f"| {spec} | " + " | ".join([*cells, *beside]) + f" | {ratio:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Parse arguments; start the ranks unless this is one of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", choices=[*TASKS, "table"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--methods", nargs="+", help="specs; default: the study's own list")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task == "table":
        for task in TASKS:
            if (RESULTS / f"convergence-{task}.json").exists():
                print(f"### {task}\n\n{table(task)}\n")
        return
    if arguments.task == "digits" and importlib.util.find_spec("sklearn") is None:
        parser.error("digits needs scikit-learn: pip install -c constraints.txt -e '.[bench]'")
    specs = arguments.methods or METHODS[arguments.task]
    if arguments.worker:
        worker(arguments.task, specs, arguments.seeds)
        return
    from hvd_greco.launch import python_command, run_ranks

    for ranks in arguments.ranks:
        command = python_command(
            __file__, arguments.task, "--worker", "--methods", *specs,
            "--seeds", *map(str, arguments.seeds),
        )  # fmt: skip
        status = run_ranks(ranks, command).returncode
        if status:
            sys.exit(status)


if __name__ == "__main__":
    main()
