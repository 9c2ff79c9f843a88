"""A thread of a tier's own for what takes long: one job after another, in the order they came."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

_log = logging.getLogger(__name__)


class JobThread:
    """Its thread starts with the first job, and does not keep the process from ending."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, job: Callable[..., None], *args: Any) -> bool:
        """Has a job done after all that were submitted before; False after `close`. Any thread may call."""
        with self._lock:
            if self._closed:
                return False
            if self._thread.ident is None:
                self._thread.start()
            self._jobs.put((job, args))
            return True

    def close(self) -> None:
        """Returns when all jobs are done. Closing twice does nothing."""
        with self._lock:
            self._closed = True
        if self._thread.ident is not None:
            self._jobs.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, args = item
            try:
                job(*args)
            except Exception:
                _log.exception("a job of %s failed", self._thread.name)
            del item, job, args  # the next wait may be long, and must not keep memory alive
