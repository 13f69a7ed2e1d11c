"""``hvd-greco bench``: the chains do the same work, bytes are counted right, records survive."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from hvd_greco import kernels
from hvd_greco.bench import memory, plot, record, report, timing
from hvd_greco.bench.case import BUCKET, Case, check_memory
from hvd_greco.bench.inputs import make_input, some_positions
from hvd_greco.bench.operations import BY_NAME, OPERATIONS, make_cases
from hvd_greco.bench.options import INPUTS, make_options, match
from hvd_greco.bench.runner import describe, measure, run_bench
from hvd_greco.cli import app
from hvd_greco.errors import ConfigError

CPU = torch.device("cpu")


def case_of(name: str, numel: int, **axes: Any) -> Case:
    """A case at the base point of its operation, but for ``axes``."""
    base = {"density": 0.01, "bits": 4, "ranks": 4, "low_rank": 4, "inputs": "gaussian"}
    chosen = {axis: base.get(axis) for axis in BY_NAME[name].axes} | axes
    return Case(name, numel, **chosen)  # type: ignore[arg-type]


# -- the chains do what the operations do ----------------------------------------------------


def both(case: Case) -> tuple[Any, Any, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """What our call and the chain return, and what they leave in the state."""
    work = BY_NAME[case.operation].prepare(case, CPU)
    found = []
    for call in (work.ours, work.chain):
        (work.reset or (lambda: None))()
        returned = call()
        if isinstance(returned, torch.Tensor):
            returned = returned.clone()
        if isinstance(returned, tuple):
            returned = tuple(tensor.clone() for tensor in returned)
        found.append((returned, tuple(tensor.clone() for tensor in work.state)))
    (ours, our_state), (chain, chain_state) = found
    return ours, chain, our_state, chain_state


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("numel", [1000, 200_000])
def test_chain_of_topk_feedback(inputs: str, numel: int) -> None:
    (positions, values), (others, found), ours, chain = both(
        case_of("topk_ef", numel, inputs=inputs)
    )
    assert positions.numel() == numel // 100
    # Ties may go to others in the chain; what is kept is then the same up to their order.
    assert torch.equal(values.abs().sort().values, found.abs().sort().values)
    assert torch.equal(ours[0].abs().sort().values, chain[0].abs().sort().values)
    if inputs in ("gaussian", "uniform", "heavy"):
        assert torch.equal(positions, others.sort().values)
        assert torch.equal(ours[0], chain[0])


def test_chain_of_the_histogram() -> None:
    ours, chain, state, other = both(case_of("accumulate", 5000))
    assert torch.equal(ours[0], chain[0])
    assert torch.allclose(ours[1], chain[1])
    assert torch.equal(state[0], other[0])


@pytest.mark.parametrize(
    "name", ["pack_blocks", "unpack_blocks", "pack_bitmap", "unpack_bitmap", "sign_pack"]
)
@pytest.mark.parametrize("numel", [1000, 200_001])
def test_chains_that_give_the_very_bytes(name: str, numel: int) -> None:
    ours, chain, _, _ = both(case_of(name, numel))
    assert ours.dtype == chain.dtype
    assert torch.equal(ours, chain)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("scatter_add", {"ranks": 3, "density": 0.1}),
        ("natural_add", {}),
        ("sign_add", {}),
        ("low_rank", {}),
        ("add_low_rank", {}),
        *[("lanes_add", {"bits": bits, "ranks": ranks}) for bits in (2, 8) for ranks in (1, 8)],
        *[("dequantise_mean", {"bits": bits, "ranks": 3}) for bits in (2, 3, 4, 5, 8)],
    ],
)
def test_chains_that_leave_the_same_state(name: str, axes: dict[str, Any]) -> None:
    _, _, ours, chain = both(case_of(name, 5 * BUCKET, **axes))
    assert ours
    for one, other in zip(ours, chain, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)
        assert one.any()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_chain_of_quantising_with_feedback(bits: int) -> None:
    """The last bucket is not whole: the chain leaves it as it is."""
    numel, whole = 5 * BUCKET + 17, 5 * BUCKET
    (scales, codes), (others, packed), ours, chain = both(case_of("quantise_ef", numel, bits=bits))
    assert torch.equal(scales[:5], others)
    assert torch.allclose(ours[0][:whole], chain[0][:whole], atol=1e-5)
    unpacked = [kernels.unpack_bits(c[: whole * bits // 8], bits, whole) for c in (codes, packed)]
    assert torch.equal(*unpacked)


def test_chains_that_round_by_chance() -> None:
    """Codes of the two are next to each other."""
    (_, codes), (_, packed), _, _ = both(case_of("quantise_random", 4 * BUCKET, bits=4))
    one, other = (kernels.unpack_bits(c, 4, 4 * BUCKET).int() for c in (codes, packed))
    assert int((one - other).abs().max()) == 1
    _, _, (ours,), (chain,) = both(case_of("natural_pack", 4096))
    assert int((ours.int() - chain.int()).abs().max()) == 1


@pytest.mark.parametrize("numel", [1000, 1001, 4096])
def test_chain_of_lanes(numel: int) -> None:
    _, _, (ours,), (chain,) = both(case_of("quantise_lanes", numel, ranks=4))
    # Halves go up in one and to the even number in the other: words may differ by a code.
    assert (ours != chain).float().mean() < 0.01


@pytest.mark.parametrize("name", ["project_rows", "project_columns"])
def test_chains_of_projections(name: str) -> None:
    ours, chain, _, _ = both(case_of(name, 2500))
    assert torch.allclose(ours, chain, atol=1e-4)


def test_chain_of_orthonormalising() -> None:
    case = Case("orthonormalise", 4 * 300, low_rank=4, length=300)
    ours, chain, _, _ = both(case)
    assert torch.allclose(ours[0].abs(), chain.t().abs(), atol=1e-4)  # up to the rows' signs
    error = BY_NAME["orthonormalise"].prepare(case, CPU).error
    assert error is not None
    assert error(ours) < 1e-5
    assert error(2 * ours) == pytest.approx(3)


# -- bytes, cases, inputs --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "axes", "expected"),
    [
        ("topk_ef", {}, 16_000_000),
        ("accumulate", {}, 12_000_000),
        ("take_topk", {"density": 0.01}, 4_120_000),
        ("scatter_add", {"density": 0.01, "ranks": 4}, 800_000),
        # 16 blocks of 65,536.
        ("pack_blocks", {"density": 0.1}, 1_000_064),
        ("unpack_blocks", {"density": 0.1}, 1_000_064),
        ("pack_bitmap", {"density": 0.01}, 205_000),
        ("unpack_bitmap", {"density": 0.01}, 205_000),
        ("quantise_ef", {"bits": 4}, 12_500_000),
        ("quantise_ef", {"bits": 3}, 12_375_000),
        ("quantise_random", {"bits": 8}, 5_000_000),
        ("dequantise_mean", {"bits": 4, "ranks": 4}, 6_000_000),
        ("dequantise_mean", {"bits": 2, "ranks": 1}, 4_250_000),
        ("natural_pack", {}, 5_000_000),
        ("natural_add", {}, 9_000_000),
        ("sign_pack", {}, 4_125_000),
        ("sign_add", {}, 8_125_000),
        # 4 bits and 4 ranks: lanes of 6 bits, 5 in a word, 200,000 words.
        ("quantise_lanes", {"bits": 4, "ranks": 4}, 4_800_000),
        ("lanes_add", {"bits": 4, "ranks": 4}, 8_800_000),
        # 1000 x 1000.
        ("project_rows", {"low_rank": 4}, 4_032_000),
        ("project_columns", {"low_rank": 4}, 4_032_000),
        ("low_rank", {"low_rank": 4}, 4_032_000),
        ("add_low_rank", {"low_rank": 4}, 8_032_000),
        ("orthonormalise", {"low_rank": 4, "length": 250_000}, 8_000_000),
    ],
)
def test_counted_bytes_by_hand(name: str, axes: dict[str, Any], expected: int) -> None:
    assert BY_NAME[name].counted(case_of(name, 1_000_000, **axes)) == expected


def test_a_single_block_has_no_counts() -> None:
    assert BY_NAME["pack_blocks"].counted(case_of("pack_blocks", 10_000)) == 1000


def test_every_operation_is_in_the_table_of_kernels() -> None:
    for operation in OPERATIONS:
        assert callable(getattr(kernels, operation.entry.partition("(")[0]))
    assert len(BY_NAME) == len(OPERATIONS)


def test_each_axis_is_varied_alone() -> None:
    cases = BY_NAME["topk_ef"].cases(make_options(sizes="1000"))
    assert [(c.density, c.inputs) for c in cases] == [
        (0.01, "gaussian"), (0.1, "gaussian"), (0.001, "gaussian"),
        (0.01, "uniform"), (0.01, "heavy"), (0.01, "constant"), (0.01, "zeros"),
    ]  # fmt: skip
    few = BY_NAME["topk_ef"].cases(make_options(sizes="1000", densities="0.5,0.2", inputs="zeros"))
    assert [(c.density, c.inputs) for c in few] == [(0.2, "zeros"), (0.5, "zeros")]


def test_lengths_and_low_ranks_are_crossed() -> None:
    options = make_options(operations="ortho*", lengths="8,64", low_ranks="4,16")
    assert [(c.length, c.low_rank, c.numel) for c in make_cases(options)] == [
        (8, 4, 32), (64, 4, 256), (64, 16, 1024),
    ]  # fmt: skip


def test_inputs_are_what_they_are_called() -> None:
    vectors = {kind: make_input(kind, 100_000, CPU) for kind in INPUTS}
    assert vectors["constant"].unique().numel() == 1
    assert 0.998 < (vectors["zeros"] == 0).float().mean() < 0.9995
    assert vectors["uniform"].abs().max() <= 1
    peak = {kind: float(v.abs().max() / v.abs().median()) for kind, v in vectors.items()}
    assert peak["heavy"] > 50 > peak["gaussian"]
    for kind, vector in vectors.items():
        assert torch.equal(vector, make_input(kind, 100_000, CPU))
        assert vector.isfinite().all()


@pytest.mark.parametrize(("k", "numel"), [(1, 1), (7, 7), (10, 37), (100, 100_000)])
def test_positions_ascend(k: int, numel: int) -> None:
    positions = some_positions(k, numel, CPU, 1)
    assert positions.numel() == k
    assert 0 <= int(positions[0]) <= int(positions[-1]) < numel
    assert bool((positions.diff() > 0).all())


# -- measuring -------------------------------------------------------------------------------


def test_contenders_take_turns() -> None:
    seen: list[str] = []

    def clock(call: Callable[[], object]) -> float:
        call()
        return float(len(seen))

    calls = {name: (lambda name=name: seen.append(name)) for name in "abc"}
    times = timing.interleave(calls, clock, lambda: seen.append("-"), seconds=0, repetitions=3)
    assert {name: len(found) for name, found in times.items()} == {"a": 3, "b": 3, "c": 3}
    rounds = ["".join(seen)[i : i + 6] for i in range(0, len(seen), 6)]
    assert len(rounds) == timing.WARM_UP + 3
    # Another one first each time, and a reset before each.
    assert {r.replace("-", "") for r in rounds} == {"abc", "bca", "cab"}
    assert all(r[::2] == "---" for r in rounds)


def test_rounds_at_least() -> None:
    times = timing.interleave({"a": lambda: None}, lambda call: 1.0, seconds=0, least=4)
    assert times == {"a": [1.0] * 4}


def test_quartiles() -> None:
    assert timing.quartiles([3.0]) == (3, 3, 3)
    assert timing.quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2, 3, 4)


@pytest.mark.skipif(
    memory.extra_bytes(lambda: None, CPU) is None, reason="the system does not tell"
)
def test_extra_memory_is_seen_whoever_asks_for_it() -> None:
    import numpy as np

    size = 32 << 20
    for call in (
        lambda: torch.ones(size // 4).sum(),
        lambda: np.ones(size // 8).sum(),
        lambda: torch.ones(size // 4),
    ):
        call()
        found = memory.extra_bytes(call, CPU)
        assert found is not None
        assert 0.95 * size < found < 1.2 * size


def test_launches_are_counted() -> None:
    vector = torch.randn(1000)
    out = torch.empty(1000)
    assert memory.launches(lambda: vector.abs().add_(1), CPU) == 2
    assert memory.launches(lambda: torch.empty(4).view(2, 2)[0], CPU) == 0
    assert memory.launches(lambda: kernels.accumulate_select(vector, out, 1.0, out, 10), CPU) == 1


# -- records and tables ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> record.Record:
    """All operations, tiny."""
    options = make_options(
        sizes="2048", lengths="64", low_ranks="4", quick=True, repetitions=2, threads=1
    )
    before = torch.get_num_threads()
    found = run_bench(options, "hvd-greco bench kernels --sizes 2048")
    assert torch.get_num_threads() == before
    return found


def test_every_operation_has_a_row(small: record.Record) -> None:
    assert [row.operation for row in small.rows] == [o.name for o in OPERATIONS]
    assert (small.threads, small.device, small.starts) == (1, "cpu", [])
    for row in small.rows:
        assert row.rounds == 2
        assert row.quartiles[0] <= row.seconds <= row.quartiles[1]
        assert row.counted_bytes > 0
        assert (row.error is not None) == (row.operation == "orthonormalise")
    assert small.rows[0].served_by == "cpu"


def test_records_survive_json(small: record.Record, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    for found in (small, with_more(small)):
        path.write_text(found.to_json())
        assert record.read_record(path) == found
    # A row a line: version control shows which changed.
    rows = [line for line in path.read_text().splitlines() if line.startswith('  {"operation"')]
    assert len(rows) == len(small.rows)


def test_records_that_are_none(small: record.Record, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    with pytest.raises(ConfigError, match=r"record.json: cannot be read \(No such file"):
        record.read_record(path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="is no record"):
        record.read_record(path)
    path.write_text(small.to_json().replace('"schema": 1', '"schema": 99'))
    with pytest.raises(ConfigError, match="schema 99, this version reads 1"):
        record.read_record(path)


def with_more(small: record.Record) -> record.Record:
    """With starts, rivals, and no memory or launches for one row."""
    first = msgspec.structs.replace(
        small.rows[0], rivals={"cupy": 2 * small.rows[0].seconds}, extra_bytes=None, launches=None
    )
    starts = [record.Start("empty", 1.0, 4.0, 3.5), record.Start("filled", 1.0, 0.5, 0.25)]
    return msgspec.structs.replace(small, rows=[first, *small.rows[1:]], starts=starts)


def test_the_table_has_all_columns(small: record.Record) -> None:
    found = with_more(small)
    stream = io.StringIO()
    console = Console(file=stream, width=260)
    console.print(report.make_table(found))
    console.print(report.make_starts(found.starts))
    text = stream.getvalue()
    for heading in (
        "operation", "case", "elements", "ms", "quartiles", "counted MB", "GB/s", "of copy",
        "vs torch", "launches", "extra MB", "backend", "error", "others",
    ):  # fmt: skip
        assert heading in text
    assert "cupy 2.00x" in text
    assert "density 0.01, gaussian" in text
    assert "7.50" in text  # kernels in all, with an empty cache
    assert all(name in text for name in BY_NAME)


def test_markdown_has_the_same(small: record.Record) -> None:
    lines = report.markdown(with_more(small)).splitlines()
    assert lines[0].startswith(report.headline(small))
    table = [line for line in lines if line.startswith("| ")]
    assert len(table) == 2 + len(small.rows) + 2 + 2
    assert len({line.count("|") for line in table[: 2 + len(small.rows)]}) == 1
    assert "| empty | 1.00 | 4.00 | 3.50 | 7.50 |" in table
    few = msgspec.structs.replace(small, rows=small.rows[:3])
    assert "error" not in report.markdown(few)


def test_a_busy_machine_is_mentioned(small: record.Record) -> None:
    quiet = msgspec.structs.replace(small, load=0.1)
    busy = msgspec.structs.replace(small, load=1.5)
    assert report.warning(quiet) is None
    assert "load 1.5" in (report.warning(busy) or "")


def test_the_plot_is_written(small: record.Record, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot.draw(small, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_cases_are_described() -> None:
    assert describe(case_of("topk_ef", 1_000_000)) == (
        "topk_ef 1,000,000 density=0.01 inputs=gaussian"
    )


def test_a_single_case() -> None:
    options = make_options(sizes="4096", repetitions=1)
    row = measure(case_of("quantise_ef", 4096), options, CPU)
    assert (row.operation, row.bits, row.rounds) == ("quantise_ef", 4, 1)
    assert row.speedup == pytest.approx(row.chain_seconds / row.seconds)
    assert row.of_copy == pytest.approx(row.bytes_per_second / row.copy_bytes_per_second)


# -- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": "1e4,many"}, r"--sizes: 'many' is not a whole number from 16"),
        ({"sizes": "1.5"}, "--sizes: '1.5'"),
        ({"sizes": "1e12"}, "--sizes: '1e12'"),
        ({"sizes": ","}, "--sizes: ',' names nothing"),
        ({"bits": "4,9"}, "--bits: '9' is not a whole number from 2 to 8$"),
        ({"ranks": "0"}, "--ranks: '0'"),
        ({"low_ranks": "0"}, "--low-ranks: '0'"),
        ({"lengths": "x"}, "--lengths: 'x'"),
        ({"densities": "0"}, r"--densities: 0.0 is not in \(0, 1\]"),
        ({"densities": "10"}, "for 10.0 percent pass 0.1"),
        ({"densities": "few"}, "--densities: 'few'"),
        ({"inputs": "gauss"}, "--inputs: 'gauss' is none of gaussian, uniform"),
        ({"device": "tpu"}, "--device: 'tpu' is none of cpu, cuda"),
        ({"seconds": 0.0}, "--seconds: needs a number above 0 .* got 0.0"),
        ({"seconds": float("nan")}, "--seconds"),
        ({"repetitions": 0}, "--repetitions: needs a whole number >= 1, got 0"),
        ({"seconds": 1.0, "repetitions": 3}, "--seconds 1 and --repetitions 3: give one"),
        ({"threads": 0}, "--threads: needs a whole number >= 1"),
        ({"threads": 100_000}, "--threads: 100000, and this process may use"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_options(**options)


def test_operations_by_pattern() -> None:
    assert match(["topk", "topk_ef", "sign"], ["sign", "topk*"]) == ["topk", "topk_ef", "sign"]
    with pytest.raises(ConfigError, match=r"--operations: 'x\.' fits none of topk, sign"):
        match(["topk", "sign"], ["topk", "x."])


def test_sizes_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = make_cases(make_options(operations="topk_ef,scatter_add", sizes="1e9"))
    monkeypatch.setattr("hvd_greco.bench.case._free_bytes", lambda device: 10**9)
    with pytest.raises(ConfigError, match=r"--sizes: .* of 1,000,000,000 elements needs about"):
        check_memory(cases, CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_cuda_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"--device: 'cuda' needs a GPU .* use --device cpu"):
        run_bench(make_options(device="cuda", quick=True), "")


def test_all_ranks_too_large() -> None:
    with pytest.raises(ConfigError, match="--low-ranks: all of them exceed all --lengths"):
        run_bench(make_options(operations="ortho*", lengths="4", low_ranks="8"), "")


def test_a_plot_that_cannot_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    plot.check_plot(None)
    with pytest.raises(ConfigError, match=r"--plot: 'a.gif' ends in none of .png"):
        plot.check_plot(Path("a.gif"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--plot: matplotlib is not installed"):
        plot.check_plot(Path("a.png"))


# -- the command -----------------------------------------------------------------------------


def test_the_command_writes_and_shows(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    arguments = "bench kernels --quick --sizes 2048 --operations sign_* --repetitions 1 --json"
    done = CliRunner().invoke(app, [*arguments.split(), str(path)])
    assert done.exit_code == 0, done.output
    assert [row.operation for row in record.read_record(path).rows] == ["sign_pack", "sign_add"]
    shown = CliRunner().invoke(app, ["bench", "show", str(path), "--markdown"])
    assert shown.exit_code == 0
    assert report.markdown(record.read_record(path)) in shown.output


def test_nothing_is_measured_for_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    arguments = ["bench", "kernels", "--quick", "--json"]
    for path in (tmp_path, tmp_path / "no" / "record.json"):
        done = CliRunner().invoke(app, [*arguments, str(path)])
        assert isinstance(done.exception, ConfigError)
        assert str(done.exception).startswith("--json: ")


@pytest.mark.slow
def test_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache and a filled one; neither is the user's."""
    from hvd_greco.bench.starts import measure_starts

    monkeypatch.setenv("HOME", str(tmp_path))
    cold, warm = measure_starts("cpu", 1)
    assert (cold.cache, warm.cache) == ("empty", "filled")
    assert cold.kernel_seconds > warm.kernel_seconds > 0
    assert not list(tmp_path.iterdir())
