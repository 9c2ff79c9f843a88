"""Calls to a network backend: whose turn it is, on which thread, and whether it is worth asking at all.

Batches of blocks wait as at a device: by class and tenant, few bytes under way at a time. A backend that
fails a few times in a row is left alone, but for a look at its health now and then: so nobody who asks for
blocks ever waits to find out that it is still away.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from kvstore.core.transfers.devices import DeviceQueue
from kvstore.errors import KVStoreError
from kvstore.tiers.network.base import Backend, NetworkError, Outcome
from kvstore.tiers.network.thread_pool import ThreadPool
from kvstore.types import slot_bytes

_log = logging.getLogger(__name__)
T = TypeVar("T")

CLIENT = -1
"""Whom the core takes the network tier for: no connection has this number."""

_BATCH_BYTES = 4 << 20
_BATCH_BLOCKS = 32

FAILURES = 3
"""Calls in a row that fail before a backend is left alone."""

LOOK_EVERY_S = 5.0
"""How often its health is looked at then."""

_ASIDE_THREADS = 8
_HEALTH_WITHIN_S = 5.0


def batch_blocks(block_bytes: int) -> int:
    """Blocks in a batch: enough to be worth a call, few enough that the first ones arrive soon."""
    return min(_BATCH_BLOCKS, max(1, _BATCH_BYTES // slot_bytes(block_bytes)))


class BackendExecutor:
    """The way to one backend. `problem`: why it is left alone, empty while it is not."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        soon: Callable[..., None],
        backend: Backend,
        threads: int,
        told: Callable[[str], None],
    ) -> None:
        """`soon` has something called on the loop, from any thread; `told` hears of a change of `problem`."""
        self.backend = backend
        self.device = DeviceQueue()
        self.problem = "not asked yet"
        self._loop = loop
        self._soon = soon
        self._told = told
        self._threads = threads
        self._turns: dict[int, asyncio.Future[None]] = {}
        self._last = 0
        self._failures = 0
        self._failing = asyncio.Event()
        self._payload = ThreadPool("kvstore-network", threads)
        self._aside = ThreadPool("kvstore-network-aside", _ASIDE_THREADS)
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None

    @property
    def usable(self) -> bool:
        """Whether it is worth asking."""
        return not self.problem

    def start(self) -> None:
        """Looks at its health, and from then on whenever it is left alone."""
        self._looking = self._loop.create_task(self._look())

    async def close(self, within_s: float) -> None:
        """Ends what is under way; what takes longer is left to itself."""
        if self._looking is not None:
            self._looking.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self.problem = "closed"
        for turn in self._turns.values():
            turn.cancel()
        self._payload.close()
        self._aside.close()
        ends = self._loop.time() + within_s
        # What it holds may take long to let go of.
        closing = ThreadPool("kvstore-network-close", 1)
        closing.submit(self.backend.close)
        while self._payload.busy + self._aside.busy + closing.busy and self._loop.time() < ends:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        closing.close()

    # -- turns

    async def in_turn(
        self, tenant: int, kind: int, nbytes: int, work: Callable[[], Awaitable[tuple[T, int]]]
    ) -> T | None:
        """Does work that moves so many bytes when its turn comes, and says how many it did; None: never.

        That is when too much waits already.
        """
        self._last += 1
        number, turn = self._last, self._loop.create_future()
        if not self.device.put(self._loop.time(), tenant, kind, nbytes, number):
            return None
        self._turns[number] = turn
        self._go_on()
        await turn
        moved = 0
        try:
            value, moved = await work()
        finally:
            self.device.ended(self._loop.time(), kind, nbytes, moved)
            self._go_on()
        return value

    def _go_on(self) -> None:
        now, device = self._loop.time(), self.device
        if device.moving < self._threads:
            for number, kind, nbytes in device.next(now):
                turn = self._turns.pop(number)
                if turn.cancelled():
                    device.ended(now, kind, nbytes, 0)
                else:
                    turn.set_result(None)
                if device.moving >= self._threads:
                    break
        if self._timer is not None:
            self._timer.cancel()
        # Who is capped waits for time alone.
        ready = device.queue.ready_at(now)
        self._timer = self._loop.call_at(ready, self._go_on) if now < ready < float("inf") else None

    # -- calls

    async def move(self, call: Callable[[float], Sequence[Outcome]], within_s: float) -> list[Outcome]:
        """Runs a call that moves payload, in a turn; none at all if the backend could not be asked."""
        return await self._run(self._payload, call, within_s) or []

    async def try_move(self, call: Callable[[float], Sequence[Outcome]], within_s: float) -> list[Outcome]:
        """The same for a first try: that it takes too long says nothing of the backend."""
        try:
            return list(await self._thread(self._payload, call, within_s))
        except NetworkError:
            return []

    async def ask(self, call: Callable[[float], Sequence[Outcome]], within_s: float) -> list[Outcome]:
        """Runs a short call beside those."""
        return await self._run(self._aside, call, within_s) or []

    async def walk(self, call: Callable[[float], T], within_s: float) -> T:
        """Runs a call that has other things to say. Raises what it raises."""
        return await self._thread(self._aside, call, within_s)

    async def _run(
        self, hands: ThreadPool, call: Callable[[float], Sequence[Outcome]], within_s: float
    ) -> list[Outcome] | None:
        try:
            outcomes = list(await self._thread(hands, call, within_s))
        except NetworkError as error:
            self._failed(str(error), FAILURES if error.fatal else 1)
            return None
        except Exception as error:  # a bug of a backend must not end more than this
            _log.exception("a call to the network tier failed")
            self._failed(f"{type(error).__name__}: {error}", 1)
            return None
        if outcomes and all(outcome == Outcome.FAILED for outcome in outcomes):
            self._failed(f"{self.backend.kind} does not answer in time, or answers with errors", 1)
        elif outcomes:
            self._failures = 0
        return outcomes

    async def _thread(self, hands: ThreadPool, call: Callable[[float], T], within_s: float) -> T:
        future: asyncio.Future[T] = self._loop.create_future()
        ends = time.monotonic() + within_s

        def work() -> None:
            try:
                value = call(ends)
            except Exception as error:
                self._soon(_fail, future, error)
            else:
                self._soon(_succeed, future, value)

        hands.submit(work)
        # A call is never given up half way: until it is over, memory may be written to.
        return await asyncio.shield(future)

    # -- health

    def _failed(self, why: str, times: int) -> None:
        self._failures += times
        if self._failures >= FAILURES and not self.problem:
            self._set(why)
            self._failing.set()

    def _set(self, problem: str) -> None:
        if problem and problem != self.problem:
            _log.error("the network tier is left alone for now: %s", problem)
        self.problem = problem
        self._told(problem)

    async def _look(self) -> None:
        while True:
            problem = await self._ails()
            if problem != self.problem:
                self._set(problem)
            if not problem:
                self._failures = 0
                self._failing.clear()
                await self._failing.wait()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _ails(self) -> str:
        try:
            await self.walk(self.backend.health, _HEALTH_WITHIN_S)
        except KVStoreError as error:
            return str(error)
        except Exception as error:  # a bug of a backend must not end the looking
            _log.exception("the network tier's health can't be told")
            return f"{type(error).__name__}: {error}"
        return ""


def _succeed(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
