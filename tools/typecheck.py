"""Run mypy over the package as it is installed.

``kernels/`` lies beside ``hvd_greco/`` but is installed as ``hvd_greco.kernels``; mypy follows
neither setuptools' mapping nor its import hooks, so it gets a tree of links of the installed shape.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def link_tree(target: Path) -> None:
    """Make ``target`` a folder that holds ``hvd_greco`` in its installed shape."""
    shutil.rmtree(target, ignore_errors=True)
    package = target / "hvd_greco"
    package.mkdir(parents=True)
    for entry in (ROOT / "hvd_greco").iterdir():
        if entry.name != "__pycache__":
            (package / entry.name).symlink_to(entry)
    (package / "kernels").symlink_to(ROOT / "kernels")


def main() -> int:
    """Check, and return mypy's exit status."""
    tree = ROOT / "build" / "typed"
    link_tree(tree)
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(ROOT / ".mypy_cache" / "typed")]
    # Run inside the tree: from the checkout, hvd_greco/ without kernels would be found first.
    return subprocess.call(
        [*command, "--config-file", str(ROOT / "pyproject.toml"), "-p", "hvd_greco"],
        cwd=tree,
        env={**os.environ, "MYPYPATH": str(tree)},
    )


if __name__ == "__main__":
    sys.exit(main())
