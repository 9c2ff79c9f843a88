"""A small load on a full NVMe tier, and what must be true after one of its steps failed.

`python -m tests.crash.steps` visits every step with every fault.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from operator import and_
from pathlib import Path

from kvstore import Client, Layout
from kvstore.client.sync import Namespace
from kvstore.errors import DeniedError, UnavailableError
from tests.crash import files
from tests.crash.book import Book
from tests.crash.shimmed import ShimmedDaemon
from tests.daemons import eventually, log_of, names, room_for, tier

BLOCK = 1000 << 10
"""Two tasks of the I/O engine, two blocks an extent."""

_TRIES, _COUNTS = 4, 3
SETTINGS = {
    "dram": {"limit": 16 << 20, "huge_pages": False},
    "nvme": {"limit": 16 << 20, "io_threads": 2},
}
SLOTS = 16
AT_ONCE = 2
"""Daemons at a time: most of a visit is waiting for a process to start."""

FAULTS = {
    "pwritev": ("torn", "kill", "EIO", "ENOSPC"),
    "fdatasync": ("kill", "EIO"),
    "commit": ("kill", "ENOSPC"),
    "apply": ("kill", "EIO"),
    "committed": ("kill",),
}
"""By step, what happens there."""


@dataclass(slots=True)
class Puts:
    """What a load was told: keys, and which of them are known to be on NVMe, or not to have got there."""

    book: Book = field(default_factory=Book)
    written: set[bytes] = field(default_factory=set)
    failed: set[bytes] = field(default_factory=set)
    denied: int = 0

    def run(self, ns: Namespace, client: Client, keys: list[bytes]) -> None:
        """Puts blocks one by one, each when the one before it has got to NVMe or failed."""
        for i, key in enumerate(keys):
            before = client.status()["counters"]
            result = ns.put([key], [self.book.put(key, BLOCK)], parent=keys[i - 1] if i else None)
            self.denied += result.denied
            if not result.stored:
                continue
            after = eventually(lambda before=before: _ended(before, client.status()["counters"]))
            good = after.get("written_blocks", 0) > before.get("written_blocks", 0)
            (self.written if good else self.failed).add(key)
            (self.failed if good else self.written).discard(key)


def _ended(before: dict[str, int], after: dict[str, int]) -> dict[str, int] | None:
    kinds = ("written_blocks", "failed_blocks")
    return after if sum(after.get(k, 0) for k in kinds) > sum(before.get(k, 0) for k in kinds) else None


def load(daemon: ShimmedDaemon, log: Path) -> tuple[Puts, Counter[str]]:
    """Runs the load until the daemon is gone; what came of it, and the steps done when the tier was full."""
    puts, full = Puts(), Counter[str]()
    old, new = names(SLOTS, "old"), names(2, "new")
    with Client(daemon.url, deadline_s=10, strict=True) as client:
        ns = client.namespace(Layout(model="steps", block_bytes=BLOCK))
        try:
            for at in range(0, SLOTS, 4):
                puts.run(ns, client, old[at : at + 4])
            full = steps_done(log)
            puts.run(ns, client, new[:1])
            _invalidate(ns, puts, old[:4])
            puts.run(ns, client, new[1:])
            puts.run(ns, client, old[:1])
        except UnavailableError:
            pass
    return puts, full


def _invalidate(ns: Namespace, puts: Puts, keys: list[bytes]) -> None:
    for key in keys:
        puts.book.invalidate(key)
    puts.written.difference_update(keys)
    try:
        ns.invalidate(keys)
    except DeniedError:
        return
    for key in keys:
        puts.book.invalidated(key)


def steps_done(log: Path) -> Counter[str]:
    """How many of each step the shim has seen."""
    return (
        Counter(line.partition(":")[0] for line in log.read_text().splitlines())
        if log.exists()
        else Counter()
    )


def all_steps() -> list[tuple[str, str]]:
    """Every step with every fault: those of a first start and put, and those with a full tier.

    How many steps there are depends on which puts share a commit: only those that all runs reach count.
    """
    full, done = map(_least, zip(*(_count() for _ in range(_COUNTS)), strict=True))
    return [
        (f"{name}:{n}", fault)
        for name, faults in FAULTS.items()
        for n in [1, 2, *range(full[name] + 1, done[name] + 1)]
        for fault in faults
    ]


def _count() -> tuple[Counter[str], Counter[str]]:
    """Returns how many of each step a run has when the tier is full, and at its end."""
    with tempfile.TemporaryDirectory(prefix="kvstore-steps-") as folder:
        log = Path(folder) / "steps"
        with ShimmedDaemon(SETTINGS, ["--log", str(log)]) as daemon:
            puts, full = load(daemon, log)
            assert len(puts.written) == SLOTS + 3 - 4
            assert not puts.failed
            return full, steps_done(log)


def _least(counts: Iterable[Counter[str]]) -> Counter[str]:
    return reduce(and_, counts)


def visit(at: str, fault: str) -> list[str]:
    """Lets one step fail, kills the daemon, restarts it without the shim: what is wrong then.

    A step that is not reached is tried again.
    """
    for _ in range(_TRIES):
        problems = _visit(at, fault)
        if problems != [_not_reached(at, fault)]:
            break
    return problems


def _not_reached(at: str, fault: str) -> str:
    return f"{fault} at {at}: the step was not reached"


def _visit(at: str, fault: str) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="kvstore-steps-") as folder:
        log = Path(folder) / "steps"
        with ShimmedDaemon(SETTINGS, ["--at", at, "--do", fault, "--log", str(log)]) as daemon:
            puts, _ = load(daemon, log)
            daemon.kill()
            if f"shim: {fault} at {at}" not in log_of(daemon):
                return [_not_reached(at, fault)]
            committed = files.records(daemon.folder / "nvme")
            daemon.options = []
            daemon.start()
            with Client(daemon.url, deadline_s=10, strict=True) as client:
                problems = _check(client, puts, committed, daemon.folder / "nvme")
            if any(word in log_of(daemon) for word in ("Traceback", "AssertionError")):
                problems.append(f"a traceback in the log: {daemon.log_tail()}")
    return [f"{fault} at {at}: {problem}" for problem in problems]


def _check(client: Client, puts: Puts, committed: list[files.Record], folder: Path) -> list[str]:
    status, problems = client.status(), []
    used, on_record = tier(status, "nvme")["used_bytes"], files.used_bytes(committed)
    if used != on_record or files.slab_bytes(folder) > SETTINGS["nvme"]["limit"]:
        problems.append(f"{used} bytes in use, {on_record} on record, {files.slab_bytes(folder)} of slabs")
    ns = client.namespace(Layout(model="steps", block_bytes=BLOCK))
    served = set()
    for key, entry in puts.book.entries.items():
        out = room_for(1, BLOCK)
        if ns.get([key], out):
            served.add(key)
            problems += filter(None, [puts.book.wrong(key, entry.floor, out[0].data)])
    recorded = {record.key for record in committed}
    if recorded - served:
        problems.append(f"{len(recorded - served)} committed blocks are not served")
    if (served | recorded) & puts.failed:
        problems.append("a block whose write failed is visible")
    lost = len(puts.written - served)
    if lost > max(0, len(puts.book.entries) - SLOTS):
        problems.append(f"{lost} blocks that were written are gone")
    counters = client.status()["counters"]
    if counters.get("quarantined_blocks", 0):
        problems.append(f"{counters['quarantined_blocks']} records did not prove their slots")
    return problems


def main() -> int:
    steps = all_steps()
    problems: list[str] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for number, found in enumerate(pool.map(visit, *zip(*steps, strict=True)), 1):
            problems += found
            if number % 10 == 0 or number == len(steps):
                print(f"{number}/{len(steps)} steps failed on purpose, {len(problems)} problems", flush=True)
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
