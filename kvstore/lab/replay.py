"""Replays a trace against a running daemon, with the real client and real bytes.

The payload of a block is computed from its key, so every byte read is checked. Each prompt does what an
engine does: look up, read the stored prefix, put the rest.

Not covered: compute time of an engine between two requests, beyond the gaps in the trace.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore import Client, Layout
from kvstore.errors import MisuseError
from kvstore.lab.traces import Trace, TraceSession
from kvstore.types import Tier

BUFFER_BYTES = 32 << 20
"""Size of a worker's read and write buffer, at least one block. Longer prompts move in pieces."""
PIECE_KEYS = 4096

Rows = npt.NDArray[np.uint8]


class Payload:
    """The payload of a key: a fixed random pattern plus the first word of the key, modulo 2**64."""

    def __init__(self, block_bytes: int) -> None:
        if block_bytes < 8 or block_bytes % 8:
            raise MisuseError(
                f"a replay cannot use blocks of {block_bytes} bytes", "a multiple of 8, such as 64KiB"
            )
        self._pattern = np.random.default_rng(20).integers(0, 1 << 64, block_bytes // 8, np.uint64)
        self._expected = np.empty_like(self._pattern)

    def fill(self, keys: Sequence[bytes], rows: Rows) -> None:
        """Writes the payload of keys[i] into rows[i]."""
        for key, row in zip(keys, rows.view(np.uint64), strict=True):
            np.add(self._pattern, _word(key), out=row)

    def count_wrong(self, keys: Sequence[bytes], rows: Rows) -> int:
        """Returns how many rows[i] differ from the payload of keys[i]. Clears all rows.

        A later check can therefore not mistake old bytes for new ones.
        """
        wrong = 0
        for key, row in zip(keys, rows.view(np.uint64), strict=True):
            np.add(self._pattern, _word(key), out=self._expected)
            np.subtract(row, self._expected, out=row)
            if np.bitwise_or.reduce(row):
                wrong += 1
                row[:] = 0
        return wrong


def _word(key: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(key[:8], "little"))


@dataclass(slots=True)
class Tally:
    """Requested and served blocks of prompts. Counts are blocks unless the name says otherwise."""

    requests: int = 0
    input_tokens: int = 0
    asked: int = 0
    hits: Counter[Tier] = field(default_factory=Counter)
    stored: int = 0
    present: int = 0
    denied: int = 0
    denied_why: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    lookups_s: list[float] = field(default_factory=list)
    gets_s: list[float] = field(default_factory=list)
    put_s: float = 0.0

    @property
    def served(self) -> int:
        """Blocks served by the store, from any tier."""
        return self.hits.total()

    def add(self, other: Tally) -> None:
        """Adds the numbers of `other`."""
        for name in self.__slots__:
            total = getattr(self, name)
            total += getattr(other, name)
            setattr(self, name, total)


class Engine:
    """Simulates one worker of an engine. Not thread-safe; several engines may share one client."""

    def __init__(self, client: Client, layout: Layout) -> None:
        self._ns = client.namespace(layout)
        self._payload = Payload(layout.block_bytes)
        self._piece = max(1, min(PIECE_KEYS, BUFFER_BYTES // layout.block_bytes))
        # Separate buffers: a get into a buffer that still holds the put bytes would prove nothing.
        self._got = np.zeros((self._piece, layout.block_bytes), np.uint8)
        self._made = np.zeros((self._piece, layout.block_bytes), np.uint8)

    def prompt(self, keys: list[bytes]) -> Tally:
        """Reads and checks the longest stored prefix, then puts the rest."""
        tally = Tally(requests=1, asked=len(keys))
        found = self._lookup(keys, tally)
        have = self._get(keys[:found], tally)
        self._put(keys, have, tally)
        return tally

    def _lookup(self, keys: list[bytes], tally: Tally) -> int:
        if not keys:
            return 0
        start_s = time.perf_counter()
        found = self._ns.lookup(keys)
        tally.lookups_s.append(time.perf_counter() - start_s)
        return found

    def _get(self, keys: list[bytes], tally: Tally) -> int:
        """Returns the number of leading blocks read.

        A lease may cover only part of a piece if DRAM has no room for all of it. Only an empty lease ends the
        prefix.
        """
        have, spent_s = 0, 0.0
        while have < len(keys):
            part = keys[have : have + self._piece]
            start_s = time.perf_counter()
            with self._ns.acquire(part) as lease:
                tiers = bytes(lease.tiers)
                good = lease.copy_into(self._got[: len(lease)]) if len(lease) else 0
            spent_s += time.perf_counter() - start_s
            tally.wrong += self._payload.count_wrong(part[:good], self._got[:good])
            self._got[good : len(tiers)] = 0
            tally.hits.update(map(Tier, tiers[:good]))
            have += good
            if not good:
                break
        if have:
            tally.gets_s.append(spent_s)
        return have

    def _put(self, keys: list[bytes], have: int, tally: Tally) -> None:
        for at in range(have, len(keys), self._piece):
            part = keys[at : at + self._piece]
            self._payload.fill(part, self._made[: len(part)])
            start_s = time.perf_counter()
            result = self._ns.put(part, self._made[: len(part)], parent=keys[at - 1] if at else None)
            tally.put_s += time.perf_counter() - start_s
            tally.stored += result.stored
            tally.present += result.present
            if result.denied:
                # Blocks after a denied block have no parent in the store and would be denied as well.
                tally.denied += len(keys) - at - result.stored - result.present
                tally.denied_why[result.why] += 1
                return


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a replay.

    `requests`: the first N requests; None: all. `speed`: 0 without waits, 1 by the trace's clock, 2 twice as
    fast. `concurrency`: workers that share one client.
    """

    requests: int | None = None
    concurrency: int = 4
    speed: float = 0.0
    block_bytes: int = 64 << 10

    def __post_init__(self) -> None:
        if self.requests is not None and self.requests < 1:
            raise MisuseError(f"requests is {self.requests}", "at least 1")
        if not 1 <= self.concurrency <= 1024:
            raise MisuseError(f"concurrency is {self.concurrency}", "1 to 1024 workers")
        if not 0 <= self.speed < float("inf"):
            raise MisuseError(f"speed is {self.speed}", "0 for no waits, or a factor such as 1 or 2")


@dataclass(frozen=True, slots=True)
class Result:
    """The measurements of a replay. Names in _s are seconds; a percentile without samples is None.

    `token_hit_ratio`: tokens of served blocks / tokens of full blocks requested; a partial last block does
    not count. `bytes_written`: bytes put by the client. `nvme_bytes_written`: bytes that the daemon wrote to
    NVMe during the run; None without NVMe. The time of a get is from acquire to release, including the
    checked copy, for requests that got at least one block. `gib_per_s`: bytes served / wall time.
    `get_gib_per_s`: bytes served / time in gets, summed over workers.
    """

    requests: int
    input_tokens: int
    blocks: int
    block_bytes: int
    block_tokens: int
    token_hit_ratio: float | None
    hits_by_tier: dict[str, int]
    bytes_served: int
    bytes_written: int
    nvme_bytes_written: int | None
    wrong_blocks: int
    present_blocks: int
    denied_blocks: int
    denied_why: dict[str, int]
    get_p50_s: float | None
    get_p99_s: float | None
    lookup_p50_s: float | None
    lookup_p99_s: float | None
    wall_s: float
    gib_per_s: float
    get_gib_per_s: float | None
    put_gib_per_s: float | None


Progress = Callable[[float, Tally], None]
"""Called after each request with the fraction done (0 to 1) and the totals, by one worker at a time."""


def replay(client: Client, trace: Trace, options: Options, progress: Progress | None = None) -> Result:
    """Replays the trace against the daemon of `client` and returns the measurements.

    Raises UnavailableError if the daemon does not answer before or after the run, KVStoreError if the trace
    cannot be read. Failures during the run count as misses and denials.
    """
    layout = Layout(model="kvstore-replay", block_bytes=options.block_bytes, block_tokens=trace.block_tokens)
    engines = [Engine(client, layout) for _ in range(options.concurrency)]
    written_before = _nvme_bytes_written(client)
    run = _Run(trace, options, progress)
    # The default interval adds up to 5 ms to timings when two Python threads compete.
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        wall_s = run.play(engines)
    finally:
        sys.setswitchinterval(interval_s)
    written_after = _nvme_bytes_written(client)
    written = None if written_before is None or written_after is None else written_after - written_before
    return _result(run.total, layout, wall_s, written)


class _Run:
    """Distributes sessions to workers and sums their tallies."""

    def __init__(self, trace: Trace, options: Options, progress: Progress | None) -> None:
        self.total = Tally()
        self._sessions = trace.sessions(options.requests)
        self._speed = options.speed
        self._progress = progress
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._start_s = 0.0
        self._done_sessions = 0
        self._requests = options.requests
        self._all_sessions = 0 if options.requests or not progress else trace.count_sessions()

    def play(self, engines: Sequence[Engine]) -> float:
        """Replays all sessions and returns the wall time in seconds. The first error stops all workers."""
        self._start_s = time.perf_counter()
        with ThreadPoolExecutor(len(engines), "replay") as pool:
            workers = [pool.submit(self._work, engine) for engine in engines]
            try:
                wait(workers, return_when=FIRST_EXCEPTION)
            finally:
                self._stop.set()
        for worker in workers:
            worker.result()
        return time.perf_counter() - self._start_s

    def _work(self, engine: Engine) -> None:
        for session in self._take():
            base_s = time.perf_counter() if session.own_clock else self._start_s
            for request in session:
                if self._speed:
                    self._stop.wait(base_s + request.time_s / self._speed - time.perf_counter())
                if self._stop.is_set():
                    return
                tally = engine.prompt(request.keys)
                tally.input_tokens = request.input_tokens
                self._account(tally)

    def _take(self) -> Iterator[TraceSession]:
        while True:
            with self._lock:
                session = next(self._sessions, None)
            if session is None:
                return
            yield session
            with self._lock:
                self._done_sessions += 1

    def _account(self, tally: Tally) -> None:
        with self._lock:
            self.total.add(tally)
            if self._progress:
                if self._requests:
                    share = self.total.requests / self._requests
                else:
                    share = self._done_sessions / max(1, self._all_sessions)
                self._progress(min(1.0, share), self.total)


def _nvme_bytes_written(client: Client) -> int | None:
    counters = client.status().get("counters")
    return None if counters is None else int(counters.get("written_bytes", 0))


def _result(total: Tally, layout: Layout, wall_s: float, nvme_bytes_written: int | None) -> Result:
    served, stored = (n * layout.block_bytes for n in (total.served, total.stored))
    tiers = {Tier.DRAM, Tier.NVME, *total.hits}
    return Result(
        requests=total.requests,
        input_tokens=total.input_tokens,
        blocks=total.asked,
        block_bytes=layout.block_bytes,
        block_tokens=layout.block_tokens,
        token_hit_ratio=total.served / total.asked if total.asked else None,
        hits_by_tier={tier.name.lower(): total.hits[tier] for tier in sorted(tiers)},
        bytes_served=served,
        bytes_written=stored,
        nvme_bytes_written=nvme_bytes_written,
        wrong_blocks=total.wrong,
        present_blocks=total.present,
        denied_blocks=total.denied,
        denied_why=dict(total.denied_why),
        get_p50_s=_percentile(total.gets_s, 50),
        get_p99_s=_percentile(total.gets_s, 99),
        lookup_p50_s=_percentile(total.lookups_s, 50),
        lookup_p99_s=_percentile(total.lookups_s, 99),
        wall_s=wall_s,
        gib_per_s=served / wall_s / 2**30,
        get_gib_per_s=_rate(served, sum(total.gets_s)),
        put_gib_per_s=_rate(stored, total.put_s),
    )


def _percentile(samples_s: list[float], percent: float) -> float | None:
    return float(np.percentile(samples_s, percent)) if samples_s else None


def _rate(moved_bytes: int, spent_s: float) -> float | None:
    return moved_bytes / spent_s / 2**30 if spent_s else None
