"""Calls to a network backend: queueing, threads and a circuit breaker.

Batches of blocks wait in a device queue: by class of work and tenant, with few bytes under way at a time.
After three failed calls in a row the backend is not used, apart from a health check every 5 s. So no request
for blocks waits for a backend that is known to be down.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from kvstore.core.queues.device_queue import DeviceQueue
from kvstore.daemon.runtime.executor import Executor
from kvstore.errors import KVStoreError
from kvstore.tiers.network.base import Backend, NetworkError, Outcome
from kvstore.tiers.network.thread_pool import ThreadPool
from kvstore.types import slot_bytes

_log = logging.getLogger(__name__)
T = TypeVar("T")
Call: TypeAlias = Callable[[float], Sequence[Outcome]]
"""A call of a backend that ends by a time (`time.monotonic`, s)."""

_BATCH_BYTES = 4 << 20
_BATCH_BLOCKS = 64

_FAILURES_TO_OPEN = 3
"""Failed calls in a row after which a backend is not used."""

HEALTH_CHECK_EVERY_S = 5.0
"""Time between health checks of a backend that is not used."""

_CONTROL_THREADS = 8
_UNCHECKED = "not checked yet"
_HEALTH_WITHIN_S = 5.0


def batch_blocks(block_bytes: int) -> int:
    """Returns the blocks per batch: enough to be worth a call, few enough for the first to arrive soon."""
    return min(_BATCH_BLOCKS, max(1, _BATCH_BYTES // slot_bytes(block_bytes)))


class BackendExecutor:
    """Runs calls of one backend. `problem` says why the backend is not used; it is empty while it is used.

    `counters` count blocks by operation and outcome, for the status.
    """

    def __init__(
        self,
        core: Executor,
        backend: Backend,
        threads: int,
        timeout_s: float,
        health_changed: Callable[[str], None],
    ) -> None:
        """`timeout_s` bounds callers' calls. `health_changed` is called with every new value of `problem`."""
        self.backend = backend
        self.timeout_s = timeout_s
        self.counters: Counter[str] = Counter()
        self.device = DeviceQueue()
        self.problem = _UNCHECKED
        self._core = core
        self._loop = core.loop
        self._health_changed = health_changed
        self._threads = threads
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._last_number = 0
        self._failures = 0
        self._failing = asyncio.Event()
        self._transfers = ThreadPool("kvstore-network", threads)
        self._control = ThreadPool("kvstore-network-aside", _CONTROL_THREADS)
        self._timer: asyncio.TimerHandle | None = None
        self._health_task: asyncio.Task[None] | None = None

    @property
    def usable(self) -> bool:
        """Whether calls are made."""
        return not self.problem

    @property
    def checked(self) -> bool:
        """Whether the first health check has ended."""
        return self.problem != _UNCHECKED

    def start(self) -> None:
        """Starts the health checks: one now, and more whenever the backend is not used."""
        self._health_task = self._loop.create_task(self._watch_health())

    async def close(self, within_s: float) -> None:
        """Closes the backend. Waits up to `within_s` for calls under way, and abandons the rest."""
        if self._health_task is not None:
            self._health_task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self.problem = "closed"
        for started in self._waiting.values():
            started.cancel()
        self._transfers.close()
        self._control.close()
        ends = self._loop.time() + within_s
        # A backend may take long to close its connections.
        closing = ThreadPool("kvstore-network-close", 1)
        closing.submit(self.backend.close)
        while self._transfers.busy + self._control.busy + closing.busy and self._loop.time() < ends:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        closing.close()

    # -- queueing

    async def schedule(
        self, tenant: int, kind: int, nbytes: int, work: Callable[[], Awaitable[tuple[T, int]]]
    ) -> T | None:
        """Runs work that moves `nbytes` when the queue starts it. Returns None, without running it, if the
        queue is full.

        `work` returns a value and the bytes that it moved.
        """
        self._last_number += 1
        number, started = self._last_number, self._loop.create_future()
        if not self.device.put(self._loop.time(), tenant, kind, nbytes, number):
            return None
        self._waiting[number] = started
        self._start_next()
        await started
        moved = 0
        try:
            value, moved = await work()
        finally:
            self.device.ended(self._loop.time(), kind, nbytes, moved)
            self._start_next()
        return value

    def _start_next(self) -> None:
        now, device = self._loop.time(), self.device
        if device.moving < self._threads:
            for number, kind, nbytes in device.next(now):
                started = self._waiting.pop(number)
                if started.cancelled():
                    device.ended(now, kind, nbytes, 0)
                else:
                    started.set_result(None)
                if device.moving >= self._threads:
                    break
        if self._timer is not None:
            self._timer.cancel()
        # Only a tenant at its bandwidth cap waits for a time rather than for the end of other work.
        ready = device.queue.ready_at(now)
        self._timer = self._loop.call_at(ready, self._start_next) if now < ready < float("inf") else None

    # -- calls

    async def transfer(self, call: Call, within_s: float) -> list[Outcome]:
        """Runs a call that moves payload. Returns an empty list if the backend as a whole failed."""
        return await self._run(self._transfers, call, within_s)

    async def try_transfer(self, call: Call, within_s: float) -> list[Outcome]:
        """Like `transfer`, for a first try with a short deadline: its failure does not count."""
        try:
            return list(await self._thread(self._transfers, call, within_s))
        except NetworkError:
            return []

    async def call(self, call: Call, within_s: float) -> list[Outcome]:
        """Runs a short call without payload. Transfers do not delay it."""
        return await self._run(self._control, call, within_s)

    async def run(self, call: Callable[[float], T], within_s: float) -> T:
        """Runs a call that has other results than outcomes. Raises what the call raises."""
        return await self._thread(self._control, call, within_s)

    async def _run(self, pool: ThreadPool, call: Call, within_s: float) -> list[Outcome]:
        try:
            outcomes = list(await self._thread(pool, call, within_s))
        except NetworkError as error:
            self._failed(str(error), _FAILURES_TO_OPEN if error.fatal else 1)
            return []
        except Exception as error:  # a bug in a backend must not end the task
            _log.exception("a call to the network tier failed")
            self._failed(f"{type(error).__name__}: {error}", 1)
            return []
        if outcomes and all(outcome == Outcome.FAILED for outcome in outcomes):
            self._failed(f"{self.backend.kind} does not answer in time, or answers with errors", 1)
        elif outcomes:
            self._failures = 0
        return outcomes

    async def _thread(self, pool: ThreadPool, call: Callable[[float], T], within_s: float) -> T:
        future: asyncio.Future[T] = self._loop.create_future()
        ends = time.monotonic() + within_s

        def work() -> None:
            try:
                value = call(ends)
            except Exception as error:
                self._core.post(_fail, future, error)
            else:
                self._core.post(_succeed, future, value)

        pool.submit(work)
        try:
            # Cancelling the task must not free memory that the running call still writes to.
            return await asyncio.shield(future)
        finally:
            if future.done():
                # A failure refers to this frame. Without this cycle, the memory of the call is freed now.
                del future

    # -- health

    def _failed(self, problem: str, failures: int) -> None:
        self._failures += failures
        if self._failures >= _FAILURES_TO_OPEN and not self.problem:
            self._set_problem(problem)
            self._failing.set()

    def _set_problem(self, problem: str) -> None:
        if problem and problem != self.problem:
            _log.error("the network tier is not used for now: %s", problem)
        self.problem = problem
        self._health_changed(problem)

    async def _watch_health(self) -> None:
        while True:
            problem = await self._check_health()
            if problem != self.problem:
                self._set_problem(problem)
            if not problem:
                self._failures = 0
                self._failing.clear()
                await self._failing.wait()
            await asyncio.sleep(HEALTH_CHECK_EVERY_S)

    async def _check_health(self) -> str:
        """Returns the backend's problem, empty if it is healthy."""
        try:
            await self.run(self.backend.health, _HEALTH_WITHIN_S)
        except KVStoreError as error:
            return str(error)
        except Exception as error:  # a bug in a backend must not end the health checks
            _log.exception("the network tier's health check failed")
            return f"{type(error).__name__}: {error}"
        return ""


def _succeed(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
