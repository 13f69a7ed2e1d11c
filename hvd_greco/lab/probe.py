"""The two ends of a measurement: run by path on two hosts, so it imports nothing but Python's own.

``serve ADDRESS`` prints its port, answers one client, and prints what it measured as JSON;
``ask ADDRESS PORT TRIPS WARM CHUNK CHUNKS`` is that client, and prints round trips in seconds.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time

#: Bytes of a ping, and of the client's first message: trips, warm-up bytes, bytes a chunk, chunks.
PING = 64
_PLAN = struct.Struct("!4Q")
_LIMIT = 120.0
_PIECE = 1 << 18


def _say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionError("the other end went away")
        data += piece
    return data


def _open(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(_LIMIT)


def serve(address: str) -> None:
    """Answer pings, then take the stream and note how fast each of its chunks came in."""
    with socket.create_server((address, 0)) as server:
        server.settimeout(_LIMIT)
        _say(server.getsockname()[1])
        connection, _ = server.accept()
    with connection:
        _open(connection)
        trips, warm, chunk, chunks = _PLAN.unpack(_receive(connection, _PLAN.size))
        for _ in range(trips):
            connection.sendall(_receive(connection, PING))
        buffer = bytearray(_PIECE)
        total, due, rates = 0, warm, []
        last_bytes, last_time = 0, 0.0
        while total < warm + chunk * chunks:
            size = connection.recv_into(buffer)
            if not size:
                raise ConnectionError("the client went away")
            total += size
            if total >= due:
                now = time.perf_counter()
                if last_bytes:
                    rates.append(8 * (total - last_bytes) / (now - last_time))
                last_bytes, last_time, due = total, now, due + chunk
        connection.sendall(b"e")
    _say(rates)


def ask(address: str, port: int, trips: int, warm: int, chunk: int, chunks: int) -> None:
    """Time pings, then send the stream."""
    with socket.create_connection((address, port), timeout=_LIMIT) as connection:
        _open(connection)
        connection.sendall(_PLAN.pack(trips, warm, chunk, chunks))
        ping, times = bytes(PING), []
        for _ in range(trips):
            start = time.perf_counter()
            connection.sendall(ping)
            _receive(connection, PING)
            times.append(time.perf_counter() - start)
        piece, left = memoryview(bytes(_PIECE)), warm + chunk * chunks
        while left:
            left -= connection.send(piece[: min(left, _PIECE)])
        _receive(connection, 1)
    _say(times)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        ask(sys.argv[2], *map(int, sys.argv[3:]))
