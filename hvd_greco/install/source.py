"""Horovod's source distribution: from the package index through pip, known by its hash."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .errors import InstallError

HOROVOD_VERSION = "0.28.1"
SDIST_NAME = f"horovod-{HOROVOD_VERSION}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"


def sha256_of(path: Path) -> str:
    """Hash of a file, read in pieces (the wheel is some tens of megabytes)."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while piece := handle.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def get_sdist(folder: Path, given: Path | None, environment: Mapping[str, str]) -> Path:
    """The source distribution, checked: the user's file, the one kept in ``folder``, or pip's.

    Args:
        folder: where a downloaded one is kept for the next build.
        given: a file the user has already (a machine with no network).
        environment: for pip; must be able to import setuptools.

    Raises:
        InstallError: it cannot be had, or is not what it should be.
    """
    if given is not None:
        actual = sha256_of(given)
        if actual != SDIST_SHA256:
            raise InstallError(
                f"--sdist {given}: its sha256 is {actual}, that of {SDIST_NAME} is "
                f"{SDIST_SHA256}. Use the file that the package index has."
            )
        return given
    kept = folder / SDIST_NAME
    if kept.is_file() and sha256_of(kept) == SDIST_SHA256:
        return kept
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        _download(Path(temporary), environment)
        os.replace(Path(temporary) / SDIST_NAME, kept)
    return kept


def _download(folder: Path, environment: Mapping[str, str]) -> None:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{SDIST_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
    # Without isolation pip reads the metadata with this environment's setuptools instead of
    # fetching one for the purpose.
    command += ["--no-build-isolation", "--disable-pip-version-check", "--no-input"]
    command += ["-d", str(folder), "-r", str(requirements)]
    done = subprocess.run(
        command, env=dict(environment), capture_output=True, text=True, check=False
    )
    if done.returncode != 0 or not (folder / SDIST_NAME).is_file():
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise InstallError(
            f"{SDIST_NAME} could not be downloaded with pip (with no network: download it "
            f"elsewhere and give `--sdist PATH`). pip said:\n{tail}"
        )


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack into ``folder``; the path of the source tree."""
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, filter="data")
        else:  # Python 3.10 before 3.10.12; the hash says what is inside
            archive.extractall(folder)
    return folder / SDIST_NAME.removesuffix(".tar.gz")
