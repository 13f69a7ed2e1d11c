"""What a run leaves: JSON that is read back with its types checked."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import msgspec

from .._version import __version__
from ..errors import ConfigError

#: Changes when a reader of older records would misread new ones.
SCHEMA = 1


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where it was measured.

    Attributes:
        cpu: the processor's own name.
        cores: that this process may use.
        memory_bytes: of the machine, 0 if it does not tell.
        system: kernel and its release.
        gpu: name, if the run was on one.
    """

    cpu: str
    cores: int
    memory_bytes: int
    system: str
    gpu: str | None = None


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One case, measured. Axes that the operation does not have are None.

    Attributes:
        operation: name.
        numel: elements.
        served_by: backend: ``cpu`` (compiled), ``cuda`` or ``portable`` (torch and NumPy).
        counted_bytes: read and written at the least (see ``Operation.formula``).
        rounds: calls of each contender.
        seconds: median of our calls.
        quartiles: lower and upper, of the same.
        copy_seconds: median of copying ``numel`` fp32 (8 bytes moved for each).
        chain_seconds: median of the torch chain.
        of_copy: median over rounds: our counted bytes a second beside the copy's.
        speedup: median over rounds: the chain's time over ours.
        speedup_quartiles: lower and upper, of the same.
        launches: kernels that a call of ours starts.
        chain_launches: those of the chain.
        extra_bytes: our peak memory beside the arguments; None if the system does not tell.
        chain_extra_bytes: the chain's.
        rivals: median seconds of others, by name.
        error: how far from right the result is, for operations that have such a number.
    """

    operation: str
    numel: int
    served_by: str
    counted_bytes: float
    rounds: int
    seconds: float
    quartiles: tuple[float, float]
    copy_seconds: float
    chain_seconds: float
    of_copy: float
    speedup: float
    speedup_quartiles: tuple[float, float]
    launches: int | None = None
    chain_launches: int | None = None
    extra_bytes: int | None = None
    chain_extra_bytes: int | None = None
    rivals: dict[str, float] = {}
    error: float | None = None
    density: float | None = None
    bits: int | None = None
    ranks: int | None = None
    low_rank: int | None = None
    length: int | None = None
    inputs: str | None = None

    @property
    def bytes_per_second(self) -> float:
        """Counted bytes by the median time."""
        return self.counted_bytes / self.seconds

    @property
    def copy_bytes_per_second(self) -> float:
        """Of the copy that took turns with it."""
        return 8 * self.numel / self.copy_seconds


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fresh process: seconds until it has what.

    Attributes:
        cache: ``empty`` (everything is compiled) or ``filled``.
        import_seconds: torch and our table.
        topk_seconds: encode and decode of top-k, from the first call on; it loads Numba.
        qsgd_seconds: the same for QSGD, after that.
    """

    cache: str
    import_seconds: float
    topk_seconds: float
    qsgd_seconds: float

    @property
    def kernel_seconds(self) -> float:
        """What kernels add to a start."""
        return self.topk_seconds + self.qsgd_seconds


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of ``hvd-greco bench kernels``.

    Attributes:
        schema: :data:`SCHEMA`.
        command: to run it again.
        date: UTC, ISO 8601.
        commit: of the source, with ``+changes`` if it had any; None outside a checkout.
        device: ``cpu`` or ``cuda``.
        threads: of torch and of the kernels.
        load: the machine's load average over the minute before; None if it does not tell.
        memory_method: how ``extra_bytes`` was measured.
    """

    schema: int
    command: str
    date: str
    commit: str | None
    device: str
    threads: int
    load: float | None
    machine: Machine
    versions: dict[str, str]
    memory_method: str
    rows: list[Row]
    starts: list[Start] = []

    def to_json(self) -> str:
        """Text that :func:`read_record` reads back; a row a line, for version control."""
        whole = msgspec.to_builtins(self)
        rows = [msgspec.json.encode(row).decode() for row in whole.pop("rows")]
        head = msgspec.json.format(msgspec.json.encode(whole), indent=1).decode()
        return head[:-2] + ',\n "rows": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"


def read_record(path: Path) -> Record:
    """A record from its file.

    Raises:
        ConfigError: there is no such file, or it is not such a record.
    """
    try:
        record = msgspec.json.decode(path.read_bytes(), type=Record)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: is no record of `bench kernels` ({error})") from None
    if record.schema != SCHEMA:
        raise ConfigError(
            f"{path}: has schema {record.schema}, this version reads {SCHEMA}; measure again"
        )
    return record


def now() -> str:
    """UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def find_load() -> float | None:
    """Processes that wanted a core in the last minute, on average."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def find_versions() -> dict[str, str]:
    """Of everything that decides how fast it is; what is not installed is left out."""
    found = {"hvd-greco": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "numba", "cupy-cuda12x", "cupy-cuda13x", "cupy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def find_machine(gpu: str | None = None) -> Machine:
    """This one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        names, memory = [], 0
    return Machine(
        cpu=names[0] if names else platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory,
        system=f"{platform.system()} {platform.release()}",
        gpu=gpu,
    )


def find_commit() -> str | None:
    """Commit of the checkout that this file is tracked in."""
    # Through links, and not of a checkout around a virtual environment that we are installed in.
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(here.parent), *arguments],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)
        commit = git("rev-parse", "--short=12", "HEAD")
        changes = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}+changes" if changes else commit
