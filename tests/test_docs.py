"""Tables in the documentation are the ones that the recorded measurements give."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "methods.md").read_text()
LGRECO = (ROOT / "docs" / "lgreco.md").read_text()
KERNELS = (ROOT / "docs" / "kernels.md").read_text()


def benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses look for the names in their annotations.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("task", ["digits", "text"])
def test_convergence_tables_are_the_recorded_ones(task: str) -> None:
    convergence = benchmark("convergence")
    assert convergence.table(task) in PAGE
    records = json.loads((RESULTS / f"convergence-{task}.json").read_text())
    # Nothing that lost was left out: every method, number of ranks and seed has its record.
    found = {(r["method"], r["ranks"], r["seed"]) for r in records}
    methods = convergence.METHODS[task]
    assert found == {(m, n, seed) for m in methods for n in (2, 4) for seed in (1, 2, 3)}
    assert {r["steps"] for r in records} == {convergence.TASKS[task][1]}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("step_time-*.json")), ids=lambda p: p.stem)
def test_step_time_tables_are_the_recorded_ones(path: Path) -> None:
    record = json.loads(path.read_text())
    assert benchmark("step_time").table(record) in PAGE
    # The page's shell line, whatever its line breaks, is the one that made the record.
    assert record["command"] in " ".join(PAGE.replace("\\\n", " ").split())


@pytest.mark.parametrize("path", sorted(RESULTS.glob("kernels-*.json")), ids=lambda p: p.stem)
def test_kernel_tables_are_the_recorded_ones(path: Path) -> None:
    from hvd_greco.bench import record, report

    found = record.read_record(path)
    assert report.markdown(found) in KERNELS
    assert found.command in " ".join(KERNELS.replace("\\\n", " ").split())


@pytest.mark.parametrize("name", ["lgreco_gain", "lgreco_time", "lgreco_overhead"])
def test_tables_of_the_controller_are_the_recorded_ones(name: str) -> None:
    record = json.loads((RESULTS / f"{name}.json").read_text())
    assert benchmark(name).table(record) in LGRECO
    assert record["command"] in LGRECO


def test_operations_and_their_bytes_are_the_measured_ones() -> None:
    from hvd_greco.bench import report

    assert report.operations_markdown() in KERNELS


def test_the_readme_has_the_recorded_demo() -> None:
    """``hvd-greco demo --methods all``, every method of it."""
    from hvd_greco import methods

    readme = (ROOT / "README.md").read_text()
    record = json.loads((RESULTS / "demo-2ranks.json").read_text())
    assert [r["method"] for r in record["results"]] == list(methods.ORDER)
    dense = record["results"][0]["val_bits_per_byte"]
    for result in record["results"]:
        quality = result["val_bits_per_byte"]
        row = (
            f"| {result['method']} | {result['wire_bytes_per_step']:,.0f} | "
            f"{result['ratio']:.1f}x | {result['step_ms_median']:.1f} | "
            f"{quality:.3f} ({100 * (quality / dense - 1):+.1f} %) |"
        )
        assert row in readme
