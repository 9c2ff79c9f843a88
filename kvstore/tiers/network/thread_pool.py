"""A pool of daemon threads for calls that may take long. They do not keep the process from ending."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

_log = logging.getLogger(__name__)


class ThreadPool:
    """Up to `count` threads, started when needed. Jobs start in order."""

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._busy = 0
        self._closed = False

    def submit(self, job: Callable[[], None]) -> None:
        """Queues a job. Does nothing after `close`. Any thread may call."""
        with self._lock:
            if self._closed:
                return
            self._busy += 1
            if self._busy > self._threads < self._count:
                self._threads += 1
                name = f"{self._name}-{self._threads}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
            self._jobs.put(job)

    @property
    def busy(self) -> int:
        """Jobs that wait or run."""
        return self._busy

    def close(self) -> None:
        """Accepts no more jobs. Threads end after the submitted jobs. Does not wait."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in range(self._threads):
                    self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                _log.exception("a job of %s failed", self._name)
            del job  # so that the next wait does not keep memory alive
            with self._lock:
                self._busy -= 1
