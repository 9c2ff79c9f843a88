"""A thread pool for calls that may hang. Their callers never hang.

A caller waits until its deadline. A thread works in memory of its own and accesses the caller's memory only
within `Call.touching`, which fails once the caller has gone. A job that has not started is dropped with its
caller, so no jobs pile up behind threads that hang.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

from kvstore.tiers.network.base import NetworkError

_log = logging.getLogger(__name__)

T = TypeVar("T")


class CallAbandoned(Exception):
    """The caller has gone. Its memory must not be touched."""


class ScratchBuffer:
    """One thread's page-aligned memory for one block at a time. Grows to the largest block."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        """Returns memory with undefined contents, valid until the next call."""
        if len(self._memory) < nbytes:
            self._memory = memoryview(mmap.mmap(-1, nbytes))
        return self._memory[:nbytes]


class Call(Generic[T]):
    """The jobs that one caller waits for. `results` has `late` for jobs that have not ended in time."""

    def __init__(self, jobs: Sequence[Job[T]], late: T) -> None:
        self.results = [late] * len(jobs)
        self.error: NetworkError | None = None
        self._jobs = jobs
        self._next = 0
        self._left = len(jobs)
        self._touching = 0
        self._over = False
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def touching(self) -> Iterator[None]:
        """Allows access to the caller's memory. The caller waits for it, so it must be short.

        Raises CallAbandoned if the caller has gone.
        """
        with self._changed:
            if self._over:
                raise CallAbandoned
            self._touching += 1
        try:
            yield
        finally:
            with self._changed:
                self._touching -= 1
                self._changed.notify_all()

    def check(self) -> None:
        """Raises CallAbandoned if the caller has gone."""
        if self._over:
            raise CallAbandoned

    def take(self) -> tuple[int, bool]:
        """Returns the index of the next job, and whether there are more."""
        self._next += 1
        return self._next - 1, self._next < len(self._jobs)

    def do(self, index: int, scratch: ScratchBuffer) -> None:
        """Runs one job on a thread of the pool."""
        if self._over:
            return
        try:
            result = self._jobs[index](self, scratch)
        except CallAbandoned:
            return
        except NetworkError as error:
            self.end(error.with_traceback(None))
            return
        except Exception:
            _log.exception("a job of the network tier failed")
            result = self.results[index]
        with self._changed:
            if not self._over:
                self.results[index] = result
                self._left -= 1
                self._changed.notify_all()

    def end(self, error: NetworkError | None = None) -> None:
        """Ends the wait of the caller, which raises `error` if given."""
        with self._changed:
            if not self._over:
                self._over, self.error = True, error
                self._changed.notify_all()

    def wait(self, ends: float) -> None:
        """Waits for all jobs until `ends`. No thread touches the caller's memory afterwards."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or not self._left, max(0.0, ends - time.monotonic()))
            self._over = True
            self._changed.wait_for(lambda: not self._touching)


Job: TypeAlias = Callable[[Call[T], ScratchBuffer], T]


class CallPool:
    """Daemon threads, which take one job of each call in turn."""

    def __init__(self, name: str, threads: int) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Call[Any]] = deque()
        self._calls: set[Call[Any]] = set()
        self._closed = False
        for i in range(threads):
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True).start()

    def run(self, jobs: Sequence[Job[T]], ends: float, late: T) -> list[T]:
        """Returns each job's result, `late` for jobs that failed or did not end by `ends`.

        Raises the NetworkError that a job raises.
        """
        call = Call(jobs, late)
        if not jobs or time.monotonic() >= ends or not self._begin(call):
            return call.results
        try:
            call.wait(ends)
        finally:
            call.end()
            self._forget(call)
        if call.error is not None:
            try:
                raise call.error
            finally:
                del call  # the failure refers to this frame: a cycle would keep the caller's memory alive
        return call.results

    def close(self) -> None:
        """Ends all calls now. Each thread ends after its current job."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            for call in self._calls:
                call.end()
            self._changed.notify_all()

    def _begin(self, call: Call[T]) -> bool:
        with self._changed:
            if not self._closed:
                self._waiting.append(call)
                self._calls.add(call)
                self._changed.notify(len(call.results))
            return not self._closed

    def _forget(self, call: Call[T]) -> None:
        with self._changed:
            self._calls.discard(call)
            with contextlib.suppress(ValueError):
                self._waiting.remove(call)

    def _work(self) -> None:
        scratch = ScratchBuffer()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                call = self._waiting.popleft()
                index, more = call.take()
                if more:
                    self._waiting.append(call)
            call.do(index, scratch)
            del call  # so that the next wait does not keep the caller's memory alive
