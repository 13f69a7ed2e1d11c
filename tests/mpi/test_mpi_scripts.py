"""Jobs that must end in a certain way: an error that explains itself, or exit status 0.

Each is a start of its own, with a limit; "seconds" counts the start of Python and Horovod too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ranks import LIMIT, Run, environment, script, start

pytestmark = pytest.mark.mpi

#: Horovod's stall limits where a stall is what the test is about.
STALL = {
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "2",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5",
}


def _ends(run: Run, *, ok: bool) -> None:
    assert run.code is not None, f"hung: killed after {run.seconds:.0f} s\n{run.output[-4000:]}"
    assert (run.code == 0) == ok, f"exit status {run.code}\n{run.output[-4000:]}"


@pytest.mark.parametrize("which", ["optimizer", "compressor"])
def test_process_set_given_to_one_of_the_two(which: str) -> None:
    """case 31: every rank that takes part says so, at once, though others never come."""
    run = script(f"process_set_for_the_{which}_alone", ranks=3)
    _ends(run, ok=False)
    told = run.told("method")
    ranks = (0, 1) if which == "optimizer" else (0, 1, 2)
    for method in ("topk", "bf16", "randomk"):
        by_rank = {record["rank"]: record for record in told if record["method"] == method}
        for rank in ranks:
            text = by_rank[rank]["mismatch"]
            assert text is not None, f"{method}: rank {rank} trained on"
            assert "process_set=" in text
            assert f"this is rank {rank}" in text
            assert ("[0, 1, 2]" if which == "optimizer" else "[0, 1]") in text
            assert by_rank[rank]["seconds"] < 5


def test_a_rank_that_never_steps_fails_by_the_stall_limit() -> None:
    """Horovod's stall limit ends it, long before the other rank's sleep is over."""
    run = script("one_rank_never_steps", env=STALL)
    _ends(run, ok=False)
    errors = run.told("error")
    assert {record["rank"] for record in errors} == {0}
    assert errors[0]["error"] == "HorovodInternalError"
    assert run.seconds < 45


def test_a_round_that_never_comes_fails_by_the_stall_limit() -> None:
    """The error names the collective that was waited for."""
    run = script("one_rank_holds_back_a_round", env=STALL)
    _ends(run, ok=False)
    errors = run.told("error")
    assert {record["rank"] for record in errors} == {0}
    assert errors[0]["error"] == "HorovodInternalError"
    assert "0.weight/2" in errors[0]["message"]
    assert run.seconds < 45


def test_a_rank_that_raises_ends_the_job() -> None:
    """case 12, in its kind: non-zero in bounded time, whatever the others wait for."""
    run = script("one_rank_raises_while_encoding")
    _ends(run, ok=False)
    assert any(r["rank"] == 1 and r["error"] == "TypeError" for r in run.told("error"))
    assert run.seconds < 45


def test_a_rank_that_joins_ends_the_job_with_advice() -> None:
    """case 14: uneven batches with private payloads; Horovod alone would hang for ever here."""
    run = script("one_rank_joins")
    _ends(run, ok=False)
    errors = {record["rank"]: record for record in run.told("error")}
    assert errors[1]["error"] == "UnsupportedError"
    assert all(word in errors[1]["message"] for word in ("hvd.join()", "drop_last", "RandomK"))
    assert run.seconds < 45


def test_a_rank_that_dies_in_a_retune_ends_the_job() -> None:
    """case 12: mpirun sees it, and ends the others, which wait for the plan."""
    run = script("rank_0_dies_while_it_decides")
    _ends(run, ok=False)
    assert {record["done"] for record in run.told("done")} == {0}
    assert run.seconds < 45


def test_a_rank_that_never_comes_to_a_decision_ends_the_job() -> None:
    """case 12: the others wait for so long and no longer, and say for what."""
    env = {"HVD_GRECO_CONTROL_TIMEOUT": "4", **STALL}
    run = script("one_rank_never_comes_to_a_decision", env=env)
    _ends(run, ok=False)
    (error,) = run.told("error")
    assert error["rank"] == 0
    assert error["error"] in ("StallError", "HorovodInternalError")
    assert run.seconds < 45


@pytest.mark.parametrize(
    ("name", "finalized"),
    [
        ("mpi4py_first_then_finalize", True),
        ("mpi4py_first_then_shutdown", False),
        ("mpi4py_after_then_shutdown", True),
        ("mpi4py_loaded_and_nothing_else", None),
    ],
)
def test_mpi4py_beside_horovod(name: str, finalized: bool | None) -> None:
    """case 15: MPI started by either, and finalised by either or both: a clean exit."""
    run = script(name)
    _ends(run, ok=True)
    assert {record["rank"] for record in run.told("trained")} == {0, 1}
    assert all(record["ratio"] > 5 for record in run.told("trained"))
    ends = run.told("finalized")
    assert [record["finalized"] for record in ends] == (
        [] if finalized is None else [finalized] * 2
    )
    assert not any(record["horovod"] for record in ends)


def test_thread_level_below_multiple() -> None:
    """case 15: the error names the level, who may have set it, and what to do."""
    run = script("thread_level_below_multiple")
    _ends(run, ok=False)
    errors = run.told("error")
    assert errors
    for record in errors:
        assert record["error"] == "LaunchError"
        for word in ("MPI_THREAD_MULTIPLE", "mpi4py.rc.thread_level", "hvd.init()"):
            assert word in record["message"]


def _plain(name: str, folder: Path) -> Run:
    """A script as one process without mpirun."""
    arguments = [sys.executable, "-u", "-m", "programs.scripts", name, str(folder)]
    done = subprocess.run(
        arguments,
        env={**os.environ, **environment()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    return Run(done.returncode, done.stdout, 0.0)


def test_each_process_sees_itself_alone(tmp_path: Path) -> None:
    """case 16: mpirun's size is not Horovod's; training apart would look like success."""
    run = _plain("launcher_of_another_mpi", tmp_path)
    _ends(run, ok=False)
    (error,) = run.told("error")
    assert error["error"] == "LaunchError"
    for word in ("4 ranks", "OMPI_COMM_WORLD_SIZE", "sees 1", "hvd-greco doctor"):
        assert word in error["message"]


def test_horovod_not_initialized(tmp_path: Path) -> None:
    run = _plain("horovod_not_initialized", tmp_path)
    _ends(run, ok=False)
    (error,) = run.told("error")
    assert error["error"] == "NotInitializedError"
    assert "hvd.init() before greco.TopK" in error["message"]


@pytest.mark.parametrize("launcher", ["python", "mpirun"])
def test_a_single_rank_trains_plainly(launcher: str, tmp_path: Path) -> None:
    if launcher == "python":
        run = _plain("a_single_rank", tmp_path)
    else:
        run = script("a_single_rank", ranks=1)
    _ends(run, ok=True)
    (record,) = run.told("same")
    assert record["same"] == [True] * 5
    assert record["moved"]


_IMPORT = """
import sys
import torch
assert not torch.cuda.is_available()
import hvd_greco as greco
from hvd_greco import kernels, methods
group = greco.LocalGroup(2)
def work(member):
    parameter = torch.nn.Parameter(torch.zeros(4096))
    compressor = greco.TopK([("w", parameter)], 0.01, group=member)
    parameter.grad = torch.arange(4096.0)
    member.reduce_gradients([("w", parameter)], compressor)
    return parameter.grad
first, second = group.run(work)
assert torch.equal(first, second) and first.count_nonzero() == 41
print("compressed")
"""


@pytest.mark.parametrize("cupy", ["absent or working", "broken"])
def test_import_without_a_gpu(cupy: str, tmp_path: Path) -> None:
    """case 32: no GPU, or a CuPy that cannot be imported: everything works on the CPU."""
    if cupy == "broken":
        for name in ("cupy", "numba"):
            (tmp_path / f"{name}.py").write_text("raise RuntimeError('CUDA driver not found')\n")
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["compressed"]


def test_the_limit_kills_every_rank(tmp_path: Path) -> None:
    """The harness itself: ranks that hang, ignoring SIGTERM, are gone when the limit has passed."""
    program = tmp_path / "hang.py"
    program.write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(tmp_path)!r} + f'/pid{{os.getpid()}}', 'w').close()\n"
        "time.sleep(300)\n"
    )
    run = start(2, str(program), limit=4.0)
    assert run.code is None
    assert run.seconds < 30
    pids = [int(path.name[3:]) for path in tmp_path.glob("pid*")]
    assert len(pids) == 2
    for pid in pids:
        status = Path(f"/proc/{pid}/stat")
        assert not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z", pid
