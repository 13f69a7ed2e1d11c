"""The wheel cache: ``${XDG_CACHE_HOME:-~/.cache}/hvd-greco``, outside every checkout.

One folder per wheel, put in place by a single rename and checked by its sha256 before each use:
a build that was killed, or a disk that lost a block, costs a rebuild and never a broken install.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from .errors import InstallError
from .progress import Reporter
from .source import sha256_of

_MANIFEST = "manifest.json"


def cache_root() -> Path:
    """Folder of everything this package caches."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hvd-greco"


class WheelCache:
    """Wheels by key; safe for several processes at once, also on a shared home folder."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = cache_root() if root is None else root
        self.wheels = self.root / "wheels"
        self.sdists = self.root / "sdist"
        self.logs = self.root / "logs"

    def lookup(self, key: str) -> Path | None:
        """The wheel stored under ``key`` if it is there and undamaged."""
        folder = self.wheels / key
        try:
            manifest = json.loads((folder / _MANIFEST).read_text())
            wheel = folder / str(manifest["wheel"])
            if wheel.parent == folder and sha256_of(wheel) == manifest["sha256"]:
                return wheel
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return None

    def damaged(self, key: str) -> bool:
        """Whether something is stored under ``key`` that :meth:`lookup` refuses."""
        return (self.wheels / key).exists() and self.lookup(key) is None

    def store(self, key: str, wheel: Path, identity: Mapping[str, object]) -> Path:
        """Move ``wheel`` into the cache (under the key's lock) and return its new path."""
        folder = self.wheels / key
        manifest = {"wheel": wheel.name, "sha256": sha256_of(wheel), "identity": dict(identity)}
        # Beside the target, so that the last step is a rename within one file system.
        temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=self.wheels))
        try:
            shutil.copyfile(wheel, temporary / wheel.name)
            (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=1))
            if folder.exists():
                shutil.rmtree(folder)
            temporary.rename(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return folder / wheel.name

    def drop(self, key: str) -> None:
        """Forget the wheel stored under ``key``."""
        shutil.rmtree(self.wheels / key, ignore_errors=True)

    @contextmanager
    def locked(self, key: str, reporter: Reporter) -> Iterator[None]:
        """Hold the key's lock; says so if that means waiting for another process's build."""
        try:
            for folder in (self.wheels, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InstallError(
                f"the cache folder {self.root} cannot be used ({error.strerror}): set "
                "XDG_CACHE_HOME to a folder you can write to"
            ) from None
        lock = FileLock(self.wheels / f"{key}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            reporter.say(
                "Another process is building the same wheel; waiting for it to finish "
                f"(its lock: {lock.lock_file})."
            )
            reporter.stage("waiting for the other build")
            lock.acquire(poll_interval=0.5)
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """A temporary folder for a build; not /tmp, which is often small or mounted noexec."""
        self.root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="build-", dir=self.root))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
