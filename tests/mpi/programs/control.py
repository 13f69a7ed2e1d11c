"""L-GreCo under mpirun: one plan on all ranks, whatever happens on one of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

import hvd_greco as greco
from hvd_greco.codecs.base import Level, Work
from hvd_greco.codecs.topk import TopKCodec

from .registry import check
from .support import Job, Net, World, gradients_of, raises

SHAPES: dict[str, tuple[int, ...]] = {
    "first": (40, 50), "second": (60, 80), "third": (1500,), "small": (10,),
}  # fmt: skip
FAMILIES = ("topk", "qsgd", "powersgd", "acp", "auto")
INTERVAL = 5


def _job(world: World, process_set: Any = None, **options: Any) -> Job:
    def make(named: Any, **common: Any) -> greco.Compressor:
        return greco.LGreco(named, interval=INTERVAL, min_numel=64, hysteresis=0, **common)

    where = {} if process_set is None else {"process_set": process_set}
    return Job(world, make, Net(world, SHAPES), compression={**options, **where}, **where)


def _gradients(world: World, step: int) -> Any:
    """Layers whose scales change, so that plans do; each rank lacks one layer now and then."""
    found = gradients_of(world.rank, step, SHAPES)
    for name, scale in (("first", 1.0), ("second", 0.1 * (1 + step // INTERVAL)), ("third", 5.0)):
        gradient = found[name]
        assert gradient is not None
        found[name] = gradient * scale * (gradient.abs() > 1.5)
    if step % 7 == world.rank:
        found["second"] = None
    return found


def _step(world: World, job: Job, step: int) -> None:
    order = list(SHAPES)
    random.Random(f"{step}/{world.rank}").shuffle(order)
    job.net.backward(_gradients(world, step), order)
    job.optimizer.step()
    job.optimizer.zero_grad()


@check(sizes=(2, 3, 4), each=FAMILIES)
def retuned_over_mpi(world: World, family: str) -> None:
    """cases 10, 11, 23: plans change at the same step on all ranks, and parameters stay equal."""
    job = _job(world, family=family)
    plans = []
    for step in range(4 * INTERVAL + 2):
        _step(world, job, step)
        world.same(job.net.parameters(), f"parameters after step {step}")
        plans.append(job.compressor.plan)
    digests = torch.tensor([list(plan.digest) for plan in plans], dtype=torch.uint8)
    world.same([digests], "plans")
    assert [plan.epoch for plan in plans[: INTERVAL - 1]] == [0] * (INTERVAL - 1)
    assert plans[INTERVAL - 1].epoch == 1
    controller = job.compressor._controller
    assert controller is not None
    assert controller._control is not None
    assert controller._control.over == "MPI"


@check(sizes=(3,))
def retuned_in_a_process_set(world: World) -> None:
    """case 31: MPI's world is not the process set, so Horovod's own collectives are used."""
    if world.rank < 2:
        job = _job(world, process_set=world.pair)
        for step in range(INTERVAL + 1):
            _step(world, job, step)
        controller = job.compressor._controller
        assert controller is not None
        assert controller._control is not None
        assert controller._control.over != "MPI"
        assert job.compressor.plan.epoch >= 1
    world.meet()


@check()
def statistics_fail_on_one_rank(world: World) -> None:
    """case 12: all ranks are told, with the layer and the rank."""

    class Broken(TopKCodec):
        def errors(self, work: Work, vector: torch.Tensor, levels: Sequence[Level]) -> list[float]:
            if world.rank == 1 and work.layer.name.endswith("second"):
                raise ValueError("no memory")
            return super().errors(work, vector, levels)

    job = _job(world, codecs={"topk": Broken()})
    with raises(greco.PolicyError, "rank 1", "/second'", "ValueError: no memory"):
        for step in range(INTERVAL):
            _step(world, job, step)


@check()
def a_policy_fails(world: World) -> None:
    """case 12: only rank 0 decides, and all ranks hear of it."""

    class Broken(greco.Policy):
        name = "mine"

        def decide(self, evidence: greco.Evidence) -> greco.Decision:
            assert world.rank == 0
            raise ZeroDivisionError("of nothing")

    job = _job(world, policy=Broken())
    with raises(greco.PolicyError, "policy 'mine' after 5 steps", "ZeroDivisionError: of nothing"):
        for step in range(INTERVAL):
            _step(world, job, step)


@check()
def budgets_differ(world: World) -> None:
    """case 11: noticed in the first step, by name and value."""
    job = _job(world, budget=1.0 if world.rank else 2.0)
    job.net.backward(gradients_of(world.rank, 0, SHAPES))
    with raises(greco.MismatchError, "policy", "budget=error:2", "budget=error:1"):
        job.optimizer.step()
