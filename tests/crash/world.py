"""One folder through many crashes: load, SIGKILL, restart, and everything is read back and compared.

The load goes on where the last one ended, so that NVMe fills up and evicts. One seed, one world: settings,
keys and the moments of the kills. How threads interleave, no seed decides.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvstore import Client, Tier
from kvstore.errors import UnavailableError
from kvstore.lab.local_daemon import LocalDaemon
from tests.crash import files
from tests.crash.book import Book
from tests.crash.load import LAYOUTS, THREADS, Tally, Worker
from tests.daemons import eventually, idle, room_for, tier
from tests.processes import stop

RUNS = 5
"""Of one world: few, because a supervisor waits longer from one death to the next."""


class World:
    """A daemon, its clients and what may come back from it. Use it as a context manager."""

    def __init__(self, seed: int, tally: Tally) -> None:
        self._dice = random.Random(seed)
        self._book = Book()
        self._tally = tally
        self._workers = [Worker(i, str(seed), self._book, tally) for i in range(THREADS)]
        for worker in self._workers:
            worker.others = self._workers
        self.nvme_bytes = self._dice.choice((24, 32, 64)) << 20
        policy = self._dice.choice(("write_through",) * 4 + ("on_evict",))
        self._supervised = self._dice.random() < 0.5
        self._ending = threading.Event()
        self._daemon = LocalDaemon(
            {
                "dram": {"limit": 16 << 20, "huge_pages": False},
                "nvme": {"limit": self.nvme_bytes, "write_policy": policy, "io_threads": 2},
            },
            supervised=self._supervised,
        )

    def __enter__(self) -> World:
        self._daemon.__enter__()
        if self._dice.random() < 0.6:
            self._fill()
        return self

    @property
    def _folder(self) -> Path:
        return self._daemon.folder / "nvme"

    def __exit__(self, *error: Any) -> None:
        self._daemon.__exit__(*error)

    def run(self) -> None:
        """Load, a kill, sometimes another one during the start, and the read-back."""
        self._tally.counts["runs under a supervisor"] += self._supervised
        with Client(self._daemon.url, deadline_s=10, strict=True) as client:
            threads = self._load(client)
            with self._killed():
                for thread in threads:
                    thread.join()
                committed = files.records(self._folder)
        self._tally.counts["on record"] += len(committed)
        self._tally.counts["runs with a full NVMe"] += files.used_bytes(committed) > 0.8 * self.nvme_bytes
        if not self._supervised and self._dice.random() < 0.25:
            self._kill_while_starting(self._dice.uniform(0.05, 0.7))
        self._daemon.start()
        with Client(self._daemon.url, deadline_s=20, strict=True) as client:
            if not self._supervised:  # else blocks that only DRAM has are already on their way down
                self._check_usage(client.status(), committed)
            missed = self._read(client, self._book.entries) & {record.key for record in committed}
            self._wait_for_rest(client)
            # While DRAM is full of what has to go down first, a block in NVMe may be a miss.
            gone = self._read(client, missed)
            self._tally.counts["on record, but no hit at once"] += len(missed - gone)
            self._wait_for_rest(client)
            status = client.status()
            self._check_usage(status, files.records(self._folder))
            self._check_counters(status["counters"], len(gone))

    def _wait_for_rest(self, client: Client) -> None:
        """Returns when nothing moves between tiers; or after a while in which the records did not follow."""

        def rests() -> bool:
            status = client.status()
            used = tier(status, "nvme")["used_bytes"]
            return idle(status) and used == files.used_bytes(files.records(self._folder))

        with suppress(AssertionError):
            eventually(rests, 5)

    def _fill(self) -> None:
        """More than NVMe holds, so that every write from now on needs room that another block has."""
        with Client(self._daemon.url, deadline_s=20, strict=True) as client:
            for worker in self._workers:
                worker.fill(client)
            eventually(lambda: idle(client.status()))

    def _load(self, client: Client) -> list[threading.Thread]:
        """Starts the load, and returns at a random moment, when it is about to lose its daemon."""
        self._ending.clear()
        threads = [threading.Thread(target=w.run, args=(client, self._ending)) for w in self._workers]
        for thread in threads:
            thread.start()
        time.sleep(self._dice.uniform(0.005, 0.3))
        self._ending.set()
        return threads

    @contextmanager
    def _killed(self) -> Iterator[None]:
        """Kills the daemon. Within, no supervisor starts another one."""
        self._tally.counts["kills"] += 1
        pid = self._daemon.pid
        supervisor = _parent(pid) if self._supervised else 0
        if supervisor:
            stop(supervisor)
        try:
            self._daemon.kill()
            eventually(lambda: _has_ended(pid))
            yield
        finally:
            if supervisor:
                os.kill(supervisor, signal.SIGCONT)

    def _kill_while_starting(self, after_s: float) -> None:
        def start() -> None:
            with suppress(UnavailableError):
                self._daemon.start()

        self._tally.counts["kills"] += 1
        thread = threading.Thread(target=start)
        thread.start()
        time.sleep(after_s)
        self._daemon.kill()
        thread.join()
        self._daemon.kill()

    def _check_usage(self, status: dict[str, Any], on_record: list[files.Record]) -> None:
        used, expected = tier(status, "nvme")["used_bytes"], files.used_bytes(on_record)
        if used != expected:
            self._wrong("usage", f"{used} bytes are in use, {expected} on record")
        on_disk = files.slab_bytes(self._folder)
        if max(used, on_disk) > self.nvme_bytes:
            self._wrong("usage", f"{used} bytes in use, {on_disk} of slabs, the limit is {self.nvme_bytes}")

    def _read(self, client: Client, keys: Iterable[bytes]) -> set[bytes]:
        """Gets each key alone and compares it; those that are no hits."""
        spaces = {size: client.namespace(layout) for size, layout in LAYOUTS.items()}
        answered = set[bytes]().union(*(worker.answered for worker in self._workers))
        missed = set()
        for key in keys:
            entry = self._book.entries[key]
            out = room_for(1, entry.block_bytes)
            with spaces[entry.block_bytes].acquire([key]) as lease:
                tiers, n = lease.tiers, lease.copy_into(out)
            if not n:
                missed.add(key)
                continue
            self._tally.counts["compared"] += 1
            self._tally.counts["answered, served from DRAM"] += tiers[0] == Tier.DRAM and key in answered
            self._tally.counts["served from NVMe"] += tiers[0] == Tier.NVME
            wrong = self._book.wrong(key, entry.floor, out[0].data)
            if wrong:
                self._wrong("wrong", f"after the restart: {wrong}")
        return missed

    def _check_counters(self, counters: dict[str, int], missing: int) -> None:
        dropped, quarantined = (counters.get(f"{what}_blocks", 0) for what in ("dropped", "quarantined"))
        self._tally.counts["evicted for good"] += dropped - quarantined
        lost = missing - (dropped - quarantined)
        if lost > 0:
            self._wrong("lost", f"{missing} committed blocks are gone, {missing - lost} were evicted", lost)
        if quarantined:
            self._wrong("quarantined", f"{quarantined} blocks did not match their records", quarantined)

    def _wrong(self, what: str, text: str, n: int = 1) -> None:
        self._tally.counts[what] += n
        self._tally.violations.append(text)


def _parent(pid: int) -> int:
    """The process that started this one."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _has_ended(pid: int) -> bool:
    """Whether a process is gone, but perhaps not yet waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True
