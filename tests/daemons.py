"""Real daemons, peers that speak the wire by hand, and payloads that can be told apart."""

from __future__ import annotations

import itertools
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from kvstore.lab.local_daemon import LocalDaemon
from kvstore.types import Layout
from kvstore.wire import messages as m
from kvstore.wire.frames import Frames, pack
from tests.spawner import spawn

BLOCK = 16 << 10
SMALL = {"dram": {"limit": "16MiB", "huge_pages": False}, "scrub": {"rate": 0}}
WITH_NVME = {**SMALL, "nvme": {"limit": "64MiB", "io_threads": 2}, "policy": {"eviction": "lru"}}
"""DRAM for about 1000 blocks in extents of 2 MiB, NVMe for 4096 in extents of 8 MiB. The order is known, and
nobody but who asks finds what is altered."""

_numbers = itertools.count()


def new_layout(block_bytes: int = BLOCK) -> Layout:
    """A namespace that no other test uses."""
    return Layout(model=f"test-{os.getpid()}-{next(_numbers)}", block_bytes=block_bytes)


def names(n: int, prefix: str = "k") -> list[bytes]:
    """n keys of 32 bytes."""
    return [blake3(f"{prefix}/{i}".encode()).digest() for i in range(n)]


def payload(key: bytes, nbytes: int = BLOCK, salt: int = 0) -> bytes:
    """The bytes that belong to a key."""
    return blake3(key + bytes([salt])).digest(length=nbytes)


def payloads(keys: list[bytes], nbytes: int = BLOCK, salt: int = 0) -> np.ndarray:
    raw = b"".join(payload(key, nbytes, salt) for key in keys)
    return np.frombuffer(raw, np.uint8).reshape(len(keys), nbytes)


def room_for(n: int, nbytes: int = BLOCK) -> np.ndarray:
    return np.zeros((n, nbytes), np.uint8)


def got(ns: Any, keys: list[bytes], salt: int = 0, **more: Any) -> int:
    """How many leading blocks `get` brings, every one of them compared with what was put."""
    out = room_for(len(keys), ns.layout.block_bytes)
    n: int = ns.get(keys, out, **more)
    assert np.array_equal(out[:n], payloads(keys[:n], ns.layout.block_bytes, salt))
    return n


def eventually(what: Callable[[], Any], within_s: float = 10.0) -> Any:
    """The first true value; fails if there is none in time."""
    ends = time.monotonic() + within_s
    while not (value := what()):
        assert time.monotonic() < ends, "it never happened"
        time.sleep(0.01)
    return value


def tier(status: Mapping[str, Any], name: str) -> dict[str, Any]:
    [found] = [t for t in status["tiers"] if t["name"] == name]
    return dict(found)


def idle(status: Mapping[str, Any]) -> bool:
    """Whether nobody holds anything and nothing moves."""
    return not (status["leases"] or status["reservations"] or status["copies_under_way"])


def check_limits(status: Mapping[str, Any]) -> None:
    for each in status["tiers"]:
        assert each["used_bytes"] <= each["capacity_bytes"] <= each["limit_bytes"]


def log_of(daemon: LocalDaemon) -> str:
    return (daemon.folder / "daemon.log").read_text()


def cli(
    *args: str, config: str | None = None, folder: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs `kvstore` to its end; `config` goes to a file in `folder` that `-c` names."""
    command = [sys.executable, "-m", "kvstore", *args]
    if config is not None:
        assert folder is not None
        file = folder / f"config-{next(_numbers)}.toml"
        file.write_text(config)
        command += ["-c", str(file)]
    # As wide as into a pipe, whatever runs the tests.
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | env
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = spawn(command, stdout=out, stderr=err, env=environment)
        try:
            code = process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), err.read())


class Peer:
    """One raw connection. `wait_s` bounds every receive."""

    def __init__(self, path: Path | str, wait_s: float = 5.0) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(wait_s)
        try:
            self.sock.connect(str(path))
        except OSError:
            self.sock.close()
            raise
        self.fds: list[int] = []
        self._frames = Frames(1 << 30)
        self._ready: list[Any] = []

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()
        while self.fds:
            os.close(self.fds.pop())

    def send(self, *what: Any) -> None:
        """Messages as frames, bytes as they are, in one go."""
        self.sock.sendall(b"".join(w if isinstance(w, bytes) else pack(w, 1 << 30) for w in what))

    def receive(self) -> Any:
        """The next message; None at the end of the stream."""
        while not self._ready:
            data, fds, _, _ = socket.recv_fds(self.sock, 1 << 16, 4)
            self.fds += fds
            if not data:
                return None
            self._ready += self._frames.feed(data)
        return self._ready.pop(0)

    def ask(self, message: Any) -> Any:
        self.send(message)
        return self.receive()

    def hello(self) -> m.Welcome:
        welcome = self.ask(m.Hello(m.MAGIC, m.VERSION, ""))
        assert isinstance(welcome, m.Welcome), welcome
        return welcome

    def open(self, layout: Layout) -> m.Opened:
        opened = self.ask(m.Open(1, layout.to_map(), "", 0.0))
        assert isinstance(opened, m.Opened), opened
        return opened

    def refused(self) -> m.Failure:
        """The Failure that comes next, after which the daemon hangs up."""
        failure = self.receive()
        assert isinstance(failure, m.Failure), failure
        with suppress(ConnectionResetError):
            assert self.receive() is None
        return failure

    def quiet(self, for_s: float = 0.2) -> bool:
        """Whether nothing arrives for a while."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return not self._ready and not poll.poll(1000 * for_s)


@contextmanager
def greeted(daemon: LocalDaemon, layout: Layout | None = None) -> Iterator[tuple[Peer, int]]:
    """A peer that has said Hello and opened a namespace, and the namespace's number."""
    with Peer(daemon.socket) as peer:
        peer.hello()
        yield peer, peer.open(layout or new_layout()).namespace


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body
