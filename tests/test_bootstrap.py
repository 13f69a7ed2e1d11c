"""``make setup``: early plain errors, the stamp, and pip where Python has no ensurepip."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def preflight() -> ModuleType:
    return load(ROOT / "tools" / "preflight.py")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with what the set-up reads, and nothing installed."""
    root = tmp_path / "checkout"
    (root / "tools").mkdir(parents=True)
    for name in ("bootstrap.py", "preflight.py", "fetch_pip.py"):
        shutil.copy(ROOT / "tools" / name, root / "tools")
    for name in ("constraints.txt", "pyproject.toml", "setup.py", "Makefile"):
        shutil.copy(ROOT / name, root)
    return root


@pytest.fixture
def bootstrap(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, whose slow steps are replaced by notes of their titles."""
    monkeypatch.syspath_prepend(str(checkout / "tools"))
    monkeypatch.delitem(sys.modules, "preflight", raising=False)
    module = load(checkout / "tools" / "bootstrap.py")
    module.steps = []

    def run_step(title: str, command: list[str]) -> None:
        module.steps.append(title)
        if title == "make .venv":
            program = Path(module.VENV) / "bin" / "python"
            program.parent.mkdir()
            program.symlink_to(sys.executable)

    def install_horovod() -> None:
        module.steps.append("horovod")
        (Path(module.VENV) / "bin" / "hvd-greco").touch()

    monkeypatch.setattr(module, "run_step", run_step)
    monkeypatch.setattr(module, "get_pip", lambda: module.steps.append("pip"))
    monkeypatch.setattr(module, "install_horovod", install_horovod)
    return module


def program(folder: Path, name: str, code: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\n" + code)
    path.chmod(0o755)
    return path


class TestPreflight:
    @pytest.fixture
    def old_python(self, preflight: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        old = SimpleNamespace(version_info=(3, 9, 2), executable="/usr/bin/python3.9")
        monkeypatch.setattr(preflight, "sys", old)

    @pytest.mark.usefixtures("old_python")
    def test_unfit_python_says_what_to_type(
        self, preflight: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        program(tmp_path / "bin", "python3.11", "echo 'pyenv: command not found' >&2; exit 127\n")
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        with pytest.raises(
            preflight.SetupError, match=r"3\.9\.2 does not fit.*3\.10 to 3\.12"
        ) as e:
            preflight.find_python()
        assert "apt-get install python3.11" in str(e.value)

    @pytest.mark.usefixtures("old_python")
    def test_a_fit_python_on_path_is_used(
        self, preflight: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        program(tmp_path / "bin", "python3.12", "exit 127\n")  # a shim of an inactive version
        fit = program(tmp_path / "bin", "python3.10", "exit 0\n")
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        assert preflight.find_python() == str(fit)

    def test_this_python_fits(self, preflight: ModuleType) -> None:
        assert preflight.find_python() == sys.executable

    def test_compiler(
        self, preflight: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("CXX", raising=False)
        folder = tmp_path / "bin"
        folder.mkdir()
        monkeypatch.setenv("PATH", str(folder))
        with pytest.raises(preflight.SetupError, match="apt-get install g\\+\\+ make"):
            preflight.check_compiler()
        program(
            folder,
            "g++",
            'case "$*" in --version) echo "g++ (GCC) 4.8.5";; *) '
            "echo \"unrecognized command line option '-std=c++17'\" >&2; exit 1;; esac\n",
        )
        with pytest.raises(preflight.SetupError, match=r"4\.8\.5.*cannot compile") as caught:
            preflight.check_compiler()
        assert "unrecognized command line option" in str(caught.value)
        assert "CXX=g++-12 make setup" in str(caught.value)

    def test_make_and_headers(
        self, preflight: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(preflight.SetupError, match=f"looked in {tmp_path}.*\n.*python3-dev"):
            preflight.check_headers(str(tmp_path))
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(preflight.SetupError, match="apt-get install make"):
            preflight.check_make()

    def test_syntax_is_old_enough_to_explain_itself(self) -> None:
        import ast

        for name in ("bootstrap.py", "preflight.py", "fetch_pip.py"):
            ast.parse((ROOT / "tools" / name).read_text(), feature_version=(3, 6))


class TestScript:
    def run(self, checkout: Path, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(checkout / "tools" / "bootstrap.py")],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, **env},
            check=False,
        )

    def test_without_a_compiler_nothing_is_made(self, checkout: Path, tmp_path: Path) -> None:
        done = self.run(checkout, CXX="g++-of-nowhere")
        assert done.returncode == 1
        assert done.stderr.startswith("setup: error: no C++ compiler: g++-of-nowhere")
        assert "Traceback" not in done.stderr
        assert not (checkout / ".venv").exists()

    def test_second_run_has_nothing_to_do(self, checkout: Path, bootstrap: ModuleType) -> None:
        bootstrap.set_up()
        started = time.monotonic()
        done = self.run(checkout, CXX="g++-of-nowhere")
        assert (done.returncode, done.stdout) == (0, "")
        assert time.monotonic() - started < 10  # 0.1 s on an idle machine


class TestStamp:
    FULL = 6  # .venv, pip, three pip installs, Horovod

    def test_first_run_does_all_and_second_nothing(self, bootstrap: ModuleType) -> None:
        bootstrap.set_up()
        assert len(bootstrap.steps) == self.FULL
        assert bootstrap.steps[3] == f"install torch=={bootstrap.pinned('torch')}"
        bootstrap.set_up()
        assert len(bootstrap.steps) == self.FULL

    @pytest.mark.parametrize("name", ["constraints.txt", "pyproject.toml", "setup.py"])
    def test_changed_pins_update_in_place(
        self, bootstrap: ModuleType, checkout: Path, name: str
    ) -> None:
        bootstrap.set_up()
        with (checkout / name).open("a") as handle:
            handle.write("\n# changed\n")
        bootstrap.steps.clear()
        bootstrap.venv_has_pip = lambda: True
        bootstrap.set_up()
        assert "make .venv" not in bootstrap.steps
        assert len(bootstrap.steps) == self.FULL - 2

    def test_half_finished_is_redone(self, bootstrap: ModuleType, checkout: Path) -> None:
        def interrupted() -> None:
            raise KeyboardInterrupt

        real = bootstrap.install_horovod
        bootstrap.install_horovod = interrupted
        with pytest.raises(KeyboardInterrupt):
            bootstrap.set_up()
        bootstrap.install_horovod = real
        left = checkout / ".venv" / "half-written"
        left.touch()
        bootstrap.steps.clear()
        bootstrap.set_up()
        assert len(bootstrap.steps) == self.FULL
        assert not left.exists()

    def test_vanished_python_is_redone(self, bootstrap: ModuleType, checkout: Path) -> None:
        bootstrap.set_up()
        link = checkout / ".venv" / "bin" / "python"
        link.unlink()
        link.symlink_to("/usr/bin/python-that-was-upgraded-away")
        bootstrap.steps.clear()
        bootstrap.set_up()
        assert len(bootstrap.steps) == self.FULL

    def test_a_moved_checkout_is_redone(self, bootstrap: ModuleType, checkout: Path) -> None:
        bootstrap.set_up()
        stamp = checkout / ".venv" / "hvd-greco-setup.json"
        stamp.write_text(stamp.read_text().replace(str(checkout), "/somewhere/else"))
        with (checkout / "setup.py").open("a") as handle:
            handle.write("#\n")
        bootstrap.steps.clear()
        bootstrap.set_up()
        assert "make .venv" in bootstrap.steps

    def test_a_venv_of_the_user_is_left_alone(self, bootstrap: ModuleType, checkout: Path) -> None:
        mine = checkout / ".venv" / "mine"
        mine.parent.mkdir()
        mine.touch()
        with pytest.raises(bootstrap.SetupError, match="was not made by `make setup`"):
            bootstrap.set_up()
        assert mine.exists()
        assert bootstrap.steps == []


class TestSteps:
    def test_output_is_shown_on_failure_only(
        self, checkout: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        sys.path.insert(0, str(checkout / "tools"))
        try:
            module = load(checkout / "tools" / "bootstrap.py")
        finally:
            sys.path.remove(str(checkout / "tools"))
        module.run_step("quiet", ["sh", "-c", "echo noise"])
        assert "noise" not in capfd.readouterr().out
        with pytest.raises(module.SetupError, match="loud failed \\(exit code 7\\)"):
            module.run_step("loud", ["sh", "-c", "echo the reason; exit 7"])
        assert "the reason" in capfd.readouterr().out

    def test_constraints_pin_exactly(self, bootstrap: ModuleType) -> None:
        assert bootstrap.pinned("torch") == "2.13.0"
        for line in (ROOT / "constraints.txt").read_text().splitlines():
            if line and not line.startswith("#"):
                assert "==" in line
        with pytest.raises(bootstrap.SetupError, match="no-such-package"):
            bootstrap.pinned("no-such-package")


class TestFetchPip:
    @pytest.fixture
    def fetch_pip(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
        for name in list(os.environ):
            if name.startswith("PIP_"):
                monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        return load(ROOT / "tools" / "fetch_pip.py")

    @staticmethod
    def index(folder: Path, wheel: Path, digest: str | None = None) -> str:
        page = folder / "simple" / "pip"
        page.mkdir(parents=True)
        shutil.copy(wheel, page)
        digest = digest or hashlib.sha256(wheel.read_bytes()).hexdigest()
        link = f'<a href="{wheel.name}#sha256={digest}">{wheel.name}</a>'
        (page / "index.html").write_text(f'<a href="pip-1.0.tar.gz">old</a>{link}')
        return f"file://{folder / 'simple'}"

    def test_index_and_hash(
        self, fetch_pip: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wheel = tmp_path / "pip-9.9-py3-none-any.whl"
        wheel.write_bytes(b"a wheel")
        monkeypatch.setenv("PIP_INDEX_URL", self.index(tmp_path / "good", wheel))
        (tmp_path / "to").mkdir()
        got = Path(fetch_pip.download("9.9", str(tmp_path / "to")))
        assert got.read_bytes() == b"a wheel"
        with pytest.raises(fetch_pip.FetchError, match=r"no wheel of pip 8\.8"):
            fetch_pip.download("8.8", str(tmp_path / "to"))
        monkeypatch.setenv("PIP_INDEX_URL", self.index(tmp_path / "bad", wheel, "0" * 64))
        with pytest.raises(fetch_pip.FetchError, match="but the index says 0000"):
            fetch_pip.download("9.9", str(tmp_path / "to"))

    def test_settings_come_from_pips_files_and_variables(
        self, fetch_pip: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert fetch_pip.indexes() == [fetch_pip.DEFAULT_INDEX]
        config = tmp_path / "pip.conf"
        config.write_text(
            "[global]\nindex-url = https://mirror/simple\nextra-index-url =\n  https://a\n  https://b\n"
        )
        monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
        assert fetch_pip.indexes() == ["https://mirror/simple", "https://a", "https://b"]
        monkeypatch.setenv("PIP_INDEX_URL", "https://other/simple")
        assert fetch_pip.indexes()[0] == "https://other/simple"

    def test_a_venv_without_ensurepip_gets_pip(
        self, fetch_pip: ModuleType, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As on Debian without python3-venv: ensurepip is not there, and the index has pip."""
        import ensurepip

        wheels = list((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))
        if not wheels:
            pytest.skip("this Python brings no pip wheel to serve from a local index")
        monkeypatch.setenv("PIP_INDEX_URL", self.index(tmp_path, wheels[0]))
        fake = tmp_path / "no-ensurepip"
        (fake / "ensurepip").mkdir(parents=True)
        (fake / "ensurepip" / "__init__.py").write_text("raise ImportError('not on Debian')")
        monkeypatch.setenv("PYTHONPATH", str(fake))
        monkeypatch.syspath_prepend(str(checkout / "tools"))
        module = load(checkout / "tools" / "bootstrap.py")
        version = wheels[0].name.split("-")[1]
        monkeypatch.setattr(module, "pinned", lambda name: version)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", module.VENV], check=True)
        assert not module.venv_has_pip()
        module.get_pip()
        assert module.venv_has_pip()
