"""Durable answers: delays an answer until the request's effect is on all NVMe devices.

A device that was absent during an invalidation must not bring blocks back. Each time the set of devices has
changed, the next durable request raises the generation, which every present device records. A device with an
older generation starts empty (see `kvstore.daemon.tenancy.recovery`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvstore.core import actions as ac
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.runtime.ports import Requester
from kvstore.daemon.runtime.tier_set import TierSet
from kvstore.errors import TierError


class Durability:
    """Sends durable requests to the core.

    `generation` counts changes of the set of devices that an invalidation followed.
    """

    def __init__(self, core: Executor, tiers: TierSet) -> None:
        self.generation = 0
        self._core = core
        self._tiers = tiers
        self._recorded_changes = -1

    def ask(self, requester: Requester, request: int, event: Any) -> None:
        """Sends a request. Its answer goes to `requester` when the effect is on all devices."""
        if self._tiers.changes != self._recorded_changes:
            self._recorded_changes = self._tiers.changes
            self.generation += 1
            for device in self._tiers.devices.values():
                device.journal.put_generation(self.generation)
        if self._tiers.devices:
            requester = _DurableAnswer(requester, self._core, self._tiers)
        self._core.ask(requester, request, event)


@dataclass(slots=True, eq=False)
class _DurableAnswer:
    """A requester that delays an answer until all devices are durable."""

    _requester: Requester
    _core: Executor
    _tiers: TierSet

    def answer(self, request: int, action: ac.Reply) -> None:
        """See Requester."""
        waits_for, outcome = len(self._tiers.devices), action
        if not waits_for:
            self._requester.answer(request, action)

        def done(error: Exception | None) -> None:
            self._core.post(ended, error)

        def ended(error: Exception | None) -> None:
            nonlocal waits_for, outcome
            waits_for -= 1
            if error is not None:
                hint = "the blocks are misses now, but may come back after a restart"
                outcome = ac.Deny(request, f"it could not be recorded: {error}", hint)
            if not waits_for:
                self._requester.answer(request, outcome)

        for device in self._tiers.devices.values():
            try:
                device.journal.when_durable(done)
            except TierError as refused:
                done(refused)
