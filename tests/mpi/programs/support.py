"""What checks are made of: a model with gradients known in advance, and what must come of them.

:class:`Net` is a bag of parameters whose loss is linear, so that every gradient is exactly the
tensor that the check asked for, on every rank and in every dtype. All ranks draw all ranks'
gradients from seeds, so each of them can work out alone, in :class:`Oracle`, what the job must
return. The oracle shares no code with the package: it is written from the formulas.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
import torch

import hvd_greco as greco

Gradients = dict[str, torch.Tensor | None]

#: Two layers of one shape, one of another, and one too small to be compressed.
SHAPES: dict[str, tuple[int, ...]] = {
    "first": (40, 50),
    "second": (40, 50),
    "third": (1500,),
    "small": (10,),
}
DENSITY = 0.05

Make = Callable[..., greco.Compressor]
#: How each method under test is made.
METHODS: dict[str, Make] = {
    "topk": lambda named, **options: greco.TopK(named, DENSITY, **options),
    "randomk": lambda named, **options: greco.RandomK(named, DENSITY, **options),
    "bf16": lambda named, **options: greco.Dense(named, "bf16", **options),
    "fp16": lambda named, **options: greco.Dense(named, "fp16", **options),
    "dense": lambda named, **options: greco.Dense(named, **options),
}
#: One for each way through the exchange: one private round, two of them, and carried.
ROUTES = ("topk", "bf16", "randomk")
#: Those with error feedback.
FEEDBACK = ("topk", "randomk")


class World:
    """This rank, and exchanges that the checks themselves need."""

    def __init__(self) -> None:
        # A set of two of three ranks, for the checks of process sets; size 2 has none.
        self.pair = hvd.ProcessSet([0, 1])
        hvd.init(process_sets="dynamic")
        self.rank, self.size = hvd.rank(), hvd.size()
        if self.size > 2:
            hvd.add_process_set(self.pair)
        self.name = ""

    def begin(self, name: str) -> None:
        """Start a check: everything drawn in it depends on its name alone."""
        self.name = name
        torch.manual_seed(zlib.crc32(name.encode()))

    def meet(self) -> None:
        """Wait for the other ranks."""
        hvd.barrier()

    def same(self, tensors: Iterable[torch.Tensor], what: str) -> None:
        """Assert that tensors are bitwise equal on all ranks."""
        parts = [t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors]
        mine = torch.cat(parts)
        found = hvd.allgather(mine[None], name=f"same/{mine.numel()}")
        for rank in range(self.size):
            assert torch.equal(found[rank], mine), f"{what}: rank {rank} differs from {self.rank}"


class Net(torch.nn.Module):
    """Parameters with a linear loss: the gradient of each is the tensor handed to backward()."""

    def __init__(
        self,
        world: World,
        shapes: Mapping[str, tuple[int, ...]] = SHAPES,
        dtype: torch.dtype = torch.float32,
        prefix: str | None = None,
    ) -> None:
        super().__init__()
        self.prefix = world.name if prefix is None else prefix
        for name, shape in shapes.items():
            start = draw("start", name, shape=shape).to(dtype)
            self.register_parameter(name, torch.nn.Parameter(start))

    def named(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Pairs whose names are this check's own: a check that failed leaves names in flight."""
        return [(f"{self.prefix}/{name}", p) for name, p in self.named_parameters()]

    def loss(self, gradients: Gradients, order: Sequence[str] | None = None) -> torch.Tensor | None:
        """A loss whose gradients are the given ones; None leaves a parameter out of the graph.

        Autograd visits the terms from the last to the first, so ``order`` decides the order of
        the hooks.
        """
        total: torch.Tensor | None = None
        for name in order or list(gradients):
            gradient = gradients[name]
            if gradient is not None:
                term = (self.get_parameter(name) * gradient).sum()
                total = term if total is None else total + term
        return total

    def backward(self, gradients: Gradients, order: Sequence[str] | None = None) -> None:
        """Accumulate the gradients; none at all is a rank without a loss."""
        loss = self.loss(gradients, order)
        if loss is not None:
            loss.backward()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Copies of what is in ``.grad`` now."""
        return {n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None}


def draw(*key: object, shape: Sequence[int]) -> torch.Tensor:
    """Standard normal numbers that depend on the key alone."""
    generator = torch.Generator().manual_seed(zlib.crc32("/".join(map(str, key)).encode()))
    return torch.randn(tuple(shape), generator=generator)


def gradients_of(
    rank: int,
    step: object,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    dtype: torch.dtype = torch.float32,
) -> Gradients:
    """One rank's gradients in one step."""
    return {n: draw(n, rank, step, shape=s).to(dtype) for n, s in shapes.items()}


class Job:
    """A net, its compressor and the optimizer that calls it, as in a user's script."""

    def __init__(
        self,
        world: World,
        method: str | Make,
        net: Net | None = None,
        *,
        lr: float = 0.1,
        compression: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.net = net or Net(world)
        make = METHODS[method] if isinstance(method, str) else method
        self.compressor = make(iter(self.net.named()), **(compression or {}))
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.net.parameters(), lr=lr),
            named_parameters=self.net.named(),
            compression=self.compressor,
            **options,
        )

    def residuals(self) -> dict[str, torch.Tensor | None]:
        """This rank's residual of each layer."""
        return {n: self.compressor.residual(f"{self.net.prefix}/{n}") for n in self.shapes()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each layer."""
        return {name: tuple(p.shape) for name, p in self.net.named_parameters()}

    def compressed(self) -> set[str]:
        """Layers that do not go dense, as the plan says."""
        plan = self.compressor.plan.assignments
        return {n for n in self.shapes() if plan[f"{self.net.prefix}/{n}"].codec != "dense"}


class Oracle:
    """What a job of several ranks must return, worked out from the formulas on one of them.

    Args:
        ranks: global ranks that take part.
        method: key of :data:`METHODS`.
        layers: names of the layers that are compressed; others are averaged as they are.
        density: of the sparse methods.
        work: dtype of residuals and sums.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        method: str,
        layers: Iterable[str] = ("first", "second", "third"),
        density: float = DENSITY,
        work: torch.dtype = torch.float32,
    ) -> None:
        self.ranks, self.method, self.layers = list(ranks), method, set(layers)
        self.density, self.work = density, work
        self.residual: dict[tuple[int, str], torch.Tensor] = {}

    def step(
        self, gradients: Mapping[int, Gradients], got: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The mean of each layer, in the work dtype.

        Args:
            gradients: rank -> its gradients; None where it has none.
            got: what the job returned; random-k's positions are taken from it, and only their
                number is checked.
        """
        return {name: self._layer(name, gradients, got[name]) for name in got}

    def _layer(
        self, name: str, gradients: Mapping[int, Gradients], got: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros(got.numel(), dtype=self.work)
        count = max(1, round(self.density * got.numel()))
        shared: torch.Tensor | None = None
        if name in self.layers and self.method == "randomk":
            shared = got.flatten().nonzero().flatten()
            nothing = all(gradients[rank][name] is None for rank in self.ranks)
            assert shared.numel() == (0 if nothing else count), (
                f"{name}: random-k returned {shared.numel()} entries instead of {count}"
            )
        for rank in self.ranks:
            gradient = gradients[rank][name]
            if gradient is None:
                continue
            total += self._contribution(rank, name, gradient.flatten(), count, shared)
        mean = total / len(self.ranks)
        if name in self.layers and self.method == "bf16":
            mean = mean.to(torch.bfloat16).to(self.work)
        return mean.view(got.shape)

    def _contribution(
        self,
        rank: int,
        name: str,
        gradient: torch.Tensor,
        count: int,
        shared: torch.Tensor | None,
    ) -> torch.Tensor:
        if name not in self.layers or self.method == "dense":
            return gradient.to(self.work)
        if self.method in ("bf16", "fp16"):
            wire = torch.bfloat16 if self.method == "bf16" else torch.float16
            return gradient.to(wire).to(self.work)
        held = self.residual.get((rank, name))
        vector = gradient.to(self.work) if held is None else held + gradient.to(self.work)
        if shared is None:
            # A stable sort of the magnitudes: among equals the lowest index comes first.
            shared = torch.argsort(vector.abs(), descending=True, stable=True)[:count]
        sent = torch.zeros_like(vector)
        sent[shared] = vector[shared]
        self.residual[rank, name] = vector - sent
        return sent


#: (relative, absolute) tolerance of a method's result against the oracle's.
_TOLERANCE = {"bf16": (2**-7, 1e-6), "fp16": (2**-9, 1e-3)}


def compare(
    job: Job,
    oracle: Oracle,
    gradients: Mapping[int, Gradients],
    *,
    rank: int,
    factor: float = 1.0,
    got: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Assert that the gradients and residuals of this rank are the oracle's."""
    got = job.net.gradients() if got is None else got
    wanted = oracle.step(gradients, got)
    for name, actual in got.items():
        parameter = job.net.get_parameter(name)
        assert actual.dtype == parameter.dtype, f"{name}: {parameter.dtype} in, {actual.dtype} out"
        rtol, atol = _TOLERANCE.get(oracle.method, (2e-6, 2e-6))
        # Sums of Horovod's own in two-byte numbers lose what cancels.
        half = {torch.bfloat16: 2**-7, torch.float16: 2**-9}.get(actual.dtype)
        torch.testing.assert_close(
            actual.to(oracle.work),
            wanted[name] * factor,
            rtol=half or rtol,
            atol=max(atol, 1e-6 if half is None else 2e-3),
            msg=lambda text, name=name: f"{name}: the reduced gradient is not the mean:\n{text}",
        )
    for name, held in job.residuals().items():
        expected = oracle.residual.get((rank, name))
        if expected is None:
            assert held is None or not held.any(), f"{name}: a residual where there was no gradient"
        else:
            assert held is not None, f"{name}: no residual"
            torch.testing.assert_close(
                held.flatten(),
                expected,
                rtol=2e-6,
                atol=2e-6,
                msg=lambda text, name=name: f"{name}: the residual is not what was left:\n{text}",
            )


def run_against_oracle(
    world: World,
    method: str,
    *,
    steps: int = 4,
    factor: float = 1.0,
    absent: Callable[[int, int, str], bool] | None = None,
    order: Callable[[int, int], list[str]] | None = None,
    passes: Callable[[int], int] = lambda step: 1,
    **options: Any,
) -> Job:
    """Train a job for some steps and compare each with the oracle; ranks must stay equal.

    Args:
        world: this rank.
        method: key of :data:`METHODS`.
        steps: how many.
        factor: what the optimizer's options make of a mean.
        absent: (rank, step, layer) -> the rank has no gradient for the layer.
        order: (rank, step) -> order of the loss's terms.
        passes: step -> backward passes before it.
        options: for :class:`Job`.
    """
    job = Job(world, method, **options)
    shapes = job.shapes()
    oracle = Oracle(range(world.size), method, job.compressed())
    assert oracle.layers == {"first", "second", "third"} or method == "dense"
    for step in range(steps):
        summed: dict[int, Gradients] = {}
        for rank in range(world.size):
            parts = [gradients_of(rank, f"{step}.{i}", shapes) for i in range(passes(step))]
            summed[rank] = {
                name: None
                if absent is not None and absent(rank, step, name)
                # As autograd does it: one after the other.
                else sum((part[name] for part in parts[1:]), start=parts[0][name])
                for name in shapes
            }
        for i in range(passes(step)):
            mine = {
                name: None if summed[world.rank][name] is None else gradient
                for name, gradient in gradients_of(world.rank, f"{step}.{i}", shapes).items()
            }
            job.net.backward(mine, order and order(world.rank, step))
        job.optimizer.step()
        compare(job, oracle, summed, rank=world.rank, factor=factor)
        world.same(job.net.parameters(), f"parameters after step {step}")
        job.optimizer.zero_grad()
    return job


@contextmanager
def raises(kind: type[Exception] | tuple[type[Exception], ...], *words: str) -> Iterator[None]:
    """Assert that the block raises ``kind`` and that its message holds all words."""
    try:
        yield
    except kind as error:
        text = str(error)
        missing = [word for word in words if word not in text]
        assert not missing, f"{missing} is not in the message: {text}"
        return
    raise AssertionError(f"nothing was raised, {kind} was expected")
