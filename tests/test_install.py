"""The Horovod builder: patches, cache key, cache, racing builds, what it says on failure."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
from pathlib import Path

import pytest

from hvd_greco.install import build as build_module
from hvd_greco.install import facts, source
from hvd_greco.install.build import build_wheel, likely_cause
from hvd_greco.install.cache import WheelCache
from hvd_greco.install.errors import InstallError
from hvd_greco.install.facts import MpiFacts, TorchFacts, find_mpi
from hvd_greco.install.installer import ensure_wheel
from hvd_greco.install.patches import apply_patches, patches_for
from hvd_greco.install.plan import BuildOptions, BuildPlan, _decide_cuda, library_search
from hvd_greco.install.progress import BuildOutput

PLAN = BuildPlan(
    torch=TorchFacts("2.13.0+cpu", None, Path("/somewhere/torch")),
    mpi=MpiFacts("pip", "Open MPI 5.0.11", Path("/venv/bin/mpicxx"), (Path("/venv/lib"),)),
    gloo=False,
    cuda=False,
    nccl=False,
    python="cp311",
    machine="x86_64 avx glibc-2.36",
    rpath=("$ORIGIN/../../../..", "$ORIGIN/../../torch/lib"),
    passed_on=(),
    jobs=1,
)


class Spoken:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.stages: list[tuple[str, int | None]] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def stage(self, text: str, percent: int | None = None) -> None:
        self.stages.append((text, percent))


def source_tree(folder: Path, setup: str = "") -> Path:
    """A tree with the lines of Horovod's that the patches look for."""
    tree = folder / "horovod-0.28.1"
    files: dict[str, list[str]] = {}
    for patch in patches_for(("/old",), None, cuda=False):
        files.setdefault(patch.file, []).append(patch.old)
    files["CMakeLists.txt"].append("    find_package(MPI ${MPI_REQUIRED})")
    files["setup.py"] = [setup]
    for name, lines in files.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("before\n" + "\n".join(lines) + "\nafter\n" if lines != [setup] else setup)
    return tree


class TestPatches:
    def test_all_apply_and_each_says_why(self, tmp_path: Path) -> None:
        tree = source_tree(tmp_path)
        apply_patches(tree, PLAN.patches)
        text = (tree / "CMakeLists.txt").read_text()
        assert "set(CMAKE_CXX_STANDARD 17)" in text
        assert "CXX_STANDARD 14" not in text
        assert 'set(MPI_CXX_COMPILER "/venv/bin/mpicxx"' in text
        assert text.startswith("before\n")
        assert text.endswith("after\n")
        torch = (tree / "horovod/torch/CMakeLists.txt").read_text()
        assert "set(CMAKE_CXX_STANDARD 17)" in torch
        # CMake must see a literal $ORIGIN, not a variable of that name.
        assert r"\$ORIGIN/../../../..;\$ORIGIN/../../torch/lib" in torch
        assert "distutils" not in torch + (tree / "horovod/runner/js_run.py").read_text()
        assert all(len(patch.why) > 10 for patch in PLAN.patches)

    def test_cuda_is_left_alone_when_wanted(self) -> None:
        files = {patch.file for patch in dataclasses.replace(PLAN, cuda=True).patches}
        assert "cmake/Modules/FindPytorch.cmake" not in files

    def test_unknown_source_fails_plainly(self, tmp_path: Path) -> None:
        tree = source_tree(tmp_path)
        apply_patches(tree, PLAN.patches)
        with pytest.raises(InstallError, match=r"CMakeLists.txt.*STANDARD 14.*0 times.*0\.28\.1"):
            apply_patches(tree, PLAN.patches)
        with pytest.raises(InstallError, match="0 times"):
            apply_patches(tmp_path / "nothing", PLAN.patches)


class TestKey:
    @pytest.mark.parametrize(
        "change",
        [
            {"torch": TorchFacts("2.14.0+cpu", None, Path("/somewhere/torch"))},
            {"torch": TorchFacts("2.13.0+cpu", "13.0", Path("/somewhere/torch"))},
            {"mpi": MpiFacts("pip", "Open MPI 5.0.12", Path("/venv/bin/mpicxx"))},
            {"mpi": MpiFacts("system", "Open MPI 5.0.11", Path("/usr/bin/mpicxx"))},
            {"gloo": True},
            {"cuda": True},
            {"nccl": True},
            {"python": "cp312"},
            {"machine": "aarch64 glibc-2.36"},
            {"rpath": ("/opt/mpi/lib",)},
            {"passed_on": (("CXXFLAGS", "-O1"),)},
        ],
    )
    def test_changes_with_all_that_the_wheel_depends_on(self, change: dict) -> None:
        assert dataclasses.replace(PLAN, **change).key != PLAN.key

    def test_ignores_jobs_and_where_the_environment_lies(self) -> None:
        elsewhere = dataclasses.replace(
            PLAN,
            jobs=7,
            torch=TorchFacts("2.13.0+cpu", None, Path("/elsewhere/torch")),
            mpi=MpiFacts("pip", "Open MPI 5.0.11", Path("/elsewhere/bin/mpicxx")),
        )
        assert elsewhere.key == PLAN.key

    def test_is_a_readable_folder_name(self) -> None:
        assert PLAN.key.startswith("torch2.13.0+cpu-cp311-openmpi5.0.11-")
        assert (
            "/"
            not in dataclasses.replace(
                PLAN, mpi=MpiFacts("system", "MPI of /opt/x/mpicxx", Path("/opt/x/mpicxx"))
            ).key
        )

    def test_libraries_inside_the_environment_are_relative(self) -> None:
        platlib = Path(sysconfig.get_path("platlib"))
        inside = Path(sys.prefix) / "lib"
        found = library_search((inside, Path("/opt/mpi/lib")), platlib)
        assert found[1:] == ("/opt/mpi/lib", "$ORIGIN/../../torch/lib")
        assert found[0].startswith("$ORIGIN/..")
        extension = platlib / "horovod" / "torch"
        reached = os.path.normpath(found[0].replace("$ORIGIN", str(extension.resolve())))
        assert reached == str(inside.resolve())


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"mpi": "openmpi"}, "--mpi openmpi: use one of auto, pip, system, none"),
            ({"mpi": "none", "gloo": False}, "no way to communicate"),
            ({"nccl": True, "cuda": False}, "NCCL needs CUDA"),
            ({"jobs": 0}, "--jobs 0"),
            ({"sdist": Path("/no/such.tar.gz")}, "/no/such.tar.gz: there is no such file"),
        ],
    )
    def test_what_cannot_work_is_refused(self, options: dict, message: str) -> None:
        with pytest.raises(InstallError, match=message):
            BuildOptions(**options)

    def test_environment_drops_what_would_change_the_wheel_unseen(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOROVOD_WITH_TENSORFLOW", "1")
        monkeypatch.setenv("HOROVOD_WITH_GLOO", "1")
        monkeypatch.setenv("MAKEFLAGS", "--jobserver-auth=3,4")
        environment = PLAN.environment()
        assert "HOROVOD_WITH_TENSORFLOW" not in environment
        assert "HOROVOD_WITH_GLOO" not in environment
        assert environment["HOROVOD_WITHOUT_GLOO"] == environment["HOROVOD_WITH_MPI"] == "1"
        assert environment["MAKEFLAGS"] == "-j1"


class TestMpi:
    @pytest.fixture
    def wrappers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
        """An mpicxx beside Python and another on PATH."""
        made = []
        for name, version in (("inside", "5.0.11"), ("outside", "4.1.4")):
            path = tmp_path / name / "mpicxx"
            path.parent.mkdir()
            path.write_text(
                f'#!/bin/sh\n[ "$1" = --showme:libdirs ] && echo /{name}/lib && exit\n'
                f'echo "mpicxx: Open MPI {version} (Language: C++)"\n'
            )
            path.chmod(0o755)
            made.append(path)
        monkeypatch.setattr(facts.sysconfig, "get_path", lambda _: str(made[0].parent))
        monkeypatch.setenv("PATH", f"{made[1].parent}:/usr/bin:/bin")
        return made[0], made[1]

    def test_the_one_beside_python_comes_first(self, wrappers: tuple[Path, Path]) -> None:
        found = find_mpi("auto")
        assert (found.kind, found.version) == ("pip", "Open MPI 5.0.11")
        assert found.library_dirs == (Path("/inside/lib"),)

    def test_system_means_the_one_on_path(self, wrappers: tuple[Path, Path]) -> None:
        assert find_mpi("system").version == "Open MPI 4.1.4"
        wrappers[0].unlink()
        assert find_mpi("auto").wrapper == wrappers[1]
        with pytest.raises(InstallError, match="pip install openmpi"):
            find_mpi("pip")

    def test_none_at_all_says_what_to_type(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(facts.sysconfig, "get_path", lambda _: str(tmp_path))
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(InstallError, match=r"pip install openmpi.*--mpi none"):
            find_mpi("auto")
        assert find_mpi("none").kind == "none"


def fake_build(content: bytes = b"wheel", count: Path | None = None):
    def build(plan, workspace, log, kept, sdist, reporter):
        if count is not None:
            with count.open("a") as handle:
                handle.write("built\n")
        wheel = workspace / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
        wheel.write_bytes(content)
        return wheel

    return build


class TestCache:
    def test_second_time_comes_from_the_cache(self, tmp_path: Path) -> None:
        cache, count, spoken = WheelCache(tmp_path), tmp_path / "count", Spoken()
        first = ensure_wheel(PLAN, cache, spoken, build=fake_build(count=count))
        assert ensure_wheel(PLAN, cache, spoken, build=fake_build(count=count)) == first
        assert count.read_text() == "built\n"
        assert first.read_bytes() == b"wheel"
        manifest = json.loads((first.parent / "manifest.json").read_text())
        assert manifest["identity"]["torch"] == "2.13.0+cpu"
        assert [p.name for p in tmp_path.glob("build-*")] == []
        ensure_wheel(PLAN, cache, spoken, build=fake_build(count=count), force=True)
        assert count.read_text() == "built\n" * 2

    @pytest.mark.parametrize("damage", ["byte", "wheel", "manifest", "half"])
    def test_damaged_wheel_is_built_anew(self, tmp_path: Path, damage: str) -> None:
        cache, spoken = WheelCache(tmp_path), Spoken()
        wheel = ensure_wheel(PLAN, cache, spoken, build=fake_build())
        if damage == "byte":
            wheel.write_bytes(b"wheeL")
        elif damage == "wheel":
            wheel.unlink()
        elif damage == "manifest":
            (wheel.parent / "manifest.json").unlink()
        else:
            (wheel.parent / "manifest.json").write_text('{"wheel": "hor')
        again = ensure_wheel(PLAN, cache, spoken, build=fake_build(b"new"))
        assert again.read_bytes() == b"new"
        assert any("damaged" in line for line in spoken.lines)

    def test_a_failed_build_leaves_nothing_and_the_next_one_works(self, tmp_path: Path) -> None:
        def broken(*_: object) -> Path:
            raise InstallError("no compiler today")

        cache = WheelCache(tmp_path)
        with pytest.raises(InstallError, match="today"):
            ensure_wheel(PLAN, cache, Spoken(), build=broken)
        assert cache.lookup(PLAN.key) is None
        assert list(tmp_path.glob("build-*")) == []
        assert ensure_wheel(PLAN, cache, Spoken(), build=fake_build()).exists()

    def test_unwritable_cache_says_what_to_set(self, tmp_path: Path) -> None:
        blocked = tmp_path / "file"
        blocked.write_text("")
        with pytest.raises(InstallError, match="XDG_CACHE_HOME"):
            ensure_wheel(PLAN, WheelCache(blocked), Spoken(), build=fake_build())


RACER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_install import PLAN, Spoken, fake_build
from hvd_greco.install.cache import WheelCache
from hvd_greco.install.installer import ensure_wheel
root, force = Path(sys.argv[1]), sys.argv[2] == "force"
class Loud(Spoken):
    def say(self, text):
        print(text, flush=True)
def build(*arguments):
    wheel = fake_build(count=root / "count")(*arguments)
    while not (root / "go").exists():
        time.sleep(0.02)
    return wheel
print(ensure_wheel(PLAN, WheelCache(root), Loud(), force=force, build=build))
"""


class TestRace:
    @staticmethod
    def start(root: Path, force: str) -> subprocess.Popen[str]:
        code = RACER.format(tests=str(Path(__file__).parent))
        command = [sys.executable, "-W", "ignore", "-c", code, str(root), force]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    @classmethod
    def two(cls, root: Path, force: str) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
        """One process that builds and one that says it waits for it."""
        first = cls.start(root, force)
        deadline = time.monotonic() + 60
        while not (root / "count").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        second = cls.start(root, force)
        assert second.stdout is not None
        assert "Another process is building the same wheel; waiting" in second.stdout.readline()
        return first, second

    @pytest.mark.parametrize("force", ["", "force"])
    def test_two_builds_make_one_wheel(self, tmp_path: Path, force: str) -> None:
        first, second = self.two(tmp_path, force)
        (tmp_path / "go").touch()
        outputs = [process.communicate(timeout=60)[0] for process in (first, second)]
        assert (tmp_path / "count").read_text() == "built\n"
        assert outputs[0].splitlines()[-1] == outputs[1].splitlines()[-1]
        assert "built meanwhile" in outputs[1]

    def test_a_killed_build_frees_the_next_one(self, tmp_path: Path) -> None:
        first, second = self.two(tmp_path, "")
        first.send_signal(signal.SIGKILL)
        first.communicate()
        (tmp_path / "go").touch()
        output = second.communicate(timeout=60)[0]
        assert second.returncode == 0
        assert (tmp_path / "count").read_text() == "built\n" * 2
        assert Path(output.splitlines()[-1]).read_bytes() == b"wheel"


SETUP_OK = """
import os, sys
from setuptools import setup
if "bdist_wheel" in sys.argv:
    assert os.environ["HOROVOD_WITH_MPI"] == "1" and os.environ["HOROVOD_CMAKE"].endswith("cmake")
    print("Running CMake in /somewhere")
    print("[  3%] Building"); print("[ 67%] Building"); print("[100%] Linking CXX shared library")
setup(name="horovod", version="0.28.1", packages=[])
"""
SETUP_FAILS = SETUP_OK.replace(
    'print("Running',
    'print("c++: fatal error: Killed signal terminated program cc1plus");'
    'sys.exit(1); print("Running',
)


class TestBuild:
    @staticmethod
    def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setup: str, spoken: Spoken) -> Path:
        source_tree(tmp_path / "tree", setup)
        sdist = tmp_path / "horovod-0.28.1.tar.gz"
        with tarfile.open(sdist, "w:gz") as archive:
            archive.add(tmp_path / "tree" / "horovod-0.28.1", "horovod-0.28.1")
        monkeypatch.setattr(source, "SDIST_SHA256", source.sha256_of(sdist))
        workspace = tmp_path / "workspace"
        workspace.mkdir()
        log = tmp_path / "build.log"
        return build_wheel(PLAN, workspace, log, tmp_path / "kept", sdist, spoken)

    def test_progress_and_wheel(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        spoken = Spoken()
        wheel = self.run(tmp_path, monkeypatch, SETUP_OK, spoken)
        assert wheel.name.startswith("horovod-0.28.1-")
        assert "67%" in (tmp_path / "build.log").read_text()
        wanted = [("configuring (cmake)", None), ("compiling", 3), ("compiling", 67)]
        assert [stage for stage in spoken.stages if stage in wanted] == wanted
        assert ("linking", 100) in spoken.stages

    def test_failure_shows_log_and_cause(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(InstallError) as caught:
            self.run(tmp_path, monkeypatch, SETUP_FAILS, Spoken())
        message = str(caught.value)
        assert "terminated program cc1plus" in message
        assert str(tmp_path / "build.log") in message
        assert "out of memory: try `--jobs 1`" in message

    def test_missing_headers_fail_before_anything_is_fetched(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(build_module.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
        with pytest.raises(InstallError, match="apt-get install python3-dev"):
            build_wheel(PLAN, tmp_path, tmp_path / "log", tmp_path, None, Spoken())

    def test_a_wrong_sdist_is_refused(self, tmp_path: Path) -> None:
        wrong = tmp_path / "horovod-0.28.1.tar.gz"
        wrong.write_bytes(b"not it")
        with pytest.raises(InstallError, match=f"{source.sha256_of(wrong)}.*{source.SDIST_SHA256}"):
            source.get_sdist(tmp_path / "kept", wrong, {})

    @pytest.mark.parametrize(
        ("line", "cause"),
        [
            ("OSError: [Errno 28] No space left on device", "XDG_CACHE_HOME"),
            ("Could NOT find MPI_CXX (missing: MPI_CXX_WORKS)", "pip install openmpi"),
            ("#error C++17 or later compatible compiler is required to use PyTorch.", "CXX"),
            ("mpi_ops_v2.h:1: fatal error: Python.h: No such file or directory", "python3-dev"),
            ("fatal error: nccl.h: No such file or directory", "HOROVOD_NCCL_HOME"),
            ("Compatibility with CMake < 3.5 has been removed from CMake.", "cmake<4"),
        ],
    )
    def test_known_causes(self, line: str, cause: str) -> None:
        assert cause in str(likely_cause(f"some output\n{line}\nmore output"))

    def test_unknown_cause_is_not_guessed(self) -> None:
        assert likely_cause("all is well") is None


def test_output_lines_become_stages() -> None:
    spoken = Spoken()
    output = BuildOutput(spoken)
    for line in io.StringIO(
        "x\n  [ 45%] Building CXX object\n [100%] Linking CXX shared library\n"
    ):
        output.line(line)
    assert spoken.stages == [("compiling", 45), ("linking", 100)]


@pytest.mark.slow
def test_patches_fit_the_real_source(tmp_path: Path) -> None:
    sdist = source.get_sdist(tmp_path / "kept", None, dict(os.environ))
    tree = source.unpack(sdist, tmp_path)
    apply_patches(tree, PLAN.patches)
    # Found again without asking the index.
    assert source.get_sdist(tmp_path / "kept", None, {}) == sdist


@pytest.mark.parametrize("headers", [None, "include", "targets/x86_64-linux/include"])
def test_a_lone_nvcc_is_no_toolkit(
    headers: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA build of torch where only a compiler lies about: build for the CPU, do not fail."""
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    if headers:
        (tmp_path / "cuda" / headers).mkdir(parents=True)
        (tmp_path / "cuda" / headers / "cuda_runtime.h").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    torch = TorchFacts("2.13.0+cu130", "13.0", tmp_path)
    assert _decide_cuda(BuildOptions(), torch) is (headers is not None)
    assert _decide_cuda(BuildOptions(cuda=False), torch) is False
