"""Simulated time: one heap of callbacks, and processes that see it as their event loop.

A process that is killed never runs again: whatever it had scheduled is dropped.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
from collections.abc import Callable
from typing import Any

MICRO = 1e-6


class Timer:
    """A callback that waits for its time. What asyncio calls a TimerHandle."""

    __slots__ = ("args", "call", "context", "owner", "time")

    def __init__(self, time: float, owner: Process, call: Any, args: Any, context: Any) -> None:
        self.time = time
        self.owner = owner
        self.call = call
        self.args = args
        self.context = context

    def cancel(self) -> None:
        self.call = None
        self.args = ()

    def cancelled(self) -> bool:
        return self.call is None

    def when(self) -> float:
        return self.time


class Loop:
    """The heap. `log` is told of every step."""

    def __init__(self, dice: random.Random, log: Callable[[str], None]) -> None:
        self.now = 1000.0
        self.dice = dice
        self.steps = 0
        self.steps_at_once = 0  # since time went on
        self.log = log
        self._heap: list[tuple[float, int, Timer]] = []
        self._last = 0

    def at(self, time: float, owner: Process, call: Any, args: Any = (), context: Any = None) -> Timer:
        """Calls at that time, or now if it has passed; of one time, first come first called."""
        timer = Timer(max(time, self.now), owner, call, args, context)
        self._last += 1
        heapq.heappush(self._heap, (timer.time, self._last, timer))
        return timer

    @property
    def waiting(self) -> bool:
        """Whether anything is to come."""
        return bool(self._heap)

    def clear(self) -> None:
        """Nothing is to come."""
        self._heap.clear()

    def step(self, until: float = float("inf")) -> bool:
        """Runs the next callback; False if there is none up to `until`."""
        while self._heap and self._heap[0][0] <= until:
            _, _, timer = heapq.heappop(self._heap)
            if timer.call is None or not timer.owner.alive:
                continue
            self.steps_at_once = self.steps_at_once + 1 if timer.time == self.now else 0
            self.now = timer.time
            self.steps += 1
            call = timer.call
            self.log(f"{timer.owner.name}: {getattr(call, '__qualname__', type(call).__name__)}")
            asyncio._set_running_loop(timer.owner)
            try:
                if timer.context is None:
                    call(*timer.args)
                else:
                    timer.context.run(call, *timer.args)
            finally:
                asyncio._set_running_loop(None)
            return True
        return False


class Process(asyncio.AbstractEventLoop):
    """The event loop of one process, and its threads: what runs there runs a little later."""

    def __init__(self, loop: Loop, name: str) -> None:
        self.loop = loop
        self.name = name
        self.alive = True
        self.complaints: list[str] = []
        self._soonest = 0.0

    def kill(self) -> None:
        """Nothing of it runs from now on."""
        self.alive = False

    # -- time and callbacks

    def time(self) -> float:
        return self.loop.now

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.loop.at(self.loop.now, self, callback, args, context)

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.loop.at(self.loop.now + delay, self, callback, args, context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.loop.at(when, self, callback, args, context)

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
        # In the order of the calls, as a real loop has it, but some time later.
        self._soonest = max(self._soonest, self.loop.now + self.delay())
        return self.loop.at(self._soonest, self, callback, args, context)

    def delay(self) -> float:
        """How long a thread takes to notice something: usually little."""
        dice = self.loop.dice
        return dice.uniform(1, 50) * MICRO if dice.random() < 0.9 else dice.uniform(0.1, 20) * 1e-3

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()

        def begin() -> None:
            if not future.cancelled():
                self.call_later(self.delay(), work)

        def work() -> None:
            if future.cancelled():
                self.complaints.append("a call has ended, and its copy goes on")
            try:
                settle, value = _result, func(*args)
            except Exception as error:
                settle, value = _error, error
            self.call_soon_threadsafe(settle, future, value)

        self.call_later(self.delay(), begin)
        return future

    # -- what tasks need

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> Any:
        return asyncio.Task(coro, loop=self, name=name, context=context or contextvars.Context())

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return not self.alive

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.alive and "exception" in context:
            self.complaints.append(f"{context.get('message')}: {context['exception']!r}")


def _result(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _error(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
