"""Every exchange under stock Horovod, against dense Horovod; a program for mpirun.

    mpirun -np 4 python tests/mpi_exchanges.py [--hosts L] [--sets dynamic|env|none] [--steps S]

``--hosts L`` makes Horovod say that each L ranks share a host, to run on one machine; without it
the hosts are the real ones. Prints ``ok`` once, on rank 0, if all ranks agree.
"""

from __future__ import annotations

import argparse
import copy
import random
from typing import Any

import horovod.torch as hvd
import torch

import hvd_greco as greco


def pretend_hosts(length: int) -> None:
    """Replace what Horovod says of hosts; what it communicates stays the same."""
    hvd.local_rank = lambda: hvd.rank() % length
    hvd.local_size = lambda: length
    hvd.cross_rank = lambda: hvd.rank() // length
    hvd.cross_size = lambda: hvd.size() // length


class Net(torch.nn.Module):
    """Layers of odd and tiny sizes; one of them is left out on some ranks in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(37, 50)
        self.b = torch.nn.Linear(50, 50)
        self.c = torch.nn.Linear(50, 3)

    def forward(self, x: torch.Tensor, skip: bool) -> torch.Tensor:
        x = torch.relu(self.a(x))
        return self.c(x if skip else torch.relu(self.b(x)))


def train(make: Any, steps: int) -> tuple[torch.Tensor, Any]:
    """Parameters after some steps, and the compressor (None: dense Horovod)."""
    torch.manual_seed(0)
    model = Net()
    compression = make(model.named_parameters())
    options = {"compression": compression} if compression is not None else {}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        named_parameters=model.named_parameters(),
        **options,
    )
    data = torch.Generator().manual_seed(hvd.rank())
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(16, 37, generator=data)
        skip = random.Random(f"{step}/{hvd.rank()}").random() < 0.3
        model(x, skip).square().mean().backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach(), compression


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int)
    parser.add_argument("--sets", default="dynamic", choices=["dynamic", "env", "none"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", help="one exchange instead of all")
    arguments = parser.parse_args()
    steps = arguments.steps
    exchanges = (
        [arguments.only] if arguments.only else [None, "allgather", "scatter", "hierarchical"]
    )
    sets: Any = {"dynamic": "dynamic", "none": None}.get(arguments.sets)
    if arguments.sets == "env":
        sets = greco.host_process_sets(arguments.hosts)
    hvd.init(process_sets=copy.copy(sets))
    if arguments.hosts:
        pretend_hosts(arguments.hosts)
    dense, _ = train(lambda pairs: None, steps)
    for exchange in exchanges:
        for density in (1.0, 0.05):

            def make(pairs: Any, density: float = density, exchange: Any = exchange) -> Any:
                compressor = greco.TopK(pairs, density, exchange=exchange, min_numel=0)
                if density == 1.0:  # saves nothing, but must be right
                    name = compressor._codec.name
                    compressor.plan = greco.Plan(
                        dict.fromkeys(compressor.plan.assignments, _assignment(name)),
                        context=compressor.plan.context,
                    )
                return compressor

            result, compressor = train(make, steps)
            everybody = hvd.allgather(result[None], name="check")
            assert all(torch.equal(everybody[0], other) for other in everybody), exchange
            if density == 1.0:
                torch.testing.assert_close(result, dense, atol=1e-5, rtol=1e-4)
            report = compressor.last_report
            assert report.sent_bytes <= compressor.wire_bytes()
            if hvd.rank() == 0:
                print(exchange, density, report.sent_bytes, report.network_bytes, flush=True)
    if hvd.rank() == 0:
        print("ok", flush=True)


def _assignment(codec: str) -> Any:
    from hvd_greco.plan import Assignment

    return Assignment(codec, 1.0)


if __name__ == "__main__":
    main()
