"""Moves blocks between memory and files on a few threads, by io_uring where the kernel lets them.

The threads are in a call of the queue, without the GIL, until a batch has ended. A large block is cut into
pieces, so that the device has several requests and a small block behind it starts soon.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Sequence

from kvstore import native
from kvstore.cuda.device import DeviceBuffer
from kvstore.errors import MisuseError, TierError
from kvstore.tiers.base import OTHERS_EVERY, BlockIO
from kvstore.types import ALIGN

_log = logging.getLogger(__name__)


class PosixEngine:
    """An `IOEngine` for any file. A task moves at most `task_bytes`."""

    device_memory = False

    def __init__(self, threads: int = 4, task_bytes: int = 512 << 10, queue_pieces: int = 1 << 14) -> None:
        """Starts the threads. Refuses a batch if more than `queue_pieces` of its urgency would wait."""
        if threads < 1 or task_bytes < ALIGN or task_bytes % ALIGN:
            raise MisuseError(f"{threads} threads, {task_bytes} bytes a task", f"multiples of {ALIGN} bytes")
        refused = native.why_no_io_uring()
        self.name = f"posix, without io_uring ({refused})" if refused else "posix, io_uring"
        self._queue = self._make_queue(threads, task_bytes, queue_pieces)
        self._threads = [
            threading.Thread(target=self._work, name=f"kvstore-io-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _make_queue(self, threads: int, task_bytes: int, queue_pieces: int) -> native.PortableQueue:
        return native.IOQueue(threads, task_bytes, queue_pieces, OTHERS_EVERY)

    def submit(
        self, ios: Sequence[BlockIO], done: Callable[[list[OSError | None]], None], urgent: bool = False
    ) -> None:
        """See `IOEngine.submit`."""
        for io in ios:
            io.check()
        transfers = [(io.fd, io.offset, io.buffer, io.write) for io in ios]
        if not self._queue.submit(transfers, (ios, done), urgent):
            raise TierError("the I/O engine is closed")

    def release(self, fd: int) -> None:
        """See `IOEngine.release`. There is no state to free."""

    def register(self, buffer: DeviceBuffer) -> None:
        """See `IOEngine.register`. Has no effect."""

    def unregister(self, buffer: DeviceBuffer) -> None:
        """See `IOEngine.unregister`."""

    def close(self) -> None:
        """See `IOEngine.close`."""
        self._queue.close()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (ended := self._queue.next()) is not None:
            (ios, done), failures = ended
            errors: list[OSError | None] = [None] * len(ios)
            for number, outcome in failures:
                errors[number] = _error(outcome, ios[number])
            try:
                done(errors)
            except Exception:
                _log.exception("a completion callback failed")
            del ended, ios, done, errors  # the next wait may be long, and must not keep buffers alive


def _error(outcome: native.Outcome, io: BlockIO) -> OSError:
    if isinstance(outcome, OSError):
        return outcome
    if outcome == native.END_OF_FILE:
        return OSError(errno.EIO, f"the file ends before {io.offset + len(io.buffer)}")
    if outcome == errno.EAGAIN:
        return OSError(errno.EAGAIN, "too much waits for the device")
    return OSError(outcome, os.strerror(outcome))
