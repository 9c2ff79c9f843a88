"""Sends events to the placement core and executes the actions that come back.

Everything runs on the event loop's thread. Other threads call `post`. Each type of action has one function,
registered with `on`. Which block is copied where is not covered here: the core decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Any

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.placement import Placement
from kvstore.daemon.runtime.ports import Requester
from kvstore.errors import TierError

_log = logging.getLogger(__name__)


class PendingRequests:
    """Numbers requests. Passes each answer to its requester, under the requester's own number."""

    def __init__(self) -> None:
        self._requesters: dict[int, tuple[Requester, int]] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._requesters)

    def add(self, requester: Requester, request: int) -> int:
        """Returns a new number for a request."""
        self._last += 1
        self._requesters[self._last] = (requester, request)
        return self._last

    def forget(self, requester: Requester) -> None:
        """Drops a requester's answers that have not come."""
        for number in [n for n, (each, _) in self._requesters.items() if each is requester]:
            del self._requesters[number]

    def answer(self, action: Any) -> None:
        """Passes an answer to its requester. Refuses the request if the answer cannot be sent."""
        pending = self._requesters.pop(action.request, None)
        if pending is not None:
            requester, request = pending
            try:
                requester.answer(request, action)
            except Exception as error:
                _log.error("a request could not be answered", exc_info=error)
                requester.answer(request, ac.Deny(request, "internal error", "see the daemon's log"))
        elif isinstance(action, ac.Grant | ac.Reserved) and action.lease:
            _log.debug("an answer came after its requester had left")


class Executor:
    """Owns the placement core and its wake-up timer. `view` is the state of the core."""

    def __init__(self, loop: asyncio.AbstractEventLoop, placement: Placement) -> None:
        self.look_at_devices: Callable[[], None] = lambda: None
        """Called when the state of a device may have changed."""
        self.loop = loop
        self.now = loop.time
        self.view = placement.view
        self.pending = PendingRequests()
        self._placement = placement
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at: float | None = None
        self._closed = False
        self._runs: dict[type, Callable[[Any], None]] = {}
        self._failures: dict[type, Callable[[Any, Exception], None]] = {}

    def on(
        self,
        action: type,
        run: Callable[[Any], None],
        failed: Callable[[Any, Exception], None] = lambda action, error: None,
    ) -> None:
        """Registers the function that executes a type of action. Other actions are answers to requests.

        `failed` receives an action that could not be executed. The other actions of its batch still are.
        """
        self._runs[action] = run
        self._failures[action] = failed

    def close(self) -> None:
        """Ends execution: later events and calls have no effect."""
        if self._timer is not None:
            self._timer.cancel()
        self._closed = True

    # -- events

    def handle(self, event: ev.Event) -> None:
        """Sends an event that has no answer. Has no effect once the daemon has stopped."""
        if not self._closed:
            self._run(self._placement.handle(event, self.loop.time()))

    def ask(self, requester: Requester, request: int, event: Any) -> None:
        """Sends a request. `requester` gets the answer under its number `request`, at once or later."""
        event.request = self.pending.add(requester, request)
        self.handle(event)

    def call(self, event: ev.OpenNamespace) -> ac.Answer | ac.Deny:
        """Sends a request that the core answers at once, and returns the answer."""
        actions = self._placement.handle(event, self.loop.time())
        [answer] = [a for a in actions if isinstance(a, ac.Answer | ac.Deny) and a.request == event.request]
        self._run([action for action in actions if action is not answer])
        return answer

    def _run(self, actions: Iterable[ac.Action]) -> None:
        for action in actions:
            try:
                self._runs.get(type(action), self.pending.answer)(action)
            except Exception as error:
                if not isinstance(error, TierError):
                    _log.error("%s could not be run", type(action).__name__, exc_info=error)
                if type(action) in self._failures:
                    self._failures[type(action)](action, error)
        self._set_timer()

    # -- time and threads

    def post(self, call: Callable[..., None], *args: Any) -> None:
        """Runs a call on the loop, from any thread. Has no effect when the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(call, *args)

    def later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Runs a call on the loop after `delay_s`, unless the daemon has stopped by then."""

        def run() -> None:
            if not self._closed:
                call(*args)

        self.loop.call_later(delay_s, run)

    def _set_timer(self) -> None:
        wake = self._placement.next_wakeup()
        if wake == self._wakes_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = wake
        self._timer = None if wake is None else self.loop.call_at(wake, self._tick)

    def _tick(self) -> None:
        self._wakes_at = None
        self.handle(ev.Tick())
        self.look_at_devices()
