"""peers: gets, puts and existence checks by this store and by others, of the same bytes in the same batches.

    contestant  what it is
    kvstore     the daemon on its Unix socket; its reads are verified
    memcpy      no store: the floor
    tmpfs       a file in memory, read and written with one system call a batch: no keys, no checksums
    valkey      Valkey on a Unix socket, redis-py with hiredis, one pipeline a batch
    mooncake    Mooncake over TCP on the loopback, batch_get_into and batch_put_from, with registered memory

Arrays of numpy are on this side, the store is in another process. A get fills the arrays, whose memory was
touched before; every put has new keys. Each round takes all contestants in turns. A row is ours compared with
the fastest peer of that row, which memcpy is not. `cpu_*` are seconds of client and server for each GiB.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.contestants import KEYS, Contestant, Shape
from bench.harness import GIB, KIB, MIB, Bench, Result, Rounds, Target, Unable, cpu_seconds, expect
from bench.served import serve
from bench.valkey import EVICTING, server
from kvstore import Client, Layout, Namespace
from tests.engines.environments import ROOT, environment, interpreter
from tests.engines.mooncake.cluster import without_rdma

SHAPES = {
    "64-KiB": Shape(64 * KIB, 64, 64, 16),
    "1-MiB": Shape(MIB, 32, 8, 4),
    "2-MiB": Shape(2 * MIB, 32, 4, 2),
    "16-MiB": Shape(16 * MIB, 8, 2, 1),
}
"""256 MiB of stored blocks each, more than the caches."""
SMOKE = dict.fromkeys(SHAPES, Shape(4 * KIB, KEYS, 2, 1))
CASES = (*(f"{what}/{size}" for what in ("get", "put") for size in SHAPES), "exists/32-keys")
_EXISTS_AT = "64-KiB"
_WITHOUT_KEYS = "memcpy", "tmpfs"
_CHECKS = 50
"""Existence checks of a sample."""
_ROOM_BYTES = 3 * GIB
_END_WITHIN_S = 20.0


class _Ours(Contestant):
    name = "kvstore"

    def __init__(self, client: Client, pid: int) -> None:
        super().__init__()
        self._client = client
        self._pid = pid
        self._fills = 0
        self._space: Namespace

    @property
    def pids(self) -> list[int]:
        return [os.getpid(), self._pid]

    def tidy(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._space.invalidate(self._keys(number))

    def _keys(self, number: int) -> list[bytes]:
        return [key.encode().rjust(32, b".") for key in super()._keys(number)]

    def _clear(self) -> None:
        # Blocks of earlier shapes are evicted.
        self._fills += 1
        layout = Layout(model=f"peers {self._fills}", block_bytes=self._shape.block_bytes)
        self._space = self._client.namespace(layout)

    def _get(self, number: int, keys: list[bytes]) -> None:
        expect(self._space.get(keys, self._out), len(keys), "blocks")

    def _put(self, number: int, keys: list[bytes]) -> None:
        expect(self._space.put(keys, self._blocks).stored, len(keys), "stored blocks")

    def _count(self, keys: list[bytes]) -> int:
        return self._space.lookup(keys)


class _Memcpy(Contestant):
    name = "memcpy"

    def _clear(self) -> None:
        # Touched before the first copy.
        self._stored = [self._blocks.copy() for _ in range(self._shape.sets)]

    def _get(self, number: int, keys: list[str]) -> None:
        ctypes.memmove(self._out.ctypes.data, self._stored[number].ctypes.data, self._out.nbytes)

    def _put(self, number: int, keys: list[str]) -> None:
        at = self._stored[number % self._shape.sets]
        ctypes.memmove(at.ctypes.data, self._blocks.ctypes.data, at.nbytes)


class _Tmpfs(Contestant):
    name = "tmpfs"

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    def _clear(self) -> None:
        os.ftruncate(self._fd, 0)

    def _get(self, number: int, keys: list[str]) -> None:
        expect(os.preadv(self._fd, list(self._out), number * self._out.nbytes), self._out.nbytes, "bytes")

    def _put(self, number: int, keys: list[str]) -> None:
        # New blocks take the place of evicted ones, as they do in a store that is full.
        at = number % self._shape.sets * self._blocks.nbytes
        expect(os.pwritev(self._fd, list(self._blocks), at), self._blocks.nbytes, "bytes")


class _Valkey(Contestant):
    name = "valkey"

    def __init__(self, path: Path, pid: int) -> None:
        super().__init__()
        try:
            import hiredis  # noqa: F401, PLC0415
            import redis  # noqa: PLC0415
        except ImportError as error:
            raise Unable(f"{error}: pip install 'redis[hiredis]'") from None
        self._client = redis.Redis(unix_socket_path=str(path))
        self._pid = pid

    @property
    def pids(self) -> list[int]:
        return [os.getpid(), self._pid]

    def tidy(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._client.delete(*self._keys(number))

    def _clear(self) -> None:
        self._client.flushall()

    def _get(self, number: int, keys: list[str]) -> None:
        for block, came in zip(self._out, self._client.mget(keys), strict=True):
            block.data[:] = came

    def _put(self, number: int, keys: list[str]) -> None:
        with self._client.pipeline(transaction=False) as pipeline:
            for key, block in zip(keys, self._blocks, strict=True):
                pipeline.set(key, block.data)
            expect(pipeline.execute(), [True] * len(keys), "stored blocks")

    def _count(self, keys: list[str]) -> int:
        return int(self._client.exists(*keys))


class _Mooncake:
    """The contestant in Mooncake's environment, see `bench.mooncake_client`."""

    name = "mooncake"

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        command = [str(interpreter("mooncake")), "-m", "bench.mooncake_client", str(folder), str(_ROOM_BYTES)]
        self._process = stack.enter_context(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env={**environment(), **without_rdma(folder)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
        self.pids: list[int] = []
        stack.callback(self._end)
        self.pids = self._hear()

    def fill(self, shape: Shape) -> None:
        self._ask("fill", shape.block_bytes, shape.batch, shape.sets, shape.calls)

    def get(self, numbers: Sequence[int]) -> float:
        return float(self._ask("get", *numbers))

    def put(self, numbers: Sequence[int]) -> float:
        return float(self._ask("put", *numbers))

    def tidy(self, numbers: Sequence[int]) -> None:
        self._ask("tidy", *numbers)

    def exists(self) -> float:
        return float(self._ask("exists"))

    def _end(self) -> None:
        # Killed, it would leave Mooncake's master behind.
        try:
            self._process.communicate(timeout=_END_WITHIN_S)
        except subprocess.TimeoutExpired:
            for pid in (*self.pids, self._process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _ask(self, *what: Any) -> Any:
        assert self._process.stdin is not None
        print(json.dumps(what), file=self._process.stdin, flush=True)
        return self._hear()

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("="):  # Mooncake writes lines of its own
                answer = json.loads(line[1:])
                if isinstance(answer, dict):
                    raise RuntimeError(f"mooncake: {answer['error']}")
                return answer
        raise RuntimeError("the client of Mooncake has ended")


_Peer = Contestant | _Mooncake


def run(bench: Bench) -> Iterator[Result]:
    """Yields the rows of each size, and one of existence checks."""
    shapes = bench.pick(SHAPES, SMOKE)
    with bench.scratch() as folder, _peers(bench, folder) as peers:
        for size, shape in shapes.items():
            bench.doing(f"filling {size}")
            for peer in peers:
                peer.fill(shape)
            for what in ("get", "put"):
                yield _contest(bench, f"{what}/{size}", peers, shape, "GiB/s", Target(">=", 1.0))
            if size == _EXISTS_AT:
                stores = [peer for peer in peers if peer.name not in _WITHOUT_KEYS]
                yield _contest(bench, "exists/32-keys", stores, shape, "µs", Target("<=", 1.0))


@contextmanager
def _peers(bench: Bench, folder: Path) -> Iterator[list[_Peer]]:
    """Yields the contestants, ours first."""
    with ExitStack() as stack:
        bench.doing("starting the stores")
        client, daemon = stack.enter_context(serve(_ROOM_BYTES))
        valkey = stack.enter_context(server(folder, *EVICTING))
        fd = os.memfd_create("peers")
        stack.callback(os.close, fd)
        yield [
            _Ours(client, daemon.pid),
            _Memcpy(),
            _Tmpfs(fd),
            _Valkey(valkey.socket, valkey.pid),
            _Mooncake(folder, stack),
        ]


class _Samples:
    """Samples one operation of a contestant. Also sums up the CPU seconds of its processes."""

    def __init__(self, peer: _Peer, what: str, shape: Shape) -> None:
        self._peer = peer
        self._what = what
        self._shape = shape
        self._next = itertools.count(shape.sets, shape.calls)
        self._cpu: list[float] = []

    def __call__(self, n: int) -> float:
        shape, peer = self._shape, self._peer
        if self._what == "exists":
            return statistics.median(peer.exists() for _ in range(_CHECKS)) * 1e6
        first = next(self._next) if self._what == "put" else n * shape.calls % shape.sets
        numbers = range(first, first + shape.calls)
        before = sum(map(cpu_seconds, peer.pids))
        seconds = peer.put(numbers) if self._what == "put" else peer.get(numbers)
        self._cpu.append((sum(map(cpu_seconds, peer.pids)) - before) / (shape.nbytes / GIB))
        if self._what == "put":
            peer.tidy(numbers)
        return shape.nbytes / seconds / GIB

    @property
    def cpu(self) -> dict[str, float]:
        """CPU seconds for each GiB, the median of all samples, by name; existence checks have none."""
        return {f"cpu_{self._peer.name}": statistics.median(self._cpu)} if self._cpu else {}


def _contest(
    bench: Bench, case: str, peers: Sequence[_Peer], shape: Shape, unit: str, target: Target
) -> Result:
    """Returns the row of ours compared with the fastest peer. `extra`: all figures."""
    samples = [_Samples(peer, case.partition("/")[0], shape) for peer in peers]
    rounds: Rounds = bench.interleave(case, samples, 1 / len(CASES))
    others = [i for i, peer in enumerate(peers) if peer.name not in ("kvstore", "memcpy")]
    fastest = (max if target.sign == ">=" else min)(others, key=rounds.median)
    extra: dict[str, Any] = {"fastest": peers[fastest].name}
    extra |= {peer.name: rounds.median(i) for i, peer in enumerate(peers) if i}
    for each in samples:
        extra |= each.cpu
    return rounds.result(f"peers/{case}", unit, target, fastest, **extra)
