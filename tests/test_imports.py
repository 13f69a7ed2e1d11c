"""Imports point one way, and the two outside worlds each have one door."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: Lower layers first. A module may import from its own layer's list only what comes before it,
#: or itself; names are prefixes of module paths below hvd_greco.
ORDER = [
    "_version",
    "errors",
    "config",
    "registry",
    "kernels",
    "layers",
    "payload",
    "plan",
    "buffers",
    "telemetry",
    "codecs",
    "exchange",
    "memories",
    "carrier",
    "beacon",
    "identity",
    "assign",
    "routes",
    "rounds",
    "late",
    "reduction",
    "adapt",
    "compressor",
    "constructors",
    "methods",
    "launch",
    "install",
    "doctor",
    "bench",
    "lab",
    "demo",
    "cli",
]
#: Of hvd_greco, kernels may use the errors and nothing else.
KERNELS_MAY_IMPORT = {"errors", "kernels"}


def _modules() -> dict[str, Path]:
    found = {}
    for folder, prefix in ((ROOT / "hvd_greco", ""), (ROOT / "kernels", "kernels")):
        for path in folder.rglob("*.py"):
            parts = [*filter(None, [prefix]), *path.relative_to(folder).with_suffix("").parts]
            if parts[-1] == "__init__":
                parts = parts[:-1]
            found[".".join(parts)] = path
    return found


def _imports(name: str, path: Path) -> set[str]:
    """Modules below hvd_greco that a module imports anywhere in its text, type checks excepted."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    is_package = path.name == "__init__.py"
    base = name.split(".") if name else []
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            up = node.level - (1 if is_package else 0)
            stem = base[: len(base) - up] if up else base
            target = [*stem, *(node.module.split(".") if node.module else [])]
            if node.module:
                found.add(".".join(target))
            else:
                found.update(".".join([*target, alias.name]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hvd_greco"):
            target = (node.module or "").split(".")[1:]
            found.update(".".join([*target, alias.name]) for alias in node.names)
    return {target for target in found if target}


def _layer(module: str) -> int:
    top = module.split(".")[0]
    assert top in ORDER, f"{module}: name its layer in ORDER"
    return ORDER.index(top)


MODULES = _modules()


@pytest.mark.parametrize("name", sorted(filter(None, MODULES)))
def test_imports_point_down(name: str) -> None:
    for target in _imports(name, MODULES[name]):
        if name.split(".")[0] == "kernels":
            assert target.split(".")[0] in KERNELS_MAY_IMPORT, f"{name} imports {target}"
        assert _layer(target) <= _layer(name), f"{name} imports {target}, which lies above it"


def test_the_check_sees_upward_imports(tmp_path: Path) -> None:
    module = tmp_path / "x.py"
    module.write_text("from ..compressor import Compressor\nfrom . import topk\n")
    assert _imports("codecs.x", module) == {"compressor", "codecs.topk"}


def _importers(package: str) -> set[str]:
    found = set()
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            if any(n == package or n.startswith(package + ".") for n in names):
                found.add(name)
    return found


def test_one_package_imports_horovod() -> None:
    # The demo is a training script like a user's, so it imports Horovod as a user does.
    library = {name for name in _importers("horovod") if not name.startswith("demo")}
    assert library
    assert all(name.startswith("exchange.") for name in library)


def test_one_module_imports_mpi4py() -> None:
    assert _importers("mpi4py") == {"exchange.mpi"}


def test_codecs_know_no_communication() -> None:
    for name in (name for name in MODULES if name.startswith(("codecs", "kernels"))):
        assert not any(
            target.startswith(("exchange", "compressor", "adapt"))
            for target in _imports(name, MODULES[name])
        )


def test_import_without_horovod_explains(tmp_path: Path) -> None:
    """``import hvd_greco`` works without Horovod, says what to type, and fails at the first use."""
    program = (
        "import sys, warnings\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'horovod':\n"
        "            raise ImportError('blocked')\n"
        "import importlib.util as u\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'horovod' else real(name, *a)\n"
        "sys.meta_path.insert(0, Block())\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    import hvd_greco as greco\n"
        "assert any('hvd-greco install-horovod' in str(w.message) for w in seen), seen\n"
        "try:\n"
        "    import torch\n"
        "    greco.TopK(torch.nn.Linear(2, 2).named_parameters())\n"
        "except greco.HorovodNotFoundError as error:\n"
        "    assert 'hvd-greco install-horovod' in str(error)\n"
        "    print('explained')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.stdout.strip() == "explained", done.stderr


def test_names_are_lazy() -> None:
    """The command line's help must not pay for torch."""
    program = "import sys, hvd_greco, hvd_greco.methods; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "False", done.stderr


def test_a_wheel_has_everything(tmp_path: Path) -> None:
    """Also what is not Python: the CUDA kernels are compiled from their text."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("hvd_greco", "kernels"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(tmp_path), str(tree)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if "dist-info" not in name}
    wanted = {path.relative_to(tree) for path in (tree / "hvd_greco").rglob("*") if path.is_file()}
    wanted |= {
        Path("hvd_greco", path.relative_to(tree))
        for path in (tree / "kernels").rglob("*")
        if path.is_file()
    }
    assert packed == {str(path) for path in wanted}
