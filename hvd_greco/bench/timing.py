"""Contenders in turn: whatever else the machine does meets all of them alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

Call = Callable[[], object]

#: Rounds before the first that counts: compiling, first touches of memory, the CPU's clock.
WARM_UP = 2
#: More say no more about a median.
MOST_ROUNDS = 2000


def wall_seconds(call: Call) -> float:
    """Seconds that a call takes on the CPU."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def gpu_seconds(call: Call) -> float:
    """Seconds between two events on torch's stream: the call's kernels, and gaps between them."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    call()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) * 1e-3


def interleave(
    contenders: Mapping[str, Call],
    clock: Callable[[Call], float],
    reset: Call | None = None,
    *,
    seconds: float,
    repetitions: int | None = None,
    least: int = 5,
) -> dict[str, list[float]]:
    """Time contenders in turn, a call of each in every round, another one first each time.

    Args:
        contenders: what to call, by name.
        clock: :func:`wall_seconds` or :func:`gpu_seconds`.
        reset: called before each call, not timed.
        seconds: rounds go on for so long ...
        repetitions: ... or for exactly so many.
        least: rounds at least where ``seconds`` decides.

    Returns:
        Seconds by name; the i-th of all names are of one round.
    """
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    rounds, began = -WARM_UP, 0.0
    collecting = gc.isenabled()
    gc.disable()  # its pauses would meet whoever is at work
    try:
        while True:
            if rounds == 0:
                began = time.perf_counter()
            for i in range(len(names)):
                name = names[(i + rounds) % len(names)]
                if reset is not None:
                    reset()
                spent = clock(contenders[name])
                if rounds >= 0:
                    times[name].append(spent)
            rounds += 1
            if repetitions is not None:
                if rounds >= repetitions:
                    return times
            elif rounds >= least:
                late = time.perf_counter() - began >= seconds
                if late or rounds >= MOST_ROUNDS:
                    return times
    finally:
        if collecting:
            gc.enable()


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; of a single value thrice that."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
