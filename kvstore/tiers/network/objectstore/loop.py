"""An event loop on a thread of its own, which runs coroutines with a deadline for other threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_GRACE_S = 0.03
"""Time that a caller waits beyond its deadline for cancelled coroutines."""


class Loop:
    """Runs coroutines for threads that wait. Thread-safe. Never touches a caller's memory."""

    def __init__(self, at_once: int) -> None:
        """Starts the thread. `at_once` coroutines of one call run concurrently."""
        self._at_once = at_once
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="kvstore-objects", daemon=True)
        self._thread.start()

    def each(
        self, job: Callable[[Item], Awaitable[Result]], items: Sequence[Item], ends: float
    ) -> list[Result | BaseException]:
        """Returns the job's result or exception for each item, TimeoutError for those late at `ends`."""
        late: list[Result | BaseException] = [TimeoutError() for _ in items]
        with self._lock:
            if self._closed or not items or time.monotonic() >= ends:
                return late
            future = asyncio.run_coroutine_threadsafe(self._each(job, items, ends), self._loop)
        try:
            return future.result(max(0.0, ends - time.monotonic()) + _GRACE_S)
        except (TimeoutError, concurrent.futures.CancelledError):
            future.cancel()
            return late

    def close(self) -> None:
        """Ends all calls. Closing twice does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)

    async def _each(
        self, job: Callable[[Item], Awaitable[Result]], items: Sequence[Item], ends: float
    ) -> list[Result | BaseException]:
        permits = asyncio.Semaphore(self._at_once)

        async def run(item: Item) -> Result:
            async with permits:
                return await job(item)

        tasks = [asyncio.create_task(run(item)) for item in items]
        try:
            await asyncio.wait(tasks, timeout=max(0.0, ends - time.monotonic()))
        finally:
            for task in tasks:
                task.cancel()
        return [_answer(task) for task in tasks]

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()


def _answer(task: asyncio.Task[Result]) -> Result | BaseException:
    if not task.done() or task.cancelled():
        return TimeoutError()
    return task.exception() or task.result()
