"""Gradients that are missing, empty, zero, not finite, or reallocated in each step."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable

import horovod.torch as hvd
import torch

import hvd_greco as greco

from .registry import check
from .support import (
    FEEDBACK,
    METHODS,
    ROUTES,
    SHAPES,
    Gradients,
    Job,
    Net,
    Oracle,
    World,
    compare,
    draw,
    gradients_of,
    raises,
    run_against_oracle,
)


@check(each=ROUTES)
def absent_on_alternating_ranks(world: World, method: str) -> None:
    """case 9, case 10: zero contribution there, no NaN, and that rank's residual stays as it was.

    Horovod submits such gradients in the order of a set, which differs between ranks.
    """

    def absent(rank: int, step: int, name: str) -> bool:
        return name != "third" and (step + len(name)) % world.size == rank

    job = run_against_oracle(world, method, steps=8, absent=absent)
    for parameter in job.net.parameters():
        assert torch.isfinite(parameter).all()


@check(each=ROUTES)
def absent_residual_is_bitwise_kept(world: World, method: str) -> None:
    """case 9: the rank without a gradient keeps its residual to the last bit."""
    job = Job(world, method)
    job.net.backward(gradients_of(world.rank, 0))
    job.optimizer.step()
    job.optimizer.zero_grad()
    before = job.residuals()
    mine = gradients_of(world.rank, 1)
    if world.rank == 1:
        mine["first"] = mine["small"] = None
    job.net.backward(mine)
    job.optimizer.step()
    for name, held in job.residuals().items():
        old = before[name]
        assert (held is None) == (old is None)
        if held is not None and old is not None:
            stays = world.rank == 1 and name == "first"
            assert torch.equal(held, old) == stays, f"{name}: the residual {held} was {old}"


@check(each=ROUTES)
def absent_everywhere_on_one_rank(world: World, method: str) -> None:
    """case 9: a rank that runs no backward pass at all in some steps."""
    run_against_oracle(
        world, method, steps=6, absent=lambda rank, step, name: rank == step % (world.size + 1)
    )


@check(each=ROUTES)
def absent_on_all_ranks(world: World, method: str) -> None:
    """case 13: empty payloads from everybody take part, and give zeros."""
    run_against_oracle(
        world, method, steps=4, absent=lambda rank, step, name: name == "first" and step != 2
    )


@check(each=METHODS)
def parameter_without_elements(world: World, method: str) -> None:
    """case 13: a parameter of no elements, beside others and with min_numel=0."""
    shapes = {**SHAPES, "void": (0, 5)}
    job = Job(world, method, Net(world, shapes), compression={"min_numel": 0})
    oracle = Oracle(range(world.size), method, job.compressed())
    assert "void" not in job.compressed()
    for step in range(3):
        gradients = {rank: gradients_of(rank, step, shapes) for rank in range(world.size)}
        job.net.backward(gradients[world.rank])
        job.optimizer.step()
        assert job.net.gradients()["void"].shape == (0, 5)
        if method != "fp16":
            compare(job, oracle, gradients, rank=world.rank)
        job.optimizer.zero_grad()


@check(each=METHODS)
def zeros_give_zeros(world: World, method: str) -> None:
    """case 19: all-zero gradients on all ranks give exact zeros and a finite residual."""
    job = Job(world, method)
    zeros: Gradients = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for _ in range(2):
        job.net.backward(zeros)
        job.optimizer.step()
        for name, gradient in job.net.gradients().items():
            assert torch.equal(gradient, torch.zeros_like(gradient)), name
        for name, residual in job.residuals().items():
            assert residual is None or not residual.any(), f"{name}: residual {residual}"
        job.optimizer.zero_grad()
    # And afterwards it works as if nothing had been.
    gradients = {rank: gradients_of(rank, 0) for rank in range(world.size)}
    job.net.backward(gradients[world.rank])
    job.optimizer.step()
    compare(job, Oracle(range(world.size), method, job.compressed()), gradients, rank=world.rank)


@check(each=ROUTES)
def order_and_memory_change(world: World, method: str) -> None:
    """case 2: a residual follows its parameter, though gradients of one shape swap memory.

    The order of the backward pass differs from step to step and from rank to rank, and each
    gradient is a new tensor, so that addresses and ids come back for the other parameter.
    """

    def order(rank: int, step: int) -> list[str]:
        names = list(SHAPES)
        return names if (rank + step) % 2 else names[::-1]

    run_against_oracle(world, method, steps=8, order=order)


@check(each=ROUTES)
def results_are_the_users(world: World, method: str) -> None:
    """case 7: what decompress returned is overwritten and added to; our state does not change."""
    job = Job(world, method)
    oracle = Oracle(range(world.size), method)
    carry = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(4):
        fresh = {rank: gradients_of(rank, step) for rank in range(world.size)}
        # Without zero_grad the next backward pass adds to what we returned.
        gradients: dict[int, Gradients] = {
            rank: {name: carry[name] + gradient for name, gradient in mine.items()}
            for rank, mine in fresh.items()
        }
        job.net.backward(fresh[world.rank])
        job.optimizer.step()
        compare(job, oracle, gradients, rank=world.rank)
        held = job.residuals()
        for name, parameter in job.net.named_parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(-3.0).add_(1.0)
            carry[name] = parameter.grad.clone()
        for name, residual in job.residuals().items():
            old = held[name]
            assert residual is None or (old is not None and torch.equal(residual, old)), name


@check(each=ROUTES)
def gradients_that_are_not_contiguous(world: World, method: str) -> None:
    """A gradient with strides of its own, which Horovod's in-place calls hand back as they are."""
    job = Job(world, method)
    oracle = Oracle(range(world.size), method)
    for step in range(3):
        gradients = {rank: gradients_of(rank, step) for rank in range(world.size)}
        for name, parameter in job.net.named_parameters():
            gradient = gradients[world.rank][name]
            assert gradient is not None
            if name == "first":
                gradient = gradient.t().contiguous().t()
                assert not gradient.is_contiguous()
            parameter.grad = gradient.clone(memory_format=torch.preserve_format)
        job.optimizer.step()
        compare(job, oracle, gradients, rank=world.rank)
    world.same(job.net.parameters(), "parameters")


def _scaled_step(
    job: Job, scaler: torch.amp.GradScaler, gradients: Gradients, poison: Callable[[], None]
) -> None:
    """One step as the AMP guide for Horovod has it."""
    loss = job.net.loss(gradients)
    assert loss is not None
    scaler.scale(loss).backward()
    poison()
    job.optimizer.synchronize()
    scaler.unscale_(job.optimizer)
    with job.optimizer.skip_synchronize():
        scaler.step(job.optimizer)
    scaler.update()


@check(each=[f"{m} {where}" for m in ROUTES for where in ("first", "third", "small")])
def overflow_under_amp(world: World, what: str) -> None:
    """case 17: inf or NaN in one layer of one rank: every scaler skips, no residual changes.

    The layer may be one that goes dense; and of random-k's the entry may not be drawn.
    """
    method, where = what.split()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    job = Job(world, method, compression={"loss_scale": scaler.get_scale})
    oracle = Oracle(range(world.size), method)
    for step in range(6):
        value = {2: math.inf, 3: math.nan}.get(step)
        gradients = {rank: gradients_of(rank, step) for rank in range(world.size)}
        before = [p.detach().clone() for p in job.net.parameters()]
        held, scale = job.residuals(), scaler.get_scale()
        mine = gradients[world.rank]
        if value is not None and world.rank == world.size - 1:
            poisoned = mine[where]
            assert poisoned is not None
            poisoned.view(-1)[7] = value
        _scaled_step(job, scaler, mine, lambda: None)
        if value is None:
            assert scaler.get_scale() == scale
            compare(job, oracle, gradients, rank=world.rank)
        else:
            gradient = job.net.gradients()[where]
            assert not gradient.isfinite().all(), f"step {step}: this rank did not see {value}"
            assert scaler.get_scale() == scale / 2, f"step {step}: this rank's scaler did not skip"
            for old, new in zip(before, job.net.parameters(), strict=True):
                assert torch.equal(old, new), "a parameter changed in a step that was skipped"
            for name, residual in job.residuals().items():
                old_residual = held[name]
                assert residual is None or (
                    old_residual is not None and torch.equal(residual, old_residual)
                ), f"step {step}: the residual of {name} changed"
        world.same(job.net.parameters(), f"parameters after step {step}")
        job.optimizer.zero_grad()


@check(each=ROUTES)
def loss_recovers_after_overflow(world: World, method: str) -> None:
    """case 17: a real model under AMP, whose loss overflows on one rank, goes on learning."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 40))
    named = [(f"{world.name}/{n}", p) for n, p in model.named_parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
    compression = METHODS[method](named, loss_scale=scaler.get_scale)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), named_parameters=named, compression=compression
    )
    losses = []
    for step in range(40):
        inputs = draw("inputs", world.rank, step, shape=(16, 40))
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.roll(1, dims=1)).square().mean()
        losses.append(loss.item())
        worse = math.inf if step in (10, 11) and world.rank == 0 else 1.0
        scaler.scale(loss * worse).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    assert all(map(math.isfinite, losses))
    assert sum(losses[-5:]) < 0.98 * sum(losses[5:10]), f"{losses[5:10]} -> {losses[-5:]}"
    world.same(model.parameters(), "parameters")


@check(each=ROUTES)
def loss_scale_doubles_and_halves(world: World, method: str) -> None:
    """case 18: the trajectory is that of training without scaling, bit for bit."""
    scale = [1.0]
    plain = Job(world, method, Net(world, prefix=f"{world.name}/plain"))
    scaled = Job(
        world,
        method,
        Net(world, prefix=f"{world.name}/scaled"),
        compression={"loss_scale": lambda: scale[0], "name": "scaled"},
    )
    for step, scale[0] in enumerate((1024.0, 2048.0, 2048.0, 512.0, 4.0, 65536.0)):
        gradients = gradients_of(world.rank, step)
        plain.net.backward(gradients)
        plain.optimizer.step()
        loss = scaled.net.loss(gradients)
        assert loss is not None
        (loss * scale[0]).backward()
        scaled.optimizer.synchronize()
        for parameter in scaled.net.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(scale[0])
        with scaled.optimizer.skip_synchronize():
            scaled.optimizer.step()
        if method != "randomk":
            for ours, theirs in zip(scaled.net.parameters(), plain.net.parameters(), strict=True):
                assert torch.equal(ours, theirs), f"step {step}, scale {scale[0]}: drifted apart"
        for (name, ours_), theirs_ in zip(
            scaled.residuals().items(), plain.residuals().values(), strict=True
        ):
            if ours_ is None or method == "randomk":
                continue
            assert theirs_ is not None
            assert torch.equal(ours_, theirs_), f"{name}: residual in other units"
        plain.optimizer.zero_grad()
        scaled.optimizer.zero_grad()


@check(each=FEEDBACK)
def uneven_batches_with_join(world: World, method: str) -> None:
    """case 14: hvd.join(). Private payloads are refused at once, with advice; carried ones work."""
    job = Job(world, method)
    # Two epochs: after the first, all ranks are together again.
    for epoch in range(2):
        for step in range(2 if world.rank == 0 else 3):
            job.net.backward(gradients_of(world.rank, f"{epoch}.{step}"))
            if method == "topk" and step == 2:
                with raises(greco.UnsupportedError, "hvd.join()", "RandomK", "drop_last"):
                    job.optimizer.step()
                hvd.join()
                return
            job.optimizer.step()
            job.optimizer.zero_grad()
        hvd.join()
        if method == "topk":
            return
    # Rank 0 missed two updates; Horovod's guide says to broadcast.
    hvd.broadcast_parameters(dict(job.net.named()), root_rank=1)
    job.net.backward(gradients_of(world.rank, "last"))
    job.optimizer.step()
    for name, residual in job.residuals().items():
        assert residual is None or residual.isfinite().all(), name
    world.same(job.net.parameters(), "parameters")


@check()
def join_keeps_the_sum(world: World) -> None:
    """case 14: what a step with a joined rank returns is the present ranks' sum over all ranks."""
    job = Job(world, "randomk")
    held = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(2):
        job.net.backward(gradients_of(world.rank, step))
        job.optimizer.step()
        job.optimizer.zero_grad()
    for name, residual in job.residuals().items():
        if residual is not None:
            held[name] = residual
    if world.rank > 0:
        gradients = gradients_of(world.rank, 2)
        job.net.backward(gradients)
        job.optimizer.step()
        returned = {name: g * world.size for name, g in job.net.gradients().items()}
        job.optimizer.zero_grad()
    else:
        gradients = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        returned = {}
    hvd.join()
    for name, shape in SHAPES.items():
        gradient, residual = gradients[name], job.residuals()[name]
        assert gradient is not None
        kept = torch.zeros(shape) if residual is None else residual
        moved = gradient + held[name] - kept
        total = hvd.allreduce(moved, op=hvd.Sum, name=f"moved/{name}")
        if world.rank > 0:
            torch.testing.assert_close(returned[name], total, rtol=1e-5, atol=1e-5, msg=name)
        else:
            assert not moved.any(), f"{name}: the residual of the rank that had joined changed"


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _reshape(job: Job, name: str, shape: tuple[int, ...], value: torch.Tensor) -> None:
    """Give a parameter another shape, and the model a new optimizer around the same compressor.

    Under a living DistributedOptimizer torch itself refuses: it holds the old shape's accumulators.
    """
    del job.optimizer
    gc.collect()
    parameter = job.net.get_parameter(name)
    parameter.grad = None
    parameter.data = value
    job.optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(job.net.parameters(), lr=0.1),
        named_parameters=job.net.named(),
        compression=job.compressor,
    )


@check(each=ROUTES)
def shape_changes(world: World, method: str) -> None:
    """case 24: a layer that shrinks and grows begins anew, with a log line; others keep all."""
    job = Job(world, method)
    oracle = Oracle(range(world.size), method)
    log, handler = logging.getLogger("hvd_greco"), Lines()
    log.addHandler(handler)
    try:
        for step in range(6):
            if step in (2, 4):
                shape = (30, 50) if step == 2 else (55, 50)
                _reshape(job, "first", shape, draw("new", step, shape=shape))
                for rank in range(world.size):
                    oracle.residual.pop((rank, "first"), None)
            shapes = job.shapes()
            gradients = {r: gradients_of(r, step, shapes) for r in range(world.size)}
            job.net.backward(gradients[world.rank])
            job.optimizer.step()
            compare(job, oracle, gradients, rank=world.rank)
            world.same(job.net.parameters(), f"parameters after step {step}")
            job.optimizer.zero_grad()
    finally:
        log.removeHandler(handler)
    # The first rank speaks for all.
    assert len(handler.lines) == (2 if world.rank == 0 else 0), handler.lines
    assert all("first" in line and "(30, 50)" in line for line in handler.lines), handler.lines


@check()
def small_layer_becomes_large(world: World) -> None:
    """case 24: the plan follows the shape, from dense to compressed and back."""
    job = Job(world, "topk")
    for step, shape in enumerate(((10,), (2000,), (10,))):
        _reshape(job, "small", shape, draw("new", step, shape=shape))
        job.net.backward(gradients_of(world.rank, step, job.shapes()))
        job.optimizer.step()
        assert ("small" in job.compressed()) == (shape == (2000,))
        world.same(job.net.parameters(), f"parameters after step {step}")
        job.optimizer.zero_grad()
