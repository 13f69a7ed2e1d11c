"""Fixtures of the tests that start ranks."""

from __future__ import annotations

import pytest

from ranks import Batch


@pytest.fixture(scope="session")
def batches(request: pytest.FixtureRequest) -> dict[int, Batch]:
    """Number of ranks -> the checks that were selected for it, not run yet."""
    selected: dict[int, list[str]] = {}
    for item in request.session.items:
        call = getattr(item, "callspec", None)
        if call is not None and {"check", "size"} <= call.params.keys():
            selected.setdefault(call.params["size"], []).append(call.params["check"])
    return {size: Batch(size, names) for size, names in selected.items()}
