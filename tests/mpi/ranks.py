"""Starts ranks for tests: batches of checks that share one mpirun, and scripts of their own.

Every start has a hard limit, after which all its processes are killed, and Horovod's stall limits
are short, so that a deadlock is a failure within seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_greco.launch import python_command, run_ranks

HERE = Path(__file__).parent
#: Hard limit of one start, in seconds, for a script and for a batch of checks.
LIMIT = 90.0
BATCH_LIMIT = 200.0
#: Stall limits of a batch, in which nothing is meant to stall; a busy machine may hold a rank up.
PATIENT = {
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "10",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "30",
}
#: A batch that died is started again with what it had not reached, this often.
STARTS = 3


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """What ranks get on top of the caller's environment."""
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    return {
        "PYTHONPATH": path,
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "5",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "10",
        # Each check has parameter names of its own.
        "HOROVOD_CACHE_CAPACITY": "8192",
        **(extra or {}),
    }


@dataclass(frozen=True)
class Run:
    """One start that came to its end.

    Attributes:
        code: exit status; None if the limit passed.
        output: stdout and stderr of all ranks.
        seconds: how long it took.
    """

    code: int | None
    output: str
    seconds: float

    def told(self, key: str) -> list[dict[str, Any]]:
        """What ``programs.scripts`` told, those lines that have ``key``, in rank order."""
        lines = [line for line in self.output.splitlines() if line.startswith("TOLD ")]
        records = [json.loads(line.removeprefix("TOLD ")) for line in lines]
        return sorted((r for r in records if key in r), key=lambda r: int(r["rank"]))


def start(
    ranks: int,
    *arguments: str,
    limit: float = LIMIT,
    env: Mapping[str, str] | None = None,
) -> Run:
    """Run ``python ARGUMENTS`` on ``ranks`` ranks."""
    began = time.monotonic()
    code: int | None = None
    try:
        done = run_ranks(
            ranks, python_command(*arguments), timeout=limit, env=environment(env), capture=True
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as expired:
        raw = expired.output or ""
        output = raw if isinstance(raw, str) else raw.decode(errors="replace")
    return Run(code, output, time.monotonic() - began)


def script(
    name: str, ranks: int = 2, *, limit: float = LIMIT, env: Mapping[str, str] | None = None
) -> Run:
    """Run one function of ``programs.scripts`` on its own."""
    with tempfile.TemporaryDirectory() as folder:
        return start(ranks, "-m", "programs.scripts", name, folder, limit=limit, env=env)


@dataclass
class Outcome:
    """What became of one check: ``error`` is None if it passed on all ranks."""

    error: str | None
    seconds: float = 0.0


@dataclass
class Batch:
    """The checks of one number of ranks, run when the first of them is asked for."""

    size: int
    names: Sequence[str]
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def outcome(self, name: str) -> Outcome:
        """The outcome of one check."""
        if not self.outcomes:
            self._run()
        return self.outcomes[name]

    def _run(self) -> None:
        left = list(self.names)
        for _ in range(STARTS):
            if not left:
                return
            left = self._start(left)
        for name in left:
            self.outcomes[name] = Outcome(f"not reached: {STARTS} starts died before it")

    def _start(self, names: list[str]) -> list[str]:
        """Run ``names`` in order; return those that were not reached."""
        with tempfile.TemporaryDirectory() as folder:
            run = start(
                self.size,
                *("-m", "programs.registry", folder, *names),
                limit=BATCH_LIMIT,
                env=PATIENT,
            )
            logs = [_read(Path(folder) / f"rank{rank}.jsonl") for rank in range(self.size)]
        for position, name in enumerate(names):
            ends = [log.get(name) for log in logs]
            if any(end is None for end in ends):
                reason = "the limit passed" if run.code is None else f"exit status {run.code}"
                said = "; ".join(str(end["error"]) for end in ends if end and end["error"])
                where = [rank for rank, end in enumerate(ends) if end is None]
                self.outcomes[name] = Outcome(
                    f"the ranks died in {name} ({reason}, {run.seconds:.0f} s), with ranks "
                    f"{where} still busy. {said}\n{_tail(run.output)}"
                )
                return names[position + 1 :]
            errors = [str(end["error"]) for end in ends if end and end["error"]]
            text = "\n".join(errors) or None
            seconds = max(float(str(end["seconds"])) for end in ends if end)
            self.outcomes[name] = Outcome(text, seconds)
        if run.code != 0:
            last = names[-1]
            self.outcomes[last] = Outcome(
                f"all checks ended, but the ranks ended with {run.code}:\n{_tail(run.output)}"
            )
        return []


def _read(path: Path) -> dict[str, dict[str, object]]:
    """Check -> its end record."""
    if not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {record["check"]: record for record in records if record["event"] == "end"}


def _tail(output: str, characters: int = 6000) -> str:
    return output[-characters:]
