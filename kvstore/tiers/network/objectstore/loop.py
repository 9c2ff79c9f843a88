"""An event loop on a thread of its own, where many calls are made at once and all end in time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

Thing = TypeVar("Thing")
Got = TypeVar("Got")

_GRACE_S = 0.03
"""How long after a call's end its cancelled parts are waited for."""


class Loop:
    """Runs coroutines for threads that wait. Any number of threads may call at once.

    A result belongs to the caller's thread: nothing here touches a caller's memory.
    """

    def __init__(self, at_once: int) -> None:
        """Starts the thread. Of one call, `at_once` coroutines run at the same time."""
        self._at_once = at_once
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="kvstore-objects", daemon=True)
        self._thread.start()

    def each(
        self, job: Callable[[Thing], Awaitable[Got]], things: Sequence[Thing], ends: float
    ) -> list[Got | BaseException]:
        """What the job made of each thing by `ends`, or why it made nothing: TimeoutError if time was up."""
        late: list[Got | BaseException] = [TimeoutError() for _ in things]
        with self._lock:
            if self._closed or not things or time.monotonic() >= ends:
                return late
            future = asyncio.run_coroutine_threadsafe(self._each(job, things, ends), self._loop)
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
        self, job: Callable[[Thing], Awaitable[Got]], things: Sequence[Thing], ends: float
    ) -> list[Got | BaseException]:
        turns = asyncio.Semaphore(self._at_once)

        async def one(thing: Thing) -> Got:
            async with turns:
                return await job(thing)

        tasks = [asyncio.create_task(one(thing)) for thing in things]
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


def _answer(task: asyncio.Task[Got]) -> Got | BaseException:
    if not task.done() or task.cancelled():
        return TimeoutError()
    return task.exception() or task.result()
