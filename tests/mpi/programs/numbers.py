"""dtypes, and values at the ends of their ranges."""

from __future__ import annotations

import torch

from .registry import check
from .support import (
    METHODS,
    SHAPES,
    Gradients,
    Job,
    Net,
    Oracle,
    World,
    compare,
    draw,
    gradients_of,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@check(each=[f"{method} {dtype}" for method in METHODS for dtype in DTYPES])
def parameters_of_other_dtypes(world: World, what: str) -> None:
    """case 4: bf16, fp16 and fp64 models with each method; the dtype goes in and comes out."""
    method, dtype = what.split()
    net = Net(world, dtype=DTYPES[dtype])
    job = Job(world, method, net)
    work = torch.float64 if dtype == "fp64" else torch.float32
    oracle = Oracle(range(world.size), method, job.compressed(), work=work)
    # What a payload of two-byte gradients saves decides the plan; sparse ones always do.
    assert method not in ("topk", "randomk") or job.compressed() == {"first", "second", "third"}
    for step in range(3):
        gradients = {
            rank: gradients_of(rank, step, dtype=DTYPES[dtype]) for rank in range(world.size)
        }
        net.backward(gradients[world.rank])
        job.optimizer.step()
        compare(job, oracle, gradients, rank=world.rank)
        world.same(net.parameters(), f"parameters after step {step}")
        job.optimizer.zero_grad()
    for name, residual in job.residuals().items():
        assert residual is None or residual.dtype == work, f"{name}: residual {residual.dtype}"


@check()
def fp64_is_not_rounded_to_fp32(world: World) -> None:
    """case 4: top-k of fp64 gradients returns them to fp64's precision."""
    job = Job(world, "topk", Net(world, dtype=torch.float64))
    net = job.net
    gradients: Gradients = {
        name: (1 + 1e-10 * draw(name, shape=shape).double()) for name, shape in SHAPES.items()
    }
    net.backward(gradients)
    job.optimizer.step()
    for name, got in net.gradients().items():
        wanted = gradients[name]
        assert wanted is not None
        sent = got != 0
        assert sent.any()
        assert (got - wanted)[sent].abs().max() < 1e-14, f"{name}: rounded"


@check(each=METHODS)
def fp16_near_the_top(world: World, method: str) -> None:
    """case 6: gradients of 60,000 in fp16, predivided once: finite, and the mean is right."""
    net = Net(world, dtype=torch.float16)
    job = Job(world, method, net, lr=0.0, gradient_predivide_factor=float(world.size))
    gradients: Gradients = {}
    for name, shape in SHAPES.items():
        signs = torch.where(draw(name, shape=shape) > 0, 60_000.0, -60_000.0)
        gradients[name] = signs.to(torch.float16)
    net.backward(gradients)
    job.optimizer.step()
    for name, got in net.gradients().items():
        wanted = gradients[name]
        assert wanted is not None
        assert got.isfinite().all(), f"{name}: not finite"
        sent = got != 0
        assert sent.any()
        assert sent.all() or name in job.compressed()
        error = ((got.float() - wanted.float()) / 60_000)[sent].abs().max()
        assert error < 2**-7, f"{name}: the mean is off by {float(error):.4f} of itself"


@check(each=METHODS)
def fp16_near_the_bottom(world: World, method: str) -> None:
    """case 6: fp32 gradients of 1e-8 and 1e-6: finite, never of the wrong sign or blown up."""
    for size in (1e-8, 1e-6):
        net = Net(world, prefix=f"{world.name}/{size}")
        job = Job(world, method, net, lr=0.0, gradient_predivide_factor=2.0)
        gradients: Gradients = {name: torch.full(shape, size) for name, shape in SHAPES.items()}
        net.backward(gradients)
        job.optimizer.step()
        for name, got in net.gradients().items():
            assert got.isfinite().all()
            assert (got >= 0).all()
            # fp16's smallest steps are 6e-8.
            slack = 1.3e-7 if method == "fp16" else size * 2**-7
            assert (got <= size + slack).all(), f"{name}: {float(got.max()):g} from {size:g}"
            if method != "fp16":
                assert (got[got != 0] - size).abs().max() <= slack, f"{name}: lost"
                assert got.any(), f"{name}: nothing arrived"


@check(each=("topk", "randomk", "bf16"))
def norms_of_1_and_1000(world: World, method: str) -> None:
    """case 5: ranks whose gradients differ a thousandfold keep their shares of the mean."""
    job = Job(world, method)
    oracle = Oracle(range(world.size), method)
    for step in range(3):
        gradients: dict[int, Gradients] = {}
        for rank in range(world.size):
            size = 1000.0 if rank == 0 else 1.0
            gradients[rank] = {
                name: None if g is None else g * size
                for name, g in gradients_of(rank, step).items()
            }
        job.net.backward(gradients[world.rank])
        job.optimizer.step()
        # The oracle's absolute tolerance is for gradients of 1.
        for name, got in job.net.gradients().items():
            wanted = oracle.step(gradients, {name: got})[name]
            rtol = 2**-7 if method == "bf16" else 1e-5
            torch.testing.assert_close(got, wanted, rtol=rtol, atol=1e-3, msg=name)
        job.optimizer.zero_grad()
