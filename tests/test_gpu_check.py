"""The script for machines with a GPU, without one."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu_check.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(SCRIPT.parent.parent / "tools"), *sys.path])
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_of_it_runs_on_the_cpu(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(script, "SIZES", (1, 33, 4_097))
    target = tmp_path / "record.json"
    arguments = ["--device", "cpu", "--size", "10000", "--seconds", "0.01", "--json", str(target)]
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *arguments])
    assert script.main() == 0
    record = json.loads(target.read_text())
    assert record["operations"]["cases"] > 200
    assert {"topk", "qsgd", "powersgd"} <= set(record["methods"]["methods"])
    timed = {row["operation"] for times in record["times"] for row in times["rows"]}
    assert {"topk_ef", "quantise_ef", "dequantise_mean", "orthonormalise"} <= timed


def test_what_differs_is_told(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose results are off, that raises, and that takes too long."""
    odd = torch.device("cpu", 0)

    def off(device: torch.device) -> list[torch.Tensor]:
        return [torch.tensor([1.0, 2.0 if device.index is None else 2.5])]

    def broken(device: torch.device) -> list[torch.Tensor]:
        if device.index is not None:
            raise RuntimeError("illegal memory access")
        return []

    def nan(device: torch.device) -> list[torch.Tensor]:
        return [torch.tensor([1.0 if device.index is None else torch.nan])]

    cases: list[Any] = [("off", off, True), ("broken", broken, True), ("nan", nan, False)]
    monkeypatch.setattr(script, "cases", lambda: cases)
    found = script.check_operations(odd, time.monotonic() + 60)
    assert found["cases"] == 3
    words = ("1 of 2 differ", "illegal memory access", "NaN elsewhere")
    for failure, word in zip(found["failures"], words, strict=True):
        assert word in failure
    late = script.check_operations(odd, time.monotonic() - 1)
    assert late["failures"] == ["3 cases were not reached in time"]
