"""Starts the ranks, follows what rank 0 reports, and ends with a summary or with the reason."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from ..errors import GrecoError, HorovodNotFoundError
from ..launch import mpi_environment, mpirun_command, python_command, stop_ranks
from .config import DemoConfig, prepare_output
from .summary import make_summary, write_summary
from .view import View
from .worker import decisions_name

#: Seconds between two looks at the ranks; below what the eye sees, and nearly free.
POLL = 0.05
#: Seconds that ranks get to leave after SIGTERM before they are killed.
GRACE = 5.0
#: A rank that vanished must fail the demo, not hang it. The caller's environment wins.
_STALL = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "30", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "120"}


class DemoError(GrecoError, RuntimeError):
    """The ranks ended without a result."""


class _Follower:
    """Reads the JSON lines that another process appends to a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open()
        self._rest = ""

    def new_events(self) -> list[dict[str, Any]]:
        """Events since the last call; a line that is still being written waits."""
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def _terminate_like_interrupt() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that ``timeout`` and job managers leave no ranks behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print_output(process: subprocess.Popen[str], say: Callable[[str], None]) -> None:
    """Pass on what ranks and mpirun print: a thread's work, since reading waits."""
    assert process.stdout is not None
    for line in process.stdout:
        say(line.rstrip())


def _follow(config: DemoConfig, events_path: Path, view: View) -> list[dict[str, Any]]:
    """Run the ranks to their end; all events, or an error with the ranks' last words."""
    command = python_command(
        "-m", "hvd_greco.demo.worker", "--config", config.to_json(), "--events", str(events_path)
    )
    stall = {name: value for name, value in _STALL.items() if name not in os.environ}
    process = subprocess.Popen(
        mpirun_command(config.ranks, command),
        env=mpi_environment(config.ranks, stall),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # Ctrl-C reaches this process alone, which then ends the ranks in order.
        start_new_session=True,
    )
    last_words: deque[str] = deque(maxlen=400)

    def say(line: str) -> None:
        last_words.append(line)
        view.say(line)

    printer = threading.Thread(target=_print_output, args=(process, say), daemon=True)
    printer.start()
    follower = _Follower(events_path)
    events: list[dict[str, Any]] = []
    try:
        running = True
        while running:
            running = process.poll() is None  # before the read: nothing is missed
            for event in follower.new_events():
                if event["event"] != "step":
                    events.append(event)
                view.show(event)
            if running:
                time.sleep(POLL)
    finally:
        stop_ranks(process, GRACE)
        printer.join(timeout=GRACE)
        follower.close()
    if process.returncode != 0 or not events or events[-1]["event"] != "done":
        raise DemoError(_reason(process.returncode, last_words))
    return events


def _reason(code: int, last_words: deque[str]) -> str:
    """One line that names the rank and its error; the whole trace was shown when it came."""
    said = [line for line in last_words if line.startswith("[rank ")]
    traces = [line for line in said if "] " in line and not line.split("] ", 1)[1].startswith(" ")]
    reason = next((line for line in traces if "Traceback (most recent" not in line), None)
    return (
        f"the ranks ended with exit code {code} and no summary was written"
        f"; {reason or 'the output above is all that they said'}"
    )


def decisions_file(method: str) -> str:
    """Name of the log of an adaptive method's decisions in the output folder."""
    return f"decisions-{re.sub(r'[^A-Za-z0-9.=]+', '-', method)}.jsonl"


def _keep_decisions(config: DemoConfig, folder: Path, output: Path) -> None:
    """Bring the logs of decisions to the output folder."""
    for place, method in enumerate(config.methods):
        log = folder / decisions_name(place)
        if log.exists():
            shutil.copyfile(log, output / decisions_file(method))


def run_demo(config: DemoConfig, output: Path, console: Console) -> dict[str, Any]:
    """Train every method of ``config``, showing progress on ``console``, and write the summary.

    Returns:
        What ``output/summary.json`` now holds.

    Raises:
        ConfigError: the output folder cannot be written.
        HorovodNotFoundError: Horovod is not installed.
        DemoError: a rank failed; nothing was written.
    """
    prepare_output(output)
    if importlib.util.find_spec("horovod") is None:
        raise HorovodNotFoundError(
            "the demo trains with Horovod, which is not installed. Run `hvd-greco "
            "install-horovod` (minutes, once), then this command again"
        )
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hvd-greco-demo-") as folder:
        events_path = Path(folder) / "events.jsonl"
        events_path.touch()
        with _terminate_like_interrupt(), View(config, console) as view:
            events = _follow(config, events_path, view)
        _keep_decisions(config, Path(folder), output)
    start = next(event for event in events if event["event"] == "start")
    results = [
        {key: value for key, value in event.items() if key != "event"}
        for event in events
        if event["event"] == "result"
    ]
    summary = make_summary(config, start, results, time.monotonic() - begin)
    write_summary(summary, output)
    return summary
