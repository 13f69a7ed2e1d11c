"""Whole scripts, each started on its own: they crash, stall, or start MPI in ways of their own.

Run as ``python -m programs.scripts NAME FOLDER``. What a script has to tell goes to the output as
lines ``TOLD {"rank": ..., ...}``; an exception is told, and then ends the rank.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Seconds that a rank waits for the others to tell what they have to before it dies: mpirun kills
#: all when one has died.
LAST_WORDS = 4.0

SCRIPTS: dict[str, Callable[[], None]] = {}


def script(function: Callable[[], None]) -> Callable[[], None]:
    """Enter a script in the table."""
    SCRIPTS[function.__name__] = function
    return function


def tell(**facts: Any) -> None:
    """Print one line for the test to read."""
    rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
    # One write, so that lines of two ranks do not mix.
    sys.stdout.write("\nTOLD " + json.dumps({"rank": int(rank), **facts}) + "\n")
    sys.stdout.flush()


def last_words() -> None:
    """Wait until every rank came here, or a while."""
    folder, size = Path(sys.argv[2]), int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    (folder / f"rank{os.environ.get('OMPI_COMM_WORLD_RANK', '0')}").touch()
    limit = time.monotonic() + LAST_WORDS
    while len(list(folder.iterdir())) < size and time.monotonic() < limit:
        time.sleep(0.05)


def _model() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.Tanh(), torch.nn.Linear(64, 40))


def _start(compression: Any, model: Any, **options: Any) -> Any:
    import horovod.torch as hvd
    import torch

    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=compression,
        **options,
    )


def _backward(model: Any, step: int, rank: int) -> None:
    import torch

    inputs = torch.randn(8, 48, generator=torch.Generator().manual_seed(100 * step + rank))
    model(inputs).square().mean().backward()


def _train(steps: int = 3, density: float = 0.05) -> Any:
    """A short run that compresses; ranks must end equal."""
    import horovod.torch as hvd
    import torch

    import hvd_greco as greco

    model = _model()
    compression = greco.TopK(model.named_parameters(), density)
    optimizer = _start(compression, model)
    for step in range(steps):
        optimizer.zero_grad()
        _backward(model, step, hvd.rank())
        optimizer.step()
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everyone = hvd.allgather(flat[None])
    assert all(torch.equal(row, flat) for row in everyone)
    report = compression.last_report
    assert report is not None or hvd.size() == 1
    tell(trained=steps, ratio=report.ratio if report else None)
    return model


# -- process sets ------------------------------------------------------------------------------


def _process_set(to_optimizer: bool) -> None:
    import horovod.torch as hvd

    import hvd_greco as greco

    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    makes = {
        "topk": lambda named, **options: greco.TopK(named, 0.05, **options),
        "bf16": lambda named, **options: greco.Dense(named, "bf16", **options),
        "randomk": lambda named, **options: greco.RandomK(named, 0.05, **options),
    }
    here = {"process_set": pair}
    for method, make in makes.items():
        model = _model()
        compression = make(model.named_parameters(), **({} if to_optimizer else here))
        named = [(f"{method}/{name}", p) for name, p in model.named_parameters()]
        optimizer = _start_named(compression, model, named, **(here if to_optimizer else {}))
        began = time.monotonic()
        _backward(model, 0, hvd.rank())
        try:
            optimizer.step()
        except greco.MismatchError as error:
            tell(method=method, mismatch=str(error), seconds=time.monotonic() - began)
        else:
            tell(method=method, mismatch=None)
    last_words()
    raise SystemExit(3)


def _start_named(compression: Any, model: Any, named: Any, **options: Any) -> Any:
    import horovod.torch as hvd
    import torch

    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=named,
        compression=compression,
        **options,
    )


@script
def process_set_for_the_optimizer_alone() -> None:
    _process_set(to_optimizer=True)


@script
def process_set_for_the_compressor_alone() -> None:
    _process_set(to_optimizer=False)


# -- the controller ------------------------------------------------------------------------------


@script
def rank_0_dies_while_it_decides() -> None:
    import horovod.torch as hvd

    import hvd_greco as greco

    hvd.init()

    class Dying(greco.Policy):
        name = "dying"

        def decide(self, evidence: Any) -> Any:
            os._exit(7)

    model = _model()
    compression = greco.LGreco(model.named_parameters(), interval=2, policy=Dying())
    optimizer = _start(compression, model)
    for step in range(4):
        optimizer.zero_grad()
        _backward(model, step, hvd.rank())
        optimizer.step()
        tell(done=step)


@script
def one_rank_never_comes_to_a_decision() -> None:
    """Its last step before the decision is there, and then it stops."""
    import horovod.torch as hvd

    import hvd_greco as greco
    from hvd_greco.adapt.controller import Controller

    hvd.init()
    if hvd.rank() == 1:
        Controller._synchronise = lambda self: time.sleep(100)  # type: ignore[assignment,return-value]
    model = _model()
    optimizer = _start(greco.LGreco(model.named_parameters(), interval=2), model)
    for step in range(4):
        optimizer.zero_grad()
        _backward(model, step, hvd.rank())
        optimizer.step()


# -- ranks that do not come --------------------------------------------------------------------


@script
def one_rank_never_steps() -> None:
    import horovod.torch as hvd

    hvd.init()
    if hvd.rank() == 0:
        _train(steps=1)
    else:
        import hvd_greco as greco

        model = _model()
        optimizer = _start(greco.TopK(model.named_parameters(), 0.05), model)
        assert optimizer is not None
        time.sleep(100)


@script
def one_rank_holds_back_a_round() -> None:
    """Carriers go out on both ranks, rank 1's second round of one layer does not."""
    import horovod.torch as hvd

    import hvd_greco as greco
    from hvd_greco.exchange.horovod import HorovodGroup

    class Lazy(HorovodGroup):
        def submit(self, name: str, payload: Any) -> Any:
            if self.rank == 1 and name.endswith("0.weight/2"):
                time.sleep(100)
            return super().submit(name, payload)

    hvd.init()
    model = _model()
    optimizer = _start(greco.Dense(model.named_parameters(), "bf16", group=Lazy()), model)
    _backward(model, 0, hvd.rank())
    optimizer.step()


@script
def one_rank_raises_while_encoding() -> None:
    import horovod.torch as hvd

    import hvd_greco as greco

    hvd.init()
    model = _model()
    compression = greco.TopK(model.named_parameters(), 0.05)
    optimizer = _start(compression, model)
    for step in range(3):
        if step == 2 and hvd.rank() == 1:
            compression._codecs["topk"].encode_sum = None
        optimizer.zero_grad()
        _backward(model, step, hvd.rank())
        optimizer.step()


@script
def one_rank_joins() -> None:
    import horovod.torch as hvd

    import hvd_greco as greco

    hvd.init()
    model = _model()
    optimizer = _start(greco.TopK(model.named_parameters(), 0.05), model)
    # Long enough for all names to be in Horovod's response cache.
    for step in range(4 if hvd.rank() == 0 else 5):
        optimizer.zero_grad()
        _backward(model, step, hvd.rank())
        optimizer.step()
    hvd.join()


# -- MPI ---------------------------------------------------------------------------------------


@script
def mpi4py_first_then_finalize() -> None:
    from mpi4py import MPI

    assert MPI.Is_initialized()
    import horovod.torch as hvd

    hvd.init()
    _train()
    assert MPI.COMM_WORLD.allreduce(1) == hvd.size()
    # Horovod still runs; a second end of it comes at exit.
    MPI.Finalize()
    tell(finalized=MPI.Is_finalized(), horovod=hvd.is_initialized())


@script
def mpi4py_first_then_shutdown() -> None:
    import horovod.torch as hvd
    from mpi4py import MPI

    hvd.init()
    _train()
    hvd.shutdown()
    tell(finalized=MPI.Is_finalized(), horovod=hvd.is_initialized())
    MPI.Finalize()


@script
def mpi4py_after_then_shutdown() -> None:
    import horovod.torch as hvd

    hvd.init()
    from mpi4py import MPI

    _train()
    hvd.shutdown()
    tell(finalized=MPI.Is_finalized(), horovod=hvd.is_initialized())
    if not MPI.Is_finalized():
        MPI.Finalize()


@script
def mpi4py_loaded_and_nothing_else() -> None:
    import horovod.torch as hvd

    hvd.init()
    from mpi4py import MPI

    assert MPI.Is_initialized()
    _train()


@script
def thread_level_below_multiple() -> None:
    import mpi4py

    mpi4py.rc.thread_level = "serialized"
    from mpi4py import MPI

    assert MPI.Query_thread() == MPI.THREAD_SERIALIZED
    import horovod.torch as hvd

    hvd.init()
    _train()


@script
def launcher_of_another_mpi() -> None:
    """Each process sees itself alone, as with a Horovod that was built for another MPI."""
    import horovod.torch as hvd

    hvd.init()
    assert hvd.size() == 1
    os.environ["OMPI_COMM_WORLD_SIZE"] = "4"
    _train()


@script
def horovod_not_initialized() -> None:
    import hvd_greco as greco

    greco.TopK(_model().named_parameters(), 0.05)


@script
def a_single_rank() -> None:
    """Trains as without compression, bit for bit."""
    import horovod.torch as hvd
    import torch

    import hvd_greco as greco

    hvd.init()
    assert hvd.size() == 1
    finals = []
    for make in (
        lambda named: hvd.Compression.none,
        lambda named: greco.TopK(named, 0.01),
        lambda named: greco.RandomK(named, 0.01),
        lambda named: greco.Dense(named, "bf16"),
        lambda named: greco.Dense(named, "fp16"),
    ):
        model = _model()
        compression = make(model.named_parameters())
        optimizer = _start(compression, model)
        for step in range(5):
            optimizer.zero_grad()
            _backward(model, step, 0)
            optimizer.step()
        finals.append([parameter.detach().clone() for parameter in model.parameters()])
        if isinstance(compression, greco.Compressor):
            assert compression.wire_bytes() >= 0
            assert compression.memory_bytes()["state"] == 0
    same = [all(map(torch.equal, finals[0], final)) for final in finals]
    tell(same=same, moved=not torch.equal(finals[0][0], _model()[0].weight))


if __name__ == "__main__":
    try:
        SCRIPTS[sys.argv[1]]()
    except Exception as error:
        tell(error=type(error).__name__, message=str(error))
        last_words()
        raise
