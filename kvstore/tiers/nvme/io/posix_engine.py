"""Moves blocks between memory and files by `preadv` and `pwritev`, on a few threads.

A block is cut into tasks, so that a large block has several requests at the device and a small block behind
it starts soon. Tasks wait in two queues, urgent and not. System calls release the GIL.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeAlias

from kvstore.cuda.device import DeviceBuffer
from kvstore.errors import MisuseError, TierError
from kvstore.tiers.base import OTHERS_EVERY, BlockIO
from kvstore.types import ALIGN

_log = logging.getLogger(__name__)


class PosixEngine:
    """An `IOEngine` for any file. One system call moves at most `task_bytes`."""

    name = "posix"
    device_memory = False

    def __init__(self, threads: int = 4, task_bytes: int = 512 << 10, queue_tasks: int = 1 << 14) -> None:
        """Starts the threads. Refuses a batch if its queue would exceed `queue_tasks`."""
        if threads < 1 or task_bytes < ALIGN or task_bytes % ALIGN:
            raise MisuseError(f"{threads} threads, {task_bytes} bytes a task", f"multiples of {ALIGN} bytes")
        self._task_bytes = task_bytes
        self._queue_tasks = queue_tasks
        self._queues: tuple[deque[_Task], deque[_Task]] = deque(), deque()  # the second one is urgent
        self._tokens: SimpleQueue[bool] = SimpleQueue()  # one a task, then False for each thread
        self._choosing = threading.Lock()
        self._passed_over = 0
        self._submitting = threading.Lock()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"kvstore-io-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, ios: Sequence[BlockIO], done: Callable[[list[OSError | None]], None], urgent: bool = False
    ) -> None:
        """See `IOEngine.submit`."""
        for io in ios:
            io.check()
        step = self._task_bytes
        queue, batch = self._queues[urgent], _Batch(len(ios), done)
        tasks: list[_Task] = [
            (batch, i, io, start, min(start + step, len(io.buffer)))
            for i, io in enumerate(ios)
            for start in range(0, len(io.buffer), step)
        ]
        with self._submitting:
            if self._closed:
                raise TierError("the I/O engine is closed")
            if len(queue) + len(tasks) > self._queue_tasks:
                batch.errors = [OSError(errno.EAGAIN, "too much waits for the device") for _ in ios]
                tasks = []
            tasks = tasks or [(batch, 0, None, 0, 0)]
            batch.tasks_left = len(tasks)
            for task in tasks:
                queue.append(task)
                self._tokens.put(True)

    def _move(self, io: BlockIO, start: int, stop: int) -> None:
        """Moves bytes `start` to `stop` of a block. Raises OSError."""
        _move(io, start, stop)

    def release(self, fd: int) -> None:
        """See `IOEngine.release`. There is no state to free."""

    def register(self, buffer: DeviceBuffer) -> None:
        """See `IOEngine.register`. Has no effect."""

    def unregister(self, buffer: DeviceBuffer) -> None:
        """See `IOEngine.unregister`."""

    def close(self) -> None:
        """See `IOEngine.close`."""
        with self._submitting:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._tokens.put(False)
        for thread in self._threads:
            thread.join()

    def _next(self) -> _Task:
        """Returns the next task. The caller has taken a token for it."""
        others, urgent = self._queues
        with self._choosing:
            if urgent and others:
                self._passed_over = (self._passed_over + 1) % OTHERS_EVERY
                return urgent.popleft() if self._passed_over else others.popleft()
            return (urgent or others).popleft()

    def _work(self) -> None:
        while self._tokens.get():
            task = self._next()
            batch, index, io, start, stop = task
            if io is not None and batch.errors[index] is None:
                try:
                    self._move(io, start, stop)
                except OSError as error:
                    batch.errors[index] = error.with_traceback(None)  # its frames hold the buffers
                except Exception as error:
                    batch.errors[index] = OSError(errno.EINVAL, repr(error))
            batch.end_task()
            del task, batch, io  # the next wait may be long, and must not keep buffers alive


class _Batch:
    """The outcomes of one `submit`."""

    __slots__ = ("done", "errors", "lock", "tasks_left")

    def __init__(self, blocks: int, done: Callable[[list[OSError | None]], None]) -> None:
        self.errors: list[OSError | None] = [None] * blocks
        self.done = done
        self.lock = threading.Lock()
        self.tasks_left = 0

    def end_task(self) -> None:
        with self.lock:
            self.tasks_left -= 1
            if self.tasks_left:
                return
        try:
            self.done(self.errors)
        except Exception:
            _log.exception("a completion callback failed")


_Task: TypeAlias = tuple[_Batch, int, BlockIO | None, int, int]


def _move(io: BlockIO, start: int, stop: int) -> None:
    """Moves bytes `start` to `stop` of a block. Raises OSError. Python retries EINTR."""
    call: Callable[..., int] = os.pwritev if io.write else os.preadv
    while start < stop:
        try:
            moved = call(io.fd, (io.buffer[start:stop],), io.offset + start)
        except OSError as error:
            # Direct I/O ends short and unaligned only at the end of a file, and then fails with EINVAL.
            if error.errno != errno.EINVAL or start % ALIGN == 0:
                raise
            moved = 0
        if moved == 0:
            raise OSError(errno.EIO, f"the file ends at {io.offset + start}")
        start += moved
