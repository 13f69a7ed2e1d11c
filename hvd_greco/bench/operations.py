"""All operations that are measured, in the order of the table."""

from __future__ import annotations

from . import low_rank, quantisers, sparse
from .case import Case, Operation
from .options import BenchOptions, match

OPERATIONS: tuple[Operation, ...] = (
    *sparse.OPERATIONS, *quantisers.OPERATIONS, *low_rank.OPERATIONS
)  # fmt: skip
BY_NAME = {operation.name: operation for operation in OPERATIONS}


def make_cases(options: BenchOptions) -> list[Case]:
    """What the options ask for, operation by operation.

    Raises:
        ConfigError: a pattern of ``--operations`` fits none.
    """
    chosen = match(BY_NAME, options.operations)
    return [case for name in chosen for case in BY_NAME[name].cases(options)]
