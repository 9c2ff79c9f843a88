"""An engine: a process that serves conversations of one tenant, and compares every byte that it reads."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore import Client, Layout
from kvstore.client.sync import Namespace
from kvstore.errors import KVStoreError
from tests.daemons import names, payload, payloads, room_for

CHAIN = Layout(model="soak", block_bytes=64 << 10)
STATES = Layout(model="soak", block_bytes=16 << 10, kind="independent")
LONGEST = 96
"""Blocks of the longest conversation, without its system prompt."""

_SYSTEMS, _SYSTEM_BLOCKS = 4, 6
"""Conversations share system prompts."""

_DELETED = 8
"""Namespaces of a tenant that are deleted. With a new name each time, there would be more and more."""
_REPORT_EVERY_S = 1.0
_STEPS = {
    "turn": 20, "hold": 3, "prefetch": 3, "abandon": 1, "invalidate": 1, "states": 4, "reconnect": 1,
    "delete_namespace": 1,
}  # fmt: skip


@dataclass(slots=True)
class Report:
    """What an engine has done since its last report: counts, ms of its gets, wrong blocks in words."""

    tenant: str
    counts: Counter[str] = field(default_factory=Counter)
    get_ms: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Engine:
    """A tenant's conversations: their lengths so far, by number. Keys and bytes follow from the number."""

    def __init__(self, url: str, token: str, tenant: str, seed: int) -> None:
        self._client = Client(url, token, deadline_s=5.0)
        self._address = url, token
        self._dice = random.Random(f"{tenant}/{seed}")
        # Tenants use the same keys for other bytes.
        self._salt = ord(tenant[0])
        self._lengths: dict[int, int] = {}
        self._over: Counter[int] = Counter()
        self._conversations = 400
        self.report = Report(tenant)

    def step(self) -> None:
        """Does one thing that engines do. A daemon that is away is a miss."""
        [name] = self._dice.choices(list(_STEPS), list(_STEPS.values()))
        try:
            getattr(self, f"_{name}")()
        except KVStoreError as error:
            why = error.message.partition(":")[0]
            self.report.counts[f"{name}: {type(error).__name__}, {why}"] += 1
        else:
            self.report.counts[name] += 1

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def _space(self, layout: Layout = CHAIN) -> Namespace:
        return self._client.namespace(layout)

    def _keys(self, grow: int = 0) -> list[bytes]:
        """Returns the keys of a conversation, after it has grown. Those of low numbers are more likely.

        As in traces of production, most are short, a few are long, and many begin with the same blocks.
        """
        number = min(int(self._dice.expovariate(1 / 60)), self._conversations - 1)
        first = min(int(self._dice.paretovariate(1.1)), LONGEST // 2)
        length = min(self._lengths.get(number, first) + grow, LONGEST)
        own = names(length, f"{number}/{self._over[number]}")
        self._lengths[number] = length
        if length == LONGEST:
            # It is over. Another one gets its place.
            del self._lengths[number]
            self._over[number] += 1
        return names(_SYSTEM_BLOCKS, f"system {number % _SYSTEMS}") + own

    def _turn(self) -> None:
        """A request: loads the longest stored prefix, and stores the rest."""
        keys, space = self._keys(self._dice.randint(1, 4)), self._space()
        found = space.lookup(keys)
        out = room_for(max(found, 1), CHAIN.block_bytes)
        started = time.monotonic()
        n = space.get(keys[:found], out) if found else 0
        self.report.get_ms.append(1000 * (time.monotonic() - started))
        self._compare(keys[:n], out)
        self.report.counts["hits"] += n
        self.report.counts["misses"] += len(keys) - n
        parent = keys[n - 1] if n else None
        if n < len(keys):
            result = space.put(keys[n:], payloads(keys[n:], CHAIN.block_bytes, self._salt), parent)
            self.report.counts["stored"] += result.stored

    def _hold(self) -> None:
        """A lease that outlives other requests."""
        keys = self._keys()
        with self._space().acquire(keys) as lease:
            time.sleep(self._dice.random() * 0.05)
            out = room_for(len(keys), CHAIN.block_bytes)
            self._compare(keys[: lease.copy_into(out)], out)

    def _prefetch(self) -> None:
        self._space().prefetch(self._keys())

    def _abandon(self) -> None:
        """An engine that gives up a store half way."""
        keys = names(4, f"abandoned {self._dice.random()}")
        with self._space().reserve(keys) as room:
            for view in room.blocks[:2]:
                view[:] = bytes(len(view))

    def _invalidate(self) -> None:
        keys = self._keys()
        self._space().invalidate(keys[self._dice.randrange(_SYSTEM_BLOCKS, len(keys)) :])

    def _states(self) -> None:
        """States of layers: independent blocks at the ends of prefixes."""
        keys, space = self._keys()[-2:], self._space(STATES)
        out = room_for(len(keys), STATES.block_bytes)
        for i, there in enumerate(space.contains(keys)):
            if there and space.get([keys[i]], out[:1]):
                self._compare([keys[i]], out)
            elif not there:
                space.put([keys[i]], payloads([keys[i]], STATES.block_bytes, self._salt))

    def _delete_namespace(self) -> None:
        """A namespace is deleted, and gets other bytes under the same keys."""
        name, nbytes = f"deleted {self._dice.randrange(_DELETED)}", STATES.block_bytes
        keys, out = names(4, name), room_for(4, nbytes)
        with Client(*self._address, deadline_s=5.0, strict=True) as client:
            space = client.namespace(Layout(model=name, block_bytes=nbytes))
            space.put(keys, payloads(keys, nbytes, self._salt))
            space.invalidate()
            if space.get(keys, out):
                self.report.wrong.append(f"{self.report.tenant} read a block of a deleted namespace")
            space.put(keys, payloads(keys, nbytes, self._salt + 1))
            self._compare(keys[: space.get(keys, out)], out, self._salt + 1)

    def _reconnect(self) -> None:
        self._client.close()
        self._client = Client(*self._address, deadline_s=5.0)

    def _compare(self, keys: list[bytes], out: Any, salt: int | None = None) -> None:
        salt = self._salt if salt is None else salt
        for key, block in zip(keys, out, strict=False):
            if not np.array_equal(block, np.frombuffer(payload(key, len(block), salt), np.uint8)):
                self.report.wrong.append(f"{self.report.tenant} read other bytes of {key!r}")


def serve(url: str, token: str, tenant: str, seed: int, steps_per_s: float, stop: Any, reports: Any) -> None:
    """Runs an engine until `stop` is set, at a steady rate. Sends its reports through a pipe."""
    engine = Engine(url, token, tenant, seed)
    next_s, report_s = time.monotonic(), time.monotonic() + _REPORT_EVERY_S
    while not stop.is_set():
        engine.step()
        if time.monotonic() > report_s:
            reports.send(engine.report)
            engine.report, report_s = Report(tenant), time.monotonic() + _REPORT_EVERY_S
        next_s = max(next_s + 1 / steps_per_s, time.monotonic() - 1)
        time.sleep(max(0.0, next_s - time.monotonic()))
    reports.send(engine.report)
    engine.close()
