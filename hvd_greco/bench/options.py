"""What a run measures, checked before torch is imported."""

from __future__ import annotations

import fnmatch
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..config import check_count, check_density
from ..errors import ConfigError

T = TypeVar("T")

DEVICES = ("cpu", "cuda")
#: Distributions of the entries; what each is stands in :mod:`.inputs`.
INPUTS = ("gaussian", "uniform", "heavy", "constant", "zeros")
#: Rounds of a case, however long one takes.
LEAST_ROUNDS = 5
#: Defaults by option, and those of ``--quick``.
DEFAULTS: dict[str, str] = {
    "sizes": "1e4,1e6,1.6e7",
    "densities": "0.1,0.01,0.001",
    "bits": "2,3,4,8",
    "ranks": "1,4,8",
    "low_ranks": "4,8,16,32",
    "lengths": "4096,16384,65536",
    "inputs": ",".join(INPUTS),
}
QUICK: dict[str, str] = {
    "sizes": "1e4,1e6",
    "densities": "0.01",
    "bits": "4",
    "ranks": "4",
    "low_ranks": "4",
    "lengths": "4096",
    "inputs": "gaussian",
}
SECONDS, QUICK_SECONDS = 2.0, 0.2


@dataclass(frozen=True)
class BenchOptions:
    """One run.

    Attributes:
        sizes: elements of a vector.
        operations: patterns of names (``topk*``); an operation that fits any of them is measured.
        densities: shares of the entries that sparsifiers keep.
        bits: of a code.
        ranks: whose payloads are decoded together.
        low_ranks: r of low-rank factors.
        lengths: n of the factors that are made orthonormal.
        inputs: names in :data:`INPUTS`.
        device: ``"cpu"`` or ``"cuda"``.
        seconds: of measuring one case, all contenders together.
        repetitions: rounds of a case, in place of ``seconds``.
        threads: of torch, and so of the kernels; None leaves what torch chose.
        starts: measure cold and warm start, in processes of their own.
    """

    sizes: tuple[int, ...]
    operations: tuple[str, ...]
    densities: tuple[float, ...]
    bits: tuple[int, ...]
    ranks: tuple[int, ...]
    low_ranks: tuple[int, ...]
    lengths: tuple[int, ...]
    inputs: tuple[str, ...]
    device: str = "cpu"
    seconds: float = SECONDS
    repetitions: int | None = None
    threads: int | None = None
    starts: bool = True


def make_options(
    *,
    sizes: str | None = None,
    operations: str = "*",
    densities: str | None = None,
    bits: str | None = None,
    ranks: str | None = None,
    low_ranks: str | None = None,
    lengths: str | None = None,
    inputs: str | None = None,
    device: str = "cpu",
    seconds: float | None = None,
    repetitions: int | None = None,
    threads: int | None = None,
    quick: bool = False,
    starts: bool | None = None,
) -> BenchOptions:
    """Check the command line's options and put them together.

    Lists are texts with commas between. What is None takes its default, or that of ``quick``.

    Raises:
        ConfigError: an option has a value that cannot work.
    """
    given = {
        "sizes": sizes, "densities": densities, "bits": bits, "ranks": ranks,
        "low_ranks": low_ranks, "lengths": lengths, "inputs": inputs,
    }  # fmt: skip
    texts = {
        name: (QUICK if quick else DEFAULTS)[name] if text is None else text
        for name, text in given.items()
    }
    if device not in DEVICES:
        raise ConfigError(f"--device: {device!r} is none of {', '.join(DEVICES)}")
    budget = (QUICK_SECONDS if quick else SECONDS) if seconds is None else seconds
    if not 0 < budget <= 3600:
        raise ConfigError(f"--seconds: needs a number above 0 and up to 3600, got {seconds!r}")
    if seconds is not None and repetitions is not None:
        raise ConfigError(
            f"--seconds {seconds:g} and --repetitions {repetitions}: give one of them, each says "
            "how long a case is measured"
        )
    if repetitions is not None:
        check_count("--repetitions", repetitions, 1)
    if threads is not None:
        cores = len(os.sched_getaffinity(0))
        if check_count("--threads", threads, 1) > cores:
            raise ConfigError(f"--threads: {threads}, and this process may use {cores} cores")
    return BenchOptions(
        sizes=_numbers("--sizes", texts["sizes"], 16, 2**31 - 1),
        operations=_list("--operations", operations, str),
        densities=_list("--densities", texts["densities"], _density),
        bits=_numbers("--bits", texts["bits"], 2, 8),
        ranks=_numbers("--ranks", texts["ranks"], 1, 1024),
        low_ranks=_numbers("--low-ranks", texts["low_ranks"], 1, 256),
        lengths=_numbers("--lengths", texts["lengths"], 1, 2**31 - 1),
        inputs=_list("--inputs", texts["inputs"], _input),
        device=device,
        seconds=budget,
        repetitions=repetitions,
        threads=threads,
        starts=not quick if starts is None else starts,
    )


def match(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that fit any of the patterns, in their order.

    Raises:
        ConfigError: a pattern fits no name.
    """
    known = list(names)
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise ConfigError(f"--operations: {pattern!r} fits none of {', '.join(known)}")
    return [name for name in known if any(fnmatch.fnmatch(name, p) for p in patterns)]


def check_target(argument: str, path: Path | None) -> None:
    """Prove that a file can be written there: minutes of measuring must not end in an error."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{argument}: {str(path)!r} is a folder; name a file in it")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"{argument}: cannot write in {str(path.parent)!r} ({error.strerror or error})"
        ) from None


def _list(argument: str, text: str, parse: Callable[[str], T]) -> tuple[T, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ConfigError(f"{argument}: {text!r} names nothing; put commas between values")
    return tuple(dict.fromkeys(parse(word) for word in words))


def _numbers(argument: str, text: str, least: int, most: int) -> tuple[int, ...]:
    def parse(word: str) -> int:
        try:
            number = float(word)
        except ValueError:
            number = float("nan")
        if not (number.is_integer() and least <= number <= most):
            raise ConfigError(
                f"{argument}: {word!r} is not a whole number from {least} to {most:,}"
                + (" (1e6 is one)" if most > 10**6 else "")
            )
        return int(number)

    return _list(argument, text, parse)


def _density(word: str) -> float:
    try:
        return check_density("--densities", float(word))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"--densities: {word!r} is not a number in (0, 1]") from None


def _input(word: str) -> str:
    if word not in INPUTS:
        raise ConfigError(f"--inputs: {word!r} is none of {', '.join(INPUTS)}")
    return word
