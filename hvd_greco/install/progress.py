"""Saying what goes on: a bar in a terminal, a line now and then in a log."""

from __future__ import annotations

import re
import threading
import time
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

#: Seconds of silence after which a log gets a line, so that nobody takes the build for stuck.
_QUIET = 30.0
_PERCENT = re.compile(r"\[\s*(\d{1,3})%\]")
#: text in the build's output -> what it means to a user
_STAGES = (
    ("Preparing metadata", "reading Horovod's metadata"),
    ("Running CMake in", "configuring (cmake)"),
    ("The CXX compiler identification", "configuring (cmake)"),
    ("Linking CXX shared library", "linking"),
    ("installing to build/bdist", "packing the wheel"),
)


class Reporter(Protocol):
    """What the builder needs for saying how far it is."""

    def say(self, text: str) -> None:
        """A line that stays."""

    def stage(self, text: str, percent: int | None = None) -> None:
        """What is being done now, and how much of the compilation is behind us."""


class ConsoleReporter:
    """A progress bar where output is a terminal; elsewhere a line per stage and per 10 %."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._last: tuple[str, int] | None = None
        self._text, self._spoken = "", self._started
        self._over = threading.Event()
        self._bar: Progress | None = None

    def __enter__(self) -> ConsoleReporter:
        if self._console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f} %"),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("starting", total=100)
        else:
            threading.Thread(target=self._signs_of_life, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stage(self, text: str, percent: int | None = None) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=text, completed=percent)
            return
        now = (text, (percent or 0) // 10)
        if now != self._last:
            self._last = now
            done = f" {percent} %" if percent is not None else ""
            self._line(f"{text}{done}")

    def _line(self, text: str) -> None:
        self._text, self._spoken = text, time.monotonic()
        self.say(f"  [{self._spoken - self._started:4.0f} s] {text}")

    def _signs_of_life(self) -> None:
        while not self._over.wait(1.0):
            if self._text and time.monotonic() - self._spoken > _QUIET:
                self._line(self._text)


class BuildOutput:
    """Turns lines of pip's, cmake's and make's output into stages."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._stage = ""

    def line(self, text: str) -> None:
        stage = next((meaning for sign, meaning in _STAGES if sign in text), None)
        match = _PERCENT.search(text)
        if stage is not None and stage != self._stage:
            self._stage = stage
            self._reporter.stage(stage, 100 if stage in ("linking", "packing the wheel") else None)
        elif match and stage is None:
            self._stage = "compiling"
            self._reporter.stage("compiling", min(100, int(match[1])))
