"""When rounds move on, and in which orders ranks may submit."""

from __future__ import annotations

import random
import time
from typing import Any

import horovod.torch as hvd
import torch

import hvd_greco as greco
from hvd_greco import methods
from hvd_greco.exchange.horovod import HorovodGroup

from .registry import check
from .support import ROUTES, Job, Net, Oracle, World, compare, draw, gradients_of


class Recording(HorovodGroup):
    """Horovod's ranks, with a list of what was submitted and of what is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.submitted: list[str] = []
        self.under_way: list[Any] = []

    def submit(self, name: str, payload: Any) -> Any:
        self.submitted.append(name)
        ticket = super().submit(name, payload)
        self.under_way.append(ticket)
        return ticket

    def wait(self, ticket: Any) -> Any:
        self.under_way.remove(ticket)
        return super().wait(ticket)


class Slow(torch.autograd.Function):
    """Nothing, except that its backward pass takes as long as what is under way.

    Long computations, in other words, without a fixed sleep that a busy machine outlasts.
    """

    group: Recording | None = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        limit = time.monotonic() + 5
        while Slow.group is not None and time.monotonic() < limit:
            if all(Slow.group.poll(ticket) for ticket in Slow.group.under_way):
                break
            time.sleep(0.001)
        return gradient


@check()
def rounds_move_on_during_backward(world: World) -> None:
    """case 10: second rounds are submitted from hooks, long before the first decompress."""
    layers = 24
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(40, 40) / 7) for _ in range(layers)]
    named = [(f"{world.name}/{i}", weight) for i, weight in enumerate(weights)]
    group = Slow.group = Recording()
    compression = greco.Dense(named, "bf16", group=group)
    early: list[int] = []
    decompress = compression.decompress

    def watched(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        early.append(sum(name.endswith("/2") for name in group.submitted))
        return decompress(tensor, context)

    compression.decompress = watched
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(weights, lr=0.1), named_parameters=named, compression=compression
    )
    for step in range(3):
        group.submitted.clear()
        early.clear()
        x = draw("x", world.rank, step, shape=(8, 40))
        for weight in weights:
            x = Slow.apply(torch.tanh(x @ weight))
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert len(early) == layers
        # Not all of them: the last layers have no backward pass behind them.
        assert early[0] >= layers // 2, f"{early[0]} of {layers} second rounds before decompress"
        assert sum(name.endswith("/2") for name in group.submitted) == layers
    Slow.group = None
    world.same(weights, "parameters")


#: Every method, and the options that change what is exchanged, or when.
EVERY = (
    "dense", "fp16", "bf16", "topk:0.05", "topk:0.05,values=q8", "topk:0.05,selection=sampled",
    "topk:0.05,memory=ef21", "topk:0.05,exchange=scatter", "dgc:0.05,warmup=20",
    "sharedtopk:0.05", "randomk:0.05", "qsgd:4", "qsgd:4,exchange=scatter", "natural", "sign",
    "sign:memory=ef21-sgdm", "summable:4", "powersgd:2", "acp:2",
)  # fmt: skip


@check(sizes=(2, 4), each=EVERY)
def no_order_stalls(world: World, spec: str) -> None:
    """case 10: 200 steps; each rank submits in orders of its own, and lacks layers of its own."""
    shapes: dict[str, tuple[int, ...]] = {
        f"layer{i}": (40, 30) if i % 3 else (1100 + i,) for i in range(7)
    }
    shapes["small"] = (9,)

    def make(named: Any, **common: Any) -> greco.Compressor:
        return methods.build(spec, named, **common)

    job = Job(world, make, Net(world, shapes), lr=0.01)
    assert bool(job.compressed()) == (spec != "dense")
    everyone = random.Random(0)
    for step in range(200):
        gradients = gradients_of(world.rank, step % 7, shapes)
        for rank in range(world.size):
            for layer in shapes:
                # All ranks draw for all ranks: now and then nobody has a gradient.
                if everyone.random() < 0.25 and rank == world.rank:
                    gradients[layer] = None
        order = list(shapes)
        random.Random(f"{step}/{world.rank}").shuffle(order)
        if world.rank == step % world.size:
            time.sleep(0.001)
        job.net.backward(gradients, order)
        job.optimizer.step()
        job.optimizer.zero_grad()
        if step % 20 == 0 or step == 199:
            world.same(job.net.parameters(), f"parameters after step {step}")
    assert all(bool(torch.isfinite(p).all()) for p in job.net.parameters())
    report = job.compressor.last_report
    assert report is not None
    assert report.step == 199


@check(each=ROUTES)
def orders_differ_between_ranks(world: World, method: str) -> None:
    """case 10: 50 steps in which each rank submits in an order of its own, some layers absent."""
    shapes: dict[str, tuple[int, ...]] = {
        f"layer{i}": (40, 30) if i % 3 else (1100 + i,) for i in range(9)
    }
    nets = [Net(world, shapes, prefix=f"{world.name}/{i}") for i in range(2)]
    jobs = [Job(world, method, net, lr=0.01) for net in nets]
    oracles = [Oracle(range(world.size), method, shapes) for _ in jobs]
    for step in range(50):
        mine = random.Random(step * 10 + world.rank)
        everyone = random.Random(-step)
        gradients = []
        for job in range(2):
            gradients.append(
                {rank: gradients_of(rank, f"{job}/{step}", shapes) for rank in range(world.size)}
            )
            for rank in range(world.size):
                for name in shapes:
                    if everyone.random() < 0.15:
                        gradients[job][rank][name] = None
        # Both models' backward passes run before either optimizer's step, in either order.
        for job in (0, 1) if world.rank % 2 else (1, 0):
            order = list(shapes)
            if step % 2:
                mine.shuffle(order)
            elif world.rank % 2:
                order.reverse()
            nets[job].backward(gradients[job][world.rank], order)
        for job in range(2):
            jobs[job].optimizer.step()
        if step % 10 == 0 or step == 49:
            for job in range(2):
                world.same(nets[job].parameters(), f"parameters of model {job} after step {step}")
        for job in range(2):
            if method != "randomk":
                compare(jobs[job], oracles[job], gradients[job], rank=world.rank)
            jobs[job].optimizer.zero_grad()
