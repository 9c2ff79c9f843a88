"""Moves blocks between memory and files on a few threads, by io_uring where the kernel lets them.

A large block is cut into pieces, so that the device has several requests and a small block behind it starts
soon. A task is a list of pieces for one thread. `move_files` gives the device all of them at once. Tasks
wait in two queues, urgent and not.
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

from kvstore import native
from kvstore.cuda.device import DeviceBuffer
from kvstore.errors import MisuseError, TierError
from kvstore.tiers.base import OTHERS_EVERY, BlockIO
from kvstore.types import ALIGN

_log = logging.getLogger(__name__)

_MOST_PIECES = 64  # of a task, which delays urgent ones
_FEW_PIECES, _FEW_BYTES = 4, 128 << 10  # of a task: waking another thread takes longer than moving so little

Piece: TypeAlias = tuple[int, BlockIO, int, int]
"""The number of an I/O in its batch, the I/O, and where in its buffer the piece starts and ends."""


class PosixEngine:
    """An `IOEngine` for any file. A task moves at most `task_bytes`."""

    device_memory = False

    def __init__(self, threads: int = 4, task_bytes: int = 512 << 10, queue_pieces: int = 1 << 14) -> None:
        """Starts the threads. Refuses a batch if `queue_pieces` pieces of its urgency would wait."""
        if threads < 1 or task_bytes < ALIGN or task_bytes % ALIGN:
            raise MisuseError(f"{threads} threads, {task_bytes} bytes a task", f"multiples of {ALIGN} bytes")
        self.name = "posix" if native.why_no_io_uring() else "posix, io_uring"
        self._task_bytes = task_bytes
        self._queue_pieces = queue_pieces
        self._queues: tuple[deque[_Task], deque[_Task]] = deque(), deque()  # the second one is urgent
        self._waiting = [0, 0]  # pieces in each queue
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
        step, batch = self._task_bytes, _Batch(len(ios), done)
        pieces = [
            (i, io, start, min(start + step, len(io.buffer)))
            for i, io in enumerate(ios)
            for start in range(0, len(io.buffer), step)
        ]
        with self._submitting:
            if self._closed:
                raise TierError("the I/O engine is closed")
            if self._waiting[urgent] + len(pieces) > self._queue_pieces:
                batch.errors = [OSError(errno.EAGAIN, "too much waits for the device") for _ in ios]
                pieces = []
            tasks = self._tasks(pieces) or [[]]
            batch.tasks_left = len(tasks)
            with self._choosing:
                self._waiting[urgent] += len(pieces)
                self._queues[urgent].extend((batch, task) for task in tasks)
            for _ in tasks:
                self._tokens.put(True)

    def _tasks(self, pieces: list[Piece]) -> list[list[Piece]]:
        """Divides pieces among the threads, in order."""
        total = sum(stop - start for _, _, start, stop in pieces)
        threads = len(self._threads)
        most_bytes = min(self._task_bytes, max(-(-total // threads), _FEW_BYTES))
        most_pieces = min(_MOST_PIECES, max(-(-len(pieces) // threads), _FEW_PIECES))
        tasks: list[list[Piece]] = []
        room = 0
        for piece in pieces:
            size = piece[3] - piece[2]
            if size > room or len(tasks[-1]) == most_pieces:
                tasks.append([])
                room = max(most_bytes, size)
            tasks[-1].append(piece)
            room -= size
        return tasks

    def _move(self, pieces: list[Piece]) -> list[OSError | None]:
        """Moves pieces. Returns one outcome a piece."""
        outcomes = native.move_files(
            [(io.fd, io.offset + start, io.buffer[start:stop], io.write) for _, io, start, stop in pieces]
        )
        return [
            _error(outcome, piece) if outcome else None
            for outcome, piece in zip(outcomes, pieces, strict=True)
        ]

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
            takes_urgent = bool(urgent)
            if urgent and others:
                self._passed_over = (self._passed_over + 1) % OTHERS_EVERY
                takes_urgent = bool(self._passed_over)
            task = self._queues[takes_urgent].popleft()
            self._waiting[takes_urgent] -= len(task[1])
            return task

    def _work(self) -> None:
        while self._tokens.get():
            batch, pieces = self._next()
            batch.run(self._move, pieces)
            del batch, pieces  # the next wait may be long, and must not keep buffers alive


class _Batch:
    """The outcomes of one `submit`."""

    __slots__ = ("done", "errors", "lock", "tasks_left")

    def __init__(self, blocks: int, done: Callable[[list[OSError | None]], None]) -> None:
        self.errors: list[OSError | None] = [None] * blocks
        self.done = done
        self.lock = threading.Lock()
        self.tasks_left = 0

    def run(self, move: Callable[[list[Piece]], list[OSError | None]], pieces: list[Piece]) -> None:
        """Moves pieces of I/Os that have not failed. Ends a task."""
        pieces = [piece for piece in pieces if self.errors[piece[0]] is None]
        try:
            outcomes = move(pieces) if pieces else []
        except Exception as error:
            outcomes = [OSError(errno.EINVAL, repr(error))] * len(pieces)
        for (index, *_), outcome in zip(pieces, outcomes, strict=True):
            if outcome is not None:  # other threads have other pieces of the same I/O
                self.errors[index] = outcome
        with self.lock:
            self.tasks_left -= 1
            if self.tasks_left:
                return
        try:
            self.done(self.errors)
        except Exception:
            _log.exception("a completion callback failed")


_Task: TypeAlias = tuple[_Batch, list[Piece]]


def _error(outcome: int, piece: Piece) -> OSError:
    _, io, _, stop = piece
    if outcome == native.END_OF_FILE:
        return OSError(errno.EIO, f"the file ends before {io.offset + stop}")
    return OSError(outcome, os.strerror(outcome))
