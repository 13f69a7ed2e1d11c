"""Every exchange against dense Horovod, between hosts that this machine pretends to be."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
import torch

import hvd_greco as greco
from hvd_greco import methods
from hvd_greco.plan import Assignment, Plan

from .registry import check
from .support import World

EXCHANGES = (None, "allgather", "scatter", "hierarchical")
#: Gathered payloads of one size, of sizes that vary, and carried ones.
INSIDE = ("topk:0.05", "qsgd:4", "sign", "acp:2", "randomk:0.05")


@contextmanager
def hosts_of(ranks: int) -> Iterator[None]:
    """Let Horovod say that each ``ranks`` ranks share a host; what it communicates is the same."""
    said = {
        "local_rank": lambda: hvd.rank() % ranks,
        "local_size": lambda: ranks,
        "cross_rank": lambda: hvd.rank() // ranks,
        "cross_size": lambda: hvd.size() // ranks,
    }
    true = {name: getattr(hvd, name) for name in said}
    for name, function in said.items():
        setattr(hvd, name, function)
    try:
        yield
    finally:
        for name, function in true.items():
            setattr(hvd, name, function)


class Model(torch.nn.Module):
    """Layers of odd and tiny sizes; one of them is left out on some ranks in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(37, 50)
        self.b = torch.nn.Linear(50, 50)
        self.c = torch.nn.Linear(50, 3)

    def forward(self, x: torch.Tensor, skip: bool) -> torch.Tensor:
        x = torch.relu(self.a(x))
        return self.c(x if skip else torch.relu(self.b(x)))


def train(world: World, label: str, make: Any, steps: int = 12) -> tuple[torch.Tensor, Any]:
    """Parameters after some steps, and the compressor (None: dense Horovod)."""
    torch.manual_seed(0)
    model = Model()
    named = [(f"{world.name}/{label}/{n}", p) for n, p in model.named_parameters()]
    compression = make(named)
    options = {} if compression is None else {"compression": compression}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=named, **options
    )
    data = torch.Generator().manual_seed(world.rank)
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(16, 37, generator=data)
        skip = random.Random(f"{step}/{world.rank}").random() < 0.3
        model(x, skip).square().mean().backward()
        announced = 0 if compression is None else compression.wire_bytes()
        optimizer.step()
        if compression is not None:
            # Less where a rank lacks gradients, and a host has none to hand on.
            assert compression.last_report.sent_bytes <= announced
        world.same(model.parameters(), f"{label}: parameters after step {step}")
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach(), compression


@check(sizes=(4,), each=EXCHANGES)
def exchange_is_the_mean(world: World, exchange: str | None) -> None:
    """All entries by any route are dense Horovod's mean; few of them send what is announced."""
    dense, _ = train(world, "dense", lambda named: None)

    def everything(named: Any) -> Any:
        compressor = greco.TopK(named, 1.0, exchange=exchange, min_numel=0)
        # Density 1 saves nothing, so the plan of its own would send it dense.
        (codec,) = set(compressor._codecs) - {"dense"}
        compressor.plan = Plan(
            dict.fromkeys(compressor.plan.assignments, Assignment(codec, 1.0)),
            context=compressor.plan.context,
        )
        return compressor

    def few(named: Any) -> Any:
        return greco.TopK(named, 0.05, exchange=exchange, min_numel=0)

    with hosts_of(2):
        result, _ = train(world, "all", everything)
        torch.testing.assert_close(result, dense, atol=1e-5, rtol=1e-4)
        _, compressor = train(world, "few", few)
    report = compressor.last_report
    # Between hosts, that is; inside of them the hierarchical exchange is dense.
    assert report.ratio > 1, f"{report.sent_bytes} bytes, ratio {report.ratio}"


@check(sizes=(4,), each=INSIDE)
def methods_between_hosts(world: World, spec: str) -> None:
    """Hierarchical: equal parameters on all ranks, fewer bytes between hosts than dense."""
    text = f"{spec},exchange=hierarchical" if ":" in spec else f"{spec}:exchange=hierarchical"
    with hosts_of(2):
        result, compressor = train(
            world, "two hosts", lambda named: methods.build(text, named, min_numel=0)
        )
    assert bool(torch.isfinite(result).all())
    report = compressor.last_report
    assert report.network_bytes < report.dense_bytes, (
        f"{report.network_bytes} of {report.dense_bytes}"
    )
