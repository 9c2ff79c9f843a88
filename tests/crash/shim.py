"""The real daemon, in which one step of the way to the device fails as told, or the wall clock jumps.

`python -m tests.crash.shim [--at STEP --do FAULT] [--log FILE] [--clock FILE] serve -c config.toml`

STEP is `name:n`, the n-th call of

    pwritev     writes a task of a block
    fdatasync   makes slabs durable
    commit      before a transaction of the records
    apply       within it, when a table's changes are in and the commit is not
    committed   after it
    unlink      deletes a slab

or `*`: every call of the first four while the file FAULT_FILE (--while) exists. FAULT is `kill` (SIGKILL),
`torn` (half of the bytes are written, then SIGKILL), `hang` (with --while: reads too, each step waits until
the file is gone), `slow` (with --while: reads and writes share the bytes/s in the file) or an errno such as
EIO. `--log` gets a line a step. With `--from`, steps count once that file exists.
`--clock` names a file with seconds that `time.time` is off.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lmdb


class Steps:
    """Counts steps on all threads, and fails at the one that was asked for."""

    def __init__(
        self, at: str, fault: str, log: Path | None, whenever: Path | None, since: Path | None = None
    ) -> None:
        self._at = at
        self._fault = fault
        self._log = log
        self._while = whenever
        self._since = since
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def move(self, nbytes: int) -> None:
        """Takes as long as the slow device needs for these bytes, one call after the other."""
        if self._fault != "slow" or self._while is None:
            return
        with self._lock, contextlib.suppress(FileNotFoundError, ValueError):
            time.sleep(nbytes / float(self._while.read_text()))

    def reach(self, name: str, torn: Any = None) -> None:
        """One more step of this name. Raises OSError, or does not return, if it is the one to fail.

        `torn` does half of what the step does.
        """
        if self._fault == "slow":
            return
        if self._fault == "hang":
            while self._while is not None and self._while.exists():
                time.sleep(0.001)
            return
        with self._lock:
            if self._since is not None and not self._since.exists():
                return
            self._counts[name] += 1
            step = f"{name}:{self._counts[name]}"
            if self._log is not None:
                with self._log.open("a") as log:
                    log.write(step + "\n")
            if self._while is not None and not (self._while.exists() and name != "committed"):
                return
            if step != self._at and self._while is None:
                return
            print(f"shim: {self._fault} at {step}", file=sys.stderr, flush=True)
            if self._fault == "torn":
                torn()
            if self._fault in ("kill", "torn"):
                os.kill(os.getpid(), signal.SIGKILL)
            number = getattr(errno, self._fault)
            raise OSError(number, os.strerror(number))


def _hook_device(steps: Steps) -> None:
    from kvstore import native  # noqa: PLC0415 - after the clock, which it may look at
    from kvstore.native import portable_files  # noqa: PLC0415

    # The C extension makes system calls of its own, which cannot be hooked.
    native.move_files, native.IOQueue = portable_files.move_files, native.PortableQueue
    pwritev, fdatasync = os.pwritev, os.fdatasync

    def shimmed_pwritev(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        def half() -> None:
            [buffer] = buffers
            pwritev(fd, (buffer[: max(4096, len(buffer) // 8192 * 4096)],), offset)

        steps.reach("pwritev", half)
        steps.move(sum(len(buffer) for buffer in buffers))
        return pwritev(fd, buffers, offset)

    def shimmed_fdatasync(fd: int) -> None:
        steps.reach("fdatasync")
        fdatasync(fd)

    from kvstore.errors import TierError  # noqa: PLC0415
    from kvstore.tiers.nvme.slabs import Slabs  # noqa: PLC0415

    remove = Slabs.remove

    def shimmed_remove(self: Slabs, extent: int) -> None:
        try:
            steps.reach("unlink")
        except OSError as error:
            raise TierError(f"cannot remove extent {extent}: {error.strerror}") from error
        remove(self, extent)

    Slabs.remove = shimmed_remove  # type: ignore[method-assign]
    os.pwritev, os.fdatasync = shimmed_pwritev, shimmed_fdatasync  # type: ignore[assignment]


def _hook_reads(steps: Steps) -> None:
    preadv = os.preadv

    def shimmed_preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        steps.reach("preadv")
        steps.move(sum(len(buffer) for buffer in buffers))
        return preadv(fd, buffers, offset)

    os.preadv = shimmed_preadv  # type: ignore[assignment]


def _hook_records(steps: Steps) -> None:
    from kvstore.tiers.nvme import store  # noqa: PLC0415 - after the clock, which it may look at

    commit, apply = store.RecordStore.commit, store._apply

    def reach(name: str) -> None:
        try:
            steps.reach(name)
        except OSError as error:
            raise lmdb.DiskError(f"mdb_txn_commit: {error.strerror}") from error

    def shimmed_commit(self: store.RecordStore, changes: store.Changes) -> None:
        reach("commit")
        commit(self, changes)
        reach("committed")

    def shimmed_apply(txn: Any, table: Any, items: dict[bytes, bytes | None]) -> None:
        apply(txn, table, items)
        if items:
            reach("apply")

    store.RecordStore.commit, store._apply = shimmed_commit, shimmed_apply  # type: ignore[method-assign]


def _hook_clock(off: Path) -> None:
    now = time.time
    time.time = lambda: now() + float(off.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.shim")
    parser.add_argument("--at", default="")
    parser.add_argument("--do", default="kill")
    parser.add_argument("--while", dest="whenever", type=Path)
    parser.add_argument("--from", dest="since", type=Path)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--clock", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.clock is not None:
        _hook_clock(options.clock)
    steps = Steps(options.at, options.do, options.log, options.whenever, options.since)
    _hook_device(steps)
    if options.do in ("hang", "slow"):
        _hook_reads(steps)
    _hook_records(steps)
    from kvstore.cli import app  # noqa: PLC0415 - after the hooks

    app(options.command)


if __name__ == "__main__":
    main()
