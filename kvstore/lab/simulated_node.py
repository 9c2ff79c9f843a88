"""A simulated node: the production `Placement` in virtual time, without bytes.

It simulates an engine that looks up a prompt, reads the stored prefix and puts the rest, and an executor
with all extents ready, in which copies succeed at once. No request waits.

Not covered: the duration of copies, damaged bytes, tenants.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.config.units import parse_write_budget
from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.placement import Placement
from kvstore.core.policy.admission import Rule
from kvstore.errors import KVStoreError
from kvstore.lab.capacity import Capacities
from kvstore.lab.workload import mix
from kvstore.types import Tier

CHAIN = 1
"""The namespace of the blocks of full attention."""
_CLIENT = 1
_ANSWERS = (ac.Grant, ac.Reserved, ac.Answer, ac.Presence, ac.Deny)
_SPARE_ROWS = 1 << 16
_SEED = 1


def _rule(options: dict[str, Any], limit_bytes: int) -> Rule:
    """Removes the admission settings from `options` and returns them."""
    budget = parse_write_budget(options.pop("write_budget", 0), limit_bytes)
    return Rule(options.pop("admission", "always"), float(options.pop("admission_threshold", 0.2)), budget)


class SimulatedNode:
    """One node that serves prompts.

    `options` are arguments of Placement, such as `policy` and `write_policy`, or the admission settings of
    NVMe: `admission`, `admission_threshold`, `write_budget`. `hits`: blocks served, by tier number. `denied`:
    blocks that found no free slot; blocks that the policy did not admit do not count. `spare_rows`: rows of
    the block table beyond two for each slot.
    """

    def __init__(
        self,
        capacities: Capacities,
        block_bytes: int,
        options: Mapping[str, Any] | None = None,
        spare_rows: int = _SPARE_ROWS,
    ) -> None:
        specs = [capacity.spec(block_bytes) for capacity in capacities]
        options = dict(options or {})
        rule = _rule(options, specs[-1].limit_bytes)
        for spec in specs[1:]:
            spec.admission = rule
        slots = sum(capacity.blocks(block_bytes) for capacity in capacities)
        self.placement = Placement(specs, max_blocks=2 * slots + spare_rows, seed=_SEED, **options)
        self.hits = np.zeros(len(Tier), np.int64)
        self.denied = 0
        self._now = 0.0
        self._request = 0
        self._nothing = np.zeros(self.placement.view.limits.reserve_keys, np.uint64)
        self._written = np.ones(self.placement.view.limits.reserve_keys, np.bool_)
        self._ask(ev.OpenNamespace(0, CHAIN, block_bytes))
        for tier, spec in enumerate(specs):
            for extent in range(spec.limit_bytes // spec.extent_bytes):
                self._send(ev.ExtentReady(tier, extent))
            self._send(ev.ExtentsEnd(tier))

    def prompt(self, keys: Keys, now: float) -> int:
        """Reads the stored prefix and puts the rest. `now`: seconds, monotonic. Returns the blocks served."""
        self.pass_time(now)
        found = self._get(CHAIN, keys.take(0, self._lookup(keys)))
        if found < keys.n:
            self._put(CHAIN, keys, found)
        return found

    def pass_time(self, now: float) -> None:
        """Goes on to the time `now`, in seconds."""
        if now <= self._now:
            return
        self._now = now
        if self._is_due():
            self._send(ev.Tick())

    def _lookup(self, keys: Keys) -> int:
        found, batch = 0, self.placement.view.limits.batch_keys
        while found < keys.n:
            part = keys if keys.n <= batch else keys.take(found, min(found + batch, keys.n))
            n = self._ask(ev.Lookup(0, CHAIN, part)).value
            found += n
            if n < part.n:
                break
        return found

    def _get(self, namespace: int, keys: Keys) -> int:
        tiers = self._read(namespace, keys)
        self.hits += np.bincount(tiers, minlength=len(self.hits))
        return len(tiers)

    def _read(self, namespace: int, keys: Keys) -> npt.NDArray[np.int64]:
        """Reads the stored prefix. Returns the tier that served each block."""
        # A lease may cover less than the request without room in DRAM; only an empty lease ends the prefix.
        have, batch = 0, self.placement.view.limits.batch_keys
        tiers: list[int] = []
        while have < keys.n:
            part = keys.take(have, min(have + batch, keys.n))
            grant = self._ask(ev.Acquire(0, _CLIENT, namespace, part, inf))
            if not grant.lease:
                break
            tiers += grant.slots["tier"].tolist()
            have += len(grant.slots)
            self._send(ev.Release(_CLIENT, grant.lease))
        return np.array(tiers, np.int64)

    def _put(self, namespace: int, keys: Keys, have: int, chain_key: bytes = b"") -> None:
        """Stores the keys after the first `have`: of the chain, or blocks that belong to its `chain_key`."""
        step = self.placement.view.limits.reserve_keys
        for at in range(have, keys.n, step):
            part = keys.take(at, min(at + step, keys.n))
            parent = keys[at - 1] if at and namespace == CHAIN else b""
            event = ev.Reserve(0, _CLIENT, namespace, part, parent, inf, 0, CHAIN, chain_key)
            reserved = self._ask(event)
            n = len(reserved.slots)
            if n:
                self._ask(ev.Commit(0, _CLIENT, reserved.lease, self._nothing[:n], self._written[:n]))
            refused = int(np.count_nonzero(reserved.status == ac.DENIED))
            if refused:
                # The following blocks would have no parent in the store.
                if reserved.why == ac.NO_ROOM:
                    self.denied += refused + keys.n - at - part.n
                return

    def _ask(self, event: Any) -> Any:
        self._request += 1
        event.request = self._request
        answer = self._send(event)
        if answer is None or isinstance(answer, ac.Deny):
            why = answer.why if answer is not None else "no answer"
            raise KVStoreError(f"{type(event).__name__} was refused: {why}", getattr(answer, "hint", ""))
        return answer

    def _send(self, event: Any) -> Any:
        """Handles an event and every event that its actions lead to. Returns the answer to the first."""
        answer = None
        todo = deque((event,))
        while todo:
            for action in self.placement.handle(todo.popleft(), self._now):
                if isinstance(action, ac.Copy):
                    todo.append(ev.CopyDone(action.transfer, np.zeros(len(action.identity), np.uint8)))
                elif isinstance(action, ac.Probe):
                    todo.append(ev.ProbeDone(action.probe, np.zeros(len(action.identity), np.uint8)))
                elif isinstance(action, ac.RenewExtent):
                    todo.append(ev.ExtentReady(action.tier, action.extent, replaces=action.extent))
                elif isinstance(action, _ANSWERS) and action.request:
                    answer = action
                else:
                    self._observe(action)
            if not todo and self._is_due():
                todo.append(ev.Tick())
        return answer

    def _observe(self, action: ac.Action) -> None:
        """Called with the actions that this node does not execute."""

    def _is_due(self) -> bool:
        wake = self.placement.next_wakeup()
        return wake is not None and wake <= self._now


def keys_of(numbers: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.uint64]:
    """Returns a key for each block number."""
    return mix(numbers.astype(np.uint64))
