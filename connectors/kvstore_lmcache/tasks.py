"""Tasks on threads, whose ends are told by an event descriptor, as LMCache's controllers poll them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from lmcache.v1.platform import create_event_notifier

T = TypeVar("T")


class Tasks(Generic[T]):
    """Tasks of one kind. Each result is kept until it is taken. Thread-safe."""

    def __init__(self, name: str, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, f"kvstore-{name}")
        self._notifier = create_event_notifier()
        self._lock = threading.Lock()
        self._results: dict[int, T] = {}
        self._last = 0
        self._closed = False

    def fileno(self) -> int:
        """Returns the descriptor that is readable after a task has ended."""
        return int(self._notifier.fileno())

    def submit(self, work: Callable[[], T], failed: T) -> int:
        """Runs `work`, which must not raise, on a thread. Returns the number of the task.

        Its result is `failed` if it cannot be run any more.
        """
        with self._lock:
            self._last += 1
            number = self._last
        try:
            self._threads.submit(lambda: self._end(number, work()))
        except RuntimeError:  # closed
            self._end(number, failed)
        return number

    def take(self, number: int) -> T | None:
        """Returns the result of a task once, None before its end."""
        with self._lock:
            return self._results.pop(number, None)

    def take_all(self) -> dict[int, T]:
        """Returns all results that have not been taken, by the number of the task."""
        with self._lock:
            results, self._results = self._results, {}
        return results

    def close(self) -> None:
        """Waits for running tasks, drops those that wait, and closes the descriptor."""
        self._threads.shutdown(cancel_futures=True)
        with self._lock:
            if not self._closed:
                self._closed = True
                self._notifier.close()

    def _end(self, number: int, result: T) -> None:
        with self._lock:
            self._results[number] = result
            if not self._closed:
                self._notifier.notify()
