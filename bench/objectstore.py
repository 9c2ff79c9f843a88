"""objectstore: 4 MiB blocks from an S3 server into slots, and back, against one raw connection.

The server is a process of its own with its objects in memory (`bench.s3server`), as is the peer that moves
the same bytes without any protocol. Every GET is verified, as the daemon does.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from bench.harness import GIB, MIB, Bench, Result, Target
from kvstore.arena import checksum, seed
from kvstore.tiers.network import Settings, open_backend
from kvstore.tiers.network.base import Backend, Name, Object, Outcome

BLOCK_BYTES, BLOCKS = 4 * MIB, 32
SPACE = bytes(16)
GET = Target(">=", 0.7)


def run(bench: Bench) -> Iterator[Result]:
    """Two lines: GET and PUT, each against one raw connection."""
    bench.doing("filling")
    things = _things()
    with started("-m", "bench.s3server") as endpoint, started("-c", _RAW) as raw_port:
        url = f"s3://bucket/bench?endpoint={endpoint}&region=us-east-1&unsigned_payload=1"
        backend = open_backend(Settings(url, user="bench", password="bench"))
        raw = socket.create_connection(("127.0.0.1", int(raw_port)))
        try:
            _put(backend, things, 0)
            get = bench.interleave(
                "GET", (partial(_get, backend, things), partial(_raw_get, raw, things)), 0.5
            )
            yield get.result("objectstore/get", "GiB/s", GET)
            put = bench.interleave(
                "PUT", (partial(_put, backend, things), partial(_raw_put, raw, things)), 0.5
            )
            yield put.result("objectstore/put", "GiB/s")
        finally:
            raw.close()
            backend.close()


def _things() -> list[Object]:
    room = memoryview(mmap.mmap(-1, BLOCKS * BLOCK_BYTES))
    np.frombuffer(room, np.uint8)[:] = np.random.default_rng(1).integers(0, 256, len(room), np.uint8)
    things = []
    for i in range(BLOCKS):
        memory, key = room[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES], os.urandom(32)
        things.append(
            Object(Name(SPACE, key), BLOCK_BYTES, memory, checksum(memory, seed(SPACE, key, BLOCK_BYTES)))
        )
    return things


def _get(backend: Backend, things: list[Object], _: int) -> float:
    start = time.monotonic()
    assert backend.read(things, start + 60) == [Outcome.OK] * BLOCKS
    return _rate(start)


def _put(backend: Backend, things: list[Object], _: int) -> float:
    start = time.monotonic()
    assert backend.write(things, start + 60) == [Outcome.OK] * BLOCKS
    return _rate(start)


# A peer that takes a byte and so many blocks in turn: "p" and their bytes, answered with "p"; "g", answered
# with what came last.
_RAW = f"""
import socket, numpy
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
connection, _ = listener.accept()
blocks = memoryview(numpy.ones({BLOCKS * BLOCK_BYTES}, numpy.uint8))
while what := connection.recv(1):
    if what == b"g":
        connection.sendall(blocks)
        continue
    have = 0
    while have < len(blocks):
        have += connection.recv_into(blocks[have:])
    connection.sendall(b"p")
"""


def _raw_get(raw: socket.socket, things: list[Object], _: int) -> float:
    start = time.monotonic()
    raw.sendall(b"g")
    for thing in things:
        have = 0
        while have < BLOCK_BYTES:
            have += raw.recv_into(thing.memory[have:])
    return _rate(start)


def _raw_put(raw: socket.socket, things: list[Object], _: int) -> float:
    start = time.monotonic()
    raw.sendall(b"p")
    for thing in things:
        raw.sendall(thing.memory)
    assert raw.recv(1) == b"p"
    return _rate(start)


def _rate(start: float) -> float:
    return BLOCKS * BLOCK_BYTES / (time.monotonic() - start) / GIB


@contextmanager
def started(*arguments: str) -> Iterator[str]:
    """A Python process; yields the line that it prints first."""
    process: Any = subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.stdout.close()
        process.kill()
        process.wait()
