"""Every method against its own simulation: what Horovod's options make of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import horovod.torch as hvd
import torch

import hvd_greco as greco
from hvd_greco import methods
from hvd_greco.exchange.local import LocalGroup, LocalMember

from .registry import check
from .support import Gradients, Job, Net, World, gradients_of

SHAPES: dict[str, tuple[int, ...]] = {
    "first": (40, 50), "second": (40, 50), "third": (1500,), "small": (10,),
}  # fmt: skip
STEPS = 4
#: Every method, and the options that change what is exchanged, or what is remembered.
SPECS = (
    *map(str, methods.all_specs()), "topk:0.05,values=q4", "topk:0.05,memory=ef21",
    "qsgd:4,memory=ef", "sign:memory=ef21-sgdm", "acp:2,memory=ef21",
    "topk:0.05,exchange=scatter", "qsgd:4,exchange=scatter",
    "dgc:density=0.02,momentum=0.8,nesterov=yes,clip=3,weight_decay=0.01,warmup=1",
)  # fmt: skip
#: Name -> options of the optimizer, and what they make of a mean of N ranks.
OPTIONS: Mapping[str, tuple[Mapping[str, Any], bool]] = {
    "average": ({}, False),
    "sum": ({"op": hvd.Sum}, True),
    "predivide": ({"gradient_predivide_factor": 2.0}, False),
    "groups": ({"groups": 2}, False),
    "two passes": ({"backward_passes_per_step": 2}, False),
}


def _gradients(rank: int, option: str) -> Iterator[Gradients]:
    """One rank's gradients, step by step; each rank lacks one in turn, and once all lack one.

    Not with groups: stock Horovod itself stalls when a group is complete on some ranks alone.
    """
    for step in range(STEPS):
        found = gradients_of(rank, f"{option}/{step}", SHAPES)
        if option == "groups":
            yield found
            continue
        if step == rank + 1:
            found["first"] = found["small"] = None
        if step == 2:
            found["third"] = None
        yield found


def _simulated(world: World, spec: str, option: str) -> list[dict[str, torch.Tensor]]:
    """This rank's means, step by step, as ranks that are threads of this process find them."""

    def program(member: LocalMember) -> list[dict[str, torch.Tensor]]:
        net = Net(world, SHAPES)
        compression = methods.build(spec, net.named(), group=member)
        found = []
        for gradients in _gradients(member.rank, option):
            net.zero_grad()
            net.backward(gradients)
            member.reduce_gradients(net.named(), compression)
            found.append(net.gradients())
        return found

    return LocalGroup(world.size).run(program)[world.rank]


@check(sizes=(2, 3, 4), each=SPECS)
def options_of_the_optimizer(world: World, spec: str) -> None:
    """Cases 3, 13, 21, 31: op, predivide, groups, two passes, missing gradients, every method."""

    def make(named: Any, **common: Any) -> greco.Compressor:
        return methods.build(spec, named, **common)

    for option, (arguments, sums) in OPTIONS.items():
        expected = _simulated(world, spec, option)
        job = Job(world, make, Net(world, SHAPES), lr=0.0, **arguments)
        for step, gradients in enumerate(_gradients(world.rank, option)):
            passes = arguments.get("backward_passes_per_step", 1)
            for _ in range(passes):
                # Halves are exact, and so is their sum.
                share = {n: None if g is None else g / passes for n, g in gradients.items()}
                job.net.backward(share)
            job.optimizer.step()
            world.same(job.net.gradients().values(), f"{option}: gradients of step {step}")
            for name, mean in job.net.gradients().items():
                wanted = expected[step][name] * (world.size if sums else 1)
                # Horovod adds fp16 up in fp16, on more than two ranks in an order of its own.
                rtol, atol = (5e-3, 2e-3) if spec == "fp16" else (1e-4, 1e-4)
                torch.testing.assert_close(
                    mean, wanted, rtol=rtol, atol=atol * float(wanted.abs().max()),
                    msg=lambda text, at=f"{option}, {name}": f"{at}: not as simulated:\n{text}",
                )  # fmt: skip
            job.optimizer.zero_grad()
