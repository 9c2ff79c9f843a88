"""Sends events to the placement core and executes the actions that come back.

Everything runs on the event loop's thread. Callbacks of tiers come on other threads and are posted to the
loop. Each type of action has one function. Rooms register theirs with `on`. No policy is here: the core
decides which block goes where.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.placement import Placement
from kvstore.core.queues.device_queue import FENCED
from kvstore.daemon.runtime.pending_requests import PendingRequests
from kvstore.daemon.runtime.ports import EventLog, Problems, Requester
from kvstore.daemon.runtime.tier_actions import TierActions
from kvstore.daemon.runtime.tier_set import DRAM
from kvstore.errors import TierError

_log = logging.getLogger(__name__)


class Executor:
    """A `Core`. Owns the placement core and its wake-up timer."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        placement: Placement,
        event_log: EventLog,
        problems: Problems,
    ) -> None:
        self.dram_ready = asyncio.Event()
        """Set when the first DRAM extent can be used, or none will come."""
        self.look_at_devices: Callable[[], None] = lambda: None
        """Called when the state of a device may have changed."""
        self.pending = PendingRequests()
        self._loop = loop
        self._placement = placement
        self._event_log = event_log
        self._problems = problems
        self._tier_actions: TierActions
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at: float | None = None
        self._closed = False
        self._runs: dict[type, Callable[[Any], None]] = {}

    def on(self, action: type, run: Callable[[Any], None]) -> None:
        """Registers the function that executes a type of action. Other actions are answers to requests."""
        self._runs[action] = run

    def use(self, tier_actions: TierActions) -> None:
        """Executes actions on storage tiers by these functions."""
        self._tier_actions = tier_actions
        for action, run in tier_actions.run_by_type.items():
            self.on(action, run)

    def close(self) -> None:
        """Ends execution: later events and calls of tiers have no effect."""
        if self._timer is not None:
            self._timer.cancel()
        self._closed = True

    # -- Core

    def now(self) -> float:
        """See Core."""
        return self._loop.time()

    def handle(self, event: ev.Event) -> None:
        """See Core."""
        if not self._closed:
            self._run(self._placement.handle(event, self._loop.time()))

    def ask(self, requester: Requester, request: int, event: Any) -> None:
        """See Core."""
        event.request = self.pending.add(requester, request)
        self.handle(event)

    def call(self, event: ev.OpenNamespace) -> ac.Answer | ac.Deny:
        """See Core."""
        actions = self._placement.handle(event, self._loop.time())
        [answer] = [a for a in actions if isinstance(a, ac.Answer | ac.Deny) and a.request == event.request]
        self._run([action for action in actions if action is not answer])
        return answer

    def leave(self, requester: Requester) -> None:
        """Drops the answers that a requester still waits for."""
        self.pending.forget(requester)

    # -- time and threads

    def post(self, call: Callable[..., None], *args: Any) -> None:
        """Runs a call on the loop, from any thread. Has no effect when the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)

    def later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Runs a call on the loop after `delay_s`, unless the daemon has stopped by then."""

        def run() -> None:
            if not self._closed:
                call(*args)

        self._loop.call_at(self.now() + delay_s, run)

    def _set_timer(self) -> None:
        wake = self._placement.next_wakeup()
        if wake == self._wakes_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = wake
        self._timer = None if wake is None else self._loop.call_at(wake, self._tick)

    def _tick(self) -> None:
        self._wakes_at = None
        self.handle(ev.Tick())
        self.look_at_devices()

    # -- actions

    def _run(self, actions: Iterable[ac.Action]) -> None:
        for action in actions:
            try:
                self._runs.get(type(action), self.pending.answer)(action)
            except Exception as error:
                self._failed(action, error)
        self._set_timer()

    def _failed(self, action: ac.Action, error: Exception) -> None:
        """Handles an action that could not be executed. The other actions of its batch still are.

        Where the core and a tier would disagree from now on, the device is fenced or the daemon crashes. A
        crash is safe: checksums prove what it leaves, and no unanswered request was promised.
        """
        what = f"{type(action).__name__} could not be run"
        reason = error if isinstance(error, TierError) else TierError(f"{what}: {error!r}")
        if not isinstance(error, TierError):
            _log.error("%s", what, exc_info=error)
        if isinstance(action, ac.RenewExtent):
            self.post(self._tier_actions.not_renewed, action.tier, action.extent, reason)
        elif isinstance(action, ac.RemoveExtent):
            self.post(self._tier_actions.removed, action, reason)
        elif isinstance(action, ac.MakeExtents):
            self.post(self._extents_end, action.tier, reason)
        elif isinstance(action, ac.Drop | ac.FormatExtent | ac.WriteHeader):
            device = action.tier != DRAM and isinstance(error, TierError)
            (self._fence if device else self._crash)(action.tier, reason)

    def _fence(self, tier: int, reason: TierError) -> None:
        """Stops all reads and writes of a device that has not kept what it was given."""
        self._problems.report(f"{self._name_of(tier)} is fenced: {reason}")
        self.post(self.handle, ev.SetDevice(tier, FENCED))

    def _crash(self, tier: int, reason: TierError) -> None:
        _log.critical("the core and %s disagree: %s", self._name_of(tier), reason)
        logging.shutdown()
        os.abort()

    # -- reports of tiers

    def reporters(self, tier: int) -> tuple[Callable[[int], None], Callable[[TierError | None], None]]:
        """Returns callbacks for the thread that makes a tier's extents."""

        def ready(extent: int) -> None:
            self.post(self.extent_ready, ev.ExtentReady(tier, extent))

        def ended(error: TierError | None) -> None:
            self.post(self._extents_end, tier, error)

        return ready, ended

    def extent_ready(self, event: ev.ExtentReady) -> None:
        """Sends the event to the core and logs a renewed extent."""
        self.handle(event)
        if event.replaces >= 0:
            self.note("renewed", event.tier, f"extent {event.replaces} is extent {event.extent} now")
        if event.tier == DRAM:
            self.dram_ready.set()

    def _extents_end(self, tier: int, error: TierError | None) -> None:
        if error is not None:
            self._problems.report(str(error))
        self.handle(ev.ExtentsEnd(tier))
        if tier == DRAM:
            self.dram_ready.set()

    def copied(self, event: ev.CopyDone) -> None:
        """Sends the event to the core and reports devices that changed their state."""
        self.handle(event)
        self.look_at_devices()

    def problem(self, error: TierError) -> None:
        """Reports a problem of a tier."""
        self._problems.report(str(error))

    def note(self, kind: str, tier: int, detail: str) -> None:
        """Adds an entry about a tier to the event log."""
        self._event_log.add(kind, tier=self._name_of(tier), detail=detail)

    def _name_of(self, tier: int) -> str:
        return self._placement.view.tiers[tier].name
