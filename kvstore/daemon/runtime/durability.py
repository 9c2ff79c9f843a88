"""Durable answers: held back until everything that led to the answer is on all NVMe devices.

A device that was absent during an invalidation must not bring blocks back. Each time the set of devices has
changed, the next durable request raises the generation, which every present device records. A device with an
older generation starts empty (see `kvstore.daemon.tenancy.recovery`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore.core import actions as ac
from kvstore.daemon.runtime.ports import Core, Post, Requester
from kvstore.errors import TierError
from kvstore.tiers.nvme.tier import NvmeTier

Action = ac.Grant | ac.Reserved | ac.Answer | ac.Explained | ac.Deny


class Durability:
    """A `DurableCore`. `generation` counts changes of the set of devices that an invalidation followed."""

    def __init__(self, core: Core, devices: Mapping[str, NvmeTier], post: Post) -> None:
        """`devices` by name. The mapping changes when devices are added or removed."""
        self.generation = 0
        self._core = core
        self._devices = devices
        self._post = post
        self._devices_changed = True

    def devices_changed(self) -> None:
        """Marks that a device was added or removed: an absent device misses the next invalidation."""
        self._devices_changed = True

    def ask(self, requester: Requester, request: int, event: Any) -> None:
        """Sends a request. Its answer goes to `requester` when the effect is on all devices."""
        if self._devices_changed:
            self._devices_changed = False
            self.generation += 1
            for device in self._devices.values():
                device.put_generation(self.generation)
        if self._devices:
            requester = _DurableAnswer(requester, self._devices, self._post)
        self._core.ask(requester, request, event)


class _DurableAnswer:
    """A requester that holds an answer back until all devices are durable."""

    def __init__(self, requester: Requester, devices: Mapping[str, NvmeTier], post: Post) -> None:
        self._requester = requester
        self._devices = devices
        self._post = post

    def answer(self, request: int, action: Action) -> None:
        """See Requester."""
        waits_for, outcome = len(self._devices), action
        if not waits_for:
            self._requester.answer(request, action)

        def done(error: Exception | None) -> None:
            self._post(ended, error)

        def ended(error: Exception | None) -> None:
            nonlocal waits_for, outcome
            waits_for -= 1
            if error is not None:
                hint = "the blocks are misses now, but may come back after a restart"
                outcome = ac.Deny(request, f"it could not be recorded: {error}", hint)
            if not waits_for:
                self._requester.answer(request, outcome)

        for device in self._devices.values():
            try:
                device.when_durable(done)
            except TierError as refused:
                done(refused)
