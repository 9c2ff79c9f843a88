"""Threads of tiers for slow work: one job after another, in the order of submission."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from kvstore.errors import TierError
from kvstore.tiers.base import Ended, Ready

_log = logging.getLogger(__name__)


class JobThread:
    """A daemon thread that starts with its first job."""

    def __init__(self, name: str, poll: Callable[[], bool] = lambda: False, poll_s: float = 0.0) -> None:
        """`poll` is called after each job, and every `poll_s` seconds as long as it returns True."""
        self._jobs: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._lock = threading.Lock()
        self._poll = poll
        self._poll_s = poll_s
        self.closed = False

    def submit(self, job: Callable[..., None], *args: Any) -> bool:
        """Queues a job. Returns False after `close`. Any thread may call."""
        with self._lock:
            if self.closed:
                return False
            if self._thread.ident is None:
                self._thread.start()
            self._jobs.put((job, args))
            return True

    def close(self) -> None:
        """Returns when all jobs have ended. A second call does nothing."""
        with self._lock:
            self.closed = True
        if self._thread.ident is not None:
            self._jobs.put(None)
            self._thread.join()

    def _work(self) -> None:
        polling = False
        while True:
            try:
                item = self._jobs.get(timeout=self._poll_s if polling else None)
            except Empty:
                item = (_nothing, ())
            if item is None:
                return
            job, args = item
            try:
                job(*args)
                polling = self._poll()
            except Exception:
                _log.exception("a job of %s failed", self._thread.name)
            del item, job, args  # the next wait may be long, and must not keep memory alive


class ExtentJobs(JobThread):
    """Makes, renews and removes the extents of a tier. Makes no more extents once `close` has been called."""

    def make(self, count: int, new: Callable[[], int], ready: Ready, ended: Ended) -> None:
        """Calls `new` `count` times and reports each number. Ends with the first TierError of `new`."""
        self.submit(partial(self._make, count, new), ready, ended)

    def renew(
        self,
        empty: Callable[[], None],
        new: Callable[[], int],
        ready: Ready,
        failed: Callable[[TierError], None],
    ) -> None:
        """Calls `empty`, then `new`, and reports its number, or the TierError of either."""
        self.submit(partial(self.renew_now, empty, new), ready, failed)

    def remove(self, empty: Callable[[], None], done: Ended) -> None:
        """Calls `empty` and reports its end."""
        self.submit(partial(self.remove_now, empty), done)

    def _make(self, count: int, new: Callable[[], int], ready: Ready, ended: Ended) -> None:
        for _ in range(count):
            if self.closed:
                return
            try:
                number = new()
            except TierError as error:
                ended(error)
                return
            ready(number)
        ended(None)

    def renew_now(
        self,
        empty: Callable[[], None],
        new: Callable[[], int],
        ready: Ready,
        failed: Callable[[TierError], None],
    ) -> None:
        """`renew` on the calling thread."""
        try:
            empty()
            if self.closed:
                return
            number = new()
        except TierError as error:
            failed(error)
        else:
            ready(number)

    def remove_now(self, empty: Callable[[], None], done: Ended) -> None:
        """`remove` on the calling thread."""
        try:
            empty()
        except TierError as error:
            done(error)
        else:
            done(None)


def _nothing() -> None:
    pass
