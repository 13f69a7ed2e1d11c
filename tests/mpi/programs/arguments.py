"""Bad input: an error that names the argument and the value and says what works."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import horovod.torch as hvd
import torch

import hvd_greco as greco
from hvd_greco import methods

from .registry import check
from .support import METHODS, Job, Net, Oracle, World, compare, gradients_of, raises


@check(sizes=(2,), each=(0, -0.1, 1.5, 30, math.nan, math.inf, "half", None, True))
def density_that_cannot_be(world: World, value: object) -> None:
    net = Net(world)
    for make in (greco.TopK, greco.RandomK):
        with raises(greco.ConfigError, "density", repr(value), "(0, 1]"):
            make(net.named(), value)
    if value == 30:
        with raises(greco.ConfigError, "0.3"):
            greco.TopK(net.named(), value)


@check(sizes=(2,))
def named_parameters_that_cannot_be(world: World) -> None:
    net = Net(world)
    first, second = net.get_parameter("first"), net.get_parameter("second")
    used_up = iter(net.named())
    assert len(list(used_up)) == 4
    with raises(greco.ConfigError, "named_parameters", "empty", "generator"):
        greco.TopK(used_up)
    with raises(greco.ConfigError, "named_parameters", "'a'", "twice"):
        greco.TopK([("a", first), ("a", second)])
    with raises(greco.ConfigError, "named_parameters", "'a'", "'b'", "tied"):
        greco.TopK([("a", first), ("b", first)])
    with raises(greco.ConfigError, "model.named_parameters()"):
        greco.TopK(net)
    with raises(greco.ConfigError, "model.named_parameters()"):
        greco.TopK(net.parameters())


@check(sizes=(2,))
def other_arguments_that_cannot_be(world: World) -> None:
    net = Net(world)
    with raises(greco.ConfigError, "wire", "'int3'", "bf16"):
        greco.Dense(net.named(), "int3")
    with raises(greco.ConfigError, "exclude", "*.bias"):
        greco.TopK(net.named(), exclude="*.bias")
    for exclude in (None, [3], 3):
        with raises(greco.ConfigError, "exclude", repr(exclude), "*.bias"):
            greco.TopK(net.named(), exclude=exclude)
    with raises(greco.ConfigError, "schedule", "callable", "3"):
        greco.TopK(net.named(), schedule=3)
    for name in (3, ""):
        with raises(greco.ConfigError, "name: needs a text", repr(name)):
            greco.TopK(net.named(), name=name)
    with raises(greco.ConfigError, "seed", "2**63"):
        greco.TopK(net.named(), seed=2**70)
    with raises(greco.ConfigError, "min_numel", "-1"):
        greco.TopK(net.named(), min_numel=-1)
    with raises(greco.ConfigError, "seed", "0.5"):
        greco.TopK(net.named(), seed=0.5)
    with raises(greco.ConfigError, "loss_scale", "scaler.get_scale", "1024.0"):
        greco.TopK(net.named(), loss_scale=1024.0)
    with raises(greco.ConfigError, "process_set", "ProcessSet"):
        greco.TopK(net.named(), process_set=[0, 1])
    with raises(greco.ConfigError, "process_set", "not registered", "hvd.init"):
        greco.TopK(net.named(), process_set=hvd.ProcessSet([0]))
    with raises(greco.ConfigError, "'zip'", "topk"):
        methods.build("zip", net.named())
    compressor = greco.TopK(net.named())
    with raises(greco.ConfigError, "'nowhere'", f"{world.name}/first"):
        compressor.residual("nowhere")


@check(sizes=(2,))
def loss_scale_that_is_not_a_number(world: World) -> None:
    job = Job(world, "topk", compression={"loss_scale": lambda: math.nan})
    with raises(greco.ConfigError, "loss_scale", "nan"):
        job.net.backward({"first": gradients_of(world.rank, 0)["first"]})
    job.compressor.close()


@check(sizes=(2,))
def sparse_gradients_with_groups(world: World) -> None:
    """case 30, case 31: Horovod hands over sparse gradients with groups=; refused with advice."""
    table = torch.nn.Embedding(60, 40, sparse=True)
    named = [(f"{world.name}/table", table.weight)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=0.1),
        named_parameters=named,
        compression=greco.TopK(named, 0.05),
        sparse_as_dense=True,
        groups=1,
    )
    assert optimizer is not None
    with raises(greco.UnsupportedError, "groups", "sparse=False"):
        table(torch.arange(5)).sum().backward()


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@check()
def launcher_started_more_ranks(world: World) -> None:
    """case 16: Horovod sees some, but not all, of the launcher's ranks: noticed at start."""
    with _variable("OMPI_COMM_WORLD_SIZE", "7"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        greco.TopK(Net(world).named())
    texts = [str(warning.message) for warning in caught]
    assert any("7 ranks" in text and f"sees {world.size}" in text for text in texts), texts
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        greco.TopK(Net(world).named())


@check()
def layers_left_alone(world: World) -> None:
    """min_numel and patterns: those layers go dense, and the others do not."""
    for options, compressed in (
        ({"min_numel": 1600}, {"first", "second"}),
        ({"exclude": ("*/first", "*thi*")}, {"second"}),
        ({"min_numel": 0, "exclude": ("*/small",)}, {"first", "second", "third"}),
    ):
        job = Job(world, "topk", Net(world), compression=options)
        assert job.compressed() == compressed
        oracle = Oracle(range(world.size), "topk", compressed)
        gradients = {rank: gradients_of(rank, 0) for rank in range(world.size)}
        job.net.backward(gradients[world.rank])
        job.optimizer.step()
        compare(job, oracle, gradients, rank=world.rank)


@check(each=METHODS)
def bytes_are_counted(world: World, method: str) -> None:
    """What was sent is what wire_bytes() announced, carriers and checks included."""
    job = Job(world, method)
    dense = 4 * (2000 + 2000 + 1500 + 10)
    announced = job.compressor.wire_bytes()
    for step in range(3):
        job.net.backward(gradients_of(world.rank, step))
        job.optimizer.step()
        job.optimizer.zero_grad()
        report = job.compressor.last_report
        assert report is not None
        assert report.step == step
        assert report.sent_bytes == announced
        assert report.dense_bytes == dense
    assert (report.ratio > 1) == (method != "dense")
    held = job.compressor.memory_bytes()
    state = 4 * (2000 + 2000 + 1500) if method in ("topk", "randomk") else 0
    assert held["state"] == state, "error feedback costs one fp32 copy of the compressed layers"
    job.net.backward(gradients_of(world.rank, 3))
    job.optimizer.step()
    assert job.compressor.memory_bytes() == held, "buffers are not reused"
