"""objectstore: 4 MiB blocks from an S3 server to slots and back, compared with one raw connection.

The server (`bench.s3server`) is a separate process with its objects in memory. So is the peer that transfers
the same bytes without a protocol. Every GET is verified as in the daemon, and reads into memory in which some
bytes differed.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from bench.harness import GIB, KIB, MIB, Bench, Result, Target, expect
from kvstore.arena import checksum, seed
from kvstore.tiers.network import BackendSettings, open_backend
from kvstore.tiers.network.base import Backend, Name, Object, Outcome


@dataclass(frozen=True, slots=True)
class Sizes:
    """Size and number of the blocks of a sample."""

    block_bytes: int = 4 * MIB
    blocks: int = 32


SMOKE = Sizes(64 * KIB, 4)
SPACE = bytes(16)
GET = Target(">=", 0.7)


def run(bench: Bench) -> Iterator[Result]:
    """Yields two rows: GET and PUT, each compared with one raw connection."""
    bench.doing("filling")
    z = bench.pick(Sizes(), SMOKE)
    things, others = _things(z), _things(z)
    peer = _RAW % (z.blocks * z.block_bytes)
    with started("-m", "bench.s3server") as endpoint, started("-c", peer) as raw_port:
        url = f"s3://bucket/bench?endpoint={endpoint}&region=us-east-1&unsigned_payload=1"
        backend = open_backend(BackendSettings(url, user="bench", password="bench"))
        raw = socket.create_connection(("127.0.0.1", int(raw_port)))
        try:
            _put(backend, things, 0)
            get = bench.interleave(
                "GET", (partial(_get, backend, things), partial(_raw_get, raw, others)), 0.5
            )
            yield get.result("objectstore/get", "GiB/s", GET)
            put = bench.interleave(
                "PUT", (partial(_put, backend, things), partial(_raw_put, raw, others)), 0.5
            )
            _get(backend, things, 0)
            yield put.result("objectstore/put", "GiB/s")
        finally:
            raw.close()
            backend.close()


def _things(z: Sizes) -> list[Object]:
    room = memoryview(mmap.mmap(-1, z.blocks * z.block_bytes))
    np.frombuffer(room, np.uint8)[:] = np.random.default_rng(1).integers(0, 256, len(room), np.uint8)
    things = []
    for i in range(z.blocks):
        memory, key = room[i * z.block_bytes : (i + 1) * z.block_bytes], os.urandom(32)
        things.append(
            Object(Name(SPACE, key), z.block_bytes, memory, checksum(memory, seed(SPACE, key, z.block_bytes)))
        )
    return things


def spoil(things: Sequence[Object]) -> None:
    """Changes some bytes of each block, so that only a real read makes it valid again."""
    for thing in things:
        np.frombuffer(thing.memory, np.uint8)[::4096] = 0


def _get(backend: Backend, things: list[Object], _: int) -> float:
    spoil(things)
    start = time.monotonic()
    outcomes = backend.read(things, start + 60)
    rate = _rate(things, start)
    expect(outcomes, [Outcome.OK] * len(things), "outcomes")
    return rate


def _put(backend: Backend, things: list[Object], _: int) -> float:
    start = time.monotonic()
    outcomes = backend.write(things, start + 60)
    rate = _rate(things, start)
    expect(outcomes, [Outcome.OK] * len(things), "outcomes")
    return rate


# The peer receives "p" and the bytes of all blocks, and answers "p"; or "g", and answers the last bytes.
_RAW = """
import socket, numpy
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
connection, _ = listener.accept()
blocks = memoryview(numpy.ones(%d, numpy.uint8))
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
        while have < len(thing.memory):
            have += raw.recv_into(thing.memory[have:])
    return _rate(things, start)


def _raw_put(raw: socket.socket, things: list[Object], _: int) -> float:
    start = time.monotonic()
    raw.sendall(b"p")
    for thing in things:
        raw.sendall(thing.memory)
    expect(raw.recv(1), b"p", "the peer's answer")
    return _rate(things, start)


def _rate(things: list[Object], start: float) -> float:
    nbytes = sum(len(thing.memory) for thing in things)
    return nbytes / (time.monotonic() - start) / GIB


@contextmanager
def started(*arguments: str) -> Iterator[str]:
    """Runs a Python process. Yields the first line that it prints."""
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
