"""The command line: what it says, what it exits with, and that it starts without torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import hvd_greco

RUN = "from hvd_greco.cli import main; main()"


def run(*arguments: str, code: str = RUN, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1", **env}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"hvd-greco {hvd_greco.__version__}\n")


def test_help_names_every_command() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert all(
        name in done.stdout for name in ("demo", "bench", "lab", "doctor", "install-horovod")
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["install-horovod", "--dry-run"],
        ["demo", "--help"],
        ["bench", "kernels", "--help"],
        ["bench", "kernels", "--bits", "9"],
        ["lab", "run", "--help"],
        ["lab", "up", "--hosts", "99"],
    ],
)
def test_torch_and_horovod_stay_unimported(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom hvd_greco.cli import main\ntry:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'horovod', 'mpi4py.MPI')))"
    )
    done = run(*arguments, code=code)
    assert done.returncode == 0, done.stderr


def test_our_errors_are_a_message() -> None:
    done = run("install-horovod", "--mpi", "openmpi")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --mpi openmpi: use one of")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("before", "env"), [(["--traceback"], {}), ([], {"HVD_GRECO_TRACEBACK": "1"})]
)
def test_traceback_on_request(before: list[str], env: dict[str, str]) -> None:
    done = run(*before, "install-horovod", "--jobs", "0", **env)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "InstallError: --jobs 0" in done.stderr


def test_dry_run_explains_every_change() -> None:
    done = run("install-horovod", "--mpi", "none", "--dry-run")
    assert done.returncode == 0, done.stderr
    for text in (
        "HOROVOD_WITHOUT_MPI",
        "+ set(CMAKE_CXX_STANDARD 17)",
        "torch's headers need C++17",
    ):
        assert text in done.stdout
    assert "Nothing was done" in done.stdout
