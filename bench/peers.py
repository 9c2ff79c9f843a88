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
import statistics
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.harness import GIB, KIB, MIB, Bench, Result, Rounds, Target, Unable, expect
from bench.served import serve
from bench.valkey import server
from kvstore import Client, Layout, Namespace
from tests.engines.environments import ROOT, environment, interpreter
from tests.engines.mooncake.cluster import without_rdma

Blocks = npt.NDArray[np.uint8]
"""The blocks of a batch, (blocks, bytes)."""

KEYS = 32
"""Keys of one existence check."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Batches of one size. A sample gets or puts `calls` of the `sets` different batches."""

    block_bytes: int
    batch: int
    sets: int
    calls: int

    @property
    def nbytes(self) -> int:
        """Bytes of a sample."""
        return self.block_bytes * self.batch * self.calls


SHAPES = {
    "64-KiB": Shape(64 * KIB, 64, 64, 16),
    "1-MiB": Shape(MIB, 32, 8, 4),
    "2-MiB": Shape(2 * MIB, 32, 4, 2),
    "16-MiB": Shape(16 * MIB, 8, 2, 1),
}
"""256 MiB of stored blocks each, more than the caches."""
SMOKE = dict.fromkeys(SHAPES, Shape(4 * KIB, KEYS, 2, 1))
CASES = (*(f"{what}/{size}" for what in ("get", "put") for size in SHAPES), "exists/32-keys")
_ROOM_BYTES = 3 * GIB


class Peer(ABC):
    """A contestant. `fill` stores the batches of a shape; keys of a batch are those of its number."""

    name = ""

    @abstractmethod
    def fill(self, shape: Shape) -> None:
        """Forgets what is stored and stores the batches 0 to `shape.sets`."""

    @abstractmethod
    def get(self, numbers: Sequence[int]) -> float:
        """Gets batches. Returns the seconds. Fails if a block is missing or wrong."""

    @abstractmethod
    def put(self, numbers: Sequence[int]) -> float:
        """Puts new batches. Returns the seconds. Fails if a block is refused."""

    @abstractmethod
    def tidy(self, numbers: Sequence[int]) -> None:
        """Removes new batches."""

    def exists(self) -> float:
        """Asks for the first keys of batch 0. Returns the seconds."""
        raise NotImplementedError

    @property
    def pids(self) -> list[int]:
        """The processes that work for it."""
        return [os.getpid()]


def stamped(shape: Shape, number: int, blocks: Blocks) -> None:
    """Writes the number of each block into its first eight bytes."""
    blocks.view(np.uint64)[:, 0] = np.arange(shape.batch) + number * shape.batch + 1


def check_stamps(shape: Shape, number: int, blocks: Blocks) -> None:
    """Raises NotDone if blocks of another batch are there. Erases the stamps."""
    wanted = np.arange(shape.batch) + number * shape.batch + 1
    expect(blocks.view(np.uint64)[:, 0].tolist(), wanted.tolist(), "stamps of blocks")
    blocks[:, :8] = 0


def data(shape: Shape) -> Blocks:
    """Returns random blocks."""
    return np.random.default_rng(3).integers(0, 256, (shape.batch, shape.block_bytes), np.uint8)


def name_of(shape: Shape, number: int, i: int) -> str:
    """Returns the key of a block, for stores whose keys are text."""
    return f"{shape.block_bytes}-{number}-{i}"


class _Here(Peer):
    """A contestant whose client is this process. `_get` and `_put` move one batch."""

    def __init__(self) -> None:
        self._shape = SHAPES["64-KiB"]
        self._blocks = self._out = data(self._shape)

    def fill(self, shape: Shape) -> None:
        self._shape, self._blocks = shape, data(shape)
        self._out = np.ones_like(self._blocks)
        self._clear()
        for number in range(shape.sets):
            stamped(shape, number, self._blocks)
            self._put(number)

    def get(self, numbers: Sequence[int]) -> float:
        seconds = 0.0
        for number in numbers:
            start = time.perf_counter()
            self._get(number)
            seconds += time.perf_counter() - start
            check_stamps(self._shape, number, self._out)
        return seconds

    def put(self, numbers: Sequence[int]) -> float:
        seconds = 0.0
        for number in numbers:
            stamped(self._shape, number, self._blocks)
            start = time.perf_counter()
            self._put(number)
            seconds += time.perf_counter() - start
        return seconds

    @abstractmethod
    def _clear(self) -> None: ...

    @abstractmethod
    def _get(self, number: int) -> None: ...

    @abstractmethod
    def _put(self, number: int) -> None: ...


class _Ours(_Here):
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

    def exists(self) -> float:
        keys = self._keys(0)[:KEYS]
        start = time.perf_counter()
        found = self._space.lookup(keys)
        seconds = time.perf_counter() - start
        expect(found, KEYS, "keys found")
        return seconds

    def _clear(self) -> None:
        # Blocks of earlier shapes are evicted.
        self._fills += 1
        layout = Layout(model=f"peers {self._fills}", block_bytes=self._shape.block_bytes)
        self._space = self._client.namespace(layout)

    def _keys(self, number: int) -> list[bytes]:
        return [name_of(self._shape, number, i).encode().rjust(32, b".") for i in range(self._shape.batch)]

    def _get(self, number: int) -> None:
        expect(self._space.get(self._keys(number), self._out), self._shape.batch, "blocks")

    def _put(self, number: int) -> None:
        expect(self._space.put(self._keys(number), self._blocks).stored, self._shape.batch, "stored blocks")

    def tidy(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._space.invalidate(self._keys(number))


class _Memcpy(_Here):
    name = "memcpy"

    def _clear(self) -> None:
        self._stored = np.empty((self._shape.sets, *self._blocks.shape), np.uint8)

    def _get(self, number: int) -> None:
        ctypes.memmove(self._out.ctypes.data, self._stored[number].ctypes.data, self._out.nbytes)

    def _put(self, number: int) -> None:
        at = self._stored[number % self._shape.sets]
        ctypes.memmove(at.ctypes.data, self._blocks.ctypes.data, at.nbytes)

    def tidy(self, numbers: Sequence[int]) -> None:
        for number in range(self._shape.sets):
            stamped(self._shape, number, self._stored[number])


class _Tmpfs(_Here):
    name = "tmpfs"

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    def _clear(self) -> None:
        os.ftruncate(self._fd, 0)

    def _get(self, number: int) -> None:
        expect(os.preadv(self._fd, list(self._out), number * self._out.nbytes), self._out.nbytes, "bytes")

    def _put(self, number: int) -> None:
        # New blocks take the place of evicted ones, as they do in a store that is full.
        at = number % self._shape.sets * self._blocks.nbytes
        expect(os.pwritev(self._fd, list(self._blocks), at), self._blocks.nbytes, "bytes")

    def tidy(self, numbers: Sequence[int]) -> None:
        for number in range(self._shape.sets):
            stamped(self._shape, number, self._blocks)
            self._put(number)


class _Valkey(_Here):
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

    def exists(self) -> float:
        keys = self._keys(0)[:KEYS]
        start = time.perf_counter()
        found = self._client.exists(*keys)
        seconds = time.perf_counter() - start
        expect(found, KEYS, "keys found")
        return seconds

    def _clear(self) -> None:
        self._client.flushall()

    def _keys(self, number: int) -> list[str]:
        return [name_of(self._shape, number, i) for i in range(self._shape.batch)]

    def _get(self, number: int) -> None:
        for block, came in zip(self._out, self._client.mget(self._keys(number)), strict=True):
            block[:] = np.frombuffer(came, np.uint8)

    def _put(self, number: int) -> None:
        with self._client.pipeline(transaction=False) as pipeline:
            for key, block in zip(self._keys(number), self._blocks, strict=True):
                pipeline.set(key, block.data)
            expect(pipeline.execute(), [True] * self._shape.batch, "stored blocks")

    def tidy(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._client.delete(*self._keys(number))


class _Mooncake(Peer):
    """The client runs in Mooncake's environment, see `bench.mooncake_client`."""

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
        stack.callback(self._process.kill)
        self._pids = self._hear()

    @property
    def pids(self) -> list[int]:
        return self._pids

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


def run(bench: Bench) -> Iterator[Result]:
    """Yields a row for each size of get and put, then existence checks."""
    shapes = bench.pick(SHAPES, SMOKE)
    with bench.scratch() as folder, _peers(bench, folder) as peers:
        stores = [peer for peer in peers if peer.name not in ("memcpy", "tmpfs")]
        found: dict[str, Result] = {}
        for size, shape in shapes.items():
            bench.doing(f"filling {size}")
            for peer in peers:
                peer.fill(shape)
            for what in ("get", "put"):
                contests = [_Contest(peer, what, shape) for peer in peers]
                rounds = bench.interleave(f"{what} {size}", contests, 1 / len(CASES))
                name = f"peers/{what}/{size}"
                found[name] = _row(name, "GiB/s", rounds, contests, Target(">=", 1.0))
            if not found.get("peers/exists/32-keys"):
                contests = [_Contest(peer, "exists", shape) for peer in stores]
                rounds = bench.interleave("exists", contests, 1 / len(CASES))
                found["peers/exists/32-keys"] = _row(
                    "peers/exists/32-keys", "µs", rounds, contests, Target("<=", 1.0)
                )
        for case in CASES:
            yield found[f"peers/{case}"]


@contextmanager
def _peers(bench: Bench, folder: Path) -> Iterator[list[Peer]]:
    """Yields the contestants, ours first."""
    with ExitStack() as stack:
        bench.doing("starting the stores")
        client, daemon = stack.enter_context(serve(_ROOM_BYTES))
        valkey = stack.enter_context(server(folder))
        fd = os.memfd_create("peers")
        stack.callback(os.close, fd)
        yield [
            _Ours(client, daemon.pid),
            _Memcpy(),
            _Tmpfs(fd),
            _Valkey(valkey.socket, valkey.pid),
            _Mooncake(folder, stack),
        ]


class _Contest:
    """Samples one operation of a contestant. Also sums up the CPU seconds of its processes."""

    def __init__(self, peer: Peer, what: str, shape: Shape) -> None:
        self.peer = peer
        self._what = what
        self._shape = shape
        self._next = itertools.count(shape.sets, shape.calls)
        self._cpu: list[float] = []

    def __call__(self, n: int) -> float:
        first = next(self._next)
        new = range(first, first + self._shape.calls)
        before = self._clock()
        figure = self._sample(n, new)
        self._cpu.append((self._clock() - before) / (self._shape.nbytes / GIB))
        if self._what == "put":
            self.peer.tidy(new)
        return figure

    @property
    def cpu_s(self) -> float:
        """CPU seconds for each GiB, the median of all samples."""
        return statistics.median(self._cpu)

    def _sample(self, n: int, new: Sequence[int]) -> float:
        shape = self._shape
        if self._what == "exists":
            return statistics.median(self.peer.exists() for _ in range(50)) * 1e6
        if self._what == "get":
            seconds = self.peer.get([(n * shape.calls + i) % shape.sets for i in range(shape.calls)])
        else:
            seconds = self.peer.put(new)
        return shape.nbytes / seconds / GIB

    def _clock(self) -> float:
        # The id of the CPU clock of a process, see clock_getcpuclockid(3).
        return sum(time.clock_gettime((~pid << 3) | 2) for pid in self.peer.pids)


def _row(name: str, unit: str, rounds: Rounds, contests: Sequence[_Contest], target: Target) -> Result:
    """Returns the row of ours compared with the fastest peer. `extra`: all figures."""
    figures = {contest.peer.name: rounds.median(i) for i, contest in enumerate(contests)}
    peers = [i for i, contest in enumerate(contests) if contest.peer.name not in ("kvstore", "memcpy")]
    fastest = (max if target.sign == ">=" else min)(peers, key=rounds.median)
    extra: dict[str, Any] = {"fastest": contests[fastest].peer.name}
    extra |= {other: figure for other, figure in figures.items() if other != "kvstore"}
    if unit == "GiB/s":
        extra |= {f"cpu_{contest.peer.name}": contest.cpu_s for contest in contests}
    return rounds.result(name, unit, target, fastest, **extra)
