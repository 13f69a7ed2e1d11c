"""One test for each check of ``programs/``, at each number of ranks. See ``ranks.Batch``."""

from __future__ import annotations

import pytest

from programs.registry import load
from ranks import BATCH_LIMIT, STARTS, Batch

CHECKS = load()


def _cases() -> list[object]:
    return [
        pytest.param(name, size, id=f"{name}-{size}")
        for size in (2, 3, 4)
        for name, check in CHECKS.items()
        if size in check.sizes
    ]


@pytest.mark.mpi
@pytest.mark.timeout(STARTS * BATCH_LIMIT + 60)
@pytest.mark.parametrize(("check", "size"), _cases())
def test_check(check: str, size: int, batches: dict[int, Batch]) -> None:
    outcome = batches[size].outcome(check)
    if outcome.error is not None:
        pytest.fail(outcome.error, pytrace=False)
