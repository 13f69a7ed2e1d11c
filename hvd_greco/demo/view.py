"""Progress of a run: a live bar for each method on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from .config import DemoConfig

#: Lines per method where no bar can be drawn.
LINES = 5


class View:
    """Shows events of ``worker.Events`` on ``console``; a context manager."""

    def __init__(self, config: DemoConfig, console: Console) -> None:
        self._config = config
        self._console = console
        self._progress = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
        )
        self._live = console.is_terminal
        self._width = max(map(len, config.methods))
        self._task: TaskID | None = None
        self._method = ""
        self._began = 0.0
        self._lines = 0

    def __enter__(self) -> View:
        starting = f"starting {self._config.ranks} ranks"
        if self._live:
            self._progress.start()
            self._task = self._progress.add_task(starting, total=None, loss="")
        else:
            self.say(f"{starting} ...")
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            if self._task is not None:
                self._progress.stop_task(self._task)
            self._progress.stop()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, event: dict[str, Any]) -> None:
        """Take one event."""
        kind = event["event"]
        if kind == "start":
            self._start(event)
        elif kind == "method":
            self._begin_method(event["method"])
        elif kind == "step":
            self._step(event["step"], event["loss"])
        elif kind == "result":
            self._result(event)

    def _start(self, event: dict[str, Any]) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
        self.say(
            f"{event['parameters']:,} parameters on {event['device']}, {event['world_size']} ranks"
            f" x {event['threads_per_rank']} thread(s), {self._config.batch} x {self._config.seq} "
            "bytes a rank and step"
        )

    def _begin_method(self, method: str) -> None:
        self._method, self._began, self._lines = method, time.monotonic(), 0
        if self._live:
            self._task = self._progress.add_task(
                method.ljust(self._width), total=self._config.steps, loss=""
            )

    def _step(self, step: int, loss: float) -> None:
        steps = self._config.steps
        if self._live and self._task is not None:
            self._progress.update(self._task, completed=step, loss=f"loss {loss:.2f} bits/byte")
        elif step * LINES >= (self._lines + 1) * steps:
            self._lines = step * LINES // steps
            left = (time.monotonic() - self._began) / step * (steps - step)
            self.say(
                f"{self._method.ljust(self._width)}  step {step}/{steps}  "
                f"loss {loss:.2f} bits/byte  {left:.0f} s left"
            )

    def _result(self, event: dict[str, Any]) -> None:
        bits = event["val_bits_per_byte"]
        text = "diverged" if bits is None else f"validation {bits:.3f} bits/byte"
        if self._live and self._task is not None:
            self._progress.update(self._task, completed=self._config.steps, loss=text)
        else:
            self.say(f"{self._method.ljust(self._width)}  {text}")
