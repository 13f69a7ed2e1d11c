"""What a lab's links really do: bandwidth and latency between its first two hosts."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import msgspec

from .errors import LabError
from .job import on_host
from .options import LabOptions
from .plan import burst_bytes, host_names

_PROBE = Path(__file__).with_name("probe.py")
TRIPS, WARM_TRIPS, CHUNKS = 300, 20, 9
#: Length of a chunk in seconds at the lab's rate, and its bounds in bytes.
CHUNK_SECONDS, CHUNK_LEAST, CHUNK_MOST = 0.1, 1 << 18, 1 << 26
_LIMIT = 180.0


class Measurement(msgspec.Struct, frozen=True):
    """Medians over a measurement.

    Attributes:
        rate: the lab's, in words.
        bandwidth_mbit: payload of a TCP stream, in 10**6 bits a second; headers come on top, so a
            link that keeps its rate shows 95 % of it.
        latency_us: half of a round trip of 64 bytes, in microseconds.
        bytes_streamed: in the timed part.
        round_trips: that were timed.
    """

    rate: str
    bandwidth_mbit: float
    latency_us: float
    bytes_streamed: int
    round_trips: int


def measure_in(options: LabOptions) -> Measurement:
    """Measure from host 0 to host 1 of a lab that is up; see :func:`hvd_greco.lab.measure`."""
    bits = options.rate.bits
    wanted = CHUNK_MOST if bits is None else int(bits / 8 * CHUNK_SECONDS)
    chunk = min(CHUNK_MOST, max(CHUNK_LEAST, wanted))
    # Past both ends' buckets, and past TCP's slow start.
    warm = 2 * chunk + 4 * burst_bytes(options.rate)
    first, second = host_names(2)
    address = options.addresses()[1]
    python = [sys.executable, "-I", str(_PROBE)]
    server = subprocess.Popen(
        on_host(second, [*python, "serve", address]),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        numbers = [str(n) for n in (TRIPS + WARM_TRIPS, warm, chunk, CHUNKS)]
        client = subprocess.run(
            on_host(first, [*python, "ask", address, port or "0", *numbers]),
            capture_output=True, text=True, timeout=_LIMIT, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if not port or client.returncode:
            server.kill()
            said = (server.communicate()[1] + client.stderr).strip().splitlines()
            raise LabError(f"the lab cannot be measured: {said[-1] if said else 'no answer'}")
        rates = json.loads(server.communicate(timeout=_LIMIT)[0])
    except subprocess.TimeoutExpired:
        raise LabError(f"measuring the lab took more than {_LIMIT:.0f} seconds") from None
    finally:
        server.kill()
        server.wait()
    times = json.loads(client.stdout)[WARM_TRIPS:]
    return Measurement(
        rate=str(options.rate),
        bandwidth_mbit=round(statistics.median(rates) / 1e6, 2),
        latency_us=round(statistics.median(times) / 2 * 1e6, 1),
        bytes_streamed=chunk * CHUNKS,
        round_trips=len(times),
    )
