"""What is measured: a case is an operation at one size with one value for each of its axes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import ConfigError
from .options import BenchOptions

#: Elements that share a scale, as in QSGD's default.
BUCKET = 512
#: Where the cases of an operation meet: from here each axis is varied alone.
_BASE: dict[str, Any] = {
    "density": 0.01, "bits": 4, "ranks": 4, "low_rank": 4, "inputs": "gaussian",
}  # fmt: skip
#: Axis -> where its values stand in the options.
_VALUES = {
    "density": "densities", "bits": "bits", "ranks": "ranks", "low_rank": "low_ranks",
    "length": "lengths", "inputs": "inputs",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One line of the table. Axes that the operation does not have are None."""

    operation: str
    numel: int
    density: float | None = None
    bits: int | None = None
    ranks: int | None = None
    low_rank: int | None = None
    length: int | None = None
    inputs: str | None = None

    @property
    def k(self) -> int:
        """Entries that are kept."""
        assert self.density is not None
        return max(1, round(self.density * self.numel))


@dataclass
class Work:
    """Tensors of a case, and calls that work on them.

    Attributes:
        ours: the operation, through the table.
        chain: torch calls that do the same.
        state: what both write into; what they return counts as well.
        reset: brings ``state`` back to where a call found it, if a second call would not do the
            same work as the first. Never timed.
        rivals: further ways to do it, by name: other libraries', or torch's in another layout.
        error: how far from right what ``ours`` returned is.
    """

    ours: Callable[[], object]
    chain: Callable[[], object]
    state: tuple[torch.Tensor, ...] = ()
    reset: Callable[[], object] | None = None
    rivals: dict[str, Callable[[], object]] = field(default_factory=dict)
    error: Callable[[Any], float] | None = None


@dataclass(frozen=True)
class Operation:
    """Something to measure.

    Attributes:
        name: on the command line and in the record.
        entry: what it calls of :mod:`hvd_greco.kernels`.
        axes: what is varied, one at a time.
        formula: counted bytes, in words: what must be read and written at the least, in fp32. d
            are elements, k is density times d, N ranks.
        counted: the same, computed.
        chain: the torch calls beside it, in words.
        prepare: tensors and calls of a case on a device.
        crossed: sizes are the axes' own product, not ``--sizes``.
    """

    name: str
    entry: str
    axes: tuple[str, ...]
    formula: str
    counted: Callable[[Case], float]
    chain: str
    prepare: Callable[[Case, torch.device], Work]
    crossed: bool = False

    def cases(self, options: BenchOptions) -> list[Case]:
        """All that the options ask for."""
        values = {axis: getattr(options, _VALUES[axis]) for axis in self.axes}
        if self.crossed:
            return [
                Case(self.name, length * rank, length=length, low_rank=rank)
                for length, rank in itertools.product(values["length"], values["low_rank"])
                if rank <= length
            ]
        base = {axis: _nearest(axis, found) for axis, found in values.items()}
        chosen = [base]
        for axis, found in values.items():
            chosen += [{**base, axis: value} for value in found if value != base[axis]]
        return [Case(self.name, size, **axes) for size in options.sizes for axes in chosen]


def _nearest(axis: str, values: tuple[Any, ...]) -> Any:
    wanted = _BASE[axis]
    if isinstance(wanted, str):
        return wanted if wanted in values else values[0]
    return min(values, key=lambda value: abs(value - wanted))


def check_memory(cases: list[Case], device: torch.device) -> None:
    """Refuse sizes that do not fit before an hour is spent on those that do.

    Raises:
        ConfigError: the largest case needs more than is free.
    """

    # Gradient, residual and its copy, source and target of the plain copy: 20 bytes. The chains
    # take up to 36 more (the histogram's have indices and squares of 8 bytes each).
    def needed(case: Case) -> int:
        payloads = (case.ranks or 0) * ((case.bits or 0) / 8 + 12 * (case.density or 0))
        return int(case.numel * (56 + payloads))

    free = _free_bytes(device)
    worst = max(cases, key=needed)
    if needed(worst) > free:
        raise ConfigError(
            f"--sizes: {worst.operation} of {worst.numel:,} elements needs about "
            f"{needed(worst) / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; up to "
            f"{int(worst.numel * free / needed(worst)):,} elements would fit"
        )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as file:
            found = dict(line.split(":", 1) for line in file)
        return int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return 1 << 62
