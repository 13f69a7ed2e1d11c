"""The whole of it: plan, wheel from the cache or a build, pip, and a look whether it works."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .build import build_wheel, pip
from .cache import WheelCache
from .errors import InstallError
from .plan import BuildPlan
from .progress import Reporter
from .source import HOROVOD_VERSION

#: What Horovod itself imports; its wheel is installed without dependencies because pip would also
#: look at torch again.
RUNTIME_REQUIREMENTS = ("cloudpickle", "psutil", "pyyaml", "packaging", "cffi>=1.4.0")

Builder = Callable[[BuildPlan, Path, Path, Path, "Path | None", Reporter], Path]

_PROBE = """
import json
import torch, horovod, horovod.torch as hvd
print("\\n" + json.dumps({
    "version": horovod.__version__, "torch": torch.__version__, "path": hvd.__file__,
    "mpi": bool(hvd.mpi_built()), "gloo": bool(hvd.gloo_built()), "nccl": bool(hvd.nccl_built()),
    "cuda": bool(hvd.cuda_built()),
}))
"""


@dataclass(frozen=True)
class HorovodFacts:
    """A Horovod that was imported, and how it says it was built."""

    version: str
    torch: str
    path: str
    mpi: bool
    gloo: bool
    nccl: bool
    cuda: bool

    def operations(self) -> str:
        """For instance ``MPI, NCCL``."""
        built = {"MPI": self.mpi, "Gloo": self.gloo, "NCCL": self.nccl, "CUDA": self.cuda}
        return ", ".join(name for name, there in built.items() if there) or "no operations"


def probe_horovod(timeout: float = 120.0) -> HorovodFacts | str:
    """Import ``horovod.torch`` in a process of its own; its facts, or why that fails."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"importing horovod.torch did not finish within {timeout:.0f} s"
    if done.returncode == 0:
        return HorovodFacts(**json.loads(done.stdout.strip().splitlines()[-1]))
    if done.returncode < 0:
        return f"importing horovod.torch was ended by signal {-done.returncode}"
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def installed_key() -> str | None:
    """Cache key of the installed Horovod, if it came from our cache (pip notes the wheel's URL)."""
    try:
        text = importlib.metadata.distribution("horovod").read_text("direct_url.json")
        url = str(json.loads(text or "{}").get("url", ""))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    parts = Path(url.removeprefix("file://")).parts
    from urllib.parse import unquote

    return unquote(parts[-2]) if len(parts) >= 3 and parts[-3] == "wheels" else None


def ensure_wheel(
    plan: BuildPlan,
    cache: WheelCache,
    reporter: Reporter,
    *,
    sdist: Path | None = None,
    force: bool = False,
    build: Builder = build_wheel,
) -> Path:
    """The wheel for ``plan``: from the cache, or built now; never built twice at a time.

    A wheel whose checksum does not fit is thrown away and built anew. A process that finds another
    one building the same wheel waits and takes that one's result, also with ``force``.
    """
    found = None if force else cache.lookup(plan.key)
    if found is not None:
        reporter.say(f"Using the cached wheel {found}")
        return found
    asked = time.time()
    with cache.locked(plan.key, reporter):
        found = cache.lookup(plan.key)
        if found is not None and (not force or found.parent.stat().st_mtime >= asked):
            reporter.say(f"Using the wheel that was built meanwhile: {found}")
            return found
        if cache.damaged(plan.key):
            reporter.say("The cached wheel is damaged (its sha256 does not fit): building it anew.")
            cache.drop(plan.key)
        log = cache.logs / f"{plan.key}.log"
        reporter.say(
            f"Building Horovod {HOROVOD_VERSION} for torch {plan.torch.version}, "
            f"{plan.python} and {plan.mpi.version} with {plan.jobs} jobs: minutes, once.\n"
            f"Log: {log}"
        )
        started = time.monotonic()
        with cache.workspace() as workspace:
            wheel = build(plan, workspace, log, cache.sdists, sdist, reporter)
            stored = cache.store(plan.key, wheel, plan.identity())
        reporter.say(f"Built in {time.monotonic() - started:.0f} s: {stored}")
        return stored


def install_horovod(
    plan: BuildPlan,
    cache: WheelCache,
    reporter: Reporter,
    *,
    sdist: Path | None = None,
    force: bool = False,
) -> HorovodFacts:
    """Install Horovod into this Python's environment, building it where needed, and import it.

    Raises:
        InstallError: the build, the installation or the import failed.
    """
    if not force and installed_key() == plan.key:
        reporter.stage("looking at the installed Horovod")
        facts = probe_horovod()
        if isinstance(facts, HorovodFacts):
            reporter.say("Horovod is installed already, for exactly this torch, Python and MPI.")
            return facts
        reporter.say(f"Horovod is installed but does not import ({facts}): installing it again.")
    wheel = ensure_wheel(plan, cache, reporter, sdist=sdist, force=force)
    reporter.stage("installing")
    pip(["install", "--no-deps", "--force-reinstall", str(wheel)], "the Horovod wheel")
    pip(["install", *RUNTIME_REQUIREMENTS], "what Horovod imports")
    reporter.stage("importing horovod.torch")
    facts = probe_horovod()
    if isinstance(facts, str):
        raise InstallError(
            f"Horovod was installed, but `import horovod.torch` fails: {facts}. "
            "`hvd-greco install-horovod --force` builds it anew; `hvd-greco doctor` shows what "
            "does not fit together"
        )
    if plan.mpi.kind != "none" and not facts.mpi:
        raise InstallError(
            f"Horovod was built without MPI although {plan.mpi.version} was asked for: see "
            f"{cache.logs / (plan.key + '.log')}"
        )
    return facts
