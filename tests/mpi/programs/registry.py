"""The table of checks that share one ``mpirun`` start, and the script that runs some of them.

Run as ``python -m programs.registry FOLDER CHECK [CHECK ...]`` on every rank; each rank writes what
happened to ``FOLDER/rank<r>.jsonl``, one line when a check begins and one when it ends.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from .support import World

#: Modules whose import fills the table.
MODULES = (
    "contract",
    "gradients",
    "numbers",
    "agreement",
    "order",
    "arguments",
    "exchanges",
    "everyone",
    "control",
)


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: unique; ``function[argument]`` for one of several arguments.
        function: called on every rank as ``function(world)`` or ``function(world, argument)``.
        sizes: numbers of ranks it makes sense for.
        arguments: what tells it from its siblings.
    """

    name: str
    function: Callable[..., None]
    sizes: tuple[int, ...]
    arguments: tuple[Any, ...] = ()

    def __call__(self, world: World) -> None:
        self.function(world, *self.arguments)


CHECKS: dict[str, Check] = {}


def check(
    *, sizes: tuple[int, ...] = (2, 3), each: Iterable[Any] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enter a function in the table, once for each argument in ``each`` (once without any)."""

    def enter(function: Callable[..., None]) -> Callable[..., None]:
        for arguments in [(argument,) for argument in each] or [()]:
            name = function.__name__ + "".join(f"[{value}]" for value in arguments)
            if name in CHECKS:
                raise ValueError(f"two checks are called {name}")
            CHECKS[name] = Check(name, function, sizes, arguments)
        return function

    return enter


def load() -> dict[str, Check]:
    """The whole table."""
    for module in MODULES:
        importlib.import_module(f"{__package__}.{module}")
    return CHECKS


def _write(log: TextIO, **record: object) -> None:
    log.write(json.dumps(record) + "\n")
    log.flush()


def main(folder: str, names: list[str]) -> None:
    """Run checks in order on this rank; ranks meet after each and share its outcome.

    A check that failed on one rank while others wait in a collective ends in Horovod's stall
    limit, which kills this start; the log tells where.
    """
    from .support import World

    world = World()
    checks = load()
    with open(Path(folder) / f"rank{world.rank}.jsonl", "a") as log:
        for name in names:
            world.begin(name)
            _write(log, check=name, event="begin")
            began, error = time.monotonic(), None
            try:
                checks[name](world)
            except Exception:
                error = f"on rank {world.rank}: {traceback.format_exc()}"
            _write(
                log,
                check=name,
                event="end",
                error=error,
                seconds=round(time.monotonic() - began, 3),
            )
            world.meet()
        _write(log, event="done")


if __name__ == "__main__":
    # `python -m` runs this file under the name __main__; the table is in the module's other copy.
    importlib.import_module("programs.registry").main(sys.argv[1], sys.argv[2:])
