"""Ranks that disagree: an error on each of them that says on what, before anything hangs."""

from __future__ import annotations

from typing import Any

import torch
from horovod.common.exceptions import HorovodInternalError

import hvd_greco as greco

from .registry import check
from .support import ROUTES, Job, Make, Net, World, gradients_of, raises


def _disagree(world: World, make: Make, *words: str) -> None:
    job = Job(world, make)
    job.net.backward(gradients_of(world.rank, 0))
    before = job.residuals()
    with raises(greco.MismatchError, "rank 0", "rank 1", *words):
        job.optimizer.step()
    for name, held in job.residuals().items():
        old = before[name]
        assert held is None or (old is not None and torch.equal(held, old)), f"{name}: changed"


def _odd(world: World, odd: Any, even: Any) -> Any:
    return odd if world.rank == 1 else even


@check()
def density_differs(world: World) -> None:
    """case 11: the layer's name and both values, on both ranks."""
    density = _odd(world, 0.1, 0.05)
    _disagree(
        world,
        lambda named, **options: greco.TopK(named, density, **options),
        "first", "topk(0.05)", "topk(0.1)",
    )  # fmt: skip


@check(each=("topk", "randomk"))
def seed_differs(world: World, method: str) -> None:
    make = {"topk": greco.TopK, "randomk": greco.RandomK}[method]
    seed = _odd(world, 11, 7)
    _disagree(
        world, lambda named, **options: make(named, 0.05, seed=seed, **options), "seed", "11", "7"
    )


@check()
def excluded_layer_differs(world: World) -> None:
    """case 11: a layer that is dense on one rank and compressed on the other."""
    # bf16's carriers have one size whatever the layer; a dense gradient's size would differ, which
    # Horovod itself refuses. So the layers are told apart by min_numel, below the smallest.
    memory = _odd(world, "ef21", "ef")
    _disagree(
        world,
        lambda named, **options: greco.TopK(named, 0.05, memory=memory, **options),
        "memory", "ef", "ef21",
    )  # fmt: skip


@check()
def one_rank_is_a_step_behind(world: World) -> None:
    """case 11: the steps of both ranks are in the message."""
    job = Job(world, "topk")
    for step in range(2):
        job.net.backward(gradients_of(world.rank, step))
        job.optimizer.step()
        job.optimizer.zero_grad()
    if world.rank == 1:
        job.compressor._reduction.step -= 1
    job.net.backward(gradients_of(world.rank, 2))
    with raises(greco.MismatchError, "rank 0 is at step 2", "rank 1 at step 1"):
        job.optimizer.step()


@check(each=("topk", "randomk", "bf16"))
def synchronized_twice_on_one_rank(world: World, method: str) -> None:
    """case 20: a rank that repeats synchronize() while another has a new gradient is told so."""
    job = Job(world, method)
    job.net.backward(gradients_of(world.rank, 0))
    job.optimizer.synchronize()
    if world.rank != 1:
        # The others go on, rank 1 does not.
        with job.optimizer.skip_synchronize():
            job.optimizer.step()
        job.net.backward(gradients_of(world.rank, 1))
    with raises(greco.MismatchError, "already been reduced", "skip_synchronize"):
        job.optimizer.synchronize()


@check()
def dense_layer_kept_on_one_rank(world: World) -> None:
    """cases 5 and 20: DGC's small layers carry no checks of their own, and none may diverge."""
    job = Job(world, lambda named, **options: greco.DGC(named, 0.05, **options))
    gradients = gradients_of(world.rank, 0)
    job.net.backward(gradients)
    job.optimizer.step()
    for name, parameter in job.net.named_parameters():
        # As after an overflow: the weights, and their versions, stay as they are.
        slot = next(s for s in job.compressor._directory.slots if s.layer.name.endswith(name))
        slot.mark_reduced(parameter.grad)
        if name != "small" or world.rank != 1:
            parameter.grad = None
    job.net.backward({n: g for n, g in gradients.items() if n != "small" or world.rank != 1})
    with raises(greco.MismatchError, "/small'", "already been reduced on rank 1", "zero_grad"):
        job.optimizer.step()


@check(each=ROUTES)
def reduced_gradient_changed_on_one_rank(world: World, method: str) -> None:
    """case 20: clipping that differs between ranks, followed by a second synchronize()."""
    job = Job(world, method)
    job.net.backward(gradients_of(world.rank, 0))
    job.optimizer.synchronize()
    for parameter in job.net.parameters():
        assert parameter.grad is not None
        # No rank's sum is the mean of all.
        parameter.grad.mul_(1.0 + world.rank**2)
    with raises(greco.MismatchError, "changed in place", "Change it alike"):
        job.optimizer.synchronize()


@check()
def payload_sizes_of_carried_layers_differ(world: World) -> None:
    """case 11: Horovod compares carried sizes before we can; an error in any case, and no hang."""
    density = _odd(world, 0.1, 0.05)
    job = Job(world, lambda named, **options: greco.RandomK(named, density, **options))
    job.net.backward(gradients_of(world.rank, 0))
    # Horovod's class, not ours: it fails in its own synchronize(), which never gets to us.
    with raises(HorovodInternalError, "ismatched", "[80]", "[155]"):
        job.optimizer.step()


@check(sizes=(2,), each=("topk", "randomk", "bf16", "dense"))
def models_differ(world: World, method: str) -> None:
    """case 11: one rank has a larger model."""
    from .support import METHODS

    shapes: dict[str, tuple[int, ...]] = {"first": _odd(world, (40, 60), (40, 50))}
    job = Job(world, METHODS[method], Net(world, shapes))
    job.net.backward(gradients_of(world.rank, 0, shapes))
    # Sizes of two private rounds are not compared by Horovod, so the beacon tells.
    words = (
        ("shape of", "first", "40x50", "40x60") if method in ("topk", "bf16") else ("ismatched",)
    )
    with raises((greco.MismatchError, HorovodInternalError), *words):
        job.optimizer.step()
