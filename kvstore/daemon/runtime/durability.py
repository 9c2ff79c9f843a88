"""Durable answers: delays an answer until the request's effect is on all NVMe devices.

A device that was absent during a deletion must not bring blocks back. So each set of devices is a generation
with a random name (see `kvstore.tiers.nvme.generations`). The first durable answer after the set has changed
raises the generation in two steps: the name is durable as *prepared* on all present devices before any of
them records it as *committed*, and it is durable as committed on all before the answer. Why this is right:

- After a cut before the answer, either no device shows the name as committed, or all present ones show it.
  So none of them counts as older, and none has missed anything.
- After the answer, each present device shows the name as committed, whichever devices it starts with next. A
  device that was absent does not show it, so it starts empty.
- An answer needs a generation of exactly the devices that are present when it is sent. If the set changes
  while it waits, the generation is raised again, with another name: a device that left may show the last.
- The effect itself may be on record before the name is: nothing is promised before the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvstore.core import actions as ac
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.runtime.ports import Ended, Requester
from kvstore.daemon.runtime.tier_set import TierSet
from kvstore.errors import TierError
from kvstore.tiers.nvme.generations import NAME_BYTES, History
from kvstore.tiers.nvme.journal import Done, Journal


class Durability:
    """Sends durable requests to the core. `history` is what the present devices have seen."""

    def __init__(self, core: Executor, tiers: TierSet, random_bits: Callable[[int], int]) -> None:
        """`random_bits` returns a number of that many random bits."""
        self.history = History()
        self._core = core
        self._tiers = tiers
        self._random_bits = random_bits
        self._prepared_changes = -1
        self._committed_changes = -1
        self._waiting: list[Ended] = []

    def new_name(self) -> bytes:
        """Returns a random name for a generation."""
        return self._random_bits(8 * NAME_BYTES).to_bytes(NAME_BYTES, "big")

    def ask(self, requester: Requester, request: int, event: Any) -> None:
        """Sends a request. Its answer goes to `requester` when the effect is on all devices."""
        if self._tiers.devices:
            requester = _DurableAnswer(requester, self)
        self._core.ask(requester, request, event)

    def settle(self, done: Ended) -> None:
        """Calls `done` when all changes so far are durable on the devices of a committed generation.

        `done` gets the error if they cannot be made durable. Never calls it before it returns.
        """
        changes = self._tiers.changes
        if self._committed_changes == changes:
            self._on_all(Journal.when_durable, partial(self._settled, changes, done))
            return
        self._waiting.append(done)
        if len(self._waiting) == 1:
            self._raise(changes)

    def _settled(self, changes: int, done: Ended, error: Exception | None) -> None:
        if error is None and changes != self._tiers.changes:
            self.settle(done)
        else:
            done(error)

    # -- raising the generation

    def _raise(self, changes: int) -> None:
        # After a failure, the same devices are given the same name again.
        if self._prepared_changes != changes:
            self._prepared_changes = changes
            self.history = self.history.prepare(self.new_name())
        self._record(self.history, partial(self._prepared, changes))

    def _prepared(self, changes: int, error: Exception | None) -> None:
        if error is not None:
            self._raised(error)
            return
        history = self.history.commit()
        self._record(history, partial(self._committed, changes, history))

    def _committed(self, changes: int, history: History, error: Exception | None) -> None:
        if error is None:
            self.history, self._committed_changes = history, changes
        self._raised(error)

    def _raised(self, error: Exception | None) -> None:
        waiting, self._waiting = self._waiting, []
        for done in waiting:
            if error is None:
                self.settle(done)
            else:
                done(error)

    def _record(self, history: History, done: Ended) -> None:
        def record(journal: Journal, recorded: Done) -> None:
            journal.put_generations(history)
            journal.when_durable(recorded)

        self._on_all(record, done)

    def _on_all(self, begin: Callable[[Journal, Done], None], done: Ended) -> None:
        """Begins something on all devices. Calls `done` on the loop when all have ended, with an error."""
        devices = list(self._tiers.devices.values())
        left, failure = len(devices) + 1, None

        def ended(error: Exception | None) -> None:
            nonlocal left, failure
            left -= 1
            failure = error or failure
            if not left:
                done(failure)

        for device in devices:
            try:
                begin(device.journal, partial(self._core.post, ended))
            except TierError as refused:
                self._core.post(ended, refused)
        self._core.post(ended, None)  # also ends if there are no devices


@dataclass(slots=True, eq=False)
class _DurableAnswer:
    """A requester that delays an answer until all devices are durable."""

    _requester: Requester
    _durability: Durability

    def answer(self, request: int, action: ac.Reply) -> None:
        """See Requester."""

        def settled(error: Exception | None) -> None:
            outcome = action
            if error is not None:
                hint = "the blocks are misses now, but may come back after a restart"
                outcome = ac.Deny(request, f"it could not be recorded: {error}", hint)
            self._requester.answer(request, outcome)

        self._durability.settle(settled)
